"""mini-SWE-agent as the catalog has it, configured for a model that is no chat model: all of it is in the agent's own YAML settings.

A model of 135 million parameters cannot call JSON tools, but it can go on writing what looks like a shell session. So the agent's
text-based mode is used, the system prompt is a few lines of a session, the task is the next comment in it, and the action is the line
that the model writes. The chat template (`TEMPLATE`) adds nothing but the prompt sign: the model reads a plain text.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec

from turngate.agents.spec import AgentFile, AgentSpec, find_agent

SHOWN = (
    ("write the word moon into sky.txt", "echo moon > sky.txt"),
    ("make a folder called attic", "mkdir attic"),
    ("rename a.txt to b.txt", "mv a.txt b.txt"),
    ("copy c.txt to d.txt", "cp c.txt d.txt"),
    ("delete the file e.txt", "rm e.txt"),
)
TEMPLATE = (
    "{% for message in messages %}{{ ('$' if message.role == 'assistant' else '') + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}${% endif %}"
)
MAX_TOKENS = 16
NEWLINE = "Ċ"  # as the vocabulary spells it
_SETTINGS = """
agent:
  system_template: |
{shown}
  instance_template: "# {{{{task}}}}"
  step_limit: 1
model:
  model_class: litellm_textbased
  action_regex: '\\A\\s*([^\\n]+)'
  model_kwargs:
    max_tokens: {max_tokens}
"""


def agent() -> AgentSpec:
    """The catalog's description, with one more settings file behind its own."""
    spec = find_agent("mini-swe-agent").spec
    shown = "".join(f"    # {what}\n    $ {command}\n" for what, command in SHOWN).rstrip("\n")
    settings = AgentFile(path=".mini/errands.yaml", content=_SETTINGS.format(shown=shown, max_tokens=MAX_TOKENS))
    words = ["mini_textbased.yaml" if word == "mini.yaml" else word for word in spec.command]
    return msgspec.structs.replace(
        spec,
        title=f"{spec.title} (text-based, one step)",
        command=(*words, "--config", "{home}/.mini/errands.yaml"),
        files=(*spec.files, settings),
    )


def tokenizer(model_folder: Path, into: Path) -> Path:
    """The model's own tokenizer, with the template above; a turn ends with its line."""
    into.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(model_folder / "tokenizer.json", into / "tokenizer.json")
    config = json.loads((model_folder / "tokenizer_config.json").read_text())
    (into / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    vocabulary = json.loads((into / "tokenizer.json").read_text())["model"]["vocab"]
    ends = [vocabulary[NEWLINE], vocabulary[config["eos_token"]]]
    (into / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return into
