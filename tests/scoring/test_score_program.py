"""`pipelines/score.py`, called in-process on DICOM phantoms and on a manifest, with the small trained run."""

import ast
import base64
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydicom
import pytest
from conftest import ROOT
from locking import holder
from PIL import Image
from programs import load_program
from small_cohort import read_rows, write_manifest

from mri_alm.bundle.run_folder import read_run
from mri_alm.bundle.settings import PRIVATE_SETTINGS
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.errors import InputError
from mri_alm.phantom.cohort import PhantomRow, write_cohort
from mri_alm.phantom.study import make_study
from mri_alm.runtime.pseudonyms import study_key
from mri_alm.scoring.new_exams import operating_point

Program = Callable[..., int]
KEYS = 16
IMAGES = ("t2", "adc", "hbv")


@pytest.fixture(scope="session")
def exams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two DICOM exams with a name in their headers, and one without diffusion; not to be changed."""
    folder = tmp_path_factory.mktemp("exams")
    rows = [PhantomRow(number, label, "test") for number, label in enumerate((1, 0, 1))]
    write_cohort(folder, rows, lambda row: make_study(row.index, row.label, coarse=4), parameters={"form": "dicom"})
    for file in (folder / "studies").rglob("*.dcm"):
        header = pydicom.dcmread(file)
        header.PatientName, header.PatientID, header.StudyDate = "Doe^Jane", "MRN-4711", "20190102"
        header.save_as(file)
    for series in ("s03_ep2d_diff_tra", "s04_ep2d_diff_tra_ADC", "s05_ep2d_diff_tra_CALC_BVAL"):
        shutil.rmtree(folder / "studies" / "phantom_0002" / series)
    return folder / "studies"


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of one's own, and a secret of one's own for the keys."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "salt").write_text("a fixed secret")
    monkeypatch.setenv("MRI_ALM_STATE", str(tmp_path / "state"))
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program's main function with arguments."""
    program = load_program("score")

    def call(*words: Any) -> int:
        monkeypatch.setattr(sys, "argv", ["score.py", *map(str, words)])
        status: int = program.main()
        return status

    return call


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr("mri_alm.scoring.new_exams.study_picture", lambda *_: b"")


@pytest.fixture
def few(manifest: Path, tmp_path: Path) -> Path:
    """Three exams of the cohort as a manifest to be scored."""
    rows = [[row["study"], *(f"{row['study']}/{c}.nii" for c in IMAGES)] for row in read_rows(manifest)[-3:]]
    for row in rows:
        shutil.copytree(manifest.parent / row[0], tmp_path / row[0])
    return write_manifest(tmp_path / "few.csv", rows, ("study", *IMAGES))


def arguments(run: Path, source: Path, output: Path) -> list[Any]:
    return ["--model", run, "--input", source, "--output", output, "--threads", 2]


def calibration(folder: Path, positives: int, negatives: int = 10) -> list[Any]:
    """The arguments; positives score 0.30, 0.31, ...; negatives 0.2."""
    exams = [(f"P{i}", 1, 0.3 + i / 100) for i in range(positives)] + [(f"N{i}", 0, 0.2) for i in range(negatives)]
    scores = write_manifest(folder / "scores.csv", [[n, str(s)] for n, _, s in exams], ("study", "score"))
    labels = write_manifest(folder / "labels.csv", [[n, n, str(y)] for n, y, _ in exams], ("study", "patient", "label"))
    return ["--calibration", scores, "--labels", labels]


# --- The whole program ----------------------------------------------------------------------------------------------


