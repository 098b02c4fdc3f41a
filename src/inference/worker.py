"""The part of a replica in vLLM's engine: checks received weights and loads them.

vLLM imports this module in every rank of the engine because the replica names `WorkerExtension` as its
`worker_extension_cls`. All of this runs between two forward steps. Each rank maps the same whole tensors and takes its
part of them, by the loaders with which vLLM reads files.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import inplace, layerwise
from vllm.platforms import current_platform

from inference.adapter import add_adapter, drop_adapter, stacks, take_adapter
from inference.carrier import Carrier
from inference.cpu.rank import ask_for_tiles, forget_rank_memory, pack_experts
from inference.engine_startup import forget_shared_memory
from inference.following import AFTER, TensorFollower, derives
from inference.loaded import LoadedSums
from inference.mapping import ON_DEVICE, Region, make_own, mappings_of, populate
from inference.receiving import Receiving
from inference.session import BucketStep
from trireme.core import digest
from trireme.core.errors import WeightsRefused
from trireme.core.weights import TensorEntry, TensorPlace, WeightsManifest, check_received
from trireme.process.faults import fault_point
from trireme.transports import delta as codec
from trireme.transports.packing import tensor_of
from trireme.transports.slabs import slab_memory
from trireme.transports.tensor_sums import TensorPart, c_strides, part_sums, to_sums

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from inference.adapter import ModelRunner

# At every update they warn of what the loaders did not load: rotary embeddings, a tied output head, what is copied.
# What was loaded is proved by its sums. (They are filters because vLLM sets all levels again as it starts.)
for _reload in (inplace, layerwise):
    logging.getLogger(_reload.__name__).addFilter(lambda record: record.levelno >= logging.ERROR)

ask_for_tiles()  # on import, before a model is warmed up


Buckets: TypeAlias = "Sequence[npt.NDArray[np.uint8] | torch.Tensor]"
"""Received bytes: mapped arrays, or tensors of bytes on the engine's device."""
EXECUTE = "execute_model"
READERS = 8
"""Most threads that read received bytes: this number of them is as fast as a machine's memory."""


def load_weights(
    runner: ModelRunner,
    follower: TensorFollower,
    tensors: Mapping[str, torch.Tensor],
    *,
    traced: bool,
    copied: frozenset[str] = frozenset(),
) -> None:
    """Loads a version by vLLM's loaders; `follower` sums what they load. `tensors`: {name: tensor} of the whole
    version, in one call, because fused groups (q, k, v; gate and up) must be loaded together. `copied`: names of
    tensors that `copy_weights` has loaded already; loaders do not get them. `traced`: True if an earlier update
    recorded where the loaders copy the tensors, and the replica accepted the record (`LoadedProof.traced`). If it is
    False, `follower` makes a new record during this load."""
    with follower.following(tensors, traced=traced, copied=copied) as followed:
        runner.reload_weights(weights_iterator=_as_loaded(followed, fault_point("inference.load")))
    skip = fault_point("inference.repack") == "skip"
    # Reloading leaves some weights as packed at the first load: logprobs would be wrong by nats, without an error.
    # With tied embeddings the output matrix has no weight of its own in a checkpoint, so reloading skips it.
    for module in runner.get_model().modules():
        if isinstance(module, ParallelLMHead):
            pack = module.quant_method.process_weights_after_loading
        elif isinstance(module, RoutedExperts) and current_platform.is_cpu():
            pack = pack_experts
        else:
            continue
        follower.pack(AFTER, _left_out if skip else pack, module)


