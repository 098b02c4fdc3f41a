"""A run directory with all that the console shows: rows, a trace, STATUS, logs, rollouts, a store of sessions.

Texts of the model try to be scripts. The tokenizer is that of the model that ships with the repository.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from supervision_support import roster_of
from trace_support import CONFIG, begin, counter, end, row, span, write_trace

from service.console.run_reader import RunReader
from service.sessions.records import (
    FORMAT,
    AnswersDelivered,
    RewardGiven,
    SessionEnded,
    SessionOpened,
    SessionRecord,
    TurnAnswered,
    encode,
)
from service.sessions.tree import ROOT, SampledAnswer, TurnGiven
from service.store import Store
from trireme.checkpoint.rows import ROLLOUTS
from trireme.core.tokenizer import load_tokenizer
from trireme.core.types import VersionSpan, WeightIdentity
from trireme.run.rollout_records import write_records
from trireme.supervision.roster import PartHealth
from trireme.supervision.status import StatusWriter

MODEL = Path(__file__).parents[3] / "assets" / "sort-base"
ATTACK = '<script>document.title="owned"</script><img src=x onerror="document.title=\'owned\'">'
"""What a model may say. It must be seen as these letters."""
TOKENIZER = load_tokenizer(str(MODEL))
STEPS = 4


def encoded(text: str) -> list[int]:
    tokens: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return tokens


def reader_of(root: Path) -> RunReader:
    """Opens the run with the tokenizer of its model."""
    return RunReader(root, lambda: TOKENIZER)


def make_live_run(root: Path) -> Path:
    """A run of four steps, without a driver: a replica is dead, and a session is open."""
    root.mkdir(parents=True)
    settings = {"max_steps": 8, "model": {"name": str(MODEL), "dtype": "auto"}}
    (root / "config.json").write_text(json.dumps(CONFIG | settings))
    metrics = {
        "off_policy/token_mean": 0.5,
        "off_policy/mean": 1.0,
        "optim/kl_sample_train_v2": 1e-4,
        "time/optim": 0.1,
    }
    (root / "metrics.jsonl").write_text("".join(json.dumps(row(step) | metrics) + "\n" for step in range(STEPS)))
    (root / "trained.jsonl").write_text(
        "".join(
            json.dumps({"step": s, "groups": [{"floor": s}, {"floor": max(0, s - 1)}]}) + "\n" for s in range(STEPS)
        )
    )
    _write_traces(root)
    _write_status(root)
    logs = root / "logs" / "attempt_1"
    logs.mkdir(parents=True)
    (logs / "trainer_0.log").write_text(f"the trainer says\n{ATTACK}\n")
    (logs / "inference_0.log").write_text("".join(f"line {i}\n" for i in range(20_000)))
    for step in range(STEPS):
        write_records(root / ROLLOUTS, step, [record(step, "best"), record(step, "worst")])
    write_sessions(root / "sessions")
    return root


def _write_traces(root: Path) -> None:
    driver = [span("step", 0, 2 * s, 2 * s + 2, step=s) for s in range(STEPS)]
    for s in range(STEPS):
        driver += [span("wait_for_batch", 0, 2 * s, 2 * s + 1), span("forward_backward", 0, 2 * s + 1, 2 * s + 2)]
    write_trace(root, 1, "driver_0", ["main"], driver)
    write_trace(root, 1, "orchestrator_0", [], [e for s in range(STEPS) for e in (begin(s, 2 * s), end(s, 2 * s + 1))])
    sampling = [span("sampling", 0, 2 * s, 2 * s + 1, version=s) for s in range(STEPS)]
    write_trace(root, 1, "inference_0", ["sampling"], [*sampling, counter("sampling", 0.5, 8)])


def _write_status(root: Path) -> None:
    """Writes a STATUS of a run that goes on; its replica 1 is dead, of which a line tells."""
    roster = roster_of(PartHealth.HEALTHY, PartHealth.HEALTHY)
    roster.set("trainer_0", PartHealth.HEALTHY, pids=(300,), node="here")
    roster.at_step(STEPS)
    roster.set("inference_1", PartHealth.DEAD, "its engine was killed")
    with StatusWriter(root, roster):
        roster.note("inference_1", f"its engine was killed {ATTACK}")
    status = json.loads((root / "STATUS").read_text())
    (root / "STATUS").write_text(json.dumps(status | {"ended": None}))


def record(step: int, reason: str, answers: Sequence[str] = ("12", ATTACK)) -> str:
    """A group with a rollout for each answer; the last token is of the next version."""
    rollouts = []
    for text in answers:
        tokens = encoded(text)
        turn = {
            "continues": False,
            "observation": encoded("Sort: 21\n"),
            "observation_text": "Sort: 21\n",
            "action": tokens,
            "action_text": text,
            "logprobs": [-0.01 * 3**i if i < 6 else -0.5 for i in range(len(tokens))],
            "versions": [[step, len(tokens) - 1], [step + 1, 1]],
            "reward": 1.0,
            "metrics": {"exact": 1.0},
            "logs": {"said": ATTACK},
        }
        rollouts.append({"reward": 1.0, "stop_reason": "stop", "turns": [turn]})
    scores = [float(i == 0) for i in range(len(answers))]
    about = {"step": step, "why": reason, "problem": f"0/{step}{ATTACK}", "tags": ["sort"], "floor": step}
    return json.dumps(about | {"rewards": scores, "advantages": scores, "rollouts": rollouts})


def answer(text: str, version: int = 3) -> SampledAnswer:
    """An answer of which the last token is of the next version."""
    tokens = np.asarray(encoded(text), np.int32)
    logprobs = (-np.arange(len(tokens)) / 8).astype(np.float32)
    spans = (
        VersionSpan(WeightIdentity(1, version, "d"), 0, len(tokens) - 1),
        VersionSpan(WeightIdentity(1, version + 1, "e"), len(tokens) - 1, len(tokens)),
    )
    return SampledAnswer({"role": "assistant", "content": text}, tokens, logprobs, spans, "stop")


def turn(follows: int, prompt: str, *answers: SampledAnswer) -> TurnGiven:
    tokens = np.asarray(encoded(prompt), np.int32)
    return TurnGiven(follows, follows, ({"role": "user", "content": prompt},), (), tokens, answers)


def records_of(session: str) -> list[SessionRecord]:
    """A session with two answers to its first question, of which the first one is continued. Its nodes: prompt 0,
    answers 1 and 2, prompt 3, answer 4."""
    return [
        SessionOpened(session, 1000.0, 3, 1.0, problem=f"ticket {ATTACK}"),
        TurnAnswered(session, 1001.0, turn(ROOT, "Sort: 21", answer("12"), answer(ATTACK))),
        AnswersDelivered(session, 1002.0, (1,)),
        TurnAnswered(session, 1003.0, turn(1, "Again", answer("same"))),
        RewardGiven(session, 1004.0, 0.5, 4),
    ]


def write_sessions(directory: Path) -> Store:
    """A store with a session that is open and one that has ended, still open for more."""
    store = Store(directory, FORMAT)
    store.open()
    for record_of_session in (
        *records_of("open-one"),
        *records_of("ended-one"),
        SessionEnded("ended-one", 1005.0, "by its harness"),
    ):
        store.append(encode(record_of_session))
    return store
