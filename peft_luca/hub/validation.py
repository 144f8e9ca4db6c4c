"""Files that strangers wrote: configs, weights and manifests of experts, checked before anything is made of them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..tuner.config import LucaConfig
from ..utils import NAME_RULE, InvalidExpertError, show


MANIFEST_NAME = "experts.json"
MANIFEST_FORMAT = 1

MAX_JSON_BYTES = 2**25
MAX_HEADER_BYTES = 2**20
MAX_EXPERT_BYTES = 2**30  # an expert of ViT-g over ten thousand classes has 70 MB
# Beyond these an expert's scores could overflow: NaN, which a router takes for certainty. Trained ones are far within.
MAX_NUMBER = 1e4
MIN_DEVIATION = 1e-6
FLOATS = ("F64", "F32", "F16", "BF16")
Wanted = Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]  # name → types that it may have, shape

_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "BF16": 2}
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
    return parse_object(content, f"{path} is not {what}")


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
            f"{path} holds an adapter of type {show(values.get('peft_type'))}, not a LuCA expert."
        )
    # What a stranger must not decide: allow_mismatch switches the guard of the backbone off.
    values.pop("head", None)
    known = {field.name for field in fields(LucaConfig)} - {"allow_mismatch"}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InvalidExpertError(
            f"{path} has the keys {show(unknown)}, which this version of peft_luca and PEFT does not know. If the "
            "file is sound, update both."
        )
    if "classes" not in values:
        raise InvalidExpertError(f"{path} names no classes.")
    for key, value in values.items():
        kinds = _KINDS.get(key, (str, type(None)))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InvalidExpertError(
                f"{path}: {key} must be of type {' or '.join(kind.__name__ for kind in kinds)}, got {show(value)}."
            )
    if not all(isinstance(name, str) for name in values.get("target_modules") or ()):
        raise InvalidExpertError(f"{path}: target_modules must be names, got {show(values['target_modules'])}.")
    if values.get("fingerprint") is not None and not re.fullmatch("[0-9a-f]{64}", values["fingerprint"]):
        raise InvalidExpertError(f"{path}: fingerprint must be a SHA-256 digest, got {show(values['fingerprint'])}.")
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
    shapes |= {"luca_scale": ()}
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
    except OSError as error:
        raise InvalidExpertError(f"{path} cannot be read: {error}.") from error
    tensors, _ = read_tensors(path, lambda header: {name: (FLOATS, shape) for name, shape in shapes.items()})
    for name, tensor in tensors.items():
        if not (tensor.abs() <= MAX_NUMBER).all():
            raise InvalidExpertError(f"{path}: {name} holds numbers that are not finite, or above {MAX_NUMBER:g}.")
        if name.endswith("luca_reference_std") and not (tensor >= MIN_DEVIATION).all():
            raise InvalidExpertError(f"{path}: {name} holds deviations below {MIN_DEVIATION:g}.")
    return {name.removeprefix(f"base_model.model.{head}."): tensor for name, tensor in tensors.items()}


def read_tensors(
    path: Path, wanted: Callable[[dict[str, Any]], Wanted], header_bytes: int = MAX_HEADER_BYTES
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """
    The tensors of a safetensors file, and its header. What lies behind the header is read only once names, types,
    shapes and places are those that must be in such a file, and the file is as long as they say.

    Args:
        path (`Path`): The file.
        wanted (function): Its header → names, types and shapes of the tensors that must be in it.
        header_bytes (`int`, *optional*): The longest header that such a file can have.

    Raises:
        InvalidExpertError: it is not that, or not the file that the Hub named.
    """
    check_size(path)
    try:
        with open(path, "rb") as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(header_bytes, size - 8):
                raise InvalidExpertError(f"{path} is not a whole safetensors file: its header has {length} bytes.")
            header = parse_object(file.read(length), f"{path} has no safetensors header")
            _check_header(path, header, wanted(header), size - 8 - length)
            file.seek(0)
            content = file.read(size)
    except OSError as error:
        raise InvalidExpertError(f"{path} cannot be read: {error}.") from error
    _check_digest(path, content)
    try:
        return load(content), header
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise InvalidExpertError(f"{path} is not a whole safetensors file: {error}.") from error


def check_size(path: Path) -> None:
    """
    Refuse a file that no expert needs, before it is read.

    Raises:
        InvalidExpertError: it has more than a gibibyte, or cannot be read.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InvalidExpertError(f"{path} cannot be read: {error}.") from error
    if size > MAX_EXPERT_BYTES:
        raise InvalidExpertError(f"{path} has {size} bytes, more than {MAX_EXPERT_BYTES}.")


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
            f"{path} has format {show(manifest.get('format'))}, and this version of peft_luca reads {MANIFEST_FORMAT}."
        )
    if not experts:
        raise InvalidExpertError(f"{path} is empty: it names no experts.")
    if router is not None:
        router = router if isinstance(router, dict) else {}
        options = router.get("options")
        simple = isinstance(options, dict) and all(map(_is_simple, options.values()))
        if not simple or not isinstance(router.get("name"), str):
            raise InvalidExpertError(
                f"{path}: router must have a name and simple options, with numbers of usual size, got {show(router)}."
            )
    names = [entry.get("name") for entry in experts]
    for name in names:
        if not isinstance(name, str) or not NAME_RULE.fullmatch(name):
            raise InvalidExpertError(
                f"{path} names an expert {show(name)}: names are made of letters, digits, '_' and '-'."
            )
    if len({name.lower() for name in names}) < len(names):  # in one folder, on some file systems
        raise InvalidExpertError(f"{path} names an expert more than once.")
    return manifest


def _is_simple(value: Any) -> bool:
    """Whether a router's option is one that its numbers cannot overflow with."""
    if isinstance(value, (int, float)):
        return not value or 1 / MAX_NUMBER <= abs(value) <= MAX_NUMBER
    return isinstance(value, (str, type(None)))


def parse_object(content: bytes | str, complaint: str) -> dict[str, Any]:
    """A JSON object without keys that come twice and without NaN."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key comes more than once")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        values = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidExpertError(f"{complaint}: {str(error)[:200]}.") from error
    if not isinstance(values, dict):
        raise InvalidExpertError(f"{complaint}: it holds a {type(values).__name__}, not an object.")
    return values


def _check_header(path: Path, header: dict[str, Any], wanted: Wanted, data_bytes: int) -> None:
    """Compare a safetensors header with what must be in it: names, types, shapes, and places without gaps."""
    found = set(header) - {"__metadata__"}
    if found != set(wanted):
        missing, unknown = sorted(set(wanted) - found), sorted(found - set(wanted))
        raise InvalidExpertError(
            f"{path} does not hold the tensors that belong into it: missing {show(missing)}, unknown {show(unknown)}."
        )
    places = []
    for name, (dtypes, shape) in wanted.items():
        entry = header[name] if isinstance(header[name], dict) else {}
        dtype = entry.get("dtype")
        if not isinstance(dtype, str) or dtype not in dtypes:
            raise InvalidExpertError(
                f"{path}: {name} has the dtype {show(dtype)}, and must be of {', '.join(dtypes)}."
            )
        if entry.get("shape") != list(shape):
            raise InvalidExpertError(
                f"{path}: {name} has the shape {show(entry.get('shape'))}, and must have {list(shape)}."
            )
        places.append((entry.get("data_offsets"), math.prod(shape) * _ITEM_BYTES[dtype]))
    if list(_ends(places)) != [data_bytes]:
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
