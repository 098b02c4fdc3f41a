"""What a start looks at before it gives the service its address."""

import re
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from config_support import small

from trireme.cli import rl, serve, trireme
from trireme.core.errors import EXIT_BAD_INPUT
from trireme.launch.service import check_port

MODEL = ["--model.name", "assets/sort-base", "--model.max-seq-len", "32", "--cluster.device", "cpu"]


@pytest.mark.parametrize(
    ("module", "main", "arguments"),
    [(rl, rl.main, ["@", "configs/quickstart.toml"]), (serve, trireme.main, ["serve", *MODEL])],
    ids=["rl", "serve"],
)
def test_a_taken_port_is_refused_before_there_is_a_directory(
    module: ModuleType,
    main: Callable[[list[str]], int],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "prepare_cluster", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--run.output-dir", str(tmp_path / "runs"), "--service.port", str(port)]
        assert main([*arguments, *flags]) == EXIT_BAD_INPUT
    pattern = rf"service\.port = {port}: .*in use(.|\n)*a port that is free(.|\n)*--service\.port"
    assert re.search(pattern, capsys.readouterr().err)
    assert not (tmp_path / "runs").exists()
    check_port(small(service={"host": "127.0.0.1", "port": port}))
