"""
What ContinualTrainer costs beside a stock Trainer: the same head, features, optimizer and number of steps.

    python examples/benchmarks/overhead.py

Both train a LuCA expert of d = 768 on [CLS] vectors drawn at random, in batches of 48, in turns: the stock Trainer
over an in-memory TensorDataset and a bare model; ContinualTrainer over its memory-mapped file and a model with the
parameters of a ViT-B/16 (of small pictures, so that the reference takes no time). Timed is all of `train`, and for
ContinualTrainer also all of `train_task`: with class means, saving and evaluation. Times
are the process's own, of one thread, so that what else the machine does counts little. Writes results/overhead.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from environment import write_results
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from peft_luca import ContinualTrainer, ContinualTrainingArguments, LucaConfig, TaskStream
from peft_luca.data.feature_cache import FeatureDataset
from peft_luca.data.feature_file import PartialFeatures
from peft_luca.tuner.layer import LucaLayer


D, BATCH, CLASSES = 768, 48, 10


class BareExpert(nn.Module):
    """The head alone, as a stock Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        config = LucaConfig(classes=[str(i) for i in range(CLASSES)], reference=False, init_rows="random")
        config.resolve()
        self.layer = LucaLayer(nn.Linear(D, 2).requires_grad_(False), D, D)
        self.layer.set_adapter(["expert"])
        self.layer.update_layer("expert", config)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = F.cross_entropy(self.layer.expert_logits(features, "expert"), labels)
        return {"loss": loss + 5e-4 * self.layer.l1_penalty("expert")}


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    features, labels = zip(*rows, strict=True)
    return {"features": torch.stack(features), "labels": torch.stack(labels)}


def common(folder: str, epochs: int) -> dict:
    return {
        "output_dir": folder, "per_device_train_batch_size": BATCH, "num_train_epochs": epochs, "learning_rate": 0.1,
        "optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "cosine", "max_grad_norm": 0.0,
        "logging_strategy": "epoch", "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip


def stock(features: torch.Tensor, labels: torch.Tensor, folder: str, epochs: int) -> float:
    trainer = Trainer(
        BareExpert(),
        TrainingArguments(**common(folder, epochs), remove_unused_columns=False),
        train_dataset=TensorDataset(features, labels),
        data_collator=collate,
    )
    started = time.process_time()
    trainer.train()
    return time.process_time() - started


def ours(model: nn.Module, file: Path, labels: torch.Tensor, folder: str, epochs: int) -> tuple[float, float]:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=CLASSES)})
    images = {"image": [Image.new("RGB", (8, 8))] * CLASSES, "label": list(range(CLASSES))}
    stream = TaskStream.from_tasks([datasets.Dataset.from_dict(images, features=features)])
    trainer = ContinualTrainer(
        model,
        ContinualTrainingArguments(**common(folder, epochs)),
        stream,
        LucaConfig(reference=False, init_rows="random"),
        ViTImageProcessorPil(size={"height": 224, "width": 224}),
    )
    trainer._features["task_0", "train"] = FeatureDataset.from_file(file, labels)
    inner: list[float] = []
    train = Trainer.train

    def timed(*args, **kwargs):
        started = time.process_time()
        output = train(*args, **kwargs)
        inner.append(time.process_time() - started)
        return output

    Trainer.train = timed
    try:
        started = time.process_time()
        trainer.train_task(stream[0])
        whole = time.process_time() - started
    finally:
        Trainer.train = train
    trainer.tuner.unload()
    return inner[0], whole


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=2400)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "overhead.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    labels = torch.arange(args.images) % CLASSES
    features = torch.randn(args.images, D) + torch.randn(CLASSES, D)[labels]
    model = ViTForImageClassification(ViTConfig(image_size=32)).eval()
    times: dict[str, list[float]] = {"stock": [], "continual_train": [], "continual_train_task": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "features.arrow"
        with PartialFeatures.open(file, "float32") as partial:
            partial.append(args.images, features, [])
            partial.finish()
        for i in range(args.rounds):
            times["stock"].append(stock(features, labels, f"{folder}/stock{i}", args.epochs))
            inner, whole = ours(model, file, labels, f"{folder}/ours{i}", args.epochs)
            times["continual_train"].append(inner)
            times["continual_train_task"].append(whole)
    steps = -(-args.images // BATCH) * args.epochs
    ratios = {
        name: statistics.median(b / a for a, b in zip(times["stock"], times[name], strict=True))
        for name in ("continual_train", "continual_train_task")
    }
    rates = {name: round(steps / statistics.median(values), 1) for name, values in times.items()}
    write_results(args.output, steps=steps, steps_per_cpu_second=rates, times_of_stock=ratios, seconds=times)
    print(rates, ratios)


if __name__ == "__main__":
    main()
