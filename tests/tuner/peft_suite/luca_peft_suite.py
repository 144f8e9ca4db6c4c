"""
A pytest plugin that runs PEFT's own tests, unedited, on LuCA: it puts LuCA's configurations in the place of the values
with which the tests are parametrized, and deselects tests that are not parametrized by a method. See test_upstream.py.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType
from typing import Any

import pytest

from peft_luca import LucaConfig


# (name, model of PEFT's tests, arguments of LucaConfig). Classes default to the numbers of the head's outputs, so that
# a layer in the middle of a network keeps its width.
CASES: list[tuple[str, str, type, dict[str, Any]]] = [
    ("LuCA on a head", "MLP", LucaConfig, {"target_modules": ["lin1"], "reduction": 2}),
    ("LuCA on a head, by a string", "MLP", LucaConfig, {"target_modules": "lin1", "reduction": 2}),
    ("LuCA in the middle", "MLP", LucaConfig, {"target_modules": ["lin0"], "reduction": 2}),
    ("free scale", "MLP", LucaConfig, {"target_modules": ["lin1"], "reduction": 2, "positive_scale": False}),
    (
        "norm before the residual",
        "MLP",
        LucaConfig,
        {"target_modules": ["lin1"], "reduction": 2, "norm_position": "before_residual"},
    ),
    *(
        (arrangement, "MLP", LucaConfig, {"target_modules": ["lin1"], "reduction": 2, "arrangement": arrangement})
        for arrangement in ("calibrator_adapter", "parallel", "adapter", "calibrator")
    ),
    (
        "classes of its own",
        "MLP",
        LucaConfig,
        {"target_modules": ["lin1"], "reduction": 2, "classes": ["cat", "dog", "owl"]},
    ),
    ("a wider network", "MLP2", LucaConfig, {"target_modules": ["lin1"]}),
    ("behind embeddings and Conv1D", "EmbConv1D", LucaConfig, {"target_modules": ["lin0"], "reduction": 2}),
    ("behind Conv2d", "Conv2d", LucaConfig, {"target_modules": ["lin0"], "reduction": 2}),
]
VALUES: dict[tuple[str, ...], list[Any]] = {
    ("test_name", "model_id", "config_cls", "config_kwargs"): CASES,
    ("config_cls",): [LucaConfig],
    ("config_class", "mandatory_kwargs"): [(LucaConfig, {})],
}

MERGES = "merges, and an expert is no change of weights that could be merged: refused in words"
MODULES_TO_SAVE = "modules_to_save, which LucaConfig does not have: the class rows are part of the expert"
LAST = "deletes the last adapter, after which PEFT cannot run the model: refused in words, for unload()"
ONE_HEAD = "targets several modules, or others per adapter: LuCA takes the place of exactly one head"
HUB = "reads a repo on the Hub"
OTHER_WORDS = "expects PEFT's message or table of targets; LuCA finds the head itself and says what it looked for"

# What a test's id must match → why it cannot hold for LuCA. Everything else must pass.
EXCLUSIONS: dict[str, str] = {
    r"::test_(merge_layers|safe_merge|disable_adapters_with_merging|delete_merged_adapter)": MERGES,
    r"::test_forward_b?float16": MERGES + " (tests/tuner/test_peft_verbs.py has half precision without merging)",
    r"::test_delete_(adapter|inactive_adapter|adapter_properly_cleans_up_after_itself)\[": LAST,
    r"::test_active_adapter\[": "makes two adapters active at once; one expert is active, or a router chooses",
    r"::test_disable_adapters\[": "expects a new adapter to change nothing; an expert has class rows of its own",
    r"::test_save_load_roundtrip\[classes of its own": "compares with the base's outputs, of another width",
    r"::test_save_load_roundtrip_fsdp_wrapped\[": "FSDP1 shards no scalar parameters, and σ is one",
    r"modules_to_save": MODULES_TO_SAVE,
    r"::test_set_requires_grad\[": MODULES_TO_SAVE,
    r"::test_set_adapter_non_overlapping_modules": ONE_HEAD,
    r"::test_loading_model_requires_grad_set_correctly": "loads onto other random weights: an expert refuses them",
    r"::TestDefaultTargetModules::": OTHER_WORDS,
    r"::test_valid_task_type\[(?!None)": "task types other than None: LucaConfig refuses them with the reason",
    r"::test_from_pretrained(_cache_dir)?\[LucaConfig": HUB,
    r"::test_save_pretrained_with_runtime_config": "sets runtime_config, which belongs to LoRA",
    r"::test_config_layers_to_transform_index_zero": "layers_to_transform, which is for methods on many layers",
}


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("diffusers") is None:
        # PEFT's helpers import it for a test of theirs that is not run here.
        stand_in: Any = ModuleType("diffusers")
        stand_in.StableDiffusionPipeline = object
        sys.modules["diffusers"] = stand_in


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    helper = getattr(metafunc.module, "set_init_weights_false", None)
    if helper is not None and not hasattr(helper, "knows_luca"):
        metafunc.module.set_init_weights_false = _without_init_weights(helper)
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0]
        names = tuple(part.strip() for part in names.split(",")) if isinstance(names, str) else tuple(names)
        if names in VALUES:
            # The hook that reads the mark comes after this one. A mark is frozen, its arguments can be replaced.
            object.__setattr__(mark, "args", (mark.args[0], VALUES[names], *mark.args[2:]))


def _without_init_weights(helper: Any) -> Any:
    """PEFT's helper asks new adapters not to start as the identity; LuCA's never do and have no such switch."""

    def set_init_weights_false(config_cls: type, kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(kwargs) if config_cls is LucaConfig else helper(config_cls, kwargs)

    set_init_weights_false.knows_luca = True  # type: ignore[attr-defined]
    return set_init_weights_false


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if LucaConfig not in _values(item)]
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=others)
    for item in items:
        for pattern, reason in EXCLUSIONS.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f"excluded for LuCA: {reason}"))
                break


def _values(item: pytest.Item) -> list[Any]:
    callspec = getattr(item, "callspec", None)
    return [] if callspec is None else [value for value in callspec.params.values() if isinstance(value, type)]
