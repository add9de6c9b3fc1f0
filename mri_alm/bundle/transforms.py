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
from monai.transforms import MapTransform, Transform
from monai.utils import convert_to_dst_type, convert_to_tensor

from mri_alm.bundle.checkpoints import load_tensors, save_tensors
from mri_alm.errors import InputError, StudyError
from mri_alm.imaging.exam import crop_centre, load_images
from mri_alm.imaging.registration import (
    COHORT_SIZE,
    COHORT_SPACING_MM,
    Facts,
    Images,
    as_manifest_says,
    cohort_grid,
    missing_high_b,
    onto_grid,
    same_grid,
    stored_axes,
)
from mri_alm.localiser import find_gland, localiser_name
from mri_alm.runtime.bug_reports import ends_the_run, study_failure
from mri_alm.runtime.files import DamagedFileError
from mri_alm.runtime.progress import progress_bar
from mri_alm.runtime.tasks import Pool, run_tasks

logger = logging.getLogger("mri_alm")

_OWNER = "cache_entry_of"  # key of a cache's entry
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


class LoadRegisteredExamd(Transform):
    """Read one exam, register its diffusion to its T2, and bring T2, ADC and high b onto one grid.

    ``dicom`` is the folder of one study (or its :class:`~mri_alm.imaging.dicom_files.StudyFiles`) whose series are
    recognised; otherwise ``t2`` and either ``adc`` and ``hbv`` or ``dwi`` are files (NIfTI, MHA, NRRD) or DICOM series
    folders. From ``dwi`` the ADC map is fitted where no ``adc`` is given, and its highest b-value is the high-b image.
    An item with a ``valid`` mask is registered already (:mod:`mri_alm.cohort.prepare_study`): only its grid changes.
    The grid lies about ``crop_center_mm`` of the item (LPS), or the middle of its ``gland`` mask, or with ``localise``
    about the gland as a network finds it (:mod:`mri_alm.localiser`), or T2's centre.

    Adds to the item ``t2``, ``adc`` (1e-6 mm2/s), ``hbv``, ``valid`` (1 where there is diffusion data) and ``t2_valid``
    (1 where T2 has slices): MetaTensors ``(1, X, Y, Z)`` float32, RAS millimetres; and ``report``: a dictionary with
    ``warnings``, facts about the series used and the registration's figures. A function ``show`` of the item is taken
    out of it, and given the registered images on T2's own voxels (:func:`~mri_alm.imaging.registration.onto_grid`).

    Args:
        spacing: Grid spacing in millimetres along T2's rows, columns and slices.
        size: Grid points along the same axes.
        register: False trusts the scanner's positions (for comparison).
        as_prepared: Give an exam the voxels that it would have from a prepared cohort: it goes by the grid that cohorts
            are prepared on. False, as models of version 0.1 were trained: in one interpolation.
        without_hbv: Accept an exam without a high b, ``hbv`` is 0 then; False refuses it.
        localise: Find the gland of an exam that does not say where it is.
        lps: Take voxels in the order of axial DICOM slices, however they are stored, so that one exam has one score.
            False, as models were trained before version 0.12: as they are stored, with a warning where that is another.

    Raises:
        InputError: If the grid is larger than the one that cohorts are prepared on, and ``as_prepared`` is set; if what
            ``localise`` needs is not installed.
        StudyError: If the exam cannot be used, or less than half of the gland's region has diffusion data.
    """

    def __init__(
        self,
        spacing: Sequence[float] = (2.0, 2.0, 3.0),
        size: Sequence[int] = (56, 56, 28),
        register: bool = True,
        *,
        as_prepared: bool = False,
        without_hbv: bool = False,
        localise: bool = False,
        lps: bool = False,
    ) -> None:
        self.spacing: Any = tuple(spacing)
        self.size: Any = tuple(size)
        self.register, self.as_prepared, self.without_hbv = register, as_prepared, without_hbv
        self.localise, self.lps = localise, lps
        if localise:
            localiser_name()
        reach, most = (
            (np.array(count) - 1) * step
            for count, step in ((self.size, self.spacing), (COHORT_SIZE, COHORT_SPACING_MM))
        )
        if as_prepared and (reach > most + 1e-6).any():
            raise InputError(
                f"A grid of {_times(self.size)} points, {_times(self.spacing)} mm apart, is larger than the one that "
                f"exams are prepared on ({_times(COHORT_SIZE)} points, {_times(COHORT_SPACING_MM)} mm apart). Lower "
                "--size or --spacing."
            )

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Load, register and resample one item (see :meth:`mri_alm.cohort.manifest.ManifestRow.item`)."""
        item = dict(data)
        images, facts = load_images(item, lps=self.lps)
        if (axes := stored_axes(images["t2"])) != "LPS":
            text = (
                f"T2's axes are stored in the order {axes}, and this model, of an earlier version, takes them as they "
                "are: stored in another, as DICOM's LPS, the exam would have another score. Train a new model."
            )
            facts["warnings"] = [*facts["warnings"], text]
        self._check_high_b(images, facts)
        centre = crop_centre(item)
        if not centre and self.localise:
            centre = find_gland(images["t2"], facts)
        if self.as_prepared:
            centre = as_manifest_says(centre)
        else:  # models of version 0.1 were trained with the geometry that a MONAI affine gives back, to its last bits
            images = {name: to_sitk(to_metatensor(image)) for name, image in images.items()}
        if "valid" in item:
            self._check_prepared(item, images, facts, centre)
        found, facts = onto_grid(
            images,
            facts,
            spacing=self.spacing,
            size=self.size,
            register=self.register,
            center_mm=centre,
            as_prepared=self.as_prepared,
            show=item.pop("show", None),
        )
        found.setdefault("hbv", found["adc"] * 0.0)
        plain = json.loads(json.dumps(facts))  # a cache holds nothing else
        return item | {name: to_metatensor(image) for name, image in found.items()} | {"report": plain}

    def _check_high_b(self, images: Images, facts: Facts) -> None:
        """Refuse an exam without a high b, or warn of it, as the model was trained."""
        why = missing_high_b(images, facts)
        if not why:
            return
        if not self.without_hbv:
            raise StudyError(
                "no_high_b",
                f"{why}, and this model was not trained without one. Export it, or train a model with --drop_hbv above "
                "0, which accepts such exams.",
            )
        images.pop("hbv", None)
        facts["warnings"] = [*facts["warnings"], f"{why}: scored without it, as the model was trained to."]

    def _check_prepared(self, item: Mapping[Any, Any], images: Images, facts: Facts, centre: Any) -> None:
        """Tell apart cohorts prepared by another version, or for another grid, than the model takes."""
        if not self.as_prepared:
            text = (
                "The exam is from a prepared cohort, and the model, trained by an earlier version, takes exams as they "
                "come: its logit can differ by 0.1 from that of the exam itself. Train a new model."
            )
        elif "t2_valid" not in item and _padded(images["t2"]):
            raise StudyError(
                "prepared_before",
                "The exam was prepared by an earlier version: it has zeros where T2 has no slices, and no mask that "
                "says so (column t2_valid). Prepare the cohort again: the same command with --resume. If the manifest "
                "was written by hand, give it that mask.",
            )
        elif "t2_valid" in item and not same_grid(images["t2"], cohort_grid(images["t2"], centre)):
            text = (
                f"The exam was prepared on a grid of its own ({_times(images['t2'].GetSize())} voxels of "
                f"{_times(images['t2'].GetSpacing())} mm), not about the point and on the grid that exams go by: its "
                "score differs slightly from that of the exam itself."
            )
        else:
            return
        facts["warnings"] = [*facts["warnings"], text]


def _padded(image: sitk.Image) -> bool:
    """Whether an outermost plane holds nothing but zeros."""
    array = sitk.GetArrayViewFromImage(image)
    return any(not array.take(end, axis).any() for axis in range(3) for end in (0, -1))


def _times(values: Sequence[float]) -> str:
    return " x ".join(f"{round(value, 3):g}" for value in values)


class NormalizeWithinMaskd(MapTransform):
    """Clip to percentiles of the voxels within a mask, and give them mean 0 and standard deviation 1.

    Voxels outside become 0, the mean: what an exam does not show has no influence on what it shows. MONAI's own
    ``NormalizeIntensity`` takes every voxel but exact zeros for tissue, what interpolation left of them included.

    Args:
        keys: Images.
        mask: Key of the mask, above 0.5 inside.
        lower: Percentile, 0 to 100, below which values are cut.
        upper: The same above.
    """

    def __init__(self, keys: Any, mask: str, *, lower: float, upper: float) -> None:
        super().__init__(keys)
        self.mask, self.lower, self.upper = mask, lower, upper

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """The item with its images normalised."""
        item = dict(data)
        inside = np.asarray(item[self.mask]) > 0.5
        for key in self.key_iterator(item):
            values = np.asarray(item[key], dtype=np.float64)
            normalised = np.zeros(values.shape, np.float32)
            if inside.any():
                tissue = values[inside]
                tissue = np.clip(tissue, *np.percentile(tissue, [self.lower, self.upper]))
                normalised[inside] = (tissue - tissue.mean()) / (tissue.std() or 1.0)
            item[key] = convert_to_dst_type(normalised, item[key])[0]
        return item


def without_hbv(image: torch.Tensor) -> torch.Tensor:
    """The network's input ``(3, X, Y, Z)``, channels adc, hbv and t2, with high b at its mean."""
    return image * image.new_tensor([1.0, 0.0, 1.0]).reshape(3, 1, 1, 1)


