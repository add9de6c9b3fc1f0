"""What an exam's protocol is worth, and whether a model was trained on its like: by headers and geometry alone."""

import json
from pathlib import Path
from typing import Any

import pydicom
import pytest
from conftest import ROOT
from exams import prepare

from mri_alm.cohort.manifest import read_manifest
from mri_alm.cohort.overview import summary_text
from mri_alm.cohort.prepare_cohort import Order
from mri_alm.cohort.protocol import (
    check_protocol,
    measures,
    quality_counts,
    quality_of,
    told_facts,
    trained_in_words,
    training_note,
    training_protocol,
    unlike,
)
from mri_alm.errors import InputError
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.exam import load_images, read_study, study_images
from mri_alm.phantom.cohort import make_cohort, plan_cohort, write_cohort
from mri_alm.phantom.dicom import write_dicom_study
from mri_alm.phantom.study import make_study

GOOD: dict[str, Any] = {
    "vendor": "siemens", "model": "MAGNETOM Skyra", "field_strength": 2.89, "b_values": [50, 400, 800], "hbv_b": 1400,
    "t2_spacing_mm": [0.4, 0.6, 3.0000004], "t2_size": [400, 320, 20], "t2_thickness_mm": 3.0,
    "adc_spacing_mm": [2.0, 2.0, 3.0], "adc_size": [100, 90, 20],
}  # fmt: skip
PROSTATEX = ROOT.parent / "shared" / "data" / "prostate" / "prostatex"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "meets"),
        ({"field_strength": 15000}, "meets"),  # gauss
        ({"field_strength": 1.494}, "meets"),
        ({"field_strength": 0.0}, "meets, as far as known (not known: field strength)"),
        ({"hbv_b": 1000}, "below recommendation: highest b 1000 s/mm2 (at least 1400)"),
        ({"b_values": [0, 1400]}, "below recommendation: highest acquired b of at most 1000: 0 s/mm2 (at least 800)"),
        ({"b_values": [150, 800]}, "below recommendation: lowest acquired b 150 s/mm2 (at most 100)"),
        ({"t2_spacing_mm": [0.5, 0.5, 3.6]}, "below recommendation: distance of T2 slices 3.6 mm (at most 3); "
                                             "gap between T2 slices 0.6 mm (at most 0)"),
        ({"t2_acquired_mm": [0.5, 0.9]}, "below recommendation: T2 pixels as acquired 0.9 mm (at most 0.7)"),
        ({"t2_spacing_mm": [0.9, 0.5, 3.0]}, "below recommendation: T2 pixels 0.9 mm (at most 0.7)"),
        ({"t2_spacing_mm": [0.5, 1.1, 3.0]}, "below gate: T2 pixels 1.1 mm (at most 1)"),
        ({"t2_spacing_mm": [0.5, 0.5, 5.5], "t2_thickness_mm": None}, "below gate: distance of T2 slices 5.5 mm "
                                                                      "(at most 5)"),
        ({"t2_size": [100, 320, 20]}, "below gate: T2 field of view 40 mm (at least 64)"),
        ({"t2_size": [400, 320, 12]}, "below gate: height of the T2 slices together 36 mm (at least 43)"),
        ({"adc_spacing_mm": [3.5, 3.5, 3.0]}, "below gate: diffusion pixels 3.5 mm (at most 3.2)"),
        ({"adc_spacing_mm": [2.0, 2.0, 7.0]}, "below gate: distance of diffusion slices 7 mm (at most 6)"),
        ({"adc_size": [30, 100, 20]}, "below gate: diffusion field of view 60 mm (at least 64)"),
        ({"b_values": [0, 100, 300], "hbv_b": 1500}, "below gate: highest acquired b 300 s/mm2 (at least 400); "
                                                     "highest acquired b of at most 1000: 300 s/mm2 (at least 800)"),
        ({"field_strength": 0.55}, "below gate: field strength 0.55 T (at least 1.4)"),
        ({"field_strength": 7.0}, "below recommendation: field strength 7 T (at most 3.1)"),
        (dict.fromkeys(GOOD), "not known"),
    ],
)  # fmt: skip
def test_quality_names_what_fails_with_its_value_and_its_limit(change: dict[str, Any], text: str) -> None:
    assert str(quality_of(GOOD | change)) == text


def test_a_warning_says_what_follows() -> None:
    assert quality_of(GOOD).warnings == []
    (warning,) = quality_of(GOOD | {"hbv_b": 1000}).warnings
    assert warning == "Quality below recommendation: highest b 1000 s/mm2 (at least 1400)."
    (warning,) = quality_of(GOOD | {"field_strength": 0.35}).warnings
    assert warning.endswith("field strength 0.35 T (at least 1.4). DCE is asked for whatever the score.")
    levels = [str(quality_of(GOOD)), "below gate: x", "below gate: y", "not known", ""]
    assert quality_counts(levels) == "1 meets, 2 below gate, 2 not known"


