"""A model that says what it is told: each token follows from the one before alone, with equal chances where there are
several. So what comes of environments on a real engine is known beforehand."""

from collections.abc import Mapping, Sequence
from pathlib import Path

CHARACTERS = Path(__file__).parents[2] / "assets" / "sort-base"
SIZE = 128
"""Of the hidden state: a direction for each token."""
SURE = 40.0
"""How far the logits of what may follow are above all others."""


def make_scripted_model(directory: Path, follows: Mapping[str, Sequence[str]]) -> None:
    """Writes it, with the shipped tokenizer of characters. `follows`: what may come after a token; those that are not
    characters become tokens of their own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHARACTERS)
    vocabulary = tokenizer.get_vocab()
    all_texts = dict.fromkeys([*follows, *(text for texts in follows.values() for text in texts)])
    tokenizer.add_tokens([text for text in all_texts if text not in vocabulary])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=SIZE,
        intermediate_size=SIZE,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()  # the layer adds nothing: what is looked at is the last token as it is
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE)[: len(tokenizer)])
        model.lm_head.weight.zero_()
        for token, texts in follows.items():
            for text in texts:
                place = tokenizer.convert_tokens_to_ids(text), tokenizer.convert_tokens_to_ids(token)
                model.lm_head.weight[place] = SURE / SIZE**0.5  # the norm before it makes that SURE
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
