"""The sizes of a model by its config.json: enough to check a configuration and to plan memory."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.config.measured_model import measure
from trireme.config.run import DTYPE_BYTES
from trireme.core.base_digest import read_header
from trireme.core.refusals import Refusal
from trireme.core.tokenizer import looks_like_path

if TYPE_CHECKING:
    from trireme.config.schema import CommonConfig
    from trireme.config.trainer import LoraConfig

HUB_TIMEOUT_S = 5.0
PLAIN_TYPES = ("llama", "qwen2", "qwen3")
PLAIN_SIZES = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings"),
}
"""Of a model of one of these types, `_plain_sizes` counts the parameters if its config.json has all of these sizes."""


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a decoder, from its config.json."""

    name: str
    """The directory or hub name of the model."""
    architecture: str
    """The class of the model in transformers, such as Qwen3ForCausalLM."""
    model_type: str
    """The family, such as qwen3."""
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    """Attention heads of the queries in a layer."""
    num_kv_heads: int
    """Attention heads of keys and values in a layer."""
    head_dim: int
    mlp_size: int
    """The summed width of the MLPs that a token passes through in a layer."""
    num_chosen: int
    """Experts that a token passes through in a layer; 0 without experts."""
    num_parameters: int
    """All parameters, as the sizes imply."""
    multiplied_parameters: int
    """Parameters that a token is multiplied with: only the chosen experts, and the embeddings once only."""
    tied_embeddings: bool
    """True: the output matrix is the embedding matrix."""
    max_position_embeddings: int
    """The longest sequence of the model, in tokens."""
    windows: tuple[int | None, ...]
    """For each layer with attention: how many tokens a token sees at most, itself included; None: all before it."""
    linear_widths: Mapping[str, int] = field(hash=False)
    """{name of a linear layer, such as q_proj: inputs and outputs, summed over all layers of this name}."""
    described: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The whole config.json."""

    @property
    def kv_values_per_token(self) -> int:
        """The number of values that the KV cache holds for one token: keys and values of every layer with attention."""
        return 2 * len(self.windows) * self.num_kv_heads * self.head_dim

    @property
    def stored_bytes(self) -> int:
        """Bytes of the model's files, in the dtype that its config.json names; in float32 if it names none."""
        dtype = self.described.get("dtype") or self.described.get("torch_dtype")
        return self.num_parameters * DTYPE_BYTES.get(str(dtype), 4)

    @property
    def rank_counts(self) -> list[int]:
        """The numbers of ranks over which a layer's heads can be divided. Each rank has the same number of query heads;
        it also has the same number of key heads, or a copy of one key head. Empty without attention."""
        heads = self.num_heads
        keys = self.num_kv_heads
        return [n for n in range(1, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embeddings, and of the output matrix unless it is tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def attention_width(self) -> int:
        """The number of values in the queries of one token, summed over all layers with attention."""
        return len(self.windows) * self.num_heads * self.head_dim

    @property
    def attention_length(self) -> int:
        """The sequence length, in tokens, at which causal attention costs as many multiplications per token as all
        other computation. With n tokens, a token is multiplied on average with n / 2 keys and n / 2 values in each
        layer, and once with every parameter."""
        return max(1, self.multiplied_parameters // max(1, self.attention_width))

    def trained_parameters(self, lora: LoraConfig) -> int:
        """Returns the number of trained parameters. Without LoRA these are all parameters. With LoRA the number is
        `rank * (inputs + outputs)`, summed over all linear layers with an adapter."""
        if lora.rank is None:
            return self.num_parameters
        return lora.rank * sum(self.linear_widths.get(name, 0) for name in lora.target_modules)

    @classmethod
    def of(cls, config: CommonConfig, *, required: bool) -> ModelFacts | None:
        """Returns the sizes of the model `config.model`, which is a local directory or a model on the hub. If
        `model.facts` names a file, reads the sizes from that file instead. If the hub cannot be reached, returns None
        unless the sizes are `required`.

        Raises BadInput if there is no such directory, model or file, or if its config.json lacks a size. If the sizes
        are `required`, raises it also if they cannot be read, or if `model.facts` is set: a run must use the model's
        own sizes.
        """
        name = config.model.name
        if config.model.facts is not None:
            text: str | None = _read_facts(config.model.facts, required)
        elif looks_like_path(name):
            text = _read_local(name)
        else:
            text = _read_hub(name, required)
        if text is None:
            return None
        return cls.from_json(name, text)

    @classmethod
    def from_json(cls, name: str, text: str) -> ModelFacts:
        """Returns the facts from `text`, the config.json of the model `name`. For a plain decoder they are computed
        from the sizes in `text`. For any other model, transformers builds the model without memory for its weights.
        Raises BadInput that names the unreadable part."""
        try:
            described = json.loads(text)
            if _is_plain(described):
                sizes = _plain_sizes(described)
            else:
                sizes = measure(described)
            model_type = described["model_type"]
            architecture = (described.get("architectures") or [model_type])[0]
            return cls(name, architecture, model_type, **sizes, described=described)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if type(error) is ValueError:
                reason = str(error)
            else:
                reason = f"{type(error).__name__}: {error}"
            raise Refusal(
                f"model.name = {name}, whose config.json cannot be used: {reason}",
                "the config.json of a causal language model of text (docs/models.md), with its sizes",
                "give another model, or repair the file",
            ) from None


def _is_plain(described: Mapping[str, object]) -> bool:
    """Returns True if the model is of a common architecture and its config.json has all sizes that `_plain_sizes`
    needs. Then the import of torch, which takes seconds, is not needed."""
    unusual = any(described.get(switch) for switch in ("attention_bias", "mlp_bias", "use_sliding_window"))
    written = all(type(described.get(key)) is int for key in PLAIN_SIZES)
    return described.get("model_type") in PLAIN_TYPES and written and not unusual


def _plain_sizes(described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a decoder of the Llama type, as {field of ModelFacts: value}.

    Counts the parameters of the embeddings, of the output matrix unless it is tied, and of the final norm. For each
    layer it counts the four projections of attention (with biases of queries, keys and values in Qwen2), the three
    projections of the gated MLP, and two norms (in Qwen3 also the norms of query and key).
    """
    hidden = described["hidden_size"]
    layers = described["num_hidden_layers"]
    vocabulary = described["vocab_size"]
    heads = described["num_attention_heads"]
    tied = bool(described.get("tie_word_embeddings"))
    kv_heads = described.get("num_key_value_heads") or heads
    head_dim = described.get("head_dim") or hidden // heads
    # The inputs or outputs of each matrix that are not `hidden`.
    widths = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    if described["model_type"] == "qwen2":
        biases = sum(widths.values())
    else:
        biases = 0
    widths["o_proj"] = heads * head_dim
    widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), described["intermediate_size"])
    norms = 2 * hidden + (2 * head_dim if described["model_type"] == "qwen3" else 0)
    multiplied = vocabulary * hidden + layers * (hidden * sum(widths.values()) + biases + norms) + hidden
    return {
        "hidden_size": hidden,
        "num_layers": layers,
        "vocab_size": vocabulary,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_size": described["intermediate_size"],
        "num_chosen": 0,
        "num_parameters": multiplied + (0 if tied else vocabulary * hidden),
        "multiplied_parameters": multiplied,
        "tied_embeddings": tied,
        "max_position_embeddings": described["max_position_embeddings"],
        "windows": (None,) * layers,
        "linear_widths": {
            **{name: layers * (hidden + width) for name, width in widths.items()},
            "lm_head": hidden + vocabulary,
        },
    }


def _read_facts(file: str, required: bool) -> str:
    """Returns the text of `file`, the value of `model.facts`. Raises BadInput if the file cannot be read. If the facts
    are `required`, always raises BadInput: a run needs the sizes of its own model, and the file may give others."""
    if required:
        raise Refusal(
            f"model.facts = {file}, without --dry-run",
            "a dry run of `rl` or `sft`: all other runs read the config.json of model.name",
            "add --dry-run, or leave --model.facts out",
        )
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            f"model.facts = {file}, which cannot be read: {error}",
            "a file with the config.json of model.name",
            f"correct the path; a relative path begins in {Path.cwd()}",
        ) from None


def _read_local(name: str) -> str:
    file = Path(name).expanduser() / "config.json"
    if file.is_file():
        for weights in sorted(file.parent.glob("*.safetensors")):
            read_header(weights)
        return file.read_text(encoding="utf-8")
    if file.parent.is_dir():
        problem = "a directory without config.json"
    else:
        problem = f"no directory (relative paths begin in {Path.cwd()})"
    if (file.parent / "adapter_config.json").is_file():
        problem = "a LoRA adapter without the model it belongs to (trireme export RUN --merge makes a whole one)"
    raise Refusal(
        f"model.name = {name}, which is {problem}",
        "a Hugging Face model directory (config.json, *.safetensors, tokenizer.json), or a name on the hub",
        "correct --model.name, or start in the directory that the path is relative to",
    )


def _read_hub(name: str, required: bool) -> str | None:
    """Returns the text of the config.json of the model `name`, from the local cache or the hub. If the file is not in
    the cache and the hub cannot be reached, returns None, or raises BadInput if the text is `required`. Raises BadInput
    also if the hub refuses the name or the access."""
    import huggingface_hub as hub
    from huggingface_hub.constants import ENDPOINT as endpoint
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    directory = Path.cwd()
    try:
        cached = hub.try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str) and not hub_reachable(endpoint):
            if not required:
                return None
            raise Refusal(
                f"model.name = {name}: no directory of that name in {directory}; not in the local cache; "
                f"and {endpoint} cannot be reached",
                "a local directory, a cached model, or a reachable hub",
                f"give a directory, or run `hf download {name}` where there is a network and copy the cache (HF_HOME) "
                "here",
            )
        if isinstance(cached, str):
            file = cached
        else:
            file = hub.hf_hub_download(name, "config.json")
        return Path(file).read_text(encoding="utf-8")
    except (HfHubHTTPError, HFValidationError) as error:
        raise Refusal(
            f"model.name = {name}: {str(error).splitlines()[0]}",
            f"a model on {endpoint}, or a directory (there is none of that name in {directory})",
            "correct the name; for a gated model accept its licence and log in with `hf auth login`",
        ) from None


def hub_reachable(endpoint: str) -> bool:
    """Returns True if `endpoint` answers within HUB_TIMEOUT_S. Tries only once, because the hub's own client would
    retry for 23 s."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)  # it answered
    return True
