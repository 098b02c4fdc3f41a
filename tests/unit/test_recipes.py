"""The recipes: their rewards by answers of all kinds, their made rows, and the plans of their large forms.

tests/e2e/test_recipes.py runs their small forms.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gsm8k
import hendrycks_math
import largest
import pytest
import search_agent
import search_corpus
from plan_support import cluster, machines, text_of
from recipe_support import COMPANIES, DIRECTORY, ROOT, ROWS, made_args
from renderer_support import QWEN3, bpe

from orchestrator.env import EnvContext, load_dataset
from trireme.cli.trireme import main
from trireme.config.checks import check
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.config.schema import EnvConfig
from trireme.core.errors import EXIT_OK
from trireme.plan import whole
from trireme.plan.memory import GIB
from trireme.plan.rl import RL_ROOMS
from trireme.plan.whole import Plan

MACHINES = {"gsm8k": (1, 22), "math-4b-lora": (1, 79), "math-8b-8gpu": (8, 79), "apps": (1, 44), "search": (1, 139)}
"""GPUs, and the GiB that the driver of such a one has free: of L4, H100, L40S and H200."""
COLUMNS = {
    "gsm8k": {"question", "answer"},
    "math": {"problem", "level", "type", "solution"},
    "apps": {"problem_id", "question", "solutions", "input_output", "difficulty", "url", "starter_code"},
}
"""Of openai/gsm8k, EleutherAI/hendrycks_math and codeparrot/apps."""


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DIRECTORY / "rows" / f"{name}.jsonl").read_text().splitlines()]


def test_made_rows_have_the_columns_of_the_data_and_right_answers() -> None:
    for name, columns in COLUMNS.items():
        assert [set(row) for row in rows(name)] == [columns] * 20
    assert {gsm8k.correct(row["answer"], row["answer"], True) for row in rows("gsm8k")} == {1.0}
    assert {hendrycks_math.correct(row["solution"], row["solution"], True) for row in rows("math")} == {1.0}


@pytest.mark.parametrize(
    ("completion", "finished", "reward"),
    [
        ("She has 1,500 - 260 = 1240 shells.", True, 1.0),
        (r"So it is \boxed{1,240}.", True, 1.0),
        ("#### 1240.0", True, 1.0),
        ("It is 1240, not 1239", True, 0.0),
        ("It is -1240", True, 0.0),
        ("Twelve hundred and forty", True, 0.0),
        ("", True, 0.0),
        ("She has 1240", False, 0.0),
    ],
)
def test_gsm8k(completion: str, finished: bool, reward: float) -> None:
    assert gsm8k.correct(completion, "1500 - 260 = <<1500-260=1240>>1,240\n#### 1,240", finished) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("59", 1.0), ("Largest: 59.", 1.0), ("Not 15 but 59", 1.0), ("63, no: 15", 0.0), ("59, 15", 0.0), ("", 0.0)],
)
def test_largest(completion: str, reward: float) -> None:
    assert largest.correct(completion, "59") == reward


def test_rows_and_a_corpus_differ_and_follow_from_their_seed(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        search_corpus.make(tmp_path / name, 20, seed)
        largest.make(tmp_path / name / "largest.jsonl", 100, seed)
    for file in ("corpus.jsonl", "largest.jsonl"):
        texts = [(tmp_path / name / file).read_text() for name in ("one", "same", "other")]
        assert texts[0] == texts[1] != texts[2]
    prompts = [json.loads(line) for line in texts[0].splitlines()]
    assert len({row["prompt"] for row in prompts}) == 100
    assert all(max(map(int, re.findall(r"\d+", row["prompt"]))) == int(row["answer"]) for row in prompts)


def test_candidates_have_rows_for_each_of_their_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `reasoning-gym` is not installed")
    import candidates

    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    largest.make(Path("outputs/largest.jsonl"), 4000, 0)
    candidates.make(candidates.DIRECTORY)
    files = [word for name in ("laptop", "candidates") for word in ("@", f"examples/recipes/{name}.toml")]
    config = load(files, {}).config
    assert [env.label for env in config.eval_envs] == ["largest", *candidates.TASKS]
    for env in config.eval_envs:
        dataset = load_dataset(env, EnvContext(bpe(QWEN3), 0, 2, "eval"))
        batches = [dataset.get_batch(number) for number in range(len(dataset))]
        problems = [problem.row.columns for batch in batches for problem in batch]  # type: ignore[attr-defined]
        assert len(problems) >= config.eval.problems == candidates.ROWS
        assert {largest.correct(f"It is {problem['answer']}.", problem["answer"]) for problem in problems} == {1.0}


@pytest.mark.parametrize(
    ("completion", "finished", "reward"),
    [
        (r"It is $\boxed{\frac{1}{2}}$.", True, 1.0),
        (r"First \boxed{3}, and then \boxed{\dfrac{2}{4}}", True, 1.0),
        (r"\boxed{0.5}", True, 1.0),
        (r"\boxed{\frac{1}{3}}", True, 0.0),
        (r"\boxed{}", True, 0.0),
        (r"\boxed{\frac{1}{2}", True, 0.0),
        (r"It is \frac{1}{2}.", True, 0.0),
        ("", True, 0.0),
        (r"\boxed{\frac{1}{2}}", False, 0.0),
    ],
)
def test_math(completion: str, finished: bool, reward: float) -> None:
    assert hendrycks_math.correct(completion, r"Half of 1 is $\boxed{\frac{1}{2}}$.", finished) == reward


def test_boxes_of_old_solutions() -> None:
    assert [hendrycks_math.boxed(text) for text in (r"$\boxed 4$.", r"\fbox{6}", r"\boxed{a{b}} c}")] == [
        "4",
        "6",
        "a{b}",
    ]


def apps(split: Any = "train") -> Any:
    args = {**made_args("apps", Path()), "limit_processes": False, "limit_s": 2.0}
    return load_dataset(EnvConfig(id="apps:Apps", args=args), EnvContext(bpe(QWEN3), 0, 2, split))


def test_apps_leaves_out_functions_other_difficulties_and_problems_without_tests() -> None:
    dataset = apps()
    questions = [problem.make.args[0].question for problem in dataset.get_batch(0)]
    assert len(dataset) == 1
    assert len(questions) == 15
    assert not any("function" in text or "Fibonacci" in text or "anything" in text for text in questions)


@pytest.mark.parametrize(
    ("answer", "metrics"),
    [
        (None, (1, 0, 0)),
        ("```python\nprint(0)\n```", (0, 0, 0)),
        ("```python\nprint(\n```", (0, 0, 0)),
        ("```python\nimport sys\nsys.exit(0)\n```", (0, 0, 0)),
        ("```python\nwhile True: print(1)\n```", (0, 0, 1)),
        ("print(0)", (0, 1, 0)),
    ],
    ids=["right", "wrong", "no program of Python", "success without output", "over a limit", "no block"],
)
def test_apps(answer: str | None, metrics: tuple[int, int, int]) -> None:
    problem = apps().get_batch(0)[0].make()
    content = answer or problem.known_answer()
    step = asyncio.run(problem.step({"role": "assistant", "content": content}))
    names = ("success", "no_program", "over_a_limit")
    assert (step.reward, step.episode_done) == (metrics[0], True)
    assert tuple(step.metrics.get(name, 0) for name in names) == metrics
    if step.metrics.get("over_a_limit"):
        assert step.logs["limit"] in ("output_bytes", "wall_s", "cpu_s")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(ROOT)
    return made_args("search", tmp_path)["corpus"]


def call(arguments: str) -> str:
    return f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>'


PLAYED = {
    "right": ([call('{"query": "company"}'), "{answer}."], [], "reward 1  session/turns 2"),
    "wrong": (["Nobody"], [], "reward 0  session/turns 1"),
    "a malformed call": ([call('{"words": 3}'), "{answer}"], [], "reward 1  session/turns 2"),
    "too long": (["{answer}"], ["--inference.sampling.max-tokens", "{length}"], "reward 0  session/turns 1"),
    "only searches": ([call('{"query": "company"}')] * search_agent.TURNS, [], "reward 0  session/turns 6"),
}


@pytest.mark.parametrize("name", PLAYED)
def test_the_search_agent(name: str, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, flags, last = PLAYED[name]
    env = ["agent:search_agent:play", "--env.path", "examples/recipes", "--env.args.corpus", corpus]
    problem = load_dataset(EnvConfig(id=env[0], args={"corpus": corpus}), EnvContext(bpe(QWEN3), 0, 2)).get_batch(0)[0]
    answer: str = problem.problem["answer"]  # type: ignore[attr-defined]
    (tmp_path / "answers").write_text("".join(line.replace("{answer}", answer) + "\n" for line in lines))
    flags = [flag.replace("{length}", str(len(answer))) for flag in flags]  # no token is left for the end
    assert main(["env", "try", *env, *flags, "--answers", str(tmp_path / "answers")]) == EXIT_OK
    shown = capsys.readouterr().out
    assert last in shown
    assert ("expected an argument `query`" in shown) == (name == "a malformed call")


def test_a_question_is_answered_by_three_searches(corpus: str) -> None:
    index = search_agent.index(corpus)
    asked = [row for split in ("train", "eval") for row in search_agent.problems(split, 0, corpus)]
    companies = [re.findall(r"company (\w+)", row["question"])[0] for row in asked]
    assert len(asked) == 3 * len(set(companies)) == 3 * COMPANIES
    for name, row in zip(companies, asked, strict=True):
        company = next(text for text in index.search(name).splitlines() if text.startswith(f"{name} is a company"))
        person = re.findall(r"that (.+) founded", company)[0]
        birth = next(text for text in index.search(person).splitlines() if text.startswith(f"{person} was born"))
        town = re.findall(r"born in (\w+)", birth)[0]
        place = next(text for text in index.search(f"town {town}").splitlines() if text.startswith(f"{town} is a town"))
        assert row["answer"] in (person, town, re.findall(r"river (\w+)", place)[0])
    assert index.search("qqq") == "nothing was found"


def planned(flags: Sequence[str], gib: float, nodes: Sequence[int]) -> Plan:
    """Returns the plan for machines with these numbers of GPUs, on each of which `gib` are free."""
    name = load(flags, {}).config.model.name.removeprefix("Qwen/").lower()
    config = load([*flags, "--model.facts", str(DIRECTORY / "facts" / f"{name}.json")], {}).config
    facts = ModelFacts.of(config, required=False)
    parts = [machines(cpus=32, gpus=gpus, memory_bytes=256 * GIB, gpu_bytes=round(gib * GIB)) for gpus in nodes]
    return Plan(config, facts, parts[0] if len(parts) == 1 else cluster(*parts), RL_ROOMS, notes=check(config, facts))


def numbers_in(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


@pytest.mark.parametrize("recipe", ROWS)
def test_the_large_form_fits_its_gpus_as_its_file_says(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "check_build", lambda **_: None)  # here is the build for CPUs
    monkeypatch.chdir(ROOT)
    file = f"examples/recipes/{recipe}.toml"
    gpus, gib = MACHINES[recipe]
    plan = planned(["@", file], gib, [gpus])
    plan.check_resources()
    shown, header = text_of(plan), Path(file).read_text().partition("max_steps")[0]
    assert [text for text in plan.warnings if "memory" in text] == []
    assert numbers_in(r"a shard up to ([\d.]+)", shown) == pytest.approx(
        numbers_in(r"a shard of ([\d.]+)", header), abs=0.06
    )
    assert numbers_in(r"replica (\d+)%", shown) == numbers_in(r"(\d+) % of (?:the|a) GPU", header)
    assert numbers_in(r"about ([\d.]+) GiB of", shown) == pytest.approx(
        numbers_in(r"replica, (\d+) GiB", header), abs=0.51
    )


TABLE = re.findall(
    r"^\| (?:(2) x )?([18]) of (\d+) GB \|.*\| `@ (.*?)`.*\| ([\d.]+) of (\d+) GiB: .*?shard ([\d.]+)",
    (ROOT / "docs" / "start.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[1]} of {row[2]} GB, {row[3]}")
def test_the_table_of_the_page_says_what_is_planned(row: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    nodes, gpus, _, flags, fullest, free, shard = row
    shown = text_of(planned(["@", *flags.split()], float(free), [int(gpus)] * int(nodes or 1)))
    assert max(numbers_in(r"([\d.]+) GiB on the fullest GPU", shown)) == pytest.approx(float(fullest), abs=0.06)
    assert numbers_in(r"a shard up to ([\d.]+)", shown) == pytest.approx([float(shard)], abs=0.06)


def test_the_table_has_the_gpus_that_people_have() -> None:
    assert {(int(row[1]), int(row[2])) for row in TABLE} >= {(n, gb) for n in (1, 8) for gb in (24, 48, 80, 141)}
