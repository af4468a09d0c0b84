"""The image, built here from a base that was made here, and used as a person would: it becomes healthy, agents are run through it,
it is stopped and started again. As locked down as compose and Kubernetes start it: not root, nothing writable but its data."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.cli.kit import ran
from tests.cli.test_run import ONCE
from tests.deploy import kit
from tests.kit import user
from tests.sandboxes.kit import need
from tests.speed import scaled

pytestmark = [pytest.mark.needs("docker"), pytest.mark.full]

MARKED = "5ec2e7-marked-password"
KEY = "5ec2e7-marked-admin-key"
LOCKED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
SERVE = ("serve", "--config", "/etc/turngate/serve.toml", "--host", "127.0.0.1", "--port", "0")
SOLVED = "sed -i 's/return a - b/return a + b/' main.py"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deploy")


@pytest.fixture(scope="module")
def python(scratch: Path) -> str:
    return kit.python_image(scratch / "python")


@pytest.fixture(scope="module")
def image(scratch: Path, python: str) -> Iterator[str]:
    """Built from a repository with secrets lying about, by a builder whose index has a password."""
    context = kit.context(scratch / "context")
    for planted in (
        ".env",
        "turngate/.env",
        "turngate/admin-key",
        "turngate-data/turngate.db",
        "deploy/secrets/admin-key",
    ):
        (context / planted).parent.mkdir(exist_ok=True)
        (context / planted).write_text(MARKED)
    index = f"PIP_EXTRA_INDEX_URL=https://somebody:{MARKED}@127.0.0.1:9/simple"
    given = [f"BASE={python}", "PIP_NO_INDEX=1", index, "VERSION=1.2.3"]
    words = [word for argument in given for word in ("--build-arg", argument)]
    file = context / "deploy" / "Dockerfile"
    with kit.temporary_image("turngate-test:serve", context, "--file", file, *words) as tag:
        yield tag


@pytest.fixture(scope="module")
def served(image: str, scratch: Path) -> Iterator[kit.Container]:
    """Its key is in a file, as Docker's and Kubernetes' secrets are."""
    secret, script = scratch / "admin-key", scratch / "script.json"
    secret.write_text(KEY + "\n")
    script.write_text(json.dumps(["Let me look at main.py.", "Done."]))
    words = [
        *LOCKED,
        *("--health-interval", "1s", "--health-timeout", f"{scaled(6):.0f}s"),
        *("--volume", "/data"),
        *("--volume", f"{secret}:/run/secrets/admin_key:ro"),
        *("--volume", f"{script}:/script.json:ro"),
        *("--env", "TURNGATE_ADMIN_KEY_FILE=/run/secrets/admin_key"),
    ]
    command = (*SERVE, "--script", "/script.json", "--log-turns")
    with kit.container(image, *words, command=command, key=KEY) as container:
        yield container


def test_it_says_what_it_is_and_holds_no_secret_of_its_builder(image: str) -> None:
    config = kit.inspected(image)["Config"]
    assert (config["User"], config["Entrypoint"], config["Cmd"][0]) == ("10001:10001", ["turngate"], "serve")
    assert [*config["Volumes"]] == ["/data"] and [*config["ExposedPorts"]] == ["8700/tcp"]
    assert config["Labels"]["org.opencontainers.image.version"] == "1.2.3"
    told = kit.docker("history", "--no-trunc", image).stdout + kit.docker("inspect", image).stdout
    assert MARKED not in told and "127.0.0.1:9" not in told
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saved:  # every layer, as it is shipped
        assert saved.stdout is not None
        end = b""
        while block := saved.stdout.read(2**20):
            assert MARKED.encode() not in end + block
            end = block[-64:]
    assert saved.returncode == 0


@pytest.mark.needs("bubblewrap")
def test_agents_are_run_through_it_and_it_keeps_what_they_did_when_it_is_stopped(
    served: kit.Container, tmp_path: Path
) -> None:
    need("bubblewrap")
    served.healthy()
    url = served.url()

    # It is process 1, another user than root, and can write nothing but its data.
    assert served.inside("cat", "/proc/1/cmdline").stdout.split("\0")[1].endswith("/turngate")
    assert served.inside("id", "-u").stdout.strip() == "10001"
    assert "Read-only file system" in served.inside("touch", "/opt/turngate/x").stderr

    # An agent in a sandbox on this machine, and its work graded.
    task = kit.ROOT / "examples" / "tasks" / "fix-add"
    agent = ("--agent", "shell", "--set", f"command={ONCE} && {SOLVED} && {ONCE}")
    out = tmp_path / "out"
    words = ("run", *agent, "--task", task, "--sandbox", "bubblewrap", "--gateway", url, "--out", out, "--json")
    rolled = ran(*words, env={"TURNGATE_ADMIN_KEY": KEY})
    assert rolled.exit_code == 0, rolled.output
    outcome = json.loads(rolled.stdout)
    assert (outcome["status"], outcome["reward"], outcome["turns"]) == ("finished", 1.0, 2)

    # And one that somebody runs himself.
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="m", messages=[user("Hi")])  # the admin key opens no model calls
    samples = served.get(f"/admin/sessions/{outcome['session']}/samples")["samples"]
    assert samples and all(len(row["ids"]) == len(row["mask"]) for row in samples)
    proven = served.inside("turngate", "verify", "--all", "--data", "/data")
    assert proven.returncode == 0, proven.stdout + proven.stderr

    # Copied while it runs, as docs/deploy.md says.
    backup = "import sqlite3; sqlite3.connect('/data/turngate.db').backup(sqlite3.connect('/data/backup.db'))"
    assert backup in (kit.ROOT / "docs" / "deploy.md").read_text()
    look = "import sqlite3; print(sqlite3.connect('/data/backup.db').execute('PRAGMA integrity_check').fetchone()[0])"
    done = served.inside("python", "-c", f"{backup}; {look}")
    assert done.stdout == "ok\n", done.stdout + done.stderr

    # Stopped: it ends by itself (137 would say that it was killed), and all of it is there when it is started again.
    kit.docker("stop", "--time", f"{scaled(20):.0f}", served.name)
    assert kit.inspected(served.name)["State"]["ExitCode"] == 0, served.logs()
    kit.docker("start", served.name)
    served.healthy()
    assert served.get(f"/admin/sessions/{outcome['session']}/samples")["samples"] == samples

    told = served.logs() + kit.docker("inspect", served.name).stdout + kit.docker("top", served.name).stdout
    assert KEY not in told and "Traceback" not in told and outcome["session"] in told


def test_what_is_wrong_is_said_in_a_line(image: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    others = tmp_path / "others"  # root's, as a folder is that Docker makes for a mount
    others.mkdir(mode=0o755)
    key = ("--env", f"TURNGATE_ADMIN_KEY={KEY}")

    def refused(*words: str, command: tuple[str, ...] = SERVE) -> str:
        done = kit.docker("run", "--rm", "--network", "host", *LOCKED, *words, image, *command, check=False)
        assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
        [line] = done.stderr.splitlines()
        return line

    assert refused(*key, "--volume", f"{others}:/data").startswith("turngate: data: /data cannot be written")
    missing = "TURNGATE_ADMIN_KEY_FILE=/run/secrets/none"
    assert "/run/secrets/none cannot be read" in refused("--env", missing)
    assert "engine_url is not set; the engine 'vllm' needs" in refused(*key, command=(*SERVE, "--engine", "vllm"))


def test_a_gateway_without_its_engine_is_not_healthy_and_answers_all_the_same(image: str) -> None:
    engine = ("--engine", "openai", "--engine-url", "http://127.0.0.1:9/v1", "--model", "m")
    key = ("--env", f"TURNGATE_ADMIN_KEY={KEY}")
    health = ("--health-interval", "1s", "--health-timeout", f"{scaled(6):.0f}s", "--health-retries", "1")
    with kit.container(image, *LOCKED, *key, *health, command=(*SERVE, *engine), key=KEY) as container:
        container.until(lambda: any("503" in entry["Output"] for entry in container.checks()))
        assert container.get("/")  # what Kubernetes asks before it kills
        assert container.get("/admin/sessions") is not None


def test_the_space_is_built_of_what_is_uploaded_and_runs_as_its_user(
    python: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = scratch / "space"
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", KEY)
    script = kit.DEPLOY / "space" / "deploy.py"
    command = [sys.executable, script, "someone/gate", "--dry-run", "--stage", space]
    subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=scaled(60))
    shutil.copytree(kit.wheels(), space / "wheels")
    given = ("--build-arg", f"BASE={python}", "--build-arg", "PIP_NO_INDEX=1")
    with kit.temporary_image("turngate-test:space", space, *given) as image:
        _check_space(image)


def _check_space(image: str) -> None:
    assert (kit.inspected(image)["Config"]["User"], kit.inspected(image)["Config"]["Cmd"][0]) == ("1000", "serve")
    key = ("--env", f"TURNGATE_ADMIN_KEY={KEY}")
    with kit.container(image, *key, command=SERVE, key=KEY) as container:
        assert container.get("/health")["status"] == "ok"
        assert container.inside("id", "-u").stdout.strip() == "1000"
