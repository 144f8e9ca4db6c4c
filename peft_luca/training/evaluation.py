"""[CLS] of a stream's tasks, computed once and kept in the cache, and what is measured and drawn with it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list

from ..data.collator import ImageCollator
from ..data.feature_cache import FeatureDataset, default_cache_dir, digest_images, features_key
from ..data.task_stream import Task
from ..preprocessing import undecoded
from ..routing import make_router
from ..tuner.model import LucaModel
from ..utils import explain_write_errors
from . import metrics
from .batches import half_precision, make_extractor, print_line
from .metrics import MEASURED, Floats, Measured, Record


BATCH = 1024  # features are a memory map of any size


class TaskFeatures:
    """[CLS] of the images of a [`ContinualTrainer`]'s tasks. All processes must ask: each computes a part."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.stream, self.args = trainer, trainer.stream, trainer.args
        self._features: dict[tuple[str, str], FeatureDataset] = {}
        self._digests: dict[tuple[str, str], str] = {}

    def get(self, task: Task, split: str) -> FeatureDataset:
        """[CLS] of a task's `"train"` or `"test"` images, with the stream's global labels."""
        if (task.name, split) not in self._features:
            self._features[task.name, split] = self._extract(task, split)
        return self._features[task.name, split]

    def get_own(self, task: Task, split: str) -> FeatureDataset:
        """The same, with the labels of the task's own expert, 0 … K-1."""
        data = self.trainer.features(task, split)  # which a subclass may define
        return FeatureDataset(data.features, torch.tensor(self._own_labels(task))[data.labels])

    def tests(self, names: Iterable[str]) -> dict[str, FeatureDataset]:
        """Task → [CLS] of its test images, for those of the tasks that have test images and an expert."""
        names = set(names) & set(self.trainer.tuner.experts)
        tasks = [task for task in self.stream if task.name in names and task.test is not None]
        return {task.name: self.get_own(task, "test") for task in tasks}

    def training_data(self, task: Task) -> tuple[Any, ImageCollator]:
        """What a task's expert is trained on, with its own labels: [CLS] or images, and the images' collator."""
        args, plain = self.args, self.get_own(task, "train")
        ids = {i: own for i, own in enumerate(self._own_labels(task)) if own >= 0}
        collator = replace(self.trainer.data_collator, label_ids=ids, augmentation=bool(args.augmentation))
        if not args.cache_features or (args.augmentation and not args.augmented_views):
            return self.images(task, "train"), collator
        views = [self._extract(task, "train", view).features for view in range(args.augmented_views)]
        return FeatureDataset(views[0] if views else plain.features, plain.labels, views), collator

    def images(self, task: Task, split: str) -> Any:
        """A task's images, undecoded, without the unreadable ones that are to be skipped."""
        dataset = undecoded(getattr(task, split), self.stream.image_column)
        skipped = self.get(task, split).skipped if self.args.on_bad_image == "skip" else []
        return dataset.select(np.delete(np.arange(len(dataset)), skipped)) if skipped else dataset

    def _own_labels(self, task: Task) -> list[int]:
        """Global id in the stream → the id of the task's own expert; -1 for a class that it lacks."""
        own = {name: i for i, name in enumerate(task.classes)}
        return [own.get(name, -1) for name in self.stream.classes]

    def extract(self, task: Task) -> None:
        """Computes all [CLS] of a task. Raises if none of the training images of a class could be read."""
        readable = set(self.get_own(task, "train").labels.tolist())
        if missing := [name for i, name in enumerate(task.classes) if i not in readable]:
            images = f"none of the images of {missing[0]!r} can be read"
            raise ValueError(f"task {task.name!r}: {images}. Repair or remove them.")
        if task.test is not None:
            self.trainer.features(task, "test")

    def skipped(self, task: Task) -> int:
        """How many images of a task were left out."""
        return sum(len(data.skipped) for (name, _), data in self._features.items() if name == task.name)

    def digests(self, task: Task) -> dict[str, str]:
        """Split → a digest of a task's images and of their classes."""
        digests, own = {}, np.array(self._own_labels(task))
        for split in ("train", "test") if task.test is not None else ("train",):
            labels = own[getattr(task, split).select_columns(["labels"]).with_format("numpy")[:]["labels"]].tolist()
            digests[split] = hashlib.sha256(f"{self._digest(task, split)} {labels}".encode()).hexdigest()
        return digests

    def _digest(self, task: Task, split: str) -> str:
        if (task.name, split) not in self._digests:
            images, is_first = getattr(task, split), self.args.process_index == 0
            digest = [digest_images(images, self.stream.image_column) if is_first else ""]
            (self._digests[task.name, split],) = broadcast_object_list(digest)
        return self._digests[task.name, split]

    def delete_files(self, task: Task) -> None:
        """Deletes a task's [CLS] from the cache, except files that another task of the stream uses."""
        used = {file for other in self.stream if other is not task for file in self._files(other)}
        for file in sorted(self._files(task) - used):
            if self.args.should_save:
                with explain_write_errors(file):
                    file.unlink(missing_ok=True)
        self._features = {key: data for key, data in self._features.items() if key[0] != task.name}

    def _files(self, task: Task) -> set[Path]:
        views = {"train": [None, *range(self.args.augmented_views)], "test": [None] if task.test is not None else []}
        return {self._file(task, split, view)[0] for split in views for view in views[split]}

    def _file(self, task: Task, split: str, view: int | None = None) -> tuple[Path, ImageCollator]:
        """The file of [CLS] in the cache, and what makes the pixel values."""
        options = {"augmentation": view is not None, "view": view, "seed": self.args.seed}
        collator = replace(self.trainer.data_collator, label_ids=None, **options)
        key, images = "", self._digest(task, split)
        if self.args.process_index == 0:
            half = half_precision(self.args)
            dtype = self.args.features_dtype + (f" computed in {half}" if half else "")
            key = features_key(self.trainer.tuner.backbone, collator, images, dtype)
        (key,) = broadcast_object_list([key])
        return Path(self.args.features_cache_dir or default_cache_dir()) / f"{key}.safetensors", collator

    def _extract(self, task: Task, split: str, view: int | None = None) -> FeatureDataset:
        dataset, args = getattr(task, split), self.args
        path, collator = self._file(task, split, view)
        description = f"{task.name}: [CLS] of the {split} images" + ("" if view is None else f", view {view + 1}")
        features = make_extractor(self.trainer.tuner, collator, args, args.should_save)(dataset, path, description)
        if features.skipped and view is None:
            line = f"{len(features.skipped)} of {len(dataset)} {split} images cannot be read and are left out"
            print_line(args, f"{task.name}: {line}, first row {features.skipped[0]}")
        return features


