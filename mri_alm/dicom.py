"""A DICOM study -> T2, ADC and high-b volumes by declared rules, or a typed error."""

import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import SimpleITK as sitk  # noqa: N813

from mri_alm.dicom_file import silence_readers
from mri_alm.errors import StudyError
from mri_alm.headers import StudyFiles, find_studies, with_headers
from mri_alm.nameless import settle_nameless
from mri_alm.selection import axial_t2, build_diffusion, chosen, diffusion_sets, first_usable, series_name
from mri_alm.series import Series, group_series
from mri_alm.volume import build_mean, build_volume

__all__ = ["Study", "StudyFiles", "find_studies", "read_series", "read_study", "study_key", "with_headers"]

_VENDORS = r"\b(siemens|philips|ge|canon|toshiba|uih|hitachi|fujifilm|mri-alm)\b"
_MODELS = (  # Siemens, GE, Philips, Toshiba and Canon, Hitachi, United Imaging, and our phantom
    r"\b(magnetom|aera|altea|amira|avanto|biograph|cima\.x|espree|essenza|flow|free\.max|lumina|mmr|prisma|sempra|skyra"
    r"|sola|spectra|symphony|terra|trio|triotim|verio|vida|signa|architect|artist|discovery|excite|explorer|hdxt?|hero"
    r"|mr360|mr450w?|mr750w?|optima|pioneer|premier|voyager|achieva|ambition|dstream|elition|evolution|ingenia|intera"
    r"|mr5300|mr7700|multiva|panorama|elan|fortian|galan|orian|titan|vantage|echelon|oval|oasis"
    r"|umr|5[5-8]0|588|6[678]0|7[789]0|8[789]0|jupiter|omega|mri-alm|phantom)\b"
)


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
    return hmac.new(salt.encode(), os.fsencode(uid), hashlib.sha256).hexdigest()[:16]


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
    silence_readers()
    _refuse_empty(files)
    series = group_series(files.files, files.headers, rules)
    warnings = _header_warnings(files)
    settle_nameless(series)
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
        raise StudyError(
            "several_series", f"The folder holds {len(series)} series, echoes or kinds of map; give the folder of one."
        )
    one = series[0]
    if one.role == "unsupported":
        raise StudyError("mosaic", f"{series_name(one)}: {one.reason}. Export one image per slice.")
    if one.role not in ("dwi", "calculated"):
        return {None: build_volume(one.frames, series_name(one))}
    if not one.b_values:
        raise StudyError("b_unknown", f"No b-value in the headers of {series_name(one)}.")
    return {b: build_mean(one.at_b(b), f"{series_name(one)} at b = {b:g}") for b in one.b_values}


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


def _vendor(text: str) -> str:
    """One of few words: free text of a header could hold anything, and has held names."""
    found = re.search(_VENDORS, text.lower())
    return found[0] if found else "other" if text else ""


def _model(text: str) -> str:
    """The known product names in a scanner's model name, for the same reason."""
    found = re.findall(_MODELS, text, re.IGNORECASE)
    return " ".join(found) or ("other" if text else "")


def _facts(files: StudyFiles, t2: Series, used: frozenset[Path]) -> dict[str, Any]:
    """Scanner and file counts; seen = used + ignored + failed."""
    header = files.headers[files.files.index(t2.frames[0].file)]
    seen = len(files.files) + len(files.ignored) + len(files.failed)
    strength = header.get("MagneticFieldStrength")
    return {
        "vendor": _vendor(str(header.get("Manufacturer") or "")),
        "model": _model(str(header.get("ManufacturerModelName") or "")),
        "field_strength": float(strength) if isinstance(strength, (int, float)) else None,
        "files_seen": seen,
        "files_used": len(used),
        "files_ignored": seen - len(used) - len(files.failed),
        "files_failed": len(files.failed),
    }
