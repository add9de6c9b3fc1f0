"""Which series of a study to use: axial T2, one diffusion set, its ADC map and its highest b-value."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cmp_to_key
from typing import Any, TypeVar

import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray

from mri_alm.errors import StudyError
from mri_alm.imaging.diffusion import ADC_UNIT, MIN_SPAN, adc_unit, fit_adc, fitted_adc, shells
from mri_alm.imaging.plausibility import (
    check_adc,
    check_decay,
    check_maps,
    more_typical,
    scanner_map_holds,
)
from mri_alm.imaging.registration import GLAND_MM
from mri_alm.imaging.series import BY_HAND, Frame, Series
from mri_alm.imaging.volume import build_mean, build_volume, check_repeats, check_size, common_slices

T = TypeVar("T")
V = TypeVar("V")
COARSE_MM = 2.5, 5.9  # pixels and slices of a T2 of the whole pelvis; those of the prostate have 0.3 to 0.8 and 3
NOT_WHOLE = "duplicate_slices", "slice_gap", "too_few_slices", "empty_slice"  # codes of a volume that lacks something
_FAT = r"(^|[^a-z])(fs|fatsat|stir|tirm|spair|spir)|fat[ _-]?(sat|sup)"


@dataclass(eq=False)
class DiffusionSet:
    """Diffusion series on one grid and one echo time: acquired, calculated by the scanner, and ADC maps."""

    dwi: list[Series] = field(default_factory=list)
    calculated: list[Series] = field(default_factory=list)
    adc: list[Series] = field(default_factory=list)

    @property
    def first(self) -> Series:
        """The series that stands for the set."""
        return self.every[0]

    @property
    def every(self) -> list[Series]:
        """All series of the set."""
        return [*self.dwi, *self.calculated, *self.adc]

    @property
    def usable(self) -> bool:
        """Whether an ADC map can be had: the scanner's, or fitted."""
        return bool(self.adc) or len({b for series in self.dwi for b in series.b_values}) > 1

    @property
    def rank(self) -> tuple[bool, int, float, float]:
        """How good the set is: an ADC can be had, many acquired b-values, a high b, late."""
        acquired = {b for series in self.dwi for b in series.b_values}
        every = [b for series in self.dwi + self.calculated for b in series.b_values]
        late = max(series.time for series in self.dwi + self.calculated or self.adc)
        return self.usable, len(acquired), max(every, default=0.0), late


@dataclass
class Diffusion:
    """The built volumes of a diffusion set, the series they came from and what is to be said about them."""

    adc: sitk.Image
    hbv: sitk.Image | None
    dwi: dict[float, sitk.Image]
    used: list[Series]
    warnings: list[str]
    info: dict[str, Any]


def series_name(series: Series) -> str:
    """What messages call a series: its number, as names may hold anything."""
    return f"series {series.number}"


def chosen(series: Series) -> dict[str, Any]:
    """JSON-able record of a series: number, role and why, files; not its description, which may hold anything."""
    return {
        "series": series.number,
        "role": series.role,
        "reason": series.reason,
        "files": len({frame.file for frame in series.frames}),
    }


def diffusion_sets(series: Sequence[Series], warnings: list[str]) -> list[DiffusionSet]:
    """Diffusion sets of a study, the best first; each series that fits none leaves a warning.

    Left out are series without any b-value, and ADC maps off every set's grid.

    Raises:
        StudyError: ``no_diffusion``, ``b_unknown`` or ``mosaic`` when there is none.
    """
    sets: list[DiffusionSet] = []
    for role in ("dwi", "calculated"):
        for one in (one for one in series if one.role == role and max(one.b_values, default=0.0) > 0):
            home = next((group for group in sets if group.first.same_place(one)), None)
            if home is None:
                sets.append(home := DiffusionSet())
            getattr(home, role).append(one)
    unknown = _complete(sets, series, warnings)
    if not sets and not unknown:  # some exports hold the ADC map alone
        sets = [DiffusionSet(adc=[one]) for one in series if one.role == "adc"]
    if sets:
        return sorted(sets, key=lambda group: group.rank, reverse=True)
    if unknown:
        raise StudyError(
            "b_unknown",
            f"No b-value above 0 in the headers of {series_name(unknown[0])}, neither in the public element, nor in a "
            "vendor's private one with its creator, nor in the sequence's name. Export with private elements, or give "
            "ADC and high b as files.",
        )
    if any(one.role == "unsupported" for one in series):
        reason = next(one.reason for one in series if one.role == "unsupported")
        raise StudyError(
            "mosaic", f"The only diffusion-like series cannot be used: {reason}. Export one image per slice."
        )
    raise StudyError(
        "no_diffusion",
        "No diffusion series with an image above b = 0, and no ADC map. Export DWI and ADC of this study.",
    )


