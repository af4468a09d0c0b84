"""The escape attempts of a hostile agent. `test_escape.py` runs it in a sandbox; it prints the results as JSON.

It knows only what an agent can know, and `GUESSES` about the host, which the test passes. Secrets to search for are scrambled, so that the
search does not find its own input. Standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import base64
import glob
import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

BASE, KEY = os.environ["TURNGATE_BASE_URL"], os.environ["TURNGATE_API_KEY"]
PORT = int(BASE.rpartition(":")[2])
HOME = os.environ["HOME"]
GUESSES = json.loads(base64.b64decode(sys.argv[1]))
WAIT_S, QUIET_S = GUESSES["wait_s"], GUESSES["quiet_s"]  # for the first reply, and for further ones
with open(f"{HOME}/.turngate/target") as file:
    TARGET = file.read().strip()


def connect(route):
    """Connect to the relay, or directly to the door."""
    if route == "relay":
        return socket.create_connection(("127.0.0.1", PORT), timeout=WAIT_S)
    door = socket.socket(socket.AF_UNIX)
    door.settimeout(WAIT_S)
    door.connect(TARGET[len("unix:") :])
    return door


def send_raw(data, route="relay"):
    """Send bytes, and return all replies as text without waiting for the end of a kept connection."""
    reply = b""
    try:
        with connect(route) as connection:
            connection.sendall(data)
            while len(reply) < 200_000:
                connection.settimeout(QUIET_S if reply else WAIT_S)
                piece = connection.recv(65536)
                if not piece:
                    break
                reply += piece
    except OSError as error:
        return reply.decode("latin-1") or f"error {error}"
    return reply.decode("latin-1")


def call(method, path, body=None, route="relay", headers=()):
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", f"content-length: {len(data)}"]
    return send_raw(("\r\n".join([*lines, *headers]) + "\r\n\r\n").encode("latin-1") + data, route)


def key_headers(key):
    """Return the headers in which servers accept a key."""
    return [f"authorization: Bearer {key}", f"x-api-key: {key}", f"x-goog-api-key: {key}"]


def chat(**more):
    return {"model": os.environ["TURNGATE_MODEL"], "messages": [{"role": "user", "content": "Hi"}], **more}


# ---- the admin API and other sessions ----

OWN, OTHER = GUESSES["session"], GUESSES["other"]
ADMIN_PATHS = [
    "/admin/sessions",
    "/admin/sessions?limit=1000",
    f"/admin/sessions/{OWN}",
    f"/admin/sessions/{OWN}/trace",
    f"/admin/sessions/{OWN}/samples?all=1",
    f"/admin/sessions/{OWN}/events",
    f"/admin/sessions/{OTHER}/trace",
    "/admin/events",
    "/admin/fence",
    "/health",
    f"/s/{OWN}/v1/models",
    f"/s/{OTHER}/v1/models",
    f"/v1/rollouts/{OWN}/trajectory",
    f"/v1/rollouts/{OTHER}/trajectory",
]
OBFUSCATED_PATHS = [
    "//admin/sessions",
    "/./admin/sessions",
    "/v1/../admin/sessions",
    "/v1/models/../../admin/sessions",
    "/v1/%2e%2e/admin/sessions",
    "/v1/models/%2e%2e/%2e%2e/admin/sessions",
    "/v1/models/..%2f..%2fadmin%2fsessions",
    "/v1/models/..%5c..%5cadmin%5csessions",
    "/v1/models/%252e%252e%252fadmin",
    "/%61dmin/sessions",
    "/ADMIN/sessions",
    "/admin;/sessions",
    "/v1;/admin/sessions",
    "/v1/models/x#/../admin/sessions",
    "/v1/models?/../../admin/sessions",
    f"http://127.0.0.1:{GUESSES['port']}/admin/sessions",
    "http://localhost/admin/sessions",
    "/v1/models/..;/..;/admin/sessions",
    "/\\admin\\sessions",
    "/v1/models/\x01/../admin",
]
POST_REQUESTS = [
    ("/admin/sessions", {}),
    (f"/admin/sessions/{OWN}/seal", {}),
    (f"/admin/sessions/{OTHER}/cancel", {}),
    ("/admin/fence/pause", {"mode": "hold"}),
    (f"/s/{OTHER}/v1/chat/completions", chat()),
    (f"/s/{OWN}/v1/chat/completions", chat()),
    (f"/v1/rollouts/{OTHER}/chat/completions", chat()),
    ("/v1/rollouts/mine/register", {"model": "m"}),
    (f"/v1/rollouts/{OTHER}/cancel", {}),
    (f"/v1/chat/completions/../../s/{OTHER}/v1/chat/completions", chat()),
    (f"/v1beta/models/x:generateContent/../../../admin/sessions/{OTHER}", {}),
]
SMUGGLED = f"GET /admin/sessions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n\r\n"
SMUGGLING_REQUESTS = {
    "behind a request": f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n{SMUGGLED}",
    "two lengths": f"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\ncontent-length: {len(SMUGGLED)}\r\n\r\n{SMUGGLED}",
    "length and chunks": "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "chunks and length": "POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n"
    + f"{len(SMUGGLED):x}\r\n{SMUGGLED}\r\n0\r\n\r\n",
    "a bare line feed": f"GET /v1/models HTTP/1.1\nhost: x\n\n{SMUGGLED}",
    "in the path": "GET /v1/models HTTP/1.1\r\nhost: x\r\nx: y\r\n\r\nGET /admin/sessions HTTP/1.1\r\nhost: x\r\n\r\n",
    "another host": f"GET http://127.0.0.1:{GUESSES['port']}/admin/sessions HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    "a tunnel": f"CONNECT 127.0.0.1:{GUESSES['port']} HTTP/1.1\r\nhost: x\r\n\r\n{SMUGGLED}",
    "an upgrade": "GET /admin/sessions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    "another path by header": "POST /v1/models HTTP/1.1\r\nhost: x\r\nx-original-url: /admin/sessions\r\nx-rewrite-url: /admin/sessions\r\n"
    "x-http-method-override: GET\r\nx-forwarded-for: 127.0.0.1\r\nforwarded: for=127.0.0.1\r\ncontent-length: 0\r\n\r\n",
}


def try_admin_api():
    """Try every path to the admin API with every key that an agent has or can guess."""
    found = {}
    for route in ("relay", "door"):
        for key in (KEY, "", "admin", OTHER):
            for path in ADMIN_PATHS + OBFUSCATED_PATHS:
                found[f"{route} GET {path} {key[:5]}"] = call("GET", path, None, route, key_headers(key) if key else ())
            for path, body in POST_REQUESTS:
                found[f"{route} POST {path} {key[:5]}"] = call(
                    "POST", path, body, route, key_headers(key) if key else ()
                )
            found[f"{route} DELETE {key[:5]}"] = call(
                "DELETE", f"/admin/sessions/{OTHER}", None, route, key_headers(key)
            )
        with ThreadPoolExecutor(len(SMUGGLING_REQUESTS)) as pool:  # each waits until its connection is quiet
            sent = {n: pool.submit(send_raw, data.encode("latin-1"), route) for n, data in SMUGGLING_REQUESTS.items()}
            found.update((f"{route} {name}", reply.result()) for name, reply in sent.items())
    return found


def call_without_key():
    """Make model calls without the right key."""
    found = {}
    for key in ("", "admin", OTHER, OWN, KEY[:-1], KEY.upper(), GUESSES["other_digest"]):
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1beta/models/m:generateContent"):
            body = chat(input="Hi", max_tokens=5, contents=[{"parts": [{"text": "Hi"}]}])
            found[f"{path} {key[:6]!r}"] = call("POST", path, body, "relay", key_headers(key) if key else ())
    return found


# ---- token ids and log-probabilities ----


def request_token_data():
    """Make every request for which some provider or engine returns token data."""
    model = os.environ["TURNGATE_MODEL"]
    options = {
        "logprobs": True,
        "top_logprobs": 5,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "prompt_logprobs": 1,
        "echo": True,
        "return_logprob": True,
        "include_token_ids": True,
    }
    prompt = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}
    requests = {
        **{f"chat, {name}": ("/v1/chat/completions", chat(**{name: value})) for name, value in options.items()},
        "chat": ("/v1/chat/completions", chat()),
        "completions": ("/v1/completions", {"model": model, "prompt": "Hi", "logprobs": 5, "echo": True}),
        "responses": ("/v1/responses", {"model": model, "input": "Hi"}),
        "responses, top_logprobs": ("/v1/responses", {"model": model, "input": "Hi", "top_logprobs": 5}),
        "responses, include": (
            "/v1/responses",
            {"model": model, "input": "Hi", "include": ["message.output_text.logprobs"]},
        ),
        "messages": ("/v1/messages", {**chat(), "max_tokens": 50, "logprobs": True, "return_token_ids": True}),
        "gemini": (f"/v1beta/models/{model}:generateContent", prompt),
        "gemini, logprobs": (
            f"/v1beta/models/{model}:generateContent",
            {**prompt, "generationConfig": {"responseLogprobs": True, "logprobs": 5}},
        ),
        "models": ("/v1/models", None),
    }
    found = {}
    for name, (path, body) in requests.items():
        found[name] = call("GET" if body is None else "POST", path, body, "relay", key_headers(KEY))
        if body is not None:
            stream = path.replace(":generateContent", ":streamGenerateContent?alt=sse")
            more = {} if "gemini" in name else {"stream": True}
            found[f"{name}, streamed"] = call("POST", stream, {**body, **more}, "relay", key_headers(KEY))
    return found


# ---- files and processes ----


def access_files():
    found = {}
    for path in GUESSES["files"]:
        try:
            names = os.listdir(path) if os.path.isdir(path) else None
            with open(path, "rb") if names is None else open(os.devnull, "rb") as file:
                found[path] = "listed " + " ".join(names[:5]) if names is not None else f"read {len(file.read(100))}"
        except OSError as error:
            found[path] = f"no: {error.strerror}"
    for path in GUESSES["writes"]:
        try:
            with open(path, "w") as file:
                file.write("from inside")
            found[f"write {path}"] = "written"
        except OSError as error:
            found[f"write {path}"] = f"no: {error.strerror}"
    return found


def read_processes():
    """Read command lines and environments of all visible processes."""
    found = []
    for folder in glob.glob("/proc/[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                with open(f"{folder}/{name}", "rb") as file:
                    found.append((f"{folder}/{name}", file.read()))
            except OSError:
                pass
    return found


def find_secrets():
    """Search variables, processes and files for secrets of others."""
    needles = {name: base64.b64decode(text)[::-1] for name, text in GUESSES["secrets"].items()}
    found = []
    places = [(f"variable {name}", value.encode("utf-8", "surrogateescape")) for name, value in os.environ.items()]
    if GUESSES["look_at_processes"]:
        places += read_processes()
    for top in GUESSES["look_in"] + [HOME, os.getcwd()]:
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    if os.path.isfile(path) and os.path.getsize(path) < 5_000_000:
                        with open(path, "rb") as file:
                            places.append((path, file.read()))
                except OSError:
                    pass
    for where, data in places:
        found += [f"{name} in {where}" for name, needle in needles.items() if needle in data]
    own = [where for where, data in read_processes() if where.endswith("cmdline") and KEY.encode() in data]
    return {"found": found, "own key in": own, "looked at": len(places)}


# ---- the network ----


def reach_network():
    found = {}
    for host, port in GUESSES["addresses"]:
        try:
            with socket.create_connection((host, port), timeout=3):
                found[f"tcp {host} {port}"] = "reached"
        except OSError as error:
            found[f"tcp {host} {port}"] = f"no: {error}"
    for host in ("1.1.1.1", "169.254.169.254", "255.255.255.255"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(2)
            try:
                udp.sendto(
                    b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01",
                    (host, 53),
                )
                udp.recv(512)
                found[f"udp {host}"] = "answered"
            except OSError as error:
                found[f"udp {host}"] = f"no: {error}"
    for kind in ("SOCK_RAW", "AF_PACKET"):
        try:
            family = socket.AF_INET if kind == "SOCK_RAW" else socket.AF_PACKET
            socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_ICMP if kind == "SOCK_RAW" else 0).close()
            found[kind] = "made"
        except OSError as error:
            found[kind] = f"no: {error}"
    try:
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.connect("\0" + GUESSES["abstract"])
            found["abstract socket"] = "reached"
    except OSError as error:
        found["abstract socket"] = f"no: {error}"
    try:
        socket.getaddrinfo("example.com", 80)
        found["name"] = "resolved"
    except OSError as error:
        found["name"] = f"no: {error}"
    found["interfaces"] = " ".join(sorted(name for _, name in socket.if_nameindex()))
    return found


ATTEMPTS = {
    "doors": try_admin_api,
    "keyless": call_without_key,
    "tokens": request_token_data,
    "files": access_files,
    "secrets": find_secrets,
    "network": reach_network,
}
print(json.dumps({name: ATTEMPTS[name]() for name in GUESSES["attempts"]}))
