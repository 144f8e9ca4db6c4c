"""How a [`ContinualTrainer`] evaluates the tasks of its stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader

from .. import visualization
from ..data.feature_cache import FeatureDataset
from ..data.task_stream import Task, TaskStream
from ..preprocessing import undecoded
from ..tuner.config import LucaConfig
from ..tuner.model import LucaModel, tuner_of
from .figures import COMPARING_STAGES, Measured, Record, measure_stage, numbers, run_figures
from .publishing import PublishingTrainer
from .run_folder import RESULTS_FORMAT, RunFolder, run_settings
from .task_features import TaskFeatures


class StreamEvaluation(PublishingTrainer):
    """The part of [`ContinualTrainer`] that evaluates the tasks of its stream."""

    # What Trainer declares for every kind of model and data, and what this one has.
    model: Any
    args: Any
    data_collator: Any
    processing_class: Any
    stream: TaskStream
    luca_config: LucaConfig
    folder: RunFolder
    _task_features: TaskFeatures
    _records: list[Record]
    _task_arguments: dict[str, Any]

    @property
    def tuner(self) -> LucaModel:
        """The model's LuCA tuner, once there is an expert."""
        return tuner_of(self.model)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """
        Accuracy over all classes seen so far, with the router that is set now, and the accuracy matrix. If it is not
        the router of the run, there is only the last row, and no figure that compares stages.

        Args:
            eval_dataset (`datasets.Dataset`, a `dict` of them, or `str`, *optional*):
                Other images, with global labels in the column `labels`, or the name of a task.

        Returns:
            `dict`: The figures of `results.json`, each with the prefix, and `accuracy_matrix` (stages × tasks).
        """
        if isinstance(eval_dataset, str):
            tests = {task.name: task.test for task in self.stream if task.test is not None}
            if eval_dataset not in tests:
                raise ValueError(f"there is no task {eval_dataset!r} with test images, only {', '.join(tests)}.")
            eval_dataset = tests[eval_dataset]
        if eval_dataset is not None:
            _check_column(eval_dataset, "labels", "global labels, stream.classes.index(name) of each image's class,")
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if not self._records:
            raise ValueError("there is nothing to evaluate: no task has been learned. Call train() first.")
        last = self._measure(self._records)
        figures = self._figures(last)
        if self.tuner.router != self.args.make_router():
            # Earlier stages were measured with another router and cannot be compared with this one.
            unknown = [[None] * len(self._records)] * (len(self._records) - 1)
            figures["accuracy_matrix"] = [*unknown, last["accuracy"]]
            figures = {name: value for name, value in figures.items() if name not in COMPARING_STAGES}
        matrix = figures.pop("accuracy_matrix")
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(numbers(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return {**metrics, f"{metric_key_prefix}_accuracy_matrix": matrix}

    def features(self, task: Task, split: str) -> FeatureDataset:
        """
        [CLS] `(images, d)` and global labels `(images,)` of a task's `"train"` or `"test"` images, on the CPU,
        computed once and kept in `args.features_cache_dir`. With several processes all must call it.
        """
        return self._task_features.get(self.tuner, task, split)

    def results(self) -> dict[str, Any]:
        """What `results.json` holds: the run's settings, each task as it was learned, and the figures."""
        return {
            "format": RESULTS_FORMAT,
            "settings": run_settings(self.args, self.luca_config),
            "classes": list(self.stream.classes),
            "tasks": [r if r["name"] in self.tuner.experts else {**r, "deleted": True} for r in self._records],
            **self._figures(),
        }

    def save_plots(self) -> list[Path]:
        """
        Draws the pictures of [`~peft_luca.visualization`] into `plots` in the output folder, and into TensorBoard if
        the run logs to it. Returns the files. With several processes all must call it.
        """
        tests, column = self._tests(list(self.tuner.experts)), self.stream.image_column
        read = self._task_features.images
        images = {task.name: read(self.tuner, task, "test")[column] for task in self.stream if task.name in tests}
        if not self.is_world_process_zero():
            return []
        files = []
        for name, figure in visualization.of_a_run(self.results(), self.model, tests, images):
            files.append(self.folder.save_figure(name, figure))
            for callback in self.callback_handler.callbacks:
                if getattr(callback, "tb_writer", None) is not None:
                    callback.tb_writer.add_figure(f"plots/{name}", figure, self.state.global_step)
        return files

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Trainer's, without lists and without figures that were not measured."""
        super().log_metrics(split, numbers(metrics))

    def _tests(self, names: list[str]) -> dict[str, FeatureDataset]:
        """Task → [CLS] of its test images, with its expert's own labels. Every process computes a part."""
        names = [name for name in names if name in self.tuner.experts]
        tasks = [task for task in self.stream if task.name in names and task.test is not None]
        return {task.name: self._task_features.get_own(self.tuner, task, "test") for task in tasks}

    def _measure(self, records: list[Record]) -> Measured:
        """What a stage reaches, computed by one process for all."""
        names = [record["name"] for record in records]
        tests, measured = self._tests(names), None
        self.model.eval()
        if self.is_world_process_zero():
            by_batch = self.args.routing_scope == "batch"
            measured = measure_stage(self.tuner, names, tests, self.args.device, by_batch)
        (measured,) = broadcast_object_list([measured])
        return measured

    def _figures(self, last: Measured | None = None) -> dict[str, Any]:
        """All figures of the run, whose last row may be measured again."""
        share_classes = bool(self._records) and sum(map(len, self.tuner.experts.values())) > len(self.tuner.classes)
        return run_figures(self._records, last, share_classes)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        return super().get_eval_dataloader(self._undecoded(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return super().get_test_dataloader(self._undecoded(test_dataset))

    def _undecoded(self, dataset: Any) -> Any:
        """Images that our own collator decodes, unless the dataset has a transform of its own."""
        column = self.stream.image_column
        _check_column(dataset, column, "images")
        transformed = isinstance(getattr(dataset, "format", None), dict) and dataset.format["type"] == "custom"
        return dataset if transformed else undecoded(dataset, column)


def _check_column(dataset: Any, column: str, content: str) -> None:
    columns = getattr(dataset, "column_names", None)
    if columns is not None and column not in columns:
        raise ValueError(f"the dataset has the columns {columns}, but needs its {content} in a column {column!r}.")
