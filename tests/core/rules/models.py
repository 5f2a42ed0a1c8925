"""Small models of many families, as plain functions of a dict of arrays, to read shardings from.

A model is a `Model`: shapes of parameters by path, the shapes of its batch, and its loss. All sizes
differ where they can, so that no two dimensions are taken for one another by their size.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Rows, time, width, heads, size of a head, hidden units, vocabulary, layers, experts.
B, T, D, H, E, F, V, L, X = 8, 12, 24, 8, 5, 64, 96, 2, 16


@dataclasses.dataclass(frozen=True)
class Model:
    shapes: dict[str, Any]
    """Of the parameters, nested."""
    batch: dict[str, tuple[tuple[int, ...], Any]]
    """Shapes and types; integers are drawn below V."""
    loss: Callable[[Any, Any, Any], jax.Array]
    """(params, batch, key) -> scalar."""

    def params(self, dtype=jnp.float32):
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, dtype), self.shapes, is_leaf=_is_shape
        )

    def draw(self, dtype):
        """Parameters and a batch, small enough that nothing saturates."""
        rng = np.random.default_rng(0)

        def leaf(shape):
            scale = 0.5 / max(1.0, float(shape[-2] if len(shape) > 1 else 1)) ** 0.5
            return jnp.asarray(rng.normal(scale=scale, size=shape) + (len(shape) == 1), dtype)

        batch = {
            name: rng.integers(0, V, shape) if kind == jnp.int32 else rng.normal(size=shape)
            for name, (shape, kind) in self.batch.items()
        }
        batch = {
            name: jnp.asarray(x, jnp.int32 if self.batch[name][1] == jnp.int32 else dtype)
            for name, x in batch.items()
        }
        return jax.tree.map(leaf, self.shapes, is_leaf=_is_shape), batch

    def batch_shapes(self, dtype=jnp.float32):
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.int32 if kind == jnp.int32 else dtype)
            for name, (shape, kind) in self.batch.items()
        }


def _is_shape(x):
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


TOKENS = {"x": ((B, T), jnp.int32), "y": ((B, T), jnp.int32)}
PAIRS = {"source": ((B, T + 2), jnp.int32)} | TOKENS


def cross_entropy(logits, labels):
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def dropout(x, key, rate=0.1):
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def rms(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer_norm(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale + bias


def rotate(x):
    """Rotary positions on x [B, T, H, E] with an even E; the last feature of an odd one stays."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=x.dtype)[:, None] / (10 ** jnp.arange(half, dtype=x.dtype))
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


def attend(q, k, v, causal=True, bias=None):
    """q [B, T, H, E], k and v [B, S, H, E] -> [B, T, H, E]."""
    scores = jnp.einsum("bqhe,bshe->bhqs", q, k) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(mask[None, None], scores, -1e9)
    return jnp.einsum("bhqs,bshe->bqhe", jax.nn.softmax(scores, -1), v)


