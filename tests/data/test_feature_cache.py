"""Features are computed once per image, cached in files that are whole or absent, and found again only if the same."""

import io
import os
import re
from importlib.metadata import distributions
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value, load_dataset
from filelock import FileLock, Timeout
from helpers import (
    NAMES,
    SIDE,
    ForwardCount,
    files_in,
    make_images,
    make_processor,
    make_stream,
    make_trainer,
    make_vit,
)
from PIL import Image as PilImage
from PIL import ImageFile
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import ViTImageProcessorPil

from peft_luca import FeatureDataset, ImageCollator, TaskStream
from peft_luca.data import feature_cache
from peft_luca.data.feature_cache import (
    FeatureExtractor,
    PartialFeatures,
    default_cache_dir,
    digest_images,
    features_key,
)
from peft_luca.preprocessing import MissingSourceError


class Backbone:
    """Stands for a backbone: features are means of the pixels. Counts images, and fails after some passes."""

    def __init__(self, passes=None):
        self.images, self.passes = 0, passes

    def __call__(self, pixels):
        if self.passes == 0:
            raise KeyboardInterrupt
        self.passes = None if self.passes is None else self.passes - 1
        self.images += len(pixels)
        return pixels.unfold(2, 4, 4).unfold(3, 4, 4).mean((-1, -2)).flatten(1)


def colors(per_class=3):
    return make_images(NAMES, per_class).rename_column("label", "labels")


def extractor(backbone=None, batch_size=4, collator=None, **options):
    collator = ImageCollator(make_processor(), "image") if collator is None else collator
    return FeatureExtractor(backbone or Backbone(), collator, batch_size, disable_tqdm=True, **options)


def images_of(*contents):
    return Dataset.from_dict(
        {"image": [{"bytes": content, "path": f"{i}.png"} for i, content in enumerate(contents)]},
        features=Features({"image": Image(decode=False)}),
    ).cast_column("image", Image())


def write(path, *parts, dtype="float32"):
    with PartialFeatures.open(path, dtype) as partial:
        for part in parts:
            partial.append(len(part), part, [])
        partial.finish()


# --- extraction ---


@pytest.mark.parametrize("workers", [0, 1])
def test_one_pass_per_image_in_the_order_of_the_dataset(workers):
    backbone, dataset = Backbone(), colors()
    features = extractor(backbone, num_workers=workers)(dataset)
    assert backbone.images == 18
    assert torch.equal(features.labels, torch.arange(6).repeat_interleave(3))
    pixels = make_processor()(images=dataset["image"][:], return_tensors="pt")["pixel_values"]
    assert torch.equal(features.features, Backbone()(pixels))


@pytest.mark.parametrize(("seconds", "said"), [(0.0, True), (60.0, False)])
def test_images_that_are_read_too_slowly_are_told_of(seconds, said, monkeypatch):
    lines = []
    monkeypatch.setattr(feature_cache, "SLOW", seconds)
    monkeypatch.setattr(feature_cache.logger, "warning_once", lines.append)
    extractor()(colors())  # the backbone does next to nothing
    assert bool(lines) == said
    if said:
        assert re.match(r"Reading the images took \d+% of the time for \[CLS\]: set dataloader_num_workers", lines[0])


def test_a_finished_file_is_not_computed_again(tmp_path):
    path, backbone = tmp_path / "f.safetensors", Backbone()
    first = extractor(backbone)(colors(), path)
    second = extractor(backbone)(colors(), path)
    assert backbone.images == 18
    assert torch.equal(first.features, second.features)
    assert files_in(tmp_path) == ["f.safetensors"]


@pytest.mark.parametrize("passes", [1, 3])
def test_an_interrupted_extraction_continues_at_its_checkpoint(tmp_path, monkeypatch, passes):
    monkeypatch.setattr(feature_cache, "CHECKPOINT_SECONDS", 0.0)
    path = tmp_path / "f.safetensors"
    with pytest.raises(KeyboardInterrupt):
        extractor(Backbone(passes))(colors(), path)
    assert not path.exists()
    backbone = Backbone()
    features = extractor(backbone)(colors(), path)
    assert backbone.images == 18 - 4 * passes
    assert torch.equal(features.features, extractor()(colors()).features)
    assert files_in(tmp_path) == ["f.safetensors"]


