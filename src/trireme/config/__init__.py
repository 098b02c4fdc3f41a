"""The configuration: `schema` (every option: type, default, meaning), `load` (reads files, environment and flags),
`checks` (rules between several keys)."""

from trireme.config.schema import CommonConfig, Config

__all__ = ["CommonConfig", "Config"]
