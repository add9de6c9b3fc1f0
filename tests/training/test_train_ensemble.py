"""Splits as tasks: bit for bit the run that trains one after the other, whatever dies on the way."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from exams import dicom_exam, prepare
from programs import load_program
from small_cohort import SETTINGS, train

from mri_alm.bundle.checkpoints import load_tensors

ROOT = Path(__file__).parents[2]
SPLITS = range(SETTINGS["splits"])
FILES = ("threshold.json", "heldout.csv", "scores.csv", "metrics.json", "splits.csv")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return load_program("train_ensemble")


def words(manifest: Path, run: Path, **settings: Any) -> list[str]:
    """The small cohort's settings as a command line."""
    places = {"cohort": manifest, "cache_dir": manifest.parent / "cache", "run_dir": run}
    return [word for name, value in (SETTINGS | places | settings).items() for word in (f"--{name}", str(value))]


def same_run(ours: Path, theirs: Path) -> None:
    for name in FILES:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    for k in SPLITS:
        one, other = (load_tensors(run / f"split_{k}" / "model.pt")["model"] for run in (ours, theirs))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_splits_in_processes_are_bit_equal(
    program: ModuleType, manifest: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train_ensemble.py"])
    program.main(["--workers", "2", *words(manifest, tmp_path / "run")])
    same_run(tmp_path / "run", trained)


def test_a_split_that_fails_leaves_the_others_finished_and_is_made_up_for(
    manifest: Path, trained: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    run = tmp_path / "run"
    (run / "split_1").mkdir(parents=True)
    shutil.copy(trained / "split_0" / "last.pt", run / "split_1" / "last.pt")
    text = refusal(train, manifest, run, workers=2)
    assert "split_1/last.pt belongs to another cohort or split." in text
    assert [(run / f"split_{k}" / "split.json").exists() for k in SPLITS] == [True, False, True]
    assert not (run / "threshold.json").exists()
    (run / "split_1" / "last.pt").unlink()
    before = {k: (run / f"split_{k}" / "model.pt").stat().st_mtime_ns for k in (0, 2)}
    train(manifest, run, workers=2)
    assert {k: (run / f"split_{k}" / "model.pt").stat().st_mtime_ns for k in (0, 2)} == before
    same_run(run, trained)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max_epochs"], "Settings are pairs such as --max_epochs 20, got: --max_epochs"),
        (["max_epochs", "3"], "Settings are pairs such as --max_epochs 20, got: max_epochs 3"),
        (["--max_epoch", "3"], 'There is no setting "max_epoch". Did you mean "max_epochs"?'),
        (["--address", "auto"], "An address and GPUs per task are Ray's"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    program: ModuleType, refusal: Callable[..., str], given: list[str], message: str
) -> None:
    assert message in refusal(program.main, given)


def test_values_are_read_as_monai_reads_them(program: ModuleType) -> None:
    found = program.overrides(["--size", "[8, 8, 8]", "--loss=a_fl", "--register", "False", "--mu0", "1e-3"])
    assert found == {"size": [8, 8, 8], "loss": "a_fl", "register": False, "mu0": 1e-3}


def test_settings_that_are_not_given_are_the_config_s(program: ModuleType) -> None:
    assert program.parse([]) == {}


@pytest.mark.parametrize("name", ["--gpus-per-task", "--gpus_per_task"])
def test_options_and_settings_are_one(program: ModuleType, name: str) -> None:
    words = ["--config_file", "['a.json', 'b.json']", name, "0.5", "--workers=3", "--max_epochs", "20"]
    expected = {"config_file": ["a.json", "b.json"], "gpus_per_task": 0.5, "workers": 3, "max_epochs": 20}
    assert program.parse(words) == expected


# --- Ray ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A Ray cluster of two nodes with one core each, on this machine: the head and one that may be taken away."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'mri-alm[cluster]'")
    from ray.cluster_utils import Cluster

    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_server_request_timeout_seconds": "200",  # a busy machine
        "RAY_gcs_rpc_server_connect_timeout_s": "100",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    options = {"num_cpus": 1, "object_store_memory": 80_000_000}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        cluster = Cluster()
        try:
            try:
                cluster.add_node(**options, include_dashboard=False)
                second = cluster.add_node(**options)
            except Exception as error:  # Ray raises this very class
                pytest.skip(f"Ray's nodes did not come up within the 30 seconds that it gives them: {str(error)[:80]}")
            yield cluster, second
        finally:
            cluster.shutdown()


def on_ray(test: Callable[..., None]) -> Callable[..., None]:
    """Slow, alone, and with Ray's own warnings."""
    names = ("ResourceWarning", "DeprecationWarning", "FutureWarning", "pytest.PytestUnraisableExceptionWarning")
    ignored = pytest.mark.filterwarnings(*(f"ignore::{name}" for name in names))
    return pytest.mark.slow(pytest.mark.alone(ignored(test)))


@on_ray
def test_studies_prepared_on_a_cluster_are_those_of_threads(tmp_path: Path, two_nodes: Any) -> None:
    cluster, _ = two_nodes
    for number in range(3):
        dicom_exam(tmp_path / "in" / f"p{number}", number)
    dicom_exam(tmp_path / "in" / "lacks", 3, without=(4,))
    whole = prepare(tmp_path / "in", tmp_path / "c").rows
    for row in whole:
        shutil.rmtree(tmp_path / "c" / row["study"])
    outcome = prepare(tmp_path / "in", tmp_path / "c", resume=True, backend="ray", address=cluster.address)
    assert (outcome.kept, outcome.rows) == (0, whole)


@on_ray
def test_a_node_lost_on_the_way_loses_nothing(
    manifest: Path, tmp_path: Path, two_nodes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, second = two_nodes
    run, epochs = tmp_path / "run", 12
    unfinished: list[int] = []

    def cut() -> None:
        """Take the second node away while both train."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            begun = [k for k in SPLITS if (run / f"split_{k}" / "last.pt").exists()]
            waiting = [k for k in begun if not (run / f"split_{k}" / "split.json").exists()]
            if len(waiting) >= 2:
                cluster.remove_node(second, allow_graceful=False)
                unfinished.extend(k for k in begun if not (run / f"split_{k}" / "split.json").exists())
                return
            time.sleep(0.05)

    watcher = threading.Thread(target=cut)
    watcher.start()
    train(manifest, run, backend="ray", ray_address=cluster.address, workers=2, max_epochs=epochs)
    watcher.join()
    assert len(unfinished) >= 2, "the node was not taken away while both trained"
    for k in SPLITS:
        record = json.loads((run / f"split_{k}" / "split.json").read_text())
        assert [epoch["epoch"] for epoch in record["epochs"]] == list(range(1, epochs + 1))
    same_run(run, train(manifest, tmp_path / "alone", max_epochs=epochs))


def test_a_cluster_that_is_not_there_is_said(
    manifest: Path, tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'mri-alm[cluster]'")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where Ray would note a cluster that runs, or was killed
    text = refusal(train, manifest, tmp_path / "run", backend="ray", ray_address="auto")
    assert "There is no Ray cluster at auto" in text
