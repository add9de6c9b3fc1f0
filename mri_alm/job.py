"""The main job: prepare every exam once, train the splits, ensemble, set the threshold, score the test cohort."""

import csv
import json
import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from ignite.engine import Events
from monai.bundle import ConfigParser
from monai.data import DataLoader
from monai.engines import SupervisedEvaluator
from numpy.typing import NDArray
from scipy.special import expit
from tqdm.contrib.logging import logging_redirect_tqdm

from mri_alm.bundle import claim, member_parser, refuse_other_settings, running_config, user_errors
from mri_alm.cohort import Cohort
from mri_alm.ensemble import SCORE_COLUMNS, Ensemble, collect, for_each_study, load_member, progress_bar, score_rows
from mri_alm.errors import InputError
from mri_alm.files import sha256, write_csv, write_json
from mri_alm.metrics import auc, fpr_at_fn
from mri_alm.phantom_io import make_cohort
from mri_alm.threshold import certification, clopper_pearson_upper, fixed_fn_threshold, one_per_patient

logger = logging.getLogger("mri_alm")

FALSE_NEGATIVES = (0, 1, 2, 5)  # columns of the paper's Table 3


def train_and_evaluate(folder: str, *, threads: int, max_fn: int) -> None:
    """What ``run`` of ``configs/prostate_alm.json`` calls; goes on from whatever an earlier start finished.

    Args:
        folder: Run folder.
        threads: Exams prepared at once.
        max_fn: Held-out positives that the threshold may miss.
    """
    config = running_config()
    with user_errors(), logging_redirect_tqdm():
        Job(config, Path(folder), threads=threads, max_fn=max_fn).run()


def phantom_cohort(train: int, test: int) -> Path:
    """Manifest of the built-in cohort of that size, made under ``data/`` the first time."""
    with progress_bar("phantom", train + test, "study") as bar:
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

    def __init__(self, config: dict[str, Any], folder: Path, *, threads: int, max_fn: int) -> None:
        self.config, self.folder, self.threads, self.max_fn = config, folder, threads, max_fn
        self.cohort: Cohort = ConfigParser(deepcopy(config)).get_parsed_content("cohort_data")
        held_out = {study.patient for _, validation in self.cohort.splits for study in validation if study.label}
        if not 0 <= max_fn < len(held_out):
            raise InputError(
                f"Cannot allow {max_fn} false negatives: {len(held_out)} positive patients are held out by the "
                f"{config['splits']} splits, so --max_fn must be between 0 and {len(held_out) - 1}."
            )
        self.positives = len(held_out)
        parser = member_parser(config, 0, self.cohort)
        for part in ("objective_def", "optimizer"):  # wrong values are refused before hours of work and the claim
            parser.get_parsed_content(part)

    def run(self) -> None:
        """All of it; the last lines say where everything lies."""
        refuse_other_settings(self.folder, self.config)
        for split in range(self.config["splits"]):
            self._finished(split)  # a folder of another cohort is refused before anything is written
        self._say_what_can_be_promised()
        self._prepare()  # before the claim: the way to leave out a study that fails is another setting
        claim(self.folder, self.config)
        self._write_splits()
        self._train()
        waiting = [k for k in range(self.config["splits"]) if not self._finished(k)]
        if waiting:
            logger.info("Trained. Splits %s are still to do; the ensemble follows when all are there.", waiting)
            return
        self._ensemble()

    def _say_what_can_be_promised(self) -> None:
        """The number of positives, not the network, decides this, so it is told before hours of training."""
        logger.info(
            "%d positive patients are held out: a threshold missing %d may miss up to %.1f %% of new ones (95 %%). %s.",
            *(self.positives, self.max_fn, 100 * clopper_pearson_upper(self.max_fn, self.positives, 0.05)),
            certification(self.positives),
        )

    def _finished(self, split: int) -> bool:
        """Whether a split is trained to its end; refused when it is not of this cohort, or its model was changed."""
        folder = self.folder / f"split_{split}"
        if not (folder / "split.json").exists():
            return False
        record = json.loads((folder / "split.json").read_text())
        if record.get("guard") != self.cohort.guard(split):
            raise InputError(
                f"{folder} was trained on other studies than the cohort gives it now. Restore the cohort, or give this "
                "run another --run_dir."
            )
        if not (folder / "model.pt").is_file() or sha256(folder / "model.pt") != record["model_sha256"]:
            raise InputError(
                f"{folder / 'model.pt'} is not the model that was trained there. Restore it, or delete {folder}."
            )
        return True

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
        try:
            _, errors = for_each_study(
                lambda item: cached[item["number"]] and None, numbered, threads=self.threads, title="prepare"
            )
        except (OSError, RuntimeError, EOFError) as error:
            if isinstance(error, RuntimeError) and "PytorchStream" not in str(error):
                raise
            raise InputError(
                f"The cache {cached.cache_dir} cannot be written or read back: the disk is full or a file is damaged. "
                "Free space, delete that folder (it is made again) and start the same command."
            ) from error
        if errors:
            text = "\n".join(f"  study {study}: {error}" for study, error in errors.items())
            names = json.dumps(sorted(errors)).replace('"', "'")
            raise InputError(
                f"{len(errors)} of {len(cached.data)} studies cannot be used (the others are kept):\n{text}\n"
                f'Correct them, or leave them out with --exclude "{names}".'
            )

    def _train(self) -> None:
        todo = range(self.config["splits"]) if self.config["split"] is None else [self.config["split"]]
        with progress_bar("train", len(todo) * self.config["max_epochs"], "epoch") as bar:
            for split in todo:
                bar.set_description(f"split {split}")
                self._train_split(split, bar)

    def _train_split(self, split: int, bar: Any) -> None:
        folder = self.folder / f"split_{split}"
        if self._finished(split):
            bar.update(self.config["max_epochs"])
            return
        parser = member_parser(self.config, split, self.cohort)
        parser.get_parsed_content("seed_everything")
        trainer = parser.get_parsed_content("train#trainer")
        end = parser.get_parsed_content("epoch_end")
        bar.update(trainer.state.epoch)
        if trainer.state.epoch < self.config["max_epochs"]:
            trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: bar.update(1))
            trainer.add_event_handler(
                Events.EPOCH_COMPLETED, lambda: bar.set_postfix(auc=round(end.history[-1]["val_auc"], 3))
            )
            trainer.run()
        network = load_member(parser.get_parsed_content("network"), folder / "model.pt")
        names, logits = self._predict(network, parser, "validation")
        write_csv(folder / "validation.csv", ["study", "logit"], _rows(names, logits))
        record = {"best": end.best, "model_sha256": sha256(folder / "model.pt"), "guard": end.guard}
        write_json(folder / "split.json", record | {"epochs": end.history})

    def _predict(self, network: Any, parser: ConfigParser, part: str) -> tuple[list[str], NDArray[np.float64]]:
        parser["part"] = part
        device = parser.get_parsed_content("device")
        evaluator = SupervisedEvaluator(
            device=device,
            val_data_loader=DataLoader(parser.get_parsed_content("prepared"), batch_size=self.config["batch_size"]),
            network=network.to(device),
            inferer=parser.get_parsed_content("inferer"),
            decollate=False,
        )
        evaluator.logger.setLevel(logging.WARNING)
        return collect(evaluator)

    def _ensemble(self) -> None:
        splits = range(self.config["splits"])
        names = [f"split_{k}" for k in splits]
        point = fixed_fn_threshold(*self._held_out(names), self.max_fn, source="pooled")
        digests = {name: sha256(self.folder / name / "model.pt") for name in names}
        write_json(self.folder / "threshold.json", point.to_json() | {"checkpoints": digests})
        best = [json.loads((self.folder / name / "split.json").read_text())["best"]["auc"] for name in names]
        metrics: dict[str, Any] = {"validation_auc": {"mean": float(np.mean(best)), "sd": _sd(best), "members": best}}
        if self.cohort.test:
            parser = member_parser(self.config, 0, self.cohort)
            members = [
                load_member(parser.get_parsed_content("network_def"), self.folder / n / "model.pt") for n in names
            ]
            studies, logits = self._predict(Ensemble(members), parser, "test")
            rows = score_rows(studies, logits, point, {})
            write_csv(self.folder / "scores.csv", SCORE_COLUMNS, rows)
            labels = np.array([study.label for study in self.cohort.test])
            metrics["test"] = _test_metrics(labels, logits, np.array([row["dce_needed"] for row in rows]))
        write_json(self.folder / "metrics.json", metrics)
        logger.info("%s", _summary(self.folder, metrics, point, len(names)))

    def _held_out(self, names: list[str]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Labels and scores of the training patients, each exam scored by the members that were not trained on it."""
        logits: dict[str, list[float]] = {}
        for name in names:
            for row in _read(self.folder / name / "validation.csv"):
                logits.setdefault(row["study"], []).append(float(row["logit"]))
        studies = [study for study in self.cohort.train if study.study in logits]
        means = np.array([np.mean(logits[study.study]) for study in studies])
        labels = np.array([study.label for study in studies])
        rows = [
            {"study": s.study, "patient": s.patient, "label": s.label, "logit": float(m)}
            | {"members": len(logits[s.study])}
            for s, m in zip(studies, means, strict=True)
        ]
        write_csv(self.folder / "heldout.csv", ["study", "patient", "label", "logit", "members"], rows)
        return one_per_patient([study.patient for study in studies], labels, expit(means))


def _test_metrics(labels: NDArray[np.int64], logits: NDArray[np.float64], needed: NDArray[np.int64]) -> dict[str, Any]:
    """Figures of the test cohort; FPR at k FN takes its threshold from the test labels, as in the paper."""
    mean = logits.mean(1)
    members = [auc(labels, column) for column in logits.T]
    positive = labels == 1
    return {
        "positives": int(positive.sum()),
        "negatives": int((~positive).sum()),
        "ensemble_auc": auc(labels, mean),
        "member_auc": {"mean": float(np.mean(members)), "sd": _sd(members), "members": members},
        "fpr_at_fn": {str(k): fpr_at_fn(labels, mean, k) for k in FALSE_NEGATIVES if k < positive.sum()},
        "at_threshold": {
            "false_negatives": int((positive & (needed == 0)).sum()),
            "false_positives": int((~positive & (needed == 1)).sum()),
            "spared": int((needed == 0).sum()),
        },
    }


def _summary(folder: Path, metrics: dict[str, Any], point: Any, members: int) -> str:
    """The closing text: the paper's Table 3 row, the operating point and what it rests on, where the files are."""
    lines = [f"Ensemble of {members} models in {folder}", ""]
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
    lines.append(point.in_words())
    if test:
        at = test["at_threshold"]
        lines += [
            f"  On the test cohort it misses {at['false_negatives']} of {test['positives']}, spares {at['spared']} of "
            f"{test['positives'] + test['negatives']} the contrast, asks for it needlessly in {at['false_positives']}."
        ]
    lines += ["", f"Score new exams: python pipelines/score.py --model {folder} --input DICOM_FOLDER --output OUT"]
    files = "threshold.json, metrics.json, heldout.csv, splits.csv, config.json" + (", scores.csv" if test else "")
    return "\n".join([*lines, f"Written: {files}; per split model.pt, split.json and TensorBoard events."])


def _sd(values: list[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _rows(names: list[str], logits: NDArray[np.float64]) -> list[dict[str, Any]]:
    return [{"study": name, "logit": float(value)} for name, value in zip(names, logits[:, 0], strict=True)]


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