def test_without_a_checkpoint_it_starts_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        extractor(Backbone(2))(colors(), tmp_path / "f.safetensors")
    backbone = Backbone()
    extractor(backbone)(colors(), tmp_path / "f.safetensors")
    assert backbone.images == 18


def test_another_process_is_waited_for(tmp_path):
    path = tmp_path / "f.safetensors"
    with PartialFeatures.open(path, "float32") as partial:
        partial.append(2, torch.ones(2, 3), [])
        with pytest.raises(Timeout):
            FileLock(path.with_suffix(".lock")).acquire(timeout=0)
        partial.finish()
    with PartialFeatures.open(path, "float32") as partial:
        assert partial is None


def test_leftovers_of_a_kill_at_the_end_are_removed(tmp_path):
    path = tmp_path / "f.safetensors"
    write(path, torch.ones(18, 48))
    content = path.read_bytes()
    for left in ([".partial", ".partial.json", ".lock"], [".lock"]):
        for suffix in left:
            path.with_suffix(suffix).write_text('{"rows": 1, "width": 1, "bad": []}')
        backbone = Backbone()
        extractor(backbone)(colors(), path)
        assert (backbone.images, path.read_bytes(), files_in(tmp_path)) == (0, content, ["f.safetensors"])


def test_an_augmented_view_does_not_depend_on_batches():
    collator = ImageCollator(make_processor(), "image", None, True, 3, 1)
    first = extractor(collator=collator)(colors()).features
    torch.manual_seed(99)
    assert torch.equal(extractor(collator=collator, batch_size=5)(colors()).features, first)
    assert not torch.allclose(extractor()(colors()).features, first, atol=1e-3)


def test_a_rotated_photo_has_the_pixels_that_evaluation_sees():
    corner = np.zeros((SIDE, SIDE, 3), np.uint8)
    corner[: SIDE // 2, : SIDE // 2] = 200
    buffer, exif = io.BytesIO(), PilImage.Exif()
    exif[0x0112] = 6
    PilImage.fromarray(corner).save(buffer, "png", exif=exif)
    dataset = images_of(buffer.getvalue()).add_column("labels", [0])
    pixels = ImageCollator(make_processor(), "image")([dataset[0]])["pixel_values"]
    assert torch.equal(extractor()(dataset).features, Backbone()(pixels))


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float16", 1e5), ("float32", float("inf")), ("bfloat16", float("nan"))]
)
def test_features_that_are_not_finite_are_named(tmp_path, dtype, largest):
    def backbone(pixels):
        features = Backbone()(pixels)
        features[-1] = largest
        return features

    message = (
        rf"\[CLS\] of an image in rows 0 to 3 is not finite, or too large for {dtype}\. Use features_dtype='float32'"
    )
    with pytest.raises(FloatingPointError, match=message):
        extractor(backbone, dtype=dtype)(colors(), tmp_path / "f.safetensors")
    assert not (tmp_path / "f.safetensors").exists()


# --- images that cannot be read ---


def with_bad_images():
    rows = colors(1).cast_column("image", Image(decode=False)).to_list()
    rows[1]["image"] = {"bytes": b"no image at all", "path": "photos/second.jpg"}
    rows[4]["image"] = {"bytes": rows[4]["image"]["bytes"][:40], "path": None}
    return Dataset.from_list(rows, features=colors(1).features)


def test_a_bad_image_stops_the_extraction_with_its_name(tmp_path):
    with pytest.raises(ValueError, match=r"image in row 1 \(photos/second.jpg\) cannot be read: UnidentifiedImageErr"):
        extractor()(with_bad_images(), tmp_path / "f.safetensors")
    assert not (tmp_path / "f.safetensors").exists()
    with pytest.raises(ValueError, match=r"row 0 \(without a file name\) cannot be read"):
        extractor()(with_bad_images().select([4]))


