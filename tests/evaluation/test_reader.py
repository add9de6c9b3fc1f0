"""A reader's column beside the models, by hand and by counting."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_inputs import labels, scores, write_rows
from small_cohort import read_rows

from mri_alm.errors import InputError
from mri_alm.evaluation.analysis import evaluate
from mri_alm.evaluation.report import summary, write_evaluation
from mri_alm.metrics.uncertainty import bootstrap_interval

GRADES = (5, 3, 4, 1), (3, 4, 1, 2, 1)  # of exams that need DCE, and of those that do not
SCORES = (0.9, 0.8, 0.4, 0.3), (0.7, 0.35, 0.2, 0.1, 0.05)


def files(folder: Path, grades: Any = GRADES) -> tuple[dict[str, Path], Path]:
    rows = [
        {"study": f"S{label}{i}", "label": label, "score": score, "PI-RADS": grade}
        for label in (1, 0)
        for i, (score, grade) in enumerate(zip(SCORES[1 - label], grades[1 - label], strict=True))
    ]
    table = write_rows(folder / "table.csv", rows)
    return {"model": table}, table


def test_each_cut_by_hand(tmp_path: Path) -> None:
    found = evaluate(*files(tmp_path), reader="PI-RADS", draws=100)
    assert {(r.column, r.positives, r.negatives) for r in found.readers} == {("pi_rads", 4, 5)}
    assert not any("reverse" in text for text in found.warnings)
    by_hand = {  # reader's sensitivity, specificity; model's specificity at the one, sensitivity at the other
        2: (3 / 4, 2 / 5, 4 / 5, 1),
        3: (3 / 4, 3 / 5, 4 / 5, 1),
        4: (2 / 4, 4 / 5, 1, 3 / 4),
        5: (1 / 4, 1, 1, 2 / 4),
    }
    assert [r.cut for r in found.readers] == list(by_hand)
    for r, (sensitivity, specificity, model_specificity, model_sensitivity) in zip(
        found.readers, by_hand.values(), strict=True
    ):
        assert {name: one.value for name, one in r.figures.items()} == pytest.approx({
            "reader_sensitivity": sensitivity, "reader_specificity": specificity,
            "model_specificity": model_specificity, "model_sensitivity": model_sensitivity,
            "specificity_difference": model_specificity - specificity,
            "sensitivity_difference": model_sensitivity - sensitivity,
        })  # fmt: skip


def test_intervals_are_a_paired_bootstrap_that_chooses_the_threshold_anew(tmp_path: Path) -> None:
    rows = labels()
    rng = np.random.default_rng(4)
    for row in rows:
        row["reader"] = int(rng.integers(0, 3)) + row["label"]
    given = write_rows(tmp_path / "scores.csv", scores(rows, 1))
    found = evaluate({"m": given}, write_rows(tmp_path / "labels.csv", rows), reader="reader", draws=100, seed=2)

    def by_counting(label: Any, both: Any) -> list[list[float]]:
        of_cuts = []
        for cut in (1, 2, 3):
            called = both[:, 1] >= cut
            hits, spared = (called & (label == 1)).sum(), (~called & (label == 0)).sum()
            tried = [both[:, 0] >= t for t in [*np.unique(both[:, 0]), np.inf]]
            n, m = (label == 1).sum(), (label == 0).sum()
            best = max((~t & (label == 0)).sum() for t in tried if (t & (label == 1)).sum() >= hits)
            most = max((t & (label == 1)).sum() for t in tried if (~t & (label == 0)).sum() >= spared)
            of_cuts.append([(best - spared) / m, (most - hits) / n])
        return of_cuts

    both = np.column_stack([[row["score"] for row in read_rows(given)], [row["reader"] for row in rows]]).astype(float)
    label = np.array([row["label"] for row in rows])
    ends = bootstrap_interval(by_counting, label, both, draws=100, seed=2)
    for i, reader in enumerate(found.readers):
        for j, name in enumerate(("specificity_difference", "sensitivity_difference")):
            estimate = reader.figures[name]
            assert estimate.value == pytest.approx(by_counting(label, both)[i][j])
            assert (estimate.low, estimate.high) == pytest.approx(tuple(ends[:, i, j]))


def test_exams_that_nobody_read_are_left_out_and_counted(tmp_path: Path) -> None:
    found = evaluate(*files(tmp_path, ((5, 3, "", 1), (3, 4, 1, 2, ""))), reader="pi-rads", draws=100)
    assert {(r.positives, r.negatives) for r in found.readers} == {(3, 4)}
    assert "Compared with pi_rads: 2 of 9 exams have no value there and are left out." in found.warnings
    write_evaluation(tmp_path / "out", found)
    rows = read_rows(tmp_path / "out" / "tables" / "reader.csv")
    assert len(rows) == 4 * 6
    assert {row["metric"] for row in rows} == set(found.readers[0].figures)
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "<h3>Beside a reader</h3>" in page
    assert "model at the sensitivity of pi_rads from 5 (33.3 %): specificity, model - reader, 0.0 (" in summary(found)


def test_a_column_the_wrong_way_round_is_a_warning(tmp_path: Path) -> None:
    turned = tuple(tuple(6 - grade for grade in grades) for grades in GRADES)
    found = evaluate(*files(tmp_path, turned), reader="PI-RADS", draws=100)
    assert any("Is it the reverse?" in text for text in found.warnings)


@pytest.mark.parametrize(
    ("column", "grades", "message"),
    [
        ("pirads", GRADES, 'no column "pirads" of a reader. It has: study, label, score, pi_rads'),
        ("PI-RADS", (("PI-RADS 4", 3, 4, 1), GRADES[1]), 'study S10 has pi_rads "PI-RADS 4". Write a number'),
        ("PI-RADS", (("inf", 3, 4, 1), GRADES[1]), 'study S10 has pi_rads "inf"'),
        ("PI-RADS", (("nan", 3, 4, 1), GRADES[1]), 'study S10 has pi_rads "nan"'),
        ("PI-RADS", ((3, 3, 3, 3), (3, 3, 3, 3, 3)), "9 exams with a value have 1 different ones and 4 need DCE"),
        ("PI-RADS", (("", "", "", ""), GRADES[1]), "5 exams with a value have 4 different ones and 0 need DCE"),
        ("PI-RADS", (("", "", "", ""), ("",) * 5), "0 exams with a value have 0 different ones"),
    ],
)
def test_columns_that_no_reader_wrote(tmp_path: Path, column: str, grades: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(*files(tmp_path, grades), reader=column, draws=100)
