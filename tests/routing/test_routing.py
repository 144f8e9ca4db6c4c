"""Scores, entropies and the choice among experts, against the float64 computation of conftest.py."""

import math

import pytest
import torch
from helpers import D, ForwardCount, exact_entropies, exact_scores, make_model, pixels

from peft_luca import LucaConfig, RoutingOutput
from peft_luca.routing.router import UNKNOWN_MARGIN, entropy
from peft_luca.tuner import layer as layer_module


STREAMS = {
    "one expert": {"t": ["a", "b", "c"]},
    "new classes": {"t": ["a", "b"], "u": ["c", "d", "e"], "v": ["f"]},
    "shared classes": {"t": ["a", "b"], "u": ["c", "b", "a"], "v": ["d", "a"]},
    "the same classes": {"t": ["a", "b"], "u": ["b", "a"]},
    "one class each": {"t": ["a"], "u": ["b"], "v": ["c"]},
    "one class in all": {"t": ["a"], "u": ["a"]},
    "unequal": {"t": [f"x{i}" for i in range(11)], "u": ["b"], "v": ["c", "x3"]},
}
LINEAR = {
    "linear": {"t": "ab", "u": "cd"},
    "linear, shared": {"t": "ab", "u": "bcd"},
    "linear beside cosine": {"t": "ab", "Cu": "cd", "Cv": "e"},
    "linear beside cosine, shared": {"t": "ab", "Cu": "bc", "v": "cd", "Cw": "ca"},
}


def vectors(count=9, seed=1):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)) * 2


def linear_model(experts, **config):
    """Experts whose names start with C are cosine, the others linear."""
    return make_model(
        {
            name: LucaConfig(classes=list(classes), head="cosine" if name[0] == "C" else "linear", **config)
            for name, classes in experts.items()
        }
    )


def close(actual, expected, tolerance=5e-5):
    torch.testing.assert_close(actual.detach().double(), expected.detach(), rtol=tolerance, atol=tolerance)


def check(model, z):
    """Everything that routing gives, against the exact scores."""
    expected = exact_scores(model, z)
    known = ~expected.isnan()[0]
    layer = model.base_model.layer
    scores, says_known = layer.scores(z)
    assert torch.equal(says_known, known)
    close(scores[:, known], expected[:, known])
    assert bool((scores[:, ~known] == -torch.inf).all())
    routed, entropies = layer.route(z), exact_entropies(expected)
    close(routed.entropies, entropies)
    expert = entropies.argmin(dim=1)
    two = entropies.topk(min(2, entropies.shape[1]), largest=False).values
    clear = (two[:, -1] - two[:, 0] > 1e-4) | (entropies.shape[1] == 1)  # no tie within rounding
    assert clear.sum() >= len(z) // 2 or len(model.classes) == 1
    assert torch.equal(routed.expert[clear], expert[clear])
    close(routed.entropy, entropies.gather(1, routed.expert[:, None])[:, 0])
    chosen = expected[torch.arange(len(z)), routed.expert]
    lowest = chosen.nan_to_num(math.inf).amin(dim=1, keepdim=True) - UNKNOWN_MARGIN
    close(routed.logits, torch.where(chosen.isnan(), lowest, chosen))
    assert bool(routed.logits.isfinite().all())
    return routed


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("positive", [True, False])
def test_scores_of_cosine_experts(stream, positive):
    routed = check(make_model(STREAMS[stream], positive_scale=positive), vectors())
    assert routed.logits.shape[1] == len({c for classes in STREAMS[stream].values() for c in classes})


@pytest.mark.parametrize("stream", LINEAR)
def test_scores_of_linear_experts(stream):
    check(linear_model(LINEAR[stream]), vectors())


@pytest.mark.parametrize("sigma", [-3.0, 0.0])
@pytest.mark.parametrize("positive", [True, False])
def test_logits_are_finite_whatever_sigma_beside_linear_experts(sigma, positive):
    model = linear_model(LINEAR["linear beside cosine"], positive_scale=positive)
    layer = model.base_model.layer
    with torch.no_grad():
        layer.luca_scale["Cu"].fill_(sigma)
    routed = layer.route(vectors())
    assert bool(routed.logits.isfinite().all())
    assert bool(routed.entropies.isfinite().all())
    check(model, vectors())


