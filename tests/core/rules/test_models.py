"""Shardings of many families of models: as agreed, as Megatron's, and right in numbers.

`golden.txt` has, for tensor 4, the share of bytes that is split and the specs of one layer, t for a
dimension over tensor. `python tests/core/rules/test_models.py` prints it anew: read the difference.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from core import MeshOptions, UserError, make_mesh
from core.rules import infer
from tests.core.rules import collectives
from tests.core.rules.models import MODELS

GOLDEN = Path(__file__).with_name("golden.txt")


@pytest.fixture(autouse=True)
def as_others_write():
    """These stand for other people's models, which add a bias to a batch as it is."""
    with jax.numpy_rank_promotion("allow"):
        yield


def mesh(tensor=4, fsdp=1, data=1):
    options = MeshOptions(tensor=tensor, fsdp=fsdp, data=data)
    return make_mesh(options, jax.devices()[: tensor * fsdp * data])


def inferred(model, tensor=4, **axes):
    key = jax.random.key(0)
    fn = lambda params, batch: model.loss(params, batch, key)  # noqa: E731
    return infer(fn, model.params(), model.batch_shapes(), mesh(tensor, **axes))


def by_path(specs):
    flat = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, P))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): spec for path, spec in flat}


def written(spec):
    return ",".join("t" if entry == "tensor" else "-" for entry in spec) or "whole"


def share(model, specs):
    """Of the elements, how many are split."""
    sizes = {path: np.prod(x.shape) for path, x in by_path_shapes(model).items()}
    return sum(sizes[path] for path, spec in by_path(specs).items() if any(spec)) / sum(
        sizes.values()
    )


def by_path_shapes(model):
    flat = jax.tree_util.tree_leaves_with_path(model.params())
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def described(model, specs):
    """One line for each way to split: its parameters, those of layer 0 for all layers."""
    rows = {}
    for path, spec in by_path(specs).items():
        if "/1/" not in path:
            rows.setdefault(written(spec), []).append(path)
    lines = [f"  {spec}: {' '.join(paths)}" for spec, paths in sorted(rows.items())]
    return "\n".join([f"  split {share(model, specs):.0%}", *lines])


def golden():
    parts = re.split(r"^== (.*)\n", GOLDEN.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], (text.rstrip("\n") for text in parts[1::2]), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_specs_are_as_agreed(name):
    model = MODELS[name]()
    found = inferred(model)
    assert not found.factors.failed and not found.factors.unknown
    assert described(model, found.specs) == golden()[name]
    layers = re.compile(r"/1/")
    specs = by_path(found.specs)
    perceptrons = ("perceptron", "maml", "actor and critic")  # their layers differ
    for path in filter(layers.search, specs if name not in perceptrons else ()):
        assert specs[path] == specs[layers.sub("/0/", path)], path


def test_table_has_no_model_too_many():
    assert set(golden()) == set(MODELS)


def scrambled(model):
    """The same model with other names, in another order."""
    rng, names = np.random.default_rng(1), {}

    def new(name):
        return names.setdefault(name, f"n{rng.integers(10**9)}")

    def renamed(tree):
        if isinstance(tree, dict):
            return {new(name): renamed(tree[name]) for name in sorted(tree, reverse=True)}
        return [renamed(x) for x in tree] if isinstance(tree, list) else tree

    def back(tree):
        olds = {value: name for name, value in names.items()}
        if isinstance(tree, dict):
            return {olds[name]: back(x) for name, x in tree.items()}
        return [back(x) for x in tree] if isinstance(tree, list) else tree

    params = renamed(model.params())
    loss = lambda params, batch: model.loss(back(params), batch, None)  # noqa: E731
    return params, loss, back


@pytest.mark.parametrize("name", list(MODELS)[::2])
def test_names_and_their_order_mean_nothing(name):
    model = MODELS[name]()
    params, loss, back = scrambled(model)
    found = infer(loss, params, model.batch_shapes(), mesh())
    assert described(model, back(found.specs)) == golden()[name]


# What Megatron-LM (Shoeybi et al. 2019) splits, by the names that the models here have.
MEGATRON = {
    r"embed": P("tensor"),
    r"head": P(None, "tensor"),
    r".*/(q|k|v|gate|up)": P(None, "tensor"),
    r".*/(q|k|v|up)_bias": P("tensor"),
    r".*/(o|down)": P("tensor"),
    r"bias": P(None, "tensor"),  # by heads: T5's relative positions
    r"positions|.*norm.*|.*(o|down)_bias": P(),
}
LIKE_MEGATRON = ["llama", "llama, recomputed", "llama, tied", "llama in bfloat16", "gpt2", "gptj"]
LIKE_MEGATRON += ["grouped queries", "grouped queries, repeated", "grouped queries, jax.nn"]
LIKE_MEGATRON += ["post-norm decoder", "bloom", "custom derivatives", "t5", "bart"]


@pytest.mark.parametrize("name", LIKE_MEGATRON)
def test_specs_are_megatrons(name):
    for path, spec in by_path(inferred(MODELS[name]()).specs).items():
        (agreed,) = [spec for regex, spec in MEGATRON.items() if re.fullmatch(regex, path)]
        assert spec == agreed, path


