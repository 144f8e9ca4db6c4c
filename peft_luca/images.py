"""Images as they come → pixel values for the backbone."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor


ROW = "__row__"  # a row's number, among its columns


class ImageCollator:
    """
    Rows of a dataset → a batch of pixel values, by an image processor.

    Args:
        processing_class (`BaseImageProcessor`): The backbone's image processor.
        image_column (`str`): Column of the images.
        label_ids (`dict[int, int]`, *optional*): Ids to give in place of the rows' labels.
        augmentation (`bool`, *optional*, defaults to `False`):
            Random resized crop (scale 0.05 to 1) and horizontal flip, as the authors' code trains with.
        view (`int`, *optional*):
            Which augmented view to draw: the same for the same seed, view and row. Without, drawn from torch's own
            generator.
        seed (`int`, *optional*, defaults to `0`): Seed of the views.
    """

    def __init__(
        self,
        processing_class: Any,
        image_column: str,
        label_ids: dict[int, int] | None = None,
        augmentation: bool = False,
        view: int | None = None,
        seed: int = 0,
    ) -> None:
        self.processing_class = processing_class
        self.image_column = image_column
        self.label_ids = label_ids
        self.augmentation = augmentation
        self.view = view
        self.seed = seed

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        if not rows:  # a process's part of a short batch: a picture that no loss counts, as a trunk needs at least one
            blank = self.processing_class(images=[Image.new("RGB", (32, 32))], return_tensors="pt")["pixel_values"]
            return {"pixel_values": blank, "labels": torch.tensor([-100])}
        images = [to_rgb(row[self.image_column]) for row in rows]
        sized = {}
        if self.augmentation:
            height, width = image_size(self.processing_class)
            draws = [self._generator(row) for row in rows]
            images = [
                random_crop_and_flip(image, height, width, draw) for image, draw in zip(images, draws, strict=True)
            ]
            sized = {"do_resize": False, "do_center_crop": False}
        batch = {"pixel_values": self.processing_class(images=images, return_tensors="pt", **sized)["pixel_values"]}
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([self._label(row["labels"]) for row in rows])
        return batch

    def _generator(self, row: dict[str, Any]) -> torch.Generator | None:
        if self.view is None:
            return None
        text = json.dumps([self.seed, self.view, row[ROW]])
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))

    def _label(self, label: int) -> int:
        if self.label_ids is None:
            return label
        if label not in self.label_ids:
            raise ValueError(
                f"an image has the label {label}, but the experts' classes are the labels {sorted(self.label_ids)}. "
                "Labels are the stream's global ids, stream.classes.index(name)."
            )
        return self.label_ids[label]


def to_rgb(image: Image.Image) -> Image.Image:
    """The image upright and in RGB."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours, and PIL does not warn
    return image.convert("RGB")


def image_size(processing_class: Any) -> tuple[int, int]:
    """Height and width of what an image processor makes, in pixels."""
    for size in (getattr(processing_class, "crop_size", None), getattr(processing_class, "size", None)):
        if size and "height" in size and "width" in size:
            return size["height"], size["width"]
    side = (getattr(processing_class, "size", None) or {}).get("shortest_edge")
    if side is None:
        raise ValueError(
            f"augmentation needs the size of the images, but {type(processing_class).__name__} has neither crop_size "
            f"nor size with height and width (size: {getattr(processing_class, 'size', None)})."
        )
    return side, side


def random_crop_and_flip(
    image: Image.Image, height: int, width: int, generator: torch.Generator | None = None
) -> Image.Image:
    """
    A random part of 5 % to 100 % of the image's area and of 3:4 to 4:3, resized to `(height, width)` with bicubic
    interpolation, mirrored in one case of two. Drawn from a generator, or from torch's own, which a loader seeds in
    every worker.
    """
    for _ in range(10):
        area = image.width * image.height * float(torch.empty(()).uniform_(0.05, 1.0, generator=generator))
        ratio = math.exp(float(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3), generator=generator)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= image.width and 0 < h <= image.height:
            left = int(torch.randint(image.width - w + 1, (), generator=generator))
            top = int(torch.randint(image.height - h + 1, (), generator=generator))
            break
    else:  # an image much longer than it is wide has no such part: take its middle
        w = h = min(image.width, image.height)
        left, top = (image.width - w) // 2, (image.height - h) // 2
    image = image.resize((width, height), Image.Resampling.BICUBIC, box=(left, top, left + w, top + h))
    return ImageOps.mirror(image) if float(torch.rand((), generator=generator)) < 0.5 else image
