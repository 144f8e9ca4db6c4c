"""Reads the image column and the label column of a dataset."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, Image, Value, config

from ..utils import list_names, spelling


Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LabeledImages:
    """Images with their labels or domains: the names that occur, and which of them each image has."""

    description: str  # for errors, such as "column 'label' of the train images"
    feature: Any  # its type
    names: tuple[str, ...]  # in the order of the column
    codes: Indices  # (rows,), indices into names
    images: Dataset  # the image column alone

    @classmethod
    def read(cls, dataset: Dataset, image_column: str, column: str, description: str) -> LabeledImages:
        """Reads the images and a column of labels or domains, and checks the column."""
        # `Image()` lets the trainer read the file itself, whatever the column says about mode and decoding.
        images = dataset.select_columns([image_column]).with_format(None).cast_column(image_column, Image())
        values = dataset.select_columns([column]).with_format("arrow")[:][column]
        feature, description = dataset.features[column], f"column {column!r} of {description}"
        is_text = isinstance(feature, Value) and feature.dtype in ("string", "large_string")
        if not (isinstance(feature, ClassLabel) or is_integer(feature) or is_text):
            raise ValueError(f"{description} must hold one ClassLabel, integer or string per image, found {feature}")
        _check_no_nulls(values, description)
        found: list[Any] = sorted(pc.unique(values).to_pylist())
        codes: Indices = pc.index_in(values, value_set=pa.array(found, values.type)).to_numpy().astype(np.int64)
        count = len(feature.names) if isinstance(feature, ClassLabel) else np.inf
        if wrong := [code for code, value in enumerate(found) if not is_text and not 0 <= value < count]:
            row = np.flatnonzero(codes == wrong[0])[0]
            raise ValueError(f"row {row} of {description} is {found[wrong[0]]}, which names no class")
        names = tuple(feature.names[value] if isinstance(feature, ClassLabel) else str(value) for value in found)
        return cls(description, feature, names, codes, images)

    def reorder(self, names: Sequence[str]) -> LabeledImages:
        """Returns the images with other `names`, which must include all that occur."""
        position = {name: index for index, name in enumerate(names)}
        if unknown := [name for name in self.names if name not in position]:
            known = {spelling(name): name for name in names}
            alike = [f"{name!a} for {known[spelling(name)]!a}" for name in unknown if spelling(name) in known]
            found = list_names(unknown) + (f" (spelled differently: {', '.join(alike[:5])})" if alike else "")
            raise ValueError(f"{self.description} has values outside the label space of the train images: {found}")
        lookup = np.array([position[name] for name in self.names], dtype=np.int64)
        return replace(self, names=tuple(names), codes=lookup[self.codes])

    def order_by(self, order: Sequence[str | int], argument: str) -> LabeledImages:
        """Returns the images with their names in an order, given by names or labels, each once."""
        by_label: dict[Any, str] = dict(enumerate(getattr(self.feature, "names", ())))
        names = [item if isinstance(item, str) else by_label.get(item, str(item)) for item in order]
        missing, extra = Counter(self.names) - Counter(names), Counter(names) - Counter(self.names)
        if missing or extra:
            raise ValueError(
                f"{argument} needs each of the {len(self.names)} in the train images once; missing: "
                f"{list_names(missing) or 'none'}; repeated or without a train image: {list_names(extra) or 'none'}"
            )
        return self.reorder(names)

    def with_labels(self, ids: Mapping[str, int]) -> Dataset:
        """Returns a dataset of the images and `labels`, from ids by class name."""
        lookup = np.array([ids[name] for name in self.names], dtype=np.int64)
        # Labels are added to the whole dataset, of which tasks select rows: adding a column to a dataset that has an
        # indices mapping writes all its images.
        images = self.images
        if images._indices is not None and images.cache_files:  # would be written beside the data, by default
            path = Path(config.HF_DATASETS_CACHE, "peft_luca", f"images-{images._fingerprint}.arrow")
            images = images.flatten_indices(cache_file_name=str(path))
        dataset = images.add_column("labels", lookup[self.codes], feature=Value("int64"))
        (column,) = self.images.column_names
        _check_no_nulls(dataset.data.column(column), f"column {column!r}")
        return dataset

    def hold_out(self, test_size: float, seed: int) -> npt.NDArray[np.bool_]:
        """Returns which rows to test on: the same share of each class, at least one image if it has two."""
        if not 0 < test_size < 1:
            raise ValueError(f"test_size must be a share between 0 and 1, got {test_size}")
        held_out = np.zeros(len(self.codes), dtype=bool)
        for code, name in enumerate(self.names):
            rows = np.flatnonzero(self.codes == code)
            # Seeded by name, so that the test images of a class do not depend on the other classes.
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            held_out[rng.permutation(rows)[: min(max(round(test_size * len(rows)), 1), len(rows) - 1)]] = True
        return held_out

    def files(self) -> set[str]:
        """Returns the paths of images that are stored as files, without reading them."""
        (column,) = self.images.column_names
        parts = self.images.cast_column(column, Image(decode=False)).flatten()
        paths = parts.select_columns([f"{column}.path"]).with_format("arrow")[:].column(0)
        # Images that are stored in the dataset have a path too: a mere file name, which several may share.
        return {path for path in paths.to_pylist() if path and (os.path.isabs(path) or "://" in path)}


def has_labels(dataset: Any, column: str) -> bool:
    """Whether some image has a label: test images of a competition have none, or -1."""
    if not isinstance(dataset, Dataset) or column not in dataset.features:
        return not isinstance(dataset, Dataset)  # of a stream it is not known yet
    if not isinstance(dataset.features[column], Value | ClassLabel):
        return True  # it is refused when the column is read
    labels = dataset.select_columns([column]).with_format("arrow")[:][column]
    return any(label not in (-1, None, "") for label in pc.unique(labels).to_pylist())


def is_integer(feature: Any) -> bool:
    return isinstance(feature, Value) and bool(pa.types.is_integer(feature.pa_type))


def _check_no_nulls(values: Any, description: str) -> None:
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py()
        raise ValueError(f"{description} is empty (None) in {values.null_count} rows, first in row {row}; remove them")
