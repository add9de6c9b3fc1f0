"""An evaluation written down: JSON, tables, and one HTML file that needs nothing else, not even a network."""

import base64
import contextlib
import io
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image
from plotly.offline import get_plotlyjs

from mri_alm.evaluation.analysis import Evaluation, ThresholdChoice, TradeOff
from mri_alm.evaluation.data import LabelledScores, shortened
from mri_alm.evaluation.figures import (
    Plot,
    calibration_figure,
    decision_figure,
    roc_figure,
    score_figure,
    training_figures,
)
from mri_alm.evaluation.model_card import LEFT_TO_AUTHORS, checklist, model_card
from mri_alm.evaluation.performance import Performance
from mri_alm.evaluation.tables import (
    NO_VALUE,
    comparison_table,
    estimate_text,
    interval_text,
    metrics_table,
    null_unless_finite,
    patients_table,
    subgroup_table,
    trade_off_table,
    write_table,
)
from mri_alm.runtime.atomic import private_files
from mri_alm.runtime.files import read_file, write_bytes, write_json

_TEMPLATES = Path(__file__).parent
_WIDTH = 720  # pixels of a picture in the report
_MOST_PIXELS, _LARGEST_PICTURE = 50_000_000, 64 << 20  # pixels and bytes of a picture beside the scores
_MISSED_SHOWN, _LEFT_OUT_SHOWN = 30, 5  # names of exams in one line
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


# --- HTML ------------------------------------------------------------------------------------------------------------


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
    page = environment.get_template("report.html.j2").render(_context(evaluation))
    write_bytes(path, page.encode())


def _context(evaluation: Evaluation) -> dict[str, Any]:
    data, run = evaluation.data, evaluation.run
    training = training_figures(run.history, run.best_epoch) if run else {}
    return {
        "models": [model.name for model in data.models],
        "first": data.models[0].name,
        "positives": data.positives,
        "negatives": data.negatives,
        "warnings": evaluation.warnings,
        "facts": _facts(evaluation),
        "metrics": metrics_table(evaluation.performances),
        "comparisons": comparison_table(evaluation.comparisons) if evaluation.comparisons else None,
        "subgroups": subgroup_table(evaluation.groups) if evaluation.groups else None,
        "bases": [_basis(trade_off) for trade_off in evaluation.trade_offs],
        "figures": _figures(evaluation) | {f"training-{i}": figure for i, figure in enumerate(training.values())},
        "training": list(training),
        "trade_offs": [  # as texts, so that the page computes nothing
            {"key": t.key, "start": t.start, "steps": [_step(step, data) for step in t.steps]}
            for t in evaluation.trade_offs
        ],
        "patients": _patients(evaluation),
        "cohort": _cohort(evaluation),
        "card": model_card(evaluation),
        "checklist": checklist(evaluation),
        "open": LEFT_TO_AUTHORS,
        "css": (_TEMPLATES / "report.css").read_text("utf-8"),
        "js": (_TEMPLATES / "report.js").read_text("utf-8"),
        "plotly": get_plotlyjs(),
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
    missed, worst = round((1 - sensitivity.value) * data.positives), 100 * (1 - sensitivity.low)
    return [
        *facts,
        ("Spared", f"{100 * spared.value:.0f} of 100", f"at the scores' threshold; interval {interval_text(spared)}"),
        ("Missed", f"{missed} of {data.positives}", f"true miss rate up to {worst:.0f} % (95 % interval)"),
    ]


def _figures(evaluation: Evaluation) -> dict[str, Plot]:
    data, performances = evaluation.data, evaluation.performances
    figures = {
        "roc": roc_figure(performances, enlarged=False),
        "roc-high": roc_figure(performances, enlarged=True),
        "scores": score_figure(data, data.models[0]),
    }
    if probabilities := [model for model in data.models if "brier" in performances[model.name].figures]:
        figures["calibration"] = calibration_figure(data.label, probabilities)
        figures["decision"] = decision_figure(data.label, probabilities)
    return figures


def _basis(trade_off: TradeOff) -> dict[str, Any]:
    title, note = _SLIDER_NOTES[trade_off.key]
    table = trade_off_table(trade_off, title)
    return {"key": trade_off.key, "title": title, "note": note.format(n=trade_off.positives), "table": table}


def _step(step: ThresholdChoice, data: LabelledScores) -> dict[str, Any]:
    missed = [study for study, is_missed in zip(data.studies, step.missed, strict=True) if is_missed]
    everyone = step.allowed is None
    allowed = "Examine everyone" if everyone else f"{step.allowed} false negative{'s' * (step.allowed != 1)} allowed"
    return {
        "allowed": allowed,
        "threshold": "none" if everyone else f"{step.threshold:.4f}",
        "spared": f"{100 * step.spared.value:.1f}",
        "spared_interval": "" if everyone else f"95 % interval {interval_text(step.spared)}",
        "expected": f"{step.expected_misses:.1f}",
        "upper": str(step.misses_upper),
        "expected_rate": f"{100 * step.expected_miss_rate:.1f} %",
        "upper_rate": f"{100 * step.miss_rate_upper:.1f} %",
        "new": str(step.new_positives),
        "missed": f"{len(missed)} of {data.positives}",
        "needless": f"{step.false_positives} of {data.negatives}",
        "names": shortened(missed, _MISSED_SHOWN) or "none",
        "says": f"{allowed}: {100 * step.spared.value:.0f} of 100 patients spared the injection; of "
        f"{step.new_positives} new patients who need it {step.expected_misses:.1f} missed on average, with 95 % "
        f"probability at most {step.misses_upper}.",
        "at": null_unless_finite(step.threshold),
        "point": [step.false_positives / data.negatives, 1 - len(missed) / data.positives],
    }


def _patients(evaluation: Evaluation) -> list[dict[str, Any]]:
    """A row per study, by the first model's score: what the first model says of it, and the scores of all models."""
    records, models = patients_table(evaluation.data).records, len(evaluation.data.models)
    rows = []
    for i in range(0, len(records), models):
        first = records[i]
        picture = evaluation.pictures.get(first["study"])
        rows.append({
            **first,
            "scores": [record["score"] for record in records[i : i + models]],
            "decision": {1: "DCE needed", 0: "DCE not needed", None: NO_VALUE}[first["dce_needed"]],
            "outcome": first["outcome"] or NO_VALUE,
            "picture": base64.b64encode(picture).decode() if picture else "",
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["score"])


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
            ("Patients of it held out once or more", on.size, f"{on.sum()} need contrast; the threshold rests on them"),
        ]
    return found
