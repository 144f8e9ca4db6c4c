"""The closed-form classifiers against their formulas written out, at their limits, and exported."""

import importlib.util

import pytest
import torch
from fake_experts import NAMES, D, images

from peft_luca.routing import discriminants
from peft_luca.routing.discriminants import (
    LinearDiscriminant,
    RegularizedDiscriminant,
    RidgeClassifier,
    sphere_strength,
)
from peft_luca.routing.statistics import ClassStatistics, pool, unit_features
from peft_luca.utils import InvalidExpertError


KINDS = [LinearDiscriminant, RegularizedDiscriminant, RidgeClassifier]


def collect(x, y, **options):
    return ClassStatistics.collect(x, y, NAMES, **options)


def covariances(x, y):
    """Class means, class covariances (zero for one image), the pooled one, and counts, written out."""
    means = torch.stack([x[y == k].mean(0) for k in range(5)])
    scatter = torch.stack([(x[y == k] - means[k]).T @ (x[y == k] - means[k]) for k in range(5)])
    counts = torch.bincount(y).double()
    own = scatter / (counts - 1).clamp(min=1)[:, None, None]
    return means, own, scatter.sum(0) / (len(y) - 5), counts


@pytest.mark.parametrize("strengths", [(None, None, 0.0), (0.8, None, 0.0), (0.3, 0.05, 1.0), (1.0, 0.2, 0.5)])
def test_regularized_discriminant_is_its_formula(strengths):
    shrinkage, sphere, volume = strengths
    x, y = images()
    means, own, pooled, counts = covariances(x, y)
    made = RegularizedDiscriminant(collect(x, y, rank=None), shrinkage, sphere, volume, temperature=2.0)
    alphas = 1 / (1 + 0.13 * (counts - 1) ** 0.25) if shrinkage is None else torch.full_like(counts, shrinkage)
    alphas = torch.where(counts > 1, alphas, 1.0)
    if sphere is None:
        variance = (1 - alphas) ** 2 / (counts - 1).clamp(min=1) + alphas**2 / (len(y) - 5)
        trace, square = pooled.trace(), pooled.square().sum()
        sphere = (square + trace**2) / (square - trace**2 / D) * (counts * variance).sum() / len(y)
        assert made.sphere == pytest.approx(float(sphere), rel=1e-4)
        assert made.sphere == pytest.approx(sphere_strength(counts, alphas, pooled, len(y) - 5.0), rel=1e-4)
        assert 0 < sphere < 1
    test = images(seed=9)[0]
    wanted = []
    for k in range(5):
        covariance = (1 - alphas[k]) * own[k] + alphas[k] * pooled
        covariance = (1 - sphere) * covariance + sphere * covariance.trace() / D * torch.eye(D).double()
        distance = ((test - means[k]) @ torch.linalg.inv(covariance) * (test - means[k])).sum(1)
        wanted.append(-0.5 * distance - 0.5 * volume * torch.logdet(covariance))
    wanted = torch.stack(wanted, 1)
    torch.testing.assert_close(made.scores(test), wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(made.log_posterior(test), (wanted / 2).log_softmax(1), rtol=1e-3, atol=1e-3)


def test_the_diagonal_that_a_low_rank_leaves_out_counts_by_its_mean():
    x, y = images(sizes=(30, 9, 14, 12, 11))
    statistics = collect(x, y, rank=2)
    made = RegularizedDiscriminant(statistics, shrinkage=0.4, sphere=0.1)
    assert made.temperature == pytest.approx(0.44 * D**0.5)
    pooled, test = statistics.within[0], images(seed=9)[0]
    for k in range(5):
        freedom, factor = float(statistics.counts[k]) - 1, statistics.factors[k].double()
        own = (factor.T @ factor + statistics.remainder[k].double().mean() * torch.eye(D)) / freedom
        covariance = 0.6 * own + 0.4 * pooled
        covariance = 0.9 * covariance + 0.1 * covariance.trace() / D * torch.eye(D).double()
        centred = test - statistics.means[k]
        wanted = -0.5 * (centred @ torch.linalg.inv(covariance) * centred).sum(1)
        torch.testing.assert_close(made.scores(test)[:, k], wanted, rtol=1e-4, atol=1e-3)
        scatter = freedom * own
        span = float((torch.linalg.inv(covariance) * scatter).sum()) / (freedom + 1)
        typical = made._leave_out(torch.tensor([span]).double(), torch.tensor([k]))
        assert float(made.typical[k]) == pytest.approx(float(typical), rel=1e-3)


def test_linear_discriminant_is_its_formula():
    x, y = images()
    means, _, pooled, _ = covariances(x, y)
    statistics, test = collect(x, y, rank=None), images(seed=9)[0]
    trace, square, freedom = pooled.trace(), pooled.square().sum(), len(y) - 5
    rule = (square + trace**2) / (freedom * (square - trace**2 / D))
    assert LinearDiscriminant(statistics).shrinkage == pytest.approx(float(rule), rel=1e-4)
    assert LinearDiscriminant(statistics).temperature == pytest.approx(D**0.5 / 3)
    for strength, centres in ((None, None), (0.3, torch.randn(7, D, generator=torch.Generator().manual_seed(1)))):
        share, centres = rule if strength is None else strength, means if centres is None else centres.double()
        made = LinearDiscriminant(statistics, strength, 1.0, None if strength is None else centres)
        covariance = (1 - share) * pooled + share * trace / D * torch.eye(D).double()
        difference = test[:, None] - centres
        wanted = -0.5 * torch.einsum("bki,ij,bkj->bk", difference, torch.linalg.inv(covariance), difference)
        torch.testing.assert_close(made.log_posterior(test), wanted.log_softmax(1), rtol=1e-4, atol=1e-4)


def test_ridge_solves_its_normal_equations_with_the_strength_of_least_gcv():
    x, y = images()
    ridge = RidgeClassifier(collect(x, y, random_features=30))
    features, targets = torch.relu(x @ ridge.directions.double()), torch.eye(5).double()[y]

    def gcv(strength):
        hat = features @ torch.linalg.inv(features.T @ features + strength * torch.eye(30)) @ features.T
        return len(y) * (targets - hat @ targets).square().sum() / (len(y) - hat.trace()) ** 2

    weights = torch.linalg.solve(features.T @ features + ridge.strength * torch.eye(30).double(), features.T @ targets)
    torch.testing.assert_close(ridge.weights.double(), weights.T, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ridge.scores(x), features @ weights, rtol=1e-3, atol=1e-4)
    assert gcv(ridge.strength) <= min(gcv(ridge.strength * factor) for factor in (0.1, 0.5, 2, 10)) * 1.0001
    assert ridge.temperature == 0.1
    with pytest.raises(ValueError, match="needs random features in the statistics of every expert"):
        RidgeClassifier(collect(x, y))


@pytest.mark.parametrize("volume", [0.0, 1.0])
def test_left_out_distances_are_those_of_covariances_without_the_image(volume):
    x, y = images(sizes=(30, 9, 14, 12, 2))
    made = RegularizedDiscriminant(collect(x, y, rank=None), shrinkage=0.4, sphere=0.1, volume=volume)
    means, own, pooled, counts = covariances(x, y)
    found = made.left_out(x, y)
    for i in [*range(0, len(x), 7), *(y == 4).nonzero()[:, 0].tolist()]:
        k, n = y[i], counts[y[i]]
        away = x[i] - means[k]
        lost = n / (n - 1) * torch.outer(away, away) * (0.6 / (n - 1) + 0.4 / (len(x) - 5))
        whole = 0.6 * own[k] + 0.4 * pooled
        covariance = 0.9 * (whole - lost) + 0.1 * whole.trace() / D * torch.eye(D)
        rest = x[(y == k) & (torch.arange(len(x)) != i)].mean(0)
        wanted = (x[i] - rest) @ torch.linalg.inv(covariance) @ (x[i] - rest)
        assert found[i] == pytest.approx(float(wanted), rel=1e-3)


@pytest.mark.parametrize("volume", [0.0, 1.0])
@pytest.mark.parametrize("rank", [None, 4])
def test_distances_are_in_units_of_those_that_are_typical(rank, volume):
    x, y = images(sizes=(200, 2, 14, 1, 11))
    made = RegularizedDiscriminant(collect(x, y, rank=rank), 0.4, 0.1, volume)
    plain = RegularizedDiscriminant(collect(x, y, rank=rank), 0.4, 0.1)
    squared = -2 * plain.scores(x)[torch.arange(len(x)), y]
    torch.testing.assert_close(made.distances(made.scores(x), y), squared / made.typical[y], rtol=1e-3, atol=1e-3)
    left, many = plain.left_out(x, y), y == 0
    if rank is None:  # a low rank keeps the mean of the diagonal alone
        assert made.typical[0] == pytest.approx(float(left[many].mean()), rel=0.05)
    assert made.typical[3] == pytest.approx(float(made.typical[[0, 1, 2, 4]].mean()))
    assert made.typical[1] != made.typical[3]  # two images have a distance of their own
    alone = RegularizedDiscriminant(collect(*images(sizes=(1, 1, 1, 1, 1)), rank=rank))
    assert made.typical.isfinite().all()
    assert torch.equal(alone.typical, torch.full((5,), float(D)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (1, 2, 1, 1, 1), (60, 1, 1, 1, 1)])
def test_few_images_give_finite_posteriors(kind, sizes):
    x, y = images(sizes=sizes)
    posterior = kind.make(collect(x, y, rank=4, random_features=20)).log_posterior(x.float())
    assert posterior.isfinite().all()
    torch.testing.assert_close(posterior.exp().sum(1), torch.ones(len(x)))
    if max(sizes) == 1 and kind is not RidgeClassifier:
        assert (posterior.argmax(1) == y).all()


def test_memory_is_bounded_however_many_images_come(monkeypatch):
    x, y = images()
    made = RegularizedDiscriminant(collect(x, y))
    rows, sizes, sum_squares = len(made.rows), [], made._sum_squares
    monkeypatch.setattr(made, "_sum_squares", lambda products: sizes.append(products.numel()) or sum_squares(products))
    whole = made.scores(x)
    monkeypatch.setattr(discriminants, "BUDGET", 10 * rows + 1)
    torch.testing.assert_close(made.scores(x), whole, rtol=1e-5, atol=1e-5)
    assert sizes == [56 * rows] + [10 * rows] * 5 + [6 * rows]
    monkeypatch.setattr(discriminants, "BUDGET", 1)  # one image at a time
    torch.testing.assert_close(made.scores(x), whole, rtol=1e-5, atol=1e-5)


def test_numbers_of_no_images_are_refused():
    x, y = images()
    sound = collect(x, y, random_features=20)
    for broken in (
        {"means": sound.means * 1e20, "factors": tuple(f * 1e-20 for f in sound.factors)},
        {"remainder": sound.remainder * torch.inf},
        {"factors": tuple(f * torch.nan for f in sound.factors)},
    ):
        with pytest.raises(InvalidExpertError, match="no classifier can be made of the experts' statistics"):
            RegularizedDiscriminant.make(ClassStatistics(**vars(sound) | broken))
    for gram in (sound.gram * torch.nan, sound.gram * 0):
        with pytest.raises(InvalidExpertError, match="or use a router that needs none, such as 'entropy'"):
            RidgeClassifier.make(ClassStatistics(**vars(sound) | {"gram": gram}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_is_moved_to_with_all_tensors(kind):
    x, y = images()
    made = kind(collect(x, y, random_features=20)).to("meta")
    assert all(value.device.type == "meta" for value in made.buffers())
    assert not any(isinstance(value, torch.Tensor) for value in vars(made).values())
    assert made.log_posterior(x.to("meta")).shape == (len(x), 5)


class Posterior(torch.nn.Module):
    """What is exported: features in, log-posterior and the distance of the best class out."""

    def __init__(self, discriminant):
        super().__init__()
        self.discriminant = discriminant

    def forward(self, x):
        posterior, scores = self.discriminant.answer(unit_features(x), self.discriminant)
        return posterior, self.discriminant.distances(scores, scores.argmax(dim=1))


def exportable():
    """Of two experts that share classes: classes of 0 to 23 factor rows, two of them of equally many."""
    x, y = images(sizes=(30, 9, 14, 9, 1))
    first = (y == 4) | (torch.arange(len(y)) % 2 == 0)
    parts = {
        "s": collect(x[first], y[first]),
        "t": ClassStatistics.collect(x[~first], y[~first], NAMES[:4]),
    }
    return Posterior(RegularizedDiscriminant.make(pool(parts))).eval()


def features(batch):
    return torch.randn(batch, D, generator=torch.Generator().manual_seed(batch))


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs onnx, onnxscript and onnxruntime: pip install peft-luca[onnx]",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_onnx_holds_for_every_batch_size(tmp_path):
    import onnxruntime

    module, path, dynamic = exportable(), tmp_path / "posterior.onnx", ({0: torch.export.Dim("batch")},)
    torch.onnx.export(module, (features(3),), path, dynamo=True, dynamic_shapes=dynamic, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (0, 1, 3, 64):
        answers = session.run(None, {session.get_inputs()[0].name: features(batch).numpy()})
        for found, wanted in zip(answers, module(features(batch)), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-4)
