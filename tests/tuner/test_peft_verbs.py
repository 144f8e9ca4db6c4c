"""Every verb of PEFT on LuCA experts, one or several, of equal and unequal class counts: works or says why not."""

import copy
import json
import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers import (
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
from torch import nn

from peft_luca import LucaLayer, LucaModel


ONE = {"animals": ANIMALS}
EQUAL = {"animals": ANIMALS, "trees": TREES}
UNEQUAL = {"animals": ANIMALS, "skies": SKIES, "moreskies": ["moon", "star", "comet", "fog"]}
collections = pytest.mark.parametrize("experts", [ONE, EQUAL, UNEQUAL], ids=["one", "equal", "unequal"])


def classes_of(experts):
    return list(dict.fromkeys(name for classes in experts.values() for name in classes))


def labels(model):
    return [model.config.id2label[i] for i in range(model.config.num_labels)]


def save(model, folder, **arguments):
    model.save_pretrained(str(folder), save_embedding_layers=False, **arguments)


# --- adding, choosing, deleting ---


@collections
def test_set_adapter_changes_logits_labels_and_what_is_trained(experts):
    model = with_experts(**experts)
    assert isinstance(model.base_model, LucaModel)
    assert list(model.peft_config) == list(experts)
    assert (model.active_adapter, trainable(model), labels(model)) == ("animals", {"animals"}, ANIMALS)
    first = logits(model)
    for name, classes in experts.items():
        model.set_adapter(name)
        assert logits(model).shape == (4, len(classes))
        assert labels(model) == classes
        assert trainable(model) == {name}
    model.set_adapter("animals")
    assert torch.equal(logits(model), first)
    model.set_adapter("animals", inference_mode=True)
    assert not trainable(model)


def test_set_adapter_switches_the_router_off_and_adding_leaves_it_on():
    model = with_experts(**UNEQUAL)
    model.set_router("entropy")
    assert labels(model) == classes_of(UNEQUAL)
    model.add_adapter("rocks", expert_config(["flint", "slate"]))
    assert labels(model) == [*classes_of(UNEQUAL), "flint", "slate"]
    assert logits(model).shape == (4, len(labels(model)))
    model.delete_adapter("rocks")
    assert labels(model) == classes_of(UNEQUAL)
    model.set_adapter("animals")
    assert labels(model) == ANIMALS


def test_several_experts_at_once_are_refused():
    model = with_experts(**EQUAL)
    for names in (["animals", "trees"], ["animals"]):  # PEFT's own verb takes no list
        with pytest.raises(ValueError, match=r"named by a string, got \['animals.*One expert is active .* set_router"):
            model.set_adapter(names)
    with pytest.raises(ValueError, match=r"one expert is active at a time, got .* Use set_router"):
        model.base_model.set_adapter(["animals", "trees"])
    for known in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="an expert is named by a string"):
            known.set_adapter(["animals"])
        assert known.active_adapters == ["animals"]


def test_an_expert_that_is_not_there_is_named_by_every_verb():
    model = with_experts(**UNEQUAL)
    there = ", ".join(model.experts)
    for verb in (
        lambda: model.base_model.set_adapter("rocks"),
        lambda: model.set_requires_grad("rocks"),
        lambda: model.set_requires_grad([*model.experts, "rocks"]),
        lambda: model(pictures(), adapter_names=["rocks"] * 4),
    ):
        with pytest.raises(ValueError, match=rf"rocks.*The model has {there}"):
            verb()
    for error, verb in (
        (ValueError, model.set_adapter),
        (ValueError, model.delete_adapter),
        (KeyError, lambda name: get_peft_model_state_dict(model, adapter_name=name)),
        (KeyError, lambda name: set_peft_model_state_dict(model, {}, adapter_name=name)),
    ):
        with pytest.raises(error, match="rocks"):
            verb("rocks")
    for wrong in ("animals", [["animals"]] * 4, [None] * 4):
        with pytest.raises(ValueError, match=r"there is no expert|named by a string"):
            model(pictures(), adapter_names=wrong)
    with pytest.raises(ValueError, match=r"an expert is named by a string, got \['rocks'\]"):
        model.delete_adapter(["rocks"])


def test_delete_adapter_gives_the_model_that_never_had_it():
    model = with_experts(**UNEQUAL)
    never = copy.deepcopy(model)
    model.add_adapter("rocks", expert_config(["flint", "slate"]))
    model.delete_adapter("rocks")
    assert weights(model).keys() == weights(never).keys()
    model.set_router("entropy")
    never.set_router("entropy")
    assert torch.equal(logits(model), logits(never))


