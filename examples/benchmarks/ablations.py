"""
The paper's ablations, one change at a time, with sparsity and overlap of the experts: the branches and their order, λ
with and without the proximal step, and the reduction.

    python examples/benchmarks/ablations.py --output examples/benchmarks/results/ablations_digits.json
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from routing import BenchmarkArguments, compare, learn
from transformers import HfArgumentParser

from peft_luca.training.sparsity import overlap_report
from peft_luca.tuner.config import ARRANGEMENTS


WEIGHTS = 1e-5, 1e-4, 5e-4, 1e-3, 5e-3
# Name → fields of LucaConfig, fields of ContinualTrainingArguments.
VARIANTS: dict[str, tuple[dict, dict]] = {
    **{f"arrangement {name}": ({"arrangement": name}, {}) for name in ARRANGEMENTS},
    **{f"λ {weight:g}": ({}, {"l1_weight": weight}) for weight in (0.0, *WEIGHTS)},
    **{f"λ {w:g}, proximal": ({}, {"l1_weight": w, "l1_proximal": True}) for w in WEIGHTS},
    **{f"reduction {r}": ({"reduction": r}, {}) for r in (4, 8, 16, 32, 64)},
}
FIGURES = "last_accuracy", "average_accuracy", "routing_accuracy", "task_known_accuracy"


@dataclass
class AblationArguments(BenchmarkArguments):
    """What to measure."""

    output: str = field(default="ablations.json", metadata={"help": "Where the figures go."})
    class_order_seeds: list[int] = field(default_factory=lambda: [1993, 0, 1], metadata={"help": "Class orders."})


def measure(variant: str, *run) -> dict[str, float]:
    config, settings = VARIANTS[variant]
    trainer = learn(*run, config=config, statistics=False, **settings)
    results, report = trainer.results(), overlap_report(trainer.tuner.layer)
    trainer.tuner.unload()
    zeros = torch.tensor(list(report.pop("sparsity").values())).mean()
    return {**{name: results[name] for name in FIGURES}, "sparsity": float(zeros), **report}


def main() -> None:
    (args,) = HfArgumentParser(AblationArguments).parse_args_into_dataclasses()
    compare(args, list(VARIANTS), measure)


if __name__ == "__main__":
    main()
