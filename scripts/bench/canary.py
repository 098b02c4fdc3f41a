"""How far vLLM's log-probabilities are from the trainer's in bfloat16, with logits in float32 and in bfloat16.

    python scripts/bench/canary.py

Of the shipped model and larger random ones, whose logits have a standard deviation of 3: the drift of the canary and of
15 random sequences of the same length, and how much the canary moves, in the trainer alone, when the gain of a norm in
the middle is 1 or two experts of that layer change places. Each model and dtype of logits is in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import ROOT, Result, median, run_for_json

SHIPPED = "shipped"
SIZES: dict[str, dict[str, Any]] = {
    "8 layers": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 8192},
    "28 layers": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 28, "vocab_size": 32_000},
    "12 layers of 32 experts": {
        **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12, "vocab_size": 8192},
        **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    },
}
COMMON = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512}
HEADS = ("float32", "model")
LENGTH, SEQUENCES, SPREAD = 512, 16, 3.0


def make_model(name: str, directory: Path) -> Any:
    """Saves a random model in bfloat16, and returns it; of the shipped one, the same."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if name == SHIPPED:
        model = AutoModelForCausalLM.from_pretrained(ROOT / "assets" / "sort-base", dtype=torch.bfloat16)
    else:
        torch.manual_seed(0)
        kind = "qwen3_moe" if "num_experts" in SIZES[name] else "qwen3"
        config = AutoConfig.for_model(kind, **COMMON, **SIZES[name], tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.uniform_(0.5, 1.5)
            else:
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
        model.get_output_embeddings().weight.data.mul_(SPREAD)
    model.eval().save_pretrained(directory)
    return model


def damaged(model: Any, damage: str) -> None:
    """Gives the model a fault in its middle layer."""
    layer = model.base_model.layers[len(model.base_model.layers) // 2]
    if damage == "skipped norm":
        layer.input_layernorm.weight.data.fill_(1.0)
    else:
        for parameter in layer.mlp.experts.parameters():
            parameter.data[:2] = parameter.data[:2].flip(0).clone()


def report(name: str, head: str) -> None:
    """Prints the drifts of one model as a line of JSON."""
    import numpy as np
    import torch

    from inference.engine import engine_args, import_engine
    from trainer.logprobs import add_token_logprobs, token_logprobs
    from trainer.publish import canary_tokens, compute_canary
    from trireme.config import Config

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        path = Path(directory)
        model = make_model(name, path)
        import_engine(on_cpu=True)
        from vllm import LLM, SamplingParams, TokensPrompt

        sections = {
            "model": {"name": directory, "dtype": "bfloat16", "head_dtype": head, "max_seq_len": 128},
            "orchestrator": {"batch_size": 2},
            "env": {"id": "sort"},
            "inference": {"sampling": {"max_tokens": 8}},
        }
        arguments = engine_args(Config.model_validate(sections), on_cpu=True)
        arguments.pop("enable_log_requests")  # of the asynchronous engine alone
        llm = LLM(**arguments)
        add_token_logprobs(model, torch.float32 if head == "float32" else torch.bfloat16)
        vocabulary = model.config.vocab_size
        fixed = canary_tokens(vocabulary, LENGTH, experts="experts" in name)
        canary = compute_canary(model, torch.bfloat16, fixed, torch.device("cpu"))
        drawn = np.random.default_rng(0).integers(0, vocabulary, (SEQUENCES - 1, len(fixed)))
        sequences = [fixed.tolist(), *drawn.tolist()]
        prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in sequences]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        means, largest = [], []
        for tokens, output in zip(sequences, llm.generate(prompts, params, use_tqdm=False), strict=True):
            assert isinstance(output.prompt_logprobs, list)
            pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
            own = np.asarray([table[token].logprob for token, table in pairs if table])
            ids = torch.tensor([tokens])
            with torch.no_grad():
                p = token_logprobs(model, ids[:, :-1], ids[:, 1:], torch.ones(1, len(tokens) - 1))[0].numpy()
            means.append(float(np.abs(own - p).mean()))
            largest.append(float(np.abs(own - p).max()))
        found: dict[str, Any] = {"mean": means, "largest": largest, "logprob": float(canary.logprobs.mean())}
        for damage in ("skipped norm", *(["swapped experts"] if "experts" in name else [])):
            broken = make_model(name, path)
            damaged(broken, damage)
            add_token_logprobs(broken, torch.float32 if head == "float32" else torch.bfloat16)
            other = compute_canary(broken, torch.bfloat16, fixed, torch.device("cpu")).logprobs
            difference = np.abs(other - canary.logprobs)
            found[damage] = [float(difference.mean()), float(difference.max())]
        print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[SHIPPED, *SIZES], help=argparse.SUPPRESS)
    parser.add_argument("--head", choices=HEADS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model:
        report(arguments.model, arguments.head)
        return
    load_before, detail, ratios = os.getloadavg()[0], {}, []
    for model in (SHIPPED, *SIZES):
        mean = {}
        for head in HEADS:
            environ = {"OMP_NUM_THREADS": "1"}
            found = run_for_json([sys.executable, __file__, "--model", model, "--head", head], environ)[1]
            mean[head] = median(found["mean"])
            shown = {
                "canary": [found["mean"][0], found["largest"][0]],
                "median": [mean[head], median(found["largest"])],
                "largest": [max(found["mean"]), max(found["largest"])],
                **{name: value for name, value in found.items() if name not in ("mean", "largest")},
            }
            detail[f"{model}, {head}"] = shown
            print(model, head, json.dumps(shown), flush=True)
        ratios.append(mean["float32"] / mean["model"])
    Result(
        name="canary",
        value=detail[f"28 layers, {HEADS[0]}"]["median"][0],
        unit="nats",
        ratio=median(ratios),
        target=None,
        holds=None,
        against="logits in bfloat16",
        detail={**detail, "load_before": round(load_before, 2)},
    ).print()


if __name__ == "__main__":
    main()
