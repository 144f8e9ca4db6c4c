"""Class statistics: what they sum to, what they keep, and the classifiers made of them, against plain float64."""

import copy
import json
import math
import os
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

from peft_luca import InvalidExpertError
from peft_luca.routing.discriminants import Gaussian, Prototype, Ridge
from peft_luca.routing.statistics import (
    STATISTICS_FORMAT,
    STATISTICS_NAME,
    ClassStatistics,
    pool,
    projection,
    unit_features,
)


NAMES = ("ant", "bee", "cat", "dog", "eel")
D = 12


def images(seed=0, sizes=(30, 9, 14, 2, 1)):
    """Unit features of five classes of different size and shape, in float64, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    x = [
        torch.randn(n, D, generator=generator).double() @ torch.randn(D, D, generator=generator).double()
        + 3 * torch.randn(D, generator=generator).double()
        for n in sizes
    ]
    labels = torch.cat([torch.full((n,), k) for k, n in enumerate(sizes)])
    order = torch.randperm(len(labels), generator=generator)
    return unit_features(torch.cat(x))[order], labels[order]


def part(x, y, names, **options):
    """Statistics of some of the classes, as an expert that has only those collects them."""
    keep = torch.tensor([NAMES[k] in names for k in y])
    own = torch.tensor([names.index(NAMES[k]) for k in y[keep]])
    return ClassStatistics.collect(x[keep], own, names, **options)


def same(one, other):
    """Whether two statistics are the same in every bit."""
    first, second = one._tensors(), other._tensors()
    return (
        one.classes == other.classes
        and first.keys() == second.keys()
        and all(torch.equal(first[name], second[name]) for name in first)
    )


def test_collects_what_numpy_style_sums_give():
    x, y = images()
    statistics = ClassStatistics.collect(x, y, NAMES, rank=None)
    for k in range(5):
        own = x[y == k]
        centred = own - own.mean(0)
        assert statistics.counts[k] == len(own)
        torch.testing.assert_close(statistics.means[k], own.mean(0))
        torch.testing.assert_close(statistics.scatter(k), centred.T @ centred, rtol=0, atol=1e-6)
    assert not statistics.errors.any()


@pytest.mark.parametrize("seed", range(3))
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
        error = (pooled.scatter(k) - whole.scatter(k)).norm() / whole.scatter(k).norm()
        assert error < 1e-6
    assert (pooled.gram - whole.gram).norm() / whole.gram.norm() < 1e-6
    torch.testing.assert_close(pooled.random_sums, whole.random_sums)


def test_order_and_company_change_no_bit():
    x, y = images()
    parts = {"b": part(x, y, ["cat", "ant"]), "a": part(x, y, ["bee"]), "c": part(x, y, ["ant", "dog"])}
    turned = {name: parts[name] for name in ("c", "a", "b")}
    assert same(pool(parts), pool(turned))
    untouched = copy.deepcopy(parts)
    pool(parts)
    assert all(same(parts[name], untouched[name]) for name in parts)
    without = {name: parts[name] for name in ("b", "a")}
    del parts["c"]
    assert same(pool(parts), pool(without))


@pytest.mark.parametrize("rank", [0, 3, 8])
def test_states_the_error_of_a_low_rank(rank):
    x, y = images()
    full, low = (ClassStatistics.collect(x, y, NAMES, rank=r) for r in (None, rank))
    for k in range(5):
        exact, kept = full.scatter(k), low.scatter(k)
        assert len(low.factors[k]) <= rank
        torch.testing.assert_close(kept.diagonal(), exact.diagonal(), rtol=1e-5, atol=1e-7)
        error = (kept - exact).norm() / exact.norm() if exact.any() else torch.tensor(0.0)
        assert float(low.errors[k]) == pytest.approx(float(error), abs=1e-5)
    assert low.errors[0] > 0
    assert low.errors[3] == 0 or rank == 0  # two images span one direction


def test_file_gives_back_the_same(tmp_path):
    x, y = images()
    statistics = ClassStatistics.collect(x, y, NAMES, rank=4, random_features=6)
    statistics.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [STATISTICS_NAME]
    assert same(ClassStatistics.load(tmp_path), statistics)
    assert statistics.nbytes == pytest.approx((tmp_path / STATISTICS_NAME).stat().st_size, abs=1200)


@pytest.fixture
def saved(tmp_path):
    """A sound file, and a way to write it anew with some of it changed."""
    x, y = images()
    ClassStatistics.collect(x, y, NAMES, rank=4, random_features=6).save(tmp_path)
    tensors = load_file(tmp_path / STATISTICS_NAME)
    about = {"format": 1, "classes": list(NAMES)}

    def spoil(about=about, **changes):
        changed = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
        metadata = about if about is None else {"statistics": about if isinstance(about, str) else json.dumps(about)}
        save_file(
            {name: tensor.contiguous() for name, tensor in changed.items()}, tmp_path / STATISTICS_NAME, metadata
        )
        return tmp_path

    return tensors, spoil


PARTS = ["counts", "means", "factors", "remainder", "errors", "factor_rows", "gram", "random_sums"]


@pytest.mark.parametrize("name", PARTS)
def test_refuses_a_file_whose_tensors_are_not_those_of_statistics(saved, name):
    tensors, spoil = saved
    wrong = torch.int32 if tensors[name].dtype == torch.int64 else torch.float16
    for broken, message in (
        (tensors[name][:-1], "has the shape|and 12 together"),
        (tensors[name].to(wrong), rf"{name} has the dtype '[IF]\d+', and must be of [IF]\d+\."),
        (tensors[name][..., None], f"{name} has the shape"),
        (None, rf"missing \['{name}'\]|its (means|factors|gram) has the shape None"),
    ):
        with pytest.raises(InvalidExpertError, match=message) as caught:
            ClassStatistics.load(spoil(**{name: broken}))
        assert "or use a router that needs none" in str(caught.value)
    if tensors[name].is_floating_point():
        for number in (math.nan, math.inf, -math.inf):
            with pytest.raises(InvalidExpertError, match=f"{name} holds numbers that are not finite"):
                ClassStatistics.load(spoil(**{name: tensors[name].clone().fill_(number)}))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("counts", lambda t: t - 1, "counts must be whole numbers from 1 to"),
        ("counts", lambda t: t + 0.5, "counts must be whole numbers from 1 to"),
        ("counts", lambda t: t * 1e13, "counts must be whole numbers from 1 to"),
        (
            "factor_rows",
            lambda t: t - 5,
            "factor_rows must be from 0 to 12, below the classes' counts, and 13 together",
        ),
        ("factor_rows", lambda t: t.roll(1), "factor_rows must be from 0"),
        ("factor_rows", lambda t: t + 2**62, "factor_rows must be from 0"),
        ("means", lambda t: t * 2, "means must be those of features of length 1"),
        ("means", lambda t: t * 1e300, "means must be those of features of length 1"),
        ("factors", lambda t: t * 1e3, "spread wider than features of length 1 can"),
        ("factors", lambda t: t * 1e18, "spread wider than features of length 1 can"),
        ("remainder", lambda t: t + 1e30, "spread wider than features of length 1 can"),
        ("remainder", lambda t: t - 1, "remainder must not be below 0"),
        ("errors", lambda t: t - 1, "errors must be from 0 to 1"),
        ("errors", lambda t: t + 2, "errors must be from 0 to 1"),
        ("gram", lambda t: t * 1e6, "gram must be that of 56 images"),
        ("random_sums", lambda t: -t - 1, "random_sums must be from 0"),
        ("random_sums", lambda t: t * 1e6, "random_sums must be from 0"),
    ],
)
def test_refuses_numbers_that_no_features_have(saved, name, change, message):
    tensors, spoil = saved
    with pytest.raises(InvalidExpertError, match=message):
        ClassStatistics.load(spoil(**{name: change(tensors[name])}))


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (None, "does not say of which classes they are"),
        ("not json", "what its header says of itself"),
        ("[]", "holds a list, not an object"),
        ({"format": 99, "classes": list(NAMES)}, "its format is 99, and this version reads 1"),
        ({"format": 1}, "its classes must be a list, got None"),
        ({"format": 1, "classes": "ant"}, "its classes must be a list, got 'ant'"),
        ({"format": 1, "classes": ["ant", "ant"]}, "each class may be named once"),
        ({"format": 1, "classes": ["ant", 3]}, "non-empty strings"),
        ({"format": 1, "classes": ["ant", "\x1b[31m"]}, "no control characters"),
        ({"format": 1, "classes": ["ant"]}, r"counts has the shape \[5\], and must have \[1\]"),
    ],
)
def test_refuses_a_header_that_says_nothing_sound(saved, about, message):
    with pytest.raises(InvalidExpertError, match=message):
        ClassStatistics.load(saved[1](about))


def test_refuses_more_rows_than_there_are_dimensions(saved):
    """Of which a classifier would need memory by their square, or, of no dimensions, any number in no bytes."""
    tensors, spoil = saved
    counts = torch.tensor([100, 9, 14, 2, 1]).double()
    rows = torch.tensor([D + 1, 0, 0, 0, 0])
    with pytest.raises(InvalidExpertError, match="factor_rows must be from 0 to 12, below the classes' counts"):
        ClassStatistics.load(spoil(counts=counts, factor_rows=rows, factors=torch.zeros(D + 1, D)))
    rows[0], counts[0] = 10**9, 10**10
    nothing = {"means": tensors["means"][:, :0], "remainder": tensors["remainder"][:, :0]}
    with pytest.raises(InvalidExpertError, match=r"its means has the shape \[5, 0\]"):
        ClassStatistics.load(spoil(counts=counts, factor_rows=rows, factors=torch.zeros(10**9, 0), **nothing))


@pytest.mark.parametrize("content", [b"", b"x" * 7, b"\xff" * 100, b"{}" * 50])
def test_refuses_what_is_no_safetensors_file(tmp_path, content):
    (tmp_path / STATISTICS_NAME).write_bytes(content)
    with pytest.raises(InvalidExpertError, match="is not a whole safetensors file"):
        ClassStatistics.load(tmp_path)
    (tmp_path / STATISTICS_NAME).unlink()
    with pytest.raises(InvalidExpertError, match="cannot be read"):
        ClassStatistics.load(tmp_path)


def test_nothing_is_read_of_a_file_that_its_header_does_not_fill(saved):
    path = saved[1]() / STATISTICS_NAME
    os.truncate(path, 2**30)  # sparse
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidExpertError, match="its tensors do not fill it"):
        ClassStatistics.load(path.parent)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    os.truncate(path, 2**40)
    with pytest.raises(InvalidExpertError, match="has 1099511627776 bytes, more than"):
        ClassStatistics.load(path.parent)


def test_refuses_a_class_without_images_and_numbers_that_are_none():
    x, y = images()
    with pytest.raises(ValueError, match="an image of every class"):
        ClassStatistics.collect(x, y, [*NAMES, "fox"])
    with pytest.raises(ValueError, match="finite"):
        ClassStatistics.collect(x / 0, y, NAMES)


def covariances(x, y):
    """Class means, class covariances (zero for one image) and the pooled one, written out."""
    means = torch.stack([x[y == k].mean(0) for k in range(5)])
    scatter = torch.stack([(x[y == k] - means[k]).T @ (x[y == k] - means[k]) for k in range(5)])
    counts = torch.bincount(y).double()
    own = scatter / (counts - 1).clamp(min=1)[:, None, None]
    return means, own, scatter.sum(0) / (len(y) - 5), counts


@pytest.mark.parametrize("strengths", [(None, None, 0.0), (0.8, None, 0.0), (0.3, 0.05, 1.0), (1.0, 0.2, 0.5)])
def test_gaussian_is_the_discriminant_written_out(strengths):
    shrinkage, sphere, volume = strengths
    x, y = images()
    means, own, pooled, counts = covariances(x, y)
    statistics = ClassStatistics.collect(x, y, NAMES, rank=None)
    gaussian = Gaussian(statistics, shrinkage, sphere, volume, temperature=2.0)
    alphas = 1 / (1 + 0.13 * (counts - 1) ** 0.25) if shrinkage is None else torch.full_like(counts, shrinkage)
    alphas = torch.where(counts > 1, alphas, 1.0)
    if sphere is None:
        variance = (1 - alphas) ** 2 / (counts - 1).clamp(min=1) + alphas**2 / (len(y) - 5)
        trace, square = pooled.trace(), pooled.square().sum()
        sphere = (square + trace**2) / (square - trace**2 / D) * (counts * variance).sum() / len(y)
        assert gaussian.sphere == pytest.approx(float(sphere), rel=1e-4)
        assert 0 < sphere < 1
    test = images(seed=9)[0]
    wanted = []
    for k in range(5):
        covariance = (1 - alphas[k]) * own[k] + alphas[k] * pooled
        covariance = (1 - sphere) * covariance + sphere * covariance.trace() / D * torch.eye(D).double()
        distance = ((test - means[k]) @ torch.linalg.inv(covariance) * (test - means[k])).sum(1)
        wanted.append(-0.5 * distance - 0.5 * volume * torch.logdet(covariance))
    wanted = torch.stack(wanted, 1)
    torch.testing.assert_close(gaussian.scores(test), wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(gaussian.log_posterior(test), (wanted / 2).log_softmax(1), rtol=1e-3, atol=1e-3)


def test_prototype_is_the_linear_discriminant_written_out():
    x, y = images()
    means, _, pooled, _ = covariances(x, y)
    prototype = Prototype(ClassStatistics.collect(x, y, NAMES, rank=None), temperature=1.0)
    trace, square, freedom = pooled.trace(), pooled.square().sum(), len(y) - 5
    strength = (square + trace**2) / (freedom * (square - trace**2 / D))
    assert prototype.shrinkage == pytest.approx(float(strength), rel=1e-4)
    covariance = (1 - strength) * pooled + strength * trace / D * torch.eye(D).double()
    test = images(seed=9)[0]
    difference = test[:, None] - means
    wanted = -0.5 * torch.einsum("bki,ij,bkj->bk", difference, torch.linalg.inv(covariance), difference)
    torch.testing.assert_close(prototype.log_posterior(test), wanted.log_softmax(1), rtol=1e-4, atol=1e-4)


def test_ridge_solves_its_normal_equations_and_takes_the_strength_of_least_gcv():
    x, y = images()
    statistics = ClassStatistics.collect(x, y, NAMES, random_features=30)
    ridge = Ridge(statistics)
    features, targets = torch.relu(x @ ridge.projection.double()), torch.eye(5).double()[y]

    def solve(strength):
        hat = features @ torch.linalg.inv(features.T @ features + strength * torch.eye(30)) @ features.T
        return len(y) * (targets - hat @ targets).square().sum() / (len(y) - hat.trace()) ** 2

    weights = torch.linalg.solve(features.T @ features + ridge.strength * torch.eye(30).double(), features.T @ targets)
    torch.testing.assert_close(ridge.weights.double(), weights.T, rtol=1e-3, atol=1e-4)
    assert solve(ridge.strength) <= min(solve(ridge.strength * factor) for factor in (0.1, 0.5, 2, 10)) * 1.0001
    with pytest.raises(ValueError, match="random features"):
        Ridge(ClassStatistics.collect(x, y, NAMES))


@pytest.mark.parametrize("classifier", [Gaussian, Prototype])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (1, 2, 1, 1, 1), (60, 1, 1, 1, 1)])
def test_few_images_give_finite_answers(classifier, sizes):
    x, y = images(sizes=sizes)
    posterior = classifier(ClassStatistics.collect(x, y, NAMES, rank=4)).log_posterior(x.float())
    assert posterior.isfinite().all()
    torch.testing.assert_close(posterior.exp().sum(1), torch.ones(len(x)))
    if max(sizes) == 1:
        assert (posterior.argmax(1) == y).all()


def test_blocks_change_nothing_but_memory(monkeypatch):
    x, y = images()
    gaussian = Gaussian(ClassStatistics.collect(x, y, NAMES))
    whole = gaussian.scores(x)
    monkeypatch.setattr("peft_luca.routing.discriminants.BUDGET", 1)
    torch.testing.assert_close(gaussian.scores(x), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"shrinkage": 1.5}, {"temperature": 0.0}, {"sphere": -1.0}])
def test_refuses_strengths_out_of_range(options):
    x, y = images()
    with pytest.raises(ValueError, match=r"between 0 and 1|above 0"):
        Gaussian(ClassStatistics.collect(x, y, NAMES), **options)


def test_what_the_background_explains_better_is_not_known():
    x, y = images(sizes=(60, 50, 40, 50, 60))
    statistics = ClassStatistics.collect(x, y, NAMES, rank=None)
    made = Prototype(statistics, temperature=2.0)
    centred = x - x.mean(0)
    total = centred.T @ centred / (len(x) - 1)
    trace, square = total.trace(), total.square().sum()
    strength = (square + trace**2) / ((len(x) - 1) * (square - trace**2 / D))
    total = (1 - strength) * total + strength * trace / D * torch.eye(D).double()
    test = torch.cat([images(seed=9)[0], x[:5]])
    background = -0.5 * ((test - x.mean(0)) @ torch.linalg.inv(total) * (test - x.mean(0))).sum(1)
    # As densities: less half the log-volume, here beside that of the classes.
    background = background - 0.5 * (torch.logdet(total) + torch.logdet(made.precision.double()))
    torch.testing.assert_close(made.background.scores(test), background, rtol=1e-3, atol=1e-2)
    # In full: with the part that all classes share.
    scores = made.scores(test) - 0.5 * (test @ made.precision.double() * test).sum(1, keepdim=True)
    total = torch.cat([scores, background[:, None]], 1).div(2.0).softmax(1)[:, :-1].sum(1)
    torch.testing.assert_close(made.log_known(test).exp(), total, rtol=1e-2, atol=1e-2)
    assert made.log_known(x).exp().mean() > made.log_known(images(seed=9)[0]).exp().mean()
    # The classes' own covariances have no say in it.
    assert torch.equal(Gaussian(statistics).log_known(test), Prototype(statistics).log_known(test))


def test_what_files_of_other_machines_depend_on():
    """Fixed for good: the file's name, its format, its default rank, and the directions of the random features."""
    assert (STATISTICS_NAME, STATISTICS_FORMAT) == ("statistics.safetensors", 1)
    x = unit_features(torch.randn(90, 80, generator=torch.Generator().manual_seed(0)).double())
    assert len(ClassStatistics.collect(x, torch.zeros(90).long(), ["a"]).factors[0]) == 64
    expected = [[1.76405235, 0.40015721, 0.97873798], [2.2408932, 1.86755799, -0.97727788]]
    torch.testing.assert_close(projection(2, 3), torch.tensor(expected).double(), rtol=0, atol=1e-7)


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


