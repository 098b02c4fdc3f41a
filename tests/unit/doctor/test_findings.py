"""Each planted fault is found, with its node, and nothing is found on a healthy cluster."""

from dataclasses import replace

import pytest
from doctor_support import EXPECTED, HEAD, MACHINE, NAMES, SECOND, THIRD, broken, changed, facts_of, healthy, problems

from trireme.doctor.examination import Expected
from trireme.doctor.finding import CLUSTER
from trireme.plan.memory import GIB

VERSIONS = facts_of(THIRD).versions
FULL = replace(MACHINE, free_bytes=GIB)
FILES = {"config.json": "1", "model.safetensors": "other"}
MANY_FILES = {f"model-{number}.safetensors": "1" for number in range(5)}

FAULTS = {
    "wrong package": (changed(THIRD, versions={**VERSIONS, "torch": "2.12.0"}), THIRD, "torch is 2.12.0", True),
    "wrong source": (changed(THIRD, versions={**VERSIONS, "source": "ff"}), THIRD, "copy of this project is ff", True),
    "wrong Python": (changed(THIRD, versions={**VERSIONS, "python": "3.11.9"}), THIRD, "python is 3.11.9", True),
    "patch of Python": (changed(THIRD, versions={**VERSIONS, "python": "3.12.9"}), THIRD, "python is 3.12.9", False),
    "wrong driver": (changed(THIRD, versions={**VERSIONS, "driver": "570.1"}), THIRD, "driver is 570.1", False),
    "fewer GPUs": (changed(THIRD, machine=replace(MACHINE, num_gpus=7)), THIRD, "the machine shows 7", True),
    "more GPUs": (changed(THIRD, machine=replace(MACHINE, num_gpus=9)), THIRD, "the machine shows 9", False),
    "little memory": (changed(THIRD, machine=FULL), THIRD, "1.00 GiB of 64.00 GiB of memory", False),
    "small /dev/shm": (changed(THIRD, machine=replace(MACHINE, shm_bytes=2**26)), THIRD, "/dev/shm has 0.06 GiB", True),
    "full /dev/shm": (changed(THIRD, shm_free=GIB // 2), THIRD, "of which 0.50 GiB are free", True),
    "store on disk": (changed(THIRD, machine=replace(MACHINE, shm_bytes=4 * GIB)), THIRD, "/dev/shm has 4.0", False),
    "blocked port": (broken(SECOND, THIRD, 20000), SECOND, f"not reach {THIRD} at {THIRD}:20000 (timed out)", True),
    "one-way link": (broken(SECOND, THIRD), SECOND, f"although {THIRD} reaches {SECOND}", True),
    "slow link": (replace(healthy(), rates={THIRD: 2e6}), SECOND, f"16 Mbit/s to {THIRD}", False),
    "slow for the weights": (replace(healthy(), rates={THIRD: 5e7}), SECOND, "on the wire for 21.5 s", False),
    "run directory": (changed(THIRD, shares_run_directory=False), THIRD, "does not see the file that the", True),
    "missing model": (changed(THIRD, model=None), THIRD, "it has no model /models/base", True),
    "another model": (changed(THIRD, model=FILES), THIRD, "files of the model differ: model.safetensors", True),
    "very different model": (changed(THIRD, model=MANY_FILES), THIRD, "model-1.safetensors and 4 more", True),
    "silent node": (replace(healthy(), silent={THIRD: "it did not answer"}), THIRD, "it did not answer", True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_nothing_else(fault: str) -> None:
    examination, node, text, fatal = FAULTS[fault]
    (finding,) = problems(examination)
    assert (finding.node, finding.fatal) == (node, fatal)
    assert text in finding.actual
    assert finding.expected
    assert node in finding.do, "where to type it"
    assert text in str(finding.refusal())
    assert text in finding.line()


def test_nothing_is_found_on_a_healthy_cluster() -> None:
    assert problems(healthy()) == []
    assert problems(healthy(), Expected()) == []
    assert problems(healthy(), replace(EXPECTED, nodes=[*NAMES[:2], "host-10.0.0.3"])) == []
    assert problems(changed(SECOND, shares_run_directory=False)) == [], "it has no writer"
    head_without_gpu = replace(healthy().driver, versions={**VERSIONS, "driver": ""})
    assert problems(replace(healthy(), driver=head_without_gpu)) == []


def test_plans_that_do_not_fit_and_missing_nodes_are_errors() -> None:
    (finding,) = problems(healthy(), replace(EXPECTED, refusal="given: 32 GPUs"))
    assert (finding.node, finding.fatal, finding.actual) == (CLUSTER, True, "given: 32 GPUs")
    both = changed(HEAD, machine=FULL, model=None)
    assert [finding.fatal for finding in problems(both)] == [True, False]
    cluster = healthy()
    lost = replace(cluster, nodes=[*cluster.nodes[:2], replace(cluster.nodes[2], alive=False)])
    lost = replace(lost, facts={name: lost.facts[name] for name in NAMES[:2]})
    result = problems(lost, replace(EXPECTED, nodes=[*NAMES, "gpu-7"]))
    assert [(finding.node, finding.check, finding.fatal) for finding in result] == [
        (THIRD, "missing node", True),
        ("gpu-7", "missing node", True),
    ]
    assert "ray start --address=10.0.0.1:6379" in result[1].do


def test_files_of_a_model_of_the_hub_may_be_missing_but_not_differ() -> None:
    on_the_hub = replace(EXPECTED, model="org/base")
    model = facts_of(HEAD).model
    part = changed(THIRD, model={"config.json": model["config.json"]})
    assert problems(part, on_the_hub) == []
    assert [finding.fatal for finding in problems(part)] == [True], "a directory is not completed"
    (finding,) = problems(changed(THIRD, model={"config.json": "another"}), on_the_hub)
    assert (finding.node, finding.fatal) == (THIRD, True)
    assert finding.actual == "files of the model differ: config.json"
    assert [finding.fatal for finding in problems(changed(THIRD, model=None), on_the_hub)] == [False]
    assert [finding.fatal for finding in problems(changed(THIRD, model=None, offline=True), on_the_hub)] == [True]
    without = replace(changed(THIRD), driver=replace(facts_of(HEAD), model=None))
    assert problems(without, on_the_hub) == [], "the driver has nothing to compare with"


def test_a_link_that_is_broken_both_ways_or_at_a_port_of_the_kernel() -> None:
    pairs = zip(broken(SECOND, THIRD).links, broken(THIRD, SECOND).links, strict=True)
    links = [link if link.error else back for link, back in pairs]
    result = problems(replace(healthy(), links=links))
    assert [(finding.node, finding.check) for finding in result] == [(SECOND, "link"), (THIRD, "link")]
    assert "nor the other way" in result[0].actual
    (finding,) = problems(broken(SECOND, THIRD, 40001))
    assert 'net.ipv4.ip_local_port_range="20000 20999"' in finding.do
    (finding,) = problems(broken(SECOND, THIRD, 20000))
    assert "sysctl" not in finding.do