def test_what_training_saw_is_kept_as_words_and_ranges() -> None:
    found = training_protocol([GOOD, GOOD | {"model": "Skyra", "hbv_b": 2000}, {"vendor": "mri-alm"}])
    assert (found["exams"], found["synthetic"]) == (3, 1)
    assert found["words"]["vendor"] == {"known": 3, "values": ["mri-alm", "siemens"]}
    assert found["words"]["model"] == {"known": 2, "values": ["skyra"]}
    assert found["words"]["field_strength"] == {"known": 2, "values": [3.0]}
    assert found["ranges"]["hbv_b"] == {"known": 2, "least": 1400, "most": 2000}
    assert found["ranges"]["t2_in_plane_mm"] == {"known": 2, "least": 0.6, "most": 0.6}
    assert found["quality"] == {"meets": 2, "not known": 1}
    assert training_note(found) == "trained partly on synthetic exams (1 of 3)"
    assert found["words"]["crop_about"] == {"known": 3, "values": ["T2's centre"]}
    words = (
        "scanner's make mri-alm, siemens; scanner type skyra; field strength 3 T; cropped about T2's centre; highest b "
    )
    assert f"{words}1400 to 2000 s/mm2" in trained_in_words(found)
    assert check_protocol(json.loads(json.dumps(found)), Path("x")) == found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, ""),
        ({"vendor": "ge"}, "scanner's make ge (trained on siemens)"),
        ({"model": "MAGNETOM Vida"}, "scanner type vida (trained on skyra)"),
        ({"field_strength": 1.5}, "field strength 1.5 T (trained on 3 T)"),
        ({"hbv_b": 1700}, ""),
        ({"hbv_b": 800}, "highest b 800 s/mm2 (trained on 1400 to 1500 s/mm2)"),
        ({"hbv_b": 2000}, "highest b 2000 s/mm2 (trained on 1400 to 1500 s/mm2)"),
        ({"t2_spacing_mm": [0.8, 0.8, 3]}, "T2 pixels 0.8 mm (trained on 0.6 mm)"),
        ({"t2_spacing_mm": [0.3, 0.3, 3]}, "T2 pixels 0.3 mm (trained on 0.6 mm)"),
        ({"adc_spacing_mm": [2, 2, 4]}, "distance of diffusion slices 4 mm (trained on 3 mm)"),
        ({"vendor": "", "model": None, "field_strength": None, "hbv_b": None, "b_values": None}, ""),
    ],
)
def test_an_exam_unlike_training_is_told_apart(change: dict[str, Any], text: str) -> None:
    trained = training_protocol([GOOD, GOOD | {"hbv_b": 1500}])
    expected = [f"Unlike what the model was trained on: {text}."] if text else []
    assert unlike(GOOD | change, trained) == expected


def test_nothing_is_unlike_what_is_not_known() -> None:
    few = training_protocol([GOOD, *[{"warnings": []}] * 3])  # one exam of four says what its scanner is
    other = GOOD | {"vendor": "ge", "hbv_b": 300}
    assert unlike(other, few) == unlike(other, None) == []
    assert trained_in_words(None) == "What this model was trained on is not recorded."
    assert training_note(None) == training_note(few) == ""


@pytest.mark.parametrize(
    "change",
    [{"exams": -1}, {"synthetic": "none"}, {"words": []}, {"ranges": {"hbv_b": {"least": "a", "most": 1, "known": 1}}},
     {"words": {"vendor": {"values": "siemens", "known": 3}}}, {"words": {"vendor": {"values": ["siemens"]}}}],
)  # fmt: skip
def test_a_damaged_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^p\.json is no record of what a model was trained on\. Restore it"):
        check_protocol(training_protocol([GOOD]) | change, Path("p.json"))


# --- Where the facts come from --------------------------------------------------------------------------------------


def coarse_exam(folder: Path, **elements: Any) -> Path:
    """A phantom as DICOM whose T2 has pixels of 2.4 to 3.2 mm, with more elements in every header."""
    write_dicom_study(make_study(0, 1, coarse=4), folder)
    for file in folder.rglob("*.dcm"):
        header = pydicom.dcmread(file)
        for name, value in elements.items():
            setattr(header, name, value)
        header.save_as(file)
    return folder


def test_headers_tell_thickness_and_matrix(tmp_path: Path) -> None:
    """Matrix (0018,1310): points along rows and columns as frequency, then the same as phase."""
    folder = coarse_exam(tmp_path / "in", SliceThickness=2.0, AcquisitionMatrix=[0, 40, 20, 0])
    _, facts = study_images(read_study(find_studies(folder)[0]))
    columns, rows, _ = facts["t2_size"]
    mm = facts["t2_spacing_mm"][0]
    assert facts["t2_thickness_mm"] == facts["adc_thickness_mm"] == 2.0
    assert facts["t2_acquired_mm"] == pytest.approx([rows * mm / 40, columns * mm / 20], abs=0.01)
    found = measures(facts)
    assert found["t2_gap_mm"] == pytest.approx(facts["t2_spacing_mm"][2] - 2.0)
    assert found["t2_acquired_mm"] == max(facts["t2_acquired_mm"])
    assert (found["hbv_b"], found["b_acquired"], found["vendor"]) == (2000.0, 800.0, "mri-alm")
    study = find_studies(folder)[0]
    for number, header in enumerate(study.headers):  # what tells nothing is left out
        header.AcquisitionMatrix = ([], [0, 0, 0, 0], [64, 0, 0, 0], None)[int(header.SeriesNumber) % 4]
        header.SliceThickness = None if number else "2"
    assert not {"t2_acquired_mm", "adc_acquired_mm", "t2_thickness_mm"} & read_study(study).info.keys()


