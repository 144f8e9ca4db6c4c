"""
Plots of a run and of its experts: every function returns a matplotlib `Figure`. Plots can be read without colour.
Heat maps and categories go evenly from dark to light, and every category has its own marker or hatch.

Args:
    results (`dict`): [`ContinualTrainer.results`].
    report (`dict`): [`ContinualTrainer.class_report`].
    model ([`~peft.PeftModel`]): A model of LuCA experts, with its router set.
    features (`dict[str, FeatureDataset]`):
        Expert → [CLS] of its task's images: `features` `(images, d)` and `labels` `(images,)`, its own ids 0 … K-1.

[`ContinualTrainer.save_plots`] draws all plots of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from .tuner.layer import find_layer


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAT = "cividis"  # its luminance rises evenly, also for eyes that do not tell red from green
COLORS = ("#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838")  # dark to light
# Of tasks, with a marker each: 84 pairs before one repeats. From Kelly, Color Engineering 3 (1965).
CATEGORIES = "#f3c300 #875692 #f38400 #a1caf1 #be0032 #008856 #e68fac #0067a5 #c2b280 #2b3d26 #882d17 #8db600".split()
MARKERS = "osD^vP*"
HATCHES = ("", "///")
NAMED = 12  # with more tasks, numbers in cells are left out
IMAGES = 2000  # at most so many images, evenly spaced, where each is a point
BELOW: dict[str, Any] = {"loc": "outside lower center", "ncols": 2, "frameon": False}  # a legend

Features: TypeAlias = Mapping[str, Any]  # FeatureDataset by expert; data/ imports nothing from here
Facts: TypeAlias = Mapping[str, Any]


def accuracy_matrix(results: Facts) -> Figure:
    """Accuracy on every task (columns) after every stage (rows), routed, in per cent."""
    matrix = _measured(results.get("accuracy_matrix") or [[]])
    names = ["" if task.get("deleted") else task["name"] for task in results.get("tasks", ())]
    figure, (axes,) = _figure(4.8, 4.0, xlabel="task", ylabel="after", title="Accuracy, routed (%)")
    _heat(axes, 100 * matrix, names, names)
    return figure


def accuracy_over_stream(results: Facts) -> Figure:
    """Accuracy over the classes seen and, if the results have `stage_forgetting`, forgetting after every stage."""
    lines = {"accuracy over all classes seen": _measured(results.get("stage_accuracies") or [])}
    if results.get("stage_forgetting"):
        lines["forgetting"] = np.array(results["stage_forgetting"], dtype=float)
    figure, (axes,) = _figure(5.6, 3.6, xlabel="tasks learned", ylabel="%", title="Accuracy over the stream")
    for i, (label, values) in enumerate(lines.items()):
        style: dict[str, Any] = {"marker": MARKERS[i], "linestyle": ("-", "--")[i], "color": COLORS[(0, 3)[i]]}
        axes.plot(np.arange(1, len(values) + 1), 100 * values, label=label, **style)
    stages, lowest = max(map(len, lines.values())), min(np.nanmin(values, initial=0.0) for values in lines.values())
    axes.set(ylim=(100 * lowest - 2, 102), xticks=range(1, stages + 1, -(-stages // NAMED)))
    axes.grid(axis="y", alpha=0.3)
    figure.legend(**BELOW)
    return figure


@torch.no_grad()
def routing_confusion(model: PeftModel, features: Features) -> Figure:
    """Routing confusion matrix: the share of every task's images (rows) routed to each expert (columns), in %."""
    experts, device, shares = _experts(model, features), find_layer(model)[1].label_space.device, []
    for given in features.values():
        chosen = [model.route_features(z.to(device)).expert.cpu() for z in given.features.split(4096)]
        shares.append(torch.bincount(torch.cat(chosen), minlength=len(experts)).numpy() / len(given.features))
    figure, (axes,) = _figure(5.2, 4.2, xlabel="routed to expert", ylabel="task of the image", title="Routing (%)")
    _heat(axes, 100 * np.array(shares), rows=list(features), columns=experts)
    return figure


def entropy_histograms(model: PeftModel, features: Features) -> Figure:
    """Entropy over all classes, of the right expert and of the others. Routing is easy if they hardly overlap."""
    measured = _measure(model, features)
    own = torch.arange(measured.entropies.shape[1]) == measured.task[:, None]  # (images, experts)
    parts = {"right expert": measured.entropies[own], "other experts": measured.entropies[~own]}
    figure, (axes,) = _figure(5.6, 3.6, xlabel="nats", ylabel="% of images", title="Entropy over all classes")
    edges = list(np.linspace(0, max(1e-6, float(measured.entropies.max())), 31))
    for i, (label, values) in enumerate(parts.items()):
        weights = np.full(len(values), 100 / max(1, len(values)))
        style: dict[str, Any] = {"color": COLORS[(1, 4)[i]], "hatch": HATCHES[i], "alpha": (1.0, 0.7)[i]}
        axes.hist(values.numpy(), edges, weights=weights, label=label, edgecolor="black", linewidth=0.5, **style)
    figure.legend(**BELOW)
    return figure


