"""What is known of a backbone: its fingerprint, its [CLS] on the reference pictures, and whether an expert fits it."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..utils import list_names, show
from .config import LucaConfig
from .head import CLS_AND_PATCHES, Head
from .layer import LucaLayer, cls_of
from .reference import OLD_PATCHES, OLD_PICTURES, PICTURES, SIDE, Reference, kept_reference, measure_reference


SAMPLE = 256  # numbers of each tensor that are compared to see whether it was changed
# Entries of a model's config that do not move [CLS]. Its dtype is in the fingerprint.
NOT_OF_THE_TRUNK = "id2label label2id problem_type _name_or_path transformers_version architectures dtype".split()
# Settings that move [CLS], by their names in the configs of the families in docs/backbones.md. What shapes tensors is
# in the fingerprint. Others (attention kernels, dropout, labels, versions) do not count.
SETTINGS = (
    "model_type architecture model_args do_pooling hidden_act num_attention_heads num_heads depths image_size "
    "patch_size strides use_swiglu_ffn use_mean_pooling rope_theta window_size pretrained_window_sizes "
    "linear_attention norm_eps"
).split()
# Steps of an image processor that move pixels, each with its parameters.
STEPS = {
    "do_resize": ("size", "resample", "crop_pct"),
    "do_center_crop": ("crop_size",),
    "do_pad": ("pad_size",),
    "do_rescale": ("rescale_factor", "rescale_offset"),
    "do_normalize": ("image_mean", "image_std"),
    "do_flip_channel_order": (),
    "data_config": (),  # of timm's
}
PROCESSOR_TYPE = "image_processor_type"  # the name of its class, among the facts of an image processor
# Largest distance of [CLS] on the reference pictures, in deviations, at which another backbone still counts as the
# same one. Other weights may be those of another dtype, which is measured as it rounds: of DINOv2-small float16 is
# 0.0001 away, bfloat16 0.016 and int8 0.036. With the same weights nothing is rounded otherwise: other settings have
# less room, enough for an approximated GELU (0.006), and too little for an epsilon of 0.001 (0.5).
BACKBONE_TOLERANCE = 0.05
SETTINGS_TOLERANCE = 0.02


@torch.no_grad()
def pooled_features(
    model: nn.Module, head: Head, pixel_values: Tensor, trunk: nn.Module | None = None, **options: Any
) -> Tensor:
    """
    [CLS] of images, `(batch, channels, height, width)` → `(batch, d)`. `options` are passed to the model, or to its
    [`compiled_trunk`]. The model is not changed: several threads may call this at once.
    """
    output = (_without_head(model, head.name) if trunk is None else trunk)(pixel_values, **options)
    return cls_of(output if isinstance(output, Tensor) else output.logits, head.width, head.input_width)


def compiled_trunk(model: nn.Module, head_name: str, **options: Any) -> nn.Module:
    """The model without its head, compiled by torch with `options`, not anew for each size of a batch."""
    trunk: Any = torch.compile(_without_head(model, head_name), dynamic=True, **options)
    return trunk


def _without_head(model: nn.Module, head_name: str) -> nn.Module:
    """A shallow copy of a model that shares all its modules except the head, in whose place its input is returned."""
    trunk: Any = copy.copy(getattr(model, "_orig_mod", model))
    name, _, rest = head_name.partition(".")
    trunk._modules = {**trunk._modules, name: _without_head(trunk._modules[name], rest) if rest else nn.Identity()}
    # A forward that was replaced or compiled on the instance would run the original module.
    trunk.__dict__.pop("forward", None)
    trunk._compiled_call_impl = None
    return trunk


class BackboneFacts:
    """
    What is known of a backbone, whatever its experts: computed once for the weights that it has.

    `fingerprint` is the SHA-256 over the digests of the trunk's tensors in their order, which stays when transformers
    renames them; `old_fingerprint` is over the sorted digests, as experts of earlier versions have it. Both are `None`
    while the weights are on the meta device. `settings` are those of [`SETTINGS`] that the model has, `architecture`
    its class and its config without the entries that do not move [CLS].
    """

    _known: ClassVar[WeakKeyDictionary[nn.Module, BackboneFacts]] = WeakKeyDictionary()

    def __init__(self, model: nn.Module, tensors: list[Tensor], traits: dict[str, Any], version: Any) -> None:
        self.version = version
        digests = [] if any(t.is_meta for t in tensors) else [digest(tensor) for tensor in tensors]
        self.fingerprint = hashlib.sha256(b"".join(digests)).hexdigest() if digests else None
        self.old_fingerprint = hashlib.sha256(b"".join(sorted(digests))).hexdigest() if digests else None
        config = getattr(model, "config", None)
        values: dict[str, Any] = {**getattr(config, "to_dict", dict)(), **traits}
        self.settings = _plain({**values, **(values.get("vision_config") or {})}, SETTINGS)
        self.architecture = {name: value for name, value in values.items() if name not in NOT_OF_THE_TRUNK}
        self.architecture["class"] = type(model).__qualname__
        self.image_size = _first(getattr(config, "image_size", None))  # side in pixels
        self.patch_size = _first(getattr(config, "patch_size", None))
        self.interpolates = getattr(config, "model_type", None) in CLS_AND_PATCHES
        self.interpolates_if_asked = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        self.channels = getattr(config, "num_channels", 3)
        first = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        self.device, self.dtype = getattr(first, "device", None), getattr(first, "dtype", None)
        self._references: dict[bool, Reference] = {}

    @classmethod
    def of(cls, model: nn.Module, head_name: str) -> BackboneFacts:
        """
        Facts of a model, computed anew only when a tensor of the trunk was changed. torch does not count edits through
        `.data`: a sample of each tensor's numbers notices them, which may miss an edit of a few numbers.
        """
        # Of the trunk alone: to list the tensors of a thousand experts takes longer than to look at it.
        trunk = _without_head(model, head_name)
        tensors = [t for t in trunk.state_dict().values() if isinstance(t, Tensor)]
        # As the modules have it: a config may not name it, or name it otherwise, and knows no adapters in the trunk.
        eps = {e for module in trunk.modules() if isinstance(e := getattr(module, "eps", None), float)}
        inner = [module for module in trunk.modules() if isinstance(module, BaseTunerLayer)]
        adapters = [str((getattr(m, "scaling", None), m.active_adapters, m.disable_adapters)) for m in inner]
        traits = {"norm_eps": sorted(eps), **({"adapters": adapters} if inner else {})}
        version = (tuple((t.data_ptr(), t._version) for t in tensors if not t.is_inference()), sample(tensors), traits)
        facts = cls._known.get(model)
        if facts is None or facts.version != version:
            facts = cls._known[model] = cls(model, tensors, traits, version)
        return facts

    def reference(self, read: Callable[..., Tensor], whitening: bool) -> Reference:
        """
        The reference of experts with or without whitening, measured once. `read` maps pixel values, and options of the
        model, to [CLS] `(batch, d)`.
        """
        if whitening not in self._references:
            if self.fingerprint is None or self.dtype is None or self.image_size is None:
                lacking = "config.image_size" if self.image_size is None else "weights that are not on the meta device"
                raise ValueError(
                    f"the reference needs {lacking}. Load the backbone with from_pretrained. "
                    "Use LucaConfig(reference=False) to train on [CLS] as it is."
                )
            size, options = self.image_size, {}
            if self.patch_size and (self.interpolates or (whitening and self.interpolates_if_asked)):
                side = SIDE // self.patch_size * self.patch_size if whitening else OLD_PATCHES * self.patch_size
                size = min(size, max(side, self.patch_size))
                options = {} if self.interpolates or size == self.image_size else {"interpolate_pos_encoding": True}
            count = PICTURES if whitening else OLD_PICTURES
            about = {"fingerprint": self.fingerprint, "settings": self.architecture, "pictures": [count, size]}
            pictures = (count, size, self.channels, torch.empty(0, dtype=self.dtype, device=self.device))
            self._references[whitening] = kept_reference(about, measure_reference, partial(read, **options), *pictures)
        return self._references[whitening]


def digest(tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's type, shape and bytes."""
    if type(tensor) not in (Tensor, nn.Parameter):  # torchao's quantized tensors have no bytes of their own
        tensor = tensor.dequantize()
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def processor_facts(processing_class: Any) -> dict[str, Any] | None:
    """What an image processor does to pixels, as JSON holds it; `None` if it does not say."""
    processor = getattr(processing_class, "image_processor", processing_class)
    settings = processor.to_dict() if hasattr(processor, "to_dict") else getattr(processor, "__dict__", {})
    names = [name for step, names in STEPS.items() if settings.get(step) for name in (step, *names)]
    facts = _plain(settings, names)
    return {**facts, PROCESSOR_TYPE: settings.get(PROCESSOR_TYPE, type(processor).__name__)} if facts else None


