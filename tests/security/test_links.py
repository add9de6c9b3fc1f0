"""Links inside a folder that lead out of it: left out and named, unless the user allows them."""

import csv
import json
from pathlib import Path

import pytest
from exams import GRID, dicom_exam, image_exam, write_text
from shell import WarmPython
from small_cohort import COLUMNS, write_manifest

from mri_alm.cohort.layouts import find_sources
from mri_alm.cohort.manifest import read_manifest
from mri_alm.cohort.rules import CohortRules
from mri_alm.errors import InputError
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.runtime.files import links_out_of, walk
from mri_alm.scoring.new_exams import NewStudies

NAMES = {"t2": "t2.nii.gz", "adc": "adc.nii.gz", "hbv": "hbv.nii.gz"}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """An exam of its own, and links: to a private exam and a private file, inside, in a circle, to nothing."""
    dicom_exam(tmp_path / "private" / "MUELLER", 1)
    root = tmp_path / "in"
    dicom_exam(root / "p0", 0)
    (root / "private").symlink_to(tmp_path / "private")
    (root / "p0" / "one.dcm").symlink_to(min((tmp_path / "private" / "MUELLER" / "s4").iterdir()))
    (root / "z_again").symlink_to(root / "p0")
    (root / "p0" / "circle").symlink_to(root)
    (root / "p0" / "nothing").symlink_to(tmp_path / "absent")
    return root


def test_what_leads_out_is_listed_and_not_walked(export: Path) -> None:
    assert [str(path.relative_to(export)) for path in links_out_of(export, export)] == ["private", "p0/one.dcm"]
    files = set(walk(export, within=export))
    assert {path.resolve().is_relative_to(export) for path in files} == {True}
    assert len(files) == len({path.resolve() for path in files}) == 30
    assert {path.resolve() for path in walk(export)} > files
    assert len([study for study in find_studies(export) if study.files]) == 2
    assert len([study for study in find_studies(export, within=export) if study.files]) == 1