def test_bad_images_are_skipped_if_asked_for(tmp_path):
    path = tmp_path / "f.safetensors"
    features = extractor(on_bad_image="skip", batch_size=2)(with_bad_images(), path)
    assert features.skipped == [1, 4]
    assert features.labels.tolist() == [0, 2, 3, 5]
    assert torch.equal(features.features, extractor()(colors(1)).features[[0, 2, 3, 5]])
    with pytest.raises(ValueError, match=r"row 1 \(photos/second.jpg\) cannot be read: an earlier run skipped it"):
        extractor()(with_bad_images(), path)
    with pytest.raises(ValueError, match="none of the 2 images can be read"):
        extractor(on_bad_image="skip")(with_bad_images().select([1, 4]))


def test_a_missing_folder_is_never_skipped(tmp_path):
    """Every image would be skipped, and the cache would remember it."""
    (tmp_path / "disk").mkdir()
    file = tmp_path / "disk" / "1.png"
    make_images(NAMES[:1], 1)["image"][0].save(file)
    dataset = Dataset.from_dict({"image": [str(file)], "labels": [0]}, Features(image=Image(), labels=Value("int64")))
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    with pytest.raises(
        MissingSourceError, match=r"1\.png cannot be read: its folder does not exist.*No image was ski"
    ):
        extractor(on_bad_image="skip")(dataset, tmp_path / "f.safetensors")
    with pytest.raises(MissingSourceError):
        digest_images(dataset, "image")
    (tmp_path / "unplugged").rename(tmp_path / "disk")
    assert len(extractor(on_bad_image="skip")(dataset, tmp_path / "f.safetensors")) == 1


# --- the key of a file ---


def key(weights="w", epsilon=1e-6, size=SIDE, processor=None, images="i", dtype="float32", **options):
    backbone = SimpleNamespace(fingerprint=weights, architecture={"layer_norm_eps": epsilon})
    processor = processor or ViTImageProcessorPil(size={"height": size, "width": size})
    options = {"augmentation": True, "view": 0, **options}
    return features_key(backbone, ImageCollator(processor, "image", **options), images, dtype)


class OtherProcessor(ViTImageProcessorPil):
    pass


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "v"},
        {"epsilon": 1e-3},
        {"size": SIDE // 2},
        {"processor": OtherProcessor(size={"height": SIDE, "width": SIDE})},
        {"processor": lambda images, return_tensors: None},
        {"images": "j"},
        {"dtype": "float16"},
        {"augmentation": False, "view": None},
        {"view": 1},
        {"seed": 1},
        {"channels": 1},
        {"background": "black"},
        {"white_level": 4095},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_key_changes_with_all_that_features_depend_on(change):
    assert key() == key()
    assert key() != key(**change)
    assert key(**change) == key(**change)


def test_the_key_changes_with_versions_and_only_augmentation_has_a_seed(monkeypatch):
    plain = key(augmentation=False, view=None)
    assert key(augmentation=False, view=None, seed=1) == plain
    for package in feature_cache.PACKAGES:
        with monkeypatch.context() as patch:
            other = {package: [SimpleNamespace(version="0.0")]}
            patch.setattr(
                feature_cache, "distributions", lambda name, o=other: o.get(name) or distributions(name=name)
            )
            assert key(augmentation=False, view=None) != plain


def test_the_key_changes_with_what_decides_which_images_can_be_read(monkeypatch):
    for place, name, value in (
        (PilImage, "MAX_IMAGE_PIXELS", 10),
        (ImageFile, "LOAD_TRUNCATED_IMAGES", True),
        (PilImage, "OPEN", {**PilImage.OPEN, "HEIF": None}),
        (feature_cache.codecs, "version", lambda name: "0.0"),
    ):
        plain = key()
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert key() != plain
        assert key() == plain


def test_an_image_that_was_over_the_limit_is_read_once_the_limit_is_raised(tmp_path, monkeypatch):
    options = {"features_cache_dir": str(tmp_path / "cache"), "num_train_epochs": 1}
    images = [PilImage.new("L", (200, 200)), *colors(2)["image"]]
    large = Dataset.from_dict(
        {"image": images, "label": list("aabbccddeeffa")}, Features(image=Image(), label=Value("string"))
    )
    for limit, choice, skipped in ((10_000, "skip", [0]), (10**8, "raise", [])):
        monkeypatch.setattr(PilImage, "MAX_IMAGE_PIXELS", limit)
        trainer = make_trainer(tmp_path / choice, TaskStream.from_dataset(large), on_bad_image=choice, **options)
        trainer.train()
        assert trainer.features(trainer.stream[0], "train").skipped == skipped


def test_images_are_known_by_their_bytes(tmp_path):
    names = sorted(NAMES[:2])
    for name, image in zip(names, make_images(names, 1)["image"], strict=True):
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "0.png")
    files = load_dataset("imagefolder", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / "c"))
    digest = digest_images(files, "image")
    first, second = [(tmp_path / name / "0.png").read_bytes() for name in names]
    assert digest_images(images_of(first, second), "image") == digest
    others = [(second, first), (first + second,), (first,)]
    assert len({digest, *(digest_images(images_of(*contents), "image") for contents in others)}) == 4
    path = tmp_path / names[0] / "0.png"
    before = path.stat()
    path.write_bytes(second)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # changed in place, with the old time
    assert digest_images(files, "image") == digest_images(images_of(second, second), "image")
    path.unlink()
    (path.parent / "1.png").touch()  # the folder is not empty, so this is one missing file
    assert digest_images(files, "image") not in (digest, digest_images(images_of(b"", second), "image"))


