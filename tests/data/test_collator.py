"""`ImageCollator`: pixel values are those of the image processor, labels are mapped, augmented views are seeded."""

import io

import pytest
import torch
from helpers import NAMES, SIDE, make_images, make_processor
from PIL import Image
from transformers import ViTImageProcessorPil

from peft_luca import ImageCollator
from peft_luca.data.collator import ROW
from peft_luca.preprocessing import MissingSourceError


def rows(count=3):
    dataset = make_images(NAMES[:2], 2).rename_column("label", "labels")
    return [dataset[i] for i in range(count)]


def test_pixel_values_are_those_of_the_processor():
    batch = ImageCollator(make_processor(), "image")(rows())
    expected = make_processor()(images=[row["image"] for row in rows()], return_tensors="pt")["pixel_values"]
    assert torch.equal(batch["pixel_values"], expected)
    assert batch["labels"].tolist() == [0, 0, 1]
    assert set(ImageCollator(make_processor(), "image")([{"image": rows()[0]["image"]}])) == {"pixel_values"}


def test_labels_are_mapped():
    assert ImageCollator(make_processor(), "image", {0: 7, 1: 5})(rows())["labels"].tolist() == [7, 7, 5]
    tensors = [{**row, "labels": torch.tensor(row["labels"])} for row in rows()]
    assert ImageCollator(make_processor(), "image", {0: 7, 1: 5})(tensors)["labels"].tolist() == [7, 7, 5]
    with pytest.raises(ValueError, match=r"has the label 1, but the experts' classes are \[0\]"):
        ImageCollator(make_processor(), "image", {0: 7})(rows())


def test_an_empty_share_of_a_batch_is_one_image_that_no_loss_counts():
    batch = ImageCollator(make_processor(), "image")([])
    assert batch["pixel_values"].shape == (1, 3, SIDE, SIDE)
    assert batch["labels"].tolist() == [-100]


def test_one_channel():
    processor = ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_mean=[0.5], image_std=[0.5])
    for augmentation in (False, True):
        collator = ImageCollator(processor, "image", augmentation=augmentation, channels=1)
        assert collator(rows())["pixel_values"].shape == (3, 1, SIDE, SIDE)
        assert collator([])["pixel_values"].shape == (1, 1, SIDE, SIDE)


def test_a_bad_image_is_named():
    collator = ImageCollator(make_processor(), "image")
    with pytest.raises(ValueError, match=r"the image photos/7\.jpg cannot be read: UnidentifiedImageError"):
        collator([{"image": {"bytes": b"no image", "path": "photos/7.jpg"}}])
    with pytest.raises(ValueError, match="the image without a file name cannot be read"):
        collator([{"image": {"bytes": b"no image", "path": None}}])
    with pytest.raises(ValueError, match="found a int; needed a PIL image"):
        collator([{"image": 1}])
    with pytest.raises(MissingSourceError):
        collator([{"image": {"bytes": None, "path": "/nowhere/1.png"}}])


def test_a_view_depends_on_seed_view_and_row_alone():
    def crop(row, view=1, seed=2):
        collator = ImageCollator(make_processor(), "image", augmentation=True, view=view, seed=seed)
        return collator([{"image": rows()[0]["image"], ROW: row}])["pixel_values"]

    first = crop(5)
    torch.manual_seed(99)
    assert torch.equal(crop(5), first)
    assert not any(torch.equal(other, first) for other in (crop(6), crop(5, view=0), crop(5, seed=3)))


def test_augmentation_draws_from_torch():
    collator = ImageCollator(make_processor(), "image", augmentation=True)
    batches = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        batches.append(collator(rows())["pixel_values"])
    assert batches[0].shape == (3, 3, SIDE, SIDE)
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


@pytest.mark.parametrize("size", [(1, 1), (1, 400), (400, 1), (1, 9000)])
@pytest.mark.parametrize("augmentation", [False, True])
def test_images_of_any_shape(size, augmentation):
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "png")
    row = {"image": {"bytes": buffer.getvalue(), "path": None}}
    pixels = ImageCollator(make_processor(), "image", augmentation=augmentation)([row])["pixel_values"]
    assert torch.allclose(pixels[0, 0], torch.ones(SIDE, SIDE), atol=0.02)
