"""Routers: pure functions from every expert's scores to how uncertain each expert is. The most certain one answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor


if TYPE_CHECKING:
    from .layer import ClassIndex


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
    class, otherwise the best over the experts that have it, and `-inf` where no expert has a row.
    """
    if index.permutation is not None:
        return cosines.index_select(1, index.permutation)
    row_class = index.row_class.expand(cosines.shape[0], -1)
    best = cosines.new_full((cosines.shape[0], len(index.classes)), -torch.inf)
    best = best.scatter_reduce(1, row_class, cosines, reduce="amax")
    own = cosines.index_select(1, index.own_rows[expert])
    return best.index_copy(1, index.own[expert], own)


def fill_unknown(scores: Tensor, known: Tensor) -> Tensor:
    """Finite scores, (batch, experts, C): what an expert cannot score comes below everything that it can."""
    lowest = scores.masked_fill(~known, torch.inf).amin(dim=-1, keepdim=True)  # (batch, experts, 1)
    return torch.where(known, scores, lowest - UNKNOWN_MARGIN)
