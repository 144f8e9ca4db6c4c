"""Pushing and pulling experts: the real client of huggingface_hub against a Hub of the tests' own on 127.0.0.1."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
import torch
from helpers import (
    assert_same,
    expert_tensors,
    files_in,
    make_arguments,
    make_model,
    make_stream,
    make_trainer,
    make_vit,
    pixels,
)
from hub_server import HubServer, card_errors
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import ViTConfig, ViTForImageClassification

from peft_luca import (
    InvalidExpertError,
    list_experts,
    load_expert,
    load_experts,
    push_expert,
    push_experts,
    save_experts,
)
from peft_luca.hub.saving import EXPERT_FILES


# huggingface_hub 2.4 passes files to httpx2 in a way that httpx2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ROOT = Path(__file__).parents[2]
TWO = {"zeta": ["a", "b"], "alpha": ["c", "d", "a"]}
BASE = "google/tiny-vit"
OWNER = "hf_owner"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub, and the client set to use it, logged in as `owner`."""
    with HubServer() as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # transformers' own client, made once
        monkeypatch.setenv("HF_TOKEN", OWNER)
        # The client waits a second and more before it asks again after a 500.
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        server.add(BASE)
        yield server


@pytest.fixture
def model():
    return make_model(TWO)


def push(model, repo_id="owner/two", **kwargs):
    return push_experts(model, repo_id, base_model=BASE, **kwargs)


# ---- there and back --------------------------------------------------------------------------------------------


