"""b-values of every vendor, the ADC map fitted from them, and the units of a scanner's own map."""

import math
import re

import numpy as np
import SimpleITK as sitk  # noqa: N813
from pydicom.dataset import Dataset

from mri_alm.errors import StudyError

PUBLIC_B = (0x0018, 0x9087)
SIEMENS_B, PHILIPS_B, GE_B, UIH_B = (0x0019, 0x100C), (0x2001, 0x1003), (0x0043, 0x1039), (0x0065, 0x1009)
SIEMENS_DIRECTION, UIH_DIRECTION = (0x0019, 0x100E), (0x0065, 0x1037)
PHILIPS_DIRECTION = ((0x2005, 0x10B0), (0x2005, 0x10B1), (0x2005, 0x10B2))
# The gradient's direction: one element with three values, or three elements with one each.
DIRECTIONS = (
    ((0x0018, 0x9089),),
    (SIEMENS_DIRECTION,),
    ((0x0019, 0x10BB), (0x0019, 0x10BC), (0x0019, 0x10BD)),  # GE
    PHILIPS_DIRECTION,
    (UIH_DIRECTION,),
)
# How private elements store their numbers where it is not text: implicit VR does not say, and hands over bytes.
BINARY = dict.fromkeys((PHILIPS_B, *PHILIPS_DIRECTION), np.dtype("<f4")) | dict.fromkeys(
    (SIEMENS_DIRECTION, UIH_B, UIH_DIRECTION), np.dtype("<f8")
)
CANON_COMMENT = (0x0020, 0x4000)  # image comments: b=1500(0.895,0.000,0.445)
DIRECTION_TAGS = [*(tag for tags in DIRECTIONS for tag in tags), CANON_COMMENT]
MIN_SPAN = 400.0  # s/mm2, between the lowest and the highest b of a fit: less, and noise decides
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
    if (value := _number(ds, PUBLIC_B)) is not None:
        return value
    if ds.get("MRDiffusionSequence") and (value := b_value(ds.MRDiffusionSequence[0])) is not None:
        return value
    for tag in (SIEMENS_B, PHILIPS_B):
        if (value := _number(ds, tag)) is not None:
            return value
    if (value := _number(ds, GE_B)) is not None:
        # GE adds 1e9 on multi-b scans to flag them, not to weight them.
        return value - 1e9 if value >= 1e9 else value
    # UIH stores what the gradients really gave (929.75): slices of one setting differ in the decimals.
    return None if (value := _number(ds, UIH_B)) is None else 50.0 * round(value / 50.0)


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
    stored = ([number for tag in tags for number in _numbers(ds, tag)] for tags in DIRECTIONS)
    values = next((numbers for numbers in stored if len(numbers) == 3), [])
    if not values and CANON_COMMENT in ds:
        comment = re.fullmatch(r"b=\d+\((.+)\)", str(ds[CANON_COMMENT].value))
        values = [_float(text) for text in comment.group(1).split(",")] if comment else []
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


def _numbers(ds: Dataset, tag: tuple[int, int]) -> list[float]:
    """The numbers of one element of any representation, NaN for what is none; empty where it is absent or empty."""
    value = ds[tag].value if tag in ds else None
    if value is None or value == "":
        return []
    if isinstance(value, bytes):
        kind = BINARY.get(tag)
        if kind and len(value) % kind.itemsize == 0:
            return [float(number) for number in np.frombuffer(value, kind)]
        value = value.decode("latin1").split("\\")
    several = hasattr(value, "__len__") and not isinstance(value, str)
    return [_float(number) for number in (value if several else [value])]


def _number(ds: Dataset, tag: tuple[int, int]) -> float | None:
    """The first number of an element if it is finite and not negative."""
    number = next(iter(_numbers(ds, tag)), math.nan)
    return number if math.isfinite(number) and number >= 0 else None


def _float(value: object) -> float:
    try:
        return float(str(value).strip("\x00 "))
    except ValueError:
        return math.nan
