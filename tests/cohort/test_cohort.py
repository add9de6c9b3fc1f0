import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from exams import write_text
from hypothesis import given, settings
from hypothesis import strategies as st
from small_cohort import COLUMNS, write_manifest

from mri_alm.cohort.manifest import Cohort, ManifestRow, digest, partition_splits, read_manifest, stratified_splits
from mri_alm.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Somewhere with image files to point at: their content is not read."""
    for number in range(6):
        for column in ("t2", "adc", "hbv", "dwi"):
            (tmp_path / f"{number}_{column}.nii").write_text(f"{number}{column}")
        (tmp_path / f"{number}_dicom").mkdir()
        (tmp_path / f"{number}_dicom" / "1.dcm").write_text(str(number))
    return tmp_path


def row(number: int, label: str = "0", side: str = "train", patient: str | None = None) -> list[str]:
    name = f"S{number}"
    return [name, patient or name, label, side, *(f"{number}_{column}.nii" for column in ("t2", "adc", "hbv"))]


def write(folder: Path, rows: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS) -> Path:
    return write_manifest(folder / "manifest.csv", rows, columns)


def test_reads_rows_in_order_with_paths_from_the_manifest_s_folder(folder: Path) -> None:
    studies = read_manifest(write(folder, [row(0, "1"), row(1, "0", "test", "P")]))
    assert [(s.index, s.study, s.patient, s.label, s.side) for s in studies] == [
        (0, "S0", "S0", 1, "train"),
        (1, "S1", "P", 0, "test"),
    ]
    assert studies[1].images == {c: folder / f"1_{c}.nii" for c in ("t2", "adc", "hbv")}


@pytest.mark.parametrize(
    ("columns", "cells"),
    [
        (["dicom"], ["0_dicom"]),
        (["t2", "dwi"], ["0_t2.nii", "0_dwi.nii"]),
        (["t2", "adc", "hbv"], ["0_t2.nii", "0_adc.nii", "0_hbv.nii"]),
        (["t2", "adc", "hbv", "dwi", "dicom"], ["0_t2.nii", "", "", "0_dwi.nii", ""]),
    ],
)
def test_every_form_of_images(folder: Path, columns: list[str], cells: list[str]) -> None:
    manifest = write(folder, [["S0", "S0", "1", "train", *cells]], ["study", "patient", "label", "side", *columns])
    filled = {c: folder / cell for c, cell in zip(columns, cells, strict=True) if cell}
    assert read_manifest(manifest)[0].images == filled


def test_absolute_paths_spaces_a_byte_order_mark_and_unknown_columns(folder: Path) -> None:
    text = f"study , Patient,label,Side,T2,dwi,note\nS0, P ,1 ,train,{folder}/0_t2.nii,0_dwi.nii,hello\n"
    (folder / "m.csv").write_text(text, encoding="utf-8-sig")
    (study,) = read_manifest(folder / "m.csv")
    assert (study.patient, study.label) == ("P", 1)
    assert study.images["t2"] == folder / "0_t2.nii"


def test_exclude_keeps_the_others_index(folder: Path) -> None:
    manifest = write(folder, [row(0), row(1), row(2)])
    assert [(s.index, s.study) for s in read_manifest(manifest, exclude=["S1"])] == [(0, "S0"), (2, "S2")]


def test_exclude_as_one_name_and_as_numbers(folder: Path) -> None:
    rows = [row(0), ["17", *row(1)[1:]], row(2)]
    manifest = write(folder, rows)
    assert [s.study for s in read_manifest(manifest, exclude="S2")] == ["S0", "17"]
    assert [s.study for s in read_manifest(manifest, exclude=[17, "S2"])] == ["S0"]  # type: ignore[list-item]


def test_an_excluded_row_may_be_wrong(folder: Path) -> None:
    manifest = write(folder, [row(0), ["S1", "", "7", "", "nowhere.nii", "", ""]])
    assert [s.study for s in read_manifest(manifest, exclude=["S1"])] == ["S0"]


def test_exams_to_score_need_no_label_patient_or_split(folder: Path) -> None:
    manifest = write(folder, [["S0", "0_t2.nii", "0_dwi.nii"]], ["study", "t2", "dwi"])
    (study,) = read_manifest(manifest, labelled=False)
    assert (study.label, study.side, study.patient) == (None, "", "S0")
    assert study.item()["label"] == 0.0


def test_gland_and_crop_centre_reach_the_item(folder: Path) -> None:
    columns = (*COLUMNS, "gland", "crop_center_mm")
    manifest = write(folder, [[*row(0), "0_dwi.nii", ""], [*row(1), "", "1 -2.5 3e1"], [*row(2), "", ""]], columns)
    items = [study.item() for study in read_manifest(manifest)]
    assert items[0]["gland"] == str(folder / "0_dwi.nii")
    assert [item.get("crop_center_mm") for item in items] == [None, "1 -2.5 3e1", None]


@pytest.mark.parametrize("cell", ["1 2", "1,2,3", "a b c", "1 2 nan"])
def test_a_crop_centre_that_is_no_point(folder: Path, cell: str) -> None:
    manifest = write(folder, [[*row(0), cell]], (*COLUMNS, "crop_center_mm"))
    with pytest.raises(InputError, match=r"row 2 \(study S0\) has a crop_center_mm that is not three numbers"):
        read_manifest(manifest)


def test_failed_and_unlabelled_rows_of_a_prepared_cohort_are_skipped(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed = ["S1", "S1", "", "", "", "", "", "failed"]
    rows = [[*row(0), "ok"], failed, [*row(2, ""), "warn"], [*row(3, "1"), "warn"]]
    manifest = write(folder, rows, (*COLUMNS, "status"))
    assert [(s.index, s.study) for s in read_manifest(manifest)] == [(0, "S0"), (3, "S3")]
    assert "skipped 1 failed and 1 unlabelled studies" in caplog.text
    assert [s.study for s in read_manifest(manifest, labelled=False)] == ["S0", "S2", "S3"]
    without_status = write(folder, [[*row(0)], ["S1", "S1", "", "train", "1_t2.nii", "1_adc.nii", "1_hbv.nii"]])
    with pytest.raises(InputError, match='has label ""'):  # by hand, a missing label is a mistake
        read_manifest(without_status)


# --- Errors ---------------------------------------------------------------------------------------------------------

WRONG_ROWS = {
    "label": (["S1", "P", "2", "train"], 'row 3 (study S1) has label "2". Write 1 (DCE needed) or 0 (not needed).'),
    "no label": (["S1", "P", "", "train"], 'row 3 (study S1) has label "". Write 1'),
    "label 1.0": (["S1", "P", "1.0", "train"], 'row 3 (study S1) has label "1.0". Write 1'),
    "side": (["S1", "P", "0", "validation"], 'row 3 (study S1) has side "validation". Write train or test.'),
    "patient": (["S1", "", "0", "test"], "row 3 (study S1) has an empty column patient. Repeat the study's name"),
    "study": (["", "P", "0", "test"], "row 3 (study without name) has no usable name in column study"),
    "slash": (["../S1", "P", "0", "test"], "row 3 (study ../S1) has no usable name in column study"),
}


@pytest.mark.parametrize("kind", WRONG_ROWS)
def test_wrong_cell(folder: Path, kind: str) -> None:
    cells, message = WRONG_ROWS[kind]
    manifest = write(folder, [row(0), [*cells, "1_t2.nii", "1_adc.nii", "1_hbv.nii"]])
    with pytest.raises(InputError, match="^" + re.escape(f"{manifest}: {message}")):
        read_manifest(manifest)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["", "1_adc.nii", "1_hbv.nii"], "has no T2 image. Add its path in column t2, or list the study"),
        (["1_t2.nii", "", ""], "has no diffusion series. Add its path in column dwi, or adc and"),
    ],
)
def test_missing_images(folder: Path, cells: list[str], message: str) -> None:
    manifest = write(folder, [row(0), ["S1", "P", "0", "train", *cells]])
    with pytest.raises(InputError, match=re.escape(f"row 3 (study S1) {message}")):
        read_manifest(manifest)


def test_a_file_that_does_not_exist(folder: Path) -> None:
    manifest = write(folder, [[*row(0)[:5], "gone.nii", "0_hbv.nii"]])
    message = f"row 2 (study S0) names {folder / 'gone.nii'} in column adc, which does not exist. Correct the path"
    with pytest.raises(InputError, match=re.escape(message)):
        read_manifest(manifest)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=re.escape(f"{tmp_path / 'm.csv'}: cannot be read (No such file or directory). Give the path of"),
    ):
        read_manifest(tmp_path / "m.csv")


def test_missing_columns_are_named_beside_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("study;patient;label\n1;2;3\n")
    message = "no column side. Its columns are: study, patient, label."
    with pytest.raises(InputError, match=re.escape(message)):
        read_manifest(tmp_path / "m.csv")


def test_empty_files(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("")
    with pytest.raises(InputError, match=re.escape("no column study, patient, label, side. Its columns are: none.")):
        read_manifest(tmp_path / "m.csv")
    with pytest.raises(InputError, match=r"has a header but no row below it\.$"):
        read_manifest(write(tmp_path, []))


@pytest.mark.parametrize(("encoding", "separator"), [("cp1252", ","), ("utf-8-sig", ";"), ("utf-8", "\t")])
def test_every_common_form_of_csv_is_read(folder: Path, encoding: str, separator: str) -> None:
    lines = [["study", "patient", "label", "side", "t2", "adc", "hbv"], ["möller", "1", "0", "train", "a.nii"]]
    (folder / "m.csv").write_bytes("\r\n".join(map(separator.join, lines)).encode(encoding))
    with pytest.raises(InputError, match=r"row 2 \(study möller\) has no diffusion series"):
        read_manifest(folder / "m.csv")


def test_the_old_name_of_column_side_is_understood(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = write(folder, [row(0)])
    expected = read_manifest(manifest)
    manifest.write_text(manifest.read_text().replace("side", "split", 1))
    with caplog.at_level("INFO"):
        assert read_manifest(manifest) == expected
    assert "column split is called side now; it is understood" in caplog.text


def test_exclude_of_an_unknown_study(folder: Path) -> None:
    with pytest.raises(InputError, match=r"^exclude names S7, S8, but .*manifest\.csv has no such study\.$"):
        read_manifest(write(folder, [row(0)]), exclude=["S8", "S0", "S7"])


def test_an_excluded_name_is_compared_as_names_are_and_a_number_asks_for_quotation_marks(folder: Path) -> None:
    manifest = write(folder, [row(0), ["10000_10003", *row(1)[1:]], ["Köln", *row(2)[1:]]])
    assert [s.study for s in read_manifest(manifest, exclude=["Ko\u0308ln"])] == ["S0", "10000_10003"]
    message = (
        'has no such study. Did you mean "10000_10003"? Names like numbers need two pairs of quotation marks: '
        "--exclude \"'1000010003'\"."
    )
    with pytest.raises(InputError, match=re.escape(message) + "$"):
        read_manifest(manifest, exclude=[1000010003])  # type: ignore[list-item]


def test_a_manifest_saved_by_a_european_spreadsheet_on_windows(folder: Path) -> None:
    for name in ("t2", "dwi"):
        write_text(folder / "bilder" / "ä" / f"{name}.nii", "")
    text = "sep=;\r\nStudy;Patient;Label;Split;T2;DWI\r\n\r\n0012;P;1;train;bilder\\ä\\t2.nii;bilder\\ä\\dwi.nii\r\n"
    (folder / "m.csv").write_bytes(text.encode("cp1252"))
    (study,) = read_manifest(folder / "m.csv")
    assert (study.index, study.study, study.label, study.side) == (0, "0012", 1, "train")
    assert study.images == {name: folder / "bilder" / "ä" / f"{name}.nii" for name in ("t2", "dwi")}


@pytest.mark.parametrize("cell", ["D:\\Export\\0_t2.nii", "\\\\server\\share\\0_t2.nii", "D:/0_t2.nii"])
def test_a_path_from_the_root_of_a_windows_machine_is_refused_by_row(folder: Path, cell: str) -> None:
    """Its last part alone could be another patient's image."""
    manifest = write(folder, [["S0", "S0", "1", "train", cell, *row(0)[5:]]])
    with pytest.raises(
        InputError, match=r"row 2 \(study S0\) names .* It is one of a Windows machine: write it relative"
    ):
        read_manifest(manifest)


