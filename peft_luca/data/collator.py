"""`ImageCollator`: rows of a dataset -> a batch of pixel values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..preprocessing import image_size, make_pixels, process, random_crop_and_flip, read_image, read_named


ROW = "__row__"  # the key of a row's number among its columns


@dataclass
class ImageCollator:
    """
    Turns rows of a dataset into a batch of pixel values with an image processor.

    Args:
        processing_class (`BaseImageProcessor`): The backbone's image processor.
        image_column (`str`): Column of the images, decoded or as a dataset stores them.
        label_ids (`dict[int, int]`, *optional*): Maps the rows' labels to the labels of the batch.
        augmentation (`bool`, *optional*, defaults to `False`):
            Random resized crop (scale 0.05 to 1) and horizontal flip, as in the authors' code.
        view (`int`, *optional*):
            Number of the augmented view: it and the seed give the crop of a row. By default crops are random.
        seed (`int`, *optional*, defaults to `0`): Seed of the views.
        channels, background, white_level: See [`~peft_luca.preprocessing.read_image`].
    """

    processing_class: Any
    image_column: str
    label_ids: dict[int, int] | None = None
    augmentation: bool = False
    view: int | None = None
    seed: int = 0
    channels: int = 3
    background: str = "white"
    white_level: float | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        # The share of a process in a short batch may be empty, but a backbone needs an image. Losses ignore -100.
        if not rows:
            blank = make_pixels([Image.new("RGB", (32, 32))], self.processing_class, channels=self.channels)
            return {"pixel_values": blank, "labels": torch.tensor([-100])}
        images, options = [read_named(row[self.image_column], self.read) for row in rows], {}
        if self.augmentation:
            size, options = image_size(self.processing_class), {"do_resize": False, "do_center_crop": False}
            images = [random_crop_and_flip(images[i], *size, self._generator(row)) for i, row in enumerate(rows)]
        batch = {"pixel_values": process(images, self.processing_class, **options)}
        if "labels" in rows[0]:
            labels = [int(row["labels"]) for row in rows]
            ids = {label: label for label in labels} if self.label_ids is None else self.label_ids
            if unknown := set(labels) - set(ids):
                raise ValueError(f"an image has the label {min(unknown)}, but the experts' classes are {sorted(ids)}.")
            batch["labels"] = torch.tensor([ids[label] for label in labels])
        return batch

    def read(self, image: Any) -> Image.Image:
        """Reads an image of any kind; see [`~peft_luca.preprocessing.read_image`]."""
        return read_image(image, self.channels, self.background, self.white_level)

    def _generator(self, row: dict[str, Any]) -> torch.Generator | None:
        if self.view is None:
            return None
        text = json.dumps([self.seed, self.view, row[ROW]])
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))
