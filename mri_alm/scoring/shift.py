"""What watches over decisions: the log that they go to, and whether new exams are like those a promise rests on.

A promise is about the scores of positives. New exams have no labels, so what is asked is: is there any share of
positives with which the known positives and negatives, mixed, give the new scores? If there is none, the promise has
lost its ground. How frequent positives are need not be known. What must be: that the same model scored both, and that
a score is compared with one of its kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from scipy.stats import betabinom, kstwo

from mri_alm.bundle.run_folder import model_digest
from mri_alm.bundle.trained_run import TrainedRun
from mri_alm.cohort.protocol import UNLIKE
from mri_alm.evaluation.data import read_calibration
from mri_alm.metrics.ranking import Floats, check_binary
from mri_alm.metrics.threshold import OperatingPoint
from mri_alm.runtime.tables import read_table
from mri_alm.scoring.decision_log import append_decisions, check_log, decisions_of

FEWEST = 30  # new exams; with fewer nothing but a change of everything would show
LEAST_P = 0.01  # smaller: the promise has lost its ground; one of a hundred scorings may say so without reason
_SHARES = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class Reference:
    """Exams with known labels that a threshold rests on.

    Attributes:
        label: ``(H,)`` in {0, 1}.
        score: ``(H,)`` in [0, 1].
        by_member: Whether each score is one member's, which did not see the exam; otherwise they are the scores that
            exams are decided by.
    """

    label: NDArray[np.int64]
    score: Floats
    by_member: bool

    def new_scores(self, decided_by: Floats, members: Floats) -> Floats:
        """Scores ``(N,)`` of new exams that are of the same kind: of one member each, the members in turn."""
        if not self.by_member:
            return decided_by
        rows = np.arange(len(members))
        return np.asarray(members[rows, rows % members.shape[1]])

    def in_words(self) -> str:
        """Which scores are compared with which."""
        if self.by_member:
            return f"one member's score of each (members in turn) with that of {self.label.size} held-out exams"
        return f"the score of each with that of {self.label.size} calibration patients"


def held_out_by_member(run: TrainedRun) -> Reference | None:
    """Each held-out exam's score by the first member that did not see it; None where the run's tables are not there.

    Raises:
        InputError: If a table cannot be read.
    """
    tables = [run.run.split(name).held_out for name in run.checkpoints]
    if not run.run.splits.is_file() or not all(table.is_file() for table in tables):
        return None  # an exported bundle names no exam
    label = {row["study"]: int(row["label"]) for row in run.run.trained_exams()}
    logit: dict[str, float] = {}
    for table in tables:
        for row in read_table(table, ("study", "logit")):
            logit.setdefault(row["study"], float(row["logit"]))
    return Reference(np.array([label[name] for name in logit]), expit(np.array([*logit.values()])), by_member=True)


def mixture_p_value(label: ArrayLike, score: ArrayLike, new: ArrayLike) -> float:
    """Chance of a distance as large as that of new scores to the nearest mixture of known positives and negatives.

    Kolmogorov and Smirnov's two-sample distance, at the share of positives where it speaks least against them. A
    mixture is taken for a sample of 1 / (share^2 / n + (1 - share)^2 / m) exams, n and m the known ones. This is an
    approximation on the safe side: `docs/operating_point.md` has the false alarms that were measured.

    Args:
        label: ``(H,)`` in {0, 1}, both there.
        score: ``(H,)``, of any kind.
        new: ``(N,)``, of the same kind, N >= 1.

    Returns:
        In [0, 1]; small where no share of positives explains the new scores.

    Raises:
        InputError: See :func:`mri_alm.metrics.check_binary`.
    """
    positive, score = check_binary(label, score)
    new = np.sort(np.asarray(new, dtype=np.float64))
    at = np.union1d(score, new)
    below = [
        np.searchsorted(np.sort(one), at, side="right") / one.size for one in (score[positive], score[~positive], new)
    ]
    mixed = _SHARES[:, None] * below[0] + (1 - _SHARES[:, None]) * below[1]
    distance = np.abs(mixed - below[2]).max(1)
    size = 1 / (_SHARES**2 / positive.sum() + (1 - _SHARES) ** 2 / (~positive).sum())
    of_both = size * new.size / (size + new.size)
    best = int(np.argmin(distance * of_both**0.5))
    return float(kstwo.sf(distance[best], max(1, round(of_both[best]))))


def shift_report(
    reference: Reference | None, new: Floats, threshold: float, rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What is known of the likeness of new exams, for ``report.json``.

    Args:
        reference: What the threshold rests on; None: nothing to compare with.
        new: ``(N,)`` scores in [0, 1] of new exams, of the reference's kind.
        threshold: In [0, 1], or -inf.
        rows: Of ``scores.csv``, of the exams of this scoring.

    Returns:
        ``promise`` is ``"lost"``, ``"nothing found"``, ``"too few exams"`` or ``"not compared"``; ``in_words`` says the
        rest.
    """
    unlike = sum(UNLIKE in row["warnings"] for row in rows)
    found: dict[str, Any] = {"promise": "not compared", "new_exams": len(new), "exams_unlike_training": unlike}
    if reference is None:
        words = "no held-out exams lie beside this model: that new ones are alike is yours to know"
    elif not len(new):
        words = "no exam was scored"
    else:
        above, known = int((new >= threshold).sum()), int((reference.score >= threshold).sum())
        law = betabinom(len(new), known + 0.5, reference.score.size - known + 0.5)
        expected = [int(law.ppf(0.025)), int(law.ppf(0.975))]
        found |= {"compared": reference.in_words(), "above_threshold": above, "above_expected": expected}
        words = f"{above} of {len(new)} at or above the threshold, {expected[0]} to {expected[1]} expected"
        words += " if positives are as frequent"
        if len(new) < FEWEST:
            found["promise"] = "too few exams"
            words += f"; {FEWEST} exams are needed to tell more"
        else:
            p = mixture_p_value(reference.label, reference.score, new)
            found |= {"p_value": p, "promise": "lost" if p < LEAST_P else "nothing found"}
            words += "; " + _verdict(p)
        words = f"compared is {reference.in_words()}: {words}"
    if unlike:
        words += f"; {unlike} exams are unlike training, and the promise is not for them"
    return found | {"in_words": f"Shift: {words}."}


