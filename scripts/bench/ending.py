"""Answers that end by chance: a random model with equally likely tokens, so that each one ends its answer with
probability 1 / VOCAB, and an environment with random prompts.

Few answers are long, and answers cut at 32 or 384 tokens have 28 or 122 on average. Nothing can be learned, so runs
that differ in speed do the same work.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator.env import Env, EnvContext, EnvGroup, EnvGroupBuilder, RLDataset, StepResult, StopCondition

ENV_ID = "ending:EndingDataset"
VOCAB = 128
END = 1
PROMPT = 16
PROBLEMS = 4096
FLAT = 0.01
"""Gain of the last norm: logits differ by some thousandths."""


def make_model(directory: Path, longest: int) -> int:
    """Saves a random Qwen3 model with equally likely tokens, and a tokenizer; returns its number of parameters."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(FLAT)
    model.save_pretrained(directory)
    words = {str(token): token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return model.num_parameters()


def prompt_of(seed: int, index: int) -> list[int]:
    """Returns the prompt of a problem: PROMPT random tokens that end no answer."""
    return random.Random(f"ending:{seed}:{index}").choices(range(END + 1, VOCAB), k=PROMPT)


@dataclass(frozen=True)
class EndingEnv(Env):
    """The reward is worth nothing, but differs within a group."""

    prompt: Sequence[int]

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return self.prompt, ()

    async def step(self, action: Sequence[int]) -> StepResult:
        return StepResult(float(sum(action) % 2), episode_done=True)


class EndingDataset(RLDataset):
    """Problems without a solution."""

    def __init__(self, context: EnvContext) -> None:
        self._context = context

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [EnvGroup(partial(EndingEnv, prompt_of(self._context.seed, index)), self._context.group_size)]

    def __len__(self) -> int:
        return PROBLEMS
