"""The program of a hostile agent: it runs in a sandbox, tries every probe of `probes.py`, and prints what each one got as JSON.

`GIVEN` is what the attacker knows or guesses; the control gives it more. A probe returns what it got, or "" if it got nothing. Standard
library only, Python 3.8 and newer.
"""

from __future__ import annotations

import glob
import json
import os
import select
import socket
import stat
import sys
import urllib.error
import urllib.request

GIVEN = {}
LIMIT_S = 30.0


def request(method, path, body=None, url="", **headers):
    """Send a request, and return the status and the text of the reply."""
    key = GIVEN["key"]
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}", "x-api-key": key, **headers}
    if GIVEN["cookie"]:
        headers["cookie"] = GIVEN["cookie"]
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request((url or GIVEN["url"]) + path, data, headers, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(call, timeout=LIMIT_S) as reply:
            return reply.status, reply.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")
    except OSError as error:
        return 0, str(error)


def succeed(*calls):
    """Return the requests that succeeded, with the beginning of each reply."""
    replies = [(" ".join(call[:2]), request(*call)) for call in calls]
    return "; ".join(f"{name}: {text[:200]}" for name, (status, text) in replies if status == 200)


def chat(**more):
    return {"model": os.environ["TURNGATE_MODEL"], "messages": [{"role": "user", "content": "Hi"}], **more}


def find_text(text, places):
    """Return the files among `places` that contain a text."""
    found = []
    for path in places:
        try:
            with open(path, "rb") as file:
                if text.encode() in file.read(50_000_000):
                    found.append(path)
        except OSError:
            pass
    return " ".join(found)


# ---- files ----


def read_host_files():
    return find_text("", GIVEN["host_files"])


def read_rewards_in_store():
    return find_text(GIVEN["hidden_grade"], glob.glob(GIVEN["store"] + "*"))


def read_traces_in_store():
    return find_text(GIVEN["other_words"], glob.glob(GIVEN["store"] + "*"))


def read_hidden_tests():
    names = [os.path.join(folder, name) for folder, _, files in os.walk(GIVEN["hidden_tests"]) for name in files]
    for top in ("/tests", "/solution", "/logs") if names else ("/tests", "/solution", "/logs", "/tmp", "/opt", "/var"):
        for folder, _, files in os.walk(top):
            names += [os.path.join(folder, name) for name in files if name.endswith((".py", ".sh"))][:2000]
    return find_text(GIVEN["expected_answer"], names)


def read_other_sandbox():
    return find_text(GIVEN["neighbor_file"], [GIVEN["neighbor_path"]])


def write_host_files():
    written = []
    for path in GIVEN["writes"]:
        try:
            with open(path, "w") as file:
                file.write("from inside")
            written.append(path)
        except OSError:
            pass
    return " ".join(written)


def reach_devices():
    """Make and open devices of the host: its memory, its disks, and loop devices, which turn a file into a disk."""
    found = []
    for name, kind, major, minor in GIVEN["device_nodes"]:
        path = os.path.join(os.getcwd(), "device-" + name)
        try:
            os.mknod(path, (stat.S_IFCHR if kind == "c" else stat.S_IFBLK) | 0o600, os.makedev(major, minor))
        except OSError:
            continue
        found.append("made " + name)
        os.unlink(path)
    for path in [path for pattern in GIVEN["devices"] for path in glob.glob(pattern)]:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            found.append("opened " + path)
        except OSError:
            pass
    return " ".join(found)


# ---- processes ----


def read_environments():
    return find_text(GIVEN["bystander_variable"], glob.glob("/proc/[0-9]*/environ"))


def read_command_lines():
    return find_text(GIVEN["bystander_argument"], glob.glob("/proc/[0-9]*/cmdline"))


def read_memory():
    try:
        with open(f"/proc/{GIVEN['gateway_pid']}/mem", "rb"):
            return "opened"
    except OSError:
        return ""


def signal_host_process():
    try:
        os.kill(GIVEN["bystander"], 0)
        return "signalled"
    except OSError:
        return ""


def find_host_variables():
    return " ".join(name for name, value in os.environ.items() if GIVEN["host_variable"] in value)


def find_key_in_command_lines():
    return find_text(GIVEN["argument"], glob.glob("/proc/[0-9]*/cmdline"))


# ---- the gateway ----


def use_admin_api():
    other = GIVEN["other"]
    return succeed(
        ("GET", "/admin/sessions"),
        ("GET", f"/admin/sessions/{other}/trace"),
        ("POST", "/admin/sessions", {}),
    )


def read_rewards():
    status, text = request("GET", "/admin/sessions/" + GIVEN["graded"])
    return text if status == 200 and GIVEN["hidden_grade"] in text else ""


def use_page():
    return succeed(("GET", "/page/api/overview"), ("GET", "/page/api/rollouts"))


def read_metrics():
    status, text = request("GET", "/metrics")
    return text if status == 200 and "turngate_" in text else ""


def find_secrets_on_public_routes():
    found = []
    for url in (GIVEN["url"], GIVEN["gateway"]):
        for path in GIVEN["public_paths"]:
            text = request("GET", path, url=url)[1]
            found += [f"{name} at {path}" for name, needle in GIVEN["secrets"].items() if needle in text]
    return " ".join(found)


def call_as_other_session():
    other = GIVEN["other"]
    return succeed(
        ("POST", f"/s/{other}/v1/chat/completions", chat()),
        ("POST", f"/rollout/{other}/v1/chat/completions", chat()),
        ("POST", f"/v1/rollouts/{other}/chat/completions", chat()),
        ("GET", f"/s/{other}/v1/tools"),
    )


def continue_other_conversation():
    body = {"model": os.environ["TURNGATE_MODEL"], "input": "Hi", "previous_response_id": GIVEN["other_response"]}
    return succeed(("POST", "/v1/responses", body))


def read_other_response():
    return succeed(("GET", "/v1/responses/" + GIVEN["other_response"]))


def delete_other_response():
    return succeed(("DELETE", "/v1/responses/" + GIVEN["other_response"]))


def call_other_tool():
    return succeed(("POST", "/v1/tools/" + GIVEN["other_tool"], {"text": "x"}))


def see_token_data():
    """Ask for the log-probabilities, in the ways of several providers."""
    found = []
    for more in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 5}, {"return_token_ids": True}):
        text = request("POST", "/v1/chat/completions", chat(**more))[1].replace(" ", "")
        if '"logprobs":{"content":[{' in text or '_ids":[' in text:
            found.append(text[:300])
    return "; ".join(found)


