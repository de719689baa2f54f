"""Trainers on several hosts that go on after deaths: same rows, same bits."""

import pytest
from hosts import are_simulated, end, run

pytestmark = [pytest.mark.starts_programs, pytest.mark.hosts, pytest.mark.faults, pytest.mark.timeout(300)]


def test_new_workers_on_two_hosts_are_like_the_masters_process():
    assert run(["a:2", "b:2"], "replace_killed_workers") == "passed\n"


@pytest.mark.parametrize(
    ("name", "seed", "source"),
    [
        ("EASGD", 2, "arrays"),
        ("GoSGD", 3, "arrays"),
        ("BSP", 5, "parts"),
        ("LocalSGD", 6, "parts"),
    ],
)
def test_trainer_goes_on_after_deaths_on_two_hosts(name, seed, source):
    assert run(["a:2", "b:2"], "train_through_deaths", name, seed, source) == "passed\n"


def test_loader_on_several_hosts_needs_bsp():
    assert run(["a:2", "b:2"], "train_from_loader_by_easgd") == "passed\n"


@pytest.mark.skipif(not are_simulated(), reason="no namespaces here, so that no host is lost alone")
@pytest.mark.parametrize(
    ("name", "hosts", "fault", "source"),
    [
        ("BSP", ["a:2", "b:2"], "agent", "arrays"),
        ("LocalSGD", ["a:1", "b:1", "c:1"], "host", "arrays"),
        ("BSP", ["a:2", "b:1"], "host", "loader"),
        ("LocalSGD", ["a:2", "b:1"], "host", "parts"),
    ],
)
def test_trainer_goes_on_without_a_lost_host(name, hosts, fault, source):
    pytest.importorskip("safetensors")
    assert run(hosts, "train_through_loss_of_host", name, fault, source).endswith(
        "passed\n"
    )  # after messages of mpirun
    end(True)  # a host is dead


@pytest.mark.skipif(not are_simulated(), reason="no namespaces here, so that no host is lost alone")
@pytest.mark.parametrize(("name", "step"), [("BSP", 0), ("LocalSGD", 1)])
def test_data_parts_of_a_lost_host_are_redistributed(name, step):
    assert run(["a:1", "b:1", "c:1"], "train_on_parts_through_loss_of_host", name, step).endswith("passed\n")
    end(True)
