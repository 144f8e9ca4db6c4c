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
from .head import Head, check_expert_name, find_head
from .labels import Labels
from .layer import LucaLayer, find_layer


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
    layer: LucaLayer
    _just_added: set[str]  # experts since the last train(True): a copy may replace their weights
    _unloaded: set[str]  # experts that PEFT has added to load weights into them, until these are there
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012 - PEFT's name; the head is found in _prepare_model

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> LucaConfig:
        return peft_config  # PEFT's version looks the targets up by model type alone; see _prepare_model

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        adapter_name = next(name for name, known in self.peft_config.items() if known is peft_config)
        head = check_new_expert(model, peft_config, adapter_name)
        peft_config.target_modules = [head.name]
        if peft_config.fingerprint is None:
            backbone = BackboneFacts.of(model, head.name)
            peft_config.fingerprint, peft_config.backbone_settings = backbone.fingerprint, backbone.settings
        self._just_added.add(adapter_name)
        self._unloaded.discard(adapter_name)
        if peft_config.inference_mode:
            self._unloaded.add(adapter_name)

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

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "LuCA experts cannot be averaged: each has rows for its own classes. Let set_router choose among them."
        )

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "a LuCA expert cannot be merged: it does not change the backbone's weights, it is a module between [CLS] "
            "and its own class rows. Use the model as it is, or call unload() to get the backbone back."
        )

    unmerge_adapter = _check_merge_allowed = merge_adapter

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
        unknown = sorted({str(name) for name in adapter_names if name not in self.peft_config})
        if unknown:
            raise ValueError(
                f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. The model has "
                f"{', '.join(self.peft_config)}. Its own head answers within `model.disable_adapter()`."
            )
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
    wrong = [
        key for key, (own, new) in found.items() if new is None or own.shape != new.shape or not new.isfinite().all()
    ]
    if wrong:
        reason = f"the file of expert {name!r} lacks {sorted(wrong)}, or has them in another shape or not finite"
        raise ValueError(f"{reason}: nothing of it was loaded.")
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
    config.resolve()
    config.widths(head.width)
    return head
