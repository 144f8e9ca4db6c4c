"""Using a model on images of any kind, as the trainer measured it: pixel values, the pipeline, export to ONNX."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable
from typing import Any

import torch
from huggingface_hub import get_session
from peft import PeftModel
from PIL import Image
from torch import Tensor, nn
from transformers import ImageClassificationPipeline
from transformers.pipelines.image_classification import ClassificationFunction

from .preprocessing import make_pixels
from .tuner.backbone import pooled_features, processor_facts
from .tuner.head import Head
from .tuner.layer import find_layer, image_options
from .tuner.model import LucaModel, tuner_of
from .tuner.prediction import answer_of, answering_classes, processor_of


def pixel_values(model: nn.Module, images: Iterable[Any], processing_class: Any = None) -> Tensor:
    """
    Images → pixel values, `(batch, channels, height, width)`, as the trainer made them for the experts of a model. The
    arguments are those of [`LucaModel.predict`].
    """
    return make_pixels(images, processor_of(find_layer(model)[1], processing_class), **image_options(model))


class LucaPipeline(ImageClassificationPipeline):
    """
    An image classification pipeline that reads images as the trainer does, and answers as [`LucaModel.predict`] does.
    Give it to `pipeline` of transformers as `pipeline_class`. It needs no `image_processor`.

    Args:
        unknown_label (`str`, *optional*):
            Label that comes first, with the score 1 - `known`, where `known` is below the router's `unknown_below`.
    """

    _load_image_processor: Any = None  # without one, that of the experts is made from their facts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.image_processor is None:
            self.image_processor = processor_of(find_layer(self.model)[1])

    def check_model_type(self, supported_models: Any) -> None:
        """Takes a `PeftModel` without the warning of transformers."""

    def _sanitize_parameters(self, *args: Any, unknown_label: str | None = None, **kwargs: Any) -> Any:
        preprocess, forward, postprocess = super()._sanitize_parameters(*args, **kwargs)
        label = {} if unknown_label is None else {"unknown_label": unknown_label}
        return preprocess, forward | label, postprocess | label

    def preprocess(self, image: Any, timeout: float | None = None) -> dict[str, Any]:  # type: ignore[override]
        """An image, its path, or a URL of http, https or data → its pixel values."""
        if isinstance(image, str) and image.startswith(("http://", "https://")):
            response = get_session().get(image, timeout=timeout, follow_redirects=True)
            image = {"bytes": response.raise_for_status().content}
        elif isinstance(image, str) and image.startswith("data:"):
            image = {"bytes": base64.b64decode(image.split(",")[-1])}
        return {"pixel_values": pixel_values(self.model, [image], self.image_processor).to(self.dtype)}

    def _forward(self, model_inputs: Any, unknown_label: Any = None) -> Any:  # type: ignore[override]
        if unknown_label is None:
            return super()._forward(model_inputs)
        base = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        name, layer = find_layer(base)
        features = pooled_features(base, Head(name, layer.width, layer.input_width), **model_inputs)
        answer = answer_of(layer, features)
        return {"logits": answer.logits, "known": answer.known, "unknown": answer.unknown}

    def postprocess(  # type: ignore[override]
        self, model_outputs: Any, function_to_apply: Any = None, top_k: int = 5, unknown_label: str | None = None
    ) -> list[dict[str, Any]]:
        """Logits → labels with their scores."""
        if self.model.config.num_labels == 1 and function_to_apply is None:
            function_to_apply = ClassificationFunction.SOFTMAX  # as `predict`, not the sigmoid of transformers
        labels: list[dict[str, Any]] = super().postprocess(model_outputs, function_to_apply, top_k)
        if unknown_label is not None and model_outputs["unknown"][0]:
            labels.insert(0, {"label": unknown_label, "score": 1 - model_outputs["known"][0].item()})
        return labels[:top_k]


class _Answers(nn.Module):
    """Pixel values → logits `(batch, C)`, position of the expert `(batch,)` and `known` `(batch,)`."""

    def __init__(self, tuner: LucaModel) -> None:
        super().__init__()
        self.tuner, self.dtype = tuner, tuner.backbone.dtype
        self.training = False  # eval() would change the mode of the model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        answer = answer_of(self.tuner.layer, self.tuner.pooled_features(pixel_values.to(self.dtype)))
        return answer.logits, answer.expert, answer.known


def export_onnx(model: PeftModel, path: str | os.PathLike[str], processing_class: Any = None) -> None:
    """
    Writes backbone, experts and router as one ONNX graph for every batch size: `pixel_values` → `logits`, `expert`
    (its position) and `known`. The metadata hold, as JSON under `peft_luca`: `classes`, `experts`, `unknown_below`,
    and how an image becomes pixels, `images` and `processor`. Needs onnx and onnxscript.

    Args:
        model ([`~peft.PeftModel`]), path (`str` or `PathLike`): The model, and the file to write.
        processing_class (`BaseImageProcessor`, *optional*): The image processor. By default the experts' own.
    """
    tuner = tuner_of(model)
    processor, images = processor_of(tuner.layer, processing_class), image_options(tuner.model)
    example = make_pixels([Image.new("RGB", (256, 256))] * 2, processor, **images).to(tuner.backbone.device)
    names: Any = {"verbose": False, "input_names": ["pixel_values"], "output_names": ["logits", "expert", "known"]}
    batch = {0: torch.export.Dim("batch")}
    program: Any = torch.onnx.export(_Answers(tuner), (example,), dynamo=True, dynamic_shapes=(batch,), **names)
    about: dict[str, Any] = {"classes": answering_classes(tuner.layer), "experts": list(tuner.experts)}
    about |= {"unknown_below": tuner.router.options.unknown_below if tuner.router else 0.0}
    about |= {"images": images, "processor": processor_facts(processor)}
    program.model.metadata_props["peft_luca"] = json.dumps(about, ensure_ascii=False)
    program.save(os.fspath(path))
