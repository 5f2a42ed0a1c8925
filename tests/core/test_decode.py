"""Decoding on models small enough to follow by hand: the logits depend on the last token alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from core import UserError
from core.decode import Sampling, draw, sample

GREEDY = Sampling(temperature=0)


def chain(table, starts, keys=None, **kwargs):
    """Samples rows that start from the logits after `starts`; the cache keeps the last tokens."""
    table, starts = jnp.asarray(table), jnp.asarray(starts)

    def step(cache, tokens):
        return {"last": tokens[None]}, table[tokens]

    if keys is None:
        keys = jax.random.split(jax.random.key(0), len(starts))
    run = jax.jit(lambda keys: sample(step, {"last": starts[None]}, table[starts], keys, **kwargs))
    return np.asarray(run(keys))


def counting(size=8):
    """Logits by which each token is followed by its successor."""
    return 5 * np.roll(np.eye(size, dtype=np.float32), 1, axis=1)


def random_table(size=16):
    return np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)


def chances(logits, temperature, top_k, top_p):
    """The slow reference: how likely each token is after the cuts, one at a time."""
    p = np.exp(np.asarray(logits, np.float64) / temperature)
    order = list(np.argsort(-p))
    for token in order[top_k:] if top_k else []:
        p[token] = 0
    p /= p.sum()
    total, kept = 0.0, np.zeros_like(p)
    for token in order:
        if total < top_p:
            kept[token] = p[token]
        total += p[token]
    return kept / kept.sum()


def test_greedy_takes_the_likeliest():
    table = random_table()
    tokens = chain(table, [3, 7], length=6, sampling=GREEDY)
    for row, last in enumerate([3, 7]):
        for t in range(6):
            last = table[last].argmax()
            assert tokens[row, t] == last
    assert tokens.dtype == np.int32


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(1, 0, 1), (0.5, 0, 1), (2, 0, 1), (1, 3, 1), (0.7, 0, 0.8), (1.5, 5, 0.6), (1, 99, 0.999)],
)
def test_frequencies_match_a_slow_reference(temperature, top_k, top_p):
    logits = random_table()[0]
    keys = jax.random.split(jax.random.key(1), 20_000)
    sampling = Sampling(temperature, top_k, top_p)
    tokens = jax.jit(lambda rows, keys: draw(rows, keys, sampling))(
        jnp.tile(logits[None], (len(keys), 1)), keys
    )
    got = np.bincount(tokens, minlength=len(logits)) / len(keys)
    want = chances(logits, temperature, top_k, top_p)
    assert (got[want == 0] == 0).all()
    # Four standard deviations of a frequency.
    assert (np.abs(got - want) < 4 * np.sqrt(want * (1 - want) / len(keys)) + 1e-9).all()


@pytest.mark.parametrize("top_p, kept", [(0.01, 1), (0.5, 1), (0.51, 2), (0.8, 3), (0.96, 4)])
def test_top_p_keeps_the_token_that_crosses(top_p, kept):
    logits = jnp.log(jnp.array([0.125, 0.5, 0.125, 0.25]))  # in order: 1, 3, then 0 and 2
    keys = jax.random.split(jax.random.key(0), 400)
    tokens = draw(jnp.tile(logits[None], (400, 1)), keys, Sampling(top_p=top_p))
    assert set(np.asarray(tokens).tolist()) == set([1, 3, 0, 2][:kept])


def test_ties_do_not_widen_top_k():
    keys = jax.random.split(jax.random.key(0), 100)
    assert set(np.asarray(draw(jnp.zeros((100, 5)), keys, Sampling(top_k=2))).tolist()) == {0, 1}


def test_tiny_temperatures_and_forbidden_tokens_stay_finite():
    logits = jnp.tile(jnp.array([[-jnp.inf, 100.0, 101.0]]), (50, 1))
    keys = jax.random.split(jax.random.key(0), 50)
    assert (draw(logits, keys, Sampling(temperature=1e-37)) == 2).all()
    assert (draw(logits, keys, Sampling(temperature=9, top_p=0.999)) > 0).all()


def test_half_precision_logits_are_drawn_in_single():
    logits = jnp.zeros((4000, 512), jnp.bfloat16)
    tokens = draw(logits, jax.random.split(jax.random.key(0), 4000), Sampling(top_p=0.5))
    assert np.asarray(tokens).max() == 255  # in bfloat16 the sum of chances stops growing


def test_each_token_has_its_own_draw():
    tokens = chain(np.zeros((1000, 1000), np.float32), [0] * 3, length=20, sampling=Sampling())
    assert len(np.unique(tokens)) > 50


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=9, top_p=0.9)])
def test_rows_do_not_depend_on_each_other(sampling):
    table, starts = random_table(), np.arange(6)
    keys = jax.random.split(jax.random.key(5), 6)
    together = chain(table, starts, keys, length=10, sampling=sampling, end=4)
    order = np.array([4, 2, 0, 5, 1, 3])
    shuffled = chain(table, starts[order], keys[order], length=10, sampling=sampling, end=4)
    np.testing.assert_array_equal(shuffled, together[order])
    alone = chain(table, starts[3:4], keys[3:4], length=10, sampling=sampling, end=4)
    np.testing.assert_array_equal(alone, together[3:4])


def test_a_longer_run_begins_with_the_shorter():
    keys = jax.random.split(jax.random.key(5), 3)
    long, short = (
        chain(random_table(), [1, 2, 3], keys, length=n, sampling=Sampling()) for n in (9, 4)
    )
    np.testing.assert_array_equal(long[:, :4], short)


def test_raw_keys_draw_the_same():
    keys = jax.random.split(jax.random.key(5), 3)
    new, old = (
        chain(random_table(), [1, 2, 3], k, length=5, sampling=Sampling())
        for k in (keys, jax.random.key_data(keys))
    )
    np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize(
    "end, want",
    [
        (None, [[1, 2, 3, 4, 5], [4, 5, 6, 7, 0], [6, 7, 0, 1, 2]]),
        (4, [[1, 2, 3, 4, 4], [4, 4, 4, 4, 4], [6, 7, 0, 1, 2]]),
        (0, [[1, 2, 3, 4, 5], [4, 5, 6, 7, 0], [6, 7, 0, 0, 0]]),
        ((3, 5, 7), [[1, 2, 3, 3, 3], [4, 5, 3, 3, 3], [6, 7, 3, 3, 3]]),
    ],
)
def test_a_row_is_filled_after_its_end(end, want):
    tokens = chain(counting(), [0, 3, 5], length=5, sampling=GREEDY, end=end)
    np.testing.assert_array_equal(tokens, want)


@pytest.mark.parametrize("end, steps", [(None, 8), (5, 4), (0, 7)])
def test_the_loop_stops_once_all_rows_have_ended(end, steps):
    table, calls = jnp.asarray(counting()), []

    def step(cache, tokens):
        jax.debug.callback(lambda: calls.append(1))
        return cache, table[tokens]

    starts = jnp.array([0, 3])
    keys = jax.random.split(jax.random.key(0), 2)
    sample(step, {}, table[starts], keys, length=9, sampling=GREEDY, end=end).block_until_ready()
    jax.effects_barrier()
    assert len(calls) == steps  # the first token needs none


def test_one_token_needs_no_step():
    def step(cache, tokens):
        return cache, jnp.full((2, 4), jnp.nan)

    keys = jax.random.split(jax.random.key(0), 2)
    logits = jnp.eye(4)[1:3]
    tokens = sample(step, {}, logits, keys, length=1, sampling=GREEDY)
    np.testing.assert_array_equal(tokens, [[1], [2]])


def test_rows_split_over_devices_draw_the_same():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(2), 8)
    split = jax.device_put(keys, NamedSharding(mesh, P("data")))
    one, eight = (
        chain(random_table(), np.arange(8), k, length=6, sampling=Sampling(top_p=0.9), end=2)
        for k in (keys, split)
    )
    np.testing.assert_array_equal(one, eight)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -0.1}, "temperature -0.1 is out of range: it must be at least 0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": -1}, "top_k -1 is out of range: it must be at least 0"),
        ({"top_p": 0.0}, "top_p 0.0 is out of range: it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p 1.5 is out of range: it must be above 0 and at most 1"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)


def test_nothing_to_draw():
    with pytest.raises(UserError, match="Cannot draw 0 tokens: the length must be at least 1"):
        chain(counting(), [0], length=0, sampling=GREEDY)
