"""
What an expert does to [CLS], step by step: the test images of a stream's last task as they leave the backbone,
standardized by the reference, whitened, and after LuCA. For each step t-SNE, the silhouette of the classes, mean
cosines between classes, and over how many directions the images vary. An image is seen by its own task's expert, so that
nothing here is about routing.

    python examples/benchmarks/tsne.py examples/benchmarks/configs/emoji_6x9.json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import RESULTS, Bench, StreamArguments, be_quiet, parse, write_results
from methods import Luca
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score
from torch import Tensor

from peft_luca.tuner.layer import find_layer


@dataclass
class TsneArguments(StreamArguments):
    """What to draw."""

    output: str = field(default=str(RESULTS / "tsne.json"), metadata={"help": "Where the figures go."})


def place(features: Tensor, labels: Tensor) -> dict[str, Any]:
    """The images' places by t-SNE, and figures of the features before it, all of length 1."""
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    tsne = TSNE(perplexity=min(30, (len(unit) - 1) // 3), init="pca", random_state=0)
    silhouette = silhouette_score(unit.numpy(), labels.numpy(), metric="cosine")
    member = torch.nn.functional.one_hot(labels.unique(return_inverse=True)[1]).double()  # (images, classes)
    pairs = member.T @ (1 - torch.eye(len(unit), dtype=torch.float64)) @ member  # of two different images
    cosines = member.T @ (unit @ unit.T).fill_diagonal_(0) @ member / pairs
    variances = torch.linalg.svdvals(features.double() - features.double().mean(0)).square()
    return {
        "silhouette": round(float(silhouette), 3),
        "directions": round(float(variances.sum() ** 2 / variances.square().sum()), 1),
        "cosines": [[round(value, 3) for value in row] for row in cosines.tolist()],
        "points": tsne.fit_transform(unit.numpy()).round(1).tolist(),
    }


@torch.no_grad()
def see(bench: Bench, seed: int, method: type[Luca] = Luca) -> tuple[dict[str, Tensor], Tensor, tuple[str, ...]]:
    """Features of the last task's test images after each step, their labels, and the classes' names."""
    stream = bench.stream(seed)
    task, ids = list(stream)[-1], stream.classes
    train, test = (bench.part(task, split, ids) for split in ("train", "test"))
    learner = method(bench, stream, ids, seed)
    with torch.enable_grad():
        learner.fit(task, train)
    layer, z = find_layer(learner.model)[1], test.features.to(bench.device)
    mean, deviation = layer.luca_reference_mean[task.name], layer.luca_reference_std[task.name]
    steps = {
        "[CLS]": z,
        "standardized": (z - mean) / deviation,
        "whitened": layer.standardize(z, task.name),
        "LuCA": layer.luca(z, task.name),
    }
    learner.close()
    return {name: features.cpu() for name, features in steps.items()}, test.labels, ids


def parse_arguments(given: list[str]) -> TsneArguments:
    return parse(TsneArguments, given)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    be_quiet()
    features, labels, ids = see(Bench(args), args.seeds[0])
    panels = {name: place(step, labels) for name, step in features.items()}
    classes = [ids[label] for label in labels.tolist()]
    write_results(args.output, stream=args.name, seed=args.seeds[0], classes=classes, panels=panels)


if __name__ == "__main__":
    main()
