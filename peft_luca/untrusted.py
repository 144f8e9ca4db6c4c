"""Files that strangers wrote: configs, weights and manifests of experts, checked before anything is made of them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from .config import MAX_CLASS_NAME, NAME_RULE, LucaConfig


MANIFEST_NAME = "experts.json"
MANIFEST_FORMAT = 1

MAX_JSON_BYTES = 2**25
MAX_HEADER_BYTES = 2**20
MAX_EXPERT_BYTES = 2**30  # an expert of ViT-g over ten thousand classes has 70 MB
# Beyond these an expert's scores could overflow: NaN, which a router takes for certainty. Trained ones are far within.
MAX_NUMBER = 1e4
MIN_DEVIATION = 1e-6

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_KINDS: dict[str, tuple[type, ...]] = {
    "classes": (list,),
    "reduction": (int,),
    "adapter_width": (int, type(None)),
    "calibrator_width": (int, type(None)),
    "scale": (int, float, type(None)),
    "positive_scale": (bool, type(None)),
    "reference": (bool, type(None)),
    "inference_mode": (bool,),
    "auto_mapping": (dict, type(None)),
    "target_modules": (list, str, type(None)),
}


class InvalidExpertError(ValueError):
    """A file of an expert, or of a collection of them, is not what it should be. Nothing was made of it."""


def read_json(path: Path, what: str) -> dict[str, Any]:
    """
    A JSON object from a stranger's file.

    Raises:
        InvalidExpertError: it is too large, or not a JSON object.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise InvalidExpertError(f"{path} cannot be read: {error}.") from error
    if len(content) > MAX_JSON_BYTES:
        raise InvalidExpertError(f"{path} is not {what}: it has more than {MAX_JSON_BYTES} bytes.")
    return _parse(content, f"{path} is not {what}")


def read_config(folder: Path) -> LucaConfig:
    """
    The config of the expert in a folder.

    Raises:
        InvalidExpertError: it has unknown keys, or values that no expert has.
    """
    path = folder / CONFIG_NAME
    values = read_json(path, "the config of an expert")
    if values.get("peft_type") != "LUCA":
        raise InvalidExpertError(
            f"{path} holds an adapter of type {_show(values.get('peft_type'))}, not a LuCA expert."
        )
    # What a stranger must not decide: allow_mismatch switches the guard of the backbone off.
    known = {field.name for field in fields(LucaConfig)} - {"allow_mismatch"}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InvalidExpertError(
            f"{path} has the keys {_show(unknown)}, which this version of peft_luca and PEFT does not know. If the "
            "file is sound, update both."
        )
    if "classes" not in values:
        raise InvalidExpertError(f"{path} names no classes.")
    for key, value in values.items():
        kinds = _KINDS.get(key, (str, type(None)))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InvalidExpertError(
                f"{path}: {key} must be of type {' or '.join(kind.__name__ for kind in kinds)}, got {_show(value)}."
            )
    if not all(isinstance(name, str) for name in values.get("target_modules") or ()):
        raise InvalidExpertError(f"{path}: target_modules must be names, got {_show(values['target_modules'])}.")
    if values.get("fingerprint") is not None and not re.fullmatch("[0-9a-f]{64}", values["fingerprint"]):
        raise InvalidExpertError(f"{path}: fingerprint must be a SHA-256 digest, got {_show(values['fingerprint'])}.")
    try:
        config = LucaConfig(**{key: value for key, value in values.items() if key != "peft_type"})
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidExpertError(f"{path}: {error}") from error
    return config


def expert_shapes(config: LucaConfig, width: int) -> dict[str, tuple[int, ...]]:
    """Names, as the expert's file has them behind the head's, and shapes of its tensors on a [CLS] of that width."""
    adapter, calibrator = config.widths(width)
    classes = len(config.classes or ())
    shapes: dict[str, tuple[int, ...]] = {}
    if config.arrangement != "calibrator":
        shapes |= {"luca_adapter_down.weight": (adapter, width), "luca_adapter_down.bias": (adapter,)}
        shapes |= {"luca_adapter_up.weight": (width, adapter), "luca_adapter_up.bias": (width,)}
        shapes |= {"luca_adapter_norm.weight": (width,), "luca_adapter_norm.bias": (width,)}
    if config.arrangement != "adapter":
        shapes |= {
            "luca_calibrator_down.weight": (calibrator, width),
            "luca_calibrator_up.weight": (width, calibrator),
        }
    shapes |= {"luca_class_rows": (classes, width)}
    shapes |= {"luca_class_bias": (classes,)} if config.head == "linear" else {"luca_scale": ()}
    return {**shapes, "luca_reference_mean": (width,), "luca_reference_std": (width,)}


