"""What holds for every router: its options, its place in files, and how it is exported."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from fake_experts import THREE, D, FakeExperts, images_of, turned, without

from peft_luca import routing
from peft_luca.routing import ROUTERS, Router, RouterOptions, RoutingOutput, make_router


BY_STATISTICS = ["auto", "lda", "gaussian", "ridge"]
ASKED = [name for name in ROUTERS if name != "oracle"]  # the oracle is told the expert
Z = images_of("cat", "sun", "oak", "owl")


def route(router, experts=None, z=Z, **options):
    return make_router(router, **options).route(z, experts or FakeExperts(THREE))


def check(output, batch=48, classes=6):
    """Whether an answer is whole: shapes, and numbers that are finite and in their range."""
    assert output.logits.shape == (batch, classes)
    assert output.expert.shape == output.entropy.shape == output.confidence.shape == output.unknown.shape == (batch,)
    for values in (output.logits, output.entropy, output.confidence):
        assert bool(values.isfinite().all())
    assert bool(((output.confidence >= 0) & (output.confidence <= 1 + 1e-6)).all())
    assert bool((output.entropy >= 0).all())


UNKNOWN = [{}, *({"unknown_below": value} for value in (0, 1, 1e-5, np.float32(0.5)))]
EVERYWHERE = [*UNKNOWN, *({"temperature": value} for value in (1e-6, 3, 1e6, np.float64(2.5), np.int64(2)))]
SCOPES = [{"routing_scope": "batch"}, {"routing_scope": "sample", "temperature": 2.0}]
SHRINKAGES, SPHERES = ([{name: x} for x in (0, 1, 1e-5, np.float16(0.25))] for name in ("shrinkage", "sphere"))
VOLUMES = [{"volume": 1e3}, {"volume": 0.5}, {"shrinkage": 0, "sphere": 0, "temperature": 1e-6}]
ACCEPTED = {
    "entropy": EVERYWHERE + SCOPES,
    "energy": EVERYWHERE + SCOPES,
    "nearest": EVERYWHERE,
    "auto": UNKNOWN,
    "lda": EVERYWHERE + SHRINKAGES,
    "gaussian": EVERYWHERE + SHRINKAGES + SPHERES + VOLUMES,
    "ridge": EVERYWHERE + [{"strength": value} for value in (1e-12, 1e6, 1e12, np.float32(10))],
    "oracle": UNKNOWN,
}


@pytest.mark.parametrize("name", ROUTERS)
def test_accepted_options_survive_a_file_and_give_finite_answers(name):
    experts, told = FakeExperts(THREE), {"expert": torch.arange(len(Z)) % 3} if name == "oracle" else {}
    for options in ACCEPTED[name]:
        router = make_router(name, **options, **told)
        saved = json.loads(json.dumps(router.to_dict(), allow_nan=False))
        assert saved["name"] == name
        read = make_router(saved["name"], **saved["options"])
        assert read.options == router.options
        for option, value in options.items():
            assert getattr(read.options, option) == value
            assert type(getattr(read.options, option)) in (int, float, str)
        check(router.route(Z, experts))


@pytest.mark.parametrize("name", ASKED)
def test_routers_of_equal_options_are_equal_and_say_what_they_are(name):
    router = make_router(name, unknown_below=0.5)
    assert router == make_router(name, unknown_below=np.float64(0.5))
    assert hash(router) == hash(make_router(name, unknown_below=np.float64(0.5)))
    assert router != make_router(name)
    assert router != name
    assert router.to_dict() == {"name": name, "options": {"unknown_below": 0.5}}
    assert make_router(name).to_dict() == {"name": name, "options": {}}
    assert repr(router) == f"{name}({{'unknown_below': 0.5}})"
    assert repr(make_router(name)) == name
    assert make_router(router) is router


@pytest.mark.parametrize("name", ROUTERS)
def test_options_are_numbers_in_their_range(name):
    fields = vars(make_router(name).options)
    for value in (-0.1, 1.1, "0.5", None, True, math.nan, torch.tensor(0.5), [0.5]):
        with pytest.raises(ValueError, match="unknown_below must be a number from 0 to 1, got "):
            make_router(name, unknown_below=value)
    for value in (
        (0.0, -1.0, 1e-7, 1e7, math.inf, math.nan, "2", True, torch.tensor(2.0)) if "temperature" in fields else ()
    ):
        with pytest.raises(ValueError, match=r"temperature must be a number from 1e-06 to 1e\+06, got "):
            make_router(name, temperature=value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lda", {"shrinkage": 1.5}, "shrinkage must be a number from 0 to 1, got 1.5"),
        ("gaussian", {"shrinkage": -1e-9}, "shrinkage must be a number from 0 to 1, got -1e-09"),
        ("gaussian", {"sphere": 2}, "sphere must be a number from 0 to 1, got 2"),
        ("gaussian", {"volume": -1}, r"volume must be a number from 0 to 1000, got -1"),
        ("gaussian", {"volume": None}, "volume must be a number"),
        ("ridge", {"strength": 0.0}, r"strength must be a number from 1e-12 to 1e\+12, got 0.0"),
        ("ridge", {"strength": 1e13}, r"strength must be a number from 1e-12 to 1e\+12"),
        ("entropy", {"routing_scope": "dataset"}, r"must be one of \('sample', 'batch'\), got 'dataset'"),
        ("gaussian", {"routing_scope": "batch"}, "takes the options .*got routing_scope"),
        ("entropy", {"heat": 2.0}, "'entropy' takes the options unknown_below, temperature, routing_scope, got heat"),
        ("oracle", {"x": 1}, "'oracle' takes the options unknown_below, got x"),
        ("entropy", {"candidates": 3}, "got candidates. Without `candidates` every expert is asked"),
        ("margin", {}, r"'margin' was removed. Use set_router\('entropy'\)"),
        ("max_prob", {}, r"'max_prob' was removed. Use set_router\('entropy'\)"),
        ("hybrid", {"candidates": 3}, r"'hybrid' was removed. Use set_router\('gaussian'\)"),
        ("best", {}, "there is no router 'best'. Choose one of .*'entropy'.*a function of scores"),
        (3, {}, "a router is a name, a Router or a function of scores, got 3"),
        (None, {}, "a router is a name, a Router or a function of scores, got None"),
        (make_router("entropy"), {"temperature": 2}, "has its options already: pass temperature when you make it"),
    ],
)
def test_a_wrong_router_or_option_is_refused_in_words(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_router(name, **options)


def test_the_old_name_of_lda_is_read_and_what_an_oracle_is_told_is_no_option():
    assert make_router("prototype", shrinkage=0.5) == make_router("lda", shrinkage=0.5)
    assert make_router("prototype").to_dict()["name"] == "lda"
    assert make_router("oracle", expert=torch.arange(3)) == make_router("oracle", expert=torch.arange(4))


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_depends_on_its_image_alone(name):
    router, experts = make_router(name, unknown_below=0.6), FakeExperts(THREE)
    together, alone = router.route(Z, experts), [router.route(z[None], experts) for z in Z]
    check(together)
    alone = RoutingOutput.concatenate(alone)
    for one, other in zip(together, alone, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    check(router.route(Z[:0], experts), batch=0)


@pytest.mark.parametrize("name", ASKED)
def test_the_order_of_experts_changes_the_numbering_alone(name):
    one, other = FakeExperts(THREE), FakeExperts(turned(THREE))
    first, second = route(name, one), route(name, other)
    columns = [other.label_space.classes.index(c) for c in one.label_space.classes]
    # Statistics are pooled in the order of the names, so that they are the same to the bit.
    rounding = 0 if name in BY_STATISTICS else 1e-5
    torch.testing.assert_close(first.logits, second.logits[:, columns], rtol=0, atol=rounding)
    assert torch.equal(first.expert, 2 - second.expert)
    assert len(first.expert.unique()) == 3
    torch.testing.assert_close(first.confidence, second.confidence)


@pytest.mark.parametrize("name", ASKED)
def test_a_deleted_expert_leaves_no_trace(name):
    router, experts = make_router(name), FakeExperts(THREE)
    router.route(Z, experts)
    experts.set_experts(without(THREE, "trees"))
    left, never = router.route(Z, experts), route(name, FakeExperts(without(THREE, "trees")))
    for one, other in zip(left, never, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("name", ASKED)
def test_answers_below_the_threshold_are_unknown(name):
    output = route(name, unknown_below=0.7)
    assert torch.equal(output.unknown, output.known < 0.7)
    default = route(name)
    assert torch.equal(default.unknown, default.known < (0.05 if name in BY_STATISTICS else 0))
    nothing = route(name, z=torch.full((2, D), torch.nan), unknown_below=0.5)
    assert nothing.unknown.all()


@pytest.mark.parametrize("name", ASKED)
def test_one_expert_of_one_class(name):
    output = route(name, FakeExperts({"only": ["sun"]}))
    check(output, classes=1)
    assert not output.expert.any()


class Nearest(Router):
    """A router of a user's own: the expert with the highest score answers, by something prepared once."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = 0

    def prepare(self, experts):
        self.calls += 1
        return torch.tensor(len(experts.names))

    def route(self, features, experts):
        scores = experts.scores(features)
        chosen = scores.amax(dim=2).argmax(dim=1)
        assert experts.prepared(self) == scores.shape[1]
        logits = scores[torch.arange(len(features)), chosen]
        confidence = logits.softmax(1).amax(1)
        return RoutingOutput(logits, chosen, confidence, None, confidence, confidence < self.options.unknown_below)


