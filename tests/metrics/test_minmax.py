"""The minmax rule: what it promises on average, tried on whole trainings and on every training of a tiny world."""

import itertools
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mri_alm.bundle.run_folder import RunFolder
from mri_alm.errors import InputError
from mri_alm.metrics import OperatingPoint, minmax_bound, minmax_threshold, rule_in_words

DRAWS, NEW = 4000, 20


@pytest.mark.parametrize(
    ("positives", "folds", "rank", "bound"),
    [
        (13, 13, 1, Fraction(1, 14)), (13, 13, 2, Fraction(1, 7)), (20, 10, 1, Fraction(1, 11)),
        (30, 10, 2, Fraction(4, 33)), (13, 13, 13, Fraction(13, 14)), (2, 2, 2, Fraction(2, 3)),
        (13, 10, 1, Fraction(1, 8)),  # seven folds of one positive each, and their members
        (19, 10, 1, Fraction(1, 10)),  # nine folds of two, and their members
        (60, 5, 1, Fraction(1, 13)),  # one member, by its own twelve: less than 12 / 72
        (13, 13, 0, Fraction(0)),
    ],
)  # fmt: skip
def test_the_bound_is_the_fraction_of_the_proof(positives: int, folds: int, rank: int, bound: Fraction) -> None:
    assert minmax_bound(positives=positives, folds=folds, rank=rank) == pytest.approx(float(bound), rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((13, 14, 1), r"^folds must lie between 2 and the 13 positives, found 14\.$"),
        ((13, 1, 1), r"^folds must lie between 2 and the 13 positives, found 1\.$"),
        ((13, 13, 14), r"rank must lie between 0 and n = 13, found 14"),
        ((0, 2, 0), r"found n = 0"),
    ],
)
def test_impossible_arguments_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        minmax_bound(*arguments)


def share_missed(
    sizes: list[int], rank: int, *, learnt: bool, levels: int | None = None, exams: int = 1
) -> tuple[float, float]:
    """Mean share of new positives that the whole rule misses, and its standard error.

    Exams have three features. A member is the difference of the class means without its fold; one that has learnt
    nothing is the first feature. A patient with two positive exams is missed when one of them is.
    """
    rng = np.random.default_rng(0)
    n, fold = sum(sizes), np.repeat(np.arange(len(sizes)), sizes)
    old = rng.normal(0.8, 1, (DRAWS, n, exams, 3)) + rng.normal(0, 1, (DRAWS, n, 1, 3))
    new = rng.normal(0.8, 1, (DRAWS, NEW, exams, 3)) + rng.normal(0, 1, (DRAWS, NEW, 1, 3))
    negative = rng.normal(0, 1, (DRAWS, 4, len(sizes), 3))  # four a fold
    per_member: list[NDArray[np.float64]] = []
    held_out = np.empty((DRAWS, n))

    def scores(weights: NDArray[np.float64], exam: NDArray[np.float64]) -> NDArray[np.float64]:
        found = np.einsum("df,dpef->dpe", weights, exam)
        return np.floor(found * levels) / levels if levels else found

    for k in range(len(sizes)):
        weights = old[:, fold != k].mean((1, 2)) - np.delete(negative, k, axis=2).mean((1, 2))
        weights = weights if learnt else np.tile([1.0, 0.0, 0.0], (DRAWS, 1))
        held_out[:, fold == k] = scores(weights, old[:, fold == k]).min(2)
        per_member.append(scores(weights, new))
    threshold = np.partition(held_out, rank - 1, axis=1)[:, rank - 1]
    missed = (np.max(per_member, axis=0) < threshold[:, None, None]).any(2).mean(1)
    return float(missed.mean()), float(missed.std() / DRAWS**0.5)


@pytest.mark.parametrize("learnt", [True, False])
@pytest.mark.parametrize("levels", [None, 2], ids=["distinct", "tied"])
@pytest.mark.parametrize(
    ("sizes", "rank"), [([1] * 13, 1), ([2] * 10, 1), ([2] * 3 + [1] * 7, 1), ([2] * 9 + [1], 2), ([3] * 3, 2)], ids=str
)
def test_the_whole_rule_stays_below_its_bound(sizes: list[int], rank: int, levels: int | None, learnt: bool) -> None:
    for exams in (1, 2):
        share, error = share_missed(sizes, rank, learnt=learnt, levels=levels, exams=exams)
        assert 0 < share < minmax_bound(sum(sizes), len(sizes), rank) + 3 * error


def test_leaving_one_out_the_bound_is_met_exactly_where_nothing_depends_on_training() -> None:
    for rank in (1, 3):
        share, error = share_missed([1] * 13, rank, learnt=False)
        assert share == pytest.approx(rank / 14, abs=3 * error)
        assert share == pytest.approx(minmax_bound(13, 13, rank), abs=3 * error)


def worst_training(rank: int, *, told_size: bool) -> Fraction:
    """Largest share missed by any training in a world of three patients, two of them held out in two folds of one.

    A training is every score (0, 1 or 2) that a model of one patient may give another one; a model that is told the
    size of its fold's other class may differ by it.
    """
    models = list(itertools.permutations(range(3), 2))  # (trained on, scored)
    slots = {(size, *model): i for i, (size, model) in enumerate(itertools.product((0, 1), models))}
    grid = np.array(list(itertools.product(range(3), repeat=12 if told_size else 6)), dtype=np.int8)
    grid = grid if told_size else np.hstack([grid, grid])
    missed = np.zeros(len(grid), dtype=np.int8)
    for first, second, new in itertools.permutations(range(3)):
        held_out = np.sort(grid[:, [slots[0, second, first], slots[1, first, second]]], axis=1)
        largest = grid[:, [slots[0, second, new], slots[1, first, new]]].max(1)
        missed += largest < held_out[:, rank - 1]
    return Fraction(int(missed.max()), 6)


