"""The traps of other readers, each with the test that shows it does not catch ours; those not tested elsewhere here."""

import ast
import shutil
from pathlib import Path

import numpy as np
import pydicom
import pytest
import SimpleITK as sitk  # noqa: N813
from dicom_writer import Scan, compress, write, write_enhanced

from mri_alm.errors import StudyError
from mri_alm.imaging import volume
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.exam import read_series, read_study
from mri_alm.imaging.image_file import read_image

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "data" / "prostate"
real = pytest.mark.skipif(not SHARED.exists(), reason="needs the public DICOM files of ../shared")

# What went wrong elsewhere, where it was reported -> the tests, as module::function.
TRAPS = {
    "GE adds 1e9 to b on multi-b scans (dcm2niix 602, 149)": [
        "test_diffusion::test_b_value_of_each_vendor",
        "test_traps::test_ge_offset_in_a_whole_study",
    ],
    "a trace without directions is read as b = 0 (dcm2niix 690, 405, 270)": [
        "test_traps::test_a_trace_without_directions_keeps_its_b"
    ],
    "images without a b tag are b = 0, beside others only (Toshiba, GE)": [
        "test_dicom::test_images_without_a_b_tag_beside_others_are_b_zero",
        "test_dicom::test_real_b_values_of_other_vendors",
    ],
    "b = 0 on a series that is no diffusion (Philips)": ["test_dicom::test_roles"],
    "XA trace without .bval (dcm2niix 657)": ["test_traps::test_enhanced_frames_out_of_order"],
    "the b tag of an ADC map is misleading": [
        "test_dicom::test_real_patients_choose_the_right_series_and_keep_physical_points"
    ],
    "a .bval beside an ADC map": ["test_traps::test_a_bval_beside_an_adc_map_is_ignored"],
    "slope per slice (Philips, dcm2niix 363)": ["test_dicom::test_slices_are_rescaled_each_by_its_own_slope"],
    "identity affine on multi-frame (MONAI 8468)": [
        "test_dicom::test_real_enhanced_multi_frame_is_built_from_its_frames",
        "test_traps::test_enhanced_frames_out_of_order",
    ],
    "LPS and RAS flipped (MONAI 8467)": ["test_transforms::test_round_trip_keeps_voxels_and_physical_points"],
    "a missing slice is only warned of (ITK 441, 1607)": [
        "test_dicom::test_a_missing_slice_is_refused",
        "test_dicom::test_real_refusals",
    ],
    "slice distance from the thickness (BRAINSTools 334)": [
        "test_dicom::test_physical_points_of_non_square_oblique_pixels_match_the_headers"
    ],
    "localizer slices in the T2 folder (picai_prep 39)": ["test_traps::test_localizer_slices_in_the_t2_folder"],
    "enhanced frames out of order (dcm2niix 839)": ["test_traps::test_enhanced_frames_out_of_order"],
    "direction cosines equal only to 1e-8 (nnU-Net 1287), and off by 1e-2": [
        "test_dicom::test_direction_cosines_off_by_rounding_are_accepted",
        "test_dicom::test_refusals",
    ],
    "JPEG 2000 (pydicom 1061)": [
        "test_traps::test_jpeg_2000_is_read_voxel_by_voxel",
        "test_traps::test_real_jpeg_2000",
        "test_traps::test_a_missing_decoder_names_the_extra",
    ],
    "three b-values in one folder stacked (ITK, MONAI)": ["test_dicom::test_one_series_with_several_b_values_is_split"],
    "volumes of other directions stacked or refused": [
        "test_traps::test_directions_are_averaged_geometrically",
        "test_traps::test_complete_repeats_are_averaged_geometrically",
        "test_traps::test_each_direction_counts_alike_however_often_it_was_repeated",
        "test_traps::test_a_trace_beside_its_directions_is_taken_alone",
        "test_traps::test_real_directions_of_ge_and_canon",
    ],
    "non-square pixels": ["test_dicom::test_physical_points_of_non_square_oblique_pixels_match_the_headers"],
    "ADC in units of 0.001": ["test_dicom::test_adc_is_fitted_when_the_scanner_gave_none_and_scaled_when_it_did"],
    "ADC on another grid than the diffusion": ["test_traps::test_an_adc_map_on_another_grid_is_not_taken"],
    "duplicate slices": [
        "test_dicom::test_refusals",
        "test_traps::test_incomplete_repeats_and_mixed_types_are_refused",
        "test_traps::test_duplicate_slices_are_refused_where_they_are_needed",
        "test_traps::test_duplicate_slices_that_nothing_needs_cost_their_b_only",
    ],
    "empty volumes": ["test_dicom::test_refusals", "test_traps::test_files_of_no_bytes_are_counted"],
    "mosaic": ["test_dicom::test_refusals", "test_dicom::test_real_refusals"],
    "two echoes in one folder": ["test_dicom::test_diffusion_of_another_echo_time_is_another_set"],
    "Git LFS pointers, zip archives": [
        "test_dicom::test_copies_pointers_archives_and_damaged_files_have_a_reason",
        "test_dicom::test_real_refusals",
    ],
    "DICOMDIR": ["test_traps::test_a_dicomdir_is_ignored"],
    "failed studies lost in silence (picai_prep)": [
        "test_dicom::test_copies_pointers_archives_and_damaged_files_have_a_reason"
    ],
    "no T2, no diffusion, b unknown, frames of reference differ, ADC units": ["test_dicom::test_refusals"],
    "several T2": ["test_dicom::test_several_t2_take_the_latest_of_the_fullest_and_say_so"],
    "not de-identified": ["test_dicom::test_headers_that_are_not_de_identified_are_a_warning_only"],
    "ADC and high-b exchanged": ["test_content::test_exchanged_maps_of_a_manifest_are_refused"],
    "readers quote values and paths in their warnings": ["test_traps::test_damaged_headers_print_nothing"],
}

