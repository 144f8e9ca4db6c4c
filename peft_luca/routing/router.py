"""The base class of routers, what a router returns, and how its options are checked."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from .label_space import LabelSpace
from .statistics import ClassStatistics


# A router may hold this many numbers in memory at a time.
MEMORY_BUDGET = 2**25


class RoutingOutput(NamedTuple):
    """
    The answer of a router for each image.

    Attributes:
        logits (`torch.Tensor` of shape `(batch, C)`):
            The chosen expert's scores of all classes; the log-posterior of a statistics router.
        expert (`torch.Tensor` of shape `(batch,)`): The chosen expert, as an index into the experts' order.
        entropy (`torch.Tensor` of shape `(batch,)`): Entropy of the answer over all classes, in nats.
        entropies (`torch.Tensor` of shape `(batch, experts)`, *optional*):
            The entropy of every expert, in nats. `None` for a statistics router, which does not run the experts.
        confidence (`torch.Tensor` of shape `(batch,)`):
            Probability of the predicted class, given that the image is of any of the classes. Between 0 and 1.
        unknown (`torch.Tensor` of shape `(batch,)`): Whether `known` is below `unknown_below`.
        known (`torch.Tensor` of shape `(batch,)`, *optional*):
            How familiar the image is, from 0 to 1: the share of training images, each left out, that lie at least as
            far from their class. Routers of scores have no other measure of it than the confidence.
    """

    logits: Tensor
    expert: Tensor
    entropy: Tensor
    entropies: Tensor | None
    confidence: Tensor
    unknown: Tensor
    known: Tensor | None = None

    @classmethod
    def concatenate(cls, parts: Sequence[RoutingOutput]) -> RoutingOutput:
        """Joins the outputs of the parts of a batch."""
        columns = zip(*parts, strict=True)
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]


class Experts(Protocol):
    """One set of experts, as a router sees them. A model whose experts change makes a new object."""

    names: list[str]
    by_name: Tensor  # (experts,), positions of the experts in the order of their names
    label_space: LabelSpace
    statistics: Mapping[str, ClassStatistics]  # of the experts that have them

    def scores(self, features: Tensor) -> Tensor:
        """[CLS] `(batch, d)` → scores of all classes under every expert, `(batch, experts, C)`."""

    def score_parts(self, features: Tensor, size: int) -> Iterator[Tensor]:
        """The same of `size` experts at a time, `(batch, size, C)`."""

    def mixed_logits(self, features: Tensor, names: list[str]) -> Tensor:
        """[CLS] `(batch, d)` and an expert for each image → its scores of all classes, `(batch, C)`."""

    def expert_logits(self, features: Tensor, name: str) -> Tensor:
        """[CLS] `(batch, d)` → one expert's logits of its own classes, `(batch, K)`: its scale times cosines."""

    def scale(self, name: str) -> Tensor:
        """σ of an expert, a scalar."""

    def unit_features(self, features: Tensor) -> Tensor:
        """[CLS] `(batch, d)` → standardized features of length 1, `(batch, d)`, as in the statistics."""

    def reference(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Mean and deviation, `(d,)` each, that an expert standardizes [CLS] by. `None` if it does not."""

    def prepared(self, router: Router) -> Any:
        """The result of `router.prepare(self)`, computed once."""


def option(default: Any, low: float | None = None, high: float = math.inf, choices: Sequence[Any] = ()) -> Any:
    """A field of [`RouterOptions`]: a number from `low` to `high`, or one of `choices`."""
    return field(default=default, metadata={"low": low, "high": high, "choices": tuple(choices)})


@dataclass(frozen=True)
class RouterOptions:
    """
    Options of a router. A value out of range raises a `ValueError`. NumPy's numbers become Python's, for JSON.

    Args:
        unknown_below (`float`, *optional*, defaults to `0.0`):
            Images whose `known` is lower are marked unknown. Routers of statistics have 0.05.
    """

    unknown_below: float = option(0.0, 0, 1)

    def __post_init__(self) -> None:
        for entry in (entry for entry in fields(self) if entry.metadata):
            value, low, choices = getattr(self, entry.name), entry.metadata["low"], entry.metadata["choices"]
            if choices:
                if value not in choices:
                    raise ValueError(f"{entry.name} must be one of {choices}, got {value!r}.")
            elif value is not None or entry.default is not None:
                high = entry.metadata["high"]
                number = isinstance(value, Real) and not isinstance(value, bool)
                if not number or not (low <= value <= high and math.isfinite(value)):
                    raise ValueError(f"{entry.name} must be a number from {low:g} to {high:g}, got {value!r}.")
                object.__setattr__(self, entry.name, int(value) if isinstance(value, Integral) else float(value))


class Router(ABC):
    """
    Chooses, for each image by itself, the expert that answers.

    A subclass defines [`~Router.route`], and may define `prepare` and the attributes below. The arguments are the
    fields of `Options`.

    Attributes:
        name (`str` or `None`): Its name in files. A router without a name cannot be saved.
        Options (`type`): A frozen dataclass, a subclass of [`RouterOptions`].
        needs_statistics (`bool`): Whether every expert must have statistics.
    """

    name: ClassVar[str | None] = None
    Options: ClassVar[type[RouterOptions]] = RouterOptions
    needs_statistics: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        known = [entry.name for entry in fields(self.Options)]
        if unknown := ", ".join(sorted(set(options) - set(known))):
            removed = " Without `candidates` every expert is asked." if "candidates" in unknown else ""
            name = self.name or type(self).__name__
            raise ValueError(f"the router {name!r} takes the options {', '.join(known)}, got {unknown}.{removed}")
        self.options: Any = self.Options(**options)

    def prepare(self, experts: Experts) -> Any:
        """
        Computes what depends on the experts alone, once for each set of experts. `route` gets it from
        `experts.prepared(self)`. A `ValueError` says that the router cannot be used with these experts.
        """
        return None

    @abstractmethod
    def route(self, features: Tensor, experts: Experts) -> RoutingOutput:
        """Routes [CLS] vectors, `(batch, d)`."""

    def batch_limit(self, experts: Experts) -> int | None:
        """The most images that `route` takes at a time within the memory budget. `None` if a batch must stay whole."""
        space = experts.label_space
        return max(1, MEMORY_BUDGET // (len(experts.names) * max(space.rows, len(space.classes))))

    def to_dict(self) -> dict[str, Any]:
        """Name and options that differ from their defaults, as JSON holds them and [`make_router`] reads them."""
        values, defaults = vars(self.options), vars(self.Options())
        return {"name": self.name, "options": {name: v for name, v in values.items() if v != defaults[name]}}

    def used(self, experts: Experts) -> Router:
        """The router that answers for these experts: itself, or the one that it has chosen."""
        return self

    def describe(self, experts: Experts) -> str:
        """Its `repr`, and the router that it has chosen for these experts."""
        used = self.used(experts)
        return repr(self) if used is self else f"{self!r} ({used.describe(experts)})"

    def _key(self) -> tuple[Any, ...]:
        """What equal routers have in common."""
        return type(self), self.options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Router) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        options = self.to_dict()["options"]
        return f"{self.name or type(self).__name__}" + (f"({options})" if options else "")
