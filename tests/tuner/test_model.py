import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    D,
    assert_same,
    draw,
    expert_tensors,
    make_dinov2,
    make_model,
    make_vit,
    pixels,
    trunk_tensors,
)
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTModel,
    pipeline,
)

from peft_luca import LucaConfig, LucaLayer, LucaModel


TWO = {"t": ["a", "b"], "u": ["c", "d", "a"]}


# --- what LuCA reads ---


@pytest.mark.parametrize("make", [make_vit, make_dinov2])
def test_cls_is_the_trunks_own(make):
    base = make()
    x = pixels()
    with torch.no_grad():
        states = base.base_model(x).last_hidden_state
    model = make_model({"t": ["a", "b"]}, base=base)
    z = model.pooled_features(x)
    assert z.shape == (6, D)
    assert torch.equal(z, states[:, 0])


def test_dinov2_reads_the_first_half_and_not_the_patches():
    model = make_model(TWO, base=make_dinov2())
    layer = model.base_model.layer
    assert (layer.width, layer.input_width) == (D, 2 * D)
    x = torch.randn(3, 2 * D, generator=torch.Generator().manual_seed(0))
    changed = torch.cat([x[:, :D], x[:, D:] + 100], dim=1)
    assert torch.equal(layer(x), layer(changed))
    assert torch.equal(layer(x), layer.expert_logits(x[:, :D], "t"))


def test_a_base_without_labels_has_an_identity_for_a_head():
    base = make_vit(num_labels=0)
    assert isinstance(base.classifier, nn.Identity)
    model = make_model(TWO, base=base)
    assert model(pixels()).logits.shape == (6, 2)
    dinov2 = make_dinov2(num_labels=0)
    x = pixels()
    states = dinov2.base_model(x).last_hidden_state.detach()
    model = make_model(TWO, base=dinov2)
    assert torch.equal(model.pooled_features(x), states[:, 0])


def test_a_base_without_labels_needs_classes():
    with pytest.raises(ValueError, match=r"no labels to take class names from: pass LucaConfig\(classes="):
        get_peft_model(make_vit(num_labels=0), LucaConfig())


def test_no_gradient_reaches_the_trunk():
    model = make_model(TWO)
    for parameter in model.base_model.model.vit.parameters():
        parameter.requires_grad = True
    model(pixels(), labels=torch.zeros(6, dtype=torch.long)).loss.backward()
    assert all(p.grad is None for p in model.base_model.model.vit.parameters())
    assert model.base_model.layer.luca_class_rows["t"].grad is not None


def test_training_mode_does_not_switch_the_trunks_dropout_on():
    model, x = make_model(TWO), pixels()
    evaluated = model(x).logits
    model.train()
    assert model.training
    assert model.base_model.layer.training
    assert torch.equal(model(x).logits, evaluated)


@pytest.mark.parametrize("mode", [True, False])
def test_a_backbone_that_is_put_into_training_mode_by_itself_stays_calm(mode):
    """Whoever has the backbone in a variable of their own may say `vit.train()` as well."""
    model, x = make_model(TWO, make_vit(hidden_dropout_prob=0.5)), pixels()
    model.set_router("entropy")
    asked = (lambda: model(x).logits, lambda: model.route(x).logits, lambda: model.base_model.pooled_features(x))
    for ask in asked:
        wanted = ask()
        model.train(mode)
        model.get_base_model().train()
        assert torch.equal(ask(), wanted)
        assert model.base_model.layer.training == mode
        model.eval()


# --- models without a [CLS] head ---


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SMALL |= {"image_size": 16, "patch_size": 8}


