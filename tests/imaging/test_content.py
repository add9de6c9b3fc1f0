"""ADC and high-b told apart by their voxels: on phantoms, on real exams, and in the manifest's columns."""

from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813

from mri_alm.errors import StudyError
from mri_alm.imaging.choose_series import build_diffusion, diffusion_sets
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.diffusion import adc_unit
from mri_alm.imaging.exam import load_images, read_series
from mri_alm.imaging.plausibility import check_maps, looks_calculated, looks_like_adc, spread_growth
from mri_alm.imaging.series import group_series
from mri_alm.phantom.study import HIGH_B, make_study

SHARED = Path(__file__).parents[3] / "shared" / "data" / "prostate" / "prostatex"
real = pytest.mark.skipif(not SHARED.exists(), reason="needs the public DICOM files of ../shared")


@pytest.fixture(scope="module")
def phantoms():
    return [make_study(index, index % 2) for index in range(6)]


@pytest.fixture(scope="module")
def patients():
    """Every diffusion set of the three exams that can be built."""
    built = {}
    for patient in ("0000", "0001", "0218"):
        (files,) = find_studies(SHARED / f"ProstateX-{patient}")
        for group in diffusion_sets(group_series(files.files, files.headers), []):
            if group.usable:
                built[patient, group.first.number] = build_diffusion(group)
    return built


def test_growth_is_the_sign_of_how_spread_follows_the_mean():
    """Noise in proportion to the level, and in inverse proportion, on a ramp."""
    level = np.tile(np.linspace(100, 1000, 60), (20, 60, 1))
    noise = np.random.default_rng(0).normal(size=level.shape)
    for factor, low, high in ((level / 10, 0.7, 1.0), (1e4 / level, -1.0, -0.7)):
        image = sitk.GetImageFromArray((level + noise * factor).astype(np.float32))
        image.SetSpacing((2.0, 2.0, 3.0))
        assert low < spread_growth(image) < high
        assert spread_growth(image * 1e-6) == pytest.approx(spread_growth(image), abs=1e-3)


def test_too_small_and_constant_images_give_no_growth():
    for array in (np.random.default_rng(0).uniform(1, 2, (6, 8, 10)), np.ones((20, 60, 60))):
        assert np.isnan(spread_growth(sitk.GetImageFromArray(array)))


def exchanged_is_refused(adc, high):
    check_maps(adc, high)
    with pytest.raises(StudyError, match=r"in each other's place: .* Exchange the two") as error:
        check_maps(high, adc)
    assert error.value.code == "maps_swapped"


def test_exchanged_phantom_maps_are_refused_and_right_ones_are_not(phantoms):
    for study in phantoms:
        for high in (study.dwi[400.0], study.dwi[800.0], study.hbv):
            exchanged_is_refused(study.adc, high)


@pytest.mark.parametrize("form", ["8 bits", "mm2/s", "smoothed", "finer"])
def test_exchanged_maps_are_noticed_in_other_forms(phantoms, form):
    study = phantoms[0]
    adc, high = (sitk.Cast(image, sitk.sitkFloat32) for image in (study.adc, study.hbv))
    if form == "8 bits":
        high = sitk.Cast(sitk.Clamp(high * (255 / 60), sitk.sitkFloat32, 0, 255), sitk.sitkUInt8)
    elif form == "mm2/s":
        adc = adc * 1e-6
    elif form == "smoothed":
        adc, high = (sitk.DiscreteGaussian(image, [4.0, 4.0, 0.0]) for image in (adc, high))
    else:
        size = [2 * n for n in adc.GetSize()[:2]] + [adc.GetSize()[2]]
        spacing = (adc.GetSpacing()[0] / 2, adc.GetSpacing()[1] / 2, adc.GetSpacing()[2])
        adc, high = (
            sitk.Resample(image, size, sitk.Transform(), sitk.sitkLinear, image.GetOrigin(), spacing)
            for image in (adc, high)
        )
    exchanged_is_refused(adc, high)


@real
def test_exchanged_real_maps_are_refused_and_right_ones_are_not(patients):
    assert len(patients) == 5
    for built in patients.values():
        exchanged_is_refused(built.adc, built.hbv)
        for b, image in built.dwi.items():
            if b >= 400:
                exchanged_is_refused(built.adc, image)


def test_exchanged_maps_of_a_manifest_are_refused(phantoms, tmp_path):
    study, paths = phantoms[1], {}
    for name in ("t2", "adc", "hbv"):
        paths[name] = str(tmp_path / f"{name}.nii.gz")
        sitk.WriteImage(getattr(study, name), paths[name])
    assert sitk.GetArrayViewFromImage(load_images(paths)[0]["adc"]).max() > 1000
    for wrong, code, match in (
        (paths | {"adc": paths["hbv"], "hbv": paths["adc"]}, "maps_swapped", "in each other's place"),
        (paths | {"adc": paths["hbv"]}, "maps_equal", "the same voxels"),
    ):
        with pytest.raises(StudyError, match=match) as error:
            load_images(wrong)
        assert error.value.code == code


def check_roles(adc, dwi):
    assert looks_like_adc(adc, dwi)
    assert looks_like_adc(adc, {})
    for b, image in dwi.items():
        others = {other: dwi[other] for other in dwi if other != b}
        assert not looks_like_adc(image, others)
        assert not looks_like_adc(image, {})


def test_phantom_maps_are_recognised(phantoms):
    for study in phantoms:
        check_roles(study.adc, study.dwi)
        assert looks_calculated(study.hbv, HIGH_B, study.dwi)
        assert not looks_calculated(study.dwi[800.0], 800.0, {b: v for b, v in study.dwi.items() if b < 800})


@real
def test_real_maps_are_recognised(patients):
    for built in patients.values():
        check_roles(built.adc, built.dwi)
        if built.info["hbv"]["source"] != "acquired":
            assert looks_calculated(built.hbv, built.info["hbv"]["b"], built.dwi)
        if len(built.dwi) > 2:
            top = max(built.dwi)
            assert not looks_calculated(built.dwi[top], top, {b: v for b, v in built.dwi.items() if b < top})


@real
def test_real_fractional_anisotropy_is_no_adc():
    """Its values, 0 to 1000, would pass for 1e-6 mm2/s."""
    image = next(iter(read_series(SHARED / "ProstateX-0218" / "s14_MDDW_FA").values()))
    assert adc_unit(image)[0] == "1e-6 mm2/s"
    assert not looks_like_adc(image, {})
