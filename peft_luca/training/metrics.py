"""The figures that are computed from one accuracy matrix.

`matrix[i, j]`, of shape `(stages, tasks)`, is the accuracy on task j's test images after stage i, routed over all
classes seen by then, as a fraction; NaN where it was not measured (before task j was learned, after its expert was
deleted, or if the task has no test images). `counts[j]`, of shape `(tasks,)`, is the number of task j's test images.
"""

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import EvalPrediction

from ..utils import pluralize


Floats: TypeAlias = npt.NDArray[np.float64]

# Figures that compare stages, all of which have to be measured with the same router.
COMPARING_STAGES = "average_accuracy forgetting backward_transfer stage_accuracies stage_forgetting".split()
COMPARING_STAGES += ["task_known_forgetting"]

Record = dict[str, Any]  # a learned task, as in results.json
MEASURED = ("accuracy", "routing", "task_known", "entropy")
Measured = dict[str, list[float | None]]  # these of each learned task, `None` where not measured


def accuracy_matrix(records: Sequence[Record]) -> list[list[float | None]]:
    """Stages × tasks, of what the records hold."""
    rows = [record.get("accuracy", []) for record in records]
    return [[*row, *[None] * (len(rows) - len(row))] for row in rows]


def stage_accuracies(matrix: npt.ArrayLike, counts: npt.ArrayLike) -> Floats:
    """A_1 ... A_B: at each stage, the share of right answers among the test images of all tasks seen by then,
    `(stages,)`; NaN for a stage at which no test image was seen. Tasks without test images are ignored."""
    measured, images = _checked(matrix, counts)
    weights = np.where(np.isnan(measured), 0.0, images)  # (stages, tasks)
    return share((weights * np.nan_to_num(measured)).sum(axis=1), weights.sum(axis=1))


def average_accuracy(matrix: npt.ArrayLike, counts: npt.ArrayLike) -> float:
    """Ā, average incremental accuracy: the mean of the stage accuracies."""
    stages = stage_accuracies(matrix, counts)
    return float("nan") if np.isnan(stages).all() else float(np.nanmean(stages))


def last_accuracy(matrix: npt.ArrayLike, counts: npt.ArrayLike) -> float:
    """A_B: the accuracy after the last stage."""
    return float(stage_accuracies(matrix, counts)[-1])


def forgetting(matrix: npt.ArrayLike) -> float:
    """Mean over tasks of (best accuracy at an earlier stage - accuracy at the last stage), in [-1, 1]; 0.0 if no task
    was measured at both. Positive means forgotten. (Chaudhry et al., 2018.)"""
    return _stage_forgetting(_checked(matrix)[0])[-1]


def backward_transfer(matrix: npt.ArrayLike) -> float:
    """Mean over tasks of (accuracy at the last stage - accuracy when the task was just learned), in [-1, 1]; 0.0 if no
    task was measured at both. Negative means forgotten. (Lopez-Paz & Ranzato, 2017.)"""
    measured, _ = _checked(matrix)
    first = np.argmax(~np.isnan(measured), axis=0)  # the stage that learned each task
    change = measured[-1] - measured[first, np.arange(len(first))]
    return _mean_of_measured(change[first < len(measured) - 1])


def summarize(
    matrix: npt.ArrayLike,
    counts: npt.ArrayLike,
    task_known: npt.ArrayLike | None = None,
    routing: npt.ArrayLike | None = None,
) -> dict[str, Any]:
    """All figures, under the names they have in `results.json`.

    `task_known` and `routing`, of shape `(tasks,)`, were measured after the last stage: each task's accuracy when its
    own expert answers, and the share of its images for which the router chose that expert. What was not measured is
    `None`, so that the result is valid JSON. Warns if the routed accuracy is above the accuracy with the task known.
    """
    measured, images = _checked(matrix, counts)
    measured = np.where(images > 0, measured, np.nan)
    routed = last_accuracy(measured, images)
    known = _last_stage_mean("task_known", task_known, measured, images)
    # An image may be answered right by another task's expert, so this can happen by a little, and is never wrong.
    if known is not None and routed > known + 1e-9:
        found = f"routed accuracy {routed:.4f} is above accuracy with the task known {known:.4f}"
        leaks = "batches sorted by class and routed as a whole, a task id among the inputs"
        warnings.warn(f"{found}: check for a leak of the task into the evaluation ({leaks})", stacklevel=2)
    return {
        "average_accuracy": or_none(average_accuracy(measured, images)),
        "last_accuracy": or_none(routed),
        "forgetting": forgetting(measured),
        "backward_transfer": backward_transfer(measured),
        "routing_accuracy": _last_stage_mean("routing", routing, measured, images),
        "task_known_accuracy": known,
        "stage_accuracies": [or_none(value) for value in stage_accuracies(measured, images)],
        "stage_forgetting": _stage_forgetting(measured),
        "per_task_accuracy": [or_none(value) for value in measured[-1]],
    }