def _complete(sets: list[DiffusionSet], series: Sequence[Series], warnings: list[str]) -> list[Series]:
    """Give the sets their b = 0, where it is a series of its own, and ADC maps; gives diffusion without a b-value."""
    unknown = []
    for one in series:
        home = next((group for group in sets if group.first.same_place(one)), None)
        if one.b_values == [0.0] and home and one.role in ("dwi", "other", "t2"):
            home.dwi = sorted([*home.dwi, one], key=lambda one: one.number)
        elif one.role in ("dwi", "calculated") and max(one.b_values, default=0.0) <= 0:
            unknown.append(one)
            why = "b = 0 on no other diffusion's grid" if one.b_values else "diffusion, but no image says its b-value"
            warnings.append(f"{series_name(one)} is {why}: left out.")
        elif one.role == "adc" and home:
            home.adc.append(one)
        elif one.role == "adc" and sets:
            warnings.append(f"{series_name(one)} is an ADC map on another grid or echo time: left out.")
        elif one.role == "unsupported":
            warnings.append(f"{series_name(one)} cannot be used ({one.reason}): left out.")
    return unknown


def axial_t2(series: Sequence[Series], sets: Sequence[DiffusionSet]) -> list[Series]:
    """Axial T2 series in the frame of reference of some diffusion set, the best by ``PREFERENCES`` first.

    Raises:
        StudyError: ``no_t2`` or ``frames_differ``.
    """
    named = [one for one in series if one.role == "t2"]
    axial = [one for one in named if one.plane == "axial" and (one.reason == BY_HAND or not _on_diffusion(one, sets))]
    if not axial:
        planes = sorted({one.plane for one in named if one.plane != "axial"})
        found = f"only {' and '.join(planes)} ones" if planes else "none"
        found += (
            "; what is called T2 lies on diffusion's grid" if any(_on_diffusion(one, sets) for one in named) else ""
        )
        useless = [f"; {series_name(one)} cannot be used ({one.reason})" for one in series if one.role == "unsupported"]
        found += "".join(useless[:3])
        raise StudyError("no_t2", f"An axial T2 series is needed, found {found}. Export it with this study.")
    frames = {group.first.frame_of_reference for group in sets}
    fitting = [one for one in axial if one.frame_of_reference in frames]
    if not fitting:
        raise StudyError(
            "frames_differ",
            "T2 and diffusion have different frames of reference, so their positions cannot be compared (the patient "
            "was moved or the exams differ). Export both from one session. If de-identification gave each series a "
            'frame of its own, say "trust_positions": true in the rules file.',
        )

    def order(one: Series, other: Series) -> int:
        return _compare(one, other, sets)[0]

    return sorted(fitting, key=cmp_to_key(order))


def _on_diffusion(one: Series, sets: Sequence[DiffusionSet]) -> bool:
    """Whether what is called T2 is an image of the diffusion scan: on its grid, of its echo time or made from it."""
    echo, derived = one.frames[0].echo_time, one.secondary or "trace" in one.description.lower()
    return any(
        first.same_grid(one) and (derived or (echo is not None and echo == first.frames[0].echo_time))
        for first in (group.first for group in sets)
    )


def _covered(t2: Series, sets: Sequence[DiffusionSet]) -> float:
    """Share of a gland-sized box about diffusion's centre that lies within the T2's slices."""
    dwi = sets[0].first
    steps = [np.linspace(-mm / 2, mm / 2, 9) for mm in GLAND_MM]
    points = _centre(dwi) + np.array(np.meshgrid(*steps)).reshape(3, -1).T
    points = points[_within(points, dwi)]
    return float(_within(points, t2).mean()) if len(points) else 0.0


def _within(points: NDArray[np.float64], series: Series) -> NDArray[np.bool_]:
    """Which points (N, 3) lie in the slices of a series."""
    frame, away, slices = series.frames[0], points - _centre(series), len(series.positions)
    down, right = np.array(frame.shape) / 2 * frame.spacing
    deep = np.ptp(series.positions) / 2 * slices / max(slices - 1, 1)
    offsets = np.abs(np.stack([away @ frame.orientation[:3], away @ frame.orientation[3:], away @ frame.normal]))
    return np.asarray((offsets <= np.array([[right], [down], [deep]])).all(axis=0))


