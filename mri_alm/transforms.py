"""MONAI transforms of our own: load an exam, bring diffusion onto T2's grid. The rest are MONAI's."""

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
import torch
from monai.data import MetaTensor
from monai.transforms import Transform

from mri_alm.images import Images, Report, crop_centre, load_images, onto_grid

IMAGES = ("t2", "adc", "hbv", "valid")
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
        return item | _tensors(*load_images(item))


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
        images = {name: to_sitk(item[name]) for name in IMAGES if name in item}
        found = onto_grid(
            images,
            json.loads(item["report"]),
            spacing=self.spacing,
            size=self.size,
            register=self.register,
            center_mm=crop_centre(item),
        )
        return item | _tensors(*found)


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


def _tensors(images: Images, report: Report) -> dict[str, Any]:
    return {name: to_metatensor(image) for name, image in images.items()} | {"report": json.dumps(report)}
