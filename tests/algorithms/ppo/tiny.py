"""Environments that a few thousand steps must be enough to learn, and ones with a defect."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete


class Tiny(gymnasium.Env):
    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.actions = 0, []
        self.begin()
        return self.see(), {}

    def step(self, action):
        self.time += 1
        self.actions.append(action)
        reward, terminated, truncated = self.act(action)
        return self.see(), float(reward), terminated, truncated, {}

    def begin(self):
        pass

    def see(self):
        return np.array([self.time / 5, 1], np.float32)


class Last(Tiny):
    """Five steps, of which only the last action earns anything: 1 if it is 1.

    A reward that were counted one step late would be that of an ignored action.
    """

    def act(self, action):
        over = self.time == 5
        return over and action == 1, over, False


class Large(Tiny):
    """One step: which of two actions is right shows in the fourth digit of large numbers."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)

    def begin(self):
        self.right = int(self.np_random.integers(2))

    def see(self):
        return np.array([1e3 + self.right, 1e3 * self.np_random.normal()])

    def act(self, action):
        return action == self.right, True, False


class Both(Tiny):
    """Action 0 ends at once with 1, action 1 a step later with 1.5; both flags end it.

    An end that went on with the value of its observation, that of the start, would make 0 look
    better: 1 a step against 0.75.
    """

    def see(self):
        return np.array([float(self.actions == [1]), 1], np.float32)

    def act(self, action):
        if len(self.actions) == 1 and action == 1:
            return 0, False, False
        reward = 1.5 if self.time == 2 else 1
        self.actions = []
        return reward, True, True


class Constant(Tiny):
    """Three steps with a reward of 1 each, then cut short."""

    def act(self, action):
        return 1, False, self.time == 3


class Broken(Tiny):
    """Its fourth observation is no number."""

    def see(self):
        return np.array([self.time, np.nan if self.time == 3 else 0], np.float32)

    def act(self, action):
        return 0, False, False


class Open(Tiny):
    """Actions without bounds, but for one: the reward is what the environment got."""

    action_space = Box(np.float32([-np.inf, 0]), np.float32([np.inf, 1]), dtype=np.float32)

    def act(self, action):
        self.got = action
        return 0, self.time == 4, False


class Shifted(Tiny):
    """Actions 5 and 6."""

    action_space = Discrete(2, start=5)

    def act(self, action):
        assert action in (5, 6)
        return action == 6, True, False


class Nested(Tiny):
    observation_space = Dict({"a": Box(0.0, 1.0, (2,))})


class Several(Tiny):
    action_space = MultiDiscrete([2, 2])


TINY = (Last, Large, Both, Constant, Broken, Open, Shifted, Nested, Several)


def register():
    for kind in TINY:
        name = f"Tiny{kind.__name__}-v0"
        if name not in gymnasium.registry:
            gymnasium.register(name, kind, disable_env_checker=True)


register()
