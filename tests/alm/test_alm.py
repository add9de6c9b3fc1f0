import math
import re
from collections import defaultdict
from dataclasses import asdict
from fractions import Fraction
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from small_objective import STEP_LABEL, STEP_SCORE, Ramp, objective
from torch import Tensor, nn

import mri_alm.alm.lagrangian
from mri_alm import AugmentedLagrangian, MuSchedule, RankingConstraint
from mri_alm.alm.losses import BinaryCrossEntropy
from mri_alm.alm.schedule import preset
from mri_alm.errors import InputError

cooper: Any = import_module("cooper")  # re-exports its names without saying so

STEP_INDEX = torch.tensor([4, 0, 2, 1, 3, 5])
STEP_LAMBDA = (0.5, 1.0, 2.0)


def worked_step(**options: Any) -> tuple[AugmentedLagrangian, Tensor, Tensor]:
    alm = objective(**options)
    alm.multipliers[STEP_INDEX[:3]] = torch.tensor(STEP_LAMBDA, dtype=torch.float64)
    logits = torch.tensor(STEP_SCORE, dtype=torch.float64, requires_grad=True)
    return alm, logits, alm(logits, STEP_LABEL, STEP_INDEX)


def brute_force(
    score: list[float], label: list[int], multiplier: list[float], mu: float, delta: float
) -> tuple[float, list[float]]:
    """Eq. 5's term and lambda + mu q by a double loop over floats."""
    positive = [s for s, y in zip(score, label, strict=True) if y]
    negative = [s for s, y in zip(score, label, strict=True) if not y]
    q = [math.fsum(max(0.0, delta - (p - n)) for n in negative) for p in positive]
    pairs = max(len(positive) * len(negative), 1)
    quadratic = mu / (2 * pairs) * math.fsum(v * v for v in q)
    linear = math.fsum(m * v for m, v in zip(multiplier, q, strict=True)) / pairs
    return quadratic + linear, [m + mu * v for m, v in zip(multiplier, q, strict=True)]


# --- Exact values ---------------------------------------------------------------------------------------------------


def test_one_step_term_and_gradient() -> None:
    _, logits, loss = worked_step()
    assert loss.item() == pytest.approx(784 / 1125, rel=1e-14)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = [-32 / 225, -6 / 25, -37 / 75, 197 / 450, 0, 197 / 450]
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(expected, rel=1e-13)


def test_one_step_moves_the_multipliers_of_its_own_samples_only() -> None:
    alm, _, _ = worked_step()
    alm.dual_step()
    assert alm.multipliers[STEP_INDEX[:3]].tolist() == pytest.approx([16 / 25, 27 / 25, 111 / 50], rel=1e-14)
    assert alm.multipliers[STEP_INDEX[3:]].tolist() == [0, 0, 0]


def test_official_head_counts_the_last_positive_only_and_moves_every_multiplier() -> None:
    choice = preset("official_head")
    alm, logits, loss = worked_step(constraints_in_gradient=choice.constraints_in_gradient, score=choice.score)
    assert loss.item() == pytest.approx(2321 / 4500, rel=1e-14)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([0, 0, -37 / 75, 37 / 150, 0, 37 / 150], abs=1e-15)
    alm.dual_step()
    assert alm.multipliers[STEP_INDEX[:3]].tolist() == pytest.approx([16 / 25, 27 / 25, 111 / 50], rel=1e-14)


def test_step_uses_the_multipliers_from_before_it_and_a_second_dual_step_does_nothing() -> None:
    alm, _, loss = worked_step()
    assert loss.item() == pytest.approx(784 / 1125, rel=1e-14)  # with lambda of before, not 16/25 ...
    alm.dual_step()
    once = alm.multipliers.clone()
    alm.dual_step()
    assert torch.equal(alm.multipliers, once)


def test_theoretical_insights_cost() -> None:
    score = torch.tensor([-2.0, 5, 4, 0, 1, 2, 3, 7], dtype=torch.float64)
    label = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    alm = objective(samples=8, mu=1.0, delta=0)
    alm.multipliers.fill_(1)
    assert alm(score, label, torch.arange(8)).item() == pytest.approx(299 / 15, rel=1e-14)


@pytest.mark.parametrize("order", ["NNPNNPPNPP", "NNNPNPPNPP"])
def test_toy_example_cost_and_its_drop(order: str) -> None:
    # 69/50 mu D^2 + 11/25 lambda D with mu = lambda = D = 1; the swap of the lowest positive saves 39/50 + 3/25.
    alm = objective(samples=10, mu=1.0, delta=0)
    alm.multipliers.fill_(1)
    label = torch.tensor([letter == "P" for letter in order]).long()
    cost = alm(torch.arange(10, dtype=torch.float64), label, torch.arange(10)).item()
    total = Fraction(69, 50) + Fraction(11, 25)
    saved = Fraction(39, 50) + Fraction(3, 25)
    assert cost == pytest.approx(float(total if order == "NNPNNPPNPP" else total - saved), rel=1e-14)


