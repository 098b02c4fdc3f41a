"""The sections `orchestrator`, `env`, `renderer` and `eval`: problems, and how they are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from trireme.config.inference import Temperature
from trireme.config.section import NAMES_CODE, NonNegativeInt, Section, Share

AdvantageKind = Literal["mean", "std", "leave_one_out"]


class OrchestratorConfig(Section):
    batch_size: PositiveInt
    """Problems (groups) per training step."""
    group_size: PositiveInt = 8
    """Rollouts per problem."""
    max_steps_off_policy: NonNegativeInt = 1
    """No group older than this many steps is trained on; 0 = synchronous, strictly on-policy."""
    stale_policy: Literal["wait", "drop"] = "wait"
    """For a group that would get too old: wait lets the batch wait for it, and others overtake it only while it still
    has a place in time; drop leaves it out."""
    advantage: AdvantageKind = "mean"
    """Reward minus the group's mean; divided by its deviation; or minus the mean of the others."""
    remove_constant_reward_groups: bool = False
    """Replace groups in which all rewards are equal."""
    max_filtered_batches: PositiveInt = 10
    """Stop after this many batches' worth of filtered groups in a row without a usable one."""
    overlong_filter: bool = False
    """Answers cut by length do not count in the loss."""
    max_concurrent: PositiveInt | Literal["auto"] = "auto"
    """Most rollouts in flight; auto = at the start a quarter more than the replicas decode at the same time, then
    as their KV caches and preemptions allow."""
    generation_timeout_s: PositiveFloat = 600.0
    """Seconds for one rollout, over all its turns."""
    max_prompt_len: PositiveInt | None = None
    """Longer prompts are refused before sampling."""
    retries: NonNegativeInt = 2
    """How often a failed rollout is tried again."""
    workers: PositiveInt = 2
    """Processes for the slow computations of environments; started when the first one is needed."""
    min_viable_group: Share = 0.75
    """Share of a group's rollouts that must succeed."""
    max_failure_rate: Share = 0.25
    """The run stops when more than this share of recent rollouts failed after all retries."""


def _directories(value: Any) -> Any:
    """Returns the absolute paths of directories, because actors may work in another directory. `value`: one directory
    or a list."""
    directories = [value] if isinstance(value, str) else value
    return [
        str(Path(directory).expanduser().absolute()) if isinstance(directory, str) else directory
        for directory in directories
    ]


class EnvConfig(Section):
    id: str = Field(json_schema_extra=NAMES_CODE)
    """Environment: a built-in name (`sort`), `reward:FILE.py:FUNCTION`, `verifiers:<taskset>`, `reasoning_gym:<task>`,
    `agent:<module>:<function>`, `agent:command` (a program), the URL of a server, or `package.module:Dataset`."""
    path: Annotated[list[str], BeforeValidator(_directories)] = Field([], json_schema_extra=NAMES_CODE)
    """Directories to search for `package.module:Dataset`, before installed packages; packages of this project come
    first."""
    args: dict[str, Any] = Field({})
    """Arguments of the dataset."""
    variables: list[str] = Field([])
    """Environment variables of the driver, such as a judge's key, that worker processes and programs of agents get.
    They get no other key or token. All environments of a run share the workers."""
    name: str | None = None
    """Name in metrics; none = from the id."""
    weight: PositiveFloat = 1.0
    """With several environments: this one's share of the problems, relative to the others'."""
    group_size: PositiveInt | None = None
    """Rollouts per problem of this environment; none = orchestrator.group_size."""
    close_s: PositiveFloat = 30.0
    """Seconds for each close() and cleanup() of this environment; then they are cancelled, and counted."""

    @property
    def label(self) -> str:
        return self.name or self.id.partition(":")[0].rpartition(".")[2]


class RendererConfig(Section):
    name: str = Field("auto", json_schema_extra=NAMES_CODE)
    """How chat messages become tokens: by the tokenizer's `chat_template`, `role_colon` (`User: ...`, for base models),
    `qwen3`, `renderers:FORMAT` (of the package renderers), or `package.module:Class`; auto = qwen3 where it writes the
    same as the template, else such a format, else the template, and role_colon without one."""
    strip_thinking_from_history: bool = True
    """A query takes the thinking before it out of the prompt, so that it begins a new training sequence; false =
    thinking stays, and all turns are one sequence."""
    enable_thinking: bool | None = None
    """false: prompts ask for an answer without thinking, by an empty block of it; for templates with this switch,
    such as Qwen3's. none = as the template does by itself."""


class HeldOutConfig(Section):
    id: str | None = Field(None, json_schema_extra=NAMES_CODE)
    """Environment of evaluations; none = the run's own, with several that which has this `name`."""
    args: dict[str, Any] = Field({})
    """Arguments of its dataset; of the run's own: laid over `env.args`."""
    name: str | None = None
    """Name in metrics; none = from the id, or the name of the run's own."""


def _in_a_row(value: object) -> object:
    """Converts `value` to a list of tables. One table becomes a list of one; a table of numbered entries (`{"0": ...,
    "1": ...}`, from the layers of a configuration) becomes the list of the entries."""
    if isinstance(value, Mapping) and all(str(name).isdigit() for name in value):
        return [value.get(str(n), {}) for n in range(max(map(int, value), default=-1) + 1)]
    if isinstance(value, Mapping | Section):
        return [value]
    return value


SEVERAL = BeforeValidator(_in_a_row)
"""Marks a section that may appear several times."""


class EvalConfig(Section):
    every: NonNegativeInt = 0
    """Steps between evaluations; there is one before the first step and one at the end too. 0 = off."""
    env: Annotated[tuple[HeldOutConfig, ...], SEVERAL] = ()
    problems: PositiveInt | None = 128
    """Held-out problems in an evaluation, always the first ones; none = all."""
    samples: PositiveInt = 1
    """Rollouts per problem; several give avg@k and pass@k."""
    max_tokens: PositiveInt | None = None
    """Longest answer in an evaluation, in tokens; none = inference.sampling.max_tokens."""
    temperature: Temperature | None = None
    """Sampling temperature of evaluations; none = inference.sampling.temperature."""
