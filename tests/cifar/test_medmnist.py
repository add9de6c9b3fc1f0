"""MedMNIST's sets and tables: made-up files in the official layout, and the real ones where they are at hand."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.bundle import ConfigWorkflow
from numpy.typing import NDArray
from scipy.ndimage import affine_transform
from scipy.spatial.transform import Rotation
from small_cohort import initialised
from small_training import crash_after_epoch

from mri_alm.bundle.checkpoints import load_tensors
from mri_alm.cifar.medmnist import FILES, FlipTurnZoom, ShapePart, shape_set
from mri_alm.cifar.report import columns_of, make_report, to_markdown
from mri_alm.cifar.sets import ImageSet
from mri_alm.cifar.table import TABLES, BenchmarkTable, read_results
from mri_alm.errors import InputError
from mri_alm.programs import benchmark as program

REAL = Path(__file__).parents[3] / "shared" / "data" / "medmnist"
OFFICIAL = dict(FILES)
COUNTS = {"train": (20, 6), "val": (8, 3), "test": (12, 7)}  # negatives, positives
SMALL: dict[str, Any] = {"features": [2, 3], "batch_size": 8, "positives_per_batch": 2, "max_epochs": 2, "warmup": 1}


def shapes(label: NDArray[np.uint8], seed: int) -> NDArray[np.uint8]:
    """Balls at random places, those of class 1 larger."""
    rng = np.random.default_rng(seed)
    centre = rng.uniform(9, 19, (len(label), 3, 1, 1, 1))
    squares = ((np.indices((28, 28, 28))[None] - centre) ** 2).sum(1)
    radius = 4 + 3 * label[:, :, None, None] + rng.uniform(-1, 1, (len(label), 1, 1, 1))
    return np.where(squares < radius**2, 255, 0).astype(np.uint8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a small set in place of the official one."""
    folder = tmp_path_factory.mktemp("medmnist")
    content = {}
    for seed, (part, counts) in enumerate(COUNTS.items()):
        label = np.random.default_rng(seed).permutation(np.repeat([0, 1], counts))[:, None].astype(np.uint8)
        content |= {f"{part}_labels": label, f"{part}_images": shapes(label, seed)}
    path = folder / "vesselmnist3d.npz"
    np.savez_compressed(path, **content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FILES, ("vessel", 28), (path.name, hashlib.md5(path.read_bytes()).hexdigest()))  # noqa: S324
        yield folder


@pytest.fixture(scope="module")
def images(data: Path) -> ImageSet:
    return shape_set(data, "vessel", splits=3)


# --- Files and splits -----------------------------------------------------------------------------------------------


def test_the_official_splits_are_those_of_the_file(data: Path, images: ImageSet) -> None:
    with np.load(data / "vesselmnist3d.npz") as file:
        for part, name in {"training": "train", "validation": "val", "test": "test"}.items():
            for split in range(3):
                rows = images.rows(part, split)
                np.testing.assert_array_equal(images.image[rows], file[f"{name}_images"])
                np.testing.assert_array_equal(images.label[rows], file[f"{name}_labels"].ravel())
    assert images.counts(2) == COUNTS["train"]
    assert (images.size, images.label.dtype, images.image.dtype) == (56, np.int64, np.uint8)
    assert images.record == {"dataset": "vessel", "resolution": 28, "own_splits": False, "split_seed": 0}


def test_own_splits_draw_as_many_of_each_class_and_never_test_images(data: Path, images: ImageSet) -> None:
    own = shape_set(data, "vessel", own_splits=True, splits=4, seed=1)
    held_out = []
    for split in range(4):
        training, validation = own.rows("training", split), own.rows("validation", split)
        assert sorted([*training, *validation]) == list(range(37))
        assert tuple(np.bincount(own.label[validation])) == COUNTS["val"]
        assert own.counts(split) == COUNTS["train"]
        held_out.append(validation.tolist())
    assert len(set(map(tuple, held_out))) == 4
    assert {row for rows in held_out for row in rows} & set(range(26)), "images of the training part are held out too"
    np.testing.assert_array_equal(own.rows("test", 0), images.rows("test", 0))
    again = shape_set(data, "vessel", own_splits=True, splits=2, seed=1)
    assert [again.rows("validation", k).tolist() for k in range(2)] == held_out[:2]
    other = shape_set(data, "vessel", own_splits=True, splits=1, seed=2)
    assert other.rows("validation", 0).tolist() != held_out[0]


