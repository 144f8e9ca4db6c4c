"""The model card of an expert or of a collection, made from the model and from what a run measured."""

from __future__ import annotations

import platform
import re
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .._version import __version__
from ..tuner.model import LucaModel
from ..visualization import accuracy_matrix


TEMPLATE = Path(__file__).with_name("model_card_template.md")
PICTURE_NAME = "accuracy_matrix.png"
TAGS = ("luca", "continual-learning", "image-classification", "vision")
# Cards of very many classes would be mostly tags: beyond this many classes none is tagged.
MAX_CLASS_TAGS = 1000
SPARSITY_THRESHOLD = 1e-3
# The figures of results.json, as a reader knows them.
FIGURES = {
    "last_accuracy": "Accuracy after the last task",
    "average_accuracy": "Average incremental accuracy",
    "forgetting": "Forgetting",
    "backward_transfer": "Backward transfer",
    "routing_accuracy": "Right expert chosen",
    "task_known_accuracy": "Accuracy with the task known",
}
EXPERT_FIGURES = {
    "task_known_accuracy": "Accuracy over its own classes",
    "accuracy": "Accuracy over the classes of all experts, routed",
}


def make_card(
    tuner: LucaModel,
    names: Sequence[str],
    repo_id: str,
    *,
    single: bool,
    base_model: str | None = None,
    license: str | None = None,
    datasets: str | Sequence[str] | None = None,
    results: Mapping[str, Any] | None = None,
    picture: bool = False,
) -> str:
    """
    The text of README.md.

    Args:
        tuner ([`LucaModel`]): The experts.
        names (`Sequence[str]`): Those that the card is about.
        repo_id (`str`): Where they go.
        single (`bool`): One expert at the repository's root, not a collection.
        base_model (`str`, *optional*): Hub id of the backbone. Never a path.
        license (`str`, *optional*): Licence of the experts.
        datasets (`str` or `Sequence[str]`, *optional*): Hub ids of what they were trained on.
        results (`dict`, *optional*): What `results.json` holds.
        picture (`bool`, *optional*, defaults to `False`): Whether the accuracy matrix is there as a picture.
    """
    datasets = [datasets] if isinstance(datasets, str) else list(datasets or ())
    classes = list(dict.fromkeys(c for name in names for c in tuner.experts[name]))
    figures = expert_figures(results, names[0]) if single else collection_figures(results)
    labels = EXPERT_FIGURES if single else FIGURES
    title = repo_id.split("/")[-1]
    data = ModelCardData(
        library_name="peft",
        base_model=base_model,
        pipeline_tag="image-classification",
        tags=[*TAGS, *(dict.fromkeys(map(class_tag, classes)) if len(classes) <= MAX_CLASS_TAGS else ())],
        license=license,
        datasets=datasets or None,
        model_name=title if figures else None,
        eval_results=[
            EvalResult(
                task_type="image-classification",
                dataset_type=datasets[0] if datasets else "unknown",
                dataset_name=", ".join(datasets) or "test images of the tasks",
                metric_type="accuracy" if "accuracy" in name else name,
                metric_name=labels[name],
                metric_value=round(value, 4),
            )
            for name, value in figures.items()
        ]
        or None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=escape(title),
        single=single,
        backbone=f"[{base_model}](https://huggingface.co/{base_model})"
        if base_model
        else "a frozen vision transformer",
        snippet=snippet(repo_id, base_model, single, tuner.layer.router is not None),
        experts=[_expert_row(tuner, name) for name in names],
        threshold=f"{SPARSITY_THRESHOLD:g}",
        fingerprint=tuner.peft_config[names[0]].fingerprint,
        metrics=[(labels[name], _percent(value)) for name, value in figures.items()],
        tasks=[] if single else _task_rows(results),
        picture=PICTURE_NAME if picture else None,
        settings=_settings(tuner, names[0], results),
        versions=_versions(),
    )
    return str(card).rstrip() + "\n"


