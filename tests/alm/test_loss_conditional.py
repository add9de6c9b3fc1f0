"""Loss-conditional training: what the last layer hears in training, and that nothing of it is left elsewhere."""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mri_alm.alm import AugmentedLagrangian, LossConditional, RankingConstraint, VectorScaling
from mri_alm.alm.losses_multiclass import BinaryLDAM
from mri_alm.cifar import resnet32
from mri_alm.errors import InputError
from mri_alm.networks import OneBranchCNN, in_parts

LABEL = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])


class Scorer(nn.Module):
    """Three features of a number, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.path, self.head = nn.Linear(1, 3), nn.Linear(3, 1)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.path(image)))
        return logits


def made(seed: int = 0, **options: Any) -> tuple[Scorer, LossConditional, Tensor]:
    torch.manual_seed(seed)
    network = Scorer()
    return network, LossConditional((9, 1), network, **options), torch.randn(5, 1)


def test_a_step_by_hand() -> None:
    """Features times 1 + a(tau) - a(tau0), plus b(tau) - b(tau0), and the VS loss of tau."""
    network, loss, image = made(tau=0.5, gamma=0.3)
    loss.drawn.fill_(2.4)
    first, _, last = loss.film
    told = [torch.relu(first.weight[:, 0] * tau / 3 + first.bias) @ last.weight.T + last.bias for tau in (2.4, 0.5)]
    factor, summand = (told[0] - told[1])[:3], (told[0] - told[1])[3:]
    features = torch.tanh(network.path(image)) * (1 + factor) + summand
    expected = (features @ network.head.weight.T + network.head.bias)[:, 0]
    logits = network(image)[:, 0]
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(loss(logits, LABEL), VectorScaling((9, 1), tau=2.4, gamma=0.3)(expected, LABEL))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_only_a_step_of_training_hears_tau(*, trained: bool, gradients: bool) -> None:
    """Network and loss agree: both of the step's tau in training mode with gradients, else both plain."""
    network, loss, image = made(tau=0.5)
    loss.drawn.fill_(2.9)
    plain = Scorer()
    plain.load_state_dict(network.state_dict())  # no other weights than the plain network's
    with torch.set_grad_enabled(gradients):
        logits = network.train(trained)(image)[:, 0]
        tau = 2.9 if trained and gradients else 0.5
        assert torch.equal(logits, plain(image)[:, 0]) == (tau == 0.5)
        torch.testing.assert_close(loss(logits, LABEL), VectorScaling((9, 1), tau=tau, gamma=0.2)(logits, LABEL))
    assert torch.equal(loss(logits.detach(), LABEL), VectorScaling((9, 1), tau=0.5, gamma=0.2)(logits, LABEL))


def test_a_step_of_the_tau_that_is_kept_is_plain() -> None:
    network, loss, image = made(tau=0.5)
    loss.drawn.fill_(0.5)
    assert torch.equal(network.train()(image), network.eval()(image))


def test_every_step_has_its_own_tau_of_the_whole_range() -> None:
    network, loss, image = made()
    objective = AugmentedLagrangian(loss, 5, mu=0.1)
    drawn = []
    for _ in range(2000):
        drawn.append(loss.drawn.item())
        objective.dual_step()
    assert 0 <= min(drawn) < 0.01
    assert 2.99 < max(drawn) < 3
    assert sum(drawn) / 2000 == pytest.approx(1.5, abs=4 * 3 / math.sqrt(12 * 2000))
    first = network(image)
    assert torch.equal(network(image), first)  # of one step: the same, however often
    objective.dual_step(skip=True)
    assert not torch.equal(network(image), first)
    assert "base.drawn" in objective.state_dict()  # so that a run that goes on has the next step's


def test_the_small_network_learns_and_the_same_seed_repeats() -> None:
    def trained() -> list[Tensor]:
        network, loss, image = made(3)
        objective = AugmentedLagrangian(loss, 5, mu=0.1)
        before = deepcopy(loss.film)
        optimizer = torch.optim.Adam([*network.parameters(), *objective.parameters()], 0.01)
        for _ in range(5):
            optimizer.zero_grad()
            objective(network(image), LABEL, torch.arange(5)).backward()
            optimizer.step()
            objective.dual_step()
        weights = [*loss.film.parameters()]
        assert not any(torch.equal(one, other) for one, other in zip(weights[:-1], before.parameters(), strict=False))
        return [weight.detach() for weight in (*network.parameters(), *weights)]

    for one, other in zip(trained(), trained(), strict=True):
        assert torch.equal(one, other)


