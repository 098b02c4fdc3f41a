"""Writes the table of docs/models.md, and src/trainer/proved_models.json: `python scripts/make_models_docs.py`, in some
minutes.

Every causal language model of the installed transformers is made small (`trainer.twin`), trained for a step by a real
shard, published, saved, and opened again by Hugging Face. What the table says of an architecture happened here. The
file in the source has what a start needs of it (`trainer.proved`). For the kinds of REQUIRED it has other options too,
which a small model of the kind has proved as a start would.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from page_parts import with_part
from trainer.batching import scatter_outputs
from trainer.proof import IN_TWIN, prove_twin
from trainer.proved import FILE, switches, versions
from trainer.shard import Shard
from trainer.twin import make_twin
from trireme.config import Config
from trireme.core.errors import BadInput
from trireme.core.types import AdamParams, Datum, ModelInput, TokenBatch
from trireme.transports.packing import Packer

TARGET = Path(__file__).parents[1] / "docs" / "models.md"
LENGTHS = (9, 14, 5, 14)
COMMON = 9
"""Tokens with which the second and the last sequence begin. In a run they would be too few to count."""
TOLERANCE = 1e-4
"""Largest difference of logprobs, in nats, between the shard and Hugging Face, both in float32."""
NOT_TRIED = "not tried"
MOST_LETTERS = 250
REQUIRED = {
    *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "mistral", "mixtral", "gemma3", "phi3", "glm4_moe"),
    *("deepseek_v3", "gpt_oss", "olmo2"),
}
"""These may not be refused."""

EXAMPLES: dict[str, dict[str, object]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
"""Options without which the class's own default configuration is none of a real model."""
OTHER_OPTIONS: dict[str, list[object]] = {
    "tie_word_embeddings": [False, True],
    "attention_bias": [False, True],
    "mlp_bias": [False, True],
    "norm_topk_prob": [False, True],
    "use_qk_norm": [False, True],
    "sliding_window": [None, 4096],
    "rope_parameters": [
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096},
    ],
}
"""Values in which models of a kind of REQUIRED differ from each other. Each is tried alone."""


@dataclass(frozen=True)
class Walked:
    """What happened to one architecture."""

    model_type: str
    architecture: str
    """The class in transformers."""
    layout: str = ""
    """How it trains: "packed" or "rows"; empty if it does not."""
    reason: str = ""
    """Why it does not train, or not packed."""
    whole: str = ""
    """Why common prefixes are computed for each sequence; empty if they are computed once."""


def example(model_type: str) -> PretrainedConfig:
    """Returns a configuration of this architecture."""
    return CONFIG_MAPPING[model_type](**EXAMPLES.get(model_type, {}))


def walk(model_type: str) -> Walked:
    """Trains, publishes, saves and reopens a small model of this architecture, in this process.

    Raises AssertionError if a step is neither right nor refused.
    """
    row = Walked(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory) / "base"
        try:
            save_model(make_twin(example(model_type)), base)
        except Exception as error:  # a class that needs more than a configuration, or that cannot be written
            return replace(row, reason=f"{NOT_TRIED}: {_message_of(error)}")
        for layout in ("packed", "rows"):
            try:
                with open_shard(base, layout) as shard:
                    train_and_reopen(shard, base, Path(directory) / "after")
                    whole = shard.proof.why_whole.removesuffix(IN_TWIN)
                return replace(row, layout=layout, whole=_in_one_line(whole))
            except BadInput as error:
                message = _message_of(error).replace(f"{base} ", "")
            reason = re.sub(rf".*({row.architecture}: |{row.architecture}, which |cannot be used: )", "", message)
            row = replace(row, reason=reason.removesuffix(IN_TWIN))
            if not message.startswith("trainer.packing"):
                break
    return row


def proved_options(row: Walked) -> list[dict[str, object]]:
    """Returns the options, beyond those of its example, with which small models of a kind prove themselves in the
    layout of `row`: each of OTHER_OPTIONS that the kind has and that is right."""
    proved: list[dict[str, object]] = []
    default = example(row.model_type)
    for key, values in OTHER_OPTIONS.items():
        for value in values if row.model_type in REQUIRED and key in default.to_dict() else ():
            options = EXAMPLES.get(row.model_type, {}) | {key: deepcopy(value)}  # else transformers changes it
            try:
                config = CONFIG_MAPPING[row.model_type](**options)
                if switches(config) == switches(default):
                    continue
                agreement = prove_twin(make_twin(config), packed=row.layout == "packed", shares=not row.whole)
            except Exception:  # a value that the class refuses is none of a real model
                continue
            if not agreement.not_rows and not agreement.not_packed and not agreement.not_shared:
                proved.append({key: value})
    return proved


