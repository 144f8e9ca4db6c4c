"""Files with anything in them are loaded with finite logits, or refused; the model is then as it was."""

import json
import math
import struct
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import make_model, make_vit, pixels
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from transformers import ViTForImageClassification

from peft_luca import InvalidExpertError, load_experts, save_experts
from peft_luca.hub.saving import EXPERT_FILES


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2, 16, 10**9, 2**63, 10**40]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["LUCA", "F32", "BF16", "I64", "a", "t", "../x", "cosine", "gaussian", "parallel", "classifier"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
ROUTERS = ["gaussian", "gaussian", "gaussian", "lda", "ridge", "entropy"]
QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


class Sound(NamedTuple):
    """A sound collection of one expert."""

    place: Path
    files: dict[str, bytes]
    base: ViTForImageClassification

    def __repr__(self):
        return "Sound()"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz")
    model = make_model({"t": ["a", "b"]})
    features = torch.randn(30, 32, generator=torch.Generator().manual_seed(0))
    model.collect_statistics("t", features, torch.arange(30) % 2, rank=8, random_features=8)
    model.set_router("gaussian", temperature=2.0)
    save_experts(model, place)
    files = ["experts.json", *(f"t/{file}" for file in EXPERT_FILES)]
    return Sound(place, {file: (place / file).read_bytes() for file in files}, make_vit())


def spoil_json(data, values):
    """One or two places of a JSON object are changed, added or removed."""
    values = json.loads(json.dumps(values))
    for _ in range(data.draw(st.integers(1, 2))):
        keys = sorted(values)
        key = data.draw(st.one_of(st.sampled_from(keys), st.text(max_size=8))) if keys else data.draw(st.text())
        if isinstance(values.get(key), dict) and values[key] and data.draw(st.booleans()):
            inner = data.draw(st.sampled_from(sorted(values[key])))
            values[key] = {**values[key], inner: data.draw(VALUES)}
        elif data.draw(st.integers(0, 5)) == 0:
            values.pop(key, None)
        else:
            values[key] = data.draw(VALUES)
    return json.dumps(values).encode()


def spoil_bytes(data, content):
    place = data.draw(st.integers(0, len(content)))
    length = data.draw(st.sampled_from([0, 1, 8, 100, len(content)]))
    return content[:place] + data.draw(st.binary(max_size=16)) + content[place + length :]


def spoil_header(data, content):
    length = int.from_bytes(content[:8], "little")
    header = spoil_json(data, json.loads(content[8 : 8 + length]))
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def spoil_numbers(data, content):
    """Some numbers of one tensor are changed."""
    tensors, length = load(content), int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    numbers = tensors[data.draw(st.sampled_from(sorted(tensors)))].view(-1)
    which = data.draw(st.sampled_from([slice(None), slice(0, 1), slice(-1, None), slice(0, None, 2)]))
    if data.draw(st.booleans()):
        factor = data.draw(st.sampled_from([-1, 0, 2, 1e-3, 1e-20, 1e-40, 1e3, 1e6, 1e30]))
        numbers[which] = (numbers[which] * factor).to(numbers.dtype)
    else:
        number = data.draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1e-45, 1e9, 1e38, math.nan, math.inf]))
        numbers[which] = number if numbers.is_floating_point() else data.draw(st.integers(-(2**63), 2**63 - 1))
    return save(tensors, metadata)


def spoil(data, file, content):
    if data.draw(st.integers(0, 3)) == 0:
        return spoil_bytes(data, content)
    if file.endswith(".json"):
        return spoil_json(data, json.loads(content))
    return (spoil_numbers if data.draw(st.booleans()) else spoil_header)(data, content)


def check_one(sound, data):
    place, files, base = sound
    file = data.draw(st.sampled_from(sorted(files)))
    try:
        (place / file).write_bytes(spoil(data, file, files[file]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = load_experts(base, place)
        try:
            with torch.no_grad():
                if model.router is None or model.router.name != "oracle":
                    assert torch.isfinite(model(pixels(1)).logits).all()
            model.set_router(data.draw(st.sampled_from(ROUTERS)))
            answer = model.route(pixels(1))
            assert torch.isfinite(answer.logits).all()
            assert 0 <= float(answer.confidence) <= 1.0001
        finally:
            model.unload()
    except InvalidExpertError:
        pass
    except ValueError as error:
        if "was trained on the backbone" not in str(error):  # as a sound expert of another backbone is refused
            raise
    finally:
        (place / file).write_bytes(files[file])
    assert not [name for name, _ in base.named_modules() if "luca" in name]
    found = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    assert found == sorted(files)


@settings(max_examples=100, derandomize=True, **QUIET)
@given(data=st.data())
def test_a_hundred_files(sound, data):
    check_one(sound, data)


@pytest.mark.slow
@settings(max_examples=10_000, **QUIET)
@given(data=st.data())
def test_ten_thousand_files(sound, data):
    check_one(sound, data)
