"""Pinned memory is taken on the node of its GPU, by a thread that runs there for that moment."""

import os
import types

import pytest
import torch

from ssd_fx.runtime.memory import numa

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A GPU at 0000:3b:00.0. What the system says of its node is the test's to write."""
    about = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(numa, "_PCI", tmp_path / "pci")
    monkeypatch.setattr(numa, "_NODES", tmp_path / "node")
    (tmp_path / "pci" / "0000:3b:00.0").mkdir(parents=True)
    (tmp_path / "node" / "node1").mkdir(parents=True)

    def write(node, cores):
        (tmp_path / "pci" / "0000:3b:00.0" / "numa_node").write_text(node)
        (tmp_path / "node" / "node1" / "cpulist").write_text(cores)

    return write


def test_the_thread_runs_on_the_node_of_the_gpu(machine):
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    machine("1\n", f"{core},{max(allowed) + 1}-{max(allowed) + 9}\n")
    with numa.near(GPU):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize(("node", "cores"), [("-1\n", "0\n"), ("7\n", "0\n"), ("", ""), ("1\n", "90000-90009\n")])
def test_a_machine_that_does_not_tell_leaves_the_thread_where_it_is(machine, node, cores):
    """Also where none of the node's cores is allowed to this process."""
    allowed = os.sched_getaffinity(0)
    machine(node, cores)
    with numa.near(GPU):
        assert os.sched_getaffinity(0) == allowed


def test_a_container_that_refuses_leaves_the_thread_where_it_is(machine, monkeypatch):
    allowed = os.sched_getaffinity(0)
    machine("1\n", f"{min(allowed)}\n")

    def refuse(thread, cores):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with numa.near(GPU):
        assert os.sched_getaffinity(0) == allowed


def test_other_devices_have_no_node():
    allowed = os.sched_getaffinity(0)
    with numa.near(torch.device("cpu")):
        assert os.sched_getaffinity(0) == allowed


def test_a_list_of_cores():
    assert numa.cores_in("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
