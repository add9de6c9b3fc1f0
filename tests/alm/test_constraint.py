import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mri_alm.alm import constraint
from mri_alm.alm.constraint import mirrored_violation, multiclass_violation, pair_violation, ranking_violation
from mri_alm.errors import InputError

PATHS = {"broadcast": 10**12, "sorted": 0}  # the number of pairs up to which the matrix is formed


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(constraint, "_BROADCAST_PAIRS", PATHS[request.param])
    return request.param


def on_path(path: str, function: Callable[[], Tensor]) -> Tensor:
    """For hypothesis, which does not mix with function-scoped fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constraint, "_BROADCAST_PAIRS", PATHS[path])
        return function()


def value_and_gradient(path: str, score: Tensor, label: Tensor, delta: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    leaf = score.clone().requires_grad_()

    def run() -> Tensor:
        q = ranking_violation(leaf, label, delta)
        (q * weight).sum().backward()
        return q.detach()

    q = on_path(path, run)
    assert leaf.grad is not None
    return q, leaf.grad


def exact_violation(score: Tensor, label: Tensor, delta: float) -> list[Fraction]:
    """q_j by a double loop in rational arithmetic on the very numbers the tensors hold."""
    positive = [Fraction(value) for value in score[label == 1].tolist()]
    negative = [Fraction(value) for value in score[label == 0].tolist()]
    zero, gap = Fraction(0), Fraction(delta)
    return [sum((max(zero, gap - (p - n)) for n in negative), zero) for p in positive]


def exact_gradient(score: Tensor, label: Tensor, delta: float, weight: Tensor) -> list[Fraction]:
    """Gradient of sum_j weight_j q_j: a pair acts where its violation is strictly positive."""
    values, labels = [Fraction(value) for value in score.tolist()], label.tolist()
    gradient = [Fraction(0)] * len(labels)
    upstream = iter(weight.tolist())
    for j in (j for j, y in enumerate(labels) if y == 1):
        w = Fraction(next(upstream))
        for k in (k for k, y in enumerate(labels) if y == 0):
            if Fraction(delta) - (values[j] - values[k]) > 0:
                gradient[j] -= w
                gradient[k] += w
    return gradient


def random_batch(
    seed: int, positives: int, negatives: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    label = (torch.arange(positives + negatives) < positives).long()
    label = label[torch.randperm(len(label), generator=generator)]
    return torch.randn(len(label), generator=generator, dtype=torch.float64).to(dtype), label


# Eighths are exact in binary, so ties and margins are hit exactly and every sum below is exact.
eighth = st.integers(-32, 32).map(lambda i: i / 8)
margin = st.integers(0, 24).map(lambda i: i / 8)


@st.composite
def batches(draw: st.DrawFn, value: st.SearchStrategy[float] = eighth) -> tuple[Tensor, Tensor]:
    rows = draw(st.lists(st.tuples(value, st.integers(0, 1)), max_size=24))
    return torch.tensor([s for s, _ in rows], dtype=torch.float64), torch.tensor(
        [y for _, y in rows], dtype=torch.int64
    )


# --- The paper's examples -------------------------------------------------------------------------------------------

TOY = "NNPNNPPNPP"  # from low to high score, in steps of D = 1
SWAP_LOW = "NNNPNPPNPP"  # the lowest positive and the negative to its right: the green box
SWAP_HIGH = "NNPNNPNPPP"  # the highest negative and the positive to its left: the red box


def toy(order: str) -> tuple[Tensor, Tensor]:
    score = torch.arange(len(order), dtype=torch.float64)
    return score, torch.tensor([1 if letter == "P" else 0 for letter in order])


def toy_cost(violation: Callable[..., Tensor], order: str, delta: float = 0) -> tuple[Fraction, Fraction]:
    """Coefficients of mu D^2 and lambda D in the cost of Eq. 4 on the toy example."""
    q = [Fraction(value) for value in violation(*toy(order), delta).flatten().tolist()]
    return sum((value**2 for value in q), Fraction(0)) / 50, sum(q, Fraction(0)) / 25


def toy_drop(violation: Callable[..., Tensor], order: str, delta: float = 0) -> tuple[Fraction, Fraction]:
    before, after = toy_cost(violation, TOY, delta), toy_cost(violation, order, delta)
    return before[0] - after[0], before[1] - after[1]


@pytest.mark.parametrize(
    ("order", "expected"), [(TOY, [8, 2, 1, 0, 0]), (SWAP_LOW, [5, 2, 1, 0, 0]), (SWAP_HIGH, [7, 1, 0, 0, 0])]
)
def test_toy_example_violations(path: str, order: str, expected: list[float]) -> None:
    assert ranking_violation(*toy(order), 0).tolist() == expected


def test_toy_example_cost(path: str) -> None:
    assert toy_cost(ranking_violation, TOY) == (Fraction(69, 50), Fraction(11, 25))


@pytest.mark.parametrize(
    ("violation", "low", "high"),
    [
        (ranking_violation, (39, 50), (19, 50)),  # prefers fewer false positives at high true-positive rates
        (mirrored_violation, (19, 50), (39, 50)),
        (pair_violation, (13, 50), (13, 50)),
    ],
)
def test_toy_example_drops(
    path: str, violation: Callable[..., Tensor], low: tuple[int, int], high: tuple[int, int]
) -> None:
    # The paper prints 11/25 for the linear part of the second swap, which is the total before any swap.
    assert toy_drop(violation, SWAP_LOW) == (Fraction(*low), Fraction(3, 25))
    assert toy_drop(violation, SWAP_HIGH) == (Fraction(*high), Fraction(3, 25))


@pytest.mark.parametrize(
    ("delta", "low", "high", "linear"), [(1, (36, 25), (3, 5), (4, 25)), (2, (5, 2), (47, 50), (1, 5))]
)
def test_toy_example_drops_with_margin(
    path: str, delta: float, low: tuple[int, int], high: tuple[int, int], linear: tuple[int, int]
) -> None:
    assert toy_drop(ranking_violation, SWAP_LOW, delta) == (Fraction(*low), Fraction(*linear))
    assert toy_drop(ranking_violation, SWAP_HIGH, delta) == (Fraction(*high), Fraction(*linear))


def test_theoretical_insights_example(path: str) -> None:
    # One positive 2 below the lowest of four negatives, one negative 2 above the highest of two positives, all other
    # neighbours 1 apart; the pair of the two mis-ranked samples, which the paper omits, contributes 9 of the 23.
    score = torch.tensor([-2.0, 5, 4, 0, 1, 2, 3, 7], dtype=torch.float64)
    label = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    q = ranking_violation(score, label, 0)
    assert q.tolist() == [23, 2, 3]
    # mu = lambda = 1: (23^2 + 2^2 + 3^2) / 30 + 28 / 15
    assert (q.square().sum() / 30 + q.sum() / 15).item() == pytest.approx(299 / 15, rel=1e-15)


def test_one_step_example(path: str) -> None:
    score = torch.tensor([0.1, 0.4, -0.3, 0.2, -1, 0.9], dtype=torch.float64, requires_grad=True)
    label = torch.tensor([1, 1, 1, 0, 0, 0])
    multiplier = torch.tensor([0.5, 1, 2], dtype=torch.float64)
    q = ranking_violation(score, label, 0.25)
    torch.testing.assert_close(q.tolist(), [7 / 5, 4 / 5, 11 / 5])
    term = 0.1 / (2 * 9) * q.square().sum() + (multiplier * q).sum() / 9
    assert term.item() == pytest.approx(784 / 1125, rel=1e-14)
    (gradient,) = torch.autograd.grad(term, score)
    expected = [-32 / 225, -6 / 25, -37 / 75, 197 / 450, 0, 197 / 450]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-14)
    assert gradient[4] == 0


# --- Against exact arithmetic, and properties -----------------------------------------------------------------------


@pytest.mark.parametrize("path_name", PATHS)
@given(batch=batches(), delta=margin)
def test_equals_double_loop_with_ties(path_name: str, batch: tuple[Tensor, Tensor], delta: float) -> None:
    score, label = batch
    weight = torch.arange(1.0, int(label.sum()) + 1, dtype=torch.float64) - 3  # both signs
    q, gradient = value_and_gradient(path_name, score, label, delta, weight)
    assert q.tolist() == exact_violation(score, label, delta)
    assert gradient.tolist() == exact_gradient(score, label, delta, weight)


@pytest.mark.parametrize("path_name", PATHS)
@given(batch=batches(st.floats(-1e3, 1e3)), delta=st.floats(0, 10))
def test_float64_is_exact_to_rounding(path_name: str, batch: tuple[Tensor, Tensor], delta: float) -> None:
    score, label = batch
    q = on_path(path_name, lambda: ranking_violation(score, label, delta))
    # The rounding of score - delta is relative to the score, not to q.
    scale = 1 + delta + score.abs().max().item() if len(score) else 1.0
    expected = [float(value) for value in exact_violation(score, label, delta)]
    assert q.tolist() == pytest.approx(expected, rel=1e-13, abs=len(score) * scale * 1e-15)


@given(batch=batches(st.floats(-1e3, 1e3)), delta=st.floats(0, 10))
def test_paths_agree(batch: tuple[Tensor, Tensor], delta: float) -> None:
    score, label = batch
    weight = torch.ones(int(label.sum()), dtype=torch.float64)
    q, gradient = value_and_gradient("broadcast", score, label, delta, weight)
    q_sorted, gradient_sorted = value_and_gradient("sorted", score, label, delta, weight)
    # Both compare the same two float64 numbers, so counts, and with integer weights gradients, are identical.
    assert torch.equal(gradient, gradient_sorted)
    torch.testing.assert_close(q_sorted, q, rtol=1e-13, atol=0)


@pytest.mark.parametrize("path_name", PATHS)
@settings(max_examples=50)
@given(batch=batches(), delta=margin, shift=st.integers(-9, 9), power=st.integers(-3, 3), data=st.data())
def test_symmetries(
    *, path_name: str, batch: tuple[Tensor, Tensor], delta: float, shift: int, power: int, data: st.DataObject
) -> None:
    score, label = batch
    order = torch.tensor(data.draw(st.permutations(range(len(label)))), dtype=torch.int64)

    def run(score: Tensor, label: Tensor, delta: float) -> Tensor:
        return on_path(path_name, lambda: ranking_violation(score, label, delta))

    q = run(score, label, delta)
    assert torch.equal(run(score + shift, label, delta), q)
    assert torch.equal(run(score * 2.0**power, label, delta * 2.0**power), q * 2.0**power)
    everywhere = torch.zeros_like(score).masked_scatter(label == 1, q)
    assert torch.equal(run(score[order], label[order], delta), everywhere[order][label[order] == 1])


@pytest.mark.parametrize("path_name", PATHS)
@settings(max_examples=50)
@given(batch=batches(), smaller=margin, larger=margin)
def test_grows_with_delta_and_is_zero_when_ranked(
    path_name: str, batch: tuple[Tensor, Tensor], smaller: float, larger: float
) -> None:
    score, label = batch
    smaller, larger = sorted((smaller, larger))
    low = on_path(path_name, lambda: ranking_violation(score, label, smaller))
    high = on_path(path_name, lambda: ranking_violation(score, label, larger))
    negatives = int((label == 0).sum())
    assert (low >= 0).all()
    assert (low <= high).all()
    assert (high - low <= negatives * (larger - smaller)).all()
    separated = score + label * (8 + larger)  # scores lie within 4 of zero
    assert on_path(path_name, lambda: ranking_violation(separated, label, larger)).sum() == 0


@pytest.mark.parametrize("path_name", PATHS)
@settings(max_examples=50)
@given(batch=batches(), delta=margin)
def test_three_forms_share_the_same_pairs(path_name: str, batch: tuple[Tensor, Tensor], delta: float) -> None:
    score, label = batch
    matrix = pair_violation(score, label, delta)
    assert matrix.shape == (int((label == 1).sum()), int((label == 0).sum()))
    assert torch.equal(on_path(path_name, lambda: ranking_violation(score, label, delta)), matrix.sum(1))
    assert torch.equal(on_path(path_name, lambda: mirrored_violation(score, label, delta)), matrix.sum(0))


def test_gradcheck(path: str) -> None:
    score, label = random_batch(0, 7, 12)
    assert torch.autograd.gradcheck(lambda s: ranking_violation(s, label, 0.3), score.requires_grad_())
    assert torch.autograd.gradcheck(lambda s: mirrored_violation(s, label, 0.3), score)


def test_pair_exactly_at_the_margin_has_no_gradient(path: str) -> None:
    score = torch.tensor([0.5, 0.25, 0.25, 0.75], dtype=torch.float64, requires_grad=True)
    ranking_violation(score, torch.tensor([1, 0, 0, 0]), 0.25).sum().backward()
    assert score.grad is not None
    assert score.grad.tolist() == [-1, 0, 0, 1]


def test_large_batch_takes_the_sorted_path_and_is_exact() -> None:
    score, label = random_batch(1, 250, 500, torch.float32)
    assert constraint._BROADCAST_PAIRS < 250 * 500
    q = ranking_violation(score.requires_grad_(), label, 0.1)
    assert "Sorted" in q.grad_fn.next_functions[0][0].name()  # behind the cast to float32
    expected = torch.tensor([float(value) for value in exact_violation(score, label, 0.1)])
    torch.testing.assert_close(q, expected, rtol=2**-24, atol=0)


def test_no_cancellation_in_float32(path: str) -> None:
    # Plain prefix sums of float32 scores around 100 are wrong by most of the value here.
    generator = torch.Generator().manual_seed(2)
    score = 100 + 1e-3 * torch.randn(64 + 4096, generator=generator)
    label = (torch.arange(len(score)) < 64).long()
    exact = score.double()
    matrix = exact[64:].unsqueeze(0) - exact[:64].unsqueeze(1) + 1e-4
    expected = matrix.clamp(min=0).sum(1)
    q = ranking_violation(score, label, 1e-4)
    assert q.dtype == torch.float32
    assert ((q.double() - expected).abs() / expected).max() < 6.0e-8  # half a unit in the last place of the result


# --- Batches, types, errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [[0, 0, 0], [1, 1], []])
def test_one_class_gives_a_zero_tied_to_the_graph(path: str, labels: list[int]) -> None:
    score = torch.linspace(-1, 1, len(labels)).requires_grad_()
    q = ranking_violation(score, torch.tensor(labels, dtype=torch.int64), 0.5)
    assert q.tolist() == [0.0] * sum(labels)
    q.sum().backward()
    assert score.grad is not None
    assert score.grad.tolist() == [0.0] * len(labels)


@pytest.mark.parametrize(
    ("given_type", "result_type"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_types(path: str, given_type: torch.dtype, result_type: torch.dtype) -> None:
    # q = 200 * 1000 overflows float16.
    score = torch.cat([torch.zeros(1), torch.full((200,), 1000.0)]).to(given_type).requires_grad_()
    label = torch.tensor([1.0] + [0.0] * 200)
    q = ranking_violation(score, label, 0.0)
    assert q.dtype == result_type
    assert q.item() == 200_000
    q.sum().backward()
    assert score.grad is not None
    assert score.grad.dtype == given_type
    assert score.grad[0] == -200


def test_autocast_changes_nothing(path: str) -> None:
    score, label = random_batch(3, 9, 20, torch.float32)
    plain = ranking_violation(score, label, 0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ranking_violation(score, label, 0.3), plain)


def test_bool_labels(path: str) -> None:
    score, label = random_batch(4, 5, 6)
    assert torch.equal(ranking_violation(score, label.bool(), 0.3), ranking_violation(score, label, 0.3))


@pytest.mark.parametrize("where", [0, 3])
def test_nan_is_never_a_silent_zero(path: str, where: int) -> None:
    score = torch.tensor([5.0, 6.0, 7.0, 0.0, 1.0])
    score[where] = math.nan
    q = ranking_violation(score, torch.tensor([1, 1, 1, 0, 0]), 0.5)
    assert q[0].isnan()
    assert q[1:].isnan().all() or where == 0


@pytest.mark.parametrize("count", [1, 2, 63])
def test_nan_negatives_reach_every_constraint(path: str, count: int) -> None:
    # Far below their thresholds, the other negatives would give q = 0.
    score, label = random_batch(9, 17, 64)
    score = score + 100 * label
    score[torch.nonzero(label == 0).squeeze(1)[-count:]] = math.nan
    assert ranking_violation(score, label, 0.5).isnan().all()


@pytest.mark.parametrize(("where", "value"), [(0, -math.inf), (3, math.inf)])
def test_infinite_violation_is_not_finite(path: str, where: int, value: float) -> None:
    score = torch.tensor([5.0, 6.0, 7.0, 0.0, 1.0])
    score[where] = value
    assert not ranking_violation(score, torch.tensor([1, 1, 1, 0, 0]), 0.5)[0].isfinite()


def test_double_backward_beyond_the_matrix_is_refused() -> None:
    score, label = random_batch(5, 300, 400)
    (gradient,) = torch.autograd.grad(
        ranking_violation(score.requires_grad_(), label, 0.3).square().sum(), score, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("function", [ranking_violation, mirrored_violation, pair_violation])
@pytest.mark.parametrize(
    ("score", "label", "delta", "message"),
    [
        (torch.zeros(3, 1), torch.zeros(3), 0.1, r"shape \(B,\), got torch.float32 of \(3, 1\)"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3), 0.1, "floating point"),
        (torch.zeros(3), torch.zeros(4), 0.1, r"label must have shape \(3,\) like score, got \(4,\)"),
        (torch.zeros(3), torch.zeros(3), -0.1, "finite margin >= 0, got -0.1"),
        (torch.zeros(3), torch.zeros(3), math.nan, "finite margin >= 0, got nan"),
        (torch.zeros(3), torch.zeros(3), math.inf, "finite margin >= 0, got inf"),
        (torch.zeros(3), torch.tensor([0, 2, 1]), 0.1, r"0 or 1, found 2 \(1 of 3 are neither\)"),
        (torch.zeros(3), torch.tensor([0, math.nan, -1]), 0.1, r"0 or 1, found nan \(2 of 3 are neither\)"),
    ],
)
def test_bad_arguments(
    function: Callable[..., Tensor], score: Tensor, label: Tensor, delta: float, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        function(score, label, delta)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_cpu(path: str) -> None:
    score, label = random_batch(6, 30, 90)
    on_cuda = score.cuda().requires_grad_()
    q = ranking_violation(on_cuda, label.cuda(), 0.2)
    q.square().sum().backward()
    score.requires_grad_()
    expected = ranking_violation(score, label, 0.2)
    expected.square().sum().backward()
    assert on_cuda.grad is not None
    torch.testing.assert_close(q.cpu(), expected)
    torch.testing.assert_close(on_cuda.grad.cpu(), score.grad)


# --- Multi-class ----------------------------------------------------------------------------------------------------


def exact_multiclass(
    score: Tensor, label: Tensor, *, critical: list[int], delta: float, kind: int, between_critical: bool
) -> list[Fraction]:
    """Eq. 5 and 6 of the paper, term by term."""
    f = [[Fraction(value) for value in row] for row in score.tolist()]
    y = label.tolist()
    result = []
    for j, c in enumerate(y):
        if c not in critical:
            continue
        q = Fraction(0)
        for k, i in enumerate(y):
            if i == c or (i in critical and not between_critical):
                continue
            q += max(Fraction(0), -(f[j][c] - f[k][c]) + Fraction(delta))
            if kind == 2:
                q += max(Fraction(0), f[j][i] - f[k][i] + Fraction(delta))
        result.append(q)
    return result


@pytest.mark.parametrize(("kind", "expected"), [(1, [0.8, 0.8]), (2, [1.5, 1.5])])
def test_multiclass_example(path: str, kind: int, expected: list[float]) -> None:
    score = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8], [0.4, 0.4, 0.2]], dtype=torch.float64)
    q = multiclass_violation(score, torch.tensor([2, 0, 1, 2]), critical=[2], delta=0.1, kind=kind)
    assert q.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("path_name", PATHS)
@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.lists(eighth, min_size=4, max_size=4), st.integers(0, 3)), max_size=16),
    critical=st.sampled_from([[0], [3], [1, 3], [3, 0], [0, 1, 2]]),
    delta=margin,
    kind=st.sampled_from([1, 2]),
    between_critical=st.booleans(),
)
def test_multiclass_equals_double_loop(
    *,
    path_name: str,
    rows: list[tuple[list[float], int]],
    critical: list[int],
    delta: float,
    kind: int,
    between_critical: bool,
) -> None:
    score = torch.tensor([s for s, _ in rows], dtype=torch.float64).reshape(-1, 4)
    label = torch.tensor([y for _, y in rows], dtype=torch.int64)
    q = on_path(
        path_name,
        lambda: multiclass_violation(
            score, label, critical=critical, delta=delta, kind=kind, between_critical=between_critical
        ),
    )
    assert q.tolist() == exact_multiclass(
        score, label, critical=critical, delta=delta, kind=kind, between_critical=between_critical
    )


def test_multiclass_gradcheck(path: str) -> None:
    score = torch.randn(14, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()
    label = torch.arange(14) % 5
    for kind in (1, 2):
        assert torch.autograd.gradcheck(
            lambda s, kind=kind: multiclass_violation(s, label, critical=[1, 4], delta=0.3, kind=kind), score
        )


def test_two_classes_give_the_binary_constraint(path: str) -> None:
    score, label = random_batch(8, 9, 15)
    probability = torch.stack([1 - score, score], 1)
    binary = ranking_violation(score, label, 0.2)
    torch.testing.assert_close(multiclass_violation(probability, label, critical=[1], delta=0.2), binary)
    # With two columns that sum to one the second constraint counts every pair twice.
    torch.testing.assert_close(multiclass_violation(probability, label, critical=[1], delta=0.2, kind=2), 2 * binary)


@pytest.mark.parametrize("labels", [[], [0, 0, 1], [2, 2]])
@pytest.mark.parametrize("kind", [1, 2])
def test_multiclass_without_critical_or_without_others(path: str, labels: list[int], kind: int) -> None:
    score = torch.rand(len(labels), 3, requires_grad=True)
    q = multiclass_violation(score, torch.tensor(labels, dtype=torch.int64), critical=[2], delta=0.1, kind=kind)
    assert q.dtype == torch.float32
    assert q.tolist() == [0.0] * labels.count(2)
    q.sum().backward()
    assert score.grad is not None
    assert not score.grad.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": torch.zeros(4)}, r"shape \(B, C\)"),
        ({"label": torch.zeros(5, dtype=torch.int64)}, r"shape \(4,\) like score"),
        ({"label": torch.zeros(4)}, "integer classes from 0 to 2"),
        ({"label": torch.tensor([0, 1, 2, 3])}, "integer classes from 0 to 2"),
        ({"label": torch.tensor([0, 1, 2, -1])}, "integer classes from 0 to 2"),
        ({"critical": []}, r"classes 0 to 2 once, got \[\]"),
        ({"critical": [1, 1]}, "once"),
        ({"critical": [0, 1, 2]}, "some, not all"),
        ({"critical": [3]}, "classes 0 to 2"),
        ({"delta": -1.0}, "finite margin >= 0"),
        ({"kind": 3}, "kind must be 1 or 2"),
    ],
)
def test_multiclass_bad_arguments(changes: dict[str, object], message: str) -> None:
    arguments = {"score": torch.zeros(4, 3), "label": torch.tensor([0, 1, 2, 0]), "critical": [2], "delta": 0.1}
    with pytest.raises(InputError, match=message):
        multiclass_violation(**(arguments | changes))
