"""The kernel of device sums without a GPU: compiled for several, and computed by Triton's interpreter."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_support import run_interpreted

from trireme.transports.device_sums import (
    MAX_OUTER,
    NARROW,
    PROGRAMS,
    WARPS,
    WIDE,
    Variant,
    constants,
    jobs_of,
    sum_kernel,
)
from trireme.transports.tensor_sums import TensorPart, c_strides, equal_parts

ORACLE = Path(__file__).with_name("device_sums_oracle.py")
NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
CONTIGUOUS = Variant(torch.int16, None, 1, contiguous=True, columns=WIDE)
CAST = Variant(torch.float32, torch.bfloat16, 1, contiguous=True, columns=WIDE)
MOST_PER_WORD = {
    CONTIGUOUS: 70,
    CAST: 70,
    Variant(torch.int32, None, 2, contiguous=True, columns=WIDE): 70,
    Variant(torch.int16, None, 1, contiguous=True, columns=NARROW): 70,
    Variant(torch.int16, None, 1, contiguous=False, columns=WIDE): 80,
    Variant(torch.int8, None, 0, contiguous=True, columns=WIDE): 70,
}
"""Instructions in the loop for each word that is summed (for each byte of the last)."""


def compiled(variant: Variant, capability: int) -> dict[str, str | bytes]:
    """Returns the kernel as it is compiled for a GPU: its PTX and its machine code."""
    numbers = {"jobs": "*i64", "ends": "*i32", "out": "*i64", "count": "i32", "halvings": "i32"}
    fixed = constants(variant)
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = ASTSource(sum_kernel, numbers | dict.fromkeys(fixed, "constexpr"), fixed, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS}).asm


def loop_length(cubin: bytes, path: Path) -> int:
    """Returns the number of instructions in the longest loop of machine code."""
    path.write_bytes(cubin)
    text = subprocess.run([NVDISASM, "-c", path], check=True, capture_output=True, text=True).stdout
    labels: dict[str, int] = {}
    lengths, count = [], 0
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.search(r"/\*[0-9a-f]{4}\*/\s", line):
            count += 1
            jump = re.search(r"BRA\S*\s.*(\.L_x_\d+)", line)
            if jump and jump[1] in labels:
                lengths.append(count - labels[jump[1]])
    return max(lengths)


@pytest.mark.parametrize(
    ("variant", "capability"),
    [*((CONTIGUOUS, size) for size in (80, 90, 100)), *((size, 90) for size in MOST_PER_WORD if size != CONTIGUOUS)],
)
def test_a_word_takes_few_instructions(variant: Variant, capability: int, tmp_path: Path) -> None:
    """Also no division of 64 bits, which would be a call; contiguous ones are loaded 16 bytes at a time."""
    assembly = compiled(variant, capability)
    words = variant.columns // (32 * WARPS) * max(variant.words, 1)
    cubin, ptx = assembly["cubin"], assembly["ptx"]
    assert loop_length(cubin, tmp_path / "kernel.cubin") / words <= MOST_PER_WORD[variant]
    assert not re.search(r"(div|rem)\.[su]64", ptx)
    assert ("ld.global.v4.b32" in ptx) is (variant.contiguous and variant.columns == WIDE)
    if variant is CAST:
        assert "cvt.rn.bf16" in ptx, "rounded as PyTorch does, which the interpreter does not show"


def test_the_interpreter_agrees_with_the_oracle() -> None:
    """All dtypes, strides, stacks, casts, places in the whole and distances in memory beyond 2^31."""
    assert "parts are equal" in run_interpreted(ORACLE)


def qwen3_8b(dtype: torch.dtype) -> list[TensorPart]:
    """Returns parts in the shapes of Qwen3-8B, without memory."""
    sizes = [(151_936, 4096), (4096,), (151_936, 4096)]
    layer = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (128,), (128,)]
    layer += [(12_288, 4096), (12_288, 4096), (4096, 12_288), (4096,), (4096,)]
    shapes = sizes + 36 * layer
    return [TensorPart(torch.empty(s, dtype=dtype, device="meta"), 0, c_strides(s), torch.bfloat16) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_model_takes_one_launch(dtype: torch.dtype) -> None:
    by_variant, others = jobs_of(qwen3_8b(dtype))
    ((variant, jobs),) = by_variant.items()
    assert (len(jobs), variant.contiguous, others) == (399, True, {})
    assert sum(job[PROGRAMS] for job in jobs) < 2**18


def test_experts_of_a_stack_are_one_job() -> None:
    stack = torch.zeros(128, 768, 64, dtype=torch.bfloat16)
    (part,) = equal_parts(list(stack), 0, (64, 1))
    ((_, (job,)),) = jobs_of([part])[0].items()
    assert job[:10] == [stack.data_ptr(), 0, 768 * 64, 1, 1, 768 * 64, 1, 2, 2 * 128, 0]


def test_what_the_kernel_does_not_know_is_left_to_the_host() -> None:
    tensor = torch.zeros([3] * (MAX_OUTER + 3))[..., :2]
    unknown = [
        TensorPart(tensor, 0, c_strides([4] * (MAX_OUTER + 3)), torch.float32),
        TensorPart(torch.zeros(2, dtype=torch.float64), 0, (1,), torch.bfloat16),
    ]
    assert jobs_of(unknown) == ({}, dict(enumerate(unknown)))
