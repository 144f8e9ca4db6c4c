"""Saving and loading experts: one, or an ordered collection of them with its router, in a folder or from the Hub."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn

from ..routing import LabelSpace, Router, make_router
from ..routing.statistics import ClassStatistics
from ..tuner.backbone import check_backbone
from ..tuner.config import LucaConfig
from ..tuner.head import check_expert_name, find_head
from ..tuner.layer import LucaLayer, find_layer
from ..tuner.model import LucaModel, quiet_peft, tuner_of
from ..utils import NAME_RULE, InvalidExpertError, atomic_write, check_classes, list_names, show, write_json
from .validation import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    STATISTICS_FORMAT,
    STATISTICS_NAME,
    Manifest,
    expert_digests,
    read_config,
    read_manifest,
    read_statistics,
    read_weights,
)


# The files of an expert, in the order in which they are put in place: a folder counts as an adapter once it has a
# config. Nothing else is fetched from a stranger's repository.
EXPERT_FILES = (STATISTICS_NAME, SAFETENSORS_WEIGHTS_NAME, CONFIG_NAME)
Source = str | os.PathLike[str]


def save_expert(model: PeftModel, name: str, directory: Source, *, statistics: bool = True) -> None:
    """
    Saves one expert as an ordinary PEFT adapter at the root of a folder. An adapter that is there already is replaced
    once the new one is written.

    Args:
        model ([`~peft.PeftModel`]): The model.
        name (`str`): The expert.
        directory (`str` or `PathLike`): The folder.
        statistics (`bool`, *optional*, defaults to `True`):
            Write the statistics of its training images too, where it has them. They reveal each class's count, mean
            and main directions, which for a class of few images is nearly its images' features. `False` also removes
            those that are in the folder.
    """
    tuner, target = tuner_of(model), Path(directory).expanduser()
    _check_known(tuner, [name])
    # Given the whole state of the model, PEFT compares every tensor with every expert's name, which takes minutes
    # among thousands. Under FSDP only PEFT can gather the state.
    path, layer = find_layer(model)
    state = {f"{path}.{key}": tensor for key, tensor in layer.tensors(name).items()}
    state_dict = None if "_fsdp_wrapped_module" in path else state
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = f".{target.name}."  # a run that was killed here finds and removes it by this name
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=hidden, ignore_cleanup_errors=True) as staging:
        # Without save_embedding_layers=False PEFT asks the Hub for the backbone's config at every save.
        model.save_pretrained(staging, selected_adapters=[name], save_embedding_layers=False, state_dict=state_dict)
        written = Path(staging) if name == "default" else Path(staging, name)
        if statistics and name in layer.statistics:
            save_statistics(layer.statistics[name], written, expert_digests(written))
        target.mkdir(exist_ok=True)
        config = target / CONFIG_NAME
        if config.is_file() and config.read_bytes() != (written / CONFIG_NAME).read_bytes():
            config.unlink()  # cut off here, the folder holds no expert, rather than parts of two
        for file in EXPERT_FILES:
            if not (written / file).exists():
                (target / file).unlink(missing_ok=True)
                continue
            with open(written / file, "rb") as content:
                os.fsync(content.fileno())
            os.replace(written / file, target / file)


def save_experts(
    model: PeftModel, directory: Source, names: Sequence[str] | None = None, *, statistics: bool = True
) -> None:
    """
    Saves a collection: one PEFT adapter per subfolder, and `experts.json` with their order, classes and the router. Of
    a collection that is there already, experts that the model does not have are deleted.

    Args:
        model ([`~peft.PeftModel`]): The model.
        directory (`str` or `PathLike`): The folder.
        names (`Sequence[str]`, *optional*): The experts to write; the manifest always lists all. All by default.
        statistics (`bool`, *optional*, defaults to `True`): Write their statistics too; see [`save_expert`].

    Raises:
        ValueError: the router is a function, or it needs the statistics that are left out.
    """
    tuner, folder = tuner_of(model), Path(directory).expanduser()
    names = list(tuner.experts) if names is None else names
    _check_known(tuner, names)
    router = tuner.router
    if router is not None and router.name is None:
        remedy = "Save with set_router(None), and set the function again after loading"
        raise ValueError(f"the router is a function, which no file can hold. {remedy}.")
    if router is not None and router.needs_statistics and not statistics:
        raise ValueError(f"the router {router.name!r} needs the experts' statistics: leave out statistics=False.")
    folder.mkdir(parents=True, exist_ok=True)
    there = read_manifest(folder).names if (folder / MANIFEST_NAME).is_file() else []
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


def _check_known(tuner: LucaModel, names: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in tuner.experts]:
        raise ValueError(f"there is no expert {show(unknown[0])} to save. The model has {list_names(tuner.experts)}.")


def load_experts(
    model: nn.Module,
    sources: Source | Sequence[Source] | Mapping[str, Source],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    rename: Mapping[str, Mapping[str, str]] | None = None,
    allow_mismatch: bool = False,
    statistics: bool = True,
) -> PeftModel:
    """
    Composes experts, of one owner or of several, into one classifier, without training. All files are read and checked
    before the model is changed, so that after an error it is as it was.

    Args:
        model (`nn.Module`):
            The backbone with a head, or a model that has experts already, to which these are added.
        sources (`str`, list or dict):
            Folders or Hub ids, each of one expert or of a collection. Experts are called as in their collection, or
            after the last part of their id; a dict gives single experts other names.
        revision (`str`, *optional*): Branch, tag or commit on the Hub, the same for all sources.
        token (`str` or `bool`, *optional*): Hub token.
        rename (`dict`, *optional*):
            Other names for classes, `{expert: {class: name}}`, where two owners mean different things by a name.
        allow_mismatch (`bool`, *optional*, defaults to `False`): Load experts of another backbone too.
        statistics (`bool`, *optional*, defaults to `True`):
            Load their statistics too, which routers such as `"gaussian"` need.

    Returns:
        [`~peft.PeftModel`]: With the router of the collection when there was one source and it has one.

    Raises:
        InvalidExpertError: a source is not an expert, or its files are not sound.
        ValueError: two experts have the same name, or an expert is of another backbone.
    """
    sources = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    named = sources.items() if isinstance(sources, Mapping) else [(None, source) for source in sources]
    folders: list[tuple[str, Path]] = []
    manifest: Manifest | None = None
    for name, source in named:
        folder = _local(source, revision, token, ["", "*/"], statistics)
        if not (folder / MANIFEST_NAME).is_file():
            folders.append((name or _name_after(source, model), folder))
            continue
        if name is not None:
            raise ValueError(f"{source} is a collection, whose experts have names: it cannot be called {name!r}.")
        manifest = read_manifest(folder)
        folders += [(expert, folder / expert) for expert in manifest.names]
    if not folders:
        raise ValueError("there are no experts to load: the list is empty.")
    return _load(model, folders, manifest if len(named) == 1 else None, rename or {}, allow_mismatch, statistics)


def load_expert(
    model: nn.Module,
    source: Source,
    name: str | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    rename: Mapping[str, str] | None = None,
    allow_mismatch: bool = False,
    statistics: bool = True,
) -> PeftModel:
    """
    Adds one expert to a backbone, or to a model that has experts already, as [`load_experts`] does.

    Args:
        source (`str` or `PathLike`): Folder or Hub id of an expert, or of a collection that has it.
        name (`str`, *optional*):
            What the expert is called in the model, by default the last part of its id. Of a collection: which of its
            experts; no other is downloaded, and the collection's router is not set.
        rename (`dict`, *optional*): Other names for classes, `{class: name}`.
        model, revision, token, allow_mismatch, statistics: See [`load_experts`].
    """
    # A pattern in place of a name would download other experts.
    places = ["", f"{name}/"] if name and NAME_RULE.fullmatch(name) else [""]
    folder = _local(source, revision, token, places, statistics)
    if (folder / MANIFEST_NAME).is_file():
        names = read_manifest(folder).names
        if name not in names:
            raise ValueError(f"{source} is a collection of {list_names(names)}. Name one of them, got {name!r}.")
        folder = folder / str(name)
    name = name or _name_after(source, model)
    return _load(model, [(name, folder)], None, {name: rename} if rename else {}, allow_mismatch, statistics)


def _local(
    source: Source, revision: str | None, token: str | bool | None, places: Sequence[str], statistics: bool
) -> Path:
    """Returns the folder of a source: itself, or where the experts' files of a Hub repository are in the cache."""
    if Path(source).expanduser().is_dir():
        return Path(source).expanduser()
    files = EXPERT_FILES if statistics else EXPERT_FILES[1:]
    patterns = [MANIFEST_NAME, *(f"{place}{file}" for place in places for file in files)]
    try:
        return Path(snapshot_download(str(source), revision=revision, token=token, allow_patterns=patterns))
    except HFValidationError as error:
        raise InvalidExpertError(f"{source} is not an expert: it is neither a folder nor a Hub id.") from error
    except LocalEntryNotFoundError as error:
        message = f"{source} is no folder here, the Hub cannot be reached, and its cache does not have it: {error}"
        raise LocalEntryNotFoundError(message) from error


