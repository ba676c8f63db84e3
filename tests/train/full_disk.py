"""Run on a small file system of its own: a run that meets a full disk, at ever later moments, and is resumed."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from tests.engine.bytelevel import VOCABULARY, tokenizer
from tests.small_disk import Ballast
from undertow.checkpoint.folder import latest_checkpoint
from undertow.cli import main as undertow
from undertow.train.metrics import read_metrics

ROOM = (0, 1, 2, 3, 4, 6, 8, 12, 100, 400)
"""Free pages: the files of the run directory need few, a checkpoint several hundred."""


def words(disk: Path, steps: int) -> list[str]:
    """A run on the small disk, of text that lies there too."""
    return [
        *("train", str(disk / "recipe.yaml"), f"train.steps={steps}", f'out="{disk / "run"}"', "--resume", "auto"),
        *("device=cpu", "model=v4-debug", f"model.vocab_size={VOCABULARY}", "model.num_hidden_layers=3"),
        *("model.compress_ratios=[0,4,8,0]", f'data.corpus="{disk / "corpus.txt"}"', f'data.tokenizer="{disk}"'),
        *("data.validation_fraction=0.3", "train.batch_size=1", "train.sequence_length=40", "train.eval_sequences=1"),
        *("train.checkpoint_every=2", "train.decay_fraction=0"),
    ]


def main(disk: Path) -> None:
    """Print, by the number of free pages, exit code and standard error of the run."""
    tokenizer().save(disk)
    (disk / "recipe.yaml").write_text("{}\n")
    (disk / "corpus.txt").write_text("to be or not to be, that is the question\n" * 8, "utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        assert undertow(words(disk, 2)) == 0
    run, ballast, said = disk / "run", Ballast(disk / "ballast"), {}
    for pages in ROOM:
        ballast.leave(pages)
        told = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            code = undertow(words(disk, 6))
        said[pages] = (code, told.getvalue())
        latest = latest_checkpoint(run / "checkpoints")
        assert latest == run / "checkpoints" / "step-2", (pages, latest)
        steps = [entry["step"] for entry in read_metrics(run / "metrics.jsonl")]
        assert steps[:2] == [1, 2] and steps == list(range(1, len(steps) + 1)), (pages, steps)
    ballast.drop()
    with contextlib.redirect_stdout(io.StringIO()):
        assert undertow(words(disk, 6)) == 0
    assert [entry["step"] for entry in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    left = [str(p.relative_to(run)) for p in run.rglob(".*")]
    events = [line.split("  ", 1)[-1] for line in (run / "events.log").read_text().splitlines()]
    print(json.dumps({"said": said, "left": left, "events": events}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
