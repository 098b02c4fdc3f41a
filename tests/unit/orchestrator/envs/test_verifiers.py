"""Tasksets of verifiers, written here through its own API: what is asked, how it is scored, and what is refused.

Each is a module in a directory of its own, as it would be an installed package; worker processes find it there too.
"""

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import verifiers.v1 as vf
from chat_support import Policy, encoded_answer, rollout
from renderer_support import QWEN3, bpe
from verifiers.v1.errors import TaskError

from orchestrator import workers
from orchestrator.env import EnvContext, Trajectory, load_dataset
from orchestrator.envs.verifiers import NotScored, TaskEnv, TasksetDataset, conversation, make_trace
from orchestrator.rollout import NonFiniteReward
from orchestrator.workers import WorkerError, WorkerTimeout
from trireme.config.schema import EnvConfig, RendererConfig
from trireme.core.errors import BadInput

NUMBERS = count()

TASKSET = """
import asyncio, itertools, time
from collections.abc import Iterable, Mapping
import verifiers.v1 as vf

class Config(vf.TasksetConfig):
    size: int = 40
    split: str = "train"

class Data(vf.TaskData):
    answer: str

class Answered(vf.Task[Data, vf.State, vf.TaskConfig]):
{task}

class Questions(vf.Taskset[Answered, Config]):
{taskset}

{module}
__all__ = {exported}
"""
EXACT = """
@vf.reward
async def exact(self, trace: vf.Trace) -> float:
    return float(trace.last_reply == self.data.answer)
"""
LOAD = """
def load(self) -> Iterable[Answered]:
    for n in range(self.config.size):
        data = dict(prompt=f"{self.config.split}: {n} + 1?", system_prompt="Add.", answer=str(n + 1))
        yield Answered(Data(**data), self.config.task)
"""

Written = Callable[..., str]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    monkeypatch.syspath_prepend(tmp_path)

    def write(
        task: str = EXACT, taskset: str = LOAD, module: str = "", exported: Sequence[str] = ("Questions",)
    ) -> str:
        name = f"taskset_{next(NUMBERS)}"
        parts = {"task": task, "taskset": taskset}
        text = TASKSET.format(
            **{key: indent(dedent(part), "    ") for key, part in parts.items()},
            module=dedent(module),
            exported=list(exported),
        )
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    return write


def context(split: Any = "train", seed: int = 0) -> EnvContext:
    return EnvContext(bpe(QWEN3), seed, 2, split, RendererConfig(name="qwen3"))


def opened(name: str, split: Any = "train", seed: int = 0, /, **args: Any) -> TasksetDataset:
    dataset = load_dataset(EnvConfig(id=f"verifiers:{name}", args=args), context(split, seed))
    assert isinstance(dataset, TasksetDataset)
    return dataset


def tasks(dataset: TasksetDataset) -> list[Any]:
    return [group.make.args[0] for i in range(len(dataset)) for group in dataset.get_batch(i)]  # type: ignore[attr-defined]


async def answer(name: str, text: str | None = None, **args: Any) -> Trajectory:
    """One rollout of the first task; without a text with the right answer."""
    (group, *_) = opened(name, scoring="loop", **args).get_batch(0)
    env, _ = await group.make_envs()
    answer_text = group.make.args[0].data.answer if text is None else text  # type: ignore[attr-defined]
    return await rollout(env, Policy([encoded_answer(answer_text, context().renderer)]))