AUC_TRACE = (0.7, 0.6, 0.55, 0.5, 0.44, 0.6, 0.5, 0.44)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (MuSchedule(), [1, 2, 4, 8, 16, 16, 32, 64]),
        (preset("official_2022").schedule(), [1, 1, 2, 2, 4, 4, 8, 16]),
        (MuSchedule(cap=5), [1, 2, 4, 5, 5, 5, 5, 5]),
        (MuSchedule(rho=3, start_epoch=4), [1, 1, 1, 3, 9, 9, 27, 81]),
    ],
    ids=["paper", "official", "cap", "late"],
)
def test_mu_trace(schedule: MuSchedule, expected: list[int]) -> None:
    mu0 = 2.0**-14  # exact, and below 1e-3
    alm = objective(mu=mu0, schedule=schedule)
    assert [alm.end_epoch(auc)["mu_next"] / mu0 for auc in AUC_TRACE] == expected
    assert alm.mu.item() == mu0 * expected[-1]


@pytest.mark.parametrize(("mu0", "steps"), [(2.0**-14, 5), (2.0**-9, 3), (0.5, 3)])
def test_the_official_cap_depends_on_mu0(mu0: float, steps: int) -> None:
    alm = objective(mu=mu0, schedule=MuSchedule(rho=3, cap="official"))
    trace = [alm.end_epoch(auc)["mu_next"] for auc in torch.linspace(0.9, 0.1, 9).tolist()]
    assert trace[-1] == mu0 * 3**steps == max(trace)


def test_official_growth_ends_for_good_at_a_perfect_metric() -> None:
    alm = objective(mu=1.0, schedule=MuSchedule(stop_at_one=True))
    assert [alm.end_epoch(auc)["mu_next"] for auc in (0.9, 0.8, 1.0, 0.7, 0.6)] == [1, 2, 2, 2, 2]
    again = objective(mu=1.0, schedule=MuSchedule(stop_at_one=True))
    again.load_state_dict(alm.state_dict())
    assert again.end_epoch(0.1)["mu_next"] == 2


def test_presets_differ_where_the_paper_and_the_code_do() -> None:
    paper, code, head = (preset(name) for name in ("paper", "official_2022", "official_head"))
    assert asdict(paper.schedule()) == asdict(MuSchedule())
    assert {name for name in asdict(paper) if getattr(paper, name) == getattr(code, name)} == {
        "constraints_in_gradient",
        "positives_per_batch",
    }
    assert asdict(head) == asdict(code) | {"constraints_in_gradient": "last"}
    with pytest.raises(InputError, match='There is no preset "official"'):
        preset("official")


def test_report_tells_the_mu_that_acted_and_the_next() -> None:
    alm = objective(mu=1.0)
    alm.end_epoch(0.9)
    report = alm.end_epoch(0.8)
    assert (report["mu"], report["mu_next"]) == (1, 2)


def test_a_metric_of_nan_is_as_if_the_epoch_had_no_validation() -> None:
    alm = objective(mu=1.0)
    seen = [alm.end_epoch(auc)["mu_next"] for auc in (0.9, math.nan, 0.95, math.nan, 0.9)]
    assert seen == [1, 1, 1, 1, 2]


def test_equal_metric_is_no_fall() -> None:
    alm = objective(mu=1.0)
    assert [alm.end_epoch(0.5)["mu_next"] for _ in range(3)] == [1, 1, 1]


# --- Independent oracles --------------------------------------------------------------------------------------------

finite = st.floats(-8, 8, allow_nan=False)


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(finite, st.integers(0, 1), st.floats(0, 3)), min_size=1, max_size=12),
    mu=st.floats(0, 2),
    delta=st.floats(0, 2),
    kind=st.sampled_from(["logit", "probability"]),
)
def test_equals_double_loop(rows: list[tuple[float, int, float]], mu: float, delta: float, kind: str) -> None:
    alm = objective(samples=len(rows), mu=mu, delta=delta, score=kind)
    alm.multipliers.copy_(torch.tensor([m for _, _, m in rows], dtype=torch.float64))
    logits = torch.tensor([s for s, _, _ in rows], dtype=torch.float64, requires_grad=True)
    label = [y for _, y, _ in rows]
    loss = alm(logits, torch.tensor(label), torch.arange(len(rows)))
    alm.dual_step()
    score = [1 / (1 + math.exp(-s)) if kind == "probability" else s for s, _, _ in rows]
    kept = [m for _, y, m in rows if y]
    term, moved = brute_force(score, label, kept, mu, delta)
    assert loss.item() == pytest.approx(term, rel=1e-12, abs=1e-13)
    assert alm.multipliers[torch.tensor(label) == 1].tolist() == pytest.approx(moved, rel=1e-12, abs=1e-13)
    assert alm.multipliers[torch.tensor(label) == 0].tolist() == [m for _, y, m in rows if not y]


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(finite, st.integers(0, 1)), min_size=2, max_size=12),
    mu=st.floats(1e-3, 2),
    delta=st.floats(0, 2),
)
def test_mean_normalisation_is_the_paper_s_with_mu_times_the_negatives(
    rows: list[tuple[float, int]], mu: float, delta: float
) -> None:
    label = torch.tensor([y for _, y in rows])
    logits = torch.tensor([s for s, _ in rows], dtype=torch.float64)
    negatives = max(int((label == 0).sum()), 1)
    paper = objective(samples=len(rows), mu=mu, delta=delta)
    mean = objective(samples=len(rows), mu=mu * negatives, delta=delta, normalisation="mean")
    for _ in range(3):  # lambda is equal too, so the terms stay equal
        leaves = [logits.clone().requires_grad_() for _ in range(2)]
        losses = [alm(leaf, label, torch.arange(len(rows))) for alm, leaf in zip((paper, mean), leaves, strict=True)]
        gradients = [torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip(losses, leaves, strict=True)]
        paper.dual_step()
        mean.dual_step()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(paper.multipliers, mean.multipliers, rtol=1e-12, atol=1e-14)


