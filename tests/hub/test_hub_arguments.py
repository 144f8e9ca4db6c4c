"""What the functions of the Hub say to arguments that are nothing of the kind, before anything is done."""

import pytest
import torch
from helpers import files_in, make_model, make_vit

from peft_luca import (
    list_experts,
    load_expert,
    load_experts,
    push_expert,
    push_experts,
    save_expert,
    save_experts,
)


@pytest.fixture(scope="module")
def model():
    return make_model({"t": ["a", "b"], "u": ["c"]})


@pytest.fixture(scope="module")
def place(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("saved")
    save_experts(model, place / "all")
    save_expert(model, "t", place / "one")
    (place / "file").write_text("x", encoding="utf-8")
    return place


SOURCE = r"a source must be a folder or a Hub id .*names go into a dict, \{'name': source\}.*, got "


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (None, "sources must be a source, a list of them or a dict, got None"),
        (3, "sources must be a source, a list of them or a dict, got 3"),
        ("", SOURCE + "''"),
        (b"x", SOURCE + "b'x'"),
        ([None], SOURCE + "None"),
        (["/", 3], SOURCE + "3|is not an expert"),
        (lambda place: [place / "one", {"x": place / "one"}], SOURCE + r"\{'x': "),
        (lambda place: [[place / "one"]], SOURCE + r"\["),
        ({"x": None}, SOURCE + "None"),
        (lambda place: {3: place / "one"}, "the name of an expert must be .*, got 3"),
        (lambda place: {None: place / "one"}, "the name of an expert must be .*, got None"),
        (lambda place: {"": place / "one"}, "the name of an expert must be .*, got ''"),
        (lambda place: {"x/y": place / "one"}, "an expert cannot be called 'x/y'"),
        (lambda place: {"x": place / "all"}, "is a collection, whose experts have names: it cannot be called 'x'"),
        (lambda place: place / "file", "neither a folder nor a Hub id"),
        (lambda place: place / "nowhere", "neither a folder nor a Hub id"),
        ([], "there are no experts to load: the list is empty"),
        ({}, "there are no experts to load: the list is empty"),
    ],
)
def test_sources_of_load_experts(place, sources, message):
    base = make_vit()
    with pytest.raises(ValueError, match=message):
        load_experts(base, sources(place) if callable(sources) else sources)
    assert not [name for name, _ in base.named_modules() if "luca" in name]


@pytest.mark.parametrize("source", [None, 3, "", b"x", ["one"], {"x": "one"}])
def test_the_source_of_load_expert(source):
    with pytest.raises(ValueError, match=SOURCE):
        load_expert(make_vit(), source)


@pytest.mark.parametrize("name", [3, "", ["t"], b"t", True])
@pytest.mark.parametrize("source", ["one", "all"])
def test_the_name_of_load_expert(place, source, name):
    with pytest.raises(ValueError, match="name must be the name of an expert, got "):
        load_expert(make_vit(), place / source, name)


@pytest.mark.parametrize("what", ["None", "3", "vit", "tuner", "linear"])
def test_the_model(place, model, what):
    given = {"None": None, "3": 3, "vit": make_vit().vit, "tuner": model.base_model, "linear": torch.nn.Linear(2, 2)}
    message = "model must be a backbone with a head, or a PeftModel with LuCA experts, got|exactly one head"
    for load in (load_expert, load_experts):
        with pytest.raises(ValueError, match=message):
            load(given[what], place / "one")
    for save in (
        lambda model: save_expert(model, "t", place / "not-there"),
        lambda model: save_experts(model, place / "not-there"),
        lambda model: push_expert(model, "t", "owner/x"),
        lambda model: push_experts(model, "owner/x"),
    ):
        with pytest.raises(ValueError, match="needs a PeftModel with LuCA experts, got"):
            save(given[what])
    assert not (place / "not-there").exists()


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (3, r"rename must be a dict \{expert: \{class: name\}\}, got 3"),
        ([], r"rename must be a dict \{expert: \{class: name\}\}, got \[\]"),
        ({"one": ["a"]}, r"rename must be a dict \{expert: \{class: name\}\}, got"),
        ({"one": {"a": 3}}, "class names must be non-empty strings"),
        ({"one": {"a": "\n"}}, "class names must be non-empty strings"),
        ({"one": {"a": "x\0"}}, "no control characters"),
        ({"one": {3: "x"}}, "rename names the classes"),
        ({3: {}}, "rename names the experts"),
    ],
)
def test_rename(place, rename, message):
    with pytest.raises(ValueError, match=message):
        load_experts(make_vit(), place / "one", rename=rename)
    if isinstance(rename, dict) and isinstance(rename.get("one"), (list, dict)):
        with pytest.raises(ValueError, match=message.replace(r"\{expert: \{class: name\}\}", r"\{class: name\}")):
            load_expert(make_vit(), place / "one", rename=rename["one"])


