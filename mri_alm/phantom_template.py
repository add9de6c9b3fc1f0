"""Phantom lesions in real exams: each study is a randomly warped template with lesions implanted into its gland.

Few templates make many studies, so training and test studies share templates: such a cohort shows that the whole job
runs on real anatomy, and says nothing about patients. A template's own lesions stay where they are.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray

from mri_alm.dicom import find_studies, read_study
from mri_alm.errors import InputError
from mri_alm.phantom import DWI_ECHO_MS, MAX_SHIFT_MM, T2_ECHO_MS, PhantomStudy, bias_field, image_of, make_grid
from mri_alm.phantom_anatomy import INFLAMED_T2, draw_grades, draw_lesion, draw_peripheral_change, draw_texture
from mri_alm.phantom_canvas import CANCER, TISSUES, Array, Canvas, Lesion, Vector
from mri_alm.phantom_io import Row, plan_cohort, write_cohort
from mri_alm.registration import image_centre, register_rigid

VERSION = 1
FIELD_MM, SPACING_MM = 144.0, 0.65
"""T2 of the new studies: field of view and smallest pixel in plane; the slices are the template's."""
ASSUMED_B = 1000.0
"""The b-value taken for a template's high-b image in s/mm2, where its effect on a lesion is worked out."""
_ZONES = ("peripheral", "transition")


@dataclass(frozen=True)
class Template:
    """A real exam: T2, ADC in 1e-6 mm2/s, high-b, zones on T2's grid (1 peripheral, 2 transition, else 0).

    ``to_diffusion`` takes T2's points to the diffusion's.
    """

    t2: sitk.Image
    adc: sitk.Image
    hbv: sitk.Image
    zones: sitk.Image
    to_diffusion: sitk.Transform