def small_swin():
    return SwinForImageClassification(
        SwinConfig(image_size=16, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=2)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (small_swin, "SwinForImageClassification does not read .CLS. but another pooled vector"),
        (lambda: BeitForImageClassification(BeitConfig(**SMALL)), "does not read .CLS. but another pooled vector"),
        (
            lambda: ResNetForImageClassification(ResNetConfig(hidden_sizes=[8], depths=[1], embedding_size=8)),
            "head 'classifier' of ResNetForImageClassification is a Sequential",
        ),
        (lambda: ViTModel(make_vit().config), "finds none in ViTModel"),
        (
            lambda: DeiTForImageClassificationWithTeacher(DeiTConfig(**SMALL)),
            "two heads on two tokens. Load the same weights as DeiTForImageClassification",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "finds none in Sequential"),
    ],
)
def test_a_model_without_a_cls_head_is_refused_and_left_as_it_was(make, message):
    base = make()
    before = [name for name, _ in base.named_modules()]
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, LucaConfig(classes=["a", "b"]))
    assert [name for name, _ in base.named_modules()] == before


def test_any_pooled_vector_on_request():
    model = get_peft_model(small_swin(), LucaConfig(classes=["a", "b"], pooled="any", reduction=2))
    assert model(pixels()).logits.shape == (6, 2)


def test_deit_and_beit_with_cls():
    for base in (
        DeiTForImageClassification(DeiTConfig(**SMALL)),
        BeitForImageClassification(BeitConfig(**SMALL, use_mean_pooling=False)),
    ):
        base.eval()
        model = get_peft_model(base, LucaConfig(classes=["a", "b"]))
        x = pixels()
        assert torch.equal(model.pooled_features(x), base.base_model(x).last_hidden_state[:, 0])


def test_target_modules_name_the_head(vit):
    model = get_peft_model(vit, LucaConfig(classes=["a"], target_modules="classifier"))
    assert isinstance(model.base_model.model.classifier, LucaLayer)
    with pytest.raises(ValueError, match="target_modules='fc1' names 2 "):
        get_peft_model(make_vit(), LucaConfig(classes=["a"], target_modules="fc1"))
    with pytest.raises(ValueError, match="target_modules='nothing' names none"):
        get_peft_model(make_vit(), LucaConfig(classes=["a"], target_modules="nothing"))


# --- labels and loss ---


def labels_of(model):
    config = model.config
    assert config.label2id == {name: i for i, name in config.id2label.items()}
    assert config.num_labels == len(config.id2label)
    assert model.get_base_model().num_labels == len(config.id2label)
    return [config.id2label[i] for i in range(len(config.id2label))]


def test_labels_follow_what_answers():
    model = make_model(TWO)
    base = [f"base {i}" for i in range(5)]
    assert labels_of(model) == ["a", "b"]
    model.set_adapter("u")
    assert labels_of(model) == ["c", "d", "a"]
    assert model(pixels()).logits.shape == (6, 3)
    model.set_router("entropy")
    assert labels_of(model) == list(model.classes) == ["a", "b", "c", "d"]
    assert model(pixels()).logits.shape == (6, 4)
    with model.disable_adapter():
        assert labels_of(model) == base
        assert model(pixels()).logits.shape == (6, 5)
    assert labels_of(model) == ["a", "b", "c", "d"]
    model.add_adapter("v", LucaConfig(classes=["e", "b"]))  # does not switch the router off
    assert labels_of(model) == ["a", "b", "c", "d", "e"]
    model.delete_adapter("t")
    assert labels_of(model) == list(model.classes) == ["c", "d", "a", "e", "b"]
    model.set_router(None)
    assert labels_of(model) == list(model.experts[model.active_adapter])
    plain = model.unload()
    assert [plain.config.id2label[i] for i in range(5)] == base


def test_unload_gives_the_base_back(vit):
    x, labels = pixels(), torch.tensor([0, 1, 2, 3, 4, 0])
    before, expected, modules = trunk_tensors(vit), vit(x, labels=labels), [name for name, _ in vit.named_modules()]
    model = make_model(TWO, base=vit)
    model.set_router("entropy")
    plain = model.unload()
    assert plain is vit
    assert [name for name, _ in plain.named_modules()] == modules
    assert_same(trunk_tensors(plain), before)
    assert torch.equal(plain(x, labels=labels).logits, expected.logits)
    assert torch.equal(plain(x, labels=labels).loss, expected.loss)


