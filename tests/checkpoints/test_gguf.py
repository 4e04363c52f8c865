"""GGUF files written with the `gguf` package, against the logits of `transformers`, and every kind of damage."""

import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.checkpoints import open_model
from spec_jax.checkpoints.gguf_file import GGUFFile
from spec_jax.checkpoints.gguf_model import GGUFModel
from spec_jax.config import RopeFactors
from spec_jax.errors import UserError
from tests.checkpoints.gguf_writing import finish, interleave, write_gguf
from tests.checkpoints.helpers import TOLERANCE, load, logits_of, reference

QUANTIZED = ["Q8_0", "Q4_0", "Q4_1"]
TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "ab", "Ġ", "Ġa"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    },
    "llama": {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "▁a"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -4.0, -1.0, -5.0, -2.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    },
}


def refuses(text: str) -> pytest.RaisesExc:
    return pytest.raises(UserError, match=re.escape(text))


def logit_difference(path: Path, name: str) -> float:
    tokens, expected = reference(name)
    return float(np.abs(logits_of(load(GGUFModel(path)), tokens) - expected).max())


def start_of_data(path: Path) -> int:
    """Where the header ends: the reader of the `gguf` package says where the first tensor lies."""
    return min(tensor.data_offset for tensor in gguf.GGUFReader(path).tensors)


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", GGMLQuantizationType[kind])
    assert logit_difference(tmp_path / "m.gguf", "llama") <= TOLERANCE


@pytest.mark.parametrize(
    "name", ["llama_biases", "llama_linear_rope", "llama_llama3_rope", "mistral_window", "qwen2", "qwen3"]
)
def test_logits_of_the_other_models_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "m.gguf", name)
    assert logit_difference(tmp_path / "m.gguf", name) <= TOLERANCE


def test_f16_holds_the_weights_to_half_precision(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", GGMLQuantizationType.F16)
    assert logit_difference(tmp_path / "m.gguf", "llama") <= TOLERANCE


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("llama_llama3_rope", True)])
def test_a_file_without_output_tensor_ties_the_embeddings(tmp_path: Path, name: str, tied: bool) -> None:
    stored = write_gguf(tmp_path / "m.gguf", name)
    assert ("output.weight" not in stored) == tied
    assert GGUFModel(tmp_path / "m.gguf").config.tie_word_embeddings == tied


def test_rope_factors_are_read_as_stored(tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "m.gguf", "llama_llama3_rope")
    scaling = GGUFModel(tmp_path / "m.gguf").config.rope_scaling
    assert scaling == RopeFactors(tuple(stored["rope_freqs.weight"].tolist()))


def test_a_file_without_kv_heads_has_as_many_as_heads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", without=["llama.attention.head_count_kv"])
    assert GGUFModel(tmp_path / "m.gguf").config.num_kv_heads == 4


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_come_out_as_the_gguf_package_dequantizes_them(tmp_path: Path, kind: str) -> None:
    path, tensor_type = tmp_path / "m.gguf", GGMLQuantizationType[kind]
    stored = write_gguf(path, "llama", tensor_type)
    file = GGUFFile(path)
    assert set(file.names()) == set(stored)
    for name, values in stored.items():
        expected = values if values.ndim == 1 else quants.dequantize(values, tensor_type)
        np.testing.assert_array_equal(file.tensor(name, np.dtype(np.float32)), expected)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(("part", "num_heads"), [("q", 4), ("k", 2)])
def test_quantized_query_and_key_rows_return_to_their_places(
    tmp_path: Path, kind: str, part: str, num_heads: int
) -> None:
    path, tensor_type = tmp_path / "m.gguf", GGMLQuantizationType[kind]
    stored = quants.dequantize(write_gguf(path, "llama", tensor_type)[f"blk.1.attn_{part}.weight"], tensor_type)
    expected = np.empty_like(stored)
    expected[interleave(np.arange(len(stored)), num_heads)] = stored
    values = GGUFModel(path).tensor(f"model.layers.1.self_attn.{part}_proj.weight", np.dtype(np.float32))
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("kind", [*QUANTIZED, "Q5_0"])
def test_tensors_longer_than_a_slice_are_read_whole(tmp_path: Path, kind: str) -> None:
    tensor_type = GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(2 * 8192 + 5, 32)).astype(np.float32)
    stored = quants.quantize(values, tensor_type)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("large", stored, raw_dtype=tensor_type)
    finish(writer)
    expected = quants.dequantize(stored, tensor_type)
    read = GGUFFile(tmp_path / "m.gguf").tensor("large", np.dtype(ml_dtypes.bfloat16))
    assert read.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read, expected.astype(ml_dtypes.bfloat16))


