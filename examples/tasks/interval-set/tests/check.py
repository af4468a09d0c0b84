"""Print the reward. The agent's module runs in separate processes, one per function, and their output is compared here."""

import json
import pathlib
import subprocess
import sys

BIG = 10**18
CASES: dict[str, list[tuple[list, object]]] = {
    "parse": [
        (["1-3, 7, 9-12"], [[1, 3], [7, 7], [9, 12]]),
        ([""], []),
        (["  "], []),
        ([" 4 - 6 ,2"], [[4, 6], [2, 2]]),
        (["-5--2"], [[-5, -2]]),
        (["-3-4,-1"], [[-3, 4], [-1, -1]]),
        (["7-3"], "ValueError"),
        (["1,,2"], "ValueError"),
        (["a-b"], "ValueError"),
        (["1-2-3"], "ValueError"),
        (["1.5"], "ValueError"),
    ],
    "merge": [
        ([[]], []),
        ([[[5, 9], [1, 2], [3, 4]]], [[1, 9]]),  # intervals that touch are merged
        ([[[6, 9], [1, 2], [3, 4]]], [[1, 4], [6, 9]]),
        ([[[1, 10], [2, 3], [12, 12]]], [[1, 10], [12, 12]]),
        ([[[0, BIG], [BIG + 1, BIG + 2], [-1, -1]]], [[-1, BIG + 2]]),
        ([[[4, 4], [4, 4]]], [[4, 4]]),
    ],
    "gaps": [
        ([[]], []),
        ([[[1, 2]]], []),
        ([[[8, 9], [1, 2], [4, 4]]], [[3, 3], [5, 7]]),
        ([[[1, 9], [3, 4]]], []),
        ([[[0, 0], [BIG, BIG]]], [[1, BIG - 1]]),
    ],
    "subtract": [
        ([[], [[1, 2]]], []),
        ([[[1, 10]], []], [[1, 10]]),
        ([[[1, 10]], [[3, 4], [10, 12]]], [[1, 2], [5, 9]]),
        ([[[1, 3], [4, 6]], [[0, 0], [6, 9]]], [[1, 5]]),
        ([[[1, 3]], [[-BIG, BIG]]], []),
        ([[[-BIG, BIG]], [[0, 0]]], [[-BIG, -1], [1, BIG]]),
    ],
}
calls = pathlib.Path(__file__).with_name("calls.py")
right = 0
for name, cases in CASES.items():
    given = json.dumps([arguments for arguments, _ in cases])
    try:
        command = [sys.executable, str(calls), name]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=20)
        ok = [json.loads(line) for line in done.stdout.splitlines()] == [wanted for _, wanted in cases]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        done, ok = error, False
    right += ok
    print(f"{'passed' if ok else 'FAILED'}: {name}", "" if ok else repr(done)[-500:], file=sys.stderr)
print(json.dumps({"reward": right / len(CASES)}))
