"""Stand-ins for four packages that the trainer's modules import, on a machine that lacks them.

With these the trainer's own code runs where only torch and transformers are. None computes anything that is checked:

    pydantic    configurations are made, with their defaults and properties, but their values are not validated
    xxhash      tensors get other hashes, which nothing here compares with those of another process
    peft        names that are imported; there are no adapters
    numba       functions run as they are written: tensors on CPUs get the same sums, slowly
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, get_origin, get_type_hints

import numpy as np


class _Field:
    """Says what a value is if none is given."""

    def __init__(self, default: Any = None, **_: Any) -> None:
        self.default = default


class _BaseModel:
    """Takes values by name, else the defaults of the class, and makes sections of dictionaries."""

    model_config: ClassVar[Any]

    def __init__(self, **given: Any) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is ClassVar:
                continue
            default = inspect.getattr_static(type(self), name, None)
            value = given.get(name, default.default if isinstance(default, _Field) else default)
            if isinstance(value, dict) and inspect.isclass(hint) and issubclass(hint, _BaseModel):
                value = hint(**value)
            vars(self)[name] = value

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> Any:
        return cls(**values)

    def model_dump(self) -> dict[str, Any]:
        return {
            name: value.model_dump() if isinstance(value, _BaseModel) else value for name, value in vars(self).items()
        }

    def model_copy(self, *, update: dict[str, Any]) -> Any:
        return type(self)(**{**vars(self), **update})


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _xxh3(data: Any = b"") -> Any:
    return hashlib.blake2b(data, digest_size=16)


def _pydantic() -> dict[str, ModuleType]:
    names = {"BaseModel": _BaseModel, "ConfigDict": dict, "Field": _Field, "PositiveInt": int, "PositiveFloat": float}
    names |= dict.fromkeys(("AfterValidator", "AliasChoices", "BeforeValidator", "TypeAdapter"), _nothing)
    return {"pydantic": _module("pydantic", **names), "pydantic.config": _module("pydantic.config", JsonDict=dict)}


def _xxhash() -> dict[str, ModuleType]:
    return {"xxhash": _module("xxhash", xxh3_128=_xxh3, xxh3_128_hexdigest=lambda data: _xxh3(data).hexdigest())}


def _peft() -> dict[str, ModuleType]:
    class LoraLayer: ...

    tuners = _module("peft.tuners")
    peft = _module("peft", LoraConfig=None, TaskType=None, inject_adapter_in_model=None, tuners=tuners)
    return {"peft": peft, "peft.tuners": tuners, "peft.tuners.lora": _module("peft.tuners.lora", LoraLayer=LoraLayer)}


def _numba() -> dict[str, ModuleType]:
    def njit(*_: Any, **__: Any) -> Callable[..., Any]:
        def interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
            return np.errstate(over="ignore")(function)  # sums wrap around, of which numpy would warn

        return interpreted

    types = _module("numba.types", Array=_nothing, UniTuple=lambda *_: _nothing, uint16=None, uint64=None)
    return {"numba": _module("numba", njit=njit, types=types), "numba.types": types}


def _module(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module


STAND_INS: dict[str, Callable[[], dict[str, ModuleType]]] = {
    "pydantic": _pydantic,
    "xxhash": _xxhash,
    "peft": _peft,
    "numba": _numba,
}


def stand_in() -> list[str]:
    """Puts a stand-in in the place of each of these packages that is not installed; returns their names."""
    missing = [name for name in STAND_INS if name not in sys.modules and importlib.util.find_spec(name) is None]
    if "peft" in missing:
        from transformers import PreTrainedModel as PreTrainedModel  # it looks for peft now, and finds none
    for name in missing:
        sys.modules.update(STAND_INS[name]())
    if "peft" in missing:
        import trainer.adapters
        import trainer.lora
        import trainer.together

        taken = {module.LoraLayer for module in (trainer.adapters, trainer.lora, trainer.together)}
        assert taken == {sys.modules["peft.tuners.lora"].LoraLayer}
        for name in _peft():  # transformers would take it for the real one
            del sys.modules[name]
    return missing
