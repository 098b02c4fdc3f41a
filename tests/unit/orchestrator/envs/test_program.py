"""Agents that are programs: what they are given, how their reward is read, and that nothing is left of them."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from renderer_support import QWEN3, bpe
from waiting import wait_for, wait_for_tasks

from orchestrator.env import EnvContext, load_dataset
from orchestrator.envs.program import STARTER, BadProgramOutput, ProgramFailed, ProgramTimeout
from trireme.config.schema import EnvConfig, RendererConfig
from trireme.core.agents import AgentAccess
from trireme.core.errors import BadInput

ACCESS = AgentAccess("http://127.0.0.1:1/sessions/s/v1", "http://127.0.0.1:1/sessions/s", "tr-session-s")


def dataset(directory: Path, code: str = "", split: Any = "train", seed: int = 0, **args: Any) -> Any:
    problems = directory / "problems.jsonl"
    if not problems.exists():
        problems.write_text('"first"\n\n{"second": 2}\n3\n')
    args = {"command": [sys.executable, "-c", code], "problems": str(problems)} | args
    variables = [name for name in ("TASK_LEVEL", "MARK") if name in os.environ]
    context = EnvContext(bpe(QWEN3), seed, 2, split, RendererConfig())
    return load_dataset(EnvConfig(id="agent:command", args=args, variables=variables), context)


def play(directory: Path, code: str, problem: int = 0, **args: Any) -> tuple[float, Any]:
    async def scenario() -> Any:
        env = await dataset(directory, code, **args).get_batch(0)[problem].make_env(4)
        return await env.play(ACCESS)

    return asyncio.run(scenario())


def left_of(directory: Path) -> list[int]:
    """The processes that have this directory in their environment, a moment after the program's end."""

    def marked(process: psutil.Process) -> bool:
        try:
            return process.environ().get("MARK") == str(directory) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    processes = [process for process in psutil.process_iter() if process.pid != os.getpid() and marked(process)]
    return [process.pid for process in psutil.wait_procs(processes, timeout=5.0)[1]]


def test_a_program_gets_its_problem_its_session_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("TASK_LEVEL", "7")
    record = tmp_path / "said.json"
    code = (
        f"import json, os, sys; json.dump([sys.stdin.read(), dict(os.environ)], open({str(record)!r}, 'w')); print(1)"
    )
    assert play(tmp_path, code) == (1.0, {})
    problem, environment = json.loads(record.read_text())
    assert json.loads(problem) in ("first", {"second": 2}, 3)
    prefixes = ("OPENAI", "ANTHROPIC", "TRIREME", "TASK")
    assert {name: value for name, value in environment.items() if name.startswith(prefixes)} == {
        "OPENAI_BASE_URL": ACCESS.base_url,
        "OPENAI_API_KEY": ACCESS.api_key,
        "ANTHROPIC_BASE_URL": ACCESS.anthropic_base_url,
        "ANTHROPIC_API_KEY": ACCESS.api_key,
        "TRIREME_MODEL": "policy",
        "TRIREME_SAMPLE": "4",
        "TASK_LEVEL": "7",
    }
    assert "WANDB_API_KEY" not in environment
    assert not Path(environment["TMPDIR"]).exists(), "what it leaves there is removed"


@pytest.mark.parametrize(
    ("printed", "reward", "metrics"),
    [
        ("working\n0.5\n", 0.5, {}),
        ('{"reward": -1}', -1.0, {}),
        ('x\n{"reward": 1.0, "metrics": {"tests": 3}}\n\n', 1.0, {"tests": 3.0}),
        ("y" * 300_000 + "\n2", 2.0, {}),
    ],
)
def test_the_last_line_is_the_reward(tmp_path: Path, printed: str, reward: float, metrics: dict[str, float]) -> None:
    text = tmp_path / "text"
    text.write_text(printed)
    assert play(tmp_path, f"print(open({str(text)!r}).read(), end='')") == (reward, metrics)


@pytest.mark.parametrize(
    "printed", ["", "done", "true", '{"score": 1}', '{"reward": "1"}', '{"reward": 1, "metrics": [2]}']
)
def test_what_is_no_reward_is_said(tmp_path: Path, printed: str) -> None:
    with pytest.raises(BadProgramOutput, match="expected its reward: a number, or an object"):
        play(tmp_path, f"print({printed!r}, end='')")


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match=r"exit code 3; its last words: no such task"):
        play(tmp_path, "import sys; print(1); sys.stderr.write('no such task'); sys.exit(3)")


