"""The report's figures, as Plotly draws them: data and layout, ready for JSON.

Colours are Okabe and Ito's, told apart by every common kind of colour vision; marks and dashes differ too. The page
takes other ones for some of them where the browser asks for a dark page: ``templates/report.js``. Texts are escaped,
since Plotly reads a few HTML tags in them.
"""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike

from mri_alm.evaluation.data import LabelledScores, ModelScores
from mri_alm.evaluation.performance import Performance, Roc, Subgroup, proportion
from mri_alm.evaluation.reader import ReaderComparison
from mri_alm.metrics.calibration import calibration_curve, decision_curve, smooth_calibration
from mri_alm.metrics.ranking import Floats

Plot = dict[str, Any]

_GREY, _INK, _PAPER, _GRID = "#767676", "#222222", "#FFFFFF", "#E3E3E3"
_NEGATIVE, _POSITIVE = "#0072B2", "#D55E00"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", _INK)
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross")
_PANELS = {
    "val_auc": "Validation AUC",
    "base_loss": "Base loss",
    "gradient_ratio": "ALM gradient / base gradient",
    "satisfied": "Constraints satisfied (share)",
    "lambda_max": "Largest multiplier",
    "mu": "Penalty mu",
}


def roc_figure(
    performances: Mapping[str, Performance], readers: Sequence[ReaderComparison] = (), *, enlarged: bool
) -> Plot:
    """ROC of every model with the bootstrap band of its FPR, and a reader's cuts; enlarged, where few are missed."""
    figure = go.Figure()
    n = next(iter(performances.values())).positives
    for i, (name, performance) in enumerate(performances.items()):
        roc, colour = performance.roc, _COLOURS[i % len(_COLOURS)]
        band = [*_stairs(roc, roc.low, n), *reversed(_stairs(roc, roc.high, n))]
        figure.add_scatter(
            x=[x for x, _ in band], y=[y for _, y in band], fill="toself", fillcolor=colour, opacity=0.15,
            line={"width": 0}, hoverinfo="skip", showlegend=False,
        )  # fmt: skip
        points = _stairs(roc, roc.fpr, n)
        figure.add_scatter(
            x=[x for x, _ in points], y=[y for _, y in points], mode="lines", name=html.escape(name),
            line=_line(i, 2.5),
            hovertemplate="FPR %{x:.3f}, TPR %{y:.3f}<extra></extra>",
        )  # fmt: skip
    if cuts := {reader.cut: reader.figures for reader in readers}:
        figure.add_scatter(
            x=[1 - read["reader_specificity"].value for read in cuts.values()],
            y=[read["reader_sensitivity"].value for read in cuts.values()],
            mode="markers", name=html.escape(readers[0].column), text=[f"from {cut:g}" for cut in cuts],
            marker={"symbol": "x", "size": 9, "color": _GREY},
            hovertemplate="%{text}: FPR %{x:.3f}, TPR %{y:.3f}<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=[1], y=[1], mode="markers", name="slider", hoverinfo="skip",
        marker={"symbol": "diamond", "size": 13, "color": _INK, "line": {"color": _PAPER, "width": 2}},
    )  # fmt: skip
    if enlarged:
        most = min(n - 1, max(5, n // 10)) if n > 1 else 1
        ticks = sorted({round(k) for k in np.linspace(0, most, min(most, 6) + 1)})
        figure.update_yaxes(range=[1 - (most + 0.5) / n, 1 + 0.4 / n * max(1, most / 6)])
        figure.update_yaxes(tickvals=[1 - k / n for k in ticks], ticktext=[f"{k} of {n}" for k in ticks])
        return _finished(figure, "False-positive rate", "Positives missed", marker=len(figure.data) - 1)
    _add_diagonal(figure, showlegend=False)
    figure.update_yaxes(range=[-0.02, 1.03])
    return _finished(figure, "False-positive rate", "True-positive rate", marker=len(figure.data) - 2)


def score_figure(data: LabelledScores, model: ModelScores) -> Plot:
    """Negatives as a histogram, every positive as a mark of its own; lines at the slider's and the file's threshold."""
    score, positive = model.score, data.label == 1
    names = [html.escape(name) for name, needs in zip(data.studies, positive, strict=True) if needs]
    figure = go.Figure()
    figure.add_histogram(
        x=score[~positive].tolist(), nbinsx=40, name="DCE not needed", yaxis="y2",
        marker={"color": _NEGATIVE, "line": {"color": _PAPER, "width": 1}}, hovertemplate="%{x}: %{y}<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=score[positive].tolist(), y=[i % 3 for i in range(len(names))], mode="markers", name="DCE needed", text=names,
        marker={"color": _POSITIVE, "symbol": "triangle-up", "size": 11, "line": {"color": _PAPER, "width": 1}},
        hovertemplate="%{text}, score %{x:.6g}<extra></extra>",
    )  # fmt: skip
    figure.update_layout(
        yaxis={"domain": [0, 0.22], "visible": False, "range": [-1, 3]},
        yaxis2={"domain": [0.28, 1], "title": "Exams", "anchor": "x"},
    )  # fmt: skip
    _add_thresholds(figure, model.threshold)
    return _finished(figure, "Score", "", line=0)


def calibration_figure(label: ArrayLike, models: Sequence[ModelScores]) -> Plot:
    """Share of positives by score: a smooth curve with its band, and ten bins, on the scores' own range."""
    figure, tops = go.Figure(), []
    for i, model in enumerate(models):
        curve, bins = smooth_calibration(label, model.score), calibration_curve(label, model.score)
        colour = _COLOURS[i % len(_COLOURS)]
        _add_band(figure, curve.probability, curve.low, curve.high, colour)
        figure.add_scatter(
            x=curve.probability.tolist(), y=curve.positive_rate.tolist(), name=html.escape(model.name), mode="lines",
            line=_line(i, 2.5), hovertemplate="score %{x:.3f}, share %{y:.3f}<extra></extra>",
        )  # fmt: skip
        shares = [proportion(round(r * n), int(n)) for r, n in zip(bins.positive_rate, bins.count, strict=True)]
        figure.add_scatter(
            x=bins.mean_probability.tolist(), y=bins.positive_rate.tolist(), mode="markers", showlegend=False,
            text=[f"{n} exams" for n in bins.count], marker={"color": colour, "size": 7},
            error_y={
                "array": [s.high - s.value for s in shares],
                "arrayminus": [s.value - s.low for s in shares],
                "thickness": 1, "width": 0, "color": colour,
            },
            hovertemplate="mean score %{x:.3f}, share %{y:.3f}, %{text}<extra></extra>",
        )  # fmt: skip
        tops += [curve.positive_rate.max(), bins.positive_rate.max()]
    _add_diagonal(figure, name="perfect")
    low, high = (float(end(end(model.score) for model in models)) for end in (min, max))
    edge = 0.04 * (high - low or 1)
    figure.update_xaxes(range=[low - edge, high + edge])
    figure.update_yaxes(range=[-0.03, min(1.03, 1.15 * max(high, *tops))])
    return _finished(figure, "Score", "Share that needs DCE")


def decision_figure(label: ArrayLike, models: Sequence[ModelScores]) -> Plot:
    """Net benefit per 100 patients with its 95 % interval, up to one half or beyond the first model's threshold."""
    chosen = models[0].threshold
    reach = max(0.5, min(0.99, 1.2 * chosen)) if chosen is not None else 0.5
    grid = np.linspace(0.005, reach, 100)
    figure, everyone = go.Figure(), grid
    for i, model in enumerate(models):
        curve = decision_curve(label, model.score, grid)
        everyone = curve.everyone
        _add_band(figure, grid, 100 * curve.low, 100 * curve.high, _COLOURS[i % len(_COLOURS)])
        figure.add_scatter(
            x=grid.tolist(), y=(100 * curve.model).tolist(), name=html.escape(model.name), mode="lines",
            line=_line(i, 2.5),
        )  # fmt: skip
    for name, values, dash in (("examine everyone", 100 * everyone, "dot"), ("examine nobody", 0 * grid, "solid")):
        line = {"color": _GREY, "dash": dash, "width": 1.5}
        figure.add_scatter(x=grid.tolist(), y=values.tolist(), name=name, mode="lines", line=line)
    top = 100 * float(np.mean(np.asarray(label)))
    figure.update_xaxes(range=[0, float(grid[-1])])
    figure.update_yaxes(range=[-0.25 * top, 1.3 * top])
    _add_thresholds(figure, chosen)
    return _finished(figure, "Threshold probability", "Net benefit per 100 patients", line=0)


def forest_figure(groups: Sequence[Subgroup], whole: Mapping[str, Performance], name: str) -> Plot:
    """One figure of merit in every subgroup and on all exams, with its 95 % interval; a row per group.

    Args:
        groups: Those whose model is in ``whole``; a group without the figure has an empty row.
        whole: Performance on all exams, by model.
        name: Of the figure of merit, a share, as in :class:`Performance`.
    """
    rows = list(dict.fromkeys(f"{group.column}: {group.value}" for group in groups))
    places = {row: number for number, row in enumerate(["all exams", *rows])}
    figure = go.Figure()
    for i, (model, performance) in enumerate(whole.items()):
        of_groups = {f"{g.column}: {g.value}": g.performance for g in groups if g.model == model}
        shown = [(row, p.figures[name]) for row, p in {"all exams": performance, **of_groups}.items()
                 if p and name in p.figures]  # fmt: skip
        aside = 0.5 * (i - (len(whole) - 1) / 2) / len(whole)
        colour, values = _COLOURS[i % len(_COLOURS)], [100 * estimate.value for _, estimate in shown]
        figure.add_scatter(
            x=values, y=[places[row] + aside for row, _ in shown], mode="markers", name=html.escape(model),
            marker={"color": colour, "size": 9, "symbol": _SYMBOLS[i % len(_SYMBOLS)]},
            error_x={
                "array": [100 * e.high - value for (_, e), value in zip(shown, values, strict=True)],
                "arrayminus": [value - 100 * e.low for (_, e), value in zip(shown, values, strict=True)],
                "thickness": 1.5, "width": 3, "color": colour,
            },
            text=[f"{100 * e.low:.1f} to {100 * e.high:.1f}" for _, e in shown],
            hovertemplate="%{x:.1f} (%{text}) %<extra></extra>",
        )  # fmt: skip
    figure.update_yaxes(
        tickvals=list(places.values()), ticktext=[html.escape(_short(row)) for row in places],
        range=[len(places) - 0.4, -0.6],
    )  # fmt: skip
    return _finished(figure, "%", "")


def learning_figure(trained_on: Mapping[str, tuple[int, int]], performances: Mapping[str, Performance]) -> Plot:
    """AUC with its 95 % interval by the number of training exams, a point for each model.

    Args:
        trained_on: Model to training exams and how many of them need contrast.
        performances: Of the same models.
    """
    names = sorted(trained_on, key=trained_on.__getitem__)
    aucs = [performances[name].figures["auc"] for name in names]
    figure = go.Figure()
    figure.add_scatter(
        x=[trained_on[name][0] for name in names], y=[100 * auc.value for auc in aucs], mode="lines+markers",
        line=_line(0, 2), marker={"size": 9}, showlegend=False,
        error_y={
            "array": [100 * (auc.high - auc.value) for auc in aucs],
            "arrayminus": [100 * (auc.value - auc.low) for auc in aucs],
            "thickness": 1.5, "width": 3, "color": _COLOURS[0],
        },
        text=[f"{html.escape(name)}: {trained_on[name][1]} of {trained_on[name][0]} need contrast" for name in names],
        hovertemplate="%{text}, AUC %{y:.1f} %<extra></extra>",
    )  # fmt: skip
    exams = dict(trained_on.values())
    figure.update_xaxes(tickvals=list(exams), ticktext=[f"{n} ({positives})" for n, positives in exams.items()])
    figure.update_xaxes(range=[0, 1.08 * max(exams)])
    return _finished(figure, "Training exams (of them need contrast)", "AUC, %")


def training_figures(history: Mapping[str, Sequence[Mapping[str, float]]], kept: Mapping[str, int]) -> dict[str, Plot]:
    """A figure per diagnostic that the run recorded, a line per split, a dot at the epoch that was kept."""
    figures = {}
    for key, title in _PANELS.items():
        if not all(key in epoch for epochs in history.values() for epoch in epochs):
            continue
        figure = go.Figure()
        for i, (name, epochs) in enumerate(history.items()):
            figure.add_scatter(
                x=[epoch["epoch"] for epoch in epochs],
                y=[epoch[key] for epoch in epochs],
                mode="lines+markers",
                marker={"size": [8 if epoch["epoch"] == kept[name] else 0 for epoch in epochs], "line": {"width": 0}},
                showlegend=False,
                name=html.escape(name),
                line=_line(i, 1.5),
            )
        figures[title] = _finished(figure, "Epoch", "")
    return figures


def _line(i: int, width: float) -> dict[str, Any]:
    """Colour and dash of the i-th model or split."""
    return {"color": _COLOURS[i % len(_COLOURS)], "dash": _DASHES[i % len(_DASHES)], "width": width}


def _short(text: str) -> str:
    """So that a long value leaves room for the figure."""
    return text if len(text) <= 24 else f"{text[:23]}…"


def _add_diagonal(figure: go.Figure, **legend: Any) -> None:
    line = {"color": _GREY, "dash": "dot", "width": 1}
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line=line, hoverinfo="skip", **legend)


def _add_band(figure: go.Figure, x: Floats, low: Floats, high: Floats, colour: str) -> None:
    figure.add_scatter(
        x=[*x.tolist(), *x[::-1].tolist()], y=[*low.tolist(), *high[::-1].tolist()], fill="toself", fillcolor=colour,
        opacity=0.15, line={"width": 0}, hoverinfo="skip", showlegend=False,
    )  # fmt: skip


def _add_thresholds(figure: go.Figure, chosen: float | None) -> None:
    """A line that the slider moves, and one at the threshold of the scores file."""
    line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "x0": 0, "x1": 0, "visible": False}
    at = {"x0": chosen, "x1": chosen, "visible": True} if chosen is not None and np.isfinite(chosen) else {}
    figure.update_layout(
        shapes=[
            line | {"line": {"color": _INK, "width": 2}},
            line | {"line": {"color": _GREY, "width": 2, "dash": "dash"}} | at,
        ]
    )


