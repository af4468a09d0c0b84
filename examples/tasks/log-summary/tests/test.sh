#!/bin/bash
# 1 if what run.sh kept is what should have been printed, 0 if not. Nothing of the work runs here.
tests="${TURNGATE_TESTS:-/tests}" logs="${TURNGATE_LOGS:-/logs}"
mkdir -p "$logs/verifier"
if python3 -I "$tests/judge.py" "$tests/expected" "$logs/probe"; then reward=1; else reward=0; fi
echo "$reward" > "$logs/verifier/reward.txt"
