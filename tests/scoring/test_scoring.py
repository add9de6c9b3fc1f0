"""New exams scored with a trained run, and the threshold taken from a calibration cohort of the user's own."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_cohort import COHORT_COLUMNS, inference, read_rows, write_manifest

from mri_alm.bundle.trained_run import TrainedRun, collect
from mri_alm.errors import InputError
from mri_alm.imaging.exam import load_images
from mri_alm.metrics.threshold import neyman_pearson_rank
from mri_alm.scoring.new_exams import operating_point


def some(manifest: Path, folder: Path) -> Path:
    """A manifest of the last four exams, as each takes a picture."""
    rows = [
        [
            str(manifest.parent / row[column]) if column in ("t2", "adc", "hbv") else row[column]
            for column in COHORT_COLUMNS
        ]
        for row in read_rows(manifest)[-4:]
    ]
    folder.mkdir(exist_ok=True)
    return write_manifest(folder / "some.csv", rows)


def score(trained: Path, manifest: Path, output: Path, **overrides: Any) -> Path:
    inference(trained, some(manifest, output), output, allow_outside_paths=True, **overrides).run()
    return output


def test_scores_are_those_of_training_in_manifest_order(manifest: Path, trained: Path, tmp_path: Path) -> None:
    rows = read_rows(score(trained, manifest, tmp_path) / "scores.csv")
    assert [row["study"] for row in rows] == [row["study"] for row in read_rows(manifest)][-4:]
    expected = {row["study"]: float(row["logit"]) for row in read_rows(trained / "scores.csv")[-4:]}
    assert {row["study"]: float(row["logit"]) for row in rows} == pytest.approx(expected, abs=1e-5)


def test_an_exam_that_the_network_gives_no_number_for_is_not_scored(
    manifest: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(evaluator: Any) -> Any:
        names, logits = collect(evaluator)
        logits[1, 0] = math.nan
        return names, logits

    monkeypatch.setattr("mri_alm.scoring.new_exams.collect", damaged)
    rows = read_rows(score(trained, manifest, tmp_path) / "scores.csv")
    assert [row["score"] == "" for row in rows] == [False, True, False, False]
    assert "NOT SCORED (no_score)" in rows[1]["warnings"]
    assert not (tmp_path / f"{rows[1]['study']}.png").exists()


def test_an_exam_that_no_network_takes_costs_the_others_nothing(
    manifest: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All four are one batch: when it fails, each is scored alone."""
    expected = read_rows(trained / "scores.csv")[-4:]
    bad = expected[1]["study"]

    def odd(evaluator: Any) -> Any:
        if bad in [item["study"] for item in evaluator.data_loader.dataset.data]:
            raise RuntimeError("Mueller/1977")
        return collect(evaluator)

    monkeypatch.setattr("mri_alm.scoring.new_exams.collect", odd)
    output = score(trained, manifest, tmp_path / "odd")
    rows = read_rows(output / "scores.csv")
    assert [row["study"] for row in rows] == [row["study"] for row in expected]
    assert "NOT SCORED (unexpected)" in rows[1]["warnings"]
    for number in (0, 2, 3):
        assert float(rows[number]["logit"]) == pytest.approx(float(expected[number]["logit"]), abs=1e-5)
        assert (output / f"{rows[number]['study']}.png").is_file()
    assert "builtins.RuntimeError" in (output / f"{bad}_bug_report.txt").read_text()
    assert json.loads((output / "report.json").read_text())["studies"].keys() == {row["study"] for row in rows}
    assert not [path for path in output.iterdir() if path.is_file() and b"Mueller" in path.read_bytes()]


