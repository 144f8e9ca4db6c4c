"""Using a model on images of any kind, as the trainer measured it."""

from __future__ import annotations

import base64
import json
import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from huggingface_hub import get_session
from peft import PeftModel
from PIL import Image
from torch import Tensor, nn
from transformers import ImageClassificationPipeline

from .preprocessing import make_pixels
from .routing import RoutingOutput
from .tuner.backbone import pooled_features, processor_facts
from .tuner.head import Head
from .tuner.layer import find_layer, image_options
from .tuner.prediction import processor_of


def pixel_values(model: nn.Module, images: Iterable[Any], processing_class: Any) -> Tensor:
    """
    Images → pixel values, `(batch, channels, height, width)`, as the trainer made them for the experts of a model.

    Args:
        model (`nn.Module`): The model with the experts, as a [`~peft.PeftModel`] or its base model.
        images (`Iterable`): PIL images, arrays, paths, or dicts of `bytes` or `path`; see
            [`~peft_luca.preprocessing.read_image`].
        processing_class (`BaseImageProcessor`): The backbone's image processor.
    """
    return make_pixels(images, processing_class, **image_options(model))


def _route(model: nn.Module, pixels: Tensor) -> RoutingOutput:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    name, layer = find_layer(base)
    return layer.route_features(pooled_features(base, Head(name, layer.width, layer.input_width), pixels))


class _Graph(nn.Module):
    """What is exported."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        output = _route(self.model, pixel_values)
        known = output.confidence if output.known is None else output.known
        return output.logits, output.expert, known, output.unknown


def export_onnx(model: PeftModel, path: str | os.PathLike[str], processing_class: Any = None) -> None:
    """
    Writes backbone, experts and router as one ONNX graph for every batch size. Needs `peft-luca[onnx]`.

    The graph maps `pixel_values` to `logits` `(batch, C)`, `expert`, `known` and `unknown` `(batch,)`, as
    [`RoutingOutput`] has them. Its metadata `peft_luca` holds, as JSON, the names of `classes` and `experts` and how
    images become pixel values; examples/onnx_predict.py answers from it without torch.

    Args:
        model ([`~peft.PeftModel`]): The model, with a router.
        path (`str` or `PathLike`): The file to write.
        processing_class (`BaseImageProcessor`, *optional*): By default the one of the experts' training images.

    Raises:
        ValueError: no router is set, or it is a function.
    """
    layer = find_layer(model)[1]
    if layer.router is None or layer.router.name is None:
        raise ValueError(f"a graph needs a router with a name, got {layer.router!r}. Call set_router('auto').")
    processor = processor_of(model) if processing_class is None else processing_class
    graph = _Graph(model.get_base_model()).eval()
    like = next(graph.parameters())
    pixels = pixel_values(model, [Image.new("RGB", (64, 64))] * 2, processor).to(like)
    layer.experts.prepared(layer.router)  # its tensors are constants of the graph
    options: Any = {"dynamic_shapes": ({0: torch.export.Dim("batch")},), "dynamo": True, "verbose": False}
    options |= {"input_names": ["pixel_values"], "output_names": ["logits", "expert", "known", "unknown"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, which no user can change
        program: Any = torch.onnx.export(graph, (pixels,), optimize=True, **options)
    about = {"classes": list(layer.label_space.classes), "experts": list(layer.configs), **image_options(model)}
    program.model.metadata_props["peft_luca"] = json.dumps(about | {"processor": processor_facts(processor)})
    program.save(os.fspath(path))


class LucaPipeline(ImageClassificationPipeline):
    """
    An image classification pipeline that reads images as the trainer does. The one of transformers drops alpha and
    all but 8 bits before the image processor sees an image. `LucaPipeline(model=model)` takes the image processor of
    the experts; to `pipeline` it is given as `pipeline_class`. With `unknown_label="unknown"` it answers that label
    for images that the router takes for none of the known classes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("image_processor") is None:
            kwargs["image_processor"] = processor_of(kwargs.get("model"))
        super().__init__(*args, **kwargs)

    def _sanitize_parameters(self, unknown_label: str | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        kwargs.setdefault("function_to_apply", "softmax")  # for one class transformers takes a sigmoid
        before, _, after = super()._sanitize_parameters(**kwargs)
        return before, {"routed": unknown_label is not None}, after | {"unknown_label": unknown_label}

    def _forward(self, model_inputs: Any, routed: bool = False) -> Any:  # type: ignore[override]
        if not routed:
            return super()._forward(model_inputs)
        return _route(self.model, model_inputs["pixel_values"])._asdict()

    def postprocess(  # type: ignore[override]
        self, model_outputs: Any, unknown_label: str | None = None, **kwargs: Any
    ) -> Any:
        """Classes with their scores; or the `unknown_label`, with 1 - [`RoutingOutput.known`]."""
        if unknown_label is not None and model_outputs["unknown"]:
            return [{"label": unknown_label, "score": 1 - float(model_outputs["known"])}]
        return super().postprocess(model_outputs, **kwargs)

    def check_model_type(self, supported_models: Any) -> None:
        """Takes a `PeftModel` without the warning of transformers."""

    def preprocess(self, image: Any, timeout: float | None = None) -> dict[str, Any]:  # type: ignore[override]
        """An image, its path, or a URL of http, https or data → its pixel values."""
        if isinstance(image, str) and image.startswith(("http://", "https://")):
            response = get_session().get(image, timeout=timeout, follow_redirects=True)
            image = {"bytes": response.raise_for_status().content}
        elif isinstance(image, str) and image.startswith("data:"):
            image = {"bytes": base64.b64decode(image.split(",")[-1])}
        return {"pixel_values": pixel_values(self.model, [image], self.image_processor).to(self.dtype)}
