"""The anatomy of a synthetic prostate exam: a pelvis of ellipsoids with a two-zone gland, nodules and lesions.

Organs are painted one over the other on a canvas. The same anatomy is painted on T2's and on diffusion's grid, so that
the two agree in every point.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from scipy import ndimage

from mri_alm.phantom.canvas import TISSUES, Array, Canvas, Ellipsoid, Lesion, Vector, vector

MIXTURE: tuple[tuple[str, int, int, float], ...] = (
    ("nothing", 0, 0, 0.22),
    ("clear cancer", 2, 2, 0.06),
    ("T2 only, equivocal", 1, 0, 0.34),
    ("T2 only, clear", 2, 0, 0.02),
    ("diffusion only, equivocal", 0, 1, 0.34),
    ("diffusion only, clear", 0, 2, 0.02),
)
"""Negatives: name, grade on T2, grade on diffusion (0 none, 1 equivocal, 2 clear), share."""
GRADE_STRENGTH = ((0.0, 0.0), (0.5, 0.9), (1.0, 1.1))
"""How far a lesion of each grade lies between its zone (0) and ``CANCER`` (1): lowest and highest."""

LESION_SIZES = {"plain": (15.0, 0.3, 1.65), "real": (12.6, 0.45, 2.05)}
"""Of each difficulty: median of a lesion's equivalent diameter in mm, spread of its logarithm, and how many spreads it
lies from the median at most: 9 to 25 mm, 5 to 32 mm. 12.6 mm is the median of 1,500 public exams; a spread of 0.45 lets
23 % of the lesions be smaller than 9 mm."""

INFLAMED_T2 = 85.0
"""T2 in ms of a peripheral zone that is dark as a whole, as in inflammation."""
PERIPHERAL_CHANGE = ((0.0, 0.4), (0.4, 1.0))
"""How dark the peripheral zone is (0 healthy, 1 ``INFLAMED_T2``) without and with an equivocal finding on T2."""

TEXTURE = {"t2": 0.10, "adc": 0.06}
"""Standard deviation of the gland's T2 and ADC around their zone's value, as a share of it; half as much in fat."""

_POWER = 2.4  # of the gland's superellipsoid: between an ellipsoid (2) and a box
_UNIT_VOLUME = 8 * math.gamma(1 + 1 / _POWER) ** 3 / math.gamma(1 + 3 / _POWER)


@dataclass(frozen=True)
class Anatomy:
    """A pelvis with its prostate; lengths in mm from the gland's centre.

    Attributes:
        radii: The gland's half-axes: sideways, front to back, head to feet.
        bend: How far the gland's sides lie behind its middle, as a share of the front-to-back half-axis.
        transition_share: Share of the gland's volume in the transition zone.
        peripheral_t2: T2 of the peripheral zone in ms.
        pelvis: Everything outside the gland, in painting order.
        nodules: Nodules of the transition zone and the anterior stroma.
        lesions: Lesions, painted last.
        kind: The study's kind, as in ``MIXTURE`` or ``"equivocal on both"``.
        grades: Grade on T2 and on diffusion: 0 none, 1 equivocal, 2 clear.
        texture: White noise on a 3 mm lattice, the seed of all tissue texture.
    """

    radii: Vector
    bend: float
    transition_share: float
    peripheral_t2: float
    pelvis: tuple[Ellipsoid, ...]
    nodules: tuple[Ellipsoid, ...]
    lesions: tuple[Lesion, ...]
    kind: str
    grades: tuple[int, int]
    texture: sitk.Image = field(repr=False)

    def gland_norm(self, points: Sequence[Array]) -> Array:
        """Below 1 inside the gland, 1 on its surface: a superellipsoid, bent to a crescent and tapered to its apex."""
        x, y, z = (p / np.float32(r) for p, r in zip(points, self.radii, strict=True))
        x = np.abs(x / (1 + 0.12 * np.clip(z, -1, 1)))
        y = np.abs(y - self.bend * (x**2 - 0.25))
        total: Array = x**_POWER + y**_POWER + np.abs(z) ** _POWER
        return total ** np.float32(1 / _POWER)

    def transition_norm(self, points: Sequence[Array]) -> Array:
        """Grows outwards from the middle of the transition zone, which lies in front of and above the gland's."""
        a, b, c = self.radii
        x, y, z = points
        total: Array = (x / (0.8 * a)) ** 2 + ((y + 0.32 * b) / (0.8 * b)) ** 2 + ((z - 0.1 * c) / c) ** 2
        return np.sqrt(total)

    def paint(self, canvas: Canvas) -> NDArray[np.uint8]:
        """Paint everything; gives the zones (1 peripheral, 2 transition) on the canvas' grid."""
        canvas.set_texture(self.texture)
        for name, strength in TEXTURE.items():
            if name in canvas.maps:
                canvas.maps[name] *= 1 + np.float32(strength / 2) * canvas.texture
        for part in self.pelvis:
            canvas.ellipsoid(part, ripple=0.6 if part.tissue in {"vesicle", "vein", "stool"} else 0.0)
        zones = self._paint_gland(canvas)
        for part in self.nodules:
            canvas.ellipsoid(part, ripple=0.5)
        for lesion in self.lesions:
            canvas.lesion(lesion)
        return zones

    def _paint_gland(self, canvas: Canvas) -> NDArray[np.uint8]:
        window = canvas.window((0, 0, 0), np.array(self.radii) * (1.15, 1.25, 1.05) + 3)
        points = canvas.coordinates(window, (0, 0, 0), np.eye(3))
        gland = self.gland_norm(points)
        surface = (gland - 1) * np.float32(min(self.radii))
        edge = _transition_edge(self)
        inner = (self.transition_norm(points) - edge) * np.float32(0.75 * min(self.radii))
        inner = np.maximum(inner, surface)
        canvas.fill(window, surface - 0.3, TISSUES["capsule"])
        canvas.fill(window, surface + 0.3, TISSUES["peripheral"] | {"t2": self.peripheral_t2})
        canvas.fill(window, np.maximum(inner, surface + 0.3) - 0.2, TISSUES["capsule"])
        canvas.fill(window, inner + 0.5, TISSUES["transition"])
        variation = np.clip(0.5 - surface, 0, 1) * canvas.texture[window]
        for name, strength in TEXTURE.items():
            if name in canvas.maps:
                canvas.maps[name][window] *= 1 + np.float32(strength) * variation
        zones = np.zeros(canvas.shape, np.uint8)
        zones[window] = np.where(surface < 0, np.where(inner < 0, 2, 1), 0)
        return zones

    def info(self) -> dict[str, Any]:
        """The truth in JSON types."""
        return {
            "kind": self.kind,
            "t2_grade": self.grades[0],
            "diffusion_grade": self.grades[1],
            "gland_ml": round(_UNIT_VOLUME * math.prod(self.radii) / 1000, 2),
            "transition_share": round(self.transition_share, 3),
            "lesions": [
                {"centre_mm": [round(c, 2) for c in lesion.centre], "diameter_mm": round(lesion.diameter, 2)}
                for lesion in self.lesions
            ],
        }


