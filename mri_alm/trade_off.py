"""What each number of allowed false negatives gives: injections spared, and misses to expect among new patients."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mri_alm.evaluation import Estimate, share
from mri_alm.metrics import check_binary
from mri_alm.statistics import bootstrap_interval
from mri_alm.threshold import clopper_pearson_upper, fixed_fn_threshold, future_false_negatives_cdf

MOST_ALLOWED = 100  # nobody ships a threshold that misses more; keeps the page small


@dataclass(frozen=True)
class Step:
    """One setting of the slider.

    Attributes:
        allowed: False negatives allowed where the threshold is set; None is "examine everyone".
        threshold: Positive iff score >= threshold; -inf is "examine everyone".
        missed: ``(B,)`` evaluated positives below it.
        false_positives: Evaluated negatives at or above it.
        spared: Share of evaluated studies below it, with interval.
        expected_miss_rate: Mean miss rate of new positives.
        miss_rate_upper: Its 95 % bound (Clopper and Pearson).
        new_positives: Positives among 100 new patients, as many as here.
        expected_misses: Mean number of misses among them.
        misses_upper: With 95 % probability no more are missed among them (beta-binomial law).
    """

    allowed: int | None
    threshold: float
    missed: NDArray[np.bool_]
    false_positives: int
    spared: Estimate
    expected_miss_rate: float
    miss_rate_upper: float
    new_positives: int
    expected_misses: float
    misses_upper: int


def trade_off(
    label: ArrayLike,
    score: ArrayLike,
    set_on: tuple[ArrayLike, ArrayLike] | None = None,
    *,
    draws: int = 2000,
    seed: int = 0,
) -> Iterator[Step]:
    """The steps from "examine everyone" over 0 to all but one (at most 100) false negatives.

    Args:
        label: ``(B,)`` in {0, 1}, the evaluated studies.
        score: ``(B,)``, theirs.
        set_on: Label and score of the studies the threshold is set on, of the same kind; None: on the evaluated ones,
            which describes them and promises nothing for the number one picks after looking.
        draws: Bootstrap resamples for the interval of what is spared, where the threshold is set on the evaluated
            studies; elsewhere the interval is Clopper and Pearson's.
        seed: Of the draws.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`.
    """
    positive, score = check_binary(label, score)
    on_label, on_score = check_binary(*set_on) if set_on else (positive, score)
    n = int(on_label.sum())
    new = max(1, round(100 * float(positive.mean())))
    redrawn = None if set_on else bootstrap_interval(_shares_spared, positive, score, draws=draws, seed=seed)
    for rank in range(min(n, MOST_ALLOWED + 1) + 1):
        threshold = fixed_fn_threshold(on_label, on_score, rank - 1).threshold if rank else -math.inf
        below = score < threshold
        spared = share(int(below.sum()), below.size)
        if redrawn is not None and rank:
            spared = Estimate(spared.value, *map(float, redrawn[:, rank - 1]))
        yield Step(
            allowed=rank - 1 if rank else None,
            threshold=threshold,
            missed=positive & below,
            false_positives=int((~positive & ~below).sum()),
            spared=spared,
            expected_miss_rate=rank / (n + 1),
            miss_rate_upper=clopper_pearson_upper(rank - 1, n, 0.05) if rank else 0.0,
            new_positives=new,
            expected_misses=new * rank / (n + 1),
            misses_upper=next(x for x in range(new + 1) if future_false_negatives_cdf(x, n, rank, new) >= 0.95),
        )


def _shares_spared(label: NDArray[np.generic], score: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of studies below the threshold of 0, 1, ... false negatives allowed among these very studies."""
    thresholds = np.sort(score[label == 1])[: MOST_ALLOWED + 1]
    return np.searchsorted(np.sort(score), thresholds) / score.size
