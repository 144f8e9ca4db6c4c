"""What experts measure on their own images: how familiar an image is, and the weight of the ridge regression."""

from dataclasses import replace

import pytest
import torch
from fake_experts import THREE, D, FakeExperts, images, images_of

from peft_luca.routing import evidence, make_router
from peft_luca.routing.discriminants import RegularizedDiscriminant, RidgeClassifier, pooled_share
from peft_luca.routing.evidence import (
    EDGES,
    WEIGHTS,
    EvidenceDiscriminant,
    Familiarity,
    collect_with_evidence,
    left_out,
    ridge_weight,
    with_evidence,
)
from peft_luca.routing.statistics import ClassStatistics, pool, unit_features


Z = images_of("cat", "sun", "oak", "owl")
NONE, FOUR = (torch.tensor([[100.0, 0.0], *[[total, 25.0]] * 5]) for total in (96.0, 94.0))


def rings(count, seed=0):
    """Two classes, one in the middle of the other, which no Gaussian tells apart well."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * count, D, generator=generator).double()
    y = torch.arange(2 * count) % 2
    x[:, :2] = torch.nn.functional.normalize(x[:, :2], dim=1) * torch.where(y == 0, 1.0, 3.0)[:, None]
    sign = (torch.rand(2 * count, generator=generator) < 0.5).double() * 2 - 1
    x[:, 0] = torch.where(y == 0, sign * x[:, 0].abs(), x[:, 0])
    return unit_features(x + torch.tensor([6.0] + [0.0] * (D - 1)).double()), y


def collect(x, y, **options):
    return collect_with_evidence(x, y, [f"c{k}" for k in range(int(y.max()) + 1)], 64, 0, lambda z: z, **options)


def test_known_images_are_familiar_by_the_share_that_lies_further():
    x, y = images(sizes=(90, 80, 70, 90, 80))
    statistics = collect(x, y)
    assert statistics.distances.sum() == len(x)
    assert statistics.gram is statistics.losses is None
    familiarity, made = Familiarity(statistics.distances), RegularizedDiscriminant(statistics)
    left = made.left_out(x, y)
    means = torch.stack([left[y == k].mean() for k in range(5)])[y]
    found = familiarity((left / means).float())
    for share in (0.05, 0.2, 0.5, 0.9):
        assert float((found < share).double().mean()) == pytest.approx(share, abs=0.04)
    apart = familiarity(torch.tensor([0.0, 1.0, 1e3, torch.nan, torch.inf]))
    assert apart[0] == 1
    assert 0 < apart[1] < 1
    assert apart[2] == 0
    assert apart[3:].isnan().all()
    assert torch.equal(Familiarity(None)(torch.tensor([0.0, 1e9])), torch.ones(2))


def test_images_of_other_classes_are_not_familiar():
    x, y = images(sizes=(90, 80, 70, 90, 80))
    few = {f"t{k}": collect(x[y // 2 == k], y[y // 2 == k] - 2 * k) for k in (0, 1)}
    few = {name: replace(part, classes=(f"{name} a", f"{name} b")) for name, part in few.items()}
    pooled = pool(few)
    made, familiarity = RegularizedDiscriminant(pooled), Familiarity(pooled.distances)
    scores = made.scores(x)
    known = familiarity(made.distances(scores, scores.argmax(1)))
    assert float((known[y < 4] < 0.05).double().mean()) < 0.12
    assert float((known[y == 4] < 0.05).double().mean()) > 0.6


def test_classes_of_one_image_and_equal_images_give_no_evidence():
    x, y = images(sizes=(1, 1, 1, 1, 1))
    assert collect(x, y).distances.sum() == 0
    assert collect(x[:1].repeat(6, 1), torch.arange(6) % 2).distances.isfinite().all()


def test_images_of_classes_of_two_count_and_single_ones_do_not():
    x, y = images(sizes=(30, 2, 1, 2, 1))
    assert collect(x, y).distances.sum() == 34


def test_the_weights_are_those_of_the_files():
    # Experts keep their losses at these weights, and losses of different experts are added up.
    assert WEIGHTS == (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)


def test_evidence_adds_up_and_goes_with_its_expert():
    experts = FakeExperts(THREE)
    parts = experts.statistics
    for name, part in parts.items():
        parts[name] = replace(part, losses=FOUR * len(name))
    whole, turned = pool(parts), pool(dict(reversed(parts.items())))
    for name in ("distances", "losses"):
        torch.testing.assert_close(getattr(whole, name), sum(getattr(part, name) for part in parts.values()))
        assert torch.equal(getattr(whole, name), getattr(turned, name))
    fewer = pool({name: part for name, part in parts.items() if name != "trees"})
    assert torch.equal(fewer.distances, parts["animals"].distances + parts["skies"].distances)
    old = {"animals": replace(parts["animals"], distances=None), "skies": parts["skies"]}
    assert torch.equal(pool(old).distances, parts["skies"].distances)
    old["animals"] = replace(parts["animals"], losses=None)
    assert pool(old).losses is None


# ---- the ridge regression ----------------------------------------------------------------------------------------


def test_experts_of_few_images_have_no_losses():
    x, y = images(sizes=(30, 30, 30, 30, 19))
    statistics = ClassStatistics.collect(x, y, [f"c{k}" for k in range(5)], random_features=20)
    kept, dropped = (with_evidence(statistics, x, y, keep_gram=keep) for keep in (True, False))
    assert kept.losses is dropped.losses is dropped.gram is dropped.random_sums is None
    assert kept.gram is statistics.gram
    x, y = images(sizes=(30, 30, 30, 30, 20))
    enough = ClassStatistics.collect(x, y, [f"c{k}" for k in range(5)], random_features=20)
    assert with_evidence(enough, x, y, keep_gram=True).losses is not None
    one = with_evidence(ClassStatistics.collect(x[:1], y[:1] * 0, ["c"], random_features=20), x[:1], y[:1] * 0, True)
    assert one.losses is None
    assert not one.distances.any()


def test_the_prior_is_kept_unless_the_evidence_is_better_by_its_standard_error():
    assert ridge_weight(None) == 0
    assert ridge_weight(NONE) == 0
    assert ridge_weight(FOUR) == WEIGHTS[1]
    assert ridge_weight(NONE + NONE) == WEIGHTS[1]  # of twice as many images the error grows by its root
    best = FOUR.clone()
    best[4, 0] = 90
    assert ridge_weight(best) == WEIGHTS[4]


def test_losses_are_those_of_a_regression_without_the_image():
    x, y = images(sizes=(30, 29, 24, 22, 21))
    statistics = with_evidence(
        ClassStatistics.collect(x, y, [f"c{k}" for k in range(5)], random_features=20), x, y, keep_gram=True
    )
    ridge = RidgeClassifier(statistics)
    features, targets = torch.relu(x @ ridge.directions.double()), torch.eye(5).double()[y]
    scores = torch.empty_like(targets)
    for i in range(len(x)):
        rest = torch.arange(len(x)) != i
        gram = features[rest].T @ features[rest] + ridge.strength * torch.eye(20).double()
        scores[i] = features[i] @ torch.linalg.solve(gram, features[rest].T @ targets[rest])
    gaussian = RegularizedDiscriminant(statistics)
    distances = torch.empty(len(x), 5, dtype=torch.float64)
    for i in range(len(x)):
        rest = torch.arange(len(x)) != i
        without = ClassStatistics.collect(x[rest], y[rest], statistics.classes, rank=None)
        distances[i] = -2 * RegularizedDiscriminant(without, sphere=gaussian.sphere).scores(x[i : i + 1])[0]
    one, other = gaussian.posterior(-0.5 * distances), (scores / 0.1).log_softmax(1)
    losses = [-((one + w * other) / (1 + w)).log_softmax(1)[torch.arange(len(x)), y] for w in WEIGHTS]
    torch.testing.assert_close(
        statistics.losses[:, 0], torch.stack([loss.sum() for loss in losses]), rtol=6e-2, atol=0
    )
    squares = torch.stack([(loss - losses[0]).square().sum() for loss in losses])
    torch.testing.assert_close(statistics.losses[:, 1], squares, rtol=0.15, atol=1e-6)


def test_random_features_are_kept_where_they_pay(monkeypatch):
    monkeypatch.setattr(evidence, "RANDOM_FEATURES", 120)
    few, many = collect(*rings(199)), collect(*rings(200))
    assert few.random_sums is few.losses is None
    assert many.gram is None
    assert ridge_weight(many.losses) > 0
    test, labels = rings(300, seed=1)
    mixed, alone = EvidenceDiscriminant(pool({"t": many})), RegularizedDiscriminant(pool({"t": many}))
    posterior, scores = mixed.answer(test.float(), mixed.gaussian)
    assert torch.equal(scores, alone.scores(test.float()))
    right = (posterior.argmax(1) == labels).double().mean()
    assert right > (scores.argmax(1) == labels).double().mean() + 0.05
    torch.testing.assert_close(posterior.exp().sum(1), torch.ones(len(test)))


def test_a_gram_matrix_in_a_few_rows_keeps_its_diagonal_and_what_the_classes_sums_know():
    x, y = rings(100)
    whole = ClassStatistics.collect(x, y, ["a", "b"], random_features=60)
    short, exact = whole.compress_gram(20), whole.compress_gram(60)
    assert short.gram is None
    assert short.gram_factor.shape == (20, 60)
    torch.testing.assert_close(exact.random_gram, whole.random_gram, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(short.random_gram.diagonal(), whole.random_gram.diagonal(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pool({"s": short}).gram, short.random_gram)


def test_auto_mixes_the_regression_in_where_every_expert_has_random_features():
    experts = FakeExperts(THREE)
    for name, part in experts.statistics.items():
        experts.statistics[name] = replace(part, losses=FOUR)
    auto, gaussian = make_router("auto"), make_router("gaussian").route(Z, experts)
    mixed = auto.route(Z, experts)
    assert auto.describe(experts) == "auto (gaussian and 0.25 x ridge)"
    wanted = (gaussian.logits + 0.25 * make_router("ridge").route(Z, experts).logits) / 1.25
    torch.testing.assert_close(mixed.logits, wanted.log_softmax(1))
    assert torch.equal(mixed.known, gaussian.known)
    experts.statistics["skies"] = replace(experts.statistics["skies"], gram=None, random_sums=None, losses=None)
    experts.set_experts(THREE)
    assert make_router("auto").describe(experts) == "auto (gaussian)"
    assert torch.equal(make_router("auto").route(Z, experts).logits, make_router("gaussian").route(Z, experts).logits)


def test_auto_with_a_regression_is_exported():
    experts = FakeExperts(THREE)
    for name, part in experts.statistics.items():
        experts.statistics[name] = replace(part, losses=FOUR)
    auto = make_router("auto")
    experts.prepared(auto)

    class Routed(torch.nn.Module):
        def forward(self, z):
            output = auto.route(z, experts)
            return output.logits, output.expert, output.known

    dynamic = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(Routed().eval(), (Z[:3],), dynamic_shapes=dynamic).module()
    for found, wanted in zip(program(Z), Routed()(Z), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_edges_grow_evenly():
    assert len(EDGES) == 96
    torch.testing.assert_close(EDGES[1:] / EDGES[:-1], torch.full((95,), float(EDGES[1] / EDGES[0])))


def test_leaving_an_image_out_equals_fitting_without_it():
    torch.manual_seed(0)
    y = torch.tensor([0] * 6 + [1] * 9 + [2] * 4)
    x = torch.randn(len(y), 5).double() + y[:, None]
    # The sphere's size is that of all images, so that the sphere is kept small here.
    alpha, gamma = pooled_share, 1e-5
    distances, volumes = left_out(x, y, alpha, gamma)
    for i in (0, 7, 18):
        rest = torch.arange(len(y)) != i
        means = torch.stack([x[rest][y[rest] == k].mean(0) for k in range(3)])
        scatter = torch.stack([(part := x[rest][y[rest] == k] - means[k]).T @ part for k in range(3)])
        counts = y[rest].bincount().double()
        for k, share in enumerate(1 - alpha(counts - 1)):
            covariance = share * scatter[k] / (counts[k] - 1) + (1 - share) * scatter.sum(0) / (len(y) - 1 - 3)
            covariance = (1 - gamma) * covariance + gamma * covariance.diagonal().mean() * torch.eye(5).double()
            away = x[i] - means[k]
            assert float(distances[i, k]) == pytest.approx(float(away @ covariance.inverse() @ away), rel=1e-3)
            assert float(volumes[i, k]) == pytest.approx(float(torch.logdet(covariance)), abs=1e-3)
