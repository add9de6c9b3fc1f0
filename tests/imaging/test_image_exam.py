"""Exams of image files: where they lie, voxels that are no numbers, tables of b-values, what is no b-value's volume."""

import re

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from exams import SHAPE, prepare, tissue, write_text
from scipy.ndimage import uniform_filter
from scipy.stats import spearmanr

from mri_alm.cohort.layouts import find_sources
from mri_alm.cohort.rules import CohortRules
from mri_alm.errors import StudyError
from mri_alm.imaging.diffusion import b_table
from mri_alm.imaging.exam import crop_centre, load_images
from mri_alm.imaging.registration import onto_grid

SPACING = 2.0, 2.0, 3.0
ADC = tissue(1, 700, 1800).astype(np.float32)
S0 = 4000.0 - ADC
NOISE = np.random.default_rng(0)


def signal(b, rate=ADC):
    return (S0 * np.exp(-b * rate * 1e-6)).astype(np.float32)


IMAGES = {"t2": tissue(1, 50, 600).astype(np.float32), "adc": ADC, "hbv": signal(1400)}


def stored(path, array, *, origin=(-20.0, -21.0, 5.0), spacing=SPACING, placed=True):
    """NIfTI from (slices, rows, columns) or (volumes, slices, rows, columns)."""
    affine = np.diag([-spacing[0], -spacing[1], spacing[2], 1.0])
    affine[:3, 3] = np.array([-1, -1, 1]) * origin
    image = nibabel.Nifti1Image(np.asarray(array, np.float32).T, affine)
    image.set_qform(affine, int(placed))
    image.set_sform(affine, int(placed))
    nibabel.save(image, path)
    return str(path)


def exam(folder, changed=None, **options):
    arrays = IMAGES | (changed or {})
    return {name: stored(folder / f"{name}.nii.gz", array, **options) for name, array in arrays.items()}


def diffusion(folder, volumes, table, **options):
    write_text(folder / "dwi.bval", table)
    return {
        "t2": stored(folder / "t2.nii.gz", IMAGES["t2"]),
        "dwi": stored(folder / "dwi.nii.gz", np.stack(volumes), **options),
    }


def refused(item, match, code):
    with pytest.raises(StudyError, match=match) as error:
        load_images(item)
    assert error.value.code == code


def array_of(image):
    return sitk.GetArrayFromImage(image)


# --- Where images lie -----------------------------------------------------------------------------------------------


def test_images_without_positions_lie_on_each_other_if_all_have_one_grid(tmp_path):
    _, facts = load_images(exam(tmp_path, placed=False))
    (warning,) = facts["warnings"]
    assert warning.startswith("Columns t2, adc, hbv: the files do not say where their images lie (")
    assert load_images(exam(tmp_path))[1]["warnings"] == []


def test_images_without_positions_on_different_grids_are_refused(tmp_path):
    item = exam(tmp_path, placed=False) | {"t2": stored(tmp_path / "x.nii", np.tile(IMAGES["t2"], (1, 2, 2)))}
    refused(item, r"Columns adc, hbv: where the images of this study lie is unknown: .* codes of 0", "no_position")
    item |= {"t2": stored(tmp_path / "x.nii", np.tile(IMAGES["t2"], (1, 2, 2)), placed=False)}
    refused(item, "Columns t2, adc, hbv: where the images of this study lie is unknown", "no_position")


def test_one_image_without_a_position_is_refused(tmp_path):
    item = exam(tmp_path) | {"adc": stored(tmp_path / "x.nii", ADC, placed=False)}
    refused(item, "Column adc: where the images of this study lie is unknown", "no_position")


def test_the_geometry_of_a_bare_array_is_refused(tmp_path):
    """SimpleITK's: spacing of 1, origin at 0. The slices would be 1 mm apart."""
    item = {}
    for name, array in IMAGES.items():
        item[name] = str(tmp_path / f"{name}.mha")
        sitk.WriteImage(sitk.GetImageFromArray(array), item[name])
    refused(item, "Columns t2, adc, hbv: where the images of this study lie is unknown", "no_position")


def test_fields_of_view_that_all_begin_at_zero_are_refused_where_they_differ(tmp_path):
    item = exam(tmp_path, origin=(0, 0, 0))
    load_images(item)
    item["t2"] = stored(tmp_path / "x.nii", np.tile(IMAGES["t2"], (1, 2, 2)), origin=(0, 0, 0))
    refused(item, "all of them begin at 0, 0, 0, and have different fields of view", "no_position")


