"""The augmented Lagrangian of the paper: base loss, ranking constraints, multipliers, penalty schedule.

Plain PyTorch; nothing here knows about MONAI. A training loop has three calls to make::

    objective = AugmentedLagrangian(torch.nn.BCEWithLogitsLoss(), num_samples=len(dataset))
    objective(model(x), label, index).backward(); optimizer.step(); objective.dual_step()   # every batch
    objective.end_epoch(validation_auc)                                                      # every epoch
"""

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from mri_alm.constraint import ranking_violation
from mri_alm.errors import InputError

_SUMS = ("base_loss", "alm_term", "base_gradient", "alm_gradient", "satisfied", "positives", "batches", "active")


@dataclass(frozen=True)
class MuSchedule:
    """When the penalty coefficient mu grows: after an epoch whose validation metric fell (Algorithm 1, line 10).

    Args:
        rho: Factor of a growth step, > 1.
        margin: The metric must fall by more than this, >= 0. The paper says "by a margin" without its size.
        cap: mu never exceeds ``cap * mu0``; None (the paper) lets it grow without end.
        start_epoch: First epoch (from 1) after which mu may grow.
        forced_epoch: Epoch after which mu grows whatever the metric did (the authors' code of 2022: 3); None: never.
    """

    rho: float = 2.0
    margin: float = 0.0
    cap: float | None = None
    start_epoch: int = 1
    forced_epoch: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        if not self.rho > 1:
            raise InputError(f"rho must be greater than 1, got {self.rho}: mu grows by this factor.")
        if not self.margin >= 0:
            raise InputError(f"mu_margin must be 0 or more, got {self.margin}.")
        if self.cap is not None and not self.cap >= 1:
            raise InputError(f"mu_cap is a multiple of mu0 and must be 1 or more (or None for no cap), got {self.cap}.")

    def grows(self, epoch: int, metric: float, previous: float) -> bool:
        """Whether mu grows after ``epoch`` (from 1), given its metric and the one before (NaN when there is none)."""
        if epoch == self.forced_epoch:
            return True
        return epoch >= self.start_epoch and metric < previous - self.margin


