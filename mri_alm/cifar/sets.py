"""Benchmark sets of images, and those made of CIFAR: two classes at 1:r, or a long tail, with seeded splits.

A set offers what `mri_alm.cohort.Cohort` offers (size, labels, counts and digest of a split), so that the same configs
train on it. Of CIFAR every split draws its own validation images and its own images of the rare class, as the paper's
ten runs do; an ensemble has therefore seen more critical images than any of its members.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mri_alm.cifar.archive import Archive, ArchivePart, read_archive
from mri_alm.errors import InputError, one_of

SplitRule = Literal["disjoint", "overlapping"]
_OFFICIAL_SEED = 42  # of the one validation set that all of the authors' runs share
_OFFICIAL_SHARE = 0.9


@dataclass(frozen=True)
class Draw:
    """Rows of the set that one split trains and validates on, ascending."""

    training: NDArray[np.int64]
    validation: NDArray[np.int64]


class ImageSet:
    """Images, labels and splits.

    Attributes:
        image: ``(N, ...)`` uint8, such as ``(N, 3, 32, 32)``; the test images last.
        label: ``(N,)`` int64: 1 for the critical class and 0 otherwise, or the class of a long-tailed set.
        tests: Number of test images, the last of the rows.
        splits: One draw each.
        record: How the set was made, for result files.
        manifest: Where the archive lies.

    Args:
        image: See above.
        label: See above.
        tests: See above.
        folder: Where the archive lies.
        splits: See above, as row numbers of this set.
        record: See above; ``dataset`` is its name.
    """

    def __init__(
        self,
        image: NDArray[np.uint8],
        label: NDArray[np.int64],
        tests: int,
        *,
        folder: Path | str,
        splits: Sequence[Draw],
        record: dict[str, Any],
    ) -> None:
        self.image, self.label, self.tests = image, label, tests
        self.splits, self.record = list(splits), record
        self.manifest = Path(folder).resolve() / str(record["dataset"])
        self._digest = hashlib.sha256(self.image.tobytes()).hexdigest()

    @property
    def size(self) -> int:
        """Number of images; their indices lie in ``[0, size)``."""
        return len(self.label)

    def rows(self, part: str, split: int) -> NDArray[np.int64]:
        """Rows of a part: ``"training"`` or ``"validation"`` of a split, or ``"test"``."""
        if part == "test":
            return np.arange(self.size - self.tests, self.size)
        return self.splits[split].training if part == "training" else self.splits[split].validation

    def labels(self, split: int) -> list[int]:
        """Labels of the training images of a split, in the order of :meth:`rows`."""
        labels: list[int] = self.label[self.splits[split].training].tolist()
        return labels

    def counts(self, split: int) -> tuple[int, ...]:
        """Training images of each class of a split."""
        return tuple(np.bincount(self.labels(split), minlength=int(self.label.max()) + 1).tolist())

    def split_digest(self, split: int) -> str:
        """SHA-256 of all pixels and of a split's training rows with labels; splits of the same rows share it."""
        state = hashlib.sha256(self._digest.encode())
        for rows in (self.splits[split].training, self.label[self.splits[split].training]):
            state.update(rows.astype(np.int64).tobytes())
        return state.hexdigest()


