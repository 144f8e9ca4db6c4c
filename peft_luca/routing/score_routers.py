"""Routers that run every expert and choose by the experts' scores: entropy (the paper's) and its relatives."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .router import MEMORY_BUDGET, Experts, Router, RouterOptions, RoutingOutput, option


# A class that the oracle's expert does not have scores this much below the lowest of the classes that it has.
OTHER_CLASSES_MARGIN = 10.0
# So many scores stay in the cache of a processor. With more at a time, all that is done with them takes much longer.
CACHE = 2**20


def entropy(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """Scores `(batch, experts, C)` → entropy of each expert's softmax over all classes in nats, `(batch, experts)`."""
    return torch.special.entr(torch.softmax(_float32(scores) / temperature, dim=-1)).sum(dim=-1)


def _float32(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


@dataclass(frozen=True)
class ScoreOptions(RouterOptions):
    """
    Options of a score router, beside those of [`RouterOptions`].

    Args:
        temperature (`float`, *optional*, defaults to `1.0`): Divides the scores, 1e-6 to 1e6.
        routing_scope (`str`, *optional*, defaults to `"sample"`):
            `"batch"` lets one expert answer a whole batch, as the released evaluation does, for comparison only: on a
            test set sorted by class it leaks the task.
    """

    temperature: float = option(1.0, 1e-6, 1e6)
    routing_scope: str = option("sample", choices=("sample", "batch"))


class ScoreRouter(Router):
    """The expert with the lowest cost answers: a number for each image and expert, computed from the scores."""

    Options: ClassVar[type[RouterOptions]] = ScoreOptions

    @abstractmethod
    def cost(self, scores: Tensor) -> Tensor:
        """Scores `(batch, experts, C)` → costs `(batch, experts)`."""

    def route(self, features: Tensor, experts: Experts) -> RoutingOutput:
        scores = experts.scores(features)  # (batch, experts, C)
        costs = self.cost(scores)
        if self.options.routing_scope == "sample":
            chosen = choose(costs, lambda: margins(scores), experts.by_name)
        else:
            mean = scores.mean(dim=0, keepdim=True)
            chosen = choose(costs.mean(dim=0, keepdim=True), lambda: margins(mean), experts.by_name)
            chosen = chosen.expand(features.shape[0])
        return answer(of_expert(scores, chosen), chosen, self.options, self.entropies(scores, costs))

    def entropies(self, scores: Tensor, costs: Tensor) -> Tensor:
        """Entropy of every expert, `(batch, experts)`, from the scores, or from the costs where they are that."""
        return entropy(scores)

    def batch_limit(self, experts: Experts) -> int | None:
        return None if self.options.routing_scope == "batch" else super().batch_limit(experts)


class ExpertwiseRouter(ScoreRouter):
    """The cost of an expert depends on that expert's scores alone, so that a few experts can be asked at a time."""

    def route(self, features: Tensor, experts: Experts) -> RoutingOutput:
        # A graph that is compiled or exported holds for every batch size.
        if torch.compiler.is_compiling() or self.options.routing_scope == "batch":
            return super().route(features, experts)
        size = max(1, CACHE // max(1, len(features) * len(experts.label_space.classes)))
        if size >= len(experts.names):
            return super().route(features, experts)
        costs, entropies = [], []
        for scores in experts.score_parts(features, size):
            costs.append(self.cost(scores))
            entropies.append(self.entropies(scores, costs[-1]))

        def all_margins() -> Tensor:
            return torch.cat([margins(scores) for scores in experts.score_parts(features, size)], dim=1)

        chosen = choose(torch.cat(costs, dim=1), all_margins, experts.by_name)
        logits = experts.mixed_logits(features, [experts.names[i] for i in chosen.tolist()])
        return answer(logits, chosen, self.options, torch.cat(entropies, dim=1))

    def batch_limit(self, experts: Experts) -> int | None:
        return None if self.options.routing_scope == "batch" else max(1, CACHE // experts.label_space.rows)


class EntropyRouter(ExpertwiseRouter):
    """The expert with the lowest entropy answers: the paper's router, for each image by itself."""

    name: ClassVar[str | None] = "entropy"

    def cost(self, scores: Tensor) -> Tensor:
        return entropy(scores, self.options.temperature)

    def entropies(self, scores: Tensor, costs: Tensor) -> Tensor:
        return costs if self.options.temperature == 1 else entropy(scores)


class EnergyRouter(ExpertwiseRouter):
    """
    The expert with the lowest free energy -τ·log Σ exp(score/τ) answers. It grows with the expert's scale σ
    (https://arxiv.org/abs/2010.03759).
    """

    name: ClassVar[str | None] = "energy"

    def cost(self, scores: Tensor) -> Tensor:
        temperature = self.options.temperature
        return torch.logsumexp(_float32(scores) / temperature, dim=-1) * -temperature


class NearestRouter(Router):
    """
    Scores each class by the expert that has it, of several by the one of the highest cosine. The best class answers.
    The logits are the cosines times the mean scale of the experts, since σ of one expert would favor its own classes.
    The cost grows with the number of rows; the other routers of scores ask every expert about every class.
    """

    name: ClassVar[str | None] = "nearest"

    @dataclass(frozen=True)
    class Options(RouterOptions):
        temperature: float = option(1.0, 1e-6, 1e6)

    def route(self, features: Tensor, experts: Experts) -> RoutingOutput:
        names, space = sorted(experts.names), experts.label_space
        scales = torch.stack([experts.scale(name).abs() for name in names])
        found = [experts.expert_logits(features, name) / s for name, s in zip(names, scales, strict=True)]
        cosines = _float32(torch.cat(found, dim=1))  # (batch, rows), by the experts' names
        where = space.part_class.expand(cosines.shape[0], -1)
        highest = cosines.new_full((cosines.shape[0], len(space.classes)), -2.0)  # below every cosine
        highest = highest.scatter_reduce(1, where, cosines, reduce="amax")
        part = torch.where(space.part_class == highest.argmax(dim=1, keepdim=True), cosines, -torch.inf).argmax(dim=1)
        logits = scales.mean().to(highest) * highest
        confidence = torch.softmax(logits / self.options.temperature, dim=-1).amax(dim=-1)
        unknown = ~(confidence >= self.options.unknown_below)
        expert = space.part_expert[part]
        return RoutingOutput(logits, expert, entropy(logits), None, confidence, unknown, known=confidence)

    def batch_limit(self, experts: Experts) -> int | None:
        return max(1, MEMORY_BUDGET // (experts.label_space.rows + len(experts.label_space.classes)))


class FunctionRouter(ScoreRouter):
    """
    A router made of a function of scores `(batch, experts, C)` that returns costs `(batch, experts)`. Options other
    than `unknown_below` and `routing_scope` are passed to the function. A function cannot be saved.
    """

    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        own = {name: options.pop(name) for name in ("unknown_below", "routing_scope") if name in options}
        super().__init__(**own)
        self.function, self.arguments = function, options
        try:
            inspect.signature(function).bind(None, **options)
        except TypeError as error:
            raise ValueError(f"the router {function!r} does not take these options: {error}") from error
        except ValueError:  # a function written in C may have no signature
            pass

    def cost(self, scores: Tensor) -> Tensor:
        costs = self.function(scores, **self.arguments)
        if not isinstance(costs, Tensor) or costs.shape != scores.shape[:2] or costs.dtype == torch.bool:
            found = f"{tuple(costs.shape)} of {costs.dtype}" if isinstance(costs, Tensor) else repr(costs)[:100]
            raise ValueError(
                "a router function must return one number for each image and expert, a tensor of shape "
                f"{tuple(scores.shape[:2])}, got {found}."
            )
        return costs

    def _key(self) -> tuple[Any, ...]:
        return *super()._key(), self.function, repr(self.arguments)

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


class OracleRouter(Router):
    """
    The expert that the caller names answers each image, over its own classes alone: the accuracy with the task known.

    Args:
        expert (`torch.Tensor` of shape `(batch,)`, *optional*): Positions of the experts in the model's order.
    """

    name: ClassVar[str | None] = "oracle"

    def __init__(self, expert: Tensor | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.expert = expert

    def route(self, features: Tensor, experts: Experts) -> RoutingOutput:
        expert, count = self.expert, len(experts.names)
        if expert is None:
            raise ValueError("the oracle router must be told which expert answers each image: route(..., expert=...).")
        whole = not (expert.is_floating_point() or expert.dtype == torch.bool)
        if not whole or expert.shape != features.shape[:1] or bool(((expert < 0) | (expert >= count)).any()):
            raise ValueError(
                f"expert must be a tensor of {len(features)} whole numbers, the position of each image's expert from "
                f"0 to {count - 1}, got {expert!r}."
            )
        scores, space = experts.scores(features), experts.label_space
        own = torch.zeros(count, len(space.classes), dtype=torch.bool, device=scores.device)
        for row, name in zip(own, experts.names, strict=True):
            row[space.own[name]] = True
        lowest = scores.masked_fill(~own, torch.inf).amin(dim=-1, keepdim=True)  # (batch, experts, 1)
        scores_of_own = torch.where(own, scores, lowest - OTHER_CLASSES_MARGIN)
        expert = expert.to(scores.device, torch.int64)
        return answer(of_expert(scores_of_own, expert), expert, self.options, entropy(scores))

    def batch_limit(self, experts: Experts) -> int | None:
        return None


def of_expert(scores: Tensor, chosen: Tensor) -> Tensor:
    """Scores `(batch, experts, C)` and chosen experts `(batch,)` → scores of the chosen, `(batch, C)`."""
    return scores.gather(1, chosen[:, None, None].expand(-1, 1, scores.shape[2]))[:, 0]


def answer(logits: Tensor, chosen: Tensor, options: Any, entropies: Tensor) -> RoutingOutput:
    """Logits `(batch, C)` of the chosen experts `(batch,)`, and entropies `(batch, experts)` → the answer."""
    confidence = torch.softmax(_float32(logits) / getattr(options, "temperature", 1.0), dim=-1).amax(dim=-1)
    unknown = ~(confidence >= options.unknown_below)  # not `<`: a confidence that is NaN is unknown
    own = entropies.gather(1, chosen[:, None])[:, 0]
    return RoutingOutput(logits, chosen, own, entropies, confidence, unknown, known=confidence)


def margins(scores: Tensor) -> Tensor:
    """How far the two best classes are apart, `(batch, experts, C)` → `(batch, experts)`."""
    best = scores.topk(min(2, scores.shape[2]), dim=2).values
    return best[..., 0] - best[..., 1] if scores.shape[2] > 1 else best[..., 0]


def choose(costs: Tensor, margins: Callable[[], Tensor], by_name: Tensor) -> Tensor:
    """
    Costs (batch, experts) and margins, alike → the expert with the lowest cost (batch,). Of equal costs, the expert
    of the largest margin; of those, the first by name, never by the order of loading.
    """
    ordered = costs.index_select(1, by_name)
    tied = ordered == ordered.amin(dim=1, keepdim=True)
    # The margins of all experts cost about as much as their entropies. A compiled graph cannot look at the values.
    if not torch.compiler.is_compiling() and not bool((tied.sum(dim=1) > 1).any()):
        return by_name[ordered.argmin(dim=1)]
    return by_name[margins().index_select(1, by_name).masked_fill(~tied, -torch.inf).argmax(dim=1)]
