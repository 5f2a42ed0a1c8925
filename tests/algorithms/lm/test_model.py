"""The decoder against slow references, against itself, and against its promises of dtype."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from algorithms.lm import model as lm_model
from algorithms.lm.model import ModelConfig, attention, causal_attention, dropout, rotate
from core import UserError
from core.decode import Sampling, sample

SMALL = ModelConfig(layers=2, dim=24, heads=6, kv_heads=2, hidden=20, rope_theta=100.0)
VOCAB = 17


def make(config=SMALL, vocab=VOCAB):
    """A decoder's structure, and parameters of which none is left at one or nearly zero."""
    structure, init = lm_model.build(config, vocab)
    shapes = jax.eval_shape(init, jax.random.key(0))
    rng = np.random.default_rng(0)

    def values(leaf):
        scale = 1 if leaf.shape[0] == vocab else leaf.shape[-2] ** -0.5
        return jnp.asarray(rng.normal(size=leaf.shape) * scale)

    params = jax.tree.map(values, {k: v for k, v in shapes.items() if k != "norm"})
    params["norm"] = jnp.asarray(rng.uniform(0.5, 1.5, config.dim))
    for name in ("attention_norm", "mlp_norm"):
        params["layers"][name] = jnp.asarray(rng.uniform(0.5, 1.5, (config.layers, config.dim)))
    return structure, params