def test_a_file_that_is_not_the_official_one_is_refused_with_both_digests(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "vesselmnist3d.npz"
    content = (data / path.name).read_bytes()
    path.write_bytes(content[:100] + b"\x00" + content[101:])
    found = hashlib.md5(path.read_bytes()).hexdigest()  # noqa: S324
    expected = FILES["vessel", 28][1]
    with pytest.raises(InputError, match=rf"{path} is not the official file: its MD5 is {found}, expected {expected}"):
        shape_set(tmp_path, "vessel")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "adrenal"}, r"^Cannot read .*adrenalmnist3d\.npz: No such file or directory\. Download "),
        ({"dataset": "vessel", "resolution": 64}, r"^Cannot read .*vesselmnist3d_64\.npz: No such file"),
        ({"dataset": "organ"}, r'^dataset must be one of vessel, adrenal, got "organ"'),
        ({"dataset": "vessel", "resolution": 32}, r"^resolution must be 28 or 64, got 32\.$"),
    ],
)
def test_what_is_not_there_is_refused(data: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        shape_set(data, **arguments)


def test_the_real_files_are_the_official_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL.is_dir():
        pytest.skip("the files of MedMNIST are not here")
    monkeypatch.setitem(FILES, ("vessel", 28), OFFICIAL["vessel", 28])
    for name, digest in OFFICIAL.values():
        assert hashlib.md5((REAL / name).read_bytes()).hexdigest() == digest  # noqa: S324
    counts = {"vessel": [(1185, 150), (169, 22), (339, 43)], "adrenal": [(929, 259), (76, 22), (229, 69)]}
    for dataset, expected in counts.items():
        found = shape_set(REAL, dataset, splits=1)
        parts = [found.label[found.rows(part, 0)] for part in ("training", "validation", "test")]
        assert [tuple(np.bincount(part)) for part in parts] == expected
        assert found.image.shape[1:] == (28, 28, 28)
        assert np.unique(found.image).tolist() == [0, 255]
        own = shape_set(REAL, dataset, own_splits=True, splits=1)
        assert [own.counts(0), tuple(np.bincount(own.label[own.rows("validation", 0)]))] == expected[:2]


# --- Batches --------------------------------------------------------------------------------------------------------


def test_batches_without_augmentation_are_the_shapes(images: ImageSet) -> None:
    batch = ShapePart(images, "validation", 1).batch([3, 0])
    rows = images.rows("validation", 1)[[3, 0]]
    np.testing.assert_array_equal(batch["image"][:, 0].numpy() * 255, images.image[rows])
    assert batch["image"].dtype == torch.float32
    assert batch["label"].tolist() == images.label[rows].tolist()
    assert batch["index"].tolist() == rows.tolist()


def test_augmented_images_are_those_of_scipy(images: ImageSet) -> None:
    """SciPy moves axis by axis, first axis first; ours has the last axis first and its origin in the middle."""
    part = ShapePart(images, "training", 0, transform=FlipTurnZoom(degrees=25, zoom=0.3))
    assert part.transform is not None
    part.transform.set_random_state(seed=3)
    matrices = part.transform(4).double().numpy()
    part.transform.set_random_state(seed=3)
    drawn = part.batch([5, 1, 7, 2])["image"][:, 0].numpy()
    assert len(np.unique(np.sign(np.linalg.det(matrices[:, :, :3])))) == 2, "some are mirrored, some are not"
    for image, matrix, position in zip(drawn, matrices, (5, 1, 7, 2), strict=True):
        turn = matrix[::-1, 2::-1]
        whole = images.image[images.rows("training", 0)[position]] / 255.0
        middle = np.full(3, 13.5)
        expected = affine_transform(whole, turn, middle - turn @ middle, order=1, mode="grid-constant")
        np.testing.assert_allclose(image, expected, rtol=0, atol=1e-4)


def test_draws_are_flips_turns_and_zooms_within_their_bounds() -> None:
    transform = FlipTurnZoom(degrees=20, zoom=0.2)
    transform.set_random_state(seed=0)
    matrices = transform(4000).double().numpy()
    assert not matrices[:, :, 3].any()
    inner = matrices[:, :, :3]
    size = 1 / np.abs(np.linalg.det(inner)) ** (1 / 3)
    assert 0.8 <= size.min() < 0.81
    assert 1.19 < size.max() <= 1.2
    scaled = inner * size[:, None, None]
    mirror = np.sign(np.diagonal(scaled, axis1=1, axis2=2))  # turns of 20 degrees leave the signs
    turns = Rotation.from_matrix(scaled * mirror[:, None, :]).as_rotvec(degrees=True)
    assert np.abs(turns).max(0).min() > 19.5
    assert np.abs(turns).max() <= 20 + 1e-4
    codes = np.bincount((mirror > 0) @ [1, 2, 4], minlength=8)
    assert codes.min() > 4000 / 8 * 0.8, "all eight flips are drawn, equally often"


def test_without_flips_turns_and_zooms_nothing_changes_and_flips_alone_are_exact(images: ImageSet) -> None:
    plain = ShapePart(images, "training", 0).batch(range(4))["image"]
    same = ShapePart(images, "training", 0, transform=FlipTurnZoom(0, 0, 0)).batch(range(4))["image"]
    flipped = ShapePart(images, "training", 0, transform=FlipTurnZoom(1, 0, 0)).batch(range(4))["image"]
    torch.testing.assert_close(same, plain, rtol=0, atol=1e-4)
    torch.testing.assert_close(flipped, plain.flip(2, 3, 4), rtol=0, atol=1e-4)


def test_the_seed_repeats_the_draws() -> None:
    transform = FlipTurnZoom()
    drawn = []
    for seed in (3, 3, 4):
        transform.set_random_state(seed)
        drawn.append(transform(5))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("arguments", [{"flip": 1.5}, {"degrees": 180}, {"degrees": -1}, {"zoom": 1.0}])
def test_impossible_augmentation_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=r"^flip must be in \[0, 1\], degrees in \[0, 180\) and zoom in \[0, 1\), got "
    ):
        FlipTurnZoom(**arguments)