def test_mean_normalisation_does_not_depend_on_repeating_the_negatives() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, -1.0], dtype=torch.float64)
    label, index = torch.tensor([1, 1, 0, 0]), torch.arange(4)
    often = torch.cat([torch.arange(2), torch.arange(2, 4).repeat(5)])
    values = [
        objective(samples=4, normalisation="mean")(logits[pick], label[pick], index[pick]).item()
        for pick in (torch.arange(4), often)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-14)


class CooperProblem(cooper.ConstrainedMinimizationProblem):  # type: ignore[misc]
    """The method in another library's words: equality constraints q_j / (|p||n|) = 0, one indexed multiplier each."""

    def __init__(self, samples: int, mu: float, delta: float) -> None:
        super().__init__()
        self.mu, self.delta = mu, delta
        self.multiplier = cooper.multipliers.IndexedMultiplier(num_constraints=samples, dtype=torch.float64)
        self.penalty = cooper.penalty_coefficients.DensePenaltyCoefficient(torch.tensor(0.0, dtype=torch.float64))
        self.ranking = cooper.Constraint(
            constraint_type=cooper.ConstraintType.EQUALITY,
            formulation_type=cooper.formulations.AugmentedLagrangian,
            multiplier=self.multiplier,
            penalty_coefficient=self.penalty,
        )

    def compute_cmp_state(self, model: nn.Module, x: Tensor, label: Tensor, index: Tensor) -> Any:
        logits = model(x).flatten()
        score = torch.sigmoid(logits)
        q = torch.relu(self.delta - (score[label == 1][:, None] - score[label == 0][None, :])).sum(1)
        pairs = len(q) * (len(label) - len(q))
        self.penalty.value = torch.tensor(self.mu * pairs, dtype=torch.float64)
        state = cooper.ConstraintState(
            violation=q / pairs,
            strict_violation=self.mu * q.detach(),
            constraint_features=index[label == 1],
            strict_constraint_features=index[label == 1],
        )
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label.double())
        return cooper.CMPState(loss=loss, observed_constraints={self.ranking: state})


def test_25_steps_equal_cooper() -> None:
    torch.manual_seed(0)
    samples, mu, delta = 40, 0.3, 0.25
    label = (torch.arange(samples) % 5 == 0).long()
    x = torch.randn(samples, 3, dtype=torch.float64) + label[:, None] * 0.3
    ours, theirs = (nn.Linear(3, 1, dtype=torch.float64) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    alm = AugmentedLagrangian(BinaryCrossEntropy(), samples, mu=mu, constraint=RankingConstraint(delta))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    problem = CooperProblem(samples, mu, delta)
    roller = cooper.optim.SimultaneousOptimizer(
        cmp=problem,
        primal_optimizers=torch.optim.SGD(theirs.parameters(), lr=0.5),
        dual_optimizers=torch.optim.SGD(problem.dual_parameters(), lr=1.0, maximize=True),
    )
    for step in range(25):
        batch = torch.randperm(samples, generator=torch.Generator().manual_seed(step))[:16]
        assert 0 < int(label[batch].sum()) < 16
        optimizer.zero_grad()
        alm(ours(x[batch]), label[batch], batch).backward()
        optimizer.step()
        alm.dual_step()
        arguments = {"model": theirs, "x": x[batch], "label": label[batch], "index": batch}
        roller.roll(compute_cmp_state_kwargs=arguments)
    assert alm.multipliers.max() > 1  # the multipliers have taken part
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-12)
    torch.testing.assert_close(alm.multipliers, problem.multiplier.weight.detach().flatten(), rtol=0, atol=1e-12)


# --- Ordinary batches that need care --------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [[0, 0, 0], [1, 1, 1]], ids=["no positives", "no negatives"])
@pytest.mark.parametrize("normalisation", ["paper", "mean"])
def test_one_class_batch_adds_zero_moves_nothing_and_is_counted(label: list[int], normalisation: str) -> None:
    alm = objective(Ramp(), samples=3, normalisation=normalisation)
    alm.multipliers.fill_(0.7)
    logits = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    loss = alm(logits, torch.tensor(label), torch.arange(3))
    loss.backward()
    alm.dual_step()
    assert loss.item() == pytest.approx(0.5 - 2 + 6)
    assert logits.grad is not None
    assert logits.grad.tolist() == [1, 2, 3]
    assert alm.multipliers.tolist() == pytest.approx([0.7] * 3)
    assert alm.end_epoch(0.5)["batches_without_positives"] == 1


def test_shapes_with_a_trailing_one_and_float_labels_mean_the_same() -> None:
    _, _, plain = worked_step()
    alm, logits, _ = worked_step()
    assert alm(logits[:, None], STEP_LABEL.float()[:, None], STEP_INDEX[:, None]).item() == plain.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.uint8, torch.int32])
def test_index_must_be_int64(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=re.escape(f"Sample indices must be int64, got {dtype}")):
        objective()(torch.zeros(3), torch.tensor([1, 0, 0]), torch.tensor([0, 1, 2]).to(dtype))


def test_large_indices_are_exact() -> None:
    size = 2**24 + 4
    alm = objective(samples=size, mu=1.0, delta=0.5)
    alm(torch.zeros(2, requires_grad=True), torch.tensor([1, 0]), torch.tensor([2**24 + 1, 0]))
    alm.dual_step()
    assert alm.multipliers.nonzero().tolist() == [[2**24 + 1]]


