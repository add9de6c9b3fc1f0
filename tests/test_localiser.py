"""The gland in the middle: found on T2 by a network of another package, here one that marks whatever is bright."""

import json
import math
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import SimpleITK as sitk  # noqa: N813
from onnx import TensorProto, helper
from small_cohort import read_rows, train, write_cohort, write_manifest

import mri_alm.localiser
from mri_alm.bundle.transforms import LoadRegisteredExamd
from mri_alm.cohort.manifest import read_manifest
from mri_alm.cohort.overview import summary_text
from mri_alm.cohort.prepare_cohort import Order, prepare_cohort
from mri_alm.cohort.protocol import training_protocol, unlike
from mri_alm.errors import InputError
from mri_alm.imaging.exam import load_images
from mri_alm.imaging.registration import empty_image, image_centre, mask_centre
from mri_alm.localiser import SIZE, find_gland
from mri_alm.phantom.study import make_study

SHARED = Path(__file__).parents[2] / "shared" / "data" / "prostate"
NAME = "lavlab-taps 0.9"
Installed = Callable[..., None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """A package of the name that the localiser wants, whose network says 20 (x - 3) in a window of its own."""

    def install(*, window: tuple[int, ...] = SIZE) -> None:
        shape = ["batch", 1, *window]
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("image", "logit")]
        nodes = [
            helper.make_node("Sub", ["image", "three"], ["above"]),
            helper.make_node("Mul", ["above", "k"], ["logit"]),
        ]
        numbers = [
            helper.make_tensor(name, TensorProto.FLOAT, [], [value]) for name, value in (("three", 3), ("k", 20))
        ]
        graph = helper.make_graph(nodes, "bright", ends[:1], ends[1:], numbers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        place = tmp_path / "site" / "taps" / "resources" / "model_v1.onnx"
        place.parent.mkdir(parents=True)
        onnx.save(model, place)
        about = tmp_path / "site" / "lavlab_taps-0.9.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lavlab-taps\nVersion: 0.9\n")
        monkeypatch.syspath_prepend(tmp_path / "site")

    mri_alm.localiser._network.cache_clear()
    yield install
    mri_alm.localiser._network.cache_clear()


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(mri_alm.localiser, "distribution", nothing)


def ellipsoid(
    at: tuple[float, float, float], half_axes_mm: tuple[float, float, float], *, order: str = "LPS"
) -> sitk.Image:
    """T2 of 200 x 200 x 90 mm about (10, -20, 30), oblique by 20 degrees about x; bright within the ellipsoid."""
    cosine, sine = math.cos(0.35), math.sin(0.35)
    image = empty_image((200, 200, 30), (1, 1, 3), (1, 0, 0, 0, cosine, -sine, 0, sine, cosine), (10, -20, 30))
    grid = np.meshgrid(*map(np.arange, image.GetSize()), indexing="ij")
    index = np.stack([axis.ravel() for axis in grid]).astype(float)
    turn = np.array(image.GetDirection()).reshape(3, 3)
    points = np.array(image.GetOrigin())[:, None] + turn @ (index * np.array(image.GetSpacing())[:, None])
    away = turn.T @ (points - np.array(at)[:, None]) / np.array(half_axes_mm)[:, None]
    inside = (away**2).sum(0).reshape(image.GetSize()) <= 1
    noise = np.random.default_rng(0).normal(100, 5, image.GetSize())
    found = sitk.GetImageFromArray(np.where(inside, 400, noise).astype(np.float32).transpose(2, 1, 0))
    found.CopyInformation(image)
    return sitk.DICOMOrient(found, order)


@pytest.mark.parametrize("order", ["LPS", "RAS", "PIL"])
def test_the_middle_and_the_volume_of_what_the_network_marks(installed: Installed, order: str) -> None:
    installed()
    facts: dict[str, Any] = {"warnings": []}
    found = find_gland(ellipsoid((15, -10, 36), (25, 20, 24), order=order), facts)
    assert found == pytest.approx((15, -10, 36), abs=1.5)  # half of a slice
    assert facts["gland_ml"] == pytest.approx(4 / 3 * math.pi * 2.5 * 2.0 * 2.4, rel=0.04)
    assert 0.95 < facts["gland_confidence"] <= 1
    assert (facts["crop_about"], facts["warnings"]) == (f"the gland by {NAME}", [])