# --- The config -----------------------------------------------------------------------------------------------------


def workflow(data: Path, run_dir: Path, **overrides: Any) -> ConfigWorkflow:
    settings = SMALL | {"data": str(data), "run_dir": str(run_dir)} | overrides
    return initialised("medmnist3d", logging_file=False, **settings)


def train(data: Path, run_dir: Path, split: int = 0, **overrides: Any) -> dict[str, Any]:
    workflow(data, run_dir, only_split=split, **overrides).run()
    content: dict[str, Any] = json.loads((run_dir / f"split_{split}" / "result.json").read_text())
    return content


def test_the_config_has_what_monai_asks_for_and_its_members_differ_by_seed(
    data: Path, images: ImageSet, tmp_path: Path
) -> None:
    found = workflow(data, tmp_path, splits=2, max_epochs=2, mu0=1e-3)
    assert found.check_properties() == []
    found.run()
    results = [json.loads((tmp_path / f"split_{k}" / "result.json").read_text()) for k in (0, 1)]
    for result in results:
        assert result["test"]["label"] == images.label[images.rows("test", 0)].tolist()
        assert result["epochs"][0]["alm_term"] > 0
        assert result["best"]["epoch"] == 2, "the last epoch is kept"
        assert result["counts"] == [20, 6]
    assert results[0]["guard"] == results[1]["guard"]
    assert results[0]["test"]["score"] != results[1]["test"]["score"]


def test_own_splits_are_a_setting(data: Path, tmp_path: Path) -> None:
    results = [train(data, tmp_path, split, own_splits=True, max_epochs=1, warmup=0) for split in (0, 1)]
    assert results[0]["guard"] != results[1]["guard"]
    assert results[0]["counts"] == results[1]["counts"] == [20, 6]


