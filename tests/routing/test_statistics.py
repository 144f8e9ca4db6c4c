"""Class statistics: what they sum to, what a rank keeps, and what pooling them gives, against plain float64."""

import copy

import pytest
import torch
from fake_experts import NAMES, D, images

from peft_luca.routing.statistics import ClassStatistics, pool, random_directions, unit_features


def part(x, y, names, **options):
    """Statistics of some of the classes, as an expert that has only those collects them."""
    keep = torch.tensor([NAMES[k] in names for k in y])
    own = torch.tensor([names.index(NAMES[k]) for k in y[keep]])
    return ClassStatistics.collect(x[keep], own, names, **options)


def scatter(statistics, k):
    """Σ(x-μ)(x-μ)ᵀ of class `k`, (d, d), without the part that the rank leaves out."""
    factor = statistics.factors[k].double()
    return factor.T @ factor + torch.diag(statistics.remainder[k].double())


def same(one, other):
    """Whether two statistics are the same in every bit."""
    first, second = one.tensors(), other.tensors()
    return (
        one.classes == other.classes
        and first.keys() == second.keys()
        and all(torch.equal(first[name], second[name]) for name in first)
    )


def test_unit_features_are_standardized_and_of_length_one():
    z = torch.randn(5, D, generator=torch.Generator().manual_seed(0))
    mean, std = torch.full((D,), 0.5).double(), torch.full((D,), 2.0).double()
    expected = (z - 0.5) / 2
    torch.testing.assert_close(unit_features(z, mean, std), expected / expected.norm(dim=1, keepdim=True))
    torch.testing.assert_close(unit_features(z), z / z.norm(dim=1, keepdim=True))
    assert unit_features(z.half()).dtype == torch.float16
    assert not unit_features(torch.zeros(2, D)).any()


def test_collected_statistics_are_the_sums_written_out():
    x, y = images()
    statistics = ClassStatistics.collect(x, y, NAMES, rank=None)
    for k in range(5):
        own = x[y == k]
        centred = own - own.mean(0)
        assert statistics.counts[k] == len(own)
        torch.testing.assert_close(statistics.means[k], own.mean(0))
        torch.testing.assert_close(scatter(statistics, k), centred.T @ centred, rtol=0, atol=1e-6)
    assert not statistics.errors.any()
    total = sum(scatter(statistics, k) for k in range(5))
    torch.testing.assert_close(statistics.within[0], total / (len(y) - 5), rtol=0, atol=1e-6)
    assert statistics.within[1] == len(y) - 5


