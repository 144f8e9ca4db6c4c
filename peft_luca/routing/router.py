"""
Who answers each image. A score router is a pure function from every expert's scores to how uncertain each expert is:
the most certain one answers. A statistics router is a closed-form classifier of the frozen features: it answers
itself, and credits the expert whose class it names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tuner.config import LucaConfig
from .discriminants import Gaussian, Prototype, Ridge, StatisticsRouter


# (scores (batch, experts, C), **options) → (batch, experts): the expert with the lowest number answers the sample.
Router = Callable[..., Tensor]
ROUTING_SCOPES = ("sample", "batch")

# Below this, scores divided by it could overflow.
LEAST_TEMPERATURE = 1e-6
# A class that an expert cannot score gets this much less than its lowest score: finite, so that losses stay finite.
UNKNOWN_MARGIN = 10.0


class RoutingOutput(NamedTuple):
    """
    What routing says about each image.

    Attributes:
        logits (`torch.Tensor` of shape `(batch, C)`):
            The chosen expert's scores of all classes; a statistics router's log-posterior.
        expert (`torch.Tensor` of shape `(batch,)`): Which expert answered, as an index into the experts' order.
        entropy (`torch.Tensor` of shape `(batch,)`): Entropy of the answer over all classes, in nats.
        entropies (`torch.Tensor` of shape `(batch, experts)`, *optional*):
            Every expert's entropy, in nats, infinite where it was not asked (`candidates`); `None` with a statistics
            router, which does not ask the experts.
        confidence (`torch.Tensor` of shape `(batch,)`): Probability of the answered class, between 0 and 1.
        unknown (`torch.Tensor` of shape `(batch,)`): Whether the confidence is below `unknown_below`.
    """

    logits: Tensor
    expert: Tensor
    entropy: Tensor
    entropies: Tensor | None
    confidence: Tensor
    unknown: Tensor


class RouterOptions(NamedTuple):
    """
    The options that every router takes.

    Attributes:
        unknown_below (`float`, *optional*, defaults to `0.0`): Answers of a lower confidence are marked unknown.
        routing_scope (`str`, *optional*, defaults to `"sample"`):
            `"batch"` lets one expert answer a whole batch, as the authors' released evaluation does. What an image
            gets then depends on the others.
        candidates (`int`, *optional*):
            Ask only this many experts for each image, the likeliest by the `prototype` of their statistics. `hybrid`
            asks the likeliest by its own posterior, 8 by default.
    """

    unknown_below: float = 0.0
    routing_scope: str = "sample"
    candidates: int | None = None

    @classmethod
    def split(cls, options: dict[str, Any]) -> tuple[RouterOptions, dict[str, Any]]:
        """The common options, checked, and the router's own."""
        common = cls(**{name: options[name] for name in cls._fields if name in options})
        if not _is_number(common.unknown_below) or not 0 <= common.unknown_below <= 1:
            raise ValueError(f"unknown_below must be between 0 and 1, got {common.unknown_below!r}.")
        if common.routing_scope not in ROUTING_SCOPES:
            raise ValueError(f"routing_scope must be one of {ROUTING_SCOPES}, got {common.routing_scope!r}.")
        if common.candidates is not None and not (type(common.candidates) is int and common.candidates >= 1):
            raise ValueError(f"candidates must be an int of at least 1, got {common.candidates!r}.")
        if common.candidates is not None and common.routing_scope == "batch":
            raise ValueError("routing_scope='batch' asks all experts, so that it does not go with candidates.")
        return common, {name: value for name, value in options.items() if name not in cls._fields}


# ---- score routers -----------------------------------------------------------------------------------------------


