"""Programs in which ranks train a quadratic model by a rule; NumPy computes its gradients."""

import numpy as np

from synkhronos import exchange_rules
from synkhronos.devices import JAX
from synkhronos.exchange_rules import ExchangeState
from synkhronos.exchange_rules.elastic import read_centre
from synkhronos.graph_libraries import get_library


def compute_gradient(problem, rank, step, x):
    """Return the gradient of ½ (x - b)ᵀ diag(h) (x - b).

    ``problem`` is the pair of h and b, each an array of shape (ranks, steps, items): a rank's step has its own.
    """
    h, b = problem
    return h[rank % len(h), step % h.shape[1]] * (x - b[rank % len(b), step % b.shape[1]])


def take_local_step(optimizer, x, v, g, eta):
    """Return x and the velocity after one step of the optimizer "sgd", "momentum", or "scaled", which resembles Adam."""
    if optimizer == "sgd":
        return x - eta * g, v
    if optimizer == "momentum":
        v = 0.9 * v - eta * g
        return x + v, v
    if optimizer == "scaled":
        return x - eta * g / (np.abs(g) + 0.1), v
    raise AssertionError(optimizer)


def make_state(w, v, shared, on_device):
    if on_device:  # as functions in JAX mode do
        for variable in (*w, *v):
            get_library(variable).store_value(
                variable, JAX.from_numpy(np.asarray(get_library(variable).borrow_value(variable)))
            )
    return ExchangeState(w, v, shared)


def train(context, rule, w, v, shared, problem, optimizer, eta, steps, on_device=False):
    """Train; return the vector after each step, the report, the rule's state, and the numbers of exchanges."""
    state = make_state(w, v, shared, on_device)
    state.learning_rate = eta
    rule.setup(context, state)
    trace, numbers = [np.asarray(state.vector)], []
    for step in range(steps):
        x, velocity = take_local_step(
            optimizer, np.asarray(state.vector), np.asarray(state.optimizer.get()),
            compute_gradient(problem, context.number, step, np.asarray(state.vector)), eta,
        )  # fmt: skip
        state.vector = x
        state.optimizer.set(velocity)
        is_due = rule.count_steps_left(state) == 1
        state.step += 1
        state.steps_since_exchange += 1
        if is_due:
            numbers.append((rule.exchange(context, state), step))
            state.steps_since_exchange = 0
        trace.append(np.asarray(state.vector))
    report = np.asarray(rule.compute_consensus(context, state))
    rank_state = {name: np.asarray(value) for name, value in state.own.items()}
    return np.array(trace), report, rank_state, numbers


class MeanRule(exchange_rules.ExchangeRule):
    """Rule without `setup` that moves each rank to the mean."""

    def exchange(self, context, state):
        state.vector = self.compute_mean(context, state)


# rule begins: docs/extending.rst includes the lines from here to "rule ends"
class Halfway(exchange_rules.ExchangeRule):
    """Move each rank halfway to the mean of all ranks, every 5 steps."""

    period = 5

    def exchange(self, context, state):
        state.vector = 0.5 * (state.vector + context.all_reduce(state.vector, "avg"))


# rule ends


def add_and_exchange(context, rule, w, shared, pushes, on_device=False):
    """Add 1 and exchange `pushes` times; return the report."""
    state = make_state(w, [], shared, on_device)
    rule.setup(context, state)
    for _ in range(pushes):
        state.vector = state.vector + 1
        state.step += 1
        rule.exchange(context, state)
    return np.asarray(rule.compute_consensus(context, state))


def send_gossip(context, rule, w, shared, vectors, sends, on_device=False):
    """Send by a list of (source, target), in this order.

    Returns a list of (weight, vector, weight in flight, mailbox) after each send, the report, and the final weight.
    """
    state = make_state(w, [], shared, on_device)
    rule.setup(context, state)
    state.vector = vectors[context.number]
    records = []
    for source, target in sends:
        if context.number == source:
            rule._send(context, state, target)
        context.barrier("sent")
        weight_in_flight, mailbox = (state.shared[name][context.number] for name in ("weights", "mail"))
        records.append((state.own["weight"], np.array(state.vector), weight_in_flight, mailbox.copy()))
        context.barrier("recorded")
    return records, np.asarray(rule.compute_consensus(context, state)), state.own["weight"]


def gossip_without_reception(context, rule, w, shared, vectors, n_sends):
    """Let rank 0 send while the others neither receive nor send, then all receive, and rank 0 sends once more.

    Returns the report, and the final weight.
    """
    state = ExchangeState(w, [], shared)
    rule.setup(context, state)
    state.vector = vectors[context.number]
    for state.step in range(n_sends):
        if context.number == 0:
            rule.exchange(context, state)
    context.barrier("sent")
    if context.number:
        rule._receive(context, state)
    context.barrier("received")
    if context.number == 0:
        rule.exchange(context, state)
    return np.asarray(rule.compute_consensus(context, state)), state.own["weight"]


def exchange_in_turn(context, rule, w, shared, vectors, centre):
    """Let each rank in turn make one elastic exchange; return its vector and the centre."""
    state = ExchangeState(w, [], shared)
    rule.setup(context, state)
    state.vector = vectors[context.number]
    if context.number == 0:
        state.shared["centre"][...] = centre
    for r in range(context.size):
        context.barrier("turn")
        if r == context.number:
            rule.exchange(context, state)
    context.barrier("done")
    return np.array(state.vector), read_centre(context, state)


def double_vector(context, w, on_device):
    """Double the vector; return its old value, the new values of the variables, and the module of the vector's type."""
    state = make_state(w, [], {}, on_device)
    before = np.asarray(state.vector)
    state.vector = 2 * state.vector
    return (
        before,
        [np.asarray(get_library(variable).borrow_value(variable)) for variable in w],
        type(state.vector).__module__,
    )


def average_vectors(context, w, vectors, precision):
    """Return the average of ``vectors[rank]`` that is computed in a precision."""
    from synkhronos.exchange_rules.rule import all_reduce_mean

    return np.asarray(all_reduce_mean(context, vectors[context.number], precision))
