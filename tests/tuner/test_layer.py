"""One expert's mathematics, against the float64 computation of conftest.py."""

import math
from itertools import product

import pytest
import torch
from helpers import D, exact_luca, exact_own_scores, exact_rows, fill, make_dinov2, make_model, make_vit, pixels
from peft import get_peft_model
from transformers import ViTConfig, ViTForImageClassification

from peft_luca import LucaConfig
from peft_luca.tuner.config import ARRANGEMENTS, NORM_POSITIONS


SIX = ["a", "b", "c", "d", "e", "f"]


def vectors(count=7, seed=1):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("arrangement", "norm_position", "reference"), list(product(ARRANGEMENTS, NORM_POSITIONS, [True, False]))
)
def test_luca(arrangement, norm_position, reference):
    config = {"arrangement": arrangement, "norm_position": norm_position, "reference": reference}
    model = make_model({"t": SIX}, reduction=4, **config)
    z = vectors()
    close(model.base_model.layer.luca(z, "t"), exact_luca(model, "t", z))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("head", ["cosine", "linear"])
def test_logits_of_one_expert(arrangement, head):
    model = make_model({"t": SIX}, arrangement=arrangement, head=head, reduction=8)
    x = pixels()
    z = model.pooled_features(x)
    close(model(x).logits, exact_own_scores(model, "t", z))


@pytest.mark.parametrize(("positive", "sigma"), [(True, 4.0), (True, -4.0), (False, 4.0), (False, -4.0)])
def test_sigma(positive, sigma):
    model = make_model({"t": SIX}, positive_scale=positive)
    layer, z = model.base_model.layer, vectors()
    with torch.no_grad():
        layer.luca_scale["t"].fill_(sigma)
    used = 4.0 if positive or sigma > 0 else -4.0
    assert layer.scale("t").item() == used
    features, rows = exact_luca(model, "t", z), torch.stack(list(exact_rows(model, "t").values()))
    cosines = features @ rows.T / features.norm(dim=1, keepdim=True)
    close(layer.expert_logits(z, "t"), used * cosines)
    assert cosines.abs().max() <= 1


def test_cosine_rows_are_read_by_direction_alone():
    model, z = make_model({"t": SIX}), vectors()
    layer = model.base_model.layer
    before = layer.expert_logits(z, "t")
    with torch.no_grad():
        layer.luca_class_rows["t"].mul_(torch.arange(1.0, 7.0)[:, None])
    close(layer.expert_logits(z, "t"), before.detach().double())


def test_zero_rows_score_zero():
    model = make_model({"t": SIX})
    torch.nn.init.zeros_(model.base_model.layer.luca_class_rows["t"])
    assert not model.base_model.layer.expert_logits(vectors(), "t").any()


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_gradients(norm_position):
    """Autograd through the layer is the derivative of the float64 computation, by central differences."""
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


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("head", ["cosine", "linear"])
def test_l1_penalty_is_over_the_module_and_neither_rows_nor_sigma(arrangement, head):
    model = make_model({"t": SIX, "u": SIX[:2]}, arrangement=arrangement, head=head)
    expected = {
        name: sum(
            float(value.double().abs().sum())
            for key, value in model.state_dict().items()
            if any(f"luca_{part}.{name}." in key for part in PARTS)
        )
        for name in "tu"
    }
    for name in "tu":
        assert math.isclose(model.l1_penalty(name).item(), expected[name], rel_tol=1e-6)
    assert torch.equal(model.l1_penalty(), model.l1_penalty("t"))  # the active one
    model.l1_penalty("t").backward()
    layer = model.base_model.layer
    assert layer.luca_class_rows["t"].grad is None
    signs = [p.grad.abs() for p in layer.parameters() if p.grad is not None]
    assert signs
    assert all(bool((sign == 1).all()) for sign in signs)


PARTS = ("adapter_down", "adapter_up", "adapter_norm", "calibrator_down", "calibrator_up")


