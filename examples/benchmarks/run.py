"""
One row of the table: a method on a stream, over several seeds, each of which decides the class order and the training.

    python examples/benchmarks/run.py examples/benchmarks/configs/digits.json --method luca
    python examples/benchmarks/run.py examples/benchmarks/configs/digits.json       # every row of a config
    python examples/benchmarks/run.py --all                                         # every row that needs no network
    python examples/benchmarks/run.py --method luca --name birds --dataset path/to/birds --increment 10

A config holds defaults of the arguments below; what stands on the command line wins. Writes
results/<name>/<method>.json. examples/benchmarks/report.py makes the tables of them.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import datasets
import torch
from bench import Bench, StreamArguments, measure
from environment import write_results
from methods import METHODS
from transformers import HfArgumentParser
from transformers.utils import logging


HERE = Path(__file__).parent
CONFIGS = HERE / "configs"
# What a config says about itself, for a person.
NOTES = ("offline", "rows", "source", "note")


@dataclass
class RowArguments(StreamArguments):
    """Which method, how often, and where the figures go."""

    name: str = field(default="", metadata={"help": "Name of the stream; by default the data set's."})
    method: str = field(default="luca", metadata={"help": "What learns.", "choices": list(METHODS)})
    seeds: list[int] = field(
        default_factory=lambda: [1993, 0, 1, 2, 3], metadata={"help": "Of class order and training."}
    )
    settings: str = field(default="{}", metadata={"help": "Attributes of the method, as JSON."})
    results: str = field(default=str(HERE / "results"), metadata={"help": "Folder of the results."})


def arguments_of(config: dict[str, Any]) -> list[str]:
    """A config as it would stand on the command line."""
    found: list[str] = []
    for name, value in config.items():
        if name not in NOTES:
            values = value if isinstance(value, list) else [value]
            found += [f"--{name}", *(v if isinstance(v, str) else json.dumps(v) for v in values)]
    return found


def parse(arguments: list[str]) -> RowArguments:
    args, unknown = HfArgumentParser(RowArguments).parse_args_into_dataclasses(
        arguments, return_remaining_strings=True
    )
    if unknown:
        raise SystemExit(f"there is no argument {unknown[0]!r}. See --help.")
    args.name = args.name or Path(args.dataset).resolve().name
    return args


def check(args: RowArguments) -> None:
    """What can be told before [CLS] of every image is computed."""
    if args.increment is None and args.domain_column is None:
        raise SystemExit("how are the tasks cut? Give --increment, the classes of a task, or --domain_column.")
    if args.increment is not None and args.increment < 1:
        raise SystemExit(f"--increment is the number of classes of a task, at least 1, not {args.increment}.")
    if Path(args.name).name != args.name:
        raise SystemExit(f"--name is the name of a folder within the results, not {args.name!r}.")
    try:
        settings = json.loads(args.settings)
    except json.JSONDecodeError as error:
        raise SystemExit(f"--settings is no JSON: {error}.") from error
    unknown = [name for name in settings if not hasattr(METHODS[args.method], name)]
    if unknown:
        raise SystemExit(f"{args.method} has no {', '.join(unknown)} to set.")
    (Path(args.results) / args.name).mkdir(parents=True, exist_ok=True)


def run_row(args: RowArguments, bench: Bench, command: str) -> None:
    """Every seed, written down as soon as it is measured."""
    method = METHODS[args.method]
    method = type(method.__name__, (method,), json.loads(args.settings))
    path = Path(args.results) / args.name / f"{args.method}.json"
    seeds: list[dict[str, Any]] = []
    for seed in args.seeds:
        seeds.append({"seed": seed, **measure(method, bench, seed)})
        write_results(
            str(path),
            command=command,
            stream=stream_of(args, bench),
            method=args.method,
            summary=summary_of(seeds),
            seeds=seeds,
        )
        print(f"{args.name}, {args.method}, seed {seed}: A_B {seeds[-1]['last_accuracy']:.3f}", flush=True)


def stream_of(args: RowArguments, bench: Bench) -> dict[str, Any]:
    stream = bench.stream(args.seeds[0])
    return {
        "model": Path(args.model).name,
        "dataset": Path(args.dataset).resolve().name,
        "classes": len(bench.classes),
        "tasks": [len(task.classes) for task in stream],
        "train_images": sum(len(f) for (_, split), f in bench.features.items() if split == "train"),
        "test_images": sum(len(f) for (_, split), f in bench.features.items() if split == "test"),
    }


def summary_of(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over the seeds of every figure, and of every stage's."""
    summary: dict[str, Any] = {}
    for name, first in seeds[0].items():
        values = [row[name] for row in seeds]
        if name in ("seed", "per_task_accuracy") or first is None:
            continue
        if isinstance(first, list):
            summary[name] = [
                None if any(v is None for v in stage) else round(mean(stage), 4) for stage in zip(*values, strict=True)
            ]
        else:
            summary[name] = {
                "mean": round(mean(values), 4),
                "deviation": round(stdev(values), 4) if len(values) > 1 else None,
            }
    return summary


def run(given: list[str]) -> None:
    """What the command line asks for: one row, every row of a config, or all that need no network."""
    configs: list[Path | None] = [None]
    if given and given[0].endswith(".json"):
        configs, given = [Path(given[0])], given[1:]
    elif "--all" in given:
        given = [argument for argument in given if argument != "--all"]
        configs = [path for path in sorted(CONFIGS.glob("*.json")) if read(path)["offline"]]
    for path in configs:
        config = {} if path is None else read(path)
        rows = {} if "--method" in given else config.get("rows", {})
        bench = None
        for method in rows or [None]:
            asked = [] if method is None else ["--method", method]
            name = parse([*arguments_of(config), *asked, *given]).method
            of_row = arguments_of(config.get("rows", {}).get(name, {}))
            args = parse([*arguments_of(config), *of_row, *asked, *given])
            check(args)
            bench = bench or Bench(args)
            place = [] if path is None else [f"examples/benchmarks/configs/{path.name}"]
            run_row(args, bench, " ".join(["python examples/benchmarks/run.py", *place, *asked, *given]))


def read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SystemExit(
            f"there is no config {path}. There are {', '.join(sorted(map(str, CONFIGS.glob('*.json'))))}."
        )
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def main() -> None:
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", message="Adapter|lbfgs|The least populated class|.*is_gradient_checkpointing")
    torch.set_num_threads(1)
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
