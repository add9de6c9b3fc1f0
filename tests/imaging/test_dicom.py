"""Studies from DICOM: written files for every rule and refusal, real patients where ../shared is present."""

import functools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pydicom
import pytest
import SimpleITK as sitk  # noqa: N813
from dicom_writer import Scan, write

from mri_alm.errors import InputError, StudyError
from mri_alm.imaging.dicom_files import find_studies, with_headers
from mri_alm.imaging.exam import read_series, read_study
from mri_alm.imaging.series import check_rules, group_series, load_rules
from mri_alm.runtime.pseudonyms import study_key

SHARED = Path(__file__).parents[3] / "shared" / "data" / "prostate"
real = pytest.mark.skipif(not SHARED.exists(), reason="needs the public DICOM files of ../shared")

RNG = np.random.default_rng(0)
SIEMENS_B = (0x0019, 0x100C)
DIFFUSION = ("DERIVED", "PRIMARY", "DIFFUSION", "TRACEW")


def pixels(low, high):
    return RNG.integers(low, high, (6, 8, 10)).astype(np.uint16)


def diffusion(number, b, description="ep2d_diff", **changes):
    tag = {} if b is None else {SIEMENS_B: ("IS", str(b))}
    pixel = changes.pop("pixels", pixels(50, 900))
    return Scan(pixel, number, description, DIFFUSION, elements=tag | changes.pop("elements", {}), **changes)


T2 = Scan(pixels(0, 600), 4, "t2_tse_tra")
ADC = diffusion(8, 800, "ep2d_diff_ADC", pixels=pixels(800, 1600)).but(
    image_type=("DERIVED", "PRIMARY", "DIFFUSION", "ADC")
)
B50, B800 = diffusion(6, 50), diffusion(7, 800)
WHOLE = (T2, B50, B800, ADC)


def study_of(folder):
    (study,) = find_studies(folder)
    return read_study(study)


def roles(folder):
    (study,) = find_studies(folder)
    return [one.role for one in group_series(study.files, study.headers)]


def refusal(folder, match):
    with pytest.raises(StudyError, match=match) as error:
        study_of(folder)
    return error.value.code


def test_a_whole_study_is_read_and_every_file_accounted_for(tmp_path):
    write(tmp_path, *WHOLE, diffusion(9, 1600, "ep2d_diffCALC_BVAL"))
    (tmp_path / "notes.txt").write_text("no DICOM")
    study = study_of(tmp_path)
    assert sorted(study.dwi) == [50.0, 800.0]
    np.testing.assert_array_equal(sitk.GetArrayFromImage(study.dwi[50.0]), B50.pixels)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(study.adc), ADC.pixels)
    assert (study.info["hbv"]["b"], study.info["hbv"]["source"]) == (1600.0, "calculated by the scanner")
    assert (study.info["adc_source"], study.info["adc_units"]) == ("scanner", "1e-6 mm2/s")
    assert [study.info[f"files_{kind}"] for kind in ("seen", "used", "ignored", "failed")] == [31, 30, 1, 0]
    assert study.warnings == []
    json.dumps(study.info)


def test_physical_points_of_non_square_oblique_pixels_match_the_headers(tmp_path):
    write(tmp_path, *WHOLE)
    image = study_of(tmp_path).t2
    assert image.GetSpacing() == pytest.approx((1.5, 2.0, 3.0))  # not SliceThickness, which says 1 mm
    row, column = np.array(T2.orientation[:3]), np.array(T2.orientation[3:])
    for i, j, k in RNG.integers(0, (10, 8, 6), (50, 3)).tolist():
        expected = T2.origin + 1.5 * i * row + 2.0 * j * column + 3.0 * k * np.cross(row, column)
        np.testing.assert_allclose(image.TransformIndexToPhysicalPoint((i, j, k)), expected, atol=1e-4)
        assert image[i, j, k] == T2.pixels[k, j, i]


def test_slices_are_rescaled_each_by_its_own_slope(tmp_path):
    def slope(ds, index):
        ds.RescaleSlope, ds.RescaleIntercept = 1.0 + index, -5.0

    factor = 1.0 + np.arange(6).reshape(6, 1, 1)
    stored = (T2.pixels * 10 / factor).astype(np.uint16)
    write(tmp_path, T2.but(pixels=stored, edit=slope))
    (image,) = read_series(tmp_path).values()
    np.testing.assert_allclose(sitk.GetArrayFromImage(image), stored * factor - 5.0)


