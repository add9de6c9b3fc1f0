"""Files that are either complete or absent: written beside their place, flushed, then renamed."""

import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import SimpleITK as sitk  # noqa: N813

from mri_alm.cells import neutral, plain
from mri_alm.errors import InputError


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a crash at any moment leaves the old one or the new one, never a part.

    Raises:
        InputError: If the disk is full or the place cannot be written; nothing that stood there is lost.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            f"Cannot write {path}: {error.strerror}. Free space or choose another place, then start the same command "
            "again: it goes on from what is finished."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # such as a parent that is no folder
            temporary.unlink(missing_ok=True)


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
    plain = path.with_suffix("")
    try:
        sitk.WriteImage(image, str(plain))
        # Level 1 is four times as fast as the default and 5 % larger; no time stamp: equal images are equal files.
        write_bytes(path, gzip.compress(plain.read_bytes(), compresslevel=1, mtime=0))
    except RuntimeError as error:  # SimpleITK's only kind
        raise InputError(f"Cannot write {path}. Free space or choose another place, then start again.") from error
    finally:
        plain.unlink(missing_ok=True)


def save_tensors(path: Path, state: Mapping[str, Any]) -> None:
    """``torch.save`` for what ``torch.load(weights_only=True)`` reads back: tensors, numbers, strings, containers."""
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_bytes(path, buffer.getvalue())


def load_tensors(path: Path) -> dict[str, Any]:
    """What :func:`save_tensors` wrote, on the CPU.

    Raises:
        InputError: If the file is absent, damaged, or holds anything but data.
    """
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"There is no checkpoint {path}.") from None
    except Exception as error:  # torch.load raises nearly any type on a damaged file
        raise InputError(
            f"{path} is no checkpoint that can be read ({type(error).__name__}). Restore or delete it."
        ) from error
    if not isinstance(state, dict):
        raise InputError(f"{path} holds a {type(state).__name__}, not a checkpoint of this project.")
    return state


def secret_of(folder: Path) -> str:
    """A folder's secret for study keys (file ``salt``): made once, readable by its owner only."""
    path = folder / "salt"
    if not path.exists():
        write_bytes(path, secrets.token_hex(16).encode())
        path.chmod(0o600)
    return path.read_text()


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, as 64 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
