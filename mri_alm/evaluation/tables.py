"""The tables of an evaluation, each as CSV and JSON with bare numbers and as LaTeX with formatted ones."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mri_alm.evaluation.analysis import TradeOff
from mri_alm.evaluation.data import LabelledScores
from mri_alm.evaluation.performance import PARTIAL_FROM, Estimate, Performance, ScoreComparison, Subgroup
from mri_alm.evaluation.reader import ReaderComparison
from mri_alm.metrics.ranking import FALSE_NEGATIVES, TRUE_POSITIVE_RATES
from mri_alm.runtime.files import write_bytes, write_json
from mri_alm.runtime.tables import write_csv

NO_VALUE = "–"
_TITLES = {
    "auc": "AUC, %",
    "partial_auc": f"Partial AUC, TPR from {100 * PARTIAL_FROM:g} %, standardised (chance: 50), %",
    **{f"fpr_at_tpr_{t}": f"FPR at TPR {t} %, %" for t in TRUE_POSITIVE_RATES},
    **{f"fpr_at_fn_{k}": f"FPR at {k} FN, %" for k in FALSE_NEGATIVES},
    "sensitivity": "Sensitivity at the threshold, %",
    "specificity": "Specificity at the threshold, %",
    "npv": "Of those spared, did not need DCE, %",
    "spared": "Spared at the threshold, %",
    "calibration_slope": "Calibration slope (right: 1)",
    "calibration_intercept": "Calibration intercept (right: 0)",
    "observed_expected": "Observed over expected positives (right: 1)",
    "brier": "Brier score",
    "ece": "Expected calibration error (10 bins)",
}
_CALIBRATION = ("calibration_slope", "calibration_intercept", "observed_expected", "brier", "ece")
_GROUP_TITLES = {
    "auc": "AUC, %", "fpr_at_fn_0": "FPR at 0 FN, %", "fpr_at_fn_1": "FPR at 1 FN, %",
    "sensitivity": "Sensitivity, %", "specificity": "Specificity, %", "spared": "Spared, %",
}  # fmt: skip
_READER_TITLES = {
    "reader_sensitivity": "Reader's sensitivity, %", "reader_specificity": "Reader's specificity, %",
    "model_specificity": "Model's specificity at that sensitivity, %", "specificity_difference": "Difference",
    "model_sensitivity": "Model's sensitivity at that specificity, %", "sensitivity_difference": "Difference",
}  # fmt: skip
_OUTCOMES = {(1, 1): "examined", (0, 0): "spared", (1, 0): "missed", (0, 1): "needless"}  # of label and decision
_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "\n": " ", "\r": " ",
})  # fmt: skip


@dataclass(frozen=True)
class Table:
    """One table, as bare records and as text.

    Attributes:
        name: Stem of its files.
        caption: One sentence.
        columns: Keys of the records, in order.
        records: Numbers, texts, None.
        header: Column titles of the text form.
        cells: Rows of the text form, as many cells as ``header``.
    """

    name: str
    caption: str
    columns: Sequence[str]
    records: Sequence[Mapping[str, Any]]
    header: Sequence[str]
    cells: Sequence[Sequence[str]]


def write_table(folder: Path, table: Table) -> None:
    """Write ``NAME.csv``, ``NAME.json`` and ``NAME.tex``.

    Raises:
        InputError: If the folder cannot be written.
    """
    rows = [{key: _one_line(value) for key, value in record.items()} for record in table.records]
    write_csv(folder / f"{table.name}.csv", table.columns, rows)
    write_json(folder / f"{table.name}.json", {"caption": table.caption, "rows": list(table.records)})
    write_bytes(folder / f"{table.name}.tex", latex(table).encode())


def _one_line(value: Any) -> Any:
    """A text on one line; :func:`mri_alm.runtime.tables.write_csv` keeps it from being a formula."""
    return re.sub(r"[\r\n\t\v\f]", " ", value) if isinstance(value, str) else value


def latex(table: Table) -> str:
    """The text form as a ``tabular`` of package booktabs, every character of the cells escaped."""
    lines = [" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in (table.header, *table.cells)]
    body = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
    form = "l" + "r" * (len(table.header) - 1)
    caption = " ".join(table.caption.split())
    return f"% {caption}\n% Needs \\usepackage{{booktabs}}.\n\\begin{{tabular}}{{{form}}}\n{body}\n\\end{{tabular}}\n"


def interval_text(estimate: Estimate, *, percent: bool = True) -> str:
    """A figure's interval, as ``83.0 to 99.0``."""
    return f"{_number(estimate.low, percent)} to {_number(estimate.high, percent)}"


