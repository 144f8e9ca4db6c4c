import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from helpers import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftConfig
from transformers import TrainingArguments

from peft_luca import ContinualTrainingArguments, LucaConfig
from peft_luca.hub.validation import read_config
from peft_luca.training.run_folder import run_settings
from peft_luca.tuner.config import ARRANGEMENTS, HEADS, NORM_POSITIONS, OWN_RECIPE, ROW_INITS
from peft_luca.utils import InvalidExpertError


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


@settings(max_examples=100, deadline=None)
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
            "head": st.sampled_from(HEADS),
            "scale": st.none() | st.floats(1e-6, 1e6),
            "positive_scale": st.none() | st.booleans(),
            "init_rows": st.sampled_from([None, *ROW_INITS]),
            "reference": st.none() | st.booleans(),
        },
    )
)
def test_whatever_is_accepted_comes_back_from_its_file(values):
    config = LucaConfig(**values)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        back = PeftConfig.from_pretrained(folder)
        assert read_config_of_a_stranger(folder, config).to_dict() == back.to_dict()
    assert back.to_dict() == config.to_dict() | {"inference_mode": back.inference_mode}
    template = config.resolve().template()
    assert {name: getattr(template, name) for name in values} == values


def read_config_of_a_stranger(folder, config):
    """A config without classes is not an expert's, and refused as such."""
    if config.classes is None:
        with pytest.raises(InvalidExpertError, match="classes"):
            read_config(Path(folder))
        return PeftConfig.from_pretrained(folder)
    return read_config(Path(folder))


JUNK = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3) | st.lists(st.text())


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(LucaConfig.__annotations__)), JUNK, max_size=3))
def test_whatever_is_wrong_is_a_value_error(values):
    try:
        config = LucaConfig(**values)
    except ValueError:
        config = LucaConfig()
    assert config.reduction >= 1
    assert config.scale is None or 0 < config.scale < float("inf")
    assert config.classes is None or all(isinstance(name, str) and name.strip() for name in config.classes)
    assert config.arrangement in ARRANGEMENTS
    assert config.head in HEADS


OWN_ARGUMENTS = sorted(set(ContinualTrainingArguments.__annotations__) - set(TrainingArguments.__annotations__))
NUMBERS = ["per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "learning_rate"]


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(OWN_ARGUMENTS + NUMBERS), JUNK, max_size=3))
def test_whatever_is_wrong_with_the_arguments_is_a_value_error(values):
    fixed = {"report_to": "none", "use_cpu": True}
    try:
        args = ContinualTrainingArguments("out", **fixed, **values)
    except ValueError:
        return
    for name in ("statistics", "plots", "l1_proximal", "class_mean_rows", "cache_features", "augmentation"):
        assert isinstance(getattr(args, name), bool)
    assert args.per_device_train_batch_size >= 1
    assert args.per_device_eval_batch_size >= 1
    assert 0 <= args.num_train_epochs < float("inf")
    assert 0 <= args.l1_weight < float("inf")
    assert args.recipe in ("own", "paper")
    assert args.negatives in ("own", "seen")
    assert args.statistics_rank >= -1
    assert args.augmented_views >= 0


@pytest.mark.parametrize("value", ["False", "no", 0, []])
def test_a_switch_is_true_or_false(value):
    with pytest.raises(ValueError, match="statistics must be True or False, got"):
        ContinualTrainingArguments("out", statistics=value)


def test_numbers_of_numpys_are_arguments():
    args = ContinualTrainingArguments("out", per_device_train_batch_size=np.int64(4), learning_rate=np.float32(0.5))
    assert (args.per_device_train_batch_size, args.learning_rate) == (4, 0.5)
    json.dumps(run_settings(args, LucaConfig()))  # as the run's file has them


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("augmented_views", True, "must be a whole number"),
        ("per_device_train_batch_size", True, "must be a whole number"),
        ("num_train_epochs", True, "must be a number"),
        ("gradient_accumulation_steps", "4", "must be a whole number"),
        ("gradient_accumulation_steps", 2.5, "must be a whole number"),
        ("max_steps", "5", "must be a whole number"),
        ("learning_rate", float("nan"), "must be a finite number"),
        ("learning_rate", -1.0, "must be a finite number"),
    ],
)
def test_arguments_of_another_kind_are_refused(name, value, message):
    with pytest.raises(ValueError, match=f"{name} {message}"):
        ContinualTrainingArguments("out", **{name: value})
