"""Memory of the trainer's shards: what they hold by a count, and by the plan (docs/internals/memory.md).

    python scripts/memory.py          # writes the tables of the page

`count_shard` runs a shard on tensors that have shapes and storages, but no memory (torch's FakeTensorMode), in a
process group whose collectives move nothing. So the shard of a large model on many GPUs is counted on a small machine,
in seconds. Tensors say that they are on the CPU, because those on a GPU need a driver, so what is counted is what the
trainer allocates; CUDA's context, NCCL's buffers, workspaces of kernels and the allocator's gaps are not in it.

These parts of a shard are replaced, because they need values, files or other processes:
- numbers that are read out of a tensor (`.item()`, `bool()`, `.numpy()`) are 1, and 0 in arrays;
- process groups are torch's fake ones, and objects that are broadcast or gathered are those of this rank, the first;
- the model that the first rank loads is made from its configuration, in the same dtype;
- the proof at the start (`trainer.proof`) computes nothing, and what is published has no hashes;
- buffers of a checkpoint are made, but not read as numpy arrays;
- for a GPU, rows are packed although no kernel is there: torch knows the shapes of what it returns.
"""

from __future__ import annotations

import json
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

import trainer.adapters
import trainer.attention
import trainer.model
import trainer.shard
import trainer.shard_sums
import trainer.snapshot
from gpu_check import shapes
from page_parts import with_part
from trainer.lora import add_adapters
from trainer.mesh import Mesh
from trainer.model import Sharding
from trainer.proof import Agreement, Proof
from trainer.shard import Shard
from trireme.config import Config
from trireme.config.inference import InferenceConfig
from trireme.config.model_facts import ModelFacts
from trireme.config.trainer import CommonTrainer
from trireme.core.transport import Session
from trireme.core.types import AdamParams, TokenBatch
from trireme.core.weights import Layout
from trireme.plan.memory import GIB, GPU_ALLOWANCES, SHARD_BASE_GIB, ShardMemory, shard_memory
from trireme.plan.rl import ENGINE_BYTES