def tokens_of(batch, length, seed=0, vocab=VOCAB):
    return np.random.default_rng(seed).integers(0, vocab, (batch, length)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def apply(structure, params, tokens, key=None):
    return nnx.merge(structure, params)(tokens, key)


@functools.partial(jax.jit, static_argnums=(0, 3))
def prefill(structure, params, tokens, size, lengths):
    return nnx.merge(structure, params).prefill(tokens, lengths, size)


@functools.partial(jax.jit, static_argnums=0)
def step(structure, params, cache, tokens):
    return nnx.merge(structure, params).step(cache, tokens)


@functools.partial(jax.jit, static_argnums=0)
def mean_loss(structure, params, tokens, key=None):
    logits = nnx.merge(structure, params)(tokens[:, :-1], key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def slow_logits(params, tokens, config):
    """[T, V] for tokens [T]: one head, one position at a time."""

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def turn(x, position):
        out, size = np.empty_like(x), len(x)
        for i in range(size // 2):
            turned = complex(x[i], x[i + size // 2]) * np.exp(
                1j * position * config.rope_theta ** (-2 * i / size)
            )
            out[i], out[i + size // 2] = turned.real, turned.imag
        return out

    size, group = config.dim // config.heads, config.heads // config.kv_heads
    x = params["embedding"][tokens]
    for index in range(config.layers):
        layer = {name: leaf[index] for name, leaf in params["layers"].items()}
        h = norm(x, layer["attention_norm"])
        q, k, v = (h @ layer[name] for name in "qkv")
        out = np.zeros_like(x)
        for head in range(config.heads):
            mine = slice(head * size, (head + 1) * size)
            its = slice(head // group * size, (head // group + 1) * size)
            for t in range(len(tokens)):
                query = turn(q[t, mine], t)
                keys = [turn(k[s, its], s) for s in range(t + 1)]
                weights = softmax(np.array([query @ key for key in keys]) / math.sqrt(size))
                out[t, mine] = weights @ v[: t + 1, its]
        x = x + out @ layer["o"]
        h = norm(x, layer["mlp_norm"])
        gate = h @ layer["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"])) @ layer["down"]
    head = params["embedding"].T if config.tied else params["head"]
    return norm(x, params["norm"]) @ head


@pytest.mark.parametrize(
    "change", [{}, {"tied": True}, {"kv_heads": 6}, {"kv_heads": 1}, {"unroll": True}], ids=str
)
def test_logits_equal_a_slow_reference(x64, change):
    config = dataclasses.replace(SMALL, **change)
    structure, params = make(config)
    tokens = tokens_of(2, 9)
    logits = apply(structure, params, tokens)
    for row in range(2):
        want = slow_logits(jax.tree.map(np.asarray, params), tokens[row], config)
        np.testing.assert_allclose(logits[row], want, rtol=0, atol=1e-12)


def test_parameters_are_a_plain_dict_stacked_over_layers():
    structure, init = lm_model.build(SMALL, VOCAB)
    shapes = jax.tree.map(jnp.shape, init(jax.random.key(0)))
    assert shapes == {
        "embedding": (17, 24),
        "layers": {
            "attention_norm": (2, 24),
            "q": (2, 24, 24),
            "k": (2, 24, 8),
            "v": (2, 24, 8),
            "o": (2, 24, 24),
            "mlp_norm": (2, 24),
            "gate": (2, 24, 20),
            "up": (2, 24, 20),
            "down": (2, 20, 24),
        },
        "norm": (24,),
        "head": (24, 17),
    }
    _, state = nnx.split(lm_model.Decoder(SMALL, VOCAB, rngs=nnx.Rngs(jax.random.key(0))))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(state), init(jax.random.key(0)))
    assert "head" not in lm_model.build(dataclasses.replace(SMALL, tied=True), VOCAB)[1](
        jax.random.key(0)
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_new_model_knows_next_to_nothing(tied):
    structure, init = lm_model.build(ModelConfig(layers=8, dim=96, hidden=64, tied=tied), 256)
    loss = mean_loss(structure, jax.jit(init)(jax.random.key(0)), tokens_of(4, 33, vocab=256))
    assert abs(loss - math.log(256)) < 0.8


def test_uniform_logits_cost_log_of_the_vocabulary():
    structure, params = make()
    params["head"] *= 0
    np.testing.assert_allclose(
        mean_loss(structure, params, tokens_of(2, 9)), math.log(VOCAB), rtol=1e-6
    )


def test_rotation_by_hand():
    # Size 4: the pairs are (0, 2), turned by the position, and (1, 3), by a hundredth of it.
    x = jnp.array([[[[1.0, 1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0, 2.0]]]])  # [1, 2, 1, 4]
    turned = rotate(x, jnp.array([[0, 3]]), 10_000.0)
    c, s, c2, s2 = math.cos(3), math.sin(3), math.cos(0.03), math.sin(0.03)
    want = [[[[1, 1, 0, 0]], [[-s, -2 * s2, c, 2 * c2]]]]
    np.testing.assert_allclose(turned, want, rtol=0, atol=1e-6)


def test_rotated_products_depend_on_distance_alone(x64):
    x = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))
    dots = [jnp.vdot(*rotate(x, jnp.array([[at], [at + 5]]), 10_000.0)) for at in (0, 1, 70)]
    np.testing.assert_allclose(dots, [dots[0]] * 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 64, 65, 150, 300])
def test_blocks_of_queries_equal_the_whole(x64, length):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, length, heads, 2)) for heads in (4, 2, 2))
    mask = np.tril(np.ones((1, length, length), bool))
    whole = jax.jit(attention)(q, k, v, mask)
    np.testing.assert_allclose(jax.jit(causal_attention)(q, k, v), whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "dtype, head, fused",
    [
        (jnp.bfloat16, 64, True),
        (jnp.float32, 64, False),
        (jnp.bfloat16, 36, False),
        (jnp.bfloat16, 256, False),
    ],
)
def test_a_gpu_takes_the_fused_kernel_in_half_precision(monkeypatch, dtype, head, fused):
    def kernel(q, k, v, **options):
        assert options == {"is_causal": True, "implementation": "cudnn"}
        return jnp.full_like(q, 7)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    q = jnp.ones((1, 3, 2, head), dtype)
    assert (causal_attention(q, q, q) == (7 if fused else 1)).all()


def test_later_tokens_do_not_change_earlier_logits(x64):
    structure, params = make()
    tokens = tokens_of(1, 140)
    before = np.asarray(apply(structure, params, tokens))
    for position in (0, 70, 139):
        changed = tokens.copy()
        changed[0, position] = (changed[0, position] + 1) % VOCAB
        difference = np.abs(apply(structure, params, changed) - before).max((0, 2))
        assert (difference[:position] == 0).all()
        assert (difference[position:] > 0).all()


