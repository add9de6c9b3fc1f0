"""Batches drawn, shared and taken in parts: each against one big exact batch where that is defined."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mri_alm import AugmentedLagrangian, RankingConstraint
from mri_alm.alm.batches import ProcessShare, StratifiedBatchSampler, positives_in_batch
from mri_alm.alm.losses import BinaryCrossEntropy
from mri_alm.errors import InputError
from mri_alm.networks import in_parts


@settings(max_examples=60)
@given(
    positives=st.integers(1, 9),
    negatives=st.integers(1, 60),
    per_batch=st.integers(1, 5),
    others=st.integers(1, 9),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_stratified_batches(positives: int, negatives: int, per_batch: int, others: int, seed: int, epoch: int) -> None:
    labels = [1.0] * positives + [0.0] * negatives
    if per_batch > positives:
        with pytest.raises(InputError, match="cannot be drawn from"):
            StratifiedBatchSampler(labels, per_batch + others, per_batch)
        return
    sampler = StratifiedBatchSampler(labels, per_batch + others, per_batch, seed=seed)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert all(sum(labels[i] == 1 for i in batch) == per_batch for batch in batches)
    assert all(len(set(batch)) == len(batch) for batch in batches)
    visits = Counter(i for batch in batches for i in batch)
    assert all(visits[i] == 1 for i in range(positives, positives + negatives))
    often = [visits[i] for i in range(positives)]
    assert max(often) - min(often) <= 1
    assert sum(often) == per_batch * len(batches)
    assert batches == list(sampler)  # of seed and epoch alone: a resumed run draws the same


def test_stratified_order_changes_with_seed_and_epoch() -> None:
    labels = [1, 1, 1] + [0] * 20
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        sampler = StratifiedBatchSampler(labels, 4, 1, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize(
    ("asked", "positive", "negative", "batch_size", "expected"),
    [
        ("auto", 16, 128, 8, 2),
        ("auto", 16, 49, 8, 2),  # 24.6 %
        ("auto", 16, 48, 8, None),  # a fourth
        ("auto", 1, 20, 8, 1),
        ("auto", 5, 20, 2, 1),
        ("auto", 5, 20, 1, None),
        ("auto", 0, 20, 8, None),
        (3, 16, 16, 8, 3),
        (0, 16, 128, 8, None),
        (None, 16, 128, 8, None),
    ],
)
def test_how_many_positives_a_batch_is_to_hold(
    asked: Any, positive: int, negative: int, batch_size: int, expected: int | None
) -> None:
    found = positives_in_batch(asked, [1] * positive + [0] * negative, batch_size)
    assert found == expected
    if found and positive:
        StratifiedBatchSampler([1] * positive + [0] * negative, batch_size, found)


@pytest.mark.parametrize("positives", [0, 4])
def test_stratified_batches_need_both_classes(positives: int) -> None:
    with pytest.raises(InputError, match=f"positives_per_batch must lie between 1 and .*3, got {positives}"):
        StratifiedBatchSampler([1, 0, 0, 0], 4, positives)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_shares_of_the_processes_make_up_every_batch(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [[3, 1, 4, 5], [9, 2, 6, 8], [7]]
    monkeypatch.setattr("mri_alm.alm.batches.world_size", lambda: world)
    shares = []
    for rank in range(world):
        monkeypatch.setattr("mri_alm.alm.batches.process_rank", lambda rank=rank: rank)
        shares.append(list(ProcessShare(batches)))
        assert len(ProcessShare(batches)) == 3
    for number, batch in enumerate(batches):
        assert all(share[number] for share in shares)  # none is empty: it would leave the others waiting for it
        assert {i for share in shares for i in share[number]} == set(batch)
    assert [sum(len(share[number]) for share in shares) for number in (0, 1)] == [4, 4]


def test_a_share_passes_the_epoch_on() -> None:
    sampler = StratifiedBatchSampler([1] + [0] * 30, 4, 1)
    share = ProcessShare(sampler)
    first = list(share)
    share.set_epoch(1)
    assert first != list(share)
    ProcessShare([[1]]).set_epoch(1)  # a sampler without epochs


# --- Parts of a batch -----------------------------------------------------------------------------------------------


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
    return layers.double()


def batch(size: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, (torch.arange(size) % 4 == 0).long(), torch.arange(size)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("size", [1, 5, 24, 100])
def test_parts_have_the_gradient_of_the_whole_batch(size: int) -> None:
    x, label, index = batch()
    results = []
    for parts in (False, True):
        model = network()
        alm = AugmentedLagrangian(BinaryCrossEntropy(), len(x), mu=0.5)
        alm.multipliers.fill_(0.3)
        loss = alm(in_parts(model, x, size) if parts else model(x), label, index)
        loss.backward()
        alm.dual_step()
        results.append((loss.detach(), gradients(model), alm.multipliers))
    for whole, parted in zip(*results, strict=True):
        torch.testing.assert_close(parted, whole, rtol=1e-12, atol=1e-15)


def test_naive_accumulation_is_another_objective() -> None:
    """Why `in_parts` exists."""
    x, label, index = batch()
    model = network()
    alm = AugmentedLagrangian(nn.Identity(), len(x), mu=0.5)
    alm.base = BinaryCrossEntropy()
    whole = alm(model(x), label, index)
    parts = [alm(model(x[i : i + 8]), label[i : i + 8], index[i : i + 8]) for i in range(0, 24, 8)]
    assert abs(sum(part.item() for part in parts) / 3 - whole.item()) > 1e-3


def test_parts_draw_the_same_dropout_in_both_passes() -> None:
    """The gradient is that of the scores which the loss saw: a finite difference along it agrees."""
    x, label, index = batch()
    model = network(dropout=0.5)

    def value() -> Any:
        torch.manual_seed(7)
        return AugmentedLagrangian(BinaryCrossEntropy(), len(x), mu=0.5)(in_parts(model, x, 5), label, index)

    value().backward()
    slope = float(gradients(model).square().sum())
    step = 1e-6
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(step * p.grad)  # type: ignore[operator]
    before = value().item()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(2 * step * p.grad)  # type: ignore[operator]
    assert (value().item() - before) / (2 * step) == pytest.approx(slope, rel=1e-6)


# --- Bank -----------------------------------------------------------------------------------------------------------


def test_a_bank_of_all_negatives_is_the_big_batch() -> None:
    """With weights that do not move, small batches and a bank see what one batch of everything sees."""
    x, label, index = batch(40)
    logits = network()(x).detach().flatten()
    constraint = RankingConstraint(0.3)
    whole = constraint(logits, label)
    alm = AugmentedLagrangian(
        BinaryCrossEntropy(), 40, mu=0.5, constraint=constraint, negative_bank=int((label == 0).sum())
    )
    order = torch.cat([index[label == 0], index[label == 1]])  # all negatives are in the bank when positives come
    for part in order.split(10):
        alm(logits[part].requires_grad_(), label[part], index[part])
        alm.dual_step()
    torch.testing.assert_close(alm.multipliers[label == 1], 0.5 * whole.q, rtol=1e-12, atol=1e-14)
    assert alm.multipliers[label == 0].count_nonzero() == 0


def test_the_bank_forgets_the_oldest_and_lends_no_gradient() -> None:
    alm = AugmentedLagrangian(
        BinaryCrossEntropy(), 9, mu=1.0, constraint=RankingConstraint(1.0, score="logit"), negative_bank=3
    )
    alm(torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0, 0]), torch.arange(2))
    alm(torch.tensor([3.0, 4.0], requires_grad=True), torch.tensor([0, 0]), torch.arange(2, 4))
    assert alm.negatives.tolist() == [2, 3, 4]
    logits = torch.tensor([2.5, 0.0], dtype=torch.float64, requires_grad=True)
    loss = alm(logits, torch.tensor([1, 0]), torch.tensor([4, 5]))
    # q = (2 - 1.5) + (3 - 1.5) + (4 - 1.5) of the bank, over four negatives; none of the batch's own violates
    assert loss.item() == pytest.approx(BinaryCrossEntropy()(logits, torch.tensor([1.0, 0.0])).item() + 4.5**2 / 8)
    loss.backward()
    alm.dual_step()
    assert alm.multipliers.tolist() == [0, 0, 0, 0, 4.5, 0, 0, 0, 0]
    again = AugmentedLagrangian(BinaryCrossEntropy(), 9, negative_bank=3)
    again.load_state_dict(alm.state_dict())
    assert again.negatives.tolist() == [3, 4, 0]


def test_a_bank_makes_a_batch_without_negatives_active_and_moves_nothing_without_positives() -> None:
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 4, mu=1.0, negative_bank=2)
    alm(torch.zeros(2, requires_grad=True), torch.tensor([0, 0]), torch.arange(2))
    alm.dual_step()
    assert alm.multipliers.count_nonzero() == 0
    alm(torch.zeros(1, requires_grad=True), torch.tensor([1]), torch.tensor([3]))
    alm.dual_step()
    assert alm.multipliers.tolist() == [0, 0, 0, pytest.approx(0.5)]


# --- When the multipliers move --------------------------------------------------------------------------------------


def epoch_of(dual_update: Any, visits: list[list[int]], mu: float = 0.4) -> AugmentedLagrangian:
    logits = torch.linspace(-1, 1, 8, dtype=torch.float64)
    label = torch.tensor([1, 0, 1, 0, 0, 1, 0, 0])
    alm = AugmentedLagrangian(BinaryCrossEntropy(), 8, mu=mu, dual_update=dual_update)
    for rows in visits:
        part = torch.tensor(rows)
        alm(logits[part].requires_grad_(), label[part], part)
        alm.dual_step()
    return alm


def test_per_epoch_is_per_visit_when_every_sample_comes_once() -> None:
    visits = [[0, 1, 2, 3], [4, 5, 6, 7]]
    late, soon = epoch_of("per_epoch", visits), epoch_of("per_visit", visits)
    assert late.multipliers.count_nonzero() == 0  # not before the epoch ends
    assert {key: late.end_epoch(0.5)[key] for key in ("lambda_mean", "lambda_max")} == {
        key: soon.end_epoch(0.5)[key] for key in ("lambda_mean", "lambda_max")
    }
    torch.testing.assert_close(late.multipliers, soon.multipliers, rtol=1e-14, atol=0)


def test_per_epoch_does_not_multiply_the_steps_of_a_repeated_sample() -> None:
    once, thrice = epoch_of("per_epoch", [[0, 1, 3]]), epoch_of("per_epoch", [[0, 1, 3]] * 3)
    soon = epoch_of("per_visit", [[0, 1, 3]] * 3)
    once.end_epoch(0.5)
    thrice.end_epoch(0.5)
    torch.testing.assert_close(thrice.multipliers, once.multipliers, rtol=1e-14, atol=0)
    torch.testing.assert_close(soon.multipliers, 3 * once.multipliers, rtol=1e-14, atol=0)
    before = thrice.multipliers.clone()
    thrice.end_epoch(0.5)  # an epoch without visits
    assert torch.equal(thrice.multipliers, before)


@pytest.mark.parametrize("dual_update", ["per_visit", "per_epoch"])
def test_a_batch_with_a_broken_score_is_no_visit(dual_update: Any) -> None:
    once = epoch_of(dual_update, [[0, 1, 3]])
    broken = epoch_of(dual_update, [[0, 1, 3]])
    logits = torch.tensor([0.1, float("nan"), 0.3], dtype=torch.float64, requires_grad=True)
    broken(logits, torch.tensor([1, 0, 0]), torch.tensor([0, 1, 3]))
    broken.dual_step()
    once.end_epoch(0.5)
    broken.end_epoch(0.5)
    assert once.multipliers[0] > 0
    assert torch.equal(broken.multipliers, once.multipliers)
