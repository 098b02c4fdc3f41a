"""Finding datasets, walking through their problems, opening a model's tokenizer; and that none of it needs torch."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from config_support import small

from orchestrator.cursor import ProblemCursor
from orchestrator.env import Env, EnvContext, EnvGroupBuilder, RLDataset, load_dataset
from orchestrator.requests import Requests
from orchestrator.rollout import RolloutLimits
from trireme.config.schema import EnvConfig
from trireme.core.errors import BadInput

CONTEXT = EnvContext(tokenizer=None, seed=0, group_size=2)
MODEL = str(Path(__file__).parents[3] / "assets" / "sort-base")


class Named(EnvGroupBuilder):
    """A problem that is told apart by its name; these tests look at datasets only, so its group has no environments."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def make_env(self, sample: int) -> Env:
        raise AssertionError(f"rollout {sample} is not to be played")


class Ragged(RLDataset):
    """Batch i holds i + 1 problems."""

    def __init__(self, context: EnvContext, batches: int = 2, *, loud: bool = False) -> None:
        if batches < 0:
            raise ValueError("batches must not be negative")
        self.batches, self.loads = batches, 0

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        self.loads += 1
        return [Named(f"{index}-{i}") for i in range(index + 1)]

    def __len__(self) -> int:
        return self.batches


@pytest.mark.parametrize(
    ("env_id", "args", "message"),
    [
        ("srot", {}, r"'srot' names no environment; expected a built-in name \(.*sort.*\).* or `package.module:Class`"),
        ("no.such.module:X", {}, r"cannot be imported: ModuleNotFoundError: No module named 'no'; .*--env.path"),
        (f"{__name__}:Missing", {}, "has no Missing; .*Its datasets: Ragged"),
        (f"{__name__}:Named", {}, "expected a subclass of orchestrator.env.RLDataset"),
        (f"{__name__}:Ragged", {"bathces": 1}, "'bathces'.*Its arguments: batches: int = 2, loud: bool = False"),
        (f"{__name__}:Ragged", {"batches": -1}, "must not be negative"),
        (f"{__name__}:Ragged", {"batches": 0}, "at least one batch"),
    ],
)
def test_bad_environments_are_refused(env_id: str, args: dict[str, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_dataset(EnvConfig(id=env_id, args=args), CONTEXT)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\nraise OSError('no\\nserver')", r"cannot be imported: OSError: no server \(.*broken.py, line 2\)$"),
        ("def f(:", r"SyntaxError: .*broken.py, line 1\)$"),
        ("import no_such_package", r"No module named 'no_such_package' \(.*broken.py, line 1\).*install the package"),
        (
            "from orchestrator.env import RLDataset\nclass D(RLDataset):\n  def __init__(self, context): 1 / 0\n"
            "  def __len__(self): return 1\n  def get_batch(self, index): return []",
            r"ZeroDivisionError: division by zero \(.*broken.py, line 3\). Its arguments: none$",
        ),
    ],
)
def test_module_errors_have_a_place(code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(BadInput, match=message):
        load_dataset(EnvConfig(id="broken:D"), CONTEXT)


def test_a_variable_that_is_named_and_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with pytest.raises(BadInput, match=r"env\.variables names JUDGE_API_KEY"):
        load_dataset(EnvConfig(id=f"{__name__}:Ragged", variables=["JUDGE_API_KEY"]), CONTEXT)


def test_the_cursor_goes_round_and_finds_problems_again() -> None:
    dataset = Ragged(CONTEXT)
    cursor = ProblemCursor(dataset)
    problems = [cursor.next_problem() for _ in range(7)]
    assert problems == ["0.0.0", "0.1.0", "0.1.1", "1.0.0", "1.1.0", "1.1.1", "2.0.0"]
    assert [cursor.builder(p).name for p in problems[:4]] == ["0-0", "1-0", "1-1", "0-0"]  # type: ignore[attr-defined]
    assert (cursor.epoch, cursor.batch, cursor.position) == (2, 1, 0)
    again = ProblemCursor(dataset, 2, 1, 0)
    assert again.next_problem() == cursor.next_problem() == "2.1.0"


def test_a_batch_is_loaded_once_while_it_is_read() -> None:
    dataset = Ragged(CONTEXT, batches=5)
    cursor = ProblemCursor(dataset, batch=4)
    for _ in range(5):
        cursor.builder(cursor.next_problem())
    assert dataset.loads == 1


class Idle(EnvGroupBuilder):
    """Makes no environments."""


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ([], "batch 0 of Ragged is empty"),
        ([Named("one"), Idle()], r"Idle, which does not define make_env or make_envs(.|\n)*docs/environments\.md"),
    ],
)
def test_batches_without_environments_are_refused(
    problems: list[EnvGroupBuilder], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ragged, "get_batch", lambda self, index: problems)
    with pytest.raises(BadInput, match=message):
        ProblemCursor(Ragged(CONTEXT)).next_problem()


async def test_environments_that_are_made_one_by_one_are_not_made_together() -> None:
    with pytest.raises(BadInput, match="does not define make_envs"):
        await Named("one").make_envs()


@pytest.mark.virtual_time
async def test_idle_time_is_what_no_request_covers() -> None:
    class Slow:
        async def sample(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

    requests: Any = Requests(Slow())  # type: ignore[arg-type]
    requests.start()
    await asyncio.sleep(2)
    long = asyncio.create_task(requests.sample(4))
    await asyncio.sleep(1)
    await requests.sample_to_evaluate(2)
    assert requests.in_training == 1
    await long
    await asyncio.sleep(1)
    assert requests.take_idle() == 3
    await asyncio.sleep(1)
    assert requests.take_idle() == 1
    longer = asyncio.create_task(requests.sample(20))
    await asyncio.sleep(12)
    assert requests.take_idle() == 0
    await longer


@pytest.mark.parametrize(("model", "longest"), [({}, 256), ({"max_seq_len": 32}, 32)])
def test_limits_come_from_the_model_and_the_configuration(model: dict[str, int], longest: int) -> None:
    config = small(
        model={"name": MODEL, **model},
        orchestrator={"batch_size": 1, "max_prompt_len": 5},
        inference={"sampling": {"max_tokens": 4, "stop": ["b"]}},
    )
    expected = RolloutLimits(vocab_size=99, max_seq_len=longest, max_prompt_len=5, stop=("b",), decode=str)
    assert RolloutLimits.of(config, str) == expected


def test_the_room_starts_without_torch() -> None:
    """Importing torch would cost every start some seconds."""
    code = (
        "import sys, orchestrator.actor, orchestrator.envs.sort\n"
        "from trireme.core.tokenizer import load_tokenizer\n"
        f"load_tokenizer({MODEL!r})\n"
        "print(sorted({'torch', 'ray', 'vllm'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
