"""Sharpness-aware minimisation: against steps by hand and against the paper's two lines written out in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from small_training import Net, crash_after_epoch, training
from torch import Tensor, nn

from mri_alm import AugmentedLagrangian
from mri_alm.alm.losses import BinaryCrossEntropy
from mri_alm.alm.schedule import MuSchedule
from mri_alm.errors import InputError
from mri_alm.training.engine import IndexedTrainer
from mri_alm.training.sharpness import SharpnessAware


def one_step(
    network: nn.Module, image: Tensor, label: Tensor, *, radius: float, mu: float = 0.0, rate: float = 1.0
) -> Any:
    """The trainer, after one batch by plain gradient descent."""
    batch = {"image": image, "label": label, "index": torch.arange(len(label))}
    trainer = IndexedTrainer(
        sam_radius=radius,
        max_epochs=1,
        device=torch.device("cpu"),
        train_data_loader=[batch],
        network=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=rate),
        loss_function=AugmentedLagrangian(BinaryCrossEntropy(), len(label), mu=mu),
        decollate=False,
    )
    trainer.run()
    return trainer


def case() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(6, 3, generator=generator), torch.tensor([[1.0], [0.0], [0.0], [1.0], [0.0], [0.0]])


def test_one_weight_by_hand() -> None:
    """One positive at x = 1, weight 0: the gradient is -1/2, so the point nearby is -0.2, whose gradient is taken."""
    network = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(network.weight)
    one_step(network, torch.ones(1, 1), torch.ones(1, 1), radius=0.2)
    assert network.weight.item() == pytest.approx(1 - 1 / (1 + math.exp(0.2)), abs=1e-7)  # 0.5498; plain: 0.5


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_a_step_is_that_of_the_paper(mu: float) -> None:
    """Both terms of the loss, written out: BCE, and the hinge of margin 0.25 on the sigmoid, all pairs of the batch."""
    torch.manual_seed(0)
    network = Net()
    image, label = case()
    weights = [weight.detach().double() for weight in network.parameters()]

    def gradient(at: list[Tensor]) -> list[Tensor]:
        at = [weight.clone().requires_grad_() for weight in at]
        logits = image.double() @ at[0].T + at[1]
        loss = -(label * nn.functional.logsigmoid(logits) + (1 - label) * nn.functional.logsigmoid(-logits)).mean()
        score, positive = logits.sigmoid().flatten(), label.flatten() == 1
        q = (0.25 - score[positive, None] + score[None, ~positive]).relu().sum(1)
        return list(torch.autograd.grad(loss + mu * (q**2).sum() / (2 * 2 * 4), at))

    first = gradient(weights)
    norm = math.sqrt(sum(float((part**2).sum()) for part in first))
    worse = [weight + 0.3 * part / norm for weight, part in zip(weights, first, strict=True)]
    expected = [weight - 2.0 * part for weight, part in zip(weights, gradient(worse), strict=True)]
    one_step(network, image, label, radius=0.3, mu=mu, rate=2.0)
    for weight, value in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.detach().double(), value, rtol=1e-5, atol=1e-6)


def test_multipliers_figures_and_batch_statistics_are_those_of_the_first_pass() -> None:
    found = []
    for radius in (0.0, 0.5):
        torch.manual_seed(0)
        network = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        trainer = one_step(network, *case(), radius=radius, mu=0.7)
        objective: AugmentedLagrangian = trainer.loss_function
        found.append((network, objective.multipliers.clone(), objective.end_epoch(0.5), trainer.state.output["loss"]))
        assert objective.training
    (plain, *one), (sharp, *two) = found
    assert one[0].count_nonzero() == 2
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    torch.testing.assert_close(dict(plain[0].named_buffers()), dict(sharp[0].named_buffers()), rtol=0, atol=0)
    assert plain[0].track_running_stats
    assert sharp[0].track_running_stats
    assert not torch.equal(plain[1].weight, sharp[1].weight)


def test_without_a_gradient_nothing_moves() -> None:
    network = nn.Linear(3, 1)
    before = [weight.detach().clone() for weight in network.parameters()]
    one_step(network, torch.zeros(2, 3), torch.tensor([[1.0], [0.0]]), radius=0.5, rate=0.0)
    assert all(torch.equal(weight, old) for weight, old in zip(network.parameters(), before, strict=True))
    nn.init.constant_(network.bias, 0.0)
    one_step(network, torch.zeros(2, 3), torch.tensor([[1.0], [0.0]]), radius=0.5)  # its gradient is exactly 0
    assert network.bias.item() == 0


@pytest.mark.filterwarnings("ignore:.*GradScaler:FutureWarning", "ignore:.*CUDA is not available:UserWarning")
def test_a_scaled_gradient_moves_as_far_and_an_infinite_one_moves_nothing(tmp_path: Path) -> None:
    weights = []
    for scaled in (False, True):
        trainer, _ = training(tmp_path / str(scaled), 0.6)
        SharpnessAware(0.3, trainer.loss_function).attach(trainer)
        if scaled:
            trainer.amp = True
            scaler = torch.amp.GradScaler("cpu")  # MONAI's is for CUDA only
            trainer.add_event_handler(Events.STARTED, lambda: setattr(trainer, "scaler", scaler))  # noqa: B023
        trainer.run()
        weights.append(trainer.network.linear.weight.detach().clone())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
    before = trainer.network.linear.weight.detach().clone()
    trainer.network.linear.weight.register_hook(lambda gradient: gradient / 0)
    scale = scaler.get_scale()
    trainer._iteration(trainer, trainer.state.batch)
    assert scaler.get_scale() < scale
    assert torch.equal(trainer.network.linear.weight, before)


def test_a_run_broken_off_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    def sharp(folder: str) -> Any:
        trainer, _ = training(tmp_path / folder, 0.6, 0.7, 0.8)
        SharpnessAware(0.3, trainer.loss_function).attach(trainer)
        return trainer

    unbroken, broken = sharp("unbroken"), sharp("broken")
    unbroken.run()
    with crash_after_epoch(2):
        broken.run()
    again = sharp("broken")
    again.run()
    assert torch.equal(unbroken.network.linear.weight, again.network.linear.weight)
    assert torch.equal(unbroken.loss_function.multipliers, again.loss_function.multipliers)


@pytest.mark.parametrize("radius", [-0.1, math.inf, math.nan, True])
def test_a_radius_that_is_none_is_refused(radius: float) -> None:
    with pytest.raises(InputError, match=r"^sam_radius must be 0 \(off\) or a positive number"):
        one_step(nn.Linear(3, 1), *case(), radius=radius)


@pytest.mark.parametrize("options", [{"schedule": MuSchedule(gradient_cap=0.5)}, {"negative_bank": 8}])
def test_what_would_treat_both_passes_differently_is_refused(options: dict[str, Any]) -> None:
    objective = AugmentedLagrangian(BinaryCrossEntropy(), 6, **options)
    with pytest.raises(InputError, match="sam_radius works with neither gradient_cap nor negative_bank"):
        SharpnessAware(0.1, objective)
