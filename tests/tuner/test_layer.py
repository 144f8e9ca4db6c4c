"""One expert's mathematics against the float64 computation of helpers.py, its initialization and its training."""

import math
from itertools import product

import pytest
import torch
from helpers import D, exact_luca, exact_own_scores, exact_rows, make_dinov2, make_model, make_vit, pixels
from peft import get_peft_model
from transformers import ViTConfig, ViTForImageClassification

from peft_luca import LucaConfig
from peft_luca.tuner.config import ARRANGEMENTS, NORM_POSITIONS
from peft_luca.tuner.experts import named_modules
from peft_luca.tuner.layer import find_layer


SIX = ["a", "b", "c", "d", "e", "f"]


def vectors(count=7, seed=1):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)


# --- logits ---


@pytest.mark.parametrize(
    ("arrangement", "norm_position", "reference"), list(product(ARRANGEMENTS, NORM_POSITIONS, [True, False]))
)
def test_luca_and_the_logits_of_one_expert(arrangement, norm_position, reference):
    config = {"arrangement": arrangement, "norm_position": norm_position, "reference": reference}
    model, z = make_model({"t": SIX}, reduction=4, **config), vectors()
    close(model.base_model.layer.luca(z, "t"), exact_luca(model, "t", z))
    close(model.expert_logits(z, "t"), exact_own_scores(model, "t", z), 1e-4)


@pytest.mark.parametrize(("positive", "sigma"), [(True, 4.0), (True, -4.0), (False, 4.0), (False, -4.0)])
def test_sigma(positive, sigma):
    model, z = make_model({"t": SIX}, positive_scale=positive), vectors()
    layer = model.base_model.layer
    with torch.no_grad():
        layer.luca_scale["t"].fill_(sigma)
    used = 4.0 if positive or sigma > 0 else -4.0
    assert layer.scale("t").item() == used
    features, rows = exact_luca(model, "t", z), torch.stack(list(exact_rows(model, "t").values()))
    cosines = features @ rows.T / features.norm(dim=1, keepdim=True)
    close(layer.expert_logits(z, "t"), used * cosines)
    assert cosines.abs().max() <= 1


def test_rows_are_read_by_direction_alone_and_zero_rows_score_zero():
    layer, z = make_model({"t": SIX}).base_model.layer, vectors()
    before = layer.expert_logits(z, "t")
    with torch.no_grad():
        layer.luca_class_rows["t"].mul_(torch.arange(1.0, 7.0)[:, None])
        close(layer.expert_logits(z, "t"), before.detach().double())
        layer.luca_class_rows["t"].zero_()
        assert not layer.expert_logits(z, "t").any()


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_gradients_are_those_of_the_float64_computation(norm_position):
    model = make_model({"t": SIX}, norm_position=norm_position, reduction=8)
    layer, z = model.base_model.layer, vectors(3)
    layer.double()
    layer.expert_logits(z.double(), "t").square().sum().backward()
    for name, parameter in layer.named_parameters():
        if not parameter.requires_grad:
            continue
        flat, step = parameter.data.view(-1), 1e-6
        index = flat.numel() // 2
        slopes = []
        for sign in (1, -1):
            flat[index] += sign * step
            slopes.append(sign * exact_own_scores(model, "t", z).square().sum())
            flat[index] -= sign * step
        torch.testing.assert_close(
            parameter.grad.view(-1)[index], sum(slopes) / (2 * step), rtol=1e-4, atol=1e-4, msg=name
        )


def test_only_cls_is_read_of_what_enters_the_head():
    layer = make_model({"t": SIX}, base=make_dinov2()).base_model.layer
    assert (layer.width, layer.input_width) == (D, 2 * D)
    x = torch.randn(3, 2 * D, generator=torch.Generator().manual_seed(0))
    changed = torch.cat([x[:, :D], x[:, D:] + 100], dim=1)
    assert torch.equal(layer(x), layer(changed))
    assert torch.equal(layer(x), layer.expert_logits(x[:, :D], "t"))
    with pytest.raises(ValueError, match=r"shape \(batch, 64\), got \(2, 5, 64\)"):
        layer(torch.zeros(2, 5, 2 * D))


