from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare
from small_cifar import write_cifar10
from torch.utils.data import BatchSampler

from mri_alm.cifar.batches import STATISTICS, BatchLoader, CropFlip, ImagePart
from mri_alm.cifar.sets import ImageSet, binary_set
from mri_alm.errors import InputError

BINARY: dict[str, Any] = {"majority": "truck", "critical": "automobile", "ratio": 5, "validation": 4, "splits": 2}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    return binary_set(write_cifar10(tmp_path_factory.mktemp("ten")), "cifar10", **BINARY)


def normalised(image: NDArray[Any]) -> NDArray[np.float64]:
    """To [0, 1], minus the mean, over the deviation: one image at a time, as torchvision does."""
    mean, deviation = (np.array(values)[:, None, None] for values in STATISTICS["cifar10"])
    return np.asarray((image / 255 - mean) / deviation)


def cropped(image: NDArray[Any], top: int, left: int, mirrored: bool) -> NDArray[Any]:
    """One image, padded by four black pixels, a window of it, mirrored or not."""
    window = np.pad(image, ((0, 0), (4, 4), (4, 4)))[:, top : top + 32, left : left + 32]
    return window[:, :, ::-1] if mirrored else window


def test_batches_without_augmentation_are_the_normalised_images(images: ImageSet) -> None:
    part = ImagePart(images, "validation", 1)
    batch = part.batch([3, 0])
    rows = images.rows("validation", 1)
    expected = np.stack([normalised(images.image[rows[k]]) for k in (3, 0)])
    np.testing.assert_allclose(batch["image"].numpy(), expected, rtol=0, atol=1e-6)
    assert batch["label"].tolist() == images.label[rows[[3, 0]]].tolist()
    assert batch["index"].tolist() == rows[[3, 0]].tolist()
    assert batch["index"].dtype == batch["label"].dtype == torch.int64
    assert batch["image"].dtype == torch.float32
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)


def test_every_augmented_image_is_one_of_the_windows_of_its_image(images: ImageSet) -> None:
    """The reference makes all 162 windows of one image; each draw must be one, and each must be drawn."""
    part = ImagePart(images, "training", 0, transform=CropFlip())
    assert part.transform is not None
    part.transform.set_random_state(seed=0)
    image = images.image[images.rows("training", 0)[5]]
    keys = [(t, le, m) for t in range(9) for le in range(9) for m in (False, True)]
    windows = np.stack([normalised(cropped(image, *key)) for key in keys]).reshape(len(keys), -1)
    drawn = part.batch([5] * 4000)["image"].reshape(4000, -1).double().numpy()
    distance = ((drawn[:, None, ::97] - windows[None, :, ::97]) ** 2).sum(2)
    found = distance.argmin(1)
    np.testing.assert_allclose(drawn, windows[found], rtol=0, atol=1e-5)
    assert chisquare(np.bincount(found, minlength=len(keys))).pvalue > 1e-3


def test_draws_of_corner_and_mirror_are_uniform_and_independent() -> None:
    transform = CropFlip()
    transform.set_random_state(seed=1)
    rows, columns = transform(50_000)
    top, mirrored = rows[:, 0], columns[:, 0] > columns[:, 1]
    left = columns.min(1).values
    cells = (top * 9 + left) * 2 + mirrored
    assert chisquare(torch.bincount(cells, minlength=162).numpy()).pvalue > 1e-3
    assert torch.equal(rows, top[:, None] + torch.arange(32))


def test_without_padding_and_flips_nothing_changes(images: ImageSet) -> None:
    plain = ImagePart(images, "training", 0).batch([1, 2])
    augmented = ImagePart(images, "training", 0, transform=CropFlip(padding=0, flip=0.0)).batch([1, 2])
    torch.testing.assert_close(plain, augmented)


def test_the_seed_repeats_the_draws(images: ImageSet) -> None:
    def drawn(seed: int) -> torch.Tensor:
        part = ImagePart(images, "training", 0, transform=CropFlip())
        assert part.transform is not None
        part.transform.set_random_state(seed=seed)
        return part.batch(range(8))["image"]

    assert torch.equal(drawn(3), drawn(3))
    assert not torch.equal(drawn(3), drawn(4))


def test_a_loader_gives_every_image_once(images: ImageSet) -> None:
    part = ImagePart(images, "test", 0)
    loader = BatchLoader(part, BatchSampler(range(len(part)), 6, drop_last=False))
    assert len(loader) == 4
    assert torch.cat([batch["index"] for batch in loader]).tolist() == images.rows("test", 0).tolist()
    assert [len(batch["label"]) for batch in loader] == [6, 6, 6, 2]


@pytest.mark.parametrize("arguments", [{"padding": -1}, {"flip": 1.5}])
def test_impossible_augmentation_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^padding must be 0 or more and flip in \[0, 1\], got "):
        CropFlip(**arguments)


def test_padding_is_black_before_normalisation(images: ImageSet, tmp_path: Path) -> None:
    part = ImagePart(images, "training", 0, transform=CropFlip(flip=0.0))
    assert part.transform is not None
    part.transform.set_random_state(seed=0)
    image = part.batch([0] * 200)["image"]
    black = torch.tensor([-m / s for m, s in zip(*STATISTICS["cifar10"], strict=True)])
    corner = (image[:, :, 0, 0] - black).abs().amax(1) < 1e-6
    assert 0.5 < corner.float().mean() < 0.95  # 1 - (5 / 9)^2 = 0.69 of the windows show the border's corner
