"""Additive statistics of frozen features, one part per expert; see closed_form.py for what is made of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from ..hub.validation import MAX_JSON_BYTES, Wanted, parse_object, read_tensors
from ..utils import InvalidExpertError, atomic_write, check_classes, pluralize, show


STATISTICS_NAME = "statistics.safetensors"
STATISTICS_FORMAT = 1
DEFAULT_RANK = 64
RANDOM_SEED = 0
# Images, or rows, that are in float64 at a time.
BLOCK = 4096
MAX_IMAGES = 1e12  # of a class
# Variance of unit features below which images count as the same one: that of float32's rounding.
LEAST_VARIANCE = 1e-12
TOLERANCE = 1e-3  # of numbers in a file, which were rounded to float32


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def unit_features(z: Tensor, mean: Tensor | None = None, std: Tensor | None = None) -> Tensor:
    """[CLS], (batch, d), standardised by the reference and brought to length 1, in the type of `z`."""
    if mean is not None and std is not None:
        z = (z - mean.to(z)) / std.to(z)
    return z / z.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)


@dataclass(frozen=True)
class ClassStatistics:
    """
    Counts, means and scatter of the frozen features of each class. Parts of several experts are put together by
    [`pool`] to what one pass over all their images gives; nothing is ever subtracted.

    Attributes:
        classes (`tuple[str, ...]`): Names of the K classes.
        counts (`torch.Tensor` of shape `(K,)`): Images per class.
        means (`torch.Tensor` of shape `(K, d)`): float64.
        factors (`tuple` of K tensors of shape `(r, d)`):
            The scatter of a class, Σ(x-μ)(x-μ)ᵀ, is factorᵀ · factor + diag(remainder). float32.
        remainder (`torch.Tensor` of shape `(K, d)`): Diagonal of what the rank leaves out: zero for full scatter.
        errors (`torch.Tensor` of shape `(K,)`):
            Frobenius norm of what factors and remainder do not give back, relative to that of the scatter. For a class
            put together of several parts, a bound.
        gram (`torch.Tensor` of shape `(M, M)`, *optional*): Gram matrix of the seeded random ReLU features, float32.
        random_sums (`torch.Tensor` of shape `(K, M)`, *optional*): Their sum over each class, float64.
    """

    classes: tuple[str, ...]
    counts: Tensor
    means: Tensor
    factors: tuple[Tensor, ...]
    remainder: Tensor
    errors: Tensor
    gram: Tensor | None = field(default=None, repr=False)
    random_sums: Tensor | None = field(default=None, repr=False)

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
        Statistics of the images of one task.

        Args:
            features (`torch.Tensor` of shape `(images, d)`): From [`unit_features`], unless `prepare` is given.
            labels (`torch.Tensor` of shape `(images,)`): Positions in `classes`.
            classes (`Sequence[str]`): Names of the classes.
            rank (`int`, *optional*, defaults to `64`):
                Rows that the scatter of a class is kept in; `None` for all of it. A class of up to `rank` + 1 images
                is kept exactly either way.
            random_features (`int`, *optional*, defaults to `0`):
                M, for the `ridge` router: the Gram matrix takes 4·M² bytes (400 MB for 10,000) in every expert.
            prepare (function, *optional*):
                What makes unit features of `features`, in float64, a class or a block at a time: all of them at once
                may be more than fits into memory.

        Raises:
            ValueError: a class has no image, or a number is not finite.
        """
        check_classes(classes)
        if not isinstance(features, Tensor) or features.ndim != 2 or not features.is_floating_point():
            raise ValueError(f"features must be a tensor of numbers, (images, d), got {_kind(features)}.")
        whole = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.shape == features.shape[:1]
        if not whole or bool((labels < 0).any()):
            raise ValueError(
                f"labels must be a tensor of {len(features)} positions in classes, from 0 on, got {_kind(labels)}."
            )
        for name, number in (("rank", rank), ("random_features", random_features)):
            if number is not None and (not isinstance(number, int) or number < 0):
                raise ValueError(f"{name} must be a whole number of at least 0, got {number!r}.")
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

        d = features.shape[1]
        means = torch.zeros(len(classes), d, dtype=torch.float64)
        remainder, errors = torch.zeros(len(classes), d, dtype=torch.float64), torch.zeros(len(classes)).double()
        factors = []
        for k in range(len(classes)):
            x = take(features[labels == k])
            means[k] = x.mean(dim=0)
            factor, remainder[k], errors[k] = _factorise(x - means[k], rank)
            factors.append(factor)
        gram = sums = None
        if random_features:
            directions = projection(d, random_features)
            gram = torch.zeros(random_features, random_features, dtype=torch.float64)
            sums = torch.zeros(len(classes), random_features, dtype=torch.float64)
            for rows, y in zip(features.split(BLOCK), labels.cpu().split(BLOCK), strict=True):
                h = torch.relu(take(rows) @ directions)
                gram.addmm_(h.T, h)
                sums.index_add_(0, y, h)
            gram = gram.float()
        return cls(tuple(classes), counts.double(), means, tuple(factors), remainder.float(), errors, gram, sums)

    @cached_property
    def within(self) -> tuple[Tensor, float]:
        """Pooled covariance within classes, (d, d), in float64, and its degrees of freedom."""
        d = self.means.shape[1]
        total = torch.diag(self.remainder.double().sum(dim=0))
        # Products in float32, as the factors are, a block at a time; their sum in float64.
        for rows in torch.cat(self.factors).split(BLOCK):
            total += rows.T @ rows
        freedom = float(self.counts.sum()) - len(self.counts)
        if freedom < 1 or not total.trace() / freedom > LEAST_VARIANCE:
            # One image a class, or the same again: nothing is known of the spread, so that only distances count.
            return torch.eye(d, dtype=torch.float64) / d, 0.0
        return total / freedom, freedom

    @property
    def nbytes(self) -> int:
        """Bytes that the statistics take, in memory and in their file."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values())

    def scatter(self, k: int) -> Tensor:
        """Σ(x-μ)(x-μ)ᵀ of a class, (d, d), in float64, as far as it is kept."""
        factor = self.factors[k].double()
        return factor.T @ factor + torch.diag(self.remainder[k].double())

    # ---- their own file ------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {
            "counts": self.counts,
            "means": self.means,
            "factor_rows": torch.tensor([len(factor) for factor in self.factors]),
            "factors": torch.cat(self.factors),
            "remainder": self.remainder,
            "errors": self.errors,
        }
        if self.gram is not None and self.random_sums is not None:
            tensors |= {"gram": self.gram, "random_sums": self.random_sums}
        return tensors

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `statistics.safetensors` into a folder, whole or not at all."""
        target = Path(directory) / STATISTICS_NAME
        # One entry alone: safetensors writes several in an order that differs from one time to the next.
        about = {"format": STATISTICS_FORMAT, "classes": self.classes}
        metadata = {"statistics": json.dumps(about, ensure_ascii=False)}
        with atomic_write(target) as temporary:
            save_file({k: v.contiguous() for k, v in self._tensors().items()}, temporary, metadata)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> ClassStatistics:
        """
        Read the `statistics.safetensors` of a folder, which may be a stranger's.

        Raises:
            InvalidExpertError: it is not such a file, or what it says cannot be.
        """
        path = Path(directory) / STATISTICS_NAME
        try:
            tensors, header = read_tensors(path, _wanted, MAX_JSON_BYTES)
            classes = _classes_of(header)
            _check_numbers(tensors)
        except (InvalidExpertError, _Refused) as error:
            own = f"{path} does not hold the statistics of an expert: {error}."
            raise InvalidExpertError(
                f"{error if isinstance(error, InvalidExpertError) else own} Get the file from the expert's owner "
                "again, or use a router that needs none, such as 'entropy'."
            ) from error
        return cls(
            classes,
            tensors["counts"],
            tensors["means"],
            tuple(tensors["factors"].split(tensors["factor_rows"].tolist())),
            tensors["remainder"],
            tensors["errors"],
            tensors.get("gram"),
            tensors.get("random_sums"),
        )


