"""What voxels tell that headers cannot: whether an exam's numbers can be true, and what kind of map an image is.

Headers lose a scale or carry another image's b-value, and nothing in the file shows it; the voxels of a pelvis do: ADC
lies within tissue's range, the scanner's map fits its images, repeats are alike. Words and column names can be wrong or
absent, too. The two maps of an exam differ in their noise: a signal varies more where it is larger, while an ADC map, a
ratio of signals, varies most where the signal is small and its own value means little. The rank correlation between
local mean and local spread tells that without any unit, scale or b-value, and without knowing where the bladder is.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from scipy.ndimage import binary_fill_holes, label, minimum_filter, uniform_filter
from scipy.stats import spearmanr

from mri_alm.errors import StudyError
from mri_alm.imaging.diffusion import (
    MAX_CUT_OFF,
    MIN_TISSUE,
    TISSUE,
    adc_unit,
    central_field,
    fit_adc,
    rank_correlation,
)
from mri_alm.imaging.series import Series
from mri_alm.imaging.volume import build_mean, check_size

# Tissue median in 1e-6 mm2/s: 1,250 to 1,390 on three ProstateX exams, 1,340 to 1,470 on phantoms. Outside POSSIBLE
# no pelvis lies, whatever the scanner; outside USUAL something should be looked at; TYPICAL tells which of two is off.
POSSIBLE = 300.0, 4000.0
USUAL = 600.0, 2300.0
TYPICAL = 1300.0
IMPOSSIBLE = 10000.0  # three times what water at 37 degrees has
# The scanner's map over the fitted one: 0.96 to 0.98 on the three exams (rank correlation 0.995 and more); 0.63 and
# 0.80 where a b of 1,400 counts in the map only. A lost scale and other images are further off.
MAP_OVER_FIT = 0.6, 1.6
MAP_LIKE_FIT = 0.7
FASTEST = 3.5e-3  # mm2/s; water at 37 degrees has 3.0e-3
RISE = 1.05  # signal at a b-value over that at a lower one; 0.46 to 0.80 on the exams
# Rank correlation of two b with the slices of one in reverse order, and its gain: -0.2 to 0.2 on the exams, as they
# are 0.31 to 0.95. Smooth images may be alike both ways by chance.
TURNED = 0.75, 0.3
HOLE_ML = 1.0  # acquired images of the exams have at most 0.04; maps and calculated ones are blanked by 88
BEND = 0.3  # of a b's log signal from the straight line; kurtosis bends b = 100, 500, 1400 by 0.15

KIND_FIELD_MM = 120.0  # about the centre; further out there is air, and the fat of the body wall
WINDOW_MM = 6.0
MIN_VOXELS = 5000  # a correlation over fewer is too uncertain; exams have 20,000 and more
# Growth of the high-b image minus growth of the ADC map, see docs/ingest.md: 0.05 and more in 1,200 pairs of 100
# phantoms, 0.20 and more in 36 of three ProstateX exams. Exchanged, a pair has the negative value.
SWAPPED = -0.1
# ADC maps had a growth of -0.25 to 0.32, signals at b = 400 and above 0.47 to 0.77 (200 phantoms, three exams).
ADC_GROWTH = 0.4
# Median deviation from the decay fitted to the acquired b-values: calculated 0.03 to 0.06, acquired 0.10 and more.
CALCULATED = 0.08


def tissue_of(low: sitk.Image) -> NDArray[np.bool_]:
    """Where the central field of the image at the lowest b is no air."""
    field = central_field(low)
    return field > TISSUE * np.percentile(field, 99)


def check_adc(adc: sitk.Image, name: str, warnings: list[str]) -> None:
    """Refuse an ADC map in 1e-6 mm2/s that no pelvis has, and warn of an unusual one.

    Raises:
        StudyError: ``adc_implausible``.
    """
    field = central_field(adc)
    median = float(np.median(field[field > 0])) if (field > 0).any() else 0.0
    text = f"{name} has a median of {median:.0f}e-6 mm2/s in the middle of the image"
    if not POSSIBLE[0] <= median <= POSSIBLE[1]:
        raise StudyError(
            "adc_implausible", f"{text}; tissue has 300 to 4000. Check the b-values and scales in the headers."
        )
    if (beyond := float((field[field > 0] > IMPOSSIBLE).mean())) > 0.002:
        warnings.append(
            f"{name}: {beyond:.1%} of the voxels in the middle are above {IMPOSSIBLE:g}e-6 mm2/s, which no fluid has: "
            "numbers may have lost their sign or their scale."
        )
    if not USUAL[0] <= median <= USUAL[1]:
        warnings.append(f"{text}; tissue usually has {USUAL[0]:g} to {USUAL[1]:g}. Check its scale and the b-values.")


def check_decay(dwi: Mapping[float, sitk.Image], name: str, warnings: list[str]) -> None:
    """Refuse images whose signal does not fall as b rises: b-values or images were exchanged, or a scale was lost.

    Args:
        dwi: b in s/mm2 -> image on one grid.
        name: What messages call the images.
        warnings: Gets a sentence where one b-value lies off the line of the others.

    Raises:
        StudyError: ``b_implausible``.
    """
    b = sorted(dwi)
    for value in b:
        if (hole := largest_hole_ml(dwi[value])) > HOLE_ML:
            warnings.append(
                f"{name}: {hole:.0f} ml of the image at b = {value:g} are exactly 0 amid signal. Nothing was measured "
                "there, or it was masked: high b and a fitted ADC say nothing there."
            )
    tissue = tissue_of(dwi[b[0]]) if b else np.zeros(0, bool)
    if len(b) < 2 or tissue.sum() < MIN_TISSUE:
        return
    logs = np.log(np.maximum(np.stack([central_field(dwi[value])[tissue] for value in b]), 1e-6))
    for n, (low, high) in enumerate(pairwise(b)):
        ratio = float(np.exp(np.median(logs[n + 1] - logs[n])))
        if high - low >= 50 and not np.exp(-FASTEST * (high - low)) * 0.9 < ratio < RISE:
            raise StudyError(
                "b_implausible",
                f"{name}: the signal at b = {high:g} is {ratio:.2f} times that at b = {low:g}. Diffusion lowers it, "
                "but not more than in water. b-values or images were exchanged, or a scale was lost. Export again.",
            )
        one, other = central_field(dwi[low]), central_field(dwi[high])
        straight, turned = (rank_correlation(one[tissue], way[tissue]) for way in (other, other[::-1]))
        if turned > TURNED[0] and turned - straight > TURNED[1]:
            raise StudyError(
                "geometry",
                f"{name}: b = {high:g} fits b = {low:g} better with its slices in reverse order (rank correlation "
                f"{turned:.2f}; as it is {straight:.2f}). Positions of one are wrong; export the series again.",
            )
    if len(b) > 2:
        design = np.stack([np.ones(len(b)), -np.array(b)], axis=1)
        rest = np.median(logs - design @ np.linalg.lstsq(design, logs, rcond=None)[0], axis=1)
        if abs(rest[worst := int(np.argmax(np.abs(rest)))]) > BEND:
            warnings.append(
                f"{name}: b = {b[worst]:g} lies {np.exp(rest[worst]):.2f} times off the decay of the other b-values: "
                "its b-value or its scale may be wrong."
            )


def largest_hole_ml(image: sitk.Image) -> float:
    """Volume of the largest region of zeros that other values enclose in its slices."""
    some = sitk.GetArrayViewFromImage(image) != 0
    regions, count = label(np.stack([binary_fill_holes(one) & ~one for one in some]))
    return float(np.bincount(regions.ravel())[1:].max() * np.prod(image.GetSpacing()) / 1000) if count else 0.0


def scanner_map_holds(adc: sitk.Image, fit: sitk.Image, low: sitk.Image) -> str:
    """Why a scanner's ADC map and the fit to its images contradict one another; empty where they agree.

    Args:
        adc: The scanner's, in 1e-6 mm2/s.
        fit: The fitted one, on the same grid.
        low: The image at the lowest b.
    """
    mine, fitted = central_field(adc), central_field(fit)
    both = tissue_of(low) & (mine > 0) & (fitted > 0)
    if both.sum() < MIN_TISSUE:
        return ""
    ratio = float(np.median(mine[both] / fitted[both]))
    alike = rank_correlation(mine[both], fitted[both])
    if MAP_OVER_FIT[0] <= ratio <= MAP_OVER_FIT[1] and alike >= MAP_LIKE_FIT:
        return ""
    return f"median {ratio:.2g} times the fitted one's, rank correlation {alike:.2f}"


def more_typical(one: sitk.Image, other: sitk.Image) -> bool:
    """Whether the first of two ADC maps in 1e-6 mm2/s is nearer to what tissue has."""
    first, second = (np.median(field[field > 0]) for field in map(central_field, (one, other)))
    return bool(abs(np.log(first / TYPICAL)) < abs(np.log(second / TYPICAL)))


def warn_if_cut_off(voxels: NDArray[np.float32], name: str, warnings: list[str]) -> None:
    """Warn where much of the middle of a volume has its highest value.

    Args:
        voxels: One volume, or several of a 4D image.
        name: The manifest's column.
        warnings: Gets the sentences.
    """
    for volume in voxels if voxels.ndim == 4 else (voxels,):
        middle = volume[tuple(slice(n // 4, n - n // 4) for n in volume.shape)]
        highest = middle.max(where=np.isfinite(middle), initial=-np.inf)
        if MAX_CUT_OFF < (share := float(np.mean(middle == highest))) < 1:
            warnings.append(
                f"Column {name}: {share:.0%} of the voxels in the middle of the image have its highest value, "
                f"{highest:g}: what was brighter is cut off."
            )


def spread_growth(image: sitk.Image) -> float:
    """Rank correlation between local mean and local spread in the central field; NaN where too few voxels tell.

    Args:
        image: 3D map, any unit; voxels next to zeros are left out, as maps are often masked.
    """
    volume = _field(image)
    x, y, _ = image.GetSpacing()
    window = (1, max(3, round(WINDOW_MM / y)), max(3, round(WINDOW_MM / x)))
    mean = uniform_filter(volume, window)
    spread = np.sqrt(np.maximum(uniform_filter(volume**2, window) - mean**2, 0.0))
    inside = minimum_filter(volume, window) > 0
    if inside.sum() < MIN_VOXELS or np.ptp(mean[inside]) == 0 or np.ptp(spread[inside]) == 0:
        return float("nan")
    return float(spearmanr(mean[inside], spread[inside]).statistic)


def check_maps(adc: sitk.Image, hbv: sitk.Image) -> None:
    """Refuse an ADC map and a high-b image that stand in each other's place.

    Args:
        adc: What is said to be the ADC map, any unit.
        hbv: What is said to be the high-b image, any scale.

    Raises:
        StudyError: ``maps_swapped``; ``maps_equal`` if both are the same image.
    """
    if adc.GetSize() == hbv.GetSize() and np.array_equal(*map(sitk.GetArrayViewFromImage, (adc, hbv))):
        raise StudyError("maps_equal", "ADC and high-b hold the same voxels. Give the path of each map in its column.")
    growth = spread_growth(adc), spread_growth(hbv)
    if growth[1] - growth[0] < SWAPPED:
        raise StudyError(
            "maps_swapped",
            "ADC and high-b seem to be in each other's place: the image given as ADC varies most where it is bright "
            f"(rank correlation {growth[0]:.2f}), as a signal does, and the one given as high-b where it is dark "
            f"({growth[1]:.2f}), as an ADC map does. Exchange the two.",
        )


def looks_like_adc(image: sitk.Image, dwi: dict[float, sitk.Image]) -> bool:
    """Whether an image without a name is an ADC map.

    Args:
        image: The unknown one.
        dwi: Acquired images by b on the same grid; with two or more, the map must agree with the ADC fitted to them
            (rank correlation above 0.8), which no fractional anisotropy does.
    """
    try:
        adc_unit(image)
    except StudyError:
        return False
    if not spread_growth(image) < ADC_GROWTH:
        return False
    if len(dwi) < 2:
        return True
    mine, fitted = _field(image), _field(fit_adc(dwi))
    inside = (mine > 0) & (fitted > 0)
    return bool(inside.any() and spearmanr(mine[inside], fitted[inside]).statistic > 0.8)


def looks_calculated(image: sitk.Image, b: float, dwi: dict[float, sitk.Image]) -> bool:
    """Whether an image shows what the decay fitted to other b-values predicts: then it has no noise of its own.

    Args:
        image: Image at ``b``, at least one of whose voxels is positive.
        b: Its b-value in s/mm2.
        dwi: Acquired images by b on the same grid, two or more.
    """
    values = np.array(sorted(dwi))
    logs = np.log(np.maximum(np.stack([_field(dwi[value]) for value in values]), 0.5))
    slope = np.minimum(np.tensordot((values - values.mean()) / np.sum((values - values.mean()) ** 2), logs, axes=1), 0)
    predicted = np.exp(logs.mean(axis=0) + (b - values.mean()) * slope)
    found, lowest = _field(image), logs[0]
    tissue = (found > 0) & (lowest > np.percentile(lowest, 40))
    ratio = found[tissue] / predicted[tissue]
    return bool(tissue.any() and np.median(np.abs(ratio / np.median(ratio) - 1)) < CALCULATED)


def _field(image: sitk.Image) -> NDArray[np.float64]:
    """Central part in plane (slices, rows, columns), not finite voxels as zeros."""
    volume = sitk.GetArrayFromImage(image).astype(np.float64)
    rows, columns = (
        slice(max(n // 2 - half, 0), n // 2 + half)
        for n, half in zip(
            volume.shape[1:], (round(KIND_FIELD_MM / 2 / mm) for mm in image.GetSpacing()[1::-1]), strict=True
        )
    )
    return np.nan_to_num(volume[:, rows, columns], posinf=0.0, neginf=0.0)


Build = Callable[[Series, float | None], sitk.Image | None]


def infer_roles_from_voxels(series: Sequence[Series]) -> None:
    """Find the ADC maps and the calculated images among the series of one study that have no description.

    Changes role and reason of a series where its content says so: to ``adc``, to ``calculated``, or to ``other`` for
    one that passed as T2 by its echo time but lies on diffusion's grid.

    Raises:
        StudyError: ``too_large``.
    """
    build = cache(_build)  # every volume is read once, whoever asks
    unknown = [
        one
        for one in series
        if one.nameless and one.role in ("dwi", "t2", "other") and len(one.frames) == len(one.positions)
    ]
    pairs = [(one, other) for one in unknown for other in series if _beside(other, one)]
    read = {one for pair in pairs for one in pair} | {one for one in unknown if one.role == "dwi"}
    check_size([one for one in series if one in read])
    for one in unknown:
        mapped = any(other.role == "adc" and "ADC" in other.image_type and other.same_place(one) for other in series)
        _settle(one, [other for other in series if _beside(other, one)], build, mapped=mapped)


def _beside(other: Series, one: Series) -> bool:
    return other is not one and other.role == "dwi" and other.same_place(one)


def _settle(one: Series, neighbours: list[Series], build: Build, *, mapped: bool) -> None:
    """Role by content; ``mapped``: the scanner's own ADC map is there, so this is none."""
    if not neighbours and one.role != "dwi":
        return
    b = one.b_values[0] if one.b_values else None
    image = build(one, b)
    if image is None:
        return
    dwi: dict[float, sitk.Image] = {}
    for other in sorted(neighbours, key=lambda other: len(other.b_values)):  # the series of several b-values last
        dwi |= {value: found for value in other.b_values if (found := build(other, value)) is not None}
    if not mapped and looks_like_adc(image, dwi):
        one.role, one.reason = "adc", "no name; its values and noise are those of an ADC map on diffusion's grid"
    elif one.role == "t2":
        one.role, one.reason = "other", "no name; on diffusion's grid, where T2 never is"
    elif one.role == "dwi" and b and _computable(b, neighbours) and looks_calculated(image, b, dwi):
        one.role, one.reason = "calculated", "no name; it shows what the decay fitted to the acquired b-values predicts"


def _computable(b: float, neighbours: list[Series]) -> bool:
    """Whether a series of several b-values, all below this one, is there to calculate it from."""
    return any(len(other.b_values) > 1 and other.b_values[-1] < b for other in neighbours)


def _build(one: Series, b: float | None) -> sitk.Image | None:
    """A volume, or None for one that cannot be built: it is refused later, with its reason, if it is to be used."""
    try:
        return build_mean(one.frames if b is None else one.at_b(b), "", [])
    except StudyError:
        return None