def binary_set(
    folder: Path | str,
    dataset: str,
    *,
    majority: str,
    critical: str,
    ratio: float,
    validation: int,
    splits: int = 10,
    rule: SplitRule = "disjoint",
    seed: int = 0,
) -> ImageSet:
    """Two classes, or a super-class against a class of another, at one critical image to ``ratio`` others.

    Args:
        folder: See :func:`mri_alm.cifar.archive.read_archive`.
        dataset: ``"cifar10"`` or ``"cifar100"``.
        majority: Name of a class or of a super-class.
        critical: Name of a class.
        ratio: Training images of the majority per critical one, >= 1.
        validation: Images held out of each class (of each sub-class of a super-class).
        splits: How many draws.
        rule: ``"disjoint"``: each split draws ``validation`` images a class and trains on all other images of the
            majority and on 1 / ratio as many critical ones. ``"overlapping"`` (the authors' code): one validation set
            for all splits; each split trains on nine tenths of (class size - validation) images, drawn from all of
            them, so that most validation images are trained on.
        seed: Of the draws. The first k splits do not depend on how many are asked for.

    Raises:
        InputError: If a name is unknown, the two overlap, or there are too few images.
    """
    archive = read_archive(folder, dataset)
    one_of("split_rule", rule, ("disjoint", "overlapping"))
    if not 1 <= ratio < float("inf"):
        raise InputError(f"ratio must be 1 or more (majority images per critical one), got {ratio}.")
    classes = [_members(archive, majority), _members(archive, critical)]
    if set(classes[0]) & set(classes[1]):
        raise InputError(f"{critical} belongs to {majority}: choose a critical class outside it.")
    names = [archive.classes[c] for side in classes for c in side]
    record = {
        "dataset": dataset, "majority": majority, "critical": critical, "classes": names, "ratio": ratio,
        "validation": validation, "split_rule": rule, "split_seed": seed,
    }  # fmt: skip
    chosen, labels = _choose(archive, {c: side for side, members in enumerate(classes) for c in members})
    fine = archive.train.fine[chosen[0]]
    draws = [_draw_binary(fine, classes, ratio, validation, rule=rule, seed=(seed, k)) for k in range(splits)]
    return _set_of(archive, folder, chosen, labels, splits=draws, record=record)


def long_tailed_set(
    folder: Path | str, dataset: str, *, ratio: float, validation: int, splits: int = 10, seed: int = 0
) -> ImageSet:
    """All classes, the k-th of C with ``n / ratio^(k / (C - 1))`` images: an exponential tail, the last the rarest.

    The same number of images a class is held out for validation (the paper says balanced, not how many), and ``n`` is
    what is left of the smallest class. Classes of which the archive has no image are left out.

    Args:
        folder: See :func:`mri_alm.cifar.archive.read_archive`.
        dataset: ``"cifar10"`` or ``"cifar100"``.
        ratio: Images of the first class per image of the last, >= 1.
        validation: Images held out of each class.
        splits: How many draws.
        seed: Of the draws.

    Raises:
        InputError: If there are too few images.

    References:
        Cui et al., CVPR 2019; Cao et al., NeurIPS 2019.
    """
    archive = read_archive(folder, dataset)
    if not 1 <= ratio < float("inf"):
        raise InputError(f"ratio must be 1 or more (images of the first class per image of the last), got {ratio}.")
    present = np.unique(archive.train.fine).tolist()
    chosen, labels = _choose(archive, {c: label for label, c in enumerate(present)})
    train = labels[: len(chosen[0])]
    largest = int(np.bincount(train).min()) - validation
    tail = [int(largest * ratio ** (-k / max(len(present) - 1, 1))) for k in range(len(present))]
    record = {
        "dataset": dataset, "classes": [archive.classes[c] for c in present], "ratio": ratio, "tail": tail,
        "validation": validation, "split_seed": seed,
    }  # fmt: skip
    draws = []
    for split in range(splits):
        pieces = [hold_out(train, k, validation, count, seed=(seed, split)) for k, count in enumerate(tail)]
        draws.append(draw_of(pieces))
    return _set_of(archive, folder, chosen, labels, splits=draws, record=record)


def smallest_classes(counts: Sequence[int], number: int) -> list[int]:
    """The ``number`` rarest classes, ascending: the critical ones of a long-tailed set.

    Raises:
        InputError: If no other class would be left.
    """
    if not 1 <= number < len(counts):
        raise InputError(f"critical_classes must lie between 1 and {len(counts) - 1}, got {number}.")
    order = np.argsort(np.asarray(counts), kind="stable")
    return sorted(order[:number].tolist())