def test_a_missing_class_is_counted_and_sums_keep_their_precision():
    x, y = images()
    with pytest.raises(ValueError, match=r"the images per label are \[2, 0\]"):
        ClassStatistics.collect(x[:2], torch.tensor([0, 0]), ["a", "b"])
    whole = ClassStatistics.collect(x, y, NAMES, random_features=4)
    assert "gram=" not in repr(whole)
    assert "random_sums=" not in repr(whole)
    pooled = pool({"s": whole, "t": whole})
    assert (pooled.gram.dtype, pooled.random_sums.dtype) == (torch.float64, torch.float64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"features": [[1.0]]}, "features must be a tensor of numbers"),
        ({"features": torch.zeros(6)}, "features must be a tensor of numbers"),
        ({"labels": torch.zeros(6)}, "labels must be a tensor of 6 positions"),
        ({"labels": torch.tensor([0, 0, 0, 1, 1, -1])}, "labels must be a tensor of 6 positions"),
        ({"labels": [0, 0, 0, 1, 1, 1]}, "labels must be a tensor of 6 positions"),
        ({"classes": ["a", "a"]}, "each class may be named once"),
        ({"rank": 1.5}, "rank must be a whole number"),
        ({"random_features": -5}, "random_features must be a whole number"),
    ],
)
def test_collect_says_what_it_needs(changed, message):
    given = {"features": torch.randn(6, 4), "labels": torch.tensor([0, 0, 0, 1, 1, 1]), "classes": ["a", "b"]}
    with pytest.raises(ValueError, match=message):
        ClassStatistics.collect(**given | changed)


@pytest.mark.parametrize("classifier", [Gaussian, Prototype])
def test_no_images_have_no_posterior(classifier):
    x, y = images()
    made = classifier(ClassStatistics.collect(x, y, NAMES))
    assert made.log_posterior(torch.zeros(0, D)).shape == (0, len(NAMES))
    assert made.log_known(torch.zeros(0, D)).shape == (0,)
