"""Reading the configuration: the order of places, every form of writing a value, and what each refusal says."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from config_support import BASE, REQUIRED, refused

from trireme.config import Config
from trireme.config.keys import keys_of
from trireme.config.load import load
from trireme.config.words import WORDS

Toml = Callable[..., str]


def config(*flags: str, **environ: str) -> Config:
    return load([*REQUIRED, *flags], environ).config


def refusal(*argv: str, **environ: str) -> str:
    return refused(lambda: load(list(argv), environ))


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toml:
    """Writes a file into the working directory of the test; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "f.toml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize("key", ["inference.sampling.temperature", "trainer.loss-fn-config.max-ratio"])
def test_numbers_are_finite(key: str, value: str) -> None:
    text = refusal(*REQUIRED, f"--{key}", value)
    assert f"= {value} (flag --{key})" in text
    assert "takes: number" in text


def test_the_order_of_files_environment_and_flags(toml: Toml) -> None:
    first = toml("[trainer]\nshards = 2\nwarmup_steps = 7", "a.toml")
    second = toml("[trainer]\nshards = 3", "b.toml")
    got = config("@", first, "@", second).trainer
    assert (got.shards, got.warmup_steps) == (3, 7)
    assert config("@", second, "@", first).trainer.shards == 2
    assert config("@", first, TRIREME__TRAINER__SHARDS="3").trainer.shards == 3
    assert config("--trainer.shards", "4", "@", first, TRIREME__TRAINER__SHARDS="3").trainer.shards == 4
    assert config(TRIREME="x", HOME="/root", TRAINER__SHARDS="3").trainer.shards == 1, "others are left alone"


