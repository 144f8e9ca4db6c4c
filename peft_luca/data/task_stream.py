"""`TaskStream`: a dataset becomes an ordered, open-ended list of tasks.

A class is known by its name everywhere. The labels of a task's datasets are global ids: the position of a class's name
in the order in which the names first appeared in the stream.
"""

import os
import unicodedata
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, DatasetDict, Image, IterableDataset, IterableDatasetDict, Value

from ..utils import NAME_RULE, check_classes, pluralize
from .sources import SPLITS, DatasetLike, splits_of


Indices: TypeAlias = npt.NDArray[np.int64]

LABELS = "labels"


@dataclass(frozen=True)
class Task:
    """What one expert learns.

    Args:
        name (`str`):
            Name of the task and of its expert (a PEFT adapter name).
        classes (`tuple[str, ...]`):
            Names of the task's classes, in the task's own order: that of the dataset (or of `class_order`), whatever
            the task's position in the stream.
        train (`datasets.Dataset`):
            The image column and `labels`, the global class ids (int64). Nothing else.
        test (`datasets.Dataset`, *optional*):
            The same for the test images, `None` if the task has none.
    """

    name: str
    classes: tuple[str, ...]
    train: Dataset
    test: Dataset | None


class TaskStream:
    """An ordered list of tasks that can go on growing. Make one with [`~TaskStream.from_dataset`] (new classes),
    [`~TaskStream.from_domains`] (the same classes in new domains) or [`~TaskStream.from_tasks`] (one dataset after
    another), and let it grow with [`~TaskStream.append`].

    Whatever is wrong with the data is a `ValueError` here, before anything is trained. Images are neither decoded nor
    copied, except that a dataset that was shuffled or filtered by row (one with an indices mapping) is written out
    once. A format set on a dataset (`with_format`) is reset, a transform is refused.

    Labels may be a `ClassLabel`, strings (sorted by name) or non-negative integers (sorted by value, named
    `str(label)`). Train and test are matched by name, so their `ClassLabel`s may number the classes differently. Names
    that a `ClassLabel` declares but no train image has are left out. Names that are the same but for their Unicode
    form are refused, names that are the same but for capital letters or spaces are two classes, with a warning. A
    streaming dataset, which need have no length, is read once into a file that goes with the process: what a task's
    classes are has to be known before it is learnt.

    Args:
        label_column (`str`):
            Column of the labels in the datasets that are read.
        image_column (`str`):
            Column of the images, in the datasets that are read and in the tasks.
    """

    def __init__(self, label_column: str, image_column: str) -> None:
        self.label_column = label_column
        self.image_column = image_column
        self._tasks: list[Task] = []
        self._ids: dict[str, int] = {}
        self._integer_labels: bool | None = None

    @classmethod
    def from_dataset(
        cls,
        dataset: DatasetLike,
        *,
        label_column: str = "label",
        image_column: str | None = None,
        increment: int | None = None,
        init_classes: int | None = None,
        class_order: Sequence[str | int] | None = None,
        seed: int | None = 1993,
        train_split: str = "train",
        test_split: str | None = None,
        test_size: float | None = None,
    ) -> "TaskStream":
        """Class-incremental: every task brings new classes. "B0 Inc10" of the literature is `increment=10`,
        "B50 Inc10" is `increment=10, init_classes=50`.

        Args:
            dataset (`datasets.Dataset`, `datasets.DatasetDict`, `(train, test)`, `str` or `Path`):
                The images. A string or a path is a folder with a folder of images for each class, in `train` and
                `test` or directly, or anything else that `datasets.load_dataset` reads.
            label_column (`str`, *optional*, defaults to `"label"`):
                Column of the labels.
            image_column (`str`, *optional*):
                Column of the images. Defaults to the only column of type `datasets.Image`.
            increment (`int`, *optional*):
                Classes per task; the last task may have fewer. Defaults to all classes in one task.
            init_classes (`int`, *optional*):
                Classes of the first task. Defaults to `increment`.
            class_order (`Sequence[str | int]`, *optional*):
                Every class once, by name or by label, in the order of learning. Defaults to the literature's order,
                `np.random.seed(seed); np.random.permutation(number of classes)`.
            seed (`int`, *optional*, defaults to `1993`):
                Seed of the class order and of `test_size`. With `None` the classes stay in the dataset's order.
            train_split (`str`, *optional*, defaults to `"train"`):
                Split to train on.
            test_split (`str`, *optional*):
                Split to test on. Defaults to `"test"`, else `"validation"`, else there are no test images.
            test_size (`float`, *optional*):
                Share of every class's train images to hold out for testing, where the dataset has no test split. Which
                ones depends on the seed, the class's name and its number of images alone.

        Returns:
            `TaskStream`: The tasks `task_0`, `task_1`, ...
        """
        train_data, test_data = splits_of(dataset, train_split, test_split)
        stream = cls(label_column, image_column or _only_image_column(train_data))
        train, test = stream._read(train_data, test_data)
        if class_order is not None:
            order = _checked_order("class_order", class_order, train.classes, train_data.features[label_column])
        elif seed is not None:
            order = tuple(train.classes[i] for i in np.random.RandomState(seed).permutation(len(train.classes)))
        else:
            order = train.classes
        train = train.recoded(order)
        test = None if test is None else test.recoded(order)

        train_rows, test_rows = np.arange(len(train.codes)), np.arange(len(test.codes) if test else 0)
        if test_size is not None:
            if test is not None:
                raise ValueError(
                    f"test_size={test_size} would hold out train images, but the dataset has {len(test.codes)} test "
                    "images; leave out test_size, or pass the train split alone"
                )
            train_rows, test_rows = _hold_out(train, test_size, seed or 0)
            test = train
        edges = _edges(len(order), increment, init_classes)
        train_task = np.searchsorted(edges, train.codes[train_rows], side="right")
        test_task = np.searchsorted(edges, test.codes[test_rows] if test else test_rows, side="right")
        groups = [(f"task_{t}", train_rows[train_task == t], test_rows[test_task == t]) for t in range(len(edges))]
        stream._extend(train, test, groups)
        return stream

    @classmethod
    def from_domains(
        cls,
        dataset: DatasetLike,
        *,
        domain_column: str = "domain",
        domain_order: Sequence[str | int] | None = None,
        label_column: str = "label",
        image_column: str | None = None,
        train_split: str = "train",
        test_split: str | None = None,
    ) -> "TaskStream":
        """Domain-incremental: one task per value of a column, named after it. The same classes come back in several
        tasks.

        Args:
            dataset (`datasets.Dataset`, `datasets.DatasetDict`, `(train, test)`, `str` or `Path`):
                The images, as in [`~TaskStream.from_dataset`].
            domain_column (`str`, *optional*, defaults to `"domain"`):
                Column of the domains: a `ClassLabel`, strings or integers.
            domain_order (`Sequence[str | int]`, *optional*):
                Every domain once, in the order of learning. Defaults to the dataset's order.
            label_column, image_column, train_split, test_split:
                As in [`~TaskStream.from_dataset`].

        Returns:
            `TaskStream`: One task per domain.
        """
        train_data, test_data = splits_of(dataset, train_split, test_split)
        stream = cls(label_column, image_column or _only_image_column(train_data))
        domains, train_domain = _read_codes(train_data, domain_column, "domain_column", "the train images")
        order = domains
        if domain_order is not None:
            order = _checked_order("domain_order", domain_order, domains, train_data.features[domain_column])
        test_domain = np.empty(0, dtype=np.int64)
        if test_data is not None:
            names, codes = _read_codes(test_data, domain_column, "domain_column", "the test images")
            test_domain = _recode(names, codes, domains, f"column {domain_column!r} of the test images")
        codes_in_order = ((name, domains.index(name)) for name in order)
        groups = [(n, np.flatnonzero(train_domain == c), np.flatnonzero(test_domain == c)) for n, c in codes_in_order]
        stream._extend(*stream._read(train_data, test_data), groups)
        return stream

    @classmethod
    def from_tasks(
        cls,
        tasks: Iterable[DatasetLike] | Mapping[str, DatasetLike],
        *,
        label_column: str = "label",
        image_column: str | None = None,
    ) -> "TaskStream":
        """Task by task: one dataset each.

        Args:
            tasks (`Iterable` or `Mapping[str, ...]`):
                The tasks in order, or their names and the tasks. Each is a `Dataset` (no test images), a `DatasetDict`
                with the splits `train` and `test` (or `validation`), a pair `(train, test)`, or a string or path for
                `datasets.load_dataset`.
            label_column (`str`, *optional*, defaults to `"label"`):
                Column of the labels.
            image_column (`str`, *optional*):
                Column of the images. Defaults to the only column of type `datasets.Image` of the first task.

        Returns:
            `TaskStream`: The tasks under their names, or `task_0`, `task_1`, ...
        """
        splits = isinstance(tasks, Mapping) and 0 < len(tasks) and set(tasks) <= set(SPLITS.values())
        if splits or isinstance(tasks, Dataset | DatasetDict | IterableDataset | IterableDatasetDict | str | Path):
            found = type(tasks).__name__ + (f" of the splits {', '.join(map(str, tasks))}" if splits else "")
            raise ValueError(
                f"from_tasks needs a list or a dict of datasets, found one {found}; to split it into tasks use "
                "TaskStream.from_dataset, to make it the only task put it in a list"
            )
        if not isinstance(tasks, Iterable):
            raise TypeError(f"from_tasks needs a list or a dict of datasets, found a {type(tasks).__name__}")
        parts = tasks.items() if isinstance(tasks, Mapping) else ((f"task_{t}", task) for t, task in enumerate(tasks))
        named: list[tuple[str, DatasetLike]] = list(parts)
        if not named:
            raise ValueError("a stream needs at least one task, found none")
        if image_column is None:
            first = splits_of(named[0][1])
            named[0] = (named[0][0], first)  # a streaming one is read once
            image_column = _only_image_column(first[0])
        stream = cls(label_column, image_column)
        for name, task in named:
            stream.append(task, name)
        return stream

    def append(self, dataset: DatasetLike, name: str | None = None) -> Task:
        """Add a task. Classes whose names the stream knows keep their global ids, new ones get the next.

        Args:
            dataset (`datasets.Dataset`, `datasets.DatasetDict`, `(train, test)`, `str` or `Path`):
                The task's images, as in [`~TaskStream.from_tasks`].
            name (`str`, *optional*):
                Name of the task. Defaults to `task_` and its position.

        Returns:
            `Task`: The new task. If it is refused, the stream is as before.
        """
        name = f"task_{len(self)}" if name is None else name
        train, test = self._read(*splits_of(dataset), where=f" of task {name!r}")
        known = set(self._ids)
        self._extend(train, test, [(name, np.arange(len(train.codes)), np.arange(len(test.codes) if test else 0))])
        again = [class_name for class_name in train.classes if class_name in known]
        # Numbers that begin where a numbering does, at 0 or 1, may be those of this task alone.
        if train.integer_labels and again and int(train.classes[0]) <= min(1, *map(int, known)):
            warnings.warn(
                f"the labels of task {name!r} begin at {train.classes[0]}, and {_some(again)} are labels of earlier "
                "tasks too: they are taken for the same classes. If they are other classes give them names: "
                f"cast_column({self.label_column!r}, datasets.ClassLabel(names=[...])).",
                stacklevel=2,
            )
        return self._tasks[-1]

    def pop(self) -> Task:
        """Take the last task off again, with the classes that no other task has.

        Returns:
            `Task`: The task.
        """
        task = self._tasks.pop()
        names = (name for remaining in self._tasks for name in remaining.classes)
        self._ids = {name: i for i, name in enumerate(dict.fromkeys(names))}
        self._integer_labels = self._integer_labels if self._tasks else None
        return task

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of all classes, each at its global id."""
        return tuple(self._ids)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def __repr__(self) -> str:
        def counts(train: int, test: int) -> str:
            return f"{train} train and {test} test images"

        total = counts(sum(len(t.train) for t in self), sum(len(t.test) for t in self if t.test is not None))
        lines = [
            f"  {task.name}: {pluralize(len(task.classes), 'class')} ({_some(task.classes, 3)}), "
            f"{counts(len(task.train), 0 if task.test is None else len(task.test))}"
            for task in self._tasks[:10]
        ]
        if len(self) > 10:
            lines.append(f"  ... and {pluralize(len(self) - 10, 'more task')}")
        head = f"TaskStream: {pluralize(len(self), 'task')}, {pluralize(len(self.classes), 'class')}, {total}"
        return "\n".join([head, *lines])

    def _read(self, train: Dataset, test: Dataset | None, where: str = "") -> tuple["_Split", "_Split | None"]:
        """Read and check one dataset; its test images are matched to its train images' classes by name."""
        _check_any(train, where)
        read_train = self._read_split(train, f"the train images{where}", self._integer_labels)
        if test is None or len(test) == 0:
            return read_train, None
        read_test = self._read_split(test, f"the test images{where}", read_train.integer_labels)
        _check_apart(read_train.images, read_test.images, self.image_column, where)
        return read_train, read_test.recoded(read_train.classes)

    def _read_split(self, dataset: Dataset, where: str, integer_labels: bool | None) -> "_Split":
        classes, codes = _read_codes(dataset, self.label_column, "label_column", where)
        found = _is_integer(dataset.features[self.label_column])
        if found != (found if integer_labels is None else integer_labels):
            kinds = {True: "integers", False: "class names (a ClassLabel or strings)"}
            raise ValueError(
                f"column {self.label_column!r} of {where} holds {kinds[found]}, the other labels are "
                f"{kinds[not found]}; classes are matched by name, so cast_column it to the same ClassLabel or strings"
            )
        return _Split(where, _images_only(dataset, self.image_column, where), classes, codes, found)

    def _extend(self, train: "_Split", test: "_Split | None", groups: Sequence[tuple[str, Indices, Indices]]) -> None:
        """Add tasks: names, and rows of the train and the test images. All are checked before any is added."""
        taken = {task.name.lower(): task.name for task in self}
        members: list[tuple[str, ...]] = []
        for name, train_rows, test_rows in groups:
            if not isinstance(name, str) or NAME_RULE.fullmatch(name) is None:
                raise ValueError(
                    f"a task cannot be named {name!r}: its name becomes an adapter name, so it needs letters, digits, "
                    "'_' and '-' only, at most 128, and starts with a letter or digit; rename the domain, or choose "
                    "names with TaskStream.from_tasks({name: dataset, ...})"
                )
            if name.lower() in taken:
                raise ValueError(
                    f"there is a task {taken[name.lower()]!r} already, and another cannot be named {name!r}; every "
                    "task needs a name of its own, also where capital letters do not count, as on many disks"
                )
            taken[name.lower()] = name
            codes = np.unique(train.codes[train_rows])
            members.append(tuple(train.classes[code] for code in codes))
            outside = np.setdiff1d(test.codes[test_rows], codes) if test else codes[:0]
            if len(outside):
                raise ValueError(
                    f"task {name!r} has test images but no train images of the classes "
                    f"{_some([train.classes[code] for code in outside])}; add train images of them to the task, or "
                    "remove them from its test images"
                )
        ids = dict(self._ids)
        for class_name in (class_name for classes in members for class_name in classes):
            ids.setdefault(class_name, len(ids))
        check_classes(list(ids))
        _warn_of_spellings(ids, self._ids)

        train_images = train.labelled(ids)
        test_images = None if test is None else test.labelled(ids)
        for (name, train_rows, test_rows), classes in zip(groups, members, strict=True):
            task_test = test_images.select(test_rows) if test_images is not None and len(test_rows) else None
            self._tasks.append(Task(name, classes, train_images.select(train_rows), task_test))
        self._ids, self._integer_labels = ids, train.integer_labels


