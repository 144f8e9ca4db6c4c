"""Saving and loading experts: one, or an ordered collection of them with its router, in a folder or from the Hub."""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, resolve_revision, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RevisionResolutionError
from huggingface_hub.hf_api import RepoFile
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import logging

from ..routing import ROUTERS, Router, make_router
from ..routing.statistics import ClassStatistics
from ..routing.statistics_routers import AutoRouter
from ..tuner.backbone import BackboneFacts, check_backbone, warn_of_processor
from ..tuner.experts import NewExpert
from ..tuner.head import check_expert_name, find_head
from ..tuner.layer import LucaExperts, LucaLayer, find_layer
from ..tuner.model import LucaPeftModel, quiet_peft, tuner_of
from ..utils import InvalidExpertError, atomic_write, check_classes, list_names, show, warn_about_spellings, write_json
from . import validation
from .validation import MANIFEST_FORMAT, MANIFEST_NAME, STATISTICS_FORMAT, STATISTICS_NAME, Manifest


# The files of an expert, in the order in which they are put in place: a folder counts as an adapter once it has a
# config. Nothing else is fetched from a stranger's repository.
EXPERT_FILES = (STATISTICS_NAME, SAFETENSORS_WEIGHTS_NAME, CONFIG_NAME)
Source = str | os.PathLike[str]
logger = logging.get_logger(__name__)
MAX_DOWNLOAD_BYTES = 2**34  # of one repository


def save_expert(model: PeftModel, name: str, directory: Source, *, statistics: bool = True) -> None:
    """
    Saves one expert as an ordinary PEFT adapter at the root of a folder. An adapter that is there already is replaced
    once the new one is written.

    Args:
        model ([`~peft.PeftModel`]), name (`str`), directory (`str` or `PathLike`): The model, its expert, the folder.
        statistics (`bool`, *optional*, defaults to `True`):
            Write the statistics of its training images too, where it has them. They reveal each class's count, mean
            and main directions, which for a class of few images is nearly its images' features. `False` also removes
            those that are in the folder.
    """
    target = Path(directory).expanduser()
    # Given the whole state of the model, PEFT compares every tensor with every expert's name, which takes minutes
    # among thousands. Under FSDP only PEFT can gather the state.
    path, layer = find_layer(tuner_of(model))
    state = {f"base_model.{path}.{key}": tensor for key, tensor in layer.tensors(name).items()}
    state_dict = None if "_fsdp_wrapped_module" in path else state
    if state_dict and (odd := [key for key, t in state.items() if type(t) not in (Tensor, nn.Parameter)]):
        reason = f"expert {name!r} is quantized (its {odd[0]}), but files of experts hold plain numbers"
        raise ValueError(f"{reason}. Save it before it is quantized, or quantize the backbone alone.")
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = f".{target.name}."  # a run that was killed here finds and removes it by this name
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=hidden, ignore_cleanup_errors=True) as staging:
        # Without save_embedding_layers=False PEFT asks the Hub for the backbone's config at every save.
        model.save_pretrained(staging, selected_adapters=[name], save_embedding_layers=False, state_dict=state_dict)
        written = Path(staging) if name == "default" else Path(staging, name)
        if statistics and name in layer.statistics:
            save_statistics(layer.statistics[name], written, validation.expert_digests(written))
        target.mkdir(exist_ok=True)
        config = target / CONFIG_NAME
        if config.is_file() and config.read_bytes() != (written / CONFIG_NAME).read_bytes():
            config.unlink()  # cut off here, the folder holds no expert, rather than parts of two
        for file in EXPERT_FILES:
            if (written / file).exists():
                with open(written / file, "rb") as content:
                    os.fsync(content.fileno())
                os.replace(written / file, target / file)
            else:
                (target / file).unlink(missing_ok=True)


