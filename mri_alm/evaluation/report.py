"""An evaluation written down: JSON, tables, the page; and the pictures it shows."""

import contextlib
import io
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image

from mri_alm.evaluation.analysis import Evaluation
from mri_alm.evaluation.page import write_html_report
from mri_alm.evaluation.performance import Performance
from mri_alm.evaluation.tables import (
    comparison_table,
    estimate_text,
    metrics_table,
    null_unless_finite,
    patients_table,
    reader_table,
    subgroup_table,
    trade_off_table,
    write_table,
)
from mri_alm.runtime.atomic import private_files
from mri_alm.runtime.files import read_file, write_json

_WIDTH = 720  # pixels of a picture in the report
_MOST_PIXELS, _LARGEST_PICTURE = 50_000_000, 64 << 20  # pixels and bytes of a picture beside the scores


@private_files()
def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Write ``evaluation.json``, ``tables/`` (CSV, JSON, LaTeX) and ``report.html``.

    Args:
        folder: Made where it does not exist.
        evaluation: What is written.

    Raises:
        InputError: If the folder cannot be written.
    """
    write_json(folder / "evaluation.json", to_json(evaluation))
    tables = [metrics_table(evaluation.performances), patients_table(evaluation.data)]
    tables += [
        trade_off_table(trade_off, f"False negatives allowed among {trade_off.positives} positives.")
        for trade_off in evaluation.trade_offs
    ]
    if evaluation.comparisons:
        tables.append(comparison_table(evaluation.comparisons))
    if evaluation.groups:
        tables.append(subgroup_table(evaluation.groups))
    if evaluation.readers:
        tables.append(reader_table(evaluation.readers))
    for table in tables:
        write_table(folder / "tables", table)
    write_html_report(folder / "report.html", evaluation)


# --- JSON and the terminal -------------------------------------------------------------------------------------------


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Every figure as strict JSON."""
    data = evaluation.data
    return {
        "studies": len(data.studies),
        "positives": data.positives,
        "models": {
            model.name: _performance_fields(evaluation.performances[model.name])
            | {"threshold": None if model.threshold is None else null_unless_finite(model.threshold)}
            | {"training_exams": evaluation.trained_on.get(model.name)}
            for model in data.models
        },
        "comparisons": [asdict(pair) for pair in evaluation.comparisons],
        "subgroups": [
            {"column": g.column, "value": g.value, "model": g.model, "warning": g.note}
            | (
                _performance_fields(g.performance)
                if g.performance
                else {"positives": g.positives, "negatives": g.negatives}
            )
            for g in evaluation.groups
        ],
        "readers": [asdict(reader) for reader in evaluation.readers],
        "warnings": list(evaluation.warnings),
        "left_out": data.left_out,
        "bootstrap": {"draws": evaluation.draws, "seed": evaluation.seed},
        "sha256": {"labels": data.sha256} | {model.name: model.sha256 for model in data.models},
        "versions": {"mri-alm": version("mri-alm")},
    }


def _performance_fields(performance: Performance) -> dict[str, Any]:
    return {
        "positives": performance.positives,
        "negatives": performance.negatives,
        "figures": {name: asdict(estimate) for name, estimate in performance.figures.items()},
        "miss_rate_upper_95": {str(k): bound for k, bound in performance.miss_rate_upper.items()},
    }


def summary(evaluation: Evaluation) -> str:
    """A few lines for the terminal: per model the figures that matter, then the warnings."""
    lines = [evaluation.data.in_words()]
    for name, performance in evaluation.performances.items():
        shown = {figure: estimate_text(estimate) for figure, estimate in performance.figures.items()}
        lines.append(f"{name}: AUC {shown['auc']} %")
        lines += [
            f"  FPR at {k} FN {shown[f'fpr_at_fn_{k}']} %; of new positives up to {100 * bound:.1f} % missed"
            for k, bound in performance.miss_rate_upper.items()
        ]
        if "spared" in shown:
            lines.append(f"  at its threshold: sensitivity {shown['sensitivity']} %, spared {shown['spared']} %")
    for pair in evaluation.comparisons:
        test = pair.delong
        found = (
            f"AUC {100 * test.difference:+.1f} points, p {test.p_value:.3g}, Holm {pair.p_holm:.3g}"
            if test
            else pair.note
        )
        lines.append(f"{pair.model_a} - {pair.model_b}: {found}")
    for reader in evaluation.readers:
        gain = estimate_text(reader.figures["specificity_difference"])
        lines.append(
            f"{reader.model} at the sensitivity of {reader.column} from {reader.cut:g} "
            f"({100 * reader.figures['reader_sensitivity'].value:.1f} %): specificity, model - reader, {gain} points"
        )
    return "\n".join([*lines, *(f"warning: {warning}" for warning in evaluation.warnings)])


# --- Pictures --------------------------------------------------------------------------------------------------------


def pictures_beside(folder: Path, studies: Iterable[str]) -> dict[str, bytes]:
    """Pictures as score.py or prepare_cohort.py write them (``STUDY.png``, ``STUDY/qc.jpg``), made small, as JPEG.

    Of a study whose picture is no PNG or JPEG, is damaged, or is too large, the bytes are empty.
    """
    found = {}
    for study in studies:
        for path in (folder / f"{study}.png", folder / study / "qc.jpg"):
            with contextlib.suppress(OSError):  # of a study whose name no file can have
                if path.resolve().is_relative_to(folder.resolve()) and path.exists():
                    found[study] = _made_small(path)
                    break
    return found


def _made_small(path: Path) -> bytes:
    """A picture as a small JPEG; no bytes where it cannot be used. Pillow bounds what a PNG's texts unpack to."""
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its size, which is judged here
            with Image.open(io.BytesIO(read_file(path, _LARGEST_PICTURE)), formats=("PNG", "JPEG")) as picture:
                if picture.width * picture.height > _MOST_PIXELS:
                    return b""
                small = picture.convert("RGB")
        small.thumbnail((_WIDTH, 4 * _WIDTH))
        small.save(buffer, "JPEG", quality=80)
    except MemoryError:
        raise
    except Exception:  # Pillow raises nearly any type on a damaged file
        return b""
    return buffer.getvalue()
