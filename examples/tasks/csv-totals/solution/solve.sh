#!/bin/bash
set -e
cp "${TURNGATE_SOLUTION:-/solution}/totals.py" totals.py
python3 totals.py < sales.csv
