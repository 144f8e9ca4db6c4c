"""`ExpertTrainer`: trains one expert on one task, from images or from [CLS] computed before."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import datasets
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import ProgressCallback, enable_full_determinism, set_seed
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.trainer_utils import TrainOutput, has_length, seed_worker

from ..data.collator import ImageCollator
from ..data.feature_cache import FeatureDataset
from ..hub.publishing import push_expert
from ..hub.saving import save_expert
from ..hub.validation import MAX_NUMBER
from ..preprocessing import channels_of, undecoded
from ..tuner.model import LucaModel, tuner_of
from .arguments import ContinualTrainingArguments
from .batches import BatchCollator, EpochBatches, EpochLoader, ExpertProgressCallback
from .figures import Accuracy
from .publishing import PublishingTrainer
from .sparsity import soft_threshold
from .task_features import loader_options, make_extractor


class ExpertModule(nn.Module):
    """
    The part of a model that is trained: one expert. Its parameters are the expert's alone, since `Trainer` walks over
    all parameters of a module several times at each step. Its logits are those of the expert's own classes,
    `(batch, K)`, or with `all_classes` of the classes of all experts, `(batch, C)`.
    """

    def __init__(self, tuner: LucaModel, expert: str, all_classes: bool = False) -> None:
        super().__init__()
        self.expert = expert
        self.expert_parameters = nn.ParameterList(
            parameter
            for name, parameter in tuner.layer.named_parameters()
            if name.split(".")[1] == expert and parameter.requires_grad
        )
        # Bound methods: a submodule would bring the parameters of the backbone and of the other experts.
        self._pooled_features = tuner.pooled_features
        self._logits: Callable[[Tensor], Tensor] = lambda z: tuner.expert_logits(z, expert)
        if all_classes:
            self._logits = lambda z: tuner.scores(z, [expert])[:, 0]
        self._dtype = tuner.backbone.dtype

    def forward(
        self,
        features: Tensor | None = None,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> ImageClassifierOutput:
        """
        [CLS] vectors `(batch, d)`, or images `(batch, channels, height, width)`, and labels `(batch,)` → logits, and
        their cross-entropy as the mean over the batch, or over `num_items_in_batch` images.
        """
        if features is None:
            if pixel_values is None:
                raise ValueError("a batch must hold features or pixel_values, got neither.")
            with torch.no_grad():
                features = self._pooled_features(pixel_values.to(self._dtype))
        logits = self._logits(features)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if labels is None:
            return ImageClassifierOutput(logits=logits)
        items = num_items_in_batch
        loss = F.cross_entropy(logits, labels, reduction="mean" if items is None else "sum")
        return ImageClassifierOutput(loss=loss if items is None else loss / items, logits=logits)


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
        features ([`FeatureDataset`], *optional*):
            [CLS] of the training images without augmentation, for class means and statistics. Computed by default.
        new_expert (`bool`, *optional*, defaults to `True`): `False` continues the training of an expert as it is.
        kwargs:
            Other arguments of [`~transformers.Trainer`], as documented there. `compute_loss_func` replaces the
            cross-entropy; the ℓ1 penalty is added to it.
    """

    # What Trainer declares for every kind of model and data, and what this one has.
    model: Any
    args: Any
    data_collator: Any
    optimizer: Any
    train_dataset: Any
    expert: str

    def __init__(
        self,
        model: PeftModel | None = None,
        args: ContinualTrainingArguments | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        expert: str | None = None,
        processing_class: Any = None,
        features: FeatureDataset | None = None,
        new_expert: bool = True,
        **kwargs: Any,
    ) -> None:
        args = ContinualTrainingArguments("trainer_output") if args is None else args
        if not isinstance(args, ContinualTrainingArguments):
            raise ValueError(f"args must be ContinualTrainingArguments, got {type(args).__name__}.")
        if kwargs.get("model_init") is not None:
            raise ValueError("model_init cannot be used here. Pass model, and make a trainer for each trial.")
        self.expert = _activate(model, expert)
        self.new_expert, self._features = new_expert, features
        self._module: Any = None
        self._loss_parts: dict[str, Tensor] = {}
        self._loss_steps, self._has_proximal_step = 0.0, False
        kwargs.setdefault("compute_metrics", Accuracy())
        collator = kwargs.pop("data_collator", None)
        super().__init__(model, args, collator, train_dataset, eval_dataset, processing_class, **kwargs)
        self.model_accepts_loss_kwargs = True  # ExpertModule divides its loss by num_items_in_batch
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(ExpertProgressCallback)
        self._set_collators(collator)
        self._check_optimizer()
        if args.negatives == "seen":
            self._all_classes_ids = self.tuner.layer.label_space.own[self.expert]

    @property
    def tuner(self) -> LucaModel:
        """The model's LuCA tuner."""
        return tuner_of(self.model)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains the expert. Takes and returns what [`~transformers.Trainer.train`] does."""
        config = self.tuner.peft_config[self.expert]
        if self.new_expert and (config.reference or self.tuner.backbone.image_size is not None):
            # An expert that does not standardize by it has it as well: it identifies the backbone.
            self.tuner.compute_reference(self.expert)
        if self.new_expert and config.init_rows == "class_means":
            self._set_rows_to_class_means(adapted=False)
        self.new_expert = False
        seed = enable_full_determinism if self.args.full_determinism else set_seed
        seed(self.args.seed)
        self.model.train()
        output: TrainOutput = super().train(*args, **kwargs)
        self.model.eval()
        if self.args.class_mean_rows:
            self._set_rows_to_class_means(adapted=True)
        if self.args.statistics:
            data, rank = self._plain_features(), self.args.statistics_rank
            sizes = (None if rank < 0 else rank, self.args.statistics_random_features)
            self.tuner.collect_statistics(self.expert, data.features, data.labels, *sizes)
        for name, tensor in self.tuner.layer.tensors(self.expert).items():
            if not (tensor.abs() <= MAX_NUMBER).all():  # what is saved can be loaded again
                self._refuse_numbers(f"{name} holds numbers that are not finite, or above {MAX_NUMBER:g}", 0)
        return output

    def _set_rows_to_class_means(self, adapted: bool) -> None:
        data = self._plain_features()
        self.tuner.set_rows_to_class_means(self.expert, data.features, data.labels.to(self.args.device), adapted)

    def _plain_features(self) -> FeatureDataset:
        """[CLS] of the training images without augmentation."""
        if self._features is None:
            data = self.train_dataset
            if not isinstance(data, FeatureDataset):
                extract = make_extractor(self.tuner, self.image_collator(data), self.args)
                data = extract(data, description=f"{self.expert}: [CLS] of the training images")
            self._features = data
        return self._features

    def _set_collators(self, given: Any) -> None:
        """Collators of training and of evaluation, which differ by the augmentation."""
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        images = list(filter(_is_images, (self.train_dataset, *evaluated.values())))
        if given is not None and images and self.args.augmentation:
            raise ValueError(
                "augmentation=True is done by the default data_collator. Set it to False, or do it in yours."
            )
        self.data_collator = self._train_collator = BatchCollator(given)
        if given is not None or not images:
            return
        self.data_collator = BatchCollator(self.image_collator(images[0]))
        self._train_collator = BatchCollator(self.image_collator(images[0], bool(self.args.augmentation)))
        column = self.data_collator.images.image_column
        if _is_images(self.train_dataset):
            self.train_dataset = undecoded(self.train_dataset, column)
        evaluated = {name: undecoded(data, column) if _is_images(data) else data for name, data in evaluated.items()}
        self.eval_dataset = evaluated if isinstance(self.eval_dataset, dict) else evaluated[""]

    def image_collator(self, dataset: Any, augmentation: bool = False) -> ImageCollator:
        """The collator of a dataset's images, unless `data_collator` was given."""
        features = getattr(dataset, "features", None) or {}
        columns = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        if len(columns) != 1 or "labels" not in features or self.processing_class is None:
            raise ValueError(
                f"images need a dataset with one column of images and a column 'labels', and a processing_class; got "
                f"the columns {list(features)} and processing_class={type(self.processing_class).__name__}."
            )
        names, classes = getattr(features["labels"], "names", None), list(self.tuner.experts[self.expert])
        if names is not None and names != classes:
            raise ValueError(
                f"the dataset's labels are {names}, but the classes of expert {self.expert!r} are {classes}. Call "
                "dataset.align_labels_with_mapping({name: i for i, name in enumerate(classes)}, 'labels')."
            )
        channels = channels_of(self.model)
        return ImageCollator(self.processing_class, columns[0], augmentation=augmentation, channels=channels)

    def get_train_dataloader(self) -> DataLoader[Any]:
        args, dataset = self.args, self.train_dataset
        if args.train_sampling_strategy != "random" or dataset is None or not has_length(dataset):
            return super().get_train_dataloader()
        processes = self.accelerator.num_processes
        whole_batch = self._train_batch_size * processes
        if args.dataloader_drop_last and len(dataset) < whole_batch:
            raise ValueError(
                f"expert {self.expert!r} has {len(dataset)} images, fewer than a batch of {whole_batch}, and "
                "dataloader_drop_last leaves none. Set it to False, or take smaller batches."
            )
        seed = args.seed if args.data_seed is None else args.data_seed
        parts = (args.process_index, processes, args.dataloader_drop_last)
        return EpochLoader(
            self.train_dataset,
            batch_sampler=EpochBatches(len(dataset), whole_batch, seed, *parts),
            collate_fn=self._train_collator,
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
            **loader_options(args),
        )

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        if self.args.negatives == "seen" and "labels" in inputs:  # positions among the classes of all experts
            labels = inputs["labels"]
            inputs["labels"] = torch.where(labels < 0, labels, self._all_classes_ids[labels.clamp(min=0)])
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
        l1 = (self.args.l1_weight or 0.0) * self.tuner.l1_penalty(self.expert) / micro_batches
        if model.training:
            name = "cross_entropy" if self.compute_loss_func is None else "custom_loss"
            for part, value in ((name, loss), ("l1_penalty", l1)):
                self._loss_parts[part] = self._loss_parts.get(part, 0.0) + value.detach()
            self._loss_steps += 1 / micro_batches
        # The proximal step takes the place of the penalty's gradient.
        loss = loss + (l1.detach() if self.args.l1_proximal else l1)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        is_finite = loss.isfinite()
        if self.accelerator.num_processes > 1:  # all processes stop, or none
            is_finite = self.accelerator.reduce(is_finite.float(), "mean") == 1
        if not is_finite:
            self._refuse_numbers(f"the loss is {float(loss)}", 1)
        return loss

    def _refuse_numbers(self, found: str, steps: int) -> None:
        raise FloatingPointError(
            f"expert {self.expert!r}, step {self.state.global_step + steps}: {found}. Look at its images, or train in "
            f"another output_dir with a learning_rate below {self.args.learning_rate}."
        )

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        if self.args.l1_proximal and not self._has_proximal_step:
            if not isinstance(optimizer, (torch.optim.SGD, torch.optim.Adam)):  # AdamW is an Adam
                raise ValueError(
                    "l1_proximal needs the step size of the optimizer, which is known for SGD, Adam and AdamW, not "
                    f"for {type(optimizer).__name__}."
                )
            parameters = list(self.tuner.layer.luca_parameters(self.expert).values())
            weight = self.args.l1_weight or 0.0
            optimizer.register_step_post_hook(lambda stepped, *_: soft_threshold(stepped, parameters, weight))
            self._has_proximal_step = True
        return optimizer

    def _check_optimizer(self) -> None:
        """An optimizer of other parameters would train nothing."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        held = {id(parameter) for group in groups for parameter in group["params"]}
        trained = {id(parameter) for parameter in self.model.parameters() if parameter.requires_grad}
        if groups and held.isdisjoint(trained):
            raise ValueError(
                f"optimizers holds no trainable parameter of expert {self.expert!r}. Make the optimizer of "
                "[p for p in model.parameters() if p.requires_grad], or use optimizer_cls_and_kwargs."
            )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if not self.args.schedule_per_epoch or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        batches = len(self.train_dataset) / (self.args.train_batch_size * self.args.world_size)
        batches = math.floor(batches) if self.args.dataloader_drop_last else math.ceil(batches)
        per_epoch = math.ceil(batches / self.args.gradient_accumulation_steps)
        epochs = math.ceil(num_training_steps / per_epoch)

        def factor(step: int) -> float:
            # ½ (1 + cos(π · epoch / epochs)), as the authors' code steps it after each epoch
            return 0.5 * (1.0 + math.cos(math.pi * (step // per_epoch) / epochs))

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._loss_steps:
            parts = {name: self.accelerator.reduce(part, "mean") for name, part in self._loss_parts.items()}
            logs |= {name: float(part) / self._loss_steps for name, part in parts.items()}
            self._loss_parts, self._loss_steps = {}, 0.0
        super().log(logs, start_time)

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
        if not blocking:
            raise ValueError("blocking=False is for collections. An ExpertTrainer pushes one expert, and waits.")
        return push_expert(self.model, self.expert, repo_id, **kwargs)


def _is_images(dataset: Any) -> bool:
    return dataset is not None and not isinstance(dataset, FeatureDataset)


def _activate(model: Any, expert: str | None) -> str:
    """Makes an expert the active one, and returns its name."""
    tuner = tuner_of(model)
    if expert is not None:
        model.set_adapter(expert)
    elif tuner.router is not None or not any(parameter.requires_grad for parameter in tuner.parameters()):
        raise ValueError(f"no expert is active and trainable. Pass expert=, one of {', '.join(tuner.experts)}.")
    return str(tuner.active_adapters[0])
