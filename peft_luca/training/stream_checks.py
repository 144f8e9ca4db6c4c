"""What is checked before a stream is learned, and the template of its experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peft import PeftModel
from torch import nn
from transformers.utils import logging

from .. import visualization
from ..data.task_stream import Task, TaskStream
from ..tuner.config import LucaConfig
from ..tuner.head import check_expert_name, find_head
from ..tuner.layer import luca_layers
from ..tuner.model import tuner_of
from .arguments import CONFIG_RECIPES, ContinualTrainingArguments
from .run_folder import PLOTS_NAME


logger = logging.get_logger(__name__)

# Arguments of Trainer that have no meaning for a stream, with the reason.
REFUSED = {
    "train_dataset": "the tasks of the stream are trained on. Pass a stream",
    "eval_dataset": "the test images of the tasks are evaluated. Pass other images to evaluate()",
    "data_collator": "[CLS] is cached as processing_class makes it. Put your preprocessing there",
    "optimizers": "the parameters of later tasks do not exist yet. Use optimizer_cls_and_kwargs=(class, {...})",
    "model_init": "a run has one output_dir. Make a trainer for each trial",
}


def check_arguments(model: Any, args: Any, stream: Any, processing_class: Any, kwargs: dict[str, Any]) -> None:
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] != (None, None):
            raise ValueError(f"{name} cannot be used here: {reason}.")
        kwargs.pop(name, None)
    for name, value, is_right, needed in (
        ("args", args, isinstance(args, ContinualTrainingArguments), "ContinualTrainingArguments"),
        ("stream", stream, isinstance(stream, TaskStream), "a TaskStream, such as TaskStream.from_dataset(...)"),
        ("model", model, isinstance(model, nn.Module), "an image classifier or a PeftModel"),
        ("processing_class", processing_class, callable(processing_class), "the backbone's image processor"),
    ):
        if not is_right:
            raise ValueError(f"{name} must be {needed}, got {type(value).__name__}.")
    if args.plots:
        visualization.check_installed()  # now, not when all has been learned


def make_template(model: nn.Module, luca_config: LucaConfig | None, recipe: str) -> tuple[LucaConfig, nn.Module]:
    """The experts' template, and the model without the expert that was one."""
    if isinstance(model, PeftModel):
        tuner = tuner_of(model)
        if luca_config is None:
            luca_config = replace(next(iter(tuner.peft_config.values())).template(), classes=None)
        if tuner.is_template:
            logger.warning("The expert 'default' is a template: it is removed, and each task gets an expert like it.")
            model = tuner.unload()
    elif luca_layers(model):
        found = "this backbone carries the experts of another PeftModel, such as an earlier trainer's"
        remedy = "Remove them (`trainer.model.unload()`), or load the backbone again"
        raise ValueError(f"{found}, and training would overwrite them. {remedy}.")
    template = LucaConfig() if luca_config is None else luca_config.template()
    if template.classes is not None:
        raise ValueError("luca_config names classes, but each expert has those of its task. Leave classes out.")
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if template.reference is None and getattr(getattr(base, "config", None), "image_size", None) is None:
        logger.warning("The backbone's config has no image_size to draw pictures of: experts read [CLS] as it is.")
        template.reference = template.whitening = False
    template.resolve(CONFIG_RECIPES[recipe])
    template.widths(find_head(base, template).width)  # raises if reduction does not fit
    return template, model


def check_task(task: Task, model: nn.Module, args: ContinualTrainingArguments) -> None:
    if isinstance(model, PeftModel) and task.name in tuner_of(model).experts:
        remedy = "Delete it, or give the task another name. To resume a run, give the model as it was before it"
        raise ValueError(f"there is an expert {task.name!r} already. {remedy}.")
    check_expert_name(task.name, model)
    if args.plots and task.name == PLOTS_NAME:
        raise ValueError(f"with plots=True no task can be called {PLOTS_NAME!r}, which is the plots' folder.")
    if args.eval_strategy != "no" and task.test is None:
        raise ValueError(f"eval_strategy is {args.eval_strategy!s}, but task {task.name!r} has no test images.")
