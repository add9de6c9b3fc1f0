"""Read back with highdicom, pydicom and dcmtk: none of them is asked what the writer thought."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import highdicom
import pydicom
import pytest
from pydicom.uid import EnhancedSRStorage

from mri_alm.errors import InputError
from mri_alm.imaging.dicom_files import StudyFiles, find_studies
from mri_alm.imaging.exam import read_study
from mri_alm.metrics.threshold import OperatingPoint, fixed_fn_threshold, neyman_pearson_threshold
from mri_alm.phantom.dicom import write_dicom_study
from mri_alm.phantom.study import make_study
from mri_alm.runtime.pseudonyms import pseudonymous_uid
from mri_alm.scoring.structured_report import SCHEME, structured_report

SALT = "a fixed secret"
ROW: dict[str, Any] = {
    "study": "0123456789abcdef", "logit": -0.4, "score": 0.4012345678901, "spread": 0.25, "threshold": 0.3,
    "dce_needed": 1, "warnings": "Two axial T2.", "quality": "meets", "model_note": "trained on synthetic exams",
}  # fmt: skip
POINT = fixed_fn_threshold([1, 1, 0, 0], [0.3, 0.6, 0.1, 0.4], 0)
CHECKPOINTS = {"split_0": "ab" * 32, "split_1": "cd" * 32}


@pytest.fixture(scope="module")
def exam(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyFiles, dict[str, Any]]:
    """A phantom whose headers carry an identity, and the facts that reading it gave."""
    folder = tmp_path_factory.mktemp("exam")
    write_dicom_study(make_study(0, 1, coarse=4), folder)
    for file in folder.rglob("*.dcm"):
        header = pydicom.dcmread(file)
        header.PatientName, header.PatientID, header.PatientBirthDate = "Doe^Jane", "MRN-4711", "19510203"
        header.StudyDate, header.AccessionNumber = "20190102", "ACC-1"
        header.save_as(file)
    files = find_studies(folder)[0]
    return files, read_study(files).info


def written(exam: tuple[StudyFiles, dict[str, Any]], path: Path, point: OperatingPoint = POINT, **row: Any) -> Path:
    report = structured_report(*exam[:1], ROW | row, exam[1], point=point, checkpoints=CHECKPOINTS, salt=SALT)
    report.save_as(path, enforce_file_format=True)
    return path


def items(dataset: pydicom.Dataset) -> list[pydicom.Dataset]:
    """Every content item below a dataset, in order."""
    found = []
    for item in dataset.get("ContentSequence", ()):
        found += [item, *items(item)]
    return found


def values(dataset: pydicom.Dataset) -> dict[str, Any]:
    """Numbers and codes of our own concepts by code value."""
    result: dict[str, Any] = {}
    for item in items(dataset):
        concept = item.get("ConceptNameCodeSequence")
        if concept and concept[0].CodingSchemeDesignator == SCHEME:
            if item.ValueType == "NUM":
                measured = item.MeasuredValueSequence[0]
                assert measured.MeasurementUnitsCodeSequence[0].CodeValue == "1"
                result[concept[0].CodeValue] = float(measured.NumericValue)
            else:
                result[concept[0].CodeValue] = item.ConceptCodeSequence[0].CodeMeaning
    return result


def test_measurements_and_finding_read_back(exam: tuple[StudyFiles, dict[str, Any]], tmp_path: Path) -> None:
    report = pydicom.dcmread(written(exam, tmp_path / "sr.dcm"))
    assert report.SOPClassUID == EnhancedSRStorage
    assert report.ContentTemplateSequence[0].TemplateIdentifier == "1500"
    assert values(report) == {
        "SCORE": pytest.approx(0.401235, abs=1e-6),
        "SPREAD": 0.25,
        "THRESHOLD": 0.3,
        "DCE_NEEDED": "Yes",
        "USE": "Research use only, no decision on a patient",
    }
    comments = [item.TextValue for item in items(report) if item.get("ValueType") == "TEXT"]
    assert any("Research use only. Not a medical device." in text for text in comments)
    assert POINT.in_words() in comments
    assert "Two axial T2." in comments
    assert "The model was trained on synthetic exams." in comments
    assert "Quality by headers and geometry: meets." in comments
    assert values(pydicom.dcmread(written(exam, tmp_path / "no.dcm", dce_needed=0)))["DCE_NEEDED"] == "No"


def test_highdicom_reads_it_as_a_measurement_report(exam: tuple[StudyFiles, dict[str, Any]], tmp_path: Path) -> None:
    report = highdicom.sr.srread(written(exam, tmp_path / "sr.dcm"))
    groups = report.content.get_image_measurement_groups()
    assert len(groups) == 1
    assert groups[0].finding_sites[0].value.meaning == "Prostate"
    observer = report.content.get_observer_contexts(observer_type=highdicom.sr.CodedConcept("121007", "DCM", "Device"))
    assert observer[0].observer_identifying_attributes.name == "mri-alm"
    version = highdicom.sr.utils.find_content_items(
        report, name=highdicom.sr.CodedConcept("111003", "DCM", "Algorithm Version"), recursive=True
    )
    assert [item.TextValue for item in version] == [report.SoftwareVersions]


def test_source_images_are_those_used_and_only_by_hash(exam: tuple[StudyFiles, dict[str, Any]], tmp_path: Path) -> None:
    files, _ = exam
    report = pydicom.dcmread(written(exam, tmp_path / "sr.dcm"))
    evidence = report.CurrentRequestedProcedureEvidenceSequence[0]
    used = {(h.SeriesInstanceUID, h.SOPInstanceUID) for h in files.headers if h.SeriesNumber in (2, 4, 5)}
    assert len(used) > 60  # T2, ADC, calculated b-value; neither localizer nor the acquired b-values
    referenced = {
        (series.SeriesInstanceUID, image.ReferencedSOPInstanceUID)
        for series in evidence.ReferencedSeriesSequence
        for image in series.ReferencedSOPSequence
    }
    assert referenced == {(pseudonymous_uid(s, SALT), pseudonymous_uid(i, SALT)) for s, i in used}
    in_tree = {
        item.ReferencedSOPSequence[0].ReferencedSOPInstanceUID for item in items(report) if item.ValueType == "IMAGE"
    }
    assert in_tree == {image for _, image in referenced}


def test_a_fitted_adc_refers_to_the_diffusion_images(exam: tuple[StudyFiles, dict[str, Any]], tmp_path: Path) -> None:
    files, facts = exam
    fitted = facts | {"adc": None}
    report = pydicom.dcmread(written((files, fitted), tmp_path / "sr.dcm"))
    used = {h.SeriesInstanceUID for h in files.headers if h.SeriesNumber in (2, 3, 5)}
    series = report.CurrentRequestedProcedureEvidenceSequence[0].ReferencedSeriesSequence
    assert {one.SeriesInstanceUID for one in series} == {pseudonymous_uid(uid, SALT) for uid in used}


def test_no_identity_is_in_the_file(exam: tuple[StudyFiles, dict[str, Any]], tmp_path: Path) -> None:
    path = written(exam, tmp_path / "sr.dcm")
    content = path.read_bytes()
    files, _ = exam
    uids = {str(h[name].value) for h in files.headers for name in ("StudyInstanceUID", "SOPInstanceUID")}
    for secret in ("Doe", "MRN-4711", "19510203", "20190102", "ACC-1", SALT, *uids):
        assert secret.encode() not in content
    report = pydicom.dcmread(path)
    assert (report.PatientID, str(report.PatientName)) == (ROW["study"], f"{ROW['study']}^")
    assert report.StudyInstanceUID == pseudonymous_uid(files.uid, SALT)
    assert (report.PatientIdentityRemoved, report.VerificationFlag) == ("YES", "UNVERIFIED")


def test_every_report_is_an_instance_of_its_own(exam: tuple[StudyFiles, dict[str, Any]], tmp_path: Path) -> None:
    one, other = (pydicom.dcmread(written(exam, tmp_path / name)) for name in ("1.dcm", "2.dcm"))
    assert one.SOPInstanceUID != other.SOPInstanceUID
    assert one.StudyInstanceUID == other.StudyInstanceUID


def test_examine_everyone_has_no_threshold(exam: tuple[StudyFiles, dict[str, Any]], tmp_path: Path) -> None:
    point = neyman_pearson_threshold([1, 1, 0], [0.3, 0.6, 0.1], 0.1, 0.1)
    report = pydicom.dcmread(written(exam, tmp_path / "sr.dcm", point, threshold=""))
    assert values(report).keys() == {"SCORE", "SPREAD", "DCE_NEEDED", "USE"}
    assert any("examine everyone" in item.get("TextValue", "") for item in items(report))


@pytest.mark.skipif(shutil.which("dsrdump") is None, reason="dcmtk's dsrdump is not installed")
@pytest.mark.parametrize("row", [{}, {"score": 1e-9, "spread": 0.1 + 0.2, "dce_needed": 0}])
def test_dcmtk_reads_it_without_a_complaint(
    exam: tuple[StudyFiles, dict[str, Any]], tmp_path: Path, row: dict[str, Any]
) -> None:
    path = written(exam, tmp_path / "sr.dcm", **row)
    done = subprocess.run(["dsrdump", "-Er", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Enhanced SR Document" in done.stdout
    needed = "No" if row else "Yes"
    assert f'<contains CODE:(,,"Contrast-enhanced series needed")=(,,"{needed}")>' in done.stdout.replace(
        'DCE_NEEDED,99MRIALM,"', ',,"'
    ).replace('373067005,SCT,"', ',,"').replace('373066001,SCT,"', ',,"')


def test_pseudonymous_uids() -> None:
    uid = pseudonymous_uid("1.2.3", SALT)
    assert pydicom.uid.UID(uid).is_valid
    assert uid == pseudonymous_uid("1.2.3", SALT)
    assert len({uid, pseudonymous_uid("1.2.4", SALT), pseudonymous_uid("1.2.3", "another secret")}) == 3


def test_without_highdicom_it_says_what_to_install(
    exam: tuple[StudyFiles, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mri_alm.scoring.structured_report.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"need the package highdicom: pip install -e '\.\[sr\]'\.$"):
        written(exam, tmp_path / "sr.dcm")
