"""`ContinualTrainer`: one expert per task of a stream, each trained by an ordinary `Trainer.train`."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list, gather_object
from filelock import FileLock
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import EvalPrediction, ProgressCallback, Trainer, set_seed
from transformers.trainer_utils import HubStrategy, TrainOutput, has_length, seed_worker
from transformers.utils import logging

from .. import visualization as plots
from ..data.feature_cache import (
    FeatureDataset,
    default_cache_dir,
    digest_images,
    extract_features,
    features_key,
)
from ..data.sources import DatasetLike
from ..data.task_stream import Task, TaskStream
from ..hub.model_card import make_card
from ..hub.saving import CARD_NAME, RESULTS_NAME, load_experts, push_experts, save_experts
from ..hub.validation import MANIFEST_NAME, MAX_NUMBER
from ..preprocessing import ImageCollator, channels_of, check_processor, image_size, undecoded
from ..routing import make_router
from ..tuner.config import LucaConfig
from ..tuner.head import check_expert_name, find_head
from ..tuner.layer import luca_layers
from ..tuner.model import LucaModel, quiet_peft, tuner_of
from ..utils import LOCK_NAME, atomic_write, explain_write_errors, hold_lock, pluralize, write_json
from .arguments import CONFIG_RECIPES, ContinualTrainingArguments
from .expert_trainer import EpochBatches, EpochLoader, FeatureHead, TaskProgressCallback
from .run_folder import (
    COMPARING_STAGES,
    RESULTS_FORMAT,
    Measured,
    Record,
    earlier_run,
    run_figures,
    run_settings,
    task_line,
)
from .sparsity import soft_threshold


logger = logging.get_logger(__name__)

PLOTS_NAME = "plots"
# Arguments that have values of their own while a task is learnt.
WITHIN_A_TASK = (
    "seed dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers "
    "dataloader_multiprocessing_context"
).split()


class ContinualTrainer(Trainer):
    """
    Teaches a frozen image classifier a stream of tasks: for each task it adds an expert, trains it alone with
    cross-entropy + λ·Σ|θ|, takes class means for its rows, saves it, and evaluates all classes seen, routed.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The backbone with its head, or a model that has LuCA experts already: they are kept and take part.
        args ([`ContinualTrainingArguments`], *optional*): Output folder, recipe and hyperparameters.
        stream ([`TaskStream`]): The tasks. It may grow while the trainer lives.
        luca_config ([`LucaConfig`], *optional*): Template of every expert; `classes` come from the tasks.
        processing_class (`BaseImageProcessor`): The backbone's image processor.
        kwargs: Passed to [`~transformers.Trainer`], such as `callbacks`.

    Raises:
        ValueError: something does not fit together. Nothing has been written then.
    """

    # compute_loss returns the mean over a batch, so the Trainer divides by the number of accumulated batches.
    loss_is_scaled_for_ga = False

    # What Trainer declares for every kind of model and data, and what this one has.
    model: Any
    args: Any
    data_collator: Any
    processing_class: Any
    optimizer: Any

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
        if "train_dataset" in kwargs:
            raise ValueError("train_dataset has no place here: the stream's tasks are what is trained on.")
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
            plots.check_installed()  # now, not when all has been learnt
        if args.augmentation:
            image_size(processing_class)  # says so when the processor has none
        template, model = _template(model, luca_config)
        template.resolve(CONFIG_RECIPES[args.recipe])
        template.widths(find_head(model.get_base_model() if isinstance(model, PeftModel) else model, template).width)
        for task in stream:
            _check_task(task, model, args, template)
        if isinstance(model, PeftModel):
            tuner_of(model).layer.experts.prepared(make_router(args.router))
        collator = ImageCollator(processing_class, stream.image_column, channels=channels_of(model))
        check_processor(collator, model)
        kwargs.setdefault("compute_metrics", _accuracy)
        kwargs.setdefault("data_collator", collator)
        # Trainer asks for an evaluation set when args.eval_strategy is set: each task brings its own.
        super().__init__(
            model=model,
            args=args,
            processing_class=processing_class,
            eval_dataset=kwargs.pop("eval_dataset", []),
            **kwargs,
        )
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(TaskProgressCallback(self))
        self.stream = stream
        self.luca_config = template
        self._records: list[Record] = []  # one per task learnt, as results.json has them
        self._features: dict[tuple[str, str], FeatureDataset] = {}
        self._digests: dict[tuple[str, str], str] = {}
        self._task: Task | None = None  # the one that is being learnt
        self._steps_before = 0
        self._loss_parts: dict[str, Tensor] = {}
        self._loss_batches = 0
        self._push: Future[Any] | None = None  # to the Hub, in the background
        self._lock = FileLock(Path(self.args.output_dir) / LOCK_NAME)

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
        Learn every task of the stream that has not been learnt. What an earlier run finished in `args.output_dir` is
        loaded and not done again, so that a run that was interrupted goes on by being started again.

        Args:
            resume_from_checkpoint (`bool`, *optional*): `False` refuses to go on with an earlier run.

        Returns:
            [`~transformers.trainer_utils.TrainOutput`]: Steps, mean loss, and the figures of `evaluate`.

        Raises:
            ValueError: the folder holds a run of another stream or of other settings.
            RuntimeError: another run is at work in the folder.
            FloatingPointError: a loss is not finite, or an expert's numbers are beyond what can be loaded.
        """
        if isinstance(resume_from_checkpoint, str):
            raise ValueError(
                f"a stream goes on from args.output_dir ({self.args.output_dir}), task by task, not from "
                f"the checkpoint {resume_from_checkpoint!r}. Call train() with the same output_dir."
            )
        with self._alone():
            self._go_on(refuse=resume_from_checkpoint is False)
            outputs = [self.train_task(task) for task in list(self.stream) if task.name not in self._learnt]
        if self.args.push_to_hub and outputs:
            self.push_to_hub()
        steps = sum(output.global_step for output in outputs)
        loss = sum(output.training_loss * output.global_step for output in outputs) / max(steps, 1)
        if self.args.plots:
            self.save_plots()
        return TrainOutput(steps, loss, self._figures())

    def train_task(self, task: Task | DatasetLike, name: str | None = None) -> TrainOutput:
        """
        Learn one more task: an expert of its own, by one ordinary `Trainer.train`.

        Args:
            task ([`Task`] or dataset): A task of the stream, or a dataset, which is appended to the stream.
            name (`str`, *optional*): The new task's name, for a dataset.

        Raises:
            ValueError: the task has been learnt, or the model has an expert of its name.
            RuntimeError, FloatingPointError: see [`~ContinualTrainer.train`].
        """
        with self._alone():
            self._go_on()
            return self._train_task(task, name)

    def _train_task(self, task: Task | DatasetLike, name: str | None) -> TrainOutput:
        if not isinstance(task, Task):
            self.stream.append(task, name)
            try:
                return self._train_task(self.stream[-1], None)
            except BaseException:
                if self.stream[-1].name not in self._learnt:
                    self.stream.pop()
                raise
        if not any(task is known for known in self.stream):
            raise ValueError(
                f"the task {task.name!r} is not of the trainer's stream, so its labels mean nothing here. Pass its "
                "dataset, which is then appended, or make the trainer with its stream."
            )
        if task.name in self._learnt and task.name not in self.tuner.experts:
            raise ValueError(
                f"the task {task.name!r} was learnt and its expert deleted. To learn it again pass its dataset under "
                "another name."
            )
        _check_task(task, self.model, self.args, self.luca_config)
        started = time.perf_counter()
        seed = task_seed(self.args.seed, task.classes)
        try:
            self._add_expert(task, seed)
            for split in ("train", "test"):  # an image that cannot be read stops the task before it is trained
                if split == "train" or task.test is not None:
                    self.features(task, split)
            self._check_classes(task)
            if self.luca_config.init_rows == "class_means":
                self._set_rows_to_class_means(task, adapted=False)
            with self._learning(task, seed) as model_input:
                with model_input:
                    output: TrainOutput = super().train()
            self._steps_before += self.state.global_step
            if self.args.class_mean_rows:
                self._set_rows_to_class_means(task)
            if self.args.statistics:
                self._collect_statistics(task)
            self.tuner.set_requires_grad(task.name, False)
            self._set_router()
            self._check_numbers(task)
            self._finish(task, output, time.perf_counter() - started)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self.is_world_process_zero():
                logger.warning(
                    f"Interrupted: {len(self._records)} of {len(self.stream)} tasks are finished, and kept in "
                    f"{self.args.output_dir}. To go on, call train() again, or start again with the same output_dir "
                    "and the backbone loaded anew."
                )
            if task.name not in self._learnt:
                self._drop_expert(task)
                for kept in (self._features, self._digests):  # another task may come under the name
                    kept.pop((task.name, "train"), None)
                    kept.pop((task.name, "test"), None)
            raise
        return output

    def delete_adapter(self, adapter_name: str) -> None:
        """
        Forget a task's expert, in the model and in `args.output_dir`. Its task is not measured any more: its column of
        the accuracy matrix ends, and the last row is measured anew with the experts that are left.

        Args:
            adapter_name (`str`): The task.

        Raises:
            ValueError: there is no such expert, or it is the only one.
        """
        with self._alone():
            self._go_on()
            self._forget(adapter_name)

    def _forget(self, adapter_name: str) -> None:
        if not isinstance(self.model, PeftModel) or adapter_name not in self.tuner.experts:
            raise ValueError(f"there is no expert {adapter_name!r} to delete.")
        self.model.delete_adapter(adapter_name)
        self._set_router()
        self._follow_labels()
        if adapter_name not in self._learnt:
            return
        self._records[-1].update(self._measure(self._records))
        if self.args.should_save:
            folder = Path(self.args.output_dir)
            with explain_write_errors(folder):
                # In this order: what was interrupted in between is not loaded again, and is cleared away.
                write_json(folder / RESULTS_NAME, self.results())
                save_experts(self.model, folder, [])
                shutil.rmtree(folder / adapter_name)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """
        Routed accuracy on all classes seen, by the router that is set now, and the accuracy matrix. Where that is not
        the router of the run, there is only the last row, and no figure that compares stages.

        Args:
            eval_dataset (`datasets.Dataset`, *optional*):
                Images with global labels in the column `labels`, to be evaluated by the model as it is in their place.

        Returns:
            `dict`: The figures of `results.json`, each with the prefix, and `accuracy_matrix` (stages × tasks).
        """
        columns = getattr(eval_dataset, "column_names", None)
        if self._task is None and columns is not None and "labels" not in columns:
            raise ValueError(
                f"eval_dataset has the columns {columns}, but needs its global labels in a column "
                "'labels': stream.classes.index(name) of each image's class."
            )
        if eval_dataset is not None or self._task is not None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if not self._records:
            raise ValueError("there is nothing to evaluate: no task has been learnt. Call train() first.")
        last = self._measure(self._records)
        figures = self._figures(last)
        layer = self.tuner.layer
        if layer.router != make_router(self.args.router, **self._router_options):
            # Earlier stages were measured with another router: what compares stages says nothing.
            alone = [[None] * len(self._records)] * (len(self._records) - 1)
            figures["accuracy_matrix"] = [*alone, last["accuracy"]]
            for name in COMPARING_STAGES:
                figures.pop(name, None)
        matrix = figures.pop("accuracy_matrix")
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log({name: value for name, value in metrics.items() if isinstance(value, float)})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return {**metrics, f"{metric_key_prefix}_accuracy_matrix": matrix}

    def save_plots(self) -> list[Path]:
        """
        Draw the pictures of [`~peft_luca.plots`] as they are now, into `plots` in the output folder, and into
        TensorBoard where it is being written to. With several processes all have to ask.

        Returns:
            `list[Path]`: The files; none on all processes but the first.
        """
        tuner = self.tuner  # says so when nothing has been learnt
        features, images = {}, {}
        for task in self.stream:
            if task.name in tuner.experts and task.test is not None:
                test = self.features(task, "test")  # every process takes its part
                features[task.name] = FeatureDataset(test.features, self._ids(test.labels, task.classes))
                images[task.name] = self._readable(task, "test")[self.stream.image_column]
        if not self.is_world_process_zero():
            return []
        folder, files = Path(self.args.output_dir) / PLOTS_NAME, []
        folder.mkdir(parents=True, exist_ok=True)
        writers = [
            callback.tb_writer for callback in self.callback_handler.callbacks if hasattr(callback, "tb_writer")
        ]
        for name, figure in plots.of_a_run(self.results(), self.model, features, images):
            files.append(folder / f"{name}.png")
            with atomic_write(files[-1]) as temporary:
                figure.savefig(temporary, dpi=120, format="png")
            for writer in writers:
                if writer is not None:
                    writer.add_figure(f"plots/{name}", figure, self._steps_before)
        return files

    def features(self, task: Task, split: str) -> FeatureDataset:
        """
        [CLS] of a task's images with the stream's global labels, computed once and kept in `args.features_cache_dir`.
        With several processes each computes a part, so that all have to ask.

        Args:
            task ([`Task`]): A task of the stream.
            split (`str`): `"train"` or `"test"`.

        Returns:
            [`FeatureDataset`]: `features` (images, d), in `args.features_dtype`, `labels` (images,), on the CPU.
        """
        if split not in ("train", "test"):
            raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
        key = (task.name, split)
        if key not in self._features:
            self._features[key] = self._extract(task, split)
        return self._features[key]

    def _extract(self, task: Task, split: str, view: int | None = None) -> FeatureDataset:
        """[CLS] of a task's images as they are, or of one augmented view of them."""
        dataset = task.train if split == "train" else task.test
        if dataset is None:
            raise ValueError(f"task {task.name!r} has no {split} images.")
        args, backbone = self.args, self.tuner.backbone
        collator = ImageCollator(
            self.processing_class, self.stream.image_column, None, view is not None, view, args.seed,
            channels_of(self.model),
        )  # fmt: skip
        key = ""
        if self.is_world_process_zero():
            if (task.name, split) not in self._digests:
                self._digests[task.name, split] = digest_images(dataset, self.stream.image_column)
            key = features_key(backbone, collator, self._digests[task.name, split], args.features_dtype)
        (key,) = broadcast_object_list([key])
        self.model.eval()
        features = extract_features(
            lambda pixels: self.tuner.pooled_features(pixels.to(args.device, backbone.dtype)),
            dataset,
            collator,
            args.per_device_eval_batch_size,
            args.dataloader_num_workers,
            f"{task.name}: [CLS] of the {split} images" + ("" if view is None else f", view {view + 1}"),
            args.disable_tqdm,
            path=Path(args.features_cache_dir or default_cache_dir()) / f"{key}.arrow",
            dtype=args.features_dtype,
            on_bad_image=args.on_bad_image,
            writes=args.should_save,
            loader_options={
                "pin_memory": args.dataloader_pin_memory,
                "multiprocessing_context": args.dataloader_multiprocessing_context,
                "prefetch_factor": args.dataloader_prefetch_factor,
            },
        )
        if features.skipped and view is None:
            self._say(
                f"{task.name}: {len(features.skipped)} of {len(dataset)} {split} images cannot be read and are left "
                f"out, first row {features.skipped[0]}"
            )
        return features

    # ---- within a task -------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Cross-entropy + λ·Σ|θ| over the LuCA module of the expert that is being learnt, mean over the batch."""
        if self._task is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))
        shared = model.training and self.accelerator.num_processes > 1
        cross_entropy = F.cross_entropy(
            logits, labels, label_smoothing=self.args.label_smoothing_factor, reduction="sum" if shared else "mean"
        )
        if shared:
            # Gradients are averaged over the processes, whose parts of a short batch may differ: with this the mean
            # is the one over the whole batch.
            in_all = self.accelerator.reduce((labels != -100).sum())
            cross_entropy = cross_entropy * self.accelerator.num_processes / in_all
        l1 = (self.args.l1_weight or 0.0) * self.tuner.l1_penalty(self._task.name)
        if model.training:
            for name, part in (("cross_entropy", cross_entropy), ("l1_penalty", l1)):
                self._loss_parts[name] = self._loss_parts.get(name, 0.0) + part.detach()
            self._loss_batches += 1
        # The proximal step takes the place of the penalty's gradient.
        loss = cross_entropy + (l1.detach() if self.args.l1_proximal else l1)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        whole = loss.isfinite()
        if self.accelerator.num_processes > 1:  # all stop, or none
            whole = self.accelerator.reduce(whole.float(), "mean") == 1
        if not whole:
            self._refuse_numbers(f"the loss is {float(loss)}")
        return loss

    def _check_classes(self, task: Task) -> None:
        """Every class has an image that can be read."""
        train = self.features(task, "train")
        left = set(self._ids(train.labels, task.classes).tolist())
        if gone := [name for i, name in enumerate(task.classes) if i not in left]:
            raise ValueError(
                f"task {task.name!r}: none of the images of {', '.join(map(repr, gone[:5]))} can be read, and "
                f"{len(train.skipped)} are left out, first row {train.skipped[0]}. Mend them, or take the class out."
            )

    def _check_numbers(self, task: Task) -> None:
        """What is saved can be loaded again."""
        for name, tensor in self.tuner.layer.tensors(task.name).items():
            if not (tensor.abs() <= MAX_NUMBER).all():
                self._refuse_numbers(f"{name} holds numbers that are not finite, or above {MAX_NUMBER:g}", task)

    def _refuse_numbers(self, what: str, task: Task | None = None) -> None:
        name = (task or self._task or self.stream[-1]).name
        raise FloatingPointError(
            f"task {name!r}, step {self.state.global_step + (task is None)}: {what}. The task is given up; the "
            f"{len(self._records)} learnt before it are kept in {self.args.output_dir}. Look at its images, or begin "
            f"anew in another output_dir with a learning_rate below {self.args.learning_rate}."
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        return super().get_eval_dataloader(self._as_kept(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return super().get_test_dataloader(self._as_kept(test_dataset))

    def _as_kept(self, dataset: Any) -> Any:
        """Images that our own collator decodes, as everywhere."""
        if not isinstance(self.data_collator, ImageCollator):
            return dataset
        column, columns = self.stream.image_column, getattr(dataset, "column_names", None)
        if columns is not None and column not in columns:
            raise ValueError(f"the dataset has the columns {columns}, but needs its images in a column {column!r}.")
        return undecoded(dataset, column)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._loss_batches:
            parts = {name: self.accelerator.reduce(part, "mean") for name, part in self._loss_parts.items()}
            logs |= {name: float(part) / self._loss_batches for name, part in parts.items()}
            self._loss_parts, self._loss_batches = {}, 0
        # Every task counts its own steps from 0; what is logged runs on across tasks.
        own_step = self.state.global_step
        self.state.global_step = self._steps_before + (own_step if self._task else 0)
        try:
            super().log(logs, start_time)
        finally:
            self.state.global_step = own_step

    def get_train_dataloader(self) -> DataLoader[Any]:
        args, processes = self.args, self.accelerator.num_processes
        dataset: Any = self.train_dataset
        whole_batch = self._train_batch_size * processes
        if self._task is not None and args.dataloader_drop_last and len(dataset) < whole_batch:
            raise ValueError(
                f"task {self._task.name!r} has {len(dataset)} images, fewer than a batch of {whole_batch}, and "
                "dataloader_drop_last leaves none. Set it to False, or take smaller batches."
            )
        if self._task is None or args.train_sampling_strategy != "random":
            return super().get_train_dataloader()
        seed = torch.random.initial_seed() if args.data_seed is None else args.data_seed
        return EpochLoader(
            dataset,
            batch_sampler=EpochBatches(
                len(dataset),
                whole_batch,
                seed,
                args.process_index,
                processes,
                args.dataloader_drop_last,
            ),
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        )

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if training and self._task is not None and self.data_collator is FeatureDataset.collate:
            return self.accelerator.prepare_model(FeatureHead(self.tuner.layer))
        return super()._wrap_model(model, training, dataloader)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.args.l1_proximal and self._task is not None:
            parameters = list(self.tuner.layer.luca_parameters(self._task.name).values())
            weight = self.args.l1_weight or 0.0
            optimizer.register_step_post_hook(lambda stepped, *_: soft_threshold(stepped, parameters, weight))
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if not self.args.schedule_per_epoch or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        dataset: Any = self.train_dataset
        batches = len(dataset) / (self.args.train_batch_size * self.args.world_size)
        batches = math.floor(batches) if self.args.dataloader_drop_last else math.ceil(batches)
        per_epoch = math.ceil(batches / self.args.gradient_accumulation_steps)
        epochs = math.ceil(num_training_steps / per_epoch)

        def factor(step: int) -> float:
            # ½ (1 + cos(π · epoch / epochs)), as the authors' code steps it after each epoch
            return 0.5 * (1.0 + math.cos(math.pi * (step // per_epoch) / epochs))

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _add_expert(self, task: Task, seed: int) -> None:
        config = copy.deepcopy(self.luca_config)
        config.classes = list(task.classes)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if isinstance(self.model, PeftModel):
                self.model.add_adapter(task.name, config)
            else:
                with quiet_peft():
                    self.model = get_peft_model(self.model, config, adapter_name=task.name)
        self.model.set_adapter(task.name)
        self.model.eval()
        if config.reference or self.tuner.backbone.image_size is not None:
            # An expert that is not standardised by it has it all the same, to tell its backbone by.
            self.tuner.compute_reference(task.name)

    def _set_rows_to_class_means(self, task: Task, adapted: bool = True) -> None:
        train = self.features(task, "train")
        labels = self._ids(train.labels, task.classes).to(self.args.device)
        self.tuner.layer.set_rows_to_class_means(task.name, train.features, labels, adapted)

    def _collect_statistics(self, task: Task) -> None:
        train, rank = self.features(task, "train"), self.args.statistics_rank
        own = self._ids(train.labels, task.classes)
        self.tuner.collect_statistics(
            task.name, train.features, own, None if rank < 0 else rank, self.args.statistics_random_features
        )

    @property
    def _router_options(self) -> dict[str, Any]:
        return {} if self.args.routing_scope == "sample" else {"routing_scope": self.args.routing_scope}

    def _set_router(self) -> None:
        self.tuner.set_router(self.args.router, **self._router_options)

    def _drop_expert(self, task: Task) -> None:
        """Leave the model as it was before a task that could not be finished."""
        if not isinstance(self.model, PeftModel) or task.name not in self.tuner.experts:
            return
        if len(self.tuner.experts) == 1:
            self.model = self.tuner.unload()
            self.model_wrapped = self.model
        else:
            self.model.delete_adapter(task.name)
            self._set_router()

    @contextmanager
    def _learning(self, task: Task, seed: int) -> Iterator[Any]:
        """Trainer's own fields as one task needs them, and afterwards as they were."""
        seen = self.args.negatives == "seen"
        classes = self.tuner.classes if seen else task.classes
        model_input: AbstractContextManager[None]
        before = (self.train_dataset, self.eval_dataset, self.data_collator)
        arguments = {name: getattr(self.args, name) for name in WITHIN_A_TASK}
        evaluating = self.args.eval_strategy != "no"
        if self.args.cache_features and (self.args.augmented_views or not self.args.augmentation):
            views = [self._extract(task, "train", view) for view in range(self.args.augmented_views)]
            splits = [views[0] if views else self.features(task, "train")]
            splits += [self.features(task, "test")] if evaluating else []
            datasets: list[Any] = [FeatureDataset(s.features, self._ids(s.labels, classes)) for s in splits]
            datasets[0].views = [view.features for view in views]
            self.data_collator, model_input = FeatureDataset.collate, nullcontext()
            # Rows of a memory map need no workers; those are for images.
            self.args.dataloader_num_workers, self.args.dataloader_prefetch_factor = 0, None
            self.args.dataloader_persistent_workers, self.args.dataloader_multiprocessing_context = False, None
        else:
            datasets = [self._readable(task, "train"), self._readable(task, "test") if evaluating else None]
            ids = _label_ids(self.stream.classes, classes)
            self.data_collator = ImageCollator(
                self.processing_class, self.stream.image_column, ids, bool(self.args.augmentation),
                channels=channels_of(self.model),
            )  # fmt: skip
            model_input = nullcontext()
        self.train_dataset, self.eval_dataset = (*datasets, None)[:2]
        # Every task has an optimizer and a schedule of its own, and draws from a seed that its classes alone decide.
        self.optimizer = self.lr_scheduler = None
        self.model_wrapped = self.callback_handler.model = self.model
        self._loss_parts, self._loss_batches = {}, 0
        self.args.seed = seed
        set_seed(seed)
        self._task = task
        try:
            yield model_input
        finally:
            self._task = None
            self.train_dataset, self.eval_dataset, self.data_collator = before
            for name, value in arguments.items():
                setattr(self.args, name, value)
            # Mixed precision wraps the model's forward anew in every train(): take the wrapper off.
            self.model = self.model_wrapped = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)

    def _readable(self, task: Task, split: str) -> Any:
        """A task's images, without those that cannot be read where such are to be skipped."""
        dataset: Any = undecoded(task.train if split == "train" else task.test, self.stream.image_column)
        if self.args.on_bad_image == "raise":
            return dataset
        skipped = self.features(task, split).skipped
        return dataset.select(np.delete(np.arange(len(dataset)), skipped)) if skipped else dataset

    def _follow_labels(self) -> None:
        """Images that are evaluated have the stream's labels, the model's logits the order of its experts."""
        if isinstance(self.data_collator, ImageCollator):
            self.data_collator.label_ids = _label_ids(self.stream.classes, self.tuner.classes)

    def _ids(self, labels: Tensor, classes: tuple[str, ...]) -> Tensor:
        """The stream's global ids → positions in a list of class names; -1 for a class that is not in it."""
        ids = _label_ids(self.stream.classes, classes)
        return torch.tensor([ids.get(i, -1) for i in range(len(self.stream.classes))])[labels]

    # ---- after a task --------------------------------------------------------------------------------------------

    def _finish(self, task: Task, output: TrainOutput, seconds: float) -> None:
        record: dict[str, Any] = {
            "name": task.name,
            "classes": list(task.classes),
            "train_images": len(task.train) if has_length(task.train) else None,
            "test_images": len(task.test) if task.test is not None else 0,
            "skipped_images": sum(len(f.skipped) for (name, _), f in self._features.items() if name == task.name),
            "steps": output.global_step,
            "train_loss": output.training_loss,
            "seconds": round(seconds, 3),
        }
        record.update(self._measure([*self._records, record]))
        self._records.append(record)
        figures = self._figures()
        if self.args.should_save:
            folder = Path(self.args.output_dir)
            try:
                with explain_write_errors(folder / task.name):
                    save_experts(self.model, folder, [task.name])
                with explain_write_errors(folder / RESULTS_NAME):
                    write_json(folder / RESULTS_NAME, self.results())
            except BaseException:
                self._records.pop()  # learnt is what is on the disk
                raise
        self._follow_labels()
        self._push_what_is_learnt()
        self._say(task_line(len(self._records), len(self.stream), record, figures, len(self.tuner.classes)))
        self.log({f"stage_{name}": value for name, value in figures.items() if isinstance(value, float)})

    def _measure(self, records: list[Record]) -> Measured:
        """What `_measure_here` returns, computed once for all processes."""
        learnt = {record["name"] for record in records}
        for task in self.stream:
            if task.name in learnt and task.name in self.tuner.experts and task.test is not None:
                self.features(task, "test")  # every process takes its part
        measured = [self._measure_here(records) if self.is_world_process_zero() else None]
        (whole,) = broadcast_object_list(measured)
        return whole

    @torch.no_grad()
    def _measure_here(self, records: list[Record]) -> Measured:
        """Per task learnt: routed accuracy, share of images that the task's own expert answered, and accuracy of that
        expert over its own classes (the task known)."""
        layer, experts = self.tuner.layer, list(self.tuner.experts)
        measured: Measured = {"accuracy": [], "routing": [], "task_known": []}
        self.model.eval()
        tasks = {task.name: task for task in self.stream}
        for record in records:
            task = tasks.get(record["name"])
            figures: tuple[float | None, ...] = (None, None, None)
            if task is not None and task.test is not None and task.name in experts:
                test = self.features(task, "test")
                predicted, expert, own = [], [], []
                # A memory map, of any size; only a choice for all images at once needs them at once.
                at_once = len(test) if self.args.routing_scope == "batch" else 4096
                for z in test.features.split(at_once):
                    z = z.to(self.args.device)
                    routed = layer.route_features(z)
                    predicted.append(routed.logits.argmax(1))
                    expert.append(routed.expert)
                    own.append(layer.expert_logits(z, task.name).argmax(1))
                figures = (
                    _share(torch.cat(predicted), self._ids(test.labels, self.tuner.classes)),
                    _share(torch.cat(expert), torch.full_like(test.labels, experts.index(task.name))),
                    _share(torch.cat(own), self._ids(test.labels, task.classes)),
                )
            for name, figure in zip(measured, figures, strict=True):
                measured[name].append(figure)
        return measured

    def _figures(self, last: Measured | None = None) -> dict[str, Any]:
        """Everything that is read off the accuracy matrix, whose last row may be measured anew."""
        return run_figures(self._records, last, bool(self._records) and self._experts_share_classes())

    def _experts_share_classes(self) -> bool:
        return sum(map(len, self.tuner.experts.values())) > len(self.tuner.classes)

    def results(self) -> dict[str, Any]:
        """What `results.json` holds: the run's settings, each task as it was learnt, and the figures."""
        return {
            "format": RESULTS_FORMAT,
            "settings": run_settings(self.args, self.luca_config),
            "classes": list(self.stream.classes),
            "tasks": [r if r["name"] in self.tuner.experts else {**r, "deleted": True} for r in self._records],
            **self._figures(),
        }

    def _say(self, line: str) -> None:
        """A line that a person reads, past the progress bars."""
        if self.is_world_process_zero():
            logger.info(line) if self.args.disable_tqdm else tqdm.write(line)

    # ---- going on, and saving ------------------------------------------------------------------------------------

    @property
    def _learnt(self) -> set[str]:
        return {record["name"] for record in self._records}

    def _go_on(self, refuse: bool = False) -> None:
        """Take up what an earlier run finished in the output folder."""
        folder = Path(self.args.output_dir)
        if self.args.should_save:
            self._clear_away(folder)
        if self._records:
            return
        records = earlier_run(folder, run_settings(self.args, self.luca_config), self.stream, refuse)
        if not records:
            return
        kept = [record for record in records if not record.get("deleted")]
        sources = {record["name"]: folder / record["name"] for record in kept}
        if sources:
            self.model = self.model_wrapped = load_experts(self.model, sources)
        self._records = records
        self._steps_before = sum(record["steps"] for record in records)
        self._set_router()
        self._follow_labels()
        self._say(f"going on after {len(records)} of {pluralize(len(self.stream), 'task')} found in {folder}")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One run at a time in an output folder: of all its processes, those that write hold its lock."""
        with ExitStack() as stack:
            refusal = None
            if self.args.should_save:
                try:
                    stack.enter_context(hold_lock(self._lock))
                except (RuntimeError, OSError) as error:
                    refusal = error
            refusals = [error for error in gather_object([refusal]) if error is not None]
            if refusals:
                raise refusals[0]
            yield

    def _clear_away(self, folder: Path) -> None:
        """Remove what a run that was killed has left half-written, and see that the folder can be written to."""
        names = "|".join(map(re.escape, (RESULTS_NAME, MANIFEST_NAME, *(task.name for task in self.stream))))
        with explain_write_errors(folder / RESULTS_NAME):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if re.fullmatch(rf"\.({names})\.(\w{{8}}|writing)", path.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            tempfile.TemporaryFile(dir=folder).close()

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Push all experts as a collection, with `results.json`, the image processor and the card, to `args.hub_model_id`
        (by default a repository called as the output folder); see [`push_experts`].

        Args:
            commit_message (`str`, *optional*, defaults to `"End of training"`): Of the one commit.
            blocking (`bool`, *optional*, defaults to `True`): Wait for the upload.
            token (`str`, *optional*): Hub token; `args.hub_token` by default.
            revision (`str`, *optional*): Branch; `args.hub_revision` by default.
            private (`bool`, *optional*): Of a new repository; `args.hub_private_repo` by default.
            kwargs: `base_model`, `license` and `datasets` of the card.

        Returns:
            [`~huggingface_hub.CommitInfo`], or a future of it. `None` on all processes but the first.
        """
        tuner_of(self.model)  # says so when nothing has been learnt
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        if not self.is_world_process_zero():
            return None
        if self._push is not None:
            self._push.exception()  # wait; this push carries all that an earlier one did
        return push_experts(
            self.model,
            str(self.hub_model_id),
            private=self.args.hub_private_repo if private is None else private,
            revision=revision or self.args.hub_revision,
            token=token or self.args.hub_token,
            commit_message=commit_message,
            results=self.results() if self._records else None,
            processing_class=self.processing_class,
            blocking=blocking,
            **kwargs,
        )

    def create_model_card(  # type: ignore[override]
        self,
        license: str | None = None,
        datasets: str | list[str] | None = None,
        base_model: str | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Write the collection's card into the output folder. `push_to_hub` makes its own.

        Args:
            license (`str`, *optional*): Licence of the experts.
            datasets (`str` or `list[str]`, *optional*): Hub ids of what they were trained on.
            base_model (`str`, *optional*): Hub id of the backbone.
            kwargs: Other arguments of [`~transformers.Trainer.create_model_card`], which this card has no place for.
        """
        if self.is_world_process_zero():
            name = self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            card = make_card(
                self.tuner,
                list(self.tuner.experts),
                name,
                single=False,
                base_model=base_model,
                license=license,
                datasets=datasets,
                results=self.results() if self._records else None,
            )
            (Path(self.args.output_dir) / CARD_NAME).write_text(card, encoding="utf-8")

    def _push_what_is_learnt(self) -> None:
        """Push in the background, unless an earlier push is still under way: the next one carries this task too."""
        if not self.args.push_to_hub or self.args.hub_strategy != HubStrategy.EVERY_SAVE:
            return
        if self._push is not None and not self._push.done():
            return
        error = None if self._push is None else self._push.exception()
        try:
            self._push = self.push_to_hub(f"{self._records[-1]['name']} learnt", blocking=False)
        except Exception as failure:  # whatever the network does, the run goes on
            error = failure
        if error is not None:
            logger.warning(f"Pushing to the Hub failed, and is tried again after the next task: {error!r}")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Checkpoints within a task hold pickled state, and stay here."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # A collection of experts: safetensors and JSON only, no pickled arguments as Trainer writes them.
        folder = output_dir or self.args.output_dir
        if not isinstance(self.model, PeftModel):
            raise ValueError("there is no expert to save: no task has been learnt. Call train() first.")
        save_experts(self.model, folder)
        self.processing_class.save_pretrained(folder)
        if self._records:
            write_json(Path(folder) / RESULTS_NAME, self.results())


def task_seed(seed: int, classes: tuple[str, ...]) -> int:
    """The seed of a task: from the run's seed and the class names, not from the task's place in the stream."""
    text = json.dumps([seed, sorted(classes)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def _label_ids(stream: tuple[str, ...], classes: tuple[str, ...]) -> dict[int, int]:
    """Global id in the stream → position in a list of class names, of the classes that both have."""
    where = {name: i for i, name in enumerate(classes)}
    return {i: where[name] for i, name in enumerate(stream) if name in where}


def _template(model: nn.Module, luca_config: LucaConfig | None) -> tuple[LucaConfig, nn.Module]:
    """The experts' template, and the model."""
    if isinstance(model, PeftModel):
        tuner = tuner_of(model)
        if luca_config is None:
            luca_config = next(iter(tuner.peft_config.values())).template()
            luca_config.classes = None
        if list(tuner.experts) == ["default"]:
            # As get_peft_model(vit, LucaConfig()) makes it: a config to train by, not an expert to keep.
            logger.warning(
                "The expert 'default' was never trained: it is taken off, and each task gets one of its own."
            )
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


def _check_task(task: Task, model: nn.Module, args: ContinualTrainingArguments, config: LucaConfig) -> None:
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


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float((np.argmax(logits, axis=-1) == prediction.label_ids).mean())}


def _share(predicted: Tensor, wanted: Tensor) -> float:
    return float((predicted.cpu() == wanted).double().mean())
