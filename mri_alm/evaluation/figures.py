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
from mri_alm.evaluation.performance import Performance, Roc, proportion
from mri_alm.metrics.calibration import calibration_curve, decision_curve
from mri_alm.metrics.ranking import Floats

Plot = dict[str, Any]

_GREY, _INK, _PAPER, _GRID = "#767676", "#222222", "#FFFFFF", "#E3E3E3"
_NEGATIVE, _POSITIVE = "#0072B2", "#D55E00"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", _INK)
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_PANELS = {
    "val_auc": "Validation AUC",
    "base_loss": "Base loss",
    "gradient_ratio": "ALM gradient / base gradient",
    "satisfied": "Constraints satisfied (share)",
    "lambda_max": "Largest multiplier",
    "mu": "Penalty mu",
}


def roc_figure(performances: Mapping[str, Performance], *, enlarged: bool) -> Plot:
    """ROC of every model with the bootstrap band of its FPR; enlarged, the part where few positives are missed."""
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
        hovertemplate="%{text}, score %{x:.4f}<extra></extra>",
    )  # fmt: skip
    line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "x0": 0, "x1": 0, "visible": False}
    figure.update_layout(
        shapes=[
            line | {"line": {"color": _INK, "width": 2}},
            line | {"line": {"color": _GREY, "width": 2, "dash": "dash"}},
        ],
        yaxis={"domain": [0, 0.22], "visible": False, "range": [-1, 3]},
        yaxis2={"domain": [0.28, 1], "title": "Exams", "anchor": "x"},
    )  # fmt: skip
    if model.threshold is not None and np.isfinite(model.threshold):
        figure.layout.shapes[1].update(x0=model.threshold, x1=model.threshold, visible=True)
    return _finished(figure, "Score", "", line=0)


def calibration_figure(label: ArrayLike, models: Sequence[ModelScores]) -> Plot:
    """Share of positives against mean score in ten bins, with exact binomial intervals."""
    figure = go.Figure()
    for i, model in enumerate(models):
        curve = calibration_curve(label, model.score)
        shares = [proportion(round(r * n), int(n)) for r, n in zip(curve.positive_rate, curve.count, strict=True)]
        figure.add_scatter(
            x=curve.mean_probability.tolist(), y=curve.positive_rate.tolist(), name=html.escape(model.name),
            mode="lines+markers", text=[f"{n} exams" for n in curve.count],
            line=_line(i, 2),
            error_y={
                "array": [s.high - s.value for s in shares],
                "arrayminus": [s.value - s.low for s in shares],
                "thickness": 1,
            },
            hovertemplate="mean score %{x:.3f}, share %{y:.3f}, %{text}<extra></extra>",
        )  # fmt: skip
    _add_diagonal(figure, name="perfect")
    figure.update_yaxes(range=[-0.02, 1.02])
    return _finished(figure, "Mean score", "Share that needs DCE")


def decision_figure(label: ArrayLike, models: Sequence[ModelScores]) -> Plot:
    """Net benefit per 100 patients at threshold probabilities up to one half."""
    grid = np.linspace(0.005, 0.5, 100)
    figure, everyone = go.Figure(), grid
    for i, model in enumerate(models):
        curve = decision_curve(label, model.score, grid)
        everyone = curve.everyone
        figure.add_scatter(
            x=grid.tolist(), y=(100 * curve.model).tolist(), name=html.escape(model.name), mode="lines",
            line=_line(i, 2.5),
        )  # fmt: skip
    for name, values, dash in (("examine everyone", 100 * everyone, "dot"), ("examine nobody", 0 * grid, "solid")):
        line = {"color": _GREY, "dash": dash, "width": 1.5}
        figure.add_scatter(x=grid.tolist(), y=values.tolist(), name=name, mode="lines", line=line)
    top = 100 * float(np.mean(np.asarray(label)))
    figure.update_yaxes(range=[-0.25 * top, 1.1 * top])
    return _finished(figure, "Threshold probability", "Net benefit per 100 patients")


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


def _add_diagonal(figure: go.Figure, **legend: Any) -> None:
    line = {"color": _GREY, "dash": "dot", "width": 1}
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line=line, hoverinfo="skip", **legend)


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
