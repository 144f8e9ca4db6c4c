"""What the tests share: tiny frozen transformers, experts with random weights, drawn images of classes that can be
learned, and the method's mathematics a second time, in float64. Everything is made here; nothing needs a network."""

import json
import math
import os


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from peft import PeftModel, get_peft_model
from PIL import Image as PilImage
from transformers import (
    Dinov2Config,
    Dinov2ForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from peft_luca import ContinualTrainer, ContinualTrainingArguments, LucaConfig, TaskStream


torch.set_num_threads(1)

D = 32  # width of [CLS]
SIDE = 16
SMALL = {
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
    "hidden_dropout_prob": 0.1,  # must not move [CLS]: the trunk stays in eval mode
}
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 200, 60),
    "blue": (40, 60, 220),
    "yellow": (230, 220, 40),
    "violet": (160, 40, 200),
    "white": (240, 240, 240),
}
NAMES = tuple(COLORS)
ANIMALS, SKIES, TREES = ["cat", "dog", "owl"], ["sun", "moon"], ["oak", "fir", "elm"]


# --- models of two layers on images of 16 × 16, whose [CLS] is 32 wide ---


def make_vit(seed=0, num_labels=5, **changes):
    """A small random ViT with a head of `num_labels` classes."""
    return _make(ViTConfig, ViTForImageClassification, seed, num_labels, {"intermediate_size": 48, **changes})


def make_dinov2(seed=0, num_labels=5, **changes):
    """A small random DINOv2, whose head reads [CLS] and the patches' mean side by side."""
    return _make(Dinov2Config, Dinov2ForImageClassification, seed, num_labels, changes)


def _make(config, model, seed, num_labels, changes):
    torch.manual_seed(seed)
    made = model(config(**{**SMALL, **changes}, id2label={i: f"base {i}" for i in range(num_labels)})).eval()
    with torch.no_grad():  # transformers initializes a trunk so that its [CLS] hardly depends on the image
        for parameter in made.base_model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return made


def pixels(count=6, seed=0):
    """Random pixel values, (count, 3, 16, 16)."""
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def draw(color, rng):
    """A noisy ground with a box of the colour somewhere on it."""
    picture = rng.integers(0, 90, (20, 20, 3))
    top, left = rng.integers(0, 8, 2)
    picture[top : top + 12, left : left + 12] = np.clip(np.array(color) + rng.integers(-25, 25, 3), 0, 255)
    return PilImage.fromarray(picture.astype(np.uint8))


def make_images(names=NAMES, per_class=8, seed=0, **columns):
    """A dataset of `per_class` images of each colour, as `image` and the ClassLabel `label`."""
    rng = np.random.default_rng(seed)
    data = {
        "image": [draw(COLORS[name], rng) for name in names for _ in range(per_class)],
        "label": [i for i in range(len(names)) for _ in range(per_class)],
    }
    features = {"image": Image(), "label": ClassLabel(names=list(names))}
    features |= {column: Value("string") for column in columns}
    return Dataset.from_dict({**data, **columns}, features=Features(features))


def make_splits(names=NAMES, train=8, test=4, seed=0):
    return DatasetDict(train=make_images(names, train, seed), test=make_images(names, test, seed + 1000))


def make_stream(order=NAMES, increment=2, names=NAMES, **kwargs):
    """The colours as tasks of two, in the order of their names here unless told otherwise."""
    return TaskStream.from_dataset(make_splits(names, **kwargs), increment=increment, class_order=list(order))


def make_arguments(folder, **changes):
    settings = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "num_train_epochs": 3, "seed": 7}
    settings |= {"logging_strategy": "steps", "logging_steps": 1, "per_device_train_batch_size": 8}
    return ContinualTrainingArguments(str(folder), **{**settings, **changes})


def make_processor(**changes):
    return ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}, **changes)