def read_weights(folder: Path, config: LucaConfig, head: str, width: int) -> dict[str, Tensor]:
    """
    The tensors of the expert in a folder, by their names behind the head's. The file's size and header are compared
    with what the config and the backbone say before any of it is read.

    Args:
        folder (`Path`): The expert.
        config ([`LucaConfig`]): Its config.
        head (`str`): Name of the backbone's head.
        width (`int`): d, the width of [CLS].

    Raises:
        InvalidExpertError: sizes, names, shapes or types are not those of such an expert, a number is not finite or
            very large, or the file is not the one that the Hub named.
    """
    path = folder / SAFETENSORS_WEIGHTS_NAME
    try:
        shapes = {f"base_model.model.{head}.{name}": shape for name, shape in expert_shapes(config, width).items()}
    except ValueError as error:
        raise InvalidExpertError(f"{folder / CONFIG_NAME}: {error}") from error
    numbers = sum(map(math.prod, shapes.values()))
    if 4 * numbers > MAX_EXPERT_BYTES:
        raise InvalidExpertError(f"{folder / CONFIG_NAME} asks for {numbers:.3g} numbers, which no expert needs.")
    try:
        size = path.stat().st_size
        if not 8 + 2 * numbers < size <= 8 + MAX_HEADER_BYTES + 8 * numbers:
            raise InvalidExpertError(
                f"{path} has {size} bytes, but its config asks for {numbers} numbers on this backbone's [CLS], "
                f"{width} wide: the file is not whole, or the expert was trained on another backbone "
                f"({config.base_model_name_or_path or 'unnamed'}, {(config.fingerprint or 'no fingerprint')[:12]})."
            )
        content = path.read_bytes()
    except OSError as error:
        raise InvalidExpertError(f"{path} cannot be read: {error}.") from error
    _check_header(path, content, shapes)
    _check_digest(path, content)
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise InvalidExpertError(f"{path} is not a whole safetensors file: {error}.") from error
    for name, tensor in tensors.items():
        if not (tensor.abs() <= MAX_NUMBER).all():
            raise InvalidExpertError(f"{path}: {name} holds numbers that are not finite, or above {MAX_NUMBER:g}.")
        if name.endswith("luca_reference_std") and not (tensor >= MIN_DEVIATION).all():
            raise InvalidExpertError(f"{path}: {name} holds deviations below {MIN_DEVIATION:g}.")
    return {name.removeprefix(f"base_model.model.{head}."): tensor for name, tensor in tensors.items()}


def check_size(path: Path) -> None:
    """
    Refuse a file that no expert needs, before it is read.

    Raises:
        InvalidExpertError: it has more than a gibibyte.
    """
    if path.stat().st_size > MAX_EXPERT_BYTES:
        raise InvalidExpertError(f"{path} has {path.stat().st_size} bytes, more than {MAX_EXPERT_BYTES}.")


