"""A backbone that is given back exactly as it was, when the experts that came onto it are refused."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from .labels import Outputs
from .layer import LucaLayer, luca_layers


class Untouched(NamedTuple):
    """What a model was before its first expert came. Names, so that copies and pickles of it stay true."""

    trainable: frozenset[str]
    training: frozenset[str]
    outputs: Outputs
    peft_config: Any
    layers: int

    @classmethod
    def of(cls, model: nn.Module) -> Untouched:
        return cls(
            frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad),
            frozenset(name for name, module in model.named_modules() if module.training),
            Outputs.of(model),
            vars(model).get("peft_config"),
            len(luca_layers(model)),
        )

    def give_back(self, model: nn.Module) -> None:
        """Make a model that again: without experts, with its own labels, and trainable where it was."""
        for name, module in list(model.named_modules()):
            if isinstance(module, LucaLayer) and not self.layers:
                model.set_submodule(name, module.base_layer)
        vars(model).pop("peft_config", None)
        if self.peft_config is not None:
            model.peft_config = self.peft_config
        self.outputs.apply(model)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "label2id"):
            config.label2id = self.outputs.label2id  # which a config may lack
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.trainable)
        for name, module in model.named_modules():
            module.training = name in self.training
