"""Exports that gave wrong images without a word: the right numbers, or a refusal or warning that names the cause.

One test per kind; the kinds and what is done about each stand in docs/ingest.md.
"""

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from dicom_writer import Scan, add_private, header, write
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence
from pydicom.uid import DeflatedExplicitVRLittleEndian, SecondaryCaptureImageStorage, SegmentationStorage

from mri_alm.errors import StudyError
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.diffusion import b_value, shells
from mri_alm.imaging.exam import read_study, study_images
from mri_alm.imaging.registration import missing_high_b
from mri_alm.imaging.series import group_series, trust_positions

PLAIN = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
SLICES = 8
TRACE, MAP = ("DERIVED", "PRIMARY", "DIFFUSION", "TRACEW"), ("DERIVED", "PRIMARY", "DIFFUSION", "ADC")
FINE, COARSE = (1.0, 1.0, 3.0), (2.0, 2.0, 3.0)


def smooth(seed, size):
    noise = sitk.GetImageFromArray(np.random.default_rng(seed).normal(size=(SLICES, size, size)))
    unit = sitk.RescaleIntensity(sitk.SmoothingRecursiveGaussian(noise, 3.0), 0, 1)
    return sitk.GetArrayFromImage(unit)


UNIT = smooth(1, 24)
S0, ADC = 2500 + 1000 * UNIT, 800 + 500 * UNIT[:, ::-1] + 30 * np.arange(SLICES)[:, None, None]


def signal(b, adc=ADC):
    return np.round(S0 * np.exp(-b * 1e-6 * adc)).astype(np.uint16)


def scan(number, name, pixels, kind=("ORIGINAL", "PRIMARY", "M"), spacing=COARSE, **elements):
    x = -spacing[1] * (pixels.shape[2] - 1) / 2
    return Scan(np.asarray(pixels, np.uint16), number, name, kind, PLAIN, (x, x, 0.0), spacing, elements)


def dwi(number, b, pixels=None, name="ep2d_diff", kind=TRACE, **elements):
    found = scan(number, name, signal(b) if pixels is None else pixels, kind, EchoTime=70.0, **elements)
    return found.but(elements=found.elements | {(0x0019, 0x100C): ("IS", str(b))})


T2 = scan(4, "t2_tse_tra", 100 + 500 * smooth(2, 48), spacing=FINE, EchoTime=101.0)
LOW, HIGH = dwi(5, 50), dwi(6, 800)
MAP_SCAN = scan(20, "ep2d_diff_ADC", ADC, MAP, EchoTime=70.0)
WIDE = np.tile(100 + 500 * smooth(3, 32), (2, 1, 1))
PELVIS = scan(9, "t2_haste_tra_pelvis", WIDE, spacing=(6.0, 6.0, 6.0), EchoTime=90.0)
EXAM = (T2, LOW, HIGH, MAP_SCAN)


def read(folder, *scans, **options):
    """The exam of a folder with one study."""
    if scans:
        write(folder, *scans, **options)
    (study,) = find_studies(folder)
    return read_study(study)


def adc_of(exam):
    return sitk.GetArrayFromImage(exam.adc)


def refused(folder, *scans):
    with pytest.raises(StudyError) as error:
        read(folder, *scans)
    return error.value.code, error.value.message


# Identity


def test_two_patients_under_one_study_uid_stay_two_exams(tmp_path):
    for patient, factor in (("P1", 1.0), ("P2", 1.4)):
        scans = (
            T2,
            dwi(5, 50, signal(50, factor * ADC)),
            dwi(6, 800, signal(800, factor * ADC)),
            scan(20, "ADC", factor * ADC, MAP, EchoTime=70.0),
        )
        write(tmp_path / patient, *(one.but(elements=one.elements | {"PatientID": patient}) for one in scans))
    studies = find_studies(tmp_path)
    assert len({study.uid for study in studies}) == 2
    for study, factor in zip(studies, (1.0, 1.4), strict=True):
        exam = read_study(study)
        np.testing.assert_allclose(adc_of(exam), factor * ADC, atol=1)
        assert exam.warnings[0].startswith("Its StudyInstanceUID stands on images of 2 patients")
        assert "PatientID" not in study.headers[0]