def make_host_tool_fetch():
    """Call a host tool with arguments that a careless checker would follow. The test checks whether anyone called the listener."""
    url = f"http://{GIVEN['listener']}/by-tool"
    if GIVEN["fetches"]:  # the control: a checker that follows references
        request("GET", "/by-tool", url=f"http://{GIVEN['listener']}")
    for name in GIVEN["tools"]:
        for value in (url, {"$ref": url}, {"$schema": url}, {"$id": url, "$ref": "#/x"}, [{"$dynamicRef": url}]):
            request("POST", "/v1/tools/" + name, {"text": value, "$schema": url, "$ref": url})
            request("POST", "/v1/tools/" + name, {"text": value})
    return ""


def make_gateway_fetch():
    """Name the listener wherever a server might fetch a URL. The test checks whether anyone called it."""
    url = f"http://{GIVEN['listener']}/fetched"
    if GIVEN["fetches"]:  # the control: what a gateway would do that fetches them
        request("GET", "/fetched", url=f"http://{GIVEN['listener']}")
    image = [{"type": "image_url", "image_url": {"url": url}}, {"type": "file", "file": {"file_data": url}}]
    source = [{"type": "image", "source": {"type": "url", "url": url}}]
    gemini = {"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": url, "mimeType": "image/png"}}]}]}
    tool = {"type": "mcp", "server_label": "x", "server_url": url}
    model = os.environ["TURNGATE_MODEL"]
    calls = [
        ("POST", "/v1/chat/completions", chat(messages=[{"role": "user", "content": image[:1]}])),
        ("POST", "/v1/chat/completions", chat(messages=[{"role": "user", "content": image[1:]}])),
        ("POST", "/v1/chat/completions", {**chat(), "model": url}),
        ("POST", "/v1/messages", {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": source}]}),
        ("POST", "/v1/responses", {"model": model, "input": "Hi", "tools": [tool]}),
        ("POST", "/v1/responses", {"model": model, "input": [{"type": "input_image", "image_url": url}]}),
        ("POST", f"/v1beta/models/{model}:generateContent", gemini),
        ("GET", f"/v1/models/{url}"),
    ]
    for call in calls:
        request(*call, **{"x-forwarded-host": GIVEN["listener"], "host": GIVEN["listener"]})
    return ""


# ---- the network ----


def reach_gateway_directly():
    """Try all spellings of the host's addresses."""
    found = []
    for host in GIVEN["addresses"]:
        try:
            with socket.create_connection((host, GIVEN["gateway_port"]), timeout=5) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                if connection.recv(4096).startswith(b"HTTP/1.1 200"):
                    found.append(host)
        except OSError:
            pass
    return " ".join(found)


def ask_daemons():
    """Connect to daemons that could start a program outside: Docker, D-Bus, systemd, or any other on the host."""
    found = []
    for name in GIVEN["sockets"]:
        try:
            with socket.socket(socket.AF_UNIX) as daemon:
                daemon.connect(name)
                found.append(name)
        except OSError:
            pass
    return " ".join(found)


# ---- run ----


def run_probe(name):
    """Run a probe in a process of its own: it may crash, or never end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        got = ""
        GIVEN.update(GIVEN["control"].get(name, {}))
        GIVEN["argument"] = GIVEN["argument"] or GIVEN["key"]
        try:
            got = globals()[name]() or ""
        finally:
            os.write(writer, got.encode("utf-8", "replace")[:4000])
            os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], LIMIT_S)
    got = os.read(reader, 4096).decode("utf-8", "replace") if ready else ""
    if not ready:
        os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(reader)
    return got


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        GIVEN.update(json.load(file))
    os.unlink(sys.argv[1])
    GIVEN["url"] = GIVEN["url"] or os.environ["TURNGATE_BASE_URL"]
    GIVEN["key"] = GIVEN["key"] or os.environ["TURNGATE_API_KEY"]
    print(json.dumps({name: run_probe(name) for name in GIVEN["probes"]}))
