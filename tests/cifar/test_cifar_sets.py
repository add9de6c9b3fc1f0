from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_cifar import write_cifar10, write_cifar100

from mri_alm.cifar.archive import read_archive
from mri_alm.cifar.sets import ImageSet, binary_set, long_tailed_set, smallest_classes
from mri_alm.errors import InputError

BINARY: dict[str, Any] = {"majority": "truck", "critical": "automobile", "ratio": 5, "validation": 4, "splits": 3}


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cifar10(tmp_path_factory.mktemp("ten"))


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cifar100(tmp_path_factory.mktemp("hundred"))


def classes_of(images: ImageSet, folder: Path, dataset: str, rows: Any) -> list[str]:
    """Names of the classes of rows of a set, looked up in the archive by their pixels: training or test images."""
    archive = read_archive(folder, dataset)
    part = archive.test if min(rows) >= images.size - images.tests else archive.train
    fine = {image.tobytes(): label for image, label in zip(part.image, part.fine, strict=True)}
    return [archive.classes[fine[images.image[row].tobytes()]] for row in rows]


def test_counts_of_two_classes(ten: Path) -> None:
    images = binary_set(ten, "cifar10", **BINARY)
    for split in range(3):
        training, validation = (images.rows(part, split) for part in ("training", "validation"))
        assert images.counts(split) == (26, 5)  # 30 - 4, and a fifth of it
        assert np.bincount(images.label[validation]).tolist() == [4, 4]
        assert not set(training) & set(validation)
        assert classes_of(images, ten, "cifar10", training).count("truck") == 26
        assert classes_of(images, ten, "cifar10", training).count("automobile") == 5
    assert np.bincount(images.label[images.rows("test", 0)]).tolist() == [10, 10]
    assert set(classes_of(images, ten, "cifar10", images.rows("test", 0))) == {"truck", "automobile"}


def test_labels_follow_the_pixels(ten: Path) -> None:
    images = binary_set(ten, "cifar10", **BINARY)
    for part in ("training", "validation", "test"):
        rows = images.rows(part, 1)
        names = classes_of(images, ten, "cifar10", rows)
        assert images.label[rows].tolist() == [int(name == "automobile") for name in names]


