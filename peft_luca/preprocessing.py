"""Images of any kind -> upright RGB images -> pixel values, and random crops."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from PIL import ExifTags, Image, ImageOps
from torch import Tensor, nn
from transformers.image_processing_backends import PilBackend


# What turns an image upright, by its EXIF orientation from 2 to 8.
METHODS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90".split()
UPRIGHT = {orientation: Image.Transpose[name] for orientation, name in enumerate(METHODS, start=2)}
WHITE_REMEDY = "Set LucaConfig(white_level=...) to the value of white, such as 255 or 4095."


class MissingSourceError(OSError):
    """The folder, archive, disk or server of the images is missing. This is not the fault of one image."""


def read_image(
    image: Any, channels: int = 3, background: str = "white", white_level: float | None = None
) -> Image.Image:
    """
    Reads an image of any kind, upright and with 8 bits per channel. Of an animation it takes the first frame. Floats
    and integers of more than 8 bits are scaled by their type: no image is looked at to find which value is white.

    Args:
        image (`PIL.Image.Image`, `numpy.ndarray`, `str`, `Path` or `dict`):
            An image, its path, or its `bytes` or `path` as a dataset stores it.
        channels (`int`, *optional*, defaults to `3`): 3 for RGB, 1 for grey.
        background (`str`, *optional*, defaults to `"white"`): Colour, as Pillow names it, behind transparent pixels.
        white_level (`float`, *optional*):
            Value of white in images of more than 8 bits. By default 65535 for integers and 1 for floats.

    Raises:
        ValueError: the values of an image go far beyond white.
    """
    if isinstance(image, np.ndarray):
        image = datasets.Image().encode_example(image)  # as a dataset stores it
    if isinstance(image, str | os.PathLike):
        image = {"path": os.fspath(image)}
    if isinstance(image, dict):
        image = Image.open(io.BytesIO(read_bytes(image)))
    if not isinstance(image, Image.Image):
        raise TypeError(f"found a {type(image).__name__}; needed a PIL image, an array, a path, or bytes in a dict")
    image.load()  # first, because Pillow turns a TIFF when it loads it
    try:  # ImageOps.exif_transpose writes EXIF anew, and fails if it is broken
        method = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation))  # type: ignore[arg-type]
    except Exception:  # parsers raise many kinds of errors for broken EXIF or XMP: ignore the orientation
        method = None
    image = image if method is None else image.transpose(method)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _to_eight_bits(image, white_level)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, background), image.convert("RGBA"))
    rgb: Image.Image = image.convert("RGB")
    rgb.info = {}  # an EXIF orientation that is kept would turn the image a second time
    return rgb.convert("L") if channels == 1 else rgb


def _to_eight_bits(image: Image.Image, white_level: float | None) -> Image.Image:
    values = np.asarray(image).astype(np.float32)
    white = white_level or (1.0 if image.mode == "F" else 65535.0)
    largest = float(values[np.isfinite(values)].max(initial=0.0))
    if largest > 2 * white:  # a little more than white is white, as resizing makes it
        kind = "of floats" if image.mode == "F" else "of more than 8 bits"
        raise ValueError(f"its values go up to {largest:g}, but white is {white:g} in images {kind}. {WHITE_REMEDY}")
    if white_level is None and image.mode != "F" and 0 < largest < 4096:
        # The same text for every image: it is shown once.
        message = "an image of 16 bits has no value above 4095, as with 12 bits or fewer, and is seen almost black."
        warnings.warn(f"{message} If its white is not 65535: {WHITE_REMEDY}", stacklevel=3)
    seen = np.nan_to_num(values, posinf=white).clip(0.0, white) * (255.0 / white)
    grey = Image.fromarray(seen.round().astype(np.uint8))
    if isinstance(transparent := image.info.get("transparency"), int):  # one value of a PNG
        grey.putalpha(Image.fromarray((values != transparent) * np.uint8(255)))
    return grey


def make_pixels(images: Iterable[Any], processing_class: Any, start: int = 0, **options: Any) -> Tensor:
    """Images of any kind → pixel values, `(batch, channels, height, width)`. Errors count images from `start`."""
    read = partial(read_image, **options)
    return process(
        [read_named(image, read, f"at position {i}") for i, image in enumerate(images, start)], processing_class
    )


def process(images: list[Image.Image], processing_class: Any, **options: Any) -> Tensor:
    """
    Upright RGB or grey images → pixel values, `(batch, channels, height, width)`, by an image processor with its
    `options`. What a stock one of Pillow does to RGB images is done here in less time, with the same bits: it is
    resized before it is copied, and a table of the 256 values of each channel is scaled in place of the pixels.
    """
    own, size = type(processing_class), dict(getattr(processing_class, "size", None) or {})
    is_stock = isinstance(processing_class, PilBackend) and all(
        getattr(own, name) is getattr(PilBackend, name)
        for name in ("preprocess", "process_image", "_preprocess", "resize", "rescale", "normalize")
    )
    steps = [getattr(processing_class, f"do_{step}", None) for step in ("resize", "center_crop", "pad")]
    is_plain = is_stock and size.keys() == {"height", "width"} and steps[0] and not any(steps[1:]) and not options
    if not is_plain or {image.mode for image in images} != {"RGB"}:
        return processing_class(images=images, return_tensors="pt", **options)["pixel_values"]
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None, :, None].repeat(3, axis=2))
    table = processing_class(images=[ramp], do_resize=False, return_tensors="np")["pixel_values"][0, :, 0]  # (3, 256)
    pixels = np.empty((len(images), 3, size["height"], size["width"]), table.dtype)
    for place, image in zip(pixels, images, strict=True):
        values = np.asarray(image.resize((size["width"], size["height"]), processing_class.resample))
        for channel in range(3):
            np.take(table[channel], values[..., channel], out=place[channel], mode="clip")
    return torch.from_numpy(pixels)


def read_bytes(image: dict[str, Any]) -> bytes:
    """
    Reads an encoded image as a dataset stores it: its `bytes`, or else the file at its `path`. Raises a
    [`MissingSourceError`] if not only this file is missing, but its folder, archive, disk or server.
    """
    path, content = image.get("path"), image.get("bytes")
    if content is not None:
        return bytes(content)
    if not path:
        raise FileNotFoundError("the image has neither bytes nor a path")
    try:
        with datasets.utils.file_utils.xopen(path, "rb") as file:
            return bytes(file.read())
    except (ValueError, MemoryError):  # the path is not valid, or the file is too large
        raise
    except Exception as error:
        reason = _missing_source(path, error)
        if reason is None:
            raise
        raise MissingSourceError(f"{path} cannot be read: {reason}. No image was skipped because of this.") from error


def _missing_source(path: str, error: Exception) -> str | None:
    """Returns why the source of a file (folder, archive, disk, server) is missing, or `None` if only the file is."""
    if not isinstance(error, FileNotFoundError | IsADirectoryError | PermissionError):
        return str(error) or repr(error)
    outer = path.split("::")[-1].removeprefix("file://")
    if "://" in outer:
        cause = error.__cause__
        if isinstance(cause, RepositoryNotFoundError | RevisionNotFoundError):
            return str(cause)
        # fsspec raises FileNotFoundError for any answer of an HTTP server, and for none. A file that is missing on
        # the Hub has no cause.
        only_file = cause is None or isinstance(cause, EntryNotFoundError) or getattr(cause, "status", 0) in (404, 410)
        return None if only_file and isinstance(error, FileNotFoundError) else repr(cause or error)
    if "::" in path:
        return None if os.path.isfile(outer) else "its archive does not exist"
    try:
        with os.scandir(os.path.dirname(outer) or ".") as entries:
            # The mount point of a disk that is not mounted is empty, except for hidden files of a desktop.
            return None if any(not entry.name.startswith(".") for entry in entries) else "its folder is empty"
    except FileNotFoundError:
        return "its folder does not exist"
    except OSError as unreadable:
        return str(unreadable)


def read_named(image: Any, read: Callable[..., Image.Image], name: str = "without a file name") -> Image.Image:
    """Reads an image with `read`. An error names it by its path, or else by `name`."""
    image = {"path": os.fspath(image)} if isinstance(image, str | os.PathLike) else image
    try:
        return read(image)
    except Exception as error:  # decoders raise many kinds of errors for a broken file
        if isinstance(error, MissingSourceError):
            raise
        name = (isinstance(image, dict) and image.get("path")) or name
        raise ValueError(f"the image {name} cannot be read: {error!r}.") from error


def find_image_column(dataset: Any, remedy: str = "pass image_column") -> str:
    """Returns the name of the only image column."""
    columns = [name for name, feature in (dataset.features or {}).items() if isinstance(feature, datasets.Image)]
    if len(columns) != 1:
        raise ValueError(f"found the columns of images {columns}; {remedy}, one of {dataset.column_names}")
    return columns[0]


def undecoded(dataset: Any, image_column: str) -> Any:
    """Returns the dataset with its images undecoded, so that only [`read_image`] decodes them."""
    features = getattr(dataset, "features", None) or {}
    if not isinstance(features.get(image_column), datasets.Image):
        return dataset
    return dataset.cast_column(image_column, datasets.Image(decode=False))


def channels_of(model: nn.Module) -> int:
    """Returns the number of color channels that a backbone takes: 3 or 1."""
    channels = int(getattr(getattr(model, "config", None), "num_channels", None) or 3)
    if channels not in (1, 3):
        raise ValueError(f"only backbones of 3 or 1 channels are supported, but this one has num_channels={channels}.")
    return channels


def image_size(processing_class: Any) -> tuple[int, int]:
    """Returns height and width, in pixels, of what an image processor makes."""
    crop_size, size = (dict(getattr(processing_class, name, None) or {}) for name in ("crop_size", "size"))
    for sides in (crop_size, size):
        if {"height", "width"} <= set(sides):
            return sides["height"], sides["width"]
    if "shortest_edge" not in size:
        raise ValueError(f"augmentation needs an image processor with crop_size or size, found size={size or None}.")
    return size["shortest_edge"], size["shortest_edge"]


def random_crop_and_flip(
    image: Image.Image, height: int, width: int, generator: torch.Generator | None = None
) -> Image.Image:
    """
    Crops 5 % to 100 % of the area with an aspect ratio of 3:4 to 4:3, resizes it to `(height, width)` with bicubic
    interpolation, and mirrors it with probability 0.5. Without a generator it draws from torch's global one.
    """
    for _ in range(10):
        area = image.width * image.height * float(torch.empty(()).uniform_(0.05, 1.0, generator=generator))
        ratio = math.exp(float(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3), generator=generator)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= image.width and 0 < h <= image.height:
            left = int(torch.randint(image.width - w + 1, (), generator=generator))
            top = int(torch.randint(image.height - h + 1, (), generator=generator))
            break
    else:  # a very long or very wide image: take the largest square in its center
        w = h = min(image.width, image.height)
        left, top = (image.width - w) // 2, (image.height - h) // 2
    image = image.resize((width, height), Image.Resampling.BICUBIC, box=(left, top, left + w, top + h))
    return ImageOps.mirror(image) if float(torch.rand((), generator=generator)) < 0.5 else image
