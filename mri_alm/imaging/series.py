"""DICOM headers -> series of placed frames, each series with a role and the reason for it.

The rules are data (``series_rules.json``): a list in order, the first that holds gives the role. A rule holds when
every condition under ``all`` and at least one under ``any`` holds.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import Dataset
from pydicom.uid import EnhancedMRImageStorage, LegacyConvertedEnhancedMRImageStorage, MRImageStorage

from mri_alm.errors import InputError
from mri_alm.imaging.diffusion import b_value, gradient_direction, shells
from mri_alm.runtime.files import read_json

_MAPS = frozenset({"ADC", "EADC", "FA"})  # image types of what is computed from the diffusion images of a series
MR_CLASSES = (MRImageStorage, EnhancedMRImageStorage, LegacyConvertedEnhancedMRImageStorage)
BY_HAND = "set by hand"  # the reason of a role that the user gave
ODD = 0.3  # of the images of a series; more are no strays, and the series is a localizer or nothing known
SAME_VOXEL = 0.1  # of the pixel spacing, by which two grids may lie apart and still be one
FARTHEST_MM = 1e5  # a damaged number is no position
DEFAULT_RULES = Path(__file__).with_name("series_rules.json")


@dataclass(frozen=True, eq=False)
class Frame:
    """One 2D image: where it lies, in LPS millimetres, and how its stored values become physical ones.

    Args:
        location: SliceLocation, which must rise or fall with the position; None when the header has none.
        index: Number of the frame in its file; 0 in a classic file.
        position: Centre of the first pixel, (3,); NaN when the header has none.
        orientation: Direction cosines of a row and of a column, (6,); NaN when the header has none.
        spacing: Distance between rows and between columns.
        direction: Of the diffusion gradient, see :func:`mri_alm.imaging.diffusion.gradient_direction`.
        image_type: Words of ``ImageType``, of an enhanced file's frame those of ``FrameType``.
    """

    file: Path
    index: int
    position: NDArray[np.float64]
    orientation: NDArray[np.float64]
    spacing: tuple[float, float]
    shape: tuple[int, int]
    slope: float
    intercept: float
    echo_time: float | None
    b: float | None
    direction: tuple[float, ...] | None
    image_type: frozenset[str]
    location: float | None = None

    @property
    def normal(self) -> NDArray[np.float64]:
        """Unit vector across the slice, (3,)."""
        return np.cross(self.orientation[:3], self.orientation[3:])


@dataclass(eq=False)
class Series:
    """Frames of one series and one echo, with what decides over their role.

    Args:
        description: Series description, or the protocol's name where there is none.
        nameless: Whether the header has no series description.
        sequence: Kinds of acquisition, ``SE`` spin echo, ``GR`` gradient echo, ``EP`` echo-planar.
        time: Seconds when it was acquired, for comparison within the study; -1 when the header does not say.
        sop_class: SOPClassUID.
        modality: As the header says; empty when it does not.
        inverted: Whether small numbers are to be shown white (MONOCHROME1).
        notes: What is to be said when the series is used.
    """

    frames: list[Frame]
    number: int
    description: str
    nameless: bool
    image_type: frozenset[str]
    sequence: frozenset[str]
    time: float
    frame_of_reference: str
    sop_class: str = ""
    modality: str = ""
    inverted: bool = False
    role: str = "other"
    reason: str = "no rule fits"
    notes: list[str] = field(default_factory=list)

    @property
    def positions(self) -> NDArray[np.float64]:
        """Distinct slice positions along the first frame's normal, ascending, in mm."""
        along = np.sort([frame.position @ self.frames[0].normal for frame in self.frames])
        return along[np.diff(along, prepend=-np.inf) > 0.01]

    @property
    def plane(self) -> str:
        """The body plane nearest to the slices."""
        return ("sagittal", "coronal", "axial")[int(np.argmax(np.abs(self.frames[0].normal)))]

    @property
    def b_values(self) -> list[float]:
        """b-values present, ascending; frames without one count as 0 beside others above 0."""
        found = {frame.b for frame in self.frames}
        known = {b for b in found if b is not None}
        return sorted(known | {0.0}) if None in found and max(known, default=0) > 0 else sorted(known)

    def at_b(self, b: float) -> list[Frame]:
        """The frames of one b-value (see :attr:`b_values`)."""
        return [frame for frame in self.frames if (frame.b or 0.0) == b]

    @property
    def slices_rise(self) -> bool | None:
        """Whether SliceLocation rises with the position along the normal; None where the headers do not say."""
        normal = self.frames[0].normal
        first, last = (end(self.frames, key=lambda frame: frame.position @ normal).location for end in (min, max))
        return None if first is None or last is None or first == last else last > first

    @property
    def not_mr(self) -> bool:
        """Whether these are no MR images: a segmentation, a screenshot, another modality; absent words say nothing."""
        return self.modality not in ("", "MR") or self.sop_class not in ("", *MR_CLASSES)

    @property
    def secondary(self) -> bool:
        """Whether it was made from other images after the scan: a reformation, a workstation's result."""
        return bool(self.image_type & {"SECONDARY", "MPR", "REFORMATTED"})

    def same_place(self, other: "Series") -> bool:
        """Whether both series hold the same voxels of the same scan set-up: grid and echo time."""
        return len({self.frames[0].echo_time, other.frames[0].echo_time} - {None}) <= 1 and self.same_grid(other)

    def same_grid(self, other: "Series") -> bool:
        """Whether both series hold the same voxels; one may lack slices, but those of both are most of either."""
        mine, its = self.frames[0], other.frames[0]
        if (
            self.frame_of_reference != other.frame_of_reference
            or mine.shape != its.shape
            or not np.allclose(mine.spacing, its.spacing, rtol=1e-3)
            or not np.allclose(mine.orientation, its.orientation, atol=1e-3)
        ):
            return False
        apart = its.position - mine.position
        if np.linalg.norm(apart - (apart @ mine.normal) * mine.normal) > SAME_VOXEL * min(mine.spacing):
            return False
        ours, theirs = self.positions, np.sort([frame.position @ mine.normal for frame in other.frames])
        common = sum(bool(np.abs(theirs - at).min(initial=np.inf) <= 0.1) for at in ours)
        return 2 * common > max(len(ours), len(other.positions))


