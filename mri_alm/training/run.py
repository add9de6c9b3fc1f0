"""The main job: prepare every exam once, train the splits, ensemble, set the threshold, score the tests, report."""

import hashlib
import json
import logging
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from monai.bundle import ConfigParser
from numpy.typing import NDArray
from scipy.special import expit
from tqdm.contrib.logging import logging_redirect_tqdm

from mri_alm.alm.processes import first_process_first, process_rank, world_size
from mri_alm.bundle.config import running_config
from mri_alm.bundle.old_runs import as_it_began
from mri_alm.bundle.run_folder import RunFolder, SplitFolder, model_digest
from mri_alm.bundle.settings import check_values
from mri_alm.bundle.trained_run import SCORE_COLUMNS, Ensemble, ensemble_logit, score_rows
from mri_alm.bundle.transforms import for_each_study
from mri_alm.cohort.manifest import Cohort, ManifestRow
from mri_alm.cohort.protocol import training_note, training_protocol
from mri_alm.errors import InputError, refuse_all
from mri_alm.evaluation.analysis import evaluate
from mri_alm.evaluation.page import write_html_report
from mri_alm.evaluation.performance import decision_counts, ranking_figures
from mri_alm.imaging.pictures import study_thumbnail
from mri_alm.localiser import GLAND_BY
from mri_alm.metrics.ranking import FprRule, auc
from mri_alm.metrics.threshold import (
    OperatingPoint,
    certificate_in_words,
    fixed_fn_threshold,
    minmax_threshold,
    one_score_per_patient,
    rule_in_words,
)
from mri_alm.metrics.uncertainty import newcombe_interval
from mri_alm.phantom.cohort import make_cohort
from mri_alm.runtime.atomic import append_lines, private_files
from mri_alm.runtime.bug_reports import BUG_REPORT, UnexpectedError
from mri_alm.runtime.files import read_json, sha256, write_bytes, write_json
from mri_alm.runtime.interruption import reached, user_errors
from mri_alm.runtime.locks import exclusive_lock
from mri_alm.runtime.progress import progress_bar
from mri_alm.runtime.pseudonyms import state_folder
from mri_alm.runtime.tables import read_table, write_csv
from mri_alm.runtime.tasks import Pool, TaskResult, run_tasks
from mri_alm.training.member import Member, SplitTraining, claimed, say_split, splits_to_train, train_in_turn
from mri_alm.training.tracking import MlflowRun, check_tracking, tracking

logger = logging.getLogger("mri_alm")


@private_files()
def train_and_evaluate(folder: str, *, threads: int, max_fn: int, fpr_rule: FprRule, pool: Pool) -> None:
    """What ``run`` of ``configs/prostate_alm.json`` calls; goes on from whatever an earlier start finished.

    Args:
        folder: Run folder.
        threads: Exams prepared at once.
        max_fn: Held-out positives that the threshold may miss.
        fpr_rule: How the FPR at a TPR is read off the test cohort's curve, see :func:`mri_alm.metrics.fpr_at_tpr`.
        pool: Where the splits are trained.
    """
    config = running_config()
    with user_errors(), logging_redirect_tqdm():
        run = RunFolder(folder)
        config = as_it_began(config, run.record["config"] if run.config.exists() else {})
        TrainingRun(config, Path(folder), threads=threads, max_fn=max_fn, fpr_rule=fpr_rule, pool=pool).run()


def phantom_cohort(train: int, test: int, difficulty: str = "plain") -> Path:
    """Manifest of the built-in cohort of that size and difficulty, made under ``data/`` the first time."""
    kind = "" if difficulty == "plain" else f"_{difficulty}"
    with first_process_first(), progress_bar("phantom", train + test, "study", shown=process_rank() == 0) as bar:
        return make_cohort(
            Path("data") / f"phantom_{train}_{test}{kind}",
            train=train,
            test=test,
            difficulty=difficulty,
            progress=lambda done, _: bar.update(done - bar.n),
        )


