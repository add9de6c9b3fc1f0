"""Roles of series whose header has no description: what words usually tell is read from the voxels instead.

Only series on the grid of a diffusion series are looked at, as ADC maps and calculated images always are there. Series
with a description keep what the rules said.
"""

import SimpleITK as sitk  # noqa: N813

from mri_alm.content import looks_calculated, looks_like_adc
from mri_alm.errors import StudyError
from mri_alm.series import Series
from mri_alm.volume import build_mean, build_volume


def settle_nameless(series: list[Series]) -> None:
    """Find the ADC maps and the calculated images among the series of one study that have no description.

    Changes role and reason of a series where its content says so: to ``adc``, to ``calculated``, or to ``other`` for
    one that passed as T2 by its echo time but lies on diffusion's grid.
    """
    diffusion = [one for one in series if one.role == "dwi"]
    for one in series:
        if one.nameless and one.role in ("dwi", "t2", "other") and len(one.b_values) < 2:
            _settle(one, [other for other in diffusion if other is not one and other.same_place(one)])


def _settle(one: Series, neighbours: list[Series]) -> None:
    neighbours = [other for other in neighbours if other.role == "dwi"]
    image = _volume(one)
    if image is None or not (neighbours or one.role == "dwi"):
        return
    dwi = _acquired(neighbours)
    if looks_like_adc(image, dwi):
        one.role, one.reason = "adc", "no name; its values and noise are those of an ADC map on diffusion's grid"
    elif one.role == "t2":
        one.role, one.reason = "other", "no name; on diffusion's grid, where T2 never is"
    elif (
        one.role == "dwi"
        and one.b_values
        and _computable(one, neighbours)
        and looks_calculated(image, one.b_values[0], dwi)
    ):
        one.role, one.reason = "calculated", "no name; it shows what the decay fitted to the acquired b-values predicts"


def _computable(one: Series, neighbours: list[Series]) -> bool:
    """Whether a series of several b-values, all below this one's, is there to calculate it from."""
    return any(len(other.b_values) > 1 and other.b_values[-1] < one.b_values[0] for other in neighbours)


def _volume(one: Series) -> sitk.Image | None:
    """The volume of a series that holds one, or None; a series that cannot be built is refused later, if it is used."""
    if len(one.frames) != len(one.positions):
        return None
    try:
        return build_volume(one.frames, "")
    except StudyError:
        return None


def _acquired(neighbours: list[Series]) -> dict[float, sitk.Image]:
    dwi = {}
    for other in sorted(neighbours, key=lambda other: len(other.b_values)):  # the series of several b-values last
        for b in other.b_values:
            try:
                dwi[b] = build_mean(other.at_b(b), "")
            except StudyError:
                continue
    return dwi
