"""Arguments of [`ContinualTrainer`] and [`ExpertTrainer`], and the two recipes that fill them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

from ..data.feature_cache import STORAGE
from ..routing import Router, make_router
from ..tuner.config import OWN_RECIPE


# What a recipe gives to the fields that were left unset. Measured by examples/benchmarks/run.py.
_BOTH = {"num_train_epochs": 20, "per_device_train_batch_size": 48, "lr_scheduler_type": "cosine", "l1_weight": 5e-4}
RECIPES: dict[str, dict[str, Any]] = {
    "own": _BOTH
    | {"learning_rate": 1e-3, "optim": "adamw_torch", "optim_args": None}
    | {"negatives": "own", "augmentation": False, "schedule_per_epoch": False, "router": "auto"},
    "paper": _BOTH
    | {"learning_rate": 0.025, "optim": "sgd", "optim_args": "momentum=0.9"}
    | {"negatives": "seen", "augmentation": True, "schedule_per_epoch": True, "router": "entropy"},
}
# The same for [`LucaConfig`].
CONFIG_RECIPES: dict[str, dict[str, Any]] = {
    "own": OWN_RECIPE,
    "paper": {"scale": 1.0, "positive_scale": False, "init_rows": "zeros", "reference": False, "whitening": False},
}

# What a field of each annotation may hold, and in words.
KINDS = {"bool": (bool, "True or False"), "int": (Integral, "a whole number"), "float": (Real, "a number")}
# The least value of a number, once the recipe has filled it.
LEAST = dict.fromkeys("learning_rate num_train_epochs l1_weight augmented_views statistics_random_features".split(), 0)
LEAST |= dict.fromkeys("per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps".split(), 1)
LEAST |= {"statistics_rank": -1}


def _field(default: Any, help: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": help} | ({"choices": choices} if choices else {}))


@dataclass
class ContinualTrainingArguments(TrainingArguments):
    """
    Arguments of [`ContinualTrainer`]: those of [`~transformers.TrainingArguments`], and these.

    A recipe fills only the fields that were left unset, among them `learning_rate`, `num_train_epochs`, `optim` and
    `per_device_train_batch_size`. The gradient is not clipped (`max_grad_norm=0`), and no checkpoints are written
    within a task (`save_strategy="no"`), unless set. With `num_train_epochs=0` an expert is class means alone.

    Args:
        recipe (`str`, *optional*, defaults to `"own"`):
            `"own"`: every expert sees its own classes alone, so that the order of the tasks changes nothing.
            `"paper"`: as in the authors' code, see the paper page of the docs.
        l1_weight (`float`, *optional*): λ of the ℓ1 penalty λ·Σ|θ| over the LuCA module. 5e-4 in both recipes.
        l1_proximal (`bool`, *optional*, defaults to `False`):
            Take the penalty's step by soft-threshold, so that weights become exactly zero. With AdamW and SGD only.
        negatives (`str`, *optional*):
            `"own"`: cross-entropy over the expert's own classes. `"seen"`, in the paper's recipe: over all classes
            seen so far, with the rows of earlier experts frozen.
        augmentation (`bool`, *optional*): Random resized crop (scale 0.05 to 1) and flip. On in the paper's recipe.
        schedule_per_epoch (`bool`, *optional*): Change the learning rate per epoch only. On in the paper's recipe.
        class_mean_rows (`bool`, *optional*, defaults to `True`): Make rows class means of adapted features at the end.
        cache_features (`bool`, *optional*, defaults to `True`):
            Train on [CLS] from the cache, unless each epoch draws its own augmentation. Otherwise the backbone runs in
            every epoch. Test images always come from the cache.
        augmented_views (`int`, *optional*, defaults to `0`):
            Compute [CLS] of this number of augmented views of each image, and train on one view per epoch, in turns;
            switches `augmentation` on. With `0` every epoch draws its own augmentation, and the backbone runs.
        features_cache_dir (`str`, *optional*): Of all runs; by default `peft_luca` in the cache of `datasets`.
        features_dtype (`str`, *optional*, defaults to `"float32"`): Stores [CLS]. Or `"float16"` or `"bfloat16"`.
        on_bad_image (`str`, *optional*, defaults to `"raise"`):
            An image that cannot be read stops the run (`"raise"`), or is left out and counted (`"skip"`).
        push_to_hub (`bool`, *optional*, defaults to `False`):
            Push the experts to the Hub as a collection: with `hub_strategy="every_save"`, the default, in the
            background when a task is learned, and at the end of `train`; with `"end"` only there.
        router (`str`, *optional*): See [`LucaModel.set_router`]. `"auto"`, or `"entropy"` in the paper's recipe.
        routing_scope (`str`, *optional*, defaults to `"sample"`):
            `"batch"` chooses one expert for all test images of a task, for comparison with published figures only.
        statistics (`bool`, *optional*, defaults to `True`): Save statistics of its training features with each expert.
        statistics_rank (`int`, *optional*, defaults to `64`): Rows (of d) kept of each class's scatter; -1 for all.
        statistics_random_features (`int`, *optional*, defaults to `0`): M of the `ridge` router, 4·M² bytes an expert.
        plots (`bool`, *optional*, defaults to `False`): Call [`~ContinualTrainer.save_plots`] when `train` ends.
    """

    # TrainingArguments has other defaults for these; None means that the recipe sets them.
    learning_rate: float | None = _field(None, "Set by the recipe.")  # type: ignore[assignment]
    num_train_epochs: float | None = _field(None, "Set by the recipe.")  # type: ignore[assignment]
    per_device_train_batch_size: int | None = _field(None, "Set by the recipe.")  # type: ignore[assignment]
    optim: str | None = _field(None, "Set by the recipe.")  # type: ignore[assignment]
    lr_scheduler_type: str | None = _field(None, "Set by the recipe.")  # type: ignore[assignment]
    max_grad_norm: float | None = _field(0.0, "Gradients are not clipped unless asked.")  # type: ignore[assignment]
    per_device_eval_batch_size: int = _field(32, "Images in a pass of the backbone.")
    logging_strategy: str = _field("epoch", "When to log within a task.")
    dataloader_pin_memory: bool = field(
        default_factory=torch.accelerator.is_available, metadata={"help": "Pin memory, where there is an accelerator."}
    )
    dataloader_num_workers: int = field(
        default_factory=lambda: _workers(),
        metadata={"help": "Processes that read images: 0 without an accelerator, else one less than cores, up to 8."},
    )
    ddp_find_unused_parameters: bool | None = _field(False, "Every parameter of an expert is used.")
    save_strategy: str = _field("no", "Checkpoints within a task.")
    remove_unused_columns: bool = _field(False, "The collator takes what it needs.")

    recipe: str = _field("own", "Defaults to train by.", *RECIPES)
    l1_weight: float | None = _field(None, "Weight of the l1 penalty on the LuCA module.")
    l1_proximal: bool = _field(False, "Take the penalty's step by soft-threshold.")
    negatives: str | None = _field(None, "Classes in the loss.", "own", "seen")
    augmentation: bool | None = _field(None, "Random resized crop and horizontal flip.")
    schedule_per_epoch: bool | None = _field(None, "Change the learning rate per epoch.")
    class_mean_rows: bool = _field(True, "Replace rows by class means after a task.")
    cache_features: bool = _field(True, "Compute [CLS] once per image and task.")
    augmented_views: int = _field(0, "Augmented views of each image to compute [CLS] of.")
    features_cache_dir: str | None = _field(None, "Where [CLS] is kept.")
    features_dtype: str = _field("float32", "How [CLS] is stored.", *STORAGE)
    on_bad_image: str = _field("raise", "What an image does that cannot be read.", "raise", "skip")
    router: str | None = _field(None, "Chooses the expert of each image.")
    routing_scope: str = _field("sample", "Choose per image.", "sample", "batch")
    statistics: bool = _field(True, "Collect statistics of the training features.")
    statistics_rank: int = _field(64, "Rows kept of each class's scatter; -1 for all.")
    statistics_random_features: int = _field(0, "Random features for the ridge router.")
    plots: bool = _field(False, "Draw pictures of the run when it ends.")

    def __post_init__(self) -> None:
        self._check_types()
        self._check_choice("recipe", list(RECIPES))
        if self.augmented_views:
            self._check_choice("augmentation", [None, True], " with augmented_views")
            self._check_choice("cache_features", [True], " with augmented_views, whose [CLS] are cached")
            self.augmentation = True
        recipe = dict(RECIPES[self.recipe])
        if self.optim is not None:
            del recipe["optim_args"]  # they belong to the recipe's optimizer
        for name, value in recipe.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        # Another working folder, later on, changes neither.
        self.output_dir = os.path.abspath(os.path.expanduser(self.output_dir or "trainer_output"))
        if self.features_cache_dir is not None:
            self.features_cache_dir = os.path.abspath(os.path.expanduser(self.features_cache_dir))
        for kind in ("deepspeed", "fsdp"):
            asked = getattr(self, kind) or parse_flag_from_env(f"ACCELERATE_USE_{kind.upper()}")
            _check(self, kind, not asked, "left out: the backbone is frozen, and an expert is small. Use --multi_gpu")
        super().__post_init__()
        for name in ContinualTrainingArguments.__annotations__:
            if choices := self.__dataclass_fields__[name].metadata.get("choices"):
                self._check_choice(name, choices)
        for name, least in LEAST.items():
            _check(self, name, least <= getattr(self, name) < float("inf"), f"a finite number of at least {least}")
        _check(self, "max_steps", self.max_steps > 0 or self.max_steps == -1, "above 0, or -1 for num_train_epochs")
        self._check_combinations()

    def _check_types(self) -> None:
        """Refuse "False" where True or False is needed, and make numpy's numbers Python's, which JSON can hold."""
        inherited = {"gradient_accumulation_steps": "int", "max_steps": "int"}
        for name, annotation in {**ContinualTrainingArguments.__annotations__, **inherited}.items():
            kind, *or_none = annotation.split(" | ")
            value, (wanted, needed) = getattr(self, name), KINDS.get(kind, (object, ""))
            if kind in KINDS and not (value is None and or_none):
                _check(self, name, isinstance(value, wanted) and isinstance(value, bool) == (kind == "bool"), needed)
                setattr(
                    self,
                    name,
                    value if kind == "bool" else int(value) if isinstance(value, Integral) else float(value),
                )

    def _check_choice(self, name: str, choices: Sequence[Any], condition: str = "") -> None:
        needed = ("one of " if len(choices) > 1 else "") + ", ".join(map(repr, choices))
        _check(self, name, getattr(self, name) in choices, needed + condition)

    def _check_combinations(self) -> None:
        if self.use_cpu or not torch.accelerator.is_available():
            self._check_choice("fp16", [False], " on the CPU, which would ignore it. Use bf16=True")
        if self.schedule_per_epoch:
            self._check_choice("lr_scheduler_type", ["cosine"], " with schedule_per_epoch: others change at each step")
        if self.augmentation:
            self._check_choice("train_sampling_strategy", ["random"], " with augmentation")
        # It would load the weights of PEFT's 'default' adapter into a task's expert.
        self._check_choice("load_best_model_at_end", [False], ": every expert is saved when its task ends")
        if self.push_to_hub:
            pushed = [HubStrategy.EVERY_SAVE.value, HubStrategy.END.value]
            self._check_choice("hub_strategy", pushed, ": checkpoints hold pickled state and are not pushed")
        router = self.make_router()
        _check(self, "router", router.name != "oracle", "another: a stream does not tell the expert of each image")
        if router.needs_statistics:
            self._check_choice("statistics", [True], f" with router={self.router!r}, which needs them")
        if router.name == "ridge":
            features = self.statistics_random_features
            _check(self, "statistics_random_features", features > 0, "above 0 with router='ridge', such as 2000")

    def make_router(self) -> Router:
        """The router of the run."""
        options = {} if self.routing_scope == "sample" else {"routing_scope": self.routing_scope}
        return make_router(self.router or "auto", **options)


def _workers() -> int:
    """Processes that read images. Where they are not forked, a script without a main guard could not start them."""
    start = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if not torch.accelerator.is_available() or start != "fork":
        return 0
    return max(0, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1))  # of each process


def _check(args: Any, name: str, is_valid: bool, needed: str) -> None:
    if not is_valid:
        value = getattr(args, name)
        raise ValueError(f"{name} must be {needed}, got {getattr(value, 'value', value)!r}.")
