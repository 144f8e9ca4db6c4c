"""LUCA as a type of PEFT: registered once, pickled, and never in place of another package's."""

import pickle
import subprocess
import sys

import pytest
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftConfig, get_peft_config
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import PeftType

from peft_luca import LucaConfig, LucaModel
from peft_luca._registration import register


def test_luca_is_a_member_of_pefts_enum():
    assert PeftType("LUCA") is PeftType["LUCA"] is PeftType.LUCA
    assert PeftType.LUCA in list(PeftType)
    assert PeftType.LUCA == "LUCA"
    assert PeftType.LUCA.value == "LUCA"
    assert isinstance(PeftType.LUCA, PeftType)


def test_peft_knows_config_and_tuner():
    assert PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LUCA] is LucaConfig
    assert PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LUCA] is LucaModel
    assert PEFT_TYPE_TO_PREFIX_MAPPING[PeftType.LUCA] == "luca_"
    assert isinstance(get_peft_config({"peft_type": "LUCA", "classes": ["a"]}), LucaConfig)


def test_registering_again_changes_nothing():
    before = (list(PeftType), PeftType.LUCA, dict(PEFT_TYPE_TO_CONFIG_MAPPING))
    register(LucaConfig, LucaModel)
    assert (list(PeftType), PeftType.LUCA, dict(PEFT_TYPE_TO_CONFIG_MAPPING)) == before
    assert [member.value for member in PeftType].count("LUCA") == 1


def test_a_config_of_an_unknown_type_is_still_refused():
    with pytest.raises(ValueError, match="is not a valid PeftType"):
        PeftType("LUCAS")
    with pytest.raises((ValueError, KeyError), match="LUCAS"):
        PeftConfig.from_peft_type(peft_type="LUCAS")


def test_the_type_and_a_config_can_be_pickled():
    config = pickle.loads(pickle.dumps(LucaConfig(classes=["a"])))
    assert config.peft_type is PeftType.LUCA
    assert config.classes == ["a"]
    # By a function of this package, which a process that has not imported it imports before it looks the member up.
    restore, arguments = PeftType.LUCA.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    assert restore.__module__ == "peft_luca._registration"
    assert restore(*arguments) is pickle.loads(pickle.dumps(PeftType.LUCA)) is PeftType.LUCA


def test_a_foreign_luca_is_refused(monkeypatch):
    before = list(PeftType)
    monkeypatch.setattr(PeftType.LUCA, "_added_by", "another_package")
    with pytest.raises(RuntimeError, match="already has a type called LUCA that is not from peft_luca"):
        register(LucaConfig, LucaModel)
    assert list(PeftType) == before


def test_importing_the_package_imports_neither_pipelines_nor_evaluate():
    code = (
        "import peft_luca, sys; print({'evaluate', 'transformers.pipelines'} & set(sys.modules)); "
        "print(peft_luca.ContinualAccuracy.__name__, peft_luca.LucaPipeline.__name__); from peft_luca import *; "
        "print(all(name in globals() for name in peft_luca.__all__), hasattr(peft_luca, 'nothing'))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["set()", "ContinualAccuracy LucaPipeline", "True False"]
