"""`LucaModel`: puts experts in the place of a model's head, sets who answers, and keeps the backbone frozen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..preprocessing import make_pixels
from ..routing import Router, RoutingOutput, make_router
from ..routing.evidence import collect_with_evidence
from ..routing.statistics import DEFAULT_RANK, ClassStatistics
from .backbone import BackboneFacts, is_identity, pooled_features
from .config import LucaConfig
from .head import Head
from .layer import image_options
from .peft_hooks import ExpertConfigs, PeftHooks, check_new_expert
from .prediction import Prediction, answer_of, list_images, predictions_of, processor_of
from .reference import whitening


class LucaModel(PeftHooks):
    """
    LuCA (Learn and Calibrate) experts on the pooled [CLS] vector of a frozen image classifier.

    The method is described in https://arxiv.org/abs/2502.14762. Every expert is one PEFT adapter with a LuCA module,
    the rows of its own classes and their scale. Everything below can be called on the [`~peft.PeftModel`] as well.

    Args:
        model ([`~transformers.PreTrainedModel`]): The image classifier. It is changed in place: its head is wrapped.
        config ([`LucaConfig`]): The configuration of the first expert.
        adapter_name (`str`): Its name.
        low_cpu_mem_usage (`bool`, *optional*, defaults to `False`): Create its weights on the meta device.
    """

    def __init__(self, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, PeftModel):
            raise ValueError(
                f"this model is a PeftModel with {model.peft_type} adapters already. LuCA goes on the model inside: "
                "pass model.get_base_model(), in which those adapters stay active as a frozen part of the backbone."
            )
        configs = ExpertConfigs(peft_config if isinstance(peft_config, dict) else {adapter_name: peft_config})
        for name, config in configs.items():  # before anything of the model is changed
            check_new_expert(model, config, name)
        # Adapters of another method inside the backbone keep their own configs, which PEFT would mix with ours.
        foreign = vars(model).get("peft_config") or {}
        own = all(isinstance(config, LucaConfig) for config in foreign.values())
        if not own:
            del model.peft_config
        self._just_added: set[str] = set()
        self._unloaded: set[str] = set()
        super().__init__(model, configs, adapter_name, *args, **kwargs)  # type: ignore[arg-type]
        self._backbone_peft_config = None if own else foreign

    def add_expert(
        self, name: str, config: LucaConfig, tensors: Mapping[str, Tensor], statistics: ClassStatistics | None = None
    ) -> None:
        """
        Adds a trained expert, frozen, without changing which expert or router is active. The caller has checked that
        it fits. `tensors`, named as in its file without the name of the head, are taken over and not copied.
        """
        config.target_modules = list(self.targeted_module_names)
        self._unloaded.discard(name)
        self.layer.add_expert(name, config.resolve(), tensors)
        self.peft_config[name] = config
        if statistics is not None:
            self.layer.set_statistics(name, statistics)
        self.sync_labels()

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Activates one expert, which answers over its own classes. Switches the router off."""
        if not isinstance(adapter_name, str) and len(adapter_name) > 1:
            raise ValueError(f"one expert is active at a time, got {adapter_name}. Use set_router to let one choose.")
        self._check_experts(adapter_name)
        super().set_adapter(adapter_name, inference_mode=inference_mode)
        if self.targeted_module_names:
            self.layer.router = None
            self.sync_labels()

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Makes experts trainable, or freezes them, without activating them."""
        self._check_experts(adapter_names)
        super().set_requires_grad(adapter_names, requires_grad)

    def delete_adapter(self, adapter_name: str) -> None:
        """Deletes an expert. What is left is exactly the model that never had it."""
        if list(self.peft_config) == [adapter_name]:
            raise ValueError(f"{adapter_name!r} is the only expert. Use unload() to get the backbone back.")
        super().delete_adapter(adapter_name)
        self._unloaded.discard(adapter_name)
        self._just_added.discard(adapter_name)
        self.sync_labels()

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        # Not super()'s, which would disable the adapters of other methods inside the backbone as well.
        self.layer.enable_adapters(enabled)
        self.sync_labels()

    def unload(self) -> nn.Module:
        """Removes all experts and returns the model as it was. Adapters of other methods inside it stay."""
        self.layer.base_labels.apply(self.model)
        self.model.set_submodule(self.targeted_module_names[0], self.layer.base_layer)
        del self.model.peft_config
        if self._backbone_peft_config is not None:
            self.model.peft_config = self._backbone_peft_config
        model: nn.Module = self.model
        return model

    def train(self, mode: bool = True) -> LucaModel:
        """Sets the mode of the experts. The frozen trunk stays in eval mode, so that dropout cannot move [CLS]."""
        if mode:
            self._just_added.clear()
        if self.training != mode or self.layer.training != mode or self.model.training:  # Trainer asks at every step
            super().train(mode)
            self.model.eval()
            self.layer.train(mode)
        return self

    def __repr__(self) -> str:
        # Of the backbone only its name: print(model.get_base_model()) shows its modules.
        name = f"{type(self.model).__name__} ({getattr(self.model, 'name_or_path', '') or 'unnamed'})"
        return "\n  ".join(["LucaModel(", name, *self.layer.summary()]) + "\n)"

    @property
    def experts(self) -> dict[str, tuple[str, ...]]:
        """Names of the experts, in their order, with their classes."""
        return {name: tuple(config.classes or ()) for name, config in self.layer.configs.items()}

    @property
    def classes(self) -> tuple[str, ...]:
        """The global label space: the class names of all experts in order of first appearance."""
        return self.layer.label_space.classes

    @property
    def is_template(self) -> bool:
        """Whether the only expert is `default`, nobody named its classes, and it was never set to train."""
        is_only = list(self.experts) == ["default"]
        return is_only and "default" in self._just_added and "classes" in self.peft_config["default"].filled

    @property
    def router(self) -> Router | None:
        """The router that is set. `None` if a single expert is active."""
        return self.layer.router

    @property
    def statistics(self) -> Mapping[str, ClassStatistics]:
        """Expert → statistics of its training features, for the experts that have them."""
        return MappingProxyType(self.layer.statistics)

    def set_router(self, router: str | Router | Callable[..., Tensor] | None, **options: Any) -> None:
        """
        Lets a router choose, for each image by itself, the expert that answers. Logits are then `(batch, C)` over the
        global label space, and `config.id2label` follows.

        Args:
            router (`str`, [`Router`], function or `None`):
                `"auto"`, the default: Gaussians, with ridge where the evidence asks for it, if all experts have
                statistics and share a reference; otherwise `"nearest"`. By the experts' scores: `"nearest"`,
                `"entropy"` (the paper's) or `"energy"`. By their statistics: `"gaussian"`, `"lda"` or `"ridge"`.
                `"oracle"` needs `route(..., expert=...)`. A function takes scores `(batch, experts, C)` and returns
                costs `(batch, experts)`; the lowest answers. `None` switches routing off: the active expert answers.
            options: Options of the router, such as `temperature=2.0` or `unknown_below=0.5`.

        Raises:
            ValueError: there is no such router, an option is wrong, or an expert lacks the statistics it needs.
        """
        if router is None and options:
            raise ValueError(f"router=None takes no options, got {sorted(options)}.")
        made = None if router is None else make_router(router, **options)
        if made is not None:
            self.layer.experts.prepared(made)  # first, so that a router that cannot be used changes nothing
        self.layer.router = made
        self.sync_labels()
        if getattr(getattr(made, "options", None), "routing_scope", "sample") == "batch":
            warnings.warn(
                "routing_scope='batch' lets one expert answer a whole batch: over a test set sorted by class it leaks "
                "the task. Use it for comparison with published figures only.",
                stacklevel=2,
            )

    def pooled_features(self, pixel_values: Tensor, **options: Any) -> Tensor:
        """[CLS] of images, `(batch, channels, height, width)` → `(batch, d)`: one pass of the trunk, no expert."""
        if self.model.training:  # set by its own train(), past this one's
            self.train(self.training)
        head = Head(self.targeted_module_names[0], self.layer.width, self.layer.input_width)
        return pooled_features(self.model, head, pixel_values, **options)

    @torch.no_grad()
    def route(self, pixel_values: Tensor, expert: Tensor | None = None) -> RoutingOutput:
        """
        Routes images with the router that is set, `"auto"` by default, in one pass of the trunk.

        Args:
            pixel_values (`torch.Tensor` of shape `(batch, channels, height, width)`): Preprocessed images.
            expert (`torch.Tensor` of shape `(batch,)`, *optional*): Positions of the experts that answer instead.
        """
        return self.route_features(self.pooled_features(pixel_values), expert)

    @torch.no_grad()
    def route_features(self, features: Tensor, expert: Tensor | None = None) -> RoutingOutput:
        """As [`~LucaModel.route`], from [CLS] vectors `(batch, d)`."""
        return self.layer.route_features(features, expert)

    @torch.no_grad()
    def predict(
        self, images: Any, top_k: int = 1, batch_size: int = 32, processing_class: Any = None
    ) -> list[Prediction]:
        """
        Returns a [`Prediction`] for each image, of the router that is set or of the active expert.

        Args:
            images: A PIL image, array, path, or dict of `bytes` or `path`, any iterable of them, or a dataset.
            top_k (`int`, *optional*, defaults to `1`): Number of classes in `top`.
            batch_size (`int`, *optional*, defaults to `32`): Images per pass of the trunk.
            processing_class (`BaseImageProcessor`, *optional*): The image processor. By default the experts' own.

        Raises:
            ValueError: an image cannot be read, which is named, or no expert knows its image processor.
        """
        if min(top_k, batch_size) < 1:
            raise ValueError(f"top_k and batch_size must be at least 1, got {top_k} and {batch_size}.")
        layer, processor, options = self.layer, processor_of(self.layer, processing_class), image_options(self.model)
        total = len(images) if isinstance(images, (list, tuple)) else getattr(images, "num_rows", None)
        backbone, rest = self.backbone, iter(tqdm(list_images(images), total=total, unit="img", leave=False, delay=2))
        predictions: list[Prediction] = []
        while batch := list(islice(rest, batch_size)):
            pixel_values = make_pixels(batch, processor, len(predictions), **options)
            z = self.pooled_features(pixel_values.to(backbone.device, backbone.dtype))
            predictions += predictions_of(layer, answer_of(layer, z), top_k)
        return predictions

    def expert_logits(self, features: Tensor, name: str) -> Tensor:
        """One expert's logits of its own classes, `(batch, d)` → `(batch, K)`."""
        return self.layer.expert_logits(features, name)

    def scores(self, features: Tensor, names: Sequence[str] | None = None) -> Tensor:
        """Scores of all classes under each expert, `(batch, d)` → `(batch, experts, C)`."""
        return self.layer.scores(features, None if names is None else list(names))

    @property
    def backbone(self) -> BackboneFacts:
        """Fingerprint and reference of the backbone as it is now."""
        return BackboneFacts.of(self.model, self.targeted_module_names[0])

    @torch.no_grad()
    def compute_reference(
        self, name: str | None = None, features: Tensor | None = None, labels: Tensor | None = None
    ) -> None:
        """
        Measures [CLS] of the reference pictures, once for each backbone, by which an expert standardizes and whitens
        its input. [`ExpertTrainer`] does so before training. A trained expert needs the one that it was trained with.

        Args:
            name (`str`, *optional*): The expert; the active one by default.
            features (`torch.Tensor` of shape `(images, d)`, *optional*):
                [CLS] of its training images. Without them it is whitened by the reference pictures alone.
            labels (`torch.Tensor` of shape `(images,)`, *optional*): The expert's own ids, 0 … K-1.
        """
        name = name or self.active_adapters[0]
        config = self.peft_config[name]
        mean, std = self.layer.luca_reference_mean[name], self.layer.luca_reference_std[name]
        is_new = is_identity(mean, std)  # also on the meta device, where reference() asks for the weights
        if not is_new and (features is None or not config.whitening):
            return
        reference = self.backbone.reference(self.pooled_features, bool(config.whitening))
        if is_new:
            mean.copy_(reference.mean)
            std.copy_(reference.std)
        if config.whitening:
            z = reference.mean[None] if features is None else features.cpu()
            labels = torch.zeros(1, dtype=torch.long) if labels is None else labels.cpu()
            z = (z - mean.cpu()) / std.cpu()
            self.layer.luca_whitening[name].copy_(whitening(reference.correlation, z, labels))

    def collect_statistics(
        self, name: str, features: Tensor, labels: Tensor, rank: int | None = DEFAULT_RANK, random_features: int = 0
    ) -> ClassStatistics:
        """
        Computes and keeps the statistics of an expert's training features, which the routers `"gaussian"`, `"lda"` and
        `"ridge"` need. [`ContinualTrainer`] does. `features` and `labels` are as in [`~LucaModel.compute_reference`],
        the others as in [`~peft_luca.routing.statistics.ClassStatistics.collect`].
        """
        layer, classes = self.layer, self.experts[name]

        def prepare(z: Tensor) -> Tensor:
            return layer.unit_features(z.to(layer.experts.device), name).cpu()

        statistics = collect_with_evidence(features.cpu(), labels.cpu(), classes, rank, random_features, prepare)
        layer.set_statistics(name, statistics)
        return statistics

    def set_rows_to_class_means(self, name: str, features: Tensor, labels: Tensor, adapted: bool = True) -> None:
        """See [`LucaLayer.set_rows_to_class_means`]."""
        self.layer.set_rows_to_class_means(name, features, labels, adapted)

    def l1_penalty(self, name: str | None = None) -> Tensor:
        """Σ|θ| over an expert's LuCA parameters, not its rows and σ (paper, §3). By default of the active expert."""
        parameters = self.layer.luca_parameters(name or self.active_adapters[0]).values()
        return torch.stack([parameter.abs().sum() for parameter in parameters]).sum()


if TYPE_CHECKING:

    class LucaPeftModel(PeftModel, LucaModel):  # type: ignore[misc, override]
        """A [`~peft.PeftModel`] with LuCA experts, for type checkers: it passes on the methods of [`LucaModel`]."""

else:
    LucaPeftModel = PeftModel


def tuner_of(model: nn.Module) -> LucaModel:
    """The LuCA tuner of a [`~peft.PeftModel`]."""
    tuner = getattr(model, "base_model", None) if isinstance(model, PeftModel) else None
    if not isinstance(tuner, LucaModel):
        raise ValueError(f"needs a PeftModel with LuCA experts, got {type(model).__name__}.")
    return tuner


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Hides warnings of PEFT that no user can act on: of an old attribute's name, and of names like its prefix."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Adapter name '.*' should not be contained in the prefix")
        yield
