"""Bytes and JSON, written complete or not at all (:mod:`mri_alm.runtime.atomic`) and read with care; folders listed."""

import errno
import hashlib
import io
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError
from mri_alm.runtime.atomic import write_atomically

IMAGE = re.compile(r"\.(nii|nii\.gz|mha|mhd|nrrd)$", re.IGNORECASE)  # a file of voxels, by its name
LARGEST_JSON = 64 << 20  # bytes; a report of ten thousand exams is shorter
_LEADS_OUT = "a link that leads out"
_PIECE = 1 << 20  # bytes that are hashed at once
_LONGEST_WHOLE = 18  # digits of a whole number that every program holds
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class DamagedFileError(InputError):
    """A file that is cut short, or whose bits are not those that were written."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent, see :func:`write_atomically`.

    Raises:
        InputError: If the disk is full or the place cannot be written; nothing that stood there is lost.
    """
    with write_atomically(path) as part:
        part.write_bytes(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object; NaN and infinity are refused, as they are not JSON."""
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def open_file(path: Path) -> io.BufferedReader:
    """An ordinary file, open for reading, by whatever link; nothing that waits for a writer, or never ends.

    What is opened is what is judged: nobody can exchange the file between the two.

    Raises:
        OSError: If it cannot be opened, or is a named pipe, a socket, a device or a folder; ``strerror`` says which.
    """
    return open(path, "rb", opener=_open_ordinary)


def _open_ordinary(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if (kind := stat.S_IFMT(os.fstat(descriptor).st_mode)) == stat.S_IFREG:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, no file", path)


def read_file(path: Path, most: int) -> bytes:
    """The bytes of an ordinary file, see :func:`open_file`.

    Args:
        path: The file.
        most: Bytes that it may have; of one with more nothing is read.

    Raises:
        OSError: As :func:`open_file`; or it has more bytes, or grows while it is read.
    """
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read", str(path))
        content = stream.read(size + 1)
    if len(content) > size:
        raise OSError(errno.EFBIG, "it grows while it is read", str(path))
    return content


def read_json(path: Path, kind: type | tuple[type, ...] = dict, *, most: int = LARGEST_JSON) -> Any:
    """The JSON object that :func:`write_json` wrote; of files that others made, a list or either may be asked for.

    Every number in it is finite, no key stands twice, and every text can be written, but for parts of file names that
    are not in UTF-8 (U+DC80 to U+DCFF).

    Raises:
        DamagedFileError: If the file holds anything else.
        InputError: If it cannot be read.
        FileNotFoundError: If there is none.
    """
    try:
        found = json.loads(
            read_file(path, most).decode(),
            parse_constant=_number,
            parse_float=_number,
            parse_int=_whole,
            object_pairs_hook=_each_key_once,
        )
        json.dumps(found, ensure_ascii=False).encode(errors="surrogateescape")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). A JSON file is needed there.") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise DamagedFileError(f"{path} is damaged ({reason}). Restore it from a copy, or correct it.") from None
    if not isinstance(found, kind):
        what = type(found).__name__
        raise DamagedFileError(f"{path} is damaged (it holds a {what}). Restore it from a copy, or correct it.")
    return found


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is no number of JSON, or beyond what a program can hold")
    return number


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > _LONGEST_WHOLE:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


@dataclass(frozen=True)
class Fields:
    """An object of a JSON file, each of its fields read as the kind that it must be.

    Args:
        place: Where it stands, for messages: the file, and the way to the object in it.
        content: Of the object.
    """

    place: str
    content: Mapping[str, Any]

    def refused(self, name: str, wanted: str) -> DamagedFileError:
        """That a field holds something else than what is wanted, in a sentence with its value."""
        found = shown(self.content[name]) if name in self.content else "no such field"
        return DamagedFileError(f"{self.place}: {name} must be {wanted}, found {found}. Restore the file from a copy.")

    def number(self, name: str, least: float = -math.inf, most: float = math.inf) -> float:
        """A finite number in [least, most]; True and False are none."""
        value: Any = self.content.get(name)
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
            limits = "" if math.isinf(most) else f" from {least:g} to {most:g}"
            raise self.refused(name, f"a finite number{limits}")
        return float(value)

    def whole(self, name: str, most: float = math.inf) -> int:
        """A whole number from 0 to ``most``."""
        value = self.content.get(name)
        if type(value) is not int or not 0 <= value <= most:
            raise self.refused(name, f"a whole number from 0 {'on' if math.isinf(most) else f'to {most}'}")
        return value

    def text(self, name: str) -> str:
        """A text of 1 to 300 printable characters."""
        value = self.content.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= 300 or not value.isprintable():
            raise self.refused(name, "a text of 1 to 300 printable characters")
        return value

    def items(self, name: str) -> "Fields":
        """A list in this object, as an object whose fields are called 1, 2, ..."""
        value = self.content.get(name)
        if not isinstance(value, list):
            raise self.refused(name, "a list")
        return Fields(f"{self.place}, {name}", {str(number): one for number, one in enumerate(value, 1)})

    def object(self, name: str) -> "Fields":
        """An object in this one."""
        value = self.content.get(name)
        if not isinstance(value, dict):
            raise self.refused(name, "an object")
        return Fields(f"{self.place}, {name}", value)


def shown(value: Any, longest: int = 60) -> str:
    """The beginning of a JSON value, in ASCII, as a message shows it."""
    text = json.dumps(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def sha256(path: Path) -> str:
    """SHA-256 of an ordinary file's content, as 64 hexadecimal digits.

    Raises:
        OSError: As :func:`open_file`.
    """
    state = hashlib.sha256()
    with open_file(path) as stream:
        while piece := stream.read(_PIECE):
            state.update(piece)
    return state.hexdigest()


def in_utf8(path: Path) -> bool:
    """Whether a path is text: ITK ends the process over one that is not."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def walk(root: Path, *, within: Path | None = None) -> Iterator[Path]:
    """All files below a folder, sorted within each folder; links are followed, a folder met again is left out.

    Args:
        root: The folder, which may be a link itself.
        within: Links that lead out of this folder are left out, see :func:`links_out_of`; None: they may lead anywhere.

    Raises:
        InputError: If a folder cannot be listed: its studies would vanish in silence.
    """
    return (path for path, why in _entries(root, within) if not why)


def links_out_of(within: Path, root: Path) -> list[Path]:
    """The links below ``root``, to files or folders, that lead out of ``within``; those to nothing do not count.

    Raises:
        InputError: As :func:`walk`.
    """
    return [path for path, why in _entries(root, within) if why == _LEADS_OUT]


def no_files(root: Path, *, within: Path | None = None) -> dict[Path, str]:
    """What :func:`walk` leaves out that is no folder, with what it is: named pipes, links that lead nowhere, ...

    Raises:
        InputError: As :func:`walk`.
    """
    return {path: why for path, why in _entries(root, within) if why not in ("", _LEADS_OUT)}


def _entries(root: Path, within: Path | None) -> Iterator[tuple[Path, str]]:
    """What lies below a folder and is none, and links that lead out of another; with why it is left out, or nothing."""
    seen, inside = set(), None if within is None else within.resolve()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_refuse):
        if (place := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(place)
        out = {name for name in folders if _leads_out(Path(folder) / name, inside)}
        yield from ((Path(folder) / name, _LEADS_OUT) for name in sorted(out))
        folders[:] = sorted({*folders} - out)
        for path in (Path(folder) / name for name in sorted(names)):
            yield path, _no_file(path) or (_LEADS_OUT if _leads_out(path, inside) else "")


def _leads_out(path: Path, inside: Path | None) -> bool:
    return inside is not None and path.is_symlink() and not path.resolve().is_relative_to(inside)


def _no_file(path: Path) -> str:
    """What an entry is that is no ordinary file, or nothing."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except OSError:
        return "a link that leads nowhere, no file"
    return "" if kind == stat.S_IFREG else f"{_KINDS.get(kind, 'something else')}, no file"


def _refuse(error: OSError) -> None:
    raise InputError(
        f"The folder {error.filename} cannot be listed ({error.strerror}). Get access to it, or leave it out."
    ) from error


def is_image(file: Path) -> bool:
    """Whether a file's name is that of an image; notes that macOS puts beside images (``._t2.nii.gz``) are none."""
    note = file.name.startswith("._") or "__MACOSX" in file.parts
    return bool(IMAGE.search(file.name)) and not note


def unusable(file: Path) -> str:
    """Why a file cannot be what its name says, or nothing."""
    if not in_utf8(file):  # ITK ends the process over such a name
        return "a name that is not in UTF-8; rename the file or its folder"
    try:
        with open_file(file) as stream:
            return "zip archive; unpack it first" if file.suffix.lower() == ".zip" else stands_for(stream.read(23))
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def stands_for(start: bytes) -> str:
    """What a file holds instead of data, by its first bytes: an archive, or the pointer of Git LFS; else nothing."""
    if start.startswith(b"PK\x03\x04"):
        return "zip archive; unpack it first"
    return "Git LFS pointer instead of data" if start.startswith(b"version https://git-lfs") else ""


def stem(file: Path) -> str:
    """A file's name without the ending of an image."""
    return re.sub(r"(\.nii)?\.\w+$", "", file.name, flags=re.IGNORECASE)


def bvals_of(image: Path) -> list[Path]:
    """The table of b-values beside an image, if there is one, under the names that programs give it."""
    names = [f"{name}{ending}" for name in (stem(image), image.name) for ending in (".bval", ".bvals", ".BVAL")]
    found = {path.resolve(): path for name in names if (path := image.with_name(name)).is_file()}
    return list(found.values())