def _stairs(roc: Roc, fpr: Floats, n: int) -> list[tuple[float, float]]:
    """Corners of the ROC from (0, 0) to (1, 1): at each TPR the lowest FPR that reaches it."""
    corners, tpr_before = [(0.0, 0.0)], 0.0
    for k, x in zip(roc.allowed[::-1].tolist(), fpr[::-1].tolist(), strict=True):
        corners += [(x, tpr_before), (x, 1 - k / n)]
        tpr_before = 1 - k / n
    return [*corners, (1.0, 1.0)]


def _finished(figure: go.Figure, x: str, y: str, **moved: int) -> Plot:
    """Common looks, as plain JSON; ``moved`` is what the slider moves: ``marker``, a trace, or ``line``, a shape."""
    figure.update_layout(
        template="none", paper_bgcolor=_PAPER, plot_bgcolor=_PAPER,
        meta=moved, autosize=True, hovermode="closest",
        dragmode=False, barmode="overlay",
        margin={"l": 60, "r": 12, "t": 10, "b": 48},
        font={"family": "system-ui, sans-serif", "size": 13, "color": _INK},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0},
    )  # fmt: skip
    figure.update_xaxes(title={"text": x, "standoff": 6}, gridcolor=_GRID, zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor=_GRID, zeroline=False, automargin=True)
    if y:
        figure.update_layout(yaxis_title=y)
    return dict(json.loads(figure.to_json()))