def test_a_sample_twice_in_a_batch_moves_its_multiplier_twice() -> None:
    alm = objective(samples=2, mu=1.0, delta=0.5)
    alm(torch.zeros(3, requires_grad=True), torch.tensor([1, 1, 0]), torch.tensor([1, 1, 0]))
    alm.dual_step()
    assert alm.multipliers.tolist() == [0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_violations_that_are_not_finite_skip_the_dual_step(bad: float) -> None:
    alm = objective(samples=4, mu=1.0)
    alm.multipliers.fill_(0.5)
    logits = torch.tensor([0.0, 1.0, 0.0, bad], requires_grad=True)
    loss = alm(logits, torch.tensor([1, 1, 0, 0]), torch.arange(4))
    assert not math.isfinite(loss.item())
    alm.dual_step()
    assert alm.multipliers.tolist() == [0.5] * 4


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_validation_batches_leave_no_trace(mode: str) -> None:
    alm = objective(mu=1.0)
    alm.train(mode != "eval")
    with torch.set_grad_enabled(mode != "no_grad"):
        alm(torch.tensor(STEP_SCORE), STEP_LABEL, STEP_INDEX)
    alm.dual_step()
    report = alm.end_epoch(0.5)
    assert alm.multipliers.tolist() == [0] * 6
    assert report["base_loss"] == report["alm_term"] == 0


def test_half_precision_logits_are_compared_in_float32() -> None:
    _, _, exact = worked_step()
    alm, _, _ = worked_step()
    score = torch.tensor(STEP_SCORE).bfloat16()
    loss = alm(score, STEP_LABEL, STEP_INDEX)
    assert loss.dtype == torch.float32
    again = alm(score.double(), STEP_LABEL, STEP_INDEX)
    assert loss.item() == pytest.approx(again.item(), rel=1e-6)  # the rounding of the logits is the only one
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)


def test_mu_zero_is_the_base_loss_alone() -> None:
    alm = objective(Ramp(), mu=0)
    logits = torch.tensor(STEP_SCORE, requires_grad=True)
    assert alm(logits, STEP_LABEL, STEP_INDEX).item() == Ramp()(logits, STEP_LABEL).item()
    alm.dual_step()
    assert alm.multipliers.tolist() == [0] * 6
    assert [alm.end_epoch(auc)["mu_next"] for auc in (0.9, 0.5)] == [0, 0]


# --- Diagnostics ----------------------------------------------------------------------------------------------------


def two_batches(alm: AugmentedLagrangian) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Train on two batches; returns logits, labels, indices and the multipliers each batch was computed with."""
    batches = []
    for seed, label in ((0, [1, 0, 0, 1, 0]), (1, [0, 1, 0, 0, 0])):
        logits = torch.randn(5, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        index = torch.arange(5) + 5 * seed
        batches.append((logits, torch.tensor(label), index, alm.multipliers.clone()))
        alm(logits, torch.tensor(label), index).backward()
        alm.dual_step()
    return batches


def parts(
    logits: Tensor, label: Tensor, multiplier: Tensor, mu: float, delta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Base loss, quadratic part without mu, linear part, q; written with plain PyTorch."""
    base = nn.functional.binary_cross_entropy_with_logits(logits, label.float())
    score = torch.sigmoid(logits.double())
    q = torch.relu(delta - score[label == 1][:, None] + score[label == 0][None]).sum(1)
    pairs = len(q) * int((label == 0).sum())
    return base, (q**2).sum() / 2 / pairs, (multiplier[label == 1] * q).sum() / pairs, q


def test_diagnostics_equal_an_independent_computation() -> None:
    mu, delta = 0.3, 0.1
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 10, mu=mu, constraint=RankingConstraint(delta))
    alm.multipliers.copy_(torch.linspace(0.1, 1, 10))
    sums: dict[str, list[float]] = {"base": [], "term": [], "base_norm": [], "term_norm": [], "zero": [], "count": []}
    for old, label, index, multiplier in two_batches(alm):
        logits = old.detach().requires_grad_()
        base, quadratic, linear, q = parts(logits, label, multiplier[index], mu, delta)
        term = mu * quadratic + linear
        sums["base"].append(base.item())
        sums["term"].append(term.item())
        sums["base_norm"].append(torch.autograd.grad(base, logits, retain_graph=True)[0].norm().item())
        sums["term_norm"].append(torch.autograd.grad(term, logits)[0].norm().item())
        sums["zero"].append(float((q == 0).sum()))
        sums["count"].append(len(q))
    report = alm.end_epoch(0.5)
    assert report["base_loss"] == pytest.approx(sum(sums["base"]) / 2, rel=1e-6)
    assert report["alm_term"] == pytest.approx(sum(sums["term"]) / 2, rel=1e-6)
    assert report["gradient_ratio"] == pytest.approx(sum(sums["term_norm"]) / sum(sums["base_norm"]), rel=1e-5)
    assert report["satisfied"] == pytest.approx(sum(sums["zero"]) / sum(sums["count"]))
    assert 0 < report["satisfied"] < 1
    visited = alm.multipliers[torch.tensor([0, 3, 6])]
    assert report["lambda_mean"] == pytest.approx(visited.mean().item())
    assert report["lambda_max"] == visited.max().item()
    assert report["batches_without_positives"] == 0