def test_one_expert_there_and_back(hub, model):
    commit = push_expert(model, "alpha", "owner/vit-alpha", base_model=BASE, license="mit", datasets="cifar100")
    repo = hub.repos["owner/vit-alpha"]
    assert sorted(repo.files) == [".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert commit.oid == repo.branches["main"]
    assert [message for _, message in repo.log] == ["initial commit", "Push expert alpha"]
    assert json.loads(repo.files["adapter_config.json"])["base_model_name_or_path"] == BASE
    loaded = load_expert(make_vit(), "owner/vit-alpha")
    assert loaded.experts == {"vit-alpha": ("c", "d", "a")}
    model.set_adapter("alpha")
    assert torch.equal(loaded(pixels()).logits, model(pixels()).logits)


def test_a_collection_there_and_back(hub, model):
    model.set_router("entropy", temperature=2.0)
    push(model)
    repo = hub.repos["owner/two"]
    assert sorted(repo.files) == sorted(
        [".gitattributes", "README.md", "experts.json"]
        + [f"{name}/{file}" for name in TWO for file in ("adapter_config.json", "adapter_model.safetensors")]
    )
    assert len(repo.log) == 2  # one commit for all of it
    loaded = load_experts(make_vit(), "owner/two")
    assert loaded.experts == model.experts
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert torch.equal(loaded(pixels()).logits, model(pixels()).logits)
    assert load_expert(make_vit(), "owner/two", "alpha").experts == {"alpha": tuple(TWO["alpha"])}


def test_large_files_go_through_lfs_and_in_parts(hub, model):
    push(model)
    assert len(hub.asked("PUT /lfs/[0-9a-f]{64}$")) == 2
    assert len(hub.asked("/verify")) == 2
    hub.lfs.clear()
    hub.lfs_chunk = 1000
    push(model, "owner/again")
    assert len(hub.asked(r"PUT /lfs/[0-9a-f]{64}/\d+$")) > 4
    loaded = load_experts(make_vit(), "owner/again")
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_the_card_goes_last_and_is_validated(hub, model):
    push(model)
    assert hub.cards == [hub.repos["owner/two"].files["README.md"].decode()]
    assert card_errors(hub.cards[0]) == []
    assert hub.requests.index("POST /api/validate-yaml") < hub.requests.index("POST /api/models/owner/two/commit/main")


@pytest.mark.parametrize("single", [True, False])
def test_the_same_thing_pushed_again_changes_nothing(hub, model, single):
    def push_it():
        return push_expert(model, "zeta", "owner/x", base_model=BASE) if single else push(model, "owner/x")

    first, second = push_it(), push_it()
    assert first.oid == second.oid
    assert len(hub.repos["owner/x"].log) == 2
    assert len(hub.asked("commit/main")) == 1
    loaded = load_experts(make_vit(), {"zeta": "owner/x"} if single else "owner/x")
    again = push_expert(loaded, "zeta", "owner/x", base_model=BASE) if single else push(loaded, "owner/x")
    assert again.oid == first.oid  # not even by somebody who pulled it


def test_only_what_changed_is_committed_and_deleted_experts_go(hub, model):
    push(model)
    uploads = len(hub.asked("PUT"))
    with torch.no_grad():
        model.base_model.layer.luca_class_rows["alpha"].add_(1)
    push(model)
    assert len(hub.asked("PUT")) == uploads + 1
    model.delete_adapter("zeta")
    push(model)
    assert not [path for path in hub.repos["owner/two"].files if path.startswith("zeta/")]
    assert load_experts(make_vit(), "owner/two").experts == {"alpha": tuple(TWO["alpha"])}


def test_other_files_of_the_repository_stay(hub, model):
    hub.add("owner/two", {"notes.txt": b"mine", "zeta/notes.txt": b"too"})
    push(model)
    assert hub.repos["owner/two"].files["notes.txt"] == b"mine"
    assert hub.repos["owner/two"].files["zeta/notes.txt"] == b"too"


def test_an_expert_and_a_collection_do_not_share_a_repository(hub, model):
    push_expert(model, "zeta", "owner/one", base_model=BASE)
    push(model, "owner/two")
    with pytest.raises(ValueError, match="owner/one holds a single expert, not a collection"):
        push(model, "owner/one")
    with pytest.raises(ValueError, match="owner/two holds a collection, not one expert"):
        push_expert(model, "zeta", "owner/two", base_model=BASE)


def test_experts_of_two_owners_compose_in_any_order(hub):
    first, second = make_model({"t": ["a", "b"]}, seed=1), make_model({"t": ["c", "a"]}, seed=2)
    push_expert(first, "t", "owner/birds", base_model=BASE)
    push_expert(second, "t", "other/planes", base_model=BASE, token="hf_other")
    one = load_experts(make_vit(), ["owner/birds", "other/planes"])
    two = load_experts(make_vit(), ["other/planes", "owner/birds"])
    assert one.classes == ("a", "b", "c")
    assert two.classes == ("c", "a", "b")
    one.set_router("entropy")
    two.set_router("entropy")
    order = [two.classes.index(name) for name in one.classes]
    torch.testing.assert_close(two(pixels(16)).logits[:, order], one(pixels(16)).logits)
    renamed = load_experts(make_vit(), ["owner/birds", "other/planes"], rename={"planes": {"a": "a (plane)"}})
    assert renamed.classes == ("a", "b", "c", "a (plane)")
    running = load_expert(load_expert(make_vit(), "owner/birds"), "other/planes", "p", rename={"c": "b"})
    assert running.experts == {"birds": ("a", "b"), "p": ("b", "a")}
    running.delete_adapter("p")
    assert_same(expert_tensors(running, "birds"), expert_tensors(load_expert(make_vit(), "owner/birds"), "birds"))


def test_a_router_that_is_set_stays_set_while_experts_come_and_go(hub, model):
    push(model)
    running = load_experts(make_vit(), "owner/two")
    running.set_router("entropy")
    load_experts(running, {"more": _pushed(model, "owner/more")})
    assert running.base_model.layer.router is not None
    assert list(running.experts) == ["zeta", "alpha", "more"]
    running.delete_adapter("zeta")
    assert running(pixels()).logits.shape[1] == len(running.classes) == 3


def _pushed(model, repo_id):
    push_expert(model, "alpha", repo_id, base_model=BASE)
    return repo_id


def test_rename_says_what_there_is(hub, model):
    push(model)
    with pytest.raises(ValueError, match=r"rename names the experts \['x'\], but those to load are 'zeta', 'alpha'"):
        load_experts(make_vit(), "owner/two", rename={"x": {"a": "b"}})
    with pytest.raises(ValueError, match=r"rename names the classes \['q'\], but expert 'zeta' has 'a', 'b'"):
        load_experts(make_vit(), "owner/two", rename={"zeta": {"q": "b"}})
    with pytest.raises(ValueError, match="each class may be named once"):
        load_experts(make_vit(), "owner/two", rename={"zeta": {"a": "b"}})


def test_an_expert_of_a_collection_must_be_there(hub, model):
    push(model)
    with pytest.raises(ValueError, match=r"owner/two is a collection of 'zeta', 'alpha'. Name one of them, got 'x'"):
        load_expert(make_vit(), "owner/two", "x")
    with pytest.raises(ValueError, match="Name one of them, got None"):
        load_expert(make_vit(), "owner/two")


def test_of_a_collection_only_the_expert_that_is_named_is_downloaded(hub, model):
    push(model)
    hub.requests.clear()
    load_expert(make_vit(), "owner/two", "alpha")
    assert not hub.asked("zeta")
    assert hub.asked("HEAD /owner/two/resolve/[0-9a-f]+/alpha/adapter_model.safetensors")
    assert len(hub.asked("GET /lfs")) == 1


def test_names_that_an_expert_cannot_have(hub, model):
    push_expert(model, "alpha", "owner/luca-birds", base_model=BASE)
    assert list(load_expert(make_vit(), "owner/luca-birds").experts) == ["expert-luca-birds"]
    assert list(load_experts(make_vit(), ["owner/luca-birds"]).experts) == ["expert-luca-birds"]


def test_the_clients_other_calls_find_what_was_pushed(hub, model):
    commit = push(model)
    api = HfApi()
    api.create_tag("owner/two", tag="v1")
    refs, about = api.list_repo_refs("owner/two"), api.model_info("owner/two")
    assert api.whoami()["name"] == "owner"
    assert {ref.name: ref.target_commit for ref in refs.branches + refs.tags} == {"main": commit.oid, "v1": commit.oid}
    assert about.sha == commit.oid
    assert {"luca", "continual-learning", "class:a", f"base_model:{BASE}"} <= set(about.tags)
    assert sorted(api.list_repo_files("owner/two")) == sorted(hub.repos["owner/two"].files)
    path = api.hf_hub_download("owner/two", "alpha/adapter_config.json", revision="v1")
    assert Path(path).read_bytes() == hub.repos["owner/two"].files["alpha/adapter_config.json"]


# ---- revisions, private and gated repositories -----------------------------------------------------------------


def test_revisions(hub, model):
    first = push(model).oid
    HfApi().create_tag("owner/two", tag="v1")
    model.delete_adapter("zeta")
    push(model)
    push(make_model({"w": ["q"]}), revision="trial/one")
    assert sorted(hub.repos["owner/two"].branches) == ["main", "trial/one"]
    for revision, names in (("v1", ["zeta", "alpha"]), (first, ["zeta", "alpha"]), (None, ["alpha"])):
        assert list(load_experts(make_vit(), "owner/two", revision=revision).experts) == names
    assert list(load_experts(make_vit(), "owner/two", revision="trial/one").experts) == ["w"]
    with pytest.raises(RevisionNotFoundError):
        load_experts(make_vit(), "owner/two", revision="v2")


def test_a_branch_that_moved_is_followed_and_a_commit_is_not(hub, model):
    pinned = push(model).oid
    before = load_experts(make_vit(), "owner/two")
    with torch.no_grad():
        model.base_model.layer.luca_class_rows["alpha"].add_(1)
    push(model)
    after, still = load_experts(make_vit(), "owner/two"), load_experts(make_vit(), "owner/two", revision=pinned)
    assert_same(expert_tensors(after, "alpha"), expert_tensors(model, "alpha"))
    assert_same(expert_tensors(still, "alpha"), expert_tensors(before, "alpha"))


def test_private(hub, model, monkeypatch, tmp_path):
    push(model, private=True)
    assert hub.repos["owner/two"].private
    assert load_experts(make_vit(), "owner/two").experts == model.experts
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "strangers-cache"))
    for token in ("hf_other", False):
        with pytest.raises(RepositoryNotFoundError):
            load_experts(make_vit(), "owner/two", token=token)
    assert list_experts() == []


