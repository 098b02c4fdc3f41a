"""A model that exists only as its sizes."""

from trireme.config.model_facts import ModelFacts

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
