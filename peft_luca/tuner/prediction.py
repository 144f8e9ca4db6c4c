"""From images of any kind to predictions: what [`LucaModel.predict`] reads images with, and what it returns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset, DatasetDict, IterableDataset
from PIL import Image
from torch import Tensor, nn
from transformers.image_processing_backends import PilBackend

from ..preprocessing import find_image_column, read_image, read_named, undecoded
from ..routing import RoutingOutput
from .backbone import PROCESSOR_TYPE, STEPS
from .layer import LucaLayer, find_layer, image_options


# Image processors with steps of their own, by a fact that tells them: files before version 0.2 do not name the class.
CLASSES_BY_FACT = {
    "crop_pct": "ConvNextImageProcessor",
    "rescale_offset": "EfficientNetImageProcessor",
    "do_flip_channel_order": "MobileViTImageProcessor",
    "data_config": "TimmWrapperImageProcessor",
}


@dataclass(frozen=True)
class Prediction:
    """
    The answer for one image. `print` shows it in one line.

    Attributes:
        label (`str`): The most probable class.
        probability (`float`): Its probability, from the softmax of the logits.
        expert (`str`): The expert that answered.
        known (`float`): Probability that the image is of any known class; see [`RoutingOutput`].
        unknown (`bool`): Whether `known` is below the router's `unknown_below`.
        top (`dict[str, float]`): The `top_k` most probable classes with their probabilities, the first is `label`.
    """

    label: str
    probability: float
    expert: str
    known: float
    unknown: bool
    top: dict[str, float]

    def __str__(self) -> str:
        classes = ", ".join(f"{label} {probability:.3g}" for label, probability in self.top.items())
        return f"{'unknown, at best ' * self.unknown}{classes} (expert {self.expert}, known {self.known:.3g})"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict that JSON holds."""
        return asdict(self)


def processor_of(layer: LucaLayer, processing_class: Any = None) -> Any:
    """The image processor that is given, or one of transformers that does what that of the experts' training did."""
    if processing_class is not None:
        return getattr(processing_class, "image_processor", processing_class)
    configs = layer.configs if layer.router else {name: layer.configs[name] for name in layer.active_adapters}
    facts = next((config.processor for config in configs.values() if config.processor), None)
    remedy = "Pass the image processor of their training as processing_class (image_processor in a pipeline)."
    if facts is None:
        raise ValueError(f"the experts do not say by which image processor they see images. {remedy}")
    of_fact = next((known for fact, known in CLASSES_BY_FACT.items() if fact in facts), "ViTImageProcessor")
    name = str(facts.get(PROCESSOR_TYPE, of_fact))
    found = getattr(transformers, f"{name.removesuffix('Fast')}Pil", None)
    if not (isinstance(found, type) and issubclass(found, PilBackend)):
        raise ValueError(f"the experts were trained with a {name}, which cannot be made without its files. {remedy}")
    settings = {**dict.fromkeys(STEPS, False), **facts, "do_convert_rgb": False}  # read_image has chosen the channels
    settings.pop(PROCESSOR_TYPE, None)
    return found(**settings)


def batches_of_pixels(model: nn.Module, images: Any, batch_size: int, processing_class: Any) -> Iterator[Tensor]:
    """Yields the pixel values of images, `(batch, channels, height, width)`."""
    processor = processor_of(find_layer(model)[1], processing_class)
    read = partial(read_image, **image_options(model))
    numbered = enumerate(_list_images(images))
    while batch := list(islice(numbered, batch_size)):
        upright = [read_named(image, read, f"at position {i}") for i, image in batch]
        yield processor(images=upright, return_tensors="pt")["pixel_values"]


def _list_images(images: Any) -> Iterable[Any]:
    if isinstance(images, DatasetDict):
        raise TypeError(f"found the splits {list(images)}; pass one of them, such as images[{next(iter(images))!r}].")
    if isinstance(images, (Dataset, IterableDataset)):
        column = find_image_column(images, "pass images[column]")
        rows = undecoded(images.select_columns([column]), column)
        return (row[column] for row in rows.with_format(None))
    is_one = isinstance(images, (str, os.PathLike, dict, Image.Image))
    return [images] if is_one or (isinstance(images, np.ndarray) and images.ndim < 4) else images


def answer_of(layer: LucaLayer, z: Tensor) -> RoutingOutput:
    """[CLS] `(batch, d)` → the answer of the router that is set, otherwise of the active expert over its classes."""
    if layer.disable_adapters or not layer.active_adapters:
        raise ValueError("the experts are disabled: leave disable_adapter(), or call the model for its own head.")
    if layer.router is not None:
        routed = layer.route_features(z)
        return routed if routed.known is not None else routed._replace(known=routed.confidence)
    name = layer.active_adapters[0]
    logits = layer.expert_logits(z, name)
    posterior = logits.float().softmax(dim=-1)
    entropy, confidence = torch.special.entr(posterior).sum(dim=-1), posterior.amax(dim=-1)
    expert = torch.full_like(confidence, list(layer.configs).index(name), dtype=torch.int64)
    return RoutingOutput(logits, expert, entropy, None, confidence, torch.zeros_like(expert).bool(), confidence)


def answering_classes(layer: LucaLayer) -> tuple[str, ...]:
    """The classes of the logits: of all experts with a router, otherwise of the active expert."""
    return layer.label_space.classes if layer.router else tuple(layer.configs[layer.active_adapters[0]].classes or ())


def predictions_of(layer: LucaLayer, answer: RoutingOutput, top_k: int) -> Iterator[Prediction]:
    """Yields the prediction for each image of a batch."""
    logits, order = answer.logits.float().sort(dim=-1, descending=True, stable=True)  # of equal ones as argmax does
    probabilities = logits.softmax(dim=-1)[:, :top_k].tolist()
    classes, experts = answering_classes(layer), list(layer.configs)
    parts = (order.tolist(), probabilities, answer.expert.tolist(), answer.known.tolist(), answer.unknown.tolist())
    for ids, found, expert, known, unknown in zip(*parts, strict=True):
        top = {classes[i]: probability for i, probability in zip(ids, found, strict=False)}
        yield Prediction(classes[ids[0]], found[0], experts[expert], known, unknown, top)
