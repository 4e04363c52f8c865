"""Writing an EAGLE-3 head as other engines load it."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from spec_jax.config import EagleConfig, LinearRopeScaling, Llama3RopeScaling, ModelConfig, RopeFactors
from spec_jax.errors import UserError
from spec_jax.models.eagle import EagleHead
from spec_jax.tokenizer import Tokenizer

from .eagle import FINGERPRINT, LAYER_IDS, vocabulary_fingerprint
from .tensor_folder import write_json


def check_exportable(config: EagleConfig) -> None:
    """Raises UserError for a head that `export_head` cannot write."""
    plain = EagleConfig(
        version=3, layer=EagleConfig.llama_layer(config.layer),
        target_hidden_size=config.layer.hidden_size, draft_vocab_size=config.draft_vocab_size, captured=config.captured,
        has_target_ids=True,
    )  # fmt: skip
    if config != plain:
        raise UserError(f"only EAGLE-3 heads as train-draft makes them can be written, not {config}")


def export_head(
    head: EagleHead, target: ModelConfig, tokenizer: Tokenizer, folder: Path, extra: dict[str, Any] | None = None
) -> None:
    """Writes an EAGLE-3 head as `model.safetensors` (bfloat16) and `config.json`, as vLLM and SGLang load them: layers are
    named in both conventions. `extra` is written into config.json as it is. Both files appear whole or not at all."""
    config, layer = head.config, head.config.layer
    check_exportable(config)
    values = {".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(head))}
    K, G, hd = layer.num_kv_heads, layer.queries_per_kv, layer.head_dim
    groups = values["layer.attention.qkv.weight"].reshape(K, G + 2, hd, -1)
    q, k, v = (groups[:, part].reshape(-1, groups.shape[-1]) for part in (slice(0, G), G, G + 1))
    gate_up = values["layer.mlp.gate_up"]
    prefix = "midlayer."
    tensors = {
        "fc.weight": values["fc.weight"],
        prefix + "input_layernorm.weight": values["layer.embedding_norm.weight"],
        prefix + "hidden_norm.weight": values["layer.hidden_norm.weight"],
        prefix + "self_attn.q_proj.weight": q,
        prefix + "self_attn.k_proj.weight": k,
        prefix + "self_attn.v_proj.weight": v,
        prefix + "self_attn.o_proj.weight": values["layer.attention.output.weight"],
        prefix + "post_attention_layernorm.weight": values["layer.mlp_norm.weight"],
        prefix + "mlp.gate_proj.weight": gate_up[:, 0],
        prefix + "mlp.up_proj.weight": gate_up[:, 1],
        prefix + "mlp.down_proj.weight": values["layer.mlp.down.weight"],
        "norm.weight": values["norm.weight"],
        "lm_head.weight": values["head"],
    }
    tensors = {name: np.ascontiguousarray(value).astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    ids = values["target_ids"].astype(np.int64)
    tensors["d2t"] = ids - np.arange(len(ids))
    tensors["t2d"] = np.isin(np.arange(target.vocab_size), ids)
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.ffn_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_position,
        **_rope_fields(layer),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        LAYER_IDS: list(config.captured),
        "eagle_config": {LAYER_IDS: [i - 1 for i in config.captured], "use_aux_hidden_state": True},
        FINGERPRINT: vocabulary_fingerprint(tokenizer),
        **(extra or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    write_json(folder / "config.json", raw)


def _rope_fields(layer: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_theta": layer.rope_theta}
    match layer.rope_scaling:
        case None:
            pass
        case LinearRopeScaling(factor):
            fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        case Llama3RopeScaling(factor, low, high, original):
            fields["rope_scaling"] = {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }  # fmt: skip
        case RopeFactors():
            raise UserError("this target's rotary factors come from a GGUF file: no head's config.json can hold them")
    return fields
