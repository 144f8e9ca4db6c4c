"""
Pictures of a run and of what its experts do. Each function takes plain results, or a model and [CLS] of images, and
returns a matplotlib `Figure`. None needs colour to be read: heat maps and categories go from dark to light evenly,
and every category has a marker or a hatch of its own as well.

[CLS] is handed over as expert → [`FeatureDataset`] of its task's test images, with labels that are the expert's own
ids, 0 … K-1. [`ContinualTrainer.save_plots`] does that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from .data.feature_cache import FeatureDataset
from .preprocessing import to_rgb
from .routing.score_routers import entropy
from .training.metrics import forgetting, stage_accuracies
from .tuner.layer import LucaLayer, find_layer


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Features: TypeAlias = Mapping[str, FeatureDataset]

HEAT = "cividis"  # its luminance rises evenly, also for eyes that do not tell red from green
# Categories, dark to light, and what tells them apart beside the colour: 42 pairs before one comes back.
COLORS = ("#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838")
MARKERS = "osD^vP*"
HATCHES = ("", "///", "...", "xx", "\\\\\\", "ooo")
NAMED = 12  # tasks, and numbers in cells: beyond this many they are left out
IMAGES = 2000  # at most so many images, evenly spaced, where each is a point
WEAK = 1e-3  # parameters below it count as zero, as on the model card


def accuracy_matrix(results: Mapping[str, Any]) -> Figure:
    """
    Accuracy on every task (columns) after every stage (rows), routed, in per cent.

    Args:
        results (`dict`): What `results.json` holds.

    Raises:
        ValueError: nothing was measured.
    """
    matrix = _matrix(results)
    figure, axes = _figure(1, 4.8, 4.0)
    _heat(axes[0], 100 * matrix, figure, limits=(0, 100))
    axes[0].set(xlabel="task", ylabel="after stage", title="Accuracy, routed (%)")
    return figure


def accuracy_over_stream(results: Mapping[str, Any]) -> Figure:
    """
    Accuracy over the classes seen so far, and forgetting, after every stage.

    Args:
        results (`dict`): What `results.json` holds.

    Raises:
        ValueError: nothing was measured.
    """
    matrix = _matrix(results)
    counts = [task["test_images"] for task in results["tasks"]]
    stages = np.arange(1, len(matrix) + 1)
    lines: dict[str, Any] = {
        "accuracy over all classes seen": stage_accuracies(matrix, counts),
        "forgetting": [forgetting(matrix[:stage, :stage]) for stage in stages],
    }
    figure, axes = _figure(1, 5.6, 3.6)
    for i, (label, values) in enumerate(lines.items()):
        style: dict[str, Any] = {"marker": MARKERS[i], "linestyle": ("-", "--")[i], "color": COLORS[(0, 3)[i]]}
        axes[0].plot(stages, 100 * np.array(values), label=label, **style)
    axes[0].set(xlabel="tasks learnt", ylabel="%", title="Accuracy over the stream")
    axes[0].set_ylim(min(0.0, 100 * min(lines["forgetting"])) - 2, 102)
    axes[0].set_xticks(stages[:: -(-len(stages) // NAMED)])
    axes[0].grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def routing_confusion(model: PeftModel, features: Features) -> Figure:
    """
    Who answered whom: of every task's images (rows) the share that each expert (columns) answered, in per cent.

    Args:
        model ([`~peft.PeftModel`]): The model, with the router that is to be looked at.
        features (`dict[str, FeatureDataset]`): Expert → [CLS] of its task's images.
    """
    layer, names = _layer(model, features)
    experts = list(layer.configs)
    shares = np.zeros((len(names), len(experts)))
    for row, name in zip(shares, names, strict=True):
        chosen = torch.cat([_route(layer, z) for z in features[name].features.split(4096)])
        row[:] = torch.bincount(chosen, minlength=len(experts)).numpy() / max(1, len(chosen))
    figure, axes = _figure(1, 5.2, 4.2)
    _heat(axes[0], 100 * shares, figure, limits=(0, 100), rows=names, columns=experts)
    axes[0].set(xlabel="expert that answered", ylabel="task of the image", title="Who answered whom (%)")
    return figure


def entropy_histograms(model: PeftModel, features: Features) -> Figure:
    """
    Entropy over all classes of the right expert and of the others: the less the two overlap, the easier the choice.

    Args:
        model ([`~peft.PeftModel`]): The model.
        features (`dict[str, FeatureDataset]`): Expert → [CLS] of its task's images.
    """
    said = _ask(model, features)
    right = said.entropies.gather(1, said.task[:, None])[:, 0]
    others = torch.ones_like(said.entropies, dtype=torch.bool).scatter_(1, said.task[:, None], False)
    figure, axes = _figure(1, 5.6, 3.6)
    edges = np.linspace(0, max(1e-6, float(said.entropies.max())), 31)
    for i, (label, values) in enumerate({"right expert": right, "other experts": said.entropies[others]}.items()):
        weights = np.full(len(values), 100 / max(1, len(values)))
        style: dict[str, Any] = {
            "color": COLORS[(1, 4)[i]],
            "hatch": HATCHES[i],
            "edgecolor": "black",
            "alpha": (1.0, 0.7)[i],
        }
        axes[0].hist(values.numpy(), bins=list(edges), weights=weights, label=label, linewidth=0.5, **style)
    axes[0].set(xlabel="entropy over all classes (nats)", ylabel="% of images", title="How certain experts are")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def tsne(model: PeftModel, features: Features, seed: int = 0) -> Figure:
    """
    [CLS] of images in the plane, by t-SNE: a marker for every task, and a ring around each image that another expert
    than its own answered. Needs scikit-learn.

    Args:
        model ([`~peft.PeftModel`]): The model.
        features (`dict[str, FeatureDataset]`): Expert → [CLS] of its task's images; some of them, if very many.
        seed (`int`, *optional*, defaults to `0`): Seed of the picture.
    """
    check_installed()
    from sklearn.manifold import TSNE

    said = _ask(model, features)
    if len(said.features) < 4:
        raise ValueError(f"t-SNE needs at least 4 images, got {len(said.features)}.")
    perplexity = min(30.0, (len(said.features) - 1) / 3)
    plane = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(said.features.float().numpy())
    experts = list(find_layer(model)[1].configs)
    figure, axes = _figure(1, 6.0, 5.0)
    for i, name in enumerate(features):
        points = plane[(said.task == experts.index(name)).numpy()]
        style: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "color": COLORS[i % len(COLORS)]}
        axes[0].scatter(points[:, 0], points[:, 1], s=28, edgecolors="black", linewidths=0.4, label=name, **style)
    wrong = plane[(said.expert != said.task).numpy()]
    axes[0].scatter(wrong[:, 0], wrong[:, 1], s=90, facecolors="none", edgecolors="black", label="answered by another")
    axes[0].set(xticks=[], yticks=[], title="[CLS] of the test images, by t-SNE")
    if len(features) <= 2 * NAMED:
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def misrouted_images(
    model: PeftModel, features: Features, images: Mapping[str, Sequence[Any]], limit: int = 6
) -> Figure:
    """
    Images that another expert than their own answered, with what each expert said: its best class, and its entropy,
    of which the lowest answers with the router `"entropy"`. Wrong answers come first, the surest before the others.

    Args:
        model ([`~peft.PeftModel`]): The model.
        features (`dict[str, FeatureDataset]`): Expert → [CLS] of its task's images.
        images (`dict[str, Sequence[PIL.Image.Image]]`): Expert → the same images.
        limit (`int`, *optional*, defaults to `6`): So many at most.
    """
    said, layer = _ask(model, features), find_layer(model)[1]
    experts, classes = list(layer.configs), layer.label_space.classes
    wrong = (said.expert != said.task).nonzero()[:, 0].tolist()
    names = {row: (layer.configs[experts[said.task[row]]].classes or [])[said.labels[row]] for row in wrong}
    answers = {row: classes[said.best[row, said.expert[row]]] for row in wrong}
    wrong.sort(key=lambda row: (names[row] == answers[row], float(said.entropies[row, said.expert[row]])))
    wrong = wrong[:limit]
    if not wrong:
        figure, axes = _figure(1, 4.8, 1.6)
        axes[0].text(0.5, 0.5, "every image was answered by the expert of its task", ha="center", va="center")
        axes[0].set_axis_off()
        return figure
    figure, axes = _figure(2, 7.6, len(wrong) * (0.6 + 0.2 * min(len(experts), NAMED)), rows=len(wrong))
    for picture, bars, row in zip(axes[::2], axes[1::2], wrong, strict=True):
        own, chosen = int(said.task[row]), int(said.expert[row])
        picture.imshow(to_rgb(images[experts[own]][int(said.row[row])]))
        picture.set_title(f"{names[row]} ({experts[own]}), answered {answers[row]}", fontsize=8)
        picture.set_axis_off()
        entropies = said.entropies[row]
        shown = entropies.topk(min(len(experts), NAMED), largest=False).indices.sort().values.tolist()
        drawn = bars.barh(range(len(shown)), entropies[shown].numpy(), edgecolor="black")
        for bar, t in zip(drawn, shown, strict=True):
            bar.set_facecolor(COLORS[1] if t == chosen else COLORS[4])
            bar.set_hatch(HATCHES[1] if t == own else "")
        labels = [f"{experts[t]}: {classes[int(said.best[row, t])]}" for t in shown]
        bars.set_yticks(range(len(shown)), labels, fontsize=8)
        bars.tick_params(axis="x", labelsize=8)
        bars.invert_yaxis()
    axes[-1].set_xlabel("entropy in nats (dark: answered, hatched: its own task)", fontsize=8)
    figure.suptitle("Answered by another task's expert", fontsize=10)
    return figure


def of_a_run(
    results: Mapping[str, Any], model: PeftModel, features: Features, images: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, Figure]]:
    """
    All of the above that there is something to draw of, one by one, with the name of each.

    Args:
        results (`dict`): What `results.json` holds.
        model ([`~peft.PeftModel`]): The model.
        features (`dict[str, FeatureDataset]`): Expert → [CLS] of its task's test images; may be empty.
        images (`dict[str, Sequence[PIL.Image.Image]]`): Expert → the same images.
    """
    if not features:
        return
    for draw in (accuracy_matrix, accuracy_over_stream):
        yield draw.__name__, draw(results)
    for look in (routing_confusion, entropy_histograms):
        yield look.__name__, look(model, features)
    if sum(map(len, features.values())) > 3:
        yield "tsne", tsne(model, features)
    yield "misrouted_images", misrouted_images(model, features, images)


def check_installed(*modules: str) -> None:
    """
    Refuse to begin without what the pictures are drawn with.

    Raises:
        ImportError: with the command that installs it.
    """
    for name in modules or ("matplotlib.figure", "sklearn.manifold"):
        try:
            import_module(name)
        except ImportError as error:
            raise ImportError(
                f"pictures need {name.split('.')[0]}, and it cannot be imported: {error}. Install what they are drawn "
                "with: pip install 'peft-luca[plots]'."
            ) from error


# ---- what is drawn -------------------------------------------------------------------------------------------------


class _Said(NamedTuple):
    """What a model's experts say about images, all on the CPU."""

    features: Tensor  # (images, d)
    labels: Tensor  # (images,), the task's own ids
    task: Tensor  # (images,), place of the right expert
    row: Tensor  # (images,), in the task's dataset
    expert: Tensor  # (images,), place of the one that answered
    entropies: Tensor  # (images, experts), in nats
    best: Tensor  # (images, experts), global id of each expert's best class


