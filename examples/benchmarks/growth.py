"""
From 2 to 1,000 experts: time, memory, bytes on disk and accuracy. Beyond what a data set has, classes are drawn: a
class's mean from a Gaussian with the covariance of the data set's class means, an image from a Gaussian around it with
the covariance within its classes, both of the raw [CLS]. Experts are taught and saved by `ContinualTrainer`.

    python examples/benchmarks/growth.py --model ../shared/models/dinov2-small --dataset ../shared/data/emoji
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import datasets
import torch
from bench import Bench, Part, StreamArguments, clock
from environment import write_results
from memory import memory
from PIL import Image
from torch import Tensor
from transformers import HfArgumentParser, PrinterCallback
from transformers.utils import logging

from peft_luca import ContinualTrainer, ContinualTrainingArguments, FeatureDataset, LucaConfig, TaskStream
from peft_luca.routing.router import get_router


@dataclass
class GrowthArguments(StreamArguments):
    """How far to grow."""

    experts: list[int] = field(default_factory=lambda: [2, 10, 30, 100, 300, 1000], metadata={"help": "Stops."})
    classes_each: int = field(default=2, metadata={"help": "Classes of an expert."})
    images: int = field(default=40, metadata={"help": "Train images of a class."})
    tests: int = field(default=500, metadata={"help": "Test images at a stop, of classes drawn from all."})
    epochs: int = field(default=5, metadata={"help": "Epochs of an expert."})
    seed: int = field(default=0, metadata={"help": "Of what is drawn."})
    output: str = field(
        default=str(Path(__file__).parent / "results" / "growth.json"), metadata={"help": "Where the figures go."}
    )


class Drawn:
    """Classes and images as they are drawn, the same whenever they are asked for."""

    def __init__(self, train: Part | FeatureDataset, seed: int) -> None:
        z, y = train.features.double(), train.labels
        means = torch.stack([z[y == k].mean(0) for k in y.unique()])
        within = z - means[torch.unique(y, return_inverse=True)[1]]
        self.centre, self.seed = means.mean(0), seed
        self.between, self.within = (
            _root(rows.T @ rows / freedom)
            for rows, freedom in ((means - self.centre, len(means) - 1), (within, len(z) - len(means)))
        )

    def images(self, k: int, count: int, draw: int = 0) -> Tensor:
        """[CLS] of `count` images of class `k`, (count, d); of others for another `draw`."""
        normal = torch.Generator().manual_seed(hash((self.seed, k)))
        mean = self.centre + self.between @ torch.randn(len(self.centre), generator=normal).double()
        normal.manual_seed(hash((self.seed, k, draw)))
        return (mean + torch.randn(count, len(mean), generator=normal).double() @ self.within).float()


def _root(covariance: Tensor) -> Tensor:
    values, basis = torch.linalg.eigh(covariance)
    return basis @ torch.diag(values.clamp(min=0).sqrt()) @ basis.T


class DrawnTrainer(ContinualTrainer):
    """A trainer that is given what is drawn."""

    drawn: Drawn
    images: int

    def features(self, task: Any, split: str) -> FeatureDataset:
        ids = [self.stream.classes.index(name) for name in task.classes]
        found = [self.drawn.images(int(name), self.images) for name in task.classes]
        return FeatureDataset(torch.cat(found), torch.tensor(ids).repeat_interleave(self.images))


def weigh(folder: Path, name: str) -> int:
    return sum(file.stat().st_size for file in folder.rglob(name))


@torch.no_grad()
def look(trainer: DrawnTrainer, args: GrowthArguments, folder: Path, pass_: float) -> dict[str, Any]:
    """Everything that is measured at a stop."""
    layer = trainer.tuner.layer
    experts, classes = len(layer.configs), len(trainer.tuner.classes)
    chosen = torch.randint(classes, (args.tests,), generator=torch.Generator().manual_seed(args.seed))
    z = torch.cat([trainer.drawn.images(k, 1, draw) for draw, k in enumerate(chosen.tolist(), start=1)])
    z = z.to(next(layer.parameters()).device)
    names = [int(name) for name in trainer.tuner.classes]
    owner = torch.tensor([t for t, own in enumerate(trainer.tuner.experts.values()) for _ in own])
    figures: dict[str, Any] = {"experts": experts, "classes": classes}
    for router in ("entropy", "gaussian"):
        started = clock()
        layer.set_router(get_router(router), {})
        layer.route(z[:1])
        ready = clock() - started
        started = clock()
        output = layer.route(z)
        routing = (clock() - started) / len(z)
        figures |= {
            f"{router} accuracy": round(
                float((torch.tensor(names)[output.logits.argmax(1).cpu()] == chosen).double().mean()), 4
            ),
            f"{router} routing accuracy": round(float((output.expert.cpu() == owner[chosen]).double().mean()), 4),
            f"{router} made ready, seconds": round(ready, 3),
            f"{router} milliseconds per image": round(1000 * routing, 4),
            f"{router} passes per image": round(routing / pass_, 4),
        }
    tensors = [t for name, t in layer.state_dict().items() if not name.startswith("base_layer.")]
    return figures | {
        "experts in memory, bytes": sum(t.numel() * t.element_size() for t in tensors),
        "statistics in memory, bytes": sum(part.nbytes for part in layer.statistics.values()),
        "process, GiB of anonymous memory": round(memory("RssAnon") / 2**30, 3),
        "experts on disk, bytes": weigh(folder, "adapter_model.safetensors"),
        "statistics on disk, bytes": weigh(folder, "statistics.safetensors"),
        "configs and manifest on disk, bytes": weigh(folder, "adapter_config.json") + weigh(folder, "experts.json"),
        "results.json, bytes": weigh(folder, "results.json"),
    }


def parse(arguments: list[str] | None = None) -> GrowthArguments:
    (args,) = HfArgumentParser(GrowthArguments).parse_args_into_dataclasses(arguments)
    return args


def grow(args: GrowthArguments) -> None:
    bench = Bench(args)
    train = bench.part(bench.stream(0, joint=True)[0], "train", bench.classes)
    assert train is not None
    classes = max(args.experts) * args.classes_each
    columns = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    pictures = datasets.Dataset.from_dict(
        {"image": [Image.new("RGB", (8, 8))] * classes, "label": list(range(classes))}, features=columns
    )
    stream = TaskStream.from_dataset(pictures, increment=args.classes_each, seed=None)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        settings = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
        trainer = DrawnTrainer(
            bench.model,
            ContinualTrainingArguments(folder, num_train_epochs=args.epochs, **settings),
            stream,
            LucaConfig(),
            bench.processor,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.drawn, trainer.images = Drawn(train, args.seed), args.images
        taught: list[float] = []
        for number, task in enumerate(stream, start=1):
            started = clock()
            trainer.train_task(task)
            taught.append(clock() - started)
            if number in args.experts:
                figures = look(trainer, args, Path(folder), bench.seconds_per_image)
                trainer.tuner.set_router("entropy")
                figures["learning the last experts, seconds each"] = round(mean(taught[-10:]), 3)
                figures["learning all experts, seconds"] = round(sum(taught), 1)
                rows.append(figures)
                print(figures, flush=True)
                write_results(
                    args.output,
                    model=Path(args.model).name,
                    covariances_of=Path(args.dataset).resolve().name,
                    width=bench.width,
                    classes_each=args.classes_each,
                    images=args.images,
                    tests=args.tests,
                    epochs=args.epochs,
                    seed=args.seed,
                    milliseconds_of_a_pass=round(1000 * bench.seconds_per_image, 3),
                    rows=rows,
                )


def main() -> None:
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", message="Adapter|.*is_gradient_checkpointing")
    torch.set_num_threads(1)
    gc.freeze()  # Trainer collects garbage before every task: a third of a second over all that the imports have made
    grow(parse())


if __name__ == "__main__":
    main()