def _name_after(source: Source, model: nn.Module) -> str:
    """Makes a name for a single expert from the last part of its id, in letters that a name may have."""
    path = Path(source).resolve() if Path(source).is_dir() else Path(source)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", path.name)
    try:
        check_expert_name(name, model)
    except ValueError:
        return f"expert-{name}"
    return name


class _Expert(NamedTuple):
    """An expert as its files have it, read and checked."""

    config: LucaConfig
    tensors: dict[str, Tensor]
    statistics: ClassStatistics | None


def _load(
    model: nn.Module,
    folders: Sequence[tuple[str, Path]],
    manifest: Manifest | None,
    rename: Mapping[str, Mapping[str, str]],
    allow_mismatch: bool,
    statistics: bool,
) -> PeftModel:
    """Reads and checks everything, then adds the experts to the model."""
    tuner = tuner_of(model) if isinstance(model, PeftModel) else None
    names = [name for name, _ in folders]
    counts = Counter(name.lower() for name in [*(tuner.experts if tuner else ()), *names])  # as folders' names are
    if twice := [name for name in names if counts[name.lower()] > 1]:
        raise ValueError(f"more than one expert is called {twice[0]!r}. Give names: {{'name': source, ...}}.")
    if unknown := sorted(set(rename) - set(names)):
        raise ValueError(f"rename names the experts {unknown}, but those to load are {list_names(names)}.")
    experts: dict[str, _Expert] = {}
    for name, folder in folders:
        experts[name] = _read_expert(model, name, folder, rename.get(name, {}), allow_mismatch, statistics)
    router = _make_router(manifest, tuner, experts) if manifest and manifest.router is not None else None

    # From here on nothing is refused.
    for name, expert in experts.items():
        if tuner is not None:
            tuner.add_expert(name, *expert)
            continue
        with quiet_peft():
            model = PeftModel(model, expert.config, adapter_name=name)
        tuner = tuner_of(model)
        tuner.layer.load_expert(name, expert.tensors)
        if expert.statistics is not None:
            tuner.layer.set_statistics(name, expert.statistics)
    if tuner is not None and router is not None:
        tuner.set_router(router)
    assert isinstance(model, PeftModel)
    return model.eval()