class AugmentedLagrangian(nn.Module):
    r"""Base loss plus one ranking constraint per positive sample, weighted by its own multiplier (Eq. 5).

    .. math:: F + \frac{\mu}{2|p||n|} \sum_j q_j^2 + \frac{1}{|p||n|} \sum_j \lambda_j q_j

    with :math:`q_j` from :func:`mri_alm.constraint.ranking_violation` and :math:`|p|, |n|` counted in the batch. The
    multipliers, mu and the schedule's memory are buffers: they are saved, loaded and moved with the module.
    A batch without positives or without negatives adds an exact zero, moves no multiplier, and is counted.

    Args:
        base: Maps ``(logits (B,), label (B,))`` to a scalar.
        num_samples: Number of samples of the cohort; sample indices lie in ``[0, num_samples)``.
        mu: Initial penalty mu0 >= 0. Zero trains the base loss alone. ``"auto"`` trains the first epoch on the base
            loss alone and measures it; mu0 is then set so that the ALM term's gradient on the logits starts at
            ``auto_ratio`` times the base loss's.
        delta: Margin by which a positive's score is to exceed every negative's, >= 0, in units of the score.
        score: What the constraint compares: ``"probability"`` (the paper) or ``"logit"`` (the authors' code).
        normalisation: ``"paper"`` as above, or ``"mean"``: q_j / \|n\| in place of q_j and 1 / \|p\| in place of
            1 / (\|p\|\|n\|), so that mu does not depend on the batch size
            (``mu_mean = mu_paper * |n|`` is the same term).
        schedule: When mu grows.
        auto_ratio: See ``mu``; > 0.

    Raises:
        InputError: If an argument is out of its range.

    References:
        Sangalli et al., "Constrained Optimization to Train Neural Networks on Critical and Under-Represented
        Classes", NeurIPS 2021, Eq. 5 and Algorithm 1.
    """

    multipliers: Tensor
    mu: Tensor
    mu0: Tensor
    epoch: Tensor
    previous_metric: Tensor
    _visited: Tensor
    _sums: Tensor

    def __init__(
        self,
        base: nn.Module,
        num_samples: int,
        *,
        mu: float | Literal["auto"] = 1e-5,
        delta: float = 0.25,
        score: Literal["probability", "logit"] = "probability",
        normalisation: Literal["paper", "mean"] = "paper",
        schedule: MuSchedule | None = None,
        auto_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        _check(num_samples, mu=mu, delta=delta, score=score, normalisation=normalisation, auto_ratio=auto_ratio)
        self.base = base
        self.delta, self.score, self.normalisation = float(delta), score, normalisation
        self.schedule = schedule or MuSchedule()
        self.auto_ratio = float(auto_ratio)
        mu0 = float("nan") if mu == "auto" else float(mu)  # NaN: to be measured in the first epoch
        self.register_buffer("multipliers", torch.zeros(num_samples, dtype=torch.float64))
        self.register_buffer("mu", torch.tensor(0.0 if mu == "auto" else mu0, dtype=torch.float64))
        self.register_buffer("mu0", torch.tensor(mu0, dtype=torch.float64))
        self.register_buffer("epoch", torch.tensor(0))
        self.register_buffer("previous_metric", torch.tensor(float("nan"), dtype=torch.float64))
        self.register_buffer("_visited", torch.zeros(num_samples, dtype=torch.bool), persistent=False)
        self.register_buffer("_sums", torch.zeros(len(_SUMS), dtype=torch.float64), persistent=False)
        self._pending: tuple[Tensor, Tensor] | None = None

    def forward(self, logits: Tensor, label: Tensor, index: Tensor) -> Tensor:
        """Objective of one batch, and the violations remembered for :meth:`dual_step`.

        Args:
            logits: ``(B,)`` or ``(B, 1)``.
            label: ``(B,)`` or ``(B, 1)``, 1 for the critical class, 0 otherwise.
            index: ``(B,)`` int64, the permanent index of each sample in the cohort.

        Returns:
            Scalar.

        Raises:
            InputError: If ``index`` is not int64 (floats are wrong above 2**24, bool and uint8 are taken for masks).
        """
        if index.dtype != torch.int64:
            raise InputError(f"Sample indices must be int64, got {index.dtype}: other types lose or mistake indices.")
        logits, label, index = (_plain(tensor) for tensor in (logits, label, index))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        base = self.base(logits, label.to(logits.dtype))
        positive = label == 1
        q = self.violations(logits, label).double()
        negatives = max(len(label) - len(q), 1)
        q, scale = (q / negatives, 1) if self.normalisation == "mean" else (q, negatives)
        quadratic = (q * q).sum() / (2 * max(len(q), 1) * scale)
        linear = (self.multipliers[index[positive]] * q).sum() / (max(len(q), 1) * scale)
        term = self.mu * quadratic + linear
        if self.training and torch.is_grad_enabled():
            self._pending = (index[positive], q.detach())
            self._record(logits, base, quadratic if self._measuring else term, q)
        return cast(Tensor, base + term.to(base.dtype))

    def violations(self, logits: Tensor, label: Tensor) -> Tensor:
        """Constraint violations q_j >= 0 of the positives, ``(P,)``, in the kind of score this objective compares."""
        score = torch.sigmoid(logits) if self.score == "probability" else logits
        return ranking_violation(score, label, self.delta)

    @torch.no_grad()
    def dual_step(self) -> None:
        """lambda_j += mu q_j for the positives of the last batch (Algorithm 1, line 7); call after the optimiser step.

        q is that of the forward pass, before the optimiser moved the weights. Does nothing when q was not finite.
        """
        if self._pending is None:
            return
        index, q = self._pending
        self._pending = None
        step = torch.where(torch.isfinite(q).all(), self.mu * q, 0.0)
        self.multipliers.index_add_(0, index, step)
        self._visited[index] = True

    def end_epoch(self, metric: float) -> dict[str, float]:
        """Close an epoch: report what the constraint did, then let mu follow the validation metric.

        Args:
            metric: Validation metric, larger is better (the paper: AUC). NaN leaves mu and the schedule's memory alone.

        Returns:
            ``base_loss`` and ``alm_term`` (mean over batches), ``gradient_ratio`` (norm of the ALM term's gradient
            on the logits over the base loss's, on batches with both classes), ``satisfied`` (share of visited positives
            with q = 0), ``lambda_mean`` and ``lambda_max`` (over the positives seen), ``mu`` (of the epoch that ended),
            ``mu_next``, ``batches_without_positives`` (or without negatives).
        """
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        seen = self.multipliers[self._visited]
        report = {
            "base_loss": _ratio(sums["base_loss"], sums["batches"]),
            "alm_term": _ratio(sums["alm_term"], sums["batches"]),
            "gradient_ratio": 0.0 if self._measuring else _ratio(sums["alm_gradient"], sums["base_gradient"]),
            "satisfied": _ratio(sums["satisfied"], sums["positives"]),
            "lambda_mean": float(seen.mean()) if len(seen) else 0.0,
            "lambda_max": float(seen.max()) if len(seen) else 0.0,
            "mu": float(self.mu),
            "batches_without_positives": sums["batches"] - sums["active"],
        }
        self.epoch += 1
        if self._measuring:
            self._set_mu0(_ratio(sums["base_gradient"], sums["alm_gradient"]) * self.auto_ratio)
        elif not math.isnan(metric) and self.schedule.grows(int(self.epoch), metric, float(self.previous_metric)):
            ceiling = float("inf") if self.schedule.cap is None else self.schedule.cap * self.mu0
            self.mu.copy_(torch.clamp(self.mu * self.schedule.rho, max=ceiling))
        if not math.isnan(metric):
            self.previous_metric.fill_(metric)
        self._sums.zero_()
        return report | {"mu_next": float(self.mu)}

    @property
    def _measuring(self) -> bool:
        return bool(torch.isnan(self.mu0))

    def _set_mu0(self, value: float) -> None:
        if 0 < value < float("inf"):  # zero when no constraint was violated yet: measure one more epoch
            self.mu0.fill_(value)
            self.mu.fill_(value)

    def _record(self, logits: Tensor, base: Tensor, term: Tensor, q: Tensor) -> None:
        """Add one batch to the epoch's sums; gradients are taken on the logits, so this costs next to nothing."""
        active = 0 < len(q) < len(logits)
        norms = torch.zeros(2, dtype=torch.float64, device=logits.device)
        if active and logits.requires_grad:
            gradients = [torch.autograd.grad(part, logits, retain_graph=True)[0] for part in (base, term)]
            norms = torch.stack([gradient.double().norm() for gradient in gradients])
        values = torch.stack([base.detach().double(), torch.zeros_like(term) if self._measuring else term.detach()])
        counts = torch.tensor([float(len(q)), 1.0, float(active)], dtype=torch.float64, device=logits.device)
        self._sums += torch.cat([values, norms, (q == 0).sum().double().view(1), counts])


def _check(
    num_samples: int, *, mu: float | str, delta: float, score: str, normalisation: str, auto_ratio: float
) -> None:
    if num_samples < 1:
        raise InputError(f"num_samples must be 1 or more, got {num_samples}.")
    if isinstance(mu, str) and mu != "auto":
        raise InputError(f'mu0 must be a number >= 0 or "auto", got "{mu}".')
    if not isinstance(mu, str) and not 0 <= mu < float("inf"):
        raise InputError(f'mu0 must be a number >= 0 or "auto", got {mu}. Zero trains the base loss alone.')
    if not 0 <= delta < float("inf"):
        raise InputError(f"delta must be 0 or more, got {delta}: it is the margin a positive must win by.")
    if score not in ("probability", "logit"):
        raise InputError(f'score must be "probability" or "logit", got "{score}".')
    if normalisation not in ("paper", "mean"):
        raise InputError(f'normalisation must be "paper" or "mean", got "{normalisation}".')
    if not auto_ratio > 0:
        raise InputError(f"mu0_ratio must be greater than 0, got {auto_ratio}.")


def _plain(tensor: Tensor) -> Tensor:
    """``(B,)`` without MONAI's metadata, which would slow every operation down."""
    return cast(Tensor, tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor).flatten()


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
