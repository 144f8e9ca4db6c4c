"""The reference pictures, [CLS] on them and where it is kept, and the whitening of an expert's input."""

import hashlib

import numpy as np
import pytest
import torch
from helpers import assert_same, expert_tensors, make_dinov2, make_model, make_vit, pixels
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load, load_file

from peft_luca import LucaConfig, draw_reference_pictures, save_expert
from peft_luca.tuner import backbone
from peft_luca.tuner import reference as module
from peft_luca.tuner.backbone import BackboneFacts
from peft_luca.tuner.reference import kept_reference, whitened_directions, whitening


def new_expert(base=None, classes=("a", "b"), **config):
    return get_peft_model(base or make_vit(), LucaConfig(classes=list(classes), **config), adapter_name="t")


def references(model):
    layer = model.base_model.layer
    return {"mean": layer.luca_reference_mean["t"], "std": layer.luca_reference_std["t"]}


# --- the pictures, and [CLS] on them ---


def test_reference_pictures_are_the_same_everywhere():
    pictures = draw_reference_pictures(6, 16)
    assert pictures.shape == (6, 16, 16, 3)
    assert pictures.dtype == np.uint8
    assert hashlib.sha256(pictures.tobytes()).hexdigest().startswith("99e9a21a827636b1")
    state = np.random.get_state()[1].copy()
    assert np.array_equal(draw_reference_pictures(3, 16), pictures[:3])
    assert np.array_equal(np.random.get_state()[1], state)
    assert not np.array_equal(draw_reference_pictures(6, 16, seed=1), pictures)
    assert len({picture.tobytes() for picture in pictures}) == 6


@pytest.mark.parametrize("make", [make_vit, make_dinov2])
@pytest.mark.parametrize(("whitening", "count"), [(True, 768), (False, 192)])
def test_the_reference_is_the_mean_and_deviation_of_cls_over_the_pictures(make, whitening, count):
    model = new_expert(make(), whitening=whitening)
    pictures = torch.from_numpy(draw_reference_pictures(count, 16)).permute(0, 3, 1, 2)
    z = model.pooled_features(pictures.float() / 127.5 - 1).double()
    model.compute_reference()
    layer = model.base_model.layer
    torch.testing.assert_close(layer.luca_reference_mean["t"].double(), z.mean(dim=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.luca_reference_std["t"].double(), z.std(dim=0), rtol=1e-4, atol=1e-5)
    correlation = model.backbone.reference(None, whitening).correlation
    torch.testing.assert_close(correlation.double(), torch.corrcoef(z.T), rtol=1e-3, atol=1e-4)


def test_a_reference_that_is_there_is_kept():
    model = make_model({"t": ["a"]})
    before = expert_tensors(model, "t")
    model.compute_reference("t")
    assert_same(expert_tensors(model, "t"), before)


def test_a_dimension_of_cls_that_never_moves_keeps_a_deviation_of_one():
    facts = BackboneFacts.of(make_vit(num_channels=1), "classifier")
    images = []
    read = lambda x: images.append(x) or torch.stack([x[:, 0, 0, 0], 0 * x[:, 0, 0, 0]], dim=1)  # noqa: E731
    mean, std, correlation = facts.reference(read, False)
    assert (float(mean[1]), float(std[1])) == (0.0, 1.0)
    assert 0.1 < float(std[0]) < 1.0
    assert correlation[1].tolist() == [0, 0]
    assert images[0].shape == (16, 1, 16, 16)  # grey for a backbone of one channel
    assert len(torch.cat(images)) == 192


@pytest.mark.parametrize(
    ("make", "whitening", "size"),
    [(make_dinov2, True, 112), (make_dinov2, False, 64), (make_vit, True, 112), (make_vit, False, 128)],
)
def test_a_backbone_that_interpolates_its_positions_gets_small_pictures(make, whitening, size):
    """Experts without whitening get those that they had before there was whitening."""
    sizes = set()
    facts = BackboneFacts.of(make(image_size=128, patch_size=8), "classifier")

    def read(x, interpolate_pos_encoding=None):
        sizes.add((x.shape[-1], interpolate_pos_encoding))
        return x[:, 0, 0]

    facts.reference(read, whitening)
    assert sizes == {(size, True if make is make_vit and whitening else None)}


def test_a_vit_reads_pictures_smaller_than_its_own():
    model = new_expert(make_vit(image_size=128, patch_size=32))
    model.compute_reference()
    assert model.base_model.layer.luca_reference_mean["t"].any()


@pytest.mark.parametrize(
    ("device", "message"), [("meta", "weights that are not on the meta device"), ("cpu", "needs config.image_size")]
)
def test_a_reference_needs_weights_and_a_picture_size(device, message):
    with torch.device(device):
        base = make_vit()
    if device == "cpu":
        base.config.__dict__["image_size"] = None
    model = new_expert(base)
    with pytest.raises(ValueError, match=message):
        model.compute_reference()


def test_a_reference_is_measured_once_for_a_backbone_and_kept_on_disk(monkeypatch):
    first = new_expert()
    first.compute_reference()
    monkeypatch.setattr(backbone, "measure_reference", None)  # an error where it is measured again
    again = new_expert(make_vit(num_labels=9))
    again.compute_reference()
    assert_same(references(again), references(first))
    with pytest.raises(TypeError):
        new_expert(make_vit(seed=1)).compute_reference()
    with pytest.raises(TypeError):  # a setting of the backbone moves [CLS] as its weights do
        new_expert(make_vit(hidden_act="relu")).compute_reference()


def test_adapters_in_the_trunk_decide_its_reference_by_their_scaling_and_whether_they_are_on():
    def adapted(alpha):
        torch.manual_seed(0)
        settings = LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False)
        return get_peft_model(make_vit(), settings).get_base_model()

    first, second = new_expert(adapted(1)), new_expert(adapted(400))
    first.compute_reference()
    second.compute_reference()
    assert first.backbone.fingerprint == second.backbone.fingerprint
    assert not torch.equal(*(references(model)["mean"] for model in (first, second)))
    before = second.backbone
    for inner in second.get_base_model().base_model.modules():
        if isinstance(inner, BaseTunerLayer):
            inner.enable_adapters(False)
    assert second.backbone is not before


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(path.read_bytes()[:100]), lambda path: path.unlink()])
def test_a_spoilt_reference_on_disk_is_measured_again(spoil):
    first = new_expert()
    first.compute_reference()
    (path,) = module.REFERENCES.iterdir()
    before = load(path.read_bytes())
    spoil(path)
    again = new_expert()
    again.compute_reference()
    assert_same(references(again), references(first))
    assert_same(dict(sorted(load(path.read_bytes()).items())), dict(sorted(before.items())))


