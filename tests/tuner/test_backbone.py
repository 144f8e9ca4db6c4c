"""The backbone's fingerprint, [CLS] by a shallow copy, the reference pictures, and experts of another backbone."""

import hashlib
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    D,
    assert_same,
    expert_tensors,
    make_arguments,
    make_dinov2,
    make_model,
    make_processor,
    make_trainer,
    make_vit,
    pixels,
    read_json,
    trunk_tensors,
)
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from peft_luca import (
    ExpertTrainer,
    FeatureDataset,
    LucaConfig,
    draw_reference_pictures,
    load_expert,
    load_experts,
    save_expert,
    save_experts,
)
from peft_luca.tuner.backbone import (
    BACKBONE_TOLERANCE,
    PROCESSOR_TYPE,
    STEPS,
    BackboneFacts,
    check_backbone,
    is_identity,
    pooled_features,
    processor_facts,
    reference_distance,
)
from peft_luca.tuner.head import Head, find_head


def with_references(base):
    model = make_model({"t": ["a", "b"], "u": ["c"]}, base=base)
    layer = model.base_model.layer
    for name in "tu":
        layer.luca_reference_mean[name].zero_()
        layer.luca_reference_std[name].fill_(1)
        layer.luca_whitening[name].zero_()
        model.compute_reference(name)
    return model


# --- the fingerprint ---


def trunk_of(*tensors, names="abc"):
    """A trunk that holds tensors, before its head."""
    trunk = nn.Module()
    for name, tensor in zip(names, tensors, strict=True):
        trunk.register_buffer(name, tensor)
    return BackboneFacts.of(nn.ModuleDict({"trunk": trunk, "head": nn.Linear(2, 2)}), "head")


def test_fingerprint_is_that_of_the_tensors_in_their_order_whatever_their_names():
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(3), torch.ones(2).bfloat16()]
    digests = [
        hashlib.sha256(header.encode() + content).digest()
        for header, content in (
            ("torch.float32 (2, 3) ", np.arange(6, dtype="<f4").tobytes()),
            ("torch.int64 () ", np.array(3, dtype="<i8").tobytes()),
            ("torch.bfloat16 (2,) ", bytes.fromhex("803f803f")),
        )
    ]
    facts = trunk_of(*tensors)
    assert facts.fingerprint == hashlib.sha256(b"".join(digests)).hexdigest()
    assert facts.old_fingerprint == hashlib.sha256(b"".join(sorted(digests))).hexdigest()
    assert trunk_of(*tensors, names="zyx").fingerprint == facts.fingerprint
    assert trunk_of(*tensors[::-1]).fingerprint != facts.fingerprint
    assert trunk_of(*tensors[::-1]).old_fingerprint == facts.old_fingerprint
    strides = trunk_of(tensors[0].T.contiguous().T, *tensors[1:])
    assert strides.fingerprint == facts.fingerprint
    assert trunk_of(tensors[0].reshape(3, 2), *tensors[1:]).fingerprint != facts.fingerprint


def test_fingerprint_is_of_the_trunk_alone_and_not_of_head_or_experts():
    first = make_model({"t": ["a", "b"]}, base=make_vit(seed=0, num_labels=5))
    found = first.backbone.fingerprint
    assert re.fullmatch("[0-9a-f]{64}", found)
    base = make_vit(seed=0, num_labels=9)
    base.load_state_dict({k: v for k, v in trunk_tensors(first).items() if "classifier" not in k}, strict=False)
    second = make_model({"x": ["a", "b", "c"], "y": ["d"]}, base=base)
    assert second.backbone.fingerprint == found
    assert second.peft_config["x"].fingerprint == second.peft_config["y"].fingerprint == found
    assert make_model({"t": ["a"]}, base=make_vit(seed=1)).backbone.fingerprint != found


