"""`TaskStream`: turns datasets into an ordered, open-ended list of tasks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset

from ..utils import NAME_RULE, check_classes, list_names, pluralize
from .labeled_images import Indices, LabeledImages, find_image_column, is_integer, read_codes, recode, spelling
from .sources import SPLITS, DatasetLike, SingleDataset, load_splits


@dataclass(frozen=True)
class Task:
    """
    What one expert learns.

    Args:
        name (`str`): Name of the task, and of its expert (a PEFT adapter name).
        classes (`tuple[str, ...]`):
            Class names of the task, in the order of the dataset or of `class_order`, wherever the task is in the
            stream.
        train (`datasets.Dataset`): The image column and `labels`, the global class ids (int64). Nothing else.
        test (`datasets.Dataset`, *optional*): The same for the test images, `None` if the task has none.
    """

    name: str
    classes: tuple[str, ...]
    train: Dataset
    test: Dataset | None


class TaskStream:
    """
    An ordered list of tasks that can grow. Make one with [`~TaskStream.from_dataset`] (new classes),
    [`~TaskStream.from_domains`] (the same classes in new domains) or [`~TaskStream.from_tasks`] (one dataset per
    task), and add tasks with [`~TaskStream.append`]. Problems of the data raise a `ValueError` before training starts.

    A class is known by its name. Labels of a task's datasets are global ids: the position of the class name in
    `classes`, the order in which names first appear in the stream. In the datasets that are read, labels may be a
    `ClassLabel`, strings (sorted by name) or non-negative integers (sorted by value, named `str(label)`). Train and
    test are matched by name. Classes without a train image are left out.

    Images are neither decoded nor copied, except those of a dataset with an indices mapping (shuffled or filtered),
    which is written once. A streaming dataset is read once, into a temporary file.

    Args:
        label_column (`str`): Column of the labels in the datasets that are read.
        image_column (`str`): Column of the images, in the datasets that are read and in the tasks.
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
    ) -> TaskStream:
        """
        Class-incremental: the tasks `task_0`, `task_1`, ... have new classes each. "B0 Inc10" of the literature is
        `increment=10`, "B50 Inc10" is `increment=10, init_classes=50`.

        Args:
            dataset (`datasets.Dataset`, `datasets.DatasetDict`, `(train, test)`, `str` or `Path`):
                The images. A string or a path is a folder with a folder of images for each class, in `train` and
                `test` or directly, or anything else that `datasets.load_dataset` reads.
            label_column (`str`, *optional*, defaults to `"label"`): Column of the labels.
            image_column (`str`, *optional*): Column of the images. Defaults to the only one of type `datasets.Image`.
            increment (`int`, *optional*): Classes per task; the last task may have fewer. Defaults to all classes.
            init_classes (`int`, *optional*): Classes of the first task. Defaults to `increment`.
            class_order (`Sequence[str | int]`, *optional*):
                Every class once, by name or label, in the order of learning. Defaults to that of the literature,
                `np.random.seed(seed); np.random.permutation(number of classes)`.
            seed (`int`, *optional*, defaults to `1993`):
                Seed of the class order and of `test_size`. With `None` classes keep the order of the dataset.
            train_split (`str`, *optional*, defaults to `"train"`): Split to train on.
            test_split (`str`, *optional*):
                Split to test on. Defaults to `"test"`, else `"validation"`, else there are no test images.
            test_size (`float`, *optional*):
                Share of the train images of each class to hold out for testing, if there is no test split. They
                depend only on the seed, the name of the class and its number of images.
        """
        train_data, test_data = load_splits(dataset, train_split, test_split)
        stream = cls(label_column, image_column or find_image_column(train_data))
        train, test = stream._read(train_data, test_data)
        if class_order is not None:
            order = _check_order("class_order", class_order, train.classes, train_data.features[label_column])
        elif seed is not None:
            order = tuple(train.classes[i] for i in np.random.RandomState(seed).permutation(len(train.classes)))
        else:
            order = train.classes
        train = train.reorder(order)
        test = None if test is None else test.reorder(order)

        train_rows, test_rows = np.arange(len(train.codes)), np.arange(len(test.codes) if test else 0)
        if test_size is not None:
            if test is not None:
                raise ValueError(
                    f"test_size={test_size} would hold out train images, but the dataset has {len(test.codes)} test "
                    "images; leave out test_size, or pass the train split alone"
                )
            train_rows, test_rows = train.hold_out(test_size, seed or 0)
            test = train
        ends = _task_ends(len(order), increment, init_classes)
        train_task = np.searchsorted(ends, train.codes[train_rows], side="right")
        test_task = np.searchsorted(ends, test.codes[test_rows] if test else test_rows, side="right")
        groups = [(f"task_{t}", train_rows[train_task == t], test_rows[test_task == t]) for t in range(len(ends))]
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
    ) -> TaskStream:
        """
        Domain-incremental: one task per value of a column, with its name. Classes may occur in several tasks.

        Args:
            domain_column (`str`, *optional*, defaults to `"domain"`): Of a `ClassLabel`, strings or integers.
            domain_order (`Sequence[str | int]`, *optional*):
                Every domain once, in the order of learning. Defaults to the order of the dataset.
            dataset, label_column, image_column, train_split, test_split: As in [`~TaskStream.from_dataset`].
        """
        train_data, test_data = load_splits(dataset, train_split, test_split)
        stream = cls(label_column, image_column or find_image_column(train_data))
        domains, train_domain = read_codes(train_data, domain_column, "domain_column", "the train images")
        order = domains
        if domain_order is not None:
            order = _check_order("domain_order", domain_order, domains, train_data.features[domain_column])
        test_domain = np.empty(0, dtype=np.int64)
        if test_data is not None:
            names, codes = read_codes(test_data, domain_column, "domain_column", "the test images")
            test_domain = recode(names, codes, domains, f"column {domain_column!r} of the test images")
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
    ) -> TaskStream:
        """
        One dataset per task.

        Args:
            tasks (`Iterable` or `Mapping[str, ...]`):
                The tasks in order, by name in a mapping, else `task_0`, `task_1`, ... Each is a `Dataset` (no test
                images), a `DatasetDict` with the splits `train` and `test` (or `validation`), a pair `(train, test)`,
                or a string or path as in [`~TaskStream.from_dataset`].
            label_column, image_column: As in [`~TaskStream.from_dataset`].
        """
        are_splits = isinstance(tasks, Mapping) and len(tasks) > 0 and set(tasks) <= set(SPLITS.values())
        if are_splits or isinstance(tasks, SingleDataset):
            raise ValueError(
                f"from_tasks needs a list or a dict of datasets, found one {type(tasks).__name__}; to split it into "
                "tasks use TaskStream.from_dataset, to make it the only task put it in a list"
            )
        parts = tasks.items() if isinstance(tasks, Mapping) else ((f"task_{t}", task) for t, task in enumerate(tasks))
        named: list[tuple[str, DatasetLike]] = list(parts)
        if not named:
            raise ValueError("a stream needs at least one task, found none")
        if image_column is None:
            splits = load_splits(named[0][1])
            named[0] = (named[0][0], splits)  # so that a streaming dataset is read only once
            image_column = find_image_column(splits[0])
        stream = cls(label_column, image_column)
        for name, task in named:
            stream.append(task, name)
        return stream

    def append(self, dataset: DatasetLike, name: str | None = None) -> Task:
        """
        Adds a task. Known classes keep their global ids, and new classes get the next ones.

        Args:
            dataset: The images of the task, as in [`~TaskStream.from_tasks`].
            name (`str`, *optional*): Name of the task. Defaults to `task_` and its position.

        Raises:
            ValueError: The task is not valid. The stream does not change.
        """
        name = f"task_{len(self)}" if name is None else name
        train, test = self._read(*load_splits(dataset), of_task=f" of task {name!r}")
        known = set(self._ids)
        self._extend(train, test, [(name, np.arange(len(train.codes)), np.arange(len(test.codes) if test else 0))])
        repeated = [class_name for class_name in train.classes if class_name in known]
        # Numbers that start at 0 or 1 may be counted within this task alone. Names of ClassLabel(num_classes=n) too.
        if repeated and all(class_name.isdecimal() for class_name in train.classes):
            start = min(map(int, train.classes))
            if start <= 1:
                warnings.warn(
                    f"the labels of task {name!r} begin at {start}, and {list_names(repeated, 5)} are labels of "
                    "earlier tasks too: they are taken for the same classes. If they are other classes give them "
                    f"names: cast_column({self.label_column!r}, datasets.ClassLabel(names=[...])).",
                    stacklevel=2,
                )
        return self._tasks[-1]

    def pop(self) -> Task:
        """Removes the last task, and the classes that no other task has."""
        task = self._tasks.pop()
        names = (name for remaining in self._tasks for name in remaining.classes)
        self._ids = {name: i for i, name in enumerate(dict.fromkeys(names))}
        self._integer_labels = self._integer_labels if self._tasks else None
        return task

    @property
    def classes(self) -> tuple[str, ...]:
        """All class names, in the order of their global ids."""
        return tuple(self._ids)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def __repr__(self) -> str:
        def counts(*tasks: Task) -> str:
            train, test = sum(len(task.train) for task in tasks), sum(len(task.test or ()) for task in tasks)
            return f"{train} train and {test} test images"

        lines = [
            f"TaskStream: {pluralize(len(self), 'task')}, {pluralize(len(self.classes), 'class')}, {counts(*self)}"
        ]
        for task in self._tasks[:10]:
            classes = f"{pluralize(len(task.classes), 'class')} ({list_names(task.classes, 3)})"
            lines.append(f"  {task.name}: {classes}, {counts(task)}")
        if len(self) > 10:
            lines.append(f"  ... and {pluralize(len(self) - 10, 'more task')}")
        return "\n".join(lines)

    def _read(
        self, train: Dataset, test: Dataset | None, of_task: str = ""
    ) -> tuple[LabeledImages, LabeledImages | None]:
        """Reads and checks the splits of a dataset. Test images are matched to the classes of the train images."""
        if len(train) == 0:
            raise ValueError(f"the train images{of_task} are none; every task needs at least one")
        read_train = LabeledImages.read(train, self.image_column, self.label_column, f"the train images{of_task}")
        if self._integer_labels not in (None, read_train.integer_labels):
            kinds = {True: "integers", False: "class names (a ClassLabel or strings)"}
            raise ValueError(
                f"column {self.label_column!r} of {read_train.description} holds {kinds[read_train.integer_labels]}, "
                f"the other tasks hold {kinds[not read_train.integer_labels]}; classes are matched by name, so "
                "cast_column it to the same ClassLabel or strings"
            )
        if test is None or len(test) == 0:
            return read_train, None
        read_test = LabeledImages.read(test, self.image_column, self.label_column, f"the test images{of_task}")
        if both := sorted(read_train.files() & read_test.files()):
            raise ValueError(
                f"{len(both)} files are both train and test images{of_task}, such as {both[0]}; remove them from one. "
                "datasets.load_dataset puts a class folder called 'test' into both: pass the path of the folder here"
            )
        return read_train, read_test.reorder(read_train.classes)

    def _extend(
        self, train: LabeledImages, test: LabeledImages | None, groups: Sequence[tuple[str, Indices, Indices]]
    ) -> None:
        """Adds tasks, given as a name, train rows and test rows. Checks all of them first."""
        names = {task.name.lower(): task.name for task in self}
        task_classes: list[tuple[str, ...]] = []
        for name, train_rows, test_rows in groups:
            _check_task_name(name, names)
            names[name.lower()] = name
            codes = np.unique(train.codes[train_rows])
            task_classes.append(tuple(train.classes[code] for code in codes))
            test_only = np.setdiff1d(test.codes[test_rows], codes) if test else codes[:0]
            if len(test_only):
                raise ValueError(
                    f"task {name!r} has test images but no train images of the classes "
                    f"{list_names(train.classes[code] for code in test_only)}; add train images of them to the task, "
                    "or remove them from its test images"
                )
        ids = {name: i for i, name in enumerate(dict.fromkeys([*self._ids, *(n for c in task_classes for n in c)]))}
        check_classes(list(ids))
        _warn_about_spellings(ids, self._ids)

        train_images = train.with_labels(ids)
        test_images = None if test is None else test.with_labels(ids)
        for (name, train_rows, test_rows), classes in zip(groups, task_classes, strict=True):
            task_test = test_images.select(test_rows) if test_images is not None and len(test_rows) else None
            self._tasks.append(Task(name, classes, train_images.select(train_rows), task_test))
        self._ids, self._integer_labels = ids, train.integer_labels


