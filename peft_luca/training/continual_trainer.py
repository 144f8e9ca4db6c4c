"""`ContinualTrainer`: learns the tasks of a stream, each by an `ExpertTrainer` made for it."""

from __future__ import annotations

import copy
import time
from concurrent.futures import Future
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import ProgressCallback
from transformers.trainer_utils import HubStrategy, TrainOutput, has_length
from transformers.utils import logging

from ..data.collator import ImageCollator
from ..data.sources import DatasetLike
from ..data.task_stream import Task, TaskStream
from ..hub.publishing import push_experts
from ..hub.saving import load_experts
from ..preprocessing import channels_of, check_processor
from ..tuner.config import LucaConfig
from ..tuner.head import find_head
from ..tuner.model import quiet_peft, tuner_of
from ..utils import pluralize
from .arguments import CONFIG_RECIPES, ContinualTrainingArguments
from .batches import ExpertProgressCallback
from .evaluation import StreamEvaluation
from .figures import Accuracy, Record, numbers, task_line
from .run_folder import RunFolder, run_settings
from .task_features import TaskFeatures, print_line
from .task_trainer import TaskTrainer, check_arguments, check_task, make_template, task_seed


logger = logging.get_logger(__name__)


class ContinualTrainer(StreamEvaluation):
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
        template, model = make_template(model, luca_config)
        template.resolve(CONFIG_RECIPES[args.recipe])
        template.widths(find_head(model.get_base_model() if isinstance(model, PeftModel) else model, template).width)
        for task in stream:
            check_task(task, model, args)
        if isinstance(model, PeftModel):
            tuner_of(model).layer.experts.prepared(args.make_router())  # raises if an expert lacks statistics
        collator = ImageCollator(processing_class, stream.image_column, channels=channels_of(model))
        check_processor(processing_class, model)
        self._task_arguments = {"compute_metrics": Accuracy(), **kwargs}
        # Trainer asks for an evaluation set when args.eval_strategy is set: each task brings its own.
        super().__init__(model, args, collator, None, [], processing_class, **self._task_arguments)
        self._task_arguments.pop("callbacks", None)  # tasks share the handler's
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(ExpertProgressCallback)
        self.stream, self.luca_config = stream, template
        self.folder = RunFolder(self.args.output_dir, args.should_save)
        self._task_features = TaskFeatures(stream, args, processing_class, collator.channels)
        self._records: list[Record] = []  # one per learned task, as results.json has them
        self._pushing: Future[Any] | None = None  # to the Hub, in the background

    def train(
        self, resume_from_checkpoint: bool | str | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """
        Learns every task of the stream that has not been learned. Tasks that an earlier run finished in
        `args.output_dir` are loaded, so a run that was interrupted is resumed by starting it again.

        Args:
            resume_from_checkpoint (`bool`, *optional*): `False` refuses to resume an earlier run.

        Returns:
            [`~transformers.trainer_utils.TrainOutput`]: Steps, mean loss, and the numbers among the run's figures.
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
        metrics = {"train_runtime": seconds, "total_flos": self.state.total_flos, "train_loss": loss}
        metrics["train_steps_per_second"] = round(steps / seconds, 3) if seconds else 0.0
        return TrainOutput(steps, loss, metrics | numbers(self._figures()))

    def train_task(self, task: Task | DatasetLike, name: str | None = None) -> TrainOutput:
        """
        Learns one more task, and returns what its [`ExpertTrainer`] does.

        Args:
            task ([`Task`] or dataset): A task of the stream, or a dataset, which is appended to the stream.
            name (`str`, *optional*): The new task's name, for a dataset.
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
            raise ValueError(f"the task {task.name!r} is not of the trainer's stream. Pass its dataset to append it.")
        if task.name in self._learned and task.name not in self.tuner.experts:
            raise ValueError(
                f"the task {task.name!r} was learned and its expert deleted. Pass its dataset under another name."
            )
        check_task(task, self.model, self.args)
        started = time.perf_counter()
        try:
            self._add_expert(task)
            self._task_features.check(self.tuner, task)
            trainer = TaskTrainer(self, task)
            try:
                output = trainer.train()
            finally:
                logs = trainer.state.log_history
                self.state.log_history += [dict[str, Any](entry, task=task.name) for entry in logs]
            self.state.global_step += trainer.state.global_step
            self.state.max_steps += trainer.state.max_steps
            self.state.total_flos += trainer.state.total_flos
            self.tuner.set_requires_grad(task.name, False)
            self._follow_experts()
            self._finish(task, output, time.perf_counter() - started)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self.is_world_process_zero():
                logger.warning(
                    f"Interrupted: {len(self._records)} of {len(self.stream)} tasks are finished, and kept in "
                    f"{self.args.output_dir}. To go on, call train() again, or start anew with the same output_dir."
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
        self._push_learned()
        line = task_line(len(self._records), len(self.stream), record, figures, len(self.tuner.classes))
        print_line(self.args, line)
        self.log({f"stage_{name}": value for name, value in figures.items() if isinstance(value, float)})

    def _drop_expert(self, task: Task) -> None:
        """Leaves the model as it was before a task that could not be finished."""
        if not isinstance(self.model, PeftModel) or task.name not in self.tuner.experts:
            return
        if len(self.tuner.experts) == 1:
            self._set_model(self.tuner.unload())
        else:
            self.model.delete_adapter(task.name)
            self._follow_experts()

    def delete_adapter(self, adapter_name: str) -> None:
        """
        Deletes a task's expert, in the model and in `args.output_dir`. Its task is not measured any more: its column
        of the accuracy matrix ends, and the last row is measured again with the remaining experts.
        """
        with self.folder.lock():
            self._resume()
            if not isinstance(self.model, PeftModel) or adapter_name not in self.tuner.experts:
                raise ValueError(f"there is no expert {adapter_name!r} to delete.")
            self.model.delete_adapter(adapter_name)
            self._follow_experts()
            if adapter_name in self._learned:
                self._records[-1].update(self._measure(self._records))
                self.folder.delete_expert(adapter_name, self.results())

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
        self._follow_experts()
        found = f"{len(records)} of {pluralize(len(self.stream), 'task')} found in {self.folder.path}"
        print_line(self.args, f"resuming after {found}")

    def _set_model(self, model: nn.Module) -> None:
        self.model = self.model_wrapped = self.callback_handler.model = model

    def _follow_experts(self) -> None:
        """The run's router takes the experts there are; images to evaluate get their labels from the stream's."""
        self.tuner.set_router(self.args.make_router())
        places = {name: i for i, name in enumerate(self.tuner.classes)}
        self.data_collator.label_ids = {i: places[c] for i, c in enumerate(self.stream.classes) if c in places}

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # A collection of experts: safetensors and JSON only, no pickled arguments as Trainer writes them.
        if not isinstance(self.model, PeftModel):
            raise ValueError("there is no expert to save: no task has been learned. Call train() first.")
        folder = self.folder if output_dir is None else RunFolder(output_dir, self.args.should_save)
        folder.save(self.model, self.processing_class, self._results())

    def _results(self) -> dict[str, Any] | None:
        return self.results() if self._records else None

    def _push(self, repo_id: str, blocking: bool, **kwargs: Any) -> Any:
        if self._pushing is not None:
            self._pushing.exception()  # wait; this push carries all that an earlier one did
        kwargs |= {"processing_class": self.processing_class, "results": self._results()}
        return push_experts(self.model, repo_id, blocking=blocking, **kwargs)

    def _push_learned(self) -> None:
        """Pushes in the background, unless an earlier push is still running: the next one carries this task too."""
        is_busy = self._pushing is not None and not self._pushing.done()
        if is_busy or not self.args.push_to_hub or self.args.hub_strategy != HubStrategy.EVERY_SAVE:
            return
        error = None if self._pushing is None else self._pushing.exception()
        try:
            self._pushing = self.push_to_hub(f"{self._records[-1]['name']} learned", blocking=False)
        except Exception as failure:  # whatever the network does, the run goes on
            error = failure
        if error is not None:
            logger.warning(f"Pushing to the Hub failed, and is tried again after the next task: {error!r}")