def _transition_edge(anatomy: Anatomy) -> float:
    """The ``transition_norm`` that encloses the wanted share of the gland."""
    points = np.meshgrid(*(np.arange(-1.2 * r, 1.2 * r, r / 12, dtype=np.float32) for r in anatomy.radii))
    inside = anatomy.gland_norm(points) < 1
    return float(np.quantile(anatomy.transition_norm(points)[inside], anatomy.transition_share))


def draw_anatomy(rng: np.random.Generator, label: int, difficulty: str = "plain") -> Anatomy:
    """Draw a pelvis with the sizes, zones and lesion sites of the statistics; ``label`` 1 gets an equivocal lesion.

    ``difficulty`` chooses the lesions' sizes (:data:`LESION_SIZES`); all else is the same for equal generators.
    """
    peripheral = 17.5 * math.exp(np.clip(rng.normal(), -2.3, 2.3) * 0.31)
    transition = 32.0 * math.exp(np.clip(rng.normal(), -2.3, 2.3) * 0.63)
    volume = peripheral + transition
    shape = (volume / 51) ** np.array([0.28, 0.38, 0.33]) * (25, 20, 21.5) * np.exp(rng.normal(0, 0.05, 3))
    radii = shape * (1000 * volume / (_UNIT_VOLUME * math.prod(shape))) ** (1 / 3)
    bend = float(rng.uniform(0.05, 0.25))
    kind, grades = draw_grades(rng, label)
    size = vector(radii)
    healthy, changed = TISSUES["peripheral"]["t2"], float(rng.uniform(*PERIPHERAL_CHANGE[grades[0] == 1]))
    frame = Anatomy(
        radii=size,
        bend=bend,
        transition_share=transition / volume,
        peripheral_t2=healthy + changed * (INFLAMED_T2 - healthy),
        pelvis=_draw_pelvis(rng, size),
        nodules=_draw_nodules(rng, size),
        lesions=(),
        kind=kind,
        grades=grades,
        texture=_draw_texture(rng),
    )
    count = 0 if grades == (0, 0) else 1 + int(rng.random() < 0.08)
    sizes = LESION_SIZES[difficulty]
    return replace(frame, lesions=tuple(_draw_lesion(rng, _draw_site(rng, frame), grades, sizes) for _ in range(count)))