Value = TypeVar("Value")
Args = ParamSpec("Args")
WEIGHTS = "weights"
GRADIENTS = "gradients"
MOMENTS = "moments"
GATHERED = "gathered"
ACTIVATIONS = "activations"
HEAD = "head"
HOST = "host"
SHAPES = "shapes"
KINDS = (WEIGHTS, GRADIENTS, MOMENTS, GATHERED, ACTIVATIONS, HEAD)
"""Parts of a shard's device memory: its part of weights, gradients and moments; gathered tensors, with the buffers of
collectives; tensors that a pass keeps for its backward pass; the logits, and the output matrix's gradient while it is
summed. (SHAPES: tensors by which DTensor finds out shapes, which have no memory in a real run either.)"""
STATE = (WEIGHTS, GRADIENTS, MOMENTS)
MAKERS = (
    ("scripts/memory.py", "_load_source", HOST),
    ("trainer/model.py", "load_source", HOST),
    ("trainer/snapshot.py", None, HOST),
    ("trainer/transfers.py", "queue_to_host", HOST),
    ("trainer/state.py", "make_adam_state", MOMENTS),
    ("trainer/logprobs.py", "forward", HEAD),
    ("trainer/logprobs.py", "backward", HEAD),
    ("trainer/model.py", "_fill", WEIGHTS),
    ("/transformers/", "forward", ACTIVATIONS),
    ("torch/distributed/fsdp/", None, GATHERED),
    ("torch/distributed/tensor/_sharding_prop.py", None, SHAPES),
)
"""The kind of memory allocated by, or on behalf of, a function; the innermost one counts. All else is activations."""
LOAD = "load"
PASS = "forward and backward"
UPDATE = "update"
PUBLISH = "publish"
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Peak:
    """The most that was held during a moment of a step, in bytes."""

    kinds: Mapping[str, int]
    """On the device, by kind, when their sum was highest."""
    host: int
    """The most on the host: what the first rank reads, and the buffers of checkpoints."""

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return sum(self.kinds.values())


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that live, from when an operation returns them until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[str, Peak] = {}
        self._now: Counter[str] = Counter()
        self._device = self._highest = self._most_host = 0
        self._at_highest: Counter[str] = Counter()
        self._storages: dict[
            int, tuple[weakref.ref[torch.UntypedStorage], int, str]
        ] = {}  # by storage: a weak reference, bytes, kind
        self._kind_of_code: dict[CodeType, str | None] = {}

    @contextmanager
    def moment(self, name: str) -> Iterator[None]:
        """Records the highest sum within the block in `peaks`."""
        self._highest, self._at_highest, self._most_host = self._device, Counter(self._now), self._now[HOST]
        yield
        self.peaks[name] = Peak({kind: self._at_highest[kind] for kind in KINDS}, self._most_host)

    def name(self, tensor: Tensor, kind: str) -> None:
        """Counts a tensor as `kind` from now on."""
        storage = tensor.untyped_storage()
        reference, size, before = self._storages[storage._cdata]
        self._storages[storage._cdata] = reference, size, kind
        self._add(before, -size)
        self._add(kind, size)

    def rename(self, before: str, kind: str) -> None:
        """Counts everything of kind `before` as `kind` from now on."""
        for key, (reference, size, old_kind) in self._storages.items():
            if old_kind == before:
                self._storages[key] = reference, size, kind
        self._now[kind] += self._now.pop(before, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # its operations on the local tensors are seen
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].dtype == torch.bool:
                return True
            if args[0].is_floating_point():
                return 1.0
            return 1
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._set(storage, storage.nbytes())
        return result

    def __enter__(self) -> LiveBytes:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            self._set(storage, size)
            return result

        self._patch = patch.object(torch.UntypedStorage, "resize_", resize_)  # FSDP frees gathered weights so
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def _set(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key not in self._storages:
            reference = weakref.ref(storage, lambda _: self._forget(key))
            self._storages[key] = reference, 0, self._kind()
        reference, before, kind = self._storages[key]
        if size != before:
            self._storages[key] = reference, size, kind
            self._add(kind, size - before)

    def _forget(self, key: int) -> None:
        _, size, kind = self._storages.pop(key)
        self._add(kind, -size)

    def _add(self, kind: str, size: int) -> None:
        self._now[kind] += size
        self._most_host = max(self._most_host, self._now[HOST])
        if kind not in KINDS:
            return
        self._device += size
        if self._device > self._highest:
            self._highest, self._at_highest = self._device, Counter(self._now)

    def _kind(self) -> str:
        """Finds the innermost function on the stack that says what it allocates."""
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code not in self._kind_of_code:
                self._kind_of_code[code] = _kind_of(code)
            kind = self._kind_of_code[code]
            if kind:
                return kind
            frame = frame.f_back  # type: ignore[assignment]
        return ACTIVATIONS


def _kind_of(code: CodeType) -> str | None:
    kinds = (kind for path, name, kind in MAKERS if path in code.co_filename and name in (None, code.co_name))
    return next(kinds, None)


@dataclass(frozen=True)
class Case:
    """A shard for the count of its memory."""

    described: Mapping[str, Any]
    """The config.json of the model."""
    shards: int = 1
    """Processes over which the model is spread."""
    tokens: int = 16384
    """Tokens of a micro-batch."""
    length: int = 4096
    """Tokens of each sequence."""
    gpu: bool = True
    """True: in bfloat16 and with packed rows, as on a GPU; False: in float32 with padded rows."""
    whole: bool = False
    """True: the model stays whole over the micro-batches of a batch."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keys of `trainer`."""

    def config(self, directory: str) -> Config:
        """Returns the configuration of a run with the model in `directory`."""
        dtype, packing = ("bfloat16", "packed") if self.gpu else ("float32", "rows")
        trainer = {"shards": self.shards, "micro_batch_tokens": self.tokens, "packing": packing, **self.options}
        trainer["share_prefixes"] = "off"  # sequences are counted whole
        if not self.whole:
            trainer["reshard_after_forward"] = True
        return Config.model_validate(
            {
                "model": {"name": directory, "dtype": dtype},
                "trainer": trainer,
                "orchestrator": {"batch_size": 2},
                "env": {"id": "sort"},
                "inference": {"sampling": {"max_tokens": 8}},
                "cluster": {"device": "cpu"},
            }
        )

    def batch(self) -> TokenBatch:
        """Returns a batch of two full micro-batches for each shard, with the columns that ppo reads."""
        count = 2 * self.shards * max(1, self.tokens // self.length)
        total = count * self.length
        ones = np.ones(total, np.float32)
        tokens = np.arange(total, dtype=np.int32) % self.described["vocab_size"]
        return TokenBatch(
            tokens,
            np.arange(count + 1, dtype=np.int64) * self.length,
            {"target_tokens": tokens, "mask": ones, "logprobs": -ones, "advantages": ones},
            np.ones(count, np.float32),
        )


def planned(case: Case) -> ShardMemory:
    """Returns what the plan says of a shard of `case`. Only room for everything keeps the model whole."""
    facts = ModelFacts.from_json("m", json.dumps(case.described))
    return shard_memory(case.config("m"), facts, on_gpus=case.gpu, room=2**50 if case.whole else 0)


def count_shard(case: Case) -> dict[str, Peak]:
    """Returns the peaks of the first shard of `case`, by moment, on tensors without memory."""
    count = LiveBytes()
    with tempfile.TemporaryDirectory() as directory, _without_memory(gpu=case.gpu), count:
        (Path(directory) / "config.json").write_text(json.dumps(case.described), encoding="utf-8")
        shard = make_shard(case, directory, 0, FakeStore(), count)
        take_step(shard, case.batch(), count)
        with count.moment(CHECKPOINT):
            shard._checkpointer._staging  # noqa: B018  # a checkpoint's buffers are made when they are first used
        del shard
        dist.destroy_process_group()
    return count.peaks


def make_shard(case: Case, directory: str, rank: int, store: dist.Store, count: LiveBytes) -> Shard:
    """Returns a shard of the model in `directory`, loaded within the moment LOAD. Collective."""
    with count.moment(LOAD):
        shard = Shard(case.config(directory), rank, store, _Nowhere())
    shard._sharding.whole = case.whole
    for parameter in shard._model.parameters():
        count.name(parameter.to_local(), WEIGHTS)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: count.name(p.grad.to_local(), GRADIENTS))
    return shard


def take_step(shard: Shard, batch: TokenBatch, count: LiveBytes) -> None:
    """Computes the gradient of a batch, updates the weights and publishes them. Collective."""
    backward = trainer.shard.backward

    def noting(*args: Any, **options: Any) -> Any:
        gradients = backward(*args, **options)
        for kind in (ACTIVATIONS, HEAD):  # what is left of a pass are gradients that stay whole until the last one
            count.rename(kind, GATHERED)
        return gradients

    with count.moment(PASS), patch.object(trainer.shard, "backward", noting):
        shard.forward_backward(batch, "ppo", {}, None)
    with count.moment(UPDATE):
        shard.optim_step(AdamParams(learning_rate=1e-5), 1.0)
    with count.moment(PUBLISH):
        shard.publish_weights(1)


class _Nowhere:
    """A sender (`trireme.core.transport.Sender`) without receivers."""

    endpoint = None

    def send(self, version: int, layout: Layout, units: Iterable[object], session: Session | None) -> dict[int, object]:
        for _ in units:
            pass
        return {}


@contextmanager
def _without_memory(*, gpu: bool) -> Iterator[None]:
    """Within the block tensors have no memory, and what a shard does needs no values."""
    join = dist.init_process_group
    make_group = dist.new_group
    meshes: list[DeviceMesh] = []

    def as_it_is(function: Callable[Args, Value]) -> Callable[Args, Value]:
        def run(*args: Args.args, **options: Args.kwargs) -> Value:
            with unset_fake_temporarily():
                result = function(*args, **options)
            if isinstance(args[0], Mesh):
                meshes.append(args[0].fsdp)
            return result

        return run

    with ExitStack() as stack:

        def replace(owner: object, name: str, value: object) -> None:
            stack.enter_context(patch.object(owner, name, value))

        replace(dist, "init_process_group", lambda backend, **options: join("fake", **options))
        replace(dist, "new_group", lambda backend, **options: make_group(backend="fake", **options))
        replace(Mesh, "__init__", as_it_is(Mesh.__init__))  # computes with the numbers of ranks
        replace(trainer.model, "add_adapters", as_it_is(add_adapters))
        replace(trainer.model.AutoModelForCausalLM, "from_config", as_it_is(AutoModelForCausalLM.from_config))
        replace(trainer.snapshot, "DeviceMesh", lambda device, ranks, **options: meshes[0])
        replace(Mesh, "broadcast_object", lambda mesh, value: value)
        replace(Mesh, "agree", lambda mesh, refusal: None)  # there are no other ranks
        replace(Layout, "with_hashes", lambda layout, hashes: layout.entries)
        no_sums = partial(torch.zeros, dtype=torch.int64)  # there are no bytes
        replace(trainer.shard_sums, "tensor_sums", lambda *_: no_sums(2))
        replace(trainer.shard_sums, "part_sums", lambda parts: no_sums(sum(part.tensors for part in parts), 2))
        replace(trainer.shard_sums, "to_sums", lambda table: [""] * len(table))
        replace(trainer.model, "load_source", _load_source)
        replace(trainer.adapters, "base_digest", lambda name: "0" * 32)
        replace(trainer.shard, "prove_models", _prove)
        replace(trainer.snapshot, "StagedTensor", lambda host, live: host)
        replace(trainer.snapshot.Slab, "__init__", lambda slab, nbytes, pinned: None)
        replace(trainer.snapshot.Slab, "take", lambda slab, shape, dtype: torch.empty(shape, dtype=dtype))
        replace(CommonTrainer, "compiles", lambda options, on_gpus: False)  # which the plan does not count on
        replace(FakeTensor, "numpy", lambda tensor: np.zeros(tensor.shape, np.float32))
        for module in (trainer.attention, trainer.model):
            replace(module, "has_kernel", lambda device, dtype: gpu)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _load_source(name: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(name)
    source = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=torch.float32)
    source._weight_conversions = get_model_conversion_mapping(source)
    return source


def _prove(models: Sequence[PreTrainedModel], mesh: Mesh, sharding: Sharding, packing: str, share: str) -> Proof:
    sharding.lay_out(models, packed=sharding.packed, shares=False)
    return Proof("", sharding.packed, Agreement(0.0, 0.0), "not computed")


# ---- the page

TARGET = Path(__file__).parents[1] / "docs" / "internals" / "memory.md"
GB = 10**9
GPU_SIZES = (80 * GB, 141 * GB)
GPUS = (1, 8, 32)
UTILIZATION: float = InferenceConfig.model_fields["gpu_memory_utilization"].default
COMMIT_BYTES = 12
TRAINING: dict[str, dict[str, object]] = {"full": {}, "LoRA": {"lora": {"rank": 32}}}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6}
MODELS: dict[str, dict[str, object]] = {
    **{f"Qwen3-{shape.upper()}": {**QWEN, **shapes.SHAPES[shape]} for shape in ("0.6b", "4b", "8b")},
    "Qwen3-30B-A3B": {
        **QWEN,
        **shapes.SHAPES["8b"],
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "Llama-3-70B": {
        **QWEN,
        **shapes.SHAPES["8b"],
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
}
"""The sizes of published models, as their config.json has them."""


def facts_of(name: str) -> ModelFacts:
    return ModelFacts.from_json(name, json.dumps(MODELS[name]))


def case(name: str, training: str, gpus: int, *, twice: bool) -> Case:
    return Case(MODELS[name], shards=gpus, options={"checkpointing": twice, **TRAINING[training]})


def on_device(wanted_case: Case) -> float:
    """Bytes of tensors on a GPU by the plan, in GB."""
    return (planned(wanted_case).total - SHARD_BASE_GIB * GIB) / GB


def fits(needed: float) -> str:
    sizes = [str(size // GB) for size in GPU_SIZES if needed * GB + sum(GPU_ALLOWANCES.values()) <= size]
    return " and ".join(sizes) or "no"


def shard_rows() -> Iterator[str]:
    yield "| model | training | GPUs | state | computed twice | fits 80, 141 GB | kept | fits | host |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in MODELS:
        for training in TRAINING:
            for gpus in GPUS:
                twice, gathered = (case(name, training, gpus, twice=twice) for twice in (True, False))
                trained = facts_of(name).trained_parameters(twice.config("m").trainer.lora)
                host = COMMIT_BYTES * trained / gpus / GB
                bytes_of = [on_device(twice), on_device(gathered)]
                sums = " | ".join(f"{needed:.1f} | {fits(needed)}" for needed in bytes_of)
                yield f"| {name} | {training} | {gpus} | {planned(twice).state / GB:.1f} | {sums} | {host:.1f} |"


def replica_rows() -> Iterator[str]:
    yield "| model | weights | on 80 GB | on 141 GB |"
    yield "|---|---|---|---|"
    for name in MODELS:
        facts = facts_of(name)
        weights = 2 * facts.num_parameters
        texts = []
        for size in GPU_SIZES:
            ranks = next(n for n in (1, 2, 4, 8) if 0.8 * UTILIZATION * size * n >= weights)
            cache = (UTILIZATION * size - ENGINE_BYTES) * ranks - weights
            tokens = int(cache / (2 * facts.kv_values_per_token))
            texts.append(f"{ranks} GPU{'s' if ranks > 1 else ''}, {tokens / 1e6:.2f} million tokens")
        yield f"| {name} | {weights / GB:.1f} GB | {texts[0]} | {texts[1]} |"


def render() -> str:
    """The whole page."""
    page = with_part(TARGET.read_text(encoding="utf-8"), "shards", "\n".join(shard_rows()))
    return with_part(page, "replicas", "\n".join(replica_rows()))


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
