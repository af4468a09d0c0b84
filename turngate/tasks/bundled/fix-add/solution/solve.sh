#!/bin/bash
set -e
sed -i 's/return a - b/return a + b/' main.py
python3 test_main.py