def test_diagnostics_start_anew_each_epoch() -> None:
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 10, mu=0.3)
    two_batches(alm)
    alm.end_epoch(0.5)
    report = alm.end_epoch(0.6)
    assert (report["base_loss"], report["alm_term"], report["gradient_ratio"], report["satisfied"]) == (0, 0, 0, 0)


def test_recording_diagnostics_leaves_value_and_gradient_alone() -> None:
    torch.manual_seed(0)
    network = nn.Linear(4, 1)
    x, results = torch.randn(6, 4), []
    for recording in (True, False):
        alm = AugmentedLagrangian(BinaryCrossEntropy(), 6, mu=0.3).train(recording)
        alm.multipliers.fill_(0.4)
        network.zero_grad()
        loss = alm(network(x), STEP_LABEL, STEP_INDEX)
        loss.backward()
        assert network.weight.grad is not None
        results.append((loss.detach(), network.weight.grad.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


# --- mu0 = "auto" ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalisation", ["paper", "mean"])
def test_auto_measures_the_first_epoch_and_sets_mu0(normalisation: Any) -> None:
    ratio, delta = 0.2, 0.3
    constraint = RankingConstraint(delta, normalisation=normalisation)
    schedule = MuSchedule(auto_ratio=ratio)
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 10, mu="auto", constraint=constraint, schedule=schedule)
    norms = [0.0, 0.0]
    for logits, label, index, multiplier in two_batches(alm):
        assert logits.grad is not None
        leaf = logits.detach().requires_grad_()
        base, quadratic, _, _ = parts(leaf, label, multiplier[index], 1, delta)
        if normalisation == "mean":
            quadratic = quadratic / (label == 0).sum()
        base_gradient = torch.autograd.grad(base, leaf, retain_graph=True)[0]
        assert torch.equal(logits.grad, base_gradient)  # nothing but the base loss trains in the first epoch
        norms[0] += base_gradient.norm().item()
        norms[1] += torch.autograd.grad(quadratic, leaf)[0].norm().item()
    assert alm.multipliers.tolist() == [0] * 10
    report = alm.end_epoch(0.5)
    assert (report["mu"], report["alm_term"], report["gradient_ratio"], report["lambda_max"]) == (0, 0, 0, 0)
    assert alm.mu.item() == alm.mu0.item() == report["mu_next"] == pytest.approx(ratio * norms[0] / norms[1], rel=1e-5)


def test_auto_starts_at_the_ratio_asked_for() -> None:
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 5, mu="auto", schedule=MuSchedule(auto_ratio=0.2))
    logits, label = torch.randn(5, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 0, 0, 1, 0])
    ratios = []
    for _ in range(2):  # the same batch once an epoch, without a step of the weights or the multipliers
        alm(logits.clone().requires_grad_(), label, torch.arange(5))
        ratios.append(alm.end_epoch(0.5)["gradient_ratio"])
    assert ratios == [0, pytest.approx(0.2, rel=1e-6)]


def test_auto_measures_on_when_nothing_was_violated() -> None:
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 2, mu="auto", constraint=RankingConstraint(0.1))
    good, bad = torch.tensor([3.0, -3.0]), torch.tensor([-3.0, 3.0])
    for logits, mu_is_set in ((good, False), (bad, True)):
        alm(logits.requires_grad_(), torch.tensor([1, 0]), torch.arange(2))
        assert (alm.end_epoch(0.5)["mu_next"] > 0) is mu_is_set


def test_auto_never_takes_a_broken_epoch_for_a_measurement() -> None:
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 2, mu="auto")
    alm(torch.tensor([math.nan, 0.0], requires_grad=True), torch.tensor([1, 0]), torch.arange(2))
    assert alm.end_epoch(0.5)["mu_next"] == 0


def test_auto_grows_and_is_capped_from_the_measured_value() -> None:
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 2, mu="auto", schedule=MuSchedule(cap=3))
    alm(torch.zeros(2, requires_grad=True), torch.tensor([1, 0]), torch.arange(2))
    mu0 = alm.end_epoch(0.9)["mu_next"]
    assert [alm.end_epoch(auc)["mu_next"] / mu0 for auc in (0.8, 0.7, 0.6)] == pytest.approx([2, 3, 3])


# --- Rest after an epoch in which the constraint outweighed the loss --------------------------------------------------


@pytest.mark.parametrize("dual_update", ["per_visit", "per_epoch"])
@pytest.mark.parametrize(("cap", "moves"), [(None, True), (2.0, True), (0.5, False)])
def test_mu_and_multipliers_rest_after_an_epoch_above_the_ratio_cap(
    dual_update: Any, cap: float | None, moves: bool
) -> None:
    schedule = MuSchedule(auto_ratio=1, ratio_cap=cap)
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 5, mu="auto", schedule=schedule, dual_update=dual_update)
    label = torch.tensor([1, 0, 0, 1, 0])

    def epoch(metric: float) -> tuple[dict[str, float], list[float]]:
        alm(torch.zeros(5, requires_grad=True), label, torch.arange(5))
        alm.dual_step()
        return alm.end_epoch(metric), alm.multipliers[[0, 3]].tolist()

    epoch(0.9)  # measures
    second, before = epoch(0.8)  # a ratio of one; AUC fell
    assert second["gradient_ratio"] == pytest.approx(1)
    assert second["mu_next"] == (2 if moves else 1) * second["mu"]
    _, after = epoch(0.7)
    assert [b > a for a, b in zip(before, after, strict=True)] == [moves, moves]

    alm.schedule = MuSchedule(ratio_cap=math.inf)  # as if the ratio had fallen below the cap
    epoch(0.6)
    assert min(epoch(0.6)[1]) > max(after)