def test_no_training_of_a_tiny_world_breaks_the_bound_and_one_reaches_it() -> None:
    for rank in (1, 2):
        assert float(worst_training(rank, told_size=False)) == pytest.approx(minmax_bound(2, 2, rank))


def test_a_training_that_is_told_the_sizes_of_unequal_folds_breaks_it() -> None:
    """Why the folds of a partition hold equally many negatives, and unequal numbers of positives cost."""
    assert worst_training(1, told_size=True) == Fraction(1, 2)


# --- The threshold ----------------------------------------------------------------------------------------------------


LABEL = [1] * 13 + [0] * 4
SCORE = [0.05 * (i + 1) for i in range(13)] + [0.01, 0.2, 0.3, 0.9]


def test_the_threshold_is_the_order_statistic_with_its_bound_and_no_confidence() -> None:
    point = minmax_threshold(LABEL, SCORE, 1, folds=13)
    assert (point.rule, point.rank, point.folds, point.n_positive, point.n_negative) == ("minmax", 2, 13, 13, 4)
    assert (point.false_negatives, point.false_positive_rate) == (1, 0.75)
    assert point.threshold == pytest.approx(0.075, rel=1e-12)  # between the two lowest positives
    assert point.expected_miss_rate == pytest.approx(1 / 7)
    assert point.miss_rate_upper_95 is None
    assert point.basis.startswith("exact on average over cohorts, without confidence for one: ")
    assert OperatingPoint.from_json(json.loads(json.dumps(point.to_json(), allow_nan=False))) == point
    assert replace(point, runs_on_this_cohort=1).in_words() == point.in_words()
    first, _, last = point.in_words().split("\n")
    assert first == "Threshold 0.075 on the largest score of 13 members: minmax, 1 of 13 held-out positives below it."
    assert last == (
        "  On average over such cohorts at most 14.3 % of new patients who need DCE are missed; for this one cohort no "
        "bound is known."
    )


def test_a_promise_that_several_runs_share_is_said_to_be_weakened(tmp_path: Path) -> None:
    point = replace(minmax_threshold(LABEL, SCORE, 1, folds=13), runs_on_this_cohort=5)
    assert point.in_words().split("\n")[3:] == [
        "  WEAKENED: 5 runs were trained on these patients. If this one was chosen by held-out scores, the bound does "
        "not hold for it."
    ]
    fields = json.loads(json.dumps(point.to_json()))
    assert (fields["runs_on_this_cohort"], OperatingPoint.from_json(fields)) == (5, point)
    del fields["runs_on_this_cohort"]  # as version 0.4 wrote it
    assert OperatingPoint.from_json(fields).runs_on_this_cohort is None
    for wrong in (-2, False, ""):
        with pytest.raises(InputError, match="runs_on_this_cohort must be a whole number from 0 on, found "):
            OperatingPoint.from_json(fields | {"runs_on_this_cohort": wrong})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folds": 1}, "folds must be a whole number from 2 to 13, found 1"),
        ({"folds": 14}, "folds must be a whole number from 0 to 13, found 14"),
        ({"folds": "13"}, 'folds must be a whole number from 0 to 13, found "13"'),
        ({"miss_rate_upper_95": 0.2}, "miss_rate_upper_95 must be null where rule is minmax, found 0.2"),
        ({"expected_miss_rate": 0.05}, "expected_miss_rate must be 0.142857, the bound at rank 2 of 13 in 13 folds"),
        ({"folds": 6}, "expected_miss_rate must be 0.25, the bound at rank 2 of 13 in 6 folds"),
        ({"rule": "at most 1 missed"}, "An operating point has the fields threshold, .*, rule, basis; found"),
        ({"folds": ...}, "An operating point has the fields threshold, .*, basis, folds; found"),
    ],
    ids=str,
)
def test_a_file_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    fields = minmax_threshold(LABEL, SCORE, 1, folds=13).to_json() | change
    with pytest.raises(InputError, match=message):
        OperatingPoint.from_json({name: value for name, value in fields.items() if value is not ...})


def test_as_many_members_as_folds(tmp_path: Path) -> None:
    point = minmax_threshold(LABEL, SCORE, 1, folds=13)
    for members in (13, 12):
        checkpoints = {f"split_{k}": "0" * 64 for k in range(members)}
        (tmp_path / "threshold.json").write_text(json.dumps(point.to_json() | {"checkpoints": checkpoints}))
        if members == 13:
            assert RunFolder(tmp_path).operating_point() == (point, checkpoints)
        else:
            with pytest.raises(InputError, match="folds must be 12, the number of checkpoints, found 13"):
                RunFolder(tmp_path).operating_point()


@pytest.mark.parametrize(
    ("n", "alpha", "text"),
    [
        (1, 0.9, "1 positives: no rule keeps the share missed at 90 % on average; examine everyone."),
        (8, 0.1, "8 positives: no rule keeps the share missed at 10 % on average; examine everyone."),
        (9, 0.1, "9 positives: --split_rule partition --splits loo --max_fn 0 misses at most 10.0 % on average over"),
        (13, 0.1, "13 positives: --split_rule partition --splits loo --max_fn 0 misses at most 7.1 % on average over"),
        (60, 0.1, "60 positives: --split_rule partition --splits loo --max_fn 5 misses at most 9.8 % on average over"),
        (61, 0.1, "61 positives: keep half of them out of training, and give them to score.py --calibration."),
    ],
)
def test_which_rule_is_said_before_training(n: int, alpha: float, text: str) -> None:
    assert rule_in_words(n, alpha).startswith(text)