RNG = np.random.default_rng(3)
TRACE, MAP = ("DERIVED", "PRIMARY", "DIFFUSION", "TRACEW"), ("DERIVED", "PRIMARY", "DIFFUSION", "ADC")


def signal(low, high):
    return RNG.integers(low, high, (6, 8, 10)).astype(np.uint16)


T2 = Scan(signal(0, 600), 4, "t2_tse_tra")
LOW = Scan(signal(500, 900), 6, "ep2d", TRACE, elements={"DiffusionBValue": 50.0})
HIGH = Scan(signal(50, 300), 7, "ep2d", TRACE, elements={"DiffusionBValue": 800.0})
ADC = Scan(signal(800, 1600), 8, "ep2d_ADC", MAP)


def read_only(folder):
    (files,) = find_studies(folder)
    return read_study(files)


def test_every_trap_has_its_tests():
    functions = {
        f"{path.stem}::{node.name}"
        for path in HERE.parent.rglob("test_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    named = {name for names in TRAPS.values() for name in names}
    assert named <= functions, sorted(named - functions)
    here = {name for name in functions if name.startswith("test_traps::test_")}
    assert here - named == {"test_traps::test_every_trap_has_its_tests"}


def test_ge_offset_in_a_whole_study(tmp_path):
    def ge(b):
        return {(0x0043, 0x1039): ("IS", [1000000000 + b, 8, 0, 0])}

    original = ("ORIGINAL", "PRIMARY", "OTHER")
    write(tmp_path, T2, *(scan.but(image_type=original, elements=ge(b)) for scan, b in ((LOW, 50), (HIGH, 800))), ADC)
    study = read_only(tmp_path)
    assert list(study.dwi) == [50.0, 800.0]
    np.testing.assert_array_equal(sitk.GetArrayFromImage(study.hbv), HIGH.pixels)


def test_a_trace_without_directions_keeps_its_b(tmp_path):
    def isotropic(ds, index):
        ds.DiffusionDirectionality = "ISOTROPIC"
        ds.DiffusionGradientOrientation = [0.0, 0.0, 0.0]

    write(tmp_path, HIGH.but(edit=isotropic))
    assert list(read_series(tmp_path)) == [800.0]


def test_enhanced_frames_out_of_order(tmp_path):
    """Frames of two b-values shuffled over one file: right b, right places, right voxels."""
    write_enhanced(tmp_path / "dwi", LOW, HIGH, order=np.random.default_rng(0).permutation(12).tolist())
    volumes = read_series(tmp_path)
    assert list(volumes) == [50.0, 800.0]
    row, column = np.array(LOW.orientation[:3]), np.array(LOW.orientation[3:])
    for scan, image in zip((LOW, HIGH), volumes.values(), strict=True):
        np.testing.assert_array_equal(sitk.GetArrayFromImage(image), scan.pixels)
        far = scan.origin + 9 * 1.5 * row + 7 * 2.0 * column + 5 * 3.0 * np.cross(row, column)
        np.testing.assert_allclose(image.TransformIndexToPhysicalPoint((9, 7, 5)), far, atol=1e-4)


def test_a_bval_beside_an_adc_map_is_ignored(tmp_path):
    """dcm2niix writes one; the loader must not take the map for diffusion."""
    write(tmp_path, T2, LOW, HIGH, ADC)
    (tmp_path / "adc.bval").write_text("800\n")
    study = read_only(tmp_path)
    assert study.info["adc"]["series"] == 8
    assert study.info["files_ignored"] == 1


def test_localizer_slices_in_the_t2_folder(tmp_path):
    planes = [(1, 0, 0, 0, 0, -1), (0, 1, 0, 0, 0, -1), (1, 0, 0, 0, 1, 0)]
    scouts = [
        Scan(signal(0, 600)[:2], 1, "t2_tse_tra", orientation=plane, elements={"series_tail": 30 + n})
        for n, plane in enumerate(planes)
    ]
    write(tmp_path, T2, *scouts, LOW, HIGH, ADC)
    study = read_only(tmp_path)
    assert study.info["t2"]["series"] == 4
    np.testing.assert_array_equal(sitk.GetArrayFromImage(study.t2), T2.pixels)


def test_jpeg_2000_is_read_voxel_by_voxel(tmp_path):
    write(tmp_path, T2, LOW, HIGH, ADC)
    compress(tmp_path)
    file = next(tmp_path.iterdir())
    assert pydicom.dcmread(file).file_meta.TransferSyntaxUID.name.startswith("JPEG 2000")
    study = read_only(tmp_path)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(study.t2), T2.pixels)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(study.adc), ADC.pixels)


