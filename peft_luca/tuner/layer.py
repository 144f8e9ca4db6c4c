"""The layer in the place of the model's head: [CLS] → adapter → calibrator → class scores, for every expert."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..preprocessing import channels_of
from ..routing import LabelSpace, Router, RoutingOutput, make_router
from ..routing.score_routers import OracleRouter
from ..routing.statistics import ClassStatistics, unit_features
from ..utils import pluralize
from .experts import ExpertStore, NewExpert, named_modules


_PREPARING = threading.RLock()
_DEFAULT_ROUTER = make_router("auto")


def preparing() -> Any:
    """The lock of all layers: one that held its own could not be copied or pickled. A compiled graph takes none."""
    return nullcontext() if torch.compiler.is_compiling() else _PREPARING


class LucaExperts:
    """
    A layer's experts as routers see them, made anew when they change; see [`~peft_luca.routing.Experts`]. With `new`
    experts, a router can be prepared before they are added.
    """

    def __init__(self, layer: LucaLayer, device: torch.device, new: Mapping[str, NewExpert] | None = None) -> None:
        self.layer = layer
        self.device = device
        self.new = dict(new or {})
        configs = layer.configs | {name: expert.config for name, expert in self.new.items()}
        self.names = list(configs)
        self.label_space = LabelSpace({name: config.classes or () for name, config in configs.items()}, device)
        self.by_name = torch.tensor(sorted(range(len(self.names)), key=self.names.__getitem__), device=device)
        self.statistics: Mapping[str, ClassStatistics] = layer.statistics | {
            name: expert.statistics for name, expert in self.new.items() if expert.statistics is not None
        }
        self._prepared: list[tuple[Router, Any]] = []  # no dict: torch.compile cannot hash a router

    def new_are_added(self, layer: LucaLayer) -> None:
        """The new experts are in the layer now. What was prepared for routers is kept."""
        self.layer, self.new, layer._experts = layer, {}, self

    def scores(self, features: Tensor) -> Tensor:
        return self.layer.scores(features)

    def score_parts(self, features: Tensor, size: int) -> Iterator[Tensor]:
        return self.layer.score_parts(features, self.names, size)

    def mixed_logits(self, features: Tensor, names: list[str]) -> Tensor:
        return self.layer.mixed_logits(features, names)

    def expert_logits(self, features: Tensor, name: str) -> Tensor:
        return self.layer.expert_logits(features, name)

    def scale(self, name: str) -> Tensor:
        return self.layer.scale(name)

    def unit_features(self, features: Tensor) -> Tensor:
        return self.layer.unit_features(features, min(self.names))

    def reference(self, name: str) -> tuple[Tensor, Tensor] | None:
        if name in self.new:
            config, tensors, _ = self.new[name]
            mean, std = (tensors[f"luca_reference_{part}"].to(self.device).float() for part in ("mean", "std"))
            return (mean, std) if config.reference else None
        if not self.layer.configs[name].reference:
            return None
        return self.layer.luca_reference_mean[name], self.layer.luca_reference_std[name]

    def prepared(self, router: Router) -> Any:
        with preparing():
            found = [prepared for known, prepared in self._prepared if known == router]
            if not found:
                found = [router.prepare(self)]
                self._prepared.append((router, found[0]))
        return found[0]


class LucaLayer(ExpertStore):
    """
    Wraps the head of an image classifier. With one expert active it returns the expert's K logits; with a router,
    logits over all C classes of all experts. Of the input, `input_width` wide, [CLS] is the first d = `width` numbers.
    """

    def __repr__(self) -> str:
        # Without the modules of every expert, of which there may be a thousand.
        parts = [f"LucaLayer(width={self.width}", f"(base_layer): {self.base_layer!r}", *self.summary()]
        return "\n  ".join(parts) + "\n)"

    def summary(self, limit: int = 10) -> list[str]:
        """Lines for `repr`: what is active, and the experts with their classes."""
        if self.disable_adapters or not self.active_adapters:
            active = "none (the base model's own head)"
        else:
            router = self.router.describe(self.experts) if self.router else None
            active = f"router {router}" if router else f"expert {self.active_adapters[0]!r}"
        classes_known = pluralize(len(self.label_space.classes), "class")
        lines = [f"{pluralize(len(self.configs), 'expert')}, {classes_known}; active: {active}"]
        for name, config in list(self.configs.items())[:limit]:
            classes = config.classes or []
            names = ", ".join(classes[:5]) + (", …" if len(classes) > 5 else "")
            numbers = sum(parameter.numel() for parameter in self.luca_parameters(name).values())
            lines.append(f"{name}: {pluralize(len(classes), 'class')} ({names}), LuCA of {numbers:,} parameters")
        if len(self.configs) > limit:
            lines.append(f"… and {pluralize(len(self.configs) - limit, 'more expert')}")
        return lines

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        """
        The input of the head, `(batch, input width)` → logits: `(batch, K)` of the active expert; `(batch, C)` with a
        router or with an expert named for each image; those of the base model's head if adapters are disabled.
        """
        if self.disable_adapters or not self.active_adapters:
            output: Tensor = self.base_layer(x, *args, **kwargs)
            return output
        z = cls_of(x, self.width, self.input_width).detach()  # the trunk is frozen
        if adapter_names is not None:
            return self.mixed_logits(z, adapter_names)
        if self.router is not None:
            return self.route_features(z).logits
        return self.expert_logits(z, self.active_adapters[0])

    def mixed_logits(self, z: Tensor, adapter_names: list[str]) -> Tensor:
        """[CLS] `(batch, d)` and an expert for each image → its scores of all classes, `(batch, C)`."""
        if len(adapter_names) != len(z):
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(adapter_names)} and {len(z)} respectively."
            )
        rows, places = self._unit_rows(), dict[str, list[int]]()
        for i, name in enumerate(adapter_names):
            places.setdefault(name, []).append(i)
        parts = [self._scores_of(z[images], name, rows) for name, images in places.items()]
        order = torch.tensor([i for images in places.values() for i in images], device=z.device)
        return torch.cat(parts)[order.argsort()]

    def standardize(self, z: Tensor, adapter_name: str) -> Tensor:
        """Standardizes and whitens [CLS] by the expert's reference, `(batch, d)` → `(batch, d)`."""
        if self.configs[adapter_name].reference:
            z = (z - self.luca_reference_mean[adapter_name]) / self.luca_reference_std[adapter_name]
        if self.configs[adapter_name].whitening:
            directions = self.luca_whitening[adapter_name].to(z.dtype)  # (d, r)
            z = z - (z @ directions) @ directions.T
        return self._cast_input_dtype(z, self.luca_class_rows[adapter_name].dtype)

    def luca(self, z: Tensor, adapter_name: str) -> Tensor:
        """LuCA(z), `(batch, d)` → `(batch, d)`: standardize and whiten, then adapt and calibrate (paper, §3)."""
        config, z = self.configs[adapter_name], self.standardize(z, adapter_name)
        if config.arrangement == "parallel":
            return self._adapt(z, adapter_name, z * self._gate(z, adapter_name), "before_residual")
        for branch in config.arrangement.split("_"):
            if branch == "adapter":
                z = self._adapt(z, adapter_name, z, config.norm_position)
            else:
                z = z * self._gate(z, adapter_name)
        return z

    def _adapt(self, z: Tensor, adapter_name: str, residual: Tensor, norm_position: str) -> Tensor:
        """LN(residual + mlp(z)), or residual + LN(mlp(z)); all are `(batch, d)`."""
        mlp = self.luca_adapter_up[adapter_name](F.gelu(self.luca_adapter_down[adapter_name](z)))
        norm = self.luca_adapter_norm[adapter_name]
        adapted: Tensor = norm(residual + mlp) if norm_position == "after_residual" else residual + norm(mlp)
        return adapted

    def _gate(self, z: Tensor, adapter_name: str) -> Tensor:
        """The factors of the calibrator, between 0 and 1, `(batch, d)` → `(batch, d)`."""
        hidden = F.relu(self.luca_calibrator_down[adapter_name](z))
        return torch.sigmoid(self.luca_calibrator_up[adapter_name](hidden))

    def scale(self, adapter_name: str) -> Tensor:
        """σ as it is used, a scalar."""
        scale: Tensor = self.luca_scale[adapter_name]
        return scale.abs() if self.configs[adapter_name].positive_scale else scale

    def expert_logits(self, z: Tensor, adapter_name: str) -> Tensor:
        """One expert's logits of its own classes, `(batch, d)` → `(batch, K)`."""
        features, rows = self.luca(z, adapter_name), self.luca_class_rows[adapter_name]
        return self.scale(adapter_name) * F.linear(F.normalize(features, dim=-1), F.normalize(rows, dim=-1))

    def scores(self, z: Tensor, adapter_names: list[str] | None = None) -> Tensor:
        """
        Scores of all C classes under each expert, or each of `adapter_names`, `(batch, d)` → `(batch, experts, C)`:
        σ_t · cos(LuCA_t(z), row of c). If the expert lacks the class, the best row of the experts that have it counts.
        """
        names = adapter_names or list(self.configs)
        return next(self.score_parts(z, names, len(names)))

    def score_parts(self, z: Tensor, adapter_names: list[str], size: int) -> Iterator[Tensor]:
        """The scores of `size` experts at a time, `(batch, size, C)`."""
        rows = self._unit_rows()
        for i in range(0, len(adapter_names), size):
            # All parts are of one size, since sums over classes are rounded otherwise in another: equal experts tie.
            start = max(0, min(i, len(adapter_names) - size))
            scores = [self._scores_of(z, name, rows) for name in adapter_names[start : start + size]]
            yield torch.stack(scores, dim=1)[:, i - start :]

    def _unit_rows(self) -> Tensor:
        """The rows of all experts, each of length 1, `(rows, d)`."""
        return torch.cat([F.normalize(self.luca_class_rows[name], dim=-1) for name in self.configs])

    def _scores_of(self, z: Tensor, adapter_name: str, rows: Tensor) -> Tensor:
        """Scores of all classes under one expert, `(batch, C)`."""
        features = F.normalize(self.luca(z, adapter_name), dim=-1)
        cosines = F.linear(features, rows.to(features.dtype))
        return self.scale(adapter_name) * self.label_space.combine_rows(cosines, adapter_name)

    def route_features(self, z: Tensor, expert: Tensor | None = None, router: Router | None = None) -> RoutingOutput:
        """See [`LucaModel.route_features`]. `router` is used in place of the one that is set."""
        router = OracleRouter(expert) if expert is not None else router or self.router or _DEFAULT_ROUTER
        # A graph that is compiled or exported holds for every batch size, and splitting would fix it.
        experts = self.experts
        limit = None if torch.compiler.is_compiling() else router.batch_limit(experts)
        if limit is None or len(z) <= limit:
            return router.route(z, experts)
        return RoutingOutput.concatenate([router.route(part, experts) for part in z.split(limit)])

    def unit_features(self, z: Tensor, adapter_name: str) -> Tensor:
        """[CLS] standardized by an expert's reference and scaled to length 1, in at least float32."""
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if not self.configs[adapter_name].reference:
            return unit_features(z)
        return unit_features(z, self.luca_reference_mean[adapter_name], self.luca_reference_std[adapter_name])

    @property
    def experts(self) -> LucaExperts:
        """The layer's experts as routers see them."""
        device = next(iter(self.luca_class_rows.values())).device
        with preparing():
            if self._experts is None or self._experts.device != device:
                self._experts = LucaExperts(self, device)
            return self._experts

    @property
    def label_space(self) -> LabelSpace:
        """The global label space of the layer's experts."""
        return self.experts.label_space

    def set_statistics(self, adapter_name: str, statistics: ClassStatistics) -> None:
        """Gives an expert the statistics of its training features."""
        self.statistics[adapter_name] = statistics
        self._experts = None

    @torch.no_grad()
    def set_rows_to_class_means(
        self, adapter_name: str, features: Tensor, labels: Tensor, adapted: bool = True
    ) -> None:
        """
        Replaces an expert's rows by class means.

        Args:
            adapter_name (`str`): The expert.
            features (`torch.Tensor` of shape `(images, d)`): [CLS] vectors.
            labels (`torch.Tensor` of shape `(images,)`): The expert's own ids, 0 … K-1.
            adapted (`bool`, *optional*, defaults to `True`): Of the adapted features, or of the standardized [CLS].
        """
        rows = self.luca_class_rows[adapter_name]
        counts = torch.bincount(labels, minlength=len(rows))
        if len(counts) != len(rows) or not counts.all():
            raise ValueError(
                f"expert {adapter_name!r} has {pluralize(len(rows), 'class')}, but the images per label are "
                f"{counts.tolist()}: every class needs at least one image."
            )
        sums = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
        for z, label in zip(features.split(4096), labels.split(4096), strict=True):
            z = z.to(rows.device)
            vectors = self.luca(z, adapter_name) if adapted else self.standardize(z, adapter_name)
            # Not index_add_, whose sums on an accelerator run in another order each time.
            sums += F.one_hot(label, len(rows)).to(vectors.device, torch.float64).T @ vectors.double()
        rows.copy_(sums / counts[:, None])


def cls_of(x: Tensor, width: int, input_width: int) -> Tensor:
    """The input of the head, `(batch, input width)` → [CLS] `(batch, d)`."""
    if x.ndim != 2 or x.shape[1] != input_width:
        raise ValueError(
            f"the head reads a tensor of shape (batch, {input_width}), got {tuple(x.shape)}. LuCA reads one pooled "
            "vector per image."
        )
    return x[:, :width]


def luca_layers(model: nn.Module) -> list[LucaLayer]:
    return [module for _, module in named_modules(model) if isinstance(module, LucaLayer)]


def image_options(model: nn.Module) -> dict[str, Any]:
    """How the experts of a model see images: arguments of [`~peft_luca.preprocessing.read_image`]."""
    config = next(iter(find_layer(model)[1].configs.values()))  # all experts have the same
    return {"channels": channels_of(model), **config.images}


def find_layer(model: nn.Module) -> tuple[str, LucaLayer]:
    """Name and module of the LuCA layer within a model, wrapped in a PeftModel or not."""
    for name, module in named_modules(model):
        if isinstance(module, LucaLayer):
            return name, module
    raise ValueError(f"this {type(model).__name__} has no LuCA experts: add them with get_peft_model or load_experts.")