def _centre(series: Series) -> NDArray[np.float64]:
    frame, at = series.frames[0], np.array([one.position for one in series.frames])
    rows, columns = frame.shape
    corner = (at[np.argmin(at @ frame.normal)] + at[np.argmax(at @ frame.normal)]) / 2
    right, down = frame.orientation[:3] * frame.spacing[1], frame.orientation[3:] * frame.spacing[0]
    return np.asarray(corner + right * (columns - 1) / 2 + down * (rows - 1) / 2)


# Of several axial T2 the first difference decides: what it is called, its value (more is better), what counts as equal.
PREFERENCES: tuple[tuple[str, Callable[[Series, Sequence[DiffusionSet]], float], float], ...] = (
    ("no reformation", lambda one, _: not one.secondary, 0.0),
    ("no fat suppression", lambda one, _: not re.search(_FAT, one.description, re.IGNORECASE), 0.0),
    ("covers the diffusion", _covered, 0.1),
    ("finer pixels", lambda one, _: -math.log(one.frames[0].spacing[0]), math.log(1.2)),
    ("more slices", lambda one, _: math.log(len(one.positions)), math.log(1.1)),
    ("corrected for distortion", lambda one, _: bool(one.image_type & {"DIS2D", "DIS3D"}), 0.0),
    ("corrected for the coil", lambda one, _: "NORM" in one.image_type, 0.0),
    ("later", lambda one, _: one.time, 0.5),
)


def _compare(one: Series, other: Series, sets: Sequence[DiffusionSet]) -> tuple[int, str]:
    """-1 if the first of two T2 is the better one, 1 if the second is, 0 if nothing tells; and what decided."""
    for reason, value, equal in PREFERENCES:
        more = float(value(one, sets)) - float(value(other, sets))
        if abs(more) > equal:
            return (-1 if more > 0 else 1), reason
    return 0, ""


def choose_t2(series: Sequence[Series], sets: Sequence[DiffusionSet], warnings: list[str]) -> tuple[Series, sitk.Image]:
    """The T2 series to use and its volume; several leave a warning with what decided.

    Raises:
        StudyError: As :func:`axial_t2` and :func:`mri_alm.imaging.volume.build_volume`; ``several_t2`` when two are
            equally good and hold different images.
    """
    planes = axial_t2(series, sets)
    best, volume = first_usable(planes, _t2_volume, series_name, warnings)
    pixel, gap = volume.GetSpacing()[0], volume.GetSpacing()[2]
    if pixel > COARSE_MM[0] or gap > COARSE_MM[1]:
        warnings.append(
            f"{series_name(best)} is coarse for a T2 of the prostate: {pixel:.1f} mm pixels, {gap:.1f} mm slices."
        )
    if best.secondary:
        warnings.append(f"{series_name(best)} is a reformation (secondary images), and no original axial T2 was found.")
    left = planes[planes.index(best) + 1 :]
    for one in left:
        if _compare(best, one, sets)[0] == 0 and not _equal(volume, _t2_volume(one)):
            raise StudyError(
                "several_t2",
                f"{series_name(best)} and {series_name(one)} are equally good axial T2 (pixels, slices, field, time). "
                "Name the right one for this study under studies in the rules file.",
            )
    if left:
        reason = _compare(best, left[0], sets)[1] or "equal images"
        numbers = ", ".join(str(one.number) for one in left)
        warnings.append(f"Several axial T2: took {series_name(best)} ({reason}), left {numbers}.")
    return best, volume


def _t2_volume(one: Series) -> sitk.Image:
    check_size([one])
    return build_volume(one.frames, series_name(one))


def refuse_equal_sets(group: DiffusionSet, sets: Sequence[DiffusionSet], built: Diffusion) -> None:
    """Refuse diffusion protocols between which nothing decides, unless they hold the same images.

    Raises:
        StudyError: ``several_diffusion``.
    """
    for other in sets:
        if other is group or other.rank != group.rank:
            continue
        check_size([*group.every, *other.every])
        same = build_diffusion(other)
        if not _equal(built.hbv or built.adc, same.hbv or same.adc):
            raise StudyError(
                "several_diffusion",
                f"{series_name(group.first)} and {series_name(other.first)} are equally good diffusion sets. "
                "Name the right series for this study under studies in the rules file.",
            )


def _equal(one: sitk.Image, other: sitk.Image) -> bool:
    return one.GetSize() == other.GetSize() and np.array_equal(*map(sitk.GetArrayViewFromImage, (one, other)))


