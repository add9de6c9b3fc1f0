"""The report that a training run writes of its own test cohort."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mri_alm.full_evaluation import evaluate
from mri_alm.html_report import write_report
from mri_alm.report import study_thumbnail


def write_run_report(folder: Path, manifest: Path, prepared: Iterable[dict[str, Any]]) -> None:
    """Write ``report.html`` of a finished run, as ``pipelines/evaluate.py`` does with its scores.csv.

    Args:
        folder: Run folder, with everything else written.
        manifest: The cohort's.
        prepared: Items of the test exams, with study and image.

    Raises:
        InputError: If a file cannot be read or written.
    """
    pictures = {item["study"]: study_thumbnail(item["image"]) for item in prepared}
    evaluation = evaluate({folder.name: folder / "scores.csv"}, manifest, run=folder, pictures=lambda _: pictures)
    write_report(folder / "report.html", evaluation)
