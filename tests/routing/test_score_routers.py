"""Routers that choose by the experts' scores: their formulas, ties, functions, the oracle and the batch scope."""

import math
from functools import partial

import pytest
import torch
from fake_experts import THREE, FakeExperts, images_of, turned, without

from peft_luca.routing import make_router, score_routers
from peft_luca.routing.score_routers import OTHER_CLASSES_MARGIN, choose, entropy, margins


Z = images_of("cat", "sun", "oak", "owl")


def energy(scores, temperature=1.0):
    return make_router("energy", temperature=temperature).cost(scores)


SCORES = torch.tensor([[[2.0, 1.0, -1.0], [0.5, 0.5, 0.5], [-50.0, 300.0, 1.0]]])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_entropy_and_energy_are_their_formulas(temperature):
    scaled = SCORES.double() / temperature
    p = scaled.softmax(-1)
    wanted = -torch.where(p > 0, p * p.log(), 0.0).sum(-1)
    torch.testing.assert_close(entropy(SCORES, temperature), wanted.float())
    wanted = -temperature * scaled.exp().sum(-1).log()
    torch.testing.assert_close(energy(SCORES, temperature), wanted.float())


def test_entropy_lies_between_0_and_the_logarithm_of_the_classes():
    scores = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [1000.0, 0.0, 0.0, 0.0]]])
    expected = torch.tensor([[math.log(4), 0.0]])
    torch.testing.assert_close(entropy(scores), expected)
    torch.testing.assert_close(entropy(scores.bfloat16()), expected)  # computed in float32
    assert energy(scores.bfloat16()).dtype == torch.float32
    assert not entropy(torch.zeros(2, 3, 1)).any()


@pytest.mark.parametrize("classes", [THREE, without(THREE, "trees")], ids=["shared", "disjoint"])
@pytest.mark.parametrize(("name", "cost"), [("entropy", entropy), ("energy", energy)])
def test_the_expert_of_the_lowest_cost_answers_over_all_classes(name, cost, classes):
    experts = FakeExperts(classes)
    scores = experts.scores(Z)
    for options in ({}, {"temperature": 20.0}):
        output = make_router(name, **options).route(Z, experts)
        assert torch.equal(output.expert, cost(scores, **options).argmin(dim=1))
        assert torch.equal(output.logits, scores[torch.arange(len(Z)), output.expert])
        assert torch.equal(output.entropies, entropy(scores))  # without the temperature
        assert torch.equal(output.entropy, output.entropies[torch.arange(len(Z)), output.expert])
        confidence = (output.logits / options.get("temperature", 1.0)).softmax(1).amax(1)
        torch.testing.assert_close(output.confidence, confidence)


def test_of_equal_costs_the_larger_margin_and_then_the_name_decides():
    scores = torch.tensor([[[3.0, 1.0, 0.0], [9.0, 8.0, 0.0], [4.0, 2.0, 1.0], [9.0, 0.0, 0.0]]])
    by_name = torch.tensor([2, 0, 3, 1])

    def chosen(*costs):
        return choose(torch.tensor([costs]), lambda: margins(scores), by_name).item()

    assert chosen(0.5, 0.4, 0.5, 0.5) == 1  # no tie
    assert chosen(0.1, 0.1, 0.1, 0.5) == 2  # the margins of 0 and 2 are equal: by name
    assert chosen(0.1, 0.1, 0.1, 0.1) == 3  # the largest margin
    assert chosen(0.1, 0.1, 0.5, 0.5) == 0  # by margin, not by name or score
    one_class = choose(torch.zeros(1, 4), lambda: margins(scores[:, :, :1]), by_name)
    assert one_class.item() == 3  # of one class alone, the highest score


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 2, 0]])
@pytest.mark.parametrize("name", ["entropy", "energy"])
def test_ties_do_not_depend_on_the_order_of_loading(name, order):
    # With this σ all entropies are exactly 0.
    first = FakeExperts(THREE, sigma=1e6)
    other = FakeExperts({list(THREE)[i]: list(THREE.values())[i] for i in order}, sigma=1e6)
    one, two = (make_router(name).route(Z, experts) for experts in (first, other))
    if name == "entropy":
        assert not one.entropies.any()
        top = first.scores(Z).topk(2, dim=2).values
        assert torch.equal(one.expert, (top[..., 0] - top[..., 1]).argmax(dim=1))
        assert len(one.expert.unique()) > 1
    assert torch.equal(one.expert, torch.tensor(order)[two.expert])
    columns = [other.label_space.classes.index(c) for c in first.label_space.classes]
    torch.testing.assert_close(one.logits, two.logits[:, columns], rtol=0, atol=1.0)  # of 1e6