def make_template_cohort(
    folder: Path,
    templates: Path,
    *,
    masks: Path | None = None,
    train: int,
    test: int,
    ratio: int = 8,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a NIfTI cohort made of real exams; arguments and result as :func:`mri_alm.phantom_io.make_cohort`.

    Args:
        folder: The cohort's folder.
        templates: A folder with one sub-folder per exam; see :func:`read_template`.
        masks: A folder with ``NAME_gland.nii.gz`` and ``NAME_zones.nii.gz`` by sub-folder name, where there are any.
        train: Number of training studies.
        test: Number of test studies.
        ratio: Negatives per positive.
        seed: Another seed, another cohort.
        progress: Called with the number of studies done and their total.

    Raises:
        InputError: If there is no template, or one cannot be read.
    """
    places = sorted(place for place in templates.iterdir() if place.is_dir()) if templates.is_dir() else []
    if not places:
        raise InputError(f"{templates} holds no sub-folder with an exam. Give a folder with one sub-folder per exam.")
    rows = plan_cohort(train, test, ratio, seed)
    exams = [read_template(place, masks) for place in places]
    digest = hashlib.sha256(b"".join(sitk.GetArrayViewFromImage(exam.t2).tobytes() for exam in exams)).hexdigest()
    parameters = {"version": VERSION, "train": train, "test": test, "ratio": ratio, "seed": seed, "form": "nifti"}

    def make(row: Row) -> PhantomStudy:
        return implant(exams, row, seed=seed)

    return write_cohort(folder, rows, make, parameters={**parameters, "templates": digest}, progress=progress)


def read_template(folder: Path, masks: Path | None = None) -> Template:
    """Read one exam and register its diffusion to its T2.

    The folder holds ``t2.nii.gz``, ``adc.nii.gz`` and ``hbv.nii.gz``, or a DICOM study; ``zones.nii.gz`` or
    ``gland.nii.gz`` beside them (or in ``masks``) tell the zones. Without any, a median gland at the field's centre is
    taken to be transition zone.

    Raises:
        InputError: If there is neither, or the DICOM study cannot be used.
    """
    nifti = [folder / f"{name}.nii.gz" for name in ("t2", "adc", "hbv")]
    if all(file.exists() for file in nifti):
        t2, adc, hbv = (sitk.ReadImage(file, sitk.sitkFloat32) for file in nifti)
    else:
        studies = [study for study in find_studies(folder) if study.files]
        if len(studies) != 1:
            raise InputError(
                f"{folder} holds {len(studies)} DICOM studies. A template needs one, or t2, adc and hbv.nii.gz."
            )
        study = read_study(studies[0])
        t2, adc, hbv = study.t2, study.adc, study.hbv
    return Template(t2, adc, hbv, _zones(t2, folder, masks), register_rigid(t2, adc).transform)


def _zones(t2: sitk.Image, folder: Path, masks: Path | None) -> sitk.Image:
    for name in ("zones", "gland"):
        places = [folder / f"{name}.nii.gz", *([masks / f"{folder.name}_{name}.nii.gz"] if masks else [])]
        for file in places:
            if file.exists():
                mask = sitk.Resample(
                    sitk.ReadImage(file, sitk.sitkUInt8), t2, sitk.Transform(), sitk.sitkNearestNeighbor
                )
                return mask if name == "zones" else mask * 2
    canvas = Canvas(t2, np.array(image_centre(t2)), ())
    everywhere = tuple(slice(n) for n in canvas.shape)
    x, y, z = canvas.coordinates(everywhere, (0, 0, 0), np.diag((1 / 22, 1 / 17, 1 / 19)))
    return image_of((x * x + y * y + z * z < 1).astype(np.uint8) * 2, t2)


def implant(templates: list[Template], row: Row, *, seed: int = 0) -> PhantomStudy:
    """Make one study: a template, warped, with the lesions of a phantom; equal arguments give equal voxels.

    Args:
        templates: From :func:`read_template`.
        row: The study's number and label.
        seed: The cohort's seed.
    """
    rng = np.random.default_rng([seed, row.index, row.label])
    number = int(rng.integers(len(templates)))
    template = templates[number]
    warp = _draw_warp(rng, template.t2)
    direction = rng.normal(size=3)
    shift = rng.uniform(0, MAX_SHIFT_MM) * direction / np.linalg.norm(direction)
    moved = sitk.CompositeTransform([template.to_diffusion, warp, sitk.TranslationTransform(3, (-shift).tolist())])
    grid = _t2_grid(template.t2)
    zones = sitk.Resample(template.zones, grid, warp, sitk.sitkNearestNeighbor)
    t2 = sitk.GetArrayFromImage(sitk.Resample(template.t2, grid, warp, sitk.sitkLinear)).astype(np.float32)
    adc, hbv = (
        sitk.GetArrayFromImage(sitk.Resample(image, image, moved, sitk.sitkLinear)).astype(np.float32)
        for image in (template.adc, template.hbv)
    )
    kind, grades = draw_grades(rng, row.label)
    texture = draw_texture(rng)
    _darken_peripheral(t2, hbv, (zones, template.hbv, shift), draw_peripheral_change(rng, grades[0]))
    lesions = []
    for _ in range(0 if grades == (0, 0) else 1):
        site, zone = _draw_site(rng, zones)
        lesion = draw_lesion(rng, site, grades)
        _implant_t2(t2, _share(grid, np.zeros(3), lesion, texture), lesion, zone)
        _implant_diffusion(adc, hbv, _share(template.adc, shift, lesion, texture), lesion, zone)
        lesions.append(
            {"centre_mm": [round(c, 2) for c in site], "diameter_mm": round(lesion.diameter, 2), "zone": zone}
        )
    info = {"kind": kind, "t2_grade": grades[0], "diffusion_grade": grades[1], "lesions": lesions, "template": number}
    return PhantomStudy(
        t2=_finish(rng, t2, grid),
        adc=image_of(np.rint(np.clip(adc * rng.uniform(0.96, 1.04), 0, 4000)).astype(np.int16), template.adc),
        hbv=_finish(rng, hbv, template.hbv),
        dwi={},
        gland=zones > 0,
        zones=zones,
        info={
            **info,
            "index": row.index,
            "label": row.label,
            "seed": seed,
            "shift_mm": [round(float(s), 3) for s in shift],
        },
    )


def _draw_warp(rng: np.random.Generator, t2: sitk.Image) -> sitk.Transform:
    """A random smooth deformation (knots 30 to 50 mm apart, 2.5 mm) after a small turn, shift and mirroring."""
    smooth = sitk.BSplineTransformInitializer(t2, [4, 4, 2], 3)
    smooth.SetParameters(rng.normal(0, 2.5, len(smooth.GetParameters())).tolist())
    rigid = sitk.AffineTransform(3)
    angle = math.radians(float(np.clip(rng.normal(0, 3), -6, 6)))
    rigid.Rotate(0, 1, angle)
    rigid.Scale([float(rng.choice([-1, 1])) * float(rng.uniform(0.94, 1.06)), *rng.uniform(0.94, 1.06, 2).tolist()])
    rigid.SetTranslation(np.clip(rng.normal(0, (2, 3, 2)), -6, 6).tolist())
    rigid.SetCenter(image_centre(t2))
    # Sampled once on a coarse grid: evaluating the spline in every voxel takes most of the time otherwise.
    coarse = _box(t2, spacing=4.0)
    field = sitk.TransformToDisplacementField(
        sitk.CompositeTransform([smooth, rigid]),
        sitk.sitkVectorFloat64,
        coarse.GetSize(),
        coarse.GetOrigin(),
        coarse.GetSpacing(),
        coarse.GetDirection(),
    )
    return sitk.DisplacementFieldTransform(field)


def _box(image: sitk.Image, spacing: float, margin: float = 48.0) -> sitk.Image:
    """An empty grid around an image's field of view."""
    extent = np.array(image.GetSize()) * image.GetSpacing() + 2 * margin
    return make_grid(
        tuple(int(n) for n in np.ceil(extent / spacing)),
        (spacing,) * 3,
        image.GetDirection(),
        np.array(image_centre(image)),
    )


def _t2_grid(t2: sitk.Image) -> sitk.Image:
    """The central field of T2's slices, with pixels no smaller than ``SPACING_MM``."""
    pixel = max(t2.GetSpacing()[0], SPACING_MM)
    count = int(min(FIELD_MM, t2.GetSize()[0] * t2.GetSpacing()[0], t2.GetSize()[1] * t2.GetSpacing()[1]) / pixel)
    size, spacing = (count, count, t2.GetSize()[2]), (pixel, pixel, t2.GetSpacing()[2])
    return make_grid(size, spacing, t2.GetDirection(), np.array(image_centre(t2)))


def _draw_site(rng: np.random.Generator, zones: sitk.Image) -> tuple[Vector, str]:
    """Draw a lesion's centre, at least 3 mm inside the gland, with even chances for either zone, in LPS mm."""
    mask = sitk.GetArrayFromImage(zones)
    depth = sitk.SignedMaurerDistanceMap(zones > 0, insideIsPositive=True, squaredDistance=False, useImageSpacing=True)
    inside = sitk.GetArrayViewFromImage(depth) >= 3
    choices = [np.argwhere(inside & (mask == number)) for number in (1, 2)]
    zone = int(rng.integers(2))
    if not len(choices[zone]):
        zone = 1 - zone
    place = choices[zone][int(rng.integers(len(choices[zone])))]
    x, y, z = zones.TransformIndexToPhysicalPoint([int(n) for n in place[::-1]])
    return (x, y, z), _ZONES[zone]


def _share(grid: sitk.Image, shift: NDArray[np.float64], lesion: Lesion, texture: sitk.Image) -> Array:
    """How much of each voxel of a grid the lesion fills, 0 to 1."""
    canvas = Canvas(grid, np.array(lesion.centre) + shift, ())
    canvas.set_texture(texture)
    share: Array = np.zeros(canvas.shape, np.float32)
    window, part = canvas.lesion_share(replace(lesion, centre=(0.0, 0.0, 0.0)))
    share[window] = part
    return share


def _darken_peripheral(
    t2: Array, hbv: Array, where: tuple[sitk.Image, sitk.Image, NDArray[np.float64]], change: float
) -> None:
    """Darken the peripheral zone by ``change``; ``where``: zones on T2's grid, diffusion's grid and its shift."""
    zones, grid, shift = where
    share = sitk.SmoothingRecursiveGaussian(sitk.Cast(zones == 1, sitk.sitkFloat32), 1.0)
    moved = sitk.Resample(share, grid, sitk.TranslationTransform(3, (-shift).tolist()), sitk.sitkLinear)
    rate = _rate("peripheral", INFLAMED_T2, change)
    t2 *= np.exp(np.float32(-T2_ECHO_MS * rate) * sitk.GetArrayViewFromImage(share))
    hbv *= np.exp(np.float32(-DWI_ECHO_MS * rate) * sitk.GetArrayViewFromImage(moved))


def _rate(zone: str, target_t2: float, strength: float) -> float:
    """What moving a zone's T2 by ``strength`` towards ``target_t2`` (ms) adds to its relaxation rate, in 1/ms."""
    before = TISSUES[zone]["t2"]
    return 1 / (before + strength * (target_t2 - before)) - 1 / before


def _implant_t2(t2: Array, share: Array, lesion: Lesion, zone: str) -> None:
    """Darken T2 as the shorter T2 does; the template's own texture stays."""
    t2 *= np.exp(np.float32(-T2_ECHO_MS * _rate(zone, CANCER["t2"], lesion.t2_strength)) * share)


def _implant_diffusion(adc: Array, hbv: Array, share: Array, lesion: Lesion, zone: str) -> None:
    """Lower the ADC where there is one, and let the high-b image follow ADC and T2."""
    fall = np.float32(lesion.adc_strength) * share * np.maximum(adc - np.float32(CANCER["adc"]), 0) * (adc > 0)
    adc -= fall
    decay = np.float32(DWI_ECHO_MS * _rate(zone, CANCER["t2"], lesion.t2_strength)) * share
    hbv *= np.exp(np.float32(ASSUMED_B * 1e-6) * fall - decay)


def _finish(rng: np.random.Generator, array: Array, grid: sitk.Image) -> sitk.Image:
    """Another gain and coil sensitivity, 2 % noise, and int16 values up to about 2000."""
    top = float(np.percentile(array, 99.9))
    if not top > 0:
        raise InputError("A template's T2 or high-b image is empty after cropping to the gland's surroundings.")
    array = array * bias_field(rng, grid)
    array += np.float32(0.01 * top) * rng.standard_normal(array.shape, dtype=np.float32) * (array > 0)
    scaled = np.clip(array * (1500 / top * math.exp(rng.normal(0, 0.15))), 0, 32000)
    return image_of(np.rint(scaled).astype(np.int16), grid)
