"""What a task's training is made of beside `Trainer`: the head that takes [CLS], and the batches of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import ProgressCallback
from transformers.modeling_outputs import ImageClassifierOutput

from ..tuner.layer import LucaLayer


class FeatureHead(nn.Module):
    """
    The part of a model that learns, on [CLS] computed before. Its parameters are those of the expert that is being
    learnt and no others: `Trainer` goes through all of a model's parameters several times a step, which over a whole
    backbone takes longer than the step itself.

    Args:
        layer ([`LucaLayer`]): The layer whose active expert is learnt.
    """

    def __init__(self, layer: LucaLayer) -> None:
        super().__init__()
        self.answer = layer.logits  # a method, not a submodule: the layer's other experts stay out
        self.learnt = nn.ParameterList(p for p in layer.parameters() if p.requires_grad)

    def forward(self, features: Tensor) -> ImageClassifierOutput:
        """[CLS], (batch, d) → logits of what is active, (batch, K)."""
        return ImageClassifierOutput(logits=self.answer(features))


class EpochBatches(Sampler[list[int]]):
    """
    The batches of an epoch, of one random order that is the same in all processes, each of which takes its part of
    every batch. So the number of processes changes neither what is in a batch nor, with a loss that is the mean over
    the whole batch, what is learnt, also where the last batch is short. A part may be empty.

    Args:
        rows (`int`): Rows of the dataset.
        batch_size (`int`): Of all processes together.
        seed (`int`): Seed of the first epoch's order; the next epochs count on from it.
        rank, processes (`int`, *optional*): This process's number, and how many there are.
        drop_last (`bool`, *optional*, defaults to `False`): Leave out a last batch that is short.
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
    """A loader over [`EpochBatches`] that tells them, and a dataset of several views, which epoch it is."""

    def set_epoch(self, epoch: int) -> None:
        for part in (self.batch_sampler, self.dataset):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)


class TaskProgressCallback(ProgressCallback):
    """Trainer's progress bar, with the task's name and its losses on the bar: a line of its own has each task only."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None and self.trainer._task is not None:
            self.training_bar.leave = False
            self.training_bar.set_description(self.trainer._task.name)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.training_bar is not None:
            shown = ("loss", "cross_entropy", "l1_penalty", "eval_accuracy")
            self.training_bar.set_postfix({name: f"{logs[name]:.3f}" for name in shown if name in (logs or {})})
