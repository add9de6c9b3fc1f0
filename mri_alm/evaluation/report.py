"""An evaluation written down: JSON, tables, and one HTML file that needs nothing else, not even a network."""

import base64
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image
from plotly.offline import get_plotlyjs

from mri_alm.evaluation.analysis import Evaluation, TradeOff
from mri_alm.evaluation.figures import calibration_figure, decision_figure, roc_figure, score_figure, training_figures
from mri_alm.evaluation.model_card import OPEN, checklist, model_card
from mri_alm.evaluation.performance import Estimate, Performance, ThresholdChoice, finite
from mri_alm.evaluation.tables import (
    NONE,
    comparison_table,
    decision,
    metrics_table,
    outcome,
    patients_table,
    subgroup_table,
    text,
    trade_off_table,
    write_table,
)
from mri_alm.runtime.atomic import private_files
from mri_alm.runtime.files import write_bytes, write_json

_FOLDER = Path(__file__).parent
_SHOWN = 30  # names of missed exams beside the slider
_BASIS = {
    "calibration": (
        "The calibration cohort (as score.py --calibration does)",
        "The threshold is set on the {n} positive patients of a cohort that the model never saw, then tried on the "
        "exams evaluated here. For a number of misses fixed before looking the law of new misses is exact, as long as "
        "new patients are like those of the calibration cohort.",
    ),
    "held_out": (
        "Held-out training exams (as the operating point is)",
        "The threshold is set on the {n} positive patients of training exams scored by members that did not see them, "
        "then tried on the exams evaluated here. This is how threshold.json is made. The law of new misses is "
        "approximate: those are not scores of the whole ensemble.",
    ),
    "evaluated": (
        "The exams evaluated here (evaluation only)",
        "The threshold is set on the {n} positives evaluated here, whose labels are known. Spared and missed describe "
        "these exams and flatter. The law of new misses holds for a number fixed before looking, not for the best one "
        "found by moving the slider. Nothing chosen here is an operating point to ship.",
    ),
}


def write_html_report(path: Path, evaluation: Evaluation) -> None:
    """Write the report; the same evaluation gives the same bytes.

    Names of studies and models are escaped wherever they appear, so none can act as HTML or script.

    Args:
        path: File to write, ``report.html``.
        evaluation: What is reported.

    Raises:
        InputError: If the file cannot be written.
    """
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page = environment.get_template("report.html.j2").render(_context(evaluation))
    write_bytes(path, page.encode())


def _context(evaluation: Evaluation) -> dict[str, Any]:
    data = evaluation.data
    positives = int(data.label.sum())
    return {
        "models": [model.name for model in data.models],
        "first": data.models[0].name,
        "positives": positives,
        "negatives": len(data.studies) - positives,
        "warnings": evaluation.warnings,
        "facts": _facts(evaluation),
        "metrics": metrics_table(evaluation.performances),
        "comparisons": comparison_table(evaluation.comparisons) if evaluation.comparisons else None,
        "subgroups": subgroup_table(evaluation.groups) if evaluation.groups else None,
        "bases": [_basis(t) for t in evaluation.trade_offs],
        "figures": _figures(evaluation),
        "training": list(_training(evaluation)),
        "trade_offs": _embedded(evaluation),
        "patients": _patients(evaluation),
        "cohort": _cohort(evaluation),
        "card": model_card(evaluation),
        "checklist": checklist(evaluation),
        "open": OPEN,
        "css": (_FOLDER / "report.css").read_text("utf-8"),
        "js": (_FOLDER / "report.js").read_text("utf-8"),
        "plotly": get_plotlyjs(),
    }


def _facts(evaluation: Evaluation) -> list[tuple[str, str, str]]:
    """The few numbers to see first: title, value, what it means."""
    data, first = evaluation.data, evaluation.data.models[0]
    figures = evaluation.performances[first.name].figures
    positives = int(data.label.sum())
    facts = [
        ("Exams", str(len(data.studies)), f"{positives} need contrast, {len(data.studies) - positives} do not"),
        ("AUC", f"{100 * figures['auc'].value:.1f} %", f"95 % interval {_interval(figures['auc'])}"),
    ]
    if "spared" not in figures:
        return facts
    spared, sensitivity = figures["spared"], figures["sensitivity"]
    missed = positives - round(sensitivity.value * positives)
    worst = 100 * (1 - (sensitivity.low or 0))
    return [
        *facts,
        ("Spared", f"{100 * spared.value:.0f} of 100", f"at the scores' threshold; interval {_interval(spared)}"),
        ("Missed", f"{missed} of {positives}", f"true miss rate up to {worst:.0f} % (95 % interval)"),
    ]


def _interval(estimate: Any) -> str:
    return text(estimate).partition("(")[2].rstrip(")")


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    data, performances = evaluation.data, evaluation.performances
    figures = {
        "roc": roc_figure(performances, enlarged=False),
        "roc-high": roc_figure(performances, enlarged=True),
        "scores": score_figure(data, data.models[0]),
    }
    probabilities = [model for model in data.models if "brier" in performances[model.name].figures]
    if probabilities:
        figures["calibration"] = calibration_figure(data.label, probabilities)
        figures["decision"] = decision_figure(data.label, probabilities)
    return figures | {f"training-{i}": figure for i, figure in enumerate(_training(evaluation).values())}