@dataclass(frozen=True)
class _Split:
    """One dataset, read: its images, and for every row an index into `classes`."""

    where: str
    images: Dataset
    classes: tuple[str, ...]
    codes: Indices
    integer_labels: bool

    def recoded(self, classes: tuple[str, ...]) -> "_Split":
        codes = _recode(self.classes, self.codes, classes, f"the label column of {self.where}")
        return replace(self, classes=classes, codes=codes)

    def labelled(self, ids: Mapping[str, int]) -> Dataset:
        lookup = np.array([ids[name] for name in self.classes], dtype=np.int64)
        # Labels are added once to the whole dataset and tasks select from it: adding a column to a dataset that has
        # an indices mapping writes its images out.
        dataset = self.images.add_column(LABELS, lookup[self.codes], feature=Value("int64"))
        (image_column,) = self.images.column_names
        _check_no_nulls(dataset.data.column(image_column), f"column {image_column!r} of {self.where}")
        return dataset


def _check_any(train: Dataset, where: str = "") -> None:
    if len(train) == 0:
        raise ValueError(f"the train images{where} are none; every task needs at least one")


def _only_image_column(dataset: Dataset) -> str:
    _check_any(dataset)  # first: a streaming dataset without rows may have no columns either
    images: list[str] = [name for name, feature in dataset.features.items() if isinstance(feature, Image)]
    if len(images) != 1:
        raise ValueError(
            f"image_column is not given and there are {len(images)} columns of images ({images}); pass image_column, "
            f"one of {dataset.column_names}, after cast_column(image_column, datasets.Image()) if it has another type"
        )
    return images[0]


