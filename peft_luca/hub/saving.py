"""Saving and loading experts: one, or an ordered collection of them with its router, in a folder or from the Hub."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    snapshot_download,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from torch import nn
from transformers.utils import logging

from ..routing import make_router
from ..routing.statistics import STATISTICS_NAME, ClassStatistics
from ..tuner.backbone import check_backbone
from ..tuner.config import LucaConfig
from ..tuner.head import Head, check_expert_name, find_head
from ..tuner.layer import LucaLayer, find_layer
from ..tuner.model import LucaModel, quiet_peft, tuner_of
from ..utils import NAME_RULE, InvalidExpertError, check_classes, pluralize, show, write_json
from .model_card import (
    PICTURE_NAME,
    TAGS,
    class_tag,
    collection_figures,
    draw_accuracy_matrix,
    expert_figures,
    make_card,
)
from .validation import MANIFEST_FORMAT, MANIFEST_NAME, check_size, read_config, read_manifest, read_weights


logger = logging.get_logger(__name__)

# What an expert is made of. Nothing else is fetched from a stranger's repository.
EXPERT_FILES = (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, STATISTICS_NAME)
CARD_NAME = "README.md"
RESULTS_NAME = "results.json"


def save_expert(model: PeftModel, name: str, directory: str | os.PathLike[str], *, statistics: bool = True) -> None:
    """
    Save one expert as an ordinary PEFT adapter at the root of a folder, whole or not at all. An adapter that is there
    already is replaced.

    Args:
        model ([`~peft.PeftModel`]): The model.
        name (`str`): The expert.
        directory (`str` or `PathLike`): The folder.
        statistics (`bool`, *optional*, defaults to `True`):
            Write the statistics of its training images beside it, where it has any. They reveal each class's count,
            mean and main directions, which for a class of few images is nearly its images' features: see the routing
            page of the docs. `False` also takes away those that are there.

    Raises:
        ValueError: the model has no such expert, or `directory` cannot be a folder.
    """
    tuner = tuner_of(model)
    _check_experts([name], tuner)
    target = _folder(directory)
    part = tuner.layer.statistics.get(name)
    if isinstance(part, Path) and statistics:
        try:
            part = ClassStatistics.load(part)
        except InvalidExpertError as error:
            raise InvalidExpertError(f"{error} Or save without statistics: statistics=False.") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        # Without save_embedding_layers=False PEFT asks the Hub for the base's config at every save. Given the model's
        # whole state, it compares every tensor with every expert's name, which among thousands takes minutes.
        path, layer = find_layer(model)
        state = {f"{path}.{key}": tensor for key, tensor in layer.tensors(name).items()}
        state_dict = None if "_fsdp_wrapped_module" in path else state
        model.save_pretrained(
            str(staging), selected_adapters=[name], save_embedding_layers=False, state_dict=state_dict
        )
        written = staging if name == "default" else staging / name
        target.mkdir(exist_ok=True)
        if isinstance(part, ClassStatistics) and statistics:
            part.save(target)
        else:
            (target / STATISTICS_NAME).unlink(missing_ok=True)
        # The weights come first: a folder counts as an adapter once it has a config.
        for file in sorted(written.glob("adapter_*"), key=lambda file: file.name == CONFIG_NAME):
            with open(file, "rb") as content:
                os.fsync(content.fileno())
            os.replace(file, target / file.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def save_experts(
    model: PeftModel,
    directory: str | os.PathLike[str],
    names: Sequence[str] | None = None,
    *,
    statistics: bool = True,
) -> None:
    """
    Save a collection: one PEFT adapter per subfolder, and `experts.json` with their order, classes and the router.

    Args:
        model ([`~peft.PeftModel`]): The model.
        directory (`str` or `PathLike`): The folder.
        names (`Sequence[str]`, *optional*): The experts to write; the manifest always lists all. All by default.
        statistics (`bool`, *optional*, defaults to `True`): Write their statistics too; see [`save_expert`].

    Raises:
        ValueError:
            the router is a function of your own, which no file can hold, or it needs the statistics that were left
            out.
    """
    tuner, folder = tuner_of(model), _folder(directory)
    names = list(tuner.experts) if names is None else names
    _check_experts(names, tuner)
    if tuner.router is not None and tuner.router.needs_statistics and not statistics:
        raise ValueError(
            "the router that is set needs the experts' statistics, which statistics=False leaves out. Save with "
            "set_router('entropy') or set_router(None)."
        )
    manifest = {
        "format": MANIFEST_FORMAT,
        "experts": [{"name": name, "classes": list(classes)} for name, classes in tuner.experts.items()],
        "router": _router_entry(tuner),
        "fingerprint": tuner.backbone.fingerprint,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        save_expert(model, name, folder / name, statistics=statistics)
    write_json(folder / MANIFEST_NAME, manifest)


def push_expert(
    model: PeftModel,
    name: str,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    datasets: str | Sequence[str] | None = None,
    results: Mapping[str, Any] | None = None,
    statistics: bool = True,
) -> CommitInfo:
    """
    Push one expert to a Hub repository of its own: a PEFT adapter at its root, and its card, in one commit. The same
    thing pushed again makes no commit.

    Args:
        model ([`~peft.PeftModel`]): The model.
        name (`str`): The expert.
        repo_id (`str`): The repository, which is created where there is none.
        private (`bool`, *optional*): Whether a new repository is private; by default as the owner's settings say.
        revision (`str`, *optional*): Branch to push to, which is created where there is none.
        token (`str` or `bool`, *optional*): Hub token with the right to write.
        commit_message (`str`, *optional*): By default one that names the expert.
        base_model (`str`, *optional*):
            Hub id of the backbone, by default where the model was loaded from, if that is on the Hub.
        license (`str`, *optional*): Licence of the expert, for the card.
        datasets (`str` or `Sequence[str]`, *optional*): Hub ids of what it was trained on, for the card.
        results (`dict`, *optional*): What a run's `results.json` holds, for the card.
        statistics (`bool`, *optional*, defaults to `True`): Push its statistics too; see [`save_expert`].

    Returns:
        [`~huggingface_hub.CommitInfo`]: Of the commit, or of the one that was there.

    Raises:
        ValueError: there is no such expert, or the repository holds a collection.
        RuntimeError: somebody else pushed to the repository at the same time, twice.
    """
    api = HfApi(token=token)
    tuner = tuner_of(model)
    _check_push(repo_id, private, revision, commit_message, base_model, license, datasets, results)
    with tempfile.TemporaryDirectory() as staging:
        folder = Path(staging)
        save_expert(model, name, folder, statistics=statistics)
        base_model = _base_model(api, tuner, base_model)
        _make_portable(folder, base_model)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        about = {"base_model": base_model, "license": license, "datasets": datasets, "results": results}
        card = make_card(tuner, [name], repo_id, single=True, **about)  # type: ignore[arg-type]
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        return _push(api, folder, repo_id, revision, commit_message or f"Push expert {name}")


def push_experts(
    model: PeftModel,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    datasets: str | Sequence[str] | None = None,
    results: Mapping[str, Any] | None = None,
    processing_class: Any = None,
    statistics: bool = True,
    blocking: bool = True,
) -> CommitInfo | Future[CommitInfo]:
    """
    Push all experts of a model to a Hub repository as a collection: one PEFT adapter per subfolder, `experts.json`
    with their order, classes, fingerprint, metrics and router, and the card, in one commit. Experts that the
    repository has from an earlier push and the model has no longer are deleted there. The same thing pushed again
    makes no commit.

    Args:
        model ([`~peft.PeftModel`]): The model.
        repo_id (`str`): The repository, which is created where there is none.
        private (`bool`, *optional*): Whether a new repository is private; by default as the owner's settings say.
        revision (`str`, *optional*): Branch to push to, which is created where there is none.
        token (`str` or `bool`, *optional*): Hub token with the right to write.
        commit_message (`str`, *optional*): By default one with the number of experts.
        base_model (`str`, *optional*):
            Hub id of the backbone, by default where the model was loaded from, if that is on the Hub.
        license (`str`, *optional*): Licence of the experts, for the card.
        datasets (`str` or `Sequence[str]`, *optional*): Hub ids of what they were trained on, for the card.
        results (`dict`, *optional*): What a run's `results.json` holds; it is pushed too, and shown in the card.
        processing_class (`BaseImageProcessor`, *optional*): The backbone's image processor, to be pushed too.
        statistics (`bool`, *optional*, defaults to `True`): Push their statistics too; see [`save_expert`].
        blocking (`bool`, *optional*, defaults to `True`):
            `False` takes the model as it is now, and uploads it in the background.

    Returns:
        [`~huggingface_hub.CommitInfo`], or a future of it: Of the commit, or of the one that was there.

    Raises:
        ValueError: the repository holds a single expert, or the router is a function of your own.
        RuntimeError: somebody else pushed to the repository at the same time, twice.
    """
    api = HfApi(token=token)
    tuner, names = tuner_of(model), list(tuner_of(model).experts)
    _check_push(repo_id, private, revision, commit_message, base_model, license, datasets, results)
    staging = tempfile.TemporaryDirectory()
    folder = Path(staging.name)
    try:
        save_experts(model, folder, statistics=statistics)
        base_model = _base_model(api, tuner, base_model)
        for name in names:
            _make_portable(folder / name, base_model)
        if processing_class is not None:
            processing_class.save_pretrained(str(folder))
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        picture = False
        if results is not None:
            _add_metrics(folder / MANIFEST_NAME, results)
            write_json(folder / RESULTS_NAME, results)
            picture = draw_accuracy_matrix(results, folder / PICTURE_NAME)
        about = {"base_model": base_model, "license": license, "datasets": datasets, "results": results}
        card = make_card(tuner, names, repo_id, single=False, picture=picture, **about)  # type: ignore[arg-type]
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
    except BaseException:
        staging.cleanup()
        raise

    def upload() -> CommitInfo:
        with staging:
            return _push(api, folder, repo_id, revision, commit_message or f"Push {pluralize(len(names), 'expert')}")

    return upload() if blocking else api.run_as_future(upload)


def load_experts(
    model: nn.Module,
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    rename: Mapping[str, Mapping[str, str]] | None = None,
    allow_mismatch: bool = False,
) -> PeftModel:
    """
    Compose experts, of one owner or of several, into one classifier, without training. Either all of them are added
    or, after an error, none.

    Args:
        model (`nn.Module`):
            The backbone with a head, or a model that has experts already, to which these are added.
        sources (`str`, list or dict):
            Folders or Hub ids, each of one expert or of a collection. Experts are called as in their collection, or
            after the last part of their id; a dict gives single experts other names.
        revision (`str`, *optional*): Branch, tag or commit on the Hub, the same for all sources.
        token (`str` or `bool`, *optional*): Hub token.
        rename (`dict`, *optional*):
            Other names for classes, `{expert: {class: name}}`, where two owners call different things the same, or the
            same thing differently.
        allow_mismatch (`bool`, *optional*, defaults to `False`): Load experts of another backbone too.

    Returns:
        [`~peft.PeftModel`]: With the router of the collection when there was one source and it has one.

    Raises:
        InvalidExpertError: a source is not an expert, or one that no backbone can have.
        ValueError: two experts have the same name, or an expert is of another backbone.
    """
    check("sources", sources, "a source, a list of them or a dict", (str, os.PathLike, Iterable))
    if isinstance(sources, (str, bytes, os.PathLike)):
        sources = [sources]
    named: list[tuple[Any, Any]] = [(None, source) for source in sources]
    if isinstance(sources, Mapping):
        named = list(sources.items())
        for name in sources:
            check("the name of an expert", name, "letters, digits, '_' and '-'", str, bool(name))
    if not named:
        raise ValueError("there are no experts to load: the list is empty.")
    rename = {} if rename is None else rename
    check("rename", rename, "a dict {expert: {class: name}}", Mapping)
    for classes in rename.values():
        check("rename", rename, "a dict {expert: {class: name}}", Mapping, isinstance(classes, Mapping))
    _check_model(model, allow_mismatch)
    found: dict[str, Path] = {}
    router: dict[str, Any] | None = None
    for name, source in named:
        folder = _local(source, revision, token, [*EXPERT_FILES, *(f"*/{file}" for file in EXPERT_FILES)])
        if (folder / MANIFEST_NAME).is_file():
            if name is not None:
                raise ValueError(f"{source} is a collection, whose experts have names: it cannot be called {name!r}.")
            manifest = read_manifest(folder)
            router = manifest["router"]
            experts = {entry["name"]: folder / entry["name"] for entry in manifest["experts"]}
        else:
            experts = {name or _name_after(source, model): folder}
        taken = sorted({*found, *(tuner_of(model).experts if isinstance(model, PeftModel) else ())} & set(experts))
        if taken:
            raise ValueError(
                f"more than one expert is called {taken[0]!r}. Give them other names: load_experts(model, "
                "{'name': source, ...})."
            )
        found.update(experts)
    return _load(model, found, router if len(named) == 1 else None, rename, allow_mismatch)


def load_expert(
    model: nn.Module,
    source: str | os.PathLike[str],
    name: str | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    rename: Mapping[str, str] | None = None,
    allow_mismatch: bool = False,
) -> PeftModel:
    """
    Add one expert to a backbone, or to a model that has experts already.

    Args:
        model (`nn.Module`): The backbone with a head, or a model with experts.
        source (`str` or `PathLike`): Folder or Hub id of an expert, or of a collection that has it.
        name (`str`, *optional*):
            What the expert is called in the model, by default the last part of its id. Of a collection: which of its
            experts; no other is downloaded.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        token (`str` or `bool`, *optional*): Hub token.
        rename (`dict`, *optional*): Other names for classes, `{class: name}`.
        allow_mismatch (`bool`, *optional*, defaults to `False`): Load an expert of another backbone too.

    Raises:
        InvalidExpertError: the source is not an expert, or one that no backbone can have.
        ValueError: the model has an expert of that name, or the expert is of another backbone.
    """
    check("name", name, "the name of an expert", (str, type(None)), name != "")
    check("rename", rename, "a dict {class: name}", (Mapping, type(None)))
    _check_model(model, allow_mismatch)
    of_collection = [f"{name}/{file}" for file in EXPERT_FILES] if name and NAME_RULE.fullmatch(name) else []
    folder = _local(source, revision, token, [*EXPERT_FILES, *of_collection])
    if (folder / MANIFEST_NAME).is_file():
        names = [entry["name"] for entry in read_manifest(folder)["experts"]]
        if name not in names:
            raise ValueError(f"{source} is a collection of {_listed(names)}. Name one of them, got {name!r}.")
        folder = folder / str(name)
    name = name or _name_after(source, model)
    if isinstance(model, PeftModel) and name in tuner_of(model).experts:
        raise ValueError(f"the model has an expert {name!r} already. Give this one another name.")
    return _load(model, {name: folder}, None, {name: rename} if rename else {}, allow_mismatch)


def list_experts(
    *,
    author: str | None = None,
    base_model: str | None = None,
    classes: Sequence[str] = (),
    token: str | bool | None = None,
) -> list[ModelInfo]:
    """
    Experts and collections on the Hub, by the tags of their cards.

    Args:
        author (`str`, *optional*): User or organisation.
        base_model (`str`, *optional*): Hub id of the backbone.
        classes (`Sequence[str]`, *optional*): Class names, all of which the expert or collection must have.
        token (`str` or `bool`, *optional*): Hub token.

    Returns:
        `list` of [`~huggingface_hub.ModelInfo`]: Their `id` is what [`load_experts`] takes.
    """
    for key, value in (("author", author), ("base_model", base_model)):
        check(key, value, "a name on the Hub", (str, type(None)), value != "")
    check("classes", classes, "a list of class names", Iterable, not isinstance(classes, (str, bytes)))
    classes = check_classes(classes) if classes else []
    tags = [TAGS[0], "peft", *([f"base_model:{base_model}"] if base_model else []), *map(class_tag, classes)]
    return list(HfApi(token=token).list_models(author=author, filter=tags))


def check(name: str, value: Any, needed: str, kinds: type | tuple[type, ...], right: bool = True) -> None:
    """
    Refuse an argument that is nothing of the kind.

    Raises:
        ValueError: with what is needed.
    """
    if not isinstance(value, kinds) or not right:
        found = type(value).__name__ if isinstance(value, nn.Module) else show(value)
        raise ValueError(f"{name} must be {needed}, got {found}.")


def _check_experts(names: Any, tuner: LucaModel) -> None:
    """Refuse to save what is not there, before anything is written."""
    check("names", names, "a list of names of experts", Collection, not isinstance(names, (str, bytes)))
    for name in names:
        if not isinstance(name, str) or name not in tuner.experts:
            raise ValueError(f"there is no expert {show(name)} to save. The model has {', '.join(tuner.experts)}.")


def _folder(directory: Any) -> Path:
    check("directory", directory, "a folder to save in", (str, os.PathLike), directory != "")
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, and experts are saved in a folder. Name another.")
    return folder


def _check_model(model: Any, allow_mismatch: Any) -> None:
    needed = "a backbone with a head, or a PeftModel with LuCA experts"
    check("model", model, needed, nn.Module, not isinstance(model, LucaModel))
    check("allow_mismatch", allow_mismatch, "True or False", bool)


def _check_push(
    repo_id: Any,
    private: Any,
    revision: Any,
    commit_message: Any,
    base_model: Any,
    license: Any,
    datasets: Any,
    results: Any,
) -> None:
    """Refuse what cannot be meant before a repository is made."""
    check("repo_id", repo_id, "the id of a repository, 'owner/name'", str, bool(repo_id))
    check("private", private, "True, False or None", (bool, type(None)))
    for name, value in (("revision", revision), ("commit_message", commit_message), ("license", license)):
        check(name, value, "a text", (str, type(None)), value != "")
    check("base_model", base_model, "the id of a model on the Hub", (str, type(None)), base_model != "")
    ids = [] if datasets is None else [datasets] if isinstance(datasets, str) else datasets
    sound = isinstance(ids, Iterable) and all(isinstance(name, str) and name for name in ids)
    check("datasets", datasets, "ids of datasets on the Hub", object, sound)
    check("results", results, "what a run's results.json holds", (Mapping, type(None)))
    if results is not None:
        check("tasks in results", results.get("tasks", []), "a list", list)
        try:
            json.dumps(results, allow_nan=False)
            collection_figures(results)
        except (ValueError, TypeError) as error:
            raise ValueError(f"results must be what a run's results.json holds: {error}.") from error


def _router_entry(tuner: LucaModel) -> dict[str, Any] | None:
    if tuner.router is None:
        return None
    if tuner.router.name is None:
        raise ValueError(
            "the router is a function of your own, which no file can hold. Save with set_router('entropy') or "
            "set_router(None), and set your function again after loading."
        )
    return tuner.router.to_dict()


def _push(api: HfApi, folder: Path, repo_id: str, revision: str | None, commit_message: str) -> CommitInfo:
    """Make a repository what a folder is, an expert or a collection, in one commit with the card last."""
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.name == CARD_NAME, str(path))
    )
    marker, other = MANIFEST_NAME, CONFIG_NAME
    if not (folder / MANIFEST_NAME).is_file():
        marker, other = other, marker
    for first_try in (True, False):
        parent = api.model_info(repo_id, revision=revision).sha
        there = api.list_repo_files(repo_id, revision=parent)
        if other in there:
            kinds = "a single expert, not a collection" if marker == MANIFEST_NAME else "a collection, not one expert"
            raise ValueError(f"{repo_id} holds {kinds}: it has {other}. Push to another repository.")
        pushed = {path.relative_to(folder).as_posix(): path for path in files}
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationDelete(path)
            for path in there
            if path not in pushed and (path == PICTURE_NAME or path.split("/", 1)[-1] in EXPERT_FILES)
        ]
        operations += [CommitOperationAdd(name, str(path)) for name, path in pushed.items()]
        try:
            return api.create_commit(
                repo_id, operations, commit_message=commit_message, revision=revision, parent_commit=parent
            )
        except HfHubHTTPError as error:
            if error.response.status_code != 412:
                raise
            if not first_try:
                raise RuntimeError(
                    f"somebody else pushed to {repo_id} at the same time, twice (412): nothing of this push is there. "
                    "Look at what is there now, and push again."
                ) from error
            logger.warning("Somebody else pushed to %s at the same time (412). Pushing once more.", repo_id)
    raise AssertionError("unreachable")


def _base_model(api: HfApi, tuner: LucaModel, given: str | None) -> str | None:
    """Hub id of the backbone: as given, or where it was loaded from if that is on the Hub. Never a path."""
    name = given or getattr(tuner.model, "name_or_path", None) or None
    if name is None:
        return None
    try:
        known = not Path(name).exists() and api.repo_exists(name)
    except HFValidationError:
        known = False
    if known:
        return str(name)
    if given is not None:
        raise ValueError(f"base_model must be the id of a model on the Hub, got {given!r}.")
    warnings.warn(
        f"the backbone was loaded from {name!r}, which is not on the Hub, so that nobody will know what the expert "
        "sits on. Say base_model='owner/name'.",
        stacklevel=3,
    )
    return None


def _make_portable(folder: Path, base_model: str | None) -> None:
    """Name the backbone in an expert's config by its Hub id, and read the expert as those will who pull it."""
    values = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    write_json(folder / CONFIG_NAME, {**values, "base_model_name_or_path": base_model})
    read_config(folder)