@pytest.mark.parametrize("router", [None, "entropy"])
def test_loss_is_cross_entropy_over_the_labels_of_what_answers(router):
    model, x = make_model(TWO), pixels()
    model.set_router(router)
    labels = torch.tensor([0, 1, 1, 0, -100, 1]) if router is None else torch.tensor([0, 3, 2, 1, -100, 3])
    output = model(x, labels=labels)
    log_p = output.logits.double().log_softmax(dim=1)
    expected = -torch.stack([log_p[i, c] for i, c in enumerate(labels) if c >= 0]).mean()
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_loss_of_one_class_is_zero_and_no_regression():
    model = make_model({"t": ["a"]})
    assert model(pixels(), labels=torch.zeros(6, dtype=torch.long)).loss.item() == 0.0
    with model.disable_adapter():
        x, labels = pixels(), torch.tensor([0, 1, 2, 3, 4, 0])
        output = model(x, labels=labels)
        torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))


def test_return_dict_is_respected():
    model, x = make_model(TWO), pixels()
    assert torch.equal(model(x, return_dict=False)[0], model(x).logits)


@pytest.mark.parametrize("experts", [{"t": ["cat", "dog"], "u": ["eel"]}, {"t": ["cat"]}])
@pytest.mark.parametrize("router", [None, "entropy"])
def test_pipeline_names_the_classes(experts, router, processor, rng_pictures):
    model = make_model(experts)
    model.set_router(router)
    classify = pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    names = list(model.classes if router else experts["t"])
    x = processor(images=rng_pictures, return_tensors="pt")["pixel_values"]
    for answer, logits in zip(classify(rng_pictures, top_k=5), model(x).logits, strict=True):
        assert {entry["label"] for entry in answer} == set(names)
        assert answer[0]["label"] == names[int(logits.argmax())]
        assert all(0 <= entry["score"] <= 1 for entry in answer)


@pytest.fixture
def rng_pictures():
    rng = np.random.default_rng(0)
    return [draw((200, 30, 30), rng), draw((30, 30, 200), rng), draw((30, 200, 30), rng)]


# --- experts ---


def test_experts_and_classes_in_their_order():
    model = make_model({"z": ["b", "a"], "m": ["c"], "a": ["a", "d"]})
    assert model.experts == {"z": ("b", "a"), "m": ("c",), "a": ("a", "d")}
    assert list(model.experts) == ["z", "m", "a"]
    assert model.classes == ("b", "a", "c", "d")


def test_several_active_experts_are_refused():
    model = make_model(TWO)
    with pytest.raises(ValueError, match=r"one expert is active at a time, got \['t', 'u'\]. Use set_router"):
        model.base_model.set_adapter(["t", "u"])
    assert model.active_adapters == ["t"]


def test_an_unknown_expert_is_refused():
    model = make_model(TWO)
    with pytest.raises(ValueError, match="nobody"):
        model.set_adapter("nobody")
    with pytest.raises(ValueError, match="nobody"):
        model.delete_adapter("nobody")
    assert list(model.experts) == ["t", "u"]


def test_the_only_expert_cannot_be_deleted():
    model = make_model({"t": ["a", "b"]})
    x = pixels()
    before = model(x).logits
    with pytest.raises(ValueError, match="'t' is the only expert"):
        model.delete_adapter("t")
    assert torch.equal(model(x).logits, before)


@pytest.mark.parametrize(
    "name",
    ["classifier", "weight", "keys", "vit", "base_layer", "luca_x", "a.b", "a b", "", "-a", "ä", "items", "0/1"],
)
def test_names_with_which_tensors_would_be_lost_are_refused(name):
    model = make_model(TWO)
    before = model.state_dict()
    with pytest.raises(ValueError, match="an expert cannot be called"):
        model.add_adapter(name, LucaConfig(classes=["x"]))
    assert list(model.experts) == ["t", "u"]
    assert_same(dict(model.state_dict()), dict(before))
    with pytest.raises(ValueError, match="an expert cannot be called"):
        get_peft_model(make_vit(), LucaConfig(classes=["x"]), adapter_name=name)


