"""Tokens a second of a transformer's training, beside PyTorch's DDP and flax on a mesh of devices.

The network of demos/transformer, with AdamW and clipping of the gradient's norm, on 1, 2, 4, ... GPUs.  It is compared
with the same network in PyTorch under DistributedDataParallel, eager and compiled, with fused attention and fused
AdamW; and in flax under ``jit`` over a mesh, with optax.  In bfloat16, the sums of the residual blocks are float32 on
all sides but ``flax-bfloat16``, which moves fewer bytes and rounds more.  Tokens are in host memory before each step.
The sides run one after the other in separate processes; losses are read after the last step.

``--cpu`` tries the benchmark with a small network on two CPU cores; its figures say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import make_parser
from benchmarks._training import join_group, measure_steps, run_processes

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("synkhronos", "ddp", "compiled", "flax", "flax-bfloat16")
RATE, DECAY, CLIP = 3e-4, 0.1, 1.0
#: Settings of the network and its training: windows of ``length`` tokens, ``batch_size`` of them for each GPU.
SETTINGS = {"size": 768, "heads": 12, "layers": 12, "length": 512, "characters": 256, "batch_size": 16}
SETTINGS |= {"steps": 30, "warm": 10}
#: Those with ``--cpu``.
SMALL_SETTINGS = {**SETTINGS, "size": 64, "heads": 4, "layers": 2, "length": 64, "batch_size": 8, "steps": 3, "warm": 2}

Settings = dict[str, Any]


def make_tokens(settings: Settings, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return random tokens and their successors for 20 steps of all ranks, or of one rank."""
    rows = 20 * settings["batch_size"] * (settings["n"] if rank is None else 1)
    rng = np.random.default_rng(rank)
    tokens = rng.integers(settings["characters"], size=(rows, settings["length"] + 1), dtype=np.int32)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def run_synkhronos(settings: Settings) -> dict[str, Any]:
    """Measure Synkhronos: each step is one call of a training function."""
    import pytensor

    import synkhronos as synk
    from synkhronos.training import make_train_function
    from synkhronos.training.updates import adamw

    sys.path.insert(1, str(ROOT / "demos" / "transformer"))
    from transformer import build_transformer, is_matrix

    pytensor.config.floatX = "float32"
    if settings["device"] == "cpu":
        pytensor.config.mode = "JAX"
    synk.fork(settings["n"], use_gpu=settings["device"] == "gpu")
    net = build_transformer(*(settings[name] for name in ("characters", "length", "size", "heads", "layers")))
    train = make_train_function(
        net.loss,
        net.params,
        net.x,
        net.y,
        adamw,
        learning_rate=RATE,
        weight_decay=DECAY,
        mask=is_matrix,
        clip_norm=CLIP,
    )
    x_data, y_data = [synk.data(part) for part in make_tokens(settings)]
    rng, size = np.random.default_rng(0), settings["n"] * settings["batch_size"]
    result = measure_steps(lambda: train(x_data, y_data, batch=rng.choice(len(x_data), size, replace=False)), settings)
    count = sum(param.get_value(borrow=True).size for param in net.params)
    synk.close()
    return {**result, "parameters": count, "version": f"PyTensor {pytensor.__version__}"}


