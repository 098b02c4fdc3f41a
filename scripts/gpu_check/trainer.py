"""The trainer alone, without Ray and vLLM: its numbers against float32 and Hugging Face, its memory, its speed."""

from __future__ import annotations

import time
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from gpu_check.checks import Check, Context, Failed, Figures, NotRun
from gpu_check.shapes import SHAPES, TARGET_MFU, end_shard, make_batch, make_config, make_model, make_shard, median_step

if TYPE_CHECKING:
    from torch import Tensor

    from trireme.config import Config
    from trireme.core.types import TokenBatch

LENGTHS = (30, 3, 3, 4, 5, 29, 7, 1)
PREFIX = 20
"""Tokens with which all sequences begin, if they are as long; fewer common tokens are never shared."""
LOGPROB_BOUNDS = {"small": 0.06, "small with experts": 0.2}
"""In bfloat16 against float32, on random models of two layers: the largest difference of a log-probability, in nats.
Where two experts are as good as equal, rounding chooses."""
COSINE_BOUND = 0.98
NORM_BOUND = 0.05
"""The least cosine of the gradients, and the share by which their norms may differ."""
ATTENTION_BOUND = 0.03
ATTENTION_GRADIENT_BOUND = 0.02
ATTENTION_LENGTHS = (170, 200, 40, 3, 300, 1)
NOTHING_SHARED = (0,) * len(ATTENTION_LENGTHS)
ATTENTION_SHARED = (0, 150, 40, 3, 2, 1)
"""With how many tokens of the sequence before it each begins. Some have no token of their own."""
WAYS: dict[str, dict[str, object]] = {
    "packed": {"trainer__packing": "packed"},
    "rows": {"trainer__packing": "rows"},
    "checkpointing": {"trainer__checkpointing": True},
    "uncompiled": {"trainer__compile": False},
    "uncompiled, checkpointing": {"trainer__compile": False, "trainer__checkpointing": True},
    "shared prefixes": {"trainer__share_prefixes": "on"},
    "shared prefixes, uncompiled": {"trainer__share_prefixes": "on", "trainer__compile": False},
    "offload": {"trainer__offload": "cpu"},
    "master in bfloat16": {"trainer__master_dtype": "bfloat16"},
}
"""Ways to compute the same step."""
ONLY_GPU = {
    "offload": "there is nothing to offload",
    **dict.fromkeys(
        ("uncompiled", "uncompiled, checkpointing", "shared prefixes, uncompiled"), "nothing is compiled on CPUs"
    ),
}
"""Ways that show nothing on CPUs, and why."""
TOKENS = 16384
SEQUENCES = 8
WARM_UP = 2
REPEATS = 4
KEPT_FORM = "kept"
HOST_FORM = "in host memory"
LAYER_FORMS = {KEPT_FORM: False, HOST_FORM: "offload", "computed twice": True}
"""Values of `trainer.checkpointing`."""
HOST_TARGET = 1.15
"""Seconds of a layer with its activations in host memory, over those of a kept one."""
GROUP = (16, 2000, 200)
SMALL_GROUP = (8, 80, 8)
"""Answers to a prompt, its tokens, and those of an answer."""
TARGET_SPEEDUP = 3.5
"""Seconds of a step with each answer whole, over those with the prompt of GROUP computed once. Distinct tokens are 6.8
times fewer."""
TARGET_SUMS_MS = 40.0
"""For 16 GB of weights on an H100."""
GIB = 2**30


# ------------------------------------------------------------------------------------------------------- environment


def _machine(context: Context) -> Figures:
    """Returns versions other than the pinned ones, and what the device gives at most."""
    import torch

    size, times = (8192, 10) if context.on_gpu else (256, 1)
    a, b = (torch.randn(size, size, device=context.torch_device, dtype=torch.bfloat16) for _ in range(2))
    figures: dict[str, object] = {**_versions()}
    if context.on_gpu:
        free, total = torch.cuda.mem_get_info()
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        figures |= {"GPU": torch.cuda.get_device_name(), "capability": capability, "CUDA": torch.version.cuda}
        figures |= {"memory, GiB": total / GIB, "free, GiB": free / GIB}
    return figures | {"bfloat16 products, TFLOP/s": 2 * size**3 / _seconds(lambda: a @ b, times) / 1e12}