def test_a_shared_class_is_scored_by_the_experts_own_row_and_by_the_best_of_the_others():
    model = make_model({"t": ["a"], "u": ["a"], "v": ["b"]})
    layer, z = model.base_model.layer, vectors(1)
    with torch.no_grad():
        for name, value in (("t", 1.0), ("u", -1.0)):
            layer.luca_class_rows[name].copy_(value * layer.luca(z, "v"))
        layer.luca_scale["v"].fill_(7.0)
    scores, _ = layer.scores(z)
    assert scores[0, 2, 0].item() == pytest.approx(7.0, abs=1e-4)  # v has no a: t's row is better than u's
    with torch.no_grad():
        layer.luca_class_rows["t"].copy_(layer.luca(z, "u"))
    scores, _ = layer.scores(z)
    own = layer.expert_logits(z, "u")[0, 0].item()
    assert scores[0, 1, 0].item() == pytest.approx(own, abs=1e-4)  # u has an a of its own, though t's is better
    assert own < layer.scale("u").item() - 1e-3


def test_entropy_is_between_nothing_and_that_of_a_fair_die():
    scores = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [1000.0, 0.0, 0.0, 0.0], [0.0, 0.0, -torch.inf, -torch.inf]]])
    expected = torch.tensor([[math.log(4), 0.0, math.log(2)]])
    torch.testing.assert_close(entropy(scores), expected)
    torch.testing.assert_close(entropy(scores.bfloat16()), expected)  # in float32 even so
    hot = entropy(scores + torch.arange(4.0), temperature=1e6)
    torch.testing.assert_close(hot[0, 0], torch.tensor(math.log(4)), rtol=1e-4, atol=1e-4)
    assert not entropy(torch.zeros(2, 3, 1)).any()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        entropy(torch.zeros(1, 1, 2), temperature=temperature)


def test_temperature_changes_the_choice_and_not_the_logits_or_the_entropies_reported():
    model = make_model({"t": ["a", "b", "c"], "u": ["d", "e"]})
    layer, z = model.base_model.layer, vectors(64)
    plain = layer.route(z)
    model.set_router("entropy", temperature=50.0)
    hot = layer.route(z)
    assert torch.equal(hot.expert, exact_entropies(exact_scores(model, z) / 50).argmin(dim=1))
    assert torch.equal(hot.entropies, plain.entropies)
    same = hot.expert == plain.expert
    assert torch.equal(hot.logits[same], plain.logits[same])


def test_a_function_of_ones_own_routes():
    model = make_model({"t": ["a", "b"], "u": ["c"]})
    model.set_router(lambda scores, flip=1: -flip * scores.amax(dim=2), flip=1)
    z = vectors()
    routed = model.base_model.layer.route(z)
    assert torch.equal(routed.expert, exact_scores(model, z).amax(dim=2).argmax(dim=1))


def test_a_router_of_the_wrong_shape_is_refused():
    model = make_model({"t": ["a", "b"], "u": ["c"]})
    model.set_router(lambda scores: scores.sum(dim=(1, 2)))
    with pytest.raises(ValueError, match=r"one number per sample and expert, here of shape \(9, 2\), got \(9,\)"):
        model.base_model.layer.route(vectors())


@pytest.mark.parametrize(
    ("router", "options", "message"),
    [
        ("best", {}, "there is no router called 'best'. Choose one of .*'entropy'"),
        ("entropy", {"heat": 2.0}, "does not take these options: .*heat"),
        ("entropy", {"temperature": 0.0}, "temperature must be a finite number"),
        (None, {"temperature": 2.0}, r"no router, so no options: got \['temperature'\]"),
    ],
)
def test_a_wrong_router_is_refused_and_changes_nothing(router, options, message):
    model = make_model({"t": ["a", "b"], "u": ["c"]})
    model.set_router("entropy", temperature=2.0)
    with pytest.raises(ValueError, match=message):
        model.set_router(router, **options)
    assert model.base_model.layer.router is entropy
    assert model.base_model.layer.router_options == {"temperature": 2.0}


def test_pieces_of_a_large_batch_give_what_the_whole_gives(monkeypatch):
    model, z = make_model(STREAMS["shared classes"]), vectors(33)
    whole = model.base_model.layer.route(z)
    monkeypatch.setattr(layer_module, "SCORES_BUDGET", 5 * 3 * 7)
    pieces = model.base_model.layer.route(z)
    assert torch.equal(whole.expert, pieces.expert)
    for name in ("logits", "entropy", "entropies"):
        torch.testing.assert_close(getattr(whole, name), getattr(pieces, name))