def test_a_gland_without_a_position_beside_dicom_is_refused(tmp_path):
    gland = np.zeros(SHAPE)
    gland[2:4, 5:9, 6:10] = 1
    item = {"dicom": "unread", "gland": stored(tmp_path / "g.nii", gland, placed=False, spacing=(1, 1, 1))}
    with pytest.raises(StudyError, match="Column gland: where the images of this study lie is unknown"):
        crop_centre(item)
    assert crop_centre(item | {"gland": stored(tmp_path / "g.nii", gland)}) == pytest.approx((-5, -8, 12.5))


def test_the_layout_of_names_says_the_cause(tmp_path):
    folder = tmp_path / "in" / "P1"
    folder.mkdir(parents=True)
    item = exam(folder)
    image = nibabel.load(item["adc"])
    affine = image.affine.copy()
    affine[0, 1] = 0.2
    image.set_sform(affine, 1)
    image.header["qform_code"] = 0
    nibabel.save(nibabel.Nifti1Image(image.get_fdata(), affine, image.header), item["adc"])
    (source,) = find_sources(tmp_path / "in", CohortRules()).sources
    assert "Column adc: its axes are not perpendicular (sheared by 5.7 degrees)" in source.error.message


# --- Voxels that are no numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["t2", "adc", "hbv"])
def test_voxels_that_are_no_numbers_count_as_outside(tmp_path, name, value):
    array = IMAGES[name].copy()
    array[2:4, 8:11, 8:11] = value
    images, facts = load_images(exam(tmp_path, {name: array}))
    assert facts["warnings"] == [
        f"Column {name}: 0.7% of its voxels are no numbers (NaN or infinite), 4.5% of those in its middle; they count "
        "as outside."
    ]
    mask = array_of(images[f"{name}_valid"])
    np.testing.assert_array_equal(mask == 0, ~np.isfinite(array))
    assert np.isfinite(array_of(images[name])).all()
    np.testing.assert_allclose(array_of(images[name])[mask == 1], IMAGES[name][mask == 1])
    found, _ = onto_grid(images, facts, spacing=SPACING, size=(20, 20, 6), register=False)
    valid = array_of(found["t2_valid" if name == "t2" else "valid"])
    assert not valid[2:4, 8:11, 8:11].any()
    assert valid[:, :6].all()


def test_next_to_numbers_the_nearest_stands_in(tmp_path):
    array = np.full(SHAPE, 1000.0)
    array[0, 0, 0], array[:, 5:11, 5:11] = 1500, np.nan
    found = array_of(load_images(exam(tmp_path, {"adc": array}))[0]["adc"])
    assert (found[:, 7:9, 7:9] == 0).all()  # three voxels in
    found[:, 7:9, 7:9] = 1000
    assert set(found.ravel()) == {1000.0, 1500.0}


def test_an_image_that_is_no_numbers_in_its_middle_is_refused(tmp_path):
    array = ADC.copy()
    array[:, 4:16, 4:13] = np.nan
    refused(
        exam(tmp_path, {"adc": array}),
        "Column adc: 80% of the voxels in the middle of the image are no numbers",
        "empty_volume",
    )


def test_of_4d_diffusion_a_voxel_needs_all_volumes(tmp_path):
    volumes = [signal(0), signal(800)]
    volumes[1][3, 9:12, 9:12] = np.nan
    images, facts = load_images(diffusion(tmp_path, volumes, "0 800"))
    assert any(text.startswith("Column dwi: 0.4% of its voxels are no numbers") for text in facts["warnings"])
    for name in ("adc_valid", "hbv_valid"):
        np.testing.assert_array_equal(array_of(images[name]) == 0, ~np.isfinite(volumes[1]))


def test_what_is_cut_off_is_said(tmp_path):
    _, facts = load_images(exam(tmp_path, {"t2": np.minimum(IMAGES["t2"], 300)}))
    (text,) = facts["warnings"]
    assert re.match(
        "Column t2: [0-9]+% of the voxels in the middle .* have its highest value, 300: what was bright", text
    )


# --- b-values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    ["0 795 800 805\n", "0, 795, 800, 805", "0\n795\n800\n805\n", "\ufeff0e0\t7.95e2 800.0  805\r\n", "0;795;800;805"],
)
def test_b_values_of_one_setting_are_one_shell_in_any_spelling(tmp_path, table):
    volumes = [signal(0), *(signal(800, ADC * rate) for rate in (0.8, 1.0, 1.2))]
    images, facts = load_images(diffusion(tmp_path, volumes, table))
    assert facts["b_values"] == [0.0, 800.0]
    assert facts["adc_source"] == "fitted over b = 0, 800"
    np.testing.assert_allclose(array_of(images["adc"]), ADC, rtol=1e-3)
    np.testing.assert_allclose(array_of(images["hbv"]), signal(800), rtol=1e-3)


