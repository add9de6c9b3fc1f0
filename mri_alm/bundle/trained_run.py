"""Ten checkpoints, one logit per exam: the ensemble, its predictions, and a finished run that scores."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ignite.engine import Events
from monai.bundle import ConfigParser
from monai.engines import SupervisedEvaluator
from monai.transforms import Compose
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load
from scipy.special import expit
from torch import Tensor, nn

from mri_alm.bundle.checkpoints import LARGEST_WEIGHTS, tensors_in
from mri_alm.bundle.config import with_choices
from mri_alm.bundle.old_runs import own_for_scoring
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.bundle.settings import PRIVATE_SETTINGS, TABLE, current_names, is_data
from mri_alm.bundle.shipped import differences, refuse_code, settings_in, shipped_config
from mri_alm.cohort.protocol import BELOW_GATE, quality_of, training_note, unlike
from mri_alm.errors import InputError
from mri_alm.metrics.threshold import OperatingPoint
from mri_alm.runtime.files import read_file, shown

logger = logging.getLogger("mri_alm")

SCORE_COLUMNS = (
    "study", "logit", "score", "spread", "threshold", "dce_needed", "warnings", "quality", "model_note",
    "gland_ml", "gland_confidence",
)  # fmt: skip


class Ensemble(nn.Module):
    """Members side by side: one image in, one logit per member out.

    Args:
        members: Networks that each map ``(B, C, X, Y, Z)`` to ``(B, 1)`` logits.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, image: Tensor) -> Tensor:
        """Logits ``(B, M)``, a column per member; their mean is the ensemble's logit (before the sigmoid)."""
        return torch.cat([member(image) for member in self.members], dim=1)


class TrainedRun:
    """A finished run folder: the ensemble, the preprocessing it was trained with, and its operating point.

    Args:
        folder: ``runs/<name>`` as written by ``configs/prostate_alm.json``, or what `pipelines/export_bundle.py` made
            of it.
        trust: True executes the run's own config where it differs from the shipped one in more than settings; False
            refuses such a run (:mod:`mri_alm.bundle.shipped`).

    Attributes:
        settings: By name, those of the training; a setting that did not exist then has its default.

    Raises:
        InputError: If the run is not finished, its config is refused, or a checkpoint is not the one the threshold was
            set for.
    """

    def __init__(self, folder: Path | str, *, trust: bool = False) -> None:
        self.run = RunFolder(folder)
        for path in (self.run.config, self.run.threshold):
            if not path.is_file():
                raise InputError(
                    f"{self.run.path} has no {path.name}: it is no finished run. Train it to the end first."
                )
        self.point, self.checkpoints = self.run.operating_point()
        self.trained_on = self.run.trained_on()
        record, shipped = self.run.record, shipped_config("prostate_alm")
        own = differences(record["config"], shipped)
        if own and trust is not True:
            refuse_code(self.run.config, own, record["versions"])
        if own:
            logger.warning("%s differs from the shipped config at %d places: trusted, it is run.", folder, len(own))
        known = shipped | settings_in(record["config"], shipped) | own_for_scoring(record["config"])
        self.config = record["config"] if own else known
        self.parser = ConfigParser(deepcopy(self.config))
        self.settings = self._settings()

    def _settings(self) -> dict[str, Any]:
        defaults = {name: setting.default for name, setting in TABLE["prostate_alm"].items()}
        found = defaults | current_names(self.config)
        return {
            name: value
            for name, value in with_choices(found).items()
            if name in TABLE["prostate_alm"] and is_data(value)
        }

    @property
    def public_settings(self) -> dict[str, Any]:
        """Settings that a shared file may show."""
        return {name: value for name, value in self.settings.items() if name not in PRIVATE_SETTINGS}

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run.path

    def network(self) -> nn.Module:
        """One member without trained weights.

        Raises:
            InputError: If the settings give none, such as a normalisation that MONAI does not know.
        """
        try:
            network: nn.Module = self.parser.get_parsed_content("network_def")
        except (RuntimeError, TypeError, ValueError) as error:  # MONAI wraps what a component raises
            cause = error.__cause__ or error
            raise InputError(
                f"{self.run.config}: no network can be made of these settings ({type(cause).__name__}: "
                f"{shown(str(cause))}). Look at features, norm, dropout and loss."
            ) from error
        return network

    def ensemble(self) -> Ensemble:
        """The members with their best weights, in evaluation mode; every checkpoint is checked against its digest."""
        members = []
        for name, digest in self.checkpoints.items():
            path = self.run.weights(name)
            content = (
                read_file(path, LARGEST_WEIGHTS) if path.is_file() else b""
            )  # once: what is loaded is what was checked
            if hashlib.sha256(content).hexdigest() != digest:
                raise InputError(
                    f"{path} is not the checkpoint that the threshold was set for: its SHA-256 differs, so it is "
                    "damaged or another training's. Restore it, or run training again."
                )
            members.append(_with_weights(self.network(), content, path))
        return Ensemble(members).eval()

    def preprocessing(self) -> Compose:
        """From a manifest row to the network's input, without augmentation."""
        return Compose(self.parser.get_parsed_content("preprocessing"))


