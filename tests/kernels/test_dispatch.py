"""Which implementation runs on which device, and what is said when it is not the best one."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from spec_jax.kernels import Pages, Unsupported, dispatch, has_mosaic, paged_attention, runs, write_kv


def compiling_for(kind, num_cores=132):
    """As when a program is compiled for this GPU on a machine that may have none."""
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=num_cores)
    return use_abstract_mesh(AbstractMesh((1,), ("tp",), abstract_device=device))


def shapes(head_dim=128, page=64):
    pages = Pages(jax.ShapeDtypeStruct((3, 1, page, head_dim), jnp.bfloat16))
    q = jax.ShapeDtypeStruct((1, 2, 4, head_dim), jnp.bfloat16)
    return q, pages, pages, jax.ShapeDtypeStruct((1, 2), jnp.int32), jax.ShapeDtypeStruct((1, 2), jnp.int32)


def attend(implementation=None):
    return partial(paged_attention, scale=1.0, implementation=implementation)


def chosen(implementation=None):
    return dispatch.run("f", implementation, lambda: lambda: "mosaic", lambda: "xla")


@pytest.fixture
def warnings(caplog):
    dispatch._say_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="spec_jax")
    yield lambda: [record.getMessage() for record in caplog.records if record.name == "spec_jax"]
    dispatch._say_once.cache_clear()


def never():
    pytest.fail("the Mosaic version was imported")


def test_a_cpu_runs_xla_and_says_nothing(warnings):
    assert not has_mosaic()
    assert dispatch.run("f", None, never, lambda x: x + 1, 1) == 2
    jax.eval_shape(attend(), *shapes(head_dim=72))
    assert warnings() == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NVIDIA H200", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA B200", True),
        ("NVIDIA GB300", True),
        ("NVIDIA A100", False),
        ("NVIDIA GeForce RTX 5090", False),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", False),
    ],
)
def test_hopper_and_datacenter_blackwell_run_mosaic(kind, expected):
    with compiling_for(kind):
        assert has_mosaic() is expected
        assert runs("mosaic", attend(), *shapes()) is expected
        assert chosen() == ("mosaic" if expected else "xla")


def test_an_ampere_gpu_refuses_mosaic_before_anything_is_compiled():
    with compiling_for("NVIDIA A100", 108):
        with pytest.raises(Unsupported, match="Hopper or Blackwell GPU, this is NVIDIA A100"):
            dispatch.run("f", "mosaic", never, never)
        with pytest.raises(Unsupported, match=r"paged_attention: .* this is NVIDIA A100"):
            jax.eval_shape(attend("mosaic"), *shapes())
        assert dispatch.run("f", None, never, lambda: "xla") == "xla"


def test_xla_runs_where_it_is_asked_for():
    with compiling_for("NVIDIA H200"):
        assert dispatch.run("f", "xla", never, lambda: "xla") == "xla"


@pytest.mark.parametrize(
    ("arguments", "reason"), [({"head_dim": 72}, "head_dim 72 is not among"), ({"page": 8}, "page size 8 is not among")]
)
def test_shapes_that_mosaic_does_not_take_run_xla_and_are_named_once(arguments, reason, warnings):
    with compiling_for("NVIDIA H200"):
        for _ in range(2):
            q = shapes(**arguments)[0]
            assert jax.eval_shape(lambda *x: attend()(*x), *shapes(**arguments)).shape == q.shape
        (warning,) = warnings()
        assert warning.startswith("paged_attention: ")
        assert reason in warning
        assert "XLA" in warning
        assert not runs("mosaic", attend(), *shapes(**arguments))
        with pytest.raises(Unsupported, match=reason):
            jax.eval_shape(attend("mosaic"), *shapes(**arguments))
    assert len(warnings()) == 1


def test_on_a_cpu_mosaic_is_refused_where_nothing_interprets_it():
    q = jnp.zeros((1, 1, 2, 64), jnp.bfloat16)
    pages = Pages(jnp.zeros((2, 1, 64, 64), jnp.bfloat16))
    integers = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(Unsupported, match="this is a CPU, and interpret mode is off"):
        paged_attention(q, pages, pages, integers, integers, scale=1.0, implementation="mosaic")
    none = q[:, :0], pages, pages, integers, integers[:, :0]
    with pytest.raises(Unsupported, match="there are no rows"):
        paged_attention(*none, scale=1.0, implementation="mosaic")
    assert paged_attention(*none, scale=1.0).shape == (1, 0, 2, 64)


def test_the_cache_write_falls_back_alike(warnings):
    q, pages, _, tables, positions = shapes(head_dim=72)
    rows = jax.ShapeDtypeStruct((1, 2, 1, 72), q.dtype)
    with compiling_for("NVIDIA B200", 148):
        jax.eval_shape(write_kv, pages, pages, rows, rows, tables, positions, positions)
    assert warnings() == ["write_kv: head_dim 72 is no multiple of 16; the slower XLA version runs instead"]


@pytest.mark.parametrize(("kind", "num_cores"), [("NVIDIA H200", 132), ("NVIDIA B200", 148)])
def test_the_device_that_is_compiled_for_gives_its_name_and_size(kind, num_cores):
    with compiling_for(kind, num_cores):
        assert (dispatch.device_kind(), dispatch.num_cores()) == (kind, num_cores)