class TestForms:
    @pytest.mark.parametrize(
        "words",
        [
            ["--orchestrator.max-steps-off-policy", "3"],
            ["--orchestrator.max-steps-off-policy=3"],
            ["--orchestrator.max_steps_off_policy", "3"],
        ],
    )
    def test_flag(self, words: list[str]) -> None:
        assert config(*words).orchestrator.max_steps_off_policy == 3

    def test_files_at_the_root_and_at_their_sections(self, toml: Toml) -> None:
        assert config("@" + toml("[trainer]\nshards = 2")).trainer.shards == 2
        got = config(
            *("--trainer", "@", toml("shards = 2\noptim.beta2 = 0.5", "t.toml")),
            *("--orchestrator", "@" + toml("group_size = 4", "o.toml")),
            "--inference=@" + toml("[sampling]\ntemperature = 0.5", "i.toml"),
            *("--inference.sampling", "@", toml("top_k = 5", "s.toml")),
        )
        assert (got.trainer.shards, got.trainer.optim.beta2, got.orchestrator.group_size) == (2, 0.5, 4)
        assert (got.inference.sampling.temperature, got.inference.sampling.top_k) == (0.5, 5)
        whole = toml(json.dumps(got.model_dump(mode="json")), "config.json")
        assert load(["@", whole], {}).config == got

    def test_switch(self) -> None:
        assert config("--clean").clean
        assert config("--clean=true").clean
        assert config("--clean", "--seed", "1").clean
        assert not config("--clean", "false").clean

    @pytest.mark.parametrize(
        ("words", "latest"),
        [([], True), (["auto"], "auto"), (["false"], False), (["--seed", "1"], True)],
    )
    def test_switch_with_another_word(self, words: list[str], latest: bool | str) -> None:
        assert config("--resume", *words).resume.latest == latest
        assert config(f"--resume={latest}".lower()).resume.latest == latest
        assert config(TRIREME__RESUME__LATEST=str(latest)).resume.latest == latest

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("5", 5),
            ("0.5", 0.5),
            ("true", True),
            ("hard", "hard"),
            ("[1, 2]", [1, 2]),
            ('"5"', "5"),
            ("{a = 1}", {"a": 1}),
        ],
    )
    def test_entry_of_a_free_form_table(self, text: str, value: object) -> None:
        assert config("--env.args.my-length", text).env[0].args == {"my_length": value}
        assert config(TRIREME__ENV__ARGS__MY_LENGTH=text).env[0].args == {"my_length": value}

    def test_free_form_tables_are_literals_and_entries_of_several_places(self, toml: Toml) -> None:
        for text in ('{"a": 1, "b": {"c": 2}}', "{a = 1, b.c = 2}"):
            assert config("--env.args", text).env[0].args == {"a": 1, "b": {"c": 2}}
        file = toml("[env.args]\na = 1\nb = 1\nempty = {}")
        got = config("@", file, "--env.args.b", "3", TRIREME__ENV__ARGS__B="2", TRIREME__ENV__ARGS__C="2")
        assert got.env[0].args == {"a": 1, "b": 3, "c": 2, "empty": {}}

    @pytest.mark.parametrize(
        ("layers", "args"),
        [
            (("a.x = 1", "a.y = 2"), {"a": {"x": 1, "y": 2}}),
            (("a.x = 1\nb = 1", "a = 2\nb.y = 3"), {"a": 2, "b": {"y": 3}}),
            (("a.x = 1", "a = 5", "a.y = 2"), {"a": {"y": 2}}),
            (("a.x = 1", "a = {}"), {"a": {}}),
            (("a.x = 1", "a = {}", "a.y = 2"), {"a": {"y": 2}}),
        ],
    )
    def test_a_replaced_table_does_not_come_back(self, toml: Toml, layers: tuple[str, ...], args: dict) -> None:
        files = [toml(f"[env.args]\n{layer}", f"{n}.toml") for n, layer in enumerate(layers)]
        assert config(*(word for file in files for word in ("@", file))).env[0].args == args

    def test_a_config_from_values_reads_no_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As pydantic-settings would."""
        monkeypatch.setenv("TRIREME__SEED", "5")
        monkeypatch.setenv("SEED", "5")
        assert Config.model_validate(BASE).seed == 0
        assert load(REQUIRED).config.seed == 5

    def test_lists_none_numbers_and_a_dry_run(self) -> None:
        assert config("--wandb.tags", '["a", "b"]').wandb.tags == ["a", "b"]
        assert config("--wandb.project", "none", TRIREME__WANDB__PROJECT="x").wandb.project is None
        assert config("--env.id", "none").env[0].id == "none"  # may not be none, so it is a name
        got = config("--trainer.learning-rate", "2e-4", "--inference.sampling.top-k", "-1", "--run.name", "7")
        assert (got.trainer.learning_rate, got.inference.sampling.top_k, got.run.name) == (2e-4, -1, "7")
        assert load([*REQUIRED, "--dry-run"], {}).dry_run
        assert not load(REQUIRED, {}).dry_run


SORT_AND_GUESS = """
[[env]]
id = "sort"
args = { max_digits = 5 }

