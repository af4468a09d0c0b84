"""mini-swe-agent in its tool-calling configuration (`mini.yaml`), with prompts that are short enough for a small model.

It differs from the catalog's description in the Python version it is installed for, in its settings (prompts, format of observations,
number of steps, the agent class that asks no questions), and in how its process is started (`fork_server.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from turngate.agents.install import ensure_installed
from turngate.agents.installation import Installation
from turngate.agents.spec import AgentFile, AgentSpec, find_agent

HERE = Path(__file__).parent
MODULE = "minisweagent.run.mini"
IMPORTS = (
    "minisweagent.agents.default",
    "minisweagent.environments.local",
    "minisweagent.models.litellm_model",
)
SETTINGS = """
run:
  task: "{prompt}"
agent:
  agent_class: default
  system_template: "You work in a folder with text files."
  instance_template: "{{task}}\\n\\nUse bash, one command at a time. In the end: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
  step_limit: 6
  cost_limit: 0
model:
  model_name: "openai/{model}"
  cost_tracking: ignore_errors
  observation_template: "exit code {{ output.returncode }}\\n{{ output.output }}"
  format_error_template: "{{ error }}"
  model_kwargs:
    api_base: "{base_url}/v1"
    api_key: "{api_key}"
    max_tokens: {max_output_tokens}
    timeout: 600
"""


def build_agent(python: str, socket: str = "") -> AgentSpec:
    """Build the description of an agent that `fork_server.py` starts. With an empty `socket`, it is started as the catalog says."""
    preset = find_agent("mini-swe-agent").spec
    command = preset.command
    if socket:
        index = command.index(MODULE)
        command = ("{python}", "-I", "-S", str(HERE / "fork_client.py"), socket, *command[index + 1 :])
    return msgspec.structs.replace(
        preset,
        name="mini-swe-agent-tools",
        command=command,
        install=msgspec.structs.replace(preset.install, python=python),
        files=(AgentFile(path=".mini/turngate.yaml", mode="0600", content=SETTINGS),),
        check=(),
    )


@contextmanager
def run_fork_server(spec: AgentSpec, installed: Installation, socket: Path) -> Iterator[None]:
    """Run a process that has imported the agent's packages, for the duration of the block."""
    with tempfile.TemporaryDirectory() as home:
        env = {name: text.replace("{home}", home) for name, text in spec.env.items()}
        command = [
            installed.python,
            str(HERE / "fork_server.py"),
            str(socket),
            installed.folder,
            MODULE,
            *IMPORTS,
        ]
        with subprocess.Popen(
            command, env={**_base_env(), **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as server:
            try:
                assert server.stdout is not None
                if server.stdout.readline() != b"ready\n":
                    raise SystemExit("fork_server.py did not start")
                yield
            finally:
                assert server.stdin is not None
                server.stdin.close()  # the server kills the agents that are still running, and ends
                with suppress(subprocess.TimeoutExpired):
                    server.wait(timeout=5)
                server.kill()


def _base_env() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}


if __name__ == "__main__":
    print(ensure_installed(build_agent(sys.argv[1])))
