"""The report: one HTML file that needs nothing else, not even a network."""

import base64
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from mri_alm.evaluation_tables import (
    NONE,
    comparison_table,
    decision,
    metrics_table,
    outcome,
    subgroup_table,
    text,
    trade_off_table,
)
from mri_alm.files import write_bytes
from mri_alm.full_evaluation import Evaluation, TradeOff
from mri_alm.html_figures import (
    calibration_figure,
    decision_figure,
    roc_figure,
    score_figure,
    training_figures,
)
from mri_alm.model_card import OPEN, checklist, model_card
from mri_alm.trade_off import Step

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


def write_report(path: Path, evaluation: Evaluation) -> None:
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


def _step(step: Step, evaluation: Evaluation) -> dict[str, Any]:
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
