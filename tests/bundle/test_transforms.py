import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor, PersistentDataset, pickle_hashing
from monai.data.utils import json_hashing

from mri_alm.bundle.transforms import LoadRegisteredExamd, collate, to_metatensor, to_sitk
from mri_alm.errors import StudyError
from mri_alm.imaging.diffusion import fit_adc
from mri_alm.imaging.exam import load_images
from mri_alm.imaging.registration import Registration, common_grid, onto_grid
from mri_alm.phantom.dicom import write_dicom_study
from mri_alm.phantom.study import PhantomStudy, make_study

LPS_TO_RAS = np.array([-1.0, -1.0, 1.0])


@pytest.fixture(scope="module")
def study() -> PhantomStudy:
    """An exam whose diffusion lies clearly off T2's place."""
    return next(study for study in (make_study(i, 1) for i in range(20)) if np.linalg.norm(study.info["shift_mm"]) > 3)


@pytest.fixture(scope="module")
def files(study: PhantomStudy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    for name in ("t2", "adc", "hbv"):
        for ending in ("nii.gz", "mha"):
            sitk.WriteImage(getattr(study, name), str(folder / f"{name}.{ending}"))
    return {f"{name}.{ending}": str(folder / f"{name}.{ending}") for name in ("t2", "adc", "hbv")
            for ending in ("nii.gz", "mha")}  # fmt: skip


@pytest.fixture(scope="module")
def dicom(study: PhantomStudy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dicom")
    write_dicom_study(study, folder)
    return folder


def load(**paths: Any) -> dict[Any, Any]:
    images, facts = load_images(paths)
    return {name: to_metatensor(image) for name, image in images.items()} | {"report": facts}


def same_places(found: MetaTensor, image: sitk.Image, tolerance_mm: float = 1e-3) -> None:
    """Every corner voxel lies at the same physical point and holds the same value in both."""
    assert tuple(found.shape[1:]) == image.GetSize()
    for index in np.ndindex(2, 2, 2):
        voxel = [i * (n - 1) for i, n in zip(index, image.GetSize(), strict=True)]
        place = (found.affine.numpy() @ [*voxel, 1])[:3]
        expected = np.array(image.TransformIndexToPhysicalPoint(voxel)) * LPS_TO_RAS
        assert np.abs(place - expected).max() < tolerance_mm
        assert found[(0, *voxel)].item() == pytest.approx(image[voxel], rel=1e-6)


# --- Between SimpleITK and MONAI ------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    size=st.tuples(*[st.integers(1, 5)] * 3),
    spacing=st.tuples(*[st.floats(0.3, 5)] * 3),
    origin=st.tuples(*[st.floats(-300, 300)] * 3),
    angles=st.tuples(*[st.floats(-3, 3)] * 3),
    flip=st.booleans(),
)
def test_round_trip_keeps_voxels_and_physical_points(
    size: tuple[int, ...], spacing: tuple[float, ...], origin: tuple[float, ...], angles: tuple[float, ...], flip: bool
) -> None:
    values = np.random.default_rng(0).normal(size=size[::-1]).astype(np.float32)
    image = sitk.GetImageFromArray(values)
    image.SetSpacing(spacing)
    image.SetOrigin(origin)
    matrix = np.array(sitk.Euler3DTransform((0, 0, 0), *angles).GetMatrix()).reshape(3, 3)
    image.SetDirection((matrix * [1, 1, -1 if flip else 1]).flatten().tolist())  # a left-handed grid as well
    tensor = to_metatensor(image)
    same_places(tensor, image)
    back = to_sitk(tensor)
    assert np.array_equal(sitk.GetArrayFromImage(back), values)
    for got, expected in ((back.GetSpacing(), spacing), (back.GetOrigin(), origin),
                          (back.GetDirection(), image.GetDirection())):  # fmt: skip
        assert got == pytest.approx(expected, abs=1e-9)


def test_tensors_are_float32_with_a_channel_and_a_float64_affine() -> None:
    tensor = to_metatensor(sitk.Image(2, 3, 4, sitk.sitkInt16))
    assert (tuple(tensor.shape), tensor.dtype, tensor.affine.dtype) == ((1, 2, 3, 4), torch.float32, torch.float64)


# --- Loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["nii.gz", "mha"])
def test_files_load_where_they_lie(study: PhantomStudy, files: dict[str, str], ending: str) -> None:
    item = load(**{name: files[f"{name}.{ending}"] for name in ("t2", "adc", "hbv")})
    for name in ("t2", "adc", "hbv"):
        same_places(item[name], getattr(study, name), 1e-2 if ending == "nii.gz" else 1e-6)
    assert (item["report"]["warnings"], item["report"]["adc_source"]) == ([], "given")


def test_dicom_study_loads_the_same_exam(study: PhantomStudy, dicom: Path) -> None:
    item = load(dicom=str(dicom))
    for name in ("t2", "adc", "hbv"):
        same_places(item[name], getattr(study, name), 0.05)
    report = item["report"]
    assert report["files_seen"] == sum(1 for path in dicom.rglob("*") if path.is_file())
    assert isinstance(report["warnings"], list)


def test_folders_of_one_dicom_series_each(study: PhantomStudy, dicom: Path) -> None:
    folder = {path.name.split("_", 1)[1]: str(path) for path in dicom.iterdir()}
    item = load(t2=folder["t2_tse_tra"], adc=folder["ep2d_diff_tra_ADC"], hbv=folder["ep2d_diff_tra_CALC_BVAL"])
    for name in ("t2", "adc", "hbv"):
        same_places(item[name], getattr(study, name), 0.05)


def test_a_multi_b_folder_gives_a_fitted_adc_and_its_highest_b(study: PhantomStudy, dicom: Path) -> None:
    folder = {path.name.split("_", 1)[1]: str(path) for path in dicom.iterdir()}
    item = load(t2=folder["t2_tse_tra"], dwi=folder["ep2d_diff_tra"])
    same_places(item["hbv"], study.dwi[max(study.dwi)], 0.05)
    same_places(item["adc"], fit_adc(study.dwi), 0.05)
    report = item["report"]
    listed = ", ".join(f"{b:g}" for b in sorted(study.dwi))
    assert (report["b_values"], report["adc_source"]) == (sorted(study.dwi), f"fitted over b = {listed}")
    with pytest.raises(StudyError, match=r"Column hbv: the series holds 3 b-values; use column dwi\."):
        load(t2=folder["t2_tse_tra"], adc=folder["ep2d_diff_tra_ADC"], hbv=folder["ep2d_diff_tra"])


def write_4d(path: Path, volumes: list[sitk.Image], table: str) -> str:
    sitk.WriteImage(sitk.JoinSeries(volumes), str(path))
    path.with_name(path.name.removesuffix(".gz").removesuffix(".nii") + ".bval").write_text(table)
    return str(path)


@pytest.mark.parametrize("name", ["dwi.nii.gz", "S01.dwi.nii.gz", "1.2.840.1.nii"])
def test_4d_diffusion_with_its_table_of_b_values(
    study: PhantomStudy, files: dict[str, str], tmp_path: Path, name: str
) -> None:
    values = sorted(study.dwi)
    # Real tables list measured values, in any order, several images of one setting.
    order = [values[2], values[0], values[2], values[1]]
    table = " ".join(f"{b + {0: 4, 2: -4}.get(i, 0):g}" for i, b in enumerate(order)) + "\n"
    images = [sitk.Cast(study.dwi[b], sitk.sitkFloat32) for b in order]
    item = load(t2=files["t2.mha"], dwi=write_4d(tmp_path / name, images, table))
    same_places(item["hbv"], study.dwi[values[2]], 1e-2)
    same_places(item["adc"], fit_adc(study.dwi), 1e-2)
    assert item["report"]["b_values"] == values


def test_4d_directions_are_averaged_geometrically(files: dict[str, str], tmp_path: Path) -> None:
    """As in DICOM: the mean diffusivity of anisotropic tissue, which an arithmetic mean would miss."""
    rates = np.array([800.0, 1200.0, 1800.0])
    table = [0.0, *[800.0] * 3]
    volumes = []
    for b, rate in zip(table, [0.0, *rates], strict=True):
        volumes.append(sitk.Image(16, 16, 8, sitk.sitkFloat32) + 1000.0 * float(np.exp(-b * rate * 1e-6)))
        volumes[-1].SetSpacing((2.0, 2.0, 3.0))
    item = load(t2=files["t2.mha"], dwi=write_4d(tmp_path / "dwi.nii", volumes, " ".join(map(str, table))))
    np.testing.assert_allclose(item["adc"].numpy(), rates.mean(), rtol=1e-3)
    report = item["report"]
    assert (report["adc_source"], report["warnings"]) == ("fitted over b = 0, 800", [])


def test_a_fit_over_close_b_values_is_warned_of_for_4d_too(
    study: PhantomStudy, files: dict[str, str], tmp_path: Path
) -> None:
    images = [sitk.Cast(study.dwi[b], sitk.sitkFloat32) for b in sorted(study.dwi)[:2]]
    report = load(t2=files["t2.mha"], dwi=write_4d(tmp_path / "dwi.nii", images, "100 400"))["report"]
    assert report["warnings"] == ["ADC fitted over a span of 300 s/mm2 only; 400 or more is advised."]


def test_a_given_adc_wins_over_the_fit(study: PhantomStudy, files: dict[str, str], tmp_path: Path) -> None:
    images = [sitk.Cast(study.dwi[b], sitk.sitkFloat32) for b in sorted(study.dwi)]
    dwi = write_4d(tmp_path / "dwi.nii", images, " ".join(map(str, sorted(study.dwi))))
    item = load(t2=files["t2.mha"], adc=files["adc.mha"], dwi=dwi)
    same_places(item["adc"], study.adc, 1e-6)
    same_places(item["hbv"], images[-1], 1e-2)
    assert item["report"]["adc_source"] == "given"


@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e-6])
def test_adc_units_come_out_the_same(study: PhantomStudy, files: dict[str, str], tmp_path: Path, factor: float) -> None:
    sitk.WriteImage(sitk.Cast(study.adc, sitk.sitkFloat64) * factor, str(tmp_path / "adc.mha"))
    item = load(t2=files["t2.mha"], adc=str(tmp_path / "adc.mha"), hbv=files["hbv.mha"])
    expected = sitk.GetArrayFromImage(study.adc).transpose(2, 1, 0)
    np.testing.assert_allclose(item["adc"][0].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, "there is no .bval file beside the image, so its b-values are unknown."),
        ("0 800", "does not fit 2 b-values in its .bval file."),
        ("0 b400 800", "its .bval file holds something that is no number."),
    ],
)
def test_b_values_that_cannot_be_used(
    study: PhantomStudy, files: dict[str, str], tmp_path: Path, table: str | None, message: str
) -> None:
    images = [sitk.Cast(study.dwi[b], sitk.sitkFloat32) for b in sorted(study.dwi)]
    dwi = write_4d(tmp_path / "MUELLER_HANS.nii.gz", images, table or "")
    if table is None:
        (tmp_path / "MUELLER_HANS.bval").unlink()
    with pytest.raises(StudyError, match=re.escape(message)) as caught:
        load(t2=files["t2.mha"], dwi=dwi)
    assert caught.value.code == "b_unknown"
    assert "MUELLER" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no image at all"])
