"""Checks of a run's environments: their names, and how many rollouts each has per problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trireme.config.refusals import Refusal
from trireme.config.schema import Config, RendererConfig


def environment_refusals(config: Config) -> list[Refusal]:
    """What is wrong with `env` and `eval.env`, and with how messages are rendered for them."""
    return [*_groups(config), *_names(config), *_held_out(config), *rendering_refusals(config.renderer)]


def rendering_refusals(renderer: RendererConfig) -> Iterator[Refusal]:
    if renderer.compact_every and not renderer.strip_thinking_from_history:
        yield Refusal(
            f"renderer.compact_every = {renderer.compact_every} with renderer.strip_thinking_from_history = false",
            "either: compact_every says when earlier thinking is stripped, the other that it never is",
            "leave one of them out",
        )


def _groups(config: Config) -> Iterator[Refusal]:
    for env in config.env:
        if config.group_size(env) == 1:
            yield Refusal(
                f"orchestrator.group_size = 1 with orchestrator.advantage = {config.orchestrator.advantage}"
                if env.group_size is None
                else f"group_size = 1 of environment {env.label}",
                "at least 2 rollouts per problem: advantages compare those of a group, one alone has advantage 0",
                f"set {'--orchestrator.group-size' if env.group_size is None else 'it'} to 2 or more (8 is usual)",
            )
            return


def _names(config: Config) -> Iterator[Refusal]:
    """Names tell environments apart, in metrics and in the ids of problems."""
    own, held_out = [env.label for env in config.env], [env.label for env in config.eval_envs]
    for section, labels in (("env", own), ("eval.env", held_out if config.eval.env else [])):
        twice = [label for label, n in Counter(labels).items() if n > 1]
        if twice:
            yield Refusal(
                f"{section} has {labels.count(twice[0])} environments of the name {twice[0]!r}",
                "a name for each of several environments: metrics are kept by name",
                f"give one of them another: `{section}.{labels.index(twice[0])}.name = ...`",
            )
        if "all" in labels:
            yield Refusal(
                f"{section} has an environment of the name 'all'",
                "another name: env/all/* is what all environments have together",
                f"set `{section}.{labels.index('all')}.name`",
            )


def _held_out(config: Config) -> Iterator[Refusal]:
    """An environment of evaluations that has no id is one of the run's own: which one?"""
    own = [env.label for env in config.env]
    for n, held_out in enumerate(config.eval.env):
        if held_out.id is None and len(own) > 1 and held_out.name not in own:
            yield Refusal(
                f"eval.env.{n} without `id`, with the name {held_out.name!r}",
                f"the name of one of the run's environments ({', '.join(own)}), or an id of its own",
                f"set `eval.env.{n}.name` to one of them, or `eval.env.{n}.id`",
            )