class _Refused(ValueError):
    """What is wrong with a file of statistics."""


def _classes_of(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Class names that the header of a file of statistics has."""
    metadata = header.get("__metadata__")
    about = metadata.get("statistics") if isinstance(metadata, dict) else None
    if not isinstance(about, str):
        raise _Refused(f"its header does not say of which classes they are, but {show(metadata)}")
    try:
        values = parse_object(about, "what its header says of itself")
        if values.get("format") != STATISTICS_FORMAT:
            raise _Refused(f"its format is {show(values.get('format'))}, and this version reads {STATISTICS_FORMAT}")
        if not isinstance(values.get("classes"), list):
            raise _Refused(f"its classes must be a list, got {show(values.get('classes'))}")
        return tuple(check_classes(values["classes"]))
    except ValueError as error:
        raise error if isinstance(error, _Refused) else _Refused(str(error).rstrip(".")) from error


def _wanted(header: Mapping[str, Any]) -> Wanted:
    """Types and shapes of the tensors in a file of statistics with this header: K and d, and what they go with."""

    def size(name: str) -> int:
        entry = header.get(name)
        shape = entry.get("shape") if isinstance(entry, dict) else None
        found = shape[-1 if name == "means" else 0] if isinstance(shape, list) and shape else None
        if type(found) is not int or found < (name != "factors"):  # no class needs a factor
            raise _Refused(f"its {name} has the shape {show(shape)}")
        return found

    k, d = len(_classes_of(header)), size("means")
    wanted: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        "counts": (("F64",), (k,)),
        "means": (("F64",), (k, d)),
        "factor_rows": (("I64",), (k,)),
        "factors": (("F32",), (size("factors"), d)),
        "remainder": (("F32",), (k, d)),
        "errors": (("F64",), (k,)),
    }
    if "gram" in header or "random_sums" in header:
        m = size("gram")
        wanted |= {"gram": (("F32",), (m, m)), "random_sums": (("F64",), (k, m))}
    return wanted


def _check_numbers(tensors: Mapping[str, Tensor]) -> None:
    """Refuse numbers that no unit features have. Beyond these bounds a classifier could overflow."""
    counts, means, rows = tensors["counts"], tensors["means"], tensors["factor_rows"]
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise _Refused(f"{name} holds numbers that are not finite")
    if not ((counts >= 1) & (counts <= MAX_IMAGES) & (counts == counts.round())).all():
        raise _Refused(f"counts must be whole numbers from 1 to {MAX_IMAGES:.0e}, got {show(counts[:5].tolist())}")
    n, d = len(tensors["factors"]), means.shape[1]
    # No scatter has more rows: a classifier's memory grows with their square.
    if not ((rows >= 0) & (rows <= min(n, d)) & (rows < counts)).all() or int(rows.sum()) != n:
        raise _Refused(
            f"factor_rows must be from 0 to {d}, below the classes' counts, and {n} together, got "
            f"{show(rows[:5].tolist())}"
        )
    if not (means.norm(dim=1) <= 1 + TOLERANCE).all():
        raise _Refused("means must be those of features of length 1, and some are longer")
    if not (tensors["remainder"] >= 0).all() or not ((tensors["errors"] >= 0) & (tensors["errors"] <= 1.01)).all():
        raise _Refused("remainder must not be below 0, and errors must be from 0 to 1")
    owner = torch.repeat_interleave(rows)
    lengths = torch.linalg.vector_norm(tensors["factors"], dim=1).double()
    spread = tensors["remainder"].double().sum(dim=1).index_add_(0, owner, lengths.square())
    if not (spread <= counts * (1 + TOLERANCE)).all():
        raise _Refused("factors and remainder spread wider than features of length 1 can")
    if "gram" in tensors:
        # A random feature is at most as large as its direction, whose square has d degrees of freedom.
        square, images = 10.0 * d + 100.0, float(counts.sum())
        sums = tensors["random_sums"]
        if not (tensors["gram"].abs() <= images * square).all():
            raise _Refused(f"gram must be that of {images:.0f} images, and has larger numbers")
        if not ((sums >= 0) & (sums <= counts[:, None] * square**0.5)).all():
            raise _Refused("random_sums must be from 0 to what the classes' images can sum up to")


def pool(parts: Mapping[str, ClassStatistics]) -> ClassStatistics:
    """
    Put the statistics of several experts together. A class that several have is one class of all their images. The
    sums run over the experts sorted by name, so that their order changes no bit.

    Args:
        parts (`Mapping[str, ClassStatistics]`): Expert → its part.

    Returns:
        [`ClassStatistics`]: Of all classes, sorted by name. It has random features when all parts have equally many.
    """
    found: dict[str, list[tuple[ClassStatistics, int]]] = {}
    for _, part in sorted(parts.items()):
        for k, name in enumerate(part.classes):
            found.setdefault(name, []).append((part, k))
    classes = tuple(sorted(found))
    merged = [_merge(found[name]) for name in classes]
    counts, means, factors, remainder, errors = zip(*merged, strict=True)
    gram = sums = None
    widths = {0 if part.gram is None else len(part.gram) for part in parts.values()}
    if len(widths) == 1 and widths != {0}:
        width = widths.pop()
        gram = torch.zeros(width, width, dtype=torch.float64)
        sums = torch.zeros(len(classes), width, dtype=torch.float64)
        where = {name: i for i, name in enumerate(classes)}
        for _, part in sorted(parts.items()):
            gram += torch.as_tensor(part.gram)
            own = torch.tensor([where[name] for name in part.classes])
            sums.index_add_(0, own, torch.as_tensor(part.random_sums))
    return ClassStatistics(
        classes,
        torch.stack(counts),
        torch.stack(means),
        factors,
        torch.stack(remainder),
        torch.stack(errors),
        gram,
        sums,
    )


def _merge(parts: list[tuple[ClassStatistics, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Count, mean, factor, remainder and error of one class, of the parts that have it."""
    part, k = parts[0]
    n, mean, rows, remainder, error = (
        part.counts[k],
        part.means[k],
        [part.factors[k]],
        part.remainder[k],
        part.errors[k],
    )
    for part, k in parts[1:]:
        m, other = part.counts[k], part.means[k]
        # Scatters add, and the distance of the means adds one direction: Chan, Golub & LeVeque (1983).
        rows += [part.factors[k], ((n * m / (n + m)).sqrt() * (other - mean)).float()[None]]
        mean = mean + (other - mean) * (m / (n + m))
        n, remainder, error = n + m, remainder + part.remainder[k], torch.maximum(error, part.errors[k])
    return n, mean, rows[0] if len(rows) == 1 else torch.cat(rows), remainder, error


def _factorise(centred: Tensor, rank: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Centred features, (n, d) → factor (r, d) of their scatter, the diagonal that it leaves out, and the error."""
    n, d = centred.shape
    kept = min(n - 1, d) if rank is None else min(n - 1, d, rank)
    if n <= d:
        _, values, vectors = torch.linalg.svd(centred, full_matrices=False)
    else:
        eigenvalues, columns = torch.linalg.eigh(centred.T @ centred)
        values, vectors = eigenvalues.clamp(min=0).sqrt().flip(0), columns.T.flip(0)
    factor = (values[:kept, None] * vectors[:kept]).float()
    if kept == min(n - 1, d):
        return factor, torch.zeros(d, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    left = values[kept:, None] * vectors[kept:]  # (rest, d)
    diagonal = left.square().sum(dim=0)
    off = (left.T @ left) - torch.diag(diagonal)
    return factor, diagonal, off.norm() / values.square().norm().clamp(min=1e-300)


def projection(d: int, width: int) -> Tensor:
    """Directions of the seeded random ReLU features, (d, M), the same on every machine (RanPAC, arXiv 2307.02251)."""
    return torch.from_numpy(np.random.RandomState(RANDOM_SEED).standard_normal((d, width)))