def feed(structure, params, tokens, lengths, size, forced):
    """The last cache, and logits [B, 1 + steps, V] after the prompts and each forced token."""
    cache, first = prefill(structure, params, tokens, size, lengths)
    logits = [first]
    for following in forced.T:
        cache, after = step(structure, params, cache, following)
        logits.append(after)
    return cache, np.stack(logits, axis=1)


@pytest.mark.parametrize("unroll", [False, True])
def test_cached_equals_uncached(x64, unroll):
    structure, params = make(dataclasses.replace(SMALL, unroll=unroll))
    lengths, tokens, forced = np.array([3, 9, 1]), tokens_of(3, 9), tokens_of(3, 6, seed=1)
    cache, logits = feed(structure, params, tokens, lengths, 15, forced)
    np.testing.assert_array_equal(cache["index"], [lengths + 6])
    for row, length in enumerate(lengths):
        line = np.concatenate([tokens[row, :length], forced[row]])[None]
        want = apply(structure, params, line)[0, length - 1 :]
        np.testing.assert_allclose(logits[row], want, rtol=0, atol=1e-12)


def test_the_batch_is_axis_1_of_every_leaf_of_a_cache(x64):
    structure, params = make()
    lengths, order = np.array([4, 2, 3]), np.array([2, 0, 0])
    cache, _ = prefill(structure, params, tokens_of(3, 4), 6, lengths)
    assert {leaf.shape[1] for leaf in jax.tree.leaves(cache)} == {3}
    assert cache["k"].shape == cache["v"].shape == (2, 3, 6, 2, 4)
    following = np.array([5, 6, 7])
    _, logits = step(structure, params, cache, following)
    chosen = jax.tree.map(lambda leaf: np.asarray(leaf)[:, order], cache)
    _, reordered = step(structure, params, chosen, following[order])
    np.testing.assert_allclose(reordered, logits[order], rtol=0, atol=1e-13)


def test_what_pads_a_prompt_changes_nothing():
    structure, params = make()
    tokens, forced = tokens_of(1, 9), tokens_of(1, 8, seed=1)
    changed = tokens.copy()
    changed[0, 3:] = (changed[0, 3:] + 1) % VOCAB
    one, two = (feed(structure, params, t, np.array([3]), 20, forced)[1] for t in (tokens, changed))
    np.testing.assert_array_equal(one, two)


@functools.partial(jax.jit, static_argnums=(0, 5))
def generate(structure, params, tokens, lengths, keys, length):
    decoder = nnx.merge(structure, params)
    cache, logits = decoder.prefill(tokens, lengths, tokens.shape[1] + length - 1)
    sampling = Sampling(temperature=0.9, top_p=0.95)
    return sample(decoder.step, cache, logits, keys, length=length, sampling=sampling, end=0)


def test_prompts_of_two_lengths_continue_as_one_by_one(x64):
    structure, params = make()
    tokens, lengths, keys = tokens_of(2, 9), np.array([3, 9]), jax.random.split(jax.random.key(3))
    together = generate(structure, params, tokens, lengths, keys, 12)
    assert len(np.unique(together)) > 4
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        prompt = tokens[one, :length]
        alone = generate(structure, params, prompt, lengths[one], keys[one], 12)
        np.testing.assert_array_equal(alone, together[one])


def test_continuations_depend_on_neither_batch_size_nor_order(x64):
    structure, params = make()
    tokens, lengths = tokens_of(8, 5), np.arange(8) % 5 + 1
    keys = jax.random.split(jax.random.key(3), 8)
    all_rows = generate(structure, params, tokens, lengths, keys, 10)
    order = np.array([6, 1, 4])
    some = generate(structure, params, tokens[order], lengths[order], keys[order], 10)
    np.testing.assert_array_equal(some, all_rows[order])


