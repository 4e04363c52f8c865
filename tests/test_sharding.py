"""Tensor parallelism over virtual devices gives the unsharded logits, and the same text through the whole engine."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spec_jax.cache import abstract_cache, create_cache
from spec_jax.config import DraftConfig, EngineConfig
from spec_jax.engine import Engine
from spec_jax.errors import UserError
from spec_jax.handoff import PrefillMesh
from spec_jax.models.decoder import Decoder, Rows
from spec_jax.models.layers import random_weights
from spec_jax.sharding import ShardingRules, place, tensor_parallel_mesh, use_mesh
from tests.conftest import TINY
from tests.test_engine import PROMPTS, finish, make_request

WIDE = replace(
    TINY, num_heads=8, num_kv_heads=4, hidden_size=64, ffn_size=64, vocab_size=260, qkv_bias=True, qk_norm=True
)
RULES = ShardingRules()


def mesh_of(size: int, first: int = 0) -> jax.sharding.Mesh:
    """As the compiler takes it."""
    return jax.sharding.Mesh(np.array(jax.devices()[first : first + size]), ("tp",))


def explicit(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """As `jax.make_mesh` makes it where nothing else is said."""
    return jax.make_mesh(mesh.devices.shape, mesh.axis_names, devices=list(mesh.devices.flat))


def sharded(mesh) -> Decoder:
    values = random_weights(seed=2, dtype=jnp.float32)
    return Decoder(lambda path, shape, axes: place(np.asarray(values(path, shape, axes)), axes, mesh, RULES), WIDE)


@jax.jit
def run_pass(decoder, cache):
    tokens = jnp.arange(20, dtype=jnp.int32)[None] * 7 % 260
    rows = Rows(jnp.arange(20)[None], jnp.array([[4, 2, 1]]), jnp.ones((1, 20), bool))
    hidden, cache = decoder(tokens, rows, cache)
    return decoder.logits(hidden), cache


def logits(decoder, mesh=None):
    return run_pass(decoder, create_cache(abstract_cache(WIDE, 5, 8, jnp.float32, mesh, RULES)))


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_logits_are_the_unsharded_ones(size):
    expected, _ = logits(sharded(None))
    mesh = mesh_of(size)
    found, cache = logits(sharded(mesh), mesh)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert cache.layers[0].k.values.sharding.spec[1] == "tp"


def test_every_weight_names_its_logical_axes():
    for path, variable in nnx.to_flat_state(nnx.state(sharded(None))):
        axes = variable.get_metadata()["logical_axes"]
        assert len(axes) == variable[...].ndim, path
        RULES.spec(axes)


@pytest.mark.parametrize("size", [2, 4])
def test_every_matrix_is_really_split(size):
    decoder = sharded(mesh_of(size))
    block = decoder.layers[0]
    for weight in (
        decoder.embedding,
        decoder.head,
        block.attention.qkv.weight,
        block.mlp.gate_up,
        block.mlp.down.weight,
    ):
        shard = weight[...].addressable_shards[0].data
        assert shard.size * size == weight[...].size


@pytest.mark.parametrize("size", [2, 4])
def test_no_pass_gathers_a_weight(size):
    """Each device multiplies by its own share: the collectives of a pass move activations only."""
    mesh = mesh_of(size)
    with use_mesh(mesh):  # as the engine's programs are traced
        lowered = run_pass.lower(sharded(mesh), create_cache(abstract_cache(WIDE, 5, 8, jnp.float32, mesh, RULES)))
        text = lowered.compile().as_text()
    gathered = [line for line in text.splitlines() if " all-gather(" in line or " all-to-all(" in line]
    weights = (WIDE.ffn_size * WIDE.hidden_size, WIDE.hidden_size**2, WIDE.vocab_size * WIDE.hidden_size)
    for line in gathered:
        shape = re.search(r"= \w+\[([\d,]*)\]", line)
        assert shape is not None, line
        assert np.prod([int(n) for n in shape[1].split(",")]) < min(weights), line


PLAIN = [{}, {"temperature": 0.8}]
PROCESSED = [{"logit_bias": {5: 3.0}, "logprobs": 2, "prompt_logprobs": 1, "frequency_penalty": 0.5}]


@pytest.mark.parametrize("asked", [PLAIN, pytest.param(PROCESSED, marks=pytest.mark.slow)])
def test_the_whole_engine_gives_the_same_text_on_a_mesh(asked):
    config = EngineConfig(
        max_model_len=64, max_num_seqs=2, page_size=8, prefill_chunks=(16,), min_context_bucket=64, rounds_per_burst=4
    )
    outputs = []
    for mesh in (None, mesh_of(2)):
        engine = Engine(WIDE, DraftConfig(num_tokens=3), config, "float32", mesh, RULES)
        engine.load(sharded(mesh))
        requests = [make_request(engine, p, seed=4, **params) for p in PROMPTS[:3] for params in asked]
        outputs.append(finish(engine, requests))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("prefill", "decode", "kv_cache_dtype"), [(2, 4, "auto"), (4, 0, "fp8")])
@pytest.mark.slow
def test_prefill_on_other_devices_gives_the_same_text(prefill, decode, kv_cache_dtype):
    """Prompts longer than a chunk and than a page, on meshes that share no device and are split differently."""
    config = EngineConfig(
        max_model_len=96, max_num_seqs=2, page_size=8, prefill_chunks=(12, 24), min_context_bucket=96,
        rounds_per_burst=4, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    prompts = [list(range(3, 3 + n)) for n in (50, 1, 2, 25)]
    outputs = []
    for meshes in ((None, None), (mesh_of(decode) if decode else None, mesh_of(prefill, first=4))):
        given = [mesh and explicit(mesh) for mesh in meshes]
        engine = Engine(WIDE, DraftConfig(num_tokens=3), config, "float32", given[0], RULES, given[1])
        engine.load(sharded(meshes[0]))
        requests = [make_request(engine, p, seed=4, prompt_logprobs=1) for p in prompts]
        outputs.append((finish(engine, requests), [len(r.prompt_logprobs) for r in requests]))
    assert outputs[0] == outputs[1]


def test_decoding_goes_on_while_a_prompt_is_on_its_way(monkeypatch):
    config = EngineConfig(
        max_model_len=96, max_num_seqs=2, page_size=8, prefill_chunks=(16,), min_context_bucket=96, rounds_per_burst=2
    )
    engine = Engine(WIDE, DraftConfig(num_tokens=0), config, "float32", None, RULES, mesh_of(2, first=4))
    engine.load(sharded(None))
    expected = [
        finish(engine, [make_request(engine, p, max_tokens=n)])[0] for p, n in ((PROMPTS[0], 60), (PROMPTS[3], 8))
    ]

    first, second = make_request(engine, PROMPTS[0], max_tokens=60), make_request(engine, PROMPTS[3], max_tokens=8)
    engine.add(first)
    while first.num_committed < 4:
        engine.step()
    is_here = False
    monkeypatch.setattr(PrefillMesh, "has_arrived", property(lambda self: is_here))
    engine.add(second)
    before = first.num_committed
    for _ in range(6):
        engine.step()
    assert first.num_committed >= before + 8  # two a burst
    assert second.num_committed == 0
    is_here = True
    while engine.has_work:
        engine.step()
    assert [first.output, second.output] == expected


def test_a_prompt_that_is_given_up_on_its_way_leaves_others_alone(monkeypatch):
    config = EngineConfig(
        max_model_len=96, max_num_seqs=2, num_kv_tokens=96, page_size=8, prefill_chunks=(16,), min_context_bucket=96,
        rounds_per_burst=2,
    )  # fmt: skip
    engine = Engine(WIDE, DraftConfig(num_tokens=0), config, "float32", None, RULES, mesh_of(2, first=4))
    engine.load(sharded(None))
    [expected] = finish(engine, [make_request(engine, PROMPTS[4], max_tokens=20)])
    is_here = False
    monkeypatch.setattr(PrefillMesh, "has_arrived", property(lambda self: is_here))
    first, given_up = make_request(engine, PROMPTS[0], max_tokens=24), make_request(engine, PROMPTS[3], max_tokens=8)
    for request in (first, given_up):
        engine.add(request)
    for _ in range(4):
        engine.step()
    engine.abort(given_up)  # its pages go to the next one
    is_here = True
    assert finish(engine, [make_request(engine, PROMPTS[4], max_tokens=20)]) == [expected]


def test_a_mesh_that_does_not_divide_the_heads_names_the_sizes_that_do():
    with pytest.raises(UserError, match=r"kv_heads 4 does not divide over 8 devices .* sharded over 1, 2, 4"):
        RULES.check(mesh_of(8), WIDE)


@pytest.mark.parametrize("size", [0, -1, 9, 2.0, "2", None, True])
def test_a_size_of_tensor_parallelism_that_cannot_be_names_those_that_can(size):
    with pytest.raises(UserError, match=f"tensor_parallel_size is {size!r}: allowed are 1 to 8, the CPU devices"):
        tensor_parallel_mesh(size)


def test_what_is_no_mesh_is_refused():
    with pytest.raises(UserError, match=r"a mesh of list was given: make one .* jax.make_mesh"):
        RULES.usable(jax.devices()[:2], WIDE)


def test_a_mesh_without_the_axis_is_named():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(UserError, match=r"the mesh has axes \('model',\), but kv_heads is sharded over 'tp'"):
        RULES.check(mesh, WIDE)