def test_a_super_class_against_a_class_of_another(hundred: Path) -> None:
    images = binary_set(hundred, "cifar100", **BINARY | {"majority": "aquatic_mammals", "critical": "shark"})
    names = classes_of(images, hundred, "cifar100", images.rows("validation", 0))
    assert {name: names.count(name) for name in set(names)} == {"beaver": 4, "dolphin": 4, "seal": 4, "shark": 4}
    assert images.counts(0) == (3 * 26, 3 * 26 // 5)


def test_draws_differ_between_splits_and_are_repeatable(ten: Path) -> None:
    first, again = binary_set(ten, "cifar10", **BINARY), binary_set(ten, "cifar10", **BINARY | {"splits": 1})
    other = binary_set(ten, "cifar10", **BINARY | {"seed": 1})
    assert first.split_digest(0) == again.split_digest(0)
    assert len({first.split_digest(0), first.split_digest(1), first.split_digest(2), other.split_digest(0)}) == 4
    critical = [set(first.rows("training", k)[first.label[first.rows("training", k)] == 1]) for k in (0, 1)]
    assert critical[0] != critical[1]


def test_the_guard_depends_on_the_pixels(ten: Path, tmp_path: Path) -> None:
    place = write_cifar10(tmp_path) / "cifar-10-batches-bin" / "data_batch_1.bin"
    content = bytearray(place.read_bytes())
    rows = np.frombuffer(bytes(content), np.uint8).reshape(-1, 3073)
    row = int(np.flatnonzero(rows[:, 0] == 9)[0])
    content[3073 * row + 5] ^= 1
    place.write_bytes(content)
    assert binary_set(ten, "cifar10", **BINARY).split_digest(0) != binary_set(
        tmp_path, "cifar10", **BINARY
    ).split_digest(0)


def test_the_overlapping_rule_shares_one_validation_set_that_is_trained_on(ten: Path) -> None:
    images = binary_set(ten, "cifar10", **BINARY | {"rule": "overlapping"})
    validation = [set(images.rows("validation", k)) for k in range(3)]
    assert validation[0] == validation[1] == validation[2]
    assert images.counts(0) == (23, 4)  # int(0.9 * 26), and a fifth
    assert set(images.rows("training", 0)) & validation[0]
    assert images.split_digest(0) != images.split_digest(1)


def test_the_overlapping_rule_has_the_authors_counts(hundred: Path, tmp_path: Path) -> None:
    """CIFAR-100 has 500 images a class: 2025 and 20 at 1:100 (method.md), 50 validation images a class."""
    folder = write_cifar100(tmp_path, 500)
    settings = BINARY | {
        "majority": "aquatic_mammals",
        "critical": "shark",
        "ratio": 100,
        "validation": 50,
        "splits": 1,
    }
    images = binary_set(folder, "cifar100", **settings, rule="overlapping")
    assert images.counts(0) == (3 * 405, 12)  # three sub-classes here, five there: 2025, 20
    held_out = images.rows("validation", 0)
    majority = held_out[images.label[held_out] == 0]
    share = len(set(majority) & set(images.rows("training", 0))) / len(majority)
    assert 0.7 < share < 0.92  # 405 of 500 are drawn: 0.81 on average


def test_the_tail_is_exponential_and_the_rest_balanced(ten: Path) -> None:
    images = long_tailed_set(ten, "cifar10", ratio=5, validation=5, splits=2)
    assert images.counts(0) == tuple(int(25 * 5 ** (-k / 9)) for k in range(10))
    assert images.counts(0)[0] == 25
    assert images.counts(0)[-1] == 5
    assert np.bincount(images.label[images.rows("validation", 1)]).tolist() == [5] * 10
    assert np.bincount(images.label[images.rows("test", 1)]).tolist() == [10] * 10
    assert not set(images.rows("training", 1)) & set(images.rows("validation", 1))


def test_the_tail_of_cao_et_al_at_1_to_100() -> None:
    """The counts of the literature (5000 a class, none held out), by the formula that the set uses."""
    counts = [int(5000 * 100 ** (-k / 9)) for k in range(10)]
    assert counts == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert sum(counts) == 12406


def test_the_smallest_classes_are_critical() -> None:
    assert smallest_classes([50, 20, 30, 10], 1) == [3]
    assert smallest_classes([50, 20, 30, 10], 2) == [1, 3]
    for number in (0, 4):
        with pytest.raises(InputError, match=rf"^critical_classes must lie between 1 and 3, got {number}\.$"):
            smallest_classes([50, 20, 30, 10], number)


def test_how_a_set_was_made_is_written_down(ten: Path) -> None:
    wanted = {"majority": "truck", "critical": "automobile", "ratio": 5, "validation": 4, "split_seed": 0}
    assert wanted.items() <= binary_set(ten, "cifar10", **BINARY).record.items()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"majority": "lorry"}, r'^There is no class "lorry"\. Choose one of: airplane, '),
        ({"critical": "truck"}, r"^truck belongs to truck: choose a critical class outside it\.$"),
        ({"ratio": 0.5}, r"^ratio must be 1 or more .*, got 0\.5\.$"),
        ({"ratio": 100}, r"^Class 1 has 30 training images, which do not suffice for 4 held out .* and 0 to train on"),
        ({"validation": 30}, r"^Class 9 has 30 training images, which do not suffice for 30 held out"),
        ({"rule": "none"}, r'^split_rule must be one of disjoint, overlapping, got "none"\.$'),
    ],
)
def test_sets_that_cannot_be_made_are_refused(change: dict[str, Any], message: str, ten: Path) -> None:
    with pytest.raises(InputError, match=message):
        binary_set(ten, "cifar10", **BINARY | change)


def test_a_class_inside_the_super_class_is_refused(hundred: Path) -> None:
    with pytest.raises(InputError, match=r"^shark belongs to fish"):
        binary_set(hundred, "cifar100", **BINARY | {"majority": "fish", "critical": "shark"})
    with pytest.raises(InputError, match=r"^ratio must be 1 or more"):
        long_tailed_set(hundred, "cifar100", ratio=0.1, validation=5)
