"""Files of scores and labels, made up, for the tests of evaluation and report."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

Rows = list[dict[str, Any]]
THRESHOLD = 0.4


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def labels(n: int = 60, positives: int = 12) -> Rows:
    """Every fifth study is positive; vendor A has few positives, C none, site splits the rest."""
    every = n // positives
    return [
        {
            "study": f"S{i:03d}", "patient": f"P{i:03d}", "label": int(i % every == 0), "side": "test",
            "vendor": "C" if i % every == 1 else "A" if i % 10 < 3 and i < 20 else "B", "age": 40 + i,
        }
        for i in range(n)
    ]  # fmt: skip


def scores(rows: Rows, seed: int, shift: float = 2.0, *, decided: bool = True) -> Rows:
    """As score.py writes them: positives ``shift`` higher, on logits rounded so that some tie."""
    rng = np.random.default_rng(seed)
    found = []
    for row in rows:
        logit = round(float(rng.normal(-1.5) + shift * row["label"]), 1)
        score = float(expit(logit))
        decision = {"threshold": THRESHOLD, "dce_needed": int(score >= THRESHOLD)} if decided else {}
        found.append(
            {"study": row["study"], "logit": logit, "score": score, "spread": 0.5} | decision | {"warnings": ""}
        )
    return found