def test_equal_instance_numbers_are_no_copies_unless_the_images_are(tmp_path):
    def repeated(ds, index):
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = f"1.2.5000.{index}"

    write(tmp_path, *(one.but(edit=repeated) for one in EXAM))
    write(tmp_path / "again", T2.but(edit=repeated))
    (study,) = find_studies(tmp_path)
    assert (len(study.files), len(study.ignored)) == (32, 8)
    exam = read_study(study)
    np.testing.assert_allclose(adc_of(exam), ADC, atol=1)
    assert "Different images carry one SOPInstanceUID: each was read." in exam.warnings


@pytest.mark.parametrize("uid", [None, "1.2.7.1"], ids=["no series UID", "one series UID for all"])
def test_series_are_told_apart_without_their_uid(tmp_path, uid):
    def edit(ds, _):
        if uid:
            ds.SeriesInstanceUID = uid
        else:
            del ds.SeriesInstanceUID

    sagittal = T2.but(number=3, description="t2_tse_sag", orientation=(0.0, 1.0, 0.0, 0.0, 0.0, -1.0))
    exam = read(tmp_path, *(one.but(edit=edit) for one in (*EXAM, sagittal)))
    assert exam.info["t2"]["series"] == 4
    np.testing.assert_allclose(adc_of(exam), ADC, atol=1)


# What may be a T2, an ADC map, diffusion


def sop_class(uid, modality):
    def edit(ds, _):
        ds.file_meta.MediaStorageSOPClassUID = ds.SOPClassUID = uid
        ds.Modality = modality

    return edit


@pytest.mark.parametrize("other", [
    T2.but(number=9, edit=sop_class(SegmentationStorage, "SEG")),
    T2.but(number=9, edit=sop_class(SecondaryCaptureImageStorage, "MR")),
    T2.but(number=9, edit=sop_class("1.2.840.10008.5.1.4.1.1.4", "PT")),
    T2.but(number=9, description="AxT1 FSE", elements={"EchoTime": 12.0}),
    T2.but(number=9, description="Ax FSE", elements={"EchoTime": 12.0}),
    T2.but(number=9, description="t2_star_tra", elements={"EchoTime": 60.0}),
    T2.but(number=9, description="T2 map", elements={"EchoTime": 80.0}),
    T2.but(number=9, description="t2_tse_dixon_tra_F"),
    T2.but(number=9, description="t2_tse_dixon_tra_opp"),
    T2.but(number=9, elements={"ScanningSequence": "GR", "EchoTime": 80.0}),
    T2.but(number=9, description="t2_tse_tra_SUB"),
    scan(9, "T2 weighted trace", signal(0), ("DERIVED", "SECONDARY", "PROCESSED"), EchoTime=101.0),
    T2.but(number=9, image_type=("DERIVED", "SECONDARY", "MPR")),
    T2.but(number=9, description="t2_tse_fs_tra"),
    PELVIS,
], ids=lambda one: f"{one.description} {one.elements.get('EchoTime', '')}")  # fmt: skip
def test_what_is_no_t2_is_never_taken_for_one(tmp_path, other):
    late = other.but(elements=other.elements | {"AcquisitionTime": "130000"})
    exam = read(tmp_path, *EXAM, late)
    assert exam.info["t2"]["series"] == 4
    reason = next(one["reason"] for one in exam.info["series"] if one["series"] == 9)
    assert reason


@pytest.mark.parametrize("name", ["T2W_TSE_ax", "AX T2 W", "t2_tse_tra_part1", "T2 SPACE", "t2_tse_fat_sat_tra"])
def test_common_names_of_t2_are_known(tmp_path, name):
    assert read(tmp_path, T2.but(description=name), *EXAM[1:]).info["t2"]["series"] == 4


def test_two_equally_good_t2_are_not_guessed_from(tmp_path):
    twin = T2.but(number=7, pixels=T2.pixels[:, ::-1].copy(), elements=T2.elements | {"AcquisitionTime": "120400"})
    code, message = refused(tmp_path, *EXAM, twin)
    assert code == "several_t2"
    assert "under studies in the rules file" in message


@pytest.mark.parametrize("dates", [("20200101", "20200102"), (None, None)])
def test_a_repeat_after_midnight_is_the_later_one(tmp_path, dates):
    def at(time, date):
        return {"AcquisitionTime": time} | ({"AcquisitionDate": date} if date else {})

    rest = [one.but(elements=one.elements | at("000900", dates[1])) for one in EXAM[1:]]
    first = T2.but(elements=T2.elements | at("235200", dates[0]))
    repeat = T2.but(number=7, elements=T2.elements | at("000700", dates[1]))
    exam = read(tmp_path, first, repeat, *rest)
    assert exam.info["t2"]["series"] == 7
    assert "Several axial T2: took series 7 (later), left 4." in exam.warnings


