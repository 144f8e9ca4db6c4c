"""Routers: pure functions from every expert's scores to how uncertain each expert is. The most certain one answers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .config import LucaConfig


# (scores (batch, experts, C), **options) → (batch, experts): the expert with the lowest number answers the sample.
Router = Callable[..., Tensor]

# A class that an expert cannot score gets this much less than its lowest score: finite, so that losses stay finite.
UNKNOWN_MARGIN = 10.0


class RoutingOutput(NamedTuple):
    """
    What routing says about each image.

    Attributes:
        logits (`torch.Tensor` of shape `(batch, C)`): The chosen expert's scores of all classes.
        expert (`torch.Tensor` of shape `(batch,)`): Which expert answered, as an index into the experts' order.
        entropy (`torch.Tensor` of shape `(batch,)`): The chosen expert's entropy, in nats.
        entropies (`torch.Tensor` of shape `(batch, experts)`): Every expert's entropy, in nats.
    """

    logits: Tensor
    expert: Tensor
    entropy: Tensor
    entropies: Tensor


def entropy(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """
    Entropy of each expert's softmax over all classes, in nats: the paper's router, here for each sample by itself.

    Args:
        scores (`torch.Tensor` of shape `(batch, experts, C)`): `-inf` where an expert cannot score a class.
        temperature (`float`, *optional*, defaults to `1.0`): Divides the scores.

    Returns:
        `torch.Tensor` of shape `(batch, experts)`: between 0 and log C.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}.")
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.special.entr(torch.softmax(scores / temperature, dim=-1)).sum(dim=-1)


ROUTERS: dict[str, Router] = {"entropy": entropy}


def get_router(router: str | Router) -> Router:
    """A router by its name, or the function itself."""
    if callable(router):
        return router
    if router not in ROUTERS:
        raise ValueError(
            f"there is no router called {router!r}. Choose one of {', '.join(map(repr, sorted(ROUTERS)))}, or pass a "
            "function of scores (batch, experts, classes) that returns (batch, experts), the lowest for the expert "
            "that should answer."
        )
    return ROUTERS[router]


def combine_rows(cosines: Tensor, index: ClassIndex, expert: str) -> Tensor:
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


class ClassIndex:
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
