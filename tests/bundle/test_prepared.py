"""Normalised within masks, the same score from a prepared cohort as from the exam itself, exams without high b."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
import torch
from monai.bundle import ConfigParser
from monai.data import MetaTensor
from monai.transforms import ClipIntensityPercentiles, Compose, NormalizeIntensity
from small_cohort import COLUMNS, read_rows, train, write_cohort, write_manifest

from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.bundle.transforms import LoadRegisteredExamd, NormalizeWithinMaskd, without_hbv
from mri_alm.cohort.manifest import read_manifest
from mri_alm.cohort.prepare_cohort import Order, prepare_cohort
from mri_alm.errors import InputError, StudyError
from mri_alm.imaging.registration import onto_grid
from mri_alm.networks import TwoBranchCNN
from mri_alm.phantom.study import PhantomStudy, make_study

SHARED = Path(__file__).parents[3] / "shared" / "data" / "prostate" / "prostatex"


@pytest.fixture(scope="module")
def study() -> PhantomStudy:
    return make_study(3, 1)


# --- Normalised within masks ----------------------------------------------------------------------------------------


def normalised(values: Any, inside: Any, lower: float = 0, upper: float = 100) -> np.ndarray:
    item = {"t2": MetaTensor(torch.tensor(values)), "t2_valid": MetaTensor(torch.tensor(inside))}
    found: np.ndarray = NormalizeWithinMaskd("t2", "t2_valid", lower=lower, upper=upper)(item)["t2"].numpy()
    assert found.dtype == np.float32
    return found


def test_only_voxels_within_the_mask_count_and_the_others_become_the_mean() -> None:
    # Of 1, 3, 5 and 7 the mean is 4 and the standard deviation the square root of 5.
    values, inside = [1.0, 3.0, 5.0, 7.0, 0.0, 1e-12, 900.0], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    expected = [*(np.array([-3, -1, 1, 3]) / 5**0.5), 0, 0, 0]
    np.testing.assert_allclose(normalised(values, inside), expected, rtol=1e-6)
    # A zero within the mask is tissue like any other. The percentiles, too, are of the mask: 25 % of 0 ... 6 is 1.5.
    np.testing.assert_allclose(normalised([0.0, 2.0, 4.0, 6.0, 9.0], [1.0] * 4 + [0.0], 25, 75),
                               [*(np.array([-1.5, -1, 1, 1.5]) / 1.625**0.5), 0], rtol=1e-6)  # fmt: skip
    assert normalised([5.0, 5.0, 9.0], [1.0, 1.0, 0.0]).tolist() == [0, 0, 0]
    assert normalised([5.0, 6.0], [0.0, 0.0]).tolist() == [0, 0]


def test_where_all_voxels_are_tissue_it_is_what_monai_does() -> None:
    values = torch.from_numpy(np.random.default_rng(0).uniform(1, 2, (1, 9, 8, 7)).astype(np.float32))
    expected = NormalizeIntensity(nonzero=True)(ClipIntensityPercentiles(0.5, 99.5)(values))
    found = normalised(values.numpy(), torch.ones_like(values).numpy(), 0.5, 99.5)
    np.testing.assert_allclose(found, np.asarray(expected), atol=1e-5)


# --- Prepared = direct ----------------------------------------------------------------------------------------------


def preprocessing(**settings: Any) -> Compose:
    """The shipped one: exam in, the network's input out."""
    parser = ConfigParser()
    parser.read_config("configs/prostate_alm.json")
    parser.update(settings)
    return Compose(parser.get_parsed_content("preprocessing"))


def loading() -> LoadRegisteredExamd:
    """Its first step."""
    found = preprocessing().transforms[0]
    assert isinstance(found, LoadRegisteredExamd)
    return found


def networks() -> list[TwoBranchCNN]:
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        found.append(TwoBranchCNN(norm=("instance", {"affine": True})).eval())
    return found


