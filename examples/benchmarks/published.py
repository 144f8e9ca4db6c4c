"""
Measures the data sets that the literature publishes figures of, one config after another, and fills docs/published.md.
A run that was stopped goes on with the method at which it was stopped.

    python examples/benchmarks/published.py --list           # what is there, and what a run takes
    python examples/benchmarks/published.py                  # all sets, by all methods
    python examples/benchmarks/published.py cifar100_inc5    # one of them

Data sets come from the Hub, or from the folder that a config names. published.json has the published figures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import report
import run
from harness import CONFIGS, Bench, be_quiet


def finished(args: run.RunArguments) -> bool:
    """Whether the file of a method has every seed."""
    path = Path(args.results) / args.name / f"{args.method}.json"
    return path.is_file() and [row["seed"] for row in json.loads(path.read_text())["seeds"]] == args.seeds


def remaining(name: str, options: list[str]) -> list[tuple[run.RunArguments, str]]:
    """A config's runs that have not been finished: their arguments and commands."""
    (runs,) = run.parse_arguments([str(CONFIGS / f"{name}.json"), *options])
    return [(args, command) for args, command in runs if not finished(args)]


def main() -> None:
    given = sys.argv[1:]
    names = [argument for argument in given if argument in report.published_figures()]
    options = [argument for argument in given if argument not in (*names, "--list")]
    for name in names or report.published_figures():
        left = remaining(name, options)
        print(f"{name}: {', '.join(args.method for args, _ in left) or 'nothing'} left to measure", flush=True)
        if not left or "--list" in given:
            continue
        be_quiet()
        try:
            bench = Bench(left[0][0])
        except SystemExit as error:  # a set that is not there does not keep the others from being measured
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        for args, command in left:
            run.run(args, bench, command)
    if "--list" not in given and not options:
        report.main()


if __name__ == "__main__":
    main()