def _images_only(dataset: Dataset, column: str, where: str) -> Dataset:
    """The image column alone, checked to hold images."""
    _check_column(dataset, column, "image_column", where)
    if column == LABELS:
        raise ValueError(f"the image column cannot be named {LABELS!r}, the labels will be; rename_column it")
    feature = dataset.features[column]
    if not isinstance(feature, Image) or not feature.decode:
        raise ValueError(
            f"column {column!r} of {where} must be decoded images, found {feature}; use "
            f"dataset.cast_column({column!r}, datasets.Image())"
        )
    if feature.mode not in (None, "RGB"):
        raise ValueError(
            f"column {column!r} of {where} asks for images of the mode {feature.mode!r}, but all are brought to RGB; "
            f"use dataset.cast_column({column!r}, datasets.Image())"
        )
    return dataset.select_columns([column]).with_format(None)


def _is_integer(feature: Any) -> bool:
    return isinstance(feature, Value) and bool(pa.types.is_integer(feature.pa_type))


def _read_codes(dataset: Dataset, column: str, argument: str, where: str) -> tuple[tuple[str, ...], Indices]:
    """The names that occur in a column, in the column's own order, and for every row an index into them."""
    _check_column(dataset, column, argument, where)
    feature = dataset.features[column]
    is_text = isinstance(feature, Value) and (
        pa.types.is_string(feature.pa_type) or pa.types.is_large_string(feature.pa_type)
    )
    if not (isinstance(feature, ClassLabel) or _is_integer(feature) or is_text):
        raise ValueError(
            f"column {column!r} of {where} must hold one ClassLabel, integer or string per image, found {feature}; "
            "cast_column it, or map it to one of these"
        )
    column_values = dataset.select_columns([column]).with_format("arrow")[:][column]
    _check_no_nulls(column_values, f"column {column!r} of {where}")
    values: list[Any] = sorted(pc.unique(column_values).to_pylist())
    codes: Indices = pc.index_in(column_values, value_set=pa.array(values, column_values.type)).to_numpy()
    if not is_text:
        largest = len(feature.names) - 1 if isinstance(feature, ClassLabel) else np.inf
        for code, value in enumerate(values):
            if not 0 <= value <= largest:
                raise ValueError(
                    f"row {np.flatnonzero(codes == code)[0]} of column {column!r} of {where} is {value}, which names "
                    "no class; give the row its label or remove it"
                )
    names = tuple(feature.names[value] if isinstance(feature, ClassLabel) else str(value) for value in values)
    return names, codes.astype(np.int64)