@pytest.mark.parametrize("name", ["Average DC", "Apparent Diffusion Coefficient (mm2/s)", "dADC", "Avg DC", "DC map"])
def test_vendors_names_of_adc_maps(tmp_path, name):
    def ge(ds, _):
        add_private(ds, (0x0043, 0x1039), "IS", [1000, 8, 0, 0])

    derived = scan(50, name, ADC, ("DERIVED", "SECONDARY", "PROCESSED"), EchoTime=70.0).but(edit=ge)
    isotropic = dwi(51, 800, kind=("DERIVED", "SECONDARY", "PROCESSED"), name="Isotropic image")
    exam = read(tmp_path, T2, LOW, HIGH, derived, isotropic)
    assert (exam.info["adc"]["series"], exam.info["hbv"]["series"]) == (50, 6)
    assert exam.info["b_values"] == [50.0, 800.0]


@pytest.mark.parametrize(
    "name",
    ["cDWI b1500", "calc_BVAL_1500", "synthetic b1500", "Computed DWI", "sDWI 1500", "DWI extrapolated", "vb1500"],
)
def test_calculated_images_do_not_count_in_the_fit(tmp_path, name):
    computed = signal(1500)
    computed[computed < np.percentile(computed, 40)] = 0  # vendors blank what is noise
    exam = read(tmp_path, T2, LOW, HIGH, dwi(30, 1500, computed, name))
    assert exam.info["hbv"] == {
        "series": 30, "role": "calculated", "reason": "diffusion whose name says calculated", "files": SLICES,
        "b": 1500.0, "source": "calculated by the scanner",
    }  # fmt: skip
    np.testing.assert_allclose(adc_of(exam), ADC, atol=4)


# Geometry before arithmetic


@pytest.mark.parametrize("together", [True, False], ids=["one series", "two series"])
def test_slices_are_paired_by_position_never_by_number(tmp_path, together):
    tail = {"series_tail": 5, "SeriesNumber": 5} if together else {}
    write(tmp_path, T2)
    for name, one, gone in (("low", LOW, 0), ("high", HIGH, SLICES - 1)):
        edited = one.but(
            elements=one.elements | tail,
            edit=lambda ds, index, name=name: setattr(ds, "SOPInstanceUID", f"1.2.{len(name)}.{index}"),
        )
        write(tmp_path / name, edited, skip=(gone,))
    exam = read(tmp_path)
    np.testing.assert_allclose(adc_of(exam), ADC[1:-1], atol=4)
    assert exam.adc.GetOrigin()[2] == pytest.approx(3.0)
    assert [text for text in exam.warnings if text.startswith("Slices differ")] == [
        "Slices differ (b = 50 has 7, b = 800 has 7): only the 6 that all have are used."
    ]


def test_series_shifted_sideways_are_not_one_grid(tmp_path):
    code, message = refused(tmp_path, T2, LOW, HIGH.but(origin=(-13.0, -23.0, 0.0)))
    assert (code, "two b-values" in message) == ("adc_unfit", True)


def test_one_odd_image_does_not_cost_the_series(tmp_path):
    write(tmp_path, *EXAM)
    for one in (T2, MAP_SCAN):
        ds = header(one, 0, "7")
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = f"1.2.7.{one.number}.99"
        ds.ImageOrientationPatient, ds.ImagePositionPatient = [0, 1, 0, 0, 0, -1], [0, -20, 20]
        ds.save_as(tmp_path / f"scout_{one.number}.dcm", enforce_file_format=True)
    exam = read(tmp_path)
    assert (exam.info["t2"]["series"], exam.info["adc"]["series"]) == (4, 20)
    for number in (4, 20):
        assert f"Series {number}: 1 of 9 images have another orientation or size and were left out." in exam.warnings
    assert exam.info["files_used"] == 4 * SLICES


def test_a_frame_of_reference_for_each_series_needs_a_rule(tmp_path):
    own = [one.but(edit=lambda ds, _: setattr(ds, "FrameOfReferenceUID", ds.SeriesInstanceUID)) for one in EXAM]
    code, message = refused(tmp_path, *own)
    assert code == "frames_differ"
    assert '"trust_positions": true' in message
    (study,) = find_studies(tmp_path)
    series = group_series(study.files, study.headers)
    trust_positions(series)
    exam = read_study(study, series)
    np.testing.assert_allclose(adc_of(exam), ADC, atol=1)
    assert [text for text in exam.warnings if "Frames of reference are not compared" in text]


