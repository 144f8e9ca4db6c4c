"""`TaskTrainer`: the `ExpertTrainer` of one task of a stream, and what is checked before a stream is learned."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from torch import nn
from transformers.utils import logging

from .. import visualization
from ..data.collator import ImageCollator
from ..data.feature_cache import FeatureDataset
from ..data.task_stream import Task, TaskStream
from ..preprocessing import channels_of, image_size
from ..tuner.config import LucaConfig
from ..tuner.head import check_expert_name
from ..tuner.layer import luca_layers
from ..tuner.model import tuner_of
from .arguments import ContinualTrainingArguments
from .evaluation import StreamEvaluation
from .expert_trainer import ExpertTrainer
from .run_folder import PLOTS_NAME


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


class TaskTrainer(ExpertTrainer):
    """The [`ExpertTrainer`] of a task: with the run's callbacks, and logs whose steps run on across tasks."""

    def __init__(self, run: StreamEvaluation, task: Task) -> None:
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

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The run has placed it. From "cpu" to "cpu:0" torch copies the backbone, and its facts are computed again."""

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


def check_arguments(model: Any, args: Any, stream: Any, processing_class: Any, kwargs: dict[str, Any]) -> None:
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] != (None, None):
            raise ValueError(f"{name} cannot be used here: {reason}.")
        kwargs.pop(name, None)
    kinds: list[tuple[str, Any, Any, str]] = [
        ("args", args, ContinualTrainingArguments, "ContinualTrainingArguments"),
        ("stream", stream, TaskStream, "a TaskStream, such as TaskStream.from_dataset(...)"),
        ("model", model, nn.Module, "an image classifier or a PeftModel"),
        ("processing_class", processing_class, Callable, "the backbone's image processor"),
    ]
    for name, value, kind, needed in kinds:
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be {needed}, got {type(value).__name__}.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model's weights are on the meta device. Load them outside of torch.device('meta').")
    if args.plots:
        visualization.check_installed()  # now, not when all has been learned
    if args.augmentation:
        image_size(processing_class)  # raises if the processor has none


def make_template(model: nn.Module, luca_config: LucaConfig | None) -> tuple[LucaConfig, nn.Module]:
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
            "overwrite them. Remove them (`trainer.model.unload()`), or load the backbone again."
        )
    template = LucaConfig() if luca_config is None else luca_config.template()
    if template.classes is not None:
        raise ValueError("luca_config names classes, but each expert has those of its task. Leave classes out.")
    return template, model


def check_task(task: Task, model: nn.Module, args: ContinualTrainingArguments) -> None:
    if isinstance(model, PeftModel) and task.name in tuner_of(model).experts:
        raise ValueError(f"there is an expert {task.name!r} already. Delete it, or give the task another name.")
    check_expert_name(task.name, model)
    if args.plots and task.name == PLOTS_NAME:
        raise ValueError(f"with plots=True no task can be called {PLOTS_NAME!r}, which is the plots' folder.")
    if args.eval_strategy != "no" and task.test is None:
        raise ValueError(f"eval_strategy is {args.eval_strategy!s}, but task {task.name!r} has no test images.")
