"""The operators written straight from the equations, in loops over tokens, heads and entries: slow, plain, float64.

Nothing here knows of blocks, chunks, running sums or hand-made backwards; autograd differentiates every function.
Sequences of documents are lists of tensors, one a document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([(weight * row).sum(-1) for row in x]) if len(x) else x.new_zeros(0, len(weight))


def block_linear(x: Tensor, weight: Tensor) -> Tensor:
    groups = [torch.stack([(weight[g] * row[g]).sum(-1) for g in range(len(weight))]) for row in x]
    return torch.stack(groups) if groups else x.new_zeros(0, *weight.shape[:2])


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    rows = [(weight[expert] * row).sum(-1) for expert, row in zip(owners, x, strict=True)]
    return torch.stack(rows) if rows else x.new_zeros(0, weight.shape[1])


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    normed = x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return normed if weight is None else normed * weight


def rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Channel pairs `(2i, 2i + 1)` of the trailing dimensions as complex numbers, times `exp(j angle_i)`."""
    start = x.shape[-1] - 2 * angles.shape[-1]
    out = list(x.unbind(-1))
    between = (1,) * (x.dim() - 2)
    for i in range(angles.shape[-1]):
        angle = angles[:, i].view(-1, *between)
        re, im = x[..., start + 2 * i], x[..., start + 2 * i + 1]
        out[start + 2 * i] = re * torch.cos(angle) - im * torch.sin(angle)
        out[start + 2 * i + 1] = re * torch.sin(angle) + im * torch.cos(angle)
    return torch.stack(out, -1)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Row softmax, a column step, then `iterations - 1` times a row and a column step: `2 iterations - 1` divisions."""
    matrices = []
    for token in logits:
        r = torch.softmax(token, -1) + eps
        r = r / (r.sum(0, keepdim=True) + eps)
        for _ in range(iterations - 1):
            r = r / (r.sum(1, keepdim=True) + eps)
            r = r / (r.sum(0, keepdim=True) + eps)
        matrices.append(r)
    return torch.stack(matrices) if matrices else logits


def hyper_coefficients(
    logits: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    n = streams
    pre = torch.sigmoid(scale[0] * logits[:, :n] + base[:n]) + eps
    post = 2 * torch.sigmoid(scale[1] * logits[:, n : 2 * n] + base[n : 2 * n])
    mix = scale[2] * logits[:, 2 * n :] + base[2 * n :]
    return pre, post, sinkhorn(mix.reshape(-1, n, n), iterations, eps)


def hyper_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return torch.stack([sum(p[j] * x[j] for j in range(len(p))) for x, p in zip(streams, pre, strict=True)])


def hyper_in(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor, eps_norm: float, iterations: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    flat = streams.flatten(1)
    logits = flat / torch.sqrt(flat.square().mean(1, keepdim=True) + eps_norm) @ fn.T
    pre, post, mix = hyper_coefficients(logits, scale, base, streams.shape[1], iterations, eps)
    y = hyper_collapse(streams, pre)
    return y / torch.sqrt(y.square().mean(1, keepdim=True) + eps_norm) * weight, post, mix, streams


def hyper_head(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor, eps_norm: float, eps: float
) -> Tensor:
    flat = streams.flatten(1)
    logits = flat / torch.sqrt(flat.square().mean(1, keepdim=True) + eps_norm) @ fn.T
    y = hyper_collapse(streams, torch.sigmoid(scale * logits + base) + eps)
    return y / torch.sqrt(y.square().mean(1, keepdim=True) + eps_norm) * weight


def hyper_expand(y: Tensor, post: Tensor, mix: Tensor, streams: Tensor) -> Tensor:
    tokens, n = post.shape
    rows = []
    for t in range(tokens):
        for k in range(n):
            rows.append(post[t, k] * y[t] + sum(mix[t, j, k] * streams[t, j] for j in range(n)))
    return torch.stack(rows).view(tokens, n, -1)


def pool(values: list[Tensor], gates: list[Tensor]) -> Tensor:
    """Softmax per channel over a window's slots, the weighted sum of their values."""
    weights = torch.softmax(torch.stack(gates), 0)
    return (weights * torch.stack(values)).sum(0)


