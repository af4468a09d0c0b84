"""Sets of whole numbers as lists of closed intervals: (1, 3) is 1, 2 and 3."""

Interval = tuple[int, int]


def parse(text: str) -> list[Interval]:
    """`"1-3, 7, 9-12"` as [(1, 3), (7, 7), (9, 12)], in the order of the text. Blanks do not matter, and an empty text is [].
    Numbers may be negative: `"-5--2"` is [(-5, -2)]. ValueError for anything else, and where the end comes before the start."""
    raise NotImplementedError


def merge(intervals: list[Interval]) -> list[Interval]:
    """The same numbers in as few intervals as possible, in ascending order. (1, 2) and (3, 4) touch: they become (1, 4).
    The list that was given stays as it is."""
    raise NotImplementedError


def gaps(intervals: list[Interval]) -> list[Interval]:
    """The numbers between the first and the last that are in no interval, in ascending order."""
    raise NotImplementedError


def subtract(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """The numbers in `intervals` and not in `others`, in as few intervals as possible, in ascending order."""
    raise NotImplementedError
