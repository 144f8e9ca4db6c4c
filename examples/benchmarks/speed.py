"""
What learning a stream costs, in passes of the backbone over the data: 10 tasks, 20 epochs, a random ViT-B/16.

    python examples/benchmarks/speed.py

All is measured in one process, in its own time: one pass of the backbone over the train images; all of `train`, after
the reference pictures, which a backbone needs once; an epoch of the released procedure (the backbone runs in every
epoch; no augmentation); and an epoch of LoRA on q and v. These two are not run to their end: one epoch over a part of
the images is timed, and scaled to 20 epochs over all. The released procedure's evaluation after each task is counted
as its code has it: for every module learnt so far, one pass over the test images of the tasks seen. Writes
results/speed.json.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from environment import write_results
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from peft_luca import ContinualTrainer, ContinualTrainingArguments, ImageCollator, LucaConfig, TaskStream


TASKS, EPOCHS, BATCH = 10, 20, 48


def pictures(count: int, classes: int, seed: int) -> datasets.Dataset:
    rng = np.random.default_rng(seed)
    images = [Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)) for _ in range(count)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=classes)})
    return datasets.Dataset.from_dict(
        {"image": images, "label": [i % classes for i in range(count)]}, features=features
    )


def timed(function) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def peak() -> float:
    """Highest resident memory of the process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_images", type=int, default=200)
    parser.add_argument("--test_images", type=int, default=40)
    parser.add_argument("--peer_images", type=int, default=48)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "speed.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    classes = 2 * TASKS
    model = ViTForImageClassification(ViTConfig(image_size=args.size, num_labels=classes)).eval()
    processor = ViTImageProcessorPil(size={"height": args.size, "width": args.size})
    train, test = pictures(args.train_images, classes, 0), pictures(args.test_images, classes, 1)
    collate = ImageCollator(processor, "image")

    def batches(count: int, size: int = BATCH):
        rows = train.rename_column("label", "labels").select(range(count))
        for start in range(0, count, size):
            yield collate([rows[i] for i in range(start, min(start + size, count))])

    @torch.no_grad()
    def one_pass() -> None:
        for batch in batches(args.train_images, 32):
            model(batch["pixel_values"])

    one = timed(one_pass)
    inference_peak = peak()
    per_image = one / args.train_images
    with tempfile.TemporaryDirectory() as folder:
        trainer = ContinualTrainer(
            model,
            ContinualTrainingArguments(
                f"{folder}/out", num_train_epochs=EPOCHS, report_to="none", disable_tqdm=True, use_cpu=True,
                features_cache_dir=f"{folder}/features",
            ),
            TaskStream.from_dataset((train, test), increment=2),
            LucaConfig(),
            processor,
        )  # fmt: skip
        trainer._add_expert(trainer.stream[0], 0)  # once for a backbone: its fingerprint and the reference pictures
        trainer._drop_expert(trainer.stream[0])
        whole = timed(trainer.train)
        training_peak = peak()
        trainer.model = trainer.tuner.unload()
    # Test images pass the backbone too, which is evaluation, not training.
    learning = whole - args.test_images * per_image

    head = torch.nn.Linear(model.config.hidden_size, 2)

    def released() -> None:
        """One epoch: the frozen backbone runs for every batch, and a head is trained on its [CLS]."""
        for batch in batches(args.peer_images):
            with torch.no_grad():
                z = model.vit(batch["pixel_values"]).last_hidden_state[:, 0]
            F.cross_entropy(head(z), batch["labels"] % 2).backward()

    released_epoch = timed(released) / args.peer_images * args.train_images
    # After task t, t modules each pass the test images of t tasks.
    tested = sum(t * t for t in range(1, TASKS + 1)) * args.test_images / TASKS
    released_total = EPOCHS * released_epoch + tested * per_image
    lora = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]))

    def adapted() -> None:
        for batch in batches(args.peer_images):
            F.cross_entropy(lora(batch["pixel_values"]).logits, batch["labels"]).backward()

    lora_epoch = timed(adapted) / args.peer_images * args.train_images
    table = {
        "one pass of the backbone": 1.0,
        "all tasks, 20 epochs, evaluation not counted": learning / one,
        "all tasks, 20 epochs, with evaluation": whole / one,
        "released procedure, 20 epochs (one timed, scaled)": released_total / one,
        "LoRA on q and v, 20 epochs (one timed, scaled)": EPOCHS * lora_epoch / one,
    }
    write_results(
        args.output,
        train_images=args.train_images,
        test_images=args.test_images,
        peer_images=args.peer_images,
        size=args.size,
        seconds_of_one_pass=round(one, 2),
        passes={name: round(value, 3) for name, value in table.items()},
        faster_than_released=round(released_total / whole, 2),
        faster_than_released_without_evaluation=round(EPOCHS * released_epoch / learning, 2),
        faster_than_lora=round(EPOCHS * lora_epoch / learning, 2),
        peak_of_inference=round(training_peak / inference_peak, 3),
    )
    for name, value in table.items():
        print(f"{name:55} {value:8.2f}")
    print(f"peak memory, times that of inference: {training_peak / inference_peak:.3f}")


if __name__ == "__main__":
    main()
