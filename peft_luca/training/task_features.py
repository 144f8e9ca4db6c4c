"""[CLS] of the images of a stream's tasks, computed once and kept in the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm
from transformers.utils import logging

from ..data.collator import ImageCollator
from ..data.feature_cache import FeatureDataset, FeatureExtractor, default_cache_dir, digest_images, features_key
from ..data.task_stream import Task, TaskStream
from ..preprocessing import undecoded
from ..tuner.model import LucaModel
from .arguments import ContinualTrainingArguments


logger = logging.get_logger(__name__)


def print_line(args: ContinualTrainingArguments, line: str) -> None:
    """Prints a line for the user past the progress bars, or logs it where there are none."""
    if args.process_index == 0:
        logger.info(line) if args.disable_tqdm else tqdm.write(line)


def make_extractor(tuner: LucaModel, collator: ImageCollator, args: Any, writes: bool = True) -> FeatureExtractor:
    """What computes [CLS] of images, as the arguments say."""
    dtype = tuner.backbone.dtype
    return FeatureExtractor(
        lambda pixels: tuner.pooled_features(pixels.to(args.device, dtype)),
        collator,
        args.per_device_eval_batch_size,
        args.dataloader_num_workers,
        args.features_dtype,
        args.on_bad_image,
        writes,
        args.disable_tqdm,
        {
            "pin_memory": args.dataloader_pin_memory,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
        },
    )


class TaskFeatures:
    """
    [CLS] of the images of a stream's tasks. With several processes each computes a part, so all must ask.

    Args:
        stream ([`TaskStream`]): The stream.
        args ([`ContinualTrainingArguments`]): Where and how [CLS] is cached.
        collator ([`ImageCollator`]): Makes pixel values of images.
    """

    def __init__(self, stream: TaskStream, args: Any, collator: ImageCollator) -> None:
        self.stream, self.args = stream, args
        self.collator = replace(collator, label_ids=None, seed=args.seed)
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
        return FeatureDataset(data.features, torch.tensor(self._own_labels(task))[data.labels])

    def tests(self, tuner: LucaModel, names: Any) -> dict[str, FeatureDataset]:
        """Task → [CLS] of its test images, for those of the tasks that have images and an expert."""
        tasks = [task for task in self.stream if task.name in names and task.name in tuner.experts]
        return {task.name: self.get_own(tuner, task, "test") for task in tasks if task.test is not None}

    def training_data(self, tuner: LucaModel, task: Task) -> tuple[FeatureDataset | Any, ImageCollator]:
        """What a task's expert is trained on, with its own labels: [CLS], or images and their collator."""
        args, plain = self.args, self.get_own(tuner, task, "train")
        ids = {i: own for i, own in enumerate(self._own_labels(task)) if own >= 0}
        collator = replace(self.collator, label_ids=ids, augmentation=bool(args.augmentation))
        if not args.cache_features or (args.augmentation and not args.augmented_views):
            return self.images(tuner, task, "train"), collator
        views = [self._extract(tuner, task, "train", view).features for view in range(args.augmented_views)]
        return FeatureDataset(views[0] if views else plain.features, plain.labels, views), collator

    def images(self, tuner: LucaModel, task: Task, split: str) -> Any:
        """A task's images, undecoded, without the unreadable ones that are to be skipped."""
        dataset: Any = undecoded(task.train if split == "train" else task.test, self.stream.image_column)
        if self.args.on_bad_image == "raise":
            return dataset
        skipped = self.get(tuner, task, split).skipped
        return dataset.select(np.delete(np.arange(len(dataset)), skipped)) if skipped else dataset

    def _own_labels(self, task: Task) -> list[int]:
        """Global id in the stream → the id of the task's own expert; -1 for a class that it lacks."""
        return [task.classes.index(c) if c in task.classes else -1 for c in self.stream.classes]

    def check_classes(self, tuner: LucaModel, task: Task) -> None:
        """Raises if none of the images of a class could be read."""
        readable = set(self.get_own(tuner, task, "train").labels.tolist())
        missing = [name for i, name in enumerate(task.classes) if i not in readable]
        if missing:
            skipped = self.get(tuner, task, "train").skipped
            raise ValueError(
                f"task {task.name!r}: none of the images of {', '.join(map(repr, missing[:5]))} can be read, and "
                f"{len(skipped)} are left out, first row {skipped[0]}. Mend them, or take the class out."
            )

    def skipped(self, task: Task) -> int:
        """How many images of a task were left out."""
        return sum(len(data.skipped) for (name, _), data in self._features.items() if name == task.name)

    def _extract(self, tuner: LucaModel, task: Task, split: str, view: int | None = None) -> FeatureDataset:
        dataset, args = task.train if split == "train" else task.test, self.args
        if dataset is None:
            raise ValueError(f"task {task.name!r} has no {split} images.")
        collator = replace(self.collator, augmentation=view is not None, view=view)
        key = ""
        if args.process_index == 0:
            if (task.name, split) not in self._digests:
                self._digests[task.name, split] = digest_images(dataset, self.stream.image_column)
            key = features_key(tuner.backbone, collator, self._digests[task.name, split], args.features_dtype)
        (key,) = broadcast_object_list([key])
        features = make_extractor(tuner, collator, args, writes=args.should_save)(
            dataset,
            Path(args.features_cache_dir or default_cache_dir()) / f"{key}.arrow",
            f"{task.name}: [CLS] of the {split} images" + ("" if view is None else f", view {view + 1}"),
        )
        if features.skipped and view is None:
            line = f"{len(features.skipped)} of {len(dataset)} {split} images cannot be read and are left out"
            print_line(args, f"{task.name}: {line}, first row {features.skipped[0]}")
        return features