def _add_metrics(path: Path, results: Mapping[str, Any]) -> None:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["metrics"] = collection_figures(results)
    for entry in manifest["experts"]:
        entry["metrics"] = expert_figures(results, entry["name"])
    write_json(path, manifest)


def _local(source: str | os.PathLike[str], revision: str | None, token: str | bool | None, files: list[str]) -> Path:
    """The folder of a source: itself, or where the named files of a Hub repository lie in the cache."""
    needed = "a folder or a Hub id of an expert or a collection (names go into a dict, {'name': source})"
    check("a source", source, needed, (str, os.PathLike), source != "")
    check("revision", revision, "a branch, tag or commit", (str, type(None)), revision != "")
    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(
            snapshot_download(str(source), revision=revision, token=token, allow_patterns=[MANIFEST_NAME, *files])
        )
    except HFValidationError as error:
        raise InvalidExpertError(f"{source} is not an expert: it is neither a folder nor a Hub id.") from error
    except LocalEntryNotFoundError as error:
        raise LocalEntryNotFoundError(
            f"{source} is no folder here, the Hub cannot be reached, and its cache does not have it: {error}"
        ) from error


def _name_after(source: str | os.PathLike[str], model: nn.Module) -> str:
    """A name for a single expert: the last part of its id, in letters that a name may have."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(source).resolve().name if Path(source).is_dir() else Path(source).name)
    try:
        check_expert_name(name, model)
    except ValueError:
        return f"expert-{name}"
    return name


def _load(
    model: nn.Module,
    folders: Mapping[str, Path],
    router: dict[str, Any] | None,
    rename: Mapping[str, Mapping[str, str]],
    allow_mismatch: bool,
) -> PeftModel:
    """Add the experts in the folders to a model, all or none."""
    unknown = sorted(set(rename) - set(folders))
    if unknown:
        raise ValueError(f"rename names the experts {unknown}, but those to load are {_listed(folders)}.")
    for folder in folders.values():
        if not (folder / CONFIG_NAME).is_file():
            raise InvalidExpertError(f"{folder} is not an expert and not a collection: it has no {CONFIG_NAME}.")
    configs = {name: read_config(folder) for name, folder in folders.items()}
    for name, config in configs.items():
        config.inference_mode = True
        config.allow_mismatch = allow_mismatch
        config.classes = _renamed(name, config.classes or [], rename.get(name, {}))
        check_expert_name(name, model)
    if router is not None:
        make_router(router["name"], **router["options"])
    loaded: PeftModel | None = model if isinstance(model, PeftModel) else None
    heads: dict[str, Head] = {}  # looked for once, where a thousand experts say the same of it
    added: list[str] = []
    fingerprint: str | None = None
    try:
        for name, config in configs.items():
            key = repr((config.target_modules, config.pooled))
            if key not in heads:
                heads[key] = _find_head(model, folders[name], config)
            head = heads[key]
            if config.fingerprint is None and not allow_mismatch:
                raise InvalidExpertError(
                    f"{folders[name]}: expert {name!r} does not say which backbone it was trained on: its config has "
                    "no fingerprint. Set allow_mismatch=True to load it all the same."
                )
            tensors = read_weights(folders[name], config, head.name, head.width)
            if loaded is None:
                with quiet_peft():
                    loaded = PeftModel(model, config, adapter_name=name)
                # PEFT 0.21 makes rows trainable again when it casts them, in a half-precision model.
                tuner_of(loaded).set_requires_grad(name, False)
            else:
                tuner_of(loaded).add_expert(name, config, tensors)
            added.append(name)
            tuner = tuner_of(loaded)
            fingerprint = fingerprint or tuner.backbone.fingerprint  # one look at the trunk for all of them
            if config.fingerprint != fingerprint:
                check_backbone(loaded.get_base_model(), head, config, name, tensors)
            tuner.layer.load_expert(name, tensors)
            statistics = _statistics(folders[name], config, rename.get(name, {}))
            if statistics is not None:
                tuner.layer.set_statistics(
                    name, ClassStatistics.load(statistics) if isinstance(statistics, Path) else statistics
                )
        assert loaded is not None
        tuner_of(loaded).sync_labels()
        if router is not None:
            _set_router(tuner_of(loaded), router)
    except BaseException:
        if not isinstance(model, PeftModel) and loaded is not None:
            tuner_of(loaded).unload()
        elif loaded is not None:
            for name in added:
                loaded.delete_adapter(name)
        raise
    loaded.eval()
    return loaded


def _find_head(model: nn.Module, folder: Path, config: LucaConfig) -> Head:
    """The head that an expert says it sits on: the one that the model's experts sit on."""
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    try:
        head = find_head(base, config)
    except ValueError as error:
        raise InvalidExpertError(f"{folder}: {error}") from error
    layers = [name for name, module in base.named_modules() if isinstance(module, LucaLayer)]
    if layers not in ([], [head.name]):
        raise InvalidExpertError(
            f"{folder}: the expert sits on {head.name!r}, and those of the model on {layers[0]!r}."
        )
    return head