def test_a_run_that_is_cut_off_goes_on_to_the_same_end(data: Path, tmp_path: Path) -> None:
    """With averaged weights, multipliers, AdamW, a rate that falls, and augmentation."""
    settings: dict[str, Any] = {"max_epochs": 3, "ema": 0.8, "mu0": 1e-2}
    straight = train(data, tmp_path / "a", **settings)
    with crash_after_epoch(2):
        train(data, tmp_path / "b", **settings)
    resumed = train(data, tmp_path / "b", **settings)
    assert straight | {"seconds": 0} == resumed | {"seconds": 0}
    states = [load_tensors(tmp_path / side / "split_0" / "last.pt") for side in "ab"]
    for part in ("model", "average"):
        assert all(torch.equal(value, states[1][part][name]) for name, value in states[0][part].items())
    assert not torch.equal(states[0]["model"]["head.weight"], states[0]["average"]["module.head.weight"])


def test_what_cannot_be_is_refused_before_training(data: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    def run(**overrides: Any) -> None:
        train(data, tmp_path / "run", **overrides)

    assert 'dataset must be one of vessel, adrenal, got "organ"' in refusal(run, dataset="organ")
    assert "resolution must be 28 or 64, got 29." in refusal(run, resolution=29)
    assert "resolution must be at least 32, as each of 5 stages halves it: 28." in refusal(run, features=[1] * 5)
    assert "ema must be 0 (no average) or a decay below 1" in refusal(run, ema=1.0)
    assert not (tmp_path / "run").exists()


# --- The tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vessel", "adrenal"])
def test_the_tables_have_their_methods_and_the_null_of_the_baseline(name: str) -> None:
    table = BenchmarkTable(TABLES, name, "official")
    assert (table.baseline, table.splits, table.false_negatives) == ("bce8", 10, (0, 1, 2, 5))
    assert table.settings == {"own_splits": False, "dataset": name, "positives_per_batch": None}
    settings = {key: table.method(key).settings for key in table.methods()}
    assert settings == {
        "bce8": {"loss": "bce", "positives_per_batch": 8, "mu0": 0},
        "bce": {"loss": "bce", "mu0": 0},
        "alm_bce8": {"loss": "bce", "positives_per_batch": 8, "mu0": "auto"},
        "aucm": {"loss": "aucm", "positives_per_batch": 8, "mu0": 0},
        "bce8ema": {"loss": "bce", "positives_per_batch": 8, "mu0": 0, "ema": 0.99, "checkpoint_rule": "last"},
        "bce8best": {"loss": "bce", "positives_per_batch": 8, "mu0": 0, "checkpoint_rule": "best"},
    }
    assert table.method("bce8sam").settings == settings["bce8"] | {"sam_radius": 0.05}
    plan = [(job.method.key, job.seed) for job in table.trainings(table.methods(), 1)]
    assert plan == [("bce8", 0), ("bce8", 1), *((key, 0) for key in settings if key != "bce8")]
    assert BenchmarkTable(TABLES, name, "quick").splits == 1
    assert BenchmarkTable(TABLES, name, "own_splits").settings["own_splits"] is True
    with pytest.raises(InputError, match=r'^There is no protocol "paper"\. Choose one of: quick, official, official_n'):
        BenchmarkTable(TABLES, name, "paper")


def test_published_numbers_are_those_of_the_data_s_page() -> None:
    page = REAL / "README.md"
    if not page.is_file():
        pytest.skip("the data's page is not here")
    text = " ".join(page.read_text("utf-8").split())
    vessel, adrenal = (BenchmarkTable(TABLES, name, "official").published for name in ("vessel", "adrenal"))
    one, two, three, four, five, own, margin = (f".{value.replace('.', '')}" for value in vessel.values())
    assert (
        f"vessel ResNet-18 3D {one}, ResNet-18 ACS **{two}**, ResNet-50 3D {three}, ACS {four}, auto-sklearn {five};"
        in text
    )
    assert f"vessel cross-entropy {own}, AUCM {margin[:4]} to .937;" in text
    assert vessel["not reviewed: AUC margin"] == "88.9 to 93.7"
    one, two, three, four, five, own, margin = (f".{value.replace('.', '')}" for value in adrenal.values())
    assert f"adrenal {one}, **{two}**, {three}, {four}, {five}." in text
    assert f"adrenal {own}, {margin[:4]} to .875." in text
    assert adrenal["not reviewed: AUC margin"] == "85.7 to 87.5"


def test_a_table_has_the_fpr_at_each_number_of_misses_the_published_aucs_and_the_null(tmp_path: Path) -> None:
    table = BenchmarkTable(TABLES, "vessel", "official")
    label = np.repeat([0, 1], [30, 11])
    plan = table.trainings(["bce8", "bce"], 2)
    scores = {}
    for job in plan:
        drawn = np.random.default_rng([len(job.method.key), job.seed, job.split]).normal(size=41) + label
        scores[job.method.key, job.seed, job.split] = drawn
        made = {"date": f"2026-12-0{1 + job.split}", "machine": "a processor", "torch": "2.13.0"}
        content = table.asked(job) | {"epochs": [], "made": made, "seconds": 100 + job.split}
        path = table.result(tmp_path, job)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content | {"test": {"label": label.tolist(), "score": drawn.tolist()}}))
    results = read_results(table, tmp_path, plan)
    report = make_report(table, results, ["bce8", "bce"], 2, draws=20)
    ensemble = (scores["bce8", 0, 0] + scores["bce8", 0, 1]) / 2
    for column, k in enumerate((0, 1, 2, 5), 1):
        threshold = sorted(ensemble[label == 1])[k]
        assert report.summaries["bce8"].ensemble.value[column] == np.mean(ensemble[label == 0] >= threshold)
    assert [column.key for column in report.columns] == [f"fpr_at_{k}_fn" for k in (0, 1, 2, 5)]
    text = to_markdown(report)
    head = next(line for line in text.splitlines() if line.startswith("| method | "))
    titles = [f"FPR @ {k} FN" for k in (0, 1, 2, 5)]
    assert head == "| " + " | ".join(["method", *titles, "ensemble AUC", "mean AUC"]) + " |"
    assert "FPR at so many false negatives of the 11 test positives: the thresholds are set on these positives" in text
    assert "All models have the official training part" in text
    assert "| ResNet-18, ACS | 93.0 |" in text
    assert "| **null**: bce8, other seeds | " in text
    assert "--table vessel --protocol official --splits 2 --methods bce8 bce` 2026-12-01 to 2026-12-02" in text
    assert "a processor, torch 2.13.0; 100 s a training." in text  # the median of 100 and 101, rounded to even
    assert columns_of(BenchmarkTable(TABLES, "cifar10_binary_100", "quick"), 50)[0].title == "FPR @ 98 %"


