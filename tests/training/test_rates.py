"""The learning rate of each epoch: of Cao et al., along a cosine, and in a run that goes on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Engine
from small_cohort import workflow
from torch import nn

from mri_alm.bundle.checkpoints import load_tensors
from mri_alm.errors import InputError
from mri_alm.training.member import Member
from mri_alm.training.rates import CosineRate, StepRate


def test_the_rate_is_that_of_cao_et_al() -> None:
    """0.1, a warm-up of five epochs, a hundredth of it after epochs 160 and 180."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=9.0)
    rate = StepRate(optimizer, 0.1, milestones=[160, 180], factor=0.01, warmup=5)
    expected = {1: 0.02, 2: 0.04, 5: 0.1, 6: 0.1, 160: 0.1, 161: 1e-3, 180: 1e-3, 181: 1e-5, 200: 1e-5}
    assert {epoch: pytest.approx(rate.of(epoch)) for epoch in expected} == expected
    rate(SimpleNamespace(state=SimpleNamespace(epoch=161)))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_the_rate_is_set_when_an_epoch_starts() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=9.0)
    seen = []
    engine = Engine(lambda _, __: seen.append(optimizer.param_groups[0]["lr"]))
    StepRate(optimizer, 1.0, milestones=[1], factor=0.5).attach(engine)
    engine.run([0], max_epochs=3)
    assert seen == [1.0, 0.5, 0.5]


def test_a_rate_that_cannot_be_meant_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(
        InputError, match=r"^learning_rate and rate_factor must be greater than 0, got 0\.0 and 0\.1\.$"
    ):
        StepRate(optimizer, 0.0)


def test_the_rate_rises_and_falls_along_half_a_cosine() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=9.0)
    rate = CosineRate(optimizer, 0.4, epochs=5, warmup=2)
    half = np.sqrt(0.5)
    expected = [0.2, 0.4, 0.2 * (1 + half), 0.2, 0.2 * (1 - half)]
    assert [rate.of(epoch) for epoch in range(1, 6)] == pytest.approx(expected)
    assert CosineRate(optimizer, 0.4, epochs=2).of(1) == 0.4
    with pytest.raises(InputError, match=r"^warmup must be less than max_epochs = 5, got 5\.$"):
        CosineRate(optimizer, 0.4, epochs=5, warmup=5)


RECIPE = {"optimiser": "adamw", "schedule": "cosine", "warmup": 1, "weight_decay": 0.1, "max_epochs": 3, "mu0": 0.1}
RECIPE |= {"augmentation": "field"}  # drawn anew in each epoch
CONDITIONAL = {"loss": "lct", "micro_batch": 2, "ema": 0.5}  # tau is drawn anew in each step


def member(manifest: Path, run: Path, **overrides: Any) -> Member:
    """Split 0 of the main config, which nothing has been trained of."""
    parser = workflow(manifest, run, **overrides).parser
    return Member(parser.get(), 0, parser.get_parsed_content("cohort_data"))


@pytest.mark.parametrize("more", [{}, CONDITIONAL], ids=["bce", "lct"])
def test_the_recipe_reaches_every_epoch_and_a_stopped_run_ends_the_same(
    more: dict[str, Any], manifest: Path, tmp_path: Path
) -> None:
    recipe = RECIPE | more
    rates: list[float] = []

    def watch(history: list[dict[str, float]], stop: int = -1) -> None:
        if history:
            rates.append(whole.parser.get_parsed_content("optimizer").param_groups[0]["lr"])
        if len(history) == stop:
            raise RuntimeError("stopped")

    whole = member(manifest, tmp_path / "whole", **recipe)
    whole.train(watch)
    optimizer = whole.parser.get_parsed_content("optimizer")
    assert type(optimizer) is torch.optim.AdamW
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert rates == pytest.approx([0.002, 0.0015, 0.0005])
    with pytest.raises(RuntimeError, match=r"^stopped$"):
        member(manifest, tmp_path / "stopped", **recipe).train(lambda history: watch(history, stop=2))
    member(manifest, tmp_path / "stopped", **recipe).train(lambda _: None)
    one, other = (load_tensors(tmp_path / run / "split_0" / "last.pt") for run in ("whole", "stopped"))
    for name in ("model", "optimizer", "objective", "history", "best"):
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)
    assert all(("train_auc" in epoch) != bool(more) for epoch in one["history"])  # logits of steps are of another tau


def test_the_default_is_adam_at_a_constant_rate(manifest: Path, tmp_path: Path) -> None:
    parser = member(manifest, tmp_path / "run").parser
    assert type(parser.get_parsed_content("optimizer")) is torch.optim.Adam
    assert {parser.get_parsed_content("train::handlers::1").of(epoch) for epoch in (1, 2, 3, 60)} == {0.002}
