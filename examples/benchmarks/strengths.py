"""
Where the `gaussian` router's rule and constants come from: leave-one-out over the training images, in closed form, of
few images a class and of all. No test image is read.

    python examples/benchmarks/strengths.py --model ../shared/models/dinov2-small --dataset ../shared/data/emoji \
        --output examples/benchmarks/results/strengths_emoji.json
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from environment import write_results
from peft import get_peft_model
from routing import BenchmarkArguments, Features, load
from torch import Tensor
from transformers import AutoImageProcessor, HfArgumentParser

from peft_luca import LucaConfig
from peft_luca.routing.discriminants import sphere_strength
from peft_luca.routing.statistics import ClassStatistics


# How far a class is shrunk toward the pooled covariance, by families of rules: name → constants c. Of n images, which
# are n-1 degrees of freedom: c itself, or 1 / (1 + c·(n-1)^p) with this power p.
RULES: dict[str, tuple[float, ...]] = {
    "constant": (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0),
    "fourth root of images": (0.04, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25),
    "root of images": (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1),
    "images": (0.000625, 0.00125, 0.0025, 0.005, 0.01),
}
POWERS = {"fourth root of images": 0.25, "root of images": 0.5, "images": 1.0}
TEMPERATURES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)


@dataclass
class StrengthArguments(BenchmarkArguments):
    """What to measure."""

    output: str = field(default="strengths.json", metadata={"help": "Where the figures go."})
    images_per_class: list[int] = field(
        default_factory=lambda: [10, 20, 40, 80], metadata={"help": "At most so many of each class; then all."}
    )
    volumes: list[float] = field(default_factory=lambda: [0.0, 0.5, 1.0], metadata={"help": "Values of β."})


def shrinkage(rule: str, constant: float, freedom: Tensor) -> Tensor:
    """α of classes of so many degrees of freedom (images less one), (K,)."""
    if rule == "constant":
        return torch.full_like(freedom, constant)
    return 1 / (1 + constant * freedom ** POWERS[rule])


def left_out(x: Tensor, y: Tensor, alpha: Callable[[Tensor], Tensor], gamma: float) -> tuple[Tensor, Tensor]:
    """
    Squared distances and log-volumes (images, classes) of each training image, as if it had not been there: its
    class's mean and scatter and the pooled scatter lose one direction each (Sherman & Morrison).

    Args:
        alpha (function): Degrees of freedom of classes → how far each is shrunk toward the pooled covariance.
        gamma (`float`): How far all are shrunk toward a sphere.
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
            share = 1 - float(alpha(own_freedom[None]))
            covariance = share * scatter[k] / own_freedom + (1 - share) * pooled
            sphere = gamma * covariance.diagonal().mean() * torch.eye(d).double()
            lower = torch.linalg.cholesky((1 - gamma) * covariance + sphere)
            toward = torch.linalg.solve_triangular(lower, (x[images] - means[k]).T, upper=False)
            lost = torch.linalg.solve_triangular(lower, away[images].T, upper=False)
            weight = (1 - gamma) * ((1 - share) / freedom + own * share / own_freedom) * factor[images]
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
    unit, labels = tuner.layer.unit_features(train.features.double(), "default"), train.labels
    most = int(labels.bincount().max())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    rows = []
    for images in [n for n in args.images_per_class if n < most] + [most]:
        kept = torch.cat([order[labels[order] == k][:images] for k in range(len(classes))])
        x, y = unit[kept], labels[kept]
        counts = y.bincount().double()
        pooled = ClassStatistics.collect(x, y, classes, rank=None).within
        for rule, constants in RULES.items():
            for constant in constants:
                alpha = partial(shrinkage, rule, constant)
                gamma = sphere_strength(counts, alpha(counts - 1), *pooled)
                distances, volumes = left_out(x, y, alpha, gamma)
                for beta in args.volumes:
                    scores = -0.5 * (distances + beta * volumes)
                    losses = {t: float(F.cross_entropy(scores / t, y)) for t in TEMPERATURES}
                    best = min(losses, key=losses.__getitem__)
                    accuracy = float((scores.argmax(1) == y).double().mean())
                    rows.append(
                        {
                            "images": images,
                            "rule": rule,
                            "constant": constant,
                            "volume": beta,
                            "sphere": round(gamma, 4),
                            "accuracy": round(accuracy, 4),
                            "log-loss": round(losses[best], 4),
                            "best temperature": best,
                        }
                    )
                print(rows[-1], flush=True)
        write_results(args.output, images=len(unit), classes=len(classes), width=unit.shape[1], rows=rows)


if __name__ == "__main__":
    main()
