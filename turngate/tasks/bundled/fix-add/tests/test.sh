#!/bin/bash
# Reward 1 if main.add is correct, otherwise 0. The agent's code runs in its own process, and only its output is compared.
tests="${TURNGATE_TESTS:-/tests}" logs="${TURNGATE_LOGS:-/logs}"
mkdir -p "$logs/verifier"
if timeout 20 python3 "$tests/sums.py" | timeout 20 python3 "$tests/compare.py"; then
  echo 1 > "$logs/verifier/reward.txt"
else
  echo 0 > "$logs/verifier/reward.txt"
fi
