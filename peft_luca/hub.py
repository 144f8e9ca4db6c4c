"""Saving and loading experts: one, or an ordered collection of them with its router, in a folder or from the Hub."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from peft import PeftModel
from peft.utils import CONFIG_NAME
from torch import nn

from .closed_form import StatisticsRouter
from .model import NAME_RULE, LucaModel
from .routing import router_name
from .statistics import STATISTICS_NAME, ClassStatistics


MANIFEST_NAME = "experts.json"
MANIFEST_FORMAT = 1


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, ensure_ascii=False, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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
        ValueError: the model has no such expert.
    """
    tuner = tuner_of(model)
    if name not in tuner.experts:
        raise ValueError(f"there is no expert {name!r} to save. The model has {', '.join(tuner.experts)}.")
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        # Without save_embedding_layers=False PEFT asks the Hub for the base's config at every save.
        model.save_pretrained(str(staging), selected_adapters=[name], save_embedding_layers=False)
        written = staging if name == "default" else staging / name
        target.mkdir(exist_ok=True)
        part = tuner.layer.statistics.get(name)
        part = ClassStatistics.load(part) if isinstance(part, Path) and statistics else part
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
    tuner, folder = tuner_of(model), Path(directory)
    if isinstance(tuner.layer.router, StatisticsRouter) and not statistics:
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
    for name in tuner.experts if names is None else names:
        save_expert(model, name, folder / name, statistics=statistics)
    write_json(folder / MANIFEST_NAME, manifest)


def load_experts(
    model: nn.Module,
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    allow_mismatch: bool = False,
) -> PeftModel:
    """
    Compose experts, of one owner or of several, into one classifier, without training.

    Args:
        model (`nn.Module`):
            The backbone with a head, or a model that has experts already, to which these are added.
        sources (`str`, list or dict):
            Folders or Hub ids, each of one expert or of a collection. Experts are called as in their collection, or
            after the last part of their id; a dict gives single experts other names.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        token (`str` or `bool`, *optional*): Hub token.
        allow_mismatch (`bool`, *optional*, defaults to `False`): Load experts of another backbone too.

    Returns:
        [`~peft.PeftModel`]: With the router of the collection when there was one source and it has one.

    Raises:
        ValueError: a source is not an expert, two experts have the same name, or an expert is of another backbone.
    """
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    named = list(sources.items()) if isinstance(sources, Mapping) else [(None, source) for source in sources]
    if not named:
        raise ValueError("there are no experts to load: the list is empty.")
    found: dict[str, Path] = {}
    router: Any = None
    for name, source in named:
        folder = _local(source, revision, token)
        if (folder / MANIFEST_NAME).is_file():
            if name is not None:
                raise ValueError(f"{source} is a collection, whose experts have names: it cannot be called {name!r}.")
            experts, router = read_manifest(folder)
        elif (folder / CONFIG_NAME).is_file():
            experts = {name or re.sub(r"[^A-Za-z0-9_-]+", "-", Path(str(source)).name): folder}
        else:
            raise ValueError(f"{source} is not an expert and not a collection: it has no {CONFIG_NAME}.")
        taken = sorted({*found, *(tuner_of(model).experts if isinstance(model, PeftModel) else ())} & set(experts))
        if taken:
            raise ValueError(
                f"more than one expert is called {taken[0]!r}. Give them other names: load_experts(model, "
                "{'name': source, ...})."
            )
        found.update(experts)
    for name, folder in found.items():
        model = _load_one(model, name, folder, allow_mismatch)
        if (folder / STATISTICS_NAME).is_file():
            tuner_of(model).layer.statistics[name] = folder  # read once a router needs them
    assert isinstance(model, PeftModel)
    if len(named) == 1 and router is not None:
        tuner_of(model).set_router(router["name"], **router["options"])
    return model


def read_manifest(folder: Path) -> tuple[dict[str, Path], dict[str, Any] | None]:
    """The experts of a collection, name → folder, in their order, and its router."""
    path = folder / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        names = [expert["name"] for expert in manifest["experts"]]
        router = manifest["router"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a manifest of experts: {error!r}.") from error
    if manifest.get("format") != MANIFEST_FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')!r}, and this version of peft_luca reads {MANIFEST_FORMAT}."
        )
    for name in names:
        if not isinstance(name, str) or not NAME_RULE.fullmatch(name):
            raise ValueError(f"{path} names an expert {name!r}: names are made of letters, digits, '_' and '-'.")
        if not (folder / name / CONFIG_NAME).is_file():
            raise ValueError(f"{path} names the expert {name!r}, but {folder / name} has no {CONFIG_NAME}.")
    return {name: folder / name for name in names}, router


def tuner_of(model: nn.Module) -> LucaModel:
    """The LuCA tuner of a PeftModel."""
    tuner = getattr(model, "base_model", None) if isinstance(model, PeftModel) else None
    if not isinstance(tuner, LucaModel):
        raise ValueError(f"needs a PeftModel with LuCA experts, got {type(model).__name__}.")
    return tuner


def _router_entry(tuner: LucaModel) -> dict[str, Any] | None:
    router, options = tuner.layer.router, tuner.layer.router_options
    if router is None:
        return None
    name = router_name(router)
    if name is None:
        raise ValueError(
            "the router is a function of your own, which no file can hold. Save with set_router('entropy') or "
            "set_router(None), and set your function again after loading."
        )
    return {"name": name, "options": options}


def _local(source: str | os.PathLike[str], revision: str | None, token: str | bool | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    return Path(
        snapshot_download(str(source), revision=revision, token=token, allow_patterns=["*.json", "*.safetensors"])
    )


def _load_one(model: nn.Module, name: str, folder: Path, allow_mismatch: bool) -> PeftModel:
    from .config import LucaConfig

    config = LucaConfig.from_pretrained(str(folder))
    if not isinstance(config, LucaConfig):
        raise ValueError(f"{folder} holds an adapter of type {config.peft_type}, not a LuCA expert.")
    if not isinstance(model, PeftModel):
        config.allow_mismatch = allow_mismatch
        return PeftModel.from_pretrained(model, str(folder), adapter_name=name, config=config)
    # PEFT's load_adapter reads the config anew and would not know about allow_mismatch: add first, then load into it.
    config.allow_mismatch = allow_mismatch
    config.inference_mode = True
    model.add_adapter(name, config)
    model.load_adapter(str(folder), name)
    return model