def draw_grades(rng: np.random.Generator, label: int) -> tuple[str, tuple[int, int]]:
    """Draw a study's kind and its lesion's grades on T2 and diffusion; see ``MIXTURE``."""
    if label:
        return "equivocal on both", (1, 1)
    kind, t2, diffusion, _ = MIXTURE[int(rng.choice(len(MIXTURE), p=[share for *_, share in MIXTURE]))]
    return kind, (t2, diffusion)


def _draw_lesion(rng: np.random.Generator, site: Vector, grades: tuple[int, int], sizes: Vector) -> Lesion:
    """Draw a lesion's size (see :data:`LESION_SIZES`), form and strengths around ``site``."""
    median, spread, most = sizes
    diameter = median * math.exp(np.clip(rng.normal(), -most, most) * spread)
    form = np.exp(rng.normal(0, 0.15, 3))
    radii = diameter / 2 * form / math.prod(form) ** (1 / 3)
    t2, adc = (float(rng.uniform(*GRADE_STRENGTH[grade])) for grade in grades)
    return Lesion(site, vector(radii), t2, adc)


def _draw_site(rng: np.random.Generator, anatomy: Anatomy) -> Vector:
    """Draw where a lesion's centre lies inside the gland; scaled to its box: |x| 0.45 median, y +0.25, z 0."""
    while True:
        place = rng.normal((0.5, 0.4, 0), (0.25, 0.55, 0.5)) * (rng.choice([-1, 1]), 1, 1) * anatomy.radii
        if anatomy.gland_norm([np.array([c], np.float32) for c in place])[0] < 0.85:
            return vector(place)


