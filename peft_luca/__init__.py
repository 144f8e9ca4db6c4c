"""Continual learning with LuCA experts on frozen vision transformers. Importing this registers LUCA with PEFT."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._registration import register
from ._version import __version__
from .data.collator import ImageCollator
from .data.feature_cache import FeatureDataset
from .data.task_stream import Task, TaskStream
from .hub.publishing import list_experts, push_expert, push_experts
from .hub.saving import load_expert, load_experts, save_expert, save_experts
from .routing import Router, RoutingOutput
from .training.arguments import ContinualTrainingArguments
from .training.continual_trainer import ContinualTrainer
from .training.expert_trainer import ExpertTrainer
from .tuner.config import LucaConfig
from .tuner.layer import LucaLayer
from .tuner.model import LucaModel, LucaPeftModel
from .tuner.prediction import Prediction
from .tuner.reference import draw_reference_pictures
from .utils import InvalidExpertError


if TYPE_CHECKING:
    from .inference import LucaPipeline, export_onnx, pixel_values
    from .training.continual_accuracy import ContinualAccuracy

register(LucaConfig, LucaModel)

# What imports pipelines and metrics, which takes as long as all else here, is imported when it is asked for.
_LATER = dict.fromkeys(("LucaPipeline", "export_onnx", "pixel_values"), ".inference")
_LATER["ContinualAccuracy"] = ".training.continual_accuracy"


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'peft_luca' has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)


__all__ = [
    "ContinualAccuracy",
    "ContinualTrainer",
    "ContinualTrainingArguments",
    "ExpertTrainer",
    "FeatureDataset",
    "ImageCollator",
    "InvalidExpertError",
    "LucaConfig",
    "LucaLayer",
    "LucaModel",
    "LucaPeftModel",
    "LucaPipeline",
    "Prediction",
    "Router",
    "RoutingOutput",
    "Task",
    "TaskStream",
    "__version__",
    "draw_reference_pictures",
    "export_onnx",
    "list_experts",
    "load_expert",
    "load_experts",
    "pixel_values",
    "push_expert",
    "push_experts",
    "save_expert",
    "save_experts",
]
