"""Two deterministic engines: real Ray, vLLM on the CPU."""

import asyncio
from pathlib import Path

import pytest
from inference_support import begin, prompt_of, request, start_rooms

KINDS = {"first": ("qwen3", True), "second": ("qwen3", True)}


@pytest.mark.long
async def test_two_deterministic_engines_with_different_pasts_agree_to_the_last_bit(
    ray_cluster: str, tmp_path: Path
) -> None:
    """More requests than a replica decodes at once, of all lengths. In default mode a fifth of them would differ: the
    first one runs ahead of the others by as many steps as the machine happens to allow."""
    rooms = await asyncio.to_thread(start_rooms, KINDS, set(KINDS), {}, tmp_path)
    first, second = rooms["first"], rooms["second"]
    requests = [request(f"wave {i}", prompt_of(1 + 13 * i % 120, i), 5 + 29 * i % 75, seed=i) for i in range(48)]
    for room in (first, second):
        await room.update()
    await asyncio.gather(*begin(second, requests[7:12]), *begin(first, requests[30:]))
    for room in (first, second):
        await room.update()
    (answers, elsewhere, again) = [await asyncio.gather(*begin(room, requests)) for room in (first, second, first)]
    for answer, *rest in zip(answers, elsewhere, again, strict=True):
        for other in rest:
            assert other.tokens.tobytes() == answer.tokens.tobytes()
            assert other.logprobs.tobytes() == answer.logprobs.tobytes()
    for room in rooms.values():
        room.group.stop()
