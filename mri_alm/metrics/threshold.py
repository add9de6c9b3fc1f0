"""The operating point to ship: a threshold that keeps false negatives low on patients not seen yet, and its record.

Let s_(1) <= ... <= s_(n) be the scores of ``n`` independent positives (one per patient) used neither in training nor in
model selection. "Positive" means ``score >= tau``. With tau = s_(r), at most r - 1 of them are missed, and the miss
rate of new patients follows Beta(r, n - r + 1), or less where scores tie. The ways to choose r differ in what they
promise, and are named for it. r = 0 has an honest outcome too: tau = -infinity, examine everyone.
The number used lies just below s_(r), so that no exam flips in another batch: :func:`mri_alm.metrics.midway_below`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta, binom, nbinom

from mri_alm.errors import InputError
from mri_alm.metrics.ranking import Floats, check_binary, midway_below
from mri_alm.runtime.files import Fields, shown


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold fixed before new patients are seen, and what is known of it.

    Attributes:
        threshold: Positive iff score >= threshold, of the kind the scores had; -inf means "examine everyone".
        rank: Of the held-out positive score that it lies just below (before 0.5.0: that it is); 0: "examine everyone".
        n_positive: Held-out positives; 0, and only then: nobody was held out, and there is no threshold.
        n_negative: Held-out negatives.
        false_negatives: Held-out positives below the threshold; fewer than ``rank - 1`` where scores tie.
        false_positive_rate: Share of held-out negatives at or above the threshold, in [0, 1].
            By the minmax rule more of the new ones are: these were scored by one member, not by the largest of all.
        expected_miss_rate: Mean miss rate of new positives, rank / (n + 1); an upper bound where scores tie. By the
            minmax rule :func:`minmax_bound`.
        miss_rate_upper_95: With 95 % confidence the miss rate of new positives is at most this; for a threshold that
            allows k misses it equals the Clopper-Pearson bound of k misses of n. None by the minmax rule, which has no
            confidence.
        rule: What was asked for, in words; ``"minmax"``.
        basis: What the two rates rest on, in words that begin with "exact" or "approximate".
        folds: By the minmax rule, of patients: as many members score an exam, and the largest score is compared; 0:
            the score of the members' mean logit is.
        runs_on_this_cohort: By the minmax rule, how many runs this user finished on the same patients; None: not
            counted. More than one weakens the promise: who chose among them did so by the scores that it rests on.
    """

    threshold: float
    rank: int
    n_positive: int
    n_negative: int
    false_negatives: int
    false_positive_rate: float
    expected_miss_rate: float
    miss_rate_upper_95: float | None
    rule: str
    basis: str
    folds: int = 0
    runs_on_this_cohort: int | None = None

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
        if not self.n_positive:
            return f"No threshold.\n  Basis: {self.basis}."
        threshold = f"{self.threshold:.6g}" if math.isfinite(self.threshold) else "none (examine everyone)"
        if self.miss_rate_upper_95 is None:
            return (
                f"Threshold {threshold} on the largest score of {self.folds} members: minmax, "
                f"{self.false_negatives} of {self.n_positive} held-out positives below it.\n"
                f"  Basis: {self.basis}.\n"
                f"  On average over such cohorts at most {100 * self.expected_miss_rate:.1f} % of new patients who "
                f"need DCE are missed; for this one cohort no bound is known.{self._weakened()}"
            )
        bound = miss_bound_in_words(self.rank - 1, self.n_positive) if self.rank else "nobody is missed"
        return (
            f"Threshold {threshold} on the score: {self.rule}; {self.n_positive} positives stand behind it.\n"
            f"  Basis: {self.basis}.\n"
            f"  Expected share of missed patients {100 * self.expected_miss_rate:.1f} %; {bound}."
        )

    def _weakened(self) -> str:
        runs = self.runs_on_this_cohort or 1
        text = f"{runs} runs were trained on these patients. If this one was chosen by held-out scores, the bound"
        return f"\n  WEAKENED: {text} does not hold for it." if runs > 1 else ""

    def to_json(self) -> dict[str, Any]:
        """The fields as a dictionary that strict JSON can hold: "examine everyone" is a null threshold.

        ``folds`` and ``runs_on_this_cohort`` are there by the minmax rule only: other files are as they always were.
        """
        fields = asdict(self) | {"threshold": self.threshold if math.isfinite(self.threshold) else None}
        return fields if self.folds else {name: value for name, value in fields.items() if name not in _OF_MINMAX}

    @classmethod
    def from_json(cls, given: Mapping[str, Any], place: str = "threshold.json") -> "OperatingPoint":
        """The inverse of :meth:`to_json` for a threshold on scores in [0, 1], as a run's file holds it.

        Args:
            given: Field to value.
            place: The file, for messages.

        Raises:
            InputError: If a field is missing, unknown, of another type, out of its range, or contradicts another one.
        """
        minmax, fields = given.get("rule") == MINMAX, Fields(place, given)
        optional = {"runs_on_this_cohort"} if minmax else set()  # version 0.4 did not have it
        names = [name for name in cls.__dataclass_fields__ if name not in _OF_MINMAX[minmax:]]
        if given.keys() - optional != {*names}:
            raise InputError(
                f"An operating point has the fields {', '.join(names)}; found {shown([*given])} in {place}. Restore "
                "the file from a copy."
            )
        n = fields.whole("n_positive")
        rank = fields.whole("rank", n)
        runs = None if given.get("runs_on_this_cohort") is None else fields.whole("runs_on_this_cohort")
        if (given["threshold"] is None) != (rank == 0):
            raise fields.refused("threshold", f"null exactly where rank is 0 (rank is {rank})")
        if minmax:
            _check_minmax(fields, n, rank)
        return cls(
            threshold=fields.number("threshold", 0, 1) if rank else -math.inf,
            rank=rank,
            n_positive=n,
            n_negative=fields.whole("n_negative"),
            false_negatives=fields.whole("false_negatives", max(rank - 1, 0)),
            false_positive_rate=fields.number("false_positive_rate", 0, 1),
            expected_miss_rate=fields.number("expected_miss_rate", 0, 1),
            miss_rate_upper_95=None if minmax else fields.number("miss_rate_upper_95", 0, 1),
            rule=fields.text("rule"),
            basis=fields.text("basis"),
            folds=fields.whole("folds") if minmax else 0,
            runs_on_this_cohort=runs,
        )


