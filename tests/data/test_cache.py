"""[CLS] is computed once, kept in files that are whole or not there, and found again exactly when it is the same."""

import os
import re

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, Features, Image, Value, load_dataset
from helpers import (
    NAMES,
    SIDE,
    ForwardCount,
    expert_tensors,
    files_in,
    make_arguments,
    make_images,
    make_model,
    make_processor,
    make_splits,
    make_stream,
    make_trainer,
    make_vit,
    read_json,
)
from transformers import ViTImageProcessorPil

from peft_luca import FeatureDataset, ImageCollator, TaskStream
from peft_luca import utils as cache
from peft_luca.data.feature_cache import default_cache_dir, digest_images, extract_features, features_key
from peft_luca.data.feature_file import PartialFeatures
from peft_luca.utils import atomic_write, explain_write_errors


@pytest.fixture
def kept(tmp_path):
    """Settings of a trainer whose [CLS] is kept in a folder of this test's own."""
    return {"features_cache_dir": str(tmp_path / "features")}


def pluralize(folder, **settings):
    """A trainer that has learnt its stream, and how many images its trunk saw since it was made."""
    model = make_vit() if "model" not in settings else settings.pop("model")
    count = ForwardCount(model)
    trainer = make_trainer(folder, model=model, **settings)
    trainer.train()
    trainer.evaluate()
    return trainer, count.images


def images_of(*contents):
    return Dataset.from_dict(
        {"image": [{"bytes": content, "path": f"{i}.png"} for i, content in enumerate(contents)]},
        features=Features({"image": Image(decode=False)}),
    ).cast_column("image", Image())


def test_every_image_is_looked_at_once_and_never_again(tmp_path, kept):
    _, first = pluralize(tmp_path / "first", luca_config=None, **kept)
    assert first == 192 + 48 + 24  # reference pictures, train and test
    files = files_in(tmp_path / "features")
    assert len(files) == 6
    assert all(name.endswith(".arrow") for name in files)
    _, second = pluralize(tmp_path / "second", seed=8, num_train_epochs=1, **kept)
    assert second == 192
    assert files_in(tmp_path / "features") == files


