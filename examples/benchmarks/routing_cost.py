"""
What routing costs beside the backbone: ViT-B/16 of random weights, 20 experts of 5 classes, batches of 16.

    python examples/benchmarks/routing_cost.py --output examples/benchmarks/results/routing_cost.json
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

import torch
from environment import write_results
from peft import get_peft_model
from transformers import HfArgumentParser, ViTConfig, ViTForImageClassification

from peft_luca import LucaConfig


@dataclass
class CostArguments:
    """What to measure."""

    experts: int = field(default=20, metadata={"help": "Number of experts."})
    classes: int = field(default=100, metadata={"help": "Number of classes of all experts together."})
    batch: int = field(default=16, metadata={"help": "Images in a batch."})
    rounds: int = field(default=7, metadata={"help": "Times that both are measured, in turn."})
    output: str = field(default="routing_cost.json", metadata={"help": "Where the figures go."})


@torch.no_grad()
def main() -> None:
    (args,) = HfArgumentParser(CostArguments).parse_args_into_dataclasses()
    torch.manual_seed(0)
    each = args.classes // args.experts
    configs = [
        LucaConfig(classes=[f"class {i}" for i in range(t * each, (t + 1) * each)]) for t in range(args.experts)
    ]
    model = get_peft_model(ViTForImageClassification(ViTConfig()), configs[0], adapter_name="task_0").eval()
    for t, config in enumerate(configs[1:], start=1):
        model.add_adapter(f"task_{t}", config)
    model.set_router("entropy")
    pixels = torch.randn(args.batch, 3, 224, 224)
    z = model.pooled_features(pixels)
    layer = model.base_model.layer
    layer.route(z)
    backbone, routing = [], []
    for _ in range(args.rounds):
        started = time.perf_counter()
        model.pooled_features(pixels)
        backbone.append(time.perf_counter() - started)
        started = time.perf_counter()
        layer.route(z)
        routing.append(time.perf_counter() - started)
    shares = [route / trunk for route, trunk in zip(routing, backbone, strict=True)]
    summary = {
        "routing as a share of the backbone's time": {
            "mean": round(median(shares), 5),
            "worst": round(max(shares), 5),
        },
        "backbone, milliseconds": {"mean": round(1000 * median(backbone), 1)},
        "routing, milliseconds": {"mean": round(1000 * median(routing), 2)},
    }
    print(summary)
    setting = {"experts": args.experts, "classes": args.classes, "batch": args.batch, "rounds": args.rounds}
    write_results(args.output, setting=setting, summary=summary, note="each mean is the median over the rounds")


if __name__ == "__main__":
    main()