def copy_weights(
    runner: ModelRunner,
    follower: TensorFollower,
    carrier: Callable[[], Carrier],
    entries: Iterable[TensorEntry],
    buckets: Buckets,
) -> None:
    """Copies the tensors `entries` from `buckets` to the parameters. They must be tensors that vLLM's loaders would
    only copy (`TensorFollower.copied`). A bucket that is not on the device travels there as a whole. From there all its
    tensors are copied in one launch of a kernel. Copies of single tensors from the host would each wait for the device,
    which the trainer's process may be using. `carrier` returns the Carrier that brings buckets to the device."""
    by_bucket: defaultdict[int, list[TensorEntry]] = defaultdict(list)
    for entry in entries:
        by_bucket[entry.bucket].append(entry)
    fault = fault_point("inference.load")
    device = next(runner.get_model().parameters()).device
    sizes = [len(buckets[number]) for number in by_bucket if not isinstance(buckets[number], torch.Tensor)]
    landing = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)

    def landed(number: int) -> dict[str, torch.Tensor]:
        bucket = buckets[number]
        if isinstance(bucket, torch.Tensor):
            part = bucket
        else:
            part = landing[: len(bucket)]
            carrier().carry(bucket, part)
        tensors = [(entry.name, tensor_of(entry, {number: part})) for entry in by_bucket[number]]
        return dict(_as_loaded(tensors, fault))

    follower.copy(map(landed, by_bucket))
    runner.reset_lora_state()
    runner.reset_encoder_cache()
    runner.reset_mm_cache()


def load_version(
    runner: ModelRunner,
    follower: TensorFollower,
    carrier: Callable[[], Carrier],
    entries: Sequence[TensorEntry],
    buckets: Buckets,
    *,
    traced: bool,
) -> None:
    """Loads the version with the tensors `entries` in `buckets`: copies the tensors that vLLM's loaders would only
    copy, and then calls the loaders for the rest. The loaders come second, because at their end they derive values from
    all weights. `carrier` returns the Carrier that brings buckets to the device. `traced`: True if an earlier update
    recorded where the loaders copy the tensors, and the replica accepted the record (`LoadedProof.traced`). If it is
    False, `follower` makes a new record during this load."""
    tensors = {entry.name: tensor_of(entry, buckets) for entry in entries}
    copied = follower.copied(tensors, traced=traced)
    if copied:
        copy_weights(runner, follower, carrier, [entry for entry in entries if entry.name in copied], buckets)
    if len(copied) < len(tensors) or derives(runner.get_model()):
        load_weights(runner, follower, tensors, traced=traced, copied=copied)


def keeps_part(model: torch.nn.Module, buckets: Buckets) -> bool:
    """Returns True if a parameter or buffer of `model` lies in the memory of `buckets` on the device: vLLM took a part
    of it, not a copy, so the next version must come into other memory."""
    memory = {bucket.untyped_storage().data_ptr() for bucket in buckets if isinstance(bucket, torch.Tensor)}
    tensors = chain(model.parameters(), model.buffers()) if memory else ()
    return any(tensor.untyped_storage().data_ptr() in memory for tensor in tensors)


def _left_out(layer: torch.nn.Module) -> None:
    """Does nothing. A fault that tests inject calls this instead of a layer's packing."""


