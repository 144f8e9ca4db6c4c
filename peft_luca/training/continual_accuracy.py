"""The accuracy matrix as a metric of the `evaluate` library, which takes long to import: nothing else imports this."""

from __future__ import annotations

from typing import Any

import evaluate
import numpy as np
from datasets import Features, Value

from .metrics import or_none, share, summarize


_REQUIRED = ("predictions", "references", "task", "stage")
_OPTIONAL = ("experts", "task_known_predictions")
_NOT_GIVEN = -1  # stands in an optional column that was left out


class ContinualAccuracy(evaluate.Metric):
    """The accuracy matrix and its figures as a metric of the `evaluate` library, computed in memory.

    One row per prediction: `predictions` and `references` are class ids; `task` is the index of the image's task and
    `stage` that of the last task learned. Optional columns: `experts`, the task whose expert was chosen (gives
    `routing_accuracy`), and `task_known_predictions`, the class ids predicted by the task's own expert (gives
    `task_known_accuracy`). Every stage must predict all of a task's test images. Takes the arguments of
    [`evaluate.Metric`]; `keep_in_memory` defaults to `True` unless `num_process > 1`.

    Example:

    ```python
    >>> metric = ContinualAccuracy()
    >>> metric.add_batch(predictions=[0, 1], references=[0, 1], task=[0, 0], stage=[0, 0])
    >>> metric.add_batch(predictions=[0, 2, 2], references=[0, 1, 2], task=[0, 0, 1], stage=[1, 1, 1])
    >>> metric.compute()["forgetting"]
    0.5
    ```
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("keep_in_memory", kwargs.get("num_process", 1) == 1)
        super().__init__(**kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Accuracy matrix of continual learning (stages x tasks) and the figures computed from it.",
            citation="",
            inputs_description=self.__doc__ or "",
            features=Features({name: Value("int64") for name in (*_REQUIRED, *_OPTIONAL)}),
            format="numpy",
        )

    def _build_data_dir(self) -> str:
        # evaluate makes a folder in the user's home even for metrics that stay in memory.
        return "" if self.keep_in_memory else str(super()._build_data_dir())

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Adds rows. Every argument is a sequence of ints of one length; the optional columns may be left out."""
        batch = {"predictions": predictions, "references": references, **kwargs}
        if missing := [name for name in _REQUIRED if batch.get(name) is None]:
            raise ValueError(f"{missing[0]} is missing; every row needs {', '.join(_REQUIRED)}.")
        size, rows = len(predictions), {name: np.asarray(data) for name, data in batch.items() if data is not None}
        for name, column in rows.items():
            if column.shape != (size,) or column.dtype.kind not in "iu":
                found = f"{size} ints, one per prediction, got {column.dtype} of shape {column.shape}"
                raise ValueError(f"{name} must be {found}; for logits pass logits.argmax(-1)")
        left_out = {name: np.full(size, _NOT_GIVEN) for name in _OPTIONAL}
        super().add_batch(**{**left_out, **rows})  # evaluate has no optional columns

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Adds one row; the other arguments are named as in [`~ContinualAccuracy.add_batch`]."""
        row = {"predictions": prediction, "references": reference, **kwargs}
        self.add_batch(**{name: [value] for name, value in row.items() if value is not None})

    def compute(self, **kwargs: Any) -> dict[str, Any] | None:
        """Adds the given rows, if any, and returns [`summarize`]'s figures of all rows added since the last call, with
        `per_task_known_accuracy` and `per_task_routing_accuracy` (after the last stage; `list` or `None`)."""
        if kwargs:
            self.add_batch(**kwargs)
        if self.writer is None:
            raise ValueError(f"there are no rows: pass {', '.join(_REQUIRED)}, or call add_batch.")
        result: dict[str, Any] | None = super().compute()
        return result

    def _compute(self, *, task: Any, stage: Any, **columns: Any) -> dict[str, Any]:
        images = np.zeros((stage.max() + 1, task.max() + 1))
        correct = np.zeros_like(images)
        np.add.at(images, (stage, task), 1)
        np.add.at(correct, (stage, task), columns["predictions"] == columns["references"])
        counts = images.max(axis=0)
        for i, j in np.argwhere((images > 0) & (images != counts)):
            found = f"task {j} has {images[i, j]:.0f} test images at stage {i} but {counts[j]:.0f} at another"
            raise ValueError(f"{found}; every stage must measure all of a task's test images")
        last, shares = stage == stage.max(), []  # of rows that are as expected, (tasks,); None if left out
        for name, expected in (("task_known_predictions", columns["references"]), ("experts", task)):
            given = columns[name][last] != _NOT_GIVEN
            if given.any() and not given.all():
                raise ValueError(f"{name} is given for {given.sum()} of {given.size} rows of the last stage.")
            right = np.bincount(task[last], (columns[name] == expected)[last], len(counts))
            shares.append(share(right, images[-1]) if given.any() else None)
        per_task = [None if share is None else list(map(or_none, share)) for share in shares]
        names = "per_task_known_accuracy", "per_task_routing_accuracy"
        return summarize(share(correct, images), counts, *shares) | dict(zip(names, per_task, strict=True))
