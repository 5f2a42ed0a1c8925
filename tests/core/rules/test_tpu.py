"""Collectives of each layer, forward and backward, as the TPU compiler places them; no TPU needed.

It joins what is reduced of one value, such as the gradients that come back from q, k and v.
"""

import os

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from core.mesh import AXES
from tests.core.rules.test_models import as_others_write, collectives_of  # noqa: F401

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def mesh():
    from jax.experimental import topologies

    # It looks for the machine's TPUs otherwise.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    return Mesh(np.array(chips).reshape(1, 1, 4), AXES, axis_types=(AxisType.Auto,) * 3)


# (forward, forward and backward) for each layer, or pair of layers of encoder and decoder.
LAYERS = {
    "llama": ({"AR": 2}, {"AR": 4}),
    "grouped queries": ({"AR": 2}, {"AR": 4}),
    "PyTorch's layout": ({"AR": 2}, {"AR": 4}),
    "gpt2": ({"AR": 2}, {"AR": 4}),
    "bloom": ({"AR": 2}, {"AR": 4}),
    "gptj": ({"AR": 2}, {"AR": 3}),
    "pre-norm encoder": ({"AR": 2}, {"AR": 4}),
    "vit": ({"AR": 2}, {"AR": 4}),
    "t5": ({"AR": 5}, {"AR": 10}),
    "whisper": ({"AR": 5}, {"AR": 10}),
    "mixture of experts": ({"AR": 2}, {"AR": 5}),
    # With constraints on activations they would be 4 and 10.
    "bert": ({"AR": 2}, {"AR": 6}),
    "bart": ({"AR": 5}, {"AR": 14}),
    "too few key heads": ({"AR": 2}, {"AR": 6, "AG": 4}),
    "fused": ({"AR": 2, "CP": 11}, {"AR": 4, "A2A": 7, "CP": 11}),
    "mamba": ({"AR": 2, "CP": 4}, {"AR": 6, "A2A": 3, "CP": 4}),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
def test_collectives_of_a_layer(name, backward, mesh):
    one, two = (collectives_of(name, layers, backward, mesh) for layers in (1, 2))
    assert {k: two[k] - one[k] for k in two if two[k] != one[k]} == LAYERS[name][backward]
