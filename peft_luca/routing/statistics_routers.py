"""Routers that are closed-form classifiers of the frozen features: they predict the class and name its expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..utils import list_names
from .discriminants import Discriminant, LinearDiscriminant, RegularizedDiscriminant, RidgeClassifier
from .evidence import EvidenceDiscriminant, Familiarity, ridge_weight
from .router import MEMORY_BUDGET, Experts, Router, RouterOptions, RoutingOutput, option
from .score_routers import NearestRouter
from .statistics import add_up, have_equal_random_features, pool


@dataclass(frozen=True)
class StatisticsOptions(RouterOptions):
    """
    Args:
        unknown_below (`float`, *optional*, defaults to `0.05`):
            The share of known images that is marked unknown, as the experts' own images suggest, each left out.
    """

    unknown_below: float = option(0.05, 0, 1)


class StatisticsRouter(Router):
    """One classifier, made of the statistics of all experts, answers."""

    needs_statistics = True
    discriminant: ClassVar[type[Discriminant]]

    def prepare(self, experts: Experts) -> StatisticsClassifier:
        """Makes the classifier."""
        if reason := self.reason_against(experts):
            raise ValueError(reason)
        options = {name: value for name, value in vars(self.options).items() if name != "unknown_below"}
        return StatisticsClassifier(experts, self.discriminant, **options)

    def reason_against(self, experts: Experts) -> str | None:
        """Why statistics cannot answer for these experts, in words; `None` if they can."""
        if missing := [name for name in experts.names if name not in experts.statistics]:
            return (
                f"the router {self.name or 'gaussian'!r} needs the statistics of every expert, but "
                f"{list_names(missing, 5)} {'has' if len(missing) == 1 else 'have'} none. Get them from the owner, "
                "compute them from images with collect_statistics, or use set_router('nearest')."
            )
        first = min(experts.names)
        for name in experts.names:
            if not _same_reference(experts.reference(first), experts.reference(name)):
                return (
                    f"experts {first!r} and {name!r} standardize [CLS] by different references, so their statistics "
                    "cannot be pooled. Train both with the same reference, or use set_router('nearest')."
                )
        return None

    def route(self, features: Tensor, experts: Experts) -> RoutingOutput:
        classifier: StatisticsClassifier = experts.prepared(self)
        posterior, expert, known = classifier(experts.unit_features(features))
        entropy = torch.special.entr(posterior.exp()).sum(dim=-1)
        unknown = ~(known >= self.options.unknown_below)  # not `<`: a probability that is NaN is unknown
        return RoutingOutput(posterior, expert, entropy, None, posterior.amax(dim=1).exp(), unknown, known)

    def batch_limit(self, experts: Experts) -> int | None:
        return max(1, MEMORY_BUDGET // (experts.label_space.rows + len(experts.names)))


class LdaRouter(StatisticsRouter):
    """Linear discriminant analysis: class means and one pooled covariance."""

    name: ClassVar[str | None] = "lda"
    discriminant = LinearDiscriminant

    @dataclass(frozen=True)
    class Options(StatisticsOptions):
        shrinkage: float | None = option(None, 0, 1)
        temperature: float | None = option(None, 1e-6, 1e6)


class GaussianRouter(StatisticsRouter):
    """Regularized discriminant analysis: a covariance for each class, shrunk toward the pooled one."""

    name: ClassVar[str | None] = "gaussian"
    discriminant = RegularizedDiscriminant

    @dataclass(frozen=True)
    class Options(StatisticsOptions):
        shrinkage: float | None = option(None, 0, 1)
        sphere: float | None = option(None, 0, 1)
        volume: float = option(0.0, 0, 1e3)
        temperature: float | None = option(None, 1e-6, 1e6)


class RidgeRouter(StatisticsRouter):
    """Ridge regression on random ReLU features (RanPAC, https://arxiv.org/abs/2307.02251)."""

    name: ClassVar[str | None] = "ridge"
    discriminant = RidgeClassifier

    @dataclass(frozen=True)
    class Options(StatisticsOptions):
        strength: float | None = option(None, 1e-12, 1e12)
        temperature: float | None = option(None, 1e-6, 1e6)


class EvidenceRouter(StatisticsRouter):
    """[`GaussianRouter`], with a ridge regression beside it where the experts' evidence asks for one."""

    Options = StatisticsOptions
    discriminant = EvidenceDiscriminant

    def describe(self, experts: Experts) -> str:
        parts = [experts.statistics[name] for name in experts.names]
        weight = have_equal_random_features(parts) and ridge_weight(add_up([part.losses for part in parts]))
        return f"gaussian and {weight:g} x ridge" if weight else "gaussian"


class AutoRouter(Router):
    """[`EvidenceRouter`] where the statistics of all experts can be pooled, otherwise [`NearestRouter`]."""

    name: ClassVar[str | None] = "auto"
    Options = StatisticsOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Scores have no measure of their own for whether an image is known, and so no share to mark by default.
        self._by_statistics, self._by_scores = EvidenceRouter(**options), NearestRouter(**options)

    def used(self, experts: Experts) -> Router:
        return self._by_scores if self._by_statistics.reason_against(experts) else self._by_statistics

    def prepare(self, experts: Experts) -> Router:
        """Chooses the router, and prepares it."""
        router = self.used(experts)
        experts.prepared(router)
        return router

    def route(self, features: Tensor, experts: Experts) -> RoutingOutput:
        router: Router = experts.prepared(self)
        return router.route(features, experts)

    def batch_limit(self, experts: Experts) -> int | None:
        router: Router = experts.prepared(self)
        return router.batch_limit(experts)


class StatisticsClassifier:
    """
    A discriminant for a set of experts.

    An expert and one of its classes make a part. Where experts share a class, the posterior is that of all its images,
    and the expert whose own mean is nearest under the pooled covariance has it.
    """

    def __init__(self, experts: Experts, discriminant: type[Discriminant], **options: Any) -> None:
        # Classes and experts are taken in the order of their names, so that no order of loading changes a bit.
        space, names, device = experts.label_space, sorted(experts.names), experts.by_name.device
        pooled = pool({name: experts.statistics[name] for name in names})
        self.discriminant = discriminant.make(pooled, **options).to(device)
        # Whether an image is known is judged by the Gaussians, whatever answers.
        own: Any = getattr(self.discriminant, "gaussian", self.discriminant)
        if not isinstance(own, RegularizedDiscriminant):
            own = RegularizedDiscriminant.make(pooled).to(device)
        self.gaussian: RegularizedDiscriminant = own
        self.familiarity = Familiarity(pooled.distances).to(device)
        where = {name: i for i, name in enumerate(pooled.classes)}
        self.columns = torch.tensor([where[name] for name in space.classes], device=device)
        self.part_class, self.part_expert = space.part_class, space.part_expert
        self.nearness: Discriminant | None = None
        if len(self.part_class) > len(space.classes):
            means = torch.cat([experts.statistics[name].means for name in names])
            self.nearness = LinearDiscriminant.make(pooled, means=means).to(device)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """
        Unit features `(batch, d)` → log-posterior of the classes `(batch, C)`, the expert that has the predicted class
        `(batch,)`, and how familiar the image is as one of that class, `(batch,)`; see [`Familiarity`].
        """
        posterior, gaussian = self.discriminant.answer(x, self.gaussian)
        posterior = posterior.index_select(1, self.columns)
        best = posterior.argmax(dim=1, keepdim=True)
        near = x.new_zeros(1) if self.nearness is None else self.nearness.scores(x)  # (batch, parts)
        part = torch.where(self.part_class == best, near, -torch.inf).argmax(dim=1)
        distances = self.gaussian.distances(gaussian, self.columns[best[:, 0]])
        return posterior, self.part_expert[part], self.familiarity(distances)


def _same_reference(one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor] | None) -> bool:
    if one is None or other is None:
        return one is other
    (mean, std), (other_mean, other_std) = one, other
    # Another machine, or a copy of the trunk in half precision, measures almost the same.
    return bool(((other_mean - mean).abs() / std).max() < 0.05) and torch.allclose(other_std, std, rtol=0.05)