@real
def test_real_jpeg_2000(tmp_path):
    """The one public slice, twice at two positions, against ITK's own JPEG 2000 decoder."""
    pytest.importorskip("gdcm", reason="needs python-gdcm, the extra dicom-compressed")
    (source,) = (SHARED / "odd" / "jpeg2000").iterdir()
    shutil.copy(source, tmp_path / "1")
    ds = pydicom.dcmread(source)
    ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    row, column = np.array(ds.ImageOrientationPatient, float).reshape(2, 3)
    place = np.array(ds.ImagePositionPatient, float) + 5 * np.cross(row, column)
    ds.ImagePositionPatient = [f"{v:.6f}" for v in place]
    ds.save_as(tmp_path / "2")
    (image,) = read_series(tmp_path).values()
    expected = sitk.GetArrayFromImage(sitk.ReadImage(str(source)))[0]
    np.testing.assert_allclose(sitk.GetArrayFromImage(image), np.stack([expected, expected]), rtol=1e-6)


def test_a_missing_decoder_names_the_extra(tmp_path, monkeypatch):
    class Missing:
        is_available = False
        missing_dependencies = ("gdcm - requires gdcm>=3.0.10",)

    write(tmp_path, T2, LOW, HIGH, ADC)
    compress(tmp_path)
    monkeypatch.setattr(volume, "get_decoder", lambda _: Missing)
    with pytest.raises(StudyError, match=r"compressed \(JPEG 2000.*pip install -e '\.\[dicom-compressed\]'") as error:
        read_only(tmp_path)
    assert error.value.code == "no_decoder"


AXES = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def along(axis, number, pixels):
    """One direction of the same series at b = 800."""

    def edit(ds, index):
        ds.DiffusionGradientOrientation = list(axis)
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = f"1.2.7.7.{number}.{index + 1}"

    return HIGH.but(pixels=pixels, edit=edit)


def again(ds, index):
    ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = f"1.2.7.99.{index + 1}"


