"""The two foreign spellings of a V4 configuration, released and transformers, turned into `ModelConfig` fields.

Both are read together: where a file gives the same fact twice (`compress_ratios` and `layer_types`, say) the two must
agree. A key nobody here reads is refused, because a setting that is silently ignored is a different model.
"""

from __future__ import annotations

from typing import Any

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.presets import nearest

SLIDING = "sliding_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"

EXTRA = "undertow"
"""Key under which a foreign configuration carries the fields that only Undertow has."""

EXTRA_FIELDS = ("csa_ratio", "indexer", "index_hadamard")

SHARED = tuple(
    name
    for name in ModelConfig.model_fields
    if name not in (*EXTRA_FIELDS, "compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling")
)
"""Fields that both spellings name as `ModelConfig` does."""

REQUIRED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups"),
    *("o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "n_routed_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor", "swiglu_limit", "rms_norm_eps"),
    "num_nextn_predict_layers",
)

# Settings of other architectures or of switches that Undertow does not have: accepted at the one value it builds.
FIXED: dict[str, object] = {
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
}

# Keys without a bearing on the architecture. Number formats are read from the tensors themselves.
UNUSED = frozenset(
    (
        *("_name_or_path", "architectures", "auto_map", "dtype", "expert_dtype", "model_type", "output_router_logits"),
        *("pad_token_id", "quantization_config", "router_aux_loss_coef", "router_jitter_noise", "torch_dtype"),
        *("transformers_version", "use_cache"),
    )
)

_SCHEDULE = ("compress_ratios", "layer_types", "compress_rates", "num_hash_layers", "mlp_layer_types")
_ROTARY = ("qk_rope_head_dim", "partial_rotary_factor", "rope_scaling", "rope_parameters")
_KNOWN = frozenset((*SHARED, *FIXED, *UNUSED, *_SCHEDULE, *_ROTARY, EXTRA))
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


def translate(values: dict[str, Any]) -> dict[str, Any]:
    """`ModelConfig` fields of a released or transformers `config.json`.

    Raises `ConfigError` for keys that are unknown, missing, contradictory or ask for an architecture Undertow lacks.
    """
    _refuse_unknown(values)
    given = {key: value for key, value in values.items() if value is not None}
    missing = [key for key in REQUIRED if key not in given]
    if missing:
        raise ConfigError(f"missing {', '.join(missing)}; a V4 configuration names its whole shape")
    for key, allowed in FIXED.items():
        if key in given and not _same(given[key], allowed):
            raise ConfigError(f"{key} is {given[key]!r}, the V4 architecture has {allowed!r}")
    if (blocks := _count(given, "num_nextn_predict_layers")) > 1:
        raise ConfigError(f"num_nextn_predict_layers is {blocks}, the V4 architecture has at most one MTP block")
    extra = _extra(given)
    fields = {key: given[key] for key in SHARED if key in given}
    fields |= {**extra, **_layers(given, extra), **_hash_layers(given)}
    fields |= _rotary(given, "rope_scaling" in values)
    return fields


def _same(value: object, allowed: object) -> bool:
    return isinstance(value, bool) is isinstance(allowed, bool) and value == allowed


def _refuse_unknown(values: dict[str, Any]) -> None:
    unknown = [key for key in values if key not in _KNOWN]
    if any(key.startswith("dspark_") for key in unknown):
        raise ConfigError("dspark_* keys mark the DSpark refresh of V4, another model that Undertow does not build")
    if unknown:
        named = ", ".join(f"{key!r}{nearest(key, sorted(_KNOWN))}" for key in unknown)
        raise ConfigError(f"unknown key {named}; remove it if it does not change the model")


def _extra(given: dict[str, Any]) -> dict[str, Any]:
    extra = given.get(EXTRA, {})
    if not isinstance(extra, dict):
        raise ConfigError(f"{EXTRA} is {extra!r}, a mapping of {', '.join(EXTRA_FIELDS)} is expected")
    for key in extra:
        if key not in EXTRA_FIELDS:
            raise ConfigError(f"unknown key {f'{EXTRA}.{key}'!r}{nearest(key, list(EXTRA_FIELDS))}")
    return extra