def self_attention(p, x, heads=H, kv=H, rope=False, causal=True, how="grouped", memory=None):
    """Separate q, k, v and o; grouped heads in one of the ways that models do it."""
    rows, time, _ = x.shape
    memory = x if memory is None else memory
    q = linear(p, "q", x).reshape(rows, time, heads, -1)
    k = linear(p, "k", memory).reshape(rows, memory.shape[1], kv, -1)
    v = linear(p, "v", memory).reshape(rows, memory.shape[1], kv, -1)
    if rope:
        q, k = rotate(q), rotate(k)
    if how == "jax":
        out = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    elif how == "repeated" or heads == kv:
        out = attend(q, *(jnp.repeat(a, heads // kv, axis=2) for a in (k, v)), causal)
    else:
        q = q.reshape(rows, time, kv, heads // kv, -1)
        scores = jnp.einsum("bqkge,bske->bkgqs", q, k) / q.shape[-1] ** 0.5
        mask = jnp.tril(jnp.ones((time, time), bool))
        scores = jax.nn.softmax(jnp.where(mask[None, None, None], scores, -1e9), -1)
        out = jnp.einsum("bkgqs,bske->bqkge", scores, v)
    return linear(p, "o", out.reshape(rows, time, -1))


def linear(p, name, x):
    """x times a weight, in either layout, and its bias where there is one."""
    w = p[name].T if p.get("transposed") else p[name]
    y = x @ w
    return y + p[name + "_bias"] if name + "_bias" in p else y


def attention_shapes(heads=H, kv=H, bias=False, width=D, size=E):
    sizes = {"q": heads * size, "k": kv * size, "v": kv * size, "o": width}
    shapes = {name: (width, n) for name, n in sizes.items()} | {"o": (heads * size, width)}
    return shapes | ({f"{name}_bias": (n,) for name, n in sizes.items()} if bias else {})


def gated(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def plain_mlp(p, x):
    return linear(p, "down", jax.nn.gelu(linear(p, "up", x)))


MLP = {"up": (D, F), "up_bias": (F,), "down": (F, D), "down_bias": (D,)}
GATED = {"gate": (D, F), "up": (D, F), "down": (F, D)}
NORMS = {"norm1": (D,), "norm2": (D,)}
LAYER_NORMS = {f"norm{i}{part}": (D,) for i in (1, 2) for part in ("", "_bias")}


def norm(p, i, x):
    if f"norm{i}_bias" in p:
        return layer_norm(x, p[f"norm{i}"], p[f"norm{i}_bias"])
    return rms(x, p[f"norm{i}"])


def block(p, x, key, attention, mlp, shape="pre"):
    """A layer: normalised before (pre) or after (post), or its parts side by side (parallel)."""
    keys = (None, None) if key is None else jax.random.split(key)
    if shape == "parallel":
        h = norm(p, 1, x)
        return x + dropout(attention(p, h) + mlp(p, h), keys[0])
    if shape == "post":
        x = norm(p, 1, x + dropout(attention(p, x), keys[0]))
        return norm(p, 2, x + dropout(mlp(p, x), keys[1]))
    x = x + dropout(attention(p, norm(p, 1, x)), keys[0])
    return x + dropout(mlp(p, norm(p, 2, x)), keys[1])


def run_layers(layers, x, key, one, scan=False, remat=False):
    """Through a list of layers, or through stacked ones."""
    if remat:
        one = jax.checkpoint(one)
    if not scan:
        for i, p in enumerate(layers):
            x = one(p, x, None if key is None else jax.random.fold_in(key, i))
        return x
    keys = None if key is None else jax.random.split(key, len(jax.tree.leaves(layers)[0]))
    return lax.scan(lambda x, at: (one(at[0], x, at[1]), None), x, (layers, keys))[0]


def stacked(shapes, number=L):
    return {name: (number, *shape) for name, shape in shapes.items()}


def decoder(
    layer,
    attention=self_attention,
    mlp=gated,
    shape="pre",
    tied=False,
    positions=False,
    scan=False,
    remat=False,
    cast=None,
    layers=L,
    vocab=V,
    width=D,
):
    """A decoder of layers of these shapes."""
    shapes = {"embed": (vocab, width), "norm1": (width,)}
    shapes |= {"layers": stacked(layer, layers) if scan else [layer] * layers}
    shapes |= {} if tied else {"head": (width, vocab)}
    shapes |= {"positions": (T, width)} if positions else {}

    def loss(params, batch, key):
        if cast:
            params = jax.tree.map(lambda w: w.astype(cast), params)
        x = params["embed"][batch["x"] % vocab]
        if positions:
            x = x + params["positions"][None]
        one = partial(block, attention=attention, mlp=mlp, shape=shape)
        x = rms(run_layers(params["layers"], x, key, one, scan, remat), params["norm1"])
        logits = x @ (params["embed"].T if tied else params["head"])
        return cross_entropy(logits, batch["y"] % vocab)

    return Model(shapes, TOKENS, loss)


def torch_layout(layers=L):
    layer = {name: shape[::-1] for name, shape in (attention_shapes() | GATED).items()}

    def attention(p, x):
        return self_attention(p | {"transposed": True}, x)

    def mlp(p, x):
        return (jax.nn.silu(x @ p["gate"].T) * (x @ p["up"].T)) @ p["down"].T

    return decoder(layer | NORMS, attention, mlp, layers=layers)


def fused(layers=L):
    layer = {"qkv": (D, 3 * H * E), "o": (H * E, D), "gate_up": (D, 2 * F), "down": (F, D)}

    def attention(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
        q, k, v = (a.reshape(*a.shape[:2], H, E) for a in (q, k, v))
        return attend(q, k, v).reshape(*x.shape[:2], H * E) @ p["o"]

    def mlp(p, x):
        gate, up = jnp.split(x @ p["gate_up"], 2, -1)
        return (jax.nn.silu(gate) * up) @ p["down"]

    return decoder(layer | NORMS, attention, mlp, layers=layers)


def bloom(layers=L):
    def attention(p, x):
        q, k, v = (linear(p, n, x).reshape(*x.shape[:2], H, E) for n in "qkv")
        slope = (2.0 ** -jnp.arange(1, H + 1)).astype(x.dtype)[None, :, None, None]
        distance = jnp.arange(x.shape[1], dtype=x.dtype)[None, None, None]
        return linear(p, "o", attend(q, k, v, bias=slope * distance).reshape(*x.shape[:2], H * E))

    layer = attention_shapes(bias=True) | MLP | LAYER_NORMS
    return decoder(layer, attention, plain_mlp, tied=True, layers=layers)


@jax.custom_vjp
def silu(x):
    return jax.nn.silu(x)


silu.defvjp(lambda x: (silu(x), x), lambda x, g: jax.vjp(jax.nn.silu, x)[1](g))


def custom_derivatives(layers=L):
    def mlp(p, x):
        return (silu(x @ p["gate"]) * jax.nn.relu(x @ p["up"])) @ p["down"]

    return decoder(attention_shapes() | GATED | NORMS, mlp=mlp, layers=layers)


def encoder(shape="post", layers=L):
    """With masked tokens predicted by the tied embedding, and a bias."""
    layer = attention_shapes(bias=True) | MLP | LAYER_NORMS
    shapes = {"embed": (V, D), "kinds": (2, D), "positions": (T, D), "layers": [layer] * layers}
    shapes |= {"norm1": (D,), "norm1_bias": (D,), "transform": (D, D), "out_bias": (V,)}

    def loss(params, batch, key):
        x = params["embed"][batch["x"]] + params["positions"][None]
        x = norm(params, 1, x + params["kinds"][batch["x"] % 2])
        one = partial(
            block, attention=partial(self_attention, causal=False), mlp=plain_mlp, shape=shape
        )
        x = jax.nn.gelu(run_layers(params["layers"], x, key, one) @ params["transform"])
        return cross_entropy(x @ params["embed"].T + params["out_bias"], batch["y"])

    return Model(shapes, TOKENS, loss)


def vision(patches="convolution", layers=L):
    layer = attention_shapes(bias=True) | MLP | LAYER_NORMS
    kernel = (4, 4, 3, D) if patches == "convolution" else (48, D)
    shapes = {"patches": kernel, "class": (D,), "positions": (10, D), "layers": [layer] * layers}
    shapes |= {"head": (D, V)}

    def loss(params, batch, key):
        x = batch["image"]
        if patches == "convolution":
            x = convolve(x, params["patches"], 4)
        else:
            x = x.reshape(B, 3, 4, 3, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(B, 3, 3, 48)
            x = x @ params["patches"]
        x = x.reshape(B, 9, D)
        first = jnp.broadcast_to(params["class"], (B, 1, D))
        x = jnp.concatenate([first, x], 1) + params["positions"][None]
        attention = partial(self_attention, causal=False)
        x = run_layers(params["layers"], x, key, partial(block, attention=attention, mlp=plain_mlp))
        return cross_entropy(x[:, 0] @ params["head"], batch["label"])

    batch = {"image": ((B, 12, 12, 3), jnp.float32), "label": ((B,), jnp.int32)}
    return Model(shapes, batch, loss)


def convolve(x, kernel, stride=1, groups=1):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def encoder_decoder(kind="t5", layers=L, width=D, heads=H, size=E, hidden=F, vocab=V):
    """Like T5 (relative biases, pre-norm), BART (post-norm) or Whisper (convolutions in front)."""
    D, H, E, F, V = width, heads, size, hidden, vocab  # noqa: N806
    post, bias = ("post" if kind == "bart" else "pre"), kind != "t5"
    parts = ("", "_bias") if bias else ("",)
    extra = {f"norm{i}{part}": (D,) for i in (1, 2) for part in parts}
    feed = {"up": (D, F), "down": (F, D)} | ({"up_bias": (F,), "down_bias": (D,)} if bias else {})
    attention = attention_shapes(H, H, bias, D, E)
    layer = attention | feed | extra
    second = {"cross": attention} | {f"norm3{part}": (D,) for part in parts}
    shapes = {"embed": (V, D), "encoder": [layer] * layers, "decoder": [layer | second] * layers}
    shapes |= {"bias": (T + 2, H)} if kind == "t5" else {"positions": (T + 2, D)}
    shapes |= {"front": (3, V, D), "front_bias": (D,)} if kind == "whisper" else {}

    def biased(params, p, x, causal):
        q, k, v = (linear(p, n, x).reshape(*x.shape[:2], H, E) for n in "qkv")
        time = jnp.arange(x.shape[1])
        bias = None
        if kind == "t5":
            near = jnp.abs(time[:, None] - time[None, :])
            bias = params["bias"][near].transpose(2, 0, 1)[None]
        out = attend(q, k, v, causal, bias).reshape(*x.shape[:2], H * E)
        return linear(p, "o", out)

    def loss(params, batch, key):
        if kind == "whisper":
            sound = jax.nn.one_hot(batch["source"], V, dtype=params["front"].dtype)
            numbers = ("NWC", "WIO", "NWC")
            x = lax.conv_general_dilated(
                sound, params["front"], (2,), "SAME", dimension_numbers=numbers
            )
            x = jax.nn.gelu(x + params["front_bias"])
        else:
            x = params["embed"][batch["source"]]
        y = params["embed"][batch["x"]]
        if kind != "t5":
            x, y = (a + params["positions"][None, : a.shape[1]] for a in (x, y))
        attention = partial(biased, params, causal=False)
        encode = partial(block, attention=attention, mlp=plain_mlp, shape=post)
        memory = run_layers(params["encoder"], x, key, encode)

        def decode(p, y, key):
            def crossing(p, y):
                return self_attention(p["cross"], y, H, H, causal=False, memory=memory)

            causal = partial(biased, params, causal=True)
            if post == "post":
                y = norm(p, 1, y + causal(p, y))
                y = norm(p, 3, y + crossing(p, y))
                return norm(p, 2, y + plain_mlp(p, y))
            y = y + dropout(causal(p, norm(p, 1, y)), key)
            y = y + crossing(p, norm(p, 3, y))
            return y + plain_mlp(p, norm(p, 2, y))

        y = run_layers(params["decoder"], y, key, decode)
        return cross_entropy(y * D**-0.5 @ params["embed"].T, batch["y"])

    return Model(shapes, PAIRS, loss)


def mixture(dispatch="dense", router="router", layers=L):
    """Two of X experts for every token, computed for all (dense), or up to a capacity."""
    layer = attention_shapes() | NORMS | {router: (D, X)}
    layer |= {"w1": (X, D, F), "w3": (X, D, F), "w2": (X, F, D)}

    def experts(p, h):  # [X, C, D]
        hidden = jax.nn.silu(jnp.einsum("xcd,xdf->xcf", h, p["w1"]))
        hidden = hidden * jnp.einsum("xcd,xdf->xcf", h, p["w3"])
        return jnp.einsum("xcf,xfd->xcd", hidden, p["w2"])

    def mlp(p, x):
        tokens = x.reshape(-1, D)
        scores = jax.nn.softmax(tokens @ p[router], -1)
        weights, chosen = lax.top_k(scores, 2)
        marks = jax.nn.one_hot(chosen, X, dtype=x.dtype)  # [N, 2, X]
        if dispatch == "dense":
            combine = (marks * weights[..., None]).sum(1)  # [N, X]
            hidden = jax.nn.silu(jnp.einsum("nd,xdf->xnf", tokens, p["w1"]))
            hidden = hidden * jnp.einsum("nd,xdf->xnf", tokens, p["w3"])
            out = jnp.einsum("xnf,xfd->xnd", hidden, p["w2"])
            return jnp.einsum("xnd,nx->nd", out, combine).reshape(x.shape)
        capacity = 2 * len(tokens) // X
        mark = marks.sum(1)
        place = (jnp.cumsum(mark, 0) * mark).astype(int) - 1
        send = jax.nn.one_hot(place, capacity, dtype=x.dtype) * mark[..., None]  # [N, X, C]
        out = experts(p, jnp.einsum("nd,nxc->xcd", tokens, send))
        gate = send * (mark * scores)[..., None]
        return jnp.einsum("xcd,nxc->nd", out, gate).reshape(x.shape)

    return decoder(layer, mlp=mlp, layers=layers)


def mamba(layers=L):
    """A selective state-space block: a gate, a short depthwise convolution, a scan over time."""
    inner, state, rank, width = 2 * F, 6, 3, 4
    layer = {"in": (D, 2 * inner), "conv": (width, 1, inner), "conv_bias": (inner,)}
    layer |= {"x": (inner, rank + 2 * state), "dt": (rank, inner), "dt_bias": (inner,)}
    layer |= {"a": (inner, state), "skip": (inner,), "out": (inner, D), "norm1": (D,)}

    def mix(p, x, key):
        u, gate = jnp.split(norm(p, 1, x) @ p["in"], 2, -1)
        u = lax.conv_general_dilated(
            u,
            p["conv"],
            (1,),
            [(width - 1, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=inner,
        )
        u = jax.nn.silu(u + p["conv_bias"])
        dt, b, c = jnp.split(u @ p["x"], [rank, rank + state], -1)
        dt = jax.nn.softplus(dt @ p["dt"] + p["dt_bias"])
        decay = jnp.exp(-dt[..., None] * jnp.exp(p["a"]))
        into = dt[..., None] * b[:, :, None] * u[..., None]

        def step(h, at):
            decay, into, c = at
            h = decay * h + into
            return h, jnp.sum(h * c[:, None], -1)

        start = jnp.zeros((B, inner, state), x.dtype)
        y = lax.scan(step, start, [jnp.swapaxes(a, 0, 1) for a in (decay, into, c)])[1]
        y = jnp.swapaxes(y, 0, 1) + u * p["skip"]
        return x + (y * jax.nn.silu(gate)) @ p["out"]

    shapes = {"embed": (V, D), "head": (D, V), "layers": [layer] * layers}

    def loss(params, batch, key):
        x = run_layers(params["layers"], params["embed"][batch["x"]], key, mix)
        return cross_entropy(x @ params["head"], batch["y"])

    return Model(shapes, TOKENS, loss)


IMAGES = {"image": ((B, 6, 6, 3), jnp.float32), "label": ((B,), jnp.int32)}


def perceptron(sizes=(108, 64, 48, 80, 32)):
    layers = [{"w": (n, m), "b": (m,)} for n, m in zip(sizes[:-1], sizes[1:], strict=True)]

    def loss(params, batch, key):
        x = batch["image"].reshape(B, -1)
        for p in params["layers"][:-1]:
            x = jax.nn.relu(x @ p["w"] + p["b"])
        p = params["layers"][-1]
        return cross_entropy(x @ p["w"] + p["b"], batch["label"] % sizes[-1])

    return Model({"layers": layers}, IMAGES, loss)


def residual_convolutions(layers=L):
    unit = {"a": (1, 1, 16, 32), "b": (3, 3, 32, 64), "c": (1, 1, 64, 16)}
    shapes = {"stem": (3, 3, 3, 16), "units": [unit] * layers, "head": (16, V)}

    def loss(params, batch, key):
        x = convolve(batch["image"], params["stem"])
        for p in params["units"]:
            h = jax.nn.relu(convolve(x, p["a"]))
            x = x + convolve(jax.nn.relu(convolve(h, p["b"])), p["c"])
        return cross_entropy(x.mean((1, 2)) @ params["head"], batch["label"])

    return Model(shapes, IMAGES, loss)


def grouped_convolutions(groups=8, channels=32):
    """Depthwise where there are as many groups as channels."""
    shapes = {"stem": (1, 1, 3, channels), "deep": (3, 3, channels // groups, channels)}
    shapes |= {"point": (1, 1, channels, 64), "head": (64, V)}

    def loss(params, batch, key):
        x = convolve(batch["image"], params["stem"])
        x = jax.nn.relu(convolve(x, params["deep"], groups=groups))
        x = jax.nn.relu(convolve(x, params["point"]))
        return cross_entropy(x.mean((1, 2)) @ params["head"], batch["label"])

    return Model(shapes, IMAGES, loss)


def maml():
    """The loss after a step on the gradient of a loss, for each row its own."""
    inner = perceptron((9, 32, 48, 4))

    def answer(params, x):
        for p in params["layers"][:-1]:
            x = jax.nn.relu(x @ p["w"] + p["b"])
        return x @ params["layers"][-1]["w"] + params["layers"][-1]["b"]

    def task(params, support, query):
        def fit(params):
            return jnp.mean((answer(params, support) - 1) ** 2)

        adapted = jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(fit)(params))
        return jnp.mean((answer(adapted, query) - 1) ** 2)

    def loss(params, batch, key):
        return jnp.mean(jax.vmap(task, (None, 0, 0))(params, batch["support"], batch["query"]))

    batch = {name: ((B, 5, 9), jnp.float32) for name in ("support", "query")}
    return Model(inner.shapes, batch, loss)


def actor_critic():
    shapes = {
        name: [{"w": (4, 64), "b": (64,)}, {"w": (64, 48), "b": (48,)}, {"w": (48, n), "b": (n,)}]
        for name, n in (("policy", 2), ("value", 1))
    }

    def answer(layers, x):
        for p in layers[:-1]:
            x = jnp.tanh(x @ p["w"] + p["b"])
        return x @ layers[-1]["w"] + layers[-1]["b"]

    def loss(params, batch, key):
        logits = jax.nn.log_softmax(answer(params["policy"], batch["seen"]))
        picked = jnp.take_along_axis(logits, batch["action"][:, None] % 2, 1)[:, 0]
        value = answer(params["value"], batch["seen"])[:, 0]
        return jnp.mean((value - 1) ** 2 - picked)

    return Model(shapes, {"seen": ((B, 4), jnp.float32), "action": ((B,), jnp.int32)}, loss)


LLAMA = attention_shapes() | GATED | NORMS
rope = partial(self_attention, rope=True)


def grouped(kv, heads=H, how="grouped", layers=L):
    layer = attention_shapes(heads, kv) | GATED | NORMS
    attention = partial(self_attention, heads=heads, kv=kv, how=how, rope=True)
    return decoder(layer, attention, layers=layers)


MODELS: dict[str, Callable[..., Model]] = {
    "llama": partial(decoder, LLAMA, rope),
    "llama, scanned": partial(decoder, LLAMA, rope, scan=True),
    "llama, scanned and recomputed": partial(decoder, LLAMA, rope, scan=True, remat=True),
    "llama, recomputed": partial(decoder, LLAMA, rope, remat=True),
    "llama, tied": partial(decoder, LLAMA, rope, tied=True),
    "llama in bfloat16": partial(decoder, LLAMA, rope, cast=jnp.bfloat16),
    "grouped queries": partial(grouped, 4, 16),
    "grouped queries, repeated": partial(grouped, 4, 16, "repeated"),
    "grouped queries, jax.nn": partial(grouped, 4, 16, "jax"),
    "too few key heads": partial(grouped, 2),
    "one key head": partial(grouped, 1),
    "gpt2": partial(
        decoder,
        attention_shapes(bias=True) | MLP | LAYER_NORMS,
        mlp=plain_mlp,
        tied=True,
        positions=True,
    ),
    "gptj": partial(
        decoder, attention_shapes() | MLP | {"norm1": (D,)}, rope, plain_mlp, "parallel"
    ),
    "post-norm decoder": partial(
        decoder, attention_shapes(bias=True) | MLP | LAYER_NORMS, mlp=plain_mlp, shape="post"
    ),
    "bloom": bloom,
    "PyTorch's layout": torch_layout,
    "fused": fused,
    "custom derivatives": custom_derivatives,
    "bert": encoder,
    "pre-norm encoder": partial(encoder, "pre"),
    "vit": vision,
    "vit, patches reshaped": partial(vision, "reshape"),
    "t5": encoder_decoder,
    "bart": partial(encoder_decoder, "bart"),
    "whisper": partial(encoder_decoder, "whisper"),
    "mixture of experts": mixture,
    "mixture of experts with a capacity": partial(mixture, "capacity"),
    "mamba": mamba,
    "perceptron": perceptron,
    "residual convolutions": residual_convolutions,
    "grouped convolutions": grouped_convolutions,
    "depthwise convolutions": partial(grouped_convolutions, 32),
    "maml": maml,
    "actor and critic": actor_critic,
}