def _check_task_name(name: Any, names: Mapping[str, str]) -> None:
    if not isinstance(name, str) or NAME_RULE.fullmatch(name) is None:
        raise ValueError(
            f"a task cannot be named {name!r}: its name becomes an adapter name, so it needs letters, digits, '_' and "
            "'-' only, at most 128, and starts with a letter or digit; rename the domain, or choose names with "
            "TaskStream.from_tasks({name: dataset, ...})"
        )
    if name.lower() in names:
        raise ValueError(
            f"there is a task {names[name.lower()]!r} already, so another cannot be named {name!r}; names of tasks "
            "must differ in more than case, because on many disks their folders would be the same"
        )


def _check_order(argument: str, order: Sequence[str | int], names: tuple[str, ...], feature: Any) -> tuple[str, ...]:
    """Returns an order by names or labels as names, and checks that it has each name once."""
    by_label: dict[Any, str] = dict(enumerate(feature.names)) if isinstance(feature, ClassLabel) else {}
    if is_integer(feature):
        by_label = {int(name): name for name in names}
    named = [item if isinstance(item, str) else by_label.get(item, str(item)) for item in order]
    problems = {
        "named twice": [name for name, count in Counter(named).items() if count > 1],
        "without a train image": sorted(set(named) - set(names)),
        "missing": sorted(set(names) - set(named)),
    }
    if any(problems.values()):
        found = "; ".join(f"{problem}: {list_names(found)}" for problem, found in problems.items() if found)
        raise ValueError(f"{argument} needs each of the {len(names)} in the train images once, found {found}")
    return tuple(named)


def _task_ends(classes: int, increment: int | None, init_classes: int | None) -> list[int]:
    """Returns where the tasks end, counted in classes: (10, 3, None) -> [3, 6, 9, 10]."""
    for argument, value in (("increment", increment), ("init_classes", init_classes)):
        if value is not None and not 1 <= value <= classes:
            raise ValueError(f"{argument} must be a whole number from 1 to the {classes} classes, got {value!r}")
    increment = increment or classes
    return [*range(init_classes or increment, classes, increment), classes]


def _warn_about_spellings(names: Iterable[str], known: Collection[str]) -> None:
    """Warns about new names that differ from others only in spelling: a mistake, or really two classes."""
    spellings: dict[str, list[str]] = {}
    for name in names:
        spellings.setdefault(spelling(name), []).append(name)
    alike = [found for found in spellings.values() if len(found) > 1 and not set(found) <= set(known)]
    if alike:
        warnings.warn(
            "these class names differ only in case, spaces, invisible characters or the form of their letters: "
            f"{'; '.join(map(repr, alike[:5]))}. They are taken for different classes; if they are not, give their "
            "images one name.",
            stacklevel=4,
        )