def test_directions_are_averaged_geometrically(tmp_path):
    """Anisotropic tissue: the fitted ADC is the mean diffusivity, which an arithmetic mean would miss by 12 %."""
    rates = (600.0, 1200.0, 2400.0)
    still = RNG.uniform(20000, 30000, (6, 8, 10))
    write(tmp_path / "base", T2, LOW.but(pixels=(still * np.exp(-50e-6 * np.mean(rates))).astype(np.uint16)))
    for number, (axis, rate) in enumerate(zip(AXES, rates, strict=True)):
        write(tmp_path / f"{number}", along(axis, number, (still * np.exp(-800e-6 * rate)).astype(np.uint16)))
    study = read_only(tmp_path)
    assert study.info["directions"] == {"50": 1, "800": 3}
    np.testing.assert_allclose(sitk.GetArrayFromImage(study.adc), np.mean(rates), rtol=1e-3)
    arithmetic = -np.log(np.mean(np.exp(-800e-6 * np.array(rates)))) / 800e-6
    assert arithmetic < 0.9 * np.mean(rates)


def test_a_trace_beside_its_directions_is_taken_alone(tmp_path):
    trace = along((0.0, 0.0, 0.0), 9, HIGH.pixels)
    for number, axis in enumerate(AXES):
        write(tmp_path / f"{number}", along(axis, number, signal(50, 300)))
    write(tmp_path / "trace", trace)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(read_series(tmp_path)[800.0]), HIGH.pixels)


@pytest.mark.parametrize("axis", [AXES[0], (0.0, 0.0, 0.0)])
def test_complete_repeats_are_averaged_geometrically(tmp_path, axis):
    """The single averages of a scan (NEX), in one direction or with none told."""
    repeats = [signal(50, 300) for _ in range(3)]
    for number, pixels in enumerate(repeats):
        write(tmp_path / f"{number}", along(axis, number, pixels))
    mean = np.exp(np.mean(np.log(repeats), axis=0))
    np.testing.assert_allclose(sitk.GetArrayFromImage(read_series(tmp_path)[800.0]), mean, rtol=1e-5)


def test_each_direction_counts_alike_however_often_it_was_repeated(tmp_path):
    once, *twice = [signal(50, 300) for _ in range(3)]
    for number, (axis, pixels) in enumerate(zip((0, 1, 1), (once, *twice), strict=True)):
        write(tmp_path / f"{number}", along(AXES[axis], number, pixels))
    mean = np.sqrt(once * np.sqrt(twice[0] * 1.0 * twice[1]))
    np.testing.assert_allclose(sitk.GetArrayFromImage(read_series(tmp_path)[800.0]), mean, rtol=1e-5)


@pytest.mark.parametrize(
    ("missing", "image_type", "code", "match"),
    [
        ((2, 3, 4, 5), TRACE, "duplicate_slices", "2 slices share a position"),
        ((), MAP, "several_series", "2 series, echoes or kinds of map"),
    ],
)
def test_incomplete_repeats_and_mixed_types_are_refused(tmp_path, missing, image_type, code, match):
    write(tmp_path / "0", along(AXES[0], 0, signal(50, 300)))
    write(tmp_path / "1", along(AXES[0], 1, signal(50, 300)).but(image_type=image_type), skip=missing)
    with pytest.raises(StudyError, match=match) as error:
        read_series(tmp_path)
    assert error.value.code == code


@pytest.mark.parametrize(("twice", "others"), [(LOW, (HIGH,)), (HIGH, (LOW, ADC))])
def test_duplicate_slices_are_refused_where_they_are_needed(tmp_path, twice, others):
    write(tmp_path, T2, twice, *others)
    write(tmp_path / "again", twice.but(edit=again), skip=(0, 2, 3, 4, 5))
    with pytest.raises(StudyError, match="1 slices share a position") as error:
        read_only(tmp_path)
    assert error.value.code == "duplicate_slices"


