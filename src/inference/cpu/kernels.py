"""Multiplies batches of a few sizes, so that oneDNN makes few kernels."""

from __future__ import annotations

from functools import cache

SIZES_PER_OCTAVE = 8
"""Number of batch sizes between n and 2 n that get kernels, from n = 16 on."""


def round_up(rows: int) -> int:
    """Returns the number of rows, at most an eighth more than `rows`, to which a batch is padded before it is
    multiplied."""
    unit = 1 << max((rows // SIZES_PER_OCTAVE).bit_length() - 1, 0)
    return -(-rows // unit) * unit


@cache
def multiply_by_few_kernels() -> None:
    """Patches vLLM so that an engine in this process, or forked from it, pads batches with rows of zeros to one of a
    few sizes before it multiplies them. Results are the same bit for bit. A second call changes nothing.

    oneDNN makes a kernel for each batch size with which a matrix is multiplied. While requests end one after the other,
    nearly every step has a new batch size.

    Gain: 0.8 ms of a step's 10 ms, and 136 MiB after 240 sizes (docs/internals/benchmarks.md, whole_job).
    """
    import torch
    from vllm import _custom_ops

    plain = _custom_ops.onednn_mm

    def multiply(
        dnnl_handler: _custom_ops.CPUDNNLGEMMHandler, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = x.shape[0]
        padding = round_up(rows) - rows
        if not padding or x.dim() != 2:
            return plain(dnnl_handler, x, bias)
        return plain(dnnl_handler, torch.constant_pad_nd(x, (0, 0, 0, padding)), bias)[:rows]

    _custom_ops.onednn_mm = multiply