def tsne(model: PeftModel, features: Features, seed: int = 0) -> Figure:
    """[CLS] of images in the plane, by t-SNE: a colour for every task, and a ring around each misrouted image."""
    check_installed()
    from sklearn.manifold import TSNE

    measured = _measure(model, features)
    perplexity = min(30.0, (len(measured.features) - 1) / 3)
    plane = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(measured.features.float().numpy())
    experts = list(model.experts)
    figure, (axes,) = _figure(6.0, 5.0, xticks=[], yticks=[], title="[CLS] of the test images, by t-SNE")
    for i, name in enumerate(features):
        points = plane[(measured.task == experts.index(name)).numpy()]
        style: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "color": CATEGORIES[i % len(CATEGORIES)]}
        axes.scatter(points[:, 0], points[:, 1], s=28, edgecolors="black", linewidths=0.4, label=name, **style)
    wrong = plane[(measured.expert != measured.task).numpy()]
    axes.scatter(wrong[:, 0], wrong[:, 1], s=90, facecolors="none", edgecolors="black", label="misrouted")
    if len(features) <= 2 * NAMED:
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def class_confusion(report: Facts, limit: int = NAMED) -> Figure:
    """The classes that are confused most: of a class's test images, the share for which another is predicted, in %."""
    pairs = report["confused"][:limit]
    title = "Classes that are confused most" if pairs else "no class is taken for another"
    figure, (axes,) = _figure(6.4, 1.2 + 0.3 * len(pairs), xlabel="% of the class's images", title=title)
    names = [_plain(f"{pair['class']} → {pair['predicted']}") for pair in pairs]
    axes.barh(names, [100 * pair["share"] for pair in pairs], color=COLORS[1])
    axes.invert_yaxis()
    return figure


def of_a_run(results: Facts, model: PeftModel, features: Features, report: Facts) -> Iterator[tuple[str, Figure]]:
    """Yields all plots above, with their names; none if there are no features."""
    if not features:
        return
    yield "accuracy_matrix", accuracy_matrix(results)
    yield "accuracy_over_stream", accuracy_over_stream(results)
    yield "routing_confusion", routing_confusion(model, features)
    yield "entropy_histograms", entropy_histograms(model, features)
    if sum(len(given.labels) for given in features.values()) > 3:
        yield "tsne", tsne(model, features)
    yield "class_confusion", class_confusion(report)


def png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    content = BytesIO()
    figure.savefig(content, dpi=120, format="png")
    return content.getvalue()


def check_installed(*modules: str) -> None:
    """Raises an `ImportError` with the command to run, unless what the plots are drawn with can be imported."""
    try:
        for name in modules or ("matplotlib.figure", "sklearn.manifold"):
            import_module(name)
    except ImportError as error:
        raise ImportError(f"plots need pip install 'peft-luca[plots]': {error}") from error


class _Measured(NamedTuple):
    features: Tensor  # (images, d), on the CPU as all others
    task: Tensor  # (images,), place of the right expert
    expert: Tensor  # (images,), place of the expert to which it was routed
    entropies: Tensor  # (images, experts), in nats


@torch.no_grad()
def _measure(model: PeftModel, features: Features) -> _Measured:
    experts, device, parts = _experts(model, features), find_layer(model)[1].label_space.device, []
    for name, given in features.items():
        step = -(-len(given.labels) // max(1, IMAGES // len(features)))
        for rows in torch.arange(0, len(given.labels), step).split(256):
            z = given.features[rows].to(device)
            scores = model.scores(z).float().cpu()  # (images, experts, C)
            expert = model.route_features(z).expert.cpu()
            task = torch.full_like(rows, experts.index(name))
            entropies = torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1)
            parts.append((z.cpu(), task, expert, entropies))
    return _Measured(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _experts(model: PeftModel, features: Features) -> list[str]:
    """Names of the model's experts, once it is checked that the features are of their images."""
    if not features or not set(features) <= set(model.experts) or not all(len(f.labels) for f in features.values()):
        images = {name: len(given.labels) for name, given in list(features.items())[:5]}
        raise ValueError(f"features must hold images of the model's experts {list(model.experts)[:5]}, got {images}.")
    return list(model.experts)


def _measured(values: Any) -> Any:
    measured = np.array(values, dtype=float)
    if not measured.size or np.isnan(measured).all():
        raise ValueError("there is no accuracy to draw: no task with test images has been learned.")
    return measured


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **of_axes: Any) -> tuple[Figure, list[Axes]]:
    """A figure that is not pyplot's, which would keep it in memory and might open a window."""
    check_installed("matplotlib.figure")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, subplot_kw=of_axes).flat)


def _heat(axes: Axes, values: Any, rows: Sequence[str], columns: Sequence[str]) -> None:
    """A heat map of per cents, with numbers and names where there is room for them."""
    axes.figure.colorbar(axes.imshow(values, vmin=0, vmax=100, cmap=HEAT), ax=axes, shrink=0.8)
    if max(values.shape) <= NAMED:
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                color = "white" if value < 50 else "black"
                axes.text(j, i, f"{value:.0f}", ha="center", va="center", color=color, fontsize=8)
    for names, count, axis in ((rows, values.shape[0], axes.yaxis), (columns, values.shape[1], axes.xaxis)):
        if count <= 3 * NAMED:
            labels, rotation = names or range(1, count + 1), 45 if names and axis is axes.xaxis else 0
            axis.set_ticks(range(count), list(map(str, labels)), fontsize=8, rotation=rotation, ha="right")


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # which would begin a formula
