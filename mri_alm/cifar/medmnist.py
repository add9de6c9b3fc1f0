"""MedMNIST's two rare-class sets of real 3D shapes, aneurysms and adrenal hyperplasia: archive, splits, batches.

Voxels are 0 or 255, segmented structures of patients without intensities, so they are only scaled to [0, 1]. The
official test part is never drawn from: no split trains or validates on it.

References:
    Yang et al., "MedMNIST v2", Scientific Data 10:41, 2023 (CC BY 4.0).
"""

import hashlib
import io
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from mri_alm.cifar.batches import DevicePart
from mri_alm.cifar.sets import Draw, ImageSet, draw_of, hold_out
from mri_alm.errors import InputError, one_of

FILES = {
    ("vessel", 28): ("vesselmnist3d.npz", "b41fd4f7e7e2feedddb201585ecafa1b"),
    ("vessel", 64): ("vesselmnist3d_64.npz", "6bb274a8846e1097066dcd64e2c4520f"),
    ("adrenal", 28): ("adrenalmnist3d.npz", "bbd3c5a5576322bc4cdfea780653b1ce"),
    ("adrenal", 64): ("adrenalmnist3d_64.npz", "17721accfe9fb005146a47d33bc54b2f"),
}  # by data set and resolution: name, and MD5 as the authors publish it
_PARTS = ("train", "val", "test")


def shape_set(
    folder: Path | str,
    dataset: str,
    *,
    resolution: int = 28,
    own_splits: bool = False,
    splits: int = 10,
    seed: int = 0,
) -> ImageSet:
    """One data set with its official splits, or with random ones.

    Args:
        folder: Where the files lie.
        dataset: ``"vessel"`` (1: aneurysm) or ``"adrenal"`` (1: hyperplasia).
        resolution: Voxels along each axis, 28 or 64.
        own_splits: False: all splits are the official one and differ in nothing. True: each draws its own validation
            images from official training and validation part together, of each class as many as the official one has.
        splits: How many.
        seed: Of the draws. The first k splits do not depend on how many are asked for.

    Returns:
        Images ``(N, R, R, R)``, 0 or 255; training, validation and test part in this order.

    Raises:
        InputError: If the data set or the resolution is unknown, or its file is absent or not the official one.
    """
    one_of("dataset", dataset, ("vessel", "adrenal"))
    if resolution not in (28, 64):
        raise InputError(f"resolution must be 28 or 64, got {resolution}.")
    path = Path(folder) / FILES[dataset, resolution][0]
    parts = _read(path, FILES[dataset, resolution][1])
    label = np.concatenate([part[1] for part in parts])
    training, validation, tests = (len(part[1]) for part in parts)
    official = Draw(np.arange(training), np.arange(training, training + validation))
    draws = [official] * splits
    if own_splits:
        counts = np.bincount(parts[1][1], minlength=2)
        rest = label[:-tests]
        draws = [
            draw_of([hold_out(rest, c, count, None, seed=(seed, k)) for c, count in enumerate(counts)])
            for k in range(splits)
        ]
    record = {"dataset": dataset, "resolution": resolution, "own_splits": own_splits, "split_seed": seed}
    image = np.concatenate([part[0] for part in parts])
    return ImageSet(image, label, tests, folder=folder, splits=draws, record=record)


def _read(path: Path, expected: str) -> list[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Images and labels of each part. A file of that MD5 holds what the authors put there: nothing else is checked."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"Cannot read {path}: {error.strerror}. Download {path.name} of MedMNIST v2 (https://medmnist.com) into "
            "that folder, or name the folder it lies in with --data."
        ) from error
    if (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != expected:
        raise InputError(
            f"{path} is not the official file: its MD5 is {found}, expected {expected}. Download it again."
        )
    with np.load(io.BytesIO(content)) as arrays:
        return [(arrays[f"{part}_images"], arrays[f"{part}_labels"][:, 0].astype(np.int64)) for part in _PARTS]


class FlipTurnZoom:
    """Random flips along each axis, a small turn and a small zoom of each sample of a batch.

    Args:
        flip: Probability of mirroring along each axis, in [0, 1].
        degrees: Turns are rotation vectors whose three components are uniform in [-degrees, degrees], below 180.
        zoom: The factor on the size is uniform in [1 - zoom, 1 + zoom], 0 <= zoom < 1.

    Raises:
        InputError: If an argument is out of range.
    """

    def __init__(self, flip: float = 0.5, degrees: float = 15.0, zoom: float = 0.1) -> None:
        if not (0 <= flip <= 1 and 0 <= degrees < 180 and 0 <= zoom < 1):
            raise InputError(
                f"flip must be in [0, 1], degrees in [0, 180) and zoom in [0, 1), got {flip}, {degrees} and {zoom}."
            )
        self.flip, self.degrees, self.zoom = flip, degrees, zoom
        self.generator = torch.Generator()

    def set_random_state(self, seed: int) -> None:
        """Seed the draws to come."""
        self.generator.manual_seed(seed)

    def __call__(self, count: int) -> Tensor:
        """Where each voxel comes from: matrices ``(count, 3, 4)`` as :func:`torch.nn.functional.affine_grid` takes."""
        mirror = 1 - 2 * (torch.rand(count, 3, generator=self.generator) < self.flip).float()
        x, y, z = (self._uniform(3, count) * math.radians(self.degrees)).unbind()
        none = torch.zeros(count)
        skew = torch.stack([none, -z, y, z, none, -x, -y, x, none], 1).view(count, 3, 3)
        size = 1 + self.zoom * self._uniform(count, 1, 1)
        matrix = torch.matrix_exp(skew) * mirror[:, None, :] / size
        return torch.cat([matrix, torch.zeros(count, 3, 1)], 2)

    def _uniform(self, *shape: int) -> Tensor:
        return 2 * torch.rand(*shape, generator=self.generator) - 1


class ShapePart(DevicePart):
    """Part of a set of shapes, for :class:`mri_alm.cifar.BatchLoader`.

    Args:
        images: The set.
        part: ``"training"``, ``"validation"`` or ``"test"``.
        split: Which draw.
        device: Where the bytes lie.
        transform: Flips, turns and zooms, of a whole batch at once, trilinear, with 0 beyond the border; None shows
            every image as it is.
    """

    def __init__(
        self,
        images: ImageSet,
        part: str,
        split: int,
        *,
        device: torch.device | str = "cpu",
        transform: FlipTurnZoom | None = None,
    ) -> None:
        super().__init__(images, part, split, device)
        self.transform = transform
        self.voxels = torch.from_numpy(images.image[self.rows]).to(device)

    def images(self, chosen: Tensor) -> Tensor:
        """Images ``(B, 1, R, R, R)`` in [0, 1]."""
        image = self.voxels[chosen][:, None].float() / 255
        if self.transform is not None:
            grid = affine_grid(self.transform(len(chosen)).to(self.device), list(image.shape), align_corners=False)
            image = grid_sample(image, grid, align_corners=False)
        return image
