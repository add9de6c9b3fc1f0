"""Diffusion onto T2's grid: a gated rigid registration, and one interpolation that applies it.

Every call works on one core, in one piece: the result is the same bits on any machine size, and SimpleITK releases
Python's lock, so several studies in Python threads use several cores better than one study split over them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import ArrayLike, NDArray

from mri_alm.errors import InputError, StudyError, itk_failed

MAX_ACCEPTED_SHIFT_MM = 15.0
MAX_ACCEPTED_ROTATION_DEG = 10.0
MIN_MI_GAIN = 0.02
MIN_MI = 0.02  # nats; an ADC map of noise reaches 0.002 against a T2, real exams 0.2 and more
REGISTRATION_FIELD_MM = 100.0  # the prostate and what moves with it; the body wall would pull the result
MARGIN_MM = 25.0  # around the field in the moving image: the largest accepted shift and rotation at its rim
IN_PLANE_MM = 2.0  # about the diffusion's own resolution: T2's finer detail has no counterpart to match
BINS = 32
MIN_OVERLAP = 0.1  # of the field; below it the optimiser has nothing to hold on to


Images = dict[str, sitk.Image]
Facts = dict[str, Any]

PREPARED_IMAGES = ("t2", "adc", "hbv", "valid", "t2_valid")
"""What :func:`onto_grid` gives, and a prepared cohort and the transforms hold; some exams have no ``hbv``."""
COHORT_SPACING_MM, COHORT_SIZE = (0.5, 0.5, 3.0), (256, 256, 28)
"""The grid that exams are prepared on: finer than any that a network sees, and with room about the gland."""
GLAND_MM = 64.0, 64.0, 48.0  # a large prostate; a zoomed field of view covers it, not the grid
MIN_COVERAGE = 0.5  # of the gland's region, else the study is refused; of the grid, else it is warned of
# In voxels. A grid about T2's middle meets the border of its slices exactly, half of a voxel beyond the last one, where
# the last bits of a header would decide; the float32 headers of NIfTI move a point by 1e-4 voxels at most.
EDGE = 1e-3
MIN_HIGH_B = 400.0  # s/mm2; below it the signal is mostly T2's and perfusion's: no image of high b
NEIGHBOURS = 6  # voxels around a grid that its interpolation needs; a spline's reach falls to a quarter per voxel


@dataclass(frozen=True)
class Registration:
    """A rigid transform from T2's points to the diffusion's points, and the figures that judge it.

    Args:
        transform: Identity when refused.
        accepted: Whether the gate let it through.
        mi_before: Mattes mutual information (nats) at the scanner's positions.
        mi_after: The same at what the optimiser found, accepted or not.
        shift_mm: How far the optimiser moved the field's centre.
        rotation_deg: By what angle it turned the diffusion.
        reason: Why it was accepted or refused.
    """

    transform: sitk.Transform
    accepted: bool
    mi_before: float
    mi_after: float
    shift_mm: float
    rotation_deg: float
    reason: str


def register_rigid(fixed: sitk.Image, moving: sitk.Image) -> Registration:
    """Rigid registration of an ADC map (or the lowest b) to T2 by Mattes mutual information, refused unless plausible.

    Do not give it the high-b image: with little but the prostate's brightest spots left it slides by more than 10 mm.

    Args:
        fixed: T2.
        moving: ADC map or low-b image in the same frame of reference.

    Returns:
        What was found; also for images that cannot be registered, such as three slices: refused, with the reason.
    """
    try:
        return _registered(fixed, moving)
    except RuntimeError as error:
        if itk_failed(error) is None:
            raise
        return _untried("too few slices or too little structure to register")


def _registered(fixed: sitk.Image, moving: sitk.Image) -> Registration:
    reference = _field(fixed)
    moving = _around(sitk.Cast(moving, sitk.sitkFloat32), reference)
    start = sitk.Euler3DTransform()
    start.SetCenter(image_centre(fixed))
    coverage = sitk.Resample(_ones(moving), reference, start, sitk.sitkNearestNeighbor)
    if np.mean(sitk.GetArrayViewFromImage(coverage)) < MIN_OVERLAP:
        return _untried("hardly any overlap with T2")
    before = _mutual_information(reference, moving, start)
    found = _optimise(reference, moving, start)
    return _gate(found, before, _mutual_information(reference, moving, found))


def _untried(reason: str) -> Registration:
    return Registration(sitk.Transform(3, sitk.sitkIdentity), False, 0.0, 0.0, 0.0, 0.0, reason)


def image_centre(image: sitk.Image) -> tuple[float, float, float]:
    """Physical point in the middle of an image's field of view, LPS mm."""
    middle = [(size - 1) / 2 for size in image.GetSize()]
    x, y, z = image.TransformContinuousIndexToPhysicalPoint(middle)
    return x, y, z