def group_series(
    files: Iterable[Path], headers: Iterable[Dataset], rules: Sequence[dict[str, Any]] | None = None
) -> list[Series]:
    """Series of one study in the order of their numbers, one per series, echo time and kind of map, roles assigned.

    Scanners append maps to the series that they are computed from; a map's frames have no b-value and are not b = 0.

    Args:
        files: Of the study.
        headers: One per file.
        rules: From :func:`load_rules`; the shipped ones by default.
    """
    groups: dict[tuple[str, ...], list[tuple[Dataset, Frame]]] = defaultdict(list)
    for file, header in zip(files, headers, strict=True):
        for frame in frames_of(file, header):
            groups[_group(header, frame)].append((header, frame))
    series = [part for _, members in sorted(groups.items()) for part in _without_odd(_series(members))]
    _after_midnight(series)
    tried = load_rules() if rules is None else rules
    for one in series:
        _assign(one, tried)
    return sorted(series, key=lambda one: one.number)


def trust_positions(series: Iterable[Series]) -> None:
    """Let positions of all series be compared, whatever their frames of reference; a note says so."""
    for one in series:
        one.frame_of_reference = ""
        one.notes.append("Frames of reference are not compared, as the rules say: look whether T2 and diffusion match.")


def _group(header: Dataset, frame: Frame) -> tuple[str, ...]:
    """What the frames of one series have in common, also where its UID is absent or stands on several series."""
    uid = str(header.get("SeriesInstanceUID") or "")
    maps = "+".join(sorted(frame.image_type & _MAPS))
    known = (uid, str(header.get("SeriesNumber")), str(header.get("SOPClassUID")), f"{frame.echo_time or 0:g}", maps)
    if uid:
        return known
    return (*known, str(header.get("SeriesDescription")), str(frame.shape), str(np.round(frame.orientation, 2)))


def _series(members: list[tuple[Dataset, Frame]]) -> Series:
    headers = [header for header, _ in members]
    first = headers[0]
    meant = shells(frame.b for _, frame in members if frame.b is not None)
    return Series(
        frames=[frame if frame.b is None else replace(frame, b=meant[frame.b]) for _, frame in members],
        number=int(number) if isinstance(number := first.get("SeriesNumber"), int) else 0,
        description=str(first.get("SeriesDescription") or first.get("ProtocolName") or ""),
        nameless=not first.get("SeriesDescription"),
        image_type=members[0][1].image_type | (_words(first.get("ImageType")) - _MAPS),
        sequence=_words(first.get("ScanningSequence")),
        time=min(_seconds(header) for header in headers),
        frame_of_reference=str(first.get("FrameOfReferenceUID") or ""),
        sop_class=str(first.get("SOPClassUID") or ""),
        inverted=str(first.get("PhotometricInterpretation")) == "MONOCHROME1",
        modality=str(first.get("Modality") or "").strip().upper(),
    )