async def test_a_task_is_asked_and_its_answer_scored(written: Written) -> None:
    name = written()
    right, wrong = await answer(name), await answer(name, "no idea")
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    (turn,) = right.transitions
    assert turn.metrics == {"parse_error": 0.0, "score/exact": 1.0}
    (task, *_) = tasks(opened(name))
    assert turn.logs == {"task": str(task.data.idx), "answer": task.data.answer}
    assert bpe().decode(turn.observation) == (
        f"<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n{task.data.prompt}<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_rewards_are_weighted_and_metrics_reported(written: Written) -> None:
    name = written("""
        @vf.reward(weight=2.0)
        async def right(self, trace: vf.Trace) -> float:
            return 1.0 if trace.last_reply == self.data.answer else 0.0

        @vf.reward(weight=-0.5)
        async def verbose(self, trace: vf.Trace) -> float:
            return float(trace.num_output_tokens)

        @vf.reward
        async def style(self, task: Data, trace: vf.Trace) -> Mapping[str, float]:
            return {"short": 0.25, "polite": 0.0}

        @vf.metric
        async def turns(self, trace: vf.Trace) -> float:
            return trace.num_turns

        @vf.metric
        async def sizes(self, trace: vf.Trace) -> Mapping[str, float]:
            return {"prompt": float(trace.num_input_tokens), "messages": float(len(trace.messages))}
    """)
    (turn,) = (await answer(name)).transitions
    length = len(turn.action)
    assert turn.reward == 2.0 - 0.5 * length + 0.25
    assert turn.metrics == {
        "parse_error": 0.0, "turns": 1.0, "prompt": float(len(turn.observation)), "messages": 3.0, "score/right": 1.0,
        "score/verbose": float(length), "score/short": 0.25, "score/polite": 0.0,
    }  # fmt: skip


async def test_an_answer_that_is_cut_off_or_malformed_is_scored_as_what_it_is(written: Written) -> None:
    name = written("""
        @vf.reward
        async def said(self, trace: vf.Trace) -> float:
            return float(len(trace.last_reply))

        @vf.metric
        async def cut(self, trace: vf.Trace) -> float:
            return trace.is_truncated
    """)
    env = TaskEnv(tasks(opened(name))[0], context().renderer, "loop", 10.0)
    whole = encoded_answer("<think>\nand thinks", context().renderer)
    await env.initial_observation()
    (cut_off, malformed) = [
        await rollout(env, Policy([tokens], reason)) for tokens, reason in [(whole[:-1], "length"), (whole, "stop")]
    ]
    assert (cut_off.reward, malformed.reward) == (0.0, 0.0)  # no reply: it was still thinking
    assert cut_off.transitions[0].metrics == {"parse_error": 0.0, "cut": 1.0, "score/said": 0.0}
    assert malformed.transitions[0].metrics == {"parse_error": 1.0, "cut": 0.0, "score/said": 0.0}


def test_the_trace_has_all_that_was_said(written: Written) -> None:
    (task, *_) = tasks(opened(written()))
    text = '<think>\nhm\n</think>\n\nlook<tool_call>\n{"name": "find", "arguments": {"x": [1]}}\n</tool_call>'
    renderer = context().renderer
    action = encoded_answer(text, renderer)
    message, whole = renderer.parse_response(action)
    trace = make_trace(task, [5, 6, 7], action, message, cut_off=False)
    assert whole
    assert [node.parent for node in trace.nodes] == [None, 0, 1]
    assert [(m.role, m.content) for m in trace.messages] == [
        ("system", "Add."), ("user", task.data.prompt), ("assistant", "look"),
    ]  # fmt: skip
    (reply,) = trace.assistant_messages
    assert reply.reasoning_content == "hm"
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [("find", {"x": [1]})]
    (branch,) = trace.branches
    assert branch.token_ids == [5, 6, 7, *action]
    assert branch.sampled_mask == [False] * 3 + [True] * len(action)
    assert (trace.num_turns, trace.num_input_tokens, trace.num_output_tokens) == (1, 3, len(action))
    assert (trace.stop_condition, trace.calls[0].finish_reason, trace.ok) == ("agent_completed", "tool_calls", True)
    assert (trace.task.key, trace.task.type) == (task.key, "Answered")


def test_a_prompt_of_several_messages() -> None:
    call = vf.ToolCall(id="1", name="find", arguments='{"x": 1}')
    data = vf.TaskData(
        system_prompt="Be short.",
        prompt=[
            vf.UserMessage(content=[vf.TextContentPart(text="a"), vf.TextContentPart(text="b")]),
            vf.AssistantMessage(content=None, reasoning_content="hm", tool_calls=[call]),
            vf.ToolMessage(tool_call_id="1", name="find", content="2"),
            vf.UserMessage(content="and now?"),
        ],
    )
    assert conversation(data) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [{"name": "find", "arguments": {"x": 1}}]},
        {"role": "tool", "content": "2", "name": "find"},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("raise ZeroDivisionError('by nothing')", TaskError, "Answered scoring: ZeroDivisionError: by nothing"),
        ("return None", TaskError, "scoring: TypeError"),
        ("return 'much'", TaskError, "scoring: ValueError"),
        ("return {}", NotScored, "Answered gave no reward"),
        ("return float('nan')", NonFiniteReward, "gave the reward nan"),
        ("await asyncio.sleep(60)", TimeoutError, None),
    ],
)
async def test_a_rollout_without_score_fails(written: Written, body: str, error: type, message: str | None) -> None:
    name = written(f"@vf.reward\nasync def bad(self, trace: vf.Trace) -> float:\n    {body}")
    with pytest.raises(error, match=message):
        await answer(name, scoring_limit_s=0.2)


