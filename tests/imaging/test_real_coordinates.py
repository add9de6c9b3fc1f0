"""Every real folder: its volumes' physical points against the headers, or the refusal it deserves with its reason."""

from pathlib import Path

import numpy as np
import pydicom
import pytest

from mri_alm.errors import StudyError
from mri_alm.imaging.exam import read_series

SHARED = Path(__file__).parents[3] / "shared" / "data" / "prostate"
pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="needs the public DICOM files of ../shared")

P0, P1, P2 = (f"prostatex/ProstateX-{patient}" for patient in ("0000", "0001", "0218"))
VOLUMES = {  # folder -> its b-values, None for what is no diffusion
    f"{P0}/s03_t2_tse_sag_9of19": [None],
    f"{P0}/s04_t2_tse_tra": [None],
    f"{P0}/s05_t2_tse_cor": [None],
    f"{P0}/s06_ep2d_diff_b50_400_800": [50.0, 400.0, 800.0],
    f"{P0}/s07_ep2d_diff_ADC": [None],
    f"{P0}/s08_ep2d_diff_CALC_BVAL_1000": [1000.0],
    f"{P0}/s09_tfl3d_PD_ref": [None],
    f"{P1}/s03_t2_loc_sag": [None],
    f"{P1}/s06_t2_tse_tra_first": [None],
    f"{P1}/s07_ep2d_diff_b50_400_800": [50.0, 400.0, 800.0],
    f"{P1}/s08_ep2d_diff_ADC": [None],
    f"{P1}/s09_ep2d_diff_CALC_BVAL_1000": [1000.0],
    f"{P1}/s10_t2_tse_tra_repeat_after_dwi": [None],
    f"{P2}/s05_t2_tse_tra": [None],
    f"{P2}/s06_t2_tse_cor_9of19": [None],
    f"{P2}/s08_ep2d_3Scan_b0_100_400_800": [0.0, 100.0, 400.0, 800.0],
    f"{P2}/s09_ep2d_3Scan_ADC": [None],
    f"{P2}/s10_ep2d_3Scan_CALC_BVAL_1600": [1600.0],
    f"{P2}/s12_MDDW_ADC_no_bvalue": [None],
    f"{P2}/s13_MDDW_TRACEW_b800": [800.0],
    f"{P2}/s14_MDDW_FA": [None],
    f"{P2}/s17_high_bvalue_100": [100.0],
    f"{P2}/s18_high_bvalue_500": [500.0],
    f"{P2}/s19_high_bvalue_1400": [1400.0],
    f"{P2}/s21_ADC_high_bvalue": [None],
    f"{P2}/s27_DCE_twist_TT008.0s": [None],
    f"{P2}/s60_DCE_twist_TT147.1s": [None],
    "vendor/ge_pioneer_29.1_dti": [0.0, 1000.0],
    "vendor/siemens_xa30_enhanced/s10_dwi": [0.0, 2500.0],
    "vendor/siemens_xa30_enhanced/s11_adc": [None],
    "vendor/toshiba_galan_5.0_b0_without_tag": [0.0, 1500.0],
}
REFUSALS = {  # folder -> code and reason
    "masks": ("no_images", "not DICOM"),
    "odd/jpeg2000": ("too_few_slices", "series 1 has 1 slices"),
    "odd/lfs_pointers": ("pointer", "Git LFS pointer instead of data"),
    "odd/missing_slice/ProstateX-0000/s08_CALC_BVAL_18of19": ("slice_gap", "A slice is missing"),
    f"{P1}/s02_t2_localizer_6of13": ("geometry", "direction cosines differ between slices by 1 "),
    f"{P2}/s02_localizer_1slice": ("too_few_slices", "series 2 has 1 slices"),
    f"{P2}/s03_t2_localizer_6of13": ("geometry", "direction cosines differ between slices by 1 "),
    f"{P2}/s07_tfl2D_two_volumes": ("several_series", "2 series, echoes or kinds of map"),
    f"{P2}/s11_MDDW_12dir_MOSAIC_2of65": ("mosaic", "tiled into one picture"),
    "vendor/canon_galan_6.0_classic": ("too_few_slices", "direction 2 has 1 slices"),
    "vendor/philips_achieva_2.5_private_b_only": ("too_few_slices", "at b = 1000, direction 1 has 1 slices"),
    "vendor/uih_umr770_vframe": ("mosaic", "tiled into one picture"),
}


