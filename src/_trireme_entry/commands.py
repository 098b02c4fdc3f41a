"""The entry points of the commands, which are imported after the project's own `trireme`."""

from trireme.cli.start import inference, rl, sft, trireme

__all__ = ["inference", "rl", "sft", "trireme"]