def test_a_manifest_tells_what_files_do_not(tmp_path: Path) -> None:
    path = make_cohort(tmp_path / "phantom", train=2, test=2)
    text = path.read_text().replace("vendor\n", "vendor,field_strength,b_values,t2_spacing_mm\n")
    path.write_text(text.replace("mri-alm\n", "Doe GE Hospital,1.5,0 500,0.3 0.3 3.5\n"))
    images, facts = load_images(read_manifest(path)[0].item())
    assert facts["vendor"] == "mri-alm"  # the file itself says so, whatever a manifest says
    assert (facts["field_strength"], facts["b_values"], facts["t2_spacing_mm"]) == (1.5, [0.0, 500.0], [0.3, 0.3, 3.5])
    assert facts["t2_size"] is None  # the file's would not fit
    assert facts["adc_size"] == list(images["adc"].GetSize())


def test_folders_of_single_dicom_series_tell_the_scanner(tmp_path: Path) -> None:
    places = sorted(coarse_exam(tmp_path).iterdir())
    _, facts = load_images({"t2": str(places[1]), "adc": str(places[3]), "hbv": str(places[4])})
    assert (facts["vendor"], facts["field_strength"]) == ("mri-alm", 3.0)


def test_a_manifest_s_cell_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = make_cohort(tmp_path / "phantom", train=2, test=2)
    path.write_text(path.read_text().replace("vendor\n", "vendor,hbv_b\n").replace("mri-alm\n", "mri-alm,high\n"))
    with pytest.raises(InputError, match=r"row 2 \(study phantom_0000\) has a hbv_b that is not a number of 0 or more"):
        read_manifest(path)
    for cells in ({"t2_spacing_mm": "0.5 0.5"}, {"b_values": "-50 800"}, {"field_strength": "nan"}):
        assert told_facts(cells)[1], cells


@pytest.mark.parametrize("form", ["table", "named", "dicom"])
def test_phantoms_are_known_however_they_were_prepared(tmp_path: Path, form: str) -> None:
    """By the manifest's column, by the header of a NIfTI file alone, by the manufacturer of a DICOM header."""
    manifest = write_cohort(
        tmp_path / "phantom",
        plan_cohort(2, 2, 1, 0)[:1],
        lambda row: make_study(row.index, row.label, coarse=4),
        parameters={"form": "dicom" if form == "dicom" else "nifti"},
    )
    source = manifest if form == "table" else manifest.parent / "studies"
    outcome = prepare(source, tmp_path / "cohort", rules={"size": [16, 16, 8], "spacing": [6, 6, 8]})
    assert [row["vendor"] for row in outcome.rows] == ["mri-alm"]
    (study,) = read_manifest(tmp_path / "cohort" / "manifest.csv", labelled=False)
    _, facts = load_images(study.item())
    assert training_note(training_protocol([facts])) == "trained on synthetic exams"
    assert 2 < facts["t2_spacing_mm"][0] < 4  # of the exam, not of the grid


def test_a_prepared_exam_below_the_gate_says_so_in_its_column(tmp_path: Path) -> None:
    outcome = prepare(coarse_exam(tmp_path / "in"), tmp_path / "out", rules={"size": [16, 16, 8], "spacing": [6, 6, 8]})
    (row,) = outcome.rows
    assert row["quality"].startswith(f"below gate: T2 pixels {row['t2_spacing_mm'].split()[0]} mm (at most 1)")
    assert "quality by headers and geometry: 1 below gate." in summary_text(Order(tmp_path, tmp_path), outcome)


@pytest.mark.skipif(not PROSTATEX.is_dir(), reason="needs ../shared/data, which is not part of the repository")
@pytest.mark.slow
def test_real_exams_of_normal_quality_pass_the_gate() -> None:
    facts = [study_images(read_study(study))[1] for study in find_studies(PROSTATEX)]
    assert [str(quality_of(one)) for one in facts] == [
        *["below recommendation: highest b 1000 s/mm2 (at least 1400)"] * 2,
        "below recommendation: distance of T2 slices 3.6 mm (at most 3); gap between T2 slices 0.6 mm (at most 0)",
    ]
    assert [unlike(one, training_protocol(facts)) for one in facts] == [[], [], []]