def _check_column(dataset: Dataset, column: str, argument: str, where: str) -> None:
    if column not in dataset.column_names:
        raise ValueError(f"{where} have no column {column!r}; pass {argument}, one of {dataset.column_names}")


def _check_no_nulls(values: Any, what: str) -> None:
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py()
        raise ValueError(f"{what} is empty (None) in {values.null_count} rows, first in row {row}; remove these rows")


def _checked_order(argument: str, order: Sequence[str | int], names: tuple[str, ...], feature: Any) -> tuple[str, ...]:
    """An order by names or labels as names, after checking that it has every one once."""
    by_label = dict(enumerate(feature.names)) if isinstance(feature, ClassLabel) else {}
    if _is_integer(feature):
        by_label = {int(name): name for name in names}
    odd = [item for item in order if not isinstance(item, str) and _whole(item) is None]
    if odd:
        raise ValueError(f"{argument} names each by its name or its number, found {odd[0]!r}")
    named = [item if isinstance(item, str) else by_label.get(index(item), str(item)) for item in order]
    problems = {
        "named twice": [name for name, count in Counter(named).items() if count > 1],
        "without a train image": sorted(set(named) - set(names)),
        "missing": sorted(set(names) - set(named)),
    }
    if any(problems.values()):
        found = "; ".join(f"{problem}: {_some(found)}" for problem, found in problems.items() if found)
        raise ValueError(f"{argument} needs each of the {len(names)} in the train images once, found {found}")
    return tuple(named)


