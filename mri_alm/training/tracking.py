"""A run recorded in MLflow (setting ``tracking``): settings, curves, report and models under one parent run."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mri_alm.bundle.run_folder import RunFolder
from mri_alm.bundle.settings import FREE_SETTINGS, PRIVATE_SETTINGS
from mri_alm.errors import InputError
from mri_alm.runtime.files import read_json, write_json

logger = logging.getLogger("mri_alm")

EXPERIMENT = "mri-alm"


@contextlib.contextmanager
def tracking(config: Mapping[str, Any], folder: RunFolder) -> Iterator["MlflowRun | None"]:
    """What the settings ``tracking`` and ``tracking_uri`` ask for; None when they ask for nothing.

    Args:
        config: The config of the run.
        folder: The run's, with its ``config.json``.
    """
    check_tracking(config)
    if not config["tracking"]:
        yield None
        return
    run = MlflowRun(folder, config["tracking_uri"])
    try:
        yield run
    except BaseException:
        with run.tolerated():
            run.end("FAILED")
        raise


def check_tracking(config: Mapping[str, Any]) -> None:
    """Refuse what cannot be tracked, before hours of work.

    Raises:
        InputError: If the name is unknown, MLflow is not installed, or the address holds a password or a token.
    """
    name, uri = config["tracking"], config["tracking_uri"]
    if name not in (None, "mlflow"):
        raise InputError(f'tracking must be mlflow, or left out (TensorBoard is always written), got "{name}".')
    if uri and re.search(r"://[^/?#]*@|password=", uri, re.IGNORECASE):
        raise InputError(
            "tracking_uri holds a password, a token or a user's name (before @, or password=), and it would stand in "
            "the run's config.json. Leave it out and set the environment variable MLFLOW_TRACKING_URI."
        )
    if name:
        _mlflow()


class MlflowRun:
    """One run folder as one MLflow run, with a child run per split.

    A run folder remembers its run (``mlflow.json``), so a second start goes on with it. One process writes.

    Args:
        folder: The run's, with its ``config.json``.
        uri: Of MLflow's store; None is the environment variable MLFLOW_TRACKING_URI, or else ``mlflow.db`` in the
            folder.
    """

    def __init__(self, folder: RunFolder, uri: str | None = None) -> None:
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        self.folder, self.local = folder, uri is None
        self.client = _mlflow().MlflowClient(uri or f"sqlite:///{folder.mlflow_store.resolve()}")
        self.ids = read_json(folder.mlflow_ids) if folder.mlflow_ids.is_file() else {}
        self.steps: dict[str, int] = {}
        self._failed = False
        self._experiment = self._find_experiment()
        if self.local:
            folder.mlflow_store.chmod(0o600)
        self.parent = self._run("parent", folder.path.name)
        self._log_settings()

    def epochs(self, split: int, history: Sequence[Mapping[str, float]]) -> None:
        """Log the epochs of a split that are not there yet; after an error of MLflow, :meth:`finish` does it.

        Args:
            split: Its number.
            history: Of its epochs, as in ``split.json``.
        """
        if not self._failed:
            with self.tolerated():
                self._log_epochs(split, history)

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """An error of MLflow in this block is told, once, and stops nothing."""
        try:
            yield
        except Exception as error:  # of its server, its database or its files; the text may hold the address
            if not self._failed:
                logger.warning(
                    "MLflow failed (%s). The training goes on; its curves are logged when it is finished, or by the "
                    "same command started again.",
                    type(error).__name__,
                )
            self._failed = True

    def _log_epochs(self, split: int, history: Sequence[Mapping[str, float]]) -> None:
        from mlflow.entities import Metric

        name = self.folder.split(split).name
        run = self._run(name, name, {"mlflow.parentRunId": self.parent})
        if name not in self.steps:
            logged = self.client.get_metric_history(run, "epoch")
            self.steps[name] = max((metric.step for metric in logged), default=0)
        fresh = [report for report in history if report["epoch"] > self.steps[name]]
        now = _now()
        metrics = [Metric(key, float(value), now, int(one["epoch"])) for one in fresh for key, value in one.items()]
        for start in range(0, len(metrics), 1000):  # MLflow's limit
            self.client.log_batch(run, metrics[start : start + 1000])
        self.steps[name] += len(fresh)

    def finish(self, splits: int) -> None:
        """Log the finished run: metrics, report, threshold, and every member's model with its child run.

        Args:
            splits: Members of the ensemble.
        """
        for name, value in _numbers(read_json(self.folder.metrics)):
            self.client.log_metric(self.parent, name, value)
        for path in (self.folder.report, self.folder.metrics, self.folder.threshold):
            if path.is_file():
                self.client.log_artifact(self.parent, str(path))
        for number in range(splits):
            split = self.folder.split(number)
            record = read_json(split.record)
            self._log_epochs(number, record["epochs"])
            self.client.set_tag(self.ids[split.name], "best_epoch", record["best"]["epoch"])
            self.client.log_artifact(self.ids[split.name], str(split.model))
        self.end("FINISHED")

    def wait(self) -> None:
        """Close the runs of the splits that were logged; the parent waits (``SCHEDULED``) for the others."""
        with self.tolerated():
            for name in self.steps:
                self.client.set_terminated(self.ids[name], "FINISHED")
            self.client.update_run(self.parent, status="SCHEDULED")

    def end(self, status: str) -> None:
        """Close the parent run and the splits' that were logged as ``FINISHED`` or ``FAILED``."""
        for run in (*(self.ids[name] for name in self.steps), self.parent):
            self.client.set_terminated(run, status)

    def _find_experiment(self) -> str:
        found = self.client.get_experiment_by_name(EXPERIMENT)
        if found:
            return str(found.experiment_id)
        place = None
        if self.local:
            self.folder.mlflow_artifacts.mkdir(mode=0o700, exist_ok=True)
            place = self.folder.mlflow_artifacts.resolve().as_uri()
        return str(self.client.create_experiment(EXPERIMENT, artifact_location=place))

    def _run(self, key: str, name: str, tags: Mapping[str, str] | None = None) -> str:
        """The id of the parent's or a split's run: the one that an earlier start made, or a new one."""
        if key in self.steps:
            return self.ids[key]
        if key in self.ids and self._exists(self.ids[key]):
            self.client.update_run(self.ids[key], status="RUNNING")
        else:
            run = self.client.create_run(self._experiment, tags=dict(tags or {}), run_name=name)
            self.ids[key] = run.info.run_id
            write_json(self.folder.mlflow_ids, self.ids)
        return str(self.ids[key])

    def _exists(self, run: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return bool(self.client.get_run(run).info.lifecycle_stage == "active")
        except MlflowException:
            return False  # of another store

    def _log_settings(self) -> None:
        """Settings as parameters, which MLflow never changes; those that may change between two starts as tags."""
        record = self.folder.record
        known = self.client.get_run(self.parent).data.params
        for name, value in record["settings"].items():
            if name in FREE_SETTINGS and name not in PRIVATE_SETTINGS:
                self.client.set_tag(self.parent, name, value)
            elif name not in (*PRIVATE_SETTINGS, *known):
                self.client.log_param(self.parent, name, value)
        for name, value in record["versions"].items():
            self.client.set_tag(self.parent, f"version.{name}", value)


def _mlflow() -> Any:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    try:
        import mlflow
    except ImportError:
        raise InputError("tracking mlflow needs MLflow. Install it: pip install 'mri-alm[tracking]'.") from None
    for name in ("mlflow", "alembic"):  # they announce every table of a new database
        logging.getLogger(name).setLevel(logging.WARNING)
    return mlflow


def _numbers(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of nested objects, with the names of their places."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)


def _now() -> int:
    return int(time.time() * 1000)
