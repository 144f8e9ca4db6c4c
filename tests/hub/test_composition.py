"""Experts that are put together by load_experts: the same as by PEFT, guarded by the fingerprint, in any number."""

import json
import re
import time

import pytest
import torch
from helpers import assert_same, expert_tensors, make_model, make_vit, pixels, read_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import ViTConfig, ViTForImageClassification

from peft_luca import LucaConfig, load_expert, load_experts, save_expert, save_experts


TWO = {"zeta": ["a", "b"], "alpha": ["c", "d", "a"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("head", ["cosine", "linear"])
@pytest.mark.filterwarnings("ignore:expert .* was trained on the backbone")
def test_the_same_as_by_peft(tmp_path, dtype, head):
    model = make_model(TWO, head=head)
    for name in TWO:
        model.base_model.layer.luca_reference_std[name].fill_(1)
        model.base_model.layer.luca_reference_mean[name].zero_()
        model.compute_reference(name)
    save_experts(model, tmp_path)
    by_peft = PeftModel.from_pretrained(make_vit().to(dtype), tmp_path / "zeta", adapter_name="zeta")
    by_peft.load_adapter(str(tmp_path / "alpha"), "alpha")
    ours = load_experts(make_vit().to(dtype), tmp_path)
    assert_same(dict(ours.state_dict()), dict(by_peft.state_dict()))
    for (name, mine), theirs in zip(ours.state_dict().items(), by_peft.state_dict().values(), strict=True):
        assert mine.dtype == theirs.dtype, name
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert not any(module.training for module in ours.modules())
    assert [type(m) for m in ours.modules()] == [type(m) for m in by_peft.modules()]
    assert ours.active_adapters == by_peft.active_adapters
    assert ours.peft_config == by_peft.peft_config
    assert ours.config.id2label == by_peft.config.id2label
    for name in TWO:
        ours.set_adapter(name)
        by_peft.set_adapter(name)
        x = pixels().to(dtype)
        assert torch.equal(ours(x).logits, by_peft(x).logits)
    ours.delete_adapter("zeta")
    by_peft.delete_adapter("zeta")
    assert_same(dict(ours.state_dict()), dict(by_peft.state_dict()))


def test_an_expert_that_was_loaded_can_be_trained_and_saved(tmp_path):
    save_experts(make_model(TWO), tmp_path / "all")
    loaded = load_experts(make_vit(), tmp_path / "all")
    loaded.set_adapter("alpha")
    assert sum(p.requires_grad for p in loaded.parameters()) > 0
    loaded(pixels(), labels=torch.zeros(len(pixels()), dtype=torch.long)).loss.backward()
    save_expert(loaded, "alpha", tmp_path / "again")
    assert_same(
        expert_tensors(load_expert(make_vit(), tmp_path / "again", "alpha"), "alpha"), expert_tensors(loaded, "alpha")
    )


def test_an_expert_of_another_backbone_is_refused_by_name_and_the_model_left_as_it_was(tmp_path):
    save_expert(make_model({"t": ["a"]}), "t", tmp_path / "own")
    other = make_model({"t": ["b"]}, base=make_vit(seed=1))
    save_expert(other, "t", tmp_path / "foreign")
    running = load_expert(make_vit(), tmp_path / "own")
    running.set_router("entropy")
    before = dict(running.state_dict())
    sources = {"good": tmp_path / "own", "bad": tmp_path / "foreign"}
    with pytest.raises(ValueError, match=r"expert 'bad' was trained on the backbone [0-9a-f]{12} .* but this one is"):
        load_experts(running, sources)
    assert list(running.experts) == ["own"]
    assert_same(dict(running.state_dict()), before)
    assert running.base_model.layer.router is not None
    base = make_vit()
    with pytest.raises(ValueError, match="expert 'bad' was trained on the backbone"):
        load_experts(base, sources)
    assert not [name for name, _ in base.named_modules() if "luca" in name]
    assert load_experts(base, sources, allow_mismatch=True).experts == {"good": ("a",), "bad": ("b",)}


def test_an_expert_without_a_fingerprint_is_refused_unless_told_otherwise(tmp_path):
    save_expert(make_model({"t": ["a"]}), "t", tmp_path / "t")
    config = read_json(tmp_path / "t" / "adapter_config.json")
    (tmp_path / "t" / "adapter_config.json").write_text(json.dumps({**config, "fingerprint": None}), encoding="utf-8")
    with pytest.raises(ValueError, match="expert 't' does not say which backbone it was trained on"):
        load_expert(make_vit(), tmp_path / "t")
    assert list(load_expert(make_vit(), tmp_path / "t", allow_mismatch=True).experts) == ["t"]


def test_another_revision_of_the_backbone_is_said_with_its_distance_or_refused(tmp_path):
    """Weights that moved a little, as from one revision to the next, and weights that moved a lot."""
    model = make_model({"t": ["a", "b"]})
    model.base_model.layer.luca_reference_mean["t"].zero_()
    model.base_model.layer.luca_reference_std["t"].fill_(1)
    model.compute_reference("t")
    save_expert(model, "t", tmp_path)

    def revision(share):
        base = make_vit()
        with torch.no_grad():
            for parameter in base.vit.parameters():
                parameter.mul_(1 + share)
        return base

    with pytest.warns(UserWarning, match=r"is only [0-9.e-]+ deviations away, as with another dtype") as caught:
        loaded = load_expert(revision(1e-4), tmp_path)
    said = " ".join(str(warning.message) for warning in caught)
    distance = float(re.search(r"is only (\S+) deviations", said)[1])
    assert 0 < distance < 0.05
    assert len(loaded.experts) == 1
    with pytest.raises(ValueError, match=r"was trained on the backbone .* deviations away, more than 0.05"):
        load_expert(revision(0.5), tmp_path)


def test_a_copy_of_the_backbone_in_half_precision_is_said_with_its_distance(tmp_path):
    model = make_model({"t": ["a"]})
    model.base_model.layer.luca_reference_std["t"].fill_(1)
    model.base_model.layer.luca_reference_mean["t"].zero_()
    model.compute_reference("t")
    save_expert(model, "t", tmp_path / "t")
    with pytest.warns(UserWarning, match=r"expert 't' was trained on .* is only 0\.0\d+ deviations away"):
        load_expert(make_vit().bfloat16(), tmp_path / "t")


LABELS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)


@settings(max_examples=10, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(experts=st.lists(LABELS, min_size=2, max_size=4), order=st.randoms(use_true_random=False))
def test_the_answer_does_not_depend_on_the_order_of_loading(tmp_path_factory, experts, order):
    place = tmp_path_factory.mktemp("order")
    named = {f"e{i}": classes for i, classes in enumerate(experts)}
    save_experts(make_model(named), place)
    shuffled = list(named)
    order.shuffle(shuffled)
    one = load_experts(make_vit(), {name: place / name for name in named})
    two = load_experts(make_vit(), {name: place / name for name in shuffled})
    for model in (one, two):
        model.set_router("entropy")
    assert set(one.classes) == set(two.classes) == {label for labels in experts for label in labels}
    x = pixels(8)
    routed, again = one.route(x), two.route(x)
    columns = [two.classes.index(name) for name in one.classes]
    torch.testing.assert_close(again.logits[:, columns], routed.logits)
    assert [list(named)[i] for i in routed.expert] == [shuffled[i] for i in again.expert]


@pytest.mark.slow
def test_a_thousand_experts_load_within_a_minute(tmp_path):
    config = ViTConfig(hidden_size=768, num_hidden_layers=1, intermediate_size=64, image_size=32, patch_size=16)
    torch.manual_seed(0)
    base = ViTForImageClassification(config).eval()
    model = make_model({"e0": LucaConfig(classes=["c"] * 1 + [f"c{i}" for i in range(9)])}, base=base)
    save_experts(model, tmp_path)
    first = read_json(tmp_path / "e0" / "adapter_config.json")
    weights = (tmp_path / "e0" / "adapter_model.safetensors").read_bytes()
    for i in range(1, 1000):
        (tmp_path / f"e{i}").mkdir()
        own = {**first, "classes": [f"{i} {j}" for j in range(10)]}
        (tmp_path / f"e{i}" / "adapter_config.json").write_text(json.dumps(own), encoding="utf-8")
        (tmp_path / f"e{i}" / "adapter_model.safetensors").write_bytes(weights)
    manifest = read_json(tmp_path / "experts.json")
    manifest["experts"] = [{"name": f"e{i}", "classes": []} for i in range(1000)]
    (tmp_path / "experts.json").write_text(json.dumps(manifest), encoding="utf-8")
    base = model.unload()
    started = time.perf_counter()
    loaded = load_experts(base, tmp_path)
    assert time.perf_counter() - started < 60
    assert len(loaded.experts) == 1000
    assert len(loaded.classes) == 10_000
