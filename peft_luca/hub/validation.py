"""Reads configs, weights, statistics and manifests that strangers wrote. Everything is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..routing.evidence import EDGES, WEIGHTS
from ..routing.statistics import ClassStatistics
from ..tuner.config import LucaConfig
from ..tuner.experts import ExpertStore
from ..utils import NAME_RULE, InvalidExpertError, check_classes, show


MANIFEST_NAME = "experts.json"
MANIFEST_FORMAT = 1
STATISTICS_NAME = "statistics.safetensors"
STATISTICS_FORMAT = 1

MAX_JSON_BYTES = 2**25
MAX_EXPERT_BYTES = 2**30  # an expert of ViT-g over ten thousand classes has 70 MB
# Beyond these an expert's scores could overflow to NaN. Those of trained experts are far within.
MAX_NUMBER = 1e4
MIN_DEVIATION = 1e-6
MAX_IMAGES = 1e12  # of a class
MAX_RANDOM_FEATURES = 16384  # whose Gram matrix takes 1 GiB
TOLERANCE = 1e-3  # of statistics, which were rounded to float32
FLOATS = ("F64", "F32", "F16", "BF16")
# What a config says about the weights beside it.
CONFIG_FACTS = (
    "classes adapter_width calibrator_width arrangement norm_position positive_scale reference whitening background "
    "white_level"
).split()

_SHAPES: dict[tuple[Any, ...], dict[str, tuple[int, ...]]] = {}  # a thousand experts of a collection have few
Specs = Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]  # tensor name -> allowed dtypes, shape
Header = Mapping[str, tuple[str, list[int]]]  # tensor name -> dtype, shape


def read_config(folder: Path) -> LucaConfig:
    """Reads the config of the expert in a folder. Unknown keys are refused."""
    path = folder / CONFIG_NAME
    values = read_json(path)
    if (kind := values.get("peft_type")) != "LUCA":
        raise InvalidExpertError(f"{path} holds an adapter of type {show(kind)}, not a LuCA expert.")
    # A stranger must not set allow_mismatch, which switches the check of the backbone off.
    known = {"head", *(field.name for field in fields(LucaConfig))} - {"allow_mismatch"}
    if unknown := sorted(set(values) - known):
        reason = f"has the keys {show(unknown)}, which this version of peft_luca or PEFT does not know"
        raise InvalidExpertError(f"{path} {reason}. If the file is sound, update both.")
    if values.get("classes") is None:
        raise InvalidExpertError(f"{path} names no classes.")
    for key in ("base_model_name_or_path", "revision", "fingerprint", "target_modules"):
        value = values.get(key)
        if not isinstance(value, (str, type(None))) and not (key == "target_modules" and isinstance(value, list)):
            raise InvalidExpertError(f"{path}: {key} must be a string or null, got {show(value)}.")
    if not re.fullmatch("[0-9a-f]{64}", values.get("fingerprint") or "0" * 64):
        raise InvalidExpertError(f"{path}: fingerprint must be a SHA-256 digest, got {show(values['fingerprint'])}.")
    try:
        # What an older version has saved does not say whether it whitens, and it does not.
        values["whitening"] = values.get("whitening") or False
        return LucaConfig(**{key: value for key, value in values.items() if key != "peft_type"})
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidExpertError(f"{path}: {error}") from error


class Manifest(NamedTuple):
    """What a collection's `experts.json` says: names of its experts in their order, and the entry of its router."""

    path: Path
    names: list[str]
    router: Any


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of the collection in a folder. Names that leave the folder are refused."""
    path = folder / MANIFEST_NAME
    manifest = read_json(path)
    if manifest.get("format") != MANIFEST_FORMAT:
        found = show(manifest.get("format"))
        raise InvalidExpertError(f"{path} has the format {found}, and this version reads {MANIFEST_FORMAT}.")
    experts = manifest.get("experts")
    if not isinstance(experts, list) or not experts or not all(isinstance(entry, dict) for entry in experts):
        raise InvalidExpertError(f"{path} needs 'experts', a list of at least one expert, got {show(experts)}.")
    names = [entry.get("name") for entry in experts]
    for name in names:
        if not isinstance(name, str) or not NAME_RULE.fullmatch(name):
            raise InvalidExpertError(f"{path} names an expert {show(name)}; letters, digits, '_' and '-' are allowed.")
    if len({name.lower() for name in names}) < len(names):  # one folder, on some file systems
        raise InvalidExpertError(f"{path} names an expert more than once.")
    return Manifest(path, names, manifest.get("router"))


def expert_shapes(config: LucaConfig, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of an expert's tensors, by their names after that of the head. `width` is d, the width of [CLS]."""
    key = config.arrangement, bool(config.whitening), *config.widths(width), len(config.classes or ()), width
    if key not in _SHAPES:
        with torch.device("meta"):  # nothing is allocated
            store = ExpertStore(nn.Identity(), width, width)
            store.update_layer("expert", config)
        tensors = store.tensors("expert").items()
        _SHAPES[key] = {name.replace(".expert", "", 1): tuple(tensor.shape) for name, tensor in tensors}
    return _SHAPES[key]


