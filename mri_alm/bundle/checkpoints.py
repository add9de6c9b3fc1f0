"""Checkpoints that carry their own digest: ordinary PyTorch files, whole or absent."""

import hashlib
import io
import pickletools
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mri_alm.errors import InputError
from mri_alm.runtime.atomic import write_atomically
from mri_alm.runtime.files import DamagedFileError, read_file

LARGEST_WEIGHTS = 16 << 30  # bytes
_MARK = b"sha256:"
_OURS = re.compile(r"collections\.OrderedDict|torch\._utils\._rebuild_tensor_v2|torch\.\w+Storage")
_LOCAL_HEADER = 30  # bytes, before an entry's name


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
    with write_atomically(path, previous=previous) as part:
        part.write_bytes(content + _MARK + digest)


def load_tensors(path: Path) -> dict[str, Any]:
    """What :func:`save_tensors` wrote, on the CPU.

    Raises:
        DamagedFileError: If its digest is not that of its content, or there is none and it cannot be read, or its
            archive could unpack to more than the file.
        InputError: If the file is absent, or holds anything but data.
    """
    try:
        content = read_file(path, LARGEST_WEIGHTS)
    except FileNotFoundError:
        raise InputError(f"There is no checkpoint {path}.") from None
    except OSError as error:
        raise InputError(f"{path} is no checkpoint that can be read ({error.strerror}).") from None
    return tensors_in(content, path)


def tensors_in(content: bytes, path: Path) -> dict[str, Any]:
    """The same of a file's content that is in memory already.

    Args:
        content: All of the file.
        path: What messages call it.

    Raises:
        DamagedFileError: As :func:`load_tensors`.
        InputError: If it holds anything but data.
    """
    import torch

    body, mark, digest = content[: -len(_MARK) - 64], content[-len(_MARK) - 64 : -64], content[-64:]
    if mark == _MARK and hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedFileError(f"{path} is damaged: its SHA-256 is not the one it was written with.")
    try:
        problem = _packed(content) or _foreign(content)
        state = None if problem else torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch.load raises nearly any type on a damaged file
        raise DamagedFileError(
            f"{path} is no checkpoint that can be read ({type(error).__name__}). Restore or delete it."
        ) from error
    if problem:
        raise DamagedFileError(
            f"{path} is no checkpoint of this project: its archive {problem}, which could fill the memory or run code. "
            "Do not trust where it came from; restore or delete it."
        )
    if not isinstance(state, dict):
        raise InputError(f"{path} holds a {type(state).__name__}, not a checkpoint of this project.")
    return state


def _packed(content: bytes) -> str:
    """Why a zip archive could unpack to more than its own bytes; empty where it cannot, or for what is no such archive.

    Raises:
        zipfile.BadZipFile: If it begins as a zip archive and is none.
    """
    if not content.startswith(b"PK\x03\x04"):  # by which PyTorch tells it from its form of before, which packs nothing
        return ""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        ends = [*(entry.header_offset for entry in entries[1:]), archive.start_dir]
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
        return "holds compressed entries"
    sizes = [_LOCAL_HEADER + len(entry.orig_filename.encode()) + entry.file_size for entry in entries]
    if any(entry.header_offset + size > end for entry, size, end in zip(entries, sizes, ends, strict=True)):
        return "holds entries that overlap"
    if len({entry.filename for entry in entries}) < len(entries):
        return "holds two entries of one name"
    return "" if not entries or entries[0].header_offset == 0 else "begins behind other bytes"


def _foreign(content: bytes) -> str:
    """What a file names that none of ours does, or nothing.

    ``weights_only`` allows more than tensors: ``bytearray`` and others that make as many bytes as a number asks for.
    """
    if not content.startswith(b"PK\x03\x04"):
        return ""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        pickles = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
    for code, argument, _ in (step for one in pickles for step in pickletools.genops(one)):
        named = str(argument).replace(" ", ".") if code.name in ("GLOBAL", "INST") else code.name
        if code.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4") or ("." in named and not _OURS.fullmatch(named)):
            return f"names {named}"
    return ""


def is_intact(path: Path) -> bool:
    """Whether a file of :func:`save_tensors` is there and undamaged."""
    try:
        return path.is_file() and bool(load_tensors(path))
    except DamagedFileError:
        return False