def test_the_layer_has_the_shape_of_the_head_that_other_code_asks_for():
    layer = make_model({"t": ["a"]}, base=make_vit(num_labels=7)).base_model.layer
    assert (layer.in_features, layer.out_features) == (D, 7)
    layer = make_model({"t": ["a"]}, base=make_dinov2(num_labels=0)).base_model.layer
    assert (layer.in_features, layer.out_features) == (2 * D, 2 * D)  # nn.Identity has none


# --- parameters ---


def test_the_penalty_is_the_sum_over_the_module_and_neither_rows_nor_sigma():
    for arrangement in ARRANGEMENTS:
        model = make_model({"t": SIX, "u": SIX[:2]}, arrangement=arrangement)
        for name in "tu":
            parts = [f"luca_{part}.{name}." for part in ("adapter_down", "adapter_up", "adapter_norm")]
            parts += [f"luca_{part}.{name}." for part in ("calibrator_down", "calibrator_up")]
            tensors = [v for key, v in model.state_dict().items() if any(part in key for part in parts)]
            expected = sum(float(tensor.double().abs().sum()) for tensor in tensors)
            assert math.isclose(model.l1_penalty(name).item(), expected, rel_tol=1e-6)
        assert torch.equal(model.l1_penalty(), model.l1_penalty("t"))  # the active one
        model.l1_penalty("t").backward()
        layer = model.base_model.layer
        assert layer.luca_class_rows["t"].grad is layer.luca_scale["t"].grad is None
        gradients = [p.grad.abs() for p in layer.parameters() if p.grad is not None]
        assert gradients
        assert all(bool((gradient == 1).all()) for gradient in gradients)


def test_parameters_on_vit_base():
    with torch.device("meta"):
        vit = ViTForImageClassification(ViTConfig(num_hidden_layers=1))
    model = get_peft_model(vit, LucaConfig(classes=[str(i) for i in range(10)]), low_cpu_mem_usage=True)
    layer = model.base_model.layer
    module = sum(p.numel() for name in layer.module_names for p in getattr(layer, name).parameters())
    assert module == 149_808
    assert model.get_nb_trainable_parameters()[0] == 149_808 + 10 * 768 + 1


def test_widths(vit):
    layer = make_model({"t": LucaConfig(classes=SIX, adapter_width=3, calibrator_width=5)}).base_model.layer
    assert layer.luca_adapter_down["t"].weight.shape == (3, D)
    assert layer.luca_adapter_up["t"].weight.shape == (D, 3)
    assert layer.luca_calibrator_down["t"].weight.shape == (5, D)
    assert layer.luca_calibrator_up["t"].weight.shape == (D, 5)
    assert layer.luca_calibrator_down["t"].bias is layer.luca_calibrator_up["t"].bias is None
    with pytest.raises(ValueError, match=r"reduction is 64, but \[CLS\] is only 32 wide"):
        get_peft_model(vit, LucaConfig(classes=SIX, reduction=64))


def test_initialization(vit):
    torch.manual_seed(3)
    model = get_peft_model(vit, LucaConfig(classes=SIX, reduction=4, scale=12.0, init_rows="random"))
    layer = model.base_model.layer
    for part in ("adapter_down", "adapter_up", "calibrator_down", "calibrator_up"):
        weight = getattr(layer, f"luca_{part}")["default"].weight
        bound = math.sqrt(6 / sum(weight.shape))  # Xavier-uniform
        assert 0.9 * bound < weight.abs().max().item() <= bound
    assert not layer.luca_adapter_down["default"].bias.any()
    assert not layer.luca_adapter_up["default"].bias.any()
    assert bool((layer.luca_adapter_norm["default"].weight == 1).all())
    assert not layer.luca_adapter_norm["default"].bias.any()
    assert layer.luca_scale["default"].item() == 12.0
    assert bool(((layer.luca_class_rows["default"].norm(dim=1) - 1).abs() < 0.5).all())
    assert not layer.luca_reference_mean["default"].any()  # the identity until it is computed
    assert bool((layer.luca_reference_std["default"] == 1).all())
    assert layer.luca_whitening["default"].shape == (32, 31)
    assert not layer.luca_whitening["default"].any()
    model.add_adapter("zeros", LucaConfig(classes=SIX, init_rows="zeros"))
    assert not layer.luca_class_rows["zeros"].any()


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_an_expert_and_its_reference_keep_their_precision_in_a_model_of_another_dtype(dtype, kept):
    base = make_vit().to(dtype)
    model = make_model({"t": SIX}, base=base)
    assert {value.dtype for key, value in model.state_dict().items() if "luca_" in key} == {kept}
    x = pixels().to(dtype)
    z = model.pooled_features(x)
    assert z.dtype == dtype
    close(model(x).logits, exact_own_scores(model, "t", z))


