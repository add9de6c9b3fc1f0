import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.bundle import ConfigParser
from monai.losses import AUCMLoss
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from mri_alm.alm import losses, losses_monai, losses_multiclass
from mri_alm.alm.losses import (
    AsymmetricFocal,
    AsymmetricMargin,
    BinaryCrossEntropy,
    ClassBalancedBinaryCrossEntropy,
    LossConditional,
    MiniBatchAUC,
    PartialAUC,
    SmoothedBinaryCrossEntropy,
    SymmetricFocal,
    SymmetricMargin,
    VectorScaling,
    WeightedBinaryCrossEntropy,
    class_balanced_weights,
)
from mri_alm.alm.losses_monai import AUCMargin
from mri_alm.alm.losses_multiclass import (
    LDAM,
    BinaryLDAM,
    ClassBalancedCrossEntropy,
    CrossEntropy,
    MulticlassAsymmetricFocal,
    MulticlassAsymmetricMargin,
    MulticlassFocal,
    MulticlassMargin,
)
from mri_alm.errors import InputError
from mri_alm.networks import CosineContrast, NormalizedLinear, OneBranchCNN

PARTS = Path(__file__).parents[2] / "configs" / "parts" / "losses.json"
COUNTS = (2025, 20)
COUNTS3 = (900, 300, 20)


def conditional(tau: float, gamma: float) -> LossConditional:
    """Of a network that is evaluated, so that it is one function, that of tau; see test_loss_conditional.py."""
    network = OneBranchCNN()
    loss = LossConditional(COUNTS, network, tau=tau, gamma=gamma)
    network.eval()(torch.zeros(1, 1, 8, 8, 8))
    return loss


BINARY: dict[str, nn.Module] = {
    "bce": BinaryCrossEntropy(),
    "w_bce": WeightedBinaryCrossEntropy(8.0),
    "cb_bce": ClassBalancedBinaryCrossEntropy(COUNTS, 0.99),
    "s_fl": SymmetricFocal(0.5),
    "a_fl": AsymmetricFocal(0.5),
    "s_ml": SymmetricMargin(4.0),
    "a_ml": AsymmetricMargin(4.0),
    "mbauc": MiniBatchAUC(),
    "pauc": PartialAUC(0.3),
    "ldam": BinaryLDAM(COUNTS),
    "aucm": AUCMargin(),
    "la": VectorScaling(COUNTS),
    "vs": VectorScaling(COUNTS, gamma=0.2),
    "lct": conditional(1.0, 0.2),
    "ls": SmoothedBinaryCrossEntropy(),
    "s_fl_offset": SymmetricFocal(0.5, log_offset=1e-4),
    "a_fl_offset": AsymmetricFocal(0.5, log_offset=1e-4),
    "s_ml_offset": SymmetricMargin(4.0, log_offset=1e-4),
    "a_ml_offset": AsymmetricMargin(4.0, log_offset=1e-4),
}
MULTICLASS: dict[str, nn.Module] = {
    "ce": CrossEntropy(),
    "cb_ce": ClassBalancedCrossEntropy(COUNTS3, 0.99),
    "fl": MulticlassFocal(0.5),
    "a_fl": MulticlassAsymmetricFocal(0.5, [2]),
    "s_lm": MulticlassMargin(4.0),
    "a_lm": MulticlassAsymmetricMargin(4.0, [2]),
    "ldam": LDAM(COUNTS3),
}
EVERY = [pytest.param(loss, 0, id=name) for name, loss in BINARY.items()] + [
    pytest.param(loss, 3, id=f"multiclass_{name}") for name, loss in MULTICLASS.items()
]


