"""Checkpoints that carry their own digest: ordinary PyTorch files, whole or absent."""

import hashlib
import io
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError
from mri_alm.runtime.atomic import explain_os_errors, write_atomically
from mri_alm.runtime.files import DamagedFileError, read_file

LARGEST_WEIGHTS = 16 << 30  # bytes
_MARK = b"sha256:"


def save_tensors(path: Path, state: Mapping[str, Any], *, previous: Path | None = None) -> None:
    """``torch.save`` for what ``torch.load(weights_only=True)`` reads back: tensors, numbers, strings, containers.

    The file is an ordinary PyTorch file. Its SHA-256 stands in it, as the comment of the zip archive that it is.

    Args:
        path: The file.
        state: What it holds.
        previous: Where the file that stood there goes, see :func:`write_atomically`.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    # A zip archive ends with the length of its comment.
    content = buffer.getvalue()[:-2] + struct.pack("<H", len(_MARK) + 64)
    digest = hashlib.sha256(content).hexdigest().encode()
    with explain_os_errors(path), write_atomically(path, previous=previous) as part:
        part.write_bytes(content + _MARK + digest)


def load_tensors(path: Path) -> dict[str, Any]:
    """What :func:`save_tensors` wrote, on the CPU.

    Raises:
        DamagedFileError: If its digest is not that of its content, or there is none and it cannot be read.
        InputError: If the file is absent, or holds anything but data.
    """
    import torch

    try:
        content = read_file(path, LARGEST_WEIGHTS)
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
