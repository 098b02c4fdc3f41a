"""What the orchestrator needs of a model's directory: its tokenizer, its vocabulary's size, its longest sequence.

`AutoTokenizer` imports torch, some seconds of start-up. So a tokenizer that comes as `tokenizer.json`, as nearly all
do, is opened by the class that reads that file, and only others by `AutoTokenizer`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.rollout import RolloutLimits
from trireme.config import Config
from trireme.errors import BadInput


def load_tokenizer(name: str) -> Any:
    """The `transformers` tokenizer in a directory, or of that name on the hub."""
    from transformers.utils import cached_file

    if cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(name)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def rollout_limits(cfg: Config) -> RolloutLimits:
    """Limits of a rollout, from the configuration and the model's `config.json`. Raises BadInput if neither says how
    long a sequence may be."""
    from transformers.utils import cached_file

    described = json.loads(Path(str(cached_file(cfg.model.name, "config.json"))).read_text())
    described = described.get("text_config", described)
    longest = cfg.model.max_seq_len or described.get("max_position_embeddings")
    if longest is None:
        raise BadInput(f"the config.json of {cfg.model.name} has no max_position_embeddings: set model.max_seq_len")
    return RolloutLimits(
        vocab_size=described["vocab_size"],
        max_seq_len=min(longest, cfg.inference.max_model_len or longest),
        max_prompt_len=cfg.orchestrator.max_prompt_len,
    )