def test_another_alignment_is_respected(tmp_path: Path) -> None:
    values = np.arange(7, dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("first", values)
    writer.add_tensor("second", values + 10)
    finish(writer)
    file = GGUFFile(tmp_path / "m.gguf")
    np.testing.assert_array_equal(file.tensor("first", np.dtype(np.float32)), values)
    np.testing.assert_array_equal(file.tensor("second", np.dtype(np.float32)), values + 10)


def test_all_kinds_of_metadata_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for size in (8, 16, 32, 64):
        getattr(writer, f"add_uint{size}")(f"u{size}", 2**size - 1)
        getattr(writer, f"add_int{size}")(f"i{size}", -(2 ** (size - 1)))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1 / 3)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 🙂")
    writer.add_array("words", ["a", "", "🙂"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("t", np.zeros(1, np.float32))
    finish(writer)
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    for size in (8, 16, 32, 64):
        assert (metadata[f"u{size}"], metadata[f"i{size}"]) == (2**size - 1, -(2 ** (size - 1)))
    assert (metadata["f32"], metadata["f64"], metadata["yes"], metadata["text"]) == (0.5, 1 / 3, True, "naïve 🙂")
    assert metadata["words"] == ["a", "", "🙂"]
    assert metadata["numbers"] == [1, 2, 3]
    assert metadata["nested"] == [[1, 2], [3]]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with refuses("m.gguf"):
        open_model(str(tmp_path / "m.gguf"))
    with refuses(f"cannot read {tmp_path / 'm.gguf'}"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGML" + bytes(100), b"PK\x03\x04" * 10, b"<html>not found</html>\n" * 9]
)
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with refuses(f"{tmp_path / 'm.gguf'} is not a GGUF file"):
        open_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_another_version_is_refused(tmp_path: Path, version: int) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with refuses(f"GGUF version {version}"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("tokenizer", ["gpt2", "llama"])
def test_a_truncated_file_is_refused_wherever_it_is_cut(tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, extra=TOKENIZERS[tokenizer])
    open_model(str(path))
    data, header = path.read_bytes(), start_of_data(path)
    cuts = {*range(0, header, header // 50), header - 1, *range(header, len(data), len(data) // 10), len(data) - 1}
    for size in sorted(cuts):
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match=r"truncated|not a GGUF file"):
            open_model(str(path))


def type_field(data: bytes, tensor: str) -> int:
    """Where the header keeps the type of a tensor."""
    name = struct.pack("<Q", len(tensor)) + tensor.encode()
    at = data.index(name) + len(name)
    (num_dimensions,) = struct.unpack_from("<I", data, at)
    return at + 4 + 8 * num_dimensions


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (999, "tensor blk.1.ffn_up.weight has the unknown type 999; known types: F32, F16"),
        (int(GGMLQuantizationType.Q4_K), "rows of 32 in blk.1.ffn_up.weight are no whole Q4_K blocks"),
    ],
)
def test_a_tensor_type_that_cannot_be_is_named(tmp_path: Path, kind: int, message: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, type_field(data, "blk.1.ffn_up.weight"), kind)
    path.write_bytes(data)
    with refuses(message):
        GGUFFile(path)


def test_a_tensor_type_without_dequantization_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, type_field(data, "blk.1.ffn_up.weight"), GGMLQuantizationType.I8)
    path.write_bytes(data)
    with refuses("tensor blk.1.ffn_up.weight has type I8"):
        load(GGUFModel(path))


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", architecture="gemma2")
    with refuses("architecture 'gemma2' is not supported; supported: llama, qwen2, qwen3"):
        open_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, "mixtures of experts (8 experts) are not supported"),
        ({"llama.rope.dimension_count": 4}, "partial rotary embeddings are not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported; supported: none, linear, llama3"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": "four"}, "factor is 'four'"),
        ({"llama.attention.head_count": 0}, "m.gguf has a field of the wrong kind"),
        ({"llama.attention.head_count_kv": [2, 4]}, "m.gguf has a field of the wrong kind"),
        ({"llama.attention.head_count_kv": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"llama.block_count": "two"}, "num_layers is 'two'"),
        ({"llama.context_length": 0}, "max_position is 0"),
        ({"llama.attention.sliding_window": -1.5}, "sliding_window is -1.5"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps is nan"),
        ({"llama.rope.freq_base": float("inf")}, "rope_theta is inf"),
        ({"tokenizer.ggml.eos_token_id": "end"}, "m.gguf has a field of the wrong kind"),
        ({"general.alignment": 0}, "general.alignment is 0"),
        ({"general.alignment": "wide"}, "general.alignment is 'wide'"),
    ],
)
def test_an_unfit_field_is_named(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "m.gguf", extra=extra)
    with refuses(message):
        GGUFModel(tmp_path / "m.gguf")


