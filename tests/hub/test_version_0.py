"""Files written by peft_luca 0.1, in tests/version_0, load with the logits that they had then."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from helpers import read_json
from peft import PeftModel
from safetensors.torch import load_file
from transformers import ViTForImageClassification

from peft_luca import InvalidExpertError, load_expert, load_experts
from peft_luca.utils import write_json


FILES = Path(__file__).parents[1] / "version_0"
EXPECTED = load_file(FILES / "expected.safetensors")
COLLECTIONS = {"entropy": "entropy", "gaussian": "gaussian", "prototype": "lda"}  # folder -> name of the router now


def backbone():
    return ViTForImageClassification.from_pretrained(FILES / "backbone").eval()


def assert_logits(model, name):
    with torch.no_grad():
        logits = model(EXPECTED["pixel_values"]).logits
    torch.testing.assert_close(logits, EXPECTED[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("folder", COLLECTIONS)
def test_a_collection_with_its_router(folder):
    model = load_experts(backbone(), FILES / folder)
    assert model.experts == {"zeta": ("a", "b"), "alpha": ("c", "d", "a")}
    assert model.router.name == COLLECTIONS[folder]
    assert_logits(model, folder)


def test_options_of_a_router():
    assert load_experts(backbone(), FILES / "entropy").router.to_dict()["options"] == {"temperature": 2.0}
    options = load_experts(backbone(), FILES / "gaussian").router.to_dict()["options"]
    assert options == {"temperature": 2.0, "unknown_below": 0.25}


def test_another_backbone_of_the_same_tensors_is_refused():
    """Their fingerprint knows neither the tensors' places nor the settings: the reference decides."""
    base = ViTForImageClassification.from_pretrained(FILES / "backbone", num_attention_heads=1)
    for load in (load_experts, load_expert, PeftModel.from_pretrained):
        with pytest.raises(ValueError, match="with its tensors in other places, or other settings"):
            load(base, FILES / "single")


@pytest.mark.parametrize("name", ["zeta", "alpha"])
def test_an_expert_by_every_path(name):
    place = FILES / "entropy" / name
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # which nobody who loads it could mend
        for model in (
            load_experts(backbone(), place),
            load_expert(backbone(), FILES / "entropy", name),
            PeftModel.from_pretrained(backbone(), place),
        ):
            assert_logits(model, f"entropy/{name}")
    assert_logits(load_expert(backbone(), FILES / "single"), "single")


def test_a_linear_head_is_refused_with_what_to_do():
    base = backbone()
    for load in (load_experts, load_expert, PeftModel.from_pretrained):
        with pytest.raises(InvalidExpertError, match=r"head='linear'.*Train it again with this version, or use"):
            load(base, FILES / "linear")
        assert not [name for name, _ in base.named_modules() if "luca" in name]


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (None, r"'hybrid'.*was removed. Use set_router\('gaussian'\).*load_expert\(model, source, 'zeta'\)"),
        ({"name": "margin", "options": {}}, r"was removed. Use set_router\('entropy'\)"),
        ({"name": "max_prob", "options": {"temperature": 2.0}}, r"was removed. Use set_router\('entropy'\)"),
        ({"name": "entropy", "options": {"candidates": 3}}, "got candidates. Without `candidates` every expert is"),
    ],
)  # fmt: skip
def test_a_removed_router_is_refused_and_its_experts_load(tmp_path, router, message):
    folder = shutil.copytree(FILES / "hybrid", tmp_path / "collection")
    if router is not None:
        write_json(folder / "experts.json", {**read_json(folder / "experts.json"), "router": router})
    base = backbone()
    with pytest.raises(InvalidExpertError, match=message):
        load_experts(base, folder)
    assert not [name for name, _ in base.named_modules() if "luca" in name]
    model = load_experts(base, [folder / "zeta", folder / "alpha"])
    model = load_expert(load_expert(backbone(), folder, "zeta"), folder, "alpha")
    model.set_router("gaussian", temperature=2.0)
    assert_logits(model, "gaussian")
