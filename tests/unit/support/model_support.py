"""Models that exist only as their sizes."""

from trireme.config.model_facts import ModelFacts

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
"""Sizes as a `config.json` has them."""

FACTS = ModelFacts(
    name="m",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    hidden_size=128,
    num_layers=2,
    vocab_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_size=256,
    num_chosen=0,
    num_parameters=1_000_000,
    multiplied_parameters=1_000_000,
    tied_embeddings=True,
    max_position_embeddings=64,
    windows=(None, None),
    linear_widths={"q_proj": 512, "k_proj": 384, "v_proj": 384, "o_proj": 512, "lm_head": 160}
    | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 768),
)
