"""Runs a recipe of Tinker's cookbook, as it is, on a sorting task and without a model hub: docs/tinker.md.

    uv run trireme serve @ examples/sort.toml --trainer.lora.rank 32 --service.tinker.names Qwen/Qwen3-8B-Base
    python examples/recipes/cookbook.py tinker_cookbook.recipes.rl_loop model_name=Qwen/Qwen3-8B-Base \\
        log_path=/tmp/rl-loop ...

The second command is for an environment that has the cookbook, with TINKER_BASE_URL and TINKER_API_KEY set.

A recipe takes from the hub a data set, and the tokenizer of a model whose name the cookbook knows. Here the data sets
are written to a directory, where `datasets` finds them by their names, and the tokenizer of the shipped model is
registered under that name. The recipes' prompts are long; the shipped model knows `Sort: 312\\n`. So the renderer
that is registered asks the last question alone, and puts the answer into the `\\boxed{}` that graders look for.
All three are hooks of the cookbook or of `datasets`; nothing of the recipe is replaced.
"""

import json
import os
import random
import runpy
import sys
import tempfile
from pathlib import Path

MODEL = Path(__file__).parents[2] / "assets" / "sort-base"
NAMED = "Qwen/Qwen3-8B-Base"  # a name for which the cookbook's table has the renderer `role_colon`
PROBLEMS = {"train": 2048, "test": 32}


def write_data(directory: Path) -> None:
    """Writes problems as the data sets that the recipes ask for: gsm8k for reinforcement learning, no_robots for
    supervised training."""
    for split, number in PROBLEMS.items():
        chosen = random.Random(split)
        digits = ["".join(chosen.choices("123456789", k=chosen.randint(3, 6))) for _ in range(number)]
        pairs = [(f"Sort: {each}", "".join(sorted(each))) for each in digits]
        problems = [{"question": question, "answer": f"#### {answer}"} for question, answer in pairs]
        chats = [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in pairs
        ]
        for name, config, rows in (("openai/gsm8k", "main", problems), ("HuggingFaceH4/no_robots", "default", chats)):
            place = directory / name
            place.mkdir(parents=True, exist_ok=True)
            files = [f"  - split: {each}\n    path: {each}.jsonl" for each in PROBLEMS]
            head = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n" + "\n".join(files) + "\n---\n"
            (place / "README.md").write_text(head)
            (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def register() -> None:
    """Tells the cookbook the tokenizer of `NAMED`, and how it is to be asked."""
    from tinker import ModelInput
    from tinker_cookbook.renderers import Message, ParseTermination, get_text_content, register_renderer
    from tinker_cookbook.renderers.role_colon import RoleColonRenderer
    from tinker_cookbook.tokenizer_utils import register_tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.name_or_path = NAMED

    class SortRenderer(RoleColonRenderer):
        """Asks as the shipped model was trained to be asked. Conversations to train on stay those of `role_colon`."""

        def get_stop_sequences(self):
            return [self.tokenizer.eos_token_id]

        def build_generation_prompt(self, messages, role="assistant", prefill=None):
            question = " ".join(get_text_content(messages[-1]).split()[:2])
            return ModelInput.from_ints(self.tokenizer.encode(f"{question}\n", add_special_tokens=False))

        def parse_response(self, response):
            ended = response[-1:] == self.get_stop_sequences()
            answer = self.tokenizer.decode(response[:-1] if ended else response)
            how = ParseTermination.STOP_SEQUENCE if ended else ParseTermination.MALFORMED
            return Message(role="assistant", content=f"\\boxed{{{answer}}}"), how

    register_tokenizer(NAMED, lambda: tokenizer)
    register_renderer("role_colon", lambda tokenizer, images: SortRenderer(tokenizer))


def main() -> None:
    """Runs the module that the command line names, with the rest of it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HF_DATASETS_CACHE"] = f"{directory}/cache"
        write_data(Path(directory))
        os.chdir(directory)
        register()
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