def _plain(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of `values` that have one of the names and are not `None`, as they come back from a JSON file."""
    found = {name: values[name] for name in names if values.get(name) is not None}
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], names: Iterable[str]) -> str:
    """`size 224 there, 384 here`, for each name whose values differ."""
    differing = [name for name in names if there.get(name) != here.get(name)]
    return ", ".join(f"{name} {show(there.get(name))} there, {show(here.get(name))} here" for name in differing)


def warn_of_processor(experts: Mapping[str, LucaConfig], processing_class: Any = None) -> None:
    """Warns of experts trained with another image processor than the one given, or else the first that is known."""
    known = {name: config.processor for name, config in experts.items() if config.processor}
    here, whose = processor_facts(processing_class), "the one that is given"
    if here is None and known:
        here, whose = next(iter(known.values())), f"that of {next(iter(known))!r}"
    # Not by the class alone, which files of earlier versions do not name.
    names = [name for step, settings in STEPS.items() for name in (step, *settings)]
    moved = {name: what for name, there in known.items() if (what := _differences(there, here or {}, names))}
    if moved:
        warnings.warn(
            f"the experts {list_names(moved)} were trained with another image processor than {whose}: "
            f"{next(iter(moved.values()))}. They may be less accurate. Use the image processor of their training.",
            stacklevel=3,
        )


def sample(tensors: list[Tensor]) -> bytes:
    """Some hundred numbers of each tensor, as bytes. Quantized tensors and those on the meta device are left out."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
            step = tensor.numel() // SAMPLE | 1  # odd, so that no power of two keeps it in one column
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach().flatten()[::step])
    return b"".join(torch.cat(parts).cpu().view(torch.uint8).numpy().tobytes() for parts in kinds.values())