def stored_axes(image: sitk.Image) -> str:
    """Where an image's three axes point to, by the nearest directions of the body: "LPS" as axial DICOM slices."""
    return str(sitk.DICOMOrientImageFilter().GetOrientationFromDirectionCosines(image.GetDirection()))


def along_lps(images: Images) -> Images:
    """Images with their voxels in the order of axial DICOM slices, each where it was; nothing is interpolated.

    Programs store one exam in several orders, such as NIfTI's right, anterior, superior, and what follows works along
    the axes as they are stored: without this, one exam would have several scores.
    """
    return {name: one if stored_axes(one) == "LPS" else sitk.DICOMOrient(one, "LPS") for name, one in images.items()}


def mask_centre(mask: sitk.Image) -> tuple[float, float, float]:
    """Centre of the box around a mask's voxels above 0, LPS mm; of the box, because a crop must hold all of it.

    Raises:
        StudyError: ``empty_gland`` when no voxel is above 0.
    """
    box = sitk.LabelShapeStatisticsImageFilter()
    box.Execute(mask > 0)
    if not box.HasLabel(1):
        raise StudyError("empty_gland", "The gland mask has no voxel above 0. Correct it, or leave the cell empty.")
    first, size = np.array(box.GetBoundingBox(1)).reshape(2, 3)
    x, y, z = mask.TransformContinuousIndexToPhysicalPoint((first + (size - 1) / 2).tolist())
    return x, y, z


def common_grid(
    t2: sitk.Image,
    *,
    spacing_mm: tuple[float, float, float],
    size: tuple[int, int, int],
    center_mm: tuple[float, float, float] | None = None,
) -> sitk.Image:
    """Empty reference image with T2's direction, about T2's field-of-view centre or a given point.

    Args:
        t2: Gives direction and centre.
        spacing_mm: Voxel size along T2's row, column and slice directions.
        size: Voxels along the same.
        center_mm: Physical LPS point to centre on instead, such as the gland's.

    Raises:
        InputError: If a spacing or a size is not positive.
    """
    if min(spacing_mm) <= 0 or min(size) <= 0:
        raise InputError(f"The grid needs a positive spacing and size, got {spacing_mm} mm and {size} voxels.")
    return empty_image(size, spacing_mm, t2.GetDirection(), center_mm or image_centre(t2))


def empty_image(
    size: Sequence[int], spacing: Sequence[float], direction: Sequence[float], centre: ArrayLike
) -> sitk.Image:
    """An image of zeros with a size, spacing and direction, whose field of view lies about a point (LPS mm)."""
    half = (np.array(size) - 1) / 2 * np.array(spacing)
    image = sitk.Image(list(size), sitk.sitkUInt8)
    image.SetSpacing(spacing)
    image.SetDirection(direction)
    image.SetOrigin((np.array(centre) - np.array(direction).reshape(3, 3) @ half).tolist())
    return image


