"""Marks tell an engine's scheduler what vLLM's parameters do not: if a request is a chat, and if it is read.

They travel in `extra_args` of vLLM's SamplingParams, which vLLM carries to the engine's process and does not look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from trireme.core.types import SampleRequest

CHAT, READ = "chat", "read"
"""Keys of a request's marks: the CPU seconds of a chat; True where tokens are read while they are sampled."""


def marks_of(request: SampleRequest) -> dict[str, Any] | None:
    """Returns the marks of a request; None if it has none."""
    marks: dict[str, Any] = {CHAT: request.cpu_s} if request.purpose == "chat" else {}
    if request.read:
        marks[READ] = True
    return marks or None


def chat_cpu_s(params: SamplingParams | None) -> float | None:
    """Returns the CPU seconds that a chat has cost outside of the engine, which its share has to bear too; None for
    other requests."""
    return _marks_in(params).get(CHAT)


def is_read(params: SamplingParams | None) -> bool:
    """Tells if the tokens of a request are read while they are sampled."""
    return READ in _marks_in(params)


def _marks_in(params: SamplingParams | None) -> dict[str, Any]:
    return (params and params.extra_args) or {}
