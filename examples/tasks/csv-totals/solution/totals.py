"""Totals per region of a CSV file on standard input."""

import csv
import sys
from collections import defaultdict
from decimal import Decimal, InvalidOperation

totals: dict[str, Decimal] = defaultdict(Decimal)
left_out = 0
for row in csv.DictReader(sys.stdin):
    try:
        amount = Decimal(row["units"].strip()) * Decimal(row["price"].strip())
        if not amount.is_finite():
            raise InvalidOperation
    except (InvalidOperation, AttributeError):
        left_out += 1
        continue
    totals[row["region"]] += amount
for region, total in sorted(totals.items(), key=lambda item: (-item[1], item[0])):
    print(f"{region}: {total:.2f}")
if left_out:
    print(f"left out: {left_out}", file=sys.stderr)