EDITS = {
    "one bit": lambda weight: weight.view(-1)[:1].copy_(torch.nextafter(weight.view(-1)[:1], torch.tensor(9.0))),
    "added": lambda weight: weight.add_(0.01),  # torch counts these two
    "multiplied": lambda weight: weight.data.mul_(1.01),  # and not these
    "a column": lambda weight: weight.data[:, 7].zero_(),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("inference", [False, True])
def test_a_change_of_the_trunk_is_noticed(edit, inference):
    model = make_model({"t": ["a", "b"]})
    before = model.backbone
    assert model.backbone is before
    weight = model.get_base_model().vit.layers[1].mlp.fc1.weight
    with torch.inference_mode(inference), torch.no_grad():
        EDITS[edit](weight)
    assert model.backbone.fingerprint != before.fingerprint


# --- [CLS] ---


@pytest.mark.parametrize("make", [make_vit, make_dinov2])
@pytest.mark.parametrize("num_labels", [5, 0])
def test_pooled_features_are_the_trunks_own_cls_with_and_without_experts(make, num_labels):
    base, x = make(num_labels=num_labels), pixels()
    head = find_head(base, LucaConfig())
    expected = base.base_model(x).last_hidden_state[:, 0].detach()
    modules = dict(base.named_modules())
    z = pooled_features(base, head, x)
    assert torch.equal(z, expected)
    assert z.shape == (6, D)
    assert not z.requires_grad
    assert dict(base.named_modules()) == modules
    model = make_model({"t": ["a", "b"]}, base=base)
    assert torch.equal(model.pooled_features(x), expected)
    assert torch.equal(pooled_features(base, head, x), expected)


def test_pooled_features_of_a_head_inside_another_module():
    body = nn.Sequential(nn.Flatten(), nn.Linear(768, 8))
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    x = pixels()
    assert torch.equal(pooled_features(nn.Sequential(body, inner), Head("1.1", 4, 8), x), inner[0](body(x))[:, :4])
    assert isinstance(inner[1], nn.Linear)
    with pytest.raises(ValueError, match=r"reads a tensor of shape \(batch, 8\), got \(6, 3, 16, 8\)"):
        pooled_features(nn.Sequential(nn.Linear(16, 8), inner), Head("1.1", 8, 8), x)


@pytest.mark.parametrize("change", ["compile", "compiled", "forward"])
def test_pooled_features_stop_before_the_head_also_where_the_model_runs_other_code(change):
    base, x = make_vit(), pixels()
    head, expected = find_head(base, LucaConfig()), base.base_model(x).last_hidden_state[:, 0]
    if change == "compile":
        base.compile(backend="eager")
    elif change == "forward":
        base.forward = base.forward  # as libraries do that wrap it: bound to the model with its head
    model = torch.compile(base, backend="eager") if change == "compiled" else base
    assert torch.equal(pooled_features(model, head, x), expected)


def exact_reference(model, dtype=torch.float32):
    """Mean and deviation of [CLS] over 768 drawings in [-1, 1], from the trunk's own output."""
    pictures = torch.from_numpy(draw_reference_pictures(768, 16)).permute(0, 3, 1, 2)
    with torch.no_grad():
        trunk = model.get_base_model().base_model
        z = trunk((pictures.float() / 127.5 - 1).to(dtype)).last_hidden_state[:, 0].double()
    mean = z.sum(dim=0) / len(z)
    return mean, ((z - mean).square().sum(dim=0) / (len(z) - 1)).sqrt()


def test_a_reference_is_the_identity_if_nothing_of_it_was_measured():
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert is_identity(zeros, ones)
    assert is_identity(zeros.to("meta"), ones.to("meta"))
    assert not is_identity(zeros, ones + 1)
    assert not is_identity(zeros + 1, ones)


def test_reference_distance():
    mean, std = torch.zeros(4), torch.full((4,), 2.0)
    assert reference_distance((mean, std), (mean, std)) == 0.0
    assert reference_distance((mean, std), (mean + 1, std)) == pytest.approx(0.5)
    assert reference_distance((mean, std), (mean, std * np.e)) == pytest.approx(1.0)
    assert reference_distance((mean, std), (torch.zeros(3), torch.ones(3))) == float("inf")
    assert not reference_distance((mean, std), (mean * float("nan"), std)) <= BACKBONE_TOLERANCE


# --- another backbone ---


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_backbone_is_checked_before_anything_is_changed(wrapped):
    """Also with dropout at work, as in a bare model in training mode, and without switching it off for good."""
    expert = with_references(make_vit(hidden_dropout_prob=0.5))
    config, tensors = expert.peft_config["t"], get_peft_model_state_dict(expert, adapter_name="t")
    for seed, dtype, refused in ((0, torch.float32, False), (0, torch.bfloat16, False), (1, torch.float32, True)):
        base = make_vit(seed=seed, hidden_dropout_prob=0.5).to(dtype).train()
        if wrapped:
            get_peft_model(base, LucaConfig(classes=["a"])).train()
            base.train()
        modules = {name: (module, module.training) for name, module in base.named_modules()}
        before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        arguments = (base, find_head(base, config), config, "t", tensors)
        if refused:
            with pytest.raises(
                ValueError, match=r"'t' was trained on the backbone .* deviations away, more than 0\.05"
            ):
                check_backbone(*arguments)
        elif dtype == torch.bfloat16:
            with pytest.warns(UserWarning, match=r"is only 0\.00\d+ deviations away"):
                check_backbone(*arguments)
        else:
            check_backbone(*arguments)
        assert {name: (module, module.training) for name, module in base.named_modules()} == modules
        assert_same(base.state_dict(), before)


def test_another_backbone_is_refused_by_every_path(tmp_path):
    save_experts(with_references(make_vit(seed=0)), tmp_path)
    message = r"expert 't' was trained on the backbone [0-9a-f]{12} .*but this one is [0-9a-f]{12} .*deviations away"
    mine = make_model({"own": ["a", "b"]}, base=make_vit(seed=1))
    for load in (
        lambda: PeftModel.from_pretrained(make_vit(seed=1), tmp_path / "t", adapter_name="t"),
        lambda: load_experts(make_vit(seed=1), tmp_path),
        lambda: load_experts(mine, tmp_path),
        lambda: mine.load_adapter(str(tmp_path / "t"), "t"),
    ):
        with pytest.raises(ValueError, match=message):
            load()


def test_another_backbone_on_request(tmp_path):
    model = with_references(make_vit(seed=0))
    save_experts(model, tmp_path)
    other = load_experts(make_vit(seed=1), tmp_path, allow_mismatch=True)
    for name in "tu":
        assert_same(expert_tensors(other, name), expert_tensors(model, name))
    # The expert goes on saying which backbone it was made on.
    assert other.peft_config["t"].fingerprint == model.peft_config["t"].fingerprint
    config = LucaConfig.from_pretrained(str(tmp_path / "t"))
    config.allow_mismatch = True
    PeftModel.from_pretrained(make_vit(seed=1), tmp_path / "t", config=config)


def test_without_a_reference_another_dtype_is_refused_too():
    model = get_peft_model(make_vit(), LucaConfig(classes=["a"]), adapter_name="t")
    base, config = make_vit().bfloat16(), model.peft_config["t"]
    with pytest.raises(ValueError, match=r"no reference to compare \[CLS\] by"):
        check_backbone(base, find_head(base, config), config, "t", get_peft_model_state_dict(model, adapter_name="t"))


@pytest.mark.parametrize(
    ("make", "dtype"), [(make_vit, torch.bfloat16), (make_dinov2, torch.float16), (make_vit, torch.float64)]
)
def test_another_dtype_is_loaded_with_a_warning_that_has_its_distance(tmp_path, make, dtype):
    model = with_references(make())
    save_experts(model, tmp_path)
    with pytest.warns(UserWarning, match=r"is only \S+ deviations away, as with another dtype") as caught:
        loaded = load_experts(make().to(dtype), tmp_path)
    (told,) = {re.search(r"is only (\S+) dev", str(w.message))[1] for w in caught if "deviations" in str(w.message)}
    (mean, std), (other_mean, other_std) = exact_reference(model), exact_reference(loaded, dtype)
    distance = max(float(((other_mean - mean) / std).square().mean()), float((other_std / std).log().square().mean()))
    assert float(told) == pytest.approx(distance**0.5, rel=0.1, abs=2e-6)
    assert float(told) < 0.01
    x = pixels()
    torch.testing.assert_close(loaded.route(x.to(dtype)).logits.float(), model.route(x).logits, rtol=0.2, atol=1.0)


def test_other_weights_are_far_away():
    first, second = (exact_reference(make_model({"t": ["a"]}, base=make_vit(seed=seed))) for seed in (0, 1))
    assert reference_distance(first, second) > 1.0


# --- the same tensors in another model ---


def vit_with(**changes):
    """The backbone of the expert, with other settings."""
    base = make_vit(**changes)
    base.load_state_dict(make_vit().state_dict())
    return base


def vit_with_swapped_layers():
    base = make_vit()
    base.vit.layers[0], base.vit.layers[1] = base.vit.layers[1], base.vit.layers[0]
    return base


def vit_with_epsilon_in_its_modules():
    base = make_vit()
    for module in base.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.3
    return base


OTHER_TRUNKS = {
    "layers": (vit_with_swapped_layers, "other weights"),
    "epsilon": (lambda: vit_with(layer_norm_eps=0.3), r"other settings \(norm_eps \[1e-12\] there, \[0.3\] here\)"),
    "module": (vit_with_epsilon_in_its_modules, r"other settings \(norm_eps \[1e-12\] there, \[0.3\] here\)"),
    "activation": (lambda: vit_with(hidden_act="relu"), r"other settings \(hidden_act 'gelu' there, 'relu' here\)"),
    "heads": (lambda: vit_with(num_attention_heads=1), r"other settings \(num_attention_heads 2 there, 1 here\)"),
}


def every_path(folder, make):
    """Loads the expert `t` of a collection on a backbone, by every path."""

    def add(load):
        model = make_model({"own": ["a", "b"]}, base=make())
        load(model)
        return model

    return (
        lambda: PeftModel.from_pretrained(make(), folder / "t", adapter_name="t"),
        lambda: add(lambda model: model.load_adapter(str(folder / "t"), "t")),
        lambda: load_expert(make(), folder, "t"),
        lambda: load_experts(make(), folder),
        lambda: load_experts(add(lambda model: None), folder),
    )


def make_older(folder):
    """Experts as they were written before the places of tensors and the settings counted."""
    for path in folder.glob("*/adapter_config.json"):
        values = read_json(path)
        del values["backbone_settings"], values["processor"]
        values["fingerprint"] = BackboneFacts.of(make_vit(), "classifier").old_fingerprint
        path.write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("other", OTHER_TRUNKS)
def test_the_same_tensors_in_another_model_are_refused_by_every_path(tmp_path, other, is_old):
    make, message = OTHER_TRUNKS[other]
    save_experts(with_references(make_vit()), tmp_path)
    if is_old:
        make_older(tmp_path)
        message = "its tensors in other places, or other settings"
    for load in every_path(tmp_path, make):
        with pytest.raises(
            ValueError, match=rf"expert 't' was trained on .* with {message}: .* deviations away, more than"
        ):
            load()


@pytest.mark.parametrize("is_old", [False, True])
def test_the_same_backbone_loads_by_every_path_without_a_warning_and_is_not_measured_again(
    tmp_path, is_old, monkeypatch, recwarn
):
    model = with_references(make_vit())
    save_experts(model, tmp_path)
    if is_old:
        make_older(tmp_path)
    monkeypatch.setattr("peft_luca.tuner.backbone.measure_reference", None)  # an error where it is measured
    what_does_not_count = {"hidden_dropout_prob": 0.4, "initializer_range": 0.5, "attn_implementation": "eager"}
    for load in every_path(tmp_path, make_vit if is_old else lambda: vit_with(**what_does_not_count)):
        assert_same(expert_tensors(load(), "t"), expert_tensors(model, "t"))
    assert not [str(warning.message) for warning in recwarn if "backbone" in str(warning.message)]


def test_an_older_expert_without_a_reference_loads_where_the_tensors_are_the_same(tmp_path):
    save_experts(get_peft_model(make_vit(), LucaConfig(classes=["a"]), adapter_name="t"), tmp_path)
    make_older(tmp_path)
    for load in every_path(tmp_path, make_vit):
        assert "t" in load().experts
    with pytest.raises(ValueError, match=r"no reference to compare \[CLS\] by"):
        load_experts(make_vit(seed=1), tmp_path)


def test_a_setting_that_hardly_moves_cls_is_named_in_a_warning_and_measured_once(tmp_path, monkeypatch):
    save_experts(with_references(make_vit()), tmp_path)
    message = (
        r"other settings \(hidden_act 'gelu' there, 'gelu_pytorch_tanh' here\).* is only 0\.00\d+ deviations away"
    )
    for load in every_path(tmp_path, lambda: vit_with(hidden_act="gelu_pytorch_tanh")):
        with pytest.warns(UserWarning, match=message):
            load()
        monkeypatch.setattr("peft_luca.tuner.backbone.measure_reference", None)
    base = vit_with(hidden_act="gelu_pytorch_tanh").bfloat16()
    monkeypatch.undo()
    with pytest.warns(UserWarning, match=r"with other weights and other settings \(hidden_act"):
        load_experts(base, tmp_path)


def test_a_setting_that_only_one_version_of_transformers_knows_is_not_compared(tmp_path, recwarn):
    save_experts(with_references(make_vit()), tmp_path)
    for path in tmp_path.glob("*/adapter_config.json"):
        values = read_json(path)
        del values["backbone_settings"]["num_attention_heads"]
        values["backbone_settings"]["rope_theta"] = 100.0
        path.write_text(json.dumps(values), encoding="utf-8")
    load_experts(make_vit(), tmp_path)
    assert not [str(warning.message) for warning in recwarn if "backbone" in str(warning.message)]


def test_swapped_layers_do_not_find_the_reference_of_the_others():
    first, second = (with_references(make()) for make in (make_vit, vit_with_swapped_layers))
    assert first.backbone.old_fingerprint == second.backbone.old_fingerprint
    assert not torch.equal(first.base_model.layer.luca_reference_mean["t"], exact_reference(second)[0].float())
    torch.testing.assert_close(second.base_model.layer.luca_reference_mean["t"].double(), exact_reference(second)[0])


# --- another image processor ---


def test_every_step_of_a_processor_has_its_settings():
    settings = {name: f"value of {name}" for step, names in STEPS.items() for name in (step, *names)}
    expected = "size resample crop_pct crop_size pad_size rescale_factor rescale_offset image_mean image_std".split()
    steps = "do_resize do_center_crop do_pad do_rescale do_normalize do_flip_channel_order data_config".split()
    assert {*expected, *steps} == set(settings)
    kind = {PROCESSOR_TYPE: "OwnProcessor"}
    assert processor_facts(SimpleNamespace(to_dict=lambda: settings | kind | {"other": 1})) == settings | kind
    assert processor_facts(SimpleNamespace(to_dict=lambda: settings))[PROCESSOR_TYPE] == "SimpleNamespace"
    for step in STEPS:
        facts = processor_facts(SimpleNamespace(to_dict=lambda step=step: {**settings, **kind, step: False}))
        assert facts == kind | {name: value for name, value in settings.items() if name not in (step, *STEPS[step])}


def test_settings_of_a_backbone_inside_another_config_count():
    vit = make_vit()
    vit.config.vision_config = {"patch_size": 99}
    assert BackboneFacts.of(vit, "classifier").settings["patch_size"] == 99


def test_processor_facts_are_what_is_done_to_pixels():
    kind = {PROCESSOR_TYPE: "ViTImageProcessor"}
    facts = kind | {"do_resize": True, "size": {"height": 16, "width": 16}, "resample": 2}
    facts |= {"do_rescale": True, "rescale_factor": 1 / 255}
    facts |= {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    facts["image_processor_type"] = "ViTImageProcessor"
    assert processor_facts(make_processor()) == facts
    without = make_processor(do_normalize=False, do_rescale=False, image_mean=[0.1] * 3)
    assert processor_facts(without) == {name: facts[name] for name in (*kind, "do_resize", "size", "resample")}
    assert processor_facts(SimpleNamespace(image_processor=make_processor())) == facts  # of a processor of two kinds
    assert processor_facts(None) is None
    assert processor_facts(lambda images, return_tensors: {}) is None


def trained(folder, **processor):
    """The folder of the first expert of a run with an image processor."""
    trainer = make_trainer(folder, num_train_epochs=1, processor=make_processor(**processor))
    trainer.train()
    return folder / next(iter(trainer.tuner.experts))


DIFFERING = (
    r"image processor than {}: image_mean \[0.5, 0.5, 0.5\] there, \[0.1, 0.1, 0.1\] here, "
    r"image_std \[0.5, 0.5, 0.5\] there, \[0.3, 0.3, 0.3\] here"
)


def test_another_image_processor_is_named_wherever_experts_meet_it(tmp_path):
    """Saved with each expert by the trainer, it is compared where another one is given, or another expert's."""
    other = {"image_mean": [0.1] * 3, "image_std": [0.3] * 3}
    first, second = trained(tmp_path / "one"), trained(tmp_path / "two", **other)
    given = make_processor(**other)
    assert read_json(second / "adapter_config.json")["processor"] == processor_facts(given)
    message = DIFFERING.format("the one that is given")
    with pytest.warns(UserWarning, match=message):
        load_experts(make_vit(), tmp_path / "one", processing_class=given)
    with pytest.warns(UserWarning, match=message):
        load_expert(make_vit(), first, "t", processing_class=given)
    with pytest.raises(ValueError, match=r"a run with other settings \(processor\.image_mean"):
        make_trainer(tmp_path / "one", num_train_epochs=1, processor=given).train()
    model = load_experts(make_vit(), {"x": first})
    with pytest.warns(UserWarning, match=message):
        make_trainer(tmp_path / "three", model=model, processor=given)
    features = FeatureDataset(torch.randn(4, D), torch.arange(4) % 2)
    args = {"train_dataset": features, "expert": "x", "new_expert": False, "processing_class": given}
    with pytest.warns(UserWarning, match=message):
        ExpertTrainer(model, make_arguments(tmp_path / "three", max_steps=1), **args).train()
    assert model.peft_config["x"].processor == processor_facts(given)
    with pytest.warns(UserWarning, match=DIFFERING.format("that of 'b'")):
        load_experts(make_vit(), {"b": second, "a": first})
    model = PeftModel.from_pretrained(make_vit(), second, adapter_name="b")
    with pytest.warns(UserWarning, match=DIFFERING.format("that of 'b'")):
        model.load_adapter(str(first), "a")


def test_the_same_image_processor_and_an_unknown_one_warn_of_nothing(tmp_path, recwarn):
    expert = trained(tmp_path / "one")
    load_experts(make_vit(), tmp_path / "one", processing_class=make_processor())
    load_experts(load_experts(make_vit(), tmp_path / "one"), {"x": expert})
    load_experts(make_model({"own": ["a"]}), tmp_path / "one", processing_class=lambda images, return_tensors: {})
    assert not [str(warning.message) for warning in recwarn if "processor" in str(warning.message)]


# --- an expert in the trunk ---


@pytest.mark.parametrize("target", ["vit.layers.1.mlp.fc2", "layers.0.attention.o_proj"])
def test_an_expert_inside_the_trunk_is_refused_by_every_path(tmp_path, target):
    save_experts(with_references(make_vit()), tmp_path)
    path = tmp_path / "t" / "adapter_config.json"
    path.write_text(json.dumps({**read_json(path), "target_modules": [target]}), encoding="utf-8")
    for load in every_path(tmp_path, make_vit):
        with pytest.raises(
            ValueError, match=rf"names '\S*{target}', a part of the trunk of ViTForImageClassification"
        ):
            load()


# --- PEFT's own loading, into an expert that is there ---


def test_weights_of_another_backbone_are_refused_for_an_expert_that_is_there(tmp_path):
    save_expert(with_references(make_vit(seed=9)), "t", tmp_path / "t")
    model = with_references(make_vit())
    before = expert_tensors(model, "t")
    with pytest.raises(ValueError, match="these weights for expert 't' come from another backbone"):
        model.load_adapter(str(tmp_path / "t"), "t")
    assert list(model.experts) == ["t", "u"]
    assert_same(expert_tensors(model, "t"), before)


def test_a_file_that_is_not_whole_leaves_an_expert_alone():
    model = make_model({"t": ["a", "b"], "u": ["c"]})
    before = expert_tensors(model, "t")
    state = get_peft_model_state_dict(model, adapter_name="t", save_embedding_layers=False)
    state.pop(next(key for key in state if "class_rows" in key))
    with pytest.raises(ValueError, match=r"missing, .*luca_class_rows"):
        set_peft_model_state_dict(model, state, adapter_name="t")
    assert list(model.experts) == ["t", "u"]
    assert_same(expert_tensors(model, "t"), before)
