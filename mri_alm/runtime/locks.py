"""One user of a folder at a time, by a lock that the system takes back when its process ends, however it ends."""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import socket
import stat
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from mri_alm.errors import InputError

logger = logging.getLogger("mri_alm")

_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
_TRIES = 1000  # far more than other processes can be in the way; then the folder cannot be made


class InUseError(InputError):
    """Another process holds the lock."""


@contextlib.contextmanager
def exclusive_lock(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file; nothing of it stays, and a folder made for it alone goes too.

    It is ``flock``'s: ``kill -9`` and a power cut release it, so no lock is ever stale and none has to be deleted. A
    file that a killed process left behind says nothing. Processes forked meanwhile share the lock.

    Args:
        path: The lock file, inside the folder it protects.
        wait: Wait for the holder instead of refusing.

    Raises:
        InUseError: If another process holds it, with who and since when.
        InputError: If the file cannot be written.
    """
    made = not path.parent.exists()
    file = _hold(path, wait)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()
        if made:
            with contextlib.suppress(OSError):  # something was written into it
                path.parent.rmdir()


def _hold(path: Path, wait: bool) -> IO[str]:
    for tries in itertools.count(1):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(_open_own(path), "a+", encoding="utf-8")  # what the holder wrote is kept
        except OSError as error:
            if _taken_away(error, path.parent) and tries < _TRIES:
                continue
            reason = "it is a link, or no plain file" if error.errno == errno.ELOOP else error.strerror
            raise InputError(f"Cannot write {path}: {reason}. Choose another folder.") from error
        try:
            _lock(file, path, wait)
        except BaseException:
            file.close()
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # its holder took the file away while this process waited: lock the new one
    file.truncate(0)
    now = datetime.now(timezone.utc).astimezone().isoformat(" ", "seconds")
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}")
    file.flush()
    return file


def _taken_away(error: OSError, folder: Path) -> bool:
    """Whether the maker of an empty folder took it away meanwhile, and another one may have made it again since."""
    if not isinstance(error, (FileNotFoundError, FileExistsError)):
        return False
    try:
        return stat.S_ISDIR(folder.stat().st_mode)  # asked once: between two questions it could come or go
    except FileNotFoundError:
        return True


def _open_own(path: Path) -> int:
    """Open a lock file, but nothing that only has its name: what is written to it would end up elsewhere."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _lock(file: IO[str], path: Path, wait: bool) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read() or "another process"
        if not wait:
            raise InUseError(
                f"{path.parent} is in use by {holder} (lock {path.name}). Wait until it ends, end it, or choose "
                "another folder; the lock goes with its process, there is nothing to delete."
            ) from None
        logger.info("Waiting for %s, which uses %s.", holder, path.parent)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        logger.warning("%s is on a file system without locks: see to it that one process uses it.", path.parent)
