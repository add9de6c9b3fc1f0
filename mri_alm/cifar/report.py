"""A finished (or half finished) binary table as Markdown, CSV and figure: ours, the paper's, and what chance does."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from mri_alm.cifar.table import NULL_SEED, BenchmarkTable, Method, Results, complete_methods, has_all_models
from mri_alm.metrics.comparison import Summary, Trained, TrainingComparison, adjusted, compare_trainings, summarise
from mri_alm.runtime.files import write_bytes
from mri_alm.runtime.tables import write_csv

NULL = "null"
_NULLS = f"{NULL} "
_AGAINST = (
    "Constrained rows against the same loss alone, other losses against the baseline, each time ensembles of equally "
    "many models on the same splits, and of the seeds that both have (means over them). Brackets: 95 % over splits "
    "(delete-one jackknife) and test images (bootstrap), Student's t; of one split over images alone. p: that both "
    "methods have the same AUC, by the same deviation; Holm within constrained rows and within losses. A **null** row "
    "is a baseline's second seed against its first: what chance alone does. Single models are those of the first seed. "
    "Last column: splits at which a gain in mean AUC of the size seen would be found in 80 % of tries."
)
_ACTING = (
    "Norm of its gradient on the logits over that of the base loss, over epochs and splits; largest multiplier and mu "
    "of the last epoch, means over splits."
)


@dataclass(frozen=True)
class FprColumn:
    """One column of a binary table.

    Attributes:
        at: Where the FPR is read off, such as ``"98 % TPR"`` or ``"1 FN"``.
        key: Its name in the CSV file.
        tpr: The true-positive rate that it stands for, in (0, 1].
    """

    at: str
    key: str
    tpr: float

    @property
    def title(self) -> str:
        """Its head in the Markdown table."""
        return f"FPR @ {self.at.removesuffix(' TPR')}"


@dataclass(frozen=True)
class TableReport:
    """Everything a table says.

    Attributes:
        table: Which.
        columns: Where the FPRs are read off.
        positives: Test images of the critical class.
        splits: Models per ensemble, the same for all rows.
        methods: Rows that are complete.
        missing: Rows that were asked for and are not complete, with how many models they have.
        summaries: By method.
        comparisons: By method, against its base loss (a constrained one) or against the baseline (a loss); and
            under ``"null KEY"`` the second seed of each loss that others are compared with against its first.
        holm: Adjusted p-values by method; constrained ones and losses are two families.
        acting: By constrained method: how much the constraint did in training.
        made: When and where the models were trained, in words; empty if the result files do not say it.
    """

    table: BenchmarkTable
    columns: list[FprColumn]
    positives: int
    splits: int
    methods: list[Method]
    missing: dict[str, int]
    summaries: dict[str, Summary]
    comparisons: dict[str, TrainingComparison]
    holm: dict[str, float]
    acting: dict[str, dict[str, float]]
    made: str


def make_report(
    table: BenchmarkTable, results: Results, keys: Sequence[str], splits: int, *, draws: int = 1000
) -> TableReport:
    """Compute a table.

    Args:
        table: Which.
        results: See :func:`mri_alm.cifar.table.read_results`.
        keys: Methods, in order.
        splits: Models per ensemble: rows with fewer are left out.
        draws: Of each bootstrap.

    Raises:
        InputError: If the baseline itself is not complete.
    """
    methods, missing = complete_methods(table, results, keys, splits)
    label = np.array(results[table.baseline, 0, 0]["test"]["label"])
    columns = columns_of(table, int(label.sum()))
    tpr = [column.tpr for column in columns]
    trained = {method.key: _trained(results, method.key, splits) for method in methods}
    comparisons = {}
    for key, against in ((method.key, table.against(method)) for method in methods):
        if against != key and against in trained:
            comparisons[key] = compare_trainings(label, trained[key], trained[against], tpr, draws=draws)
    families = [[k for k in comparisons if table.method(k).constrained == side] for side in (True, False)]
    corrected: dict[str, float] = {}
    for family in filter(None, families):
        corrected |= adjusted({key: comparisons[key] for key in family})
    for key in table.baselines(keys):
        if key in trained and trained[key].score.shape[1] > NULL_SEED:
            again, first = (Trained(trained[key].score[:, seed : seed + 1]) for seed in (NULL_SEED, 0))
            comparisons[f"{NULL} {key}"] = compare_trainings(label, again, first, tpr, draws=draws)
    return TableReport(
        table=table,
        columns=columns,
        positives=int(label.sum()),
        splits=splits,
        methods=methods,
        missing=missing,
        summaries={key: summarise(label, scores, tpr, draws=draws) for key, scores in trained.items()},
        comparisons=comparisons,
        holm=corrected,
        acting={m.key: _acting(results, m.key, splits) for m in methods if m.constrained},
        made=_made(content for (key, _, _), content in results.items() if key in trained),
    )


def columns_of(table: BenchmarkTable, positives: int) -> list[FprColumn]:
    """The columns of a binary table.

    Args:
        table: Which.
        positives: Test images of the critical class, of which a column may count misses.
    """
    return [
        *(FprColumn(f"{100 * rate:g} % TPR", f"fpr_at_{100 * rate:g}", rate) for rate in table.tpr),
        *(FprColumn(f"{k} FN", f"fpr_at_{k}_fn", (positives - k) / positives) for k in table.false_negatives),
    ]


def write_table_report(report: TableReport, folder: Path) -> str:
    """Write ``table.md``, ``table.csv`` and ``figure.png``; returns the Markdown."""
    text = to_markdown(report)
    write_both(folder, text, [_flat(report, method) for method in report.methods])
    _draw(report, folder / "figure.png")
    return text


def to_markdown(report: TableReport) -> str:
    """The table, the comparisons with the null, and what the constraint did."""
    rates = [column.title for column in report.columns]
    beside = [["paper", "diff."], ["paper"]] if _printed(report) else [[], []]
    head = ["method"]
    for name in [*rates, "ensemble AUC"]:
        head += [name, *beside[0]]
    head += ["mean AUC", *beside[1]]
    text = [
        f"# {report.table.name}, protocol `{report.table.protocol}`",
        _about(report),
        markdown_table(head, (_row(report, method) for method in report.methods)),
        *_published(report.table),
        "## Against the baseline",
        _AGAINST,
    ]
    head = ["method", "AUC", *rates, "p", "p (Holm)", "mean AUC of single models", "splits to settle"]
    text.append(markdown_table(head, (_compared(report, key) for key in report.comparisons)))
    if report.acting:
        head = ["method", *next(iter(report.acting.values()))]
        rows = ([report.table.method(k).name, *map(_two_digits, a.values())] for k, a in report.acting.items())
        text += ["## What the constraint did", _ACTING, markdown_table(head, rows)]
    return page_of([*text, *not_complete(report.missing, report.splits), "## How it was made", _command(report)])


def _printed(report: TableReport) -> bool:
    return any(method.printed for method in report.methods)


def _about(report: TableReport) -> str:
    table = report.table
    text = f"{_models(report.splits)}, all numbers in percent; ours with 95 % intervals over test images."
    if _printed(report):
        text += f" Paper: {table.source}, ensembles of ten at full width."
    if table.false_negatives:
        text += (
            f" FPR at so many false negatives of the {report.positives} test positives: the thresholds are set on "
            "these positives themselves, as in the paper's Table 3."
        )
    if table.settings.get("own_splits") is False:
        text += " All models have the official training part; a split is one training, and differs by its seed alone."
    return text


def _published(table: BenchmarkTable) -> list[str]:
    if not table.published:
        return []
    return [
        "## Published",
        f"AUC of single models on the same test images. {table.source}.",
        markdown_table(["method", "AUC"], table.published.items()),
    ]


def _made(results: Iterable[Mapping[str, Any]]) -> str:
    made = [(result["made"], result["seconds"]) for result in results if "made" in result]
    if not made:
        return ""
    dates = sorted({one["date"] for one, _ in made})
    places = sorted({f"{one['machine']}, torch {one['torch']}" for one, _ in made})
    seconds = float(np.median([second for _, second in made]))
    return f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {'; '.join(places)}; {seconds:.0f} s a training."


def _command(report: TableReport) -> str:
    table = report.table
    tuned = " --tuned configs/tuned.json" if table.protocol.endswith("_tuned") else ""
    words = f"--table {table.name} --protocol {table.protocol.removesuffix('_tuned')}{tuned} --splits {report.splits}"
    methods = " ".join(method.key for method in report.methods)
    return f"`python pipelines/benchmark.py {words} --methods {methods}` {report.made}".rstrip()


def _trained(results: Results, key: str, splits: int) -> Trained:
    seeds = [seed for seed in range(1000) if has_all_models(results, key, seed, splits)]
    return Trained(np.array([[results[key, seed, k]["test"]["score"] for seed in seeds] for k in range(splits)]))


def _acting(results: Results, key: str, splits: int) -> dict[str, float]:
    runs = [results[key, 0, k]["epochs"] for k in range(splits)]
    ratios = [epoch["gradient_ratio"] for run in runs for epoch in run if epoch["mu"] > 0]
    low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9]) if ratios else (0.0, 0.0, 0.0)
    last = {name: float(np.mean([run[-1][name] for run in runs])) for name in ("lambda_max", "mu")}
    return {"gradient ratio 10 %": float(low), "median": float(middle), "90 %": float(high)} | last


def _percent(*estimate: float, sign: str = "") -> str:
    return bracketed(*(100 * value for value in estimate), sign=sign)


def _two_digits(value: float) -> str:
    return np.format_float_positional(value, 2, fractional=False, trim="-")


def _models(splits: int) -> str:
    return "Single models" if splits == 1 else f"Ensembles of {splits} models"


def _row(report: TableReport, method: Method) -> list[str]:
    summary = report.summaries[method.key]
    ours = summary.ensemble
    order = [*range(1, len(ours.value)), 0]  # the paper prints the AUC last
    cells = [method.name]
    for position, which in enumerate(order):
        cells.append(_percent(*ours.of(which)))
        if _printed(report):
            cells += beside_paper(100 * ours.value[which], method.printed[position] if method.printed else None)
    cells.append(with_deviation(100 * summary.average, 100 * summary.deviation, report.splits))
    mean = method.printed[len(order) :]
    if _printed(report):
        cells.append(f"{mean[0]:g} ± {mean[1]:g}" if mean else "-")
    return cells


def _compared(report: TableReport, key: str) -> list[str]:
    found = report.comparisons[key]
    null = key.startswith(_NULLS)
    name = f"**null**: {key.removeprefix(_NULLS)}, other seeds" if null else report.table.method(key).name
    differences = [_percent(*found.difference.of(which), sign="+") for which in range(len(found.against))]
    settle = found.splits_to_settle
    return [
        name, *differences, _p(found.p_value), _p(report.holm.get(key, float("nan"))),
        with_deviation(100 * found.gain, 100 * found.gain_deviation, report.splits, sign="+"),
        "-" if null or not np.isfinite(settle) else f"{settle:.0f}" if settle <= 1000 else "> 1000",
    ]  # fmt: skip


def _p(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.2g}"


def _flat(report: TableReport, method: Method) -> dict[str, Any]:
    summary = report.summaries[method.key]
    names = ["auc", *(column.key for column in report.columns)]
    row: dict[str, Any] = {"method": method.key, "name": method.name, "models": summary.members,
                           "mean_auc": summary.average, "sd_auc": summary.deviation}  # fmt: skip
    ends = ("", "_low", "_high")
    found = report.comparisons.get(method.key)
    for i, name in enumerate(names):
        row |= {f"{name}{end}": value for end, value in zip(ends, summary.ensemble.of(i), strict=True)}
        if method.printed:
            row[f"{name}_paper"] = method.printed[i - 1 if i else len(names) - 1] / 100
        if found:
            row |= {f"{name}_difference{end}": v for end, v in zip(ends, found.difference.of(i), strict=True)}
    if found:
        p_values = {"p": found.p_value, "holm_p": report.holm[method.key]}
        row |= {name: "" if np.isnan(value) else value for name, value in p_values.items()}
    return row


def _draw(report: TableReport, path: Path) -> None:
    """FPR at high TPR: each base loss alone against the same loss with the constraint, a point per method; the null."""
    columns = report.columns
    drawn = [m for m in report.methods if m.constrained and m.key in report.comparisons]
    pairs = [(m.name, report.comparisons[m.key]) for m in drawn]
    nulls = [key for key in report.comparisons if key.startswith(_NULLS)]
    pairs += [(f"null: {k.removeprefix(_NULLS)}, other seeds", report.comparisons[k]) for k in nulls]
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(4 * len(columns) + 2.5, 4.4), layout="constrained")
        panels = np.atleast_1d(figure.subplots(1, len(columns)))
        for which, (column, axes) in enumerate(zip(columns, panels, strict=True), 1):
            axes.plot([0, 100], [0, 100], color="0.7", linewidth=1)
            for i, (name, compared) in enumerate(pairs):
                x = 100 * compared.against[which]
                y, low, high = (100 * part for part in compared.difference.of(which))
                beyond = [[max(y - low, 0)], [max(high - y, 0)]]
                style = {"color": "black", "marker": "x"} if name.startswith(NULL) else {"color": f"C{i % 10}"}
                style = {"marker": "os^vD"[i // 10 % 5]} | style
                axes.errorbar(x, x + y, beyond, label=name, markersize=5, elinewidth=0.6, linestyle="", **style)
            axes.set(xlabel="base loss alone", ylabel="with the constraint", title=f"FPR in % at {column.at}",
                     xlim=(0, 100), ylim=(0, 100), aspect="equal")  # fmt: skip
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
        figure.suptitle(
            f"{report.table.name}, {report.table.protocol}, {_models(report.splits).lower()}: below the line the "
            "constraint helps; bars: 95 % over splits and images"
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=100, metadata={"Software": None})
    write_bytes(path, buffer.getvalue())


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def page_of(paragraphs: Iterable[str]) -> str:
    """Paragraphs, headings and tables to a page."""
    return "\n\n".join(paragraphs) + "\n"


def write_both(folder: Path, text: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write ``table.md``, and ``table.csv`` of rows that may lack columns of others."""
    write_bytes(folder / "table.md", text.encode())
    columns = list(dict.fromkeys(name for row in rows for name in row))
    write_csv(folder / "table.csv", columns, [dict.fromkeys(columns, "") | row for row in rows])


def bracketed(value: float, low: float, high: float, *, sign: str = "") -> str:
    """A number with its interval."""
    return f"{value:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def with_deviation(mean: float, deviation: float, models: int, *, sign: str = "") -> str:
    """A mean with its standard deviation, which one model does not have."""
    return f"{mean:{sign}.1f}" + (f" ± {deviation:.1f}" if models > 1 else "")


def beside_paper(value: float, printed: float | None) -> list[str]:
    """The paper's number and the difference from it."""
    return ["-", "-"] if printed is None else [f"{printed:g}", f"{value - printed:+.1f}"]


def not_complete(missing: Mapping[str, int], splits: int) -> list[str]:
    """A sentence on the methods that lack models, where there are any."""
    rows = ", ".join(f"{key} {count} of {splits}" for key, count in missing.items())
    return [f"Not complete: {rows}."] if missing else []