def _check_minmax(fields: Fields, n: int, rank: int) -> None:
    """Refuse a minmax point whose bound is not that of its folds."""
    folds = fields.whole("folds", n)
    if folds < 2:
        raise fields.refused("folds", f"a whole number from 2 to {n}")
    if fields.content["miss_rate_upper_95"] is not None:
        raise fields.refused("miss_rate_upper_95", f"null where rule is {MINMAX}")
    bound = minmax_bound(n, folds, rank)
    if not math.isclose(fields.number("expected_miss_rate", 0, 1), bound):
        raise fields.refused("expected_miss_rate", f"{bound:g}, the bound at rank {rank} of {n} in {folds} folds")


MINMAX = "minmax"  # the rule's name in a file
_OF_MINMAX = ("folds", "runs_on_this_cohort")
MOST_FOR_MINMAX = 60  # positives; with more, a cohort split in two promises more and spares as many

ScoreSource = Literal["calibration", "pooled"]

_BASIS: dict[str, str] = {
    "calibration": "exact: a separate calibration cohort, scored as new patients will be",
    "pooled": "approximate: held-out scores pooled over the splits, which are not an ensemble's scores of new patients",
}
_MINMAX_BASIS = (
    "exact on average over cohorts, without confidence for one: each patient was scored by the one member that did not "
    "see them, new exams by their largest member score; settings chosen by these scores break it, and so do patients "
    "of another kind (scanner, protocol, referral)"
)


def fixed_fn_threshold(
    label: ArrayLike, score: ArrayLike, max_fn: int, *, source: ScoreSource = "pooled"
) -> OperatingPoint:
    """The threshold that misses at most ``max_fn`` of the held-out positives: just below s_(max_fn + 1).

    It promises nothing for new patients by itself: read ``expected_miss_rate`` and ``miss_rate_upper_95``.

    Args:
        label: ``(B,)`` in {0, 1}, one sample per patient.
        score: ``(B,)``, of the kind that new patients will be scored in.
        max_fn: Allowed false negatives, 0 <= max_fn < number of positives.
        source: Where the scores come from: a separate ``"calibration"`` cohort (exact), or the held-out exams of all
            splits, ``"pooled"`` (approximate).

    Raises:
        InputError: If ``max_fn`` is out of range, the source unknown, or see :func:`mri_alm.metrics.check_binary`.
    """
    positive, score = check_binary(label, score)
    n = int(positive.sum())
    if not 0 <= max_fn < n:
        raise InputError(
            f"Cannot allow {max_fn} false negatives: the cohort has {n} positive patients, "
            f"so --max_fn must be between 0 and {n - 1}."
        )
    return _operating_point(positive, score, max_fn + 1, f"at most {max_fn} of {n} held-out positives missed", source)


