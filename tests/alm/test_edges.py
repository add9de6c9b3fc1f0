"""Values that nobody means, infinite scores, saturated probabilities, copies, parts of a batch: right, or refused."""

import copy
import itertools
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_cohort import train
from torch import Tensor, nn

from mri_alm.alm import batches
from mri_alm.alm.batches import ProcessShare
from mri_alm.alm.constraint import RankingConstraint, mirrored_violation, ranking_violation
from mri_alm.alm.lagrangian import AugmentedLagrangian
from mri_alm.alm.losses import (
    AsymmetricFocal,
    BinaryCrossEntropy,
    ClassBalancedBinaryCrossEntropy,
    PartialAUC,
    WeightedBinaryCrossEntropy,
)
from mri_alm.alm.losses_monai import AUCMargin
from mri_alm.alm.schedule import MuSchedule
from mri_alm.errors import InputError
from mri_alm.networks import AutocastInferer, in_parts
from mri_alm.training.engine import CheckpointRule, EpochSeed

INFINITY = math.inf


# --- Values that are no numbers ---------------------------------------------------------------------------------------


def objective(**settings: Any) -> AugmentedLagrangian:
    return AugmentedLagrangian(BinaryCrossEntropy(), settings.pop("num_samples", 4), **settings)


@pytest.mark.parametrize("value", ["0.5", None, True, False, [0.5], np.bool_(True), 1j])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda v: MuSchedule(rho=v), "rho"), (lambda v: MuSchedule(margin=v), "mu_margin"),
        (lambda v: MuSchedule(auto_ratio=v), "mu0_ratio"), (lambda v: MuSchedule(dual_decay=v), "dual_decay"),
        (lambda v: RankingConstraint(delta=v), "delta"), (lambda v: RankingConstraint(scale=v), "scale"),
        (lambda v: RankingConstraint(tolerance=v), "tolerance"), (lambda v: RankingConstraint(kind=v), "kind"),
        (lambda v: objective(num_samples=v), "num_samples"), (lambda v: objective(negative_bank=v), "negative_bank"),
        (AsymmetricFocal, "gamma"), (WeightedBinaryCrossEntropy, "positive_weight"), (PartialAUC, "max_fpr"),
        (lambda v: ClassBalancedBinaryCrossEntropy((3, 1), v), "beta"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_refused_by_its_name(make: Callable[[Any], object], name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} must be a number, got "):
        make(value)


@pytest.mark.parametrize("name", ["ratio_cap", "gradient_cap", "dual_rate", "forced_epoch", "cap"])
@pytest.mark.parametrize("value", [True, [1], "1"])
def test_what_may_be_none_is_a_number_else(name: str, value: Any) -> None:
    MuSchedule(**{name: None})
    with pytest.raises(InputError, match=r"must be a number,"):
        MuSchedule(**{name: value})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MuSchedule(rho=INFINITY), "rho must be greater than 1 and finite, got inf: mu grows by this factor"),
        (lambda: MuSchedule(auto_ratio=INFINITY), "mu0_ratio must be greater than 0 and finite, got inf"),
        (lambda: MuSchedule(margin=INFINITY), "mu_margin must be 0 or more and finite, got inf"),
        (lambda: MuSchedule(start_epoch=1.5), "mu_start_epoch must be a whole number, got 1.5"),  # type: ignore[arg-type]
        (lambda: MuSchedule(start_epoch=None), "mu_start_epoch must be a number, got None"),  # type: ignore[arg-type]
        (lambda: MuSchedule(start_epoch=-3), "mu_start_epoch must be 0 or more, got -3"),
        (lambda: MuSchedule(forced_epoch=-1), "mu_forced_epoch must be 0 or more, got -1"),
        (lambda: MuSchedule(stop_at_one="no"), "mu_stop_at_one must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda: objective(num_samples=2.5), "num_samples must be a whole number, got 2.5"),
        (lambda: objective(num_samples=0), "num_samples must be 1 or more, got 0"),
        (lambda: objective(negative_bank=1.5), "negative_bank must be a whole number, got 1.5"),
    ],
)
def test_a_number_that_cannot_be_meant_is_refused(make: Callable[[], object], said: str) -> None:
    """An infinite mu0_ratio would leave mu at 0 and train the base loss without a word."""
    with pytest.raises(InputError, match=f"^{said}"):
        make()


@pytest.mark.parametrize("mu", [True, False, None, [1.0], np.bool_(True)])
def test_a_mu_that_is_no_number_is_refused(mu: Any) -> None:
    with pytest.raises(InputError, match=r'^mu0 must be a number >= 0 or "auto" or "auto_run", got '):
        objective(mu=mu)


