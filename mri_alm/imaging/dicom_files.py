"""A directory tree -> the DICOM studies in it, by headers only; every file is accounted for.

No file is trusted: neither what it says about its own lengths nor that it is what its name says.
"""

import io
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from struct import error as StructError  # noqa: N812
from typing import Any

import pydicom
import SimpleITK as sitk  # noqa: N813
from joblib import cpu_count
from pydicom.dataset import Dataset, FileDataset
from pydicom.errors import BytesLengthException, InvalidDicomError
from pydicom.uid import EnhancedMRImageStorage, MRImageStorage

from mri_alm.errors import InputError
from mri_alm.imaging.diffusion import DIRECTION_TAGS, GE_B, PHILIPS_B, SIEMENS_B, UIH_B
from mri_alm.imaging.series import frames_of
from mri_alm.runtime.files import IMAGE, stands_for, walk
from mri_alm.runtime.tasks import Pool, run_tasks

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
# Only these elements are ever read from a header: no name, birth date or accession number enters the program.
HEADER_TAGS: list[Any] = [
    "SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID",
    "SeriesNumber", "SeriesDescription", "ProtocolName", "ImageType", "AcquisitionTime", "SeriesTime", "ContentTime",
    "Manufacturer", "ManufacturerModelName", "MagneticFieldStrength", "PatientIdentityRemoved",
    "Rows", "Columns", "SamplesPerPixel", "PixelSpacing", "ImagePositionPatient", "ImageOrientationPatient",
    "RescaleSlope", "RescaleIntercept", "EchoTime", "ScanningSequence", "DiffusionBValue", "MRDiffusionSequence",
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    SIEMENS_B, PHILIPS_B, GE_B, UIH_B, *DIRECTION_TAGS,
]  # fmt: skip
DICOMDIR = "1.2.840.10008.1.3.10"
_OTHER_FORM = "an image file among DICOM studies; list such studies in a table of image files and prepare them by it"
_MASK = re.compile("mask|seg|gland|zone|lesion|roi|label", re.IGNORECASE)
FILES_AT_ONCE = 500  # that one process reads; four times as many are worth starting processes for


@dataclass
class StudyFiles:
    """The files of one study, by headers only.

    Args:
        uid: StudyInstanceUID; never write it anywhere, see :func:`study_key`.
        files: Images, in deterministic order.
        headers: One per image, holding ``HEADER_TAGS`` only.
        ignored: Files that are no image, with the reason.
        failed: Files that should have been images but cannot be read, with the reason.
    """

    uid: str
    files: list[Path] = field(default_factory=list)
    headers: list[Dataset] = field(default_factory=list)
    ignored: dict[Path, str] = field(default_factory=dict)
    failed: dict[Path, str] = field(default_factory=dict)


def find_studies(root: Path, *, keep: int | None = None) -> list[StudyFiles]:
    """Studies in a directory tree with any file names, ordered by their first file.

    Every file ends up in exactly one study, as image, ignored or failed. A file that is no image counts with the study
    nearest to it; a top folder with unreadable files, or with NIfTI and the like that are no masks, and no DICOM image
    at all becomes a study of its own without images, so that it cannot vanish in silence.

    Args:
        root: Where to look, at any depth. Thousands of files are read by one process per core.
        keep: Files, in the order of their names, whose headers are kept in memory; by default all. Studies beyond come
            without, see :func:`with_headers`.

    Raises:
        InputError: If ``root`` is no directory, or holds no file.
    """
    silence_readers()
    if not root.is_dir():
        raise InputError(f"{root}: no such directory. Give a folder with DICOM files.")
    files = sorted(walk(root))
    studies: dict[str, StudyFiles] = {}
    strays: list[_File] = []
    seen: set[tuple[str, str]] = set()
    for file in _read_all(files, len(files) if keep is None else keep):
        if file.reason:
            strays.append(file)
            continue
        study = studies.setdefault(file.study, StudyFiles(file.study))
        if (file.study, file.instance) in seen:
            study.ignored[file.path] = "copy of an image already seen"
            continue
        seen.add((file.study, file.instance))
        study.files.append(file.path)
        if file.header:
            study.headers.append(file.header)
    homes = _homes(studies.values())
    for file in strays:
        uid = _top(file.path, root)
        name = file.path.name
        expected = file.failed or bool(homes and IMAGE.search(name) and not _MASK.search(name))
        study = _nearest(file.path, root, homes, expected) or studies.setdefault(uid, StudyFiles(uid))
        failed = file.failed or (expected and not study.files)
        (study.failed if failed else study.ignored)[file.path] = file.reason if failed == file.failed else _OTHER_FORM
    if not studies:
        raise InputError(f"{root}: the folder is empty. Give a folder with DICOM files.")
    return list(studies.values())