def _without_odd(series: Series) -> list[Series]:
    """A series without the few images that lie otherwise or have another size (a scout), and those as one apart."""
    kinds: list[list[Frame]] = []
    for frame in series.frames:
        home = next((kind for kind in kinds if _alike(kind[0], frame)), None)
        if home is None:
            kinds.append(home := [])
        home.append(frame)
    most = max(kinds, key=len)
    odd = len(series.frames) - len(most)
    if not odd or len(most) < 5 or odd > ODD * len(series.frames):
        return [series]
    text = f"Series {series.number}: {odd} of {len(series.frames)} images have another orientation or size"
    apart = [frame for kind in kinds if kind is not most for frame in kind]
    rest = replace(series, frames=apart, reason="images of another orientation or size than their series", notes=[])
    return [replace(series, frames=most, notes=[f"{text} and were left out."]), rest]


def _alike(one: Frame, other: Frame) -> bool:
    """Whether two frames may be slices of one volume, but for their distance."""
    placed = np.isfinite([one.normal @ one.position, other.normal @ other.position])
    return bool(
        placed[0] == placed[1]
        and one.shape == other.shape
        and (not placed[0] or abs(one.normal @ other.normal) > 0.98)
        and np.allclose(one.spacing, other.spacing, rtol=0.01, equal_nan=True)
    )


def _seconds(header: Dataset) -> float:
    """When the image was acquired, in seconds of one clock; time of day without a date, -1 when nothing says."""
    for name in ("Acquisition", "Series", "Content"):
        stamp = str(header.get("AcquisitionDateTime") or "") if name == "Acquisition" else ""
        day, clock = str(header.get(f"{name}Date") or ""), str(header.get(f"{name}Time") or "")
        if match := re.match(r"(\d{8})?(\d\d)(\d\d)(\d\d(?:\.\d+)?)", (clock and day + clock) or stamp):
            date, hours, minutes, seconds = match.groups()
            return 86400.0 * _day(date) + 3600.0 * int(hours) + 60.0 * int(minutes) + float(seconds)
    return -1.0


def _day(text: str | None) -> int:
    try:
        return datetime.strptime(text or "", "%Y%m%d").toordinal()
    except ValueError:
        return 0


def _after_midnight(series: list[Series]) -> None:
    """Make times comparable: without dates where some have none, and then those before noon after those of late."""
    known = [one.time for one in series if one.time >= 0]
    if not known or min(known) >= 86400:
        return
    for one in series:
        one.time = one.time % 86400 if one.time >= 0 else one.time
    known = [one.time for one in series if one.time >= 0]
    late = max(known) - min(known) > 43200
    for one in series:
        one.time += 86400 * (late and 0 <= one.time < 43200)


def frames_of(file: Path, header: Dataset) -> list[Frame]:
    """Frames of a classic file (one) or of an enhanced one (its per-frame functional groups)."""
    if "PerFrameFunctionalGroupsSequence" not in header:
        return [_frame(file, 0, header, [header])]
    shared = list(header.get("SharedFunctionalGroupsSequence") or ())
    return [
        _frame(file, index, header, [_flat(groups) for groups in (own, *shared)])
        for index, own in enumerate(header.PerFrameFunctionalGroupsSequence)
    ]


def _flat(groups: Dataset) -> Dataset:
    """The elements of all functional groups of one frame on one level."""
    flat = Dataset()
    for element in groups:
        if element.VR == "SQ" and len(element.value) == 1:
            flat.update(element.value[0])
    return flat


