"""`ContinualTrainer`: learns the tasks of a stream, each by an `ExpertTrainer` made for it."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.trainer_utils import HubStrategy, TrainOutput, has_length
from transformers.utils import logging

from .. import visualization
from ..data.feature_cache import FeatureDataset
from ..data.sources import DatasetLike
from ..data.task_stream import Task, TaskStream
from ..hub.publishing import push_experts
from ..hub.saving import load_experts
from ..preprocessing import ImageCollator, channels_of, check_processor, image_size, undecoded
from ..tuner.config import LucaConfig
from ..tuner.head import check_expert_name, find_head
from ..tuner.layer import luca_layers
from ..tuner.model import LucaModel, quiet_peft, tuner_of
from ..utils import pluralize
from .arguments import CONFIG_RECIPES, ContinualTrainingArguments
from .batches import ExpertProgressCallback
from .evaluation import COMPARING_STAGES, Accuracy, Measured, Record, measure_stage, run_figures, task_line
from .expert_trainer import ExpertTrainer
from .publishing import PublishingTrainer
from .run_folder import PLOTS_NAME, RESULTS_FORMAT, RunFolder, run_settings
from .task_features import TaskFeatures


logger = logging.get_logger(__name__)

# Arguments of Trainer that have no meaning for a stream, with the reason.
REFUSED = {
    "train_dataset": "the tasks of the stream are trained on. Pass a stream",
    "eval_dataset": "the test images of the tasks are evaluated. Pass other images to evaluate()",
    "data_collator": "[CLS] is cached as the image processor makes it, and predictions are made the same way. Put "
    "your preprocessing into processing_class, or train each expert with an ExpertTrainer",
    "optimizers": "the parameters of later tasks do not exist yet. Use optimizer_cls_and_kwargs=(class, {...})",
    "model_init": "a run has one output_dir, and trials of a hyperparameter search need one each. Make a trainer for "
    "each trial",
}


class ContinualTrainer(PublishingTrainer):
    """
    Teaches a frozen image classifier a stream of tasks: for each task it adds an expert, trains it with an
    [`ExpertTrainer`], saves it, and evaluates all classes seen so far.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The backbone with its head, or a model that has LuCA experts: they are kept and take part. An only expert
            `default` that was never trained, and whose classes were not named, is a template for the experts.
        args ([`ContinualTrainingArguments`], *optional*): Output folder, recipe and hyperparameters.
        stream ([`TaskStream`]): The tasks. It may grow while the trainer lives.
        luca_config ([`LucaConfig`], *optional*): Template of every expert; `classes` come from the tasks.
        processing_class (`BaseImageProcessor`): The backbone's image processor.
        kwargs:
            Other arguments of [`~transformers.Trainer`], such as `callbacks`, which see every task's training, or
            `compute_loss_func` and `optimizer_cls_and_kwargs`, which are used for every task.

    Raises:
        ValueError: an argument does not fit. Nothing has been written then.
    """

    # What Trainer declares for every kind of model and data, and what this one has.
    model: Any
    args: Any
    data_collator: Any
    processing_class: Any

    def __init__(
        self,
        model: nn.Module,
        args: ContinualTrainingArguments | None = None,
        stream: TaskStream | None = None,
        luca_config: LucaConfig | None = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        args = ContinualTrainingArguments("trainer_output") if args is None else args
        _check_arguments(model, args, stream, processing_class, kwargs)
        assert isinstance(stream, TaskStream)
        template, model = _template(model, luca_config)
        template.resolve(CONFIG_RECIPES[args.recipe])
        template.widths(find_head(model.get_base_model() if isinstance(model, PeftModel) else model, template).width)
        for task in stream:
            _check_task(task, model, args)
        if isinstance(model, PeftModel):
            tuner_of(model).layer.experts.prepared(args.make_router())  # raises if an expert lacks statistics
        collator = ImageCollator(processing_class, stream.image_column, channels=channels_of(model))
        check_processor(collator, model)
        self._task_arguments = {"compute_metrics": Accuracy(), **kwargs}
        # Trainer asks for an evaluation set when args.eval_strategy is set: each task brings its own.
        super().__init__(
            model=model,
            args=args,
            processing_class=processing_class,
            data_collator=collator,
            eval_dataset=[],
            **self._task_arguments,
        )
        self._task_arguments.pop("callbacks", None)  # tasks share the handler's
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(ExpertProgressCallback)
        self.stream = stream
        self.luca_config = template
        self.folder = RunFolder(args.output_dir, args.should_save)
        self._task_features = TaskFeatures(stream, args, processing_class, collator.channels, self._print)
        self._records: list[Record] = []  # one per learned task, as results.json has them
        self._pushing: Future[Any] | None = None  # to the Hub, in the background

    # ---- the stream ----------------------------------------------------------------------------------------------

    @property
    def tuner(self) -> LucaModel:
        """The model's LuCA tuner, once there is an expert."""
        return tuner_of(self.model)

    def train(
        self,
        resume_from_checkpoint: bool | str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """
        Learns every task of the stream that has not been learned. Tasks that an earlier run finished in
        `args.output_dir` are loaded, so a run that was interrupted is resumed by starting it again.

        Args:
            resume_from_checkpoint (`bool`, *optional*): `False` refuses to resume an earlier run.

        Returns:
            [`~transformers.trainer_utils.TrainOutput`]: Steps, mean loss, and the numbers among the run's figures.

        Raises:
            ValueError: the folder holds a run of another stream or of other settings.
            RuntimeError: another run uses the folder.
            FloatingPointError: a loss or a weight is not a finite number.
        """
        if isinstance(resume_from_checkpoint, str):
            raise ValueError(
                f"a stream is resumed from args.output_dir ({self.args.output_dir}), task by task, not from "
                f"the checkpoint {resume_from_checkpoint!r}. Call train() with the same output_dir."
            )
        with self.folder.lock():
            self._resume(refuse=resume_from_checkpoint is False)
            learned = self._learned
            outputs = [self._train_task(task) for task in list(self.stream) if task.name not in learned]
        if self.args.push_to_hub and outputs:
            self.push_to_hub()
        if self.args.plots:
            self.save_plots()
        steps = sum(output.global_step for output in outputs)
        loss = sum(output.training_loss * output.global_step for output in outputs) / max(steps, 1)
        seconds = sum(output.metrics["train_runtime"] for output in outputs)
        metrics = {
            "train_runtime": seconds,
            "train_steps_per_second": round(steps / seconds, 3) if seconds else 0.0,
            "total_flos": sum(output.metrics["total_flos"] for output in outputs),
            "train_loss": loss,
        }
        return TrainOutput(steps, loss, metrics | _numbers(self._figures()))

    def train_task(self, task: Task | DatasetLike, name: str | None = None) -> TrainOutput:
        """
        Learns one more task.

        Args:
            task ([`Task`] or dataset): A task of the stream, or a dataset, which is appended to the stream.
            name (`str`, *optional*): The new task's name, for a dataset.

        Returns:
            [`~transformers.trainer_utils.TrainOutput`]: That of the task's [`ExpertTrainer`].

        Raises:
            ValueError: the task has been learned, or the model has an expert of its name.
            RuntimeError, FloatingPointError: see [`~ContinualTrainer.train`].
        """
        with self.folder.lock():
            self._resume()
            if isinstance(task, Task):
                return self._train_task(task)
            self.stream.append(task, name)
            try:
                return self._train_task(self.stream[-1])
            except BaseException:
                if self.stream[-1].name not in self._learned:
                    self.stream.pop()
                raise

    def _train_task(self, task: Task) -> TrainOutput:
        if not any(task is known for known in self.stream):
            raise ValueError(
                f"the task {task.name!r} is not of the trainer's stream, so its labels mean nothing here. Pass its "
                "dataset, which is then appended, or make the trainer with its stream."
            )
        if task.name in self._learned and task.name not in self.tuner.experts:
            raise ValueError(
                f"the task {task.name!r} was learned and its expert deleted. To learn it again pass its dataset under "
                "another name."
            )
        _check_task(task, self.model, self.args)
        started = time.perf_counter()
        try:
            self._add_expert(task)
            for split in ("train", "test"):  # an image that cannot be read stops the task before it is trained
                if split == "train" or task.test is not None:
                    self.features(task, split)
            self._task_features.check_classes(self.tuner, task)
            trainer = _TaskTrainer(self, task)
            try:
                output = trainer.train()
            finally:
                self.state.log_history += [{**entry, "task": task.name} for entry in trainer.state.log_history]
            self.state.global_step += trainer.state.global_step
            self.state.max_steps += trainer.state.max_steps
            self.tuner.set_requires_grad(task.name, False)
            self._set_router()
            self._finish(task, output, time.perf_counter() - started)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self.is_world_process_zero():
                logger.warning(
                    f"Interrupted: {len(self._records)} of {len(self.stream)} tasks are finished, and kept in "
                    f"{self.args.output_dir}. To go on, call train() again, or start again with the same output_dir "
                    "and the backbone loaded anew."
                )
            if task.name not in self._learned:
                self._drop_expert(task)
                self._task_features.forget(task)
            raise
        return output

    def _add_expert(self, task: Task) -> None:
        config = copy.deepcopy(self.luca_config)
        config.classes = list(task.classes)
        with torch.random.fork_rng():
            torch.manual_seed(task_seed(self.args.seed, task.classes))
            if isinstance(self.model, PeftModel):
                self.model.add_adapter(task.name, config)
            else:
                with quiet_peft():
                    self._set_model(get_peft_model(self.model, config, adapter_name=task.name))
        self.model.eval()

    def _finish(self, task: Task, output: TrainOutput, seconds: float) -> None:
        record: dict[str, Any] = {
            "name": task.name,
            "classes": list(task.classes),
            "train_images": len(task.train) if has_length(task.train) else None,
            "test_images": len(task.test) if task.test is not None else 0,
            "skipped_images": self._task_features.skipped(task),
            "steps": output.global_step,
            "train_loss": output.training_loss,
            "seconds": round(seconds, 3),
        }
        record.update(self._measure([*self._records, record]))
        self._records.append(record)
        figures = self._figures()
        try:
            self.folder.add_expert(self.model, task.name, self.results())
        except BaseException:
            self._records.pop()  # a task is learned once it is on the disk
            raise
        self._sync_labels()
        self._push_learned()
        self._print(task_line(len(self._records), len(self.stream), record, figures, len(self.tuner.classes)))
        self.log({f"stage_{name}": value for name, value in figures.items() if isinstance(value, float)})

    def _drop_expert(self, task: Task) -> None:
        """Leaves the model as it was before a task that could not be finished."""
        if not isinstance(self.model, PeftModel) or task.name not in self.tuner.experts:
            return
        if len(self.tuner.experts) == 1:
            self._set_model(self.tuner.unload())
        else:
            self.model.delete_adapter(task.name)
            self._set_router()

    def delete_adapter(self, adapter_name: str) -> None:
        """
        Deletes a task's expert, in the model and in `args.output_dir`. Its task is not measured any more: its column
        of the accuracy matrix ends, and the last row is measured again with the remaining experts.

        Args:
            adapter_name (`str`): The task.

        Raises:
            ValueError: there is no such expert, or it is the only one.
        """
        with self.folder.lock():
            self._resume()
            if not isinstance(self.model, PeftModel) or adapter_name not in self.tuner.experts:
                raise ValueError(f"there is no expert {adapter_name!r} to delete.")
            self.model.delete_adapter(adapter_name)
            self._set_router()
            self._sync_labels()
            if adapter_name in self._learned:
                self._records[-1].update(self._measure(self._records))
                self.folder.delete_expert(adapter_name, self.results())

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """
        Accuracy over all classes seen so far, with the router that is set now, and the accuracy matrix. If it is not
        the router of the run, there is only the last row, and no figure that compares stages.

        Args:
            eval_dataset (`datasets.Dataset` or `str`, *optional*):
                Images with global labels in the column `labels`, or the name of a task, to evaluate in place of the
                test images of all tasks; or a `dict` of datasets.

        Returns:
            `dict`: The figures of `results.json`, each with the prefix, and `accuracy_matrix` (stages × tasks).
        """
        if isinstance(eval_dataset, str):
            tests = {task.name: task.test for task in self.stream if task.test is not None}
            if eval_dataset not in tests:
                raise ValueError(f"there is no task {eval_dataset!r} with test images, only {', '.join(tests)}.")
            eval_dataset = tests[eval_dataset]
        columns = getattr(eval_dataset, "column_names", None)
        if columns is not None and "labels" not in columns:
            raise ValueError(
                f"eval_dataset has the columns {columns}, but needs its global labels in a column "
                "'labels': stream.classes.index(name) of each image's class."
            )
        if eval_dataset is not None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if not self._records:
            raise ValueError("there is nothing to evaluate: no task has been learned. Call train() first.")
        last = self._measure(self._records)
        figures = self._figures(last)
        if self.tuner.router != self.args.make_router():
            # Earlier stages were measured with another router and cannot be compared with this one.
            unknown = [[None] * len(self._records)] * (len(self._records) - 1)
            figures["accuracy_matrix"] = [*unknown, last["accuracy"]]
            for name in COMPARING_STAGES:
                figures.pop(name, None)
        matrix = figures.pop("accuracy_matrix")
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(_numbers(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return {**metrics, f"{metric_key_prefix}_accuracy_matrix": matrix}

    def features(self, task: Task, split: str) -> FeatureDataset:
        """
        [CLS] of a task's images with the stream's global labels, computed once and kept in `args.features_cache_dir`.
        With several processes each computes a part, so all must call it.

        Args:
            task ([`Task`]): A task of the stream.
            split (`str`): `"train"` or `"test"`.

        Returns:
            [`FeatureDataset`]: `features` (images, d), in `args.features_dtype`, `labels` (images,), on the CPU.
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
        the run logs to it. With several processes all must call it.

        Returns:
            `list[Path]`: The files; none on all processes but the first.
        """
        tests = self._tests(list(self.tuner.experts))
        images = {
            task.name: self._task_features.images(self.tuner, task, "test")[self.stream.image_column]
            for task in self.stream
            if task.name in tests
        }
        if not self.is_world_process_zero():
            return []
        files = []
        for name, figure in visualization.of_a_run(self.results(), self.model, tests, images):
            files.append(self.folder.save_figure(name, figure))
            for callback in self.callback_handler.callbacks:
                if getattr(callback, "tb_writer", None) is not None:
                    callback.tb_writer.add_figure(f"plots/{name}", figure, self.state.global_step)  # type: ignore[attr-defined]
        return files

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """As [`~transformers.Trainer.log_metrics`]; lists and figures that were not measured are left out."""
        super().log_metrics(split, _numbers(metrics))

    def _tests(self, names: list[str]) -> dict[str, FeatureDataset]:
        """Task → [CLS] of its test images, with its expert's own labels. Every process computes a part."""
        tasks = [task for task in self.stream if task.name in names and task.name in self.tuner.experts]
        get = self._task_features.get_own
        return {task.name: get(self.tuner, task, "test") for task in tasks if task.test is not None}

    def _measure(self, records: list[Record]) -> Measured:
        """What a stage reaches, computed by one process for all."""
        names = [record["name"] for record in records]
        tests, measured = self._tests(names), None
        self.model.eval()
        if self.is_world_process_zero():
            whole = self.args.routing_scope == "batch"
            measured = measure_stage(self.tuner, names, tests, self.args.device, whole)
        (measured,) = broadcast_object_list([measured])
        return measured

    def _figures(self, last: Measured | None = None) -> dict[str, Any]:
        """All figures of the run, whose last row may be measured again."""
        shared = bool(self._records) and sum(map(len, self.tuner.experts.values())) > len(self.tuner.classes)
        return run_figures(self._records, last, shared)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        return super().get_eval_dataloader(self._undecoded(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return super().get_test_dataloader(self._undecoded(test_dataset))

    def _undecoded(self, dataset: Any) -> Any:
        """Images that our own collator decodes, unless the dataset has a transform of its own."""
        column, columns = self.stream.image_column, getattr(dataset, "column_names", None)
        if columns is not None and column not in columns:
            raise ValueError(f"the dataset has the columns {columns}, but needs its images in a column {column!r}.")
        transformed = isinstance(getattr(dataset, "format", None), dict) and dataset.format["type"] == "custom"
        return dataset if transformed else undecoded(dataset, column)

    # ---- resuming and saving -------------------------------------------------------------------------------------

    @property
    def _learned(self) -> set[str]:
        return {record["name"] for record in self._records}

    def _resume(self, refuse: bool = False) -> None:
        """Loads what an earlier run finished in the output folder."""
        self.folder.recover(task.name for task in self.stream)
        if self._records:
            return
        records = self.folder.read(run_settings(self.args, self.luca_config), self.stream, refuse)
        if not records:
            return
        sources = {r["name"]: self.folder.path / r["name"] for r in records if not r.get("deleted")}
        if sources:
            self._set_model(load_experts(self.model, sources))
        self._records = records
        self.state.global_step = sum(record["steps"] for record in records)
        self._set_router()
        self._sync_labels()
        self._print(
            f"resuming after {len(records)} of {pluralize(len(self.stream), 'task')} found in {self.folder.path}"
        )

    def _set_model(self, model: nn.Module) -> None:
        self.model = self.model_wrapped = self.callback_handler.model = model

    def _set_router(self) -> None:
        self.tuner.set_router(self.args.make_router())

    def _sync_labels(self) -> None:
        """Images that are evaluated have the stream's labels, the model's logits the order of its experts."""
        places = {name: i for i, name in enumerate(self.tuner.classes)}
        self.data_collator.label_ids = {
            i: places[name] for i, name in enumerate(self.stream.classes) if name in places
        }

    def _print(self, line: str) -> None:
        """A line for the user, past the progress bars."""
        if self.is_world_process_zero():
            logger.info(line) if self.args.disable_tqdm else tqdm.write(line)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # A collection of experts: safetensors and JSON only, no pickled arguments as Trainer writes them.
        if not isinstance(self.model, PeftModel):
            raise ValueError("there is no expert to save: no task has been learned. Call train() first.")
        folder = self.folder if output_dir is None else RunFolder(output_dir, self.args.should_save)
        folder.save(self.model, self.processing_class, self.results() if self._records else None)

    def _card_contents(self) -> dict[str, Any]:
        return {"results": self.results() if self._records else None}

    def _push(self, repo_id: str, blocking: bool, **kwargs: Any) -> Any:
        if self._pushing is not None:
            self._pushing.exception()  # wait; this push carries all that an earlier one did
        return push_experts(
            self.model,
            repo_id,
            blocking=blocking,
            processing_class=self.processing_class,
            **self._card_contents(),
            **kwargs,
        )

    def _push_learned(self) -> None:
        """Pushes in the background, unless an earlier push is still running: the next one carries this task too."""
        if not self.args.push_to_hub or self.args.hub_strategy != HubStrategy.EVERY_SAVE:
            return
        if self._pushing is not None and not self._pushing.done():
            return
        error = None if self._pushing is None else self._pushing.exception()
        try:
            self._pushing = self.push_to_hub(f"{self._records[-1]['name']} learned", blocking=False)
        except Exception as failure:  # whatever the network does, the run goes on
            error = failure
        if error is not None:
            logger.warning(f"Pushing to the Hub failed, and is tried again after the next task: {error!r}")


class _TaskTrainer(ExpertTrainer):
    """The [`ExpertTrainer`] of a task: with the run's callbacks, and logs whose steps run on across tasks."""

    def __init__(self, run: ContinualTrainer, task: Task) -> None:
        self.run, self.task = run, task
        args = copy.copy(run.args)
        args.seed = task_seed(args.seed, task.classes)
        args.report_to, args.push_to_hub = [], False  # the run's callbacks report, and the run pushes
        tuner, features = run.tuner, run._task_features
        plain = features.get_own(tuner, task, "train")
        train: Any
        if args.cache_features and (args.augmented_views or not args.augmentation):
            train = FeatureDataset(plain.features, plain.labels, features.views(tuner, task))
            train.set_epoch(0)
            # Rows of a memory map need no workers.
            args.dataloader_num_workers, args.dataloader_prefetch_factor = 0, None
            args.dataloader_persistent_workers, args.dataloader_multiprocessing_context = False, None
        else:
            train = features.images(tuner, task, "train")
        super().__init__(
            run.model,
            args,
            train_dataset=train,
            eval_dataset=features.get_own(tuner, task, "test") if args.eval_strategy != "no" else None,
            expert=task.name,
            processing_class=run.processing_class,
            features=plain,
            **run._task_arguments,
        )
        self.callback_handler.callbacks = run.callback_handler.callbacks

    def image_collator(self, dataset: Any, augmentation: bool = False) -> ImageCollator:
        ids = {i: own for i, own in enumerate(self.run._task_features.own_labels(self.task).tolist()) if own >= 0}
        return ImageCollator(
            self.processing_class, self.run.stream.image_column, ids, augmentation, channels=channels_of(self.model)
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a curve for each task, beside the one of the run
            logs[f"{self.task.name}/loss"] = logs["loss"]
        with self._steps_of_the_run():
            super().log(logs, start_time)

    @contextmanager
    def _steps_of_the_run(self) -> Iterator[None]:
        own = self.state.global_step
        self.state.global_step += self.run.state.global_step
        try:
            yield
        finally:
            self.state.global_step = own


def task_seed(seed: int, classes: tuple[str, ...]) -> int:
    """The seed of a task: from the run's seed and the class names, not from the task's place in the stream."""
    text = json.dumps([seed, sorted(classes)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def _numbers(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that are numbers: what logs and tables hold."""
    return {name: value for name, value in figures.items() if isinstance(value, (int, float))}


def _check_arguments(model: Any, args: Any, stream: Any, processing_class: Any, kwargs: dict[str, Any]) -> None:
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] != (None, None):
            raise ValueError(f"{name} cannot be used here: {reason}.")
        kwargs.pop(name, None)
    if not isinstance(args, ContinualTrainingArguments):
        raise ValueError(f"args must be ContinualTrainingArguments, got {type(args).__name__}.")
    if not isinstance(stream, TaskStream):
        raise ValueError(
            f"stream must be a TaskStream, got {type(stream).__name__}. Make one with TaskStream.from_dataset."
        )
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be an image classifier or a PeftModel, got {type(model).__name__}. Load it with "
            "AutoModelForImageClassification.from_pretrained."
        )
    if not callable(processing_class):
        raise ValueError(
            f"processing_class must be the backbone's image processor, got {type(processing_class).__name__}. "
            "Load it with AutoImageProcessor.from_pretrained."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "the model's weights are on the meta device, where there are none. Load them with "
            "AutoModelForImageClassification.from_pretrained, outside of torch.device('meta')."
        )
    if args.plots:
        visualization.check_installed()  # now, not when all has been learned
    if args.augmentation:
        image_size(processing_class)  # raises if the processor has none


def _template(model: nn.Module, luca_config: LucaConfig | None) -> tuple[LucaConfig, nn.Module]:
    """The experts' template, and the model."""
    if isinstance(model, PeftModel):
        tuner = tuner_of(model)
        if luca_config is None:
            luca_config = next(iter(tuner.peft_config.values())).template()
            luca_config.classes = None
        is_untrained = tuner._just_added == "default" and "classes" in tuner.peft_config["default"].filled
        if list(tuner.experts) == ["default"] and is_untrained:
            logger.warning("The expert 'default' is a template: it is removed, and each task gets an expert like it.")
            model = tuner.unload()
    elif luca_layers(model):
        raise ValueError(
            "this backbone carries the experts of another PeftModel, such as an earlier trainer's, and training would "
            "overwrite them. Take them off (`trainer.model.unload()`) or load the backbone anew; a run that was "
            "interrupted goes on after either."
        )
    template = LucaConfig() if luca_config is None else luca_config.template()
    if template.classes is not None:
        raise ValueError(
            f"luca_config names the classes {template.classes[:5]!r}, but the stream's tasks say which classes each "
            "expert has. Leave classes out."
        )
    return template, model


def _check_task(task: Task, model: nn.Module, args: ContinualTrainingArguments) -> None:
    if isinstance(model, PeftModel) and task.name in tuner_of(model).experts:
        raise ValueError(
            f"there is an expert {task.name!r} already, and the task needs one of its own. Delete it, or give "
            "the task another name."
        )
    check_expert_name(task.name, model)
    if args.plots and task.name == PLOTS_NAME:
        raise ValueError(
            f"a task cannot be called {PLOTS_NAME!r} with plots=True, which writes a folder of that name."
        )
    if args.eval_strategy != "no" and task.test is None:
        raise ValueError(f"eval_strategy is {args.eval_strategy!s}, but task {task.name!r} has no test images.")
