"""The batches of an epoch, whatever the number of processes, and the progress bar over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from transformers import ProgressCallback


class BatchCollator:
    """Batches of [CLS], which come as they are needed, or of images by a collator."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __call__(self, rows: Any) -> Any:
        return rows if isinstance(rows, dict) else self.images(rows)


class EpochBatches(Sampler[list[int]]):
    """
    The batches of an epoch, in a random order that is the same in all processes, each of which takes its part of every
    batch. So the number of processes changes neither the batches nor the training, even if the last batch is short
    and a part is empty. `batch_size` is that of all processes together; `seed` is that of the first epoch's order.
    """

    def __init__(
        self, rows: int, batch_size: int, seed: int, rank: int = 0, processes: int = 1, drop_last: bool = False
    ) -> None:
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.rank, self.processes, self.drop_last = rank, processes, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for batch in order.split(self.batch_size)[: len(self)]:
            yield batch[self.rank :: self.processes].tolist()
        self.epoch += 1


class EpochLoader(DataLoader[Any]):
    """A loader over [`EpochBatches`] that passes the epoch on to them and to a dataset of several views."""

    def set_epoch(self, epoch: int) -> None:
        for part in (self.batch_sampler, self.dataset):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)


class ExpertProgressCallback(ProgressCallback):
    """Trainer's progress bar with the expert's name and its losses on it, and no line of its own for each log."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.leave = False
            self.training_bar.set_description(kwargs["model"].active_adapter)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.training_bar is not None:
            shown = ("loss", "cross_entropy", "l1_penalty", "eval_accuracy")
            self.training_bar.set_postfix({name: f"{logs[name]:.3f}" for name in shown if name in (logs or {})})
