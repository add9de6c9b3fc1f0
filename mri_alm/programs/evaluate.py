r"""Scores and labels in; figures with intervals, subgroups, comparisons and a report out.

Examples:
  mri-alm evaluate --scores scores.csv --labels labels.csv --output OUT
  mri-alm evaluate --scores ALM=a/scores.csv BCE=b/scores.csv --labels cohort/manifest.csv \
      --run runs/prostate_alm --group-by vendor field_strength --output OUT
  mri-alm evaluate --log decisions.csv --labels outcomes.csv --output OUT

With --log the exams are those of score --log whose outcome is known; OUT/scores.csv and OUT/labels.csv are then a
cohort for score --calibration.

Writes evaluation.json, tables/ (CSV, JSON, LaTeX) and report.html, one file for any browser. docs/report.md explains
how to read it. Exit status: 0 done, 2 the input cannot be used. Research use only.
"""

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from mri_alm.errors import InputError
from mri_alm.runtime.atomic import private_files, sweep
from mri_alm.runtime.interruption import user_errors
from mri_alm.runtime.locks import exclusive_lock


def named_files(texts: Sequence[str]) -> dict[str, Path]:
    """``NAME=FILE`` or ``FILE``, which is named after itself, or after its folder when it is a scores.csv."""
    found: dict[str, Path] = {}
    for text in texts:
        name, separator, file = text.partition("=")
        if not separator or Path(text).exists():
            path = Path(text)
            name = path.resolve().parent.name if path.stem == "scores" else path.stem
        else:
            path = Path(file)
        if not name or name in found:
            raise InputError(f'--scores: two files are named "{name}". Write NAME=FILE to tell them apart.')
        found[name] = path
    return found


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = found.add_mutually_exclusive_group(required=True)
    source.add_argument("--scores", nargs="+", metavar="[NAME=]FILE", help="scores.csv of each model")
    source.add_argument("--log", type=Path, metavar="FILE", help="table of decisions that score.py --log wrote")
    found.add_argument("--labels", type=Path, required=True, help="CSV with study and label; a manifest will do")
    found.add_argument("--output", type=Path, required=True, help="folder to write to")
    found.add_argument("--run", type=Path, help="run folder that the first file of scores comes from")
    found.add_argument(
        "--calibration", nargs=2, type=Path, metavar=("SCORES", "LABELS"),
        help="the first model's scores of a calibration cohort, for the slider, and its labels",
    )  # fmt: skip
    found.add_argument("--group-by", nargs="*", metavar="COLUMN", help="columns of --labels that make subgroups")
    found.add_argument(
        "--reader", metavar="COLUMN", help="column of --labels with a reader's grades, such as PI-RADS, to compare with"
    )
    found.add_argument("--pictures", type=Path, help="folder with STUDY.png (default: that of the first scores)")
    found.add_argument("--draws", type=int, default=2000, help="bootstrap resamples (default 2000)")
    found.add_argument("--seed", type=int, default=0, help="of the resamples (default 0)")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate and write; the exit status."""
    command = parser()
    options = command.parse_args(arguments)
    if options.draws < 100:
        command.error("--draws must be 100 or more: an interval's ends are the 2.5 and 97.5 % points of the draws")
    from mri_alm.evaluation.analysis import evaluate
    from mri_alm.evaluation.report import pictures_beside, summary, write_evaluation

    try:
        with private_files(), exclusive_lock(options.output / ".lock"):
            sweep(options.output)
            sweep(options.output / "tables")
            labels = options.labels
            if options.log:
                from mri_alm.scoring.decision_log import calibration_cohort

                file, labels = calibration_cohort(options.log, labels, options.output, run=options.run)
                scores = {options.log.stem: file}
            else:
                scores = named_files(options.scores)
            evaluation = evaluate(
                scores,
                labels,
                run=options.run,
                calibration=tuple(options.calibration) if options.calibration else None,
                group_by=options.group_by,
                reader=options.reader,
                draws=options.draws,
                seed=options.seed,
                pictures=lambda studies: pictures_beside(
                    options.pictures or next(iter(scores.values())).parent, studies
                ),
            )
            write_evaluation(options.output, evaluation)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{summary(evaluation)}\nWritten: {options.output}/evaluation.json, tables/, report.html (open in a browser)")
    return 0


REPORT = """What a finished training found, in words, and where its page is.

examples:
  mri-alm report runs/prostate_alm
  mri-alm report runs/prostate_alm --open     # also opens the page in a browser

exit status: 0 done, 2 the training is not finished
"""


def report_parser() -> argparse.ArgumentParser:
    """Of ``mri-alm report``."""
    found = argparse.ArgumentParser(description=REPORT, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("run", type=Path, metavar="RUN", help="its folder")
    found.add_argument("--open", action="store_true", help="open report.html in a browser")
    return found


def report_main(arguments: Sequence[str] | None = None) -> int:
    """Show the closing text of a run; the exit status."""
    options = report_parser().parse_args(arguments)
    with user_errors():
        from mri_alm.bundle.run_folder import RunFolder, read_run
        from mri_alm.runtime.files import read_json

        record, run = read_run(options.run), RunFolder(options.run)
        from mri_alm.training.run import closing_text

        print(closing_text(run, read_json(run.metrics), record.point, len(record.checkpoints)))
    if options.open and not webbrowser.open(run.report.resolve().as_uri()):
        print(f"error: no browser could be opened. Open {run.report} yourself.", file=sys.stderr)
        return 2
    return 0
