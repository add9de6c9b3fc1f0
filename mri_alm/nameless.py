"""Roles of series whose header has no description: what words usually tell is read from the voxels instead.

Only series on the grid of a diffusion series are looked at, as ADC maps and calculated images always are there. Series
with a description keep what the rules said.
"""

from collections.abc import Callable, Sequence
from functools import cache

import SimpleITK as sitk  # noqa: N813

from mri_alm.content import looks_calculated, looks_like_adc
from mri_alm.errors import StudyError
from mri_alm.series import Series
from mri_alm.volume import build_mean

Build = Callable[[Series, float | None], sitk.Image | None]


def settle_nameless(series: Sequence[Series]) -> None:
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