def split_sequences(item: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    """What augmentation needs to move and change the sequences apart, and to keep what an exam does not show as it is.

    Args:
        item: With ``image`` ``(3, X, Y, Z)``, channels adc, hbv and t2, which are 0 where an exam shows nothing. There
            is ADC where there is high b, or, in an exam without a high b, where ADC itself is not 0.

    Returns:
        The item with ``diffusion`` ``(4, X, Y, Z)``: adc, hbv, and the share of each voxel in which it was seen, 0 or
        1, which moves with them; and ``t2`` ``(2, X, Y, Z)``: T2 and its share. Of a channel that is 0 everywhere,
        nothing was seen.
    """
    image = convert_to_tensor(item["image"], track_meta=False)
    seen = image != 0
    diffusion = (seen[1] if seen[1].any() else seen[0]) & seen[0].any()
    share = torch.stack([diffusion, seen[1], seen[2]]).to(image.dtype)
    return dict(item) | {"diffusion": torch.cat([image[:2], share[:2]]), "t2": torch.cat([image[2:], share[2:]])}


def within_masks(item: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    """After what moved voxels and before what changes intensities: the sequences by name.

    Args:
        item: From :func:`split_sequences`; values and shares were interpolated alike.

    Returns:
        The item with ``adc`` (0 to 1), ``hbv`` and ``t2`` (their darkest voxel 0, their brightest 1, as a factor such
        as a coil's sensitivity acts on signals), each ``(1, X, Y, Z)``; and ``seen`` ``(3, X, Y, Z)``, true where more
        than half of a voxel was seen. A value there is the mean of the part that was seen; elsewhere it has no meaning.
    """
    diffusion, t2 = (convert_to_tensor(item[key], track_meta=False) for key in ("diffusion", "t2"))
    share = torch.cat([diffusion[2:], t2[1:]])
    seen = share > 0.5
    image = torch.where(seen, torch.cat([diffusion[:2], t2[:1]]) / share.clamp(min=0.5), 0.0)
    low, high = image[1:].flatten(1).aminmax(dim=1)
    span = torch.where(high > low, high - low, 1.0)
    signals = (image[1:] - low[:, None, None, None]) / span[:, None, None, None]
    return dict(item) | {"adc": image[:1], "hbv": signals[:1], "t2": signals[1:], "seen": seen}


def join_sequences(item: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    """The network's input again, as preprocessing would have made it of such an exam.

    Args:
        item: From :func:`within_masks`.

    Returns:
        The item with ``image`` ``(3, X, Y, Z)``: ADC within 0 to 1, high b and T2 with mean 0 and standard deviation 1
        where they were seen, all 0 elsewhere; without the keys of :func:`split_sequences` and :func:`within_masks`.
    """
    adc, hbv, t2 = (convert_to_tensor(item[key], track_meta=False) for key in ("adc", "hbv", "t2"))
    seen = item["seen"]
    signals, inside = torch.cat([hbv, t2]), seen[1:]
    count = inside.flatten(1).sum(1).clamp(min=1)[:, None, None, None]
    signals = torch.where(inside, signals, 0.0)
    centred = torch.where(inside, signals - signals.sum((1, 2, 3), keepdim=True) / count, 0.0)
    deviation = (centred.square().sum((1, 2, 3), keepdim=True) / count).sqrt()
    normalised = centred / torch.where(deviation > 0, deviation, 1.0)
    image = torch.cat([torch.where(seen[:1], adc.clamp(0, 1), 0.0), normalised])
    apart = ("diffusion", "adc", "hbv", "t2", "seen")
    return {key: value for key, value in item.items() if key not in apart} | {"image": image}


class CheckedCache(PersistentDataset):
    """MONAI's ``PersistentDataset`` for dictionaries; a damaged entry is made again, and that is said.

    MONAI moves an entry into its place by a copy, so that a kill can leave half of it, and reads flipped bits as if
    they were an exam. An entry also says whose it is (its own file name, the hash of item and transforms), so that one
    copied to another exam's name is not taken for that exam. Arguments are those of ``PersistentDataset``;
    ``cache_dir`` must be given.

    Raises:
        InputError: From an access, if the folder is full, cannot be written, or holds something else.
    """

    def _cachecheck(self, item_transformed: dict[str, Any]) -> dict[str, Any]:
        name = f"{self.hash_func(item_transformed).decode()}{self.transform_hash}"
        path = self.cache_dir / f"{name}.pt"
        if path.exists():
            try:
                found = load_tensors(path)
            except DamagedFileError as error:
                logger.warning("Cache: %s The exam is prepared again.", error)
            else:
                if (owner := found.pop(_OWNER, None)) == name:
                    return found
                why = "of another exam or other settings" if owner else "of an earlier version, which wrote no owner"
                logger.warning("Cache: the entry %s is %s. The exam is prepared again.", path, why)
        prepared: dict[str, Any] = self._pre_transform(deepcopy(item_transformed))
        kept = convert_to_tensor(prepared, convert_numeric=False, track_meta=self.track_meta)
        save_tensors(path, kept | {_OWNER: name})
        return prepared


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch as MONAI makes it, but reports, which differ in their keys, stay a list."""
    batch: dict[str, Any] = list_data_collate([{k: v for k, v in item.items() if k != "report"} for item in items])
    return batch | {"report": [item["report"] for item in items]}


def for_each_study(
    function: Callable[[dict[str, Any]], Any], items: Sequence[dict[str, Any]], *, threads: int
) -> tuple[list[Any], dict[str, StudyError]]:
    """Apply ``function`` to every exam in threads, with a progress bar; one that fails never stops the others.

    Returns:
        The results in the order of ``items`` without the failed ones, and the errors by study.

    Raises:
        InputError: That is no :class:`StudyError`, if the function raised it: a full disk is no fault of the exam.
    """
    results: dict[int, Any] = {}
    errors: dict[str, StudyError] = {}

    def numbered(number: int) -> Any:
        try:
            return function(items[number])
        except Exception as error:
            if ends_the_run(error):
                raise
            raise study_failure(error) from error

    with progress_bar("prepare", len(items), "study") as bar:
        for outcome in run_tasks(numbered, range(len(items)), Pool("threading", threads)):
            bar.update()
            if isinstance(outcome.error, StudyError):
                errors[items[outcome.item]["study"]] = outcome.error
            else:
                results[outcome.item] = outcome.get()
    names = [item["study"] for item in items if item["study"] in errors]
    return [results[number] for number in sorted(results)], {name: errors[name] for name in names}


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
