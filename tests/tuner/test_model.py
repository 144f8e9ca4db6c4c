"""LucaModel: which heads it takes, labels and loss, one entrance and exit for [CLS], adding and removing experts."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    assert_same,
    draw,
    exact_scores,
    expert_tensors,
    make_dinov2,
    make_model,
    make_vit,
    pixels,
    trunk_tensors,
)
from peft import get_peft_model
from transformers import pipeline

from peft_luca import LucaConfig, LucaLayer
from peft_luca.tuner.model import tuner_of


TWO = {"t": ["a", "b"], "u": ["c", "d", "a"]}


# --- the head and the trunk ---


def test_target_modules_name_the_head(vit):
    model = get_peft_model(vit, LucaConfig(classes=["a"], target_modules="classifier"))
    assert isinstance(model.base_model.model.classifier, LucaLayer)
    for target, message in (("fc1", "names 2 "), ("nothing", "names none")):
        with pytest.raises(ValueError, match=f"target_modules='{target}' {message}"):
            get_peft_model(make_vit(), LucaConfig(classes=["a"], target_modules=target))


def test_no_gradient_reaches_the_trunk():
    model = make_model(TWO)
    trunk = list(model.base_model.model.vit.parameters())
    for parameter in trunk:
        parameter.requires_grad = True
    model(pixels(), labels=torch.zeros(6, dtype=torch.long)).loss.backward()
    assert all(parameter.grad is None for parameter in trunk)
    assert model.base_model.layer.luca_class_rows["t"].grad is not None


@pytest.mark.parametrize("mode", [True, False])
def test_the_trunk_stays_in_eval_mode_whoever_calls_train(mode):
    base, x = make_vit(hidden_dropout_prob=0.5).train(), pixels()
    model = make_model(TWO, base)
    model.set_router("entropy")
    for run in (lambda: model(x).logits, lambda: model.route(x).logits, lambda: model.pooled_features(x)):
        expected = run()
        model.train(mode)
        base.train()  # through a variable of the user's own
        assert torch.equal(run(), expected)
        assert model.base_model.layer.training == mode
        model.eval()


# --- from pixels to logits ---


def test_the_ways_from_pixels_to_logits_agree():
    model, x = make_model(TWO), pixels()
    model.set_router("entropy")
    z = model.pooled_features(x)
    expected = exact_scores(model, z)
    torch.testing.assert_close(model.scores(z).double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.scores(z, ["u"]), model.scores(z)[:, 1:])
    parts = model.base_model.layer.score_parts(z, ["t", "u"], 1)
    torch.testing.assert_close(torch.cat(list(parts), dim=1), model.scores(z))
    torch.testing.assert_close(model.expert_logits(z, "u").double(), expected[:, 1, [2, 3, 0]], rtol=1e-4, atol=1e-4)
    routed, again = model.route(x), model.route_features(z)
    for one, other in zip(routed, again, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(model(x).logits, routed.logits)
    assert torch.equal(model(x, return_dict=False)[0], routed.logits)
    places = torch.tensor([0, 1, 0, 1, 1, 0])
    assert torch.equal(model.route(x, expert=places).expert, places)
    assert torch.equal(model.route_features(z, expert=places).expert, places)
    assert model.router is not None
    model.set_adapter("u")
    assert model.router is None
    assert torch.equal(model(x).logits, model.expert_logits(z, "u"))


def test_a_router_that_cannot_be_set_leaves_the_one_that_is():
    model = make_model(TWO)
    model.set_router("entropy", temperature=2.0)
    before = model.router
    for router, options, message in (
        ("gaussian", {}, "statistics"),
        ("entropy", {"temperature": 0.0}, "temperature"),
        ("nothing", {}, "there is no router 'nothing'"),
        (None, {"temperature": 2.0}, "takes no options"),
    ):
        with pytest.raises(ValueError, match=message):
            model.set_router(router, **options)
        assert model.router is before
    with pytest.warns(UserWarning, match="leaks the task"):
        model.set_router("entropy", routing_scope="batch")


# --- labels and loss ---


def labels_of(model):
    config = model.config
    assert config.label2id == {name: i for i, name in config.id2label.items()}
    assert config.num_labels == len(config.id2label) == model.get_base_model().num_labels
    return [config.id2label[i] for i in range(len(config.id2label))]


def test_labels_follow_the_active_expert_and_the_router():
    base, x = make_vit(), pixels()
    own = (base.config.id2label, base.config.label2id)
    model = make_model(TWO, base=base)
    assert labels_of(model) == ["a", "b"]
    model.set_adapter("u")
    assert labels_of(model) == ["c", "d", "a"]
    assert model(x).logits.shape == (6, 3)
    model.set_router("entropy")
    assert labels_of(model) == list(model.classes) == ["a", "b", "c", "d"]
    assert model(x).logits.shape == (6, 4)
    with model.disable_adapter():
        assert (model.config.id2label, model.config.label2id) == own  # None stays None
        assert model.num_labels == model(x).logits.shape[1] == 5
    assert labels_of(model) == ["a", "b", "c", "d"]
    model.add_adapter("v", LucaConfig(classes=["e", "b"]))  # does not switch the router off
    assert labels_of(model) == ["a", "b", "c", "d", "e"]
    model.delete_adapter("t")
    assert labels_of(model) == list(model.classes) == ["c", "d", "a", "e", "b"]
    assert model.experts == {"u": ("c", "d", "a"), "v": ("e", "b")}
    model.set_router(None)
    assert labels_of(model) == list(model.experts[model.active_adapter])
    plain = model.unload()
    assert (plain.config.id2label, plain.config.label2id) == own


@pytest.mark.parametrize("router", [None, "entropy"])
def test_loss_is_cross_entropy_over_the_labels(router):
    model, x = make_model(TWO), pixels()
    model.set_router(router)
    labels = torch.tensor([0, 1, 1, 0, -100, 1]) if router is None else torch.tensor([0, 3, 2, 1, -100, 3])
    output = model(x, labels=labels)
    log_p = output.logits.double().log_softmax(dim=1)
    expected = -torch.stack([log_p[i, c] for i, c in enumerate(labels) if c >= 0]).mean()
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_loss_of_one_class_is_zero_and_no_regression():
    model, x = make_model({"t": ["a"]}), pixels()
    assert model(x, labels=torch.zeros(6, dtype=torch.long)).loss.item() == 0.0
    with model.disable_adapter():
        labels = torch.tensor([0, 1, 2, 3, 4, 0])
        output = model(x, labels=labels)
        torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))


@pytest.mark.parametrize("experts", [{"t": ["cat", "dog"], "u": ["eel"]}, {"t": ["cat"]}])
@pytest.mark.parametrize("router", [None, "entropy"])
@pytest.mark.parametrize("of", ["PeftModel", "base"])
def test_pipeline_names_the_classes(experts, router, of, processor):
    model = make_model(experts)
    model.set_router(router)
    rng = np.random.default_rng(0)
    images = [draw(color, rng) for color in ((200, 30, 30), (30, 30, 200), (30, 200, 30))]
    used = model if of == "PeftModel" else model.get_base_model()
    classify = pipeline("image-classification", model=used, image_processor=processor, device="cpu")
    names = list(model.classes if router else experts["t"])
    x = processor(images=images, return_tensors="pt")["pixel_values"]
    for answer, logits in zip(classify(images, top_k=5), model(x).logits, strict=True):
        scores = logits.sigmoid() if len(names) == 1 else logits.softmax(dim=0)  # the pipeline's own choice
        found = {entry["label"]: entry["score"] for entry in answer}
        assert found == pytest.approx(dict(zip(names, scores.tolist(), strict=True)), abs=1e-6)


# --- adding and removing experts ---


def test_experts_and_classes_are_in_their_order():
    model = make_model({"z": ["b", "a"], "m": ["c"], "a": ["a", "d"]})
    assert list(model.experts.items()) == [("z", ("b", "a")), ("m", ("c",)), ("a", ("a", "d"))]
    assert model.classes == ("b", "a", "c", "d")


def test_without_classes_they_are_the_bases_labels(vit):
    assert get_peft_model(vit, LucaConfig()).experts == {"default": tuple(f"base {i}" for i in range(5))}
    with pytest.raises(ValueError, match=r"no labels to take class names from: pass LucaConfig\(classes="):
        get_peft_model(make_vit(num_labels=0), LucaConfig())


@pytest.mark.parametrize("arrangement", ["adapter_calibrator", "adapter", "calibrator"])
def test_add_expert_is_what_pefts_own_way_does(arrangement):
    expert = {"t": ["a", "b"], "v": LucaConfig(classes=["e", "a"], arrangement=arrangement)}
    slow, fast = make_model(expert), make_model({"t": ["a", "b"]})
    features = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    statistics = slow.collect_statistics("v", features, torch.arange(8) % 2)
    tensors = slow.base_model.layer.tensors("v")
    tuner = tuner_of(fast)
    fast.load_state_dict(slow.state_dict(), strict=False)
    fast.set_router("entropy")
    active, router = fast.active_adapter, fast.router
    config = LucaConfig(classes=["e", "a"], arrangement=arrangement)
    tuner.add_expert("v", config, {key.replace(".v", "", 1): value for key, value in tensors.items()}, statistics)
    assert (fast.active_adapter, fast.router) == (active, router)
    assert labels_of(fast) == ["a", "b", "e"]
    assert fast.statistics == {"v": statistics}
    assert not any(p.requires_grad for name, p in fast.named_parameters() if ".v" in name)
    assert config.fingerprint is None  # what its file says stays as it is
    slow.set_router("entropy")
    slow.set_requires_grad("v", False)
    x = pixels()
    assert_same(dict(fast.state_dict()), dict(slow.state_dict()))
    assert torch.equal(fast(x).logits, slow(x).logits)
    fast.set_adapter("v")
    assert fast.active_adapter == "v"


def test_an_expert_that_cannot_be_added_changes_nothing():
    model = make_model(TWO)
    before = model.state_dict()
    for name, config, message in (
        ("t", LucaConfig(classes=["x"]), "already exists"),
        ("v", LucaConfig(classes=["x"], reduction=64), "reduction is 64"),
        ("v", LucaConfig(classes=["x"], target_modules=["fc1"]), "names 2"),
        ("a.b", LucaConfig(classes=["x"]), "cannot be called"),
    ):
        with pytest.raises(ValueError, match=message):
            model.add_adapter(name, config)
        assert list(model.experts) == list(model.peft_config) == ["t", "u"]
        assert_same(dict(model.state_dict()), dict(before))
    model.add_adapter("v", LucaConfig(classes=["x"]))
    assert labels_of(model) == ["a", "b"]


def test_the_only_expert_cannot_be_deleted():
    model, x = make_model({"t": ["a", "b"]}), pixels()
    before = model(x).logits
    with pytest.raises(ValueError, match=r"'t' is the only expert.*Use unload\(\)"):
        model.delete_adapter("t")
    assert torch.equal(model(x).logits, before)


@pytest.mark.parametrize("make", [make_vit, make_dinov2])
@pytest.mark.parametrize("num_labels", [5, 0])
def test_unload_gives_the_base_back(make, num_labels):
    base, x = make(num_labels=num_labels), pixels()
    before, expected, modules = trunk_tensors(base), base(x).logits, dict(base.named_modules())
    base.config.label2id = {name: i for i, name in base.config.id2label.items()}
    config, loss = copy.deepcopy(base.config.to_dict()), base.loss_function
    model = make_model(TWO, base=base)
    model.set_router("entropy")
    plain = model.unload()
    assert plain is base
    assert dict(plain.named_modules()) == modules
    assert_same(trunk_tensors(plain), before)
    assert torch.equal(plain(x).logits, expected)
    assert (plain.config.to_dict(), plain.loss_function) == (config, loss)
    assert not hasattr(plain, "peft_config")
    for use in (model.unload, lambda: model.route(x), lambda: model.set_router("entropy")):
        with pytest.raises(RuntimeError, match=r"unload\(\) has removed them"):
            use()
    assert make_model(TWO, base=plain)(x).logits.shape == (6, 2)  # and can be wrapped again


def test_a_copy_is_independent():
    model, x = make_model(TWO), pixels()
    model.set_router("entropy", temperature=2.0)
    copied = copy.deepcopy(model)
    before = model(x).logits
    assert torch.equal(copied(x).logits, before)
    copied.delete_adapter("t")
    copied.set_router("energy")
    assert torch.equal(model(x).logits, before)
    assert labels_of(model) == ["a", "b", "c", "d"]
    assert labels_of(copied) == ["c", "d", "a"]


def test_another_expert_is_bit_identical_after_training_and_deleting_one():
    model, before = make_model(TWO), expert_tensors(make_model(TWO), "u")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(pixels(), labels=torch.tensor([0, 1, 0, 1, 0, 1])).loss.backward()
    optimizer.step()
    model.delete_adapter("t")
    assert_same(expert_tensors(model, "u"), before)


# --- printing ---


def test_a_model_prints_its_experts_and_what_is_active():
    model = make_model({"warm": ["red", "yellow"], "cold": ["blue"]})
    text = repr(model)
    assert "2 experts, 3 classes; active: expert 'warm'" in text
    assert "warm: 2 classes (red, yellow), LuCA of 354 parameters" in text
    assert "cold: 1 class (blue)" in text
    assert "ViTForImageClassification (unnamed)" in text
    model.set_router("entropy")
    assert "active: router entropy" in repr(model)
    with model.disable_adapter():
        assert "active: none (the base model's own head)" in repr(model)
    assert "2 experts, 3 classes" in repr(model.get_base_model())  # its own tree, with the layer in it


def test_a_model_of_many_experts_prints_in_few_lines():
    model = make_model({f"task_{t}": [f"c{i}" for i in range(9 * t, 9 * t + 9)] for t in range(12)})
    assert len(repr(model).splitlines()) < 20
    assert "… and 2 more experts" in repr(model)
    assert "(c0, c1, c2, c3, c4, …)" in repr(model)


def test_tuner_of_takes_a_model_with_experts_only(vit):
    with pytest.raises(ValueError, match="needs a PeftModel with LuCA experts, got ViTForImageClassification"):
        tuner_of(vit)