def snippet(repo_id: str, base_model: str | None, single: bool, routed: bool) -> str:
    """Code that loads and asks what is in the repository, and runs as it stands where the backbone is known."""
    load = "load_expert" if single else "load_experts"
    return f"""\
import peft_luca
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

backbone = "{base_model or "path/to/the/backbone"}"
vit = AutoModelForImageClassification.from_pretrained(backbone)
model = peft_luca.{load}(vit, "{repo_id}")
{
        ""
        if single or routed
        else '''model.set_router("entropy")
'''
    }
classify = pipeline("image-classification", model=model, image_processor=AutoImageProcessor.from_pretrained(backbone))
image = Image.new("RGB", (224, 224), "green")  # your image
print(classify(image, top_k=1))"""


def class_tag(name: str) -> str:
    """The Hub tag that a class is found by: `class:` and its name in small letters, with '-' for all but letters and
    digits."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    return "class:" + ("".join(char if char.isalnum() else "-" for char in plain).strip("-") or "-")


def collection_figures(results: Mapping[str, Any] | None) -> dict[str, float]:
    """The figures of a run that were measured."""
    return {name: float(results[name]) for name in FIGURES if results is not None and results.get(name) is not None}


def expert_figures(results: Mapping[str, Any] | None, name: str) -> dict[str, float]:
    """What was measured of one expert after the last task: `task_known_accuracy`, `accuracy`."""
    tasks = list(results.get("tasks", ())) if results is not None else []
    places = [i for i, task in enumerate(tasks) if task["name"] == name]
    if not places:
        return {}
    measured = {
        "task_known_accuracy": tasks[-1]["task_known"][places[0]],
        "accuracy": tasks[-1]["accuracy"][places[0]],
    }
    return {figure: float(value) for figure, value in measured.items() if value is not None}


def draw_accuracy_matrix(results: Mapping[str, Any] | None, path: Path) -> bool:
    """Draw the accuracy matrix of a run. Returns whether there was one, and matplotlib to draw it with."""
    try:
        figure = accuracy_matrix(results or {})
    except ValueError:  # nothing was measured
        return False
    except ImportError:
        warnings.warn(
            "the model card has no picture of the accuracy matrix: matplotlib is not installed.", stacklevel=2
        )
        return False
    figure.savefig(path, dpi=100, metadata={"Software": None})
    return True


def escape(text: str) -> str:
    """Text as markdown shows it, in one line."""
    line = " ".join("".join(" " if unicodedata.category(char) == "Cc" else char for char in text).split())
    return re.sub(r"([\\`*_{}\[\]<>#|~&!])", r"\\\1", line)


def _expert_row(tuner: LucaModel, name: str) -> dict[str, Any]:
    layer, classes = tuner.layer, tuner.experts[name]
    module = [parameter.detach().flatten() for parameter in layer.luca_parameters(name).values()]
    others = [
        getattr(layer, container)[name]
        for container in ("luca_class_rows", "luca_scale")
        if name in getattr(layer, container)
    ]
    weights = torch.cat(module)
    shown = ", ".join(map(escape, classes[:5])) + (", …" if len(classes) > 5 else "")
    return {
        "name": escape(name),
        "count": len(classes),
        "classes": shown,
        "parameters": f"{len(weights) + sum(parameter.numel() for parameter in others):,}",
        "sparsity": _percent(float((weights.abs() < SPARSITY_THRESHOLD).float().mean())),
    }


def _task_rows(results: Mapping[str, Any] | None) -> list[dict[str, str]]:
    tasks = list(results.get("tasks", ())) if results is not None else []
    if not tasks:
        return []
    last = tasks[-1]
    return [
        {
            "name": escape(task["name"]),
            "accuracy": _percent(accuracy),
            "routing": _percent(routing),
            "known": _percent(known),
        }
        for task, accuracy, routing, known in zip(
            tasks, last["accuracy"], last["routing"], last["task_known"], strict=True
        )
    ]


def _settings(tuner: LucaModel, name: str, results: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """How it was trained: the run's settings, and the expert's config."""
    config = tuner.peft_config[name]
    values = dict(results.get("settings", {})) if results is not None else {}
    values.pop("luca_config", None)
    for key in ("arrangement", "norm_position", "reduction", "adapter_width", "calibrator_width", "reference"):
        values[key] = getattr(config, key)
    return [(f"`{key}`", escape(str(value))) for key, value in values.items() if value is not None]


def _versions() -> list[tuple[str, str]]:
    versions = [("peft_luca", __version__), ("Python", platform.python_version())]
    for package in ("peft", "transformers", "torch", "datasets", "huggingface_hub"):
        try:
            versions.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return versions


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
