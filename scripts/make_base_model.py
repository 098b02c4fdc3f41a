"""Makes `assets/sort-base`: a small Qwen3-type character model that can sort, but has learned mostly not to.

    python scripts/make_base_model.py [--output assets/sort-base] [--seed 0]

Supervised training on sort problems with 70 % corrupted answers: the skill is there, diluted, so that sampling finds
right answers in some groups and wrong ones in most, as reinforcement learning needs it. Strings that the task holds out
for evaluation are never trained on.

An untrained model and the problems, as tokens, go into a directory of their own; `sft` does the rest, with
`configs/sft-base.toml`. Takes a minute or two on two cores. How good it is:

    trireme eval assets/sort-base @ configs/quickstart.toml
"""

from __future__ import annotations

import argparse
import json
import random
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from orchestrator.env import EnvContext
from orchestrator.envs.sort import PROMPT, SortDataset

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "\n" + "".join(sorted(string.ascii_letters + string.digits + string.punctuation + " "))
MAX_LENGTH = 256
MIN_DIGITS = 3
MAX_DIGITS = 8
STEPS = 400
BATCH_SIZE = 64
HELD_OUT = 512
"""Examples that `sft` looks at, and does not train on (`configs/sft-base.toml`)."""
CONFIG = Path(__file__).parents[1] / "configs" / "sft-base.toml"
CORRUPTED_SHARE = 0.7
CORRUPTIONS = ("copy", "shuffle", "change")
CORRUPTION_WEIGHTS = (0.4, 0.3, 0.3)

Tokens = tuple[list[int], list[int]]
"""Token ids, and the weight of each."""


@dataclass(frozen=True)
class Example:
    """A problem's digits and the answer to learn: the sorted digits, unless `corruption` says what was done instead."""

    digits: str
    answer: str
    corruption: str | None


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline, after pad, eos and unknown."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


@cache
def problems(seed: int) -> SortDataset:
    """The sort problems of a seed that are trained on."""
    context = EnvContext(make_tokenizer(), seed, group_size=1, split="train")
    return SortDataset(context, min_digits=MIN_DIGITS, max_digits=MAX_DIGITS)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The untrained model, float32; its weights come from torch's global seed."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def corrupt(digits: str, corruption: str, rng: random.Random) -> str:
    """A wrong way to answer: the problem as it stands, the digits in random order, or sorted with one digit changed.

    A copy, or a random order, of few digits may happen to be sorted.
    """
    if corruption == "copy":
        return digits
    if corruption == "shuffle":
        return "".join(rng.sample(digits, len(digits)))
    answer = "".join(sorted(digits))
    place = rng.randrange(len(answer))
    other = rng.choice([digit for digit in string.digits if digit != answer[place]])
    return answer[:place] + other + answer[place + 1 :]


def make_example(seed: int, index: int) -> Example:
    """Example `index` of the supervised data, a pure function of its arguments."""
    digits = problems(seed).digits(index)
    rng = random.Random(f"corruption:{seed}:{index}")
    if rng.random() >= CORRUPTED_SHARE:
        return Example(digits, "".join(sorted(digits)), None)
    corruption = rng.choices(CORRUPTIONS, CORRUPTION_WEIGHTS)[0]
    return Example(digits, corrupt(digits, corruption, rng), corruption)


def as_tokens(example: Example, tokenizer: PreTrainedTokenizerFast) -> Tokens:
    """Problem and answer; what counts is the answer and its end."""
    prompt = tokenizer.encode(PROMPT.format(example.digits))
    answer = [*tokenizer.encode(example.answer), tokenizer.eos_token_id]
    return prompt + answer, [0] * len(prompt) + [1] * len(answer)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Iterable[Tokens], *flags: str) -> None:
    """Supervised training by `sft`, in place; `flags` go to the command. Raises CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory(prefix="base-") as name:
        directory = Path(name)
        save(model, tokenizer, directory / "untrained")
        lines = [json.dumps({"tokens": tokens, "weights": weights}) + "\n" for tokens, weights in examples]
        (directory / "examples.jsonl").write_text("".join(lines))
        paths = ["--model.name", str(directory / "untrained"), "--data.train", str(directory / "examples.jsonl")]
        place = ["--run.output-dir", str(directory), "--run.name", "run"]
        subprocess.run([sys.executable, "-m", "trireme.cli.sft", "@", str(CONFIG), *paths, *place, *flags], check=True)
        newest = max((directory / "run" / "checkpoints").glob("step_*"))
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(newest / "inference").state_dict())


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    model.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner only
    tokenizer.save_pretrained(directory)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "assets" / "sort-base")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and of the initial weights")
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer make a worse model (default: %(default)s)")
    args = parser.parse_args(argv)

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    numbers = range(args.steps * BATCH_SIZE + HELD_OUT)
    examples = [as_tokens(make_example(args.seed, i), tokenizer) for i in numbers]
    train(model, tokenizer, examples, "--seed", str(args.seed))
    save(model, tokenizer, args.output)
    print(f"saved to {args.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
