"""Check that standard input contains the expected sums. The agent's code is not imported here."""

import sys

print(said := sys.stdin.read(10_000))
sys.exit(said.split() != ["3", "0", "5", "1000000000000000001", "0.75", "'abc'"])
