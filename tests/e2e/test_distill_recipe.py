"""Prompt distillation on the small model: it answers with the prompt, and then without.

A long test: the recipe is vLLM's public class and the command `sft`, whose versions are pinned, and which
test_sft.py runs.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_support import ROOT, SFT, run_rl

from trireme.core.errors import EXIT_OK

ASSET = ROOT / "assets" / "sort-base"
NUMBERS = random.Random(0)
QUESTIONS = ["".join(NUMBERS.choices("0123456789", k=4)) for _ in range(160)]
UNSEEN = ["".join(NUMBERS.choices("0123456789", k=4)) for _ in range(40)]


def accuracy(directory: Path, tokenizer: Any) -> float:
    """Share of unseen numbers that the model sorts, greedily, without being told to."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    prompts = torch.tensor([tokenizer.encode(f"{number}\n") for number in UNSEEN])
    answers = model.generate(prompts, max_new_tokens=5, do_sample=False)[:, prompts.shape[1] :]
    expected = [["".join(sorted(number)), "<eos>"] for number in UNSEEN]
    decoded = [[tokenizer.decode(answer[:4]), tokenizer.decode(answer[4:])] for answer in answers]
    return sum(a == b for a, b in zip(decoded, expected, strict=True)) / len(UNSEEN)


@pytest.mark.long
def test_the_model_learns_to_answer_without_the_prompt(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ASSET)
    (tmp_path / "prompt.txt").write_text("Sort: ")
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"prompt": f"{number}\n"}) + "\n" for number in QUESTIONS))
    files = ["--prompts", "q.jsonl", "--teacher-prompt", "prompt.txt", "--output", "answers.jsonl"]
    command = [sys.executable, str(ROOT / "examples" / "recipes" / "distill.py"), str(ASSET), *files]
    sampled = subprocess.run(
        [*command, "--temperature", "0.1", "--max-tokens", "10", "--max-model-len", "64"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert sampled.returncode == EXIT_OK, sampled.stderr
    assert "answers to 160 questions" in sampled.stdout
    assert accuracy(ASSET, tokenizer) < 0.2
    outcome = run_rl(
        tmp_path,
        *("--data.train", str(tmp_path / "answers.jsonl"), "--data.batch-size", "16", "--data.epochs", "8"),
        config=ROOT / "configs" / "sft-distill.toml",
        module=SFT,
    )
    assert outcome.code == EXIT_OK, outcome.out
    (newest,) = sorted((outcome.root / "checkpoints").iterdir())[-1:]
    assert accuracy(newest / "inference", tokenizer) > 0.5
