"""An evaluation written down: metrics.json, tables, report.html; pictures found beside the scores."""

import io
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image

from mri_alm.atomic import private_files
from mri_alm.evaluation import Estimate, Performance, finite
from mri_alm.evaluation_tables import (
    comparison_table,
    metrics_table,
    patients_table,
    subgroup_table,
    text,
    trade_off_table,
)
from mri_alm.files import write_json
from mri_alm.full_evaluation import Evaluation
from mri_alm.html_report import write_report
from mri_alm.tables import write_table

_WIDTH = 720  # pixels of a picture in the report


@private_files()
def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Write ``metrics.json``, ``tables/`` (CSV, JSON, LaTeX) and ``report.html``.

    Args:
        folder: Made where it does not exist.
        evaluation: What is written.

    Raises:
        InputError: If the folder cannot be written.
    """
    write_json(folder / "metrics.json", to_json(evaluation))
    tables = [metrics_table(evaluation.performances), patients_table(evaluation.data)]
    tables += [
        trade_off_table(f"allowed_{t.key}", t.steps, f"False negatives allowed among {t.positives} positives.")
        for t in evaluation.trade_offs
    ]
    if evaluation.comparisons:
        tables.append(comparison_table(evaluation.comparisons))
    if evaluation.groups:
        tables.append(subgroup_table(evaluation.groups))
    for table in tables:
        write_table(folder / "tables", table)
    write_report(folder / "report.html", evaluation)


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Every figure as strict JSON."""
    data = evaluation.data
    return {
        "studies": len(data.studies),
        "positives": int(data.label.sum()),
        "models": {
            model.name: _performance(evaluation.performances[model.name])
            | {"threshold": None if model.threshold is None else finite(model.threshold)}
            for model in data.models
        },
        "comparisons": [
            {
                "model_a": c.model_a, "model_b": c.model_b, "delong": asdict(c.delong) if c.delong else None,
                "p_holm": c.p_holm, "note": c.note, "differences": _estimates(c.differences),
            }
            for c in evaluation.comparisons
        ],
        "subgroups": [
            {"column": g.column, "value": g.value, "model": g.model, "warning": g.note}
            | (_performance(g.performance) if g.performance else {"positives": g.positives, "negatives": g.negatives})
            for g in evaluation.groups
        ],
        "warnings": list(evaluation.warnings),
        "left_out": data.left_out,
        "bootstrap": {"draws": evaluation.draws, "seed": evaluation.seed},
        "sha256": {"labels": data.sha256} | {model.name: model.sha256 for model in data.models},
        "versions": {"mri-alm": version("mri-alm")},
    }  # fmt: skip


def pictures_beside(folder: Path, studies: Iterable[str]) -> dict[str, bytes]:
    """Pictures as score.py or prepare_cohort.py write them (``STUDY.png``, ``STUDY/qc.jpg``), made small, as JPEG."""
    found = {}
    for study in studies:
        for path in (folder / f"{study}.png", folder / study / "qc.jpg"):
            if path.resolve().is_relative_to(folder.resolve()) and path.is_file():
                with Image.open(path) as picture:
                    found[study] = jpeg(picture)
                break
    return found


def jpeg(picture: Image.Image) -> bytes:
    """A picture of at most the report's width, as JPEG."""
    small = picture.convert("RGB")
    small.thumbnail((_WIDTH, 4 * _WIDTH))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def in_words(evaluation: Evaluation) -> str:
    """A few lines for the terminal: per model the figures that matter, then the warnings."""
    data = evaluation.data
    positives = int(data.label.sum())
    lines = [f"{len(data.studies)} exams: {positives} need DCE, {len(data.studies) - positives} do not"]
    for name, performance in evaluation.performances.items():
        figures = performance.figures
        lines.append(f"{name}: AUC {text(figures['auc'])} %")
        lines += [
            f"  FPR at {k} FN {text(figures[f'fpr_at_fn_{k}'])} %; of new positives up to {100 * bound:.1f} % missed"
            for k, bound in performance.miss_rate_upper.items()
        ]
        if "spared" in figures:
            lines.append(
                f"  at its threshold: sensitivity {text(figures['sensitivity'])} %, spared {text(figures['spared'])} %"
            )
    lines += [
        f"{c.model_a} - {c.model_b}: AUC {100 * c.delong.difference:+.1f} points, p {c.delong.p_value:.3g}, "
        f"Holm {c.p_holm:.3g}"
        if c.delong
        else f"{c.model_a} - {c.model_b}: {c.note}"
        for c in evaluation.comparisons
    ]
    return "\n".join([*lines, *(f"warning: {text}" for text in evaluation.warnings)])


def _performance(performance: Performance) -> dict[str, Any]:
    return {
        "positives": performance.positives,
        "negatives": performance.negatives,
        "figures": _estimates(performance.figures),
        "miss_rate_upper_95": {str(k): bound for k, bound in performance.miss_rate_upper.items()},
    }


def _estimates(figures: Mapping[str, Estimate]) -> dict[str, dict[str, float | None]]:
    return {name: asdict(estimate) for name, estimate in figures.items()}
