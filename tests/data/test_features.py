import numpy as np
import pytest
import torch
from helpers import NAMES, ForwardCount, make_images, make_model, make_processor, make_vit
from PIL import Image
from torch.utils.data import DataLoader
from transformers import ViTImageProcessorPil

from peft_luca import FeatureDataset, ImageCollator
from peft_luca.data.feature_cache import extract_features
from peft_luca.preprocessing import image_size, random_crop_and_flip


def picture(width=10, height=6, mode="RGB"):
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def rows(count=3):
    dataset = make_images(NAMES[:2], 2).rename_column("label", "labels")
    return [dataset[i] for i in range(count)]


def test_feature_dataset_gives_whole_batches():
    dataset = FeatureDataset(torch.arange(10.0).reshape(5, 2), torch.tensor([0, 1, 0, 1, 2]))
    assert len(dataset) == 5
    assert torch.equal(dataset[3]["features"], torch.tensor([6.0, 7.0]))
    batches = list(DataLoader(dataset, batch_size=2, collate_fn=FeatureDataset.collate))
    assert [len(batch["labels"]) for batch in batches] == [2, 2, 1]
    assert torch.equal(torch.cat([batch["features"] for batch in batches]), dataset.features)
    assert torch.equal(torch.cat([batch["labels"] for batch in batches]), dataset.labels)


def test_collator_is_the_processors_work():
    collator, processor = ImageCollator(make_processor(), "image"), make_processor()
    batch = collator(rows())
    expected = processor(images=[row["image"] for row in rows()], return_tensors="pt")["pixel_values"]
    assert torch.equal(batch["pixel_values"], expected)
    assert torch.equal(batch["labels"], torch.tensor([0, 0, 1]))


def test_collator_gives_other_ids():
    collator = ImageCollator(make_processor(), "image", {0: 7, 1: 5})
    assert collator(rows())["labels"].tolist() == [7, 7, 5]
    with pytest.raises(ValueError, match=r"has the label 1, but the experts' classes are the labels \[0\]"):
        ImageCollator(make_processor(), "image", {0: 7})(rows())


def test_collator_without_labels():
    assert set(ImageCollator(make_processor(), "image")([{"image": picture()}])) == {"pixel_values"}


def test_augmentation_has_the_size_of_the_processor_and_is_drawn_from_torch():
    image = picture(30, 20)
    torch.manual_seed(0)
    first = [random_crop_and_flip(image, 8, 12) for _ in range(5)]
    assert {crop.size for crop in first} == {(12, 8)}
    torch.manual_seed(0)
    second = [random_crop_and_flip(image, 8, 12) for _ in range(5)]
    assert [crop.tobytes() for crop in first] == [crop.tobytes() for crop in second]
    assert len({crop.tobytes() for crop in first}) == 5
    torch.manual_seed(1)
    collator = ImageCollator(make_processor(), "image", augmentation=True)
    assert collator(rows())["pixel_values"].shape == (3, 3, 16, 16)


@pytest.mark.parametrize("size", [(400, 3), (3, 400), (1, 1)])
def test_augmentation_of_odd_pictures(size):
    torch.manual_seed(0)
    for _ in range(20):
        assert random_crop_and_flip(picture(*size), 8, 8).size == (8, 8)


def test_augmentation_crops_as_the_paper_does():
    """Where each pixel comes from: a map of positions goes through the crop."""
    side = 200
    ramp = np.zeros((side, side, 3), np.uint8)
    ramp[..., 0] = np.linspace(0, 255, side)[None]
    ramp[..., 1] = np.linspace(0, 255, side)[:, None]
    torch.manual_seed(0)
    areas, ratios, flips = [], [], []
    for _ in range(300):
        crop = np.asarray(random_crop_and_flip(Image.fromarray(ramp), 32, 32)).astype(float)
        width = abs(crop[16, -1, 0] - crop[16, 0, 0]) / 255 * 32 / 31
        height = abs(crop[-1, 16, 1] - crop[0, 16, 1]) / 255 * 32 / 31
        areas.append(width * height)
        ratios.append(width / height)
        flips.append(crop[16, 0, 0] > crop[16, -1, 0])
    assert 0.04 < min(areas) < 0.12
    assert 0.85 < max(areas) < 1.1
    assert 0.65 < min(ratios) < 0.9
    assert 1.1 < max(ratios) < 1.5
    assert 0.4 < np.mean(flips) < 0.6


def test_size_of_a_processor():
    assert image_size(make_processor()) == (16, 16)

    class Cropping:
        crop_size = {"height": 5, "width": 7}  # noqa: RUF012
        size = {"shortest_edge": 9}  # noqa: RUF012

    assert image_size(Cropping()) == (5, 7)
    Cropping.crop_size = None
    assert image_size(Cropping()) == (9, 9)
    with pytest.raises(ValueError, match="augmentation needs the size of the images, but object has neither"):
        image_size(object())


def test_extraction_is_one_pass_per_image_in_order():
    model = make_model({"t": ["a"]}, base=make_vit())
    dataset = make_images(NAMES, 3).rename_column("label", "labels")
    count = ForwardCount(model)
    features = extract_features(
        model.pooled_features, dataset, ImageCollator(make_processor(), "image"), 4, disable_tqdm=True
    )
    assert (count.images, count.passes) == (18, 5)
    assert torch.equal(features.labels, torch.arange(6).repeat_interleave(3))
    x = ViTImageProcessorPil(size={"height": 16, "width": 16})(images=dataset["image"][:], return_tensors="pt")
    torch.testing.assert_close(features.features, model.pooled_features(x["pixel_values"]), rtol=1e-4, atol=1e-5)
    assert features.features.dtype == torch.float32
    assert not features.features.requires_grad
