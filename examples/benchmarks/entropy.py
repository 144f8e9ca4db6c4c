"""
Entropy routing per sample, by the own recipe and by the paper's, over several class orders.

    python examples/benchmarks/entropy.py --model ../shared/models/dinov2-small --dataset ../shared/data/emoji \
        --increment 4 --init_classes 6 --output examples/benchmarks/results/entropy_emoji.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

import torch
from environment import write_results
from transformers import AutoImageProcessor, AutoModelForImageClassification, HfArgumentParser

from peft_luca import ContinualTrainer, ContinualTrainingArguments, LucaConfig


sys.path.insert(0, str(Path(__file__).parent.parent))
from cil import ExampleArguments, class_means, make_stream


FIGURES = "average_accuracy last_accuracy forgetting routing_accuracy task_known_accuracy".split()


@dataclass
class BenchmarkArguments(ExampleArguments):
    """What to measure."""

    class_order_seeds: list[int] = field(default_factory=lambda: [1993, 0, 1], metadata={"help": "Class orders."})
    recipes: list[str] = field(default_factory=lambda: ["own"], metadata={"help": "Recipes to compare."})
    output: str = field(default="entropy.json", metadata={"help": "Where the figures go."})


def main() -> None:
    (args,) = HfArgumentParser(BenchmarkArguments).parse_args_into_dataclasses()
    rows = []
    for seed in args.class_order_seeds:
        args.class_order_seed = seed
        for recipe in args.recipes:
            started = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                trainer = ContinualTrainer(
                    model=AutoModelForImageClassification.from_pretrained(
                        args.model, dtype=getattr(torch, args.dtype)
                    ),
                    args=ContinualTrainingArguments(folder, recipe=recipe, augmentation=False, disable_tqdm=True),
                    stream=make_stream(args),
                    luca_config=LucaConfig(**json.loads(args.luca_config)),
                    processing_class=AutoImageProcessor.from_pretrained(args.model),
                )
                trainer.train()
                results, baseline = trainer.results(), class_means(trainer)
            rows.append(
                {
                    "recipe": recipe,
                    "class_order_seed": seed,
                    "tasks": len(trainer.stream),
                    "seconds": round(time.perf_counter() - started, 1),
                    **{name: results[name] for name in FIGURES},
                    "class_means_last_accuracy": baseline["last_accuracy"],
                    "class_means_average_accuracy": baseline["average_accuracy"],
                }
            )
            print(rows[-1], flush=True)
    summary = {}
    for recipe in args.recipes:
        for name in (*FIGURES, "class_means_last_accuracy"):
            values = [row[name] for row in rows if row["recipe"] == recipe]
            spread = stdev(values) if len(values) > 1 else 0.0
            summary[f"{recipe} {name}"] = {"mean": round(mean(values), 4), "deviation": round(spread, 4)}
    write_results(args.output, summary=summary, rows=rows)


if __name__ == "__main__":
    main()