def test_loading_at_large(place):
    for load in (load_expert, load_experts):
        with pytest.raises(ValueError, match="allow_mismatch must be True or False, got 'no'"):
            load(make_vit(), place / "one", allow_mismatch="no")
        for revision in (3, ""):
            with pytest.raises(ValueError, match="revision must be a branch, tag or commit, got"):
                load(make_vit(), place / "one", revision=revision)


@pytest.mark.parametrize("name", [None, 3, ["t"], "", "x", b"t"])
def test_the_name_of_save_expert(model, tmp_path, name):
    with pytest.raises(ValueError, match=r"there is no expert .* to save. The model has t, u"):
        save_expert(model, name, tmp_path / "out")
    with pytest.raises(ValueError, match=r"there is no expert .* to save. The model has t, u"):
        save_experts(model, tmp_path / "out", ["t", name])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [3, "t", b"t"])
def test_the_names_of_save_experts(model, tmp_path, names):
    with pytest.raises(ValueError, match="names must be a list of names of experts, got"):
        save_experts(model, tmp_path / "out", names)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("directory", [None, 3, "", b"x", ["out"]])
def test_the_folder(model, place, directory):
    before = files_in(place)
    for save in (lambda where: save_expert(model, "t", where), lambda where: save_experts(model, where)):
        with pytest.raises(ValueError, match="directory must be a folder to save in, got"):
            save(directory)
        with pytest.raises(ValueError, match="is a file, and experts are saved in a folder"):
            save(place / "file")
    assert files_in(place) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"author": 3}, "author must be a name on the Hub, got 3"),
        ({"base_model": ""}, "base_model must be a name on the Hub, got ''"),
        ({"classes": "owl"}, "classes must be a list of class names, got 'owl'"),
        ({"classes": 3}, "classes must be a list of class names, got 3"),
        ({"classes": None}, "classes must be a list of class names, got None"),
        ({"classes": [3]}, "class names must be non-empty strings"),
        ({"classes": [""]}, "class names must be non-empty strings"),
    ],
)
def test_list_experts(arguments, message):
    with pytest.raises(ValueError, match=message):
        list_experts(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repo_id": None}, "repo_id must be the id of a repository, 'owner/name', got None"),
        ({"repo_id": ""}, "repo_id must be the id of a repository, 'owner/name', got ''"),
        ({"repo_id": "a/b/c"}, "must be in the form"),
        ({"repo_id": "a b"}, "alphanumeric"),
        ({"private": "yes"}, "private must be True, False or None, got 'yes'"),
        ({"revision": 3}, "revision must be a text, got 3"),
        ({"commit_message": ""}, "commit_message must be a text, got ''"),
        ({"license": 3}, "license must be a text, got 3"),
        ({"base_model": 3}, "base_model must be the id of a model on the Hub, got 3"),
        ({"datasets": 3}, "datasets must be ids of datasets on the Hub, got 3"),
        ({"datasets": [3]}, r"datasets must be ids of datasets on the Hub, got \[3\]"),
        ({"results": [1]}, r"results must be what a run's results.json holds, got \[1\]"),
        ({"results": {"tasks": None}}, "tasks in results must be a list, got None"),
        ({"results": {"last_accuracy": "x"}}, "results must be what a run's results.json holds: could not convert"),
        ({"results": {"last_accuracy": float("nan")}}, "results must be what .* holds: Out of range float values"),
    ],
)
def test_pushing(model, arguments, message):
    arguments = {"repo_id": "owner/x", **arguments}
    with pytest.raises(ValueError, match=message):
        push_expert(model, "t", **arguments)
    with pytest.raises(ValueError, match=message):
        push_experts(model, **arguments)
