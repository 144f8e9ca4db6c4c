"""Who answers each image: tensors in, tensors out. Knows no model, no file and no trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .label_space import LabelSpace
from .router import Experts, Router, RouterOptions, RoutingOutput
from .score_routers import EnergyRouter, EntropyRouter, FunctionRouter, OracleRouter, ScoreRouter
from .statistics_routers import GaussianRouter, LdaRouter, RidgeRouter, StatisticsRouter


# The routers that a name stands for. A new router is added here.
ROUTERS: dict[str, type[Router]] = {
    "entropy": EntropyRouter,
    "energy": EnergyRouter,
    "lda": LdaRouter,
    "gaussian": GaussianRouter,
    "ridge": RidgeRouter,
    "oracle": OracleRouter,
}
OLD_NAMES = {"prototype": "lda"}
# Routers of earlier versions, and what replaces them.
REMOVED = {"margin": "entropy", "max_prob": "entropy", "hybrid": "gaussian"}


def make_router(router: str | Router | Callable[..., Tensor], **options: Any) -> Router:
    """
    Makes a router.

    Args:
        router (`str`, [`Router`] or function):
            A name of `ROUTERS`, a router, or a function of scores `(batch, experts, C)` that returns costs
            `(batch, experts)`; the expert with the lowest cost answers.
        options: The router's options.

    Raises:
        ValueError: there is no such router, or it does not take the options.
    """
    if isinstance(router, Router):
        if options:
            raise ValueError(f"{router!r} has its options already: pass {', '.join(options)} when you make it.")
        return router
    if not isinstance(router, str):
        if callable(router) and not isinstance(router, type):
            return FunctionRouter(router, **options)
        raise ValueError(f"a router is a name, a Router or a function of scores, got {router!r}.")
    if router in REMOVED:
        raise ValueError(f"the router {router!r} was removed. Use set_router({REMOVED[router]!r}).")
    name = OLD_NAMES.get(router, router)
    if name not in ROUTERS:
        raise ValueError(
            f"there is no router {router!r}. Choose one of {', '.join(map(repr, sorted(ROUTERS)))}, or pass a "
            "function of scores (batch, experts, classes) that returns costs (batch, experts)."
        )
    return ROUTERS[name](**options)


__all__ = [
    "ROUTERS",
    "Experts",
    "LabelSpace",
    "Router",
    "RouterOptions",
    "RoutingOutput",
    "ScoreRouter",
    "StatisticsRouter",
    "make_router",
]
