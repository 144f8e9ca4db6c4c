"""How PEFT adds, saves and loads experts, and the verbs of PEFT that LuCA does not support."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn

from .backbone import BackboneFacts, check_backbone, check_same_reference, warn_of_processor
from .config import LucaConfig
from .head import Head, Labels, check_expert_name, find_head
from .layer import LucaLayer, find_layer, luca_layers


class ExpertConfigs(dict[str, LucaConfig]):
    """The experts' configs. PEFT's verbs look experts up here before they ask the tuner."""

    def __contains__(self, name: object) -> bool:
        if isinstance(name, (list, set, dict)):
            raise ValueError(f"an expert is named by a string, got {name!r}. One expert is active (see set_router).")
        return super().__contains__(name)


class PeftHooks(BaseTuner):
    """What PEFT calls of a tuner to add, save and load experts, and the verbs that LuCA refuses."""

    prefix: str = "luca_"
    tuner_layer_cls = LucaLayer
    model: Any
    peft_config: dict[str, Any]
    _just_added: set[str]  # experts since the last train(True): a copy may replace their weights
    _unloaded: set[str]  # experts that PEFT has added to load weights into them, until these are there

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = self.peft_config[adapter_name]
        head = check_new_expert(model, config, adapter_name)
        if config.fingerprint is None:
            backbone = BackboneFacts.of(model, head.name)
            config.fingerprint, config.backbone_settings = backbone.fingerprint, backbone.settings
        self._just_added.add(adapter_name)
        if config.inference_mode or config.weights_follow:
            self._unloaded.add(adapter_name)
        config.weights_follow = False
        # PEFT sets the active adapter again at the end; adding an expert must not switch the router off.
        router = next((layer.router for layer in luca_layers(model)), None)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        self.layer.router = router
        # As train() keeps it: dropout in the trunk would move [CLS], and the reference with it.
        self.model.eval()
        self.layer.train(self.training)
        for name, parameter in self.model.named_parameters():
            if not name.startswith(f"{head.name}.{self.prefix}"):  # PEFT leaves adapters in the backbone trainable
                parameter.requires_grad = False
        self.sync_labels()

    def _create_and_replace(  # type: ignore[override]
        self, peft_config: Any, adapter_name: str, target: Any, target_name: str, parent: nn.Module, **kwargs: Any
    ) -> None:
        if not isinstance(target, LucaLayer):
            head = find_head(self.model, peft_config)
            target = LucaLayer(target, head.width, head.input_width)
            target.base_labels = Labels.of_model(self.model)
            target.set_adapter(self.active_adapters)
            # PEFT's _replace_module asks the head for a weight, which the head of a base without labels lacks.
            setattr(parent, target_name, target)
        target.update_layer(adapter_name, peft_config)

    def sync_labels(self) -> None:
        """Syncs `id2label`, `num_labels` and the loss with the active expert or router."""
        layer, labels = self.layer, self.layer.base_labels
        if layer.active_adapters and not layer.disable_adapters:
            active = layer.configs[layer.active_adapters[0]]
            labels = Labels.of_classes(layer.label_space.classes if layer.router else active.classes or ())
        labels.apply(self.model)

    @property
    def layer(self) -> LucaLayer:
        """The layer that holds the experts."""
        layer = self.model.get_submodule(self.targeted_module_names[0])
        if not isinstance(layer, LucaLayer):
            raise RuntimeError("there are no experts: unload() has removed them. Use the backbone that it returned.")
        return layer

    def _check_experts(self, names: str | Sequence[str]) -> None:
        for name in [names] if isinstance(names, str) else names:
            if name not in self.peft_config:
                raise ValueError(
                    f"there is no expert {name!r}. The model has {', '.join(self.peft_config)}. Its own head answers "
                    "within `model.disable_adapter()`."
                )

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "a LuCA expert cannot be merged or averaged: it is no change of the backbone's weights and has its own "
            "class rows. Let set_router choose among experts, or call unload() to get the backbone back."
        )

    unmerge_adapter = _check_merge_allowed = add_weighted_adapter = merge_adapter

    @contextmanager
    def _enable_peft_forward_hooks(
        self, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any
    ) -> Iterator[None]:
        """For `model(pixel_values, adapter_names=[...])`: one expert for each image, over the global label space."""
        if self.model.training:  # set by its own train(), past this one's
            self.train(self.training)
        if adapter_names is None:
            yield
            return
        if self.training:
            raise ValueError("Cannot pass `adapter_names` when the model is in training mode. Call model.eval().")
        self._check_experts(list(adapter_names))
        thread = threading.get_ident()

        def pass_names(layer: LucaLayer, inputs: Any, keywords: dict[str, Any]) -> Any:
            if threading.get_ident() != thread:  # the names belong to the images of this thread
                return None
            return inputs, {**keywords, "adapter_names": list(adapter_names)}

        with self.layer.register_forward_pre_hook(pass_names, with_kwargs=True):
            yield

    @classmethod
    def _get_adapter_state_dict(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        # Not super()'s, which would take the tensors of other methods' adapters inside the backbone as well.
        path, layer = find_layer(model)
        path = path.removeprefix("_fsdp_wrapped_module.")  # which FSDP's state dict leaves out
        expected = [f"{path}.{key}" for key in sorted(layer.tensors(adapter_name))]
        tensors = {key: state_dict[key] for key in expected}  # a missing tensor is an error before any writing
        # Its numbers are those of float16.
        return {key: t.half() if "luca_whitening" in key else t for key, t in tensors.items()}

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        # The last point at which PEFT lets a tuner see the weights before it copies them.
        tuner: Any = model.base_model if isinstance(model, PeftModel) else model
        remapped: dict[str, Tensor]
        remapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        unloaded: set[str] = getattr(tuner, "_unloaded", set())
        try:
            check_weights(model, config, adapter_name, remapped, state_dict)
        except ValueError:
            if adapter_name in unloaded and len(tuner.peft_config) > 1:
                tuner.delete_adapter(adapter_name)  # PEFT has added it already, with random numbers
            raise
        unloaded.discard(adapter_name)
        warn_of_processor(find_layer(model)[1].configs)
        return remapped


def check_weights(model: nn.Module, config: Any, name: str, remapped: dict[str, Tensor], state_dict: Any) -> None:
    """Refuses weights that do not fit, and an expert with which the router that is set cannot answer."""
    base, tuner = (model.get_base_model(), model.base_model) if isinstance(model, PeftModel) else (model, model)
    path, layer = find_layer(model)
    check_backbone(base, find_head(base, config), config, name, state_dict)
    check_same_reference(layer, name, state_dict)
    found = {key: (tensor, remapped.get(f"{path}.{key}")) for key, tensor in layer.tensors(name).items()}
    wrong = [k for k, (own, new) in found.items() if new is None or own.shape != new.shape or not new.isfinite().all()]
    if wrong:
        reason = f"in the file of expert {name!r} these are missing, of another shape or not finite: {sorted(wrong)}"
        raise ValueError(f"{reason}. Nothing of it was loaded.")
    if layer.router is not None:
        layer.experts.prepared(layer.router)
    if name not in getattr(tuner, "_just_added", ()):
        other = layer.duplicate_of(name, {key: remapped[f"{path}.{key}"] for key in found})
        if other is not None:
            raise ValueError(
                f"these are the weights of expert {other!r}, and would replace those of {name!r}. To copy {other!r}, "
                f"delete {name!r} first. load_best_model_at_end of transformers only knows an expert called "
                f"'default'. The checkpoint has a folder {name!r}, which model.load_adapter(folder, {name!r}) loads."
            )


def check_new_expert(model: nn.Module, config: LucaConfig, name: str) -> Head:
    """Checks all that a new expert needs, and completes its config. Changes nothing of the model."""
    head = find_head(model, config)
    check_expert_name(name, model, head.name)
    if config.classes is None:
        config.classes = Labels.of_model(model).names(model.get_submodule(head.name))
        config.filled.add("classes")
    if config.target_modules is None:
        config.filled.add("target_modules")
    config.target_modules = [head.name]
    config.resolve()
    config.widths(head.width)
    return head
