"""The model beside transformers' own DeepSeek-V4 on random models of every kind: logits, gradients, incremental decode.

    python -m benchmarks.parity --json benchmarks/results/parity.json

Every configuration is drawn at random (layer types, widths, windows, ratios, routing) and given equal random weights in
both implementations, float32. One that stands within 1e-5 of another choice of expert or entry, or within 2e-6 of a
SwiGLU clamp, is drawn again and counted: there rounding alone decides, and both answers are right. Where the logits
differ by more than 2e-5, transformers' own distance from float64 is measured and shown: a model that amplifies
rounding.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch

from benchmarks.environment import environment
from tests.model.cases import rounding
from tests.model.oracle import gradients, margins, pair, random_shape, worst_gradient

CHUNKS = (1, 3, 4, 5, 127, 128, 129)
FLOOR = 1e-7
TOLERANCE = 2e-5


def draw(rng: random.Random) -> tuple[dict, object, torch.Tensor, int]:
    """A configuration, its two models, token ids, and how often it was drawn again."""
    again = 0
    while True:
        shape, length, rows = random_shape(rng), rng.randint(1, 300), rng.randint(1, 2)
        models = pair(shape, rng.randrange(10**6))
        ids = torch.tensor([[rng.randrange(shape["vocab_size"]) for _ in range(length)] for _ in range(rows)])
        choice, clamp = margins(models.ours, ids)
        if choice >= 1e-5 and clamp >= 2e-6:
            return shape, models, ids, again
        again += 1


@torch.no_grad()
def decode_error(models, ids: torch.Tensor, chunk: int) -> float:
    """Largest logit difference between our decode in chunks and transformers' whole pass, over max(1, scale / 5)."""
    cache = models.ours.new_cache(len(ids))
    parts = [models.ours(ids[:, start : start + chunk], cache=cache) for start in range(0, ids.shape[1], chunk)]
    return logit_error(torch.cat(parts, 1), models.theirs(ids).logits)


def logit_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over max(1, largest logit / 5)."""
    return ((ours - theirs).abs().max() / max(1.0, theirs.abs().max().item() / 5)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configurations", type=int, default=100, help="random configurations; default 100")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw; default 0")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    arguments = parser.parse_args()
    from transformers.utils import logging

    logging.set_verbosity_error()
    rng = random.Random(arguments.seed)
    rows, redrawn = [], 0
    print("layers (0 SWA, 1 CSA, 2 HCA)   hash  rows x length   logits    gradients  decode")
    for number in range(arguments.configurations):
        shape, models, ids, again = draw(rng)
        redrawn += again
        theirs, their_gradients = gradients(models.theirs, ids)
        ours, our_gradients = gradients(models.ours, ids)
        worst, name = worst_gradient(our_gradients, their_gradients, FLOOR)
        chunk = CHUNKS[number % len(CHUNKS)]
        row = {
            "kinds": shape["kinds"], "hash_layers": shape["num_hash_layers"], "shape": list(ids.shape),
            "logits": logit_error(ours, theirs), "gradient": worst, "gradient_of": name,
            "chunk": chunk, "decode": decode_error(models, ids, chunk),
        }  # fmt: skip
        if row["logits"] > TOLERANCE:
            row["transformers_from_float64"] = rounding(models.theirs, ids, FLOOR)[0]
            print(f"  over {TOLERANCE}; transformers itself from float64: {row['transformers_from_float64']:.1e}")
        rows.append(row)
        print(
            f"{shape['kinds']!s:30} {row['hash_layers']:4}  {ids.shape[0]:4} x {ids.shape[1]:<6} {row['logits']:.1e}"
            f"   {worst:.1e}    {row['decode']:.1e} (chunks of {chunk})",
            flush=True,
        )
    summary = {key: max(row[key] for row in rows) for key in ("logits", "gradient", "decode")}
    result = {"environment": environment(), "worst": summary, "redrawn": redrawn, "gradient_floor": FLOOR, "rows": rows}
    worst = ", ".join(f"{key} {value:.1e}" for key, value in summary.items())
    print(f"worst of {len(rows)}: {worst}; drawn again: {redrawn}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