async def test_scoring_in_a_worker_process(written: Written) -> None:
    name = written("""
        @vf.reward
        async def graded(self, trace: vf.Trace) -> float:
            if trace.last_reply == "raise":
                raise ZeroDivisionError("by nothing")
            while trace.last_reply == "hang":
                time.sleep(60)
            return vf.verify_boxed_math_answer(trace.last_reply, "0.5")
    """)
    (task, *_) = tasks(opened(name))
    renderer = context().renderer

    async def trajectory_of(text: str, task: Any = task) -> Trajectory:
        return await rollout(TaskEnv(task, renderer, "worker", 60.0), Policy([encoded_answer(text, renderer)]))

    async with workers.workers(1):
        assert (await trajectory_of("\\boxed{\\frac{1}{2}}")).reward == 1.0
        assert (await trajectory_of("\\boxed{2}")).reward == 0.0
        with pytest.raises(WorkerError, match="ZeroDivisionError: by nothing") as raised:
            await trajectory_of("raise")
        assert type(raised.value).__name__ == "TaskError"
        with pytest.raises(WorkerTimeout, match=r"score_alone in a worker process took longer than 0\.2 s"):
            await trajectory_of("hang", task.with_data(timeout=vf.TaskTimeout(scoring=0.2)))


TOOLS = "\n@classmethod\ndef toolsets(cls, config):\n    return [object()]"
GAME = "class Game(vf.SingleAgentEnv):\n    pass"
PROGRAM = "class Program(vf.Harness[vf.HarnessConfig]):\n    pass"
LAMBDA = "def __init__(self, *args):\n    super().__init__(*args)\n    self.f = lambda: 1"
STOP = "@vf.stop\nasync def enough(self, trace: vf.Trace) -> bool:\n    return True"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"module": GAME, "exported": ("Questions", "Game")}, r"an Env of its own \(Game\)"),
        ({"module": PROGRAM, "exported": ("Questions", "Program")}, "a harness of its own"),
        ({"taskset": LOAD + TOOLS}, r"serves tools \(object\)"),
        ({"task": EXACT + TOOLS}, r"Answered has tools \(object\)"),
        ({"task": EXACT + "NEEDS_CONTAINER = True"}, r"Answered needs a runtime \(NEEDS_CONTAINER\)"),
        ({"task": EXACT + "async def setup(self, trace, runtime):\n    pass"}, r"needs a runtime \(setup\)"),
        ({"task": EXACT + "async def finalize(self, trace, runtime):\n    pass"}, r"needs a runtime \(finalize\)"),
        ({"task": EXACT + "@vf.intercept\nasync def hide(self, request: vf.Request):\n    pass"}, r"harness \(hide\)"),
        ({"task": EXACT + STOP}, r"harness \(enough\)"),
        ({"task": "@vf.reward\nasync def t(self, trace, runtime) -> float:\n    pass"}, r"a runtime \(Answered.t\)"),
        (
            {"task": EXACT + "@vf.metric\nasync def f(self, runtime) -> float:\n    pass"},
            r"a runtime \(Answered.f\)",
        ),
        ({"task": EXACT + LAMBDA}, "be pickled"),
        ({"task": "pass"}, "Answered has no reward"),
        ({"taskset": LOAD.replace("dict(", "dict(image='python', workdir='/', ")}, r"task 0 .* \(image, workdir\)"),
        ({"taskset": LOAD.replace("dict(prompt=", "dict(name='first', description=")}, "task first has no prompt"),
    ],
)
def test_what_is_more_or_less_than_an_answer_with_a_reward_is_refused(
    written: Written, parts: dict[str, Any], message: str
) -> None:
    name = written(**parts)
    refusal = f"taskset '{name}' of verifiers cannot be played here: .*{message}.*environment of your own"
    with pytest.raises(BadInput, match=refusal):
        opened(name)


