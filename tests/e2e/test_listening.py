"""Processes of a run on one machine listen where others cannot reach them, and write no secret that they are given."""

import os
import time
from pathlib import Path

import psutil
from other_user import as_another_user, reached
from run_support import DEADLINE_S, QUICKSTART, TINY, Running, marked_processes


def listening(pids) -> dict[str, set[str]]:
    """Addresses at which processes listen, with what they are."""
    found: dict[str, set[str]] = {}
    for pid, command in pids.items():
        try:
            sockets = psutil.Process(pid).net_connections("inet")
        except psutil.Error:  # it ended while we looked
            continue
        for each in sockets:
            if each.status == psutil.CONN_LISTEN or (each.type.name == "SOCK_DGRAM" and not each.raddr):
                found.setdefault(each.laddr.ip, set()).add(command.split(" ")[0] + " " + command[-60:])
    return found


def test_a_run_on_one_machine_listens_on_loopback_alone_and_keeps_secrets(tmp_path: Path) -> None:
    """Ray's services and metrics, the trainer's store, gloo, and engines; logs, trace, records and commits. Another
    user reaches none of its sockets and temporary files."""
    planted = {"WANDB_API_KEY": "0123456789" * 4, "ANSWERER_PASSWORD": "correct horse", "HF_TOKEN": "hf_" + "aB3" * 12}
    argument = "hf_" + "cD4" * 12
    place = ("--run.output-dir", str(tmp_path), "--run.name", "r", "--cluster.device", "cpu")
    flags = ("@", str(QUICKSTART), *TINY, *place, "--trainer.shards", "2", "--max-steps", "1000")
    flags = (*flags, "--inference.engine-args.hf-token", argument)
    run = Running.start(*flags, out=(tmp_path / "out").open("w"), environ={"CUDA_VISIBLE_DEVICES": "", **planted})
    try:
        rows, deadline = tmp_path / "r" / "metrics.jsonl", time.monotonic() + DEADLINE_S
        while not rows.exists() or not rows.read_text():
            assert run.process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.5)
        found = listening(marked_processes(run.mark))
        run.temporary.chmod(0o1777)  # as the machine's own is
        (private,) = run.temporary.glob("trireme-*")
        paths = [private, *private.rglob("*")]
        assert any(path.name == "plasma_store" for path in paths)
        if os.geteuid() == 0:  # else nobody else can be played
            assert as_another_user(lambda: reached(paths)) == ""
    finally:
        run.kill_tree()
        run.files_left()
    written = {file: file.read_bytes() for file in (tmp_path / "r").rglob("*") if file.is_file()}
    assert any(file.suffix == ".log" for file in written)
    secrets = [secret.encode() for secret in (*planted.values(), argument)]
    assert [str(file) for file, contents in written.items() if any(secret in contents for secret in secrets)] == []
    assert len(found) > 0, "Ray listens somewhere"
    assert set(found) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, found