def test_a_reference_that_cannot_be_kept_is_used_all_the_same(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "REFERENCES", tmp_path / "file" / "references")
    found = kept_reference({"a": 1}, lambda: module.Reference(*torch.ones(3, 2)))
    assert found.std.tolist() == [1, 1]


# --- whitening ---


def exact_whitened(correlation, features, labels, z):
    """The whitening of vectors, (batch, d), from its description, as one matrix."""
    d, correlation, features = len(correlation), correlation.double(), features.double()
    within = torch.zeros(d, d, dtype=torch.float64)
    freedom = 0
    for k in labels.unique():
        own = features[labels == k]
        within += (own - own.mean(dim=0)).T @ (own - own.mean(dim=0))
        freedom += len(own) - 1
    freedom = min(freedom, d)
    covariance = correlation.clone()
    if freedom:
        covariance = (d * correlation + freedom * within / (within.diagonal().sum() / d)) / (d + freedom)
    trace, square = covariance.trace(), covariance.square().sum()
    strength = (square + trace**2) / ((d + freedom) * (square - trace**2 / d))
    covariance = (1 - strength) * covariance + strength * trace / d * torch.eye(d, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(covariance)
    r = min(d - 1, 98304 // d)
    gains = torch.ones(d, dtype=torch.float64)
    gains[d - r :] = (values[d - r - 1] / values[d - r :]).sqrt()
    return z.double() @ vectors @ torch.diag(gains) @ vectors.T


@pytest.mark.parametrize("per_class", [1, 2, 7, 60])
@pytest.mark.parametrize("classes", [1, 4])
def test_whitening_is_that_of_its_description(per_class, classes):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(24, 24, generator=generator)
    correlation = torch.corrcoef((torch.randn(200, 24, generator=generator) @ mixing).T)
    features = torch.randn(per_class * classes, 24, generator=generator) @ mixing.T
    labels = torch.arange(classes).repeat(per_class)
    directions = whitening(correlation, features, labels)
    assert directions.dtype == torch.float16
    z = torch.randn(5, 24, generator=generator)
    found = z - z @ directions.float() @ directions.float().T
    expected = exact_whitened(correlation, features, labels, z).float()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=5e-3)


def test_the_number_of_directions_keeps_an_expert_small():
    assert [whitened_directions(d) for d in (1, 2, 32, 384, 768, 1024, 200_000)] == [0, 1, 31, 256, 128, 96, 0]


def test_images_that_do_not_differ_are_whitened_by_the_reference_alone():
    correlation = torch.corrcoef(torch.randn(8, 50, generator=torch.Generator().manual_seed(0)))
    labels = torch.tensor([0, 0, 0, 1])
    alike = whitening(correlation, torch.ones(4, 8), labels)
    assert torch.equal(alike, whitening(correlation, torch.zeros(1, 8), labels[:1]))
    assert alike.isfinite().all()


def test_an_expert_is_whitened_by_its_own_images(tmp_path):
    model, features, labels = new_expert(), torch.randn(12, 32), torch.arange(12) % 2
    model.compute_reference()
    by_pictures = model.base_model.layer.luca_whitening["t"].clone()
    model.compute_reference("t", features, labels)
    directions = model.base_model.layer.luca_whitening["t"]
    reference = model.backbone.reference(None, True)
    z = (features - reference.mean) / reference.std
    assert torch.equal(directions, whitening(reference.correlation, z, labels).float())
    assert not torch.equal(directions, by_pictures)
    save_expert(model, "t", tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    (saved,) = [tensor for name, tensor in tensors.items() if name.endswith("luca_whitening")]
    assert saved.dtype == torch.float16
    loaded = PeftModel.from_pretrained(make_vit(), tmp_path).eval()
    x = pixels()
    assert torch.equal(loaded(x).logits, model.eval()(x).logits)


@pytest.mark.parametrize("config", [{"whitening": False}, {"reference": False}])
def test_an_expert_without_whitening_has_no_directions(config):
    model = new_expert(**config)
    assert not any("whitening" in name for name in model.state_dict())
    assert model.peft_config["t"].whitening is False


def test_whitening_needs_the_reference():
    with pytest.raises(ValueError, match="whitening=True needs reference=True"):
        LucaConfig(whitening=True, reference=False)
    assert LucaConfig(whitening=True).reference is True


def test_a_trained_expert_whose_config_does_not_name_whitening_has_none():
    config = LucaConfig(classes=["a"], fingerprint="0" * 64)
    assert config.whitening is False
    assert LucaConfig(classes=["a"]).resolve().whitening is True
