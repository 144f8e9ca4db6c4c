"""`predict`: images of every kind in, one small answer for each out, as the model that was trained gives it."""

import io
import json

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from datasets import Image as ImageFeature
from helpers import SIDE, make_dinov2, make_images, make_model, make_processor, make_trainer, make_vit
from PIL import Image
from transformers import BitImageProcessorPil, ConvNextImageProcessorPil, EfficientNetImageProcessorPil

from peft_luca import ImageCollator, LucaConfig, Prediction, load_experts, save_experts
from peft_luca.routing import ScoreRouter
from peft_luca.tuner.backbone import PROCESSOR_TYPE, processor_facts
from peft_luca.tuner.prediction import processor_of


RNG = np.random.default_rng(0)
COLORS = RNG.integers(0, 256, (20, 34, 3), dtype=np.uint8)
FACTS = processor_facts(make_processor())
EXPERTS = {"pets": ["cat", "dog"], "birds": ["owl"]}


def known_to(model, processor=None):
    """The model, with experts that know their image processor."""
    for config in model.peft_config.values():
        config.processor = FACTS if processor is None else processor_facts(processor)
    return model


def make(experts=EXPERTS, router="entropy", **options):
    model = known_to(make_model(experts))
    model.set_router(router, **options)
    return model


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