def test_a_rest_is_remembered_and_older_states_know_none() -> None:
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 5, mu=9.0, schedule=MuSchedule(ratio_cap=0.1))
    alm(torch.zeros(5, requires_grad=True), torch.tensor([1, 0, 0, 1, 0]), torch.arange(5))
    alm.dual_step()
    alm.end_epoch(0.5)
    state = alm.state_dict()
    again = AugmentedLagrangian(BinaryCrossEntropy(), 5)
    again.load_state_dict(state)
    assert alm.resting
    assert again.resting
    del state["resting"]
    older = AugmentedLagrangian(BinaryCrossEntropy(), 5)
    older.load_state_dict(state)
    assert not older.resting


# --- State, errors, documentation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.3, "auto"])
def test_state_dict_round_trip_goes_on_the_same(mu: Any) -> None:
    def fresh() -> AugmentedLagrangian:
        return AugmentedLagrangian(BinaryCrossEntropy(), 10, mu=mu)

    first, second = fresh(), fresh()
    two_batches(first)
    first.end_epoch(0.9)
    second.load_state_dict(first.state_dict())
    reports = []
    for alm in (first, second):
        two_batches(alm)
        reports.append(alm.end_epoch(0.8))
    assert reports[0] == reports[1]
    assert reports[0]["mu_next"] == 2 * reports[0]["mu"] > 0  # the metric of before the break is remembered
    assert all(torch.equal(a, b) for a, b in zip(first.buffers(), second.buffers(), strict=True))


def test_state_of_another_cohort_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch for multipliers"):
        objective(samples=6).load_state_dict(objective(samples=7).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "num_samples must be 1 or more, got 0"),
        ({"mu": -1.0}, 'mu0 must be a number >= 0 or "auto" or "auto_run", got -1.0'),
        ({"mu": math.nan}, 'mu0 must be a number >= 0 or "auto" or "auto_run", got nan'),
        ({"mu": math.inf}, 'mu0 must be a number >= 0 or "auto" or "auto_run", got inf'),
        ({"mu": "Auto"}, 'mu0 must be a number >= 0 or "auto" or "auto_run", got "Auto"'),
        ({"delta": -0.1}, "delta must be 0 or more, got -0.1"),
        ({"delta": math.nan}, "delta must be 0 or more, got nan"),
        ({"score": "logits"}, 'score must be one of probability, logit, log_odds, got "logits"'),
        ({"normalisation": "sum"}, 'normalisation must be one of paper, mean, got "sum"'),
        ({"constraints_in_gradient": "first"}, 'constraints_in_gradient must be one of all, last, got "first"'),
        ({"dual_update": "never"}, 'dual_update must be one of per_visit, per_epoch, got "never"'),
        ({"per": "sample"}, 'per must be one of positive, negative, pair, got "sample"'),
        ({"per": "pair", "critical": [1]}, 'Constraints per "pair" exist for two classes with one logit only'),
        ({"scale": 0.0}, "scale must be greater than 0, got 0.0"),
        (
            {"negative_bank": -1},
            "negative_bank must be 0 or more, and 0 unless constraints are binary per positive, got -1",
        ),
        (
            {"negative_bank": 5, "per": "negative"},
            "negative_bank must be 0 or more, and 0 unless constraints are binary",
        ),
        ({"negative_bank": 5, "critical": [1]}, "negative_bank must be 0 or more, and 0 unless constraints are binary"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        objective(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": 1.0}, "rho must be greater than 1 and finite, got 1.0"),
        ({"rho": math.nan}, "rho must be greater than 1 and finite, got nan"),
        ({"margin": -0.1}, "mu_margin must be 0 or more and finite, got -0.1"),
        ({"margin": math.nan}, "mu_margin must be 0 or more and finite, got nan"),
        ({"cap": 0.5}, "mu_cap is a multiple of mu0 and must be 1 or more"),
        ({"cap": math.nan}, "mu_cap is a multiple of mu0 and must be 1 or more"),
        ({"cap": "none"}, 'mu_cap must be a number, "official" or None, got "none"'),
        ({"auto_ratio": 0}, "mu0_ratio must be greater than 0 and finite, got 0"),
        ({"auto_ratio": math.nan}, "mu0_ratio must be greater than 0 and finite, got nan"),
        ({"ratio_cap": 0}, "ratio_cap must be greater than 0 (or None for no cap), got 0"),
        ({"ratio_cap": math.nan}, "ratio_cap must be greater than 0 (or None for no cap), got nan"),
    ],
)
def test_schedule_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        MuSchedule(**options)


def test_the_loop_of_the_module_s_documentation_runs() -> None:
    """The indented lines of the docstring, each `every batch` and `every epoch` one in its loop."""
    assert mri_alm.alm.lagrangian.__doc__ is not None
    lines = [line.strip() for line in mri_alm.alm.lagrangian.__doc__.splitlines() if line.startswith("    ")]
    setup = [line for line in lines if "# every" not in line]
    batch = [line for line in lines if "# every batch" in line]
    epoch = [line for line in lines if "# every epoch" in line]
    assert setup
    assert len(batch) == len(epoch) == 1
    torch.manual_seed(0)
    label = (torch.arange(20) % 4 == 0).float()
    dataset: Any = list(zip(torch.randn(20, 2) + 2 * label[:, None], label, torch.arange(20), strict=True))
    model = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope: dict[str, Any] = {
        "torch": torch, "AugmentedLagrangian": AugmentedLagrangian, "dataset": dataset, "model": model,
        "optimizer": optimizer, "validation_auc": 0.8,
    }  # fmt: skip
    exec("\n".join(setup), scope)  # noqa: S102
    for x, label, index in torch.utils.data.DataLoader(dataset, batch_size=10):
        optimizer.zero_grad()
        exec("\n".join(batch), scope | {"x": x, "label": label, "index": index})  # noqa: S102
    exec("\n".join(epoch), scope)  # noqa: S102
    assert scope["objective"].multipliers.count_nonzero() > 0
    assert scope["objective"].epoch == 1


