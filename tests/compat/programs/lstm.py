"""Long short-term memory over masked sequences of words: all gates are slices of one product; learned by Adadelta."""

from collections import OrderedDict

import numpy as np
import theano
import theano.tensor as T

WORDS, LENGTH, BATCH, DIM, CLASSES = 20, 7, 5, 6, 2


def numpy_floatX(data):
    return np.asarray(data, dtype=theano.config.floatX)


def init_params(rng):
    params = OrderedDict()
    params["Wemb"] = 0.3 * rng.randn(WORDS, DIM)
    for name in ("lstm_W", "lstm_U"):
        params[name] = rng.randn(DIM, 4 * DIM) / np.sqrt(DIM)
    params["lstm_b"] = np.zeros(4 * DIM)
    params["U"] = 0.3 * rng.randn(DIM, CLASSES)
    params["b"] = np.zeros(CLASSES)
    return OrderedDict((key, theano.shared(numpy_floatX(value), name=key)) for key, value in params.items())


def lstm_layer(tparams, state_below, mask):
    nsteps = state_below.shape[0]
    n_samples = state_below.shape[1] if state_below.ndim == 3 else 1

    def _slice(_x, n, dim):
        if _x.ndim == 3:
            return _x[:, :, n * dim : (n + 1) * dim]
        return _x[:, n * dim : (n + 1) * dim]

    def _step(m_, x_, h_, c_):
        preact = T.dot(h_, tparams["lstm_U"])
        preact += x_
        i = T.nnet.sigmoid(_slice(preact, 0, DIM))
        f = T.nnet.sigmoid(_slice(preact, 1, DIM))
        o = T.nnet.sigmoid(_slice(preact, 2, DIM))
        c = T.tanh(_slice(preact, 3, DIM))
        c = f * c_ + i * c
        c = m_[:, None] * c + (1.0 - m_)[:, None] * c_
        h = o * T.tanh(c)
        h = m_[:, None] * h + (1.0 - m_)[:, None] * h_
        return h, c

    state_below = T.dot(state_below, tparams["lstm_W"]) + tparams["lstm_b"]
    rval, _ = theano.scan(
        _step,
        sequences=[mask, state_below],
        outputs_info=[
            T.alloc(numpy_floatX(0.0), n_samples, DIM),
            T.alloc(numpy_floatX(0.0), n_samples, DIM),
        ],
        name="lstm_layers",
        n_steps=nsteps,
    )
    return rval[0]


def adadelta(tparams, grads, x, mask, y, cost):
    zipped_grads = [theano.shared(p.get_value() * numpy_floatX(0.0), name=f"{k}_grad") for k, p in tparams.items()]
    running_up2 = [theano.shared(p.get_value() * numpy_floatX(0.0), name=f"{k}_rup2") for k, p in tparams.items()]
    running_grads2 = [theano.shared(p.get_value() * numpy_floatX(0.0), name=f"{k}_rgrad2") for k, p in tparams.items()]
    zgup = [(zg, g) for zg, g in zip(zipped_grads, grads, strict=True)]
    rg2up = [(rg2, 0.95 * rg2 + 0.05 * (g**2)) for rg2, g in zip(running_grads2, grads, strict=True)]
    f_grad_shared = theano.function([x, mask, y], cost, updates=zgup + rg2up, name="adadelta_f_grad_shared")
    updir = [
        -T.sqrt(ru2 + 1e-6) / T.sqrt(rg2 + 1e-6) * zg
        for zg, ru2, rg2 in zip(zipped_grads, running_up2, running_grads2, strict=True)
    ]
    ru2up = [(ru2, 0.95 * ru2 + 0.05 * (ud**2)) for ru2, ud in zip(running_up2, updir, strict=True)]
    param_up = [(p, p + ud) for p, ud in zip(tparams.values(), updir, strict=True)]
    f_update = theano.function([], [], updates=ru2up + param_up, on_unused_input="ignore", name="adadelta_f_update")
    return f_grad_shared, f_update


def run(steps):
    rng = np.random.RandomState(123)
    tparams = init_params(rng)
    x, mask, y = (
        T.matrix("x", dtype="int64"),
        T.matrix("mask", dtype=theano.config.floatX),
        T.vector("y", dtype="int64"),
    )
    n_timesteps, n_samples = x.shape[0], x.shape[1]
    emb = tparams["Wemb"][x.flatten()].reshape([n_timesteps, n_samples, DIM])
    proj = lstm_layer(tparams, emb, mask)
    proj = (proj * mask[:, :, None]).sum(axis=0)
    proj = proj / mask.sum(axis=0)[:, None]
    pred = T.nnet.softmax(T.dot(proj, tparams["U"]) + tparams["b"])
    cost = -T.log(pred[T.arange(n_samples), y] + 1e-6).mean()
    grads = T.grad(cost, wrt=list(tparams.values()))
    f_grad_shared, f_update = adadelta(tparams, grads, x, mask, y, cost)

    losses = []
    for _ in range(steps):
        words = rng.randint(WORDS, size=(LENGTH, BATCH)).astype("int64")
        mask = numpy_floatX(np.arange(LENGTH)[:, None] < rng.randint(2, LENGTH + 1, size=BATCH))
        losses.append(f_grad_shared(words, mask, (words[0] % 2).astype("int64")))
        f_update()
    return losses
