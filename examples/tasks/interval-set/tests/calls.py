"""Call one function of the agent's module with each list of arguments from standard input, and print each result as a line of JSON."""

import json
import sys

sys.path.insert(0, ".")
import intervals

function = getattr(intervals, sys.argv[1])
for arguments in json.load(sys.stdin):
    arguments = [[tuple(pair) for pair in a] if isinstance(a, list) else a for a in arguments]
    try:
        print(json.dumps([list(pair) for pair in function(*arguments)]), flush=True)
    except ValueError:
        print(json.dumps("ValueError"), flush=True)