def resample(
    image: sitk.Image,
    grid: sitk.Image,
    transform: sitk.Transform | None = None,
    *,
    interpolator: int = sitk.sitkLinear,
) -> tuple[sitk.Image, sitk.Image]:
    """Registration, crop and change of grid in one interpolation.

    Args:
        image: Any image in LPS mm.
        grid: Reference from :func:`common_grid`.
        transform: From the grid's points to the image's points; identity for T2 itself.
        interpolator: Linear keeps an ADC map within its own values; ``sitkBSpline`` keeps T2's edges, and its overshoot
            is clipped to the image's own range.

    Returns:
        The image on the grid, float32, 0 outside its data; and the coverage, uint8, 1 where there is data and 0 on its
        very border. Onto its own grid nothing is interpolated.
    """
    if transform is None and same_grid(image, grid):
        result = sitk.Cast(image, sitk.sitkFloat32)
        result.CopyInformation(grid)
        return result, _ones(grid)
    transform = transform or sitk.Transform(3, sitk.sitkIdentity)
    part = sitk.Cast(_part(image, _corners(grid, transform), NEIGHBOURS), sitk.sitkFloat32)
    method = sitk.ResampleImageFilter()
    method.SetReferenceImage(grid)
    method.SetTransform(transform)
    method.SetNumberOfWorkUnits(1)
    # The same inside-test for both images: no voxel of the mask is without a value.
    method.SetInterpolator(sitk.sitkNearestNeighbor)
    inside, coverage = method.Execute(_ones(image)), method.Execute(_ones(image, edge=EDGE))
    method.SetInterpolator(interpolator)
    result = method.Execute(part)
    if interpolator != sitk.sitkLinear:
        range_of = sitk.MinimumMaximumImageFilter()
        range_of.Execute(image)
        result = sitk.Clamp(result, sitk.sitkFloat32, range_of.GetMinimum(), range_of.GetMaximum())
    return sitk.Mask(result, inside), coverage


def same_grid(image: sitk.Image, grid: sitk.Image) -> bool:
    """Whether the voxels of two images lie at the same points, to a thousandth of a voxel."""
    if image.GetSize() != grid.GetSize():
        return False
    corners = _corners(grid, sitk.Transform(3, sitk.sitkIdentity)).tolist()
    found = np.array([image.TransformPhysicalPointToContinuousIndex(point) for point in corners])
    expected = np.array([grid.TransformPhysicalPointToContinuousIndex(point) for point in corners])
    return bool(np.abs(found - expected).max() < EDGE)


def _gate(found: sitk.Euler3DTransform, before: float, after: float) -> Registration:
    """Judge a result: information must rise clearly, by a movement a patient can make."""
    identity = sitk.Transform(3, sitk.sitkIdentity)
    shift = float(np.linalg.norm(found.GetTranslation()))
    matrix = np.array(found.GetMatrix()).reshape(3, 3)
    angle = float(np.rad2deg(np.arccos(np.clip((np.trace(matrix) - 1) / 2, -1, 1))))
    if after < MIN_MI:
        reason = f"the images share no structure: mutual information {after:.4f}"
    elif after <= before * (1 + MIN_MI_GAIN):
        reason = f"no gain: mutual information {before:.3f} -> {after:.3f}"
    elif shift > MAX_ACCEPTED_SHIFT_MM or angle > MAX_ACCEPTED_ROTATION_DEG:
        reason = f"implausible movement: {shift:.1f} mm, {angle:.1f} degrees"
    else:
        reason = f"mutual information {before:.3f} -> {after:.3f}"
        return Registration(sitk.Transform(found), True, before, after, shift, angle, reason)
    return Registration(identity, False, before, after, shift, angle, reason)


