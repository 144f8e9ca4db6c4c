"""Continual learning with LuCA experts on frozen vision transformers. Importing this registers LUCA with PEFT."""

from ._registration import register
from ._version import __version__
from .backbone import draw_reference_pictures
from .config import LucaConfig
from .features import FeatureDataset
from .hub import list_experts, load_expert, load_experts, push_expert, push_experts, save_expert, save_experts
from .images import ImageCollator
from .layer import LucaLayer
from .metrics import ContinualAccuracy
from .model import LucaModel
from .routing import RoutingOutput
from .streams import Task, TaskStream
from .trainer import ContinualTrainer
from .training_args import ContinualTrainingArguments
from .untrusted import InvalidExpertError


register(LucaConfig, LucaModel)


__all__ = [
    "ContinualAccuracy",
    "ContinualTrainer",
    "ContinualTrainingArguments",
    "FeatureDataset",
    "ImageCollator",
    "InvalidExpertError",
    "LucaConfig",
    "LucaLayer",
    "LucaModel",
    "RoutingOutput",
    "Task",
    "TaskStream",
    "__version__",
    "draw_reference_pictures",
    "list_experts",
    "load_expert",
    "load_experts",
    "push_expert",
    "push_experts",
    "save_expert",
    "save_experts",
]