@pytest.mark.parametrize("ends", ["by itself", "by its limit"])
def test_what_has_left_its_session_is_killed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    monkeypatch.setenv("MARK", str(tmp_path))
    begun = tmp_path / "begun"
    escape = f"open({str(begun)!r}, 'w'); [os.close(n) for n in (0, 1, 2)]; time.sleep(600)"
    code = f"""
import os, pathlib, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    {escape}
while not pathlib.Path({str(begun)!r}).exists():
    time.sleep(0.01)
print(1, flush=True)
{"" if ends == "by itself" else "time.sleep(600)"}
"""
    if ends == "by itself":
        assert play(tmp_path, code) == (1.0, {})
    else:
        with pytest.raises(ProgramTimeout, match=r"env.args.limit_s = 10 s"):
            play(tmp_path, code, limit_s=10.0)  # a busy machine starts it in some seconds
    assert begun.exists()
    assert left_of(tmp_path) == []


async def test_one_whose_rollout_is_given_up_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK", str(tmp_path))
    begun = tmp_path / "begun"
    code = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    env = await dataset(tmp_path, code).get_batch(0)[0].make_env(0)
    playing = asyncio.ensure_future(env.play(ACCESS))
    async with asyncio.timeout(30):
        await wait_for_tasks(begun.exists, "the program to begin")
    playing.cancel()
    await asyncio.wait([playing])
    assert playing.cancelled()
    assert left_of(tmp_path) == []


def test_a_program_does_not_outlive_the_one_who_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK", str(tmp_path))
    begun = tmp_path / "begun"
    hidden = f"import os, time; os.setsid(); os.fork() and os._exit(0); open({str(begun)!r}, 'w'); time.sleep(600)"
    program = [sys.executable, "-c", f"import os, time; os.fork() or exec({hidden!r}); time.sleep(600)"]
    start = f"[{sys.executable!r}, {str(STARTER)!r}, str(2**30), str(os.getpid()), *{program!r}]"
    plays = subprocess.Popen(
        [sys.executable, "-c", f"import os, subprocess, time; subprocess.Popen({start}); time.sleep(600)"]
    )
    wait_for(begun.exists, "the program to begin")
    plays.kill()
    plays.wait(30)
    assert left_of(tmp_path) == []


def test_the_signal_of_a_script_to_its_group_does_not_reach_its_parent(tmp_path: Path) -> None:
    code = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(0, signal.SIGTERM); print(1)"
    assert play(tmp_path, code) == (1.0, {})
    with pytest.raises(ProgramFailed, match="exit code 137"):
        play(tmp_path, "import os; os.kill(os.getpid(), 9)")


def test_its_memory_is_limited(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match="MemoryError"):
        play(tmp_path, "bytearray(2**29); print(1)", memory_gb=0.25)
    assert play(tmp_path, "bytearray(2**26); print(1)", memory_gb=0.25) == (1.0, {})


def test_problems_follow_from_the_seed_and_the_split(tmp_path: Path) -> None:
    def problems_of(**args: Any) -> list[Any]:
        created = dataset(tmp_path, batch_size=2, **args)
        assert len(created) == 2
        return [group.problem for index in range(2) for group in created.get_batch(index)]

    assert problems_of() == problems_of()
    assert {json.dumps(problems_of(seed=seed)) for seed in range(20)} != {json.dumps(problems_of())}
    other = tmp_path / "other.jsonl"
    other.write_text("8\n8\n8\n")
    assert problems_of(split="eval", eval_problems=str(other)) == [8, 8, 8]
    assert sorted(map(str, problems_of(split="eval"))) == sorted(map(str, problems_of()))


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"command": "node agent.mjs"}, "expected a list of words"),
        ({"command": []}, "expected a list of words"),
        ({"command": ["no-such-program-7"]}, "whose program no-such-program-7 is not there"),
        ({"problems": "nowhere.jsonl"}, r"there is no file .*nowhere\.jsonl"),
        ({"limit_s": 0}, "expected above 0"),
        ({"speed": 1}, "unexpected keyword argument 'speed'"),
    ],
)
def test_arguments_that_do_not_suit(tmp_path: Path, args: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        dataset(tmp_path, **args)