def test_an_exam_that_cannot_be_prepared_costs_the_others_nothing(
    manifest: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [IndexError("Mueller/1977"), InputError("/data/Mueller/1977: the folder is empty."), MemoryError()]
    of = dict(zip([row["study"] for row in read_rows(manifest)[-4:-1]], errors, strict=True))

    def failing(item: Any, **options: Any) -> Any:
        if error := of.get(item["study"]):
            raise error
        return load_images(item, **options)

    monkeypatch.setattr("mri_alm.bundle.transforms.load_images", failing)
    rows = read_rows(score(trained, manifest, tmp_path) / "scores.csv")
    for row, code in zip(rows[:3], ("unexpected", "unreadable", "memory"), strict=True):
        assert f"NOT SCORED ({code})" in row["warnings"]
    assert rows[3]["score"]
    assert [path.name for path in tmp_path.glob("*_bug_report.txt")] == [f"{rows[0]['study']}_bug_report.txt"]
    assert "Mueller" not in (tmp_path / "scores.csv").read_text()


def broken(*_: Any, **__: Any) -> None:
    raise KeyError("Mueller/1977")


def test_a_picture_that_cannot_be_made_costs_neither_score_nor_run(
    manifest: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = read_rows(manifest)[-3]["study"]

    def picture(_: Any, __: Any, title: str) -> bytes:
        if bad in title:
            raise TypeError("Mueller/1977")
        return b""

    monkeypatch.setattr("mri_alm.scoring.new_exams.study_picture", picture)
    monkeypatch.setattr("mri_alm.scoring.new_exams.write_explanations", broken)
    rows = read_rows(score(trained, manifest, tmp_path, explain=1) / "scores.csv")
    said = f"No picture: an error that nobody foresaw (TypeError); please report it with {bad}_bug_report.txt."
    assert [said in row["warnings"] for row in rows] == [False, True, False, False]
    assert all(row["score"] for row in rows)
    assert {path.name for path in tmp_path.glob("*.png")} == {f"{row['study']}.png" for row in rows} - {f"{bad}.png"}
    assert {path.name for path in tmp_path.glob("*_report.txt")} == {
        f"{bad}_bug_report.txt", "explanations_bug_report.txt",
    }  # fmt: skip
    assert "explanations" not in json.loads((tmp_path / "report.json").read_text())


def test_a_calibration_cohort_gives_an_exact_threshold(manifest: Path, trained: Path, tmp_path: Path) -> None:
    chosen = {"calibration": str(trained / "scores.csv"), "labels": str(manifest), "alpha": 0.5, "eps": 0.4}
    output = score(trained, manifest, tmp_path, **chosen)
    point = json.loads((output / "report.json").read_text())["threshold"]
    label = {row["study"]: row["label"] for row in read_rows(manifest)}
    scored = {row["study"]: float(row["score"]) for row in read_rows(trained / "scores.csv")}
    positives = sorted(score for study, score in scored.items() if label[study] == "1")
    rank = neyman_pearson_rank(len(positives), 0.5, 0.4)
    lowest = positives[rank - 1]
    below = max((score for score in scored.values() if score < lowest), default=0.9998 * lowest)
    threshold = point["threshold"]
    assert (threshold, point["rank"]) == (pytest.approx((lowest + below) / 2, rel=1e-12), rank)
    assert point["rule"] == "P(miss rate > 0.5) <= 0.4"
    assert point["basis"].startswith("exact")
    for row in read_rows(output / "scores.csv"):
        assert float(row["threshold"]) == threshold
        assert row["dce_needed"] == str(int(float(row["score"]) >= threshold))


def test_too_few_calibration_positives_mean_examine_everyone(manifest: Path, trained: Path, tmp_path: Path) -> None:
    output = score(trained, manifest, tmp_path, calibration=str(trained / "scores.csv"), labels=str(manifest))
    assert {(row["threshold"], row["dce_needed"]) for row in read_rows(output / "scores.csv")} == {("", "1")}
    assert json.loads((output / "report.json").read_text())["threshold"]["threshold"] is None


def test_exams_of_one_calibration_patient_count_once(trained: Path, tmp_path: Path) -> None:
    studies = [row["study"] for row in read_rows(trained / "scores.csv")]
    rows = [[study, str(int(k < 6)), f"P{k // 2}"] for k, study in enumerate(studies)]
    labels = write_manifest(tmp_path / "labels.csv", rows, ("study", "label", "patient"))
    point = operating_point(TrainedRun(trained), trained / "scores.csv", labels, alpha=0.5, eps=0.5)
    assert (point.n_positive, point.n_negative) == (3, 3)
    assert math.isfinite(point.threshold)


def test_calibration_needs_labels_and_exams_the_model_never_saw(
    manifest: Path, trained: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    run = TrainedRun(trained)
    with pytest.raises(ValueError, match="--calibration needs --labels"):
        operating_point(run, trained / "scores.csv", None, alpha=0.1, eps=0.1)
    seen = [[row["study"], "0.5"] for row in read_rows(manifest)]
    scores = write_manifest(tmp_path / "scores.csv", seen, ("study", "score"))
    with pytest.raises(ValueError, match="Among the scores are training studies of this run: 30 studies"):
        operating_point(run, scores, manifest, alpha=0.1, eps=0.1)
