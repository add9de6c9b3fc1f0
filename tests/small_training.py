"""A training that takes a moment: twelve samples, one linear layer, told validation figures."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ignite.engine import Engine, Events
from monai.data import Dataset
from monai.transforms import Compose, RandFlipd
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from mri_alm import AugmentedLagrangian
from mri_alm.alm.batches import ProcessShare
from mri_alm.alm.losses import BinaryCrossEntropy
from mri_alm.training.engine import CheckpointRule, EpochEnd, EpochSeed, IndexedTrainer

SAMPLES = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.linear(image.flatten(1))
        return logits


class Validator(Engine):
    """Stands in for the evaluator: predicts three exams, and says what it is told to have measured."""

    def __init__(self, *aucs: float) -> None:
        label, index = torch.tensor([[1.0], [0.0], [0.0]]), torch.arange(3)
        super().__init__(lambda _, __: {"pred": torch.tensor([[0.2], [0.9], [-1.0]]), "label": label})
        self.aucs = iter(aucs)
        self.batches = [{"index": index}]

    def measure(self) -> None:
        self.run(self.batches)
        self.state.metrics["val_auc"] = next(self.aucs)


def data() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"image": torch.randn(1, 3, generator=generator), "label": float(i % 3 == 0), "index": (7 * i) % SAMPLES}
        for i in range(SAMPLES)
    ]


def training(
    folder: Path, *aucs: float, split_digest: str = "guard", samples: int = SAMPLES, **selection: Any
) -> tuple[Any, EpochEnd]:
    torch.manual_seed(1)
    network = Net()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    objective = AugmentedLagrangian(BinaryCrossEntropy(), samples, mu=0.5)
    validator, dataset = Validator(*aucs), Dataset(data(), Compose([RandFlipd("image", prob=0.5, spatial_axis=0)]))
    chosen = CheckpointRule(**selection)
    end = EpochEnd(
        folder, network, optimizer, objective, validator, split_digest=split_digest, preset="paper", selection=chosen
    )
    batches = ProcessShare(BatchSampler(RandomSampler(dataset), 5, drop_last=False))
    trainer = IndexedTrainer(
        max_epochs=len(aucs),
        device=torch.device("cpu"),
        train_data_loader=DataLoader(dataset, batch_sampler=batches),
        network=network,
        optimizer=optimizer,
        loss_function=objective,
        train_handlers=[EpochSeed(3, dataset, batches)],
        decollate=False,
    )
    trainer.add_event_handler(Events.EPOCH_COMPLETED, validator.measure)
    end.attach(trainer)
    return trainer, end


@contextmanager
def crash_after_epoch(number: int) -> Iterator[None]:
    """The training in the block ends when it has written the state of that epoch."""
    write = EpochEnd._write

    def crash(self: EpochEnd, engine: Any, report: dict[str, float], better: bool) -> None:
        write(self, engine, report, better)
        if report["epoch"] == number:
            raise KeyboardInterrupt("crash")

    with patch.object(EpochEnd, "_write", crash), pytest.raises(KeyboardInterrupt, match="crash"):
        yield
