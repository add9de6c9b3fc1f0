"""Files and folders that are either complete or absent: written beside their place, flushed, then renamed.

Nothing in the package writes to a final name by another way; tests/test_architecture.py sees to it.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from mri_alm.errors import InputError


@contextlib.contextmanager
def write_atomically(path: Path, *, previous: Path | None = None) -> Iterator[Path]:
    """Give a name to write a file or a folder to; it takes its place when the block ends well, or leaves no trace.

    A crash at any moment leaves the old content or the new one, never a part; between the two renames that replace a
    folder it leaves neither under its name. A kill may also leave a ``.part-*`` folder, see :func:`sweep`.

    Args:
        path: The final name; parent folders are made. A folder of that name is replaced by a folder.
        previous: Where a file that stood there goes; between the two renames only this one exists.

    Raises:
        InputError: If the disk is full or the place cannot be written, in the block too; nothing that stood there is
            lost.
    """
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".part-", dir=path.parent))
        part, replaced = scratch / path.name, scratch / ".replaced"
        try:
            yield part
            _flush(part)
            if part.is_dir() and path.is_dir():
                path.replace(replaced)
            if previous and path.exists():
                path.replace(previous)
            part.replace(path)
            _flush(path.parent, whole=False)
        finally:
            if replaced.exists() and not path.exists():  # refused or interrupted between the two renames
                replaced.replace(path)
            try:
                shutil.rmtree(scratch, ignore_errors=True)
            except BaseException:  # a stop that arrived meanwhile
                shutil.rmtree(scratch, ignore_errors=True)
                raise


@contextlib.contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write a file into words.

    Raises:
        InputError: Naming the file, the reason and what to do.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"Cannot write {path}: {error.strerror}. Free space or choose another place, then start the same command "
            "again: it goes on from what is finished."
        ) from error


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines to a file, each in one write and on the disk before the next one; a file that is missing is made.

    What stands there is never touched. A crash or a full disk leaves the line in work whole, absent, or torn; a torn
    one gets its line end before the next line, so that it spoils no other. Whoever appends holds a lock.

    Args:
        path: The file.
        lines: Without line ends, which none may hold.

    Raises:
        InputError: If the disk is full or the file cannot be written.
    """
    with explain_os_errors(path), path.open("ab+", buffering=0) as file:
        whole = file.seek(0, os.SEEK_END) == 0 or (file.seek(-1, os.SEEK_END) >= 0 and file.read(1) == b"\n")
        for line in lines:
            content = (("" if whole else "\n") + line + "\n").encode()
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
            whole = True


def sweep(folder: Path) -> None:
    """Take away what killed processes left half written in a folder that this process alone writes to."""
    for part in folder.glob(".part-*"):
        shutil.rmtree(part, ignore_errors=True)


def _flush(path: Path, *, whole: bool = True) -> None:
    """Bring a file, a folder's list of names, or a whole folder to the disk."""
    if whole and path.is_dir():
        for inner in path.iterdir():
            _flush(inner)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or path.is_file():  # some network file systems do not flush folders
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Whatever is written meanwhile is its owner's only (0600, folders 0700), whatever the caller's umask.

    ``MRI_ALM_UMASK=027`` in the environment lets the group read it: see docs/decisions.md (30).

    Raises:
        InputError: If ``MRI_ALM_UMASK`` is no umask, or takes the owner's own rights.
    """
    text = os.environ.get("MRI_ALM_UMASK", "077")
    try:
        mask = int(text, 8)
    except ValueError:
        mask = -1
    if not 0 <= mask <= 0o077:
        raise InputError(f'MRI_ALM_UMASK must be 077 (owner only), 027 (group reads) or the like, got "{text}".')
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
