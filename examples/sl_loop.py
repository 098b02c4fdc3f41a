"""Supervised learning in one file: a model learns to sort digits from examples, on the trainer's verbs alone.

    uv run python examples/sl_loop.py
    uv run python examples/sl_loop.py --run.name longer --max-steps 300 --trainer.shards 2

The data is made here; yours is a list of prompts and answers. `uv run sft` trains on files of conversations, with
evaluations and checkpoints. Options are those of `rl`, defaults in examples/sort.toml; docs/own-loop.md.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from trireme.api import AdamParams, BadInput, Datum, ModelInput, get_lr, loop_config, lr_at, new_directory, open_trainer

TINY = 30  # a model of a third of a million parameters takes much more than what suits large ones
WARMUP_STEPS = 5
SAVE_S = 600.0


def examples(seed: str) -> Iterator[tuple[str, str]]:
    """Prompts and their answers, without end."""
    chosen = random.Random(seed)
    while True:
        digits = "".join(chosen.choices("0123456789", k=chosen.randint(3, 8)))
        yield f"Sort: {digits}\n", "".join(sorted(digits))


def to_datum(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> Datum:
    """Inputs are all tokens but the last, targets all but the first; only those of the answer have a weight."""
    asked = tokenizer.encode(prompt)
    tokens = [*asked, *tokenizer.encode(answer), tokenizer.eos_token_id]
    answered = len(tokens) - len(asked)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(asked) - 1) + [1.0] * answered,
        },
    )


def num_weights(data: list[Datum]) -> float:
    return sum(float(datum.loss_fn_inputs["weights"].data.sum()) for datum in data)


def mean_nll(outputs: list[dict], data: list[Datum]) -> float:
    """The mean of -log p over the answers' tokens."""
    total = sum(
        float((output["logprobs"].data * datum.loss_fn_inputs["weights"].data).sum())
        for output, datum in zip(outputs, data, strict=True)
    )
    return -total / num_weights(data)


def main() -> None:
    config = loop_config(["@", "examples/sort.toml", *sys.argv[1:]])
    out = new_directory(Path(config.run.output_dir, config.run.name or "sl-loop"))
    model = AutoConfig.from_pretrained(config.model.name)
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_name)
    peak = TINY * get_lr(model.model_type, model.hidden_size)

    train, test = examples("train"), examples("test")
    held_out = [to_datum(*next(test), tokenizer) for _ in range(64)]

    with open_trainer(config, out / "logs") as trainer, (out / "metrics.jsonl").open("w") as metrics:
        print(f"before: test nll {mean_nll(trainer.forward(held_out).loss_fn_outputs, held_out):.3f}")
        for step in range(config.max_steps):
            data = [to_datum(*next(train), tokenizer) for _ in range(config.orchestrator.batch_size * 8)]
            output = trainer.forward_backward(data, "cross_entropy")
            rate = lr_at(step, peak, "linear", WARMUP_STEPS, config.max_steps)
            update = trainer.optim_step(AdamParams(learning_rate=rate), normalizer=num_weights(data))

            row = {"step": step, "train_mean_nll": mean_nll(output.loss_fn_outputs, data), **update.metrics}
            print(json.dumps(row), file=metrics, flush=True)
            print(f"step {step + 1}/{config.max_steps}  train nll {row['train_mean_nll']:.3f}", flush=True)

        print(f"after: test nll {mean_nll(trainer.forward(held_out).loss_fn_outputs, held_out):.3f}")
        weights = trainer.publish_weights(config.max_steps)
        trainer.save_weights(out / "model", weights).wait(SAVE_S)  # opens with from_pretrained and with vLLM
    print(f"the trained model is in {out / 'model'}")


if __name__ == "__main__":
    try:
        main()
    except BadInput as refused:
        sys.exit(str(refused))
