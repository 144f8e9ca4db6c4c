"""LucaConfig: wrong values are refused, and every config comes back from its file, those of 0.1 included."""

import json
import tempfile
import warnings

import pytest
from helpers import make_model, make_vit
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file

from peft_luca import InvalidExpertError, LucaConfig
from peft_luca.tuner.config import ARRANGEMENTS, NORM_POSITIONS, OWN_RECIPE, POOLED, ROW_INITS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arrangement": "serial"}, r"arrangement must be one of 'adapter_calibrator'.*got 'serial'"),
        ({"init_rows": ["zeros"]}, r"init_rows must be one of .*got \['zeros'\]"),
        ({"pooled": None}, "pooled must be one of 'cls', 'any', got None"),
        ({"reference": "no"}, "reference must be one of True, False, got 'no'"),
        ({"positive_scale": 1}, "positive_scale must be one of True, False, got 1"),
        ({"reduction": 0}, "reduction must be a whole number of at least 1, got 0"),
        ({"reduction": None}, "reduction must be a whole number of at least 1, got None"),
        ({"adapter_width": 2.5}, r"adapter_width must be a whole number of at least 1, got 2\.5"),
        ({"calibrator_width": True}, "calibrator_width must be a whole number of at least 1, got True"),
        ({"scale": 0.0}, r"scale must be a finite number above 0, got 0\.0"),
        ({"scale": float("nan")}, "scale must be a finite number above 0, got nan"),
        ({"scale": float("inf")}, "scale must be a finite number above 0, got inf"),
        ({"scale": "20"}, "scale must be a finite number above 0, got '20'"),
        ({"scale": True}, "scale must be a finite number above 0, got True"),
        ({"white_level": -1}, "white_level must be a finite number above 0, got -1"),
        ({"background": "snow white"}, "unknown color specifier: 'snow white'"),
        ({"background": "#00000000"}, "background must be the name of a colour, such as 'white', got '#00000000'"),
        ({"background": 3}, "background must be the name of a colour, such as 'white', got 3"),
        ({"classes": []}, "classes is empty"),
        ({"classes": "cat"}, "classes must be a list of class names, got the string 'cat'"),
        ({"backbone_settings": "gelu"}, "backbone_settings must be a dict, got 'gelu'"),
        ({"processor": [0.5]}, r"processor must be a dict, got \[0\.5\]"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS', but LucaConfig needs task_type=None"),
    ],
)
def test_a_wrong_value_is_refused_and_shown(values, message):
    with pytest.raises(ValueError, match=message):
        LucaConfig(**values)


def test_resolve_fills_only_what_is_none_and_template_takes_it_out_again():
    config = LucaConfig(scale=3.0, reference=False, fingerprint="abc", inference_mode=True).resolve()
    assert (config.scale, config.reference) == (3.0, False)
    assert config.positive_scale is OWN_RECIPE["positive_scale"]
    assert config.init_rows == OWN_RECIPE["init_rows"]
    config.resolve({"scale": 1.0, "init_rows": "zeros"})  # nothing is left to fill
    assert (config.scale, config.init_rows) == (3.0, OWN_RECIPE["init_rows"])
    template = config.template()
    assert (template.scale, template.reference, template.positive_scale, template.init_rows) == (
        3.0,
        False,
        None,
        None,
    )
    assert (template.fingerprint, template.inference_mode) == (None, False)
    assert LucaConfig().resolve({"scale": 1.0}).positive_scale is None


def test_classes_are_the_experts_own_list():
    names = ["a", "b"]
    config = LucaConfig(classes=names)
    names.append("c")
    assert config.classes == ["a", "b"]
    assert LucaConfig(classes=("a", "b")).classes == ["a", "b"]


def test_allow_mismatch_is_not_saved(tmp_path):
    LucaConfig(allow_mismatch=True).save_pretrained(str(tmp_path))
    assert "allow_mismatch" not in json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert LucaConfig.from_pretrained(str(tmp_path)).allow_mismatch is False


