"""Trainers on several hosts that go on after deaths: same rows, same bits."""

import pytest
from hosts import are_simulated, end, run

pytestmark = [pytest.mark.hosts, pytest.mark.faults, pytest.mark.any_library, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("name", "seed"), [("BSP", 0), ("LocalSGD", 1), ("EASGD", 2), ("GoSGD", 3)])
def test_trainer_goes_on_after_deaths_on_two_hosts(name, seed):
    assert run(["a:2", "b:2"], "survive", name, seed) == "right\n"


@pytest.mark.skipif(not are_simulated(), reason="no namespaces here, so that no host is lost alone")
@pytest.mark.parametrize(
    ("name", "hosts", "fault"), [("BSP", ["a:2", "b:2"], "agent"), ("LocalSGD", ["a:1", "b:1", "c:1"], "host")]
)
def test_trainer_goes_on_without_a_lost_host(name, hosts, fault):
    pytest.importorskip("safetensors")
    assert run(hosts, "survive_host", name, fault).endswith("right\n")  # after messages of mpirun
    end(True)  # a host is dead
