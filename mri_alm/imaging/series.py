"""DICOM headers -> series of placed frames, each series with a role and the reason for it.

The rules are data (``series_rules.json``): a list in order, the first that holds gives the role. A rule holds when
every condition under ``all`` and at least one under ``any`` holds.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import Dataset

from mri_alm.errors import InputError
from mri_alm.imaging.diffusion import b_value, gradient_direction
from mri_alm.runtime.files import read_json

_MAPS = frozenset({"ADC", "EADC", "FA"})  # image types of what is computed from the diffusion images of a series
FARTHEST_MM = 1e5  # a damaged number is no position
DEFAULT_RULES = Path(__file__).with_name("series_rules.json")


@dataclass(frozen=True, eq=False)
class Frame:
    """One 2D image: where it lies, in LPS millimetres, and how its stored values become physical ones.

    Args:
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
    """

    frames: list[Frame]
    number: int
    description: str
    nameless: bool
    image_type: frozenset[str]
    sequence: frozenset[str]
    time: float
    frame_of_reference: str
    role: str = "other"
    reason: str = "no rule fits"

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

    def same_place(self, other: "Series") -> bool:
        """Whether both series hold the same voxels of the same scan set-up (grid, frame of reference, echo time)."""
        mine, its = self.frames[0], other.frames[0]
        echoes = {mine.echo_time, its.echo_time} - {None}
        return (
            self.frame_of_reference == other.frame_of_reference
            and len(echoes) <= 1
            and mine.shape == its.shape
            and np.allclose(mine.spacing, its.spacing, rtol=1e-3)
            and np.allclose(mine.orientation, its.orientation, atol=1e-3)
            and self.positions.shape == other.positions.shape
            and np.allclose(self.positions, other.positions, atol=0.1)
        )


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
    groups: dict[tuple[str, float, tuple[str, ...]], list[tuple[Dataset, Frame]]] = defaultdict(list)
    for file, header in zip(files, headers, strict=True):
        for frame in frames_of(file, header):
            maps = tuple(sorted(frame.image_type & _MAPS))
            groups[str(header.get("SeriesInstanceUID", "")), frame.echo_time or 0.0, maps].append((header, frame))
    series = [_series(members) for _, members in sorted(groups.items())]
    tried = load_rules() if rules is None else rules
    for one in series:
        _assign(one, tried)
    return sorted(series, key=lambda one: one.number)


def _series(members: list[tuple[Dataset, Frame]]) -> Series:
    headers = [header for header, _ in members]
    first = headers[0]
    return Series(
        frames=[frame for _, frame in members],
        number=int(number) if isinstance(number := first.get("SeriesNumber"), int) else 0,
        description=str(first.get("SeriesDescription") or first.get("ProtocolName") or ""),
        nameless=not first.get("SeriesDescription"),
        image_type=members[0][1].image_type | (_words(first.get("ImageType")) - _MAPS),
        sequence=_words(first.get("ScanningSequence")),
        time=min(_seconds(header) for header in headers),
        frame_of_reference=str(first.get("FrameOfReferenceUID") or ""),
    )


def _seconds(header: Dataset) -> float:
    """Time of day the image was acquired, in seconds; -1 when the header does not say."""
    for name in ("AcquisitionTime", "SeriesTime", "ContentTime"):
        if match := re.match(r"(\d\d)(\d\d)(\d\d(?:\.\d+)?)", str(header.get(name) or "")):
            hours, minutes, seconds = match.groups()
            return 3600.0 * int(hours) + 60.0 * int(minutes) + float(seconds)
    return -1.0


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
        slope=1.0 if find("RescaleSlope") is None else float(find("RescaleSlope")),
        intercept=float(find("RescaleIntercept") or 0.0),
        echo_time=None if echo is None or not math.isfinite(float(echo)) else float(echo),
        b=b,
        direction=direction,
        image_type=_words(find("FrameType") or header.get("ImageType")),
    )


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
