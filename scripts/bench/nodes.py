"""Measures what several nodes cost: namespaces on this machine, each with its own raylet, files and network.

    python scripts/bench/nodes.py [--repeats 3] [--mbit 200]

1. Seconds from the command to the first completed step on 1, 2 and 3 nodes with two shards and two replicas in total,
   over the same in a Ray cluster of one node without namespaces, alternately. The nodes share the cores of this
   machine, have no common directory, and only the head has the model. Every home is empty at first: a replica would
   start seconds sooner where vLLM has kept what it learned about a model's class. Target: at most 1.3 times.
2. Bytes of the model that the head has sent to each node. Target: its size, once to each other node.
3. Seconds in which a commit is gathered from a node behind a wire of `--mbit`, over its bytes at the rate that the
   check before the run has measured. Target: at most 1.3 times.

The model is a random one of 20 million parameters. It needs root and iproute2. The last line of the output is the
result as one JSON object, whose `holds` says whether all three targets are met. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import DEADLINE_S, ROOT, Result, failed, median, stop, wait_for_row

sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from cluster_support import cluster_of_one
from namespaces import fabric, not_possible

from trireme.tools.timeline import json_lines

TARGET = 1.3
CPUS = 6
"""Logical CPUs that all nodes together give to Ray: one for each of five actors, and one more."""
COUNTS = (1, 2, 3)
SHM_MB, STORE_MB = 1500, 600
"""Of each node: room for two versions of the weights, which one machine has too."""
STEPS = 3
CONFIG = ROOT / "configs" / "quickstart.toml"
SIZES = ["--trainer.shards", "2", "--inference.replicas", "2"]
SMALL_BATCH = ["--orchestrator.batch-size", "4", "--orchestrator.group-size", "2"]
SENT = re.compile(r"([\d,.]+) MB to ([\d.]+)")
RATE = re.compile(r" sends ([\d,]+) Mbit/s to the slowest")


@dataclass(frozen=True)
class Run:
    """One run: seconds to its first step, what its terminal showed as one line, and its directory."""

    first_step_s: float
    shown: str
    root: Path


def make_model(directory: Path) -> int:
    """Writes a random model in bfloat16 with the tokenizer of the shipped one. Returns the bytes of all files."""
    code = (
        "import sys, torch; from transformers import AutoConfig, AutoModelForCausalLM as M\n"
        "c = AutoConfig.for_model('qwen3', hidden_size=256, intermediate_size=768, num_hidden_layers=12, "
        "num_attention_heads=4, num_key_value_heads=4, head_dim=64, vocab_size=32000, tie_word_embeddings=True)\n"
        "M.from_config(c, dtype=torch.bfloat16).save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, timeout=DEADLINE_S)
    for file in (ROOT / "assets" / "sort-base").glob("tokenizer*"):
        shutil.copy(file, directory)
    return sum(file.stat().st_size for file in directory.iterdir())


def command(address: str, directory: Path, flags: Sequence[str]) -> list[str]:
    """Returns the command of a run in the cluster at `address`."""
    place = ["--run.output-dir", str(directory / "outputs"), "--run.name", "run", "--cluster.address", address]
    model = ["--model.name", str(directory / "model")]
    return [sys.executable, "-m", "trireme.cli.rl", "@", str(CONFIG), *place, *model, *SIZES, *SMALL_BATCH, *flags]


def follow(process: subprocess.Popen[bytes], since: float, directory: Path, log: Path) -> Run:
    """Waits for the first step and for the end of a run that was started at `since`."""
    deadline = time.monotonic() + DEADLINE_S
    root = directory / "outputs" / "run"
    try:
        row = wait_for_row(process, root / "metrics.jsonl", 0, log, deadline)
        code = process.wait(max(deadline - time.monotonic(), 1.0))
    finally:
        stop(process)
    if code:
        raise failed(["rl"], f"ended with exit code {code}", log)
    return Run(row["time/unix"] - since, " ".join(log.read_text().split()), root)


def on_this_machine(directory: Path, flags: Sequence[str]) -> Run:
    """Measures a run in a cluster of one node without namespaces."""
    log, home = directory / "output.txt", {"HOME": str(directory / "home")}
    (directory / "home").mkdir()
    with cluster_of_one(CPUS, home) as cluster, log.open("wb") as output:
        since = time.time()
        asked, environ = command(cluster.address, directory, flags), {**os.environ, **home}
        process = subprocess.Popen(asked, cwd=ROOT, env=environ, stdout=output, stderr=output)
        return follow(process, since, directory, log)


def on_nodes(directory: Path, cpus: Sequence[int], flags: Sequence[str], mbit: float = 0.0) -> Run:
    """Measures a run on nodes with so many CPUs each, whose wires have `mbit` if that is not 0. The nodes but the head
    have an empty directory in place of the model, and a disk of their own in place of that of the runs."""
    log = directory / "output.txt"
    for name in ("nothing", "outputs", *(f"disk_{n}" for n in range(len(cpus)))):
        (directory / name).mkdir()
    with fabric(len(cpus), [directory], shm_mb=SHM_MB) as net, log.open("wb") as output:
        for number, node in enumerate(net.nodes):
            if number:
                mount(node.run, directory / "nothing", directory / "model")
                mount(node.run, directory / f"disk_{number}", directory / "outputs")
            if mbit:
                node.limit(mbit)
            net.start_node(node, cpus[number], STORE_MB)
        net.await_nodes(len(cpus))
        asked = net.nodes[0].inside(*command(net.ray_address, directory, flags))
        since = time.time()
        process = subprocess.Popen(asked, env=dict(net.nodes[0].environ), stdout=output, stderr=output)
        return follow(process, since, directory, log)


def mount(run: Any, source: Path, place: Path) -> None:
    """Mounts `source` at `place` inside a node, whose `run` is given."""
    done = run("mount", "--bind", str(source), str(place))
    if done.returncode:
        raise RuntimeError(f"mount --bind {source} {place} in a node failed: {done.stderr.strip()}")


def sent(shown: str) -> dict[str, float]:
    """Returns the megabytes of the model that a run has sent, by node."""
    text = shown.partition("files of the model were sent: ")[2].partition("rooms on")[0]
    return {node: float(size.replace(",", "")) for size, node in SENT.findall(text)}


def gathered(run: Run) -> dict[str, float]:
    """Returns bytes and seconds of the slowest commit that was gathered, and the seconds for its bytes at the rate that
    was measured before the run."""
    rate = RATE.search(run.shown)
    spans = [e for e in json_lines(run.root / "trace" / "attempt_1" / "driver_0.json") if e["name"] == "gather"]
    if rate is None or not spans:
        raise RuntimeError(f"the run has gathered {len(spans)} commits; it showed: {run.shown[-2000:]}")
    bytes_per_s = float(rate[1].replace(",", "")) * 1e6 / 8
    slowest = max(spans, key=lambda each: each["dur"])
    size, took = slowest["args"]["bytes"], slowest["dur"] / 1e6
    return {
        "commits": len(spans),
        "mb": round(size / 1e6, 1),
        "seconds": round(took, 2),
        "wire_mbit_measured": round(8e-6 * bytes_per_s),
        "at_the_wires_rate_s": round(size / bytes_per_s, 2),
        "ratio": round(took / (size / bytes_per_s), 3),
    }


def measure(model: Path, nodes: int, flags: Sequence[str]) -> Run:
    """Measures a run on so many nodes; 0 is this machine without namespaces. Prints it."""
    with ExitStack() as ending:
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        shutil.copytree(model, directory / "model")
        run = on_nodes(directory, [CPUS // nodes] * nodes, flags) if nodes else on_this_machine(directory, flags)
    where = f"{nodes} namespaces" if nodes else "one machine"
    print(f"{where}: first step after {run.first_step_s:.1f} s; model sent: {sent(run.shown) or 'not'}", flush=True)
    return run


def gather(model: Path, mbit: float) -> Mapping[str, float]:
    """Measures the gathering of commits whose parts are all written on a node that is not the driver's."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        shutil.copytree(model, directory / "model")
        found = gathered(on_nodes(directory, [0, CPUS], ["--max-steps", str(STEPS), "--checkpoint.every", "1"], mbit))
    print(f"gathering: {found}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds (default: 3)")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of the wire of the commits (default: 200)")
    args = parser.parse_args()
    if args.repeats < 1 or args.mbit <= 0:
        parser.error(f"--repeats {args.repeats} --mbit {args.mbit:g}: expected at least 1, and more than 0")
    if why := not_possible():
        sys.exit(why)
    os.environ["RAY_AUTH_MODE"] = "disabled"  # as in the namespaces, which nothing outside reaches
    load = round(os.getloadavg()[0], 2)
    first: dict[int, list[float]] = {nodes: [] for nodes in (0, *COUNTS)}
    model_sent: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-model-") as name:
        size = make_model(Path(name) / "model")
        for _ in range(args.repeats):
            for nodes in first:
                run = measure(Path(name) / "model", nodes, ["--max-steps", "1", "--checkpoint.every", "0"])
                first[nodes].append(round(run.first_step_s, 2))
                if nodes == COUNTS[-1]:
                    model_sent = sent(run.shown)
        commits = gather(Path(name) / "model", args.mbit)
    alone = median(first[0])
    ratios = {nodes: round(median(first[nodes]) / alone, 3) for nodes in COUNTS}
    once = len(model_sent) == COUNTS[-1] - 1 and all(abs(mb - size / 1e6) < 0.1 for mb in model_sent.values())
    ratio = max(ratios.values())
    Result(
        name="nodes",
        value=median(first[COUNTS[-1]]),
        unit=f"s to the first step on {COUNTS[-1]} nodes",
        ratio=ratio,
        target=TARGET,
        holds=ratio <= TARGET and once and commits["ratio"] <= TARGET,
        against="the same shards and replicas on one machine without namespaces; the largest of the ratios",
        detail={
            "load_before": load,
            "first_step_s": {str(nodes or "one machine"): seconds for nodes, seconds in first.items()},
            "ratios": ratios,
            "model_mb": round(size / 1e6, 1),
            "model_mb_sent": model_sent,
            "model_sent_once": once,
            "gathering": commits,
        },
    ).print()


if __name__ == "__main__":
    main()