@torch.no_grad()
def same_scores(prepared: dict[str, Any], direct: dict[str, Any]) -> None:
    """The same input, and logits of untrained networks that agree a thousand times better than they must."""
    torch.testing.assert_close(prepared["image"], direct["image"], rtol=0, atol=1e-3)
    for network in networks():
        torch.testing.assert_close(network(prepared["image"][None]), network(direct["image"][None]), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def short(study: PhantomStudy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with one exam whose T2 has 19 slices: fewer than the grid, and an odd number, so its border is a tie."""
    folder = tmp_path_factory.mktemp("short")
    for name, image in (("t2", study.t2[:, :, 2:21]), ("adc", study.adc), ("hbv", study.hbv)):
        sitk.WriteImage(image, str(folder / f"{name}.nii.gz"))
    rows = [["A", "A", "", "", "t2.nii.gz", "adc.nii.gz", "hbv.nii.gz"]]
    return write_manifest(folder / "exam.csv", rows)


@pytest.fixture(scope="module")
def cohort(short: Path) -> Path:
    outcome = prepare_cohort(Order(short, short.parent / "cohort", workers=1))
    assert [row["error_code"] for row in outcome.rows] == [""]
    return short.parent / "cohort" / "manifest.csv"


def item_of(manifest: Path) -> dict[str, Any]:
    return read_manifest(manifest, labelled=False)[0].item()


def test_a_prepared_exam_gives_the_voxels_and_the_score_of_the_exam_itself(short: Path, cohort: Path) -> None:
    transform = preprocessing()
    prepared, direct = transform(item_of(cohort)), transform(item_of(short))
    same_scores(prepared, direct)
    assert not prepared["report"]["warnings"]
    t2 = direct["image"][2].numpy()
    slices = np.flatnonzero(t2.any(axis=(0, 1)))
    # 19 slices about the middle of 28 of the same thickness: 18 grid planes lie clearly within them.
    assert (slices[0], slices[-1], len(slices)) == (5, 22, 18)
    inside = t2[:, :, 5:23]
    assert inside.mean() == pytest.approx(0, abs=1e-5)
    assert inside.std() == pytest.approx(1, abs=1e-5)


def test_the_last_digits_of_a_header_decide_nothing(study: PhantomStudy) -> None:
    found = []
    for nudge in (-1e-9, 0.0, 1e-9):
        t2 = study.t2[:, :, 2:21]
        t2.SetOrigin(np.add(t2.GetOrigin(), nudge).tolist())
        maps = {"t2": t2, "adc": study.adc, "hbv": study.hbv}
        images, _ = onto_grid(maps, {"warnings": []}, spacing=(2, 2, 3), size=(40, 40, 28), register=False)
        found.append({name: sitk.GetArrayFromImage(image) for name, image in images.items()})
    for other in found[1:]:
        for name in ("valid", "t2_valid"):
            assert np.array_equal(other[name], found[0][name])
    assert found[0]["t2_valid"].any(axis=(1, 2)).sum() == 18


def test_an_exam_prepared_by_an_earlier_version_is_refused(cohort: Path) -> None:
    item = item_of(cohort)
    del item["t2_valid"]
    with pytest.raises(StudyError, match=r"prepared by an earlier version.*the same command with --resume") as caught:
        loading()(item)
    assert caught.value.code == "prepared_before"


def test_a_cohort_of_an_earlier_version_is_prepared_again_by_resume(cohort: Path, short: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cohort.parent, tmp_path / "cohort"))
    (record,) = folder.glob("*/study.json")
    before = json.loads(record.read_text())
    del before["images"]
    record.write_text(json.dumps(before))
    (record.parent / "t2_valid.nii.gz").unlink()
    outcome = prepare_cohort(Order(short, folder, workers=1, resume=True))
    assert outcome.kept == 0
    assert (record.parent / "t2_valid.nii.gz").is_file()
    assert prepare_cohort(Order(short, folder, workers=1, resume=True)).kept == 1


def test_a_model_of_an_earlier_version_warns_of_a_prepared_exam(cohort: Path, short: Path) -> None:
    earlier = LoadRegisteredExamd((2.8, 2.8, 3.0), (40, 40, 28))
    (warning,) = earlier(item_of(cohort))["report"]["warnings"]
    assert warning.startswith("The exam is from a prepared cohort, and the model, trained by an earlier version, takes")
    assert "The exam is from" not in str(earlier(item_of(short))["report"]["warnings"])


def test_a_cohort_on_a_grid_of_its_own_is_warned_of(short: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text('{"spacing": [2, 2, 3], "size": [60, 60, 28]}')
    prepare_cohort(Order(short, tmp_path / "cohort", rules=tmp_path / "rules.json", workers=1))
    (warning,) = loading()(item_of(tmp_path / "cohort" / "manifest.csv"))["report"]["warnings"]
    assert warning.startswith("The exam was prepared on a grid of its own (60 x 60 x 28 voxels of 2 x 2 x 3 mm)")


def test_a_grid_larger_than_the_prepared_one_is_refused() -> None:
    LoadRegisteredExamd((0.5, 0.5, 3), (256, 256, 28), as_prepared=True)
    message = (
        "A grid of 100 x 100 x 28 points, 1.4 x 1.4 x 3 mm apart, is larger than the one that exams are prepared on"
    )
    with pytest.raises(InputError, match=message):
        LoadRegisteredExamd((1.4, 1.4, 3), (100, 100, 28), as_prepared=True)
    LoadRegisteredExamd((1.4, 1.4, 3), (100, 100, 28))


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs the public DICOM files of ../shared")
def test_real_exams_give_the_same_score_prepared_or_not(tmp_path: Path) -> None:
    prepare_cohort(Order(SHARED, tmp_path / "cohort", workers=1, key_file=tmp_path / "keys.csv"))
    folder = {row["key"]: row["path"] for row in read_rows(tmp_path / "keys.csv") if row["kind"] == "study"}
    rows = read_manifest(tmp_path / "cohort" / "manifest.csv", labelled=False)
    assert len(rows) == 3
    for grid in ({}, {"spacing": [1.4, 1.4, 3.0], "size": [80, 80, 28]}):
        transform = preprocessing(**grid)
        for row in rows:
            place = {"dicom": folder[row.study], "study": "A", "label": 0.0, "index": 0}
            same_scores(transform(row.item()), transform(place))


# --- Exams without high b -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (None, "The exam has no high-b image, and this model was not trained without one."),
        ({"hbv_b": 100.0}, "The exam has no high-b image: its highest b is 100, below 400, and this model was not"),
    ],
)
def test_an_exam_without_high_b_is_scored_only_by_a_model_trained_for_it(
    short: Path, facts: dict[str, Any] | None, why: str
) -> None:
    item = item_of(short)
    if facts:
        item["facts"] = facts
    else:
        del item["hbv"]
    with pytest.raises(StudyError, match=f"{re.escape(why)}.*--drop_hbv") as caught:
        loading()(item)
    assert caught.value.code == "no_high_b"
    found = preprocessing(drop_hbv=0.2)(item)
    assert [bool(channel.any()) for channel in found["image"]] == [True, False, True]
    assert [
        text.endswith("scored without it, as the model was trained to.") for text in found["report"]["warnings"]
    ] == [True]


def test_high_b_is_dropped_alone() -> None:
    found = without_hbv(torch.ones(3, 2, 2, 2))
    assert found.amin((1, 2, 3)).tolist() == found.amax((1, 2, 3)).tolist() == [1, 0, 1]


@pytest.mark.slow
def test_a_cohort_with_some_exams_without_high_b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused by default, by name; trained on and scored with the option, in preparing and in the main config."""
    manifest = write_cohort(tmp_path / "cohort", 18, 6)
    rows = [list(row.values()) for row in read_rows(manifest)]
    for row in (rows[4], rows[-1]):
        row[COLUMNS.index("hbv")] = ""
    write_manifest(manifest, [row[: len(COLUMNS)] for row in rows])
    settings = {"splits": 1, "max_epochs": 1, "validation": 0.34}
    with pytest.raises(SystemExit):
        train(manifest, tmp_path / "refused", **settings)
    error = capsys.readouterr().err
    assert "2 of 24 studies cannot be used" in error
    assert error.count("The exam has no high-b image, and this model was not trained without one.") == 2
    run = train(manifest, tmp_path / "run", **settings, drop_hbv=0.5)
    warnings = {row["study"]: row["warnings"] for row in read_rows(run / "scores.csv")}
    assert {name for name, text in warnings.items() if "no high-b image" in text} == {rows[-1][0]}
    preprocess = TrainedRun(run).preprocessing()  # its config is allowed, RandLambda included
    assert not preprocess(read_manifest(manifest)[4].item())["image"][1].any()


def test_an_exam_without_high_b_is_prepared_with_a_warning(short: Path, tmp_path: Path) -> None:
    rows = [["A", "A", "", "", "t2.nii.gz", "adc.nii.gz", ""]]
    table = write_manifest(short.parent / "without.csv", rows)
    for _ in range(2):  # the second time it is kept
        outcome = prepare_cohort(Order(table, tmp_path / "cohort", workers=1, resume=True))
    assert outcome.kept == 1
    (row,) = outcome.rows
    assert (row["status"], row.get("hbv")) == ("warn", "")
    assert "The exam has no high-b image. Only models trained with --drop_hbv above 0 take it." in row["warnings"]
    with pytest.raises(StudyError, match=r"The exam has no high-b image, and this model"):
        loading()(item_of(tmp_path / "cohort" / "manifest.csv"))
    transform = preprocessing(drop_hbv=0.2)
    same_scores(transform(item_of(tmp_path / "cohort" / "manifest.csv")), transform(item_of(table)))
