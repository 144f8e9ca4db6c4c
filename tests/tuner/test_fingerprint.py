"""Which backbone an expert belongs to, and the reference pictures."""

import hashlib
import re

import numpy as np
import pytest
import torch
from helpers import assert_same, expert_tensors, make_dinov2, make_model, make_vit, pixels, trunk_tensors
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from peft_luca import LucaConfig, draw_reference_pictures, load_experts, save_expert, save_experts
from peft_luca.tuner.backbone import BACKBONE_TOLERANCE, fingerprint, reference_distance


def trained(base):
    model = make_model({"t": ["a", "b"], "u": ["c"]}, base=base)
    layer = model.base_model.layer
    for name in "tu":
        layer.luca_reference_mean[name].zero_()
        layer.luca_reference_std[name].fill_(1)
        model.compute_reference(name)
    return model


# --- the fingerprint ---


def test_fingerprint_is_the_digest_of_the_sorted_digests():
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(3), torch.ones(2).bfloat16()]
    digests = sorted(
        hashlib.sha256(header.encode() + content).digest()
        for header, content in (
            ("torch.float32 (2, 3) ", np.arange(6, dtype="<f4").tobytes()),
            ("torch.int64 () ", np.array(3, dtype="<i8").tobytes()),
            ("torch.bfloat16 (2,) ", bytes.fromhex("803f803f")),
        )
    )
    assert fingerprint(tensors) == hashlib.sha256(b"".join(digests)).hexdigest()
    assert fingerprint(tensors[::-1]) == fingerprint(tensors)
    assert fingerprint([tensors[0].T.contiguous().T, *tensors[1:]]) == fingerprint(tensors)  # strides do not count
    assert fingerprint([tensors[0].reshape(3, 2), *tensors[1:]]) != fingerprint(tensors)


def test_fingerprint_is_of_the_trunk_alone_and_not_of_head_or_experts():
    first = make_model({"t": ["a", "b"]}, base=make_vit(seed=0, num_labels=5))
    found = first.base_model.backbone.fingerprint
    assert re.fullmatch("[0-9a-f]{64}", found)
    base = make_vit(seed=0, num_labels=9)
    base.load_state_dict({k: v for k, v in trunk_tensors(first).items() if "classifier" not in k}, strict=False)
    second = make_model({"x": ["a", "b", "c"], "y": ["d"]}, base=base)
    assert second.base_model.backbone.fingerprint == found
    assert second.peft_config["x"].fingerprint == second.peft_config["y"].fingerprint == found
    assert make_model({"t": ["a"]}, base=make_vit(seed=1)).base_model.backbone.fingerprint != found


def test_one_bit_of_the_trunk_changes_the_fingerprint():
    model = make_model({"t": ["a", "b"]})
    before = model.base_model.backbone.fingerprint
    with torch.no_grad():
        weight = next(model.base_model.model.vit.parameters())
        weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))
    assert model.base_model.backbone.fingerprint != before


# --- the reference ---


def test_reference_pictures_are_the_same_everywhere():
    pictures = draw_reference_pictures(6, 16)
    assert pictures.shape == (6, 16, 16, 3)
    assert pictures.dtype == np.uint8
    state = np.random.get_state()[1].copy()
    assert np.array_equal(draw_reference_pictures(3, 16), pictures[:3])
    assert np.array_equal(np.random.get_state()[1], state)
    assert not np.array_equal(draw_reference_pictures(6, 16, seed=1), pictures)
    assert len({picture.tobytes() for picture in pictures}) == 6


def exact_reference(model, dtype=torch.float32):
    """Mean and deviation of [CLS] over 192 drawings in [-1, 1], from the trunk's own output."""
    pictures = torch.from_numpy(draw_reference_pictures(192, 16)).permute(0, 3, 1, 2)
    with torch.no_grad():
        trunk = model.get_base_model().base_model
        z = trunk((pictures.float() / 127.5 - 1).to(dtype)).last_hidden_state[:, 0].double()
    mean = z.sum(dim=0) / len(z)
    return mean, ((z - mean).square().sum(dim=0) / (len(z) - 1)).sqrt()


@pytest.mark.parametrize("make", [make_vit, make_dinov2])
def test_the_reference(make):
    model = trained(make())
    mean, std = exact_reference(model)
    for name in "tu":
        layer = model.base_model.layer
        torch.testing.assert_close(layer.luca_reference_mean[name].double(), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.luca_reference_std[name].double(), std, rtol=1e-4, atol=1e-5)


def test_a_reference_that_is_there_is_kept():
    model = make_model({"t": ["a"]})
    before = expert_tensors(model, "t")
    model.compute_reference("t")
    assert_same(expert_tensors(model, "t"), before)


def test_reference_distance():
    mean, std = torch.zeros(4), torch.full((4,), 2.0)
    assert reference_distance((mean, std), (mean, std)) == 0.0
    assert reference_distance((mean, std), (mean + 1, std)) == pytest.approx(0.5)
    assert reference_distance((mean, std), (mean, std * np.e)) == pytest.approx(1.0)
    assert reference_distance((mean, std), (torch.zeros(3), torch.ones(3))) == float("inf")
    assert not reference_distance((mean, std), (mean * float("nan"), std)) <= BACKBONE_TOLERANCE