@pytest.mark.parametrize(("blank", "code"), [(3, "empty_slice"), (0, None)])
def test_slices_without_signal_are_no_slices(tmp_path, blank, code):
    pixels = ADC.copy()
    pixels[blank] = 0
    scans = (T2, HIGH, MAP_SCAN.but(pixels=pixels.astype(np.uint16)))
    if code:
        assert refused(tmp_path, *scans)[0] == code
    else:
        exam = read(tmp_path, *scans)
        np.testing.assert_allclose(adc_of(exam), ADC[1:], atol=1)
        assert "Slices differ (the ADC map has 7, b = 800 has 8): only the 7 that all have are used." in exam.warnings


def test_slice_locations_that_contradict_positions_are_refused(tmp_path):
    def exchanged(ds, index):
        ds.SliceLocation = 3.0 * {2: 5, 5: 2}.get(index, index)

    assert refused(tmp_path, T2.but(edit=exchanged), *EXAM[1:])[0] == "geometry"


# Plausibility


def test_a_map_that_lost_its_scale_is_replaced_by_the_fit(tmp_path):
    exam = read(tmp_path, T2, dwi(5, 0), dwi(6, 50), dwi(7, 800), MAP_SCAN.but(pixels=(ADC / 0.4).astype(np.uint16)))
    np.testing.assert_allclose(adc_of(exam), ADC, atol=4)
    assert exam.info["b_values"] == [0.0, 50.0, 800.0]
    (text,) = [text for text in exam.warnings if "contradicts" in text]
    assert text.startswith("series 20 contradicts its own images (median 2.5 times the fitted one's")


