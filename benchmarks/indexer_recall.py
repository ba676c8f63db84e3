"""How well the indexer chooses while it learns, beside one that does not: recall of what attention weighs most.

    python -m benchmarks.indexer_recall --json benchmarks/results/indexer_recall.json

Two runs from scratch of the quickstart's recipe, one with `indexer.frozen`. Recall is measured on held-out text before
the first step and every `--every` steps.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from undertow.config.resolve import resolve
from undertow.model.context import Indexing
from undertow.train.evaluation import evaluate
from undertow.train.start import device_of, trainer_of
from undertow.train.text import read_text


def recalls(overrides: list[str], every: int, sequences: int) -> dict[str, Any]:
    """Recall by step, and the held-out loss at the end, of one run without checkpoints."""
    resolved = resolve("pretrain/quickstart", overrides, dict(os.environ))
    config = resolved.config
    device = device_of(config.device)
    text = read_text(config.data, config.model)
    trainer = trainer_of(config, text, device, None)
    settings, found, loss = config.train, {}, 0.0
    while True:
        step = trainer.progress.step
        if step % every == 0 or step == settings.steps:
            indexing = Indexing(dense=trainer.stage(max(step, 1)).indexing.dense, recall=True)
            batches = text.held_out(settings.batch_size, settings.sequence_length, sequences)
            told = evaluate(trainer.model, batches, text.tokenizer, device, indexing)
            found[step], loss = told.found / told.wanted, told.loss
            print(f"step {step}: recall {found[step]:.3f}, held-out {loss:.3f} nats per token", flush=True)
        if step == settings.steps:
            return {"overrides": overrides, "recall": found, "held_out": loss}
        trainer.step()


def main() -> None:
    """Run both and write or print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--every", type=int, default=20, help="steps between measurements (default: 20)")
    parser.add_argument("--sequences", type=int, default=16, help="held-out sequences of each (default: 16)")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for both runs")
    given = parser.parse_args()
    runs = {
        name: recalls([*given.overrides, f'out="{tempfile.gettempdir()}/unused"', *more], given.every, given.sequences)
        for name, more in (("learning", []), ("frozen", ["indexer.frozen=true"]))
    }
    result = {"environment": environment(), "unit": "share of entries", "runs": runs}
    text = json.dumps(result, indent=2) + "\n"
    if given.json:
        given.json.write_text(text, "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
