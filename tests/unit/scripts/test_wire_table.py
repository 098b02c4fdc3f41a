"""The model of the network: hops, copies through the busiest card, and the page that is made of them."""

import pytest

from wire_table import GPUS_PER_NODE, MODELS, NODE_CARD, NODES, TARGET, Cluster, chain, render, seconds


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 64])
def test_every_rank_but_the_root_receives_once_from_one_that_has_it(size):
    receivers = {0}
    for start, end in chain(size):
        assert start in receivers
        assert end not in receivers
        receivers.add(end)
    assert receivers == set(range(size))


@pytest.mark.parametrize("gpus", sorted(set(MODELS.values())))
@pytest.mark.parametrize("nodes", NODES)
def test_each_replica_is_in_one_group(nodes, gpus):
    cluster = Cluster(nodes, gpus)
    members = [gpu for group in cluster.groups() for gpu in group[1:]]
    assert sorted(members) == [cluster.replica_gpu(i) for i in range(cluster.replicas)]
    assert max(members) < nodes * GPUS_PER_NODE
    assert all(group[0] < cluster.ranks <= min(group[1:]) for group in cluster.groups())


def test_seconds_of_a_known_case():
    """Four nodes, of which one trains: one of its ranks sends to 24 replicas, eight on each of the others."""
    seconds_by_way = seconds(Cluster(4, 1), NODE_CARD)  # as many bytes as a node's card sends in a second
    assert seconds_by_way["gather"] == 0
    assert seconds_by_way["object store"] == 3
    assert seconds_by_way["chain"] == 1
    assert seconds_by_way["chain, GPU cards"] == pytest.approx(1 / 4)
    assert len({seconds(Cluster(nodes, 1), 1e9)["chain, GPU cards"] for nodes in NODES}) == 1


def test_the_page_is_up_to_date():
    assert TARGET.read_text(encoding="utf-8") == render()
