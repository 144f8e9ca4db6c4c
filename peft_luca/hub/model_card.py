"""The model card of an expert or of a collection, made from the model and from what a run measured."""

from __future__ import annotations

import platform
import re
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .._version import __version__
from ..tuner.model import LucaModel
from ..visualization import accuracy_matrix


CARD_NAME = "README.md"
TEMPLATE = Path(__file__).with_name("model_card_template.md")
PICTURE_NAME = "accuracy_matrix.png"
TAGS = ("luca", "continual-learning", "image-classification", "vision")
MAX_CLASS_TAGS = 1000  # a card of more classes would be mostly tags, and has none
SPARSITY_THRESHOLD = 1e-3
JOINERS = "\u200c\u200d"  # of emoji, and of letters in some scripts
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
CONFIG_SETTINGS = (
    "arrangement norm_position reduction adapter_width calibrator_width reference whitening background white_level"
).split()
PACKAGES = ("peft", "transformers", "torch", "datasets", "huggingface_hub")


@dataclass(frozen=True)
class CardFacts:
    """What a card says that the model does not know. The fields are those of [`push_expert`]."""

    base_model: str | None = None
    license: str | None = None
    datasets: str | Sequence[str] | None = None
    results: Mapping[str, Any] | None = None
    card_data: Mapping[str, Any] | None = None


def make_card(
    tuner: LucaModel, repo_id: str, facts: CardFacts, *, expert: str | None = None, picture: bool = False
) -> str:
    """Makes the text of README.md: of one `expert` or of all, with or without a `picture` of the accuracy matrix."""
    results, more = facts.results or {}, dict(facts.card_data or {})
    datasets = [facts.datasets] if isinstance(facts.datasets, str) else list(facts.datasets or ())
    names = list(tuner.experts) if expert is None else [expert]
    labels = FIGURES if expert is None else EXPERT_FIGURES
    figures = collection_figures(results) if expert is None else expert_figures(results, expert)
    title = more.pop("model_name", None) or repo_id.split("/")[-1]
    class_tags = dict.fromkeys(class_tag(label) for name in names for label in tuner.experts[name])
    evaluations = [
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
    data = ModelCardData(
        library_name="peft",
        base_model=facts.base_model,
        pipeline_tag="image-classification",
        tags=[*TAGS, *more.pop("tags", ()), *(class_tags if len(class_tags) <= MAX_CLASS_TAGS else ())],
        license=facts.license,
        datasets=datasets or None,
        model_name=title if figures else None,
        eval_results=evaluations or None,
        **more,
    )
    config = tuner.peft_config[names[0]]
    settings = {key: value for key, value in results.get("settings", {}).items() if not isinstance(value, dict)}
    settings |= {key: getattr(config, key) for key in CONFIG_SETTINGS}
    versions = {"peft_luca": __version__, "Python": platform.python_version()}
    versions |= {package: version(package) for package in PACKAGES}
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        escape=escape,
        title=title,
        repo_id=repo_id,
        single=expert is not None,
        routed=tuner.router is not None,
        experts=[_expert_row(tuner, name) for name in names],
        threshold=f"{SPARSITY_THRESHOLD:g}",
        fingerprint=config.fingerprint,
        metrics=[(labels[name], value) for name, value in figures.items()],
        tasks=results.get("tasks", []) if expert is None else [],
        picture=PICTURE_NAME if picture else None,
        settings=[(key, value) for key, value in settings.items() if value is not None],
        versions=versions.items(),
    )
    return str(card).rstrip() + "\n"


def class_tag(name: str) -> str:
    """The Hub tag of a class: `class:` and its name in small letters, with '-' for all but letters and digits."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    return "class:" + ("".join(char if char.isalnum() else "-" for char in plain).strip("-") or "-")


def collection_figures(results: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a run that were measured."""
    return {name: float(results[name]) for name in FIGURES if results.get(name) is not None}


def expert_figures(results: Mapping[str, Any], name: str) -> dict[str, float]:
    """Figures of one expert after the last task: `task_known_accuracy`, `accuracy`."""
    names = [task["name"] for task in results.get("tasks", [])]
    if name not in names:
        return {}
    i, last = names.index(name), results["tasks"][-1]
    measured = {"task_known_accuracy": last["task_known"][i], "accuracy": last["accuracy"][i]}
    return {figure: float(value) for figure, value in measured.items() if value is not None}


def draw_accuracy_matrix(results: Mapping[str, Any], path: Path) -> bool:
    """Draws the accuracy matrix of a run. Returns whether there was one, and matplotlib to draw it with."""
    try:
        accuracy_matrix(results).savefig(path, dpi=100, metadata={"Software": None})
        return True
    except ImportError:
        warnings.warn("the model card has no accuracy matrix: matplotlib is not installed.", stacklevel=2)
    except ValueError:  # nothing was measured
        pass
    return False


def escape(text: str) -> str:
    """Makes text that markdown shows as it is, in one line."""
    kinds = {"Cc": " ", "Zl": " ", "Zp": " ", "Cf": ""}  # control and format characters, such as marks of direction
    kept = (c if c in JOINERS else kinds.get(unicodedata.category(c), c) for c in text)
    line = " ".join("".join(kept).split())
    return re.sub(r"([\\`*_{}\[\]<>#|~&!])", r"\\\1", line)


def _expert_row(tuner: LucaModel, name: str) -> dict[str, Any]:
    classes, layer = tuner.experts[name], tuner.layer
    shown = ", ".join(map(escape, classes[:5])) + (", …" if len(classes) > 5 else "")
    weights = torch.cat([weight.detach().flatten() for weight in layer.luca_parameters(name).values()])
    trained = [tensor for key, tensor in layer.tensors(name).items() if not key.startswith(layer.other_param_names)]
    return {
        "name": name,
        "classes": f"{len(classes)}: {shown}",
        "parameters": sum(tensor.numel() for tensor in trained),
        "sparsity": float((weights.abs() < SPARSITY_THRESHOLD).float().mean()),
    }
