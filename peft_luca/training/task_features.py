"""[CLS] of the images of a stream's tasks, computed once and kept in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from tqdm.auto import tqdm
from transformers.utils import logging

from ..data.collator import ImageCollator
from ..data.feature_cache import FeatureDataset, FeatureExtractor, default_cache_dir, digest_images, features_key
from ..data.task_stream import Task, TaskStream
from ..preprocessing import undecoded
from ..tuner.model import LucaModel
from ..utils import list_names
from .arguments import ContinualTrainingArguments


logger = logging.get_logger(__name__)


def print_line(args: ContinualTrainingArguments, line: str) -> None:
    """Prints a line for the user past the progress bars, or logs it where there are none."""
    if args.process_index == 0:
        logger.info(line) if args.disable_tqdm else tqdm.write(line)


def make_extractor(tuner: LucaModel, collator: ImageCollator, args: Any, writes: bool = True) -> FeatureExtractor:
    """What computes [CLS] of datasets, as the arguments say."""
    return FeatureExtractor(
        lambda pixels: tuner.pooled_features(pixels.to(args.device, tuner.backbone.dtype)),
        collator,
        args.per_device_eval_batch_size,
        args.dataloader_num_workers,
        args.features_dtype,
        args.on_bad_image,
        writes,
        args.disable_tqdm,
        loader_options(args),
    )


def loader_options(args: Any) -> dict[str, Any]:
    """The arguments of a DataLoader that have no influence on its batches."""
    names = ("pin_memory", "multiprocessing_context", "prefetch_factor")
    return {name: getattr(args, f"dataloader_{name}") for name in names}


class TaskFeatures:
    """[CLS] of the images of a stream's tasks. With several processes each computes a part, so all must ask."""

    def __init__(self, stream: TaskStream, args: Any, processing_class: Any, channels: int) -> None:
        self.stream, self.args, self.processing_class, self.channels = stream, args, processing_class, channels
        self._features: dict[tuple[str, str], FeatureDataset] = {}
        self._digests: dict[tuple[str, str], str] = {}

    def get(self, tuner: LucaModel, task: Task, split: str) -> FeatureDataset:
        """[CLS] of a task's `"train"` or `"test"` images, with the stream's global labels."""
        if split not in ("train", "test"):
            raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
        key = (task.name, split)
        if key not in self._features:
            self._features[key] = self._extract(tuner, task, split)
        return self._features[key]

    def get_own(self, tuner: LucaModel, task: Task, split: str) -> FeatureDataset:
        """The same, with the labels of the task's own expert, 0 … K-1."""
        data = self.get(tuner, task, split)
        return FeatureDataset(data.features, self.own_labels(task)[data.labels])

    def views(self, tuner: LucaModel, task: Task) -> list[Tensor]:
        """[CLS] of each augmented view of a task's training images."""
        return [self._extract(tuner, task, "train", view).features for view in range(self.args.augmented_views)]

    def images(self, tuner: LucaModel, task: Task, split: str) -> Any:
        """A task's images, undecoded, without the unreadable ones that are to be skipped."""
        dataset: Any = undecoded(task.train if split == "train" else task.test, self.stream.image_column)
        skipped = self.get(tuner, task, split).skipped if self.args.on_bad_image == "skip" else ()
        return dataset.select(np.delete(np.arange(len(dataset)), skipped)) if skipped else dataset

    def own_labels(self, task: Task) -> Tensor:
        """Global id in the stream → the id of the task's own expert; -1 for a class that it lacks."""
        return torch.tensor([task.classes.index(c) if c in task.classes else -1 for c in self.stream.classes])

    def check(self, tuner: LucaModel, task: Task) -> None:
        """Raises before a task is trained if an image, or with `on_bad_image="skip"` a whole class, is unreadable."""
        train = self.get_own(tuner, task, "train")
        if task.test is not None:
            self.get(tuner, task, "test")
        readable = set(train.labels.tolist())
        missing = [name for i, name in enumerate(task.classes) if i not in readable]
        if missing:
            raise ValueError(
                f"task {task.name!r}: none of the images of {list_names(missing)} can be read. Mend them, or take the "
                f"class out. The first of them is row {self.get(tuner, task, 'train').skipped[0]}."
            )

    def skipped(self, task: Task) -> int:
        """How many images of a task were left out."""
        return sum(len(data.skipped) for (name, _), data in self._features.items() if name == task.name)

    def forget(self, task: Task) -> None:
        """Forgets what is in memory: another task may come under the name."""
        for split in ("train", "test"):
            self._features.pop((task.name, split), None)
            self._digests.pop((task.name, split), None)

    def _extract(self, tuner: LucaModel, task: Task, split: str, view: int | None = None) -> FeatureDataset:
        dataset = task.train if split == "train" else task.test
        if dataset is None:
            raise ValueError(f"task {task.name!r} has no {split} images.")
        args = self.args
        collator = ImageCollator(
            self.processing_class, self.stream.image_column, None, view is not None, view, args.seed, self.channels
        )
        key = ""
        if args.process_index == 0:
            if (task.name, split) not in self._digests:
                self._digests[task.name, split] = digest_images(dataset, self.stream.image_column)
            key = features_key(tuner.backbone, collator, self._digests[task.name, split], args.features_dtype)
        (key,) = broadcast_object_list([key])
        features = make_extractor(tuner, collator, args, args.should_save)(
            dataset,
            Path(args.features_cache_dir or default_cache_dir()) / f"{key}.arrow",
            f"{task.name}: [CLS] of the {split} images" + ("" if view is None else f", view {view + 1}"),
        )
        if features.skipped and view is None:
            count = f"{len(features.skipped)} of {len(dataset)} {split} images"
            print_line(args, f"{task.name}: {count} cannot be read and are left out, first row {features.skipped[0]}")
        return features
