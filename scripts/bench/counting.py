"""Rollouts of known lengths: a model that counts, and an environment that decides where each rollout stops.

After token t the model samples t + 1, with near certainty, whatever came before: the output head's row of t + 1 points
where the embedding of t does, and random layers of ordinary cost in between change little. A prompt ends with token 0,
and an answer stops at the token that its environment drew as its length: lognormal, so that few are many times as long
as the median. So runs with different schedules do the same work to the token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.env import Env, EnvContext, EnvGroupBuilder, RLDataset, StepResult, StopCondition

ENV_ID = "counting:CountingDataset"
VOCAB = 1024
LONGEST = 960
PROBLEMS = 4096


def make_model(directory: Path, *, hidden: int, layers: int) -> int:
    """Saves a Qwen3 model that counts, and a tokenizer; the number of its parameters."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=2 * VOCAB,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    signs = torch.randint(0, 2, (VOCAB, hidden)) * 2.0 - 1.0
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(signs)
        model.lm_head.weight.copy_(signs.roll(1, dims=0) * (32.0 / hidden))
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({"0": 0}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return model.num_parameters()


@dataclass(frozen=True)
class CountingEnv(Env):
    """Its answer has `length` tokens. The reward is worth nothing, but differs within a group."""

    prompt: tuple[int, ...]
    length: int

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return self.prompt, (self.length,)

    async def step(self, action: Sequence[int]) -> StepResult:
        as_drawn = float(len(action) == self.length)
        return StepResult(float(self.length % 2), episode_done=True, metrics={"length_as_drawn": as_drawn})


@dataclass(frozen=True)
class CountingBuilder(EnvGroupBuilder):
    envs_G: tuple[CountingEnv, ...]

    async def make_env(self, sample: int) -> Env:
        return self.envs_G[sample]


class CountingDataset(RLDataset):
    """Problems with prompts of `prompt` random tokens; each rollout has a length of its own, lognormal around `median`
    with deviation `sigma` of its logarithm, cut at LONGEST."""

    def __init__(self, context: EnvContext, *, prompt: int, median: float, sigma: float) -> None:
        self._context = context
        self._prompt = prompt
        self._median = median
        self._sigma = sigma

    def envs(self, index: int) -> tuple[CountingEnv, ...]:
        """The rollouts of problem `index`."""
        rng = random.Random(f"counting:{self._context.seed}:{index}")
        prompt = (*rng.choices(range(1, VOCAB), k=self._prompt - 1), 0)
        return tuple(CountingEnv(prompt, self._length(rng)) for _ in range(self._context.group_size))

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [CountingBuilder(self.envs(index))]

    def __len__(self) -> int:
        return PROBLEMS

    def _length(self, rng: random.Random) -> int:
        return min(max(round(rng.lognormvariate(math.log(self._median), self._sigma)), 1), LONGEST)
