"""The batches of an epoch, whatever the number of processes, and the progress bar over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import ProgressCallback


def collate(rows: Any, images: Callable[[Any], Any]) -> Any:
    """[CLS] come as a batch already, images as rows that a collator turns into one."""
    return rows if isinstance(rows, dict) else images(rows)


class EpochBatches(Sampler[list[int]]):
    """
    The batches of an epoch, in a random order that is the same in all processes, each of which takes its part of every
    batch. The number of processes then changes neither the batches nor, with a loss that is the mean over the whole
    batch, the training, even if the last batch is short. A part may be empty.

    Args:
        dataset (`Sized`): The dataset. Its `set_epoch`, if it has one, is called as well.
        batch_size (`int`): Of all processes together.
        seed (`int`): Seed of the first epoch's order; the next epochs add to it.
        rank, processes (`int`, *optional*): This process's number, and how many there are.
        drop_last (`bool`, *optional*, defaults to `False`): Leave out a last batch that is short.
    """

    def __init__(
        self, dataset: Sized, batch_size: int, seed: int, rank: int = 0, processes: int = 1, drop_last: bool = False
    ) -> None:
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.rank, self.processes, self.drop_last = rank, processes, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        getattr(self.dataset, "set_epoch", lambda epoch: None)(epoch)

    def __len__(self) -> int:
        rows = len(self.dataset)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for batch in order.split(self.batch_size)[: len(self)]:
            yield batch[self.rank :: self.processes].tolist()


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