def _whole(value: Any) -> int | None:
    """A whole number, also numpy's; `None` for anything else, such as arrays and truth values."""
    try:
        return None if isinstance(value, bool | np.bool_) else index(value)
    except TypeError:
        return None


def _edges(classes: int, increment: int | None, init_classes: int | None) -> list[int]:
    """Where the tasks end, counted in classes: (10, 3, None) → [3, 6, 9, 10]."""
    for argument, value in (("increment", increment), ("init_classes", init_classes)):
        if value is not None and not 1 <= (_whole(value) or 0) <= classes:
            raise ValueError(f"{argument} must be a whole number from 1 to the {classes} classes, got {value!r}")
    increment = increment or classes
    return [*range(init_classes or increment, classes, increment), classes]


def _hold_out(train: _Split, test_size: float, seed: int) -> tuple[Indices, Indices]:
    """Rows to train and to test on: of every class the same share, at least one of each."""
    if not 0 < test_size < 1:
        raise ValueError(f"test_size must be a share between 0 and 1, got {test_size}")
    held_out = np.zeros(len(train.codes), dtype=bool)
    for code, name in enumerate(train.classes):
        rows = np.flatnonzero(train.codes == code)
        if len(rows) < 2:
            raise ValueError(f"class {name!r} has one image; test_size needs at least two of every class")
        # Seeded by name, so that a class's test images do not depend on which other classes there are.
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        held_out[rng.permutation(rows)[: min(max(round(test_size * len(rows)), 1), len(rows) - 1)]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _warn_of_spellings(names: Mapping[str, int], before: Mapping[str, int]) -> None:
    """Say which new names differ from others by their spelling alone: a slip, or a class of its own."""
    spellings: dict[str, list[str]] = {}
    for name in names:
        spellings.setdefault(_spelling(name), []).append(name)
    alike = [found for found in spellings.values() if len(found) > 1 and not before.keys() >= set(found)]
    if alike:
        warnings.warn(
            "these class names are the same but for capital letters, spaces, letters that nobody sees or the form of "
            f"their letters: {'; '.join(map(repr, alike[:5]))}. They are taken for classes of their own; if they are "
            "not, give their images one name.",
            stacklevel=4,
        )


def _spelling(name: str) -> str:
    """A name without what few mean by a difference: capital letters, spaces, and what is not seen (a BOM, say)."""
    name = unicodedata.normalize("NFKC", name)
    if not name.isprintable():
        name = "".join(character for character in name if unicodedata.category(character) != "Cf")
    return " ".join(name.casefold().split())


def _check_apart(train: Dataset, test: Dataset, column: str, where: str) -> None:
    """Refuse a data set that tests on files that it trains on."""

    def files(dataset: Dataset) -> set[str]:
        parts = dataset.cast_column(column, Image(decode=False)).flatten()  # so that no image's content is read
        paths = parts.select_columns([f"{column}.path"]).with_format("arrow")[:].column(0)
        # Of an image that is kept in the data set itself, the path is a name that others may have too.
        return {path for path in paths.to_pylist() if path and (os.path.isabs(path) or "://" in path)}

    both = sorted(files(train) & files(test))
    if both:
        raise ValueError(
            f"{len(both)} files are both train and test images{where}, such as {both[0]}; take them out of one of the "
            "two (datasets.load_dataset puts a class's folder called 'test' into both: pass the folder's path here)"
        )


def _recode(names: Sequence[str], codes: Indices, order: Sequence[str], where: str) -> Indices:
    """Indices into `names` as indices into `order`."""
    position = {name: index for index, name in enumerate(order)}
    if unknown := [name for name in names if name not in position]:
        known = {_spelling(name): name for name in order}
        alike = [f"{n!a} for {known[_spelling(n)]!a}" for n in unknown if _spelling(n) in known]
        spelt = f" (spelt in another way: {_some(alike)})" if alike else ""
        raise ValueError(
            f"{where} holds values outside the label space, which no train image has: {_some(unknown)}{spelt}; add "
            "train images of them, or remove them from the test images"
        )
    return np.array([position[name] for name in names], dtype=np.int64)[codes]


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f", ... {len(names) - limit} more" if len(names) > limit else "")
