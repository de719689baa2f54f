"""Exchange rules on stand-in GPUs keep the ranks' vectors on the device, and reduce them by NCCL."""

import pytest
from library import NAME
from system import run_code

pytestmark = pytest.mark.skipif(NAME != "pytensor", reason="stands for JAX on GPUs")


@pytest.mark.slow
def test_local_sgd_on_stand_in_nccl_launches_steps_at_once():
    printed = run_code("import stand_in_programs; stand_in_programs.train_by_rules()", timeout=110, JAX_PLATFORMS="cpu")
    # 15 rounds an epoch: three launches of five steps, each followed by an average, and one launch for the report.
    for line, dtype in zip(printed.splitlines(), ("float32", "bfloat16", "float32"), strict=True):
        launches, _, collectives = line.partition("] ")
        assert launches == str([5] * 9)[:-1]
        assert collectives.count(f"all-reduced 30 of {dtype};") >= 9