@pytest.mark.parametrize("layers", [1, 12])
@pytest.mark.parametrize("classes", [1, 10])
def test_parameters_on_vit_base(layers, classes):
    with torch.device("meta"):
        vit = ViTForImageClassification(ViTConfig(num_hidden_layers=layers))
    model = get_peft_model(vit, LucaConfig(classes=[str(i) for i in range(classes)]), low_cpu_mem_usage=True)
    layer = model.base_model.layer
    module = sum(p.numel() for name in layer.module_names for p in getattr(layer, name).parameters())
    assert module == 149_808
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trainable == 149_808 + classes * 768 + 1
    assert model.get_nb_trainable_parameters()[0] == trainable


def test_widths():
    model = make_model({"t": LucaConfig(classes=SIX, adapter_width=3, calibrator_width=5)})
    layer = model.base_model.layer
    assert layer.luca_adapter_down["t"].weight.shape == (3, D)
    assert layer.luca_adapter_up["t"].weight.shape == (D, 3)
    assert layer.luca_calibrator_down["t"].weight.shape == (5, D)
    assert layer.luca_calibrator_up["t"].weight.shape == (D, 5)
    assert layer.luca_calibrator_down["t"].bias is None
    assert layer.luca_calibrator_up["t"].bias is None


def test_a_reduction_wider_than_cls_is_refused(vit):
    with pytest.raises(ValueError, match=r"reduction is 64, but \[CLS\] is only 32 wide"):
        get_peft_model(vit, LucaConfig(classes=SIX, reduction=64))


def test_initialisation(vit):
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
    assert bool((layer.luca_class_rows["default"].norm(dim=1) > 0.3).all())
    assert not layer.luca_reference_mean["default"].any()  # the identity until it is computed
    assert bool((layer.luca_reference_std["default"] == 1).all())


def test_zero_rows_are_an_option(vit):
    model = get_peft_model(vit, LucaConfig(classes=SIX, init_rows="zeros"))
    assert not model.base_model.layer.luca_class_rows["default"].any()


def test_only_the_expert_is_trainable():
    model = make_model({"t": SIX, "u": SIX[:2]})
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all("luca_" in name and ".t" in name for name in trainable)
    assert not any("reference" in name for name in trainable)


def test_rows_become_class_means_of_adapted_features():
    model, z = make_model({"t": SIX[:3], "u": SIX}), vectors(9)
    labels = torch.tensor([2, 0, 1, 1, 0, 2, 2, 2, 0])
    other = model.base_model.layer.luca_class_rows["u"].clone()
    adapted = exact_luca(model, "t", z)
    model.base_model.layer.set_rows_to_class_means("t", z, labels)
    expected = torch.stack([adapted[labels == k].mean(dim=0) for k in range(3)])
    close(model.base_model.layer.luca_class_rows["t"], expected)
    assert torch.equal(model.base_model.layer.luca_class_rows["u"], other)


def test_rows_may_start_at_class_means_of_standardised_cls():
    model, z = make_model({"t": SIX[:2]}), vectors(5)
    layer, labels = model.base_model.layer, torch.tensor([1, 0, 1, 1, 0])
    layer.set_rows_to_class_means("t", z, labels, adapted=False)
    standard = (z.double() - layer.luca_reference_mean["t"].double()) / layer.luca_reference_std["t"].double()
    close(layer.luca_class_rows["t"], torch.stack([standard[labels == k].mean(dim=0) for k in range(2)]))


@pytest.mark.parametrize("labels", [[0, 0, 1], [0, 1, 3]])
def test_class_means_need_an_image_of_every_class_and_no_other(labels):
    model = make_model({"t": SIX[:3]})
    before = model.base_model.layer.luca_class_rows["t"].clone()
    with pytest.raises(ValueError, match="every class needs at least one image"):
        model.base_model.layer.set_rows_to_class_means("t", vectors(3), torch.tensor(labels))
    assert torch.equal(model.base_model.layer.luca_class_rows["t"], before)


def test_a_linear_head_takes_no_class_means():
    model = make_model({"t": SIX[:2]}, head="linear")
    with pytest.raises(ValueError, match="has a linear head, which has no rows to take class means"):
        model.base_model.layer.set_rows_to_class_means("t", vectors(2), torch.tensor([0, 1]))


