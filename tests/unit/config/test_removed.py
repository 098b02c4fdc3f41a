"""Keys and commands that no longer exist: each is refused by what replaces it, wherever it is written."""

from pathlib import Path

import pytest
from config_support import REQUIRED

from trireme.cli import trireme
from trireme.config.keys import keys_of
from trireme.config.load import load
from trireme.config.removed import REMOVED
from trireme.config.schema import Config
from trireme.core.errors import EXIT_BAD_INPUT, BadInput

COMMANDS = sorted(name for name in REMOVED if name.startswith("trireme "))
KEYS = sorted(name for name in REMOVED if not name.startswith("trireme "))


def refusal(argv: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(BadInput) as refused:
        load([*REQUIRED, *argv], environ or {})
    assert "did you mean" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("key", KEYS)
def test_a_removed_key(key: str, tmp_path: Path) -> None:
    path = tuple(key.split("."))
    keys = keys_of(Config)
    assert keys.stored_path(path) is None, "the key exists"
    file = tmp_path / "run.toml"
    file.write_text(f"{key} = 1\n")
    variable = "__".join(["TRIREME", *path]).upper()
    flag = "--" + key.replace("_", "-")
    assert f"`{key}` (file {file})" in refusal(["@", str(file)])
    assert REMOVED[key] in refusal([], {variable: "1"})
    for words in (["@", str(file)], [flag, "1"], [flag], [f"{flag}.part", "1"]):
        assert REMOVED[key] in refusal(words)


def test_removed_commands_and_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(REMOVED, "trireme draw", "use `trireme report RUN`")
    monkeypatch.setitem(REMOVED, "trireme report --draw", "use `trireme watch RUN --web`")
    assert trireme.main(["draw", "runs/a"]) == EXIT_BAD_INPUT
    output = capsys.readouterr().err
    assert "given: `trireme draw`" in output
    assert "to do: use `trireme report RUN`" in output
    assert trireme.main(["report", "runs/a", "--draw=x"]) == EXIT_BAD_INPUT
    assert "to do: use `trireme watch RUN --web`" in capsys.readouterr().err
    for command in COMMANDS:
        assert trireme.main(command.split()[1:]) == EXIT_BAD_INPUT
        assert REMOVED[command] in capsys.readouterr().err


def test_a_key_of_an_entry_and_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "env.level", "use env.args.level")
    monkeypatch.setitem(REMOVED, "drawing", "use `trireme report RUN`")
    assert "use env.args.level" in refusal(["--env.0.level", "2"])
    assert "use `trireme report RUN`" in refusal(["--drawing.colours.axis", "red"])
