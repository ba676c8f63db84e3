"""Counting calls by backend, and telling once why one was passed on."""

from undertow.ops.calls import Calls


def test_calls_are_counted_and_each_reason_is_told_once():
    calls = Calls()
    for op in ("sparse_attention", "csa_attention", "sparse_attention"):
        calls.count(op, "reference", "triton", "4 heads")
    calls.count("indexer_select", "triton", "triton", "")
    assert calls.taken == {
        "sparse_attention": {"reference": 2}, "csa_attention": {"reference": 1}, "indexer_select": {"triton": 1},
    }  # fmt: skip
    assert calls.news() == ["sparse_attention, csa_attention by reference instead of triton: 4 heads"]
    assert calls.news() == []
    calls.count("csa_attention", "reference", "triton", "4 heads")
    calls.count("csa_attention", "reference", "triton", "a past")
    calls.count("csa_attention", "triton", "triton", "")
    assert calls.news() == ["csa_attention by reference instead of triton: a past"]
