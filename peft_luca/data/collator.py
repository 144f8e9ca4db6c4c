"""`ImageCollator`: rows of a dataset -> a batch of pixel values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..preprocessing import MissingSourceError, blank_pixels, image_size, random_crop_and_flip, to_rgb


ROW = "__row__"  # the key of a row's number among its columns


@dataclass
class ImageCollator:
    """
    Turns rows of a dataset into a batch of pixel values with an image processor. Training, evaluation and feature
    extraction all use it.

    Args:
        processing_class (`BaseImageProcessor`): The backbone's image processor.
        image_column (`str`): Column of the images, decoded or as a dataset stores them.
        label_ids (`dict[int, int]`, *optional*): Maps the rows' labels to the labels of the batch.
        augmentation (`bool`, *optional*, defaults to `False`):
            Random resized crop (scale 0.05 to 1) and horizontal flip, as in the authors' code.
        view (`int`, *optional*):
            Number of the augmented view. The same seed, view and row give the same crop. By default crops are drawn
            from torch's global generator.
        seed (`int`, *optional*, defaults to `0`): Seed of the views.
        channels (`int`, *optional*, defaults to `3`): Color channels of an image; 1 for a backbone that takes grey.
    """

    processing_class: Any
    image_column: str
    label_ids: dict[int, int] | None = None
    augmentation: bool = False
    view: int | None = None
    seed: int = 0
    channels: int = 3

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        # The share of a process in a short batch may be empty, but a backbone needs an image. Losses ignore -100.
        if not rows:
            return {"pixel_values": blank_pixels(self.processing_class, self.channels), "labels": torch.tensor([-100])}
        images = [self._read(row[self.image_column]) for row in rows]
        options = {}
        if self.augmentation:
            height, width = image_size(self.processing_class)
            images = [
                random_crop_and_flip(image, height, width, self._generator(row))
                for image, row in zip(images, rows, strict=True)
            ]
            options = {"do_resize": False, "do_center_crop": False}
        batch = {"pixel_values": self.processing_class(images=images, return_tensors="pt", **options)["pixel_values"]}
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([self._label(row["labels"]) for row in rows])
        return batch

    def _read(self, image: Any) -> Image.Image:
        try:
            rgb = to_rgb(image)
        except Exception as error:  # decoders raise many kinds of errors for a broken file
            if isinstance(error, MissingSourceError) or not isinstance(image, dict):
                raise
            name = image.get("path") or "without a file name"
            raise ValueError(f"the image {name} cannot be read: {error!r}.") from error
        return rgb.convert("L") if self.channels == 1 else rgb

    def _generator(self, row: dict[str, Any]) -> torch.Generator | None:
        if self.view is None:
            return None
        text = json.dumps([self.seed, self.view, row[ROW]])
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))

    def _label(self, label: Any) -> Any:
        label = label.item() if hasattr(label, "item") else label  # a number of numpy or torch
        if self.label_ids is None:
            return label
        if label not in self.label_ids:
            raise ValueError(
                f"an image has the label {label}, but the experts' classes are the labels {sorted(self.label_ids)}. "
                "Labels are the stream's global ids, stream.classes.index(name)."
            )
        return self.label_ids[label]
