"""Every verb of PEFT on LuCA experts, one or several, of equal and unequal class counts: works or says why not."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import (
    AutoPeftModel,
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from peft.utils.hotswap import hotswap_adapter
from tiny_models import (
    ANIMALS,
    SKIES,
    TREES,
    expert_config,
    logits,
    pictures,
    tiny_vit,
    trainable,
    weights,
    with_experts,
)
from torch import nn

from peft_luca import LucaConfig, LucaLayer, LucaModel


EQUAL = {"animals": ANIMALS, "trees": TREES}
UNEQUAL = {"animals": ANIMALS, "skies": SKIES, "moreskies": ["moon", "star", "comet", "fog"]}
ONE = {"animals": ANIMALS}
collections = pytest.mark.parametrize("experts", [ONE, EQUAL, UNEQUAL], ids=["one", "equal", "unequal"])
several = pytest.mark.parametrize("experts", [EQUAL, UNEQUAL], ids=["equal", "unequal"])


def classes_of(experts: dict[str, list[str]]) -> list[str]:
    return list(dict.fromkeys(name for classes in experts.values() for name in classes))


def labels(model: nn.Module) -> list[str]:
    config: Any = model.config
    assert config.num_labels == len(config.id2label)
    return [config.id2label[i] for i in range(config.num_labels)]


def save(model: PeftModel, directory: Path, **kwargs: Any) -> None:
    model.save_pretrained(str(directory), save_embedding_layers=False, **kwargs)


# ---- adding, choosing, deleting -------------------------------------------------------------------------------------


@collections
def test_get_peft_model_and_add_adapter(experts: dict[str, list[str]]) -> None:
    model = with_experts(**experts)
    assert isinstance(model, PeftModel)
    assert isinstance(model.base_model, LucaModel)
    assert model.active_adapter == "animals"
    assert list(model.peft_config) == list(experts)
    assert trainable(model) == {"animals"}
    assert logits(model).shape == (4, 3)
    assert labels(model) == ANIMALS


def test_adding_an_expert_of_a_name_that_is_taken_is_refused() -> None:
    model = with_experts(**ONE)
    with pytest.raises(ValueError, match="already exists"):
        model.add_adapter("animals", expert_config(SKIES))


def test_an_expert_that_cannot_be_added_leaves_the_model_as_it_was() -> None:
    model = with_experts(**ONE)
    before = weights(model)
    with pytest.raises(ValueError, match="reduction is 32, but"):
        model.add_adapter("trees", LucaConfig(classes=TREES, reduction=32))
    assert weights(model).keys() == before.keys()
    assert list(model.experts) == ["animals"]
    model.add_adapter("trees", expert_config(TREES))
    model.set_adapter("trees")
    assert labels(model) == TREES


@several
def test_set_adapter_changes_logits_labels_and_what_is_trained(experts: dict[str, list[str]]) -> None:
    model = with_experts(**experts)
    answers = {}
    for name, classes in experts.items():
        model.set_adapter(name)
        answers[name] = logits(model)
        assert answers[name].shape == (4, len(classes))
        assert labels(model) == classes
        assert trainable(model) == {name}
    model.set_adapter("animals")
    torch.testing.assert_close(logits(model), answers["animals"], rtol=0, atol=0)
    model.set_adapter("animals", inference_mode=True)
    assert not trainable(model)


@several
def test_set_adapter_switches_the_router_off_and_adding_leaves_it_on(experts: dict[str, list[str]]) -> None:
    model = with_experts(**experts)
    model.set_router("entropy")
    assert labels(model) == classes_of(experts)
    model.add_adapter("rocks", expert_config(["flint", "slate"]))
    assert labels(model) == [*classes_of(experts), "flint", "slate"]
    assert logits(model).shape[1] == len(classes_of(experts)) + 2
    model.delete_adapter("rocks")
    assert labels(model) == classes_of(experts)
    model.set_adapter("animals")
    assert labels(model) == ANIMALS


def test_set_adapter_refuses_what_is_not_there_and_several_at_once() -> None:
    model = with_experts(**EQUAL)
    with pytest.raises(ValueError, match="not found"):
        model.set_adapter("rocks")
    with pytest.raises(ValueError, match=r"there is no expert 'rocks'\. The model has animals, trees"):
        model.base_model.set_adapter("rocks")
    for names in (["animals", "trees"], ["animals"]):  # PEFT's own verb takes no list
        with pytest.raises(ValueError, match=r"named by a string, got \['animals.*One expert is active .* set_router"):
            model.set_adapter(names)
    with pytest.raises(ValueError, match=r"one expert is active at a time, got .* Use set_router"):
        model.base_model.set_adapter(["animals", "trees"])
    for known in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="an expert is named by a string"):
            known.set_adapter(["animals"])
        assert known.active_adapters == ["animals"]


@several
def test_delete_adapter_gives_the_model_that_never_had_it(experts: dict[str, list[str]]) -> None:
    model = with_experts(**experts)
    twin = copy.deepcopy(model)
    model.add_adapter("rocks", expert_config(["flint", "slate"]))
    model.delete_adapter("rocks")
    assert weights(model).keys() == weights(twin).keys()
    model.set_router("entropy")
    twin.set_router("entropy")
    torch.testing.assert_close(logits(model), logits(twin), rtol=0, atol=0)


@several
def test_deleting_the_active_expert_makes_another_active_and_says_so(experts: dict[str, list[str]]) -> None:
    model = with_experts(**experts)
    with pytest.warns(UserWarning, match="Adapter animals was active which is now deleted"):
        model.delete_adapter("animals")
    assert labels(model) == list(model.experts[model.active_adapter])
    assert logits(model).shape == (4, len(labels(model)))


def test_the_last_expert_cannot_be_deleted() -> None:
    model = with_experts(**ONE)
    with pytest.raises(ValueError, match=r"'animals' is the only expert.*Use unload\(\)"):
        model.delete_adapter("animals")
    assert logits(model).shape == (4, 3)
    with pytest.raises(ValueError, match="does not exist"):
        model.delete_adapter("rocks")


# ---- switching off, freezing, taking off ----------------------------------------------------------------------------


@collections
@pytest.mark.parametrize("router", [None, "entropy"])
def test_disable_adapter_is_the_base_and_re_enabling_restores_all(
    experts: dict[str, list[str]], router: str | None
) -> None:
    base = tiny_vit()
    model = with_experts(**experts)
    model.set_router(router)
    before, names, trained = logits(model), labels(model), trainable(model)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(base), rtol=0, atol=0)
        assert labels(model) == ["LABEL_0", "LABEL_1"]
        with model.disable_adapter():
            pass
        assert labels(model) == ["LABEL_0", "LABEL_1"]
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    assert labels(model) == names
    assert trainable(model) == trained


def test_re_enabling_does_not_thaw_a_frozen_expert(tmp_path: Path) -> None:
    save(with_experts(**EQUAL), tmp_path)
    model = PeftModel.from_pretrained(tiny_vit(), str(tmp_path / "trees"), adapter_name="trees")
    assert not trainable(model)
    with model.disable_adapter():
        pass
    assert not trainable(model)


@several
def test_set_requires_grad(experts: dict[str, list[str]]) -> None:
    model = with_experts(**experts)
    names = list(experts)
    model.set_requires_grad(names[1])
    assert trainable(model) == set(names[:2])
    model.set_requires_grad(names, requires_grad=False)
    assert not trainable(model)


@collections
def test_unload_gives_back_the_untouched_base(experts: dict[str, list[str]]) -> None:
    base = tiny_vit()
    before, config, loss = weights(base), copy.deepcopy(base.config.to_dict()), base.loss_function
    model = with_experts(base, **experts)
    model.set_router("entropy")
    unloaded = model.unload()
    assert unloaded is base
    assert weights(unloaded).keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(unloaded).items())
    assert unloaded.config.to_dict() == config
    assert unloaded.loss_function is loss
    assert type(unloaded.classifier) is nn.Linear
    assert not hasattr(unloaded, "peft_config")
    assert logits(with_experts(unloaded, **experts)).shape == (4, 3)  # and can be wrapped again


def test_unload_of_a_base_without_a_head() -> None:
    base = tiny_vit(num_labels=0)
    assert isinstance(base.classifier, nn.Identity)
    model = with_experts(base, **ONE)
    assert logits(model).shape == (4, 3)
    assert isinstance(model.unload().classifier, nn.Identity)


# ---- saving and loading ---------------------------------------------------------------------------------------------


@collections
def test_save_and_load_each_expert(experts: dict[str, list[str]], tmp_path: Path) -> None:
    model = with_experts(**experts)
    save(model, tmp_path)
    loaded: PeftModel | None = None
    for name in experts:
        if loaded is None:
            loaded = PeftModel.from_pretrained(tiny_vit(), str(tmp_path / name), adapter_name=name)
        elif name == "skies":
            loaded.load_adapter(str(tmp_path), name, subfolder=name)
        else:
            loaded.load_adapter(str(tmp_path / name), name)
    assert loaded is not None
    assert loaded.experts == model.experts
    for name in experts:
        model.set_adapter(name)
        loaded.set_adapter(name)
        torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
    model.set_router("entropy")
    loaded.set_router("entropy")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)


@several
def test_selected_adapters(experts: dict[str, list[str]], tmp_path: Path) -> None:
    names = list(experts)
    save(with_experts(**experts), tmp_path, selected_adapters=names[:1])
    assert (tmp_path / names[0] / "adapter_model.safetensors").is_file()
    assert not (tmp_path / names[1]).exists()


@pytest.mark.parametrize("is_trainable", [False, True])
def test_is_trainable(is_trainable: bool, tmp_path: Path) -> None:
    save(with_experts(**UNEQUAL), tmp_path)
    model = PeftModel.from_pretrained(
        tiny_vit(), str(tmp_path / "skies"), adapter_name="skies", is_trainable=is_trainable
    )
    assert trainable(model) == ({"skies"} if is_trainable else set())
    model.load_adapter(str(tmp_path / "animals"), "animals", is_trainable=is_trainable)
    assert trainable(model) == ({"skies", "animals"} if is_trainable else set())
    assert model.peft_config["skies"].inference_mode is not is_trainable


def test_auto_peft_model(tmp_path: Path) -> None:
    tiny_vit().save_pretrained(tmp_path / "base")
    base = type(tiny_vit()).from_pretrained(tmp_path / "base")
    model = get_peft_model(base, expert_config(UNEQUAL["moreskies"]))
    save(model, tmp_path / "expert")
    loaded = AutoPeftModel.from_pretrained(str(tmp_path / "expert"))
    assert type(loaded.get_base_model()) is type(base)
    torch.testing.assert_close(logits(loaded), logits(model.eval()), rtol=0, atol=0)
    config = PeftConfig.from_pretrained(str(tmp_path / "expert"))
    assert isinstance(config, LucaConfig)
    assert config.classes == UNEQUAL["moreskies"]


def test_load_from_the_hub_by_id_and_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The Hub's cache as a download would leave it, read offline: ids and revisions go the whole of PEFT's own way.
    # (Offline, PEFT 0.21 looks for a Hub repo's subfolder twice over, "inner/inner/…", for every method.)
    model = with_experts(default=ANIMALS)
    repo = tmp_path / "models--lab--vit-animals"
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        with torch.no_grad():
            model.base_model.layer.luca_class_rows["default"].add_(float(revision == "v2"))
        save(model, repo / "snapshots" / commit)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loaded = PeftModel.from_pretrained(tiny_vit(), "lab/vit-animals", revision="v2", cache_dir=str(tmp_path))
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
    loaded.load_adapter("lab/vit-animals", "first", cache_dir=str(tmp_path))
    loaded.set_adapter("first")
    assert not torch.equal(logits(loaded), logits(model))


@several
def test_state_dicts(experts: dict[str, list[str]]) -> None:
    model, other = with_experts(**experts), with_experts(tiny_vit(), **experts)
    for name in experts:
        state = get_peft_model_state_dict(model, adapter_name=name)
        assert len(state) == 12
        assert not any(name in key for key in state)
        result = set_peft_model_state_dict(other, state, adapter_name=name)
        assert not result.unexpected_keys
        model.set_adapter(name)
        other.set_adapter(name)
        torch.testing.assert_close(logits(other), logits(model), rtol=0, atol=0)


def test_rows_of_another_number_of_classes_are_refused_and_named() -> None:
    model = with_experts(**UNEQUAL)
    state = get_peft_model_state_dict(model, adapter_name="animals")
    with pytest.raises(RuntimeError, match=r"luca_class_rows\.skies"):
        set_peft_model_state_dict(model, state, adapter_name="skies")


def test_low_cpu_mem_usage(tmp_path: Path) -> None:
    model = with_experts(**UNEQUAL)
    save(model, tmp_path)
    empty = get_peft_model(tiny_vit(), expert_config(), low_cpu_mem_usage=True)
    assert all(p.is_meta for name, p in empty.named_parameters() if "luca_" in name)
    loaded = PeftModel.from_pretrained(
        tiny_vit(), str(tmp_path / "animals"), adapter_name="animals", low_cpu_mem_usage=True
    )
    loaded.load_adapter(str(tmp_path / "skies"), "skies", low_cpu_mem_usage=True)
    assert not any(tensor.is_meta for tensor in loaded.state_dict().values())
    for name in ("animals", "skies"):
        model.set_adapter(name)
        loaded.set_adapter(name)
        torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)


def test_a_base_on_the_meta_device() -> None:
    with torch.device("meta"):
        base = tiny_vit()
    model = get_peft_model(base, expert_config())
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert model.peft_config["default"].fingerprint is None  # nothing to take it of
    assert model(pictures().to("meta")).logits.shape == (4, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_half_precision_base(dtype: torch.dtype, autocast: bool, tmp_path: Path) -> None:
    base = tiny_vit().to(dtype)
    model = get_peft_model(base, expert_config(), adapter_name="animals", autocast_adapter_dtype=autocast)
    model.add_adapter("skies", expert_config(SKIES), autocast_adapter_dtype=autocast)
    layer = model.base_model.layer
    expected = torch.float32 if autocast else dtype
    assert {p.dtype for name, p in layer.named_parameters() if "luca_" in name} == {expected}
    assert {b.dtype for b in layer.buffers()} == {torch.float32}  # the reference keeps its precision
    model.eval()
    assert logits(model, pictures().to(dtype)).dtype == expected
    model.set_router("entropy")
    answer = logits(model, pictures().to(dtype))
    assert answer.shape == (4, 5)
    assert answer.isfinite().all()
    save(model, tmp_path)
    loaded = PeftModel.from_pretrained(
        tiny_vit().to(dtype), str(tmp_path / "animals"), adapter_name="animals", autocast_adapter_dtype=autocast
    )
    model.set_adapter("animals")
    torch.testing.assert_close(
        logits(loaded, pictures().to(dtype)), logits(model, pictures().to(dtype)), rtol=0, atol=0
    )


def test_without_importing_peft_luca_the_config_says_what_to_do(tmp_path: Path) -> None:
    save(with_experts(default=ANIMALS), tmp_path)
    program = "import sys; from peft import PeftConfig; PeftConfig.from_pretrained(sys.argv[1])"
    process = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert process.stderr.strip().endswith("KeyError: 'LUCA'")  # all that PEFT says of a type it does not know
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "`import peft_luca` before loading" in content["read_with"]
    content["read_with"] = "something else"
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    assert "import peft_luca" in PeftConfig.from_pretrained(str(tmp_path)).read_with


# ---- an expert for each image ---------------------------------------------------------------------------------------


@several
def test_mixed_batch_answers_as_each_expert_alone(experts: dict[str, list[str]]) -> None:
    model = with_experts(**experts)
    pixels = pictures(6)
    names = [list(experts)[i % len(experts)] for i in (1, 0, 1, 2, 0, 2)]
    mixed = logits(model, pixels, adapter_names=names)
    assert mixed.shape == (6, len(classes_of(experts)))
    model.set_over_all_classes(True)
    for i, name in enumerate(names):
        model.set_adapter(name)
        torch.testing.assert_close(mixed[i : i + 1], logits(model, pixels[i : i + 1]))


def test_mixed_batch_leaves_router_and_active_expert() -> None:
    model = with_experts(**EQUAL)
    model.set_router("entropy")
    before = logits(model)
    assert not torch.equal(logits(model, adapter_names=["trees"] * 4), before)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)


def test_mixed_batch_refusals() -> None:
    model = with_experts(**EQUAL)
    with pytest.raises(ValueError, match=r"Length of `adapter_names` should be .* but got 3 and 4 respectively"):
        logits(model, adapter_names=["trees"] * 3)
    with pytest.raises(ValueError, match=r"non-existing adapter\(s\): rocks. The model has animals, trees"):
        logits(model, adapter_names=["trees", "rocks", "trees", "trees"])
    with pytest.raises(ValueError, match=r"'__base__'.*disable_adapter"):
        logits(model, adapter_names=["trees", "__base__", "trees", "trees"])
    assert logits(model).shape == (4, 3)  # no hook is left behind
    model.train()
    with pytest.raises(ValueError, match="Cannot pass `adapter_names` when the model is in training mode"):
        logits(model, adapter_names=["trees"] * 4)


def test_mixed_batch_with_a_linear_head_is_finite() -> None:
    model = with_experts(**ONE)
    model.add_adapter("trees", expert_config(TREES, head="linear"))
    answer = logits(model.eval(), adapter_names=["trees", "animals", "trees", "animals"])
    assert answer.isfinite().all()
    assert (answer[::2].argmax(dim=1) >= len(ANIMALS)).all()  # a linear expert chooses among its own classes


# ---- injecting, copying, sending to another process -----------------------------------------------------------------


def test_inject_adapter_in_model() -> None:
    base = tiny_vit()
    model = inject_adapter_in_model(expert_config(), base, adapter_name="animals")
    assert model is base
    assert isinstance(base.classifier, LucaLayer)
    assert logits(base).shape == (4, 3)
    inject_adapter_in_model(expert_config(SKIES), base, adapter_name="skies")
    assert logits(base).shape == (4, 2)
    assert labels(base) == SKIES
    state = get_peft_model_state_dict(base, adapter_name="animals")
    assert len(state) == 12
    twin = inject_adapter_in_model(expert_config(), tiny_vit(), adapter_name="animals", state_dict=state)
    set_peft_model_state_dict(twin, state, adapter_name="animals")
    base.classifier.set_adapter("animals")
    torch.testing.assert_close(logits(twin), logits(base), rtol=0, atol=0)


def test_injecting_a_second_time_keeps_the_router_and_the_base_labels() -> None:
    model = with_experts(**ONE)
    model.set_router("entropy")
    again = get_peft_model(model.get_base_model(), expert_config(SKIES), adapter_name="skies")
    assert labels(again) == [*ANIMALS, *SKIES]
    assert labels(again.unload()) == ["LABEL_0", "LABEL_1"]


@collections
def test_deepcopy_and_pickle(experts: dict[str, list[str]]) -> None:
    model = with_experts(**experts)
    model.set_router("entropy", temperature=2.0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(logits(twin), logits(model), rtol=0, atol=0)
        twin.add_adapter("rocks", expert_config(["flint", "slate"]))
        assert "rocks" not in model.experts
        assert labels(model) == classes_of(experts)


def _answer_in_another_process(model: PeftModel, queue: Any) -> None:
    queue.put((model.config.id2label, logits(model).tolist()))


def test_a_spawned_process() -> None:
    model = with_experts(**UNEQUAL)
    model.set_router("entropy")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_answer_in_another_process, args=(model, queue))
    process.start()
    id2label, answer = queue.get(timeout=120)
    process.join(timeout=60)
    assert process.exitcode == 0
    assert id2label == model.config.id2label
    torch.testing.assert_close(torch.tensor(answer), logits(model))


# ---- beside other methods -------------------------------------------------------------------------------------------


def test_beside_a_lora_adapted_trunk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    lora = get_peft_model(tiny_vit(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    base = lora.get_base_model().eval()
    before, config = logits(base), lora.peft_config
    frozen = {name: tensor.clone() for name, tensor in base.state_dict().items() if "classifier" not in name}
    model = get_peft_model(base, expert_config())  # both are called "default"
    assert list(model.peft_config) == ["default"]
    assert lora.peft_config is config
    assert isinstance(config["default"], LoraConfig)
    assert all("luca_" in name for name, p in model.named_parameters() if p.requires_grad)

    plain = with_experts(default=ANIMALS)
    set_peft_model_state_dict(plain, get_peft_model_state_dict(model))
    assert not torch.equal(logits(plain), logits(model.eval()))  # LoRA is at work under the expert
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), before, rtol=0, atol=0)  # and stays so

    model.train()
    nn.functional.cross_entropy(model(pictures()).logits, torch.tensor([0, 1, 2, 0])).backward()
    assert all(p.grad is None for name, p in model.named_parameters() if "luca_" not in name)

    save(model, tmp_path)
    assert all("lora" not in key for key in get_peft_model_state_dict(model))
    model.eval()
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path), adapter_name="again", allow_mismatch=True)
    loaded.set_adapter("again")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)

    unloaded = model.unload()
    torch.testing.assert_close(logits(unloaded), before, rtol=0, atol=0)
    assert all(torch.equal(unloaded.state_dict()[name], tensor) for name, tensor in frozen.items())
    assert unloaded.peft_config is config


def test_a_head_that_another_adapter_holds_is_refused_until_merged() -> None:
    lora = get_peft_model(tiny_vit(), LoraConfig(target_modules=["q_proj"], modules_to_save=["classifier"]))
    with pytest.raises(ValueError, match=r"'classifier' .* belongs to another adapter.*merge_and_unload\(\)"):
        get_peft_model(lora.get_base_model(), expert_config())
    assert logits(get_peft_model(lora.merge_and_unload(), expert_config())).shape == (4, 3)


def test_on_a_peft_model_of_another_method_says_what_to_pass() -> None:
    lora = get_peft_model(tiny_vit(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"is a PeftModel with .*LORA adapters already.*get_base_model\(\)"):
        get_peft_model(lora, expert_config())
    assert isinstance(lora.peft_config["default"], LoraConfig)


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["merge_adapter", "unmerge_adapter", "merge_and_unload"])
def test_merging_is_refused(verb: str) -> None:
    model = with_experts(**EQUAL)
    with pytest.raises(NotImplementedError, match=r"a LuCA expert cannot be merged.*`unload\(\)`"):
        getattr(model, verb)()
    for layer_verb in ("merge", "unmerge"):
        with pytest.raises(NotImplementedError, match="cannot be merged"):
            getattr(model.base_model.layer, layer_verb)()


def test_weighted_combination_is_refused() -> None:
    model = with_experts(**EQUAL)
    with pytest.raises(NotImplementedError, match=r"LuCA experts cannot be averaged.*set_router"):
        model.add_weighted_adapter(["animals", "trees"], [0.5, 0.5], "both")


def test_hotswap_is_refused(tmp_path: Path) -> None:
    model = with_experts(**EQUAL)
    save(model, tmp_path)
    with pytest.raises(ValueError, match="Hotswapping only supports LORA but LUCA was passed"):
        hotswap_adapter(model, str(tmp_path / "trees"), "animals")


def test_mixed_models_and_other_types_beside_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="'LUCA' is not compatible with the `PeftMixedModel`"):
        get_peft_model(tiny_vit(), expert_config(), mixed=True)
    with pytest.raises(ValueError, match="Cannot combine adapters with different peft types"):
        with_experts(**ONE).add_adapter("lora", LoraConfig(target_modules=["q_proj"]))


def test_an_expert_that_is_not_there_is_named_by_every_verb() -> None:
    model = with_experts(**UNEQUAL)
    there = ", ".join(model.experts)
    for error, verb in (
        (ValueError, lambda: model.set_requires_grad("rocks")),
        (ValueError, lambda: model.set_requires_grad([*model.experts, "rocks"])),
        (ValueError, lambda: model(pictures(), adapter_names=["rocks"] * 4)),
        (KeyError, lambda: get_peft_model_state_dict(model, adapter_name="rocks")),
        (KeyError, lambda: set_peft_model_state_dict(model, {}, adapter_name="rocks")),
    ):
        with pytest.raises(error, match=rf"rocks.*The model has {there}"):
            verb()
    for wrong in ("animals", [["animals"]] * 4, [None] * 4):
        with pytest.raises(ValueError, match=r"non-existing adapter|Length of `adapter_names`"):
            model(pictures(), adapter_names=wrong)
    with pytest.raises(ValueError, match=r"an expert is named by a string, got \['rocks'\]"):
        model.delete_adapter(["rocks"])


def test_a_model_that_was_unloaded_says_so() -> None:
    model = with_experts(**EQUAL)
    model.unload()
    for verb in (model.unload, lambda: model.route(pictures()), lambda: model.set_router("entropy")):
        with pytest.raises(RuntimeError, match=r"unload\(\) has taken them off. Go on with the backbone"):
            verb()