def test_layouts_of_the_layers_give_the_same_gradients(x64):
    results = []
    for unroll, remat in ((False, False), (True, False), (False, True)):
        structure, params = make(
            dataclasses.replace(SMALL, dropout=0.1, unroll=unroll, remat=remat)
        )
        grad = jax.value_and_grad(functools.partial(mean_loss, structure))
        results.append(grad(params, tokens_of(2, 9), jax.random.key(5)))
    for result in results[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), result, results[0]
        )


def saved(config, tokens):
    """Shapes of what the forward pass keeps for the backward pass, parameters apart."""
    structure, params = make(config)
    _, backward = jax.vjp(lambda p: mean_loss(structure, p, tokens), params)
    own = {leaf.shape for leaf in jax.tree.leaves(params)}
    return [leaf.shape for leaf in jax.tree.leaves(backward) if leaf.shape not in own]


def test_the_backward_pass_keeps_no_attention_weights_and_with_remat_only_inputs():
    batch, length = 3, 37
    tokens = tokens_of(batch, length + 1)
    kept = saved(SMALL, tokens)
    assert (2, batch * length, SMALL.hidden) in kept  # gate and up, [L, N, hidden]
    assert not any(len(shape) > 2 and shape[-1] == length for shape in kept)
    kept = saved(dataclasses.replace(SMALL, remat=True), tokens)
    assert [shape for shape in kept if len(shape) > 2 and shape[0] == 2] == [
        (2, batch * length, SMALL.dim)
    ]


def test_the_layers_enter_the_scan_as_scanned_inputs():
    structure, params = make()
    jaxpr = jax.make_jaxpr(lambda p: nnx.merge(structure, p)(tokens_of(2, 3)))(params)
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    fixed = scan.params["num_consts"] + scan.params["num_carry"]
    scanned = [v.aval.shape for v in scan.invars[fixed:]]
    assert sorted(scanned) == sorted(leaf.shape for leaf in params["layers"].values())


def test_dropout():
    x = jnp.ones((100, 1000))
    key = jax.random.key(0)
    out = dropout(x, 0.25, key, 0)
    np.testing.assert_allclose(np.unique(out), [0, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose((out == 0).mean(), 0.25, atol=0.01)
    assert (dropout(x, 0.25, key, 1) != out).any()
    assert dropout(x, 0.25, None, 0) is x
    assert dropout(x, 0.0, key, 0) is x


def test_a_key_turns_dropout_on():
    structure, params = make(dataclasses.replace(SMALL, dropout=0.3))
    tokens = tokens_of(2, 9)
    plain = apply(*make(), tokens)
    np.testing.assert_array_equal(apply(structure, params, tokens), plain)
    first, again, second = (apply(structure, params, tokens, jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (jnp.abs(first - second).max(-1) > 0).all()
    assert (jnp.abs(first - plain).max(-1) > 0).all()


def test_every_site_of_dropout_has_its_own_mask(monkeypatch):
    masks = []

    def spy(x, rate, key, use):
        out = dropout(jnp.ones_like(x), rate, key, use)
        jax.debug.callback(lambda mask: masks.append(np.asarray(mask).tobytes()), out)
        return x

    monkeypatch.setattr(lm_model, "dropout", spy)
    structure, params = make(dataclasses.replace(SMALL, dropout=0.5))
    nnx.merge(structure, params)(tokens_of(2, 9), jax.random.key(0)).block_until_ready()
    jax.effects_barrier()
    assert len(masks) == len(set(masks)) == 1 + 2 * SMALL.layers


def test_half_precision(x64):
    structure, params = make()
    tokens = tokens_of(2, 70)
    exact = apply(structure, params, tokens)
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    logits = apply(structure, half, tokens)
    assert logits.dtype == jnp.float32
    assert jnp.abs(logits - exact).max() < 0.03 * jnp.abs(exact).max()
    # What the products do not round is not rounded: logits are no multiples of bfloat16's steps.
    assert (logits.astype(jnp.bfloat16).astype(jnp.float32) != logits).mean() > 0.9
    cache, first = prefill(structure, half, tokens, 71, np.array([70, 3]))
    assert cache["k"].dtype == jnp.bfloat16
    _, second = step(structure, half, cache, tokens[:, 0])
    assert first.dtype == second.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_parts_in_half_precision_are_rounded_once(dtype):
    """Norm and rotation of half-precision inputs are the single-precision ones, rounded."""
    x = jax.random.normal(jax.random.key(0), (1, 64, 2, 8), dtype) * 30
    positions = jnp.arange(64)[None] + 3000
    wide = rotate(x.astype(jnp.float32), positions, 1e4)
    np.testing.assert_array_equal(rotate(x, positions, 1e4), wide.astype(dtype))
    x, scale = x.reshape(-1, 8) * 30, jnp.full(8, 1.1, dtype)  # squares overflow float16
    wide = lm_model.rms_norm(x.astype(jnp.float32), scale.astype(jnp.float32))
    np.testing.assert_array_equal(lm_model.rms_norm(x, scale), wide.astype(dtype))


def test_large_scores_in_half_precision_keep_their_differences():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 16, 1, 64)), jnp.bfloat16) for _ in range(3))
    q *= 8  # scores of about 10, whose bfloat16 neighbours are 0.06 apart
    mask = jnp.ones((1, 16, 16), bool)
    wide = attention(*(x.astype(jnp.float32) for x in (q, k, v)), mask)
    # Half a step of bfloat16 for the weights, and for the result.
    np.testing.assert_allclose(attention(q, k, v, mask), wide, rtol=0, atol=0.015)


