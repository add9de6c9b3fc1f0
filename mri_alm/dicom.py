"""A folder of DICOM files -> its studies; a study -> T2, ADC and high-b volumes by declared rules, or a typed error."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pydicom
import SimpleITK as sitk  # noqa: N813
from pydicom.dataset import Dataset, FileDataset
from pydicom.uid import EnhancedMRImageStorage, MRImageStorage

from mri_alm.diffusion import GE_B, PHILIPS_B, SIEMENS_B, UIH_B
from mri_alm.errors import InputError, StudyError
from mri_alm.selection import axial_t2, build_diffusion, chosen, diffusion_sets, first_usable, series_name
from mri_alm.series import Series, frames_of, group_series
from mri_alm.volume import DAMAGED, build_volume

# Only these elements are ever read from a header: no name, birth date or accession number enters the program.
HEADER_TAGS: list[Any] = [
    "SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID",
    "SeriesNumber", "SeriesDescription", "ProtocolName", "ImageType", "AcquisitionTime", "SeriesTime", "ContentTime",
    "Manufacturer", "ManufacturerModelName", "MagneticFieldStrength", "PatientIdentityRemoved",
    "Rows", "Columns", "SamplesPerPixel", "PixelSpacing", "ImagePositionPatient", "ImageOrientationPatient",
    "RescaleSlope", "RescaleIntercept", "EchoTime", "DiffusionBValue", "MRDiffusionSequence",
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", SIEMENS_B, PHILIPS_B, GE_B, UIH_B,
]  # fmt: skip
DICOMDIR = "1.2.840.10008.1.3.10"


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


@dataclass
class Study:
    """One study ready to register, all images float32 in LPS millimetres.

    Args:
        t2: Axial T2.
        adc: ADC in 1e-6 mm2/s.
        hbv: The highest b-value there is, acquired or calculated by the scanner.
        dwi: b in s/mm2 -> acquired image.
        warnings: Sentences a person should read.
        info: JSON-able facts: scanner, chosen series with reasons, b-values, counts of files. No identity.
        used: Files whose pixels are in the volumes.
    """

    t2: sitk.Image
    adc: sitk.Image
    hbv: sitk.Image
    dwi: dict[float, sitk.Image]
    warnings: list[str]
    info: dict[str, Any]
    used: frozenset[Path] = frozenset()


def study_key(uid: str, salt: str) -> str:
    """Pseudonym of a study: 16 hexadecimal digits that only the holder of ``salt`` can recompute from the UID."""
    return hmac.new(salt.encode(), uid.encode(), hashlib.sha256).hexdigest()[:16]


def find_studies(root: Path, *, keep: int | None = None) -> list[StudyFiles]:
    """Studies in a directory tree with any file names, ordered by their first file.

    Every file ends up in exactly one study, as image, ignored or failed. A file that is no image counts with the study
    nearest to it; a top folder with unreadable files and no image at all becomes a study of its own without images, so
    that it cannot vanish in silence.

    Args:
        root: Where to look, at any depth.
        keep: Headers kept in memory; by default all. Studies beyond come without, see :func:`with_headers`.

    Raises:
        InputError: If ``root`` is no directory, or holds no file.
    """
    if not root.is_dir():
        raise InputError(f"{root}: no such directory. Give a folder with DICOM files.")
    studies: dict[str, StudyFiles] = {}
    strays: list[tuple[Path, str, bool]] = []
    seen: set[str] = set()
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        header, reason, failed = _read_header(file)
        if header is None:
            strays.append((file, reason, failed))
            continue
        uid = str(header.get("StudyInstanceUID") or "")
        study = studies.setdefault(uid, StudyFiles(uid))
        instance = str(header.get("SOPInstanceUID") or file)
        if instance in seen:
            study.ignored[file] = "copy of an image already seen"
            continue
        seen.add(instance)
        study.files.append(file)
        if keep is None or len(seen) <= keep:
            study.headers.append(header)
    homes = _homes(studies.values())
    for file, reason, failed in strays:
        study = _nearest(file, root, homes, failed) or studies.setdefault(uid := _top(file, root), StudyFiles(uid))
        (study.failed if failed else study.ignored)[file] = reason
    if not studies:
        raise InputError(f"{root}: the folder is empty. Give a folder with DICOM files.")
    return list(studies.values())


def with_headers(study: StudyFiles) -> StudyFiles:
    """The study with a header for each image: those not kept by :func:`find_studies` are read again.

    A large archive's headers fill gigabytes (20 kB each), so a cohort reads those of one study at a time.
    """
    if len(study.headers) == len(study.files):
        return study
    whole = replace(study, files=[], headers=[], failed=dict(study.failed))
    for file in study.files:
        header, reason, _ = _read_header(file)
        if header is None:
            whole.failed[file] = reason
        else:
            whole.files.append(file)
            whole.headers.append(header)
    return whole


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


def _read_header(file: Path) -> tuple[Dataset | None, str, bool]:
    """The image header of a file, or None with the reason and whether the file should have been readable."""
    try:
        with file.open("rb") as stream:
            start = stream.read(132)
        if start.startswith((b"version https://git-lfs", b"PK\x03\x04")):
            return (
                None,
                "zip archive; unpack it first" if start[:2] == b"PK" else "Git LFS pointer instead of data",
                True,
            )
        # Some exports lack the preamble and begin with the first element of group 2 or 8.
        if start[128:] != b"DICM" and start[:2] not in (b"\x02\x00", b"\x08\x00"):
            return None, "not DICOM", False
        header = pydicom.dcmread(file, stop_before_pixels=True, specific_tags=HEADER_TAGS, force=True)
        if reason := _no_image(header):
            return None, reason, False
        frames_of(file, header)
    except DAMAGED as error:
        return None, f"damaged DICOM ({type(error).__name__})", True
    return header, "", False


def _no_image(header: FileDataset) -> str:
    """Why a readable header is none of a grey-scale image, or nothing."""
    if str(header.file_meta.get("MediaStorageSOPClassUID")) == DICOMDIR:
        return "DICOMDIR"
    if "Rows" not in header:
        if header.get("SOPClassUID", "") in ("", MRImageStorage, EnhancedMRImageStorage):
            raise EOFError("the header ends before the image")
        return "DICOM without an image"
    return "" if int(header.get("SamplesPerPixel") or 1) == 1 else "colour picture"


def read_study(files: StudyFiles, *, rules: Path | Sequence[dict[str, Any]] | None = None) -> Study:
    """Choose and build the volumes of one study.

    T2: axial, in the diffusion's frame of reference, most slices, then the latest. Diffusion: the set of series on one
    grid and echo time for which an ADC can be had, most acquired b-values, then the highest b, then the latest. ADC:
    the scanner's map on that grid nearest in time, otherwise fitted over all acquired b-values. A candidate that cannot
    be built (a missing slice) is passed over with a warning when another one can.

    Args:
        files: From :func:`find_studies`.
        rules: Role rules to use instead of the shipped ``series_rules.json``.

    Raises:
        StudyError: With a code for the kind of refusal: ``pointer``, ``no_images``, ``no_t2``, ``no_diffusion``,
            ``mosaic``, ``b_unknown``, ``frames_differ``, ``adc_units``, ``adc_unfit`` or one of
            :func:`mri_alm.volume.build_volume`.
    """
    _refuse_empty(files)
    series = group_series(files.files, files.headers, rules)
    warnings = _header_warnings(files)
    sets = diffusion_sets(series, warnings)
    planes = axial_t2(series, sets)
    t2_series, t2 = first_usable(planes, lambda one: build_volume(one.frames, series_name(one)), series_name, warnings)
    if len(planes) > 1:
        left = ", ".join(str(one.number) for one in planes if one is not t2_series)
        warnings.append(f"Several axial T2: took {series_name(t2_series)} (most slices, then the latest), left {left}.")
    sets = [one for one in sets if one.first.frame_of_reference == t2_series.frame_of_reference]
    group, built = first_usable(sets, build_diffusion, lambda one: series_name(one.first), warnings)
    if len(sets) > 1:
        left = ", ".join(str(one.first.number) for one in sets if one is not group)
        warnings.append(f"Several diffusion protocols: took {series_name(group.first)} and its like, left {left}.")
    used = frozenset(frame.file for one in (t2_series, *built.used) for frame in one.frames)
    info = _facts(files, t2_series, used) | built.info
    info |= {"t2": chosen(t2_series), "series": [chosen(one) for one in series]}
    return Study(t2, built.adc, built.hbv, built.dwi, warnings + built.warnings, info, used)


def read_series(folder: Path) -> dict[float | None, sitk.Image]:
    """Volumes of a folder that holds one series: ``{None: image}`` for T2 or an ADC map, b -> image for diffusion.

    Values are as stored, rescaled: bring an ADC map to 1e-6 mm2/s with :func:`mri_alm.diffusion.adc_scale`.

    Raises:
        StudyError: If the folder holds no image or several series, or the series cannot be used; see
            :func:`mri_alm.volume.build_volume`.
    """
    studies = find_studies(folder)
    series = [one for study in studies for one in group_series(study.files, study.headers)]
    if len(series) != 1:
        for study in studies[:1]:
            _refuse_empty(study)
        raise StudyError("several_series", f"The folder holds {len(series)} series or echoes; give the folder of one.")
    one = series[0]
    if one.role == "unsupported":
        raise StudyError("mosaic", f"{series_name(one)}: {one.reason}. Export one image per slice.")
    if one.role not in ("dwi", "calculated"):
        return {None: build_volume(one.frames, series_name(one))}
    if not one.b_values:
        raise StudyError("b_unknown", f"No b-value in the headers of {series_name(one)}.")
    return {b: build_volume(one.at_b(b), f"{series_name(one)} at b = {b:g}") for b in one.b_values}


def _refuse_empty(files: StudyFiles) -> None:
    if files.files:
        return
    reasons = sorted({*files.failed.values(), *files.ignored.values()})
    code = "pointer" if any("pointer" in reason for reason in files.failed.values()) else "no_images"
    raise StudyError(
        code, f"No DICOM image among {len(files.failed) + len(files.ignored)} files: {'; '.join(reasons)}."
    )


def _header_warnings(files: StudyFiles) -> list[str]:
    warnings = []
    if any(str(header.get("PatientIdentityRemoved")).upper() != "YES" for header in files.headers):
        warnings.append("Headers are not marked as de-identified; nothing identifying is copied from them.")
    if files.failed:
        reasons = sorted(set(files.failed.values()))
        warnings.append(f"{len(files.failed)} files could not be read: {'; '.join(reasons)}.")
    return warnings


def _facts(files: StudyFiles, t2: Series, used: frozenset[Path]) -> dict[str, Any]:
    """Scanner and file counts; seen = used + ignored + failed."""
    header = files.headers[files.files.index(t2.frames[0].file)]
    seen = len(files.files) + len(files.ignored) + len(files.failed)
    strength = header.get("MagneticFieldStrength")
    return {
        "vendor": str(header.get("Manufacturer") or ""),
        "model": str(header.get("ManufacturerModelName") or ""),
        "field_strength": None if strength is None else float(strength),
        "files_seen": seen,
        "files_used": len(used),
        "files_ignored": seen - len(used) - len(files.failed),
        "files_failed": len(files.failed),
    }