KINDS = {
    "grey": (Image.fromarray(COLORS[..., 0]), "png", {}),
    "16 bits": (Image.fromarray(COLORS[..., 0].astype(np.uint16) * 257), "png", {}),
    "palette with transparency": (Image.fromarray(COLORS).convert("P"), "png", {"transparency": 3}),
    "RGBA": (Image.fromarray(np.dstack([COLORS, COLORS[..., :1]])), "png", {}),
    "CMYK": (Image.fromarray(COLORS).convert("CMYK"), "jpeg", {}),
    "rotated by EXIF": (Image.fromarray(COLORS), "jpeg", {"exif": rotated()}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_any_kind_is_answered_as_the_trainer_sees_it(tmp_path, kind):
    image, suffix, options = KINDS[kind]
    path = tmp_path / f"image.{suffix}"
    image.save(path, **options)
    encoded = {"bytes": path.read_bytes(), "path": None}
    model = make()
    logits = model(ImageCollator(make_processor(), "image")([{"image": encoded}])["pixel_values"]).logits[0]
    expected = dict(zip(model.classes, logits.softmax(dim=0).tolist(), strict=True))
    given = [
        path,
        str(path),
        encoded,
        Image.open(path),
        Dataset.from_dict({"image": [encoded]}).cast_column("image", ImageFeature()),
    ]
    for images in (*given, given[:4], iter(given[:4])):
        for prediction in model.predict(images, top_k=3):
            assert prediction.top == pytest.approx(expected, abs=1e-6)
            assert list(prediction.top.values()) == sorted(prediction.top.values(), reverse=True)
    assert [len(model.predict(images)) for images in (*given, given[:4])] == [1, 1, 1, 1, 1, 4]


def test_arrays_are_one_image_or_several():
    model = make()
    one, *several = *model.predict(COLORS), *model.predict(np.stack([COLORS, COLORS])), *model.predict([COLORS])
    assert len(several) == 3
    assert {prediction.label for prediction in several} == {one.label}


def test_an_answer_is_that_of_its_image_alone_in_any_batch_and_mode():
    model, images = make(), [image["image"] for image in make_images(["red", "blue"], 3)]
    expected = [model.predict(image)[0] for image in images]
    model.train()
    for batch_size in (1, 4, 32):
        found = model.predict(images, batch_size=batch_size)
        assert [(p.label, p.expert) for p in found] == [(p.label, p.expert) for p in expected]
        assert [p.probability for p in found] == pytest.approx([p.probability for p in expected], abs=1e-6)
    assert model.training
    assert model.predict([]) == []


def test_a_half_precision_trunk_takes_the_pixels():
    model = known_to(make_model(EXPERTS, make_vit().to(torch.bfloat16)))
    assert model.predict(COLORS)[0].label in EXPERTS["pets"]


def test_without_a_router_the_active_expert_answers_over_its_own_classes():
    model = make(router=None)
    z = model.pooled_features(make_processor()(images=[Image.fromarray(COLORS)], return_tensors="pt")["pixel_values"])
    for name, classes in EXPERTS.items():
        model.set_adapter(name)
        (prediction,) = model.predict(COLORS, top_k=9)
        posterior = model.expert_logits(z, name)[0].softmax(dim=0).tolist()
        assert prediction.top == pytest.approx(dict(zip(classes, posterior, strict=True)), abs=1e-6)
        assert (prediction.expert, prediction.unknown) == (name, False)
    assert prediction.top == {"owl": 1.0}  # of one class
    with model.disable_adapter(), pytest.raises(ValueError, match="the experts are disabled"):
        model.predict(COLORS)


class Silent(ScoreRouter):
    """A router that says nothing of `known`."""

    def cost(self, scores):
        return -scores.amax(dim=-1)

    def route(self, features, experts):
        return super().route(features, experts)._replace(known=None)


def test_a_router_that_does_not_say_what_is_known_has_the_confidence():
    model = make(router=Silent())
    (prediction,) = model.predict(COLORS)
    assert prediction.known == pytest.approx(prediction.probability, abs=1e-6)


def test_unknown_and_the_line_that_is_printed():
    model = make(unknown_below=1.0)
    (prediction,) = model.predict(COLORS)
    routed = model.route(ImageCollator(make_processor(), "image")([{"image": COLORS}])["pixel_values"])
    assert (prediction.known, prediction.unknown) == (pytest.approx(routed.known.item(), abs=1e-6), True)
    assert prediction.expert == list(EXPERTS)[routed.expert[0]]
    assert json.loads(json.dumps(prediction.to_dict())) == prediction.to_dict()
    said = Prediction("cat", 0.91234, "pets", 0.5, True, {"cat": 0.91234, "dog": 1.23456e-5})
    assert str(said) == "unknown, at best cat: 0.912, dog: 1.23e-05 (expert pets, known 0.5)"


@pytest.mark.parametrize("options", [{"top_k": 0}, {"batch_size": 0}])
def test_less_than_one_is_refused(options):
    with pytest.raises(ValueError, match="top_k and batch_size must be at least 1, got"):
        make().predict(COLORS, **options)


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    model, path = make(), tmp_path / "broken.png"
    path.write_bytes(b"no image")
    for broken, name in ((path, r".*broken\.png"), ({"bytes": b"no"}, "at position 2"), (None, "at position 2")):
        with pytest.raises(ValueError, match=f"the image {name} cannot be read: "):
            model.predict([COLORS, COLORS, broken], batch_size=2)
    with pytest.raises(TypeError, match=r"found the splits \['train'\]; pass one of them, such as images\['train'\]"):
        model.predict(DatasetDict(train=make_images(["red"], 1)))
    with pytest.raises(ValueError, match=r"found the columns of images \[\]; pass images\[column\], one of \['x'\]"):
        model.predict(Dataset.from_dict({"x": [1]}))


def test_a_streaming_dataset_is_read_as_the_dataset():
    model, data = make(), make_images(["red", "blue"], 2)
    assert model.predict(data.to_iterable_dataset(), batch_size=3) == model.predict(data, batch_size=3)


# --- the image processor ---


SQUARE = {"height": SIDE, "width": SIDE}
PROCESSORS = {
    "size": make_processor(image_mean=[0.1, 0.2, 0.3], resample=3),
    "without normalizing": make_processor(do_normalize=False, do_rescale=False),
    "shortest edge and crop": BitImageProcessorPil(size={"shortest_edge": 20}, crop_size=SQUARE),
    "crop larger than the image": BitImageProcessorPil(size={"shortest_edge": 9}, crop_size=SQUARE),
    "crop_pct": ConvNextImageProcessorPil(size={"shortest_edge": 16}, crop_pct=0.7),
    "rescale_offset": EfficientNetImageProcessorPil(size=SQUARE, rescale_offset=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", PROCESSORS)
def test_pixels_are_those_of_the_training_to_the_bit(kind):
    given = PROCESSORS[kind]
    model = known_to(make_model({"a": ["x", "y"]}), given)
    images = [Image.fromarray(COLORS), Image.fromarray(COLORS[:17, :11])]
    expected = given(images=images, return_tensors="pt")["pixel_values"]
    assert processor_of(model.base_model.layer, given) is given
    for is_old in (False, True):
        if is_old and kind in ("crop_pct", "rescale_offset"):
            with pytest.raises(ValueError, match=f"trained with a 'processor with {kind}', which cannot be made"):
                processor_of(model.base_model.layer)
            break
        made = processor_of(model.base_model.layer)
        assert torch.equal(made(images=images, return_tensors="pt")["pixel_values"], expected)
        model.peft_config["a"].processor.pop(PROCESSOR_TYPE, None)  # as files of version 0.1 have it


def test_grey_backbones_and_those_of_two_parts():
    model = known_to(
        make_model({"a": ["x", "y"]}, make_vit(num_channels=1)), make_processor(image_mean=[0.5], image_std=[0.5])
    )
    assert model.predict(COLORS)[0].expert == "a"
    model = known_to(make_model({"a": ["x", "y"]}, make_dinov2()), PROCESSORS["shortest edge and crop"])
    assert model.predict([COLORS, COLORS[:8]])[0].expert == "a"


def test_a_processor_that_is_not_known_is_asked_for():
    model = make_model({"a": ["x", "y"]})
    with pytest.raises(ValueError, match=r"do not say by which image processor .* as processing_class"):
        model.predict(COLORS)
    assert model.predict(COLORS, processing_class=make_processor())[0].expert == "a"
    for facts, name in (
        ({"data_config": {}}, "processor with data_config"),
        ({"do_resize": True, PROCESSOR_TYPE: "Mine"}, "Mine"),
    ):
        model.peft_config["a"].processor = facts
        with pytest.raises(ValueError, match=rf"trained with a '{name}.*, which cannot be made .* processing_class"):
            model.predict(COLORS)


def test_a_size_that_would_fill_the_memory_is_refused():
    model = make()
    for size in ({"height": 10**5, "width": 10**5}, {"shortest_edge": "9"}, 10**5):
        model.peft_config["pets"].processor = {**FACTS, "size": size}
        with pytest.raises(ValueError, match=r"makes images of .* pixels, which is refused"):
            model.predict(COLORS)


def test_experts_of_a_run_bring_their_processor_with_their_files(tmp_path):
    trainer = make_trainer(tmp_path / "run", num_train_epochs=1, processor=make_processor(resample=3))
    trainer.train()
    test = trainer.stream[0].test
    expected = trainer.model.predict(test, processing_class=make_processor(resample=3))
    save_experts(trainer.model, tmp_path / "saved")
    assert load_experts(make_vit(), tmp_path / "saved").predict(test) == trainer.model.predict(test) == expected


def test_a_class_of_processors_with_the_same_facts_warns_of_nothing(recwarn):
    model = make()
    one, other = (LucaConfig(classes=["x"], processor={**FACTS, PROCESSOR_TYPE: name}) for name in ("A", "B"))
    model.add_adapter("one", one)
    model.add_adapter("other", other)
    buffer = io.BytesIO()
    Image.fromarray(COLORS).save(buffer, "png")
    assert model.predict({"bytes": buffer.getvalue()})
    assert not [warning for warning in recwarn if "image processor" in str(warning.message)]
