"""
Evidence: how an expert's own training images fare in its closed forms, each of them left out in turn. It is kept with
the expert's statistics. Evidence of several experts adds up, whatever their order, and goes with its expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .discriminants import Discriminant, RegularizedDiscriminant, RidgeClassifier, pooled_share
from .statistics import ClassStatistics


# Weights of the ridge regression beside the Gaussians. The first one is the prior.
WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
# An expert with so many images of each of its classes tries a ridge regression on so many random features. What it
# keeps of their Gram matrix has so many rows.
MANY_IMAGES, RANDOM_FEATURES, GRAM_RANK = 200, 2000, 128
# Images that are left out, evenly spaced, and the fewest of a class for a regression.
MOST_IMAGES, FEWEST_IMAGES = 10_000, 20
# Of the histogram of distances: 96 edges, in units of a class's typical distance.
EDGES = 2.0 ** torch.linspace(-2, 4, 96)


@torch.no_grad()
def collect_with_evidence(
    features: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    rank: int | None,
    random_features: int,
    prepare: Callable[[Tensor], Tensor],
) -> ClassStatistics:
    """
    Computes the statistics of the images of one task, see [`ClassStatistics.collect`], and their evidence. Where every
    class has many images and none are asked for, 2,000 random features are kept in few rows: all experts decide.
    """
    is_trial = not random_features and int(labels.bincount(minlength=len(classes)).min()) >= MANY_IMAGES
    width = RANDOM_FEATURES if is_trial else random_features
    statistics = ClassStatistics.collect(features, labels, classes, rank, width, prepare)
    rows = torch.linspace(0, len(labels) - 1, min(len(labels), MOST_IMAGES)).long()
    return with_evidence(statistics, prepare(features[rows].double()), labels[rows], keep_gram=not is_trial)


def with_evidence(statistics: ClassStatistics, x: Tensor, labels: Tensor, keep_gram: bool) -> ClassStatistics:
    """
    Adds the evidence of an expert's training images, unit features `(images, d)` in float64 and labels `(images,)`,
    to its statistics. The Gram matrix is compressed unless `keep_gram`.
    """
    discriminant = RegularizedDiscriminant(statistics)
    distances = discriminant.left_out(x.float(), labels)
    sums = torch.zeros(len(statistics.classes), dtype=torch.float64).index_add(0, labels, distances)
    # Of one expert's classes alone the covariance is less well known, so that all distances are longer: by their mean.
    ratios = distances * labels.bincount(minlength=len(sums))[labels] / sums[labels]
    edges = (ratios[statistics.counts[labels] > 1, None] >= EDGES).sum(dim=1)
    statistics = replace(statistics, distances=edges.bincount(minlength=len(EDGES) + 1).double())
    if statistics.gram is None:
        return statistics
    if int(labels.bincount(minlength=len(sums)).min()) < FEWEST_IMAGES:
        return statistics if keep_gram else replace(statistics, gram=None, random_sums=None)
    scores = -0.5 * left_out(x, labels, pooled_share, discriminant.sphere)[0]
    gaussian = discriminant.posterior(scores)
    ridge = _left_out_of_ridge(statistics, x, labels)
    mixed = [mix(gaussian, ridge, weight) for weight in WEIGHTS]
    losses = torch.stack([F.cross_entropy(posterior, labels, reduction="none") for posterior in mixed])
    sums = torch.stack([losses.sum(dim=1), (losses - losses[0]).square().sum(dim=1)], dim=1)
    statistics = replace(statistics, losses=sums)
    return statistics if keep_gram else statistics.compress_gram(GRAM_RANK)


def left_out(x: Tensor, y: Tensor, alpha: Callable[[Tensor], Tensor], gamma: float) -> tuple[Tensor, Tensor]:
    """
    Squared distances and log-volumes (images, classes) of each training image, as if it had not been there: its
    class's mean and scatter and the pooled scatter lose one direction each (Sherman & Morrison).

    Args:
        alpha (function): Degrees of freedom of classes → how far each is shrunk toward the pooled covariance.
        gamma (`float`): How far all are shrunk toward a sphere.
    """
    classes, d = int(y.max()) + 1, x.shape[1]
    counts = torch.bincount(y).double()
    means = torch.zeros(classes, d).double().index_add_(0, y, x) / counts[:, None]
    scatter = torch.stack([(x[y == k] - means[k]).T @ (x[y == k] - means[k]) for k in range(classes)])
    freedom = len(x) - classes - 1
    pooled, away, factor = scatter.sum(0) / freedom, x - means[y], (counts / (counts - 1))[y]
    distances, volumes = torch.empty(len(x), classes).double(), torch.empty(len(x), classes).double()
    for k in range(classes):
        for own in (False, True):
            images = (y == k) == own
            own_freedom = counts[k] - (2 if own else 1)
            share = 1 - float(alpha(own_freedom[None]))
            covariance = share * scatter[k] / own_freedom + (1 - share) * pooled
            sphere = gamma * covariance.diagonal().mean() * torch.eye(d).double()
            lower = torch.linalg.cholesky((1 - gamma) * covariance + sphere)
            toward = torch.linalg.solve_triangular(lower, (x[images] - means[k]).T, upper=False)
            lost = torch.linalg.solve_triangular(lower, away[images].T, upper=False)
            weight = (1 - gamma) * ((1 - share) / freedom + own * share / own_freedom) * factor[images]
            size = weight * lost.square().sum(0)
            distance = toward.square().sum(0) + weight * (toward * lost).sum(0).square() / (1 - size)
            distances[images, k] = distance * (factor[images].square() if own else 1.0)
            volumes[images, k] = 2 * lower.diagonal().log().sum() + torch.log1p(-size)
    return distances, volumes


def _left_out_of_ridge(statistics: ClassStatistics, x: Tensor, labels: Tensor) -> Tensor:
    """The ridge regression's log-posterior of each training image, `(images, K)`, learned without the image."""
    ridge, gram = RidgeClassifier(statistics), statistics.random_gram
    assert gram is not None
    features = torch.relu(x @ ridge.directions.double())
    lower = torch.linalg.cholesky(gram + ridge.strength * torch.eye(len(gram), dtype=torch.float64))
    leverage = torch.linalg.solve_triangular(lower, features.T, upper=False).square().sum(dim=0)[:, None]
    targets = F.one_hot(labels, len(statistics.classes))
    scores = (ridge.scores(x) - leverage * targets) / (1 - leverage).clamp(min=1e-3)
    return ridge.posterior(scores)


