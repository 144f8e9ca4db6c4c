"""Using a model on images of any kind, as the trainer measured it."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from huggingface_hub import get_session
from torch import Tensor, nn
from transformers import ImageClassificationPipeline

from .preprocessing import make_pixels
from .tuner.layer import image_options


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


class LucaPipeline(ImageClassificationPipeline):
    """
    An image classification pipeline that reads images as the trainer does. The one of transformers drops alpha and
    all but 8 bits before the image processor sees an image. Give it to its `pipeline` as `pipeline_class`.
    """

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