def test_duplicate_slices_that_nothing_needs_cost_their_b_only(tmp_path):
    write(tmp_path, T2, LOW, HIGH, ADC)
    write(tmp_path / "again", LOW.but(edit=again), skip=(0, 2, 3, 4, 5))
    study = read_only(tmp_path)
    assert (study.info["b_values"], study.info["directions"]) == ([800.0], {"800": 1})
    np.testing.assert_array_equal(sitk.GetArrayFromImage(study.adc), ADC.pixels)
    (warning,) = study.warnings
    assert warning.startswith(
        "b = 50 left out, as the ADC map and b = 800 do without: series 6 at b = 50: 1 slices share"
    )


@real
def test_real_directions_of_ge_and_canon():
    """GE: two directions at b = 1000, averaged. Canon: the second direction lacks a slice, and that is said."""
    folder = SHARED / "vendor" / "ge_pioneer_29.1_dti"
    image = read_series(folder)[1000.0]
    files = [pydicom.dcmread(file) for file in sorted(folder.iterdir())]
    weighted = [ds for ds in files if int(str(ds[0x0043, 0x1039].value[0])) % 10**9 == 1000]
    assert len(weighted) == 4
    for z, place in enumerate(sorted({float(ds.ImagePositionPatient[2]) for ds in weighted})):
        pair = [ds.pixel_array.astype(float) for ds in weighted if float(ds.ImagePositionPatient[2]) == place]
        inside = (pair[0] > 0) & (pair[1] > 0)
        mean = np.sqrt(pair[0] * pair[1])[inside]
        np.testing.assert_allclose(sitk.GetArrayFromImage(image)[z][inside], mean, rtol=1e-5)
    with pytest.raises(StudyError, match="direction 2 has 1 slices"):
        read_series(SHARED / "vendor" / "canon_galan_6.0_classic")


def test_an_adc_map_on_another_grid_is_not_taken(tmp_path):
    write(tmp_path, T2, LOW, HIGH, ADC.but(spacing=(1.0, 0.75, 3.0)))
    study = read_only(tmp_path)
    assert study.info["adc_source"] == "fitted over b = 50, 800"
    assert study.warnings == ["series 8 is an ADC map on another grid or echo time: left out."]


def test_a_dicomdir_is_ignored(tmp_path):
    write(tmp_path, T2, LOW, HIGH, ADC)
    ds = pydicom.Dataset()
    ds.file_meta = pydicom.dataset.FileMetaDataset()
    ds.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.1.3.10"
    ds.file_meta.MediaStorageSOPInstanceUID = "1.2.3.4"
    ds.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    ds.save_as(tmp_path / "DICOMDIR", enforce_file_format=True)
    (files,) = find_studies(tmp_path)
    assert files.ignored == {tmp_path / "DICOMDIR": "DICOMDIR"}
    assert read_study(files).info["files_seen"] == 25


def test_files_of_no_bytes_are_counted(tmp_path):
    write(tmp_path, T2, LOW, HIGH, ADC)
    (tmp_path / "empty.dcm").touch()
    info = read_only(tmp_path).info
    assert (info["files_seen"], info["files_used"], info["files_ignored"]) == (25, 24, 1)


def test_damaged_headers_print_nothing(tmp_path, capfd, recwarn, caplog):
    """pydicom warns with the value it did not understand, and with the file's path."""
    write(tmp_path / "SECRET", T2.but(edit=lambda ds, _: ds.pop("SOPClassUID")), LOW, HIGH, ADC)
    for file in (tmp_path / "SECRET").iterdir():
        file.write_bytes(file.read_bytes().replace(b"1.2.7.999", b"SECRET.99"))
    compress(tmp_path / "SECRET")
    for file in sorted((tmp_path / "SECRET").iterdir())[:6]:
        file.write_bytes(file.read_bytes()[:-20])
    (tmp_path / "SECRET" / "cut.nii").write_bytes(b"\x5c\x01\0\0" + b"\xff" * 400)
    with pytest.raises(StudyError, match="the pixels of one file cannot be read") as refused:
        read_only(tmp_path)
    with pytest.raises(StudyError, match="is no image that can be read") as unread:
        read_image(tmp_path / "SECRET" / "cut.nii", "t2")
    said = capfd.readouterr()
    everything = [said.out, said.err, caplog.text, str(refused.value), str(unread.value), *map(str, recwarn)]
    assert "SECRET" not in "".join(everything)
