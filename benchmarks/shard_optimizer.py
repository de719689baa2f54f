"""Time and memory of a sharded optimizer (ZeRO-1), beside PyTorch's ZeroRedundancyOptimizer.

VGG16 of demos/zoo (138,357,544 parameters), with 32 images for each GPU as in Theano-MPI, for each rule, with
``shard_optimizer=False`` and ``True``; and the same network in PyTorch under DistributedDataParallel, with the rule's
fused optimizer and with ZeroRedundancyOptimizer.  Images are synthetic and in host memory.

Each row of the table is measured in a process of its own.  `state` is the number of bytes of the optimizer's variables,
on the rank with most of them.  `in use` and `peak` are the memory on rank 0's GPU after the last step and its maximum,
as JAX and PyTorch report them; the peak includes activations.  `ratio` is the time of a step, relative to the unsharded
optimizer of the same library.

``--cpu`` tries the benchmark with a small network on two CPU cores; its figures say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import make_parser
from benchmarks._training import join_group, measure_steps, run_processes

ROOT = Path(__file__).resolve().parents[1]
#: Sides, and the unsharded one of the same library.
SIDES = {"whole": "whole", "sharded": "whole", "ddp": "ddp", "zero": "ddp"}
RATES = {"momentum": 1e-3, "adam": 1e-5, "adamw": 1e-5}
#: Maximal time of a step with a sharded optimizer, relative to the unsharded one.
LIMIT = 1.05
#: Settings of the network and its training, of ``batch_size`` images for each GPU.
SETTINGS = {"batch_size": 32, "size": 224, "units": 4096, "classes": 1000, "steps": 30, "warm": 10}
#: Those with ``--cpu``.
SMALL_SETTINGS = {"batch_size": 2, "size": 32, "units": 64, "classes": 10, "steps": 2, "warm": 1}

Settings = dict[str, Any]


def run_synkhronos(settings: Settings) -> dict[str, Any]:
    """Measure a training function of Synkhronos."""
    import synkhronos.compat  # noqa: F401 - before Lasagne

    # isort: split
    import lasagne
    import pytensor

    import synkhronos as synk
    from synkhronos.training import make_train_function, updates

    sys.path[1:1] = [str(ROOT / "demos"), str(ROOT / "demos" / "zoo")]
    from vgg16 import VGG16

    lasagne.random.set_rng(np.random.RandomState(0))  # of initial weights and dropout: equal on both sides
    pytensor.config.floatX = "float32"
    n, size, batch_size = settings["n"], settings["size"], settings["batch_size"]
    on_gpu = settings["device"] == "gpu"
    if not on_gpu:
        pytensor.config.mode = "JAX"
    synk.fork(n, use_gpu=on_gpu)
    config = {"side": size, "stored": size, "images": 1, "decay": 0.0, "classes": settings["classes"]}
    net = VGG16({"rank": 0, "size": 1, "seed": 0, "batch_size": 1, "units": settings["units"], **config})
    train = make_train_function(
        net.loss,
        net.trainable_params,
        net.inputs[0],
        net.inputs[1],
        getattr(updates, settings["rule"]),
        shard_optimizer=settings["side"] == "sharded",
        learning_rate=RATES[settings["rule"]],
    )
    rng = np.random.default_rng(0)
    rows = n * batch_size
    images = synk.data(dtype="uint8", shape=(4 * rows, 3, size, size))
    for i in range(len(images)):
        images[i] = rng.integers(256, size=(3, size, size), dtype=np.uint8)
    labels = synk.data(rng.integers(settings["classes"], size=len(images), dtype=np.int32))
    result = measure_steps(lambda: train(images, labels, batch=rng.choice(len(images), rows, replace=False)), settings)
    state = np.zeros(n, np.int64)
    for variable in train.optimizer_state:
        itemsize = np.dtype(variable.type.dtype).itemsize
        state += [itemsize * int(np.prod(shape)) for shape in synk.get_shapes(variable)]
    result |= {"state": int(state.max())}
    result["parameters"] = sum(param.get_value(borrow=True).size for param in net.trainable_params)
    if on_gpu:
        import jax

        memory = jax.local_devices()[0].memory_stats()
        result |= {"in use": memory["bytes_in_use"], "peak": memory["peak_bytes_in_use"]}
    synk.close()
    return {**result, "version": f"PyTensor {pytensor.__version__}"}


def run_torch(rank: int, rendezvous: str, settings: Settings) -> dict[str, Any]:
    """Measure one process of PyTorch's DDP."""
    import torch
    from torch import distributed, nn
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from benchmarks._torch_networks import make_vgg16

    on_gpu = settings["device"] == "gpu"
    device = join_group(rank, rendezvous, settings["n"], on_gpu)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    size, classes, batch_size = settings["size"], settings["classes"], settings["batch_size"]
    net = make_vgg16(classes, settings["units"])
    net(torch.zeros(1, 3, size, size))  # sets the shapes of lazy layers
    net = net.to(device, memory_format=torch.channels_last)
    model = nn.parallel.DistributedDataParallel(
        net, device_ids=[rank] if on_gpu else None, gradient_as_bucket_view=True
    )
    kind: Any = {"momentum": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings["rule"]]
    options: Settings = {"lr": RATES[settings["rule"]], "fused": on_gpu}
    if settings["rule"] == "momentum":
        options["momentum"] = 0.9
    if settings["side"] == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **options)
    else:
        optimizer = kind(model.parameters(), **options)
    batches = []
    for _ in range(4):
        x = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8)
        x, y = x.contiguous(memory_format=torch.channels_last), torch.randint(classes, (batch_size,))
        batches.append((x.pin_memory(), y.pin_memory()) if on_gpu else (x, y))
    n_steps = 0

    def step() -> Any:
        nonlocal n_steps
        x, y = (array.to(device, non_blocking=True) for array in batches[n_steps % 4])
        n_steps += 1
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model((x.to(torch.float32) - 127.5) / 64), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    result = measure_steps(step, settings)
    states = (optimizer.optim if settings["side"] == "zero" else optimizer).state.values()
    tensors = [tensor for entries in states for tensor in entries.values() if torch.is_tensor(tensor)]
    state = torch.tensor(sum(tensor.numel() * tensor.element_size() for tensor in tensors), device=device)
    distributed.all_reduce(state, op=distributed.ReduceOp.MAX)
    result |= {"state": int(state), "parameters": sum(p.numel() for p in net.parameters())}
    if on_gpu:
        result |= {"in use": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
    distributed.destroy_process_group()
    return {**result, "version": f"PyTorch {torch.__version__}"}


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = make_parser("shard_optimizer", __doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", metavar="N", help="numbers of GPUs (default: 2 and 4, as far as there are)")
    add("--rules", nargs="+", choices=RATES, default=list(RATES), help="(default: all)")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="what to measure (default: all)")
    add("--limit", type=int, default=120, metavar="N", help="seconds for each side (%(default)s)")
    add("--cpu", action="store_true", help="a small network on CPU cores, to try the benchmark")
    add("--run", type=json.loads, help=argparse.SUPPRESS)  # the settings of one side, run in this process
    return parser.parse_args()


def main() -> None:
    """Run each side in its own process, and print a table."""
    options = parse_options()
    if options.run:
        is_ours = options.run["side"] in ("whole", "sharded")
        run = run_synkhronos if is_ours else partial(run_processes, run_torch, options.run["n"])
        print(json.dumps(run(options.run)), flush=True)
        return
    from benchmarks._measure import (
        SideError,
        Table,
        format_bytes,
        format_duration,
        print_criterion,
        print_heading,
        require_gpus,
        run_side,
    )

    counts = options.ranks or [n for n in (2, 4) if n <= (2 if options.cpu else require_gpus(None))]
    common = SMALL_SETTINGS if options.cpu else SETTINGS
    print_heading(f"training steps of VGG16, {common['batch_size']} images for each GPU, TF32")
    table = Table(
        {"side": 8, "rule": 8, "GPUs": 4, "step": 8, "ratio": 6, "state": 8, "in use": 8, "peak": 8, "first step": 10}
    )
    versions, ratios = {}, {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            "JAX_DEFAULT_MATMUL_PRECISION": "tensorfloat32",
            # Only the first side tries algorithms of convolutions.
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", cache),
            **({"JAX_PLATFORMS": "cpu"} if options.cpu else {}),
        }
        for n in counts:
            for rule in options.rules:
                seconds: dict[str, float] = {}
                for side in options.sides:
                    settings: Settings = {**common, "side": side, "rule": rule, "n": n}
                    settings["device"] = "cpu" if options.cpu else "gpu"
                    try:
                        report = run_side(["shard_optimizer", "--run"], settings, options.limit, **environment)
                    except SideError as failure:
                        print(f"{side}, {rule}, n = {n}: {failure}", flush=True)
                        continue
                    seconds[side] = report["seconds"]
                    base = seconds.get(SIDES[side])
                    ratio = f"{report['seconds'] / base:.3f}" if base and SIDES[side] != side else ""
                    table.print_row(
                        *(side, rule, str(n), format_duration(report["seconds"]), ratio, format_bytes(report["state"])),
                        *(format_bytes(report[name]) if name in report else "" for name in ("in use", "peak")),
                        format_duration(report["first"]),
                    )
                    versions[side] = (
                        f"{report['version']}, {report['parameters']:,} parameters, loss {report['loss']:.3f}"
                    )
                if {"whole", "sharded"} <= seconds.keys():
                    ratios[rule, n] = seconds["sharded"] / seconds["whole"]
    print("", *(f"{side}: {text}" for side, text in versions.items()), "", sep="\n")
    for (rule, n), figure in ratios.items():
        print_criterion(
            f"{rule}, {n} GPUs: step of the sharded optimizer, relative to the unsharded one", figure, at_most=LIMIT
        )


if __name__ == "__main__":
    main()
