"""A chosen threshold as a record: what it is, what it rests on, how it decides, how it is written to JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mri_alm.errors import InputError


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold fixed before new patients are seen, and what is known of it.

    Attributes:
        threshold: Positive iff score >= threshold, of the kind the scores had; -inf means "examine everyone".
        rank: The threshold is the ``rank``-th smallest held-out positive score; 0 means "examine everyone".
        n_positive: Held-out positives.
        n_negative: Held-out negatives.
        false_negatives: Held-out positives below the threshold; fewer than ``rank - 1`` where scores tie.
        false_positive_rate: Share of held-out negatives at or above the threshold, in [0, 1].
        expected_miss_rate: Mean miss rate of new positives, rank / (n + 1); an upper bound where scores tie.
        miss_rate_upper_95: With 95 % confidence the miss rate of new positives is at most this; for a threshold that
            allows k misses it equals the Clopper-Pearson bound of k misses of n.
        rule: What was asked for, in words.
        basis: What the two rates rest on, in words that begin with "exact" or "approximate".
    """

    threshold: float
    rank: int
    n_positive: int
    n_negative: int
    false_negatives: int
    false_positive_rate: float
    expected_miss_rate: float
    miss_rate_upper_95: float
    rule: str
    basis: str

    def decide(self, score: ArrayLike) -> NDArray[np.bool_]:
        """Which samples are positive; the shape is that of ``score``.

        Raises:
            InputError: If a score is NaN, which would otherwise pass for a safe negative.
        """
        score = np.asarray(score, dtype=np.float64)
        if np.isnan(score).any():
            raise InputError(f"{int(np.isnan(score).sum())} of {score.size} scores are NaN: no decision can be made.")
        return np.asarray(score >= self.threshold)

    def in_words(self) -> str:
        """Three lines for a person: the threshold, what it rests on, what to expect of it."""
        threshold = f"{self.threshold:.4f}" if math.isfinite(self.threshold) else "none (examine everyone)"
        return (
            f"Threshold {threshold} on the score: {self.rule}; {self.n_positive} positives stand behind it.\n"
            f"  Basis: {self.basis}.\n"
            f"  Expected share of missed patients {100 * self.expected_miss_rate:.1f} %, with 95 % confidence at most "
            f"{100 * self.miss_rate_upper_95:.1f} %."
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as a dictionary that strict JSON can hold: "examine everyone" is a null threshold."""
        return asdict(self) | {"threshold": self.threshold if math.isfinite(self.threshold) else None}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "OperatingPoint":
        """The inverse of :meth:`to_json`.

        Raises:
            InputError: If a field is missing or unknown.
        """
        names = cls.__dataclass_fields__.keys()
        if fields.keys() != names:
            raise InputError(f"An operating point has the fields {', '.join(names)}; found {', '.join(fields)}.")
        return cls(**fields | {"threshold": -math.inf if fields["threshold"] is None else fields["threshold"]})


def majority_vote(points: Sequence[OperatingPoint], score: ArrayLike) -> NDArray[np.bool_]:
    """Decisions ``(B,)`` of several models, each at its own threshold; a drawn vote is positive, the cautious side.

    Args:
        points: One operating point per model.
        score: ``(B, M)``, column m being model m's scores.

    Raises:
        InputError: If there is not one column per point, or a score is NaN.
    """
    score = np.asarray(score, dtype=np.float64)
    if score.ndim != 2 or score.shape[1] != len(points):
        raise InputError(f"score must have one column per operating point ({len(points)}), found shape {score.shape}.")
    votes = sum(point.decide(column).astype(np.int64) for point, column in zip(points, score.T, strict=True))
    return np.asarray(2 * votes >= len(points))