def test_route_says_who_answered_with_one_pass_of_the_trunk():
    model = make_model({"t": ["a", "b"], "u": ["c"], "v": ["d", "e", "a"]})
    count, x = ForwardCount(model), pixels(6)
    routed = model.route(x)
    assert isinstance(routed, RoutingOutput)
    assert (count.passes, count.images) == (1, 6)
    assert routed.logits.shape == (6, 5)
    assert routed.expert.shape == routed.entropy.shape == (6,)
    assert routed.entropies.shape == (6, 3)
    assert not routed.logits.requires_grad
    assert torch.equal(routed.entropy, routed.entropies.amin(dim=1))
    model.set_router("entropy")
    count.reset()
    assert torch.equal(model(x).logits, routed.logits)
    assert (count.passes, count.images) == (1, 6)


def test_a_gradient_reaches_the_chosen_expert_through_the_router():
    model = make_model({"t": ["a", "b"], "u": ["c", "d"]})
    model.set_router("entropy")
    model.set_requires_grad(["t", "u"], True)
    loss = model(pixels(8), labels=torch.arange(8) % 4).loss
    loss.backward()
    assert bool(loss.isfinite())
    gradients = [p.grad for name, p in model.named_parameters() if "luca_" in name and p.requires_grad]
    assert any(g is not None and bool(g.any()) for g in gradients)
    assert all(bool(g.isfinite().all()) for g in gradients if g is not None)


@pytest.mark.parametrize("over_all_classes", [True, False])
def test_gradients_are_numbers_beside_a_linear_expert(over_all_classes):
    model = linear_model(LINEAR["linear beside cosine"])
    if over_all_classes:
        model.set_over_all_classes(True)
    else:
        model.set_router("entropy")
    model.set_adapter("Cu") if over_all_classes else model.set_requires_grad(["Cu", "Cv"], True)
    model(pixels(8), labels=torch.arange(8) % 5).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any("luca_scale" in name for name in gradients)
    assert [name for name, gradient in gradients.items() if not gradient.isfinite().all()] == []


def test_an_empty_batch():
    model = make_model({"t": ["a", "b"], "u": ["c"]})
    routed = model.base_model.layer.route(torch.zeros(0, D))
    assert routed.logits.shape == (0, 3)
    assert routed.expert.shape == (0,)


@pytest.mark.parametrize("router", ["entropy", "max_prob", "margin", "energy"])
@pytest.mark.parametrize("temperature", [float("inf"), float("nan"), 1e-40, "2", True, torch.tensor(2.0)])
def test_a_temperature_is_a_number_that_scores_can_be_divided_by(router, temperature):
    model = make_model({"first": ["a", "b"], "second": ["c"]})
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        model.base_model.set_router(router, temperature=temperature)


@pytest.mark.parametrize("value", ["0.5", None, True])
def test_unknown_below_is_a_number(value):
    with pytest.raises(ValueError, match="unknown_below must be between 0 and 1"):
        make_model({"first": ["a", "b"], "second": ["c"]}).base_model.set_router("entropy", unknown_below=value)


def test_what_is_no_number_is_unknown():
    model = make_model({"first": ["a", "b"], "second": ["c"]})
    model.base_model.set_router("entropy", unknown_below=0.5)
    assert model.base_model.layer.route(torch.full((2, D), torch.nan)).unknown.all()


@pytest.mark.parametrize(
    "places", [0, [0, 0], torch.tensor([0]), torch.tensor([0, 2]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0])]
)
def test_the_oracle_is_told_a_place_for_each_image(places):
    model = make_model({"first": ["a", "b"], "second": ["c"]})
    model.base_model.set_router("oracle")
    with pytest.raises(ValueError, match="expert must be a tensor of 2 whole numbers"):
        model.base_model.layer.route(torch.randn(2, D), expert=places)


@pytest.mark.parametrize("found", [None, [[0.0, 1.0]], torch.zeros(1, 2, dtype=torch.bool)])
def test_a_router_of_ones_own_returns_a_tensor_of_numbers(found):
    layer = make_model({"first": ["a", "b"], "second": ["c"]}).base_model.layer
    layer.set_router(lambda scores: found, {})
    with pytest.raises(ValueError, match="a router returns a tensor of one number per sample and expert"):
        layer.route(torch.randn(1, D))
