"""A refused expert leaves the model exactly as it was, since everything is checked before anything is changed."""

import copy
import json

import pytest
import torch
from helpers import make_model, make_vit
from peft import LoraConfig, PeftModel, get_peft_model

from peft_luca import LucaConfig, load_expert, load_experts, save_expert, save_experts


def state(model):
    """All that can be seen of a model."""
    return {
        "modules": {name: (id(module), module.training) for name, module in model.named_modules()},
        "parameters": {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()},
        "tensors": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "config": copy.deepcopy(model.config.to_dict()),
        "attributes": {name: value for name, value in vars(model).items() if name != "_modules"},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Experts that fit `make_vit()`, and some that do not."""
    place = tmp_path_factory.mktemp("experts")
    save_expert(make_model({"t": ["a", "b"]}), "t", place / "good")
    save_expert(make_model({"t": ["a", "b"]}, base=make_vit(seed=3)), "t", place / "other")
    save_experts(make_model({"t": ["a", "b"]}), place / "router")
    manifest = json.loads((place / "router" / "experts.json").read_text(encoding="utf-8"))
    manifest["router"] = {"name": "gaussian", "options": {}}
    (place / "router" / "experts.json").write_text(json.dumps(manifest), encoding="utf-8")
    return place


FAILURES = {
    "another backbone": lambda model, folder: load_expert(model, folder / "other"),
    "the second of two": lambda model, folder: load_experts(model, {"one": folder / "good", "two": folder / "other"}),
    "a router that lacks statistics": lambda model, folder: load_experts(model, folder / "router"),
    "a reduction that is too large": lambda model, folder: (
        model.add_adapter("new", LucaConfig(classes=["a"], reduction=64))
        if isinstance(model, PeftModel)
        else get_peft_model(model, LucaConfig(classes=["a"], reduction=64))
    ),
}


def bare():
    model = make_vit().train()
    model.vit.embeddings.cls_token.requires_grad = False  # neither all nor none
    return model


def with_lora():
    return get_peft_model(make_vit(), LoraConfig(target_modules=["q_proj"])).get_base_model().train()


def routed():
    model = make_model({"mine": ["x", "y"], "yours": ["z"]})
    model.set_router("entropy", temperature=2.0)
    return model.train()


@pytest.mark.parametrize("make", [bare, with_lora, routed])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_refused_expert_leaves_the_model_as_it_was(folder, make, failure):
    model = make()
    before = state(model)
    router = model.router if isinstance(model, PeftModel) else None
    with pytest.raises(ValueError, match=r"was trained on the backbone|statistics|reduction is 64"):
        FAILURES[failure](model, folder)
    assert state(model) == before
    assert not isinstance(model, PeftModel) or (model.router is router and list(model.experts) == ["mine", "yours"])
    if make is bare:  # and a good one can be loaded
        loaded = load_expert(model, folder / "good")
        assert not loaded.training
        x = torch.ones(1, 3, 16, 16)
        assert torch.equal(loaded(x).logits, load_expert(make_vit(), folder / "good")(x).logits)


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter:UserWarning")
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_pefts_own_loading_wraps_the_base_before_it_reads_the_weights(folder, low_cpu_mem_usage):
    """PEFT makes the model first and asks the tuner about the weights afterwards: SECURITY.md says so."""
    base = make_vit()
    with pytest.raises(ValueError, match="was trained on the backbone"):
        PeftModel.from_pretrained(base, folder / "other", low_cpu_mem_usage=low_cpu_mem_usage)
    assert [name for name, _ in base.named_modules() if "luca" in name]
    model = make_model({"mine": ["x", "y"]})
    x = torch.ones(1, 3, 16, 16)
    before = model(x).logits
    with pytest.raises(ValueError, match="was trained on the backbone"):
        model.load_adapter(folder / "other", "new", low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(model(x).logits, before)
    assert list(model.experts) == ["mine"]
