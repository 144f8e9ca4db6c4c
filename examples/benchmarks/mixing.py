"""
Do the experts add to `auto`? Mixes, for each class, the log-probability by `auto` with that by the expert that owns
the class, softmax over the expert's own classes, at several weights: within the known task, and over all classes. The
best weight is chosen by the test images: a bound of what one weight from training images can gain.

    python examples/benchmarks/mixing.py examples/benchmarks/configs/emoji_14x4.json --output mixing_emoji_14.json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import Bench, StreamArguments, be_quiet, mean_and_deviation, parse, write_results
from methods import LucaGaussian
from routing import accuracy


@dataclass
class MixingArguments(StreamArguments):
    """What to measure."""

    weights: list[float] = field(
        default_factory=lambda: [0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0], metadata={"help": "Weights of the experts."}
    )
    output: str = field(default="mixing.json", metadata={"help": "Where the figures go."})


def measure_mixing(seed: int, bench: Bench, weights: list[float]) -> dict[str, dict[str, float]]:
    """Accuracy at each weight, `within` the known task and `across` all classes, after the last task."""
    stream = bench.stream(seed)
    learner = LucaGaussian(bench, stream, stream.classes, seed)
    for task in stream:
        learner.fit(task, bench.part(task, "train", stream.classes))
    model, classes = learner.model, tuple(learner.model.classes)
    test = bench.select("test", classes, classes)
    posterior = learner.route(test, "auto").logits.log_softmax(dim=1)  # (images, C)
    own = torch.cat([learner.expert_logits(test, name).log_softmax(dim=1) for name in model.experts], dim=1)
    owner = torch.tensor([t for t, names in enumerate(model.experts.values()) for _ in names])
    in_task = owner == owner[test.labels][:, None]  # (images, C)
    learner.close()
    found: dict[str, dict[str, float]] = {"within": {}, "across": {}}
    for weight in weights:
        mixed = posterior + weight * own
        found["across"][f"{weight:g}"] = accuracy(mixed, test.labels)
        found["within"][f"{weight:g}"] = accuracy(mixed.masked_fill(~in_task, -torch.inf), test.labels)
    found["within"]["experts alone"] = accuracy(own.masked_fill(~in_task, -torch.inf), test.labels)
    return found


def parse_arguments(given: list[str]) -> MixingArguments:
    return parse(MixingArguments, given)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    be_quiet()
    bench, rows = Bench(args), []
    for seed in args.seeds:
        rows.append(measure_mixing(seed, bench, args.weights))
        print(seed, rows[-1], flush=True)
        summary: dict[str, Any] = {
            where: {name: mean_and_deviation([row[where][name] for row in rows]) for name in rows[0][where]}
            for where in rows[0]
        }
        for figures in summary.values():
            means = {name: figure["mean"] for name, figure in figures.items() if name != "experts alone"}
            best = max(means, key=means.__getitem__)
            figures["most that a weight can gain"] = {"weight": best, "mean": round(means[best] - means["0"], 4)}
        write_results(args.output, seeds=args.seeds[: len(rows)], weights=args.weights, summary=summary)


if __name__ == "__main__":
    main()
