"""The canvas of the phantom: tissues and shapes -> maps of proton density, T2 and ADC on the voxels of one image."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float32]
Vector = tuple[float, float, float]


def vector(numbers: Iterable[float]) -> Vector:
    """Three numbers of any kind as Python's own."""
    x, y, z = map(float, numbers)
    return x, y, z


# density: signal of T2-weighted images before T2 decay; water: the same for fat-suppressed diffusion;
# t2 in ms; adc in 1e-6 mm2/s. Order of magnitude as at 3 T.
TISSUES: dict[str, dict[str, float]] = {
    "fat": {"density": 1.09, "water": 0.04, "t2": 100, "adc": 1300},
    "muscle": {"density": 0.75, "water": 0.75, "t2": 40, "adc": 1350},
    "marrow": {"density": 0.60, "water": 0.12, "t2": 90, "adc": 500},
    "cortex": {"density": 0.10, "water": 0.05, "t2": 40, "adc": 600},
    "urine": {"density": 0.55, "water": 1.00, "t2": 550, "adc": 2900},
    "vesicle": {"density": 0.75, "water": 0.90, "t2": 190, "adc": 1800},
    "wall": {"density": 0.80, "water": 0.70, "t2": 62, "adc": 1250},
    "gas": {"density": 0.02, "water": 0.02, "t2": 40, "adc": 1000},
    "stool": {"density": 0.60, "water": 0.30, "t2": 70, "adc": 1300},
    "vein": {"density": 0.70, "water": 0.70, "t2": 220, "adc": 1900},
    "capsule": {"density": 0.80, "water": 0.75, "t2": 55, "adc": 1200},
    "peripheral": {"density": 1.10, "water": 0.95, "t2": 165, "adc": 1600},
    "transition": {"density": 0.95, "water": 0.90, "t2": 112, "adc": 1300},
    "stroma": {"density": 0.85, "water": 0.80, "t2": 80, "adc": 1150},
    "stromal nodule": {"density": 0.95, "water": 0.90, "t2": 88, "adc": 1180},
    "glandular nodule": {"density": 1.00, "water": 0.95, "t2": 125, "adc": 1550},
}
CANCER = {"t2": 65.0, "adc": 550.0}
"""T2 in ms and ADC in 1e-6 mm2/s of a lesion that is clear on T2 and on diffusion."""


@dataclass(frozen=True)
class Ellipsoid:
    """An ellipsoid of one tissue: centre and half-axes in mm from the gland's centre.

    ``tilt`` shears it: x moves by ``tilt[0]`` per mm of y, and y by ``tilt[1]`` per mm of z.
    """

    tissue: str
    centre: Vector
    radii: Vector
    tilt: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Lesion:
    """An ellipsoid in which T2 and ADC move from their zone's values towards ``CANCER``, each by its own strength."""

    centre: Vector
    radii: Vector
    t2_strength: float
    adc_strength: float

    @property
    def diameter(self) -> float:
        """Diameter in mm of the sphere of equal volume."""
        return 2.0 * math.prod(self.radii) ** (1 / 3)


