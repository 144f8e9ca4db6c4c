"""
The closed forms alone, without any expert: what the evidence of left-out images chooses, what it gains, and how well
the two numbers of an answer are calibrated. No test image chooses anything.

    python examples/benchmarks/calibration.py letters letters600 --train 600 --test 60
    python examples/benchmarks/evidence.py --dataset letters600 --increment 5 --output evidence_letters.json

With `--mirrored`, only what a mirrored view of every training image brings to the statistics alone, each image counted
once, and whether training images that are left out with their view say so. With `--whitened`, what statistics of [CLS]
whitened by the reference bring, as experts see it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from harness import BATCH, Bench, StreamArguments, be_quiet, mean_and_deviation, parse, timed, write_results
from peft import get_peft_model
from routing import accuracy, calibration_error
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from peft_luca import LucaConfig
from peft_luca.routing.discriminants import RegularizedDiscriminant, RidgeClassifier
from peft_luca.routing.evidence import EvidenceDiscriminant, Familiarity, collect_with_evidence
from peft_luca.routing.statistics import ClassStatistics, pool, unit_features


FOLDS = 4


@dataclass
class EvidenceArguments(StreamArguments):
    """What to measure."""

    mirrored: bool = field(default=False, metadata={"help": "Measure mirrored views in the statistics instead."})
    whitened: bool = field(default=False, metadata={"help": "Measure statistics of whitened [CLS] instead."})
    output: str = field(default="evidence.json", metadata={"help": "Where the figures go."})
    images_per_class: list[int] = field(
        default_factory=lambda: [5, 20, 100], metadata={"help": "At most so many of each class; then all."}
    )
    random_features: int = field(default=2000, metadata={"help": "Of the ridge regression to compare with; 0: none."})


def collect(
    bench: Bench, seed: int, images: int, classes: tuple[str, ...]
) -> tuple[dict[str, ClassStatistics], float]:
    """Statistics of each task of a stream, of these classes alone, and seconds to collect them."""
    parts, seconds = {}, 0.0
    for task in bench.stream(seed):
        own = tuple(name for name in task.classes if name in classes)
        part = bench.select("train", own, own)
        order = torch.randperm(len(part), generator=torch.Generator().manual_seed(0))
        rows = [order[part.labels[order] == k][:images] for k in range(len(own))]
        if own:
            rows = torch.cat(rows)
            arguments = bench.unit(part.features[rows]), part.labels[rows], own, 64, 0, lambda z: z
            taken, parts[task.name] = timed(collect_with_evidence, *arguments)
            seconds += taken
    return parts, seconds


def answers(statistics: ClassStatistics, x: Tensor) -> dict[str, Tensor]:
    """What `auto` and its Gaussians alone answer: log-posteriors (images, C), and how familiar the images are."""
    made = EvidenceDiscriminant(statistics)
    posterior, scores = made.answer(x, made.gaussian)
    distances = made.gaussian.distances(scores, posterior.argmax(dim=1))
    known = Familiarity(statistics.distances)(distances)
    return {"auto": posterior, "gaussian": made.gaussian.posterior(scores), "known": known}


def measure(bench: Bench, seed: int, images: int) -> dict[str, float]:
    """Figures of one order of the classes."""
    parts, seconds = collect(bench, seed, images, bench.classes)
    pooled = pool(parts)
    test = bench.select("test", pooled.classes, pooled.classes)
    x, y = bench.unit(test.features).float(), test.labels
    found = answers(pooled, x)
    figures = {"ridge weight": EvidenceDiscriminant(pooled).weight}
    for name in ("auto", "gaussian"):
        confidence, predicted = found[name].exp().max(dim=1)
        figures[f"{name} accuracy"] = accuracy(found[name], y)
        figures[f"{name} calibration error"] = calibration_error(confidence, predicted == y)
    figures["known images refused"] = float((found["known"] < 0.05).double().mean())
    size = sum(tensor.nbytes for part in parts.values() for tensor in part.tensors().values())
    figures["MB per expert"] = size / len(parts) / 1e6
    figures["seconds per expert"] = seconds / len(parts)
    half = tuple(name for task in list(bench.stream(seed))[: -(-len(parts) // 2)] for name in task.classes)
    rest = tuple(name for name in bench.classes if name not in half)
    pooled = pool(collect(bench, seed, images, half)[0])
    features = (bench.unit(bench.select("test", names, names).features).float() for names in (half, rest))
    known, strange = (answers(pooled, x) for x in features)
    figures["unknown images refused"] = float((strange["known"] < 0.05).double().mean())
    truth = torch.cat([torch.ones(len(known["known"])), torch.zeros(len(strange["known"]))])
    both = {name: torch.cat([known[name], strange[name]]) for name in known}
    confidence = both["auto"].exp().amax(dim=1)
    figures["unknown AUROC"] = float(roc_auc_score(truth, both["known"]))
    figures["unknown AUROC of known x confidence"] = float(roc_auc_score(truth, both["known"] * confidence))
    return figures


def ridge_accuracy(bench: Bench, images: int, random_features: int) -> float:
    """Of the ridge regression alone, which does not depend on the order of the classes."""
    train, test = bench.parts["train"], bench.parts["test"]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    rows = torch.cat([order[train.labels[order] == k][:images] for k in range(len(bench.classes))])
    x = bench.unit(train.features[rows])
    statistics = ClassStatistics.collect(x, train.labels[rows], bench.classes, random_features=random_features)
    return accuracy(RidgeClassifier(statistics).scores(bench.unit(test.features).float()), test.labels)


@torch.no_grad()
def mirrored_features(bench: Bench) -> Tensor:
    """[CLS] of every training image, left and right exchanged, (images, d)."""
    train = bench.parts["train"]

    config = LucaConfig(classes=["a", "b"], reference=False)
    model = get_peft_model(bench.model, config, adapter_name="probe")
    found = [
        model.pooled_features(bench.pixels(train, rows).flip(-1)).cpu()
        for rows in torch.arange(len(train)).split(BATCH)
    ]
    bench.model = model.unload()
    return torch.cat(found)


@torch.no_grad()
def whitened_features(bench: Bench) -> tuple[Tensor, Tensor]:
    """Unit features of the training and the test images, whitened by the reference pictures alone, (images, d)."""
    model: Any = get_peft_model(bench.model, LucaConfig(classes=["a", "b"]), adapter_name="probe")
    model.compute_reference()
    layer = model.base_model.layer
    train, test = (
        unit_features(layer.standardize(bench.parts[split].features, "probe").double()) for split in ("train", "test")
    )
    bench.model = model.unload()
    return train, test


def discriminant_of(views: list[Tensor], labels: Tensor, classes: tuple[str, ...]) -> RegularizedDiscriminant:
    """Of unit features of one or more views of the same images, (images, d) each; an image counts once."""
    n = len(views)
    found = ClassStatistics.collect(torch.cat(views), labels.repeat(n), classes, rank=None)
    factors = tuple(factor / n**0.5 for factor in found.factors)
    return RegularizedDiscriminant(
        replace(found, counts=found.counts / n, factors=factors, remainder=found.remainder / n)
    )


def measure_views(bench: Bench, seed: int, images: int, variants: dict[str, Any]) -> dict[str, float]:
    """
    Accuracy on test images, and on left-out training images within each task, of every variant: the views of the
    training images, (images, d) each, and the test images.
    """
    train, test, figures = bench.parts["train"], bench.parts["test"], {}
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    rows = torch.cat([order[train.labels[order] == k][:images] for k in range(len(bench.classes))])
    y = train.labels[rows]
    for name, (views, x) in variants.items():
        part = [view[rows] for view in views]
        made = discriminant_of(part, y, bench.classes)
        figures[f"{name}, test accuracy"] = accuracy(made.scores(x.float()), test.labels)
        losses, right = [], []
        for task in bench.stream(seed):
            own = torch.tensor([bench.classes.index(c) for c in task.classes])
            mine = torch.isin(y, own).nonzero()[:, 0]
            labels = (y[mine, None] == own).int().argmax(1)
            folds = min(FOLDS, int(labels.bincount().min()))
            for kept, held in StratifiedKFold(folds, shuffle=True, random_state=0).split(mine, labels):
                made = discriminant_of([view[mine[kept]] for view in part], labels[kept], task.classes)
                posterior = made.log_posterior(part[0][mine[held]].float())
                losses.append(F.cross_entropy(posterior, labels[held], reduction="none"))
                right.append(posterior.argmax(1) == labels[held])
        figures[f"{name}, left-out log-loss"] = float(torch.cat(losses).mean())
        figures[f"{name}, left-out accuracy"] = float(torch.cat(right).double().mean())
    return figures


def parse_arguments(given: list[str]) -> EvidenceArguments:
    return parse(EvidenceArguments, given)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    be_quiet()
    bench = Bench(args)
    most, rows = int(bench.parts["train"].labels.bincount().max()), []
    plain, test = (bench.unit(bench.parts[split].features) for split in ("train", "test"))
    variants: dict[str, Any] = {"plain": ([plain], test)}
    if args.mirrored:
        variants["mirrored"] = [plain, bench.unit(mirrored_features(bench))], test
    if args.whitened:
        train, whitened = whitened_features(bench)
        variants["whitened"] = [train], whitened
    for images in [n for n in args.images_per_class if n < most] + [most]:
        if len(variants) > 1:
            found = [measure_views(bench, seed, images, variants) for seed in args.seeds]
        else:
            found = [measure(bench, seed, images) for seed in args.seeds]
        row: dict[str, Any] = {name: mean_and_deviation([figures[name] for figures in found]) for name in found[0]}
        if args.random_features and len(variants) == 1:
            row["ridge accuracy"] = round(ridge_accuracy(bench, images, args.random_features), 4)
        rows.append({"images": images, **row})
        print(rows[-1], flush=True)
        setting = {"classes": len(bench.classes), "increment": args.increment, "class_order_seeds": args.seeds}
        write_results(args.output, setting=setting, rows=rows)


if __name__ == "__main__":
    main()
