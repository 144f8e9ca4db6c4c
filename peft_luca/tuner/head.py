"""The head of an image classifier, whose place the experts take: what enters it, its labels and loss, and names."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from ..utils import NAME_RULE
from .config import LucaConfig
from .experts import named_modules
from .layer import LucaLayer, luca_layers


# What enters the head, by `config.model_type`; see docs/backbones.md. Other image classifiers of transformers pass
# another pooled vector. A model that is none of them needs `target_modules`.
CLS_FIRST = ("vit", "vit_msn", "deit", "pvt")
# [CLS] and the patches' mean side by side. These interpolate their positions without being asked.
CLS_AND_PATCHES = ("dinov2", "dinov2_with_registers")
CLS_UNLESS_POOLED = ("beit", "data2vec-vision")  # the patches' mean when config.use_mean_pooling


class Head(NamedTuple):
    """Name of a model's head, and the widths of what enters it."""

    name: str
    width: int  # d, of what LuCA reads
    input_width: int  # of what enters the head


def find_head(model: Any, config: LucaConfig) -> Head:
    """Finds the one head of an image classifier, not wrapped in a `PeftModel`, that the LuCA layer replaces."""
    kind = type(model).__name__
    if kind.endswith("WithTeacher"):
        raise ValueError(f"{kind} has two heads on two tokens. Load the same weights as DeiTForImageClassification.")
    model_config: Any = getattr(model, "config", None)
    model_type = getattr(model_config, "model_type", None)
    targets = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
    modules = {name: module for name, module in named_modules(model) if ".base_layer" not in name}
    if targets:
        matches = [name for name in modules if any(name == end or name.endswith(f".{end}") for end in targets)]
    elif model_type == "timm_wrapper":
        matches = [name for name, module in modules.items() if module is model.timm_model.get_classifier()]
    else:
        matches = [name for name in modules if name == "classifier"]
    if len(matches) != 1:
        found = f"{len(matches)} ({', '.join(matches[:5])})" if matches else "none"
        asked = f"target_modules={config.target_modules!r} names" if targets else "looking for a classifier finds"
        raise ValueError(
            f"LuCA takes the place of exactly one head, but {asked} {found} in {kind}. Load the model with an "
            "AutoModelForImageClassification, or name its head with LucaConfig(target_modules=['...'])."
        )
    name, module = matches[0], modules[matches[0]]
    if _is_in_trunk(name, model, model_type):
        raise ValueError(
            f"target_modules names {name!r}, a part of the trunk of {kind}, but LuCA takes the place of the head. "
            "Leave target_modules out. Do not load an expert whose file asks for this."
        )
    if isinstance(module, LucaLayer):
        return Head(name, module.width, module.input_width)
    if isinstance(module, AuxiliaryTrainingWrapper):
        raise ValueError(
            f"the head {name!r} of {kind} belongs to another adapter, by its modules_to_save or the like. Make that "
            "adapter part of the backbone first: merge_and_unload()."
        )
    parts = 2 if model_type in CLS_AND_PATCHES else 1
    input_width = getattr(module, "in_features", None)
    if isinstance(module, nn.Identity) and getattr(model_config, "hidden_size", None):  # of a base without labels
        input_width = parts * model_config.hidden_size
    if not isinstance(input_width, int):
        raise ValueError(
            f"the head {name!r} of {kind} is a {type(module).__name__}, but LuCA needs a Linear, or an Identity in a "
            "model with config.hidden_size. Load the model with num_labels of 1 or more, or name the Linear inside."
        )
    # The user, who has named the head of a model that nobody can know, vouches for what it reads.
    vouched = bool(targets) and model_type not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    if config.pooled != "any" and not vouched and not _reads_cls(model, model_type):
        raise ValueError(
            f"the head of {kind} does not read [CLS] but another pooled vector, which is outside the method. Use a "
            "ViT or DINOv2 classifier, or set LucaConfig(pooled='any') to use what the head reads."
        )
    return Head(name, input_width // parts, input_width)


def _is_in_trunk(name: str, model: Any, model_type: str | None) -> bool:
    """Whether a module of transformers' model is not its head. Of another model only its user knows."""
    if model_type == "timm_wrapper":
        return model.get_submodule(name) is not model.timm_model.get_classifier()
    top, *inside = name.split(".")
    in_trunk = top != "classifier" if hasattr(model, "classifier") else top == getattr(model, "base_model_prefix", "")
    return isinstance(model, PreTrainedModel) and bool(inside) and in_trunk


def _reads_cls(model: Any, model_type: str | None) -> bool:
    """Whether [CLS] enters the head."""
    if model_type in CLS_UNLESS_POOLED:
        return not getattr(model.config, "use_mean_pooling", True)
    if model_type == "timm_wrapper":
        return bool(getattr(model.timm_model, "global_pool", None) == "token")
    return model_type in (*CLS_FIRST, *CLS_AND_PATCHES)


def check_expert_name(name: str, model: nn.Module, head_name: str = "") -> None:
    """
    Refuses an expert's name that no module or folder can have, or with which PEFT loses tensors when it saves: PEFT
    tells experts apart by the parts of a tensor's name, so no part may be an expert's name. Bare numbers are allowed.
    """
    inside = tuple(f"{key}." for key, module in named_modules(model) if isinstance(module, BaseTunerLayer))
    parts = {part for key, _ in named_modules(model) if not key.startswith(inside) for part in key.split(".")}
    reserved = {"base_model", "model", "base_layer", "weight", "bias", *head_name.split(".")}
    reserved |= {part for part in parts if not part.isdecimal()}
    containers = (nn.ModuleDict(), nn.ParameterDict(), BufferDict())
    taken = name in reserved or name.startswith("luca") or any(hasattr(container, name) for container in containers)
    if not NAME_RULE.fullmatch(name) or taken:
        raise ValueError(
            f"an expert cannot be called {name!r}. Names are made of letters, digits, '_' and '-', at most 128 of "
            "them, start with a letter or digit, do not start with 'luca', and are none of the model's own names "
            "(such as 'classifier', 'weight' or 'keys'): with those PEFT loses tensors when it saves."
        )
    for other in (other for layer in luca_layers(model) for other in layer.configs):
        if other != name and other.lower() == name.lower():
            raise ValueError(
                f"an expert cannot be called {name!r}, for there is one called {other!r}: some file systems would "
                "save both into one folder. Take another name."
            )


class Labels(NamedTuple):
    """Labels and loss of a model: the base model's own, or those of experts."""

    id2label: dict[int, str] | None
    label2id: dict[str, int] | None
    loss_function: Any
    problem_type: str | None

    @classmethod
    def of_model(cls, model: nn.Module) -> Labels:
        """The labels and the loss of a base model, also if experts in it have set others since."""
        for layer in luca_layers(model):
            return layer.base_labels
        config = getattr(model, "config", None)
        id2label, label2id = (copy.copy(getattr(config, name, None)) for name in ("id2label", "label2id"))
        # Only the loss that was set on the model itself: otherwise transformers finds it by the model's class.
        return cls(id2label, label2id, vars(model).get("_loss_function"), getattr(config, "problem_type", None))

    @classmethod
    def of_classes(cls, classes: Iterable[str]) -> Labels:
        """Labels and loss of experts with these classes."""
        names = dict(enumerate(classes))
        return cls(names, {name: i for i, name in names.items()}, cross_entropy, None)

    def names(self, head: nn.Module) -> list[str]:
        """Class names of the base model: those of its config, or the numbers of its outputs."""
        if self.id2label:
            return [str(self.id2label[i]) for i in sorted(self.id2label)]
        outputs = getattr(getattr(head, "base_layer", head), "out_features", 0)
        if not outputs:
            raise ValueError("the base model has no labels to take class names from: pass LucaConfig(classes=[...]).")
        return [str(i) for i in range(outputs)]

    def apply(self, model: Any) -> None:
        """Gives a model these labels and this loss."""
        config: Any = getattr(model, "config", None)
        if self.id2label is None or not hasattr(config, "id2label"):
            return
        config.id2label, config.label2id = dict(self.id2label), copy.copy(self.label2id)
        config.problem_type = self.problem_type
        if hasattr(model, "num_labels"):
            model.num_labels = len(self.id2label)
        if self.loss_function is not None:
            model.loss_function = self.loss_function
        else:
            model.__dict__.pop("_loss_function", None)


def cross_entropy(
    labels: Tensor, logits: Tensor, config: Any = None, num_items_in_batch: Any = None, **kwargs: Any
) -> Tensor:
    """Cross-entropy of logits `(batch, classes)`. The loss of transformers takes a single class for a regression."""
    return fixed_cross_entropy(logits.float(), labels.to(logits.device), num_items_in_batch)
