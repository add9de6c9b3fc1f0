"""What kind of map an image is, by its voxels alone: ADC or high-b signal, acquired or calculated.

Header words and column names can be wrong or absent. The two maps of an exam differ in their noise: a signal varies
more where it is larger, while an ADC map, a ratio of signals, varies most where the signal is small and its own value
means little. The rank correlation between local mean and local spread tells that without any unit, scale or b-value,
and without knowing where the bladder is. Series without a description get their role from it, where they lie on the
grid of a diffusion series, as ADC maps and calculated images always do.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from scipy.ndimage import minimum_filter, uniform_filter
from scipy.stats import spearmanr

from mri_alm.errors import StudyError
from mri_alm.imaging.diffusion import adc_unit, fit_adc
from mri_alm.imaging.series import Series
from mri_alm.imaging.volume import build_mean

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
    """
    build = cache(_build)  # every volume is read once, whoever asks
    for one in series:
        if one.nameless and one.role in ("dwi", "t2", "other") and len(one.frames) == len(one.positions):
            _settle(one, [other for other in series if _beside(other, one)], build)


def _beside(other: Series, one: Series) -> bool:
    return other is not one and other.role == "dwi" and other.same_place(one)


def _settle(one: Series, neighbours: list[Series], build: Build) -> None:
    if not neighbours and one.role != "dwi":
        return
    b = one.b_values[0] if one.b_values else None
    image = build(one, b)
    if image is None:
        return
    dwi: dict[float, sitk.Image] = {}
    for other in sorted(neighbours, key=lambda other: len(other.b_values)):  # the series of several b-values last
        dwi |= {value: found for value in other.b_values if (found := build(other, value)) is not None}
    if looks_like_adc(image, dwi):
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
        return build_mean(one.frames if b is None else one.at_b(b), "")
    except StudyError:
        return None
