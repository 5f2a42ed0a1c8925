"""Models that nobody here wrote: the Flax classes of transformers 4.57, at tensor 4.

`make test-all` runs this in an environment of its own, since transformers 5 has them no more.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from core.mesh import AXES
from core.rules import infer
from tests.core.rules.models import cross_entropy
from tests.core.rules.test_models import as_others_write  # noqa: F401

pytestmark = pytest.mark.foreign

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 64, "vocab_size": 2048, "max_position_embeddings": 24}
GPT = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 64,
    "vocab_size": 2048,
    "n_positions": 24,
}
PAIR = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
PAIR |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
PAIR |= {"vocab_size": 2048}
LLAMA = SMALL | {"num_key_value_heads": 4}
OPT = SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32}
GPTJ = GPT | {"rotary_dim": 4}
VIT = SMALL | {"image_size": 16, "patch_size": 4, "num_labels": 8}
WHISPER = PAIR | {"max_source_positions": 24, "max_target_positions": 24, "num_mel_bins": 8}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
TOKENS = {"input_ids": (2, 12)}
BOTH = TOKENS | {"decoder_input_ids": (2, 10)}

COLUMN, ROW, WHOLE, VOCABULARY = P(None, "tensor"), P("tensor"), P(), P("tensor")
BART = {
    r"(shared|embed_tokens)/embedding": VOCABULARY,
    r"(q_proj|k_proj|v_proj|fc1)/kernel": COLUMN,
    r"(q_proj|k_proj|v_proj|fc1)/bias": P("tensor"),
    r"(out_proj|fc2)/kernel": ROW,
    r"(out_proj|fc2)/bias|layer_?norm\w*/|embed_positions/": WHOLE,
    r"final_logits_bias": P(None, "tensor"),
}
MODELS = {
    "GPT2": (
        "LMHeadModel",
        GPT,
        TOKENS,
        {
            r"wte/embedding": VOCABULARY,
            r"(c_attn|c_fc)/kernel": ROW,  # kept as (out, in)
            r"(c_attn|c_fc)/bias": P("tensor"),
            r"c_proj/kernel": COLUMN,
            r"c_proj/bias|ln_\w+/|wpe/": WHOLE,
        },
    ),
    "OPT": ("ForCausalLM", OPT, TOKENS, BART),
    "Llama": (
        "ForCausalLM",
        LLAMA,
        TOKENS,
        {
            r"embed_tokens/embedding": VOCABULARY,
            r"(q_proj|k_proj|v_proj|gate_proj|up_proj|lm_head)/kernel": COLUMN,
            r"(o_proj|down_proj)/kernel": ROW,
            r"norm/": WHOLE,
        },
    ),
    "GPTJ": (
        "ForCausalLM",
        GPTJ,
        TOKENS,
        {
            r"wte/embedding": VOCABULARY,
            r"(q_proj|k_proj|v_proj|fc_in|lm_head)/kernel": COLUMN,
            r"(fc_in|lm_head)/bias": P("tensor"),
            r"(out_proj|fc_out)/kernel": ROW,
            r"fc_out/bias|ln_\w+/": WHOLE,
        },
    ),
    "Bert": (
        "ForMaskedLM",
        SMALL,
        TOKENS,
        {
            r"word_embeddings/embedding": VOCABULARY,
            r"(query|key|value|intermediate/dense)/kernel": COLUMN,
            r"(query|key|value|intermediate/dense)/bias|predictions/bias": P("tensor"),
            r"\d/(attention/)?output/dense/kernel": ROW,
            r"output/dense/bias|LayerNorm/|position_emb|token_type|transform/dense": WHOLE,
        },
    ),
    "Bart": ("ForConditionalGeneration", PAIR | {"max_position_embeddings": 24}, BOTH, BART),
    "ViT": (
        "ForImageClassification",
        VIT,
        {"pixel_values": (2, 3, 16, 16)},
        {
            r"(query|key|value|intermediate/dense|classifier)/kernel": COLUMN,
            r"(query|key|value|intermediate/dense|classifier)/bias": P("tensor"),
            r"\d/(attention/)?output/dense/kernel": ROW,
            r"output/dense/bias|layernorm\w*/|embeddings/": WHOLE,
        },
    ),
    "Whisper": (
        "ForConditionalGeneration",
        WHISPER,
        {"input_features": (2, 8, 48), "decoder_input_ids": (2, 10)},
        # The channels between its convolutions are split.
        BART
        | {r"conv1/kernel": P(None, None, "tensor"), r"conv1/bias": P("tensor")}
        | {r"conv2/kernel": P(None, "tensor"), r"conv2/bias": WHOLE},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_are_split_as_megatron_splits(name):
    import transformers

    kind, config, inputs, table = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**config)
    model = getattr(transformers, f"Flax{name}{kind}")(config, _do_init=False)
    params = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), model.input_shape))
    batch = {
        key: jax.ShapeDtypeStruct(shape, jnp.int32 if key.endswith("ids") else jnp.float32)
        for key, shape in inputs.items()
    }

    def loss(params, batch):
        logits = model(**batch, params=params).logits
        return cross_entropy(logits, jnp.argmin(logits, -1))

    found = infer(loss, params, batch, AbstractMesh((1, 1, 4), AXES))
    assert not found.factors.failed and not found.factors.unknown
    specs = jax.tree.leaves(found.specs, is_leaf=lambda x: isinstance(x, P))
    for path, spec in zip(found.reasons, specs, strict=True):
        agreed = [spec for regex, spec in table.items() if re.search(regex, path)]
        assert len(agreed) == 1, f"{path}: {spec}, {found.reasons[path]}"
        assert agreed[0] == spec, f"{path}: {found.reasons[path]}"
    sizes = [float(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)]
    split = sum(n for n, spec in zip(sizes, specs, strict=True) if any(spec))
    assert split / sum(sizes) > 0.8
    slower = [path for path, reason in found.reasons.items() if "slower" in reason]
    assert all("c_attn" in path for path in slower) and bool(slower) == (name == "GPT2")