def with_headers(study: StudyFiles) -> StudyFiles:
    """The study with a header for each image: those not kept by :func:`find_studies` are read again.

    A large archive's headers fill gigabytes (20 kB each), so a cohort reads those of one study at a time.
    """
    if len(study.headers) == len(study.files):
        return study
    silence_readers()
    whole = replace(study, files=[], headers=[], failed=dict(study.failed))
    for file in (_read(path, keep=True) for path in study.files):
        if file.header is None:
            whole.failed[file.path] = file.reason
        else:
            whole.files.append(file.path)
            whole.headers.append(file.header)
    return whole


@dataclass(frozen=True)
class _File:
    """What a file's header says: of an image its two numbers and perhaps the header, of another file the reason."""

    path: Path
    reason: str = ""
    failed: bool = False
    study: str = ""
    instance: str = ""
    header: Dataset | None = None


@dataclass(frozen=True)
class _Part:
    files: Sequence[Path]
    keep: int

    def __str__(self) -> str:
        return f"{len(self.files)} DICOM headers"  # file names may identify patients


def _read_all(files: Sequence[Path], keep: int) -> Iterator[_File]:
    """All files in order; the first ``keep`` with their headers."""
    parts = [_Part(files[n : n + FILES_AT_ONCE], keep - n) for n in range(0, len(files), FILES_AT_ONCE)]
    if len(parts) < 4 or (cores := cpu_count()) == 1:
        return (file for part in parts for file in _read_some(part))
    read: dict[Path, list[_File]] = {}
    for outcome in run_tasks(_read_some, parts, Pool("loky", min(cores, len(parts)))):
        read[outcome.item.files[0]] = outcome.get()
    return (file for part in parts for file in read.pop(part.files[0]))


def _read_some(part: _Part) -> list[_File]:
    silence_readers()
    return [_read(file, number < part.keep) for number, file in enumerate(part.files)]


def _read(path: Path, keep: bool) -> _File:
    try:
        with path.open("rb") as stream:
            start = stream.read(132)
        if reason := stands_for(start):
            return _File(path, reason, failed=True)
        # Some exports lack the preamble and begin with the first element of group 2 or 8.
        if start[128:] != b"DICM" and start[:2] not in (b"\x02\x00", b"\x08\x00"):
            return _File(path, "not DICOM")
        header = read_dicom(path, stop_before_pixels=True, specific_tags=HEADER_TAGS)
        _drop_unreadable(header)
        if reason := _no_image(header):
            return _File(path, reason)
        frames_of(path, header)
    except DAMAGED as error:
        return _File(path, f"damaged DICOM ({type(error).__name__})", failed=True)
    study, instance = str(header.get("StudyInstanceUID") or ""), str(header.get("SOPInstanceUID") or path)
    if not study:  # an empty one would make one study of the exams of all patients
        return _File(path, "no StudyInstanceUID says which exam it is of; restore it", failed=True)
    return _File(path, study=study, instance=instance, header=header if keep else None)


def _homes(studies: Iterable[StudyFiles]) -> dict[Path, StudyFiles]:
    """Every folder with images somewhere below it -> its first study."""
    homes: dict[Path, StudyFiles] = {}
    for study in studies:
        for folder in (folder for file in study.files for folder in file.parents):
            homes.setdefault(folder, study)
    return homes


def _nearest(file: Path, root: Path, homes: dict[Path, StudyFiles], failed: bool) -> StudyFiles | None:
    """The study whose images lie closest to a file; none for a failed file in a top folder without any study."""
    for folder in file.parents:
        if folder == root and failed and file.parent != root:
            return None
        if folder in homes:
            return homes[folder]
    return None


def _top(file: Path, root: Path) -> str:
    return f"folder:{file.relative_to(root).parts[0] if file.parent != root else ''}"


def _drop_unreadable(header: Dataset) -> None:
    """An element whose value cannot be understood counts as absent: most of them nobody needs."""
    for tag in list(header.keys()):
        try:
            header[tag]
        except DAMAGED:
            del header[tag]


def _no_image(header: FileDataset) -> str:
    """Why a readable header is none of a grey-scale image, or nothing."""
    if str(header.file_meta.get("MediaStorageSOPClassUID")) == DICOMDIR:
        return "DICOMDIR"
    if "Rows" not in header:
        if header.get("SOPClassUID", "") in ("", MRImageStorage, EnhancedMRImageStorage):
            raise EOFError("the header ends before the image")
        return "DICOM without an image"
    return "" if int(header.get("SamplesPerPixel") or 1) == 1 else "colour picture"


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