def _as_loaded(tensors: Iterable[tuple[str, torch.Tensor]], fault: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of `tensors` for the loaders, changed by a `fault` that a test injects. "skip_norm" and
    "skip_head" leave out a norm or the output matrix, which keeps its old values; "swap_experts" exchanges two experts
    of the first layer; all others change nothing."""
    skipped = {"skip_norm": ".layers.0.input_layernorm.weight", "skip_head": "lm_head.weight"}.get(fault or "")
    for name, tensor in tensors:
        if skipped is None or not name.endswith(skipped):
            swapped = re.sub(r"(?<=layers\.0\.mlp\.experts\.)[01]\b", lambda match: str(1 - int(match[0])), name)
            yield (swapped if fault == "swap_experts" else name), tensor


def _corrupt(model: torch.nn.Module) -> None:
    """Injects a fault for tests: changes one value on which every logit depends. The value is in the last adapter if
    there are adapters, else in the final norm."""
    norms = [p for name, p in model.named_parameters() if name.endswith("norm.weight") and "layers" not in name]
    adapters = [tensor for layer in model.modules() for tensor in stacks(layer).values()]
    [*norms, *adapters][-1].data[(0,) * [*norms, *adapters][-1].dim()] += 1.0


def _decode_with_old(runner: ModelRunner, *, shifted: bool) -> None:
    """Injects a fault for tests: until the next update, steps of one token compute with the embedding's present values,
    although newer values are loaded after this call. A CUDA graph that reads outdated memory has the same effect.
    `shifted`: each token gets the row of another token, so that results differ even if the two versions are nearly
    equal."""
    embedding = next(module for module in runner.get_model().modules() if isinstance(module, VocabParallelEmbedding))
    old = embedding.get_parameter("weight").detach().roll(int(shifted), 0)
    execute = runner.execute_model

    def execute_stale(scheduler_output: SchedulerOutput, *rest: Any) -> object:
        if scheduler_output.total_num_scheduled_tokens > 1:
            return execute(scheduler_output, *rest)
        weight = embedding.get_parameter("weight").data
        loaded = weight.clone()
        weight.copy_(old)
        output = execute(scheduler_output, *rest)
        weight.copy_(loaded)
        return output

    setattr(runner, EXECUTE, execute_stale)


def readers() -> int:
    """Returns how many threads read received bytes: 1 on CPUs, where the engine computes on the same cores; up to
    READERS on GPUs, where an engine needs few cores, and the next step's sampling waits for the check."""
    if current_platform.is_cpu():
        return 1
    return max(1, min(READERS, len(os.sched_getaffinity(0)) // 2))


def _refusal_of(manifest: WeightsManifest, buckets: Buckets, sums: Callable[[], Mapping[TensorPlace, str]]) -> str:
    """Compares received `buckets` with the manifest. Returns why they are refused; "" if they match. `sums` returns
    {place of a tensor: its sums} for the tensors in mapped buckets that are summed already and need not be read
    again."""
    populate(buckets)
    try:
        digests = sums()
        if fault_point("inference.received") == "corrupt":
            entry = manifest.entries[len(manifest.entries) // 2]
            with slab_memory().on_stream():
                buckets[entry.bucket][entry.offset] ^= 1
            digests = {}
        on_device = {number: bucket for number, bucket in enumerate(buckets) if isinstance(bucket, torch.Tensor)}
        mapped = [bucket for bucket in buckets if isinstance(bucket, np.ndarray)]
        check_received(manifest, mapped, {**digests, **sums_on_device(manifest.entries, on_device)}, readers())
    except WeightsRefused as refused:
        return str(refused)
    return ""


def sums_on_device(entries: Iterable[TensorEntry], buckets: Mapping[int, torch.Tensor]) -> dict[TensorPlace, str]:
    """Returns {place: sums} of the tensors in `buckets`. `buckets`: {number of a bucket: its bytes on the engine's
    device}. The device computes the sums on a stream of their own, so that they do not wait for the engine's steps."""
    arrived = [entry for entry in entries if entry.bucket in buckets]
    sums = {entry.place: str(digest.Sums()) for entry in arrived}
    summed = [entry for entry in arrived if entry.nbytes]
    tensors = [tensor_of(entry, buckets) for entry in summed]
    parts = [TensorPart(tensor, 0, c_strides(tensor.shape), tensor.dtype) for tensor in tensors]
    if parts:
        with slab_memory().on_stream():
            totals = to_sums(part_sums(parts))
        sums |= {entry.place: str(total) for entry, total in zip(summed, totals, strict=True)}
    return sums


def _resolve(future: Future[str], work: Callable[[], str | None]) -> None:
    """Calls `work` and gives its result ("" for None), or its exception, to `future`."""
    try:
        future.set_result(work() or "")
    except BaseException as error:
        future.set_exception(error)


class WorkerExtension:
    """The methods that a replica calls on every rank of its engine; vLLM mixes this class into its Worker."""

    rank: int
    model_runner: ModelRunner
    vllm_config: VllmConfig
    received: tuple[WeightsManifest, Buckets] | None = None
    base_entries: tuple[TensorEntry, ...] = ()
    """The tensors of the version that lies in the memory for received bytes, to which the changes of the next version
    apply; () if that is unknown."""
    second_buffer: bool = False
    """True: this rank's GPU has room for a version in addition to the loaded one."""
    _checking: Future[str]
    follower: TensorFollower | None = None

    @cached_property
    def carrier(self) -> Carrier:
        """Page-locked memory through which weights travel to this rank's GPU."""
        return Carrier(readers(), pinned=True)

    @cached_property
    def receiving(self) -> Receiving:
        """This rank's memory for arriving versions."""
        device = current_platform.device_type if self.second_buffer else None
        return Receiving(device, alone=self.vllm_config.parallel_config.world_size == 1)

    def settle(self, delta: bool, second_buffer: bool) -> int:
        """Prepares this rank after the start; returns its process id. Removes the names in /dev/shm of the shared
        memory by which ranks communicate: all ranks have opened it by now, and killed ranks would leave the names
        there. Compiles the code that checks weights and, if `delta`, the code that applies changes, so that no update
        waits for a compilation. `second_buffer`: see the attribute."""
        self.second_buffer = second_buffer
        digest.warm_up()
        if delta and self.rank == 0:
            codec.warm_up()
        forget_shared_memory(Path("/proc/self/maps").read_text())
        if current_platform.is_cpu():
            forget_rank_memory()
        return os.getpid()

    def receive_broadcast(self, pickled_offer: bytes) -> None:
        """Begins to receive an offered version, on rank 0; does nothing on other ranks. `pickled_offer`: the pickled
        arguments of `Receiving.start`."""
        if self.rank == 0:
            self.receiving.start(*pickle.loads(pickled_offer))

    def receive_weights(self, pickled_files: bytes) -> None:
        """Maps the received bytes on this rank; all ranks map the same memory. In a thread alongside the engine's loop,
        begins to copy bytes in host memory to the second buffer, if this rank has one, and to check the copy. Without
        one, rank 0 checks the bytes for all ranks. `pickled_files`: a pickled tuple (manifest, regions, steps).
        `regions` has an `inference.mapping.Region` for each bucket. `steps` has an `inference.session.BucketStep` for
        each bucket; it is empty if nothing has to be written to the regions first."""
        manifest, regions, steps = pickle.loads(pickled_files)
        buckets = [self.receiving.on_device(region) if region.path == ON_DEVICE else region.map() for region in regions]
        if steps:
            digests: Callable[[], Mapping[TensorPlace, str]] = partial(self._write, manifest.entries, regions, steps)
        else:
            digests = partial(self.receiving.sums, {region.path for region in regions})
        copies: list[torch.Tensor] = []
        if self.rank == 0 or not steps:  # other ranks cannot know when rank 0 has written
            copies = self.receiving.copies([len(bucket) for bucket in buckets])
        if copies:
            carry = partial(self._carry, digests, buckets, copies)
            work: Callable[[], str | None] = partial(_refusal_of, manifest, copies, carry)
        elif self.rank == 0:
            work = partial(_refusal_of, manifest, buckets, digests)
        else:
            work = partial(populate, buckets)
        self._checking = Future()
        self.received = (manifest, [*copies] or buckets)
        Thread(target=_resolve, args=(self._checking, work), name="check", daemon=True).start()

    def _carry(
        self, arrive: Callable[[], object], buckets: Buckets, copies: Sequence[torch.Tensor]
    ) -> dict[TensorPlace, str]:
        """Calls `arrive`, after which `buckets` have their bytes, and then copies them to `copies` in the second
        buffer. Returns no sums, so that the copies are summed. The stream of the copies is not the engine's."""
        arrive()
        populate(buckets)
        with slab_memory().on_stream():
            for bucket, copy in zip(buckets, copies, strict=True):
                self.carrier.carry(np.asarray(bucket), copy)
        return {}

    def _write(
        self, entries: Sequence[TensorEntry], regions: Sequence[Region], steps: Sequence[BucketStep]
    ) -> dict[TensorPlace, str]:
        """Writes the received bytes into the memory at `regions`. `steps`: for each bucket a BucketStep, which says
        whether the received bytes are the whole bucket or changes to the bucket. Returns {place of a tensor: its new
        digest} for buckets with changes. A digest is two sums (`trireme.core.digest`): the new digest is the digest of
        the tensor before the changes, plus what the changes add to its sums. Raises WeightsRefused if changes do not
        fit."""
        before = {entry.place: digest.Sums.parse(entry.hash) for entry in self.base_entries}
        self.base_entries = ()
        totals: dict[TensorPlace, str] = {}
        for number, (region, step) in enumerate(zip(regions, steps, strict=True)):
            fault_point("inference.write")
            memory = region.map(shared=True)
            if step.changes:
                places = [entry.place for entry in entries if entry.bucket == number]
                added = codec.apply(step.region.map(), memory, [place.offset for place in places])
                changed = [(place, more) for place, more in zip(places, added, strict=True) if place in before]
                totals |= {place: str(before[place] + more) for place, more in changed}
            else:
                memory[:] = step.region.map()
        return totals

    def checked(self) -> str | None:
        """Returns the outcome of the check that `receive_weights` began: why the bytes are refused, "" if they are
        accepted, None while the check runs."""
        if self._checking.done():
            return self._checking.result()
        return None

    def take_weights(self, traced: bool) -> bytes:
        """Loads the received weights into this rank's parameters, while the scheduler is paused. Returns a pickled
        `inference.loaded.LoadedSums`. An error names the rank. `traced`: True if an earlier update recorded where the
        loaders copy the tensors, and the replica accepted the record (`LoadedProof.traced`). If it is False, this rank
        makes a new record during this load."""
        try:
            return pickle.dumps(self._load_received(traced))
        except Exception as error:  # vLLM passes its text on, and does not say whose it is
            raise RuntimeError(f"rank {self.rank}: {type(error).__name__}: {error}") from error

    def _load_received(self, traced: bool) -> LoadedSums:
        assert self.received is not None
        manifest, buckets = self.received
        mapped = mappings_of(buckets)
        runner = self.model_runner
        vars(runner).pop(EXECUTE, None)
        fault = fault_point("inference.decode")
        if fault:
            _decode_with_old(runner, shifted=fault == "shifted")
        with set_current_vllm_config(self.vllm_config):
            unfollowed: dict[str, str] = {}
            if manifest.adapter:
                follower = self.follower = self.follower or TensorFollower(runner.get_model(), stacks)
                tensors = {entry.name: tensor_of(entry, buckets) for entry in manifest.entries}
                unfollowed = take_adapter(runner, follower, tensors, manifest.adapter, traced=traced)
                del tensors
            else:
                follower = self.follower = self.follower or TensorFollower(runner.get_model())
                load_version(runner, follower, lambda: self.carrier, manifest.entries, buckets, traced=traced)
            if fault_point("inference.loaded") == "corrupt":
                _corrupt(runner.get_model())
            loaded = follower.loaded(unfollowed)
            torch.accelerator.synchronize()
        self.received = None
        self.base_entries = manifest.entries
        copied = not keeps_part(runner.get_model(), buckets)
        del buckets
        for mapping in filter(
            None, (reference() for reference in mapped)
        ):  # by an engine that took a part of it, not a copy
            make_own(mapping)
        # The other ranks have loaded it too before the engine's process is called again.
        self.receiving.forget(manifest.identity.version, [e.place for e in manifest.entries], copied=copied)
        return loaded

    def add_adapter(self, number: int) -> None:
        """Gives this rank's model runner the received adapter, under vLLM's number `number`. An error names the
        rank."""
        assert self.received is not None
        manifest, buckets = self.received
        assert manifest.adapter is not None, "the replica has looked"
        try:
            tensors = {entry.name: tensor_of(entry, buckets) for entry in manifest.entries}
            add_adapter(self.model_runner, number, tensors, manifest.adapter)
        except Exception as error:  # vLLM passes its text on, and does not say whose it is
            raise RuntimeError(f"rank {self.rank}: {type(error).__name__}: {error}") from error
        self.received = None
        places = [entry.place for entry in manifest.entries]
        self.receiving.forget(manifest.identity.version, places, copied=False)  # vLLM may keep a part of it

    def drop_adapter(self, number: int) -> None:
        """Removes the adapter with vLLM's number `number`."""
        drop_adapter(self.model_runner, number)

    def free_memory(self) -> None:
        """Gives memory that was freed after a load back to the system. Takes some milliseconds; call it after requests
        resume.

        Weights are loaded layer by layer into new memory, and requests allocate longer-lived memory in between. The C
        library keeps the freed memory, a little more after each update: 1 GiB grew by 250 MiB in 30 updates of 200 MiB,
        though none of it was in use.
        """
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if malloc_trim:
            malloc_trim(0)
