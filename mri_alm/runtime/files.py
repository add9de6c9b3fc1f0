"""Bytes and JSON, written complete or not at all (:mod:`mri_alm.runtime.atomic`) and read with care; folders listed."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError
from mri_alm.runtime.atomic import explain_os_errors, write_atomically

IMAGE = re.compile(r"\.(nii|nii\.gz|mha|mhd|nrrd)$", re.IGNORECASE)  # a file of voxels, by its name


class DamagedFileError(InputError):
    """A file that is cut short, or whose bits are not those that were written."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent, see :func:`write_atomically`.

    Raises:
        InputError: If the disk is full or the place cannot be written; nothing that stood there is lost.
    """
    with explain_os_errors(path), write_atomically(path) as part:
        part.write_bytes(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object; NaN and infinity are refused, as they are not JSON."""
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path, kind: type | tuple[type, ...] = dict) -> Any:
    """The JSON object that :func:`write_json` wrote; of files that others made, a list or either may be asked for.

    Raises:
        DamagedFileError: If the file holds anything else.
        FileNotFoundError: If there is none.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DamagedFileError(f"{path} is damaged ({error}). Restore it from a copy, or correct it.") from None
    if not isinstance(found, kind):
        what = type(found).__name__
        raise DamagedFileError(f"{path} is damaged (it holds a {what}). Restore it from a copy, or correct it.")
    return found


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, as 64 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def in_utf8(path: Path) -> bool:
    """Whether a path is text: ITK ends the process over one that is not."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def walk(root: Path) -> Iterator[Path]:
    """All files below a folder, sorted within each folder; links are followed, a folder met again is left out.

    Raises:
        InputError: If a folder cannot be listed: its studies would vanish in silence.
    """
    seen = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_refuse):
        if (place := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders.sort()
        yield from (path for name in sorted(files) if (path := Path(folder) / name).is_file())


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
        with file.open("rb") as stream:
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
