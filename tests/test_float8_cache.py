"""The float8 cache end to end: numbers against a float64 model with such a cache, texts, memory, and checkpoints' scales."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spec_jax import LLM, SamplingParams, UserError
from spec_jax.cache import abstract_cache, bytes_per_token, create_cache
from spec_jax.checkpoints import open_model
from spec_jax.config import EngineConfig
from spec_jax.models.decoder import Rows
from tests.conftest import TINY
from tests.reference import ReferenceModel
from tests.test_engine import PROMPTS, finish, make_engine, make_request

K_SCALES, V_SCALES = (0.011, 0.007), (0.004, 0.009)  # one per layer; small enough to cut some values off
TEXT = [5, 40, 41, 42, 7, 7, 40, 41, 200, 3, 258, 17, 40, 41, 42, 9]


def float8(rows, scale):
    return np.clip(rows / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def dynamic(kind, layer, rows):
    largest = np.abs(rows).max(-1, keepdims=True)
    return float8(rows, np.where(largest > 0, largest / 448, 1))


def static(kind, layer, rows):
    return float8(rows, (K_SCALES if kind == "k" else V_SCALES)[layer])


def logits_of(decoder):
    """Of TEXT, prefilled in two passes."""
    cache = create_cache(abstract_cache(decoder.config, 6, 4, "fp8"))
    found = []
    for places in (np.arange(9), np.arange(9, len(TEXT))):
        rows = Rows(jnp.asarray(places[None]), jnp.array([[5, 2, 1, 4]]), jnp.ones((1, len(places)), bool))
        hidden, cache = decoder(jnp.asarray(np.array(TEXT)[places][None]), rows, cache)
        found.append(np.asarray(decoder.logits(hidden))[0])
    return np.concatenate(found), cache


def write_scales(folder, names=("self_attn.k_scale", "self_attn.v_scale"), **changed):
    """Adds calibrated scales to a checkpoint; `changed` replaces some by their names, None leaves one out."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(TINY.num_layers):
        for name, scales in zip(names, (K_SCALES, V_SCALES), strict=True):
            key = f"model.layers.{layer}.{name}"
            value = changed.get(f"{name.split('.')[-1]}_{layer}", scales[layer])
            if value is not None:
                tensors[key] = np.asarray(value, np.float32)
    save_file(tensors, path)
    return folder


@pytest.fixture
def folder(tmp_path, tiny_folder):
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_logits_are_those_of_a_float64_model_with_a_float8_cache(tiny_decoder):
    found, _ = logits_of(tiny_decoder)
    assert distance(found, ReferenceModel(tiny_decoder, dynamic).logits(TEXT)) < 1e-3
    exact = distance(found, ReferenceModel(tiny_decoder).logits(TEXT))
    assert 3e-3 < exact < 0.1  # float8 is to be seen in them, and no more than that


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ],
)
def test_calibrated_scales_are_honoured_under_each_of_their_names(folder, tiny_decoder, names):
    model = open_model(str(write_scales(folder, names)))
    assert model.config.has_kv_scales
    found, cache = logits_of(model.load(dtype="float32"))
    assert distance(found, ReferenceModel(tiny_decoder, static).logits(TEXT)) < 1e-3
    assert distance(found, ReferenceModel(tiny_decoder, dynamic).logits(TEXT)) > 3e-3
    for layer, (k, v) in enumerate(cache.layers):
        np.testing.assert_array_equal(np.unique(k.scales[2]), np.float32(K_SCALES[layer]))
        np.testing.assert_array_equal(np.unique(v.scales[2]), np.float32(V_SCALES[layer]))


@pytest.mark.parametrize("params", [{}, pytest.param({"temperature": 0.8}, marks=pytest.mark.slow)])
def test_drafts_change_no_text(tiny_decoder, params):
    texts, accepted = [], 0
    for k in (0, 3):
        engine = make_engine(tiny_decoder, k, kv_cache_dtype="fp8")
        requests = [make_request(engine, p, seed=i, **params) for i, p in enumerate(PROMPTS)]
        texts.append(finish(engine, requests))
        accepted += sum(sum(request.counters[2]) for request in requests)
    assert texts[0] == texts[1]
    assert accepted > 0 or params


def test_a_cache_in_float8_takes_half_of_bfloat16_and_its_scales():
    bytes_of = {dtype: create_cache(abstract_cache(TINY, 8, 16, dtype)).num_bytes for dtype in ("fp8", "bfloat16")}
    assert bytes_of["fp8"] / bytes_of["bfloat16"] == pytest.approx((1 + 4 / TINY.head_dim) / 2)
    for dtype, size in bytes_of.items():
        assert bytes_per_token(TINY, dtype) * 8 * 16 == size


def test_the_float8_cache_is_updated_in_place(tiny_decoder):
    """XLA:CPU would compute with float8 arrays in a wider type: the whole cache would be copied."""
    shapes = abstract_cache(TINY, 2049, 16, "fp8")

    def run(cache):
        rows = Rows(jnp.array([[3, 4]]), jnp.array([[5, 2]]), jnp.ones((1, 2), bool))
        return tiny_decoder(jnp.array([[7, 8]]), rows, cache)

    memory = jax.jit(run, donate_argnums=0).lower(shapes).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 8


def test_it_is_an_option_of_llm(tiny_folder):
    llm = LLM(str(tiny_folder), dtype="float32", kv_cache_dtype="fp8", max_model_len=64)
    [output] = llm.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(output.token_ids) == 5
    assert llm.engine.programs.cache.layers[0].k.values.dtype == jnp.uint8


@pytest.mark.parametrize(
    ("value", "said"), [(0.0, "is 0.0"), (float("nan"), "is nan"), (-1.0, "is -1.0"), (np.inf, "is inf")]
)
def test_a_scale_that_cannot_be_is_refused_by_name(folder, value, said):
    write_scales(folder, v_scale_1=value)
    with pytest.raises(UserError, match=rf"v_scale of layer 1 for a float8 cache {said}.*kv_cache_dtype auto") as error:
        LLM(str(folder), kv_cache_dtype="fp8")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("value", "said"), [(None, "is missing"), ([1.0, 2.0], r"is of shape \(2,\)")])
def test_scales_of_some_layers_only_are_refused(folder, value, said):
    write_scales(folder, k_scale_1=value)
    with pytest.raises(UserError, match=f"k_scale of layer 1 for a float8 cache {said}"):
        LLM(str(folder), kv_cache_dtype="fp8")


def test_damaged_scales_do_not_matter_to_another_cache(folder):
    llm = LLM(str(write_scales(folder, k_scale_0=float("nan"))), dtype="float32", max_model_len=64)
    assert llm.generate("hello", SamplingParams(max_tokens=3))


@pytest.mark.parametrize(
    ("quantization", "is_read"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}, "config_groups": {}}, True),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, False),
        ({"quant_method": "awq"}, False),
    ],
)
def test_checkpoints_quantized_in_their_cache_alone_are_read(folder, quantization, is_read):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    if is_read:
        assert open_model(str(write_scales(folder))).config.has_kv_scales
    else:
        with pytest.raises(UserError, match="holds quantized weights"):
            open_model(str(folder))


def test_an_unknown_cache_dtype_names_the_known_ones():
    with pytest.raises(UserError, match="kv_cache_dtype 'int4' is unknown: allowed are auto, fp8"):
        EngineConfig(max_model_len=64, kv_cache_dtype="int4")
