"""
What a LuCA module does to [CLS]: t-SNE of the test images of a stream's last task, as they leave the backbone, after
an expert with the adapter alone, and after a LuCA expert. An image is seen by its own task's expert, so that the
picture says nothing about routing.

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


class AdapterAlone(Luca):
    """An expert whose module is the adapter and nothing else."""

    config = {"arrangement": "adapter"}  # noqa: RUF012


def place(features: Tensor, labels: Tensor) -> dict[str, Any]:
    """The images' places by t-SNE, and the silhouette of the classes, by cosine, before it."""
    unit = torch.nn.functional.normalize(features.double(), dim=1).numpy()
    tsne = TSNE(perplexity=min(30, (len(unit) - 1) // 3), init="pca", random_state=0)
    silhouette = silhouette_score(unit, labels.numpy(), metric="cosine")
    return {"silhouette": round(float(silhouette), 3), "points": tsne.fit_transform(unit).round(1).tolist()}


def see(method: type[Luca] | None, bench: Bench, seed: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Features of the last task's test images under its expert, their labels, and the classes' names."""
    stream = bench.stream(seed)
    task, ids = list(stream)[-1], stream.classes
    train, test = (bench.part(task, split, ids) for split in ("train", "test"))
    if method is None:
        return bench.unit(test.features), test.labels, ids
    learner = method(bench, stream, ids, seed)
    learner.fit(task, train)
    with torch.no_grad():
        features = find_layer(learner.model)[1].luca(test.features.to(bench.device), task.name).cpu()
    learner.close()
    return features, test.labels, ids


def parse_arguments(given: list[str]) -> TsneArguments:
    return parse(TsneArguments, given)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    be_quiet()
    bench, panels = Bench(args), {}
    for name, method in (("[CLS]", None), ("adapter alone", AdapterAlone), ("LuCA", Luca)):
        features, labels, ids = see(method, bench, args.seeds[0])
        panels[name] = place(features, labels)
    classes = [ids[label] for label in labels.tolist()]
    write_results(args.output, stream=args.name, seed=args.seeds[0], classes=classes, panels=panels)


if __name__ == "__main__":
    main()
