"""Run totals.py on files that the agent has not seen. It runs in a separate process, and only its output and exit code are checked."""

import subprocess
import sys

CASES = {
    "the example": (
        'date,region,units,price\n2024-01-02,North,10,12.50\n2024-01-02,"South, West",8,5.00\n'
        "2024-01-03,East,3,4.00\n2024-01-03,East,,4.00\n2024-01-04,North,1,6.50\n",
        "North: 131.50\nSouth, West: 40.00\nEast: 12.00\n",
        "left out: 1\n",
    ),
    "columns in another order": ("price,units,note,region\n2,3,x,B\n1.5,2,y,A\n", "B: 6.00\nA: 3.00\n", ""),
    "equal totals": ("region,units,price\nb,1,2\na,2,1\nc,1,9\n", "c: 9.00\na: 2.00\nb: 2.00\n", ""),
    "nothing usable": ("region,units,price\nA,x,1\nA,1,\n", "", "left out: 2\n"),
    "no rows": ("region,units,price\n", "", ""),
    "negative and fractional": (
        "region,units,price\nA,-1,2.50\nA,0.5,1\nB,1,0.05\nB,1,0.10\n",
        "B: 0.15\nA: -2.00\n",
        "",
    ),
    "quotes in quotes": ('region,units,price\n"He said ""hi""",2,2\n', 'He said "hi": 4.00\n', ""),
    "not a number": ("region,units,price\nA,1,1\nA,one,1\nB,1,free\n", "A: 1.00\n", "left out: 2\n"),
}

bad = 0
for name, (given, out, err) in CASES.items():
    try:
        done = subprocess.run([sys.executable, "totals.py"], input=given, capture_output=True, text=True, timeout=10)
        problem = "" if (done.stdout, done.stderr, done.returncode) == (out, err, 0) else repr(done)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    print(f"{'FAILED' if problem else 'passed'}: {name}", problem[:500])
    bad += bool(problem)
sys.exit(bool(bad))
