"""Turns chat messages into tokens and back: `conversation.py` defines the interface of a renderer, `make_renderer`
makes a renderer.

The names in docs/api.md are stable.
"""

from trireme.renderers.conversation import Message, Renderer, ToolCall, ToolSpec, TrainOn
from trireme.renderers.table import make_renderer, unknown_renderer

__all__ = ["Message", "Renderer", "ToolCall", "ToolSpec", "TrainOn", "make_renderer", "unknown_renderer"]
