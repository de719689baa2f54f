"""A transformer that predicts the next character, in PyTensor.

Pre-norm blocks as in GPT-2: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``, with learned positions and an output
layer of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt

from synkhronos.extensions.attention import dot_product_attention


class Transformer(NamedTuple):
    """A network's variables."""

    #: Characters, and those that follow, of shape (windows, length).
    x: Any
    y: Any
    #: Of shape (windows, length, characters).
    logits: Any
    #: Cross-entropy in nats for each character, without and with label smoothing.
    loss: Any
    loss_smooth: Any
    params: list[Any]


def is_matrix(param: Any) -> bool:
    """Return whether weight decay applies: to matrices, but not to biases and to the scales of norms."""
    return param.ndim == 2


def build_transformer(
    characters: int, length: int, size: int, heads: int, layers: int, smoothing: float = 0.0, seed: int = 1
) -> Transformer:
    """Return a network for windows of `length` characters; `heads` divides `size`, the features of a character."""
    if size % heads:
        raise ValueError(f"heads: {heads} do not divide the size {size}")
    rng = np.random.default_rng(seed)
    params: list[Any] = []

    def add_param(name: str, value: Any) -> Any:
        params.append(pytensor.shared(np.asarray(value, "float32"), name))
        return params[-1]

    def add_weights(name: str, rows: int, columns: int, scale: float = 1.0) -> Any:
        return add_param(name, rng.normal(0, scale / np.sqrt(rows), (rows, columns)))

    def add_norm(name: str, value: Any) -> Any:
        gain, bias = add_param(f"{name}.gain", np.ones(size)), add_param(f"{name}.bias", np.zeros(size))
        centered = value - value.mean(axis=-1, keepdims=True)
        return centered / pt.sqrt((centered**2).mean(axis=-1, keepdims=True) + np.float32(1e-5)) * gain + bias

    def add_dense(name: str, value: Any, rows: int, columns: int, scale: float = 1.0) -> Any:
        return value @ add_weights(f"{name}.w", rows, columns, scale) + add_param(f"{name}.b", np.zeros(columns))

    x, y = pt.imatrix("x"), pt.imatrix("y")
    windows, width = x.shape[0], size // heads
    residual = 1 / np.sqrt(2 * layers)  # keeps the variance of the sum over blocks at 1, as in GPT-2

    # Matrix products are of two dimensions where they can be: (windows * length, features).
    embedded = add_param("characters", rng.normal(0, 0.1, (characters, size)))[x.flatten()]
    positions = add_param("positions", rng.normal(0, 0.1, (length, size)))
    state = (embedded.reshape((windows, length, size)) + positions).reshape((-1, size))

    for block in range(layers):
        name = f"block{block}"
        qkv = add_dense(f"{name}.qkv", add_norm(f"{name}.norm1", state), size, 3 * size)
        qkv = qkv.reshape((windows, length, 3, heads, width))
        attended = dot_product_attention(*(qkv[:, :, part] for part in range(3)), is_causal=True)
        attended = attended.reshape((-1, size))
        state = state + add_dense(f"{name}.out", attended, size, size, residual)
        hidden = add_dense(f"{name}.mlp1", add_norm(f"{name}.norm2", state), size, 4 * size)
        hidden = hidden * pt.sigmoid(np.float32(1.702) * hidden)  # GELU, in its sigmoid approximation
        state = state + add_dense(f"{name}.mlp2", hidden, 4 * size, size, residual)

    logits = add_dense("output", add_norm("norm", state), size, characters)
    log_p = logits - pt.logsumexp(logits, axis=-1, keepdims=True)
    label_log_p = log_p[pt.arange(log_p.shape[0]), y.flatten()]
    loss = -label_log_p.mean(dtype="float32")
    smooth = np.float32(1 - smoothing) * loss - np.float32(smoothing) * log_p.mean(dtype="float32")
    return Transformer(x, y, logits.reshape((windows, length, characters)), loss, smooth, params)
