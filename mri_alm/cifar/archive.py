"""CIFAR-10 and CIFAR-100 as their authors publish them: both archive layouts, checked, as plain arrays.

The archives are read from a folder where they lie unpacked; nothing is downloaded. The binary layout holds nothing but
bytes. The python layout is pickles, which can run any code when they are opened: here they are opened by an unpickler
that makes arrays and nothing else.

References:
    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mri_alm.errors import InputError
from mri_alm.runtime.files import read_file

PIXELS = 3 * 32 * 32
_LARGEST = 1 << 30  # bytes of one part; the whole of CIFAR-100 has 180 million
FOLDERS = {
    "cifar10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
    "cifar100": ("cifar-100-binary", "cifar-100-python"),
}  # the binary layout is preferred where both lie
_PARTS = {
    "cifar10": ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]),
    "cifar100": (["train"], ["test"]),
}
_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 3 writes bytes into a pickle of protocol 2
}


@dataclass(frozen=True)
class ArchivePart:
    """Training or test images.

    Attributes:
        image: ``(N, 3, 32, 32)`` uint8, red, green, blue.
        fine: ``(N,)`` int64 class.
        coarse: ``(N,)`` int64 super-class; the class again for CIFAR-10, which has none.
    """

    image: NDArray[np.uint8]
    fine: NDArray[np.int64]
    coarse: NDArray[np.int64]


@dataclass(frozen=True)
class Archive:
    """One data set.

    Attributes:
        train: Training images.
        test: Test images.
        classes: Names of the classes.
        super_classes: Names of the super-classes; empty for CIFAR-10.
    """

    train: ArchivePart
    test: ArchivePart
    classes: tuple[str, ...]
    super_classes: tuple[str, ...]


def read_archive(folder: Path | str, dataset: str) -> Archive:
    """Read one data set.

    Args:
        folder: Where the archive was unpacked: it holds one of :data:`FOLDERS`, or is one itself.
        dataset: ``"cifar10"`` or ``"cifar100"``.

    Raises:
        InputError: If there is no archive, or a file of it is missing, cut short, or holds what it should not.
    """
    if dataset not in FOLDERS:
        raise InputError(f'dataset must be one of {", ".join(FOLDERS)}, got "{dataset}".')
    place = _find(Path(folder), FOLDERS[dataset])
    binary = place.name == FOLDERS[dataset][0]
    parts = [_read_part(place, names, dataset, binary=binary) for names in _PARTS[dataset]]
    names = _names_in_text(place, dataset) if binary else _names_in_pickle(place, dataset)
    for part, what in zip(parts, ("training", "test"), strict=True):
        for labels, known in ((part.fine, names[0]), (part.coarse, names[1] or names[0])):
            if labels.min() < 0 or labels.max() >= len(known):
                raise InputError(f"{place}: a {what} label is {labels.max()}, but there are {len(known)} classes.")
    return Archive(parts[0], parts[1], *names)


def load_arrays(path: Path) -> dict[str, Any]:
    """A pickle of arrays, numbers, strings and containers of them; any other content is refused unopened.

    Raises:
        InputError: If the file is damaged, holds a class or function that is not admitted, an array larger than itself,
            or no dictionary.
    """
    stored = _bytes(path)
    try:
        content = _ArrayUnpickler(io.BytesIO(stored), encoding="latin1").load()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle raises nearly any type
        raise InputError(f"{path} cannot be read ({type(error).__name__}). Download and unpack it again.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, not a CIFAR batch.")
    if any(isinstance(value, np.ndarray) and value.nbytes > len(stored) for value in content.values()):
        raise InputError(f"{path} claims an array larger than the file. Do not trust where it came from.")
    return content


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise InputError(
                f"it asks for {module}.{name}, which no CIFAR file needs. Do not trust where it came from."
            )
        return super().find_class(module, name)


def _find(folder: Path, names: Sequence[str]) -> Path:
    for place in [folder] if folder.name in names else [folder / name for name in names]:
        if place.is_dir():
            return place
    raise InputError(
        f"There is no {' or '.join(names)} in {folder}. Give the folder where the official archive was unpacked "
        "(https://www.cs.toronto.edu/~kriz/cifar.html)."
    )


def _read_part(place: Path, names: Sequence[str], dataset: str, *, binary: bool) -> ArchivePart:
    read: Callable[[Path, str], ArchivePart] = _read_binary if binary else _read_python
    batches = [read(place / (f"{name}.bin" if binary else name), dataset) for name in names]
    if len({len(batch.fine) for batch in batches}) > 1:
        sizes = ", ".join(f"{name} {len(batch.fine)}" for name, batch in zip(names, batches, strict=True))
        raise InputError(f"{place}: the training batches differ in size ({sizes}): one is cut short. Unpack it again.")
    columns = ("image", "fine", "coarse")
    return ArchivePart(*(np.concatenate([getattr(batch, column) for batch in batches]) for column in columns))


def _read_binary(path: Path, dataset: str) -> ArchivePart:
    labels = 1 if dataset == "cifar10" else 2  # bytes in front of the pixels; of two, the super-class comes first
    content = np.frombuffer(_bytes(path), dtype=np.uint8)
    rows, rest = divmod(content.size, PIXELS + labels)
    if rows == 0 or rest:
        raise InputError(
            f"{path} has {content.size} bytes, which is no multiple of {PIXELS + labels} (one image): it is cut short. "
            "Unpack it again."
        )
    table = content.reshape(rows, -1)
    image = table[:, labels:].reshape(rows, 3, 32, 32)
    return ArchivePart(image, table[:, labels - 1].astype(np.int64), table[:, 0].astype(np.int64))


def _read_python(path: Path, dataset: str) -> ArchivePart:
    content = load_arrays(path)
    keys = ("data", "labels", "labels") if dataset == "cifar10" else ("data", "fine_labels", "coarse_labels")
    pixels, fine, coarse = (_flat(content.get(key, [])) for key in keys)
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != PIXELS or len(pixels) == 0:
        raise InputError(f"{path}: data must be (N, {PIXELS}) bytes, found {pixels.shape} of {pixels.dtype}.")
    if not fine.shape == coarse.shape == (len(pixels),) or not {fine.dtype.kind, coarse.dtype.kind} <= {"i", "u"}:
        raise InputError(f"{path}: there must be one whole-number label for each of {len(pixels)} images.")
    return ArchivePart(pixels.reshape(-1, 3, 32, 32), fine.astype(np.int64), coarse.astype(np.int64))


def _flat(found: Any) -> NDArray[Any]:
    """An array, or a list of numbers as one; empty for nested lists, which a small pickle can make endless."""
    if isinstance(found, np.ndarray):
        return found
    return np.asarray(found if all(isinstance(one, (int, np.integer)) for one in found) else [])


def _names_in_text(place: Path, dataset: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    files = ["batches.meta.txt"] if dataset == "cifar10" else ["fine_label_names.txt", "coarse_label_names.txt"]
    names = [tuple(_bytes(place / file).decode("utf-8").split()) for file in files]
    return names[0], names[1] if dataset == "cifar100" else ()


def _names_in_pickle(place: Path, dataset: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    content = load_arrays(place / ("batches.meta" if dataset == "cifar10" else "meta"))
    keys = ["label_names"] if dataset == "cifar10" else ["fine_label_names", "coarse_label_names"]
    names = [tuple(name for name in content.get(key, []) if isinstance(name, str)) for key in keys]
    return names[0], names[1] if dataset == "cifar100" else ()


def _bytes(path: Path) -> bytes:
    try:
        return read_file(path, _LARGEST)
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}. Unpack the archive again.") from error