# --- Several classes, other owners ----------------------------------------------------------------------------------

SOFTMAX = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8], [0.4, 0.4, 0.2]], dtype=torch.float64)
CLASSES = torch.tensor([2, 0, 1, 2])


class ZeroClasses(nn.Module):
    """A base loss of zero for several classes."""

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        assert label.dtype == torch.int64
        return 0 * logits.sum()


@pytest.mark.parametrize(("kind", "q"), [(1, 0.8), (2, 1.5)])
def test_multi_class_step(kind: int, q: float) -> None:
    alm = objective(ZeroClasses(), samples=9, delta=0.1, critical=[2], kind=kind, score="probability")
    alm.multipliers[5] = 2.0
    loss = alm(SOFTMAX.log().requires_grad_(), CLASSES, torch.tensor([5, 0, 1, 7]))
    assert loss.item() == pytest.approx(0.1 / (2 * 4) * 2 * q**2 + 2 * q / 4, rel=1e-12)
    alm.dual_step()
    assert alm.multipliers.tolist() == pytest.approx([0, 0, 0, 0, 0, 2 + 0.1 * q, 0, 0.1 * q, 0], rel=1e-12)


def test_two_columns_are_the_binary_constraint_in_log_odds_and_probability() -> None:
    two = torch.stack([torch.zeros(6, dtype=torch.float64), torch.tensor(STEP_SCORE, dtype=torch.float64)], 1)
    for score in ("log_odds", "probability"):
        binary = objective(score=score)(two[:, 1], STEP_LABEL, STEP_INDEX)
        columns = objective(ZeroClasses(), score=score, critical=[1])(two + 0.7, STEP_LABEL, STEP_INDEX)
        assert columns.item() == pytest.approx(binary.item(), rel=1e-12)


# Low to high, as in the paper's toy example, with mu = D = 1 and lambda = 0. What the two swaps save is reversed for
# constraints per negative, and equal for pairs.
TOY, LOWEST_POSITIVE, HIGHEST_NEGATIVE = "NNPNNPPNPP", "NNNPNPPNPP", "NNPNNPNPPP"


@pytest.mark.parametrize(
    ("per", "drops"),
    [
        ("positive", (Fraction(39, 50), Fraction(19, 50))),
        ("negative", (Fraction(19, 50), Fraction(39, 50))),
        ("pair", (Fraction(13, 50), Fraction(13, 50))),
    ],
)
def test_who_owns_a_constraint_decides_which_end_of_the_curve_is_mended(
    per: Any, drops: tuple[Fraction, Fraction]
) -> None:
    def cost(order: str) -> float:
        alm = objective(samples=10, mu=1.0, delta=0, per=per)
        label = torch.tensor([letter == "P" for letter in order]).long()
        return alm(torch.arange(10, dtype=torch.float64), label, torch.arange(10)).item()

    saved = [cost(TOY) - cost(order) for order in (LOWEST_POSITIVE, HIGHEST_NEGATIVE)]
    assert saved == pytest.approx([float(drop) for drop in drops], rel=1e-12)


def pair_multipliers(alm: AugmentedLagrangian) -> dict[tuple[int, int], float]:
    """Those that moved, by positive and negative."""
    table = alm.multipliers.view(-1, alm.num_samples)
    rows = {int(row): sample for sample, row in enumerate(alm.row) if row >= 0}
    assert sorted(rows) == list(range(len(table)))
    return {(rows[row], column): float(table[row, column]) for row, column in table.nonzero().tolist()}


def test_a_pair_has_a_multiplier_of_its_own() -> None:
    alm = objective(samples=4, mu=0.5, delta=1.0, per="pair")
    logits = torch.tensor([0.0, 2.0, 0.5, -3.0], dtype=torch.float64, requires_grad=True)
    alm(logits, torch.tensor([1, 1, 0, 0]), torch.tensor([3, 0, 1, 2]))
    alm.dual_step()
    assert pair_multipliers(alm) == {(3, 1): 0.75}  # 0.5 * (1 - (0 - 0.5)); all others win by the margin