def _checked(matrix: npt.ArrayLike, counts: npt.ArrayLike | None = None) -> tuple[Floats, Floats]:
    """The matrix and the counts as floats. Without counts every task counts as one image."""
    measured = np.asarray(matrix, dtype=np.float64)
    if measured.ndim != 2 or measured.size == 0:
        raise ValueError(f"the accuracy matrix must have the shape (stages, tasks), got {measured.shape}")
    if ((measured < 0) | (measured > 1)).any():
        found = f"{np.nanmin(measured)} to {np.nanmax(measured)}"
        raise ValueError(f"accuracies must be fractions in [0, 1] or NaN, got {found}; divide percentages by 100")
    images = np.ones(measured.shape[1]) if counts is None else np.asarray(counts, dtype=np.float64)
    if images.shape != measured.shape[1:] or not (images >= 0).all():
        raise ValueError(f"counts must be the test images of {measured.shape[1]} tasks, none negative, got {images}")
    return measured, images


def _stage_forgetting(measured: Floats) -> list[float]:
    """[`forgetting`] after each stage, from the best accuracies so far."""
    below_best = np.fmax.accumulate(measured, axis=0)[:-1] - measured[1:]  # (stages - 1, tasks)
    return [0.0, *map(_mean_of_measured, below_best)]


def _mean_of_measured(changes: Floats) -> float:
    kept = changes[~np.isnan(changes)]
    return float(np.mean(kept)) if kept.size else 0.0


def _last_stage_mean(argument: str, values: npt.ArrayLike | None, measured: Floats, images: Floats) -> float | None:
    """Image-weighted mean of per-task values, over the tasks that the last stage measured."""
    per_task = np.asarray(np.full(images.shape, np.nan) if values is None else values, dtype=np.float64)
    if per_task.shape != images.shape:
        raise ValueError(f"{argument} must have one value for each of {len(images)} tasks, got shape {per_task.shape}")
    return or_none(last_accuracy(np.where(np.isnan(measured[-1]), np.nan, per_task)[None], images))


def share(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> Floats:
    """part / whole, NaN where there is no whole."""
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=whole > 0)


def or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def task_line(tasks: int, figures: dict[str, Any], classes: int) -> str:
    """The line that is printed after a task."""
    record = figures["tasks"][-1]
    names = ", ".join(record["classes"][:4]) + (", …" if len(record["classes"]) > 4 else "")
    line = f"task {len(figures['tasks'])}/{tasks} {record['name']} ({names}), {record['seconds']:.1f} s"
    if figures.get("last_accuracy") is None:
        return f"{line}: no test images"
    accuracy = f"{figures['last_accuracy']:.3f} over {pluralize(classes, 'class')}"
    return (
        f"{line}: accuracy {accuracy} ({figures['entropy_accuracy']:.3f} by entropy), "
        f"{figures['task_known_accuracy']:.3f} with the task known, right expert {figures['routing_accuracy']:.3f}"
    )


class Accuracy:
    """The default `compute_metrics`: accuracy, over all images at once or, with `batch_eval_metrics`, by batches."""

    def __init__(self) -> None:
        self.right: list[torch.Tensor] = []

    def __call__(self, prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        predicted, labels = torch.as_tensor(logits), torch.as_tensor(prediction.label_ids)
        if predicted.ndim > 1:  # preprocess_logits_for_metrics may have taken the argmax
            predicted = predicted.argmax(-1)
        self.right.append(predicted == labels.to(predicted.device))
        if not compute_result:
            return {}
        right, self.right = torch.cat(self.right), []
        return {"accuracy": int(right.sum()) / max(1, len(right))}


def numbers(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that are numbers: what logs and tables hold."""
    return {name: value for name, value in figures.items() if isinstance(value, (int, float))}
