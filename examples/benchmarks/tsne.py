"""
What an expert does to [CLS], step by step: the test images of a stream's last task as they leave the backbone,
standardized by the reference, whitened, and after LuCA. For each step t-SNE, and how well the classes lie apart. An
image is seen by its own task's expert, so that nothing here is about routing.

    python examples/benchmarks/tsne.py examples/benchmarks/configs/emoji_6x9.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def place(train: Tensor, train_labels: Tensor, features: Tensor, labels: Tensor) -> dict[str, Any]:
    """The test images' places by t-SNE, and figures of the features before it, all of length 1."""
    unit, known = (torch.nn.functional.normalize(x.double(), dim=1) for x in (features, train))
    tsne = TSNE(perplexity=min(30, (len(unit) - 1) // 3), init="pca", random_state=0)
    silhouette = silhouette_score(unit.numpy(), labels.numpy(), metric="cosine")
    ids = labels.unique()
    means = torch.stack([known[train_labels == k].mean(0) for k in ids])
    nearest = ids[(unit @ torch.nn.functional.normalize(means, dim=1).T).argmax(1)]
    member = (labels[:, None] == ids).double()  # (images, classes)
    pairs = member.T @ (1 - torch.eye(len(unit), dtype=torch.float64)) @ member  # of two different images
    cosines = member.T @ (unit @ unit.T).fill_diagonal_(0) @ member / pairs
    variances = torch.linalg.svdvals(features.double() - features.double().mean(0)).square()
    return {
        "silhouette": round(float(silhouette), 3),
        "class means": round(float((nearest == labels).double().mean()), 3),
        "directions": round(float(variances.sum() ** 2 / variances.square().sum()), 1),
        "cosine within classes": round(float(cosines.diagonal().mean()), 3),
        "cosine between classes": round(float(cosines[~torch.eye(len(ids), dtype=torch.bool)].mean()), 3),
        "cosines": [[round(value, 3) for value in row] for row in cosines.tolist()],
        "points": tsne.fit_transform(unit.numpy()).round(1).tolist(),
    }


@torch.no_grad()
def see(bench: Bench, seed: int, method: type[Luca] = Luca) -> tuple[dict[str, list[Tensor]], list[str]]:
    """Each step's features and labels of the last task's train images and of its test images; the latter's classes."""
    stream = bench.stream(seed)
    task, ids = list(stream)[-1], stream.classes
    train, test = (bench.part(task, split, ids) for split in ("train", "test"))
    learner = method(bench, stream, ids, seed)
    with torch.enable_grad():
        learner.fit(task, train)
    layer = find_layer(learner.model)[1]
    mean, deviation = layer.luca_reference_mean[task.name], layer.luca_reference_std[task.name]
    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "[CLS]": lambda z: z,
        "standardized": lambda z: (z - mean) / deviation,
        "whitened": lambda z: layer.standardize(z, task.name),
        "LuCA": lambda z: layer.luca(z, task.name),
    }
    found: dict[str, list[Tensor]] = {name: [] for name in steps}
    for part in (train, test):
        for name, step in steps.items():
            found[name] += [step(part.features.to(bench.device)).cpu(), part.labels]
    learner.close()
    return found, [ids[label] for label in test.labels.tolist()]


def parse_arguments(given: list[str]) -> TsneArguments:
    return parse(TsneArguments, given)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    be_quiet()
    steps, classes = see(Bench(args), args.seeds[0])
    panels = {name: place(*features) for name, features in steps.items()}
    write_results(args.output, stream=args.name, seed=args.seeds[0], classes=classes, panels=panels)


if __name__ == "__main__":
    main()
