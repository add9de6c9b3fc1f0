"""The built-in cohort: anatomy within the measured statistics, physics that agrees, files that survive a crash."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pydicom
import pytest
import SimpleITK as sitk  # noqa: N813
from hypothesis import given, settings
from hypothesis import strategies as st

from mri_alm.errors import InputError
from mri_alm.imaging.dicom_files import find_studies
from mri_alm.imaging.exam import read_study
from mri_alm.phantom.anatomy import LESION_SIZES, MIXTURE, _draw_lesion, draw_anatomy, draw_grades
from mri_alm.phantom.canvas import Canvas, Ellipsoid
from mri_alm.phantom.cohort import make_cohort, plan_cohort
from mri_alm.phantom.dicom import write_dicom_study
from mri_alm.phantom.study import HIGH_B, MAX_DRAWN_SHIFT_MM, distort, fit_maps, image_of, make_study, rician
from mri_alm.programs.make_phantom import main

IMAGES = ("t2", "adc", "hbv", "gland", "zones")
SHARED = Path(__file__).parents[3] / "shared"


def voxels(image):
    return sitk.GetArrayFromImage(image)


def same(one, other):
    geometry = (one.GetOrigin(), one.GetSpacing(), one.GetDirection()) == (
        other.GetOrigin(), other.GetSpacing(), other.GetDirection()
    )  # fmt: skip
    return geometry and np.array_equal(voxels(one), voxels(other))


@pytest.fixture(scope="module")
def studies():
    return [make_study(index, index % 2) for index in range(8)]


@pytest.fixture(scope="module")
def negatives():
    return [make_study(index, 0, seed=2) for index in range(14)]


@pytest.fixture(scope="module")
def anatomies():
    return [draw_anatomy(np.random.default_rng([7, index]), 1) for index in range(100)]


def on_diffusion(study, mask, distance_mm):
    """Voxels of the diffusion grid at least ``distance_mm`` inside a mask of T2's grid, moved by the study's shift."""
    depth = sitk.SignedMaurerDistanceMap(mask, insideIsPositive=True, squaredDistance=False, useImageSpacing=True)
    back = sitk.TranslationTransform(3, [-s for s in study.info["shift_mm"]])
    return voxels(sitk.Resample(depth, study.adc, back, sitk.sitkLinear, -100.0)) > distance_mm


# --- determinism -----------------------------------------------------------------------------------------------------


def test_equal_arguments_give_equal_voxels_whatever_was_made_before():
    first = make_study(3, 0, seed=5)
    make_study(4, 1, seed=5)
    again = make_study(3, 0, seed=5)
    assert first.info == again.info
    assert list(first.dwi) == list(again.dwi)
    assert all(same(getattr(first, name), getattr(again, name)) for name in IMAGES)
    assert all(same(image, again.dwi[b]) for b, image in first.dwi.items())


@pytest.mark.parametrize("other", [{"index": 4}, {"label": 1}, {"seed": 6}])
def test_every_argument_matters(other):
    arguments = {"index": 3, "label": 0, "seed": 5} | other
    study = make_study(arguments["index"], arguments["label"], seed=arguments["seed"])
    assert study.info["gland_ml"] != make_study(3, 0, seed=5).info["gland_ml"]


@pytest.mark.parametrize(
    ("index", "label", "seed", "message"),
    [(0, 2, 0, "label must be 0 or 1, not 2"), (-1, 0, 0, "not be negative, not -1 and 0"), (0, 0, -1, "not 0 and -1")],
)
def test_bad_arguments_are_refused(index, label, seed, message):
    with pytest.raises(InputError, match=message):
        make_study(index, label, seed=seed)


# --- anatomy ---------------------------------------------------------------------------------------------------------


def test_gland_volumes_have_the_median_and_spread_of_the_statistics(anatomies):
    volumes = np.array([anatomy.info()["gland_ml"] for anatomy in anatomies])
    shares = np.array([anatomy.transition_share for anatomy in anatomies])
    assert 44 < np.median(volumes) < 58  # 51
    assert volumes.min() > 15
    assert volumes.max() < 190
    assert 15 < np.median(volumes * (1 - shares)) < 20  # 17.5
    assert 27 < np.median(volumes * shares) < 37  # 32


def test_gland_sizes_have_the_median_of_the_statistics(anatomies):
    sizes = 2 * np.median([anatomy.radii for anatomy in anatomies], axis=0)
    np.testing.assert_allclose(sizes, (50, 40, 43), rtol=0.08)


def test_lesions_have_the_sites_and_sizes_of_the_statistics(anatomies):
    lesions = [(lesion, anatomy.radii) for anatomy in anatomies for lesion in anatomy.lesions]
    places = np.array([np.array(lesion.centre) / radii for lesion, radii in lesions])
    sizes = np.array([lesion.diameter for lesion, _ in lesions])
    assert 0.35 < np.median(np.abs(places[:, 0])) < 0.55  # 0.45
    assert 0.10 < places[:, 1].mean() < 0.35  # +0.25
    assert abs(places[:, 2].mean()) < 0.1
    assert 11.5 < np.median(sizes) < 16  # 12.6
    assert sizes.min() > 6.6
    assert sizes.max() < 31
    assert 1.0 < len(lesions) / len(anatomies) < 1.2  # one lesion in 92 %


def test_masks_hold_the_volumes_that_the_truth_states(studies):
    for study in studies:
        voxel_ml = np.prod(study.t2.GetSpacing()) / 1000
        zones = voxels(study.zones)
        np.testing.assert_array_equal(voxels(study.gland), zones > 0)
        assert voxel_ml * (zones > 0).sum() == pytest.approx(study.info["gland_ml"], rel=0.06)
        assert (zones == 2).sum() / (zones > 0).sum() == pytest.approx(study.info["transition_share"], abs=0.04)


def test_peripheral_zone_lies_behind_and_beside_the_transition_zone(studies):
    for study in studies:
        peripheral, transition = (np.argwhere(voxels(study.zones) == zone) for zone in (1, 2))
        assert peripheral[:, 1].mean() > transition[:, 1].mean()  # rows run to the back
        assert peripheral[:, 2].std() > transition[:, 2].std()


def test_geometry_varies_within_what_scanners_do(studies):
    spacings = {study.t2.GetSpacing()[0] for study in studies}
    assert len(spacings) > 2
    for study in studies:
        assert 0.5 <= study.t2.GetSpacing()[0] <= 0.8
        assert 1.6 <= study.adc.GetSpacing()[0] <= 2.0
        assert 3.0 <= study.t2.GetSpacing()[2] <= 3.6
        tilt = np.degrees(np.arccos(np.clip(study.t2.GetDirection()[8], -1, 1)))
        assert tilt < 15
        fields = [np.array(image.GetSize()) * image.GetSpacing() for image in (study.t2, study.adc)]
        middles = [
            np.array(image.TransformContinuousIndexToPhysicalPoint([(n - 1) / 2 for n in image.GetSize()]))
            for image in (study.t2, study.adc)
        ]
        assert fields[0][0] >= 112
        assert fields[1][0] > fields[0][0] - 5
        assert np.linalg.norm(middles[0] - middles[1]) < 2
        assert np.linalg.norm(study.info["shift_mm"]) <= MAX_DRAWN_SHIFT_MM
    shifts = [np.linalg.norm(study.info["shift_mm"]) for study in studies]
    assert min(shifts) < 2
    assert max(shifts) > 4
    assert max(np.degrees(np.arccos(study.t2.GetDirection()[8])) for study in studies) > 3


def test_the_gland_lies_inside_the_default_box(studies):
    for study in studies:
        z, y, x = np.argwhere(voxels(study.gland)).T
        size, spacing = np.array(study.t2.GetSize()), study.t2.GetSpacing()
        for axis, index, half in ((0, x, 56), (1, y, 56), (2, z, 42)):
            assert np.abs((index - (size[axis] - 1) / 2) * spacing[axis]).max() < half


# --- physics ---------------------------------------------------------------------------------------------------------


def test_zones_have_the_adc_of_their_tissue_at_the_shifted_place(negatives):
    free = [study for study in negatives if not study.info["lesions"]]
    assert len(free) > 1
    for zone, adc in ((1, 1600), (2, 1300)):
        places = [on_diffusion(study, study.zones == zone, 2.0) for study in free]
        medians = [
            np.median(voxels(study.adc)[place]) for study, place in zip(free, places, strict=True) if place.sum() > 30
        ]
        assert np.mean(medians) == pytest.approx(adc, rel=0.06)


def test_the_peripheral_zone_is_bright_unless_t2_is_equivocal(studies, negatives):
    ratios = {True: [], False: []}
    for study in studies + negatives:
        t2, zones = voxels(study.t2), voxels(study.zones)
        transition = np.median(t2[zones == 2])
        ratios[study.info["t2_grade"] == 1].append(np.median(t2[zones == 1]) / transition)
        assert np.percentile(t2, 2) < 0.5 * transition  # muscle, bone and gas
    assert np.median(ratios[False]) > 1.3
    assert min(ratios[False]) > 1.1
    assert np.median(ratios[True]) < 1.25


def lesion_contrast(study):
    """A lesion's middle against its zone: ratio of the T2 signals and of the ADCs."""
    lesion = study.info["lesions"][0]
    centre = np.array(study.info["gland_centre_mm"]) + lesion["centre_mm"]
    zone = study.zones == study.zones[study.zones.TransformPhysicalPointToIndex(centre.tolist())]
    offsets = np.random.default_rng(0).uniform(-0.15, 0.15, (60, 3)) * lesion["diameter_mm"]
    places = (
        (study.t2, (0, 0, 0), voxels(zone) > 0),
        (study.adc, study.info["shift_mm"], on_diffusion(study, zone, 1.0)),
    )
    return [
        np.mean([image[image.TransformPhysicalPointToIndex((centre + shift + d).tolist())] for d in offsets])
        / np.median(voxels(image)[rest])
        for image, shift, rest in places
    ]