def save_experts(
    model: PeftModel, directory: Source, names: Sequence[str] | None = None, *, statistics: bool = True
) -> None:
    """
    Saves a collection: one PEFT adapter per subfolder, and `experts.json` with their order, classes and the router. Of
    a collection that is there already, experts that the model does not have are deleted.

    Args:
        model, directory, statistics: See [`save_expert`].
        names (`Sequence[str]`, *optional*): The experts to write; the manifest always lists all. All by default.

    Raises:
        ValueError: the router is a function or a class of one's own, or it needs the statistics that are left out.
    """
    tuner, folder = tuner_of(model), Path(directory).expanduser()
    names = list(tuner.experts) if names is None else names
    if (router := tuner.router) is not None and type(router) is not ROUTERS.get(str(router.name)):
        remedy = f"Save with set_router(None), and call set_router with it again after loading: {router!r}"
        raise ValueError(f"the router is code of your own, which no file can hold. {remedy}.")
    if router is not None and router.needs_statistics and not statistics:
        raise ValueError(f"the router {router.name!r} needs the experts' statistics: leave out statistics=False.")
    folder.mkdir(parents=True, exist_ok=True)
    there = validation.read_manifest(folder).names if (folder / MANIFEST_NAME).is_file() else []
    for name in names:
        save_expert(model, name, folder / name, statistics=statistics)
    manifest = {
        "format": MANIFEST_FORMAT,
        "experts": [{"name": name, "classes": list(classes)} for name, classes in tuner.experts.items()],
        "router": None if router is None else router.to_dict(),
        "fingerprint": tuner.backbone.fingerprint,
    }
    write_json(folder / MANIFEST_NAME, manifest)
    kept = {name.lower() for name in tuner.experts}  # on some disks their folders are the same
    for place in (folder / name for name in there if name.lower() not in kept):
        for file in EXPERT_FILES:
            (place / file).unlink(missing_ok=True)
        with suppress(OSError):  # other files stay
            place.rmdir()


def save_statistics(statistics: ClassStatistics, folder: Source, digests: Mapping[str, str] | None = None) -> None:
    """Writes `statistics.safetensors` into a folder, whole or not at all, with the digests of their expert."""
    tensors = {name: tensor.contiguous() for name, tensor in statistics.tensors().items()}
    # One entry only: safetensors writes several in an order that differs from one time to the next.
    about = {"format": STATISTICS_FORMAT, "classes": statistics.classes, **(digests or {})}
    with atomic_write(Path(folder) / STATISTICS_NAME) as temporary:
        save_file(tensors, temporary, {"statistics": json.dumps(about, ensure_ascii=False)})