def test_deleting_the_active_expert_activates_another_and_says_so():
    model = with_experts(**UNEQUAL)
    with pytest.warns(UserWarning, match="Adapter animals was active which is now deleted"):
        model.delete_adapter("animals")
    assert labels(model) == list(model.experts[model.active_adapter])
    assert logits(model).shape == (4, len(labels(model)))


# --- switching off and freezing ---


@collections
@pytest.mark.parametrize("router", [None, "entropy"])
def test_disable_adapter_is_the_base_and_re_enabling_restores_all(experts, router):
    base = tiny_vit()
    model = with_experts(**experts)
    model.set_router(router)
    before, names, trained = logits(model), labels(model), trainable(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(base))
        assert labels(model) == ["LABEL_0", "LABEL_1"]
        with model.disable_adapter():
            pass
        assert labels(model) == ["LABEL_0", "LABEL_1"]
    assert torch.equal(logits(model), before)
    assert (labels(model), trainable(model)) == (names, trained)
    model.set_requires_grad("animals", requires_grad=False)
    with model.disable_adapter():
        pass
    assert not trainable(model)  # what was frozen stays so


def test_set_requires_grad():
    model = with_experts(**EQUAL)
    model.set_requires_grad("trees")
    assert trainable(model) == set(EQUAL)
    model.set_requires_grad(list(EQUAL), requires_grad=False)
    assert not trainable(model)


# --- saving and loading ---


@collections
def test_save_and_load_each_expert(experts, tmp_path):
    model = with_experts(**experts)
    save(model, tmp_path)
    first, *others = experts
    loaded = PeftModel.from_pretrained(tiny_vit(), str(tmp_path / first), adapter_name=first)
    for name in others:
        loaded.load_adapter(str(tmp_path), name, subfolder=name)
    assert loaded.experts == model.experts
    for name in experts:
        model.set_adapter(name)
        loaded.set_adapter(name)
        assert torch.equal(logits(loaded), logits(model))
    model.set_router("entropy")
    loaded.set_router("entropy")
    assert torch.equal(logits(loaded), logits(model))


def test_selected_adapters(tmp_path):
    save(with_experts(**EQUAL), tmp_path, selected_adapters=["animals"])
    assert (tmp_path / "animals" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "trees").exists()


@pytest.mark.parametrize("is_trainable", [False, True])
def test_is_trainable(is_trainable, tmp_path):
    save(with_experts(**UNEQUAL), tmp_path)
    model = PeftModel.from_pretrained(
        tiny_vit(), str(tmp_path / "skies"), adapter_name="skies", is_trainable=is_trainable
    )
    assert trainable(model) == ({"skies"} if is_trainable else set())
    model.load_adapter(str(tmp_path / "animals"), "animals", is_trainable=is_trainable)
    assert trainable(model) == ({"skies", "animals"} if is_trainable else set())
    assert model.peft_config["skies"].inference_mode is not is_trainable


def test_auto_peft_model(tmp_path):
    tiny_vit().save_pretrained(tmp_path / "base")
    model = with_experts(type(tiny_vit()).from_pretrained(tmp_path / "base"), default=SKIES)
    save(model, tmp_path / "expert")
    loaded = AutoPeftModel.from_pretrained(str(tmp_path / "expert"))
    assert torch.equal(logits(loaded), logits(model))


def test_load_from_the_hub_by_id_and_revision(tmp_path, monkeypatch):
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
    assert torch.equal(logits(loaded), logits(model))
    loaded.load_adapter("lab/vit-animals", "first", cache_dir=str(tmp_path))
    loaded.set_adapter("first")
    assert not torch.equal(logits(loaded), logits(model))


def test_state_dicts():
    model, other = with_experts(**UNEQUAL), with_experts(tiny_vit(), **UNEQUAL)
    for name in UNEQUAL:
        state = get_peft_model_state_dict(model, adapter_name=name)
        assert len(state) == 13
        assert not any(name in key for key in state)
        assert not set_peft_model_state_dict(other, state, adapter_name=name).unexpected_keys
        model.set_adapter(name)
        other.set_adapter(name)
        assert torch.equal(logits(other), logits(model))
    with pytest.raises(ValueError, match=r"luca_class_rows\.skies"):  # rows of another number of classes
        set_peft_model_state_dict(model, {key: value + 1 for key, value in state.items()}, adapter_name="skies")


