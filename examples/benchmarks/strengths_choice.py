"""
Choose the `gaussian` router's constants from the leave-one-out figures of `strengths.py`, by one rule, with equal
weight for each data set; no test image is read. Shrinkage and volume: the highest accuracy, mean over the data sets
and the spheres; where four decimals are equal, the lower log-loss. Temperature: √d times the geometric mean of
(best temperature)/√d there.

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

from environment import write_results


def choose(sets: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Every (shrinkage, volume), the best first; `sets` are the contents of results files with the same grid."""
    grids = [{(row["shrinkage"], row["sphere"], row["volume"]) for row in found["rows"]} for found in sets]
    if any(grid != grids[0] for grid in grids):
        raise ValueError("the files have different grids. Measure all of them with the same options of strengths.py.")
    ranked = []
    for alpha, beta in sorted({(alpha, beta) for alpha, _, beta in grids[0]}):
        rows = [
            (math.sqrt(found["width"]), [r for r in found["rows"] if (r["shrinkage"], r["volume"]) == (alpha, beta)])
            for found in sets
        ]
        ratios = [geometric_mean(row["best temperature"] / root for row in own) for root, own in rows]
        ranked.append(
            {
                "shrinkage": alpha,
                "volume": beta,
                "accuracy": round(mean(mean(row["accuracy"] for row in own) for _, own in rows), 4),
                "log-loss": round(mean(mean(row["log-loss"] for row in own) for _, own in rows), 4),
                "temperature over the root of the width": round(geometric_mean(ratios), 4),
            }
        )
    return sorted(ranked, key=lambda row: (-row["accuracy"], row["log-loss"]))


def main() -> None:
    ranked = choose([json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]])
    print(ranked[0])
    write_results("strengths_choice.json", chosen=ranked[0], ranked=ranked)


if __name__ == "__main__":
    main()