def test_the_folder_given_may_itself_be_a_link(export: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(export)
    files = {path.resolve() for path in walk(tmp_path / "elsewhere", within=tmp_path / "elsewhere")}
    assert files == {path.resolve() for path in walk(export, within=export)}


def test_the_warning_counts_and_names_links_relative_to_the_input(
    export: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = find_sources(export, CohortRules())
    assert [source.uid for source in found.sources] == ["1.2.9.0"]
    (text,) = caplog.messages
    assert text == (
        "2 links lead out of the input folder and are left out: private, p0/one.dcm. Put the files themselves there, "
        "or allow it with --allow-outside-paths if the folder is your own."
    )
    reasons = {str(path.relative_to(export)): reason for path, reason in found.outside.items()}
    assert reasons == dict.fromkeys(["private", "p0/one.dcm"], "a link that leads out of the input folder")


def test_with_leave_links_are_followed_without_a_warning(export: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = find_sources(export, CohortRules(), allow_outside_paths=True)
    assert sorted(source.uid for source in found.sources) == ["1.2.9.0", "1.2.9.1"]
    assert (caplog.text, found.outside) == ("", {})


@pytest.mark.parametrize("layout", ["named", "picai", "nnunet"])
def test_every_layout_stays_inside(tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    names = {
        "named": NAMES,
        "picai": {"t2": "1_2_t2w.mha", "adc": "1_2_adc.mha", "hbv": "1_2_hbv.mha"},
        "nnunet": {"t2": "P_1_0000.nii.gz", "adc": "P_1_0001.nii.gz", "hbv": "P_1_0002.nii.gz"},
    }[layout]
    other = {column: name.replace("1_2", "3_4").replace("P_1", "P_2") for column, name in names.items()}
    root, part = tmp_path / "in", "imagesTr" if layout == "nnunet" else "a"
    image_exam(root / part, 0, names)
    image_exam(tmp_path / "private", 1, other)
    write_text(root / "dataset.json", {"channel_names": {"0": "T2", "1": "ADC", "2": "HBV"}})
    if layout == "named":
        (root / "b").symlink_to(tmp_path / "private")
    else:
        for name in other.values():
            (root / part / name).symlink_to(tmp_path / "private" / name)
    found = find_sources(root, CohortRules())
    assert (found.layout, len(found.sources)) == (layout, 1)
    assert "lead out of the input folder" in caplog.text
    assert len(find_sources(root, CohortRules(), allow_outside_paths=True).sources) == 2


def test_an_input_of_links_alone_says_why_it_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dicom_exam(tmp_path / "store", 0)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "exam").symlink_to(tmp_path / "store")
    with pytest.raises(InputError, match="the folder is empty"):
        find_sources(tmp_path / "in", CohortRules())
    assert "1 links lead out of the input folder and are left out: exam." in caplog.text


def test_of_many_links_five_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dicom_exam(tmp_path / "in" / "p0", 0)
    (tmp_path / "x").write_text("x")
    for number in range(9):
        (tmp_path / "in" / f"l{number}").symlink_to(tmp_path / "x")
    find_sources(tmp_path / "in", CohortRules())
    assert "9 links lead out of the input folder and are left out: l0, l1, l2, l3, l4 and 4 more. Put" in caplog.text


# --- Manifests ------------------------------------------------------------------------------------------------------


def manifest(folder: Path, dicom: str) -> Path:
    return write_manifest(folder / "manifest.csv", [["S0", "P0", "1", "train", dicom]], (*COLUMNS[:4], "dicom"))


@pytest.mark.parametrize("cell", [".", "p0"])
def test_a_folder_in_a_manifest_with_a_link_out_is_refused(export: Path, cell: str) -> None:
    names = "private, p0/one.dcm" if cell == "." else "p0/circle/private, p0/one.dcm"
    with pytest.raises(
        InputError, match=r"row 2 \(study S0\) names .* in column dicom, where \d links lead out of"
    ) as e:
        read_manifest(manifest(export, cell))
    assert names.split(", ")[1].rpartition("/")[2] in str(e.value)
    assert "Put the files themselves there, or allow it with --allow_outside_paths True" in str(e.value)
    assert read_manifest(manifest(export, cell), allow_outside_paths=True)[0].images["dicom"].is_dir()


def test_links_from_a_study_s_folder_to_a_store_beside_the_manifest_are_followed(tmp_path: Path) -> None:
    dicom_exam(tmp_path / "in" / "store", 0)
    (tmp_path / "in" / "exam").mkdir()
    (tmp_path / "in" / "exam" / "all").symlink_to(tmp_path / "in" / "store")
    (row,) = read_manifest(manifest(tmp_path / "in", "exam"))
    assert len(list(walk(row.images["dicom"]))) == 30


def test_a_table_of_b_values_is_no_way_out(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    for name in ("t2.nii", "dwi.nii"):
        (root / name).write_text("")
    (tmp_path / "secret").write_text("0 800")
    (root / "dwi.bval").symlink_to(tmp_path / "secret")
    path = write_manifest(root / "m.csv", [["S0", "P0", "1", "train", "t2.nii", "dwi.nii"]], (*COLUMNS[:5], "dwi"))
    with pytest.raises(
        InputError, match=r"in column dwi, where 1 links lead out of the manifest's folder \(dwi\.bval\)"
    ):
        read_manifest(path)
    assert len(read_manifest(path, allow_outside_paths=True)) == 1


# --- Programs -------------------------------------------------------------------------------------------------------


def test_a_private_exam_is_not_scored_through_a_link(export: Path) -> None:
    """What score.py scores: the studies that NewStudies finds."""

    def prepared(item: dict[str, object]) -> dict[str, object]:
        return item | {"report": {}}

    def found(**allowed: bool) -> set[str]:
        studies = NewStudies(export, prepared, salt="s" * 8, threads=1, **allowed)  # type: ignore[arg-type]
        return {source.uid for source in studies.sources.values()}

    assert found() == {"1.2.9.0"}
    assert found(allow_outside_paths=True) == {"1.2.9.0", "1.2.9.1"}


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [False, True])
def test_preparing_from_the_shell(export: Path, tmp_path: Path, allowed: bool, python: WarmPython) -> None:
    rules = write_text(tmp_path / "rules.json", GRID)
    words = ["--input", export, "--output", tmp_path / "out", "--rules", rules, "--workers", "1"]
    done = python.run("pipelines/prepare_cohort.py", *words, *(["--allow-outside-paths"] if allowed else []))
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out" / "manifest.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 1 + allowed
    record = json.loads((tmp_path / "out" / "cohort.json").read_text())
    reasons = {"a link that leads out of the input folder": 2}
    assert record["files"]["outside_studies"] == ({} if allowed else reasons)
    assert ("2 links lead out of the input folder" in done.stderr) is not allowed
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert b"MUELLER" not in written
    assert "MUELLER" not in done.stdout + done.stderr


@pytest.mark.slow
def test_scoring_has_the_same_flag_from_the_shell(
    export: Path, trained: Path, tmp_path: Path, python: WarmPython
) -> None:
    words = ["--model", trained, "--input", export, "--output", tmp_path / "out", "--threads", "1"]
    done = python.run("pipelines/score.py", *words)
    assert "2 links lead out of the input folder and are left out: private, p0/one.dcm." in done.stdout + done.stderr
    with (tmp_path / "out" / "scores.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 1