def test_all_outputs_of_a_folder_with_a_failing_exam(
    run: Path, exams: Path, tmp_path: Path, score: Program, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    record = json.loads((run / "config.json").read_text())
    record["settings"] |= dict.fromkeys(PRIVATE_SETTINGS, "/home/Doe/cohort")
    (run / "config.json").write_text(json.dumps(record))
    assert set(read_run(run).settings) == set(record["settings"]) - set(PRIVATE_SETTINGS) | {
        "init_weights"
    }  # shown: that there were some
    assert score(*arguments(run, exams, output), "--sr", "--explain", 1) == 2  # some exam could not be scored
    text = capfd.readouterr()
    assert "score: 100%" in text.err
    assert "write: 100%" in text.err
    assert "2 exams scored" in text.out
    assert "1 not scored" in text.out
    rows = read_rows(output / "scores.csv")
    names = [row["study"] for row in rows]
    assert names == sorted(names)
    assert {len(name) for name in names} == {KEYS}
    failed = [row for row in rows if not row["dce_needed"]]
    assert len(failed) == 1
    assert "NOT SCORED (no_diffusion)" in failed[0]["warnings"]
    scored = [row["study"] for row in rows if row["dce_needed"]]
    assert {path.name for path in output.glob("*_sr.dcm")} == {f"{name}_sr.dcm" for name in scored}
    report = json.loads((output / "report.json").read_text())
    assert list(report["studies"]) == names
    page = (output / "index.html").read_text("utf-8")
    assert set(re.findall('data-study="(.*?)"', page)) == set(names)
    assert json.loads(page.split('id="sheets">')[1].split("</script>")[0]).keys() == set(scored)
    assert "This model was trained on" not in page  # what the small cohort is of is not recorded
    explained = report["explanations"]
    distance = {row["study"]: abs(float(row["score"]) - float(row["threshold"])) for row in rows if row["score"]}
    assert list(explained["studies"]) == sorted(scored, key=lambda name: distance[name])[:1]
    assert {p.name for p in output.glob("*_explanation.png")} == {f"{n}_explanation.png" for n in explained["studies"]}
    assert explained["mean"].keys() == {"diffusion", "t2"}
    with Image.open(next(output.glob("*_explanation.png"))) as picture:
        assert picture.size == (720, 528)
    for path in output.iterdir():
        content = re.sub(rb"(?<=base64,)[\w+/=]+", lambda found: base64.b64decode(found[0]), path.read_bytes())
        for secret in (b"Doe", b"MRN-4711", b"20190102", b"a fixed secret"):
            assert secret not in content, path.name


def test_a_report_that_cannot_be_made_costs_its_row_a_warning_and_keys_lead_back(
    run: Path, exams: Path, tmp_path: Path, score: Program, no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("Doe")

    monkeypatch.setattr("mri_alm.scoring.new_exams.structured_report", broken)
    output, keys = tmp_path / "out", tmp_path / "keys.csv"
    assert score(*arguments(run, exams, output), "--sr", "--key-file", keys) == 2
    rows = read_rows(output / "scores.csv")
    said = "No structured report: an error that nobody foresaw (KeyError); please report it with "
    assert sorted(said in row["warnings"] for row in rows) == [False, True, True]  # one has no diffusion
    folders = {row["study"]: row["folder"] for row in read_rows(keys)}
    assert folders.keys() == {row["study"] for row in rows}
    assert sorted(folders.values()) == sorted(map(str, exams.iterdir()))
    assert all(row["study"] == study_key(row["name"], "a fixed secret") for row in read_rows(keys))


def test_without_slices_or_a_page_the_scores_stand(
    run: Path,
    one_exam: Path,
    tmp_path: Path,
    score: Program,
    no_pictures: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("Doe")

    output = tmp_path / "out"
    monkeypatch.setattr("mri_alm.scoring.new_exams.slice_sheet", broken)
    assert score(*arguments(run, one_exam, output)) == 0
    (row,) = read_rows(output / "scores.csv")
    said = "No slices on the page: an error that nobody foresaw (KeyError); please report it with S41_bug_report.txt."
    assert said in row["warnings"]
    page = (output / "index.html").read_text("utf-8")
    assert (page.count("no pictures"), page.count(said)) == (1, 1)
    monkeypatch.setattr("mri_alm.scoring.new_exams.write_scores_page", broken)
    assert score(*arguments(run, one_exam, output)) == 0
    assert read_rows(output / "scores.csv") == [row]
    assert not (output / "index.html").exists()  # that of other scores
    said = "No index.html: an error that nobody foresaw (KeyError); please report it with page_bug_report.txt."
    assert said in capfd.readouterr().out


@pytest.mark.slow
def test_an_exam_has_one_key_in_both_programs(run: Path, exams: Path, tmp_path: Path) -> None:
    """From the shell, as a user would; the console can print ASCII only."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "MRI_ALM_STATE": str(tmp_path / "Zürich")}
    place = shutil.copytree(exams, tmp_path / "Zürich_日本")
    for program, words in (("prepare_cohort", ["--workers", 2]), ("score", ["--model", run])):
        output = tmp_path / "Zürich" / program
        command = [sys.executable, f"pipelines/{program}.py", "--input", place, "--output", output, *words]
        done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, check=False)
        assert done.returncode == 2, done.stderr  # one exam has no diffusion
        assert b"Z\\xfcrich" in done.stdout
        assert b"Traceback" not in done.stderr
    prepared = {
        row["study"]: row["status"] for row in read_rows(tmp_path / "Zürich" / "prepare_cohort" / "manifest.csv")
    }
    scored = {row["study"]: row["score"] for row in read_rows(tmp_path / "Zürich" / "score" / "scores.csv")}
    assert prepared.keys() == scored.keys()
    assert [prepared[key] == "failed" for key in prepared] == [scored[key] == "" for key in prepared]


def test_order_depends_neither_on_folders_nor_on_threads(
    run: Path, exams: Path, tmp_path: Path, score: Program, no_pictures: None
) -> None:
    renamed = tmp_path / "renamed"
    for number, folder in enumerate(sorted(exams.iterdir(), reverse=True)):
        shutil.copytree(folder, renamed / f"{number}")
    first, second = tmp_path / "first", tmp_path / "second"
    score(*arguments(run, exams, first))
    score(*arguments(run, renamed, second), "--threads", 1)
    assert (first / "scores.csv").read_bytes() == (second / "scores.csv").read_bytes()
    assert (first / "report.json").read_bytes() == (second / "report.json").read_bytes()


def test_a_calibration_cohort_sets_the_threshold_of_this_run(
    run: Path, few: Path, tmp_path: Path, score: Program, no_pictures: None, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert score(*arguments(run, few, output), *calibration(tmp_path, 38), "--alpha", 0.1, "--eps", 0.1) == 0
    threshold = json.loads((output / "report.json").read_text())["threshold"]
    assert threshold["threshold"] == pytest.approx(0.305)  # 38 positives: one may be missed, that of 0.30
    assert threshold["basis"].startswith("exact: ")
    assert (threshold["rule"], threshold["rank"]) == ("P(miss rate > 0.1) <= 0.1", 2)
    text = capfd.readouterr().out
    assert "Calibration: 38 positives can certify a miss rate of 10 % at 90 % confidence." in text
    assert "nothing beside" in text  # no report.json says which model the scores are of
    for row in read_rows(output / "scores.csv"):
        assert float(row["threshold"]) == threshold["threshold"]
        assert row["dce_needed"] == str(int(float(row["score"]) >= threshold["threshold"]))
    assert json.loads((run / "threshold.json").read_text())["rank"] == 1  # the run's own is left alone


def test_too_few_positives_examine_everyone(
    run: Path, few: Path, tmp_path: Path, score: Program, no_pictures: None, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert score(*arguments(run, few, output), *calibration(tmp_path, 13)) == 0
    text = capfd.readouterr().out
    assert "Threshold none (examine everyone)" in text
    assert "13 positives cannot certify a miss rate of 10 % at 90 % confidence; 22 can." in text
    rows = read_rows(output / "scores.csv")
    assert {(row["threshold"], row["dce_needed"]) for row in rows} == {("", "1")}
    assert json.loads((output / "report.json").read_text())["threshold"]["threshold"] is None


def test_alpha_and_eps_reach_the_threshold(
    run: Path, few: Path, tmp_path: Path, score: Program, no_pictures: None
) -> None:
    output = tmp_path / "out"
    words = [*calibration(tmp_path, 38), "--alpha", 0.2, "--eps", 0.05]
    assert score(*arguments(run, few, output), *words) == 0
    # BinomCDF(2; 38, .2) = 0.012, (3) = 0.041, (4) = 0.10: the fourth smallest positive.
    assert json.loads((output / "report.json").read_text())["threshold"]["rank"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--alpha", 0.2], "--labels, --alpha and --eps belong to a calibration cohort: give --calibration too."),
        (["--eps", 0], "--labels, --alpha and --eps belong to a calibration cohort: give --calibration too."),
        (
            ["--labels", "labels.csv"],
            "--labels, --alpha and --eps belong to a calibration cohort: give --calibration too.",
        ),
        (["--explain", -1], "--explain must be 0 or more, got -1."),
        (["--sr"], "--sr refers to DICOM images, and"),
        (["--key-file", "keys.csv"], "--key-file is for exams that get keys: a manifest names its studies itself."),
        (["--calibration", "scores.csv"], "--calibration needs --labels: a CSV with columns study and label"),
        (["--calibration", "nowhere.csv", "--labels", "nowhere.csv"], "nowhere.csv: cannot be read"),
        (["--threads", 0], "threads must be a whole number from 1 to 1024, got 0."),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_exam_is_read(
    run: Path,
    manifest: Path,
    tmp_path: Path,
    score: Program,
    refusal: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[Any],
    message: str,
) -> None:
    monkeypatch.setattr("mri_alm.scoring.new_exams.for_each_study", lambda *_, **__: pytest.fail("an exam was read"))
    assert message in refusal(score, *arguments(run, manifest, tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


def test_an_output_that_another_process_writes_to_is_refused(
    run: Path, manifest: Path, tmp_path: Path, score: Program, refusal: Callable[..., str]
) -> None:
    with holder(tmp_path / "out" / ".lock") as other:
        text = refusal(score, *arguments(run, manifest, tmp_path / "out"))
        assert f"{tmp_path / 'out'} is in use by process {other.pid} on" in text


@pytest.mark.parametrize("alpha", [0, 1.5])
def test_an_impossible_rate_is_refused(
    run: Path, manifest: Path, tmp_path: Path, score: Program, refusal: Callable[..., str], alpha: float
) -> None:
    words = [*calibration(tmp_path, 30), "--alpha", alpha]
    text = refusal(score, *arguments(run, manifest, tmp_path / "out"), *words)
    assert "alpha must lie strictly between 0 and 1, found" in text


def test_without_highdicom_sr_says_what_to_install(
    run: Path, exams: Path, tmp_path: Path, score: Program, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mri_alm.scoring.structured_report.find_spec", lambda _: None)
    text = refusal(score, *arguments(run, exams, tmp_path / "out"), "--sr")
    assert "Structured reports need the package highdicom: pip install -e '.[sr]'." in text


def test_nothing_but_sr_needs_highdicom() -> None:
    """It is imported inside the functions that write a report, nowhere at the top of a module."""
    for path in (ROOT / "mri_alm").glob("*.py"):
        top = [
            node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not any(ast.unparse(node).split()[1].startswith("highdicom") for node in top), path.name


@pytest.mark.parametrize("begin", ["$", "@", "%", "#"])
def test_a_path_is_a_name_and_never_evaluated(
    begin: str,
    run: Path,
    few: Path,
    tmp_path: Path,
    score: Program,
    refusal: Callable[..., str],
    no_pictures: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MONAI evaluates texts that begin with $, replaces those with @ and %, and # anywhere."""
    monkeypatch.chdir(tmp_path)
    name = f"{begin}__import__('pathlib').Path('ran').touch() or 'few#1'"
    assert f"{name} is neither a folder nor a .csv manifest" in refusal(score, *arguments(run, Path(name), Path("out")))
    exams = Path(name)
    exams.mkdir()
    for path in [few, *few.parent.glob("S*")]:
        path.rename(exams / path.name)
    run.rename(f"{name}_run")
    assert score(*arguments(Path(f"{name}_run"), exams / few.name, Path(f"{name}_out"))) == 0
    assert len(read_rows(Path(f"{name}_out") / "scores.csv")) == 3
    assert not Path("ran").exists()


# --- What may calibrate ---------------------------------------------------------------------------------------------


def test_scores_of_another_model_do_not_calibrate(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, scores, _, labels = calibration(tmp_path, 25)
    trained = TrainedRun(run)
    for name, wrap in (("report.json", _as_report), ("threshold.json", _as_threshold)):
        (tmp_path / name).write_text(json.dumps(wrap(trained.checkpoints)))
        with caplog.at_level(logging.WARNING, "mri_alm"):
            assert operating_point(trained, scores, labels, alpha=0.1, eps=0.1).rank == 1
        assert caplog.text == ""
        (tmp_path / name).write_text(json.dumps(wrap({"split_0": "other"})))
        with pytest.raises(
            InputError, match=r"scores\.csv holds scores of another model\. Score the calibration cohort"
        ):
            operating_point(trained, scores, labels, alpha=0.1, eps=0.1)
        (tmp_path / name).unlink()


def _as_report(digests: dict[str, str]) -> dict[str, Any]:
    return {"model": {"checkpoints_sha256": digests}}


def _as_threshold(digests: dict[str, str]) -> dict[str, Any]:
    return {"checkpoints": digests}


def test_scores_never_stand_beside_the_digests_of_an_earlier_model(
    run: Path, few: Path, tmp_path: Path, score: Program, no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill or a full disk between scores.csv and report.json, in an output that held another model's scores."""
    output = tmp_path / "out"
    (output / ".part-killed").mkdir(parents=True)
    (output / "report.json").write_text(json.dumps(_as_report({"split_0": "other"})))

    def full(*_: Any) -> None:
        raise InputError("no space")

    monkeypatch.setattr("mri_alm.scoring.new_exams._record", full)
    with pytest.raises(SystemExit):
        score(*arguments(run, few, output))
    assert (output / "scores.csv").is_file()
    assert not (output / "report.json").exists()
    assert list(output.glob(".part-*")) == []  # what the killed one left half written


def test_patients_of_the_training_do_not_calibrate(run: Path, tmp_path: Path) -> None:
    """A new exam of a patient whose other exam was trained on."""
    _, scores, _, labels = calibration(tmp_path, 25)
    labels.write_text(labels.read_text().replace("P3,P3,", "P3,S07,"))
    with pytest.raises(
        InputError, match=r"^1 calibration patients or studies were trained on, or are evaluated too \(such as S07\)"
    ):
        operating_point(TrainedRun(run), scores, labels, alpha=0.1, eps=0.1)