def batch(classes: int, size: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits (B,) and labels for ``classes`` 0, else (B, C); every class occurs."""
    shape = (size, classes) if classes else (size,)
    logits = 3 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return logits.to(dtype), torch.arange(size) % max(classes, 2)


def nll(z: float) -> float:
    """-log sigmoid(z), for moderate z."""
    return math.log1p(math.exp(-z))


def value(loss: nn.Module, logits: object, label: list[int]) -> float:
    result: float = loss(torch.tensor(logits, dtype=torch.float64), torch.tensor(label)).item()
    return result


# --- Checks every loss passes ---------------------------------------------------------------------------------------


def test_the_table_is_complete() -> None:
    tested = {type(loss) for loss in (*BINARY.values(), *MULTICLASS.values())}
    public = {
        value
        for module in (losses, losses_multiclass, losses_monai)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    }
    assert tested == public


@pytest.mark.parametrize(("loss", "classes"), EVERY)
def test_gradient_is_right(loss: nn.Module, classes: int) -> None:
    logits, label = batch(classes)
    assert torch.autograd.gradcheck(lambda z: loss(z, label), logits.requires_grad_())


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize(("loss", "classes"), EVERY)
def test_scalar_of_the_promised_type(loss: nn.Module, classes: int, given: torch.dtype, result: torch.dtype) -> None:
    logits, label = batch(classes, dtype=given)
    output = loss(logits.requires_grad_(), label)
    assert output.shape == ()
    assert output.dtype == result
    assert output.item() == pytest.approx(loss(logits.double(), label).item(), rel=1e-5)
    output.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == given
    assert logits.grad.isfinite().all()
    assert logits.grad.any()


@pytest.mark.parametrize("label_type", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize(("loss", "classes"), EVERY)
def test_any_integer_label(loss: nn.Module, classes: int, label_type: torch.dtype) -> None:
    logits, label = batch(classes)
    assert torch.equal(loss(logits, label.to(label_type)), loss(logits, label))


@pytest.mark.parametrize("size", [80.0, 1000.0])
@pytest.mark.parametrize(("loss", "classes"), EVERY)
def test_finite_in_the_tails(loss: nn.Module, classes: int, size: float) -> None:
    if classes:
        logits = size * torch.cat([torch.eye(3), -torch.eye(3), torch.zeros(1, 3), torch.ones(1, 3)])
        logits, label = logits.repeat(3, 1), torch.arange(3).repeat_interleave(8)
    else:
        logits, label = torch.tensor([size, -size, 0, size, -size, 0]), torch.tensor([1, 1, 1, 0, 0, 0])
    exact = loss(logits.double(), label)
    output = loss(logits.requires_grad_(), label)
    output.backward()
    assert output.item() == pytest.approx(exact.item(), rel=1e-6)
    assert output.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


# A constant inside the logarithm, as in the authors' code, kills the gradient; so does a surrogate of probabilities.
PULLED = [case for case in EVERY if case.id not in ("aucm", "pauc") and not str(case.id).endswith("_offset")]


@pytest.mark.parametrize(("loss", "classes"), PULLED)
def test_badly_wrong_samples_are_still_pulled(loss: nn.Module, classes: int) -> None:
    if classes:
        logits, label = 80 * torch.eye(3).roll(1, 1), torch.arange(3)
    else:
        logits, label = torch.tensor([-80.0, 80.0]), torch.tensor([1, 0])
    loss(logits.requires_grad_(), label).backward()
    assert logits.grad is not None
    pull = logits.grad.gather(1, label.unsqueeze(1)) if classes else logits.grad * torch.tensor([1.0, -1.0])
    assert (pull < -1e-3).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("loss", "classes"), EVERY)
def test_cuda_gives_the_value_and_gradient_of_the_cpu(loss: nn.Module, classes: int) -> None:
    results = []
    for device in ("cpu", "cuda"):
        logits, label = batch(classes)
        leaf = logits.to(device).requires_grad_()
        value_there = deepcopy(loss).to(device)(leaf, label.to(device))
        value_there.backward()
        assert leaf.grad is not None
        results.append((value_there.detach().cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("loss", "classes"), EVERY)
def test_order_of_the_batch_does_not_matter(loss: nn.Module, classes: int) -> None:
    logits, label = batch(classes)
    torch.testing.assert_close(loss(logits.flip(0), label.flip(0)), loss(logits, label))


@pytest.mark.parametrize(("loss", "classes"), EVERY)
def test_wrong_shapes_are_refused_and_not_broadcast(loss: nn.Module, classes: int) -> None:
    logits, label = batch(classes)
    for bad_logits, bad_label in [(logits.unsqueeze(-1), label), (logits, label.unsqueeze(-1)), (logits[:-1], label)]:
        with pytest.raises(InputError, match=r"need logits \(B"):
            loss(bad_logits, bad_label)


# --- Values worked out by hand --------------------------------------------------------------------------------------

LOG3 = math.log(3)  # sigmoid(log 3) = 3/4: losses are log(4/3) when right, log 4 when wrong


@pytest.mark.parametrize(
    ("loss", "positive", "negative"),
    [
        (BinaryCrossEntropy(), math.log(4 / 3), math.log(4)),
        (WeightedBinaryCrossEntropy(5), 5 * math.log(4 / 3), math.log(4)),
        (SymmetricFocal(2), math.log(4 / 3) / 16, math.log(4) * 9 / 16),
        (AsymmetricFocal(2), math.log(4 / 3), math.log(4) * 9 / 16),
        (SymmetricMargin(LOG3), math.log(2), math.log(10)),  # logit 0 for the positive, log 9 for the negative
        (AsymmetricMargin(LOG3), math.log(2), math.log(4)),
        (ClassBalancedBinaryCrossEntropy((2, 1), 0.5), 1.2 * math.log(4 / 3), 0.8 * math.log(4)),  # 1/1.5 against 1
        (ClassBalancedBinaryCrossEntropy((2, 1), 0.5, normalise=False), math.log(4 / 3), math.log(4) / 1.5),
    ],
)
def test_binary_values(loss: nn.Module, positive: float, negative: float) -> None:
    assert value(loss, [LOG3], [1]) == pytest.approx(positive, rel=1e-14)
    assert value(loss, [LOG3], [0]) == pytest.approx(negative, rel=1e-14)
    assert value(loss, [LOG3] * 4, [1, 0, 0, 0]) == pytest.approx((positive + 3 * negative) / 4, rel=1e-14)


# Softmax of (log 2, 0, log 5) is (2, 1, 5) / 8; the margin log 2 halves the numerator of the true class.
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (CrossEntropy(), [math.log(4), math.log(8), math.log(8 / 5)]),
        (MulticlassFocal(2), [math.log(4) * 9 / 16, math.log(8) * 49 / 64, math.log(8 / 5) * 9 / 64]),
        (MulticlassAsymmetricFocal(2, [2, 0]), [math.log(4), math.log(8) * 49 / 64, math.log(8 / 5)]),
        (MulticlassMargin(math.log(2)), [math.log(7), math.log(15), math.log(11 / 5)]),
        (MulticlassAsymmetricMargin(math.log(2), [2, 0]), [math.log(7), math.log(8), math.log(11 / 5)]),
        (
            ClassBalancedCrossEntropy((1, 2, 2), 0.5),
            [9 / 7 * math.log(4), 6 / 7 * math.log(8), 6 / 7 * math.log(8 / 5)],
        ),
        (LDAM((16, 16, 1), max_margin=2 * math.log(2), scale=1), [math.log(7), math.log(15), math.log(17 / 5)]),
    ],
)
def test_multiclass_values(loss: nn.Module, expected: list[float]) -> None:
    logits = [math.log(2), 0.0, math.log(5)]
    for label, one in enumerate(expected):
        assert value(loss, [logits], [label]) == pytest.approx(one, rel=1e-13)
    assert value(loss, [logits] * 3, [0, 1, 2]) == pytest.approx(sum(expected) / 3, rel=1e-13)


def test_auc_loss_is_the_mean_over_pairs() -> None:
    logits, label = batch(0, 15)
    gaps = [1 - (p - n) for p in logits[label == 1].tolist() for n in logits[label == 0].tolist()]
    assert MiniBatchAUC()(logits, label).item() == pytest.approx(sum(g * g for g in gaps) / len(gaps), rel=1e-13)
    # By hand: gaps 1 - (2 - 1) = 0 and 1 - (2 - 5) = 4.
    assert value(MiniBatchAUC(), [2.0, 1.0, 5.0], [1, 0, 0]) == 8.0


@pytest.mark.parametrize("label", [0, 1])
def test_auc_loss_of_one_class_is_a_zero_tied_to_the_graph(label: int) -> None:
    logits = torch.tensor([2.0, -1.0, 3.0], requires_grad=True)
    loss = MiniBatchAUC()(logits, torch.full((3,), label))
    assert loss.item() == 0
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [0, 0, 0]


def test_auc_loss_solves_the_inner_problem_of_monai() -> None:
    from monai.losses import AUCMLoss

    # The min over a, b and max over alpha of MONAI's min-max form, reached at the class means and their distance.
    logits, label = batch(0, 15)
    peer = AUCMLoss(version="v2").double()
    positive, negative = logits[label == 1].mean(), logits[label == 0].mean()
    with torch.no_grad():
        peer.a.copy_(positive)
        peer.b.copy_(negative)
        peer.alpha.copy_(1 + negative - positive)
    torch.testing.assert_close(MiniBatchAUC()(logits, label), peer(logits.unsqueeze(1), label.unsqueeze(1)).detach())


@given(seed=st.integers(0, 2**32 - 1), worst=st.integers(1, 8))
def test_partial_auc_loss_is_the_minimum_over_the_variable_of_cvar(seed: int, worst: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=11) * 2)
    label = torch.tensor([1] * 3 + [0] * 8)
    p = logits.sigmoid().numpy()
    pairs = np.maximum(1 - p[:3, None] + p[None, 3:], 0) ** 2
    share = worst / 8
    # CVaR of one positive: least of s + mean((pair - s)+) / share, piecewise linear with kinks at the pairs.
    cvar = [min(s + np.maximum(row - s, 0).mean() / share for s in row) for row in pairs]
    assert PartialAUC(share)(logits, label).item() == pytest.approx(np.mean(cvar), rel=1e-12)


@pytest.mark.parametrize("label", [0, 1])
def test_partial_auc_loss_of_one_class_is_a_zero_tied_to_the_graph(label: int) -> None:
    logits = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    loss = PartialAUC()(logits, torch.full((3,), label))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(3))  # type: ignore[arg-type]


def test_class_balanced_weights() -> None:
    assert class_balanced_weights(COUNTS, 0.99) == pytest.approx([0.308, 1.692], abs=5e-4)
    assert class_balanced_weights(COUNTS, 0.99, normalise=False) == pytest.approx([0.0100, 0.0549], abs=5e-5)
    assert class_balanced_weights(COUNTS3, 0.999) == pytest.approx(
        [3 * w / (1 / 593.6 + 1 / 259.3 + 1 / 19.81) for w in (1 / 593.6, 1 / 259.3, 1 / 19.81)], rel=2e-3
    )
    assert class_balanced_weights(COUNTS3, 0) == [1, 1, 1]


def test_ldam_margins() -> None:
    assert LDAM(COUNTS).margins.tolist() == pytest.approx([0.1576236, 0.5], abs=5e-8)


def test_ldam_is_bounded_by_its_scale() -> None:
    # The scale multiplies the lowered cosine: 30 (1 - 0.5) = 15 against 30 (-1).
    assert value(LDAM(COUNTS), [[-1.0, 1.0]], [1]) == pytest.approx(nll(45), rel=1e-9)
    assert value(LDAM(COUNTS), [[0.0, 0.0]], [1]) == pytest.approx(nll(-15), rel=1e-14)


def test_normalised_head_gives_cosines() -> None:
    head = NormalizedLinear(3, 2).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[5.0, 0, 0], [0, 3, 4]]))
    features = torch.tensor([[2.0, 0, 0], [0, 0, -7], [0, 0, 0], [1, 1, 1]], dtype=torch.float64)
    expected = [[1, 0], [0, -0.8], [0, 0], [1 / math.sqrt(3), 1.4 / math.sqrt(3)]]
    torch.testing.assert_close(head(features), torch.tensor(expected, dtype=torch.float64))
    assert torch.autograd.gradcheck(head, features[[0, 1, 3]].requires_grad_())


# --- Identities -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        WeightedBinaryCrossEntropy(1),
        ClassBalancedBinaryCrossEntropy(COUNTS, 0),
        ClassBalancedBinaryCrossEntropy((50, 50), 0.99),
        SymmetricFocal(0),
        AsymmetricFocal(0),
        SymmetricMargin(0),
        AsymmetricMargin(0),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_neutral_parameters_give_bce(loss: nn.Module) -> None:
    logits, label = batch(0)
    torch.testing.assert_close(loss(logits, label), binary_cross_entropy_with_logits(logits, label.double()))


@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        ClassBalancedCrossEntropy(COUNTS3, 0),
        MulticlassFocal(0),
        MulticlassAsymmetricFocal(0, [1]),
        MulticlassAsymmetricFocal(2, [0, 1, 2]),
        MulticlassMargin(0),
        MulticlassAsymmetricMargin(0, [1]),
        LDAM(COUNTS3, max_margin=0, scale=1),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_neutral_parameters_give_ce(loss: nn.Module) -> None:
    logits, label = batch(3)
    torch.testing.assert_close(loss(logits, label), cross_entropy(logits, label))


@pytest.mark.parametrize(
    ("binary", "multiclass"),
    [
        (BinaryCrossEntropy(), CrossEntropy()),
        (SymmetricFocal(1.5), MulticlassFocal(1.5)),
        (AsymmetricFocal(1.5), MulticlassAsymmetricFocal(1.5, [1])),
        (SymmetricMargin(2), MulticlassMargin(2)),
        (AsymmetricMargin(2), MulticlassAsymmetricMargin(2, [1])),
        (ClassBalancedBinaryCrossEntropy(COUNTS, 0.99), ClassBalancedCrossEntropy(COUNTS, 0.99)),
        (SymmetricMargin(0.5), LDAM((7, 7), scale=1)),
    ],
)
def test_two_columns_equal_the_binary_loss_of_their_difference(binary: nn.Module, multiclass: nn.Module) -> None:
    logits, label = batch(2)
    torch.testing.assert_close(multiclass(logits, label), binary(logits[:, 1] - logits[:, 0], label))


def test_class_balancing_differs_from_torch_only_in_the_divisor() -> None:
    logits, label = batch(3)
    weights = torch.tensor(class_balanced_weights(COUNTS3, 0.99), dtype=torch.float64)
    expected = cross_entropy(logits, label, weight=weights, reduction="sum") / len(label)
    torch.testing.assert_close(ClassBalancedCrossEntropy(COUNTS3, 0.99)(logits, label), expected)


# --- Errors and configs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SymmetricFocal(-1), "gamma must be a finite number >= 0, got -1"),
        (lambda: AsymmetricFocal(math.nan), "gamma must be a finite number >= 0, got nan"),
        (lambda: SymmetricMargin(-0.5), "margin must be a finite number >= 0, got -0.5"),
        (lambda: AsymmetricMargin(math.inf), "margin must be a finite number >= 0, got inf"),
        (lambda: WeightedBinaryCrossEntropy(0), "positive_weight must be a finite number > 0, got 0"),
        (lambda: ClassBalancedBinaryCrossEntropy(COUNTS, 1), r"beta must be in \[0, 1\), got 1"),
        (lambda: ClassBalancedBinaryCrossEntropy(COUNTS3, 0.9), r"\(negatives, positives\), got 3 numbers"),
        (lambda: ClassBalancedBinaryCrossEntropy((5, 0), 0.9), r"at least one training sample per class, got \[5, 0\]"),
        (lambda: ClassBalancedCrossEntropy([], 0.9), "at least one training sample"),
        (lambda: MulticlassFocal(-1), "gamma"),
        (lambda: MulticlassAsymmetricFocal(-1, [0]), "gamma"),
        (lambda: MulticlassAsymmetricFocal(1, []), "critical must name at least one class"),
        (lambda: MulticlassMargin(-1), "margin"),
        (lambda: MulticlassAsymmetricMargin(-1, [0]), "margin"),
        (lambda: MulticlassAsymmetricMargin(1, []), "critical must name at least one class"),
        (lambda: LDAM((5, 0)), "at least one training sample"),
        (lambda: LDAM(COUNTS, max_margin=-1), "max_margin"),
        (lambda: LDAM(COUNTS, scale=0), "scale must be > 0"),
        (lambda: BinaryLDAM(COUNTS3), r"counts must be \(negatives, positives\), got 3 numbers"),
        (lambda: PartialAUC(0), r"max_fpr must be in \(0, 1\]"),
        (lambda: PartialAUC(1.5), r"max_fpr must be in \(0, 1\]"),
        (lambda: PartialAUC(margin=0), "margin > 0"),
        (lambda: SymmetricFocal(1, log_offset=-1e-4), "log_offset must be a finite number >= 0, got -0.0001"),
    ],
)
def test_bad_parameters(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()


class CountedCohort:
    """As much of a cohort as the losses ask for."""

    def counts(self, split: int) -> tuple[int, int]:
        return {3: COUNTS}[split]  # type: ignore[return-value]


KNOBS = {
    "gamma": 1.5, "margin": 0.5, "positive_weight": 8.0, "beta": 0.99, "max_margin": 0.4, "ldam_scale": 20.0,
    "only_split": 3, "max_fpr": 0.3, "log_offset": 1e-4, "normalise_weights": False, "cohort_data": CountedCohort(),
    "batch_size": 32, "train": {"positives": None}, "tau": 0.7, "vs_gamma": 0.3, "smoothing": 0.2,
    "network": OneBranchCNN(),
}  # fmt: skip
OURS = {"mri_alm": "mri_alm"}  # as the configs import it
CONFIGURED = {
    "bce": BinaryCrossEntropy(),
    "w_bce": WeightedBinaryCrossEntropy(8.0),
    "cb_bce": ClassBalancedBinaryCrossEntropy(COUNTS, 0.99, normalise=False),
    "s_fl": SymmetricFocal(1.5, log_offset=1e-4),
    "a_fl": AsymmetricFocal(1.5, log_offset=1e-4),
    "s_ml": SymmetricMargin(0.5, log_offset=1e-4),
    "a_ml": AsymmetricMargin(0.5, log_offset=1e-4),
    "ldam": BinaryLDAM(COUNTS, max_margin=0.4, scale=20),
    "mbauc": MiniBatchAUC(),
    "pauc": PartialAUC(0.3),
    "aucm": AUCMargin(),
    "la": VectorScaling(COUNTS, tau=0.7),
    "vs": VectorScaling(COUNTS, tau=0.7, gamma=0.3),
    "lct": conditional(0.7, 0.3),
    "ls": SmoothedBinaryCrossEntropy(0.2),
}


def test_every_configured_loss_is_tested() -> None:
    assert set(json.loads(PARTS.read_text(encoding="utf-8"))) == set(CONFIGURED)


@pytest.mark.parametrize("name", CONFIGURED)
def test_config_part_builds_the_loss_from_the_knobs(name: str) -> None:
    parser = ConfigParser(KNOBS | {"loss": name, "made": f"%{PARTS}::{name}"}, globals=OURS)
    parser.resolve_macro_and_relative_ids()
    loss = parser.get_parsed_content("made")
    assert type(loss) is type(CONFIGURED[name])
    logits, label = batch(0)
    assert torch.equal(loss(logits, label), CONFIGURED[name](logits, label))


@pytest.mark.parametrize(("positives", "counts"), [(8, (24, 8)), (40, (1, 40))])
@pytest.mark.parametrize(("name", "gamma"), [("la", 0.0), ("vs", 0.3), ("lct", 0.3)])
def test_losses_that_know_the_prior_take_that_of_the_batches(
    name: str, gamma: float, positives: int, counts: tuple[int, int]
) -> None:
    """More positives than a batch holds are refused by what draws them, not here."""
    parser = ConfigParser(
        KNOBS | {"train": {"positives": positives}, "loss": name, "made": f"%{PARTS}::{name}"}, globals=OURS
    )
    parser.resolve_macro_and_relative_ids()
    logits, label = batch(0)
    expected = VectorScaling(counts, tau=0.7, gamma=gamma)(logits, label)
    assert torch.equal(parser.get_parsed_content("made")(logits, label), expected)


def test_a_loss_that_is_not_asked_for_leaves_the_network_alone() -> None:
    network = OneBranchCNN()
    parser = ConfigParser(KNOBS | {"network": network, "loss": "vs", "losses": f"%{PARTS}"}, globals=OURS)
    parser.resolve_macro_and_relative_ids()
    assert parser.get_parsed_content("losses")["lct"] is None  # there for a misspelt name
    assert not hasattr(network.head, "told")


# --- The authors' offset, LDAM with one logit, MONAI's AUC-margin loss -----------------------------------------------


@pytest.mark.parametrize(
    ("loss", "z", "label", "expected"),
    [
        (SymmetricMargin(1.0, log_offset=1e-4), 0.5, 1, -math.log(1 / (1 + math.exp(0.5)) + 1e-4)),
        (AsymmetricMargin(1.0, log_offset=1e-4), 0.5, 0, -math.log(1 / (1 + math.exp(0.5)) + 1e-4)),
        (SymmetricFocal(2.0, log_offset=1e-4), 0.0, 1, -0.25 * math.log(0.5 + 1e-4)),
        (AsymmetricFocal(2.0, log_offset=1e-4), 0.0, 1, -math.log(0.5 + 1e-4)),
        (SymmetricMargin(0.0, log_offset=1e-4), -80.0, 1, -math.log(1e-4)),
    ],
)
def test_offset_inside_the_logarithm(loss: nn.Module, z: float, label: int, expected: float) -> None:
    assert value(loss, [z], [label]) == pytest.approx(expected, rel=1e-12)


def test_with_the_offset_a_badly_wrong_sample_loses_its_gradient() -> None:
    slopes = []
    for loss in (AsymmetricMargin(0.0), AsymmetricMargin(0.0, log_offset=1e-4)):
        logits = torch.tensor([-15.0], dtype=torch.float64, requires_grad=True)
        slopes.append(torch.autograd.grad(loss(logits, torch.tensor([1])), logits)[0].item())
    assert slopes == [pytest.approx(-1, abs=1e-6), pytest.approx(0, abs=0.01)]


def test_binary_ldam_is_ldam_on_two_columns() -> None:
    torch.manual_seed(0)
    features, label = torch.randn(20, 5, dtype=torch.float64), torch.arange(20) % 2
    head = CosineContrast(5, scale=20.0).double()
    one = BinaryLDAM(COUNTS, max_margin=0.4, scale=20.0)(head(features).flatten(), label)
    columns = NormalizedLinear.forward(head, features)
    two = LDAM(COUNTS, max_margin=0.4, scale=20.0)(columns, label)
    assert one.item() == pytest.approx(two.item(), rel=1e-12)
    probability = torch.softmax(20 * columns, 1)[:, 1]
    torch.testing.assert_close(head(features).sigmoid().flatten(), probability)


def test_auc_margin_is_monai_s_on_probabilities() -> None:
    logits, label = batch(0)
    ours = AUCMargin(margin=0.8)
    theirs = AUCMLoss(margin=0.8, version="v2")
    for loss in (ours.loss, theirs):
        for name, start in (("a", 0.7), ("b", 0.2), ("alpha", 0.3)):
            getattr(loss, name).data.fill_(start)
    expected = theirs(logits.sigmoid()[:, None], label.double()[:, None])
    assert ours(logits, label).item() == pytest.approx(expected.item(), rel=1e-6)


def test_auc_margin_climbs_in_alpha_and_descends_in_the_rest() -> None:
    """Descent by one optimiser reaches the saddle point, which is known: class means, and margin - their difference."""
    logits = torch.tensor([1.0, 0.5, -1.0, -2.0], dtype=torch.float64)
    label = torch.tensor([1, 1, 0, 0])
    loss = AUCMargin()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        loss(logits, label).backward()
        optimizer.step()
    score = logits.sigmoid()
    a, b = score[:2].mean().item(), score[2:].mean().item()
    assert loss.loss.a.item() == pytest.approx(a, abs=1e-4)
    assert loss.loss.b.item() == pytest.approx(b, abs=1e-4)
    assert loss.loss.alpha.item() == pytest.approx(1 - a + b, abs=1e-4)
    loss.loss.alpha.data.fill_(-1)
    loss(logits, label)
    assert loss.loss.alpha.item() == 0


# --- Opponents of the constraint --------------------------------------------------------------------------------------


def test_logit_adjustment_by_hand() -> None:
    """Three negatives to one positive, z = 0: the positive has log(1 + 3), the negative log(1 + 1/3)."""
    loss = VectorScaling((3, 1))
    logits = torch.zeros(2, dtype=torch.float64)
    assert float(loss(logits, torch.tensor([1.0, 0.0]))) == pytest.approx((math.log(4) + math.log(4 / 3)) / 2)
    z = torch.linspace(-20, 20, 9, dtype=torch.float64)
    for label in (torch.ones(9), torch.zeros(9)):
        plain = BinaryCrossEntropy()(z + 0.5 * math.log(1 / 3), label.double())
        assert float(VectorScaling((3, 1), tau=0.5)(z, label)) == pytest.approx(float(plain), rel=1e-12)


def test_vector_scaling_by_hand() -> None:
    """gamma 1/2 with counts (16, 4): positives' logits count a half; tau 2: shifted by 2 log 4."""
    loss = VectorScaling((16, 4), tau=2.0, gamma=0.5)
    z, shift = 1.6, 2 * math.log(4)
    positive = float(loss(torch.tensor([z], dtype=torch.float64), torch.ones(1)))
    negative = float(loss(torch.tensor([z], dtype=torch.float64), torch.zeros(1)))
    assert positive == pytest.approx(math.log(1 + math.exp(shift - z / 2)))
    assert negative == pytest.approx(math.log(1 + math.exp(-shift + z)))
    swapped = VectorScaling((4, 16), tau=2.0, gamma=0.5)  # the rare class is the other one
    assert float(swapped(torch.tensor([-z], dtype=torch.float64), torch.zeros(1))) == pytest.approx(positive)


@pytest.mark.parametrize("gamma", [0.0, 0.2])
def test_without_shift_and_scale_it_is_cross_entropy(gamma: float) -> None:
    z, label = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
    plain = BinaryCrossEntropy()(z, label)
    torch.testing.assert_close(VectorScaling((7, 7), tau=3.0, gamma=gamma)(z, label), plain)
    torch.testing.assert_close(VectorScaling((9, 1), tau=0.0)(z, label), plain)
    torch.testing.assert_close(SmoothedBinaryCrossEntropy(0.0)(z, label), plain)


def test_smoothed_labels_by_hand() -> None:
    """s = 0.2: a positive is 0.9 of one and 0.1 of the other, so that its best logit is log 9."""
    loss, z = SmoothedBinaryCrossEntropy(0.2), torch.tensor([1.5], dtype=torch.float64)
    expected = 0.9 * math.log(1 + math.exp(-1.5)) + 0.1 * math.log(1 + math.exp(1.5))
    assert float(loss(z, torch.ones(1))) == pytest.approx(expected)
    assert float(loss(-z, torch.zeros(1))) == pytest.approx(expected)
    best = torch.tensor([math.log(9)], dtype=torch.float64, requires_grad=True)
    loss(best, torch.ones(1)).backward()
    assert float(best.grad or 0) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VectorScaling((3, 1, 2)), r"counts must be \(negatives, positives\), got 3 numbers"),
        (lambda: VectorScaling((3, 0)), "counts must hold at least one training sample per class"),
        (lambda: VectorScaling((3, 1), tau=-1), "tau must be a finite number >= 0, got -1"),
        (lambda: VectorScaling((3, 1), gamma=math.inf), "gamma must be a finite number >= 0, got inf"),
        (lambda: SmoothedBinaryCrossEntropy(1), r"smoothing must be in \[0, 1\), got 1"),
        (lambda: SmoothedBinaryCrossEntropy(-0.1), r"smoothing must be in \[0, 1\), got -0.1"),
    ],
)
def test_opponents_refuse_what_cannot_be_meant(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
