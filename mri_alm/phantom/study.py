"""Synthetic prostate exams: a pelvis made of ellipsoids, imaged as axial T2 and as diffusion.

They let the whole job run without patient data, with a truth that is known. "DCE needed" is an *equivocal* finding:
T2 shows a dark peripheral zone with a moderately dark focus, **and** diffusion a moderate restriction in the same
focus. Negatives have no lesion, a clear cancer, or a finding on one sequence only (inflammation on T2, a bright spot on
diffusion), so that either sequence alone tells only part. Gland, zones and lesion sites follow figures measured on
1,500 public exams (see `docs/`). No number from a phantom is a clinical one.

Coordinates are LPS millimetres: x to the patient's left, y to the back, z to the head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from scipy import ndimage

from mri_alm.errors import InputError, one_of
from mri_alm.imaging.diffusion import fit_adc
from mri_alm.imaging.registration import empty_image, image_centre
from mri_alm.phantom.anatomy import LESION_SIZES, Anatomy, draw_anatomy
from mri_alm.phantom.canvas import Array, Canvas

B_VALUES = ((0.0, 400.0, 800.0), (50.0, 400.0, 800.0))
"""The acquired b-values of a study in s/mm2: one of these sets."""
HIGH_B = 2000.0
"""The b-value, in s/mm2, of the calculated image."""
T2_ECHO_MS, DWI_ECHO_MS = 100.0, 70.0
MAX_DRAWN_SHIFT_MM = 6.0
OFF_CENTRE_MM = ((0.0, -1.5, 0.0), (3.5, 7.5, 5.5))
"""The gland's centre relative to that of T2's field of view: mean and standard deviation."""


@dataclass(frozen=True)
class PhantomStudy:
    """One synthetic exam.

    Attributes:
        t2: Axial T2, int16, arbitrary units.
        adc: Apparent diffusion coefficient in 1e-6 mm2/s, int16, fitted to ``dwi``; 0 where there is no signal.
        hbv: Image calculated for ``HIGH_B`` from the same fit, int16.
        dwi: Acquired diffusion images, int16, by b-value in s/mm2.
        gland: The gland's mask on T2's grid, uint8.
        zones: 0 outside, 1 peripheral, 2 transition zone, on T2's grid, uint8.
        info: The truth, in JSON types: ``kind``, ``t2_grade`` and ``diffusion_grade`` (0 none, 1 equivocal, 2 clear),
            ``shift_mm`` (what lies at p on T2 lies at p + shift on diffusion, but for a distortion), ``gland_ml``,
            ``lesions`` and others.
    """

    t2: sitk.Image
    adc: sitk.Image
    hbv: sitk.Image
    dwi: dict[float, sitk.Image]
    gland: sitk.Image
    zones: sitk.Image
    info: dict[str, Any]


def make_study(
    index: int, label: int, *, seed: int = 0, coarse: float = 1.0, difficulty: str = "plain"
) -> PhantomStudy:
    """Make the exam number ``index`` of a cohort; equal arguments give equal voxels.

    Args:
        index: The study's number, >= 0.
        label: 1 for "DCE needed" (an equivocal lesion on both sequences), 0 otherwise.
        seed: The cohort's seed, >= 0.
        coarse: Factor, >= 1, by which T2's pixels are larger in plane, for experiments that need thousands of exams.
        difficulty: ``"plain"``; or ``"real"``: the same pelvis with lesions as small as real ones, and diffusion that
            is stretched and without signal near gas in the rectum (:func:`distort`).

    Raises:
        InputError: If the label is neither 0 nor 1, the index or seed is negative, ``coarse`` is below 1, or the
            difficulty is unknown.
    """
    one_of("A phantom's difficulty", difficulty, tuple(LESION_SIZES))
    if coarse < 1:
        raise InputError(f"A phantom's pixels can only be made coarser: coarse must be at least 1, not {coarse}.")
    if label not in {0, 1}:
        raise InputError(f"A phantom's label must be 0 or 1, not {label!r}.")
    if index < 0 or seed < 0:
        raise InputError(f"A phantom's index and seed must not be negative, not {index} and {seed}.")
    rng = np.random.default_rng([seed, index, label])
    anatomy = draw_anatomy(rng, label, difficulty)
    t2_grid, dwi_grid = _draw_grids(rng, coarse)
    off_centre = np.clip(rng.normal(size=3), -2.3, 2.3) * OFF_CENTRE_MM[1] + OFF_CENTRE_MM[0]
    centre = off_centre + image_centre(t2_grid)
    direction = rng.normal(size=3)
    shift = rng.uniform(0, MAX_DRAWN_SHIFT_MM) * direction / np.linalg.norm(direction)
    t2_canvas = Canvas(t2_grid, centre, ("density", "t2"))
    dwi_canvas = Canvas(dwi_grid, centre + shift, ("water", "t2", "adc"))
    zones = anatomy.paint(t2_canvas)
    anatomy.paint(dwi_canvas)
    distorted = {}
    if difficulty == "real":  # by a generator of its own: all else is that of the plain exam
        distorted = distort(np.random.default_rng([seed, index, label, 1]), dwi_canvas, anatomy)
    b_values = B_VALUES[int(rng.integers(len(B_VALUES)))]
    dwi = _diffusion(rng, dwi_canvas, b_values)
    adc, hbv = fit_maps(dwi)
    return PhantomStudy(
        t2=image_of(_t2_weighted(rng, t2_canvas), t2_grid),
        adc=adc,
        hbv=hbv,
        dwi=dwi,
        gland=image_of((zones > 0).astype(np.uint8), t2_grid),
        zones=image_of(zones, t2_grid),
        info={
            **anatomy.info(),
            "index": index,
            "label": label,
            "seed": seed,
            "shift_mm": [round(float(s), 3) for s in shift],
            "gland_centre_mm": [round(float(c), 3) for c in centre],
            **distorted,
        },
    )


def distort(rng: np.random.Generator, canvas: Canvas, anatomy: Anatomy) -> dict[str, float]:
    """What gas in the rectum does to echo-planar diffusion: signal is displaced front to back, and lost near the gas.

    What is seen at a point comes from a point behind or in front of it: by 2 to 8 mm at the gas, and by less away from
    it, exponentially over 6 to 12 mm. The field's Jacobian stretches the signal, or piles it up. Within 1 to 5 mm of
    the gas nothing is left. Without gas nothing changes.

    Args:
        rng: Draws sizes and direction.
        canvas: Painted maps of water, T2 and ADC, rows front to back; changed in place.
        anatomy: What was painted.

    Returns:
        ``distortion_mm`` (at the gas, signed) and ``void_mm``, 0 without gas.
    """
    most = float(rng.uniform(2, 8) * rng.choice([-1, 1]))
    reach, void = float(rng.uniform(6, 12)), float(rng.uniform(1, 5))
    gas = next((part for part in anatomy.pelvis if part.tissue == "gas"), None)
    if gas is None:
        return {"distortion_mm": 0.0, "void_mm": 0.0}
    distance = canvas.level(tuple(slice(0, count) for count in canvas.shape), gas)
    canvas.maps["water"] *= np.clip(distance - np.float32(void) + np.float32(0.5), 0.01, 1)
    field = np.float32(most) * np.exp(-np.maximum(distance, 0) / np.float32(reach))
    rows = field / np.float32(canvas.grid.GetSpacing()[1])
    places = np.indices(canvas.shape, dtype=np.float32)
    places[1] += rows
    for name, array in canvas.maps.items():
        canvas.maps[name] = ndimage.map_coordinates(array, places, order=1, mode="nearest")
    canvas.maps["water"] *= np.clip(1 + np.gradient(rows, axis=1), 0, 3)
    return {"distortion_mm": round(most, 3), "void_mm": round(void, 3)}


def _draw_grids(rng: np.random.Generator, coarse: float) -> tuple[sitk.Image, sitk.Image]:
    """Draw T2's and diffusion's grids: one slice orientation, centres within 1 mm, different fields of view."""
    tilt = np.radians(np.clip(rng.normal(0, (5, 2, 2)), -10, 10))
    direction = sitk.Euler3DTransform((0, 0, 0), *tilt.tolist()).GetMatrix()
    thickness = float(rng.choice([3.0, 3.0, 3.0, 3.3, 3.6]))
    slices = round(float(rng.uniform(66, 80)) / thickness)
    middle = rng.uniform(-30, 30, 3)
    grids = []
    t2 = tuple(coarse * spacing for spacing in (0.6, 0.65, 0.7, 0.75, 0.8))
    for spacings, fields in ((t2, (138, 154)), ((1.6, 1.8, 2.0), (150, 180))):
        spacing, field = float(rng.choice(spacings)), float(rng.uniform(*fields))
        count = 2 * round(field / spacing / 2)
        apart = middle + rng.uniform(-0.5, 0.5, 3)
        grids.append(empty_image((count, count, slices), (spacing, spacing, thickness), direction, apart))
    return grids[0], grids[1]


def _t2_weighted(rng: np.random.Generator, canvas: Canvas) -> NDArray[np.int16]:
    signal = canvas.maps["density"] * np.exp(np.float32(-T2_ECHO_MS) / canvas.maps["t2"])
    signal *= bias_field(rng, canvas.grid)
    noisy = rician(rng, signal, float(rng.uniform(0.015, 0.03)))
    return _int16(noisy * np.float32(600 * math.exp(rng.normal(0, 0.2))))


def _diffusion(rng: np.random.Generator, canvas: Canvas, b_values: Sequence[float]) -> dict[float, sitk.Image]:
    gain = 500 * math.exp(rng.normal(0, 0.2))
    still = canvas.maps["water"] * np.exp(np.float32(-DWI_ECHO_MS) / canvas.maps["t2"])
    still *= np.float32(gain) * bias_field(rng, canvas.grid)
    noise = gain * float(rng.uniform(0.008, 0.014))
    decayed = {b: still * np.exp(np.float32(-1e-6 * b) * canvas.maps["adc"]) for b in b_values}
    return {b: image_of(_int16(rician(rng, signal, noise)), canvas.grid) for b, signal in decayed.items()}


def fit_maps(dwi: dict[float, sitk.Image]) -> tuple[sitk.Image, sitk.Image]:
    """What a scanner derives from its diffusion images: the ADC and the image calculated for ``HIGH_B``, both int16.

    Both are 0 where the lowest b-value shows no more than three times what a corner does, which is mostly noise.

    Args:
        dwi: Images by b-value in s/mm2, at least two.

    Returns:
        ADC in 1e-6 mm2/s, at most 4000; the calculated image in the units of ``dwi``.
    """
    signals = {b: sitk.GetArrayViewFromImage(image).astype(np.float32) for b, image in dwi.items()}
    lowest = signals[min(dwi)]
    seen = lowest > 3 * lowest[:, :8, :8].mean()
    adc = np.minimum(sitk.GetArrayFromImage(fit_adc(dwi)), 4000) * seen
    logs = sum(np.log(np.maximum(signal, 1)) - np.float32((HIGH_B - b) * 1e-6) * adc for b, signal in signals.items())
    grid = dwi[min(dwi)]
    return image_of(_int16(adc), grid), image_of(_int16(np.exp(logs / len(dwi)) * seen), grid)


def rician(rng: np.random.Generator, signal: Array, sigma: float) -> Array:
    """The magnitude of a complex signal with Gaussian noise ``sigma`` in both channels (Rician noise)."""
    real, imaginary = rng.standard_normal((2, *signal.shape), dtype=np.float32)
    real *= np.float32(sigma)
    real += signal
    imaginary *= np.float32(sigma)
    np.square(real, out=real)
    np.square(imaginary, out=imaginary)
    real += imaginary
    magnitude: Array = np.sqrt(real, out=real)
    return magnitude


def bias_field(rng: np.random.Generator, grid: sitk.Image) -> Array:
    """A smooth coil sensitivity, about +-20 % over the field of view: exponential of a quadratic along each axis."""
    factors = []
    for count, spacing in zip(grid.GetSize(), grid.GetSpacing(), strict=True):
        along = (np.arange(count) - (count - 1) / 2) * spacing / 75
        factors.append(np.exp(rng.normal(0, 0.08) * along + rng.normal(0, 0.06) * along**2).astype(np.float32))
    product: Array = factors[2][:, None, None] * (factors[1][:, None] * factors[0])
    return product


def _int16(array: Array) -> NDArray[np.int16]:
    rounded: NDArray[np.int16] = np.rint(array).astype(np.int16)
    return rounded


def image_of(array: NDArray[Any], grid: sitk.Image) -> sitk.Image:
    """An image with ``array`` (slices, rows, columns) as voxels and the geometry of ``grid``."""
    image = sitk.GetImageFromArray(array)
    image.CopyInformation(grid)
    return image
