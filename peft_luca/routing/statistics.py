"""Additive class statistics of frozen features, one part per expert. `discriminants.py` makes classifiers of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..utils import check_classes, pluralize


DEFAULT_RANK = 64
RANDOM_SEED = 0
# Images, or rows, that are in float64 at a time.
BLOCK = 4096
# Count, mean, factor, remainder and error of one class.
_OneClass = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# Below this variance, unit features count as equal: it is about the rounding error of float32.
LEAST_VARIANCE = 1e-12


def unit_features(z: Tensor, mean: Tensor | None = None, std: Tensor | None = None) -> Tensor:
    """Standardizes [CLS] vectors, (batch, d), by the reference and scales them to length 1, in the dtype of `z`."""
    if mean is not None and std is not None:
        z = (z - mean.to(z)) / std.to(z)
    return z / z.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)


@dataclass(frozen=True)
class ClassStatistics:
    """
    Counts, means and scatter of the frozen features of each class. [`pool`] adds the statistics of several experts
    and gives what one pass over all their images gives.

    Attributes:
        classes (`tuple[str, ...]`): Names of the K classes.
        counts (`torch.Tensor` of shape `(K,)`): Images per class, float64.
        means (`torch.Tensor` of shape `(K, d)`): float64.
        factors (`tuple` of K tensors of shape `(r, d)`):
            The scatter of a class, Σ(x-μ)(x-μ)ᵀ, is factorᵀ · factor + diag(remainder). float32.
        remainder (`torch.Tensor` of shape `(K, d)`):
            Diagonal of the scatter that the rank leaves out, float32. Zero if the full scatter is kept.
        errors (`torch.Tensor` of shape `(K,)`):
            Frobenius norm of the scatter that is lost, relative to the norm of the scatter, float64. An upper bound
            for a class that several experts have.
        gram (`torch.Tensor` of shape `(M, M)`, *optional*): Gram matrix of the random ReLU features, float32.
        random_sums (`torch.Tensor` of shape `(K, M)`, *optional*): Sums of the random features per class, float64.
        gram_factor (`torch.Tensor` of shape `(R, M)`, *optional*):
            In place of `gram`: within the classes, the matrix is factorᵀ · factor + diag(remainder). float16.
        gram_remainder (`torch.Tensor` of shape `(M,)`, *optional*): float32.
        distances (`torch.Tensor` of shape `(97,)`, *optional*):
            Histogram of how far each training image, left out, lies from its class. See `evidence.py`. float64.
        losses (`torch.Tensor` of shape `(6, 2)`, *optional*):
            Log-losses of the training images, left out, for each weight of the ridge regression. float64.
    """

    classes: tuple[str, ...]
    counts: Tensor
    means: Tensor
    factors: tuple[Tensor, ...]
    remainder: Tensor
    errors: Tensor
    gram: Tensor | None = field(default=None, repr=False)
    random_sums: Tensor | None = field(default=None, repr=False)
    gram_factor: Tensor | None = field(default=None, repr=False)
    gram_remainder: Tensor | None = field(default=None, repr=False)
    distances: Tensor | None = field(default=None, repr=False)
    losses: Tensor | None = field(default=None, repr=False)

    @classmethod
    @torch.no_grad()
    def collect(
        cls,
        features: Tensor,
        labels: Tensor,
        classes: Sequence[str],
        rank: int | None = DEFAULT_RANK,
        random_features: int = 0,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> ClassStatistics:
        """
        Computes the statistics of the images of one task.

        Args:
            features (`torch.Tensor` of shape `(images, d)`): From [`unit_features`], unless `prepare` is given.
            labels (`torch.Tensor` of shape `(images,)`): Positions in `classes`.
            classes (`Sequence[str]`): Names of the classes.
            rank (`int`, *optional*, defaults to `64`):
                Number of rows that the scatter of a class is kept in; `None` keeps all of it. A class of up to
                `rank` + 1 images is exact either way.
            random_features (`int`, *optional*, defaults to `0`):
                M, for the `ridge` router. The Gram matrix takes 4·M² bytes in every expert (400 MB for 10,000).
            prepare (function, *optional*):
                Turns `features`, in float64, into unit features. It is called per class and per block, so that not
                all of them are in memory at once.
        """
        check_classes(classes)
        if rank is not None and rank < 0:
            raise ValueError(f"rank must be a whole number of at least 0, or None, got {rank}.")
        counts = torch.bincount(labels.cpu(), minlength=len(classes))
        if len(counts) != len(classes) or not counts.all():
            raise ValueError(
                f"statistics need an image of every class, but the images per label are {counts.tolist()} for the "
                f"{pluralize(len(classes), 'class')} {list(classes)[:5]}."
            )

        def take(rows: Tensor) -> Tensor:
            x = rows.double().cpu()
            x = x if prepare is None else prepare(x)
            if not x.isfinite().all():
                raise ValueError("statistics need finite features, but some are infinite or not a number.")
            return x

        parts = [_summarize(take(features[labels == k]), rank) for k in range(len(classes))]
        gram = sums = None
        if random_features:
            directions = random_directions(features.shape[1], random_features)
            gram = torch.zeros(random_features, random_features, dtype=torch.float64)
            sums = torch.zeros(len(classes), random_features, dtype=torch.float64)
            for rows, y in zip(features.split(BLOCK), labels.cpu().split(BLOCK), strict=True):
                h = torch.relu(take(rows) @ directions)  # (block, M)
                gram.addmm_(h.T, h)
                sums.index_add_(0, y, h)
            gram = gram.float()
        return _stack(classes, parts, gram, sums)

    @cached_property
    def within(self) -> tuple[Tensor, float]:
        """Pooled covariance within classes, (d, d), float64, and its degrees of freedom."""
        d = self.means.shape[1]
        total = torch.diag(self.remainder.double().sum(dim=0))
        # Products in float32, as the factors are, one block at a time; their sum in float64.
        for rows in torch.cat(self.factors).split(BLOCK):
            total += rows.T @ rows
        freedom = float(self.counts.sum()) - len(self.counts)
        if freedom < 1 or not total.trace() / freedom > LEAST_VARIANCE:
            # One image per class, or equal images: the spread is unknown, so a sphere leaves distances alone.
            return torch.eye(d, dtype=torch.float64) / d, 0.0
        return total / freedom, freedom

    @property
    def random_gram(self) -> Tensor | None:
        """Gram matrix of the random features, `(M, M)`, float64, as far as it is kept."""
        if self.gram_factor is None or self.gram_remainder is None:
            return None if self.gram is None else self.gram.double()
        rows = torch.cat([self.gram_factor.double(), self._mean_rows])
        return rows.T @ rows + torch.diag(self.gram_remainder.double())

    @property
    def _mean_rows(self) -> Tensor:
        """Rows, `(K, M)`, of the part of the Gram matrix that is between the classes."""
        assert self.random_sums is not None
        return self.random_sums / self.counts.sqrt()[:, None]

    def compress_gram(self, rank: int) -> ClassStatistics:
        """The same with the Gram matrix in `rank` rows and a diagonal."""
        assert self.gram is not None
        within = self.gram.double() - self._mean_rows.T @ self._mean_rows
        with torch.random.fork_rng():  # a matrix of thousands of rows takes ten times as long to decompose in full
            torch.manual_seed(RANDOM_SEED)
            vectors, values, _ = torch.svd_lowrank(within, q=min(rank, len(within)), niter=4)
        factor = (vectors * values.sqrt()).T.half()
        remainder = (within.diagonal() - factor.double().square().sum(dim=0)).clamp(min=0).float()
        return replace(self, gram=None, gram_factor=factor, gram_remainder=remainder)

    def tensors(self) -> dict[str, Tensor]:
        """The statistics as one flat dictionary of tensors, as their file holds them."""
        rows = torch.tensor([len(factor) for factor in self.factors])
        values = vars(self) | {"factors": torch.cat(self.factors), "factor_rows": rows}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def pool(parts: Mapping[str, ClassStatistics]) -> ClassStatistics:
    """
    Adds the statistics of several experts, given by name. A class that several experts have becomes one class of all
    their images. Classes and experts are taken in the order of their names, so the order of `parts` changes no bit of
    the result. It has random features if all parts have equally many.
    """
    ordered = [parts[name] for name in sorted(parts)]
    found: dict[str, list[tuple[ClassStatistics, int]]] = {}
    for part in ordered:
        for k, name in enumerate(part.classes):
            found.setdefault(name, []).append((part, k))
    classes = sorted(found)
    gram: Tensor | None = None
    sums: Tensor | None = None
    if have_equal_random_features(ordered):
        gram = sum(part.random_gram for part in ordered)  # type: ignore
        sums = torch.stack([sum(part.random_sums[k] for part, k in found[name]) for name in classes])  # type: ignore
    pooled = _stack(classes, [_merge(found[name]) for name in classes], gram, sums)
    distances = add_up([part.distances for part in ordered if part.distances is not None])
    return replace(pooled, distances=distances, losses=add_up([part.losses for part in ordered]))


def have_equal_random_features(parts: Sequence[ClassStatistics]) -> bool:
    widths = {None if part.random_sums is None else part.random_sums.shape[1] for part in parts}
    return len(widths) == 1 and None not in widths


def add_up(evidence: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of some evidence over experts; `None` if one of them has none."""
    found = [tensor for tensor in evidence if tensor is not None]
    return torch.stack(found).sum(dim=0) if found and len(found) == len(evidence) else None


