"""The batches of an epoch, the extraction of [CLS], and what is shown of their progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler
from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.utils import logging

from ..data.collator import ImageCollator
from ..data.feature_cache import FeatureExtractor
from ..tuner.backbone import compiled_trunk
from ..tuner.model import LucaModel


logger = logging.get_logger(__name__)


def collate(rows: Any, images: Callable[[Any], Any]) -> Any:
    """[CLS] come as a batch already, images as rows that a collator turns into one."""
    return rows if isinstance(rows, dict) else images(rows)


class EpochBatches(Sampler[list[int]]):
    """
    The batches of an epoch, in a random order that is the same in all processes, each of which takes its part of every
    batch of `batch_size`. The number of processes then changes neither the batches nor, with a loss that is the mean
    over the whole batch, the training, even if the last batch is short. A part may be empty.
    """

    def __init__(
        self, dataset: Sized, batch_size: int, seed: int, rank: int = 0, processes: int = 1, drop_last: bool = False
    ) -> None:
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.rank, self.processes, self.drop_last = rank, processes, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):  # it has several views
            self.dataset.set_epoch(epoch)

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


def print_line(args: Any, line: str) -> None:
    """Prints a line for the user past the progress bars, or logs it where there are none."""
    if args.process_index == 0:
        logger.info(line) if args.disable_tqdm else tqdm.write(line)


def half_precision(args: Any) -> torch.dtype | None:
    """The type in which `bf16=True` or `fp16=True` lets the backbone compute. Its weights stay as they are."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def make_extractor(tuner: LucaModel, collator: ImageCollator, args: Any, writes: bool = True) -> FeatureExtractor:
    """What computes [CLS] of images, as the arguments say."""
    settings = args.per_device_eval_batch_size, args.dataloader_num_workers, args.features_dtype, args.on_bad_image
    names = ("pin_memory", "multiprocessing_context", "prefetch_factor")
    options = args.disable_tqdm, {name: getattr(args, f"dataloader_{name}") for name in names}

    half, trunk = half_precision(args), None
    if args.torch_compile:
        options_of_torch = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        trunk = compiled_trunk(tuner.model, tuner.targeted_module_names[0], **options_of_torch)

    def pooled_features(pixels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(args.device.type, half, enabled=half is not None):
            return tuner.pooled_features(pixels.to(args.device, tuner.backbone.dtype), trunk=trunk)

    return FeatureExtractor(pooled_features, collator, *settings, writes, *options)