class Watch:
    """What watches over the decisions of a run.

    Args:
        run: The run.
        log: Where decisions are appended to (:mod:`mri_alm.scoring.decision_log`); None: nowhere.
        calibration: The calibration cohort's scores, if the threshold rests on one.
        labels: That cohort's labels.

    Raises:
        InputError: If a file cannot be used.
    """

    def __init__(
        self,
        run: TrainedRun,
        log: Path | str | None = None,
        calibration: Path | str | None = None,
        labels: Path | str | None = None,
    ) -> None:
        self.log, self.checkpoints = Path(log) if log else None, run.checkpoints
        check_log(log)
        if calibration and labels:
            self.reference: Reference | None = Reference(
                *read_calibration(Path(calibration), Path(labels)), by_member=False
            )
        else:
            self.reference = held_out_by_member(run)

    def take(
        self, rows: Sequence[Mapping[str, Any]], logits: NDArray[np.float64], point: OperatingPoint
    ) -> dict[str, Any]:
        """Log decisions before anybody sees them, and compare the exams, with the earlier ones of the log, if any.

        Args:
            rows: Of ``scores.csv``, with a score each.
            logits: ``(N, M)``, the members', of the same exams.
            point: What was decided by.

        Returns:
            See :func:`shift_report`.

        Raises:
            InputError: If the log cannot be written.
        """
        decided_by, members = np.array([float(row["score"]) for row in rows]), expit(logits)
        if self.log:
            append_decisions(self.log, rows, logits, point=point, checkpoints=self.checkpoints)
            known = decisions_of(self.log, model_digest(self.checkpoints))
            decided_by = np.array([float(row["score"]) for row in known])
            members = np.array([[float(text) for text in row["members"].split()] for row in known])
        new = self.reference.new_scores(decided_by, members) if self.reference and len(members) else decided_by
        return shift_report(self.reference, new, point.threshold, rows)


def _verdict(p: float) -> str:
    if p < LEAST_P:
        return (
            f"no share of positives explains these scores (p = {p:.2g}). THE PROMISE OF THIS THRESHOLD NO LONGER "
            "STANDS for such exams: find out what changed, and calibrate anew"
        )
    return f"nothing speaks against the promise (p = {p:.2g}), which does not prove it"
