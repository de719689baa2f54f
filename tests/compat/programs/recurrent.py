"""Two recurrent nets: one reads sentences as windows of words, one learns sequences by rows of a shared variable."""

from collections import OrderedDict

import numpy as np
import theano
import theano.tensor as T

WORDS, EMBEDDING, WINDOW, HIDDEN, LABELS = 15, 4, 3, 6, 3


def contextwin(words, win):
    """Return for each word the words around it; -1 pads the ends."""
    padded = win // 2 * [-1] + list(words) + win // 2 * [-1]
    return [padded[i : i + win] for i in range(len(words))]


class Elman:
    def __init__(self, rng):
        def weights(name, *shape):
            value = 0.2 * rng.uniform(-1.0, 1.0, shape)
            return theano.shared(name=name, value=value.astype(theano.config.floatX))

        self.emb = weights("embeddings", WORDS + 1, EMBEDDING)  # the last one for -1
        self.wx, self.wh = weights("wx", EMBEDDING * WINDOW, HIDDEN), weights("wh", HIDDEN, HIDDEN)
        self.w, self.bh = weights("w", HIDDEN, LABELS), weights("bh", HIDDEN)
        self.b, self.h0 = weights("b", LABELS), weights("h0", HIDDEN)
        self.params = [self.emb, self.wx, self.wh, self.w, self.bh, self.b, self.h0]

        idxs = T.imatrix()
        x = self.emb[idxs].reshape((idxs.shape[0], EMBEDDING * WINDOW))
        y_sentence = T.ivector("y_sentence")

        def recurrence(x_t, h_tm1):
            h_t = T.nnet.sigmoid(T.dot(x_t, self.wx) + T.dot(h_tm1, self.wh) + self.bh)
            s_t = T.nnet.softmax(T.dot(h_t, self.w) + self.b)
            return [h_t, s_t]

        [_, s], _ = theano.scan(fn=recurrence, sequences=x, outputs_info=[self.h0, None], n_steps=x.shape[0])
        # Softmax makes a matrix of a vector on Theano, as PyTensor's does not.
        p_y_given_x_sentence = s[:, 0, :] if s.ndim == 3 else s
        y_pred = T.argmax(p_y_given_x_sentence, axis=1)
        lr = T.scalar("lr")
        sentence_nll = -T.mean(T.log(p_y_given_x_sentence)[T.arange(x.shape[0]), y_sentence])
        gradients = T.grad(sentence_nll, self.params)
        updates = OrderedDict((p, p - lr * g) for p, g in zip(self.params, gradients, strict=True))
        self.classify = theano.function(inputs=[idxs], outputs=y_pred)
        self.sentence_train = theano.function(inputs=[idxs, y_sentence, lr], outputs=sentence_nll, updates=updates)
        self.normalize = theano.function(
            inputs=[], updates={self.emb: self.emb / T.sqrt((self.emb**2).sum(axis=1)).dimshuffle(0, "x")}
        )


def train_elman(steps):
    rng = np.random.RandomState(345)
    model = Elman(rng)
    losses = []
    for _ in range(steps):
        words = rng.randint(WORDS, size=6)
        windows = np.asarray(contextwin(words, WINDOW), dtype="int32")
        losses.append(model.sentence_train(windows, (words % LABELS).astype("int32"), 0.3))
        model.normalize()
        assert {0: "B", 1: "I", 2: "O"}[model.classify(windows)[0]] in "BIO"  # predictions are keys
    return losses


def train_on_sequences(steps):
    """A net whose hidden state of the last two steps is fed back, on sequences of shared rows."""
    rng = np.random.RandomState(3)
    count, length, n_in, n_out = 4, 5, 2, 1
    seq = rng.randn(count, length, n_in).astype(theano.config.floatX)
    targets = np.roll(seq[:, :, :1], 2, axis=1)
    seq, targets = theano.shared(seq, borrow=True), theano.shared(targets, borrow=True)

    def weights(*shape):
        return theano.shared(np.asarray(0.4 * rng.uniform(-1, 1, size=shape), dtype=theano.config.floatX))

    W, W_2, W_in, W_out = (
        weights(HIDDEN, HIDDEN),
        weights(HIDDEN, HIDDEN),
        weights(n_in, HIDDEN),
        weights(HIDDEN, n_out),
    )
    h_init = weights(2, HIDDEN)
    params = [W, W_2, W_in, W_out, h_init]
    momenta = [theano.shared(p.get_value() * 0) for p in params]
    x, t, index, lr = T.matrix(), T.matrix(), T.lscalar("index"), T.scalar("lr")

    def step(x_t, h_tm2, h_tm1):
        h_t = T.tanh(T.dot(x_t, W_in) + T.dot(h_tm1, W) + T.dot(h_tm2, W_2))
        return h_t, T.dot(h_t, W_out)

    (_, y_pred), _ = theano.scan(step, sequences=x, outputs_info=[{"initial": h_init, "taps": [-2, -1]}, None])
    cost = T.mean((y_pred - t) ** 2)
    updates = []
    for param, momentum in zip(params, momenta, strict=True):
        change = 0.9 * momentum - lr * T.grad(cost, param)
        updates += [(momentum, change), (param, param + change)]
    train = theano.function([index, lr], cost, updates=updates, givens={x: seq[index], t: targets[index]})
    return [train(step % count, 0.05) for step in range(steps)]


def run(steps):
    return train_elman(steps) + train_on_sequences(steps)
