"""Models beside a reader: a column of the label table such as PI-RADS, at the reader's sensitivity and specificity.

The models' thresholds are taken from these very labels: a comparison of rankings, no operating point.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mri_alm.errors import InputError
from mri_alm.evaluation.data import LabelledScores
from mri_alm.evaluation.performance import Estimate, decision_counts, proportion
from mri_alm.metrics.ranking import Floats, auc
from mri_alm.metrics.uncertainty import bootstrap_interval
from mri_alm.runtime.tables import column_name

_MOST_CUTS = 9  # of a column that grades; one with more values is a measurement


@dataclass(frozen=True)
class ReaderComparison:
    """One model and the reader at one cut of the column, on the exams that have a value there.

    Attributes:
        column: Of the label table.
        cut: The reader calls an exam positive iff the value is at least this.
        model: Name.
        positives: Exams compared that need DCE.
        negatives: Exams compared that do not.
        figures: ``reader_sensitivity`` and ``reader_specificity`` with Clopper and Pearson's interval;
            ``model_specificity`` at a sensitivity no lower than the reader's, ``model_sensitivity`` at a specificity no
            lower than the reader's, and what they differ by, model - reader (``specificity_difference``,
            ``sensitivity_difference``), with paired stratified bootstrap intervals. All are shares.
    """

    column: str
    cut: float
    model: str
    positives: int
    negatives: int
    figures: dict[str, Estimate]


def compare_with_reader(
    data: LabelledScores, column: str, *, draws: int = 2000, seed: int = 0
) -> list[ReaderComparison]:
    """Every model at every cut of a reader's column; exams without a value are left out.

    Args:
        data: The evaluated exams.
        column: Of the label table: numbers, higher is more suspicious; 0 and 1, or grades such as PI-RADS.
        draws: Bootstrap resamples.
        seed: Of the draws.

    Raises:
        InputError: If there is no such column, a value is no number, there are too few or too many different ones, or
            the exams with a value lack one of the classes.
    """
    column = column_name(column)
    value = _values(data, column)
    read = ~np.isnan(value)
    label, value = data.label[read], value[read]
    cuts = np.unique(value)[1:]
    if not 1 <= cuts.size <= _MOST_CUTS or len(set(label.tolist())) < 2:
        raise InputError(
            f'Column "{column}" of the label table cannot be compared with: its {read.sum()} exams with a value have '
            f"{cuts.size + bool(read.any())} different ones and {label.sum()} need DCE. Give a column of 2 to "
            f"{_MOST_CUTS + 1} grades, such as PI-RADS, filled for exams of both classes."
        )
    found = []
    for model in data.models:
        both = np.column_stack([model.score[read], value])
        values = _at_cuts(label, both, cuts)
        ends = bootstrap_interval(lambda y, s: _at_cuts(y, s, cuts), label, both, draws=draws, seed=seed)
        for cut, at, low, high in zip(cuts.tolist(), values, *ends, strict=True):
            figures = {name: Estimate(*map(float, three)) for name, *three in zip(_NAMES, at, low, high, strict=True)}
            found.append(_compared(column, cut, model.name, label, value, figures))
    return found


_NAMES = ("model_specificity", "model_sensitivity", "specificity_difference", "sensitivity_difference")


def _compared(
    column: str, cut: float, model: str, label: NDArray[np.int64], value: Floats, figures: dict[str, Estimate]
) -> ReaderComparison:
    counts, n = decision_counts(label, value >= cut), int(label.sum())
    negatives = label.size - n
    own = {
        "reader_sensitivity": proportion(n - counts.false_negatives, n),
        "reader_specificity": proportion(negatives - counts.false_positives, negatives),
    }
    return ReaderComparison(column, cut, model, n, negatives, own | figures)


def _at_cuts(label: ArrayLike, both: Floats, cuts: Floats) -> Floats:
    """``(cuts, 4)``, see ``_NAMES``, of columns score and value ``(B, 2)``."""
    positive = np.asarray(label) == 1
    (score, value), (other, theirs) = both[positive].T, both[~positive].T
    score, other = np.sort(score), np.sort(other)
    called = (value[:, None] >= cuts).sum(axis=0)  # positives that the reader finds
    spared = (theirs[:, None] < cuts).sum(axis=0)  # negatives that the reader spares
    # As many positives at or above the threshold; none called needs no threshold at all.
    threshold = np.append(score, np.inf)[score.size - called]
    specificity = np.searchsorted(other, threshold) / other.size
    # The threshold lies just above so many negatives.
    highest = np.insert(other, 0, -np.inf)[spared]
    sensitivity = 1 - np.searchsorted(score, highest, side="right") / score.size
    return np.column_stack([
        specificity, sensitivity, specificity - spared / other.size, sensitivity - called / score.size
    ])  # fmt: skip


def _values(data: LabelledScores, column: str) -> Floats:
    """``(N,)``, NaN where a cell is empty."""
    if column not in data.columns:
        raise InputError(f'The label table has no column "{column}" of a reader. It has: {", ".join(data.columns)}.')
    found = []
    for study, text in zip(data.studies, data.columns[column], strict=True):
        try:
            value = float(text or "nan")
        except ValueError:
            value = np.inf
        if np.isinf(value) or (text and np.isnan(value)):
            raise InputError(
                f'The label table: study {study} has {column} "{text}". Write a number that grows with suspicion, such '
                "as 4 for PI-RADS 4, or leave the cell empty where nobody read the exam."
            )
        found.append(value)
    return np.array(found)


def reader_warnings(data: LabelledScores, readers: list[ReaderComparison]) -> list[str]:
    """What must be known before a comparison is read."""
    if not readers:
        return []
    column = readers[0].column
    value = _values(data, column)
    read = ~np.isnan(value)
    found = []
    if missing := int((~read).sum()):
        found.append(f"Compared with {column}: {missing} of {read.size} exams have no value there and are left out.")
    if auc(data.label[read], value[read]) < 0.5:
        found.append(
            f"Column {column} is lower in exams that need DCE: it must grow with suspicion. Is it the reverse?"
        )
    return found
