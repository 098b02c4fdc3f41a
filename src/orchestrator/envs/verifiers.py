"""Tasksets of the package `verifiers` 0.4: `env.id = "verifiers:<taskset>"`, with its arguments in `env.args`.

    Taskset --> Task --prompt--> renderer --> tokens --> policy --> message --> Trace of MessageNodes
                                                                                  |
                              reward, metrics <-- await task.score(trace) <-------+

The policy answers a task once, in this orchestrator's token loop, without a server between the policy and the task. A
task that needs features that this loop lacks is refused at the start: tools, a runtime (sandbox), a harness or an Env
of the taskset, hooks between model and harness, and rewards that are given outside of `task.score`. In 0.4 a taskset
has no rewards of a group: only an Env compares rollouts.

Scoring may compute for long, and math-verify's own time limit works only in a process's main thread. So it runs in a
worker process with a time limit (`scoring = "worker"`), to which task and trace are pickled. Rewards that wait rather
than compute, such as judges, may run side by side on the event loop instead (`scoring = "loop"`).
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from inspect import Parameter, signature
from itertools import chain, islice
from typing import Any, Literal, get_args

from pydantic import ValidationError

from orchestrator.env import Env, EnvContext, EnvGroup, StepResult, StopCondition
from orchestrator.envs.rows import ListedDataset
from orchestrator.envs.text import is_held_out
from orchestrator.workers import run_in_worker
from trireme.core.errors import BadInput
from trireme.core.finite_json import to_json
from trireme.renderers import Message, Renderer

SUPPORTED = "0.4."
try:
    if not version("verifiers").startswith(SUPPORTED):
        raise ImportError(f"verifiers {version('verifiers')} is installed")
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls
    from verifiers.v1.types import content_text
    from verifiers.v1.utils.decorators import discover_decorated
except ImportError as error:
    raise BadInput(
        f"environments `verifiers:<taskset>` need the package verifiers {SUPPORTED}x: {error}; "
        "`uv sync --extra verifiers` installs it"
    ) from error

Scoring = Literal["worker", "loop"]

BATCH_SIZE = 16
DEFAULT_HARNESS = "bash"
FOR_RUNTIMES = ("setup", "finalize", "stage_verifier", "runtime_env")
"""Methods that a Task overrides only for a runtime."""
OF_RUNTIMES = ("image", "workdir", "agent_user", "skills", "artifacts")
"""Fields of a TaskData that matter only to a runtime."""


# ---- scoring


class NotScored(Exception):
    """A task scored a rollout, but there is no reward, or a reward or a metric has no value."""


async def score(task: Any, trace: Any) -> tuple[float, dict[str, float]]:
    """Lets the task score the rollout in `trace`. Returns the sum of the task's weighted rewards, and its metrics,
    which include each unweighted reward as `score/<name>`. Raises NotScored, and verifiers' TaskError if a reward or
    metric raises."""
    await task.score(trace)
    missing = [name for name, value in [*trace.rewards.items(), *trace.metrics.items()] if value is None]
    if missing or not trace.rewards:
        raise NotScored(
            f"{type(task).__name__} gave {'no value for ' + ', '.join(missing) if missing else 'no reward'}"
        )
    rewards = trace.rewards.items()
    metrics = {**trace.metrics, **{f"score/{name}": reward.score for name, reward in rewards}}
    return sum(reward.score * reward.weight for _, reward in rewards), metrics


def score_alone(task: object, trace: object) -> tuple[float, dict[str, float]]:
    """Calls `score` on an event loop of its own; for a worker process."""
    return asyncio.run(score(task, trace))


# ---- one rollout


def spoken(data: Any) -> list[Any]:
    """Returns the messages that a task begins with, as objects of verifiers. `data`: the task's TaskData."""
    if isinstance(data.prompt, str):
        prompt = [vf.UserMessage(content=data.prompt)]
    else:
        prompt = list(data.prompt or [])
    if data.system_prompt is None:
        return prompt
    return [vf.SystemMessage(content=data.system_prompt), *prompt]


def conversation(data: Any) -> list[Message]:
    """Returns the messages that a task begins with, for a renderer. `data`: the task's TaskData. Raises ValueError for
    a task without a prompt, or with content that is no text."""
    if not data.prompt:
        raise ValueError(
            "has no prompt, and no simulated user can open the conversation here; expected a prompt of at least one "
            "message"
        )
    return [_message(message) for message in spoken(data)]


def _message(source: Any) -> Message:
    if isinstance(source.content, list) and any(part.type != "text" for part in source.content):
        raise ValueError("has more than text in its prompt")
    message: Message = {"role": source.role, "content": content_text(source.content)}
    if source.role == "assistant" and source.reasoning_content:
        message["thinking"] = source.reasoning_content
    if source.role == "assistant" and source.tool_calls:
        message["tool_calls"] = [{"name": call.name, "arguments": _arguments(call)} for call in source.tool_calls]
    if source.role == "tool" and source.name:
        message["name"] = source.name
    return message