@torch.no_grad()
def _ask(model: PeftModel, features: Features) -> _Said:
    layer, names = _layer(model, features)
    experts, parts = list(layer.configs), []
    each = max(1, IMAGES // len(names))
    for name in names:
        given = features[name]
        rows = torch.arange(0, len(given), max(1, -(-len(given) // each)))
        for piece in rows.split(256):
            z = given.features[piece]
            scores = layer.scores(_there(layer, z))
            task = torch.full_like(piece, experts.index(name))
            said = (_route(layer, z), entropy(scores).float().cpu(), scores.argmax(dim=-1).cpu())
            parts.append((z.cpu(), given.labels[piece], task, piece, *said))
    return _Said(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def _route(layer: LucaLayer, z: Tensor) -> Tensor:
    return layer.route_features(_there(layer, z)).expert.cpu()


def _there(layer: LucaLayer, z: Tensor) -> Tensor:
    return z.to(layer.label_space.device)


def _layer(model: PeftModel, features: Features) -> tuple[LucaLayer, list[str]]:
    """The model's layer, and the names of the experts whose images are given, checked."""
    layer = find_layer(model)[1]
    unknown = [name for name in features if name not in layer.configs]
    if unknown or not features or not all(len(given) for given in features.values()):
        raise ValueError(
            f"features must hold images of the model's experts {list(layer.configs)[:5]}, got "
            f"{ {name: len(given) for name, given in list(features.items())[:5]} }."
        )
    return layer, list(features)


def _matrix(results: Mapping[str, Any]) -> Any:
    matrix = np.array(results.get("accuracy_matrix") or [[]], dtype=float)
    if not matrix.size or np.isnan(matrix).all():
        raise ValueError("there is no accuracy to draw: no task with test images has been learnt.")
    return matrix


# ---- how it is drawn -----------------------------------------------------------------------------------------------


def _figure(columns: int, width: float, height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure that belongs to nobody: not pyplot's, which would keep it and might open a window."""
    check_installed("matplotlib.figure")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def _heat(
    axes: Axes,
    values: Any,
    figure: Figure,
    limits: tuple[float, float],
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    aspect: Any = "equal",
) -> None:
    """A heat map with a scale; with numbers and names where there is room for them."""
    image = axes.imshow(values, vmin=limits[0], vmax=limits[1], cmap=HEAT, aspect=aspect)
    figure.colorbar(image, ax=axes, shrink=0.8)
    if max(values.shape) <= NAMED and limits[1] == 100:
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                color = "white" if value < 50 else "black"
                axes.text(j, i, f"{value:.0f}", ha="center", va="center", color=color, fontsize=8)
    for names, set_ticks, turn in ((rows, axes.set_yticks, 0), (columns, axes.set_xticks, 45)):
        if names is not None:
            shown = names if len(names) <= 3 * NAMED else []
            set_ticks(range(len(shown)), shown, fontsize=8, rotation=turn, ha="right")
    if columns is None and aspect == "equal":
        for axis, count in ((axes.xaxis, values.shape[1]), (axes.yaxis, values.shape[0])):
            if count <= NAMED:
                axis.set_ticks(range(count), [str(i + 1) for i in range(count)])
