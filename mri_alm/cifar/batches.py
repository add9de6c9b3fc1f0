"""Batches, and CIFAR's: images on the device as bytes; crops, flips and normalisation of a whole batch at once.

A data loader that handles one image at a time takes longer than a small network's step. Here a batch is one gather.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mri_alm.cifar.sets import ImageSet
from mri_alm.errors import InputError
from mri_alm.training.rates import CosineRate, StepRate  # noqa: F401 - where runs of before 0.5 find them

STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}  # mean and standard deviation of the training images' channels, in [0, 1]


class CropFlip:
    """Which window of the padded image each sample of a batch shows, and whether mirrored.

    The distribution is that of torchvision's ``RandomCrop(32, padding)`` and ``RandomHorizontalFlip()``.

    Args:
        padding: Black pixels on each side; the window's corner is uniform over ``2 padding + 1`` places a side.
        flip: Probability of mirroring left and right, in [0, 1].
    """

    def __init__(self, padding: int = 4, flip: float = 0.5) -> None:
        if padding < 0 or not 0 <= flip <= 1:
            raise InputError(f"padding must be 0 or more and flip in [0, 1], got {padding} and {flip}.")
        self.padding, self.flip = padding, flip
        self.generator = torch.Generator()

    def set_random_state(self, seed: int) -> None:
        """Seed the draws to come."""
        self.generator.manual_seed(seed)

    def __call__(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows and columns ``(count, 32)`` of the padded images."""
        corner = torch.randint(2 * self.padding + 1, (2, count, 1), generator=self.generator)
        mirrored = torch.rand(count, 1, generator=self.generator) < self.flip
        window = torch.arange(32)
        return corner[0] + window, corner[1] + torch.where(mirrored, window.flip(0), window)


class DevicePart(ABC):
    """One part of a set, on the device, ready to be gathered into batches; what gives its images is a subclass.

    Args:
        images: The set.
        part: ``"training"``, ``"validation"`` or ``"test"``.
        split: Which draw.
        device: Where they lie.
    """

    def __init__(self, images: ImageSet, part: str, split: int, device: torch.device | str) -> None:
        self.device, self.rows = torch.device(device), images.rows(part, split)
        self.label = torch.from_numpy(images.label[self.rows]).to(device)
        self.index = torch.from_numpy(self.rows).to(device)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.label)

    @abstractmethod
    def images(self, chosen: Tensor) -> Tensor:
        """What a network takes ``(B, ...)`` of the images at these positions ``(B,)`` of the part, as float32."""

    def batch(self, positions: Sequence[int] | Tensor) -> dict[str, Tensor]:
        """``image`` (:meth:`images`), ``label`` and ``index`` in the set, both ``(B,)`` int64, at these positions."""
        chosen = torch.as_tensor(positions).to(self.device)
        return {"image": self.images(chosen), "label": self.label[chosen], "index": self.index[chosen]}


class ImagePart(DevicePart):
    """Part of a CIFAR set.

    Args:
        images: The set.
        part: ``"training"``, ``"validation"`` or ``"test"``.
        split: Which draw.
        device: Where the bytes lie.
        transform: Crops and flips; None shows every image as it is.
    """

    def __init__(
        self,
        images: ImageSet,
        part: str,
        split: int,
        *,
        device: torch.device | str = "cpu",
        transform: CropFlip | None = None,
    ) -> None:
        super().__init__(images, part, split, device)
        self.transform = transform
        border = transform.padding if transform else 0
        pixels = torch.from_numpy(images.image[self.rows]).permute(0, 2, 3, 1)
        # Channels last: gathered rows then are a channels-last batch, which convolutions are fastest on.
        self.pixels = torch.nn.functional.pad(pixels, (0, 0, border, border, border, border)).contiguous().to(device)
        mean, deviation = (torch.tensor(values, device=device) for values in STATISTICS[str(images.record["dataset"])])
        self.scale, self.shift = 1 / (255 * deviation), -mean / deviation

    def images(self, chosen: Tensor) -> Tensor:
        """Images ``(B, 3, 32, 32)``, normalised, channels last."""
        if self.transform is None:
            pixels = self.pixels[chosen]
        else:
            rows, columns = (line.to(self.device) for line in self.transform(len(chosen)))
            pixels = self.pixels[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        return (pixels * self.scale + self.shift).permute(0, 3, 1, 2)


class BatchLoader:
    """Batches of a part, for a MONAI engine.

    Args:
        part: The images.
        batches: Sampler of lists of positions.
    """

    def __init__(self, part: DevicePart, batches: Iterable[Sequence[int]]) -> None:
        self.part, self.batches = part, batches

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """The batches."""
        for positions in self.batches:
            yield self.part.batch(positions)
