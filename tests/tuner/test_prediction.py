"""`predict`: images of any kind and number, the two numbers of an answer, and the image processor of the experts."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features
from datasets import Image as ImageFeature
from helpers import SIDE, make_dinov2, make_model, make_processor, make_trainer, make_vit
from PIL import Image
from transformers import BitImageProcessorPil, ConvNextImageProcessorPil, ViTImageProcessorPil

from peft_luca import LucaPipeline, Prediction, load_experts, pixel_values, save_experts
from peft_luca.tuner.backbone import processor_facts
from peft_luca.tuner.prediction import processor_of


RNG = np.random.default_rng(0)
COLORS = RNG.integers(0, 256, (3, 40, 24, 3), dtype=np.uint8)
PICTURES = [Image.fromarray(COLORS[0]), Image.fromarray(COLORS[1]).convert("L"), Image.new("RGBA", (9, 30))]


@pytest.fixture
def model():
    model = make_model({"a": ["cat", "dog", "owl"], "b": ["sun", "cat"]})
    for config in model.peft_config.values():
        config.processor = processor_facts(make_processor())
    model.set_router("nearest")
    return model


def expected(model, images):
    output = model.route(pixel_values(model, images, make_processor()))
    return output, output.logits.softmax(1)


def test_each_image_has_its_class_its_expert_and_whether_it_is_known(model):
    model.set_router("nearest", unknown_below=sorted(one.known for one in model.predict(PICTURES))[1])
    found = model.predict(PICTURES, top_k=2, batch_size=2)
    output, p = expected(model, PICTURES)
    assert [prediction.label for prediction in found] == [model.classes[i] for i in p.argmax(1)]
    assert [prediction.probability for prediction in found] == pytest.approx(p.amax(1).tolist(), abs=1e-6)
    assert [prediction.expert for prediction in found] == [list(model.experts)[i] for i in output.expert]
    assert [prediction.known for prediction in found] == pytest.approx(output.known.tolist(), abs=1e-6)
    assert [prediction.unknown for prediction in found] == output.unknown.tolist()
    for prediction, row in zip(found, p, strict=True):
        values, places = row.topk(2)
        assert list(prediction.top) == [model.classes[i] for i in places]
        assert list(prediction.top.values()) == pytest.approx(values.tolist(), abs=1e-6)
        assert json.loads(json.dumps(prediction.to_dict())) == vars(prediction)


def test_a_prediction_prints_on_one_line():
    one = Prediction("cat", 0.934, "pets", 0.8, False, {"cat": 0.934, "dog": 0.0001})
    assert str(one) == "cat 93.4%, dog <0.1% (expert pets)"
    assert str(Prediction("cat", 0.5, None, 0.01, True, {"cat": 0.5})) == "unknown; nearest: cat 50.0%"


def test_images_may_be_given_in_any_way(model, tmp_path):
    path = tmp_path / "image.png"
    PICTURES[0].save(path)
    one = model.predict(PICTURES[0])
    dataset = Dataset.from_dict({"n": [1], "shown": [str(path)]}).cast_column("shown", ImageFeature())
    stored = {"bytes": path.read_bytes(), "path": None}
    for same in (path, str(path), COLORS[0], COLORS[:1], [COLORS[0]], (path,), stored, [stored], dataset):
        assert model.predict(same) == one
    assert model.predict(dataset["shown"]) == one
    assert model.predict(dataset.to_iterable_dataset()) == one
    assert [two.label for two in model.predict(row for row in [path, path])] == [one[0].label] * 2
    assert model.predict([]) == []
    assert len(model.predict(COLORS, top_k=99)[0].top) == 4


def test_what_cannot_be_asked_is_refused_in_words(model, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"image 1 .*broken\.png cannot be read: Unident"):
        model.predict([PICTURES[0], tmp_path / "broken.png"])
    with pytest.raises(ValueError, match=r"image 2 cannot be read: TypeError.* needed a PIL image"):
        model.predict([*PICTURES[:2], 7])
    with pytest.raises(ValueError, match="top_k and batch_size must be at least 1, got 0 and 32"):
        model.predict(PICTURES, top_k=0)
    texts = Dataset.from_dict({"text": ["a"]})
    with pytest.raises(ValueError, match=r"must have one column of images, but has 0: \[\]"):
        model.predict(texts)
    with pytest.raises(ValueError, match="images has the splits or columns 'train', 'test': pass one of them"):
        model.predict(DatasetDict(train=texts, test=texts))


def test_one_active_expert_answers_over_its_own_classes_and_without_it_the_head(model):
    model.set_adapter("b")
    model.train()
    found = model.predict(PICTURES, top_k=2)
    assert model.training
    pixels = pixel_values(model, PICTURES, make_processor())
    p = model.expert_logits(model.pooled_features(pixels), "b").detach().softmax(1)
    assert [list(one.top.items()) for one in found] == [
        [(["sun", "cat"][i], pytest.approx(float(row[i]), abs=1e-6)) for i in row.argsort(descending=True)]
        for row in p
    ]
    assert {(one.expert, one.known, one.unknown) for one in found} == {("b", None, False)}
    with model.disable_adapter():
        base = model.predict(PICTURES)
    logits = make_vit()(pixels).logits
    assert [one.label for one in base] == [f"base {i}" for i in logits.argmax(1)]
    assert base[0].expert is None
    alone = make_model({"only": ["one"]})
    assert alone.predict(PICTURES, processing_class=make_processor())[0].probability == 1.0


@pytest.mark.parametrize(
    "processor",
    [
        make_processor(),
        ViTImageProcessorPil(size={"height": 20, "width": 12}, resample=3, image_mean=[0.1, 0.2, 0.3]),
        BitImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": SIDE, "width": SIDE}),
        ViTImageProcessorPil(do_resize=False, do_normalize=False),
    ],
    ids=["vit", "vit of another size", "bit", "as they are"],
)
def test_the_experts_know_their_image_processor_to_the_bit(tmp_path, processor):
    model = make_model({"a": ["x", "y"]}, base=make_dinov2())
    model.peft_config["a"].processor = processor_facts(processor)
    save_experts(model, tmp_path)
    loaded = load_experts(make_dinov2(), tmp_path)
    for image in (PICTURES[0], PICTURES[2]):
        own, given = (pixel_values(loaded, [image], p) for p in (processor_of(loaded), processor))
        assert torch.equal(own, given)


def test_an_unknown_image_processor_must_be_given():
    model = make_model({"a": ["x", "y"]})
    with pytest.raises(ValueError, match=r"none of them was trained by a trainer with one\. Pass processing_class="):
        model.predict(PICTURES)
    model.peft_config["a"].processor = processor_facts(ConvNextImageProcessorPil(size={"shortest_edge": SIDE}))
    with pytest.raises(ValueError, match="their processor has crop_pct"):
        model.predict(PICTURES)
    assert len(model.predict(PICTURES, processing_class=make_processor())) == 3


def test_a_pipeline_answers_the_same_and_can_say_unknown(model):
    model.set_router("nearest", unknown_below=sorted(one.known for one in model.predict(PICTURES))[1])
    found = model.predict(PICTURES, top_k=3)
    assert {one.unknown for one in found} == {True, False}
    for used in (model, model.get_base_model()):
        classify = LucaPipeline(model=used, device="cpu")
        for image, one in zip(PICTURES, found, strict=True):
            answers = classify(image, top_k=3)
            assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(one.top, abs=1e-6)
            told = classify(image, top_k=1, unknown_label="none of them")[0]
            wanted = ("none of them", 1 - one.known) if one.unknown else (one.label, one.probability)
            assert (told["label"], told["score"]) == (wanted[0], pytest.approx(wanted[1], abs=1e-6))


def test_a_trainers_model_answers_at_once(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=1)
    trainer.train()
    test = trainer.stream[0].test
    found = trainer.model.predict(test)
    right = [one.label == trainer.stream.classes[label] for one, label in zip(found, test["labels"], strict=True)]
    assert sum(right) / len(right) == trainer.evaluate("task_0")["eval_accuracy"]
    assert 0 <= found[0].known <= 1
    assert Features(test.features)
