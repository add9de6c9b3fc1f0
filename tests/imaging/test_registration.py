"""Rigid registration, its gate, the common grid, and the one interpolation, on phantoms with known movements."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813

from mri_alm.errors import InputError
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.exam import read_study
from mri_alm.imaging.registration import common_grid, image_centre, onto_grid, register_rigid, resample, same_grid

SHARED = Path(__file__).parents[3] / "shared" / "data" / "prostate" / "prostatex"
real = pytest.mark.skipif(not SHARED.exists(), reason="needs the public DICOM files of ../shared")
OBLIQUE = (1.0, 0.0, 0.0, 0.0, 0.8, 0.6, 0.0, -0.6, 0.8)


def points(image):
    """Physical points of all voxels, (z, y, x, 3)."""
    size = image.GetSize()
    index = np.stack(np.meshgrid(*(np.arange(n) for n in size), indexing="ij"), axis=-1).reshape(-1, 3)
    direction = np.array(image.GetDirection()).reshape(3, 3)
    return (
        (np.array(image.GetOrigin()) + (index * image.GetSpacing()) @ direction.T)
        .reshape(*size, 3)
        .transpose(2, 1, 0, 3)
    )


def scene(shape, spacing, contrast, move=None):
    """A gland with a core, bladder, rectum and one muscle, at points moved by a transform, in a given contrast."""
    image = sitk.Image(shape, sitk.sitkFloat32)
    image.SetSpacing(spacing)
    image.SetDirection(OBLIQUE)
    image.SetOrigin((-np.array(OBLIQUE).reshape(3, 3) @ ((np.array(shape) - 1) / 2 * spacing)).tolist())
    place = points(image)
    if move is not None:
        matrix = np.array(move.GetMatrix()).reshape(3, 3)
        place = (place - np.array(move.GetTranslation())) @ matrix  # the inverse of x -> R x + t
    outer = np.linalg.norm((place - (2, 4, 1)) / (27, 20, 22), axis=-1)
    core = np.linalg.norm((place - (-6, -2, 5)) / (9, 7, 8), axis=-1)
    bladder = np.linalg.norm((place - (0, -25, 30)) / (22, 16, 14), axis=-1)
    rectum = np.linalg.norm((place - (3, 34, -8)) / (13, 11, 40), axis=-1)
    muscle = np.linalg.norm((place - (38, 8, -6)) / (7, 26, 30), axis=-1)
    inside = [core < 1, outer < 1, bladder < 1, rectum < 1, muscle < 1]
    value = np.select(inside, contrast[:5], contrast[5])
    noise = np.random.default_rng(0).normal(0, 0.03 * max(contrast), value.shape)
    filled = sitk.GetImageFromArray((value + noise).astype(np.float32))
    filled.CopyInformation(image)
    return filled


def movement(degrees, shift):
    move = sitk.VersorRigid3DTransform()
    move.SetRotation((0.6, 0.0, 0.8), float(np.deg2rad(degrees)))
    move.SetTranslation(shift)
    return move


T2_LEVELS = (250.0, 500.0, 900.0, 60.0, 120.0, 350.0)
ADC_LEVELS = (900.0, 1500.0, 2600.0, 200.0, 1200.0, 500.0)
T2 = scene((160, 160, 24), (0.8, 0.8, 3.0), T2_LEVELS)


def moved_adc(degrees, shift):
    return scene((84, 84, 24), (2.0, 2.0, 3.0), ADC_LEVELS, movement(degrees, shift))


@pytest.mark.parametrize(
    ("degrees", "shift"), [(0.0, (1.0, 2.0, -4.5)), (5.0, (4.0, -3.0, 3.3)), (-4.0, (-5.0, 2.0, 2.0))]
)
def test_a_known_movement_is_recovered(degrees, shift):
    truth = movement(degrees, shift)
    found = register_rigid(T2, moved_adc(degrees, shift))
    assert found.accepted
    assert found.mi_after > 1.02 * found.mi_before
    corners = [(x, y, z) for x in (-20.0, 20.0) for y in (-20.0, 20.0) for z in (-20.0, 20.0)]
    errors = [np.subtract(found.transform.TransformPoint(c), truth.TransformPoint(c)) for c in corners]
    assert np.linalg.norm(errors, axis=1).max() < 1.2
    assert found.rotation_deg == pytest.approx(abs(degrees), abs=1.0)


def test_noise_and_implausible_movements_are_refused_and_leave_the_identity():
    noise = sitk.GetImageFromArray(np.random.default_rng(0).normal(size=(24, 84, 84)).astype(np.float32))
    noise.CopyInformation(moved_adc(0.0, (0.0, 0.0, 0.0)))
    far = sitk.Image(noise)
    far.SetOrigin((500.0, 0.0, 0.0))
    aligned = moved_adc(0.0, (0.0, 0.0, 0.0))
    for moving, reason in (
        (aligned, "no gain"),
        (moved_adc(0.0, (0.0, 0.0, -19.0)), "implausible movement"),
        (far, "hardly any overlap"),
    ):
        found = register_rigid(T2, moving)
        assert not found.accepted
        assert found.reason.startswith(reason)
        assert found.transform.TransformPoint((1.0, 2.0, 3.0)) == (1.0, 2.0, 3.0)


def test_result_is_the_same_bits_in_threads_and_at_any_global_thread_count():
    adc = moved_adc(3.0, (1.0, 2.0, 3.0))
    alone = register_rigid(T2, adc)
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda _: register_rigid(T2, adc), range(2)))
    threads = sitk.ProcessObject.GetGlobalDefaultNumberOfThreads()
    try:
        sitk.ProcessObject.SetGlobalDefaultNumberOfThreads(5)
        together.append(register_rigid(T2, adc))
    finally:
        sitk.ProcessObject.SetGlobalDefaultNumberOfThreads(threads)
    for other in together:
        assert other.transform.GetParameters() == alone.transform.GetParameters()
        assert (other.mi_before, other.mi_after) == (alone.mi_before, alone.mi_after)


def test_grid_has_t2s_direction_about_its_centre_or_a_given_point():
    grid = common_grid(T2, spacing_mm=(1.0, 1.5, 3.0), size=(112, 75, 28))
    assert grid.GetDirection() == T2.GetDirection()
    np.testing.assert_allclose(image_centre(grid), image_centre(T2), atol=1e-9)
    elsewhere = common_grid(T2, spacing_mm=(1.0, 1.0, 3.0), size=(8, 8, 4), center_mm=(1.0, 2.0, 3.0))
    np.testing.assert_allclose(image_centre(elsewhere), (1.0, 2.0, 3.0), atol=1e-9)
    with pytest.raises(InputError, match="positive spacing and size"):
        common_grid(T2, spacing_mm=(0.0, 1.0, 1.0), size=(8, 8, 4))


def test_resampling_a_linear_field_is_exact_through_transform_and_crop():
    image = sitk.Image(moved_adc(0.0, (0.0, 0.0, 0.0)))
    field = sitk.GetImageFromArray((points(image) @ (1.0, -2.0, 0.5) + 300).astype(np.float32))
    field.CopyInformation(image)
    move = movement(5.0, (3.0, -2.0, 1.0))
    grid = common_grid(T2, spacing_mm=(1.3, 1.1, 2.7), size=(40, 42, 10))
    result, coverage = resample(field, grid, move)
    matrix = np.array(move.GetMatrix()).reshape(3, 3)
    expected = (points(grid) @ matrix.T + move.GetTranslation()) @ (1.0, -2.0, 0.5) + 300
    assert sitk.GetArrayFromImage(coverage).all()
    np.testing.assert_allclose(sitk.GetArrayFromImage(result), expected, atol=1e-2)


def test_bspline_stays_in_the_images_range_and_equals_a_whole_image_spline():
    grid = common_grid(T2, spacing_mm=(0.5, 0.5, 3.0), size=(96, 96, 10))
    result = sitk.GetArrayFromImage(resample(T2, grid, interpolator=sitk.sitkBSpline)[0])
    whole = sitk.GetArrayFromImage(sitk.Resample(T2, grid, sitk.Transform(), sitk.sitkBSpline))
    values = sitk.GetArrayFromImage(T2)
    assert values.min() <= result.min()
    assert result.max() <= values.max()
    np.testing.assert_allclose(result, np.clip(whole, values.min(), values.max()), atol=0.5)


def test_nothing_is_interpolated_onto_its_own_grid():
    grid = common_grid(T2, spacing_mm=T2.GetSpacing(), size=T2.GetSize())
    grid.SetOrigin(np.add(grid.GetOrigin(), 5e-4).tolist())  # less than a thousandth of a voxel
    assert same_grid(T2, grid)
    result, coverage = resample(T2, grid, interpolator=sitk.sitkBSpline)
    assert np.array_equal(sitk.GetArrayFromImage(result), sitk.GetArrayFromImage(T2))
    assert sitk.GetArrayFromImage(coverage).all()
    assert result.GetOrigin() == grid.GetOrigin()
    grid.SetOrigin(np.add(grid.GetOrigin(), 0.01).tolist())
    assert not same_grid(T2, grid)
    assert not same_grid(T2, T2[:, :, 1:])


def test_the_border_of_the_data_counts_as_outside_whichever_way_rounding_goes():
    """A grid between the slices of an image of the same thickness: its outermost planes lie on the border exactly."""
    image = scene((40, 40, 9), (2.0, 2.0, 3.0), T2_LEVELS)
    covered = []
    for nudge in (-1e-9, 0.0, 1e-9):
        grid = common_grid(image, spacing_mm=(2.0, 2.0, 3.0), size=(20, 20, 12))
        grid.SetOrigin(np.add(grid.GetOrigin(), nudge).tolist())
        covered.append(sitk.GetArrayFromImage(resample(image, grid)[1]).all(axis=(1, 2)).tolist())
    assert covered == [[False] * 2 + [True] * 8 + [False] * 2] * 3


def test_no_voxel_that_is_no_number_has_a_part_in_a_valid_one():
    adc = moved_adc(0.0, (0.0, 0.0, 0.0))
    inside = np.ones(adc.GetSize()[::-1], np.uint8)
    inside[12, 42, 42] = 0
    mask = sitk.GetImageFromArray(inside)
    mask.CopyInformation(adc)
    spoilt = sitk.GetArrayFromImage(adc)
    spoilt[12, 42, 42] = 1e6
    spoilt = sitk.GetImageFromArray(spoilt)
    spoilt.CopyInformation(adc)
    settings = {"spacing": (1.5, 1.5, 3.0), "size": (60, 60, 20), "register": False}
    sound, _ = onto_grid({"t2": T2, "adc": adc, "hbv": adc}, {"warnings": []}, **settings)
    found, _ = onto_grid({"t2": T2, "adc": spoilt, "hbv": adc, "adc_valid": mask}, {"warnings": []}, **settings)
    valid = sitk.GetArrayFromImage(found["valid"]) > 0
    assert 0 < (~valid).sum() < 40
    np.testing.assert_array_equal(*(sitk.GetArrayFromImage(one["adc"])[valid] for one in (found, sound)))


def test_high_b_that_reaches_less_far_than_adc_makes_the_mask():
    adc = moved_adc(0.0, (0.0, 0.0, 0.0))
    images = {"t2": T2, "adc": adc, "hbv": adc[:, :, :20]}
    found, _ = onto_grid(images, {"warnings": []}, spacing=(2.0, 2.0, 3.0), size=(40, 40, 24), register=False)
    planes = sitk.GetArrayFromImage(found["valid"]).all(axis=(1, 2))
    assert planes.tolist() == [True] * 20 + [False] * 4


def test_coverage_marks_what_the_diffusion_does_not_reach():
    grid = common_grid(T2, spacing_mm=(2.0, 2.0, 3.0), size=(56, 56, 24))
    move = sitk.TranslationTransform(3, (np.array(OBLIQUE).reshape(3, 3)[:, 2] * 6.0).tolist())
    result, coverage = resample(moved_adc(0.0, (0.0, 0.0, 0.0)), grid, move)
    inside = sitk.GetArrayFromImage(coverage)
    assert inside[:22].all()
    assert not inside[22:].any()
    assert (sitk.GetArrayFromImage(result)[22:] == 0).all()


@real
def test_real_patient_0218_moves_five_millimetres_mostly_along_z():
    (files,) = find_studies(SHARED / "ProstateX-0218")
    study = read_study(files)
    found = register_rigid(study.t2, study.adc)
    assert found.accepted
    centre = image_centre(study.t2)
    moved = np.subtract(found.transform.TransformPoint(centre), centre)
    assert found.shift_mm == pytest.approx(np.linalg.norm(moved), abs=1e-6)
    assert found.shift_mm == pytest.approx(5.1, abs=0.6)
    assert moved[2] == pytest.approx(-4.4, abs=0.6)
    assert found.mi_after > 1.3 * found.mi_before
