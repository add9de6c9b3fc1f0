"""One DICOM file -> a pydicom data set, without trusting what the file says about its own lengths."""

import io
import logging
import os
import warnings
from pathlib import Path
from struct import error as StructError  # noqa: N812
from typing import Any

import pydicom
import SimpleITK as sitk  # noqa: N813
from pydicom.dataset import FileDataset
from pydicom.errors import BytesLengthException, InvalidDicomError

# What pydicom raises on damaged files; anything else is a bug of ours and keeps its traceback.
DAMAGED = (
    InvalidDicomError,
    BytesLengthException,
    ValueError,
    KeyError,
    AttributeError,
    TypeError,
    EOFError,
    OSError,
    NotImplementedError,
    OverflowError,
    MemoryError,
    RecursionError,
    StopIteration,
    StructError,
)
SMALL = 1 << 22  # bytes; up to here one read of the whole file is the fastest way to its header, too


def read_dicom(path: Path, **options: Any) -> FileDataset:
    """The data set of a file with or without preamble; damaged ones raise one of ``DAMAGED``, here or at an element.

    Args:
        path: File.
        options: As for :func:`pydicom.dcmread`.
    """
    small = path.stat().st_size <= SMALL
    with _Small(path.read_bytes()) if small else _Bounded(io.FileIO(path)) as stream:
        dataset = pydicom.dcmread(stream, force=True, **options)
    dataset.buffer = None  # closed, so of no use, and it would keep the data set from being sent to another process
    return dataset


def silence_readers() -> None:
    """Keep the messages of pydicom, Pillow and ITK out of terminals and logs: they quote values and paths of bad files.

    The settings are for the whole process and stay; what is wrong with a file is said by our own messages.
    """
    warnings.filterwarnings("ignore", module=r"(pydicom|PIL)(\.|$)")
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)
    sitk.ProcessObject.GlobalWarningDisplayOff()


class _Small(io.BytesIO):
    """A file in memory that is not read without a limit: pydicom does so before it inflates a deflated data set, whole.

    A file of four megabytes could hold four gigabytes. No MR scanner is known to write that transfer syntax.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(_limited(size))


class _Bounded(io.BufferedReader):
    """A file that is never asked for more than it holds: Python allocates what it is asked for, be it gigabytes."""

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw)
        self._length = os.fstat(raw.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(_limited(size), max(self._length - self.tell(), 0)))


def _limited(size: int | None) -> int:
    if size is None or size < 0:
        raise NotImplementedError("deflated data set")
    return size