def test_what_enters_the_head_must_be_one_vector_per_image():
    model = make_model({"t": SIX})
    with pytest.raises(ValueError, match=r"shape \(batch, 32\), got \(2, 5, 32\)"):
        model.base_model.layer(torch.zeros(2, 5, D))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_trunk_keeps_the_expert_in_float32(vit, dtype):
    model = make_model({"t": SIX}, base=vit.to(dtype))
    tensors = [value for key, value in model.state_dict().items() if "luca_" in key]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    z = model.pooled_features(pixels().to(dtype))
    assert z.dtype == dtype
    close(model(pixels().to(dtype)).logits, exact_own_scores(model, "t", z))


def test_fill_is_repeatable():
    first, second = (make_model({"t": SIX}).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert fill(make_model({"t": SIX}), seed=1).l1_penalty() != make_model({"t": SIX}).l1_penalty()


def test_what_other_code_asks_the_head_for():
    layer = make_model({"t": ["a"]}, base=make_vit(num_labels=7)).base_model.layer
    assert (layer.in_features, layer.out_features) == (D, 7)
    layer = make_model({"t": ["a"]}, base=make_dinov2(num_labels=0)).base_model.layer
    assert (layer.in_features, layer.out_features) == (2 * D, 2 * D)  # nn.Identity has none


def test_an_expert_takes_its_statistics_along():
    model = make_model({"s": ["a", "b"], "t": ["c", "d"]})
    features = torch.randn(8, D, generator=torch.Generator().manual_seed(0))
    for name in ("s", "t"):
        model.collect_statistics(name, features, torch.arange(8) % 2)
    model.delete_adapter("t")
    assert list(model.base_model.layer.statistics) == ["s"]
    model.add_adapter("t", LucaConfig(classes=["c", "d"]))
    with pytest.raises(ValueError, match="'t' came without"):
        model.set_router("gaussian")


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_a_reference_keeps_its_precision(dtype, kept):
    layer = get_peft_model(make_vit().to(dtype), LucaConfig(classes=["a"])).base_model.layer
    assert layer.luca_class_rows["default"].dtype in (dtype, torch.float32)
    assert layer.luca_reference_mean["default"].dtype == kept


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}])
def test_confidence_is_the_answers_probability_at_the_routers_temperature(options):
    model = make_model({"s": ["a", "b"], "t": ["c", "d"]})
    model.set_router("entropy", **options)
    routed = model.route(pixels())
    expected = (routed.logits.double() / options.get("temperature", 1.0)).softmax(dim=1).amax(dim=1)
    torch.testing.assert_close(routed.confidence.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_large_batch_is_taken_piece_by_piece(monkeypatch):
    model = make_model({"s": ["a", "b"], "t": ["c", "d", "e"]})
    layer, z = model.base_model.layer, torch.randn(10, D, generator=torch.Generator().manual_seed(0))
    whole, real, sizes = layer.route(z), layer.scores, []
    monkeypatch.setattr(
        "peft_luca.tuner.layer.SCORES_BUDGET", 3 * 2 * 5
    )  # three samples of two experts and five classes
    monkeypatch.setattr(layer, "scores", lambda part: sizes.append(len(part)) or real(part))
    pieces = layer.route(z)
    assert sizes == [3, 3, 3, 1]
    assert torch.equal(pieces.expert, whole.expert)
    torch.testing.assert_close(pieces.logits, whole.logits)


def test_class_means_are_those_of_float64_to_the_bit():
    layer = make_model({"t": ["a", "b"]}).base_model.layer
    z = 100 + torch.randn(5000, D, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(5000) % 2
    expected = [layer.standardise(z, "t")[labels == k].double().mean(dim=0) for k in (0, 1)]
    layer.set_rows_to_class_means("t", z, labels, adapted=False)
    for row, mean in zip(layer.luca_class_rows["t"], expected, strict=True):
        assert ((row.detach().double() - mean).abs() <= 2**-23 * mean.abs()).all()
    with pytest.raises(ValueError, match=r"the images per label are \[2, 0\]"):
        layer.set_rows_to_class_means("t", z[:2], torch.tensor([0, 0]))