def neyman_pearson_threshold(
    label: ArrayLike, score: ArrayLike, alpha: float, eps: float, *, source: ScoreSource = "pooled"
) -> OperatingPoint:
    """The highest threshold with P(miss rate > alpha) <= eps over the draw of the held-out positives.

    With too few positives (see :func:`minimum_positives`) the answer is "examine everyone".

    Args:
        label: ``(B,)`` in {0, 1}, one sample per patient.
        score: ``(B,)``, of the kind that new patients will be scored in.
        alpha: Largest acceptable miss rate, in (0, 1).
        eps: Acceptable chance that the miss rate is larger, in (0, 1).
        source: See :func:`fixed_fn_threshold`.

    Raises:
        InputError: If a rate is out of range, the source unknown, or see :func:`mri_alm.metrics.check_binary`.
    """
    positive, score = check_binary(label, score)
    rank = neyman_pearson_rank(int(positive.sum()), alpha, eps)
    return _operating_point(positive, score, rank, f"P(miss rate > {alpha:g}) <= {eps:g}", source)


def mean_miss_rate_threshold(
    label: ArrayLike, score: ArrayLike, alpha: float, *, source: ScoreSource = "pooled"
) -> OperatingPoint:
    """The highest threshold whose **mean** miss rate over such cohorts is at most alpha (conformal risk control).

    For one cohort the miss rate exceeds alpha almost every second time: :func:`neyman_pearson_threshold` bounds that.

    Args:
        label: ``(B,)`` in {0, 1}, one sample per patient.
        score: ``(B,)``, of the kind that new patients will be scored in.
        alpha: Largest acceptable mean miss rate, in (0, 1).
        source: See :func:`fixed_fn_threshold`.

    Raises:
        InputError: If ``alpha`` is out of range, the source unknown, or see :func:`mri_alm.metrics.check_binary`.
    """
    positive, score = check_binary(label, score)
    rank = conformal_rank(int(positive.sum()), alpha)
    return _operating_point(positive, score, rank, f"mean miss rate <= {alpha:g}, no bound for one cohort", source)


def minmax_threshold(label: ArrayLike, score: ArrayLike, max_fn: int, *, folds: int) -> OperatingPoint:
    """The threshold below s_(max_fn + 1) for the **largest** of all members' scores, and its bound on the mean.

    Args:
        label: ``(B,)`` in {0, 1}, one sample per patient.
        score: ``(B,)``, each by the one member that was trained without the patient's fold.
        max_fn: Held-out positives that the threshold may miss, 0 <= max_fn < number of positives.
        folds: See :func:`minmax_bound`.

    Raises:
        InputError: See :func:`fixed_fn_threshold` and :func:`minmax_bound`.
    """
    point = fixed_fn_threshold(label, score, max_fn)
    bound = minmax_bound(point.n_positive, folds, point.rank)
    return replace(
        point, expected_miss_rate=bound, miss_rate_upper_95=None, rule=MINMAX, basis=_MINMAX_BASIS, folds=folds
    )


def _operating_point(
    positive: NDArray[np.bool_], score: Floats, rank: int, rule: str, source: ScoreSource
) -> OperatingPoint:
    """The operating point just below s_(rank), with its rates."""
    if source not in _BASIS:
        raise InputError(f"Unknown source of scores {source!r}: use one of {', '.join(_BASIS)}.")
    n = int(positive.sum())
    threshold = float(midway_below(score, np.sort(score[positive])[rank - 1 : rank])[0]) if rank else -math.inf
    return OperatingPoint(
        threshold=threshold,
        rank=rank,
        n_positive=n,
        n_negative=int((~positive).sum()),
        false_negatives=int((score[positive] < threshold).sum()),
        false_positive_rate=float((score[~positive] >= threshold).mean()),
        expected_miss_rate=rank / (n + 1),
        miss_rate_upper_95=clopper_pearson_upper(rank - 1, n, 0.05) if rank else 0.0,
        rule=rule,
        basis=_BASIS[source],
    )