def read_weights(folder: Path, config: LucaConfig, head: str, width: int) -> dict[str, Tensor]:
    """
    Reads the tensors of the expert in a folder, by their names after the name of the head. Names, shapes and types are
    compared with the config and the backbone, whose `head` reads [CLS] vectors of `width`, before any tensor is read.
    """
    path, prefix = folder / SAFETENSORS_WEIGHTS_NAME, f"base_model.model.{head}."
    try:
        largest = 4 * width * max(*config.widths(width), len(config.classes or ()))
    except ValueError as error:
        raise InvalidExpertError(f"{folder / CONFIG_NAME}: {error}") from error
    if largest > MAX_EXPERT_BYTES:
        raise InvalidExpertError(f"{folder / CONFIG_NAME} asks for more than {MAX_EXPERT_BYTES} bytes of weights.")
    specs = {f"{prefix}{name}": (FLOATS, shape) for name, shape in expert_shapes(config, width).items()}
    backbone = config.base_model_name_or_path or "an unnamed backbone"
    hint = f" [CLS] of this backbone is {width} wide; the expert was trained on {show(backbone)}."
    tensors, _ = _read_tensors(path, lambda found, metadata: specs, hint)
    for name, tensor in tensors.items():
        if not (tensor.abs() <= MAX_NUMBER).all():
            raise InvalidExpertError(f"{path}: {name} holds numbers that are not finite, or above {MAX_NUMBER:g}.")
        if name.endswith("luca_reference_std") and not (tensor >= MIN_DEVIATION).all():
            raise InvalidExpertError(f"{path}: {name} holds deviations below {MIN_DEVIATION:g}.")
        if name.endswith("luca_whitening") and not (tensor.abs() <= 1).all():
            raise InvalidExpertError(f"{path}: {name} holds numbers above 1, which no direction has.")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def read_statistics(folder: str | os.PathLike[str]) -> ClassStatistics:
    """Reads the `statistics.safetensors` of the expert in a folder. Numbers that no statistics have are refused."""
    path = Path(folder) / STATISTICS_NAME
    try:
        tensors, metadata = _read_tensors(path, _statistics_specs)
        about = json.loads(metadata["statistics"])
        digests = {key: about[key] for key in ("weights", "config") if key in about}
        if digests and digests != expert_digests(path.parent):
            raise ValueError("it does not belong to the weights and the config beside it.")
        _check_statistics(tensors)
    except (ValueError, RecursionError) as error:
        reason = f"{error}" if isinstance(error, InvalidExpertError) else f"{path}: {error}"
        raise InvalidExpertError(f"{reason} Get the file again, or load without it: statistics=False.") from error
    factors = tuple(tensors.pop("factors").split(tensors.pop("factor_rows").tolist()))
    return ClassStatistics(tuple(_statistics_classes(metadata)), factors=factors, **tensors)