def test_a_compiled_graph_breaks_ties_alike():
    experts = FakeExperts(THREE, sigma=1e6)
    costs, scores = entropy(experts.scores(Z)), experts.scores(Z)
    costs[::3, 1] += 1

    def chosen(costs, scores):
        return choose(costs, lambda: margins(scores), experts.by_name)

    compiled = torch.compile(chosen, backend="eager", fullgraph=True)
    assert torch.equal(compiled(costs, scores), chosen(costs, scores))


@pytest.mark.parametrize("sigma", [10.0, 1e6], ids=["usual", "ties"])
@pytest.mark.parametrize("name", ["entropy", "energy"])
def test_experts_asked_in_parts_answer_as_all_at_once(name, sigma, monkeypatch):
    experts, router = FakeExperts(THREE, sigma=sigma), make_router(name)
    whole = router.route(Z, experts)
    sizes = []
    experts.score_parts = lambda z, size: sizes.append(size) or FakeExperts.score_parts(experts, z, size)
    for at_a_time in (1, 2):
        monkeypatch.setattr(score_routers, "CACHE", at_a_time * len(Z) * len(experts.label_space.classes))
        for one, other in zip(router.route(Z, experts), whole, strict=True):
            assert torch.equal(one, other)
    assert set(sizes) == {1, 2}
    assert router.batch_limit(experts) == len(Z) * 2 * len(experts.label_space.classes) // experts.label_space.rows


# ---- each class by its own expert --------------------------------------------------------------------------------


def test_nearest_scores_a_class_by_the_best_of_the_experts_that_have_it():
    experts = FakeExperts(THREE)
    scales = {"animals": 5.0, "skies": 10.0, "trees": -30.0}  # a negative scale turns the cosines around
    experts.scale = lambda name: torch.tensor(scales[name])
    cosines = {name: experts.expert_logits(Z, name) / experts.sigma for name in THREE}
    experts.expert_logits = lambda z, name: scales[name] * cosines[name]
    found = {c: [scales[n] / abs(scales[n]) * cosines[n][:, own.index(c)] for n, own in THREE.items() if c in own]
             for own in THREE.values() for c in own}  # fmt: skip
    highest = torch.stack([torch.stack(found[c]).amax(0) for c in experts.label_space.classes], dim=1)
    output = make_router("nearest", temperature=2.0).route(Z, experts)
    torch.testing.assert_close(output.logits, 15 * highest)  # by the mean size of the scales
    torch.testing.assert_close(output.confidence, (15 / 2 * highest).softmax(1).amax(1))
    torch.testing.assert_close(output.entropy, entropy(15 * highest))
    for predicted, expert in zip(output.logits.argmax(1).tolist(), output.expert.tolist(), strict=True):
        assert experts.label_space.classes[predicted] in THREE[experts.names[expert]]
    cat = output.logits.argmax(1) == experts.label_space.classes.index("cat")
    assert torch.equal(output.expert[cat], torch.where(found["cat"][0] >= found["cat"][1], 0, 2)[cat])


def test_nearest_asks_each_expert_for_its_own_classes_alone(monkeypatch):
    experts = FakeExperts(without(THREE, "trees"))
    monkeypatch.setattr(experts, "scores", None)
    make_router("nearest").route(Z, experts)


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_of_experts_that_score_a_class_alike_nearest_names_the_first(order):
    experts = FakeExperts({name: ["sun"] for name in order})
    experts.expert_logits = lambda z, name: torch.full((len(z), 1), 0.5)
    assert {experts.names[t] for t in make_router("nearest").route(Z, experts).expert.tolist()} == {"a"}


# ---- functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["entropy", "energy", "nearest"])
def test_an_image_as_certain_as_the_bound_is_known(name):
    experts, z = FakeExperts(THREE), images_of("cat", "sun")
    confidence = make_router(name).route(z, experts).confidence
    bound = float(confidence.median())
    unknown = make_router(name, unknown_below=bound).route(z, experts).unknown
    assert torch.equal(unknown, confidence < bound)
    assert unknown.any()
    assert not unknown[confidence == bound].any()


def test_a_function_of_scores_routes_and_takes_options():
    experts = FakeExperts(THREE)
    scores = experts.scores(Z)
    router = make_router(lambda scores, flip=1: -flip * scores.amax(dim=2), flip=1, unknown_below=0.9)
    output = router.route(Z, experts)
    assert torch.equal(output.expert, scores.amax(dim=2).argmax(dim=1))
    assert torch.equal(output.unknown, output.confidence < 0.9)
    batch = make_router(lambda scores: -scores.amax(dim=2), routing_scope="batch").route(Z, experts)
    assert set(batch.expert.tolist()) == {int(scores.amax(dim=2).mean(dim=0).argmax())}


