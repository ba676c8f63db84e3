"""Random small model shapes for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from undertow.config.model import ModelConfig, RopeScaling


@st.composite
def configs(draw: st.DrawFn, heavy_ratios: int = 2, indexers: tuple[str, ...] = ("shared", "own_rank")) -> ModelConfig:
    """Any valid configuration of a few layers, with at most `heavy_ratios` different HCA ratios."""

    def some(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    csa = draw(st.sampled_from((4, 2, 6)))
    heavy = draw(st.lists(st.sampled_from((8, 16, 128)), min_size=1, max_size=heavy_ratios, unique=True))
    layers, blocks, groups, experts = some(1, 5), some(0, 1), some(1, 3), some(1, 4)
    ratios = [draw(st.sampled_from((0, csa, *heavy))) for _ in range(layers)]
    rotary = 2 * some(1, 4)
    values: dict[str, Any] = dict(
        vocab_size=some(4, 40), hidden_size=some(2, 9), num_hidden_layers=layers,
        num_attention_heads=groups * some(1, 2), head_dim=rotary + some(0, 50), qk_rope_head_dim=rotary,
        q_lora_rank=some(1, 5), o_groups=groups, o_lora_rank=some(1, 4), csa_ratio=csa,
        compress_ratios=(*ratios, *[0] * blocks), sliding_window=some(1, 9), index_n_heads=some(1, 4),
        index_head_dim=draw(st.sampled_from((8, 16, 32))), index_topk=some(1, 9),
        indexer=draw(st.sampled_from(indexers)), index_hadamard=draw(st.booleans()), hc_mult=some(1, 4),
        hc_sinkhorn_iters=some(1, 30), hc_eps=draw(st.sampled_from((1e-6, 3e-5))), n_routed_experts=experts,
        num_experts_per_tok=some(1, experts), moe_intermediate_size=some(1, 6), num_hash_layers=some(0, layers),
        routed_scaling_factor=draw(st.sampled_from((1.5, 2.5))), swiglu_limit=draw(st.sampled_from((7.0, 10.0))),
        rope_theta=draw(st.sampled_from((10000.0, 5000.0))), max_position_embeddings=some(64, 999),
        rope_scaling=RopeScaling(
            factor=draw(st.sampled_from((1.0, 2.5, 16.0))), original_max_position_embeddings=some(8, 99),
            beta_fast=32.0, beta_slow=1.0,
        ),
        num_nextn_predict_layers=blocks, rms_norm_eps=draw(st.sampled_from((1e-6, 1e-5))), bos_token_id=some(0, 3),
    )  # fmt: skip
    return ModelConfig(**values)