def load_member(network: nn.Module, path: Path) -> nn.Module:
    """A copy of ``network`` with the weights of a ``model.pt`` or a ``.safetensors`` file.

    Raises:
        InputError: If the file cannot be read or its weights are those of another network.
    """
    try:
        content = read_file(path, LARGEST_WEIGHTS)
    except OSError as error:
        raise InputError(f"{path} holds no weights that can be read ({error.strerror}). Restore the file.") from None
    return _with_weights(network, content, path)


def _with_weights(network: nn.Module, content: bytes, path: Path) -> nn.Module:
    """The same of the file's content."""
    network = deepcopy(network)
    packed = path.suffix == ".safetensors"
    state: Any = _safetensors(content, path) if packed else tensors_in(content, path).get("model")
    _check_weights(path, state, network.state_dict())
    network.load_state_dict(state)
    return network


def _check_weights(path: Path, state: Any, expected: Mapping[str, Any]) -> None:
    """Refuse what torch would take for another's weights, convert in silence, or fail on.

    Raises:
        InputError: Naming the first weight that is wrong.
    """
    if not isinstance(state, dict):
        raise InputError(f"{path} holds no weights: a {type(state).__name__} where they belong. Restore the file.")
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{str(name)[:60]} is none of its weights" for name in state if name not in expected]
    for name, tensor in expected.items():
        if isinstance(tensor, Tensor) and (problem := _wrong_weight(state.get(name), tensor)):
            problems.append(f"{name} {problem}")
    if problems:
        raise InputError(
            f"{path} holds the weights of another network than the run's config describes, or damaged ones "
            f"({problems[0]}). Restore the file."
        )


def _wrong_weight(found: Any, expected: Tensor) -> str:
    """What is wrong with a weight in place of another one; empty if nothing is."""
    if not isinstance(found, Tensor):
        return f"is a {type(found).__name__}, no tensor"
    if found.layout != torch.strided or found.is_nested or found.is_meta:
        return "is no plain tensor"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"is {_form(found)} instead of {_form(expected)}"
    lost = torch.isfinite(expected).cpu() & ~torch.isfinite(found)
    return "holds values that are no finite numbers" if bool(lost.any()) else ""


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _safetensors(content: bytes, path: Path) -> dict[str, Tensor]:
    try:
        return load(content)
    except SafetensorError as error:
        raise InputError(f"{path} cannot be read as safetensors ({type(error).__name__}). Restore it.") from error


def collect(evaluator: SupervisedEvaluator) -> tuple[list[str], NDArray[np.float64]]:
    """Run a MONAI evaluator (``decollate=False``) and keep what it predicts: names ``(N,)`` and logits ``(N, M)``."""
    names: list[str] = []
    logits: list[Tensor] = []

    def keep(engine: Any) -> None:
        names.extend(engine.state.batch["study"])
        logits.append(engine.state.output["pred"].detach().double().cpu())

    with evaluator.add_event_handler(Events.ITERATION_COMPLETED, keep):
        evaluator.run()
    return names, torch.cat(logits).numpy()