def test_a_function_has_no_name_and_cannot_be_saved_by_one():
    router = make_router(entropy, temperature=2.0)
    assert router.name is None
    assert router.to_dict() == {"name": None, "options": {}}
    assert repr(router) == "entropy"
    assert router == make_router(entropy, temperature=2.0)
    for other in (entropy, make_router(entropy, temperature=3.0), make_router(energy, temperature=2.0)):
        assert router != other


def test_a_function_must_return_a_number_for_each_image_and_expert():
    for found, got in (
        (None, "None"),
        ([[0.0, 1.0, 2.0]], r"\[\[0.0"),
        (torch.zeros(2), r"\(2,\) of torch.float32"),
        (torch.zeros(1, 3, dtype=torch.bool), r"\(1, 3\) of torch.bool"),
    ):
        router = make_router(lambda scores, found=found: found)
        with pytest.raises(ValueError, match=r"one number for each image and expert, .* \(1, 3\), got " + got):
            router.route(Z[:1], FakeExperts(THREE))


def test_a_function_of_three_experts_or_without_a_signature_routes():
    bias, experts = torch.tensor([0.0, 100.0, 100.0]), FakeExperts(THREE)
    assert not make_router(lambda scores: entropy(scores) + bias).route(Z, experts).expert.any()
    output = make_router(partial(torch.amax, dim=2)).route(Z, experts)
    assert torch.equal(output.expert, experts.scores(Z).amax(dim=2).argmin(dim=1))


def test_a_function_is_told_which_options_it_does_not_take():
    with pytest.raises(ValueError, match=r"does not take these options: .*heat"):
        make_router(lambda scores: scores.amax(dim=2), heat=2.0)
    with pytest.raises(ValueError, match="unknown_below must be a number from 0 to 1"):
        make_router(lambda scores: scores.amax(dim=2), unknown_below=2.0)


# ---- the oracle --------------------------------------------------------------------------------------------------


def test_the_oracle_answers_with_the_expert_it_is_told_over_its_own_classes():
    experts, told = FakeExperts(THREE), torch.arange(len(Z), dtype=torch.int32) % 3
    output = make_router("oracle", expert=told, unknown_below=0.9).route(Z, experts)
    assert torch.equal(output.expert, told)
    assert torch.equal(output.entropies, entropy(experts.scores(Z)))
    for t, name in enumerate(experts.names):
        rows = told == t
        own = experts.label_space.own[name]
        logits = experts.expert_logits(Z[rows], name)
        torch.testing.assert_close(output.logits[rows][:, own], logits)
        others = [c for c in range(6) if c not in own.tolist()]
        lowest = logits.amin(dim=1, keepdim=True) - OTHER_CLASSES_MARGIN
        torch.testing.assert_close(output.logits[rows][:, others], lowest.expand(-1, len(others)))
    torch.testing.assert_close(output.confidence, output.logits.softmax(1).amax(1))
    assert torch.equal(output.unknown, output.confidence < 0.9)


def test_the_oracle_needs_a_position_for_each_image():
    for places in ([0], [0, 3], [-1, 0], [0.0, 1.0], [True, True]):
        router = make_router("oracle", expert=torch.tensor(places))
        with pytest.raises(ValueError, match=r"must be a tensor of 2 whole numbers, .* from 0 to 2, got tensor"):
            router.route(Z[:2], FakeExperts(THREE))
    with pytest.raises(ValueError, match="must be told which expert answers each image"):
        make_router("oracle").route(Z[:2], FakeExperts(THREE))


# ---- the released evaluation -------------------------------------------------------------------------------------


def test_with_the_batch_scope_one_expert_answers_the_whole_batch():
    experts = FakeExperts(THREE)
    scores = experts.scores(Z)
    output = make_router("entropy", routing_scope="batch").route(Z, experts)
    t = int(entropy(scores).mean(0).argmin())
    assert output.expert.tolist() == [t] * len(Z)
    assert torch.equal(output.logits, scores[:, t])
    assert torch.equal(output.entropy, entropy(scores)[:, t])
    other = FakeExperts(turned(THREE))
    assert make_router("entropy", routing_scope="batch").route(Z, other).expert.tolist() == [2 - t] * len(Z)


def test_entropy_is_computed_once(monkeypatch):
    """It is most of the cost of routing among a thousand experts."""
    made = []
    monkeypatch.setattr("peft_luca.routing.score_routers.entropy", lambda *args: made.append(args) or entropy(*args))
    make_router("entropy").route(images_of("cat"), FakeExperts(THREE))
    assert len(made) == 1