def mix(gaussian: Tensor, ridge: Tensor, weight: float) -> Tensor:
    """The geometric mean of two posteriors, `(batch, C)`, both and the result as log-probabilities."""
    return torch.log_softmax((gaussian + weight * ridge) / (1 + weight), dim=-1)


def ridge_weight(losses: Tensor | None) -> float:
    """The weight of least log-loss, if it is better than the prior by more than its standard error."""
    if losses is None:
        return WEIGHTS[0]
    total, squares = losses.unbind(dim=1)
    best = int(total.argmin())
    return WEIGHTS[best if total[0] - total[best] > squares[best].sqrt() else 0]


class EvidenceDiscriminant(Discriminant):
    """The [`RegularizedDiscriminant`], mixed with a [`RidgeClassifier`] where the evidence asks for it."""

    def __init__(self, statistics: ClassStatistics) -> None:
        super().__init__()
        self.gaussian = RegularizedDiscriminant(statistics)
        self.weight = 0.0 if statistics.gram is None else ridge_weight(statistics.losses)
        self.ridge = RidgeClassifier(statistics) if self.weight else None

    def answer(self, x: Tensor, gaussian: RegularizedDiscriminant) -> tuple[Tensor, Tensor]:
        posterior, scores = self.gaussian.answer(x, gaussian)
        if self.ridge is not None:
            posterior = mix(posterior, self.ridge.log_posterior(x), self.weight)
        return posterior, scores


class Familiarity(nn.Module):
    """
    Whether images are of any known class: the share of the left-out training images that lay at least as far from
    their class. Of known images, a share p has a lower value than p.
    """

    def __init__(self, distances: Tensor | None) -> None:
        super().__init__()
        counts = torch.zeros(len(EDGES) + 1) if distances is None else distances
        # Of no evidence, every image counts as known.
        self.mass = nn.Buffer((counts[:-1] / counts.sum().clamp(min=1)).float())  # between an edge and the one before

    def forward(self, ratios: Tensor) -> Tensor:
        """Distances in units of the class's typical distance, `(batch,)` → shares `(batch,)`; NaN stays NaN."""
        beyond = 1 - (ratios[:, None] >= EDGES.to(ratios)).to(ratios) @ self.mass.to(ratios)
        return torch.where(ratios.isfinite(), beyond.clamp(0, 1), torch.nan)
