"""Operator x architecture x dtype x shape -> the backend that takes it, or why kernels refuse; no GPU is asked."""

from __future__ import annotations

import pytest
import torch

from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.config.presets import PRESETS
from undertow.ops import OPS
from undertow.ops.registry import FIXED_ORDER, INVARIANT, TRITON, Machine, choose, recipe_key, summary, taker
from undertow.ops.segments import Rows, Segments, entry_rows, window_rows
from undertow.quant.blocks import grid_shape
from undertow.quant.formats import UE8M0
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import ACTIVATIONS, MXFP4, WEIGHTS, Scheme

CHIPS = ("gfx942", "gfx950", "sm_90")
OF_SEQUENCES = {"sparse_attention", "csa_attention", "indexer_scores", "indexer_select", "indexer_distillation"}
KERNELS = {
    *OF_SEQUENCES,
    *("wide_linear", "rms_norm", "rotary", "head_norm_rotary", "hyper_in", "hyper_expand", "hyper_head"),
    *("compress_pool", "route"),
    *(
        "dispatch_order",
        "permute",
        "unpermute",
        "permute_weights",
        "grouped_linear",
        "linear_quantised",
        "grouped_linear_quantised",
        "swiglu",
        "linear_cross_entropy",
        "linear_cross_entropy_mean",
    ),
}
FIXED_KERNELS = {
    *("linear", "wide_linear", "block_linear", "grouped_linear", "linear_cross_entropy", "linear_cross_entropy_mean"),
}
MACHINES = {
    "a CPU": (Machine("cpu"), "triton kernels run on a GPU"),
    "a GPU without Triton": (Machine("cuda", "gfx950", triton=False), "triton is not installed"),
    "sm_75": (Machine("cuda", "sm_75"), "triton kernels need sm_80 or later, this is sm_75"),
    **{name: (Machine("cuda", name), None) for name in (*CHIPS, "sm_80", "sm_100", "gfx1201", "gfx90a")},
}


@pytest.mark.parametrize("name", MACHINES)
def test_machines(name):
    machine, there = MACHINES[name]
    for op in OPS:
        reason = there if op in KERNELS else f"no triton kernel for {op} in this version"
        choice = choose(op, machine)
        assert ("triton" in choice.refused) == bool(reason), op
        assert choice.refused.get("triton", "").startswith(reason or "")
        assert (choice.chosen, choice.others) == (("reference", ()) if reason else ("triton", ("reference",))), op
        assert choose(op, machine, "reference").chosen == "reference"
        if reason:
            with pytest.raises(InputError, match=r"backend 'triton' cannot serve here: "):
                choose(op, machine, "triton")
        else:
            assert choose(op, machine, "triton").others == ()


@pytest.mark.parametrize("chip", CHIPS)
def test_a_fixed_order_is_kept_by_kernels_that_have_one_or_the_reference(chip):
    assert set(INVARIANT) == FIXED_KERNELS <= FIXED_ORDER
    for op in OPS:
        choice = choose(op, Machine("cuda", chip), invariant=True)
        kept = op in INVARIANT if op in FIXED_ORDER else op in KERNELS
        assert choice.invariant and choice.chosen == ("triton" if kept else "reference"), op
        if kept:
            assert choice.serves == (INVARIANT if op in FIXED_ORDER else TRITON)[op].serves
        elif op in KERNELS:
            assert choice.refused["triton"] == "triton kernels keep no fixed order for batch_invariant"


def test_a_kernel_of_fixed_order_alone_serves_nothing_else():
    machine = Machine("cuda", "sm_90")
    for op in FIXED_KERNELS - KERNELS:
        assert choose(op, machine).chosen == "reference"
        assert choose(op, machine, "triton", invariant=True).others == ()
    x, weight = empty(40, 64), empty(32, 64)
    assert taker(choose("linear", machine, invariant=True), x, weight, invariant=True) == ("triton", "")
    assert taker(choose("linear", machine, invariant=True), x, weight.half(), invariant=True)[0] == "reference"


