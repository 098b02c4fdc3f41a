"""The kernels of the head without a GPU: compiled for several, and computed by Triton's interpreter."""

import json
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_support import run_interpreted

from trainer.head_kernels import COLUMNS, WARPS, backward_kernel, forward_kernel

ORACLE = Path(__file__).with_name("head_kernels_oracle.py")
MOST_BYTES = (30, 30, 16)
"""Bytes a logit that products and kernels read and write: all in float32, the model alone in bfloat16, and all."""


@pytest.fixture(scope="module")
def oracle() -> dict[str, dict[str, float] | list[float]]:
    """The oracle's results. It fails where the kernels differ from float64 by more than rounding."""
    return json.loads(run_interpreted(ORACLE))


def test_the_interpreter_agrees_with_float64(oracle) -> None:
    """In all dtypes, with temperatures, logits of -inf, rows with several targets and with none."""
    assert set(oracle["differences"]) == {"logprobs", "gradient in torch.float32", "gradient in torch.bfloat16"}


def test_a_logit_costs_few_bytes(oracle) -> None:
    assert all(few <= most for few, most in zip(oracle["kernels"], MOST_BYTES, strict=True)), oracle
    assert all(few > 2 * most for few, most in zip(oracle["operations"], MOST_BYTES, strict=True)), "they are counted"


NUMBERS = {
    "logits": "*fp32",
    "gradient": "*fp32",
    "temperatures": "*fp32",
    "targets": "*i64",
    "bounds": "*i64",
    "normalizers": "*fp32",
    "logprobs": "*fp32",
    "logprob_gradients": "*fp32",
    "vocabulary": "i32",
}


def compiled(kernel: object, capability: int, head: str, model: str, *, bare: bool) -> str:
    """Returns the PTX of a kernel as it is compiled for a GPU and a vocabulary that is a multiple of 16. `head`,
    `model`: dtypes of logits and of their gradient; `bare`: without temperatures."""
    names = kernel.arg_names
    fixed = {"COLUMNS": COLUMNS}
    if bare:
        fixed["temperatures"] = None
    numbers = {**NUMBERS, "logits": f"*{head}", "gradient": f"*{model}"}
    signature = {name: "constexpr" if name in fixed else numbers[name] for name in names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name not in fixed}
    source = ASTSource(kernel, signature, fixed, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS}).asm["ptx"]


@pytest.mark.parametrize(
    ("capability", "head", "model", "bare"),
    [(80, "bf16", "bf16", True), (90, "fp32", "bf16", False), (100, "fp32", "fp32", True)],
)
def test_gpus_load_16_bytes_at_a_time(capability: int, head: str, model: str, bare: bool) -> None:
    """The two kernels compile, in all forms. Gradients are rounded as PyTorch does, which the interpreter does not
    show."""
    forward, backward = (
        compiled(kernel, capability, head, model, bare=bare) for kernel in (forward_kernel, backward_kernel)
    )
    for ptx in (forward, backward):
        assert "ld.global.v4.b32" in ptx
    assert ("cvt.rn.bf16" in backward) is (model == "bf16")
    assert "st.global.v4.b32" in backward
