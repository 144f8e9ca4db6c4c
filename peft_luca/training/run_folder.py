"""What a run writes down of each task it has learnt, what is read off that, and which run may go on from it."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers.trainer_utils import has_length

from ..data.task_stream import TaskStream
from ..hub.publishing import RESULTS_NAME
from ..tuner.config import LucaConfig
from ..utils import pluralize
from .arguments import ContinualTrainingArguments
from .metrics import forgetting, summarize


RESULTS_FORMAT = 1
# What makes a run's experts what they are. A run goes on only under the same values.
SETTINGS = (
    "recipe learning_rate num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps optim "
    "optim_args lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay max_grad_norm label_smoothing_factor "
    "l1_weight l1_proximal negatives augmentation augmented_views schedule_per_epoch class_mean_rows router "
    "routing_scope statistics statistics_rank statistics_random_features seed data_seed features_dtype on_bad_image "
    "bf16 fp16 adam_beta1 adam_beta2 adam_epsilon dataloader_drop_last train_sampling_strategy"
).split()
# Figures that compare stages, all of which have to be measured with one router.
COMPARING_STAGES = "average_accuracy forgetting backward_transfer stage_accuracies task_known_forgetting".split()

Record = dict[str, Any]  # a task that was learnt, as results.json has it
Measured = dict[str, list[float | None]]  # what the model of one stage reaches on each task learnt


def run_settings(args: ContinualTrainingArguments, luca_config: LucaConfig) -> dict[str, Any]:
    """The values of a run that `results.json` keeps, as JSON gives them back."""
    config = {
        name: value
        for name, value in asdict(luca_config).items()
        if name in LucaConfig.__annotations__
        and name not in ("classes", "target_modules", "allow_mismatch", "fingerprint")
    }
    values = {name: getattr(args, name) for name in SETTINGS}
    return json.loads(json.dumps({**values, "luca_config": config}))


def run_figures(records: list[Record], last: Measured | None = None, shared_classes: bool = False) -> dict[str, Any]:
    """
    Everything that is read off the accuracy matrix.

    Args:
        records (`list[dict]`): The tasks learnt, each with what its stage measured.
        last (`dict`, *optional*): What to take in place of the last stage's, measured anew.
        shared_classes (`bool`, *optional*, defaults to `False`): Whether experts share classes.
    """
    if not records:
        return {}
    stages = [*records[:-1], last or records[-1]]
    matrix = _matrix(stages, "accuracy")
    figures: dict[str, Any] = {
        "accuracy_matrix": [[None if math.isnan(v) else v for v in row] for row in matrix.tolist()]
    }
    if any(record["test_images"] for record in records):
        vectors = [np.array(stages[-1][name], dtype=float) for name in ("task_known", "routing")]
        with warnings.catch_warnings():
            if shared_classes:
                # Then another expert than the task's own may know better, and nothing leaks.
                warnings.filterwarnings("ignore", "routed accuracy .* is above", UserWarning)
            figures |= summarize(matrix, [record["test_images"] for record in records], *vectors)
        figures["task_known_forgetting"] = forgetting(_matrix(stages, "task_known"))
    return figures


def _matrix(stages: list[dict[str, Any]], name: str) -> np.ndarray:
    """What each stage measured of each task, (stages, tasks); NaN where it did not."""
    matrix = np.full((len(stages), len(stages)), np.nan)
    for row, stage in zip(matrix, stages, strict=True):
        row[: len(stage[name])] = [np.nan if value is None else value for value in stage[name]]
    return matrix


def earlier_run(folder: Path, settings: dict[str, Any], stream: TaskStream, refuse: bool = False) -> list[Record]:
    """
    The records of the run whose results are in a folder; none where there are no results.

    Args:
        folder (`Path`): The run's output folder.
        settings (`dict`): [`run_settings`] of the run that wants to go on from it.
        stream ([`TaskStream`]): Its stream.
        refuse (`bool`, *optional*, defaults to `False`): Refuse to go on from any run.

    Raises:
        ValueError: the folder holds a run of another stream or of other settings.
    """
    path = folder / RESULTS_NAME
    if not path.is_file():
        return []
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        records, there = results["tasks"], results["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not hold the results of a run: {error!r}. Choose another output_dir."
        ) from error
    if refuse:
        raise ValueError(
            f"{folder} holds a run of {pluralize(len(records), 'task')}. Choose another output_dir, delete it, or "
            "call train() without resume_from_checkpoint=False to go on with it."
        )
    changes = ", ".join(
        f"{name}: {there.get(name)!r} there, {here!r} now"
        for name, here in settings.items()
        if name != "router" and there.get(name) != here
    )
    if changes:
        raise ValueError(f"{folder} holds a run with other settings ({changes}). Choose another output_dir.")
    tasks = {task.name: task for task in stream}
    for record in records:
        if record.get("deleted"):  # a forgotten task need not be there
            continue
        task = tasks.get(record["name"])
        if task is None:
            raise ValueError(
                f"{folder} holds a run of another stream: its task {record['name']!r} is not among "
                f"{', '.join(map(repr, tasks))}. Choose another output_dir."
            )
        images = [len(task.train) if has_length(task.train) else None, 0 if task.test is None else len(task.test)]
        now = [task.name, list(task.classes), *images]
        then = [record[key] for key in ("name", "classes", "train_images", "test_images")]
        if now != then:
            raise ValueError(
                f"{folder} holds a run of another stream: its task {then[0]!r} has {then[2]} train images of "
                f"{then[1]}, here {now[0]!r} has {now[2]} of {now[1]}. Choose another output_dir."
            )
    return records


def task_line(done: int, tasks: int, record: Record, figures: dict[str, Any], classes: int) -> str:
    """The line that a person reads after a task."""
    names = ", ".join(record["classes"][:4]) + (", …" if len(record["classes"]) > 4 else "")
    line = f"task {done}/{tasks} {record['name']} ({names}), {record['seconds']:.1f} s"
    if figures.get("last_accuracy") is None:
        return f"{line}: no test images"
    return (
        f"{line}: accuracy {figures['last_accuracy']:.3f} over {pluralize(classes, 'class')}, "
        f"{figures['task_known_accuracy']:.3f} with the task known, right expert {figures['routing_accuracy']:.3f}"
    )
