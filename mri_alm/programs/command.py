"""How a program starts: signals and mistakes end it in one sentence, and its log goes to the screen."""

import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn

from mri_alm.runtime.interruption import answer_signals


@dataclass(frozen=True)
class Program:
    """What differs between programs before they read their arguments.

    Attributes:
        advice: How to go on after it was stopped; the end of the sentence that says so.
        log: The logger whose messages are shown; of all others the warnings are.
        times: Whether each message has its time in front.
    """

    advice: str | None = None
    log: str = ""
    times: bool = False


AGAIN = "start the same command again"
PROGRAMS = {  # by their modules
    "benchmark": Program(log="mri_alm.cifar", times=True),
    "evaluate": Program(AGAIN),
    "export_bundle": Program(AGAIN),
    "inspect_bundle": Program(AGAIN),
    "make_phantom": Program(),
    "prepare_cohort": Program("finished studies are kept; the same command with --resume goes on", log="mri_alm"),
    "score": Program(AGAIN),
    "sweep": Program(log="mri_alm.cifar", times=True),
    "train_ensemble": Program(),
}


def start_program(name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a program as this process, and end the process.

    Args:
        name: A key of :data:`PROGRAMS`.
        arguments: Its command line; None: this process's own.
    """
    program = PROGRAMS[name]
    answer_signals(program.advice)  # before imports that take seconds
    form = "%(asctime)s %(message)s" if program.times else "%(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, datefmt="%H:%M:%S")
    if program.log:
        logging.getLogger(program.log).setLevel(logging.INFO)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", message="parsing config_file")
    sys.exit(import_module(f"mri_alm.programs.{name}").main(arguments))
