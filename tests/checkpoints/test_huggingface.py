"""Hugging Face folders against the logits of `transformers`, and every way in which a folder can be unfit."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from spec_jax.checkpoints import open_model
from spec_jax.checkpoints.huggingface import HuggingFaceModel, read_config, read_tokenizer
from spec_jax.config import LinearRopeScaling, Llama3RopeScaling
from spec_jax.errors import UserError
from spec_jax.models.decoder import Decoder
from tests.checkpoints.helpers import (
    FIXTURES,
    TOLERANCE,
    copy_of,
    edit_config,
    edit_tensors,
    load,
    logits_of,
    reference,
)

NAMES = [
    "llama", "llama_biases", "llama_linear_rope", "llama_llama3_rope",
    "mistral_window", "qwen2", "qwen3", "qwen3_biases",
]  # fmt: skip


@pytest.fixture(scope="module")
def decoders() -> Callable[[str], Decoder]:
    made: dict[str, Decoder] = {}

    def get(name: str) -> Decoder:
        if name not in made:
            made[name] = load(HuggingFaceModel(FIXTURES / name))
        return made[name]

    return get


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return copy_of("llama", tmp_path)


def refuses(text: str) -> pytest.RaisesExc:
    return pytest.raises(UserError, match=re.escape(text))


@pytest.mark.parametrize("chunks", [[], [7], [1] * 23], ids=["at once", "7 and the rest", "one by one"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, chunks: list[int], decoders: Callable[[str], Decoder]) -> None:
    tokens, expected = reference(name)
    difference = np.abs(logits_of(decoders(name), tokens, chunks) - expected).max()
    assert difference <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama_llama3_rope", {"rope_scaling": None}),
        ("llama_linear_rope", {"rope_scaling": None}),
        ("mistral_window", {"sliding_window": None}),
        ("llama_biases", {"mlp_bias": False}),
        ("qwen2", {"qkv_bias": False}),
        ("qwen3", {"qk_norm": False}),
        ("qwen3_biases", {"attention_output_bias": False}),
    ],
)
def test_the_references_tell_when_a_part_is_left_out(name: str, change: dict[str, Any]) -> None:
    reader = HuggingFaceModel(FIXTURES / name)
    reader.config = replace(reader.config, **change)
    tokens, expected = reference(name)
    difference = np.abs(logits_of(load(reader), tokens) - expected).max()
    assert difference > 100 * TOLERANCE


def test_end_tokens_come_from_the_generation_config_then_from_the_config(llama: Path) -> None:
    edit_config(llama, eos_token_id=9)
    assert read_config(llama).eos_token_ids == (2, 3)
    (llama / "generation_config.json").unlink()
    assert read_config(llama).eos_token_ids == (9,)
    assert read_config(edit_config(llama, eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scaling_of_older_configs_is_read(llama: Path, key: str) -> None:
    edit_config(llama, rope_parameters=..., rope_theta=5e5, rope_scaling={key: "linear", "factor": 3.0})
    config = read_config(llama)
    assert (config.rope_theta, config.rope_scaling) == (5e5, LinearRopeScaling(3.0))
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    edit_config(llama, rope_scaling={key: "llama3", **scaling})
    assert read_config(llama).rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 16)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False, "layer_types": ...}, None),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 8),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
        ({"use_sliding_window": True, "layer_types": ..., "max_window_layers": 0}, 8),
        ({"use_sliding_window": True, "layer_types": ..., "max_window_layers": 2}, None),
    ],
)
def test_qwen2_slides_only_where_its_config_says_so(
    tmp_path: Path, changes: dict[str, Any], window: int | None
) -> None:
    assert read_config(edit_config(copy_of("qwen2", tmp_path), sliding_window=8, **changes)).sliding_window == window


def test_a_mix_of_sliding_and_full_layers_is_refused(tmp_path: Path) -> None:
    folder = copy_of("qwen2", tmp_path)
    edit_config(folder, sliding_window=8, use_sliding_window=True, layer_types=..., max_window_layers=1)
    with refuses("a mix of sliding and full attention layers is not supported"):
        read_config(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\xff"])
def test_a_broken_config_is_refused(llama: Path, content: str) -> None:
    (llama / "config.json").write_bytes(content.encode("latin-1"))
    with refuses(f"{llama / 'config.json'} cannot be read"):
        HuggingFaceModel(llama)


def test_a_folder_without_config_is_refused(llama: Path) -> None:
    (llama / "config.json").unlink()
    with refuses("has no config.json"):
        open_model(str(llama))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture 'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM, MistralForCausalLM, "
            "Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": ...}, "architecture None is not supported"),
        ({"architectures": 5}, "config.json has a field of the wrong kind"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' is not supported; supported: default, linear, llama3"),
        ({"rope_parameters": [1]}, "config.json has a field of the wrong kind"),
        ({"rope_parameters": {"rope_type": "linear"}}, "config.json lacks the field 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embeddings are not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({"vocab_size": ...}, "config.json lacks the field 'vocab_size'"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_attention_heads": 0, "head_dim": None}, "config.json has a field of the wrong kind"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
    ],
)
def test_an_unfit_config_is_refused_by_name(llama: Path, changes: dict[str, Any], message: str) -> None:
    with refuses(message):
        read_config(edit_config(llama, **changes))


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"],
)
def test_a_missing_tensor_is_named(llama: Path, name: str) -> None:
    reader = HuggingFaceModel(edit_tensors(llama, lambda tensors: tensors.pop(name)))
    with refuses(f"has no tensor {name}"):
        load(reader)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"vocab_size": 98}, "embedding"),
        ({"intermediate_size": 65}, "layers.0.mlp.gate_up"),
        ({"num_key_value_heads": 4}, "layers.0.attention.qkv"),
        ({"head_dim": 10}, "layers.0.attention.qkv"),
        ({"head_dim": 4}, "layers.0.attention.qkv"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(llama: Path, changes: dict[str, Any], path: str) -> None:
    with refuses(f"the tensors for {path} "):
        load(HuggingFaceModel(edit_config(llama, **changes)))


def test_tensors_that_do_not_fit_each_other_are_named(llama: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    reader = HuggingFaceModel(edit_tensors(llama, lambda tensors: tensors.update({name: tensors[name][:-1].copy()})))
    with refuses("the tensors for layers.1.mlp.gate_up "):
        load(reader)


def test_a_truncated_weight_file_is_refused_wherever_it_is_cut(llama: Path) -> None:
    path = llama / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for size in [0, 1, 7, 8, 9, 100, header - 1, header, header + 1, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with refuses(f"{path} is truncated or is no safetensors file"):
            HuggingFaceModel(llama)


def test_a_shard_that_the_index_names_but_is_not_there_is_named(tmp_path: Path) -> None:
    folder = copy_of("qwen3", tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with refuses(f"{folder} lacks model-00002-of-00003.safetensors"):
        HuggingFaceModel(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    folder = copy_of("qwen3", tmp_path)
    (folder / "model.safetensors.index.json").write_text(content)
    with refuses(str(folder / "model.safetensors.index.json")):
        HuggingFaceModel(folder)


def test_a_folder_without_safetensors_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with refuses("has no .safetensors file"):
        HuggingFaceModel(llama)


def test_a_folder_without_tokenizer_is_refused(llama: Path) -> None:
    with refuses(f"{llama} has no tokenizer.json"):
        open_model(str(llama))


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "unheard of"}}'])
def test_a_broken_tokenizer_is_refused(llama: Path, content: str) -> None:
    (llama / "tokenizer.json").write_text(content)
    with refuses(f"{llama / 'tokenizer.json'} cannot be read"):
        open_model(str(llama))


def test_a_whole_folder_opens(tiny_folder: Path) -> None:
    model = open_model(str(tiny_folder))
    assert model.tokenizer.decode(model.tokenizer.encode("naïve 🙂")) == "naïve 🙂"
    assert model.load(dtype="bfloat16").config == model.config


def test_the_chat_template_may_stand_in_a_file_or_under_a_name(tiny_folder: Path, llama: Path) -> None:
    (llama / "tokenizer.json").write_bytes((tiny_folder / "tokenizer.json").read_bytes())
    assert read_tokenizer(llama)[1:] == (None, {})
    settings = {"chat_template": "plain", "bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    (llama / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_tokenizer(llama)[1:] == ("plain", {"bos_token": "<s>", "eos_token": "</s>"})
    named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "named"}]
    (llama / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_tokenizer(llama)[1] == "named"
    (llama / "chat_template.jinja").write_text("file")
    assert read_tokenizer(llama)[1] == "file"


def test_truncation_and_padding_saved_in_a_tokenizer_do_not_touch_prompts(tiny_folder: Path, llama: Path) -> None:
    backend = Backend.from_file(str(tiny_folder / "tokenizer.json"))
    expected = backend.encode("a long prompt").ids
    backend.enable_truncation(3)
    backend.enable_padding(length=99)
    backend.save(str(llama / "tokenizer.json"))
    assert read_tokenizer(llama)[0].encode("a long prompt").ids == expected
