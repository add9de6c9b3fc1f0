"""When the penalty coefficient mu grows, and the named sets of choices where the paper and its authors' code differ."""

import numbers
from dataclasses import dataclass
from typing import Literal

from mri_alm.alm.constraint import ScoreKind
from mri_alm.errors import InputError, numbers_only, one_of, whole_only


@dataclass(frozen=True)
class MuSchedule:
    """When mu grows: after an epoch whose validation metric fell (Algorithm 1, line 10), or whose violation did not.

    And how multipliers move, and how strong the term may be.

    Args:
        rho: Factor of a growth step, > 1 and finite.
        growth: ``"auc"`` (the paper): mu grows after an epoch whose validation metric fell. ``"violation"``: after one
            whose validation violation is above the constraint's tolerance and did not fall.
        margin: The metric must fall by more than this, >= 0; the violation too, else mu grows. The paper says "by a
            margin" without its size.
        cap: mu never exceeds ``cap * mu0``; None (the paper) lets it grow without end; ``"official"`` (the authors'
            code) is rho^5 for mu0 < 1e-3 and rho^3 otherwise.
        start_epoch: First epoch (from 1) after which mu may grow.
        forced_epoch: Epoch after which mu grows whatever the metric did (the authors' code of 2022: 3); None: never.
        stop_at_one: Growth ends for good once the metric reaches 1 (the authors' code).
        auto_ratio: With ``mu="auto"``, the gradient ratio at which mu0 starts; with ``"auto_run"`` the mean over
            the run's epochs; > 0.
        ratio_cap: After an epoch whose gradient ratio was larger, mu and the multipliers rest for an epoch, > 0; None
            (the paper): never. Multipliers do not decrease, so that over many epochs they outgrow any base loss.
        gradient_cap: In no batch is the term's gradient on the logits larger than this times the base loss's, > 0: the
            term is scaled down. None (the paper): no cap. Multipliers move as without it.
        dual_rate: Step of the multipliers in place of mu, >= 0; None (the paper): mu. They stay while mu is zero.
        dual_decay: Share in [0, 1] of itself that a multiplier loses when it moves: ``lambda <- (1 - decay) lambda +
            rate q``, which is at most rate q / decay for the largest q seen. 0 (the paper): none.
    """

    rho: float = 2.0
    margin: float = 0.0
    cap: float | Literal["official"] | None = None
    start_epoch: int = 1
    forced_epoch: int | None = None
    stop_at_one: bool = False
    auto_ratio: float = 0.1
    ratio_cap: float | None = None
    growth: Literal["auc", "violation"] = "auc"
    gradient_cap: float | None = None
    dual_rate: float | None = None
    dual_decay: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        one_of("growth", self.growth, ("auc", "violation"))
        self._refuse_what_is_no_number()
        if not 1 < self.rho < float("inf"):
            raise InputError(f"rho must be greater than 1 and finite, got {self.rho}: mu grows by this factor.")
        if not 0 <= self.margin < float("inf"):
            raise InputError(f"mu_margin must be 0 or more and finite, got {self.margin}.")
        if isinstance(self.cap, str) and self.cap != "official":
            raise InputError(f'mu_cap must be a number, "official" or None, got "{self.cap}".')
        if not (self.cap is None or isinstance(self.cap, str)) and not self.cap >= 1:
            raise InputError(f"mu_cap is a multiple of mu0 and must be 1 or more (or None for no cap), got {self.cap}.")
        if not 0 < self.auto_ratio < float("inf"):
            raise InputError(f"mu0_ratio must be greater than 0 and finite, got {self.auto_ratio}.")
        if self.ratio_cap is not None and not self.ratio_cap > 0:
            raise InputError(f"ratio_cap must be greater than 0 (or None for no cap), got {self.ratio_cap}.")
        if self.gradient_cap is not None and not self.gradient_cap > 0:
            raise InputError(f"gradient_cap must be greater than 0 (or None for no cap), got {self.gradient_cap}.")
        if self.dual_rate is not None and not 0 <= self.dual_rate < float("inf"):
            raise InputError(f"dual_rate must be 0 or more (or None for mu), got {self.dual_rate}.")
        if not 0 <= self.dual_decay <= 1:
            raise InputError(f"dual_decay must lie between 0 (nothing is lost) and 1, got {self.dual_decay}.")

    def _refuse_what_is_no_number(self) -> None:
        numbers_only(rho=self.rho, mu_margin=self.margin, mu0_ratio=self.auto_ratio, dual_decay=self.dual_decay)
        numbers_only(none=True, ratio_cap=self.ratio_cap, gradient_cap=self.gradient_cap, dual_rate=self.dual_rate)
        whole_only(mu_start_epoch=self.start_epoch, least=0)
        whole_only(none=True, mu_forced_epoch=self.forced_epoch, least=0)
        if not isinstance(self.stop_at_one, bool):
            raise InputError(f"mu_stop_at_one must be True or False, got {self.stop_at_one!r}.")
        if not isinstance(self.cap, str):
            numbers_only(none=True, mu_cap=self.cap)

    def grows(self, epoch: int, metric: float, previous: float) -> bool:
        """Whether mu grows after an epoch.

        Args:
            epoch: From 1.
            metric: Of the epoch; with ``growth="violation"`` minus what the violation exceeds the tolerance by, <= 0.
            previous: Of the epoch before; NaN when there is none.
        """
        if epoch == self.forced_epoch:
            return True
        if self.growth == "violation":
            return epoch >= self.start_epoch and metric < 0 and metric <= previous + self.margin
        return epoch >= self.start_epoch and metric < previous - self.margin

    def value(self, metric: float, violation: float | None, tolerance: float) -> float:
        """What `grows` compares, larger is better: the metric, or minus what the violation has above the tolerance.

        Raises:
            InputError: If mu follows the violation and there is none.
        """
        if self.growth == "auc":
            return metric
        if violation is None:
            raise InputError(
                "growth is violation, so end_epoch needs the violation of the validation set: "
                "end_epoch(metric, objective.diagnose(logits, label)['violation'])."
            )
        return -max(violation - tolerance, 0.0)

    def rests(self, gradient_ratio: float) -> bool:
        """Whether mu and the multipliers stay as they are in the epoch after one of that gradient ratio."""
        return self.ratio_cap is not None and gradient_ratio > self.ratio_cap

    def ceiling(self, mu0: float) -> float:
        """The value that mu never exceeds."""
        if self.cap is None:
            return float("inf")
        if self.cap == "official":
            return mu0 * self.rho ** (5 if mu0 < 1e-3 else 3)
        return float(self.cap) * mu0


