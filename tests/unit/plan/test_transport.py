"""How weights travel where the configuration leaves it open."""

from dataclasses import replace

import pytest
from plan_support import cluster, inference, machines, plan, text_of

from trireme.plan.base import Plan
from trireme.plan.transport import choose_transport


def chosen(given: Plan) -> str:
    name, why = choose_transport(given.config, given.resources)
    assert bool(why) == (given.config.transport == "auto")
    resolved = given.resolved(given.config)
    assert resolved.transport == name
    return name


def of(transport: str, given: Plan) -> Plan:
    inference = given.config.inference.model_copy(update={"transport": transport})
    return replace(given, config=given.config.model_copy(update={"inference": inference}))


@pytest.mark.parametrize("transport", ["object_store", "broadcast"])
def test_what_is_configured_is_taken_everywhere(transport: str) -> None:
    for resources in (machines(), cluster(machines(), machines()), machines(gpus=8)):
        assert chosen(of(transport, plan(resources=resources))) == transport


def test_auto_tries_a_broadcast_between_machines_without_gpus() -> None:
    assert chosen(plan()) == "object_store"
    assert chosen(plan(resources=cluster(machines(), machines()))) == "auto"
    assert chosen(plan(resources=cluster(machines(gpus=8), machines(gpus=8)))) == "object_store"


def test_the_plan_says_why() -> None:
    one, two = plan(), plan(resources=cluster(machines(), machines()))
    assert "travel by object_store (on one machine the replicas map what the shards put there" in text_of(one)
    assert "travel by auto (the first version is broadcast, and so are all others if it arrives)" in text_of(two)
    assert "travel by object_store; " in text_of(of("object_store", one))


def test_with_auto_there_is_memory_for_either() -> None:
    given = plan(resources=cluster(machines(), machines()))
    found = {}
    for name in ("auto", "object_store", "broadcast"):
        needs = inference(of(name, given)).needs
        assert needs is not None
        found[name] = {*needs[0].host, *needs[0].shared}
    assert found["auto"] == found["object_store"] | found["broadcast"]
