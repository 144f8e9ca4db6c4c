"""Labels and loss of a model: `id2label`, `num_labels` and the loss follow the active expert or the router."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn


class Labels(NamedTuple):
    """Labels and loss of a model: the base model's own, or those of experts."""

    id2label: dict[int, str] | None
    label2id: dict[str, int] | None
    loss_function: Any
    problem_type: str | None

    @classmethod
    def of_model(cls, model: nn.Module) -> Labels:
        """The labels and the loss that a model has now."""
        config = getattr(model, "config", None)
        id2label, label2id = getattr(config, "id2label", None), getattr(config, "label2id", None)
        return cls(
            None if id2label is None else dict(id2label),
            None if label2id is None else dict(label2id),
            # Only what was set on the model itself: otherwise transformers finds the loss by the model's class.
            model.__dict__.get("_loss_function"),
            getattr(config, "problem_type", None),
        )

    @classmethod
    def of_classes(cls, classes: Iterable[str]) -> Labels:
        """Labels and loss of experts with these classes."""
        names = dict(enumerate(classes))
        return cls(names, {name: i for i, name in names.items()}, cross_entropy, None)

    def names(self, head: nn.Module) -> list[str]:
        """Class names of the base model: those of its config, or the numbers of its outputs."""
        if self.id2label:
            return [str(self.id2label[i]) for i in sorted(self.id2label)]
        base = head.get_base_layer() if isinstance(head, BaseTunerLayer) else head
        outputs = getattr(base, "out_features", 0)
        if not outputs:
            raise ValueError("the base model has no labels to take class names from: pass LucaConfig(classes=[...]).")
        return [str(i) for i in range(outputs)]

    def apply(self, model: Any) -> None:
        """Gives a model these labels and this loss."""
        config: Any = getattr(model, "config", None)
        if self.id2label is None or not hasattr(config, "id2label"):
            return
        config.id2label = dict(self.id2label)
        config.label2id = dict(self.label2id or {name: i for i, name in self.id2label.items()})
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
    """
    Cross-entropy over any number of classes. The loss of transformers takes a single class for a regression.

    Args:
        labels (`torch.Tensor` of shape `(batch,)`): Class ids; -100 is ignored.
        logits (`torch.Tensor` of shape `(batch, classes)`): Logits.
        num_items_in_batch (`int`, *optional*): Divides the sum, for gradient accumulation.
    """
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.float(), labels.to(logits.device), reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