@pytest.mark.parametrize("name", ["dwi.bval", "dwi.bvals", "dwi.nii.gz.bval", "dwi.BVAL"])
def test_the_table_is_found_under_its_usual_names(tmp_path, name):
    write_text(tmp_path / name, "0 800")
    assert b_table(tmp_path / "dwi.nii.gz") == [0.0, 800.0]
    write_text(tmp_path / "dwi.bval", "0 800")
    assert b_table(tmp_path / "dwi.nii.gz") == [0.0, 800.0]


@pytest.mark.parametrize("table", ["0 b800", "0 -800", "0 nan", "0 inf", "0 0.8", "0 8e8", "", "0 800 1e999"])
def test_what_is_no_table_of_b_values_is_refused(tmp_path, table):
    with pytest.raises(StudyError, match=r"Column dwi: (its|the) \.bval file holds") as error:
        b_table((tmp_path / "dwi.nii", write_text(tmp_path / "dwi.bval", table))[0])
    assert error.value.code == "b_unknown"


def test_two_tables_that_differ_are_refused(tmp_path):
    write_text(tmp_path / "dwi.bval", "0 800")
    write_text(tmp_path / "dwi.bvals", "0 1000")
    with pytest.raises(StudyError, match="two tables of b-values lie beside the image, and they differ"):
        b_table(tmp_path / "dwi.nii.gz")


@pytest.mark.parametrize(
    ("volumes", "table", "code"),
    [
        ([signal(0), signal(500), signal(1500), ADC], "0 500 1500 1500", "volumes_differ"),
        ([signal(0), signal(500), signal(1500), ADC * 0.5], "0 500 1500 1500", "volumes_differ"),
        ([signal(0), signal(500), signal(1500), signal(0)], "0 500 1500 1500", "volumes_differ"),
        ([signal(0), signal(500), signal(1500), ADC], "0 500 1500 2000", "b_implausible"),
        ([signal(1500), signal(500), signal(0)], "0 500 1500", "b_implausible"),
    ],
)
def test_volumes_that_are_not_of_their_b_value_are_refused(tmp_path, volumes, table, code):
    refused(diffusion(tmp_path, volumes, table), "Column dwi", code)


def test_noisy_repeats_and_directions_are_averaged(tmp_path):
    """At a signal of three times its noise, with rates 1.6 apart."""
    volumes = [signal(0)]
    for rate in (0.75, 1.0, 1.2, 0.75, 1.0, 1.2):
        clean = signal(1500, ADC * rate)
        volumes.append(np.abs(clean + NOISE.normal(scale=float(np.median(clean)) / 3, size=SHAPE)).astype(np.float32))
    _, facts = load_images(diffusion(tmp_path, volumes, "0" + " 1500" * 6))
    assert facts["b_values"] == [0.0, 1500.0]


@pytest.mark.parametrize(("share", "said"), [(0.0, False), (0.35, False), (0.45, True), (0.5, True)])
def test_a_repeat_that_resembles_the_other_little_is_named(tmp_path, share, said):
    """Mirrored tissue, mixed in, up to what is refused; real images mirrored as a whole lie between."""
    once = signal(1500)
    again = (1 - share) * once + share * once[..., ::-1]
    _, facts = load_images(diffusion(tmp_path, [signal(0), once, again], "0 1500 1500"))
    smooth = [uniform_filter(one[:, 5:15, 5:15].astype(float), (0, 3, 3)) for one in (once, again)]
    alike = spearmanr(smooth[0], smooth[1], axis=None).statistic
    assert (0.5 < alike < 0.75) == said
    assert facts["warnings"] == said * [
        "Column dwi at b = 1500: its 2 repeats or directions resemble one another little (rank correlation "
        f"{alike:.2f}; 0.75 or more is usual). Look whether all show the same patient, upright."
    ]


def test_a_map_that_contradicts_its_diffusion_is_refused(tmp_path):
    item = diffusion(tmp_path, [signal(0), signal(800)], "0 800")
    assert load_images(item | {"adc": stored(tmp_path / "adc.nii", ADC)})[1]["adc_source"] == "given"
    refused(
        item | {"adc": stored(tmp_path / "adc.nii", ADC * 0.4)},
        r"Column adc contradicts the fit to column dwi \(median 0\.4 times",
        "adc_contradicts",
    )


def test_a_prepared_exam_with_holes_says_so_in_its_row(tmp_path):
    array = ADC.copy()
    array[2:4, 9:11, 9:11] = np.nan
    (tmp_path / "in" / "P1").mkdir(parents=True)
    exam(tmp_path / "in" / "P1", {"adc": array})
    (row,) = prepare(tmp_path / "in", tmp_path / "out").rows
    assert "Column adc: 0.3% of its voxels are no numbers" in row["warnings"]
    valid = sitk.GetArrayFromImage(sitk.ReadImage(str(tmp_path / "out" / row["study"] / "valid.nii.gz")))
    assert 0 < (valid == 0).sum() < valid.size / 2