def _arguments(call: Any) -> dict[str, object]:
    arguments = json.loads(call.arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"has a prompt that calls the tool {call.name} with arguments that are not a JSON object")
    return arguments


def make_trace(task: Any, prompt: Sequence[int], action: Sequence[int], message: Message, cut_off: bool) -> Any:
    """Makes the trace of a finished rollout in the form that tasks score. It has a node for each message of the prompt,
    a last node for the answer `message` with all tokens of prompt and answer, and one model call with the token counts
    of both."""
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    nodes = [
        vf.MessageNode(parent=n - 1 if n else None, message=node_message)
        for n, node_message in enumerate(spoken(task.data))
    ]
    calls = [
        vf.ToolCall(id=f"call_{n}", name=call["name"], arguments=to_json(call["arguments"]))
        for n, call in enumerate(message.get("tool_calls", []))
    ]
    answer = vf.MessageNode(
        parent=len(nodes) - 1,
        message=vf.AssistantMessage(
            content=message["content"], reasoning_content=message.get("thinking"), tool_calls=calls or None
        ),
        sampled=True,
        token_ids=[*prompt, *action],
        mask=[False] * len(prompt) + [True] * len(action),
    )
    trace.nodes.extend([*nodes, answer])
    finished = "tool_calls" if calls else "stop"
    usage = vf.Usage(prompt_tokens=len(prompt), completion_tokens=len(action))
    trace.calls.append(vf.ModelCall(node=len(nodes), finish_reason="length" if cut_off else finished, usage=usage))
    trace.stop("agent_completed")
    trace.ok = True
    return trace


class TaskEnv(Env):
    """An episode in which the policy gives one answer to one task. A malformed or cut-off answer is scored like any
    other. Adds the metric `parse_error`: 1 for a malformed answer, else 0."""

    def __init__(self, task: Any, renderer: Renderer, scoring: Scoring, limit_s: float) -> None:
        self._task = task
        self._renderer = renderer
        self._scoring = scoring
        self._limit_s = limit_s
        self._prompt: list[int] = []

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        self._prompt = self._renderer.generation_prompt(conversation(self._task.data))
        return self._prompt, self._renderer.stop_condition()

    async def step(self, action: Sequence[int]) -> StepResult:
        message, whole = self._renderer.parse_response(action)
        cut_off = not self._renderer.finished(action)
        trace = make_trace(self._task, self._prompt, action, message, cut_off)
        limit_s = self._task.data.timeout.scoring or self._limit_s
        if self._scoring == "worker":
            reward, metrics = await run_in_worker(score_alone, self._task, trace, timeout_s=limit_s)
        else:
            async with asyncio.timeout(limit_s):
                reward, metrics = await score(self._task, trace)
        metrics = {"parse_error": float(not whole and not cut_off), **metrics}
        logs = {"task": _named(self._task.data), "answer": message["content"]}
        return StepResult(reward, episode_done=True, metrics=metrics, logs=logs)


def _named(data: Any) -> str:
    return str(data.name or data.id or data.idx)


# ---- tasksets


class TasksetDataset(ListedDataset[Any]):
    """The tasks of a taskset, in an order that follows from the seed.

    `args` are arguments of the taskset. `select` chooses among its tasks, with the keys of verifiers' SelectConfig
    (`limit`, `include`, ...). About an eighth of the tasks is for evaluations and never trained on. With `hold_out =
    false`, training and evaluations both take all tasks; use this for a taskset that has splits of its own, and choose
    these by `env.args` and `eval.env.args`. `scoring_limit_s`: seconds to score an answer if the task itself has no
    limit.

    Raises BadInput for a taskset that cannot be found, loaded or played, ValueError for other wrong arguments.
    """

    def __init__(
        self,
        taskset_id: str,
        context: EnvContext,
        *,
        select: Mapping[str, object] | None = None,
        hold_out: bool = True,
        scoring: Scoring = "worker",
        scoring_limit_s: float = 60.0,
        **args: object,
    ) -> None:
        if scoring not in get_args(Scoring) or scoring_limit_s <= 0:
            raise ValueError(
                f"scoring = {scoring!r}, scoring_limit_s = {scoring_limit_s}; expected 'worker' or 'loop', and a limit "
                "above 0 s"
            )
        loaded = load_tasks(taskset_id, args, select or {})
        # The split follows from the text of a task, not from its place: equal tasks are on the same side.
        texts = [task.data.model_dump_json(exclude={"idx"}) for task in loaded]
        evaluates = context.split == "eval"
        tasks = [t for t, text in zip(loaded, texts, strict=True) if not hold_out or is_held_out(text) == evaluates]
        if not tasks:
            raise ValueError(
                f"none of the {len(loaded)} tasks of {taskset_id!r} belongs to the split {context.split!r}; set "
                "hold_out = false to use all tasks in both splits, or choose tasks for evaluations with eval.env.args"
            )
        make = partial(TaskEnv, renderer=context.renderer, scoring=scoring, limit_s=scoring_limit_s)
        group = partial(EnvGroup, size=context.group_size)
        super().__init__(lambda task: group(partial(make, task)), tasks, f"verifiers:{context.seed}", BATCH_SIZE)


