"""Host tools as shell commands in a sandbox, for agents and programs that can use a shell but not HTTP.

The rollout writes one script per tool into a folder on the PATH. A script takes the tool's arguments as one JSON object, either on the
command line or on standard input, and prints the reply. To send the request, it uses Python, Node or curl, whichever it finds first. It
reads the key from a file, so that the key never appears in a command line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import msgspec

from turngate.agents.launch import OWN_FOLDER, Launch, LaunchFile
from turngate.errors import AgentError
from turngate.trace.tool_schema import HostTool

TOOLS_URL_ENV = "TURNGATE_TOOLS_URL"  # no SDK reads this name, so programs do not mistake it for their model provider
_WITH_PATH = 'PATH="$0:$PATH"; export PATH; exec "$@"'

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# This runs with -I, which prevents imports from the agent's working folder. It uses no proxy, because the relay is on the same machine.
_PYTHON = r"""
import http.client, sys, urllib.error, urllib.request
url, path = sys.argv[1:3]
with open(path) as file:
    key = file.read().strip()
headers = {"content-type": "application/json", "authorization": "Bearer " + key}
request = urllib.request.Request(url, sys.stdin.buffer.read(), headers, method="POST")
try:
    try:
        answer, output = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request), sys.stdout
    except urllib.error.HTTPError as error:
        answer, output = error, sys.stderr
    body = answer.read()
except OSError as error:
    sys.exit("the gateway cannot be reached: %s" % error)
except http.client.HTTPException as error:
    sys.exit("the gateway's answer is incomplete or invalid: %r" % error)
output.buffer.write(body + b"\n")
sys.exit(0 if output is sys.stdout else 1)
"""
_NODE = r"""
const fs = require("fs");
const [url, path] = process.argv.slice(1);
const body = fs.readFileSync(0);
const headers = {
  "content-type": "application/json",
  "content-length": body.length,
  authorization: "Bearer " + fs.readFileSync(path, "utf8").trim(),
};
const sent = require(url.startsWith("https:") ? "https" : "http").request(url, {method: "POST", headers}, (answer) => {
  const parts = [];
  answer.on("data", (part) => parts.push(part));
  answer.on("close", () => {
    if (answer.complete) return;
    console.error("the gateway's answer is incomplete");
    process.exitCode = 1;
  });
  answer.on("end", () => {
    if (!answer.complete) return;
    const fine = answer.statusCode < 300;
    (fine ? process.stdout : process.stderr).write(Buffer.concat([...parts, Buffer.from("\n")]));
    process.exitCode = fine ? 0 : 1;
  });
});
sent.on("error", (error) => { console.error("the gateway cannot be reached: " + error.message); process.exitCode = 1; });
sent.end(body);
"""
# curl reads the header from standard input, to which a shell builtin writes it, so that the key does not appear in any command line.
_CURL = r"""
  folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT || exit 1
  printf '%s' "$body" > "$folder/body"
  status=$(printf 'header = "Authorization: Bearer %s"\n' "$(cat "$key_file")" | curl --config - --silent --show-error \
    --noproxy '*' --header 'content-type: application/json' --data-binary "@$folder/body" --output "$folder/answer" \
    --write-out '%{http_code}' "$url") || exit 1
  case $status in
    2*) cat "$folder/answer"; echo ;;
    *) cat "$folder/answer" >&2; echo >&2; exit 1 ;;
  esac
"""


def build_shim(tool: HostTool, base_url_var: str, key_file: str) -> str:
    """Return a POSIX shell script that calls `tool`.

    `base_url_var` is the name of the environment variable that contains the gateway's URL, as seen from the sandbox. `key_file` is the path
    of a file with mode 0600 that contains the session's secret.
    """
    if not _VARIABLE.fullmatch(base_url_var):
        raise AgentError(f"base_url_var must be the name of an environment variable, not {base_url_var!r}")
    schema = msgspec.json.format(msgspec.json.encode(tool.schema), indent=2).decode()
    usage = f"usage: {tool.name} '{{…}}'\n{tool.description}\n\nThe arguments must be one JSON object with this schema:\n{schema}"
    return f"""#!/bin/sh
case ${{1-}} in -h|--help) printf '%s\\n' {shlex.quote(usage)}; exit 0 ;; esac
if [ $# -gt 1 ]; then echo {shlex.quote(f"{tool.name}: pass one JSON object, in quotes; see --help")} >&2; exit 2; fi
base=${{{base_url_var}-}}
if [ -z "$base" ]; then echo {shlex.quote(f"{tool.name}: {base_url_var} is not set")} >&2; exit 2; fi
base=${{base%/}}; base=${{base%/v1}}
url="$base/v1/tools/{tool.name}"
key_file={shlex.quote(key_file)}
if [ $# -eq 1 ]; then body=$1; else body=$(cat); fi
if python3 -I -c '' 2>/dev/null; then
  printf '%s' "$body" | python3 -I -c {shlex.quote(_PYTHON)} "$url" "$key_file"
elif command -v node >/dev/null 2>&1; then
  printf '%s' "$body" | node -e {shlex.quote(_NODE)} "$url" "$key_file"
elif command -v curl >/dev/null 2>&1; then{_CURL}else
  echo {shlex.quote(f"{tool.name}: needs python3, node or curl")} >&2
  exit 2
fi
"""


def add_tool_commands(launch: Launch, tools: Sequence[HostTool], *, base_url: str, api_key: str, home: str) -> Launch:
    """Return a copy of the launch that also writes a script for each tool, and adds the scripts' folder to the PATH."""
    if not tools:
        return launch
    key_file, folder = f"{home}/{OWN_FOLDER}/key", f"{home}/{OWN_FOLDER}/bin"
    files = [
        LaunchFile(f"{folder}/{tool.name}", build_shim(tool, TOOLS_URL_ENV, key_file).encode(), 0o755) for tool in tools
    ]
    return msgspec.structs.replace(
        launch,
        files=(*launch.files, LaunchFile(key_file, api_key.encode(), 0o600), *files),
        env={**launch.env, TOOLS_URL_ENV: base_url},
        command=("/bin/sh", "-c", _WITH_PATH, folder, *launch.command),
    )


def describe_tools(instruction: str, tools: Sequence[HostTool]) -> str:
    """Return the instruction, followed by a description of the tool commands."""
    if not tools:
        return instruction
    lines = [
        f"- `{tool.name} '{{…}}'`: {tool.description} Its one argument is a JSON object with this schema: "
        + msgspec.json.encode(tool.schema).decode()
        for tool in tools
    ]
    return (
        f"{instruction.rstrip()}\n\nBesides the usual ones, your shell has these commands:\n" + "\n".join(lines) + "\n"
    )
