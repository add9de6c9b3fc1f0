"""A finished run folder read back for a report: settings, curves of training, held-out scores, operating point."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from mri_alm.bundle.settings import PRIVATE_SETTINGS
from mri_alm.errors import InputError
from mri_alm.metrics.threshold import OperatingPoint, one_score_per_patient
from mri_alm.runtime.files import sha256
from mri_alm.runtime.tables import read_table


@dataclass(frozen=True)
class RunRecord:
    """What a report needs of ``runs/<name>``.

    Attributes:
        settings: Of the training, without places on the machine.
        exclude: Studies left out.
        versions: Package to version.
        point: The operating point.
        held_out: Labels ``(H,)`` and scores ``(H,)`` of training patients by members that did not see them: what the
            operating point is set on.
        trained: Study to label of all training studies.
        patients: Those trained on.
        synthetic: Whether they are phantoms.
        history: Per split, the report of every epoch.
        best_epoch: Per split, the epoch whose weights were kept.
        members: AUCs of the members on their validation studies, and on the test cohort where there is one.
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
    synthetic: bool
    history: dict[str, list[dict[str, float]]]
    best_epoch: dict[str, int]
    members: dict[str, list[float]]
    checkpoints: dict[str, str]
    digests: dict[str, str]


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; nothing of it is changed.

    Raises:
        InputError: If the run is not finished, or a file cannot be read.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        threshold = json.loads((folder / "threshold.json").read_text("utf-8"))
        metrics = json.loads((folder / "metrics.json").read_text("utf-8"))
        checkpoints = threshold.pop("checkpoints")
        splits = {name: json.loads((folder / name / "split.json").read_text("utf-8")) for name in checkpoints}
        held_out = read_table(folder / "heldout.csv", ("study", "label", "logit"))
        trained = read_table(folder / "splits.csv", ("study", "patient", "label"))
        patient = {row["study"]: row["patient"] for row in trained}
        members = {"validation": metrics["validation_auc"]["members"]}
        if "test" in metrics:
            members["test"] = metrics["test"]["member_auc"]["members"]
        return RunRecord(
            settings={name: value for name, value in config["settings"].items() if name not in PRIVATE_SETTINGS},
            exclude=tuple(map(str, config["settings"].get("exclude") or ())),
            versions=config["versions"],
            point=OperatingPoint.from_json(threshold),
            held_out=one_score_per_patient(
                [patient[row["study"]] for row in held_out],
                np.array([int(row["label"]) for row in held_out]),
                expit(np.array([float(row["logit"]) for row in held_out])),
            ),
            trained={row["study"]: int(row["label"]) for row in trained},
            patients=frozenset(patient.values()),
            synthetic=all(row["study"].startswith("phantom_") for row in trained),
            history={name: split["epochs"] for name, split in splits.items()},
            best_epoch={name: int(split["best"]["epoch"]) for name, split in splits.items()},
            members=members,
            checkpoints=checkpoints,
            digests={"config.json": sha256(folder / "config.json")}
            | {f"{name}/model.pt": digest for name, digest in checkpoints.items()},
        )
    except OSError as error:
        raise InputError(
            f"{error.filename}: cannot be read ({error.strerror}). --run takes the folder of a finished training."
        ) from None
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{folder} is no run folder of this version ({error.__class__.__name__}: {error}). Start its training "
            "command again, which goes on from what is finished and writes the files anew."
        ) from error
