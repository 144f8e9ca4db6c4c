"""
What every measurement shares: arguments and configs, a data set as a stream of tasks with [CLS] of its images computed
once, methods and how they are evaluated, and the writing of results files.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar

import datasets
import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Image, concatenate_datasets, load_dataset, load_from_disk
from peft import get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageClassification, HfArgumentParser, PrinterCallback
from transformers.utils import logging

import peft_luca
from peft_luca import (
    ContinualTrainer,
    ContinualTrainingArguments,
    FeatureDataset,
    ImageCollator,
    LucaConfig,
    TaskStream,
)
from peft_luca.routing.statistics import unit_features
from peft_luca.training.metrics import summarize


sys.path.insert(0, str(Path(__file__).parent.parent))
from cil import BUNDLED_BACKBONE, DIGITS, digits


HERE = Path(__file__).parent
CONFIGS, RESULTS = HERE / "configs", HERE / "results"
PACKAGES = ("torch", "peft", "transformers", "accelerate", "datasets", "numpy")
SPLIT_SEED = 1993
BATCH, TIMED_IMAGES = 32, 64
# Entries of a config that are not arguments.
NOTES = ("offline", "rows", "source", "note")

Arguments = TypeVar("Arguments", bound="StreamArguments")


# ---- arguments ---------------------------------------------------------------------------------------------------


@dataclass
class StreamArguments:
    """The data, the backbone and the tasks."""

    name: str = field(default="", metadata={"help": "Name of the stream; by default the data set's."})
    model: str = field(default=str(BUNDLED_BACKBONE), metadata={"help": "An image classifier: Hub id or folder."})
    dataset: str = field(default=DIGITS, metadata={"help": "Hub id, folder of images or of data files, or 'digits'."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found if there is one."})
    label_column: str = field(default="label", metadata={"help": "Column of the labels."})
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    test_split: str | None = field(default=None, metadata={"help": "Split to test on: test, else validation."})
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
    seeds: list[int] = field(
        default_factory=lambda: [1993, 0, 1, 2, 3], metadata={"help": "Seeds of class order and training."}
    )


def read_config(path: Path) -> Any:
    if not path.is_file():
        raise SystemExit(
            f"there is no config {path}. There are {', '.join(sorted(map(str, CONFIGS.glob('*.json'))))}."
        )
    return json.loads(path.read_text(encoding="utf-8"))


def arguments_of(config: dict[str, Any]) -> list[str]:
    """A config's entries as command line arguments."""
    found: list[str] = []
    for name, value in config.items():
        if name not in NOTES:
            values = value if isinstance(value, list) else [value]
            found += [f"--{name}", *(v if isinstance(v, str) else json.dumps(v) for v in values)]
    return found


def parse(kind: type[Arguments], given: list[str]) -> Arguments:
    """Arguments of a script. A config may come first; what follows it on the command line wins."""
    if given and given[0].endswith(".json"):
        given = [*arguments_of(read_config(Path(given[0]))), *given[1:]]
    args, unknown = HfArgumentParser(kind).parse_args_into_dataclasses(given, return_remaining_strings=True)
    if unknown:
        raise SystemExit(f"there is no argument {unknown[0]!r}. See --help.")
    args.name = args.name or Path(args.dataset).resolve().name
    return args


def be_quiet() -> None:
    """One thread, so that times can be compared, and no progress bars or warnings between the figures."""
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    warnings.filterwarnings(
        "ignore", message="Adapter|routing_scope|lbfgs|The least populated class|.*is_gradient_checkpointing"
    )
    torch.set_num_threads(1)


# ---- results files -----------------------------------------------------------------------------------------------


