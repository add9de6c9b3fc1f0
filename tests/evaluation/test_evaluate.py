import csv
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_inputs import THRESHOLD, Rows, labels, scores, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from locking import holder
from scipy import stats
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, confusion_matrix, roc_auc_score, roc_curve
from small_cohort import read_rows

from mri_alm.errors import InputError
from mri_alm.evaluation.analysis import MOST_ALLOWED, evaluate, trade_off
from mri_alm.evaluation.data import read_labelled_scores
from mri_alm.evaluation.performance import Estimate, decision_counts, performance_of, ranking_figures
from mri_alm.evaluation.tables import Table, latex, write_table
from mri_alm.metrics.ranking import FprRule, fpr_at_tpr
from mri_alm.metrics.uncertainty import bootstrap_interval, delong_test, newcombe_interval
from mri_alm.programs.evaluate import main

Files = tuple[Path, Path, Path]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Labels, and scores of a good and of a poor model."""
    rows = labels()
    good, poor = scores(rows, 1), scores(rows, 2, shift=1.0)
    return (
        write_rows(tmp_path / "labels.csv", rows),
        write_rows(tmp_path / "good" / "scores.csv", good),
        write_rows(tmp_path / "poor.csv", poor),
    )


def run(files: Files, out: Path, *more: str) -> int:
    truth, good, poor = map(str, files)
    words = ["--scores", good, f"Poor & cheap={poor}", "--labels", truth, "--output", str(out), "--draws", "200"]
    return main([*words, *more])


def arrays(path: Path, truth: Path) -> tuple[np.ndarray, np.ndarray]:
    label = {row["study"]: int(row["label"]) for row in read_rows(truth)}
    rows = read_rows(path)
    return np.array([label[row["study"]] for row in rows]), np.array([float(row["score"]) for row in rows])


def load(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def fpr_at(y: np.ndarray, s: np.ndarray, misses: int) -> float:
    fpr, tpr, _ = roc_curve(y, s, drop_intermediate=False)
    return float(fpr[tpr >= (y.sum() - misses) / y.sum() - 1e-12].min())


# --- Numbers --------------------------------------------------------------------------------------------------------


def test_figures_equal_scikit_learn_s(files: Files, tmp_path: Path) -> None:
    assert run(files, tmp_path / "out") == 0
    found = load(tmp_path / "out" / "evaluation.json")["models"]
    assert list(found) == ["good", "Poor & cheap"]
    for name, path in zip(found, files[1:], strict=True):
        y, s = arrays(path, files[0])
        value = {key: figure["value"] for key, figure in found[name]["figures"].items()}
        assert value["auc"] == pytest.approx(roc_auc_score(y, s))
        assert value["partial_auc"] == pytest.approx(roc_auc_score(1 - y, -s, max_fpr=0.1))
        assert value["brier"] == pytest.approx(brier_score_loss(y, s))
        assert value["observed_expected"] == pytest.approx(12 / s.sum())
        for t in (98, 95, 92, 90):
            assert value[f"fpr_at_tpr_{t}"] == pytest.approx(fpr_at(y, s, 12 - math.ceil(12 * t / 100)))
        for k in (0, 1, 2, 5):
            assert value[f"fpr_at_fn_{k}"] == pytest.approx(fpr_at(y, s, k))
            bound = stats.binomtest(k, 12, alternative="less").proportion_ci(0.95).high
            assert found[name]["miss_rate_upper_95"][str(k)] == pytest.approx(bound)
        (tn, fp), (fn, tp) = confusion_matrix(y, s >= THRESHOLD)
        assert value["sensitivity"] == tp / 12
        assert value["specificity"] == tn / (tn + fp)
        assert value["npv"] == tn / (tn + fn)
        assert value["spared"] == (tn + fn) / 60
        rate, mean = calibration_curve(y, s, n_bins=10)
        counts = np.histogram(s, np.linspace(0, 1, 11))[0]
        assert value["ece"] == pytest.approx(np.average(np.abs(rate - mean), weights=counts[counts > 0]))


@pytest.mark.parametrize("rule", ["lowest", "interpolate", "official"])
def test_figures_without_intervals_are_the_same(files: Files, rule: FprRule) -> None:
    y, s = arrays(files[1], files[0])
    found = ranking_figures(y, s, tpr_rule=rule)
    figures = performance_of(y, s, s >= THRESHOLD, draws=100).figures
    assert found.auc == figures["auc"].value
    assert found.fpr_at_tpr == {t: fpr_at_tpr(y, s, t / 100, rule=rule) for t in (98, 95, 92, 90)}
    assert found.fpr_at_fn == {k: figures[f"fpr_at_fn_{k}"].value for k in (0, 1, 2, 5)}
    assert rule != "lowest" or all(figures[name].value == fpr for name, fpr in found.fprs.items())
    counts = decision_counts(y, s >= THRESHOLD)
    (tn, fp), (fn, _) = confusion_matrix(y, s >= THRESHOLD)
    assert (counts.false_negatives, counts.false_positives, counts.spared) == (fn, fp, tn + fn)


def test_a_cohort_of_two_positives_has_no_figure_at_two_misses() -> None:
    assert list(ranking_figures([1, 1, 0], [3, 2, 1]).fpr_at_fn) == [0, 1]


def test_intervals_are_a_stratified_bootstrap_of_scikit_learn_s_figures(files: Files) -> None:
    y, s = arrays(files[1], files[0])
    found = performance_of(y, s, draws=100, seed=3).figures

    def oracle(label: np.ndarray, score: np.ndarray) -> list[float]:
        return [roc_auc_score(label, score), brier_score_loss(label, score), fpr_at(label, score, 1)]

    low, high = bootstrap_interval(oracle, y, s, draws=100, seed=3)
    for i, name in enumerate(("brier", "fpr_at_fn_1"), 1):
        assert (found[name].low, found[name].high) == pytest.approx((low[i], high[i]))
    assert (found["auc"].low, found["auc"].high) == newcombe_interval(roc_auc_score(y, s), 12, 48)
    for name in ("auc", "brier", "fpr_at_fn_1"):
        assert found[name].low < found[name].value < found[name].high


def test_a_perfect_auc_has_an_honest_interval() -> None:
    auc = performance_of([1] * 8 + [0] * 64, [0.9] * 8 + [0.1] * 64, draws=10).figures["auc"]
    assert (auc.value, auc.high) == (1, 1)
    assert 0.85 < auc.low < 0.95
    one = performance_of([1] + [0] * 64, [0.9] + [0.1] * 64, draws=10).figures["auc"]
    assert one.low < auc.low


def test_a_patient_with_more_positive_studies_than_others_has_intervals(files: Files) -> None:
    """A draw of patients then holds fewer positive studies than there are, or more."""
    change(files[0], lambda rows: rows[5].update(patient=rows[0]["patient"]))  # both positive
    found = evaluate({"a": files[1], "b": files[2]}, files[0], draws=100)
    for roc in (performance.roc for performance in found.performances.values()):
        assert len(roc.low) == len(roc.fpr) == 12
        assert (roc.low <= roc.high).all()
    y, s = [1, 1, 1, 0, 0, 0, 0], np.arange(7)[::-1] / 7
    figures = performance_of(y, s, patient=["A", "A", "B", "C", "D", "E", "F"], draws=200).figures
    assert {"fpr_at_fn_0", "fpr_at_fn_2"} <= figures.keys()
    assert "fpr_at_fn_5" not in figures
    assert figures["fpr_at_fn_2"] == Estimate(0, 0, 0)


def test_intervals_count_patients_not_studies() -> None:
    """Every study a second time, of the same patient: what is known is no more than before."""
    rng = np.random.default_rng(0)
    y = np.repeat([1, 0], [12, 48])
    s = rng.random(60) / 2 + y / 3
    patient = [f"P{i}" for i in range(60)]
    once = performance_of(y, s, patient=patient, draws=200).figures
    twice = performance_of(np.tile(y, 2), np.tile(s, 2), patient=patient * 2, draws=200).figures
    studies = performance_of(np.tile(y, 2), np.tile(s, 2), draws=200).figures
    for name in ("auc", "partial_auc", "brier"):
        ends = [one[name].high - one[name].low for one in (once, twice, studies)]
        assert ends[1] == pytest.approx(ends[0], rel=0.25)
        assert ends[2] < 0.85 * ends[1]


def test_a_proportion_of_one_has_an_honest_interval() -> None:
    figures = performance_of([1] * 8 + [0] * 64, [0.9] * 8 + [0.1] * 64, [1] * 8 + [0] * 64, draws=100).figures
    assert figures["sensitivity"].value == 1
    assert figures["sensitivity"].low == pytest.approx(0.025 ** (1 / 8))


def test_models_are_compared_in_pairs(files: Files, tmp_path: Path) -> None:
    assert run(files, tmp_path / "out") == 0
    (found,) = load(tmp_path / "out" / "evaluation.json")["comparisons"]
    (y, a), (_, b) = (arrays(path, files[0]) for path in files[1:])
    test = delong_test(y, a, b)
    assert found["delong"]["p_value"] == found["p_holm"] == test.p_value
    assert found["delong"]["difference"] == pytest.approx(roc_auc_score(y, a) - roc_auc_score(y, b))
    figure = found["differences"]["fpr_at_fn_2"]
    assert figure["value"] == pytest.approx(fpr_at(y, a, 2) - fpr_at(y, b, 2))
    both = np.column_stack([a, b])
    ends = bootstrap_interval(
        lambda label, s: fpr_at(label, s[:, 0], 2) - fpr_at(label, s[:, 1], 2), y, both, draws=200
    )
    assert (figure["low"], figure["high"]) == pytest.approx(tuple(ends))


def test_three_models_are_one_family(tmp_path: Path) -> None:
    rows = labels()
    truth = write_rows(tmp_path / "labels.csv", rows)
    paths = {
        name: write_rows(tmp_path / f"{name}.csv", scores(rows, i, shift))
        for i, (name, shift) in enumerate([("a", 2.5), ("b", 1.0), ("c", 0.0)])
    }
    found = evaluate(paths, truth, draws=100).comparisons
    assert [(c.model_a, c.model_b) for c in found] == [("a", "b"), ("a", "c"), ("b", "c")]
    p = sorted(c.delong.p_value for c in found if c.delong)
    by_hand = [3 * p[0], max(3 * p[0], 2 * p[1]), max(3 * p[0], 2 * p[1], p[2])]
    assert sorted(c.p_holm for c in found if c.p_holm is not None) == pytest.approx([min(x, 1) for x in by_hand])


def test_a_comparison_without_variance_is_reported_without_a_test(tmp_path: Path) -> None:
    rows = labels()
    perfect, reverse = ([{"study": r["study"], "score": abs(flip - r["label"])} for r in rows] for flip in (0, 1))
    paths = {
        "perfect": write_rows(tmp_path / "p.csv", perfect), "reverse": write_rows(tmp_path / "r.csv", reverse),
    }  # fmt: skip
    (found,) = evaluate(paths, write_rows(tmp_path / "labels.csv", rows), draws=100).comparisons
    assert found.delong is None
    assert found.p_holm is None
    assert "estimated variance is zero" in found.note


def test_subgroups_are_the_subsets(files: Files, tmp_path: Path) -> None:
    assert run(files, tmp_path / "out", "--group-by", "vendor", "side") == 0
    found = load(tmp_path / "out" / "evaluation.json")["subgroups"]
    assert [(g["column"], g["value"]) for g in found[::2]] == [
        ("vendor", "A"), ("vendor", "B"), ("vendor", "C"), ("side", "test"),
    ]  # fmt: skip
    vendor = np.array([row["vendor"] for row in read_rows(files[0])])
    y, s = arrays(files[1], files[0])
    for group in found[:6:2]:
        rows = vendor == group["value"]
        assert group["positives"] == y[rows].sum()
        assert group["negatives"] == (1 - y[rows]).sum()
        if group["value"] == "C":
            assert group["warning"] == "only 0 positives"
            assert "figures" not in group
        else:
            assert group["figures"]["auc"]["value"] == pytest.approx(roc_auc_score(y[rows], s[rows]))
            assert group["warning"] == ("only 2 positives" if group["value"] == "A" else "")
    whole = load(tmp_path / "out" / "evaluation.json")["models"]["good"]["figures"]
    assert found[-2]["figures"] == whole


def test_scanner_columns_make_groups_by_themselves(files: Files) -> None:
    found = evaluate({"m": files[1]}, files[0], draws=100)
    assert {g.column for g in found.groups} == {"vendor"}
    assert any("vendor A, vendor C" in text for text in found.warnings)


def test_scores_that_are_no_probabilities_have_no_calibration(files: Files) -> None:
    y, s = arrays(files[1], files[0])
    figures = performance_of(y, 10 * s - 2, draws=100).figures
    assert {"brier", "ece", "calibration_slope", "observed_expected"}.isdisjoint(figures)
    assert figures["auc"].value == pytest.approx(roc_auc_score(y, s))


def test_examine_everyone_spares_nobody(files: Files) -> None:
    rows: Rows = [dict(row, threshold="", dce_needed=1) for row in read_rows(files[1])]
    found = evaluate({"m": write_rows(files[1], rows)}, files[0], draws=100)
    assert found.data.models[0].threshold == -math.inf
    figures = found.performances["m"].figures
    assert (figures["sensitivity"].value, figures["specificity"].value, figures["spared"].value) == (1, 0, 0)
    assert "npv" not in figures


# --- Allowed false negatives ----------------------------------------------------------------------------------------


@st.composite
def tied(draw: Any) -> tuple[list[int], list[float]]:
    label = [0, 1, *draw(st.lists(st.integers(0, 1), max_size=14))]
    return label, draw(st.lists(st.integers(0, 6).map(float), min_size=len(label), max_size=len(label)))


@settings(max_examples=60)
@given(tied(), tied())
def test_every_step_by_counting(evaluated: Any, held_out: Any) -> None:
    label, score = map(np.array, evaluated)
    for set_on in (None, held_out):
        on_label, on_score = map(np.array, set_on or evaluated)
        positives = sorted(on_score[on_label == 1])
        grid = sorted(set(on_score))  # a threshold lies halfway to the next lower score
        middle = {s: (s + grid[i - 1]) / 2 if i else s * (1 - 1e-4) for i, s in enumerate(grid)}
        steps = list(trade_off(label, score, set_on, draws=20))
        assert [step.allowed for step in steps] == [None, *range(len(positives))]
        for rank, step in enumerate(steps):
            threshold = middle[positives[rank - 1]] if rank else -math.inf
            assert step.threshold == pytest.approx(threshold)
            if set_on is None:  # the same decisions as at the score itself
                assert (score >= threshold).tolist() == (score >= (positives[rank - 1] if rank else -1)).tolist()
            assert step.missed.tolist() == [y == 1 and s < threshold for y, s in zip(label, score, strict=True)]
            assert step.false_positives == sum(y == 0 and s >= threshold for y, s in zip(label, score, strict=True))
            assert step.spared.value == np.mean(score < threshold)
            assert set_on or step.missed.sum() <= max(rank - 1, 0)
            m, n = step.new_positives, len(positives)
            assert m == max(1, round(100 * label.mean()))
            if rank:
                law = stats.betabinom(m, rank, n - rank + 1)
                assert step.expected_misses == pytest.approx(law.mean())
                assert step.miss_rate_upper == pytest.approx(stats.beta.ppf(0.95, rank, n - rank + 1))
            else:
                assert (step.expected_misses, step.miss_rate_upper) == (0, 0)


def test_a_calibration_cohort_moves_the_slider(files: Files, tmp_path: Path) -> None:
    rows = [row | {"study": "C" + row["study"], "patient": "C" + row["patient"]} for row in labels(90, 30)]
    rows[3]["patient"] = rows[0]["patient"].lower()  # the same one, positive both times: the lower score counts
    scored = scores(rows, 3)
    cohort = write_rows(tmp_path / "c.csv", scored), write_rows(tmp_path / "l.csv", rows)
    first = evaluate({"good": files[1]}, files[0], calibration=cohort, draws=100).trade_offs[0]
    score = {row["study"]: row["score"] for row in scored}
    low = sorted([min(score["CS000"], score["CS003"]), *(score[r["study"]] for r in rows[4:] if r["label"])])
    assert (first.key, first.positives, first.start) == ("calibration", 29, 1)
    every = sorted({*low, *(score[r["study"]] for r in rows if not r["label"])})
    middle = [(s + every[every.index(s) - 1]) / 2 if every.index(s) else s * (1 - 1e-4) for s in low]
    assert [step.threshold for step in first.steps] == pytest.approx([-math.inf, *middle])
    written = write_rows(
        tmp_path / "decided.csv", [row | {"threshold": low[4], "dce_needed": ""} for row in read_rows(files[1])]
    )
    assert (
        evaluate({"good": written}, files[0], calibration=cohort, draws=100).trade_offs[0].start
        == low.index(low[4]) + 1
    )
    assert run(files, tmp_path / "out", "--calibration", *map(str, cohort)) == 0
    assert "allowed_calibration.csv" in {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    assert "law of new misses is exact" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_a_patient_does_not_calibrate_what_is_tried_on_it(files: Files) -> None:
    with pytest.raises(
        InputError, match=r"^120 calibration patients or studies were trained on, or are evaluated too \(such as P000\)"
    ):
        evaluate({"good": files[1]}, files[0], calibration=(files[1], files[0]), draws=100)


def test_the_same_exams_do_not_calibrate_though_one_table_names_no_patients(files: Files, tmp_path: Path) -> None:
    bare = write_rows(tmp_path / "l.csv", [{"study": row["study"], "label": row["label"]} for row in labels()])
    for cohort, evaluated in (((files[1], bare), files[0]), ((files[1], files[0]), bare)):
        with pytest.raises(InputError, match="60 calibration patients or studies"):
            evaluate({"good": files[1]}, evaluated, calibration=cohort, draws=100)


def test_exams_without_a_patient_s_name_are_patients_of_their_own(files: Files, tmp_path: Path) -> None:
    rows = [row | {"study": "C" + row["study"], "patient": ""} for row in labels(90, 30)]
    cohort = write_rows(tmp_path / "c.csv", scores(rows, 3)), write_rows(tmp_path / "l.csv", rows)
    assert evaluate({"good": files[1]}, files[0], calibration=cohort, draws=100).trade_offs[0].positives == 30


def test_steps_of_a_large_cohort_end_where_nobody_goes() -> None:
    label = np.arange(1000) % 2
    assert len(list(trade_off(label, label + np.linspace(0, 1, 1000), draws=2))) == MOST_ALLOWED + 2


def test_the_interval_of_what_is_spared_moves_the_threshold_with_the_sample(files: Files) -> None:
    y, s = arrays(files[1], files[0])
    step = list(trade_off(y, s, draws=100, seed=5))[3]
    low, high = bootstrap_interval(
        lambda label, score: np.mean(score < np.sort(score[label == 1])[2]), y, s, draws=100, seed=5
    )
    assert (step.spared.low, step.spared.high) == pytest.approx((low, high))


# --- What is written ------------------------------------------------------------------------------------------------


def test_tables_hold_the_same_numbers_as_the_json(files: Files, tmp_path: Path) -> None:
    assert run(files, tmp_path / "out", "--group-by", "vendor") == 0
    out = tmp_path / "out"
    names = {"metrics", "patients", "allowed_evaluated", "comparisons", "subgroups"}
    assert {path.name for path in (out / "tables").iterdir()} == {
        f"{n}.{e}" for n in names for e in ("csv", "json", "tex")
    }
    models = load(out / "evaluation.json")["models"]
    rows = read_rows(out / "tables" / "metrics.csv")
    assert len(rows) == sum(len(model["figures"]) for model in models.values())
    for row in rows:
        figure = models[row["model"]]["figures"][row["metric"]]
        assert (float(row["value"]), float(row["low"])) == (figure["value"], figure["low"])
    for name in names:
        table = load(out / "tables" / f"{name}.json")["rows"]
        plain = read_rows(out / "tables" / f"{name}.csv")
        assert len(table) == len(plain)
        for record, row in zip(table, plain, strict=True):
            for key, value in record.items():
                assert row[key] == ("" if value is None else str(value)), (name, key)


def test_patients_carry_their_outcome(files: Files, tmp_path: Path) -> None:
    assert run(files, tmp_path / "out") == 0
    for row in read_rows(tmp_path / "out" / "tables" / "patients.csv"):
        needed = float(row["score"]) >= THRESHOLD
        words = {(1, 1): "examined", (0, 0): "spared", (1, 0): "missed", (0, 1): "needless"}
        assert row["outcome"] == words[int(row["label"]), int(needed)]


def test_latex_is_booktabs_and_escaped(files: Files, tmp_path: Path) -> None:
    assert run(files, tmp_path / "out") == 0
    text = (tmp_path / "out" / "tables" / "metrics.tex").read_text("utf-8")
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    assert r"\begin{tabular}{lrr}" in text
    assert r" & good & Poor \& cheap \\" in text
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {2}
    assert not re.search(r"(?<!\\)[%#_]", body)


def test_every_special_character_of_latex_is_escaped() -> None:
    cell = "\\{}$&#%_~^<>\n"
    text = latex(Table("t", "a\nb", ["x"], [], ["", "h"], [[cell, "1"]]))
    expected = r"\textbackslash{}\{\}\$\&\#\%\_\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}"
    assert f"{expected}  & 1 \\\\" in text
    assert text.startswith("% a b\n")


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1+1", "-A1", "@SUM(A1)", "\t=1", "\r=1", "\n@x"])
def test_a_formula_is_text_in_a_spreadsheet(text: str, tmp_path: Path) -> None:
    shown = f"'{text}".replace("\t", " ").replace("\r", " ").replace("\n", " ")
    write_table(tmp_path, Table("t", "", ["x", "y"], [{"x": text, "y": -1.5}], ["x"], [[text]]))
    with (tmp_path / "t.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"x": shown, "y": "-1.5"}]
    assert load(tmp_path / "t.json")["rows"] == [{"x": text, "y": -1.5}]


def test_an_output_that_another_process_writes_to_is_refused(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with holder(out / ".lock") as other:
        assert run(files, out) == 2
        assert f"error: {out} is in use by process {other.pid} on" in capsys.readouterr().err
        assert [path.name for path in out.iterdir()] == [".lock"]
    assert run(files, own := tmp_path / "own") == 0
    assert not (own / ".lock").exists()
    assert own.stat().st_mode & 0o777 == 0o700


def test_what_a_killed_evaluation_left_is_taken_away(files: Files, tmp_path: Path) -> None:
    for folder in (tmp_path / "out", tmp_path / "out" / "tables"):
        (folder / ".part-killed").mkdir(parents=True)
    assert run(files, tmp_path / "out") == 0
    assert list((tmp_path / "out").rglob(".part-*")) == []


def test_the_same_input_gives_the_same_files(files: Files, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run(files, tmp_path / name) == 0
    a, b = ({p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*.*")} for n in "ab")
    assert a == b
    assert len(a) > 10


def test_the_terminal_says_what_matters(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, tmp_path / "out") == 0
    text = capsys.readouterr().out
    y, s = arrays(files[1], files[0])
    assert text.startswith(f"60 exams: 12 need DCE, 48 do not\ngood: AUC {100 * roc_auc_score(y, s):.1f} (")
    assert f"FPR at 0 FN {100 * fpr_at(y, s, 0):.1f} (" in text
    assert "of new positives up to 22.1 % missed" in text
    assert "warning: Only 12 positives: one exam moves every figure by much" in text
    assert f"Written: {tmp_path / 'out'}/evaluation.json, tables/, report.html (open in a browser)" in text


# --- What is left out, and said -------------------------------------------------------------------------------------


def change(path: Path, edit: Callable[[list[dict[str, str]]], Any]) -> None:
    rows = read_rows(path)
    edit(rows)
    write_rows(path, rows)


def test_a_study_that_could_not_be_scored_is_left_out_of_all_models(files: Files) -> None:
    change(files[1], lambda rows: rows[3].update(score="", warnings="NOT SCORED (no_t2): no T2 series"))
    found = evaluate({"a": files[1], "b": files[2]}, files[0], draws=100)
    assert len(found.data.studies) == 59
    assert found.data.left_out == {"S003": "NOT SCORED (no_t2): no T2 series"}
    assert found.performances["b"].negatives == 47
    assert any(text.startswith("Not evaluated, 1 of the label table") for text in found.warnings)


def test_rows_that_need_no_score_are_left_out_with_the_reason(files: Files) -> None:
    def more(rows: list[dict[str, str]]) -> None:
        base = rows[0] | {"status": "ok", "error_code": ""}
        for row in rows:
            row.update(status="ok", error_code="")
        rows.append(base | {"study": "T1", "side": "train"})
        rows.append(base | {"study": "F1", "status": "failed", "error_code": "no_t2"})
        rows.append(base | {"study": "U1", "label": ""})
        rows.append(base | {"study": "X1"})

    change(files[0], more)
    found = read_labelled_scores({"a": files[1]}, files[0], exclude=["X1"])
    assert found.left_out == {
        "T1": "training study",
        "F1": "failed in preparation (no_t2)",
        "U1": "no label",
        "X1": "left out by the training run's setting exclude",
    }
    assert len(found.studies) == 60


def test_scored_training_studies_are_a_warning(files: Files) -> None:
    change(files[0], lambda rows: rows[7].update(side="train"))
    assert "1 of 60 evaluated studies have side = train" in evaluate({"a": files[1]}, files[0], draws=100).warnings[0]


def test_several_studies_of_a_patient_are_a_warning(files: Files) -> None:
    change(files[0], lambda rows: rows[7].update(patient=rows[8]["patient"]))
    assert "60 studies come from 59 patients" in evaluate({"a": files[1]}, files[0], draws=100).warnings[0]


def test_a_threshold_that_is_not_the_run_s_is_a_warning(trained: Path, manifest: Path, tmp_path: Path) -> None:
    rows: Rows = [dict(r, threshold=0.0, dce_needed=1) for r in read_rows(trained / "scores.csv")]
    found = evaluate({"a": write_rows(tmp_path / "s.csv", rows)}, manifest, run=trained, draws=100)
    assert "The scores were decided at threshold 0, the run's threshold.json says" in found.warnings[-1]


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "edit", "message"),
    [
        (0, lambda rows: rows.pop(5), r"scores\.csv: no row in .*labels\.csv for 1 study \(S005\)\. Add the labels"),
        (2, lambda rows: rows.pop(4), r"poor\.csv: no row there for 1 study \(S004\) of .*labels\.csv\. Score them"),
        (1, lambda rows: rows[2].update(score="nan"), r'scores\.csv: study S002 has score "nan", which is no finite'),
        (1, lambda rows: rows[2].update(score="high"), r'study S002 has score "high"'),
        (1, lambda rows: rows[2].update(score="inf"), r'study S002 has score "inf"'),
        (0, lambda rows: [row.update(label="0") for row in rows], "the 60 studies with a score all have one label"),
        (0, lambda rows: rows[1].update(label="yes"), r'study S001 has label "yes"\. Write 1 \(DCE needed\) or 0'),
        (0, lambda rows: rows[1].update(label=""), r'study S001 has label ""'),
        (1, lambda rows: rows.append(dict(rows[0])), r"several rows, or no name, for 1 study \(S000\)"),
        (1, lambda rows: rows[0].update(study=""), r"several rows, or no name, for 1 study \(without name\)"),
        (1, lambda rows: rows[0].update(threshold="0.5"), r"column threshold must hold one number .*, found 2 values"),
        (
            1,
            lambda rows: rows[1].update(dce_needed="2"),
            r"study S001 has dce_needed 2 at score .* and threshold 0\.4;",
        ),
        (1, lambda rows: [row.pop("score") for row in rows], r"scores\.csv: no column score\. Its columns are: study"),
        (0, lambda rows: [row.pop("label") for row in rows], r"labels\.csv: no column label"),
    ],
)
def test_bad_input_is_refused(
    files: Files,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    which: int,
    edit: Callable[[list[dict[str, str]]], Any],
    message: str,
) -> None:
    change(files[which], edit)
    assert run(files, tmp_path / "out") == 2
    text = capsys.readouterr().err
    assert re.search(message, text)
    assert text.startswith("error: ")
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()


def test_all_problems_are_named_at_once(files: Files) -> None:
    change(files[0], lambda rows: rows.pop(5))
    change(files[1], lambda rows: rows[2].update(score="nan"))
    with pytest.raises(InputError, match=r"(?s)S005.*S005.*S002"):
        read_labelled_scores({"a": files[1], "b": files[2]}, files[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read \(No such file or directory\)\. Give the path of a CSV file"),
        (b"study,score\n", "has a header but no row below it"),
        (b"", "no column study, score. Its columns are: none"),
        (b"\xff\xfe\x00", "is no text in UTF-8, UTF-16 or Windows-1252, or is damaged"),
    ],
)
def test_files_that_are_no_tables(files: Files, tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "other.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_labelled_scores({"a": path}, files[0])


@pytest.mark.parametrize(
    ("column", "message"),
    [("scanner", 'no column "scanner" to group by. It has: study, patient'), ("age", '"age" has 60 different values')],
)
def test_columns_that_make_no_groups(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, message: str
) -> None:
    assert run(files, tmp_path / "out", "--group-by", column) == 2
    assert message in capsys.readouterr().err


def test_two_models_of_one_name(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--scores", f"m={files[1]}", f"m={files[2]}", "--labels", str(files[0]), "--output", "unused"]
    assert main(words) == 2
    assert 'two files are named "m". Write NAME=FILE' in capsys.readouterr().err


def test_scores_of_training_studies_are_refused(
    trained: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = read_rows(trained / "splits.csv")[0]["study"]
    rows = [*read_rows(trained / "scores.csv"), read_rows(trained / "scores.csv")[0] | {"study": first}]
    path = write_rows(tmp_path / "scores.csv", rows)
    words = ["--scores", str(path), "--labels", str(manifest), "--run", str(trained), "--output", str(tmp_path / "out")]
    assert main(words) == 2
    assert f"Among the scores are training studies of this run: 1 study ({first})." in capsys.readouterr().err


@pytest.mark.parametrize("broken", ["threshold.json", "split_0/split.json", None])
def test_a_folder_that_is_no_run(files: Files, trained: Path, tmp_path: Path, broken: str | None) -> None:
    folder = tmp_path / "run"
    if broken:
        for path in trained.rglob("*.*"):
            if path.suffix in (".json", ".csv"):
                copy = folder / path.relative_to(trained)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(b"{}" if str(path.relative_to(trained)) == broken else path.read_bytes())
    message = r"is no run folder of this version \(DamagedFileError: .*found" if broken else "--run takes the folder"
    with pytest.raises(InputError, match=message):
        evaluate({"a": files[1]}, files[0], run=folder)


def test_too_few_draws(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(files, tmp_path, "--draws", "10")
    assert "--draws must be 100 or more" in capsys.readouterr().err


def test_neither_another_model_nor_patients_trained_on_calibrate_a_run(
    trained: Path, manifest: Path, tmp_path: Path
) -> None:
    known = read_rows(trained / "splits.csv")
    rows = [{"study": f"N{i}", "patient": row["patient"], "label": row["label"]} for i, row in enumerate(known)]
    scored = [{"study": row["study"], "score": (i + 1) / 100} for i, row in enumerate(rows)]
    cohort = write_rows(tmp_path / "c.csv", scored), write_rows(tmp_path / "l.csv", rows)
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"model": {"checkpoints_sha256": {"split_0": "other"}}}))
    tried = partial(evaluate, {"new": trained / "scores.csv"}, manifest, run=trained, calibration=cohort, draws=50)
    with pytest.raises(InputError, match=r"c\.csv holds scores of another model"):
        tried()
    report.write_text("{")
    with pytest.raises(InputError, match=r"report\.json is damaged"):
        tried()
    report.unlink()
    with pytest.raises(InputError, match=f"^{len({row['patient'] for row in rows})} calibration patients or studies"):
        tried()