@torch.no_grad()
def measure_stage(
    tuner: LucaModel, names: Sequence[str], tests: Mapping[str, FeatureDataset], device: Any, whole: bool = False
) -> Measured:
    """
    Measures a model on the test images of each learned task (`tests`: [CLS], with the expert's own labels), with the
    router that is set. `whole` routes all test images of a task as one batch. Returns per task, or `None` where not
    measured: `accuracy` over all classes, routed; `routing`, the share of images for which the router chose the task's
    own expert; `task_known`, that expert's accuracy over its classes; `entropy`, as `accuracy` by the paper's router.
    """
    places, paper = {name: place for place, name in enumerate(tuner.experts)}, make_router("entropy")
    images = [len(tests.get(name, ())) for name in names]
    right = torch.zeros(len(names), len(MEASURED), dtype=torch.long)
    for batch in _batches(images, whole):
        z = torch.cat([tests[names[task]].features[rows] for task, rows in batch]).to(device)
        routed = tuner.route_features(z)
        by_entropy = routed if tuner.router == paper else tuner.layer.route_features(z, router=paper)
        predicted, as_paper = (output.logits.argmax(1).cpu() for output in (routed, by_entropy))
        start = 0
        for task, rows in batch:
            name, labels = names[task], tests[names[task]].labels[rows]
            here, own = slice(start, start := start + len(labels)), tuner.layer.label_space.own[name].cpu()[labels]
            known = tuner.expert_logits(z[here], name).argmax(1).cpu() == labels
            columns = [predicted[here] == own, routed.expert.cpu()[here] == places[name], known, as_paper[here] == own]
            right[task] += torch.stack(columns).sum(dim=1)
    shares = [[c / n if n else None for c in row] for row, n in zip(right.tolist(), images, strict=True)]
    return {column: [share[i] for share in shares] for i, column in enumerate(MEASURED)}


