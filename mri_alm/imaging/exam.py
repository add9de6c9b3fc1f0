"""An exam, from DICOM or from image files -> T2, ADC and high b, each on its own grid; or a typed error."""

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
from pydicom.dataset import Dataset
from scipy.ndimage import distance_transform_edt

from mri_alm.errors import StudyError
from mri_alm.imaging.choose_series import (
    build_diffusion,
    choose_t2,
    chosen,
    diffusion_sets,
    first_usable,
    refuse_equal_sets,
    series_name,
)
from mri_alm.imaging.dicom_files import StudyFiles, find_studies, silence_readers
from mri_alm.imaging.diffusion import adc_unit, b_table, fit_adc, fitted_adc, shells
from mri_alm.imaging.image_file import ImageHeader, image_header, read_image
from mri_alm.imaging.plausibility import (
    check_adc,
    check_decay,
    check_maps,
    infer_roles_from_voxels,
    scanner_map_holds,
    warn_if_cut_off,
)
from mri_alm.imaging.registration import PREPARED_IMAGES, Facts, Images, along_lps, mask_centre
from mri_alm.imaging.series import Series, group_series
from mri_alm.imaging.volume import MAX_VOXELS, build_mean, build_volume, check_size, common_slices, geometric_mean

_VENDORS = r"\b(siemens|philips|ge|canon|toshiba|uih|hitachi|fujifilm|mri-alm)\b"
_MODELS = (  # Siemens, GE, Philips, Toshiba and Canon, Hitachi, United Imaging, and our phantom
    r"\b(magnetom|aera|altea|amira|avanto|biograph|cima\.x|espree|essenza|flow|free\.max|lumina|mmr|prisma|sempra|skyra"
    r"|sola|spectra|symphony|terra|trio|triotim|verio|vida|signa|architect|artist|discovery|excite|explorer|hdxt?|hero"
    r"|mr360|mr450w?|mr750w?|optima|pioneer|premier|voyager|achieva|ambition|dstream|elition|evolution|ingenia|intera"
    r"|mr5300|mr7700|multiva|panorama|elan|fortian|galan|orian|titan|vantage|echelon|oval|oasis"
    r"|umr|5[5-8]0|588|6[678]0|7[789]0|8[789]0|jupiter|omega|mri-alm|phantom)\b"
)


PHANTOM_NOTE = "mri-alm phantom"
"""Description in the header of a NIfTI file that the built-in phantom wrote."""
MASKS = ("valid", "t2_valid", "gland")
MAX_NOT_NUMBERS = 0.5  # of the middle, where the gland lies: with less than half of it nothing can be said of it
REACH = 2.0  # voxels: what a linear or spline interpolation takes in
APART_MM = 4.0  # between centres of fields of view: two voxels of diffusion; within, equal corners do no harm


@dataclass
class Exam:
    """One study ready to register, all images float32 in LPS millimetres.

    Args:
        t2: Axial T2.
        adc: ADC in 1e-6 mm2/s.
        hbv: The highest b-value there is, acquired or calculated by the scanner; None where there is an ADC map alone.
        dwi: b in s/mm2 -> acquired image.
        warnings: Sentences a person should read.
        info: JSON-able facts: scanner, chosen series with reasons, b-values, counts of files. No identity.
        used: Files whose pixels are in the volumes.
    """

    t2: sitk.Image
    adc: sitk.Image
    hbv: sitk.Image | None
    dwi: dict[float, sitk.Image]
    warnings: list[str]
    info: dict[str, Any]
    used: frozenset[Path] = frozenset()


