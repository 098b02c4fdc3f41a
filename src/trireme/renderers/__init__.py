"""Between chat messages and tokens: `types.py` says what a renderer is, `make_renderer` makes one."""

from trireme.renderers.table import RendererName, make_renderer
from trireme.renderers.types import Message, Renderer, ToolCall, ToolSpec, TrainOn

__all__ = ["Message", "Renderer", "RendererName", "ToolCall", "ToolSpec", "TrainOn", "make_renderer"]