def _optimise(reference: sitk.Image, moving: sitk.Image, start: sitk.Euler3DTransform) -> sitk.Euler3DTransform:
    method = _metric(start)
    # The smoothed gradient does not lock on to the interpolation's own maxima at whole-voxel shifts.
    method.SetMetricUseMovingImageGradientFilter(True)
    method.SetShrinkFactorsPerLevel([2, 1])
    method.SetSmoothingSigmasPerLevel([1, 0])
    method.SmoothingSigmasAreSpecifiedInPhysicalUnitsOn()
    method.SetOptimizerAsRegularStepGradientDescent(learningRate=1.0, minStep=0.005, numberOfIterations=100)
    method.SetOptimizerScalesFromPhysicalShift()
    found = method.Execute(reference, moving)  # a composite that holds the Euler transform
    return sitk.Euler3DTransform(sitk.CompositeTransform(found).GetNthTransform(0))


def _mutual_information(reference: sitk.Image, moving: sitk.Image, transform: sitk.Euler3DTransform) -> float:
    return -float(_metric(transform).MetricEvaluate(reference, moving))


def _metric(transform: sitk.Euler3DTransform) -> sitk.ImageRegistrationMethod:
    """Mattes mutual information over every voxel of the reference."""
    method = sitk.ImageRegistrationMethod()
    method.SetNumberOfWorkUnits(1)  # pieces are summed in another order otherwise, and the last bits change
    method.SetMetricAsMattesMutualInformation(BINS)
    method.SetMetricUseFixedImageGradientFilter(False)
    method.SetMetricUseMovingImageGradientFilter(False)
    method.SetInterpolator(sitk.sitkLinear)
    method.SetInitialTransform(transform, inPlace=False)
    return method