def _batches(images: Sequence[int], whole: bool) -> Iterator[list[tuple[int, slice]]]:
    """Tasks and their rows, of several tasks together, since each batch calls all experts; `whole`: of one task."""
    batch: list[tuple[int, slice]] = []
    room = BATCH
    for task, count in enumerate(images):
        start = 0
        while start < count:
            stop = count if whole else min(count, start + room)
            batch.append((task, slice(start, stop)))
            room, start = room - (stop - start), stop
            if whole or not room:
                yield batch
                batch, room = [], BATCH
    if batch:
        yield batch


@torch.no_grad()
def predict(trainer: Any, data: FeatureDataset) -> torch.Tensor:
    """Predicted classes, by their ids in the model (images,), with the router that is set."""
    size = max(1, len(data)) if trainer.args.routing_scope == "batch" else BATCH
    batches = (z.to(trainer.args.device) for z in data.features.split(size))
    return torch.cat([trainer.tuner.route_features(z).logits.argmax(1).cpu() for z in batches])


def measure(trainer: Any, records: list[Record]) -> Measured:
    """What the model reaches on the learned tasks, computed by one process for all."""
    names, args = [record["name"] for record in records], trainer.args
    tests, measured = trainer.task_features.tests(names), [Measured()]
    trainer.model.eval()
    if trainer.is_world_process_zero():
        measured = [measure_stage(trainer.tuner, names, tests, args.device, args.routing_scope == "batch")]
    return broadcast_object_list(measured)[0]


def all_figures(trainer: Any, records: list[Record], last: Measured | None = None) -> dict[str, Any]:
    """The figures of a run, whose last stage may be measured again."""
    if not records:
        return {}
    tuner, stages = trainer.tuner, [*records[:-1], last or records[-1]]
    matrix, counts = _matrix(stages, "accuracy"), [record["test_images"] for record in records]
    figures: dict[str, Any] = {"accuracy_matrix": metrics.accuracy_matrix(stages)}
    if any(counts):
        with warnings.catch_warnings():
            router = (tuner.router or trainer.args.make_router()).used(tuner.layer.experts)
            if router.needs_statistics or sum(map(len, tuner.experts.values())) > len(tuner.classes):
                # The task's own expert is no upper bound, and nothing leaks.
                warnings.filterwarnings("ignore", "routed accuracy .* is above", UserWarning)
            known, routing = (np.array(stages[-1][name], dtype=float) for name in ("task_known", "routing"))
            figures |= metrics.summarize(matrix, counts, known, routing)
        if "entropy" in stages[-1]:  # earlier versions did not measure it
            figures["entropy_accuracy"] = metrics.last_accuracy(np.array([stages[-1]["entropy"]], dtype=float), counts)
        figures["task_known_forgetting"] = metrics.forgetting(_matrix(stages, "task_known"))
    if last is not None and tuner.router != trainer.args.make_router():
        # Earlier stages were measured with another router and cannot be compared with this one.
        figures["accuracy_matrix"] = [*([[None] * len(records)] * (len(records) - 1)), last["accuracy"]]
        figures = {name: value for name, value in figures.items() if name not in metrics.COMPARING_STAGES}
    return figures


def _matrix(stages: list[dict[str, Any]], name: str) -> Floats:
    """What each stage measured of each task, (stages, tasks); NaN where it did not."""
    matrix = np.full((len(stages), len(stages)), np.nan)
    for row, stage in zip(matrix, stages, strict=True):
        row[: len(stage[name])] = np.array(stage[name], dtype=float)
    return matrix
