"""A cell's lease in a file that all its workers map into memory, so that they can check the lease without a system call or a message.

The process that renews the lease writes the file, and the workers read it. The front, which is the parent process of the workers, imports
this module, so the module must be fast to import.
"""

from __future__ import annotations

import math
import mmap
import uuid
from pathlib import Path

_NAME = "lease"
_ID_AT, _SIZE = 24, 64  # deadline, term and registered take 8 bytes each; the id follows
_TERM, _REGISTERED = 1, 2


def new_cell_id() -> str:
    return uuid.uuid4().hex


def create_lease_file(data: Path) -> None:
    """Create the lease file of a cell that is starting, with a new id and no lease."""
    path = data / _NAME
    path.unlink(missing_ok=True)  # a worker of an earlier run may still have the old file mapped
    path.write_bytes(bytes(_SIZE))
    path.chmod(0o600)
    LeaseFile(data).start_over(new_cell_id())


class LeaseFile:
    """The lease file: the cell's id and whether it is registered, the deadline of the lease (in `lease_clock` time), and the term.

    The term counts the ids that the cell has had since it started.
    """

    def __init__(self, data: Path) -> None:
        with open(data / _NAME, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        # Each number is written and read as one aligned machine word, so a reader never sees a half-written value.
        self._deadline = memoryview(self._map).cast("d")
        self._numbers = memoryview(self._map).cast("q")

    @property
    def cell(self) -> str:
        return self._map[_ID_AT : _ID_AT + 32].decode()

    @property
    def term(self) -> int:
        return self._numbers[_TERM]

    @property
    def registered(self) -> bool:
        """Whether the id is registered in the shared store."""
        return bool(self._numbers[_REGISTERED])

    @property
    def deadline(self) -> float:
        return self._deadline[0]

    def write(self, deadline: float, *, registered: bool) -> None:
        self._numbers[_REGISTERED] = int(registered)
        self._deadline[0] = deadline

    def start_over(self, cell: str) -> None:
        """Replace the id, and end the lease. Workers notice the new term, and cancel the sessions of the old id before they serve again."""
        self.write(-math.inf, registered=False)
        self._map[_ID_AT : _ID_AT + 32] = cell.encode()
        self._numbers[_TERM] += 1

    def close(self) -> None:
        self._deadline.release()
        self._numbers.release()
        self._map.close()
