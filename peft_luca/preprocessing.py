"""Images of any kind -> upright RGB images for the image processor, and random crops of them."""

from __future__ import annotations

import io
import math
import os
from typing import Any

import datasets
import numpy as np
import torch
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from PIL import ExifTags, Image, ImageOps
from torch import nn


# EXIF orientation -> what turns the image upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class MissingSourceError(OSError):
    """The folder, archive, disk or server of the images is missing. This is not the fault of one image."""


def to_rgb(image: Any) -> Image.Image:
    """
    Converts an image to upright RGB with 8 bits per channel. Of an animation it takes the first frame.

    Alpha is dropped, as in `Image.convert("RGB")` of Pillow. 16 bits are scaled to 8. For floats and 32-bit integers
    no file says which value is white: whole numbers take the first of 1, 255 and 65535 that is no smaller than their
    largest value, fractions take 1, and both take their largest value if it is larger.

    Args:
        image (`PIL.Image.Image` or `dict`): An image, or its `bytes` or `path` as a dataset stores it.
    """
    if isinstance(image, dict):
        image = Image.open(io.BytesIO(read_bytes(image)))
    if not isinstance(image, Image.Image):
        raise TypeError(f"found a {type(image).__name__}; needed a PIL image, or its bytes or path in a dict")
    image.load()  # first, because Pillow turns a TIFF when it loads it
    try:  # ImageOps.exif_transpose writes EXIF anew, and fails if it is broken
        method = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation))  # type: ignore[arg-type]
    except Exception:  # parsers raise many kinds of errors for broken EXIF or XMP: ignore the orientation
        method = None
    image = image if method is None else image.transpose(method)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _to_eight_bits(image)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # gives the same colors without PIL's warning
    rgb: Image.Image = image.convert("RGB")
    rgb.info = {}  # an EXIF orientation that is kept would turn the image a second time
    return rgb


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
    archive, outer = "::" in path, path.split("::")[-1].removeprefix("file://")
    if "://" in outer:
        cause = error.__cause__
        if isinstance(cause, RepositoryNotFoundError | RevisionNotFoundError):
            return str(cause)
        # fsspec raises FileNotFoundError for any answer of an HTTP server, and for none. A file that is missing on
        # the Hub has no cause.
        only_file = cause is None or isinstance(cause, EntryNotFoundError) or getattr(cause, "status", 0) in (404, 410)
        return None if only_file and isinstance(error, FileNotFoundError) else repr(cause or error)
    if archive:
        return None if os.path.isfile(outer) else "its archive does not exist"
    try:
        with os.scandir(os.path.dirname(outer) or ".") as entries:
            # The mount point of a disk that is not mounted is empty, except for hidden files of a desktop.
            return None if any(not entry.name.startswith(".") for entry in entries) else "its folder is empty"
    except FileNotFoundError:
        return "its folder does not exist"
    except OSError as unreadable:
        return str(unreadable)


def undecoded(dataset: Any, image_column: str) -> Any:
    """Returns the dataset with its images undecoded, so that only [`to_rgb`] decodes them."""
    features = getattr(dataset, "features", None) or {}
    if not isinstance(features.get(image_column), datasets.Image):
        return dataset
    return dataset.cast_column(image_column, datasets.Image(decode=False))


def channels_of(model: nn.Module) -> int:
    """Returns the number of color channels that a backbone takes."""
    return int(getattr(getattr(model, "config", None), "num_channels", None) or 3)


def image_size(processing_class: Any) -> tuple[int, int]:
    """Returns height and width, in pixels, of what an image processor makes."""
    crop_size, size = getattr(processing_class, "crop_size", None), getattr(processing_class, "size", None)
    for sides in (crop_size, size):
        if sides and "height" in sides and "width" in sides:
            return sides["height"], sides["width"]
    side = (size or {}).get("shortest_edge")
    if side is None:
        raise ValueError(f"augmentation needs an image processor with crop_size or size, whose size is not {size}.")
    return side, side


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
