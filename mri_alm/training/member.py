"""One model of a run: a split trained to its end, in this process or as a task of a worker, and its predictions."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ignite.engine import Events
from numpy.typing import NDArray
from torch import nn

from mri_alm.alm.processes import barrier, first_process_first, process_rank
from mri_alm.bundle.checkpoints import is_intact
from mri_alm.bundle.config import member_parser, refuse_other_settings, write_run_config
from mri_alm.bundle.run_folder import RunFolder
from mri_alm.bundle.trained_run import load_member
from mri_alm.cohort.manifest import Cohort
from mri_alm.errors import InputError, memory_ran_out
from mri_alm.networks import can_be_in_parts
from mri_alm.runtime.atomic import explain_os_errors, sweep
from mri_alm.runtime.files import DamagedFileError, read_json, sha256, write_json
from mri_alm.runtime.interruption import reached
from mri_alm.runtime.locks import exclusive_lock
from mri_alm.runtime.progress import progress_bar
from mri_alm.runtime.tables import write_csv

logger = logging.getLogger("mri_alm")
figures = logging.getLogger("mri_alm.figures")  # of every epoch, as mri_alm.training.engine writes them

History = list[dict[str, float]]
Progress = Callable[[History], None]


class Member:
    """One model, of an exam or an image config; what programs take from a config is taken here.

    Args:
        config: The config with macros resolved and overrides applied.
        split: Which split it is trained on.
        data: The cohort or set that the config's ``cohort_data`` would be, read already.
    """

    def __init__(self, config: dict[str, Any], split: int, data: Any) -> None:
        self.parser = member_parser(config, split, data)

    def check(self, *parts: str) -> None:
        """Refuse wrong values before hours of work.

        Args:
            parts: Further parts of the config, such as what draws the batches.

        Raises:
            InputError: From what cannot be made, perhaps wrapped by MONAI.
        """
        for part in ("objective_def", "optimizer", "epoch_end::selection", *parts):
            self.parser.get_parsed_content(part)
        size = getattr(self.parser.get_parsed_content("inferer"), "micro_batch", None)
        if size:
            can_be_in_parts(self.parser.get_parsed_content("network_def"), size)

    def train(self, progress: Progress) -> Any:
        """Train to the end, from wherever an earlier start came to; gives the :class:`EpochEnd`.

        Args:
            progress: Called with the reports of all epochs: of an earlier start, then after every epoch.
        """
        self.parser.get_parsed_content("seed_everything")
        start = self.parser.get_parsed_content("initial_weights") if "initial_weights" in self.parser.get() else {}
        trainer = self.parser.get_parsed_content("train::trainer")
        end = self.parser.get_parsed_content("epoch_end")
        for engine in (trainer, end.validator):
            engine.logger.setLevel(logging.CRITICAL)  # what ends a training is said once, by who asked for it
        end.record |= {"initial_weights": start} if start else {}
        progress(end.history)
        if not end.finished(trainer):
            trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: progress(end.history))
            try:
                trainer.run()
            except RuntimeError as error:
                if not memory_ran_out(error):
                    raise
                size = self.parser.get_parsed_content("batch_size")
                raise InputError(
                    f"The memory does not hold a step of {size} samples. Take fewer at a time: --micro_batch "
                    f"{max(size // 4, 1)} (the same training, a third slower). Finished epochs are kept."
                ) from error
        return end

    def network(self, weights: Path, form: str = "network") -> nn.Module:
        """The config's network with the weights of a ``model.pt``.

        Args:
            weights: The file.
            form: ``"network"``: as it is trained, on its device and in its memory format; ``"network_def"``: plain.
        """
        return load_member(self.parser.get_parsed_content(form), weights)

    def prepared(self, part: str) -> Any:
        """The items of a part of the data (:meth:`mri_alm.cohort.manifest.Cohort.items`), as the network takes them."""
        self.parser["part"] = part
        return self.parser.get_parsed_content("prepared")

    def predict(self, network: nn.Module, part: str) -> tuple[list[str], NDArray[np.float64]]:
        """What a network says of a part of the data, in its order.

        Returns:
            Names of the studies (none of images), and logits ``(N, outputs)``.
        """
        self.parser["part"] = part
        device, inferer = (self.parser.get_parsed_content(name) for name in ("device", "inferer"))
        network = network.to(device).eval()
        names: list[str] = []
        logits = []
        with torch.inference_mode():
            for batch in self.parser.get_parsed_content("prepared_batches"):
                logits.append(inferer(batch["image"].to(device), network))
                names += batch.get("study", [])
        return names, torch.cat(logits).double().cpu().numpy()


class SplitTraining:
    """The splits of one run folder of exams; it travels to the workers that train them.

    Args:
        config: The config with macros resolved and overrides applied.
        run: The folder.
        cohort: Its studies.
    """

    def __init__(self, config: dict[str, Any], run: RunFolder, cohort: Cohort) -> None:
        self.config, self.run, self.cohort = config, run, cohort

    def finished(self, split: int) -> bool:
        """Whether a split is trained to its end; refused when it is not of this cohort, or its model was changed."""
        folder = self.run.split(split)
        try:
            record = self.record(split)
        except FileNotFoundError:
            return False
        except DamagedFileError as error:
            logger.warning("%s It is made again from last.pt.", error)
            return False
        if record.get("guard") != self.cohort.split_digest(split):
            raise InputError(
                f"{folder.path} was trained on other studies than the cohort gives it now. Restore the cohort, or give "
                "this run another --run_dir."
            )
        if folder.model.is_file() and not is_intact(folder.model):
            return False  # the split begins again, and says so
        if not folder.model.is_file() or sha256(folder.model) != record["model_sha256"]:
            raise InputError(
                f"{folder.model} is not the model that was trained there. Restore it, or delete {folder.path}."
            )
        return True

    def record(self, split: int) -> dict[str, Any]:
        """The ``split.json`` of a finished split."""
        return read_json(self.run.split(split).record)

    def __call__(self, split: int, progress: Progress = lambda _: None) -> None:
        """Train one split of a run that is set up; then held-out scores, and the record that makes it finished.

        Args:
            split: Its number.
            progress: See :meth:`Member.train`.
        """
        finished = self.finished(split)
        barrier()  # all have looked before the first one writes
        if finished:
            progress(self.record(split)["epochs"])
            return
        member, folder = Member(self.config, split, self.cohort), self.run.split(split)
        end = member.train(progress)
        if process_rank() > 0:
            return
        if self.cohort.splits[split][1]:  # nobody is held out from a model of all patients
            names, logits = member.predict(member.network(folder.model), "validation")
            rows = [{"study": name, "logit": float(row[0])} for name, row in zip(names, logits, strict=True)]
            write_csv(folder.held_out, ["study", "logit"], rows)
        positives = [study for study in self.cohort.splits[split][0] if study.label]
        if values := end.parts["objective"].multipliers_of([study.index for study in positives]):
            rows = [{"study": s.study, "lambda": value} for s, value in zip(positives, values, strict=True)]
            write_csv(folder.multipliers, ["study", "lambda"], rows)
        record = {"best": end.selection.best, "model_sha256": sha256(folder.model)} | end.record
        write_json(folder.record, record | {"epochs": end.history})


def splits_to_train(config: dict[str, Any]) -> Sequence[int]:
    """Those of a run that this process trains."""
    return range(config["splits"]) if config["only_split"] is None else [config["only_split"]]


@contextlib.contextmanager
def claimed(
    run: RunFolder,
    config: dict[str, Any],
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> Iterator[contextlib.ExitStack]:
    """Hold the splits that this process trains; other processes may train others of the same folder meanwhile.

    Args:
        run: The folder.
        config: Of the run; it is written there.
        before: What may refuse, done by the first process before anything is written.
        after: What else is written with the config.

    Yields:
        What is held, to which more may be added.

    Raises:
        InputError: If the folder holds a run with other settings, or another process holds one of the splits.
    """
    with contextlib.ExitStack() as held:
        with first_process_first():
            if process_rank() == 0:
                for split in splits_to_train(config):
                    held.enter_context(exclusive_lock(run.split_lock(split)))
                    sweep(run.split(split).path)
                refuse_other_settings(run, config)
                before()
                with exclusive_lock(run.lock, wait=True):
                    sweep(run.path)
                    refuse_other_settings(run, config)  # another process may have claimed it meanwhile
                    write_run_config(run, config)
                    after()
        if process_rank() == 0:
            held.enter_context(run_log(run))
        yield held


def train_in_turn(
    config: dict[str, Any],
    train: Callable[[int, Progress], None],
    watch: Callable[[int, History], None] = lambda _, __: None,
) -> None:
    """Train split after split under one bar.

    Args:
        config: Of the run.
        train: Trains a split, or finds it trained; calls what it is given as :meth:`Member.train` does.
        watch: Called with each split and its epochs so far.
    """
    todo, epochs = splits_to_train(config), config["max_epochs"]
    begin, before = time.monotonic(), 0
    with progress_bar("train", len(todo) * epochs, "epoch", shown=process_rank() == 0 and sys.stderr.isatty()) as bar:
        for number, split in enumerate(todo):
            histories: list[History] = []  # what an earlier start left, then after every epoch of this one

            def progress(history: History, number: int = number, split: int = split, seen: Any = histories) -> None:
                nonlocal before
                bar.update(number * epochs + len(history) - bar.n)
                reached(lambda: f"{f'after epoch {len(history)}' if history else 'in epoch 1'} of split {split}")
                if not seen:
                    before += len(history)
                elif process_rank() == 0:
                    done = number * epochs + len(history)
                    rate = (time.monotonic() - begin) / max(1, done - before)
                    left = rate * (len(todo) * epochs - done)
                    logger.info("%s", epoch_line(history, f"split {split + 1}/{config['splits']}", epochs, left))
                seen.append(history)
                watch(split, history)

            train(split, progress)
            before += epochs - len(histories[-1]) if histories else 0  # those that patience spared
            if process_rank() == 0 and histories and histories[-1]:
                say_split(histories[-1], f"split {split + 1}/{config['splits']}")


def epoch_line(history: History, title: str, epochs: int, left: float) -> str:
    """What an epoch came to, for the terminal.

    Args:
        history: Reports of the epochs so far; the last one is told.
        title: Which split, of how many.
        epochs: Of a split, at most.
        left: Seconds that all the rest takes.
    """
    report = history[-1]
    (name, metric), total = list(report.items())[1], report.get("base_loss", 0.0) + report.get("alm_term", 0.0)
    parts = [title, f"epoch {len(history)}/{epochs}", f"{metric_name(name)} {metric:.3f}"]
    if total > 0:
        parts.append(f"constraint {100 * report['alm_term'] / total:.0f} % of loss")
    unit, size = next((one for one in (("h", 3600), ("min", 60)) if left >= 1.5 * one[1]), ("s", 1))
    return "  ".join([*parts, f"{left / size:.0f} {unit} left"])


def say_split(history: History, title: str) -> None:
    """Tell the terminal what a split came to, and whether it came to anything."""
    logger.info("%s", split_line(history, title))
    if doubt := not_learnt(history):
        logger.warning("%s  %s", title, doubt)


def split_line(history: History, title: str) -> str:
    """What a split came to, for the terminal: its highest validation metric, whichever epoch's weights are kept."""
    name = list(history[0])[1]
    if name == "base_loss":  # no held-out patients, and no scores of steps, as loss-conditional training has none
        return f"{title}  trained: {len(history)} epochs"
    best = max(history, key=lambda report: report[name])
    highest = f"highest {metric_name(name)} {best[name]:.3f} in epoch {best['epoch']:.0f}"
    return f"{title}  trained: {len(history)} epochs, {highest}"


