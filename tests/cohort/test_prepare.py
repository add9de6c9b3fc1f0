"""From an export to a cohort: what is written, what is counted, what is done again, and what the shell sees."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
import SimpleITK as sitk  # noqa: N813
from exams import GRID, SHAPE, check_invariants, dicom_exam, image_exam, prepare, write_image, write_text
from shell import WarmPython

import mri_alm.imaging.registration
from mri_alm.bundle.transforms import LoadRegisteredExamd
from mri_alm.cohort.manifest import Cohort, read_manifest
from mri_alm.cohort.overview import check_cohort, dry_run, summary_text
from mri_alm.cohort.prepare_cohort import MANIFEST_COLUMNS, Order, prepare_cohort
from mri_alm.cohort.prepare_study import Preparation
from mri_alm.errors import InputError, StudyError
from mri_alm.imaging.registration import image_centre
from mri_alm.phantom.dicom import write_dicom_study
from mri_alm.phantom.study import make_study

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data" / "prostate"
real = pytest.mark.skipif(not SHARED.exists(), reason="needs the public DICOM files of ../shared")


def rows_of(output: Path) -> list[dict[str, str]]:
    with (output / "manifest.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def record_of(output: Path, study: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / study / "study.json").read_text())
    return found


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine patients; the last has two exams, patient 3 no T2, patient 4 a file that is damaged."""
    root = tmp_path_factory.mktemp("export")
    for number in range(8):
        dicom_exam(root / f"patient{number}" / "exam", number, without=(4,) if number == 3 else ())
    dicom_exam(root / "patient8" / "first", 8)
    dicom_exam(root / "patient8" / "second", 9, patient="P8")
    first = next((root / "patient4" / "exam" / "s9").iterdir())
    (first.parent / "cut").write_bytes(first.read_bytes()[:300])
    (root / "patient0" / "notes.txt").write_text("hello")
    return root


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Patient 7 is missing, patient 99 was never exported."""
    lines = [f"P{number};{int(number in (1, 3, 5, 8))}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 99)]
    return write_text(tmp_path_factory.mktemp("labels") / "labels.csv", "\n".join(["PatientID;label", *lines]) + "\n")


@pytest.fixture(scope="module")
def prepared(export: Path, labels: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Not to be changed."""
    output = tmp_path_factory.mktemp("prepared") / "cohort"
    return output, prepare(export, output, labels=labels)


# --- What is written ------------------------------------------------------------------------------------------------


def test_every_study_has_a_row_and_every_file_is_counted(export: Path, prepared: tuple[Path, Any]) -> None:
    output, outcome = prepared
    check_invariants(export, output, outcome)
    rows = rows_of(output)
    assert list(rows[0]) == list(MANIFEST_COLUMNS)
    assert sorted(row["status"] for row in rows) == ["failed", *["ok"] * 7, "warn", "warn"]
    (failed,) = [row for row in rows if row["status"] == "failed"]
    assert failed["error_code"] == "no_t2"
    assert [failed[name] for name in ("t2", "registration", "files_used")] == ["", "", "0"]
    (cut,) = [row for row in rows if row["files_failed"] != "0"]
    assert "1 files could not be read: damaged DICOM" in cut["warnings"]
    assert sum(int(row["files_seen"]) for row in rows) == 9 * 30 + 24 + 2


def test_labels_reach_the_manifest_and_what_does_not_fit_is_said(prepared: tuple[Path, Any], export: Path) -> None:
    output, outcome = prepared
    rows = rows_of(output)
    (unlabelled,) = [row for row in rows if row["label"] == ""]
    assert "No label in the label table." in unlabelled["warnings"]
    assert outcome.labelled.unused == [10]
    patients = {row["patient"]: [r["label"] for r in rows if r["patient"] == row["patient"]] for row in rows}
    assert sorted(patients.values()) == [[""], *[["0"]] * 4, *[["1"]] * 3, ["1", "1"]]
    text = summary_text(Order(export, output), outcome)
    for part in ("10 studies (layout dicom): 7 ok, 2 with warnings, 1 failed", "failed, no_t2: 1", "1 studies have no"):
        assert part in text
    assert "1 rows of the labels have no study (rows 10)." in text
    assert "Row 9: one label for a patient with 2 studies." in text
    assert "drawn by patients, a quarter for the test, seed 0" in text


