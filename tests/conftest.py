"""Eight simulated devices, no implicit rank promotion, every warning an error."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """Double precision for one test: equalities are then sharp (1e-12) and never flaky."""
    with jax.enable_x64(True):
        yield