def load_experts(
    model: nn.Module,
    sources: Source | Sequence[Source] | Mapping[str, Source],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    rename: Mapping[str, Mapping[str, str]] | None = None,
    allow_mismatch: bool = False,
    statistics: bool = True,
    processing_class: Any = None,
) -> LucaPeftModel:
    """
    Composes experts, of one owner or of several, into one classifier, without training. All files are read and checked
    before the model is changed, so that after an error it is as it was.

    Args:
        model (`nn.Module`):
            The backbone with a head, or a model that has experts already, to which these are added.
        sources (`str`, list or dict):
            Folders or Hub ids, each of one expert or of a collection. Experts are called as in their collection, or
            after the last part of their id. A key of a dict names a single expert, and goes before the names of a
            collection's: `{"bugs": "lab/run"}` loads its `task_0` as `bugs_task_0`.
        revision (`str`, *optional*): Branch, tag or commit on the Hub, the same for all sources.
        token (`str` or `bool`, *optional*): Hub token.
        rename (`dict`, *optional*):
            Other names for classes, `{expert: {class: name}}`, where two owners mean different things by a name.
        allow_mismatch (`bool`, *optional*, defaults to `False`): Load experts of another backbone too.
        statistics (`bool`, *optional*, defaults to `True`):
            Load their statistics too, which routers such as `"gaussian"` need.
        processing_class (`BaseImageProcessor`, *optional*):
            The image processor in use. A warning names what differs from that of the experts' training images; without
            it, they are compared with one another.

    Returns:
        [`~peft.PeftModel`]: With the router of the collection if it is the only source; otherwise with the one that
        the model has, or `"auto"` if it has none and several experts.

    Raises:
        InvalidExpertError: a source is not an expert, or its files are not sound.
        ValueError: two experts have the same name, or an expert is of another backbone.
    """
    sources = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    named = sources.items() if isinstance(sources, Mapping) else [(None, source) for source in sources]
    folders: list[tuple[str, Path]] = []
    manifest: Manifest | None = None
    for name, source in named:
        folder = local_folder(source, revision, token, None, statistics)
        if not (folder / MANIFEST_NAME).is_file():
            folders.append((name or _name_after(source, model), folder))
        else:
            manifest = validation.read_manifest(folder)
            prefix = f"{name}_" if name else ""
            folders += [(prefix + expert, folder / expert) for expert in manifest.names]
    if not folders:
        raise ValueError("there are no experts to load: the list is empty.")
    manifest = manifest if len(named) == 1 else None
    loaded = _load(model, folders, manifest, rename or {}, allow_mismatch, statistics, processing_class)
    tuner = tuner_of(loaded)
    if manifest is None and tuner.router is None and len(tuner.experts) > 1:
        tuner.layer.router = router = AutoRouter()  # prepared when it is used, since another may be set before
        tuner.sync_labels()
        experts = tuner.layer.experts
        say = logger.info if router.used(experts).needs_statistics else logger.warning
        say(f"The router of {len(experts.names)} experts is {router.describe(experts)}.")
    return loaded


def load_expert(
    model: nn.Module,
    source: Source,
    name: str | None = None,
    *,
    expert: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    rename: Mapping[str, str] | None = None,
    allow_mismatch: bool = False,
    statistics: bool = True,
    processing_class: Any = None,
) -> LucaPeftModel:
    """
    Adds one expert to a backbone, or to a model that has experts already, as [`load_experts`] does.

    Args:
        source (`str` or `PathLike`): Folder or Hub id of an expert, or of a collection that has it.
        name (`str`, *optional*): What the expert is called in the model. By default as `expert`, or after its id.
        expert (`str`, *optional*):
            Which expert of a collection, by default the one called `name`. No other is downloaded, and the
            collection's router is not set.
        rename (`dict`, *optional*): Other names for classes, `{class: name}`.
        model, revision, token, allow_mismatch, statistics, processing_class: See [`load_experts`].
    """
    wanted = expert or name
    folder = local_folder(source, revision, token, wanted or "", statistics)
    if (folder / MANIFEST_NAME).is_file():
        names = validation.read_manifest(folder).names
        if wanted not in names:
            raise ValueError(f"{source} is a collection of {list_names(names)}. Name one of them, got {wanted!r}.")
        folder = folder / str(wanted)
    elif expert is not None:
        raise ValueError(f"{source} is one expert and no collection, of which expert={expert!r} could be taken.")
    name = name or expert or _name_after(source, model)
    return _load(model, [(name, folder)], None, {name: rename or {}}, allow_mismatch, statistics, processing_class)


def local_folder(
    source: Source,
    revision: str | None = None,
    token: str | bool | None = None,
    name: str | None = None,
    statistics: bool = True,
) -> Path:
    """
    Returns the folder of a source: itself, or where the files of a Hub repository are in the cache. Of a collection
    the manifest is downloaded first, then what it lists, of the expert `name` or of all (`None`).
    """
    if (folder := Path(source).expanduser()).is_dir():
        return folder
    repo_id, files = str(source), EXPERT_FILES if statistics else EXPERT_FILES[1:]
    try:
        commit = resolve_revision(repo_id, revision=revision, token=token)
        sizes = _sizes(repo_id, commit, token)
        folder = _fetch(repo_id, commit, token, sizes, [MANIFEST_NAME])
        places = [""]
        if (folder / MANIFEST_NAME).is_file():
            places = [f"{listed}/" for listed in validation.read_manifest(folder).names if name in (None, listed)]
        return _fetch(repo_id, commit, token, sizes, [f"{place}{file}" for place in places for file in files])
    except HFValidationError as error:
        raise InvalidExpertError(f"{source} is not an expert: it is neither a folder nor a Hub id.") from error
    except (RevisionResolutionError, LocalEntryNotFoundError) as error:
        message = f"{source} is no folder here, the Hub cannot be reached, and its cache does not have it: {error}"
        raise LocalEntryNotFoundError(message) from error


