"""A decoder-only transformer in the style of LLaMA (Touvron et al. 2023).

RMSNorm (Zhang and Sennrich 2019) before each sublayer, rotary positions (Su et al. 2021),
grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020).

Shapes: B rows, T queries, S keys, N = B*T, D width, H heads of size E, K key-value heads,
V vocabulary, L layers. The residual stream is [N, D] throughout: XLA's CPU backend multiplies
matrices about twice as fast as [B, T, D] by a matrix.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from core import UserError, at_least_float32
from core.errors import at_least


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    layers: int = 2
    """Transformer layers."""
    dim: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Heads of queries."""
    kv_heads: int = 2
    """Heads of keys and values, each shared by a group of query heads."""
    hidden: int = 384
    """Width of the gated feed-forward layers."""
    dropout: float = 0.0
    """Rate of dropout on the embeddings and on what each sublayer adds."""
    tied: bool = False
    """Use the token embeddings as the output layer too."""
    rope_theta: float = 10000.0
    """Base of the wavelengths of the rotary positions."""
    unroll: bool = False
    """Lay the layers out one after the other instead of scanning over them."""
    remat: bool = False
    """Keep only each layer's input for the backward pass: less memory, more time."""

    @property
    def head_dim(self):
        return self.dim // self.heads

    def __post_init__(self):
        for name in ("layers", "dim", "heads", "kv_heads", "hidden"):
            at_least(self, name, 1)
        if not 0 <= self.dropout < 1:
            raise UserError(
                f"dropout {self.dropout} is out of range: it must be at least 0 and below 1."
            )
        pairs, per_kv = 2 * self.heads, self.kv_heads
        wrong = []
        if self.dim % pairs:
            wrong.append(
                f"dim {self.dim} is not a multiple of {pairs}, which gives each of {self.heads} "
                f"heads an even size; use {_multiples(self.dim, pairs)}."
            )
        if self.heads % per_kv:
            wrong.append(
                f"heads {self.heads} is not a multiple of kv_heads {per_kv}; "
                f"use {_multiples(self.heads, per_kv)}."
            )
        if wrong:
            raise UserError(" ".join(wrong))


