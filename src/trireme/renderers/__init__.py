"""Turns chat messages into tokens and back: `types.py` defines a renderer, `make_renderer` makes one.

The names in docs/api.md are stable.
"""

from trireme.renderers.conversation import Message, Renderer, ToolCall, ToolSpec, TrainOn
from trireme.renderers.table import make_renderer, unknown_renderer

__all__ = ["Message", "Renderer", "ToolCall", "ToolSpec", "TrainOn", "make_renderer", "unknown_renderer"]
