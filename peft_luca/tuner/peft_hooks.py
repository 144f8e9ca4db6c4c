"""How PEFT adds, saves and loads experts, and the verbs of PEFT that LuCA does not support."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn

from .backbone import BackboneFacts, check_backbone, check_same_reference
from .config import LucaConfig
from .experts import MERGE_REFUSED
from .head import Head, check_expert_name, find_head
from .labels import Labels
from .layer import LucaLayer, find_layer, luca_layers


class ExpertConfigs(dict[str, LucaConfig]):
    """The experts' configs. PEFT's verbs look experts up here before they ask the tuner."""

    def __contains__(self, name: object) -> bool:
        if isinstance(name, (list, set, dict)):
            raise ValueError(
                f"an expert is named by a string, got {name!r}. One expert is active at a time: use set_router to let "
                "a router choose among all experts."
            )
        return super().__contains__(name)

    def __missing__(self, name: object) -> LucaConfig:
        raise KeyError(f"there is no expert {name!r}. The model has {', '.join(self)}.")


class PeftHooks(BaseTuner):
    """What PEFT calls of a tuner to add, save and load experts, and the verbs that LuCA refuses."""

    prefix: str = "luca_"
    tuner_layer_cls = LucaLayer
    model: Any
    peft_config: dict[str, Any]
    layer: LucaLayer
    _base_labels: Labels
    # The expert that was added last, until the model is set to train: only its weights may be replaced by a copy.
    _just_added: str | None = None
    _unloaded: str | None = None  # the expert that PEFT adds to load weights into it, until they are there
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012 - PEFT's name; the head is found in _prepare_model

    def _pre_injection_hook(self, model: nn.Module, config: Any, adapter_name: str) -> None:
        layers = luca_layers(model)  # another tuner has put one in and changed the model's labels since
        self._base_labels = layers[0].base_labels if layers else Labels.of_model(model)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> LucaConfig:
        return peft_config  # PEFT's version looks the targets up by model type alone; see _prepare_model

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        adapter_name = next(name for name, known in self.peft_config.items() if known is peft_config)
        head = check_new_expert(model, peft_config, adapter_name, self._base_labels)
        peft_config.target_modules = [head.name]
        if peft_config.fingerprint is None:
            peft_config.fingerprint = BackboneFacts.of(model, head.name).fingerprint
        self._just_added = adapter_name
        self._unloaded = adapter_name if peft_config.inference_mode else None

    def _create_and_replace(  # type: ignore[override]
        self, peft_config: Any, adapter_name: str, target: Any, target_name: str, parent: nn.Module, **kwargs: Any
    ) -> None:
        if not isinstance(target, LucaLayer):
            head = find_head(self.model, peft_config)
            layer = LucaLayer(target, width=head.width, input_width=head.input_width)
            layer.base_labels = self._base_labels
            layer.set_adapter(self.active_adapters)
            # PEFT's _replace_module asks the head for a weight, which the head of a base without labels lacks.
            setattr(parent, target_name, layer)
            target = layer
        target.update_layer(adapter_name, peft_config)

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Not supported: experts cannot be averaged."""
        raise NotImplementedError(
            "LuCA experts cannot be averaged: each has rows for its own classes, and none changes the same weights. "
            "Keep them side by side and let set_router choose for each image."
        )

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(MERGE_REFUSED)

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
        if "__base__" in adapter_names:
            raise ValueError(
                "adapter_names has '__base__', but the base model's own head has other classes than the experts, so "
                "one batch cannot hold both. Run those images within `model.disable_adapter()`."
            )
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        unknown = sorted({str(name) for name in names if not isinstance(name, str) or name not in self.peft_config})
        if unknown:
            raise ValueError(
                f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. The model has "
                f"{', '.join(self.peft_config)}."
            )
        thread = threading.get_ident()

        def pass_names(layer: LucaLayer, inputs: Any, keywords: dict[str, Any]) -> Any:
            if threading.get_ident() != thread:  # the names belong to the images of this thread
                return None
            return inputs, {**keywords, "adapter_names": list(adapter_names)}

        handle = self.layer.register_forward_pre_hook(pass_names, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: Any,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Tensor]:
        # Not super()'s, which would take the tensors of other methods' adapters inside the backbone as well.
        path, layer = find_layer(model)
        path = path.removeprefix("_fsdp_wrapped_module.")  # which FSDP's state dict leaves out
        expected = [f"{path}.{key}" for key in sorted(layer.tensors(adapter_name))]
        missing = [key for key in expected if key not in state_dict]
        if missing:
            raise RuntimeError(
                f"saving expert {adapter_name!r} would lose {missing}. Nothing was written. Rename the experts."
            )
        return {key: state_dict[key] for key in expected}

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        # The last point at which PEFT lets a tuner see the weights before it copies them.
        remapped: dict[str, Tensor] = super()._remap_adapter_state_dict_for_load(
            model, config, adapter_name, state_dict
        )
        tuner: Any = model.base_model if isinstance(model, PeftModel) else model
        try:
            cls._check_loaded(model, tuner, config, adapter_name, remapped, state_dict)
        except ValueError:
            # PEFT has added the expert already, with random numbers. One that was there before stays.
            if getattr(tuner, "_unloaded", None) == adapter_name and len(tuner.peft_config) > 1:
                tuner.delete_adapter(adapter_name)
            raise
        if isinstance(tuner, PeftHooks):
            tuner._unloaded = None
        return remapped

    @staticmethod
    def _check_loaded(
        model: nn.Module,
        tuner: Any,
        config: Any,
        adapter_name: str,
        remapped: dict[str, Tensor],
        state_dict: dict[str, Tensor],
    ) -> None:
        """Refuses weights that do not fit, and an expert with which the router that is set cannot answer."""
        path, layer = find_layer(model)
        expected = layer.tensors(adapter_name)
        found = {key: remapped.get(f"{path}.{key}") for key in expected}
        wrong = [
            key
            for key, tensor in found.items()
            if tensor is None or tensor.shape != expected[key].shape or not tensor.isfinite().all()
        ]
        if wrong:
            raise ValueError(
                f"the file of expert {adapter_name!r} lacks {sorted(wrong)}, or has them in another shape or with "
                "numbers that are not finite. Nothing of it was loaded."
            )
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        check_backbone(base, find_head(base, config), config, adapter_name, state_dict)
        check_same_reference(layer, adapter_name, state_dict)
        if layer.router is not None:
            layer.experts.prepared(layer.router)
        if getattr(tuner, "_just_added", None) != adapter_name:
            other = layer.duplicate_of(adapter_name, {key: remapped[f"{path}.{key}"] for key in expected})
            if other is not None:
                raise ValueError(
                    f"these are the weights of expert {other!r}, and would replace those of {adapter_name!r}. If this "
                    "is load_best_model_at_end of transformers: it only knows an expert called 'default'. The "
                    f"checkpoint has a folder {adapter_name!r}, which model.load_adapter(folder, {adapter_name!r}) "
                    f"loads. To copy {other!r}, delete {adapter_name!r} first."
                )


def check_new_expert(model: nn.Module, config: LucaConfig, name: str, labels: Labels) -> Head:
    """
    Checks all that a new expert needs, and completes its config. Changes nothing of the model.

    Raises:
        ValueError: the name, the head or the config does not fit the model.
    """
    head = find_head(model, config)
    check_expert_name(name, model, head.name)
    if config.classes is None:
        config.classes = labels.names(model.get_submodule(head.name))
        config.filled.add("classes")
    if config.target_modules is None:
        config.filled.add("target_modules")
    config.resolve()
    config.widths(head.width)
    return head