def test_a_router_of_ones_own_is_a_subclass_without_a_name():
    router, experts = make_router(Nearest(unknown_below=0.5)), FakeExperts(THREE)
    for _ in range(2):
        check(router.route(Z, experts))
    assert router.calls == 1
    assert router.to_dict() == {"name": None, "options": {"unknown_below": 0.5}}
    assert repr(router) == "Nearest({'unknown_below': 0.5})"
    assert router.needs_statistics is False
    assert router.Options is RouterOptions
    with pytest.raises(ValueError, match="the router 'Nearest' takes the options unknown_below, got temperature"):
        Nearest(temperature=2.0)


def test_large_batches_are_cut_by_what_a_router_holds(monkeypatch):
    monkeypatch.setattr("peft_luca.routing.router.MEMORY_BUDGET", 5 * 3 * 7)
    monkeypatch.setattr("peft_luca.routing.score_routers.MEMORY_BUDGET", 5 * (3 + 7))
    monkeypatch.setattr("peft_luca.routing.score_routers.CACHE", 5 * 7)
    monkeypatch.setattr("peft_luca.routing.statistics_routers.MEMORY_BUDGET", 5 * (3 + 7))
    experts = FakeExperts(THREE)  # 3 experts, 7 rows, 6 classes
    many = FakeExperts({f"t{i}": [f"c{i}"] for i in range(60)}, random_features=None)
    for name in ASKED:
        assert make_router(name).batch_limit(experts) == (3 if name == "nearest" else 5)
        assert make_router(name).batch_limit(many) == 1
    function = make_router(lambda scores: -scores.amax(dim=-1))  # it may compare the experts: it gets all their scores
    assert function.batch_limit(experts) == 5
    for whole in (make_router("oracle"), make_router("entropy", routing_scope="batch")):
        assert whole.batch_limit(experts) is None


