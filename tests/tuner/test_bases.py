"""Backbones and image processors as users put them together: they fit, or are refused with what both have."""

import pytest
import torch
from helpers import SIDE, assert_same, expert_tensors, make_arguments, make_dinov2, make_model, make_stream, make_vit
from peft import get_peft_model
from transformers import SwinConfig, SwinForImageClassification, ViTImageProcessorPil

from peft_luca import ContinualTrainer, ImageCollator, LucaConfig, load_experts, save_experts


def trainer(out, model, stream=None, luca_config=None, size=SIDE, **processor):
    return ContinualTrainer(
        model=model,
        args=make_arguments(out, num_train_epochs=1),
        stream=make_stream() if stream is None else stream,
        luca_config=luca_config,
        processing_class=ViTImageProcessorPil(size={"height": size, "width": size}, **processor),
    )


GREY = {"image_mean": [0.5], "image_std": [0.5]}


def test_a_backbone_that_sees_grey(out):
    run = trainer(out, make_vit(num_channels=1), **GREY)
    run.train()
    assert run.results()["task_known_accuracy"] > 0.6
    test = run.stream[0].test
    pixels = ImageCollator(run.processing_class, "image", channels=1)([test[0]])["pixel_values"]
    assert pixels.shape == (1, 1, SIDE, SIDE)
    assert 0 <= run.evaluate(test)["eval_accuracy"] <= 1


@pytest.mark.parametrize(
    ("channels", "processor", "message"),
    [
        (
            1,
            {},
            r"num_channels=1, but ViTImageProcessorPil cannot make such pictures: .* image_mean and image_std to as",
        ),
        (3, GREY, "num_channels=3, but ViTImageProcessorPil cannot make such pictures"),
        (
            1,
            {"do_convert_rgb": True},
            r"num_channels=1, but ViTImageProcessorPil makes pictures with 3.*do_convert_rgb",
        ),
    ],
)
def test_a_processor_of_other_channels_is_refused(out, channels, processor, message):
    with pytest.raises(ValueError, match=message):
        trainer(out, make_vit(num_channels=channels), **processor)
    assert not out.exists()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_processor_of_another_size_is_refused(out, wrapped):
    model = make_vit(image_size=32)
    model = get_peft_model(model, LucaConfig()) if wrapped else model
    with pytest.raises(ValueError, match=r"makes pictures of 16 × 16, but the backbone takes 32 × 32: .*its size"):
        trainer(out, model)
    assert not out.exists()


def test_a_trunk_that_takes_any_size_takes_any_processor(out):
    run = trainer(out, make_dinov2(), size=2 * SIDE)
    run.train()
    assert run.results()["task_known_accuracy"] > 0.6
    swin = SwinConfig(image_size=16, patch_size=4, embed_dim=32, depths=[1], num_heads=[2], window_size=2)
    run = trainer(out / "swin", SwinForImageClassification(swin), luca_config=LucaConfig(pooled="any"), size=24)
    run.train_task(run.stream[0])
    assert run.results()["tasks"][0]["test_images"] == 8


def test_a_processor_that_leaves_sizes_alone_is_asked_for_the_backbones(out):
    trainer(out, make_vit(), size=5, do_resize=False)


# --- a base that was changed after the expert was trained ---


def edits():
    def added(weight):
        weight.add_(0.01)  # torch counts this one

    def multiplied(weight):
        weight.data.mul_(1.01)  # and these not

    def copied(weight):
        weight.data.copy_(torch.randn_like(weight))

    def column(weight):
        weight.data[:, 7] = 0.0

    return [added, multiplied, copied, column]


@pytest.mark.parametrize("edit", edits(), ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("inference", [False, True])
def test_a_change_of_the_trunk_is_noticed(edit, inference, tmp_path):
    model = make_model({"t": ["a", "b"]})
    save_experts(model, tmp_path)
    before = model.base_model.backbone.fingerprint
    assert model.base_model.backbone.fingerprint == before
    weight = model.get_base_model().vit.layers[1].mlp.fc1.weight
    with torch.inference_mode(inference), torch.no_grad():
        edit(weight)
    assert model.base_model.backbone.fingerprint != before
    with pytest.raises(ValueError, match="was trained on the backbone"):
        load_experts(model, {"again": tmp_path / "t"})
    assert list(model.base_model.experts) == ["t"]


def test_going_on_with_a_changed_base_is_refused(out):
    model = make_vit()
    first = trainer(out, model)
    first.train_task(first.stream[0])
    kept = expert_tensors(first.model, "task_0")
    changed = make_vit()
    changed.vit.layers[0].mlp.fc2.weight.data.mul_(1.5)
    with pytest.raises(ValueError, match="was trained on the backbone"):
        trainer(out, changed).train()
    assert_same(expert_tensors(first.model, "task_0"), kept)


def test_a_reference_needs_weights():
    with torch.device("meta"):
        model = get_peft_model(make_vit(), LucaConfig(classes=["a"]))
    with pytest.raises(ValueError, match="the reference needs the backbone's weights, which are on the meta device"):
        model.base_model.compute_reference()