def _count(given: dict[str, Any], key: str) -> int:
    value = given[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{key} is {value!r}, a whole number is expected")
    return value


def _entries(given: dict[str, Any], key: str, kind: type) -> list[Any] | None:
    """The list under `key` cut to the main stack; entries past it may only be the MTP blocks' sliding-window ones."""
    if key not in given:
        return None
    layers, blocks = _count(given, "num_hidden_layers"), _count(given, "num_nextn_predict_layers")
    entries = given[key]
    if not isinstance(entries, list) or not all(isinstance(e, kind) and not isinstance(e, bool) for e in entries):
        raise ConfigError(f"{key} is {entries!r}, a list with one {kind.__name__} a layer is expected")
    if len(entries) not in (layers, layers + 1, layers + blocks):
        raise ConfigError(
            f"{key} has {len(entries)} entries; {layers} (num_hidden_layers) or {layers + blocks} (with MTP) are needed"
        )
    if any(entry not in (0, SLIDING, "moe") for entry in entries[layers:]):
        raise ConfigError(f"{key} ends in {entries[layers:]}; an MTP block is sliding-window, with learned routing")
    return entries[:layers]


def _is_rate(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _layers(given: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`compress_ratios` and `csa_ratio` from either spelling of the layer schedule."""
    ratios, types = _entries(given, "compress_ratios", int), _entries(given, "layer_types", str)
    rates = given.get("compress_rates", {})
    if not isinstance(rates, dict) or not all(k in (SPARSE, HEAVY) and _is_rate(v) for k, v in rates.items()):
        raise ConfigError(
            f"compress_rates is {rates!r}; {SPARSE} and {HEAVY} are expected, each 2 tokens an entry or more"
        )
    sparse = rates.get(SPARSE, extra.get("csa_ratio", 4))
    if extra.get("csa_ratio", sparse) != sparse:
        raise ConfigError(f"{EXTRA}.csa_ratio {extra['csa_ratio']} contradicts compress_rates.{SPARSE} {sparse}")
    if ratios is None and types is None:
        raise ConfigError("missing the layer schedule, compress_ratios or layer_types")
    if types is not None:
        spelled = _ratios_of_types(types, rates)
        if ratios not in (None, spelled):
            raise ConfigError(
                f"compress_ratios {ratios} contradict layer_types and compress_rates, which give {spelled}"
            )
        ratios = spelled
    elif rates and any(ratio and ratio not in rates.values() for ratio in ratios or ()):
        raise ConfigError(f"compress_ratios {ratios} contradict compress_rates {rates}; drop one of them")
    assert ratios is not None
    return {"compress_ratios": [*ratios, *[0] * given["num_nextn_predict_layers"]], "csa_ratio": sparse}


def _ratios_of_types(types: list[str], rates: dict[str, int]) -> list[int]:
    for kind in types:
        if kind != SLIDING and kind not in (SPARSE, HEAVY):
            near = nearest(kind, [SLIDING, SPARSE, HEAVY])
            raise ConfigError(f"layer_types names {kind!r}{near} (allowed: {SLIDING}, {SPARSE}, {HEAVY})")
        if kind != SLIDING and kind not in rates:
            raise ConfigError(f"layer_types names {kind}, compress_rates does not give its tokens an entry")
    if HEAVY in types and rates[HEAVY] == rates.get(SPARSE, 4):
        raise ConfigError(f"compress_rates gives both kinds {rates[HEAVY]} tokens an entry; they must differ")
    return [0 if kind == SLIDING else rates[kind] for kind in types]


def _hash_layers(given: dict[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    if "num_hash_layers" in given:
        counts["num_hash_layers"] = _count(given, "num_hash_layers")
    types = _entries(given, "mlp_layer_types", str)
    if types is not None:
        leading = next((i for i, kind in enumerate(types) if kind != "hash_moe"), len(types))
        if any(kind != "moe" for kind in types[leading:]):
            raise ConfigError(f"mlp_layer_types {types} must be leading 'hash_moe' layers, then 'moe'")
        counts["mlp_layer_types"] = leading
    if not counts:
        raise ConfigError("missing num_hash_layers (or mlp_layer_types)")
    return {"num_hash_layers": _agreed(counts)}


def _agreed(values: dict[str, Any]) -> Any:
    """The one value that all spellings of a fact give."""
    first = next(iter(values.values()))
    if any(value != first for value in values.values()):
        said = ", ".join(f"{key} gives {value}" for key, value in values.items())
        raise ConfigError(f"contradiction, {said}")
    return first


def _rotary(given: dict[str, Any], scaling_named: bool) -> dict[str, Any]:
    main, compress = _nested_rope(given)
    fields = {
        "rope_theta": _base(given, "rope_theta", main, "rope_parameters.main.rope_theta"),
        "compress_rope_theta": _base(given, "compress_rope_theta", compress, "rope_parameters.compress.rope_theta"),
    }
    widths = {"qk_rope_head_dim": given["qk_rope_head_dim"]} if "qk_rope_head_dim" in given else {}
    for name, part in (("", given), ("rope_parameters.main.", main), ("rope_parameters.compress.", compress)):
        if "partial_rotary_factor" in part:
            widths[f"{name}partial_rotary_factor"] = _rotated(_count(given, "head_dim"), part["partial_rotary_factor"])
    if not widths:
        raise ConfigError("missing qk_rope_head_dim (or partial_rotary_factor)")
    scalings: dict[str, Any] = {}
    if scaling_named:
        scalings["rope_scaling"] = _yarn(given.get("rope_scaling") or {"type": "default"}, "rope_scaling")
    if compress:
        scalings["rope_parameters"] = _yarn(compress, "rope_parameters.compress")
    if not scalings:
        raise ConfigError("missing rope_scaling (null where the compressed layers have no YaRN)")
    return fields | {"qk_rope_head_dim": _agreed(widths), "rope_scaling": _agreed(scalings)}


def _base(given: dict[str, Any], key: str, part: dict[str, Any], nested: str) -> Any:
    said = {key: given[key]} if key in given else {}
    if "rope_theta" in part:
        said[nested] = part["rope_theta"]
    if not said:
        raise ConfigError(f"missing {key}")
    return _agreed(said)


def _rotated(head_dim: int, factor: object) -> int:
    """Rotary dimensions that a `partial_rotary_factor` means: transformers truncates the product."""
    if not isinstance(factor, (int, float)) or isinstance(factor, bool):
        raise ConfigError(f"partial_rotary_factor is {factor!r}, a number is expected")
    return int(head_dim * factor)


def _nested_rope(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `main` and `compress` parts of `rope_parameters`, empty where the key is absent."""
    parameters = given.get("rope_parameters")
    if parameters is None:
        return {}, {}
    main, compress = map(parameters.get, ("main", "compress")) if isinstance(parameters, dict) else (None, None)
    if not isinstance(main, dict) or not isinstance(compress, dict) or len(parameters) != 2:
        raise ConfigError(f"rope_parameters is {parameters!r}, mappings 'main' and 'compress' are expected")
    odd = [key for key in main if key not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")]
    if odd or main.get("rope_type", main.get("type", "default")) != "default":
        raise ConfigError(f"rope_parameters.main is {main!r}; sliding-window layers have a plain rotary table")
    if compress.get("rope_type", compress.get("type")) == "yarn" and "attention_factor" not in compress:
        raise ConfigError("rope_parameters.compress lacks attention_factor: V4 has 1.0, YaRN's own would be another")
    return main, compress


def _yarn(part: dict[str, Any], name: str) -> dict[str, Any]:
    """YaRN constants; a plain table is factor 1, which is the same table."""
    if not isinstance(part, dict):
        raise ConfigError(f"{name} is {part!r}, a mapping is expected")
    kind = part.get("rope_type", part.get("type"))
    if kind not in ("yarn", "default"):
        raise ConfigError(f"{name} has type {kind!r}; V4's compressed layers have 'yarn' or 'default'")
    neutral = {"attention_factor": 1, "mscale": 1, "mscale_all_dim": 1, "truncate": True}
    constants = _YARN if kind == "yarn" else ()
    for key, value in part.items():
        if key in neutral and not _same(value, neutral[key]):
            raise ConfigError(f"{name}.{key} is {value!r}; V4 does not scale by it, {neutral[key]} is expected")
        if key not in (*neutral, *constants, "type", "rope_type", "rope_theta", "partial_rotary_factor"):
            raise ConfigError(f"unknown key {f'{name}.{key}'!r} of type {kind}{nearest(key, [*neutral, *constants])}")
    if kind == "default":
        return {"factor": 1.0}
    for key in ("factor", "original_max_position_embeddings"):
        if key not in part:
            raise ConfigError(f"{name} lacks {key}")
    return {"beta_fast": 32, "beta_slow": 1, **{key: part[key] for key in _YARN if key in part}}
