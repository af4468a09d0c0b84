"""Print the results of `main.add` for a few pairs of values, one per line."""

import sys

sys.path.insert(0, ".")
from main import add

for a, b in [(1, 2), (0, 0), (-4, 9), (10**18, 1), (0.5, 0.25), ("ab", "c")]:
    print(repr(add(a, b)))