def one_score_per_patient(
    patient: Sequence[str], label: ArrayLike, score: ArrayLike
) -> tuple[NDArray[np.int64], Floats]:
    """Labels and scores with one row per patient and label, as the laws of this module need independent samples.

    A patient with several positive exams counts with the lowest score, so that missing any of them is a miss; one
    with several negative exams with the highest, so that calling any of them is a false positive.

    Args:
        patient: ``(B,)``.
        label: ``(B,)`` in {0, 1}.
        score: ``(B,)``.

    Returns:
        Labels and scores ``(P,)``, P <= B, in the order in which patients first occur.

    Raises:
        InputError: If there is not one patient per score, or see :func:`mri_alm.metrics.check_binary`.
    """
    positive, score = check_binary(label, score)
    if len(patient) != len(score):
        raise InputError(f"Each of the {len(score)} scores needs its patient, found {len(patient)} patients.")
    rows: dict[tuple[str, bool], float] = {}
    for name, needed, value in zip(patient, positive.tolist(), score.tolist(), strict=True):
        seen = rows.setdefault((name, needed), value)
        rows[name, needed] = min(seen, value) if needed else max(seen, value)
    return np.array([needed for _, needed in rows], dtype=np.int64), np.array(list(rows.values()))


def neyman_pearson_rank(n: int, alpha: float, eps: float) -> int:
    """Largest r with BinomCDF(r - 1; n, alpha) <= eps, so that P(miss rate at s_(r) > alpha) <= eps; 0 if none.

    Args:
        n: Held-out positives, >= 1.
        alpha: Largest acceptable miss rate, in (0, 1).
        eps: Acceptable chance that it is larger, in (0, 1).

    Raises:
        InputError: If an argument is out of range.

    References:
        Tong, Feng, Li, "Neyman-Pearson classification algorithms and NP receiver operating characteristics", 2018.
    """
    _check_counts(n)
    _check_rates(alpha=alpha, eps=eps)
    return int(np.searchsorted(binom.cdf(np.arange(n), n, alpha), eps, side="right"))


def minimum_positives(alpha: float, eps: float, allowed: int = 0) -> int:
    """Least number of positives whose Neyman-Pearson threshold may miss ``allowed`` of them; known before training.

    Args:
        alpha: Largest acceptable miss rate, in (0, 1).
        eps: Acceptable chance that it is larger, in (0, 1).
        allowed: Held-out false negatives, >= 0.

    Raises:
        InputError: If an argument is out of range.
    """
    _check_rates(alpha=alpha, eps=eps)
    if allowed < 0:
        raise InputError(f"allowed must be at least 0, found {allowed}.")
    # Waiting for the (allowed + 1)-th miss: it comes after more than n draws with BinomCDF(allowed; n, alpha).
    return allowed + 1 + int(nbinom.isf(eps, allowed + 1, alpha))


def certificate_in_words(n: int, alpha: float = 0.1, eps: float = 0.1) -> str:
    """What ``n`` positives could promise at best, known before anything is trained."""
    needed = minimum_positives(alpha, eps)
    rate = f"certify a miss rate of {100 * alpha:g} % at {100 * (1 - eps):g} % confidence"
    return f"{n} positives can {rate}." if n >= needed else f"{n} positives cannot {rate}; {needed} can."


def rule_in_words(n: int, alpha: float = 0.1) -> str:
    """Which rule to take with ``n`` positives in all and none beside, known before anything is trained.

    Args:
        n: Positive patients of the training cohort, >= 1.
        alpha: Largest acceptable miss rate, on average over cohorts, in (0, 1).

    Raises:
        InputError: If an argument is out of range.
    """
    rate, rank = f"{100 * alpha:g} %", conformal_rank(n, alpha)
    if n < 2 or rank == 0:
        return f"{n} positives: no rule keeps the share missed at {rate} on average; examine everyone."
    if n > MOST_FOR_MINMAX:
        return f"{n} positives: keep half of them out of training, and give them to score.py --calibration."
    return (
        f"{n} positives: --split_rule partition --splits loo --max_fn {rank - 1} misses at most "
        f"{100 * minmax_bound(n, n, rank):.1f} % on average over cohorts."
    )


