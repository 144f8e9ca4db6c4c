import json

import pytest
from conftest import make_model
from peft import PeftConfig

from peft_luca import LucaConfig
from peft_luca.config import OWN_RECIPE


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arrangement": "serial"}, r"arrangement must be one of 'adapter_calibrator'.*got 'serial'"),
        ({"norm_position": "nowhere"}, "norm_position must be one of .*got 'nowhere'"),
        ({"head": "mlp"}, "head must be one of 'cosine', 'linear', got 'mlp'"),
        ({"pooled": "mean"}, "pooled must be one of 'cls', 'any', got 'mean'"),
        ({"init_rows": "ones"}, "init_rows must be one of .*got 'ones'"),
        ({"reduction": 0}, "reduction must be a whole number of at least 1, got 0"),
        ({"reduction": None}, "reduction must be a whole number of at least 1, got None"),
        ({"reduction": 2.5}, r"reduction must be a whole number of at least 1, got 2\.5"),
        ({"adapter_width": -3}, "adapter_width must be a whole number of at least 1, got -3"),
        ({"calibrator_width": True}, "calibrator_width must be a whole number of at least 1, got True"),
        ({"scale": 0.0}, r"scale must be a finite number above 0, got 0\.0"),
        ({"scale": float("nan")}, "scale must be a finite number above 0, got nan"),
        ({"scale": float("inf")}, "scale must be a finite number above 0, got inf"),
        ({"classes": []}, "classes is empty"),
        ({"classes": "cat"}, "classes must be a list of class names, got the string 'cat'"),
        ({"classes": ["cat", "dog", "cat"]}, r"more than once: \['cat'\]"),
        ({"classes": ["cat", ""]}, "non-empty strings"),
        ({"classes": ["cat", 3]}, "non-empty strings"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS', but LucaConfig needs task_type=None"),
    ],
)
def test_a_wrong_value_is_refused_and_shown(values, message):
    with pytest.raises(ValueError, match=message):
        LucaConfig(**values)


def test_the_methods_defaults():
    config = LucaConfig()
    assert str(config.peft_type.value) == "LUCA"
    assert (config.reduction, config.arrangement, config.norm_position) == (16, "adapter_calibrator", "after_residual")
    assert config.head == "cosine"


def test_resolve_fills_only_what_was_left_unset():
    config = LucaConfig(scale=3.0, reference=False).resolve()
    assert (config.scale, config.reference) == (3.0, False)
    assert config.positive_scale is OWN_RECIPE["positive_scale"]
    assert config.init_rows == OWN_RECIPE["init_rows"]
    config.resolve({"scale": 1.0, "init_rows": "zeros"})  # nothing is left to fill
    assert (config.scale, config.init_rows) == (3.0, OWN_RECIPE["init_rows"])


def test_every_field_survives_saving(tmp_path):
    config = LucaConfig(
        classes=["café", "狗", "a b"],
        reduction=4,
        adapter_width=5,
        calibrator_width=6,
        arrangement="parallel",
        norm_position="before_residual",
        head="linear",
        scale=2.5,
        positive_scale=False,
        init_rows="zeros",
        reference=False,
        pooled="any",
        target_modules=["classifier"],
        fingerprint="abc",
    )
    config.save_pretrained(str(tmp_path))
    for loaded in (LucaConfig.from_pretrained(str(tmp_path)), PeftConfig.from_pretrained(str(tmp_path))):
        assert isinstance(loaded, LucaConfig)
        assert {**loaded.to_dict(), "inference_mode": None} == {**config.to_dict(), "inference_mode": None}


def test_allow_mismatch_is_not_saved(tmp_path):
    LucaConfig(allow_mismatch=True).save_pretrained(str(tmp_path))
    assert "allow_mismatch" not in json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert LucaConfig.from_pretrained(str(tmp_path)).allow_mismatch is False


def test_classes_are_the_experts_own_list():
    names = ["a", "b"]
    config = LucaConfig(classes=names)
    names.append("c")
    assert config.classes == ["a", "b"]
    assert LucaConfig(classes=("a", "b")).classes == ["a", "b"]


def test_without_classes_they_are_the_bases_labels(vit):
    model = make_model({"default": LucaConfig()}, base=vit)
    assert model.experts == {"default": tuple(f"base {i}" for i in range(5))}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"classes": {"cat", "dog"}}, "classes must be in an order"),
        ({"reference": "no"}, "reference must be True, False or None, got 'no'"),
        ({"positive_scale": 1}, "positive_scale must be True, False or None, got 1"),
        ({"scale": "20"}, "scale must be a finite number above 0, got '20'"),
        ({"scale": True}, "scale must be a finite number above 0, got True"),
    ],
)
def test_values_that_only_look_right_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        LucaConfig(**changes)