@pytest.mark.parametrize("kind", [0, 3, 1.5])
def test_a_third_kind_of_constraint_is_refused_before_a_batch(kind: Any) -> None:
    with pytest.raises(InputError, match=rf"^kind must be 1 or 2 \(multi-class constraint 1 or 2\), got {kind}\.$"):
        RankingConstraint(critical=[1], kind=kind)


def test_numbers_of_numpy_are_numbers() -> None:
    assert MuSchedule(rho=np.float32(2)).grows(2, 0.1, 0.2)
    assert float(objective(mu=np.float64(0.25)).mu) == 0.25


# --- Infinite scores --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positives", "negatives"),
    [
        ([INFINITY, 1.0], [INFINITY, 0.0]), ([INFINITY, 1.0], [0.0, 2.0]), ([-INFINITY, 1.0], [-INFINITY, 0.0]),
        ([-INFINITY, 1.0], [3.0, 2.0]), ([5.0], [INFINITY, INFINITY, 3.0]), ([5.0, 0.0], [-INFINITY, -INFINITY, 3.0]),
        ([INFINITY, -INFINITY], [INFINITY, -INFINITY]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("function", [ranking_violation, mirrored_violation])
def test_both_paths_say_the_same_of_infinite_scores(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[[Tensor, Tensor, float], Tensor],
    positives: list[float],
    negatives: list[float],
) -> None:
    score = torch.tensor([*positives, *negatives], dtype=torch.float64)
    label = torch.tensor([1] * len(positives) + [0] * len(negatives))
    matrix = function(score, label, 0.25)
    monkeypatch.setattr("mri_alm.alm.constraint._BROADCAST_PAIRS", 0)
    torch.testing.assert_close(function(score, label, 0.25), matrix, equal_nan=True, rtol=0, atol=0)


def test_infinite_on_both_sides_is_undefined() -> None:
    q = ranking_violation(torch.tensor([INFINITY, INFINITY]), torch.tensor([1, 0]), 0.25)
    assert q.isnan().all()


# --- Saturated probabilities ------------------------------------------------------------------------------------------


def warned(caplog: pytest.LogCaptureFixture, logits: list[float], **constraint: Any) -> list[str]:
    """What is said after two epochs of the same batch: two positives, two negatives."""
    alm = objective(mu=0.1, constraint=RankingConstraint(**constraint))
    with caplog.at_level(logging.WARNING, "mri_alm"):
        for _ in range(2):
            alm(torch.tensor(logits, requires_grad=True), torch.tensor([1.0, 1, 0, 0]), torch.arange(4))
            alm.dual_step()
            alm.end_epoch(0.5)
    return [record.getMessage() for record in caplog.records]


def test_violations_without_a_gradient_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = warned(caplog, [-9.0, 8.0, 9.0, 8.5])  # both positives violated, at 0.0001 and 0.9997
    assert said.startswith("2 of 2 violated constraints of epoch 1 compare a probability that is nearly 0 or 1")
    assert "Set score to log_odds" in said


@pytest.mark.parametrize(
    ("logits", "constraint"),
    [
        ([-1.0, 1.0, 2.0, 1.5], {}),  # violated, with a gradient
        ([9.0, 9.0, -9.0, -9.0], {}),  # saturated, not violated
        ([-9.0, 1.0, 2.0, 1.5], {}),  # one of two
        ([-9.0, 8.0, 9.0, 8.5], {"score": "log_odds"}),
    ],
)
def test_others_are_not(caplog: pytest.LogCaptureFixture, logits: list[float], constraint: dict[str, Any]) -> None:
    assert warned(caplog, logits, **constraint) == []


# --- Multipliers by sample ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mu", "per"), [(0.0, "positive"), ("auto", "positive"), (0.5, "negative"), (0.5, "pair")])
def test_multipliers_of_positives_exist_where_they_own_a_constraint_that_acts(mu: Any, per: Any) -> None:
    """With auto mu0 is not known before the first epoch ends."""
    assert objective(mu=mu, constraint=RankingConstraint(per=per)).multipliers_of([1]) == []
    alm = objective(mu=0.5, num_samples=6)
    alm(torch.tensor([0.0, 0.0, 0.0], requires_grad=True), torch.tensor([1.0, 0, 0]), torch.tensor([4, 1, 2]))
    alm.dual_step()
    assert alm.multipliers_of([4, 0]) == [0.25, 0.0]  # mu times two negatives' delta


# --- Copies -----------------------------------------------------------------------------------------------------------


def pickled(loss: AUCMargin) -> AUCMargin:
    return cast(AUCMargin, pickle.loads(pickle.dumps(loss)))  # noqa: S301


@pytest.mark.parametrize("made", [lambda loss: loss, copy.deepcopy, pickled])
def test_a_copy_of_the_auc_margin_still_ascends_in_alpha(made: Callable[[AUCMargin], AUCMargin]) -> None:
    """v2 at a = b = alpha = 0: d/d alpha = 2 (margin + mean of negatives - mean of positives), reversed."""
    loss = made(AUCMargin())
    logits, label = torch.tensor([0.3, -0.2, 0.1]), torch.tensor([1.0, 0, 0])
    loss(logits, label).backward()
    p = logits.sigmoid()
    expected = -2 * (1 + p[1:].mean() - p[0])
    assert float(loss.loss.alpha.grad) == pytest.approx(float(expected), rel=1e-6)


# --- Parts of a batch, shares of a batch ------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_parts_of_a_batch_are_refused_with_batch_normalisation(norm: type[nn.Module]) -> None:
    network = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 1))
    with pytest.raises(InputError, match=r"^micro_batch 2 cannot be exact with batch normalisation"):
        AutocastInferer(micro_batch=2)(torch.randn(6, 3), network)


