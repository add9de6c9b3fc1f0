"""A run read back from MLflow's database with MLflow's own client."""

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_cohort import SETTINGS, train, workflow

from mri_alm.bundle.config import own_tracking
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.errors import InputError
from mri_alm.training.tracking import check_tracking, tracking

SPLITS = range(SETTINGS["splits"])
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning", "ignore::UserWarning",
    "ignore::PendingDeprecationWarning",
)  # fmt: skip


def client_of(run: Path) -> Any:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'mri-alm[tracking]'")
    return mlflow.MlflowClient(f"sqlite:///{run / 'mlflow.db'}")


def runs_of(run: Path) -> tuple[Any, list[Any]]:
    """The one parent and its children."""
    client = client_of(run)
    (experiment,) = client.search_experiments(filter_string="name = 'mri-alm'")
    runs = client.search_runs(experiment.experiment_id)
    (parent,) = [one for one in runs if "mlflow.parentRunId" not in one.data.tags]
    children = [one for one in runs if one.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == len(runs) - 1
    return parent, sorted(children, key=lambda one: str(one.info.run_name))


@pytest.fixture(scope="module")
def tracked(trained: Path, manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after the first split's epochs and gone on with, its splits as tasks then."""
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'mri-alm[tracking]'")
    run = tmp_path_factory.mktemp("tracked") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mri_alm.training.member.Member.network", interrupted)
        with pytest.raises(KeyboardInterrupt, match="ctrl-c"):
            train(manifest, run, tracking="mlflow")
    before, children = runs_of(run)
    assert before.info.status == "FAILED"
    assert [(child.info.run_name, child.info.status) for child in children] == [("split_0", "FAILED")]
    train(manifest, run, tracking="mlflow", workers=2)
    assert runs_of(run)[0].info.run_id == before.info.run_id
    return run


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt("ctrl-c")


def test_all_splits_stand_under_one_parent_with_their_curves(tracked: Path) -> None:
    client = client_of(tracked)
    parent, children = runs_of(tracked)
    assert parent.info.status == "FINISHED"
    assert [child.info.run_name for child in children] == [f"split_{k}" for k in SPLITS]
    for k, child in enumerate(children):
        record = json.loads((tracked / f"split_{k}" / "split.json").read_text())
        assert child.info.status == "FINISHED"
        assert child.data.tags["best_epoch"] == str(record["best"]["epoch"])
        for name in ("val_auc", "train_auc", "val_loss", "mu", "gradient_ratio"):
            logged = [(one.step, one.value) for one in client.get_metric_history(child.info.run_id, name)]
            assert sorted(logged) == [(epoch["epoch"], epoch[name]) for epoch in record["epochs"]]
        assert [one.path for one in client.list_artifacts(child.info.run_id)] == ["model.pt"]


def test_settings_results_and_report_are_the_parent_s(tracked: Path) -> None:
    client = client_of(tracked)
    parent, _ = runs_of(tracked)
    assert {name: parent.data.params[name] for name in ("loss", "delta", "size")} == {
        "loss": "bce",
        "delta": "0.25",
        "size": "[8, 8, 8]",
    }
    assert parent.data.tags["max_fn"] == "0"
    metrics = json.loads((tracked / "metrics.json").read_text())
    assert parent.data.metrics["test.ensemble_auc"] == metrics["test"]["ensemble_auc"]
    assert parent.data.metrics["validation_auc.mean"] == metrics["validation_auc"]["mean"]
    artifacts = [one.path for one in client.list_artifacts(parent.info.run_id)]
    assert artifacts == ["metrics.json", "report.html", "threshold.json"]
    copy = Path(client.download_artifacts(parent.info.run_id, "report.html", str(tracked.parent)))
    assert copy.read_bytes() == (tracked / "report.html").read_bytes()


def test_a_finished_run_started_again_keeps_its_parent_and_logs_no_epoch_twice(
    tracked: Path, manifest: Path, tmp_path: Path
) -> None:
    before, children = runs_of(tracked)
    train(manifest, tracked, tracking="mlflow", max_fn=1)
    after, again = runs_of(tracked)
    assert (after.info.run_id, after.data.tags["max_fn"]) == (before.info.run_id, "1")
    assert [one.info.run_id for one in again] == [one.info.run_id for one in children]
    history = client_of(tracked).get_metric_history(again[0].info.run_id, "val_auc")
    assert [one.step for one in history] == [1, 2]


def test_no_name_of_a_person_or_place_is_in_the_database(tracked: Path, manifest: Path) -> None:
    with sqlite3.connect(tracked / "mlflow.db") as database:
        text = "\n".join(database.iterdump())
    assert str(manifest) not in text
    assert "S01" not in text
    rows = [line for line in text.splitlines() if str(tracked) in line]
    assert rows, "MLflow needs the folder of its artifacts"
    assert all(line.startswith(('INSERT INTO "experiments"', 'INSERT INTO "runs"')) for line in rows)
    assert (tracked / "mlflow.db").stat().st_mode & 0o077 == 0
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_monai_s_own_word_means_ours(manifest: Path, tmp_path: Path) -> None:
    """`monai.bundle run --tracking mlflow` never reaches the config as a setting."""
    found = workflow(manifest, tmp_path / "run")
    found.patch_bundle_tracking(found.parser, monai_settings())
    config = found.parser.get()
    assert any(one["_target_"] == "MLFlowHandler" for one in config["train"]["handlers"])
    own_tracking(config)
    assert config["tracking"] == "mlflow"
    plain = workflow(manifest, tmp_path / "run").parser.get()
    assert config == plain | {"tracking": "mlflow"}
    own_tracking(plain)
    assert plain["tracking"] is None


def monai_settings() -> dict[str, Any]:
    from copy import deepcopy

    from monai.bundle.utils import DEFAULT_EXP_MGMT_SETTINGS

    settings: dict[str, Any] = deepcopy(DEFAULT_EXP_MGMT_SETTINGS["mlflow"])
    return settings


EPOCHS = [{"epoch": number, "val_auc": number / 4} for number in (1, 2)]
SETTING = {"tracking": "mlflow", "tracking_uri": None}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A run folder with what is logged of one split, without a training."""
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'mri-alm[tracking]'")
    (tmp_path / "split_0").mkdir()
    (tmp_path / "config.json").write_text('{"settings": {}, "versions": {}, "config": {}}')
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "split_0" / "split.json").write_text(json.dumps({"epochs": EPOCHS, "best": {"epoch": 2}}))
    (tmp_path / "split_0" / "model.pt").write_bytes(b"weights")
    return tmp_path


class Gone:
    """A server that went away, and whose address stands in the error."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(f"{name}: https://secret@host does not answer")


def test_a_server_that_goes_away_stops_nothing_and_hides_no_error(bare: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="a bug"), tracking(SETTING, RunFolder(bare)) as run:  # noqa: PT012
        assert run is not None
        run.client = Gone()
        run.epochs(0, EPOCHS[:1])
        run.epochs(0, EPOCHS)
        raise KeyError("a bug")
    told = [text for text in caplog.messages if "MLflow failed (ConnectionError). The training goes on" in text]
    assert len(told) == 1
    assert "secret" not in caplog.text


def test_what_a_server_missed_is_logged_at_the_end(bare: Path) -> None:
    with tracking(SETTING, RunFolder(bare)) as run:
        assert run is not None
        server, run.client = run.client, Gone()
        run.epochs(0, EPOCHS[:1])
        run.client = server
        run.epochs(0, EPOCHS)
        run.finish(1)
    parent, (child,) = runs_of(bare)
    assert (parent.info.status, child.info.status) == ("FINISHED", "FINISHED")
    assert [one.step for one in client_of(bare).get_metric_history(child.info.run_id, "val_auc")] == [1, 2]


def test_one_split_alone_leaves_no_run_as_running(manifest: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'mri-alm[tracking]'")
    options = {"tracking": "mlflow", "splits": 2, "max_epochs": 1}
    run = train(manifest, tmp_path / "run", only_split=0, **options)
    parent, (child,) = runs_of(run)
    assert (parent.info.status, child.info.status) == ("SCHEDULED", "FINISHED")
    train(manifest, run, only_split=1, **options)
    again, children = runs_of(run)
    assert again.info.run_id == parent.info.run_id
    assert [one.info.status for one in (again, *children)] == ["FINISHED"] * 3


def test_an_interrupt_ends_the_splits_with_their_parent(bare: Path) -> None:
    with pytest.raises(KeyboardInterrupt), tracking(SETTING, RunFolder(bare)) as run:  # noqa: PT012
        assert run is not None
        run.epochs(0, EPOCHS)
        raise KeyboardInterrupt
    parent, (child,) = runs_of(bare)
    assert (parent.info.status, child.info.status) == ("FAILED", "FAILED")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tracking": "wandb"},
            r'^tracking must be mlflow, or left out \(TensorBoard is always written\), got "wandb"',
        ),
        ({"tracking_uri": "postgresql://me:secret@host/db"}, r"^tracking_uri holds a password.*MLFLOW_TRACKING_URI"),
        ({"tracking_uri": "https://secret@host"}, r"^tracking_uri holds a password, a token"),
        ({"tracking_uri": "mysql://host/db?user=me&Password=secret"}, r"^tracking_uri holds a password"),
    ],
)
def test_what_cannot_be_tracked_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        check_tracking({"tracking": "mlflow", "tracking_uri": None} | settings)
    assert "secret" not in str(refused.value)


def test_mlflow_that_is_not_installed_is_said(
    manifest: Path, tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    text = refusal(train, manifest, tmp_path / "run", tracking="mlflow")
    assert "Install it: pip install 'mri-alm[tracking]'." in text
    assert not (tmp_path / "run").exists()