def data(rows: Sequence[Walked]) -> str:
    """Returns the content of FILE."""
    types: dict[str, dict[str, object]] = {}
    for row in rows:
        if row.layout:
            options = {"options": EXAMPLES.get(row.model_type, {}), "variants": proved_options(row)}
            entry: dict[str, object] = {"layout": row.layout, "why": row.reason, "whole": row.whole, **options}
            types[row.model_type] = {key: value for key, value in entry.items() if value}
    lines = [f"    {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in types.items()]
    body = ",\n".join(lines)
    return f'{{\n  "versions": {json.dumps(versions())},\n  "types": {{\n{body}\n  }}\n}}\n'


def save_model(model: PreTrainedModel, path: Path) -> None:
    """Saves a model with a tokenizer of numbers."""
    model.save_pretrained(path)
    words = {str(i): i for i in range(model.config.get_text_config().vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")))
    tokenizer.save_pretrained(path)


@contextmanager
def open_shard(path: Path, packing: str) -> Iterator[Shard]:
    """Returns a trainer of one shard, in a process group of one. Its start takes nothing from the written page."""
    sections = {
        "model": {"name": str(path), "dtype": "float32", "max_seq_len": 64},
        "orchestrator": {"batch_size": 2},
        "env": {"id": "sort"},
        "inference": {"sampling": {"max_tokens": 8}},
        "trainer": {"packing": packing, "learning_rate": 1e-3},
        "cluster": {"device": "cpu"},
    }
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    try:
        with patch("trainer.proof.proved_type", lambda config: None):
            shard = Shard(Config.model_validate(sections), 0, store, Packer(lambda _, bucket: bucket.copy()))
        with patch("trireme.core.prefixes.FEWEST_SHARED", COMMON):
            yield shard
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train_and_reopen(shard: Shard, base: Path, after: Path) -> None:
    """Makes a step, and compares logprobs before and after it with Hugging Face's. Raises AssertionError."""
    batch = make_batch()
    shared = any(micro.shared for micro in shard._micro_batches(batch.find_forest()))
    assert shared == (not shard.proof.why_whole), "the common prefix was not computed as the table will say"
    first = scatter_outputs(batch, [shard.forward(batch)])
    check_same(first, opened_logprobs(base, batch))
    output = shard.forward_backward(batch, "cross_entropy", {}, None)
    assert all(math.isfinite(value) for value in output.metrics.values()), output.metrics
    norm = shard.optim_step(AdamParams(learning_rate=1e-2), float(sum(LENGTHS))).metrics["grad_norm"]
    assert math.isfinite(norm), norm
    assert norm > 0, "no gradient"
    second = scatter_outputs(batch, [shard.forward(batch)])
    assert np.abs(second - first).max() > 10 * TOLERANCE, "the step changed nothing"
    published = shard.publish_weights(1)
    assert published is not None
    shard.save_weights(after, published.manifest.entries, published.source)
    check_same(second, opened_logprobs(after, batch))


def make_batch() -> TokenBatch:
    """Returns sequences of small token ids, two of them with a common prefix; every token counts."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, 30, length + 1) for length in LENGTHS]
    sequences[-1][:COMMON] = sequences[1][:COMMON]
    return TokenBatch.from_datums(
        [
            Datum(
                ModelInput(tokens[:-1].astype(np.int32)),
                {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, dtype=np.float32)},
            )
            for tokens in sequences
        ]
    )


@torch.no_grad()
def opened_logprobs(path: Path, batch: TokenBatch) -> npt.NDArray[np.float32]:
    """Returns the logprobs of the targets by the model that Hugging Face opens, one sequence alone after the other.

    Raises AssertionError for tensors that are missing or unknown there.
    """
    model, report = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    wrong = {kind: report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if report[kind]}
    assert not wrong, wrong
    logprobs = []
    for datum in (batch.datum(d) for d in range(len(batch))):
        tokens = torch.from_numpy(datum.model_input.tokens.astype(np.int64))[None]
        targets = datum.loss_fn_inputs["target_tokens"].to_torch().long()
        logits = model.eval()(input_ids=tokens, use_cache=False).logits[0].float()
        logprobs.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].numpy())
    return np.concatenate(logprobs)


def check_same(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> None:
    difference = float(np.abs(ours - theirs).max())
    assert difference <= TOLERANCE, f"logprobs differ by {difference:.3g} from those of what Hugging Face opens"


def _message_of(error: Exception) -> str:
    """Returns an error in one line: of a refusal what was given."""
    text = str(error).strip().partition("\n  expected: ")[0].removeprefix("given: ")
    return _in_one_line(text) or type(error).__name__


def _in_one_line(text: str) -> str:
    return " ".join(text.split())[:MOST_LETTERS]


def line(row: Walked, walked_types: Collection[str]) -> str:
    """Returns the row of the table. `known`: the architectures that vLLM has."""
    cells = (
        f"`{row.model_type}`",
        row.architecture,
        row.layout or ("not tried" if row.reason.startswith(NOT_TRIED) else "refused"),
        "yes" if row.architecture in walked_types else "",
        row.reason.removeprefix(f"{NOT_TRIED}: ").replace("|", "\\|"),
        (row.whole or "once").replace("|", "\\|") if row.layout else "",
    )
    return f"| {' | '.join(cells)} |"


def versions_text() -> str:
    """Says what the document is about."""
    return "transformers {transformers} and vLLM {vllm}".format(**versions())


def render(rows: Sequence[Walked], walked_types: Collection[str]) -> str:
    """Returns the whole page."""
    trained = sum(bool(row.layout) for row in rows)
    tried = sum(not row.reason.startswith(NOT_TRIED) for row in rows)
    table = [
        f"With {versions_text()} {tried} of {len(rows)} model types were tried: {trained} train, "
        f"{tried - trained} are refused.",
        "",
        "| model type | class | trains | vLLM knows it | why it is refused, or not packed | common prefixes |",
        "|---|---|---|---|---|---|",
        *(line(r, walked_types) for r in rows),
    ]
    return with_part(TARGET.read_text(encoding="utf-8"), "models", "\n".join(table))


if __name__ == "__main__":
    from vllm import ModelRegistry

    walked = [walk(model_type) for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]
    TARGET.write_text(render(walked, ModelRegistry.get_supported_archs()), encoding="utf-8")
    FILE.write_text(data(walked), encoding="utf-8")