def not_learnt(history: History) -> str:
    """What to say of a training of ten epochs or more that has not learnt even its own exams; empty of others."""
    found = history[-1].get("train_auc", 1.0)
    if len(history) < 10 or not found < 0.6:
        return ""
    return (
        f"has learnt next to nothing: after {len(history)} epochs the AUC on its own training exams is {found:.2f}, "
        "and guessing has 0.5. Lower --learning_rate, train longer, and look at the pictures and the labels."
    )


def metric_name(name: str) -> str:
    """A metric's name in a report, in words."""
    return name.replace("_", " ").replace("auc", "AUC")


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that logging calls
        """A full disk stops no training here: the run's own files say so."""


@contextlib.contextmanager
def run_log(run: RunFolder) -> Iterator[None]:
    """What is logged meanwhile stands in the run folder too, with every figure of every epoch; no patient is named.

    Args:
        run: The folder, which exists.

    Raises:
        InputError: If the file is a link, or cannot be written.
    """
    if run.log.is_symlink():
        raise InputError(f"{run.log} is a link, which may lead to another file of yours. Remove it.")
    with explain_os_errors(run.path):
        handler = _LogFile(run.log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.INFO)
    loggers = (logger, figures)
    before = [(one.level, one.propagate) for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.INFO)
    figures.propagate = False  # the terminal has a line of few words in their place
    try:
        yield
    finally:
        for one, (level, propagate) in zip(loggers, before, strict=True):
            one.removeHandler(handler)
            one.setLevel(level)
            one.propagate = propagate
        handler.close()