def expert_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the weights of the expert in a folder, and of what its config says about them."""
    values = read_json(folder / CONFIG_NAME)
    facts = json.dumps([values.get(name) for name in CONFIG_FACTS]).encode()
    return {"weights": _digest(folder / SAFETENSORS_WEIGHTS_NAME), "config": hashlib.sha256(facts).hexdigest()}


def _statistics_classes(metadata: Mapping[str, str]) -> list[str]:
    about = json.loads(metadata.get("statistics", "null"))
    if not isinstance(about, dict) or about.get("format") != STATISTICS_FORMAT:
        raise ValueError(f"its metadata needs 'statistics' with the format {STATISTICS_FORMAT}, got {show(about)}.")
    return check_classes(about.get("classes"))


def _statistics_specs(found: Header, metadata: Mapping[str, str]) -> Specs:
    """Tensors that a file of statistics must have. K is known from its classes, d and M from its shapes."""

    def size(name: str, axis: int) -> int:
        shape = found[name][1] if name in found else []
        if len(shape) < 2 or not shape[axis]:
            raise ValueError(f"its {name} has the shape {show(shape)}, and needs two dimensions above 0.")
        return shape[axis]

    k, d = len(_statistics_classes(metadata)), size("means", 1)
    rows = found["factors"][1][0] if "factors" in found and found["factors"][1] else 0  # no class needs a factor
    specs = {
        "counts": (("F64",), (k,)),
        "means": (("F64",), (k, d)),
        "factor_rows": (("I64",), (k,)),
        "factors": (("F32",), (rows, d)),
        "remainder": (("F32",), (k, d)),
        "errors": (("F64",), (k,)),
    }
    m = 0
    if "gram_factor" in found:
        rank, m = size("gram_factor", 0), size("gram_factor", 1)
        specs |= {"gram_factor": (("F16",), (rank, m)), "gram_remainder": (("F32",), (m,))}
        specs |= {"random_sums": (("F64",), (k, m))}
    elif "gram" in found or "random_sums" in found:
        m = size("gram", 0)
        specs |= {"gram": (("F32",), (m, m)), "random_sums": (("F64",), (k, m))}
    if m > MAX_RANDOM_FEATURES:
        raise ValueError(f"it has {m} random features, more than the {MAX_RANDOM_FEATURES} that are read.")
    evidence = {"distances": (("F64",), (len(EDGES) + 1,)), "losses": (("F64",), (len(WEIGHTS), 2))}
    return specs | {name: spec for name, spec in evidence.items() if name in found}


def _check_statistics(tensors: Mapping[str, Tensor]) -> None:
    """Refuses numbers that no unit features have. Beyond these bounds a classifier could overflow."""

    def require(holds: Tensor, message: str) -> None:
        if not holds.all():
            raise ValueError(f"{message}.")

    counts, means, rows = tensors["counts"], tensors["means"], tensors["factor_rows"]
    remainder, errors, n, d = tensors["remainder"], tensors["errors"], len(tensors["factors"]), means.shape[1]
    for name, tensor in tensors.items():
        require(tensor.isfinite(), f"{name} holds numbers that are not finite")
    whole = (counts >= 1) & (counts <= MAX_IMAGES) & (counts == counts.round())
    require(whole, f"counts must be whole numbers from 1 to {MAX_IMAGES:.0e}")
    # No scatter has more rows than dimensions: a classifier's memory grows with their square.
    fit = (rows >= 0) & (rows <= min(n, d)) & (rows < counts) & (rows.sum() == n)
    require(fit, f"factor_rows must be from 0 to {d}, below the classes' counts, and {n} together")
    require(means.norm(dim=1) <= 1 + TOLERANCE, "means must be those of features of length 1, and some are longer")
    require((errors >= 0) & (errors <= 1.01), "errors must be from 0 to 1")
    lengths = torch.linalg.vector_norm(tensors["factors"], dim=1).double()
    spread = remainder.double().sum(dim=1).index_add_(0, torch.repeat_interleave(rows), lengths.square())
    require(spread <= counts * (1 + TOLERANCE), "factors and remainder spread wider than features of length 1 can")
    for name in {"remainder", "gram_remainder", "distances", "losses"} & set(tensors):
        require(tensors[name] >= 0, f"{name} must not be below 0")
    if "distances" in tensors:
        require(tensors["distances"].sum() <= counts.sum(), "distances must be of no more images than there are")
    if "random_sums" in tensors:
        # A random feature is at most as large as its direction, whose square has d degrees of freedom.
        square, images, sums = 10.0 * d + 100.0, float(counts.sum()), tensors["random_sums"]
        possible = (sums >= 0) & (sums <= counts[:, None] * square**0.5)
        if (gram := tensors.get("gram")) is None:
            gram = tensors["gram_factor"].double().square().sum(dim=0) + tensors["gram_remainder"]
        require(gram.abs() <= images * square, f"gram must be that of {images:.0f} images, and is larger")
        require(possible, "random_sums must be from 0 to what the classes' images can sum up to")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that must hold an object."""
    _check_file(path)
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidExpertError(f"{path} cannot be read: {str(error)[:200]}.") from error
    if not isinstance(values, dict):
        raise InvalidExpertError(f"{path} holds a {type(values).__name__}, and must hold a JSON object.")
    return values


