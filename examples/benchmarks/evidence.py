"""
The closed forms alone, without any expert: what the evidence of left-out images chooses, what it gains, and how well
the two numbers of an answer are calibrated. No test image chooses anything.

    python examples/benchmarks/calibration.py letters letters600 --train 600 --test 60
    python examples/benchmarks/evidence.py --dataset letters600 --increment 5 --output evidence_letters.json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import Bench, StreamArguments, be_quiet, mean_and_deviation, parse, timed, write_results
from routing import accuracy, calibration_error
from sklearn.metrics import roc_auc_score
from torch import Tensor

from peft_luca.routing.discriminants import RidgeClassifier
from peft_luca.routing.evidence import EvidenceDiscriminant, Familiarity, collect_with_evidence
from peft_luca.routing.statistics import ClassStatistics, pool


@dataclass
class EvidenceArguments(StreamArguments):
    """What to measure."""

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


def parse_arguments(given: list[str]) -> EvidenceArguments:
    return parse(EvidenceArguments, given)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    be_quiet()
    bench = Bench(args)
    most, rows = int(bench.parts["train"].labels.bincount().max()), []
    for images in [n for n in args.images_per_class if n < most] + [most]:
        found = [measure(bench, seed, images) for seed in args.seeds]
        row: dict[str, Any] = {name: mean_and_deviation([figures[name] for figures in found]) for name in found[0]}
        if args.random_features:
            row["ridge accuracy"] = round(ridge_accuracy(bench, images, args.random_features), 4)
        rows.append({"images": images, **row})
        print(rows[-1], flush=True)
        setting = {"classes": len(bench.classes), "increment": args.increment, "class_order_seeds": args.seeds}
        write_results(args.output, setting=setting, rows=rows)


if __name__ == "__main__":
    main()