async def test_a_runtime_that_a_reward_can_do_without(written: Written) -> None:
    name = written("@vf.reward\nasync def seen(self, trace, runtime=None) -> float:\n    return float(runtime is None)")
    assert (await answer(name)).reward == 1.0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([vf.UserMessage(content=[{"type": "image_url", "image_url": {"url": "x"}}])], "more than text"),
        ([vf.AssistantMessage(tool_calls=[vf.ToolCall(id="1", name="f", arguments="[]")])], "tool f"),
        ([], "no prompt"),
        ("", "no prompt"),
    ],
)
def test_prompts_that_no_renderer_can_show(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conversation(vf.TaskData(prompt=prompt))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_taskset", "'no_such_taskset' of verifiers cannot be loaded: ModuleNotFoundError.*installed package"),
        ("json", "'json' of verifiers cannot be loaded: TypeError: .*exports no Taskset"),
        ("no.such", "cannot be loaded: ModuleNotFoundError"),
        ("", "taskset '' of verifiers cannot be loaded"),
    ],
)
def test_a_name_that_leads_to_no_taskset(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        opened(name)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"seize": 1}, r"Config of verifiers cannot be .*: seize = 1: Extra.*may have these keys: .*size, split"),
        ({"size": "many"}, "size = 'many': Input should be a valid integer"),
        ({"select": {"limit": 0}}, "SelectConfig of verifiers cannot be .*limit = 0: .*greater than or equal"),
        ({"scoring": "thread"}, "scoring = 'thread'.*; expected 'worker' or 'loop'.*Its arguments: .*hold_out"),
        ({"scoring_limit_s": 0}, "scoring_limit_s = 0"),
        ({"size": 0}, "none of the 0 tasks .* belongs to the split 'train'"),
    ],
)
def test_bad_arguments(written: Written, args: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        opened(written(), **args)


def test_a_taskset_that_cannot_be_loaded(written: Written) -> None:
    name = written(taskset="def load(self):\n    raise FileNotFoundError('questions.jsonl')")
    with pytest.raises(BadInput, match=rf"taskset '{name}' .*FileNotFoundError: questions\.jsonl"):
        opened(name)


def test_a_taskset_without_end_takes_a_limit(written: Written) -> None:
    name = written(taskset="INFINITE = True\n" + LOAD.replace("range(self.config.size)", "itertools.count()"))
    with pytest.raises(BadInput, match=r"is infinite; .*select = \{ limit = 1000 \}"):
        opened(name)
    limited = tasks(opened(name, hold_out=False, select={"limit": 20}))
    assert sorted(task.data.idx for task in limited) == list(range(20))


def test_without_tools_and_an_env_there_is_one_answer() -> None:
    """What is refused for it, and what is not, hangs on that: it must hold in the version that is installed. A plain
    taskset is one run of the agent, whose program ends with an answer that calls no tool."""
    package = Path(vf.__file__).parent
    run = ast.parse(dedent(inspect.getsource(vf.SingleAgentEnv.run))).body[0]
    assert isinstance(run, ast.AsyncFunctionDef)
    assert [ast.unparse(line) for line in run.body] == ["await agents.agent.run(task)"]
    program = (package / "harnesses" / "utils" / "core.py").read_text()
    assert re.search(r"if not message\.tool_calls:\s+return", program)
    assert "multi-turn exchange" in str(inspect.getdoc(vf.Agent.run)), "which is `interaction`, called by Envs"
    callers = [f for f in (package / "envs").rglob("*.py") if ".interaction(" in f.read_text()]
    assert callers, "those that have several turns"


@pytest.mark.parametrize(
    ("patch", "message"), [("missing", "import of verifiers"), ("old", "verifiers 0.1.14 is inst")]
)
def test_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch, patch: str, message: str) -> None:
    monkeypatch.delitem(sys.modules, "orchestrator.envs.verifiers")
    if patch == "missing":
        monkeypatch.setitem(sys.modules, "verifiers", None)
        monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    else:
        monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1.14")
    with pytest.raises(BadInput, match=rf"package verifiers 0\.4\.x: .*{message}.*`uv sync --extra verifiers`"):
        load_dataset(EnvConfig(id="verifiers:gsm8k"), context())


def test_training_and_evaluations_share_no_task(written: Written) -> None:
    name = written()
    trained, held_out = (tasks(opened(name, split, size=200)) for split in ("train", "eval"))
    sizes = sorted(task.data.idx for task in [*trained, *held_out])
    assert sizes == list(range(200))
    assert 10 < len(held_out) < 45
    assert [task.data.idx for task in trained] != sorted(task.data.idx for task in trained)


def test_a_taskset_with_a_split_of_its_own(written: Written) -> None:
    name = written()
    trained = tasks(opened(name, "train", hold_out=False))
    held_out = tasks(opened(name, "eval", hold_out=False, split="test"))
    assert (len(trained), len(held_out)) == (40, 40)
    assert all(task.data.prompt.startswith("train:") for task in trained)
    assert all(task.data.prompt.startswith("test:") for task in held_out)
