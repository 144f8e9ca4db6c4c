"""
What every row stands on: a data set as a stream of tasks, [CLS] of its images computed once, and the measuring of a
method on them.
"""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Image, concatenate_datasets, load_dataset, load_from_disk
from peft import get_peft_model
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageClassification

from peft_luca import FeatureDataset, ImageCollator, LucaConfig, TaskStream
from peft_luca.data.feature_cache import FeatureExtractor, default_cache_dir, digest_images, features_key
from peft_luca.routing.statistics import unit_features
from peft_luca.training.metrics import summarize


sys.path.insert(0, str(Path(__file__).parent.parent))
from cil import BUNDLED_BACKBONE, DIGITS, digits


SPLIT_SEED = 1993
BATCH = 32
TIMED_IMAGES = 64


@dataclass
class StreamArguments:
    """Which data, on which backbone, in which tasks."""

    model: str = field(default=str(BUNDLED_BACKBONE), metadata={"help": "An image classifier: Hub id or folder."})
    dataset: str = field(default=DIGITS, metadata={"help": "Hub id, folder of images or of data files, or 'digits'."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found if there is one."})
    label_column: str = field(default="label", metadata={"help": "Column of the labels."})
    train_split: str = field(default="train", metadata={"help": "Split to learn from."})
    test_split: str | None = field(default=None, metadata={"help": "Split to measure on: test, else validation."})
    test_size: float | None = field(
        default=None, metadata={"help": "Share held out, if there is no test split; 0 for none."}
    )
    increment: int | None = field(default=None, metadata={"help": "Classes per task."})
    init_classes: int | None = field(default=None, metadata={"help": "Classes of the first task, if another number."})
    class_order: str = field(
        default="seeded", metadata={"help": "Drawn by seed, or as in the data.", "choices": ["seeded", "dataset"]}
    )
    domain_column: str | None = field(default=None, metadata={"help": "One domain after another, by this column."})
    domain_order: list[str] | None = field(default=None, metadata={"help": "The domains in their order."})
    image_size: int | None = field(default=None, metadata={"help": "Side in pixels, if not the processor's."})


@dataclass
class Part:
    """Train or test images of one task: [CLS] as it leaves the backbone, the stream's label ids, and the images."""

    features: Tensor
    labels: Tensor
    images: Dataset

    def __len__(self) -> int:
        return len(self.labels)


def load(args: StreamArguments) -> Any:
    """The data set, with a column that is named as the images' made one if it holds paths or bytes."""
    if args.dataset == DIGITS:
        return digits()
    folder = Path(args.dataset)
    try:
        saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
        dataset = load_from_disk(folder) if saved else load_dataset(args.dataset, args.dataset_config)
    except Exception as error:
        known = "is a folder" if folder.is_dir() else "is no folder here, so it was looked up on the Hub"
        raise SystemExit(
            f"the data set {args.dataset!r} cannot be loaded ({known}): {error}\nNeeded: a Hub id, a folder "
            "<split>/<class>/<image>, or a folder of parquet, arrow, csv or json files with a column of images."
        ) from error
    splits = dataset if isinstance(dataset, DatasetDict) else DatasetDict({args.train_split: dataset})
    column = args.image_column
    for name, part in splits.items():
        if column in part.column_names and not isinstance(part.features[column], Image):
            try:
                splits[name] = part.cast_column(column, Image())
            except (TypeError, NotImplementedError) as error:  # as pyarrow's errors are
                raise SystemExit(
                    f"column {column!r} holds {part.features[column]}, which are neither images nor paths or bytes of "
                    f"images; name another with --image_column, one of {part.column_names}."
                ) from error
    return splits


class Bench:
    """A data set on a backbone: [CLS] of every image, once, whatever the tasks, and whatever the method."""

    def __init__(self, args: StreamArguments) -> None:
        self.args = args
        self.device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        self.model = AutoModelForImageClassification.from_pretrained(args.model, dtype=torch.float32).eval()
        self.model.to(self.device)
        self.processor = AutoImageProcessor.from_pretrained(args.model)
        if args.image_size is not None:
            set_image_size(self.processor, args.image_size)
        self.whole = self._read()
        if not any(task.test is not None for task in self.whole):
            raise SystemExit(
                f"{args.dataset!r} has no test images. Name their split with --test_split, or hold out a share of the "
                "train images with --test_size 0.2."
            )
        classes = len(self.whole.classes)
        if args.increment is not None and args.increment > classes:
            raise SystemExit(f"--increment {args.increment} is more than the {classes} classes that there are.")
        self.collator = ImageCollator(self.processor, self.whole.image_column)
        tuner = get_peft_model(self.model, LucaConfig(classes=["a", "b"])).base_model
        self.reference: tuple[Any, Any] = (None, None)
        if tuner.backbone.image_size is not None:
            tuner.compute_reference("default")
            layer = tuner.layer
            self.reference = layer.luca_reference_mean["default"].cpu(), layer.luca_reference_std["default"].cpu()
        self.width = tuner.layer.width
        self.features = {
            (task.name, split): self._extract(tuner, dataset)
            for task in self.whole
            for split, dataset in (("train", task.train), ("test", task.test))
            if dataset is not None
        }
        self.seconds_per_image = self._time_a_pass(tuner)
        tuner.unload()

    def _read(self) -> TaskStream:
        try:
            return self._stream_of_all()
        except ValueError as error:
            raise SystemExit(
                f"{error}\nFrom the shell: --label_column, --image_column, --train_split, --test_split, --test_size."
            ) from error

    def _stream_of_all(self) -> TaskStream:
        """Domains as tasks, or all classes as one task, in the data set's own order."""
        args, dataset = self.args, load(self.args)
        columns: dict[str, Any] = {"label_column": args.label_column, "image_column": args.image_column}
        columns |= {"train_split": args.train_split, "test_split": args.test_split}
        if not isinstance(dataset, DatasetDict):
            columns["test_split"] = None
        if args.domain_column is not None:
            return TaskStream.from_domains(
                dataset, domain_column=args.domain_column, domain_order=args.domain_order, **columns
            )
        order = TaskStream.from_dataset(dataset, seed=None, **columns).classes
        return TaskStream.from_dataset(
            dataset, class_order=order, seed=SPLIT_SEED, test_size=args.test_size or None, **columns
        )

    def _extract(self, tuner: Any, dataset: Dataset) -> FeatureDataset:
        images = digest_images(dataset, self.whole.image_column)
        key = features_key(tuner.backbone, self.collator, images)
        path = Path(default_cache_dir()) / f"{key}.arrow"
        extract = FeatureExtractor(lambda pixels: tuner.pooled_features(pixels.to(self.device)), self.collator, BATCH)
        return extract(dataset, path)

    @torch.no_grad()
    def _time_a_pass(self, tuner: Any) -> float:
        """Seconds that one image takes through image processor and backbone: the median of three rounds."""
        images = self.whole[0].train
        rows = range(min(TIMED_IMAGES, len(images)))
        rounds = []
        for _ in range(3):
            started = clock()
            for first in range(0, len(rows), BATCH):
                batch = [images[row] for row in rows[first : first + BATCH]]
                tuner.pooled_features(self.collator(batch)["pixel_values"].to(self.device))
            rounds.append((clock() - started) / len(rows))
        return sorted(rounds)[1]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.whole.classes

    def stream(self, seed: int, joint: bool = False) -> TaskStream:
        """The tasks, of train images alone: every method is measured by the same code, none by itself."""
        names = ClassLabel(names=list(self.classes))
        tasks = {task.name: task.train.cast_column("labels", names) for task in self.whole}
        if self.args.domain_column is not None and not joint:
            return TaskStream.from_tasks(tasks, label_column="labels")
        return TaskStream.from_dataset(
            concatenate_datasets(list(tasks.values())),
            label_column="labels",
            increment=None if joint else self.args.increment,
            init_classes=None if joint else self.args.init_classes,
            seed=seed if self.args.class_order == "seeded" and not joint else None,
        )

    def part(self, task: Any, split: str, ids: tuple[str, ...]) -> Part | None:
        """A task's images, labelled by position in `ids`: of its own domain, or of its classes wherever they are."""
        place = torch.tensor([ids.index(name) if name in task.classes else -1 for name in self.classes])
        of_a_domain = self.args.domain_column is not None and (task.name, "train") in self.features
        parts = []
        for known in self.whole:
            found = self.features.get((known.name, split))
            if found is None or (of_a_domain and known.name != task.name):
                continue
            labels = place[found.labels]
            rows = (labels >= 0).nonzero()[:, 0]
            images = known.train if split == "train" else known.test
            parts.append(Part(found.features[rows], labels[rows], images.select(rows.tolist())))
        if not sum(map(len, parts)):
            return None
        features, labels = (torch.cat([getattr(p, name) for p in parts]) for name in ("features", "labels"))
        return Part(features, labels, concatenate_datasets([p.images for p in parts]))

    def unit(self, z: Tensor) -> Tensor:
        """[CLS] standardised by the backbone's reference and of length 1: what closed forms are made of."""
        return unit_features(z.double(), *self.reference)

    def pixels(self, part: Part, rows: Tensor) -> Tensor:
        column = self.whole.image_column
        batch = self.collator([{column: image} for image in part.images[rows.tolist()][column]])
        return batch["pixel_values"].to(self.device)


def clock() -> float:
    """Processor time, which other work on the machine disturbs little; with an accelerator, time that has passed."""
    if not torch.accelerator.is_available():
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def set_image_size(processor: Any, size: int) -> None:
    """Shorter side to 256/224 of the size and its middle where the processor crops, the size itself where not."""
    square = {"height": size, "width": size}
    if getattr(processor, "crop_size", None) is not None:
        processor.crop_size, processor.size = square, {"shortest_edge": size * 256 // 224}
    else:
        processor.size = square


def timed(function: Any, *arguments: Any) -> tuple[float, Any]:
    started = clock()
    result = function(*arguments)
    return clock() - started, result


def measure(method: Any, bench: Bench, seed: int) -> dict[str, Any]:
    """
    Every task learnt in turn and, after each, every test image of the tasks seen answered. Times are in passes
    of the backbone over the train images (learning) or over the test images (answering, after the last
    task); those who learn from [CLS] are charged the one pass that it takes.
    """
    stream = bench.stream(seed)
    ids, tasks = stream.classes, list(stream)
    tests = [bench.part(task, "test", ids) for task in tasks]
    counts = [0 if test is None else len(test) for test in tests]
    matrix = np.full((len(tasks), len(tasks)), np.nan)
    routing, known = np.full(len(tasks), np.nan), np.full(len(tasks), np.nan)
    learner = method(bench, bench.stream(seed, joint=True) if method.joint else stream, ids, seed)
    learning = answering = 0.0
    images = 0
    for stage, task in enumerate(learner.stream):
        train = bench.part(task, "train", ids)
        images += len(train)
        learning += timed(learner.learn, task, train)[0]
        stage = len(tasks) - 1 if method.joint else stage  # what is trained on everything knows the last stage only
        for i, test in enumerate(tests[: stage + 1]):
            if test is None:
                continue
            seconds, (labels, experts) = timed(learner.answer, test)
            matrix[stage, i] = float((labels == test.labels).double().mean())
            if stage == len(tasks) - 1:
                answering += seconds
                if experts is not None:
                    routing[i] = float((experts == i).double().mean())
                    known[i] = float((learner.answer_known(test, i) == test.labels).double().mean())
    with warnings.catch_warnings():
        # Where domains share classes, another expert than the domain's own may know better, and nothing leaks.
        warnings.filterwarnings("ignore", "routed accuracy .* is above", UserWarning)
        figures = summarize(matrix, counts, *(() if np.isnan(routing).all() else (known, routing)))
    if method.joint:
        figures |= {"average_accuracy": None, "forgetting": None, "backward_transfer": None}
    cached = 0.0 if method.passes_itself else 1.0
    figures |= {
        "stage_classes": [len({c for t in tasks[: s + 1] for c in t.classes}) for s in range(len(tasks))],
        "parameters_per_task": learner.parameters() / len(tasks),
        "bytes_per_task": learner.bytes() / len(tasks),
        "learning_passes": cached + learning / (bench.seconds_per_image * images),
        "answering_passes": cached + answering / (bench.seconds_per_image * sum(counts)),
        "milliseconds_per_image": 1000 * bench.seconds_per_image,
    }
    learner.close()
    return figures
