import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.bytelevel import VOCABULARY, tokenizer
from undertow.checkpoint.directory import save_model
from undertow.cli import main
from undertow.config.model import ModelConfig
from undertow.engine.llm import LLM
from undertow.engine.runner import Batch
from undertow.engine.sampling import SamplingParams
from undertow.model.build import build_model

OPTIONS = ("--max-tokens", "8", "--ignore-eos")


@pytest.fixture(scope="module")
def speaking(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("model") / "speaking", tokenizer())


@pytest.fixture(scope="module")
def mute(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("model") / "mute", None)


def saved(path: Path, words: object) -> Path:
    model = build_model(ModelConfig.from_preset("v4-debug", vocab_size=VOCABULARY), seed=3)
    with torch.no_grad():
        model.head.weight.mul_(25)
    save_model(model, path, tokenizer=words)
    return path


def test_text_goes_to_standard_output(speaking, capsys):
    assert main(["generate", str(speaking), "--prompt", "to be", "--temperature", "0", *OPTIONS]) == 0
    (wanted,) = LLM(speaking).generate("to be", SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert capsys.readouterr().out == wanted.text + "\n"


def test_text_appears_as_it_comes(speaking, capsys, monkeypatch):
    written: list[str] = []
    step = Batch.step
    monkeypatch.setattr(Batch, "step", lambda *given: (written.append(capsys.readouterr().out), step(*given))[1])
    assert main(["generate", str(speaking), "--prompt", "to be", "--seed", "6", *OPTIONS]) == 0
    (wanted,) = LLM(speaking).generate("to be", SamplingParams(max_tokens=8, seed=6, ignore_eos=True))
    assert len([piece for piece in written if piece]) > 3
    assert "".join(written) + capsys.readouterr().out == wanted.text + "\n"


def test_json_is_the_completion(speaking, capsys):
    words = ["--temperature", "0.7", "--top-k", "40", "--top-p", "0.9", "--seed", "11", "--stop", "zz", "--stop", "\n"]
    assert main(["generate", str(speaking), "--prompt", "oh", "--json", *words, *OPTIONS]) == 0
    params = SamplingParams(
        max_tokens=8, temperature=0.7, top_k=40, top_p=0.9, seed=11, stop=("zz", "\n"), ignore_eos=True
    )
    (wanted,) = LLM(speaking).generate("oh", params)
    assert json.loads(capsys.readouterr().out) == wanted.as_dict()


def test_ids_in_and_ids_out_without_a_tokenizer(mute, capsys):
    assert main(["generate", str(mute), "--prompt-ids", "0,17,5", "--temperature", "0", *OPTIONS]) == 0
    (wanted,) = LLM(mute).generate([0, 17, 5], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert capsys.readouterr().out == ",".join(map(str, wanted.token_ids)) + "\n"


def test_the_prompt_may_come_on_standard_input(speaking, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("to\nbe\n"))
    assert main(["generate", str(speaking), "--json", *OPTIONS]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_token_ids"] == [0, *tokenizer().encode("to\nbe")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no prompt: give --prompt TEXT, --prompt-ids 0,17,5, or text on standard input"),
        (["--prompt", "a", "--prompt-ids", "1"], "--prompt and --prompt-ids were both given"),
        (["--prompt-ids", "1,x"], "--prompt-ids '1,x': give whole numbers separated by commas"),
        (["--prompt-ids", "1,900"], "token 900 at position 1 is outside the vocabulary of 264"),
        (["--prompt-ids", "1", "--temperature", "-1"], "temperature=-1.0: give 0 (greedy) or more"),
        (["--prompt-ids", "1", "--top-p", "0"], "top_p=0.0: give a probability mass above 0 and up to 1"),
        (["--prompt-ids", "1", "--max-tokens", "0"], "max_tokens=0: give a whole number of tokens, at least 1"),
        (["--prompt-ids", "1", "--dtype", "int4"], "'int4'"),
        (["--prompt-ids", "1", "--device", "tpu9"], "device 'tpu9' is not known"),
        (["--prompt", "a"], "prompt 0 is text, but the model has no tokenizer.json"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(words, message, mute, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["generate", str(mute), *words]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_no_such_directory(capsys, tmp_path):
    assert main(["generate", str(tmp_path / "none"), "--prompt", "a"]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_an_interrupt_is_code_130_and_keeps_the_text(speaking, capsys, monkeypatch):
    step, steps = Batch.step, []

    def interrupted(self: Batch, tokens: list[int]) -> None:
        steps.append(tokens)
        if len(steps) == 5:
            raise KeyboardInterrupt
        step(self, tokens)

    monkeypatch.setattr(Batch, "step", interrupted)
    assert main(["generate", str(speaking), "--prompt", "to be", "--seed", "6", *OPTIONS]) == 130
    monkeypatch.undo()
    (whole,) = LLM(speaking).generate("to be", SamplingParams(max_tokens=8, seed=6, ignore_eos=True))
    shown = capsys.readouterr()
    assert shown.out.strip("\n") and whole.text.startswith(shown.out.rstrip("\n")) and "Traceback" not in shown.err


def test_help_documents_every_option_and_needs_no_torch():
    probe = "import sys; from undertow.cli import main; print(main(['generate', '--help']), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0 False"
    text = " ".join(result.stdout.split())
    for default in ("[default: 64]", "[default: 1.0]", "[default: 0]", "[default: cpu]", "[default: float32]"):
        assert default in text
    assert text.count("efault:") >= 12