def _read_tensors(
    path: Path, make_specs: Callable[[Header, Mapping[str, str]], Specs], hint: str = ""
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """
    Reads the tensors and the metadata of a safetensors file. `make_specs` says what it must have, by what it has.
    `hint` is added to errors about names and shapes.
    """
    _check_file(path)
    try:
        with safe_open(path, framework="pt") as file:  # checks that the header describes the whole file
            metadata = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.keys()}
            found = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
            _check_specs(path, found, make_specs(found, metadata), hint)
            return {name: file.get_tensor(name).clone() for name in found}, metadata
    except (SafetensorError, OSError) as error:
        raise InvalidExpertError(f"{path} is not a whole safetensors file: {error}.") from error


def _check_specs(path: Path, found: Header, specs: Specs, hint: str) -> None:
    missing, unknown = sorted(set(specs) - set(found)), sorted(set(found) - set(specs))
    if missing or unknown:
        reason = f"must hold other tensors: missing {show(missing)}, unknown {show(unknown)}"
        raise InvalidExpertError(f"{path} {reason}.{hint}")
    for name, (dtypes, needed) in specs.items():
        dtype, shape = found[name]
        if dtype not in dtypes:
            raise InvalidExpertError(f"{path}: {name} has the dtype {dtype}, and must have {' or '.join(dtypes)}.")
        if tuple(shape) != needed:
            reason = f"{name} has the shape {show(shape)}, and must have {list(needed)}"
            raise InvalidExpertError(f"{path}: {reason}.{hint}")


def check_size(path: str, size: int) -> None:
    """Refuses a file that is too large, before it is downloaded or read."""
    most = MAX_JSON_BYTES if path.endswith(".json") else MAX_EXPERT_BYTES
    if size > most:
        raise InvalidExpertError(f"{path} has {size} bytes, more than the {most} that are read.")


def _check_file(path: Path) -> None:
    try:
        check_size(str(path), path.stat().st_size)
    except OSError as error:
        raise InvalidExpertError(f"{path} cannot be read: {error}.") from error
    # In the Hub's cache a large file is named by the digest that the Hub gave for it.
    wanted = path.resolve().name if path.is_symlink() else ""
    if re.fullmatch("[0-9a-f]{64}", wanted) and _digest(path) != wanted:
        raise InvalidExpertError(f"{path} is not the file that the Hub has. Delete it from the cache, and load again.")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
