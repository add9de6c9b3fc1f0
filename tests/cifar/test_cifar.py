import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_cifar import HUNDRED, SUPER, TEN, part, write_cifar10, write_cifar100

from mri_alm.cifar.archive import load_arrays, read_archive
from mri_alm.errors import InputError

WRITERS: dict[str, Callable[..., Path]] = {"cifar10": write_cifar10, "cifar100": write_cifar100}


@pytest.mark.parametrize("python", [False, True], ids=["binary", "python"])
@pytest.mark.parametrize("dataset", WRITERS)
def test_pixels_and_labels_are_those_written(dataset: str, python: bool, tmp_path: Path) -> None:
    archive = read_archive(WRITERS[dataset](tmp_path, python=python), dataset)
    classes = 10 if dataset == "cifar10" else 6
    labels, pixels = part(classes, 30, 0)
    if dataset == "cifar10":  # five files, each every fifth image
        order = np.concatenate([np.arange(i, 300, 5) for i in range(5)])
        labels, pixels = labels[order], pixels[order]
        assert archive.super_classes == ()
        assert archive.classes == TEN
    else:
        assert archive.super_classes == tuple(SUPER)
        assert archive.classes == HUNDRED
        np.testing.assert_array_equal(archive.train.coarse, labels // 3)
    np.testing.assert_array_equal(archive.train.fine, labels)
    assert archive.train.image.dtype == np.uint8
    np.testing.assert_array_equal(archive.train.image.reshape(len(labels), -1), pixels)
    assert len(archive.test.fine) == 10 * classes
    assert archive.test.image.shape == (10 * classes, 3, 32, 32)


def test_channels_rows_and_columns_are_in_the_official_order(tmp_path: Path) -> None:
    """1024 red bytes, then green, then blue; each row by row."""
    place = write_cifar10(tmp_path) / "cifar-10-batches-bin"
    row = bytes([3]) + bytes(range(256)) * 12
    (place / "test_batch.bin").write_bytes(row)
    image = read_archive(tmp_path, "cifar10").test.image
    assert image[0, 0, 0, :3].tolist() == [0, 1, 2]
    assert image[0, 0, 1, 0] == 32
    assert image[0, 1, 0, 0] == 1024 % 256
    assert image[0, 2, 31, 31] == 255


def test_the_archive_s_own_folder_is_found_too(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    assert len(read_archive(tmp_path / "cifar-10-batches-bin", "cifar10").train.fine) == 300


def test_what_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"^There is no cifar-10-batches-bin or cifar-10-batches-py in .*official archive"
    ):
        read_archive(tmp_path, "cifar10")
    with pytest.raises(InputError, match=r'^dataset must be one of cifar10, cifar100, got "mnist"\.$'):
        read_archive(tmp_path, "mnist")
    place = write_cifar10(tmp_path) / "cifar-10-batches-bin"
    whole = (place / "data_batch_3.bin").read_bytes()
    (place / "data_batch_3.bin").write_bytes(whole[:-100])
    with pytest.raises(InputError, match=r"data_batch_3\.bin has \d+ bytes, which is no multiple of 3073"):
        read_archive(tmp_path, "cifar10")
    (place / "data_batch_3.bin").write_bytes(whole[: -2 * 3073])
    with pytest.raises(InputError, match=r"differ in size \(data_batch_1 60, data_batch_2 60, data_batch_3 58"):
        read_archive(tmp_path, "cifar10")
    (place / "data_batch_3.bin").write_bytes(bytes([200]) + whole[1:])
    with pytest.raises(InputError, match=r"a training label is 200, but there are 10 classes\.$"):
        read_archive(tmp_path, "cifar10")
    (place / "data_batch_3.bin").unlink()
    with pytest.raises(InputError, match=r"^Cannot read .*data_batch_3\.bin: No such file"):
        read_archive(tmp_path, "cifar10")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": np.zeros((2, 5), np.uint8), "labels": [0, 1]}, r"data must be \(N, 3072\) bytes, found \(2, 5\)"),
        ({"data": np.zeros((2, 3072)), "labels": [0, 1]}, r"found \(2, 3072\) of float64"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, r"one whole-number label for each of 2 images"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0.5, 1.5]}, r"one whole-number label for each of 2 images"),
        ({}, r"data must be"),
        ([1], r"holds a list, not a CIFAR batch"),
    ],
)
def test_python_batches_of_a_wrong_shape_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    place = write_cifar10(tmp_path, python=True) / "cifar-10-batches-py"
    (place / "data_batch_1").write_bytes(pickle.dumps(content, 2))
    with pytest.raises(InputError, match=message):
        read_archive(tmp_path, "cifar10")


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_runs_none(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for payload in (Touch(mark), {"data": [Touch(mark)]}):
        path = tmp_path / "batch"
        path.write_bytes(pickle.dumps(payload, protocol))
        with pytest.raises(InputError, match=r"batch: it asks for posix\.system, which no CIFAR file needs"):
            load_arrays(path)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["builtins eval", "builtins getattr", "numpy load", "numpy.core.multiarray scalar"])
def test_only_what_arrays_are_made_of_is_admitted(name: str, tmp_path: Path) -> None:
    module, function = name.split()
    path = tmp_path / "batch"
    path.write_bytes(f"c{module}\n{function}\n.".encode())
    with pytest.raises(InputError, match=rf"it asks for {module}\.{function}"):
        load_arrays(path)


def test_pickles_of_python_2_are_read(tmp_path: Path) -> None:
    """As published: byte strings for keys, numpy.core, an array whose bytes are a Python 2 string."""
    pixels = bytes(range(256)) * 12
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR(I1\n(I1\nI3072\ntcnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntbI00\nT"
        + struct.pack("<i", 3072)
        + pixels
        + b"tb"
    )
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\x02}(U\x04data" + array + b"U\x06labels(lI7\nau.")
    content = load_arrays(path)
    assert content["data"].shape == (1, 3072)
    assert content["data"].tobytes() == pixels
    assert content["labels"] == [7]


def test_damaged_pickles_are_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    for content in (b"", b"\x80\x02}(U", b"not a pickle"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"batch cannot be read \(\w+\)\. Download and unpack it again\.$"):
            load_arrays(path)