def _first(value: Any) -> int | None:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return first if isinstance(first, int) else None


def reference_distance(saved: tuple[Tensor, ...], measured: tuple[Tensor, ...]) -> float:
    """Distance of two references, in deviations: root mean square over the dimensions of [CLS]."""
    (mean, std), (other_mean, other_std) = saved[:2], measured[:2]
    if mean.shape != other_mean.shape:
        return float("inf")
    shift = (other_mean.to(mean.device) - mean) / std
    spread = torch.log(other_std.to(std.device) / std)
    return float(torch.maximum(shift.square().mean(), spread.square().mean()).sqrt())


def is_identity(mean: Tensor, std: Tensor) -> bool:
    """Whether a reference was never computed."""
    return mean.is_meta or bool((mean == 0).all() and (std == 1).all())


def check_backbone(
    model: nn.Module,
    head: Head,
    config: LucaConfig,
    adapter_name: str,
    state_dict: Mapping[str, Tensor],
    facts: Callable[[nn.Module, str], BackboneFacts] = BackboneFacts.of,
) -> None:
    """
    Compare the backbone with the one on which an expert was trained, before anything is changed: by fingerprint and
    settings, and where they differ (another dtype, a quantized trunk) by [CLS] on the reference pictures.
    """
    if config.allow_mismatch or config.fingerprint is None:
        return
    backbone = facts(model, head.name)
    if backbone.fingerprint is None:
        return
    settings, saved = config.backbone_settings, _reference_among(state_dict)
    is_old = settings is None  # its fingerprint knows neither places nor settings
    found = backbone.old_fingerprint if is_old else backbone.fingerprint
    differing = ["other weights"] if found != config.fingerprint else []
    # A setting that only one version of transformers or of this package knows is not compared.
    both = [name for name in backbone.settings if name in (settings or ())]
    if moved := _differences(settings or {}, backbone.settings, both):
        differing.append(f"other settings ({moved})")
    if not differing and (not is_old or saved is None):
        return
    refusal = (
        f"expert {adapter_name!r} was trained on the backbone {config.fingerprint[:12]} "
        f"({config.base_model_name_or_path or 'unnamed'}), but this one is {str(found)[:12]} "
        f"({getattr(model, 'name_or_path', '') or 'unnamed'}) with "
        f"{' and '.join(differing) or 'its tensors in other places, or other settings'}"
    )
    remedy = "Load the backbone on which it was trained, or set allow_mismatch=True to load it all the same."
    if saved is None:
        raise ValueError(f"{refusal}, and it has no reference to compare [CLS] by. {remedy}")
    tolerance = BACKBONE_TOLERANCE if differing == ["other weights"] else SETTINGS_TOLERANCE
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()  # without dropout
        read = partial(pooled_features, model, head)
        distance = reference_distance(saved, backbone.reference(read, bool(config.whitening)))
    finally:
        for module in training:
            module.training = True
    if not distance <= tolerance:
        raise ValueError(
            f"{refusal}: [CLS] on the reference pictures is {distance:.3g} deviations away, more than "
            f"{tolerance}. {remedy}"
        )
    if differing:
        warnings.warn(
            f"{refusal}. [CLS] on the reference pictures is only {distance:.2g} deviations away, as with another "
            "dtype or a quantized trunk, so it was loaded.",
            stacklevel=2,
        )


def _reference_among(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The reference among an expert's tensors; `None` where it was never computed."""
    found = [t for part in ("mean", "std") for key, t in tensors.items() if f"luca_reference_{part}" in key]
    return (found[0], found[1]) if len(found) == 2 and not is_identity(*found) else None


def check_same_reference(layer: LucaLayer, adapter_name: str, state_dict: Mapping[str, Tensor]) -> None:
    """Refuses weights of another backbone for an expert that is there already: PEFT never reads their config then."""
    saved, here = _reference_among(state_dict), _reference_among(layer.tensors(adapter_name))
    if saved and here and not (distance := reference_distance(saved, here)) <= BACKBONE_TOLERANCE:
        raise ValueError(
            f"these weights for expert {adapter_name!r} come from another backbone: their reference is {distance:.3g} "
            f"deviations away from the expert's, more than {BACKBONE_TOLERANCE}. Load them on that backbone."
        )
