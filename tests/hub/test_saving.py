"""Saving and loading experts in folders: what comes back, by every path, and what is refused."""

import functools
import itertools
import json
import os
import re
import shutil
import time
import warnings
from dataclasses import replace

import pytest
import torch
from helpers import assert_same, expert_tensors, files_in, fill, make_dinov2, make_model, make_vit, pixels, read_json
from hub_models import TWO, assert_refused, change_json, with_reference, with_statistics
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import AutoPeftModel, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import ViTConfig, ViTForImageClassification

from peft_luca import InvalidExpertError, LucaConfig, load_expert, load_experts, save_expert, save_experts
from peft_luca.hub.saving import save_statistics
from peft_luca.routing import ScoreRouter
from peft_luca.routing.statistics_routers import GaussianRouter


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TENSORS = {
    "luca_adapter_down",
    "luca_adapter_up",
    "luca_adapter_norm",
    "luca_calibrator_down",
    "luca_calibrator_up",
    "luca_class_rows",
    "luca_scale",
    "luca_reference_mean",
    "luca_reference_std",
    "luca_whitening",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A collection in `all`, and one of its experts in `one`."""
    place = tmp_path_factory.mktemp("saved")
    model = make_model({"t": ["a", "b"], "w": ["c"]})
    save_experts(model, place / "all")
    save_expert(model, "t", place / "one")
    return place


# ---- what is written -----------------------------------------------------------------------------------------------


def test_files_and_tensors_have_their_names(tmp_path):
    model = with_statistics({"t": ["a", "b"]})
    save_expert(model, "t", tmp_path)
    assert files_in(tmp_path) == [CONFIG, WEIGHTS, "statistics.safetensors"]
    tensors = load_file(tmp_path / WEIGHTS)
    assert {part for key in tensors for part in key.split(".") if part.startswith("luca_")} == TENSORS
    assert not [key for key in tensors if ".t" in key]
    save_expert(model, "t", tmp_path, statistics=False)
    assert files_in(tmp_path) == [CONFIG, WEIGHTS]


def test_manifest(tmp_path):
    model = make_model(TWO)
    model.set_router("entropy", temperature=3)
    save_experts(model, tmp_path)
    assert read_json(tmp_path / "experts.json") == {
        "format": 1,
        "experts": [{"name": "zeta", "classes": ["a", "b"]}, {"name": "alpha", "classes": ["c", "d", "a"]}],
        "router": {"name": "entropy", "options": {"temperature": 3}},
        "fingerprint": model.backbone.fingerprint,
    }
    files = [f"{name}/{file}" for name in TWO for file in (CONFIG, WEIGHTS)]
    assert files_in(tmp_path) == sorted(["experts.json", *files])


def test_some_experts_are_written_and_all_are_in_the_manifest(tmp_path):
    save_experts(make_model(TWO), tmp_path, ["alpha"])
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["alpha", "experts.json"]
    assert [entry["name"] for entry in read_json(tmp_path / "experts.json")["experts"]] == list(TWO)


def test_saved_again_the_files_are_the_same(tmp_path):
    save_experts(with_statistics(), tmp_path / "first")
    save_experts(load_experts(make_vit(), tmp_path / "first"), tmp_path / "second")
    assert files_in(tmp_path / "first") == files_in(tmp_path / "second")
    for file in files_in(tmp_path / "first"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes() or (
            {**read_json(tmp_path / "first" / file), "inference_mode": True} == read_json(tmp_path / "second" / file)
        )


@pytest.mark.parametrize("fails", ["peft.PeftModel.save_pretrained", "peft_luca.hub.saving.save_statistics"])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, fails):
    model = with_statistics({"t": ["a", "b"]})
    save_expert(model, "t", tmp_path / "out", statistics=False)
    before = {file: (tmp_path / "out" / file).read_bytes() for file in files_in(tmp_path / "out")}

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(fails, fail)
    with pytest.raises(OSError, match="disk full"):
        save_expert(model, "t", tmp_path / "out")
    assert {file: (tmp_path / "out" / file).read_bytes() for file in files_in(tmp_path / "out")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_files_are_put_in_place_with_the_config_last(tmp_path, monkeypatch):
    moved = []
    replace = os.replace
    monkeypatch.setattr("os.replace", lambda a, b: (moved.append(str(b)), replace(a, b)))
    save_expert(with_statistics({"t": ["a", "b"]}), "t", tmp_path / "out")
    order = ["statistics.safetensors", WEIGHTS, CONFIG]
    assert [path for path in moved if "out/" in path] == [str(tmp_path / "out" / file) for file in order]
    # Over an expert with another config: that goes first, so that no folder has its config and the new weights.
    unlink = os.unlink
    monkeypatch.setattr("os.unlink", lambda path, **given: (moved.append(str(path)), unlink(path, **given)))
    moved.clear()
    save_expert(with_statistics({"t": ["b", "a"]}), "t", tmp_path / "out", statistics=False)
    order = [CONFIG, "statistics.safetensors", WEIGHTS, CONFIG]
    assert [path for path in moved if "out/" in path] == [str(tmp_path / "out" / file) for file in order]


@pytest.mark.parametrize("files", list(itertools.product("ab", repeat=3)))
def test_files_of_two_experts_are_not_taken_for_one(tmp_path, files):
    """As a kill or a copy may leave them. Both fit by their shapes."""
    for name, seed in (("a", 1), ("b", 2)):
        model = with_statistics({"t": ["x", "y"]}, rank=seed)
        fill(model, seed)
        model.peft_config["t"].positive_scale = name == "a"
        save_expert(model, "t", tmp_path / name)
    (tmp_path / "t").mkdir()
    for name, file in zip(files, ("statistics.safetensors", WEIGHTS, CONFIG), strict=True):
        shutil.copy(tmp_path / name / file, tmp_path / "t" / file)
    if len(set(files)) == 1:
        load_expert(make_vit(), tmp_path / "t", allow_mismatch=True)
        return
    message = r"statistics.safetensors: it does not belong to the weights and the config beside it.*statistics=False"
    load = functools.partial(load_expert, source=tmp_path / "t", name="t", allow_mismatch=True)
    assert_refused(load, message, InvalidExpertError, [make_vit()])
    load(make_vit(), statistics=False)


def test_a_collection_saved_over_an_older_one_has_no_expert_that_the_model_has_not(tmp_path):
    save_experts(make_model({"old": ["x"], **TWO}), tmp_path)
    (tmp_path / "old" / "notes.txt").write_text("mine")
    (tmp_path / "else").mkdir()
    save_experts(make_model({"alpha": ["c", "d"]}), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alpha", "else", "experts.json", "old"]
    assert files_in(tmp_path / "old") == ["notes.txt"]
    assert list(load_experts(make_vit(), tmp_path, allow_mismatch=True).experts) == ["alpha"]


def test_folders_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save_experts(make_model(TWO), "~/all")
    save_expert(make_model(TWO), "zeta", "~/one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "one"]
    assert list(load_experts(make_vit(), ["~/all", "~/one"], allow_mismatch=True).experts) == [*TWO, "one"]


class Margin(ScoreRouter):
    name = "margin"

    def cost(self, scores):
        return -scores.amax(dim=-1)


def test_what_cannot_be_saved(tmp_path):
    model = with_statistics()
    with pytest.raises(ValueError, match=r"current supported adapter names are \['zeta', 'alpha'\] - got \['x'\]"):
        save_expert(model, "x", tmp_path / "o")
    model.set_router(lambda scores: scores.amax(dim=2))
    with pytest.raises(ValueError, match="the router is code of your own, which no file can hold"):
        save_experts(model, tmp_path / "o")
    model.set_router(Margin(unknown_below=0.5))
    message = r"Save with set_router\(None\), and call set_router with it again after loading: margin\({'unknown_below"
    with pytest.raises(ValueError, match=message):
        save_experts(model, tmp_path / "o")
    model.set_router("gaussian")
    with pytest.raises(ValueError, match="the router 'gaussian' needs the experts' statistics"):
        save_experts(model, tmp_path / "o", statistics=False)
    with pytest.raises(ValueError, match="needs a PeftModel with LuCA experts, got ViT"):
        save_experts(make_vit(), tmp_path / "o")
    assert not (tmp_path / "o").exists()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for save in (lambda file: save_expert(model, "zeta", file), lambda file: save_experts(model, file)):
        with pytest.raises(FileExistsError):
            save(tmp_path / "file")
    assert files_in(tmp_path) == ["file"]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_quantized_experts_are_refused_and_a_quantized_backbone_is_not(tmp_path):
    model = make_model(TWO)
    torch.ao.quantization.quantize_dynamic(model.base_model.model.vit, {torch.nn.Linear}, inplace=True)
    save_expert(model, "zeta", tmp_path / "zeta")
    assert files_in(tmp_path / "zeta") == [CONFIG, WEIGHTS]
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)
    for save in (lambda: save_expert(model, "zeta", tmp_path / "new"), lambda: save_experts(model, tmp_path / "new")):
        with pytest.raises(ValueError, match=r"expert 'zeta' is quantized .* or quantize the backbone alone"):
            save()


# ---- what comes back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "make"),
    [
        ({"arrangement": "parallel"}, make_vit),
        ({"arrangement": "adapter", "norm_position": "before_residual"}, make_dinov2),
        ({"arrangement": "calibrator", "positive_scale": False}, make_vit),
        ({"reference": False, "adapter_width": 3, "calibrator_width": 5}, make_dinov2),
    ],
)
def test_every_kind_of_expert(tmp_path, config, make):
    model, x = make_model({"t": ["a", "b"]}, base=make(), **config), pixels()
    save_expert(model, "t", tmp_path / "t")
    loaded = load_experts(make(), tmp_path / "t")
    assert_same(expert_tensors(loaded, "t"), expert_tensors(model, "t"))
    assert torch.equal(loaded(x).logits, model(x).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:expert .* was trained on the backbone")
def test_the_same_as_by_peft(tmp_path, dtype):
    save_experts(with_reference(), tmp_path)
    by_peft = PeftModel.from_pretrained(make_vit().to(dtype), tmp_path / "zeta", adapter_name="zeta")
    by_peft.load_adapter(str(tmp_path / "alpha"), "alpha")
    ours = load_experts(make_vit().to(dtype), tmp_path)
    assert_same(dict(ours.state_dict()), dict(by_peft.state_dict()))
    kept, others = (
        {key: t.dtype for key, t in model.state_dict().items() if "luca_whitening" not in key}
        for model in (ours, by_peft)
    )
    assert kept == others
    # The same numbers: PEFT makes them float32, of which they need half.
    assert {t.dtype for key, t in ours.state_dict().items() if "luca_whitening" in key} == {torch.float16}
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert not any(module.training for module in ours.modules())
    assert [type(m) for m in ours.modules()] == [type(m) for m in by_peft.modules()]
    assert ours.active_adapters == by_peft.active_adapters
    assert ours.peft_config == by_peft.peft_config
    assert ours.config.id2label == by_peft.config.id2label
    for name in TWO:
        ours.set_adapter(name)
        by_peft.set_adapter(name)
        assert torch.equal(ours(pixels().to(dtype)).logits, by_peft(pixels().to(dtype)).logits)


def test_auto_peft_model(tmp_path):
    make_vit().save_pretrained(tmp_path / "base")
    model = make_model({"default": ["a", "b"]}, base=type(make_vit()).from_pretrained(tmp_path / "base"))
    save_expert(model, "default", tmp_path / "expert")
    loaded = AutoPeftModel.from_pretrained(tmp_path / "expert")
    assert torch.equal(loaded(pixels()).logits, model(pixels()).logits)
    assert loaded.config.id2label == {0: "a", 1: "b"}


@pytest.mark.parametrize(
    ("router", "options"),
    [
        ("entropy", {"temperature": 1e-5, "unknown_below": 1e-5}),
        ("energy", {"temperature": torch.tensor(3.0).numpy()[()]}),
        ("entropy", {"routing_scope": "batch"}),
        ("gaussian", {"shrinkage": 1e-5, "volume": 500}),
        ("lda", {"temperature": 0.5}),
        ("ridge", {"strength": 1e6}),
        ("auto", {}),
        ("nearest", {"temperature": 2.0}),
        ("oracle", {}),
        (None, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:routing_scope='batch'")
def test_a_router_with_its_options(tmp_path, router, options):
    model = with_statistics(random_features=8)
    model.set_router(router, **options)
    save_experts(model, tmp_path)
    loaded = load_experts(make_vit(), tmp_path)
    assert loaded.experts == model.experts
    assert loaded.router == model.router
    assert loaded.config.id2label == model.config.id2label
    expert = torch.zeros(6, dtype=torch.long) if router == "oracle" else None
    assert torch.equal(loaded.route(pixels(), expert).logits, model.route(pixels(), expert).logits)


def test_a_router_is_prepared_once(tmp_path, monkeypatch):
    model = with_statistics()
    model.set_router("gaussian")
    save_experts(model, tmp_path)
    prepare, prepared = GaussianRouter.prepare, []
    monkeypatch.setattr(GaussianRouter, "prepare", lambda *args: prepared.append(args) or prepare(*args))
    loaded = load_experts(make_vit(), tmp_path)
    assert torch.equal(loaded.route(pixels()).logits, model.route(pixels()).logits)
    assert len(prepared) == 1


def test_statistics_in_memory_whatever_becomes_of_the_file(tmp_path):
    model = with_statistics()
    save_experts(model, tmp_path)
    loaded = load_experts(make_vit(), tmp_path, rename={"alpha": {"a": "another a"}})
    without = load_experts(make_vit(), tmp_path, statistics=False)
    for name in TWO:
        (tmp_path / name / "statistics.safetensors").unlink()
    assert loaded.statistics["alpha"].classes == ("c", "d", "another a")
    assert torch.equal(loaded.statistics["zeta"].means, model.statistics["zeta"].means)
    assert not without.statistics
    loaded.set_router("gaussian")
    assert loaded.classes == ("a", "b", "c", "d", "another a")


def test_loading_is_for_inference_and_trainable_on_request(tmp_path):
    save_experts(make_model(TWO), tmp_path / "all")
    loaded = load_experts(make_vit(), tmp_path / "all")
    assert not any(p.requires_grad for p in loaded.parameters())
    loaded.set_adapter("alpha")
    loaded(pixels(), labels=torch.zeros(len(pixels()), dtype=torch.long)).loss.backward()
    assert loaded.base_model.layer.luca_class_rows["alpha"].grad is not None
    assert loaded.base_model.layer.luca_class_rows["zeta"].grad is None


def test_experts_of_two_owners(tmp_path):
    first, second = make_model({"t": ["a", "b"]}, seed=1), make_model({"t": ["c"]}, seed=2)
    save_expert(first, "t", tmp_path / "lab-a" / "vit.birds")
    save_experts(second, tmp_path / "lab-b")
    model = load_experts(make_vit(), [tmp_path / "lab-a" / "vit.birds", tmp_path / "lab-b"])
    assert model.experts == {"vit-birds": ("a", "b"), "t": ("c",)}
    model = load_experts(make_vit(), {"birds": tmp_path / "lab-a" / "vit.birds"})
    before = expert_tensors(model, "birds")
    model.set_router("entropy")
    model = load_experts(model, tmp_path / "lab-b")
    assert list(model.experts) == ["birds", "t"]
    assert model.router.name == "entropy"
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert_same(expert_tensors(model, "birds"), before)


@pytest.mark.parametrize(
    ("one", "other"),
    [("cat", "CAT"), ("cat", "cat "), ("cat", "c\u200bat"), ("cat", "ｃａｔ"), ("cat", "саt"), ("café", "cafe\u0301")],
    ids=ascii,
)
def test_classes_of_two_owners_that_look_alike_are_told_of(tmp_path, one, other):
    save_experts(make_model({"one": ["dog", one]}), tmp_path / "one")
    save_experts(make_model({"two": [other, "owl"]}), tmp_path / "two")
    message = f"look alike: {[one, other]!a}. If they are one class, give it one name with rename="
    with pytest.warns(UserWarning, match=re.escape(message)) as said:
        model = load_experts(make_vit(), [tmp_path / "one", tmp_path / "two"])
    assert len(said) == 1
    assert len(model.classes) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_experts(make_vit(), [tmp_path / "one", tmp_path / "two"], rename={"two": {other: one}})


def test_experts_without_a_router_are_asked_by_auto(tmp_path):
    save_experts(with_statistics(), tmp_path)  # whose router is None, and stays so
    assert load_experts(make_vit(), tmp_path).router is None
    sources = [tmp_path / name for name in TWO]
    assert load_experts(make_vit(), sources[:1]).router is None  # a single expert is active, as any adapter
    for statistics, used in ((True, "gaussian"), (False, "nearest")):
        model = load_experts(make_vit(), sources, statistics=statistics)
        assert model.router.name == "auto"
        assert f"active: router auto ({used})" in repr(model)
        assert model.config.num_labels == len(model.classes)
        routed = model.route(pixels()).logits
        model.set_router(used)
        assert torch.equal(model.route(pixels()).logits, routed)


def test_class_names_of_any_language_and_experts_named_as_parts_of_other_names(tmp_path):
    experts = {"e1": ["café", "狗"], "e11": ["a b/c"], "e1-1": ["ß", "🙂"], "default": ["d"], "task_1": ["e"]}
    model = make_model(experts)
    save_experts(model, tmp_path)
    loaded = load_experts(make_vit(), tmp_path)
    assert loaded.experts == {name: tuple(classes) for name, classes in experts.items()}
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_a_fresh_expert_has_the_classes_of_its_backbone(tmp_path):
    save_expert(get_peft_model(make_vit(), LucaConfig()), "default", tmp_path)
    assert LucaConfig.from_pretrained(str(tmp_path)).classes == [f"base {i}" for i in range(5)]


LABELS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)


@settings(max_examples=10, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(experts=st.lists(LABELS, min_size=2, max_size=4), order=st.randoms(use_true_random=False))
def test_predictions_do_not_depend_on_the_order_of_loading(tmp_path_factory, experts, order):
    place = tmp_path_factory.mktemp("order")
    named = {f"e{i}": classes for i, classes in enumerate(experts)}
    save_experts(make_model(named), place)
    shuffled = order.sample(list(named), len(named))
    one = load_experts(make_vit(), {name: place / name for name in named})
    two = load_experts(make_vit(), {name: place / name for name in shuffled})
    routed, again = one.route(pixels(8)), two.route(pixels(8))
    columns = [two.classes.index(name) for name in one.classes]
    torch.testing.assert_close(again.logits[:, columns], routed.logits)
    assert [list(named)[i] for i in routed.expert] == [shuffled[i] for i in again.expert]


def refused_by_the_router(kind, folder):
    """An expert `new` with which the router `gaussian` cannot answer."""
    model = with_statistics({"new": ["q"]})
    if kind == "statistics of another reference":
        with torch.no_grad():
            model.base_model.layer.luca_reference_mean["new"].add_(1)
    save_expert(model, "new", folder, statistics=kind != "no statistics")
    if kind == "garbage":
        (folder / "statistics.safetensors").write_bytes(b"garbage")


@pytest.mark.parametrize("kind", ["no statistics", "statistics of another reference", "garbage"])
def test_an_expert_that_the_router_cannot_use_is_refused_and_the_model_answers_as_before(tmp_path, kind):
    refused_by_the_router(kind, tmp_path / "new")
    model = with_statistics()
    model.set_router("gaussian")
    before = model.route(pixels())
    for load in (load_expert, load_experts):
        message = (
            "statistics" if kind == "garbage" else r"router gaussian, which is set, .* set_router\('entropy'\) fir"
        )
        assert_refused(lambda model, load=load: load(model, tmp_path / "new"), message, InvalidExpertError, [model])
    if kind == "no statistics":
        assert_refused(
            lambda model: model.load_adapter(str(tmp_path / "new"), "new"), "needs the stat", models=[model]
        )
    after = model.route(pixels())
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(after.expert, before.expert)
    model.set_router("entropy")
    assert list(load_expert(model, tmp_path / "new", statistics=False).experts) == [*TWO, "new"]


@pytest.mark.parametrize("is_trainable", [False, True])
@pytest.mark.parametrize("content", [None, b"garbage"])
def test_without_weights_that_can_be_read_peft_adds_no_expert(tmp_path, content, is_trainable):
    save_expert(make_model({"new": ["q", "r"]}), "new", tmp_path / "sub" / "new")
    path = tmp_path / "sub" / "new" / WEIGHTS
    path.unlink() if content is None else path.write_bytes(content)
    model, message = make_model(TWO), "Repo id must" if content is None else "deserializing header"

    def load(model, folder, **options):
        model.load_adapter(str(folder), "new", is_trainable=is_trainable, **options)

    assert_refused(lambda model: load(model, path.parent), message, Exception, [model])
    assert_refused(lambda model: load(model, tmp_path / "sub", subfolder="new"), message, Exception, [model])
    assert list(model.experts) == list(model.peft_config) == list(TWO)
    save_expert(make_model({"new": ["q", "r"]}, seed=1), "new", path.parent)
    load(model, tmp_path / "sub", subfolder="new")
    assert list(model.experts) == [*TWO, "new"]


def test_a_config_can_be_read_without_weights(tmp_path):
    LucaConfig(classes=["q"]).save_pretrained(tmp_path)
    model = make_model(TWO)
    model.add_adapter("new", LucaConfig.from_pretrained(str(tmp_path)))
    assert list(model.experts) == [*TWO, "new"]


@pytest.mark.parametrize("is_trainable", [False, True])
@pytest.mark.parametrize("spoil", ["missing", "shape", "nan"])
def test_what_peft_is_refused_leaves_the_model_as_it_was(tmp_path, spoil, is_trainable):
    """PEFT adds an expert of random numbers before it looks at the file."""
    good = tmp_path / "good"
    for folder in (tmp_path, good):
        save_expert(make_model({"new": ["q", "r"]}), "new", folder)
    tensors = load_file(tmp_path / WEIGHTS)
    key = "base_model.model.classifier.luca_class_rows"
    changed = {"missing": None, "shape": tensors[key][:1], "nan": tensors[key] * float("nan")}[spoil]
    tensors = {name: changed if name == key else tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / WEIGHTS)
    model = make_model(TWO)
    model.set_router("entropy")
    message = r"in the file of expert 'new' these are missing, .*: \['luca_class_rows.new'\]"
    options = {"is_trainable": is_trainable}
    assert_refused(lambda model: model.load_adapter(str(tmp_path), "new", **options), message, models=[model])
    assert list(model.experts) == list(TWO)
    model.load_adapter(str(good), "new")  # an expert that is there is not removed
    before = expert_tensors(model, "new")
    assert_refused(lambda model: model.load_adapter(str(tmp_path), "new"), message, models=[model])
    assert_same(expert_tensors(model, "new"), before)
    fresh = make_model(TWO)
    fresh.add_adapter("new", LucaConfig(classes=["q", "r"]))
    assert_refused(lambda model: model.load_adapter(str(tmp_path), "new"), message, models=[fresh])


def test_a_refused_file_leaves_a_loaded_expert_of_its_name(tmp_path):
    save_experts(make_model(TWO), tmp_path / "all")
    save_expert(make_model({"zeta": ["q"]}, base=make_vit(seed=5)), "zeta", tmp_path / "other")
    model = load_experts(make_vit(), tmp_path / "all")
    before = expert_tensors(model, "zeta")
    assert_refused(lambda model: model.load_adapter(str(tmp_path / "other"), "zeta"), "", models=[model])
    assert_same(expert_tensors(model, "zeta"), before)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "there are no experts to load: the list is empty"),
        (lambda place: {"x/y": place / "one"}, "an expert cannot be called 'x/y'"),
        (lambda place: {"x/y": place / "all"}, "an expert cannot be called 'x/y_t'"),
        (lambda place: {"x": place / "all", "x_t": place / "one"}, "one expert is called 'x_t'. Load the sources as"),
        (lambda place: [place / "one", place / "all", place / "one"], "more than one expert is called 'one'"),
        (lambda place: {"ONE": place / "one", "one": place / "one"}, "more than one expert is called 'ONE'"),
        (lambda place: {"Mine": place / "one", "mine": place / "one"}, "more than one expert is called 'Mine'"),
        (lambda place: place / "nowhere", "neither a folder nor a Hub id"),
        (lambda place: place, r"is not an expert and not a collection: it has no adapter_config.json"),
    ],
)
def test_sources(saved, sources, message):
    assert_refused(lambda model: load_experts(model, sources(saved) if callable(sources) else sources), message)


def test_collections_with_experts_of_the_same_names_are_put_together_by_prefixes(saved):
    model = load_experts(make_vit(), {"ann": saved / "all", "ben": saved / "all"}, rename={"ben_t": {"a": "z"}})
    alone = load_experts(make_vit(), saved / "all")
    assert list(model.experts) == ["ann_t", "ann_w", "ben_t", "ben_w"]
    assert model.experts["ann_t"] == alone.experts["t"] != model.experts["ben_t"]
    for name in ("ann_t", "ben_t"):
        assert all(map(torch.equal, expert_tensors(model, name).values(), expert_tensors(alone, "t").values()))
    once = load_experts(make_vit(), {"ann": saved / "all"})
    assert (list(once.experts), once.router) == (["ann_t", "ann_w"], alone.router)


def test_an_expert_of_a_collection_is_called_as_one_likes(saved):
    model = load_expert(make_vit(), saved / "all", expert="t", name="bugs")
    model = load_expert(model, saved / "all", expert="w")
    model = load_expert(model, saved / "all", "t")
    assert list(model.experts) == ["bugs", "w", "t"]
    assert all(map(torch.equal, expert_tensors(model, "bugs").values(), expert_tensors(model, "t").values()))
    message = "is one expert and no collection, of which expert='t' could be taken"
    assert_refused(lambda model: load_expert(model, saved / "one", expert="t"), message)


def test_an_expert_that_the_model_has(saved):
    model = load_experts(make_vit(), saved / "all")
    message = "more than one expert is called 't'"
    assert_refused(lambda model: load_experts(model, saved / "all"), message, models=[model])
    for name in ("w", "W"):
        message = f"more than one expert is called '{name}'"
        assert_refused(lambda model, name=name: load_expert(model, saved / "one", name), message, models=[model])


def test_an_expert_of_a_collection_must_be_there(saved):
    for name in ("x", None):
        message = f"all is a collection of 't', 'w'. Name one of them, got {name!r}"
        assert_refused(lambda model, name=name: load_expert(model, saved / "all", name), message)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"x": {"a": "b"}}, r"rename names the experts \['x'\], but those to load are 't', 'w'"),
        ({"t": {"q": "b"}}, r"rename names the classes \['q'\], but expert 't' has 'a', 'b'"),
        ({"t": {"a": "b"}}, "each class may be named once"),
        ({"w": {"c": "\n"}}, "class names must be non-empty strings"),
    ],
)
def test_rename(saved, rename, message):
    assert_refused(lambda model: load_experts(model, saved / "all", rename=rename), message)


def test_an_expert_on_another_head_than_those_of_the_model(tmp_path):
    def base_of_two_heads():
        base = make_vit()
        base.other = torch.nn.Linear(32, 2)
        return base

    save_expert(make_model({"t": ["a"]}, base=base_of_two_heads(), target_modules=["other"]), "t", tmp_path)
    model = make_model({"mine": ["x"]}, base=base_of_two_heads())
    message = "the expert goes in place of 'other', but those of the model in place of 'classifier'"
    assert_refused(lambda model: load_expert(model, tmp_path), message, InvalidExpertError, [model])
    assert_refused(lambda model: load_expert(model, tmp_path), "exactly one head", InvalidExpertError)


def test_a_router_is_refused_before_the_model_is_changed(tmp_path):
    model = with_statistics()
    model.set_router("gaussian")
    save_experts(model, tmp_path)
    mine = load_expert(make_vit(), tmp_path, "zeta", statistics=False)
    mine = load_expert(make_vit(), tmp_path / "zeta", "mine", statistics=False)
    message = r"asks for the router \{'name': 'gaussian'.* 'mine' has none.*load_expert\(model, source, 'zeta'\)"
    assert_refused(lambda model: load_experts(model, tmp_path), message, InvalidExpertError, [mine])
    message = "needs the statistics of every expert, but 'zeta', 'alpha'"
    assert_refused(lambda model: load_experts(model, tmp_path, statistics=False), message, models=[make_vit()])
    with_them = load_expert(make_vit(), tmp_path / "zeta", "mine")
    assert load_experts(with_them, tmp_path).router.name == "gaussian"
    tensors = load_file(tmp_path / "alpha" / WEIGHTS)
    tensors["base_model.model.classifier.luca_reference_std"] += 1
    save_file(tensors, tmp_path / "alpha" / WEIGHTS)
    save_statistics(model.statistics["alpha"], tmp_path / "alpha")
    message = "experts 'alpha' and 'zeta' standardize .CLS. by different references"
    assert_refused(lambda model: load_experts(model, tmp_path), message, InvalidExpertError, [make_vit()])


def test_statistics_of_other_classes_than_the_experts(tmp_path):
    save_experts(with_statistics(), tmp_path)
    save_statistics(with_statistics({"t": ["x", "y"]}).statistics["t"], tmp_path / "zeta")
    message = r"zeta.statistics.safetensors is of the classes 'x', 'y' in 32 dimensions, but the expert has 'a', 'b'"
    assert_refused(lambda model: load_experts(model, tmp_path), message, InvalidExpertError)
    load_experts(make_vit(), tmp_path, statistics=False)


# ---- the backbone --------------------------------------------------------------------------------------------------


def test_an_expert_of_another_backbone(tmp_path):
    save_expert(make_model({"t": ["a"]}), "t", tmp_path / "own")
    save_expert(make_model({"t": ["b"]}, base=make_vit(seed=1)), "t", tmp_path / "foreign")
    sources = {"good": tmp_path / "own", "bad": tmp_path / "foreign"}
    message = r"expert 'bad' was trained on the backbone [0-9a-f]{12} .* but this one is"
    assert_refused(lambda model: load_experts(model, sources), message)
    assert load_experts(make_vit(), sources, allow_mismatch=True).experts == {"good": ("a",), "bad": ("b",)}


def test_an_expert_without_a_fingerprint(tmp_path):
    save_expert(make_model({"t": ["a"]}), "t", tmp_path / "t")
    change_json(tmp_path / "t" / CONFIG, fingerprint=None)
    message = "expert 't' does not say which backbone it was trained on"
    assert_refused(lambda model: load_expert(model, tmp_path / "t"), message, InvalidExpertError)
    assert list(load_expert(make_vit(), tmp_path / "t", allow_mismatch=True).experts) == ["t"]


def test_a_backbone_that_differs_a_little_is_loaded_with_a_warning_that_has_the_distance(tmp_path):
    save_expert(with_reference({"t": ["a", "b"]}), "t", tmp_path)

    def moved(share):
        base = make_vit()
        with torch.no_grad():
            for parameter in base.vit.parameters():
                parameter.mul_(1 + share)
        return base

    for base in (moved(1e-4), make_vit().bfloat16()):
        with pytest.warns(UserWarning, match=r"is only [0-9.e-]+ deviations away, as with another dtype") as caught:
            assert len(load_expert(base, tmp_path).experts) == 1
        distance = re.search(r"is only (\S+) deviations", " ".join(str(warning.message) for warning in caught))[1]
        assert 0 < float(distance) < 0.05
    message = r"was trained on the backbone .* deviations away, more than 0.05"
    assert_refused(lambda model: load_expert(model, tmp_path), message, models=[moved(0.5)])


@pytest.mark.slow
def test_a_thousand_experts_load_within_a_minute(tmp_path):
    config = ViTConfig(hidden_size=768, num_hidden_layers=1, intermediate_size=64, image_size=32, patch_size=16)
    torch.manual_seed(0)
    model = make_model({"e0": [f"c{i}" for i in range(10)]}, base=ViTForImageClassification(config).eval())
    model.collect_statistics("e0", torch.randn(200, 768), torch.arange(200) % 10, rank=8)
    save_experts(model, tmp_path)
    config, weights = read_json(tmp_path / "e0" / CONFIG), (tmp_path / "e0" / WEIGHTS).read_bytes()
    for i in range(1, 1000):
        (tmp_path / f"e{i}").mkdir()
        own = {**config, "classes": [f"{i} {j}" for j in range(10)]}
        (tmp_path / f"e{i}" / CONFIG).write_text(json.dumps(own), encoding="utf-8")
        (tmp_path / f"e{i}" / WEIGHTS).write_bytes(weights)
    change_json(tmp_path / "experts.json", experts=[{"name": f"e{i}", "classes": []} for i in range(1000)])
    base = model.unload()
    started = time.perf_counter()
    loaded = load_experts(base, tmp_path)
    assert time.perf_counter() - started < 60
    assert len(loaded.experts) == 1000
    assert len(loaded.classes) == 10_000


def test_an_expert_that_claims_nearly_all_images_is_told_of(tmp_path, recwarn):
    model = with_statistics({"t": ["a", "b"], "w": ["c", "d"]})
    save_experts(model, tmp_path / "honest")
    load_experts(make_vit(), tmp_path / "honest")
    assert not [warning for warning in recwarn if "claims" in str(warning.message)]
    layer = model.base_model.layer
    layer.set_statistics("w", replace(layer.statistics["w"], counts=layer.statistics["w"].counts * 10**6))
    save_experts(model, tmp_path / "greedy")
    with pytest.warns(UserWarning, match=r"expert 'w' claims .*e\+0\d images, more than 100 times those of all"):
        load_experts(make_vit(), tmp_path / "greedy")
