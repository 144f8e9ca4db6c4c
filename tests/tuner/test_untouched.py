"""What is refused leaves nothing behind: no expert, no label, nothing frozen that was not, and no other mode."""

import copy
import json
import shutil

import pytest
import torch
from helpers import make_model, make_vit
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError

from peft_luca import InvalidExpertError, LucaConfig, load_expert, load_experts, save_expert, save_experts


def state(model):
    """All that can be seen of a model."""
    return {
        "modules": {name: (id(module), module.training) for name, module in model.named_modules()},
        "parameters": {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()},
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "config": copy.deepcopy(model.config.to_dict()),
        "attributes": {name: value for name, value in vars(model).items() if name != "_modules"},
    }


def assert_same_state(model, before):
    after = state(model)
    tensors, others = before.pop("tensors"), after.pop("tensors")
    assert after == before
    assert all(torch.equal(others[name], tensor) for name, tensor in tensors.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Experts that go onto `make_vit()`, and such as do not."""
    place = tmp_path_factory.mktemp("experts")
    save_expert(make_model({"t": ["a", "b"]}), "t", place / "good")
    save_expert(make_model({"t": ["a", "b"]}, base=make_vit(seed=3)), "t", place / "other")
    save_experts(make_model({"t": ["a", "b"]}), place / "router")
    manifest = json.loads((place / "router" / "experts.json").read_text(encoding="utf-8"))
    manifest["router"] = {"name": "gaussian", "options": {}}
    (place / "router" / "experts.json").write_text(json.dumps(manifest), encoding="utf-8")
    return place


FAILURES = {
    "load_expert": lambda model, folder: load_expert(model, folder / "other"),
    "the second of load_experts": lambda model, folder: load_experts(
        model, {"one": folder / "good", "two": folder / "other"}
    ),
    "a router that lacks statistics": lambda model, folder: load_experts(model, folder / "router"),
    "PeftModel.from_pretrained": lambda model, folder: (
        model.load_adapter(folder / "other", "new")
        if isinstance(model, PeftModel)
        else PeftModel.from_pretrained(model, folder / "other")
    ),
    "an expert that cannot be": lambda model, folder: (
        model.add_adapter("new", LucaConfig(classes=["a"], head="linear"))
        if isinstance(model, PeftModel)
        else get_peft_model(model, LucaConfig(classes=["a"], head="linear"))
    ),
}


def bare(train):
    model = make_vit().train(train)
    model.vit.embeddings.cls_token.requires_grad = False  # neither all nor none
    return model


def with_lora(train):
    lora = get_peft_model(make_vit(), LoraConfig(target_modules=["q_proj"]))
    return lora.get_base_model().train(train)


def running(train):
    return get_peft_model(make_vit(), LucaConfig(classes=["x", "y"]), adapter_name="mine").train(train)


def routed(train):
    model = make_model({"mine": ["x", "y"], "yours": ["z"]})
    model.set_router("entropy", temperature=2.0)
    return model.train(train)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("make", [bare, with_lora, running, routed])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_model_is_as_it_was(folder, make, failure, train):
    model = make(train)
    before = state(model)
    with pytest.raises(ValueError, match=r"was trained on the backbone|came without|at least two classes"):
        FAILURES[failure](model, folder)
    assert_same_state(model, before)
    if isinstance(model, PeftModel):
        router = model.base_model.layer.router, model.base_model.layer.router_options
        assert router == (None, {}) if make is running else router[1] == {"temperature": 2.0}


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter:UserWarning")
def test_on_the_meta_device_too(folder):
    """PEFT makes the weights there with low_cpu_mem_usage=True, where none can be looked at."""
    model = make_vit().train()
    before = state(model)
    with pytest.raises(ValueError, match="was trained on the backbone"):
        PeftModel.from_pretrained(model, folder / "other", low_cpu_mem_usage=True)
    assert_same_state(model, before)
    loaded = PeftModel.from_pretrained(make_vit(), folder / "good", low_cpu_mem_usage=True)
    loaded.load_adapter(folder / "good", "second", low_cpu_mem_usage=True)
    rows = loaded.base_model.layer.luca_class_rows
    assert torch.equal(rows["default"], rows["second"])


def test_a_model_that_was_refused_an_expert_takes_a_good_one(folder):
    model = make_vit().train()
    with pytest.raises(ValueError, match="was trained on the backbone"):
        load_expert(model, folder / "other")
    loaded = load_expert(model, folder / "good")
    assert torch.equal(
        loaded(torch.ones(1, 3, 16, 16)).logits,
        load_expert(make_vit(), folder / "good")(torch.ones(1, 3, 16, 16)).logits,
    )
    assert not loaded.training


@pytest.mark.parametrize("content", [None, b"x" * 100])
def test_pefts_own_reading_of_a_broken_file_leaves_the_base_wrapped(folder, tmp_path, content):
    """PEFT wraps the base before it looks at the weights, and tells the tuner nothing: SECURITY.md says so."""
    shutil.copytree(folder / "good", tmp_path / "broken")
    (tmp_path / "broken" / "adapter_model.safetensors").unlink()
    if content is not None:
        (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(content)
    model = make_vit()
    with pytest.raises((OSError, ValueError, SafetensorError)):
        PeftModel.from_pretrained(model, tmp_path / "broken")
    assert [name for name, _ in model.named_modules() if "luca" in name]
    for load in (load_expert, load_experts):
        clean = make_vit().train()
        before = state(clean)
        with pytest.raises(InvalidExpertError):
            load(clean, tmp_path / "broken")
        assert_same_state(clean, before)
