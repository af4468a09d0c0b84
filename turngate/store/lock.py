"""The lock on a data folder, which ensures that only one gateway or service writes to the folder at a time."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from turngate.errors import ConfigError, DataFolderInUse


def lock_folder(folder: Path) -> IO[bytes]:
    """Create the folder if necessary, and lock it. Return the lock file.

    The folder stays locked until this process, and every process that inherited the open lock file, has closed the file. Raise
    `DataFolderInUse` if another process holds the lock, and `ConfigError` if the folder cannot be written to or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = open(folder / "lock", "wb")  # noqa: SIM115  # held open for as long as the store is
    except OSError as error:
        raise ConfigError(
            f"data: {folder} cannot be written to ({error.strerror}); choose another --data folder", param="data"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise DataFolderInUse(
            f"data: {folder} is in use by another turngate process; stop it or choose another --data folder",
            param="data",
        ) from None
    except OSError as error:
        file.close()
        raise ConfigError(
            f"data: {folder} cannot be locked ({error.strerror}); choose a --data folder on a file system that supports locks",
            param="data",
        ) from None
    return file
