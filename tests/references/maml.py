"""Records learn2learn's meta-gradients: `python -m tests.references.maml`.

Its MAML around its own networks of four convolutions, a few filters wide, in float64; from random
weights and images, which are recorded too. Needs learn2learn and torch.
"""

import warnings
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("maml.npz")
TASKS, WAYS, SHOTS, QUERIES, FILTERS, RATE = 2, 3, 1, 2, 4, 0.4
SIDES = {"strided": (28, 28, 1), "pooled": (20, 20, 3)}
CASES = [("strided", steps, first) for steps in (1, 5) for first in (False, True)]
CASES += [("pooled", 5, False)]


def make():
    """All recorded arrays: for both networks the numbers given, the losses and the gradients."""
    record = {}
    for kind in SIDES:
        given = _given(kind)
        record |= {f"{kind}/{name}": x for name, x in given.items()}
        for steps, first in [case[1:] for case in CASES if case[0] == kind]:
            found = _meta_gradient(kind, given, steps, first)
            record |= {f"{kind}/{steps}/{first}/{name}": x for name, x in found.items()}
    return record


def _given(kind):
    rng = np.random.default_rng(len(kind))
    shape, channels = SIDES[kind], SIDES[kind][2]
    given = {}
    for i in range(4):
        given[f"weight/blocks/{i}/kernel"] = rng.normal(
            size=(3, 3, FILTERS if i else channels, FILTERS)
        )
        given[f"weight/blocks/{i}/scale"] = rng.uniform(0.5, 1.5, FILTERS)
        given[f"weight/blocks/{i}/bias"] = rng.normal(size=FILTERS) * 0.3
    given["weight/head/kernel"] = rng.normal(size=(FILTERS, WAYS))
    given["weight/head/bias"] = rng.normal(size=WAYS) * 0.3
    for part, each in (("support", SHOTS), ("query", QUERIES)):
        given[f"{part}_x"] = rng.integers(0, 256, (TASKS, WAYS * each, *shape)).astype(np.uint8)
        given[f"{part}_y"] = np.tile(np.repeat(np.arange(WAYS), each), (TASKS, 1))
    return given


def _meta_gradient(kind, given, steps, first_order):
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import learn2learn as l2l

    models = l2l.vision.models
    if kind == "strided":
        network = models.OmniglotCNN(WAYS, hidden_size=FILTERS)
    else:
        network = models.CNN4(WAYS, hidden_size=FILTERS, embedding_size=FILTERS)
    network.double()
    blocks = network.base if kind == "strided" else network.features
    parts = {"weight/head/kernel": network.classifier.weight}
    parts["weight/head/bias"] = network.classifier.bias
    for i, block in enumerate(blocks):
        parts[f"weight/blocks/{i}/kernel"] = block.conv.weight
        parts[f"weight/blocks/{i}/scale"] = block.normalize.weight
        parts[f"weight/blocks/{i}/bias"] = block.normalize.bias
    for name, parameter in parts.items():
        # [3, 3, C, F] to [F, C, 3, 3], [F, ways] to [ways, F]
        turned = given[name].transpose(3, 2, 0, 1) if given[name].ndim == 4 else given[name].T
        parameter.data = torch.tensor(turned).contiguous()

    def images(part, task):
        return torch.tensor(given[f"{part}_x"][task] / 255).permute(0, 3, 1, 2).contiguous()

    def loss(learner, part, task):
        labels = torch.tensor(given[f"{part}_y"][task])
        return torch.nn.functional.cross_entropy(learner(images(part, task)), labels)

    maml = l2l.algorithms.MAML(network, lr=RATE, first_order=first_order)
    losses = []
    for task in range(TASKS):
        learner = maml.clone()
        for _ in range(steps):
            learner.adapt(loss(learner, "support", task))
        losses.append(loss(learner, "query", task))
    torch.stack(losses).mean().backward()
    found = {"loss": torch.stack(losses).detach().numpy()}
    for name, parameter in parts.items():
        gradient = parameter.grad.numpy()
        turned = gradient.transpose(2, 3, 1, 0) if gradient.ndim == 4 else gradient.T
        found[name.replace("weight", "gradient", 1)] = turned
    return found


if __name__ == "__main__":
    np.savez_compressed(FILE, **make())
    print(f"wrote {FILE.name}, {FILE.stat().st_size:,} bytes")
