"""What a [`ContinualTrainer`] does with the images that it evaluates, and with all that it has measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from .. import visualization
from ..data.task_stream import TaskStream
from ..preprocessing import undecoded
from ..tuner.model import LucaModel
from .figures import COMPARING_STAGES, Measured, Record, measure_stage, run_figures
from .task_features import TaskFeatures


def measure(tuner: LucaModel, features: TaskFeatures, records: Sequence[Record]) -> Measured:
    """What the model reaches on the learned tasks, computed by one process for all."""
    names, args = [record["name"] for record in records], features.args
    tests, measured = features.tests(tuner, names), None
    tuner.eval()
    if args.process_index == 0:
        measured = measure_stage(tuner, names, tests, args.device, whole=args.routing_scope == "batch")
    (measured,) = broadcast_object_list([measured])
    return measured


def all_figures(tuner: LucaModel, args: Any, records: list[Record], last: Measured | None = None) -> dict[str, Any]:
    """
    The figures of the run. Its last row may be measured again: if that is with another router, earlier stages cannot
    be compared with it.
    """
    has_shared_classes = bool(records) and sum(map(len, tuner.experts.values())) > len(tuner.classes)
    figures = run_figures(records, last, has_shared_classes)
    if last is not None and tuner.router != args.make_router():
        unknown = [[None] * len(records)] * (len(records) - 1)
        figures["accuracy_matrix"] = [*unknown, last["accuracy"]]
        for name in COMPARING_STAGES:
            figures.pop(name, None)
    return figures


def save_plots(trainer: Any) -> list[Path]:
    """Draws the plots of a run into its folder and into TensorBoard."""
    tuner, features, files = trainer.tuner, trainer.task_features, []
    tests = features.tests(tuner, tuner.experts)
    tasks = [task for task in trainer.stream if task.name in tests]
    images = {task.name: features.images(tuner, task, "test")[trainer.stream.image_column] for task in tasks}
    if trainer.is_world_process_zero():
        for name, figure in visualization.of_a_run(trainer.results(), trainer.model, tests, images):
            files.append(trainer.folder.save_figure(name, figure))
            for callback in trainer.callback_handler.callbacks:
                if getattr(callback, "tb_writer", None) is not None:
                    callback.tb_writer.add_figure(f"plots/{name}", figure, trainer.state.global_step)
    return files


def images_to_evaluate(stream: TaskStream, dataset: Any) -> Any:
    """A dataset, or the test images of the task of that name; `None` for those of all tasks."""
    if isinstance(dataset, str):
        tests = {task.name: task.test for task in stream if task.test is not None}
        if dataset not in tests:
            raise ValueError(f"there is no task {dataset!r} with test images, only {', '.join(tests)}.")
        return tests[dataset]
    columns = getattr(dataset, "column_names", None)
    if columns is not None and "labels" not in columns:
        raise ValueError(
            f"eval_dataset has the columns {columns}, but needs its global labels in a column 'labels': "
            "stream.classes.index(name) of each image's class."
        )
    return dataset


def decoded_by_collator(stream: TaskStream, dataset: Any) -> Any:
    """Images that our own collator decodes, unless the dataset has a transform of its own."""
    column, columns = stream.image_column, getattr(dataset, "column_names", None)
    if columns is not None and column not in columns:
        raise ValueError(f"the dataset has the columns {columns}, but needs its images in a column {column!r}.")
    has_transform = isinstance(getattr(dataset, "format", None), dict) and dataset.format["type"] == "custom"
    return dataset if has_transform else undecoded(dataset, column)