def test_what_the_first_window_cuts_is_looked_at_again(installed: Installed) -> None:
    """The window ends 51 mm from T2's centre, the ellipsoid reaches to 62 mm: one pass finds its middle 5 mm off."""
    installed()
    facts: dict[str, Any] = {"warnings": []}
    assert find_gland(ellipsoid((50, -20, 30), (22, 20, 20)), facts) == pytest.approx((50, -20, 30), abs=1.5)
    assert facts["gland_ml"] == pytest.approx(4 / 3 * math.pi * 2.2 * 2.0 * 2.0, rel=0.04)
    assert facts["warnings"] == []


def test_what_no_window_holds_is_said(installed: Installed) -> None:
    installed()
    facts: dict[str, Any] = {"warnings": []}
    assert find_gland(ellipsoid((10, -20, 30), (60, 30, 30)), facts) is not None
    assert facts["warnings"] == [f"The gland that {NAME} found reaches the border of what it sees."]


def test_of_several_pieces_the_largest_counts_and_small_ones_are_none(installed: Installed) -> None:
    installed()
    values = sitk.GetArrayFromImage(ellipsoid((10, -20, 30), (22, 20, 20)))
    values[2:5, 60:80, 60:80] = 400
    image = ellipsoid((10, -20, 30), (22, 20, 20))
    both = sitk.GetImageFromArray(values)
    both.CopyInformation(image)
    assert find_gland(both, {"warnings": []}) == pytest.approx((10, -20, 30), abs=1.5)
    for empty in (ellipsoid((10, -20, 30), (12, 12, 12)), image * 0, image * 0 + 7):  # 7 ml; nothing at all
        facts: dict[str, Any] = {"warnings": []}
        assert find_gland(empty, facts) is None
        assert facts == {"warnings": [f"{NAME} found no gland on T2: cropped about T2's centre."]}


def test_without_the_package_it_is_refused_before_anything_is_read(absent: None, tmp_path: Path) -> None:
    text = r"needs the package lavlab-taps.*pip install --no-deps lavlab-taps.*crop_center_mm"
    with pytest.raises(InputError, match=text):
        LoadRegisteredExamd(localise=True)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "t2.nii.gz").write_bytes(b"")
    with pytest.raises(InputError, match=text):
        prepare_cohort(Order(tmp_path / "in", tmp_path / "out", localise=True))
    LoadRegisteredExamd()


