"""
From 2 to 1,000 experts: time, memory, bytes on disk and accuracy. Beyond what a data set has, classes are drawn: a
class's mean from a Gaussian with the covariance of the data set's class means, an image from a Gaussian around it with
the covariance within its classes, both of the raw [CLS]. Experts are trained and saved by `ContinualTrainer`.

    python examples/benchmarks/growth.py --model ../shared/models/dinov2-small --dataset ../shared/data/emoji
"""

from __future__ import annotations

import gc
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from cost import pictures, resident
from harness import RESULTS, Bench, Part, StreamArguments, be_quiet, clock, make_trainer, parse, timed, write_results
from torch import Tensor

from peft_luca import FeatureDataset, TaskStream


ROUTERS = "entropy", "gaussian"


@dataclass
class GrowthArguments(StreamArguments):
    """How far to grow."""

    experts: list[int] = field(default_factory=lambda: [2, 10, 30, 100, 300, 1000], metadata={"help": "Stops."})
    classes_each: int = field(default=2, metadata={"help": "Classes of an expert."})
    images: int = field(default=40, metadata={"help": "Train images of a class."})
    tests: int = field(default=500, metadata={"help": "Test images at a stop, of classes drawn from all."})
    epochs: int = field(default=5, metadata={"help": "Epochs of an expert."})
    seed: int = field(default=0, metadata={"help": "Of what is drawn."})
    output: str = field(default=str(RESULTS / "growth.json"), metadata={"help": "Where the figures go."})


class Drawn:
    """Classes and images that are drawn, the same whenever they are asked for."""

    def __init__(self, train: Part, seed: int) -> None:
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


def look(model: Any, drawn: Drawn, args: GrowthArguments, folder: Path, seconds_of_a_pass: float) -> dict[str, Any]:
    """Everything that is measured at a stop."""
    names = torch.tensor([int(name) for name in model.classes])
    chosen = torch.randint(len(names), (args.tests,), generator=torch.Generator().manual_seed(args.seed))
    z = torch.cat([drawn.images(k, 1, draw) for draw, k in enumerate(chosen.tolist(), start=1)])
    owner = torch.tensor([t for t, own in enumerate(model.experts.values()) for _ in own])
    figures: dict[str, Any] = {"experts": len(model.experts), "classes": len(names)}
    z = z.to(next(model.parameters()).device)
    for router in ROUTERS:
        ready, _ = timed(lambda router=router: (model.set_router(router), model.route_features(z[:1])))
        routing, output = timed(model.route_features, z)
        right = names[output.logits.argmax(1).cpu()] == chosen
        figures |= {
            f"{router} accuracy": round(float(right.double().mean()), 4),
            f"{router} routing accuracy": round(float((output.expert.cpu() == owner[chosen]).double().mean()), 4),
            f"{router} made ready, seconds": round(ready, 3),
            f"{router} milliseconds per image": round(1000 * routing / len(z), 4),
            f"{router} passes per image": round(routing / len(z) / seconds_of_a_pass, 4),
        }
    model.set_router("entropy")
    tensors = [tensor for name, tensor in model.state_dict().items() if ".luca_" in name]

    def weigh(*files: str) -> int:
        return sum(file.stat().st_size for name in files for file in folder.rglob(name))

    return figures | {
        "experts in memory, bytes": sum(tensor.nbytes for tensor in tensors),
        "statistics in memory, bytes": sum(
            tensor.nbytes for part in model.statistics.values() for tensor in part.tensors().values()
        ),
        "process, GiB of anonymous memory": round(resident() / 2**30, 3),
        "experts on disk, bytes": weigh("adapter_model.safetensors"),
        "statistics on disk, bytes": weigh("statistics.safetensors"),
        "configs and manifest on disk, bytes": weigh("adapter_config.json", "experts.json"),
        "results.json, bytes": weigh("results.json"),
    }


def grow(args: GrowthArguments) -> None:
    bench = Bench(args)
    drawn = Drawn(bench.parts["train"], args.seed)
    classes = max(args.experts) * args.classes_each
    one_each = pictures(classes, classes, side=8)  # [CLS] is drawn, but a stream has images
    stream = TaskStream.from_dataset(one_each, increment=args.classes_each, seed=None)

    def given(task: Any, split: str) -> FeatureDataset:
        ids = torch.tensor([stream.classes.index(name) for name in task.classes])
        found = [drawn.images(int(name), args.images) for name in task.classes]
        return FeatureDataset(torch.cat(found), ids.repeat_interleave(args.images))

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(bench.model, bench.processor, stream, folder, given, num_train_epochs=args.epochs)
        spent: list[float] = []
        for number, task in enumerate(stream, start=1):
            started = clock()
            trainer.train_task(task)
            spent.append(clock() - started)
            if number in args.experts:
                figures = look(trainer.model, drawn, args, Path(folder), bench.seconds_per_image)
                figures["learning the last experts, seconds each"] = round(mean(spent[-10:]), 3)
                figures["learning all experts, seconds"] = round(sum(spent), 1)
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


def parse_arguments(given: list[str]) -> GrowthArguments:
    return parse(GrowthArguments, given)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    be_quiet()
    gc.freeze()  # Trainer collects garbage before every task: a third of a second over all that the imports have made
    grow(args)


if __name__ == "__main__":
    main()
