#!/bin/bash
# Runs the work on each log and keeps what it printed. It decides nothing: test.sh does, where the work is not.
tests="${TURNGATE_TESTS:-/tests}" logs="${TURNGATE_LOGS:-/logs}"
mkdir -p "$logs/probe"
for input in "$tests"/inputs/*.log; do
  name=$(basename "$input" .log)
  timeout 20 python3 summary.py < "$input" > "$logs/probe/$name.out" 2> "$logs/probe/$name.err"
  echo $? > "$logs/probe/$name.code"
done
