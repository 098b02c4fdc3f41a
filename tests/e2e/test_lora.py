"""`rl` with LoRA as a user runs it: adapters travel, the base is the KL reference, and a checkpoint goes on bit for
bit."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from resume_support import comparable, contents
from run_support import ROOT, TINY, Ended, run_rl

from trireme.core.base_digest import base_digest
from trireme.core.errors import EXIT_OK

pytestmark = pytest.mark.long  # CI trains adapters in test_recipes.py, and peft opens them in test_tinker_adapters.py
BASE = ROOT / "assets" / "sort-base"
FLAGS = [
    *TINY,
    *("--max-steps", "4", "--checkpoint.every", "2", "--deterministic", "--orchestrator.max-steps-off-policy", "0"),
    *("--trainer.lora.rank", "8", "--trainer.kl.coef", "0.05", "--trainer.learning-rate", "2e-3"),
    "--verbose",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run_rl(tmp_path_factory.mktemp("r"), *FLAGS)


def test_adapters_are_trained_and_travel(whole: Ended) -> None:
    assert whole.code == EXIT_OK, whole.out
    assert "LoRA of rank 8 and alpha 32 on q_proj" in whole.out, "the whole plan, which --verbose asks for"
    base = sum(file.stat().st_size for file in BASE.glob("*.safetensors"))
    for row in whole.rows:
        assert row["weights/bytes"] < base / 3
        assert row["weights/canary_max_diff"] < 1e-4
        assert row["optim/kl_sample_train_v2"] < 1e-4
        assert row["optim/grad_norm"] > 0
    assert len({row["weights/digest"] for row in whole.rows}) == 4


def test_the_policy_starts_at_the_reference_and_leaves_it(whole: Ended) -> None:
    divergences = [row["kl_policy_base"] for row in whole.rows]
    assert abs(divergences[0]) < 1e-5
    assert max(map(abs, divergences[1:])) > 1e-4


def test_a_checkpoint_goes_on_bit_for_bit(whole: Ended, tmp_path: Path) -> None:
    again = run_rl(tmp_path, *FLAGS, "--resume.dir", str(whole.root), "--resume.step", "2")
    assert again.code == EXIT_OK, again.out
    assert comparable(again.rows) == comparable(whole.rows)
    ends = [contents(root / "checkpoints" / "step_000004") for root in (whole.root, again.root)]
    assert ends[0] == ends[1]


def test_a_checkpoint_holds_adapters_that_vllm_and_peft_open(whole: Ended) -> None:
    """vLLM's own loader, which `vllm serve --lora-modules` uses too, reads the directory."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter, prompt = whole.root / "checkpoints" / "step_000004" / "inference", [3, 5, 2, 7, 1]
    code = f"""
import os
os.environ |= {{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
model = LLM({str(BASE)!r}, enforce_eager=True, dtype="float32", max_model_len=32, kv_cache_memory_bytes=2**27,
            skip_tokenizer_init=True, enable_lora=True, max_lora_rank=8)
asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
(out,) = model.generate([{{"prompt_token_ids": {prompt}}}], asked, lora_request=LoRARequest("a", 1, {str(adapter)!r}))
print("logprobs", *[at[token].logprob for token, at in zip({prompt[1:]}, out.prompt_logprobs[1:])])
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    line = next(line for line in process.stdout.splitlines() if line.startswith("logprobs "))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), adapter)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)[range(4), prompt[1:]]
    np.testing.assert_allclose([float(word) for word in line.split()[1:]], expected.numpy(), atol=1e-4)
    assert base_digest(str(BASE)) in (adapter / "base.json").read_text()
