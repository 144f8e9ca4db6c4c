"""Files that strangers wrote are loaded, or refused in words before anything is made of them."""

import json
import math
import os
import pickle
import resource
import struct

import pytest
import torch
from helpers import make_dinov2, make_model, make_vit
from hub_models import assert_refused, change_json, with_statistics
from safetensors.torch import load_file, save_file

from peft_luca import InvalidExpertError, LucaConfig, load_expert, load_experts, save_expert, save_experts
from peft_luca.hub.validation import MAX_JSON_BYTES, expert_shapes, read_statistics


ROWS = "base_model.model.classifier.luca_class_rows"


@pytest.fixture
def folder(tmp_path):
    """A sound collection, to be spoilt."""
    save_experts(make_model({"t": ["a", "b"], "w": ["c"]}), tmp_path / "all")
    return tmp_path / "all"


def assert_folder_refused(source, message, load=load_experts):
    """No model was changed, and no file written."""
    files = {path: path.lstat().st_mtime_ns for path in source.parent.rglob("*")}
    assert_refused(lambda model: load(model, source), message, InvalidExpertError)
    assert {path: path.lstat().st_mtime_ns for path in source.parent.rglob("*")} == files


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB


# ---- configs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trust_remote_code": True}, r"has the keys \['trust_remote_code'\], which this version .* does not know"),
        ({"allow_mismatch": True}, r"has the keys \['allow_mismatch'\]"),
        ({"peft_type": ["LORA"]}, r"holds an adapter of type \['LORA'\], not a LuCA expert"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS', but LucaConfig needs task_type=None"),
        ({"classes": None}, "names no classes"),
        ({"classes": "ab"}, "classes must be a list of class names, got the string 'ab'"),
        ({"classes": ["a", "a"]}, "each class may be named once"),
        ({"classes": ["a", "b\n"]}, r"no control characters, got 'b\\n'"),
        ({"reduction": 10**9}, r"reduction is 1000000000, but \[CLS\] is only 32 wide"),
        ({"adapter_width": -1}, "adapter_width must be a whole number of at least 1, got -1"),
        ({"adapter_width": 10**9}, "asks for more than 1073741824 bytes of weights"),
        ({"calibrator_width": 10**400}, "asks for more than 1073741824 bytes of weights"),
        (
            {"adapter_width": 1000},
            r"has the shape \[2, 32\], and must have \[1000, 32\]. \[CLS\] of this",
        ),
        ({"scale": 10**400}, "int too large|finite number"),
        ({"arrangement": None}, "arrangement must be one of"),
        ({"target_modules": ["vit"]}, "the head 'vit'|exactly one head"),
        ({"target_modules": [3]}, "exactly one head"),
        ({"target_modules": True}, "target_modules must be a string or null, got True"),
        ({"fingerprint": "../../x"}, "fingerprint must be a SHA-256 digest"),
        ({"fingerprint": ["a"]}, r"fingerprint must be a string or null, got \['a'\]"),
        ({"base_model_name_or_path": {"a": 1}}, "base_model_name_or_path must be a string or null"),
    ],
)
def test_a_config(folder, changes, message):
    change_json(folder / "w" / "adapter_config.json", **changes)
    assert_folder_refused(folder, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "adapter_config.json cannot be read: Expecting value"),
        (b"\xff\xfe", "cannot be read: "),
        (b"[]", "holds a list, and must hold a JSON object"),
        (b'{"a": ' * 100_000, "cannot be read"),
        (b'{"reduction": ' + b"9" * 10_000 + b"}", "cannot be read: Exceeds the limit"),
        (b'{"classes": ["\\ud800"], "peft_type": "LUCA"}', "no control characters"),
    ],
)
def test_a_config_that_is_no_json(folder, content, message):
    (folder / "w" / "adapter_config.json").write_bytes(content)
    assert_folder_refused(folder, message)


@pytest.mark.parametrize("path", ["experts.json", "w/adapter_config.json", "w/adapter_model.safetensors"])
def test_an_enormous_file_is_not_read(folder, path):
    os.truncate(folder / path, 2**38)  # sparse
    before = memory()
    most = MAX_JSON_BYTES if path.endswith("json") else 2**30
    assert_folder_refused(folder, f"has 274877906944 bytes, more than the {most} that are read")
    assert memory() - before < 300_000