def _sizes(repo_id: str, commit: str, token: str | bool | None) -> dict[str, int] | None:
    """Sizes of a repository's files, as the Hub has them. `None` if it cannot be reached."""
    try:
        tree = HfApi(token=token).list_repo_tree(repo_id, recursive=True, revision=commit)
        return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    except Exception as error:  # of the connection there are many
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise
        return None


def _fetch(
    repo_id: str, commit: str, token: str | bool | None, sizes: Mapping[str, int] | None, paths: Sequence[str]
) -> Path:
    """Downloads files into the cache, if their sizes are those of experts, and returns their folder."""
    found = {path: sizes[path] for path in paths if path in sizes} if sizes else {}
    for path, size in found.items():
        validation.check_size(f"{repo_id}/{path}", size)
    if (total := sum(found.values())) > MAX_DOWNLOAD_BYTES:
        reason = f"have {total} bytes, more than the {MAX_DOWNLOAD_BYTES} that are downloaded at once"
        raise InvalidExpertError(f"the experts of {repo_id} {reason}. Load some of them with load_expert.")
    options: dict[str, Any] = {"allow_patterns": list(paths), "local_files_only": sizes is None}
    return Path(snapshot_download(repo_id, revision=commit, token=token, **options))


def _name_after(source: Source, model: nn.Module) -> str:
    """Makes a name for a single expert from the last part of its id, in letters that a name may have."""
    path = Path(source).resolve() if Path(source).is_dir() else Path(source)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", path.name)
    with suppress(ValueError):
        check_expert_name(name, model)
        return name
    return f"expert-{name}"


def _load(
    model: Any,
    folders: Sequence[tuple[str, Path]],
    manifest: Manifest | None,
    rename: Mapping[str, Mapping[str, str]],
    allow_mismatch: bool,
    statistics: bool,
    processing_class: Any,
) -> LucaPeftModel:
    """Reads and checks everything, then adds the experts to the model."""
    tuner = tuner_of(model) if isinstance(model, PeftModel) else None
    names = [name for name, _ in folders]
    counts = Counter(map(str.lower, [*(tuner.experts if tuner else ()), *names]))  # as folders' names are
    if twice := [name for name in names if counts[name.lower()] > 1]:
        remedy = "Load the sources as a dict, whose keys go before the names of a collection: {'bugs': source, ...}"
        raise ValueError(f"more than one expert is called {twice[0]!r}. {remedy}.")
    if unknown := sorted(set(rename) - set(names)):
        raise ValueError(f"rename names the experts {unknown}, but those to load are {list_names(names)}.")
    options = allow_mismatch, statistics, cache(BackboneFacts.of)  # nothing changes the backbone while files are read
    experts = {name: _read_expert(model, name, folder, rename.get(name, {}), *options) for name, folder in folders}
    layer = tuner.layer if tuner else LucaLayer(nn.Identity(), 0, 0)
    device = tuner.layer.experts.device if tuner else next(model.parameters()).device
    preview = LucaExperts(layer, device, experts)
    known, remedy = tuner.classes if tuner else (), ". If they are one class, give it one name with rename=."
    warn_about_spellings(preview.label_space.classes, known, remedy, stacklevel=4)
    images = {name: float(part.counts.sum()) for name, part in preview.statistics.items()}
    for name, count in images.items():
        if 0 < 100 * (sum(images.values()) - count) < count:
            found = f"expert {name!r} claims {count:.3g} images, more than 100 times those of all others together"
            remedy = (
                "With routers of statistics it decides nearly alone. Load it with statistics=False if that is wrong"
            )
            warnings.warn(f"{found}. {remedy}.", stacklevel=4)
    router = _prepare_router(manifest, tuner.router if tuner else None, preview)
    configs = dict(layer.configs, **{name: expert.config for name, expert in experts.items()})
    warn_of_processor(configs, processing_class)

    # From here on nothing is refused.
    if tuner is None:
        with quiet_peft():
            model = PeftModel(model, experts[names[0]].config, adapter_name=names[0])
        tuner = tuner_of(model)
    for name, expert in experts.items():
        tuner.add_expert(name, *expert)
    if router is not None:
        preview.new_are_added(tuner.layer)
        if router is not tuner.router:
            tuner.set_router(router)
    return model.eval()