def estimate_text(estimate: Estimate | None, *, percent: bool = True) -> str:
    """A figure with its interval, as ``92.2 (83.0 to 99.0)``."""
    if estimate is None:
        return NO_VALUE
    return f"{_number(estimate.value, percent)} ({interval_text(estimate, percent=percent)})"


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.1f}" if percent else f"{value:.3f}"


def null_unless_finite(value: float) -> float | None:
    """A number as strict JSON can hold it."""
    return value if math.isfinite(value) else None


def metrics_table(performances: Mapping[str, Performance]) -> Table:
    """A row per figure, a column per model; beside each number of false negatives what it promises."""
    first = next(iter(performances.values()))
    bounds = {f"fpr_at_fn_{k}": bound for k, bound in first.miss_rate_upper.items()}
    records, cells = [], []
    for name, title in _TITLES.items():
        found = {model: performance.figures.get(name) for model, performance in performances.items()}
        if not any(found.values()):
            continue
        bound = bounds.get(name)
        beside = "" if bound is None else f" (upper bound of the miss rate: {100 * bound:.1f} %)"
        percent = name not in _CALIBRATION
        cells.append([title + beside, *(estimate_text(e, percent=percent) for e in found.values())])
        records += [
            {"model": model, "metric": name, **vars(estimate), "miss_rate_upper_95": bound}
            for model, estimate in found.items()
            if estimate
        ]
    return Table(
        "metrics",
        f"{first.positives} positives, {first.negatives} negatives; 95 % intervals. FPRs take their threshold from "
        "these very labels: evaluation, not an operating point.",
        ("model", "metric", "value", "low", "high", "miss_rate_upper_95"),
        records,
        ["", *performances],
        cells,
    )


def calibration_apart(table: Table) -> tuple[Table, Table]:
    """The table of :func:`metrics_table` without the rows on calibration, and these, in their text form."""
    titles = {_TITLES[name] for name in _CALIBRATION}
    rest, theirs = ([row for row in table.cells if (row[0] in titles) == on] for on in (False, True))
    return replace(table, cells=rest), replace(table, caption="95 % intervals.", cells=theirs)


def comparison_table(comparisons: Sequence[ScoreComparison]) -> Table:
    """A row per pair of models: differences a - b."""
    records: list[dict[str, Any]] = []
    cells = []
    for c in comparisons:
        pair, test = {"model_a": c.model_a, "model_b": c.model_b}, c.delong
        auc = Estimate(test.difference, *test.interval) if test else None
        p, z = (test.p_value, test.z) if test else (None, None)
        ends = vars(auc) if auc else {"value": None, "low": None, "high": None}
        records.append(pair | {"metric": "auc", **ends, "z": z, "p": p, "p_holm": c.p_holm, "note": c.note})
        records += [pair | {"metric": name, **vars(e), "note": "paired bootstrap"} for name, e in c.differences.items()]
        cells.append([
            f"{c.model_a} - {c.model_b}",
            estimate_text(auc),
            *(NO_VALUE if value is None else f"{value:.3g}" for value in (p, c.p_holm)),
            *(estimate_text(c.differences.get(f"fpr_at_fn_{k}")) for k in FALSE_NEGATIVES),
        ])  # fmt: skip
    return Table(
        "comparisons",
        "Differences in percentage points on the same studies, 95 % intervals: AUC by DeLong, p corrected by Holm over "
        "all pairs; FPR at k false negatives by paired bootstrap. A positive AUC and a negative FPR favour the first.",
        ("model_a", "model_b", "metric", "value", "low", "high", "z", "p", "p_holm", "note"),
        records,
        ["Models", "AUC", "p", "p (Holm)", *(f"FPR at {k} FN" for k in FALSE_NEGATIVES)],
        cells,
    )


