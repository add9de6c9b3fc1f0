"""The kinds of files we write, each complete or absent (:mod:`mri_alm.atomic`), and their readers."""

import csv
import errno
import gzip
import hashlib
import io
import json
import os
import secrets
import struct
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import SimpleITK as sitk  # noqa: N813

from mri_alm.atomic import complete, told
from mri_alm.cells import neutral, plain
from mri_alm.errors import InputError
from mri_alm.locks import only_user

# Threads that read images by ITK at once crash now and then (SimpleITK issue 74): hold this where threads do.
ONE_IMAGE_FILE = threading.Lock()
_NIFTI_HEADER = 352  # bytes before the voxels
_MARK = b"sha256:"


class DamagedFileError(InputError):
    """A file of ours that is cut short, or whose bits are not those that were written."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent, see :func:`complete`.

    Raises:
        InputError: If the disk is full or the place cannot be written; nothing that stood there is lost.
    """
    with told(path), complete(path) as part:
        part.write_bytes(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object; NaN and infinity are refused, as they are not JSON."""
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file with these columns, in this order; floats are written so that they read back equal.

    Texts that a spreadsheet would run as a formula get an apostrophe, see :mod:`mri_alm.cells`.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: neutral(cell) for column, cell in row.items()} for row in rows)
    write_bytes(path, text.getvalue().encode())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that :func:`write_json` wrote.

    Raises:
        DamagedFileError: If the file holds anything else.
        FileNotFoundError: If there is none.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DamagedFileError(f"{path} is damaged ({error}). Restore it from a copy.") from None
    if not isinstance(found, dict):
        raise DamagedFileError(f"{path} is damaged (no JSON object). Restore it from a copy.")
    return found


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV that :func:`write_csv` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {key: plain(cell) for key, cell in row.items() if isinstance(cell, str)} for row in csv.DictReader(file)
        ]


def read_table(path: Path, required: Collection[str]) -> list[dict[str, str]]:
    """Rows of a CSV file that a person made, in UTF-8, cells stripped.

    Args:
        path: The file.
        required: Columns it must have; it may have others.

    Raises:
        InputError: If it cannot be read, lacks a column, or has no row below the header.
    """
    try:
        reader = csv.DictReader(io.StringIO(path.read_text("utf-8-sig"), newline=""))
        rows = [{key: plain((value or "").strip()) for key, value in row.items() if key} for row in reader]
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}). Give the path of a CSV file with {', '.join(required)}."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is no CSV text in UTF-8 ({error}). Save it as such.") from None
    columns = reader.fieldnames or ()
    if missing := [name for name in required if name not in columns]:
        raise InputError(f"{path}: no column {', '.join(missing)}. Its columns are: {', '.join(columns) or 'none'}.")
    if not rows:
        raise InputError(f"{path} has a header but no study.")
    return rows


def write_nifti(path: Path, image: sitk.Image) -> None:
    """Write a compressed NIfTI file; equal images give equal files.

    Raises:
        InputError: If the disk is full or the place cannot be written.
    """
    voxels = image.GetNumberOfPixels() * image.GetNumberOfComponentsPerPixel() * image.GetSizeOfPixelComponent()
    with told(path), complete(path) as part:
        plain = part.with_suffix("")
        try:
            with ONE_IMAGE_FILE:
                sitk.WriteImage(image, str(plain))
        except RuntimeError as error:  # SimpleITK's only kind
            raise OSError(errno.EIO, "the NIfTI writer failed") from error
        if plain.stat().st_size < _NIFTI_HEADER + voxels:  # ITK does not notice a full disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # Level 1 is four times as fast as the default and 5 % larger; no time stamp: equal images are equal files.
        part.write_bytes(gzip.compress(plain.read_bytes(), compresslevel=1, mtime=0))


def save_tensors(path: Path, state: Mapping[str, Any], *, previous: Path | None = None) -> None:
    """``torch.save`` for what ``torch.load(weights_only=True)`` reads back: tensors, numbers, strings, containers.

    The file is an ordinary PyTorch file. Its SHA-256 stands in it, as the comment of the zip archive that it is.

    Args:
        path: The file.
        state: What it holds.
        previous: Where the file that stood there goes, see :func:`complete`.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    # A zip archive ends with the length of its comment.
    content = buffer.getvalue()[:-2] + struct.pack("<H", len(_MARK) + 64)
    digest = hashlib.sha256(content).hexdigest().encode()
    with told(path), complete(path, previous=previous) as part:
        part.write_bytes(content + _MARK + digest)


def load_tensors(path: Path) -> dict[str, Any]:
    """What :func:`save_tensors` wrote, on the CPU.

    Raises:
        DamagedFileError: If its digest is not that of its content, or there is none and it cannot be read.
        InputError: If the file is absent, or holds anything but data.
    """
    import torch

    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"There is no checkpoint {path}.") from None
    except OSError as error:
        raise InputError(f"{path} is no checkpoint that can be read ({error.strerror}).") from None
    body, mark, digest = content[: -len(_MARK) - 64], content[-len(_MARK) - 64 : -64], content[-64:]
    if mark == _MARK and hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedFileError(f"{path} is damaged: its SHA-256 is not the one it was written with.")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch.load raises nearly any type on a damaged file
        raise DamagedFileError(
            f"{path} is no checkpoint that can be read ({type(error).__name__}). Restore or delete it."
        ) from error
    if not isinstance(state, dict):
        raise InputError(f"{path} holds a {type(state).__name__}, not a checkpoint of this project.")
    return state


def is_intact(path: Path) -> bool:
    """Whether a file of :func:`save_tensors` is there and undamaged."""
    try:
        return path.is_file() and bool(load_tensors(path))
    except DamagedFileError:
        return False


def secret_of(folder: Path) -> str:
    """A folder's secret for study keys (file ``salt``): made once, readable by its owner only."""
    path = folder / "salt"
    if not path.exists():
        with only_user(folder / ".salt.lock", wait=True):
            if not path.exists():  # another process may just have made it
                with told(path), complete(path) as part:
                    part.write_bytes(secrets.token_hex(16).encode())
                    part.chmod(0o600)
    return path.read_text()


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
