"""Sets of whole numbers as lists of closed intervals: (1, 3) is 1, 2 and 3."""

import re
from itertools import pairwise

Interval = tuple[int, int]
_PART = re.compile(r"\s*(-?\d+)\s*(?:-\s*(-?\d+)\s*)?")


def parse(text: str) -> list[Interval]:
    if not text.strip():
        return []
    found = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not an interval")
        start, end = int(match[1]), int(match[2] or match[1])
        if end < start:
            raise ValueError(f"{part!r} ends before it starts")
        found.append((start, end))
    return found


def merge(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def gaps(intervals: list[Interval]) -> list[Interval]:
    merged = merge(intervals)
    return [(left[1] + 1, right[0] - 1) for left, right in pairwise(merged)]


def subtract(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    rest = merge(intervals)
    for low, high in merge(others):
        rest = [
            piece
            for start, end in rest
            for piece in ((start, min(end, low - 1)), (max(start, high + 1), end))
            if piece[0] <= piece[1]
        ]
    return merge(rest)
