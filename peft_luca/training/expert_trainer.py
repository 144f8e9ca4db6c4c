"""`ExpertTrainer`: trains one expert on one task, from images or from [CLS] computed before."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import datasets
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import set_seed
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.trainer_utils import TrainOutput, has_length, seed_worker

from ..data.collator import ImageCollator
from ..data.feature_cache import FeatureDataset
from ..hub.publishing import push_expert
from ..hub.saving import save_expert
from ..hub.validation import MAX_NUMBER
from ..tuner.backbone import processor_facts, warn_of_processor
from ..tuner.layer import image_options
from ..tuner.model import LucaModel, tuner_of
from .arguments import ContinualTrainingArguments
from .batches import EpochBatches, collate, make_extractor
from .publishing import PublishingTrainer
from .sparsity import soft_threshold


class ExpertModule(nn.Module):
    """
    The part of a model that is trained: one expert, with logits of its own classes, `(batch, K)`, or of those of all
    experts, `(batch, C)`. It has no other parameters, since `Trainer` walks over all of a module's at each step.
    """

    def __init__(self, tuner: LucaModel, expert: str, all_classes: bool = False) -> None:
        super().__init__()
        self.expert, self.all_classes = expert, all_classes
        parameters = tuner.layer.named_parameters()
        self.expert_parameters = nn.ParameterList(
            parameter for name, parameter in parameters if name.split(".")[1] == expert and parameter.requires_grad
        )
        # In a tuple: a submodule would bring the parameters of the backbone and of the other experts.
        self._tuner, self._dtype = (tuner,), tuner.backbone.dtype

    def forward(
        self,
        features: Tensor | None = None,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> ImageClassifierOutput:
        """[CLS] `(batch, d)` or images, and labels `(batch,)` → logits, and their cross-entropy."""
        (tuner,) = self._tuner
        if features is None:
            assert pixel_values is not None, "a batch must hold features or pixel_values"
            with torch.no_grad():
                features = tuner.pooled_features(pixel_values.to(self._dtype))
        if self.all_classes:
            logits = tuner.scores(features, [self.expert])[:, 0]
        else:
            logits = tuner.expert_logits(features, self.expert)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = None if labels is None else fixed_cross_entropy(logits, labels, num_items_in_batch)
        return ImageClassifierOutput(loss=loss, logits=logits)


class ExpertTrainer(PublishingTrainer):
    """
    Trains one expert on one task with cross-entropy + λ·Σ|θ|. Make a new one for each task.

    A new expert is prepared first: its reference is computed, and its rows start as its config says. After training,
    as `args` say, its rows become class means of the adapted features, and its statistics are collected.

    Args:
        model ([`~peft.PeftModel`]): The model with the expert. The other experts and the backbone stay as they are.
        args ([`ContinualTrainingArguments`], *optional*): Output folder, recipe and hyperparameters.
        train_dataset ([`FeatureDataset`] or `datasets.Dataset`):
            [CLS] vectors, or images with a column `labels`. Labels are the expert's own ids, 0 … K-1.
        eval_dataset ([`FeatureDataset`], `datasets.Dataset` or a `dict` of them, *optional*): The same.
        expert (`str`, *optional*): The expert to train; the active one by default. It becomes the active one.
        processing_class (`BaseImageProcessor`, *optional*): The backbone's image processor. Needed for images.
        data_collator (`Callable`, *optional*): Makes batches of images, in place of an [`ImageCollator`].
        features ([`FeatureDataset`], *optional*):
            [CLS] of the training images without augmentation, for class means and statistics. Computed by default.
        new_expert (`bool`, *optional*, defaults to `True`): `False` continues the training of an expert as it is.
        kwargs: Other arguments of [`~transformers.Trainer`]. `compute_loss_func` replaces the cross-entropy.
    """

    optimizer: Any
    train_dataset: Any
    expert: str

    def __init__(
        self,
        model: PeftModel,
        args: ContinualTrainingArguments | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        expert: str | None = None,
        processing_class: Any = None,
        data_collator: Any = None,
        features: FeatureDataset | None = None,
        new_expert: bool = True,
        **kwargs: Any,
    ) -> None:
        args = ContinualTrainingArguments("trainer_output") if args is None else args
        if not isinstance(args, ContinualTrainingArguments):
            raise ValueError(f"args must be ContinualTrainingArguments, got {type(args).__name__}.")
        tuner = tuner_of(model)
        if expert is not None:
            model.set_adapter(expert)
        elif tuner.router is not None or not any(parameter.requires_grad for parameter in tuner.parameters()):
            raise ValueError(f"no expert is active and trainable. Pass expert=, one of {', '.join(tuner.experts)}.")
        self.expert = expert or str(tuner.active_adapters[0])
        self.new_expert = new_expert
        self.earlier_steps = 0  # of earlier tasks, whose logs this training's follow
        self._features = train_dataset if features is None and isinstance(train_dataset, FeatureDataset) else features
        self._module: Any = None
        self._loss_parts: Any = Counter()  # sums since the last log, and of how many steps
        self._has_proximal_step = False
        given = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "processing_class": processing_class}
        super().__init__(model=model, args=args, **given, **kwargs)
        self.model_accepts_loss_kwargs = True  # ExpertModule divides its loss by num_items_in_batch
        self._set_collators(data_collator)
        held = {id(p) for group in getattr(self.optimizer, "param_groups", ()) for p in group["params"]}
        if held and not any(id(p) in held for p in self.model.parameters() if p.requires_grad):
            raise ValueError(f"optimizers holds no parameter of {self.expert!r}. Use optimizer_cls_and_kwargs.")

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        # From "cpu" to "cpu:0" torch would copy the backbone, and its facts would be computed again.
        places = {(parameter.device.type, parameter.device.index or 0) for parameter in model.parameters()}
        if places != {(device.type, device.index or 0)}:
            super()._move_model_to_device(model, device)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As [`~transformers.Trainer.train`]. Raises a `FloatingPointError` if a loss or weight is not finite."""
        tuner, config = self.tuner, self.tuner.peft_config[self.expert]
        warn_of_processor(tuner.layer.configs, self.processing_class)
        config.processor = processor_facts(self.processing_class) or config.processor
        if self.new_expert:
            if config.whitening:
                data = self._plain_features()
                tuner.compute_reference(self.expert, data.features, data.labels)
            elif config.reference or tuner.backbone.image_size is not None:  # it identifies the backbone as well
                tuner.compute_reference(self.expert)
            if config.init_rows == "class_means":
                self._set_rows_to_class_means(adapted=False)
            self.new_expert = False
        set_seed(self.args.seed)
        self.model.train()
        output: TrainOutput = super().train(*args, **kwargs)
        self.model.eval()
        if self.args.class_mean_rows:
            self._set_rows_to_class_means(adapted=True)
        if self.args.statistics:
            data, rank = self._plain_features(), self.args.statistics_rank
            options = (None if rank < 0 else rank, self.args.statistics_random_features)
            tuner.collect_statistics(self.expert, data.features, data.labels, *options)
        for name, tensor in tuner.layer.tensors(self.expert).items():
            if not (tensor.abs() <= MAX_NUMBER).all():  # what is saved can be loaded again
                self._refuse_numbers(f"{name} holds numbers that are not finite, or above {MAX_NUMBER:g}", 0)
        return output

    def _set_rows_to_class_means(self, adapted: bool) -> None:
        data = self._plain_features()
        self.tuner.set_rows_to_class_means(self.expert, data.features, data.labels.to(self.args.device), adapted)

    def _plain_features(self) -> FeatureDataset:
        """[CLS] of the training images without augmentation."""
        if self._features is None:
            extract = make_extractor(self.tuner, self._image_collator(self.train_dataset), self.args)
            self._features = extract(self.train_dataset, description=f"{self.expert}: [CLS] of the training images")
        return self._features

    def _set_collators(self, images: Any) -> None:
        """Collators of training and of evaluation, which differ by the augmentation."""
        evaluated = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        of_images = [d for d in (self.train_dataset, *evaluated) if not isinstance(d, FeatureDataset | None)]
        augmented = images
        if images is None and of_images:
            images = self._image_collator(of_images[0])
            augmented = replace(images, augmentation=bool(self.args.augmentation))
        elif of_images and self.args.augmentation and not getattr(images, "augmentation", False):
            raise ValueError("augmentation=True is done by the default data_collator, not by yours: drop one of them.")
        self.data_collator, self._train_collator = partial(collate, images=images), partial(collate, images=augmented)

    def _image_collator(self, dataset: Any) -> ImageCollator:
        features = getattr(dataset, "features", None) or {}
        columns = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        if len(columns) != 1 or "labels" not in features or self.processing_class is None:
            found = f"the columns {list(features)} and processing_class={type(self.processing_class).__name__}"
            raise ValueError(f"images need a column of images, a column 'labels' and a processing_class; got {found}.")
        names, classes = getattr(features["labels"], "names", None), list(self.tuner.experts[self.expert])
        if names is not None and names != classes:
            remedy = "dataset.align_labels_with_mapping({name: i for i, name in enumerate(classes)}, 'labels')"
            found = f"the dataset's labels are {names}, but the classes of expert {self.expert!r} are {classes}"
            raise ValueError(f"{found}. Call {remedy}.")
        return ImageCollator(self.processing_class, columns[0], **image_options(self.model))

    def get_train_dataloader(self) -> DataLoader[Any]:
        args, dataset = self.args, self.train_dataset
        if args.train_sampling_strategy != "random" or not has_length(dataset):
            plain, self.data_collator = self.data_collator, self._train_collator
            loader: Any = super().get_train_dataloader()
            self.data_collator = plain
            return loader
        processes = self.accelerator.num_processes
        batch_size, seed = self._train_batch_size * processes, args.seed if args.data_seed is None else args.data_seed
        batches = EpochBatches(dataset, batch_size, seed, args.process_index, processes, args.dataloader_drop_last)
        if not len(batches):
            images = f"expert {self.expert!r} has {len(dataset)} images, fewer than a batch of {batch_size}"
            raise ValueError(f"{images}, and dataloader_drop_last leaves none. Set it to False.")
        names = ["pin_memory"]
        if not isinstance(dataset, FeatureDataset):  # rows of a memory map need no workers
            names += ["num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context"]
        options = {name: getattr(args, f"dataloader_{name}") for name in names}
        seed_workers = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index)
        options |= {"batch_sampler": batches, "collate_fn": self._train_collator, "worker_init_fn": seed_workers}
        loader = DataLoader(self.train_dataset, **options)
        loader.set_epoch = batches.set_epoch  # Trainer calls it
        return loader

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        if self.args.negatives == "seen" and "labels" in inputs:  # positions among the classes of all experts
            labels, ids = inputs["labels"], self.tuner.layer.label_space.own[self.expert]
            inputs["labels"] = torch.where(labels < 0, labels, ids[labels.clamp(min=0)])
        return inputs

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if self._module is None:
            self._module = ExpertModule(self.tuner, self.expert, self.args.negatives == "seen")
        # Preparing it wraps its forward in place for mixed precision, so evaluation gets the same.
        return self.accelerator.prepare_model(self._module) if training else self._module

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Cross-entropy, or `compute_loss_func`, + λ·Σ|θ| over the expert's LuCA module, once per optimizer step."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        micro_batches = self.current_gradient_accumulation_steps if model.training else 1
        l1 = self.args.l1_weight * self.tuner.l1_penalty(self.expert) / micro_batches
        if model.training:
            name = "cross_entropy" if self.compute_loss_func is None else "custom_loss"
            self._loss_parts.update({name: loss.detach(), "l1_penalty": l1.detach(), "steps": 1 / micro_batches})
        # The proximal step takes the place of the penalty's gradient.
        loss = loss + (l1.detach() if self.args.l1_proximal else l1)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        if self.accelerator.reduce(loss.isfinite().float(), "mean") != 1:  # all processes stop, or none
            self._refuse_numbers(f"the loss is {float(loss)}", 1)
        return loss

    def _refuse_numbers(self, found: str, steps: int) -> None:
        place = f"expert {self.expert!r}, step {self.state.global_step + steps}"
        remedy = f"train in another output_dir with a learning_rate below {self.args.learning_rate}"
        raise FloatingPointError(f"{place}: {found}. The expert is given up. Look at its images, or {remedy}.")

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        if self.args.l1_proximal and not self._has_proximal_step:
            if not isinstance(optimizer, (torch.optim.SGD, torch.optim.Adam)):  # AdamW is an Adam
                raise ValueError(f"l1_proximal needs SGD, Adam or AdamW, got {type(optimizer).__name__}.")
            parameters, weight = list(self.tuner.layer.luca_parameters(self.expert).values()), self.args.l1_weight
            optimizer.register_step_post_hook(lambda stepped, *_: soft_threshold(stepped, parameters, weight))
            self._has_proximal_step = True
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if not self.args.schedule_per_epoch or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        per_epoch = math.ceil(len(self.get_train_dataloader()) / self.args.gradient_accumulation_steps)
        epochs = math.ceil(num_training_steps / per_epoch)

        def factor(step: int) -> float:
            return 0.5 * (1.0 + math.cos(math.pi * (step // per_epoch) / epochs))  # as the authors' code has it

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._loss_parts:
            steps = self._loss_parts.pop("steps")
            for part, loss in self._loss_parts.items():
                logs[part] = float(self.accelerator.reduce(loss, "mean")) / steps
            self._loss_parts.clear()
        shown = ("loss", "eval_loss", "eval_accuracy")  # a curve for each task, beside the one of the run
        logs |= {f"{self.expert}/{name}": logs[name] for name in shown if name in logs}
        self.state.global_step += self.earlier_steps
        super().log(logs, start_time)
        self.state.global_step -= self.earlier_steps

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        output = super().prediction_step(model, inputs, *args, **kwargs)
        if "features" in inputs:  # include_for_metrics=["inputs"] asks for the model's own kind of input
            inputs[getattr(self.model, "main_input_name", "input_ids")] = inputs["features"]
        return output

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # Not super()'s, which would save all experts, and pickle the arguments.
        folder = output_dir or self.args.output_dir
        if self.args.should_save:
            save_expert(self.model, self.expert, folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

    def _push(self, repo_id: str, blocking: bool, **kwargs: Any) -> Any:
        return push_expert(self.model, self.expert, repo_id, **kwargs)
