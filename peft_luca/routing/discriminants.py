"""Closed-form classifiers made of the experts' statistics, and the routers that they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..utils import InvalidExpertError
from .statistics import ClassStatistics, projection


# Numbers of (images, factor rows) that are in memory at a time.
BUDGET = 2**24
# Beyond this a classifier's scores could overflow in float32.
MAX_COEFFICIENT = 1e30


class Discriminant:
    """
    A closed-form classifier of unit features. `log_posterior` maps (batch, d) to (batch, C), over the classes in the
    order of the statistics it was made of.
    """

    temperature: float

    def __init__(self, statistics: ClassStatistics, **options: Any) -> None:
        raise NotImplementedError

    def move(self, device: torch.device) -> None:
        """Take every tensor to a device, once: what is called for each batch finds it there."""
        for part in _parts(self):
            for name, value in vars(part).items():
                if isinstance(value, Tensor):
                    setattr(part, name, value.to(device))

    def scores(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def log_posterior(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.scores(x) / self.temperature, dim=-1)

    def log_known(self, x: Tensor) -> Tensor:
        """Log-probability that an image is of any of the classes, (batch,): 0 where that is not judged."""
        return x.new_zeros(x.shape[0])


def _parts(classifier: Discriminant) -> Iterator[Any]:
    """A classifier, and what it is made of."""
    yield classifier
    for value in vars(classifier).values():
        if isinstance(value, Discriminant):
            yield from _parts(value)
        elif isinstance(value, Background):
            yield value


class Background:
    """
    One RegularizedDiscriminant of all training features, which stands for whatever is none of the classes: an image is known as far
    as a class explains it better than that (relative Mahalanobis distance, https://arxiv.org/abs/2106.09022).
    """

    def __init__(self, statistics: ClassStatistics, within: Tensor, volume: float) -> None:
        counts, images = statistics.counts, float(statistics.counts.sum())
        self.mean = (counts[:, None] * statistics.means).sum(dim=0) / images
        apart = counts.sqrt()[:, None] * (statistics.means - self.mean)
        total = (within * max(images - len(counts), 1.0) + apart.T @ apart) / max(images - 1, 1.0)
        total = _shrunk(total, _ledoit_wolf(total, images - 1))
        self.precision = torch.linalg.inv(total).float()
        # The background is wider than the classes, whose log-volume this is, and so thinner everywhere.
        self.constant = -0.5 * (float(torch.logdet(total)) - volume)
        self.mean = self.mean.float()

    def scores(self, x: Tensor) -> Tensor:
        centred = x - self.mean.to(x)
        return -0.5 * (centred @ self.precision.to(x) * centred).sum(dim=-1) + self.constant


class LinearDiscriminant(Discriminant):
    """
    Linear discriminant of class means and pooled covariance, which is shrunk toward a sphere by the strength that the
    training scatter itself gives (Ledoit & Wolf's rule, in its form for Gaussians).

    Args:
        statistics ([`ClassStatistics`]): Pooled.
        shrinkage (`float`, *optional*): Strength, 0 to 1, in place of the rule's.
        temperature (`float`, *optional*): Divides the log-likelihoods; √d/3 by default.
        means (`torch.Tensor` of shape `(prototypes, d)`, *optional*): Prototypes in place of the class means.
    """

    def __init__(
        self,
        statistics: ClassStatistics,
        shrinkage: float | None = None,
        temperature: float | None = None,
        means: Tensor | None = None,
    ) -> None:
        _check_share("shrinkage", shrinkage)
        covariance, freedom = statistics.within
        self.shrinkage = shrinkage = _ledoit_wolf(covariance, freedom) if shrinkage is None else shrinkage
        self.temperature = _temperature(temperature, math.sqrt(len(covariance)) / 3)
        shrunk = _shrunk(covariance, shrinkage)
        self.background = Background(statistics, covariance, float(torch.logdet(shrunk)))
        self.precision = torch.linalg.inv(shrunk).float()
        means = statistics.means if means is None else means
        weights = torch.linalg.solve(shrunk, means.T).T  # (C, d)
        self.weights = weights.float()
        self.bias = (-0.5 * (weights * means).sum(dim=1)).float()

    def scores(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias.to(x), x, self.weights.to(x).T)

    def log_known(self, x: Tensor) -> Tensor:
        # The part that all classes have in common cancels among them, but not against the background.
        common = -0.5 * (x @ self.precision.to(x) * x).sum(dim=-1)
        return _log_known(self.scores(x) + common[:, None], self.background.scores(x), self.temperature)


class RegularizedDiscriminant(Discriminant):
    """
    A RegularizedDiscriminant per class: Σ_k = (1-γ)·[(1-α)·S_k + α·P] + γ·t_k·I, with S_k the class's covariance, P the pooled one
    and t_k the mean of the bracket's diagonal (Friedman 1989). Scores are -½·(x-μ)ᵀΣ_k⁻¹(x-μ) - ½·β·log|Σ_k|.

    α falls as a class has more images: 1/(1 + 0.13·(n-1)^¼). This rule, β and the temperature, which is above 1
    because the features have heavier tails than a RegularizedDiscriminant, were chosen by leave-one-out on training images of three
    data sets: see the routing page of the docs. γ is Ledoit & Wolf's strength for as many images as the bracket is
    worth.

    Args:
        statistics ([`ClassStatistics`]): Pooled.
        shrinkage (`float`, *optional*): α of every class, 0 to 1, in place of the rule's.
        sphere (`float`, *optional*): γ, 0 to 1, in place of the rule's.
        volume (`float`, *optional*, defaults to `0.0`): β: how much the classes' volumes count; 1 in the density.
        temperature (`float`, *optional*):
            Divides the scores; 0.44·√d by default. Whether an image is known is judged by [`LinearDiscriminant`], of this
            temperature or its own default.
    """

    def __init__(
        self,
        statistics: ClassStatistics,
        shrinkage: float | None = None,
        sphere: float | None = None,
        volume: float = 0.0,
        temperature: float | None = None,
    ) -> None:
        _check_share("shrinkage", shrinkage)
        _check_share("sphere", sphere)
        covariance, pooled_freedom = statistics.within
        d = len(covariance)
        self.temperature = _temperature(temperature, 0.44 * math.sqrt(d))
        counts = statistics.counts
        alphas = 1 / (1 + 0.13 * (counts - 1) ** 0.25) if shrinkage is None else torch.full_like(counts, shrinkage)
        if sphere is None:
            sphere = sphere_strength(counts, alphas, covariance, pooled_freedom)
        self.sphere = sphere
        values, basis = torch.linalg.eigh(covariance)
        values = values.clamp(min=0)
        self.basis = basis.float()
        means = statistics.means @ basis  # (C, d), as all that follows in the basis of P
        inverse, rows, offsets = torch.empty_like(means), [], []
        volumes = torch.empty(len(means), dtype=torch.float64)
        for k, factor in enumerate(statistics.factors):
            freedom = float(counts[k]) - 1
            own = 0.0 if freedom == 0 else 1 - float(alphas[k])  # a single image has no covariance of its own
            # Most of the time goes here: in float32, as the factors are.
            turned = (factor @ self.basis).double() * math.sqrt(own / max(freedom, 1))  # (r, d)
            # The diagonal that a low rank leaves out counts by its mean, so that one basis serves all classes.
            left = float(statistics.remainder[k].sum()) / d * own / max(freedom, 1)
            mean_variance = float(turned.square().sum()) / d + left + (1 - own) * float(values.mean())
            diagonal = (1 - sphere) * ((1 - own) * values + left) + sphere * mean_variance
            diagonal = diagonal.clamp(min=1e-10 * float(values.sum()))
            turned = math.sqrt(1 - sphere) * turned
            # Woodbury: (D + FᵀF)⁻¹ = D⁻¹ - RᵀR with R = L⁻¹FD⁻¹ and LLᵀ = I + FD⁻¹Fᵀ.
            scaled = turned / diagonal
            lower = torch.linalg.cholesky(torch.eye(len(turned), dtype=torch.float64) + scaled @ turned.T)
            reduced = torch.linalg.solve_triangular(lower, scaled, upper=False)
            inverse[k] = 1 / diagonal
            volumes[k] = diagonal.log().sum() + 2 * lower.diagonal().log().sum()
            rows.append(reduced.float())
            offsets.append((reduced @ means[k]).float())
        # Whether an image is of any class is judged by the pooled covariance: the classes' own differ in volume.
        self.pooled = LinearDiscriminant(statistics, temperature=temperature)
        self.inverse = inverse.float()
        self.linear = (means * inverse).float()
        self.constant = (-0.5 * ((means.square() * inverse).sum(dim=1) + volume * volumes)).float()
        self.rows, self.offsets = torch.cat(rows), torch.cat(offsets)
        self.lengths = torch.tensor([len(part) for part in rows])

    def scores(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and not len(x):  # torch cannot reduce the parts of nothing
            return x.new_zeros(0, len(self.constant))
        y = x @ self.basis.to(x)
        scores = y @ self.linear.to(x).T - 0.5 * y.square() @ self.inverse.to(x).T + self.constant.to(x)
        rows, offsets, lengths = self.rows.to(x), self.offsets.to(x), self.lengths.to(x.device)
        parts = []
        for part in y.split(max(1, BUDGET // max(1, len(rows)))):
            squares = (part @ rows.T - offsets).square()  # (batch, rows of all classes)
            parts.append(torch.segment_reduce(squares, "sum", lengths=lengths.expand(len(part), -1), axis=1))
        return scores + 0.5 * torch.cat(parts)

    def log_known(self, x: Tensor) -> Tensor:
        return self.pooled.log_known(x)


class RidgeClassifier(Discriminant):
    """
    RidgeClassifier regression to one-hot labels on seeded random ReLU features (RanPAC, https://arxiv.org/abs/2307.02251). Its
    strength is the one of least generalised cross-validation, which the Gram matrix and the class sums give in closed
    form.

    Args:
        statistics ([`ClassStatistics`]): Pooled, with random features.
        strength (`float`, *optional*): λ, in place of the rule's.
        temperature (`float`, *optional*): Divides the scores; 0.1 by default.
    """

    def __init__(
        self, statistics: ClassStatistics, strength: float | None = None, temperature: float | None = None
    ) -> None:
        if statistics.gram is None or statistics.random_sums is None:
            raise ValueError(
                "the ridge router needs random features in the statistics of every expert, equally many. Collect them "
                "with ClassStatistics.collect(..., random_features=2000), or statistics_random_features=2000 in the "
                "training arguments."
            )
        self.temperature = _temperature(temperature, 0.1)
        values, basis = torch.linalg.eigh(statistics.gram.double())
        values, sums = values.clamp(min=0), statistics.random_sums @ basis  # (C, M)
        images = float(statistics.counts.sum())
        if strength is None:
            power = sums.square().sum(dim=0)
            best = torch.inf
            for candidate in (float(values.mean()) * 10.0**e for e in torch.arange(-6, 3.01, 0.25).tolist()):
                weight = 1 / (values + candidate)
                residual = images - float((power * (2 * weight - values * weight.square())).sum())
                freedom = images - float((values * weight).sum())
                loss = residual / freedom**2 if freedom > 1e-6 * images else torch.inf
                if loss < best:
                    best, strength = loss, candidate
        if strength is None or not strength > 0:
            raise ValueError(f"strength must be above 0, got {strength}.")
        self.strength = strength
        self.projection = projection(statistics.means.shape[1], len(values)).float()  # (d, M)
        self.weights = ((sums / (values + strength)) @ basis.T).float()  # (C, M)

    def scores(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.projection.to(x)) @ self.weights.to(x).T


def sphere_strength(counts: Tensor, shrinkage: Tensor, covariance: Tensor, freedom: float) -> float:
    """
    γ of [`RegularizedDiscriminant`], between 0 and 1: Ledoit & Wolf's strength for as many images as (1-α)·S_k + α·P is worth.

    Args:
        counts (`torch.Tensor` of shape `(K,)`): Images of each class.
        shrinkage (`torch.Tensor` of shape `(K,)`): α of each class.
        covariance (`torch.Tensor` of shape `(d, d)`): P.
        freedom (`float`): Its degrees of freedom.
    """
    share = torch.where(counts > 1, 1 - shrinkage, 0.0)
    # The variance of two means put together.
    variance = share**2 / (counts - 1).clamp(min=1) + (1 - share) ** 2 / max(freedom, 1.0)
    return _ledoit_wolf(covariance, 1 / float((counts * variance).sum() / counts.sum()))


def _log_known(scores: Tensor, background: Tensor, temperature: float) -> Tensor:
    """Log-odds of any class against the background → log-probability of any class."""
    best = torch.logsumexp(scores / temperature, dim=-1)
    return best - torch.logaddexp(best, background / temperature)


def _shrunk(covariance: Tensor, strength: float) -> Tensor:
    """A covariance shrunk toward a sphere, and kept away from what float64 cannot tell from zero."""
    d, trace = len(covariance), covariance.trace()
    return (1 - strength) * covariance + (strength / d + 1e-10) * trace * torch.eye(d, dtype=torch.float64)


def _ledoit_wolf(covariance: Tensor, freedom: float) -> float:
    """Strength at which a RegularizedDiscriminant's covariance, measured with this freedom, is best shrunk toward a sphere."""
    trace, square = float(covariance.trace()), float(covariance.square().sum())
    spread = square - trace**2 / len(covariance)
    return min(1.0, (square + trace**2) / (freedom * spread)) if freedom > 0 and spread > 0 else 1.0


def _check_share(name: str, value: Any) -> None:
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}.")


def _temperature(value: float | None, default: float) -> float:
    if value is not None and (not isinstance(value, int | float) or not 0 < value < math.inf):
        raise ValueError(f"temperature must be a finite number above 0, got {value!r}.")
    return default if value is None else float(value)


def make_discriminant(kind: type[Discriminant], statistics: ClassStatistics, **options: Any) -> Discriminant:
    """
    A classifier, unless its numbers are of no use.

    Raises:
        InvalidExpertError: the statistics belong to no images, such as a stranger may have written.
    """
    try:
        classifier = kind(statistics, **options)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise InvalidExpertError(f"{UNUSABLE}: {error}") from error
    values = [v for part in _parts(classifier) for v in vars(part).values() if isinstance(v, (Tensor, float))]
    if not all((torch.as_tensor(value).abs() <= MAX_COEFFICIENT).all() for value in values):
        raise InvalidExpertError(f"{UNUSABLE}: numbers in it are not finite, or very large.")
    return classifier


UNUSABLE = (
    "no classifier can be made of the experts' statistics. Collect them anew, leave out the expert that brought them, "
    "or use a router that needs none, such as 'entropy'"
)