def test_features_may_be_prepared_block_by_block(monkeypatch):
    x, y = images()
    whole = ClassStatistics.collect(x, y, NAMES, random_features=6)
    monkeypatch.setattr("peft_luca.routing.statistics.BLOCK", 7)
    seen = []

    def prepare(rows):
        seen.append(len(rows))
        assert rows.dtype == torch.float64
        return unit_features(rows)

    blocks = ClassStatistics.collect(3 * x.float(), y, NAMES, random_features=6, prepare=prepare)
    assert max(seen[5:]) == 7
    for name, tensor in blocks.tensors().items():
        if name != "factors":  # of which any rotation is as good
            torch.testing.assert_close(tensor, whole.tensors()[name], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(blocks.within[0], whole.within[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_any_composition_gives_what_one_pass_gives(seed):
    x, y = images(seed, (40, 31, 22, 13, 4))
    whole = ClassStatistics.collect(x, y, NAMES, rank=None, random_features=20)
    # Three owners; "bee" and "cat" come in two and three of them.
    owner = torch.randint(3, (len(y),), generator=torch.Generator().manual_seed(seed))
    owner[y == 0], owner[y == 3], owner[y == 4] = 0, 1, 2
    parts = {}
    for t in range(3):
        names = [NAMES[k] for k in sorted(set(y[owner == t].tolist()))][::-1]
        parts[f"owner{t}"] = part(x[owner == t], y[owner == t], names, rank=None, random_features=20)
    pooled = pool(parts)
    assert pooled.classes == NAMES
    torch.testing.assert_close(pooled.counts, whole.counts)
    torch.testing.assert_close(pooled.means, whole.means, rtol=0, atol=1e-12)
    for k in range(5):
        exact = scatter(whole, k)
        assert (scatter(pooled, k) - exact).norm() / exact.norm() < 1e-6
    assert (pooled.gram.dtype, pooled.random_sums.dtype) == (torch.float64, torch.float64)
    assert (pooled.gram - whole.gram).norm() / whole.gram.norm() < 1e-6
    torch.testing.assert_close(pooled.random_sums, whole.random_sums)


def test_the_order_of_experts_changes_no_bit_and_a_deleted_expert_leaves_no_trace():
    x, y = images()
    parts = {"b": part(x, y, ["cat", "ant"]), "a": part(x, y, ["bee"]), "c": part(x, y, ["ant", "dog"])}
    before = copy.deepcopy(parts)
    assert same(pool(parts), pool({name: parts[name] for name in ("c", "a", "b")}))
    assert all(same(parts[name], before[name]) for name in parts)
    del before["c"], parts["c"]
    assert same(pool(parts), pool(before))


def test_random_features_are_pooled_only_if_all_experts_have_equally_many():
    x, y = images()
    first = part(x, y, ["cat"], random_features=4)
    for width in (0, 5):
        pooled = pool({"s": first, "t": part(x, y, ["ant"], random_features=width)})
        assert pooled.gram is None
        assert pooled.random_sums is None


@pytest.mark.parametrize("rank", [0, 3, 8])
def test_the_error_of_a_low_rank_is_stated(rank):
    x, y = images()
    full, low = (ClassStatistics.collect(x, y, NAMES, rank=r) for r in (None, rank))
    for k in range(5):
        exact, kept = scatter(full, k), scatter(low, k)
        assert len(low.factors[k]) <= rank
        torch.testing.assert_close(kept.diagonal(), exact.diagonal(), rtol=1e-5, atol=1e-7)
        error = (kept - exact).norm() / exact.norm() if exact.any() else torch.tensor(0.0)
        assert float(low.errors[k]) == pytest.approx(float(error), abs=1e-5)
    assert low.errors[0] > 0
    assert low.errors[3] == 0 or rank == 0  # two images span one direction


def test_what_the_ranks_leave_out_adds_up():
    x, y = images(sizes=(30, 9, 14, 12, 11))
    half = torch.arange(len(y)) % 2 == 0
    parts = {
        name: ClassStatistics.collect(x[rows], y[rows], NAMES, rank=2) for name, rows in (("s", half), ("t", ~half))
    }
    assert all(part.remainder.sum() > 0 for part in parts.values())
    pooled = pool(parts)
    torch.testing.assert_close(pooled.remainder, parts["s"].remainder + parts["t"].remainder)
    assert torch.equal(pooled.errors, torch.maximum(parts["s"].errors, parts["t"].errors))


@pytest.mark.parametrize("images_of_a_class", [1, 3])
def test_an_unknown_spread_is_a_sphere(images_of_a_class):
    x = torch.eye(2, D).double().repeat_interleave(images_of_a_class, 0)
    statistics = ClassStatistics.collect(x, torch.arange(2).repeat_interleave(images_of_a_class), ["a", "b"])
    covariance, freedom = statistics.within
    assert torch.equal(covariance, torch.eye(D).double() / D)
    assert freedom == 0.0


def test_bytes_and_the_short_form():
    x, y = images()
    statistics = ClassStatistics.collect(x, y, NAMES, rank=4, random_features=6)
    rows = sum(min(n - 1, 4) for n in (30, 9, 14, 2, 1))
    doubles = 5 + 5 * D + 5 + 5 + 5 * 6  # counts, means, errors, rows per factor, sums of random features
    assert sum(tensor.nbytes for tensor in statistics.tensors().values()) == 8 * doubles + 4 * (
        rows * D + 5 * D + 6 * 6
    )
    assert "gram=" not in repr(statistics)
    assert "random_sums=" not in repr(statistics)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"features": torch.full((6, 4), torch.inf)}, "statistics need finite features"),
        ({"labels": torch.tensor([0, 0, 0, 0, 0, 0])}, r"an image of every class, .* per label are \[6, 0\]"),
        ({"labels": torch.tensor([0, 0, 0, 1, 1, 2])}, r"per label are \[3, 2, 1\] for the 2 classes"),
        ({"classes": ["a", "a"]}, "each class may be named once"),
        ({"rank": -1}, "rank must be a whole number of at least 0, or None, got -1"),
    ],
)
def test_collect_says_what_it_needs(changed, message):
    given = {"features": torch.randn(6, 4), "labels": torch.tensor([0, 0, 0, 1, 1, 1]), "classes": ["a", "b"]}
    with pytest.raises(ValueError, match=message):
        ClassStatistics.collect(**given | changed)


def test_files_of_other_machines_depend_on_the_default_rank_and_the_random_directions():
    x = unit_features(torch.randn(90, 80, generator=torch.Generator().manual_seed(0)).double())
    assert len(ClassStatistics.collect(x, torch.zeros(90).long(), ["a"]).factors[0]) == 64
    expected = [[1.76405235, 0.40015721, 0.97873798], [2.2408932, 1.86755799, -0.97727788]]
    torch.testing.assert_close(random_directions(2, 3), torch.tensor(expected).double(), rtol=0, atol=1e-7)
