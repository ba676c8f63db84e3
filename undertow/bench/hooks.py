"""A Python file that offers our kernels to an outside harness under plain functions of tensors.

The harness imports the file and looks its functions up by name. Its attention is over one table of keys, the window's
rows first and then the pool's; queries name their keys by rows of that table.
"""

from __future__ import annotations

from pathlib import Path

from undertow.config.writing import write_file

HOOKS = ("sparse_attn_fwd", "sparse_attn_bwd", "indexer_logits", "topk")

_FILE = '''"""Kernels of Undertow as plain functions. Written by `undertow bench kernels --peer-hooks`.

    sparse_attn_fwd(q [S, H, D], kv [S + P, D], idx [S, K] int32, sink [H], scale) -> o, lse
    sparse_attn_bwd(q, kv, idx, sink, scale, o, lse, do) -> dq, dkv, dsink
    indexer_logits(q [S, h, c], k [P, c], w [S, h], ratio) -> logits [S, P], -inf where not visible
    topk(logits [S, P], k) -> int64 [S, k], -1 where fewer are visible

kv are the latents of all tokens, then the pool; idx are rows of it, the first WINDOW columns the window's, -1 for none.
The window is each token and the WINDOW - 1 before it, in any order. What is asked again with the same tensors,
unchanged, is prepared once.
"""

import warnings

import torch

from undertow.ops import Ops
from undertow.ops.segments import Rows, Segments, entry_rows, window_rows

WINDOW = 128
POOLED = 4  # tokens of a pool row that indices choose; of any other pool all visible rows are read

_prepared = {}
_graphs = {}


def _ops(device):
    if ("ops", device) not in _prepared:
        _prepared["ops", device] = Ops(device=device)
    return _prepared["ops", device]


def _tell(device):
    """Warn once of calls that kernels passed on to the reference."""
    for line in _ops(device).calls.news():
        warnings.warn(line, stacklevel=4)


def _segments(tokens, device):
    if (tokens, device) not in _prepared:
        _prepared[tokens, device] = Segments.from_lengths([tokens], device=device)
    return _prepared[tokens, device]


def _identity(x):
    """What changes with the place, the form or the content of a tensor."""
    return x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, 0 if x.is_inference() else x._version


def _check_window(idx, tokens):
    token = torch.arange(tokens, device=idx.device)[:, None]
    expected = (token - torch.arange(WINDOW - 1, -1, -1, device=idx.device)).clamp(min=-1)
    given = idx[:, :WINDOW].clamp(min=-1).sort(-1).values
    if given.shape != expected.shape or not torch.equal(given, expected.to(given.dtype)):
        raise ValueError(f"the first {WINDOW} columns of idx are not the causal window of {WINDOW} tokens, -1 for none")


def _selected(idx, tokens, pool):
    """Tokens of a pool row (0 without a pool) and chosen entries, None for all; refuses what no layer would choose."""
    key = "selected", _identity(idx), tokens, pool
    if key not in _prepared:
        _check_window(idx, tokens)
        ratio = tokens // pool if pool else 0
        entry = idx[:, WINDOW:].long() - tokens
        entry = entry.masked_fill(idx[:, WINDOW:] < 0, -1)
        visible = (torch.arange(tokens, device=idx.device) + 1) // max(ratio, 1)
        if bool((entry >= visible[:, None]).any()):
            raise ValueError("idx chooses pool rows that end after the query: the kernels attend to the past alone")
        if ratio != POOLED and bool(((entry >= 0).sum(-1) != visible.clamp(max=pool)).any()):
            raise ValueError("idx leaves visible pool rows out of a pool whose rows are not chosen")
        _prepared[key] = ratio, entry if ratio == POOLED else None, idx  # kept, so that no other tensor gets its place
    return _prepared[key][:2]


def _attend(q, window, entries, idx, sink, scale):
    tokens = q.shape[0]
    segments = _segments(tokens, q.device)
    ratio, selected = _selected(idx, tokens, entries.shape[0])
    rows = Rows(window, segments.layout(window_rows(WINDOW)))
    kept = Rows(entries, segments.layout(entry_rows(ratio))) if ratio else None
    ops = _ops(q.device)
    attention = ops.sparse_attention if selected is None else ops.csa_attention
    found = attention(q, rows, kept, selected, sink, segments, window_size=WINDOW, ratio=ratio, scale=scale)
    _tell(q.device)
    return found


def sparse_attn_fwd(q, kv, idx, sink, scale):
    tokens = q.shape[0]
    with torch.no_grad():
        return _attend(q, kv[:tokens], kv[tokens:], idx, sink, scale)


def sparse_attn_bwd(q, kv, idx, sink, scale, o, lse, do):
    key = scale, *map(_identity, (q, kv, idx, sink))
    if key not in _graphs:
        _graphs.clear()
        tokens = q.shape[0]
        leaves = [x.detach().requires_grad_() for x in (q, kv[:tokens], kv[tokens:], sink)]
        _graphs[key] = leaves, _attend(leaves[0], leaves[1], leaves[2], idx, leaves[3], scale)[0]
    leaves, out = _graphs[key]
    used = leaves if leaves[2].shape[0] else [leaves[0], leaves[1], leaves[3]]
    dq, *latents, dsink = torch.autograd.grad(out, used, do, retain_graph=True)
    return dq, torch.cat(latents), dsink


def indexer_logits(q, k, w, ratio):
    segments = _segments(q.shape[0], q.device)
    rows = Rows(k, segments.layout(entry_rows(ratio)))
    with torch.no_grad():
        found = _ops(q.device).indexer_scores(q, rows, w, segments, ratio)
    _tell(q.device)
    return found


def topk(logits, k):
    if logits.device.type == "cpu":
        value, entry = logits.topk(min(k, logits.shape[1]))
        return entry.masked_fill(value.isneginf(), -1)
    from undertow.ops.triton.indexer.top_k import choose_best

    low = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    high = torch.full_like(low, logits.shape[1])
    out = torch.empty(len(logits), k, dtype=torch.int64, device=logits.device)
    choose_best(logits, low, high, 0, out)
    return out
'''


def write_hooks(path: Path) -> None:
    """Write the file. Raises `InputError` where it cannot be written."""
    write_file(path, _FILE, "give --peer-hooks FILE a name in a directory that is there")