def test_a_drawn_split_keeps_patients_together_and_is_the_same_again(
    prepared: tuple[Path, Any], export: Path, labels: Path, tmp_path: Path
) -> None:
    rows = rows_of(prepared[0])
    sides = {row["patient"]: {r["side"] for r in rows if r["patient"] == row["patient"]} for row in rows}
    assert all(len(side) == 1 for side in sides.values())
    assert {row["side"] for row in rows if row["label"]} == {"train", "test"}
    test = {row["label"] for row in rows if row["side"] == "test"}
    assert test == {"0", "1"}
    shutil.copytree(prepared[0], tmp_path / "cohort")
    again = prepare(export, tmp_path / "cohort", labels=labels, resume=True)
    assert [row["side"] for row in again.rows] == [row["side"] for row in rows]
    other = prepare(export, tmp_path / "cohort", labels=labels, resume=True, seed=5)
    assert other.kept == 9  # the failed one is tried again


def test_the_images_are_what_the_transforms_give(prepared: tuple[Path, Any], export: Path) -> None:
    """One implementation: the program and the MONAI transforms agree on every voxel up to the rounding on disk."""
    output, outcome = prepared
    source = next(s for s in outcome.found.sources if s.patient == "P1")
    row = next(r for r in rows_of(output) if r["study"] == source.names[-1])
    steps = LoadRegisteredExamd(GRID["spacing"], GRID["size"])
    item = steps({"dicom": str(export / "patient1")})
    for name in ("t2", "adc", "hbv", "valid"):
        image = sitk.ReadImage(str(output / row[name]), sitk.sitkFloat32)
        expected = item[name][0].numpy().transpose(2, 1, 0)
        np.testing.assert_allclose(sitk.GetArrayFromImage(image), expected, rtol=3e-4, atol=1e-6)
        affine = item[name].affine.numpy()
        assert image.GetOrigin() == pytest.approx((-affine[0, 3], -affine[1, 3], affine[2, 3]), abs=1e-3)
    record = record_of(output, row["study"])
    assert record["registration"] == item["report"]["registration"]
    assert row["b_values"] == "50 800"
    assert (row["hbv_b"], row["adc_source"], row["vendor"]) == ("1400.0", "scanner", "siemens")
    assert [row[f"{name}_series"] for name in ("t2", "dwi", "adc", "hbv")] == ["4", "6 7", "8", "9"]
    assert float(row["mi_after"]) > float(row["mi_before"])


