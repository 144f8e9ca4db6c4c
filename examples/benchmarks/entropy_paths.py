"""
Ways to better entropy routing, one change at a time from the own recipe, over several class orders.

    python examples/benchmarks/entropy_paths.py --model ../shared/models/dinov2-small --dataset ../shared/data/emoji \\
        --increment 4 --init_classes 6 --output examples/benchmarks/results/entropy_paths_emoji.json

Every figure is the last accuracy of per-image routing. Some variants need other experts' statistics when an expert is
trained, and so break the independence of order; their names say whose: of earlier experts, or of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from routing import BenchmarkArguments, Features, FeatureTrainer, ask, compare, learn
from torch import Tensor
from transformers import HfArgumentParser

from peft_luca.routing.discriminants import Gaussian
from peft_luca.routing.router import entropy
from peft_luca.routing.statistics import ClassStatistics
from peft_luca.tuner import backbone
from peft_luca.tuner.backbone import draw_reference_pictures


# Of the closed form that LuCA corrects, or is mixed with, over the root of the width.
CLOSED_TEMPERATURE = 0.5


# ---- outlier exposure, and LuCA as a correction --------------------------------------------------------------------


class Exposed(FeatureTrainer):
    """
    An expert also sees pseudo-features of classes that it does not have: Gaussians of their means and scatter, as many
    as there are images in the batch. It is to be undecided on them, or to say that they are none of its classes.
    """

    everyone: bool = False  # those of all other experts, which a stream does not have yet, or of the earlier ones
    none_class: bool = False  # one more class of score 0, in place of an even spread over the expert's own classes
    weight: float = 0.5

    def strangers(self, count: int) -> Tensor | None:
        """Pseudo-features of other experts' classes as they would leave the backbone, (count, d)."""
        layer, name = self.tuner.layer, self._task.name
        parts = everyone_elses(self, name) if self.everyone else [p for t, p in layer.statistics.items() if t != name]
        if not parts:
            return None
        classes = [(part, k) for part in parts for k in range(len(part.classes))]
        drawn = []
        for i in torch.randint(len(classes), (count,)).tolist():
            part, k = classes[i]
            factor, freedom = part.factors[k], max(float(part.counts[k]) - 1, 1.0)
            spread = torch.randn(len(factor)) @ factor + torch.randn(layer.width) * part.remainder[k].sqrt()
            drawn.append(F.normalize(part.means[k].float() + spread / freedom**0.5, dim=0))
        mean, std = layer.luca_reference_mean[name], layer.luca_reference_std[name]
        standardised = (self.features(self._task, "train").features - mean) / std
        lengths = standardised.norm(dim=1)[torch.randint(len(standardised), (count,))]
        return torch.stack(drawn) * lengths[:, None] * std + mean

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        z, labels, layer = inputs["features"], inputs["labels"], self.tuner.layer
        loss = super().compute_loss(model, dict(inputs), return_outputs, num_items_in_batch)
        strangers = self.strangers(len(z))
        if strangers is None:
            return loss
        away = layer.expert_logits(strangers, self._task.name)
        if not self.none_class:
            return loss + self.weight * -away.log_softmax(1).mean()
        own = layer.expert_logits(z, self._task.name)
        scores = torch.cat([own, away]) @ torch.eye(own.shape[1], own.shape[1] + 1)
        targets = torch.cat([labels, torch.full((len(away),), own.shape[1])])
        return loss - F.cross_entropy(own, labels) + 2 * F.cross_entropy(scores, targets)


def everyone_elses(trainer: FeatureTrainer, name: str) -> list[ClassStatistics]:
    """Statistics of every other task of the stream, learnt or not."""
    known = trainer.__dict__.setdefault("all_statistics", {})
    layer = trainer.tuner.layer
    for task in trainer.stream:
        if task.name not in known:
            train = trainer.known.of(task.classes, "train", task.classes)
            x = layer.unit_features(train.features.double(), name)
            known[task.name] = ClassStatistics.collect(x, train.labels, task.classes)
    return [part for other, part in known.items() if other != name]


