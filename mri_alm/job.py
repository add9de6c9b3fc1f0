"""The main job: prepare every exam once, train the splits, ensemble, set the threshold, score the test cohort."""

import contextlib
import json
import logging
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from monai.bundle import ConfigParser
from numpy.typing import NDArray
from scipy.special import expit
from tqdm.contrib.logging import logging_redirect_tqdm

from mri_alm.atomic import private_files, sweep
from mri_alm.bundle import claim, member_parser, refuse_other_settings, running_config, user_errors
from mri_alm.cohort import Cohort
from mri_alm.ensemble import SCORE_COLUMNS, Ensemble, for_each_study, load_member, progress_bar, score_rows
from mri_alm.errors import InputError
from mri_alm.files import read_csv, sha256, write_csv, write_json
from mri_alm.locks import only_user
from mri_alm.metrics import FprRule
from mri_alm.phantom_io import make_cohort
from mri_alm.processes import first_process_first, rank, world_size
from mri_alm.run_report import write_run_report
from mri_alm.split_training import SplitTraining
from mri_alm.summary import closing_text, spread, test_metrics
from mri_alm.tasks import Outcome, Pool, run_tasks
from mri_alm.threshold import certificate_in_words, fixed_fn_threshold, one_score_per_patient
from mri_alm.tracking import MlflowRun, check_tracking, tracking

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
        Job(config, Path(folder), threads=threads, max_fn=max_fn, fpr_rule=fpr_rule, pool=pool).run()


def phantom_cohort(train: int, test: int) -> Path:
    """Manifest of the built-in cohort of that size, made under ``data/`` the first time."""
    with first_process_first(), progress_bar("phantom", train + test, "study") as bar:
        return make_cohort(
            Path("data") / f"phantom_{train}_{test}",
            train=train,
            test=test,
            progress=lambda done, _: bar.update(done - bar.n),
        )