@dataclass(frozen=True)
class Preset:
    """One choice for everything in which the paper and its authors' code differ; the names are those of the settings.

    Attributes:
        score: What the constraint compares, see `RankingConstraint`.
        constraints_in_gradient: Which constraints of a batch reach the gradient, see `AugmentedLagrangian`.
        mu_margin: See `MuSchedule`; so are ``mu_cap``, ``mu_start_epoch``, ``mu_forced_epoch`` and ``mu_stop_at_one``.
        log_offset: Added inside the logarithm of the focal and margin losses.
        normalise_weights: Scale the class-balanced weights to sum to the number of classes.
        checkpoint_rule: Which epoch's weights are kept, see `EpochEnd`.
        fpr_rule: See :func:`mri_alm.metrics.fpr_at_tpr`.
        split_rule: ``"disjoint"``, or ``"overlapping"``: validation samples that are also trained on (CIFAR).
        positives_per_batch: See :func:`mri_alm.alm.batches.positives_in_batch`.
    """

    score: ScoreKind = "probability"
    constraints_in_gradient: Literal["all", "last"] = "all"
    mu_margin: float = 0.0
    mu_cap: float | Literal["official"] | None = None
    mu_start_epoch: int = 1
    mu_forced_epoch: int | None = None
    mu_stop_at_one: bool = False
    log_offset: float = 0.0
    normalise_weights: bool = True
    checkpoint_rule: Literal["best", "official", "last"] = "best"
    fpr_rule: Literal["lowest", "interpolate", "official"] = "lowest"
    split_rule: Literal["disjoint", "overlapping"] = "disjoint"
    positives_per_batch: Literal["auto"] | None = None

    def schedule(self, *, rho: float = 2.0, auto_ratio: float = 0.1) -> MuSchedule:
        """The schedule of these choices."""
        return MuSchedule(
            rho=rho,
            margin=self.mu_margin,
            cap=self.mu_cap,
            start_epoch=self.mu_start_epoch,
            forced_epoch=self.mu_forced_epoch,
            stop_at_one=self.mu_stop_at_one,
            auto_ratio=auto_ratio,
        )


_OFFICIAL = {
    "score": "logit", "mu_margin": 0.05, "mu_cap": "official", "mu_start_epoch": 4, "mu_forced_epoch": 3,
    "mu_stop_at_one": True, "log_offset": 1e-4, "normalise_weights": False, "checkpoint_rule": "official",
    "fpr_rule": "official", "split_rule": "overlapping",
}  # fmt: skip

PRESETS = {
    "default": Preset(mu_cap=8.0, mu_start_epoch=2),  # the paper's, with a mu that cannot swamp the base loss
    # the same but for what proved better (docs/recipe.md); the second was the main command's in versions 0.6 and 0.7
    "recommended": Preset(mu_cap=8.0, mu_start_epoch=2, checkpoint_rule="last", positives_per_batch="auto"),
    "last_epoch": Preset(mu_cap=8.0, mu_start_epoch=2, checkpoint_rule="last"),
    "paper": Preset(),
    "official_2022": Preset(**_OFFICIAL),  # type: ignore[arg-type]
    "official_head": Preset(**_OFFICIAL, constraints_in_gradient="last"),  # type: ignore[arg-type]
}


def preset(name: str) -> Preset:
    """The choices of that name, of :data:`PRESETS`.

    Raises:
        InputError: If there is none.
    """
    if name not in PRESETS:
        raise InputError(f'There is no preset "{name}". Choose one of: {", ".join(PRESETS)}.')
    return PRESETS[name]


def check_mu(mu: float | str) -> None:
    """Refuse what is no mu0.

    Raises:
        InputError: Unless it is finite and >= 0, ``"auto"`` or ``"auto_run"``.
    """
    number = isinstance(mu, numbers.Real) and not isinstance(mu, bool)
    if mu not in ("auto", "auto_run") and not (number and 0 <= float(mu) < float("inf")):
        shown = f'"{mu}"' if isinstance(mu, str) else mu
        raise InputError(
            f'mu0 must be a number >= 0 or "auto" or "auto_run", got {shown}. Zero trains the base loss alone.'
        )
