"""A run folder: what every file of it is called, and how each is read back."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from mri_alm.bundle.settings import PRIVATE_SETTINGS, SETTINGS, current_names, is_data
from mri_alm.cohort.protocol import check_protocol
from mri_alm.errors import InputError
from mri_alm.metrics.threshold import OperatingPoint, one_score_per_patient
from mri_alm.runtime.files import DamagedFileError, Fields, read_json, sha256
from mri_alm.runtime.tables import read_table

_SPLIT = re.compile(r"split_\d{1,6}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
LARGEST_CONFIG = 1 << 20  # bytes; those of this project have 20,000
_GIVEN = "a file"  # stands for a place that no shared file shows
_NEEDED = {"spacing", "size"}  # settings that a score's picture and a bundle's card are made with


class SplitFolder:
    """What one split leaves in a run folder.

    Attributes:
        name: Such as ``"split_3"``.
        path: The folder; TensorBoard's event files lie there too.
        model: Weights of the epoch that is kept.
        last: All that the next epoch depends on.
        previous: The ``last`` before, in case that one is damaged.
        record: Best epoch and every epoch's report; makes the split finished.
        held_out: Scores of the validation exams by :attr:`model`.
        multipliers: Of the positives that it was trained on, at the end; none without the constraint.
        result: In place of the two, of a run on images: with the scores of all test images.
    """

    def __init__(self, path: Path) -> None:
        self.name, self.path = path.name, path
        self.model, self.last, self.previous = (path / f"{name}.pt" for name in ("model", "last", "previous"))
        self.record, self.held_out, self.result = path / "split.json", path / "validation.csv", path / "result.json"
        self.multipliers = path / "multipliers.csv"

    def history(self) -> tuple[list[dict[str, float]], int]:
        """The report of every epoch, and the epoch whose weights were kept.

        Raises:
            DamagedFileError: If ``split.json`` is not what was written.
            FileNotFoundError: If there is none.
        """
        fields = Fields(str(self.record), read_json(self.record))
        items = fields.items("epochs")
        epochs = [items.object(number) for number in items.content]
        for epoch in epochs:
            for name in {"epoch", *epoch.content}:
                epoch.number(name)
        return [dict(epoch.content) for epoch in epochs], fields.object("best").whole("epoch")


class RunFolder:
    """The files of ``runs/<name>``, or of what `pipelines/export_bundle.py` made of one.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config, self.threshold, self.metrics, self.protocol = (
            self.path / f"{name}.json" for name in ("config", "threshold", "metrics", "protocol")
        )
        self.scores, self.held_out, self.splits, self.hardest = (
            self.path / f"{name}.csv" for name in ("scores", "heldout", "splits", "hardest")
        )
        self.report, self.lock = self.path / "report.html", self.path / ".lock"
        self.log = self.path / "run.log"
        self.mlflow_ids, self.mlflow_store = self.path / "mlflow.json", self.path / "mlflow.db"
        self.mlflow_artifacts = self.path / "mlflow_artifacts"

    def split(self, split: int | str) -> SplitFolder:
        """A split by its number or its name."""
        return SplitFolder(self.path / (split if isinstance(split, str) else f"split_{split}"))

    def split_lock(self, split: int) -> Path:
        """Held by the process that trains a split."""
        return self.path / f".split_{split}.lock"

    def weights(self, name: str) -> Path:
        """The weights of a member by its split's name, in either form: an exported bundle has safetensors."""
        exported = self.path / "models" / f"{name}.safetensors"
        return exported if exported.is_file() else self.split(name).model

    @property
    def record(self) -> dict[str, Any]:
        """``config.json``: ``settings``, ``versions``, ``config`` (macros resolved), each an object.

        Raises:
            DamagedFileError: If it is not what was written.
            FileNotFoundError: If there is none.
        """
        fields = Fields(str(self.config), read_json(self.config, most=LARGEST_CONFIG))
        versions = fields.object("versions")
        for name in versions.content:
            versions.text(name)
        return {**fields.content, **{name: dict(fields.object(name).content) for name in ("settings", "config")}}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by name, as the run wrote them, old names as the new ones.

        Raises:
            DamagedFileError: If one that is used has a value that it cannot have, or one that is needed is missing.
        """
        found = current_names(self.record["settings"])
        fields = Fields(f"{self.config}, settings", found)
        for name in _NEEDED - found.keys():
            raise fields.refused(name, "there")
        for name in found.keys() - PRIVATE_SETTINGS | {"exclude"} & found.keys():  # of the private ones, the one used
            value = found[name]
            if name in SETTINGS and (problem := SETTINGS[name].problem(value)):
                raise fields.refused(name, problem.removeprefix("must be "))
            if not is_data(value) or not _can_be_shown(value):
                raise fields.refused(name, "a number, a printable text, true, false, null, or a list of these")
        return found

    @property
    def public_settings(self) -> dict[str, Any]:
        """Those that a shared file may show."""
        return {name: value for name, value in self.settings.items() if name not in PRIVATE_SETTINGS}

    def operating_point(self) -> tuple[OperatingPoint, dict[str, str]]:
        """The threshold, and SHA-256 of each member's weights that it belongs to, by split.

        Raises:
            InputError: If the file is damaged, or names a file elsewhere.
        """
        fields = Fields(str(self.threshold), read_json(self.threshold))
        digests = fields.object("checkpoints")
        if not digests.content:
            raise fields.refused("checkpoints", "an object with at least one split")
        if wrong := [name for name in digests.content if not _SPLIT.fullmatch(name)]:
            raise InputError(
                f"{self.threshold} names a checkpoint outside the folder: {wrong[0][:60]}. Its members are called "
                "split_0, split_1 and so on."
            )
        for name, digest in digests.content.items():
            if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
                raise digests.refused(name, "64 hexadecimal digits")
        fields = Fields(fields.place, {name: one for name, one in fields.content.items() if name != "checkpoints"})
        point = OperatingPoint.from_json(fields.content, fields.place)
        if point.folds not in (0, len(digests.content)):
            raise fields.refused("folds", f"{len(digests.content)}, the number of checkpoints")
        return point, dict(digests.content)

    def member_aucs(self) -> dict[str, list[float]]:
        """AUCs of the members, "validation" and "test" where there are such exams, by ``metrics.json``.

        Raises:
            DamagedFileError: If it is not what was written.
            FileNotFoundError: If there is none.
        """
        fields = Fields(str(self.metrics), read_json(self.metrics))
        found = {"validation": fields.object("validation_auc")} if "validation_auc" in fields.content else {}
        if "test" in fields.content:
            found["test"] = fields.object("test").object("member_auc")
        members = {side: one.items("members") for side, one in found.items()}
        return {side: [aucs.number(member, 0, 1) for member in aucs.content] for side, aucs in members.items()}

    def trained_exams(self) -> list[dict[str, str]]:
        """Study, patient and label of all training exams.

        Raises:
            InputError: If the table cannot be read.
        """
        return read_table(self.splits, ("study", "patient", "label"))

    def trained_on(self) -> dict[str, Any] | None:
        """What the training saw, see :func:`mri_alm.cohort.protocol.training_protocol`; None where nothing says it.

        Runs of before wrote no ``protocol.json``; their phantoms are known by the studies' names.

        Raises:
            InputError: If the file is damaged.
        """
        if self.protocol.is_file():
            return check_protocol(read_json(self.protocol), self.protocol)
        exams = self.trained_exams() if self.splits.is_file() else []
        synthetic = sum(row["study"].startswith("phantom_") for row in exams)
        return {"exams": len(exams), "synthetic": synthetic, "words": {}, "ranges": {}} if synthetic else None

    def digests(self, checkpoints: Mapping[str, str]) -> dict[str, str]:
        """File to SHA-256: config and checkpoints."""
        return {self.config.name: sha256(self.config)} | {f"{k}/model.pt": digest for k, digest in checkpoints.items()}


def model_digest(checkpoints: Mapping[str, str]) -> str:
    """SHA-256 that stands for all members of a model, from theirs (split to digest)."""
    return hashlib.sha256("|".join(map(str, checkpoints.values())).encode()).hexdigest()


@dataclass(frozen=True)
class RunRecord:
    """What a report needs of a finished run.

    Attributes:
        settings: Of the training, without places on the machine.
        exclude: Studies left out.
        versions: Package to version.
        point: The operating point.
        held_out: Labels ``(H,)`` and scores ``(H,)`` of training patients by members that did not see them: what the
            operating point is set on.
        trained: Study to label of all training studies.
        patients: Those trained on.
        trained_on: What their exams were like, see :meth:`RunFolder.trained_on`.
        history: Per split, the report of every epoch.
        best_epoch: Per split, the epoch whose weights were kept.
        members: AUCs of the members on their validation studies and on the test cohort, where there are such.
        checkpoints: Split to SHA-256 of its weights.
        digests: File to SHA-256: config and checkpoints.
    """

    settings: dict[str, Any]
    exclude: tuple[str, ...]
    versions: dict[str, str]
    point: OperatingPoint
    held_out: tuple[NDArray[np.int64], NDArray[np.float64]]
    trained: dict[str, int]
    patients: frozenset[str]
    trained_on: dict[str, Any] | None
    history: dict[str, list[dict[str, float]]]
    best_epoch: dict[str, int]
    members: dict[str, list[float]]
    checkpoints: dict[str, str]
    digests: dict[str, str]


def _can_be_shown(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return all(map(_can_be_shown, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and value.isprintable())


def _per_patient(
    rows: list[dict[str, str]], patient: Mapping[str, str]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Labels and scores of the held-out patients; none of a model of all patients."""
    label = np.array([int(row["label"]) for row in rows], dtype=np.int64)
    score = expit(np.array([float(row["logit"]) for row in rows]))
    return one_score_per_patient([patient[row["study"]] for row in rows], label, score) if rows else (label, score)


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; nothing of it is changed.

    Raises:
        InputError: If the run is not finished, or a file cannot be read.
    """
    run = RunFolder(folder)
    try:
        point, checkpoints = run.operating_point()
        splits = {name: run.split(name).history() for name in checkpoints}
        held_out = read_table(run.held_out, ("study", "label", "logit")) if point.n_positive else []
        trained = run.trained_exams()
        patient = {row["study"]: row["patient"] for row in trained}
        return RunRecord(
            settings=run.public_settings | ({"init_weights": _GIVEN} if run.settings.get("init_weights") else {}),
            exclude=tuple(map(str, run.settings.get("exclude") or ())),
            versions=run.record["versions"],
            point=point,
            held_out=_per_patient(held_out, patient),
            trained={row["study"]: int(row["label"]) for row in trained},
            patients=frozenset(patient.values()),
            trained_on=run.trained_on(),
            history={name: epochs for name, (epochs, _) in splits.items()},
            best_epoch={name: best for name, (_, best) in splits.items()},
            members=run.member_aucs(),
            checkpoints=checkpoints,
            digests=run.digests(checkpoints),
        )
    except OSError as error:
        raise InputError(
            f"{error.filename}: cannot be read ({error.strerror}). --run takes the folder of a finished training."
        ) from None
    except (KeyError, ValueError) as error:
        if isinstance(error, InputError) and not isinstance(error, DamagedFileError):
            raise
        raise InputError(
            f"{folder} is no run folder of this version ({error.__class__.__name__}: {error}). Start its training "
            "command again, which goes on from what is finished and writes the files anew."
        ) from error
