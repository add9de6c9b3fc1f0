"""How a cohort becomes batches: positives in each, shares for several processes, parts for small memories."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import Sampler

from mri_alm.alm.processes import process_rank, world_size
from mri_alm.errors import InputError


class StratifiedBatchSampler(Sampler[list[int]]):
    """Batches that all hold the same number of positives.

    An epoch visits every negative once; the positives come round as often as that takes, in shuffled rounds, so
    that their visits differ by one at most and no batch holds one twice. **This changes the class prior that the base
    loss sees** (and with it the calibration of the scores) from the cohort's to ``positives / batch_size``. The
    order depends on the seed and the epoch alone: a resumed run draws what an unbroken one would have drawn.

    Args:
        labels: ``(N,)``, 1 for the critical class.
        batch_size: Samples per batch; the last one may have fewer negatives.
        positives: Of these positive, 1 <= positives < batch_size.
        seed: Of the order.

    Raises:
        InputError: If the cohort cannot fill such a batch.
    """

    def __init__(self, labels: Sequence[float], batch_size: int, positives: int, *, seed: int = 0) -> None:
        label = torch.as_tensor(labels)
        self.positive, self.negative = (torch.nonzero(side).flatten() for side in (label == 1, label != 1))
        self.batch_size, self.positives, self.seed, self.epoch = batch_size, positives, seed, 0
        if not 1 <= positives < batch_size:
            raise InputError(f"positives_per_batch must lie between 1 and {batch_size - 1}, got {positives}.")
        if len(self.positive) < positives or len(self.negative) == 0:
            raise InputError(
                f"Batches of {positives} positives and {batch_size - positives} negatives cannot be drawn from "
                f"{len(self.positive)} positive and {len(self.negative)} negative samples. Lower positives_per_batch."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Batches per epoch."""
        return math.ceil(len(self.negative) / (self.batch_size - self.positives))

    def __iter__(self) -> Iterator[list[int]]:
        """The epoch's batches: indices into ``labels``."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        negatives = self.negative[torch.randperm(len(self.negative), generator=generator)]
        waiting: deque[int] = deque()
        for others in torch.split(negatives, self.batch_size - self.positives):
            yield [*self._draw(waiting, generator), *others.tolist()]

    def _draw(self, waiting: deque[int], generator: torch.Generator) -> list[int]:
        """The next positives, taken from those of their round that still wait."""
        own = [waiting.popleft() for _ in range(min(self.positives, len(waiting)))]
        if missing := self.positives - len(own):
            round_ = self.positive[torch.randperm(len(self.positive), generator=generator)].tolist()
            fresh = [sample for sample in round_ if sample not in own]
            waiting.extend(fresh[missing:] + [sample for sample in round_ if sample in own])
            own += fresh[:missing]
        return own


def positives_in_batch(asked: int | str | None, labels: Sequence[float], batch_size: int) -> int | None:
    """How many positives every batch is to hold; None: batches as they come.

    Args:
        asked: A number, which is taken as it is; None or 0: batches as they come; ``"auto"``: two, or as many as the
            cohort and a batch can give, where fewer than one sample in four is positive, and batches as they come where
            more are: such batches hold two in any case.
        labels: ``(N,)``, 1 for the critical class.
        batch_size: Samples per batch.
    """
    if asked != "auto":
        return cast(int, asked) or None
    positive = int((torch.as_tensor(labels) == 1).sum())
    return min(2, positive, batch_size - 1) or None if 4 * positive < len(labels) else None


class ProcessShare(Sampler[list[int]]):
    """This process's share of every batch; the whole batch when there is one process.

    All processes have to draw the same batches (equal seeds), so that their shares make up exactly the batch that one
    process would have: the objective gathers them again. A batch with fewer samples than processes is filled up with
    copies, which the objective counts once. So samples must be drawn without replacement where there are several
    processes: a batch that holds one twice is refused then.

    Args:
        batches: Sampler of whole batches; its ``set_epoch`` is called if it has one.
    """

    def __init__(self, batches: Any) -> None:
        self.batches: Iterable[list[int]] = batches

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on."""
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(cast(Sequence[list[int]], self.batches))

    def __iter__(self) -> Iterator[list[int]]:
        """The shares.

        Raises:
            InputError: If there are several processes, and a batch holds a sample twice.
        """
        for batch in self.batches:
            if world_size() > 1 and len(set(batch)) < len(batch):
                raise InputError(
                    f"A batch holds a sample more than once ({len(set(batch))} different ones of {len(batch)}), which "
                    "several processes would count once. Draw without replacement, or train in one process."
                )
            whole = batch if len(batch) >= world_size() else batch * world_size()
            yield whole[process_rank() :: world_size()]
