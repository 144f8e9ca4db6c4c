"""
What it takes in memory to learn from as many images as ImageNet has: 1.3 million random [CLS] vectors of d = 768.

    python examples/benchmarks/memory.py

They are written as the cache writes them; an expert of 1,000 classes learns from them by ContinualTrainer, over rows
in random order, and takes its class means. Reported is anonymous memory (RssAnon), at its highest, beyond what the
process had with the model loaded; pages of the file itself (RssFile) can be taken back at any time. Writes
results/memory.json.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import datasets
import torch
from environment import write_results
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from peft_luca import ContinualTrainer, ContinualTrainingArguments, LucaConfig, TaskStream
from peft_luca.data.feature_cache import FeatureDataset
from peft_luca.data.feature_file import PartialFeatures


GIB = 2**30


def memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


class Watch(threading.Thread):
    """The highest RssAnon, looked at ten times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self.watching = 0, True

    def run(self) -> None:
        while self.watching:
            self.highest = max(self.highest, memory("RssAnon"))
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=1_300_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "memory.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = ViTForImageClassification(ViTConfig(image_size=32, num_hidden_layers=2, hidden_size=args.width)).eval()
    columns = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=args.classes)})
    one_each = {"image": [Image.new("RGB", (8, 8))] * args.classes, "label": list(range(args.classes))}
    stream = TaskStream.from_tasks([datasets.Dataset.from_dict(one_each, features=columns)])
    with tempfile.TemporaryDirectory() as folder:
        trainer = ContinualTrainer(
            model,
            ContinualTrainingArguments(
                folder, max_steps=args.steps, logging_steps=500, logging_strategy="steps", report_to="none",
                disable_tqdm=True, use_cpu=True,
            ),
            stream,
            LucaConfig(init_rows="random", reference=False),
            ViTImageProcessorPil(size={"height": 32, "width": 32}),
        )  # fmt: skip
        with_model = memory("RssAnon")
        watch = Watch()
        watch.start()
        file = Path(folder) / "features.arrow"
        generator = torch.Generator().manual_seed(0)
        with PartialFeatures.open(file, "float32") as partial:
            for start in range(0, args.images, 8192):
                rows = min(8192, args.images - start)
                partial.append(rows, torch.randn(rows, args.width, generator=generator), [])
            partial.finish()
        labels = torch.arange(args.images) % args.classes
        trainer._features["task_0", "train"] = FeatureDataset.from_file(file, labels)
        started = time.perf_counter()
        output = trainer.train_task(stream[0])
        seconds = time.perf_counter() - started
        watch.watching = False
        watch.join()
        size = file.stat().st_size
    beyond = (watch.highest - with_model) / GIB
    write_results(
        args.output,
        images=args.images,
        steps=output.global_step,
        seconds=round(seconds, 1),
        file_gib=round(size / GIB, 3),
        rss_anon_with_model_gib=round(with_model / GIB, 3),
        rss_anon_beyond_gib=round(beyond, 3),
        limit_gib=4,
    )
    print(f"{beyond:.3f} GiB of anonymous memory beyond the model, for a file of {size / GIB:.2f} GiB")


if __name__ == "__main__":
    main()
