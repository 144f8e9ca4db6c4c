"""The figures of a run: what a stage measures, what is computed from all stages, and the line after a task."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction

from ..data.feature_cache import FeatureDataset
from ..tuner.model import LucaModel
from ..utils import pluralize
from .metrics import ContinualAccuracy, Floats, forgetting, summarize


# Figures that compare stages, all of which have to be measured with the same router.
COMPARING_STAGES = (
    "average_accuracy", "forgetting", "backward_transfer", "stage_accuracies", "stage_forgetting",
    "task_known_forgetting",
)  # fmt: skip
BATCH = 4096  # features are a memory map of any size

Record = dict[str, Any]  # a learned task, as in results.json
Measured = dict[str, list[float | None]]  # "accuracy", "routing" and "task_known" of each learned task


@torch.no_grad()
def measure_stage(
    tuner: LucaModel, names: Sequence[str], tests: Mapping[str, FeatureDataset], device: Any, whole: bool = False
) -> Measured:
    """
    Measures a model on the test images of each learned task (`tests`: [CLS], with the expert's own labels), with the
    router that is set. `whole` routes all test images of a task as one batch.

    Returns:
        `dict`: per task, or `None` where not measured: `accuracy` over all classes, routed; `routing`, the share of
        images for which the router chose the task's own expert; `task_known`, that expert's accuracy over its classes.
    """
    metric, experts = ContinualAccuracy(), list(tuner.experts)
    task_of_expert = torch.tensor([names.index(name) if name in names else len(names) for name in experts])
    for task, name in enumerate(names):
        if name not in tests:
            continue
        own = tuner.layer.label_space.own[name].cpu()
        size = len(tests[name]) if whole else BATCH
        for z, labels in zip(tests[name].features.split(size), tests[name].labels.split(size), strict=True):
            z = z.to(device)
            routed = tuner.route_features(z)
            metric.add_batch(
                predictions=routed.logits.argmax(1).cpu(),
                references=own[labels],
                task=[task] * len(z),
                stage=[0] * len(z),
                experts=task_of_expert[routed.expert.cpu()],
                task_known_predictions=own[tuner.expert_logits(z, name).argmax(1).cpu()],
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a leak: run_figures warns
        figures = (metric.compute() or {}) if tests else {}
    columns = {"accuracy": "accuracy", "routing": "routing_accuracy", "task_known": "known_accuracy"}
    measured = {name: list(figures.get(f"per_task_{figure}", [])) for name, figure in columns.items()}
    return {name: values + [None] * (len(names) - len(values)) for name, values in measured.items()}


def run_figures(records: list[Record], last: Measured | None = None, shared_classes: bool = False) -> dict[str, Any]:
    """
    Computes all figures from what the stages measured. `last` replaces what the last stage measured.
    `shared_classes` says whether experts share classes.
    """
    if not records:
        return {}
    stages = [*records[:-1], last or records[-1]]
    matrix = _matrix(stages, "accuracy")
    figures: dict[str, Any] = {
        "accuracy_matrix": [[None if math.isnan(v) else v for v in row] for row in matrix.tolist()]
    }
    if any(record["test_images"] for record in records):
        known, routing = (np.array(stages[-1][name], dtype=float) for name in ("task_known", "routing"))
        with warnings.catch_warnings():
            if shared_classes:
                # Another expert of the class may be better than the task's own, and nothing leaks.
                warnings.filterwarnings("ignore", "routed accuracy .* is above", UserWarning)
            figures |= summarize(matrix, [record["test_images"] for record in records], known, routing)
        figures["task_known_forgetting"] = forgetting(_matrix(stages, "task_known"))
    return figures


def _matrix(stages: list[dict[str, Any]], name: str) -> Floats:
    """What each stage measured of each task, (stages, tasks); NaN where it did not."""
    matrix = np.full((len(stages), len(stages)), np.nan)
    for row, stage in zip(matrix, stages, strict=True):
        row[: len(stage[name])] = [np.nan if value is None else value for value in stage[name]]
    return matrix


def task_line(done: int, tasks: int, record: Record, figures: dict[str, Any], classes: int) -> str:
    """The line that is printed after a task."""
    names = ", ".join(record["classes"][:4]) + (", …" if len(record["classes"]) > 4 else "")
    line = f"task {done}/{tasks} {record['name']} ({names}), {record['seconds']:.1f} s"
    if figures.get("last_accuracy") is None:
        return f"{line}: no test images"
    return (
        f"{line}: accuracy {figures['last_accuracy']:.3f} over {pluralize(classes, 'class')}, "
        f"{figures['task_known_accuracy']:.3f} with the task known, right expert {figures['routing_accuracy']:.3f}"
    )


class Accuracy:
    """The default `compute_metrics`: accuracy, over all images at once or, with `batch_eval_metrics`, by batches."""

    def __init__(self) -> None:
        self.correct, self.images = 0, 0

    def __call__(self, prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        predicted, labels = torch.as_tensor(logits), torch.as_tensor(prediction.label_ids)
        if predicted.ndim > 1:  # preprocess_logits_for_metrics may have taken the argmax
            predicted = predicted.argmax(-1)
        self.correct += int((predicted == labels.to(predicted.device)).sum())
        self.images += len(labels)
        if not compute_result:
            return {}
        accuracy = self.correct / max(1, self.images)
        self.correct, self.images = 0, 0
        return {"accuracy": accuracy}


def numbers(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that are numbers: what logs and tables hold."""
    return {name: value for name, value in figures.items() if isinstance(value, (int, float))}
