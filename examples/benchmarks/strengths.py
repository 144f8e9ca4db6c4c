"""
Where the `gaussian` router's constants come from: leave-one-out over the training images, in closed form. No test
image is read.

    python examples/benchmarks/strengths.py --model ../shared/models/dinov2-small --dataset ../shared/data/emoji \
        --output examples/benchmarks/results/strengths_emoji.json
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from environment import write_results
from peft import get_peft_model
from routing import BenchmarkArguments, Features, load
from torch import Tensor
from transformers import AutoImageProcessor, HfArgumentParser

from peft_luca import LucaConfig


@dataclass
class StrengthArguments(BenchmarkArguments):
    """What to measure."""

    shrinkages: list[float] = field(default_factory=lambda: [0.5, 0.7, 0.8, 0.9], metadata={"help": "Values of α."})
    spheres: list[float] = field(default_factory=lambda: [0.02, 0.05, 0.1], metadata={"help": "Values of γ."})
    volumes: list[float] = field(default_factory=lambda: [0.0, 0.5, 1.0], metadata={"help": "Values of β."})


def left_out(x: Tensor, y: Tensor, alpha: float, gamma: float) -> tuple[Tensor, Tensor]:
    """
    Squared distances and log-volumes (images, classes) of each training image, as if it had not been there: its
    class's mean and scatter and the pooled scatter lose one direction each (Sherman & Morrison).
    """
    classes, d = int(y.max()) + 1, x.shape[1]
    counts = torch.bincount(y).double()
    means = torch.zeros(classes, d).double().index_add_(0, y, x) / counts[:, None]
    scatter = torch.stack([(x[y == k] - means[k]).T @ (x[y == k] - means[k]) for k in range(classes)])
    freedom = len(x) - classes - 1
    pooled, away, factor = scatter.sum(0) / freedom, x - means[y], (counts / (counts - 1))[y]
    distances, volumes = torch.empty(len(x), classes).double(), torch.empty(len(x), classes).double()
    for k in range(classes):
        for own in (False, True):
            images = (y == k) == own
            own_freedom = counts[k] - (2 if own else 1)
            covariance = (1 - alpha) * scatter[k] / own_freedom + alpha * pooled
            sphere = gamma * covariance.diagonal().mean() * torch.eye(d).double()
            lower = torch.linalg.cholesky((1 - gamma) * covariance + sphere)
            toward = torch.linalg.solve_triangular(lower, (x[images] - means[k]).T, upper=False)
            lost = torch.linalg.solve_triangular(lower, away[images].T, upper=False)
            weight = (1 - gamma) * (alpha / freedom + own * (1 - alpha) / own_freedom) * factor[images]
            size = weight * lost.square().sum(0)
            distance = toward.square().sum(0) + weight * (toward * lost).sum(0).square() / (1 - size)
            distances[images, k] = distance * (factor[images].square() if own else 1.0)
            volumes[images, k] = 2 * lower.diagonal().log().sum() + torch.log1p(-size)
    return distances, volumes


def main() -> None:
    (args,) = HfArgumentParser(StrengthArguments).parse_args_into_dataclasses()
    torch.set_num_threads(1)
    features = Features(args, AutoImageProcessor.from_pretrained(args.model))
    tuner = get_peft_model(load(args), LucaConfig(classes=["a", "b"])).base_model
    tuner.compute_reference("default")
    classes = sorted({name for name, _ in features.by_class})
    train = features.of(classes, "train", classes)
    x, y = tuner.layer.unit_features(train.features.double(), "default"), train.labels
    rows = []
    for alpha in args.shrinkages:
        for gamma in args.spheres:
            distances, volumes = left_out(x, y, alpha, gamma)
            for beta in args.volumes:
                scores = -0.5 * (distances + beta * volumes)
                losses = {t: float(F.cross_entropy(scores / t, y)) for t in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)}
                best = min(losses, key=losses.__getitem__)
                accuracy = float((scores.argmax(1) == y).double().mean())
                rows.append(
                    {
                        "shrinkage": alpha,
                        "sphere": gamma,
                        "volume": beta,
                        "accuracy": round(accuracy, 4),
                        "log-loss": round(losses[best], 4),
                        "best temperature": best,
                    }
                )
                print(rows[-1], flush=True)
            write_results(args.output, images=len(x), classes=len(classes), width=x.shape[1], rows=rows)


if __name__ == "__main__":
    main()