class Correction(FeatureTrainer):
    """LuCA learns what is to be added to the closed-form log-posterior of the expert's own classes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        z, labels, name = inputs["features"], inputs["labels"], self._task.name
        if getattr(self, "closed", (None,))[0] != name:
            train = self.features(self._task, "train")
            own = self._ids(train.labels, self._task.classes)
            x = self.tuner.layer.unit_features(train.features.double(), name)
            self.closed = (
                name,
                Gaussian(
                    ClassStatistics.collect(x, own, self._task.classes),
                    temperature=CLOSED_TEMPERATURE * x.shape[1] ** 0.5,
                ),
            )
        prior = self.closed[1].log_posterior(self.tuner.layer.unit_features(z, name))
        scores = self.tuner.layer.expert_logits(z, name)
        loss = super().compute_loss(model, dict(inputs), return_outputs, num_items_in_batch)
        return loss - F.cross_entropy(scores, labels) + F.cross_entropy(scores + prior, labels)


# ---- reference pictures --------------------------------------------------------------------------------------------


def noise(count: int, size: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (count, size, size, 3)).astype(np.uint8)


def blurred_noise(count: int, size: int) -> np.ndarray:
    """Colours of an 8×8 grid, interpolated."""
    coarse = torch.from_numpy(np.random.RandomState(0).rand(count, 3, 8, 8))
    fine = F.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)
    return (255 * fine).round().byte().permute(0, 2, 3, 1).numpy()


class OtherReference(FeatureTrainer):
    """Standardised by other pictures than the package's, or by the images of the first task or of the own one."""

    pictures: Callable[[int, int], np.ndarray] | str = "first task"
    count: int = 192

    def _add_expert(self, task, seed):
        super()._add_expert(task, seed)
        layer = self.tuner.layer
        if isinstance(self.pictures, str):
            z = self.features(task if self.pictures == "own task" else self.stream[0], "train").features
            mean, std = z.mean(0), z.std(0).clamp(min=1e-6)
        else:
            mean, std = self._measured()
        layer.luca_reference_mean[task.name], layer.luca_reference_std[task.name] = mean, std

    def _measured(self) -> tuple[Tensor, Tensor]:
        """As the package measures its own pictures."""
        if "measured" not in self.__dict__:
            facts = self.tuner.backbone
            usual, facts._reference = facts._reference, None
            with patch.object(backbone, "draw_reference_pictures", lambda _, size: self.pictures(self.count, size)):
                self.measured = facts.reference(self.tuner.pooled_features)
            facts._reference = usual
        return self.measured


# ---- the variants --------------------------------------------------------------------------------------------------


def made(base: type, **attributes: Any) -> type:
    return type(base.__name__, (base,), attributes)


def drawn(pictures: Callable[[int, int], np.ndarray], count: int) -> type:
    return made(OtherReference, pictures=staticmethod(pictures), count=count)


# Name → trainer, fields of LucaConfig, fields of ContinualTrainingArguments.
VARIANTS: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "the recipe": (FeatureTrainer, {}, {}),
    **{f"{epochs} epochs": (FeatureTrainer, {}, {"num_train_epochs": epochs}) for epochs in (60, 100)},
    **{f"σ from {scale}": (FeatureTrainer, {"scale": float(scale)}, {}) for scale in (5, 10, 40)},
    "negatives: all seen rows": (FeatureTrainer, {}, {"negatives": "seen"}),
    "strangers even, earlier experts": (Exposed, {}, {}),
    "strangers even, all experts": (made(Exposed, everyone=True), {}, {}),
    "strangers even, all experts, weight 2": (made(Exposed, everyone=True, weight=2.0), {}, {}),
    "strangers none of mine, earlier experts": (made(Exposed, none_class=True), {}, {}),
    "strangers none of mine, all experts": (made(Exposed, none_class=True, everyone=True), {}, {}),
    "linear heads": (FeatureTrainer, {"head": "linear"}, {}),
    "linear heads, strangers none of mine, all experts": (
        made(Exposed, none_class=True, everyone=True),
        {"head": "linear"},
        {},
    ),
    "correction of the closed form": (Correction, {}, {}),
    "reference: nothing": (FeatureTrainer, {"reference": False}, {}),
    **{f"reference: {count} drawings": (drawn(draw_reference_pictures, count), {}, {}) for count in (24, 96, 768)},
    "reference: 192 of noise": (drawn(noise, 192), {}, {}),
    "reference: 192 of blurred noise": (drawn(blurred_noise, 192), {}, {}),
    "reference: the first task": (made(OtherReference, pictures="first task"), {}, {}),
    "reference: the own task": (made(OtherReference, pictures="own task"), {}, {}),
}


@dataclass
class PathArguments(BenchmarkArguments):
    """What to measure."""

    output: str = field(default="entropy_paths.json", metadata={"help": "Where the figures go."})
    class_order_seeds: list[int] = field(default_factory=lambda: [1993, 0, 1], metadata={"help": "Class orders."})
    variants: list[str] = field(default_factory=lambda: list(VARIANTS), metadata={"help": "Which of them."})


