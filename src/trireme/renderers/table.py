"""Finds renderers by name. Each module in `kinds` is a renderer with the module's name; there is no other list."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from trireme.core.errors import BadInput
from trireme.core.tokenizer import Tokenizer
from trireme.renderers import external, kinds
from trireme.renderers.conversation import Renderer
from trireme.renderers.text_renderer import PROBE, PROBE_TOOL

_log = logging.getLogger(__name__)


def make_renderer(
    name: str,
    tokenizer: Tokenizer,
    *,
    strip_thinking_from_history: bool = True,
    enable_thinking: bool | None = None,
) -> Renderer:
    """Returns the renderer `name` for a `transformers` tokenizer.

    If `name` is auto, takes the first of these three that exists: the renderer in `kinds` that writes the same text as
    the tokenizer's chat template; a format of the third-party package `renderers` that suits the model
    (`external.suitable`); the template itself. If the tokenizer has no template, takes the format that this package
    lists under the model's name, or else role_colon.

    `strip_thinking_from_history` True: if the format supports it, prompts show no thinking from before the last
    question. `enable_thinking` False: prompts ask for an answer without thinking, as Qwen3's template does; None: the
    format's default. Raises BadInput for an unknown name, for a tokenizer that does not suit the renderer, or if
    `enable_thinking` is given and the format has no such switch.
    """
    expected = unknown_renderer(name)
    if expected:
        raise BadInput(f"renderer.name = {name!r}; expected {expected}")
    if name == "auto":
        return _suitable(tokenizer, strip_thinking_from_history, enable_thinking)
    return _class_of(name)(tokenizer, strip_thinking_from_history, enable_thinking)


def unknown_renderer(name: str) -> str | None:
    """Checks the form of a renderer's name. Returns a text with the names that are expected, or None if `name` may be
    valid."""
    names = ["auto", *_built_in(), external.PACKAGE]
    if name in names or re.fullmatch(r"[\w.]+:[\w.-]+", name):
        return None
    return f"one of {', '.join(names)}, {external.PACKAGE}:FORMAT, or package.module:Class"


def _built_in() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(kinds.__path__))


def _class_of(name: str) -> Callable[..., Renderer]:
    module, _, member = name.partition(":")
    if module == external.PACKAGE:
        if member:
            return partial(external.PackageRenderer, name=member)
        return external.suitable
    if not member:
        module = f"{kinds.__name__}.{name}"
        member = "RENDERER"
    try:
        renderer_class: Callable[..., Renderer] = getattr(importlib.import_module(module), member)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"renderer.name = {name!r}, which cannot be imported: {error}; expected a class") from None
    return renderer_class


def _suitable(tokenizer: Tokenizer, strip: bool, enable_thinking: bool | None) -> Renderer:
    """Returns the renderer for the name auto (see `make_renderer`). If this is a format of the third-party package
    `renderers`, logs a warning that names the format. If it is the tokenizer's chat template, logs a warning that says
    why no format of that package is used."""
    if tokenizer.chat_template is None:
        fallback = "role_colon"
    else:
        fallback = "chat_template"
    template = _class_of(fallback)(tokenizer, strip, enable_thinking)
    if tokenizer.chat_template is not None:
        for name in _built_in():
            if name not in ("chat_template", "role_colon") and _writes_alike(name, tokenizer, enable_thinking):
                return _class_of(name)(tokenizer, strip, enable_thinking)
    try:
        renderer = external.suitable(tokenizer, strip, enable_thinking)
    except BadInput as error:
        if tokenizer.chat_template is not None:
            _log.warning("renderer.name = auto is the tokenizer's chat template. No other format: %s", error)
        return template
    _log.warning("renderer.name = auto is the format %s of the package %s", renderer.name, external.PACKAGE)
    return renderer


def _writes_alike(name: str, tokenizer: Tokenizer, enable_thinking: bool | None) -> bool:
    """Returns True if the renderer `name` writes PROBE, a test conversation, as the tokenizer's chat template does."""
    try:
        both: list[Any] = [_class_of(kind)(tokenizer, True, enable_thinking) for kind in ("chat_template", name)]
    except BadInput:
        return False
    cases = product(range(2, len(PROBE) + 1), (False, True))
    texts = ({renderer.text(PROBE[:n], [PROBE_TOOL], generate) for renderer in both} for n, generate in cases)
    return all(len(written) == 1 for written in texts)