# ---- export ------------------------------------------------------------------------------------------------------


class Routed(torch.nn.Module):
    """What is exported: [CLS] in, the answer out."""

    def __init__(self, router, experts):
        super().__init__()
        self.router, self.experts = router, experts
        experts.prepared(router)

    def forward(self, z):
        output = self.router.route(z, self.experts)
        return output.logits, output.expert, output.confidence, output.known


@pytest.mark.parametrize("name", ASKED)
def test_every_router_is_exported_for_every_batch_size(name):
    module = Routed(make_router(name), FakeExperts(THREE)).eval()
    program = torch.export.export(module, (Z[:3],), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    for batch in (0, 1, 3, len(Z)):
        for found, wanted in zip(program(Z[:batch]), module(Z[:batch]), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# --- a router of one's own ---


class FirstRouter(Router):
    """The first expert by name answers; unlike the package's own it says nothing of `known`."""

    name = "first"

    @dataclass(frozen=True)
    class Options(RouterOptions):
        power: float = routing.option(1.0, 0, 10)
        note: str = ""  # a field that is not checked

    def route(self, features, experts):
        name = min(experts.names)
        scores = experts.scores(features)[:, experts.names.index(name)] * self.options.power
        confidence = scores.softmax(dim=-1).amax(dim=-1)
        entropy = torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1)
        chosen = torch.full_like(confidence, experts.names.index(name), dtype=torch.int64)
        return RoutingOutput(scores, chosen, entropy, None, confidence, confidence < self.options.unknown_below)


def test_a_router_of_ones_own_has_checked_options_and_answers():
    experts = FakeExperts(THREE)
    output = FirstRouter(power=2, note="mine").route(Z, experts)
    check(output)
    assert set(output.expert.tolist()) == {experts.names.index(min(experts.names))}
    with pytest.raises(ValueError, match="power must be a number from 0 to 10, got 11"):
        FirstRouter(power=11)
    with pytest.raises(ValueError, match="the router 'first' takes the options unknown_below, power, note, got x"):
        FirstRouter(x=1)
