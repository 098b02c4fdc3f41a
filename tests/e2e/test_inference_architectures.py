"""vLLM takes the published weights of several architectures, and computes what Hugging Face computes with them."""

import asyncio
from pathlib import Path

import pytest
from inference_support import FAMILIES, prompt_of, request, start_rooms

TOLERANCE = 1e-4


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_every_version_are_those_of_the_published_model(
    ray_cluster: str, tmp_path: Path, family: str
) -> None:
    room = start_rooms({family: (family, False)}, set(), {}, tmp_path)[family]

    async def run() -> None:
        for _ in range(2):
            report = await room.update()
            assert 0 < report.drift.largest < TOLERANCE
            for length in (1, 40):
                prompt = prompt_of(length, seed=length)
                answer = await room.router.sample(request(f"p{length}", prompt, 24))
                assert len(answer.tokens) == 24
                assert {span.identity for span in answer.spans} == {report.identity}
                assert room.difference(prompt, answer) < TOLERANCE

    try:
        asyncio.run(run())
    finally:
        room.group.stop()
