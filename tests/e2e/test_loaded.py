"""Which check finds which fault between a trainer's weights and a replica's logits: the table of docs/concepts.md."""

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from inference_support import MAX_MODEL_LEN, Room, prompt_of, publish, random_model, request, start_rooms
from transformers import AutoModelForCausalLM

from inference.loaded import LoadedProof
from trireme.core.errors import WeightsRefused
from trireme.process.waits import get

ROOT = Path(__file__).parents[2]
STEP = 1e-6
CHECKS = {
    "arrived": r"arrived with hash",
    "loaded": r"the engine has loaded",
    "canary": r"canary of version \d+: the replica's logprobs",
    "decoded": r"canary of version \d+: logprobs of 4 tokens in decode steps",
}
TOLERANCE = 1e-4
TRIES = ((True, True), (False, False), (True, False), (False, True))
"""Whether a fault comes with an engine's first version, and whether what is loaded is compared."""


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    kind: str
    engine: str
    point: str
    action: str
    cells: tuple[str, str, str, str]
    """What the checks say, in their order; one that is not reached says nothing."""


UNNOTICED = ("agrees", "refuses", "agrees", "agrees")
"""By all but one."""
FAULTS = (
    Fault("a byte changes on the way", "experts", "received", "corrupt", ("refuses", "", "", "")),
    Fault("a norm is not loaded, after a small step", "shipped", "load", "skip_norm", UNNOTICED),
    Fault("the output matrix is not loaded", "experts", "load", "skip_head", ("agrees", "refuses", "refuses", "")),
    Fault("two experts that no token of the canary chooses are swapped", "experts", "load", "swap_experts", UNNOTICED),
    Fault("a weight changes after it was loaded", "shipped", "loaded", "corrupt", ("agrees", "refuses", "refuses", "")),
    # When vLLM packs them itself, the experts' part of `inference.worker.load_weights` can go.
    Fault("experts are not packed again, on CPUs", "experts", "repack", "skip", ("agrees", "agrees", "refuses", "")),
    Fault(
        "steps of one token use the previous embedding, as a stale CUDA graph would",
        "experts",
        "decode",
        "stale",
        ("agrees", "agrees", "agrees", "refuses"),
    ),
)


def model_of(kind: str, seed: int) -> Any:
    """The shipped model and a little more, or random weights whose first experts no token chooses."""
    if kind == "shipped":
        torch.manual_seed(seed)
        base = ROOT / "assets" / "sort-base"
        model = AutoModelForCausalLM.from_pretrained(base, max_position_embeddings=MAX_MODEL_LEN).float().eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape), alpha=STEP)
        return model
    model = random_model("qwen3_moe", False, seed)
    router = model.model.layers[0].mlp.gate.weight.data  # [experts, hidden]; each token takes two
    router[:2] = 0.0
    router[3], router[5] = -router[2], -router[4]  # two of these four are above zero
    return model


def tried(engine: str) -> list[tuple[Fault, bool, bool]]:
    """All updates of an engine with a fault; before each is one without. Bytes that changed are not loaded."""
    faults = sorted((fault for fault in FAULTS if fault.engine == engine), key=lambda fault: fault.point == "received")
    return [(fault, *change) for fault in faults for change in TRIES]


def planted(engine: str) -> str:
    """The list of the engine's fault points."""
    numbers = enumerate(tried(engine))
    return ",".join(f"inference.{fault.point}@{2 * n + 2}={fault.action}" for n, (fault, _, _) in numbers)


async def refusal(room: Room, kind: str) -> str:
    """Publishes the next version to the engine, whatever it refused before; returns the check that refuses it."""
    room.router = room.group.router_factory(room.group.replica_set())()
    version = len(room.models)
    room.models[version] = model_of(kind, seed=version + 1)
    try:
        await room.router.source.update(publish(room.models[version], version))
    except WeightsRefused as refused:
        print(kind, version, refused)
        (check,) = (name for name, pattern in CHECKS.items() if re.search(pattern, str(refused)))
        return check
    return ""


def prepare(room: Room, at_first: bool, compared: bool) -> None:
    """Forgets what the replica refused, and what it knows of its loaders if the next version is to be the first."""

    def forget(replica: Any) -> None:
        replica.broken = None
        replica.decode_proofs = 0
        vars(replica.proof).pop("check", None)
        if at_first:
            replica.proof = LoadedProof(replica.name)
        if not compared:
            replica.proof.check = lambda manifest, answers: None

    get(room.group.replicas[0].__ray_call__.remote(forget), owner="replica", timeout_s=60)


async def outcomes(room: Room, kind: str) -> dict[tuple[Fault, bool, bool], str]:
    checks, prompt = {}, prompt_of(20)
    for number, item in enumerate(tried(kind)):
        prepare(room, at_first=True, compared=True)
        assert await refusal(room, kind) == "", "without fault"
        answer = await room.router.sample(request(f"sampled {number}", prompt, 24))
        assert room.difference(prompt, answer) < TOLERANCE
        prepare(room, *item[1:])
        checks[item] = await refusal(room, kind)
    return checks


@pytest.mark.long
def test_each_fault_is_found_by_the_checks_of_the_table(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In between the same engine takes new weights without fault, and samples from them."""
    kinds = {fault.engine: (fault.engine, False) for fault in FAULTS}
    with monkeypatch.context() as patched:
        patched.setattr("inference_support.random_model", lambda family, tied, seed: model_of(family, seed))
        rooms = start_rooms(kinds, set(), {kind: planted(kind) for kind in kinds}, tmp_path)
    checks_by_fault: dict[tuple[Fault, bool, bool], str] = {}
    try:
        for kind, room in rooms.items():
            checks_by_fault |= asyncio.run(outcomes(room, kind))
    finally:
        for room in rooms.values():
            room.group.stop()
    for fault in FAULTS:
        for at_first, compared in TRIES:
            says = dict(zip(CHECKS, fault.cells, strict=True)) | ({} if compared else {"loaded": "agrees"})
            expected = next((check for check, action in says.items() if action == "refuses"), "")
            assert checks_by_fault[fault, at_first, compared] == expected, (fault.kind, at_first, compared)


def test_the_table_is_in_the_docs() -> None:
    rows = [" | ".join(["", fault.kind, *fault.cells, ""]).strip() for fault in FAULTS]
    assert "\n".join(rows) in (ROOT / "docs" / "concepts.md").read_text()
