"""Exchange rules on fake GPUs keep the ranks' vectors on the device, and reduce them by NCCL."""

import json

import pytest
from library import NAME
from system import run_on_fake_gpus

pytestmark = pytest.mark.skipif(NAME != "pytensor", reason="fake GPUs are JAX's CPU")


@pytest.mark.slow
def test_rules_on_fake_gpus_launch_steps_at_once():
    printed = run_on_fake_gpus("train_by_rules", 2)
    # 15 rounds an epoch: three launches of five steps, each followed by an average, and one launch for the report.
    for line, dtype in zip(printed, ("float32", "bfloat16", "float32"), strict=True):
        launches, collectives = line.split("; ", 1)
        assert json.loads(launches) == [5] * 9
        assert collectives.count(f"all-reduced 30 of {dtype};") >= 9
