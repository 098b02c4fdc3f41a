"""A sampling client for programs without an event loop: a training loop of your own, a notebook.

    future = sampler.sample(prompt, num_samples=4, sampling_params=SamplingParams(max_tokens=32))
    ...
    response = future.result()

Submit many prompts before reading the answers: replicas decode side by side.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from inference.replica_set.actor import ReplicaSet
from inference.router import Router
from trireme.core.stop_strings import cut
from trireme.core.tokenizer import load_tokenizer
from trireme.core.types import ModelInput, SampleRequest, SampleResponse, SamplingParams
from trireme.core.weights import PublishedWeights, UpdateReport

Value = TypeVar("Value")
CLOSE_S = 10.0


class SamplingClient:
    """Samples from all replicas, for programs without an event loop. Call `update_weights` first: before it the
    replicas have no weights to sample from.

    `replicas` brings weights and adapters to the replicas; `make_router` makes the router that sends requests to them.
    `tokenizer` (a local directory or a name on the hub) is read only for stop strings.
    """

    def __init__(self, replicas: ReplicaSet, make_router: Callable[[], Router], tokenizer: str) -> None:
        self._replicas = replicas
        self._tokenizer_name = tokenizer
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sampling client", daemon=True)
        self._thread.start()
        self._router = make_router()

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        adapter: str = "",
    ) -> Future[SampleResponse]:
        """Starts to sample `num_samples` answers to `prompt`, all on one replica; returns a future for them. With a
        seed, sample i has seed + i. `adapter`: the name of an adapter given to `load_adapter`; "": the weights of
        the newest update.

        Raises ValueError for an empty prompt. The future raises TriremeError.
        """
        if num_samples < 1 or not prompt.length:
            raise ValueError(
                f"num_samples = {num_samples} and prompt.length = {prompt.length}; expected both to be at least 1"
            )
        name = f"sample-{next(self._numbers)}"
        params = sampling_params
        requests = [
            SampleRequest(
                request_id=f"{name}/{i}",
                prompt=prompt.tokens,
                params=params if params.seed is None else replace(params, seed=params.seed + i),
                route_key=name,
                prompt_logprobs=include_prompt_logprobs and i == 0,
                topk_prompt_logprobs=topk_prompt_logprobs if i == 0 else 0,
                adapter=adapter,
            )
            for i in range(num_samples)
        ]
        return self._begin(self._answer(requests))

    def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]:
        """Brings every replica to `weights`, waits until they have them, and returns their reports. Requests in flight
        continue under the new weights.

        Raises WeightsRefused or RoomFailed.
        """
        return self._begin(self._replicas.update(weights)).result()

    def sleep(self) -> None:
        """Puts every replica to sleep, and waits until all sleep: on GPUs they give back the memory of their KV caches.
        Requests in flight wait until the next `update_weights`, which wakes the replicas. Needs `placement` =
        colocated. In deterministic mode raises the failure of a replica."""
        self._begin(self._replicas.sleep()).result()

    def load_adapter(self, name: str, weights: PublishedWeights) -> None:
        """Loads another adapter on every replica, for samples that name it; call `update_weights` at least once before.
        `name` must be new, and the adapter's values never change. Each replica has room for `inference.max_cpu_loras`
        adapters (None: `inference.max_loras`); the adapter that `update_weights` brings takes one of these places.

        Raises WeightsRefused or RoomFailed.
        """
        self._begin(self._replicas.load_adapter(name, weights)).result()

    def drop_adapter(self, name: str) -> None:
        """Makes all replicas forget the adapter `name`; no sample in flight may name it."""
        self._begin(self._replicas.drop_adapter(name)).result()

    def close(self) -> None:
        """Cancels requests in flight and ends the thread, within CLOSE_S; the replicas stay."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        """Runs the event loop until `close`, then cancels its remaining tasks."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    async def _answer(self, requests: list[SampleRequest]) -> SampleResponse:
        sequences = await asyncio.gather(*(self._router.sample(request) for request in requests))
        strings = requests[0].params.stop_strings
        if strings:
            sequences = [cut(sequence, strings, self._tokenizer.decode) for sequence in sequences]
        return SampleResponse(sequences, sequences[0].prompt_logprobs, sequences[0].topk_prompt_logprobs)

    def _begin(self, work: Coroutine[object, object, Value]) -> Future[Value]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._tokenizer_name)
