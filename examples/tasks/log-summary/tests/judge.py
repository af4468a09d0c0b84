"""Compare the output of the agent's program with the expected output, for each log."""

import json
import pathlib
import sys

expected, probe = map(pathlib.Path, sys.argv[1:])
bad = 0
for wanted in sorted(expected.glob("*.json")):
    try:
        code = (probe / f"{wanted.stem}.code").read_text().strip()
        ok = code == "0" and json.loads((probe / f"{wanted.stem}.out").read_text()) == json.loads(wanted.read_text())
    except (OSError, ValueError):
        ok = False
    print(f"{'passed' if ok else 'FAILED'}: {wanted.stem}")
    bad += not ok
sys.exit(bool(bad))