def write_results(output: str | Path, **content: Any) -> None:
    """Write a results file: the command, versions, kind of machine, and what was measured."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "CPU"
    environment = {
        "peft_luca": peft_luca.__version__,
        **{name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {device}, {torch.get_num_threads()} threads",
    }
    command = shlex.join(["python", *sys.argv])
    text = json.dumps({"command": command, "environment": environment, **content}, indent=2)
    Path(output).write_text(text + "\n", encoding="utf-8")


def mean_and_deviation(values: list[float]) -> dict[str, float | None]:
    return {"mean": round(mean(values), 4), "deviation": round(stdev(values), 4) if len(values) > 1 else None}


def clock() -> float:
    """Processor time, which other work on the machine disturbs little; with an accelerator, time that has passed."""
    if not torch.accelerator.is_available():
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    started = clock()
    result = function(*arguments)
    return clock() - started, result


# ---- training on features that are there already -----------------------------------------------------------------


class FeatureTrainer(ContinualTrainer):
    """A trainer that is given [CLS] and does not compute it. `given(task, split)` returns a `FeatureDataset`."""

    given: Callable[[Any, str], FeatureDataset]

    def features(self, task: Any, split: str) -> FeatureDataset:
        return self.given(task, split)


def make_trainer(
    model: Any, processor: Any, stream: TaskStream, folder: str, given: Any, config: Any = None, **settings: Any
) -> FeatureTrainer:
    """A quiet trainer with fields of `LucaConfig` and of `ContinualTrainingArguments`."""
    settings = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", **settings}
    arguments = ContinualTrainingArguments(folder, **settings)
    trainer = FeatureTrainer(model, arguments, stream, LucaConfig(**config or {}), processor)
    trainer.remove_callback(PrinterCallback)
    trainer.given = given
    return trainer


# ---- data --------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """Images of one split: [CLS] as it leaves the backbone (images, d), label ids (images,), and the images."""

    features: Tensor
    labels: Tensor
    images: Dataset

    def __len__(self) -> int:
        return len(self.labels)


def load(args: StreamArguments) -> Any:
    """The data set. A column named for the images that holds paths or bytes becomes one of images."""
    if args.dataset == DIGITS:
        return digits()
    folder = Path(args.dataset)
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    dataset = load_from_disk(folder) if saved else load_dataset(args.dataset)
    splits = dataset if isinstance(dataset, DatasetDict) else DatasetDict({args.train_split: dataset})
    column = args.image_column
    for name, part in splits.items():
        if column in part.column_names and not isinstance(part.features[column], Image):
            splits[name] = part.cast_column(column, Image())
    return splits


class Bench:
    """A data set on a backbone, with [CLS] of every image, for all methods and all orders of classes."""

    def __init__(self, args: StreamArguments) -> None:
        self.args = args
        self.device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        self.model: Any = AutoModelForImageClassification.from_pretrained(args.model, dtype=torch.float32).eval()
        self.model.to(self.device)
        self.processor = AutoImageProcessor.from_pretrained(args.model)
        if args.image_size is not None:
            set_image_size(self.processor, args.image_size)
        try:
            whole = self._read()
        except (ValueError, OSError, TypeError, NotImplementedError) as error:
            raise SystemExit(
                f"the data set {args.dataset!r} cannot be read: {error}\nArguments that say how: --image_column, "
                "--label_column, --train_split, --test_split, --test_size."
            ) from error
        self.classes = whole.classes
        if not any(task.test is not None for task in whole):
            raise SystemExit(f"{args.dataset!r} has no test images. Give --test_split, or --test_size 0.2.")
        if args.increment is not None and args.increment > len(self.classes):
            raise SystemExit(f"--increment {args.increment} is more than the {len(self.classes)} classes.")
        self.domains = [task.name for task in whole] if args.domain_column else []
        self.collator = ImageCollator(self.processor, whole.image_column)
        self._look(whole)

    def _read(self) -> TaskStream:
        """One task for each domain, or all classes as one task in the data set's own order."""
        args, dataset = self.args, load(self.args)
        columns: dict[str, Any] = {"label_column": args.label_column, "image_column": args.image_column}
        if isinstance(dataset, DatasetDict):
            columns |= {"train_split": args.train_split, "test_split": args.test_split}
        if args.domain_column is not None:
            return TaskStream.from_domains(
                dataset, domain_column=args.domain_column, domain_order=args.domain_order, **columns
            )
        order = TaskStream.from_dataset(dataset, seed=None, **columns).classes
        test_size = args.test_size or None
        return TaskStream.from_dataset(dataset, class_order=order, seed=SPLIT_SEED, test_size=test_size, **columns)

    def _look(self, whole: TaskStream) -> None:
        """Compute the reference of the backbone, [CLS] of every image, and the time of a pass."""
        model = get_peft_model(self.model, LucaConfig(classes=["a", "b"]), adapter_name="probe")
        self.reference: tuple[Any, Any] = (None, None)
        if getattr(self.model.config, "image_size", None) is not None:
            model.compute_reference()
            tensors = {
                name.split(".")[-1]: tensor
                for name, tensor in get_peft_model_state_dict(model, adapter_name="probe").items()
            }
            self.reference = tensors["luca_reference_mean"].cpu(), tensors["luca_reference_std"].cpu()
        self.parts: dict[str, Part] = {}
        self.domain: dict[str, Tensor] = {}  # split → number of each image's task in the whole
        with tempfile.TemporaryDirectory() as folder:
            settings = {"report_to": "none", "disable_tqdm": True, "router": "entropy"}
            trainer = ContinualTrainer(
                model, ContinualTrainingArguments(folder, **settings), whole, processing_class=self.processor
            )
            for split in ("train", "test"):
                there = {t: task for t, task in enumerate(whole) if getattr(task, split) is not None}
                found = [trainer.features(task, split) for task in there.values()]
                features, labels = (torch.cat([getattr(f, name) for f in found]) for name in ("features", "labels"))
                images = concatenate_datasets([getattr(task, split) for task in there.values()])
                self.parts[split] = Part(features.clone(), labels, images)
                self.domain[split] = torch.tensor(list(there)).repeat_interleave(torch.tensor(list(map(len, found))))
        self.width = self.parts["train"].features.shape[1]
        self.seconds_per_image = self._time_a_pass(model)
        self.model = model.unload()

    @torch.no_grad()
    def _time_a_pass(self, model: Any) -> float:
        """Seconds that one image takes through image processor and backbone: the median of three rounds."""
        train, rounds = self.parts["train"], []
        for _ in range(3):
            started = clock()
            for rows in torch.arange(min(TIMED_IMAGES, len(train))).split(BATCH):
                model.pooled_features(self.pixels(train, rows))
            rounds.append((clock() - started) / min(TIMED_IMAGES, len(train)))
        return sorted(rounds)[1]

    def stream(self, seed: int, joint: bool = False) -> TaskStream:
        """The tasks, of train images alone: every method is measured by the same code, none by itself."""
        train = self.parts["train"].images.cast_column("labels", ClassLabel(names=list(self.classes)))
        if self.domains and not joint:
            rows = {name: (self.domain["train"] == t).nonzero()[:, 0] for t, name in enumerate(self.domains)}
            return TaskStream.from_tasks(
                {name: train.select(own.tolist()) for name, own in rows.items()}, label_column="labels"
            )
        return TaskStream.from_dataset(
            train,
            label_column="labels",
            image_column=self.collator.image_column,
            increment=None if joint else self.args.increment,
            init_classes=None if joint else self.args.init_classes,
            seed=seed if self.args.class_order == "seeded" and not joint else None,
        )

    def part(self, task: Any, split: str, ids: tuple[str, ...]) -> Part | None:
        """The images of a task, labelled by position in `ids`; of a domain's task those of its domain alone."""
        domain = self.domains.index(task.name) if task.name in self.domains else None
        part = self.select(split, task.classes, ids, domain)
        return part if len(part) else None

    def select(self, split: str, classes: Any, ids: tuple[str, ...], domain: int | None = None) -> Part:
        """The images of some classes, labelled by position in `ids`."""
        whole = self.parts[split]
        place = torch.tensor([ids.index(name) if name in classes else -1 for name in self.classes])
        labels = place[whole.labels]
        keep = (labels >= 0) & ((self.domain[split] == domain) if domain is not None else True)
        rows = keep.nonzero()[:, 0]
        return Part(whole.features[rows], labels[rows], whole.images.select(rows.tolist()))

    def given(self, stream: TaskStream) -> Callable[[Any, str], FeatureDataset]:
        """The features of a stream's tasks, for [`FeatureTrainer`]."""

        def features(task: Any, split: str) -> FeatureDataset:
            part = self.part(task, split, stream.classes)
            assert part is not None
            return FeatureDataset(part.features, part.labels)

        return features

    def unit(self, z: Tensor) -> Tensor:
        """[CLS], (images, d), standardized by the backbone's reference and of length 1: the closed forms' input."""
        return unit_features(z.double(), *self.reference)

    def pixels(self, part: Part, rows: Tensor) -> Tensor:
        column = self.collator.image_column
        batch = self.collator([{column: image} for image in part.images[rows.tolist()][column]])
        return batch["pixel_values"].to(self.device)


