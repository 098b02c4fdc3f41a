"""The directory of one run: the files in it, the lock on it, and where an attempt starts."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import IO

from trireme.checkpoint.files import replace_file
from trireme.checkpoint.manifest import CheckpointRef, Manifest
from trireme.checkpoint.resume import check_fixed, choose, choose_existing, fork
from trireme.checkpoint.rows import METRICS
from trireme.checkpoint.store import HEAD, LOCK, CheckpointStore, Head, VerifiedCheckpoint
from trireme.config.keys import keys_of
from trireme.config.load import WRITTEN_BY
from trireme.config.run import is_url
from trireme.config.schema import CommonConfig, Config
from trireme.config.sft import SftConfig
from trireme.config.trust import FLAG, RECORD, named_code
from trireme.core.errors import BadInput, CheckpointInvalid
from trireme.core.finite_json import to_json
from trireme.core.paths import path_in
from trireme.core.redaction import MASK, redact, redact_values
from trireme.core.refusals import Refusal
from trireme.run.mirror import Mirror

CONFIG = RECORD
MARKS = (CONFIG, METRICS)
"""The names of two files; a run directory holds at least one of them."""
PLACES = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "RAY_ADDRESS")
"""Environment variables without which the same command may not find its modules, devices, models or cluster."""
BEFORE_MARKS = (LOCK, *(f"{mark}.new" for mark in MARKS))
"""Files that a start may leave if it is killed before it has written one of MARKS."""


def command_of(root: Path) -> str:
    """Returns the name of the command that made the run in `root`: "sft" if its config.json has a section `data`, else
    "rl"."""
    if "data" in json.loads((root / CONFIG).read_bytes()):
        return "sft"
    return "rl"


def rerun_command(root: Path, *flags: str, trusted: bool = False) -> str:
    """Returns the shell command that runs the configuration of the run in `root` again, with additional `flags`.
    `trusted`: True if the command is for the user who has just started that run. The command then also sets the
    environment variables with which the run found its modules, models and devices. If the configuration names code, the
    command also has the flag `--trust-config`, which allows this code to run."""
    config = json.loads((root / CONFIG).read_bytes())
    if trusted:
        places = config.pop(WRITTEN_BY, {}).get("environment", {})
    else:
        places = {}
    schema = SftConfig if command_of(root) == "sft" else Config
    if trusted and named_code(config, keys_of(schema)):
        trust = [FLAG]
    else:
        trust = []
    words = ["uv", "run", command_of(root), "@", str(root / CONFIG), *trust, *flags]
    return " ".join([*(f"{name}={shlex.quote(places[name])}" for name in PLACES if name in places), shlex.join(words)])


def resume_command(root: Path, longer: int | None = None, *, trusted: bool = False) -> str:
    """Returns the shell command that resumes the run in `root`, up to step `longer` if given. `trusted`: as in
    `rerun_command`."""
    steps = ["--max-steps", str(longer)] if longer else []
    output_dir = json.loads((root / CONFIG).read_bytes()).get("run", {}).get("output_dir", "")
    directory = ("--run.local-dir" if is_url(output_dir) else "--run.output-dir", str(root.parent))
    place = (*directory, "--run.name", root.name)
    return rerun_command(root, *place, "--resume", *steps, trusted=trusted)


def _written_by() -> dict[str, object]:
    """Returns what config.json records about its writer: trireme's version, and the environment variables in PLACES."""
    places = {name: os.environ[name] for name in PLACES if name in os.environ}
    paths = places.get("PYTHONPATH")
    if paths is not None:
        places["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep))
    return {"trireme": version("trireme"), "environment": places}


@dataclass(frozen=True)
class Start:
    """The start of an attempt: the number of this attempt, and the checkpoint and step from which it starts."""

    step: int
    checkpoint: Path | None  # None: from the beginning
    manifest: Manifest | None  # the checkpoint's
    attempt: int  # more than ever before in this run directory, and taken by no other driver
    notes: tuple[str, ...]  # for people
    run_id: str  # of HEAD


@dataclass(frozen=True)
class RunDir:
    """A run directory with its lock held by this process. Leaving the `with` block releases the lock."""

    root: Path
    lock: IO[str]  # the open lock file
    start: Start  # where this attempt starts
    mirror: Mirror | None = None  # of a run in object storage, which says who the driver is

    @classmethod
    def open(cls, config: CommonConfig, fixed: Mapping[str, object]) -> RunDir:
        """Opens the directory of a new run, a resumed run or a fork, as `config.resume` says. Locks it; finds and
        verifies the checkpoint to start from; writes HEAD (which claims the attempt), config.json and code.diff. With
        `--resume auto` the run is resumed if the directory has a HEAD, which shows that a run has begun there.

        `fixed`: nested dict of JSON values that must equal the values in the checkpoint, unless `--resume.force` is
        given. Files of earlier attempts do not change until `checkout`.

        Raises BadInput if the directory is in use by another run or driver, is not a run directory or cannot be
        written; if there is nothing to resume; or if the checkpoint does not verify or fit. Raises StorageFailed and
        CheckpointInvalid if the checkpoint of a fork cannot be made.
        """
        root, root_notes = _root(config)
        config = config.model_copy(update={"resume": config.resume.settled(begun=(root / HEAD).exists())})
        source = _source(config, fixed)
        with ExitStack() as ending, _writable(root):
            root.mkdir(parents=True, exist_ok=True)
            _refuse_foreign(root, config)
            lock = ending.enter_context(locked(root))
            start = _start(config, root, fixed, source)
            run = cls(root, lock, start)
            left_out = run._record_inputs()
            run = replace(run, start=replace(start, notes=(*root_notes, *start.notes, *left_out)))
            ending.pop_all()
        return run

    def next_attempt(self, config: CommonConfig, fixed: Mapping[str, object]) -> RunDir:
        """Starts the next attempt of this run, after a failure, from the newest checkpoint. Returns the run with the
        new start. Raises LockLost, and the errors of `open`."""
        self.store.check_owner()
        head = _begun(self.store)
        assert head is not None  # `open` wrote it
        with _writable(self.root):
            run = replace(self, start=_go_on(config, self.store, head, fixed, choose(self.store, None)))
            run._record_inputs()
        return run

    def checkout(self) -> list[str]:
        """Moves to `branches/` all checkpoints that are later than the start of this attempt, all metrics, trained
        problems and rollouts of later steps, and damaged checkpoints (`CheckpointStore.checkout`). Call it when all
        rooms have loaded the checkpoint, before metrics.jsonl or trained.jsonl is opened. Returns a report for people.
        Raises StorageFailed, LockLost."""
        return self.store.checkout(self.start.step)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.close()

    @cached_property
    def store(self) -> CheckpointStore:
        """The checkpoints of the run; a change raises LockLost once another driver or attempt has taken over."""
        fence = self.mirror.check if self.mirror else None
        return CheckpointStore(self.root, (self.start.run_id, self.start.attempt), fence)

    @property
    def logs(self) -> Path:
        """Directory of this attempt's log files."""
        return _logs(self.root, self.start.attempt)

    @property
    def nonce(self) -> Path:
        """A file that only this attempt has written. Other machines look for it to find out if they see the run
        directory."""
        return self.logs / HEAD

    @property
    def head(self) -> Head:
        """HEAD as the disk has it now: run, lineage and attempt. `checkout` to an earlier checkpoint changes the
        lineage."""
        head = self.store.head()
        assert head is not None  # `open` wrote it
        return head

    def _record_inputs(self) -> list[str]:
        """Writes code.diff, and copies it, config.json and HEAD to the logs of the attempt. Returns notes on how many
        secrets were left out."""
        code_diff = self.root / "code.diff"
        left_out = {CONFIG: (self.root / CONFIG).read_text().count(MASK), code_diff.name: _write_code_diff(code_diff)}
        for file in (self.root / CONFIG, code_diff, self.root / HEAD):
            if file.exists():
                shutil.copyfile(file, path_in(self.logs, file.name))
        return [f"{name} leaves out {n} values that look like secrets: {MASK}" for name, n in left_out.items() if n]


def _source(config: CommonConfig, fixed: Mapping[str, object]) -> VerifiedCheckpoint | None:
    """Returns the checkpoint that a fork (`--resume.dir`) starts from, checked against `fixed`; None if this is no
    fork. Raises BadInput."""
    if config.resume.dir is None:
        return None
    store = CheckpointStore(Path(config.resume.dir).expanduser().absolute())
    chosen = choose_existing(store, config.resume.step, "--resume.step", "--resume.dir alone")
    return replace(chosen, notes=(*chosen.notes, *check_fixed(chosen, fixed, config.resume.force)))


def named_root(config: CommonConfig) -> Path | None:
    """Returns the run directory that the configuration names; None if it has to be searched for or gets a new name."""
    if config.run.name:
        return _output_dir(config) / config.run.name
    return None


def _output_dir(config: CommonConfig) -> Path:
    return Path(config.run.directory).expanduser().absolute()


def _root(config: CommonConfig) -> tuple[Path, tuple[str, ...]]:
    """Returns (the run directory, notes for people). If the directory had to be searched for, a note names it. Raises
    BadInput."""
    root = named_root(config)
    if root:
        return root, ()
    if config.resume.requested and config.resume.dir is None:
        root = _latest_run(_output_dir(config), config.default_name(""))
        return root, (f"--resume without --run.name: the newest run is {root}",)
    return path_in(_output_dir(config), config.default_name(secrets.token_hex(4))), ()


def _latest_run(output_dir: Path, prefix: str) -> Path:
    """Returns the run directory in `output_dir` that was started last. Considers only directories whose names are
    `prefix` and 8 hex digits. Raises BadInput if there is none. (Compares times of files, because nothing else orders
    different runs.)"""
    name = re.compile(re.escape(prefix) + "[0-9a-f]{8}")
    configs = [file for file in output_dir.glob(f"*/{CONFIG}") if name.fullmatch(file.parent.name)]
    if not configs:
        raise Refusal(
            f"--resume without --run.name, and no run {prefix}<8 hex digits> in {output_dir}",
            "a run of this environment and model to continue",
            "say which with --run.name and --run.output-dir, or start a new one without --resume",
        )
    return max(configs, key=lambda file: file.stat().st_mtime_ns).parent


def _start(config: CommonConfig, root: Path, fixed: Mapping[str, object], source: VerifiedCheckpoint | None) -> Start:
    """Finds the checkpoint or step from which the attempt starts, and claims the attempt. `source`: the checkpoint to
    fork, if any. `fixed`: values that must equal the values in the checkpoint. Raises BadInput, OSError."""
    store = CheckpointStore(root)
    if source:
        return _fork(config, store, source)
    notes: tuple[str, ...] = ()
    if config.resume.requested:
        head = _begun(store)
        chosen = choose(store, config.resume.step)
        if head:
            return _go_on(config, store, head, fixed, chosen)
        notes = (f"{root} holds nothing to resume: a new run",)
    else:
        _clear(root, config.clean)
    head = _claim(config, store, Head.new())
    return Start(0, None, None, head.attempt, notes, head.run_id)


def _go_on(
    config: CommonConfig,
    store: CheckpointStore,
    head: Head,
    fixed: Mapping[str, object],
    chosen: VerifiedCheckpoint | None,
) -> Start:
    """Claims the attempt that follows the attempt in `head`. Returns its start: the checkpoint `chosen`, or step 0 if
    `chosen` is None. Raises BadInput if `fixed` differs from the checkpoint's values."""
    if chosen:
        notes = check_fixed(chosen, fixed, config.resume.force)
    else:
        notes = ()
    head = _claim(config, store, replace(head, attempt=head.attempt + 1))
    if chosen is None:
        notes = (f"{store.root} holds no checkpoint yet: it starts again at step 0",)
        return Start(0, None, None, head.attempt, notes, head.run_id)
    notes = (*chosen.notes, *notes, f"resumed from {chosen.path}, attempt {head.attempt}")
    return Start(chosen.manifest.step, chosen.path, chosen.manifest, head.attempt, notes, head.run_id)


def _logs(root: Path, attempt: int) -> Path:
    return root / "logs" / f"attempt_{attempt:d}"


def _claim(config: CommonConfig, store: CheckpointStore, head: Head) -> Head:
    """Claims a number for the attempt. Writes config.json first and HEAD last, because a directory counts as a run as
    soon as it has HEAD (`_begun`). Returns this HEAD. The number is the first free one from `head.attempt` on. The
    process that makes the attempt's log directory owns the number, even where file locks do not work."""
    # Without `clean` and `resume`: to run it again must not delete anything.
    resolved = config.model_dump(mode="json", exclude={"clean", "resume"}) | {WRITTEN_BY: _written_by()}
    replace_file(store.root / CONFIG, (to_json(redact_values(resolved), indent=2) + "\n").encode())
    while not _created(_logs(store.root, head.attempt)):
        head = replace(head, attempt=head.attempt + 1)
    store.write_head(head)
    return head


def _created(directory: Path) -> bool:
    """Makes `directory`. Returns False if it exists already. Raises OSError."""
    directory.parent.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir()
        return True
    return False


def _begun(store: CheckpointStore) -> Head | None:
    """Returns HEAD, or None if no run has begun in this directory. Raises BadInput if HEAD is damaged. Also raises
    BadInput if HEAD is missing although there are checkpoints or a file of metrics, as after an interrupted fork."""
    try:
        head = store.head()
        problem = f"{store.root / HEAD} is missing"
        if head or not (store.checkpoints() or (store.root / METRICS).exists()):
            return head
    except CheckpointInvalid as error:
        problem = str(error)
    raise Refusal(
        f"a run that cannot be resumed: {problem}",
        "a run with an undamaged file HEAD",
        "if a command with --resume.dir was interrupted while it made this run, repeat that command: it writes HEAD "
        f"last. Otherwise continue this run as a new one: --resume.dir {store.root} with another --run.name",
    )


def _fork(config: CommonConfig, store: CheckpointStore, source: VerifiedCheckpoint) -> Start:
    """Starts a new run in the directory of `store` from `source`, a checkpoint of another run. Completes an interrupted
    fork of the same checkpoint. Raises BadInput if the directory is in use."""
    step = source.manifest.step
    attempt = source.manifest.attempt + 1
    other_checkpoints = [checkpoint for checkpoint in store.checkpoints() if checkpoint != store.checkpoint(step)]
    if other_checkpoints or (store.root / HEAD).exists():
        raise _in_use(store.root, "continue it by --resume, without --resume.dir")
    forked, note = fork(source, store, attempt)
    head = _claim(config, store, Head.new(attempt, CheckpointRef(forked.manifest.lineage, step)))
    return Start(step, forked.path, forked.manifest, head.attempt, (*source.notes, note), head.run_id)


def _clear(root: Path, clean: bool) -> None:
    contents = _contents(root)
    if contents and not clean:
        raise _in_use(root, "continue it by --resume, or empty it with --clean")
    for entry in sorted(contents, key=lambda entry: entry.name in MARKS):  # marks last: it can be done again
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def _writable(root: Path) -> Iterator[None]:
    """A context manager that turns an OSError in its block into a BadInput that names `root`."""
    try:
        yield
    except OSError as error:
        raise Refusal(
            f"the run directory {root}: {error.strerror or error}",
            "a directory that can be made and written",
            "choose another --run.output-dir, make room, or correct its permissions",
        ) from None


def _contents(root: Path) -> list[Path]:
    return [entry for entry in root.iterdir() if entry.name not in BEFORE_MARKS]


def _in_use(root: Path, other_way: str) -> BadInput:
    problem = f"the run directory {root}, which is in use ({len(_contents(root))} entries)"
    do = f"choose another --run.name (without one a new name is made), or {other_way}"
    return Refusal(problem, "a new or an empty directory", do)


def _refuse_foreign(root: Path, config: CommonConfig) -> None:
    """Raises BadInput for a directory that holds files but is no run directory. Call it before a lock file is made
    there."""
    contents = _contents(root)
    if not contents or any((root / mark).exists() for mark in MARKS):
        return
    if not config.clean:
        raise _in_use(root, "another --run.output-dir")
    raise Refusal(
        f"--clean for {root}, which holds neither {' nor '.join(MARKS)}",
        "a run directory: nothing else is ever emptied",
        "choose another --run.name or --run.output-dir, or empty the directory yourself",
    )


def locked(root: Path) -> IO[str]:
    """Locks the run directory, and returns the open lock file, which names this process. The lock ends when the file is
    closed or this process ends. Raises BadInput if another process holds it."""
    lock = (root / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise Refusal(
            f"the run directory {root}, whose driver ({holder}) is running",
            "a directory that no living driver holds",
            "wait for that run or stop it, or choose another --run.name",
        ) from None
    lock.truncate(0)
    # The last word makes the text of each driver unique: in a container every driver may have the same pid.
    lock.write(f"pid {os.getpid()} on {os.uname().nodename}, start {secrets.token_hex(4)}\n")
    lock.flush()
    return lock


def _write_code_diff(file: Path) -> int:
    """Writes the id of the last git commit, and the differences of the checkout from it, to `file`, without secrets.
    Returns the number of secrets left out. Outside a git checkout writes no file and returns 0."""
    file.unlink(missing_ok=True)
    with suppress(FileNotFoundError, subprocess.CalledProcessError):  # no git, or no checkout
        head, diff = (
            subprocess.run(["git", *command, "HEAD"], capture_output=True, check=True).stdout
            for command in (["rev-parse"], ["diff"])
        )
        text = diff.decode(errors="surrogateescape")
        redacted = redact(text)
        file.write_bytes(b"checkpoint " + head + redacted.encode(errors="surrogateescape"))
        return redacted.count(MASK) - text.count(MASK)
    return 0
