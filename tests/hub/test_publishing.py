"""Pushing experts, finding and pulling them: the real client of huggingface_hub against a Hub on 127.0.0.1."""

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import assert_same, expert_tensors, files_in, make_model, make_stream, make_trainer, make_vit, pixels
from hub_models import TWO, assert_refused, change_json, with_statistics
from hub_server import card_errors
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from peft import AutoPeftModel, PeftModel
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from peft_luca import (
    InvalidExpertError,
    cli,
    list_experts,
    load_expert,
    load_experts,
    push_expert,
    push_experts,
    save_experts,
)
from peft_luca.hub import saving, validation
from peft_luca.hub.saving import EXPERT_FILES


# huggingface_hub 2.4 passes files to httpx2 in a way that httpx2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ROOT = Path(__file__).parents[2]
# Of httpx or of httpx2, whichever the client is built on.
HTTP_ERROR = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
BASE = "google/tiny-vit"


@pytest.fixture
def model():
    return make_model(TWO)


def push(model, repo_id="owner/two", **kwargs):
    return push_experts(model, repo_id, base_model=BASE, **kwargs)


def pulled_is(model, repo_id="owner/two", **kwargs):
    loaded = load_experts(make_vit(), repo_id, **kwargs)
    assert loaded.experts == model.experts
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    return loaded


def change(model):
    with torch.no_grad():
        model.base_model.layer.luca_class_rows["alpha"].add_(1)


# ---- there and back ------------------------------------------------------------------------------------------------