class Job:
    """One run folder; for the arguments see :func:`train_and_evaluate`.

    Args:
        config: The config with macros resolved and overrides applied.

    Raises:
        InputError: If the settings, the cohort or the run folder cannot be used.
    """

    def __init__(
        self, config: dict[str, Any], folder: Path, *, threads: int, max_fn: int, fpr_rule: FprRule, pool: Pool
    ) -> None:
        self.config, self.folder, self.threads, self.max_fn = config, folder, threads, max_fn
        self.fpr_rule, self.pool = fpr_rule, pool
        if world_size() > 1 and (pool.workers > 1 or pool.backend != "loky"):
            raise InputError("torchrun trains one model in all its processes: leave out --workers and --backend.")
        check_tracking(config)
        self.cohort: Cohort = ConfigParser(deepcopy(config)).get_parsed_content("cohort_data")
        self.held_out = {study.patient for _, validation in self.cohort.splits for study in validation if study.label}
        if not 0 <= max_fn < len(self.held_out):
            raise InputError(
                f"Cannot allow {max_fn} false negatives: {len(self.held_out)} positive patients are held out by the "
                f"{config['splits']} splits, so --max_fn must be between 0 and {len(self.held_out) - 1}."
            )
        self.splits = SplitTraining(config, folder, self.cohort)
        parser = member_parser(config, 0, self.cohort)
        for part in (
            "objective_def",
            "optimizer",
            "epoch_end::selection",
            "train::stratified",
            "inferer",
        ):  # wrong values are refused before hours of work and the claim
            parser.get_parsed_content(part)

    def run(self) -> None:
        """All of it; the last lines say where everything lies. All processes train; the first one does the rest."""
        with contextlib.ExitStack() as held:
            with first_process_first():
                if rank() == 0:
                    for split in self._todo():  # other splits may be trained by other processes meanwhile
                        held.enter_context(only_user(self.folder / f".split_{split}.lock"))
                        sweep(self.folder / f"split_{split}")
                    self._set_up()
            if rank() > 0:
                self._train(None)
                return
            tracker = held.enter_context(tracking(self.config, self.folder))
            self._train(tracker)
            waiting = [k for k in range(self.config["splits"]) if not self.splits.finished(k)]
            if waiting:
                logger.info("Trained. Splits %s are still to do; the ensemble follows when all are there.", waiting)
                if tracker:
                    tracker.wait()
                return
            with only_user(self.folder / ".lock", wait=True):
                self._ensemble()
            if tracker:
                tracker.finish(self.config["splits"])

    def _todo(self) -> Sequence[int]:
        """The splits that this process trains."""
        return range(self.config["splits"]) if self.config["split"] is None else [self.config["split"]]

    def _set_up(self) -> None:
        logger.info("Held out: %s", certificate_in_words(len(self.held_out)))
        refuse_other_settings(self.folder, self.config)
        for split in range(self.config["splits"]):
            self.splits.finished(split)  # a folder of another cohort is refused before anything is written
        self._prepare()  # before the claim: the way to leave out a study that fails is another setting
        with only_user(self.folder / ".lock", wait=True):
            sweep(self.folder)
            refuse_other_settings(self.folder, self.config)  # another process may have claimed it meanwhile
            claim(self.folder, self.config)
            self._write_splits()

    def _write_splits(self) -> None:
        sides = [{s.study: "validation" for s in held_out} for _, held_out in self.cohort.splits]
        columns = [f"split_{k}" for k in range(len(sides))]
        rows = [
            {"study": s.study, "patient": s.patient, "label": s.label}
            | {column: side.get(s.study, "training") for column, side in zip(columns, sides, strict=True)}
            for s in self.cohort.train
        ]
        write_csv(self.folder / "splits.csv", ["study", "patient", "label", *columns], rows)

    def _prepare(self) -> None:
        """Load and register every exam once, into the cache that all splits and epochs read."""
        parser = member_parser(self.config, 0, self.cohort)
        parser["part"] = "all"
        cached = parser.get_parsed_content("prepared")
        numbered = [{"study": item["study"], "number": number} for number, item in enumerate(cached.data)]
        _, errors = for_each_study(
            lambda item: cached[item["number"]] and None, numbered, threads=self.threads, title="prepare"
        )
        if errors:
            text = "\n".join(f"  study {study}: {error}" for study, error in errors.items())
            names = json.dumps(sorted(errors)).replace('"', "'")
            raise InputError(
                f"{len(errors)} of {len(cached.data)} studies cannot be used (the others are kept):\n{text}\n"
                f'Correct them, or leave them out with --exclude "{names}".'
            )

    def _train(self, tracker: MlflowRun | None) -> None:
        todo = self._todo()
        epochs = self.config["max_epochs"]
        with progress_bar("train", len(todo) * epochs, "epoch") as bar:
            if self.pool.workers > 1 or self.pool.backend != "loky":
                self._train_as_tasks(todo, bar, tracker)
                return
            for number, split in enumerate(todo):

                def progress(history: list[dict[str, float]], start: int = number * epochs, split: int = split) -> None:
                    bar.update(start + len(history) - bar.n)
                    bar.set_description(f"split {split}")
                    if history:
                        bar.set_postfix(auc=round(history[-1]["val_auc"], 3))
                    if tracker:
                        tracker.epochs(split, history)

                self.splits(split, progress)

    def _train_as_tasks(self, todo: Sequence[int], bar: Any, tracker: MlflowRun | None) -> None:
        failed: list[Outcome] = []
        for outcome in run_tasks(self.splits, todo, self.pool):
            bar.update(self.config["max_epochs"])
            if outcome.error:
                logger.error("Split %s failed: %s", outcome.item, outcome.error)
                failed.append(outcome)
            elif tracker:
                tracker.epochs(outcome.item, self.splits.record(outcome.item)["epochs"])
        for outcome in sorted(failed, key=lambda one: not one.trace):  # a bug shows its traceback
            outcome.get()

    def _ensemble(self) -> None:
        splits = range(self.config["splits"])
        names = [f"split_{k}" for k in splits]
        point = fixed_fn_threshold(*self._held_out(names), self.max_fn, source="pooled")
        digests = {name: sha256(self.folder / name / "model.pt") for name in names}
        write_json(self.folder / "threshold.json", point.to_json() | {"checkpoints": digests})
        best = [self.splits.record(split)["best"]["auc"] for split in splits]
        metrics: dict[str, Any] = {"validation_auc": spread(best)}
        if self.cohort.test:
            parser = member_parser(self.config, 0, self.cohort)
            members = [
                load_member(parser.get_parsed_content("network_def"), self.folder / n / "model.pt") for n in names
            ]
            studies, logits = self.splits.predict(Ensemble(members), parser, "test")
            prepared = parser.get_parsed_content("prepared")
            warnings = {item["study"]: " | ".join(json.loads(item["report"])["warnings"]) for item in prepared}
            rows = score_rows(studies, logits, point, warnings)
            write_csv(self.folder / "scores.csv", SCORE_COLUMNS, rows)
            labels = np.array([study.label for study in self.cohort.test])
            metrics["test"] = test_metrics(
                labels, logits, np.array([row["dce_needed"] for row in rows]), fpr_rule=self.fpr_rule
            )
        write_json(self.folder / "metrics.json", metrics)
        if self.cohort.test:
            write_run_report(self.folder, self.cohort.manifest, prepared)
        logger.info("%s", closing_text(self.folder, metrics, point, len(names)))

    def _held_out(self, names: list[str]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Labels and scores of the training patients, each exam scored by the members that were not trained on it."""
        logits: dict[str, list[float]] = {}
        for name in names:
            for row in read_csv(self.folder / name / "validation.csv"):
                logits.setdefault(row["study"], []).append(float(row["logit"]))
        studies = [study for study in self.cohort.train if study.study in logits]
        means = np.array([np.mean(logits[study.study]) for study in studies])
        labels = np.array([study.label for study in studies])
        rows = [
            {"study": s.study, "label": s.label, "logit": float(m), "members": len(logits[s.study])}
            for s, m in zip(studies, means, strict=True)
        ]
        write_csv(self.folder / "heldout.csv", ["study", "label", "logit", "members"], rows)
        return one_score_per_patient([study.patient for study in studies], labels, expit(means))
