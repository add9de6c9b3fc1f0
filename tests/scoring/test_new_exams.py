"""Exams to score, in every layout that cohorts are prepared from: found alike, with the same keys."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exams import dicom_exam, image_exam, write_text
from monai.transforms import Compose

from mri_alm.cohort.layouts import find_sources
from mri_alm.cohort.prepare_cohort import Order, make_plan
from mri_alm.cohort.rules import CohortRules
from mri_alm.errors import InputError
from mri_alm.runtime.pseudonyms import key_secret
from mri_alm.scoring.new_exams import NewStudies, check_request, is_manifest, key_table, salt_of

COLUMNS = ("t2", "adc", "hbv")
NOTES = ("{}/._{}", "{}/.DS_Store", "{}/Thumbs.db", "__MACOSX/{}/._{}")  # what macOS and Windows put beside images


def named(root: Path, number: int) -> Path:
    return image_exam(root / f"p{number}", number, {column: f"{column}.nii.gz" for column in COLUMNS})


def cases(root: Path, number: int) -> Path:
    return image_exam(root, number, {column: f"case{number}_{column}.nii.gz" for column in COLUMNS})


def picai(root: Path, number: int) -> Path:
    names = dict(zip(COLUMNS, ("t2w", "adc", "hbv"), strict=True))
    return image_exam(root / f"{number}", number, {c: f"{number}_77_{name}.mha" for c, name in names.items()})


def nnunet(root: Path, number: int) -> Path:
    """As picai_prep writes it: ADC is called CT there."""
    write_text(root / "dataset.json", {"modality": {"0": "T2W", "1": "CT", "2": "HBV"}})
    return image_exam(root / "imagesTs", number, {c: f"{number}_77_{k:04}.nii.gz" for k, c in enumerate(COLUMNS)})


def dicom(root: Path, number: int) -> Path:
    return dicom_exam(root / f"p{number}", number)


@pytest.mark.parametrize("make", [dicom, named, cases, picai, nnunet], ids=lambda one: one.__name__)
def test_what_is_prepared_can_be_scored_under_the_same_keys_and_notes_of_systems_are_no_images(
    tmp_path: Path, make: Callable[[Path, int], Path]
) -> None:
    root = tmp_path / "in"
    folders = [make(root, number) for number in (1, 2)]
    found = find_sources(root, CohortRules())
    assert found.layout == {"cases": "named"}.get(make.__name__, make.__name__)
    images = [file for one in found.sources for file in one.files]
    for file in images[:4]:
        for note in NOTES:
            place = root / note.format(file.parent.relative_to(root), file.name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(4000))
    order = Order(root, tmp_path / "c")
    plan = make_plan(order)
    assert len(plan.jobs) == 2
    assert not any(one.failed for one in plan.found.sources)
    studies = NewStudies(root, Compose(seen), salt=key_secret(), threads=1)
    assert studies.names == [job.key for job in plan.jobs]
    assert studies.errors == {}
    assert {item["study"]: item["images"] for item in studies.prepared} == {
        job.key: ["dicom"] if make is dicom else [*COLUMNS] for job in plan.jobs
    }
    assert {row["folder"] for row in key_table(studies)} == {str(folder) for folder in folders}
    assert {row["study"] for row in key_table(studies)} == set(studies.names)


def seen(item: dict[str, Any]) -> dict[str, Any]:
    """In place of a model's preprocessing: which images it would read."""
    images = [name for name in ("dicom", *COLUMNS) if name in item]
    assert images != ["dicom"] or len(item["dicom"].headers) == len(item["dicom"].files)
    return {"study": item["study"], "images": images, "report": {"warnings": []}}


def test_a_table_without_names_is_read_as_a_cohorts_and_may_not_lead_elsewhere(tmp_path: Path) -> None:
    for number in (1, 2):
        named(tmp_path / "in", number)
    lines = ["T2;ADC;HBV", *(";".join(f"p{number}/{c}.nii.gz" for c in COLUMNS) for number in (1, 2))]
    table = write_text(tmp_path / "in" / "table.csv", "\n".join(lines))
    assert not is_manifest(table)
    order = Order(table, tmp_path / "c")
    plan = make_plan(order)
    assert NewStudies(table, Compose(seen), salt=key_secret(), threads=1).names == [job.key for job in plan.jobs]
    other = write_text(tmp_path / "other" / "table.csv", "\n".join(lines).replace("p1", "../in/p1"))
    shutil.copytree(tmp_path / "in" / "p2", tmp_path / "other" / "p2")
    studies = NewStudies(other, Compose(seen), salt=key_secret(), threads=1)
    assert [(error.code, len(studies.prepared)) for error in studies.errors.values()] == [("outside_path", 1)]
    assert NewStudies(other, Compose(seen), salt=key_secret(), threads=1, allow_outside_paths=True).errors == {}


def test_a_prepared_cohorts_folder_is_not_taken_for_exams(tmp_path: Path) -> None:
    """Its images are registered already; its manifest says so, their names do not."""
    for name in ("cohort.json", "manifest.csv"):
        write_text(tmp_path / name, "")
    named(tmp_path, 1)
    with pytest.raises(InputError, match=r"is a prepared cohort\. Give .*manifest\.csv, or the export"):
        NewStudies(tmp_path, Compose(seen), salt=key_secret(), threads=1)


def test_reports_refer_to_dicom_alone(tmp_path: Path) -> None:
    dicom(tmp_path / "a", 1)
    check_request(tmp_path / "a", sr=True)
    named(tmp_path / "b", 1)
    with pytest.raises(InputError, match=r"^--sr refers to DICOM images, and .*b is no folder of DICOM studies\."):
        check_request(tmp_path / "b", sr=True)


def test_a_secret_in_a_models_folder_is_not_taken_but_can_be_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert salt_of(tmp_path) == key_secret()
    assert caplog.text == ""
    write_text(tmp_path / "salt", "a sender's secret")
    assert salt_of(tmp_path) == key_secret()
    assert re.search(r"no longer with .*salt\. Name that file as --salt-file \(in a config --salt_file\)", caplog.text)
    assert salt_of(tmp_path, tmp_path / "salt") == "a sender's secret"
