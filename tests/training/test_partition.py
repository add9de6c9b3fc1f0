"""A run whose splits are folds: every positive patient held out once, by a member that nothing of its fold chose."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_cohort import read_rows, train

FOLDS: dict[str, Any] = {
    "split_rule": "partition", "splits": 5, "checkpoint_rule": "last", "mu_cap": 1, "max_epochs": 1, "max_fn": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(manifest, tmp_path_factory.mktemp("partition") / "run", **FOLDS)


def test_every_positive_is_held_out_once_by_one_member(manifest: Path, run: Path) -> None:
    training = [row for row in read_rows(manifest) if row["side"] == "train"]
    positive = {row["study"] for row in training if row["label"] == "1"}
    assert len(positive) == 10
    held_out = [{row["study"] for row in read_rows(run / f"split_{k}" / "validation.csv")} for k in range(5)]
    times = Counter(study for fold in held_out for study in fold)
    assert {times[study] for study in positive} == {1}
    assert [len(fold & positive) for fold in held_out] == [2] * 5
    assert [len(fold - positive) for fold in held_out] == [4] * 5
    assert {row["members"] for row in read_rows(run / "heldout.csv")} == {"1"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"checkpoint_rule": "best"}, ["checkpoint_rule best chooses the weights by the fold"]),
        ({"preset": "official_2022", "checkpoint_rule": "last", "mu_cap": "official"}, ["mu grows when the AUC of"]),
        ({"mu_cap": 8.0}, ["mu grows when the AUC of the held-out fold falls"]),
        ({"checkpoint_rule": "official", "mu_cap": None}, ["checkpoint_rule official chooses", "mu grows"]),
        ({"patience": 3}, ["patience 3 waits for a better epoch, and checkpoint_rule last knows none"]),
        ({"splits": 11}, ["10 positive and 20 negative patients; a partition into 11 folds needs"]),
        ({"split_rule": "random", "splits": "loo"}, ["one positive patient out at a time: it needs"]),
        ({"split_rule": "disjoint"}, ['split_rule must be random or partition, got "disjoint"']),
        ({"splits": "loo", "max_fn": 10}, ["Cannot allow 10 false negatives: 10 positive"]),
        ({"splits": "loo", "only_split": 10}, ["only_split must be a whole number below splits = 10, got 10"]),
    ],
    ids=str,
)
def test_what_a_partition_cannot_be_is_refused_before_anything_is_written(
    manifest: Path, tmp_path: Path, change: dict[str, Any], said: list[str], refusal: Callable[..., str]
) -> None:
    text = refusal(train, manifest, tmp_path / "run", **FOLDS | change)
    assert [part for part in said if part not in text] == []
    assert not (tmp_path / "run" / "config.json").exists()


def test_no_constraint_needs_no_cap(manifest: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    """The check that comes next is the one that refuses."""
    text = refusal(train, manifest, tmp_path / "run", **FOLDS | {"mu0": 0, "mu_cap": 8.0, "max_fn": 10})
    assert "Cannot allow 10 false negatives" in text
    assert "mu grows" not in text


def test_other_folds_of_a_run_are_refused(manifest: Path, run: Path, refusal: Callable[..., str]) -> None:
    text = refusal(train, manifest, run, **FOLDS | {"splits": 4})
    assert "was trained on other studies than the cohort gives it now" in text


def test_the_report_says_how_patients_were_dealt(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert "5 folds of the training patients, every positive one held out once" in text
    assert "random stratified splits" not in text
