"""Prompt distillation: a model's answers under a long prompt, as data that teaches it to answer so without the prompt.

    python examples/recipes/distill.py MODEL --prompts questions.jsonl --teacher-prompt prompt.txt \\
        --output answers.jsonl --max-tokens 256
    sft @ sft.toml --model.name MODEL --data.train answers.jsonl

A line of `--prompts` is `{"messages": [...]}`, to which the teacher's prompt is added as the system message, or
`{"prompt": "..."}`, plain text that follows it. Each answer becomes an example of token ids: the question without the
teacher's prompt, and the tokens that were sampled. Only the sampled tokens count, and their text is never tokenised
again. (arXiv:2112.00861, section 2.)
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from trireme.checkpoint.files import replace_file, storage_errors
from trireme.cli.common import Parser
from trireme.config.installed import check_installed
from trireme.core.errors import EXIT_OK, TriremeError
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal
from trireme.core.sampling_bounds import BOUNDS
from trireme.core.tokenizer import load_tokenizer
from trireme.core.types import SampleRequest, SamplingParams
from trireme.process.device import Device, choose_device, require_gpu
from trireme.process.machine import this_machine
from trireme.renderers import Message, Renderer, make_renderer
from trireme.sft.reading import BadExample, check_messages
from trireme.train.kl_reference import weights_of

CPU_KV_CACHE_BYTES = 2**30


class Teacher:
    """A model in vLLM, in this process. Prompts and answers are token ids."""

    def __init__(self, model: str, options: argparse.Namespace, device: Device) -> None:
        """`model`: a directory or a name on the hub. Raises BadInput for a build of vLLM that is not for `device`."""
        from inference.engine import import_engine  # takes seconds to import

        on_cpu = device == "cpu"
        import_engine(on_cpu=on_cpu)
        from vllm import LLM, EngineArgs

        args = EngineArgs(
            model=model,
            dtype="float32" if on_cpu else "bfloat16",  # as for the replicas of a run (inference.engine)
            skip_tokenizer_init=True,
            generation_config="vllm",
            seed=options.seed,
            disable_log_stats=True,
        )
        if options.max_model_len is not None:
            args.max_model_len = options.max_model_len
        if on_cpu:
            args.kv_cache_memory_bytes = CPU_KV_CACHE_BYTES
            args.enable_chunked_prefill = False
            args.enforce_eager = True
        else:
            args.gpu_memory_utilization = options.gpu_memory_utilization
        self._model = model
        self._llm = LLM.from_engine_args(args)

    def answers(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], progress: TextIO
    ) -> list[list[int] | None]:
        """Returns the tokens of one answer to each prompt; None for an answer that was cut at `max_tokens`. Draws a bar
        on `progress`."""
        from tqdm.auto import tqdm
        from vllm.inputs import TokensPrompt

        from inference.engine import vllm_params

        if any(wanted.stop_strings for wanted in params):
            self._llm.llm_engine.output_processor.tokenizer = load_tokenizer(self._model)
        requests = [
            SampleRequest("", np.asarray(prompt, np.int32), wanted, "")
            for prompt, wanted in zip(prompts, params, strict=True)
        ]
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=request.prompt.tolist()) for request in requests],
            [vllm_params(request, []) for request in requests],
            use_tqdm=partial(tqdm, file=progress),
        )
        answers = [output.outputs[0] for output in outputs]
        return [None if answer.finish_reason == "length" else list(answer.token_ids) for answer in answers]


@dataclass(frozen=True)
class TeacherQuestion:
    """A question to the teacher, and to the student that learns its answer."""

    teacher: Sequence[int]
    """Token ids, with the teacher's prompt."""
    student: Sequence[int]
    """Token ids, without it."""
    stop: tuple[int | str, ...]
    """Tokens and strings that end an answer."""
    closed: Callable[[Sequence[int]], list[int]] = list
    """Makes the answer that the student learns of the one that was sampled."""

    def example(self, answer: Sequence[int]) -> dict[str, list[int]]:
        """Returns a line of the file: the student's question and the answer, which alone counts."""
        closed = self.closed(answer)
        weights = [0] * len(self.student) + [1] * len(closed)
        return {"tokens": [*self.student, *closed], "weights": weights}


