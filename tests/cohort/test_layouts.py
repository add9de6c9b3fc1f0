"""Every layout an export or archive has: recognised, read to the same exam, every file accounted for."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from exams import GRID, SHAPE, check_invariants, dicom_exam, image_exam, prepare, scans, write_image, write_text

from mri_alm.cohort.layouts import detect_layout, find_sources, role_of
from mri_alm.cohort.prepare_cohort import PreparedCohort
from mri_alm.cohort.rules import CohortRules, load_cohort_rules
from mri_alm.errors import InputError


def by_uid(outcome: PreparedCohort) -> dict[str, dict[str, object]]:
    rows = {row["study"]: row for row in outcome.rows}
    return {source.uid: rows[source.names[-1]] for source in outcome.found.sources}


def picai(root: Path) -> Path:
    for number in range(3):
        name = f"1000{number}_10000{number}"
        names = {"t2": f"{name}_t2w.mha", "adc": f"{name}_adc.mha", "hbv": f"{name}_hbv.mha"}
        image_exam(root / "public_images_fold0" / f"1000{number}", number, names)
        write_image(root / "public_images_fold0" / f"1000{number}" / f"{name}_sag.mha", scans(number)[0].pixels)
    write_text(root / "marksheet.csv", "patient_id,study_id,case_csPCa\n10000,100000,YES\n10001,100001,NO\n")
    return root


def test_a_damaged_image_is_counted_as_failed(tmp_path: Path) -> None:
    root = picai(tmp_path / "in")
    (root / "public_images_fold0" / "10001" / "10001_100001_adc.mha").write_bytes(b"no image")
    outcome = prepare(root, tmp_path / "c")
    check_invariants(root, tmp_path / "c", outcome)
    row = by_uid(outcome)["10001_100001"]
    counts = [row[f"files_{state}"] for state in ("used", "ignored", "failed")]
    assert (row["error_code"], counts) == ("unreadable", [0, 3, 1])


def test_picai_with_its_marksheet(tmp_path: Path) -> None:
    root = picai(tmp_path / "in")
    (root / "public_images_fold0" / "10002" / "10002_100002_adc.mha").unlink()
    assert detect_layout(root) == "picai"
    outcome = prepare(root, tmp_path / "c", labels=root / "marksheet.csv")
    check_invariants(root, tmp_path / "c", outcome)
    rows = by_uid(outcome)
    assert {uid: (row["label"], row["error_code"]) for uid, row in rows.items()} == {
        "10000_100000": (1, ""),
        "10001_100001": (0, ""),
        "10002_100002": ("", "no_diffusion"),
    }
    assert rows["10000_100000"]["files_ignored"] == 1  # the sagittal T2
    assert list(outcome.found.outside.values()) == ["not of the form patient_study_t2w, _adc or _hbv"]
    assert len({row["patient"] for row in rows.values()}) == 3


@pytest.mark.parametrize(
    "channels",
    [
        {"channel_names": {"0": "T2W", "1": "ADC", "2": "HBV"}},
        {"modality": {"0": "t2w", "1": "adc", "2": "DWI"}},
    ],
)
def test_nnunet_raw_with_both_kinds_of_dataset_json(tmp_path: Path, channels: dict[str, dict[str, str]]) -> None:
    root = tmp_path / "Dataset100_x"
    for number, part in enumerate(("imagesTr", "imagesTr", "imagesTs")):
        names = {
            "t2": f"case{number}_0000.nii.gz",
            "adc": f"case{number}_0001.nii.gz",
            "hbv": f"case{number}_0002.nii.gz",
        }
        image_exam(root / part, number, names)
    write_image(root / "labelsTr" / "case0.nii.gz", scans(0)[0].pixels)
    write_text(root / "dataset.json", channels)
    labels = write_text(tmp_path / "labels.csv", "case,label\ncase0,1\ncase1,0\ncase2,0\n")
    assert detect_layout(root) == "nnunet"
    outcome = prepare(root, tmp_path / "c", labels=labels)
    check_invariants(root, tmp_path / "c", outcome)
    assert {uid: (row["label"], row["side"]) for uid, row in by_uid(outcome).items()} == {
        "imagestr/case0": (1, "train"),
        "imagestr/case1": (0, "train"),
        "imagests/case2": (0, "test"),
    }
    assert sorted(outcome.found.outside.values()) == ["not an image of imagesTr or imagesTs"] * 2


def test_nnunet_with_channels_that_say_nothing(tmp_path: Path) -> None:
    image_exam(tmp_path / "imagesTr", 0, {"t2": "a_0000.nii.gz", "adc": "a_0001.nii.gz", "hbv": "a_0002.nii.gz"})
    write_text(tmp_path / "dataset.json", {"channel_names": {"0": "first", "1": "second", "2": "third"}})
    with pytest.raises(InputError, match="channels first, second, third are not recognised"):
        find_sources(tmp_path, CohortRules())
    rules = write_text(tmp_path / "rules.json", {"files": {"t2": "first", "adc": "second", "hbv": "third"}})
    (source,) = find_sources(tmp_path, load_cohort_rules(rules)).sources
    assert {name: Path(path).name for name, path in source.item.items()} == {
        "t2": "a_0000.nii.gz",
        "adc": "a_0001.nii.gz",
        "hbv": "a_0002.nii.gz",
    }
    write_text(tmp_path / "dataset.json", "{")
    with pytest.raises(InputError, match="no channel_names that can be read"):
        find_sources(tmp_path, CohortRules())


def test_dcm2niix_output_with_its_notes_and_b_values(tmp_path: Path) -> None:
    """Names by protocol; the ADC map is known by its note alone, and its .bval is not believed."""
    root = tmp_path / "in"
    folder = root / "pat1"
    found = {scan.number: scan.pixels for scan in scans(1)}
    write_image(folder / "4_axial_tse.nii.gz", found[4])
    write_image(folder / "9_map.nii.gz", found[8])
    write_text(folder / "9_map.json", {"SeriesDescription": "ep2d_diff", "ImageType": ["DERIVED", "ADC"]})
    write_text(folder / "9_map.bval", "800\n")
    volumes = []
    for number in (6, 7):
        image = sitk.GetImageFromArray(found[number].astype(np.float32))
        image.SetSpacing((2.0, 2.0, 3.0))
        volumes.append(image)
    sitk.WriteImage(sitk.JoinSeries(volumes), str(folder / "6_ep2d_diff.nii.gz"))
    write_text(folder / "6_ep2d_diff.bval", "50 800\n")
    write_text(folder / "6_ep2d_diff.bvec", "0 0\n0 0\n0 0\n")
    sagittal = sitk.GetImageFromArray(found[4].astype(np.float32))
    sagittal.SetDirection((0, 0, 1, 1, 0, 0, 0, 1, 0))
    sitk.WriteImage(sagittal, str(folder / "3_other_tse.nii.gz"))
    assert detect_layout(root) == "named"
    outcome = prepare(root, tmp_path / "c")
    check_invariants(root, tmp_path / "c", outcome)
    (row,) = outcome.rows
    assert (row["error_code"], row["b_values"], row["adc_source"]) == ("", "50 800", "given")
    (source,) = outcome.found.sources
    assert {Path(file).name: role for file, role in source.used.items()} == {
        "4_axial_tse.nii.gz": "t2",
        "9_map.nii.gz": "adc",
        "6_ep2d_diff.nii.gz": "dwi",
        "6_ep2d_diff.bval": "dwi",
    }
    assert source.ignored[folder / "3_other_tse.nii.gz"] == "T2, but not axial"


def test_named_files_per_folder_and_per_case(tmp_path: Path) -> None:
    names = {"t2": "t2.nii.gz", "adc": "adc.nii.gz", "hbv": "dwi.nii.gz", "gland": "t2_anatomy_reader1.nii.gz"}
    for number in range(2):
        image_exam(tmp_path / "folders" / "train" / f"02{number}", number, names)
    flat = {column: f"{{}}_{column}.nii.gz" for column in ("t2", "adc", "hbv")}
    for number in range(2):
        image_exam(tmp_path / "flat", number, {c: name.format(f"case{number}") for c, name in flat.items()})
    for root, uids in (("folders", {"train/020", "train/021"}), ("flat", {"case0", "case1"})):
        outcome = prepare(tmp_path / root, tmp_path / f"c_{root}")
        check_invariants(tmp_path / root, tmp_path / f"c_{root}", outcome)
        assert {uid: row["error_code"] for uid, row in by_uid(outcome).items()} == dict.fromkeys(uids, "")


def test_a_stray_image_leaves_the_cases_of_its_folder_apart(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for number in range(2):
        image_exam(root, number, {column: f"case{number}_{column}.nii.gz" for column in ("t2", "adc", "hbv")})
    for name in ("case1_lesion", "atlas"):
        write_image(root / f"{name}.nii.gz", scans(1)[0].pixels)
    found = find_sources(root, CohortRules())
    assert [(one.uid, len(one.used), len(one.ignored)) for one in found.sources] == [("case0", 3, 0), ("case1", 3, 1)]
    assert found.outside == {root / "atlas.nii.gz": "its name begins like no case of its folder"}


@pytest.mark.parametrize("layout", ["dicom", "named"])
def test_a_name_that_is_not_in_utf8_costs_its_study_at_most(tmp_path: Path, layout: str) -> None:
    """Latin-1 names of an old archive: ITK would end the process over one."""
    for number, name in enumerate((b"M\xfcller", b"plain"), 1):
        folder = tmp_path / "in" / os.fsdecode(name)
        if layout == "dicom":
            dicom_exam(folder, number)
        else:
            shutil.copytree(
                image_exam(tmp_path / f"made{number}", number, {c: f"{c}.nii.gz" for c in ("t2", "adc", "hbv")}), folder
            )
    outcome = prepare(tmp_path / "in", tmp_path / "c")
    failed = [row["error_text"] for row in outcome.rows if row["status"] == "failed"]
    assert [row["status"] == "failed" for row in outcome.rows].count(False) == (2 if layout == "dicom" else 1)
    assert layout == "dicom" or "not in UTF-8" in failed[0]


def test_a_file_that_may_not_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Mueller_Hans").write_bytes(b"")
    dicom_exam(tmp_path / "p", 1)
    opened = Path.open

    def refused(path: Path, *words: str, **more: str) -> object:
        if path.name == "Mueller_Hans":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *words, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refused)
    assert detect_layout(tmp_path) == "dicom"


@pytest.mark.parametrize("layout", ["named", "cases", "table", "picai"])
def test_voxels_apart_from_their_header_belong_to_the_image(tmp_path: Path, layout: str) -> None:
    """Two exams of .mhd with .raw: every file is used, and other voxels under the same header are prepared again."""
    root = order = tmp_path / "in"
    forms = {"cases": "case{}_{}.mhd", "picai": "1_{}_{}.mhd"}
    for number in range(2):
        kinds = {"t2": "t2w" if layout == "picai" else "t2", "adc": "adc", "hbv": "hbv"}
        names = {column: forms.get(layout, "{}_{}.mhd").format(number, kind) for column, kind in kinds.items()}
        image_exam(root / ("" if layout in forms else f"p{number}"), number, names)
    if layout == "table":
        lines = [f"p{n},{','.join(f'in/p{n}/{n}_{column}.mhd' for column in ('t2', 'adc', 'hbv'))}" for n in range(2)]
        order = write_text(tmp_path / "studies.csv", "\n".join(["study,t2,adc,hbv", *lines]))
    outcome = prepare(order, tmp_path / "c")
    check_invariants(order, tmp_path / "c", outcome)
    counts = [tuple(row[f"files_{state}"] for state in ("seen", "used", "ignored", "failed")) for row in outcome.rows]
    assert counts == [(6, 6, 0, 0)] * 2
    assert prepare(order, tmp_path / "c", resume=True).kept == 2
    (voxels,) = (file for file in root.rglob("*.raw") if "0_adc" in file.name)
    values = np.fromfile(voxels, np.float32)
    (values + 10).tofile(voxels)
    os.utime(voxels, ns=(0, 0))
    assert prepare(order, tmp_path / "c", resume=True).kept == 1


def test_a_table_of_paths_with_its_own_labels(tmp_path: Path) -> None:
    image_exam(tmp_path / "in", 0, {"t2": "a.mha", "adc": "b.nrrd", "hbv": "c.nii.gz"})
    dicom_exam(tmp_path / "dicom", 1)
    lines = [
        "Study;Patient;Label;Split;T2;ADC;HBV;DICOM",
        "A;X;1;train;in/a.mha;in/b.nrrd;in/c.nii.gz;",
        "B;Y;0;test;;;;dicom",
        "C;Z;0;test;in/gone.mha;in/b.nrrd;in/c.nii.gz;",
        "D;Z;0;test;in/a.mha;in/b.nrrd;;",
    ]
    table = write_text(tmp_path / "studies.csv", "\r\n".join(lines))
    outcome = prepare(table, tmp_path / "c")
    check_invariants(table, tmp_path / "c", outcome)
    rows = by_uid(outcome)
    assert {uid: (row["error_code"], row["label"], row["side"], row["files_failed"]) for uid, row in rows.items()} == {
        "A": ("", 1, "train", 0),
        "B": ("", 0, "test", 0),
        "C": ("missing_file", 0, "test", 1),
        "D": ("", 0, "test", 0),  # without high b
    }
    assert rows["C"]["patient"] == rows["D"]["patient"] != rows["A"]["patient"]


def test_two_studies_in_one_dicom_cell(tmp_path: Path) -> None:
    dicom_exam(tmp_path / "in" / "a", 1)
    dicom_exam(tmp_path / "in" / "b", 2)
    table = write_text(tmp_path / "studies.csv", "study,dicom\nA,in\n")
    outcome = prepare(table, tmp_path / "c")
    check_invariants(table, tmp_path / "c", outcome)
    (row,) = outcome.rows
    assert (row["error_code"], row["files_seen"]) == ("several_studies", 60)


def test_dicom_trees_with_several_studies_dicomdir_zip_and_foreign_files(tmp_path: Path) -> None:
    root = tmp_path / "in"
    dicom_exam(root / "A" / "2019", 0)
    dicom_exam(root / "A" / "2021", 1, patient="P0")
    shutil.copytree(root / "A" / "2019" / "s4", root / "A" / "copy_of_s4")
    write_text(root / "A" / "report.txt", "text")
    (root / "A" / "2019" / "more.zip").write_bytes(b"PK\x03\x04")
    outcome = prepare(root, tmp_path / "c")
    check_invariants(root, tmp_path / "c", outcome)
    assert len(outcome.rows) == 2
    assert len({row["patient"] for row in outcome.rows}) == 1
    records = [json.loads((tmp_path / "c" / row["study"] / "study.json").read_text()) for row in outcome.rows]
    reasons = {entry["reason"] for record in records for entry in record["files"]}
    assert {"copy of an image already seen", "not DICOM", "zip archive; unpack it first", "t2"} <= reasons


def test_dicom_wins_over_images_beside_it_and_a_layout_can_be_forced(tmp_path: Path) -> None:
    dicom_exam(tmp_path / "in", 0)
    write_image(tmp_path / "in" / "mask.nii.gz", scans(0)[0].pixels)
    assert detect_layout(tmp_path / "in") == "dicom"
    rules = load_cohort_rules(write_text(tmp_path / "rules.json", {"layout": "named"}))
    assert find_sources(tmp_path / "in", rules).layout == "named"
    with pytest.raises(InputError, match="cannot have the layout table"):
        find_sources(tmp_path / "in", load_cohort_rules(write_text(tmp_path / "r.json", {"layout": "table"})))


def test_no_study_at_all(tmp_path: Path) -> None:
    (tmp_path / "export.zip").write_bytes(b"PK\x03\x04")
    with pytest.raises(InputError, match=r"is an archive\. Unpack it"):
        find_sources(tmp_path / "export.zip", CohortRules())
    with pytest.raises(InputError, match="no such file or folder"):
        find_sources(tmp_path / "absent", CohortRules())
    write_text(tmp_path / "in" / "notes.txt", "x")
    with pytest.raises(InputError, match="no study found, read as layout picai"):
        find_sources(tmp_path / "in", CohortRules(layout="picai"))


def test_unreadable_images_and_pointers_have_their_own_error(tmp_path: Path) -> None:
    for name, content in (("p/t2.nii.gz", "version https://git-lfs.github.com/spec/v1\n"), ("u/t2.nii.gz", "x")):
        write_text(tmp_path / "in" / name, content)
    image_exam(tmp_path / "in" / "whole", 0, {"t2": "t2.nii", "adc": "adc.nii", "hbv": "hbv.nii"})
    outcome = prepare(tmp_path / "in", tmp_path / "c")
    check_invariants(tmp_path / "in", tmp_path / "c", outcome)
    assert {uid: row["error_code"] for uid, row in by_uid(outcome).items()} == {
        "p": "pointer",
        "u": "unreadable",
        "whole": "",
    }


def test_a_flat_picture_and_a_damaged_note_cost_no_other_file(tmp_path: Path) -> None:
    """A screenshot that is called T2 is none, and a note that is cut short says nothing."""
    folder = image_exam(tmp_path / "in" / "p", 0, {"t2": "axial_tse.nii.gz", "adc": "adc.nii.gz", "hbv": "hbv.nii.gz"})
    sitk.WriteImage(sitk.GetImageFromArray(np.ones((8, 8), np.uint8)), str(folder / "screen_tse.mha"))
    write_text(folder / "adc.json", '{"SeriesDescription": "t2_')
    (source,) = find_sources(tmp_path / "in", CohortRules()).sources
    assert {name: Path(path).name for name, path in source.item.items()} == {
        "t2": "axial_tse.nii.gz", "adc": "adc.nii.gz", "hbv": "hbv.nii.gz",
    }  # fmt: skip
    assert source.failed == {
        folder / "screen_tse.mha": "Column t2: an image of 8 x 8 voxels; three dimensions are needed, or four"
    }


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("t2", "t2"), ("ax_t2_tse", "t2"), ("t2_sag", "ignored"), ("t2_tumor_reader1", "ignored"), ("adc", "adc"),
        ("ep2d_diff_ADC", "adc"), ("dwi", "dwi"), ("ep2d_diff_CALC_BVAL", "hbv"), ("high_b", "hbv"), ("gland", "gland"),
        ("localizer", "ignored"), ("dce", "ignored"), ("t1_vibe", "ignored"), ("decor_t2", "t2"),
    ],
)  # fmt: skip
def test_roles_by_name(name: str, role: str) -> None:
    assert role_of(name, CohortRules().files) == role


def test_the_small_grid_holds_the_exams() -> None:
    """The fixtures' own check: most of the grid has data."""
    assert np.prod(SHAPE) * 12 > np.prod(GRID["size"]) * np.prod(GRID["spacing"])
