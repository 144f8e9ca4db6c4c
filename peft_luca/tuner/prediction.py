"""`predict`: images of any kind -> what a model says of each. The image processor's facts come from the experts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend

from ..preprocessing import MissingSourceError, make_pixels, undecoded
from .backbone import STEPS
from .layer import find_layer, image_options


# Steps that PilBackend takes. The others belong to single image processors.
PLAIN_STEPS = ("do_resize", "do_center_crop", "do_pad", "do_rescale", "do_normalize")


@dataclass(frozen=True)
class Prediction:
    """
    What a model says of one image.

    Attributes:
        label (`str`): Name of the most probable class.
        probability (`float`): Its probability, given that the image is of one of the classes.
        expert (`str`, *optional*): The expert that answered. `None` if adapters are disabled.
        known (`float`, *optional*): How familiar the image is, from 0 to 1, see [`RoutingOutput`]. `None` if no router
            is set.
        unknown (`bool`): Whether the router takes the image for one of no known class.
        top (`dict`): The most probable classes and their probabilities, in descending order.
    """

    label: str
    probability: float
    expert: str | None
    known: float | None
    unknown: bool
    top: dict[str, float]

    def __str__(self) -> str:
        classes = ", ".join(f"{label} {_percent(probability)}" for label, probability in self.top.items())
        expert = f" (expert {self.expert})" if self.expert else ""
        return f"unknown; nearest: {classes}{expert}" if self.unknown else f"{classes}{expert}"

    def to_dict(self) -> dict[str, Any]:
        """The attributes as plain values, for JSON."""
        return asdict(self)


def _percent(probability: float) -> str:
    return "<0.1%" if 0 < probability < 5e-4 else f"{probability:.1%}"


def processor_of(model: Any) -> Any:
    """
    Makes the image processor of an expert's training images, from the facts that the experts keep. Raises a
    `ValueError` if they have none, or if the processor has steps of its own.
    """
    facts = [config.processor for config in find_layer(model)[1].configs.values() if config.processor]
    own_steps = [step for step in STEPS if step not in PLAIN_STEPS and facts and facts[0].get(step)]
    odd = own_steps or [name for name in ("crop_pct", "rescale_offset") if facts and name in facts[0]]
    if not facts or odd:
        reason = f"their processor has {odd[0]}" if odd else "none of them was trained by a trainer with one"
        raise ValueError(f"the experts do not say how their images were processed: {reason}. Pass processing_class=.")
    return PilBackend(**facts[0])


@torch.no_grad()
def predict(
    model: Any, images: Any, top_k: int = 1, batch_size: int = 32, processing_class: Any = None
) -> list[Prediction]:
    """See [`LucaModel.predict`]. `model` is the tuner."""
    if top_k < 1 or batch_size < 1:
        raise ValueError(f"top_k and batch_size must be at least 1, got {top_k} and {batch_size}.")
    processor = processor_of(model) if processing_class is None else processing_class
    options, rows, found = image_options(model), _each(images), list[Prediction]()
    while batch := list(islice(rows, batch_size)):
        pixels = torch.cat([_pixels(image, len(found) + i, processor, options) for i, image in enumerate(batch)])
        found += _answer(model, pixels, top_k)
    return found


def _answer(model: Any, pixels: torch.Tensor, top_k: int) -> list[Prediction]:
    backbone, layer = model.backbone, model.layer
    pixels = pixels.to(backbone.device, backbone.dtype)
    names: list[Any] = list(model.experts)
    if model.router is not None and not layer.disable_adapters:
        routed = model.route(pixels)
        logits, chosen, unknown = routed.logits, routed.expert.tolist(), routed.unknown.tolist()
        known = [None] * len(chosen) if routed.known is None else routed.known.tolist()
        labels = list(model.classes)
    else:
        was_training = model.training
        model.eval()
        logits = model(pixels).logits
        model.train(was_training)
        chosen = [None if layer.disable_adapters else names.index(model.active_adapters[0])] * len(pixels)
        known, unknown = [None] * len(pixels), [False] * len(pixels)
        labels = [model.model.config.id2label[i] for i in range(logits.shape[1])]
    top = torch.softmax(logits.float(), dim=1).topk(min(top_k, len(labels)), dim=1)
    predictions = []
    for i, (values, places) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
        classes = {labels[place]: value for place, value in zip(places, values, strict=True)}
        expert = None if chosen[i] is None else names[chosen[i]]
        predictions.append(Prediction(labels[places[0]], values[0], expert, known[i], unknown[i], classes))
    return predictions


def _each(images: Any) -> Iterator[Any]:
    """The images one by one: of a dataset those of its image column."""
    if isinstance(images, (datasets.Dataset, datasets.IterableDataset)):
        columns = [name for name, kind in (images.features or {}).items() if isinstance(kind, datasets.Image)]
        if len(columns) != 1:
            raise ValueError(f"the dataset must have one column of images, but has {len(columns)}: {columns}.")
        return (row[columns[0]] for row in undecoded(images.select_columns(columns), columns[0]))
    if isinstance(images, (str, os.PathLike, Image.Image)) or (isinstance(images, np.ndarray) and images.ndim < 4):
        return iter([images])
    if isinstance(images, dict) and not {"bytes", "path"} & set(images):
        raise ValueError(f"images has the splits or columns {', '.join(map(repr, images))}: pass one of them.")
    if isinstance(images, dict) or not isinstance(images, Iterable):
        return iter([images])
    return iter(images)


def _pixels(image: Any, position: int, processor: Any, options: dict[str, Any]) -> torch.Tensor:
    try:
        return make_pixels([image], processor, **options)
    except Exception as error:  # decoders raise many kinds of errors for a broken file
        if isinstance(error, MissingSourceError):
            raise
        path = image.get("path") if isinstance(image, dict) else image if isinstance(image, (str, os.PathLike)) else ""
        raise ValueError(f"image {position} {path or ''} cannot be read: {error!r}".replace("  ", " ")) from error
