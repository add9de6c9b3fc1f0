"""MONAI transforms of our own, and the cache of what they prepared. The other transforms are MONAI's."""

import json
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import SimpleITK as sitk  # noqa: N813
import torch
from monai.data import MetaTensor, PersistentDataset
from monai.data.utils import list_data_collate
from monai.transforms import Transform
from monai.utils import convert_to_tensor

from mri_alm.bundle.checkpoints import load_tensors, save_tensors
from mri_alm.errors import StudyError, itk_failed, memory_ran_out
from mri_alm.imaging.exam import crop_centre, load_images
from mri_alm.imaging.registration import onto_grid
from mri_alm.runtime.files import DamagedFileError
from mri_alm.runtime.progress import progress_bar
from mri_alm.runtime.tasks import Pool, run_tasks

logger = logging.getLogger("mri_alm")

_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


class LoadRegisteredExamd(Transform):
    """Read one exam, register its diffusion to its T2, and bring T2, ADC and high b onto one grid.

    ``dicom`` is the folder of one study (or its :class:`~mri_alm.imaging.dicom_files.StudyFiles`) whose series are
    recognised; otherwise ``t2`` and either ``adc`` and ``hbv`` or ``dwi`` are files (NIfTI, MHA, NRRD) or DICOM series
    folders. From ``dwi`` the ADC map is fitted where no ``adc`` is given, and its highest b-value is the high-b image.
    An item with a ``valid`` mask is registered already (:mod:`mri_alm.cohort.prepare_study`): only its grid changes.
    The grid lies about ``crop_center_mm`` of the item (LPS), or the middle of its ``gland`` mask, or T2's centre.

    Adds to the item ``t2``, ``adc`` (1e-6 mm2/s), ``hbv`` and ``valid`` (1 where there is diffusion data): MetaTensors
    ``(1, X, Y, Z)`` float32, RAS millimetres; and ``report``: a dictionary with ``warnings``, facts about the series
    used and the registration's figures.

    Args:
        spacing: Grid spacing in millimetres along T2's rows, columns and slices.
        size: Grid points along the same axes.
        register: False trusts the scanner's positions (for comparison).

    Raises:
        StudyError: If the exam cannot be used, or less than half of the gland's region has diffusion data.
    """

    def __init__(
        self, spacing: Sequence[float] = (2.0, 2.0, 3.0), size: Sequence[int] = (56, 56, 28), register: bool = True
    ) -> None:
        self.spacing: Any = tuple(spacing)
        self.size: Any = tuple(size)
        self.register = register

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Load, register and resample one item (see :meth:`mri_alm.cohort.manifest.ManifestRow.item`)."""
        item = dict(data)
        images, facts = load_images(item)
        # With the geometry that a MONAI affine gives back, whose last bits differ from the header's: every model so far
        # was trained on it.
        images = {name: to_sitk(to_metatensor(image)) for name, image in images.items()}
        found, facts = onto_grid(
            images,
            facts,
            spacing=self.spacing,
            size=self.size,
            register=self.register,
            center_mm=crop_centre(item),
        )
        plain = json.loads(json.dumps(facts))  # a cache holds nothing else
        return item | {name: to_metatensor(image) for name, image in found.items()} | {"report": plain}


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


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch as MONAI makes it, but reports, which differ in their keys, stay a list."""
    batch: dict[str, Any] = list_data_collate([{k: v for k, v in item.items() if k != "report"} for item in items])
    return batch | {"report": [item["report"] for item in items]}


def for_each_study(
    function: Callable[[dict[str, Any]], Any], items: Sequence[dict[str, Any]], *, threads: int, title: str
) -> tuple[list[Any], dict[str, StudyError]]:
    """Apply ``function`` to every exam in threads, with a progress bar; one that cannot be used never stops the others.

    Returns:
        The results in the order of ``items`` without the failed ones, and the errors by study.
    """
    results: dict[int, Any] = {}
    errors: dict[str, StudyError] = {}

    def numbered(number: int) -> Any:
        return function(items[number])

    with progress_bar(title, len(items), "study") as bar:
        for outcome in run_tasks(numbered, range(len(items)), Pool("threading", threads)):
            bar.update()
            if outcome.error and (refusal := _refusal(outcome.error)):
                errors[items[outcome.item]["study"]] = refusal
            else:
                results[outcome.item] = outcome.get()
    names = [item["study"] for item in items if item["study"] in errors]
    return [results[number] for number in sorted(results)], {name: errors[name] for name in names}


def _refusal(error: Exception) -> StudyError | None:
    return error if isinstance(error, StudyError) else memory_ran_out(error) or itk_failed(error)


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
