"""The report as one HTML file that needs nothing else, not even a network. Its parts lie in ``templates/``."""

import base64
from collections import Counter
from pathlib import Path
from textwrap import wrap
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from mri_alm.errors import shortened
from mri_alm.evaluation.analysis import Evaluation, ThresholdChoice, TradeOff
from mri_alm.evaluation.data import LabelledScores
from mri_alm.evaluation.figures import (
    Plot,
    calibration_figure,
    decision_figure,
    forest_figure,
    learning_figure,
    roc_figure,
    score_figure,
    training_figures,
)
from mri_alm.evaluation.model_card import LEFT_TO_AUTHORS, checklist, model_card
from mri_alm.evaluation.tables import (
    NO_VALUE,
    calibration_apart,
    comparison_table,
    interval_text,
    metrics_table,
    null_unless_finite,
    patients_table,
    reader_table,
    subgroup_table,
    trade_off_table,
)
from mri_alm.metrics.threshold import clopper_pearson_upper
from mri_alm.runtime.files import write_bytes

_TEMPLATES = Path(__file__).parent / "templates"
_LEFT_OUT_SHOWN = 5  # names of exams in one line
_REASONS_SHOWN, _FLOW_COLUMNS = 5, 27  # reasons of a flow chart, and letters in a line of its boxes
_SLIDER_NOTES = {  # title and explanation of each way to set the threshold
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
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    parts = {kind: (_TEMPLATES / f"report.{kind}").read_text("utf-8") for kind in ("css", "js")}
    page = environment.get_template("report.html.j2").render(_context(evaluation), **parts, plotly=get_plotlyjs())
    write_bytes(path, page.encode())


def _context(evaluation: Evaluation) -> dict[str, Any]:
    data, run = evaluation.data, evaluation.run
    training = training_figures(run.history, run.best_epoch) if run else {}
    metrics, calibration = calibration_apart(metrics_table(evaluation.performances))
    trade_offs: list[dict[str, Any]] = [  # as texts, so that the page computes nothing
        {"key": t.key, "start": t.start, "steps": [_step(step, data) for step in t.steps]}
        for t in evaluation.trade_offs
    ]
    return {
        "models": [model.name for model in data.models],
        "first": data.models[0].name,
        "positives": data.positives,
        "negatives": data.negatives,
        "warnings": evaluation.warnings,
        "decided": data.models[0].threshold is not None,
        "facts": _facts(evaluation),
        "metrics": metrics,
        "calibration": calibration,
        "comparisons": comparison_table(evaluation.comparisons) if evaluation.comparisons else None,
        "readers": reader_table(evaluation.readers) if evaluation.readers else None,
        "subgroups": subgroup_table(evaluation.groups) if evaluation.groups else None,
        "group_rows": len({(group.column, group.value) for group in evaluation.groups}),
        "bases": [_basis(trade_off) for trade_off in evaluation.trade_offs],
        "figures": _figures(evaluation) | {f"training-{i}": figure for i, figure in enumerate(training.values())},
        "training": list(training),
        "trade_offs": trade_offs,
        "start": trade_offs[0]["steps"][trade_offs[0]["start"]],
        "hardest": [(exam, _picture(evaluation, exam.study)) for exam in evaluation.hardest],
        "patients": _patients(evaluation),
        "cohort": _cohort(evaluation),
        "left_out": _left_out(data),
        "total_left_out": len(data.left_out),
        "card": model_card(evaluation),
        "checklist": checklist(evaluation),
        "open": LEFT_TO_AUTHORS,
        "folded": ("Versions", "SHA-256", "Settings of the training"),
    }


def _facts(evaluation: Evaluation) -> list[tuple[str, str, str]]:
    """The few numbers to see first: title, value, what it means."""
    data = evaluation.data
    figures = evaluation.performances[data.models[0].name].figures
    facts = [
        ("Exams", str(len(data.studies)), f"{data.positives} need contrast, {data.negatives} do not"),
        ("AUC", f"{100 * figures['auc'].value:.1f} %", f"95 % interval {interval_text(figures['auc'])}"),
    ]
    if "spared" not in figures:
        return facts
    spared, sensitivity = figures["spared"], figures["sensitivity"]
    missed = round((1 - sensitivity.value) * data.positives)
    bound = 100 * clopper_pearson_upper(missed, data.positives, 0.05)
    return [
        *facts,
        ("Spared", f"{100 * spared.value:.0f} of 100", f"at the scores' threshold; interval {interval_text(spared)}"),
        ("Missed", f"{missed} of {data.positives}", f"at the scores' threshold; upper bound {bound:.1f} %"),
    ]


def _figures(evaluation: Evaluation) -> dict[str, Plot]:
    data, performances = evaluation.data, evaluation.performances
    figures = {
        "roc": roc_figure(performances, evaluation.readers, enlarged=False),
        "roc-high": roc_figure(performances, evaluation.readers, enlarged=True),
        "scores": score_figure(data, data.models[0]),
    }
    if probabilities := [model for model in data.models if "brier" in performances[model.name].figures]:
        figures["calibration"] = calibration_figure(data.label, probabilities)
        figures["decision"] = decision_figure(data.label, probabilities)
    if len(set(evaluation.trained_on.values())) > 1 and len(evaluation.trained_on) == len(data.models):
        figures["learning"] = learning_figure(evaluation.trained_on, performances)
    if evaluation.groups:
        figures["forest-auc"] = forest_figure(evaluation.groups, performances, "auc")
        if any("spared" in performance.figures for performance in performances.values()):
            for name in ("sensitivity", "specificity"):
                figures[f"forest-{name}"] = forest_figure(evaluation.groups, performances, name)
    return figures


def _basis(trade_off: TradeOff) -> dict[str, Any]:
    title, note = _SLIDER_NOTES[trade_off.key]
    table = trade_off_table(trade_off, title)
    return {"key": trade_off.key, "title": title, "note": note.format(n=trade_off.positives), "table": table}


def _step(step: ThresholdChoice, data: LabelledScores) -> dict[str, Any]:
    missed, needless = int(step.missed.sum()), step.false_positives
    examined, spared = data.positives - missed, data.negatives - needless
    everyone = step.allowed is None
    allowed = "Examine everyone" if everyone else f"{step.allowed} false negative{'s' * (step.allowed != 1)} allowed"
    return {
        "allowed": allowed,
        "threshold": "none" if everyone else f"{step.threshold:.6g}",
        "spared": f"{100 * step.spared.value:.1f}",
        "spared_interval": "" if everyone else f"95 % interval {interval_text(step.spared)}",
        "expected_rate": f"{100 * step.expected_miss_rate:.1f} %",
        "expected": f"{step.expected_misses:.1f}",
        "upper_rate": f"{100 * step.miss_rate_upper:.1f} %",
        "new": str(step.new_positives),
        "missed": f"{missed} of {data.positives}",
        "n_examined": str(examined),
        "n_missed": str(missed),
        "n_needless": str(needless),
        "n_spared": str(spared),
        "n_asked": str(examined + needless),
        "n_not_asked": str(missed + spared),
        "says": f"{allowed}: {100 * step.spared.value:.0f} of 100 patients spared the injection, {missed} of "
        f"{data.positives} missed here; of new patients who need it {100 * step.expected_miss_rate:.1f} % missed on "
        f"average, upper bound {100 * step.miss_rate_upper:.1f} %.",
        "at": null_unless_finite(step.threshold),
        "point": [needless / data.negatives, 1 - missed / data.positives],
    }


def _left_out(data: LabelledScores) -> list[str]:
    """Lines of the flow chart's box: how many exams were left out, and why."""
    counts = Counter(data.left_out.values()).most_common()
    lines = [f"{count} {reason}" for reason, count in counts[:_REASONS_SHOWN]]
    if more := counts[_REASONS_SHOWN:]:
        lines.append(f"{sum(count for _, count in more)} for other reasons")
    return [part for line in lines for part in wrap(line, _FLOW_COLUMNS)]


def _patients(evaluation: Evaluation) -> list[dict[str, Any]]:
    """A row per study, by the first model's score: what the first model says of it, and the scores of all models."""
    records, models = patients_table(evaluation.data).records, len(evaluation.data.models)
    rows = []
    for i in range(0, len(records), models):
        first = records[i]
        rows.append({
            **first,
            "scores": [record["score"] for record in records[i : i + models]],
            "decision": {1: "DCE needed", 0: "DCE not needed", None: NO_VALUE}[first["dce_needed"]],
            "outcome": first["outcome"] or NO_VALUE,
            "picture": _picture(evaluation, first["study"]),
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["score"])


def _picture(evaluation: Evaluation, study: str) -> str:
    """Base 64; empty where there is none."""
    return base64.b64encode(evaluation.pictures.get(study, b"")).decode()


def _cohort(evaluation: Evaluation) -> list[tuple[str, int, str]]:
    """How the cohort was built: what, how many exams, details."""
    data, run = evaluation.data, evaluation.run
    reasons: dict[str, list[str]] = {}
    for study, reason in data.left_out.items():
        reasons.setdefault(reason, []).append(study)
    warned = sum(any(of_study) for of_study in zip(*(model.warnings for model in data.models), strict=True))
    found = [
        ("Rows of the label table", len(data.studies) + len(data.left_out), ""),
        *((f"Left out: {reason}", len(names), shortened(names, _LEFT_OUT_SHOWN)) for reason, names in reasons.items()),
        ("Evaluated", len(data.studies), f"{data.positives} need contrast, {data.negatives} do not"),
        ("Evaluated with a quality warning", warned, "the table of patients says which"),
    ]
    if run:
        labels, on = list(run.trained.values()), run.held_out[0]
        found += [
            ("Training cohort of the run", len(labels), f"{sum(labels)} need contrast"),
            (
                "Patients of it held out once or more",
                on.size,
                f"{on.sum()} need contrast; the threshold rests on them" if on.size else "so there is no threshold",
            ),
        ]
    return found
