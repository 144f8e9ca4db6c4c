"""The configuration of one LuCA expert."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any

from peft import PeftConfig, load_peft_weights
from peft.utils import PeftType
from PIL import ImageColor

from ..utils import InvalidExpertError, check_classes, show


ARRANGEMENTS = ("adapter_calibrator", "calibrator_adapter", "parallel", "adapter", "calibrator")
NORM_POSITIONS = ("after_residual", "before_residual")
ROW_INITS = ("class_means", "random", "zeros")
POOLED = ("cls", "any")

# Written into every adapter_config.json: all that PEFT says without this package is KeyError: 'LUCA'.
READ_WITH = "peft_luca: pip install peft-luca, then `import peft_luca` before loading this with PEFT"

# Values of the fields that are left at None, unless a recipe of the trainer fills them first.
OWN_RECIPE: dict[str, Any] = {"scale": 20.0, "positive_scale": True, "init_rows": "class_means"}
OWN_RECIPE |= {"reference": True, "whitening": True}


def _field(default: Any, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class LucaConfig(PeftConfig):
    """
    Configuration of a [`LucaModel`]: one LuCA (Learn and Calibrate) expert on the pooled [CLS] vector of a frozen
    vision transformer. From "Unlocking [CLS] Features for Continual Post-Training" (https://arxiv.org/abs/2502.14762).

    Args:
        classes (`list[str]`, *optional*):
            Names of the expert's classes, in the order of its rows. The same name in two experts is the same class.
            Defaults to the names in the base model's `config.id2label`.
        reduction (`int`, *optional*, defaults to `16`):
            Both branches are `d // reduction` wide, where d is the width of [CLS] (768 → 48).
        adapter_width, calibrator_width (`int`, *optional*): Widths of the branches, in place of `d // reduction`.
        arrangement (`str`, *optional*, defaults to `"adapter_calibrator"`):
            `"adapter_calibrator"` is the method: learn, then calibrate. `"calibrator_adapter"`, `"parallel"`
            (z ⊙ gate(z) + LN(mlp(z))), `"adapter"` and `"calibrator"` are the paper's ablations.
        norm_position (`str`, *optional*, defaults to `"after_residual"`):
            Position of the adapter's LayerNorm: after the residual sum, as in the authors' code, or
            `"before_residual"`, on the MLP branch alone, as in their README. The parallel arrangement has no residual.
        scale (`float`, *optional*, defaults to `20.0`): Initial σ, the learned scale of logits σ · cos(LuCA(z), row).
        positive_scale (`bool`, *optional*, defaults to `True`):
            Use |σ|, which cannot turn negative. `False` is the authors' free σ.
        init_rows (`str`, *optional*, defaults to `"class_means"`):
            Initial class rows: `"random"`, `"zeros"`, or `"class_means"` of the standardized [CLS], which
            [`ContinualTrainer`] computes before it trains. Without it, they start at random.
        reference (`bool`, *optional*, defaults to `True`):
            Standardize [CLS] before LuCA by the backbone's mean and deviation over a fixed set of drawn pictures (see
            [`LucaModel.compute_reference`]). Until that has been computed it is the identity.
        whitening (`bool`, *optional*, defaults to the value of `reference`):
            Whiten the standardized [CLS] by the covariance of the drawn pictures and of the expert's own training
            images within their classes, as z - W·Wᵀ·z. An expert that was trained before there was whitening has none.
        pooled (`str`, *optional*, defaults to `"cls"`):
            `"cls"` accepts only models whose head reads [CLS]. `"any"` accepts any pooled vector, which is outside
            the method.
        background (`str`, *optional*, defaults to `"white"`):
            Colour behind the transparent pixels of images, as Pillow names it. All experts of a model need the same.
        white_level (`float`, *optional*):
            Value of white in images of more than 8 bits, such as 4095 for 12 bits; the same for all experts. By
            default 65535 for integers and 1 for floats.
        target_modules (`str` or `list[str]`, *optional*): Name of the model's head, if it is no `classifier`.
        fingerprint (`str`, *optional*): Digest of the tensors of its backbone, in their places. Filled in.
        backbone_settings (`dict`, *optional*): The backbone's settings that move [CLS]. Filled in.
        processor (`dict`, *optional*): What the image processor of its training images does. Filled in.
        allow_mismatch (`bool`, *optional*, defaults to `False`): Load on any backbone. Not saved.
        read_with (`str`, *optional*): What is needed to load the file. Filled in.

    Raises:
        ValueError: a field has a value that is not among those above, or `task_type` is set.
    """

    classes: list[str] | None = _field(None, "Names of the expert's classes.")  # noqa: RUF009
    reduction: int = _field(16, "Both branches are d // reduction wide.")
    adapter_width: int | None = _field(None, "Width of the adapter's bottleneck.")
    calibrator_width: int | None = _field(None, "Width of the calibrator's bottleneck.")
    arrangement: str = _field("adapter_calibrator", "Order of the two branches.", ARRANGEMENTS)
    norm_position: str = _field("after_residual", "Position of the adapter's LayerNorm.", NORM_POSITIONS)
    scale: float | None = _field(None, "Initial value of the learned scale.")
    positive_scale: bool | None = _field(None, "Keep the scale positive.", (True, False))
    init_rows: str | None = _field(None, "Initial class rows.", ROW_INITS)
    reference: bool | None = _field(None, "Standardize [CLS] by the reference pictures.", (True, False))
    whitening: bool | None = _field(None, "Whiten the standardized [CLS].", (True, False))
    pooled: str = _field("cls", "Accepted input of the head.", POOLED)
    background: str = _field("white", "Colour behind transparent pixels.")
    white_level: float | None = _field(None, "Value of white in images of more than 8 bits.")
    target_modules: list[str] | str | None = _field(None, "Name of the model's head.")  # noqa: RUF009
    fingerprint: str | None = _field(None, "Digest of the backbone. Filled in.")
    backbone_settings: dict[str, Any] | None = _field(None, "The backbone's settings. Filled in.")  # noqa: RUF009
    processor: dict[str, Any] | None = _field(None, "The image processor's settings. Filled in.")  # noqa: RUF009
    allow_mismatch: bool = _field(False, "Load on another backbone too. Not saved.")
    read_with: str = _field(READ_WITH, "What loads this file. Filled in.")
    # Not a field: files of peft_luca 0.1 have the key, and PEFT passes each key of a file to the constructor.
    head: InitVar[str | None] = None

    def __post_init__(self, head: str | None) -> None:
        super().__post_init__()
        if head not in (None, "cosine"):
            raise InvalidExpertError(
                f"the expert has head={head!r}, but every expert has cosine rows since linear heads were removed. "
                "Train it again with this version, or use it with peft-luca 0.1."
            )
        self.peft_type = PeftType["LUCA"]
        self.read_with = READ_WITH
        self.filled: set[str] = set()  # fields that were left at None and have been filled
        self.weights_follow = False  # PEFT's load_adapter adds the expert, then its weights
        if self.task_type is not None:
            raise ValueError(
                f"task_type is {self.task_type!r}, but LucaConfig needs task_type=None: PEFT's types would move the "
                "head away from the expert, which owns its class rows."
            )
        for entry in fields(self):
            choices, value = entry.metadata.get("choices"), getattr(self, entry.name)
            if choices is None or (value is None and entry.default is None):
                continue
            if not isinstance(value, type(choices[0])) or value not in choices:
                raise ValueError(f"{entry.name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        for name in ("reduction", "adapter_width", "calibrator_width"):
            value = getattr(self, name)
            if not (type(value) is int and value >= 1) and (value is not None or name == "reduction"):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        for name in ("backbone_settings", "processor"):
            if not isinstance(getattr(self, name), (dict, type(None))):
                raise ValueError(f"{name} must be a dict, got {show(getattr(self, name))}.")
        for name in ("scale", "white_level"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0.0 < value < 3.4e38):  # σ is a float32
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")
        if not isinstance(self.background, str) or len(ImageColor.getrgb(self.background)) != 3:
            raise ValueError(f"background must be the name of a colour, such as 'white', got {self.background!r}.")
        if self.whitening and self.reference is False:
            raise ValueError("whitening=True needs reference=True: the standardized [CLS] is what is whitened.")
        if self.whitening and self.reference is None:
            self.reference = True
        if self.whitening is None and (self.fingerprint is not None or self.reference is False):
            self.whitening = False  # a file of a trained expert that does not name it is older than whitening
        if self.classes is not None:
            self.classes = check_classes(self.classes)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> LucaConfig:
        """As [`~peft.PeftConfig.from_pretrained`]. For PEFT's `load_adapter` the weights must be readable as well."""
        config: LucaConfig = super().from_pretrained(*args, **kwargs)
        if "ephemeral_gpu_offload" in kwargs:  # of load_adapter, which would read the weights too late
            load_peft_weights(
                args[0] if args else kwargs["pretrained_model_name_or_path"], "cpu", **cls._split_kwargs(kwargs)[0]
            )
            config.weights_follow = True
        return config

    def resolve(self, defaults: dict[str, Any] | None = None) -> LucaConfig:
        """Fill the fields left at None from `defaults` ([`OWN_RECIPE`] when not given), in place."""
        for name, value in (OWN_RECIPE if defaults is None else defaults).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
                self.filled.add(name)
        return self

    @property
    def images(self) -> dict[str, Any]:
        """How images are read: arguments of [`~peft_luca.preprocessing.read_image`]."""
        return {"background": self.background, "white_level": self.white_level}

    def template(self) -> LucaConfig:
        """Returns a copy for other experts: what was filled in is None again, and no backbone is named."""
        blank: dict[str, Any] = dict.fromkeys({*self.filled, "fingerprint", "backbone_settings", "processor"})
        return replace(self, inference_mode=False, **blank)

    def widths(self, width: int) -> tuple[int, int]:
        """Widths of the adapter's and of the calibrator's bottleneck, for [CLS] of width d."""
        reduced = width // self.reduction
        widths = (self.adapter_width or reduced, self.calibrator_width or reduced)
        if min(widths) < 1:
            raise ValueError(
                f"reduction is {self.reduction}, but [CLS] is only {width} wide: take a reduction of at most {width}, "
                "or set adapter_width and calibrator_width."
            )
        return widths

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = super().to_dict()
        del values["allow_mismatch"]  # a decision about one loading, not a property of the expert
        return values
