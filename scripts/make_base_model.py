"""Makes `assets/sort-base`: a small Qwen3-type character model that can sort, but has learned mostly not to.

    python scripts/make_base_model.py [--output assets/sort-base] [--seed 0]

Supervised training on sort problems of which 70 % have a corrupted answer: the skill is there, diluted, so that
sampling finds right answers in some groups and wrong ones in most, which is what reinforcement learning needs.
Strings that the task holds out for evaluation are never trained on. Takes less than a minute on one thread.
"""

from __future__ import annotations

import argparse
import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from orchestrator.envs.sort import problem, prompt_text, score, sorted_digits

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "\n" + "".join(sorted(string.ascii_letters + string.digits + string.punctuation + " "))
MAX_LENGTH = 256
MIN_DIGITS, MAX_DIGITS = 3, 8
MAX_ANSWER_TOKENS = 10
STEPS, BATCH_SIZE, WARMUP_STEPS = 400, 64, 20
PEAK_LEARNING_RATE, FINAL_LEARNING_RATE = 2e-3, 2e-4
CORRUPTED_SHARE = 0.7
CORRUPTIONS = ("copy", "shuffle", "change")
CORRUPTION_WEIGHTS = (0.4, 0.3, 0.3)
IGNORED = -100


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
    answer = sorted_digits(digits)
    place = rng.randrange(len(answer))
    other = rng.choice([digit for digit in string.digits if digit != answer[place]])
    return answer[:place] + other + answer[place + 1 :]


def make_example(seed: int, index: int) -> Example:
    """Example `index` of the supervised data, a pure function of its arguments."""
    digits = problem(seed, index, "train", MIN_DIGITS, MAX_DIGITS)
    rng = random.Random(f"corruption:{seed}:{index}")
    if rng.random() >= CORRUPTED_SHARE:
        return Example(digits, sorted_digits(digits), None)
    corruption = rng.choices(CORRUPTIONS, CORRUPTION_WEIGHTS)[0]
    return Example(digits, corrupt(digits, corruption, rng), corruption)


def collate(examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both int64 [D, T], padded on the right; labels cover the answer and its eos only."""
    prompts = [tokenizer.encode(prompt_text(example.digits)) for example in examples]
    answers = [[*tokenizer.encode(example.answer), tokenizer.eos_token_id] for example in examples]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens = torch.full((len(examples), length), tokenizer.pad_token_id)
    labels = torch.full((len(examples), length), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


def learning_rate(step: int) -> float:
    """A linear ramp to the peak, then a cosine to a tenth of it."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
    fall = PEAK_LEARNING_RATE - FINAL_LEARNING_RATE
    return FINAL_LEARNING_RATE + fall * 0.5 * (1 + math.cos(math.pi * progress))


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Supervised training, in place. Causal attention makes a mask for the padding on the right unnecessary."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(STEPS):
        examples = [make_example(seed, step * BATCH_SIZE + i) for i in range(BATCH_SIZE)]
        tokens, labels = collate(examples, tokenizer)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, digits: Sequence[str], *, greedy: bool
) -> list[list[int]]:
    """One sampled (temperature 1) or greedy answer to each problem, as token ids, cut after `MAX_ANSWER_TOKENS`."""
    encoded = tokenizer([prompt_text(d) for d in digits], padding=True, padding_side="left", return_tensors="pt")
    sampling = {} if greedy else {"top_k": 0}  # 0: from the whole vocabulary, not the 50 likeliest
    tokens = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=MAX_ANSWER_TOKENS,
        do_sample=not greedy,
        **sampling,
    )
    return tokens[:, encoded["input_ids"].shape[1] :].tolist()


def report(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, problems: int = 512) -> None:
    """Prints mean reward and success on held-out problems, sampled at temperature 1 and greedy."""
    digits = [problem(seed, i, "eval", MIN_DIGITS, MAX_DIGITS) for i in range(problems)]
    for greedy in (False, True):
        replies = answers(model, tokenizer, digits, greedy=greedy)
        scores = [score(tokenizer, d, reply) for d, reply in zip(digits, replies, strict=True)]
        reward = sum(s.reward for s in scores) / problems
        success = sum(s.exact for s in scores) / problems
        print(f"{'greedy' if greedy else 'sampled':8s} reward {reward:.3f}  success {success:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "assets" / "sort-base")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data, the initial weights and the report")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, args.seed)
    report(model.eval(), tokenizer, args.seed)
    model.save_pretrained(args.output)
    (args.output / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner only
    tokenizer.save_pretrained(args.output)
    print(f"saved to {args.output}")


if __name__ == "__main__":
    main()