def first_usable(
    candidates: Sequence[T], build: Callable[[T], V], name: Callable[[T], str], warnings: list[str]
) -> tuple[T, V]:
    """The first candidate that can be built, and what was built; each one passed over leaves a warning.

    Raises:
        StudyError: The first refusal, when every candidate is refused.
    """
    refusals = []
    for candidate in candidates:
        try:
            return candidate, build(candidate)
        except StudyError as error:
            refusals.append(error)
            warnings.append(f"{name(candidate)} left out: {error.message}")
    raise refusals[0]


def build_diffusion(group: DiffusionSet, *, beside: Sequence[Series] = ()) -> Diffusion:
    """Volumes of a set: every acquired b, the ADC (the scanner's, else fitted) and the highest b.

    A b-value with duplicate slices is left out where nothing needs it.

    Args:
        group: The set.
        beside: What is in memory with it.

    Raises:
        StudyError: As :func:`mri_alm.imaging.volume.build_volume`, ``too_large``, ``adc_units`` or ``adc_unfit``.
    """
    check_size([*beside, *group.every])
    warnings: list[str] = []
    ways = {one.slices_rise for one in group.every} - {None}
    if len(ways) > 1:
        raise StudyError(
            "geometry",
            f"In {series_name(group.first)} and its like, slice locations rise with the positions in one series and "
            "fall in another: the slices of one are in reverse order. Export them again.",
        )
    if group.first in group.adc:
        adc, adc_series, info = _adc(group, {}, None, warnings)
        return Diffusion(adc, None, {}, adc_series, warnings, info | {"b_values": [], "dwi": [], "hbv": None})
    acquired = _by_b(group.dwi, warnings)
    calculated = {b: found for b, found in _by_b(group.calculated, warnings).items() if b not in acquired}
    high = max(acquired | calculated)
    dwi = {}
    for b, found in sorted(acquired.items()):
        try:
            dwi[b] = _volume(found, b, warnings)
        except StudyError as error:
            if error.code not in NOT_WHOLE or b == high or not group.adc:
                raise
            warnings.append(f"b = {b:g} left out, as the ADC map and b = {high:g} do without: {error.message}")
    acquired = {b: acquired[b] for b in dwi}
    hbv = dwi[high] if high in dwi else _blanked(calculated[high], high)
    cut, note = common_slices({f"b = {b:g}": image for b, image in dwi.items()} | {f"b = {high:g}": hbv})
    dwi, hbv = {b: cut[f"b = {b:g}"] for b in dwi}, cut[f"b = {high:g}"]
    check_decay(dwi, f"{series_name(group.first)} and its like", warnings)
    adc, adc_series, info = _adc(group, dwi, hbv, warnings)
    cut, further = common_slices({"the ADC map": adc, f"b = {high:g}": hbv})
    adc, hbv = cut["the ADC map"], cut[f"b = {high:g}"]
    warnings += filter(None, (note, further))
    high_from = (acquired | calculated)[high]
    info |= {
        "b_values": sorted(acquired),
        "directions": {f"{b:g}": len({one.direction for one in found.frames}) for b, found in sorted(acquired.items())},
        "dwi": [chosen(one) for one in group.dwi],
        "hbv": chosen(high_from.series[0])
        | {"b": high, "source": "acquired" if high in acquired else "calculated by the scanner"},
    }
    sources = [one for found in (*acquired.values(), high_from) for one in found.series]
    return Diffusion(adc, hbv, dwi, list(dict.fromkeys([*sources, *adc_series])), warnings, info)


@dataclass(frozen=True)
class _Source:
    """Where one b-value is taken from: a series, or several that hold one direction each."""

    series: list[Series]
    frames: list[Frame]


def _volume(found: _Source, b: float, warnings: list[str]) -> sitk.Image:
    return build_mean(found.frames, f"{' and '.join(map(series_name, found.series))} at b = {b:g}", warnings)


def _blanked(found: _Source, b: float) -> sitk.Image:
    return build_volume(found.frames, f"{series_name(found.series[0])} at b = {b:g}", blanked=True)


def _by_b(series: Sequence[Series], warnings: list[str]) -> dict[float, _Source]:
    """b-value -> where it is taken from; of several series the latest, originals before what was made of them."""
    meant = shells(b for one in series for b in one.b_values)
    every: dict[float, list[_Source]] = defaultdict(list)
    for one in sorted(series, key=lambda one: (not one.secondary, one.time, one.number)):
        for b in sorted({meant[b] for b in one.b_values}):
            every[b].append(
                _Source([one], [frame for own in one.b_values if meant[own] == b for frame in one.at_b(own)])
            )
    return {b: _one_of(several, b, warnings) for b, several in every.items()}