@pytest.mark.parametrize("field", ["llama.block_count", "llama.embedding_length", "llama.attention.head_count"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    write_gguf(tmp_path / "m.gguf", without=[field])
    with refuses(f"lacks the field {field}"):
        GGUFModel(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight", "blk.0.ffn_norm.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "m.gguf", without=[name])
    with refuses(f"has no tensor {name}"):
        load(GGUFModel(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"llama.feed_forward_length": 65}, "layers.0.mlp.gate_up"),
        ({"llama.attention.head_count_kv": 4}, "layers.0.attention.qkv"),
        ({"llama.attention.key_length": 10}, "layers.0.attention.qkv"),
        ({"llama.embedding_length": 64}, "embedding"),
    ],
)
def test_tensors_that_do_not_fit_the_fields_are_named(tmp_path: Path, extra: dict[str, Any], path: str) -> None:
    write_gguf(tmp_path / "m.gguf", extra=extra)
    with refuses(f"the tensors for {path} "):
        load(GGUFModel(tmp_path / "m.gguf"))


def test_rope_factors_of_another_length_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama_llama3_rope", extra={"llama.attention.key_length": 16})
    with refuses("4 RoPE factors for heads of 16 channels"):
        GGUFModel(tmp_path / "m.gguf")


HUGE = 2**40
KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<QQ", HUGE, 0) + bytes(1000),
        struct.pack("<QQ", 0, HUGE) + bytes(1000),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", HUGE) + bytes(1000),
        struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IQ", 8, HUGE) + bytes(1000),
        struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 0, HUGE) + bytes(1000),
        struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 12, 2**64 - 1) + bytes(1000),
        struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 8, HUGE) + bytes(1000),
        struct.pack("<QQ", 0, 1) + KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20_000,
        struct.pack("<QQ", 1, 0) + KEY + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0) + bytes(1000),
        struct.pack("<QQ", 1, 0) + KEY + struct.pack("<IQIQ", 1, 8, 0, 2**64 - 32) + bytes(1000),
        struct.pack("<QQ", 1, 0) + KEY + struct.pack("<I", 2**32 - 1) + bytes(1000),
    ],
    ids=[
        "tensors", "fields", "key", "string", "array", "array past 64 bits", "strings", "nesting", "shape", "offset",
        "dimensions",
    ],
)  # fmt: skip
def test_a_huge_count_is_refused_without_a_huge_allocation(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + body)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="truncated"):
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    for name, tokenizer in TOKENIZERS.items():
        write_gguf(folder / f"{name}.gguf", "llama_llama3_rope", GGMLQuantizationType.Q4_0, extra=tokenizer)
    return {name: folder / f"{name}.gguf" for name in TOKENIZERS}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("tokenizer", list(TOKENIZERS))
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_header_gives_a_model_or_a_user_error(
    whole_files: dict[str, Path], tokenizer: str, data: st.DataObject
) -> None:
    whole = whole_files[tokenizer]
    place = st.integers(4, start_of_data(whole) - 1)
    damaged = bytearray(whole.read_bytes())
    for at, flip in data.draw(st.lists(st.tuples(place, st.integers(1, 255)), min_size=1, max_size=4)):
        damaged[at] ^= flip
    path = whole.with_name("damaged.gguf")
    path.write_bytes(damaged)
    try:
        model = open_model(str(path))
        model.tokenizer.encode("ab a")
        model.load(dtype="float32")
    except UserError:
        pass
