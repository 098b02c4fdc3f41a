"""Each planted fault is found, with its node, and nothing is found on a healthy cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doctor_support import EXPECTED, HEAD, MACHINE, NAMES, SECOND, THIRD, broken, changed, facts_of, found, healthy

from trireme.doctor.examination import ClockOffset, Examination, Expected
from trireme.doctor.finding import CLUSTER
from trireme.doctor.report import model_line
from trireme.plan.memory import GIB

VERSIONS = facts_of(THIRD).versions
SLOW = replace(healthy(), rates={**healthy().rates, (SECOND, THIRD): 2e6})
SLOWER_THAN_OTHERS = replace(healthy(), rates={**healthy().rates, (SECOND, THIRD): 1e8 / 1.1})
SLOW_CLOCK = replace(healthy(), clocks={**healthy().clocks, THIRD: ClockOffset(-60.0, 0.01)})
FILES = {"config.json": "1", "model.safetensors": "other"}
ROUTES = {HEAD: "eth0", SECOND: "eth0", THIRD: "lo"}
DOCKER = {"lo": ["127.0.0.1"], "docker0": [THIRD], "eth0": ["192.168.0.3", "fe80::1"]}

FAULTS = {
    "wrong package": (changed(THIRD, versions={**VERSIONS, "torch": "2.12.0"}), THIRD, "torch is 2.12.0", True),
    "wrong source": (changed(THIRD, versions={**VERSIONS, "source": "ff"}), THIRD, "copy of this project is ff", True),
    "wrong Python": (changed(THIRD, versions={**VERSIONS, "python": "3.11.9"}), THIRD, "python is 3.11.9", True),
    "patch of Python": (changed(THIRD, versions={**VERSIONS, "python": "3.12.9"}), THIRD, "python is 3.12.9", False),
    "wrong driver": (changed(THIRD, versions={**VERSIONS, "driver": "570.1"}), THIRD, "driver is 570.1", False),
    "fewer GPUs": (changed(THIRD, machine=replace(MACHINE, num_gpus=7)), THIRD, "the machine shows 7", True),
    "more GPUs": (changed(THIRD, machine=replace(MACHINE, num_gpus=9)), THIRD, "the machine shows 9", False),
    "little memory": (changed(THIRD, available_bytes=GIB), THIRD, "1.00 GiB of 64.00 GiB of memory", False),
    "blocked port": (broken(SECOND, THIRD, 20000), SECOND, f"does not reach {THIRD} at {THIRD}:20000 (", True),
    "blocked kernel ports": (broken(SECOND, THIRD, 40001), SECOND, f"does not reach {THIRD} at {THIRD}:40001", True),
    "one-way link": (broken(SECOND, THIRD), SECOND, f"although {THIRD} reaches {SECOND}", True),
    "slow link": (SLOW, SECOND, f"16 Mbit/s to {THIRD}", False),
    "slower than others": (SLOWER_THAN_OTHERS, SECOND, f"727 Mbit/s to {THIRD}", False),
    "full disk": (changed(THIRD, disk_free=GIB), THIRD, "1.00 GiB are free where run.output_dir", True),
    "disk for few commits": (changed(THIRD, disk_free=9 * GIB), THIRD, "9.00 GiB are free where", False),
    "small /dev/shm": (changed(THIRD, machine=replace(MACHINE, shm_bytes=2**26)), THIRD, "/dev/shm has 0.06 GiB", True),
    "full /dev/shm": (changed(THIRD, shm_free=GIB // 2), THIRD, "of which 0.50 GiB are free", True),
    "store on disk": (changed(THIRD, machine=replace(MACHINE, shm_bytes=4 * GIB)), THIRD, "/dev/shm has 4.0", False),
    "clock": (SLOW_CLOCK, THIRD, "its clock is 60.0 s behind", False),
    "unshared directory": (changed(THIRD, nonce_seen=""), THIRD, "does not see what the command wrote", False),
    "one-way directory": (replace(healthy(), unseen=[SECOND]), SECOND, "wrote a file that the command does", False),
    "missing model": (changed(THIRD, model=None), THIRD, "it has no model /models/base", True),
    "another model": (changed(THIRD, model=FILES), THIRD, "files of the model differ: model.safetensors", True),
    "too few open files": (changed(THIRD, open_files=1000), THIRD, "may open 1,000 files", True),
    "few open files": (changed(THIRD, open_files=4096), THIRD, "may open 4,096 files", False),
    "few processes": (changed(THIRD, processes=100), THIRD, "100 more processes", False),
    "wrong interface first": (changed(THIRD, interfaces=DOCKER), THIRD, "reaches the head 10.0.0.1 by eth0 (192", True),
    "interface of gloo": (changed(THIRD, chosen={"GLOO_SOCKET_IFNAME": "docker0"}), THIRD, "= docker0, but", False),
    "interface of NCCL": (changed(THIRD, chosen={"NCCL_SOCKET_IFNAME": "=eth"}), THIRD, "= =eth, but", False),
    "variable": (changed(THIRD, variables={"HF_TOKEN": "(secret, digest 12)"}), THIRD, "HF_HOME is not set", False),
    "job stop": (changed(HEAD, stop_wait_s=3), HEAD, "`ray job stop` kills after 3 s", False),
    "busy ports": (replace(healthy(), cannot_listen={THIRD: ["no port of"]}), THIRD, "no port of", True),
    "silent node": (replace(healthy(), silent={THIRD: "it did not answer"}), THIRD, "it did not answer", True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_nothing_else(fault: str) -> None:
    examination, node, text, fatal = FAULTS[fault]
    (finding,) = found(examination)
    assert (finding.node, finding.fatal) == (node, fatal)
    assert text in finding.found
    assert finding.expected
    assert node in finding.do or node == SECOND, "where to type it"
    assert text in str(finding.refusal())
    assert text in finding.line()


def test_a_full_disk_of_a_node_that_does_not_share_the_directory_stops_no_run() -> None:
    disk, directory = found(changed(THIRD, disk_free=GIB, nonce_seen=""))
    assert (disk.check, disk.node, disk.fatal) == ("disk", THIRD, False)
    assert directory.check == "unshared directory"


def test_a_plan_that_does_not_fit_is_an_error() -> None:
    (finding,) = found(healthy(), replace(EXPECTED, refusal="given: 32 GPUs"))
    assert (finding.node, finding.fatal, finding.found) == (CLUSTER, True, "given: 32 GPUs")


def test_a_secret_is_nothing_to_export() -> None:
    variables = facts_of(THIRD).variables
    (finding,) = found(changed(THIRD, variables={**variables, "HF_TOKEN": "(secret, digest 34)"}))
    assert "digest" not in finding.do


def test_nothing_is_found_on_a_healthy_cluster() -> None:
    assert found(healthy()) == []
    assert found(healthy(), Expected()) == []
    assert found(healthy(), replace(EXPECTED, nodes=[*NAMES[:2], "host-10.0.0.3"], count=3)) == []


def test_nodes_that_never_joined_are_named() -> None:
    wanted = replace(EXPECTED, nodes=[*NAMES, "gpu-7"])
    (finding,) = found(healthy(), wanted)
    assert (finding.node, finding.check, finding.fatal) == ("gpu-7", "missing node", True)
    assert "ray start --address=10.0.0.1:6379" in finding.do


def test_a_lost_node_is_named_where_only_a_number_is_expected() -> None:
    good = healthy()
    lost = replace(good, nodes=[*good.nodes[:2], replace(good.nodes[2], alive=False)])
    lost = replace(lost, facts={name: lost.facts[name] for name in NAMES[:2]})
    (finding,) = found(lost, replace(EXPECTED, count=3))
    assert finding.node == CLUSTER
    assert f"2 of 3 nodes joined: {HEAD}, {SECOND}; lost: {THIRD}" in finding.found


def test_what_the_run_does_not_need_is_not_looked_for() -> None:
    on_cpus = replace(EXPECTED, on_gpus=False)
    assert found(changed(THIRD, machine=replace(MACHINE, num_gpus=0)), on_cpus) == []
    not_stopped = replace(EXPECTED, grace_s=0.0)
    assert found(changed(HEAD, stop_wait_s=3), not_stopped) == []
    on_the_hub = replace(EXPECTED, model="org/base")
    assert [finding.fatal for finding in found(changed(THIRD, model=None), on_the_hub)] == [False], "it downloads it"
    offline = changed(THIRD, model=None, variables={**facts_of(THIRD).variables, "HF_HUB_OFFLINE": "1"})
    assert [finding.fatal for finding in found(offline, on_the_hub)] == [True, False]


class TestModelThatIsSent:
    SENT = replace(healthy(), asking=replace(facts_of(HEAD), model_bytes=GIB))

    def lacking(self, **values: Any) -> Examination:
        lacks = {"model": None, **values}
        return replace(self.SENT, facts={**self.SENT.facts, THIRD: replace(facts_of(THIRD), **lacks)})

    def test_a_node_that_lacks_it_is_no_fault(self) -> None:
        assert found(self.lacking()) == []
        assert model_line(self.lacking()) == f"model: its files (1,073.7 MB) will be sent to {THIRD}, once to each node"

    def test_a_node_that_has_it_already_gets_none(self) -> None:
        assert found(self.SENT) == []
        assert model_line(self.SENT) == model_line(self.lacking(model_cached=True)) == ""

    def test_a_node_without_room_is_named(self) -> None:
        (finding,) = found(self.lacking(model_room=GIB // 2))
        assert (finding.node, finding.check, finding.fatal) == (THIRD, "model", True)
        assert "0.50 GiB are free for sent models, for 1.00 GiB" in finding.found
        assert found(self.lacking(model_room=GIB // 2, model_cached=True)) == []

    def test_a_part_of_a_hubs_model_is_completed_and_another_directory_refused(self) -> None:
        part = self.lacking(model={"config.json": "1"})
        assert found(part, replace(EXPECTED, model="org/base")) == []
        assert [finding.fatal for finding in found(part)] == [True]


def test_a_head_without_a_gpu_has_no_driver() -> None:
    good = healthy()
    assert found(replace(good, asking=replace(good.asking, versions={**VERSIONS, "driver": ""}))) == []


def test_errors_come_first() -> None:
    both: Examination = changed(HEAD, stop_wait_s=3, open_files=100)
    assert [finding.fatal for finding in found(both)] == [True, False]


@pytest.mark.parametrize("value", ["eth0", "=eth0", "eth", "ib,eth", "^docker,lo"])
def test_nccl_names_interfaces_in_its_own_way(value: str) -> None:
    assert found(changed(THIRD, chosen={"NCCL_SOCKET_IFNAME": value})) == []


def test_what_to_type_for_ports_that_only_the_kernel_chooses() -> None:
    (finding,) = found(broken(SECOND, THIRD, 40001))
    assert 'net.ipv4.ip_local_port_range="20000 20999"' in finding.do
    (finding,) = found(broken(SECOND, THIRD, 20000))
    assert f"-s {SECOND} --dport 20000:20999 -j ACCEPT" in finding.do


def test_a_link_that_is_broken_both_ways_is_said_for_both() -> None:
    there, back = broken(SECOND, THIRD), broken(THIRD, SECOND)
    links = [a if a.error else b for a, b in zip(there.links, back.links, strict=True)]
    said = found(replace(there, links=links))
    assert [(finding.node, finding.check) for finding in said] == [(SECOND, "link"), (THIRD, "link")]
