"""mini-swe-agent as its tool-calling configuration has it (`mini.yaml`), with prompts that a small model has room for.

All that differs from the catalog's description is here: which Python it is installed for, its settings (prompts, how an observation is
shown, how many steps it takes, the agent class that asks no questions), and how its process is begun (`warm.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from turngate.agents import install
from turngate.agents.install import Installation
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


def described(python: str, warm: str = "") -> AgentSpec:
    """`warm`: the socket at which `warm.py` waits; empty: it is started as the catalog has it."""
    preset = find_agent("mini-swe-agent").spec
    command = preset.command
    if warm:
        at = command.index(MODULE)
        command = ("{python}", "-I", "-S", str(HERE / "warm.py"), "run", warm, *command[at + 1 :])
    return msgspec.structs.replace(
        preset,
        name="mini-swe-agent-tools",
        command=command,
        install=msgspec.structs.replace(preset.install, python=python),
        files=(AgentFile(path=".mini/turngate.yaml", mode="0600", content=SETTINGS),),
        check=(),
    )


@contextmanager
def warmed(spec: AgentSpec, installed: Installation, place: Path) -> Iterator[None]:
    """A process that has imported the agent's packages, for as long as the block runs."""
    with tempfile.TemporaryDirectory() as home:
        env = {name: text.replace("{home}", home) for name, text in spec.env.items()}
        command = [installed.python, str(HERE / "warm.py"), "serve", str(place), installed.folder, MODULE, *IMPORTS]
        with subprocess.Popen(
            command, env={**_path(), **env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        ) as server:
            try:
                assert server.stdout is not None
                if server.stdout.readline() != b"warm\n":
                    raise SystemExit("warm.py did not start")
                yield
            finally:
                server.kill()


def _path() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}


if __name__ == "__main__":
    print(install.ensure_installed(described(sys.argv[1])))
