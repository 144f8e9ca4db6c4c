"""Images in use are those of training, for every kind of image and however they are given."""

import base64
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from helpers import SIDE, make_model, make_processor, make_trainer, make_vit
from PIL import Image
from transformers import BitImageProcessorPil, ViTImageProcessorPil, pipeline

from peft_luca import (
    ImageCollator,
    LucaConfig,
    LucaPipeline,
    TaskStream,
    export_onnx,
    load_experts,
    pixel_values,
    save_experts,
)
from peft_luca.tuner.backbone import processor_facts


EXAMPLES = Path(__file__).parent.parent / "examples"
RNG = np.random.default_rng(0)
COLORS = RNG.integers(0, 256, (SIDE, 2 * SIDE, 3), dtype=np.uint8)
DEEP = RNG.integers(30_000, 60_000, (SIDE, 2 * SIDE)).astype(np.uint16)


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return {"exif": exif}


KINDS = {
    "colour": (Image.fromarray(COLORS), "png", {}),
    "rotated by EXIF": (Image.fromarray(COLORS), "jpeg", rotated()),
    "16 bits": (Image.fromarray(DEEP), "png", {}),
    "floats": (Image.fromarray((DEEP / 65535).astype(np.float32)), "tiff", {}),
    "transparent": (Image.fromarray(np.dstack([COLORS, COLORS[..., :1]])), "png", {}),
    "palette with a transparent colour": (Image.fromarray(COLORS).convert("P"), "png", {"transparency": 3}),
    "animation": (Image.fromarray(COLORS), "gif", {"save_all": True, "append_images": [Image.new("RGB", (32, 16))]}),
}


