"""b-values of every vendor, the ADC map fitted from them, and the units of a scanner's own map."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from pydicom.dataset import Dataset
from pydicom.tag import BaseTag
from scipy.stats import spearmanr

from mri_alm.errors import StudyError
from mri_alm.runtime.files import bvals_of, read_file

PUBLIC_B = (0x0018, 0x9087)
PUBLIC_DIRECTION = (0x0018, 0x9089)
Private = tuple[int, str, int]  # group, private creator, element: the block is wherever a writer found one free
SIEMENS_B: Private = (0x0019, "SIEMENS MR HEADER", 0x0C)
PHILIPS_B: Private = (0x2001, "Philips Imaging DD 001", 0x03)
GE_B: Private = (0x0043, "GEMS_PARM_01", 0x39)
UIH_B: Private = (0x0065, "Image Private Header", 0x09)
SIEMENS_DIRECTION: Private = (0x0019, "SIEMENS MR HEADER", 0x0E)
UIH_DIRECTION: Private = (0x0065, "Image Private Header", 0x37)
PHILIPS_DIRECTION: tuple[Private, ...] = tuple(
    (0x2005, "Philips MR Imaging DD 001", element) for element in (0xB0, 0xB1, 0xB2)
)
GE_DIRECTION: tuple[Private, ...] = tuple((0x0019, "GEMS_ACQU_01", element) for element in (0xBB, 0xBC, 0xBD))
# The gradient's direction: one element with three values, or three elements with one each.
DIRECTIONS = ((SIEMENS_DIRECTION,), GE_DIRECTION, PHILIPS_DIRECTION, (UIH_DIRECTION,))
_PRIVATE = (SIEMENS_B, PHILIPS_B, GE_B, UIH_B, *(one for several in DIRECTIONS for one in several))
BLOCKS = range(0x10, 0x40)  # creators fill the first free block; no export with more than a few is known
PRIVATE_TAGS = [
    BaseTag(tag)
    for group, element in sorted({(group, element) for group, _, element in _PRIVATE})
    for block in BLOCKS
    for tag in (group << 16 | block, group << 16 | block << 8 | element)
]
# How private elements store their numbers where it is not text: implicit VR does not say, and hands over bytes.
BINARY = dict.fromkeys((PHILIPS_B, *PHILIPS_DIRECTION), np.dtype("<f4")) | dict.fromkeys(
    (SIEMENS_DIRECTION, UIH_B, UIH_DIRECTION), np.dtype("<f8")
)
# Siemens names its sequences by the b-value: *ep_b800t, ep_b1400#3; of a map both ends: ep_b50_800, which says none.
_SEQUENCE_B = re.compile(r"(?<![0-9a-z])b(\d{1,5})t?(?:#\d+)?$", re.IGNORECASE)
_LONGEST_TABLE = 1 << 20  # bytes of a .bval file
SHELL = 5.0, 0.03  # s/mm2, and share of the value: b-values no further apart were meant to be one
CANON_COMMENT = (0x0020, 0x4000)  # image comments
_CANON = re.compile(r"b=(\d+)\((.+)\)")  # b=1500(0.895,0.000,0.445)
_WORDS = "DiffusionGradientDirectionSequence", "SequenceName"
DIFFUSION_TAGS: list[Any] = [PUBLIC_B, PUBLIC_DIRECTION, CANON_COMMENT, *_WORDS, *PRIVATE_TAGS]
MIN_SPAN = 400.0  # s/mm2, between the lowest and the highest b of a fit: less, and noise decides
LEAST_B, HIGHEST_B = 50.0, 10_000.0  # s/mm2; clinical scanners reach 5,000, and another unit is a thousand off
TISSUE = 0.1  # of the brightest (99 %) low-b signal; below it lie air, bone and gas
MAX_CUT_OFF = 0.05  # of the middle may have the highest value: in a whole image one of thousands has
MIN_TISSUE = 200  # voxels; over fewer nothing is judged
ADC_UNIT = "1e-6 mm2/s"
# (name of the unit, factor to 1e-6 mm2/s, lowest and highest plausible tissue median in that unit)
ADC_UNITS = (("1e-6 mm2/s", 1.0, 300.0, 4000.0), ("1e-3 mm2/s", 1e3, 0.3, 4.0), ("mm2/s", 1e6, 3e-4, 4e-3))


def b_value(ds: Dataset) -> float | None:
    """Diffusion weighting of one image, in s/mm2, or None when no known tag holds it.

    The public tag comes first because it is the only one with a standard meaning; empty, it hides no other. The value
    on an ADC map is misleading (the largest b, the smallest, or nothing): callers ignore it there.

    Args:
        ds: Header of a classic file, or one frame's functional groups of an enhanced file.
    """
    owners = _owners(ds)
    if (value := _number(ds, PUBLIC_B, owners)) is not None:
        return value
    if ds.get("MRDiffusionSequence") and (value := b_value(ds.MRDiffusionSequence[0])) is not None:
        return value
    for place in (SIEMENS_B, PHILIPS_B):
        if (value := _number(ds, place, owners)) is not None:
            return value
    if (value := _number(ds, GE_B, owners)) is not None:
        # GE adds 1e9 on multi-b scans to flag them, not to weight them.
        return value - 1e9 if value >= 1e9 else value
    # UIH stores what the gradients really gave (929.75): slices of one setting differ in the decimals.
    if (value := _number(ds, UIH_B, owners)) is not None:
        return 50.0 * round(value / 50.0)
    named = _SEQUENCE_B.search(str(ds.get("SequenceName") or "").strip()) or _CANON.fullmatch(_comment(ds))
    return float(named[1]) if named else None


def shells(values: Iterable[float]) -> dict[float, float]:
    """Each b-value and the one that it was meant to be: the gradients of one setting may give 795, 800 and 805.

    Args:
        values: b in s/mm2, in any order.

    Returns:
        Given b -> mean of the different ones of its shell, whole s/mm2; 0 where the shell holds 0.
    """
    groups: list[list[float]] = []
    for value in sorted(set(values)):
        low = groups[-1][0] if groups else -math.inf
        if value - low <= max(SHELL[0], SHELL[1] * value):
            groups[-1].append(value)
        else:
            groups.append([value])
    return {b: 0.0 if 0.0 in group else float(round(sum(group) / len(group))) for group in groups for b in group}


def b_table(image: Path) -> list[float]:
    """b-values in s/mm2 of an image's volumes, from the .bval file beside it.

    Raises:
        StudyError: ``b_unknown`` where there is none, or it holds something else, or there are two that differ.
    """
    tables = bvals_of(image)
    if not tables:
        raise StudyError(
            "b_unknown", "Column dwi: there is no .bval file beside the image, so its b-values are unknown."
        )
    found = set()
    for table in tables:
        try:
            text = read_file(table, _LONGEST_TABLE).decode("utf-8-sig", "replace")
        except OSError as error:
            raise StudyError("b_unknown", f"Column dwi: its .bval file cannot be read ({error.strerror}).") from None
        words = re.split(r"[\s,;]+", text.strip())
        try:
            values = tuple(float(word) for word in words)
        except ValueError:
            raise StudyError("b_unknown", "Column dwi: its .bval file holds something that is no number.") from None
        if not all(0 <= b <= HIGHEST_B for b in values) or max(values) < LEAST_B:
            raise StudyError(
                "b_unknown",
                f"Column dwi: the .bval file holds what are no b-values in s/mm2 (0 to {HIGHEST_B:g}, the highest at "
                f"least {LEAST_B:g}).",
            )
        found.add(values)
    if len(found) > 1:
        raise StudyError("b_unknown", "Column dwi: two tables of b-values lie beside the image, and they differ.")
    return list(found.pop())


def gradient_direction(ds: Dataset) -> tuple[float, ...] | None:
    """Unit direction of the diffusion gradient, (3,), or None for a trace, for b = 0 and where no tag holds it.

    A gradient and its opposite weight alike, so the first component that is not zero is made positive.

    Args:
        ds: Header of a classic file, or one frame's functional groups of an enhanced file.
    """
    if ds.get("MRDiffusionSequence"):
        return gradient_direction(ds.MRDiffusionSequence[0])
    if ds.get("DiffusionGradientDirectionSequence"):
        return gradient_direction(ds.DiffusionGradientDirectionSequence[0])
    places, owners = ((PUBLIC_DIRECTION,), *DIRECTIONS), _owners(ds)
    stored = ([number for place in several for number in _numbers(ds, place, owners)] for several in places)
    values = next((numbers for numbers in stored if len(numbers) == 3), [])
    if not values and (comment := _CANON.fullmatch(_comment(ds))):
        values = [_float(text) for text in comment[2].split(",")]
    length = math.hypot(*values)
    if len(values) != 3 or not 0.5 < length < math.inf:
        return None
    sign = next(math.copysign(1.0, value) for value in values if abs(value) > 1e-3 * length)
    return tuple(round(sign * value / length, 2) + 0.0 for value in values)


def fit_adc(images: dict[float, sitk.Image]) -> sitk.Image:
    """Apparent diffusion coefficient by log-linear least squares over all b-values.

    Every b counts: leaving out the highest one changes the map's ranking of tissues, not only its scale.

    Args:
        images: b in s/mm2 -> signal, at least two b, all on one grid.

    Returns:
        The map in 1e-6 mm2/s, float32, never negative; zero where the signal is zero at every b.

    Raises:
        StudyError: ``adc_unfit`` with fewer than two b-values.
    """
    b = np.array(sorted(images))
    if len(b) < 2:
        raise StudyError("adc_unfit", f"An ADC map needs two b-values, found {list(b)}. Add the scanner's ADC map.")
    signal = np.stack([sitk.GetArrayFromImage(images[value]) for value in b])
    # Zero or negative samples have no logarithm; the smallest positive signal stands in for them.
    floor = signal[signal > 0].min(initial=1.0)
    log_signal = np.log(np.maximum(signal, floor))
    centred = b - b.mean()
    slope = np.tensordot(centred / np.sum(centred**2), log_signal, axes=1)
    adc = np.where((signal > 0).any(axis=0), np.maximum(-1e6 * slope, 0.0), 0.0)
    image = sitk.GetImageFromArray(adc.astype(np.float32))
    image.CopyInformation(images[float(b[0])])
    return image


def fitted_adc(images: dict[float, sitk.Image], warnings: list[str]) -> tuple[sitk.Image, str]:
    """The map of :func:`fit_adc` and where a record says it is from; b-values close together leave a warning."""
    adc = fit_adc(images)
    if (span := max(images) - min(images)) < MIN_SPAN:
        warnings.append(f"ADC fitted over a span of {span:g} s/mm2 only; {MIN_SPAN:g} or more is advised.")
    return adc, "fitted over b = " + ", ".join(f"{b:g}" for b in sorted(images))


def adc_unit(adc: sitk.Image) -> tuple[str, float]:
    """The unit a scanner's ADC map is stored in and the factor to 1e-6 mm2/s, found from its tissue values.

    Headers seldom say the unit, and the three in use are three decades apart: the median of the positive values in the
    central half of the image tells them.

    Raises:
        StudyError: ``adc_units`` when the median fits none of them.
    """
    volume = sitk.GetArrayViewFromImage(adc)
    centre = volume[tuple(slice(n // 4, n - n // 4) for n in volume.shape)]
    tissue = centre[np.isfinite(centre) & (centre > 0)]
    median = float(np.median(tissue)) if tissue.size else math.nan
    for unit, factor, low, high in ADC_UNITS:
        if low <= median <= high:
            return unit, factor
    raise StudyError(
        "adc_units",
        f"The ADC map's tissue median is {median:.4g}, which is no ADC in 1e-6 mm2/s (300 to 4000), 1e-3 mm2/s "
        "(0.3 to 4) or mm2/s (0.0003 to 0.004). Check that it is not the high-b image instead, and its rescale slope.",
    )


def _comment(ds: Dataset) -> str:
    return str(ds[CANON_COMMENT].value) if CANON_COMMENT in ds else ""


def _owners(ds: Dataset) -> dict[tuple[int, str], int]:
    """Group and private creator -> the block that it reserved."""
    creators = (tag for tag in list(ds.keys()) if tag.group & 1 and 0x10 <= tag.element <= 0xFF)
    return {(tag.group, str(ds[tag].value).strip()): tag.element for tag in creators}


def _value(ds: Dataset, place: tuple[int, int] | Private, owners: Mapping[tuple[int, str], int]) -> Any:
    """The value of an element; a private one counts only in a block that its creator reserved."""
    tag = place if len(place) == 2 else (place[0], owners.get(place[:2], 0) << 8 | place[2])
    return ds[tag].value if tag in ds and (len(place) == 2 or tag[1] > 0xFF) else None


def _numbers(ds: Dataset, place: tuple[int, int] | Private, owners: Mapping[tuple[int, str], int]) -> list[float]:
    """The numbers of one element of any representation, NaN for what is none; empty where it is absent or empty."""
    value = _value(ds, place, owners)
    if value is None or value == "":
        return []
    if isinstance(value, bytes):
        kind = BINARY.get(place) if len(place) == 3 else None
        if kind and len(value) % kind.itemsize == 0:
            return [float(number) for number in np.frombuffer(value, kind)]
        value = value.decode("latin1").split("\\")
    several = hasattr(value, "__len__") and not isinstance(value, str)
    return [_float(number) for number in (value if several else [value])]


def _number(ds: Dataset, place: tuple[int, int] | Private, owners: Mapping[tuple[int, str], int]) -> float | None:
    """The first number of an element if it is finite and not negative."""
    number = next(iter(_numbers(ds, place, owners)), math.nan)
    return number if math.isfinite(number) and number >= 0 else None


def _float(value: object) -> float:
    try:
        return float(str(value).strip("\x00 "))
    except ValueError:
        return math.nan


def rank_correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Spearman's, of two sets of positive values; 1 where either is constant, so that nothing contradicts the other."""
    if any(np.ptp(values) <= 1e-6 * np.abs(values).max() for values in (one, other)):
        return 1.0
    return float(spearmanr(one, other).statistic)


def central_field(image: sitk.Image) -> NDArray[np.float64]:
    """The middle half in plane of every slice (slices, rows, columns), voxels that are no numbers as zeros."""
    volume = sitk.GetArrayViewFromImage(image).astype(np.float64)
    rows, columns = (slice(n // 4, n - n // 4) for n in volume.shape[1:])
    return np.nan_to_num(volume[:, rows, columns], posinf=0.0, neginf=0.0)
