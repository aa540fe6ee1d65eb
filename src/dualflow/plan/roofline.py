"""How long a model pass takes, from what it reads and what it multiplies: a roofline of one corner.

A pass reads every weight it needs once, whatever its number of rows, and every cached key once; it
multiplies for every row. The slower of the two sets its time, and every pass costs something for
being one.
"""

from dataclasses import dataclass

from dualflow.plan.costs import decode_flops, kv_bytes_per_token
from dualflow.plan.flops import mlp_of
from dualflow.spec import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine does in a second, as far as a pass can use it.

    The defaults are a small CPU's. Only ratios matter to who compares passes with each other.
    """

    bytes_per_second: float = 30e9
    flops_per_second: float = 150e9
    seconds_per_pass: float = 2e-4


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """What the passes of one model read and multiply.

    layer_bytes:      weights of all layers; those that an auxiliary row needs too are
                      ``shared_bytes`` of them (all but the key and value matrices).
    head_bytes:       the output matrix.
    kv_bytes:         of one cached token over all layers.
    primary_flops, aux_flops: of one row (of one position: all its auxiliary rows) over all layers,
                      attention left out.
    aux_head_flops:   of the head rows that an auxiliary position adds; ``head_flops``: of one.
    attention_flops:  of one row for one key; ``aux_rows``: auxiliary rows of a position.
    """

    layer_bytes: float
    shared_bytes: float
    head_bytes: float
    kv_bytes: float
    primary_flops: float
    aux_flops: float
    head_flops: float
    aux_head_flops: float
    attention_flops: float
    aux_rows: int


@dataclass(frozen=True, kw_only=True)
class PassShape:
    """The rows of one pass; numbers may be expectations.

    primary_rows, aux_positions: what runs through the layers.
    read_rows:      primary rows that are read out.
    keys:           cached tokens that are read, each sequence's once.
    primary_keys, aux_keys: keys that all primary rows, and all auxiliary positions, attend in sum.
    """

    primary_rows: float = 0
    aux_positions: float = 0
    read_rows: float = 0
    keys: float = 0
    primary_keys: float = 0
    aux_keys: float = 0


def model_work(
    config: ModelConfig, bytes_per_weight: float = 4, bytes_per_kv: float = 4
) -> ModelWork:
    """The work of ``config``'s passes, its weights and its cache held in so many bytes each."""
    one = decode_flops(config, 1)
    alone = decode_flops(config, 1, aux=False) if config.has_primary_readout else one
    per_key = alone.primary.attention
    width, query = config.hidden_size, config.num_heads * config.head_size
    key = config.kv_heads * config.head_size
    # Of experts those that one primary row goes through: other rows may want others.
    experts = config.moe.experts_per_token if config.moe else 0
    mlps = sum(mlp_of(config, layer, experts) for layer in range(config.num_layers)) / 2
    shared = config.num_layers * 2 * width * query + mlps
    return ModelWork(
        layer_bytes=(shared + config.num_layers * 2 * width * key) * bytes_per_weight,
        shared_bytes=shared * bytes_per_weight,
        head_bytes=width * config.vocab_size * bytes_per_weight,
        kv_bytes=kv_bytes_per_token(config, 1) * bytes_per_kv,
        primary_flops=alone.primary.total - alone.primary.attention - alone.primary.head,
        aux_flops=one.aux.total - one.aux.attention - one.aux.head,
        head_flops=2 * width * config.vocab_size,
        aux_head_flops=one.aux.head,
        attention_flops=per_key,
        aux_rows=config.num_flows,
    )


def pass_seconds(work: ModelWork, machine: Machine, shape: PassShape) -> float:
    """The time of one pass."""
    layers = work.layer_bytes if shape.primary_rows else work.shared_bytes
    if not shape.primary_rows and not work.aux_rows:
        layers = 0.0  # a second softmax alone runs no layer
    heads = work.head_bytes if shape.read_rows or shape.aux_positions else 0.0
    read = layers + heads + shape.keys * work.kv_bytes
    flops = (
        shape.primary_rows * work.primary_flops
        + shape.aux_positions * (work.aux_flops + work.aux_head_flops)
        + shape.read_rows * work.head_flops
        + (shape.primary_keys + shape.aux_keys * work.aux_rows) * work.attention_flops
    )
    slower = max(read / machine.bytes_per_second, flops / machine.flops_per_second)
    return machine.seconds_per_pass + slower
