"""The recipes of `examples/recipes` in their small form: made rows, a tiny model, three steps."""

import tomllib
from pathlib import Path
from typing import Any

from renderer_support import QWEN3, bpe
from search_corpus import make

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "examples" / "recipes"
ROWS = {"gsm8k": "gsm8k", "math-4b-lora": "math", "math-8b-8gpu": "math", "apps": "apps", "search": ""}
"""The recipes, and the files of their made rows; the search agent's are made by its script."""
COMPANIES = 10


def made_args(recipe: str, directory: Path) -> dict[str, str]:
    """Returns the arguments of a recipe's environment that lead to its made rows. Writes the corpus to `directory`."""
    if recipe == "search":
        make(directory / "corpus", COMPANIES, 0)
        return {"corpus": str(directory / "corpus")}
    rows = str(DIRECTORY / "rows" / f"{ROWS[recipe]}.jsonl")
    return {"path": rows, "eval_path": rows}


def small_flags(recipe: str, directory: Path) -> list[str]:
    """Returns the flags of a recipe's small form, but for its model."""
    files = [word for name in (recipe, "small") for word in ("@", str(DIRECTORY / f"{name}.toml"))]
    args = made_args(recipe, directory)
    return [*files, *(word for key, value in args.items() for word in (f"--env.args.{key.replace('_', '-')}", value))]


def env_of(recipe: str, directory: Path) -> str:
    """Returns the environment of a recipe with made rows, as a value of --env."""
    env = tomllib.loads((DIRECTORY / f"{recipe}.toml").read_text())["env"]
    return _inline({**env, "args": {**env["args"], **made_args(recipe, directory)}})


def _inline(value: Any) -> str:
    """Returns a value of TOML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def make_tiny_model(directory: Path) -> None:
    """Writes a model with random weights and the chat template of Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = bpe(QWEN3)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
