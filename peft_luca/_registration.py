"""Registers `LUCA` with PEFT. The only file that touches PEFT's enum of types."""

from __future__ import annotations

from typing import Any

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import PeftType, register_peft_method


NAME = "LUCA"


def _restore(name: str) -> PeftType:
    """Unpickles the member: finding this function imports the package, which adds the member."""
    return PeftType(name)


def _add_enum_member() -> None:
    """Adds `LUCA` to [`peft.PeftType`], once. It is a closed enum without a hook for methods from outside."""
    if NAME in PeftType.__members__:
        if getattr(PeftType[NAME], "_added_by", None) != __name__:
            raise RuntimeError(
                f"PEFT already has a type called {NAME} that is not from peft_luca: import only one of the packages, "
                "or upgrade peft_luca if PEFT now ships LuCA itself."
            )
        return
    member: Any = str.__new__(PeftType, NAME)
    member._name_ = member._value_ = NAME
    member._added_by = __name__
    # A bare member pickles as a call of `PeftType("LUCA")`, which fails where this package was not imported.
    member.__reduce_ex__ = lambda protocol: (_restore, (NAME,))
    PeftType._member_map_[NAME] = PeftType._value2member_map_[NAME] = member
    PeftType._member_names_.append(NAME)
    type.__setattr__(PeftType, NAME, member)
    if PeftType(NAME) is not member or PeftType[NAME] is not member or NAME not in list(PeftType):
        raise RuntimeError("PEFT's enum of types did not accept LUCA: use the versions in constraints.txt.")


def register(config_cls: type, model_cls: type) -> None:
    """Registers LuCA with PEFT, once."""
    _add_enum_member()
    if PeftType[NAME] not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name=NAME.lower(), config_cls=config_cls, model_cls=model_cls)