def ensemble_logit(logits: NDArray[np.float64], *, largest: bool) -> NDArray[np.float64]:
    """The logit ``(N,)`` that an exam is decided by.

    Args:
        logits: ``(N, M)``, a column per member.
        largest: Whether that is the largest one, as a run with a minmax threshold decides whatever threshold it is
            given; otherwise it is the mean.
    """
    return np.asarray(logits.max(1) if largest else logits.mean(1))


def score_rows(
    names: Sequence[str],
    logits: NDArray[np.float64],
    point: OperatingPoint,
    reports: Mapping[str, Mapping[str, Any]],
    *,
    trained_on: Mapping[str, Any] | None,
    largest: bool = False,
) -> list[dict[str, Any]]:
    """Rows of ``scores.csv``: logit, score (its sigmoid), spread (SD of the members' logits), decision.

    An exam of a quality below the gate (:mod:`mri_alm.cohort.protocol`) needs DCE whatever its score. Where there is no
    threshold (:func:`mri_alm.training.run.no_threshold`) the cells of threshold and decision are empty.

    Args:
        names: ``(N,)`` studies.
        logits: ``(N, M)``.
        point: Threshold on the score.
        reports: Study to its facts and warnings, see :class:`mri_alm.bundle.LoadRegisteredExamd`.
        trained_on: See :meth:`mri_alm.bundle.run_folder.RunFolder.trained_on`.
        largest: See :func:`ensemble_logit`.
    """
    found = ensemble_logit(logits, largest=largest)
    scores = expit(found)
    threshold = "" if np.isneginf(point.threshold) else point.threshold
    rows = []
    for n, x, s, d, needed in zip(names, found, scores, logits.std(1), point.decide(scores), strict=True):
        report = reports[n]
        quality = quality_of(report)
        warnings = " | ".join([*report["warnings"], *quality.warnings, *unlike(report, trained_on)])
        decided = int(needed or quality.level == BELOW_GATE) if point.n_positive else ""
        cells = (n, float(x), float(s), float(d), threshold, decided, warnings, str(quality), training_note(trained_on))
        gland = (report.get("gland_ml", ""), report.get("gland_confidence", ""))
        rows.append(dict(zip(SCORE_COLUMNS, cells + gland, strict=True)))
    return rows


class MeanLogit(nn.Module):
    """An ensemble as one network: the mean of its members' logits, which the decision of most runs rests on.

    Args:
        ensemble: Maps ``(B, C, X, Y, Z)`` to logits ``(B, M)``.
    """

    def __init__(self, ensemble: nn.Module) -> None:
        super().__init__()
        self.ensemble = ensemble

    def forward(self, image: Tensor) -> Tensor:
        """Logits ``(B, 1)`` of an image ``(B, C, X, Y, Z)``."""
        logits: Tensor = self.ensemble(image).mean(dim=1, keepdim=True)
        return logits


class LargestLogit(MeanLogit):
    """The same with the largest logit, which the decision of a run with a minmax threshold rests on."""

    def forward(self, image: Tensor) -> Tensor:
        """Logits ``(B, 1)`` of an image ``(B, C, X, Y, Z)``."""
        logits: Tensor = self.ensemble(image).amax(dim=1, keepdim=True)
        return logits


def averaged(member: nn.Module, count: int) -> MeanLogit:
    """``count`` copies of a network as one that gives their mean logit ``(B, 1)``; what a bundle's configs call.

    That of a minmax run calls :func:`of_largest`.

    Args:
        member: Maps ``(B, C, X, Y, Z)`` to ``(B, 1)`` logits.
        count: Members of the ensemble.
    """
    return MeanLogit(Ensemble([deepcopy(member) for _ in range(count)]))


def of_largest(member: nn.Module, count: int) -> LargestLogit:
    """The same with their largest logit.

    Args:
        member: Maps ``(B, C, X, Y, Z)`` to ``(B, 1)`` logits.
        count: Members of the ensemble.
    """
    return LargestLogit(Ensemble([deepcopy(member) for _ in range(count)]))
