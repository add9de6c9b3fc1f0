"""The long-tailed tables as Markdown and CSV: means over trainings beside the paper's numbers, and the null.

The paper prints single numbers here and no ensembles; ours are means over splits, with their standard deviation.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from mri_alm.cifar.report import (
    beside_paper,
    bracketed,
    markdown_table,
    not_complete,
    page_of,
    with_deviation,
    write_both,
)
from mri_alm.cifar.table import NULL_SEED, BenchmarkTable, Method, Results, complete_methods, has_all_models
from mri_alm.metrics.ranking import class_accuracies, error_at_tpr

ONE_CRITICAL_COLUMNS = ("error @ 80 % TPR", "error @ 90 % TPR", "overall accuracy")
TWO_CRITICAL_COLUMNS = ("accuracy, rarest class", "accuracy, second rarest", "accuracy, other classes")
_ENDS = ("", " low", " high")


def _logits_of(test: Mapping[str, Any]) -> NDArray[np.float64]:
    """``(N, C)`` scores that rank and choose as the logits did, from what a result file keeps of them."""
    best = np.asarray(test["other_score"])
    logits = np.repeat(best[:, None] - 1, test["classes"], axis=1)
    logits[:, test["critical"]] = test["score"]
    logits[np.arange(len(best)), test["other"]] = best
    return logits


def training_figures_of(test: Mapping[str, Any]) -> list[float]:
    """The three numbers of a row for one training, in percent; with two critical classes other ones than with one.

    Critical classes are numbered from the rarest, which is the last class.
    """
    label, logits, critical = np.asarray(test["label"]), _logits_of(test), list(test["critical"])
    whole = class_accuracies(label, logits.argmax(1), critical=critical)
    if len(critical) == 1:
        errors = [error_at_tpr(label, logits, tpr, critical=critical) for tpr in (0.8, 0.9)]
        return [100 * value for value in (*errors, whole.overall)]
    return [100 * value for value in (*(whole.critical[c] for c in sorted(critical, reverse=True)), whole.other)]


def to_rows(table: BenchmarkTable, results: Results, methods: Sequence[Method], splits: int) -> list[dict[str, Any]]:
    """One row per method, and the nulls: means, deviations, the paper's, difference from the base loss.

    Args:
        table: Which.
        results: See :func:`mri_alm.cifar.table.read_results`.
        methods: Those that are complete, the baseline among them.
        splits: Trainings per row.
    """
    values = {method.key: _values(results, method.key, 0, splits) for method in methods}
    critical = results[table.baseline, 0, 0]["test"]["critical"]
    columns = ONE_CRITICAL_COLUMNS if len(critical) == 1 else TWO_CRITICAL_COLUMNS
    rows = []
    for method in methods:
        against = table.against(method)
        row = {"method": method.key, "name": method.name}
        row |= _described(columns, values[method.key], values.get(against) if against != method.key else None)
        rows.append(row | {f"{name}, paper": printed for name, printed in zip(columns, method.printed, strict=False)})
    for key in table.baselines(values):
        if key in values and has_all_models(results, key, NULL_SEED, splits):
            again = _values(results, key, NULL_SEED, splits)
            name = f"null: {key}, other seeds"
            rows.append({"method": f"null {key}", "name": name} | _described(columns, again, values[key]))
    return rows


def write_multiclass_report(
    table: BenchmarkTable, results: Results, keys: Sequence[str], splits: int, folder: Path
) -> str:
    """Write ``table.md`` and ``table.csv``; returns the Markdown.

    Args:
        table: Which.
        results: See :func:`mri_alm.cifar.table.read_results`.
        keys: Methods, in order.
        splits: Trainings per row: methods with fewer are left out.
        folder: Where the files go.

    Raises:
        InputError: If the baseline is not complete.
    """
    methods, missing = complete_methods(table, results, keys, splits)
    rows = to_rows(table, results, methods, splits)
    columns = [name for name in rows[0] if name in (*ONE_CRITICAL_COLUMNS, *TWO_CRITICAL_COLUMNS)]
    head = ["method", *(cell for name in columns for cell in (name, "paper", "diff.", "against the base loss"))]
    lines = []
    for row in rows:
        cells = [row["name"]]
        for name in columns:
            cells.append(with_deviation(row[name], row[f"{name}, SD"], splits))
            cells += beside_paper(row[name], row.get(f"{name}, paper"))
            gain = [row[f"{name}, difference{end}"] for end in _ENDS if f"{name}, difference" in row]
            cells.append("-" if not gain else bracketed(*gain, sign="+") if splits > 1 else f"{gain[0]:+.1f}")
        lines.append(cells)
    over, paired = "one training each", "difference; nothing says how much of it is chance, but the null row"
    if splits > 1:
        over = f"mean ± SD over {splits} trainings"
        paired = "paired difference, 95 % by Student's t over splits"
    text = page_of([
        f"# {table.name}, protocol `{table.protocol}`",
        f"Percent; {over}. Paper: {table.source}. Last column of each: {paired}.",
        markdown_table(head, lines),
        *not_complete(missing, splits),
    ])  # fmt: skip
    write_both(folder, text, rows)
    return text


def _values(results: Results, key: str, seed: int, splits: int) -> NDArray[np.float64]:
    return np.array([training_figures_of(results[key, seed, k]["test"]) for k in range(splits)])


def _described(columns: Sequence[str], found: NDArray[np.float64], base: NDArray[np.float64] | None) -> dict[str, Any]:
    row: dict[str, Any] = {"models": len(found)}
    for column, name in enumerate(columns):
        row |= {name: float(found[:, column].mean()), f"{name}, SD": _deviation(found[:, column])}
        if base is not None:
            gain = found[:, column] - base[:, column]
            half = student.ppf(0.975, max(len(gain) - 1, 1)) * _deviation(gain) / np.sqrt(len(gain))
            shifts = zip(_ENDS, (0.0, -half, half), strict=True)
            row |= {f"{name}, difference{end}": float(gain.mean() + shift) for end, shift in shifts}
    return row


def _deviation(values: NDArray[np.float64]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
