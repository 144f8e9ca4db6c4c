"""`TaskStream`: turns datasets into an ordered, open-ended list of tasks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset

from ..preprocessing import find_image_column
from ..utils import NAME_RULE, check_classes, list_names, pluralize, warn_about_spellings
from .labeled_images import Indices, LabeledImages, has_labels, is_integer
from .sources import SPLITS, DatasetLike, SingleDataset, load_splits


@dataclass(frozen=True)
class Task:
    """
    What one expert learns.

    Args:
        name (`str`): Name of the task, and of its expert (a PEFT adapter name).
        classes (`tuple[str, ...]`): Its class names, in the order of the dataset or of `class_order`.
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
    task), and add tasks with [`~TaskStream.append`].

    A class is known by its name. Labels of a task's datasets are global ids: the position of the class name in
    `classes`, the order in which names first appear in the stream. In the datasets that are read, labels may be a
    `ClassLabel`, strings (sorted by name) or non-negative integers (sorted by value, named `str(label)`). Train and
    test are matched by name. Classes without a train image are left out.

    Images are neither decoded nor copied, except that a shuffled or filtered dataset is written once. A streaming
    dataset is read once, into a temporary file.

    Args:
        label_column, image_column: See [`~TaskStream.from_dataset`].
    """

    def __init__(self, label_column: str, image_column: str | None = None) -> None:
        self.label_column, self.image_column = label_column, image_column or ""  # which may not be known yet
        self._tasks: list[Task] = []
        self._integer_labels = False

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
        task_names: Sequence[str] | None = None,
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
            test_split (`str`, *optional*): Split to test on. Defaults to `"test"` or `"validation"`, if there is one.
            test_size (`float`, *optional*):
                Share of the train images of each class to hold out for testing. They depend only on the seed, the name
                of the class and its number of images.
            task_names (`Sequence[str]`, *optional*): Names of the tasks in place of `task_0`, `task_1`, ...
        """
        stream = cls(label_column, image_column)
        train, test = stream._read(*load_splits(dataset, train_split, test_split, label_column))
        count = len(train.names)
        if class_order is not None:
            train = train.order_by(class_order, "class_order")
        elif seed is not None:
            train = train.reorder([train.names[i] for i in np.random.RandomState(seed).permutation(count)])
        test = test.reorder(train.names)
        for argument, value in {"increment": increment, "init_classes": init_classes}.items():
            if value is not None and not 1 <= value <= count:
                raise ValueError(f"{argument} must be a whole number from 1 to the {count} classes, got {value!r}")
        step = increment or count
        ends = [*range(init_classes or step, count, step), count]  # where the tasks end, counted in classes
        names = [f"task_{t}" for t in range(len(ends))] if task_names is None else list(task_names)
        if len(names) != len(ends):
            raise ValueError(f"task_names must name each of the {len(ends)} tasks, got {len(names)} names")
        train_task, test_task = (np.searchsorted(ends, part.codes, side="right") for part in (train, test))
        if test_size is not None:
            if len(test_task):
                raise ValueError(f"the dataset has {len(test_task)} test images; leave out test_size={test_size}")
            test, held_out = train, train.hold_out(test_size, seed or 0)
            train_task, test_task = np.where(held_out, -1, train_task), np.where(held_out, train_task, -1)
        return stream._extend(train, test, names, train_task, test_task)

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
        stream = cls(label_column, image_column)
        splits = load_splits(dataset, train_split, test_split, label_column)
        train, test = stream._read(*splits)
        domains, test_domains = stream._read(*splits, column=domain_column)
        if domain_order is not None:
            domains = domains.order_by(domain_order, "domain_order")
        test_domains = test_domains.reorder(domains.names)
        return stream._extend(train, test, domains.names, domains.codes, test_domains.codes)

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
                The tasks in order, by name in a mapping, else `task_0`, `task_1`, ... Each is a dataset as in
                [`~TaskStream.from_dataset`], with the splits `train` and `test` (or `validation`) if it has any.
            label_column, image_column: As in [`~TaskStream.from_dataset`].
        """
        are_splits = isinstance(tasks, Mapping) and len(tasks) > 0 and set(tasks) <= set(SPLITS.values())
        if are_splits or isinstance(tasks, SingleDataset):
            needed = "a list or a dict of datasets (to split one dataset into tasks use TaskStream.from_dataset)"
            raise ValueError(f"from_tasks needs {needed}, found one {type(tasks).__name__}")
        stream = cls(label_column, image_column)
        for name, task in tasks.items() if isinstance(tasks, Mapping) else ((None, task) for task in tasks):
            stream.append(task, name)
        if not len(stream):
            raise ValueError("a stream needs at least one task, found none")
        return stream

    def append(self, dataset: DatasetLike, name: str | None = None) -> Task:
        """
        Adds a task of a dataset as in [`~TaskStream.from_tasks`]; its name defaults to `task_` and its position. Known
        classes keep their global ids, and new classes get the next ones. A task that is not valid changes nothing.
        """
        name = f"task_{len(self)}" if name is None else name
        train, test = self._read(*load_splits(dataset, label_column=self.label_column), of_task=f" of task {name!r}")
        repeated = [class_name for class_name in train.names if class_name in self.classes]
        self._extend(train, test, [name], np.zeros_like(train.codes), np.zeros_like(test.codes))
        # Numbers that start at 0 or 1 may be counted within this task alone. Names of ClassLabel(num_classes=n) too.
        is_number = all(map(str.isdecimal, train.names))
        if repeated and is_number and (start := min(map(int, train.names))) <= 1:
            warnings.warn(
                f"the labels of task {name!r} begin at {start}, and {list_names(repeated, 5)} are taken for classes "
                "of earlier tasks; if they are not, cast_column the labels to datasets.ClassLabel(names=[...]).",
                stacklevel=2,
            )
        return self._tasks[-1]

    def pop(self) -> Task:
        """Removes the last task, and the classes that no other task has."""
        return self._tasks.pop()

    @property
    def classes(self) -> tuple[str, ...]:
        """All class names, in the order of their global ids."""
        return tuple(dict.fromkeys(name for task in self._tasks for name in task.classes))

    def match(self, dataset: Any) -> Any:
        """
        Returns a dataset of images with `labels`, the stream's global ids, matched by the names of its classes. Its
        labels are in the column `labels` or in that of the stream. Integers in `labels`, without names, are global ids
        already. A dataset without labels, or of another kind, is returned as it is. Raises a `ValueError` if a name is
        not a class of the stream.
        """
        columns = dataset.column_names if isinstance(dataset, Dataset) else []
        for column in ("labels", self.label_column):
            if column in columns and has_labels(dataset, column):
                if column == "labels" and is_integer(dataset.features[column]):
                    return dataset
                dataset, _ = load_splits(dataset)
                read = LabeledImages.read(dataset, self.image_column, column, "the dataset")
                return read.reorder(self.classes).with_labels({name: i for i, name in enumerate(self.classes)})
        return dataset

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def __repr__(self) -> str:
        def summary(classes: Sequence[str], names: str, *tasks: Task) -> str:
            train, test = sum(len(task.train) for task in tasks), sum(len(task.test or ()) for task in tasks)
            return f"{pluralize(len(classes), 'class')}{names}, {train} train and {test} test images"

        lines = [f"TaskStream: {pluralize(len(self), 'task')}, {summary(self.classes, '', *self)}"]
        for task in self._tasks[:10]:
            lines.append(f"  {task.name}: {summary(task.classes, f' ({list_names(task.classes, 3)})', task)}")
        if len(self) > 10:
            lines.append(f"  ... and {pluralize(len(self) - 10, 'more task')}")
        return "\n".join(lines)

    def _read(
        self, train: Dataset, test: Dataset | None, of_task: str = "", column: str | None = None
    ) -> tuple[LabeledImages, LabeledImages]:
        """Reads and checks the splits of a dataset. Test images are matched to the classes of the train images."""
        if len(train) == 0:
            raise ValueError(f"the train images{of_task} are none; every task needs at least one")
        self.image_column = self.image_column or find_image_column(train)
        columns = self.image_column, column or self.label_column
        read_train = LabeledImages.read(train, *columns, f"the train images{of_task}")
        if len(self) and self._integer_labels != is_integer(read_train.feature):
            raise ValueError(f"{read_train.description} must hold class names or integers as in the other tasks")
        if test is None or len(test) == 0:
            return read_train, replace(read_train, codes=read_train.codes[:0])
        read_test = LabeledImages.read(test, *columns, f"the test images{of_task}")
        if both := sorted(read_train.files() & read_test.files()):
            # datasets.load_dataset puts a class folder called 'test' into both splits.
            raise ValueError(f"{len(both)} files are both train and test images{of_task}, such as {both[0]}")
        return read_train, read_test.reorder(read_train.names)

    def _extend(
        self, train: LabeledImages, test: LabeledImages, names: Sequence[str], train_task: Indices, test_task: Indices
    ) -> TaskStream:
        """Adds tasks, given their names and to which of them each row belongs. Checks all of them first."""
        taken = {task.name.lower(): task.name for task in self}
        task_classes: list[tuple[str, ...]] = []
        for t, name in enumerate(names):
            if not isinstance(name, str) or NAME_RULE.fullmatch(name) is None:
                raise ValueError(f"the name of a task has only letters, digits, '_', '-', 128 at most, got {name!r}")
            if name.lower() in taken:  # on many disks their folders would be the same
                raise ValueError(f"there is a task {taken[name.lower()]!r}, so another cannot be named {name!r}")
            taken[name.lower()] = name
            codes = np.unique(train.codes[train_task == t])
            task_classes.append(tuple(train.names[code] for code in codes))
            if unknown := np.setdiff1d(test.codes[test_task == t], codes).tolist():
                missing = list_names(train.names[code] for code in unknown)
                raise ValueError(f"task {name!r} has test images but no train images of the classes {missing}")
        ids = {name: i for i, name in enumerate(dict.fromkeys(sum(task_classes, self.classes)))}
        check_classes(list(ids))
        warn_about_spellings(ids, self.classes, stacklevel=4)

        train_images = train.with_labels(ids)
        test_images = test.with_labels(ids) if len(test.codes) else None
        for t, name in enumerate(names):
            train_rows, test_rows = np.flatnonzero(train_task == t), np.flatnonzero(test_task == t)
            task_test = test_images.select(test_rows) if test_images is not None and len(test_rows) else None
            self._tasks.append(Task(name, task_classes[t], train_images.select(train_rows), task_test))
        self._integer_labels = is_integer(train.feature)
        return self