def test_duplicated_study(folder: Path) -> None:
    with pytest.raises(InputError, match=r"study S0 stands in 2 rows\. Keep one\."):
        read_manifest(write(folder, [row(0), ["S0", *row(1)[1:]]]))


def test_two_studies_with_one_file(folder: Path) -> None:
    shared = [*row(1)[:4], "../" + folder.name + "/0_t2.nii", *row(1)[5:]]  # the same file under another name
    with pytest.raises(InputError, match=re.escape(f"S0, S1 share the file {(folder / '0_t2.nii').resolve()}. Keep")):
        read_manifest(write(folder, [row(0), shared]))


def test_a_patient_in_train_and_test(folder: Path) -> None:
    manifest = write(folder, [row(0, patient="P"), row(1, side="test", patient="P")])
    message = "patient P has studies in train and in test. Put all studies of a patient on one side."
    with pytest.raises(InputError, match=re.escape(message)):
        read_manifest(manifest)


def test_a_patient_on_both_sides_by_two_spellings(folder: Path) -> None:
    manifest = write(folder, [row(0, patient="Ab 1"), row(1, side="test", patient="AB\u00a01")])
    with pytest.raises(InputError, match=r"patient Ab 1 has studies in train and in test\."):
        read_manifest(manifest)


def test_a_patient_spelt_in_two_ways_is_held_out_as_one(folder: Path) -> None:
    rows = [row(i, str(i // 3), patient=name) for i, name in enumerate(("N1", "n1", "N2", "P1", "p1 ", "P2"))]
    cohort = Cohort(write(folder, rows), splits="loo", split_rule="partition")
    assert [study.patient for study in cohort.train] == ["N1", "N1", "N2", "P1", "P1", "P2"]
    assert len(cohort.splits) == 2  # positive patients
    for training, held_out in cohort.splits:
        assert not {study.patient for study in training} & {study.patient for study in held_out}


def test_rows_are_counted_as_a_spreadsheet_does_and_studies_without_empty_rows(folder: Path) -> None:
    manifest = write(folder, [row(0), [""] * 7, row(1, label="7")])
    with pytest.raises(InputError, match=r'row 4 \(study S1\) has label "7"'):
        read_manifest(manifest)
    assert [s.index for s in read_manifest(write(folder, [row(0), [""] * 7, row(1)]))] == [0, 1]


def test_all_problems_are_reported_at_once_up_to_ten(folder: Path) -> None:
    wrong = [["S0", "", "x", "y", "", "", ""] for _ in range(4)]
    with pytest.raises(InputError, match=r"more\.$") as caught:
        read_manifest(write(folder, wrong))
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "... and 7 more."  # 4 rows with 4 problems each and one across rows


def test_test_studies_of_one_label(folder: Path) -> None:
    rows = [*(row(i, str(i % 2)) for i in range(4)), row(4, "0", "test"), row(5, "0", "test")]
    message = "all 2 test studies have one label. Add the other class, or have none."
    with pytest.raises(InputError, match=re.escape(message)):
        Cohort(write(folder, rows), validation=0.5)


# --- Splits ---------------------------------------------------------------------------------------------------------


def studies_of(patients: Sequence[Sequence[int]]) -> list[ManifestRow]:
    """Studies of patients, given the labels of each patient's; of one patient they do not stand side by side."""
    pairs = sorted((k, p, label) for p, labels in enumerate(patients) for k, label in enumerate(labels))
    return [ManifestRow(i, f"S{i}", f"P{p}", label, "train", {}) for i, (_, p, label) in enumerate(pairs)]


patient = st.lists(st.integers(0, 1), min_size=1, max_size=3)
cohorts = st.lists(patient, max_size=30).map(lambda more: [[1], [0]] * 5 + more)


@settings(max_examples=60)
@given(patients=cohorts, seed=st.integers(0, 99), validation=st.floats(0.2, 0.8))
def test_split_properties(patients: list[list[int]], seed: int, validation: float) -> None:
    studies = studies_of(patients)
    splits = stratified_splits(studies, splits=4, validation=validation, seed=seed)
    assert len(splits) == 4
    positive = {f"P{p}" for p, labels in enumerate(patients) if any(labels)}
    for training, held_out in splits:
        sides = [{study.patient for study in side} for side in (training, held_out)]
        assert not sides[0] & sides[1]
        assert sorted([*training, *held_out], key=lambda s: s.index) == studies
        assert [s.index for s in training] == sorted(s.index for s in training)
        assert abs(len(sides[1]) - validation * len(patients)) <= 1
        for group in (positive, {f"P{p}" for p in range(len(patients))} - positive):
            assert abs(len(sides[1] & group) - validation * len(group)) < 2  # stratified
            assert sides[0] & group  # both classes on both sides
            assert sides[1] & group


def test_the_first_splits_do_not_depend_on_how_many_are_asked_for() -> None:
    studies = studies_of([[i % 3 == 0] for i in range(40)])
    ten = stratified_splits(studies, splits=10, seed=3)
    for count in (1, 3, 9):
        assert stratified_splits(studies, splits=count, seed=3) == ten[:count]
    assert stratified_splits(studies, splits=1, seed=4) != ten[:1]


def test_splits_differ_from_each_other() -> None:
    splits = stratified_splits(studies_of([[i % 3 == 0] for i in range(40)]), splits=10)
    assert len({tuple(s.index for s in held_out) for _, held_out in splits}) == 10


@pytest.mark.parametrize(
    ("positives", "negatives", "validation", "message"),
    [
        (4, 40, 0.2, "has 4 positive and 40 negative patients; splits that hold out 0.2 of each class need at least 5"),
        (40, 4, 0.2, "has 40 positive and 4 negative patients"),
        (0, 40, 0.2, "has 0 positive and 40 negative patients"),
        (40, 0, 0.2, "has 40 positive and 0 negative patients"),
        (4, 40, 0.8, "has 4 positive and 40 negative patients; splits that hold out 0.8 of each class need at least 5"),
        (0, 0, 0.5, "has 0 positive and 0 negative patients"),
    ],
)
def test_too_few_patients_of_a_class(positives: int, negatives: int, validation: float, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"The training cohort {message}")):
        stratified_splits(studies_of([[1]] * positives + [[0]] * negatives), validation=validation)


@pytest.mark.parametrize("validation", [0, 1, -0.2, 1.5])
def test_validation_share_out_of_range(validation: float) -> None:
    with pytest.raises(InputError, match=re.escape(f"validation must lie between 0 and 1, got {validation}")):
        stratified_splits(studies_of([[1], [0]] * 9), validation=validation)


@settings(max_examples=60)
@given(patients=cohorts, seed=st.integers(0, 99), loo=st.booleans(), data=st.data())
def test_partition_properties(patients: list[list[int]], seed: int, loo: bool, data: st.DataObject) -> None:
    studies = studies_of(patients)
    positive = {f"P{p}" for p, labels in enumerate(patients) if any(labels)}
    negative = {f"P{p}" for p in range(len(patients))} - positive
    least = min(len(positive), len(negative))
    loo = loo and least == len(positive)
    folds = len(positive) if loo else data.draw(st.integers(2, least))
    splits = partition_splits(studies, folds="loo" if loo else folds, seed=seed)
    assert len(splits) == folds
    for training, held_out in splits:
        assert not {s.patient for s in training} & {s.patient for s in held_out}
        assert sorted([*training, *held_out], key=lambda s: s.index) == studies
        assert [s.index for s in held_out] == sorted(s.index for s in held_out)
    dealt = [{s.patient for s in held_out} for _, held_out in splits]
    times = Counter(patient for fold in dealt for patient in fold)
    assert {times[patient] for patient in positive} == {1}
    assert {times[patient] for patient in negative} <= {0, 1}
    assert {len(fold & negative) for fold in dealt} == {len(negative) // folds}
    assert {len(fold & positive) for fold in dealt} <= {len(positive) // folds, -(-len(positive) // folds)}


def test_a_partition_is_dealt_anew_by_another_seed_only() -> None:
    studies = studies_of([[i % 3 == 0] for i in range(40)])
    assert partition_splits(studies, folds=7, seed=3) == partition_splits(studies, folds=7, seed=3)
    assert partition_splits(studies, folds=7, seed=3) != partition_splits(studies, folds=7, seed=4)
    assert sorted(s.index for _, held_out in partition_splits(studies) for s in held_out if s.label) == [
        *range(0, 40, 3)
    ]


@pytest.mark.parametrize(
    ("positives", "negatives", "folds", "message"),
    [
        (4, 40, 5, "4 positive and 40 negative patients; a partition into 5 folds needs .* number from 2 to 4"),
        (40, 4, "loo", "40 positive and 4 negative patients; a partition into 40 folds needs .* number from 2 to 4"),
        (9, 9, 1, "a partition into 1 folds needs 2 folds or more, .* number from 2 to 9"),
        (1, 9, "loo", "1 positive and 9 negative patients; a partition into 1 folds needs"),
    ],
)
def test_folds_that_cannot_be(positives: int, negatives: int, folds: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition_splits(studies_of([[1]] * positives + [[0]] * negatives), folds=folds)


# --- Items ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cohort(folder: Path) -> Cohort:
    rows = [row(0, "1"), row(1, "0"), row(2, "1"), row(3, "0"), row(4, "1", "test"), row(5, "0", "test")]
    return Cohort(write(folder, rows), splits=2, validation=0.5)


def test_items_of_each_part(cohort: Cohort) -> None:
    def names(part: str, split: int = 0) -> list[str]:
        return [item["study"] for item in cohort.items(part, split)]

    assert names("all") == [f"S{i}" for i in range(6)]
    assert names("test") == ["S4", "S5"]
    for split in range(2):
        both = [*names("training", split), *names("validation", split)]
        assert sorted(both) == ["S0", "S1", "S2", "S3"]
        assert names("validation", split) == [s.study for s in cohort.splits[split][1]]


def test_an_item_is_json_and_keeps_the_index_an_integer(cohort: Cohort) -> None:
    item = cohort.items("test")[0]
    assert json.loads(json.dumps(item)) == item
    assert (type(item["index"]), item["index"], item["label"]) == (int, 4, 1.0)


def test_size_covers_every_index_also_when_studies_are_left_out(folder: Path) -> None:
    rows = [row(0, "1"), row(1, "0"), row(2, "1"), row(3, "0"), row(4, "1")]
    assert Cohort(write(folder, rows), ["S0"], splits=1, validation=0.5).size == 5


def test_guard_is_of_one_split_its_labels_and_indices(cohort: Cohort, folder: Path) -> None:
    guards = {cohort.split_digest(0), cohort.split_digest(1)}
    again = Cohort(cohort.manifest, splits=2, validation=0.5)
    assert {again.split_digest(0), again.split_digest(1)} == guards
    rows = [row(0, "0"), row(1, "1"), row(2, "1"), row(3, "0")]
    other = Cohort(write(folder, rows), splits=2, validation=0.5)
    assert not guards & {other.split_digest(0), other.split_digest(1)}


def touch_later(path: Path) -> None:
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1_000_000))


def test_digest_changes_with_content_size_and_time(folder: Path) -> None:
    path = folder / "0_t2.nii"
    study = ManifestRow(0, "S0", "S0", 0, "train", {"t2": path})
    seen = [digest(study), digest(study)]
    assert seen[0] == seen[1]
    path.write_text("longer than before")
    seen.append(digest(study))
    touch_later(path)
    seen.append(digest(study))
    assert len(set(seen)) == 3


def test_digest_sees_inside_folders_and_the_table_of_b_values(folder: Path) -> None:
    inner = ManifestRow(0, "S0", "S0", 0, "train", {"dicom": folder / "0_dicom"})
    before = digest(inner)
    touch_later(folder / "0_dicom" / "1.dcm")
    assert digest(inner) != before
    (folder / "1.2.3.nii.gz").write_text("4D")
    table = folder / "1.2.3.bval"
    dwi = ManifestRow(0, "S0", "S0", 0, "train", {"dwi": folder / "1.2.3.nii.gz"})
    before = digest(dwi)
    table.write_text("0 800")
    with_table = digest(dwi)
    touch_later(table)
    assert len({before, with_table, digest(dwi)}) == 3


def test_digest_does_not_depend_on_where_the_cohort_lies(tmp_path: Path) -> None:
    digests = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "t2.nii"
        file.write_text("same")
        os.utime(file, ns=(1, 1))
        digests.add(digest(ManifestRow(0, "S0", "S0", 0, "train", {"t2": file})))
    assert len(digests) == 1


def test_a_cohort_by_each_rule(folder: Path) -> None:
    rows = [row(i, str(i % 2)) for i in range(6)]
    path = write(folder, rows)
    assert len(Cohort(path, splits="loo", split_rule="partition").splits) == 3
    assert len(Cohort(path, splits=2, split_rule="partition", validation=0.5).splits) == 2
    with pytest.raises(InputError, match=r"^A partition holds every patient out, once: leave --validation 0 out"):
        Cohort(path, splits=2, split_rule="partition", validation=0)
    with pytest.raises(InputError, match=r'^split_rule must be random or partition, got "kfold"\.$'):
        Cohort(path, split_rule="kfold")
    with pytest.raises(
        InputError, match=r"^splits loo leaves one positive patient out at a time: it needs --split_rule"
    ):
        Cohort(path, splits="loo")
