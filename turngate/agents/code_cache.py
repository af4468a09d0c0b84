"""Cache the code that Node compiles for an agent, so that starting the agent takes 20 to 50 percent less CPU time.

The cache is built after the agent is installed, and again for each new Node binary. The agent runs twice against an endpoint that rejects
every request, so each run ends after its first model call. The first run stores the compiled ES modules with all functions that were
executed. Node's own compile cache would store these modules before they run, when few of their functions have been compiled. The second
run adds the CommonJS modules, for which Node's own cache is enough.

Runs read the cache from the installation, which isolating sandboxes mount read-only. V8 rejects code that was compiled by a different
version, with different flags or for a different CPU, and compiles the module as usual.
"""

from __future__ import annotations

import hashlib
import http.server
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from turngate.agents.installation import Installation
from turngate.agents.launch import plan_launch
from turngate.agents.spec import AgentSpec

FOLDER = "code-cache"  # the folder of the caches in the installation
ENABLE = "enable.cjs"
RUN_S = 120.0  # time limit of a run that builds the cache
# The user ids in sandboxes: usually 0 or 1000 in containers, and 1000 in bubblewrap. Node's caches are per user, because the name of a
# cache's folder ends in the user's id. These users get links.
USERS = (0, 1000)

# Runs before the program, and enables the cache. Versions of Node without portable caches start without one.
ENABLE_SCRIPT = """\
'use strict';
try {
  require('node:module').enableCompileCache({ directory: require('node:path').join(__dirname, 'modules'), portable: true });
} catch {}
"""
# Runs before the program, with Node's option --expose-internals. When the program exits, it stores the ES modules that were loaded.
# It stops programs from enabling a cache of their own, which would replace this one.
_STORE_SCRIPT = """\
'use strict';
const fs = require('node:fs'), mod = require('node:module'), url = require('node:url'), v8 = require('node:v8');
v8.setFlagsFromString('--no-flush-bytecode');
const enable = mod.enableCompileCache;
mod.enableCompileCache = () => ({ status: mod.constants.compileCacheStatus.DISABLED });
mod.syncBuiltinESMExports();
process.on('exit', () => {
  const loader = require('internal/modules/esm/loader').getOrInitializeCascadedLoader();
  const { compileSourceTextModule } = require('internal/modules/esm/utils');
  v8.setFlagsFromString('--flush-bytecode');
  enable({ directory: require('node:path').join(__dirname, 'modules'), portable: true });
  for (const [name] of loader.loadCache) {
    if (!name.startsWith('file:') || !/\\.m?js$/.test(name)) continue;
    try {
      compileSourceTextModule(name, fs.readFileSync(url.fileURLToPath(name), 'utf8'), loader);
    } catch {}
  }
});
"""


class RejectRequest(http.server.BaseHTTPRequestHandler):
    """Rejects every GET, POST and PUT request with status 400, in a form that the clients of all dialects understand."""

    protocol_version = "HTTP/1.1"

    def _reject(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        body = b'{"error": {"code": 400, "type": "invalid_request_error", "message": "this run only prepares the code cache"}}'
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = _reject

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def cache_folder(installed: Installation) -> Path:
    """Return the cache folder for the installation's Node binary. Each binary has its own, so that a cache in use is never replaced."""
    node = Path(installed.node).stat()
    parts = [installed.node, node.st_size, node.st_mtime_ns, ENABLE_SCRIPT, _STORE_SCRIPT]
    return Path(installed.folder, FOLDER, hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16])


def fingerprint(spec: AgentSpec) -> str:
    """Return a fingerprint of the agent's command, input, environment and files.

    A build that stored no code is not repeated until the fingerprint or the Node binary changes.
    """
    parts = msgspec.to_builtins((spec.command, spec.stdin, spec.env, spec.files))
    return f"{spec.name} {hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]}\n"


def build(folder: Path, spec: AgentSpec, installed: Installation) -> str:
    """Build the cache in `folder`. If no code was stored, leave the folder empty and return the reason. Otherwise, return an empty string.

    The keys of the cache contain the modules' paths relative to the cache. `folder` is one level deeper than the finished cache will be, so
    the cache is built in the parent of `folder` and then moved into `folder`.
    """
    staging = folder.parent
    (staging / "store.cjs").write_text(_STORE_SCRIPT)
    (staging / ENABLE).write_text(ENABLE_SCRIPT)
    with _endpoint() as url:
        output = _run(spec, installed, url, ["--expose-internals", "--require", str(staging / "store.cjs")])
        _run(spec, installed, url, ["--require", str(staging / ENABLE)])
    caches = [place for place in staging.glob("modules/*") if any(place.iterdir())]
    if not caches:
        return f"a run of {spec.name} stored no code; the last line of its output: {output or '(none)'}"
    for cache in caches:
        _share(cache)
    for name in (ENABLE, "modules"):
        (staging / name).rename(folder / name)
    return ""


def _share(cache: Path) -> None:
    """Make the cache readable by all users, and add a link to it for each user id in sandboxes, because its name ends with a user id."""
    cache.parent.chmod(0o755)
    cache.chmod(0o755)
    for file in cache.iterdir():
        file.chmod(0o644)
    name, _, user = cache.name.rpartition("-")
    for other in USERS:
        if str(other) != user:
            (cache.parent / f"{name}-{other}").symlink_to(cache.name)


def _run(spec: AgentSpec, installed: Installation, url: str, options: list[str]) -> str:
    """Run the agent once, with options for Node. Return the last line of its output, or a note if the run timed out."""
    with tempfile.TemporaryDirectory(prefix="home-", dir=Path(options[-1]).parent) as home:
        work = Path(home, "work")
        work.mkdir()
        launch = plan_launch(
            spec,
            msgspec.structs.replace(installed, code_cache=""),
            base_url=url,
            api_key="none",
            model="none",
            prompt="Reply with one word.",
            home=home,
            workdir=str(work),
            options={name: "none" for name, option in spec.options.items() if option.default is None},
        )
        for file in launch.files:
            target = Path(file.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.data)
            target.chmod(file.mode)
        at = launch.command.index(launch.program) + 1
        command = [*launch.command[:at], *options, *launch.command[at:]]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(  # noqa: S603  the agent's own command
                command,
                cwd=work,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", **launch.env, "HOME": home, "TMPDIR": home},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(RUN_S)
            except subprocess.TimeoutExpired:
                return f"(stopped after {RUN_S:.0f} seconds)"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            lines = output.read().decode(errors="replace").split("\n")
            return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


@contextmanager
def _endpoint() -> Iterator[str]:
    """Serve `RejectRequest` on a free port, and yield the server's URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RejectRequest) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
