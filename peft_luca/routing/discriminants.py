"""Closed-form classifiers made of class statistics."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..utils import InvalidExpertError
from .statistics import ClassStatistics, random_directions


# Products of images and factor rows that are in memory at a time.
BUDGET = 2**24
# With larger coefficients, scores could overflow in float32.
MAX_COEFFICIENT = 1e30
Kind = TypeVar("Kind", bound="Discriminant")


class Discriminant(nn.Module):
    """Base class of the closed-form classifiers of unit features, over the classes of the statistics."""

    temperature: float  # divides the scores before the softmax

    @classmethod
    def make(cls: type[Kind], statistics: ClassStatistics, **options: Any) -> Kind:
        """Makes a classifier, and raises an `InvalidExpertError` if the statistics cannot be those of images."""
        try:
            made = cls(statistics, **options)
            if all((value.abs() <= MAX_COEFFICIENT).all() for value in made.buffers()):
                return made
            reason = "its coefficients are not finite, or very large"
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            reason = str(error)
        raise InvalidExpertError(
            f"no classifier can be made of the experts' statistics: {reason}. Collect them again, leave out the "
            "expert that brought them, or use a router that needs none, such as 'entropy'."
        )

    def scores(self, x: Tensor) -> Tensor:
        """Unit features `(batch, d)` → log-likelihoods up to a constant, `(batch, C)`."""
        raise NotImplementedError

    def posterior(self, scores: Tensor) -> Tensor:
        """Scores → log-probability of each class, both `(batch, C)`."""
        return torch.log_softmax(scores / self.temperature, dim=-1)

    def log_posterior(self, x: Tensor) -> Tensor:
        """Unit features `(batch, d)` → log-probability of each class, `(batch, C)`."""
        return self.posterior(self.scores(x))

    def answer(self, x: Tensor, gaussian: RegularizedDiscriminant) -> tuple[Tensor, Tensor]:
        """As `log_posterior`, and the scores of Gaussians, which may be its own."""
        return self.log_posterior(x), gaussian.scores(x)


class LinearDiscriminant(Discriminant):
    """
    Linear discriminant of the class means and the pooled covariance, shrunk toward a sphere.

    Args:
        statistics ([`ClassStatistics`]): Pooled.
        shrinkage (`float`, *optional*): Strength, 0 to 1; by Ledoit & Wolf's rule for Gaussians by default.
        temperature (`float`, *optional*): Divides the log-likelihoods; √d/3 by default.
        means (`torch.Tensor` of shape `(means, d)`, *optional*): Used in place of the class means.
    """

    def __init__(
        self,
        statistics: ClassStatistics,
        shrinkage: float | None = None,
        temperature: float | None = None,
        means: Tensor | None = None,
    ) -> None:
        super().__init__()
        covariance, freedom = statistics.within
        self.shrinkage = ledoit_wolf(covariance, freedom) if shrinkage is None else shrinkage
        self.temperature = math.sqrt(len(covariance)) / 3 if temperature is None else temperature
        shrunk = shrink(covariance, self.shrinkage)
        means = statistics.means if means is None else means
        weights = torch.linalg.solve(shrunk, means.T).T  # (C, d)
        self.weights, self.bias = nn.Buffer(weights.float()), nn.Buffer((-0.5 * (weights * means).sum(dim=1)).float())

    def scores(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias.to(x), x, self.weights.to(x).T)


class RegularizedDiscriminant(Discriminant):
    """
    A Gaussian per class: Σ_k = (1-γ)·[(1-α)·S_k + α·P] + γ·t_k·I, with S_k the class's covariance, P the pooled one
    and t_k the mean of the bracket's diagonal (Friedman 1989). Scores are -½·(x-μ)ᵀΣ_k⁻¹(x-μ) - ½·β·log|Σ_k|.

    By default α is 1/(1 + 0.13·(n-1)^¼) for a class of n images, and γ is given by [`sphere_strength`]. The rule for
    α, β and the temperature were chosen on training images of three data sets: see docs/routing.md.

    Args:
        statistics ([`ClassStatistics`]): Pooled.
        shrinkage (`float`, *optional*): α of every class, 0 to 1.
        sphere (`float`, *optional*): γ, 0 to 1.
        volume (`float`, *optional*, defaults to `0.0`): β, the weight of the classes' log-volumes; 1 in the density.
        temperature (`float`, *optional*): Divides the scores; 0.44·√d by default.
    """

    def __init__(
        self,
        statistics: ClassStatistics,
        shrinkage: float | None = None,
        sphere: float | None = None,
        volume: float = 0.0,
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        covariance, pooled_freedom = statistics.within
        d, counts = len(covariance), statistics.counts
        self.temperature = 0.44 * math.sqrt(d) if temperature is None else temperature
        alphas = pooled_share(counts - 1) if shrinkage is None else torch.full_like(counts, shrinkage)
        sphere = sphere_strength(counts, alphas, covariance, pooled_freedom) if sphere is None else sphere
        self.sphere = sphere
        values, basis = torch.linalg.eigh(covariance)
        values, self.basis = values.clamp(min=0), nn.Buffer(basis.float())
        means = statistics.means @ basis  # (C, d). All that follows is in the basis of P.
        inverse = torch.empty_like(means)
        # Classes with equally many rows lie side by side, so that one reshape and sum serves them all.
        sizes = [max(1, len(factor)) for factor in statistics.factors]
        order = sorted(range(len(sizes)), key=sizes.__getitem__)
        self.groups = list(Counter(sizes[k] for k in order).items())  # (rows per class, classes)
        self.places = nn.Buffer(torch.tensor(order).argsort())
        rows, offsets = torch.empty(sum(sizes), d), torch.empty(sum(sizes))
        row_parts, offset_parts = (whole.split([sizes[k] for k in order]) for whole in (rows, offsets))
        volumes, spans, leverages = torch.empty(3, len(means), dtype=torch.float64)
        for k, factor in enumerate(statistics.factors):
            freedom = float(counts[k]) - 1
            own = 0.0 if freedom == 0 else 1 - float(alphas[k])  # a single image has no covariance
            factor = factor if len(factor) else factor.new_zeros(1, d)
            # Most of the time is spent here: in float32, as the factors are.
            factor = (factor @ self.basis).double()
            turned = factor * math.sqrt(own / max(freedom, 1))  # (r, d)
            # The mean of the diagonal that a low rank leaves out, so that one basis serves all classes.
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
            # The squared distances of the class's images from its mean, added up: the trace of Σ_k⁻¹ · scatter.
            spans[k] = (factor.square() / diagonal).sum() - (factor @ reduced.T).square().sum()
            spans[k] += statistics.remainder[k].double().mean() * ((1 / diagonal).sum() - reduced.square().sum())
            leverages[k] = (1 - sphere) * (own / max(freedom, 1) + (1 - own) / max(pooled_freedom, 1))
            row_parts[self.places[k]].copy_(reduced)
            offset_parts[self.places[k]].copy_(reduced @ means[k])
        self.rows, self.offsets = nn.Buffer(rows), nn.Buffer(offsets)
        self.inverse, self.linear = nn.Buffer(inverse.float()), nn.Buffer((means * inverse).float())
        self.constant = nn.Buffer((-0.5 * ((means.square() * inverse).sum(dim=1) + volume * volumes)).float())
        self.volumes = nn.Buffer((volume * volumes).float())
        self._set_typical_distances(counts, spans, leverages)

    def _set_typical_distances(self, counts: Tensor, spans: Tensor, leverages: Tensor) -> None:
        """What the squared distance of a further image comes to. A class of one image has the mean of the others."""
        self.counts, self.leverages = nn.Buffer(counts.float()), nn.Buffer(leverages.float())
        typical, several = self._leave_out(spans / counts, torch.arange(len(counts))), counts > 1
        usual = typical[several].mean() if several.any() else float(len(self.basis))
        self.typical = nn.Buffer(torch.where(several, typical, usual).float())

    def _leave_out(self, distances: Tensor, labels: Tensor) -> Tensor:
        """Squared distances of images from their own class → what they are without the image (Sherman & Morrison)."""
        n = self.counts[labels]
        weight = self.leverages[labels] * n / (n - 1).clamp(min=1)
        return (n / (n - 1).clamp(min=1)).square() * distances / (1 - weight * distances).clamp(min=0.05)

    def answer(self, x: Tensor, gaussian: RegularizedDiscriminant) -> tuple[Tensor, Tensor]:
        scores = self.scores(x)
        return self.posterior(scores), scores

    def left_out(self, x: Tensor, labels: Tensor) -> Tensor:
        """
        Training images, unit features `(images, d)`, and their classes `(images,)` → the squared distance of each from
        its class as it is without the image, `(images,)`, float64.
        """
        return self._leave_out(self.squared_distances(self.scores(x), labels).double(), labels)

    def squared_distances(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Scores `(batch, C)` and classes `(batch,)` → (x-μ)ᵀΣ⁻¹(x-μ), `(batch,)`."""
        return -2 * scores.gather(1, labels[:, None])[:, 0] - self.volumes[labels].to(scores)

    def distances(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Scores `(batch, C)` and classes `(batch,)` → squared distance from the class, typically 1, `(batch,)`."""
        return self.squared_distances(scores, labels) / self.typical[labels].to(scores)

    def scores(self, x: Tensor) -> Tensor:
        y = x @ self.basis.to(x)
        scores = y @ self.linear.to(x).T - 0.5 * y.square() @ self.inverse.to(x).T + self.constant.to(x)
        rows, shift = self.rows.to(x), -self.offsets.to(x)[:, None]
        # A compiled or exported graph holds for every batch size, and a split would fix it.
        pieces = [y] if torch.compiler.is_compiling() else y.split(max(1, BUDGET // len(rows)))
        return scores + 0.5 * torch.cat([self._sum_squares(torch.addmm(shift, rows, piece.T)) for piece in pieces])

    def _sum_squares(self, products: Tensor) -> Tensor:
        """Products with the rows of all classes, (rows, batch) → sum of their squares per class, (batch, C)."""
        parts = products.square().split([r * n for r, n in self.groups])
        sums = [part.unflatten(0, (n, r)).sum(dim=1) for part, (r, n) in zip(parts, self.groups, strict=True)]
        return torch.cat(sums).index_select(0, self.places).T


class RidgeClassifier(Discriminant):
    """
    Ridge regression to one-hot labels on random ReLU features (RanPAC, https://arxiv.org/abs/2307.02251).

    Args:
        statistics ([`ClassStatistics`]): Pooled, with random features.
        strength (`float`, *optional*):
            λ, above 0. By default the one of least generalized cross-validation, found in closed form.
        temperature (`float`, *optional*): Divides the scores; 0.1 by default.
    """

    def __init__(
        self, statistics: ClassStatistics, strength: float | None = None, temperature: float | None = None
    ) -> None:
        super().__init__()
        gram = statistics.random_gram
        if gram is None or statistics.random_sums is None:
            raise ValueError(
                "the ridge router needs random features in the statistics of every expert, equally many. Train with "
                "statistics_random_features=2000, or call collect_statistics(..., random_features=2000)."
            )
        self.temperature = 0.1 if temperature is None else temperature
        values, basis = torch.linalg.eigh(gram)
        values, sums = values.clamp(min=0), statistics.random_sums @ basis  # (C, M)
        self.strength = _ridge_strength(values, sums, statistics.counts) if strength is None else strength
        self.weights = nn.Buffer(((sums / (values + self.strength)) @ basis.T).float())  # (C, M)
        self.directions = nn.Buffer(random_directions(statistics.means.shape[1], len(values)).float())  # (d, M)

    def scores(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.directions.to(x)) @ self.weights.to(x).T


def pooled_share(freedom: Tensor) -> Tensor:
    """α of [`RegularizedDiscriminant`] for classes of so many degrees of freedom, images less one."""
    return 1 / (1 + 0.13 * freedom**0.25)


def sphere_strength(counts: Tensor, shrinkage: Tensor, covariance: Tensor, freedom: float) -> float:
    """
    γ of [`RegularizedDiscriminant`], 0 to 1: Ledoit & Wolf's strength for as many images as (1-α)·S_k + α·P is worth,
    from the images and the α of each class, both (K,), and P, (d, d), with its degrees of freedom.
    """
    share = torch.where(counts > 1, 1 - shrinkage, 0.0)
    # The variance of a weighted sum of two means.
    variance = share**2 / (counts - 1).clamp(min=1) + (1 - share) ** 2 / max(freedom, 1.0)
    return ledoit_wolf(covariance, 1 / float((counts * variance).sum() / counts.sum()))


def _ridge_strength(values: Tensor, sums: Tensor, counts: Tensor) -> float:
    """λ of least generalized cross-validation, from the eigenvalues of the Gram matrix and the sums in their basis."""
    images, power = counts.sum(), sums.square().sum(dim=0)
    candidates = values.mean() * 10.0 ** torch.arange(-6, 3.01, 0.25, dtype=torch.float64)
    weight = 1 / (values + candidates[:, None])  # (candidates, M)
    residual = images - (power * (2 * weight - values * weight.square())).sum(dim=1)
    freedom = images - (values * weight).sum(dim=1)
    loss = torch.where(freedom > 1e-6 * images, residual / freedom.square(), math.inf)
    return float(candidates[loss.argmin()])


def ledoit_wolf(covariance: Tensor, freedom: float) -> float:
    """Strength at which a Gaussian's covariance, measured with this freedom, is best shrunk toward a sphere."""
    trace, square = float(covariance.trace()), float(covariance.square().sum())
    spread = square - trace**2 / len(covariance)
    return min(1.0, (square + trace**2) / (freedom * spread)) if freedom > 0 and spread > 0 else 1.0


def shrink(covariance: Tensor, strength: float) -> Tensor:
    """Shrinks a covariance toward a sphere, and keeps its eigenvalues above the rounding error of float64."""
    d, trace = len(covariance), covariance.trace()
    return (1 - strength) * covariance + (strength / d + 1e-10) * trace * torch.eye(d, dtype=torch.float64)
