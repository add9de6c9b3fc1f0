"""Which series of a study to use: axial T2, one diffusion set, its ADC map and its highest b-value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import SimpleITK as sitk  # noqa: N813

from mri_alm.errors import StudyError
from mri_alm.imaging.diffusion import ADC_UNIT, adc_unit, fitted_adc
from mri_alm.imaging.series import Series
from mri_alm.imaging.volume import build_mean, build_volume

T = TypeVar("T")
V = TypeVar("V")


@dataclass(eq=False)
class DiffusionSet:
    """Diffusion series on one grid and one echo time: acquired, calculated by the scanner, and ADC maps."""

    dwi: list[Series] = field(default_factory=list)
    calculated: list[Series] = field(default_factory=list)
    adc: list[Series] = field(default_factory=list)

    @property
    def first(self) -> Series:
        """The series that stands for the set."""
        return (self.dwi or self.calculated)[0]

    @property
    def usable(self) -> bool:
        """Whether an ADC map can be had: the scanner's, or fitted."""
        return bool(self.adc) or len({b for series in self.dwi for b in series.b_values}) > 1

    @property
    def rank(self) -> tuple[bool, int, float, float]:
        """How good the set is: an ADC can be had, many acquired b-values, a high b, late."""
        acquired = {b for series in self.dwi for b in series.b_values}
        every = [b for series in self.dwi + self.calculated for b in series.b_values]
        late = max(series.time for series in self.dwi + self.calculated)
        return self.usable, len(acquired), max(every), late


@dataclass
class Diffusion:
    """The built volumes of a diffusion set, the series they came from and what is to be said about them."""

    adc: sitk.Image
    hbv: sitk.Image
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
    unknown = []
    for role in ("dwi", "calculated", "adc"):
        for one in (one for one in series if one.role == role):
            if role != "adc" and max(one.b_values, default=0.0) <= 0 and not _completes(one, sets):
                unknown.append(one)
                warnings.append(f"{series_name(one)} is diffusion, but no image says its b-value: left out.")
                continue
            home = next((group for group in sets if group.first.same_place(one)), None)
            if home is None and role != "adc":
                sets.append(home := DiffusionSet())
            if home is not None:
                getattr(home, role).append(one)
            elif sets:
                warnings.append(f"{series_name(one)} is an ADC map on another grid or echo time: left out.")
    if sets:
        return sorted(sets, key=lambda group: group.rank, reverse=True)
    if unknown:
        raise StudyError(
            "b_unknown", f"No b-value in the headers of {series_name(unknown[0])}. Give ADC and high b as files."
        )
    if any(one.role == "unsupported" for one in series):
        reason = next(one.reason for one in series if one.role == "unsupported")
        raise StudyError(
            "mosaic", f"The only diffusion-like series cannot be used: {reason}. Export one image per slice."
        )
    raise StudyError("no_diffusion", "No diffusion series with an image above b = 0. Export DWI and ADC of this study.")


def axial_t2(series: Sequence[Series], sets: Sequence[DiffusionSet]) -> list[Series]:
    """Axial T2 series in the frame of reference of some diffusion set: most slices first, then the latest.

    Raises:
        StudyError: ``no_t2`` or ``frames_differ``.
    """
    axial = [one for one in series if one.role == "t2" and one.plane == "axial"]
    if not axial:
        planes = sorted({one.plane for one in series if one.role == "t2"})
        found = f"only {' and '.join(planes)} ones" if planes else "none"
        raise StudyError("no_t2", f"An axial T2 series is needed, found {found}. Export it with this study.")
    frames = {group.first.frame_of_reference for group in sets}
    fitting = [one for one in axial if one.frame_of_reference in frames]
    if not fitting:
        raise StudyError(
            "frames_differ",
            "T2 and diffusion have different frames of reference, so their positions cannot be compared (the patient "
            "was moved or the exams differ). Export both from one session.",
        )
    return sorted(fitting, key=lambda one: (len(one.positions), one.time, one.number), reverse=True)


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


def build_diffusion(group: DiffusionSet) -> Diffusion:
    """Volumes of a set: every acquired b, the ADC (the scanner's, else fitted) and the highest b.

    A b-value with duplicate slices is left out where nothing needs it.

    Raises:
        StudyError: As :func:`mri_alm.imaging.volume.build_volume`, ``adc_units`` or ``adc_unfit``.
    """
    warnings: list[str] = []
    acquired = _by_b(group.dwi, warnings)
    calculated = {b: one for b, one in _by_b(group.calculated, warnings).items() if b not in acquired}
    high = max(acquired | calculated)
    dwi = {}
    for b, one in sorted(acquired.items()):
        try:
            dwi[b] = build_mean(one.at_b(b), f"{series_name(one)} at b = {b:g}")
        except StudyError as error:
            if error.code != "duplicate_slices" or b == high or not group.adc:
                raise
            warnings.append(f"b = {b:g} left out, as the ADC map and b = {high:g} do without: {error.message}")
    acquired = {b: acquired[b] for b in dwi}
    every = acquired | calculated
    adc, adc_series, info = _adc(group, dwi, warnings)
    hbv = dwi[high] if high in dwi else build_volume(calculated[high].at_b(high), f"{series_name(calculated[high])}")
    info |= {
        "b_values": sorted(acquired),
        "directions": {
            f"{b:g}": len({frame.direction for frame in one.at_b(b)}) for b, one in sorted(acquired.items())
        },
        "dwi": [chosen(one) for one in group.dwi],
        "hbv": chosen(every[high])
        | {"b": high, "source": "acquired" if high in acquired else "calculated by the scanner"},
    }
    used = list(dict.fromkeys([*acquired.values(), every[high], *adc_series]))
    return Diffusion(adc, hbv, dwi, used, warnings, info)


def _completes(series: Series, sets: Sequence[DiffusionSet]) -> bool:
    """Whether a series without b above 0 is the b = 0 part of a set known already (diffusion split over series)."""
    return series.b_values == [0.0] and any(group.first.same_place(series) for group in sets)


def _by_b(series: Sequence[Series], warnings: list[str]) -> dict[float, Series]:
    """b-value -> the series it is taken from, the latest where several have it."""
    found: dict[float, Series] = {}
    for one in sorted(series, key=lambda one: (one.time, one.number)):
        for b in one.b_values:
            if b in found:
                warnings.append(f"b = {b:g} is in {series_name(found[b])} and {series_name(one)}: took the later one.")
            found[b] = one
    return found


def _adc(
    group: DiffusionSet, dwi: dict[float, sitk.Image], warnings: list[str]
) -> tuple[sitk.Image, list[Series], dict[str, Any]]:
    """ADC in 1e-6 mm2/s, the series it came from (none when fitted) and its record."""
    if not group.adc:
        adc, source = fitted_adc(dwi, warnings)
        return adc, [], {"adc": None, "adc_source": source, "adc_units": ADC_UNIT}
    times = [one.time for one in group.dwi + group.calculated]
    best = min(group.adc, key=lambda one: (min(abs(one.time - time) for time in times), one.number))
    if len(group.adc) > 1:
        warnings.append(f"{len(group.adc)} ADC maps fit: took {series_name(best)}, the nearest in time.")
    stored = build_volume(best.frames, series_name(best))
    unit, factor = adc_unit(stored)
    return stored * factor, [best], {"adc": chosen(best), "adc_source": "scanner", "adc_units": unit}
