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
from undertow.cli.quickstart.bars import DISTINCT, KNOWN_SHARE, Bars, measure, words_pass
from undertow.cli.quickstart.killed import repeated, resumption, train_and_kill
from undertow.cli.quickstart.output import FIGURES, PAGE, prepare, write_figures, write_page
from undertow.config.errors import ConfigError, UndertowError
from undertow.config.resolve import Resolved
from undertow.engine.llm import LLM
from undertow.model.branches import active_branches
from undertow.model.count import count
from undertow.model.transformer import Transformer
from undertow.report.origin import origin
from undertow.report.quickstart import quickstart_page
from undertow.train.evaluation import Evaluation, evaluate
from undertow.train.metrics import read_metrics
from undertow.train.pretrain import Outcome, pretrain
from undertow.train.progress import duration, reporter
from undertow.train.run import METRICS
from undertow.train.text import Text, read_text

SAMPLE_TOKENS = 120
WORDS, FEW_WORDS = (1000, 160), (40, 32)
"""Words to sample for the verdict, and tokens of each sample; few of both where nothing is judged."""


class Course:
    """One quickstart in the directory `out`; `facts` about the machine go into the run's `environment.json`.

    `run` takes all steps and says whether the trained model is good enough; it is if not `judged`.
    """

    def __init__(self, out: Path, resolved: Resolved, words: list[str], facts: dict[str, Any], judged: bool) -> None:
        """`words` are the arguments by which `undertow train` resolves the same recipe."""
        self.out, self.resolved, self.words, self.facts, self.judged = out, resolved, words, facts, judged
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
        metrics = list(read_metrics(outcome.run.metrics))
        write_page(self.out, quickstart_page(self.figures, metrics, origin(outcome.run.path, metrics)))
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
        text = read_text(config.data, config.model, keep_text=True)
        for name, documents, ids in (
            ("training", text.training, text.training_ids),
            ("held out", text.validation, text.validation_ids),
        ):
            size, tokens = sum(len(d.text.encode()) for d in documents), ids.tokens
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
        _heading(3, f"Pretraining: {settings.steps} steps of {each:,} tokens, killed on the way and resumed")
        told = f"the first {settings.eval_sequences} sequences of that text, the verdict is over all of it"
        print(f"  held-out loss on the way is over {told}", flush=True)
        begun = time.perf_counter()
        # Some steps after the checkpoint at half way: what the resumed run repeats can be compared.
        every = settings.checkpoint_every
        stop = min(settings.steps, every * (settings.steps // 2 // every) + max(1, every // 10))
        before = train_and_kill(self.words, self.out / "run" / METRICS, stop)
        print(f"  killed without warning after step {before[-1]['step']}\n", flush=True)
        outcome = pretrain(self.resolved, reporter(settings.log_every), resume=True, facts=self.facts, text=text)
        seconds = time.perf_counter() - begun
        steps, difference = repeated(before, list(read_metrics(outcome.run.metrics)))
        on_cpu = outcome.model.embed.weight.device.type == "cpu"
        if difference and on_cpu:
            raise UndertowError(f"{outcome.run.path}: losses after the resumption differ by up to {difference}")
        self.figures["resumed"] = told = resumption(before[-1]["step"], steps, difference)
        print(f"\n  {told}")
        print(f"  {outcome.progress.tokens:,} tokens in {duration(seconds)}, the time lost by the kill included")
        self.figures |= {"training_seconds": round(seconds, 1), "tokens": outcome.progress.tokens}
        return outcome

    def _checkpoint(self, outcome: Outcome) -> tuple[Transformer, Evaluation]:
        """The model as read back from the last checkpoint, and its loss on all held-out text."""
        _heading(4, "The checkpoint, read back into a new model")
        path = latest_checkpoint(outcome.run.checkpoints)
        assert path is not None, "a finished run has a checkpoint"
        device = outcome.model.embed.weight.device
        reloaded = load_model(path, outcome.model.embed.weight.dtype, device, outcome.model.ops)
        settings, text = self.config.train, outcome.text
        rows = settings.batch_size, settings.sequence_length
        again = evaluate(reloaded, text.held_out(*rows, settings.eval_sequences), text.tokenizer, device).loss
        *_, last = read_metrics(outcome.run.metrics)
        if again != last["eval/loss"]:
            raise UndertowError(f"{path}: held-out loss is {again} after loading, {last['eval/loss']} before saving")
        print(f"  {path}: held-out loss {again:.6f} nats per token, the same as before saving")
        return reloaded, evaluate(reloaded, text.held_out(*rows), text.tokenizer, device)

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
            print(f"\n  sample {seed + 1}, temperature {samples.TEMPERATURE}:\n")
            pieces = []
            for piece in samples.sampled(llm, prompt, SAMPLE_TOKENS, seed):
                print(piece, end="", flush=True)
                pieces.append(piece)
            print()
            written.append("".join(pieces))
        wanted, length = WORDS if self.judged else FEW_WORDS
        corpus = "".join(document.text for document in (*text.training, *text.validation))
        self.sampled = samples.sample_words(llm, corpus, wanted, length)
        self.figures |= {"samples": written, "words": asdict(self.sampled)}

    def _verdict(self, held_out: Evaluation, bars: Bars) -> bool:
        _heading(6, "The verdict")
        words = self.sampled
        passed = bars.passed_by(held_out.nats_per_byte) and words_pass(words)
        told = f"all held-out text but each sequence's first token, {held_out.bytes:,} bytes"
        print(f"  {told}: {held_out.nats_per_byte:.3f} nats per byte")
        for name, bar in asdict(bars).items():
            side = "below" if held_out.nats_per_byte < bar else "NOT below"
            print(f"  {side} {bar:.3f}, {name.replace('_', ' ')}")
        known, distinct = (
            (f" (at least {KNOWN_SHARE:.0%} should)", f" (at least {DISTINCT})") if self.judged else ("", "")
        )
        print(
            f"  {words.known:,} of {words.sampled:,} words of four or more letters, sampled at temperature "
            f"{samples.TEMPERATURE}, occur in the corpus{known}, {words.distinct:,} of them distinct{distinct}"
        )
        if not self.judged:
            print("  A short run is not judged by these.")
        elif passed:
            print("  The model predicts better than frequencies do, and writes words of its corpus.")
        else:
            print("  The model is not good enough.")
        self.figures |= {"nats_per_byte": held_out.nats_per_byte, "nats_per_token": held_out.loss}
        return passed


def _heading(number: int, title: str) -> None:
    print(f"\n{number}. {title}\n", flush=True)
