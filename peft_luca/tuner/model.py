"""The tuner: finds the head, puts the experts in its place, and keeps labels, router and backbone in order."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from ..routing.discriminants import StatisticsRouter
from ..routing.router import Oracle, Router, RouterOptions, RoutingOutput, get_router
from ..routing.statistics import DEFAULT_RANK, ClassStatistics
from .backbone import BackboneFacts, check_backbone, check_same_reference, is_identity
from .config import LucaConfig
from .head import check_expert_name, find_head
from .labels import Outputs
from .layer import MERGE_REFUSED, LucaLayer, find_layer, luca_layers, reading_features
from .untouched import Untouched


class _Configs(dict[str, LucaConfig]):
    """The experts' configs. PEFT's verbs look experts up here before they ask the tuner."""

    def __contains__(self, name: object) -> bool:
        if isinstance(name, (list, set, dict)):
            raise ValueError(
                f"an expert is named by a string, got {name!r}. One expert is active at a time: use "
                "set_router('entropy') to ask all experts and let the most certain one answer each image."
            )
        return super().__contains__(name)

    def __missing__(self, name: object) -> LucaConfig:
        raise KeyError(f"there is no expert {name!r}. The model has {', '.join(self)}.")


class LucaModel(BaseTuner):
    """
    LuCA (Learn and Calibrate) experts on the pooled [CLS] vector of a frozen image classifier.

    The method is described in https://arxiv.org/abs/2502.14762. Every expert is one PEFT adapter with a LuCA module,
    the rows of its own classes and their scale. Everything below can be called on the [`~peft.PeftModel`] as well.

    Args:
        model ([`~transformers.PreTrainedModel`]): The image classifier. It is changed in place: its head is wrapped.
        config ([`LucaConfig`]): The configuration of the first expert.
        adapter_name (`str`): Its name.
        low_cpu_mem_usage (`bool`, *optional*, defaults to `False`): Create its weights on the meta device.

    Example:

        ```py
        >>> import peft_luca
        >>> from peft import get_peft_model
        >>> from peft_luca import LucaConfig
        >>> from transformers import AutoModelForImageClassification

        >>> vit = AutoModelForImageClassification.from_pretrained("google/vit-base-patch16-224-in21k")
        >>> model = get_peft_model(vit, LucaConfig(classes=["cat", "dog"]))
        ```
    """

    prefix: str = "luca_"
    tuner_layer_cls = LucaLayer
    model: Any
    peft_config: dict[str, Any]
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012 - PEFT's name; the head is found in _prepare_model

    def __init__(self, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, PeftModel):
            raise ValueError(
                f"this model is a PeftModel with {model.peft_type} adapters already. LuCA goes on what is inside: "
                "pass model.get_base_model(), in which those adapters stay at work as a frozen part of the backbone."
            )
        # Adapters of another method inside the backbone keep their own configs, which PEFT would mix with ours.
        foreign = vars(model).get("peft_config") or {}
        self_made = all(isinstance(config, LucaConfig) for config in foreign.values())
        before = Untouched.of(model)
        peft_config = _Configs(peft_config if isinstance(peft_config, dict) else {adapter_name: peft_config})
        try:
            if not self_made:
                del model.peft_config
            super().__init__(model, peft_config, adapter_name, *args, **kwargs)
        except BaseException:
            before.give_back(model)
            raise
        self._before = before
        self._backbone_peft_config = None if self_made else foreign

    # ---- what PEFT calls when an expert is added -----------------------------------------------------------------

    def _pre_injection_hook(self, model: nn.Module, config: Any, adapter_name: str) -> None:
        self._base_outputs = Outputs.of(model)
        for layer in luca_layers(model):  # injected by another tuner, which has changed the model's labels since
            self._base_outputs = layer.base_outputs

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> LucaConfig:
        return peft_config  # PEFT's version looks the targets up by model type alone; see _prepare_model

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        head = find_head(model, peft_config)
        adapter_name = next(name for name, known in self.peft_config.items() if known is peft_config)
        check_expert_name(adapter_name, model, head.name)
        if peft_config.target_modules is None:
            peft_config.filled.add("target_modules")
        peft_config.target_modules = [head.name]
        if peft_config.classes is None:
            peft_config.classes = self._base_outputs.names(model.get_submodule(head.name))
            peft_config.filled.add("classes")
        peft_config.resolve()
        peft_config.check_head(peft_config.classes)
        if peft_config.fingerprint is None:
            peft_config.fingerprint = BackboneFacts.of(model, head.name).fingerprint

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, LucaLayer):
            target.update_layer(adapter_name, peft_config)
            return
        head = find_head(self.model, peft_config)
        layer = LucaLayer(target, width=head.width, input_width=head.input_width)
        layer.base_outputs = self._base_outputs
        layer.set_adapter(self.active_adapters)
        layer.update_layer(adapter_name, peft_config)
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        # PEFT's version asks the head for its weight, which the Identity of a base without labels does not have.
        setattr(parent, child_name, new_module)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        # PEFT sets the active adapter again at the end; adding an expert must not switch the router off.
        layers = luca_layers(model)
        router = (layers[0].router, layers[0].router_options) if layers else (None, {})
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        self.layer.router, self.layer.router_options = router
        # As train() keeps it: dropout in the trunk would move [CLS], and the reference with it.
        self.model.eval()
        self.layer.train(self.training)
        own = {id(parameter) for parameter in self.layer.parameters()}
        for parameter in self.model.parameters():
            if id(parameter) not in own:  # PEFT leaves other adapters in the backbone trainable
                parameter.requires_grad = False
        self._follow_outputs()

    # ---- PEFT's verbs --------------------------------------------------------------------------------------------

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """
        Let one expert answer, over its own classes. Switches the router off.

        Raises:
            ValueError: several names. Use [`~LucaModel.set_router`] to let all experts be asked.
        """
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        if len(names) > 1:
            raise ValueError(
                f"one expert is active at a time, got {names}. Use set_router('entropy') to ask all experts and let "
                "the most certain one answer each image."
            )
        if not set(names) <= set(self.peft_config):
            raise ValueError(f"there is no expert {names[0]!r}. The model has {', '.join(self.peft_config)}.")
        super().set_adapter(adapter_name, inference_mode=inference_mode)
        if self.targeted_module_names:
            self.layer.router, self.layer.router_options = None, {}
            self._follow_outputs()

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """
        Let experts be trained, or freeze them, without making them active.

        Raises:
            ValueError: there is no such expert.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        unknown = [name for name in names if name not in self.experts]
        if unknown:
            raise ValueError(f"there is no expert {unknown[0]!r}. The model has {', '.join(self.experts)}.")
        super().set_requires_grad(names, requires_grad)

    def delete_adapter(self, adapter_name: str) -> None:
        """
        Forget an expert: what is left is exactly the model that never had it.

        Raises:
            ValueError: there is no such expert, or it is the only one.
        """
        if list(self.peft_config) == [adapter_name]:
            raise ValueError(
                f"{adapter_name!r} is the only expert, and PEFT cannot run a model without one. Use unload() to get "
                "the backbone back."
            )
        with warnings.catch_warnings():
            if self.targeted_module_names and self.layer.router is not None:
                # PEFT warns that another expert is active now, but with the router on every expert is asked anyhow.
                warnings.filterwarnings("ignore", message=f"Adapter {re.escape(adapter_name)} was active")
            super().delete_adapter(adapter_name)
        self._follow_outputs()

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        # Not super()'s, which would disable the adapters of other methods inside the backbone as well.
        self.layer.enable_adapters(enabled)
        self._follow_outputs()

    @contextmanager
    def _enable_peft_forward_hooks(
        self, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any
    ) -> Iterator[None]:
        """
        Let the experts in `adapter_names`, one for each image of the batch, answer over the global label space: what
        `model(pixel_values, adapter_names=[...])` calls.
        """
        self._keep_calm()
        if adapter_names is None:
            yield
            return
        if self.training:
            raise ValueError(
                "Cannot pass `adapter_names` when the model is in training mode. Call model.eval() first."
            )
        if "__base__" in adapter_names:
            raise ValueError(
                "adapter_names has '__base__', but the base model's own head knows other classes than the experts do, "
                "so that one batch cannot hold both answers. Run those images within `model.disable_adapter()`."
            )
        wanted = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        unknown = sorted({str(name) for name in wanted if not isinstance(name, str) or name not in self.experts})
        if unknown:
            raise ValueError(
                f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. The model has "
                f"{', '.join(self.experts)}."
            )
        thread = threading.get_ident()

        def name(layer: LucaLayer, inputs: Any, named: dict[str, Any]) -> Any:
            if threading.get_ident() != thread:  # the names are of this thread's images
                return None
            return inputs, {**named, "adapter_names": list(adapter_names)}

        handle = self.layer.register_forward_pre_hook(name, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def unload(self) -> nn.Module:
        """Take the experts off and give back the model as it was. Other methods' adapters inside it stay."""
        parent, _, head = self.targeted_module_names[0].rpartition(".")
        setattr(self.model.get_submodule(parent), head, self.layer.base_layer)
        del self.model.peft_config
        if self._backbone_peft_config is not None:
            self.model.peft_config = self._backbone_peft_config
        self._base_outputs.apply(self.model)
        model: nn.Module = self.model
        return model

    def take_back(self) -> None:
        """Undo the making of the model, also what was frozen and put into eval mode: its experts are refused."""
        self._before.give_back(self.model)

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refused: experts cannot be averaged."""
        raise NotImplementedError(
            "LuCA experts cannot be averaged: each has rows for its own classes, and none is a change of the same "
            "weights. Keep them side by side and let set_router('entropy') choose for each image."
        )

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(MERGE_REFUSED)

    def unmerge_adapter(self) -> None:
        raise NotImplementedError(MERGE_REFUSED)

    def _check_merge_allowed(self) -> None:
        raise NotImplementedError(MERGE_REFUSED)

    def train(self, mode: bool = True) -> LucaModel:
        """Only the experts change mode: the frozen trunk stays in eval mode, so that dropout cannot move [CLS]."""
        if self.training != mode or self.layer.training != mode or self.model.training:  # Trainer asks at every step
            super().train(mode)
            self.model.eval()
            self.layer.train(mode)
        return self

    def _keep_calm(self) -> None:
        if self.model.training:  # by its own train(), past this one's
            self.train(self.training)

    def __repr__(self) -> str:
        # Of the backbone only what it is: print(model.get_base_model()) has its modules.
        if not self.targeted_module_names:  # something went wrong on the way
            return super().__repr__()
        name = getattr(self.model, "name_or_path", "") or "unnamed"
        lines = [f"{type(self.model).__name__} ({name})", *self.layer.described()]
        return "LucaModel(\n  " + "\n  ".join(lines) + "\n)"

    # ---- experts and routing -------------------------------------------------------------------------------------

    @property
    def layer(self) -> LucaLayer:
        """The layer that holds the experts."""
        layer = self.model.get_submodule(self.targeted_module_names[0])
        if not isinstance(layer, LucaLayer):
            raise RuntimeError(
                "this model has no experts any more: unload() has taken them off. Go on with the backbone that it "
                "returned, or put experts onto that with get_peft_model or load_experts."
            )
        return layer

    @property
    def experts(self) -> dict[str, tuple[str, ...]]:
        """Names of the experts, in their order, with their classes."""
        return {name: tuple(config.classes or ()) for name, config in self.layer.configs.items()}

    @property
    def classes(self) -> tuple[str, ...]:
        """The global label space: the class names of all experts in order of first appearance."""
        return self.layer.label_space.classes

    def set_router(self, router: str | Router | StatisticsRouter | Oracle | None, **options: Any) -> None:
        """
        Ask all experts, and let the router choose who answers each image, by itself: logits are then (batch, C) over
        the global label space, and `config.id2label` follows.

        Args:
            router (`str`, function or `None`):
                By scores: `"entropy"` (the paper's), `"max_prob"`, `"margin"`, `"energy"`, or a function of scores
                `(batch, experts, C)` that returns `(batch, experts)`, the lowest for the expert that should answer.
                By the experts' statistics: `"gaussian"` (recommended), `"prototype"`, `"ridge"`, `"hybrid"`.
                `"oracle"` is told the expert of each image. `None` goes back to the active expert alone.
            options: Passed to the router, such as `temperature=2.0`; and [`~peft_luca.routing.RouterOptions`].

        Raises:
            ValueError:
                there is no router of that name, it does not take the options, or an expert lacks the statistics that
                it needs.
        """
        if router is None:
            if options:
                raise ValueError(f"no router, so no options: got {sorted(options)}.")
            self.layer.set_router(None, {})
        else:
            function = get_router(router)
            before = self.layer.router, self.layer.router_options
            try:
                common, own = RouterOptions.split(options)
                if callable(function):
                    function(torch.zeros(1, 2, 3), **own)
                elif own and isinstance(function, Oracle):
                    raise TypeError(f"the oracle takes none, got {sorted(own)}")
                elif common.routing_scope == "batch":
                    raise ValueError(f"routing_scope='batch' goes with routers of scores only, got {router!r}.")
                self.layer.set_router(function, options)
            except BaseException as error:
                self.layer.router, self.layer.router_options = before
                if isinstance(error, TypeError):
                    raise ValueError(f"the router {router!r} does not take these options: {error}") from error
                raise
            if common.routing_scope == "batch":
                warnings.warn(
                    "routing_scope='batch' lets one expert answer a whole batch, as the released evaluation does: the "
                    "accuracy then depends on how the images are ordered and batched, and over a test set sorted by "
                    "class it leaks the task. Use it for comparison with published figures only.",
                    stacklevel=2,
                )
        self._follow_outputs()

    def set_over_all_classes(self, enabled: bool) -> None:
        """Let the active expert answer over the rows of all experts' classes, (batch, C), and not over its own K."""
        self.layer.over_all_classes = enabled
        self._follow_outputs()

    @torch.no_grad()
    def pooled_features(self, pixel_values: Tensor) -> Tensor:
        """[CLS] of images `(batch, channels, height, width)` → `(batch, d)`: one pass of the trunk, no expert."""
        self._keep_calm()
        with reading_features():
            output = self.model(pixel_values)
        features: Tensor = output if isinstance(output, Tensor) else output.logits
        if features.shape[-1] != self.layer.width:
            raise RuntimeError(
                f"the backbone returned {features.shape[-1]} numbers in place of [CLS], {self.layer.width} wide: it "
                "was compiled by itself, and its graph cannot stop before the experts. Compile the PeftModel instead."
            )
        return features

    @contextmanager
    def taking_features(self) -> Iterator[None]:
        """
        Within this context the model takes `features=` `(batch, d)`, [CLS] computed before, in place of images, and
        does not run the trunk. Everything around it (PeftModel, DDP, autocast) stays as it is.
        """

        def forward(features: Tensor, **kwargs: Any) -> ImageClassifierOutput:
            return ImageClassifierOutput(logits=self.layer.logits(features))

        self.model.forward = forward
        try:
            yield
        finally:
            del self.model.forward

    @torch.no_grad()
    def route(self, pixel_values: Tensor, expert: Tensor | None = None) -> RoutingOutput:
        """
        Who answers each image, and how certain every expert is, with one pass of the trunk.

        Args:
            pixel_values (`torch.Tensor` of shape `(batch, channels, height, width)`): Preprocessed images.
            expert (`torch.Tensor` of shape `(batch,)`, *optional*): With the oracle, who is to answer each image.

        Returns:
            [`RoutingOutput`]: by the router that is set, or by entropy.
        """
        return self.layer.route(self.pooled_features(pixel_values), expert)

    def collect_statistics(
        self,
        adapter_name: str,
        features: Tensor,
        labels: Tensor,
        rank: int | None = DEFAULT_RANK,
        random_features: int = 0,
    ) -> ClassStatistics:
        """
        Give an expert the statistics that `"gaussian"`, `"prototype"`, `"hybrid"` and `"ridge"` need.
        [`ContinualTrainer`] does.

        Args:
            adapter_name (`str`): The expert.
            features (`torch.Tensor` of shape `(images, d)`): [CLS] of its training images, as they leave the trunk.
            labels (`torch.Tensor` of shape `(images,)`): The expert's own ids, 0 … K-1.
            rank, random_features: See [`~peft_luca.statistics.ClassStatistics.collect`].
        """
        layer = self.layer
        device = layer.label_space.device

        def prepare(z: Tensor) -> Tensor:
            return layer.unit_features(z.to(device), adapter_name).cpu()

        classes = self.experts[adapter_name]
        statistics = ClassStatistics.collect(features.cpu(), labels.cpu(), classes, rank, random_features, prepare)
        layer.statistics[adapter_name] = statistics
        layer._statistics_routing = None
        return statistics

    def l1_penalty(self, adapter_name: str | None = None) -> Tensor:
        """
        Σ|θ| over the LuCA parameters of an expert, a scalar with gradient, to be added to the loss in one's own loop
        (the paper's λ is 5e-4).

        Args:
            adapter_name (`str`, *optional*): The expert; the active one by default.
        """
        return self.layer.l1_penalty(adapter_name or self.active_adapters[0])

    # ---- the backbone --------------------------------------------------------------------------------------------

    @property
    def backbone(self) -> BackboneFacts:
        """Fingerprint of the backbone as it is now, and its reference."""
        return BackboneFacts.of(self.model, self.targeted_module_names[0])

    def compute_reference(self, adapter_name: str | None = None) -> None:
        """
        Measure the backbone's mean and deviation of [CLS] over the reference pictures, and standardise an expert's
        input by it. To be called before training; [`ContinualTrainer`] does. Does nothing for an expert that has a
        reference already, since its weights were learnt behind it.

        Args:
            adapter_name (`str`, *optional*): The expert; the active one by default.
        """
        name = adapter_name or self.active_adapters[0]
        mean, std = self.layer.luca_reference_mean[name], self.layer.luca_reference_std[name]
        if mean.is_meta or is_identity(mean, std):  # on the meta device that asks for the weights
            reference = self.backbone.reference(self.pooled_features)
            mean.copy_(reference[0])
            std.copy_(reference[1])

    # ---- saving and loading --------------------------------------------------------------------------------------

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
        lost = [key for key in expected if key not in state_dict]
        if lost:
            raise RuntimeError(
                f"saving expert {adapter_name!r} would lose {lost}. Nothing was written. Give the experts other names."
            )
        return {key: state_dict[key] for key in expected}

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        # The last point before the weights arrive at which PEFT lets a tuner see them.
        remapped: dict[str, Tensor] = super()._remap_adapter_state_dict_for_load(
            model, config, adapter_name, state_dict
        )
        path, layer = find_layer(model)
        try:
            expected = layer.tensors(adapter_name)
            missing = {f"{path}.{key}" for key in expected} - set(remapped)
            if missing:
                raise ValueError(
                    f"the file of expert {adapter_name!r} lacks {sorted(missing)}. It is not whole, or was made by "
                    "another configuration: nothing of it was loaded."
                )
            check_backbone(model, config, adapter_name, state_dict)
            check_same_reference(layer, adapter_name, state_dict)
            tensors = {key: remapped[f"{path}.{key}"] for key in expected}
            other = None if layer.is_untrained(adapter_name) else layer.twin(adapter_name, tensors)
            if other is not None:
                raise ValueError(
                    f"these are the weights of expert {other!r}, and would replace what {adapter_name!r} has learnt. "
                    "If this is load_best_model_at_end of transformers, it knows only an expert called 'default': the "
                    f"checkpoint has a folder {adapter_name!r}, which model.load_adapter(folder, {adapter_name!r}) "
                    f"loads. To make a copy of {other!r}, delete {adapter_name!r} first."
                )
        except ValueError:
            if isinstance(model, PeftModel) and layer.is_untrained(adapter_name):  # made for what is refused
                tuner: Any = model.base_model
                tuner.take_back() if len(tuner.peft_config) == 1 else tuner.delete_adapter(adapter_name)
            raise
        return remapped

    # ---- labels and loss -----------------------------------------------------------------------------------------

    def _follow_outputs(self) -> None:
        """Make the model's labels and loss those of what answers now."""
        layer = self.layer
        if layer.disable_adapters or not layer.active_adapters:
            self._base_outputs.apply(self.model)
        else:
            all_classes = layer.router is not None or layer.over_all_classes
            names = self.classes if all_classes else self.experts[layer.active_adapters[0]]
            Outputs.of_expert(names).apply(self.model)


@contextmanager
def quiet_peft() -> Iterator[None]:
    """PEFT asks transformers for an attribute by its old name, which is nothing a user can mend."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