def _versions() -> dict[str, str]:
    """Returns the versions of torch and transformers, and marks versions that differ from the pinned ones."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    pinned = dict(line.split("==") for line in project["dependencies"] if "==" in line)
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {
        name: installed
        if installed.partition("+")[0] == pinned[name]
        else f"{installed} (the pinned one is {pinned[name]})"
        for name, installed in versions.items()
    }


def _seconds(work: Callable[[], object], times: int) -> float:
    """Returns the mean seconds of `work`, after one that is not counted."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    work()
    wait()
    started = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - started) / times


# ------------------------------------------------------------------------------------------------------------ numbers


def check_attention(device: str, window: int | None, shared: Sequence[int] = NOTHING_SHARED) -> Figures:
    """Compares sequences of ATTENTION_LENGTHS in a packed row, or in a row of distinct tokens if they share any (on
    GPUs by the variable-length kernel in bfloat16), with each sequence alone, in float32: outputs and gradients.
    `shared`: with how many tokens of the sequence before it each begins. Raises Failed."""
    import torch

    from trainer.attention import packed_attention
    from trainer.shared_rows import SharedRow

    on_gpu = device == "gpu"
    dtype, device_type = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    row = SharedRow(np.cumsum([0, *ATTENTION_LENGTHS]), np.arange(len(ATTENTION_LENGTHS)), shared)
    sequences = row.arguments(lambda values: torch.from_numpy(values).to(device_type))
    path = sequences["path"]
    added = np.unique(row.path, return_index=True)[1]  # the places along the path of the row's tokens
    if not any(shared):
        del sequences["path"]
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, len(row.index), 64, device=device_type, dtype=dtype, requires_grad=True)
        for heads in (8, 2, 2)
    )
    out, _ = packed_attention(
        torch.nn.Module(), query, key, value, None, scaling=0.125, sliding_window=window, **sequences
    )
    exact = _attention_alone([t.float()[0, :, path].split(ATTENTION_LENGTHS, 1) for t in (query, key, value)], window)
    exact = exact[torch.from_numpy(added).to(device_type)]
    upstream = torch.randn_like(exact)
    got = torch.autograd.grad(out[0], (query, key, value), upstream.to(dtype))
    exact_gradients = torch.autograd.grad(exact, (query, key, value), upstream)
    moved = [
        float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, exact_gradients, strict=True)
    ]
    figures = {
        "largest difference": float((out[0].float() - exact).detach().abs().max()),
        "of gradients, relative": max(moved),
    }
    _within(figures, {"largest difference": ATTENTION_BOUND, "of gradients, relative": ATTENTION_GRADIENT_BOUND})
    return figures