def main(words: Sequence[str]) -> int:
    """Writes the file of answers and returns the exit code. Raises BadInput, StorageFailed."""
    options = _parser().parse_args(words)
    if options.output.exists():
        raise Refusal(
            f"--output {options.output}, which exists", "a new file: nothing is overwritten", "choose another"
        )
    if options.temperature not in BOUNDS["temperature"]:
        raise Refusal(f"--temperature {options.temperature:g}", f"a number {BOUNDS['temperature']}", "choose another")
    model = str(weights_of(options.model))
    tokenizer = load_tokenizer(model)
    teacher_prompt = _text_of(options.teacher_prompt)
    questions = list(questions_of(options.prompts, teacher_prompt, tokenizer, options.renderer))
    check_installed()
    device = choose_device(options.device, this_machine().num_gpus)
    if device == "gpu":
        require_gpu("distill.py", "device")
    log = options.output.with_name(f"{options.output.name}.log")
    with storage_errors(log):
        log.touch()
    with output_to(log) as terminal:
        print(f"starting vLLM with {model}; its output: {log}", file=terminal, flush=True)
        examples, cut = sample(Teacher(model, options, device), questions, options, terminal)
    if not examples:
        raise Refusal(
            f"--max-tokens {options.max_tokens}, at which all {cut} answers were cut",
            "room for whole answers",
            "raise it",
        )
    with storage_errors(options.output):
        replace_file(options.output.absolute(), "".join(to_json(e) + "\n" for e in examples).encode())
    left_out = f"; {cut} answers were cut at {options.max_tokens} tokens, and are left out" if cut else ""
    print(f"{options.output}: {len(examples)} answers to {len(questions)} questions{left_out}")
    return EXIT_OK


@contextmanager
def output_to(log: Path) -> Iterator[TextIO]:
    """Sends what this process and its children print in the block to the file `log`. Yields the terminal."""
    with log.open("w") as file, os.fdopen(os.dup(1), "w") as out, os.fdopen(os.dup(2), "w") as err:
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            yield out
        finally:
            for stream, terminal, number in ((sys.stdout, out, 1), (sys.stderr, err, 2)):
                stream.flush()
                os.dup2(terminal.fileno(), number)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="distill.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="directory, checkpoint of a run, or name on the hub")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of questions")
    parser.add_argument(
        "--teacher-prompt", type=Path, required=True, help="text file: what the student is to do without"
    )
    parser.add_argument("--output", type=Path, required=True, help="a new JSONL file of token ids, for sft")
    parser.add_argument("--max-tokens", type=int, required=True, help="longest answer")
    parser.add_argument("--samples", type=int, default=1, help="answers to each question (default: 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: 1")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--renderer", default="auto", help="as renderer.name of sft, which must have the same")
    parser.add_argument("--max-model-len", type=int, help="context of the engine (default: the model's)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of a GPU (default: 0.9)")
    choices = ("auto", "cpu", "gpu")
    parser.add_argument("--device", choices=choices, default="auto", help="default: a GPU if there is one")
    return parser


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{file}: {error}", "a text file", "correct the path") from None


def questions_of(file: Path, teacher: str, tokenizer: Any, renderer_name: str) -> Iterator[TeacherQuestion]:
    """Yields the questions of a file. Raises BadInput, which names the line, for one that is not a question."""
    renderer: Renderer | None = None
    for number, line in enumerate(_text_of(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            match json.loads(line):
                case {"messages": messages}:
                    renderer = renderer or make_renderer(renderer_name, tokenizer)
                    check_messages(messages)
                    yield _of_messages(messages, teacher, renderer)
                case {"prompt": str(prompt)}:
                    yield _of_text(prompt, teacher, tokenizer)
                case _:
                    raise BadExample("neither messages nor a prompt", 'an object with "messages" or "prompt"')
        except ValueError as error:
            raise Refusal(f"{file}:{number}: no JSON ({error})", "one JSON object a line", "correct it") from None
        except BadExample as wrong:
            problem, expected, do = wrong.args
            raise Refusal(f"{file}:{number}: {problem}", expected, do) from None


def _of_messages(messages: Sequence[Message], teacher: str, renderer: Renderer) -> TeacherQuestion:
    system = [message["content"] for message in messages[:1] if message["role"] == "system"]
    extended = Message(role="system", content="\n\n".join([teacher, *system]))
    return TeacherQuestion(
        renderer.generation_prompt([extended, *messages[len(system) :]]),
        renderer.generation_prompt(messages),
        renderer.stop_condition(),
        renderer.closed,
    )


def _of_text(prompt: str, teacher: str, tokenizer: Any) -> TeacherQuestion:
    if tokenizer.eos_token_id is None:
        raise BadExample(
            "a tokenizer without an end of sequence, which would end an answer", "one with it", "use messages"
        )
    tokens = [list(tokenizer(text)["input_ids"]) for text in (teacher + prompt, prompt)]
    return TeacherQuestion(tokens[0], tokens[1], (tokenizer.eos_token_id,))


def sample(
    teacher: Teacher, questions: Sequence[TeacherQuestion], options: argparse.Namespace, progress: TextIO
) -> tuple[list[dict[str, list[int]]], int]:
    """Returns `samples` answers to each question, as examples of the student, and how many were cut and left out."""
    repeated = [question for question in questions for _ in range(options.samples)]
    params = [
        SamplingParams(options.max_tokens, options.temperature, stop=question.stop, seed=options.seed + number)
        for number, question in enumerate(repeated)
    ]
    answers = teacher.answers([question.teacher for question in repeated], params, progress)
    pairs = zip(repeated, answers, strict=True)
    examples = [question.example(answer) for question, answer in pairs if answer is not None]
    return examples, len(repeated) - len(examples)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TriremeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
