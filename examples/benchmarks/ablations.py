"""
One change at a time from the package's recipe, over several class orders. The study `paper` has the paper's ablations,
with sparsity and overlap of the experts: the branches and their order, λ with and without the proximal step, and the
reduction. The study `entropy` has ways to better entropy routing.

    python examples/benchmarks/ablations.py examples/benchmarks/configs/digits.json \\
        --output examples/benchmarks/results/ablations_digits.json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import Bench, StreamArguments, be_quiet, mean_and_deviation, measure, parse, write_results
from methods import Luca, most_certain
from torch import Tensor

from peft_luca.tuner.config import ARRANGEMENTS


FIGURES = "last_accuracy", "average_accuracy", "routing_accuracy", "task_known_accuracy"
WEIGHTS = 1e-5, 1e-4, 5e-4, 1e-3, 5e-3
# Study → name of a variant → fields of LucaConfig, fields of ContinualTrainingArguments.
VARIANTS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "paper": {
        **{f"arrangement {name}": ({"arrangement": name}, {}) for name in ARRANGEMENTS},
        **{f"λ {weight:g}": ({}, {"l1_weight": weight}) for weight in (0.0, *WEIGHTS)},
        **{f"λ {w:g}, proximal": ({}, {"l1_weight": w, "l1_proximal": True}) for w in WEIGHTS},
        **{f"reduction {r}": ({"reduction": r}, {}) for r in (4, 8, 16, 32, 64)},
    },
    "entropy": {
        "the recipe": ({}, {}),
        **{f"{epochs} epochs": ({}, {"num_train_epochs": epochs}) for epochs in (60, 100)},
        **{f"σ from {scale}": ({"scale": float(scale)}, {}) for scale in (5, 10, 40)},
        "negatives: all seen rows": ({}, {"negatives": "seen"}),
        "reference: nothing": ({"reference": False}, {}),
    },
}


@dataclass
class AblationArguments(StreamArguments):
    """What to measure."""

    study: str = field(default="paper", metadata={"help": "Which variants.", "choices": list(VARIANTS)})
    seeds: list[int] = field(default_factory=lambda: [1993, 0, 1], metadata={"help": "Class orders."})
    output: str = field(default="ablations.json", metadata={"help": "Where the figures go."})


def modules(model: Any) -> dict[str, dict[str, Tensor]]:
    """Expert → its LuCA parameters, without class rows and scale."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in model.experts}
    for path, parameter in model.named_parameters():
        parts = path.split(".")
        for i, part in enumerate(parts):
            if part.startswith(("luca_adapter", "luca_calibrator")):
                found[parts[i + 1]][f"{part}.{parts[-1]}"] = parameter.detach()
    return found


class Sparse(Luca):
    """LuCA, with how sparse the experts are and how much two of them overlap."""

    def figures(self) -> dict[str, float]:
        """
        `sparsity`: share of zeros. Means over pairs of experts: `overlap` (numbers that neither has at zero, among
        those that one has not), `cosine` (of the weight matrices) and `subspace_cosine` (root mean square of the
        cosines of the principal angles between the row spaces of their first weights).
        """
        experts = list(modules(self.model).values())
        alive = [torch.cat([p.flatten() for p in expert.values()]) != 0 for expert in experts]
        # Gains of the LayerNorm are near 1 in every expert and would drown the rest.
        matrices = [torch.cat([p.flatten() for p in expert.values() if p.ndim == 2]).double() for expert in experts]
        bases = [[row_space(p.double()) for name, p in e.items() if "down.weight" in name] for e in experts]
        pairs = [(i, j) for j in range(len(experts)) for i in range(j)]
        values = {
            "overlap": [(alive[i] & alive[j]).sum() / (alive[i] | alive[j]).sum().clamp(min=1) for i, j in pairs],
            "cosine": [torch.cosine_similarity(matrices[i], matrices[j], dim=0) for i, j in pairs],
            "subspace_cosine": [
                (one @ other.T).square().sum().div(max(1, len(one))).sqrt()
                for i, j in pairs
                for one, other in zip(bases[i], bases[j], strict=True)
            ],
        }
        sparsity = 1 - float(torch.stack([mask.double().mean() for mask in alive]).mean())
        return {"sparsity": sparsity, **{name: float(torch.stack(v).mean()) for name, v in values.items()}}


def row_space(weight: Tensor) -> Tensor:
    """Orthonormal rows that span the rows of a matrix."""
    _, values, rows = torch.linalg.svd(weight, full_matrices=False)
    return rows[values > 1e-6 * values.max().clamp(min=1e-30)]


class OtherEntropies(Luca):
    """LuCA, with accuracy by entropy of other kinds on the same experts."""

    def figures(self) -> dict[str, float]:
        experts, ids = self.model.experts, tuple(self.model.classes)
        test = self.bench.select("test", ids, ids)
        classes = [torch.tensor([ids.index(name) for name in own]) for own in experts.values()]
        found = {
            "entropy_of_own_classes": most_certain([self.expert_logits(test, name) for name in experts], classes)[0]
        }
        for temperature in (0.25, 0.5, 2.0, 4.0):
            routed = self.route(test, "entropy", temperature=temperature)
            found[f"temperature {temperature:g}"] = routed.logits.argmax(1)
        return {name: float((labels == test.labels).double().mean()) for name, labels in found.items()}


def parse_arguments(given: list[str]) -> AblationArguments:
    return parse(AblationArguments, given)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    be_quiet()
    bench, summary = Bench(args), {}
    base = {"paper": Sparse, "entropy": OtherEntropies}[args.study]
    for variant, (config, training) in VARIANTS[args.study].items():
        method = type(base.__name__, (base,), {"config": config, "training": training})
        rows = [measure(method, bench, seed) for seed in args.seeds]
        kept = [name for name in rows[0] if name in FIGURES or name in ("sparsity", "overlap", "cosine")]
        kept += [name for name in rows[0] if name.startswith(("subspace", "entropy_", "temperature"))]
        summary[variant] = {name: mean_and_deviation([row[name] for row in rows]) for name in kept}
        print(variant, summary[variant], flush=True)
        setting = {"stream": args.name, "increment": args.increment, "class_order_seeds": args.seeds}
        write_results(args.output, setting=setting, summary=summary)


if __name__ == "__main__":
    main()