def subgroup_table(groups: Sequence[Subgroup]) -> Table:
    """A row per group and model."""
    records: list[dict[str, Any]] = []
    cells = []
    for g in groups:
        figures = g.performance.figures if g.performance else {}
        group = {
            "column": g.column, "value_of_column": g.value, "model": g.model,
            "positives": g.positives, "negatives": g.negatives, "note": g.note,
        }  # fmt: skip
        records += [group | {"metric": name, **vars(e)} for name, e in figures.items()] or [group]
        shown = [estimate_text(figures.get(name)) for name in _GROUP_TITLES]
        cells.append([f"{g.column}: {g.value}", g.model, str(g.positives), str(g.negatives), *shown, g.note])
    return Table(
        "subgroups",
        "The same figures within groups of studies, 95 % intervals, not corrected for the number of groups. "
        "Groups with a warning are too small to conclude anything from.",
        ("column", "value_of_column", "model", "positives", "negatives", "metric", "value", "low", "high", "note"),
        records,
        ["Group", "Model", "Need DCE", "Do not", *_GROUP_TITLES.values(), "Warning"],
        cells,
    )


def reader_table(readers: Sequence[ReaderComparison]) -> Table:
    """A row per cut of the reader's column and model; differences are model - reader."""
    records: list[dict[str, Any]] = []
    cells = []
    for r in readers:
        pair = {
            "column": r.column, "cut": r.cut, "model": r.model, "positives": r.positives, "negatives": r.negatives,
        }  # fmt: skip
        records += [pair | {"metric": name, **vars(estimate)} for name, estimate in r.figures.items()]
        shown = [estimate_text(r.figures[name]) for name in _READER_TITLES]
        cells.append([f"{r.column} from {r.cut:g}", r.model, *shown])
    first = readers[0]
    return Table(
        "reader",
        f"{first.positives} positives, {first.negatives} negatives with a value; 95 % intervals, of differences by "
        "paired bootstrap, in percentage points. A positive difference favours the model. Its thresholds are taken "
        "from these very labels: evaluation, not an operating point.",
        ("column", "cut", "model", "positives", "negatives", "metric", "value", "low", "high"),
        records,
        ["Reader", "Model", *_READER_TITLES.values()],
        cells,
    )


def trade_off_table(trade_off: TradeOff, caption: str) -> Table:
    """A row per number of allowed false negatives."""
    records, cells = [], []
    for s in trade_off.steps:
        missed = int(s.missed.sum())
        records.append({
            "allowed": s.allowed, "threshold": null_unless_finite(s.threshold),
            "spared_per_100": 100 * s.spared.value, "spared_low": 100 * s.spared.low,
            "spared_high": 100 * s.spared.high, "missed_here": missed, "false_positives_here": s.false_positives,
            "expected_miss_rate": s.expected_miss_rate, "miss_rate_upper_95": s.miss_rate_upper,
            "new_positives": s.new_positives, "expected_misses": s.expected_misses,
        })  # fmt: skip
        cells.append([
            "examine everyone" if s.allowed is None else str(s.allowed),
            NO_VALUE if s.allowed is None else f"{s.threshold:.6g}",
            estimate_text(s.spared), str(missed), f"{100 * s.expected_miss_rate:.1f}",
            f"{100 * s.miss_rate_upper:.1f}", f"{s.expected_misses:.1f}",
        ])  # fmt: skip
    return Table(
        f"allowed_{trade_off.key}",
        caption,
        list(records[0]),
        records,
        ["FN allowed", "Threshold", "Spared per 100", "Missed here", "Expected miss rate, %", "Upper bound, %",
         f"Expected misses in {trade_off.steps[0].new_positives} new positives"],
        cells,
    )  # fmt: skip


def patients_table(data: LabelledScores) -> Table:
    """A row per study and model: label, score, spread, decision, what it means for the patient, warnings."""
    records: list[dict[str, Any]] = []
    decisions = [model.needed for model in data.models]
    for i, (study, label) in enumerate(zip(data.studies, data.label.tolist(), strict=True)):
        for model, decided in zip(data.models, decisions, strict=True):
            needed = None if decided is None else int(decided[i])
            records.append({
                "study": study, "label": label, "model": model.name, "score": float(model.score[i]),
                "spread": null_unless_finite(float(model.spread[i])), "dce_needed": needed,
                "outcome": "" if needed is None else _OUTCOMES[label, needed], "warnings": model.warnings[i],
            })  # fmt: skip
    cells = [
        [r["study"], r["model"], str(r["label"]), f"{r['score']:.6g}", r["outcome"] or NO_VALUE, r["warnings"]]
        for r in records
    ]
    header = ["Study", "Model", "Label", "Score", "Outcome", "Warnings"]
    return Table("patients", "Every evaluated study.", list(records[0]), records, header, cells)
