"""The augmented Lagrangian of the paper: base loss, ranking constraints, multipliers, penalty.

Plain PyTorch; nothing here knows about MONAI. A training loop has three calls to make::

    objective = AugmentedLagrangian(torch.nn.BCEWithLogitsLoss(), num_samples=len(dataset))
    objective(model(x), label, index).backward(); optimizer.step(); objective.dual_step()   # every batch
    objective.end_epoch(validation_auc)                                                      # every epoch
"""

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mri_alm.alm.constraint import RankingConstraint, Violations
from mri_alm.alm.losses import LossConditional
from mri_alm.alm.processes import first_visits, gather, world_size
from mri_alm.alm.schedule import MuSchedule, check_mu
from mri_alm.errors import InputError, one_of, whole_only

logger = logging.getLogger("mri_alm")

_NAMES = (
    "base_loss", "alm_term", "base_gradient", "alm_gradient", "satisfied", "constraints", "batches", "active",
    "saturated",
)  # fmt: skip
_SATURATED = 1e-3  # of sigmoid's slope, which is 1/4 at its steepest


class EpochSums(nn.Module):
    """Sums since they were last taken; no part of a checkpoint, which is written between epochs."""

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(len(_NAMES), dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def add(self, base: Tensor, term: Tensor, norms: Tensor, found: Violations) -> None:
        """Add one batch.

        Args:
            base: The base loss, a scalar.
            term: The ALM term, a float64 scalar; zero while it is only measured.
            norms: From `gradient_norms`.
            found: The batch's constraints.
        """
        values = torch.stack([base.detach().double(), term])
        counts = [float(len(found.q)) * found.active, 1.0, float(found.active)]
        satisfied = ((found.q <= found.slack).sum() * found.active).double().view(1)
        self.sums += torch.cat([
            values, norms, satisfied, torch.tensor(counts, dtype=torch.float64, device=norms.device),
            flat_violations(found).sum().double().view(1),
        ])  # fmt: skip

    def take(self) -> dict[str, float]:
        """The sums by name; they start anew."""
        values = self.sums.tolist()
        self.sums.zero_()
        return dict(zip(_NAMES, values, strict=True))


def gradient_norms(logits: Tensor, base: Tensor, term: Tensor, *, active: bool) -> Tensor:
    """Norms of the gradients of both parts of a batch; on the logits, so this costs next to nothing.

    Args:
        logits: ``(B,)`` or ``(B, C)``, of which the others are functions.
        base: The base loss, a scalar.
        term: The ALM term, a scalar.
        active: Whether the batch has both classes.

    Returns:
        ``(2,)`` float64, the base loss's and the term's; zeros where the batch is not active or nothing is trained.
    """
    if not (active and logits.requires_grad):
        return torch.zeros(2, dtype=torch.float64, device=logits.device)
    gradients = [torch.autograd.grad(part, logits, retain_graph=True)[0] for part in (base, term)]
    return torch.stack([gradient.double().norm() for gradient in gradients])


def flat_violations(found: Violations) -> Tensor:
    """Which constraints ``(K,)`` are violated by a probability so near 0 or 1 that its logit hardly moves it."""
    if found.score.dim() > 1 or found.owner.dim() > 1 or not found.active:
        return torch.zeros_like(found.q, dtype=torch.bool)
    own = found.score.detach()[found.owner]
    return (found.q > found.slack) & (own * (1 - own) < _SATURATED)


def averages(sums: dict[str, float], *, measuring: bool) -> dict[str, float]:
    """Of an epoch's sums, what `AugmentedLagrangian.end_epoch` reports of them."""
    return {
        "base_loss": ratio(sums["base_loss"], sums["batches"]),
        "alm_term": ratio(sums["alm_term"], sums["batches"]),
        "gradient_ratio": 0.0 if measuring else ratio(sums["alm_gradient"], sums["base_gradient"]),
        "satisfied": ratio(sums["satisfied"], sums["constraints"]),
        "batches_without_positives": sums["batches"] - sums["active"],
    }


def ratio(numerator: float, denominator: float) -> float:
    """A mean or a ratio; 0 where there was nothing to divide by."""
    return numerator / denominator if denominator else 0.0


class AugmentedLagrangian(nn.Module):
    r"""Base loss plus one ranking constraint per critical sample, weighted by its own multiplier (Eq. 5).

    .. math:: F + \frac{\mu}{2|p||n|} \sum_j q_j^2 + \frac{1}{|p||n|} \sum_j \lambda_j q_j

    with :math:`q_j` from :mod:`mri_alm.alm.constraint` and :math:`|p|, |n|` counted in the batch. The multipliers, mu
    and the schedule's memory are buffers: they are saved, loaded and moved with the module. A batch without positives
    or without negatives adds an exact zero, moves no multiplier, and is counted.

    Under ``torch.distributed`` every process calls it on its own share of the batch; the shares are gathered, what two
    processes have alike is counted once, and all compute the whole objective and move all multipliers alike. With
    gradients averaged over the processes (``DistributedDataParallel``) this is what one process would do.

    Under mixed precision the scores enter in float32 and outside autocast.

    Args:
        base: Maps ``(logits, label)`` to a scalar: ``(B,)`` and floating 0 or 1, or ``(B, C)`` and int64 classes when
            the constraint has ``critical`` classes.
        num_samples: Number of samples of the cohort; sample indices lie in ``[0, num_samples)``.
        mu: Initial penalty mu0 >= 0. Zero trains the base loss alone. ``"auto"`` trains the first epoch on the base
            loss alone and measures it; mu0 is then set so that the ALM term's gradient on the logits starts at
            the schedule's ``auto_ratio`` times the base loss's. ``"auto_run"`` does so too, and from then on mu and all
            multipliers are scaled after every epoch so that ``auto_ratio`` is the mean over the epochs, whatever the
            multipliers do; by at most 2 upwards, and never so that mu exceeds the schedule's cap.
        constraint: What is compared, by which margin. Default: the paper's binary constraint, delta 0.25.
        schedule: When mu grows, how multipliers move, and what the term may be at most.
        constraints_in_gradient: ``"all"`` constraints of a batch reach the gradient; ``"last"``: only the last one,
            while all multipliers move (what the authors' published code does).
        dual_update: ``"per_visit"`` (the paper): a multiplier moves after each batch that has its sample.
            ``"per_epoch"``: once at the end of the epoch, by mu times the mean of q over the sample's visits: a
            sampler that repeats positives then does not multiply their steps.
        negative_bank: Keep the scores of this many earlier negatives, without gradient, as further negatives of every
            batch. The quadratic term over a small batch overestimates (by the variance of the sum); a bank
            of N scores makes it nearly that of a batch of N, with scores that are some steps old. Binary, per positive.

    With the constraint's ``tolerance`` e the constraints are the inequalities r_j = q_j - e |n| <= 0, and the term is
    their augmented Lagrangian: s_j = max(r_j, -lambda_j / mu) stands for q_j, whose gradient is [lambda_j + mu r_j]_+
    times q_j's, and multipliers can fall: ``lambda <- [(1 - decay) lambda + rate r]_+``. As a violation is never
    negative, e = 0 is the paper's.

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
    frozen: Tensor
    resting: Tensor
    negatives: Tensor
    _visits: Tensor
    _late: Tensor
    ratios: Tensor
    row: Tensor

    def __init__(
        self,
        base: nn.Module,
        num_samples: int,
        *,
        mu: float | Literal["auto", "auto_run"] = 1e-5,
        constraint: RankingConstraint | None = None,
        schedule: MuSchedule | None = None,
        constraints_in_gradient: Literal["all", "last"] = "all",
        dual_update: Literal["per_visit", "per_epoch"] = "per_visit",
        negative_bank: int = 0,
    ) -> None:
        super().__init__()
        self.constraint, self.schedule = constraint or RankingConstraint(), schedule or MuSchedule()
        check_mu(mu)
        whole_only(num_samples=num_samples, least=1)
        whole_only(negative_bank=negative_bank)
        _check_bank(negative_bank, self.constraint)
        one_of("constraints_in_gradient", constraints_in_gradient, ("all", "last"))
        one_of("dual_update", dual_update, ("per_visit", "per_epoch"))
        self.base = base
        if negative_bank and self.conditional:
            raise InputError("negative_bank would compare scores of steps with another tau: leave it out, or loss lct.")
        self.constraints_in_gradient, self.dual_update = constraints_in_gradient, dual_update
        self.num_samples = num_samples
        self.held = mu == "auto_run"
        mu0 = float("nan") if isinstance(mu, str) else float(mu)  # NaN: to be measured in the first epoch
        pairs = self.constraint.per == "pair"  # multipliers come with their positives, see _keys
        slots = 0 if pairs else num_samples
        self.register_buffer("multipliers", torch.zeros(slots, dtype=torch.float64))
        self.register_buffer("mu", torch.tensor(0.0 if isinstance(mu, str) else mu0, dtype=torch.float64))
        self.register_buffer("mu0", torch.tensor(mu0, dtype=torch.float64))
        self.register_buffer("epoch", torch.tensor(0))
        self.register_buffer("previous_metric", torch.tensor(float("nan"), dtype=torch.float64))
        self.register_buffer("frozen", torch.tensor(False))
        self.register_buffer("resting", torch.tensor(False))
        self.register_buffer(
            "negatives", torch.full((negative_bank,), float("nan"), dtype=torch.float64)
        )  # newest last
        self.register_buffer("_visits", torch.zeros(slots, dtype=torch.int32), persistent=False)
        self.register_buffer("_late", torch.zeros(slots, dtype=torch.float64), persistent=False)
        self.register_buffer("ratios", torch.zeros(2, dtype=torch.float64), persistent=self.held)  # sum, epochs
        self.register_buffer("row", torch.full((num_samples if pairs else 0,), -1), persistent=pairs)
        self._sums = EpochSums()
        self._told = False
        self._pending: tuple[Tensor, Tensor, bool] | None = None

    @property
    def conditional(self) -> list[LossConditional]:
        """The parts of the base loss that have another parameter at every step, so that logits of steps differ."""
        return [part for part in self.base.modules() if isinstance(part, LossConditional)]

    def forward(self, logits: Tensor, label: Tensor, index: Tensor) -> Tensor:
        """Objective of one batch, and the violations remembered for :meth:`dual_step`.

        Args:
            logits: ``(B,)`` or ``(B, 1)``; ``(B, C)`` when the constraint has critical classes.
            label: ``(B,)`` or ``(B, 1)``, 1 for the critical class, 0 otherwise; or classes in [0, C).
            index: ``(B,)`` int64, the permanent index of each sample in the cohort.

        Returns:
            Scalar.

        Raises:
            InputError: If ``index`` is not int64 (floats are wrong above 2**24, bool and uint8 are taken for masks).
        """
        if index.dtype != torch.int64:
            raise InputError(f"Sample indices must be int64, got {index.dtype}: other types lose or mistake indices.")
        with torch.autocast(logits.device.type, enabled=False):
            logits, label, index = self._batch(logits, label, index)
            base = self.base(logits, label)
            found = self.constraint(logits, label, self._bank(logits))
            key = self._keys(index[found.owner])
            quadratic, linear = self._parts(found, key)
            term = self.mu * quadratic + linear
            if self.training and torch.is_grad_enabled():
                self._pending = (key, found.q.detach() - found.slack, found.active)
                part = quadratic if self._measuring else term
                norms = gradient_norms(logits, base, part, active=found.active)
                if self.schedule.gradient_cap is not None and not self._measuring:
                    most = self.schedule.gradient_cap * norms[0]
                    term = torch.where(norms[1] > most, most / norms[1], 1.0) * term
                    norms = torch.stack([norms[0], torch.minimum(norms[1], most)])
                self._sums.add(base, torch.zeros_like(term) if self._measuring else term.detach(), norms, found)
                if len(self.negatives):
                    self._remember(found.score.detach()[label == 0])
            return cast(Tensor, base + term.to(base.dtype))

    def _parts(self, found: Violations, key: Tensor) -> tuple[Tensor, Tensor]:
        """The quadratic part of the term, for mu = 1, and the linear one."""
        acting = slice(-1, None) if self.constraints_in_gradient == "last" else slice(None)
        multiplier = self.multipliers[key[acting]]
        floor = -multiplier / self.mu.clamp(min=torch.finfo(torch.float64).tiny)
        s = torch.maximum(found.q[acting] - found.slack, floor)  # found.q itself without a tolerance
        return (s * s).sum() / (2 * found.normaliser), (multiplier * s).sum() / found.normaliser

    @torch.no_grad()
    def diagnose(self, logits: Tensor, label: Tensor) -> dict[str, float]:
        r"""The objective's parts on other samples, such as a validation set; moves nothing.

        Args:
            logits: As in :meth:`forward`.
            label: As in :meth:`forward`.

        Returns:
            ``loss`` (base loss), ``violation`` (mean of q_j / \|n\|, in units of the score: 0 when all critical
            samples win by the margin) and ``satisfied`` (share with q_j = 0, or within the tolerance); the latter two 0
            without both classes.
        """
        logits, label = self._tensors(logits, label)
        found = self.constraint(logits, label)
        count = max(len(found.q), 1)
        mean = found.q.sum() / (found.normaliser if self.constraint.normalisation == "paper" else count)
        return {
            "loss": float(self.base(logits, label)),
            "violation": float(mean) if found.active else 0.0,
            "satisfied": float((found.q <= found.slack).sum() / count) if found.active else 0.0,
        }

    @torch.no_grad()
    def dual_step(self, *, skip: bool = False) -> None:
        """lambda_j += mu q_j for the last batch (Algorithm 1, line 7); call after the optimiser step.

        In general lambda_j <- [(1 - dual_decay) lambda_j + rate (q_j - slack)]_+, once a batch that has the sample; if
        it has it twice, with the sum of both steps. q is that of the forward pass, before the optimiser moved the
        weights. Does nothing when q was not finite, or the schedule lets the multipliers rest. A `LossConditional` base
        draws its next tau.

        Args:
            skip: The optimiser did not step (a gradient scaler found an infinity): the multipliers stay as well.
        """
        for loss in self.conditional:
            loss.draw()
        pending, self._pending = self._pending, None
        if pending is None or skip:
            return
        key, excess, active = pending
        finite = torch.isfinite(excess).all()
        moves = finite & ~self.resting & active
        step = torch.where(moves, excess, 0.0)
        if self.dual_update == "per_epoch":
            self._late.index_add_(0, key, step)
        else:
            self.multipliers[key] *= 1 - self.schedule.dual_decay * moves.double()
            self.multipliers.index_add_(0, key, self._rate * step)
            self.multipliers[key] = self.multipliers[key].relu()
        self._visits.index_add_(0, key, finite.to(torch.int32).expand(len(key)))

    def end_epoch(self, metric: float, violation: float | None = None) -> dict[str, float]:
        """Close an epoch: report what the constraint did, then let mu follow the validation metric, or violation.

        Args:
            metric: Validation metric, larger is better (the paper: AUC). NaN lets mu rest; ``mu="auto"`` is still
                measured after the first epoch.
            violation: Of the validation set, from :meth:`diagnose`; needed with the schedule's ``growth="violation"``.

        Returns:
            ``base_loss`` and ``alm_term`` (mean over batches), ``gradient_ratio`` (norm of the ALM term's gradient
            on the logits over the base loss's, on batches with both classes), ``satisfied`` (share of their
            constraints with q = 0, or within the tolerance), ``lambda_mean`` and ``lambda_max`` (over the positives
            seen), ``mu`` (of the epoch that ended), ``mu_next``, ``batches_without_positives`` (or without negatives).

        Raises:
            InputError: If mu follows the violation and ``violation`` is None.
        """
        value = self.schedule.value(metric, violation, self.constraint.tolerance)
        if self.dual_update == "per_epoch":
            self._move_once()
        sums, seen = self._sums.take(), self.multipliers[self._visits > 0]
        self._warn_if_flat(sums)
        report = averages(sums, measuring=self._measuring) | {
            "lambda_mean": float(seen.mean()) if len(seen) else 0.0,
            "lambda_max": float(seen.max()) if len(seen) else 0.0,
            "mu": float(self.mu),
        }
        self.resting.fill_(self.schedule.rests(report["gradient_ratio"]))
        self.epoch += 1
        if self._measuring:
            self._set_mu0(ratio(sums["base_gradient"], sums["alm_gradient"]) * self.schedule.auto_ratio)
        else:
            self._grow(metric, value)
            self._hold(report["gradient_ratio"])
        if not math.isnan(value):
            self.previous_metric.fill_(value)
        self._visits.zero_()
        return {**report, "mu_next": float(self.mu)}

    def multipliers_of(self, index: Sequence[int]) -> list[float]:
        """Multipliers of positives by their index; empty where these own none, or the base loss is trained alone."""
        if self.constraint.per != "positive" or not float(self.mu0) > 0:
            return []
        values: list[float] = self.multipliers[torch.tensor(index, device=self.multipliers.device)].tolist()
        return values

    def _warn_if_flat(self, sums: dict[str, float]) -> None:
        """Say once when most violations of an epoch have no gradient, so that multipliers grow to no effect."""
        violated = sums["constraints"] - sums["satisfied"]
        if self._told or self.constraint.score != "probability" or sums["saturated"] <= violated / 2:
            return
        self._told = True
        logger.warning(
            "%d of %d violated constraints of epoch %d compare a probability that is nearly 0 or 1: its gradient is "
            "nearly zero, and multipliers grow without it. Set score to log_odds, which does not saturate (delta is "
            "then in units of the logit, and mu0 another one: leave it at auto).",
            sums["saturated"], violated, int(self.epoch) + 1,
        )  # fmt: skip

    def _move_once(self) -> None:
        """The step of all multipliers whose samples were visited in the epoch."""
        moves = (self._visits > 0) & ~self.resting
        step = self._rate * self._late / self._visits.clamp(min=1)
        self.multipliers.copy_(((1 - self.schedule.dual_decay * moves.double()) * self.multipliers + step).relu())
        self._late.zero_()

    @property
    def _rate(self) -> Tensor:
        return self.mu if self.schedule.dual_rate is None else self.schedule.dual_rate * (self.mu > 0).double()

    def _hold(self, achieved: float) -> None:
        """With ``auto_run``: scale the term, so that the epochs' mean gradient ratio is the schedule's."""
        if not self.held or bool(self.resting) or not achieved > 0:
            return
        self.ratios += self.ratios.new_tensor([achieved, 1.0])
        total, epochs = self.ratios.tolist()
        share = self.schedule.auto_ratio
        wanted = min(max(share * (epochs + 1) - total, share / 2), 2 * share)
        factor = min(wanted / achieved, 2.0, self.schedule.ceiling(float(self.mu0)) / float(self.mu))
        self.mu *= factor
        self.multipliers *= factor

    def _grow(self, metric: float, value: float) -> None:
        if self.schedule.stop_at_one and metric >= 1:
            self.frozen.fill_(True)
        if math.isnan(value) or bool(self.frozen | self.resting):
            return
        if self.schedule.grows(int(self.epoch), value, float(self.previous_metric)):
            self.mu.copy_((self.mu * self.schedule.rho).clamp(max=self.schedule.ceiling(float(self.mu0))))

    @property
    def _measuring(self) -> bool:
        return bool(torch.isnan(self.mu0))

    def _set_mu0(self, value: float) -> None:
        visits = self._visits[self._visits > 0].double()
        if self.held and self.dual_update == "per_visit" and self.schedule.dual_rate is None and len(visits):
            value /= (1 + float(visits.mean())) / 2  # mu q (1 + v) at visit v: its mean over the epoch's visits
        if 0 < value < float("inf"):  # zero when no constraint was violated yet: measure one more epoch
            self.mu0.fill_(value)
            self.mu.fill_(value)

    def _tensors(self, logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits, label = _plain(logits), _plain(label).flatten()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.constraint.critical is None:
            return logits.flatten(), label.to(logits.dtype)
        return logits, label.long()

    def _batch(self, logits: Tensor, label: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, label = self._tensors(logits, label)
        index = _plain(index).flatten()
        if world_size() == 1:
            return logits, label, index
        logits, label, index = gather(logits, label, index)
        rows = first_visits(index)
        return logits[rows], label[rows], index[rows]

    def _keys(self, owner: Tensor) -> Tensor:
        """Which multiplier ``(K,)`` belongs to each constraint, given its owner's index ``(K,)``, or both of a pair.

        A positive gets its row of pairs when it is first met: most samples are negatives, and would have empty ones.
        """
        if self.constraint.per != "pair":
            return owner
        positive, negative = owner.unbind(1)
        new = torch.unique(positive[self.row[positive] < 0])
        rows = len(self.multipliers) // self.num_samples
        if len(new):
            self.row[new] = torch.arange(rows, rows + len(new), device=new.device)
            self._resize((rows + len(new)) * self.num_samples)
        return self.row[positive] * self.num_samples + negative

    def _resize(self, slots: int) -> None:
        for name in ("multipliers", "_visits", "_late"):
            setattr(self, name, functional.pad(getattr(self, name), (0, slots - len(getattr(self, name)))))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.constraint.per == "pair":
            self._resize(len(state_dict.get(f"{prefix}multipliers", self.multipliers)))
        state_dict.setdefault(f"{prefix}resting", self.resting)  # checkpoints of before
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _bank(self, logits: Tensor) -> Tensor | None:
        return self.negatives[~self.negatives.isnan()].to(logits.dtype) if len(self.negatives) else None

    def _remember(self, negatives: Tensor) -> None:
        """Put the batch's negatives into the bank, in place of the oldest."""
        self.negatives.copy_(torch.cat([self.negatives, negatives.double()])[-len(self.negatives) :])


def _check_bank(negative_bank: int, constraint: RankingConstraint) -> None:
    if negative_bank < 0 or (negative_bank and (constraint.critical is not None or constraint.per != "positive")):
        raise InputError(
            f"negative_bank must be 0 or more, and 0 unless constraints are binary per positive, got {negative_bank}."
        )


def _plain(tensor: Tensor) -> Tensor:
    """Without MONAI's metadata, which would slow every operation down."""
    return cast(Tensor, tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor)
