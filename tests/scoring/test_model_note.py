"""What a model was trained on stands beside every result, and an exam of poor quality is never spared."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import load_program
from small_cohort import read_rows
from test_scoring import score

from mri_alm.bundle.run_folder import RunFolder, read_run
from mri_alm.bundle.trained_run import SCORE_COLUMNS, TrainedRun, score_rows
from mri_alm.cohort.protocol import training_protocol
from mri_alm.errors import InputError
from mri_alm.evaluation.analysis import evaluate
from mri_alm.evaluation.model_card import model_card
from mri_alm.metrics.threshold import fixed_fn_threshold
from mri_alm.runtime.tables import write_csv
from mri_alm.scoring.new_exams import logger

POINT = fixed_fn_threshold([1, 1, 0, 0], [0.5, 0.6, 0.1, 0.4], 0)
FINE: dict[str, Any] = {"t2_spacing_mm": [0.5, 0.5, 3], "adc_spacing_mm": [2, 2, 3], "warnings": []}
SYNTHETIC = training_protocol([FINE | {"vendor": "mri-alm", "field_strength": 3.0, "hbv_b": 2000}] * 4)


def given(run: Path, folder: Path, protocol: dict[str, Any] | None) -> Path:
    """A copy of a run that says what it was trained on."""
    copy = Path(shutil.copytree(run, folder))
    (copy / "protocol.json").unlink()
    if protocol:
        (copy / "protocol.json").write_text(json.dumps(protocol))
    return copy


def test_below_the_gate_contrast_is_asked_for_whatever_the_score() -> None:
    reports = {
        "good": FINE,
        "coarse": FINE | {"t2_spacing_mm": [1.5, 1.5, 3], "warnings": ["Two axial T2."]},
        "other": FINE | {"vendor": "ge", "hbv_b": 1400, "gland_ml": 41.5, "gland_confidence": 0.913},
    }
    logits = np.full((3, 2), -5.0)
    rows = score_rows(list(reports), logits, POINT, reports, trained_on=SYNTHETIC)
    assert [row["dce_needed"] for row in rows] == [0, 1, 0]
    assert [row["quality"].partition(":")[0] for row in rows] == [
        "meets, as far as known (not known", "below gate", "meets, as far as known (not known",
    ]  # fmt: skip
    assert rows[1]["warnings"] == (
        "Two axial T2. | Quality below gate: T2 pixels 1.5 mm (at most 1). DCE is asked for whatever the score. | "
        "Unlike what the model was trained on: T2 pixels 1.5 mm (trained on 0.5 mm)."
    )
    assert rows[2]["warnings"] == (
        "Unlike what the model was trained on: scanner's make ge (trained on mri-alm); highest b 1400 s/mm2 "
        "(trained on 2000 s/mm2)."
    )
    assert {row["model_note"] for row in rows} == {"trained on synthetic exams"}
    assert list(rows[0])[:7] == ["study", "logit", "score", "spread", "threshold", "dce_needed", "warnings"]
    glands = [(row["gland_ml"], row["gland_confidence"]) for row in rows]
    assert glands == [("", ""), ("", ""), (41.5, 0.913)], "where a model looks for it"


def test_training_records_what_it_saw(trained: Path) -> None:
    found = json.loads((trained / "protocol.json").read_text())
    assert (found["exams"], found["synthetic"], found["quality"]) == (30, 0, {"meets": 30})
    assert found["ranges"]["adc_in_plane_mm"] == {"known": 30, "least": 2.0, "most": 2.0}
    assert {row["model_note"] for row in read_rows(trained / "scores.csv")} == {""}


def test_a_run_of_before_is_known_by_its_phantoms_or_not_at_all(trained: Path, tmp_path: Path) -> None:
    run = given(trained, tmp_path / "run", None)
    assert RunFolder(run).trained_on() is None
    splits = run / "splits.csv"
    splits.write_text(splits.read_text().replace("S0", "phantom_000"))
    found = RunFolder(run).trained_on()
    assert found == {"exams": 30, "synthetic": 10, "words": {}, "ranges": {}}
    (run / "protocol.json").write_text("{}")
    with pytest.raises(InputError, match=r"protocol\.json is no record of what a model was trained on"):
        TrainedRun(run)


@pytest.mark.parametrize(
    ("protocol", "said", "note"),
    [
        (SYNTHETIC, "This model was trained on synthetic exams: its scores say nothing about patients.",
         "trained on synthetic exams"),
        (SYNTHETIC | {"exams": 8}, "This model was trained partly on synthetic exams (4 of 8)",
         "trained partly on synthetic exams (4 of 8)"),
        (None, "What this model was trained on is not recorded", ""),
    ],
)  # fmt: skip
def test_scoring_says_what_the_model_is(
    manifest: Path,
    trained: Path,
    tmp_path: Path,
    protocol: dict[str, Any] | None,
    said: str,
    note: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    titles: list[str] = []
    lines: list[str] = []

    def draw(_: Any, __: Any, title: str) -> bytes:
        titles.append(title)
        return b""

    monkeypatch.setattr("mri_alm.scoring.new_exams.study_picture", draw)
    run = given(trained, tmp_path / "run", protocol)
    monkeypatch.setattr(logger, "warning", lambda text, *words: lines.append(text % words))
    output = score(run, manifest, tmp_path / "out")
    assert [line.startswith(said) for line in lines].count(True) == 1
    assert {row["model_note"] for row in read_rows(output / "scores.csv")} == {note}
    end = f"research only\nmodel {note}" if note else "research only"
    assert [title.endswith(end) for title in titles] == [True] * 4
    assert json.loads((output / "report.json").read_text())["model"]["trained_on"] == protocol
    card = model_card(evaluate({"run": trained / "scores.csv"}, manifest, run=run, draws=10))["Training"]
    assert (f"; {note}: the built-in phantom" in card["Cohort"]) == bool(note)
    assert ("is not recorded" in card["Scanners and protocols"]) == (protocol is None)


def test_an_exported_bundle_says_it_everywhere(trained: Path, tmp_path: Path) -> None:
    run, bundle = given(trained, tmp_path / "run", SYNTHETIC), tmp_path / "bundle"
    assert load_program("export_bundle").main(["--model", str(run), "--output", str(bundle)]) == 0
    metadata = json.loads((bundle / "configs" / "metadata.json").read_text())
    assert metadata["data_source"].startswith("4 exams, trained on synthetic exams: scanner's make mri-alm; ")
    assert metadata["intended_use"].endswith("This model was trained on synthetic exams: it shows that the software "
                                             "works, and nothing of patients.")  # fmt: skip
    card = (bundle / "docs" / "README.md").read_text()
    assert "about a patient.** **This model was trained on synthetic exams.**\n" in card
    assert "\nTraining: 4 exams, trained on synthetic exams: scanner's make mri-alm; field strength 3 T;" in card
    assert TrainedRun(bundle).trained_on == SYNTHETIC == read_run(run).trained_on


def test_decisions_by_quality_are_evaluated_as_they_were_made(trained: Path, manifest: Path, tmp_path: Path) -> None:
    rows = read_rows(trained / "scores.csv")
    high = 1 + max(float(row["score"]) for row in rows)
    for number, row in enumerate(rows):
        row |= {"threshold": str(high), "dce_needed": str(int(number < 3)), "warnings": "", "model_note": ""}
        row["quality"] = "below gate: T2 pixels 2 mm (at most 1)" if number < 3 else "meets"
    path = tmp_path / "scores.csv"
    write_csv(path, SCORE_COLUMNS, rows)
    found = evaluate({"gated": path}, manifest, draws=10)
    assert found.performances["gated"].figures["spared"].value == 9 / 12
    assert any(text.startswith("3 of 12 studies are below the quality gate") for text in found.warnings)
    path.write_text(path.read_text().replace("below gate: T2 pixels 2 mm (at most 1)", "meets", 1))
    with pytest.raises(InputError, match="has dce_needed 1 at score"):
        evaluate({"gated": path}, manifest, draws=10)