def test_an_expert_of_the_same_name_is_refused():
    model = make_model(TWO)
    before = expert_tensors(model, "t")
    with pytest.raises(ValueError, match="t"):
        model.add_adapter("t", LucaConfig(classes=["x"]))
    assert_same(expert_tensors(model, "t"), before)
    assert model.experts["t"] == ("a", "b")


def test_another_tuner_beside_the_experts_is_refused():
    model = make_model(TWO)
    with pytest.raises(ValueError, match="LORA"):
        model.add_adapter("lora", LoraConfig(target_modules=["query"]))
    assert list(model.experts) == ["t", "u"]


def test_a_linear_expert_of_one_class_is_refused():
    model = make_model(TWO)
    with pytest.raises(ValueError, match=r"a linear head needs at least two classes, got .'x'.*Use head='cosine'"):
        model.add_adapter("v", LucaConfig(classes=["x"], head="linear"))
    assert list(model.experts) == ["t", "u"]


@pytest.mark.parametrize("verb", ["merge_adapter", "unmerge_adapter", "merge_and_unload"])
def test_merging_is_refused(verb):
    model = make_model(TWO)
    with pytest.raises(NotImplementedError, match="cannot be merged"):
        getattr(model, verb)()


def test_disabling_is_the_base_models_own_answer(vit):
    x = pixels()
    expected = vit(x).logits
    model = make_model(TWO, base=vit)
    routed = model.route(x).logits
    with model.disable_adapter():
        assert torch.equal(model(x).logits, expected)
    model.set_router("entropy")
    assert torch.equal(model(x).logits, routed)


def test_disabling_does_not_thaw_what_was_frozen():
    model = make_model(TWO)
    before = {name for name, p in model.named_parameters() if p.requires_grad}
    with model.disable_adapter():
        pass
    assert {name for name, p in model.named_parameters() if p.requires_grad} == before


def test_a_copy_answers_the_same_and_is_independent():
    model, x = make_model(TWO), pixels()
    model.set_router("entropy")
    twin = copy.deepcopy(model)
    before = model(x).logits
    assert torch.equal(twin(x).logits, before)
    twin.delete_adapter("t")
    assert torch.equal(model(x).logits, before)
    assert list(model.experts) == ["t", "u"]
    assert labels_of(model) == ["a", "b", "c", "d"]
    assert labels_of(twin) == ["c", "d", "a"]


def test_all_of_the_tuner_can_be_called_on_the_peft_model():
    model = make_model(TWO)
    assert isinstance(model.base_model, LucaModel)
    for name in ("set_router", "route", "experts", "classes", "l1_penalty", "compute_reference", "pooled_features"):
        assert hasattr(model, name)


def test_answering_over_all_classes_with_one_expert():
    model, x = make_model(TWO), pixels()
    scores, _ = model.base_model.layer.scores(model.pooled_features(x))
    model.set_over_all_classes(True)
    model.set_adapter("u")
    torch.testing.assert_close(model(x).logits, scores[:, 1])
    assert labels_of(model) == ["a", "b", "c", "d"]
    model.set_over_all_classes(False)
    assert labels_of(model) == ["c", "d", "a"]


def test_a_model_prints_its_experts_and_who_answers():
    model = make_model({"warm": ["red", "yellow"], "cold": ["blue"]})
    text = repr(model)
    assert "2 experts, 3 classes; answers: the expert 'warm'" in text
    assert "warm: 2 classes (red, yellow), LuCA of 354 parameters" in text
    assert "cold: 1 class (blue)" in text
    assert "ViTForImageClassification (unnamed)" in text
    model.set_router("entropy")
    assert "answers: the router 'entropy'" in repr(model)
    with model.disable_adapter():
        assert "answers: disabled: the base's own head" in repr(model)
    assert "2 experts, 3 classes" in repr(model.get_base_model())  # its own tree, with the layer in it


def test_a_model_of_many_experts_prints_in_few_lines():
    model = make_model({f"task_{t}": [f"c{i}" for i in range(9 * t, 9 * t + 9)] for t in range(14)})
    assert len(repr(model).splitlines()) < 20
    assert "… and 4 more experts" in repr(model)
    assert "(c0, c1, c2, c3, c4, …)" in repr(model)
