"""`schema` (every option: type, default, meaning), `load` (files, environment, flags), `checks` (across keys)."""

from trireme.config.schema import CommonConfig, Config

__all__ = ["CommonConfig", "Config"]