def asked(model, processor=None):
    options = {"image_processor": make_processor() if processor is None else processor, "device": "cpu"}
    return pipeline("image-classification", model=model, pipeline_class=LucaPipeline, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("background", ["white", "black"])
def test_the_pipeline_answers_what_the_trainer_measured(tmp_path, kind, background):
    image, suffix, options = KINDS[kind]
    path = tmp_path / f"image.{suffix}"
    image.save(path, **options)
    model = make_model({"a": ["cat", "dog"], "b": ["owl"]}, background=background)
    model.set_router("entropy")
    encoded = {"bytes": path.read_bytes(), "path": None}
    seen = ImageCollator(make_processor(), "image", background=background)([{"image": encoded}])["pixel_values"]
    expected = dict(zip(model.classes, model(seen).logits[0].softmax(dim=0).tolist(), strict=True))
    text = f"data:image/{suffix};base64,{base64.b64encode(path.read_bytes()).decode()}"
    given = [str(path), Image.open(path), text]
    if not options:
        given.append(np.asarray(image))
    for used in (model, model.get_base_model()):
        for one in given:
            answers = asked(used)(one)
            assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(expected, abs=1e-6)
    assert torch.equal(pixel_values(model, [path, path], make_processor()), torch.cat([seen, seen]))


def test_sixteen_bits_are_answered_as_they_were_learned(tmp_path):
    """Three levels of grey, which 8 bits of the image's own cannot tell apart: all are above 255."""
    rng = np.random.default_rng(0)
    levels = {"dark": 2000, "mid": 20_000, "bright": 45_000}
    images = {
        name: [Image.fromarray((rng.integers(0, 2000, (8, 8)) + level).astype("uint16")) for _ in range(8)]
        for name, level in levels.items()
    }
    trainer = make_trainer(tmp_path, TaskStream.from_dataset(as_dataset(images)), num_train_epochs=1)
    trainer.train()
    classify = asked(trainer.model)
    right = [classify(image, top_k=1)[0]["label"] == name for name, of_class in images.items() for image in of_class]
    assert all(right)


def as_dataset(images):
    data = {
        "image": [image for of_class in images.values() for image in of_class],
        "label": [i for i, of_class in enumerate(images.values()) for _ in of_class],
    }
    return Dataset.from_dict(data, Features({"image": ImageFeature(), "label": ClassLabel(names=list(images))}))


def test_how_images_are_read_is_saved_with_the_experts(tmp_path):
    save_experts(make_model({"a": ["x"]}, background="#102030", white_level=4095), tmp_path)
    model = load_experts(make_vit(), tmp_path)
    clear, deep = Image.new("RGBA", (8, 8)), Image.fromarray(np.full((8, 8), 4095, np.uint16))
    processor = ViTImageProcessorPil(do_resize=False, do_normalize=False, do_rescale=False)
    pixels = pixel_values(model, [clear, deep], processor)
    assert pixels[:, :, 0, 0].tolist() == [[0x10, 0x20, 0x30], [255, 255, 255]]
    with pytest.warns(UserWarning, match=r"'b' was trained with .*'white', .* with .*'#102030', .* as the first"):
        model.add_adapter("b", LucaConfig(classes=["y"], white_level=4095))


def test_a_path_that_is_not_there_is_named():
    with pytest.raises(OSError, match=r"nowhere/1\.png"):
        asked(make_model({"a": ["x", "y"]}))("nowhere/1.png")
    with pytest.raises(ValueError, match=r"at position 0 cannot be read.*cannot identify image"):
        asked(make_model({"a": ["x", "y"]}))("data:image/png;base64," + base64.b64encode(io.BytesIO().read()).decode())


# --- without an image processor, and of no known class ---


def knowing(**options):
    """A routed model whose experts know their image processor."""
    model = make_model({"a": ["cat", "dog"], "b": ["owl"]})
    for config in model.peft_config.values():
        config.processor = processor_facts(make_processor(resample=3))
    model.set_router("entropy", **options)
    return model


def test_the_pipeline_needs_no_image_processor_and_answers_as_predict():
    model, images = knowing(), [Image.fromarray(COLORS), Image.fromarray(DEEP)]
    for used in (model, model.get_base_model()):
        classify = pipeline("image-classification", model=used, pipeline_class=LucaPipeline, device="cpu")
        for answers, prediction in zip(classify(images, batch_size=2), model.predict(images, top_k=3), strict=True):
            scores = {answer["label"]: answer["score"] for answer in answers}
            assert scores == pytest.approx(prediction.top, abs=1e-6)
    assert torch.equal(pixel_values(model, images), pixel_values(model, images, make_processor(resample=3)))


def test_one_class_has_the_probability_that_predict_gives():
    model = knowing()
    model.set_adapter("b")
    classify = pipeline("image-classification", model=model, pipeline_class=LucaPipeline, device="cpu")
    assert classify(Image.fromarray(COLORS)) == [{"label": "owl", "score": 1.0}]


@pytest.mark.parametrize("below", [0.0, 1.0])
def test_the_pipeline_says_what_is_of_no_known_class_if_it_is_told_to(below):
    model, images = knowing(unknown_below=below), [Image.fromarray(COLORS), Image.fromarray(DEEP)]
    for used in (model, model.get_base_model()):
        classify = pipeline("image-classification", model=used, pipeline_class=LucaPipeline, device="cpu")
        for answers, plain, prediction in zip(
            classify(images, unknown_label="unknown", batch_size=2),
            classify(images, batch_size=2),
            model.predict(images),
            strict=True,
        ):
            unknown = [{"label": "unknown", "score": pytest.approx(1 - prediction.known, abs=1e-6)}]
            assert answers == (unknown if below else []) + plain
            assert prediction.unknown is bool(below)


# --- a file without torch ---


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs onnx, onnxscript and onnxruntime: pip install peft-luca[onnx]",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_example_answers_from_the_file_without_torch(tmp_path):
    processor = BitImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": SIDE, "width": SIDE})
    model = make_model({"a": ["cat", "dog"], "b": ["owl"]}, background="#204060")
    model.set_router("entropy")
    export_onnx(model, tmp_path / "model.onnx", processor)
    for kind, (image, suffix, options) in KINDS.items():
        image.save(tmp_path / f"{kind.replace(' ', '_')}.{suffix}", **options)
    Image.fromarray(COLORS[:9, :7]).save(tmp_path / "odd.png")
    paths = sorted(str(path) for path in tmp_path.iterdir() if path.suffix != ".onnx")
    source = (EXAMPLES / "onnx_predict.py").read_text(encoding="utf-8")
    script = f"import sys; sys.modules.update(torch=None, peft_luca=None, transformers=None)\n{source}"
    command = [sys.executable, "-c", script, str(tmp_path / "model.onnx"), *paths]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for line, path, expected in zip(said, paths, model.predict(paths, processing_class=processor), strict=True):
        found = re.fullmatch(r"(.*): (\w+) (\S+) \(expert (\w)\)", line)
        assert found.groups()[:2] + found.groups()[3:] == (path, expected.label, expected.expert)
        assert float(found[3]) == pytest.approx(expected.probability, abs=1e-4)
