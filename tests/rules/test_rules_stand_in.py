"""Exchange rules on stand-in GPUs keep the ranks' vectors on the device, and reduce them by NCCL."""

import pytest
from library import NAME
from system import run_code

pytestmark = pytest.mark.skipif(NAME != "pytensor", reason="stands for JAX on GPUs")


@pytest.mark.slow
def test_local_sgd_on_stand_in_nccl_launches_steps_at_once():
    code = """
        import stand_in
        stand_in.install()
        import numpy as np, pytensor, pytensor.tensor as T
        import synkhronos as synk
        from synkhronos import rules
        from synkhronos.training.updates import momentum
        from synkhronos.engines.xla.executable import Executable
        from synkhronos.training import make_trainer
        from synkhronos.training.trainer.local_step_loop import LocalStepLoop
        pytensor.config.mode, pytensor.config.floatX = "JAX", "float32"
        launches = []
        repeated = Executable.repeat
        Executable.repeat = lambda self, times: launches.append(times) or repeated(self, times)
        LocalStepLoop.max_steps_per_launch = property(lambda self: 64, lambda self, value: None)
        synk.fork(2, use_gpu=False)
        rng = np.random.default_rng(0)
        x_data = rng.normal(size=(120, 30)).astype("float32")
        y_data = x_data.sum(axis=1)
        losses = []
        for rule in (rules.LocalSGD(5), rules.LocalSGD(5, precision="bfloat16"), rules.DiLoCo(5, 1.0, 0.0)):
            x, y, w = T.fmatrix("x"), T.fvector("y"), pytensor.shared(np.zeros(30, "float32"), "w")
            trainer = make_trainer(((x.dot(w) - y) ** 2).mean(), [w], x, y, momentum, rule, 0.01)
            reports = list(trainer.epochs(x_data, y_data, batch_size=4, epochs=3))
            losses.append(reports[-1].loss)
            print(launches, stand_in.take_collectives(), flush=True)
            launches.clear()
        assert losses[0] < 3 and abs(losses[0] - losses[2]) < 1e-3 and abs(losses[0] - losses[1]) < 0.05, losses
        synk.close()
    """
    printed = run_code(code, timeout=110, JAX_PLATFORMS="cpu")
    # 15 rounds an epoch: three launches of five steps, each followed by an average, and one launch for the report.
    for line, dtype in zip(printed.splitlines(), ("float32", "bfloat16", "float32"), strict=True):
        launched, _, collectives = line.partition("] ")
        assert launched == str([5] * 9)[:-1]
        assert collectives.count(f"combined 30 of {dtype};") >= 9