def test_gated(hub, model):
    push(model)
    hub.repos["owner/two"].gated = True
    with pytest.raises(GatedRepoError):
        load_experts(make_vit(), "owner/two", token="hf_other")
    base = make_vit()
    with pytest.raises(RepositoryNotFoundError, match="404"):
        load_experts(base, "owner/nowhere")
    assert not [name for name, _ in base.named_modules() if "luca" in name]


def test_pushing_without_the_right_to(hub, model):
    push(model)
    for token, status in ((False, 401), ("hf_other", 403)):
        with pytest.raises(HfHubHTTPError) as caught:
            push_experts(model, "owner/two", token=token)
        assert caught.value.response.status_code == status
    assert len(hub.repos["owner/two"].log) == 2


def test_what_is_neither_a_folder_nor_a_hub_id(hub):
    with pytest.raises(InvalidExpertError, match="neither a folder nor a Hub id"):
        load_experts(make_vit(), "/no/such/folder")
    with pytest.raises(InvalidExpertError, match="neither a folder nor a Hub id"):
        load_expert(make_vit(), "../x")


# ---- trouble on the way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "action"),
    [("PUT /lfs", 500), ("PUT /lfs", "close"), ("POST /owner/two.git/info/lfs", 503)],
)
def test_a_passing_fault_in_an_upload(hub, model, request_, action):
    hub.fail(request_, action)
    push(model)
    assert_same(dict(load_experts(make_vit(), "owner/two").state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("request_", ["PUT /lfs", "POST /api/models/owner/two/commit", "POST .*preupload"])
@pytest.mark.parametrize("action", [500, "close"])
def test_a_lasting_fault_in_an_upload_leaves_what_was_there(hub, model, request_, action):
    push(model)
    with torch.no_grad():
        model.base_model.layer.luca_class_rows["alpha"].add_(1)
    before = dict(hub.repos["owner/two"].files)
    hub.fail(request_, action, times=100)
    with pytest.raises((HfHubHTTPError, httpx2.HTTPError, RuntimeError)):
        push(model)
    assert hub.repos["owner/two"].files == before
    hub.faults.clear()
    push(model)
    assert_same(dict(load_experts(make_vit(), "owner/two").state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("action", [500, "close", "half"])
def test_a_fault_in_a_download(hub, model, action):
    push(model)
    hub.fail("GET /lfs", action, times=2)
    base = make_vit()
    try:
        loaded = load_experts(base, "owner/two")
    except (HfHubHTTPError, OSError):
        assert not [name for name, _ in base.named_modules() if "luca" in name]
        hub.faults.clear()
        loaded = load_experts(base, "owner/two")
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_a_file_that_is_not_the_one_the_hub_named(hub, model):
    push(model)
    for oid, body in hub.lfs.items():
        hub.lfs[oid] = body[:-4] + b"\0\0\0\0"
    base = make_vit()
    with pytest.raises(InvalidExpertError, match="is not the file that the Hub has: its digest is another one"):
        load_experts(base, "owner/two")
    assert not [name for name, _ in base.named_modules() if "luca" in name]


def test_statistics_that_are_not_those_the_hub_named(hub):
    push(with_statistics())
    loaded = load_experts(make_vit(), "owner/two")
    (part,) = (part for name, part in loaded.base_model.layer.statistics.items() if name == "alpha")
    path = (part / "statistics.safetensors").resolve()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InvalidExpertError, match=r"statistics.safetensors is not the file that the Hub has"):
        loaded.set_router("gaussian")
    assert loaded.base_model.layer.router is None


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file(hub, model, keep):
    push(model)
    repo = hub.repos["owner/two"]
    path = "alpha/adapter_model.safetensors"
    repo.commit({**repo.files, path: repo.files[path][:keep]})
    base = make_vit()
    with pytest.raises(InvalidExpertError, match=r"alpha.adapter_model.safetensors (has|is not a whole)"):
        load_experts(base, "owner/two")
    assert not [name for name, _ in base.named_modules() if "luca" in name]


def test_offline_with_a_warm_and_a_cold_cache(hub, model, monkeypatch):
    push(model)
    load_experts(make_vit(), "owner/two")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    loaded = load_experts(make_vit(), "owner/two")
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    with pytest.raises(LocalEntryNotFoundError):
        load_experts(make_vit(), "owner/elsewhere")
    assert not hub.requests


# ---- two at once -----------------------------------------------------------------------------------------------


def test_a_push_that_comes_second_is_made_once_more(hub, model, caplog):
    other = make_model({"w": ["q"], "v": ["r"]})
    push(model)
    hub.before_commit = lambda: hub.repos["owner/two"].commit(_files_of(other), "the other push")
    with torch.no_grad():
        model.base_model.layer.luca_class_rows["alpha"].add_(1)
    push(model)
    assert [message for _, message in hub.repos["owner/two"].log][-2:] == ["the other push", "Push 2 experts"]
    loaded = load_experts(make_vit(), "owner/two")
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert not [path for path in hub.repos["owner/two"].files if path[:2] in ("w/", "v/")]


def test_a_push_that_comes_second_twice_says_so(hub, model):
    def other():
        repo = hub.repos["owner/two"]
        repo.commit({**repo.files, "notes": b"%d" % len(repo.log)}, "the other push")
        if len(repo.log) < 4:
            hub.before_commit = other

    hub.before_commit = other
    with pytest.raises(RuntimeError, match=r"somebody else pushed to owner/two at the same time, twice \(412\)"):
        push(model)
    assert "experts.json" not in hub.repos["owner/two"].files


def test_two_pushes_at_once_end_in_one_of_them(hub):
    models = [make_model({"a": ["1"], "b": ["2"]}, seed=1), make_model({"b": ["2"], "c": ["3"]}, seed=2)]
    hub.add("owner/two")
    errors = []

    def work(model):
        try:
            push(model)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loaded = load_experts(make_vit(), "owner/two")
    last = models[0] if list(loaded.experts) == ["a", "b"] else models[1]
    assert_same(dict(loaded.state_dict()), dict(last.state_dict()))
    folders = {path.split("/")[0] for path in hub.repos["owner/two"].files if "/" in path}
    assert folders == set(last.experts)


def _files_of(model):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save_experts(model, folder)
        return {file: (Path(folder) / file).read_bytes() for file in files_in(Path(folder))}


# ---- finding ---------------------------------------------------------------------------------------------------


def test_list_experts(hub, model):
    push(model)
    push_expert(model, "zeta", "owner/zeta", base_model=BASE)
    hub.add("google/other-vit")
    other = make_model({"t": ["Grand Piano", "a"]})
    push_expert(other, "t", "other/piano", base_model="google/other-vit", token="hf_other")
    hub.add("other/lama", {"README.md": b"---\ntags: [luca]\n---\n"})

    def ids(**kwargs):
        return [info.id for info in list_experts(**kwargs)]

    assert ids() == ["other/piano", "owner/two", "owner/zeta"]
    assert ids(author="owner") == ["owner/two", "owner/zeta"]
    assert ids(base_model="google/other-vit") == ["other/piano"]
    assert ids(classes=["grand piano"]) == ["other/piano"]
    assert ids(classes=["a", "b"]) == ["owner/two", "owner/zeta"]
    assert ids(classes=["c"], author="owner", base_model=BASE) == ["owner/two"]
    assert ids(classes=["nothing"]) == []


# ---- what is said of the backbone ------------------------------------------------------------------------------


def test_a_local_path_is_never_the_base_model(hub, model, tmp_path):
    make_vit().save_pretrained(tmp_path / "vit")
    base = type(make_vit()).from_pretrained(tmp_path / "vit")
    local = make_model({"t": ["a", "b"]}, base=base)
    with pytest.warns(UserWarning, match="which is not on the Hub, so that nobody will know"):
        push_expert(local, "t", "owner/t")
    files = hub.repos["owner/t"].files
    assert not [path for path, body in files.items() if str(tmp_path).encode() in body]
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] is None
    assert b"base_model:" not in files["README.md"]
    for wrong in (str(tmp_path / "vit"), "../vit", "google/nowhere"):
        with pytest.raises(ValueError, match="base_model must be the id of a model on the Hub"):
            push_expert(local, "t", "owner/u", base_model=wrong)


def test_the_base_model_is_where_the_backbone_was_loaded_from(hub):
    base = make_vit()
    base.name_or_path = base.config._name_or_path = BASE
    push_expert(make_model({"t": ["a", "b"]}, base=base), "t", "owner/t")
    assert json.loads(hub.repos["owner/t"].files["adapter_config.json"])["base_model_name_or_path"] == BASE
    assert f"base_model: {BASE}" in hub.repos["owner/t"].files["README.md"].decode()


# ---- another process, as a user has it -------------------------------------------------------------------------


def run(hub, code, home, **environment):
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "HF_HOME": str(home),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def base_on_the_hub(hub, tmp_path):
    from transformers import ViTImageProcessorPil

    make_vit().save_pretrained(tmp_path / "base")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "base")
    hub.add_folder(BASE, tmp_path / "base")
    return type(make_vit()).from_pretrained(tmp_path / "base")


PEFTS_OWN_PATHS = """
import peft_luca, torch
from peft import AutoPeftModel, PeftModel
from transformers import AutoModelForImageClassification
x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
vit = AutoModelForImageClassification.from_pretrained("google/tiny-vit")
loaded = PeftModel.from_pretrained(vit, "owner/t")
print(loaded(x).logits.tolist())
print(AutoPeftModel.from_pretrained("owner/t")(x).logits.tolist())
"""


def code_of_card(hub, repo_id):
    card = hub.repos[repo_id].files["README.md"].decode()
    code = re.search(r"```python\n(.*?)```", card, re.S)[1]
    assert code.startswith("import peft_luca\n")
    return code


def test_pefts_own_ways_load_what_was_pushed_and_the_cards_code_runs_as_it_stands(hub, base_on_the_hub, tmp_path):
    model = make_model({"t": ["a", "b"]}, base=base_on_the_hub)
    push_expert(model, "t", "owner/t", base_model=BASE)
    with torch.no_grad():
        x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
        wanted = model(x).logits.tolist()
    *logits, answer = run(hub, PEFTS_OWN_PATHS + code_of_card(hub, "owner/t"), tmp_path / "home").splitlines()
    assert [json.loads(line) for line in logits] == [wanted, wanted]
    assert re.search(r"'label': '[ab]', 'score': |'score': .*'label': '[ab]'", answer)


@pytest.mark.slow
def test_a_collections_code_runs_and_runs_offline_afterwards(hub, base_on_the_hub, tmp_path):
    push_experts(make_model({"t": ["a", "b"], "u": ["c"]}, base=base_on_the_hub), "owner/t", base_model=BASE)
    code = code_of_card(hub, "owner/t")
    with pytest.raises(AssertionError, match=r"offline|Offline"):
        run(hub, code, tmp_path / "home", HF_HUB_OFFLINE="1")
    shown = run(hub, code, tmp_path / "home")
    hub.requests.clear()
    assert run(hub, code, tmp_path / "home", HF_HUB_OFFLINE="1") == shown
    assert not hub.requests


# ---- the trainer


def short_run(folder, **changes):
    return make_trainer(folder, stream=make_stream(increment=3), num_train_epochs=1, **changes)


def test_a_trainer_pushes_each_expert_when_it_is_learnt_and_all_at_the_end(hub, out):
    trainer = short_run(out, push_to_hub=True, hub_model_id="colours", hub_private_repo=True)
    trainer.train()
    repo = hub.repos["owner/colours"]
    messages = [message for _, message in repo.log]
    assert messages[:2] == ["initial commit", "task_0 learnt"]
    assert repo.private
    files = set(repo.files)
    assert {"README.md", "experts.json", "results.json", "preprocessor_config.json"} <= files
    assert {f"{task.name}/adapter_model.safetensors" for task in trainer.stream} <= files
    assert not [path for path in files if path.endswith((".bin", ".pt", ".pkl")) or "checkpoint" in path]
    manifest, results = json.loads(repo.files["experts.json"]), json.loads(repo.files["results.json"])
    assert results == json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert manifest["metrics"]["last_accuracy"] == results["last_accuracy"]
    assert [entry["metrics"]["task_known_accuracy"] for entry in manifest["experts"]] == results["tasks"][-1][
        "task_known"
    ]
    loaded = load_experts(make_vit(), "owner/colours")
    assert_same(dict(loaded.state_dict()), dict(trainer.model.state_dict()))
    assert loaded.base_model.layer.router is trainer.tuner.layer.router
    commit = trainer.push_to_hub()
    assert commit.oid == repo.branches["main"]
    assert [message for _, message in repo.log] == messages  # nothing new
    assert str(out) not in "".join(body.decode(errors="ignore") for body in repo.files.values())


def test_at_the_end_only(hub, out):
    trainer = short_run(out, push_to_hub=True, hub_strategy="end", hub_revision="trial")
    trainer.train()
    assert [message for _, message in hub.repos["owner/out"].log] == ["initial commit", "End of training"]
    assert load_experts(make_vit(), "owner/out", revision="trial").experts == trainer.tuner.experts


def test_a_run_goes_on_when_the_hub_does_not_answer(hub, out, caplog):
    trainer = short_run(out, push_to_hub=True)
    hub.fail("commit/main", 500, times=1)
    trainer.train()
    assert list(load_experts(make_vit(), "owner/out").experts) == [task.name for task in trainer.stream]
    hub.fail(".*", 500, times=10_000)
    other = short_run(out.parent / "other")
    other.args.push_to_hub, other.hub_model_id = True, "owner/other"
    with pytest.raises(HfHubHTTPError):
        other.train()
    assert len(json.loads((out.parent / "other" / "results.json").read_text(encoding="utf-8"))["tasks"]) == 2


def test_pushing_what_is_not_there(hub, out):
    with pytest.raises(ValueError, match="needs a PeftModel with LuCA experts"):
        make_trainer(out).push_to_hub()
    with pytest.raises(ValueError, match="hub_strategy is 'checkpoint', but checkpoints hold pickled state"):
        make_arguments(out, push_to_hub=True, hub_strategy="checkpoint")


def test_the_trainers_card(hub, out):
    trainer = short_run(out)
    trainer.train()
    trainer.create_model_card(license="mit", tags=["mine"])
    assert card_errors((out / "README.md").read_text(encoding="utf-8")) == []
    trainer.save_model()
    assert "license: mit" in (out / "README.md").read_text(encoding="utf-8")


# ---- statistics


def with_statistics(experts=TWO):
    model = make_model(experts)
    for name in experts:  # statistics go together where the references do
        model.base_model.layer.luca_reference_mean[name].zero_()
        model.base_model.layer.luca_reference_std[name].fill_(1)
        model.compute_reference(name)
        features = torch.randn(40, 32, generator=torch.Generator().manual_seed(len(name)))
        model.collect_statistics(name, features, torch.arange(40) % len(experts[name]))
    return model


def test_statistics_travel_beside_the_experts_and_are_read_when_a_router_needs_them(hub):
    model = with_statistics()
    push(model)
    assert "alpha/statistics.safetensors" in hub.repos["owner/two"].files
    loaded = load_experts(make_vit(), "owner/two")
    assert all(isinstance(part, Path) for part in loaded.base_model.layer.statistics.values())
    model.set_router("gaussian")
    loaded.set_router("gaussian")
    assert not any(isinstance(part, Path) for part in loaded.base_model.layer.statistics.values())
    assert torch.equal(loaded(pixels()).logits, model(pixels()).logits)
    push(model)
    assert load_experts(make_vit(), "owner/two").base_model.layer.router is model.base_model.layer.router
    model.set_router("entropy")
    push(model, statistics=False)
    assert not [path for path in hub.repos["owner/two"].files if "statistics" in path]


def test_statistics_follow_renamed_classes(hub):
    push(with_statistics())
    loaded = load_experts(make_vit(), "owner/two", rename={"alpha": {"a": "another a"}})
    loaded.set_router("gaussian")
    assert loaded.classes == ("a", "b", "c", "d", "another a")
    assert loaded.base_model.layer.statistics["alpha"].classes == ("c", "d", "another a")


def test_enormous_statistics_are_refused(hub, tmp_path):
    save_experts(with_statistics(), tmp_path / "all")
    os.truncate(tmp_path / "all" / "alpha" / "statistics.safetensors", 2**38)
    with pytest.raises(InvalidExpertError, match=r"statistics.safetensors has 274877906944 bytes, more than"):
        load_experts(make_vit(), tmp_path / "all")


@pytest.mark.slow
def test_a_thousand_experts_load_within_a_minute_from_the_hub_and_their_statistics_stay_unread(hub, tmp_path):
    """Experts of a ViT-B's [CLS], each of ten classes and in files of its own, with the download."""
    config = ViTConfig(hidden_size=768, num_hidden_layers=1, intermediate_size=64, image_size=32, patch_size=16)
    torch.manual_seed(0)
    model = make_model({"e0": [f"c{i}" for i in range(10)]}, base=ViTForImageClassification(config).eval())
    model.collect_statistics("e0", torch.randn(200, 768), torch.arange(200) % 10, rank=8)
    save_experts(model, tmp_path)
    config, weights, statistics = ((tmp_path / "e0" / file).read_bytes() for file in EXPERT_FILES)
    manifest = json.loads((tmp_path / "experts.json").read_text(encoding="utf-8"))
    manifest["experts"] = [{"name": f"e{i}", "classes": []} for i in range(1000)]
    files = {"experts.json": json.dumps(manifest).encode()}
    for i in range(1000):
        own = {**json.loads(config), "classes": [f"{i} {j}" for j in range(10)]}
        files[f"e{i}/adapter_config.json"] = json.dumps(own).encode()
        # Two bytes of their own, so that no file is another's: the Hub's client downloads a content once.
        for name, content in zip(EXPERT_FILES[1:], (weights, statistics), strict=True):
            files[f"e{i}/{name}"] = content[:-4] + i.to_bytes(2, "little") + content[-2:]
    hub.add("owner/thousand", files)
    base = model.unload()
    started = time.perf_counter()
    loaded = load_experts(base, "owner/thousand")
    assert time.perf_counter() - started < 60
    assert len(hub.asked("GET /lfs")) == 2000
    assert len(loaded.experts) == 1000
    assert len(loaded.classes) == 10_000
    parts = loaded.base_model.layer.statistics.values()
    assert all(isinstance(part, Path) for part in parts)


@pytest.mark.slow
def test_the_code_of_the_hub_page_runs_as_it_stands(hub, tmp_path):
    base_id = "google/vit-base-patch16-224-in21k"
    make_vit().save_pretrained(tmp_path / "base")
    hub.add_folder(base_id, tmp_path / "base")
    base = type(make_vit()).from_pretrained(tmp_path / "base")
    hub.repos["lab-a/vit-birds"] = hub.repos["lab-b/vit-satellite"] = None
    for repo_id, classes in (("lab-a/vit-birds", ["owl", "wren"]), ("lab-b/vit-satellite", ["sea"])):
        model = make_model({"t": classes}, base=base)
        save_experts(model, tmp_path / repo_id)
        hub.add_folder(repo_id, tmp_path / repo_id / "t")
        base = model.unload()
    page = (ROOT / "docs" / "hub.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.S)).replace("me/", "owner/")
    assert "'vit-birds': ('owl', 'wren')" in run(hub, code, tmp_path / "home", HF_TOKEN=OWNER)
    assert {"owner/vit-birds", "owner/everything"} <= set(hub.repos)
    assert hub.repos["owner/everything"].private
