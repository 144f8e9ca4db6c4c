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


def test_pickle_in_this_process():
    config = pickle.loads(pickle.dumps(LucaConfig(classes=["a"])))
    assert config.peft_type is PeftType.LUCA
    assert config.classes == ["a"]


def test_pickle_in_a_fresh_process():
    data = pickle.dumps(PeftType.LUCA)
    # The process knows nothing of this package until it unpickles.
    code = f"import pickle; t = pickle.loads({data!r}); from peft.utils import PeftType; assert t is PeftType.LUCA"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_foreign_luca_is_refused(monkeypatch):
    before = list(PeftType)
    monkeypatch.setattr(PeftType.LUCA, "_added_by", "another_package")
    with pytest.raises(RuntimeError, match="already has a type called LUCA that is not from peft_luca"):
        register(LucaConfig, LucaModel)
    assert list(PeftType) == before