def test_one_expert(hub, model):
    commit = push_expert(model, "alpha", "owner/vit-alpha", base_model=BASE, license="mit", datasets="cifar100")
    repo = hub.repos["owner/vit-alpha"]
    assert sorted(repo.files) == [".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert commit.oid == repo.branches["main"]
    assert [message for _, message in repo.log] == ["initial commit", "Push expert alpha"]
    assert json.loads(repo.files["adapter_config.json"])["base_model_name_or_path"] == BASE
    assert "license: mit" in repo.files["README.md"].decode()
    loaded = load_expert(make_vit(), "owner/vit-alpha")
    assert loaded.experts == {"vit-alpha": ("c", "d", "a")}
    model.set_adapter("alpha")
    assert torch.equal(loaded(pixels()).logits, model(pixels()).logits)


def test_a_collection_with_its_router_and_statistics(hub):
    model = with_statistics()
    model.set_router("gaussian", temperature=2.0)
    push(model, private=True)
    repo = hub.repos["owner/two"]
    files = [f"{name}/{file}" for name in TWO for file in EXPERT_FILES]
    assert sorted(repo.files) == sorted([".gitattributes", "README.md", "experts.json", *files])
    assert repo.private
    assert len(repo.log) == 2  # one commit for all of it
    loaded = pulled_is(model)
    assert loaded.router == model.router
    assert torch.equal(loaded(pixels()).logits, model(pixels()).logits)
    hub.requests.clear()
    assert not load_expert(make_vit(), "owner/two", "alpha", statistics=False).statistics
    assert not hub.asked("zeta")  # nothing of the other experts
    model.set_router("entropy")
    push(model, statistics=False)
    assert not [path for path in hub.repos["owner/two"].files if "statistics" in path]


def test_large_files_go_through_lfs_in_parts(hub, model):
    hub.lfs_chunk = 1000
    push(model)
    assert len(hub.asked(r"PUT /lfs/[0-9a-f]{64}/\d+$")) > 4
    assert len(hub.asked("/verify")) == 2
    pulled_is(model)


def test_the_card_is_validated_before_the_commit(hub, model):
    push(model)
    assert set(hub.cards) == {hub.repos["owner/two"].files["README.md"].decode()}
    assert card_errors(hub.cards[0]) == []
    assert hub.requests.index("POST /api/validate-yaml") < hub.requests.index("POST /api/models/owner/two/commit/main")


@pytest.mark.parametrize("single", [True, False])
def test_the_same_pushed_again_makes_no_commit(hub, model, single):
    def push_it(model):
        return push_expert(model, "zeta", "owner/x", base_model=BASE) if single else push(model, "owner/x")

    first = push_it(model)
    loaded = load_experts(make_vit(), {"zeta": "owner/x"} if single else "owner/x")
    assert first.oid == push_it(model).oid == push_it(loaded).oid
    assert len(hub.asked("commit/main")) == 1


def test_only_what_changed_is_uploaded_deleted_experts_go_and_other_files_stay(hub, model):
    hub.add("owner/two", {"notes.txt": b"mine", "zeta/notes.txt": b"too"})
    push(model)
    uploads = len(hub.asked("PUT"))
    change(model)
    push(model)
    assert len(hub.asked("PUT")) == uploads + 1
    model.delete_adapter("zeta")
    push(model)
    files = hub.repos["owner/two"].files
    assert [path for path in files if path.startswith("zeta/")] == ["zeta/notes.txt"]
    assert files["notes.txt"] == b"mine"
    pulled_is(model)


def test_an_expert_and_a_collection_do_not_share_a_repository(hub, model):
    push_expert(model, "zeta", "owner/one", base_model=BASE)
    push(model, "owner/two")
    with pytest.raises(ValueError, match="owner/one holds a single expert, and cannot hold this too"):
        push(model, "owner/one")
    with pytest.raises(ValueError, match="owner/two holds a collection, and cannot hold this too"):
        push_expert(model, "zeta", "owner/two", base_model=BASE)


LORA = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": b"lora"}


@pytest.mark.parametrize(
    ("files", "single"),
    [
        (LORA, True),
        ({"README.md": b"# Mine"}, True),
        ({"README.md": b"# Mine"}, False),
        ({f"alpha/{name}": body for name, body in LORA.items()}, False),
    ],
)
def test_files_that_no_push_wrote_are_neither_overwritten_nor_deleted(hub, model, files, single):
    hub.add("owner/x", dict(files))
    before = dict(hub.repos["owner/x"].files)
    with pytest.raises(
        ValueError, match=r"owner/x holds '.*', which no earlier push of an expert wrote. Push to anothe"
    ):
        push_expert(model, "alpha", "owner/x", base_model=BASE) if single else push(model, "owner/x")
    assert hub.repos["owner/x"].files == before


def test_an_adapter_of_another_method_beside_the_experts_stays(hub, model):
    push(model)
    repo = hub.repos["owner/two"]
    lora = {f"lora/{name}": body for name, body in LORA.items()}
    repo.commit({**repo.files, **lora})
    model.delete_adapter("zeta")
    push(model)
    assert {path: repo.files[path] for path in lora} == lora
    assert not [path for path in repo.files if path.startswith("zeta/")]
    hub.requests.clear()
    pulled_is(model)
    assert not hub.asked("lora/")  # nor is it downloaded
    hub.add("owner/lora", dict(LORA))
    with pytest.raises(ValueError, match="owner/lora holds a single expert, and cannot hold this too"):
        push(model, "owner/lora")


@pytest.mark.parametrize(
    ("bound", "most", "message"),
    [
        ("MAX_JSON_BYTES", 100, r"owner/two/experts\.json has \d+ bytes, more than the 100 that are read"),
        ("MAX_EXPERT_BYTES", 3300, r"owner/two/.*adapter_model\.safetensors has \d+ bytes, more than the 3300"),
        (
            "MAX_DOWNLOAD_BYTES",
            0,
            r"of owner/two have \d+ bytes, more than the \d+ .* Load some of them with load_exp",
        ),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_downloaded(hub, model, monkeypatch, bound, most, message):
    push(model)
    of_alpha = sum(len(body) for path, body in hub.repos["owner/two"].files.items() if path.startswith("alpha/"))
    monkeypatch.setattr(saving if bound == "MAX_DOWNLOAD_BYTES" else validation, bound, most or of_alpha)
    hub.requests.clear()
    assert_refused(lambda model: load_experts(model, "owner/two"), message, InvalidExpertError)
    assert not hub.asked("/lfs/")
    assert len(hub.asked("GET /owner/two/resolve")) == (0 if bound == "MAX_JSON_BYTES" else 1)  # the manifest
    if bound == "MAX_DOWNLOAD_BYTES":
        assert list(load_expert(make_vit(), "owner/two", "alpha").experts) == ["alpha"]


def test_a_pattern_in_place_of_a_name_downloads_no_expert(hub, model):
    push(model)
    hub.requests.clear()
    message = r"owner/two is a collection of 'zeta', 'alpha'. Name one of them, got '\*'"
    assert_refused(lambda model: load_expert(model, "owner/two", "*"), message)
    assert not hub.asked("adapter_")


def test_collections_of_two_owners_are_put_together_in_one_line(hub):
    models = {"owner": make_model(TWO, seed=1), "other": make_model(TWO, seed=2)}
    for owner, model in models.items():
        push_experts(model, f"{owner}/run", base_model=BASE, token=f"hf_{owner}")
    both = load_experts(make_vit(), {"mine": "owner/run", "theirs": "other/run"})
    assert list(both.experts) == [f"{prefix}_{name}" for prefix in ("mine", "theirs") for name in TWO]
    for prefix, model in zip(("mine", "theirs"), models.values(), strict=True):
        tensors = (expert_tensors(both, f"{prefix}_zeta"), expert_tensors(model, "zeta"))
        assert all(map(torch.equal, *(found.values() for found in tensors)))
    one = load_expert(make_vit(), "other/run", expert="alpha", name="bugs")
    tensors = (expert_tensors(one, "bugs"), expert_tensors(models["other"], "alpha"))
    assert all(map(torch.equal, *(found.values() for found in tensors)))


def test_the_command_pushes_and_shows(hub, model, tmp_path, capsys):
    save_experts(model, tmp_path / "all")
    make_vit().save_pretrained(tmp_path / "vit")
    with pytest.warns(UserWarning, match="which is not on the Hub"):
        cli.main(["push", str(tmp_path / "all"), "owner/pushed", "--private", "--model", str(tmp_path / "vit")])
    assert hub.repos["owner/pushed"].private
    assert_same(expert_tensors(load_experts(make_vit(), "owner/pushed"), "zeta"), expert_tensors(model, "zeta"))
    capsys.readouterr()
    cli.main(["show", "owner/pushed"])
    assert "2 experts of an unnamed backbone" in capsys.readouterr().out


def test_experts_of_two_owners(hub):
    first, second = make_model({"t": ["a", "b"]}, seed=1), make_model({"t": ["c", "a"]}, seed=2)
    push_expert(first, "t", "owner/birds", base_model=BASE)
    push_expert(second, "t", "other/luca-planes", base_model=BASE, token="hf_other")
    model = load_experts(make_vit(), ["owner/birds", "other/luca-planes"], rename={"birds": {"a": "a (bird)"}})
    assert model.experts == {"birds": ("a (bird)", "b"), "expert-luca-planes": ("c", "a")}
    model.delete_adapter("expert-luca-planes")
    assert_same(expert_tensors(model, "birds"), expert_tensors(load_expert(make_vit(), "owner/birds"), "birds"))


def test_results_reach_the_manifest_and_the_card(hub, model):
    pytest.importorskip("matplotlib")
    tasks = [
        {"name": "zeta", "accuracy": [0.9], "routing": [1.0], "task_known": [0.95]},
        {"name": "alpha", "accuracy": [0.8, 0.7], "routing": [1.0, 0.5], "task_known": [0.95, None]},
    ]
    results = {"tasks": tasks, "accuracy_matrix": [[0.9, None], [0.8, 0.7]], "last_accuracy": 0.75}
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    push(model, results=results, processing_class=processor, card_data={"language": "en", "tags": ["mine"]})
    files = hub.repos["owner/two"].files
    assert json.loads(files["results.json"]) == results
    assert {"accuracy_matrix.png", "preprocessor_config.json"} <= set(files)
    manifest = json.loads(files["experts.json"])
    assert manifest["metrics"] == {"last_accuracy": 0.75}
    assert manifest["experts"][0]["metrics"] == {"task_known_accuracy": 0.95, "accuracy": 0.8}
    assert {"mine", "luca"} <= set(HfApi().model_info("owner/two").tags)
    assert b"language: en" in files["README.md"]
    push(model)
    assert "accuracy_matrix.png" not in hub.repos["owner/two"].files
    with pytest.raises(ValueError, match="not JSON compliant"):
        push(model, "owner/new", results={"last_accuracy": float("nan")})
    assert "owner/new" not in hub.repos


def test_in_the_background_the_model_is_pushed_as_it_was(hub, model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hub.before_commit = lambda: change(model)
    assert push(model, blocking=False).result().oid == hub.repos["owner/two"].branches["main"]
    assert_same(dict(load_experts(make_vit(), "owner/two").state_dict()), before)
    with pytest.raises(HfHubHTTPError, match="401"):  # at once
        push(model, "other/two", blocking=False, token=False)


# ---- revisions, private and gated repositories ---------------------------------------------------------------------


def test_revisions(hub, model):
    first = push(model).oid
    HfApi().create_tag("owner/two", tag="v1")
    model.delete_adapter("zeta")
    push(model)
    push(make_model({"w": ["q"]}), revision="trial/one")
    assert sorted(hub.repos["owner/two"].branches) == ["main", "trial/one"]
    expected = {"v1": ["zeta", "alpha"], first: ["zeta", "alpha"], None: ["alpha"], "trial/one": ["w"]}
    for revision, names in expected.items():
        assert list(load_experts(make_vit(), "owner/two", revision=revision).experts) == names
    with pytest.raises(RevisionNotFoundError):
        load_experts(make_vit(), "owner/two", revision="v2")


def test_without_the_right_to_read_or_write(hub, model):
    push(model, private=True)
    for token, status in ((False, 401), ("hf_other", 403)):
        with pytest.raises(HfHubHTTPError) as caught:
            push(model, token=token)
        assert caught.value.response.status_code == status
        assert_refused(
            lambda model, token=token: load_experts(model, "owner/two", token=token), "", RepositoryNotFoundError
        )
    assert list_experts() == []
    hub.repos["owner/two"].private, hub.repos["owner/two"].gated = False, True
    assert_refused(lambda model: load_experts(model, "owner/two", token="hf_other"), "", GatedRepoError)
    assert_refused(lambda model: load_experts(model, "owner/nowhere"), "404", RepositoryNotFoundError)
    assert len(hub.repos["owner/two"].log) == 2


def test_offline_with_a_warm_and_a_cold_cache(hub, model, monkeypatch):
    push(model)
    pulled_is(model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    pulled_is(model)
    with pytest.raises(LocalEntryNotFoundError, match="owner/elsewhere is no folder here, the Hub cannot be reached"):
        load_experts(make_vit(), "owner/elsewhere")
    assert not hub.requests


# ---- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("request_", "action"), [("PUT /lfs", 500), ("PUT /lfs", "close"), ("POST .*info/lfs", 503)])
def test_a_passing_fault_in_an_upload(hub, model, request_, action):
    hub.fail(request_, action)
    push(model)
    pulled_is(model)


@pytest.mark.parametrize(
    ("request_", "action"),
    [("PUT /lfs", 500), ("POST /api/models/owner/two/commit", "close"), ("POST .*preupload", 500)],
)
def test_a_lasting_fault_in_an_upload_leaves_what_was_there(hub, model, request_, action):
    push(model)
    change(model)
    before = dict(hub.repos["owner/two"].files)
    hub.fail(request_, action, times=100)
    with pytest.raises((HfHubHTTPError, HTTP_ERROR, RuntimeError)):
        push(model)
    assert hub.repos["owner/two"].files == before
    hub.faults.clear()
    push(model)
    pulled_is(model)


@pytest.mark.parametrize("action", [500, "half"])
def test_a_fault_in_a_download(hub, model, action):
    push(model)
    hub.fail("GET /lfs", action, times=100)
    assert_refused(lambda model: load_experts(model, "owner/two"), "", (HfHubHTTPError, HTTP_ERROR, OSError))
    hub.faults.clear()
    pulled_is(model)


@pytest.mark.parametrize("file", ["adapter_model", "statistics"])
def test_a_file_that_is_not_the_one_the_hub_named(hub, file):
    push(with_statistics())
    loaded = load_experts(make_vit(), "owner/two")
    assert set(loaded.statistics) == set(TWO)
    (path,) = Path(constants.HF_HUB_CACHE).rglob(f"alpha/{file}.safetensors")
    content = path.resolve().read_bytes()
    path.resolve().write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    message = f"{file}.safetensors is not the file that the Hub has"
    assert_refused(lambda model: load_experts(model, "owner/two"), message, InvalidExpertError)


def test_a_truncated_file(hub, model):
    push(model)
    repo, path = hub.repos["owner/two"], "alpha/adapter_model.safetensors"
    repo.commit({**repo.files, path: repo.files[path][:-1]})
    message = "alpha.adapter_model.safetensors is not a whole safetensors file"
    assert_refused(lambda model: load_experts(model, "owner/two"), message, InvalidExpertError)


# ---- two at once ---------------------------------------------------------------------------------------------------


def test_a_push_that_comes_second_is_made_once_more(hub, model, tmp_path):
    push(model)
    save_experts(make_model({"w": ["q"], "v": ["r"]}), tmp_path / "other")
    other = {file: (tmp_path / "other" / file).read_bytes() for file in files_in(tmp_path / "other")}
    hub.before_commit = lambda: hub.repos["owner/two"].commit(other, "the other push")
    change(model)
    push(model)
    assert [message for _, message in hub.repos["owner/two"].log][-2:] == ["the other push", "Push 2 experts"]
    pulled_is(model)
    assert not [path for path in hub.repos["owner/two"].files if path[:2] in ("w/", "v/")]


def test_a_push_that_comes_second_twice(hub, model):
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
    last = models[0] if "a/adapter_config.json" in hub.repos["owner/two"].files else models[1]
    pulled_is(last)
    folders = {path.split("/")[0] for path in hub.repos["owner/two"].files if "/" in path}
    assert folders == set(last.experts)


# ---- finding -------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="classes must be a list of class names, got the string 'owl'"):
        list_experts(classes="owl")


# ---- the backbone's name -------------------------------------------------------------------------------------------


def test_a_local_path_is_never_the_base_model(hub, tmp_path):
    make_vit().save_pretrained(tmp_path / "vit")
    model = make_model({"t": ["a", "b"]}, base=type(make_vit()).from_pretrained(tmp_path / "vit"))
    with pytest.warns(UserWarning, match="which is not on the Hub. Set base_model="):
        push_expert(model, "t", "owner/t")
    files = hub.repos["owner/t"].files
    assert not [path for path, body in files.items() if str(tmp_path).encode() in body]
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] is None
    assert b"base_model:" not in files["README.md"]
    for wrong in (str(tmp_path / "vit"), "../vit", "google/nowhere"):
        with pytest.raises(ValueError, match="base_model must be the id of a model on the Hub"):
            push_expert(model, "t", "owner/u", base_model=wrong)


def test_the_base_model_is_where_the_backbone_was_loaded_from(hub):
    base = make_vit()
    base.name_or_path = base.config._name_or_path = BASE
    push_expert(make_model({"t": ["a", "b"]}, base=base), "t", "owner/t")
    assert json.loads(hub.repos["owner/t"].files["adapter_config.json"])["base_model_name_or_path"] == BASE
    assert f"base_model: {BASE}" in hub.repos["owner/t"].files["README.md"].decode()


# ---- the code of cards and pages -----------------------------------------------------------------------------------


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


def base_on_the_hub(hub, folder, repo_id=BASE):
    make_vit().save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    hub.add_folder(repo_id, folder)
    return type(make_vit()).from_pretrained(folder)


def code_of_card(hub, repo_id):
    card = hub.repos[repo_id].files["README.md"].decode()
    code = re.search(r"```python\n(.*?)```", card, re.S)[1]
    assert code.startswith("import peft_luca\n")
    return code


def test_peft_loads_what_was_pushed_and_the_code_of_the_card_runs(hub, tmp_path, capsys):
    model = make_model({"t": ["a", "b"]}, base=base_on_the_hub(hub, tmp_path / "base"))
    push_expert(model, "t", "owner/t", base_model=BASE)
    base = type(make_vit()).from_pretrained(BASE)
    for loaded in (PeftModel.from_pretrained(base, "owner/t"), AutoPeftModel.from_pretrained("owner/t")):
        assert torch.equal(loaded(pixels()).logits, model(pixels()).logits)
    capsys.readouterr()
    exec(code_of_card(hub, "owner/t"), {})
    assert re.search(r"'label': '[ab]', 'score': |'score': .*'label': '[ab]'", capsys.readouterr().out)


@pytest.mark.slow
def test_the_code_of_a_collections_card_runs_and_runs_offline_afterwards(hub, tmp_path):
    push(make_model({"t": ["a", "b"], "w": ["c"]}, base=base_on_the_hub(hub, tmp_path / "base")), "owner/t")
    code = code_of_card(hub, "owner/t")
    with pytest.raises(AssertionError, match=r"offline|Offline"):
        run(hub, code, tmp_path / "home", HF_HUB_OFFLINE="1")
    shown = run(hub, code, tmp_path / "home")
    hub.requests.clear()
    assert run(hub, code, tmp_path / "home", HF_HUB_OFFLINE="1") == shown
    assert not hub.requests


@pytest.mark.slow
def test_the_code_of_the_hub_page_runs(hub, tmp_path):
    base = base_on_the_hub(hub, tmp_path / "base", "google/vit-base-patch16-224-in21k")
    for repo_id, classes in (("lab-a/vit-birds", ["owl", "wren"]), ("lab-b/vit-satellite", ["sea"])):
        model = make_model({"t": classes}, base=base)
        save_experts(model, tmp_path / repo_id)
        hub.add_folder(repo_id, tmp_path / repo_id / "t")
        base = model.unload()
    page = (ROOT / "docs" / "hub.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.S)).replace("me/", "owner/")
    assert "vit-birds: 2 classes (owl, wren)" in run(hub, code, tmp_path / "home", HF_TOKEN="hf_owner")
    assert {"owner/vit-birds", "owner/everything"} <= set(hub.repos)
    assert hub.repos["owner/everything"].private


@pytest.mark.slow
def test_a_thousand_experts_load_within_a_minute(hub, tmp_path):
    """Experts of a ViT-B's [CLS] with ten classes each, in files of their own, with the download."""
    config = ViTConfig(hidden_size=768, num_hidden_layers=1, intermediate_size=64, image_size=32, patch_size=16)
    torch.manual_seed(0)
    model = make_model({"e0": [f"c{i}" for i in range(10)]}, base=ViTForImageClassification(config).eval())
    save_experts(model, tmp_path)
    change_json(tmp_path / "experts.json", experts=[{"name": f"e{i}", "classes": []} for i in range(1000)])
    config = json.loads((tmp_path / "e0" / "adapter_config.json").read_bytes())
    weights = (tmp_path / "e0" / "adapter_model.safetensors").read_bytes()
    files = {"experts.json": (tmp_path / "experts.json").read_bytes()}
    for i in range(1000):
        own = {**config, "classes": [f"{i} {j}" for j in range(10)]}
        files[f"e{i}/adapter_config.json"] = json.dumps(own).encode()
        # Two bytes of their own: the client downloads a content once.
        files[f"e{i}/adapter_model.safetensors"] = weights[:-4] + i.to_bytes(2, "little") + weights[-2:]
    hub.add("owner/thousand", files)
    base = model.unload()
    started = time.perf_counter()
    loaded = load_experts(base, "owner/thousand")
    assert time.perf_counter() - started < 60
    assert len(hub.asked("GET /lfs")) == len(loaded.experts) == 1000
    assert len(loaded.classes) == 10_000


# ---- by the trainer ------------------------------------------------------------------------------------------------


def short_run(folder, **changes):
    return make_trainer(folder, stream=make_stream(increment=3), num_train_epochs=1, **changes)


def test_a_trainer_pushes_after_each_task_and_at_the_end(hub, out):
    trainer = short_run(out, push_to_hub=True, hub_model_id="colours", hub_private_repo=True)
    trainer.train()
    repo = hub.repos["owner/colours"]
    messages = [message for _, message in repo.log]
    assert messages[0] == "initial commit"
    assert messages[1].startswith("task_0")
    assert repo.private
    files = set(repo.files)
    assert {"README.md", "experts.json", "results.json", "preprocessor_config.json"} <= files
    assert {f"{task.name}/adapter_model.safetensors" for task in trainer.stream} <= files
    assert not [path for path in files if path.endswith((".bin", ".pt", ".pkl")) or "checkpoint" in path]
    manifest, results = json.loads(repo.files["experts.json"]), json.loads(repo.files["results.json"])
    assert results == json.loads(json.dumps(trainer.results()))
    assert manifest["metrics"]["last_accuracy"] == results["last_accuracy"]
    measured = [entry["metrics"]["task_known_accuracy"] for entry in manifest["experts"]]
    assert measured == results["tasks"][-1]["task_known"]
    assert pulled_is(trainer.model, "owner/colours").router == trainer.model.router
    assert trainer.push_to_hub().oid == repo.branches["main"]
    assert [message for _, message in repo.log] == messages  # nothing new
    assert str(out) not in "".join(body.decode(errors="ignore") for body in repo.files.values())


def test_a_trainer_pushes_at_the_end_only(hub, out):
    trainer = short_run(out, push_to_hub=True, hub_strategy="end", hub_revision="trial")
    trainer.train()
    assert [message for _, message in hub.repos["owner/out"].log] == ["initial commit", "End of training"]
    pulled_is(trainer.model, "owner/out", revision="trial")


def test_a_run_goes_on_when_the_hub_does_not_respond(hub, out):
    trainer = short_run(out, push_to_hub=True)
    hub.fail("commit/main", 500, times=1)
    trainer.train()
    pulled_is(trainer.model, "owner/out")
