"""Small models of the architectures train, publish and open again, or are refused; docs/models.md says which."""

import json
import re

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import make_models_docs as docs

PACKED = (
    "deepseek_v3",
    "gemma3",
    "glm4_moe",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",  # its own forward pass goes round the base model
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
ROWS = {"gpt_oss": "of a packed row differ", "qwen3_5": "when the sample before it changes"}
REFUSED = {
    "bert": "moves by .* when a later token changes",
    "gemma2": "differ by .* from those of the model's own logits",
    "llama4_text": "does not say which part of it computes hidden states",
    "modernbert-decoder": "differ by .* from those of the model's own logits",
    "xmod": "cannot be computed: ValueError: Input language unknown",
    "zamba": "decoder layers that share parameters",
    "bloom": "write max_position_embeddings into it",
}


def lines_of(page: str) -> dict[str, list[str]]:
    """Returns the cells of each row of the table, by model type."""
    rows = [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


ALIKE = {"glm4_moe", "mistral", "mixtral", "modernbert-decoder", "olmo2", "phi3", "qwen2", "qwen3"}
"""They take the ways of others that are always tried; the long test below tries these too."""
CASES = [(name, "packed", "") for name in PACKED]
CASES += [(name, "rows", reason) for name, reason in ROWS.items()]
CASES += [(name, "", reason) for name, reason in REFUSED.items()]


@pytest.mark.parametrize(
    ("model_type", "layout", "reason"),
    [pytest.param(*case, id=case[0], marks=[pytest.mark.long] if case[0] in ALIKE else []) for case in CASES],
)
def test_it_trains_or_the_reason_is_said(model_type: str, layout: str, reason: str) -> None:
    result = docs.walk(model_type)
    assert result.layout == layout
    assert re.search(reason, result.reason)


def test_the_page_is_of_the_installed_packages() -> None:
    """On failure: python scripts/make_models_docs.py"""
    page = docs.TARGET.read_text(encoding="utf-8")
    assert f"With {docs.versions_text()} " in page
    rows = lines_of(page)
    assert {name: cells[0] for name, cells in rows.items()} == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    trains = {name for name, cells in rows.items() if cells[1] in ("packed", "rows")}
    refused = {name for name, cells in rows.items() if cells[1] == "refused"}
    assert trains >= {*PACKED, *ROWS} >= docs.REQUIRED
    assert len(trains) >= 40
    assert len(trains | refused) >= 60
    assert all(rows[name][3] for name in rows.keys() - trains)  # each has its reason
    assert rows["llama"][1:3] == ["packed", "yes"]


def test_the_file_for_starts_agrees_with_the_page() -> None:
    """On failure: python scripts/make_models_docs.py"""
    page = lines_of(docs.TARGET.read_text(encoding="utf-8"))
    data = json.loads(docs.FILE.read_text(encoding="utf-8"))
    assert data["versions"] == docs.versions()
    shown = {name: (entry["layout"], entry.get("why", "")) for name, entry in data["types"].items()}
    assert shown == {
        name: (cells[1], cells[3].replace("\\|", "|")) for name, cells in page.items() if cells[1] in ("packed", "rows")
    }
    assert {name: entry.get("options", {}) for name, entry in data["types"].items()} == {
        name: docs.EXAMPLES.get(name, {}) for name in shown
    }
    assert {name for name, entry in data["types"].items() if "variants" in entry} == docs.REQUIRED


@pytest.mark.long
def test_every_architecture_trains_and_opens_again_or_is_refused() -> None:
    """And the page says the same, but for numbers."""
    lines = lines_of(docs.TARGET.read_text(encoding="utf-8"))
    wrong: dict[str, str] = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            (line,) = lines_of(docs.line(docs.walk(model_type), ())).values()
        except Exception as error:  # all of them are wanted in the report
            wrong[model_type] = repr(error)
            continue
        for cell, expected in zip((line[1], line[3]), (lines[model_type][1], lines[model_type][3]), strict=True):
            if re.sub(r"[\d.e-]+", "#", cell) != re.sub(r"[\d.e-]+", "#", expected):
                wrong[model_type] = f"{cell!r}, and the page says {expected!r}"
    assert wrong == {}
