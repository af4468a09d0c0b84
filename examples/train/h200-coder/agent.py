"""mini-SWE-agent in its text mode: the model writes a thought and one bash block, and reads the output of the command.

Three things differ from the catalog's description: the Python version it is installed for, its settings (prompts, the pattern that finds
the command, the format of observations, the number of steps), and how its process is started: by `fork_server.py` of the other example,
because Turngate's own warm starts reject what mini-SWE-agent imports on Python 3.12.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import msgspec

from turngate.agents.install import ensure_installed
from turngate.agents.installation import Installation
from turngate.agents.spec import AgentFile, AgentSpec, find_agent

CONTEXT, REPLY = 8192, 320  # default limits of a rollout and of an answer, in tokens
STEPS = 10  # default of the maximum number of steps
COMMAND_S = 8  # time limit of a command, in seconds; a change may make the tests hang
MAX_OUTPUT = 6000  # characters of a command's output that the model sees
# The agent needs to know whether the tests pass, and sees only the last lines. Rewriting assertions and reporting failures would take most
# of the CPU time of a run.
TEST_OPTIONS = "-x --tb=no --assert=plain -p no:cacheprovider -p no:unraisableexception -p no:threadexception"
SYSTEM = """\
You repair Python code in a shell. Every answer is one sentence and then one bash block with one command, nothing else.

First keep a copy of the file, and read the function with line numbers, for example with
cp FILE FILE.orig; nl -ba FILE | sed -n '10,40p'
Exactly one line of the function is wrong. Change it and run the tests, for example line 17 with
sed '17s/wrong text/right text/' FILE.orig > FILE && TESTS 2>&1 | tail -n 3
If they still fail, try another change in the same way. When they pass, run
echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT
and you are done."""
QUESTION = "{{task}}\nAnswer with one sentence and one bash block."
# For tasks with the command of `edit_command.py`.
EDIT_SYSTEM = """\
You repair Python functions. Exactly one line of the function is wrong, by a small mistake: a wrong operator, comparison, constant, name or
call, swapped arguments, or a missing `not`. Every answer is one sentence and then one bash block, nothing else. The bash block replaces one
line by its number and runs the tests, for example line 905:

```bash
python3 fix.py 905 <<'END'
    return a + b
END
```

If the tests still fail, change the line in another way, or try another line."""
EDIT_QUESTION = "{{task}}\nWhich line is wrong? Answer with one sentence and one bash block."
_LABEL = "(?:bash|sh|shell|mswea_bash_command)"
# The first block with a label, or else the first block, if it has none. The end of a Python block does not begin a block.
ACTION = rf"\A(?:(?=.*```{_LABEL}[ \t]*\n).*?```{_LABEL}|(?:(?!```).)*```)[ \t]*\n(.*?)\n?```.*\Z"
OBSERVATION = f"""\
exit code {{{{ output.returncode }}}}
{{% if output.output | length < {MAX_OUTPUT} -%}}
{{{{ output.output }}}}
{{%- else -%}}
{{{{ output.output[:{MAX_OUTPUT // 2}] }}}}
[...]
{{{{ output.output[-{MAX_OUTPUT // 2}:] }}}}
{{%- endif %}}"""


def write_settings(steps: int, path: str, *, edits: bool = False) -> str:
    """Write the agent's settings as YAML, in which JSON is valid.

    `steps` is the maximum number of steps, and `path` the PATH of commands. With `edits`, the prompt describes the edit command.
    """
    # Python would run outdated code if a file changes twice in a second.
    env = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": TEST_OPTIONS} | ({"PATH": path} if path else {})
    return rf"""
agent:
  agent_class: default
  step_limit: {steps}
  max_consecutive_format_errors: 2
  system_template: {json.dumps(EDIT_SYSTEM if edits else SYSTEM)}
  instance_template: {json.dumps(EDIT_QUESTION if edits else QUESTION)}
environment:
  timeout: {COMMAND_S}
  env: {json.dumps(env)}
model:
  model_class: litellm_textbased
  action_regex: {json.dumps(ACTION)}
  format_error_template: "Your answer must have a bash block with a command."
  observation_template: {json.dumps(OBSERVATION)}
"""


def _load_other_example() -> ModuleType:
    """Load `agent.py` of the other example under another name: it starts and stops the fork server."""
    found = importlib.util.spec_from_file_location("h200_agent", Path(__file__).parents[1] / "h200" / "agent.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


_other = _load_other_example()


def run_fork_server(spec: AgentSpec, installed: Installation, socket: Path) -> AbstractContextManager[None]:
    """Run a process that has imported the agent's packages, for the duration of the block."""
    server: AbstractContextManager[None] = _other.run_fork_server(spec, installed, socket)
    return server


def build_agent(python: str, socket: str = "", steps: int = STEPS, path: str = "", *, edits: bool = False) -> AgentSpec:
    """Build the description of an agent that the fork server starts. With an empty `socket`, it is started as the catalog says.

    The agent's commands have the PATH `path`, or if it is empty, that of the sandbox. With `edits`, its prompt describes the edit command.
    """
    spec = find_agent("mini-swe-agent").spec
    command = ["mini_textbased.yaml" if word == "mini.yaml" else word for word in spec.command]
    if socket:
        arguments = command[command.index(_other.MODULE) + 1 :]
        command = ["{python}", "-I", "-S", str(_other.HERE / "fork_client.py"), socket, *arguments]
    return msgspec.structs.replace(
        spec,
        title=f"{spec.title} (text-based)",
        command=(*command, "--config", "{home}/.mini/repairs.yaml"),
        install=msgspec.structs.replace(spec.install, python=python),
        preload=() if socket else spec.preload,
        files=(*spec.files, AgentFile(path=".mini/repairs.yaml", content=write_settings(steps, path, edits=edits))),
        check=(),
    )


if __name__ == "__main__":
    print(ensure_installed(build_agent(sys.argv[1])))
