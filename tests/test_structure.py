"""What the compiled programs must look like: one loop, no host in it, the cache updated in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spec_jax.cache import abstract_cache, create_cache
from spec_jax.config import DraftConfig
from spec_jax.decode_loop import BurstShape, Constraint, create_state, decode_burst

HOST_PRIMITIVES = ("callback", "infeed", "outfeed", "device_put", "copy_to_host")


def constraint(num_slots: int, num_drafts: int, vocab_size: int) -> Constraint:
    return Constraint(
        np.zeros(num_slots, np.bool_), np.zeros(num_slots, np.bool_), np.zeros((num_slots, num_drafts), np.int32),
        np.zeros(num_slots, np.int32), np.zeros((num_slots, num_drafts + 1, -(-vocab_size // 32)), np.uint32),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["plain", "processors", "constrained"])
def burst(request, tiny_decoder):
    """A burst of two slots on a cache of 2,049 pages: its arguments and the function of them."""
    config = tiny_decoder.config
    graph, weights = nnx.split(tiny_decoder)
    cache = create_cache(abstract_cache(config, 2049, 16, jnp.bfloat16))
    state = create_state(2, 300, 16, 4, 5)
    is_constrained = request.param == "constrained"
    shape = BurstShape(DraftConfig(num_tokens=5), 2, 16, 8, (1, 6), 0, 1, request.param != "plain", is_constrained)
    bias = jnp.zeros((2, config.vocab_size), jnp.float32)
    host = constraint(2, 5, config.vocab_size) if is_constrained else None

    def run(weights, cache, state, bias, rounds, host):
        return decode_burst(nnx.merge(graph, weights), cache, state, bias, rounds, shape, host)

    return run, (weights, cache, state, bias, np.int32(8), host)


def primitives(jaxpr) -> list[str]:
    names = []
    for equation in jaxpr.eqns:
        names.append(equation.primitive.name)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    names += primitives(inner)
    return names


def test_the_loop_is_one_while_without_the_host(burst):
    run, arguments = burst
    names = primitives(jax.make_jaxpr(run)(*arguments).jaxpr)
    assert names.count("while") == 1
    assert not [name for name in names if any(part in name for part in HOST_PRIMITIVES)]


def test_the_cache_is_updated_in_place(burst):
    run, arguments = burst
    compiled = jax.jit(run, donate_argnums=(1, 2)).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    cache_bytes = arguments[1].num_bytes
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 4


def test_donated_buffers_keep_their_place(burst):
    run, (weights, cache, state, *rest) = burst
    compiled = jax.jit(run, donate_argnums=(1, 2)).lower(weights, cache, state, *rest).compile()
    cache, state = jax.tree.map(jnp.copy, (cache, state))
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    new_cache, _, _ = compiled(weights, cache, state, *rest)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(new_cache)] == before
