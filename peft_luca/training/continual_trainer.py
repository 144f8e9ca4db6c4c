"""`ContinualTrainer`: learns the tasks of a stream, each by an `ExpertTrainer` made for it."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers.trainer_utils import HubStrategy, TrainOutput
from transformers.utils import logging

from ..data.collator import ImageCollator
from ..data.feature_cache import FeatureDataset
from ..data.sources import DatasetLike
from ..data.task_stream import Task, TaskStream
from ..hub.publishing import push_experts
from ..hub.saving import load_experts
from ..preprocessing import channels_of
from ..tuner.backbone import warn_of_processor
from ..tuner.config import LucaConfig
from ..tuner.model import quiet_peft, tuner_of
from ..utils import pluralize
from .arguments import ContinualTrainingArguments
from .batches import print_line
from .evaluation import TaskFeatures, all_figures, measure
from .expert_trainer import ExpertTrainer
from .metrics import Record, numbers, task_line
from .report import ReportingTrainer
from .run_folder import RESULTS_FORMAT, RunFolder, run_settings
from .stream_checks import check_arguments, check_task, make_template


logger = logging.get_logger(__name__)


class ContinualTrainer(ReportingTrainer):
    """
    Teaches a frozen image classifier a stream of tasks: for each task it adds an expert, trains it with an
    [`ExpertTrainer`], saves it, and evaluates all classes seen so far.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The backbone with its head, or a model with LuCA experts, which are kept and take part. An only expert
            `default`, never trained and with no classes named, is a template for the experts.
        args ([`ContinualTrainingArguments`], *optional*): Output folder, recipe and hyperparameters.
        stream ([`TaskStream`]): The tasks. It may grow while the trainer lives.
        luca_config ([`LucaConfig`], *optional*): Template of every expert; `classes` come from the tasks.
        processing_class (`BaseImageProcessor`): The backbone's image processor.
        kwargs: Other arguments of [`~transformers.Trainer`], such as `callbacks`, used for every task.
    """

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
        check_arguments(model, args, stream, processing_class, kwargs)
        assert isinstance(stream, TaskStream)
        template, model = make_template(model, luca_config, args.recipe)
        for task in stream:
            check_task(task, model, args)
        if isinstance(model, PeftModel):
            tuner_of(model).layer.experts.prepared(args.make_router())  # raises if an expert lacks statistics
            warn_of_processor(tuner_of(model).layer.configs, processing_class)
        images = ImageCollator(processing_class, stream.image_column, channels=channels_of(model), **template.images)
        # Trainer asks for an evaluation set when args.eval_strategy is set: each task brings its own.
        given: dict[str, Any] = {"processing_class": processing_class, "data_collator": images, "eval_dataset": []}
        super().__init__(model=model, args=args, **given, **kwargs)
        kwargs.pop("callbacks", None)  # tasks share the handler's
        self._task_arguments = kwargs
        self.stream = stream
        self.luca_config = template
        self.folder = RunFolder(str(args.output_dir), args.should_save)
        self.task_features = TaskFeatures(self)
        self._records: list[Record] = []  # one per learned task, as results.json has them
        self._saved: list[str] = []  # experts in the folder when it was last looked at

    def train(self, resume_from_checkpoint: bool | str | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """
        Learns every task of the stream that has not been learned. Tasks that an earlier run finished in
        `args.output_dir` are loaded, so a run that was interrupted is resumed by starting it again, unless
        `resume_from_checkpoint=False` refuses that. Returns steps, mean loss, and the run's figures that are numbers.

        Raises:
            ValueError: the folder holds a run of another stream or of other settings.
            FloatingPointError: a loss or a weight is not a finite number.
        """
        if isinstance(resume_from_checkpoint, str):
            raise ValueError(f"a stream is resumed from args.output_dir, not from {resume_from_checkpoint!r}.")
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
        metrics = {"train_runtime": seconds, "train_loss": loss, "total_flos": self.state.total_flos}
        return TrainOutput(steps, loss, metrics | numbers(all_figures(self, self._records)))

    def train_task(self, task: Task | DatasetLike, name: str | None = None) -> TrainOutput:
        """
        Learns one more task: a [`Task`] of the stream, or a dataset, which is appended to the stream under the name.
        """
        with self.folder.lock():
            known = task if isinstance(task, Task) else self.stream.append(task, name)
            is_new = known is not task
            try:
                self._resume()
                if is_new and known.name in self._saved:  # an earlier call was killed at its very end
                    return TrainOutput(0, 0.0, {})
                return self._train_task(known)
            except BaseException:
                if is_new and known.name not in self._learned:
                    self.stream.pop()
                    self.task_features = TaskFeatures(self)
                raise

    def _train_task(self, task: Task) -> TrainOutput:
        if not any(task is known for known in self.stream):
            raise ValueError(f"the task {task.name!r} is not of the trainer's stream. Pass its dataset, to append it.")
        if task.name in self._learned and task.name not in self.tuner.experts:
            raise ValueError(f"{task.name!r} was learned and its expert deleted. Pass its dataset under another name.")
        check_task(task, self.model, self.args)
        started = time.perf_counter()
        try:
            self._add_expert(task)
            self.task_features.extract(task)  # an image that cannot be read stops the task before it is trained
            output = self._train_expert(task)
            self._set_router()
            self._finish(task, output, time.perf_counter() - started)
            return output
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self.is_world_process_zero():
                done = f"{len(self._records)} of {len(self.stream)} tasks are finished, and kept in"
                logger.warning(f"Interrupted: {done} {self.args.output_dir}. To go on, call train() or start again.")
            if task.name not in self._learned:
                self._drop_expert(task)
                self.task_features = TaskFeatures(self)  # another task may come under the name
            raise

    def _add_expert(self, task: Task) -> None:
        config = copy.deepcopy(self.luca_config)
        config.classes = list(task.classes)
        others = tuner_of(self.model).peft_config.values() if isinstance(self.model, PeftModel) else ()
        if "whitening" in config.filled and not all(other.whitening for other in others):
            config.whitening = False  # the statistics of all experts need one reference
        with torch.random.fork_rng(), quiet_peft():
            torch.manual_seed(task_seed(self.args.seed, task.classes))
            if isinstance(self.model, PeftModel):
                self.model.add_adapter(task.name, config)
            else:
                self._set_model(get_peft_model(self.model, config, adapter_name=task.name))
        self.model.eval()

    def _train_expert(self, task: Task) -> TrainOutput:
        args = copy.copy(self.args)
        args.seed = task_seed(args.seed, task.classes)
        args.report_to, args.push_to_hub = [], False  # the run's callbacks report, and the run pushes
        train_dataset, collator = self.task_features.training_data(task)
        options = {
            "train_dataset": train_dataset,
            "data_collator": collator,
            "processing_class": self.processing_class,
        }
        options |= {"features": self.task_features.get_own(task, "train"), "expert": task.name, **self._task_arguments}
        if args.eval_strategy != "no":
            options["eval_dataset"] = self.task_features.get_own(task, "test")
        trainer = ExpertTrainer(self.model, args, **options)
        trainer.callback_handler.callbacks = self.callback_handler.callbacks
        trainer.earlier_steps = self.state.global_step
        args.output_dir = str(self.folder.path / task.name)  # of its checkpoints
        try:
            output = trainer.train()
        finally:
            self.state.log_history += [dict[str, Any](entry, task=task.name) for entry in trainer.state.log_history]
        for name in ("global_step", "max_steps", "total_flos"):
            setattr(self.state, name, getattr(self.state, name) + getattr(trainer.state, name))
        self.tuner.set_requires_grad(task.name, False)
        return output

    def _finish(self, task: Task, output: TrainOutput, seconds: float) -> None:
        record: dict[str, Any] = {
            "name": task.name,
            "classes": list(task.classes),
            "train_images": len(task.train),
            "test_images": len(task.test or ()),
            "skipped_images": self.task_features.skipped(task),
            "images": self.task_features.digests(task),
            "steps": output.global_step,
            "train_loss": output.training_loss,
            "seconds": round(seconds, 3),
        }
        record |= measure(self, [*self._records, record])
        self._records.append(record)
        try:
            results = self.results()
            self.folder.add_expert(self.model, task.name, results)
        except BaseException:
            self._records.pop()  # a task is learned once it is on the disk
            raise
        self._saved = list(self.tuner.experts)
        if self.args.push_to_hub and self.args.hub_strategy == HubStrategy.EVERY_SAVE:
            self._push_in_background(f"{task.name} learned")
        print_line(self.args, task_line(len(self.stream), results, len(self.tuner.classes)))
        self.log({f"stage_{name}": value for name, value in results.items() if isinstance(value, float)})
        if self.args.report_to:  # a curve for each task, which would make the history of a long stream too long
            accuracies = zip(self._records, record["accuracy"], strict=True)
            curves = {f"{task['name']}/accuracy": accuracy for task, accuracy in accuracies if accuracy is not None}
            self.callback_handler.on_log(self.args, self.state, self.control, curves)

    def _drop_expert(self, task: Task) -> None:
        """Leaves the model as it was before a task that could not be finished."""
        if isinstance(self.model, PeftModel) and list(self.tuner.experts) == [task.name]:
            self._set_model(self.tuner.unload())
        elif isinstance(self.model, PeftModel) and task.name in self.tuner.experts:
            self.model.delete_adapter(task.name)
            self.model.eval()
            self._set_router()

    def delete_adapter(self, adapter_name: str, features: bool = False) -> None:
        """
        Deletes a task's expert, in the model and in `args.output_dir`. Its task is not measured any more: its column
        of the accuracy matrix ends, and the last row is measured again with the remaining experts. With `features`,
        [CLS] of the task's images are deleted from the cache, except files that another task of the stream uses.
        """
        with self.folder.lock():
            is_done = self._resume() == adapter_name  # an earlier call was cut off
            if not is_done and not (isinstance(self.model, PeftModel) and adapter_name in self.tuner.experts):
                raise ValueError(f"there is no expert {adapter_name!r} to delete.")
            for task in self.stream:
                if features and task.name == adapter_name:  # first: as long as there is the expert, a retry does this
                    self.task_features.delete_files(task)
            if not is_done:
                self.model.delete_adapter(adapter_name)
                self._set_router()
                self._resume()

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """
        Accuracy over all classes seen so far, with the router that is set now, and the accuracy matrix. If it is not
        the router of the run, there is only the last row, and no figure that compares stages. Returns the figures of
        [`~ContinualTrainer.results`], each with the prefix.

        Args:
            eval_dataset (`datasets.Dataset` or `str`, *optional*):
                Images with their classes, which are matched by name (see [`TaskStream.match`]), or the name of a task,
                to evaluate in place of the test images of all tasks; or a `dict` of datasets.
        """
        if isinstance(eval_dataset, str):
            tests = {task.name: task.test for task in self.stream if task.test is not None}
            if eval_dataset not in tests:
                raise ValueError(f"there is no task {eval_dataset!r} with test images, only {', '.join(tests)}.")
            eval_dataset = tests[eval_dataset]
        if eval_dataset is not None:
            eval_dataset = self.stream.match(eval_dataset)
            if "labels" not in (getattr(eval_dataset, "column_names", None) or ["labels"]):
                needed = f"a column 'labels' or {self.stream.label_column!r} of class names"
                raise ValueError(f"eval_dataset needs {needed}, but has {eval_dataset.column_names}.")
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if not self._records:
            raise ValueError("there is nothing to evaluate: no task has been learned. Call train() first.")
        figures = all_figures(self, self._records, measure(self, self._records))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(numbers(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """As [`~transformers.Trainer.predict`]. Classes are matched by name, as by `evaluate`."""
        return super().predict(self.stream.match(test_dataset), *args, **kwargs)

    def features(self, task: Task, split: str) -> FeatureDataset:
        """[CLS] (images, d) of a task's `"train"` or `"test"` images, with the stream's global labels, from the cache.
        With several processes all must call it. A subclass may take it from elsewhere."""
        return self.task_features.get(task, split)

    def results(self) -> dict[str, Any]:
        """What `results.json` holds: the run's settings, each task as it was learned, and the figures."""
        deleted = {record["name"] for record in self._records if record["name"] not in self.tuner.experts}
        left = (label for task in self.stream if task.name not in deleted for label in task.classes)
        return {
            "format": RESULTS_FORMAT,
            "settings": run_settings(self.args, self.luca_config, self.processing_class),
            "classes": list(dict.fromkeys(left)),
            "tasks": [r | {"deleted": True, "classes": []} if r["name"] in deleted else r for r in self._records],
            **all_figures(self, self._records),
        }

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """As [`~transformers.Trainer.log_metrics`]; lists and figures that were not measured are left out."""
        super().log_metrics(split, numbers(metrics))

    @property
    def _learned(self) -> set[str]:
        return {record["name"] for record in self._records}

    def _resume(self, refuse: bool = False) -> str | None:
        """
        Takes up what is true in the output folder, and finishes what was cut off there: experts that an earlier run or
        another process has learned or deleted come and go, and those that are gone from the model are deleted there.
        Returns the name of the expert whose deletion was finished.
        """
        experts = list(self.tuner.experts) if isinstance(self.model, PeftModel) else []
        # If the model was unloaded, its experts are loaded again.
        deleted = [name for name in self._saved if experts and name not in experts]
        self.folder.recover(task.name for task in self.stream)
        settings = run_settings(self.args, self.luca_config, self.processing_class)
        expected = (settings, self.stream, self.task_features.digests, self._records, refuse)
        records = self.folder.read(*expected)
        if deleted:  # now that the folder is known to be this run's
            self.folder.recover((), deleted)
            records = self.folder.read(*expected)
        pending, saved = self.folder.pending(), self.folder.experts()
        new = {name: self.folder.path / name for name in saved if name not in experts}
        if new:
            self._set_model(load_experts(self.model, new, processing_class=self.processing_class))
        gone = [name for name in self._saved if name in experts and name not in saved]
        for name in gone:
            self.model.delete_adapter(name)
        if new or gone or (pending is not None and experts):
            self._set_router()  # also where another was set since: what is measured below is the run's
        if taken_up := records[len(self._records) :]:
            self.state.global_step += sum(record["steps"] for record in taken_up)
            done = f"{len(records)} of {pluralize(len(self.stream), 'task')} found in {self.folder.path}"
            print_line(self.args, f"resuming after {done}")
        self._records, self._saved = records, saved
        if pending is not None:
            if records:
                records[-1] |= measure(self, records)
            self.folder.finish(self.results())
        return pending

    def _set_model(self, model: nn.Module) -> None:
        self.model = self.model_wrapped = self.callback_handler.model = model

    def _set_router(self) -> None:
        """Sets the router of the run, and maps the stream's labels of images to the order of the model's logits."""
        self.tuner.set_router(self.args.make_router())
        ids = {name: i for i, name in enumerate(self.stream.classes)}
        self.data_collator.label_ids = {ids[name]: i for i, name in enumerate(self.tuner.classes) if name in ids}

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # A collection of experts: safetensors and JSON only, no pickled arguments as Trainer writes them.
        folder = RunFolder(output_dir or self.folder.path, self.args.should_save)
        folder = self.folder if folder.path == self.folder.path else folder
        folder.save(self.model, self.processing_class, self._results())

    def _results(self) -> dict[str, Any] | None:
        return self.results() if self._records else None

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~PublishingTrainer.push_to_hub`], of what is true in the output folder by now."""
        if self._records:
            with self.folder.lock():
                self._resume()
        return super().push_to_hub(*args, **kwargs)

    def _push(self, repo_id: str, blocking: bool, **kwargs: Any) -> Any:
        if self._pushing is not None:
            self._pushing.exception()  # wait; this push carries all that an earlier one did
        kwargs |= {"processing_class": self.processing_class, "results": self._results()}
        return push_experts(self.model, repo_id, blocking=blocking, **kwargs)


def task_seed(seed: int, classes: tuple[str, ...]) -> int:
    """The seed of a task: from the run's seed and the class names, not from the task's place in the stream."""
    text = json.dumps([seed, sorted(classes)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
