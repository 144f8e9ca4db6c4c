"""Saving and loading, by every path there is. The Hub itself is not asked."""

import json

import pytest
import torch
from helpers import (
    assert_same,
    expert_tensors,
    files_in,
    make_dinov2,
    make_model,
    make_vit,
    pixels,
    read_json,
)
from peft import AutoPeftModel, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from peft_luca import LucaConfig, load_experts, save_expert, save_experts


TWO = {"zeta": ["a", "b"], "alpha": ["c", "d", "a"]}
NAMES_FIXED = {
    "luca_adapter_down",
    "luca_adapter_up",
    "luca_adapter_norm",
    "luca_calibrator_down",
    "luca_calibrator_up",
    "luca_class_rows",
    "luca_scale",
    "luca_reference_mean",
    "luca_reference_std",
}


def test_a_folder_of_peft_alone(tmp_path):
    model, x = make_model(TWO), pixels()
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(make_vit(), tmp_path / "zeta", adapter_name="zeta")
    loaded.load_adapter(str(tmp_path / "alpha"), "alpha")
    for name in TWO:
        loaded.set_adapter(name)
        model.set_adapter(name)
        assert torch.equal(loaded(x).logits, model(x).logits)
        assert_same(expert_tensors(loaded, name), expert_tensors(model, name))
    assert torch.equal(loaded.route(x).logits, model.route(x).logits)
    assert torch.equal(loaded.route(x).expert, model.route(x).expert)
    assert loaded.experts == model.experts


