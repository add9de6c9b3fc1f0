"""New exams against those a promise rests on: exact cases, and how often it is right and wrong on draws."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import betabinom, ks_2samp
from small_cohort import read_rows, write_manifest

from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.cohort.protocol import UNLIKE
from mri_alm.metrics import fixed_fn_threshold
from mri_alm.scoring.shift import LEAST_P, Reference, Watch, held_out_by_member, mixture_p_value, shift_report

LABEL = np.repeat([1, 0], [13, 104])


def scores(rng: np.random.Generator, label: Any, shift: float = 0.0) -> Any:
    return expit(rng.normal(2.0 * np.asarray(label), 1) + shift)


def test_with_all_the_weight_on_one_class_it_is_the_two_sample_test_of_scipy() -> None:
    """New scores above every negative: only the share 1 can explain them, and there the mixture is the positives."""
    rng = np.random.default_rng(1)
    positive, new = rng.uniform(0.5, 1, 40), rng.uniform(0.6, 1, 35)
    found = mixture_p_value([1] * 40 + [0] * 5, [*positive, *[0.0] * 5], new)
    assert found == pytest.approx(ks_2samp(positive, new, method="asymp").pvalue, rel=1e-9)


def test_no_share_of_positives_explains_scores_below_every_known_one() -> None:
    known = np.linspace(0.5, 1, LABEL.size)
    assert mixture_p_value(LABEL, known, np.full(30, 0.1)) < 1e-10
    assert mixture_p_value(LABEL, known, known) == 1.0


@pytest.mark.parametrize("share", [0.0, 0.11, 0.5, 1.0])
def test_false_alarms_are_rarer_than_promised_at_every_share_of_positives(share: float) -> None:
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(100):
        new = scores(rng, rng.random(60) < share)
        alarms += mixture_p_value(LABEL, scores(rng, LABEL), new) < LEAST_P
    assert alarms <= 3  # 4 or more of 100 at a chance of 0.01: less than 2 %


def test_scores_that_fell_are_noticed_and_fewer_positives_are_not() -> None:
    rng = np.random.default_rng(0)
    fell = [mixture_p_value(LABEL, scores(rng, LABEL), scores(rng, [0] * 53 + [1] * 7, -1.5)) for _ in range(20)]
    assert sum(p < LEAST_P for p in fell) >= 19
    rare = [mixture_p_value(LABEL, scores(rng, LABEL), scores(rng, [0] * 60)) for _ in range(20)]
    assert sum(p < LEAST_P for p in rare) == 0
    naive = [ks_2samp(scores(rng, [1, 0] * 58), scores(rng, [0] * 60)).pvalue for _ in range(20)]
    assert sum(p < LEAST_P for p in naive) >= 19  # a plain two-sample test would have cried


# --- The report -------------------------------------------------------------------------------------------------------

ROWS = [{"warnings": ""}] * 3 + [{"warnings": f"x | {UNLIKE}: a scanner"}]


def test_counts_are_those_of_the_beta_binomial_law() -> None:
    reference = Reference(LABEL, np.where(LABEL == 1, 0.9, 0.1), by_member=True)
    found = shift_report(reference, np.array([0.9, 0.1, 0.1, 0.2]), 0.5, ROWS)
    many = shift_report(reference, np.full(29, 0.1), 0.5, [])
    assert many["above_expected"] == [int(betabinom(29, 13.5, 104.5).ppf(q)) for q in (0.025, 0.975)] == [0, 8]
    law = betabinom(4, 13.5, 104.5)
    low, high = found["above_expected"]
    assert law.cdf(high) >= 0.975 > law.cdf(high - 1)
    assert (low, found["above_threshold"], found["promise"]) == (0, 1, "too few exams")
    assert found["in_words"] == (
        "Shift: compared is one member's score of each (members in turn) with that of 117 held-out exams: 1 of 4 at or "
        f"above the threshold, 0 to {high} expected if positives are as frequent; 30 exams are needed to tell more; 1 "
        "exams are unlike training, and the promise is not for them."
    )


def test_a_lost_promise_is_said_and_a_kept_one_is_not_called_proven() -> None:
    rng = np.random.default_rng(0)
    reference = Reference(LABEL, scores(rng, LABEL), by_member=False)
    lost = shift_report(reference, scores(rng, [0] * 40, -3), 0.5, [])
    assert lost["promise"] == "lost"
    assert "THE PROMISE OF THIS THRESHOLD NO LONGER STANDS" in lost["in_words"]
    assert "the score of each with that of 117 calibration patients" in lost["in_words"]
    kept = shift_report(reference, scores(rng, [0] * 40), 0.5, [])
    assert kept["promise"] == "nothing found"
    assert "which does not prove it" in kept["in_words"]
    assert shift_report(None, np.array([0.5]), 0.5, [])["promise"] == "not compared"
    assert shift_report(reference, np.array([]), 0.5, [])["in_words"] == "Shift: no exam was scored."


def test_a_members_score_is_compared_with_a_members_and_the_decisions_with_the_calibrations() -> None:
    members, decided_by = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9], [0.2, 0.1, 0.0]]), np.ones(4)
    held_out = Reference(LABEL, np.zeros(LABEL.size), by_member=True)
    assert held_out.new_scores(decided_by, members).tolist() == [0.1, 0.5, 0.9, 0.2]
    assert Reference(LABEL, np.zeros(LABEL.size), by_member=False).new_scores(decided_by, members) is decided_by


def test_each_held_out_exam_counts_once_by_a_member_that_did_not_see_it(trained: Path, tmp_path: Path) -> None:
    run = TrainedRun(trained)
    found = held_out_by_member(run)
    assert found is not None
    by_study = {}
    for k in (2, 1, 0):
        by_study |= {row["study"]: float(row["logit"]) for row in read_rows(trained / f"split_{k}" / "validation.csv")}
    assert sorted(found.score.tolist()) == pytest.approx(sorted(expit([*by_study.values()]).tolist()))
    assert found.label.sum() == sum(int(name[1:]) % 3 == 0 for name in by_study)


def test_earlier_exams_of_the_log_are_compared_too(trained: Path, tmp_path: Path) -> None:
    run = TrainedRun(trained)
    watch, point = Watch(run, tmp_path / "log.csv"), fixed_fn_threshold([1, 0], [0.5, 0.1], 0)
    for turn in range(8):
        rows: list[Any] = [
            {"study": f"{turn}{k}", "score": 0.5, "threshold": 0.5, "dce_needed": 1, "warnings": ""} for k in range(4)
        ]
        found = watch.take(rows, np.full((4, 3), -20.0), point)
        assert found["new_exams"] == 4 * (turn + 1)
    assert found["promise"] == "lost"
    alone = Watch(run).take(rows, np.full((4, 3), -20.0), point)
    assert (alone["new_exams"], alone["promise"]) == (4, "too few exams")


def test_with_a_calibration_cohort_the_scores_of_decisions_are_compared(trained: Path, tmp_path: Path) -> None:
    exams = [[f"E{k}", str(k % 2), str(0.2 + k / 100)] for k in range(40)]
    table = write_manifest(tmp_path / "cohort.csv", exams, ("study", "label", "score"))
    watch = Watch(TrainedRun(trained), None, table, table)
    rows: list[Any] = [{"study": str(k), "score": 0.2 + k / 100, "warnings": ""} for k in range(40)]
    found = watch.take(rows, np.zeros((40, 3)), fixed_fn_threshold([1, 0], [0.3, 0.295], 0))
    assert (found["promise"], found["above_threshold"]) == ("nothing found", 30)
    assert found["p_value"] == 1.0
