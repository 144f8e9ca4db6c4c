"""
Parameters of one task on a ViT-B/16, counted by code, beside those of methods that move every layer; and processor
time of one epoch of each, in passes of the backbone.

    python examples/benchmarks/layerwise.py
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import write_results
from peers import add_layer_adapters
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from peft_luca import LucaConfig


BOTTLENECK, BATCH = 64, 16
# Pools, for all tasks together. L2P: 10 prompts of 5 tokens with a key each. CODA-Prompt: 100 components of 8 tokens
# in 5 blocks, each with a key and an attention. (exps/l2p.json, exps/coda_prompt.json of sun-hailong/LAMDA-PILOT.)
L2P = {"prompts": 10, "tokens": 5}
CODA = {"components": 100, "tokens": 8, "blocks": 5}


def vit() -> ViTForImageClassification:
    return ViTForImageClassification(ViTConfig(num_labels=10)).eval()


def lora(model: nn.Module, rank: int) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))


def learnt(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def parameters() -> dict[str, int]:
    """Without the head, which is the same for all: 768 numbers a class."""
    with torch.device("meta"):
        model = get_peft_model(vit(), LucaConfig(classes=["a", "b"]))
        luca = sum(p.numel() for p in model.base_model.layer.luca_parameters("default").values())
        adapter = vit()
        layer_wise = sum(p.numel() for p in add_layer_adapters(adapter, BOTTLENECK).parameters())
        ranks = {rank: learnt(lora(vit(), rank)) for rank in (8, 16)}
        width = adapter.config.hidden_size
        l2p = [torch.empty(L2P["prompts"], L2P["tokens"], width), torch.empty(L2P["prompts"], width)]
        component = [torch.empty(CODA["components"], CODA["tokens"], width)]
        coda = [*component, *(torch.empty(CODA["components"], width) for _ in ("key", "attention"))] * CODA["blocks"]
    return {
        "LuCA": luca,
        f"adapter of width {BOTTLENECK} in 12 blocks": layer_wise,
        **{f"LoRA, rank {rank}, q and v": count for rank, count in ranks.items()},
        "prompts of L2P's size, all tasks together": sum(t.numel() for t in l2p),
        "prompts of CODA-Prompt's size, all tasks together": sum(t.numel() for t in coda),
    }


def epoch(model: nn.Module, head: Any, images: torch.Tensor, trunk_learns: bool) -> float:
    """Processor time of one epoch: every image forwards, and backwards as far as there is something to learn."""
    labels = torch.arange(len(images)) % 10
    started = time.process_time()
    for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        with torch.set_grad_enabled(trunk_learns):
            out = model(x).logits
        F.cross_entropy(head(out), y).backward()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "layerwise.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(args.images, 3, 224, 224)
    head = nn.Linear(768, 10)
    models: dict[str, tuple[nn.Module, bool]] = {}
    for name in ("released procedure (LuCA, backbone in every epoch)", "adapter", "LoRA, rank 16"):
        model = vit()
        model.classifier = nn.Identity()
        if name == "adapter":
            add_layer_adapters(model, BOTTLENECK)
        if name.startswith("LoRA"):
            model = lora(model, 16)
        models[name] = model, name != "released procedure (LuCA, backbone in every epoch)"
    plain = vit()

    def one_pass() -> float:
        started = time.process_time()
        with torch.no_grad():
            for x in images.split(BATCH):
                plain(x)
        return time.process_time() - started

    one_pass()
    ratios: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(args.rounds):  # in turn, so that what else the machine does falls on all alike
        passed = one_pass()
        for name, (model, trunk_learns) in models.items():
            ratios[name].append(epoch(model, head, images, trunk_learns) / passed)
    passes = {name: round(sorted(values)[len(values) // 2], 3) for name, values in ratios.items()}
    counts = parameters()
    released, adapter, _ = passes.values()
    write_results(
        args.output,
        images=args.images,
        rounds=args.rounds,
        parameters=counts,
        times_lucas={name: round(count / counts["LuCA"], 2) for name, count in counts.items()},
        passes_of_an_epoch=passes,
        adapter_over_released=round(adapter / released, 2),
        epochs=args.epochs,
        passes_of_all_epochs={name: round(args.epochs * value, 1) for name, value in passes.items()},
    )
    print(counts, passes)


if __name__ == "__main__":
    main()
