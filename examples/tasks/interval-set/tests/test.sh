#!/bin/bash
# A quarter for each function that is right: {"reward": 0.75}.
tests="${TURNGATE_TESTS:-/tests}" logs="${TURNGATE_LOGS:-/logs}"
mkdir -p "$logs/verifier"
python3 -I "$tests/check.py" > "$logs/verifier/reward.json"