def run_flax(settings: Settings) -> dict[str, Any]:
    """Measure flax and optax: a jitted step over a mesh, whose batch is split and whose parameters are replicated."""
    import flax
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen as nn
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    size, heads, length = settings["size"], settings["heads"], settings["length"]
    dtype = jnp.bfloat16 if settings["precision"] == "bfloat16" else jnp.float32
    sum_dtype = dtype if settings["side"] == "flax-bfloat16" else jnp.float32
    # cuDNN's fused attention does not support float32, and JAX does not select it by default.
    fused = "cudnn" if settings["device"] == "gpu" and dtype == jnp.bfloat16 else None

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            state = nn.Embed(settings["characters"], size, dtype=sum_dtype)(x)
            state = state + self.param("positions", nn.initializers.normal(0.1), (length, size)).astype(sum_dtype)
            for _ in range(settings["layers"]):
                projections = nn.Dense(3 * size, dtype=dtype)(nn.LayerNorm(dtype=dtype)(state))
                query, key, value = jnp.moveaxis(projections.reshape(*x.shape, 3, heads, size // heads), 2, 0)
                attended = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=fused)
                state = state + nn.Dense(size, dtype=dtype)(attended.reshape(*x.shape, size))
                hidden = nn.Dense(4 * size, dtype=dtype)(nn.LayerNorm(dtype=dtype)(state))
                state = state + nn.Dense(size, dtype=dtype)(hidden * nn.sigmoid(1.702 * hidden))
            return nn.Dense(settings["characters"], dtype=dtype)(nn.LayerNorm(dtype=dtype)(state))

    mesh = Mesh(np.array(jax.devices()[: settings["n"]]), ("ranks",))
    split_rows, replicated = NamedSharding(mesh, PartitionSpec("ranks")), NamedSharding(mesh, PartitionSpec())
    tokens = make_tokens(settings)
    model = Transformer()
    params = jax.device_put(jax.jit(model.init)(jax.random.key(0), tokens[0][:1]), replicated)
    mask = jax.tree.map(lambda param: param.ndim == 2, params)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE, weight_decay=DECAY, mask=mask))
    state = jax.device_put(jax.jit(optimizer.init)(params), replicated)

    def compute_loss(params: Any, x: Any, y: Any) -> Any:
        logits = model.apply(params, x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def update(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradient = jax.value_and_grad(compute_loss)(params, x, y)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    update = jax.jit(update, donate_argnums=(0, 1))
    rng, rows = np.random.default_rng(0), settings["n"] * settings["batch_size"]

    def step() -> Any:
        nonlocal params, state
        batch = rng.choice(len(tokens[0]), rows, replace=False)
        x, y = (jax.device_put(part[batch], split_rows) for part in tokens)
        params, state, loss = update(params, state, x, y)
        return loss

    count = sum(param.size for param in jax.tree.leaves(params))
    result = measure_steps(step, settings)
    return {**result, "parameters": count, "version": f"flax {flax.__version__}, JAX {jax.__version__}"}


def run_torch(rank: int, rendezvous: str, settings: Settings) -> dict[str, Any]:
    """Measure one process of PyTorch's DDP."""
    import torch
    from torch import distributed, nn
    from torch.nn import functional

    size, heads, length = settings["size"], settings["heads"], settings["length"]
    on_gpu = settings["device"] == "gpu"
    device = join_group(rank, rendezvous, settings["n"], on_gpu)
    torch.backends.cuda.matmul.allow_tf32 = True

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
            self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
            self.mlp1, self.mlp2 = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

        def forward(self, state: Any) -> Any:
            shape = (*state.shape[:2], 3, heads, size // heads)
            query, key, value = self.qkv(self.norm1(state)).reshape(shape).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            state = state + self.out(attended.transpose(1, 2).reshape(state.shape))
            hidden = self.mlp1(self.norm2(state))
            return state + self.mlp2(hidden * torch.sigmoid(1.702 * hidden))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.characters = nn.Embedding(settings["characters"], size)
            self.positions = nn.Parameter(torch.randn(length, size) * 0.1)
            self.blocks = nn.Sequential(*(Block() for _ in range(settings["layers"])))
            self.norm, self.output = nn.LayerNorm(size), nn.Linear(size, settings["characters"])

        def forward(self, x: Any) -> Any:
            return self.output(self.norm(self.blocks(self.characters(x) + self.positions)))

    torch.manual_seed(0)
    net = Transformer().to(device)
    count = sum(param.numel() for param in net.parameters())
    groups = [
        {"params": [param for param in net.parameters() if param.ndim == 2], "weight_decay": DECAY},
        {"params": [param for param in net.parameters() if param.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    ddp = nn.parallel.DistributedDataParallel(net, device_ids=[rank] if on_gpu else None)
    model: Any = torch.compile(ddp) if settings["side"] == "compiled" else ddp
    tokens = [torch.from_numpy(part).long() for part in make_tokens(settings, rank)]
    batch_size = settings["batch_size"]
    batches = [[part[i * batch_size : (i + 1) * batch_size] for part in tokens] for i in range(20)]
    if on_gpu:
        batches = [[part.pin_memory() for part in batch] for batch in batches]
    n_steps = 0

    def step() -> Any:
        nonlocal n_steps
        x, y = (part.to(device, non_blocking=True) for part in batches[n_steps % 20])
        n_steps += 1
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings["precision"] == "bfloat16"):
            logits = model(x)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    result = measure_steps(step, settings)
    distributed.destroy_process_group()
    return {**result, "parameters": count, "version": f"PyTorch {torch.__version__}"}


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = make_parser("gpu_transformer", __doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", metavar="N", help="numbers of GPUs (default: 1, 2 and 4, as far as there are)")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="what to measure (default: all)")
    add("--precision", nargs="+", choices=("bfloat16", "tf32"), default=["bfloat16"], help="(default: bfloat16)")
    add("--limit", type=int, default=300, metavar="N", help="seconds for each side (%(default)s)")
    add("--cpu", action="store_true", help="a small network on CPU cores, to try the benchmark")
    add("--run", type=json.loads, help=argparse.SUPPRESS)  # the settings of one side, run in this process
    return parser.parse_args()


def main() -> None:
    """Run each side in its own process, and print a table."""
    options = parse_options()
    if options.run:
        runs = {"synkhronos": run_synkhronos, "flax": run_flax, "flax-bfloat16": run_flax}
        run = runs.get(options.run["side"], partial(run_processes, run_torch, options.run["n"]))
        print(json.dumps(run(options.run)), flush=True)
        return
    from benchmarks._measure import (
        SideError,
        Table,
        format_duration,
        print_heading,
        require_gpus,
        run_side,
    )

    counts = options.ranks or [n for n in (1, 2, 4) if n <= (2 if options.cpu else require_gpus(None))]
    print_heading("training steps of a transformer")
    table = Table({"side": 14, "precision": 9, "GPUs": 4, "tokens/s": 10, "step": 8, "first step": 10, "ours/it": 7})
    versions = {}
    for precision in options.precision:
        for n in counts:
            synkhronos_speed = None
            for side in options.sides:
                settings: Settings = {**(SMALL_SETTINGS if options.cpu else SETTINGS), "side": side, "n": n}
                settings |= {"precision": precision, "device": "cpu" if options.cpu else "gpu"}
                environment = {"JAX_DEFAULT_MATMUL_PRECISION": {"tf32": "tensorfloat32"}.get(precision, precision)}
                if options.cpu:
                    environment["JAX_PLATFORMS"] = "cpu"
                    environment["XLA_FLAGS"] = (
                        f"--xla_force_host_platform_device_count={n}" if side.startswith("flax") else ""
                    )
                try:
                    report = run_side(["gpu_transformer", "--run"], settings, options.limit, **environment)
                except SideError as failure:
                    print(f"{side}, n = {n}: {failure}", flush=True)
                    continue
                speed = n * settings["batch_size"] * settings["length"] / report["seconds"]
                synkhronos_speed = speed if side == "synkhronos" else synkhronos_speed
                ratio = f"{synkhronos_speed / speed:.3f}" if synkhronos_speed and side != "synkhronos" else ""
                table.print_row(
                    *(side, precision, str(n), f"{speed:,.0f}", format_duration(report["seconds"])),
                    *(format_duration(report["first"]), ratio),
                )
                versions[side] = f"{report['version']}, {report['parameters']:,} parameters, loss {report['loss']:.3f}"
    print("", *(f"{side}: {text}" for side, text in versions.items()), sep="\n")


if __name__ == "__main__":
    main()
