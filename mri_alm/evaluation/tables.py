"""The tables of an evaluation, each as CSV and JSON with bare numbers and as LaTeX with formatted ones."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mri_alm.evaluation.data import LabelledScores, Model
from mri_alm.evaluation.performance import (
    PARTIAL_FROM,
    Estimate,
    Performance,
    ScoreComparison,
    Subgroup,
    ThresholdChoice,
    finite,
)
from mri_alm.metrics.ranking import FALSE_NEGATIVES, TRUE_POSITIVE_RATES
from mri_alm.runtime.files import write_bytes, write_json
from mri_alm.runtime.tables import write_csv

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


LABELS = {
    "auc": "AUC, %",
    "auc_delong": "AUC, %, DeLong's interval",
    "partial_auc": f"Partial AUC, TPR from {100 * PARTIAL_FROM:g} %, standardised (chance: 50), %",
    **{f"fpr_at_tpr_{t}": f"FPR at TPR {t} %, %" for t in TRUE_POSITIVE_RATES},
    **{f"fpr_at_fn_{k}": f"FPR at {k} FN, %" for k in FALSE_NEGATIVES},
    "sensitivity": "Sensitivity at the threshold, %",
    "specificity": "Specificity at the threshold, %",
    "npv": "Of those spared, did not need DCE, %",
    "spared": "Spared at the threshold, %",
    "brier": "Brier score",
    "ece": "Expected calibration error (10 bins)",
}
_GROUP_FIGURES = ("auc", "fpr_at_fn_0", "fpr_at_fn_1", "sensitivity", "specificity", "spared")
NONE = "–"


def text(estimate: Estimate | None, *, percent: bool = True) -> str:
    """A figure with its interval, as ``92.2 (83.0 to 99.0)``."""
    if estimate is None:
        return NONE
    scale, form = (100, ".1f") if percent else (1, ".3f")
    value, *ends = (scale * v for v in (estimate.value, estimate.low, estimate.high) if v is not None)
    return f"{value:{form}}" + (f" ({ends[0]:{form}} to {ends[1]:{form}})" if ends else "")


def metrics_table(performances: Mapping[str, Performance]) -> Table:
    """A row per figure, a column per model; beside each number of false negatives what it promises."""
    first = next(iter(performances.values()))
    records, cells = [], []
    for name, label in LABELS.items():
        found = {model: performance.figures.get(name) for model, performance in performances.items()}
        if not any(found.values()):
            continue
        bound = _bound(first, name)
        beside = "" if bound is None else f" (of new positives up to {100 * bound:.1f} % missed)"
        cells.append([label + beside, *(text(e, percent=name not in ("brier", "ece")) for e in found.values())])
        records += [
            {"model": model, "metric": name, **_fields(estimate), "miss_rate_upper_95": bound}
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


def comparison_table(comparisons: Sequence[ScoreComparison]) -> Table:
    """A row per pair of models: differences a - b."""
    records, cells = [], []
    for c in comparisons:
        test = c.delong
        records.append({
            "model_a": c.model_a, "model_b": c.model_b, "metric": "auc",
            **_fields(Estimate(test.difference, *test.interval) if test else None),
            "z": test.z if test else None, "p": test.p_value if test else None, "p_holm": c.p_holm, "note": c.note,
        })  # fmt: skip
        records += [
            {"model_a": c.model_a, "model_b": c.model_b, "metric": name, **_fields(e), "note": "paired bootstrap"}
            for name, e in c.differences.items()
        ]
        cells.append([
            f"{c.model_a} - {c.model_b}",
            text(Estimate(test.difference, *test.interval) if test else None),
            f"{test.p_value:.3g}" if test else NONE,
            NONE if c.p_holm is None else f"{c.p_holm:.3g}",
            *(text(c.differences.get(f"fpr_at_fn_{k}")) for k in FALSE_NEGATIVES),
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
        counts: dict[str, Any] = {"column": g.column, "value_of_column": g.value, "model": g.model}
        counts |= {"positives": g.positives, "negatives": g.negatives, "note": g.note}
        records += [counts | {"metric": name, **_fields(e)} for name, e in figures.items()]
        if not figures:
            records.append(counts)
        shown = [text(figures.get(name)) for name in _GROUP_FIGURES]
        cells.append([f"{g.column}: {g.value}", g.model, str(g.positives), str(g.negatives), *shown, g.note])
    titles = ("AUC, %", "FPR at 0 FN, %", "FPR at 1 FN, %", "Sensitivity, %", "Specificity, %", "Spared, %")
    return Table(
        "subgroups",
        "The same figures within groups of studies, 95 % intervals, not corrected for the number of groups. "
        "Groups with a warning are too small to conclude anything from.",
        ("column", "value_of_column", "model", "positives", "negatives", "metric", "value", "low", "high", "note"),
        records,
        ["Group", "Model", "Need DCE", "Do not", *titles, "Warning"],
        cells,
    )


def trade_off_table(name: str, steps: Sequence[ThresholdChoice], caption: str) -> Table:
    """A row per number of allowed false negatives."""
    records, cells = [], []
    for s in steps:
        records.append({
            "allowed": s.allowed, "threshold": finite(s.threshold), "spared_per_100": 100 * s.spared.value,
            "spared_low": 100 * (s.spared.low or 0), "spared_high": 100 * (s.spared.high or 0),
            "missed_here": int(s.missed.sum()), "false_positives_here": s.false_positives,
            "expected_miss_rate": s.expected_miss_rate, "miss_rate_upper_95": s.miss_rate_upper,
            "new_positives": s.new_positives, "expected_misses": s.expected_misses, "misses_upper_95": s.misses_upper,
        })  # fmt: skip
        cells.append([
            "examine everyone" if s.allowed is None else str(s.allowed),
            NONE if math.isinf(s.threshold) else f"{s.threshold:.4f}",
            text(s.spared), str(int(s.missed.sum())),
            f"{100 * s.expected_miss_rate:.1f}", f"{100 * s.miss_rate_upper:.1f}",
            f"{s.expected_misses:.1f}", str(s.misses_upper),
        ])  # fmt: skip
    new = steps[0].new_positives
    return Table(
        name,
        caption,
        list(records[0]),
        records,
        ["FN allowed", "Threshold", "Spared per 100", "Missed here", "Expected miss rate, %", "Upper 95 %, %",
         f"Expected misses in {new} new positives", "Upper 95 %"],
        cells,
    )  # fmt: skip


def patients_table(data: LabelledScores) -> Table:
    """A row per study: label, and per model score, spread, decision, outcome, warnings."""
    records: list[dict[str, Any]] = []
    for i, study in enumerate(data.studies):
        for model in data.models:
            needed = decision(model, i)
            records.append({
                "study": study, "label": int(data.label[i]), "model": model.name, "score": float(model.score[i]),
                "spread": finite(float(model.spread[i])), "dce_needed": needed,
                "outcome": outcome(int(data.label[i]), needed), "warnings": model.warnings[i],
            })  # fmt: skip
    cells = [
        [r["study"], r["model"], str(r["label"]), f"{r['score']:.4f}", r["outcome"] or NONE, r["warnings"]]
        for r in records
    ]
    header = ["Study", "Model", "Label", "Score", "Outcome", "Warnings"]
    return Table("patients", "Every evaluated study.", list(records[0]), records, header, cells)


def decision(model: Model, study: int) -> int | None:
    """1 when a model's file asks for DCE, 0 when it spares it, None when it decides nothing."""
    return None if model.threshold is None else int(model.score[study] >= model.threshold)


def outcome(label: int, needed: int | None) -> str:
    """A decision in a word: examined, spared, missed, needless."""
    return "" if needed is None else {(1, 1): "examined", (0, 0): "spared", (1, 0): "missed", (0, 1): "needless"}[
        label, needed
    ]  # fmt: skip


def _bound(performance: Performance, name: str) -> float | None:
    prefix, _, k = name.rpartition("_")
    return performance.miss_rate_upper.get(int(k)) if prefix == "fpr_at_fn" else None


def _fields(estimate: Estimate | None) -> dict[str, float | None]:
    return vars(estimate) if estimate else {"value": None, "low": None, "high": None}
