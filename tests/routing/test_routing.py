"""Routing by the experts of a model: scores, entropies and choices against the float64 computation of helpers.py."""

import pytest
import torch
from helpers import D, ForwardCount, exact_entropies, exact_scores, make_model, pixels

from peft_luca import LucaConfig
from peft_luca.routing import ROUTERS


STREAMS = {
    "one expert": {"t": ["a", "b", "c"]},
    "new classes": {"t": ["a", "b"], "s": ["c", "d", "e"], "v": ["f"]},
    "shared classes": {"t": ["a", "b"], "s": ["c", "b", "a"], "v": ["d", "a"]},
    "one class in all": {"t": ["a"], "s": ["a"]},
}


def vectors(count=9, seed=1):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)) * 2


def close(actual, expected, tolerance=5e-5):
    torch.testing.assert_close(actual.detach().double(), expected.detach(), rtol=tolerance, atol=tolerance)


def with_statistics(experts):
    model = make_model(experts)
    for i, (name, classes) in enumerate(experts.items()):
        for buffers in (model.base_model.layer.luca_reference_mean, model.base_model.layer.luca_reference_std):
            buffers[name].fill_(1.0)
        labels = torch.arange(24) % len(classes)
        model.collect_statistics(name, vectors(24, i) + 3 * labels[:, None], labels, random_features=30)
    return model


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("positive", [True, False])
def test_scores_entropies_and_choices_are_exact(stream, positive):
    model, z = make_model(STREAMS[stream], positive_scale=positive), vectors()
    with torch.no_grad():
        model.base_model.layer.luca_scale["t"].neg_()
    expected = exact_scores(model, z)
    close(model.scores(z), expected)
    model.set_router("entropy")
    routed, entropies = model.route_features(z), exact_entropies(expected)
    close(routed.entropies, entropies)
    two = entropies.topk(min(2, entropies.shape[1]), largest=False).values
    clear = (two[:, -1] - two[:, 0] > 1e-4) | (entropies.shape[1] == 1)  # no tie within rounding
    assert clear.sum() >= len(z) // 2 or len(model.classes) == 1
    assert torch.equal(routed.expert[clear], entropies.argmin(dim=1)[clear])
    close(routed.entropy, entropies.gather(1, routed.expert[:, None])[:, 0])
    close(routed.logits, expected[torch.arange(len(z)), routed.expert])


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "oracle"])
def test_routing_takes_one_pass_of_the_trunk_and_logits_are_its_answer(router):
    model, x = with_statistics({"t": ["a", "b"], "s": ["c"], "v": ["d", "e", "a"]}), pixels(6)
    model.set_router(router)
    count = ForwardCount(model)
    routed = model.route(x)
    assert (count.passes, count.images) == (1, 6)
    assert routed.logits.shape == (6, 5)
    assert not routed.logits.requires_grad
    count.reset()
    with torch.no_grad():
        assert torch.equal(model(x).logits, routed.logits)
    assert (count.passes, count.images) == (1, 6)


def test_a_router_follows_the_experts():
    model, z = with_statistics({"t": ["a", "b"], "s": ["c"]}), vectors()
    model.set_router("gaussian")
    before = model.route_features(z)
    model.add_adapter("v", LucaConfig(classes=["d"]))
    with pytest.raises(ValueError, match="'v' has none"):
        model.route_features(z)
    model.delete_adapter("v")
    after = model.route_features(z)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.expert, after.expert)


def test_a_gradient_reaches_the_chosen_experts():
    model = make_model({"t": ["a", "b"], "s": ["c", "d"]})
    model.set_router("entropy")
    model.set_requires_grad(["t", "s"], True)
    loss = model(pixels(8), labels=torch.arange(8) % 4).loss
    loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "luca_" in name and p.requires_grad]
    assert any(g is not None and bool(g.any()) for g in gradients)
    assert all(bool(g.isfinite().all()) for g in gradients if g is not None)
