"""Routers made of the experts' statistics: what they compute, whom they credit, and what they refuse."""

import pytest
import torch
from fake_experts import ANIMALS, SKIES, THREE, D, FakeExperts, images_of

from peft_luca.routing import make_router
from peft_luca.routing.discriminants import (
    LinearDiscriminant,
    RegularizedDiscriminant,
    RidgeClassifier,
)
from peft_luca.routing.evidence import Familiarity
from peft_luca.routing.statistics import ClassStatistics, pool, unit_features
from peft_luca.utils import InvalidExpertError


KINDS = {"lda": LinearDiscriminant, "gaussian": RegularizedDiscriminant, "ridge": RidgeClassifier}
OPTIONS = {"lda": {"shrinkage": 0.3}, "gaussian": {"sphere": 0.2, "volume": 0.5}, "ridge": {"strength": 2.0}}
names = pytest.mark.parametrize("name", KINDS)
Z = images_of("cat", "sun", "oak")


@names
@pytest.mark.parametrize("changed", [False, True], ids=["default", "options"])
def test_the_pooled_statistics_answer(name, changed):
    experts, options = FakeExperts(THREE), {**OPTIONS[name], "temperature": 3.0} if changed else {}
    output = make_router(name, **options).route(Z, experts)
    pooled = pool(experts.statistics)
    made = KINDS[name](pooled, **options)
    x = unit_features(Z)
    columns = [pooled.classes.index(c) for c in experts.label_space.classes]
    assert torch.equal(output.logits, made.log_posterior(x)[:, columns])
    torch.testing.assert_close(output.logits.exp().sum(1), torch.ones(len(Z)))
    p = output.logits.exp()
    torch.testing.assert_close(output.entropy, -(p * output.logits).sum(1))
    torch.testing.assert_close(output.confidence, p.amax(1))
    gaussian = made if name == "gaussian" else RegularizedDiscriminant(pooled)
    distances = gaussian.distances(gaussian.scores(x), made.log_posterior(x).argmax(1))
    assert torch.equal(output.known, Familiarity(pooled.distances)(distances))
    assert 0 < output.known.mean() < 1
    assert torch.equal(output.unknown, output.known < 0.05)
    assert output.entropies is None
    assert make_router(name).needs_statistics
    assert not make_router("entropy").needs_statistics


@names
def test_the_expert_that_has_the_predicted_class_is_credited(name):
    experts = FakeExperts(THREE)
    output = make_router(name).route(Z, experts)
    predicted = [experts.label_space.classes[c] for c in output.logits.argmax(1)]
    assert predicted == ["cat"] * 12 + ["sun"] * 12 + ["oak"] * 12
    assert all(c in THREE[experts.names[t]] for c, t in zip(predicted, output.expert.tolist(), strict=True))
    # Two experts have cats: the one whose own mean is nearer under the pooled covariance.
    pooled = pool(experts.statistics)
    means = torch.stack([experts.statistics["animals"].means[0], experts.statistics["trees"].means[1]])
    nearer = LinearDiscriminant.make(pooled, means=means).scores(unit_features(Z[:12])).argmax(1)
    assert torch.equal(output.expert[:12], 2 * nearer)
    assert len(nearer.unique()) == 2


@names
def test_every_expert_needs_statistics(name):
    experts = FakeExperts(THREE)
    for missing, said in (("skies", "'skies' has none"), ("animals", "'animals', 'skies' have none")):
        del experts.statistics[missing]
        with pytest.raises(ValueError, match=rf"the router {name!r} needs the statistics of every expert, but {said}"):
            experts.prepared(make_router(name))
    many = FakeExperts({f"t{i}": [f"c{i}"] for i in range(8)}, random_features=None)
    with pytest.raises(ValueError, match=r"'t4' and 3 more have none.*collect_statistics, .*set_router\('nearest'\)"):
        many.prepared(make_router(name))


def test_ridge_needs_equally_many_random_features():
    experts = FakeExperts(THREE)
    experts.statistics["skies"] = FakeExperts({"skies": SKIES}, random_features=20).statistics["skies"]
    with pytest.raises(ValueError, match="ridge router needs random features in the statistics of every expert"):
        experts.prepared(make_router("ridge"))
    experts.prepared(make_router("gaussian"))


def test_statistics_of_different_references_are_not_pooled():
    mean, std = torch.zeros(D), torch.ones(D)
    near, far, wide = (mean + 0.01, std * 1.01), (mean + 0.1, std), (mean, std * 1.1)
    same = {"animals": (mean, std), "skies": (mean, std)}
    FakeExperts(THREE, references={**same, "trees": near}).prepared(make_router("lda"))
    for other in (far, wide, None):
        experts = FakeExperts(THREE, references={**same, "trees": other})
        with pytest.raises(ValueError, match=r"'animals' and 'trees' standardize \[CLS\] by different references"):
            experts.prepared(make_router("lda"))


def test_references_are_compared_in_deviations():
    mean, std = torch.zeros(D), torch.full((D,), 0.1)
    for shift, is_same in ((0.004, True), (0.02, False)):
        references = dict.fromkeys(THREE, (mean, std)) | {"trees": (mean + shift, std)}
        router = make_router("auto").describe(FakeExperts(THREE, references=references))
        assert router == ("auto (gaussian)" if is_same else "auto (nearest)")


@names
def test_statistics_of_no_images_are_refused(name):
    experts = FakeExperts({"animals": ANIMALS, "skies": SKIES})
    part = experts.statistics["skies"]
    broken = {"means": part.means * torch.nan, "gram": part.gram * torch.nan}
    experts.statistics["skies"] = ClassStatistics(**vars(part) | broken)
    with pytest.raises(InvalidExpertError, match="no classifier can be made of the experts' statistics"):
        experts.prepared(make_router(name))


def test_auto_is_gaussian_where_statistics_can_be_pooled_and_nearest_where_not():
    experts, auto = FakeExperts(THREE), make_router("auto", unknown_below=0.5)
    assert auto.describe(experts) == "auto({'unknown_below': 0.5}) (gaussian)"
    assert not auto.needs_statistics
    gaussian = make_router("gaussian", unknown_below=0.5)
    for one, other in zip(auto.route(Z, experts), gaussian.route(Z, experts), strict=True):
        assert one is other is None or torch.equal(one, other)
    lacking = FakeExperts(THREE)
    del lacking.statistics["skies"]
    apart = FakeExperts(THREE, references={"skies": (torch.zeros(D), torch.ones(D))})
    for others in (lacking, apart):
        assert make_router("auto").describe(others) == "auto (nearest)"
        found, wanted = (make_router(name, unknown_below=0.5).route(Z, others) for name in ("auto", "nearest"))
        assert torch.equal(found.logits, wanted.logits)
        assert torch.equal(found.unknown, wanted.unknown)