def test_one_series_with_several_b_values_is_split(tmp_path):
    low = diffusion(6, 0, elements={"series_tail": 6})
    high = diffusion(6, 1000, elements={"series_tail": 6})
    write(tmp_path / "a", low)

    def other_instance(ds, index):
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = f"1.2.7.6.{index + 50}"

    write(tmp_path / "b", high.but(edit=other_instance))
    volumes = read_series(tmp_path)
    assert sorted(volumes) == [0.0, 1000.0]
    np.testing.assert_array_equal(sitk.GetArrayFromImage(volumes[1000.0]), high.pixels)


def test_images_without_a_b_tag_beside_others_are_b_zero(tmp_path):
    def toshiba(ds, index):
        ds.ImageType = ["ORIGINAL", "PRIMARY"]
        if ds.InstanceNumber:
            ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = f"1.2.7.6.{index + 50}"
            ds.DiffusionBValue = 1500.0

    for part in (0, 1):
        write(tmp_path / str(part), diffusion(6, None, elements={"InstanceNumber": part}, edit=toshiba))
    assert sorted(read_series(tmp_path)) == [0.0, 1500.0]


def test_maps_appended_to_the_series_they_come_from_are_no_b_zero(tmp_path):
    """As Philips writes them: no b-value, the series' own number; the scanner's map is then taken as what it is."""

    def other_instance(ds, index):
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = f"1.2.7.6.{ds.InstanceNumber}{index}"

    def part(number, scan):
        write(
            tmp_path / str(number), scan.but(elements=scan.elements | {"InstanceNumber": number}, edit=other_instance)
        )

    write(tmp_path / "t2", T2)
    part(1, diffusion(6, 50))
    part(2, diffusion(6, 800))
    part(3, diffusion(6, None, pixels=ADC.pixels).but(image_type=ADC.image_type))
    study = study_of(tmp_path)
    assert (sorted(study.dwi), study.info["adc_source"]) == ([50.0, 800.0], "scanner")
    np.testing.assert_array_equal(sitk.GetArrayFromImage(study.adc), ADC.pixels)


def test_an_exponential_adc_is_no_adc(tmp_path):
    exponential = diffusion(9, None, "Exponential Apparent Diffusion Coefficient", pixels=pixels(200, 900))
    write(tmp_path, *WHOLE, exponential)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(study_of(tmp_path).adc), ADC.pixels)


def test_studies_that_number_their_images_alike_are_all_read(tmp_path):
    def numbered_anew(ds, index):
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = f"1.2.1.{ds.SeriesNumber}.{index}"

    for study in ("7", "8"):
        write(tmp_path / study, *(scan.but(edit=numbered_anew) for scan in WHOLE), study=study)
    assert [len(study.files) for study in find_studies(tmp_path)] == [24, 24]


def test_images_without_a_study_are_refused_not_merged(tmp_path):
    for patient in ("a", "b"):
        write(tmp_path / patient, *(scan.but(edit=lambda ds, _: ds.pop("StudyInstanceUID")) for scan in WHOLE))
    write(tmp_path / "c", *WHOLE)
    whole, first, second = find_studies(tmp_path)
    assert [len(study.files) for study in (first, second, whole)] == [0, 0, 24]
    with pytest.raises(StudyError, match="no StudyInstanceUID says which exam it is of"):
        read_study(second)


def test_adc_is_fitted_when_the_scanner_gave_none_and_scaled_when_it_did(tmp_path):
    signal = np.exp(-np.array([50, 800]) * 1e-3)[:, None, None, None] * np.full((6, 8, 10), 20000.0)
    noise = RNG.integers(0, 3, (6, 8, 10))
    write(
        tmp_path / "fit",
        T2,
        *(diffusion(6 + i, b, pixels=(signal[i] + noise).astype(np.uint16)) for i, b in enumerate((50, 800))),
    )
    fitted = study_of(tmp_path / "fit")
    assert fitted.info["adc_source"] == "fitted over b = 50, 800"
    np.testing.assert_allclose(sitk.GetArrayFromImage(fitted.adc), 1000.0, atol=2)
    write(tmp_path / "units", T2, B50, B800, ADC.but(elements={"RescaleSlope": 0.001, "RescaleIntercept": 0}))
    scaled = study_of(tmp_path / "units")
    assert scaled.info["adc_units"] == "1e-3 mm2/s"
    np.testing.assert_allclose(sitk.GetArrayFromImage(scaled.adc), ADC.pixels, rtol=1e-5)