def test_no_dtype_is_promoted_in_passing():
    structure, params = make(dataclasses.replace(SMALL, dropout=0.1))

    def run(tokens, lengths):
        decoder = nnx.merge(structure, params)
        cache, _ = decoder.prefill(tokens, lengths, 9)
        return decoder(tokens, jax.random.key(0)), decoder.step(cache, tokens[:, 0])

    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(run, tokens_of(2, 9), np.array([2, 5], np.int32))


def test_rows_split_over_devices_move_no_data(x64):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    structure, params = make()
    tokens, lengths = tokens_of(8, 6), np.arange(8) % 6 + 1

    def run(params, tokens, lengths):
        decoder = nnx.merge(structure, params)
        cache, first = decoder.prefill(tokens, lengths, 7)
        return decoder(tokens), first, decoder.step(cache, tokens[:, 0])[1]

    split = jax.jit(run, in_shardings=(NamedSharding(mesh, P()), rows, rows), out_shardings=rows)
    text = split.lower(params, tokens, lengths).compile().as_text()
    assert not any(f" {op}" in text for op in ("all-", "collective-", "reduce-scatter"))
    for one, eight in zip(
        jax.jit(run)(params, tokens, lengths), split(params, tokens, lengths), strict=True
    ):
        np.testing.assert_allclose(one, eight, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dim": 190}, "dim 190 is not a multiple of 12, .* of 6 heads .*; use 180 or 192"),
        ({"dim": 18}, "dim 18 .* use 12 or 24"),
        ({"kv_heads": 4}, "heads 6 is not a multiple of kv_heads 4; use 4 or 8"),
        ({"kv_heads": 8}, "heads 6 is not a multiple of kv_heads 8; use 8"),
        ({"dim": 100, "kv_heads": 4}, r"dim 100 .* use 96 or 108\. heads 6 .* use 4 or 8\."),
        ({"layers": 0}, "layers 0 is out of range: it must be at least 1"),
        ({"kv_heads": 0}, "kv_heads 0 is out of range"),
        ({"dropout": 1.0}, "dropout 1.0 is out of range: it must be at least 0 and below 1"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**({"dim": 192, "heads": 6} | options))


def test_a_cache_too_small_for_the_prompts():
    structure, params = make()
    with pytest.raises(UserError, match="A cache of 4 positions does not hold prompts of 5"):
        nnx.merge(structure, params).prefill(tokens_of(1, 5), np.array([5]), 4)
