"""The rule that chooses the gaussian router's constants, and that its results file is what the rule says."""

import json
import re
import sys
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from strengths_choice import choose  # noqa: E402


def measured(width, *rows):
    names = "shrinkage", "sphere", "volume", "accuracy", "log-loss", "best temperature"
    return {"width": width, "rows": [dict(zip(names, row, strict=True)) for row in rows]}


def test_data_sets_weigh_the_same_and_log_loss_decides_ties():
    one = measured(100, (0.5, 0.1, 0.0, 0.9, 0.3, 5), (0.8, 0.1, 0.0, 0.8, 0.2, 2))
    other = measured(400, (0.5, 0.1, 0.0, 0.6, 0.3, 5), (0.8, 0.1, 0.0, 0.7, 0.2, 16))
    best, second = choose([one, other])
    assert (best["shrinkage"], best["accuracy"], second["accuracy"]) == (0.8, 0.75, 0.75)
    assert best["temperature over the root of the width"] == pytest.approx((0.2 * 0.8) ** 0.5)


def test_refuses_files_of_different_grids():
    with pytest.raises(ValueError, match="different grids"):
        choose([measured(4, (0.5, 0.1, 0.0, 0.9, 0.3, 5)), measured(4, (0.8, 0.1, 0.0, 0.9, 0.3, 5))])


def test_the_results_file_is_what_the_rule_says():
    results = BENCHMARKS / "results"
    sets = [json.loads((results / f"strengths_{name}.json").read_text()) for name in ("digits", "emoji", "letters")]
    assert json.loads((results / "strengths_choice.json").read_text())["ranked"] == choose(sets)


def test_the_routing_page_says_what_the_rule_chose():
    page = " ".join((BENCHMARKS.parent.parent / "docs" / "routing.md").read_text(encoding="utf-8").split())
    said = re.search(
        r"It says (\S+) for the shrinkage, with (\S+) against (\S+) for (\S+), (\S+) for the volumes, and (\S+)·√d",
        page,
    )
    choice = json.loads((BENCHMARKS / "results" / "strengths_choice.json").read_text())
    best = choice["chosen"]
    other = next(row for row in choice["ranked"] if (row["shrinkage"], row["volume"]) == (0.8, 0.0))
    expected = best["shrinkage"], best["accuracy"], other["accuracy"], 0.8, best["volume"]
    assert tuple(float(value) for value in said.groups()[:5]) == expected
    assert float(said.group(6)) == round(best["temperature over the root of the width"], 3)
