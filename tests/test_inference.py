"""Images in use are those of training, for every kind of image and however they are given."""

import base64
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from helpers import SIDE, D, make_model, make_processor, make_trainer, make_vit, pixels
from PIL import Image
from transformers import ViTImageProcessorPil, pipeline

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
from peft_luca.routing import ROUTERS
from peft_luca.tuner.backbone import processor_facts


ROOT = Path(__file__).parent.parent
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs onnx, onnxscript and onnxruntime: pip install peft-luca[onnx]",
)
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
    seen = pixel_values(model, [clear, deep], processor)
    assert seen[:, :, 0, 0].tolist() == [[0x10, 0x20, 0x30], [255, 255, 255]]
    with pytest.warns(UserWarning, match=r"'b' was trained with .*'white', .* with .*'#102030', .* as the first"):
        model.add_adapter("b", LucaConfig(classes=["y"], white_level=4095))


def test_a_path_that_is_not_there_is_named():
    with pytest.raises(OSError, match=r"nowhere/1\.png"):
        asked(make_model({"a": ["x", "y"]}))("nowhere/1.png")
    with pytest.raises(OSError, match="cannot identify image"):
        asked(make_model({"a": ["x", "y"]}))("data:image/png;base64," + base64.b64encode(io.BytesIO().read()).decode())


# --- one graph for all ---


def with_facts(router, base=None, processor=None):
    """Two experts with statistics, as a trainer leaves them."""
    model = make_model({"a": ["cat", "dog", "owl"], "b": ["sun", "moon"]}, base=base)
    for name, config in model.peft_config.items():
        config.processor = processor_facts(make_processor() if processor is None else processor)
        features = torch.randn(60, D, generator=torch.Generator().manual_seed(len(name)))
        labels = torch.arange(60) % len(config.classes)
        model.collect_statistics(name, features + 3 * labels[:, None], labels, random_features=40)
    layer = model.base_model.layer
    for buffer in (layer.luca_reference_mean, layer.luca_reference_std):
        buffer["b"].copy_(buffer["a"])
    layer._experts = None
    model.set_router(router)
    return model


@needs_onnx
@pytest.mark.parametrize(
    "router",
    [pytest.param(n, marks=() if n in ("auto", "nearest") else pytest.mark.slow) for n in ROUTERS if n != "oracle"],
)
def test_every_router_is_exported_and_answered_from_without_torch(router, tmp_path):
    model = with_facts(router)
    export_onnx(model, tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)) for size in ((20, 31, 3), (16, 9, 4))]
    files = [str(tmp_path / f"{i}.png") for i in range(2)]
    for picture, file in zip(pictures, files, strict=True):
        picture.save(file)
    if router != "auto":  # the process is started once
        return compare_graph(model, tmp_path / "model.onnx")
    code = "import sys, runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__'); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, str(ROOT / "examples" / "onnx_predict.py"), str(tmp_path / "model.onnx")]
    ran = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for line, file, wanted in zip(ran.stdout.splitlines(), files, model.predict(files), strict=True):
        found = json.loads(line)
        assert (found["image"], found["label"], found["expert"]) == (file, wanted.label, wanted.expert)
        assert found["unknown"] == wanted.unknown
        assert [found["probability"], found["known"]] == pytest.approx([wanted.probability, wanted.known], abs=1e-4)


def compare_graph(model, path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        x = pixels(batch)
        wanted = model.route(x)
        logits, expert, known, _ = session.run(None, {"pixel_values": x.numpy()})
        np.testing.assert_allclose(logits, wanted.logits.numpy(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(known, wanted.known.numpy(), rtol=1e-3, atol=1e-4)
        assert (expert == wanted.expert.numpy()).all()


def test_what_no_graph_can_hold_is_refused(tmp_path):
    model = with_facts("entropy")
    model.set_router(lambda scores: -scores.amax(dim=2))
    with pytest.raises(ValueError, match=r"needs a router with a name, got .* Call set_router"):
        export_onnx(model, tmp_path / "model.onnx")