def test_no_folder_is_forgotten():
    folders = {str(file.parent.relative_to(SHARED)) for file in SHARED.rglob("*") if file.is_file()} - {"."}
    assert folders == set(VOLUMES) | set(REFUSALS)


@pytest.mark.parametrize("folder", REFUSALS)
def test_refused_with_the_reason(folder):
    code, reason = REFUSALS[folder]
    with pytest.raises(StudyError, match=reason) as error:
        read_series(SHARED / folder)
    assert error.value.code == code


def frames(folder):
    """(position, row and column direction, spacing of rows and of columns, b or None, values) of every frame."""
    for file in sorted(folder.iterdir()):
        ds = pydicom.dcmread(file)
        if "PerFrameFunctionalGroupsSequence" not in ds:
            slope, intercept = float(ds.get("RescaleSlope", 1)), float(ds.get("RescaleIntercept", 0))
            yield ds, ds, ds, classic_b(ds), ds.pixel_array * slope + intercept
            continue
        shared = ds.SharedFunctionalGroupsSequence[0]
        for number, own in enumerate(ds.PerFrameFunctionalGroupsSequence):

            def group(name, own=own, shared=shared):
                return (own if name in own else shared)[name][0]

            value = group("PixelValueTransformationSequence")
            b = own.MRDiffusionSequence[0].get("DiffusionBValue") if "MRDiffusionSequence" in own else None
            pixels = ds.pixel_array[number] * float(value.RescaleSlope) + float(value.RescaleIntercept)
            yield (
                group("PlanePositionSequence"),
                group("PlaneOrientationSequence"),
                group("PixelMeasuresSequence"),
                b,
                pixels,
            )


def classic_b(ds):
    """By hand, for the scanners here: the public tag, else Siemens' or GE's own."""
    if "DiffusionBValue" in ds:
        return float(ds.DiffusionBValue)
    if (0x0019, 0x100C) in ds:
        return (
            float(bytes(ds[0x0019, 0x100C].value))
            if isinstance(ds[0x0019, 0x100C].value, bytes)
            else float(ds[0x0019, 0x100C].value)
        )
    return float(str(ds[0x0043, 0x1039].value[0])) if (0x0043, 0x1039) in ds else None


@pytest.mark.parametrize("folder", VOLUMES)
def test_200_random_voxels_lie_where_the_headers_say(folder):
    volumes = read_series(SHARED / folder)
    assert list(volumes) == VOLUMES[folder]
    every = list(frames(SHARED / folder))
    rng = np.random.default_rng(0)
    for number in rng.integers(0, len(every), 200).tolist():
        place, orientation, measures, b, values = every[number]
        row, column = np.array(orientation.ImageOrientationPatient, float).reshape(2, 3)
        j, i = (int(rng.integers(n)) for n in values.shape)
        down, right = (float(v) for v in measures.PixelSpacing)
        point = np.array(place.ImagePositionPatient, float) + i * right * row + j * down * column
        image = volumes[None] if None in volumes else volumes[b or 0.0]
        index = np.array(image.TransformPhysicalPointToContinuousIndex(point.tolist()))
        nearest = [int(v) for v in np.round(index)]
        np.testing.assert_allclose(image.TransformIndexToPhysicalPoint(nearest), point, atol=0.02)
        if len(every) == image.GetSize()[2] * len(volumes):  # else directions are averaged
            assert image[nearest] == pytest.approx(values[j, i], rel=1e-6)
