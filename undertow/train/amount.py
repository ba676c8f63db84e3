"""How much data a run has and how often it reads it, told before the first step."""

from __future__ import annotations

from collections.abc import Iterator

from undertow.config.errors import InputError
from undertow.config.training import TrainConfig
from undertow.data.packing import IGNORED
from undertow.train.loop import Trainer
from undertow.train.text import Text

_FAR = 2.0  # times or part of the asked share that is worth a warning


def describe_data(text: Text, trainer: Trainer, fraction: float) -> Iterator[str]:
    """One line with documents and tokens of both parts and the epochs of the run; a second one for an odd division."""
    training, held = text.training_ids, text.validation_ids
    every = (trainer.stage(step) for step in range(1, trainer.settings.steps + 1))
    tokens = sum(stage.batch_size * stage.sequence_length for stage in every)
    yield (
        f"data: {len(training):,} documents, {training.tokens:,} tokens, read {tokens / training.tokens:.3g} times; "
        f"held out: {len(held):,} documents, {held.tokens:,} tokens"
    )
    share = held.tokens / (held.tokens + training.tokens)
    if not fraction / _FAR <= share <= fraction * _FAR:
        yield (
            f"warning: {share:.1%} of the tokens are held out where data.validation_fraction asks for {fraction:.1%}: "
            "whole documents are, and these are few or very unequal"
        )


def refuse_unlearned(text: Text, settings: TrainConfig) -> None:
    """Raise `InputError` where what is evaluated has no token that is learned."""
    batches = text.held_out(settings.batch_size, settings.sequence_length, settings.eval_sequences)
    if all((batch.labels == IGNORED).all() for batch in batches):
        raise InputError(
            f"held-out text: no token of the first {settings.eval_sequences} rows of {settings.sequence_length} tokens "
            "is learned; lengthen train.sequence_length, raise train.eval_sequences, or mend the responses"
        )
