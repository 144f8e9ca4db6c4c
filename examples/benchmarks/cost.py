"""
What things cost, on backbones of random weights.

    python examples/benchmarks/cost.py routing      # collections of experts: load, route, add, delete
    python examples/benchmarks/cost.py learning     # a stream of ten tasks, in passes of the backbone over its images
    python examples/benchmarks/cost.py parameters   # numbers to learn and one epoch, beside methods that move layers
    python examples/benchmarks/cost.py overhead     # ContinualTrainer beside a stock Trainer, on the same vectors
    python examples/benchmarks/cost.py memory       # learning from as many images as ImageNet has
    python examples/benchmarks/cost.py extraction   # [CLS] by the processes that it is launched with
    python examples/benchmarks/cost.py images       # from JPEG bytes to pixel values, and [CLS] in half precision
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from harness import RESULTS, be_quiet, make_trainer, timed, write_results
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from peft_luca import (
    FeatureDataset,
    ImageCollator,
    LucaConfig,
    TaskStream,
    load_expert,
    load_experts,
)
from peft_luca.data.feature_cache import FeatureExtractor, PartialFeatures
from peft_luca.hub.saving import save_statistics
from peft_luca.hub.validation import expert_digests
from peft_luca.routing.statistics import ClassStatistics
from peft_luca.utils import write_json


BATCH, EPOCHS, TASKS = 48, 20, 10
CPU = torch.device("cpu")
PRECISIONS = "float32", "bfloat16"
SHARE = "share of the backbone's time, median"
OURS, RELEASED = "LuCA, 20 epochs, with evaluation", "released procedure, 20 epochs, with evaluation"
LORA = "LoRA on q and v, 20 epochs"
BOTTLENECK = 64
# Pools, for all tasks together. L2P: 10 prompts of 5 tokens with a key each. CODA-Prompt: 100 components of 8 tokens
# in 5 blocks, each with a key and an attention. (exps/l2p.json, exps/coda_prompt.json of sun-hailong/LAMDA-PILOT.)
L2P = {"prompts": 10, "tokens": 5}
CODA = {"components": 100, "tokens": 8, "blocks": 5}


def vit(**config: Any) -> ViTForImageClassification:
    return ViTForImageClassification(ViTConfig(**config)).eval()


def processor(size: int) -> ViTImageProcessorPil:
    return ViTImageProcessorPil(size={"height": size, "width": size})


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Time of this process, which other work on the machine disturbs little."""
    started = time.process_time()
    function(*arguments)
    return time.process_time() - started


def epoch(net: nn.Module, head: nn.Module, batches: Any, trunk_learns: bool) -> None:
    """Every image forwards, and backwards as far as there is something to learn."""
    for x, y in batches:
        with torch.set_grad_enabled(trunk_learns):
            out = net(x).logits
        F.cross_entropy(head(out), y).backward()


def pictures(count: int, classes: int, seed: int = 0, side: int = 64) -> datasets.Dataset:
    rng = np.random.default_rng(seed)
    images = [Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(count)]
    columns = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=classes)})
    return datasets.Dataset.from_dict({"image": images, "label": [i % classes for i in range(count)]}, columns)


# ---- routing -----------------------------------------------------------------------------------------------------


def make_collection(folder: Path, experts: int, classes_each: int, rank: int) -> None:
    """Files of experts of random weights, with statistics of random images of the rank asked for."""
    model: Any = get_peft_model(vit(), LucaConfig(classes=["a"]), adapter_name="first")
    given, d = get_peft_model_state_dict(model, adapter_name="first"), model.config.hidden_size
    drawn = [key for key in given if key.endswith(("down.weight", "up.weight"))]
    rows = next(key for key in given if key.endswith("class_rows"))
    counts, zeros = torch.full((classes_each,), rank + 1.0, dtype=torch.float64), torch.zeros(classes_each)
    known = {"fingerprint": model.backbone.fingerprint, "backbone_settings": model.backbone.settings}
    listed = []
    for t in range(experts + 1):  # one more, to add and to delete
        classes, place = [f"class {t} {k}" for k in range(classes_each)], folder / f"expert_{t}"
        place.mkdir()
        LucaConfig(classes=classes, whitening=True, inference_mode=True, **known).resolve().save_pretrained(str(place))
        tensors = given | {key: torch.randn_like(given[key]) / d**0.5 for key in drawn}
        save_file(tensors | {rows: torch.randn(classes_each, d)}, place / "adapter_model.safetensors")
        means = F.normalize(torch.randn(classes_each, d, dtype=torch.float64), dim=1)
        factors = tuple(torch.randn(classes_each, rank, d) / (4 * d) ** 0.5)
        remainder = torch.rand(classes_each, d) / d
        statistics = ClassStatistics(tuple(classes), counts, means, factors, remainder, zeros.double())
        save_statistics(statistics, place, expert_digests(place))
        listed.append({"name": place.name, "classes": classes})
    write_json(folder / "experts.json", {"format": 1, "experts": listed[:-1], "router": None})


@torch.no_grad()
def routing(args: Any) -> dict[str, Any]:
    """Collections from a folder: loading, routing beside a pass of the backbone, adding one expert, deleting it."""
    rows: list[dict[str, Any]] = []
    pixels, z = torch.randn(8, 3, 224, 224), torch.randn(args.batch, 768)
    for experts in args.experts:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            make_collection(Path(folder), experts, args.classes_each, args.rank)
            torch.manual_seed(0)
            backbone, before = vit(), resident()  # the same weights again
            loading, model = timed(load_experts, backbone, folder)
            row: dict[str, Any] = {"experts": experts, "classes": experts * args.classes_each}
            row["loaded, seconds"] = round(loading, 2)
            row["routers"] = {router: ask(model, router, pixels, z, args.rounds) for router in args.routers}
            model.set_router("nearest")  # the others are prepared anew for other experts: see "made ready"
            row["one added, seconds"] = round(timed(load_expert, model, f"{folder}/expert_{experts}")[0], 3)
            row["one deleted, seconds"] = round(timed(model.delete_adapter, f"expert_{experts}")[0], 3)
            row["memory beyond the backbone, GiB"] = round((resident() - before) / 2**30, 2)
            row["peak of the process, GiB"] = round(resident("VmHWM") / 2**30, 2)
        rows.append(row)
        print(row, flush=True)
        del model, backbone
    return {"setting": {"width": 768}, "rows": rows}


def ask(model: Any, router: str, pixels: Tensor, z: Tensor, rounds: int) -> dict[str, float]:
    """Routing of a batch in turns with a pass of the backbone, and how long it takes until the first answer."""
    ready, _ = timed(lambda: (model.set_router(router), model.route_features(z[:1])))
    model.pooled_features(pixels)
    times = [(timed(model.route_features, z)[0], timed(model.pooled_features, pixels)[0]) for _ in range(rounds)]
    return {
        SHARE: round(median(route / trunk for route, trunk in times) * len(pixels) / len(z), 5),
        "milliseconds per image": round(1000 * median(route for route, _ in times) / len(z), 3),
        "made ready once, seconds": round(ready, 2),
    }


# ---- learning ----------------------------------------------------------------------------------------------------


def learning(args: Any) -> dict[str, Any]:
    """
    From rows of images on. The peers are not run to their end: one epoch over a part of the images is timed, and
    scaled to 20 epochs over all. The released procedure runs the backbone in every epoch, and evaluates after each
    task as its code has it: for every module, one pass over the test images of the tasks seen.
    """
    device = torch.accelerator.current_accelerator() or CPU
    found = {precision: run(args, device, precision) for precision in args.precisions}
    one = found["float32"]["seconds"]["one pass of the backbone"]
    passes = {
        precision: {name: round(value / one, 3) for name, value in measured["seconds"].items()}
        for precision, measured in found.items()
    }
    ours = passes["float32"][OURS]
    return {
        "seconds_of_one_pass": round(one, 2),
        "passes": passes,
        "peak_memory_gib": found["float32"]["peaks"],  # the second run finds memory that the first one has freed
        "faster_than_released": round(passes["float32"][RELEASED] / ours, 2),
        "faster_than_lora": round(passes["float32"][LORA] / ours, 2),
        "bf16_faster_than_released": round(passes["float32"][RELEASED] / passes[args.precisions[-1]][OURS], 2),
        "bf16_faster_than_lora": round(passes["float32"][LORA] / passes[args.precisions[-1]][OURS], 2),
    }


def run(args: Any, device: torch.device, precision: str) -> dict[str, dict[str, float]]:
    """Seconds and peaks of memory, in GiB, of every method in one precision."""
    size, classes = args.size, 2 * TASKS
    model: Any = vit(image_size=size, num_labels=classes).to(device)
    train, test = pictures(args.train_images, classes), pictures(args.test_images, classes, seed=1)
    collate, rows = ImageCollator(processor(size), "image"), train.rename_column("label", "labels")
    half = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
    times: dict[str, float] = {}
    peaks: dict[str, float] = {}

    def batches(count: int, size: int = BATCH) -> Any:
        for part in torch.arange(count).split(size):
            batch = collate([rows[int(i)] for i in part])
            yield batch["pixel_values"].to(device), batch["labels"].to(device)

    def measure(name: str, function: Callable[[], Any], times_more: float = 1.0) -> None:
        done, seen = threading.Event(), [memory_of(device)]
        threading.Thread(target=watch, args=(seen, done, device), daemon=True).start()
        times[name] = timed(function)[0] * times_more
        done.set()
        peaks[name] = round(max(seen) / 2**30, 2)

    def peer(name: str, net: nn.Module, last: nn.Module, trunk_learns: bool) -> None:
        with half:
            measure(
                name,
                lambda: epoch(net.to(device), last.to(device), batches(args.peer_images), trunk_learns),
                EPOCHS * args.train_images / args.peer_images,
            )

    @torch.no_grad()
    def one_pass() -> None:
        with half:
            for x, _ in batches(args.train_images, 32):
                model(x)

    wrapped = get_peft_model(model, LucaConfig(classes=["a", "b"]))
    measure("reference, once for a backbone", wrapped.compute_reference)
    model = wrapped.unload()
    measure("one pass of the backbone", one_pass)
    stream = TaskStream.from_dataset((train, test), increment=2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            model, processor(size), stream, f"{folder}/out", None, num_train_epochs=EPOCHS,
            use_cpu=device.type == "cpu", bf16=precision == "bfloat16", features_cache_dir=f"{folder}/features",
        )  # fmt: skip
        trainer.given = super(type(trainer), trainer).features  # [CLS] is computed here
        measure(OURS, trainer.train)
        model = trainer.model.unload()
    peer(RELEASED, model, nn.Linear(classes, classes), trunk_learns=False)
    # After task t, t modules look at the test images of t tasks.
    tested = sum(t * t for t in range(1, TASKS + 1)) * args.test_images / TASKS
    times[RELEASED] += tested * times["one pass of the backbone"] / args.train_images
    adapted: Any = vit(image_size=size, num_labels=classes)
    add_layer_adapters(adapted)
    peer(f"adapter of width {BOTTLENECK} in every block, 20 epochs", adapted, nn.Identity(), trunk_learns=True)
    lora = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]))
    peer(LORA, lora, nn.Identity(), trunk_learns=True)
    return {"seconds": times, "peaks": peaks}


# ---- parameters --------------------------------------------------------------------------------------------------


