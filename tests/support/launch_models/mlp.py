"""A ModelClass as Theano-MPI's users write them, without imports of this library."""

import numpy as np
import theano
import theano.tensor as T

from launch_models.data.points import Points_data


class MLP:
    def __init__(self, config):
        self.rank = config["rank"]
        self.size = config["size"]
        self.verbose = config["verbose"]
        self.name = "MLP"
        self.batch_size = 10
        self.n_epochs = config.get("n_epochs", 3)
        self.epoch = 0
        self.current_t = 0
        self.current_v = 0
        self.data = Points_data(self.batch_size)
        floatX = "float32"
        self.x, self.y = T.fmatrix("x"), T.ivector("y")
        # Other values on each rank, unless somebody makes them agree.
        self.w1 = theano.shared(np.random.normal(0, 0.5, (5, 8)).astype(floatX), "w1")
        self.b1 = theano.shared(np.zeros(8, floatX), "b1")
        self.w2 = theano.shared(np.random.normal(0, 0.5, (8, 2)).astype(floatX), "w2")
        self.params = [self.w1, self.b1, self.w2]
        self.shared_lr = theano.shared(np.float32(0.1), "lr")
        out = T.nnet.softmax(T.dot(T.tanh(T.dot(self.x, self.w1) + self.b1), self.w2))
        self.cost = T.nnet.categorical_crossentropy(out, self.y).mean()
        self.error = T.neq(T.argmax(out, axis=1), self.y).mean()

    def compile_iter_fns(self, sync_type="avg"):
        updates = []
        for param, grad in zip(self.params, T.grad(self.cost, self.params)):  # noqa: B905
            velocity = theano.shared(np.zeros_like(param.get_value()))
            new = np.float32(0.9) * velocity - self.shared_lr * grad
            updates += [(velocity, new), (param, param + new)]
        self.train_fn = theano.function([self.x, self.y], [self.cost, self.error], updates=updates)
        self.val_fn = theano.function([self.x, self.y], [self.cost, self.error])

    def train_iter(self, count, recorder):
        if self.current_t == 0:
            self.data.shuffle_data("train", common_seed=self.epoch)
            self.data.shard_data("train", self.rank, self.size)
        recorder.start()
        cost, error = self.train_fn(*self.data.shard[self.current_t])
        recorder.train_error(count, cost, error)
        recorder.end("calc")
        self.current_t = (self.current_t + 1) % self.data.n_batch_train

    def val_iter(self, count, recorder):
        cost, error = self.val_fn(*self.data.val[self.current_v])
        recorder.val_error(count, cost, error, 0.0)
        self.current_v = (self.current_v + 1) % self.data.n_batch_val

    def reset_iter(self, mode):
        self.current_t = self.current_v = 0

    def adjust_hyperp(self, epoch):
        self.shared_lr.set_value(np.float32(self.shared_lr.get_value() * 0.9))

    def cleanup(self):
        pass
