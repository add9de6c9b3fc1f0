"""NIfTI, MHA and NRRD files -> SimpleITK images, each header judged before a byte of it is allocated; NIfTI out."""

import contextlib
import errno
import gzip
import math
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import SimpleITK as sitk  # noqa: N813

from mri_alm.errors import StudyError, memory_ran_out
from mri_alm.imaging.dicom_files import silence_readers
from mri_alm.imaging.volume import MAX_VOXELS, SPACING_MM
from mri_alm.runtime.atomic import explain_os_errors, write_atomically
from mri_alm.runtime.files import in_utf8

# Threads that read images by ITK at once crash now and then (SimpleITK issue 74).
ONE_IMAGE_FILE = threading.Lock()
_NIFTI_HEADER = 352  # bytes before the voxels
MAX_SERIES_VOXELS = 4 * MAX_VOXELS  # all volumes of a 4D file
DEFLATE_RATIO = 1100  # zlib never packs tighter than 1032 to 1
DETACHED = (".mhd", ".nhdr", ".hdr")  # headers whose voxels are in another file
FORMATS = {
    **dict.fromkeys((".nii", ".gz", ".hdr", ".img"), "NiftiImageIO"),
    **dict.fromkeys((".mha", ".mhd"), "MetaImageIO"),
    **dict.fromkeys((".nrrd", ".nhdr"), "NrrdImageIO"),
}  # no other format is tried, whatever a file's content says
LONGEST_HEADER = 1 << 20  # bytes
_ELSEWHERE = re.compile(rb"^[ \t]*(?:ElementDataFile[ \t]*=|data[ \t]?file[ \t]*:=?)[ \t]*(.*?)[ \t]*\r?$", re.I | re.M)
BYTES = (
    dict.fromkeys((sitk.sitkInt16, sitk.sitkUInt16), 2)
    | dict.fromkeys((sitk.sitkInt32, sitk.sitkUInt32, sitk.sitkFloat32), 4)
    | dict.fromkeys((sitk.sitkInt64, sitk.sitkUInt64, sitk.sitkFloat64), 8)
)


def read_image(path: Path, name: str, *, mask: bool = False) -> sitk.Image:
    """A grey-scale image of three or four dimensions as float32, voxels that are not finite set to zero.

    Args:
        path: NIfTI, MHA or NRRD; voxels apart from their header lie beside it.
        name: The manifest's column, for messages; the path may name the patient.
        mask: A mask may have one value everywhere.

    Raises:
        StudyError: As :func:`image_header`; ``empty_volume`` if all voxels have one value.
    """
    reader = image_header(path, name)
    reader.SetOutputPixelType(sitk.sitkFloat32)
    with _reading(path, name):
        image = reader.Execute()
    voxels = sitk.GetArrayFromImage(image)
    finite = np.isfinite(voxels)
    if not finite.any() or (not mask and np.ptp(voxels[finite]) == 0):
        raise StudyError("empty_volume", f"Column {name}: every voxel has the same value, or none is finite.")
    if finite.all():
        return image
    clean = sitk.GetImageFromArray(np.where(finite, voxels, np.float32(0)), isVector=False)
    clean.CopyInformation(image)
    return clean


def image_header(path: Path, name: str) -> sitk.ImageFileReader:
    """The reader of an image file with its header read and judged, before any voxel is.

    Args:
        path: As for :func:`read_image`.
        name: As for :func:`read_image`.

    Raises:
        StudyError: ``unreadable`` if it is no such image, its header claims more than the file can hold, or its
            geometry is impossible, or it takes its voxels from another folder.
    """
    silence_readers()
    if not in_utf8(path):  # ITK ends the process over it
        raise StudyError("unreadable", f"Column {name}: a name in its path is not in UTF-8. Rename it.")
    if not all(_lies_beside(file, path) for file in _named_voxels(path)):  # it could name any file there is
        raise _unreadable(name, "its voxels are not in one file beside its header")
    reader = sitk.ImageFileReader()
    reader.SetImageIO(FORMATS.get(path.suffix.lower(), "NiftiImageIO"))
    reader.SetFileName(str(path))
    with _reading(path, name):
        reader.ReadImageInformation()
    _check_claim(reader, path, name)
    return reader