def test_low_cpu_mem_usage(tmp_path):
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
        assert torch.equal(logits(loaded), logits(model))


def test_a_base_on_the_meta_device():
    with torch.device("meta"):
        base = tiny_vit()
    model = get_peft_model(base, expert_config())
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert model.peft_config["default"].fingerprint is None  # there are no weights to compute it from
    assert model(pictures().to("meta")).logits.shape == (4, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_half_precision_base(dtype, autocast, tmp_path):
    images = pictures().to(dtype)
    model = get_peft_model(
        tiny_vit().to(dtype), expert_config(), adapter_name="animals", autocast_adapter_dtype=autocast
    )
    model.add_adapter("skies", expert_config(SKIES), autocast_adapter_dtype=autocast)
    layer = model.base_model.layer
    expected = torch.float32 if autocast else dtype
    assert {p.dtype for name, p in layer.named_parameters() if "luca_" in name} == {expected}
    assert {b.dtype for b in layer.buffers()} == {torch.float32}  # the reference keeps its precision
    model.eval()
    assert logits(model, images).dtype == expected
    model.set_router("entropy")
    assert logits(model, images).isfinite().all()
    save(model, tmp_path)
    loaded = PeftModel.from_pretrained(
        tiny_vit().to(dtype), str(tmp_path / "animals"), adapter_name="animals", autocast_adapter_dtype=autocast
    )
    model.set_adapter("animals")
    assert torch.equal(logits(loaded, images), logits(model, images))


def test_every_config_says_how_to_load_it(tmp_path):
    """All that PEFT says of a type that it does not know is KeyError: 'LUCA'."""
    save(with_experts(default=ANIMALS), tmp_path)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "`import peft_luca` before loading" in content["read_with"]
    content["read_with"] = "something else"
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    assert "import peft_luca" in PeftConfig.from_pretrained(str(tmp_path)).read_with


# --- an expert for each image ---


def test_a_mixed_batch_has_the_scores_of_each_images_expert():
    model, images = with_experts(**UNEQUAL), pictures(6)
    names = [list(UNEQUAL)[i] for i in (1, 0, 1, 2, 0, 2)]
    mixed = logits(model, images, adapter_names=names)
    scores = model.scores(model.pooled_features(images), list(UNEQUAL))
    torch.testing.assert_close(mixed, scores[torch.arange(6), [1, 0, 1, 2, 0, 2]])
    model.set_router("entropy")
    before = logits(model, images)
    assert torch.equal(logits(model, images, adapter_names=names), mixed)
    assert torch.equal(logits(model, images), before)


def test_two_threads_with_other_names_at_once_get_their_own_experts_scores():
    """Both are between the passing of names and the layer when the other one's names are set as well."""
    model, images = with_experts(**UNEQUAL), pictures()
    names = {"one": ["animals"] * 4, "other": ["skies", "moreskies"] * 2}
    expected = {key: logits(model, images, adapter_names=value) for key, value in names.items()}
    assert not torch.equal(expected["one"], expected["other"])
    both = threading.Barrier(2)

    def meet(*arguments):
        both.wait(timeout=30)

    model.get_base_model().vit.register_forward_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        jobs = {key: pool.submit(logits, model, images, adapter_names=value) for key, value in names.items()}
        for key, job in jobs.items():
            assert torch.equal(job.result(timeout=60), expected[key])


def test_a_mixed_batch_that_cannot_be_is_refused():
    model = with_experts(**EQUAL)
    with pytest.raises(ValueError, match=r"Length of `adapter_names` should be .* but got 3 and 4 respectively"):
        logits(model, adapter_names=["trees"] * 3)
    with pytest.raises(ValueError, match=r"__base__.*disable_adapter"):
        logits(model, adapter_names=["trees", "__base__", "trees", "trees"])
    assert logits(model).shape == (4, 3)  # no hook is left behind
    model.train()
    with pytest.raises(ValueError, match="Cannot pass `adapter_names` when the model is in training mode"):
        logits(model, adapter_names=["trees"] * 4)


# --- injecting, copying, sending to another process ---


def test_inject_adapter_in_model():
    base = tiny_vit()
    assert inject_adapter_in_model(expert_config(), base, adapter_name="animals") is base
    assert isinstance(base.classifier, LucaLayer)
    assert logits(base).shape == (4, 3)
    inject_adapter_in_model(expert_config(SKIES), base, adapter_name="skies")
    assert logits(base).shape == (4, 2)
    assert labels(base) == SKIES
    state = get_peft_model_state_dict(base, adapter_name="animals")
    assert len(state) == 13
    other = inject_adapter_in_model(expert_config(), tiny_vit(), adapter_name="animals", state_dict=state)
    set_peft_model_state_dict(other, state, adapter_name="animals")
    base.classifier.set_adapter("animals")
    assert torch.equal(logits(other), logits(base))


def test_injecting_a_second_time_keeps_the_router_and_the_base_labels():
    model = with_experts(**ONE)
    model.set_router("entropy")
    again = get_peft_model(model.get_base_model(), expert_config(SKIES), adapter_name="skies")
    assert labels(again) == [*ANIMALS, *SKIES]
    assert labels(again.unload()) == ["LABEL_0", "LABEL_1"]


def _answer_in_another_process(model, queue):
    queue.put((model.config.id2label, logits(model).tolist()))


def test_pickle_and_a_spawned_process():
    model = with_experts(**UNEQUAL)
    model.set_router("entropy", temperature=2.0)
    pickled = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(pickled), logits(model))
    pickled.add_adapter("rocks", expert_config(["flint", "slate"]))
    assert labels(model) == classes_of(UNEQUAL)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_answer_in_another_process, args=(model, queue))
    process.start()
    id2label, answer = queue.get(timeout=120)
    process.join(timeout=60)
    assert process.exitcode == 0
    assert id2label == model.config.id2label
    torch.testing.assert_close(torch.tensor(answer), logits(model))