def test_what_a_choice_says():
    machine = Machine("cuda", "sm_90")
    assert set(TRITON) == KERNELS
    serves = TRITON["indexer_select"].serves
    assert str(choose("indexer_select", machine)) == f"triton ({serves}; reference otherwise)"
    assert str(choose("indexer_select", machine, "triton")) == f"triton ({serves}; an error otherwise)"
    assert str(choose("linear", machine)) == "reference"
    choices = [choose(op, machine) for op in ("linear", "indexer_select", "indexer_scores", "block_linear")]
    assert summary(choices) == (
        f"indexer_select, indexer_scores by triton ({serves}; reference otherwise); the others by reference"
    )
    assert summary(choices[:1]) == "all by reference"


def call(
    op, *, dtype=torch.bfloat16, heads=64, width=512, window=128, index_heads=64, index_width=128, past=0,
    weights=torch.float32, lse=torch.float32, invariant=False, keys=10, entries=10, window_keys=40,
):  # fmt: skip
    """Arguments of a call over two documents, the second of which continues after `past` tokens."""

    def empty(*shape, of=dtype):
        return torch.empty(shape, dtype=of, device="meta")

    tokens, ratio, segments = 40, 4, Segments.from_lengths([24, 16], [0, past])
    made, latents = (segments.layout(kind) for kind in (entry_rows(ratio), window_rows(window)))
    seen = Rows(empty(keys, index_width), made)
    index = empty(tokens, index_heads, index_width), seen, empty(tokens, index_heads, of=weights)
    q, pool = empty(tokens, heads, width), Rows(empty(entries, width), made)
    selected = empty(tokens, 8, of=torch.int64)
    scale = {"scale": width**-0.5, "invariant": invariant}
    if op == "indexer_scores":
        return (*index, segments, ratio), {"invariant": invariant}
    if op == "indexer_select":
        return (*index, 8, segments, ratio), {"invariant": invariant}
    if op == "indexer_distillation":
        return (*index, q, pool, empty(tokens, heads, of=lse), selected, segments), {"ratio": ratio, **scale}
    rows = Rows(empty(window_keys, width), latents)
    given = (q, rows, pool, selected, empty(heads, of=torch.float32), segments)
    return given, {"window_size": window, "ratio": ratio, **scale}


POOL = "the kernels take the rows of this call end to end, not from a pool"
ATTENTION, INDEXER = ("sparse_attention", "csa_attention"), ("indexer_scores", "indexer_select", "indexer_distillation")
LIMITS = [
    *((ATTENTION, change, None) for change in (
        {}, {"heads": 8}, {"heads": 128}, {"width": 64}, {"window": 1}, {"window": 100},
    )),
    *((INDEXER, change, None) for change in (
        {}, {"index_heads": 16}, {"index_heads": 64}, {"index_width": 16}, {"weights": torch.bfloat16},
    )),
    *((ATTENTION + INDEXER, change, reason) for change, reason in (
        ({"dtype": torch.float32}, "float32"),
        ({"dtype": torch.float16}, "float16"),
        ({"invariant": True}, ""),
    )),
    *((ATTENTION, {rows: 100}, POOL) for rows in ("window_keys", "entries")),
    (INDEXER, {"keys": 100}, POOL),
    (("indexer_distillation",), {"entries": 100}, POOL),
    *((ATTENTION, change, reason) for change, reason in (
        ({"past": 8}, "documents from their first token on, and one of these continues"),
        ({"heads": 4}, "8, 16, 32, 64 or 128 heads, not 4"),
        ({"heads": 48}, "8, 16, 32, 64 or 128 heads, not 48"),
        ({"heads": 256}, "8, 16, 32, 64 or 128 heads, not 256"),
        ({"width": 96}, "a multiple of 64, not 96"),
        ({"window": 129}, "windows of 1 to 128 tokens, not 129"),
    )),
    *((INDEXER, change, reason) for change, reason in (
        ({"past": 8}, "documents have a past"),
        ({"index_heads": 8}, "8 index heads, not one of 16, 32, 64"),
        ({"index_heads": 128}, "128 index heads"),
        ({"index_width": 256}, "index heads of 256 numbers"),
        ({"weights": torch.float16}, "head weights are float16"),
    )),
    *((("indexer_distillation",), change, reason) for change, reason in (
        ({"heads": 4}, "4 attention heads"),
        ({"width": 40}, "attention heads of 40 numbers, not a multiple of 16"),
        ({"lse": torch.bfloat16}, "the log-sum-exp is bfloat16, not float32"),
    )),
]  # fmt: skip


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("ops", "change", "reason"), LIMITS, ids=str)
def test_calls(ops, change, reason, chip):
    for op in ops:
        args, kwargs = call(op, **change)
        taken, why = taker(choose(op, Machine("cuda", chip)), *args, **kwargs)
        assert taken == ("triton" if reason is None else "reference"), op
        named = choose(op, Machine("cuda", chip), "triton")
        if reason is None:
            assert why == "" and taker(named, *args, **kwargs) == ("triton", "")
            continue
        assert reason in why and why
        with pytest.raises(InputError) as error:
            taker(named, *args, **kwargs)
        assert str(error.value) == (
            f"{recipe_key(op)}: backend 'triton' cannot serve this call: {why}; choose 'auto' or another"
        )


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    config = ModelConfig.from_preset(preset)
    sizes = {
        "heads": config.num_attention_heads, "width": config.head_dim, "window": config.sliding_window,
        "index_heads": config.index_n_heads, "index_width": config.index_head_dim,
    }  # fmt: skip
    served = set()
    for op in OF_SEQUENCES:
        args, kwargs = call(op, **sizes)
        served |= {op} if taker(choose(op, Machine("cuda", "sm_90")), *args, **kwargs)[0] == "triton" else set()
    few = preset in ("v4-tiny", "v4-debug")
    assert served == ({"indexer_scores", "indexer_select"} if few else OF_SEQUENCES)