def _read_expert(
    model: nn.Module,
    name: str,
    folder: Path,
    rename: Mapping[str, str],
    allow_mismatch: bool,
    statistics: bool,
    facts: Callable[[nn.Module, str], BackboneFacts],
) -> NewExpert:
    if not (folder / CONFIG_NAME).is_file():
        raise InvalidExpertError(f"{folder} is not an expert and not a collection: it has no {CONFIG_NAME}.")
    config = validation.read_config(folder)
    config.inference_mode, config.allow_mismatch = True, allow_mismatch
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    try:
        head = find_head(base, config)
    except ValueError as error:
        raise InvalidExpertError(f"{folder}: {error}") from error
    if isinstance(model, PeftModel) and not isinstance(base.get_submodule(head.name), LucaLayer):
        where = f"in place of {head.name!r}, but those of the model in place of {find_layer(base)[0]!r}"
        raise InvalidExpertError(f"{folder}: the expert goes {where}.")
    check_expert_name(name, model, head.name)
    tensors = validation.read_weights(folder, config, head.name, head.width)
    if config.fingerprint is None and not config.allow_mismatch:
        reason = "does not say which backbone it was trained on: its config has no fingerprint"
        raise InvalidExpertError(f"expert {name!r} {reason}. Set allow_mismatch=True to load it all the same.")
    check_backbone(base, head, config, name, tensors, facts)
    classes = config.classes or []
    if unknown := sorted(set(rename) - set(classes)):
        raise ValueError(f"rename names the classes {unknown}, but expert {name!r} has {list_names(classes)}.")
    config.classes = check_classes([rename.get(label, label) for label in classes])
    if not statistics or not (folder / STATISTICS_NAME).is_file():
        return NewExpert(config, tensors, None)
    found = validation.read_statistics(folder)
    width = found.means.shape[1]
    if list(found.classes) != classes or width != head.width:
        of, needed = list_names(found.classes), f"the expert has {list_names(classes)} in {head.width}"
        reason = f"{folder / STATISTICS_NAME} is of the classes {of} in {width} dimensions, but {needed}"
        raise InvalidExpertError(f"{reason}. Load it with statistics=False.")
    return NewExpert(config, tensors, replace(found, classes=tuple(config.classes)))


def _prepare_router(manifest: Manifest | None, current: Router | None, experts: LucaExperts) -> Router | None:
    """Prepares the router of the collection, or else that of the model, for the experts as they will be."""
    saved = manifest.router if manifest else None
    try:
        router = current if saved is None else make_router(saved["name"], **saved["options"])
        if router is not None:
            experts.prepared(router)
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:
        reason = f"the router {current!r}, which is set, cannot use the experts"
        remedy = "To load them all the same, call set_router('entropy') first"
        if manifest and saved is not None:
            reason = f"{manifest.path} asks for the router {show(saved)}"
            one = f"load_expert(model, source, {manifest.names[0]!r})"
            remedy = f"To load its experts without the router, load them one by one: {one}"
        raise InvalidExpertError(f"{reason}: {error} {remedy}.") from error
    return router