def read_manifest(folder: Path) -> dict[str, Any]:
    """
    The manifest of the collection in a folder, with at least `experts` and `router`.

    Raises:
        InvalidExpertError: it is not one, or names experts that are not in the folder.
    """
    path = folder / MANIFEST_NAME
    manifest = read_json(path, "a manifest of experts")
    experts, router = manifest.get("experts"), manifest.get("router", False)
    if not isinstance(experts, list) or router is False or not all(isinstance(entry, dict) for entry in experts):
        raise InvalidExpertError(f"{path} is not a manifest of experts: it needs 'experts', a list, and 'router'.")
    if manifest.get("format") != MANIFEST_FORMAT:
        raise InvalidExpertError(
            f"{path} has format {_show(manifest.get('format'))}, and this version of peft_luca reads "
            f"{MANIFEST_FORMAT}."
        )
    if not experts:
        raise InvalidExpertError(f"{path} is empty: it names no experts.")
    if router is not None:
        router = router if isinstance(router, dict) else {}
        options = router.get("options")
        simple = isinstance(options, dict) and all(
            isinstance(value, (str, int, float, type(None))) for value in options.values()
        )
        if not simple or not isinstance(router.get("name"), str):
            raise InvalidExpertError(f"{path}: router must have a name and simple options, got {_show(router)}.")
    names = [entry.get("name") for entry in experts]
    for name in names:
        if not isinstance(name, str) or len(name) > MAX_CLASS_NAME or not NAME_RULE.fullmatch(name):
            raise InvalidExpertError(
                f"{path} names an expert {_show(name)}: names are made of letters, digits, '_' and '-'."
            )
    if len({name.lower() for name in names}) < len(names):  # in one folder, on some file systems
        raise InvalidExpertError(f"{path} names an expert more than once.")
    return manifest


def _parse(content: bytes, complaint: str) -> dict[str, Any]:
    """A JSON object without keys that come twice and without NaN."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key comes more than once")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        values = json.loads(content.decode("utf-8"), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidExpertError(f"{complaint}: {str(error)[:200]}.") from error
    if not isinstance(values, dict):
        raise InvalidExpertError(f"{complaint}: it holds a {type(values).__name__}, not an object.")
    return values


def _check_header(path: Path, content: bytes, shapes: dict[str, tuple[int, ...]]) -> None:
    """Compare a safetensors header with what must be in it: names, types, shapes, and places without gaps."""
    length = int.from_bytes(content[:8], "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, len(content) - 8):
        raise InvalidExpertError(f"{path} is not a whole safetensors file: its header has {length} bytes.")
    header = _parse(content[8 : 8 + length], f"{path} has no safetensors header")
    header.pop("__metadata__", None)
    if set(header) != set(shapes):
        missing, unknown = sorted(set(shapes) - set(header)), sorted(set(header) - set(shapes))
        raise InvalidExpertError(
            f"{path} does not hold the tensors that its config asks for: missing {_show(missing)}, unknown "
            f"{_show(unknown)}."
        )
    places = []
    for name, shape in shapes.items():
        entry = header[name] if isinstance(header[name], dict) else {}
        dtype = entry.get("dtype")
        if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
            raise InvalidExpertError(
                f"{path}: {name} has the dtype {_show(dtype)}, and experts are of {', '.join(_ITEM_BYTES)}."
            )
        if entry.get("shape") != list(shape):
            raise InvalidExpertError(
                f"{path}: {name} has the shape {_show(entry.get('shape'))}, and the config and the backbone ask for "
                f"{list(shape)}."
            )
        places.append((entry.get("data_offsets"), math.prod(shape) * _ITEM_BYTES[dtype]))
    if list(_ends(places)) != [len(content) - 8 - length]:
        raise InvalidExpertError(f"{path} is not a whole safetensors file: its tensors do not fill it.")


def _ends(places: list[tuple[Any, int]]) -> Iterator[int]:
    """Where the tensors end, if they lie one behind the other."""
    if not all(isinstance(place, list) and len(place) == 2 for place, _ in places):
        return
    if not all(type(offset) is int for place, _ in places for offset in place):
        return
    end = 0
    for (begin, stop), size in sorted(places):
        if begin != end or stop - begin != size:
            return
        end = stop
    yield end


def _check_digest(path: Path, content: bytes) -> None:
    """In the Hub's cache a large file is called by the digest that the Hub gave for it."""
    digest = path.resolve().name
    if path.is_symlink() and re.fullmatch("[0-9a-f]{64}", digest) and hashlib.sha256(content).hexdigest() != digest:
        raise InvalidExpertError(
            f"{path} is not the file that the Hub has: its digest is another one. Delete it from the cache, and load "
            "again."
        )


def _show(value: Any) -> str:
    """A stranger's value in a message: escaped, and not at length."""
    try:
        text = ascii(value)
    except RecursionError:
        text = f"a {type(value).__name__} of very many levels"
    return text if len(text) <= 200 else f"{text[:200]}…"
