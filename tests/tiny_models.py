"""Tiny models with random weights, and ways to look at them."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from peft_luca import LucaConfig


torch.set_num_threads(1)

ANIMALS = ["cat", "dog", "owl"]
SKIES = ["sun", "moon"]
TREES = ["oak", "fir", "elm"]


def tiny_vit(num_labels: int = 2, seed: int = 0, **kwargs: Any) -> ViTForImageClassification:
    """A ViT of width 16 on pictures of 8 × 8."""
    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_labels=num_labels,
        **kwargs,
    )
    return ViTForImageClassification(config).eval()


def expert_config(classes: list[str] | None = None, **kwargs: Any) -> LucaConfig:
    return LucaConfig(classes=ANIMALS if classes is None else classes, reduction=4, **kwargs)


def with_experts(model: nn.Module | None = None, /, **experts: list[str]) -> PeftModel:
    """A model with experts of random weights, called as the keywords; the first one is active."""
    model = tiny_vit() if model is None else model
    for name, classes in experts.items():
        if isinstance(model, PeftModel):
            model.add_adapter(name, expert_config(classes))
        else:
            model = get_peft_model(model, expert_config(classes), adapter_name=name)
    model.eval()
    return model


def pictures(count: int = 4, size: int = 8, channels: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: nn.Module, pixels: Tensor | None = None, **kwargs: Any) -> Tensor:
    output = model(pictures() if pixels is None else pixels, **kwargs)
    return output if isinstance(output, Tensor) else output.logits


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every tensor."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def trainable(model: nn.Module) -> set[str]:
    """Names of the experts that have a trainable parameter."""
    rows = [name for name, p in model.named_parameters() if p.requires_grad]
    return {next(part for part in name.split("luca_")[1].split(".")[1:]) for name in rows}