def test_several_t2_take_the_latest_of_the_fullest_and_say_so(tmp_path):
    short = Scan(pixels(0, 600)[:5], 9, "t2_tse_tra")
    write(tmp_path, *WHOLE, Scan(pixels(0, 600), 5, "t2_tse_tra"), short)
    study = study_of(tmp_path)
    assert study.info["t2"]["series"] == 5
    assert study.warnings == ["Several axial T2: took series 5 (later), left 4, 9."]


def test_diffusion_of_another_echo_time_is_another_set(tmp_path):
    other = diffusion(11, 1400, elements={"EchoTime": 90.0})
    same = [scan.but(elements=scan.elements | {"EchoTime": 60.0}) for scan in (B50, B800)]
    write(tmp_path, T2, *same, other, ADC.but(elements={"EchoTime": 60.0}))
    study = study_of(tmp_path)
    assert sorted(study.dwi) == [50.0, 800.0]
    assert "Several diffusion protocols: took series 6 and its like, left 11." in study.warnings


def test_a_broken_series_is_passed_over_when_a_whole_one_serves(tmp_path):
    write(tmp_path, T2, B50, B800, ADC)
    write(tmp_path / "later", Scan(pixels(0, 600), 12, "t2_tse_tra").but(pixels=pixels(0, 600).repeat(2, 0)), skip=(5,))
    study = study_of(tmp_path)
    assert study.info["t2"]["series"] == 4
    assert any(re.search("series 12 left out: .*6.00 mm apart", warning) for warning in study.warnings)


def test_a_series_that_cannot_be_used_is_named(tmp_path):
    write(tmp_path, T2, B50, B800, ADC.but(edit=without("ImageOrientationPatient")))
    study = study_of(tmp_path)
    assert study.info["adc_source"].startswith("fitted")
    number = next(one["series"] for one in study.info["series"] if one["role"] == "unsupported")
    assert f"series {number} cannot be used (an image has no position or orientation): left out." in study.warnings


@pytest.mark.parametrize(
    ("scan", "role"),
    [
        (T2, "t2"),
        (Scan(pixels(0, 9), 1, "t1_tse_tra"), "other"),
        (Scan(pixels(0, 9), 1, "t2_loc sag"), "localizer"),
        (Scan(pixels(0, 9)[:3], 1, "t2_tse_tra"), "localizer"),
        (Scan(pixels(0, 9), 1, "FSE FATSAT"), "t2"),
        (Scan(pixels(0, 9), 1, "MDDW_FA", DIFFUSION), "fa"),
        (Scan(pixels(0, 9), 1, "ADC_high bvalue", (*DIFFUSION, "ADC")), "adc"),
        (diffusion(1, None, "eADC (10^-6 mm2/s)"), "other"),
        (Scan(pixels(0, 9), 1, "prostate ADC"), "adc"),
        (diffusion(1, 1400, "Synthetic b1400"), "calculated"),
        (Scan(pixels(0, 9), 1, "b800", elements={(0x0043, 0x1039): ("IS", [1000000800, 8, 0, 0])}), "dwi"),
        (Scan(pixels(0, 9), 1, "survey", elements={(0x2001, 0x1003): ("FL", 0.0)}), "localizer"),
        (diffusion(1, 800).but(image_type=(*DIFFUSION, "MOSAIC")), "unsupported"),
        (Scan(pixels(0, 9), 1, "t2", edit=lambda ds, _: ds.pop("ImagePositionPatient")), "unsupported"),
        (Scan(pixels(0, 9), 1, "perfusion"), "other"),
    ],
)
def test_roles(tmp_path, scan, role):
    assert roles(write(tmp_path, scan)) == [role]


def without(name):
    return lambda ds, _: ds.pop(name)


def set_all(**elements):
    return lambda ds, _: [setattr(ds, name, value) for name, value in elements.items()]


def same_place(ds, index):
    if index == 3:
        ds.ImagePositionPatient = list(T2.origin)


def tilt(ds, index):
    if index == 3:
        ds.ImageOrientationPatient = [1.0, 0.01, 0.0, 0.0, 0.8, -0.6]


def truncate(ds, index):
    if index == 2:
        ds.PixelData = ds.PixelData[:20]