[[env]]
id = "guess"
weight = 2.0
group_size = 4
"""
WITHOUT_ENV = [*("--model.name", "m", "--orchestrator.batch-size", "16"), *("--inference.sampling.max-tokens", "10")]


class TestSeveralEnvironments:
    def test_a_list_of_tables_and_environment_variables(self, toml: Toml) -> None:
        got = load([*WITHOUT_ENV, "@", toml(SORT_AND_GUESS)], {}).config
        assert [(env.id, env.weight, env.group_size) for env in got.env] == [("sort", 1.0, None), ("guess", 2.0, 4)]
        assert got.env[0].args == {"max_digits": 5}
        assert [got.group_size(env) for env in got.env] == [8, 4]
        assert got.label == "sort+guess"
        environ = {
            "TRIREME__ENV__0__ID": "sort",
            "TRIREME__ENV__1__ID": "guess",
            "TRIREME__ENV__1__ARGS__MAX_TURNS": "3",
        }
        got = load(WITHOUT_ENV, environ).config
        assert [env.id for env in got.env] == ["sort", "guess"]
        assert got.env[1].args == {"max_turns": 3}

    @pytest.mark.parametrize(
        "words",
        [
            ["--env", '[{"id": "sort"}, {"id": "guess", "weight": 2.0}]'],
            ["--env", "[{id = 'sort'}, {id = 'guess', weight = 2.0}]"],
            ["--env.0.id", "sort", "--env.1.id", "guess", "--env.1.weight", "2"],
        ],
    )
    def test_flags(self, words: list[str]) -> None:
        got = load([*WITHOUT_ENV, *words], {}).config
        assert [(env.id, env.weight) for env in got.env] == [("sort", 1.0), ("guess", 2.0)]

    def test_later_places_add_change_and_replace_entries(self, toml: Toml) -> None:
        got = load([*WITHOUT_ENV, "@", toml('[env]\nid = "sort"'), "--env.1.id", "guess"], {}).config
        assert [env.id for env in got.env] == ["sort", "guess"]
        flags = ["--env.1.weight", "5", "--env.0.args.min-digits", "4"]
        got = load([*WITHOUT_ENV, "@", toml(SORT_AND_GUESS), *flags], {}).config
        assert [env.weight for env in got.env] == [1.0, 5.0]
        assert got.env[0].args == {"max_digits": 5, "min_digits": 4}
        assert got.env[1].group_size == 4
        first, second = toml(SORT_AND_GUESS), toml('[[env]]\nid = "letters:Letters"', "g.toml")
        got = load([*WITHOUT_ENV, "@", first, "@", second], {}).config
        assert [(env.id, env.args) for env in got.env] == [("letters:Letters", {})]
        assert len(load([*WITHOUT_ENV, "@", second, "@", first], {}).config.env) == 2
        got = load([*WITHOUT_ENV, "@", first, "--env.1", "@", toml('id = "twenty_questions"', "h.toml")], {}).config
        assert [(env.id, env.weight) for env in got.env] == [("sort", 1.0), ("twenty_questions", 2.0)]

    def test_an_entry_without_an_id_is_refused(self, toml: Toml) -> None:
        text = refusal(*WITHOUT_ENV, "@", toml('[[env]]\nid = "sort"\n[[env]]\nweight = 2.0'))
        assert "no value for `env.1.id`" in text
        assert "no value for `env.1.id`" in refusal(*WITHOUT_ENV, "--env.0.id", "a", "--env.2.id", "b")
        assert "no value for `env.id`" in refusal(*WITHOUT_ENV, "--env", "[]")

    @pytest.mark.parametrize(
        ("flag", "value", "expected"),
        [
            ("--env.1.wieght", "4", ("did you mean `--env.1.weight`?",)),
            ("--env.1.groupsize", "4", ("did you mean `--env.1.group-size`?",)),
            ("--env.1.weight", "0", ("env.1.weight = 0 (flag --env.1.weight)", "takes: number > 0")),
            ("--env.args.max-digits", "4", ("because there are several in `env`", "`env.0.args.max_digits`")),
        ],
    )
    def test_a_wrong_flag(self, toml: Toml, flag: str, value: str, expected: tuple[str, ...]) -> None:
        text = refusal(*WITHOUT_ENV, "@", toml(SORT_AND_GUESS), flag, value)
        assert [part for part in expected if part not in text] == []

    def test_evaluations_on_several_also_of_what_was_resolved(self, toml: Toml) -> None:
        file = toml(SORT_AND_GUESS)
        assert [env.label for env in load([*WITHOUT_ENV, "@", file], {}).config.eval_envs] == ["sort", "guess"]
        environments = '[{name = "guess", args = {max_turns = 2}}, {id = "letters:Letters"}]'
        got = load([*WITHOUT_ENV, "@", file, "--eval.env", environments], {}).config
        assert [(env.id, env.label, env.args) for env in got.eval_envs] == [
            ("guess", "guess", {"max_turns": 2}),
            ("letters:Letters", "letters", {}),
        ]
        assert load(["@", toml(got.model_dump_json(), "c.json")], {}).config == got


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("flag", "meant"),
        [
            ("--trainer.sharts", "--trainer.shards"),
            ("--trianer.shards", "--trainer.shards"),
            ("--trainer.gpus", "--trainer.shards"),
            ("--batch-size", "--orchestrator.batch-size"),
            ("--learning-rate", "--trainer.learning-rate"),
            ("--orchestrator.max-step-off-policy", "--orchestrator.max-steps-off-policy"),
            ("--sampling.temperature", "--inference.sampling.temperature"),
            ("--trainer.optim.beta", "--trainer.optim.beta1"),
            ("--max_step", "--max-steps"),
            ("--trainer.lr", "--trainer.learning-rate"),
            ("--batch", "--orchestrator.batch-size"),
            ("--max-tokens", "--inference.sampling.max-tokens"),
            ("--grpo", "--trainer.loss-fn"),
            ("--num-generations", "--orchestrator.group-size"),
        ],
    )
    def test_flag(self, flag: str, meant: str) -> None:
        text = refusal(*REQUIRED, flag, "4")
        assert f"`{flag} 4`" in text
        assert f"did you mean `{meant}`?" in text

    def test_words_of_others_and_a_file_of_another_version(self, toml: Toml) -> None:
        options = {".".join(path) for path in keys_of(Config).options}
        assert set(WORDS.values()) <= options
        written = {**config().model_dump(mode="json"), "written_by": {"trireme": "0.0.1"}, "elbow": 3}
        text = refusal("@", toml(json.dumps(written), "c.json"))
        assert "`elbow` (file c.json)" in text
        assert "written_by" not in text
        del written["elbow"]
        assert load(["@", toml(json.dumps(written), "c.json")], {}).config == config()

    def test_file_and_environment(self, toml: Toml) -> None:
        text = refusal(*REQUIRED, "@", toml("[trainer]\nsharts = 4"))
        assert "`trainer.sharts` (file f.toml)" in text
        assert "did you mean `trainer.shards`?" in text
        text = refusal(*REQUIRED, TRIREME__TRAINER__SHARTS="4")
        assert "TRIREME__TRAINER__SHARTS" in text
        assert "did you mean `TRIREME__TRAINER__SHARDS`?" in text
        assert "known key" in refusal(*REQUIRED, "--trainer.shards.x", "4")

    @pytest.mark.parametrize("flag", ["--qqq.zzz", "--trainer.bogus-thing", "--orchestrator.foo", "--inference.x.y"])
    def test_nothing_like_it(self, flag: str) -> None:
        text = refusal(*REQUIRED, flag, "4")
        assert "did you mean" not in text
        assert "--help" in text


class TestValuesThatJsonCannotHold:
    def test_words_and_dates_of_a_flag_are_text_and_numbers_are_refused(self) -> None:
        for text in ("nan", "inf", "-inf", "NaN", "Infinity", "2024-01-01"):
            assert config("--env.args.kind", text).env[0].args == {"kind": text}
        for text in ("1e999", "[1, nan]", "{a = inf}"):
            assert "JSON has no nan, inf, dates or times" in refusal(*REQUIRED, "--env.args.kind", text)

    @pytest.mark.parametrize("value", ["inf", "nan", "[1.0, -inf]", "2024-01-01", "12:00:00"])
    def test_values_of_a_file_are_refused(self, toml: Toml, value: str) -> None:
        text = refusal(*REQUIRED, "@", toml(f"[env.args]\nkind = {value}"))
        assert "env.args.kind" in text
        assert "write it as text, in quotes" in text


class TestWrongValues:
    @pytest.mark.parametrize(
        ("flag", "value", "expected"),
        [
            ("--trainer.shards", "two", "integer > 0"),
            ("--trainer.shards", "0", "integer > 0"),
            ("--orchestrator.max-steps-off-policy", "-1", "integer >= 0"),
            ("--trainer.learning-rate", "fast", 'number > 0 or "auto"'),
            ("--orchestrator.min-viable-group", "2", "number >= 0 and <= 1"),
            ("--inference.sampling.temperature", "0", "number >= 0.01 and <= 2"),
            ("--trainer.schedule", "step", 'one of "constant", "linear", "cosine"'),
            ("--wandb.tags", "a", "list of string"),
            ("--env.args", "5", "table"),
            ("--trainer.loss-fn-config.clip-low-threshold", "low", "number"),
        ],
    )
    def test_flag(self, flag: str, value: str, expected: str) -> None:
        text = refusal(*REQUIRED, flag, value)
        assert f"= {value} (flag {flag})" in text
        assert f"takes: {expected}" in text

    @pytest.mark.parametrize("value", ['"2"', "true", "2.5", "[1]"])
    def test_file(self, toml: Toml, value: str) -> None:
        text = refusal(*REQUIRED, "@", toml(f"[trainer]\nshards = {value}"))
        assert f"trainer.shards = {value} (file f.toml)" in text
        assert "integer > 0" in text

    def test_environment_and_section(self, toml: Toml) -> None:
        assert "environment variable TRIREME__SEED" in refusal(*REQUIRED, TRIREME__SEED="x")
        text = refusal(*REQUIRED, "@", toml("trainer = 5"))
        assert "trainer = 5 (file f.toml)" in text
        assert "table of keys" in text


class TestBrokenInput:
    def test_what_is_missing_is_said_at_once(self, toml: Toml, tmp_path: Path) -> None:
        text = refusal("@", "nowhere.toml")
        parts = ("nowhere.toml", f"none of that name in {tmp_path}", "correct the path")
        assert [part for part in parts if part not in text] == []
        assert "there is none of that name\n" in refusal("@", "/tmp/no such place/nope.toml")
        text = refusal()
        keys = ("model.name", "orchestrator.batch_size", "env.id", "inference.sampling.max_tokens")
        ways = ("--orchestrator.batch-size VALUE", "[inference.sampling] max_tokens = ...", "TRIREME__ENV__ID")
        assert [part for part in (*(f"no value for `{key}`" for key in keys), *ways) if part not in text] == []
        text = refusal(*REQUIRED, "@", "nowhere.toml", "--trainer.sharts", "4", "--seed", "x", TRIREME__MODEL__NAM="m")
        assert text.startswith("4 problems")
        assert [part for part in ("nowhere.toml", "sharts", "--seed", "TRIREME__MODEL__NAM") if part not in text] == []

    @pytest.mark.parametrize(
        ("contents", "name", "message"),
        [("seed = 1\n[trainer\n", "f.toml", "line 2"), ("{", "c.json", "line 1"), ("[1]", "c.json", "table of keys")],
    )
    def test_syntax(self, toml: Toml, contents: str, name: str, message: str) -> None:
        text = refusal(*REQUIRED, "@", toml(contents, name))
        assert name in text
        assert message in text

    @pytest.mark.parametrize("behind", [[], ["--clean"], ["@", "f.toml"]])
    def test_flag_without_a_value(self, toml: Toml, behind: list[str]) -> None:
        toml("")
        text = refusal(*REQUIRED, "--trainer.shards", *behind)
        assert "`--trainer.shards` without a value" in text
        assert "write `--trainer.shards VALUE`" in text

    def test_words_without_a_key_or_a_file(self) -> None:
        assert "`--trainer @ FILE.toml`" in refusal(*REQUIRED, "--trainer")
        assert "`@` without a file" in refusal(*REQUIRED, "@")
        assert "`@` without a file" in refusal(*REQUIRED, "@", "--clean")
        assert "write `@ f.toml`" in refusal(*REQUIRED, "f.toml")
        assert "--help" in refusal(*REQUIRED, "go")


class TestInformation:
    @pytest.mark.parametrize(
        ("section", "key", "other"),
        [
            ("trainer", "--trainer.lora.rank", "--orchestrator"),
            ("inference.sampling", "--inference.sampling.top-k", "--inference.replicas"),
        ],
    )
    def test_help_of_a_section(self, capsys: pytest.CaptureFixture[str], section: str, key: str, other: str) -> None:
        with pytest.raises(SystemExit):
            load(["--help", section], {})
        out = capsys.readouterr().out
        assert key in out
        assert other not in out
        assert "trainer" in refusal("--help", "trayner")

    def test_help_has_every_key_and_version_a_number(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exited:
            load(["--help"], {})
        assert exited.value.code == 0
        out = capsys.readouterr().out
        parts = ("usage: rl", "--trainer.max-grad-norm  [1.0]", "--orchestrator.batch-size  [required]", "--dry-run")
        assert [part for part in parts if part not in out] == []
        assert out.strip() == keys_of(Config).help_text().strip()
        with pytest.raises(SystemExit) as exited:
            load(["--version"], {})
        assert exited.value.code == 0
        assert capsys.readouterr().out.startswith("trireme 0.")
