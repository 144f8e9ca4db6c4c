"""The parameters of every expert, in the containers that PEFT saves and loads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..routing import Router
from ..routing.statistics import ClassStatistics
from .config import LucaConfig
from .reference import whitened_directions


class NewExpert(NamedTuple):
    """An expert as its files have it, read and checked."""

    config: LucaConfig
    tensors: dict[str, Tensor]
    statistics: ClassStatistics | None


class ExpertStore(nn.Module, BaseTunerLayer):
    """Holds every expert's LuCA module, class rows and reference. [`LucaLayer`] computes with them."""

    module_names = tuple(
        "luca_adapter_down luca_adapter_up luca_adapter_norm luca_calibrator_down luca_calibrator_up".split()
    )  # the LuCA module: neither the rows nor σ
    adapter_layer_names = (*module_names, "luca_class_rows", "luca_scale")
    other_param_names = ("luca_reference_mean", "luca_reference_std", "luca_whitening")
    containers = (*adapter_layer_names, *other_param_names)

    def __init__(self, base_layer: nn.Module, width: int, input_width: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.width = width
        self.input_width = input_width
        # The shape of the base model's head, which other code asks a head for.
        self.in_features, self.out_features = input_width, int(getattr(base_layer, "out_features", input_width))
        self.router: Router | None = None
        self.luca_adapter_down = nn.ModuleDict()
        self.luca_adapter_up = nn.ModuleDict()
        self.luca_adapter_norm = nn.ModuleDict()
        self.luca_calibrator_down = nn.ModuleDict()
        self.luca_calibrator_up = nn.ModuleDict()
        self.luca_class_rows = nn.ParameterDict()
        self.luca_scale = nn.ParameterDict()
        self.luca_reference_mean = BufferDict(persistent=True)
        self.luca_reference_std = BufferDict(persistent=True)
        self.luca_whitening = BufferDict(persistent=True)
        self.configs: dict[str, LucaConfig] = {}
        self.base_labels: Any = None  # labels and loss of the base model, kept by LucaModel
        self.statistics: dict[str, ClassStatistics] = {}  # kept beside the experts, not among their weights
        self._active_adapter = []
        self._experts: Any = None  # what routers see of the experts; made anew when they change

    def update_layer(self, adapter_name: str, config: LucaConfig) -> None:
        """Adds an expert. Its config must be resolved and its classes known."""
        assert config.classes is not None
        self._warn_of_other_images(adapter_name, config)
        d, classes = self.width, len(config.classes)
        adapter_width, calibrator_width = config.widths(d)
        if config.arrangement != "calibrator":
            self.luca_adapter_down[adapter_name] = _xavier(nn.Linear(d, adapter_width))
            self.luca_adapter_up[adapter_name] = _xavier(nn.Linear(adapter_width, d))
            self.luca_adapter_norm[adapter_name] = nn.LayerNorm(d)
        if config.arrangement != "adapter":
            self.luca_calibrator_down[adapter_name] = _xavier(nn.Linear(d, calibrator_width, bias=False))
            self.luca_calibrator_up[adapter_name] = _xavier(nn.Linear(calibrator_width, d, bias=False))
        rows = torch.zeros(classes, d)
        if config.init_rows != "zeros":
            nn.init.normal_(rows, std=d**-0.5)
        self.luca_class_rows[adapter_name] = nn.Parameter(rows)
        self.luca_scale[adapter_name] = nn.Parameter(torch.tensor(float(config.scale or 1.0)))
        self.luca_reference_mean[adapter_name] = torch.zeros(d)
        self.luca_reference_std[adapter_name] = torch.ones(d)
        if config.whitening:
            self.luca_whitening[adapter_name] = torch.zeros(d, whitened_directions(d))
        self.configs[adapter_name] = config
        self._experts = None
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def add_expert(self, adapter_name: str, config: LucaConfig, tensors: Mapping[str, Tensor]) -> None:
        """Adds a trained expert, frozen. `tensors` are named as in its file, without the name of the head."""
        self._warn_of_other_images(adapter_name, config)
        # PEFT's own way goes over all modules of the model for every expert, which takes minutes among a thousand.
        alone = type(self)(self.base_layer, self.width, self.input_width)
        alone.update_layer(adapter_name, config)
        alone.train(self.training)
        alone.load_expert(adapter_name, tensors)
        for container in self.containers:
            getattr(self, container).update(getattr(alone, container))
        self.configs[adapter_name] = config
        self._experts = None

    def _warn_of_other_images(self, adapter_name: str, config: LucaConfig) -> None:
        first = next(iter(self.configs.values()), config).images
        if first != config.images:
            message = f"expert {adapter_name!r} was trained with {config.images}, but images are read for all experts"
            warnings.warn(f"{message} with {first}, as the first one was.", stacklevel=2)

    @torch.no_grad()
    def load_expert(self, adapter_name: str, tensors: Mapping[str, Tensor]) -> None:
        """Takes an expert's tensors, named as in [`~LucaLayer.add_expert`], and freezes it."""
        for key, tensor in tensors.items():
            container, _, inner = key.partition(".")
            entry = getattr(self, container)[adapter_name]
            target = getattr(entry, inner) if inner else entry
            if tensor.shape != target.shape:
                raise ValueError(f"{key} has the shape {tuple(tensor.shape)}, and needs {tuple(target.shape)}.")
            if target.dtype in (torch.float16, torch.bfloat16):
                target.data = target.data.float()  # PEFT keeps adapters of a half-precision model in float32
            # No copy where nothing changes, and the whitening in its float16: ten thousand experts fill the memory.
            dtype = tensor.dtype if container == "luca_whitening" else target.dtype
            target.requires_grad_(False).data = tensor.to(target.device, dtype)

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self.configs.pop(adapter_name, None)
        self.statistics.pop(adapter_name, None)
        self._experts = None

    def enable_adapters(self, enabled: bool) -> None:
        # PEFT's version freezes all experts or makes all trainable, and forgets which one was to be trained.
        self._disable_adapters = not enabled

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)
        for buffers in (self.luca_reference_mean, self.luca_reference_std, self.luca_whitening):
            # Statistics keep their precision in a half-precision model.
            if adapter_name in buffers and buffers[adapter_name].dtype in (torch.float16, torch.bfloat16):
                buffers[adapter_name] = buffers[adapter_name].float()

    def duplicate_of(self, adapter_name: str, tensors: Mapping[str, Tensor]) -> str | None:
        """Another expert that has exactly these weights, which are named as those of `adapter_name`."""
        for other in self.configs:
            pairs = list(zip_longest(self.tensors(other).values(), tensors.values(), fillvalue=torch.empty(0)))
            if other != adapter_name and all(not own.is_meta and torch.equal(own, new.to(own)) for own, new in pairs):
                return other
        return None

    def tensors(self, adapter_name: str) -> dict[str, Tensor]:
        """Every tensor of an expert, by its name within the layer."""
        found: dict[str, Tensor] = {}
        for container in self.containers:
            if adapter_name in getattr(self, container):
                entry, name = getattr(self, container)[adapter_name], f"{container}.{adapter_name}"
                inner = {"": entry} if isinstance(entry, Tensor) else entry.state_dict(prefix=".", keep_vars=True)
                found |= {name + key: tensor for key, tensor in inner.items()}
        return found

    def luca_parameters(self, adapter_name: str) -> dict[str, nn.Parameter]:
        """The parameters of an expert's LuCA module, by their names within the layer."""
        found = {key: t for key, t in self.tensors(adapter_name).items() if isinstance(t, nn.Parameter)}
        return {key: parameter for key, parameter in found.items() if key.split(".")[0] in self.module_names}


def named_modules(model: nn.Module, name: str = "", seen: Any = None) -> Iterator[tuple[str, nn.Module]]:
    """As `model.named_modules()`, without what is in a layer of experts: of those there may be a thousand."""
    seen = set() if seen is None else seen
    if model not in seen:
        seen.add(model)
        yield name, model
        for child_name, child in [] if isinstance(model, ExpertStore) else model.named_children():
            yield from named_modules(child, f"{name}.{child_name}" if name else child_name, seen)


def _xavier(linear: nn.Linear) -> nn.Linear:
    """Initializes a layer as the released code does."""
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear
