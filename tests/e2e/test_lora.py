"""`rl` with LoRA as a user runs it: vLLM and peft open what it saves."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from run_support import ROOT, TINY, run_rl

from trireme.core.base_digest import base_digest
from trireme.core.errors import EXIT_OK

BASE = ROOT / "assets" / "sort-base"


@pytest.mark.long  # CI trains adapters in test_recipes.py, and peft opens them in test_tinker_adapters.py
def test_a_checkpoint_holds_adapters_that_vllm_and_peft_open(tmp_path: Path) -> None:
    """vLLM's own loader, which `vllm serve --lora-modules` uses too, reads the directory."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    outcome = run_rl(tmp_path, *TINY, "--trainer.lora.rank", "8", "--trainer.learning-rate", "2e-3")
    assert outcome.code == EXIT_OK, outcome.out
    adapter, prompt = outcome.root / "checkpoints" / "step_000003" / "inference", [3, 5, 2, 7, 1]
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
