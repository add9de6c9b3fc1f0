"""Images of an exam from DICOM or files, and diffusion brought onto T2's grid; no torch, so programs start at once.

:mod:`mri_alm.transforms` wraps these for MONAI, :mod:`mri_alm.preparation` calls them for a whole cohort.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import SimpleITK as sitk  # noqa: N813

from mri_alm.content import check_maps
from mri_alm.dicom import Study, StudyFiles, find_studies, read_series, read_study
from mri_alm.diffusion import adc_scale, fitted_adc
from mri_alm.errors import StudyError
from mri_alm.image_file import read_image
from mri_alm.registration import Registration, common_grid, mask_centre, register_rigid, resample
from mri_alm.volume import geometric_mean

Images = dict[str, sitk.Image]
Report = dict[str, Any]
GLAND_MM = 64.0, 64.0, 48.0  # a large prostate; a zoomed field of view covers it, not the grid
MIN_COVERAGE = 0.5  # of the gland's region, else the study is refused; of the grid, else it is warned of


def load_images(item: Mapping[Any, Any]) -> tuple[Images, Report]:
    """Read one exam; see :class:`mri_alm.transforms.LoadProstateStudyd` for what an item may hold.

    Returns:
        ``t2``, ``adc`` (1e-6 mm2/s), ``hbv`` and where given ``valid``, each on its own grid; ``warnings`` and facts.

    Raises:
        StudyError: If the exam cannot be used.
    """
    if "dicom" not in item:
        return _from_files(item)
    source = item["dicom"]
    return study_images(read_study(source if isinstance(source, StudyFiles) else _only_study(Path(source))))


def study_images(study: Study) -> tuple[Images, Report]:
    """The same of a DICOM study already read."""
    return {"t2": study.t2, "adc": study.adc, "hbv": study.hbv}, study.info | {"warnings": study.warnings}


def onto_grid(
    images: Images,
    report: Report,
    *,
    spacing: tuple[float, float, float],
    size: tuple[int, int, int],
    register: bool = True,
    center_mm: tuple[float, float, float] | None = None,
) -> tuple[Images, Report]:
    """Register ADC to T2, and bring T2, ADC and high-b onto one grid in one interpolation each.

    Args:
        images: From :func:`load_images`; with ``valid`` they are registered already and only change their grid.
        report: What is known of them.
        spacing: Of the grid, mm along T2's rows, columns and slices.
        size: Voxels along the same.
        register: False trusts the scanner's positions.
        center_mm: LPS point that the grid lies about; T2's centre by default.

    Returns:
        ``t2``, ``adc``, ``hbv`` and ``valid`` (1 where there is diffusion data) on the grid; the report with the
        registration's figures and the share of the grid that has diffusion data.

    Raises:
        StudyError: ``no_overlap`` if less than half of the gland's region about the grid's centre has diffusion data.
    """
    t2, adc, hbv = images["t2"], images["adc"], images["hbv"]
    report = report | {"warnings": list(report["warnings"])}
    transform: sitk.Transform = sitk.Transform(3, sitk.sitkIdentity)
    if register and "valid" not in images:
        found = register_rigid(t2, adc)
        transform = found.transform
        report["registration"] = _figures(found)
        if not found.accepted:
            report["warnings"].append(f"Registration refused, diffusion left where the scanner put it: {found.reason}")
    if center_mm:
        report["crop_center_mm"] = [round(value, 3) for value in center_mm]
    grid = common_grid(t2, spacing_mm=spacing, size=size, center_mm=center_mm)
    fixed, _ = resample(t2, grid, sitk.Transform(3, sitk.sitkIdentity), interpolator="bspline")
    moved, valid = resample(adc, grid, transform, interpolator="linear")
    high, _ = resample(hbv, grid, transform, interpolator="linear")
    if "valid" in images:
        known, _ = resample(images["valid"], grid, interpolator="linear")
        valid = sitk.And(valid, known >= 0.5)
        moved, high = sitk.Mask(moved, valid), sitk.Mask(high, valid)
    coverage = float(sitk.GetArrayViewFromImage(valid).mean())
    report["coverage"] = round(coverage, 4)
    if (gland := _central_coverage(valid)) < MIN_COVERAGE:
        place = "the given point" if center_mm else "T2's centre"
        raise StudyError(
            "no_overlap",
            f"Only {gland:.0%} of the gland's region, {GLAND_MM[0]:g} x {GLAND_MM[1]:g} x {GLAND_MM[2]:g} mm about "
            f"{place}, has diffusion data. Do they belong together?",
        )
    if coverage < MIN_COVERAGE:
        report["warnings"].append(f"Only {coverage:.0%} of the grid has diffusion data: its field of view is small.")
    return {"t2": fixed, "adc": moved, "hbv": high, "valid": valid}, report


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


def _central_coverage(valid: sitk.Image) -> float:
    """Share of the voxels above 0 in a gland-sized box about an image's centre, at most the whole image."""
    wanted = [max(1, round(mm / spacing)) for mm, spacing in zip(GLAND_MM, valid.GetSpacing(), strict=True)]
    size = [min(one, n) for one, n in zip(wanted, valid.GetSize(), strict=True)]
    first = [(n - one) // 2 for one, n in zip(size, valid.GetSize(), strict=True)]
    return float(sitk.GetArrayFromImage(sitk.RegionOfInterest(valid, size, first)).mean())


def _figures(found: Registration) -> dict[str, Any]:
    numbers = {name: round(getattr(found, name), 4) for name in ("mi_before", "mi_after", "shift_mm", "rotation_deg")}
    return {"accepted": found.accepted, "reason": found.reason} | numbers


def _only_study(folder: Path) -> StudyFiles:
    studies = find_studies(folder)
    with_images = [study for study in studies if study.files] or studies
    if len(with_images) != 1:
        raise StudyError(
            "several_studies", f"The folder holds {len(with_images)} DICOM studies. Give each a folder of its own."
        )
    return with_images[0]


def _from_files(item: Mapping[Any, Any]) -> tuple[dict[str, sitk.Image], dict[str, Any]]:
    report: dict[str, Any] = {"warnings": [], "adc_source": "given"}
    images = {name: _read_volume(Path(item[name]), name) for name in ("t2", "adc", "hbv", "valid") if name in item}
    if "dwi" in item:
        series = _read_dwi(Path(item["dwi"]))
        report["b_values"] = sorted(series)
        if "adc" not in images:
            images["adc"], report["adc_source"] = fitted_adc(series, report["warnings"])
        images.setdefault("hbv", series[max(series)])
    if "adc" in item and "valid" not in item:  # a prepared exam was checked when it was prepared
        check_maps(images["adc"], images["hbv"])
    images["adc"] = images["adc"] * adc_scale(images["adc"])
    return images, report


def _read_volume(path: Path, name: str) -> sitk.Image:
    """One 3D volume from a file or from a folder of one DICOM series, float32."""
    if path.is_dir():
        volumes = read_series(path)
        if len(volumes) != 1:
            raise StudyError(
                "several_b",
                f"Column {name}: the series holds {len(volumes)} b-values; use column dwi.",
            )
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
    table = path.with_name(Path(path.name.removesuffix(".gz")).stem + ".bval")
    if not table.is_file():
        raise StudyError(
            "b_unknown", "Column dwi: there is no .bval file beside the image, so its b-values are unknown."
        )
    image = read_image(path, "dwi")
    try:
        values = [float(text) for text in table.read_text("utf-8").split()]
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
