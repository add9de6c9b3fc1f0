"""Multipliers that decay, constraints that tolerate, a capped term, growth by violation, and a share that is kept."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar
from small_objective import STEP_LABEL, STEP_SCORE, Ramp, objective
from torch import nn

from mri_alm import AugmentedLagrangian, MuSchedule, RankingConstraint
from mri_alm.alm.losses import BinaryCrossEntropy
from mri_alm.errors import InputError

SCORE = torch.tensor(STEP_SCORE, dtype=torch.float64)


def worked_step(multipliers: tuple[float, ...] = (0.5, 1.0, 2.0), **options: Any) -> tuple[Any, float, list[float]]:
    """The objective after the step, its value and its gradient."""
    alm = objective(**options)
    alm.multipliers[:3] = torch.tensor(multipliers, dtype=torch.float64)
    logits = SCORE.clone().requires_grad_()
    loss = alm(logits, STEP_LABEL, torch.arange(6))
    loss.backward()
    alm.dual_step()
    assert logits.grad is not None
    return alm, loss.item(), logits.grad.tolist()


# --- Exact values ---------------------------------------------------------------------------------------------------


def test_decay_takes_a_share_of_each_multiplier_and_leaves_the_term_alone() -> None:
    alm, value, _ = worked_step(dual_decay=0.2)
    assert value == pytest.approx(784 / 1125, rel=1e-14)
    assert alm.multipliers.tolist() == pytest.approx([27 / 50, 22 / 25, 91 / 50, 0, 0, 0], rel=1e-14)


def test_rate_of_the_multipliers_apart_from_mu() -> None:
    alm, value, _ = worked_step(dual_rate=0.5)
    assert value == pytest.approx(784 / 1125, rel=1e-14)
    assert alm.multipliers.tolist() == pytest.approx([6 / 5, 7 / 5, 31 / 10, 0, 0, 0], rel=1e-14)


@pytest.mark.parametrize("mu", [0, "auto", "auto_run"])
def test_multipliers_stay_while_mu_is_zero_whatever_their_rate(mu: Any) -> None:
    alm, value, _ = worked_step((0, 0, 0), mu=mu, dual_rate=0.5)
    assert value == 0
    assert alm.multipliers.tolist() == [0] * 6


def test_tolerance_is_the_augmented_lagrangian_of_inequalities() -> None:
    # e |n| = 6/5: r = (1/5, -2/5, 1); the second multiplier, 1/50, is smaller than mu 2/5, so that it ends at zero.
    alm, value, gradient = worked_step((0.5, 0.02, 2.0), tolerance=0.4)
    assert value == pytest.approx(43 / 180, rel=1e-13)
    assert gradient == pytest.approx([-26 / 225, 0, -7 / 15, 131 / 450, 0, 131 / 450], rel=1e-13)
    assert alm.multipliers.tolist() == pytest.approx([13 / 25, 0, 21 / 10, 0, 0, 0], rel=1e-14)


def test_tolerance_and_decay_together_also_in_means() -> None:
    # lambda = [4/5 lambda + rate (qbar - e)]_+ with qbar = q / 3, e = 0.4, rate 3/10: that of sums with rate 1/10
    alm, _, _ = worked_step((0.5, 0.02, 2.0), tolerance=0.4, dual_decay=0.2, normalisation="mean", mu=0.3)
    assert alm.multipliers.tolist() == pytest.approx([21 / 50, 0, 17 / 10, 0, 0, 0], rel=1e-13)


@pytest.mark.parametrize("per", ["positive", "negative", "pair"])
@pytest.mark.parametrize("normalisation", ["paper", "mean"])
def test_a_constraint_holds_within_the_tolerance(per: Any, normalisation: Any) -> None:
    mean_hinge = {  # of each constraint, over what it compares
        "positive": [7 / 15, 4 / 15, 11 / 15], "negative": [1.25 / 3, 0, 3.05 / 3],
        "pair": [0.35, 0, 1.05, 0.05, 0, 0.75, 0.75, 0, 1.45],
    }[per]  # fmt: skip
    for tolerance in (0.0, 0.3, 0.8, 2.0):
        alm = objective(per=per, normalisation=normalisation, tolerance=tolerance)
        share = sum(value <= tolerance for value in mean_hinge) / len(mean_hinge)
        assert alm.diagnose(SCORE, STEP_LABEL)["satisfied"] == pytest.approx(share)
        alm(SCORE.clone().requires_grad_(), STEP_LABEL, torch.arange(6))
        assert alm.end_epoch(0.5)["satisfied"] == pytest.approx(share)


def test_multipliers_that_move_once_an_epoch() -> None:
    alm = objective(dual_update="per_epoch", dual_decay=0.2, tolerance=0.4)
    alm.multipliers[:] = torch.tensor([0.5, 0.02, 2.0, 7, 7, 7], dtype=torch.float64)
    for rows in ([0, 1, 3, 4, 5], [0, 3, 4, 5]):  # the first positive twice, the third never
        alm(SCORE[rows].clone().requires_grad_(), STEP_LABEL[rows], torch.tensor(rows))
        alm.dual_step()
    assert alm.multipliers[:3].tolist() == [0.5, 0.02, 2.0]
    alm.end_epoch(0.5)
    assert alm.multipliers.tolist() == pytest.approx([21 / 50, 0, 2, 7, 7, 7], rel=1e-13)


@pytest.mark.parametrize("label", [[0, 0, 0], [1, 1, 1]], ids=["no positives", "no negatives"])
@pytest.mark.parametrize("normalisation", ["paper", "mean"])
def test_a_batch_of_one_class_adds_zero_and_moves_nothing(label: list[int], normalisation: Any) -> None:
    alm = objective(samples=3, dual_decay=0.5, tolerance=0.3, gradient_cap=0.5, normalisation=normalisation)
    alm.multipliers.fill_(0.7)
    loss = alm(torch.tensor([0.5, -1.0, 2.0], requires_grad=True), torch.tensor(label), torch.arange(3))
    alm.dual_step()
    assert loss.item() == 0
    assert alm.multipliers.tolist() == [0.7] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_violation_that_is_not_finite_moves_nothing(bad: float) -> None:
    alm = objective(samples=3, dual_decay=0.5, tolerance=0.1)
    alm.multipliers.fill_(0.7)
    alm(torch.tensor([0.0, 1.0, bad], requires_grad=True), torch.tensor([1, 0, 0]), torch.arange(3))
    alm.dual_step()
    assert alm.multipliers.tolist() == [0.7] * 3


@pytest.mark.parametrize(("cap", "share"), [(0.01, 0.01), (0.05, 0.05), (10.0, None), (None, None)])
def test_the_term_is_scaled_down_to_its_share_of_the_base_gradient(cap: float | None, share: float | None) -> None:
    term = np.array([-32 / 225, -6 / 25, -37 / 75, 197 / 450, 0, 197 / 450])  # 784/1125's, from test_alm.py
    base, size = np.arange(1.0, 7), np.linalg.norm(term)
    scale = 1 if share is None else share * math.sqrt(91) / size
    alm, value, gradient = worked_step(base=Ramp(), gradient_cap=cap)
    assert gradient == pytest.approx(base + scale * term, rel=1e-12)
    assert value == pytest.approx(float(base @ SCORE.numpy()) + scale * 784 / 1125, rel=1e-12)
    assert alm.multipliers[:3].tolist() == pytest.approx([16 / 25, 27 / 25, 111 / 50], rel=1e-14)  # as without it
    report = alm.end_epoch(0.5)
    assert report["gradient_ratio"] == pytest.approx(scale * size / math.sqrt(91), rel=1e-12)
    assert report["alm_term"] == pytest.approx(scale * 784 / 1125, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "violations", "expected"),
    [
        ({}, (0.3, 0.2, 0.2, 0.25, 0.1, 0.0, 0.0), [1, 1, 2, 4, 4, 4, 4]),
        ({"tolerance": 0.15}, (0.3, 0.2, 0.2, 0.25, 0.1, 0.12), [1, 1, 2, 4, 4, 4]),
        ({"margin": 0.05}, (0.3, 0.28, 0.2, math.nan, 0.16), [1, 2, 2, 2, 4]),
        ({"start_epoch": 3, "cap": 3}, (0.3, 0.3, 0.3, 0.3), [1, 1, 2, 3]),
        ({"forced_epoch": 2}, (0.3, 0.1, 0.05), [1, 2, 2]),
    ],
)
def test_mu_grows_where_the_violation_did_not_fall(
    options: dict[str, Any], violations: tuple[float, ...], expected: list[float]
) -> None:
    tolerance = options.pop("tolerance", 0.0)
    alm = objective(mu=1.0, tolerance=tolerance, schedule=MuSchedule(growth="violation", **options))
    metrics = np.linspace(0.9, 0.1, len(violations)).tolist()  # it falls all the time
    assert [alm.end_epoch(m, v)["mu_next"] for m, v in zip(metrics, violations, strict=True)] == expected


def test_growth_by_violation_needs_the_violation() -> None:
    alm = objective(schedule=MuSchedule(growth="violation"))
    with pytest.raises(
        InputError, match=r"growth is violation, so end_epoch needs the violation of the validation set"
    ):
        alm.end_epoch(0.9)
    assert alm.epoch == 0


# --- The paper's, to the last bit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["probability", "logit"])
@pytest.mark.parametrize("dual_update", ["per_visit", "per_epoch"])
def test_the_defaults_train_the_paper_s_method_to_the_last_bit(score: Any, dual_update: Any) -> None:
    """Against Eq. 5 and Algorithm 1 written down as they were computed before there were other settings."""
    samples = 24
    generator = torch.Generator().manual_seed(0)
    label = (torch.arange(samples) % 4 == 0).long()
    x = torch.randn(samples, 3, generator=generator) + label[:, None] * 0.3
    ours, theirs = nn.Linear(3, 1), nn.Linear(3, 1)
    theirs.load_state_dict(ours.state_dict())
    constraint, base, mu = RankingConstraint(0.25, score), BinaryCrossEntropy(), torch.tensor(0.3).double()
    alm = AugmentedLagrangian(base, samples, mu=float(mu), constraint=constraint, dual_update=dual_update)
    multipliers, late, visits = (torch.zeros(samples, dtype=torch.float64) for _ in range(3))
    optimizers = [torch.optim.Adam(network.parameters(), lr=0.05) for network in (ours, theirs)]
    for step in range(24):
        batch = torch.randperm(samples, generator=generator)[:10]
        optimizers[0].zero_grad()
        alm(ours(x[batch]), label[batch], batch).backward()
        optimizers[0].step()
        alm.dual_step()
        optimizers[1].zero_grad()
        logits = theirs(x[batch]).flatten()
        found = constraint(logits, label[batch].float())
        key, q = batch[found.owner], found.q
        term = mu * ((q * q).sum() / (2 * found.normaliser)) + (multipliers[key] * q).sum() / found.normaliser
        value = base(logits, label[batch].float())
        (value + term.to(value.dtype)).backward()
        optimizers[1].step()
        late.index_add_(0, key, q.detach()) if dual_update == "per_epoch" else multipliers.index_add_(
            0, key, mu * q.detach()
        )
        visits.index_add_(0, key, torch.ones(len(key)).double())
        if step % 8 == 7:
            multipliers += mu * late / visits.clamp(min=1)
            late.zero_(), visits.zero_()
            alm.end_epoch(0.5)
    assert alm.multipliers.max() > 1
    assert torch.equal(alm.multipliers, multipliers)
    assert torch.equal(ours.weight, theirs.weight)


# --- What always holds ----------------------------------------------------------------------------------------------

scores = st.lists(st.floats(-8, 8), min_size=4, max_size=4)


@settings(max_examples=60)
@given(
    batches=st.lists(scores, min_size=1, max_size=12),
    rate=st.floats(0, 3),
    decay=st.floats(0.01, 1),
    tolerance=st.sampled_from([0.0, 0.5]),
)
def test_with_decay_multipliers_are_bounded_and_never_negative(
    batches: list[list[float]], rate: float, decay: float, tolerance: float
) -> None:
    alm = objective(samples=4, mu=0.2, dual_rate=rate, dual_decay=decay, tolerance=tolerance)
    largest = 0.0
    for batch in batches:
        largest = max(largest, *(sum(max(0.0, 0.25 - p + n) for n in batch[2:]) for p in batch[:2]))
        alm(torch.tensor(batch, requires_grad=True), torch.tensor([1, 1, 0, 0]), torch.arange(4))
        alm.dual_step()
        assert alm.multipliers.min() >= 0
        assert alm.multipliers.max() <= rate * largest / decay * (1 + 1e-6)


@settings(max_examples=40)
@given(batches=st.lists(scores, min_size=1, max_size=8), tolerance=st.floats(0, 2), mu=st.floats(1e-3, 2))
def test_with_tolerance_multipliers_follow_the_signed_excess(
    batches: list[list[float]], tolerance: float, mu: float
) -> None:
    alm = objective(samples=4, mu=mu, tolerance=tolerance)
    expected = [0.0, 0.0]
    for batch in batches:
        alm(torch.tensor(batch, dtype=torch.float64, requires_grad=True), torch.tensor([1, 1, 0, 0]), torch.arange(4))
        alm.dual_step()
        q = [math.fsum(max(0.0, 0.25 - (p - n)) for n in batch[2:]) for p in batch[:2]]
        expected = [max(0.0, old + mu * (new - 2 * tolerance)) for old, new in zip(expected, q, strict=True)]
        assert alm.multipliers[:2].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual_rate": -1.0}, "dual_rate must be 0 or more (or None for mu), got -1.0"),
        ({"dual_rate": math.nan}, "dual_rate must be 0 or more (or None for mu), got nan"),
        ({"dual_decay": 1.1}, "dual_decay must lie between 0 (nothing is lost) and 1, got 1.1"),
        ({"dual_decay": math.nan}, "dual_decay must lie between 0 (nothing is lost) and 1, got nan"),
        ({"gradient_cap": 0}, "gradient_cap must be greater than 0 (or None for no cap), got 0"),
        ({"gradient_cap": math.nan}, "gradient_cap must be greater than 0 (or None for no cap), got nan"),
        ({"tolerance": -0.1}, "tolerance must be 0 or more, got -0.1"),
        ({"tolerance": math.nan}, "tolerance must be 0 or more, got nan"),
        ({"tolerance": math.inf}, "tolerance must be 0 or more, got inf"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        objective(**options)


def test_growth_by_something_else_is_refused() -> None:
    with pytest.raises(InputError, match='growth must be one of auc, violation, got "loss"'):
        MuSchedule(growth="loss")  # type: ignore[arg-type]


# --- A convex problem whose constraints cannot all hold ---------------------------------------------------------------

POSITIVE, NEGATIVE = np.linspace(-1, 2, 8), np.linspace(-2, 1, 32)  # on a line; their ranges overlap
MU, DELTA = 0.1, 0.25


def mean_hinges(w: float) -> NDArray[np.float64]:
    """qbar of each positive for the logits w x + b."""
    return np.maximum(0, DELTA - w * (POSITIVE[:, None] - NEGATIVE[None, :])).mean(1)


def penalised(theta: NDArray[np.float64], weight: float) -> float:
    """Cross-entropy plus weight / 2 times the mean of qbar squared."""
    positive, negative = (theta[0] * x + theta[1] for x in (POSITIVE, NEGATIVE))
    loss = np.concatenate([np.logaddexp(0, -positive), np.logaddexp(0, negative)]).mean()
    return float(loss + weight / 2 * (mean_hinges(theta[0]) ** 2).mean())


def descend(steps: int, every: int, **options: Any) -> tuple[list[float], Any, nn.Linear, float]:
    """Sums of the multipliers after every so many steps of gradient descent; objective, model, last gradient's norm."""
    x = torch.from_numpy(np.concatenate([POSITIVE, NEGATIVE]))[:, None]
    label, index = (torch.arange(40) < 8).double(), torch.arange(40)
    model = nn.Linear(1, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    alm = objective(BinaryCrossEntropy(), 40, MU, normalisation="mean", delta=DELTA, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sums, norm = [], math.inf
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        alm(model(x).flatten(), label, index).backward()
        norm = math.hypot(*(float(p.grad) for p in model.parameters() if p.grad is not None))
        optimizer.step()
        alm.dual_step()
        if step % every == 0:
            sums.append(float(alm.multipliers.sum()))
    return sums, alm, model, norm


def test_without_decay_multipliers_grow_without_end_where_constraints_cannot_all_hold() -> None:
    least = minimize_scalar(lambda w: mean_hinges(w).sum(), bounds=(-50, 50), method="bounded").fun
    assert least > 1
    sums, _, model, _ = descend(100, 50)
    assert all(total >= MU * least * steps for total, steps in zip(sums, (50, 100), strict=True))
    found = penalised(np.array([model.weight.item(), model.bias.item()]), 0)
    assert found > minimize(penalised, np.zeros(2), args=(0,)).fun + 0.01


def test_with_decay_they_converge_to_those_of_a_quadratic_penalty() -> None:
    decay = 0.1
    _, alm, model, norm = descend(200, 200, dual_decay=decay)
    assert norm < 1e-9
    w = model.weight.item()
    assert alm.multipliers[:8].numpy() == pytest.approx(MU * mean_hinges(w) / decay, rel=1e-6, abs=1e-9)
    best = minimize(penalised, np.zeros(2), args=(MU + MU / decay,), tol=1e-12)
    assert [w, model.bias.item()] == pytest.approx(best.x, abs=1e-4)


def test_with_a_tolerance_that_can_be_met_multipliers_end_where_the_constraints_hold() -> None:
    tolerance = 1.2 * float(mean_hinges(0.5).max())
    _, alm, model, norm = descend(200, 200, tolerance=tolerance)
    assert norm < 1e-3
    assert mean_hinges(model.weight.item()).max() <= tolerance + 1e-3
    assert alm.multipliers.count_nonzero() < 8


# --- mu0 = "auto_run" -------------------------------------------------------------------------------------------------


def share_of_epochs(mu: str, epochs: int = 16, **options: Any) -> tuple[list[float], AugmentedLagrangian]:
    """Gradient ratios of a small training, from the second epoch on; its AUC falls every third epoch."""
    torch.manual_seed(0)
    label = (torch.arange(60) % 6 == 0).long()
    x = torch.randn(60, 3) + 0.7 * label[:, None]
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    schedule = MuSchedule(auto_ratio=0.2, cap=8, start_epoch=2)
    alm = objective(BinaryCrossEntropy(), 60, mu, score="probability", schedule=schedule, **options)
    optimizer, ratios = torch.optim.Adam(model.parameters(), lr=0.01), []
    for epoch in range(epochs + 1):
        for batch in torch.randperm(60).split(20):
            optimizer.zero_grad()
            alm(model(x[batch]), label[batch], batch).backward()
            optimizer.step()
            alm.dual_step()
        ratios.append(alm.end_epoch(0.8 - 0.1 * (epoch % 3 == 2))["gradient_ratio"])
    assert ratios[0] == 0
    return ratios[1:], alm


@pytest.mark.parametrize("options", [{}, {"dual_decay": 0.1}, {"dual_update": "per_epoch"}], ids=str)
def test_auto_run_reaches_its_share_over_the_run(options: dict[str, Any]) -> None:
    ratios, alm = share_of_epochs("auto_run", **options)
    assert np.mean(ratios) == pytest.approx(0.2, rel=0.05)
    assert alm.mu <= 8 * alm.mu0


def test_auto_does_not() -> None:
    assert np.mean(share_of_epochs("auto")[0]) > 0.6  # three times what it names


def test_auto_run_foresees_the_visits_of_an_epoch() -> None:
    """Five visits in the measured epoch: at visit v the weight is mu q (1 + v), on average three times mu q."""
    mu0 = []
    for visits in (1, 5):
        alm = objective(BinaryCrossEntropy(), mu="auto_run")
        for _ in range(visits):
            alm(SCORE.clone().requires_grad_(), STEP_LABEL, torch.arange(6))
            alm.dual_step()
        mu0.append(alm.end_epoch(0.5)["mu_next"])
    assert mu0[0] == pytest.approx(3 * mu0[1], rel=1e-12)


def test_auto_run_goes_on_the_same_after_a_break() -> None:
    _, alm = share_of_epochs("auto_run", epochs=4)
    again = objective(BinaryCrossEntropy(), 60, "auto_run", score="probability", schedule=alm.schedule)
    again.load_state_dict(alm.state_dict())
    assert torch.equal(alm.ratios, again.ratios)
    assert alm.ratios[1] == 4
    reports = []
    for one in (alm, again):
        one(SCORE.clone().requires_grad_(), STEP_LABEL, torch.arange(6))
        one.dual_step()
        reports.append(one.end_epoch(0.5))
    assert reports[0] == reports[1]
    assert torch.equal(alm.multipliers, again.multipliers)