def set_image_size(processor: Any, size: int) -> None:
    """Shorter side to 256/224 of the size and its middle where the processor crops, the size itself where not."""
    square = {"height": size, "width": size}
    if getattr(processor, "crop_size", None) is not None:
        processor.crop_size, processor.size = square, {"shortest_edge": size * 256 // 224}
    else:
        processor.size = square


# ---- methods and how they are measured ---------------------------------------------------------------------------


class Method:
    """A way to learn `stream`. `ids` are the class names in the order of their label ids."""

    joint = False  # learns all classes at once: a bound, not a continual learner
    runs_backbone = False  # passes images through the backbone itself; others learn from [CLS], which costs one pass

    def __init__(self, bench: Bench, stream: TaskStream, ids: tuple[str, ...], seed: int) -> None:
        self.bench, self.stream, self.ids, self.seed = bench, stream, ids, seed

    def fit(self, task: Any, train: Part) -> None:
        """Learn one more task."""
        raise NotImplementedError

    def predict(self, test: Part) -> tuple[Tensor, Tensor | None]:
        """Label ids (images,), and the number of the expert that gave each, or `None` where there are no experts."""
        raise NotImplementedError

    def predict_known(self, test: Part, t: int) -> Tensor:
        """Label ids (images,) by the expert of task t alone, where there are experts."""
        raise NotImplementedError

    def parameters(self) -> int:
        """How many numbers were learned, of all tasks."""
        raise NotImplementedError

    def bytes(self) -> int:
        """What is kept from one task to the next, of all tasks."""
        return 4 * self.parameters()

    def figures(self) -> dict[str, float]:
        """Further figures, when all is learned."""
        return {}

    def close(self) -> None:
        """Give the backbone back as it was."""


def measure(kind: type[Method], bench: Bench, seed: int) -> dict[str, Any]:
    """
    Learn every task in turn and, after each, predict every test image of the tasks seen. Times are in passes of the
    backbone over the train images (learning) or over the test images (answering, after the last task); a method that
    learns from [CLS] is charged the one pass that it takes.
    """
    stream = bench.stream(seed)
    ids, tasks = stream.classes, list(stream)
    tests = [bench.part(task, "test", ids) for task in tasks]
    counts = [0 if test is None else len(test) for test in tests]
    matrix = np.full((len(tasks), len(tasks)), np.nan)
    routing, known = np.full(len(tasks), np.nan), np.full(len(tasks), np.nan)
    method = kind(bench, bench.stream(seed, joint=True) if kind.joint else stream, ids, seed)
    learning = answering = 0.0
    for stage, task in enumerate(method.stream):
        learning += timed(method.fit, task, bench.part(task, "train", ids))[0]
        stage = len(tasks) - 1 if kind.joint else stage  # a joint method knows the last stage only
        for i, test in enumerate(tests[: stage + 1]):
            if test is None:
                continue
            seconds, (labels, experts) = timed(method.predict, test)
            matrix[stage, i] = float((labels == test.labels).double().mean())
            if stage == len(tasks) - 1:
                answering += seconds
                if experts is not None:
                    routing[i] = float((experts == i).double().mean())
                    known[i] = float((method.predict_known(test, i) == test.labels).double().mean())
    with warnings.catch_warnings():
        # Where domains share classes, another expert than the domain's own may know better, and nothing leaks.
        warnings.filterwarnings("ignore", "routed accuracy .* is above", UserWarning)
        figures = summarize(matrix, counts, *(() if np.isnan(routing).all() else (known, routing)))
    if kind.joint:
        figures |= {"average_accuracy": None, "forgetting": None, "backward_transfer": None}
    cached = 0.0 if kind.runs_backbone else 1.0
    figures |= {
        "stage_classes": [len({c for t in tasks[: s + 1] for c in t.classes}) for s in range(len(tasks))],
        "parameters_per_task": method.parameters() / len(tasks),
        "bytes_per_task": method.bytes() / len(tasks),
        "learning_passes": cached + learning / (bench.seconds_per_image * len(bench.parts["train"])),
        "answering_passes": cached + answering / (bench.seconds_per_image * sum(counts)),
        "milliseconds_per_image": 1000 * bench.seconds_per_image,
        **method.figures(),
    }
    method.close()
    return figures
