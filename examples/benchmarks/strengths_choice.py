"""
Choose the `gaussian` router's rule and constants from the leave-one-out figures of `strengths.py`; no test image is
read. Every data set has the same weight, and within it every number of images a class. How a class is shrunk, and how
much volumes count: the highest mean accuracy; where four decimals are equal, the lower log-loss. Only rules that leave
at least half of the weight to the pooled covariance with 1,000 images a class, which no data set here has, may be
chosen. Temperature: √d times the geometric mean of (best temperature)/√d there, with all images.

    cd examples/benchmarks/results
    python ../strengths_choice.py strengths_digits.json strengths_emoji.json strengths_letters.json
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import torch
from environment import write_results
from strengths import shrinkage


def choose(sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every (rule, constant, volume), the best first; `sets` are the contents of results files with the same grid."""
    grids = [{key_of(row) for row in found["rows"]} for found in sets]
    if any(grid != grids[0] for grid in grids):
        raise ValueError("the files have different grids. Measure all of them with the same options of strengths.py.")
    ranked = []
    for rule, constant, volume in sorted(grids[0]):
        rows = [[row for row in found["rows"] if key_of(row) == (rule, constant, volume)] for found in sets]
        roots = [math.sqrt(found["width"]) for found in sets]
        ratios = [
            max(own, key=lambda row: row["images"])["best temperature"] / root
            for own, root in zip(rows, roots, strict=True)
        ]
        ranked.append(
            {
                "rule": rule,
                "constant": constant,
                "volume": volume,
                "accuracy": round(mean(mean(row["accuracy"] for row in own) for own in rows), 4),
                "log-loss": round(mean(mean(row["log-loss"] for row in own) for own in rows), 4),
                "temperature over the root of the width": round(geometric_mean(ratios), 4),
            }
        )
    return sorted(ranked, key=lambda row: (-row["accuracy"], row["log-loss"]))


def key_of(row: dict[str, Any]) -> tuple[str, float, float]:
    return row["rule"], float(row["constant"]), row["volume"]


def may_be_chosen(row: dict[str, Any]) -> bool:
    return float(shrinkage(row["rule"], row["constant"], torch.tensor([999.0]))) >= 0.5


def main() -> None:
    ranked = choose([json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]])
    chosen = next(row for row in ranked if may_be_chosen(row))
    print(chosen)
    write_results("strengths_choice.json", chosen=chosen, ranked=ranked)


if __name__ == "__main__":
    main()
