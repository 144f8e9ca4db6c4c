"""[CLS] of drawn pictures, which depends on the backbone alone. Experts standardize and whiten by it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor
from tqdm.auto import tqdm

from ..routing.discriminants import ledoit_wolf, shrink
from ..utils import atomic_write


PICTURES = 768
BATCH = 16
REFERENCES = Path(constants.HF_HOME) / "peft_luca" / "references"  # where they are kept, by content
SEED = 0
# A backbone that interpolates its positions gets pictures of this side, which take a quarter of the time of 224 pixels
# and were no worse. Another backbone gets pictures of its own size, the only one that it takes.
SIDE = 112
# For experts without whitening, as they were before there was any.
OLD_PICTURES, OLD_PATCHES = 192, 8
# Numbers of an expert's whitening, 197 KB in half precision: 256 directions for a [CLS] of width 384, 128 for 768.
WHITENING_NUMBERS = 98304


class Reference(NamedTuple):
    """[CLS] of the reference pictures, in float32."""

    mean: Tensor  # (d,)
    std: Tensor  # (d,), deviation; 1 in a dimension that never moves
    correlation: Tensor  # (d, d), covariance of the standardized [CLS]


def draw_reference_pictures(count: int, size: int, seed: int = SEED) -> np.ndarray:
    """
    Draws the reference pictures, `(count, size, size, 3)` of uint8 RGB: one to eight ellipses and boxes of random
    colours on a plain ground, the same on every machine. A smaller set is the beginning of a larger one.
    """
    rng = np.random.RandomState(seed)  # the legacy generator's stream is frozen across versions of numpy
    y, x = np.mgrid[0:size, 0:size] / size
    pictures = np.empty((count, size, size, 3), np.uint8)
    for picture in pictures:
        picture[:] = rng.randint(0, 256, 3)
        for _ in range(rng.randint(1, 9)):
            center_x, center_y, width, height = rng.uniform(0, 1, 4)
            color = rng.randint(0, 256, 3)
            u, v = abs(x - center_x) / (width / 2 + 0.02), abs(y - center_y) / (height / 2 + 0.02)
            picture[(u * u + v * v < 1) if rng.randint(2) else (np.maximum(u, v) < 1)] = color
    return pictures


@torch.no_grad()
def measure_reference(
    read: Callable[[Tensor], Tensor], count: int, size: int, channels: int, like: Tensor
) -> Reference:
    """
    Measures a reference over `count` pictures, which are grey if there are not three channels. `read` maps pixel
    values `(batch, channels, size, size)`, in [-1, 1], of the dtype and device of `like`, to [CLS] `(batch, d)`.
    """
    pictures = torch.from_numpy(draw_reference_pictures(count, size)).permute(0, 3, 1, 2)
    if channels != 3:
        pictures = pictures.float().mean(dim=1, keepdim=True).expand(-1, channels, -1, -1)
    batches = tqdm(pictures.split(BATCH), desc="Reference pictures", leave=False, delay=2)
    z = torch.cat([read((batch.to(like.device) / 127.5 - 1).to(like.dtype)).double().cpu() for batch in batches])
    std = z.std(dim=0)
    std = torch.where(std > 1e-6, std, torch.ones_like(std))
    mean = z.mean(dim=0)
    z = (z - mean) / std
    return Reference(mean.float(), std.float(), (z.T @ z / (count - 1)).float())


def kept_reference(about: Mapping[str, Any], measure: Callable[..., Reference], *arguments: Any) -> Reference:
    """Returns a backbone's reference from the user's cache, by what decides it, or measures it and keeps it there."""
    key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
    path = REFERENCES / f"{key}.safetensors"
    with suppress(OSError, SafetensorError, TypeError):  # missing, spoilt, or of another version
        return Reference(**load(path.read_bytes()))
    reference = measure(*arguments)
    with suppress(OSError, SafetensorError):  # without a place to keep it, it is measured once a process
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            save_file(reference._asdict(), temporary)
    return reference


def whitened_directions(width: int) -> int:
    """Number of directions that an expert whitens in a [CLS] of `width` numbers."""
    return max(0, min(width - 1, WHITENING_NUMBERS // width))


def whitening(correlation: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """
    Directions in which [CLS] varies most without telling the expert's classes apart, and how far each is shrunk.

    The covariance is that of the reference pictures, which count as d images, and the pooled one within the expert's
    classes, which counts as many as its images less its classes, at most d. It is shrunk toward a sphere by Ledoit &
    Wolf's strength for as many images as both are worth. The deviation in each of the leading eigenvectors is brought
    down to that in the first one that is left out.

    From the reference's correlation `(d, d)`, the standardized [CLS] `(images, d)` of the expert's training images and
    their labels `(images,)`, its own ids, comes W `(d, r)` in float16. The whitened [CLS] is z - W·Wᵀ·z.
    """
    d, features = len(correlation), features.double()
    counts = labels.bincount()
    sums = torch.zeros(len(counts), d, dtype=torch.float64).index_add_(0, labels, features)
    means = sums / counts.clamp(min=1)[:, None]
    scatter = features.T @ features - (means * counts[:, None]).T @ means
    own = min(len(labels) - int((counts > 0).sum()), d) if scatter.trace() > 1e-6 else 0
    covariance = d * correlation.double()
    if own:
        covariance += own * scatter * (d / scatter.trace())
    covariance = shrink(covariance, ledoit_wolf(covariance, d + own))
    values, vectors = torch.linalg.eigh(covariance)  # in ascending order
    r = whitened_directions(d)
    left = values[d - r - 1] / values[d - r :]  # of the variance in each direction, (r,)
    return (vectors[:, d - r :] * (1 - left.sqrt()).sqrt()).half()