def _read_expert(
    model: nn.Module, name: str, folder: Path, rename: Mapping[str, str], allow_mismatch: bool, statistics: bool
) -> _Expert:
    if not (folder / CONFIG_NAME).is_file():
        raise InvalidExpertError(f"{folder} is not an expert and not a collection: it has no {CONFIG_NAME}.")
    config = read_config(folder)
    config.inference_mode, config.allow_mismatch = True, allow_mismatch
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    try:
        head = find_head(base, config)
    except ValueError as error:
        raise InvalidExpertError(f"{folder}: {error}") from error
    if isinstance(model, PeftModel) and not isinstance(base.get_submodule(head.name), LucaLayer):
        there = tuner_of(model).targeted_module_names[0]
        raise InvalidExpertError(
            f"{folder}: the expert goes in place of {head.name!r}, but those of the model in place of {there!r}."
        )
    check_expert_name(name, model, head.name)
    tensors = read_weights(folder, config, head.name, head.width)
    if config.fingerprint is None and not config.allow_mismatch:
        reason = "does not say which backbone it was trained on: its config has no fingerprint"
        raise InvalidExpertError(f"expert {name!r} {reason}. Set allow_mismatch=True to load it all the same.")
    check_backbone(base, head, config, name, tensors)
    classes = config.classes or []
    if unknown := sorted(set(rename) - set(classes)):
        raise ValueError(f"rename names the classes {unknown}, but expert {name!r} has {list_names(classes)}.")
    config.classes = check_classes([rename.get(label, label) for label in classes])
    if not statistics or not (folder / STATISTICS_NAME).is_file():
        return _Expert(config, tensors, None)
    found = read_statistics(folder)
    if list(found.classes) != classes or found.means.shape[1] != head.width:
        raise InvalidExpertError(
            f"{folder / STATISTICS_NAME} is of the classes {list_names(found.classes)} in {found.means.shape[1]} "
            f"dimensions, but the expert has {list_names(classes)} in {head.width}. Load it with statistics=False."
        )
    return _Expert(config, tensors, replace(found, classes=tuple(config.classes)))


def _make_router(manifest: Manifest, tuner: LucaModel | None, experts: Mapping[str, _Expert]) -> Router:
    """Makes a collection's router, and checks that it can be prepared for the experts as they will be in the model."""
    classes: dict[str, Sequence[str]] = dict(tuner.experts) if tuner else {}
    statistics = dict(tuner.statistics) if tuner else {}
    references: dict[str, Any] = {name: tuner.layer.experts.reference(name) for name in tuner.experts} if tuner else {}
    for name, expert in experts.items():
        classes[name] = expert.config.classes or ()
        mean, std = expert.tensors["luca_reference_mean"].float(), expert.tensors["luca_reference_std"].float()
        references[name] = (mean, std) if expert.config.reference else None
        if expert.statistics is not None:
            statistics[name] = expert.statistics
    names = list(classes)
    preview: Any = SimpleNamespace(
        names=names,
        by_name=torch.tensor(sorted(range(len(names)), key=names.__getitem__)),
        label_space=LabelSpace(classes),
        statistics=statistics,
        reference=lambda name: references[name] and [tensor.cpu() for tensor in references[name]],
    )
    try:
        router = make_router(manifest.router["name"], **manifest.router["options"])
        router.prepare(preview)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise InvalidExpertError(
            f"{manifest.path} asks for the router {show(manifest.router)}: {error} To load its experts without the "
            f"router, load them one by one: load_expert(model, source, {manifest.names[0]!r})."
        ) from error
    return router
