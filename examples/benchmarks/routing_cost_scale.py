"""
What routing costs beside a ViT-B/16 of random weights as experts and classes grow: time, memory and bytes.

    python examples/benchmarks/routing_cost_scale.py --output examples/benchmarks/results/routing_cost_scale.json
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

import torch
from environment import write_results
from transformers import HfArgumentParser, ViTConfig, ViTForImageClassification

from peft_luca import LucaConfig, LucaLayer
from peft_luca.routing.router import get_router
from peft_luca.routing.statistics import ClassStatistics


ROUTERS = {
    "gaussian": ("gaussian", {}),
    "hybrid": ("hybrid", {}),
    "entropy": ("entropy", {}),
    "entropy, 8 candidates": ("entropy", {"candidates": 8}),
}


@dataclass
class CostArguments:
    """What to measure."""

    experts: list[int] = field(default_factory=lambda: [100, 1000], metadata={"help": "Numbers of experts."})
    classes_each: int = field(default=5, metadata={"help": "Classes of an expert."})
    rank: int = field(default=64, metadata={"help": "Rank of a class's scatter."})
    batch: int = field(default=16, metadata={"help": "Images in a batch."})
    rounds: int = field(default=3, metadata={"help": "Times that both are measured, in turn."})
    output: str = field(default="routing_cost_scale.json", metadata={"help": "Where the figures go."})


def layer_of(experts: int, args: CostArguments) -> LucaLayer:
    """Experts of random weights, with statistics of random images that have the rank asked for."""
    d = 768
    layer = LucaLayer(torch.nn.Linear(d, 2), width=d, input_width=d)
    for t in range(experts):
        classes = [f"class {t} {k}" for k in range(args.classes_each)]
        layer.update_layer(f"expert{t}", LucaConfig(classes=classes).resolve())
        k = len(classes)
        layer.statistics[f"expert{t}"] = ClassStatistics(
            tuple(classes),
            torch.full((k,), 100.0, dtype=torch.float64),
            torch.nn.functional.normalize(torch.randn(k, d, dtype=torch.float64), dim=1),
            tuple(torch.randn(k, args.rank, d) / d**0.5),
            torch.rand(k, d) / d,
            torch.zeros(k, dtype=torch.float64),
        )
    return layer.eval()


def seconds(function, *arguments) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


@torch.no_grad()
def main() -> None:
    (args,) = HfArgumentParser(CostArguments).parse_args_into_dataclasses()
    torch.manual_seed(0)
    vit = ViTForImageClassification(ViTConfig()).eval()
    pixels, z = torch.randn(args.batch, 3, 224, 224), torch.randn(args.batch, 768)
    vit(pixels)
    rows = []
    for experts in args.experts:
        layer = layer_of(experts, args)
        statistics = sum(part.nbytes for part in layer.statistics.values())
        for router, (name, options) in ROUTERS.items():
            ready = seconds(layer.set_router, get_router(name), options)
            layer.route(z)
            backbone, routing = [], []
            for _ in range(args.rounds):
                backbone.append(seconds(vit, pixels))
                routing.append(seconds(layer.route, z))
            rows.append(
                {
                    "experts": experts,
                    "classes": experts * args.classes_each,
                    "router": router,
                    "share of the backbone's time, median": round(
                        median(r / b for r, b in zip(routing, backbone, strict=True)), 5
                    ),
                    "routing, milliseconds": round(1000 * median(routing), 2),
                    "backbone, milliseconds": round(1000 * median(backbone), 1),
                    "made ready once, seconds": round(ready, 2),
                    "bytes of the statistics": statistics,
                }
            )
            print(rows[-1], flush=True)
            setting = {"batch": args.batch, "rounds": args.rounds, "rank": args.rank, "width": 768}
            write_results(args.output, setting=setting, rows=rows)


if __name__ == "__main__":
    main()