def test_parts_of_a_batch_are_refused_before_anything_is_prepared(
    manifest: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    settings = {"norm": "batch", "micro_batch": 2, "splits": 1}
    assert "micro_batch 2 cannot be exact" in refusal(train, manifest, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_step_that_does_not_fit_the_memory_says_what_to_do(
    manifest: Path, tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(AutocastInferer, "__call__", full)
        said = refusal(train, manifest, tmp_path / "run", splits=1, max_epochs=1, batch_size=8)
    assert "The memory does not hold a step of 8 samples. Take fewer at a time: --micro_batch 2 (" in said
    train(manifest, tmp_path / "run", splits=1, max_epochs=1, batch_size=8, micro_batch=2)  # the same run goes on


def test_runs_splits_processes_and_epochs_augment_from_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the configs ask for them: 1_000_003 times the run's seed, and 1000 times the split."""
    seeds: list[int] = []
    transform = SimpleNamespace(set_random_state=lambda seed: seeds.append(seed % 2**32))  # as MONAI takes it
    batches = SimpleNamespace(set_epoch=lambda _: None)
    for seed, split, rank, epoch in itertools.product(range(5), range(10), range(8), range(1, 41)):
        monkeypatch.setattr("mri_alm.training.engine.process_rank", lambda rank=rank: rank)
        event = EpochSeed(1_000_003 * seed + 1000 * split, SimpleNamespace(transform=transform), batches)
        event(SimpleNamespace(state=SimpleNamespace(epoch=epoch)))  # type: ignore[arg-type]
    assert len(set(seeds)) == len(seeds) == 5 * 10 * 8 * 40


def test_parts_of_a_batch_are_allowed_where_its_statistics_are_fixed() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    image = torch.randn(6, 3)
    torch.testing.assert_close(in_parts(network, image, 2), network(image))


def test_a_sample_twice_in_a_batch_is_refused_where_processes_would_count_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Drawn:
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([3, 1, 2], [3, 1, 3])

    assert list(ProcessShare(Drawn())) == [[3, 1, 2], [3, 1, 3]]
    monkeypatch.setattr(batches, "world_size", lambda: 2)
    shares = iter(ProcessShare(Drawn()))
    assert next(shares) == [3, 2]
    with pytest.raises(InputError, match=r"^A batch holds a sample more than once \(2 different ones of 3\)"):
        next(shares)


# --- The epoch that is kept, of several classes -----------------------------------------------------------------------


def test_the_official_rule_needs_no_training_auc_where_there_is_none() -> None:
    rule = CheckpointRule("val_accuracy", "official")
    losses = [1.0, 1.2, 0.8]
    kept = [rule.improves({"val_accuracy": 0.5, "val_loss": loss, "epoch": i}) for i, loss in enumerate(losses)]
    assert kept == [True, False, True]  # on a tie the lower validation loss
    binary = CheckpointRule("val_auc", "official")
    epochs = [{"val_auc": 0.9, "val_loss": 1.0 - i, "epoch": i, "train_auc": 0.8 + 0.1 * (i == 2)} for i in range(3)]
    assert [binary.improves(epoch) for epoch in epochs] == [True, False, True]  # 0.8 is below 0.9 - 0.05