def test_labels_are_no_part_of_it(tmp_path, kept):
    pluralize(tmp_path / "first", **kept)
    trainer, images = pluralize(tmp_path / "second", stream=make_stream(order=NAMES[2:] + NAMES[:2]), **kept)
    assert images == 192
    assert trainer.features(trainer.stream[0], "train").labels.tolist() == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    "change",
    ["backbone", "config", "processor", "processor class", "images", "order", "dtype", "augmentation", "view", "seed"],
)
def test_a_change_is_never_missed(change):
    def key(
        model=None, size=SIDE, processor=None, names=NAMES[:2], rows=slice(None), dtype="float32", augmentation=True,
        view=0, seed=0,
    ):  # fmt: skip
        backbone = make_model({"t": ["a"]}, base=make_vit() if model is None else model).base_model.backbone
        processor = processor or ViTImageProcessorPil(size={"height": size, "width": size})
        images = make_images(names, 2).select(list(range(4))[rows])
        collator = ImageCollator(processor, "image", None, augmentation, view, seed)
        return features_key(backbone, collator, digest_images(images, "image"), dtype)

    class Other(ViTImageProcessorPil):
        pass

    changed = {
        "backbone": {"model": make_vit(seed=1)},
        "config": {"model": make_vit(layer_norm_eps=1e-3)},
        "processor": {"size": SIDE // 2},
        "processor class": {"processor": Other(size={"height": SIDE, "width": SIDE})},
        "images": {"names": NAMES[1:3]},
        "order": {"rows": slice(None, None, -1)},
        "dtype": {"dtype": "float16"},
        "augmentation": {"augmentation": False, "view": None},
        "view": {"view": 1},
        "seed": {"seed": 1},
    }[change]
    assert key() == key()
    assert key() != key(**changed)


def test_a_head_of_other_labels_is_no_change():
    keys = set()
    for labels in (2, 7):
        backbone = make_model({"t": ["a"]}, base=make_vit(num_labels=labels)).base_model.backbone
        keys.add(features_key(backbone, ImageCollator(make_processor(), "image"), "images"))
    assert len(keys) == 1


def test_images_are_their_bytes(tmp_path):
    names = NAMES[:2]
    for name, image in zip(names, make_images(names, 1)["image"], strict=True):
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "0.png")
    files = load_dataset("imagefolder", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / "c"))
    digest = digest_images(files, "image")
    contents = [(tmp_path / name / "0.png").read_bytes() for name in sorted(names)]
    assert digest_images(images_of(*contents), "image") == digest
    assert digest_images(images_of(*contents[::-1]), "image") != digest
    assert digest_images(images_of(contents[0] + contents[1]), "image") != digest
    # Changed in place, with the old time put back.
    path = tmp_path / names[0] / "0.png"
    before = path.stat()
    make_images(names, 1, seed=5)[0]["image"].save(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest_images(files, "image") != digest


def test_the_default_folder_is_in_the_cache_of_datasets(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    pluralize(tmp_path / "out", stream=make_stream(increment=6))
    assert default_cache_dir() == tmp_path / "hf" / "peft_luca"
    assert len(files_in(default_cache_dir())) == 2


# --- what is in a file ---


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 1e-3), ("bfloat16", 1e-2)])
def test_kept_in_any_type(tmp_path, dtype, tolerance):
    vectors = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "f.arrow"
    with PartialFeatures.of(path, dtype) as partial:
        partial.append(10, vectors.to(getattr(torch, dtype)), [])
        partial.finish()
    features = FeatureDataset.from_file(path, torch.arange(10))
    assert features.features.dtype == getattr(torch, dtype)
    batch = features.__getitems__([7, 0, 7])
    assert batch["features"].dtype == torch.float32
    assert batch["labels"].tolist() == [7, 0, 7]
    torch.testing.assert_close(batch["features"], vectors[[7, 0, 7]], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(features[3]["features"], vectors[3], rtol=tolerance, atol=tolerance)
    assert Dataset.from_file(str(path)).features["row"] == Value("int64")
    assert files_in(tmp_path) == ["f.arrow"]


def test_read_without_a_copy(tmp_path):
    path = tmp_path / "f.arrow"
    with PartialFeatures.of(path, "float32") as partial:
        partial.append(50_000, torch.zeros(50_000, 64), [])
        partial.finish()
    before = pa.total_allocated_bytes()
    features = FeatureDataset.from_file(path, torch.zeros(50_000, dtype=torch.long))
    assert pa.total_allocated_bytes() - before < 1_000_000
    assert features.features.shape == (50_000, 64)
    mapped = [line for line in open("/proc/self/maps", encoding="utf-8") if "f.arrow" in line]
    start, end = (int(x, 16) for x in mapped[0].split()[0].split("-"))
    assert start <= features.features.data_ptr() < end


def test_experts_learn_from_halves_too(tmp_path):
    whole, _ = pluralize(tmp_path / "whole", features_cache_dir=str(tmp_path / "c"))
    for dtype in ("float16", "bfloat16"):
        half, _ = pluralize(tmp_path / dtype, features_cache_dir=str(tmp_path / "c"), features_dtype=dtype)
        for key, tensor in expert_tensors(half.model, "task_1").items():
            torch.testing.assert_close(tensor, expert_tensors(whole.model, "task_1")[key], rtol=0.1, atol=0.1)


# --- augmented views ---


def test_views_are_computed_once_each_and_take_turns(tmp_path, kept):
    settings = {"stream": make_stream(increment=6), "augmented_views": 2, "num_train_epochs": 3, **kept}
    trainer, images = pluralize(tmp_path / "first", **settings)
    assert trainer.args.augmentation is True
    assert images == 192 + 48 + 24 + 2 * 48
    again, images = pluralize(tmp_path / "second", **settings)
    assert images == 192
    for key, tensor in expert_tensors(trainer.model, "task_0").items():
        assert torch.equal(tensor, expert_tensors(again.model, "task_0")[key])
    views = [again._extract(again.stream[0], "train", view).features for view in (0, 1)]
    plain = again.features(again.stream[0], "train").features
    assert not torch.allclose(views[0], views[1], atol=1e-3)
    assert not torch.allclose(views[0], plain, atol=1e-3)
    dataset = FeatureDataset(views[0], torch.zeros(48), views)
    for epoch in range(4):
        dataset.set_epoch(epoch)
        assert torch.equal(dataset.features, views[epoch % 2])


def test_a_view_depends_on_its_row_alone(tmp_path):
    model = make_model({"t": ["a"]})
    images = make_images(NAMES, 2).rename_column("label", "labels")
    collator = ImageCollator(make_processor(), "image", None, True, 3, 1)
    first = extract_features(model.pooled_features, images, collator, 12, disable_tqdm=True).features
    torch.manual_seed(99)
    second = extract_features(model.pooled_features, images, collator, 5, num_workers=1, disable_tqdm=True).features
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"augmented_views": -1}, "augmented_views must be 0 or a number of views, got -1"),
        ({"augmented_views": 2, "augmentation": False}, "augmented_views=2 keeps"),
        ({"augmented_views": 2, "cache_features": False}, "goes with neither"),
        ({"features_dtype": "int8"}, "features_dtype must be one of float32, float16, bfloat16, got 'int8'"),
        ({"on_bad_image": "ignore"}, "on_bad_image must be 'raise' or 'skip', got 'ignore'"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_arguments(tmp_path, **settings)


# --- images that cannot be read ---


def broken_splits():
    splits = make_splits(NAMES[:2], 8, 4)
    rows = splits["train"].cast_column("image", Image(decode=False)).to_list()
    rows[3]["image"] = {"bytes": b"no picture at all", "path": "photos/third.jpg"}
    rows[12]["image"] = {"bytes": rows[12]["image"]["bytes"][:40], "path": None}
    splits["train"] = Dataset.from_list(rows, features=splits["train"].features)
    return splits


def test_a_broken_image_stops_the_run_with_its_name(tmp_path, kept):
    trainer = make_trainer(tmp_path / "out", TaskStream.from_dataset(broken_splits()), **kept)
    with pytest.raises(ValueError, match=r"image in row 3 \(photos/third.jpg\) cannot be read: UnidentifiedImageErr"):
        trainer.train()
    assert not any(name.endswith(".arrow") for name in files_in(tmp_path / "features"))


def test_a_broken_image_is_skipped_and_counted(tmp_path, kept, caplog):
    stream = TaskStream.from_dataset(broken_splits())
    said = []
    trainer = make_trainer(tmp_path / "out", stream, on_bad_image="skip", **kept)
    trainer._say = said.append
    trainer.train()
    assert any("2 of 16 train images cannot be read and are left out, first row 3" in line for line in said)
    features = trainer.features(stream[0], "train")
    assert features.skipped == [3, 12]
    assert features.labels.tolist() == [trainer.stream.classes.index(n) for n in ["red"] * 7 + ["green"] * 7]
    assert read_json(tmp_path / "out" / "results.json")["tasks"][0]["skipped_images"] == 2
    # Nobody who did not ask for it gets a file with rows missing.
    strict = make_trainer(tmp_path / "strict", TaskStream.from_dataset(broken_splits()), **kept)
    with pytest.raises(ValueError, match=r"row 3 \(photos/third.jpg\) cannot be read: an earlier run has skipped it"):
        strict.train()


def test_training_on_images_skips_them_too(tmp_path, kept):
    stream = TaskStream.from_dataset(broken_splits())
    trainer = make_trainer(tmp_path / "out", stream, on_bad_image="skip", cache_features=False, **kept)
    trainer.train()
    assert trainer.state.max_steps == 3 * 2  # 14 images in batches of 8, three times


def test_a_missing_file_is_named(tmp_path, kept):
    features = Features({"image": Image(), "label": Value("string")})
    gone = str(tmp_path / "gone.png")
    stream = TaskStream.from_dataset(Dataset.from_dict({"image": [gone], "label": ["a"]}, features=features))
    with pytest.raises(ValueError, match=r"image in row 0 \(.*gone.png\) cannot be read: FileNotFoundError"):
        make_trainer(tmp_path / "out", stream, **kept).train()


# --- whole or not at all ---


class Stop(Exception):
    pass


@pytest.mark.parametrize("passes", [1, 3])
def test_an_interrupted_extraction_goes_on_at_a_batch(tmp_path, monkeypatch, passes):
    monkeypatch.setattr(cache, "CHECKPOINT_SECONDS", 0.0)
    model = make_model({"t": ["a"]})
    images = make_images(NAMES, 3).rename_column("label", "labels")
    arguments = (images, ImageCollator(make_processor(), "image"), 4)
    whole = extract_features(model.pooled_features, *arguments, disable_tqdm=True)
    done = 0

    def fail(pixels):
        nonlocal done
        if done == passes:
            raise Stop
        done += 1
        return model.pooled_features(pixels)

    path = tmp_path / "f.arrow"
    with pytest.raises(Stop):
        extract_features(fail, *arguments, path=path, disable_tqdm=True)
    assert not path.exists()
    count = ForwardCount(model)
    rest = extract_features(model.pooled_features, *arguments, path=path, disable_tqdm=True)
    assert count.images == 18 - 4 * passes
    assert torch.equal(rest.features, whole.features)
    assert files_in(tmp_path) == ["f.arrow"]


def test_what_another_process_computes_is_waited_for(tmp_path):
    path = tmp_path / "f.arrow"
    with PartialFeatures.of(path, "float32") as partial:
        partial.append(2, torch.ones(2, 3), [])
        with pytest.raises(TimeoutError), PartialFeatures.of(path, "float32", timeout=0):
            pass
        partial.finish()
    with PartialFeatures.of(path, "float32") as partial:
        assert partial is None  # it is there now


@pytest.mark.parametrize("left", [(".partial", ".partial.json", ".lock"), (".partial.json", ".lock"), (".lock",)])
def test_what_a_kill_at_the_very_end_leaves_is_cleared_away(out, left):
    make_trainer(out / "run", features_cache_dir=str(out / "cache"), num_train_epochs=0).train()
    files = sorted((out / "cache").iterdir())
    before = {path: path.read_bytes() for path in files}
    for suffix in left:
        files[0].with_suffix(suffix).write_text('{"rows": 1, "width": 1, "bad": []}')
    make_trainer(out / "again", features_cache_dir=str(out / "cache"), num_train_epochs=0).train()
    assert {path: path.read_bytes() for path in sorted((out / "cache").iterdir())} == before


def test_write_whole(tmp_path):
    path = tmp_path / "a"
    with atomic_write(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()

    def fail():
        with atomic_write(path) as temporary:
            temporary.write_text("second")
            raise Stop

    with pytest.raises(Stop):
        fail()
    assert path.read_text() == "first"
    assert files_in(tmp_path) == ["a"]
    with pytest.raises(OSError, match=r"cannot write .*: No space left on device. What was finished before is kept"):
        with explain_write_errors(path):
            raise OSError(28, os.strerror(28))


def test_none_can_be_read(tmp_path):
    with PartialFeatures.of(tmp_path / "f.arrow", "float32") as partial:
        partial.append(2, None, [0, 1])
        with pytest.raises(ValueError, match="none of the 2 images can be read"):
            partial.finish()


def test_shuffled_access_is_what_a_loader_asks_for(tmp_path):
    vectors = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    with PartialFeatures.of(tmp_path / "f.arrow", "float32") as partial:
        for part in vectors.split(7):
            partial.append(len(part), part, [])
        partial.finish()
    features = FeatureDataset.from_file(tmp_path / "f.arrow", torch.arange(100))
    loader = torch.utils.data.DataLoader(features, 9, shuffle=True, collate_fn=FeatureDataset.collate)
    seen = np.zeros(100, dtype=int)
    for batch in loader:
        assert torch.equal(batch["features"], vectors[batch["labels"]])
        seen[batch["labels"].numpy()] += 1
    assert (seen == 1).all()
