"""
What a LuCA module does to [CLS]: t-SNE of the test images of one task, of a stream's last, as they leave the backbone,
after an expert with the adapter alone, and after a LuCA expert. An image is seen by its own task's expert, so that the
picture says nothing about routing.

    python examples/benchmarks/tsne.py examples/benchmarks/configs/emoji_6x9.json
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import datasets
import torch
from bench import Bench
from environment import write_results
from methods import Luca
from run import arguments_of, parse
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score
from torch import Tensor
from transformers.utils import logging


class AdapterAlone(Luca):
    """An expert whose module is the adapter and nothing else."""

    config = {"arrangement": "adapter"}  # noqa: RUF012


def place(features: Tensor, labels: Tensor) -> dict[str, Any]:
    """Where t-SNE puts the images, and how far the classes are apart before it does: the silhouette, by cosine."""
    unit = torch.nn.functional.normalize(features.double(), dim=1).numpy()
    tsne = TSNE(perplexity=min(30, (len(unit) - 1) // 3), init="pca", random_state=0)
    silhouette = silhouette_score(unit, labels.numpy(), metric="cosine")
    return {"silhouette": round(float(silhouette), 3), "points": tsne.fit_transform(unit).round(1).tolist()}


@torch.no_grad()
def see(method: Any, bench: Bench, seed: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Features of the last task's test images under its expert, their labels, and the classes' names."""
    stream = bench.stream(seed)
    task, ids = list(stream)[-1], stream.classes
    train, test = (bench.part(task, split, ids) for split in ("train", "test"))
    if method is None:
        return bench.unit(test.features), test.labels, ids
    learner = method(bench, stream, ids, seed)
    with torch.enable_grad():
        learner.learn(task, train)
    features = learner.trainer.tuner.layer.luca(test.features.to(bench.device), task.name).cpu()
    learner.close()
    return features, test.labels, ids


def main() -> None:
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", message="Adapter|.*is_gradient_checkpointing")
    torch.set_num_threads(1)
    config, *given = sys.argv[1:]
    args = parse([*arguments_of(json.loads(Path(config).read_text(encoding="utf-8"))), *given])
    bench, panels = Bench(args), {}
    for name, method in (("[CLS]", None), ("adapter alone", AdapterAlone), ("LuCA", Luca)):
        features, labels, ids = see(method, bench, args.seeds[0])
        panels[name] = place(features, labels)
        print(name, panels[name]["silhouette"])
    write_results(
        str(Path(args.results) / "tsne.json"),
        stream=args.name,
        seed=args.seeds[0],
        classes=[ids[label] for label in labels.tolist()],
        panels=panels,
    )


if __name__ == "__main__":
    main()
