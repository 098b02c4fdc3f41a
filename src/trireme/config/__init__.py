"""`schema` (every option: type, default, meaning), `load` (files, environment, flags), `checks` (across keys)."""

from trireme.config.schema import Config

__all__ = ["Config"]