@pytest.mark.parametrize(
    ("scans", "code", "match"),
    [
        ((B50, B800, ADC), "no_t2", "found none"),
        ((T2.but(orientation=(0.0, 1.0, 0.0, 0.0, 0.0, -1.0)), B50, B800), "no_t2", "only sagittal ones"),
        ((T2,), "no_diffusion", "No diffusion series with an image above b = 0"),
        ((T2, diffusion(6, None)), "b_unknown", "No b-value above 0 in the headers of series 6"),
        ((T2, B800.but(image_type=(*DIFFUSION, "MOSAIC"))), "mosaic", "slices tiled into one picture"),
        ((T2, B800), "adc_unfit", "needs two b-values"),
        (
            (T2.but(edit=set_all(FrameOfReferenceUID="1.9")), B50, B800, ADC),
            "frames_differ",
            "different frames of reference",
        ),
        ((T2, B800, ADC.but(pixels=pixels(6, 9))), "adc_units", "tissue median is"),
        ((T2.but(pixels=T2.pixels * 0), B50, B800, ADC), "empty_volume", "every voxel has the value 0"),
        ((T2.but(edit=same_place), B50, B800, ADC), "duplicate_slices", "1 slices share a position"),
        ((T2.but(edit=without("PixelSpacing")), B50, B800, ADC), "geometry", "6 of 6 images have no pixel spacing"),
        (
            (T2.but(edit=set_all(PhotometricInterpretation="MONOCHROME1")), B50, B800, ADC),
            "no_t2",
            r"found none; series 4 cannot be used \(MONOCHROME1",
        ),
        ((T2.but(edit=tilt), B50, B800, ADC), "geometry", r"differ between slices by 0\.01"),
        ((T2.but(edit=truncate), B50, B800, ADC), "damaged_file", "pixels of one file cannot be read"),
    ],
)
def test_refusals(tmp_path, scans, code, match):
    assert refusal(write(tmp_path, *scans), match) == code


def test_a_missing_slice_is_refused(tmp_path):
    write(tmp_path, B50, B800, ADC)
    write(tmp_path / "t2", T2, skip=(2,))
    assert refusal(tmp_path, r"slices 2 and 3 of 5 are 6\.00 mm apart, the others 3\.00 mm") == "slice_gap"


def test_direction_cosines_off_by_rounding_are_accepted(tmp_path):
    def wobble(ds, index):
        ds.ImageOrientationPatient = [1.0, index * 1e-8, 0.0, 0.0, 0.8, -0.6]

    assert study_of(write(tmp_path, T2.but(edit=wobble), B50, B800, ADC)).t2.GetSize() == (10, 8, 6)


def test_headers_that_are_not_de_identified_are_a_warning_only(tmp_path):
    study = study_of(write(tmp_path, T2.but(edit=set_all(PatientIdentityRemoved="NO")), B50, B800, ADC))
    assert study.warnings == ["Headers are not marked as de-identified; nothing identifying is copied from them."]


def test_no_identity_leaves_the_reader(tmp_path):
    secret = {
        "PatientName": "SECRET^NAME",
        "PatientID": "SECRETID",
        "AccessionNumber": "SECRETACC",
        "StudyDate": "19770707",
    }
    write(tmp_path, *(scan.but(edit=set_all(**secret)) for scan in WHOLE))
    (files,) = find_studies(tmp_path)
    study = read_study(files)
    everything = repr((files.headers, study.info, study.warnings))
    assert not re.search("SECRET|19770707", everything)
    assert files.uid not in json.dumps(study.info)


def test_copies_pointers_archives_and_damaged_files_have_a_reason(tmp_path):
    write(tmp_path / "p1", *WHOLE)
    first = next((tmp_path / "p1").iterdir())
    shutil.copy(first, tmp_path / "p1" / "zcopy")
    (tmp_path / "p1" / "cut").write_bytes(first.read_bytes()[:200])
    (tmp_path / "p1" / "a.zip").write_bytes(b"PK\x03\x04rest")
    (tmp_path / "p2").mkdir()
    (tmp_path / "p2" / "image.dcm").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    study, pointer = find_studies(tmp_path)
    assert sorted(study.failed.values()) == ["damaged DICOM (EOFError)", "zip archive; unpack it first"]
    assert list(study.ignored.values()) == ["copy of an image already seen"]
    assert read_study(study).info["files_failed"] == 2
    with pytest.raises(StudyError, match="Git LFS pointer") as error:
        read_study(pointer)
    assert error.value.code == "pointer"


