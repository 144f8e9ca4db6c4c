"""Peers that move the backbone, so that no [CLS] can be kept: LoRA from PEFT, and layer-wise adapters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from bench import BATCH, Bench, Part
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from peft_luca import LucaConfig
from peft_luca.routing.router import entropy
from peft_luca.tuner.model import find_head


class Lora:
    """
    LoRA on query and value, with the values of PEFT's guide to image classification (rank 16, α 16, dropout 0.1,
    learning rate 5e-3), one adapter and one linear head for each task; the head that is most certain of its own
    classes answers.
    """

    joint, passes_itself, sequential = False, True, False
    epochs, batch, rate, rank = 3, 32, 5e-3, 16

    def __init__(self, bench: Bench, stream: Any, ids: tuple[str, ...], seed: int) -> None:
        torch.manual_seed(seed)
        self.bench, self.stream, self.ids = bench, stream, ids
        head = find_head(bench.model, LucaConfig())
        self.head_name, self.width = head.name, head.input_width
        self.base_head = bench.model.get_submodule(head.name)
        bench.model.set_submodule(head.name, nn.Identity())
        names = {name.split(".")[-1] for name, _ in bench.model.named_modules()}
        self.config = LoraConfig(
            r=self.rank,
            lora_alpha=16,
            lora_dropout=0.1,
            target_modules=[name for name in ("q_proj", "v_proj", "query", "value") if name in names],
        )
        self.peft: Any = None
        self.heads: list[nn.Linear] = []
        self.classes: list[Tensor] = []  # of each head, as the stream's ids

    def learn(self, task: Any, train: Part) -> None:
        own = torch.tensor([self.ids.index(name) for name in task.classes])
        if self.peft is None:
            self.peft = get_peft_model(self.bench.model, self.config, adapter_name=task.name)
        elif not self.sequential:
            self.peft.add_adapter(task.name, self.config)
            self.peft.set_adapter(task.name)
        if not self.sequential or not self.heads:
            outputs = len(self.ids) if self.sequential else len(own)
            self.heads.append(nn.Linear(self.width, outputs).to(self.bench.device))
            self.classes.append(own)
        if self.sequential:
            self.classes[0] = own = torch.cat([self.classes[0], own]).unique()
        head, columns = self.heads[-1], own if self.sequential else slice(None)
        place = torch.full((len(self.ids),), -1)
        place[own] = torch.arange(len(own))
        weights = [p for p in self.peft.parameters() if p.requires_grad] + list(head.parameters())
        optimizer = torch.optim.AdamW(weights, lr=self.rate)
        steps = self.epochs * -(-len(train) // self.batch)
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        self.peft.train()
        for _ in range(self.epochs):
            for rows in torch.randperm(len(train)).split(self.batch):
                logits = head(self.peft(self.bench.pixels(train, rows)).logits)[:, columns]
                loss = F.cross_entropy(logits, place[train.labels[rows]].to(self.bench.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                decay.step()
        self.peft.eval()

    @torch.no_grad()
    def logits(self, test: Part, t: int) -> Tensor:
        if not self.sequential:
            self.peft.set_adapter(self.stream[t].name)
        rows = torch.arange(len(test)).split(BATCH)
        return torch.cat([self.heads[t](self.peft(self.bench.pixels(test, r)).logits).cpu() for r in rows])

    def answer(self, test: Part) -> tuple[Tensor, Tensor | None]:
        if self.sequential:
            return self.answer_known(test, 0), None
        logits = [self.logits(test, t) for t in range(len(self.heads))]
        chosen = torch.stack([entropy(part[:, None])[:, 0] for part in logits], dim=1).argmin(dim=1)
        labels = torch.stack([own[part.argmax(1)] for own, part in zip(self.classes, logits, strict=True)], dim=1)
        return labels.gather(1, chosen[:, None])[:, 0], chosen

    def answer_known(self, test: Part, t: int) -> Tensor:
        logits, own = self.logits(test, t), self.classes[t]
        return own[(logits[:, own] if self.sequential else logits).argmax(1)]

    def parameters(self) -> int:
        adapters = sum(p.numel() for name, p in self.peft.named_parameters() if "lora_" in name)
        return adapters + sum(p.numel() for head in self.heads for p in head.parameters())

    def bytes(self) -> int:
        return 4 * self.parameters()

    def close(self) -> None:
        self.bench.model = self.peft.unload()
        self.bench.model.set_submodule(self.head_name, self.base_head)


class SequentialLora(Lora):
    """One adapter and one head for all tasks, trained on one task after another: what forgetting looks like."""

    sequential = True


class LayerAdapter(nn.Module):
    """A bottleneck of 64 with ReLU beside the MLP of a block, added to what the block returns."""

    def __init__(self, width: int, bottleneck: int = 64) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden + self.up(torch.relu(self.down(hidden)))
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def add_layer_adapters(model: nn.Module, bottleneck: int = 64) -> nn.ModuleList:
    """An adapter after every block of a transformer; the rest is frozen."""
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    width = model.config.hidden_size
    model.requires_grad_(False)
    adapters = nn.ModuleList(LayerAdapter(width, bottleneck) for _ in blocks)
    for block, adapter in zip(blocks, adapters, strict=True):
        block.register_forward_hook(adapter)
    return adapters
