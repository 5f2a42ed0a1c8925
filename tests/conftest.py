"""Eight simulated devices, no implicit rank promotion, every warning an error."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests compile much and compute little.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    """Double precision for one test, in all threads: equalities are then sharp, never flaky."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
