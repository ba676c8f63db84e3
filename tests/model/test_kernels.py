"""Which runs are all kernels on a GPU, and the peak of a step of such a run."""

from __future__ import annotations

import pytest

from undertow.config.model import ModelConfig
from undertow.config.resolve import resolve
from undertow.model.activations import Objective, Pass, saved_terms
from undertow.model.kernels import in_kernels, serve
from undertow.model.peak import State, _attention, _experts, _loss, peak_bytes

PROXY = ModelConfig.from_preset("v4-proxy")
BF16 = State("bfloat16", "adamw", "bf16")
TOKENS, WIDTH, VOCABULARY = 4096, 4096, 129280


def run(*words: str, preset: str = "v4-proxy"):
    return resolve(None, [f"model.preset={preset}", "numerics.dtype=bfloat16", *words], {}).config


@pytest.mark.parametrize(
    ("words", "kernels"),
    [
        ((), True),
        (("optimizations.fusion=on",), True),
        (("optimizations.fusion=off",), False),
        (("optimizations.attention=off",), False),
        (("ops.swiglu=reference",), False),
        (("ops.swiglu=triton",), True),
        (("numerics.dtype=float32",), False),
        (("numerics.batch_invariant=true",), False),
    ],
)
def test_runs(words, kernels):
    assert in_kernels(run(*words)) is kernels


def test_models():
    served = {
        preset: serve(ModelConfig.from_preset(preset)) for preset in ("v4-flash", "v4-pro", "v4-proxy", "v4-small")
    }
    assert set(served.values()) == {True}, served
    assert not serve(ModelConfig.from_preset("v4-tiny")) and not serve(ModelConfig.from_preset("v4-debug"))


def test_the_loss_holds_what_its_kernel_was_measured_to():
    """1,920,499,712 bytes on an H200, results included, which count as saved."""
    p = Pass(PROXY, (TOKENS,), "bfloat16", True)
    results = 2 * (VOCABULARY * WIDTH + TOKENS * WIDTH)
    assert _loss(p) + results == pytest.approx(1_920_499_712, rel=1e-4)
    longer = Pass(PROXY, (3 * TOKENS,), "bfloat16", True)
    assert _loss(longer) - _loss(p) == VOCABULARY * WIDTH * 4  # the sum of many parts is float32


@pytest.mark.parametrize(
    ("layer", "measured"), [(0, 504_890_368), (2, 556_369_408), (1, 1_650_987_520)], ids=["swa", "hca", "csa"]
)
def test_the_backward_pass_of_attention_holds_what_its_kernels_were_measured_to(layer, measured):
    p = Pass(PROXY, (TOKENS,), "bfloat16", True)
    beside = 5 * TOKENS * WIDTH * 2  # gradients of the streams and of the layer's output
    assert _attention(p, layer) - beside == pytest.approx(measured, rel=0.06)


def test_gradients_of_the_head_are_saved_once():
    plain, kernels = (
        {(t.place, t.name): t.bytes for t in saved_terms(PROXY, (TOKENS,), "bfloat16", kernels=k)}
        for k in (False, True)
    )
    for place in ("head", "mtp head"):
        assert kernels[place, "gradient of the head"] == VOCABULARY * WIDTH * 2
        assert (place, "gradient of the head") not in plain


def test_a_step_in_kernels_holds_less():
    o = Objective(balance_rows=1)
    plain, kernels = (peak_bytes(PROXY, (TOKENS,), BF16, o, kernels=each) for each in (False, True))
    assert kernels.total < plain.total - 4e9
    assert {part.name: part.bytes for part in kernels.parts}["weights"] == {p.name: p.bytes for p in plain.parts}[
        "weights"
    ]
    # AdamW's kernel works in place: after a short pass nothing is there but what lasts, and all gradients.
    few = peak_bytes(PROXY, (16,), BF16, Objective(), kernels=True)
    assert {part.name: part.bytes for part in few.parts}["transient"] < 1 << 30
    assert few.total < peak_bytes(PROXY, (16,), BF16, Objective()).total


def test_moments_of_the_loss():
    """With one microbatch no parameter has a gradient yet when kernels make those of the loss; afterwards all have."""
    model = PROXY.model_copy(update={"num_hidden_layers": 1, "compress_ratios": (0, 0)})
    once = peak_bytes(model, (TOKENS,), BF16, kernels=True)
    later = peak_bytes(model, (TOKENS,), State("bfloat16", "adamw", "bf16", accumulates=True), kernels=True)
    more = {part.name: part.bytes for part in later.parts}
    less = {part.name: part.bytes for part in once.parts}
    assert more["gradients"] > less["gradients"] and later.total > once.total


def test_gradients_of_experts_are_their_own_until_they_are_added():
    p = Pass(PROXY, (TOKENS,), "bfloat16", True)
    assert _experts(p, True) - _experts(p, False) == 32 * 2 * 2048 * 4096 * 2