@pytest.mark.parametrize("keep", [None, 0, 3])
def test_many_files_are_read_by_several_processes(tmp_path, monkeypatch, keep):
    for study in ("7", "8"):
        write(tmp_path / study, *WHOLE, study=study)
    shutil.copytree(tmp_path / "7", tmp_path / "copy")
    (tmp_path / "7" / "note").write_text("no image")
    (tmp_path / "8" / "cut").write_bytes(next((tmp_path / "8").iterdir()).read_bytes()[:200])
    alone = find_studies(tmp_path, keep=keep)
    monkeypatch.setattr("mri_alm.imaging.dicom_files.FILES_AT_ONCE", 5)
    monkeypatch.setattr("mri_alm.imaging.dicom_files.cpu_count", lambda: 2)
    with monkeypatch.context() as context:  # this process reads none
        context.setattr("mri_alm.imaging.dicom_files._read", None)
        together = find_studies(tmp_path, keep=keep)
    assert together == alone
    kept, images = (sum(len(getattr(study, of)) for study in together) for of in ("headers", "files"))
    assert kept == images if keep is None else kept <= keep
    assert [with_headers(study) for study in together] == [with_headers(study) for study in alone]


def test_files_without_preamble_and_studies_in_one_tree(tmp_path):
    write(tmp_path / "a", *WHOLE, study="7")
    write(tmp_path / "b", *WHOLE, study="8")
    for file in (tmp_path / "b").iterdir():
        file.write_bytes(file.read_bytes()[132:])
    first, second = find_studies(tmp_path)
    assert (first.uid, second.uid) == ("1.2.7", "1.2.8")
    assert read_study(second).t2.GetSize() == read_study(first).t2.GetSize()


def test_study_key_is_hidden_stable_and_salted():
    assert study_key("1.2.3", "salt") == study_key("1.2.3", "salt")
    assert re.fullmatch("[0-9a-f]{16}", study_key("1.2.3", "salt"))
    assert len({study_key("1.2.3", "salt"), study_key("1.2.3", "other"), study_key("1.2.4", "salt")}) == 3


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        find_studies(tmp_path / "absent")
    with pytest.raises(InputError, match="the folder is empty"):
        find_studies(tmp_path)
    with pytest.raises(InputError, match="holds 2 series"):
        read_series(write(tmp_path / "two", T2, B50))
    with pytest.raises(InputError, match="unknown condition 'colour'"):
        check_rules([{"role": "t2", "reason": "x", "any": {"colour": 1}}])
    with pytest.raises(InputError, match="not a list of series rules"):
        check_rules(["t2"])
    check_rules(load_rules())


def test_rules_can_be_replaced(tmp_path):
    extra = {"role": "t2", "reason": "house name", "all": {"description": "^axial high"}}
    write(tmp_path / "s", T2.but(description="Axial high resolution"), B50, B800, ADC)
    assert refusal(tmp_path / "s", "found none") == "no_t2"
    (files,) = find_studies(tmp_path / "s")
    series = group_series(files.files, files.headers, [extra, *load_rules()])
    assert read_study(files, series).info["t2"]["reason"] == "house name"


REAL = {  # patient -> T2 series, its slices, DWI series, b, ADC series, high-b series and its b, warnings
    "0000": (4, 19, [6], [50, 400, 800], 7, 8, 1000, None),
    "0001": (10, 19, [7], [50, 400, 800], 8, 9, 1000, "Several axial T2: took series 10"),
    "0218": (
        5,
        20,
        [8],
        [0, 100, 400, 800],
        9,
        10,
        1600,
        r"took series 8 and its like, left 17, 13|^series 11 cannot be used \(slices tiled into one picture",
    ),
}


@functools.cache
def patient_files(patient):
    (files,) = find_studies(SHARED / "prostatex" / f"ProstateX-{patient}")
    return files


