"""What a run expects of nodes follows from its configuration and plan."""

from doctor_support import NAMES, healthy
from plan_support import cluster, machines, plan

from trireme.config.run import RunConfig
from trireme.doctor.examination import SHM_BYTES, Expected
from trireme.plan.rl import QUEUE_BYTES


def test_expectations_follow_from_the_plan() -> None:
    planned = plan(shards=2, replicas=2, resources=cluster(machines(2), machines(2), machines(2)))
    expected = Expected.of(planned.config, planned)
    facts = planned.facts
    assert expected.shm_bytes("node 0") == SHM_BYTES + 2 * 4 * facts.num_parameters
    assert set(expected.memory) <= {node.name for node in planned.resources.nodes}
    assert set(expected.writers) <= set(expected.memory)
    assert expected.writers
    assert not expected.on_gpus
    stored = planned.config.model_copy(update={"run": RunConfig(output_dir="s3://bucket/runs")})
    assert Expected.of(stored, planned).writers == [], "no node needs to see a run directory"
    planned = plan(shards=1, resources=cluster(machines(8)), inference={"tensor_parallel": 2})
    expected = Expected.of(planned.config, planned)
    assert expected.shm_free == {"node 0": QUEUE_BYTES}
    assert expected.shm_bytes("node 0") == SHM_BYTES + 2 * expected.version_bytes + QUEUE_BYTES
    assert expected.shm_bytes("a node without replicas") == SHM_BYTES + 2 * expected.version_bytes


def test_the_nodes_of_an_examination_are_those_of_a_plan() -> None:
    resources = healthy().resources()
    assert [node.name for node in resources.nodes] == list(NAMES)
    assert (resources.cpus, resources.gpus) == (48, 24)
