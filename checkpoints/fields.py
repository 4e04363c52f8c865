"""What a checkpoint says about itself is checked before anything is built from it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from spec_jax.config import ModelConfig, RopeFactors
from spec_jax.errors import UserError

_SIZES = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "max_position",
)  # fmt: skip


@contextmanager
def damaged_fields(where: object) -> Iterator[None]:
    """Turns what Python raises for a missing field, or one of the wrong kind, into a UserError that names `where`."""
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{where} lacks the field {error}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        raise UserError(f"{where} has a field of the wrong kind: {error}") from None


_TOO_LARGE = 2**24  # for any size of a model; what a damaged file says would take all memory, or for ever


def check_config(config: ModelConfig, where: object) -> ModelConfig:
    """`config`, if every number in it is one that a decoder can have; else a UserError that names the field."""
    sizes = {name: getattr(config, name) for name in _SIZES}
    if config.sliding_window is not None:
        sizes["sliding_window"] = config.sliding_window
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value < _TOO_LARGE:
            raise UserError(f"{where}: {name} is {value!r}: it must be a positive whole number below {_TOO_LARGE}")
    numbers = {"rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope_theta}
    if isinstance(config.rope_scaling, RopeFactors):
        if len(config.rope_scaling.factors) != config.head_dim // 2:
            raise UserError(
                f"{where}: {len(config.rope_scaling.factors)} RoPE factors for heads of {config.head_dim} channels: "
                f"{config.head_dim // 2} are needed"
            )
    elif config.rope_scaling is not None:
        numbers |= asdict(config.rope_scaling)
    for name, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise UserError(f"{where}: {name} is {value!r}: it must be a positive number")
    if any(type(i) is not int for i in config.eos_token_ids):
        raise UserError(f"{where}: the end tokens {config.eos_token_ids!r} are no token ids")
    return config
