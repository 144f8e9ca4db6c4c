"""Images as they come → pixel values for the backbone."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from typing import Any

import datasets
import numpy as np
import torch
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from PIL import ExifTags, Image, ImageOps
from torch import Tensor, nn


ROW = "__row__"  # a row's number, among its columns
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class SourceGoneError(OSError):
    """What images are read from is not there any more: no fault of one image, and nothing to be left out."""


class ImageCollator:
    """
    Rows of a dataset → a batch of pixel values, by an image processor.

    Args:
        processing_class (`BaseImageProcessor`): The backbone's image processor.
        image_column (`str`): Column of the images, decoded or as a dataset keeps them; see [`to_rgb`].
        label_ids (`dict[int, int]`, *optional*): Ids to give in place of the rows' labels.
        augmentation (`bool`, *optional*, defaults to `False`):
            Random resized crop (scale 0.05 to 1) and horizontal flip, as the authors' code trains with.
        view (`int`, *optional*):
            Which augmented view to draw: the same for the same seed, view and row. Without, drawn from torch's own
            generator.
        seed (`int`, *optional*, defaults to `0`): Seed of the views.
        channels (`int`, *optional*, defaults to `3`): Colours of a pixel; 1 for a backbone that sees grey only.
    """

    def __init__(
        self,
        processing_class: Any,
        image_column: str,
        label_ids: dict[int, int] | None = None,
        augmentation: bool = False,
        view: int | None = None,
        seed: int = 0,
        channels: int = 3,
    ) -> None:
        self.processing_class = processing_class
        self.image_column = image_column
        self.label_ids = label_ids
        self.augmentation = augmentation
        self.view = view
        self.seed = seed
        self.channels = channels

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        if not rows:  # a process's part of a short batch: a picture that no loss counts, as a trunk needs at least one
            return {"pixel_values": self.blank(), "labels": torch.tensor([-100])}
        images = [self._image(row[self.image_column]) for row in rows]
        images = [image.convert("L") for image in images] if self.channels == 1 else images
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

    @staticmethod
    def _image(image: Any) -> Image.Image:
        try:
            return to_rgb(image)
        except Exception as error:  # whatever a decoder raises at a broken file
            if isinstance(error, SourceGoneError) or not isinstance(image, dict):
                raise
            raise ValueError(
                f"the image {image['path'] or 'without a file name'} cannot be read: {error!r}."
            ) from error

    def blank(self, size: tuple[int, int] = (32, 32)) -> Tensor:
        """The pixel values of one black picture, of a width and a height."""
        picture = Image.new("L" if self.channels == 1 else "RGB", size)
        pixels: Tensor = self.processing_class(images=[picture], return_tensors="pt")["pixel_values"]
        return pixels

    def _generator(self, row: dict[str, Any]) -> torch.Generator | None:
        if self.view is None:
            return None
        text = json.dumps([self.seed, self.view, row[ROW]])
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))

    def _label(self, label: Any) -> Any:
        label = label.item() if hasattr(label, "item") else label  # as a format of the dataset has it
        if self.label_ids is None:
            return label
        if label not in self.label_ids:
            raise ValueError(
                f"an image has the label {label}, but the experts' classes are the labels {sorted(self.label_ids)}. "
                "Labels are the stream's global ids, stream.classes.index(name)."
            )
        return self.label_ids[label]


def to_rgb(image: Any) -> Image.Image:
    """
    An image in RGB, upright, of 8 bits a colour; of an animation the first frame.

    Alpha is dropped, and what lies under transparent pixels seen, as `Image.convert("RGB")` of Pillow has it and so
    the image processors: paste such images on a ground of your own where it matters. 16 bits are scaled to 8.
    Floats and 32-bit integers, whose white no file says, run from 0 to the first of 1, 255 and 65535 that holds all
    their values where these are whole numbers, to 1 where they are fractions, and to their largest where that is more.

    Args:
        image (`PIL.Image.Image` or `dict`): An image, or its `bytes` or `path` as a dataset keeps it.

    Raises:
        OSError, ValueError: it cannot be read.
        TypeError: it is no image.
        SourceGoneError: what it is read from is not there any more.
    """
    if isinstance(image, dict):
        content = read_bytes(image)
        try:
            image = Image.open(io.BytesIO(content))
        except Image.DecompressionBombError as error:  # from the header: nothing of it is in memory
            raise ValueError(
                f"{error} Make it smaller or, if you trust it, set PIL.Image.MAX_IMAGE_PIXELS."
            ) from error
    if not isinstance(image, Image.Image):
        raise TypeError(f"found a {type(image).__name__}; needed a PIL image, or its bytes or path in a dict")
    image = _upright(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _to_eight_bits(image)
    if image.mode in ("La", "RGBa"):  # colours that are multiplied by their alpha
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours, and PIL does not warn
    rgb: Image.Image = image.convert("RGB")
    return rgb


def _upright(image: Image.Image) -> Image.Image:
    image.load()  # first: a TIFF is turned by it
    # Not ImageOps.exif_transpose, which writes EXIF anew, and so fails where that is broken.
    try:
        method = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation))  # type: ignore[arg-type]
    except Exception:  # whatever a parser raises at broken EXIF or XMP, which then says nothing
        method = None
    return image if method is None else image.transpose(method)


def _to_eight_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float32)
    white = 65535.0
    if image.mode in ("I", "F"):
        finite = values[np.isfinite(values)]
        largest = float(finite.max(initial=0.0))
        whole = bool((finite == np.round(finite)).all())
        white = next((white for white in ((1.0, 255.0, 65535.0) if whole else (1.0,)) if largest <= white), largest)
        values = np.nan_to_num(values, posinf=white)
    return Image.fromarray((values.clip(0.0, white) * (255.0 / white)).round().astype(np.uint8))


def read_bytes(image: dict[str, Any]) -> bytes:
    """
    An encoded image as a dataset keeps it: its content, or that of the file it lies in.

    Raises:
        OSError: there is no such file, or it may not be read.
        SourceGoneError: the file's folder, archive, disk or server is not there any more, or the folder is empty.
    """
    path, content = image["path"], image["bytes"]
    if content is not None:
        return bytes(content)
    if not path:
        raise FileNotFoundError("an image with neither content nor a file")
    try:
        with datasets.utils.file_utils.xopen(path, "rb") as file:
            return bytes(file.read())
    except (ValueError, MemoryError):  # such a path cannot be, or such a file cannot be held
        raise
    except Exception as error:
        reason = _gone(path, error)
        if reason is None:
            raise
        raise SourceGoneError(
            f"{path} cannot be read: {reason}. No image was left out for that: bring it back, and start again"
        ) from error


def _gone(path: str, error: Exception) -> str | None:
    """What is missing with a file: its folder, archive, disk or server. `None` where it is the file alone."""
    if not isinstance(error, FileNotFoundError | IsADirectoryError | PermissionError):
        return str(error) or repr(error)
    archive, outer = "::" in path, path.split("::")[-1].removeprefix("file://")
    if "://" in outer:
        cause = error.__cause__
        if isinstance(cause, RepositoryNotFoundError | RevisionNotFoundError):
            return str(cause)
        # Of whatever an HTTP server answers, and of none, fsspec says that there is no such file. The Hub's files that
        # are not there have no cause.
        answered = cause is None or isinstance(cause, EntryNotFoundError) or getattr(cause, "status", 0) in (404, 410)
        return None if answered and isinstance(error, FileNotFoundError) else repr(cause or error)
    if archive:
        return None if os.path.isfile(outer) else "its archive is not there any more"
    try:
        with os.scandir(os.path.dirname(outer) or ".") as beside:
            # So a disk looks that is not mounted, with what a desktop may leave in its place.
            return None if any(not entry.name.startswith(".") for entry in beside) else "its folder is empty"
    except FileNotFoundError:
        return "its folder is not there any more"
    except OSError as closed:
        return str(closed)


def undecoded(dataset: Any, image_column: str) -> Any:
    """A dataset whose images come as they are kept, so that [`to_rgb`] alone decodes them."""
    features = getattr(dataset, "features", None) or {}
    if not isinstance(features.get(image_column), datasets.Image):
        return dataset
    return dataset.cast_column(image_column, datasets.Image(decode=False))


def channels_of(model: nn.Module) -> int:
    """Colours of a pixel that a backbone takes."""
    return int(getattr(getattr(model, "config", None), "num_channels", None) or 3)


@torch.no_grad()
def check_processor(collator: ImageCollator, model: nn.Module) -> None:
    """
    Refuse an image processor whose pictures the backbone does not take.

    Raises:
        ValueError: with what both have.
    """
    name, channels = type(collator.processing_class).__name__, collator.channels
    sides: Any = getattr(getattr(model, "config", None), "image_size", None)
    height, width = sides if isinstance(sides, (list, tuple)) and len(sides) == 2 else (sides, sides)
    remedy = "Load the processor of this backbone with AutoImageProcessor.from_pretrained, or set its"
    try:
        pixels = collator.blank((width, height) if height and width else (32, 32))
    except ValueError as error:
        raise ValueError(
            f"the backbone has num_channels={channels}, but {name} cannot make such pictures: {error}. {remedy} "
            "image_mean and image_std to as many numbers."
        ) from error
    if pixels.shape[1] != channels:
        raise ValueError(
            f"the backbone has num_channels={channels}, but {name} makes pictures with {pixels.shape[1]}. "
            f"{remedy} do_convert_rgb."
        )
    if not height or tuple(pixels.shape[2:]) == (height, width):
        return
    parameter = next(model.parameters())
    try:  # some trunks take pictures of any size
        model(pixels.to(parameter.device, parameter.dtype))
    except Exception as error:  # whatever a trunk raises at a size that it cannot take
        raise ValueError(
            f"{name} makes pictures of {pixels.shape[2]} × {pixels.shape[3]}, but the backbone takes {height} × "
            f"{width}: {error} {remedy} size."
        ) from error


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
