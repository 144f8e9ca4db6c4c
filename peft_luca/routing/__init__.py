"""Routers choose the expert for each image: tensors in, tensors out. They know no model, no file and no trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..utils import list_names
from .label_space import LabelSpace
from .router import Experts, Router, RouterOptions, RoutingOutput, option
from .score_routers import EnergyRouter, EntropyRouter, FunctionRouter, NearestRouter, OracleRouter, ScoreRouter
from .statistics_routers import AutoRouter, GaussianRouter, LdaRouter, RidgeRouter, StatisticsRouter


# The routers that a name stands for. A new router is added here.
ROUTERS: dict[str, type[Router]] = {
    "auto": AutoRouter,
    "entropy": EntropyRouter,
    "energy": EnergyRouter,
    "nearest": NearestRouter,
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
            A name in `ROUTERS`, a router, or a function of scores `(batch, experts, C)` that returns costs
            `(batch, experts)`: the expert with the lowest cost answers.
        options: The router's options. A wrong one raises a `ValueError`.
    """
    if isinstance(router, Router):
        if options:
            raise ValueError(f"{router!r} has its options already: pass {', '.join(options)} when you make it.")
        return router
    if callable(router) and not isinstance(router, type):
        return FunctionRouter(router, **options)
    if not isinstance(router, str):
        raise ValueError(f"a router is a name, a Router or a function of scores, got {router!r}.")
    if router in REMOVED:
        raise ValueError(f"the router {router!r} was removed. Use set_router({REMOVED[router]!r}).")
    name = OLD_NAMES.get(router, router)
    if name not in ROUTERS:
        names = list_names(sorted(ROUTERS))
        raise ValueError(f"there is no router {router!r}. Choose one of {names}, or pass a function of scores.")
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
    "option",
]
