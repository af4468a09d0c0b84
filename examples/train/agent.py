"""mini-SWE-agent from the catalog, configured with its own YAML settings for a model that cannot chat.

A model with 135 million parameters cannot call JSON tools, but it can continue a shell session. So this uses the agent's text-based mode:
the system prompt is a few lines of a session, the task is the next comment in it, and the action is the line that the model writes. The
chat template (`TEMPLATE`) adds nothing but the prompt sign, so the model reads plain text.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec

from turngate.agents.spec import AgentFile, AgentSpec, find_agent

EXAMPLES = (
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
NEWLINE = "Ċ"  # the newline token in the vocabulary
_SETTINGS = """
agent:
  system_template: |
{examples}
  instance_template: "# {{{{task}}}}"
  step_limit: 1
model:
  model_class: litellm_textbased
  action_regex: '\\A\\s*([^\\n]+)'
  model_kwargs:
    max_tokens: {max_tokens}
"""


def build_agent() -> AgentSpec:
    """Build the catalog's description, with an additional settings file."""
    spec = find_agent("mini-swe-agent").spec
    examples = "".join(f"    # {task}\n    $ {command}\n" for task, command in EXAMPLES).rstrip("\n")
    settings = AgentFile(path=".mini/errands.yaml", content=_SETTINGS.format(examples=examples, max_tokens=MAX_TOKENS))
    command = ["mini_textbased.yaml" if word == "mini.yaml" else word for word in spec.command]
    return msgspec.structs.replace(
        spec,
        title=f"{spec.title} (text-based, one step)",
        command=(*command, "--config", "{home}/.mini/errands.yaml"),
        files=(*spec.files, settings),
    )


def build_tokenizer(model_folder: Path, folder: Path) -> Path:
    """Copy the model's tokenizer into `folder`, with `TEMPLATE` as its chat template and the newline as an end-of-turn token."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(model_folder / "tokenizer.json", folder / "tokenizer.json")
    config = json.loads((model_folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    ends = [vocabulary[NEWLINE], vocabulary[config["eos_token"]]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder
