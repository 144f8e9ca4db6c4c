"""What the tests share: two tiny frozen transformers, an image processor, and drawn images of classes that can be
learnt. Everything is made here; nothing comes from the network."""

import json
import math
import os


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from peft import get_peft_model
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
    "intermediate_size": 48,
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


def make_vit(seed=0, num_labels=5, **changes):
    """A tiny random ViT with the head of `num_labels` classes."""
    torch.manual_seed(seed)
    config = ViTConfig(**{**SMALL, **changes}, id2label={i: f"base {i}" for i in range(num_labels)})
    model = ViTForImageClassification(config).eval()
    with torch.no_grad():  # a trunk of transformers' own initialisation hardly looks at its image
        for name, parameter in model.named_parameters():
            if name.startswith("vit.") and parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


def make_dinov2(seed=0, num_labels=5, **changes):
    """A tiny random DINOv2, whose head takes [CLS] and the patches' mean side by side."""
    torch.manual_seed(seed)
    settings = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
    config = Dinov2Config(**{**settings, **changes}, id2label={i: f"base {i}" for i in range(num_labels)})
    model = Dinov2ForImageClassification(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("dinov2.") and parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


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


def make_processor():
    return ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})


def make_trainer(folder, stream=None, model=None, luca_config=None, callbacks=None, **changes):
    """A trainer on the tiny ViT. `folder` is the output folder; the other settings are the arguments'."""
    return ContinualTrainer(
        model=make_vit() if model is None else model,
        args=make_arguments(folder, **changes),
        stream=make_stream() if stream is None else stream,
        luca_config=luca_config,
        processing_class=make_processor(),
        callbacks=callbacks,
    )


def fill(model, seed=0):
    """Random numbers in every tensor of every expert, as if trained, the references included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if "luca_reference_std" in name:
                tensor.uniform_(0.5, 2.0, generator=generator)
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


# ---- the mathematics, written down a second time, in float64 -----------------------------------------------------


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

    if config.arrangement == "adapter":
        return adapter(z)
    if config.arrangement == "calibrator":
        return z * gate(z)
    if config.arrangement == "adapter_calibrator":
        return adapter(z) * gate(adapter(z))
    if config.arrangement == "calibrator_adapter":
        return adapter(z * gate(z))
    return z * gate(z) + norm(mlp(z))


def exact_rows(model, name):
    """An expert's class rows by class name, each of length 1 where the head is cosine."""
    config = model.peft_config[name]
    rows = model.base_model.layer.luca_class_rows[name].detach().double()
    if config.head == "cosine":
        rows = rows / rows.pow(2).sum(dim=1, keepdim=True).sqrt().clamp(min=1e-12)
    return dict(zip(config.classes, rows, strict=True))


def exact_own_scores(model, name, z):
    """An expert's scores of its own classes, (batch, K)."""
    layer, config = model.base_model.layer, model.peft_config[name]
    features, rows = exact_luca(model, name, z), torch.stack(list(exact_rows(model, name).values()))
    if config.head == "linear":
        return features @ rows.T + layer.luca_class_bias[name].detach().double()
    sigma = layer.luca_scale[name].detach().double()
    features = features / features.pow(2).sum(dim=1, keepdim=True).sqrt()
    return (sigma.abs() if config.positive_scale else sigma) * (features @ rows.T)


def exact_scores(model, z):
    """DESIGN.md's scores of all classes under every expert, (batch, experts, C); NaN where there are none."""
    experts = model.peft_config
    classes = list(dict.fromkeys(name for config in experts.values() for name in config.classes))
    scores = torch.full((len(z), len(experts), len(classes)), float("nan"), dtype=torch.float64)
    rows = {name: exact_rows(model, name) for name, config in experts.items() if config.head == "cosine"}
    for t, (name, config) in enumerate(experts.items()):
        own = exact_own_scores(model, name, z)
        for c, class_name in enumerate(classes):
            if class_name in config.classes:
                scores[:, t, c] = own[:, config.classes.index(class_name)]
            elif config.head == "cosine":
                features = exact_luca(model, name, z)
                features = features / features.pow(2).sum(dim=1, keepdim=True).sqrt()
                cosines = [features @ of[class_name] for of in rows.values() if class_name in of]
                if cosines:
                    sigma = model.base_model.layer.luca_scale[name].detach().double()
                    sigma = sigma.abs() if config.positive_scale else sigma
                    scores[:, t, c] = sigma * torch.stack(cosines).amax(dim=0)
    return scores


def exact_entropies(scores):
    """Entropy in nats of every expert's softmax over the classes it can score, (batch, experts)."""
    exponentials = (scores - scores.nan_to_num(-math.inf).amax(dim=2, keepdim=True)).exp().nan_to_num(0.0)
    p = exponentials / exponentials.sum(dim=2, keepdim=True)
    return -(p * p.clamp(min=1e-300).log()).sum(dim=2)
