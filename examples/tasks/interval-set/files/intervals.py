"""Sets of whole numbers as lists of closed intervals: (1, 3) is 1, 2 and 3."""

Interval = tuple[int, int]


def parse(text: str) -> list[Interval]:
    """Parse `"1-3, 7, 9-12"` into [(1, 3), (7, 7), (9, 12)], in the order of the text. Ignore spaces. Return [] for an empty text.
    Numbers may be negative: `"-5--2"` is [(-5, -2)]. Raise ValueError for any other text, and if an interval ends before it starts."""
    raise NotImplementedError


def merge(intervals: list[Interval]) -> list[Interval]:
    """Return the same numbers in as few intervals as possible, in ascending order. (1, 2) and (3, 4) touch, so they become (1, 4).
    Do not change the given list."""
    raise NotImplementedError


def gaps(intervals: list[Interval]) -> list[Interval]:
    """Return the numbers between the smallest and the largest that are in no interval, as intervals in ascending order."""
    raise NotImplementedError


def subtract(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """Return the numbers that are in `intervals` but not in `others`, in as few intervals as possible, in ascending order."""
    raise NotImplementedError
