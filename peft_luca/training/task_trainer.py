"""`TaskTrainer`: the `ExpertTrainer` of one task of a stream, and what is checked before a stream is learned."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
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
    "train_dataset": "the tasks of the stream are trained on",
    "eval_dataset": "the test images of the tasks are evaluated. Pass other images to evaluate()",
    "data_collator": "[CLS] is cached as processing_class makes it. Put your preprocessing there",
    "optimizers": "the parameters of later tasks do not exist yet. Use optimizer_cls_and_kwargs=(class, {...})",
    "model_init": "a run has one output_dir, and each trial of a search needs its own. Make a trainer for each trial",
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
        tests = features.get_own(tuner, task, "test") if args.eval_strategy != "no" else None
        given = {"expert": task.name, "processing_class": run.processing_class, "features": plain}
        super().__init__(run.model, args, train_dataset=train, eval_dataset=tests, **given, **run._task_arguments)
        self.callback_handler.callbacks = run.callback_handler.callbacks

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The run has placed it. From "cpu" to "cpu:0" torch copies the backbone, and its facts are computed again."""

    def image_collator(self, dataset: Any, augmentation: bool = False) -> ImageCollator:
        stream = self.run.stream
        own_ids = {stream.classes.index(name): i for i, name in enumerate(self.task.classes)}
        channels = channels_of(self.model)
        return ImageCollator(self.processing_class, stream.image_column, own_ids, augmentation, channels=channels)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a curve for each task, beside the one of the run
            logs[f"{self.task.name}/loss"] = logs["loss"]
        own = self.state.global_step
        self.state.global_step += self.run.state.global_step
        try:
            super().log(logs, start_time)
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
    needed: dict[str, tuple[Any, Any, str]] = {
        "args": (args, ContinualTrainingArguments, "ContinualTrainingArguments"),
        "stream": (stream, TaskStream, "a TaskStream, as TaskStream.from_dataset makes it"),
        "model": (model, nn.Module, "an image classifier or a PeftModel"),
        "processing_class": (processing_class, Callable, "the backbone's image processor"),
    }
    for name, (value, kind, what) in needed.items():
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be {what}, got {type(value).__name__}.")
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
            "this backbone carries the experts of another PeftModel, and training would overwrite them. Take them off "
            "(`trainer.model.unload()`) or load the backbone anew; an interrupted run goes on after either."
        )
    template = LucaConfig() if luca_config is None else luca_config.template()
    if template.classes is not None:
        raise ValueError("luca_config names classes, but the tasks say which an expert has. Leave classes out.")
    return template, model


def check_task(task: Task, model: nn.Module, args: ContinualTrainingArguments) -> None:
    if isinstance(model, PeftModel) and task.name in tuner_of(model).experts:
        raise ValueError(f"there is an expert {task.name!r} already. Delete it, or give the task another name.")
    check_expert_name(task.name, model)
    if args.plots and task.name == PLOTS_NAME:
        raise ValueError(f"a task cannot be called {PLOTS_NAME!r} with plots=True, which writes such a folder.")
    if args.eval_strategy != "no" and task.test is None:
        raise ValueError(f"eval_strategy is {args.eval_strategy!s}, but task {task.name!r} has no test images.")
