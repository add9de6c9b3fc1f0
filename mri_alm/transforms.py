"""MONAI transforms of our own: load an exam, bring diffusion onto T2's grid. The rest are MONAI's."""

import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
import torch
from monai.data import MetaTensor
from monai.transforms import Transform

from mri_alm.dicom import Study, StudyFiles, find_studies, read_series, read_study
from mri_alm.diffusion import adc_scale, fit_adc
from mri_alm.errors import StudyError
from mri_alm.registration import Registration, common_grid, mask_centre, register_rigid, resample

_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


class LoadProstateStudyd(Transform):
    """Read one exam: the paths of a manifest row become the volumes T2, ADC and high-b, each still on its own grid.

    ``dicom`` is the folder of one study (or its :class:`~mri_alm.dicom.StudyFiles`) whose series are recognised;
    otherwise ``t2`` and either ``adc`` and ``hbv`` or ``dwi`` are files (NIfTI, MHA, NRRD) or DICOM series folders.
    From ``dwi`` the ADC map is fitted where no ``adc`` is given, and its highest b-value is the high-b image. A
    ``valid`` mask says that the images were registered before.

    Adds to the item ``t2``, ``adc`` (1e-6 mm2/s) and ``hbv`` (and ``valid``): MetaTensors ``(1, X, Y, Z)`` float32, RAS
    millimetres; and ``report``: a JSON text with ``warnings`` and facts about the series used.

    Raises:
        StudyError: If the exam cannot be used; the message says why.
    """

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Load the volumes of one item (see :meth:`mri_alm.cohort.Study.item`)."""
        item = dict(data)
        return item | (_from_dicom(item["dicom"]) if "dicom" in item else _as_item(*_from_files(item)))


class RegisterDiffusiond(Transform):
    """Register ADC to T2, and bring T2, ADC and high-b onto one grid in one interpolation each.

    The grid lies about ``crop_center_mm`` of the item (LPS), or the middle of its ``gland`` mask, or T2's centre. An
    item that has a ``valid`` mask is registered already (:mod:`mri_alm.preparation`): it is only brought onto the grid.

    Args:
        spacing: Grid spacing in millimetres along T2's rows, columns and slices.
        size: Grid points along the same axes.
        register: False trusts the scanner's positions (for comparison).

    Expects and replaces ``t2``, ``adc``, ``hbv``; adds ``valid`` (1 where there is diffusion data), and the
    registration's figures to ``report``.

    Raises:
        StudyError: If less than half of the grid has diffusion data.
    """

    def __init__(
        self, spacing: Sequence[float] = (2.0, 2.0, 3.0), size: Sequence[int] = (56, 56, 28), register: bool = True
    ) -> None:
        self.spacing: Any = tuple(spacing)
        self.size: Any = tuple(size)
        self.register = register

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Register and resample one item."""
        item = dict(data)
        t2, adc, hbv = (to_sitk(item[name]) for name in ("t2", "adc", "hbv"))
        report = json.loads(item["report"])
        transform: sitk.Transform = sitk.Transform(3, sitk.sitkIdentity)
        if self.register and "valid" not in item:
            found = register_rigid(t2, adc)
            transform = found.transform
            report["registration"] = _figures(found)
            if not found.accepted:
                report["warnings"].append(
                    f"Registration refused, diffusion left where the scanner put it: {found.reason}"
                )
        centre = _crop_centre(item)
        report |= {"crop_center_mm": [round(v, 3) for v in centre]} if centre else {}
        grid = common_grid(t2, spacing_mm=self.spacing, size=self.size, center_mm=centre)
        fixed, _ = resample(t2, grid, sitk.Transform(3, sitk.sitkIdentity), interpolator="bspline")
        moved, valid = resample(adc, grid, transform, interpolator="linear")
        high, _ = resample(hbv, grid, transform, interpolator="linear")
        if "valid" in item:
            known, _ = resample(to_sitk(item["valid"]), grid, interpolator="linear")
            valid = sitk.And(valid, known >= 0.5)
            moved, high = sitk.Mask(moved, valid), sitk.Mask(high, valid)
        coverage = float(sitk.GetArrayViewFromImage(valid).mean())
        report["coverage"] = round(coverage, 4)
        if coverage < 0.5:
            place = "the given point" if centre else "T2's centre"
            raise StudyError(
                "no_overlap",
                f"Only {coverage:.0%} of the region about {place} has diffusion data. Do they belong together?",
            )
        item |= {
            name: to_metatensor(image)
            for name, image in zip(("t2", "adc", "hbv", "valid"), (fixed, moved, high, valid), strict=True)
        }
        return item | {"report": json.dumps(report)}


def to_metatensor(image: sitk.Image) -> MetaTensor:
    """SimpleITK (LPS) to MONAI: ``(1, X, Y, Z)`` float32 with a RAS affine in millimetres."""
    array = sitk.GetArrayFromImage(image).astype(np.float32).transpose(2, 1, 0)[None]
    affine = np.eye(4)
    affine[:3, :3] = np.array(image.GetDirection()).reshape(3, 3) * np.array(image.GetSpacing())
    affine[:3, 3] = image.GetOrigin()
    return MetaTensor(torch.from_numpy(array.copy()), affine=torch.from_numpy(_LPS_TO_RAS @ affine))


