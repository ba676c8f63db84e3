"""The quickstart step by step, each with its heading and what it shows."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from undertow import __version__
from undertow.checkpoint.directory import WRITE_FORMATS, load_model, save_model
from undertow.checkpoint.training import latest_checkpoint
from undertow.cli.quickstart import samples
from undertow.cli.quickstart.bars import Bars, measure
from undertow.cli.quickstart.output import FIGURES, PAGE, prepare, write_figures, write_page
from undertow.config.errors import ConfigError, UndertowError
from undertow.config.resolve import Resolved
from undertow.engine.llm import LLM
from undertow.model.branches import active_branches
from undertow.model.count import count
from undertow.model.transformer import Transformer
from undertow.report.quickstart import quickstart_page
from undertow.train.evaluation import Evaluation, evaluate
from undertow.train.metrics import read_metrics
from undertow.train.pretrain import Outcome, pretrain
from undertow.train.progress import duration, reporter
from undertow.train.text import Text, read_text

SAMPLE_TOKENS = 120


class Course:
    """One quickstart in the directory `out`; `facts` about the machine go into the run's `environment.json`.

    `run` takes all steps and says whether the trained model is good enough; it is if not `judged`.
    """

    def __init__(self, out: Path, resolved: Resolved, facts: dict[str, Any], judged: bool) -> None:
        self.out, self.resolved, self.facts, self.judged = out, resolved, facts, judged
        self.config = resolved.config
        self.figures: dict[str, Any] = {"finished": False, "undertow": __version__}

    def run(self) -> bool:
        """All steps. Raises `UndertowError` where one fails; whether the model is good enough is the result."""
        begun = time.perf_counter()
        removed = prepare(self.out)
        print(f"everything goes into {self.out}" + (", whose earlier quickstart is removed" if removed else ""))
        self._model()
        text = self._text()
        bars = measure(text, self.config.train)
        self._tell_bars(bars)
        outcome = self._pretrain(text)
        reloaded, held_out = self._checkpoint(outcome)
        self._export(outcome, reloaded)
        passed = self._verdict(held_out, bars)
        seconds = time.perf_counter() - begun
        self.figures |= {"finished": True, "judged": self.judged, "passed": passed, "seconds": round(seconds, 1)}
        write_page(self.out, quickstart_page(self.figures, list(read_metrics(outcome.run.metrics))))
        write_figures(self.out, self.figures)
        print(f"\nAll of it took {duration(seconds)}; see {self.out / PAGE}, figures in {self.out / FIGURES}")
        return passed or not self.judged

    def _model(self) -> None:
        length = self.config.train.sequence_length
        _heading(1, f"The model, {self.resolved.preset or 'by single fields'}, before it is built")
        counts = count(self.config.model)
        for module, number in counts.by_module.items():
            print(f"  {module:<18}{number:>12,}")
        print(f"  {'total':<18}{counts.total:>12,}   {counts.active_with_head:,} of them at work on a token")
        branches = active_branches(self.config.model, length)
        print(f"  branches of the architecture at {length} tokens:")
        for branch, active in branches.items():
            print(f"  {branch:<22}{'active' if active else 'NOT ACTIVE'}")
        idle = [branch for branch, active in branches.items() if not active]
        if idle:
            raise ConfigError(
                f"train.sequence_length {length}: {', '.join(idle)} would never take part, and the run would prove "
                "nothing about it; lengthen the sequences or lower the model's window and index_topk"
            )
        self.figures["parameters"] = {"total": counts.total, "active": counts.active_with_head, **counts.by_module}

    def _text(self) -> Text:
        _heading(2, f"The text, corpus {self.config.data.corpus}")
        config = self.resolved.tracked
        text = read_text(config.data, config.model)
        for name, documents, ids in (
            ("training", text.training, text.training_ids),
            ("held out", text.validation, text.validation_ids),
        ):
            size, tokens = sum(len(d.text.encode()) for d in documents), sum(map(len, ids))
            print(f"  {name}: {len(documents)} scenes, {size:,} bytes, {tokens:,} tokens")
            self.figures[f"{name.replace(' ', '_')}_bytes"] = size
        return text

    def _tell_bars(self, bars: Bars) -> None:
        print("  held-out text costs, in nats per byte,")
        print(f"    {bars.byte_unigram:.3f} by the frequencies of its bytes")
        print(f"    {bars.byte_bigram:.3f} by those of its bytes given the byte before")
        print(f"    {bars.token_unigram:.3f} by the frequencies of training tokens")
        self.figures["bars"] = asdict(bars)

    def _pretrain(self, text: Text) -> Outcome:
        settings = self.config.train
        each = settings.batch_size * settings.sequence_length
        _heading(3, f"Pretraining: {settings.steps} steps of {each:,} tokens")
        shown = reporter(settings.log_every)
        outcome = pretrain(self.resolved, shown, facts=self.facts, text=text)
        rate = outcome.progress.tokens / outcome.seconds
        print(f"  {outcome.progress.tokens:,} tokens in {duration(outcome.seconds)}, {rate:,.0f} tokens/s in all")
        self.figures |= {"training_seconds": round(outcome.seconds, 1), "tokens": outcome.progress.tokens}
        return outcome

    def _checkpoint(self, outcome: Outcome) -> tuple[Transformer, Evaluation]:
        """The model as read back from the last checkpoint, and its loss on all held-out text."""
        _heading(4, "The checkpoint, read back into a new model")
        path = latest_checkpoint(outcome.run.checkpoints)
        assert path is not None, "a finished run has a checkpoint"
        device = outcome.model.embed.weight.device
        reloaded = load_model(path, outcome.model.embed.weight.dtype, device, outcome.model.ops)
        settings, text = self.config.train, outcome.text
        again = evaluate(reloaded, text.held_out(settings, settings.eval_batches), text.tokenizer, device).loss
        *_, last = read_metrics(outcome.run.metrics)
        if again != last["eval/loss"]:
            raise UndertowError(f"{path}: held-out loss is {again} after loading, {last['eval/loss']} before saving")
        print(f"  {path}: held-out loss {again:.6f} nats per token, the same as before saving")
        return reloaded, evaluate(reloaded, text.held_out(settings), text.tokenizer, device)

    def _export(self, outcome: Outcome, reloaded: Transformer) -> None:
        _heading(5, "Model directories, loaded again and sampled")
        text = outcome.text
        wanted = samples.greedy_tokens(LLM(outcome.model, tokenizer=text.tokenizer))
        dtype, device = outcome.model.embed.weight.dtype, outcome.model.embed.weight.device
        loaded = LLM(reloaded, tokenizer=text.tokenizer)
        for spelling in reversed(WRITE_FORMATS):
            path = self.out / ("model" if spelling == "undertow" else f"model-{spelling}")
            save_model(reloaded, path, format=spelling, tokenizer=text.tokenizer)
            loaded = LLM(path, dtype=dtype, device=device)
            if samples.greedy_tokens(loaded) != wanted:
                raise UndertowError(f"{path}: greedy tokens after export differ from those before")
            print(f"  {path} ({spelling}): the same greedy tokens as before export")
        self._sample(loaded, text)

    def _sample(self, llm: LLM, text: Text) -> None:
        written = []
        for seed, prompt in enumerate(samples.PROMPTS):
            print(f"\n  sample {seed + 1}, temperature 0.8:\n")
            pieces = []
            for piece in samples.sampled(llm, prompt, SAMPLE_TOKENS, seed):
                print(piece, end="", flush=True)
                pieces.append(piece)
            print()
            written.append("".join(pieces))
        known, words = samples.known_words(written, "".join(d.text for d in (*text.training, *text.validation)))
        print(f"\n  {known} of {words} sampled words of four or more letters occur in the corpus")
        self.figures |= {"samples": written, "sampled_words": words, "sampled_words_in_corpus": known}

    def _verdict(self, held_out: Evaluation, bars: Bars) -> bool:
        _heading(6, "The verdict")
        passed = bars.passed_by(held_out.nats_per_byte)
        print(f"  all held-out text, {held_out.bytes:,} bytes: {held_out.nats_per_byte:.3f} nats per byte")
        for name, bar in asdict(bars).items():
            side = "below" if held_out.nats_per_byte < bar else "NOT below"
            print(f"  {side} {bar:.3f}, {name.replace('_', ' ')}")
        if not self.judged:
            print("  A short run is not judged by these.")
        elif passed:
            print("  The model predicts better than frequencies do.")
        else:
            print("  The model is no better than frequencies: it has not learned to use context.")
        self.figures |= {"nats_per_byte": held_out.nats_per_byte, "nats_per_token": held_out.loss}
        return passed


def _heading(number: int, title: str) -> None:
    print(f"\n{number}. {title}\n", flush=True)
