"""No expert's name loses a tensor in silence: it is refused when the expert is added, or every tensor comes back."""

import tempfile
from pathlib import Path

import pytest
import torch
from helpers import ANIMALS, SKIES, expert_config, logits, tiny_vit, weights, with_experts
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from peft_luca import LucaLayer
from peft_luca.tuner.model import LucaModel


TENSORS = {
    "luca_adapter_down.weight",
    "luca_adapter_down.bias",
    "luca_adapter_up.weight",
    "luca_adapter_up.bias",
    "luca_adapter_norm.weight",
    "luca_adapter_norm.bias",
    "luca_calibrator_down.weight",
    "luca_calibrator_up.weight",
    "luca_class_rows",
    "luca_scale",
    "luca_reference_mean",
    "luca_reference_std",
    "luca_whitening",
}

# Parts of the tensors' own names, of PEFT's and of the modules', and what a path or an attribute could make of a name.
TRICKY = sorted(
    {part for name, _ in tiny_vit().named_modules() for part in name.split(".")}
    | {part for name in TENSORS for part in name.split(".")}
    | set(dir(torch.nn.ModuleDict()))
    | {"base_model", "model", "base_layer", "default", "adapter_config", "adapter_model", "README", "safetensors"}
    | {
        "",
        ".",
        "..",
        "a.b",
        "a/b",
        "a\\b",
        "-",
        "_",
        "a" * 128,
        "a" * 129,
        "é",
        "名",
        " ",
        "a b",
        "a\n",
        "\0",
        "7",
        "00",
    }
)
names = st.one_of(
    st.sampled_from(TRICKY),
    st.text(max_size=12),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True),
)


def added(first, second):
    """A model with experts of two names, or nothing if a name was refused."""
    try:
        model = with_experts(**{first: ANIMALS})
    except ValueError as error:
        assert "cannot be called" in str(error)  # noqa: PT017
        return None
    before = weights(model)
    try:
        model.add_adapter(second, expert_config(SKIES))
    except ValueError as error:
        assert "cannot be called" in str(error) or "already exists" in str(error)  # noqa: PT017
        assert weights(model).keys() == before.keys()
        assert list(model.peft_config) == [first]
        return None
    return model


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(first=names, second=names)
@example("default", "0")
@example("b", "bias2")
@example("cat", "cat2")
def test_every_tensor_comes_back_or_the_name_is_refused(first, second):
    model = added(first, second)
    if model is None:
        return
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, save_embedding_layers=False)
        folders = {name: Path(directory) / ("" if name == "default" else name) for name in (first, second)}
        for folder in folders.values():
            keys = load_file(folder / "adapter_model.safetensors").keys()
            assert {key.removeprefix("base_model.model.classifier.") for key in keys} == TENSORS
        loaded = PeftModel.from_pretrained(tiny_vit(), str(folders[first]), adapter_name=first)
        loaded.load_adapter(str(folders[second]), second)
        for name in (first, second):
            model.set_adapter(name)
            loaded.set_adapter(name)
            torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
        model.set_adapter(first)
        model.delete_adapter(second)
        assert weights(model).keys() == weights(with_experts(**{first: ANIMALS})).keys()


def test_usual_names_are_allowed():
    for name in ("default", "task-1", "birds_2024", "0", "10", "A", "vit-birds", "CUB200"):
        assert list(with_experts(**{name: ANIMALS}).experts) == [name]


@pytest.mark.parametrize(
    "name",
    ["classifier", "weight", "bias", "model", "vit", "luca_scale", "keys", "training", "a.b", "a/b", "", "a" * 129],
)
def test_refused_with_the_rule_in_the_message(name):
    base = tiny_vit()
    with pytest.raises(ValueError, match=r"cannot be called .*Names are made of letters, digits, '_' and '-'"):
        with_experts(base, **{name: ANIMALS})
    assert not any(isinstance(module, LucaLayer) for module in base.modules())  # the base is as it was


def test_names_that_differ_in_capitals_alone_are_refused():
    model = with_experts(birds=ANIMALS)
    with pytest.raises(ValueError, match="cannot be called 'Birds', for there is one called 'birds'"):
        model.add_adapter("Birds", expert_config(SKIES))


def test_a_number_is_refused_where_it_is_on_the_way_to_the_head():
    base = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.Linear(16, 3))
    config = expert_config(target_modules=["2"])
    with pytest.raises(ValueError, match="cannot be called '2'"):
        get_peft_model(base, config, adapter_name="2")
    assert list(get_peft_model(base, config, adapter_name="1").experts) == ["1"]


def test_saving_that_would_lose_a_tensor_is_refused():
    model = with_experts(birds=ANIMALS)
    state = model.state_dict()
    del state["base_model.model.classifier.luca_class_rows.birds"]
    with pytest.raises(KeyError, match=r"base_model\.model\.classifier\.luca_class_rows\.birds"):
        LucaModel._get_adapter_state_dict(model, model.peft_config["birds"], "birds", state, [])
