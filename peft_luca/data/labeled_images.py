"""Reads the image column and the label column of a dataset."""

from __future__ import annotations

import os
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, Image, Value

from ..utils import list_names


Indices: TypeAlias = npt.NDArray[np.int64]

LABELS = "labels"


@dataclass(frozen=True)
class LabeledImages:
    """The images of a dataset and their classes."""

    description: str  # what errors call the dataset, such as "the test images of task 'task_1'"
    images: Dataset  # the image column alone
    classes: tuple[str, ...]
    codes: Indices  # (images,), indices into classes
    integer_labels: bool  # whether the label column holds integers

    @classmethod
    def read(cls, dataset: Dataset, image_column: str, label_column: str, description: str) -> LabeledImages:
        """Reads and checks both columns. `classes` are those that occur, in the order of the label column."""
        classes, codes = read_codes(dataset, label_column, "label_column", description)
        _check_column(dataset, image_column, "image_column", description)
        feature = dataset.features[image_column]
        if not isinstance(feature, Image) or not feature.decode or feature.mode not in (None, "RGB"):
            raise ValueError(
                f"column {image_column!r} of {description} must be decoded images in RGB, found {feature}; use "
                f"dataset.cast_column({image_column!r}, datasets.Image())"
            )
        images = dataset.select_columns([image_column]).with_format(None)
        return cls(description, images, classes, codes, is_integer(dataset.features[label_column]))

    def reorder(self, classes: Sequence[str]) -> LabeledImages:
        """Returns the same images with other `classes`, which must include all that occur."""
        codes = recode(self.classes, self.codes, classes, f"the label column of {self.description}")
        return replace(self, classes=tuple(classes), codes=codes)

    def with_labels(self, ids: Mapping[str, int]) -> Dataset:
        """Returns a dataset of the images and `labels`, from ids by class name."""
        lookup = np.array([ids[name] for name in self.classes], dtype=np.int64)
        # Labels are added to the whole dataset, of which tasks select rows: adding a column to a dataset that has an
        # indices mapping writes all its images.
        dataset = self.images.add_column(LABELS, lookup[self.codes], feature=Value("int64"))
        (image_column,) = self.images.column_names
        _check_no_nulls(dataset.data.column(image_column), f"column {image_column!r} of {self.description}")
        return dataset

    def hold_out(self, test_size: float, seed: int) -> tuple[Indices, Indices]:
        """Splits the rows into train and test: the same share of each class, and at least one of each."""
        if not 0 < test_size < 1:
            raise ValueError(f"test_size must be a share between 0 and 1, got {test_size}")
        held_out = np.zeros(len(self.codes), dtype=bool)
        for code, name in enumerate(self.classes):
            rows = np.flatnonzero(self.codes == code)
            if len(rows) < 2:
                raise ValueError(f"class {name!r} has one image; test_size needs at least two of every class")
            # Seeded by name, so that the test images of a class do not depend on the other classes.
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            held_out[rng.permutation(rows)[: min(max(round(test_size * len(rows)), 1), len(rows) - 1)]] = True
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)

    def files(self) -> set[str]:
        """Returns the paths of images that are stored as files, without reading them."""
        (column,) = self.images.column_names
        parts = self.images.cast_column(column, Image(decode=False)).flatten()
        paths = parts.select_columns([f"{column}.path"]).with_format("arrow")[:].column(0)
        # Images that are stored in the dataset have a path too: a mere file name, which several may share.
        return {path for path in paths.to_pylist() if path and (os.path.isabs(path) or "://" in path)}


def find_image_column(dataset: Dataset) -> str:
    """Returns the name of the only image column."""
    columns: list[str] = [name for name, feature in dataset.features.items() if isinstance(feature, Image)]
    if len(columns) != 1:
        raise ValueError(
            f"image_column is not given, and there are {len(columns)} columns of images ({columns}); pass "
            f"image_column, one of {dataset.column_names}, after cast_column(image_column, datasets.Image()) if it "
            "has another type"
        )
    return columns[0]


def is_integer(feature: Any) -> bool:
    return isinstance(feature, Value) and bool(pa.types.is_integer(feature.pa_type))


def read_codes(dataset: Dataset, column: str, argument: str, description: str) -> tuple[tuple[str, ...], Indices]:
    """Returns the names that occur in a column, in the column's order, and for each row an index into them."""
    _check_column(dataset, column, argument, description)
    feature = dataset.features[column]
    is_text = isinstance(feature, Value) and (
        pa.types.is_string(feature.pa_type) or pa.types.is_large_string(feature.pa_type)
    )
    if not (isinstance(feature, ClassLabel) or is_integer(feature) or is_text):
        raise ValueError(
            f"column {column!r} of {description} must hold one ClassLabel, integer or string per image, found "
            f"{feature}; cast_column it, or map it to one of these"
        )
    column_values = dataset.select_columns([column]).with_format("arrow")[:][column]
    _check_no_nulls(column_values, f"column {column!r} of {description}")
    values: list[Any] = sorted(pc.unique(column_values).to_pylist())
    codes: Indices = pc.index_in(column_values, value_set=pa.array(values, column_values.type)).to_numpy()
    if not is_text:
        largest = len(feature.names) - 1 if isinstance(feature, ClassLabel) else np.inf
        for code, value in enumerate(values):
            if not 0 <= value <= largest:
                raise ValueError(
                    f"row {np.flatnonzero(codes == code)[0]} of column {column!r} of {description} is {value}, which "
                    "names no class; give the row its label or remove it"
                )
    names = tuple(feature.names[value] if isinstance(feature, ClassLabel) else str(value) for value in values)
    return names, codes.astype(np.int64)


def _check_column(dataset: Dataset, column: str, argument: str, description: str) -> None:
    if column not in dataset.column_names:
        raise ValueError(f"{description} have no column {column!r}; pass {argument}, one of {dataset.column_names}")


def _check_no_nulls(values: Any, description: str) -> None:
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py()
        raise ValueError(
            f"{description} is empty (None) in {values.null_count} rows, first in row {row}; remove these rows"
        )


def recode(names: Sequence[str], codes: Indices, order: Sequence[str], description: str) -> Indices:
    """Turns indices into `names` into indices into `order`."""
    position = {name: index for index, name in enumerate(order)}
    if unknown := [name for name in names if name not in position]:
        known = {spelling(name): name for name in order}
        alike = [f"{name!a} for {known[spelling(name)]!a}" for name in unknown if spelling(name) in known]
        hint = f" (spelled differently: {', '.join(alike[:5])})" if alike else ""
        raise ValueError(
            f"{description} has values outside the label space, which no train image has: {list_names(unknown)}"
            f"{hint}; add train images of them, or remove them from the test images"
        )
    return np.array([position[name] for name in names], dtype=np.int64)[codes]


def spelling(name: str) -> str:
    """Returns a name without differences that are easily missed: case, spaces, and characters that are invisible."""
    visible = (c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf")
    return " ".join("".join(visible).casefold().split())
