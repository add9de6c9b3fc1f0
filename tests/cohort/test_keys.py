"""One exam has one key, in every cohort and program; who may recompute it; what leads back."""

import csv
from pathlib import Path

import pytest
from exams import GRID, dicom_exam, image_exam, prepare, write_text

from mri_alm.cohort.overview import dry_run
from mri_alm.cohort.prepare_cohort import Order, PreparedCohort
from mri_alm.errors import InputError
from mri_alm.runtime.pseudonyms import key_secret, study_key


def keys(outcome: PreparedCohort) -> set[str]:
    return {row["study"] for row in outcome.rows}


def test_a_key_depends_on_the_exam_and_the_users_secret_alone(tmp_path: Path) -> None:
    dicom_exam(tmp_path / "in" / "p1", 1)
    first = prepare(tmp_path / "in", tmp_path / "c")
    assert keys(first) == {study_key("1.2.9.1", key_secret())}
    moved = (tmp_path / "in" / "p1").rename(tmp_path / "elsewhere")
    assert keys(prepare(moved, tmp_path / "d")) == keys(first)
    left = {path.name for path in (tmp_path / "c").iterdir()} - keys(first)
    assert left == {"manifest.csv", "cohort.json", "qc.html", "key_check.json"}
    content = b"".join(path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert key_secret().encode() not in content


def test_a_study_of_image_files_has_the_key_of_its_folder_also_alone(tmp_path: Path) -> None:
    for name in "ab":
        image_exam(tmp_path / "in" / name, ord(name), {c: f"{c}.nii.gz" for c in ("t2", "adc", "hbv")})
    both = keys(prepare(tmp_path / "in", tmp_path / "c"))
    assert {*keys(prepare(tmp_path / "in" / "a", tmp_path / "d"))} < both
    assert both == {study_key(name, key_secret()) for name in "ab"}


def test_a_cohort_goes_on_with_the_secret_that_it_was_begun_with(tmp_path: Path) -> None:
    dicom_exam(tmp_path / "in", 1)
    secret = write_text(tmp_path / "secret", "another secret")
    outcome = prepare(tmp_path / "in", tmp_path / "c", salt_file=secret)
    assert keys(outcome) == {study_key("1.2.9.1", "another secret")}
    with pytest.raises(InputError, match=r"c were made with another secret, and would all change\. Go on"):
        prepare(tmp_path / "in", tmp_path / "c", resume=True)
    assert prepare(tmp_path / "in", tmp_path / "c", resume=True, salt_file=secret).kept == 1


def test_a_cohort_of_an_earlier_version_goes_on_with_its_own_secret(tmp_path: Path) -> None:
    dicom_exam(tmp_path / "in", 1)
    write_text(tmp_path / "c" / "salt", "the cohort's own")
    with pytest.raises(InputError, match=r"c holds a cohort\. Add --resume"):
        prepare(tmp_path / "in", tmp_path / "c")
    assert keys(prepare(tmp_path / "in", tmp_path / "c", resume=True)) == {study_key("1.2.9.1", "the cohort's own")}
    other = write_text(tmp_path / "secret", "another secret")
    with pytest.raises(InputError, match="were made with another secret"):
        prepare(tmp_path / "in", tmp_path / "c", resume=True, salt_file=other)
    # Its keys elsewhere, by naming the file.
    same = prepare(tmp_path / "in", tmp_path / "d", salt_file=tmp_path / "c" / "salt")
    assert keys(same) == {study_key("1.2.9.1", "the cohort's own")}


def test_what_leads_back_names_the_exams_folder(tmp_path: Path) -> None:
    """Not that of its first series, nor the one above, where another file counts with the exam."""
    for number in range(2):
        dicom_exam(tmp_path / "in" / "ward" / f"p{number}", number)
    write_text(tmp_path / "in" / "note.txt", "a stray file")
    rules = write_text(tmp_path / "rules.json", GRID)
    outcome = prepare(tmp_path / "in", tmp_path / "c", key_file=tmp_path / "keys.csv")
    with (tmp_path / "keys.csv").open(newline="") as file:
        found = {row["key"]: row["path"] for row in csv.DictReader(file) if row["kind"] == "study"}
    assert set(found.values()) == {str(tmp_path / "in" / "ward" / f"p{number}") for number in range(2)}
    text = dry_run(Order(tmp_path / "in", tmp_path / "c", rules=rules))
    for key, folder in found.items():
        assert f"study {key}   label -   " in text
        assert text.split(f"study {key}")[1].splitlines()[0].endswith(f"in ward/{Path(folder).name}")
    assert keys(outcome) == set(found)
