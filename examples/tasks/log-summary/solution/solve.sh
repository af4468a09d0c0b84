#!/bin/bash
set -e
cp "${TURNGATE_SOLUTION:-/solution}/summary.py" summary.py
python3 summary.py < example.log