def test_names_of_tensors_are_those_of_the_design(tmp_path):
    save_expert(make_model({"t": ["a", "b"]}), "t", tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {part for key in tensors for part in key.split(".") if part.startswith("luca_")} == NAMES_FIXED
    assert not [key for key in tensors if ".t" in key]
    assert files_in(tmp_path) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize(
    "config",
    [
        {"arrangement": "parallel"},
        {"arrangement": "adapter", "norm_position": "before_residual"},
        {"arrangement": "calibrator", "positive_scale": False},
        {"head": "linear"},
        {"reference": False, "reduction": 4},
        {"adapter_width": 3, "calibrator_width": 5},
    ],
)
@pytest.mark.parametrize("make", [make_vit, make_dinov2])
def test_every_kind_of_expert_comes_back(tmp_path, config, make):
    model, x = make_model({"t": ["a", "b"]}, base=make(), **config), pixels()
    save_expert(model, "t", tmp_path / "t")
    loaded = load_experts(make(), tmp_path / "t")
    assert_same(expert_tensors(loaded, "t"), expert_tensors(model, "t"))
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_auto_peft_model(tmp_path):
    make_vit().save_pretrained(tmp_path / "base")
    base = type(make_vit()).from_pretrained(tmp_path / "base")
    model, x = make_model({"default": ["a", "b"]}, base=base), pixels()
    save_expert(model, "default", tmp_path / "expert")
    loaded = AutoPeftModel.from_pretrained(tmp_path / "expert")
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert loaded.config.id2label == {0: "a", 1: "b"}


def test_a_collection_comes_back_with_its_order_and_its_router(tmp_path):
    model, x = make_model(TWO), pixels()
    model.set_router("entropy", temperature=3.0)
    save_experts(model, tmp_path / "all")
    loaded = load_experts(make_vit(), tmp_path / "all")
    assert list(loaded.experts) == ["zeta", "alpha"]
    assert loaded.classes == model.classes
    assert loaded.base_model.layer.router is model.base_model.layer.router
    assert loaded.base_model.layer.router_options == {"temperature": 3.0}
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert loaded.config.id2label == model.config.id2label
    model.set_router(None)
    save_experts(model, tmp_path / "all")
    assert load_experts(make_vit(), tmp_path / "all").base_model.layer.router is None


def test_manifest(tmp_path):
    model = make_model(TWO)
    model.set_router("entropy")
    save_experts(model, tmp_path)
    assert read_json(tmp_path / "experts.json") == {
        "format": 1,
        "experts": [{"name": "zeta", "classes": ["a", "b"]}, {"name": "alpha", "classes": ["c", "d", "a"]}],
        "router": {"name": "entropy", "options": {}},
        "fingerprint": model.base_model.backbone.fingerprint,
    }
    assert files_in(tmp_path) == sorted(
        ["experts.json"]
        + [f"{name}/{file}" for name in TWO for file in ("adapter_config.json", "adapter_model.safetensors")]
    )


def test_saved_and_loaded_and_saved_again_is_the_same(tmp_path):
    model = make_model(TWO)
    save_experts(model, tmp_path / "first")
    save_experts(load_experts(make_vit(), tmp_path / "first"), tmp_path / "second")
    for file in files_in(tmp_path / "first"):
        first, second = (tmp_path / place / file for place in ("first", "second"))
        if file.endswith("adapter_config.json"):
            same = [{**read_json(path), "inference_mode": None} for path in (first, second)]
            assert same[0] == same[1]
        else:
            assert first.read_bytes() == second.read_bytes()


def test_experts_of_two_owners(tmp_path):
    first, second = make_model({"t": ["a", "b"]}, seed=1), make_model({"t": ["c"]}, seed=2)
    save_expert(first, "t", tmp_path / "lab-a" / "vit.birds")
    save_experts(second, tmp_path / "lab-b")
    model = load_experts(make_vit(), [tmp_path / "lab-a" / "vit.birds", tmp_path / "lab-b"])
    assert model.experts == {"vit-birds": ("a", "b"), "t": ("c",)}
    model = load_experts(make_vit(), {"birds": tmp_path / "lab-a" / "vit.birds"})
    assert model.experts == {"birds": ("a", "b")}
    before = expert_tensors(model, "birds")
    model = load_experts(model, tmp_path / "lab-b")
    assert list(model.experts) == ["birds", "t"]
    assert_same(expert_tensors(model, "birds"), before)


def test_loading_is_for_answering_and_trainable_on_request(tmp_path):
    save_experts(make_model(TWO), tmp_path)
    loaded = load_experts(make_vit(), tmp_path)
    assert not any(p.requires_grad for p in loaded.parameters())
    trainable = PeftModel.from_pretrained(make_vit(), tmp_path / "zeta", is_trainable=True)
    assert any(p.requires_grad for p in trainable.parameters())


def test_more_than_one_expert_of_a_name_is_refused(tmp_path):
    save_expert(make_model({"t": ["a"]}), "t", tmp_path / "one" / "t")
    save_expert(make_model({"t": ["b"]}), "t", tmp_path / "two" / "t")
    base = make_vit()
    with pytest.raises(ValueError, match=r"more than one expert is called 't'. Give them other names"):
        load_experts(base, [tmp_path / "one" / "t", tmp_path / "two" / "t"])
    assert not [name for name, _ in base.named_modules() if "luca" in name]
    with pytest.raises(ValueError, match="more than one expert is called 't'"):
        load_experts(make_model({"t": ["a"]}), tmp_path / "one" / "t")


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("not json", "is not a manifest of experts"),
        ("[]", "is not a manifest of experts"),
        ('{"format": 1}', "is not a manifest of experts"),
        ('{"format": 2, "experts": [], "router": null}', "has format 2, and this version of peft_luca reads 1"),
        ('{"format": 1, "experts": [{"name": "../x"}], "router": null}', r"names an expert '\.\./x'"),
        ('{"format": 1, "experts": [{"name": 3}], "router": null}', "names an expert 3"),
        ('{"format": 1, "experts": [{"name": "gone"}], "router": null}', "has no adapter_config.json"),
        ('{"format": 1, "experts": [], "router": null}', "no experts|empty"),
    ],
)
def test_a_bad_manifest_is_refused_in_words(tmp_path, manifest, message):
    (tmp_path / "experts.json").write_text(manifest, encoding="utf-8")
    base = make_vit()
    with pytest.raises(ValueError, match=message):
        load_experts(base, tmp_path)
    assert not [name for name, _ in base.named_modules() if "luca" in name]