class LayerAdapter(nn.Module):
    """A bottleneck with ReLU beside the MLP of a block, added to what the block returns."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden + self.up(torch.relu(self.down(hidden)))
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def add_layer_adapters(model: Any, bottleneck: int = BOTTLENECK) -> nn.ModuleList:
    """An adapter after every block of a transformer; the rest is frozen."""
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    model.requires_grad_(False)
    adapters = nn.ModuleList(LayerAdapter(model.config.hidden_size, bottleneck) for _ in blocks)
    for block, adapter in zip(blocks, adapters, strict=True):
        block.register_forward_hook(adapter)
    return adapters


def lora_of(model: nn.Module, rank: int) -> Any:
    return get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))


def count_parameters() -> dict[str, int]:
    """Of one task, without the head, which is the same for all: 768 numbers a class."""
    with torch.device("meta"):
        luca = get_peft_model(vit(), LucaConfig(classes=["a", "b"]))
        modules = [p for name, p in luca.named_parameters() if "luca_adapter" in name or "luca_calibrator" in name]
        adapters = list(add_layer_adapters(vit()).parameters())
        loras = {rank: [p for p in lora_of(vit(), rank).parameters() if p.requires_grad] for rank in (8, 16)}
        l2p = [torch.empty(L2P["prompts"], L2P["tokens"], 768), torch.empty(L2P["prompts"], 768)]
        component = [torch.empty(CODA["components"], CODA["tokens"], 768)]
        coda = [*component, *(torch.empty(CODA["components"], 768) for _ in ("key", "attention"))] * CODA["blocks"]
    tensors = {
        "LuCA": modules,
        f"adapter of width {BOTTLENECK} in 12 blocks": adapters,
        **{f"LoRA, rank {rank}, q and v": found for rank, found in loras.items()},
        "prompts of L2P's size, all tasks together": l2p,
        "prompts of CODA-Prompt's size, all tasks together": coda,
    }
    return {name: sum(tensor.numel() for tensor in found) for name, found in tensors.items()}


def parameters(args: Any) -> dict[str, Any]:
    """Numbers to learn, and epochs in passes of the backbone."""
    images, labels = torch.randn(args.images, 3, 224, 224), torch.arange(args.images) % 10
    head, plain, models = nn.Linear(768, 10), vit(), [vit() for _ in range(3)]
    for model in models:
        model.classifier = nn.Identity()
    released, adapter, lora = models
    add_layer_adapters(adapter)
    nets = {
        "released procedure (LuCA, backbone in every epoch)": released,
        "adapter": adapter,
        "LoRA, rank 16": lora_of(lora, 16),
    }

    @torch.no_grad()
    def one_pass() -> None:
        for x in images.split(16):
            plain(x)

    one_pass()
    ratios: dict[str, list[float]] = {name: [] for name in nets}
    for _ in range(args.rounds):  # in turn, so that other work on the machine disturbs all alike
        passed = seconds(one_pass)
        for name, net in nets.items():
            batches = zip(images.split(16), labels.split(16), strict=True)
            ratios[name].append(seconds(epoch, net, head, batches, net is not released) / passed)
    passes = {name: round(median(values), 3) for name, values in ratios.items()}
    counts = count_parameters()
    return {
        "parameters": counts,
        "times_lucas": {name: round(count / counts["LuCA"], 2) for name, count in counts.items()},
        "passes_of_an_epoch": passes,
        "adapter_over_released": round(passes["adapter"] / next(iter(passes.values())), 2),
        "epochs": EPOCHS,
        "passes_of_all_epochs": {name: round(EPOCHS * value, 1) for name, value in passes.items()},
    }


# ---- the loop, and its memory ------------------------------------------------------------------------------------


def features_on_disk(file: Path, labels: Tensor, vectors: Callable[[int, int], Tensor]) -> FeatureDataset:
    """[CLS] vectors, written as the cache writes them and read as it reads them."""
    with PartialFeatures.open(file, "float32") as partial:
        assert partial is not None
        for start in range(0, len(labels), 8192):
            end = min(start + 8192, len(labels))
            partial.append(end - start, vectors(start, end), [])
        partial.finish()
    return FeatureDataset.from_file(file, labels)


class BareExpert(nn.Module):
    """An expert alone, for a stock Trainer: its parameters are those that learn."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.logits, self.penalty = model.expert_logits, model.l1_penalty
        self.learned = nn.ParameterList(p for p in model.parameters() if p.requires_grad)

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(self.logits(features, "default"), labels)
        return {"loss": loss + 5e-4 * self.penalty("default")}


def overhead(args: Any) -> dict[str, Any]:
    """Both train an expert of d = 768 by the same optimizer and steps, in turns, on a ViT of small pictures."""
    classes, times = 10, {"stock": [], "continual_train": [], "continual_train_task": []}
    labels = torch.arange(args.images) % classes
    vectors = torch.randn(args.images, 768) + torch.randn(classes, 768)[labels]
    rows: Any = [{"features": z, "labels": label} for z, label in zip(vectors, labels, strict=True)]
    settings = {
        "per_device_train_batch_size": BATCH, "num_train_epochs": args.epochs, "learning_rate": 0.1, "optim": "sgd",
        "optim_args": "momentum=0.9", "lr_scheduler_type": "cosine", "max_grad_norm": 0.0, "use_cpu": True,
        "logging_strategy": "epoch", "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    config = {"reference": False, "init_rows": "random"}
    stream, train = TaskStream.from_tasks([pictures(classes, classes, side=8)]), Trainer.train

    def timed_train(*given: Any, **more: Any) -> Any:
        started = time.process_time()
        output = train(*given, **more)
        times["continual_train"].append(time.process_time() - started)
        return output

    with tempfile.TemporaryDirectory() as folder:
        features = features_on_disk(Path(folder) / "features.safetensors", labels, lambda i, j: vectors[i:j])
        for i in range(args.rounds):
            model = get_peft_model(vit(image_size=32), LucaConfig(classes=[str(k) for k in range(classes)], **config))
            stock = Trainer(
                BareExpert(model),
                TrainingArguments(f"{folder}/stock{i}", remove_unused_columns=False, **settings),
                train_dataset=rows,
            )
            times["stock"].append(seconds(stock.train))
            ours = make_trainer(
                vit(image_size=32), processor(32), stream, f"{folder}/ours{i}", lambda task, split: features, config,
                **settings,
            )  # fmt: skip
            with patch.object(Trainer, "train", timed_train):
                times["continual_train_task"].append(seconds(ours.train_task, stream[0]))
    steps = -(-args.images // BATCH) * args.epochs
    ours_over_stock = {
        name: median(b / a for a, b in zip(times["stock"], times[name], strict=True))
        for name in ("continual_train", "continual_train_task")
    }
    rates = {name: round(steps / median(values), 1) for name, values in times.items()}
    return {"steps": steps, "steps_per_cpu_second": rates, "times_of_stock": ours_over_stock, "seconds": times}


def resident(kind: str = "RssAnon") -> int:
    """Resident memory of this process, in bytes: anonymous, without pages of files, which can be taken back."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(kind))


def memory_of(device: torch.device) -> int:
    """Memory that this process has in use, in bytes: of the accelerator, where there is one."""
    return resident() if device.type == "cpu" else torch.accelerator.memory_allocated()


def watch(found: list[int], done: threading.Event, device: torch.device = CPU) -> None:
    """Looks at the memory ten times a second."""
    while not done.wait(0.1):
        found.append(memory_of(device))


def memory(args: Any) -> dict[str, Any]:
    """Anonymous memory at its highest, beyond what the process had with the model loaded."""
    labels, generator = torch.arange(args.images) % args.classes, torch.Generator().manual_seed(0)
    stream = TaskStream.from_tasks([pictures(args.classes, args.classes, side=8)])
    model, gib = vit(image_size=32, num_hidden_layers=2, hidden_size=args.width), 2**30
    with tempfile.TemporaryDirectory() as folder:
        file, before, done = Path(folder) / "features.safetensors", resident(), threading.Event()
        seen = [before]
        threading.Thread(target=watch, args=(seen, done), daemon=True).start()
        features = features_on_disk(file, labels, lambda i, j: torch.randn(j - i, args.width, generator=generator))
        trainer = make_trainer(
            model, processor(32), stream, f"{folder}/out", lambda task, split: features,
            {"init_rows": "random", "reference": False}, max_steps=args.steps, use_cpu=True,
        )  # fmt: skip
        started = time.perf_counter()
        output = trainer.train_task(stream[0])
        spent = time.perf_counter() - started
        done.set()
        size = file.stat().st_size
    return {
        "steps": output.global_step,
        "seconds": round(spent, 1),
        "file_gib": round(size / gib, 3),
        "rss_anon_with_model_gib": round(before / gib, 3),
        "rss_anon_beyond_gib": round((max(seen) - before) / gib, 3),
        "limit_gib": 4,
    }


def images(args: Any) -> dict[str, Any]:
    """
    Images per second on one core, from JPEG bytes of 500 x 375 to pixel values of 224 x 224: Pillow's own decoding and
    resizing and one multiplication in NumPy; transformers' image processor; ours. Then a ViT-B/16 on such pixels.
    """
    torch.set_num_threads(1)
    content, processed = io.BytesIO(), processor(224)
    noise = np.random.default_rng(0).integers(0, 256, (47, 63, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC).save(content, "JPEG", quality=90)
    rows = [{"image": {"bytes": content.getvalue(), "path": None}}] * args.batch
    collator, model = ImageCollator(processed, "image"), vit()

    def opened() -> list[Image.Image]:
        return [Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB") for row in rows]

    def by_pillow() -> list[Any]:
        small = [image.resize((224, 224), Image.Resampling.BILINEAR) for image in opened()]
        return [(np.asarray(image, np.float32) * np.float32(1 / 127.5) - 1).transpose(2, 0, 1) for image in small]

    ways = {"Pillow": by_pillow, "transformers": lambda: processed(images=opened(), return_tensors="pt")}
    ways["ours"] = lambda: collator(rows)
    taken = {name: median(seconds(way) for _ in range(args.rounds)) for name, way in ways.items()}
    pixels = collator(rows[:8])["pixel_values"]

    def read(half: bool) -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            model(pixels)

    read(True)
    passes = {name: median(seconds(read, name == "bfloat16") for _ in range(args.rounds)) for name in PRECISIONS}
    return {
        "images per second": {name: round(args.batch / found, 1) for name, found in taken.items()},
        "ours against Pillow": round(taken["Pillow"] / taken["ours"], 3),
        "images per second of ViT-B/16": {name: round(len(pixels) / found, 2) for name, found in passes.items()},
        "bfloat16 against float32": round(passes["bfloat16"] / passes["float32"], 3),
    }


@torch.no_grad()
def extraction(args: Any) -> dict[str, Any]:
    """[CLS] of images by the processes that this was launched with, one thread each, in seconds that pass."""
    PartialState(cpu=not torch.accelerator.is_available())
    torch.set_num_threads(1)
    model: Any = get_peft_model(vit(), LucaConfig(classes=["a", "b"], reference=False))
    extract = FeatureExtractor(model.pooled_features, ImageCollator(processor(224), "image"), 8, disable_tqdm=True)
    with tempfile.TemporaryDirectory() as folder:
        (place,) = broadcast_object_list([folder])  # of the first process, which writes
        dataset = pictures(args.images, 10, side=224).rename_column("label", "labels")
        times = []
        for i in range(args.rounds + 1):
            PartialState().wait_for_everyone()
            started = time.perf_counter()
            extract.writes = PartialState().is_main_process
            extract(dataset, Path(place) / f"{i}.safetensors")
            times.append(time.perf_counter() - started)
        PartialState().wait_for_everyone()
    return {"processes": PartialState().num_processes, "seconds": round(median(times[1:]), 2)}


# Subcommand → what measures, its results file, and its arguments with their defaults.
COMMANDS: dict[str, tuple[Callable[[Any], dict[str, Any]], str, dict[str, Any]]] = {
    "routing": (
        routing,
        "routing_cost_scale.json",
        {"experts": [20, 100, 1000], "routers": ["auto", "nearest", "entropy"], "classes_each": 5, "rank": 64,
         "batch": 64, "rounds": 3},
    ),
    "learning": (
        learning,
        "speed.json",
        {"train_images": 200, "test_images": 40, "peer_images": 48, "size": 224, "precisions": [*PRECISIONS]},
    ),
    "parameters": (parameters, "layerwise.json", {"images": 16, "rounds": 3}),
    "overhead": (overhead, "overhead.json", {"images": 2400, "epochs": 20, "rounds": 5}),
    "memory": (memory, "memory.json", {"images": 1_300_000, "classes": 1000, "width": 768, "steps": 2000}),
    "extraction": (extraction, "extraction_1.json", {"images": 48, "rounds": 3}),
    "images": (images, "images_cost.json", {"batch": 32, "rounds": 7}),
}  # fmt: skip


def parse_arguments(given: list[str]) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, output, defaults) in COMMANDS.items():
        command = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for argument, default in {**defaults, "output": str(RESULTS / output)}.items():
            several = isinstance(default, list)
            kind = type(default[0] if several else default)
            command.add_argument(f"--{argument}", type=kind, nargs="+" if several else None, default=default)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    args = parse_arguments(sys.argv[1:] if given is None else given)
    be_quiet()
    torch.manual_seed(0)
    settings = {name: value for name, value in vars(args).items() if name not in ("command", "output")}
    found = COMMANDS[args.command][0](args)
    if PartialState().is_main_process:
        write_results(args.output, **(settings | found))


if __name__ == "__main__":
    main()