@real
@pytest.mark.parametrize("patient", sorted(REAL))
def test_real_patients_choose_the_right_series_and_keep_physical_points(patient):
    t2, slices, dwi, b_values, adc, high, high_b, warning = REAL[patient]
    files = patient_files(patient)
    study = read_study(files)
    info = study.info
    assert (info["t2"]["series"], study.t2.GetSize()[2]) == (t2, slices)
    assert [one["series"] for one in info["dwi"]] == dwi
    assert list(study.dwi) == info["b_values"] == b_values
    assert (info["adc"]["series"], info["adc_units"]) == (adc, "1e-6 mm2/s")
    assert (info["hbv"]["series"], info["hbv"]["b"]) == (high, high_b)
    assert info["files_seen"] == info["files_used"] + info["files_ignored"] + info["files_failed"]
    assert [w for w in study.warnings if warning and re.search(warning, w)] == study.warnings
    assert len(study.warnings) == (warning.count("|") + 1 if warning else 0)
    for number, image in ((t2, study.t2), (adc, study.adc), (high, study.hbv)):
        sources = [f for f, h in zip(files.files, files.headers, strict=True) if h.SeriesNumber == number]
        check_points(sources, image)


def check_points(sources, image):
    """Random voxels found again by the physical point that their own slice's header gives them."""
    rng = np.random.default_rng(1)
    for file in rng.choice(sources, 10):
        ds = pydicom.dcmread(file)
        row, column = np.array(ds.ImageOrientationPatient, float).reshape(2, 3)
        for i, j in rng.integers(0, (ds.Columns, ds.Rows), (20, 2)).tolist():
            point = (
                np.array(ds.ImagePositionPatient, float)
                + i * ds.PixelSpacing[1] * row
                + j * ds.PixelSpacing[0] * column
            )
            index = image.TransformPhysicalPointToContinuousIndex(point.tolist())
            np.testing.assert_allclose(index, np.round(index), atol=2e-2)
            assert image[[int(v) for v in np.round(index)]] == ds.pixel_array[j, i]


@real
def test_real_roles_of_the_hard_patient():
    files = patient_files("0218")
    found = {one.number: one.role for one in group_series(files.files, files.headers)}
    expected = {2: "localizer", 3: "localizer", 5: "t2", 6: "t2", 7: "other", 8: "dwi", 9: "adc", 10: "calculated"}
    expected |= {
        11: "unsupported",
        12: "adc",
        13: "dwi",
        14: "fa",
        17: "dwi",
        18: "dwi",
        19: "dwi",
        21: "adc",
        27: "other",
        60: "other",
    }
    assert found == expected


@real
def test_real_refusals():
    with pytest.raises(StudyError, match=r"18 are 6\.00 mm apart") as gap:
        read_series(SHARED / "odd" / "missing_slice")
    with pytest.raises(StudyError, match="Git LFS pointer") as pointer:
        study_of(SHARED / "odd" / "lfs_pointers")
    mosaic = SHARED / "prostatex" / "ProstateX-0218" / "s11_MDDW_12dir_MOSAIC_2of65"
    with pytest.raises(StudyError, match="tiled into one picture") as tiles:
        read_series(mosaic)
    assert [error.value.code for error in (gap, pointer, tiles)] == ["slice_gap", "pointer", "mosaic"]


VENDORS = {
    "philips_achieva_2.5_private_b_only": {0.0, 1000.0},
    "ge_pioneer_29.1_dti": {0.0, 1000.0},
    "canon_galan_6.0_classic": {0.0, 1500.0},
    "toshiba_galan_5.0_b0_without_tag": {0.0, 1500.0},
    "siemens_xa30_enhanced/s10_dwi": {0.0, 2500.0},
}


@real
@pytest.mark.parametrize("vendor", sorted(VENDORS))
def test_real_b_values_of_other_vendors(vendor):
    (files,) = find_studies(SHARED / "vendor" / vendor)
    (series,) = group_series(files.files, files.headers)
    assert series.role == "dwi"
    assert set(series.b_values) <= VENDORS[vendor]
    assert max(series.b_values) == max(VENDORS[vendor])


@real
def test_real_enhanced_multi_frame_is_built_from_its_frames():
    volume = read_series(SHARED / "vendor" / "siemens_xa30_enhanced" / "s11_adc")[None]
    ds = pydicom.dcmread(next((SHARED / "vendor" / "siemens_xa30_enhanced" / "s11_adc").iterdir()))
    for number, groups in enumerate(ds.PerFrameFunctionalGroupsSequence):
        place = groups.PlanePositionSequence[0].ImagePositionPatient
        index = np.array(volume.TransformPhysicalPointToContinuousIndex([float(v) for v in place]))
        np.testing.assert_allclose(index, np.round(index), atol=1e-2)
        x, y, z = (int(v) for v in np.round(index))
        assert (x, y) == (0, 0)
        np.testing.assert_allclose(sitk.GetArrayFromImage(volume)[z], ds.pixel_array[number], rtol=1e-6)
