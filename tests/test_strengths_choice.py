"""How the gaussian router shrinks is chosen by a rule, and the package and the results are what it says."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from peft_luca.routing.discriminants import Gaussian
from peft_luca.routing.statistics import ClassStatistics


BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from strengths import RULES, left_out, shrinkage  # noqa: E402
from strengths_choice import choose, may_be_chosen  # noqa: E402


RESULTS = BENCHMARKS / "results"
D = 5


def measured(width, *rows):
    names = "rule", "constant", "images", "volume", "accuracy", "log-loss", "best temperature"
    return {"width": width, "rows": [dict(zip(names, ("images", *row), strict=True)) for row in rows]}


def chosen():
    return json.loads((RESULTS / "strengths_choice.json").read_text())


def test_data_sets_weigh_the_same_however_many_rows_they_have_and_log_loss_decides_ties():
    one = measured(100, (1.0, 10, 0.0, 0.9, 0.3, 5), (2.0, 10, 0.0, 0.8, 0.2, 2))
    other = measured(
        400,
        (1.0, 10, 0.0, 0.5, 0.3, 5),
        (1.0, 20, 0.0, 0.7, 0.3, 5),
        (2.0, 10, 0.0, 0.6, 0.1, 4),
        (2.0, 20, 0.0, 0.8, 0.3, 16),
    )
    best, second = choose([one, other])
    assert (best["constant"], best["accuracy"], second["accuracy"]) == (2.0, 0.75, 0.75)
    assert best["temperature over the root of the width"] == pytest.approx((0.2 * 0.8) ** 0.5)


def test_refuses_files_of_different_grids():
    with pytest.raises(ValueError, match="different grids"):
        choose([measured(4, (1.0, 10, 0.0, 0.9, 0.3, 5)), measured(4, (2.0, 10, 0.0, 0.9, 0.3, 5))])


@pytest.mark.parametrize("rule", RULES)
def test_leaving_an_image_out_is_what_fitting_without_it_gives(rule):
    torch.manual_seed(0)
    y = torch.tensor([0] * 6 + [1] * 9 + [2] * 4)
    x = torch.randn(len(y), D).double() + y[:, None]
    alpha, gamma = partial(shrinkage, rule, RULES[rule][1]), 1e-5
    distances, volumes = left_out(x, y, alpha, gamma)
    for i in (0, 7, 18):
        rest = torch.arange(len(y)) != i
        means = torch.stack([x[rest][y[rest] == k].mean(0) for k in range(3)])
        scatter = torch.stack([(part := x[rest][y[rest] == k] - means[k]).T @ part for k in range(3)])
        counts = y[rest].bincount().double()
        for k, share in enumerate(1 - alpha(counts - 1)):
            covariance = share * scatter[k] / (counts[k] - 1) + (1 - share) * scatter.sum(0) / (len(y) - 1 - 3)
            covariance = (1 - gamma) * covariance + gamma * covariance.diagonal().mean() * torch.eye(D).double()
            # The sphere's size is that of all images, so that the sphere is kept small here.
            away = x[i] - means[k]
            assert float(distances[i, k]) == pytest.approx(float(away @ covariance.inverse() @ away), rel=1e-3)
            assert float(volumes[i, k]) == pytest.approx(float(torch.logdet(covariance)), abs=1e-3)


def test_the_results_file_is_what_the_rule_says():
    sets = [json.loads((RESULTS / f"strengths_{name}.json").read_text()) for name in ("digits", "emoji", "letters")]
    ranked = choose(sets)
    assert chosen()["ranked"] == ranked
    assert chosen()["chosen"] == next(row for row in ranked if may_be_chosen(row))


def test_a_rule_that_leaves_little_to_the_pooled_covariance_may_not_be_chosen():
    rules = {("constant", 0.5): True, ("root of images", 0.03): True, ("root of images", 0.04): False}
    assert {key: may_be_chosen({"rule": key[0], "constant": key[1]}) for key in rules} == rules


def test_the_package_follows_the_rule():
    best = chosen()["chosen"]
    torch.manual_seed(0)
    y = torch.arange(3).repeat_interleave(20)
    statistics = ClassStatistics.collect(torch.randn(60, D), y, ["a", "b", "c"], rank=None)
    alpha = shrinkage(best["rule"], best["constant"], torch.tensor([19.0]))
    gaussian = Gaussian(statistics)
    written_out = Gaussian(statistics, shrinkage=float(alpha), volume=best["volume"], temperature=gaussian.temperature)
    x = torch.randn(10, D)
    torch.testing.assert_close(gaussian.log_posterior(x), written_out.log_posterior(x))
    assert gaussian.temperature / D**0.5 == pytest.approx(best["temperature over the root of the width"], abs=0.005)


def test_the_routing_page_says_what_the_rule_chose():
    page = " ".join((BENCHMARKS.parent.parent / "docs" / "routing.md").read_text(encoding="utf-8").split())
    said = re.search(
        r"1/\(1 \+ (\S+)·\(n-1\)\^¼\).* among (\d+) candidates.* mean accuracy of (\S+), the best constant "
        r"\(([^)]+)\) one of (\S+); their log-losses are (\S+) and (\S+)\. .* the best of which has (\S+)\.",
        page,
    )
    choice = chosen()
    best, first = choice["chosen"], choice["ranked"][0]
    constant = next(row for row in choice["ranked"] if row["rule"] == "constant")
    assert (best["rule"], best["volume"]) == ("fourth root of images", 0.0)
    assert tuple(float(value) for value in said.groups()) == (
        best["constant"], len(choice["ranked"]), best["accuracy"], constant["constant"], constant["accuracy"],
        best["log-loss"], constant["log-loss"], first["accuracy"],
    )  # fmt: skip