# --- beside other methods ---


def test_beside_a_lora_adapted_trunk(tmp_path):
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
    assert not torch.equal(logits(plain), logits(model.eval()))  # LoRA is active under the expert
    with model.disable_adapter():
        assert torch.equal(logits(model), before)  # and stays so

    model.train()
    nn.functional.cross_entropy(model(pictures()).logits, torch.tensor([0, 1, 2, 0])).backward()
    assert all(p.grad is None for name, p in model.named_parameters() if "luca_" not in name)

    save(model, tmp_path)
    assert all("lora" not in key for key in get_peft_model_state_dict(model))
    model.eval()
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path), adapter_name="again", allow_mismatch=True)
    loaded.set_adapter("again")
    assert torch.equal(logits(loaded), logits(model))

    unloaded = model.unload()
    assert torch.equal(logits(unloaded), before)
    assert all(torch.equal(unloaded.state_dict()[name], tensor) for name, tensor in frozen.items())
    assert unloaded.peft_config is config


def test_a_head_that_another_adapter_holds_is_refused_until_merged():
    lora = get_peft_model(tiny_vit(), LoraConfig(target_modules=["q_proj"], modules_to_save=["classifier"]))
    with pytest.raises(ValueError, match=r"'classifier' .* belongs to another adapter.*merge_and_unload\(\)"):
        get_peft_model(lora.get_base_model(), expert_config())
    assert logits(get_peft_model(lora.merge_and_unload(), expert_config())).shape == (4, 3)


def test_on_a_peft_model_of_another_method_says_what_to_pass():
    lora = get_peft_model(tiny_vit(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"is a PeftModel with .*LORA adapters already.*get_base_model\(\)"):
        get_peft_model(lora, expert_config())
    assert isinstance(lora.peft_config["default"], LoraConfig)


# --- refused ---


def test_merging_averaging_and_hotswap_are_refused(tmp_path):
    model = with_experts(**EQUAL)
    average = partial(model.add_weighted_adapter, ["animals", "trees"], [0.5, 0.5], "both")
    for verb in (model.merge_adapter, model.unmerge_adapter, model.merge_and_unload, average):
        with pytest.raises(NotImplementedError, match=r"cannot be merged or averaged.*set_router.*unload\(\)"):
            verb()
    save(model, tmp_path)
    with pytest.raises(ValueError, match="Hotswapping only supports LORA but LUCA was passed"):
        hotswap_adapter(model, str(tmp_path / "trees"), "animals")


def test_mixed_models_and_other_types_beside_experts_are_refused():
    with pytest.raises(ValueError, match="'LUCA' is not compatible with the `PeftMixedModel`"):
        get_peft_model(tiny_vit(), expert_config(), mixed=True)
    model = with_experts(**ONE)
    with pytest.raises(ValueError, match="Cannot combine adapters with different peft types"):
        model.add_adapter("lora", LoraConfig(target_modules=["q_proj"]))
    assert list(model.experts) == ["animals"]