@settings(max_examples=50, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "classes": st.lists(st.text("aBé狗-1 ", min_size=1).filter(str.strip), min_size=1, unique=True),
            "reduction": st.integers(1, 99),
            "adapter_width": st.none() | st.integers(1, 99),
            "calibrator_width": st.none() | st.integers(1, 99),
            "arrangement": st.sampled_from(ARRANGEMENTS),
            "norm_position": st.sampled_from(NORM_POSITIONS),
            "scale": st.none() | st.floats(1e-6, 1e6),
            "positive_scale": st.none() | st.booleans(),
            "init_rows": st.sampled_from([None, *ROW_INITS]),
            "reference": st.none() | st.booleans(),
            "pooled": st.sampled_from(POOLED),
            "target_modules": st.none() | st.just(["classifier"]),
            "fingerprint": st.none() | st.just("abc"),
            "backbone_settings": st.none() | st.just({"hidden_act": "gelu", "norm_eps": [1e-12]}),
            "processor": st.none() | st.just({"do_resize": True, "size": {"height": 16, "width": 16}}),
        },
    )
)
def test_every_field_comes_back_from_its_file(values):
    config = LucaConfig(**values)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for read in (LucaConfig, PeftConfig):
            back = read.from_pretrained(folder)
            assert isinstance(back, LucaConfig)
            assert back.to_dict() == {**config.to_dict(), "inference_mode": back.inference_mode}
            assert {name: getattr(back, name) for name in values} == values
    template = config.resolve().template()
    assert {name: getattr(template, name) for name in values} == {
        **values,
        **dict.fromkeys({"fingerprint", "backbone_settings", "processor"} & {*values}),
    }


JUNK = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3) | st.lists(st.text())


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted({*LucaConfig.__annotations__} - {"head"})), JUNK, max_size=3))
def test_whatever_is_wrong_is_a_value_error(values):
    try:
        config = LucaConfig(**values)
    except ValueError:
        return
    assert config.reduction >= 1
    assert config.scale is None or 0 < config.scale < float("inf")
    assert config.classes is None or all(isinstance(name, str) and name.strip() for name in config.classes)
    assert config.arrangement in ARRANGEMENTS
    assert config.init_rows in (None, *ROW_INITS)


@pytest.fixture
def of_version_0_1(tmp_path):
    """An expert's folder as peft_luca 0.1 wrote it: its config says which head it has."""
    make_model({"default": ["a", "b"]}).save_pretrained(str(tmp_path))
    path = tmp_path / "adapter_config.json"

    def folder(head):
        path.write_text(json.dumps({**json.loads(path.read_text()), "head": head}), encoding="utf-8")
        return str(tmp_path)

    return folder


def test_a_cosine_expert_of_version_0_1_is_read(of_version_0_1):
    folder = of_version_0_1("cosine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for read in (LucaConfig, PeftConfig):
            assert "head" not in read.from_pretrained(folder).to_dict()
    loaded = PeftModel.from_pretrained(make_vit(), folder)
    rows = load_file(f"{folder}/adapter_model.safetensors")["base_model.model.classifier.luca_class_rows"]
    assert loaded.base_model.layer.luca_class_rows["default"].equal(rows)


def test_a_linear_expert_of_version_0_1_is_refused_with_what_to_do(of_version_0_1):
    folder = of_version_0_1("linear")
    base = make_vit()
    for read in (
        lambda: LucaConfig.from_pretrained(folder),
        lambda: PeftConfig.from_pretrained(folder),
        lambda: PeftModel.from_pretrained(base, folder),
        lambda: LucaConfig(head="linear"),
    ):
        with pytest.raises(InvalidExpertError, match=r"head='linear'.*Train it again .* use it with peft-luca 0\.1"):
            read()
    assert not [name for name, _ in base.named_modules() if "luca" in name]