# --- feature files ---


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 1e-3), ("bfloat16", 1e-2)])
def test_storage_types(tmp_path, dtype, tolerance):
    vectors = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "f.safetensors"
    write(path, *vectors.to(getattr(torch, dtype)).split(3), dtype=dtype)
    features = FeatureDataset.from_file(path, torch.arange(10))
    assert features.features.dtype == getattr(torch, dtype)
    batch = features.__getitems__([7, 0, 7])
    assert batch["features"].dtype == torch.float32
    assert batch["labels"].tolist() == [7, 0, 7]
    torch.testing.assert_close(batch["features"], vectors[[7, 0, 7]], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(features[3]["features"], vectors[3], rtol=tolerance, atol=tolerance)


def test_features_are_a_view_of_the_file(tmp_path):
    path = tmp_path / "f.safetensors"
    write(path, torch.zeros(50_000, 64))
    features = FeatureDataset.from_file(path, torch.zeros(50_000, dtype=torch.long))
    mapped = [line for line in open("/proc/self/maps", encoding="utf-8") if "f.safetensors" in line]
    start, end = (int(x, 16) for x in mapped[0].split()[0].split("-"))
    assert start <= features.features.data_ptr() < end


def test_a_disk_that_is_full_is_named(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(feature_cache, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(feature_cache, "write_json", full)
    with pytest.raises(OSError, match=r"cannot write .*f\.safetensors: No space left on device"):
        write(tmp_path / "f.safetensors", torch.ones(1, 2))


def test_a_feature_dataset_gives_whole_batches_and_its_views_in_turn():
    views = [torch.randn(7, 2), torch.randn(7, 2)]
    dataset = FeatureDataset(torch.zeros(7, 2), torch.arange(7), views)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        batches = list(DataLoader(dataset, 3, shuffle=True, collate_fn=FeatureDataset.collate))
        assert [len(batch["labels"]) for batch in batches] == [3, 3, 1]
        labels = torch.cat([batch["labels"] for batch in batches])
        assert torch.equal(torch.cat([batch["features"] for batch in batches]), views[epoch % 2][labels])
        assert labels.sort().values.tolist() == list(range(7))


def changed(**changes):
    """Writes a sound file of changed tensors, with the metadata that was there."""

    def spoil(path):
        with safe_open(path, "pt") as file:
            tensors, metadata = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()
        for name, change in changes.items():
            tensors[name] = change(tensors[name])
        path.unlink()
        save_file(tensors, path, metadata if changes else {})

    return spoil


def flipped(place):
    def spoil(path):
        content = bytearray(path.read_bytes())
        content[int(place * len(content))] ^= 1
        path.write_bytes(content)

    return spoil


def of_other_images(path):
    extractor()(make_images(NAMES, 3, seed=9).rename_column("label", "labels"), path.with_name("other.safetensors"))
    path.with_name("other.safetensors").rename(path)


SPOILT = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not found"),
    "cut off by one": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "another number": flipped(0.5),
    "permuted features": changed(features=lambda features: features.flip(0)),
    "permuted rows": changed(rows=lambda rows: rows.roll(1)),
    "fewer rows": changed(features=lambda features: features[:9], rows=lambda rows: rows[:9]),
    "without a digest": changed(),
    "of other images": of_other_images,
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_file_is_noticed_and_made_again(tmp_path, kind):
    path = tmp_path / "f.safetensors"
    expected, content = extractor()(colors(), path).features.clone(), path.read_bytes()
    SPOILT[kind](path)
    backbone = Backbone()
    with pytest.warns(UserWarning, match=r"f\.safetensors is spoilt, and its features are computed again"):
        features = extractor(backbone)(colors(), path)
    assert torch.equal(features.features, expected)
    assert (backbone.images, path.read_bytes(), files_in(tmp_path)) == (18, content, ["f.safetensors"])


@pytest.mark.filterwarnings("ignore:.*is spoilt")
def test_whichever_byte_changes_the_features_stay(tmp_path):
    path = tmp_path / "f.safetensors"
    expected, content = extractor()(colors(), path).features.clone(), path.read_bytes()
    for place in np.linspace(0, 0.999, 60):
        path.write_bytes(content)
        flipped(place)(path)
        assert torch.equal(extractor()(colors(), path).features, expected)


@pytest.mark.parametrize(
    ("file", "content"), [(".partial.json", b"{"), (".partial.json", b'{"rows": 4}'), (".partial", b"12")]
)
def test_a_spoilt_checkpoint_is_not_used(tmp_path, monkeypatch, file, content):
    monkeypatch.setattr(feature_cache, "CHECKPOINT_SECONDS", 0.0)
    path, backbone = tmp_path / "f.safetensors", Backbone()
    with pytest.raises(KeyboardInterrupt):
        extractor(Backbone(2))(colors(), path)
    path.with_suffix(file).write_bytes(content)
    features = extractor(backbone)(colors(), path)
    assert torch.equal(features.features, extractor()(colors()).features)
    assert backbone.images == 18


# --- in a run ---


def test_a_run_computes_each_feature_once_and_another_run_none(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    for folder, expected in (("first", 768 + 48 + 24 + 2 * 48), ("second", 0)):
        model = make_vit()
        trainer = make_trainer(tmp_path / folder, make_stream(increment=3), model, augmented_views=2)
        count = ForwardCount(model)
        trainer.train()
        assert count.images == expected  # the 768 reference pictures are kept, too
    assert default_cache_dir() == tmp_path / "hf" / "peft_luca"
    assert len(files_in(default_cache_dir())) == 2 * 4


@pytest.mark.parametrize("cache_features", [True, False])
def test_a_run_skips_bad_images(tmp_path, cache_features):
    stream = TaskStream.from_dataset(with_bad_images().rename_column("labels", "label"))
    options = {"on_bad_image": "skip", "cache_features": cache_features, "num_train_epochs": 1}
    trainer = make_trainer(tmp_path, stream, **options)
    with pytest.raises(ValueError, match=r"task 'task_0': none of the images of .* can be read"):
        trainer.train()
    trainer = make_trainer(tmp_path, TaskStream.from_dataset((colors_with_one_bad(), None)), **options)
    trainer.train()
    assert trainer.results()["tasks"][0]["skipped_images"] == 1
    assert trainer.state.max_steps == 2  # 11 images in batches of 8


def colors_with_one_bad():
    rows = make_images(NAMES[:2], 6).cast_column("image", Image(decode=False)).to_list()
    rows[3]["image"] = {"bytes": b"", "path": None}
    return Dataset.from_list(rows, features=make_images(NAMES[:2], 1).features)
