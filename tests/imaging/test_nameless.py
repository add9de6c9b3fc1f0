"""Roles without any description: the same choices as with one, from image type, b-values, geometry and content."""

import json
from pathlib import Path

import pytest

from mri_alm.errors import StudyError
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.exam import read_study
from mri_alm.imaging.plausibility import infer_roles_from_voxels
from mri_alm.imaging.series import group_series
from mri_alm.phantom.dicom import write_dicom_study
from mri_alm.phantom.study import make_study

SHARED = Path(__file__).parents[3] / "shared" / "data" / "prostate"
real = pytest.mark.skipif(not SHARED.exists(), reason="needs the public DICOM files of ../shared")
NAMES = ("SeriesDescription", "ProtocolName")


def strip(files, *words, b=()):
    """Take the names out of all headers, words out of their image types, and the b-values of some series."""
    for header in files.headers:
        for name in NAMES:
            header.pop(name, None)
        header.ImageType = [word for word in header.ImageType if word not in words]
        if header.SeriesNumber in b:
            for tag in ((0x0018, 0x9087), (0x0019, 0x100C)):
                header.pop(tag, None)
    return files


def choices(study):
    info = study.info
    return {
        "series": {name: info[name]["series"] for name in ("t2", "adc", "hbv")},
        "b": info["b_values"],
        "high": (info["hbv"]["b"], info["hbv"]["source"]),
        "dwi": [one["series"] for one in info["dwi"]],
        "roles": {one["series"]: one["role"] for one in info["series"]},
        "source": info["adc_source"],
    }


WORDS = [(), ("ADC", "TRACEW")]


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phantom")
    write_dicom_study(make_study(3, 1), folder)
    return folder


def compare(folder, words):
    (named,) = find_studies(folder)
    (nameless,) = find_studies(folder)
    assert choices(read_study(strip(nameless, *words))) == choices(read_study(named))


@pytest.mark.parametrize("words", WORDS, ids=["no names", "no words of the image type"])
def test_phantom_gives_the_same_choices(phantom, words):
    compare(phantom, words)


@real
@pytest.mark.parametrize("words", WORDS, ids=["no names", "no words of the image type"])
@pytest.mark.parametrize("patient", ["0000", "0001", "0218"])
def test_real_patients_give_the_same_choices(patient, words):
    compare(SHARED / "prostatex" / f"ProstateX-{patient}", words)


@real
@pytest.mark.parametrize("vendor", [path.name for path in sorted((SHARED / "vendor").glob("*"))])
def test_vendor_files_keep_their_roles(vendor):
    roles = []
    for change in (lambda files: files, strip):
        (files,) = find_studies(SHARED / "vendor" / vendor)
        series = group_series(files.files, change(files).headers)
        infer_roles_from_voxels(series)
        roles.append([one.role for one in series])
    assert roles[0] == roles[1]


def test_an_adc_map_without_any_sign_is_found_by_its_voxels(phantom):
    """Neither word, b-value nor the word DIFFUSION: without a look at it, its echo time would make it a T2."""
    (files,) = find_studies(phantom)
    strip(files, "ADC", "TRACEW", b=(4,))
    for header in files.headers:
        if header.SeriesNumber == 4:
            header.ImageType = ["DERIVED", "PRIMARY"]
    before = {one.number: one.role for one in group_series(files.files, files.headers)}
    assert before[4] == "t2"
    study = read_study(files)
    assert study.info["adc"]["series"] == 4
    assert "those of an ADC map" in study.info["adc"]["reason"]
    assert study.info["t2"]["series"] == 2


def test_adc_and_high_b_without_b_values_are_told_apart(phantom):
    """As in a public container: two maps, no word, no b. The ADC is found; a high b of unknown b is not guessed."""
    (files,) = find_studies(phantom)
    kept = [n for n, header in enumerate(files.headers) if header.SeriesNumber != 3]
    files.files, files.headers = [files.files[n] for n in kept], [files.headers[n] for n in kept]
    strip(files, "ADC", "TRACEW", b=(4, 5))
    series = group_series(files.files, files.headers)
    infer_roles_from_voxels(series)
    assert [one.role for one in series] == ["localizer", "t2", "adc", "dwi"]
    with pytest.raises(StudyError, match=r"No b-value above 0 in the headers of series 5.* high b as files"):
        read_study(files)


def test_names_are_trusted_where_they_are(phantom):
    """A description stops the look at the voxels, right or wrong; a rules file can say otherwise."""
    (files,) = find_studies(phantom)
    for header in files.headers:
        if header.SeriesNumber == 4:
            header.SeriesDescription, header.ImageType = "map", ["DERIVED", "PRIMARY"]
    series = group_series(files.files, files.headers)
    infer_roles_from_voxels(series)
    assert {one.number: one.role for one in series}[4] == "other"


def test_t2_by_echo_time_needs_no_gradient_echo_and_no_name(phantom):
    for change, role in (
        ({"ScanningSequence": "GR"}, "other"),
        ({"ScanningSequence": ["EP", "SE"]}, "other"),
        ({"EchoTime": 12.0}, "other"),
        ({}, "t2"),
    ):
        (files,) = find_studies(phantom)
        strip(files)
        for header in files.headers:
            for name, value in change.items():
                if header.SeriesNumber == 2:
                    setattr(header, name, value)
        roles = {one.number: one.role for one in group_series(files.files, files.headers)}
        assert roles[2] == role, json.dumps(change)
