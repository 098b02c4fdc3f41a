"""LoRA: which linear layers of a decoder get an adapter, how large it is, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from trireme.config.model_facts import ModelFacts
from trireme.config.refusals import Refusal
from trireme.config.schema import CommonConfig, LoraConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = ("lm_head",)
KNOWN = (*ATTENTION, *MLP, *UNEMBED)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`: its buffers and kernels are made for one of these."""


def lora_targets(lora: LoraConfig) -> tuple[str, ...]:
    """Names of the linear layers that get an adapter, in the order of `KNOWN`.

    >>> lora_targets(LoraConfig(rank=8, train_mlp=False))
    ('q_proj', 'k_proj', 'v_proj', 'o_proj')
    """
    parts = ((lora.train_attn, ATTENTION), (lora.train_mlp, MLP), (lora.train_unembed, UNEMBED))
    wanted = lora.targets or [name for on, names in parts if on for name in names]
    return tuple(sorted(set(wanted), key=lambda name: (KNOWN.index(name) if name in KNOWN else len(KNOWN), name)))


def trained_parameters(lora: LoraConfig, facts: ModelFacts) -> int:
    """Counts the numbers that are trained: rank x (inputs + outputs) of every layer with an adapter; without LoRA all
    parameters of the model."""
    if lora.rank is None:
        return facts.num_parameters
    hidden, heads, kv_heads = facts.hidden_size, facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    widths = {
        **dict.fromkeys(("q_proj", "o_proj"), hidden + heads),
        **dict.fromkeys(("k_proj", "v_proj"), hidden + kv_heads),
        **dict.fromkeys(MLP, hidden + facts.mlp_size),
    }
    targets = lora_targets(lora)
    layer = sum(width for name, width in widths.items() if name in targets)
    head = facts.vocab_size + hidden if "lm_head" in targets else 0
    return lora.rank * (facts.num_layers * layer + head)


def lora_refusals(config: CommonConfig, facts: ModelFacts | None) -> Iterator[Refusal]:
    """`facts` none leaves out what depends on the model."""
    lora = config.trainer.lora
    if lora.rank is None:
        yield from _unread(lora)
        return
    yield from _rank(lora.rank)
    yield from _targets(lora)
    yield from _reference(config)
    if facts:
        yield from _model(lora, facts)


def lora_warnings(config: CommonConfig) -> Iterator[str]:
    """For reinforcement learning; supervised training has no sampler to agree with."""
    lora = config.trainer.lora
    if lora.rank is not None and lora.dropout:
        yield (
            f"trainer.lora.dropout = {lora.dropout:g}: gradients are those of an adapter with some of its inputs "
            "dropped, tokens are sampled with all of them, so ratios scatter around 1 even at age 0 (0 switches it off)"
        )


def _unread(lora: LoraConfig) -> Iterator[Refusal]:
    changed = [name for name, value in lora.model_dump().items() if value != getattr(LoraConfig(), name)]
    if changed:
        yield Refusal(
            f"trainer.lora.{changed[0]} without trainer.lora.rank",
            "a rank, without which all weights are trained and there is no adapter",
            "set --trainer.lora.rank (16 or 32 is usual), or leave the other keys of trainer.lora out",
        )


def _rank(rank: int) -> Iterator[Refusal]:
    if rank in RANKS:
        return
    around = [pair for pair in pairwise(RANKS) if pair[0] < rank < pair[1]]
    nearest = " or ".join(map(str, around[0])) if around else str(RANKS[-1])
    yield Refusal(
        f"trainer.lora.rank = {rank}",
        f"a rank that vLLM takes: {', '.join(map(str, RANKS))}",
        f"set --trainer.lora.rank to {nearest}",
    )


def _targets(lora: LoraConfig) -> Iterator[Refusal]:
    targets = lora_targets(lora)
    unknown = [name for name in targets if name not in KNOWN]
    if unknown:
        yield Refusal(
            f"trainer.lora.targets with {', '.join(unknown)}",
            f"names of a decoder's linear layers: {', '.join(KNOWN)}",
            "correct --trainer.lora.targets, or leave it out: train_attn, train_mlp and train_unembed choose",
        )
    elif not set(targets) - set(UNEMBED):
        yield Refusal(
            f"trainer.lora for {'the output matrix alone' if targets else 'no layer at all'}",
            f"at least one of {', '.join((*ATTENTION, *MLP))}",
            "set --trainer.lora.train-attn true, or --trainer.lora.train-mlp true",
        )


def _reference(config: CommonConfig) -> Iterator[Refusal]:
    reference = config.kl_reference
    if reference and reference.update_every and not config.base_is_reference:
        yield Refusal(
            f"trainer.kl.reference.update_every = {reference.update_every} with trainer.lora.rank and another model as "
            "the reference",
            "the base as the reference, whose adapters then become the policy's: another model has none",
            "leave trainer.kl.reference.base_model and load_checkpoint_path out, or update_every",
        )


def _model(lora: LoraConfig, facts: ModelFacts) -> Iterator[Refusal]:
    targets = lora_targets(lora)
    if "lm_head" in targets and facts.tied_embeddings:
        yield Refusal(
            f"an adapter for lm_head of {facts.name}, whose output matrix is that of its embeddings",
            "an output matrix of its own: merged into a shared one, the adapter would change the inputs too",
            "leave --trainer.lora.train-unembed out (and lm_head out of --trainer.lora.targets)",
        )
    if facts.num_chosen and set(targets) & set(MLP):
        yield Refusal(
            f"adapters for the MLPs of {facts.name}, a mixture of experts",
            "MLPs that are single matrices: experts are stacked, and get no adapters",
            "set --trainer.lora.train-mlp false",
        )