def test_an_image_that_lost_its_scale_leaves_the_map(tmp_path):
    exam = read(tmp_path, T2, LOW, dwi(6, 800, signal(800) // 3), MAP_SCAN)
    np.testing.assert_allclose(adc_of(exam), ADC, atol=1)
    assert [text for text in exam.warnings if "the map is used, as the fit is the less likely one" in text]


@pytest.mark.parametrize("with_map", [True, False])
def test_exchanged_b_values_are_refused(tmp_path, with_map):
    scans = (T2, dwi(5, 800, signal(50)), dwi(6, 50, signal(800)), *((MAP_SCAN,) if with_map else ()))
    code, message = refused(tmp_path, *scans)
    assert code == "b_implausible"
    assert "the signal at b = 800 is 2." in message


def test_b_values_that_contradict_the_map_are_named(tmp_path):
    exam = read(tmp_path, T2, dwi(5, 25, signal(50)), dwi(6, 400, signal(800)), MAP_SCAN)
    np.testing.assert_allclose(adc_of(exam), ADC, atol=1)
    assert [text for text in exam.warnings if "series 20 contradicts its own images (median 0.5 times" in text]


def test_slices_in_reverse_order_are_noticed(tmp_path):
    def located(sign):
        return lambda ds, index: setattr(ds, "SliceLocation", sign * 3.0 * index)

    turned = HIGH.but(pixels=HIGH.pixels[::-1].copy(), edit=located(-1))
    code, message = refused(tmp_path, T2, LOW.but(edit=located(1)), turned)
    assert code == "geometry"
    assert "slice locations rise with the positions in one series and fall in another" in message


def test_a_pelvic_t2_alone_is_called_coarse(tmp_path):
    (text,) = [text for text in read(tmp_path, PELVIS, *EXAM[1:]).warnings if "coarse" in text]
    assert text == "series 9 is coarse for a T2 of the prostate: 6.0 mm pixels, 6.0 mm slices."


@pytest.mark.parametrize("units", ["mm2/s", None])
def test_the_scale_of_a_real_world_value_mapping_counts(tmp_path, units):
    def mapped(ds, _):
        item = Dataset()
        item.RealWorldValueSlope, item.RealWorldValueIntercept = 0.5e-6, 100e-6
        if units:
            unit = Dataset()
            unit.CodeValue = units
            item.MeasurementUnitsCodeSequence = Sequence([unit])
            ds.RescaleSlope, ds.RescaleIntercept = 1.0, 0.0  # for display
        ds.RealWorldValueMappingSequence = Sequence([item])

    exam = read(tmp_path, T2, LOW, HIGH, MAP_SCAN.but(pixels=((ADC - 100) * 2).astype(np.uint16), edit=mapped))
    assert (exam.info["adc_source"], exam.info["adc_units"]) == ("scanner", "mm2/s")
    np.testing.assert_allclose(adc_of(exam), ADC, atol=1)


def test_directions_of_nearly_equal_b_are_one_shell(tmp_path):
    axes = {795: ((1.0, 0.0, 0.0), 1.3), 800: ((0.0, 1.0, 0.0), 1.0), 805: ((0.0, 0.0, 1.0), 0.7)}
    tail = {"series_tail": 5, "SeriesNumber": 5}
    write(tmp_path, T2, dwi(5, 0), MAP_SCAN)
    for b, (axis, scale) in axes.items():
        one = dwi(5, b, signal(b, scale * ADC)).but(
            edit=lambda ds, index, b=b, axis=axis: (
                add_private(ds, (0x0019, 0x100E), "FD", list(axis)),
                setattr(ds, "SOPInstanceUID", f"1.2.7.{b}.{index}"),
            )
        )
        write(tmp_path / str(b), one.but(elements=one.elements | tail))
    exam = read(tmp_path)
    assert exam.info["b_values"] == [0.0, 800.0]
    np.testing.assert_allclose(sitk.GetArrayFromImage(exam.hbv), signal(800), rtol=3e-3)


def test_shells():
    assert shells([0, 5, 50, 795, 800, 805, 1400]) == {
        0: 0.0, 5: 0.0, 50: 50.0, 795: 800.0, 800: 800.0, 805: 800.0, 1400: 1400.0
    }  # fmt: skip
    assert shells([0, 10, 20, 30, 100, 1000, 1050]) == {b: float(b) for b in (0, 10, 20, 30, 100, 1000, 1050)}


def test_volumes_of_one_b_that_are_no_repeats_are_refused(tmp_path):
    code, message = refused(tmp_path, T2, LOW, HIGH, dwi(9, 800, ADC, "ep2d_diff"))
    assert code == "volumes_differ"
    assert "b = 800 in series 6 and series 9" in message


def test_repeats_of_one_b_that_resemble_one_another_little_are_named(tmp_path):
    """One is upside down: too like to be refused, less like than repeats of one exam are."""
    exam = read(tmp_path / "turned", T2, LOW, HIGH, dwi(9, 800, HIGH.pixels[:, ::-1], "ep2d_diff"))
    (warning,) = [one for one in exam.warnings if "resemble one another little" in one]
    assert warning.startswith("b = 800 in series 6 and series 9: its 2 repeats or directions")
    exam = read(tmp_path / "sound", T2, LOW, HIGH, dwi(9, 800, HIGH.pixels, "ep2d_diff"))
    assert not any("resemble" in one for one in exam.warnings)


def test_repeats_in_one_series_that_resemble_one_another_little_are_named(tmp_path):
    def again(ds, index):
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = f"1.2.7.99.{index + 1}"

    write(tmp_path / "first", T2, LOW, HIGH)
    write(tmp_path / "second", HIGH.but(pixels=HIGH.pixels[:, ::-1], edit=again))
    (warning,) = [one for one in read(tmp_path).warnings if "resemble" in one]
    assert warning.startswith("series 6 at b = 800: its 2 repeats or directions resemble one another little")


@pytest.mark.parametrize("number", [5, 7], ids=["before", "after"])
def test_b_zero_in_a_series_of_its_own_counts(tmp_path, number):
    exam = read(tmp_path, T2, dwi(number, 0), dwi(6, 1000))
    assert exam.info["b_values"] == [0.0, 1000.0]
    np.testing.assert_allclose(adc_of(exam), ADC, atol=4)


def test_slices_of_another_scale_than_their_neighbours_are_refused(tmp_path):
    def scaled(ds, index):
        ds.RescaleSlope, ds.RescaleIntercept = 2.5 if index == 3 else 1.0, 0.0

    scans = (T2, HIGH, MAP_SCAN.but(edit=scaled))
    code, message = refused(tmp_path, *scans)
    assert code == "scale_jump"
    assert "slice 4 of 8 has a rescale slope of 2.5" in message


def test_a_hole_of_zeros_in_an_acquired_image_is_named(tmp_path):
    pixels = HIGH.pixels.copy()
    pixels[2:6, 8:14, 8:14] = 0
    exam = read(tmp_path, T2, LOW, HIGH.but(pixels=pixels), MAP_SCAN)
    (text,) = [text for text in exam.warnings if "exactly 0 amid signal" in text]
    assert text.startswith("series 5 and its like: 2 ml of the image at b = 800")


def test_inverted_images_are_no_measurements(tmp_path):
    inverted = T2.but(elements=T2.elements | {"PhotometricInterpretation": "MONOCHROME1"})
    assert refused(tmp_path, inverted, *EXAM[1:])[0] == "no_t2"


def test_an_adc_map_alone_is_an_exam_without_high_b(tmp_path):
    exam = read(tmp_path, T2, MAP_SCAN)
    np.testing.assert_allclose(adc_of(exam), ADC, atol=1)
    images, facts = study_images(exam)
    assert (exam.hbv, exam.info["adc_source"]) == (None, "scanner")
    assert missing_high_b(images, facts) == "The exam has no high-b image"


# Where b is kept


def moved(owner="SIEMENS MR HEADER"):
    ds = Dataset()
    ds.add_new((0x0019, 0x0010), "LO", "ACME PACS 1.0")
    ds.add_new((0x0019, 0x100C), "LO", "7")
    ds.add_new((0x0019, 0x0011), "LO", owner)
    ds.add_new((0x0019, 0x110C), "IS", "800")
    return ds


def named(name):
    ds = Dataset()
    ds.SequenceName = name
    return ds


@pytest.mark.parametrize(("ds", "b"), [
    (moved(), 800.0),
    (moved("ACME PACS 2.0"), None),
    (named("*ep_b800t"), 800.0),
    (named("ep_b1400#3"), 1400.0),
    (named("ep_b0"), 0.0),
    (named("*ep_b50_800"), None),
    (named("*tse2d1_25"), None),
])  # fmt: skip
def test_private_elements_count_through_their_creator_and_names_by_their_end(ds, b):
    assert b_value(ds) == b


def test_an_element_without_its_creator_is_no_b_value():
    ds = Dataset()
    ds.add_new((0x0019, 0x100C), "IS", "800")
    assert b_value(ds) is None


# Files


def test_deflated_files_are_read_and_bombs_are_not(tmp_path):
    def deflated(ds, _):
        ds.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian

    exam = read(tmp_path, *(one.but(edit=deflated) for one in EXAM))
    np.testing.assert_allclose(adc_of(exam), ADC, atol=1)


def test_a_compression_that_no_extra_decodes_names_no_extra(tmp_path):
    def htj2k(ds, _):
        from pydicom.encaps import encapsulate

        ds.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.4.201"
        ds.PixelData = encapsulate([b"\xff\x4f\xff\x51" + bytes(200)])
        ds["PixelData"].VR = "OB"

    code, message = refused(tmp_path, *(one.but(edit=htj2k) for one in EXAM))
    assert code == "no_decoder"
    assert "export it uncompressed, or as JPEG 2000" in message
    assert "pip" not in message


def test_pixels_that_use_more_bits_than_the_header_says(tmp_path):
    """pydicom cuts the other bits off: an ADC of 1100 was 76."""
    found = MAP_SCAN.but(elements=MAP_SCAN.elements | {"BitsStored": 10, "HighBit": 9})
    code, message = refused(tmp_path, T2, found, HIGH)
    assert code == "bits_unfit"
    assert "says that a pixel has 10 bits, and its pixels have more" in message


@pytest.mark.parametrize("elements", [{}, {(0x6000, 0x0102): ("US", 12)}])
def test_bits_that_are_not_used_may_hold_an_overlay(tmp_path, elements):
    bits = {"BitsStored": 11, "HighBit": 10}
    pixels = MAP_SCAN.pixels + np.uint16(4096 if elements else 0)
    exam = read(tmp_path, T2, MAP_SCAN.but(pixels=pixels, elements=MAP_SCAN.elements | bits | elements), HIGH)
    np.testing.assert_allclose(adc_of(exam), ADC, atol=1)


def test_a_repeated_sign_is_no_further_bit(tmp_path):
    signed = {"BitsStored": 12, "HighBit": 11, "PixelRepresentation": 1}
    pixels = MAP_SCAN.pixels.astype(np.int16)
    pixels[:, :2] = -5
    folder = write(tmp_path, T2, HIGH, MAP_SCAN.but(pixels=pixels.view(np.uint16), elements=MAP_SCAN.elements | signed))
    exam = read(folder)
    assert (adc_of(exam)[:, :2] <= 0).all()
    np.testing.assert_allclose(adc_of(exam)[:, 2:], ADC[:, 2:], atol=1)
