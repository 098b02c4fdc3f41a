"""What an engine's scheduler reads in a request's marks: only what was put there."""

from __future__ import annotations

import pytest
from vllm.sampling_params import SamplingParams

from inference.marks import chat_cpu_s, is_read, marks_of
from trireme.core import types
from trireme.core.engine_use import Purpose


@pytest.mark.parametrize(("purpose", "cpu_s", "read", "found"), [
    ("run", 0.5, False, (None, False)),
    ("run", 0.0, True, (None, True)),
    ("chat", 0.0, False, (0.0, False)),
    ("chat", 0.5, True, (0.5, True)),
])  # fmt: skip
def test_a_request_is_known_by_its_marks_alone(
    purpose: Purpose, cpu_s: float, read: bool, found: tuple[float | None, bool]
) -> None:
    request = types.SampleRequest("r", (1,), types.SamplingParams(), "r", purpose=purpose, cpu_s=cpu_s, read=read)
    params = SamplingParams(extra_args=marks_of(request))
    assert (chat_cpu_s(params), is_read(params)) == found


@pytest.mark.parametrize("params", [None, SamplingParams(), SamplingParams(extra_args={"other": 1})])
def test_a_request_without_marks_has_none(params: SamplingParams | None) -> None:
    assert (chat_cpu_s(params), is_read(params)) == (None, False)