def load_tasks(taskset_id: str, args: Mapping[str, object], select: Mapping[str, object]) -> list[Any]:
    """Loads the selected tasks. Raises BadInput if one of them cannot be played."""
    try:
        config = _checked(vf.taskset_config_type(taskset_id), {**args, "id": taskset_id})
        taskset = vf.load_taskset(config).select(_checked(vf.SelectConfig, select))
        _refuse(taskset_id, _against_taskset(taskset_id, taskset))
        if not taskset.bounded:
            raise BadInput(
                f"taskset {taskset_id!r} is infinite; set a number of tasks: env.args.select = {{ limit = 1000 }}"
            )
        tasks = list(taskset)
        if tasks:  # all are of one type
            _refuse(taskset_id, chain(_against_type(tasks[0]), islice(_against_data(tasks), 1)))
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(
            f"taskset {taskset_id!r} of verifiers cannot be loaded: {type(error).__name__}: {str(error).rstrip('.')}. "
            "Expected the name of an installed package that exports a Taskset. Other packages and data files that this "
            "package needs must be installed too"
        ) from error
    return tasks


def _refuse(taskset_id: str, reasons: Iterator[str]) -> None:
    problems = list(reasons)
    if problems:
        raise BadInput(
            f"taskset {taskset_id!r} of verifiers cannot be played here: {'; '.join(problems)}. Expected tasks "
            "that are answered once, in text, and scored by Task.score alone. Write the others as an environment of "
            "your own (docs/environments.md)"
        )


def _checked(config_type: Any, values: Mapping[str, object]) -> Any:
    try:
        return config_type.model_validate(dict(values))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'all'} = {e['input']!r}: {e['msg']}" for e in error.errors()
        )
        raise BadInput(
            f"{config_type.__name__} of verifiers cannot be made from {dict(values)!r}: {wrong}. "
            f"env.args may have these keys: {', '.join(config_type.model_fields)}"
        ) from None


def _against_taskset(taskset_id: str, taskset: Any) -> Iterator[str]:
    env = vf.environment_class(taskset_id)
    if env is not vf.SingleAgentEnv:
        yield (
            f"it has an Env of its own ({env.__name__}), the one thing in verifiers {SUPPORTED}x that lets a "
            "conversation continue without tools, or compares rollouts"
        )
    if vf.default_harness_id(taskset_id) != DEFAULT_HARNESS:
        yield "it has a harness of its own"
    toolsets = taskset.toolsets(taskset.config)
    if toolsets:
        yield f"it serves tools ({_types(toolsets)})"


def _against_type(task: Any) -> Iterator[str]:
    name = type(task).__name__
    toolsets = task.toolsets(task.config)
    if toolsets:
        yield f"{name} has tools ({_types(toolsets)})"
    overridden = [method for method in FOR_RUNTIMES if getattr(type(task), method) is not getattr(vf.Task, method)]
    if task.NEEDS_CONTAINER or overridden:
        yield f"{name} needs a runtime ({', '.join(overridden) or 'NEEDS_CONTAINER'})"
    hooks = [hook.__name__ for hook in (*discover_decorated(task, "intercept"), *task.hooks("stop"))]
    if hooks:
        yield f"{name} acts between model and harness ({', '.join(hooks)})"
    rewards = task.hooks("reward")
    judges = task.plugged_judges()
    if not rewards and not judges:
        yield f"{name} has no reward"
    scorers = [*rewards, *task.hooks("metric"), *(judge.score for judge in judges)]
    blind = [scorer.__qualname__ for scorer in scorers if _needs_runtime(scorer)]
    if blind:
        yield f"{name} is scored in a runtime ({', '.join(blind)})"
    try:
        pickle.loads(pickle.dumps(task))
    except Exception as error:
        yield f"{name} cannot be pickled ({error})"


def _needs_runtime(scorer: Any) -> bool:
    """Returns True if a scorer has a parameter `runtime` without default. Without a runtime Task.score would skip such
    a scorer, as if its reward were 0."""
    parameter = signature(scorer).parameters.get("runtime")
    return parameter is not None and parameter.default is Parameter.empty


def _against_data(tasks: Sequence[Any]) -> Iterator[str]:
    for task in tasks:
        names = [name for name in OF_RUNTIMES if getattr(task.data, name)]
        if names:
            yield f"task {_named(task.data)} needs a runtime ({', '.join(names)})"
        try:
            conversation(task.data)
        except ValueError as error:
            yield f"task {_named(task.data)} {error}"


def _types(things: Sequence[object]) -> str:
    return ", ".join(type(thing).__name__ for thing in things)