def _stack(
    classes: Sequence[str], parts: Sequence[_OneClass], gram: Tensor | None, sums: Tensor | None
) -> ClassStatistics:
    counts, means, factors, *rest = zip(*parts, strict=True)
    remainder, errors = map(torch.stack, rest)
    return ClassStatistics(
        tuple(classes), torch.stack(counts), torch.stack(means), factors, remainder, errors, gram, sums
    )


def _merge(parts: list[tuple[ClassStatistics, int]]) -> _OneClass:
    """Adds the parts that have a class."""
    part, k = parts[0]
    n, mean, remainder, error = part.counts[k], part.means[k], part.remainder[k], part.errors[k]
    rows = [part.factors[k]]
    for part, k in parts[1:]:
        m, other = part.counts[k], part.means[k]
        # Scatters add, and the distance of the means adds one direction: Chan, Golub & LeVeque (1983).
        rows += [part.factors[k], ((n * m / (n + m)).sqrt() * (other - mean)).float()[None]]
        mean = mean + (other - mean) * (m / (n + m))
        n, remainder, error = n + m, remainder + part.remainder[k], torch.maximum(error, part.errors[k])
    return n, mean, rows[0] if len(rows) == 1 else torch.cat(rows), remainder, error


def _summarize(x: Tensor, rank: int | None) -> _OneClass:
    """Summarizes the features of one class, (n, d) in float64."""
    n, d = x.shape
    mean = x.mean(dim=0)
    centred, count = x - mean, torch.tensor(n, dtype=torch.float64)
    full = min(n - 1, d)
    kept = full if rank is None else min(full, rank)
    if n <= d:
        _, values, vectors = torch.linalg.svd(centred, full_matrices=False)
    else:
        eigenvalues, columns = torch.linalg.eigh(centred.T @ centred)
        values, vectors = eigenvalues.clamp(min=0).sqrt().flip(0), columns.T.flip(0)
    factor = (values[:kept, None] * vectors[:kept]).float()
    if kept == full:
        return count, mean, factor, centred.new_zeros(d).float(), torch.zeros((), dtype=torch.float64)
    left = values[kept:, None] * vectors[kept:]  # (rest, d)
    diagonal = left.square().sum(dim=0)
    off = (left.T @ left) - torch.diag(diagonal)
    return count, mean, factor, diagonal.float(), off.norm() / values.square().norm().clamp(min=1e-300)


def random_directions(d: int, width: int) -> Tensor:
    """Directions of the random ReLU features, (d, M), equal on every machine (RanPAC, arXiv 2307.02251)."""
    return torch.from_numpy(np.random.RandomState(RANDOM_SEED).standard_normal((d, width)))
