"""Random functions: split as the rules say, they give what they give on one device.

CHAINS=4000 tries as many, instead of 40.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from core import MeshOptions, make_mesh
from core.rules import infer

ROWS, SIZES = 8, (4, 6, 8, 12, 16, 24)


class Chain:
    """A function of parameters and a batch, made of steps that are drawn one by one."""

    def __init__(self, data):
        self.data, self.steps, self.params = data, [], {}
        self.start = self.shape = (ROWS, data.draw(st.sampled_from(SIZES)))
        for _ in range(data.draw(st.integers(2, 6))):
            self.add(data.draw(st.sampled_from(sorted(OPERATIONS))))

    def add(self, name):
        """Adds a step, where the value has the axes for it."""
        step = OPERATIONS[name](self)
        if step is not None:
            params = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in self.params.items()}
            value = jax.ShapeDtypeStruct(self.shape, jnp.float64)
            self.shape = jax.eval_shape(step, params, value).shape
            self.steps.append(step)

    def weight(self, *shape):
        name = f"w{len(self.params)}"
        rng = np.random.default_rng(len(self.params))
        self.params[name] = jnp.asarray(rng.normal(size=shape) / max(1, shape[-1]) ** 0.5)
        return name

    def size(self):
        return self.data.draw(st.sampled_from(SIZES))

    def axis(self, least=1):
        """An axis that is not that of the rows."""
        return self.data.draw(st.integers(least, len(self.shape) - 1))

    def loss(self, params, x):
        for step in self.steps:
            x = step(params, x)
        return jnp.mean(jnp.tanh(x) ** 2)


# Each takes a chain and returns a step (params, x) -> x, or None where it does not fit.


def dense(chain):
    w = chain.weight(chain.shape[-1], chain.size())
    return lambda params, x: jnp.tanh(x @ params[w])


def dense_transposed(chain):
    w = chain.weight(chain.size(), chain.shape[-1])
    return lambda params, x: jnp.einsum("...i,oi->...o", x, params[w])


def residual(chain):
    up = chain.weight(chain.shape[-1], n := chain.size())
    down = chain.weight(n, chain.shape[-1])
    return lambda params, x: x + jax.nn.relu(x @ params[up]) @ params[down]


def scale(chain):
    w = chain.weight(chain.shape[-1])
    return lambda params, x: x * params[w] / (1 + jnp.abs(x).mean(-1, keepdims=True))


def reshape(chain):
    axis, n = chain.axis(), chain.data.draw(st.sampled_from((2, 3, 4)))
    shape = chain.shape
    if shape[axis] % n == 0 and len(shape) < 5:
        new = (*shape[:axis], n, shape[axis] // n, *shape[axis + 1 :])
    elif len(shape) > 2:
        axis = min(axis, len(shape) - 2)
        new = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    else:
        return None
    return lambda params, x: x.reshape(new)


def flatten(chain):
    return lambda params, x: x.reshape(ROWS, -1)


def transpose(chain):
    order = (0, *chain.data.draw(st.permutations(range(1, len(chain.shape)))))
    return lambda params, x: x.transpose(order)


def split(chain):
    axis = chain.axis()
    if chain.shape[axis] % 2:
        return None
    return lambda params, x: jnp.multiply(*jnp.split(x, 2, axis))


def cut(chain):
    axis = chain.axis()
    n = chain.data.draw(st.integers(1, chain.shape[axis]))
    return lambda params, x: lax.slice_in_dim(x, 0, n, axis=axis)


def concatenate(chain):
    axis = chain.axis()
    if np.prod(chain.shape) > 2000:
        return None
    return lambda params, x: jnp.concatenate([x, jnp.sin(x)], axis)


def scan(chain):
    w = chain.weight(3, chain.shape[-1], chain.shape[-1])
    remat = chain.data.draw(st.booleans())

    def step(params, x):
        body = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return lax.scan(jax.checkpoint(body) if remat else body, x, params[w])[0]

    return step


def gather(chain):
    table = chain.weight(chain.size(), chain.shape[-1])

    def step(params, x):
        number = params[table].shape[0]
        index = (jnp.abs(lax.stop_gradient(x[..., 0])) * 7).astype(int) % number
        return x + params[table][index]

    return step


def attention(chain):
    heads, size = chain.data.draw(st.sampled_from(((2, 4), (4, 2), (4, 3), (8, 2))))
    if len(chain.shape) != 3:
        return None
    d = chain.shape[-1]
    q, k, v = (chain.weight(d, heads * size) for _ in range(3))
    o = chain.weight(heads * size, d)

    def step(params, x):
        parts = (jnp.einsum("bti,io->bto", x, params[w]) for w in (q, k, v))
        a, b, c = (part.reshape(*x.shape[:2], heads, size) for part in parts)
        scores = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", a, b), -1)
        out = jnp.einsum("bhqk,bkhe->bqhe", scores, c).reshape(*x.shape[:2], heads * size)
        return x + out @ params[o]

    return step


def reduce(chain):
    axis = chain.axis()
    return (lambda params, x: x.sum(axis)) if len(chain.shape) > 2 else None


def cumulative(chain):
    axis = chain.axis()
    return lambda params, x: jnp.cumsum(x, axis) / x.shape[axis]


def ordered(chain):
    axis = chain.axis()
    return lambda params, x: jnp.sort(x, axis)


OPERATIONS = {
    fn.__name__: fn
    for fn in (dense, dense_transposed, residual, scale, reshape, flatten, transpose, split, cut)
} | {fn.__name__: fn for fn in (concatenate, scan, gather, attention, reduce, cumulative, ordered)}


@pytest.fixture(autouse=True)
def as_others_write():
    with jax.numpy_rank_promotion("allow"):
        yield


@settings(
    max_examples=int(os.environ.get("CHAINS", "40")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data(), sizes=st.sampled_from(((4, 1, 2), (2, 2, 2), (8, 1, 1), (2, 4, 1))))
def test_random_function_split_by_the_rules_gives_the_same(data, sizes, x64):
    chain = Chain(data)
    if not chain.params:
        return
    tensor, fsdp, rows = sizes
    mesh = make_mesh(MeshOptions(tensor=tensor, fsdp=fsdp, data=rows))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=chain.start))
    fn = jax.value_and_grad(chain.loss)
    found = infer(fn, chain.params, x, mesh)
    assert not found.factors.failed and not found.factors.unknown
    shardings = {name: NamedSharding(mesh, spec) for name, spec in found.specs.items()}
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    split_fn = jax.jit(fn, in_shardings=(shardings, rows), out_shardings=(None, shardings))
    (loss, grads), (other, others) = jax.jit(fn)(chain.params, x), split_fn(chain.params, x)
    np.testing.assert_allclose(other, loss, rtol=1e-10)
    largest = max(float(jnp.abs(g).max()) for g in grads.values())
    for name, grad in grads.items():
        np.testing.assert_allclose(others[name], grad, rtol=0, atol=1e-10 * max(largest, 1e-3))