def conformal_rank(n: int, alpha: float) -> int:
    """Largest r with r / (n + 1) <= alpha: bounds the **mean** miss rate only; 0 if none.

    Args:
        n: Held-out positives, >= 1.
        alpha: Largest acceptable mean miss rate, in (0, 1).

    Raises:
        InputError: If an argument is out of range.
    """
    _check_counts(n)
    _check_rates(alpha=alpha)
    # The slack repairs products such as 0.29 * 100 = 28.999999999999996.
    return math.floor(alpha * (n + 1) + 1e-9)


def minmax_bound(positives: int, folds: int, rank: int) -> float:
    """Upper bound of the share of new positives that the minmax rule misses, on average over cohorts.

    The positives are dealt at random into folds whose sizes differ by one at most; member k is trained without fold k
    and scores it, and nothing is chosen by these scores. s_(rank) is the ``rank``-th smallest of them. The rule misses
    a new positive when the largest of all members' scores of it is below s_(rank).

    With ``c`` folds of equal size ``s`` the share is at most (s + rank - 1) / (c s + s): the proof is in
    ``docs/operating_point.md``. With rank / (s + 1) it is bounded, too, by what one member says of its own fold. Where
    the sizes differ, the folds of one size give the first bound, as if there were no others: a member may depend on the
    size of what it was trained on, and (largest fold + rank - 1) / (positives + largest fold) is not proven then.

    Args:
        positives: Patients, n >= 2, independent draws of the population that the new ones come from.
        folds: 2 to n; n leaves one positive out at a time, and the bound is rank / (n + 1).
        rank: Of the threshold among the n scores, 0 to n; 0 ("examine everyone") misses none.

    Returns:
        In [0, 1]. It is no bound for one cohort, and has no confidence.

    Raises:
        InputError: If an argument is out of range.

    References:
        Barber, Candes, Ramdas, Tibshirani, "Predictive inference with the jackknife+", 2021 (jackknife-minmax).
    """
    _check_counts(positives, rank=rank)
    if not 2 <= folds <= positives:
        raise InputError(f"folds must lie between 2 and the {positives} positives, found {folds}.")
    if rank == 0:
        return 0.0
    size, larger = divmod(positives, folds)
    classes = [(size, folds - larger), *([(size + 1, larger)] if larger else [])]
    return min(1.0, rank / (classes[-1][0] + 1), *((s + rank - 1) / (count * s + s) for s, count in classes))


def clopper_pearson_upper(k: int, n: int, eps: float) -> float:
    """Upper bound, at confidence 1 - eps, of a miss rate of which ``k`` misses in ``n`` positives were seen.

    BetaInv(1 - eps; k + 1, n - k). The threshold must have been fixed beforehand, or be the s_(k + 1) of these very
    scores, for which the law of the miss rate gives the same number.

    Args:
        k: Misses, 0 <= k <= n.
        n: Positives, >= 1.
        eps: Chance of being wrong, in (0, 1).

    Raises:
        InputError: If an argument is out of range.
    """
    _check_counts(n, k=k)
    _check_rates(eps=eps)
    return 1.0 if k == n else float(beta.isf(eps, k + 1, n - k))


def miss_bound_in_words(missed: int, positives: int) -> str:
    """The one upper bound that all outputs show: :func:`clopper_pearson_upper` with 95 % confidence, one-sided.

    39.3 % after 0 of 6 (not 45.9 %, the upper end of a two-sided interval, for one side is asked for): were the true
    share larger, so few misses would be seen in under 1 of 20 such samples.

    Args:
        missed: Positives missed, or that the threshold may miss.
        positives: How many there were.

    Raises:
        InputError: See :func:`clopper_pearson_upper`.
    """
    bound = 100 * clopper_pearson_upper(missed, positives, 0.05)
    return f"at most {bound:.1f} % of new positives are missed (one-sided 95 % bound from {missed} of {positives})"


def _check_rates(**rates: float) -> None:
    for name, value in rates.items():
        if not 0 < value < 1:
            raise InputError(f"{name} must lie strictly between 0 and 1, found {value}.")


def _check_counts(n: int, **counts: int) -> None:
    if n < 1:
        raise InputError(f"At least one positive is needed, found n = {n}.")
    for name, value in counts.items():
        if not 0 <= value <= n:
            raise InputError(f"{name} must lie between 0 and n = {n}, found {value}.")