class Canvas:
    """Tissue maps on the voxels of one image.

    Args:
        grid: The image whose voxels are painted; only its geometry is used.
        centre: The gland's centre in LPS mm.
        names: The tissue properties to paint, keys of ``TISSUES``' values.
    """

    def __init__(self, grid: sitk.Image, centre: NDArray[np.float64], names: Sequence[str]) -> None:
        self.grid, self.centre = grid, centre
        self._axes = np.array(grid.GetDirection()).reshape(3, 3) * grid.GetSpacing()
        self._start = np.array(grid.GetOrigin()) - centre
        self.shape = grid.GetSize()[::-1]
        self.maps: dict[str, Array] = {name: np.full(self.shape, TISSUES["fat"][name], np.float32) for name in names}
        self.texture: Array = np.zeros(self.shape, np.float32)

    def set_texture(self, lattice: sitk.Image) -> None:
        """Give the canvas its tissue texture: noise around 0 on a lattice that is centred on the gland."""
        lattice = sitk.Image(lattice)
        lattice.SetOrigin((np.array(lattice.GetOrigin()) + self.centre).tolist())
        self.texture = sitk.GetArrayFromImage(sitk.Resample(lattice, self.grid, sitk.Transform(), sitk.sitkLinear))

    def window(self, centre: ArrayLike, reach: ArrayLike) -> tuple[slice, ...]:
        """Voxels of the smallest index box around the box ``centre`` +- ``reach`` (mm from the gland's centre)."""
        to_index = np.linalg.inv(self._axes)
        middle = to_index @ (np.array(centre) - self._start)
        half = np.abs(to_index) @ np.array(reach)
        low, high = np.floor(middle - half), np.ceil(middle + half) + 1
        return tuple(
            slice(int(max(a, 0)), int(np.clip(b, 0, n)))
            for a, b, n in zip(low[::-1], high[::-1], self.shape, strict=True)
        )

    def coordinates(self, window: tuple[slice, ...], centre: ArrayLike, matrix: ArrayLike) -> list[Array]:
        """Where the voxels of a window lie: ``matrix`` (3, 3) times their offset in mm from ``centre``."""
        k, j, i = np.ogrid[window]
        steps = np.array(matrix) @ self._axes
        start = np.array(matrix) @ (self._start - np.array(centre))
        # Voxel positions are linear in the index, so one full-size addition per coordinate is enough.
        return [
            (start[a] + steps[a, 2] * k + steps[a, 1] * j).astype(np.float32) + (steps[a, 0] * i).astype(np.float32)
            for a in range(3)
        ]

    def fill(self, window: tuple[slice, ...], level: Array, values: Mapping[str, float]) -> None:
        """Paint ``values`` where ``level``, a signed distance in mm on ``window``, is negative; edges are 1 mm wide."""
        share = np.clip(np.float32(0.5) - level, 0, 1)
        for name, array in self.maps.items():
            array[window] += share * (np.float32(values[name]) - array[window])

    def ellipsoid(self, part: Ellipsoid, ripple: float = 0.0) -> None:
        """Paint one part; ``ripple`` is how many mm the texture moves its surface."""
        reach = np.array(part.radii) + 1 + 3 * ripple
        reach[1] += abs(part.tilt[1]) * reach[2]
        reach[0] += abs(part.tilt[0]) * reach[1]
        window = self.window(part.centre, reach)
        self.fill(window, self.level(window, part, ripple), TISSUES[part.tissue])

    def level(self, window: tuple[slice, ...], part: Ellipsoid, ripple: float = 0.0) -> Array:
        """About the signed distance in mm to a part's surface: negative inside, exact along the shortest half-axis."""
        shear = [[1, -part.tilt[0], part.tilt[0] * part.tilt[1]], [0, 1, -part.tilt[1]], [0, 0, 1]]
        x, y, z = self.coordinates(window, part.centre, np.array(shear) / np.array(part.radii)[:, None])
        level: Array = np.sqrt(x * x + y * y + z * z)
        level -= 1
        level *= np.float32(min(part.radii))
        if ripple:
            level += np.float32(ripple) * self.texture[window]
        return level

    def lesion(self, lesion: Lesion) -> None:
        """Move T2 and ADC towards ``CANCER`` inside a lesion; its edge is uneven and 2 mm wide."""
        window = self.window(lesion.centre, np.array(lesion.radii) + 4)
        level = self.level(window, Ellipsoid("lesion", lesion.centre, lesion.radii), ripple=1.0)
        share = np.clip(np.float32(0.5) - np.float32(0.5) * level, 0, 1)
        for name, strength in (("t2", lesion.t2_strength), ("adc", lesion.adc_strength)):
            if name in self.maps:
                part = self.maps[name][window]
                part += np.float32(strength) * share * (np.float32(CANCER[name]) - part)