def read_study(files: StudyFiles, series: list[Series] | None = None) -> Exam:
    """Choose and build the volumes of one study.

    T2: axial, in the diffusion's frame of reference, the best by ``choose_series.PREFERENCES``; two that are equally
    good are refused. Diffusion: the set of series on one grid and echo time for which an ADC can be had, most acquired
    b-values, then the highest b, then the latest. ADC: the scanner's map on that grid nearest in time, if it does not
    contradict the one fitted over all acquired b-values; otherwise the fitted one. A candidate that cannot be built (a
    missing slice) is passed over with a warning when another one can.

    Args:
        files: From :func:`find_studies`.
        series: The study's, by other rules than the shipped ones or by hand. Those without a name may get another role
            here, by their voxels.

    Raises:
        StudyError: With a code for the kind of refusal: ``pointer``, ``no_images``, ``no_t2``, ``no_diffusion``,
            ``several_t2``, ``mosaic``, ``b_unknown``, ``b_implausible``, ``frames_differ``, ``slices_differ``,
            ``volumes_differ``, ``too_large``, ``adc_units``, ``adc_implausible``, ``adc_unfit``, ``maps_swapped`` or
            one of :func:`mri_alm.imaging.volume.build_volume`.
    """
    silence_readers()
    _refuse_empty(files)
    series = group_series(files.files, files.headers) if series is None else series
    warnings = _header_warnings(files)
    infer_roles_from_voxels(series)
    sets = diffusion_sets(series, warnings)
    t2_series, t2 = choose_t2(series, sets, warnings)
    sets = [one for one in sets if one.first.frame_of_reference == t2_series.frame_of_reference]
    group, built = first_usable(
        sets,
        lambda one: build_diffusion(one, beside=[t2_series]),
        lambda one: series_name(one.first),
        warnings,
    )
    refuse_equal_sets(group, sets, built)
    if len(sets) > 1:
        left = ", ".join(str(one.first.number) for one in sets if one is not group)
        warnings.append(f"Several diffusion protocols: took {series_name(group.first)} and its like, left {left}.")
    warnings += dict.fromkeys(note for one in (t2_series, *built.used) for note in one.notes)
    used = frozenset(frame.file for one in (t2_series, *built.used) for frame in one.frames)
    info = _facts(files, t2_series, used) | built.info
    info |= _acquisition("t2", files, t2_series) | _acquisition("adc", files, built.used[0])
    info |= {"t2": chosen(t2_series), "series": [chosen(one) for one in series]}
    return Exam(t2, built.adc, built.hbv, built.dwi, warnings + built.warnings, info, used)