def test_lesions_change_the_sequences_of_their_grades(negatives):
    found = {}
    for study in negatives:
        if study.info["lesions"]:
            grades = (study.info["t2_grade"] > 0, study.info["diffusion_grade"] > 0)
            found.setdefault(grades, []).append(lesion_contrast(study))
    t2_only, diffusion_only = (np.median(found[grades], axis=0) for grades in ((True, False), (False, True)))
    assert t2_only[0] < 0.8
    assert t2_only[1] > 0.9
    assert diffusion_only[0] > 0.85
    assert diffusion_only[1] < 0.75


@settings(max_examples=30)
@given(
    adc=st.floats(300, 3000),
    signal=st.floats(500, 5000),
    b_values=st.lists(st.integers(0, 16).map(lambda n: 50.0 * n), min_size=2, max_size=5, unique=True),
)
def test_maps_of_noise_free_diffusion_are_its_own_parameters(adc, signal, b_values):
    grid = sitk.Image((24, 24, 3), sitk.sitkUInt8)
    dwi = {}
    for b in b_values:
        array = np.zeros((3, 24, 24), np.float32)
        array[:, 10:14, 10:14] = signal * np.exp(-b * adc * 1e-6)
        dwi[b] = image_of(array, grid)
    fitted, high = fit_maps(dwi)
    if array.max() >= 2:
        assert voxels(fitted)[1, 11, 11] == pytest.approx(adc, abs=1.5)
        assert voxels(high)[1, 11, 11] == pytest.approx(signal * np.exp(-HIGH_B * adc * 1e-6), rel=0.01, abs=1)
    assert voxels(fitted)[1, 2, 2] == voxels(high)[1, 2, 2] == 0


