"""A directory tree -> the DICOM studies in it, by headers only; every file is accounted for.

No file is trusted: neither what it says about its own lengths nor that it is what its name says.
"""

import filecmp
import hashlib
import io
import logging
import os
import re
import warnings
import zlib
from collections import defaultdict
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
from mri_alm.imaging.diffusion import DIFFUSION_TAGS
from mri_alm.imaging.series import frames_of
from mri_alm.runtime.files import is_image, no_files, open_file, stands_for, walk
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
MAX_INFLATED = 1 << 26  # bytes; twenty times the largest classic image
SMALL = 1 << 22  # bytes; up to here one read of the whole file is the fastest way to its header, too
# Only these elements are ever read from a header: no name, birth date or accession number enters the program.
HEADER_TAGS: list[Any] = [
    "SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID",
    "SeriesNumber", "SeriesDescription", "ProtocolName", "ImageType", "Modality",
    "AcquisitionDateTime", "AcquisitionDate", "AcquisitionTime", "SeriesDate", "SeriesTime",
    "ContentDate", "ContentTime",
    "Manufacturer", "ManufacturerModelName", "MagneticFieldStrength", "PatientIdentityRemoved",
    "Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation",
    "PixelSpacing", "SliceLocation", "ImagePositionPatient", "ImageOrientationPatient",
    "SliceThickness", "AcquisitionMatrix", "RescaleSlope", "RescaleIntercept", "RealWorldValueMappingSequence",
    "EchoTime", "ScanningSequence", "MRDiffusionSequence",
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    *DIFFUSION_TAGS,
]  # fmt: skip
PATIENT = "PatientID", "PatientName"  # read to tell patients apart, and dropped from the header at once
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
        notes: What is to be said of the study as a whole.
    """

    uid: str
    files: list[Path] = field(default_factory=list)
    headers: list[Dataset] = field(default_factory=list)
    ignored: dict[Path, str] = field(default_factory=dict)
    failed: dict[Path, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find_studies(root: Path, *, keep: int | None = None, within: Path | None = None) -> list[StudyFiles]:
    """Studies in a directory tree with any file names, ordered by their first file.

    Every file ends up in exactly one study, as image, ignored or failed. A file that is no image counts with the study
    nearest to it; a top folder with unreadable files, or with NIfTI and the like that are no masks, and no DICOM image
    at all becomes a study of its own without images, so that it cannot vanish in silence.

    Args:
        root: Where to look, at any depth. Thousands of files are read by one process per core.
        keep: Files, in the order of their names, whose headers are kept in memory; by default all. Studies beyond come
            without, see :func:`with_headers`.
        within: See :func:`mri_alm.runtime.files.walk`.

    Raises:
        InputError: If ``root`` is no directory, or holds no file.
    """
    silence_readers()
    if not root.is_dir():
        raise InputError(f"{root}: no such directory. Give a folder with DICOM files.")
    files = sorted(walk(root, within=within))
    images: dict[str, list[_File]] = defaultdict(list)
    strays: list[_File] = []
    lost = [_File(path, what, failed=True) for path, what in sorted(no_files(root, within=within).items())]
    for file in (*_read_all(files, len(files) if keep is None else keep), *lost):
        (strays if file.reason else images[file.study]).append(file)
    studies = {study.uid: study for uid, found in images.items() for study in _by_patient(uid, found)}
    homes = _homes(studies.values())
    for file in strays:
        uid = _top(file.path, root)
        name = file.path.name
        expected = file.failed or bool(homes and is_image(file.path) and not _MASK.search(name))
        study = _nearest(file.path, root, homes, expected) or studies.setdefault(uid, StudyFiles(uid))
        failed = file.failed or (expected and not study.files)
        (study.failed if failed else study.ignored)[file.path] = file.reason if failed == file.failed else _OTHER_FORM
    if not studies:
        raise InputError(f"{root}: the folder is empty. Give a folder with DICOM files.")
    return list(studies.values())


def _by_patient(uid: str, images: list["_File"]) -> list[StudyFiles]:
    """The study of a StudyInstanceUID; where images of several patients carry it, a study for each."""
    patients = list(dict.fromkeys(image.patient for image in images if image.patient))
    if len(patients) < 2:
        return [_study(uid, images)]
    studies = [_study(f"{uid}|{one}", [image for image in images if image.patient == one]) for one in patients]
    nobody = "no PatientID, in a study whose images are of several patients"
    studies[0].failed |= {image.path: nobody for image in images if not image.patient}
    for study in studies:
        study.notes.append(
            f"Its StudyInstanceUID stands on images of {len(patients)} patients: they are kept apart by PatientID."
        )
    return studies


def _study(uid: str, images: list["_File"]) -> StudyFiles:
    """Images as one study; a copy is known by its content, as numbers may stand on several images."""
    study, seen = StudyFiles(uid), defaultdict[str, list[Path]](list)
    for image in images:
        if any(_same_image(image.path, other) for other in seen[image.instance]):
            study.ignored[image.path] = "copy of an image already seen"
            continue
        if seen[image.instance] and not study.notes:
            study.notes.append("Different images carry one SOPInstanceUID: each was read.")
        seen[image.instance].append(image.path)
        study.files.append(image.path)
        if image.header:
            study.headers.append(image.header)
    return study


def _same_image(one: Path, other: Path) -> bool:
    if filecmp.cmp(one, other, shallow=False):
        return True
    names = ["SeriesInstanceUID", "ImagePositionPatient", "PixelData"]
    try:
        first, second = (read_dicom(path, specific_tags=names) for path in (one, other))
    except DAMAGED:
        return False
    return all(first.get(name) == second.get(name) for name in names)


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
    patient: str = ""
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
        return _image(path, keep)
    except TooLargeError as error:
        reason = str(error)
    except DAMAGED as error:
        reason = f"damaged DICOM ({type(error).__name__})"
    except Exception as error:  # whatever one file does to its reader, the others are read
        reason = f"an error that nobody foresaw ({type(error).__name__}); please report it"
    return _File(path, reason, failed=True)


def _image(path: Path, keep: bool) -> _File:
    with open_file(path) as stream:
        start = stream.read(132)
    if reason := stands_for(start):
        return _File(path, reason, failed=True)
    # Some exports lack the preamble and begin with the first element of group 2 or 8.
    if start[128:] != b"DICM" and start[:2] not in (b"\x02\x00", b"\x08\x00"):
        return _File(path, "not DICOM")
    header = read_dicom(path, stop_before_pixels=True, specific_tags=[*HEADER_TAGS, *PATIENT])
    _drop_unreadable(header)
    patient = _take_patient(header)
    if reason := _no_image(header):
        return _File(path, reason)
    frames_of(path, header)
    study, instance = str(header.get("StudyInstanceUID") or ""), str(header.get("SOPInstanceUID") or path)
    if not study:  # an empty one would make one study of the exams of all patients
        return _File(path, "no StudyInstanceUID says which exam it is of; restore it", failed=True)
    return _File(path, study=study, instance=instance, patient=patient, header=header if keep else None)


def _take_patient(header: Dataset) -> str:
    """Digest of whose image it is, by number, else by name; the header keeps neither."""
    number, name = (" ".join(str(header.pop(tag).value).split()).casefold() if tag in header else "" for tag in PATIENT)
    return hashlib.sha256((number or name).encode("utf-8", "replace")).hexdigest() if number or name else ""


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
    with open_file(path) as file:
        small = os.fstat(file.fileno()).st_size <= SMALL
        with _Small(file.read(SMALL)) if small else _Bounded(file.raw) as stream:
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


class TooLargeError(ValueError):
    """A deflated data set that holds more than any image."""


class _Small(io.BytesIO):
    """A file in memory; what pydicom reads without a limit is a deflated data set, and is judged first."""

    def read(self, size: int | None = -1, /) -> bytes:
        return _judged(super().read(size), size)


class _Bounded(io.BufferedReader):
    """A file that is never asked for more than it holds: Python allocates what it is asked for, be it gigabytes."""

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        self._length = os.fstat(raw.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._length - self.tell(), 0)
        return _judged(super().read(left if size is None or size < 0 else min(size, left)), size)


def _judged(content: bytes, size: int | None) -> bytes:
    """The content, if what it inflates to has an end: pydicom inflates whole, and 4 MB could hold 4 GB."""
    if size is not None and size >= 0:
        return content
    inflater, total, rest = zlib.decompressobj(-zlib.MAX_WBITS), 0, content
    try:
        while rest and not inflater.eof:
            total += len(inflater.decompress(rest, SMALL))
            rest = inflater.unconsumed_tail
            if total > MAX_INFLATED:
                raise TooLargeError("a deflated data set of more than 64 MiB; export it uncompressed")
    except zlib.error as error:
        raise ValueError("not deflated") from error
    return content