def _one_of(several: list[_Source], b: float, warnings: list[str]) -> _Source:
    """Of the series that hold one b-value the last; all together where each holds directions of its own.

    Raises:
        StudyError: ``volumes_differ`` when they hold different kinds of images and nothing tells which is right.
    """
    directions = [{frame.direction for frame in one.frames} for one in several]
    if (
        len(several) > 1
        and None not in set().union(*directions)
        and sum(map(len, directions)) == len(set().union(*directions))
    ):
        return _Source([one.series[0] for one in several], [frame for one in several for frame in one.frames])
    *others, last = several
    for one in others:
        a, z = one.series[0], last.series[0]
        if a.secondary == z.secondary:
            try:
                both = {series_name(a): _volume(one, b, []), series_name(z) + " ": _volume(last, b, [])}
                pair, _ = common_slices(both)
            except StudyError:
                continue  # refused with its reason if it is used, and what it says of itself is said there
            check_repeats(list(pair.values()), f"b = {b:g} in {series_name(a)} and {series_name(z)}", warnings)
        why = "the original" if a.secondary != z.secondary else "the later one"
        warnings.append(f"b = {b:g} is in {series_name(a)} and {series_name(z)}: took {why}.")
    return last


def _adc(
    group: DiffusionSet, dwi: dict[float, sitk.Image], hbv: sitk.Image | None, warnings: list[str]
) -> tuple[sitk.Image, list[Series], dict[str, Any]]:
    """ADC in 1e-6 mm2/s, the series it came from (none when fitted) and its record.

    The scanner's map is compared with the fit wherever both can be had; a map that contradicts it is not used unless
    the fit is the less likely of the two.
    """
    span = max(dwi) - min(dwi) if dwi else 0.0
    fit = fit_adc(dwi) if len(dwi) > 1 and (span >= MIN_SPAN / 2 or not group.adc) else None
    refused: StudyError | None = None
    doubtful: list[tuple[sitk.Image, Series, str]] = []
    for one in _adc_candidates(group):
        try:
            stored = build_volume(one.frames, series_name(one))
            unit, factor = adc_unit(stored)
            adc = stored * factor
            problem = "" if fit is None else _contradiction(adc, series_name(one), fit, dwi[min(dwi)])
        except StudyError as error:
            refused = refused or error
            warnings.append(f"{series_name(one)} left out as ADC map: {error.message}")
            continue
        if not problem:
            check_adc(adc, f"The ADC map {series_name(one)}", warnings)
            if hbv is not None:
                check_maps(adc, hbv)
            if len(group.adc) > 1:
                warnings.append(f"{len(group.adc)} ADC maps fit: took {series_name(one)}.")
            return adc, [one], {"adc": chosen(one), "adc_source": "scanner", "adc_units": unit}
        doubtful.append((adc, one, problem))
    if fit is None:
        raise refused or StudyError("adc_unfit", f"An ADC map needs two b-values, found {len(dwi)}. Add the scanner's.")
    fitted, source = fitted_adc(dwi, warnings)
    for adc, one, problem in doubtful:
        if span < MIN_SPAN or more_typical(adc, fitted):
            warnings.append(
                f"{series_name(one)} contradicts its own images ({problem}); the map is used, as the fit is the less "
                "likely one: check b-values and scales."
            )
            return adc, [one], {"adc": chosen(one), "adc_source": "scanner", "adc_units": ADC_UNIT}
        warnings.append(f"{series_name(one)} contradicts its own images ({problem}): the ADC is fitted instead.")
    check_adc(fitted, f"The ADC {source}", warnings)
    return fitted, [], {"adc": None, "adc_source": source, "adc_units": ADC_UNIT}


def _contradiction(adc: sitk.Image, name: str, fit: sitk.Image, low: sitk.Image) -> str:
    cut, _ = common_slices({name: adc, "the fit": fit, "the lowest b": low})
    return scanner_map_holds(cut[name], cut["the fit"], cut["the lowest b"])


def _adc_candidates(group: DiffusionSet) -> list[Series]:
    """The scanner's ADC maps of a set, originals first, then those nearest in time to its images."""
    times = [one.time for one in group.dwi + group.calculated or group.adc]
    return sorted(group.adc, key=lambda one: (one.secondary, min(abs(one.time - time) for time in times), one.number))