def read_series(folder: Path, warnings: list[str] | None = None) -> dict[float | None, sitk.Image]:
    """Volumes of a folder that holds one series: ``{None: image}`` for T2 or an ADC map, b -> image for diffusion.

    Values are as stored, rescaled: bring an ADC map to 1e-6 mm2/s with :func:`mri_alm.imaging.diffusion.adc_unit`.

    Args:
        folder: Of one series, whatever its files are called.
        warnings: Gets the sentences that a person should read.

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
    if one.not_mr:
        raise StudyError("not_mr", f"{series_name(one)} holds no MR images, by its SOP class or modality.")
    if one.role == "unsupported":
        raise StudyError("mosaic", f"{series_name(one)}: {one.reason}. Export one image per slice.")
    check_size([one])
    if one.role not in ("dwi", "calculated"):
        return {None: build_volume(one.frames, series_name(one))}
    if not one.b_values:
        raise StudyError("b_unknown", f"No b-value in the headers of {series_name(one)}.")
    said = [] if warnings is None else warnings
    return {b: build_mean(one.at_b(b), f"{series_name(one)} at b = {b:g}", said) for b in one.b_values}


def _refuse_empty(files: StudyFiles) -> None:
    if files.files:
        return
    reasons = sorted({*files.failed.values(), *files.ignored.values()})
    code = "pointer" if any("pointer" in reason for reason in files.failed.values()) else "no_images"
    raise StudyError(
        code, f"No DICOM image among {len(files.failed) + len(files.ignored)} files: {'; '.join(reasons)}."
    )


def _header_warnings(files: StudyFiles) -> list[str]:
    warnings = list(files.notes)
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
    seen = len(files.files) + len(files.ignored) + len(files.failed)
    return _scanner(_header_of(t2, files)) | {
        "files_seen": seen,
        "files_used": len(used),
        "files_ignored": seen - len(used) - len(files.failed),
        "files_failed": len(files.failed),
    }


def _header_of(series: Series, files: StudyFiles) -> Dataset:
    return files.headers[files.files.index(series.frames[0].file)]


def _scanner(header: Dataset) -> Facts:
    strength = header.get("MagneticFieldStrength")
    return {
        "vendor": _vendor(str(header.get("Manufacturer") or "")),
        "model": _model(str(header.get("ManufacturerModelName") or "")),
        "field_strength": float(strength) if isinstance(strength, (int, float)) else None,
    }


def _acquisition(name: str, files: StudyFiles, series: Series) -> Facts:
    """Thickness of the slices and pixels before interpolation, in mm, where the header tells them."""
    header, frame, facts = _header_of(series, files), series.frames[0], Facts()
    with contextlib.suppress(TypeError, ValueError):
        facts[f"{name}_thickness_mm"] = float(header.get("SliceThickness"))
    matrix = header.get("AcquisitionMatrix")  # points along rows and columns as frequency, then the same as phase
    points = list(matrix) if isinstance(matrix, Iterable) else []
    if [type(one) for one in points] == [int] * 4 and (points[0] or points[2]) and (points[1] or points[3]):
        field = [mm * count for mm, count in zip(frame.spacing, frame.shape, strict=True)]
        counts = points[1] or points[3], points[0] or points[2]
        facts[f"{name}_acquired_mm"] = [round(float(mm / n), 3) for mm, n in zip(field, counts, strict=True)]
    return facts


def load_images(item: Mapping[Any, Any], *, lps: bool = True) -> tuple[Images, Facts]:
    """Read one exam.

    Args:
        item: ``dicom``, the folder of one study (or its :class:`StudyFiles`) whose series are recognised; or ``t2`` and
            either ``adc`` and ``hbv`` or ``dwi``: files (NIfTI, MHA, NRRD) or folders of one DICOM series. ``valid``
            where they are registered already.
        lps: Put voxels into the order of axial DICOM slices (:func:`mri_alm.imaging.registration.along_lps`); False:
            as they are stored.

    Returns:
        ``t2``, ``adc`` (1e-6 mm2/s), ``hbv`` and where given ``valid``, each on its own grid; ``warnings`` and facts.

    Raises:
        StudyError: If the exam cannot be used.
    """
    if "dicom" in item:
        source = item["dicom"]
        study = read_study(source if isinstance(source, StudyFiles) else _only_study(Path(source)))
        images, facts = study_images(study, lps=lps)
    else:
        images, facts = _from_files(item)
        images = along_lps(images) if lps else images
        facts |= {} if "valid" in item else image_geometry(images)  # a prepared exam's is that of the cohort's grid
    return images, _with_told(facts, item.get("facts") or {})


def study_images(study: Exam, *, lps: bool = True) -> tuple[Images, Facts]:
    """The same of a DICOM study already read."""
    images = {"t2": study.t2, "adc": study.adc} | ({} if study.hbv is None else {"hbv": study.hbv})
    images = along_lps(images) if lps else images
    facts = {"warnings": study.warnings, "hbv_b": (study.info.get("hbv") or {}).get("b")}
    return images, study.info | facts | image_geometry(images)


def image_geometry(images: Images) -> Facts:
    """Voxel size in mm and voxel count of T2 and ADC."""
    found: Facts = {f"{name}_size": list(images[name].GetSize()) for name in ("t2", "adc")}
    return found | {f"{name}_spacing_mm": [round(v, 3) for v in images[name].GetSpacing()] for name in ("t2", "adc")}


def _with_told(facts: Facts, told: Mapping[str, Any]) -> Facts:
    """Facts with those that the manifest tells: of scanner and b-values what the exam itself does not say.

    A voxel size that the manifest tells is the one that the images came with, before somebody resampled them.
    """
    clean = {"vendor": _vendor, "model": _model}
    told = {name: clean[name](value) if name in clean else value for name, value in told.items()}
    shapes = {name: value for name, value in told.items() if name.endswith(("_spacing_mm", "_size"))}
    of_file = {name.replace("_spacing_mm", "_size") for name in shapes}
    known = {name: value for name, value in facts.items() if name not in of_file and value not in (None, "", [])}
    return facts | told | known | shapes | {name: told.get(name) for name in of_file}


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
    if not item.get("gland"):
        return None
    gland = Path(item["gland"])
    if "dicom" in item and not gland.is_dir():
        _check_places({"gland": image_header(gland, "gland")}, item, [])
    return mask_centre(_read_volume(gland, "gland", []))


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
    paths = {name: Path(item[name]) for name in (*PREPARED_IMAGES, "dwi", "gland") if item.get(name)}
    headers = {name: image_header(path, name) for name, path in paths.items() if not path.is_dir()}
    _check_sizes(headers)
    _check_places(headers, paths, report["warnings"])
    if any(header.description == PHANTOM_NOTE for header in headers.values()):
        report["vendor"] = "mri-alm"
    images: Images = {}
    for name in (name for name in PREPARED_IMAGES if name in paths):
        image = _read_volume(paths[name], name, report["warnings"])
        images[name] = image if name in MASKS else _numbers_only(image, name, images, report["warnings"])
    series = _read_dwi(paths["dwi"], images, report["warnings"]) if "dwi" in paths else {}
    if series:
        report["b_values"] = sorted(series)
        check_decay(series, "Column dwi", report["warnings"])
        if "adc" not in images:
            images["adc"], report["adc_source"] = fitted_adc(series, report["warnings"])
        if "hbv" not in images:
            images["hbv"], report["hbv_b"] = series[max(series)], max(series)
    if "adc" in item and "hbv" in images and "valid" not in item:  # a prepared exam was checked when it was prepared
        check_maps(images["adc"], images["hbv"])
    if report["adc_source"] == "given":
        images["adc"] = images["adc"] * adc_unit(images["adc"])[1]
    if "valid" not in item:
        _check_adc(images["adc"], series, report)
    if paths["t2"].is_dir():  # a DICOM series: its header tells the scanner
        report |= _scanner(find_studies(paths["t2"])[0].headers[0])
    return images, report


def _check_sizes(headers: Mapping[str, ImageHeader]) -> None:
    """Refuse image files that are more than any exam, before a voxel is read.

    Raises:
        StudyError: ``too_large``.
    """
    if (total := sum(math.prod(header.size) for header in headers.values())) > MAX_VOXELS:
        sizes = ", ".join(f"{name} {' x '.join(map(str, header.size))}" for name, header in headers.items())
        raise StudyError(
            "too_large",
            f"The headers of this study's files claim {total:,} voxels ({sizes}), and an exam has {MAX_VOXELS:,} at "
            "most. Give smaller images: crop them, or average the volumes of one b-value.",
        )


def _check_places(headers: Mapping[str, ImageHeader], places: Mapping[Any, Any], warnings: list[str]) -> None:
    """Refuse image files that do not say where they lie, unless all are of one grid: then they lie on each other.

    Raises:
        StudyError: ``no_position``.
    """
    lost = [name for name, header in headers.items() if not header.placed]
    why = "their orientation is absent (qform and sform codes of 0) or the one that programs write for want of any"
    grids = {(header.size[:3], tuple(np.round(header.spacing, 3))) for header in headers.values()}
    if not lost and len(headers) > 1 and not any(any(header.origin) for header in headers.values()):
        centres = np.array([header.centre for header in headers.values()])
        if np.ptp(centres, axis=0).max() > APART_MM:  # no scanner puts the first voxel of T2 and diffusion at 0, 0, 0
            lost, why = list(headers), "all of them begin at 0, 0, 0, and have different fields of view"
    if not lost:
        return
    columns = f"Column{'s' * (len(lost) > 1)} {', '.join(lost)}"
    sizes_known = all(set(headers[name].spacing) != {1.0} for name in lost)
    if len(grids) == 1 and len(lost) == len(places) and sizes_known:
        warnings.append(
            f"{columns}: the files do not say where their images lie ({why}). All have one grid and are taken to lie "
            "on each other, rows to the left and columns to the back: look at the picture."
        )
        return
    raise StudyError(
        "no_position",
        f"{columns}: where the images of this study lie is unknown: {why}. Convert them from DICOM again (dcm2niix "
        "keeps positions), or copy the geometry of the original into the file.",
    )


def _numbers_only(image: sitk.Image, name: str, images: Images, warnings: list[str]) -> sitk.Image:
    """An image whose voxels are all numbers; where they were not, ``images`` gets a mask of 0 there, ``<name>_valid``.

    Next to numbers the nearest one stands in, so that interpolation there takes nothing in; further off it is zero.

    Raises:
        StudyError: ``empty_volume`` where more than half of the middle is no number.
    """
    voxels = sitk.GetArrayFromImage(image)
    finite = np.isfinite(voxels)
    inside = finite.all(axis=0) if voxels.ndim == 4 else finite  # of a 4D image's volumes, all
    middle = inside[tuple(slice(n // 4, n - n // 4) for n in inside.shape)]
    if 1 - middle.mean() > MAX_NOT_NUMBERS:
        raise StudyError(
            "empty_volume",
            f"Column {name}: {1 - middle.mean():.0%} of the voxels in the middle of the image are no numbers (NaN or "
            "infinite). Make it again, without dividing by zero or taking logarithms of noise.",
        )
    warn_if_cut_off(voxels, name, warnings)
    if inside.all():
        return image
    share = 1 - inside.mean()
    warnings.append(
        f"Column {name}: {max(share, 0.001):.1%} of its voxels are no numbers (NaN or infinite), "
        f"{1 - middle.mean():.1%} of those in its middle; they count as outside."
    )
    distance, nearest = distance_transform_edt(~inside, return_indices=True)
    clean = sitk.GetImageFromArray(
        np.where(distance <= REACH, voxels[(..., *nearest)], np.float32(0)).astype(np.float32), isVector=False
    )
    clean.CopyInformation(image)
    mask = sitk.GetImageFromArray(inside.astype(np.uint8))
    mask.CopyInformation(image[..., 0] if voxels.ndim == 4 else image)
    for place in ("adc_valid", "hbv_valid") if name == "dwi" else (f"{name}_valid",):
        known = images.get(place)
        images[place] = mask if known is None else sitk.Mask(known, mask)
    return clean


def _check_adc(adc: sitk.Image, series: dict[float, sitk.Image], report: Facts) -> None:
    """Whether a map can be true by itself, and beside the images it is said to be from."""
    problem = ""
    if report["adc_source"] == "given" and len(series) > 1:
        with contextlib.suppress(StudyError):  # on another grid, where nothing can be compared voxel by voxel
            cut, _ = common_slices({"adc": adc, "fit": fit_adc(series), "low": series[min(series)]})
            problem = scanner_map_holds(cut["adc"], cut["fit"], cut["low"])
    if problem:
        raise StudyError(
            "adc_contradicts",
            f"Column adc contradicts the fit to column dwi ({problem}): a scale, a b-value or the file is wrong. "
            "Correct it, or leave one of the two columns out.",
        )
    check_adc(adc, "The ADC map", report["warnings"])


def _read_volume(path: Path, name: str, warnings: list[str]) -> sitk.Image:
    """One 3D volume from a file or from a folder of one DICOM series, float32."""
    if path.is_dir():
        volumes = read_series(path, warnings)
        if len(volumes) != 1:
            raise StudyError("several_b", f"Column {name}: the series holds {len(volumes)} b-values; use column dwi.")
        return next(iter(volumes.values()))
    image = read_image(path, name, mask=name in MASKS)
    if image.GetDimension() != 3:
        raise StudyError("not_3d", f"Column {name}: the image has {image.GetDimension()} dimensions, 3 are needed.")
    return image


def _read_dwi(path: Path, images: Images, warnings: list[str]) -> dict[float, sitk.Image]:
    """Image of each b-value, from a folder of one DICOM series or from a 4D NIfTI with a .bval file beside it."""
    if path.is_dir():
        series = {b: image for b, image in read_series(path, warnings).items() if b is not None}
        if not series:
            raise StudyError(
                "b_unknown", "Column dwi: the series has no b-values. Give an ADC map and a high-b image instead."
            )
        return series
    values = b_table(path)
    image = read_image(path, "dwi")
    if image.GetDimension() != 4 or image.GetSize()[3] != len(values):
        raise StudyError(
            "b_unknown",
            f"Column dwi: an image of size {image.GetSize()} does not fit {len(values)} b-values in its .bval file.",
        )
    image = _numbers_only(image, "dwi", images, warnings)
    nominal = shells(values)
    frames: dict[float, list[sitk.Image]] = {}
    for number, b in enumerate(values):
        frames.setdefault(nominal[b], []).append(image[:, :, :, number])
    return {b: geometric_mean(same, f"Column dwi at b = {b:g}", warnings) for b, same in frames.items()}