def _field(t2: sitk.Image) -> sitk.Image:
    """T2's central field with all its slices, pixels averaged in plane to about ``IN_PLANE_MM``."""
    pixel = np.array(t2.GetSpacing()[:2])
    bins = np.maximum(1, np.round(IN_PLANE_MM / pixel)).astype(int)
    available = np.array(t2.GetSize()[:2])
    count = np.minimum(np.floor(REGISTRATION_FIELD_MM / (pixel * bins)), available // bins).astype(int) * bins
    first = (available - count) // 2
    size = [int(count[0]), int(count[1]), t2.GetSize()[2]]
    field = sitk.RegionOfInterest(sitk.Cast(t2, sitk.sitkFloat32), size, [int(first[0]), int(first[1]), 0])
    return sitk.BinShrink(field, [int(bins[0]), int(bins[1]), 1])


def _around(moving: sitk.Image, reference: sitk.Image) -> sitk.Image:
    """The part of the moving image within a margin of the reference: filters then run on what matters."""
    margin = max(1, round(MARGIN_MM / min(moving.GetSpacing())))
    return _part(moving, _corners(reference, sitk.Transform(3, sitk.sitkIdentity)), margin)


def _corners(grid: sitk.Image, transform: sitk.Transform) -> NDArray[np.float64]:
    """The eight outer voxel centres of a grid, mapped by a transform, (8, 3) mm."""
    ends = [(0, size - 1) for size in grid.GetSize()]
    indices = np.stack(np.meshgrid(*ends), axis=-1).reshape(-1, 3)
    return np.array([transform.TransformPoint(grid.TransformIndexToPhysicalPoint(i)) for i in indices.tolist()])


def _part(image: sitk.Image, points: NDArray[np.float64], margin: int) -> sitk.Image:
    """The box of an image's voxels around some points, plus a margin in voxels; the whole image if it misses them."""
    indices = np.array([image.TransformPhysicalPointToContinuousIndex(point) for point in points.tolist()])
    first = np.maximum(np.floor(indices.min(axis=0)).astype(int) - margin, 0)
    last = np.minimum(np.ceil(indices.max(axis=0)).astype(int) + margin + 1, image.GetSize())
    if (last <= first).any():
        return image
    return sitk.RegionOfInterest(image, (last - first).tolist(), first.tolist())


def _ones(image: sitk.Image, edge: float = 0.0) -> sitk.Image:
    """An image of ones in the place of another, or so many voxels smaller on each side."""
    ones = sitk.Image(image.GetSize(), sitk.sitkUInt8) + 1
    ones.CopyInformation(image)
    if edge:
        smaller = np.array(image.GetSpacing()) * (1 - 2 * edge / np.array(image.GetSize()))
        ones = empty_image(image.GetSize(), smaller.tolist(), image.GetDirection(), image_centre(image)) + 1
    return ones


def onto_grid(
    images: Images,
    report: Facts,
    *,
    spacing: tuple[float, float, float],
    size: tuple[int, int, int],
    register: bool = True,
    center_mm: tuple[float, float, float] | None = None,
    as_prepared: bool = False,
    show: Callable[[Images], object] | None = None,
) -> tuple[Images, Facts]:
    """Register ADC to T2, and bring T2, ADC and high-b onto one grid.

    Args:
        images: From :func:`load_images`; with ``valid`` they are registered already and only change their grid.
            ``hbv`` may be absent. ``adc_valid``, ``hbv_valid`` and ``t2_valid``, on the grids of their images, are 0
            where these hold no number.
        report: What is known of them.
        spacing: Of the grid, mm along T2's rows, columns and slices.
        size: Voxels along the same.
        register: False trusts the scanner's positions.
        center_mm: LPS point that the grid lies about; T2's centre by default.
        as_prepared: Go by the grid that exams are prepared on, as one from a prepared cohort does: both then hold the
            same voxels. False does it in one interpolation.
        show: Is given the registered images for a person to look at: what the grid covers, on T2's own voxels.

    Returns:
        ``t2``, ``adc``, ``hbv``, ``valid`` (1 where there is diffusion data) and ``t2_valid`` (1 where T2 has slices)
        on the grid; the report with the registration's figures and the share of the grid that has diffusion data.

    Raises:
        StudyError: ``no_overlap`` if less than half of the gland's region about the grid's centre has diffusion data.
    """
    report = report | {"warnings": list(report["warnings"])}
    prepared = "valid" in images
    transform = _registration(images, report) if register and not prepared else None
    if center_mm:
        report["crop_center_mm"] = [round(value, 3) for value in center_mm]
    grid = common_grid(images["t2"], spacing_mm=spacing, size=size, center_mm=center_mm)
    if show:
        part = _part(images["t2"], _corners(grid, sitk.Transform(3, sitk.sitkIdentity)), 0)
        show(_resampled(images | {"t2": part}, part, transform))
    if as_prepared and not prepared:
        images, transform = as_stored(_resampled(images, _prepared_part(images, grid), transform)), None
    found = _resampled(images, grid, transform)
    _judge(found["valid"], report, "the given point" if center_mm else "T2's centre")
    return found, report


def cohort_grid(t2: sitk.Image, center_mm: tuple[float, float, float] | None = None) -> sitk.Image:
    """The grid that exams are prepared on, about T2's centre or a given point."""
    return common_grid(t2, spacing_mm=COHORT_SPACING_MM, size=COHORT_SIZE, center_mm=center_mm)


def missing_high_b(images: Images, facts: Facts) -> str:
    """Why an exam of :func:`load_images` counts as one without high b, in words; empty if not."""
    if "hbv" not in images:
        return "The exam has no high-b image"
    b = facts.get("hbv_b")
    if isinstance(b, (int, float)) and b < MIN_HIGH_B:
        return f"The exam has no high-b image: its highest b is {b:g}, below {MIN_HIGH_B:g}"
    return ""


def as_manifest_says(center_mm: tuple[float, float, float] | None) -> tuple[float, float, float] | None:
    """A point to 0.01 mm, as a prepared cohort's manifest has it: an exam then lies about the same one either way."""
    return center_mm and (round(center_mm[0], 2), round(center_mm[1], 2), round(center_mm[2], 2))


def as_stored(images: Images) -> Images:
    """Images of one grid as a prepared cohort holds them: 0 outside of their masks, float32 of 12 significant bits.

    That is 0.01 %, well below noise, and halves the files; zero stays zero.
    """
    masks = {"t2": "t2_valid", "adc": "valid", "hbv": "valid"}
    return {
        name: _rounded(sitk.Mask(image, images[masks[name]])) if name in masks else image
        for name, image in images.items()
    }


def _rounded(image: sitk.Image) -> sitk.Image:
    bits = sitk.GetArrayFromImage(image).view(np.uint32)
    rounded = sitk.GetImageFromArray(((bits + 0x400) & np.uint32(0xFFFFF800)).view(np.float32))
    rounded.CopyInformation(image)
    return rounded


def _registration(images: Images, report: Facts) -> sitk.Transform | None:
    """From T2's points to the diffusion's, and its figures in the report; None leaves the diffusion where it is."""
    found = register_rigid(images["t2"], images["adc"])
    report["registration"] = _figures(found)
    if found.accepted:
        return found.transform
    report["warnings"].append(f"Registration refused, diffusion left where the scanner put it: {found.reason}")
    return None


def _prepared_part(images: Images, grid: sitk.Image) -> sitk.Image:
    """The voxels of the grid that the exam would be prepared on which the interpolation onto another grid needs."""
    corners = _corners(grid, sitk.Transform(3, sitk.sitkIdentity))
    return _part(cohort_grid(images["t2"], image_centre(grid)), corners, NEIGHBOURS)


def _resampled(images: Images, grid: sitk.Image, transform: sitk.Transform | None) -> Images:
    """All images on one grid in one interpolation each, and where they have data."""
    found: Images = {}
    found["t2"], found["t2_valid"] = resample(images["t2"], grid, interpolator=sitk.sitkBSpline)
    found["adc"], found["valid"] = resample(images["adc"], grid, transform)
    if "hbv" in images:
        found["hbv"], covered = resample(images["hbv"], grid, transform)
        found["valid"] = sitk.And(found["valid"], covered)
    for known, name in (("valid", "valid"), ("adc_valid", "valid"), ("hbv_valid", "valid"), ("t2_valid", "t2_valid")):
        if known in images:  # no voxel may have a part from outside
            share, _ = resample(images[known], grid, None if known == "t2_valid" else transform)
            found[name] = sitk.And(found[name], share > 1 - EDGE)
    if "valid" in images:
        found |= {name: sitk.Mask(found[name], found["valid"]) for name in ("adc", "hbv") if name in found}
    return found


def _judge(valid: sitk.Image, report: Facts, place: str) -> None:
    """Whether there is diffusion data where it matters, into the report."""
    coverage = float(sitk.GetArrayViewFromImage(valid).mean())
    report["coverage"] = round(coverage, 4)
    if (gland := _central_coverage(valid)) < MIN_COVERAGE:
        raise StudyError(
            "no_overlap",
            f"Only {gland:.0%} of the gland's region, {GLAND_MM[0]:g} x {GLAND_MM[1]:g} x {GLAND_MM[2]:g} mm about "
            f"{place}, has diffusion data. Do they belong together?",
        )
    if coverage < MIN_COVERAGE:
        report["warnings"].append(f"Only {coverage:.0%} of the grid has diffusion data: its field of view is small.")


def _central_coverage(valid: sitk.Image) -> float:
    """Share of the voxels above 0 in a gland-sized box about an image's centre, at most the whole image."""
    wanted = [max(1, round(mm / spacing)) for mm, spacing in zip(GLAND_MM, valid.GetSpacing(), strict=True)]
    size = [min(one, n) for one, n in zip(wanted, valid.GetSize(), strict=True)]
    first = [(n - one) // 2 for one, n in zip(size, valid.GetSize(), strict=True)]
    return float(sitk.GetArrayFromImage(sitk.RegionOfInterest(valid, size, first)).mean())


def _figures(found: Registration) -> dict[str, Any]:
    numbers = {name: round(getattr(found, name), 4) for name in ("mi_before", "mi_after", "shift_mm", "rotation_deg")}
    return {"accepted": found.accepted, "reason": found.reason} | numbers