def plain_entries(u: Tensor, v: Tensor, ape: Tensor) -> Tensor:
    """HCA: windows of `len(ape)` tokens of one document, incomplete ones give nothing."""
    ratio = len(ape)
    entries = []
    for s in range(len(u) // ratio):
        tokens = range(ratio * s, ratio * s + ratio)
        entries.append(pool([u[t] for t in tokens], [v[t] + ape[t % ratio] for t in tokens]))
    return torch.stack(entries) if entries else u.new_zeros(0, u.shape[1])


def overlapping_entries(u: Tensor, v: Tensor, ape: Tensor) -> Tensor:
    """CSA: a window's own tokens by the second half of the channels, those of the window before by the first half."""
    ratio, c = len(ape), u.shape[1] // 2
    v = v + torch.stack([ape[t % ratio] for t in range(len(v))]) if len(v) else v
    entries = []
    for s in range(len(u) // ratio):
        before = range(max(ratio * (s - 1), 0), ratio * s)
        own = range(ratio * s, ratio * s + ratio)
        values = [u[t, :c] for t in before] + [u[t, c:] for t in own]
        gates = [v[t, :c] for t in before] + [v[t, c:] for t in own]
        entries.append(pool(values, gates))
    return torch.stack(entries) if entries else u.new_zeros(0, c)


def queries(new: Sequence[int], past: Sequence[int]) -> list[tuple[int, int]]:
    """Document and position of each flat row."""
    return [(d, p + i) for d, (n, p) in enumerate(zip(new, past, strict=True)) for i in range(n)]


def indexer_scores(
    q: Tensor, keys: Sequence[Tensor], weights: Tensor, new: Sequence[int], past: Sequence[int], ratio: int
) -> list[Tensor]:
    """Scores of the visible entries of each query; `keys[d]` holds all keys of document `d`."""
    scores = []
    for row, (document, position) in enumerate(queries(new, past)):
        visible = []
        for s in range((position + 1) // ratio):
            heads = [weights[row, j] * torch.relu(q[row, j] @ keys[document][s]) for j in range(q.shape[1])]
            visible.append(torch.stack(heads).sum())
        scores.append(torch.stack(visible) if visible else q.new_zeros(0))
    return scores


def best(scores: Sequence[float], k: int) -> list[int]:
    """The `k` best entries, the lowest first among equals, filled up with -1."""
    order = sorted(range(len(scores)), key=lambda s: (-scores[s], s))[:k]
    return order + [-1] * (k - len(order))


def sparse_attention(
    q: Tensor,
    window: Sequence[Tensor],
    entries: Sequence[Tensor] | None,
    selected: Tensor | None,
    sink: Tensor,
    new: Sequence[int],
    past: Sequence[int],
    window_size: int,
    ratio: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`window[d]` and `entries[d]` hold every row of document `d` from its first token on."""
    outputs, normalisers = [], []
    for row, (document, t) in enumerate(queries(new, past)):
        keys = [window[document][j] for j in range(max(t - window_size + 1, 0), t + 1)]
        if entries is not None:
            seen = range((t + 1) // ratio)
            picked = seen if selected is None else [s for s in selected[row].tolist() if s in seen]
            keys += [entries[document][s] for s in picked]
        k = torch.stack(keys)
        scores = q[row] @ k.t() * scale
        z = torch.cat([scores, sink[:, None]], 1)
        outputs.append(torch.softmax(z, 1)[:, :-1] @ k)
        normalisers.append(torch.logsumexp(z, 1))
    if not outputs:
        return q, q.new_zeros(q.shape[:2])
    return torch.stack(outputs), torch.stack(normalisers)


def entry_mass(
    attention_q: Tensor,
    entries: Sequence[Tensor],
    lse: Tensor,
    selected: Tensor | None,
    new: Sequence[int],
    past: Sequence[int],
    ratio: int,
    scale: float,
) -> list[tuple[list[int], Tensor]]:
    """The entries that each query sees and selects, and the attention probability of each summed over heads."""
    masses = []
    for row, (document, t) in enumerate(queries(new, past)):
        picks = list(range((t + 1) // ratio))
        if selected is not None:
            picks = sorted(set(selected[row].tolist()) & set(picks))
        heads = torch.exp(entries[document][picks] @ attention_q[row].t() * scale - lse[row])
        masses.append((picks, heads.sum(1)))
    return masses


def indexer_distillation(
    q: Tensor,
    keys: Sequence[Tensor],
    weights: Tensor,
    masses: Sequence[tuple[list[int], Tensor]],
    new: Sequence[int],
    past: Sequence[int],
) -> Tensor:
    """KL of each query, by torch's own log-softmax, over the entries that `masses` names."""
    losses = []
    for row, (document, _) in enumerate(queries(new, past)):
        picks, mass = masses[row]
        target = mass / mass.sum().clamp(min=1e-10)
        share = torch.log_softmax(torch.relu(keys[document][picks] @ q[row].t()) @ weights[row], 0)
        losses.append((torch.xlogy(target, target) - target * share).sum())
    return torch.stack(losses) if losses else q.new_zeros(0)


def route(
    logits: Tensor, bias: Tensor | None, k: int, scale: float, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.sqrt(torch.where(logits > 20, logits, torch.log1p(torch.exp(logits.clamp(max=20)))))
    indices, weights = [], []
    for t in range(len(logits)):
        ranked = (scores[t] if bias is None else scores[t] + bias).tolist()
        picks = best(ranked, k) if chosen is None else chosen[t].tolist()
        total = sum(scores[t, e] for e in picks)
        indices.append(picks)
        weights.append(torch.stack([scale * scores[t, e] / total for e in picks]))
    return torch.tensor(indices), torch.stack(weights), scores


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    h = g / (1 + torch.exp(-g)) * u
    return h if weight is None else h * weight[:, None]


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    rows, normalisers = [], []
    for h, label in zip(hidden, labels.tolist(), strict=True):
        if label == -100:
            rows.append(h.sum() * 0)
            normalisers.append(h.sum() * 0)
            continue
        logits = weight @ h
        normaliser = torch.logsumexp(logits, 0)
        rows.append(normaliser - logits[label] + z_loss * normaliser**2)
        normalisers.append(normaliser)
    if not rows:
        return hidden.new_zeros(0), hidden.new_zeros(0)
    return torch.stack(rows), torch.stack(normalisers)


def angles(positions: Tensor, pairs: int, theta: float = 10000.0) -> Tensor:
    """Rotary angles `position * theta^(-i / pairs)`, `[T, pairs]`, in float64."""
    frequency = torch.tensor([math.pow(theta, -i / pairs) for i in range(pairs)], dtype=torch.float64)
    return positions.double()[:, None] * frequency
