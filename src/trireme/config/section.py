"""The base class of all sections of the configuration, and types of values that sections share."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
NAMES_CODE: Final[JsonDict] = {"names_code": True}
"""Marks a key with values that can make code run: see `trireme.config.trust`."""
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all sections. Unknown keys are errors, numbers are finite, values never change, and the string below a
    key describes the key."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        validate_default=True,
        use_attribute_docstrings=True,
    )
