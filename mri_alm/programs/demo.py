"""Everything once, on exams that this program draws itself: train an ensemble, then score four DICOM exams with it.

Example:
  mri-alm demo

Writes runs/demo, data/demo_exams and runs/demo_scores in this folder; start it again after a stop, and it goes on.
Settings may follow as for `mri-alm train`. No number from it says anything about patients.

exit status: 0 done, 2 something cannot be used, 130 stopped with Ctrl-C
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mri_alm.programs import make_phantom, score, train_ensemble
from mri_alm.runtime.interruption import user_errors
from mri_alm.runtime.tables import read_table

RUN, EXAMS, SCORES = Path("runs/demo"), Path("data/demo_exams"), Path("runs/demo_scores")
SETTINGS = {"run_dir": RUN, "max_epochs": 12, "max_fn": 0, "phantom_train": 108, "phantom_test": 54}
NEW = {"train": 2, "test": 2, "seed": 1, "form": "dicom"}
WORDS = {"0": "not needed", "1": "contrast needed", "": "could not be scored"}


def parser() -> argparse.ArgumentParser:
    """Its command line, but for the settings."""
    return argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, make four exams, score them, and set their decisions beside the truth."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        parser().parse_args(["--help"])
    train_ensemble.main([*_pairs(SETTINGS), *words])
    make_phantom.main([str(EXAMS), *_pairs(NEW)])
    status = score.main(_pairs({"model": RUN, "input": EXAMS / "manifest.csv", "output": SCORES}))
    with user_errors():
        print(decisions_and_truth())
    return status


def _pairs(settings: dict[str, object]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def decisions_and_truth() -> str:
    """The four exams, a line each, and what to look at next."""
    truth = {row["study"]: row["label"] for row in read_table(EXAMS / "manifest.csv", ("study", "label"))}
    lines = ["", f"{'exam':<16}{'truth':<18}{'decision':<22}{'score':>10}{'threshold':>12}"]
    for row in read_table(SCORES / "scores.csv", ("study", "score", "threshold", "dce_needed")):
        numbers = [f"{float(row[name]):.4g}" if row[name] else "" for name in ("score", "threshold")]
        words = f"{WORDS[truth[row['study']]]:<18}{WORDS[row['dce_needed']]:<22}"
        lines.append(f"{row['study']:<16}{words}{numbers[0]:>10}{numbers[1]:>12}")
    return "\n".join(
        [
            *lines,
            "",
            "The exams are drawn by this program: nothing here says anything about patients.",
            f"What to open next: {RUN / 'report.html'}, the test cohort; {SCORES / 'index.html'}, the four exams.",
            "Your own exams: mri-alm prepare --help",
        ]
    )
