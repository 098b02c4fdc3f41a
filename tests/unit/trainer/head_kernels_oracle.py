"""Compares the kernels of the head with float64, and counts the bytes that they and the products move. Run it in a
process of its own: with a GPU, or with TRITON_INTERPRET=1, where Triton computes a program by numpy.

    python head_kernels_oracle.py cpu|cuda

Prints, as JSON, the largest difference of each result, and bytes a logit (on a CPU).
"""

import json
import sys
from collections import defaultdict
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from trainer import logprobs
from trainer.head_kernels import head_backward, head_forward
from trainer.logprobs import SelectedLogprobs, why_unfused

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
HEADS = ((FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16))
"""Dtypes of model and logits."""
ROWS, HIDDEN = 5, 24
BOUNDS = np.array([0, 1, 1, 4, 6, 8])
"""Rows with one target, none, three and two, in each chunk of ROWS rows."""
ROUNDING = {FLOAT32: 1e-5, BFLOAT16: 2**-7}
"""By the dtype of gradients, in parts of the gradient's norm. Triton's interpreter cuts off where a GPU rounds."""


def worst_of(differences: dict[str, list[float]]) -> dict[str, float]:
    return {name: max(values) for name, values in differences.items()}


def some_logits(vocabulary: int, dtype: torch.dtype, device: str) -> Tensor:
    """Returns logits [7, V] about 40, some of them -inf: a row's first block, the end of a row, all but one of a row,
    and, as for vocabularies that are padded, one of ten elsewhere."""
    logits = 40 + 6 * torch.randn(7, vocabulary, device=device)
    logits[4:].masked_fill_(torch.rand(3, vocabulary, device=device) < 0.1, float("-inf"))
    logits[1, : vocabulary // 2 + 1] = float("-inf")
    logits[2, -2:] = float("-inf")
    logits[3, 1:] = float("-inf")
    logits[:, 0] = 30.0
    return logits.to(dtype)


def compare_kernels(vocabulary: int, dtype: torch.dtype, out: torch.dtype, device: str) -> dict[str, float]:
    """Compares the two kernels, without temperatures and with them."""
    rows = torch.tensor([0, 0, 0, 2, 3, 5, 5, 6], device=device)
    last = vocabulary - 1
    targets = torch.tensor([0, last, last, 1, 0, 0, vocabulary // 2, 0], device=device)
    differences: defaultdict[str, list[float]] = defaultdict(list)
    for temperatures in (None, torch.linspace(0.5, 1.5, 7)):
        logits = some_logits(vocabulary, dtype, device)
        logits[5, vocabulary // 2] = 41.0
        temperatures = None if temperatures is None else temperatures.to(device)
        exact = logits.double().requires_grad_()
        log_shares = (exact if temperatures is None else exact / temperatures[:, None]).log_softmax(-1)
        p = log_shares[rows, targets]
        upstream = torch.randn(1, device=device).expand(8)  # as a sum's: one element in memory
        (gradient,) = torch.autograd.grad((p * upstream).sum(), exact)
        normalizers, got = head_forward(logits, temperatures, targets, rows)
        got_gradient = head_backward(logits, temperatures, targets, rows, normalizers, upstream, out)
        assert got_gradient.dtype == out
        assert (got_gradient.data_ptr() == logits.data_ptr()) is (dtype == out), "in place where that is possible"
        differences["logprobs"].append(float((got - p).detach().abs().max()))
        differences[f"gradient in {out}"].append(float((got_gradient - gradient).norm() / gradient.norm()))
    return worst_of(differences)


def inputs(vocabulary: int, chunks: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Returns arguments of SelectedLogprobs without the dtype of logits, and the gradient of its result."""
    rows = chunks * ROWS
    bounds = np.concatenate([[0], *(BOUNDS[1:] + number * BOUNDS[-1] for number in range(chunks))])
    hidden, weight = (torch.randn(n, HIDDEN, device=device).to(dtype).requires_grad_() for n in (rows, vocabulary))
    targets = torch.randint(vocabulary, (int(bounds[-1]),), device=device)
    return hidden, weight, targets, 0.5 + torch.rand(rows, device=device), bounds, torch.randn(len(targets)).to(device)


def compare_whole(vocabulary: int, dtype: torch.dtype, head_dtype: torch.dtype, device: str) -> dict[str, float]:
    """Compares the whole head, over three chunks, with float64. Logits in bfloat16 are rounded: with tensor
    operations."""
    hidden, weight, targets, temperature, bounds, upstream = inputs(vocabulary, 3, dtype, device)
    if head_dtype == FLOAT32:
        exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
        rows = np.repeat(np.arange(len(hidden)), np.diff(bounds))
        p = ((exact[0] @ exact[1].T) / temperature[:, None]).log_softmax(-1)[rows, targets]
    else:
        exact = [hidden, weight]
        p = SelectedLogprobs.apply(hidden, weight, targets, temperature, head_dtype, bounds)
    gradients = torch.autograd.grad(p, exact, upstream.to(p.dtype))
    got = SelectedLogprobs.apply(hidden, weight, targets, temperature, head_dtype, bounds, True)
    got_gradients = torch.autograd.grad(got, (hidden, weight), upstream)
    off = [float((a - b).norm() / b.norm()) for a, b in zip(got_gradients, gradients, strict=True)]
    return {"logprobs": float((got - p).detach().abs().max()), f"gradient in {dtype}": max(off)}


class Traffic(TorchDispatchMode):
    """Counts the bytes of a chunk's logits, or of their gradient, that operations and kernels read and write."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.bytes = 0
        self._numbers = ROWS * vocabulary
        self._in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        kwargs.pop("out", None)  # is the result too
        if not (self._in_kernel or func.is_view or "empty" in func.name()):
            self.bytes += sum(map(self._size, tree_leaves([args, kwargs, result])))
        return result

    def _size(self, tensor: object) -> int:
        if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() == self._numbers * tensor.itemsize:
            return tensor.nbytes
        return 0

    @contextmanager
    def kernels(self) -> Any:
        """Counts what kernels load and store, in the block."""
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__

        def loading(itself: Any, ptrs: Any, mask: Any, *options: Any) -> Any:
            value = load(itself, ptrs, mask, *options)
            self.bytes += int(mask.data.sum()) * value.data.itemsize
            return value

        def storing(itself: Any, ptrs: Any, value: Any, mask: Any, *options: Any) -> Any:
            self.bytes += int(mask.data.sum()) * value.data.itemsize
            return store(itself, ptrs, value, mask, *options)

        def calling(itself: Any, *args: Any, **options: Any) -> None:
            self._in_kernel = True
            call(itself, *args, **options)
            self._in_kernel = False

        with (
            patch.object(builder, "create_masked_load", loading),
            patch.object(builder, "create_masked_store", storing),
            patch.object(executor, "__call__", calling),
        ):
            yield


def bytes_per_logit(dtype: torch.dtype, head_dtype: torch.dtype, *, fused: bool) -> float:
    """Returns the bytes for each logit of a chunk that is computed twice: those that one more chunk costs."""
    vocabulary = 999
    totals = []
    for chunks in (1, 2):
        *arguments, bounds, upstream = inputs(vocabulary, chunks, dtype, "cpu")
        traffic = Traffic(vocabulary)
        with traffic.kernels(), traffic:
            p = SelectedLogprobs.apply(*arguments, head_dtype, bounds, fused)
            torch.autograd.grad(p, arguments[:2], upstream)
        totals.append(traffic.bytes)
    return (totals[1] - totals[0]) / (ROWS * vocabulary)


def main() -> None:
    device = sys.argv[1]
    torch.manual_seed(0)
    kernel_sizes = whole_sizes = (50, 4096, 50257, 151936)
    if device == "cpu":  # the interpreter is slow
        kernel_sizes, whole_sizes = (4099,), (50,)
    differences: defaultdict[str, list[float]] = defaultdict(list)
    compared = [compare_kernels(size, dtype, out, device) for size in kernel_sizes for out, dtype in HEADS]
    for size in whole_sizes:
        with patch.object(logprobs, "chunk_logits", lambda free, size=size: ROWS * size):
            compared += [compare_whole(size, *dtypes, device) for dtypes in HEADS]
    for name, value in (pair for worst in compared for pair in worst.items()):
        differences[name].append(value)
    for name, value in worst_of(differences).items():
        bound = ROUNDING[BFLOAT16] if "bfloat16" in name else ROUNDING[FLOAT32]
        assert value < bound * (4 if name == "logprobs" else 1), f"{name}: {value}"
    reasons = {why_unfused(torch.device(device), *dtypes, vocabulary=60) for dtypes in HEADS}
    assert reasons == {""}, reasons
    result: dict[str, Any] = {"differences": worst_of(differences)}
    if device == "cpu":
        with patch.object(logprobs, "chunk_logits", lambda free: ROWS * 999):
            for form, fused in (("kernels", True), ("operations", False)):
                result[form] = [bytes_per_logit(*dtypes, fused=fused) for dtypes in HEADS]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