def test_noise_is_rician():
    rng = np.random.default_rng(0)
    air, tissue = (rician(rng, np.full(200_000, level, np.float32), 2.0) for level in (0.0, 100.0))
    assert np.mean(air) == pytest.approx(2.0 * np.sqrt(np.pi / 2), rel=0.01)  # Rayleigh
    assert np.mean(tissue.astype(np.float64) ** 2) == pytest.approx(100.0**2 + 2 * 2.0**2, rel=1e-3)
    assert np.std(tissue) == pytest.approx(2.0, rel=0.02)


# --- difficulty ------------------------------------------------------------------------------------------------------


def test_real_lesions_have_the_sizes_of_the_statistics():
    """12.6 mm times exp(0.45 z), z normal within 2.05: by the quantiles of that distribution, over 1,500 draws."""
    rng = np.random.default_rng(0)
    drawn = [_draw_lesion(rng, (0, 0, 0), (1, 1), LESION_SIZES["real"]).diameter for _ in range(1500)]
    low, median, high = np.quantile(drawn, (0.1, 0.5, 0.9))
    assert median == pytest.approx(12.6, rel=0.04)
    assert low == pytest.approx(12.6 * np.exp(-0.45 * 1.2816), rel=0.05)
    assert high == pytest.approx(12.6 * np.exp(0.45 * 1.2816), rel=0.05)
    assert np.mean(np.array(drawn) < 9) == pytest.approx(0.227, abs=0.03)
    assert 4.9 < min(drawn) < 5.5
    assert max(drawn) < 31.8


