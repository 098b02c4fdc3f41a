"""The directory of one run: where everything it writes goes, and who may write there."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trireme.config.problems import Problem
from trireme.config.schema import Config

LOCK = "driver.lock"
MARKS = ("config.json", "metrics.jsonl")
"""Files of which a directory must hold one to be taken for a run directory."""


def default_name(config: Config, suffix: str) -> str:
    """Name of a run that was given none."""
    return f"{config.env.label}-{Path(config.model.name).name}-{suffix}"


@dataclass(frozen=True)
class RunDir:
    """A run directory that this process holds the lock of."""

    root: Path
    lock: IO[str]

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """Makes, locks and (with `clean`) empties the directory, and writes config.json and code.diff.

        Raises BadInput for a directory in use by another run or driver, one that is no run directory (`clean`), and one
        that cannot be written. Leaving the `with` block gives the lock back.
        """
        name = config.run.name or default_name(config, secrets.token_hex(4))
        if name == ".." or name != Path(name).name:
            raise Problem(
                f"run.name = {name!r}",
                "the name of a directory, without slashes",
                "choose another --run.name; where it lies is said by --run.output-dir",
            ).error()
        root = (Path(config.run.output_dir).expanduser() / name).absolute()
        try:
            root.mkdir(parents=True, exist_ok=True)
            _refuse_foreign(root, config.clean)
            run_dir = cls(root, _locked(root))
            run_dir._clear(config.clean)
            run_dir.config_json.write_text(_rerunnable(config), encoding="utf-8")
        except OSError as error:
            raise Problem(
                f"the run directory {root}: {error.strerror}",
                "a directory that can be made and written",
                "choose another --run.output-dir, or correct its permissions",
            ).error() from None
        _write_code_diff(root / "code.diff")
        return run_dir

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.close()

    @property
    def config_json(self) -> Path:
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def weights(self) -> Path:
        """The trained model, in Hugging Face layout."""
        return self.root / "weights"

    def logs(self, attempt: int) -> Path:
        """Directory of the rooms' log files of one attempt; made if need be."""
        path = self.root / "logs" / f"attempt_{attempt}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _clear(self, clean: bool) -> None:
        contents = _contents(self.root)
        if contents and not clean:
            self.lock.close()
            raise _in_use(self.root, contents, "empty it with --clean").error()
        for entry in contents:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _contents(root: Path) -> list[Path]:
    return [entry for entry in root.iterdir() if entry.name != LOCK]


def _in_use(root: Path, contents: list[Path], other_way: str) -> Problem:
    return Problem(
        f"the run directory {root}, which is in use ({len(contents)} entries)",
        "a new or an empty directory",
        f"choose another --run.name (without one a new name is made), or {other_way}",
    )


def _refuse_foreign(root: Path, clean: bool) -> None:
    """Refuses a directory that holds something but is no run directory, before a lock file is put into it."""
    contents = _contents(root)
    if not contents or any((root / mark).exists() for mark in MARKS):
        return
    if not clean:
        raise _in_use(root, contents, "another --run.output-dir").error()
    raise Problem(
        f"--clean for {root}, which holds neither {' nor '.join(MARKS)}",
        "a run directory: nothing else is ever emptied",
        "choose another --run.name or --run.output-dir, or empty the directory yourself",
    ).error()


def _locked(root: Path) -> IO[str]:
    """The open lock file; the lock ends with this process, however it ends."""
    lock = (root / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise Problem(
            f"the run directory {root}, whose driver ({holder}) is running",
            "a directory that no living driver holds",
            "wait for that run or stop it, or choose another --run.name",
        ).error() from None
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {os.uname().nodename}\n")
    lock.flush()
    return lock


def _rerunnable(config: Config) -> str:
    """The resolved configuration. `clean` is left out: running it again must not empty anything."""
    return json.dumps(config.model_dump(mode="json", exclude={"clean"}), indent=2) + "\n"


def _write_code_diff(file: Path) -> None:
    """What differs from the last commit, headed by that commit; nothing outside a git checkout."""
    git = shutil.which("git")
    if git is None:
        return
    head = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True)
    diff = subprocess.run([git, "diff", "HEAD"], capture_output=True)
    if head.returncode == 0 and diff.returncode == 0:
        file.write_bytes(f"commit {head.stdout.strip()}\n".encode() + diff.stdout)