@contextlib.contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """ITK at a file, alone; its errors without their text, which holds the path."""
    try:
        with ONE_IMAGE_FILE:
            yield
    except RuntimeError as error:
        raise memory_ran_out(error) or _unreadable(name, f"{_kind(path)} is no image that can be read") from None


def _unreadable(name: str, problem: str) -> StudyError:
    return StudyError("unreadable", f"Column {name}: {problem}. Export it again.")


def _kind(path: Path) -> str:
    """A file by its format; any other ending may be part of a patient's name."""
    if path.suffix.lower() in FORMATS:
        return f"the {path.suffix.lower()} file"
    return "a file that is no NIfTI, MHA or NRRD (of DICOM give a folder)"


def voxels_of(image: Path) -> list[Path]:
    """The files beside a header that hold its voxels; none where it holds them itself or names another place."""
    return [file for file in _named_voxels(image) if file != image and _lies_beside(file, image)]


def _lies_beside(file: Path, image: Path) -> bool:
    return file.is_file() and file.resolve().parent == image.parent.resolve()


def _named_voxels(path: Path) -> list[Path]:
    """What a header names as the place of its voxels, wherever that is; empty when they are in the same file."""
    files: list[str] = []
    if path.suffix.lower() in (".hdr", ".img"):
        files = [path.with_suffix(ending).name for ending in (".hdr", ".img")]
    elif path.suffix.lower() in (".mha", ".mhd", ".nrrd", ".nhdr") and path.is_file():
        with path.open("rb") as stream:
            header = stream.read(LONGEST_HEADER)
        if path.suffix.lower() in (".nrrd", ".nhdr"):
            header = re.split(rb"\r?\n\r?\n", header, maxsplit=1)[0]
        found = {match.decode("latin-1") for match in _ELSEWHERE.findall(header)}
        needed = path.suffix.lower() in (".mha", ".mhd", ".nhdr") or len(header) == LONGEST_HEADER
        files = sorted(found - {"LOCAL"}) if found or not needed else ["?"]
    return [path.parent / file for file in files]


def _check_claim(reader: sitk.ImageFileReader, path: Path, name: str) -> None:
    """Refuse what a header claims but no file of this size can hold, and grids that are no place in space."""
    size, spacing, (low, high) = reader.GetSize(), reader.GetSpacing(), SPACING_MM
    voxels = math.prod(size)
    claimed = voxels * reader.GetNumberOfComponents() * BYTES.get(reader.GetPixelID(), 1)
    available = path.stat().st_size * (1 if path.suffix == ".nii" else DEFLATE_RATIO)
    if path.suffix.lower() not in DETACHED and claimed > available:
        problem = f"its header claims {claimed:,} bytes of voxels, more than the file can hold"
    elif voxels > MAX_SERIES_VOXELS:
        problem = f"its header claims {voxels:,} voxels"
    elif reader.GetNumberOfComponents() != 1:
        problem = "it is a colour or vector image"
    elif not all(map(math.isfinite, reader.GetOrigin())) or not all(low <= mm <= high for mm in spacing[:3]):
        problem = "its voxel spacing is not 0.01 to 100 mm, or its origin no number"
    else:
        return
    raise _unreadable(name, problem)


def write_nifti(path: Path, image: sitk.Image) -> None:
    """Write a compressed NIfTI file; equal images give equal files.

    Raises:
        InputError: If the disk is full or the place cannot be written.
    """
    voxels = image.GetNumberOfPixels() * image.GetNumberOfComponentsPerPixel() * image.GetSizeOfPixelComponent()
    with explain_os_errors(path), write_atomically(path) as part:
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
