"""Records what PyTorch makes of a full update of PPO: `python -m tests.references.ppo`.

Advantages by a loop over time, 4 passes in 4 minibatches in a given order, gradients clipped, Adam;
written as CleanRL's ppo.py and ppo_continuous_action.py do it, in float64 and from random numbers.
Some transitions are ignored ones: they are left out of their minibatch.
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("ppo.npz")
TIMES, ENVS, SIZE, ACTIONS, HIDDEN, PASSES, MINIBATCHES = 8, 4, 3, 2, 5, 4, 4
GAMMA, LAMBDA, CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.9, 0.8, 0.2, 0.5, 0.01
LEARNING_RATE, EPSILON, CLIP_NORM = 3e-2, 1e-5, 0.5
KINDS = {"discrete": True, "continuous": False}  # the first clips values too


def make():
    """All recorded arrays: for both kinds of actions, the numbers given and the results."""
    import torch

    record = {"torch": torch.__version__}
    for kind, discrete in KINDS.items():
        given = _given(discrete)
        record |= {f"{kind}/{name}": x for name, x in (given | _update(given, discrete)).items()}
    return record


def _given(discrete):
    rng = np.random.default_rng(int(discrete))
    rows, shape = TIMES * ENVS, (TIMES, ENVS)
    sizes = [(SIZE, HIDDEN), (HIDDEN, HIDDEN)]
    given = {
        f"weight/{net}/{i}/{part}": rng.normal(size=(size if part == "kernel" else size[1:])) * 0.5
        for net, outputs in (("policy", ACTIONS), ("value", 1))
        for i, size in enumerate([*sizes, (HIDDEN, outputs)])
        for part in ("kernel", "bias")
    }
    if not discrete:
        given["weight/log_std"] = rng.normal(size=ACTIONS) * 0.3
    ends = rng.random((2, *shape)) < 0.2
    return given | {
        "observation": rng.normal(size=(rows, SIZE)),
        "action": rng.integers(0, ACTIONS, rows) if discrete else rng.normal(size=(rows, ACTIONS)),
        "log_prob": rng.normal(size=rows) * 0.3 - (0.7 if discrete else 2.5),
        "value": rng.normal(size=rows),
        "reward": rng.normal(size=shape),
        "next_value": rng.normal(size=shape),
        "terminated": ends[0],
        "truncated": ends[1],
        "real": rng.random(rows) < 0.85,
        "order": np.stack([rng.permutation(rows) for _ in range(PASSES)]),
    }


def _update(given, discrete):
    import torch

    at = {name: torch.tensor(x) for name, x in given.items()}
    params = {
        name: x.clone().requires_grad_() for name, x in at.items() if name.startswith("weight/")
    }
    value, advantage = at["value"].reshape(TIMES, ENVS), torch.zeros(TIMES, ENVS).double()
    later = torch.zeros(ENVS).double()
    for t in reversed(range(TIMES)):
        following = torch.where(at["terminated"][t], 0, at["next_value"][t])
        delta = at["reward"][t] + GAMMA * following - value[t]
        over = at["terminated"][t] | at["truncated"][t]
        advantage[t] = later = delta + GAMMA * LAMBDA * torch.where(over, 0, later)
    target = (advantage + value).reshape(-1)
    advantages = advantage.reshape(-1)

    optimizer = torch.optim.Adam(params.values(), lr=LEARNING_RATE, eps=EPSILON)
    losses, norms = [], []
    for order in at["order"]:
        for rows in order.chunk(MINIBATCHES):
            rows = rows[at["real"][rows]]
            loss = _loss(params, at, rows, advantages[rows], target[rows], discrete)
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(params.values(), CLIP_NORM))
            optimizer.step()
            losses.append(loss.detach())
    results = {"advantage": advantage, "loss": torch.stack(losses), "norm": torch.stack(norms)}
    results |= {name.replace("weight", "updated", 1): x.detach() for name, x in params.items()}
    return {name: x.numpy() for name, x in results.items()}


def _loss(params, at, rows, advantage, target, discrete):
    import torch

    def network(name):
        x = at["observation"][rows]
        for i in range(3):
            weight, bias = (params[f"weight/{name}/{i}/{part}"] for part in ("kernel", "bias"))
            x = (torch.tanh(x) if i else x) @ weight + bias
        return x

    out, value = network("policy"), network("value")[:, 0]
    if discrete:
        policy = torch.distributions.Categorical(logits=out)
        log_prob, entropy = policy.log_prob(at["action"][rows]), policy.entropy()
    else:
        policy = torch.distributions.Normal(out, params["weight/log_std"].exp().expand_as(out))
        log_prob, entropy = policy.log_prob(at["action"][rows]).sum(1), policy.entropy().sum(1)
    ratio = (log_prob - at["log_prob"][rows]).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    error = (value - target) ** 2
    if discrete:
        old = at["value"][rows]
        error = torch.max(error, (old + (value - old).clamp(-CLIP, CLIP) - target) ** 2)
    return -gain.mean() + VALUE_WEIGHT * 0.5 * error.mean() - ENTROPY_WEIGHT * entropy.mean()


if __name__ == "__main__":
    np.savez_compressed(FILE, **make())
    print(f"wrote {FILE.name}, {FILE.stat().st_size:,} bytes")