def test_a_link_out_of_a_folder_reveals_nothing(folder, tmp_path):
    (tmp_path / "secret").write_text("password", encoding="utf-8")
    (folder / "w" / "adapter_config.json").unlink()
    (folder / "w" / "adapter_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidExpertError) as caught:
        load_experts(make_vit(), folder)
    assert "password" not in str(caught.value)


# ---- manifests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "1"}, "has the format '1', and this version reads 1"),
        ({"experts": "w"}, "needs 'experts', a list of at least one expert, got 'w'"),
        ({"experts": ["w"]}, "needs 'experts', a list of at least one expert"),
        ({"experts": []}, "needs 'experts', a list of at least one expert"),
        ({"experts": [{"name": 3}]}, "names an expert 3"),
        ({"experts": [{"name": "../w"}]}, r"names an expert '\.\./w'"),
        ({"experts": [{"name": "w\n"}]}, r"names an expert 'w\\n'"),
        ({"experts": [{"name": "."}]}, r"names an expert '\.'"),
        ({"experts": [{"name": "w" * 10**6}]}, "names an expert 'www"),
        ({"experts": [{"name": "w"}, {"name": "W"}]}, "names an expert more than once"),
        ({"experts": [{"name": "gone"}]}, "has no adapter_config.json"),
        ({"router": 3}, "asks for the router 3: "),
        ({"router": {"name": "entropy"}}, "asks for the router .*options"),
        ({"router": {"name": ["x"], "options": {}}}, "a router is a name, a Router or a function of scores"),
        ({"router": {"name": "guess", "options": {}}}, "there is no router 'guess'"),
        ({"router": {"name": "entropy", "options": {"temperature": [1]}}}, "temperature must be a number from"),
        ({"router": {"name": "entropy", "options": {"temperature": 1e-30}}}, "temperature must be a number from"),
        ({"router": {"name": "entropy", "options": {"router": 1}}}, "multiple values"),
        ({"router": {"name": "gaussian", "options": {"volume": 10**400}}}, "volume|int too large"),
        ({"router": {"name": "entropy", "options": {"nothing": 1}}}, "got nothing.*load_expert.model, source, 't'."),
    ],
)
def test_a_manifest(folder, changes, message):
    change_json(folder / "experts.json", **changes)
    assert_folder_refused(folder, message)


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.fill_(math.nan), "luca_class_rows holds numbers that are not finite, or above 10000"),
        (lambda t: t.fill_(-1e19), "luca_class_rows holds numbers that are not finite, or above 10000"),
        (lambda t: t.to(torch.int32), "luca_class_rows has the dtype I32, and must have F64 or F32 or F16 or BF16"),
        (lambda t: t.T.contiguous(), r"luca_class_rows has the shape \[32, 1\], and must have \[1, 32\]"),
        (lambda t: t.reshape(-1), r"luca_class_rows has the shape \[32\]"),
    ],
)
def test_a_tensor(folder, change, message):
    path = folder / "w" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, ROWS: change(tensors[ROWS])}, path)
    assert_folder_refused(folder, message)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-30])
def test_deviations_must_be_well_above_0(folder, value):
    path = folder / "w" / "adapter_model.safetensors"
    name = ROWS.replace("class_rows", "reference_std")
    save_file({**load_file(path), name: torch.full((32,), value)}, path)
    assert_folder_refused(folder, "luca_reference_std holds deviations below 1e-06")


def test_half_precision_and_doubles_are_read(folder):
    path = folder / "w" / "adapter_model.safetensors"
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        tensors = load_file(path)
        save_file({**tensors, ROWS: tensors[ROWS].to(dtype)}, path)
        assert load_experts(make_vit(), folder).base_model.layer.luca_class_rows["w"].dtype == torch.float32


def test_tensors_that_are_missing_or_unknown(folder):
    path = folder / "w" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "base_model.model.vit.layernorm.weight": torch.zeros(32)}, path)
    assert_folder_refused(folder, r"unknown \['base_model.model.vit.layernorm.weight'\]")
    del tensors[ROWS]
    save_file(tensors, path)
    assert_folder_refused(folder, rf"missing \['{ROWS}'\], unknown \[\]")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda header, data: b"",
        lambda header, data: struct.pack("<Q", 2**63) + b"{}" + data,
        lambda header, data: join(b"[" * 3000, data),
        lambda header, data: join({**header, ROWS: {**header[ROWS], "shape": [2**62, 32]}}, data),
        lambda header, data: join({**header, ROWS: {**header[ROWS], "data_offsets": [0, 128]}}, data),
        lambda header, data: join(header, data + b"\0" * 64),
        lambda header, data: join(header, data[:-4]),
        lambda header, data: pickle.dumps({"a": 1}) + data,
    ],
)
def test_weights_that_are_no_whole_safetensors_file(folder, spoil):
    path = folder / "w" / "adapter_model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes(spoil(json.loads(content[8 : 8 + length]), content[8 + length :]))
    assert_folder_refused(folder, "adapter_model.safetensors is not a whole safetensors file")


