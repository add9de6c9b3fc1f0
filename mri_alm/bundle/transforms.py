"""MONAI transforms of our own, and the cache of what they prepared. The other transforms are MONAI's."""

import json
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
import torch
from monai.data import MetaTensor, PersistentDataset
from monai.transforms import Transform
from monai.utils import convert_to_tensor

from mri_alm.bundle.checkpoints import load_tensors, save_tensors
from mri_alm.errors import StudyError, find_cause, itk_failed, memory_ran_out
from mri_alm.imaging.exam import Facts, Images, crop_centre, load_images, onto_grid
from mri_alm.runtime.files import DamagedFileError
from mri_alm.runtime.progress import progress_bar

IMAGES = ("t2", "adc", "hbv", "valid")
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


class LoadProstateStudyd(Transform):
    """Read one exam: the paths of a manifest row become the volumes T2, ADC and high-b, each still on its own grid.

    ``dicom`` is the folder of one study (or its :class:`~mri_alm.imaging.exam.StudyFiles`) whose series are recognised;
    otherwise ``t2`` and either ``adc`` and ``hbv`` or ``dwi`` are files (NIfTI, MHA, NRRD) or DICOM series folders.
    From ``dwi`` the ADC map is fitted where no ``adc`` is given, and its highest b-value is the high-b image. A
    ``valid`` mask says that the images were registered before.

    Adds to the item ``t2``, ``adc`` (1e-6 mm2/s) and ``hbv`` (and ``valid``): MetaTensors ``(1, X, Y, Z)`` float32, RAS
    millimetres; and ``report``: a JSON text with ``warnings`` and facts about the series used.

    Raises:
        StudyError: If the exam cannot be used; the message says why.
    """

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Load the volumes of one item (see :meth:`mri_alm.cohort.manifest.ManifestRow.item`)."""
        item = dict(data)
        return item | _tensors(*load_images(item))


class RegisterDiffusiond(Transform):
    """Register ADC to T2, and bring T2, ADC and high-b onto one grid in one interpolation each.

    The grid lies about ``crop_center_mm`` of the item (LPS), or the middle of its ``gland`` mask, or T2's centre. An
    item that has a ``valid`` mask is registered already (:mod:`mri_alm.cohort.prepare_study`): only its grid changes.

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


def _tensors(images: Images, report: Facts) -> dict[str, Any]:
    return {name: to_metatensor(image) for name, image in images.items()} | {"report": json.dumps(report)}


logger = logging.getLogger("mri_alm")


class CheckedCache(PersistentDataset):
    """MONAI's ``PersistentDataset`` for dictionaries; a damaged entry is made again, and that is said.

    MONAI moves an entry into its place by a copy, so that a kill can leave half of it, and reads flipped bits as if
    they were an exam. Arguments are those of ``PersistentDataset``; ``cache_dir`` must be given.

    Raises:
        InputError: From an access, if the folder is full, cannot be written, or holds something else.
    """

    def _cachecheck(self, item_transformed: dict[str, Any]) -> dict[str, Any]:
        path = self.cache_dir / f"{self.hash_func(item_transformed).decode()}{self.transform_hash}.pt"
        if path.exists():
            try:
                return load_tensors(path)
            except DamagedFileError as error:
                logger.warning("Cache: %s The exam is prepared again.", error)
        prepared: dict[str, Any] = self._pre_transform(deepcopy(item_transformed))
        save_tensors(path, convert_to_tensor(prepared, convert_numeric=False, track_meta=self.track_meta))
        return prepared


def for_each_study(
    function: Callable[[dict[str, Any]], Any], items: Sequence[dict[str, Any]], *, threads: int, title: str
) -> tuple[list[Any], dict[str, StudyError]]:
    """Apply ``function`` to every exam in threads, with a progress bar; one that cannot be used never stops the others.

    Returns:
        The results in the order of ``items`` without the failed ones, and the errors by study.
    """
    results, errors = [], {}

    def guarded(item: dict[str, Any]) -> Any:
        try:
            return function(item)
        except Exception as error:
            if cause := find_cause(error, StudyError) or memory_ran_out(error) or itk_failed(error):
                return cause
            raise

    with ThreadPoolExecutor(threads) as pool, progress_bar(title, len(items), "study") as bar:
        for item, outcome in zip(items, pool.map(guarded, items), strict=True):
            bar.update()
            if isinstance(outcome, StudyError):
                errors[item["study"]] = outcome
            else:
                results.append(outcome)
    return results, errors