def _draw_pelvis(rng: np.random.Generator, radii: Vector) -> tuple[Ellipsoid, ...]:
    a, b, c = radii
    wall, tube = rng.uniform(2.5, 4.0), rng.uniform((13, 10), (22, 17))
    bladder = rng.uniform((28, 20, 20), (40, 32, 28))
    above = (float(rng.normal(0, 3)), -0.35 * b - 4, c + 0.72 * float(bladder[2]))
    lean = float(rng.uniform(-0.45, -0.15))
    behind = (float(rng.normal(0, 4)), b * 1.04 + wall + float(tube[1]) + 1.5, 0.0)
    content = "gas" if rng.random() < 0.5 else "stool"
    parts = []
    for side in (-1, 1):
        flank = side * (a + float(rng.uniform(19, 23)))
        parts += [
            Ellipsoid("cortex", (flank + side * 31, -6, 6), (25, 34, 44)),
            Ellipsoid("marrow", (flank + side * 31, -6, 6), (23, 32, 42)),
            Ellipsoid("muscle", (flank + side * 2, 8, -4), (10, 56, 48), tilt=(side * 0.16, 0)),
            Ellipsoid("cortex", (side * 20, -b - 27, -0.6 * c), (17, 11, 18)),
            Ellipsoid("marrow", (side * 20, -b - 27, -0.6 * c), (15.5, 9.5, 16.5)),
            Ellipsoid("muscle", (side * 30, -b - 44, 8), (26, 7, 60)),
            Ellipsoid("muscle", (side * (0.95 * a + 7), 12, -0.9 * c), (3.5, 30, 1.2 * c), tilt=(side * -0.12, 0)),
            Ellipsoid("vesicle", (side * 15, 0.75 * b, c + 5), (15, 6, 7)),
        ]
    parts += [_draw_vessel(rng, radii) for _ in range(18)]
    pipe = (float(tube[0]), float(tube[1]), 75.0)
    return (
        *parts,
        Ellipsoid("muscle", (0, -0.2 * b, -c - 9), (12, 11, 13)),
        Ellipsoid("wall", above, vector(bladder + wall)),
        Ellipsoid("urine", above, vector(bladder)),
        Ellipsoid("wall", behind, (pipe[0] + wall, pipe[1] + wall, 78.0), tilt=(0, lean)),
        Ellipsoid(content, behind, pipe, tilt=(0, lean)),
    )


def _draw_vessel(rng: np.random.Generator, radii: Vector) -> Ellipsoid:
    """A vein in the fat close around the gland."""
    turn, away = rng.uniform(0, 2 * math.pi), rng.uniform(1.12, 1.4)
    a, b, c = radii
    centre = (a * away * math.cos(turn), b * (away + 0.05) * math.sin(turn), c * float(rng.uniform(-0.8, 0.9)))
    half = vector(rng.uniform((1.2, 1.2, 4), (3.0, 2.5, 12)))
    return Ellipsoid("vein", centre, half, tilt=(0, float(rng.uniform(-0.5, 0.5))))


def _draw_nodules(rng: np.random.Generator, radii: Vector) -> tuple[Ellipsoid, ...]:
    a, b, c = radii
    nodules = [Ellipsoid("stroma", (0, -0.86 * b, 0), (0.45 * a, 0.13 * b, 0.7 * c))]
    for _ in range(int(rng.integers(3, 9))):
        side = 1 if rng.random() < 0.5 else -1
        place = rng.uniform((0.15, -0.65, -0.35), (0.45, 0.1, 0.55)) * radii
        centre = (side * float(place[0]), float(place[1]), float(place[2]))
        half = rng.uniform(0.09, 0.24) * a * np.exp(rng.normal(0, 0.15, 3))
        tissue = "stromal nodule" if rng.random() < 0.4 else "glandular nodule"
        nodules += [Ellipsoid("capsule", centre, vector(half + 0.7)), Ellipsoid(tissue, centre, vector(half))]
    return (*nodules, Ellipsoid("glandular nodule", (0, -0.1 * b, 0.1 * c), (2.0, 2.5, 0.7 * c), tilt=(0, -0.2)))


def _draw_texture(rng: np.random.Generator) -> sitk.Image:
    """Fine and slow noise of standard deviation 1 on a 3 mm lattice around 0."""
    white = rng.standard_normal((44, 64, 64), dtype=np.float32)
    fine, slow = (ndimage.gaussian_filter(white, sigma, mode="wrap") for sigma in (0.5, 2.0))
    image = sitk.GetImageFromArray((0.8 * fine / fine.std() + 0.6 * slow / slow.std()).astype(np.float32))
    image.SetSpacing((3.0, 3.0, 3.0))
    image.SetOrigin((-96.0, -96.0, -66.0))
    return image
