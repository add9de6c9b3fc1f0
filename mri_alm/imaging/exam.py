"""An exam, from DICOM or from image files -> T2, ADC and high b, each on its own grid; or a typed error."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import SimpleITK as sitk  # noqa: N813

from mri_alm.errors import StudyError
from mri_alm.imaging.choose_series import axial_t2, build_diffusion, chosen, diffusion_sets, first_usable, series_name
from mri_alm.imaging.dicom_files import StudyFiles, find_studies, silence_readers
from mri_alm.imaging.diffusion import adc_unit, fitted_adc
from mri_alm.imaging.image_file import read_image
from mri_alm.imaging.map_kind import check_maps, infer_roles_from_voxels
from mri_alm.imaging.registration import PREPARED_IMAGES, Facts, Images, mask_centre
from mri_alm.imaging.series import Series, group_series
from mri_alm.imaging.volume import build_mean, build_volume, geometric_mean
from mri_alm.runtime.files import bvals_of

_VENDORS = r"\b(siemens|philips|ge|canon|toshiba|uih|hitachi|fujifilm|mri-alm)\b"
_MODELS = (  # Siemens, GE, Philips, Toshiba and Canon, Hitachi, United Imaging, and our phantom
    r"\b(magnetom|aera|altea|amira|avanto|biograph|cima\.x|espree|essenza|flow|free\.max|lumina|mmr|prisma|sempra|skyra"
    r"|sola|spectra|symphony|terra|trio|triotim|verio|vida|signa|architect|artist|discovery|excite|explorer|hdxt?|hero"
    r"|mr360|mr450w?|mr750w?|optima|pioneer|premier|voyager|achieva|ambition|dstream|elition|evolution|ingenia|intera"
    r"|mr5300|mr7700|multiva|panorama|elan|fortian|galan|orian|titan|vantage|echelon|oval|oasis"
    r"|umr|5[5-8]0|588|6[678]0|7[789]0|8[789]0|jupiter|omega|mri-alm|phantom)\b"
)


@dataclass
class Exam:
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


def read_study(files: StudyFiles, series: list[Series] | None = None) -> Exam:
    """Choose and build the volumes of one study.

    T2: axial, in the diffusion's frame of reference, most slices, then the latest. Diffusion: the set of series on one
    grid and echo time for which an ADC can be had, most acquired b-values, then the highest b, then the latest. ADC:
    the scanner's map on that grid nearest in time, otherwise fitted over all acquired b-values. A candidate that cannot
    be built (a missing slice) is passed over with a warning when another one can.

    Args:
        files: From :func:`find_studies`.
        series: The study's, by other rules than the shipped ones or by hand. Those without a name may get another role
            here, by their voxels.

    Raises:
        StudyError: With a code for the kind of refusal: ``pointer``, ``no_images``, ``no_t2``, ``no_diffusion``,
            ``mosaic``, ``b_unknown``, ``frames_differ``, ``adc_units``, ``adc_unfit`` or one of
            :func:`mri_alm.imaging.volume.build_volume`.
    """
    silence_readers()
    _refuse_empty(files)
    series = group_series(files.files, files.headers) if series is None else series
    warnings = _header_warnings(files)
    infer_roles_from_voxels(series)
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
    return Exam(t2, built.adc, built.hbv, built.dwi, warnings + built.warnings, info, used)


def read_series(folder: Path) -> dict[float | None, sitk.Image]:
    """Volumes of a folder that holds one series: ``{None: image}`` for T2 or an ADC map, b -> image for diffusion.

    Values are as stored, rescaled: bring an ADC map to 1e-6 mm2/s with :func:`mri_alm.imaging.diffusion.adc_unit`.

    Raises:
        StudyError: If the folder holds no image or several series, or the series cannot be used; see
            :func:`mri_alm.imaging.volume.build_volume`.
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


def load_images(item: Mapping[Any, Any]) -> tuple[Images, Facts]:
    """Read one exam.

    Args:
        item: ``dicom``, the folder of one study (or its :class:`StudyFiles`) whose series are recognised; or ``t2`` and
            either ``adc`` and ``hbv`` or ``dwi``: files (NIfTI, MHA, NRRD) or folders of one DICOM series. ``valid``
            where they are registered already.

    Returns:
        ``t2``, ``adc`` (1e-6 mm2/s), ``hbv`` and where given ``valid``, each on its own grid; ``warnings`` and facts.

    Raises:
        StudyError: If the exam cannot be used.
    """
    if "dicom" not in item:
        return _from_files(item)
    source = item["dicom"]
    return study_images(read_study(source if isinstance(source, StudyFiles) else _only_study(Path(source))))