def test_difficulty_changes_lesion_sizes_and_nothing_else_of_the_anatomy():
    for index in range(20):
        plain, real = (draw_anatomy(np.random.default_rng([7, index]), 1, name) for name in ("plain", "real"))
        assert (plain.radii, plain.pelvis, plain.nodules) == (real.radii, real.pelvis, real.nodules)
        assert [lesion.centre for lesion in plain.lesions] == [lesion.centre for lesion in real.lesions]
        sizes = [(one.diameter, other.diameter) for one, other in zip(plain.lesions, real.lesions, strict=True)]
        for one, other in sizes:  # the same place in both distributions, whose ends are cut
            expected = np.clip(np.log(one / 15) / 0.3, -1.65, 1.65)
            if abs(expected) < 1.64:
                assert np.log(other / 12.6) / 0.45 == pytest.approx(expected, abs=1e-6)


def rectum(*, content: str = "gas"):
    """A canvas of stripes front to back, with a straight rectum behind its middle, and its anatomy."""
    pipe = Ellipsoid(content, (0, 20, 0), (15, 12, 1e4))
    anatomy = replace(draw_anatomy(np.random.default_rng(0), 0), pelvis=(pipe,))
    grid = sitk.Image((6, 90, 3), sitk.sitkUInt8)
    grid.SetOrigin((-2.5, -60.0, -1.0))
    canvas = Canvas(grid, np.zeros(3), ("water", "t2", "adc"))
    for array in canvas.maps.values():
        array[:] = np.arange(90, dtype=np.float32)[:, None] + 1
    return canvas, anatomy


def test_gas_displaces_signal_along_the_rows_and_leaves_none_near_it():
    canvas, anatomy = rectum()
    truth = distort(np.random.default_rng(1), canvas, anatomy)
    y = np.arange(90) - 60.0
    came_from = canvas.maps["adc"][1, :, 2] - 1 - 60.0  # each row's own number, read back
    moved = came_from - y
    front = y < 8  # of the gas, whose surface lies at y = 8
    assert moved[y == 8][0] == pytest.approx(truth["distortion_mm"], rel=0.06)
    assert 2 <= abs(truth["distortion_mm"]) <= 8
    logs = np.log(np.abs(moved[front & (y > -10)]))
    slopes = np.diff(logs)
    np.testing.assert_allclose(slopes, slopes.mean(), rtol=0.05)  # exponential
    assert 6 <= 1 / slopes.mean() <= 12
    signal = canvas.maps["water"][1, :, 2]
    jacobian = 1 + np.gradient(moved)
    far = y < 8 - truth["void_mm"] - 10
    np.testing.assert_allclose(signal[far][1:], ((came_from + 61) * jacobian)[far][1:], rtol=0.02)
    inside = np.abs(came_from - 20) < 12 + truth["void_mm"] - 1.5
    assert (signal[inside] < 0.05 * (came_from + 61)[inside]).all()


def test_without_gas_diffusion_is_left_as_it_is():
    canvas, anatomy = rectum(content="stool")
    before = {name: array.copy() for name, array in canvas.maps.items()}
    assert distort(np.random.default_rng(1), canvas, anatomy) == {"distortion_mm": 0.0, "void_mm": 0.0}
    assert all(np.array_equal(array, before[name]) for name, array in canvas.maps.items())


@pytest.mark.parametrize("content", ["gas", "stool"])
def test_a_real_exam_without_a_lesion_differs_by_what_gas_does_only(content):
    drawn = ((index, draw_anatomy(np.random.default_rng([2, index, 0]), 0)) for index in range(200))
    index = next(i for i, one in drawn if not one.lesions and content in {part.tissue for part in one.pelvis})
    plain, real = (make_study(index, 0, seed=2, coarse=4, difficulty=name) for name in ("plain", "real"))
    assert {*real.info} - {*plain.info} == {"distortion_mm", "void_mm"}
    assert plain.info.items() <= real.info.items()
    assert same(plain.t2, real.t2)
    assert same(plain.adc, real.adc) == (real.info["distortion_mm"] == 0) == (content == "stool")


def test_an_unknown_difficulty_is_refused():
    with pytest.raises(InputError, match=r"^A phantom's difficulty must be one of plain, real, got \"hard\"\.$"):
        make_study(0, 0, difficulty="hard")


# --- labels ----------------------------------------------------------------------------------------------------------