def test_an_unreadable_file_is_named_by_column_not_by_path(
    files: dict[str, str], tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "MUELLER_HANS.nii.gz"
    path.write_bytes(content)
    with pytest.raises(StudyError, match=r"^Column adc: the \.gz file is no image that can be read\.") as caught:
        load(t2=files["t2.mha"], adc=str(path), hbv=files["hbv.mha"])
    assert caught.value.code == "unreadable"
    shown = str(caught.value) + repr(caught.value.__cause__) + "".join(capfd.readouterr())
    assert "MUELLER" not in shown


def test_a_4d_file_where_one_volume_is_needed(study: PhantomStudy, files: dict[str, str], tmp_path: Path) -> None:
    path = write_4d(tmp_path / "x.nii", [sitk.Cast(study.hbv, sitk.sitkFloat32)] * 2, "")
    with pytest.raises(StudyError, match=r"Column hbv: the image has 4 dimensions, 3 are needed\."):
        load(t2=files["t2.mha"], adc=files["adc.mha"], hbv=path)


def test_a_folder_with_two_studies(study: PhantomStudy, dicom: Path, tmp_path: Path) -> None:
    for number, part in enumerate((study, make_study(19, 0))):
        series = part.t2[:, :, :5]  # a localizer's worth of slices is enough
        small = PhantomStudy(series, part.adc, part.hbv, {}, part.gland, part.zones, part.info)
        write_dicom_study(small, tmp_path / str(number))
    with pytest.raises(StudyError, match=r"The folder holds 2 DICOM studies\. Give each a folder") as caught:
        load(dicom=str(tmp_path))
    assert caught.value.code == "several_studies"


# --- Registration and the common grid -------------------------------------------------------------------------------


def images(study: PhantomStudy) -> dict[Any, Any]:
    found = {name: to_metatensor(getattr(study, name)) for name in ("t2", "adc", "hbv")}
    return found | {"report": {"warnings": []}}


def onto(item: dict[Any, Any], *, register: bool = True) -> dict[Any, Any]:
    """Images on their own grids -> all on one of 40 x 40 x 20 voxels of 2 x 2 x 3 mm."""
    own = {name: to_sitk(item[name]) for name in ("t2", "adc", "hbv")}
    found, facts = onto_grid(own, item["report"], spacing=(2, 2, 3), size=(40, 40, 20), register=register)
    return {name: to_metatensor(image) for name, image in found.items()} | {"report": facts}


@pytest.fixture(scope="module")
def registered(study: PhantomStudy) -> dict[Any, Any]:
    return onto(images(study))


def test_registration_finds_the_phantom_s_shift(study: PhantomStudy, registered: dict[Any, Any]) -> None:
    report = registered["report"]
    assert report["registration"]["accepted"] is True
    assert report["registration"]["shift_mm"] == pytest.approx(np.linalg.norm(study.info["shift_mm"]), abs=1.5)
    assert report["registration"]["mi_after"] > report["registration"]["mi_before"]
    assert report["warnings"] == []


def test_registered_diffusion_lies_on_t2(study: PhantomStudy, registered: dict[Any, Any]) -> None:
    """Against the truth: what lies at p on T2 lies at p + shift on the diffusion images."""
    grid = common_grid(study.t2, spacing_mm=(2, 2, 3), size=(40, 40, 20))
    errors = {}
    for name, shift in (("registered", None), ("scanner", (0.0, 0.0, 0.0)), ("truth", study.info["shift_mm"])):
        truth = sitk.Resample(study.adc, grid, sitk.TranslationTransform(3, study.info["shift_mm"]), sitk.sitkLinear)
        if shift is None:
            found = registered["adc"][0].numpy()
        else:
            image = sitk.Resample(study.adc, grid, sitk.TranslationTransform(3, shift), sitk.sitkLinear)
            found = sitk.GetArrayFromImage(image).transpose(2, 1, 0)
        errors[name] = float(np.abs(found - sitk.GetArrayFromImage(truth).transpose(2, 1, 0)).mean())
    assert errors["truth"] == 0
    assert errors["registered"] < 0.5 * errors["scanner"]


def test_all_images_share_one_grid_about_t2_s_centre(study: PhantomStudy, registered: dict[Any, Any]) -> None:
    centre = np.array(study.t2.TransformContinuousIndexToPhysicalPoint([(n - 1) / 2 for n in study.t2.GetSize()]))
    for name in ("t2", "adc", "hbv", "valid"):
        assert tuple(registered[name].shape) == (1, 40, 40, 20)
        affine = registered[name].affine.numpy()
        assert np.linalg.norm(affine[:3, :3], axis=0) == pytest.approx([2, 2, 3])
        assert (affine @ [19.5, 19.5, 9.5, 1])[:3] == pytest.approx(centre * LPS_TO_RAS, abs=1e-6)
    assert set(registered["valid"].unique().tolist()) <= {0.0, 1.0}
    share = registered["valid"].mean().item()
    assert registered["report"]["coverage"] == pytest.approx(share, abs=1e-4)


def test_without_registration_diffusion_stays_where_the_scanner_put_it(study: PhantomStudy) -> None:
    item = onto(images(study), register=False)
    grid = common_grid(study.t2, spacing_mm=(2, 2, 3), size=(40, 40, 20))
    expected = sitk.Resample(sitk.Cast(study.adc, sitk.sitkFloat32), grid, sitk.Transform(), sitk.sitkLinear)
    inside = item["valid"][0].numpy() > 0
    found, expected_array = item["adc"][0].numpy(), sitk.GetArrayFromImage(expected).transpose(2, 1, 0)
    np.testing.assert_allclose(found[inside], expected_array[inside], atol=0.01)
    assert "registration" not in item["report"]


def test_a_refused_registration_is_a_warning(study: PhantomStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Registration(sitk.Transform(3, sitk.sitkIdentity), False, 0.2, 0.21, 20.0, 3.0, "implausible movement")
    monkeypatch.setattr("mri_alm.imaging.registration.register_rigid", lambda *_: refused)
    report = onto(images(study) | {"report": {"warnings": ["an earlier one"]}})["report"]
    assert report["registration"] == {
        "accepted": False, "reason": "implausible movement", "mi_before": 0.2, "mi_after": 0.21, "shift_mm": 20.0,
        "rotation_deg": 3.0,
    }  # fmt: skip
    assert report["warnings"] == [
        "an earlier one",
        "Registration refused, diffusion left where the scanner put it: implausible movement",
    ]


@pytest.mark.parametrize("register", [True, False])
def test_diffusion_of_another_place_is_refused(study: PhantomStudy, register: bool) -> None:
    item = images(study)
    for name in ("adc", "hbv"):
        affine = item[name].affine.clone()
        affine[2, 3] += 200
        item[name] = MetaTensor(item[name].as_tensor(), affine=affine)
    message = "Only 0% of the gland's region, 64 x 64 x 48 mm about T2's centre, has diffusion data. Do they belong"
    with pytest.raises(StudyError, match=re.escape(message)) as caught:
        onto(item, register=register)
    assert caught.value.code == "no_overlap"


def of_field(field_mm: tuple[float, ...], middle_mm: float = 0.0) -> dict[str, Any]:
    """The report of diffusion with a given field of view on a grid of 128 x 128 x 84 mm about the origin."""
    t2, adc = (
        sitk.Image(100, 100, 46, sitk.sitkFloat32),
        sitk.Image([round(mm / 2) for mm in field_mm], sitk.sitkFloat32),
    )
    for image in (t2, adc):
        image.SetSpacing((2.0, 2.0, 2.0))
        image.SetOrigin([1.0 - n for n in image.GetSize()])
    adc.SetOrigin(np.add(adc.GetOrigin(), (0.0, middle_mm, 0.0)).tolist())
    maps = {"t2": t2, "adc": adc, "hbv": adc}
    return onto_grid(maps, {"warnings": []}, spacing=(1, 1, 3), size=(128, 128, 28), register=False)[1]


def test_a_zoomed_field_of_view_that_covers_the_gland_is_a_warning() -> None:
    warning = "Only 39% of the grid has diffusion data: its field of view is small."
    assert of_field((140, 70, 60))["warnings"] == [warning]
    assert of_field((140, 140, 90))["warnings"] == []


def test_a_field_of_view_beside_the_gland_is_refused() -> None:
    with pytest.raises(StudyError, match="Only 42% of the gland's region") as caught:
        of_field((140, 70, 90), middle_mm=40)
    assert caught.value.code == "no_overlap"


# --- The transform, the cache and batches ---------------------------------------------------------------------------


def test_the_cache_reads_back_without_pickles(study: PhantomStudy, dicom: Path, tmp_path: Path) -> None:
    data = PersistentDataset(
        [{"dicom": str(dicom), "label": 1.0, "index": 3}],
        [LoadRegisteredExamd((4, 4, 6), (16, 16, 8), register=False)],
        cache_dir=tmp_path / "cache",
        hash_func=json_hashing,
        hash_transform=pickle_hashing,
    )
    fresh, cached = data[0], data[0]
    (file,) = (tmp_path / "cache").iterdir()
    torch.load(file, weights_only=True)
    for name in ("t2", "adc", "hbv", "valid"):
        assert torch.equal(fresh[name], cached[name])
        assert fresh[name].shape == (1, 16, 16, 8)
    assert cached["report"] == fresh["report"] == json.loads(json.dumps(fresh["report"]))
    assert {"files_seen", "b_values", "coverage"} <= fresh["report"].keys()
    assert (fresh["label"], fresh["index"]) == (1.0, 3)


def test_an_exam_is_loaded_and_registered_about_the_point_it_names(study: PhantomStudy, files: dict[str, str]) -> None:
    paths = {name: files[f"{name}.mha"] for name in ("t2", "adc", "hbv")}
    x, y, z = study.info["gland_centre_mm"]
    item = LoadRegisteredExamd((2, 2, 3), (40, 40, 20))(paths | {"crop_center_mm": f"{x} {y} {z}"})
    assert (item["t2"].affine.numpy() @ [19.5, 19.5, 9.5, 1])[:3] == pytest.approx([-x, -y, z], abs=1e-3)
    assert item["report"]["registration"]["accepted"] is True


@pytest.mark.parametrize("order", ["RAS", "LAS", "RPI", "SPL"])
def test_one_exam_is_one_whatever_the_order_of_its_voxels(
    study: PhantomStudy, files: dict[str, str], tmp_path: Path, order: str
) -> None:
    """As programs store images; a model of before takes them as they are stored, and says so."""
    exam = {name: files[f"{name}.mha"] for name in ("t2", "adc", "hbv")}
    other = {name: str(tmp_path / f"{name}.mha") for name in exam}
    for name, path in exam.items():
        sitk.WriteImage(sitk.DICOMOrient(sitk.ReadImage(path), order), other[name])
    now, before = (LoadRegisteredExamd((2.8, 2.8, 3), (40, 40, 28), as_prepared=True, lps=lps) for lps in (True, False))
    expected, found = now(exam), now(other)
    for name in ("t2", "adc", "hbv", "valid", "t2_valid"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(found[name].affine, expected[name].affine, atol=1e-4)
    assert found["report"]["t2_size"] == expected["report"]["t2_size"]
    assert not any("order" in text for text in (*found["report"]["warnings"], *before(exam)["report"]["warnings"]))
    if order != "SPL":  # its slices would be taken for rows, and the grid leave T2
        assert f"T2's axes are stored in the order {order}, and this model" in "\n".join(
            before(other)["report"]["warnings"]
        )


def test_batches_keep_reports_of_any_form() -> None:
    items = [{"image": torch.zeros(1, 2), "study": "a", "report": {"warnings": ["w"]}},
             {"image": torch.ones(1, 2), "study": "b", "report": {"b_values": [0.0, 800.0]}}]  # fmt: skip
    batch = collate(items)
    assert batch["report"] == [{"warnings": ["w"]}, {"b_values": [0.0, 800.0]}]
    assert batch["image"].shape == (2, 1, 2)
    assert batch["study"] == ["a", "b"]