@pytest.mark.parametrize("dual_update", ["per_visit", "per_epoch"])
@given(batches=st.lists(st.dictionaries(st.integers(0, 7), st.integers(-4, 4), min_size=1), min_size=1, max_size=5))
def test_pairs_met_one_after_another_are_those_of_a_full_table(dual_update: str, batches: list[dict[int, int]]) -> None:
    """By a dictionary of pairs (every third sample is positive); going on from a checkpoint changes nothing."""
    alm = objective(samples=8, mu=0.5, delta=1.0, per="pair", dual_update=dual_update)
    expected: dict[tuple[int, int], float] = defaultdict(float)
    seen = defaultdict[tuple[int, int], list[float]](list)
    for batch in batches:
        q = {(p, n): max(0, 1 - batch[p] + batch[n]) for p in batch for n in batch if p % 3 == 0 and n % 3}
        score = torch.tensor([*batch.values()], dtype=torch.float64, requires_grad=True)
        term = alm(score, torch.tensor([int(k % 3 == 0) for k in batch]), torch.tensor([*batch]))
        by_hand = sum(0.25 * v * v + expected[pair] * v for pair, v in q.items()) / max(len(q), 1)
        assert float(term.detach()) == pytest.approx(by_hand, abs=1e-12)
        alm.dual_step()
        for pair, v in q.items():
            seen[pair].append(v)
            expected[pair] += 0.5 * v if dual_update == "per_visit" else 0
        if dual_update == "per_visit":
            again = objective(samples=8, mu=0.5, delta=1.0, per="pair")
            again.load_state_dict(alm.state_dict())
            alm = again
    if dual_update == "per_epoch":
        alm.end_epoch(0.5)
        expected = {pair: 0.5 * sum(values) / len(values) for pair, values in seen.items()}
    assert pair_multipliers(alm) == pytest.approx({pair: v for pair, v in expected.items() if v}, abs=1e-12)
    assert len(alm.multipliers) == 8 * len({positive for positive, _ in seen})  # none for the negatives


def test_a_constraint_per_negative_moves_the_negatives() -> None:
    alm = objective(samples=4, mu=0.5, delta=1.0, per="negative")
    logits = torch.tensor([0.0, 2.0, 0.5, -3.0], dtype=torch.float64, requires_grad=True)
    alm(logits, torch.tensor([1, 1, 0, 0]), torch.tensor([3, 0, 1, 2]))
    alm.dual_step()
    assert alm.multipliers.tolist() == [0, 0.75, 0, 0]


# --- Validation, mixed precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalisation", ["paper", "mean"])
def test_diagnose_measures_and_moves_nothing(normalisation: str) -> None:
    alm = objective(BinaryCrossEntropy(), delta=0.25, normalisation=normalisation)
    before = {name: tensor.clone() for name, tensor in alm.state_dict().items()}
    found = alm.diagnose(torch.tensor(STEP_SCORE)[:, None], STEP_LABEL)
    q = [1.4, 0.8, 2.2]
    assert found["violation"] == pytest.approx(sum(q) / 9, rel=1e-6)
    assert found["satisfied"] == 0
    expected = nn.functional.binary_cross_entropy_with_logits(torch.tensor(STEP_SCORE), STEP_LABEL.float())
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)
    alm.dual_step()
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in alm.state_dict().items() if name != "previous_metric"
    )
    assert alm.end_epoch(0.5)["base_loss"] == 0
    assert alm.diagnose(torch.tensor([3.0, -3.0]), torch.tensor([1, 0]))["satisfied"] == 1
    assert alm.diagnose(torch.tensor([3.0, 3.0]), torch.tensor([1, 1]))["satisfied"] == 0  # nothing to satisfy


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_enter_in_float32(dtype: torch.dtype) -> None:
    logits = (torch.arange(256) % 16).to(dtype)  # exact in both types; q would overflow or round in them
    label, index = (torch.arange(256) % 8 == 0).long(), torch.arange(256)
    with torch.autocast("cpu", torch.bfloat16):
        half = objective(samples=256, delta=64)(logits.requires_grad_(), label, index)
    full = objective(samples=256, delta=64)(logits.detach().double(), label, index)
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(full.item(), rel=1e-6)


def test_no_dual_step_when_the_scaler_skipped_the_optimiser_s() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 4, mu=0.5)
    moved = []
    for factor in (1.0, 1e38, 1.0):  # the second step's scaled gradient is infinite
        optimizer.zero_grad()
        x = torch.tensor([-1.0, 1, 2, 3])
        logits = weight * x * factor - x
        scaler.scale(alm(logits, torch.tensor([1, 1, 0, 0]), torch.arange(4))).backward()
        before, scale = alm.multipliers.clone(), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        alm.dual_step(skip=scaler.get_scale() < scale)
        moved.append(bool((alm.multipliers != before).any()))
        weight.data.zero_()
    assert moved == [True, False, True]


def test_theoretical_insight_the_error_of_a_negative_that_weighs_like_a_positive_s() -> None:
    """M = 3, N = 5, all else 1, Delta_P = 2: Delta_diff = 6.2969 with the paper's updated lambda (it prints 7.2172).

    As there, the pair of the two mis-ranked samples is left out: either error stands in a batch of its own.
    """

    def weight(score: list[float], positives: int) -> float:
        label = torch.tensor([1] * positives + [0] * (len(score) - positives))
        alm = objective(samples=len(score), mu=1.0, delta=0)
        alm.multipliers.fill_(1)
        logits = torch.tensor(score, dtype=torch.float64, requires_grad=True)
        alm(logits, label, torch.arange(len(score)))
        alm.dual_step()
        return alm(logits, label, torch.arange(len(score))).item() * positives * (len(score) - positives)

    def of_positive(error: float) -> float:
        return weight([-error, 0, 1, 2, 3], 1)  # below the four other negatives

    def of_negative(error: float) -> float:
        return weight([0, -1, error], 2)  # above the two other positives

    def surplus(difference: float) -> float:
        return (of_positive(2) - of_positive(0)) - (of_negative(2 + difference) - of_negative(0))

    assert brentq(surplus, 0, 20) == pytest.approx(6.2969, abs=5e-5)