@pytest.mark.parametrize(
    ("name", "match"), [("guess", "there is no router called 'guess'"), ("oracle", "router is 'oracle'")]
)
def test_an_unknown_router_in_a_manifest_is_refused_before_anything_is_loaded(tmp_path, name, match):
    save_experts(make_model(TWO), tmp_path)
    manifest = read_json(tmp_path / "experts.json")
    manifest["router"] = {"name": name, "options": {}}
    (tmp_path / "experts.json").write_text(json.dumps(manifest), encoding="utf-8")
    base = make_vit()
    with pytest.raises(ValueError, match=match):
        load_experts(base, tmp_path)
    assert not [name for name, _ in base.named_modules() if "luca" in name]


def test_what_is_not_an_expert_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is not an expert and not a collection: it has no adapter_config.json"):
        load_experts(make_vit(), tmp_path / "empty")
    with pytest.raises(ValueError, match="the list is empty"):
        load_experts(make_vit(), [])
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"holds an adapter of type .*LORA.*, not a LuCA expert"):
        load_experts(make_vit(), tmp_path / "lora")


def test_a_router_of_ones_own_cannot_be_saved_and_nothing_is_written(tmp_path):
    model = make_model(TWO)
    model.set_router(lambda scores: scores.amax(dim=2))
    with pytest.raises(ValueError, match="the router is a function of your own, which no file can hold"):
        save_experts(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_expert_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match=r"no expert 'x' to save. The model has zeta, alpha"):
        save_expert(make_model(TWO), "x", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    model = make_model({"t": ["a", "b"]})
    save_expert(model, "t", tmp_path / "out")
    before = {file: (tmp_path / "out" / file).read_bytes() for file in files_in(tmp_path / "out")}

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(PeftModel, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        save_expert(model, "t", tmp_path / "out")
    assert {file: (tmp_path / "out" / file).read_bytes() for file in files_in(tmp_path / "out")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_class_names_of_any_language(tmp_path):
    classes = ["café", "狗", "a b/c", "ß", "🙂"]
    save_experts(make_model({"t": classes}), tmp_path)
    assert load_experts(make_vit(), tmp_path).classes == tuple(classes)


def test_experts_named_as_parts_of_other_names(tmp_path):
    """PEFT finds an adapter's tensors by its name: names within names must not take each other's."""
    experts = {"e1": ["a"], "e11": ["b"], "e1-1": ["c"], "default": ["d"], "task_1": ["e"], "task": ["f"], "u": ["g"]}
    model, x = make_model(experts), pixels()
    save_experts(model, tmp_path)
    loaded = load_experts(make_vit(), tmp_path)
    assert list(loaded.experts) == list(experts)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert torch.equal(loaded.route(x).logits, model.route(x).logits)


def test_weights_of_another_shape_are_refused(tmp_path):
    save_expert(make_model({"t": ["a", "b"]}), "t", tmp_path / "t")
    config = read_json(tmp_path / "t" / "adapter_config.json")
    (tmp_path / "t" / "adapter_config.json").write_text(json.dumps({**config, "classes": ["a"]}), encoding="utf-8")
    with pytest.raises((ValueError, RuntimeError), match=r"size mismatch|shape"):
        load_experts(make_vit(), tmp_path / "t")


def test_an_expert_with_a_missing_tensor_is_refused(tmp_path):
    save_expert(make_model({"t": ["a", "b"]}), "t", tmp_path / "t")
    path = tmp_path / "t" / "adapter_model.safetensors"
    tensors = load_file(path)
    removed = next(key for key in tensors if "class_rows" in key)
    save_file({key: value for key, value in tensors.items() if key != removed}, path)
    with pytest.raises((ValueError, RuntimeError), match=r"luca_class_rows|missing"):
        load_experts(make_vit(), tmp_path / "t")


def test_a_fresh_expert_is_saved_with_a_config_that_loads_without_classes(tmp_path):
    model = get_peft_model(make_vit(), LucaConfig())
    save_expert(model, "default", tmp_path)
    assert LucaConfig.from_pretrained(str(tmp_path)).classes == [f"base {i}" for i in range(5)]