# --- class means ---


def test_rows_become_class_means_of_adapted_features_or_of_standardized_cls():
    model, z = make_model({"t": SIX[:3], "u": SIX}), vectors(9)
    layer, labels = model.base_model.layer, torch.tensor([2, 0, 1, 1, 0, 2, 2, 2, 0])
    other = layer.luca_class_rows["u"].clone()
    standard = (z.double() - layer.luca_reference_mean["t"].double()) / layer.luca_reference_std["t"].double()
    standard = standard - standard @ layer.luca_whitening["t"].double() @ layer.luca_whitening["t"].double().T
    for adapted, features in ((True, exact_luca(model, "t", z)), (False, standard)):
        model.set_rows_to_class_means("t", z, labels, adapted=adapted)
        close(layer.luca_class_rows["t"], torch.stack([features[labels == k].mean(dim=0) for k in range(3)]))
    assert torch.equal(layer.luca_class_rows["u"], other)


def test_class_means_are_those_of_float64_to_the_bit():
    layer = make_model({"t": ["a", "b"]}, reference=False).base_model.layer
    z = 100 + torch.randn(5000, D, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(5000) % 2
    layer.set_rows_to_class_means("t", z, labels, adapted=False)
    for k, row in enumerate(layer.luca_class_rows["t"]):
        mean = z[labels == k].double().mean(dim=0)
        assert ((row.detach().double() - mean).abs() <= 2**-23 * mean.abs()).all()


@pytest.mark.parametrize(("labels", "counts"), [([0, 0, 1], r"\[2, 1, 0\]"), ([0, 1, 3], r"\[1, 1, 0, 1\]")])
def test_class_means_need_an_image_of_every_class_and_no_other(labels, counts):
    layer = make_model({"t": SIX[:3]}).base_model.layer
    before = layer.luca_class_rows["t"].clone()
    with pytest.raises(ValueError, match=rf"the images per label are {counts}: every class needs at least one image"):
        layer.set_rows_to_class_means("t", vectors(3), torch.tensor(labels))
    assert torch.equal(layer.luca_class_rows["t"], before)


# --- statistics and routing ---


def test_deleting_an_expert_deletes_its_statistics():
    model = make_model({"s": ["a", "b"], "t": ["c", "d"]})
    for name in ("s", "t"):
        model.collect_statistics(name, vectors(8), torch.arange(8) % 2)
    model.delete_adapter("t")
    assert list(model.statistics) == ["s"]
    model.add_adapter("t", LucaConfig(classes=["c", "d"]))
    with pytest.raises(ValueError, match="t"):
        model.set_router("gaussian")


def test_a_large_batch_is_split_within_the_memory_budget(monkeypatch):
    model, z = make_model({"s": ["a", "b"], "t": ["c", "d", "e"]}), vectors(10)
    layer = model.base_model.layer
    model.set_router("entropy")
    whole, real, sizes = model.route_features(z), layer.score_parts, []
    monkeypatch.setattr("peft_luca.routing.score_routers.CACHE", 3 * 5)  # 3 images under one expert of 5 classes
    monkeypatch.setattr(layer, "score_parts", lambda z, *args: sizes.append((len(z), args[1])) or real(z, *args))
    split = model.route_features(z)
    assert sizes == [(3, 1), (3, 1), (3, 1), (1, 2)]  # of the last image, both experts together
    assert torch.equal(split.expert, whole.expert)
    torch.testing.assert_close(split.logits, whole.logits)


def test_experts_of_two_references_are_not_pooled():
    model = make_model({"t": SIX[:3], "u": SIX[3:]})
    layer = model.base_model.layer
    for name in "tu":
        model.collect_statistics(name, vectors(12), torch.arange(12) % 3)
    for expert in "tu":
        assert all(
            torch.equal(one, layer.tensors(expert)[f"luca_reference_{part}.{expert}"])
            for one, part in zip(layer.experts.reference(expert), ("mean", "std"), strict=True)
        )
    layer.luca_reference_mean["u"].copy_(layer.luca_reference_mean["t"] + 1)
    layer.luca_reference_std["u"].copy_(layer.luca_reference_std["t"])
    model.set_router("auto")
    assert "auto (nearest)" in repr(model)
    with pytest.raises(ValueError, match="reference"):
        model.set_router("gaussian")
    layer.luca_reference_mean["u"].copy_(layer.luca_reference_mean["t"])
    layer._experts = None
    model.set_router("gaussian")


def test_without_a_reference_unit_features_are_cls_itself():
    model, z = make_model({"t": SIX}, reference=False), vectors(5)
    assert model.base_model.layer.experts.reference("t") is None
    close(model.base_model.layer.unit_features(z, "t"), torch.nn.functional.normalize(z.double(), dim=1))


def test_a_model_without_experts_has_no_layer():
    with pytest.raises(ValueError, match="this ViTForImageClassification has no LuCA experts"):
        find_layer(make_vit())


def test_images_are_read_alike_for_all_experts_or_a_warning_says_so(recwarn):
    model = make_model({"t": SIX[:3]})
    model.add_adapter("same", LucaConfig(classes=SIX))
    assert not [warning for warning in recwarn if "images are read" in str(warning.message)]
    with pytest.warns(
        UserWarning, match="'other' was trained with {'background': 'black', .* with {'background': 'wh"
    ):
        model.add_adapter("other", LucaConfig(classes=SIX, background="black"))


def test_the_layer_prints_its_experts_line_by_line():
    lines = repr(make_model({"t": SIX[:5], "u": SIX}).base_model.layer).split("\n")
    assert lines[0] == "LucaLayer(width=32"
    assert lines[1].startswith("  (base_layer): Linear(in_features=32")
    assert lines[2] == "  2 experts, 6 classes; active: expert 't'"
    assert lines[3].startswith("  t: 5 classes (a, b, c, d, e), LuCA of ")
    assert lines[4].startswith("  u: 6 classes (a, b, c, d, e, …), LuCA of ")
    assert lines[5:] == [")"]


def test_an_expert_added_to_a_model_in_half_precision_keeps_its_own():
    filled = make_model({"t": SIX}).base_model.layer.tensors("t")
    tensors = {key.replace(".t", "", 1): tensor for key, tensor in filled.items()}
    tuner = make_model({"u": SIX}, base=make_vit().to(torch.bfloat16)).base_model
    tuner.add_expert("t", LucaConfig(classes=SIX), tensors)
    for key, tensor in tuner.layer.tensors("t").items():
        assert tensor.dtype == tensors[key.replace(".t", "", 1)].dtype
        assert torch.equal(tensor, tensors[key.replace(".t", "", 1)])


def test_modules_are_listed_as_torch_lists_them_but_for_the_experts():
    model = make_model({"t": SIX})
    shared = torch.nn.Linear(2, 2)
    model.base_model.model.one, model.base_model.model.other = shared, shared
    inside = "base_model.model.classifier."
    expected = [name for name, _ in model.named_modules() if not name.startswith(inside)]
    assert [name for name, _ in named_modules(model)] == expected
    cycle = torch.nn.Module()
    cycle.back = torch.nn.ModuleList([cycle])
    assert [name for name, _ in named_modules(cycle)] == [name for name, _ in cycle.named_modules()]


def test_tensors_of_another_shape_are_refused():
    model = make_model({"t": SIX})
    tensors = {key.replace(".t", "", 1): tensor.clone() for key, tensor in model.base_model.layer.tensors("t").items()}
    tensors["luca_adapter_up.bias"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"luca_adapter_up.bias has the shape \(1,\), and needs \(32,\)"):
        model.base_model.add_expert("u", LucaConfig(classes=SIX), tensors)
    assert list(model.experts) == ["t"]