def _statistics(folder: Path, config: LucaConfig, rename: Mapping[str, str]) -> Path | ClassStatistics | None:
    """An expert's statistics: the folder, to be read once a router needs them, unless their classes are renamed."""
    if not (folder / STATISTICS_NAME).is_file():
        return None
    check_size(folder / STATISTICS_NAME)
    if not rename:
        return folder
    found = ClassStatistics.load(folder)
    return replace(found, classes=tuple(rename.get(name, name) for name in found.classes))


def _set_router(tuner: LucaModel, router: dict[str, Any]) -> None:
    try:
        tuner.set_router(router["name"], **router["options"])
    except (ValueError, RuntimeError) as error:  # a stranger's options
        raise InvalidExpertError(
            f"the collection's router {router} cannot be set: {error} To load the experts without a router, name "
            "their folders in place of the collection's: load_experts(model, ['collection/expert', …])."
        ) from error


def _renamed(expert: str, classes: list[str], rename: Mapping[str, str]) -> list[str]:
    unknown = sorted(set(rename) - set(classes))
    if unknown:
        raise ValueError(f"rename names the classes {unknown}, but expert {expert!r} has {_listed(classes)}.")
    return check_classes([rename.get(name, name) for name in classes])


def _listed(names: Iterable[str]) -> str:
    first = list(names)
    return ", ".join(map(repr, first[:10])) + (f" and {len(first) - 10} more" if len(first) > 10 else "")
