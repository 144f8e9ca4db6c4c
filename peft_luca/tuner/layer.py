"""The layer in place of the model's head: [CLS] → adapter → calibrator → class scores, for every expert."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..routing.discriminants import Prototype, StatisticsRouter, StatisticsRouting, gather_statistics
from ..routing.router import (
    LabelSpace,
    Oracle,
    Router,
    RouterOptions,
    RoutingOutput,
    combine_rows,
    entropy,
    fill_unknown,
    router_name,
)
from ..routing.statistics import ClassStatistics, unit_features
from ..utils import pluralize
from .config import LucaConfig


# Rows are multiplied with at most this many numbers of (batch, experts, rows) in memory at a time.
SCORES_BUDGET = 2**25

_MAKING_READY = threading.RLock()
_READ_FEATURES: ContextVar[bool] = ContextVar("peft_luca_read_features", default=False)


@contextmanager
def reading_features() -> Iterator[None]:
    """Within this context a LuCA layer returns [CLS] itself, (batch, d), in place of logits; in this thread only."""
    token = _READ_FEATURES.set(True)
    try:
        yield
    finally:
        _READ_FEATURES.reset(token)


class LucaLayer(nn.Module, BaseTunerLayer):
    """
    Wraps the head of an image classifier and holds every expert's LuCA module, class rows and reference.

    With one expert active the layer returns its own K logits; with a router, logits over all C classes of all experts.

    Args:
        base_layer (`nn.Module`): The model's head.
        width (`int`): d, the width of the vector that LuCA reads.
        input_width (`int`): Width of what enters the head: [CLS] comes first when it is wider than d.
    """

    adapter_layer_names = (
        "luca_adapter_down",
        "luca_adapter_up",
        "luca_adapter_norm",
        "luca_calibrator_down",
        "luca_calibrator_up",
        "luca_class_rows",
        "luca_class_bias",
        "luca_scale",
    )
    other_param_names = ("luca_reference_mean", "luca_reference_std")
    # The ℓ1 penalty runs over these: the LuCA module, not the rows and not σ.
    module_names = adapter_layer_names[:5]

    def __init__(self, base_layer: nn.Module, width: int, input_width: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.width = width
        self.input_width = input_width
        self.luca_adapter_down = nn.ModuleDict()
        self.luca_adapter_up = nn.ModuleDict()
        self.luca_adapter_norm = nn.ModuleDict()
        self.luca_calibrator_down = nn.ModuleDict()
        self.luca_calibrator_up = nn.ModuleDict()
        self.luca_class_rows = nn.ParameterDict()
        self.luca_class_bias = nn.ParameterDict()
        self.luca_scale = nn.ParameterDict()
        self.luca_reference_mean = BufferDict(persistent=True)
        self.luca_reference_std = BufferDict(persistent=True)
        self.configs: dict[str, LucaConfig] = {}
        self.base_outputs: Any = None  # labels and loss of the base model, kept by LucaModel
        # Kept beside the experts, not among their weights: a part, or the folder whose file holds it.
        self.statistics: dict[str, ClassStatistics | Path] = {}
        self.router: Router | StatisticsRouter | Oracle | None = None
        self.router_options: dict[str, Any] = {}
        # An active expert answers over its own classes, as any PEFT model, or over all: the paper's training needs it.
        self.over_all_classes = False
        self._active_adapter = []
        self._disable_adapters = False
        self.merged_adapters = []
        self._label_space: LabelSpace | None = None
        self._statistics_routing: StatisticsRouting | None = None

    # ---- experts -------------------------------------------------------------------------------------------------

    def update_layer(self, adapter_name: str, config: LucaConfig) -> None:
        """Add an expert. Its config must be resolved and its classes known."""
        assert config.classes is not None
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
        if config.head == "linear":
            self.luca_class_bias[adapter_name] = nn.Parameter(torch.zeros(classes))
        else:
            self.luca_scale[adapter_name] = nn.Parameter(torch.tensor(float(config.scale or 1.0)))
        self.luca_reference_mean[adapter_name] = torch.zeros(d)
        self.luca_reference_std[adapter_name] = torch.ones(d)
        self.configs[adapter_name] = config
        self._label_space = self._statistics_routing = None
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def adopt(self, adapter_name: str, other: LucaLayer) -> None:
        """Take over an expert of another layer as it is, and leave this layer's own experts alone."""
        for container in (*self.adapter_layer_names, *self.other_param_names):
            if adapter_name in getattr(other, container):
                getattr(self, container)[adapter_name] = getattr(other, container)[adapter_name]
        self.configs[adapter_name] = other.configs[adapter_name]
        self._label_space = self._statistics_routing = None

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self.configs.pop(adapter_name, None)
        self.statistics.pop(adapter_name, None)
        self._label_space = self._statistics_routing = None

    def enable_adapters(self, enabled: bool) -> None:
        # PEFT's own version freezes on disabling and thaws on enabling, and forgets which expert was to be trained.
        self._disable_adapters = not enabled

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)
        for buffers in (self.luca_reference_mean, self.luca_reference_std):
            # Statistics keep their precision in a half-precision model.
            if adapter_name in buffers and buffers[adapter_name].dtype in (torch.float16, torch.bfloat16):
                buffers[adapter_name] = buffers[adapter_name].float()

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise NotImplementedError(MERGE_REFUSED)

    def unmerge(self) -> None:
        raise NotImplementedError(MERGE_REFUSED)

    def is_untrained(self, adapter_name: str) -> bool:
        """Whether an expert is as it was made: no optimizer leaves σ, or a linear head's bias, where it was."""
        config = self.configs[adapter_name]
        if self.luca_class_rows[adapter_name].is_meta:
            return True
        if config.head == "linear":
            return not bool(self.luca_class_bias[adapter_name].any())
        scale = self.luca_scale[adapter_name].detach()
        return bool(scale == torch.tensor(config.scale, dtype=scale.dtype))

    def twin(self, adapter_name: str, tensors: Mapping[str, Tensor]) -> str | None:
        """Another expert that has exactly these weights, which are named as this one's are within the layer."""
        here = self.state_dict()
        for other in self.configs:
            names = {key: key.replace(f".{adapter_name}", f".{other}", 1) for key in tensors}
            if other != adapter_name and all(
                name in here and not here[name].is_meta and torch.equal(here[name], tensors[key].to(here[name]))
                for key, name in names.items()
            ):
                return other
        return None

    def tensors(self, adapter_name: str) -> dict[str, Tensor]:
        """Every tensor of an expert, by its name relative to the layer."""
        found: dict[str, Tensor] = {}
        for container in (*self.adapter_layer_names, *self.other_param_names):
            if adapter_name in getattr(self, container):
                entry = getattr(self, container)[adapter_name]
                inner = (
                    {"": entry} if isinstance(entry, Tensor) else {f".{k}": t for k, t in entry.state_dict().items()}
                )
                found |= {f"{container}.{adapter_name}{key}": tensor for key, tensor in inner.items()}
        return found

    @property
    def in_features(self) -> int:
        """As the base's head has it: other code asks the head for its shape."""
        return self.input_width

    @property
    def out_features(self) -> int:
        """Of the base's head; the experts' own widths are those of their rows."""
        return int(getattr(self.base_layer, "out_features", self.input_width))

    def __repr__(self) -> str:
        """Not every module of every expert, of which there may be a thousand."""
        parts = [f"(base_layer): {self.base_layer!r}", *self.described()]
        return f"LucaLayer(width={self.width}\n  " + "\n  ".join(parts) + "\n)"

    def described(self, limit: int = 10) -> list[str]:
        """Lines that a person reads: who answers, and the experts with their classes."""
        if self.disable_adapters or not self.active_adapters:
            who = "disabled: the base's own head"
        elif self.router is None:
            who = f"the expert {self.active_adapters[0]!r}"
        else:
            who = f"the router {router_name(self.router) or self.router!r}"
        classes_known = pluralize(len(self.label_space.classes), "class")
        lines = [f"{pluralize(len(self.configs), 'expert')}, {classes_known}; answers: {who}"]
        for name, config in list(self.configs.items())[:limit]:
            classes = config.classes or []
            names = ", ".join(classes[:5]) + (", …" if len(classes) > 5 else "")
            numbers = sum(parameter.numel() for parameter in self.luca_parameters(name).values())
            lines.append(f"{name}: {pluralize(len(classes), 'class')} ({names}), LuCA of {numbers:,} parameters")
        if len(self.configs) > limit:
            lines.append(f"… and {pluralize(len(self.configs) - limit, 'more expert')}")
        return lines

    # ---- the way of the data -------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        """
        What entered the head, (batch, input width) → logits: the active expert's (batch, K); with a router, or with
        an expert named for each image, (batch, C); the untouched head's when adapters are disabled. Within
        [`reading_features`], [CLS] itself, (batch, d).
        """
        if not torch.compiler.is_compiling() and _READ_FEATURES.get():
            return self.pooled(x)
        if self.disable_adapters or not self.active_adapters:
            output: Tensor = self.base_layer(x, *args, **kwargs)
            return output
        if adapter_names is not None:
            return self.mixed(self.pooled(x), adapter_names)
        return self.logits(self.pooled(x))

    def logits(self, z: Tensor) -> Tensor:
        """[CLS], (batch, d) → logits of what is active: (batch, K), or (batch, C)."""
        if self.router is not None:
            return self.route(z).logits
        name = self.active_adapters[0]
        if not self.over_all_classes:
            return self.expert_logits(z, name)
        scores, known = self.scores(z, [name])
        return (scores if self.label_space.complete else fill_unknown(scores, known))[:, 0]

    def mixed(self, z: Tensor, adapter_names: list[str]) -> Tensor:
        """[CLS], (batch, d), and who answers each → logits over the global label space, (batch, C)."""
        if len(adapter_names) != len(z):
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(adapter_names)} and {len(z)} respectively."
            )
        logits: dict[int, Tensor] = {}
        for name in dict.fromkeys(adapter_names):
            images = [i for i, other in enumerate(adapter_names) if other == name]
            scores, known = self.scores(z[images], [name])  # (images, 1, C)
            logits.update(zip(images, fill_unknown(scores, known)[:, 0], strict=True))
        return torch.stack([logits[i] for i in range(len(z))])

    def pooled(self, x: Tensor) -> Tensor:
        """[CLS], (batch, d), from what entered the head. Detached: the trunk is frozen."""
        if x.ndim != 2 or x.shape[-1] != self.input_width:
            raise ValueError(
                f"the head reads a tensor of shape (batch, {self.input_width}), got {tuple(x.shape)}. LuCA reads one "
                "pooled vector per image."
            )
        return x.detach()[:, : self.width]  # (batch, d)

    def standardise(self, z: Tensor, adapter_name: str) -> Tensor:
        """[CLS] by the backbone's mean and deviation over the reference pictures, as the expert was trained on it."""
        if self.configs[adapter_name].reference:
            z = (z - self.luca_reference_mean[adapter_name]) / self.luca_reference_std[adapter_name]
        return self._cast_input_dtype(z, self.luca_class_rows[adapter_name].dtype)

    def luca(self, z: Tensor, adapter_name: str) -> Tensor:
        """LuCA(z), (batch, d) → (batch, d): standardise by the reference, then adapt and calibrate (paper, §3)."""
        config, z = self.configs[adapter_name], self.standardise(z, adapter_name)
        if config.arrangement == "adapter":
            return self._adapt(z, adapter_name)
        if config.arrangement == "calibrator":
            return z * self._gate(z, adapter_name)
        if config.arrangement == "adapter_calibrator":
            adapted = self._adapt(z, adapter_name)
            return adapted * self._gate(adapted, adapter_name)
        if config.arrangement == "calibrator_adapter":
            return self._adapt(z * self._gate(z, adapter_name), adapter_name)
        mlp = self._mlp(z, adapter_name)
        parallel: Tensor = z * self._gate(z, adapter_name) + self.luca_adapter_norm[adapter_name](mlp)
        return parallel

    def _mlp(self, z: Tensor, adapter_name: str) -> Tensor:
        hidden = F.gelu(self.luca_adapter_down[adapter_name](z))
        mlp: Tensor = self.luca_adapter_up[adapter_name](hidden)
        return mlp

    def _adapt(self, z: Tensor, adapter_name: str) -> Tensor:
        mlp, norm = self._mlp(z, adapter_name), self.luca_adapter_norm[adapter_name]
        before = self.configs[adapter_name].norm_position == "before_residual"
        adapted: Tensor = z + norm(mlp) if before else norm(z + mlp)
        return adapted

    def _gate(self, z: Tensor, adapter_name: str) -> Tensor:
        hidden = F.relu(self.luca_calibrator_down[adapter_name](z))
        return torch.sigmoid(self.luca_calibrator_up[adapter_name](hidden))

    def gates(self, z: Tensor, adapter_name: str) -> Tensor:
        """An expert's calibrator gates on [CLS], between 0 and 1: (batch, d) → (batch, d)."""
        z = self.standardise(z, adapter_name)
        adapts_first = self.configs[adapter_name].arrangement == "adapter_calibrator"
        return self._gate(self._adapt(z, adapter_name) if adapts_first else z, adapter_name)

    def scale(self, adapter_name: str) -> Tensor:
        """σ as it is used, a scalar."""
        scale: Tensor = self.luca_scale[adapter_name]
        return scale.abs() if self.configs[adapter_name].positive_scale else scale

    def expert_logits(self, z: Tensor, adapter_name: str) -> Tensor:
        """One expert's scores of its own classes, (batch, d) → (batch, K)."""
        features, rows = self.luca(z, adapter_name), self.luca_class_rows[adapter_name]
        if self.configs[adapter_name].head == "linear":
            return F.linear(features, rows, self.luca_class_bias[adapter_name])
        return self.scale(adapter_name) * F.linear(F.normalize(features, dim=-1), F.normalize(rows, dim=-1))

    def scores(self, z: Tensor, adapter_names: list[str] | None = None) -> tuple[Tensor, Tensor]:
        """
        Scores of all C classes under each expert, exactly as the concepts page defines them: σ_t · cos(LuCA_t(z), row
        of c); the row is t's own if t has c, otherwise the best over the experts that have it.

        Args:
            z (`torch.Tensor` of shape `(batch, d)`): [CLS] vectors.
            adapter_names (`list[str]`, *optional*): The experts to ask; all by default, in their order.

        Returns:
            `tuple`: scores `(batch, experts, C)`, and a boolean `(experts, C)` that is False where an expert cannot
            score a class, because one of the two has a linear head. Scores there are `-inf`.
        """
        index, rows = self.label_space, self._unit_rows()
        names = list(self.configs) if adapter_names is None else adapter_names
        scores = torch.stack([self._scores_under(name, z, rows) for name in names], dim=1)
        known = torch.stack([index.known[name] for name in names])
        # Only now: -inf times a σ of 0, or its gradient, would not be a number.
        return scores if index.complete else scores.masked_fill(~known, -torch.inf), known

    def _unit_rows(self) -> Tensor | None:
        """The rows of all experts with a cosine head, of length 1, (rows, d)."""
        rows = [F.normalize(self.luca_class_rows[name], dim=-1) for name in self.label_space.cosine]
        return torch.cat(rows) if rows else None

    def _scores_under(self, adapter_name: str, z: Tensor, rows: Tensor | None) -> Tensor:
        """One expert's scores, (batch, C), with whatever number where it cannot score a class."""
        index = self.label_space
        if self.configs[adapter_name].head == "linear":
            expert_logits = self.expert_logits(z, adapter_name)
            filled = expert_logits.new_zeros(z.shape[0], len(index.classes))
            return filled.index_copy(1, index.own[adapter_name], expert_logits)
        assert rows is not None
        features = F.normalize(self.luca(z, adapter_name), dim=-1)
        cosines = F.linear(features, rows.to(features.dtype))  # (batch, rows)
        return self.scale(adapter_name) * combine_rows(cosines, index, adapter_name)

    def set_router(self, router: Router | StatisticsRouter | Oracle | None, options: dict[str, Any]) -> None:
        """Set who answers, and make a statistics router ready, which says what it lacks."""
        self.router, self.router_options, self._statistics_routing = router, options, None
        common, _ = RouterOptions.split(options)
        if isinstance(router, Oracle) and common.candidates is not None:
            raise ValueError("the oracle asks one expert for each image, so that it takes no candidates.")
        if isinstance(router, StatisticsRouter) or common.candidates is not None:
            self.statistics_routing  # noqa: B018

    def route(self, z: Tensor, expert: Tensor | None = None) -> RoutingOutput:
        """
        [CLS] vectors `(batch, d)` → each sample's logits, by the router that is set, or by entropy.

        Args:
            expert (`torch.Tensor` of shape `(batch,)`, *optional*): With the oracle, who is to answer each sample.
        """
        router = self.router or entropy
        common, options = RouterOptions.split(self.router_options)
        if isinstance(router, Oracle) != (expert is not None):
            raise ValueError(
                "the oracle router, and no other, is told which expert answers each image: set_router('oracle'), then "
                "route(pixel_values, expert=...) with places in the experts' order, (batch,)."
            )
        if expert is not None and not torch.compiler.is_compiling():
            _check_places(expert, len(z), len(self.configs))
        index, device = self.label_space, z.device
        asked = min(common.candidates or len(self.configs), len(self.configs))
        per_sample = asked * max(index.rows, len(index.classes))
        if isinstance(router, StatisticsRouter):
            per_sample = max(index.rows, len(index.classes)) + len(self.configs)
        chunks: list[tuple[Tensor, ...]] = []
        # What one sample gets does not depend on the others, so that a large batch can be taken piece by piece; but a
        # graph that is compiled or exported holds for every batch size, and len() would fix it.
        size = max(1, SCORES_BUDGET // max(1, per_sample))
        pieces = [z] if torch.compiler.is_compiling() else list(z.split(size))
        told = expert.to(device).split(size) if expert is not None else [None] * len(pieces)
        for chunk, chosen in zip(pieces, told, strict=True):
            if isinstance(router, StatisticsRouter):
                chunks.append(self._route_by_statistics(chunk))
                continue
            if common.candidates is None:
                (scores, known), places = self.scores(chunk), None
            else:
                scores, known, places = self._candidates(chunk, asked)
            entropies = entropy(scores)  # (batch, experts)
            if isinstance(router, Oracle):
                assert chosen is not None
                # Who knows the expert knows that it is one of its classes.
                known = known & torch.stack([own_mask(own, len(index.classes)) for own in index.own.values()])
                costs = torch.zeros_like(entropies)
            else:
                costs = entropies if router is entropy and not options else router(scores, **options)
                if not isinstance(costs, Tensor) or costs.shape != entropies.shape or costs.dtype == torch.bool:
                    found = repr(costs)[:100]
                    if isinstance(costs, Tensor):
                        found = f"{tuple(costs.shape)} of {costs.dtype}"
                    raise ValueError(
                        "a router returns a tensor of one number per sample and expert, here of shape "
                        f"{tuple(entropies.shape)}, got {found}."
                    )
                chosen = costs.argmin(dim=1)  # (batch,)
            best = entropies.gather(1, chosen[:, None])[:, 0]
            logits = scores if index.complete and not isinstance(router, Oracle) else fill_unknown(scores, known)
            logits = logits[torch.arange(chunk.shape[0], device=device), chosen]  # (batch, C)
            if places is not None:
                chosen = places.gather(1, chosen[:, None])[:, 0]
                entropies = entropies.new_full((len(chunk), len(self.configs)), torch.inf).scatter(
                    1, places, entropies
                )
            chunks.append((logits, chosen, best, entropies, costs))
        logits, chosen, certain, *rest = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        if isinstance(router, StatisticsRouter):
            # Not `<`: what is no number is unknown.
            return RoutingOutput(logits, chosen, certain, None, rest[0], ~(rest[0] >= common.unknown_below))
        if common.routing_scope == "batch":
            logits, chosen = self._one_expert(z, rest[1])
            certain = rest[0].gather(1, chosen[:, None])[:, 0]
        confidence = torch.softmax(logits.float() / options.get("temperature", 1.0), dim=-1).amax(dim=-1)
        return RoutingOutput(logits, chosen, certain, rest[0], confidence, ~(confidence >= common.unknown_below))

    def _candidates(self, z: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """[`scores`] of each image's own candidates, (batch, count, C), what is known of them, and their places."""
        names, index, rows = list(self.configs), self.label_space, self._unit_rows()
        places = self.statistics_routing.likeliest(self.unit_features(z, names[0]), count).sort(dim=1).values
        scores = next(iter(self.luca_class_rows.values())).new_empty(*places.shape, len(index.classes))
        known = torch.empty_like(scores, dtype=torch.bool)
        for place in places.unique().tolist():
            image, slot = (places == place).nonzero(as_tuple=True)
            scores[image, slot] = self._scores_under(names[place], z[image], rows).to(scores.dtype)
            known[image, slot] = index.known[names[place]]
        return scores.masked_fill(~known, -torch.inf), known, places

    def _one_expert(self, z: Tensor, costs: Tensor) -> tuple[Tensor, Tensor]:
        """The released evaluation's choice: the expert of the lowest mean cost answers the whole batch."""
        t = int(costs.mean(dim=0).argmin())
        scores, known = self.scores(z, [list(self.configs)[t]])
        logits = scores if self.label_space.complete else fill_unknown(scores, known)
        return logits[:, 0], torch.full((len(z),), t, device=z.device)

    def _route_by_statistics(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, expert, entropy and confidence by the statistics router that is set."""
        routing = self.statistics_routing
        posterior, expert, confidence = routing(
            self.unit_features(z, routing.experts[0]), lambda images, name: self.expert_logits(z[images], name)
        )
        return posterior, expert, torch.special.entr(posterior.exp()).sum(dim=-1), confidence

    def unit_features(self, z: Tensor, adapter_name: str) -> Tensor:
        """[CLS] as the statistics have it: standardised by the expert's reference, of length 1, at least float32."""
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if not self.configs[adapter_name].reference:
            return unit_features(z)
        return unit_features(z, self.luca_reference_mean[adapter_name], self.luca_reference_std[adapter_name])

    @property
    def statistics_routing(self) -> StatisticsRouting:
        """
        The statistics router that is set, or the one that finds a score router's candidates; made ready anew when the
        experts change.
        """
        index, routing = self.label_space, self._statistics_routing
        if routing is not None and routing.part_class.device == index.device:
            return routing
        with _MAKING_READY:  # threads that ask at once wait for the first, and take no memory of their own
            routing = self._statistics_routing
            if routing is None or routing.part_class.device != index.device:
                router, options = StatisticsRouter(Prototype), dict[str, Any]()
                if isinstance(self.router, StatisticsRouter):
                    common, options = RouterOptions.split(self.router_options)
                    router, options = self.router, {**options, "candidates": common.candidates}
                routing = StatisticsRouting(router, gather_statistics(self), index, **options)
                self._statistics_routing = routing
        return routing

    @property
    def label_space(self) -> LabelSpace:
        """The global label space of the layer's experts, made anew when they change."""
        device = next(iter(self.luca_class_rows.values())).device
        index = self._label_space
        if index is None or index.device != device:
            index = self._label_space = LabelSpace(self.configs, device)
        return index

    # ---- training ------------------------------------------------------------------------------------------------

    def luca_parameters(self, adapter_name: str) -> dict[str, nn.Parameter]:
        """The parameters of an expert's LuCA module, by their names within the layer."""
        return {
            f"{container}.{name}": parameter
            for container in self.module_names
            if adapter_name in getattr(self, container)
            for name, parameter in getattr(self, container)[adapter_name].named_parameters()
        }

    def l1_penalty(self, adapter_name: str) -> Tensor:
        """Σ|θ| over the expert's LuCA parameters, a scalar: the sum, and neither the rows nor σ (paper, §3)."""
        return torch.stack([p.abs().sum() for p in self.luca_parameters(adapter_name).values()]).sum()

    @torch.no_grad()
    def set_rows_to_class_means(
        self, adapter_name: str, features: Tensor, labels: Tensor, adapted: bool = True
    ) -> None:
        """
        Replace an expert's cosine rows by class means.

        Args:
            adapter_name (`str`): The expert.
            features (`torch.Tensor` of shape `(images, d)`): [CLS] vectors.
            labels (`torch.Tensor` of shape `(images,)`): The expert's own ids, 0 … K-1.
            adapted (`bool`, *optional*, defaults to `True`):
                Means of the adapted features, for after the training, or of the standardised [CLS], to start it from.

        Raises:
            ValueError: a class has no image, or the expert has a linear head.
        """
        if self.configs[adapter_name].head != "cosine":
            raise ValueError(f"expert {adapter_name!r} has a linear head, which has no rows to take class means.")
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
            vectors = self.luca(z, adapter_name) if adapted else self.standardise(z, adapter_name)
            # Not index_add_, whose sums on an accelerator run in another order each time.
            sums += F.one_hot(label, len(rows)).to(vectors.device, torch.float64).T @ vectors.double()
        rows.copy_(sums / counts[:, None])


def _check_places(expert: Tensor, images: int, experts: int) -> None:
    whole = isinstance(expert, Tensor) and not (expert.is_floating_point() or expert.dtype == torch.bool)
    if not whole or expert.shape != (images,) or not all(0 <= place < experts for place in expert.tolist()):
        raise ValueError(
            f"expert must be a tensor of {images} whole numbers, the place of each image's expert from 0 to "
            f"{experts - 1}, got {expert!r}."
        )


def own_mask(own: Tensor, classes: int) -> Tensor:
    """Global ids of an expert's classes → boolean (C,)."""
    return torch.zeros(classes, dtype=torch.bool, device=own.device).index_fill(0, own, True)


MERGE_REFUSED = (
    "a LuCA expert cannot be merged: it is not a change of the backbone's weights but a module between [CLS] and its "
    "own class rows. Use the model as it is, or `unload()` to get the backbone back."
)


def _xavier(linear: nn.Linear) -> nn.Linear:
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def luca_layers(model: nn.Module) -> list[LucaLayer]:
    return [module for module in model.modules() if isinstance(module, LucaLayer)]


def find_layer(model: nn.Module) -> tuple[str, LucaLayer]:
    """Name and module of the LuCA layer within a model, wrapped in a PeftModel or not."""
    return next((name, module) for name, module in model.named_modules() if isinstance(module, LucaLayer))