class Decoder(nnx.Module):
    """The transformer's parameters and their uses: on blocks, on prompts, on one token a row.

    It holds no state and no keys. The parameters of all layers are stacked, [L, ...]. Their dtype
    is that of the products; norms, rotary positions, softmax and logits are in float32 or wider.

    A cache is {"k": [L, B, S, K, E], "v": [L, B, S, K, E], "index": [1, B]}, the last being how
    many positions each row has filled. The batch is axis 1 of every leaf, so that a search can
    reorder rows without knowing more.
    """

    def __init__(self, config: ModelConfig, vocab: int, padding: int = 0, *, rngs: nnx.Rngs):
        def normal(*shape, std):
            return nnx.Param(std * jax.random.normal(rngs.params(), shape))

        def matrix(*shape, gain=1.0):  # what it multiplies keeps its variance, times gain^2
            return normal(*shape, std=gain * shape[-2] ** -0.5)

        def ones(*shape):
            return nnx.Param(jnp.ones(shape))

        self.config, self.vocab, self.padding = config, vocab, padding
        count, dim, hidden = config.layers, config.dim, config.hidden
        kv_dim = config.kv_heads * config.head_dim
        # The stream is a sum of 2L outputs of sublayers: its variance must not grow with L.
        gain = (2 * count) ** -0.5
        embedding = normal(vocab, dim, std=dim**-0.5 if config.tied else 1.0)
        self.embedding = nnx.Param(jnp.pad(embedding[...], ((0, padding), (0, 0))))
        self.layers = nnx.Dict(
            attention_norm=ones(count, dim),
            q=matrix(count, dim, dim),
            k=matrix(count, dim, kv_dim),
            v=matrix(count, dim, kv_dim),
            o=matrix(count, dim, dim, gain=gain),
            mlp_norm=ones(count, dim),
            gate=matrix(count, dim, hidden),
            up=matrix(count, dim, hidden),
            down=matrix(count, hidden, dim, gain=gain),
        )
        self.norm = ones(dim)
        if not config.tied:
            head = matrix(dim, vocab)
            self.head = nnx.Param(jnp.pad(head[...], ((0, 0), (0, padding))))

    def __call__(self, tokens, key=None):
        """Logits [B, T, V] of what follows each of tokens [B, T]; a key turns dropout on."""
        count, rate = self.config.layers, self.config.dropout
        positions = jnp.arange(tokens.shape[1])[None]
        keys = None if key is None else jax.random.split(key, count)

        def attend(q, k, v):
            return causal_attention(q, k, v), None

        def block(x, inputs):
            layer, key = inputs
            return self._block(x, layer, positions, attend, key)

        # By default the backward pass computes again all but the products with weights: that
        # costs less than to store and stack it, attention's [T, S] above all.
        products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        block = jax.checkpoint(
            block,
            policy=None if self.config.remat else products,
            prevent_cse=self.config.unroll,  # a scan is a barrier as it is
        )
        x = dropout(self._embed(tokens), rate, key, count)
        x, _ = self._scan(block, x, keys)
        return self._logits(x).reshape(*tokens.shape, -1)

    def prefill(self, tokens, lengths, size):
        """Reads prompts into a new cache: tokens [B, P], lengths [B] -> cache, logits [B, V].

        A prompt has at least one token and is padded on its right, with anything: `step` writes
        over the padding before it attends there. `size` is how many positions the cache holds,
        P and one for each step past that. The logits are of what follows each prompt.
        """
        batch, length = tokens.shape
        if size < length:
            raise UserError(f"A cache of {size} positions does not hold prompts of {length}.")
        positions = jnp.arange(length)[None]

        def attend(q, k, v):
            return causal_attention(q, k, v), (k, v)

        def block(x, inputs):
            (layer,) = inputs
            return self._block(x, layer, positions, attend)

        x, kept = self._scan(block, self._embed(tokens))
        k, v = (jnp.pad(a, [(0, 0), (0, 0), (0, size - length), (0, 0), (0, 0)]) for a in kept)
        last = jax.vmap(lambda row, n: row[n - 1])(x.reshape(batch, length, -1), lengths)
        return {"k": k, "v": v, "index": lengths[None]}, self._logits(last)

    def step(self, cache, tokens):
        """Appends tokens [B], each at its row's own position -> cache, logits [B, V]."""
        index = cache["index"][0]
        mask = jnp.arange(cache["k"].shape[2])[None, None] <= index[:, None, None]  # [B, 1, S]
        write = jax.vmap(lambda old, new, i: jax.lax.dynamic_update_slice_in_dim(old, new, i, 0))

        def block(x, inputs):
            layer, old_k, old_v = inputs

            def attend(q, k, v):
                k, v = write(old_k, k, index), write(old_v, v, index)
                return attention(q, k, v, mask), (k, v)

            return self._block(x, layer, index[:, None], attend)

        x, (k, v) = self._scan(block, self._embed(tokens), cache["k"], cache["v"])
        return {"k": k, "v": v, "index": cache["index"] + 1}, self._logits(x)

    def _block(self, x, layer, positions, attend, key=None):
        """One layer on x [N, D]; `attend` maps q, k, v to what comes of them and what to keep."""
        length, rate, theta = positions.shape[1], self.config.dropout, self.config.rope_theta
        split = (x.shape[0] // length, length, -1, self.config.head_dim)
        h = rms_norm(x, layer["attention_norm"])
        q, k, v = ((h @ layer[name]).reshape(split) for name in "qkv")
        out, kept = attend(rotate(q, positions, theta), rotate(k, positions, theta), v)
        x = x + dropout(out.reshape(x.shape) @ layer["o"], rate, key, 0)
        h = rms_norm(x, layer["mlp_norm"])
        h = jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])
        return x + dropout(h @ layer["down"], rate, key, 1), kept

    def _scan(self, block, x, *inputs):
        """`jax.lax.scan` of a block over the layers, and inputs that lead with the same axis."""
        xs = (nnx.to_pure_dict(nnx.state(self.layers)), *inputs)
        if not self.config.unroll:
            return jax.lax.scan(block, x, xs)
        leaves, treedef = jax.tree.flatten(xs)
        kept = []
        for layer in zip(*map(jnp.unstack, leaves), strict=True):
            x, out = block(x, jax.tree.unflatten(treedef, layer))
            kept.append(out)
        return x, jax.tree.map(lambda *outs: jnp.stack(outs), *kept)

    def _embed(self, tokens):
        return self.embedding[tokens.reshape(-1)]

    def _logits(self, x):
        x = rms_norm(x, self.norm[...])
        head = self.embedding[...].T if self.config.tied else self.head[...]
        logits = jnp.matmul(x, head, preferred_element_type=at_least_float32(x).dtype)
        if not self.padding:
            return logits
        return jnp.where(jnp.arange(logits.shape[-1])[None] < self.vocab, logits, -jnp.inf)


