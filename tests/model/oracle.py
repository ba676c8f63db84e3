"""transformers' DeepSeek-V4 as an oracle: random configurations, random weights in both models, and margins to redraw
by."""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from undertow.config.model import ModelConfig
from undertow.model.transformer import Transformer
from undertow.ops import Ops

KINDS = {0: "sliding_attention", 1: "compressed_sparse_attention", 2: "heavily_compressed_attention"}

# transformers' names -> ours, in order; written by hand, apart from the product's own table.
RENAMES = [
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.norm\.", "norm."),
    (r"^model\.hc_head\.hc_", "hc_head."),
    (r"^model\.layers\.", "layers."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1."),
    (r"\.self_attn\.compressor\.indexer\.(kv_proj|gate_proj|position_bias|kv_norm)", r".attn.indexer.compressor.\1"),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer."),
    (r"\.self_attn\.", ".attn."),
    (r"\.compressor\.kv_proj\.", ".compressor.wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.compressor\.position_bias$", ".compressor.ape"),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.indexer\.scorer\.", ".indexer."),
    (r"\.attn\.q_a_proj\.", ".attn.wq_a."),
    (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.attn\.q_b_proj\.", ".attn.wq_b."),
    (r"\.attn\.kv_proj\.", ".attn.wkv."),
    (r"\.attn\.o_a_proj\.", ".attn.wo_a."),
    (r"\.attn\.o_b_proj\.", ".attn.wo_b."),
    (r"\.attn\.sinks$", ".attn.attn_sink"),
    (r"\.mlp\.shared_experts\.gate_proj\.", ".ffn.shared_experts.w1."),
    (r"\.mlp\.shared_experts\.up_proj\.", ".ffn.shared_experts.w3."),
    (r"\.mlp\.shared_experts\.down_proj\.", ".ffn.shared_experts.w2."),
    (r"\.mlp\.experts\.gate_up_proj$", ".ffn.experts.w13"),
    (r"\.mlp\.experts\.down_proj$", ".ffn.experts.w2"),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".ffn.gate.bias"),
    (r"\.mlp\.", ".ffn."),
]


def native_name(name: str) -> str:
    """Our name of a transformers tensor."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


@dataclass
class Pair:
    """The same random model twice."""

    config: ModelConfig
    theirs: DeepseekV4ForCausalLM
    ours: Transformer


def random_shape(rng: random.Random) -> dict:
    """A small V4 shape of both vocabularies of field names, every layer type possible, at least 16 indexer heads."""
    rope = 2 * rng.randint(1, 4)
    groups = rng.choice([1, 2, 3])
    layers = rng.randint(2, 5)
    csa, hca = rng.choice([4, 4, 4, 2, 3]), rng.choice([5, 8, 16, 32])
    kinds = [rng.choice([0, 1, 1, 2]) for _ in range(layers)]
    experts = rng.randint(3, 9)
    return dict(
        vocab_size=rng.randint(40, 300), hidden_size=rng.choice([24, 32, 48, 64]), num_hidden_layers=layers,
        num_attention_heads=groups * rng.randint(1, 3), head_dim=rope + rng.choice([6, 8, 24]), qk_rope_head_dim=rope,
        q_lora_rank=rng.choice([12, 24]), o_groups=groups, o_lora_rank=rng.choice([8, 16]),
        sliding_window=rng.choice([1, 4, 8, 16, 33]), index_n_heads=rng.choice([16, 17, 24]), index_head_dim=16,
        index_topk=rng.randint(1, 6), hc_mult=rng.choice([2, 4, 4]), hc_sinkhorn_iters=rng.choice([1, 5, 20]),
        n_routed_experts=experts, num_experts_per_tok=rng.randint(2, min(experts, 4)),
        moe_intermediate_size=rng.choice([16, 24, 32]), num_hash_layers=rng.randint(0, min(layers, 2)),
        routed_scaling_factor=rng.choice([1.0, 1.5, 2.5]), swiglu_limit=rng.choice([0.3, 1.0, 10.0]),
        rope_theta=rng.choice([10000.0, 500.0]), compress_rope_theta=rng.choice([160000.0, 40000.0]),
        kinds=kinds, csa_ratio=csa, hca_ratio=hca,
        original=rng.choice([64, 256, 65536]), factor=rng.choice([4.0, 16.0]),
    )  # fmt: skip


def ours_config(shape: dict, **overrides: object) -> ModelConfig:
    """Our configuration of a random shape, without MTP unless `overrides` says so."""
    shape = dict(shape)
    kinds, csa, hca = shape.pop("kinds"), shape.pop("csa_ratio"), shape.pop("hca_ratio")
    scaling = dict(original_max_position_embeddings=shape.pop("original"), factor=shape.pop("factor"))
    ratios = [(0, csa, hca)[kind] for kind in kinds]
    fields = dict(
        shape, compress_ratios=ratios, csa_ratio=csa, rope_scaling=scaling, num_nextn_predict_layers=0,
        max_position_embeddings=4096,
    )  # fmt: skip
    return ModelConfig.model_validate(fields | overrides)


def their_config(shape: dict) -> DeepseekV4Config:
    """transformers' configuration of a random shape."""
    shape = dict(shape)
    kinds, csa, hca = shape.pop("kinds"), shape.pop("csa_ratio"), shape.pop("hca_ratio")
    hashed = shape.pop("num_hash_layers")
    layers = shape["num_hidden_layers"]
    scaling = dict(type="yarn", factor=shape.pop("factor"), beta_fast=32, beta_slow=1,
                   original_max_position_embeddings=shape.pop("original"))  # fmt: skip
    return DeepseekV4Config(
        **shape, layer_types=[KINDS[k] for k in kinds], compress_rates={KINDS[1]: csa, KINDS[2]: hca},
        mlp_layer_types=["hash_moe"] * hashed + ["moe"] * (layers - hashed), rope_scaling=scaling,
        num_key_value_heads=1, num_nextn_predict_layers=0, max_position_embeddings=4096, tie_word_embeddings=False,
        scoring_func="sqrtsoftplus", norm_topk_prob=True, attn_implementation="eager",
    )  # fmt: skip


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every tensor away from its initial value: norms near 1, weights 0.15 N(0, 1), biases and gates not zero."""
    g = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=g, dtype=torch.float32)
        if "inv_freq" in name:
            continue
        if name.endswith("tid2eid"):
            experts = next(t.shape[0] for n, t in model.named_parameters() if n == name.replace("tid2eid", "weight"))
            table = torch.rand(tensor.shape[0], experts, generator=g).argsort(-1)
            tensor.copy_(table[:, : tensor.shape[1]])
        elif "norm" in name:
            tensor.copy_(1 + 0.1 * noise)
        elif name.endswith(("scale", "hc_scale")):
            tensor.copy_(1 + 0.3 * noise)
        elif name.endswith(("e_score_correction_bias", "gate.bias")):
            tensor.copy_(0.1 * noise)
        elif name.endswith(("base", "hc_base", "position_bias", "ape", "sinks", "attn_sink")):
            tensor.copy_(0.5 * noise)
        else:
            tensor.copy_(0.15 * noise)


def pair(shape: dict, seed: int, ops: Ops | None = None, dtype: torch.dtype = torch.float32) -> Pair:
    """transformers' model and ours with equal random weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = DeepseekV4ForCausalLM(their_config(shape)).eval()
    randomise(theirs, seed)
    config = ours_config(shape)
    ours = Transformer(config, ops=ops)
    state = {native_name(name): tensor.clone() for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict(state, strict=True)
    if dtype == torch.float64:
        theirs.set_experts_implementation("eager")
        theirs.double()
        ours.double()
    return Pair(config, theirs, ours)


def margins(model: Transformer, ids: Tensor) -> tuple[float, float]:
    """How near a decision is to falling the other way, over layers and tokens: the smallest gap between the last expert
    or entry taken and the first one left, and the smallest distance of a SwiGLU input from its clamp."""
    gaps, clamps = [torch.inf], [torch.inf]

    def note(scores: Tensor, k: int) -> None:
        if 0 < k < scores.shape[-1]:
            ranked = scores.sort(-1, descending=True)[0]
            gap = ranked[..., k - 1] - ranked[..., k]
            gap = gap[torch.isfinite(gap)]
            if gap.numel():
                gaps.append(gap.min().item())

    handles = []
    for block in model.layers:
        gate = block.ffn.gate
        if not gate.hashed:
            handles.append(
                gate.register_forward_hook(lambda m, _, out: note(out.scores + m.bias, m.config.num_experts_per_tok))
            )
        if block.attn.kind == "csa":
            handles.append(block.attn.indexer.register_forward_hook(_indexer_hook(note), with_kwargs=False))
        limit = model.config.swiglu_limit
        for expert in (block.ffn.experts, block.ffn.shared_experts):
            handles.append(expert.register_forward_hook(_clamp_hook(clamps, limit)))
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return min(gaps), min(clamps)


def _clamp_hook(clamps: list[float], limit: float):
    def hook(module, inputs, _):
        if hasattr(module, "w13"):
            gate, up = module.ops.grouped_linear(inputs[0], module.w13, inputs[2]).chunk(2, -1)
        else:
            gate, up = module.w1(inputs[0]), module.w3(inputs[0])
        clamps.append(min((gate - limit).abs().min().item(), (up.abs() - limit).abs().min().item()))

    return hook


def _indexer_hook(note):
    def hook(module, inputs, _):
        (q, weights, keys), segments = inputs
        scores = module.ops.indexer_scores(q, keys, weights, segments, module.config.csa_ratio)
        note(scores, module.config.index_topk)

    return hook


def gradients(model: torch.nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and the gradient of the next-token loss by native name; parameters without one are absent."""
    model.zero_grad()
    out = model(ids)
    logits = getattr(out, "logits", out)
    labels = ids[:, 1:].flatten() if ids.shape[1] > 1 else ids.flatten()
    rows = logits[:, :-1].flatten(0, 1) if ids.shape[1] > 1 else logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(rows, labels).backward()
    return logits.detach(), {native_name(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def worst_gradient(ours: dict[str, Tensor], theirs: dict[str, Tensor], floor: float) -> tuple[float, str]:
    """Largest error of a parameter's gradient relative to its norm, errors below `floor` x the global norm not
    counted."""
    total = torch.stack([g.double().norm() for g in theirs.values()]).norm().item()
    worst = (0.0, "")
    for name in ours.keys() | theirs.keys():
        zero = torch.zeros(())
        a, b = ours.get(name, zero).double(), theirs.get(name, zero).double()
        error, norm = (a - b).norm().item(), b.norm().item()
        if error > floor * total:
            worst = max(worst, (error / max(norm, floor * total), name))
    return worst
