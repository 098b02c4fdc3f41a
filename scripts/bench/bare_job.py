"""The bare work of a training step in one process, without a training system: what `whole_job.py` is held against.

    python scripts/bench/bare_job.py generate MODEL LONGEST ROLLOUTS REPEATS
    python scripts/bench/bare_job.py train    MODEL LONGEST ROLLOUTS REPEATS

`generate`: vLLM's `LLM.generate` in this process, as many sequences at once as there are rollouts, with the logprobs of
the sampled tokens. `train`: forward and backward of a Hugging Face model over as many answers, of lengths drawn as the
model draws them, in rectangles of similar lengths, and AdamW. Prints one JSON object: CPU seconds for ROLLOUTS of the
process and of its busiest thread (medians of REPEATS, after one that does not count), and the mean length of answers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from ending import END, PROMPT, VOCAB, prompt_of

MICRO_BATCH_TOKENS = 4096
KV_BYTES = 2**28
TICK = os.sysconf("SC_CLK_TCK")
LEARNING_RATE = 1e-30


def busiest_thread_s(before: dict[str, float]) -> float:
    """Returns the CPU seconds that one thread of this process has used since `before`, at most."""
    return max(seconds - before.get(thread, 0.0) for thread, seconds in thread_seconds().items())


def thread_seconds() -> dict[str, float]:
    """Returns the CPU seconds of each thread of this process so far."""
    seconds = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            seconds[task.name] = (int(fields[11]) + int(fields[12])) / TICK
    return seconds


def generating(model: str, longest: int, rollouts: int) -> Callable[[int], float]:
    """Returns a function that samples all answers and returns their mean length."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=PROMPT + longest,
        max_num_seqs=rollouts,
        kv_cache_memory_bytes=KV_BYTES,
        skip_tokenizer_init=True,
        generation_config="vllm",
        enforce_eager=True,
    )

    def generate(repeat: int) -> float:
        prompts = [TokensPrompt(prompt_token_ids=prompt_of(repeat, i // 8)) for i in range(rollouts)]
        params = [
            SamplingParams(
                max_tokens=longest,
                stop_token_ids=[END],
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for _ in range(rollouts)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return statistics.mean(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def training(model_path: str, longest: int, rollouts: int) -> Callable[[int], float]:
    """Returns a function that trains on drawn answers once and returns their mean length."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def train(repeat: int) -> float:
        rng = np.random.default_rng(repeat)
        lengths = np.sort(rng.geometric(1 / VOCAB, rollouts).clip(max=longest))[::-1]
        first = 0
        while first < rollouts:
            width = PROMPT + int(lengths[first])
            rows = min(max(MICRO_BATCH_TOKENS // width, 1), rollouts - first)
            ids = torch.from_numpy(rng.integers(END + 1, VOCAB, (rows, width)))
            sampled = torch.arange(1, width) < torch.from_numpy(PROMPT + lengths[first : first + rows].copy())[:, None]
            logprobs = model(input_ids=ids[:, :-1], use_cache=False).logits.log_softmax(-1)
            (logprobs.gather(-1, ids[:, 1:, None])[..., 0] * sampled).sum().neg().backward()
            first += rows
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(lengths.mean())

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("generate", "train"))
    parser.add_argument("model")
    parser.add_argument("longest", type=int)
    parser.add_argument("rollouts", type=int)
    parser.add_argument("repeats", type=int)
    args = parser.parse_args()
    if args.part == "generate":
        work = generating(args.model, args.longest, args.rollouts)
    else:
        work = training(args.model, args.longest, args.rollouts)
    cpu_s = []
    busiest_s = []
    lengths = []
    for repeat in range(1 + args.repeats):
        before = thread_seconds()
        started = time.process_time()
        length = work(repeat)
        if repeat:
            cpu_s.append(time.process_time() - started)
            busiest_s.append(busiest_thread_s(before))
            lengths.append(length)
    result = {"cpu_s": cpu_s, "busiest_s": busiest_s, "length": lengths}
    print(json.dumps({name: round(statistics.median(values), 3) for name, values in result.items()}), flush=True)


if __name__ == "__main__":
    main()