@pytest.mark.slow
def test_the_program_trains_and_prints_a_table(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(TABLES.read_text())
    small = {"features": [2, 3], "batch_size": 12, "norm": None}
    content["protocols"]["quick"]["shapes"] |= small
    content["loss_settings"]["bce8"]["positives_per_batch"] = 4
    (tmp_path / "tables.json").write_text(json.dumps(content))
    monkeypatch.setattr("mri_alm.cifar.table.TABLES", tmp_path / "tables.json")
    words = ["--table", "vessel", "--protocol", "quick", "--methods", "bce", "alm_bce8", "--data", str(data)]
    words += ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", ["benchmark.py", *words])
    assert program.main() == 0
    shown = capsys.readouterr().out
    assert "| ALM + BCE, 8 positives a batch | " in shown
    assert "s a training." in shown
    place = tmp_path / "results" / "vessel" / "quick"
    assert {path.name for path in place.iterdir()} == {"bce8", "bce", "alm_bce8", "table.md", "table.csv", "figure.png"}
    run = tmp_path / "runs" / "vessel" / "quick"
    asked = {key: json.loads((run / key / "seed_0" / "config.json").read_text())["config"] for key in ("bce", "bce8")}
    assert [asked[key]["positives_per_batch"] for key in ("bce", "bce8")] == [None, 4]
    result = json.loads((place / "bce8" / "split_0_seed_1.json").read_text())
    assert (result["dataset"], len(result["epochs"]), result["best"]["epoch"]) == ("vessel", 2, 2)
    assert set(result["made"]) == {"date", "machine", "torch"}
