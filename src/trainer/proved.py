"""Kinds of models that docs/models.md shows to be computed right: a run of one of these needs no twin at its start.

`scripts/make_models_docs.py` writes `proved_models.json` with the page. For each model type the file says in which
layout its small model trained, why it cannot share prefixes if it cannot, and with which options of its configuration
this was shown. A model is of a proved kind when it has the same switches (flags, scales, soft caps, names of functions,
kinds of layers), and when transformers and vLLM have the versions of the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

from trireme.config.installed import installed_vllm

FILE = Path(__file__).with_name("proved_models.json")
IN_PAGE = " (docs/models.md)"
IGNORED = re.compile(
    r"transformers_version|_name_or_path|architectures|(torch_)?dtype|id2label|label2id|output_.*|return_dict|use_cache"
    r"|.*token_id|.*initializer_range|.*_eps|.*epsilon|.*dropout.*|.*_pdrop|.*aux_loss_coef"
)
"""Matches keys of a configuration that are not compared: only the model's class reads them, whatever the layout of its
rows, or no forward pass depends on them."""
ROPE = re.compile(r"(.*\.)?rope_(parameters|scaling)(\..*)?\.(?!.*type).*")
"""Matches keys for numbers of rotary embeddings, which are not compared, because only the model's class reads them.
The type of the embeddings is compared."""
LARGE = "more than 1"
"""Replaces each whole number above 1, which is a size."""


@dataclass(frozen=True)
class ProvedType:
    """The result of docs/models.md for one model type. It is used instead of a twin's `Agreement`. Padded rows are
    right for each type on the page. If packed rows or shared prefixes are not right, the result says why."""

    not_packed: str
    """Why models of this type are computed in padded rows; empty if packed rows are right."""
    not_shared: str
    """Why prefixes are not shared; empty if they can be."""
    not_rows = ""
    tolerance = 0.0


def proved_type(config: PretrainedConfig) -> ProvedType | None:
    """Returns the result of docs/models.md for the model type and switches of `config`. Returns None if the page has no
    such model, or was written with other versions of transformers and vLLM."""
    page = _page()
    entry = page["types"].get(config.model_type)
    if entry is None or page["versions"] != versions():
        return None
    options = entry.get("options", {})
    tried = [options, *(options | variant for variant in entry.get("variants", []))]
    proved = [switches(CONFIG_MAPPING[config.model_type](**deepcopy(values))) for values in tried]
    shown = switches(config)
    keys = shown.keys() | {key for values in proved for key in values}
    if any(all(values.get(key) != shown.get(key) for values in proved) for key in keys):
        return None
    return ProvedType(entry.get("why", ""), entry.get("whole", ""))


def versions() -> dict[str, str]:
    """Returns the installed versions of transformers and vLLM. The results in docs/models.md hold only for the versions
    that this page names."""
    engine = (installed_vllm() or "none").rpartition(" ")[2]  # the builds for CPUs and GPUs know the same models
    return {"transformers": transformers.__version__, "vllm": engine}


def switches(config: PretrainedConfig) -> dict[str, str]:
    """Returns {dotted key: its values as text} for the parts of a configuration that decide a model's kind: two models
    of one kind have the same result. A whole number above 1 is a size and becomes "more than 1". Keys with the value
    None are left out."""
    by_key: dict[str, set[str]] = {}
    for key, value in _leaves(config.to_dict(), ""):
        by_key.setdefault(key, set()).add(value)
    return {key: ", ".join(sorted(values)) for key, values in by_key.items()}


def _leaves(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yields (dotted path, text) for each value in `value`, a section of a configuration, and in the sections within
    it. A list and its items have the same path."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            inner = f"{path}.{name}"
            if not IGNORED.fullmatch(str(name)) and not (ROPE.fullmatch(inner) and not isinstance(part, Mapping)):
                yield from _leaves(part, inner)
    elif isinstance(value, list | tuple | set):
        yield path, "a list"
        for part in value:
            yield from _leaves(part, path)
    elif value is not None:
        yield path, LARGE if type(value) is int and value > 1 else repr(value)


@cache
def _page() -> dict[str, Any]:
    page: dict[str, object] = json.loads(FILE.read_text(encoding="utf-8"))
    return page