def make_trainer(folder, stream=None, model=None, luca_config=None, callbacks=None, processor=None, **changes):
    """A trainer on the tiny ViT. `folder` is the output folder; the other settings are the arguments'."""
    return ContinualTrainer(
        model=make_vit() if model is None else model,
        args=make_arguments(folder, **changes),
        stream=make_stream() if stream is None else stream,
        luca_config=luca_config,
        processing_class=make_processor() if processor is None else processor,
        callbacks=callbacks,
    )


def fill(model, seed=0):
    """Random numbers in every tensor of every expert, as if trained, the references included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if "luca_reference_std" in name:
                tensor.uniform_(0.5, 2.0, generator=generator)
            elif "luca_whitening" in name:
                tensor.normal_(0.0, 0.05, generator=generator)
                tensor.copy_(tensor.half())  # which its file holds
            elif "luca_scale" in name:
                tensor.uniform_(5.0, 15.0, generator=generator)
            elif "luca_" in name:
                tensor.normal_(0.0, 0.5, generator=generator)
    return model


def make_model(experts, base=None, seed=0, **config):
    """A model of experts, {name: classes or LucaConfig}, filled with random numbers."""
    model = make_vit() if base is None else base
    torch.manual_seed(seed)
    for name, classes in experts.items():
        settings = classes if isinstance(classes, LucaConfig) else LucaConfig(classes=classes, **config)
        if hasattr(model, "peft_config"):
            model.add_adapter(name, settings)
        else:
            model = get_peft_model(model, settings, adapter_name=name)
    return fill(model, seed).eval()


# --- still smaller models of one layer, on images of 8 × 8, whose [CLS] is 16 wide ---


def tiny_vit(num_labels=2, seed=0, **changes):
    torch.manual_seed(seed)
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ViTConfig(**settings, image_size=8, patch_size=4, num_labels=num_labels, **changes)
    return ViTForImageClassification(config).eval()


def expert_config(classes=ANIMALS, **changes):
    return LucaConfig(classes=classes, reduction=4, **changes)


def with_experts(model=None, /, **experts):
    """A model with experts as initialized, {name: classes}; the first one is active."""
    model = tiny_vit() if model is None else model
    for name, classes in experts.items():
        if isinstance(model, PeftModel):
            model.add_adapter(name, expert_config(classes))
        else:
            model = get_peft_model(model, expert_config(classes), adapter_name=name)
    return model.eval()


def pictures(count=4, size=8, channels=3, seed=1):
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, images=None, **arguments):
    output = model(pictures() if images is None else images, **arguments)
    return output if isinstance(output, torch.Tensor) else output.logits


def trainable(model):
    """Names of the experts that have a trainable parameter."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name.split("luca_")[1].split(".")[1] for name in names}


# --- what a model holds ---


def weights(module):
    """Every tensor, copied."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def expert_tensors(model, name):
    """Every tensor of one expert, copied."""
    return {
        key: value.clone()
        for key, value in model.state_dict().items()
        if "luca_" in key and name in key.split(".")[-3:]
    }


def trunk_tensors(model):
    """Every tensor that is no expert's, copied, under the names of the plain model."""
    return {
        key.removeprefix("base_model.model.").replace("base_layer.", ""): value.clone()
        for key, value in model.state_dict().items()
        if "luca_" not in key
    }


def assert_same(first, second):
    """Two dicts of tensors are the same, bit for bit."""
    assert list(first) == list(second)
    differing = [key for key in first if not torch.equal(first[key], second[key])]
    assert not differing


def experts_of(trainer):
    """Every tensor of every expert, copied."""
    return {name: expert_tensors(trainer.model, name) for name in trainer.tuner.experts}


def assert_same_experts(first, second):
    """Two results of `experts_of` are the same, bit for bit."""
    assert list(first) == list(second)
    for name in first:
        assert_same(first[name], second[name])


class ForwardCount:
    """Counts the images that pass through a model's trunk, and the passes."""

    def __init__(self, model):
        self.images = self.passes = 0
        trunk = next(module for name, module in model.named_modules() if name.split(".")[-1] in ("vit", "dinov2"))
        self.handle = trunk.register_forward_hook(self)

    def __call__(self, module, args, output):
        self.passes += 1
        self.images += len(output.last_hidden_state)

    def reset(self):
        self.images = self.passes = 0


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def files_in(folder):
    """Every file below a folder, as relative paths."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- the mathematics a second time, in float64 ---


def exact_luca(model, name, z):
    """LuCA(z) of an expert, (batch, d), from METHOD.md and its tensors alone."""
    config = model.peft_config[name]
    tensors = {
        key.split("luca_")[1].replace(f".{name}", ""): value.double()
        for key, value in expert_tensors(model, name).items()
    }
    z = z.double()
    if config.reference:
        z = (z - tensors["reference_mean"]) / tensors["reference_std"]
    if config.whitening:
        z = z - z @ tensors["whitening"] @ tensors["whitening"].T

    def norm(x):
        centred = x - x.mean(dim=1, keepdim=True)
        deviation = (centred.pow(2).mean(dim=1, keepdim=True) + 1e-5).sqrt()
        return centred / deviation * tensors["adapter_norm.weight"] + tensors["adapter_norm.bias"]

    def mlp(x):
        hidden = x @ tensors["adapter_down.weight"].T + tensors["adapter_down.bias"]
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2  # GELU
        return hidden @ tensors["adapter_up.weight"].T + tensors["adapter_up.bias"]

    def adapter(x):
        return norm(x + mlp(x)) if config.norm_position == "after_residual" else x + norm(mlp(x))

    def gate(x):
        hidden = (x @ tensors["calibrator_down.weight"].T).clamp(min=0)
        return 1 / (1 + torch.exp(-(hidden @ tensors["calibrator_up.weight"].T)))

    return {
        "adapter": lambda: adapter(z),
        "calibrator": lambda: z * gate(z),
        "adapter_calibrator": lambda: adapter(z) * gate(adapter(z)),
        "calibrator_adapter": lambda: adapter(z * gate(z)),
        "parallel": lambda: z * gate(z) + norm(mlp(z)),
    }[config.arrangement]()


def exact_rows(model, name):
    """An expert's class rows by class name, each of length 1."""
    rows = model.base_model.layer.luca_class_rows[name].detach().double()
    rows = rows / rows.pow(2).sum(dim=1, keepdim=True).sqrt().clamp(min=1e-12)
    return dict(zip(model.peft_config[name].classes, rows, strict=True))


def exact_scores(model, z):
    """DESIGN.md's scores of all classes under every expert, (batch, experts, C)."""
    rows = {name: exact_rows(model, name) for name in model.peft_config}
    classes = list(dict.fromkeys(label for own in rows.values() for label in own))
    scores = torch.empty(len(z), len(rows), len(classes), dtype=torch.float64)
    for t, (name, own) in enumerate(rows.items()):
        features = exact_luca(model, name, z)
        features = features / features.pow(2).sum(dim=1, keepdim=True).sqrt()
        sigma = model.base_model.layer.luca_scale[name].detach().double()
        sigma = sigma.abs() if model.peft_config[name].positive_scale else sigma
        for c, label in enumerate(classes):
            candidates = [own] if label in own else [other for other in rows.values() if label in other]
            scores[:, t, c] = sigma * torch.stack([features @ of[label] for of in candidates]).amax(dim=0)
    return scores


def exact_own_scores(model, name, z):
    """An expert's scores of its own classes, (batch, K)."""
    classes = list(dict.fromkeys(label for config in model.peft_config.values() for label in config.classes))
    scores = exact_scores(model, z)[:, list(model.peft_config).index(name)]
    return scores[:, [classes.index(label) for label in model.peft_config[name].classes]]


def exact_entropies(scores):
    """Entropy in nats of every expert's softmax over all classes, (batch, experts)."""
    exponentials = (scores - scores.amax(dim=2, keepdim=True)).exp()
    p = exponentials / exponentials.sum(dim=2, keepdim=True)
    return -(p * p.clamp(min=1e-300).log()).sum(dim=2)