def to_sitk(tensor: MetaTensor) -> sitk.Image:
    """The inverse of :func:`to_metatensor`."""
    affine = _LPS_TO_RAS @ tensor.affine.numpy()
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    image = sitk.GetImageFromArray(tensor[0].numpy().transpose(2, 1, 0))
    image.SetOrigin(affine[:3, 3].tolist())
    image.SetSpacing(spacing.tolist())
    image.SetDirection((affine[:3, :3] / spacing).flatten().tolist())
    return image


def _figures(found: Registration) -> dict[str, Any]:
    numbers = {name: round(getattr(found, name), 4) for name in ("mi_before", "mi_after", "shift_mm", "rotation_deg")}
    return {"accepted": found.accepted, "reason": found.reason} | numbers


def study_item(study: Study) -> dict[str, Any]:
    """What :class:`LoadProstateStudyd` adds to an item, of a study already read."""
    return _as_item({"t2": study.t2, "adc": study.adc, "hbv": study.hbv}, study.info | {"warnings": study.warnings})


def _as_item(images: dict[str, sitk.Image], report: dict[str, Any]) -> dict[str, Any]:
    return {name: to_metatensor(image) for name, image in images.items()} | {"report": json.dumps(report)}


def _from_dicom(source: str | StudyFiles) -> dict[str, Any]:
    return study_item(read_study(source if isinstance(source, StudyFiles) else _only_study(Path(source))))


def _crop_centre(item: Mapping[Hashable, Any]) -> tuple[float, float, float] | None:
    """The point to crop about, LPS mm, where the item gives one: three numbers as text, or a gland mask."""
    if item.get("crop_center_mm"):
        x, y, z = map(float, item["crop_center_mm"].split())
        return x, y, z
    return mask_centre(_read_volume(Path(item["gland"]), "gland")) if item.get("gland") else None


def _only_study(folder: Path) -> StudyFiles:
    studies = find_studies(folder)
    with_images = [study for study in studies if study.files] or studies
    if len(with_images) != 1:
        raise StudyError(
            "several_studies", f"The folder holds {len(with_images)} DICOM studies. Give each a folder of its own."
        )
    return with_images[0]


def _from_files(item: Mapping[Hashable, Any]) -> tuple[dict[str, sitk.Image], dict[str, Any]]:
    report: dict[str, Any] = {"warnings": [], "adc_source": "given"}
    images = {name: _read_volume(Path(item[name]), name) for name in ("t2", "adc", "hbv", "valid") if name in item}
    if "dwi" in item:
        series = _read_dwi(Path(item["dwi"]))
        report["b_values"] = sorted(series)
        if "adc" not in images:
            images["adc"], report["adc_source"] = fit_adc(series), "fitted"
        images.setdefault("hbv", series[max(series)])
    images["adc"] = images["adc"] * adc_scale(images["adc"])
    return images, report


def _read_volume(path: Path, name: str) -> sitk.Image:
    """One 3D volume from a file or from a folder of one DICOM series, float32."""
    if path.is_dir():
        volumes = read_series(path)
        if len(volumes) != 1:
            raise StudyError(
                "several_b",
                f"Column {name}: the series holds {len(volumes)} b-values; use column dwi.",
            )
        return next(iter(volumes.values()))
    image = _read_image(path, name)
    if image.GetDimension() != 3:
        raise StudyError("not_3d", f"Column {name}: the image has {image.GetDimension()} dimensions, 3 are needed.")
    return image


def _read_image(path: Path, name: str) -> sitk.Image:
    try:
        return sitk.ReadImage(str(path), sitk.sitkFloat32)
    except RuntimeError:  # SimpleITK's message holds the path, which may name the patient
        raise StudyError(
            "unreadable",
            f"Column {name}: the {path.suffix or 'file'} file is no image that can be read. Export it again.",
        ) from None


def _read_dwi(path: Path) -> dict[float, sitk.Image]:
    """Image of each b-value, from a folder of one DICOM series or from a 4D NIfTI with a .bval file beside it."""
    if path.is_dir():
        series = {b: image for b, image in read_series(path).items() if b is not None}
        if not series:
            raise StudyError(
                "b_unknown", "Column dwi: the series has no b-values. Give an ADC map and a high-b image instead."
            )
        return series
    table = path.with_name(Path(path.name.removesuffix(".gz")).stem + ".bval")
    if not table.is_file():
        raise StudyError(
            "b_unknown", "Column dwi: there is no .bval file beside the image, so its b-values are unknown."
        )
    image = _read_image(path, "dwi")
    try:
        values = [float(text) for text in table.read_text("utf-8").split()]
    except ValueError:
        raise StudyError("b_unknown", "Column dwi: its .bval file holds something that is no number.") from None
    if image.GetDimension() != 4 or image.GetSize()[3] != len(values):
        raise StudyError(
            "b_unknown",
            f"Column dwi: an image of size {image.GetSize()} does not fit {len(values)} b-values in its .bval file.",
        )
    frames: dict[float, list[sitk.Image]] = {}
    for number, b in enumerate(values):
        frames.setdefault(round(b / 50) * 50.0, []).append(image[:, :, :, number])
    return {b: sum(same[1:], same[0]) / len(same) for b, same in frames.items()}