def test_parts_of_a_batch_hear_the_same() -> None:
    gradients = []
    for size in (None, 2):
        network, loss, image = made()
        logits = in_parts(network, image, size) if size else network(image)
        loss(logits[:, 0], LABEL).backward()
        weights = (*network.parameters(), *loss.film.parameters())
        gradients.append([weight.grad for weight in weights])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_second_pass_of_the_step_has_its_tau() -> None:
    """Of sharpness-aware training, for which the objective does not count as being trained."""
    network, loss, image = made()
    objective = AugmentedLagrangian(loss, 5, mu=0)
    found = objective(network(image), LABEL, torch.arange(5))
    objective.eval()
    assert torch.equal(objective(network(image), LABEL, torch.arange(5)), found)


def test_a_network_hears_its_last_loss_alone_and_the_first_refuses() -> None:
    network, first, image = made()
    told = network(image)
    second = LossConditional((9, 1), network)
    second.drawn.fill_(second.tau)
    plain = network.eval()(image)
    assert torch.equal(network.train()(image), plain)  # nothing of the first, nor of the second at its own tau
    assert not torch.equal(told, plain)
    first.draw()
    with pytest.raises(InputError, match=r"^No network heard of this step's tau"):
        first(network(image)[:, 0], LABEL)


def test_copies_are_plain_and_a_copied_loss_refuses() -> None:
    network, loss, image = made()
    loss.drawn.fill_(2.9)
    plain = network.eval()(image)
    assert torch.equal(deepcopy(network).train()(image), plain)
    copied_network, copied_loss = deepcopy((network.train(), loss))
    copied_loss.draw()
    with pytest.raises(InputError, match=r"^No network heard of this step's tau"):
        copied_loss(copied_network(image)[:, 0], LABEL)


def test_a_layer_that_is_never_called_is_refused() -> None:
    class Aside(Scorer):
        def forward(self, image: Tensor) -> Tensor:
            return nn.functional.linear(self.path(image), self.head.weight)

    network = Aside()
    loss = LossConditional((9, 1), network)
    with pytest.raises(InputError, match=r"its layer head was not called"):
        loss(network(torch.zeros(5, 1))[:, 0], LABEL)


def test_a_loss_around_it_draws_too() -> None:
    loss = made()[1]
    objective = AugmentedLagrangian(nn.Sequential(loss), 5, mu=0)
    before = loss.drawn.item()
    objective.dual_step()
    assert loss.drawn.item() != before
    assert objective.conditional == [loss]


def test_under_autocast_tau_is_heard_in_full_precision() -> None:
    network, loss, _ = made()
    features = torch.randn(5, 3, dtype=torch.bfloat16)
    exact = loss._tell(network.head, (features.float(),))
    with torch.autocast("cpu", torch.bfloat16):
        heard = loss._tell(network.head, (features,))
    assert heard is not None
    assert exact is not None
    assert heard.dtype == torch.bfloat16
    assert torch.equal(heard, exact.bfloat16())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossConditional((9, 1), nn.Linear(2, 1)), r"with the name head: Linear has none\. Choose another"),
        (lambda: LossConditional((9, 1), OneBranchCNN(cosine_scale=30.0)), "with the name head: OneBranchCNN has none"),
        (lambda: LossConditional((9, 1), resnet32(0.25, outputs=2)), "with the name head: CifarResNet has none"),
        (lambda: LossConditional((9, 1), Scorer(), tau=3.5), r"draws tau from 0 to 3\.0, so it cannot keep 3\.5"),
        (lambda: LossConditional((9, 1), Scorer(), tau=0, largest=0), "draws tau from 0 to 0, so it cannot keep 0"),
        (lambda: LossConditional((9, 1), Scorer(), largest=math.inf), "largest must be a finite number >= 0, got inf"),
        (lambda: LossConditional((9, 1), Scorer(), tau=-1), "tau must be a finite number >= 0, got -1"),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_earlier_negatives_are_refused() -> None:
    with pytest.raises(InputError, match=r"^negative_bank would compare scores of steps with another tau"):
        AugmentedLagrangian(made()[1], 5, negative_bank=8, constraint=RankingConstraint(normalisation="mean"))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mri_alm.alm.losses.world_size", lambda: 2)
    with pytest.raises(InputError, match=r"^Loss-conditional training is for one process"):
        made()


def test_other_losses_draw_nothing() -> None:
    objective = AugmentedLagrangian(BinaryLDAM((9, 1)), 5, mu=0)
    before = torch.get_rng_state()
    objective.dual_step()
    assert torch.equal(torch.get_rng_state(), before)
