"""Checks of the section `trainer`: learning rate, shared prefixes, loss, KL penalty and LoRA."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.config.losses import LOSSES, ROLLOUT_COLUMNS, find_loss, loss_refusals
from trireme.config.model_facts import ModelFacts
from trireme.config.schema import CommonConfig, Config
from trireme.config.trainer import ATTENTION, LINEAR, MLP, UNEMBED, LoraConfig
from trireme.core.refusals import Refusal

AUTO_LEARNING_RATE_FAMILIES = ("qwen", "llama")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of `max_lora_rank` that vLLM takes: its buffers and kernels are made for one of these."""


def trainer_refusals(config: CommonConfig, facts: ModelFacts | None) -> Iterator[Refusal]:
    """Yields the faults of the section `trainer`. `facts` None: faults that depend on the model are left out."""
    if isinstance(config, Config):
        yield from _loss(config)
        yield from _kl(config)
    if config.normalization.kind == "sequence_mean_token_sum_norm" and config.normalization.longest is None:
        yield Refusal(
            "trainer.loss_normalization = sequence_mean_token_sum_norm without model.max_seq_len",
            "the longest length of a sequence, which it divides by",
            "set --model.max-seq-len",
        )
    yield from _lora(config, facts)
    yield from _learning_rate(config, facts)


def _learning_rate(config: CommonConfig, facts: ModelFacts | None) -> Iterator[Refusal]:
    has_rule = facts is None or facts.model_type.lower().startswith(AUTO_LEARNING_RATE_FAMILIES)
    if facts and not has_rule and config.trainer.learning_rate == "auto":
        yield Refusal(
            f"trainer.learning_rate = auto for {facts.name} of type {facts.model_type}",
            "a number: the rule for auto is known for Qwen and Llama models only",
            "write --trainer.learning-rate 1e-5, or what suits the model",
        )


def _loss(config: Config) -> Iterator[Refusal]:
    if find_loss(config.loss_fn).columns != ROLLOUT_COLUMNS:
        *names, last = (name for name, loss in LOSSES.items() if loss.columns == ROLLOUT_COLUMNS)
        yield Refusal(
            f"trainer.loss_fn = {config.loss_fn}",
            "a loss for reinforcement learning: rollouts have advantages, and no weights",
            f"leave --trainer.loss-fn out, or choose {', '.join(names)} or {last}",
        )
    else:
        yield from loss_refusals(config.loss_fn, config.trainer.loss_fn_config)


def _kl(config: Config) -> Iterator[Refusal]:
    kl = config.trainer.kl
    if kl.coef and kl.reference.base_model is None and not config.base_is_reference:
        yield Refusal(
            f"trainer.kl.coef = {kl.coef:g} without a reference",
            "a model to stay near",
            f"add --trainer.kl.reference.base-model {config.model.name}, from which the run starts, or another",
        )
    unread = [name for name, value in kl.reference.model_dump().items() if value]
    if unread and not kl.coef:
        yield Refusal(
            f"trainer.kl.reference.{unread[0]} with trainer.kl.coef = 0",
            "a penalty for which a reference is needed",
            "set --trainer.kl.coef, or leave the reference out",
        )
    if kl.discount and not kl.coef:
        yield Refusal(
            f"trainer.kl.discount = {kl.discount:g} with trainer.kl.coef = 0",
            "a penalty to discount",
            "set --trainer.kl.coef, or leave the discount out",
        )


def _lora(config: CommonConfig, facts: ModelFacts | None) -> Iterator[Refusal]:
    lora = config.trainer.lora
    if lora.rank is None:
        changed = [name for name, value in lora.model_dump().items() if value != getattr(LoraConfig(), name)]
        if changed:
            yield Refusal(
                f"trainer.lora.{changed[0]} without trainer.lora.rank",
                "a rank, without which all weights are trained and there is no adapter",
                "set --trainer.lora.rank (16 or 32 is usual), or leave the other keys of trainer.lora out",
            )
        return
    if lora.rank not in RANKS:
        below = max(rank for rank in RANKS if rank < lora.rank)
        above = [rank for rank in RANKS if rank > lora.rank]
        yield Refusal(
            f"trainer.lora.rank = {lora.rank}",
            f"a rank that vLLM takes: {', '.join(map(str, RANKS))}",
            f"set --trainer.lora.rank to {f'{below} or {above[0]}' if above else below}",
        )
    yield from _targets(lora, facts)
    reference = config.kl_reference
    if reference and reference.update_every and not config.base_is_reference:
        yield Refusal(
            f"trainer.kl.reference.update_every = {reference.update_every} with trainer.lora.rank and another model as "
            "the reference",
            "the policy's own base as the reference: an update then copies the policy's adapters onto it",
            "leave trainer.kl.reference.base_model and load_checkpoint_path out, or update_every",
        )


def _targets(lora: LoraConfig, facts: ModelFacts | None) -> Iterator[Refusal]:
    targets = lora.target_modules
    unknown = [name for name in targets if name not in LINEAR]
    if unknown:
        yield Refusal(
            f"trainer.lora.targets with {', '.join(unknown)}",
            f"names of a decoder's linear layers: {', '.join(LINEAR)}",
            "correct --trainer.lora.targets, or leave it out: train_attn, train_mlp and train_unembed choose",
        )
    elif not set(targets) - set(UNEMBED):
        yield Refusal(
            f"trainer.lora for {'the output matrix alone' if targets else 'no layer at all'}",
            f"at least one of {', '.join((*ATTENTION, *MLP))}",
            "set --trainer.lora.train-attn true, or --trainer.lora.train-mlp true",
        )
    elif facts and not any(name in facts.linear_widths for name in targets):
        yield Refusal(
            f"adapters for {', '.join(targets)} of {facts.name}, which has no such layers",
            f"at least one that it has: {', '.join(name for name in LINEAR if name in facts.linear_widths) or 'none'}",
            "correct --trainer.lora.targets, or train the whole model without --trainer.lora.rank",
        )
    if facts and "lm_head" in targets and facts.tied_embeddings:
        yield Refusal(
            f"an adapter for lm_head of {facts.name}, whose output matrix is that of its embeddings",
            "an output matrix of its own: merged into a shared one, the adapter would change the inputs too",
            "leave --trainer.lora.train-unembed out (and lm_head out of --trainer.lora.targets)",
        )
    if facts and facts.num_chosen and set(targets) & set(MLP):
        yield Refusal(
            f"adapters for the MLPs of {facts.name}, a mixture of experts",
            "MLPs that are single matrices: experts are stacked, and get no adapters",
            "set --trainer.lora.train-mlp false",
        )