def entropy(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """
    Entropy of each expert's softmax over all classes, in nats: the paper's router, here for each sample by itself.

    Args:
        scores (`torch.Tensor` of shape `(batch, experts, C)`): `-inf` where an expert cannot score a class.
        temperature (`float`, *optional*, defaults to `1.0`): Divides the scores.

    Returns:
        `torch.Tensor` of shape `(batch, experts)`: between 0 and log C.
    """
    return torch.special.entr(torch.softmax(_tempered(scores, temperature), dim=-1)).sum(dim=-1)


def max_prob(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """Minus the log-probability of each expert's best class: `(batch, experts, C)` → `(batch, experts)`."""
    return -torch.log_softmax(_tempered(scores, temperature), dim=-1).amax(dim=-1)


def margin(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """
    Minus the distance in probability of each expert's two best classes: `(batch, experts, C)` → `(batch, experts)`.
    Over a single class it is -1.
    """
    top = torch.softmax(_tempered(scores, temperature), dim=-1).topk(min(2, scores.shape[-1]), dim=-1).values
    return -top[..., 0] if top.shape[-1] == 1 else top[..., 1] - top[..., 0]


def energy(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """
    Free energy -τ·log Σ exp(score/τ) of each expert: `(batch, experts, C)` → `(batch, experts)`. It grows with an
    expert's scale σ, unlike the other routers. From https://arxiv.org/abs/2010.03759.
    """
    return torch.logsumexp(_tempered(scores, temperature), dim=-1) * -temperature


def _tempered(scores: Tensor, temperature: float) -> Tensor:
    if not _is_number(temperature) or not LEAST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(
            f"temperature must be a finite number of at least {LEAST_TEMPERATURE:g}, got {temperature!r}."
        )
    return scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature


def _is_number(value: Any) -> bool:
    """Python's own, which a file of a collection can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- routers that take more than scores --------------------------------------------------------------------------


@dataclass(frozen=True)
class Oracle:
    """Whoever asks says which expert each image belongs to: `route(..., expert=...)`."""


ROUTERS: dict[str, Router | StatisticsRouter | Oracle] = {
    "entropy": entropy,
    "max_prob": max_prob,
    "margin": margin,
    "energy": energy,
    "prototype": StatisticsRouter(Prototype),
    "gaussian": StatisticsRouter(Gaussian),
    "ridge": StatisticsRouter(Ridge),
    "hybrid": StatisticsRouter(Gaussian, asks_experts=True),
    "oracle": Oracle(),
}


def get_router(router: str | Router | StatisticsRouter | Oracle) -> Router | StatisticsRouter | Oracle:
    """A router by its name, or the function itself."""
    if not isinstance(router, str):
        if callable(router) or isinstance(router, (StatisticsRouter, Oracle)):
            return router
        raise ValueError(f"a router is a name or a function of scores, got {router!r}.")
    if router not in ROUTERS:
        raise ValueError(
            f"there is no router called {router!r}. Choose one of {', '.join(map(repr, sorted(ROUTERS)))}, or pass a "
            "function of scores (batch, experts, classes) that returns (batch, experts), the lowest for the expert "
            "that should answer."
        )
    return ROUTERS[router]


def router_name(router: Router | StatisticsRouter | Oracle) -> str | None:
    """The name of a router, `None` for a function of one's own."""
    return next((name for name, known in ROUTERS.items() if known == router), None)


def combine_rows(cosines: Tensor, index: LabelSpace, expert: str) -> Tensor:
    """
    One expert's cosines with all rows, (batch, rows) → with all classes, (batch, C): its own row where it has the
    class, otherwise the best over the experts that have it, and -2, below every cosine, where no expert has a row.
    """
    if index.permutation is not None:
        return cosines.index_select(1, index.permutation)
    row_class = index.row_class.expand(cosines.shape[0], -1)
    best = cosines.new_full((cosines.shape[0], len(index.classes)), -2.0)
    best = best.scatter_reduce(1, row_class, cosines, reduce="amax")
    own = cosines.index_select(1, index.own_rows[expert])
    return best.index_copy(1, index.own[expert], own)


def fill_unknown(scores: Tensor, known: Tensor) -> Tensor:
    """Finite scores, (batch, experts, C): what an expert cannot score comes below everything that it can."""
    lowest = scores.masked_fill(~known, torch.inf).amin(dim=-1, keepdim=True)  # (batch, experts, 1)
    return torch.where(known, scores, lowest - UNKNOWN_MARGIN)


class LabelSpace:
    """
    The label space that a layer's experts span, and where each cosine row lands in it.

    Attributes:
        classes (`tuple[str, ...]`): Global label space: the class names in order of first appearance.
        own (`dict[str, Tensor]`): Expert → global ids of its classes, in its own order.
        known (`dict[str, Tensor]`): Expert → boolean (C,): which classes it can score.
        cosine (`list[str]`): Experts with cosine rows, in the order in which their rows are put together.
        row_class (`Tensor`): Global id of each row put together, (rows,).
        complete (`bool`): Whether every expert can score every class.
    """

    def __init__(self, configs: dict[str, LucaConfig], device: torch.device) -> None:
        self.device = device
        ids: dict[str, int] = {}
        for config in configs.values():
            for name in config.classes or ():
                ids.setdefault(name, len(ids))
        self.classes = tuple(ids)
        self.own = {t: torch.tensor([ids[name] for name in config.classes or ()]) for t, config in configs.items()}
        self.cosine = [t for t, config in configs.items() if config.head == "cosine"]
        self.row_class = torch.cat([self.own[t] for t in self.cosine]) if self.cosine else torch.zeros(0).long()
        self.rows = len(self.row_class)
        ends = list(accumulate(len(self.own[t]) for t in self.cosine))
        self.own_rows = {
            t: torch.arange(end - len(self.own[t]), end) for t, end in zip(self.cosine, ends, strict=True)
        }
        # Where every class has exactly one row, putting the rows in the order of the classes is all there is to do.
        one_each = self.rows == len(self.classes) and len(self.row_class.unique()) == self.rows
        self.permutation = self.row_class.argsort() if one_each else None
        has_rows = torch.zeros(len(ids), dtype=torch.bool)
        has_rows[self.row_class] = True
        self.known = {
            t: has_rows if configs[t].head == "cosine" else torch.zeros_like(has_rows).index_fill(0, own, True)
            for t, own in self.own.items()
        }
        self.complete = all(bool(known.all()) for known in self.known.values())
        for name in ("own", "own_rows", "known"):
            setattr(self, name, {t: tensor.to(device) for t, tensor in getattr(self, name).items()})
        self.row_class = self.row_class.to(device)
        self.permutation = None if self.permutation is None else self.permutation.to(device)