def test_a_network_of_another_kind_is_refused(installed: Installed, tmp_path: Path) -> None:
    installed(window=(64, 64, 32))
    image = ellipsoid((10, -20, 30), (22, 20, 20))
    with pytest.raises(InputError, match=rf"of {NAME} takes a window of \[1, 64, 64, 32\], not \[1, 128, 128, 32\]"):
        find_gland(image, {"warnings": []})
    (tmp_path / "site" / "taps" / "resources" / "model_v1.onnx").write_bytes(b"no network")
    with pytest.raises(InputError, match=rf"network of {NAME} cannot be read .*Install it again"):
        find_gland(image, {"warnings": []})


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two exams of one phantom with a bright ball in T2; one says itself where to crop."""
    folder, study = tmp_path_factory.mktemp("exams"), make_study(3, 1)
    centre = image_centre(study.t2)
    values = sitk.GetArrayFromImage(study.t2)
    middle = study.t2.TransformPhysicalPointToContinuousIndex(np.add(centre, (8, 6, -3)).tolist())
    away = np.indices(values.shape)[::-1].T - np.array(middle)
    ball = np.linalg.norm(away * study.t2.GetSpacing(), axis=-1).T < 18
    t2 = sitk.GetImageFromArray(np.where(ball, 6 * values.max(), values))
    t2.CopyInformation(study.t2)
    for exam, image in (("A", t2), ("B", study.t2)):
        for name, other in (("t2", image), ("adc", study.adc), ("hbv", study.hbv)):
            sitk.WriteImage(other, str(folder / f"{exam}_{name}.nii"))
    own = " ".join(f"{value:.2f}" for value in centre)
    images = {exam: [f"{exam}_{name}.nii" for name in ("t2", "adc", "hbv")] for exam in "AB"}
    rows = [["A", "A", "1", "train", *images["A"], ""], ["B", "B", "0", "train", *images["B"], own]]
    columns = ("study", "patient", "label", "side", "t2", "adc", "hbv", "crop_center_mm")
    return write_manifest(folder / "exams.csv", rows, columns)


def test_a_cohort_and_a_new_exam_are_cropped_about_the_same_point(
    installed: Installed, table: Path, tmp_path: Path
) -> None:
    installed()
    order = Order(table, tmp_path / "cohort", workers=1, localise=True)
    outcome = prepare_cohort(order)
    rows = {row["adc_source"] + row["crop_about"]: row for row in read_rows(order.output / "manifest.csv")}
    assert set(rows) == {f"giventhe gland by {NAME}", "given"}
    found, own = rows[f"giventhe gland by {NAME}"], rows["given"]
    assert float(found["gland_ml"]) == pytest.approx(4 / 3 * math.pi * 1.8**3, rel=0.1)
    assert float(found["gland_confidence"]) > 0.9
    assert (own["gland_ml"], own["gland_confidence"]) == ("", "")
    assert json.loads((order.output / "cohort.json").read_text())["localiser"] == NAME
    assert "ml, mean probability" in (order.output / "qc.html").read_text()
    assert summary_text(order, outcome).endswith("manifest.csv --localise True")
    # The exam itself, cropped by the transform: the same point, and the same words in the record.
    exams = read_manifest(table)
    transform = LoadRegisteredExamd((2.8, 2.8, 3), (40, 40, 28), as_prepared=True, localise=True)
    reports = [transform(exam.item())["report"] for exam in exams]
    assert " ".join(f"{value:g}" for value in reports[0]["crop_center_mm"]) == found["crop_center_mm"]
    assert " ".join(f"{value:g}" for value in reports[1]["crop_center_mm"]) == own["crop_center_mm"]
    prepared = [transform(exam.item())["report"] for exam in read_manifest(order.output / "manifest.csv")]
    assert sorted(one.get("crop_about", "") for one in prepared) == ["", f"the gland by {NAME}"]
    # Prepared again without: nothing is kept, as the result depends on it.
    again = prepare_cohort(Order(table, order.output, workers=1, resume=True))
    assert (again.kept, [row["crop_about"] for row in again.rows]) == (0, ["", ""])


def test_a_model_says_what_its_exams_were_cropped_about(installed: Installed, table: Path) -> None:
    installed()
    exams = [exam.item() for exam in read_manifest(table)]
    looking, not_looking = (LoadRegisteredExamd(localise=localise) for localise in (True, False))
    found, own, plain = (
        looking(exams[0])["report"], looking(exams[1])["report"], not_looking(exams[0])["report"]
    )  # fmt: skip
    trained = training_protocol([found, found])
    assert trained["words"]["crop_about"] == {"known": 2, "values": [f"the gland by {NAME}"]}
    assert unlike(found, trained) == []
    assert f"cropped about T2's centre (trained on the gland by {NAME})" in unlike(plain, trained)[0]
    assert f"cropped about a point or mask given (trained on the gland by {NAME})" in unlike(own, trained)[0]
    del trained["words"]["crop_about"]  # of a model of before
    assert unlike(plain, trained) == []


def test_training_on_such_a_cohort_without_looking_for_glands_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read_rows(manifest := write_cohort(tmp_path, 18, 6))
    columns = (*rows[0], "crop_about")
    write_manifest(manifest, [[*row.values(), f"the gland by {NAME}"] for row in rows], columns)
    train(manifest, tmp_path / "run", splits=2)
    assert f"The exams are cropped about the gland by {NAME}; new ones" in (told := capsys.readouterr().out)
    assert "Add --localise True" in told


@pytest.mark.skipif(not SHARED.exists(), reason="needs the public DICOM files of ../shared")
@pytest.mark.parametrize("name", ["ProstateX-0000", "ProstateX-0001"])
def test_the_network_itself_on_real_exams(name: str) -> None:
    try:
        distribution("lavlab-taps")
    except PackageNotFoundError:
        pytest.skip("needs the package lavlab-taps")
    images, facts = load_images({"dicom": SHARED / "prostatex" / name})
    found = find_gland(images["t2"], facts)
    mask = sitk.ReadImage(str(SHARED / "masks" / f"{name}_gland.nii.gz"))
    assert found is not None
    assert math.dist(found, mask_centre(mask)) < 5
    millilitres = np.prod(mask.GetSpacing()) * (sitk.GetArrayFromImage(mask) > 0).sum() / 1000
    assert facts["gland_ml"] == pytest.approx(millilitres, rel=0.15)
