"""Records what PyTorch's LLaMA makes of small random weights: `python -m tests.references.lm`.

`transformers.LlamaForCausalLM` in float64 is the network of `algorithms/lm/model.py` written by
others. It takes some steps in float32 whatever the weights are, so three of its parts are replaced
here by the same formulas in float64: norm, angles of the rotary positions, softmax of attention.
The untouched network must agree as far as single precision goes.
"""

from pathlib import Path
from unittest import mock

import numpy as np

FILE = Path(__file__).with_name("lm.npz")
LAYERS, DIM, HEADS, KV_HEADS, HIDDEN, VOCAB = 2, 16, 4, 2, 24, 29
NEW = 6


def make():
    """All recorded arrays: for an untied and a tied model, weights, inputs and results."""
    import torch
    import transformers

    softmax = torch.nn.functional.softmax
    double = mock.patch("torch.nn.functional.softmax", lambda x, dim, dtype=None: softmax(x, dim))
    record = {"torch": torch.__version__, "transformers": transformers.__version__}
    for tied in (False, True):
        torch.manual_seed(int(tied))
        model = _model(tied)
        rng = np.random.default_rng(int(tied))
        tokens = rng.integers(0, VOCAB, (5, 13))
        lengths = np.array([13, 2, 7, 12, 9])
        with double:
            arrays = _run(model, torch.tensor(tokens), torch.tensor(lengths))
        _check_replacements(model, torch.tensor(tokens[:, :-1]), arrays["logits"])
        arrays |= {"tokens": tokens, "lengths": lengths}
        record |= {f"{'tied' if tied else 'untied'}/{name}": x for name, x in arrays.items()}
    return record


def _model(tied):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    class Norm(torch.nn.Module):
        def __init__(self, size, eps=1e-6):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps

        def forward(self, x):
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight

    class Rotary(torch.nn.Module):
        def forward(self, x, position_ids):
            size = DIM // HEADS
            wavelengths = 10000.0 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
            angles = position_ids[..., None].double() / wavelengths
            angles = torch.cat([angles, angles], dim=-1)
            return angles.cos(), angles.sin()

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        initializer_range=0.2,
    )
    original, modeling_llama.LlamaRMSNorm = modeling_llama.LlamaRMSNorm, Norm
    try:
        model = LlamaForCausalLM(config).double()
    finally:
        modeling_llama.LlamaRMSNorm = original
    model.model.rotary_emb = Rotary()
    for name, weight in model.named_parameters():
        if "norm" in name:  # ones would hide a norm that is not applied
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.eval()


def _check_replacements(model, tokens, logits):
    import torch
    from transformers import LlamaForCausalLM

    untouched = LlamaForCausalLM(model.config).double().eval()
    untouched.load_state_dict(model.state_dict())
    with torch.no_grad():  # 2e-6 apart, of logits up to 3
        np.testing.assert_allclose(untouched(tokens).logits, logits, rtol=0, atol=1e-5)


def _run(model, tokens, lengths):
    import torch

    logits = model(tokens[:, :-1]).logits
    real = torch.arange(1, tokens.shape[1])[None] < lengths[:, None]
    costs = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    loss = (costs * real).sum() / real.sum()
    loss.backward()
    greedy = []
    for row, length in zip(tokens, lengths, strict=True):
        ids = row[None, :length]
        for _ in range(NEW):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        greedy.append(ids[0, length:])
    out = {"logits": logits, "loss": loss, "greedy": torch.stack(greedy)}
    out |= {f"weight/{k}": x for k, x in _named(model, lambda weight: weight).items()}
    out |= {f"gradient/{k}": x for k, x in _named(model, lambda weight: weight.grad).items()}
    return {name: np.asarray(x.detach()) for name, x in out.items()}


def _named(model, of):
    """A value of each weight under our names: layers stacked, matrices as (in, out)."""
    import torch

    layers = model.model.layers

    def stack(get):
        return torch.stack([of(get(layer)) for layer in layers])

    named = {
        "embedding": of(model.model.embed_tokens.weight),
        "norm": of(model.model.norm.weight),
        "layers/attention_norm": stack(lambda layer: layer.input_layernorm.weight),
        "layers/mlp_norm": stack(lambda layer: layer.post_attention_layernorm.weight),
    }
    for ours, part, theirs in (
        *((name, "self_attn", f"{name}_proj") for name in "qkvo"),
        *((name, "mlp", f"{name}_proj") for name in ("gate", "up", "down")),
    ):
        matrix = stack(lambda layer, p=part, t=theirs: getattr(getattr(layer, p), t).weight)
        named[f"layers/{ours}"] = matrix.transpose(1, 2)
    if not model.config.tie_word_embeddings:
        named["head"] = of(model.lm_head.weight).T
    return named


if __name__ == "__main__":
    np.savez_compressed(FILE, **make())
    print(f"wrote {FILE.name}, {FILE.stat().st_size:,} bytes")