@torch.no_grad()
def measure(trainer: FeatureTrainer, features: Features, variant: str) -> dict[str, float]:
    """Accuracy of entropy routing, and of what the variant asks for beside it."""
    layer, names = trainer.tuner.layer, list(trainer.tuner.experts)
    classes = list(trainer.tuner.classes)
    test = features.of(classes, "test", classes)
    z, labels = test.features, test.labels
    owner = torch.tensor([t for t, own in enumerate(trainer.tuner.experts.values()) for _ in own])[labels]

    def right(answers: Tensor) -> float:
        return float((answers == labels).float().mean())

    dense = ask(layer, "entropy", z)
    own = torch.stack([own_log_posterior(layer, z, name, classes) for name in names], dim=1)  # (images, experts, C)
    own_entropy = torch.special.entr(own.exp()).sum(2)
    known = own[torch.arange(len(z)), owner].argmax(1)
    figures = {
        "entropy": right(dense.logits.argmax(1)),
        "entropy_of_own_classes": right(own[torch.arange(len(z)), own_entropy.argmin(1)].argmax(1)),
        "routing_accuracy": float((dense.expert == owner).float().mean()),
        "task_known_accuracy": right(known),
    }
    if "none of mine" in variant:
        none = torch.stack([F.pad(layer.expert_logits(z, t), (0, 1)).log_softmax(1)[:, -1] for t in names], dim=1)
        figures["lowest probability of none"] = right(own[torch.arange(len(z)), none.argmin(1)].argmax(1))
    closed = {"temperature": CLOSED_TEMPERATURE * layer.width**0.5}
    if variant == "correction of the closed form":
        figures["hybrid"] = right(ask(layer, "hybrid", z, **closed).logits.argmax(1))
        alone = ask(layer, "hybrid", z, expert_weight=1.0, **closed)
        figures["hybrid, the expert alone for its classes"] = right(alone.logits.argmax(1))
    if variant == "the recipe":
        figures |= {
            f"temperature {t:g}": right(ask(layer, "entropy", z, temperature=t).logits.argmax(1))
            for t in (0.25, 0.5, 2.0, 4.0)
        }
        for of, temperatures in temperatures_of_experts(trainer).items():
            scores = layer.scores(z)[0] / temperatures[:, None]
            chosen = entropy(scores).argmin(1)
            figures[f"a temperature per expert, {of}"] = right(scores[torch.arange(len(z)), chosen].argmax(1))
        prior = ask(layer, "gaussian", z, **closed).logits[:, None]
        for weight in (0.25, 1.0):
            sums = prior + weight * layer.scores(z)[0].log_softmax(2)
            chosen = entropy(sums).argmin(1)
            answers = sums[torch.arange(len(z)), chosen].argmax(1)
            figures[f"entropy of the closed form and {weight:g} of the scores"] = right(answers)
        for router in ("entropy", "max_prob"):
            full = ask(layer, router, z)
            for count in (2, 4, 8):
                few = ask(layer, router, z, candidates=count)
                figures[f"{router}, {count} candidates"] = right(few.logits.argmax(1))
                figures[f"{router}, {count} candidates, same expert as dense"] = float(
                    (few.expert == full.expert).float().mean()
                )
        for router in ("gaussian", "hybrid"):
            figures[router] = right(ask(layer, router, z, **closed).logits.argmax(1))
    layer.set_router(None, {})
    return figures


def own_log_posterior(layer, z: Tensor, name: str, classes: list[str]) -> Tensor:
    """An expert's log-posterior of its own classes, among all of them, (images, C)."""
    found = torch.full((len(z), len(classes)), -torch.inf)
    return found.index_copy(1, layer.label_space.own[name], layer.expert_logits(z, name).log_softmax(1))


def temperatures_of_experts(trainer: FeatureTrainer) -> dict[str, Tensor]:
    """
    Temperatures that bring the experts' mean entropy over all classes to one height, that of the median expert: on
    their own training images, or on the features of all experts' classes, which pseudo-features stand for.
    """
    layer, names = trainer.tuner.layer, list(trainer.tuner.experts)
    own = {t: trainer.known.of(classes, "train", classes).features for t, classes in trainer.tuner.experts.items()}
    everyone = torch.cat(list(own.values()))
    found = {}
    for of in ("own images", "all images"):
        scores = {t: layer.scores(own[t] if of == "own images" else everyone, [t])[0] for t in names}
        target = torch.tensor([float(entropy(s).mean()) for s in scores.values()]).median()
        temperatures = []
        for part in scores.values():
            low, high = 0.01, 100.0
            for _ in range(40):  # entropy grows with the temperature
                middle = (low * high) ** 0.5
                low, high = (middle, high) if entropy(part / middle).mean() < target else (low, middle)
            temperatures.append(middle)
        found[of] = torch.tensor(temperatures)
    return found


def learn_and_measure(
    variant: str, args: PathArguments, processor, features: Features, model, seed: int
) -> dict[str, float]:
    kind, config, settings = VARIANTS[variant]
    trainer = learn(args, processor, features, model, seed, kind, config, **settings)
    figures = measure(trainer, features, variant)
    trainer.tuner.unload()
    return figures


def main() -> None:
    (args,) = HfArgumentParser(PathArguments).parse_args_into_dataclasses()
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        raise SystemExit(f"there is no variant {unknown[0]!r}. There are: {', '.join(VARIANTS)}.")
    compare(args, args.variants, learn_and_measure)


if __name__ == "__main__":
    main()
