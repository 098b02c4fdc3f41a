"""Counts the bytes that a layer of a model moves through a GPU's memory, on a machine without one.

An uncompiled layer is counted on the meta device: each operation reads its inputs and writes its outputs. A compiled
layer is counted by inductor: it lowers and fuses the layer as for Triton, and says what each kernel reads and writes.
Matrix products and attention are counted apart, because their time is that of their arithmetic.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from _common import ROOT
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

import trainer.attention
from gpu_check.shapes import SHAPES

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "attn")
"""Parts of the names of operations whose bytes are counted apart."""


@dataclass(frozen=True)
class Traffic:
    """What a layer does in a forward and a backward pass, without products and attention."""

    nbytes: int
    launches: int


def eager_layer(size: str, tokens: int, sequences: int) -> Traffic:
    """Counts an uncompiled layer of the shape `size` for a packed row of `tokens` tokens."""
    with Operations() as operations:
        _pass(size, tokens, sequences, "meta", compiled=None)
    return Traffic(operations.counts["bytes"], operations.counts["launches"])


def compiled_layer(size: str, tokens: int, sequences: int) -> Traffic:
    """Counts a compiled layer of the shape `size` for a packed row of `tokens` tokens."""
    counts: Counter[str] = Counter()
    backend = partial(compile_fx, inner_compile=partial(_count_graph, counts))
    with inductor.patch(cpu_backend="triton"):
        _pass(size, tokens, sequences, "cpu", compiled=backend)
    return Traffic(counts["bytes"], counts["launches"])


def logit_bytes() -> tuple[float, float]:
    """Returns the bytes that tensor operations and that kernels move for each logit of a model in bfloat16 with logits
    in float32, both passes and the products' part included: counted in Triton's interpreter."""
    oracle = ROOT / "tests" / "unit" / "trainer" / "head_kernels_oracle.py"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", str(oracle), "cpu"]
    counted = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    return counted["operations"][1], counted["kernels"][1]


class Operations(TorchDispatchMode):
    """Counts the bytes that operations on tensors of a device read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        apart = func.is_view or "empty" in func.name() or any(name in func.name() for name in PRODUCTS)
        if not apart and func.namespace == "aten" and func.name() not in ("aten::detach", "aten::_unsafe_view"):
            tensors = {id(t): t for t in tree_leaves([args, kwargs, result]) if isinstance(t, Tensor)}
            self.counts["bytes"] += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors.values())
            self.counts["launches"] += 1
        return result


def _pass(size: str, tokens: int, sequences: int, device: str, compiled: Any) -> None:
    """Runs a random layer in bfloat16 forward and backward. `compiled`: the compiler's backend, or None."""
    described = dict(SHAPES[size])
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    config._attn_implementation = trainer.attention.PACKED
    with torch.device(device):
        layer = Qwen3DecoderLayer(config, 0).to(torch.bfloat16)
        hidden = torch.zeros(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        positions = Qwen3RotaryEmbedding(config)(hidden.detach(), torch.arange(tokens)[None])
        starts = torch.arange(sequences + 1, dtype=torch.int32) * (tokens // sequences)
        upstream = torch.zeros_like(hidden)
    forward = torch.compile(layer.forward, backend=compiled, dynamic=False, fullgraph=True) if compiled else layer
    lengths = {"cu_seq_lens_q": starts, "max_length_q": tokens // sequences}
    with patch.object(trainer.attention, "has_kernel", lambda device, dtype: True):
        forward(hidden, position_embeddings=positions, **lengths).backward(upstream)


def _count_graph(counts: Counter[str], module: torch.fx.GraphModule, inputs: Sequence[Any], **_: object) -> Any:
    """Takes the place of inductor's compiler: lowers and fuses a graph, and counts its kernels. Returns a function that
    computes nothing, and returns tensors of the right shapes."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    output.meta.setdefault("original_output_strides", [None] * len(output.args[0]))
    output.meta.setdefault("user_visible_output_idxs", [])
    graph = GraphLowering(module)
    with DebugContext(), V.set_graph_handler(graph), V.set_fake_mode(detect_fake_mode(inputs)):
        graph.run(*inputs)
        graph._update_scheduler()
        for kernel in graph.scheduler.nodes:
            if not isinstance(kernel, ExternKernelSchedulerNode | NopKernelSchedulerNode):
                counts["bytes"] += kernel.get_read_write_buffers_sizes()
                counts["launches"] += 1
    shapes = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in output.args[0]]

    def run(arguments: list[Any]) -> list[Any]:
        arguments.clear()
        return [torch.empty_strided(s.shape, s.stride(), dtype=s.dtype) if isinstance(s, Tensor) else s for s in shapes]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