def _members(archive: Archive, name: str) -> list[int]:
    """Numbers of the classes that a name stands for, of those the archive has images of."""
    if name in archive.classes:
        members = [archive.classes.index(name)]
    elif name in archive.super_classes:
        inside = archive.train.coarse == archive.super_classes.index(name)
        members = np.unique(archive.train.fine[inside]).tolist()
    else:
        known = ", ".join([*archive.super_classes, *archive.classes])
        raise InputError(f'There is no class "{name}". Choose one of: {known}.')
    if not members or not set(members) <= set(archive.train.fine.tolist()):
        raise InputError(f'The archive has no training image of "{name}".')
    return members


def _choose(
    archive: Archive, label_of: dict[int, int]
) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]:
    """Rows of the wanted classes in both parts, and their new labels."""
    table = np.full(len(archive.classes), -1, dtype=np.int64)
    table[list(label_of)] = list(label_of.values())

    def rows(part: ArchivePart) -> NDArray[np.int64]:
        return np.flatnonzero(table[part.fine] >= 0)

    chosen = rows(archive.train), rows(archive.test)
    labels = np.concatenate([table[archive.train.fine[chosen[0]]], table[archive.test.fine[chosen[1]]]])
    return chosen, labels


def _set_of(
    archive: Archive,
    folder: Path | str,
    chosen: tuple[NDArray[np.int64], NDArray[np.int64]],
    labels: NDArray[np.int64],
    *,
    splits: Sequence[Draw],
    record: dict[str, Any],
) -> ImageSet:
    """The chosen rows of the archive's training part, then those of its test part."""
    image = np.concatenate([archive.train.image[chosen[0]], archive.test.image[chosen[1]]])
    return ImageSet(image, labels, len(chosen[1]), folder=folder, splits=splits, record=record)


def _draw_binary(
    fine: NDArray[np.int64],
    classes: Sequence[Sequence[int]],
    ratio: float,
    validation: int,
    *,
    rule: SplitRule,
    seed: tuple[int, int],
) -> Draw:
    draw = hold_out if rule == "disjoint" else _overlap
    pieces = [draw(fine, c, validation, None, seed=seed) for c in classes[0]]
    wanted = int(sum(len(piece.training) for piece in pieces) / ratio / len(classes[1]))
    return draw_of(pieces + [draw(fine, c, validation, wanted, seed=seed) for c in classes[1]])


def hold_out(labels: NDArray[np.int64], c: int, validation: int, count: int | None, *, seed: tuple[int, int]) -> Draw:
    """Validation images of one class, and ``count`` of the others (None: all)."""
    rows = np.random.default_rng([*seed, c]).permutation(np.flatnonzero(labels == c))
    wanted = len(rows) - validation if count is None else count
    _check_counts(c, len(rows), validation, wanted)
    return Draw(rows[validation : validation + wanted], rows[:validation])


def _overlap(labels: NDArray[np.int64], c: int, validation: int, count: int | None, *, seed: tuple[int, int]) -> Draw:
    """The authors' rule: validation images that do not depend on the split, training images drawn from all."""
    rows = np.flatnonzero(labels == c)
    wanted = int((len(rows) - validation) * _OFFICIAL_SHARE) if count is None else count
    _check_counts(c, len(rows), validation, wanted)
    held_out = np.random.default_rng([_OFFICIAL_SEED, c]).permutation(rows)[:validation]
    return Draw(np.random.default_rng([*seed, c]).permutation(rows)[:wanted], held_out)


def _check_counts(c: int, size: int, validation: int, training: int) -> None:
    if validation < 1 or training < 1 or validation + training > size:
        raise InputError(
            f"Class {c} has {size} training images, which do not suffice for {validation} held out (validation) and "
            f"{training} to train on. At least one of each is needed: change validation or ratio."
        )


def draw_of(pieces: Sequence[Draw]) -> Draw:
    """The draws of several classes as one."""
    training, validation = ([getattr(piece, side) for piece in pieces] for side in ("training", "validation"))
    return Draw(np.sort(np.concatenate(training)), np.sort(np.concatenate(validation)))
