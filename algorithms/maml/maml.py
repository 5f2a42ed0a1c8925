"""Model-agnostic meta-learning: initial weights from which a few steps learn a new task.

Finn et al. 2017 (arXiv 1703.03400), algorithm 2. With the loss S of a task's support set and Q of
its query set, the inner steps t_0 = t, t_k+1 = t_k - a dS(t_k), and the meta-loss is Q(t_K), whose
gradient with respect to t goes through the steps: second-order, exact. First-order leaves out the
derivative of the inner gradients, as in section 5.2 of the paper.

A row is a task. Shapes: B tasks, S support and Q query examples of each, [...] of an example.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from core import Loss, at_least_float32
from core.step import floating, merged

INPUTS = ("support_x", "support_y", "query_x")


def collate(examples):
    """Tasks to arrays: support_x [B, S, ...], support_y [B, S, ...], query_x and query_y."""
    return {name: np.stack([task[name] for task in examples]) for name in examples[0]}


def loss(params, batch, key, *, model, objective, learner):
    """The mean loss of the queries of each task after learning from its support set, [B].

    Args:
      objective: (answers, targets) -> values [N], metrics {name: [N]}.
      learner: (support loss, params) -> params, `adapt` with its settings bound.
    """

    def of_task(task):
        return objective(_answers(params, task, model, objective, learner), task["query_y"])

    values, metrics = jax.vmap(of_task)({name: batch[name] for name in (*INPUTS, "query_y")})
    return Loss(jnp.mean(values, 1), None, {k: jnp.mean(x, 1) for k, x in metrics.items()})


def predict(params, batch, keys, *, model, objective, learner):
    """The answers [B, Q, ...] to the queries of each task after learning from its support set."""

    def of_task(task):
        return _answers(params, task, model, objective, learner)

    return jax.vmap(of_task)({name: batch[name] for name in INPUTS})


def adapt(loss, params, optimizer, steps, first_order=False, remat=False):
    """Parameters after some steps of an optimizer down a loss, differentiable in `params`.

    Args:
      loss: params -> scalar.
      params: a pytree; its floating-point leaves learn. Steps are done in single precision at
        least, so that small ones are not lost; the loss sees the parameters in their own types.
      optimizer: an optax transformation, such as `optax.sgd(0.4)`; its state starts anew.
      steps: how many; 0 gives back the parameters.
      first_order: let no derivative through the gradients of the steps.
      remat: keep only the parameters of each step for the backward pass and compute the rest again,
        which takes a little more time, and memory that hardly grows with the steps.
    """

    def whole(trained):
        typed = jax.tree.map(lambda new, old: new.astype(old.dtype), trained, floating(params))
        return merged(params, typed)

    def step(carry, _):
        trained, state = carry
        grads = jax.grad(lambda trained: loss(whole(trained)))(trained)
        if first_order:
            grads = jax.lax.stop_gradient(grads)
        updates, state = optimizer.update(grads, state, trained)
        return (optax.apply_updates(trained, updates), state), None

    _name_unused(loss, params)
    if remat:
        step = jax.checkpoint(step, prevent_cse=False)
    trained = jax.tree.map(at_least_float32, floating(params))
    (trained, _), _ = jax.lax.scan(step, (trained, optimizer.init(trained)), length=steps)
    return whole(trained)


def classification(logits, labels):
    """Cross-entropy [N] in nats of logits [N, ways], and whether the likeliest is right."""
    values = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = jnp.argmax(logits, 1) == labels
    return values, {"accuracy": right.astype(values.dtype)}


def regression(answers, targets):
    """Squared error [N] of answers [N, 1]."""
    return jnp.square(answers - targets)[:, 0], {}


def _answers(params, task, model, objective, learner):
    """Answers [Q, ...] to the queries of one task."""

    def support_loss(params):
        answers = nnx.merge(model, params)(task["support_x"])
        return jnp.mean(objective(answers, task["support_y"])[0])

    learnt = learner(support_loss, params)
    return nnx.merge(model, learnt)(task["query_x"], task["support_x"])


def _name_unused(loss, params):
    """Warns, once for the same ones, of parameters that a loss does not read."""
    jaxpr = jax.make_jaxpr(loss)(params).jaxpr
    read = {id(x) for equation in jaxpr.eqns for x in equation.invars}
    paths = jax.tree_util.tree_leaves_with_path(params)
    unused = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    unused = [name for name, x in zip(unused, jaxpr.invars, strict=True) if id(x) not in read]
    if unused:
        warnings.warn(f"Inner steps leave {', '.join(unused)} alone: not used", stacklevel=2)