def join(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_pickle_is_never_read(folder, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    (folder / "w" / "adapter_model.safetensors").unlink()
    for name in ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin"):
        (folder / "w" / name).write_bytes(pickle.dumps(Bomb()))
    assert_folder_refused(folder, "adapter_model.safetensors cannot be read")
    assert_folder_refused(folder / "w", "adapter_model.safetensors cannot be read", load_expert)
    assert not (tmp_path / "exploded").exists()


def test_weights_of_another_width(folder):
    save_expert(make_model({"t": ["a"]}, base=make_dinov2()), "t", folder / "dino")
    base = make_vit(hidden_size=64)
    message = (
        r"has the shape .*\. \[CLS\] of this backbone is 64 wide; the expert was trained on 'an unnamed backbone'"
    )
    for source in (folder, folder / "dino"):
        assert_refused(lambda model, source=source: load_experts(model, source), message, models=[base])


@pytest.mark.parametrize("arrangement", ["adapter_calibrator", "parallel", "adapter", "calibrator"])
def test_the_expected_shapes_are_those_that_are_saved(tmp_path, arrangement):
    config = LucaConfig(classes=["a", "b", "c"], arrangement=arrangement, adapter_width=3, reduction=4)
    save_expert(make_model({"t": config}), "t", tmp_path)
    saved = {key: tuple(tensor.shape) for key, tensor in load_file(tmp_path / "adapter_model.safetensors").items()}
    expected = expert_shapes(config, 32)
    assert saved == {f"base_model.model.classifier.{name}": shape for name, shape in expected.items()}


# ---- statistics ----------------------------------------------------------------------------------------------------


@pytest.fixture
def statistics(tmp_path):
    """Sound statistics of 40 images of two classes, and a function that writes them with some of it changed."""
    model = with_statistics({"t": ["a", "b"]}, rank=4, random_features=6)
    save_expert(model, "t", tmp_path)
    path = tmp_path / "statistics.safetensors"
    tensors, about = load_file(path), {"format": 1, "classes": ["a", "b"]}

    def spoil(about=about, **changes):
        metadata = about if about is None else {"statistics": about if isinstance(about, str) else json.dumps(about)}
        changed = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, path, metadata)
        return tmp_path

    return model.statistics["t"], tensors, spoil


def assert_statistics_refused(folder, message):
    with pytest.raises(InvalidExpertError, match=message) as caught:
        read_statistics(folder)
    assert "statistics.safetensors" in str(caught.value)
    assert str(caught.value).endswith("or load without it: statistics=False.")


def test_statistics_come_back(statistics, tmp_path):
    saved, _, _ = statistics
    read = read_statistics(tmp_path)
    assert read.classes == saved.classes
    for name in ("counts", "means", "remainder", "errors", "gram", "random_sums", "distances", "losses"):
        assert torch.equal(getattr(read, name), getattr(saved, name)), name
    assert all(map(torch.equal, read.factors, saved.factors))
    size = sum(tensor.nbytes for tensor in saved.tensors().values())
    assert size == pytest.approx((tmp_path / "statistics.safetensors").stat().st_size, abs=1200)


@pytest.mark.parametrize(
    "name", ["counts", "means", "factors", "remainder", "errors", "factor_rows", "gram", "random_sums"]
)
def test_tensors_of_statistics(statistics, name):
    _, tensors, spoil = statistics
    tensor = tensors[name]
    wrong = torch.int32 if tensor.dtype == torch.int64 else torch.float16
    for broken, message in (
        (tensor[:-1], "has the shape|and 7 together"),
        (tensor.to(wrong), rf"{name} has the dtype [IF]\d+, and must have [IF]\d+"),
        (tensor[..., None], f"{name} has the shape"),
        (None, rf"missing \['{name}'\]|its (means|gram) has the shape \[\]"),
    ):
        assert_statistics_refused(spoil(**{name: broken}), message)
    if tensor.is_floating_point():
        for number in (math.nan, math.inf):
            message = f"{name} holds numbers that are not finite"
            assert_statistics_refused(spoil(**{name: tensor.clone().fill_(number)}), message)


@pytest.mark.parametrize("name", ["distances", "losses"])
def test_evidence_may_lack_and_must_be_whole(statistics, name):
    _, tensors, spoil = statistics
    assert getattr(read_statistics(spoil(**{name: None})), name) is None
    assert_statistics_refused(spoil(**{name: tensors[name][1:]}), f"{name} has the shape")
    assert_statistics_refused(spoil(**{name: tensors[name].float()}), f"{name} has the dtype F32")
    assert_statistics_refused(spoil(**{name: tensors[name] * torch.nan}), f"{name} holds numbers that are not finite")
    assert_statistics_refused(spoil(**{name: tensors[name] - 1e3}), f"{name} must not be below 0")


def test_a_gram_matrix_in_a_few_rows_comes_back_and_is_checked(statistics):
    saved, _, spoil = statistics
    short = saved.compress_gram(3)
    given = {"gram": None, "gram_factor": short.gram_factor, "gram_remainder": short.gram_remainder}
    read = read_statistics(spoil(**given))
    assert read.gram is None
    assert torch.equal(read.random_gram, short.random_gram)
    for name, change, message in (
        ("gram_factor", lambda t: t.float(), "gram_factor has the dtype F32"),
        ("gram_factor", lambda t: t[:, 1:], "gram_remainder has the shape"),
        ("gram_factor", lambda t: t.new_zeros(1, 20000), "20000 random features, more than the 16384"),
        ("gram_factor", lambda t: t * 100 + 1000, "gram must be that of 40 images"),
        ("gram_remainder", lambda t: t[1:], "gram_remainder has the shape"),
        ("gram_remainder", lambda t: t - 1e6, "gram_remainder must not be below 0"),
        ("random_sums", lambda t: None, "missing .'random_sums'."),
    ):
        tensor = given.get(name, saved.random_sums)
        assert_statistics_refused(spoil(**given | {name: change(tensor)}), message)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("distances", lambda t: t + 1e3, "distances must be of no more images than there are"),
        ("counts", lambda t: t * 0, "counts must be whole numbers from 1 to 1e"),
        ("counts", lambda t: t + 0.5, "counts must be whole numbers from 1 to 1e"),
        ("counts", lambda t: t * 1e13, "counts must be whole numbers from 1 to 1e"),
        (
            "factor_rows",
            lambda t: t - 5,
            "factor_rows must be from 0 to 32, .*, and 8 together",
        ),
        ("factor_rows", lambda t: t + torch.tensor([1, 0]), "factor_rows must be from 0"),
        ("factor_rows", lambda t: t + 2**62, "factor_rows must be from 0"),
        ("means", lambda t: t * 20, "means must be those of features of length 1"),
        ("factors", lambda t: t * 1e3, "spread wider than features of length 1 can"),
        ("remainder", lambda t: t + 1e30, "spread wider than features of length 1 can"),
        ("remainder", lambda t: t - 1, "remainder must not be below 0"),
        ("errors", lambda t: t - 1, "errors must be from 0 to 1"),
        ("errors", lambda t: t + 2, "errors must be from 0 to 1"),
        ("gram", lambda t: t * 1e6, "gram must be that of 40 images"),
        ("random_sums", lambda t: -t - 1, "random_sums must be from 0"),
        ("random_sums", lambda t: t * 1e6, "random_sums must be from 0"),
    ],
)
def test_numbers_of_statistics(statistics, name, change, message):
    _, tensors, spoil = statistics
    assert_statistics_refused(spoil(**{name: change(tensors[name])}), message)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (None, "its metadata needs 'statistics' with the format 1, got None"),
        ("not json", "statistics.safetensors: Expecting value"),
        ("[" * 100_000, "recursion"),
        ({"format": 99, "classes": ["a", "b"]}, r"with the format 1, got \{'format': 99"),
        ({"format": 1}, "classes must be a list of class names, got None"),
        ({"format": 1, "classes": ["a", "\x1b[31m"]}, "no control characters"),
        ({"format": 1, "classes": ["a"]}, r"counts has the shape \[2\], and must have \[1\]"),
    ],
)
def test_metadata_of_statistics(statistics, about, message):
    assert_statistics_refused(statistics[2](about), message)


def test_statistics_of_no_dimensions_or_more_rows_than_there_are_dimensions(statistics):
    """Of which a classifier would need memory by their square, or, of no dimensions, any number in no bytes."""
    _, tensors, spoil = statistics
    counts, rows = torch.tensor([100, 9]).double(), torch.tensor([33, 0])
    message = "factor_rows must be from 0 to 32, below the classes' counts"
    assert_statistics_refused(spoil(counts=counts, factor_rows=rows, factors=torch.zeros(33, 32)), message)
    nothing = {"means": tensors["means"][:, :0], "remainder": tensors["remainder"][:, :0]}
    factors = torch.zeros(10**9, 0)
    assert_statistics_refused(spoil(factors=factors, **nothing), r"its means has the shape \[2, 0\]")


def test_statistics_that_their_header_does_not_fill_are_not_read(statistics):
    folder = statistics[2]()
    os.truncate(folder / "statistics.safetensors", 2**30)  # sparse
    before = memory()
    assert_statistics_refused(folder, "is not a whole safetensors file")
    assert memory() - before < 100_000
    (folder / "statistics.safetensors").unlink()
    assert_statistics_refused(folder, "cannot be read")