# Forward, for each layer (or pair of layers of encoder and decoder), on four devices.
FORWARD = dict.fromkeys(LIKE_MEGATRON, {"AR": 2}) | {
    "t5": {"AR": 5},
    "bart": {"AR": 5},
    "whisper": {"AR": 5},
    "too few key heads": {"AR": 2},
    "one key head": {"AR": 2},
    "PyTorch's layout": {"AR": 2},
    "bert": {"AR": 2},
    "vit": {"AR": 2},
    "mixture of experts": {"AR": 2},
    "mamba": {"AR": 2, "CP": 4},
    "fused": {"AR": 2, "CP": 11},
    "residual convolutions": {"AR": 1},
}


def collectives_of(name, layers, grad, mesh):
    model = MODELS[name](layers=layers)
    fn = lambda params, batch: model.loss(params, batch, None)  # noqa: E731
    found = infer(fn, model.params(), model.batch_shapes(), mesh)
    text = collectives.compiled(
        jax.value_and_grad(fn) if grad else fn,
        found.specs,
        mesh,
        model.params(),
        model.batch_shapes(),
        lambda shardings, whole: (whole, shardings) if grad else whole,
    )
    return collectives.count(text)


@pytest.mark.parametrize("name", FORWARD)
def test_collectives_of_a_layer_forward(name):
    one, two = (collectives_of(name, layers, False, mesh()) for layers in (1, 2))
    assert {kind: two[kind] - one[kind] for kind in two if two[kind] - one[kind]} == FORWARD[name]


ONLY_ALL_REDUCES = [name for name in FORWARD if set(FORWARD[name]) == {"AR"}]
ONLY_ALL_REDUCES.remove("too few key heads")  # whose replicated keys are gathered


@pytest.mark.parametrize("name", ONLY_ALL_REDUCES)
def test_backward_adds_only_all_reduces(name):
    assert set(collectives_of(name, 1, True, mesh())) == {"AR"}


def differences(model, tensor, fsdp, data):
    """Of loss and gradients on eight devices from those on one, relative; in double precision."""
    params, batch = model.draw(jnp.float64)
    key = jax.random.key(3)
    loss_of = lambda params, batch: model.loss(params, batch, key)  # noqa: E731
    fn = jax.value_and_grad(loss_of)
    loss, grads = jax.jit(fn)(params, batch)
    found = infer(loss_of, params, batch, on := mesh(tensor, fsdp, data))
    shardings = jax.tree.map(
        lambda spec: NamedSharding(on, spec), found.specs, is_leaf=lambda x: isinstance(x, P)
    )
    rows = NamedSharding(on, P(("data", "fsdp")))
    split = jax.jit(fn, out_shardings=(None, shardings))
    other, others = split(jax.device_put(params, shardings), jax.device_put(batch, rows))
    assert any(any(spec) for spec in by_path(found.specs).values())
    largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(grads))
    off = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - np.asarray(b)))), grads, others)
    return abs(float(other) / float(loss) - 1), max(jax.tree.leaves(off)) / largest


WITHOUT_LAYERS = {"perceptron", "grouped convolutions", "depthwise convolutions", "maml"}
WITHOUT_LAYERS |= {"actor and critic"}
# `jax.nn` takes its softmax in single precision.
WITHOUT_CASTS = [name for name in MODELS if "bfloat16" not in name and "jax.nn" not in name]


def smallest(name):
    return MODELS[name](**({} if name in WITHOUT_LAYERS else {"layers": 1}))


MESHES = [(2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 1, 4), (4, 1, 2)]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, MESHES[i % len(MESHES)]) for i, name in enumerate(WITHOUT_CASTS)],
)
def test_eight_devices_give_what_one_gives(name, sizes, x64):
    assert max(differences(smallest(name), *sizes)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("name", WITHOUT_CASTS)
def test_eight_devices_give_what_one_gives_on_all_meshes(name, sizes, x64):
    assert max(differences(smallest(name), *sizes)) < 1e-12


@pytest.mark.parametrize(
    ("groups", "channels", "tensor", "fsdp", "data"),
    [(30, 30, 4, 2, 1), (30, 30, 4, 1, 2), (2, 32, 4, 2, 1), (6, 24, 4, 1, 2)],
)
def test_groups_that_do_not_divide_are_refused(groups, channels, tensor, fsdp, data):
    """XLA gets the gradient wrong, and with 2 groups on 4 devices it aborts."""
    model = MODELS["grouped convolutions"](groups, channels)
    with pytest.raises(UserError, match=f"^A convolution in {groups} groups is not split over"):
        inferred(model, tensor, fsdp=fsdp, data=data)
    # Where the batch is not split, or tensor divides the groups, all is well.
    inferred(model, 4)
    assert by_path(inferred(model, 2, fsdp=2).specs)["deep"][-1] == "tensor"


@pytest.mark.parametrize("groups", [2, 8])
def test_grouped_convolutions_are_right_at_other_numbers_of_groups(groups, x64):
    model = MODELS["grouped convolutions"](groups)
    assert max(differences(model, 2, 2, 2)) < 1e-12


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    for name, make in MODELS.items():
        model = make()
        print(f"== {name}\n{described(model, inferred(model).specs)}")
