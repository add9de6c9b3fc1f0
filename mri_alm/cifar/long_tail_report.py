"""The long-tailed tables as Markdown and CSV: means over trainings beside the paper's numbers, and the null.

The paper prints single numbers here and no ensembles; ours are means over splits, with their standard deviation.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from mri_alm.cifar.table import NULL_SEED, BenchmarkTable, Results, has_all_models
from mri_alm.errors import InputError
from mri_alm.metrics.ranking import class_accuracies, error_at_tpr
from mri_alm.runtime.files import write_bytes
from mri_alm.runtime.tables import write_csv

ONE_CRITICAL_COLUMNS = ("error @ 80 % TPR", "error @ 90 % TPR", "overall accuracy")
TWO_CRITICAL_COLUMNS = ("accuracy, rarest class", "accuracy, second rarest", "accuracy, other classes")


def logits_of(test: Mapping[str, Any]) -> NDArray[np.float64]:
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
    label, logits, critical = np.asarray(test["label"]), logits_of(test), list(test["critical"])
    whole = class_accuracies(label, logits.argmax(1), critical=critical)
    if len(critical) == 1:
        errors = [error_at_tpr(label, logits, tpr, critical=critical) for tpr in (0.8, 0.9)]
        return [100 * value for value in (*errors, whole.overall)]
    return [100 * value for value in (*(whole.critical[c] for c in sorted(critical, reverse=True)), whole.other)]


def to_rows(table: BenchmarkTable, results: Results, keys: Sequence[str], splits: int) -> list[dict[str, Any]]:
    """One row per complete method, and the null: means, deviations, the paper's, difference from the base loss.

    Args:
        table: Which.
        results: See :func:`mri_alm.cifar.table.read_results`.
        keys: Methods, in order.
        splits: Trainings per row.

    Raises:
        InputError: If the baseline is not complete.
    """
    values = {key: _values(results, key, 0, splits) for key in keys if has_all_models(results, key, 0, splits)}
    if table.baseline not in values:
        raise InputError(f"{table.name}: {table.baseline} does not have all {splits} models. Train it first.")
    columns = (
        ONE_CRITICAL_COLUMNS if len(results[table.baseline, 0, 0]["test"]["critical"]) == 1 else TWO_CRITICAL_COLUMNS
    )
    rows = []
    for key, found in values.items():
        method = table.method(key)
        base = values.get(method.loss if method.constrained else table.baseline)
        row = {"method": key, "name": method.name} | _described(columns, found, None if base is found else base)
        rows.append(row | {f"{name}, paper": printed for name, printed in zip(columns, method.printed, strict=False)})
    if has_all_models(results, table.baseline, NULL_SEED, splits):
        again = _values(results, table.baseline, NULL_SEED, splits)
        name = f"null: {table.baseline}, other seeds"
        rows.append({"method": "null", "name": name} | _described(columns, again, values[table.baseline]))
    return rows


def write_multiclass_report(rows: Sequence[dict[str, Any]], table: BenchmarkTable, folder: Path) -> str:
    """Write ``table.md`` and ``table.csv``; returns the Markdown."""
    columns = [
        name.removesuffix(", difference") for name in rows[0] if name in (*ONE_CRITICAL_COLUMNS, *TWO_CRITICAL_COLUMNS)
    ]
    head = ["method", *(cell for name in columns for cell in (name, "paper", "diff.", "against the base loss"))]
    lines, several = [head, ["---"] * len(head)], rows[0]["models"] > 1
    for row in rows:
        cells = [row["name"]]
        for name in columns:
            printed = row.get(f"{name}, paper")
            cells.append(f"{row[name]:.1f}" + (f" ± {row[f'{name}, SD']:.1f}" if several else ""))
            cells += ["-", "-"] if printed is None else [f"{printed:g}", f"{row[name] - printed:+.1f}"]
            gain = [row.get(f"{name}, difference{end}") for end in ("", " low", " high")]
            cell = "-" if gain[0] is None else f"{gain[0]:+.1f}"
            cells.append(f"{cell} [{gain[1]:+.1f}, {gain[2]:+.1f}]" if several and gain[0] is not None else cell)
        lines.append(cells)
    over, paired = "one training each", "difference; nothing says how much of it is chance, but the null row"
    if several:
        over, paired = (
            f"mean ± SD over {rows[0]['models']} trainings",
            "paired difference, 95 % by Student's t over splits",
        )
    text = f"# {table.name}, protocol `{table.protocol}`\n\nPercent; {over}. Paper: {table.source}. "
    text += f"Last column of each: {paired}.\n\n"
    text += "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
    write_bytes(folder / "table.md", text.encode())
    names = list(dict.fromkeys(name for row in rows for name in row))
    write_csv(folder / "table.csv", names, [dict.fromkeys(names, "") | row for row in rows])
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
            ends = {"": 0.0, " low": -half, " high": half}
            row |= {f"{name}, difference{end}": float(gain.mean() + shift) for end, shift in ends.items()}
    return row


def _deviation(values: NDArray[np.float64]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
