"""Labels and loss of a model: `id2label`, `num_labels` and the loss follow the active expert or the router."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.loss.loss_utils import fixed_cross_entropy

from .layer import luca_layers


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