def _attention_alone(sequences: Sequence[Sequence[Tensor]], window: int | None) -> Tensor:
    """Returns causal attention of each sequence by itself, written out: [T, heads, dim]. `sequences`: queries
    [heads, L, dim] and keys and values [key heads, L, dim] of each."""
    import torch

    outputs = []
    for query, key, value in zip(*sequences, strict=True):
        key, value = (heads.repeat_interleave(len(query) // len(heads), 0) for heads in (key, value))
        back = torch.arange(query.shape[1], device=query.device)
        back = back[:, None] - back
        if window is None:
            visible = back >= 0
        else:
            visible = (back >= 0) & (back < window)
        scores = (query @ key.transpose(1, 2) * 0.125).masked_fill(~visible, float("-inf"))
        outputs.append((scores.softmax(-1) @ value).transpose(0, 1))
    return torch.cat(outputs)


@dataclass(frozen=True)
class Step:
    """The results of one step on a shard."""

    logprobs: np.ndarray
    """float32 [T]"""
    gradient: Tensor
    """The whole gradient, float32."""
    norm: float
    """The gradient's norm, divided by the normaliser."""


def make_step(model: str, device: str, **options: object) -> Step:
    """Makes a shard of `model` go through a step: logprobs, gradient, update, and publication. Prefixes are shared only
    if `options` say so. Raises Failed."""
    import torch

    from trainer.batching import scatter_outputs
    from trireme.core.types import AdamParams

    defaults = {"trainer__micro_batch_tokens": 40, "trainer__share_prefixes": "off"}
    config = make_config(model, device, **(defaults | options))
    shard = make_shard(config)
    batch = parity_batch()
    output = shard.forward_backward(batch, "importance_sampling", {}, None)
    if (output.distinct < output.tokens) != (config.trainer.share_prefixes == "on"):
        share = config.trainer.share_prefixes
        raise Failed(f"{output.distinct} of {output.tokens} tokens were computed, with share_prefixes = {share}")
    gradient = torch.cat([p.grad.full_tensor().flatten().float().cpu() for p in shard._parameters])
    norm = shard.optim_step(AdamParams(learning_rate=1e-3), 50.0).metrics["grad_norm"]
    published = shard.publish_weights(1)
    if not published.manifest.entries or not published.source:
        raise Failed(f"{len(published.manifest.entries)} tensors in {len(published.source)} buckets were published")
    return Step(scatter_outputs(batch, [output]), gradient, norm)


def parity_batch() -> TokenBatch:
    return make_batch(LENGTHS, SHAPES["small"]["vocab_size"], prefix=PREFIX)


def logprobs_by_hugging_face(model: str) -> np.ndarray:
    """Computes the batch's log-probabilities with the model's own class in float32 on the CPU, each datum alone."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    batch = parity_batch()
    rows = []
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        logits = policy(torch.from_numpy(batch.tokens[start:end]).long()[None]).logits[0] / batch.temperatures[0]
        targets = torch.from_numpy(batch.columns["target_tokens"][start:end]).long()
        rows.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].detach())
    return torch.cat(rows).numpy()


@dataclass(frozen=True)
class Exact:
    """The reference for steps in bfloat16."""

    shape: str
    """The name of the model's shape."""
    model: str
    """Its directory."""
    step: Step
    """Padded rows, in float32."""
    logprobs: np.ndarray
    """By Hugging Face in float32, each datum alone."""

    @classmethod
    def of(cls, shape: str, device: str, directory: Path) -> Exact:
        """Makes a random model of a shape in `directory`, and computes both."""
        model = make_model(directory, shape)
        step = make_step(model, device, model__dtype="float32", trainer__packing="rows")
        return cls(shape, model, step, logprobs_by_hugging_face(model))


def check_way(exact: Exact, device: str, way: str) -> Figures:
    """Compares a step in bfloat16 with one in float32: log-probabilities, and the gradient's direction and length.
    Raises Failed."""
    import torch

    step = make_step(exact.model, device, model__dtype="bfloat16", **WAYS[way])
    difference = np.abs(step.logprobs - exact.logprobs)
    cosine = float(torch.nn.functional.cosine_similarity(step.gradient, exact.step.gradient, dim=0))
    figures = {
        "largest difference of logprobs": float(difference.max()),
        "mean": float(difference.mean()),
        "1 - cosine of gradients": 1 - cosine,
        "norm, relative": abs(step.norm / exact.step.norm - 1),
    }
    bounds = {
        "largest difference of logprobs": LOGPROB_BOUNDS[exact.shape],
        "1 - cosine of gradients": 1 - COSINE_BOUND,
    }
    _within(figures, bounds | {"norm, relative": NORM_BOUND})
    return figures


def _within(figures: Mapping[str, float], bounds: Mapping[str, float]) -> None:
    """Raises Failed unless all figures with a bound are at most that."""
    wrong = [f"{name} {figures[name]:.3g}, at most {bound:.3g} expected" for name, bound in bounds.items()
             if not figures[name] <= bound]  # fmt: skip
    if wrong:
        raise Failed("; ".join(wrong))


def _in_float32(context: Context) -> Figures:
    """Compares padded rows in float32 with Hugging Face; keeps both for the checks in bfloat16."""
    exact = Exact.of("small", context.device, context.directory / "small")
    context.memory["exact"] = exact
    figures = {"largest difference of logprobs": float(np.abs(exact.step.logprobs - exact.logprobs).max())}
    _within(figures, {"largest difference of logprobs": 1e-4})
    return figures


def _way(way: str, context: Context) -> Figures:
    if "exact" not in context.memory:
        raise NotRun("there is nothing to compare with, as the step in float32 failed")
    return check_way(context.memory["exact"], context.device, way)


def _attention(context: Context, shared: Sequence[int] = NOTHING_SHARED) -> Figures:
    figures: dict[str, float] = {}
    for window in (None, 8):
        name = f", window {window}" if window else ""
        compared = check_attention(context.device, window, shared)
        figures |= {f"{figure}{name}": value for figure, value in compared.items()}
    return figures


def _waits(prefix: int, context: Context) -> Figures:
    """Counts how often the host waits for the GPU in a pass over sequences that begin with the same `prefix` tokens, as
    far as PyTorch sees it. Raises Failed for more than two waits for each further micro-batch."""
    import torch

    tokens = 128 - prefix  # of two sequences
    options: dict[str, object] = {"trainer__micro_batch_tokens": tokens, "trainer__share_prefixes": "on"}
    config = make_config(_model("small", context), "gpu", model__dtype="bfloat16", **options)
    shard = make_shard(config)
    counts = []
    for micro_batches in (1, 5):
        batch = make_batch([64, 64] * micro_batches, SHAPES["small"]["vocab_size"], prefix=prefix)
        shard.forward_backward(batch, "ppo", {}, None)  # what comes first may compile something
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                shard.forward_backward(batch, "ppo", {}, None)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(len(caught))
    figures = {"waits in one micro-batch": counts[0], "waits for each further one": (counts[1] - counts[0]) / 4}
    _within(figures, {"waits for each further one": 2})
    return figures


# --------------------------------------------------------------------------------------------------- memory and speed


def _sums(context: Context) -> Figures:
    """Sums tensors of random bits, on a GPU in the shapes of Qwen3-8B, in bfloat16. Raises Failed if the sums of the
    largest differ from those of its copy on the CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trireme.transports.tensor_sums import TensorPart, c_strides, part_sums, tensor_sums

    if context.on_gpu:
        shape = dict(SHAPES["8b"])
    else:
        shape = dict(SHAPES["small"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape))
    sizes = [parameter.shape for parameter in model.parameters()]
    tensors = [torch.randn(size, dtype=torch.bfloat16, device=context.torch_device) for size in sizes]
    parts = [TensorPart(tensor, 0, c_strides(tensor.shape), tensor.dtype) for tensor in tensors]
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        started = time.perf_counter()
        sums = part_sums(parts).cpu()
        seconds.append(time.perf_counter() - started)
    largest = max(range(len(tensors)), key=lambda number: tensors[number].numel())
    expected = tensor_sums(tensors[largest].cpu())
    if not torch.equal(sums[largest], expected):
        raise Failed(f"the sums of a tensor are {sums[largest].tolist()}, on the CPU {expected.tolist()}")
    figures = {"ms": 1e3 * float(np.median(seconds[WARM_UP:])), "GB": sum(tensor.nbytes for tensor in tensors) / 1e9}
    if context.on_gpu and figures["ms"] > TARGET_SUMS_MS:
        figures["above the target of"] = TARGET_SUMS_MS
    return figures


def _head(context: Context) -> Figures:
    """Compares the output matrix and its loss by kernels with the same by tensor operations, for random hidden states
    in the shape of 0.6B and with temperatures: log-probabilities, gradients, and the seconds of both passes. Raises
    Failed."""
    import torch

    from trainer.logprobs import LOGPROB_BOUND, SelectedLogprobs, why_unfused

    shape, device = SHAPES["0.6b"], context.torch_device
    figures: dict[str, float] = {}
    bounds: dict[str, float] = {}
    for head_dtype in (torch.float32, torch.bfloat16):
        reason = why_unfused(torch.device(device), torch.bfloat16, head_dtype, shape["vocab_size"])
        if reason:
            raise Failed(f"kernels and tensor operations: {reason}")
        sizes = (TOKENS, shape["vocab_size"])
        hidden, weight = (
            torch.randn(size, shape["hidden_size"], device=device, dtype=torch.bfloat16).div_(4).requires_grad_()
            for size in sizes
        )
        targets = torch.randint(shape["vocab_size"], (TOKENS,), device=device)
        temperature = 0.5 + torch.rand(TOKENS, device=device)
        upstream = torch.randn(TOKENS, device=device)

        factors = [hidden, weight]

        def both_passes(
            fused: bool,
            factors: Sequence[Tensor] = factors,
            options: Sequence[object] = (targets, temperature, head_dtype, None),
            upstream: Tensor = upstream,
        ) -> list[Tensor]:
            p = SelectedLogprobs.apply(*factors, *options, fused)
            return [p.detach(), *torch.autograd.grad(p, factors, upstream)]

        name = f"logits in {str(head_dtype).removeprefix('torch.')}: "
        fused, plain = both_passes(True), both_passes(False)
        figures[name + "largest difference of logprobs"] = float((fused[0] - plain[0]).abs().max())
        figures[name + "of gradients, relative"] = max(
            float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(fused[1:], plain[1:], strict=True)
        )
        bounds[name + "largest difference of logprobs"] = LOGPROB_BOUND
        bounds[name + "of gradients, relative"] = torch.finfo(torch.bfloat16).eps
        del fused, plain  # their memory is for the chunks
        for form, is_fused in (("kernels", True), ("operations", False)):
            figures[f"{name}s by {form}"] = _seconds(partial(both_passes, is_fused), REPEATS)
    _within(figures, bounds)
    return figures


def _speed(shape: str, compiled: bool, context: Context) -> Figures:
    """Trains a random model on 16k tokens in one packed micro-batch: tokens per second, MFU, and memory against the
    plan."""
    import torch

    from trireme.plan.memory import LOGIT_BYTES, MOST_LOGITS
    from trireme.plan.needs import GPU_TOLERANCE

    shape, tokens = (shape, TOKENS) if context.on_gpu else ("small", 512)
    context.need_time(60 if shape == "4b" else 30, "loading and training it")
    model = _model(shape, context)
    options: dict[str, object] = {"trainer__micro_batch_tokens": tokens, "trainer__compile": compiled}
    config = make_config(model, context.device, model__dtype="bfloat16", **options)
    end_shard()
    planned = _planned(config, context)
    batch = make_batch([tokens // SEQUENCES] * SEQUENCES, SHAPES[shape]["vocab_size"], temperature=1.0)
    shard = make_shard(config)
    seconds, at_peak, peak = median_step(shard, batch, WARM_UP, REPEATS)
    figures: dict[str, object] = {"tokens/s": tokens / seconds, "s/step": seconds}
    if at_peak:
        figures["MFU"] = at_peak / seconds
        figures |= {} if at_peak / seconds >= TARGET_MFU else {"below the target of": TARGET_MFU}
    if context.on_gpu:
        segments = torch.cuda.memory_snapshot()
        if not any(segment["is_expandable"] for segment in segments):
            raise Failed("no segment of PyTorch's allocator can grow, although the shard asks for that")
        reserved = sum(segment["total_size"] for segment in segments)
        figures |= {"memory, GiB": peak / GIB, "reserved, GiB": reserved / GIB, "planned, GiB": planned / GIB}
        logits = MOST_LOGITS * LOGIT_BYTES
        if peak > GPU_TOLERANCE * planned + logits:
            raise Failed(
                f"a shard took {peak / GIB:.1f} GiB, the plan says {planned / GIB:.1f} and up to {logits / GIB:g} for "
                f"logits; {figures}"
            )
    return figures


def _group(context: Context) -> Figures:
    """Trains answers to one prompt, which is computed once or for each answer."""
    context.need_time(60, "training it both ways")
    shape, sizes = ("0.6b", GROUP) if context.on_gpu else ("small", SMALL_GROUP)
    return check_group(_model(shape, context), shape, context.device, sizes)


def check_group(model: str, shape: str, device: str, sizes: tuple[int, int, int]) -> Figures:
    """Compares a step over answers to a prompt that is computed once with one that computes it for each answer:
    log-probabilities, the gradient's norm, and seconds. `sizes`: as GROUP. Raises Failed."""
    from trainer.batching import scatter_outputs
    from trireme.core.types import AdamParams

    answers, prompt, answer = sizes
    batch = make_batch([prompt + answer] * answers, SHAPES[shape]["vocab_size"], temperature=1.0, prefix=prompt)
    logprobs: list[np.ndarray] = []
    norms: list[float] = []
    tokens: list[int] = []
    seconds: list[float] = []
    for share in ("off", "on"):
        shard = make_shard(make_config(model, device, model__dtype="bfloat16", trainer__share_prefixes=share))
        output = shard.forward_backward(batch, "importance_sampling", {}, None)
        logprobs.append(scatter_outputs(batch, [output]))
        norms.append(shard.optim_step(AdamParams(learning_rate=0.0), 1.0).metrics["grad_norm"])
        tokens.append(output.distinct)
        seconds.append(median_step(shard, batch, WARM_UP, REPEATS)[0])
        tolerance = shard.proof.model.tolerance
        del shard  # its memory is for the next one
    figures = {
        "largest difference of logprobs": float(np.abs(logprobs[1] - logprobs[0]).max()),
        "norm, relative": abs(norms[1] / norms[0] - 1),
        "tokens, whole over shared": tokens[0] / tokens[1],
        "s/step, whole": seconds[0],
        "s/step, shared": seconds[1],
        "whole over shared": seconds[0] / seconds[1],
    }
    # Both have rounding errors, which may be larger than in the few tokens of the proof.
    _within(figures, {"largest difference of logprobs": 2 * tolerance, "norm, relative": NORM_BOUND})
    if device == "gpu" and figures["whole over shared"] < TARGET_SPEEDUP:
        figures["below the target of"] = TARGET_SPEEDUP
    return figures


def _model(shape: str, context: Context) -> str:
    """Returns the directory of a random model, made once."""
    directory = context.directory / shape
    if directory.exists():
        return str(directory)
    return make_model(directory, shape, context.device)


def _planned(config: Config, context: Context) -> int:
    """Returns the bytes that the plan gives the shard. Raises NotRun if this device has less."""
    import torch

    from trireme.config.model_facts import ModelFacts
    from trireme.plan.memory import gpu_room, host_room, shard_memory
    from trireme.process.machine import this_machine

    facts = ModelFacts.of(config, required=True)
    assert facts is not None, "required"
    on_gpu = context.on_gpu
    if on_gpu:
        room = gpu_room(*torch.cuda.mem_get_info())
    else:
        room = host_room(this_machine().memory_bytes, config)
    planned = shard_memory(config, facts, on_gpus=on_gpu, room=room).total
    if planned > room:
        raise NotRun(f"the plan says {planned / GIB:.1f} GiB, here is room for {room / GIB:.1f} GiB")
    return planned


def _layers(context: Context) -> Figures:
    """Trains layers in the shape of 4B that keep their activations, compute them twice, or have them in host memory
    (all but the last two): the seconds of such a layer, over those of one that is kept, and peaks of memory. Raises
    Failed if log-probabilities or the gradient's norm differ from those of kept layers."""
    from trainer import model as of_model
    from trireme.core.types import AdamParams
    from trireme.plan.memory import LAYERS_ON_DEVICE, ShardMemory, shard_memory

    context.need_time(120, "training layers in three ways")
    shape, tokens, layers = ("4b", TOKENS, 12) if context.on_gpu else ("small", 64, 3)
    vocabulary = 512  # so small a head costs next to nothing
    model = make_model(
        context.directory / "layers", shape, context.device, num_hidden_layers=layers, vocab_size=vocabulary
    )
    batch = make_batch([tokens // SEQUENCES] * SEQUENCES, vocabulary, temperature=1.0)

    def without_room(*args: Any, **options: Any) -> ShardMemory:
        memory = shard_memory(*args, **options)
        return replace(memory, kept_tokens=0 if memory.movable_layers else memory.kept_tokens)

    seconds: dict[str, float] = {}
    figures: dict[str, object] = {}
    expected = None
    for form, value in LAYER_FORMS.items():
        options: dict[str, object] = {"trainer__checkpointing": value, "trainer__micro_batch_tokens": tokens}
        config = make_config(model, context.device, **options, trainer__compile=context.on_gpu)
        with patch.object(of_model, "shard_memory", without_room):
            shard = make_shard(config)
        output = shard.forward_backward(batch, "ppo", {}, None)
        norm = shard.optim_step(AdamParams(learning_rate=0.0), float(tokens)).metrics["grad_norm"]
        expected = expected or (norm, output.logprobs)
        if norm != expected[0] or (output.logprobs != expected[1]).any():
            raise Failed(f"{form}: the gradient's norm is {norm}, of kept layers {expected[0]}, or logprobs differ")
        step_s, _, peak = median_step(shard, batch, WARM_UP, REPEATS)
        seconds[form] = step_s / layers
        if form == HOST_FORM:  # the last layers are kept
            seconds[form] = (step_s - LAYERS_ON_DEVICE * seconds[KEPT_FORM]) / (layers - LAYERS_ON_DEVICE)
        figures |= {f"s/layer, {form}": seconds[form], f"GiB, {form}": peak / GIB}
        figures[f"{form}, over {KEPT_FORM}"] = seconds[form] / seconds[KEPT_FORM]
        del shard  # its memory is for the next one
    if context.on_gpu and seconds[HOST_FORM] > HOST_TARGET * seconds[KEPT_FORM]:
        figures[f"{HOST_FORM}: above the target of"] = HOST_TARGET
    spared = [form for form in LAYER_FORMS if form != KEPT_FORM]
    return figures | {"cheapest without keeping": min(spared, key=lambda form: seconds[form])}


NO_WAITS = "there is nothing to wait for"
NEEDS = ("torch", "transformers", "pydantic", "peft", "xxhash", "numba")
CHECKS: tuple[Check, ...] = (
    Check("the machine", _machine, NEEDS),
    Check("attention of packed rows", _attention, NEEDS),
    Check("attention over shared prefixes", partial(_attention, shared=ATTENTION_SHARED), NEEDS),
    Check("rows in float32 against Hugging Face", _in_float32, NEEDS),
    *(
        Check(
            f"bfloat16 against float32: {way}",
            partial(_way, way),
            NEEDS,
            only_gpu=ONLY_GPU.get(way, ""),
        )
        for way in WAYS
    ),
    Check("waits of the host", partial(_waits, 0), NEEDS, only_gpu=NO_WAITS),
    Check("waits of the host with shared prefixes", partial(_waits, 48), NEEDS, only_gpu=NO_WAITS),
    Check("sums of published tensors", _sums, NEEDS),
    Check("the head by kernels", _head, NEEDS, only_gpu="on CPUs it is computed by tensor operations"),
    Check("layers kept, computed twice, in host memory", _layers, NEEDS),
    Check("0.6B: speed and memory", partial(_speed, "0.6b", False), NEEDS),
    Check(
        "0.6B, compiled: speed and memory",
        partial(_speed, "0.6b", True),
        NEEDS,
        only_gpu="for CPUs another compiler makes other code, in minutes",
    ),
    Check("0.6B: 16 answers to a prompt that is computed once", _group, NEEDS),
    Check("4B: speed and memory", partial(_speed, "4b", False), NEEDS, only_gpu="it is too large"),
)
