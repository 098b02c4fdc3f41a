"""Measures a model's sizes on the model itself, which transformers builds without memory for its tensors.

So the sizes are right for every architecture that transformers can build, whatever names its config.json uses. It costs
the import of torch and transformers, 4 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "seq_length", "context_length")


def measure(described: Mapping[str, object]) -> dict[str, object]:
    """Returns {field of ModelFacts: value} for the model whose config.json is `described`. Leaves out four fields: the
    model's name, its architecture, its type, and `described` itself.

    Raises ValueError that names the size that cannot be read.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        config = _configuration(described)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.bfloat16,
                attn_implementation="eager",  # else the JSON could name code to fetch
                trust_remote_code=False,
            )
    except Exception as error:  # each architecture has checks and failures of its own
        reason = str(error).strip().partition("\n")[0]  # some go on with a list of all architectures
        raise ValueError(f"transformers cannot build the model ({type(error).__name__}: {reason})") from error
    text = config.get_text_config()
    text.allow_global_per_layer_attribute_access = True  # a size that single layers change counts as the common one
    hidden, layers, vocabulary = (_size(text, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    windows = _windows(text, layers)
    heads, kv_heads, head_dim = _heads(text, hidden) if windows else (0, 0, 0)
    experts = _first(text, EXPERTS) or 0
    multiplied, chosen = _multiplied(model, experts, text)
    attention = sum(p.numel() for name, p in _decoder(model).named_parameters() if "att" in name.lower())
    mlps = max(0, multiplied - vocabulary * hidden - attention)
    return {
        "hidden_size": hidden,
        "num_layers": layers,
        "vocab_size": vocabulary,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_size": mlps // (3 * hidden * layers),
        "num_chosen": chosen,
        "num_parameters": model.num_parameters(),
        "multiplied_parameters": multiplied,
        "tied_embeddings": _shares_embeddings(model),
        "max_position_embeddings": _longest(text),
        "windows": windows,
        "linear_widths": _linear_widths(model),
    }


def _longest(text: PretrainedConfig) -> int:
    value = _first(text, LENGTH)
    if type(value) is not int or value < 1:
        raise ValueError(
            f"it does not say how long a sequence may be ({', '.join(LENGTH)}): write max_position_embeddings into it"
        )
    return value


def _configuration(described: Mapping[str, object]) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, __version__

    model_type = described.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise KeyError(f"model_type = {model_type} is none that transformers {__version__} knows")
    fields = {key: value for key, value in described.items() if key != "auto_map"}  # no code from elsewhere
    kind = CONFIG_MAPPING[model_type]
    return kind.from_dict(kind._decode_special_floats(fields))  # JSON has no infinity


def _first(text: PretrainedConfig, names: tuple[str, ...]) -> Any:
    values = (getattr(text, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _size(text: PretrainedConfig, *names: str) -> int:
    value = _first(text, names)
    if type(value) is not int or value < 1:
        size = "is missing" if value is None else f"is {value!r}"
        raise ValueError(f"its {' or '.join(names)} {size}; expected a whole number above 0")
    return value


def _windows(text: PretrainedConfig, layers: int) -> tuple[int | None, ...]:
    """Returns a value for each layer with attention: the maximum number of tokens that a token attends to, itself
    included; None if a token attends to all tokens before it."""
    kinds = getattr(text, "layer_types", None) or (
        ["attention"] * layers if getattr(text, "num_attention_heads", None) else []
    )
    window = getattr(text, "sliding_window", None)
    chunk = getattr(text, "attention_chunk_size", None)
    limits = {"attention": window, "sliding_attention": window, "hybrid_sliding": window, "chunked_attention": chunk}
    return tuple(
        limits.get(kind) for kind in kinds if ("attention" in kind and "linear" not in kind) or "hybrid" in kind
    )


def _heads(text: PretrainedConfig, hidden: int) -> tuple[int, int, int]:
    """Returns (number of query heads, number of key heads, width of a head). For latent attention the width is the mean
    of the widths of keys and values."""
    heads = _size(text, "num_attention_heads")
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    values = getattr(text, "v_head_dim", None)
    if values:
        keys = getattr(text, "qk_nope_head_dim", 0) + getattr(text, "qk_rope_head_dim", 0)
        return heads, kv_heads, ((keys or values) + values) // 2
    return heads, kv_heads, getattr(text, "head_dim", None) or hidden // heads


def _multiplied(model: PreTrainedModel, experts: int, text: PretrainedConfig) -> tuple[int, int]:
    """Returns (number of active parameters per token, number of experts that a layer chooses for a token). A parameter
    is active if the token is multiplied with it: experts count only if they are chosen, and embeddings that are only
    looked up do not count."""
    from torch import nn

    head = model.get_output_embeddings()
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    every = dict(_decoder(model).named_parameters())
    in_experts = {
        id(p) for name, p in every.items() if ".experts." in name or (p.ndim == 3 and p.shape[0] == experts > 1)
    }
    chosen = _size(text, *CHOSEN) if in_experts else 0
    counts = {id(p): p.numel() for p in every.values() if id(p) not in looked_up}
    shared = sum(n for key, n in counts.items() if key not in in_experts)
    routed = sum(n for key, n in counts.items() if key in in_experts)
    share = chosen / _size(text, *EXPERTS) if in_experts else 0
    return shared + round(routed * share) + (head.weight.numel() if head is not None else 0), chosen


def _decoder(model: PreTrainedModel) -> nn.Module:
    """Returns the submodule that computes the hidden states of text, without the output matrix."""
    from transformers import PreTrainedModel

    decoder = model.get_decoder()  # some call their head by this name
    if isinstance(decoder, PreTrainedModel):
        return decoder
    return model.base_model


def _linear_widths(model: PreTrainedModel) -> dict[str, int]:
    from torch import nn

    widths: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            widths[name.rpartition(".")[2]] += module.in_features + module.out_features
    return dict(widths)


def _shares_embeddings(model: PreTrainedModel) -> bool:
    head: nn.Module | None = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight
