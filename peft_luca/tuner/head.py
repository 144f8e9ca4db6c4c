"""Where an expert goes: the one head of an image classifier, and what enters it; and what an expert may be called."""

from __future__ import annotations

from typing import Any, NamedTuple

from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from ..utils import NAME_RULE
from .config import LucaConfig
from .layer import LucaLayer, luca_layers


# What enters the head, by `config.model_type`; see docs/architectures.md. transformers' other image classifiers hand
# over another pooled vector; a model that is none of them needs `target_modules`.
CLS_FIRST = ("vit", "vit_msn", "deit", "pvt")
CLS_AND_PATCHES = ("dinov2", "dinov2_with_registers")  # [CLS] and the patches' mean side by side
CLS_UNLESS_POOLED = ("beit", "data2vec-vision")  # the patches' mean when config.use_mean_pooling


class Head(NamedTuple):
    """Where a model's head is, and what enters it."""

    name: str
    width: int  # d, of what LuCA reads
    input_width: int  # of what enters the head


def find_head(model: Any, config: LucaConfig) -> Head:
    """
    Find the one head that a LuCA layer goes in place of.

    Raises:
        ValueError: there is not exactly one, or what enters it is not [CLS] and `pooled="any"` was not asked for.
    """
    model_config, kind = getattr(model, "config", None), type(model).__name__
    model_type = getattr(model_config, "model_type", None)
    by_name = isinstance(config.target_modules, (str, list, set)) and bool(config.target_modules)
    if kind.endswith("WithTeacher"):
        raise ValueError(f"{kind} has two heads on two tokens. Load the same weights as DeiTForImageClassification.")
    names = [name for name, _ in model.named_modules()]
    if by_name:
        wanted = (
            [config.target_modules] if isinstance(config.target_modules, str) else list(config.target_modules or ())
        )
        matches = [name for name in names if any(name == w or name.endswith(f".{w}") for w in wanted)]
        matches = [name for name in matches if ".base_layer" not in name]
    elif model_type == "timm_wrapper":
        classifier = model.timm_model.get_classifier()
        matches = [name for name, module in model.named_modules() if module is classifier]
    else:
        matches = [name for name in names if name == "classifier"]
    if len(matches) != 1:
        found = f"{len(matches)} ({', '.join(matches[:5])})" if matches else "none"
        asked = f"target_modules={config.target_modules!r} names" if by_name else "looking for a classifier finds"
        raise ValueError(
            f"LuCA takes the place of exactly one head, but {asked} {found} in {kind}. Load the model with an "
            "AutoModelForImageClassification, or name its head with LucaConfig(target_modules=['...'])."
        )
    name = matches[0]
    module = model.get_submodule(name)
    if isinstance(module, LucaLayer):
        return Head(name, module.width, module.input_width)
    if isinstance(module, AuxiliaryTrainingWrapper):
        raise ValueError(
            f"the head {name!r} of {kind} belongs to another adapter, by its modules_to_save or the like, which PEFT "
            "would write into the expert's files. Make that adapter part of the backbone first: merge_and_unload()."
        )
    hidden_size = getattr(model_config, "hidden_size", None)
    if isinstance(module, nn.Identity):  # of a base without labels
        input_width = hidden_size
        if input_width is None:
            raise ValueError(
                f"the head {name!r} of {kind} is an Identity of unknown width: config.hidden_size does not say it. "
                "Load the model with num_labels of 1 or more."
            )
        if model_type in CLS_AND_PATCHES:
            input_width *= 2
    else:
        input_width = getattr(module, "in_features", None)
    if not isinstance(input_width, int):
        raise ValueError(
            f"the head {name!r} of {kind} is a {type(module).__name__}, but LuCA reads one pooled vector and needs a "
            "Linear (or Identity) head."
        )
    reads_cls = (
        model_type in (*CLS_FIRST, *CLS_AND_PATCHES)
        or (model_type in CLS_UNLESS_POOLED and not getattr(model_config, "use_mean_pooling", True))
        or (model_type == "timm_wrapper" and getattr(model.timm_model, "global_pool", None) == "token")
        # A model that nobody can know, whose head the user has named.
        or (by_name and model_type not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)
    )
    if not reads_cls and config.pooled != "any":
        raise ValueError(
            f"the head of {kind} does not read [CLS] but another pooled vector, which is outside the method. Use a "
            "ViT or DINOv2 classifier, or say LucaConfig(pooled='any') to go on with what the head reads."
        )
    if model_type in CLS_AND_PATCHES:
        width = hidden_size or input_width // 2
        return Head(name, width, 2 * width if isinstance(module, nn.Identity) else input_width)
    return Head(name, input_width, input_width)


def check_expert_name(name: str, model: nn.Module, head_name: str = "") -> None:
    """
    Refuse an expert's name with which PEFT loses tensors when saving, or which a module or a folder cannot have.

    PEFT tells experts apart by the parts of a tensor's name, so that no part may be an expert's name as well. The
    names of the backbone's modules are refused too, apart from bare numbers, for tasks are often numbered.

    Raises:
        ValueError: with the rule.
    """
    layers = luca_layers(model)
    inside = tuple(f"{key}." for key, module in model.named_modules() if isinstance(module, BaseTunerLayer))
    parts = {part for key, _ in model.named_modules() if not key.startswith(inside) for part in key.split(".")}
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
    for layer in layers:
        alike = [other for other in layer.configs if other != name and other.lower() == name.lower()]
        if alike:
            raise ValueError(
                f"an expert cannot be called {name!r}, for there is one called {alike[0]!r}: on file systems that do "
                "not tell capital letters from small ones they would be saved into one folder. Take another name."
            )
