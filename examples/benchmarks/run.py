"""
Measures a method on a stream, over several seeds, each of which decides the class order and the training. Writes
results/<name>/<method>.json; report.py makes the tables.

    python examples/benchmarks/run.py examples/benchmarks/configs/digits.json --method luca
    python examples/benchmarks/run.py examples/benchmarks/configs/digits.json       # every method of a config
    python examples/benchmarks/run.py --all                                         # all that needs no network
    python examples/benchmarks/run.py --method luca --name birds --dataset path/to/birds --increment 10

A config holds defaults of the arguments; the command line wins.
"""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import (
    CONFIGS,
    RESULTS,
    Bench,
    Method,
    StreamArguments,
    arguments_of,
    be_quiet,
    mean_and_deviation,
    measure,
    parse,
    read_config,
    write_results,
)
from methods import METHODS


@dataclass
class RunArguments(StreamArguments):
    """Which method, and where the figures go."""

    method: str = field(
        default="luca", metadata={"help": f"One of {', '.join(METHODS)}; or a Python file with a class of your own."}
    )
    settings: str = field(default="{}", metadata={"help": "Attributes of the method, as JSON."})
    results: str = field(default=str(RESULTS), metadata={"help": "Folder of the results."})


def parse_arguments(given: list[str]) -> list[list[tuple[RunArguments, str]]]:
    """Of each data set that the command line asks for: the arguments of its runs, and each run's own command."""
    configs: list[Path | None] = [None]
    if given and given[0].endswith(".json"):
        configs, given = [Path(given[0])], given[1:]
    elif "--all" in given:
        given = [argument for argument in given if argument != "--all"]
        configs = [path for path in sorted(CONFIGS.glob("*.json")) if read_config(path)["offline"]]
    asked_for = []
    for path in configs:
        config = {} if path is None else read_config(path)
        rows, found = config.get("rows", {}), []
        for method in [None] if "--method" in given or not rows else rows:
            asked = given if method is None else ["--method", method, *given]
            name = parse(RunArguments, [*arguments_of(config), *asked]).method
            args = parse(RunArguments, [*arguments_of(config), *arguments_of(rows.get(name, {})), *asked])
            check(args)
            place = [] if path is None else [f"examples/benchmarks/configs/{path.name}"]
            found.append((args, shlex.join(["python", "examples/benchmarks/run.py", *place, *asked])))
        asked_for.append(found)
    return asked_for


def check(args: RunArguments) -> None:
    """What can be told before [CLS] of every image is computed."""
    if args.increment is None and args.domain_column is None:
        raise SystemExit("the stream has no tasks. Give --increment, the classes of a task, or --domain_column.")
    if args.increment is not None and args.increment < 1:
        raise SystemExit(f"--increment must be at least 1, got {args.increment}.")
    if Path(args.name).name != args.name:
        raise SystemExit(f"--name must be the name of a folder, got {args.name!r}.")
    try:
        settings = json.loads(args.settings)
    except json.JSONDecodeError as error:
        raise SystemExit(f"--settings must be JSON: {error}.") from error
    method = method_of(args.method)
    unknown = [name for name in settings if not hasattr(method, name)]
    if unknown:
        raise SystemExit(f"{args.method} has no attribute {', '.join(unknown)}, which --settings names.")


def method_of(name: str) -> type[Method]:
    """The class of a method: of this package by its name, or the one that is defined in a Python file."""
    if name in METHODS:
        return METHODS[name]
    if not name.endswith(".py") or not Path(name).is_file():
        raise SystemExit(f"--method must be one of {', '.join(METHODS)}, or a Python file, got {name!r}.")
    defined = [value for value in runpy.run_path(name, run_name=name).values() if isinstance(value, type)]
    found = [kind for kind in defined if issubclass(kind, Method) and kind.__module__ == name]
    if len(found) != 1:
        raise SystemExit(f"{name} must define one subclass of Method, got {len(found)}.")
    return found[0]


def run(args: RunArguments, bench: Bench, command: str) -> None:
    """Measure every seed; write the file after each."""
    method = method_of(args.method)
    method = type(method.__name__, (method,), json.loads(args.settings))
    path = Path(args.results) / args.name / f"{Path(args.method).stem}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = {
        "model": Path(args.model).name,
        "dataset": Path(args.dataset).resolve().name,
        "classes": len(bench.classes),
        "tasks": [len(task.classes) for task in bench.stream(args.seeds[0])],
        **{f"{split}_images": len(part) for split, part in bench.parts.items()},
    }
    seeds: list[dict[str, Any]] = []
    for seed in args.seeds:
        seeds.append({"seed": seed, **measure(method, bench, seed)})
        summary = summarise(seeds)
        write_results(path, command=command, stream=stream, method=path.stem, summary=summary, seeds=seeds)
        print(f"{args.name}, {path.stem}, seed {seed}: A_B {seeds[-1]['last_accuracy']:.3f}", flush=True)


def summarise(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over the seeds of every figure; of lists, the mean at each stage."""
    summary: dict[str, Any] = {}
    for name, first in seeds[0].items():
        values = [row[name] for row in seeds]
        if name in ("seed", "per_task_accuracy") or first is None:
            continue
        if isinstance(first, list):
            stages = zip(*values, strict=True)
            summary[name] = [None if None in stage else mean_and_deviation(list(stage))["mean"] for stage in stages]
        else:
            summary[name] = mean_and_deviation(values)
    return summary


def main() -> None:
    be_quiet()
    for found in parse_arguments(sys.argv[1:]):
        bench = Bench(found[0][0])
        for args, command in found:
            run(args, bench, command)


if __name__ == "__main__":
    main()