class TrainingRun:
    """One run folder; for the arguments see :func:`train_and_evaluate`.

    Args:
        config: The config with macros resolved and overrides applied.

    Raises:
        InputError: If the settings, the cohort or the run folder cannot be used.
    """

    def __init__(
        self, config: dict[str, Any], folder: Path, *, threads: int, max_fn: int, fpr_rule: FprRule, pool: Pool
    ) -> None:
        self.config, self.folder, self.threads, self.max_fn = config, RunFolder(folder), threads, max_fn
        self.fpr_rule, self.pool = fpr_rule, pool
        self.trained_on: dict[str, Any] = {}  # known when every exam is prepared
        if world_size() > 1 and (pool.workers > 1 or pool.backend != "loky"):
            raise InputError("torchrun trains one model in all its processes: leave out --workers and --backend.")
        check_tracking(config)
        parser = ConfigParser(deepcopy(config))
        _refuse_choices_on_folds(parser)
        parser.get_parsed_content("network_def")  # a network that cannot be is refused before a phantom is drawn
        self.cohort: Cohort = parser.get_parsed_content("cohort_data")
        config = self.config = config | {"splits": len(self.cohort.splits)}
        check_values(config)  # splits, which may have been "loo", against only_split
        self.held_out = {study.patient for _, validation in self.cohort.splits for study in validation if study.label}
        if not any(validation for _, validation in self.cohort.splits):
            _refuse_choices_without_validation(parser)
        elif not 0 <= max_fn < len(self.held_out):
            raise InputError(
                f"Cannot allow {max_fn} false negatives: {len(self.held_out)} positive patients are held out by the "
                f"{config['splits']} splits, so --max_fn must be between 0 and {len(self.held_out) - 1}."
            )
        self.splits = SplitTraining(config, self.folder, self.cohort)
        parts = ("train::stratified", "train::preprocessing", "train::handlers::1", "initial_weights")
        Member(config, 0, self.cohort).check(*parts)

    def run(self) -> None:
        """All of it; the last lines say where everything lies. All processes train; the first one does the rest."""
        with claimed(self.folder, self.config, before=self._set_up, after=self._write_splits) as held:
            if process_rank() > 0:
                train_in_turn(self.config, self.splits)
                return
            tracker = held.enter_context(tracking(self.config, self.folder))
            self._train(tracker)
            waiting = [k for k in range(self.config["splits"]) if not self.splits.finished(k)]
            if waiting:
                logger.info("Trained. Splits %s are still to do; the ensemble follows when all are there.", waiting)
                if tracker:
                    tracker.wait()
                return
            with exclusive_lock(self.folder.lock, wait=True):
                self._ensemble()
            if tracker:
                tracker.finish(self.config["splits"])

    def _set_up(self) -> None:
        if self.held_out:
            logger.info("Held out: %s", certificate_in_words(len(self.held_out)))
            logger.info("Which rule: %s", rule_in_words(len({s.patient for s in self.cohort.train if s.label})))
        else:
            logger.warning("Nobody is held out: the model gets no threshold, and nothing says how well it separates.")
        for split in range(self.config["splits"]):
            self.splits.finished(split)  # a folder of another cohort is refused before anything is written
        self._prepare()  # before the claim: the way to leave out a study that fails is another setting

    def _write_splits(self) -> None:
        sides = [{s.study: "validation" for s in held_out} for _, held_out in self.cohort.splits]
        columns = [f"split_{k}" for k in range(len(sides))]
        rows = [
            {"study": s.study, "patient": s.patient, "label": s.label}
            | {column: side.get(s.study, "training") for column, side in zip(columns, sides, strict=True)}
            for s in self.cohort.train
        ]
        write_csv(self.folder.splits, ["study", "patient", "label", *columns], rows)
        write_json(self.folder.protocol, self.trained_on)

    def _prepare(self) -> None:
        """Load and register every exam once, into the cache that all splits and epochs read."""
        cached = Member(self.config, 0, self.cohort).prepared("all")
        numbered = [{"study": item["study"], "number": number} for number, item in enumerate(cached.data)]
        reports, errors = for_each_study(
            lambda item: {item["study"]: cached[item["number"]]["report"]}, numbered, threads=self.threads
        )
        for study, error in errors.items():
            if isinstance(error, UnexpectedError):
                write_bytes(self.folder.path / f"{study}_{BUG_REPORT}", error.report.encode())
        if errors:
            text = "\n".join(f"  study {study}: {error}" for study, error in errors.items())
            names = json.dumps(sorted(errors)).replace('"', "'")
            raise InputError(
                f"{len(errors)} of {len(cached.data)} studies cannot be used (the others are kept):\n{text}\n"
                f'Correct them, or leave them out with --exclude "{names}".'
            )
        report_of = {study: report for one in reports for study, report in one.items()}
        self.trained_on = training_protocol([report_of[study.study] for study in self.cohort.train])
        crops = self.trained_on["words"]["crop_about"]["values"]
        if not self.config.get("localise") and (found := [crop for crop in crops if crop.startswith(GLAND_BY)]):
            logger.warning(
                "The exams are cropped about %s; new ones will be cropped about T2's centre, unless they say where "
                "their gland lies. Add --localise True: the model then looks for it.",
                " and ".join(found),
            )

    def _train(self, tracker: MlflowRun | None) -> None:
        if self.pool.workers > 1 or self.pool.backend != "loky":
            self._train_as_tasks(tracker)
        else:
            train_in_turn(self.config, self.splits, tracker.epochs if tracker else lambda _, __: None)

    def _train_as_tasks(self, tracker: MlflowRun | None) -> None:
        todo, epochs = splits_to_train(self.config), self.config["max_epochs"]
        failed: list[TaskResult] = []
        with progress_bar("train", len(todo) * epochs, "epoch", shown=sys.stderr.isatty()) as bar:
            reached(lambda: f"with {bar.n // epochs} of {len(todo)} splits trained")
            for outcome in run_tasks(self.splits, todo, self.pool):
                bar.update(epochs)
                if outcome.error:
                    logger.error("Split %s failed: %s", outcome.item, outcome.error)
                    failed.append(outcome)
                else:
                    history = self.splits.record(outcome.item)["epochs"]
                    say_split(history, f"split {outcome.item + 1}/{self.config['splits']}")
                    if tracker:
                        tracker.epochs(outcome.item, history)
        for outcome in sorted(failed, key=lambda one: not one.trace):  # a bug shows its traceback
            outcome.get()

    def _ensemble(self) -> None:
        splits = [self.folder.split(k) for k in range(self.config["splits"])]
        digests = {split.name: sha256(split.model) for split in splits}
        point, trained_on = self._operating_point(splits, digests), self.folder.trained_on()
        write_json(self.folder.threshold, point.to_json() | {"checkpoints": digests})
        self._hardest(splits)
        best = [read_json(split.record)["best"]["auc"] for split in splits if self.held_out]
        metrics: dict[str, Any] = {"validation_auc": spread(best)} if best else {}
        if self.cohort.test:
            member = Member(self.config, 0, self.cohort)
            members = [member.network(split.model, "network_def") for split in splits]
            studies, logits = member.predict(Ensemble(members), "test")
            prepared = member.prepared("test")
            reports = {item["study"]: item["report"] for item in prepared}
            largest = bool(point.folds)
            rows = score_rows(studies, logits, point, reports, trained_on=trained_on, largest=largest)
            write_csv(self.folder.scores, SCORE_COLUMNS, rows)
            labels = np.array([study.label for study in self.cohort.test])
            needed = np.array([row["dce_needed"] for row in rows]) if point.n_positive else None
            metrics["test"] = test_metrics(labels, logits, needed, fpr_rule=self.fpr_rule, largest=largest)
        write_json(self.folder.metrics, metrics)
        if self.cohort.test:
            self._report(prepared)
        logger.info("%s", closing_text(self.folder, metrics, point, len(splits)))

    def _operating_point(self, splits: Sequence[SplitFolder], digests: Mapping[str, str]) -> OperatingPoint:
        if not self.held_out:
            return no_threshold()
        label, score = self._held_out(splits)
        if self.config["split_rule"] == "partition":
            point = minmax_threshold(label, score, self.max_fn, folds=len(splits))
            return replace(point, runs_on_this_cohort=runs_on_cohort(self.cohort.train, model_digest(digests)))
        return fixed_fn_threshold(label, score, self.max_fn, source="pooled")

    def _held_out(self, splits: Sequence[SplitFolder]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Labels and scores of the training patients, each exam scored by the members that were not trained on it."""
        logits: dict[str, list[float]] = {}
        for split in splits:
            for row in read_table(split.held_out, ("study", "logit")):
                logits.setdefault(row["study"], []).append(float(row["logit"]))
        studies = [study for study in self.cohort.train if study.study in logits]
        means = np.array([np.mean(logits[study.study]) for study in studies])
        labels = np.array([study.label for study in studies])
        rows = [
            {"study": s.study, "label": s.label, "logit": float(m), "members": len(logits[s.study])}
            for s, m in zip(studies, means, strict=True)
        ]
        write_csv(self.folder.held_out, ["study", "label", "logit", "members"], rows)
        return one_score_per_patient([study.patient for study in studies], labels, expit(means))

    def _hardest(self, splits: Sequence[SplitFolder]) -> None:
        """``hardest.csv``, of the members that the constraint acted on."""
        tables = [read_table(s.multipliers, ("study", "lambda")) for s in splits if s.multipliers.is_file()]
        rows = hardest_positives([{row["study"]: float(row["lambda"]) for row in table} for table in tables])
        if rows:
            write_csv(self.folder.hardest, HARDEST_COLUMNS, rows)

    def _report(self, prepared: Iterable[dict[str, Any]]) -> None:
        """``report.html``, as ``pipelines/evaluate.py`` writes it from the run's scores."""
        pictures = {item["study"]: study_thumbnail(item["image"].numpy()) for item in prepared}
        name, scores = self.folder.path.name, self.folder.scores
        evaluation = evaluate({name: scores}, self.cohort.manifest, run=self.folder.path, pictures=lambda _: pictures)
        write_html_report(self.folder.report, evaluation)


HARDEST_COLUMNS = ["study", "label", "lambda", "rank", "members"]


def hardest_positives(members: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Training positives by how hard they stayed to rank: candidates for a second look at label and images.

    A multiplier is the sum of what its exam lacked of the margin in every visit (without decay), so that the members'
    sizes differ: each counts as a share of its member's largest.

    Args:
        members: Of each, its positives' multipliers at the end, >= 0, by study. Members whose constraints were all
            satisfied from the start say nothing, and do not count.

    Returns:
        A row per positive, the hardest first: ``study``, ``label`` (1), ``lambda`` (mean share over the members that
        trained on it, in [0, 1]), ``rank`` (from 1), ``members`` (how many those are).
    """
    shares: dict[str, list[float]] = {}
    for member in members:
        largest = max(member.values(), default=0.0)
        for study, value in member.items() if largest > 0 else ():
            shares.setdefault(study, []).append(value / largest)
    means = {study: float(np.mean(values)) for study, values in shares.items()}
    order = sorted(means, key=lambda study: (-means[study], study))
    return [
        {"study": study, "label": 1, "lambda": means[study], "rank": rank, "members": len(shares[study])}
        for rank, study in enumerate(order, 1)
    ]


def runs_on_cohort(studies: Iterable[ManifestRow], model: str) -> int | None:
    """Enter a model among those that this user has trained on the folds of these patients, and count them.

    The same command again gives the same model, which counts once. Other folds of the same patients count, for who
    chooses among them chooses by the same patients. Kept in the state folder, as digests.
    """
    patients = sorted({f"{study.study}|{study.patient}|{study.label}" for study in studies})
    try:
        table = state_folder() / "cohorts" / hashlib.sha256("\n".join(patients).encode()).hexdigest()
        with exclusive_lock(table.with_name(f".{table.name}.lock"), wait=True):
            known = set(table.read_text().split("\n")) if table.exists() else set()
            if model not in known:
                append_lines(table, [model])
            return sum(len(line) == len(model) for line in known | {model})
    except (InputError, OSError) as error:
        logger.warning("How many runs shared these patients cannot be counted, and must be known to you: %s", error)
        return None


def _refuse_choices_on_folds(parser: ConfigParser) -> None:
    """Refuse a partition whose members the held-out folds would have a say in."""
    rule, cap = (parser.get_parsed_content(name) for name in ("checkpoint_rule", "mu_cap"))
    if parser.get_parsed_content("split_rule") != "partition":
        return
    problems = []
    if rule != "last":
        problems.append(
            f"checkpoint_rule {rule} chooses the weights by the fold that a member must not have seen. Give "
            "--checkpoint_rule last; --ema 0.99 averages the weights."
        )
    if parser.get_parsed_content("mu0") != 0 and cap != 1:
        problems.append(
            "mu grows when the AUC of the held-out fold falls, so that the training sees the fold. Give --mu_cap 1, "
            "which keeps mu at mu0, or --mu0 0, which leaves the constraint out."
        )
    refuse_all([f"--split_rule partition: {problem}" for problem in problems])


def no_threshold() -> OperatingPoint:
    """The record of a model that nobody was held out from: what a threshold would miss is anything up to everybody."""
    return OperatingPoint(
        threshold=-math.inf,
        rank=0,
        n_positive=0,
        n_negative=0,
        false_negatives=0,
        false_positive_rate=1.0,
        expected_miss_rate=1.0,
        miss_rate_upper_95=1.0,
        rule="none",
        basis="nobody was held out from the training, so that no share of missed patients can be promised, and not "
        "even the AUC is known: scores rank exams and decide nothing. For a decision score a cohort of yours that the "
        "model never saw, and give its scores with --calibration and --labels",
    )


def _refuse_choices_without_validation(parser: ConfigParser) -> None:
    """Refuse what asks held-out patients, of whom there are none."""
    rule, growth = (parser.get_parsed_content(name) for name in ("checkpoint_rule", "growth"))
    problems = []
    if rule != "last":
        problems.append(f"checkpoint_rule {rule} chooses an epoch by them. Give --checkpoint_rule last.")
    if growth != "auc":
        problems.append(f"growth {growth} lets mu follow their violation. Leave it out: mu then stays at mu0.")
    refuse_all([f"--validation 0 holds no patients out, and {problem}" for problem in problems])


def test_metrics(
    labels: NDArray[np.int64],
    logits: NDArray[np.float64],
    needed: NDArray[np.int64] | None,
    *,
    fpr_rule: FprRule,
    largest: bool,
) -> dict[str, Any]:
    """Figures of the test cohort; FPR at k FN takes its threshold from the test labels, as in the paper."""
    figures = ranking_figures(labels, ensemble_logit(logits, largest=largest), tpr_rule=fpr_rule)
    positives, negatives = (int((labels == kind).sum()) for kind in (1, 0))
    return {
        "positives": positives,
        "negatives": negatives,
        "ensemble_auc": figures.auc,
        "ensemble_auc_interval": list(newcombe_interval(figures.auc, positives, negatives)),
        "member_auc": spread([auc(labels, column) for column in logits.T]),
        "fpr_at_fn": {str(k): value for k, value in figures.fpr_at_fn.items()},
        "fpr_at_tpr": {str(tpr): value for tpr, value in figures.fpr_at_tpr.items()},
        **({} if needed is None else {"at_threshold": vars(decision_counts(labels, needed))}),
    }


def closing_text(run: RunFolder, metrics: dict[str, Any], point: Any, members: int) -> str:
    """The closing text: the paper's Table 3 row, the operating point and what it rests on, where the files are."""
    lines = [f"Ensemble of {members} models in {run.path}", ""]
    if test := metrics.get("test"):
        columns = [(f"FPR @{k} FN", f"{100 * value:.1f} %") for k, value in test["fpr_at_fn"].items()]
        mean, sd = test["member_auc"]["mean"], test["member_auc"]["sd"]
        columns += [
            ("avg AUC", f"{100 * mean:.1f} ± {100 * sd:.1f}"),
            ("ensemble AUC", f"{100 * test['ensemble_auc']:.1f}"),
        ]
        lines += [f"Test cohort: {test['positives']} exams need DCE, {test['negatives']} do not"]
        lines += [
            "  ".join(name.rjust(12) for name, _ in columns),
            "  ".join(value.rjust(12) for _, value in columns),
            "",
        ]
    if note := training_note(run.trained_on()):
        lines.append(f"This model was {note}: its figures show that the software works, and nothing of patients.")
    lines.append(point.in_words())
    if test and (at := test.get("at_threshold")):
        lines += [
            f"  On the test cohort it misses {at['false_negatives']} of {test['positives']}, spares {at['spared']} of "
            f"{test['positives'] + test['negatives']} the contrast, asks for it needlessly in {at['false_positives']}."
        ]
    lines += [
        "",
        f"Score new exams: mri-alm score --model {shlex.quote(str(run.path))} --input DICOM_FOLDER --output OUT",
    ]
    written = [run.threshold, run.metrics, *([run.held_out] if point.n_positive else []), run.splits, run.config]
    written += [run.scores] if test else []
    written += [run.hardest] if run.hardest.is_file() else []
    files = ", ".join(path.name for path in written)
    lines.append(f"Written: {files}; per split model.pt, split.json and TensorBoard events.")
    return "\n".join([*lines, *([f"Open in a browser: {run.report}"] if test else [])])


def spread(values: list[float]) -> dict[str, Any]:
    """Mean and standard deviation over the members, and each value."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "sd": sd, "members": values}