def rms_norm(x, scale):
    """x [N, D] over its root mean square, times scale [D]."""
    y = at_least_float32(x)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * at_least_float32(scale)[None]).astype(x.dtype)


def rotate(x, positions, theta):
    """Turns each pair (i, i + E/2) of x [B, T, H, E] by positions [B or 1, T] * theta^(-2i/E)."""
    a, b = jnp.split(at_least_float32(x), 2, axis=-1)
    half = a.shape[-1]
    frequencies = theta ** -(jnp.arange(half, dtype=a.dtype) / half)
    angles = positions[:, :, None, None].astype(a.dtype) * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(q, k, v, mask):
    """Softmax attention of q [B, T, H, E] on k, v [B, S, K, E], where mask [B or 1, T, S] is true.

    Head h reads key-value head h // (H/K). A group's queries are laid along one axis, [G*T], so
    that both products are plain batched ones and neither keys nor values are repeated.
    """
    B, T, H, E = q.shape
    K = k.shape[2]
    G = H // K
    q = q.reshape(B, T, K, G, E).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, E)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    dtype = at_least_float32(q).dtype
    scores = jnp.einsum("bkne,bkse->bkns", q, k, preferred_element_type=dtype) * E**-0.5
    scores = jnp.where(jnp.tile(mask, (1, G, 1))[:, None], scores, -jnp.inf)
    out = jnp.einsum("bkns,bkse->bkne", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)
    return out.reshape(B, K, G, T, E).transpose(0, 3, 1, 2, 4).reshape(B, T, H, E)


def causal_attention(q, k, v):
    """`attention` of each position on itself and on those before it.

    Four blocks of queries, each on the keys up to its own end, so that most of the masked half is
    never computed; on a GPU in 16 bits, cuDNN's fused kernel
    where it has the size of the heads.
    """
    fits = q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    if jax.default_backend() == "gpu" and fits:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    length = q.shape[1]
    size = max(64, -(-length // 4))
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    blocks = []
    for start in range(0, length, size):
        end = min(start + size, length)
        blocks.append(attention(q[:, start:end], k[:, :end], v[:, :end], mask[:, start:end, :end]))
    return jnp.concatenate(blocks, axis=1)


def dropout(x, rate, key, use):
    """Zeroes at this rate and scales up the rest; `use` tells apart the uses of one key.

    Without a key x stays as it is.
    """
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(jax.random.fold_in(key, use), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def build(config: ModelConfig, vocab: int, pad_vocab: int = 0):
    """The structure of a decoder, and the function key -> params that initialises it.

    Embedding and head have `pad_vocab` rows, if that is more than the vocabulary: what is beyond it
    is zero, never likely, and learns nothing, so no result depends on it.

    `nnx.merge(structure, params)` is the decoder with these parameters, a nested dict of arrays.
    """

    if 0 < pad_vocab < vocab:
        raise UserError(f"pad_vocab {pad_vocab} is less than the vocabulary of {vocab}; use more.")
    padding = max(pad_vocab - vocab, 0)

    def init(key):
        return nnx.to_pure_dict(nnx.state(Decoder(config, vocab, padding, rngs=nnx.Rngs(key))))

    structure = nnx.graphdef(
        nnx.eval_shape(lambda: Decoder(config, vocab, padding, rngs=nnx.Rngs(0)))
    )
    return structure, init


def _multiples(value, of):
    """The multiples around a value, for a message."""
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"