# --- another backbone ---


def test_another_backbone_is_refused_by_every_path_and_the_model_left_as_it_was(tmp_path):
    save_experts(trained(make_vit(seed=0)), tmp_path)
    other, x = make_vit(seed=1), pixels()
    expected = other(x).logits
    message = r"expert 't' was trained on the backbone [0-9a-f]{12} .*but this one is [0-9a-f]{12} .*deviations away"
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(other, tmp_path / "t", adapter_name="t")
    assert torch.equal(other(x).logits, expected)
    with pytest.raises(ValueError, match=message):
        load_experts(other, tmp_path)
    assert torch.equal(other(x).logits, expected)
    assert not [name for name, _ in other.named_modules() if "luca" in name]
    mine = make_model({"own": ["a", "b"]}, base=other)
    before, own = expert_tensors(mine, "own"), mine(x).logits
    for load in (lambda: mine.load_adapter(str(tmp_path / "t"), "t"), lambda: load_experts(mine, tmp_path)):
        with pytest.raises(ValueError, match=message):
            load()
        assert list(mine.experts) == list(mine.peft_config) == ["own"]
        assert_same(expert_tensors(mine, "own"), before)
        assert torch.equal(mine(x).logits, own)
        assert not [name for name in mine.state_dict() if ".t." in name or name.endswith(".t")]


def test_another_backbone_on_request(tmp_path):
    model = trained(make_vit(seed=0))
    save_experts(model, tmp_path)
    other = load_experts(make_vit(seed=1), tmp_path, allow_mismatch=True)
    for name in "tu":
        assert_same(expert_tensors(other, name), expert_tensors(model, name))
    # The expert goes on saying which backbone it was made on.
    assert other.peft_config["t"].fingerprint == model.peft_config["t"].fingerprint
    config = LucaConfig.from_pretrained(str(tmp_path / "t"))
    config.allow_mismatch = True
    PeftModel.from_pretrained(make_vit(seed=1), tmp_path / "t", config=config)


def test_one_refused_source_leaves_nothing_of_the_others(tmp_path):
    save_experts(make_model({"good": ["a", "b"]}), tmp_path / "good")
    save_experts(make_model({"bad": ["c"]}, base=make_vit(seed=1)), tmp_path / "bad")
    base, x = make_vit(), pixels()
    expected = base(x).logits
    with pytest.raises(ValueError, match="expert 'bad' was trained on the backbone"):
        load_experts(base, [tmp_path / "good", tmp_path / "bad"])
    assert torch.equal(base(x).logits, expected)
    assert not [name for name, _ in base.named_modules() if "luca" in name]
    model = make_model({"own": ["z"]}, base=base)
    with pytest.raises(ValueError, match="expert 'bad' was trained on the backbone"):
        load_experts(model, [tmp_path / "good", tmp_path / "bad"])
    assert list(model.experts) == ["own"]


def test_without_a_reference_another_dtype_is_refused_too(tmp_path):
    model = make_model({"t": ["a", "b"]})
    model.base_model.layer.luca_reference_mean["t"].zero_()
    model.base_model.layer.luca_reference_std["t"].fill_(1)
    save_experts(model, tmp_path)
    with pytest.raises(ValueError, match=r"no reference to compare \[CLS\] by"):
        load_experts(make_vit().bfloat16(), tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("make", [make_vit, make_dinov2])
def test_another_dtype_is_told_with_its_distance(tmp_path, make, dtype):
    model = trained(make())
    save_experts(model, tmp_path)
    base = make().to(dtype)
    with pytest.warns(UserWarning, match=r"is only \S+ deviations away, as with another dtype") as caught:
        loaded = load_experts(base, tmp_path)
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


def test_weights_of_another_backbone_are_refused_for_an_expert_that_is_there(tmp_path):
    save_expert(trained(make_vit(seed=9)), "t", tmp_path / "t")
    model = trained(make_vit())
    before = expert_tensors(model, "t")
    with pytest.raises(ValueError, match="these weights for expert 't' come from another backbone"):
        model.load_adapter(str(tmp_path / "t"), "t")
    assert list(model.experts) == ["t", "u"]
    assert_same(expert_tensors(model, "t"), before)


def test_a_file_that_is_not_whole_leaves_a_trained_expert_alone():
    model = make_model({"t": ["a", "b"], "u": ["c"]})
    with torch.no_grad():
        model.base_model.layer.luca_scale["t"].mul_(1.5)  # as training leaves it
    before = expert_tensors(model, "t")
    state = get_peft_model_state_dict(model, adapter_name="t", save_embedding_layers=False)
    state.pop(next(key for key in state if "class_rows" in key))
    with pytest.raises(ValueError, match=r"lacks .*luca_class_rows"):
        set_peft_model_state_dict(model, state, adapter_name="t")
    assert list(model.experts) == ["t", "u"]
    assert_same(expert_tensors(model, "t"), before)


def test_dropout_in_a_backbone_in_train_mode_does_not_move_cls():
    base = make_vit().train()
    model = get_peft_model(base, LucaConfig(classes=["a", "b"]))
    assert torch.equal(model.pooled_features(pixels()), model.pooled_features(pixels()))
