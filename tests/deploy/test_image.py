"""The image, built from a local base and run as locked down as in compose and Kubernetes: not as root, only the data folder writable.

It becomes healthy, serves a rollout, and is stopped and restarted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.cli.kit import CALL_ONCE, run_cli
from tests.deploy import kit
from tests.kit import user
from tests.sandboxes.kit import need
from tests.speed import scaled

pytestmark = [
    pytest.mark.needs("docker"),
    pytest.mark.repeat,
]  # test_files.py checks the files, test_docker.py builds images

PLANTED_PASSWORD = "5ec2e7-marked-password"
KEY = "5ec2e7-marked-admin-key"
LOCKED_DOWN = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
SERVE = ("serve", "--config", "/etc/turngate/serve.toml", "--host", "127.0.0.1", "--port", "0")
SOLVED = "sed -i 's/return a - b/return a + b/' main.py"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deploy")


@pytest.fixture(scope="module")
def python(scratch: Path) -> str:
    return kit.build_python_image(scratch / "python")


@pytest.fixture(scope="module")
def image(scratch: Path, python: str) -> Iterator[str]:
    """An image built from a repository that contains secrets, with a package index whose URL has a password."""
    context = kit.build_context(scratch / "context")
    for planted in (
        ".env",
        "turngate/.env",
        "turngate/admin-key",
        "turngate-data/turngate.db",
        "deploy/secrets/admin-key",
    ):
        (context / planted).parent.mkdir(exist_ok=True)
        (context / planted).write_text(PLANTED_PASSWORD)
    index = f"PIP_EXTRA_INDEX_URL=https://somebody:{PLANTED_PASSWORD}@127.0.0.1:9/simple"
    build_args = [f"BASE={python}", "PIP_NO_INDEX=1", index, "VERSION=1.2.3"]
    words = [word for argument in build_args for word in ("--build-arg", argument)]
    file = context / "deploy" / "Dockerfile"
    with kit.temporary_image("turngate-test:serve", context, "--file", file, *words) as tag:
        yield tag


@pytest.fixture(scope="module")
def served(image: str, scratch: Path) -> Iterator[kit.Container]:
    """A running gateway with its key in a file, as for secrets of Docker and Kubernetes."""
    secret, script = scratch / "admin-key", scratch / "script.json"
    secret.write_text(KEY + "\n")
    script.write_text(json.dumps(["Let me look at main.py.", "Done."]))
    words = [
        *LOCKED_DOWN,
        *("--health-interval", "1s", "--health-timeout", f"{scaled(6):.0f}s"),
        *("--volume", "/data"),
        *("--volume", f"{secret}:/run/secrets/admin_key:ro"),
        *("--volume", f"{script}:/script.json:ro"),
        *("--env", "TURNGATE_ADMIN_KEY_FILE=/run/secrets/admin_key"),
    ]
    command = (*SERVE, "--script", "/script.json", "--log-turns")
    with kit.container(image, *words, command=command, key=KEY) as container:
        yield container


def test_image_metadata_has_no_builder_secrets(image: str) -> None:
    config = kit.inspect(image)["Config"]
    assert (config["User"], config["Entrypoint"], config["Cmd"][0]) == ("10001:10001", ["turngate"], "serve")
    assert [*config["Volumes"]] == ["/data"] and [*config["ExposedPorts"]] == ["8700/tcp"]
    assert config["Labels"]["org.opencontainers.image.version"] == "1.2.3"
    metadata = kit.docker("history", "--no-trunc", image).stdout + kit.docker("inspect", image).stdout
    assert PLANTED_PASSWORD not in metadata and "127.0.0.1:9" not in metadata
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saved:  # every layer
        assert saved.stdout is not None
        end = b""
        while block := saved.stdout.read(2**20):
            assert PLANTED_PASSWORD.encode() not in end + block
            end = block[-64:]
    assert saved.returncode == 0


@pytest.mark.needs("bubblewrap")
def test_rollout_through_container_survives_restart(served: kit.Container, tmp_path: Path) -> None:
    need("bubblewrap")
    served.wait_until_healthy()
    url = served.url()

    # The gateway is process 1, does not run as root, and can write only to its data folder.
    assert served.exec("cat", "/proc/1/cmdline").stdout.split("\0")[1].endswith("/turngate")
    assert served.exec("id", "-u").stdout.strip() == "10001"
    assert "Read-only file system" in served.exec("touch", "/opt/turngate/x").stderr

    # Run an agent in a sandbox on this machine, and grade its work.
    task = kit.ROOT / "examples" / "tasks" / "fix-add"
    agent = ("--agent", "shell", "--set", f"command={CALL_ONCE} && {SOLVED} && {CALL_ONCE}")
    out = tmp_path / "out"
    words = ("run", *agent, "--task", task, "--sandbox", "bubblewrap", "--gateway", url, "--out", out, "--json")
    rolled = run_cli(*words, env={"TURNGATE_ADMIN_KEY": KEY})
    assert rolled.exit_code == 0, rolled.output
    outcome = json.loads(rolled.stdout)
    assert (outcome["status"], outcome["reward"], outcome["turns"]) == ("finished", 1.0, 2)

    # The admin key does not authorize model calls.
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="m", messages=[user("Hi")])
    samples = served.get(f"/admin/sessions/{outcome['session']}/samples")["samples"]
    assert samples and all(len(row["ids"]) == len(row["mask"]) for row in samples)
    verified = served.exec("turngate", "verify", "--all", "--data", "/data")
    assert verified.returncode == 0, verified.stdout + verified.stderr

    # Back up the running gateway, as docs/deploy.md says.
    backup = "import sqlite3; sqlite3.connect('/data/turngate.db').backup(sqlite3.connect('/data/backup.db'))"
    assert backup in (kit.ROOT / "docs" / "deploy.md").read_text()
    check = "import sqlite3; print(sqlite3.connect('/data/backup.db').execute('PRAGMA integrity_check').fetchone()[0])"
    done = served.exec("python", "-c", f"{backup}; {check}")
    assert done.stdout == "ok\n", done.stdout + done.stderr

    # It stops cleanly (a kill would give 137), and keeps its data over a restart.
    kit.docker("stop", "--time", f"{scaled(20):.0f}", served.name)
    assert kit.inspect(served.name)["State"]["ExitCode"] == 0, served.logs()
    kit.docker("start", served.name)
    served.wait_until_healthy()
    assert served.get(f"/admin/sessions/{outcome['session']}/samples")["samples"] == samples

    output = served.logs() + kit.docker("inspect", served.name).stdout + kit.docker("top", served.name).stdout
    assert KEY not in output and "Traceback" not in output and outcome["session"] in output


def test_startup_errors_are_one_line(image: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    others = tmp_path / "others"  # owned by root, like a folder that Docker creates for a mount
    others.mkdir(mode=0o755)
    key = ("--env", f"TURNGATE_ADMIN_KEY={KEY}")

    def refused(*words: str, command: tuple[str, ...] = SERVE) -> str:
        done = kit.docker("run", "--rm", "--network", "host", *LOCKED_DOWN, *words, image, *command, check=False)
        assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
        [line] = done.stderr.splitlines()
        return line

    assert refused(*key, "--volume", f"{others}:/data").startswith("turngate: data: /data cannot be written")
    missing = "TURNGATE_ADMIN_KEY_FILE=/run/secrets/none"
    assert "/run/secrets/none cannot be read" in refused("--env", missing)
    assert "engine_url is not set; the engine 'vllm' needs" in refused(*key, command=(*SERVE, "--engine", "vllm"))


def test_gateway_without_engine_is_unhealthy_but_answers(image: str) -> None:
    engine = ("--engine", "openai", "--engine-url", "http://127.0.0.1:9/v1", "--model", "m")
    key = ("--env", f"TURNGATE_ADMIN_KEY={KEY}")
    health = ("--health-interval", "1s", "--health-timeout", f"{scaled(6):.0f}s", "--health-retries", "1")
    with kit.container(image, *LOCKED_DOWN, *key, *health, command=(*SERVE, *engine), key=KEY) as container:
        container.until(lambda: any("503" in entry["Output"] for entry in container.health_results()))
        assert container.get("/")  # the liveness probe of Kubernetes
        assert container.get("/admin/sessions") is not None


def test_space_image_builds_from_upload_and_runs_as_its_user(
    python: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = scratch / "space"
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", KEY)
    script = kit.DEPLOY / "space" / "deploy.py"
    command = [sys.executable, script, "someone/gate", "--dry-run", "--stage", space]
    subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=scaled(60))
    shutil.copytree(kit.download_wheels(), space / "wheels")
    build_args = ("--build-arg", f"BASE={python}", "--build-arg", "PIP_NO_INDEX=1")
    with kit.temporary_image("turngate-test:space", space, *build_args) as image:
        _check_space(image)


def _check_space(image: str) -> None:
    assert (kit.inspect(image)["Config"]["User"], kit.inspect(image)["Config"]["Cmd"][0]) == ("1000", "serve")
    key = ("--env", f"TURNGATE_ADMIN_KEY={KEY}")
    with kit.container(image, *key, command=SERVE, key=KEY) as container:
        assert container.get("/health")["status"] == "ok"
        assert container.exec("id", "-u").stdout.strip() == "1000"
