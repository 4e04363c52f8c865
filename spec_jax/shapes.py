"""Shapes of models known by name: enough to compile and to measure without their weights."""

from dataclasses import replace

from .config import Llama3RopeScaling, ModelConfig

_LLAMA31 = ModelConfig(
    vocab_size=128_256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14_336,
    rms_norm_eps=1e-5, rope_theta=500_000.0, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192), max_position=131_072,
    eos_token_ids=(128_001, 128_008, 128_009),
)  # fmt: skip

SHAPES = {
    "llama-3.1-8b": _LLAMA31,
    "llama-3.1-70b": replace(_LLAMA31, hidden_size=8192, num_layers=80, num_heads=64, ffn_size=28_672),
    "qwen3-8b": ModelConfig(
        vocab_size=151_936, hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=12_288,
        rms_norm_eps=1e-6, rope_theta=1_000_000.0, max_position=40_960, qk_norm=True, eos_token_ids=(151_645, 151_643),
    ),
    "smollm2-135m": ModelConfig(
        vocab_size=49_152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, ffn_size=1536,
        rms_norm_eps=1e-5, rope_theta=100_000.0, max_position=8192, tie_word_embeddings=True, eos_token_ids=(2,),
    ),
}  # fmt: skip
"""As their config.json files say."""