def test_positives_are_equivocal_on_both_and_negatives_are_a_mixture(studies):
    for study in studies[1::2]:
        assert (study.info["t2_grade"], study.info["diffusion_grade"]) == (1, 1)
    rng = np.random.default_rng(1)
    kinds = [draw_grades(rng, 0) for _ in range(4000)]
    assert sum(share for *_, share in MIXTURE) == pytest.approx(1)
    for name, t2, diffusion, share in MIXTURE:
        assert (t2, diffusion) != (1, 1)
        assert kinds.count((name, (t2, diffusion))) / 4000 == pytest.approx(share, abs=0.03)


@settings(max_examples=50)
@given(train=st.integers(2, 400), test=st.integers(2, 200), ratio=st.integers(1, 300), seed=st.integers(0, 9))
def test_a_plan_has_the_ratio_on_both_sides(train, test, ratio, seed):
    rows = plan_cohort(train, test, ratio, seed)
    assert [row.index for row in rows] == list(range(train + test))
    assert rows == plan_cohort(train, test, ratio, seed)
    for split, count in (("train", train), ("test", test)):
        labels = [row.label for row in rows if row.side == split]
        assert len(labels) == count
        assert 1 <= sum(labels) < count
        assert abs(sum(labels) - count / (ratio + 1)) <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": 1}, "needs train >= 2, not 1"),
        ({"test": 0}, "needs test >= 2, not 0"),
        ({"ratio": 0}, "needs ratio >= 1, not 0"),
        ({"form": "png"}, "form must be 'nifti' or 'dicom', not 'png'"),
    ],
)
def test_bad_cohorts_are_refused_before_anything_is_written(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        make_cohort(tmp_path / "cohort", **({"train": 2, "test": 2} | change))
    assert not list(tmp_path.iterdir())


# --- files -----------------------------------------------------------------------------------------------------------


def snapshot(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phantom") / "cohort"
    make_cohort(folder, train=3, test=2, ratio=2)
    return folder


def test_manifest_names_files_that_hold_the_study(cohort):
    with (cohort / "manifest.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["study", "patient", "label", "side", "t2", "adc", "hbv", "vendor"]
    assert {row["vendor"] for row in rows} == {"mri-alm"}
    assert [row["side"] for row in rows] == ["train"] * 3 + ["test"] * 2
    assert len({row["patient"] for row in rows}) == 5
    study = make_study(1, int(rows[1]["label"]))
    for name in ("t2", "adc", "hbv"):
        image = sitk.ReadImage(cohort / rows[1][name])
        np.testing.assert_array_equal(voxels(image), voxels(getattr(study, name)))
        expected = getattr(study, name)
        for corner in ((0, 0, 0), [n - 1 for n in expected.GetSize()]):
            np.testing.assert_allclose(
                image.TransformIndexToPhysicalPoint(corner), expected.TransformIndexToPhysicalPoint(corner), atol=1e-3
            )
    truth = json.loads((cohort / "truth" / f"{rows[1]['study']}.json").read_text())
    assert truth["label"] == int(rows[1]["label"])


def test_a_complete_cohort_is_left_as_it_is(cohort):
    times = {file: file.stat().st_mtime_ns for file in cohort.rglob("*.nii.gz")}
    calls = []
    make_cohort(cohort, train=3, test=2, ratio=2, progress=lambda *count: calls.append(count))
    assert calls == []
    assert times == {file: file.stat().st_mtime_ns for file in cohort.rglob("*.nii.gz")}


@pytest.mark.parametrize("lost", ["studies/phantom_0002/adc.nii.gz", "truth/phantom_0002.json", "manifest.csv"])
def test_what_is_lost_is_made_again_bit_for_bit(cohort, lost):
    before = snapshot(cohort)
    (cohort / lost).unlink()
    calls = []
    make_cohort(cohort, train=3, test=2, ratio=2, progress=lambda *count: calls.append(count))
    assert snapshot(cohort) == before
    assert calls == ([] if lost == "manifest.csv" else [(5, 5)])


def test_a_failure_half_way_leaves_no_half_study_and_is_completed(tmp_path, monkeypatch):
    folder = tmp_path / "cohort"
    real = sitk.WriteImage

    def failing(image, path, *rest):
        if "zones" in str(path):
            raise OSError(28, "No space left on device")
        real(image, path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(sitk, "WriteImage", failing)
        with pytest.raises(InputError, match="No space left"):
            make_cohort(folder, train=2, test=2)
    assert [file.name for file in folder.rglob("*") if file.is_file()] == ["cohort.json"]
    make_cohort(folder, train=2, test=2)
    assert len(list(folder.rglob("*.nii.gz"))) == 4 * len(IMAGES)


def test_another_cohort_is_never_mixed_in(cohort):
    with pytest.raises(InputError, match=r"made with seed = 0, not 1\. Choose another folder"):
        make_cohort(cohort, train=3, test=2, ratio=2, seed=1)
    with pytest.raises(InputError, match=r"made with difficulty = None, not 'real'\. Choose another folder"):
        make_cohort(cohort, train=3, test=2, ratio=2, difficulty="real")


# --- DICOM -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dicom(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dicom")
    study = make_study(2, 1)
    write_dicom_study(study, folder)
    return study, folder


def test_headers_are_valid_and_hold_no_person(dicom):
    _, folder = dicom
    files = sorted(folder.rglob("*.dcm"))
    headers = [pydicom.dcmread(file) for file in files]
    assert len({header.SOPInstanceUID for header in headers}) == len(files)
    assert len({header.StudyInstanceUID for header in headers}) == 1
    assert len({header.SeriesInstanceUID for header in headers}) == 5
    for header in headers:
        assert header.SOPClassUID == header.file_meta.MediaStorageSOPClassUID == pydicom.uid.MRImageStorage
        assert header.SOPInstanceUID == header.file_meta.MediaStorageSOPInstanceUID
        for uid in (
            header.SOPInstanceUID,
            header.SeriesInstanceUID,
            header.StudyInstanceUID,
            header.FrameOfReferenceUID,
        ):
            assert uid.is_valid
        assert header.PatientIdentityRemoved == "YES"
        assert header.PatientBirthDate == ""
        row, column = np.array(header.ImageOrientationPatient[:3]), np.array(header.ImageOrientationPatient[3:])
        assert abs(row @ column) < 1e-8
        assert row @ row == pytest.approx(1)


def test_dicom_read_back_is_the_study(dicom):
    study, folder = dicom
    (files,) = find_studies(folder)
    assert not files.failed
    assert not files.ignored
    read = read_study(files)
    assert read.warnings == []
    assert sorted(read.dwi) == sorted(study.dwi)
    pairs = [(read.t2, study.t2), (read.adc, study.adc), (read.hbv, study.hbv)]
    for found, expected in pairs + [(read.dwi[b], study.dwi[b]) for b in study.dwi]:
        np.testing.assert_array_equal(voxels(found), voxels(expected))
        for corner in ((0, 0, 0), [n - 1 for n in expected.GetSize()]):
            np.testing.assert_allclose(
                found.TransformIndexToPhysicalPoint(corner), expected.TransformIndexToPhysicalPoint(corner), atol=1e-3
            )


def test_equal_studies_give_equal_files(dicom, tmp_path):
    study, folder = dicom
    write_dicom_study(study, tmp_path)
    assert snapshot(tmp_path) == snapshot(folder)


def test_a_dicom_cohort_has_one_folder_per_study(tmp_path, monkeypatch):
    small = make_study(0, 0)
    monkeypatch.setattr("mri_alm.phantom.cohort.make_study", lambda *_, **__: small)
    manifest = make_cohort(tmp_path, train=2, test=2, form="dicom")
    with manifest.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["study", "patient", "label", "side", "dicom", "vendor"]
    assert all(len(list((tmp_path / row["dicom"]).rglob("*.dcm"))) > 100 for row in rows)


# --- the program -----------------------------------------------------------------------------------------------------


def test_program_writes_a_cohort_and_refuses_in_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "cohort"), "--train", "2", "--test", "2"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "cohort" / "manifest.csv")
    assert main([str(tmp_path / "cohort"), "--train", "3", "--test", "2"]) == 2
    assert "train = 2, not 3" in capsys.readouterr().err


def test_coarse_pixels_are_the_same_exam_on_a_coarser_t2() -> None:
    fine, coarse = make_study(3, 1, seed=7), make_study(3, 1, seed=7, coarse=3)
    assert coarse.t2.GetSpacing() == pytest.approx(np.multiply(fine.t2.GetSpacing(), (3, 3, 1)))
    assert coarse.adc.GetSpacing() == fine.adc.GetSpacing()
    assert coarse.info["lesions"] == fine.info["lesions"]
    volume = [
        np.count_nonzero(sitk.GetArrayViewFromImage(s.gland)) * np.prod(s.gland.GetSpacing()) for s in (fine, coarse)
    ]
    assert volume[1] == pytest.approx(volume[0], rel=0.05)


def test_pixels_are_not_made_finer() -> None:
    with pytest.raises(InputError, match=r"coarse must be at least 1, not 0\.5\.$"):
        make_study(0, 0, coarse=0.5)
