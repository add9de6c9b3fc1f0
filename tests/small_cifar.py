"""CIFAR archives of a few noisy, class-coloured images, in both layouts."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SUPER = {"aquatic_mammals": ("beaver", "dolphin", "seal"), "fish": ("ray", "shark", "trout")}
HUNDRED = tuple(name for members in SUPER.values() for name in members)

SETTINGS: dict[str, Any] = {
    "width": 0.0625,
    "max_epochs": 2,
    "batch_size": 16,
    "ratio": 4,
    "validation": 5,
    "splits": 2,
}


def images(labels: NDArray[np.int64], classes: int, seed: int) -> NDArray[np.uint8]:
    """(N, 3072) bytes: noise about a grey level that rises with the class."""
    rng = np.random.default_rng(seed)
    level = 40 + 170 * labels[:, None] / classes
    return np.clip(level + rng.normal(0, 25, (len(labels), 3072)), 0, 255).astype(np.uint8)


def part(classes: int, per_class: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Labels in random order, and their images."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), per_class))
    return labels, images(labels, classes, seed)


def write_cifar10(folder: Path, per_class: int = 30, *, python: bool = False) -> Path:
    """CIFAR-10 with ``per_class`` training images and 10 test images a class; ``folder`` is what configs call data."""
    place = folder / ("cifar-10-batches-py" if python else "cifar-10-batches-bin")
    place.mkdir(parents=True)
    labels, pixels = part(10, per_class, 0)
    parts = [(f"data_batch_{i}", labels[i - 1 :: 5], pixels[i - 1 :: 5]) for i in range(1, 6)]
    for name, label, pixel in [*parts, ("test_batch", *part(10, 10, 1))]:
        if python:
            (place / name).write_bytes(pickle.dumps({"data": pixel, "labels": label.tolist(), "batch_label": name}, 2))
        else:
            np.concatenate([label[:, None].astype(np.uint8), pixel], 1).tofile(place / f"{name}.bin")
    if python:
        (place / "batches.meta").write_bytes(pickle.dumps({"label_names": list(TEN)}, 2))
    else:
        (place / "batches.meta.txt").write_text("\n".join(TEN) + "\n\n")
    return folder


def write_cifar100(folder: Path, per_class: int = 30, *, python: bool = False) -> Path:
    """CIFAR-100 of six classes in two super-classes."""
    place = folder / ("cifar-100-python" if python else "cifar-100-binary")
    place.mkdir(parents=True)
    for name, (fine, pixel) in {"train": part(6, per_class, 0), "test": part(6, 10, 1)}.items():
        coarse = fine // 3
        if python:
            content = {"data": pixel, "fine_labels": fine.tolist(), "coarse_labels": coarse.tolist()}
            (place / name).write_bytes(pickle.dumps(content, 2))
        else:
            table = np.concatenate([coarse[:, None], fine[:, None]], 1).astype(np.uint8)
            np.concatenate([table, pixel], 1).tofile(place / f"{name}.bin")
    if python:
        names = {"fine_label_names": list(HUNDRED), "coarse_label_names": list(SUPER)}
        (place / "meta").write_bytes(pickle.dumps(names, 2))
    else:
        (place / "fine_label_names.txt").write_text("\n".join(HUNDRED))
        (place / "coarse_label_names.txt").write_text("\n".join(SUPER))
    return folder