def _training(evaluation: Evaluation) -> dict[str, Any]:
    run = evaluation.run
    return training_figures(run.history, run.best_epoch) if run else {}


def _basis(trade_off: TradeOff) -> dict[str, Any]:
    title, note = _BASIS[trade_off.key]
    table = trade_off_table(trade_off.key, trade_off.steps, title)
    return {"key": trade_off.key, "title": title, "note": note.format(n=trade_off.positives), "table": table}


def _embedded(evaluation: Evaluation) -> list[dict[str, Any]]:
    """The slider's steps as texts, so that the page computes nothing."""
    return [
        {"key": t.key, "start": t.start, "steps": [_step(step, evaluation) for step in t.steps]}
        for t in evaluation.trade_offs
    ]


def _step(step: ThresholdChoice, evaluation: Evaluation) -> dict[str, Any]:
    data = evaluation.data
    positives = int(data.label.sum())
    missed = [study for study, m in zip(data.studies, step.missed, strict=True) if m]
    negatives = len(data.studies) - positives
    everyone = step.allowed is None
    allowed = "Examine everyone" if everyone else f"{step.allowed} false negative{'s' * (step.allowed != 1)} allowed"
    return {
        "allowed": allowed,
        "threshold": "none" if everyone else f"{step.threshold:.4f}",
        "spared": f"{100 * step.spared.value:.1f}",
        "spared_interval": "" if everyone else f"95 % interval {_interval(step.spared)}",
        "expected": f"{step.expected_misses:.1f}",
        "upper": str(step.misses_upper),
        "expected_rate": f"{100 * step.expected_miss_rate:.1f} %",
        "upper_rate": f"{100 * step.miss_rate_upper:.1f} %",
        "new": str(step.new_positives),
        "missed": f"{len(missed)} of {positives}",
        "needless": f"{step.false_positives} of {negatives}",
        "names": ", ".join(missed[:_SHOWN]) + (", ..." if len(missed) > _SHOWN else "") or "none",
        "says": f"{allowed}: {100 * step.spared.value:.0f} of 100 patients spared the injection; of "
        f"{step.new_positives} new patients who need it {step.expected_misses:.1f} missed on average, with 95 % "
        f"probability at most {step.misses_upper}.",
        "at": step.threshold if math.isfinite(step.threshold) else None,
        "point": [step.false_positives / negatives, 1 - len(missed) / positives],
    }


def _patients(evaluation: Evaluation) -> list[dict[str, Any]]:
    data, first = evaluation.data, evaluation.data.models[0]
    rows = []
    for i, study in enumerate(data.studies):
        needed = decision(first, i)
        picture = evaluation.pictures.get(study)
        rows.append({
            "study": study, "label": int(data.label[i]), "scores": [float(model.score[i]) for model in data.models],
            "spread": float(first.spread[i]) if math.isfinite(first.spread[i]) else None,
            "decision": {1: "DCE needed", 0: "DCE not needed", None: NONE}[needed],
            "outcome": outcome(int(data.label[i]), needed) or NONE, "warnings": first.warnings[i],
            "picture": base64.b64encode(picture).decode() if picture else "",
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["scores"][0])


def _cohort(evaluation: Evaluation) -> list[tuple[str, int, str]]:
    """How the cohort was built: what, how many exams, details."""
    data, run = evaluation.data, evaluation.run
    found = [("Rows of the label table", len(data.studies) + len(data.left_out), "")]
    reasons: dict[str, list[str]] = {}
    for study, reason in data.left_out.items():
        reasons.setdefault(reason, []).append(study)
    found += [
        (f"Left out: {reason}", len(names), ", ".join(names[:5]) + (", ..." if len(names) > 5 else ""))
        for reason, names in reasons.items()
    ]
    found.append(
        ("Evaluated", len(data.studies), f"{data.label.sum()} need contrast, {(data.label == 0).sum()} do not")
    )
    warned = sum(any(model.warnings[i] for model in data.models) for i in range(len(data.studies)))
    found.append(("Evaluated with a quality warning", warned, "the table of patients says which"))
    if run:
        labels, on = list(run.trained.values()), run.held_out[0]
        found += [
            ("Training cohort of the run", len(labels), f"{sum(labels)} need contrast"),
            ("Patients of it held out once or more", on.size, f"{on.sum()} need contrast; the threshold rests on them"),
        ]
    return found


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
    write_html_report(folder / "report.html", evaluation)


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Every figure as strict JSON."""
    data = evaluation.data
    return {
        "studies": len(data.studies),
        "positives": int(data.label.sum()),
        "models": {
            model.name: _as_json(evaluation.performances[model.name])
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
            | ({"positives": g.positives, "negatives": g.negatives} if not g.performance else _as_json(g.performance))
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


def _as_json(performance: Performance) -> dict[str, Any]:
    return {
        "positives": performance.positives,
        "negatives": performance.negatives,
        "figures": _estimates(performance.figures),
        "miss_rate_upper_95": {str(k): bound for k, bound in performance.miss_rate_upper.items()},
    }


def _estimates(figures: Mapping[str, Estimate]) -> dict[str, dict[str, float | None]]:
    return {name: asdict(estimate) for name, estimate in figures.items()}
