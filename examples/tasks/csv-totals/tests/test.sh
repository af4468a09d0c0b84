#!/bin/bash
# 1 if totals.py prints what it should for every file, 0 if not.
tests="${TURNGATE_TESTS:-/tests}" logs="${TURNGATE_LOGS:-/logs}"
mkdir -p "$logs/verifier"
if python3 -I "$tests/check.py"; then reward=1; else reward=0; fi
echo "$reward" > "$logs/verifier/reward.txt"
