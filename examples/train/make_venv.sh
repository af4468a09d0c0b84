#!/bin/sh
# Create a virtual environment for Turngate from a folder of wheels, on a machine without a network.
#
#     sh make_venv.sh WHEELS VENV
#
# The environment also sees the packages of the machine's python3, such as torch. Prints the path of its Python.
set -eu
wheels=$(realpath "$1") root=$(realpath "$(dirname "$0")/../..")
python3 -m venv --without-pip "$2"
python="$2/bin/python"
site=$("$python" -c 'import site; print(site.getsitepackages()[0])')
python3 -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' > "$site/machine.pth"
"$python" -m zipfile -e "$wheels"/pip-*.whl "$site"
PIP_NO_INDEX=1 PIP_FIND_LINKS="$wheels" PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install -q gguf $("$python" - "$root/pyproject.toml" <<'PYTHON'
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"])
PYTHON
)
echo "$root" > "$site/turngate.pth"
echo "$python"
