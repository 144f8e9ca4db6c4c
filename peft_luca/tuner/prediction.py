"""From images of any kind to predictions: what [`LucaModel.predict`] reads images with, and what it returns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from datasets import Dataset, DatasetDict, IterableDataset
from PIL import Image
from torch import Tensor
from transformers.image_processing_backends import PilBackend

from ..preprocessing import find_image_column, undecoded
from ..routing import RoutingOutput
from ..utils import show
from .backbone import PROCESSOR_TYPE, STEPS
from .layer import LucaLayer


LARGEST_SIDE = 4096  # in pixels, of what an image processor makes


@dataclass(frozen=True)
class Prediction:
    """
    The answer for one image. `print` shows it in one line.

    Attributes:
        label (`str`), probability (`float`): The most probable class, by the softmax of the logits.
        expert (`str`): The expert that answered.
        known (`float`): Probability that the image is of any known class; see [`RoutingOutput`].
        unknown (`bool`): Whether `known` is below the router's `unknown_below`.
        top (`dict[str, float]`): The `top_k` most probable classes, with their probabilities.
    """

    label: str
    probability: float
    expert: str
    known: float
    unknown: bool
    top: dict[str, float]

    def __str__(self) -> str:
        classes = ", ".join(f"{label}: {probability:.3g}" for label, probability in self.top.items())
        return f"{'unknown, at best ' * self.unknown}{classes} (expert {self.expert}, known {self.known:.3g})"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict that JSON holds."""
        return asdict(self)


def processor_of(layer: LucaLayer, processing_class: Any = None) -> Any:
    """The image processor that is given, or one of transformers that does what that of the experts' training did."""
    if processing_class is not None:
        return getattr(processing_class, "image_processor", processing_class)
    names = layer.configs if layer.router else layer.active_adapters
    facts = next((facts for name in names if (facts := layer.configs[name].processor)), None)
    remedy = "Pass the image processor of their training as processing_class (image_processor in a pipeline)."
    if facts is None:
        raise ValueError(f"the experts do not say by which image processor they see images. {remedy}")
    special = facts.keys() & {"crop_pct", "rescale_offset", "do_flip_channel_order", "data_config"}
    # Earlier versions did not write the name of the class.
    kind = str(facts.get(PROCESSOR_TYPE, f"processor with {special.pop()}" if special else "ViTImageProcessor"))
    found = getattr(transformers, f"{kind.removesuffix('Fast')}Pil", None)
    if not (isinstance(found, type) and issubclass(found, PilBackend)):
        raise ValueError(
            f"the experts were trained with a {show(kind)}, which cannot be made from its settings. {remedy}"
        )
    sizes = [facts.get(name) or {} for name in ("size", "crop_size", "pad_size")]
    sides = [side for size in sizes for side in (size.values() if isinstance(size, dict) else [size])]
    fits = all(isinstance(side, int) and 0 < side <= LARGEST_SIDE for side in sides)
    if not fits or facts.get("crop_pct", 1) < 0.1:  # a stranger may have written them
        raise ValueError(
            f"the experts' image processor makes images of {show(sizes)} pixels, which is refused. {remedy}"
        )
    settings = {**dict.fromkeys(STEPS, False), **facts, "do_convert_rgb": False}  # read_image has chosen the channels
    return found(**{name: value for name, value in settings.items() if name != PROCESSOR_TYPE})


def list_images(images: Any) -> Iterator[Any]:
    """Yields the images of all that [`LucaModel.predict`] accepts."""
    if isinstance(images, DatasetDict):
        raise TypeError(f"found the splits {list(images)}; pass one of them, such as images[{next(iter(images))!r}].")
    if isinstance(images, (Dataset, IterableDataset)):
        column = find_image_column(images, "pass images[column]")
        rows = undecoded(images.select_columns([column]), column).with_format(None)
        return (row[column] for row in rows)
    is_one = isinstance(images, (str, os.PathLike, dict, Image.Image))
    several: Iterable[Any] = [images] if is_one or getattr(images, "ndim", 4) < 4 else images  # an array of 4 is many
    return iter(several)


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
    classes, experts = answering_classes(layer), list(layer.configs)
    probabilities = logits.softmax(dim=-1)[:, :top_k]
    columns: Any = (order[:, :top_k], probabilities, answer.expert, answer.known, answer.unknown)
    for ids, found, expert, known, unknown in zip(*(column.tolist() for column in columns), strict=True):
        top = {classes[i]: probability for i, probability in zip(ids, found, strict=True)}
        yield Prediction(classes[ids[0]], found[0], experts[expert], known, unknown, top)
