#!/bin/bash
# 1 if main.add adds, 0 if not. The work runs in a process of its own; what it prints has to be the sums.
tests="${TURNGATE_TESTS:-/tests}" logs="${TURNGATE_LOGS:-/logs}"
mkdir -p "$logs/verifier"
if timeout 20 python3 "$tests/sums.py" | timeout 20 python3 "$tests/compare.py"; then
  echo 1 > "$logs/verifier/reward.txt"
else
  echo 0 > "$logs/verifier/reward.txt"
fi