def test_training_reads_the_manifest_and_skips_what_failed(
    prepared: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    manifest = prepared[0] / "manifest.csv"
    studies = read_manifest(manifest)
    assert len(studies) == 8
    assert "skipped 1 failed and 1 unlabelled studies" in caplog.text
    usable = [n for n, row in enumerate(rows_of(prepared[0])) if row["status"] != "failed" and row["label"]]
    assert [study.index for study in studies] == usable  # a row keeps its number whatever is skipped
    assert len(read_manifest(manifest, labelled=False)) == 9
    with pytest.raises(InputError, match="The training cohort has 2 positive and 3 negative patients"):
        Cohort(manifest)


def test_prepared_images_are_not_registered_again(prepared: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("registered twice")

    monkeypatch.setattr("mri_alm.imaging.registration.register_rigid", refuse)
    study = read_manifest(prepared[0] / "manifest.csv")[0]
    item = LoadRegisteredExamd(GRID["spacing"], GRID["size"])(study.item())
    for name in ("t2", "adc", "hbv", "valid"):
        stored = sitk.GetArrayFromImage(sitk.ReadImage(str(study.images[name]), sitk.sitkFloat32))
        # The same grid again: nothing is interpolated. B-spline coefficients of T2 are floating point numbers.
        np.testing.assert_allclose(item[name][0].numpy().transpose(2, 1, 0), stored, rtol=1e-3, atol=0.05)
    outside = item["valid"][0].numpy() == 0
    assert not item["adc"][0].numpy()[outside].any()


def test_a_manifest_without_any_usable_study_is_refused(tmp_path: Path, export: Path) -> None:
    output = tmp_path / "cohort"
    outcome = prepare(export / "patient3", output)
    assert outcome.failed == 1
    with pytest.raises(InputError, match="none of its 1 studies can be used"):
        read_manifest(output / "manifest.csv")


# --- Crop, overrides, dry run ---------------------------------------------------------------------------------------


def test_the_crop_lies_about_the_gland_or_the_given_point(tmp_path: Path) -> None:
    image_exam(tmp_path / "in", 0, {"t2": "t2.nii.gz", "adc": "adc.nii.gz", "hbv": "hbv.nii.gz", "gland": "g.nii.gz"})
    table = "study,label,t2,adc,hbv,gland,crop_center_mm\n"
    paths = "in/t2.nii.gz,in/adc.nii.gz,in/hbv.nii.gz"
    table += f"A,1,{paths},in/g.nii.gz,\nB,0,{paths},,18 20 6\nC,0,{paths},,\nD,0,{paths},,here\n"
    outcome = prepare(write_text(tmp_path / "studies.csv", table), tmp_path / "cohort")
    check_invariants(tmp_path / "studies.csv", tmp_path / "cohort", outcome)
    names = {source.uid: source.names[-1] for source in outcome.found.sources}
    assert {row["study"]: row["error_code"] for row in outcome.rows}[names.pop("D")] == "crop_center"
    centres = {
        uid: image_centre(sitk.ReadImage(str(tmp_path / "cohort" / key / "t2.nii.gz"))) for uid, key in names.items()
    }
    # The mask fills columns 5 to 12, rows 6 to 14, slices 2 to 4 of voxels of 2 x 2 x 3 mm.
    assert centres["A"] == pytest.approx((17, 20, 9), abs=1e-4)
    assert centres["B"] == pytest.approx((18, 20, 6), abs=1e-4)
    assert centres["C"] == pytest.approx((19, 19, 7.5), abs=1e-4)
    cells = {row["study"]: row["crop_center_mm"] for row in outcome.rows}
    assert [cells[names[uid]] for uid in "ABC"] == ["17 20 9", "18 20 6", ""]


def test_a_hand_written_manifest_with_a_gland_is_cropped_about_it(tmp_path: Path) -> None:
    names = {"t2": "t2.nii.gz", "adc": "adc.nii.gz", "hbv": "hbv.nii.gz", "gland": "gland.nii.gz"}
    image_exam(tmp_path, 0, names)
    header, cells = "study,patient,label,split," + ",".join(names), "A,A,1,train," + ",".join(names.values())
    (study,) = read_manifest(write_text(tmp_path / "manifest.csv", f"{header}\n{cells}\n"))
    item = LoadRegisteredExamd((2, 2, 3), (11, 11, 5))(study.item())
    centre = (item["t2"].affine.numpy() @ [5, 5, 2, 1])[:3] * (-1, -1, 1)
    assert centre == pytest.approx((17, 20, 9), abs=1e-4)
    assert item["report"]["crop_center_mm"] == [17.0, 20.0, 9.0]
    write_image(tmp_path / "gland.nii.gz", np.zeros(SHAPE))
    with pytest.raises(StudyError, match=r"The gland mask has no voxel above 0\."):
        LoadRegisteredExamd()(study.item())


def test_roles_set_by_hand(tmp_path: Path) -> None:
    dicom_exam(tmp_path / "in" / "A", 0)
    dicom_exam(tmp_path / "in" / "B", 1)
    wrong = {"A": {"t2": [4], "adc": [8], "calculated": []}}
    outcome = prepare(tmp_path / "in", tmp_path / "c", rules={"studies": wrong})
    found = {source.uid: record_of(tmp_path / "c", source.names[-1]) for source in outcome.found.sources}
    assert (found["1.2.9.0"]["hbv_b"], found["1.2.9.1"]["hbv_b"]) == (800.0, 1400.0)
    reasons = {one["series"]: (one["role"], one["reason"]) for one in found["1.2.9.0"]["series"]}
    assert (reasons[4], reasons[9]) == (("t2", "set by hand"), ("other", "another was set by hand"))
    # By the key of the manifest, and only that study is done again.
    key = next(s.names[-1] for s in outcome.found.sources if s.uid == "1.2.9.1")
    again = prepare(tmp_path / "in", tmp_path / "c", rules={"studies": wrong | {key: {"t2": [99]}}}, resume=True)
    assert (again.kept, again.failed) == (1, 1)
    assert record_of(tmp_path / "c", key)["error_text"].startswith("The rules file gives series 99 the role t2")


def test_an_export_that_calls_everyone_the_same_is_noticed(tmp_path: Path) -> None:
    for number in range(3):
        dicom_exam(tmp_path / "in" / f"p{number}", number, patient="ANON")
    labels = write_text(tmp_path / "labels.csv", "folder,label\np0,1\np1,0\np2,0\n")
    rules = write_text(tmp_path / "rules.json", GRID)
    assert "All 3 studies carry one patient number." in dry_run(Order(tmp_path / "in", tmp_path / "c", labels, rules))
    labels.write_text("folder,patient,label\np0,a,1\np1,b,0\np2,c,0\n")
    assert "one patient number" not in dry_run(Order(tmp_path / "in", tmp_path / "c", labels, rules))


def test_dry_run_shows_roles_and_writes_nothing(export: Path, labels: Path, tmp_path: Path) -> None:
    rules = write_text(tmp_path / "rules.json", GRID)
    before = sorted(tmp_path.rglob("*"))
    text = dry_run(Order(export, tmp_path / "cohort", labels, rules))
    assert sorted(tmp_path.rglob("*")) == before
    assert text.startswith("10 studies, layout dicom")
    assert text.count("T2-weighted, by name") == 9
    assert text.count("ADC, by image type or name") == 10
    assert "b 50 " in text
    assert text.count("  takes T2 4; diffusion 6, 7; calculated b 9; ADC 8") == 9
    assert text.count("  fails, no_t2: ") == 1
    assert "1 rows of the labels have no study (rows 10)." in text
    assert sorted(line.split("   in ")[1] for line in text.splitlines() if line.startswith("study ")) == sorted(
        str(folder.relative_to(export)) for folder in export.glob("*/*") if folder.is_dir()
    )


def test_what_itk_refuses_goes_unregistered_or_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate("abc"):
        image_exam(tmp_path / "in" / name, number, {"t2": "t2.nii.gz", "adc": "adc.nii.gz", "hbv": "hbv.nii.gz"})
    for name in ("adc", "hbv"):  # too few slices for ITK's filters
        path = str(tmp_path / "in" / "a" / f"{name}.nii.gz")
        sitk.WriteImage(sitk.ReadImage(path)[:, :, 1:4], path)
    rules = {"size": [12, 12, 4]}
    outcome = prepare(tmp_path / "in", tmp_path / "c", rules=rules)
    found = {source.uid: record_of(tmp_path / "c", source.names[-1]) for source in outcome.found.sources}
    assert found["a"]["registration"]["reason"] == "too few slices or too little structure to register"
    assert any("Registration refused" in text for text in found["a"]["warnings"])
    assert [row["error_code"] for row in outcome.rows] == ["", "", ""]

    original = mri_alm.imaging.registration.resample

    def strict(image: sitk.Image, *words: Any, **options: Any) -> Any:
        if image.GetSize()[2] == 3:
            raise RuntimeError(f"Exception thrown in SimpleITK ResampleImageFilter_Execute: {tmp_path}: too thin")
        return original(image, *words, **options)

    monkeypatch.setattr(mri_alm.imaging.registration, "resample", strict)
    rows = prepare(tmp_path / "in", tmp_path / "d", rules=rules).rows
    assert sorted(row["error_code"] for row in rows) == ["", "", "itk"]
    (text,) = [row["error_text"] for row in rows if row["error_code"]]
    assert text.startswith("SimpleITK refused an image of this study (ResampleImageFilter_Execute)")
    assert str(tmp_path) not in text


def test_links_are_followed_once(tmp_path: Path) -> None:
    dicom_exam(tmp_path / "elsewhere", 0)
    dicom_exam(tmp_path / "in" / "p1", 1)
    (tmp_path / "in" / "p0").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "p1" / "loop").symlink_to(tmp_path / "in")
    outcome = prepare(tmp_path / "in", tmp_path / "c", allow_outside_paths=True)
    assert sorted(source.uid for source in outcome.found.sources) == ["1.2.9.0", "1.2.9.1"]
    assert outcome.failed == 0


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dicom_exam(tmp_path / "in" / "p0", 0)
    (tmp_path / "in" / "closed").mkdir()
    scan = os.scandir

    def closed(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)  # root may list everything
    with pytest.raises(InputError, match=r"in/closed cannot be listed \(Permission denied\)\. Get access to it, or"):
        prepare(tmp_path / "in", tmp_path / "c")


def test_image_files_among_dicom_do_not_vanish(tmp_path: Path) -> None:
    dicom_exam(tmp_path / "in" / "p0", 0)
    write_image(tmp_path / "in" / "p0" / "t2.nii.gz", np.ones(SHAPE))
    write_image(tmp_path / "in" / "masks" / "p0_gland.nii.gz", np.ones(SHAPE))
    image_exam(tmp_path / "in" / "p1", 1, {"t2": "t2.nii.gz", "adc": "adc.nii.gz", "hbv": "hbv.nii.gz"})
    outcome = prepare(tmp_path / "in", tmp_path / "c")
    check_invariants(tmp_path / "in", tmp_path / "c", outcome)
    (row,) = [row for row in outcome.rows if row["error_code"]]
    assert (row["error_code"], row["files_failed"]) == ("no_images", 3)
    assert "an image file among DICOM studies; list such studies in a table" in row["error_text"]
    (row,) = [row for row in outcome.rows if not row["error_code"]]
    assert row["files_ignored"] == 2 + 5 * 6 - row["files_used"]


# --- Resume ---------------------------------------------------------------------------------------------------------


def test_only_what_changed_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        dicom_exam(tmp_path / "in" / f"p{number}", number)
    prepare(tmp_path / "in", tmp_path / "c")
    with pytest.raises(InputError, match=r"c holds a cohort\. Add --resume to go on with it"):
        prepare(tmp_path / "in", tmp_path / "c")
    done: list[str] = []
    original = Preparation.prepare

    def counted(self: Preparation, job: Any) -> dict[str, Any]:
        done.append(job.source.uid)
        return original(self, job)

    monkeypatch.setattr(Preparation, "prepare", counted)
    assert prepare(tmp_path / "in", tmp_path / "c", resume=True).kept == 3
    assert done == []
    os.utime(next((tmp_path / "in" / "p1" / "s4").iterdir()), (1, 1))  # an input was touched
    dicom_exam(tmp_path / "in" / "p3", 3)  # and one is new
    shutil.rmtree(tmp_path / "c" / prepare(tmp_path / "in", tmp_path / "c", resume=True).rows[0]["study"])
    assert sorted(done) == ["1.2.9.1", "1.2.9.3"]
    done.clear()
    assert len(prepare(tmp_path / "in", tmp_path / "c", resume=True).rows) == 4  # a result was lost
    assert len(done) == 1
    done.clear()
    prepare(tmp_path / "in", tmp_path / "c", resume=True, rules={"size": [10, 10, 6]})  # another grid
    assert len(done) == 4


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_record_is_made_again(tmp_path: Path, content: str) -> None:
    dicom_exam(tmp_path / "in", 0)
    (row,) = prepare(tmp_path / "in", tmp_path / "c").rows
    whole = record_of(tmp_path / "c", row["study"])
    write_text(tmp_path / "c" / row["study"] / "study.json", content)
    again = prepare(tmp_path / "in", tmp_path / "c", resume=True)
    assert (again.kept, again.rows) == (0, [row])
    assert record_of(tmp_path / "c", row["study"]) == whole


def test_series_without_a_name_are_recorded_by_the_role_they_had(tmp_path: Path) -> None:
    """The ADC map is known by its voxels alone."""
    write_dicom_study(make_study(3, 1, coarse=4), tmp_path / "in")
    for file in (tmp_path / "in").rglob("*.dcm"):
        header = pydicom.dcmread(file)
        del header.SeriesDescription
        header.ImageType = [word for word in header.ImageType if word != "ADC"]
        header.save_as(file)
    prepare_cohort(Order(tmp_path / "in", tmp_path / "c", workers=1))
    (record,) = (json.loads(file.read_text()) for file in (tmp_path / "c").glob("*/study.json"))
    assert {one["series"]: one["role"] for one in record["series"]}[4] == "adc"
    assert [entry["reason"] for entry in record["files"] if entry.get("series") == 4] == ["adc"]


def test_files_that_change_their_roles_are_prepared_again(tmp_path: Path) -> None:
    image_exam(tmp_path / "in", 0, {"t2": "t2.nii.gz", "adc": "adc.nii.gz", "hbv": "hbv.nii.gz"})
    rows = "study,t2,adc,hbv\nA,in/{},in/adc.nii.gz,in/{}\n"
    table = write_text(tmp_path / "studies.csv", rows.format("t2.nii.gz", "hbv.nii.gz"))
    before = prepare(table, tmp_path / "c").rows[0]["study"]
    content = record_of(tmp_path / "c", before)["content"]
    write_text(table, rows.format("hbv.nii.gz", "t2.nii.gz"))
    assert prepare(table, tmp_path / "c", resume=True).kept == 0
    after = record_of(tmp_path / "c", before)["content"]
    assert (after["t2"], after["hbv"]) == (content["hbv"], content["t2"])


def test_a_copy_is_known_by_its_voxels_whatever_its_crop(tmp_path: Path) -> None:
    image_exam(tmp_path / "in", 0, {"t2": "t2.nii.gz", "adc": "adc.nii.gz", "hbv": "hbv.nii.gz"})
    paths = "in/t2.nii.gz,in/adc.nii.gz,in/hbv.nii.gz"
    table = f"study,patient,label,t2,adc,hbv,crop_center_mm\nA,a,1,{paths},18 20 6\nB,b,0,{paths},\n"
    outcome = prepare(write_text(tmp_path / "studies.csv", table), tmp_path / "c")
    text, safe = check_cohort(tmp_path / "c")
    assert not safe
    assert f"copy: {', '.join(row['study'] for row in outcome.rows)} have the same t2, adc, hbv" in text


@pytest.mark.slow
def test_killed_and_started_again_nothing_is_lost_or_redone(tmp_path: Path) -> None:
    for number in range(10):
        dicom_exam(tmp_path / "in" / f"p{number}", number)
    rules = write_text(tmp_path / "rules.json", GRID)
    output = tmp_path / "c"
    command = [sys.executable, "pipelines/prepare_cohort.py", "--input", str(tmp_path / "in"), "--output", str(output)]
    command += ["--rules", str(rules), "--workers", "1", "--resume"]
    first = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while len(list(output.glob("[0-9a-f]*/study.json"))) < 3 and first.poll() is None:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    finished = {path: path.stat().st_mtime_ns for path in output.glob("[0-9a-f]*/study.json")}
    assert 3 <= len(finished) < 10
    assert not (output / "manifest.csv").exists()
    (output / ".part-deadbeef").mkdir()  # what a kill in the middle of a study leaves
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"{len(finished)} kept from an earlier run" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(rows_of(output)) == 10
    assert not list(output.glob(".part-*"))


# --- Refusals and exit status ---------------------------------------------------------------------------------------


def test_strict_is_all_or_nothing(export: Path, labels: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--strict: 1 studies have no label, and 1 rows .* \(rows 10\)"):
        prepare(export, tmp_path / "a", labels=labels, strict=True)
    with pytest.raises(InputError, match=r"Study [0-9a-f]{16} failed \(no_t2\): .*no manifest is written"):
        prepare(export, tmp_path / "b", strict=True)
    assert not (tmp_path / "b" / "manifest.csv").exists()
    assert prepare(export / "patient0", tmp_path / "c", strict=True).failed == 0
    with pytest.raises(InputError, match="--workers must be 1 or more"):
        prepare_cohort(Order(export, tmp_path / "d", workers=-1))


def test_output_inside_the_input_and_keys_inside_the_output_are_refused(export: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lies inside the input"):
        prepare_cohort(Order(export, export / "cohort"))
    with pytest.raises(InputError, match="identifies patients: put it outside"):
        prepare_cohort(Order(export, tmp_path / "c", key_file=tmp_path / "c" / "keys.csv"))
    assert not (tmp_path / "c").exists()


def test_the_key_file_leads_back_to_studies_and_files(export: Path, tmp_path: Path) -> None:
    outcome = prepare(export / "patient4", tmp_path / "c", key_file=tmp_path / "keys.csv")
    with (tmp_path / "keys.csv").open(newline="") as file:
        keys = {row["key"]: row for row in csv.DictReader(file)}
    (row,) = outcome.rows
    assert keys[row["study"]]["path"] == str(export / "patient4" / "exam")
    (failed,) = [e for e in record_of(tmp_path / "c", row["study"])["files"] if e["state"] == "failed"]
    assert [keys[key]["path"] for key in failed["files"]] == [str(export / "patient4" / "exam" / "s9" / "cut")]


@pytest.mark.slow
def test_exit_status(export: Path, tmp_path: Path, python: WarmPython) -> None:
    """From the shell, as a user would."""

    def run(place: Path, *words: Any) -> "subprocess.CompletedProcess[str]":
        return python.run("pipelines/prepare_cohort.py", "--input", place, *words)

    rules = ["--rules", write_text(tmp_path / "rules.json", GRID)]
    assert run(export / "patient0", "--output", tmp_path / "a", *rules).returncode == 0
    assert run(export / "patient3", "--output", tmp_path / "b", *rules).returncode == 2
    assert run(export / "patient3", "--output", tmp_path / "x", *rules, "--dry-run").returncode == 0
    absent = run(tmp_path / "absent", "--output", tmp_path / "d")
    assert absent.returncode == 2
    assert "error: " in absent.stderr
    assert "Traceback" not in absent.stderr
    assert run(export).returncode == 2


@pytest.mark.slow
def test_a_bug_costs_one_study_and_leaves_a_report(export: Path, tmp_path: Path) -> None:
    code = (
        "import runpy, sys; import mri_alm.cohort.prepare_study as p; "
        "p.study_strip = lambda *_: 1 / 0; "
        "runpy.run_path('pipelines/prepare_cohort.py', run_name='__main__')"
    )
    rules = write_text(tmp_path / "rules.json", GRID)
    arguments = ["--input", str(export / "patient0"), "--output", str(tmp_path / "c"), "--rules", str(rules)]
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    (report,) = (tmp_path / "c").glob("*/bug_report.txt")
    assert "ZeroDivisionError" in report.read_text()


def test_every_error_code_is_explained_to_the_user() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "mri_alm").rglob("*.py"))
    codes = set(re.findall(r'StudyError\(\s*"(\w+)"', sources)) | {"pointer"}
    table = (ROOT / "docs" / "cohort.md").read_text().split("## Error codes")[1].split("##")[0]
    assert len(codes) > 20
    assert codes - set(re.findall(r"`(\w+)`", table)) == set()


# --- Real exams -----------------------------------------------------------------------------------------------------


@real
@pytest.mark.slow
def test_every_real_file_is_accounted_for(tmp_path: Path) -> None:
    outcome = prepare_cohort(Order(SHARED, tmp_path / "all", workers=2))
    check_invariants(SHARED, tmp_path / "all", outcome)
    assert sorted(row["error_code"] for row in outcome.rows) == ["", "", "", "mosaic", "no_diffusion", *["no_t2"] * 5]
    used = sorted(int(row["files_used"]) for row in outcome.rows if row["status"] != "failed")
    assert used == [114, 114, 140]
    assert sum(row["files_failed"] for row in outcome.rows) == 4  # the pointers


@real
@pytest.mark.parametrize("part", sorted(p.name for p in SHARED.glob("odd/*")) if SHARED.exists() else [])
def test_odd_folders_are_refused_with_a_reason(part: str, tmp_path: Path) -> None:
    source = SHARED / "odd" / part
    outcome = prepare_cohort(Order(source, tmp_path / "c", workers=1))
    check_invariants(source, tmp_path / "c", outcome)
    expected = {"jpeg2000": "no_diffusion", "lfs_pointers": "pointer", "missing_slice": "no_t2"}
    assert {row["error_code"] for row in outcome.rows} == {expected[part]}


@real
@pytest.mark.parametrize("patient", ["0000", "0001"])
def test_the_gland_of_real_patients_lies_inside_the_default_crop(patient: str) -> None:
    from mri_alm.imaging.dicom_files import find_studies
    from mri_alm.imaging.exam import read_study
    from mri_alm.imaging.registration import common_grid, mask_centre, resample

    (files,) = find_studies(SHARED / "prostatex" / f"ProstateX-{patient}")
    t2 = read_study(files).t2
    gland = sitk.ReadImage(str(SHARED / "masks" / f"ProstateX-{patient}_gland.nii.gz")) > 0
    volume = sitk.GetArrayViewFromImage(gland).sum() * np.prod(gland.GetSpacing())
    assert volume > 20_000  # mm3
    for spacing, size in (((2.8, 2.8, 3.0), (40, 40, 28)), ((0.5, 0.5, 3.0), (256, 256, 28))):
        grid = common_grid(t2, spacing_mm=spacing, size=size)
        corners = [grid.TransformIndexToPhysicalPoint([i * (n - 1) for i, n in zip(ijk, size, strict=True)])
                   for ijk in np.ndindex(2, 2, 2)]  # fmt: skip
        low, high = np.min(corners, axis=0), np.max(corners, axis=0)
        inside = np.argwhere(sitk.GetArrayViewFromImage(gland))[:, ::-1]
        points = np.array([gland.TransformIndexToPhysicalPoint(index) for index in inside[::7].tolist()])
        index = np.array([grid.TransformPhysicalPointToContinuousIndex(p) for p in points.tolist()])
        assert (index >= -0.5).all()
        assert (index <= np.array(size) - 0.5).all()
        assert (low < high).all()
    # About the gland instead, its box is centred.
    grid = common_grid(t2, spacing_mm=(2.8, 2.8, 3.0), size=(40, 40, 28), center_mm=mask_centre(gland))
    moved, _ = resample(gland, grid)
    assert np.abs(np.array(mask_centre(moved > 0.5)) - mask_centre(gland)).max() < 3