def test_keys_of_recipes():
    keys = {"sparse_attention": "attention.backend", "csa_attention": "attention.csa_backend"}
    assert {op: recipe_key(op) for op in OPS} == {op: keys.get(op, f"ops.{op}") for op in OPS}


class Pages:
    """Rows of a pool with a way of their own to find one."""

    def __init__(self, rows: Rows) -> None:
        self.data, self.layout = rows.data, rows.layout

    def locate(self, document, index):
        return index, index >= 0


@pytest.mark.parametrize("op", sorted(OF_SEQUENCES))
def test_rows_that_are_found_in_another_way_are_not_taken(op):
    args, kwargs = call(op)
    for place in (i for i, value in enumerate(args) if isinstance(value, Rows)):
        paged = [Pages(value) if i == place else value for i, value in enumerate(args)]
        assert taker(choose(op, Machine("cuda", "sm_90")), *paged, **kwargs) == ("reference", POOL)


def empty(*shape, of=torch.bfloat16):
    return torch.empty(shape, dtype=of, device="meta")


def codes(scheme: Scheme, *shape: int) -> Quantised:
    *lead, wide = shape
    payload = empty(*lead, wide // 2 if scheme is MXFP4 else wide, of=scheme.format.dtype)
    return Quantised(payload, empty(*grid_shape(shape, scheme.block), of=UE8M0.dtype), scheme.block)


FLOAT, LONG = torch.float32, torch.int64
ROWS = {
    "wide_linear": ((empty(40, 64), empty(32, 64)), (empty(40, 64), empty(32, 64, of=FLOAT)), "weights are float32"),
    "rms_norm": ((empty(40, 64), empty(64), 1e-6), (empty(40, 64, of=torch.float16), empty(64), 1e-6), "float16"),
    "rotary": (
        *((empty(40, 8, 64), empty(40, 16, of=FLOAT), empty(40, 16, of=FLOAT)),),
        *((empty(40, 8, 64), empty(40, 16), empty(40, 16)), "tables in float32, not bfloat16"),
    ),
    "head_norm_rotary": (
        *((empty(40, 8, 64), empty(40, 16, of=FLOAT), empty(40, 16, of=FLOAT), 1e-6),),
        *((empty(40, 8, 9000), empty(40, 16, of=FLOAT), empty(40, 16, of=FLOAT), 1e-6), "up to 8,192, not of 9,000"),
    ),
    "hyper_in": (
        *((empty(40, 4, 9), empty(24, 36, of=FLOAT), empty(3, of=FLOAT), empty(24, of=FLOAT), empty(9), 1, 20, 1e-6),),
        *((empty(40, 4, 9), empty(24, 36, of=FLOAT), empty(3, of=FLOAT), empty(24, of=FLOAT), empty(9), 1, 40, 1e-6),),
        "1 to 32 steps of Sinkhorn's iteration, not 40",
    ),
    "hyper_expand": (
        (empty(40, 64), empty(40, 4, of=FLOAT), empty(40, 4, 4, of=FLOAT), empty(40, 4, 64)),
        (empty(40, 64), empty(40, 3, of=FLOAT), empty(40, 3, 3, of=FLOAT), empty(40, 3, 64)),
        "2 or 4 streams, not 3",
    ),
    "hyper_head": (
        *((empty(40, 4, 9), empty(4, 36, of=FLOAT), empty(1, of=FLOAT), empty(4, of=FLOAT), empty(9), 1e-6, 1e-6),),
        *((empty(40, 3, 9), empty(3, 27, of=FLOAT), empty(1, of=FLOAT), empty(3, of=FLOAT), empty(9), 1e-6, 1e-6),),
        "2 or 4 streams, not 3",
    ),
    "compress_pool": (
        (empty(40, 64, of=FLOAT), empty(40, 64, of=FLOAT), empty(8, 64, of=FLOAT), empty(5, 8, of=LONG)),
        (empty(40, 64), empty(40, 64), empty(8, 64, of=FLOAT), empty(5, 8, of=LONG)),
        "bfloat16, not float32",
    ),
    "route": ((empty(40, 16, of=FLOAT), None, 6, 1.0), (empty(40, 16, of=FLOAT), None, 17, 1.0), "17 choices"),
    "dispatch_order": ((empty(40, 6, of=LONG), 16), (empty(40, 6, of=LONG), 2000), "2000 experts, more than 1024"),
    "permute": ((empty(40, 64), None), (empty(40, 64, of=torch.float16), None), "float16"),
    "unpermute": ((empty(240, 64), None), (empty(240, 64, of=torch.float16), None), "float16"),
    "permute_weights": ((empty(40, 6, of=FLOAT), None), (empty(40, 6, of=torch.float64), None), "float64"),
    "grouped_linear": (
        (empty(40, 64), empty(4, 32, 64), None), (empty(40, 60), empty(4, 32, 60), None), "32 x 60, and a side is not"
    ),
    "linear_quantised": (
        *((empty(40, 256), codes(MXFP4, 32, 256)), (empty(40, 192), codes(MXFP4, 32, 192))),
        "192 columns, which is not a multiple of 128",
    ),
    "grouped_linear_quantised": (
        *((empty(40, 256), codes(WEIGHTS, 4, 32, 256), None), (empty(40, 256), codes(ACTIVATIONS, 4, 32, 256), None)),
        "blocks of FP8 must be 128x128",
    ),
    "swiglu": ((empty(40, 64), None, 10.0), (empty(40, 63), None, 10.0), "63 numbers a row are no two halves"),
    "linear_cross_entropy": (
        (empty(40, 64), empty(96, 64), empty(40, of=LONG)),
        *((empty(40, 64, of=FLOAT), empty(96, 64), empty(40, of=LONG)), "float32"),
    ),
    "linear_cross_entropy_mean": (
        (empty(40, 64), empty(96, 64), empty(40, of=LONG), 40),
        *((empty(40, 64), empty(96, 64), empty(40, of=torch.int32), 40), "labels are int32, not int64"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", sorted(KERNELS - OF_SEQUENCES))
def test_calls_of_rows(op):
    """By operator: arguments that are served, others that are not, and what is said of those."""
    served, refused, reason = ROWS[op]
    choice = choose(op, Machine("cuda", "sm_90"))
    assert taker(choice, *served) == ("triton", "")
    taken, why = taker(choice, *refused)
    assert taken == "reference" and reason in why
