"""`undertow generate`: sample from a model directory, the text appearing as it is made."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from undertow.cli.streams import read_prompt
from undertow.config.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from undertow.engine.llm import LLM
    from undertow.engine.stream import Chunk


class Precision(StrEnum):
    """Number formats that weights and activations can be held in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    app.command("generate")(generate)


def generate(
    model: Annotated[
        str, typer.Argument(help="Model directory: config.json, safetensors and, for text, tokenizer.json.")
    ],
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Text to continue, after one begin-of-sequence token. Default: standard input less its last newline.",
            show_default=False,
        ),
    ] = None,
    prompt_ids: Annotated[
        str | None,
        typer.Option(help="Token ids to continue, just as given, such as 0,17,5. Default: none.", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[
        float, typer.Option(help="Divisor of the logits, no unit; 0 takes the likeliest token.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Likeliest tokens to choose among, in tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Probability mass to choose among, above 0 and up to 1.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed, 0 to 2^64 - 1, no unit. Default: a fresh one.", show_default=False)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text to end before; may be given several times. Default: none.", show_default=False),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token. Default: off.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="Where the model runs: cpu, cuda or cuda:N (AMD GPUs too are called cuda).")
    ] = "cpu",
    dtype: Annotated[Precision, typer.Option(help="Number format of weights and activations.")] = Precision.float32,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object at the end: ids, text, logprobs in nats. Default: off."),
    ] = False,
) -> None:
    """Sample a continuation; text goes to standard output as it comes (ids, where the model has no tokenizer)."""
    given = _prompt(prompt, prompt_ids)
    if not model:
        raise InputError("the model path is empty: give a model directory")
    import torch

    from undertow.engine.llm import LLM
    from undertow.engine.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    llm = LLM(model, dtype=getattr(torch, dtype.value), device=device)
    if as_json:
        print(json.dumps(llm.generate([given], params)[0].as_dict()))
    else:
        _print_stream(llm, llm.stream(given, params))


def _prompt(text: str | None, ids: str | None) -> str | list[int]:
    """The one prompt that was given, by option or on standard input."""
    if text is not None and ids is not None:
        raise InputError("--prompt and --prompt-ids were both given: give one of them")
    if ids is not None:
        try:
            return [int(word) for word in ids.split(",")]
        except ValueError:
            raise InputError(f"--prompt-ids '{ids}': give whole numbers separated by commas, such as 0,17,5") from None
    if text is not None:
        return text
    return read_prompt()


def _print_stream(llm: LLM, chunks: Iterator[Chunk]) -> None:
    separator = ""
    for chunk in chunks:
        if llm.tokenizer is None:
            piece = separator + ",".join(map(str, chunk.token_ids))
            separator = ","
        else:
            piece = chunk.text
        print(piece, end="", flush=True)
    print()