def _frame(file: Path, index: int, header: Dataset, sources: list[Dataset]) -> Frame:
    def find(name: str) -> Any:
        return next((source[name].value for source in sources if source.get(name) is not None), None)

    def numbers(name: str, count: int) -> NDArray[np.float64]:
        value = find(name)
        good = value is not None and len(value) == count and all(abs(float(v)) < FARTHEST_MM for v in value)
        return np.array([float(v) for v in value]) if good else np.full(count, np.nan)

    slope, intercept = find("RescaleSlope"), find("RescaleIntercept")
    real = next((scale for scale in map(_real_world, sources) if scale), None)
    if real and (slope is None or real[2]):
        slope, intercept = real[:2]
    echo = find("EffectiveEchoTime") if find("EchoTime") is None else find("EchoTime")
    spacing = numbers("PixelSpacing", 2)
    b = next((b for b in map(b_value, sources) if b is not None), None)
    direction = next((found for found in map(gradient_direction, sources) if found is not None), None)
    return Frame(
        file=file,
        index=index,
        position=numbers("ImagePositionPatient", 3),
        orientation=numbers("ImageOrientationPatient", 6),
        spacing=(spacing[0], spacing[1]),
        shape=(int(header.Rows), int(header.Columns)),
        slope=1.0 if slope is None else float(slope),
        intercept=float(intercept or 0.0),
        echo_time=None if echo is None or not math.isfinite(float(echo)) else float(echo),
        b=b,
        direction=direction,
        location=None if find("SliceLocation") is None else float(find("SliceLocation")),
        image_type=_words(find("FrameType") or header.get("ImageType")),
    )


def _real_world(source: Dataset) -> tuple[float, float, bool] | None:
    """Slope and intercept of the real-world value mapping, if it is linear, and whether its unit is a diffusivity."""
    item = next(iter(source.get("RealWorldValueMappingSequence") or [source]))
    if item.get("RealWorldValueSlope") is None:
        return None
    units = "".join(str(one.get("CodeValue")) for one in item.get("MeasurementUnitsCodeSequence") or ())
    return float(item.RealWorldValueSlope), float(item.get("RealWorldValueIntercept") or 0.0), "m2/s" in units


def _words(value: Any) -> frozenset[str]:
    return frozenset(str(word).upper() for word in ([value] if isinstance(value, str) else value or ()))


def load_rules() -> list[dict[str, Any]]:
    """The shipped role rules."""
    return read_json(DEFAULT_RULES, list)


def check_rules(rules: Sequence[dict[str, Any]]) -> None:
    """Refuse role rules that cannot be used.

    Raises:
        InputError: If one is no rule, or has an unknown condition.
    """
    try:
        conditions = {name for rule in rules for part in ("all", "any") for name in rule.get(part, {})}
        complete = all({"role", "reason"} <= rule.keys() for rule in rules)
    except (AttributeError, TypeError) as error:
        raise InputError(f"not a list of series rules ({error}).") from error
    if unknown := sorted(conditions - CONDITIONS.keys()):
        raise InputError(f"unknown condition {unknown[0]!r}. Known ones: {', '.join(sorted(CONDITIONS))}.")
    if not complete:
        raise InputError("every rule needs a role and a reason.")


CONDITIONS: dict[str, Callable[[Series, Any], bool]] = {
    "image_type": lambda series, words: not series.image_type.isdisjoint(words),
    "description": lambda series, pattern: re.search(pattern, series.description, re.IGNORECASE) is not None,
    "nameless": lambda series, wanted: wanted == series.nameless,
    "inverted": lambda series, wanted: wanted == series.inverted,
    "not_mr": lambda series, wanted: wanted == series.not_mr,
    "echo_time_outside": lambda series, ends: (
        (echo := series.frames[0].echo_time) is not None and not ends[0] <= echo <= ends[1]
    ),
    "sequence": lambda series, words: not series.sequence.isdisjoint(words),
    "sequence_without": lambda series, words: series.sequence.isdisjoint(words),
    "echo_time_within": lambda series, ends: ends[0] <= (series.frames[0].echo_time or 0.0) <= ends[1],
    "b_above": lambda series, b: max(series.b_values, default=-1.0) > b,
    "number": lambda series, numbers: series.number in numbers,
    "slices_below": lambda series, count: len(series.positions) < count,
    "orientations_above": lambda series, count: _orientations(series.frames) > count,
    "without_position": lambda series, wanted: wanted == any(np.isnan(f.position @ f.normal) for f in series.frames),
}


def _assign(series: Series, rules: Sequence[dict[str, Any]]) -> None:
    if series.reason != Series.reason:  # images set apart
        return
    for rule in rules:
        every, some = rule.get("all", {}), rule.get("any", {})
        if all(CONDITIONS[name](series, value) for name, value in every.items()) and (
            not some or any(CONDITIONS[name](series, value) for name, value in some.items())
        ):
            series.role, series.reason = rule["role"], rule["reason"]
            return


def _orientations(frames: list[Frame]) -> int:
    """Number of clearly different slice directions (more than about 11 degrees apart)."""
    kinds: list[NDArray[np.float64]] = []
    for frame in frames:
        if all(abs(frame.normal @ kind) < 0.98 for kind in kinds):
            kinds.append(frame.normal)
    return len(kinds)
