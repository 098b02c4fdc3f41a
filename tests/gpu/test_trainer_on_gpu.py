"""One shard: the variable-length kernel, shared prefixes, compiled layers, offloaded state, low precision and experts
on an NVIDIA GPU; on CPUs what they share. The comparisons are those of `scripts/gpu_check.py`."""

from pathlib import Path

import pytest
import torch

from gpu_check.checks import Failed
from gpu_check.shapes import make_model
from gpu_check.trainer import (
    ATTENTION_SHARED,
    LOGPROB_BOUNDS,
    NOTHING_SHARED,
    ONLY_GPU,
    SMALL_GROUP,
    WAYS,
    Exact,
    check_attention,
    check_group,
    check_way,
)
from trireme.process.machine import this_machine


@pytest.fixture(scope="module", params=LOGPROB_BOUNDS)
def exact(device: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exact:
    return Exact.of(request.param, device, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("device", "way"),
    [
        *(("cpu", way) for way in WAYS if way not in ONLY_GPU),
        *(pytest.param("gpu", way, marks=pytest.mark.gpu) for way in WAYS),
    ],
    indirect=["device"],
    scope="module",
)
def test_bfloat16_agrees_with_float32(exact: Exact, device: str, way: str) -> None:
    """Logprobs to the stated bound; the gradient points the same way as that of padded rows in float32."""
    assert check_way(exact, device, way)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("shared", [NOTHING_SHARED, ATTENTION_SHARED])
def test_sequences_of_a_row_attend_as_each_alone(device: str, window: int | None, shared: tuple[int, ...]) -> None:
    assert check_attention(device, window, shared)


def test_answers_to_a_prompt_that_is_computed_once_are_those_of_whole_sequences(device: str, tmp_path: Path) -> None:
    figures = check_group(make_model(tmp_path, "small", device), "small", device, SMALL_GROUP)
    assert figures["tokens, whole over shared"] == 704 / 144


def test_a_wrong_attention_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window one token too wide."""
    from trainer import attention, shared_attention

    right = attention.masked_attention
    monkeypatch.setattr(attention, "masked_attention", lambda q, k, v, s, w, *o: right(q, k, v, s, w and w + 1, *o))
    assert check_attention("cpu", None)
    with pytest.raises(Failed, match="largest difference"):
        check_attention("cpu", 8)
    groups = shared_attention._groups
    monkeypatch.setattr(shared_attention, "_groups", lambda q, p, o, s, w: groups(q, p, o, s, w and w + 1))
    assert check_attention("cpu", None, ATTENTION_SHARED)
    with pytest.raises(Failed, match="largest difference"):
        check_attention("cpu", 8, ATTENTION_SHARED)


@pytest.mark.gpu
def test_the_driver_tells_the_plan_what_pytorch_sees() -> None:
    gpus = this_machine().gpus
    assert len(gpus) == torch.cuda.device_count()
    free, memory = torch.cuda.mem_get_info(0)
    assert gpus[0].memory_bytes == pytest.approx(memory, rel=0.02)
    assert gpus[0].free_bytes >= 0.9 * free