def study_images(study: Exam) -> tuple[Images, Facts]:
    """The same of a DICOM study already read."""
    return {"t2": study.t2, "adc": study.adc, "hbv": study.hbv}, study.info | {"warnings": study.warnings}


def crop_centre(item: Mapping[Any, Any]) -> tuple[float, float, float] | None:
    """The point to crop about, LPS mm, where the item gives one: three numbers as text, or a gland mask.

    Raises:
        StudyError: ``crop_center`` when the text is no point, ``empty_gland``, or what reading the mask raises.
    """
    if text := item.get("crop_center_mm"):
        try:
            x, y, z = map(float, text.split())
        except ValueError:
            raise StudyError(
                "crop_center", "crop_center_mm is not three numbers. Write x y z in LPS millimetres, or nothing."
            ) from None
        return x, y, z
    return mask_centre(_read_volume(Path(item["gland"]), "gland")) if item.get("gland") else None


def _only_study(folder: Path) -> StudyFiles:
    studies = find_studies(folder)
    with_images = [study for study in studies if study.files] or studies
    if len(with_images) != 1:
        raise StudyError(
            "several_studies", f"The folder holds {len(with_images)} DICOM studies. Give each a folder of its own."
        )
    return with_images[0]


def _from_files(item: Mapping[Any, Any]) -> tuple[Images, Facts]:
    report: Facts = {"warnings": [], "adc_source": "given"}
    images = {name: _read_volume(Path(item[name]), name) for name in PREPARED_IMAGES if name in item}
    if "dwi" in item:
        series = _read_dwi(Path(item["dwi"]))
        report["b_values"] = sorted(series)
        if "adc" not in images:
            images["adc"], report["adc_source"] = fitted_adc(series, report["warnings"])
        images.setdefault("hbv", series[max(series)])
    if "adc" in item and "valid" not in item:  # a prepared exam was checked when it was prepared
        check_maps(images["adc"], images["hbv"])
    images["adc"] = images["adc"] * adc_unit(images["adc"])[1]
    return images, report


def _read_volume(path: Path, name: str) -> sitk.Image:
    """One 3D volume from a file or from a folder of one DICOM series, float32."""
    if path.is_dir():
        volumes = read_series(path)
        if len(volumes) != 1:
            raise StudyError("several_b", f"Column {name}: the series holds {len(volumes)} b-values; use column dwi.")
        return next(iter(volumes.values()))
    image = read_image(path, name, mask=name in ("valid", "gland"))
    if image.GetDimension() != 3:
        raise StudyError("not_3d", f"Column {name}: the image has {image.GetDimension()} dimensions, 3 are needed.")
    return image


def _read_dwi(path: Path) -> dict[float, sitk.Image]:
    """Image of each b-value, from a folder of one DICOM series or from a 4D NIfTI with a .bval file beside it."""
    if path.is_dir():
        series = {b: image for b, image in read_series(path).items() if b is not None}
        if not series:
            raise StudyError(
                "b_unknown", "Column dwi: the series has no b-values. Give an ADC map and a high-b image instead."
            )
        return series
    tables = bvals_of(path)
    if not tables:
        raise StudyError(
            "b_unknown", "Column dwi: there is no .bval file beside the image, so its b-values are unknown."
        )
    image = read_image(path, "dwi")
    try:
        values = [float(text) for text in tables[0].read_text("utf-8").split()]
    except ValueError:
        raise StudyError("b_unknown", "Column dwi: its .bval file holds something that is no number.") from None
    if image.GetDimension() != 4 or image.GetSize()[3] != len(values):
        raise StudyError(
            "b_unknown",
            f"Column dwi: an image of size {image.GetSize()} does not fit {len(values)} b-values in its .bval file.",
        )
    frames: dict[float, list[sitk.Image]] = {}
    for number, b in enumerate(values):
        frames.setdefault(round(b / 50) * 50.0, []).append(image[:, :, :, number])
    return {b: geometric_mean(same, f"Column dwi at b = {b:g}") for b, same in frames.items()}
