"""Where ranks start: what they tell each other, and weights that are the rows of one process' model."""

from __future__ import annotations

import pytest
import torch

from tests.engine.bytelevel import tokenizer
from tests.model.small import stirred
from tests.parallel.test_train import CONFIG, store
from undertow.checkpoint.directory import save_model
from undertow.checkpoint.shares import weight_shares
from undertow.config.errors import ConfigError, InputError
from undertow.config.resolve import resolve
from undertow.parallel.mesh import build_mesh
from undertow.parallel.start import anyone, tell
from undertow.train.same import refuse_other
from undertow.train.start import trainer_of
from undertow.train.text import Text

SHAPE = (f"model.vocab_size={CONFIG.vocab_size}", "model.num_hidden_layers=4", "model.compress_ratios=[0,4,8,4,0]")
WORDS = ("model=v4-debug", *SHAPE, "model.hidden_size=48", "device=cpu", "train.batch_size=4")


def told(rank_text):
    import torch.distributed as dist

    here = dist.get_rank()
    return tell(rank_text if here == 0 else "unheard"), anyone(here == 1), anyone(False)


@pytest.mark.parametrize("text", [None, "", "runs/é/step-7"])
def test_ranks_hear_the_first_and_each_other(two, text):
    assert two.run(told, text) == [(text, True, False)] * 2


def compared(*words):
    import torch.distributed as dist

    own = [word.replace("RANK", str(dist.get_rank())) for word in words]
    try:
        refuse_other(resolve(None, [*WORDS, *own], {}))
    except ConfigError as error:
        return str(error)
    return None


def test_a_rank_with_another_recipe_is_refused(two):
    assert two.run(compared, "seed=5", "out=runs/RANK") == [None, None]
    first, second = two.run(compared, "train.learning_rate=0.RANK1", "model.initializer_range=0.RANK2")
    assert first is None
    assert second.startswith("model.initializer_range is 0.12, and 0.02 on rank 0: the processes of a run learn by one")


def parts(*words):
    """Rows of every tensor of a run over ranks."""
    config = resolve(None, [*WORDS, *words], {}).config
    mesh = build_mesh(config.parallel, model=config.model)
    text = Text(tokenizer(), store(), store())
    model = trainer_of(config, text, torch.device("cpu"), None, mesh).model
    shares = weight_shares(model, mesh)
    return {name: (share.tensor.numpy(), share.first) for name, share in shares.items()}


def check_rows(answers, whole):
    held = dict.fromkeys(whole, 0)
    for answer in answers:
        for name, (rows, first) in answer.items():
            expected = whole[name] if rows.ndim == 0 else whole[name][first : first + len(rows)]
            assert torch.equal(torch.from_numpy(rows), expected), name
            held[name] += rows.size
    return {name: held[name] / max(whole[name].numel(), 1) for name in held}


@pytest.mark.parametrize("words", [("parallel.expert=2",), pytest.param(("parallel.shard=1",), marks=pytest.mark.slow)])
def test_fresh_weights_are_those_of_one_process(two, words):
    config = resolve(None, WORDS, {}).config
    alone = trainer_of(config, Text(tokenizer(), store(), store()), torch.device("cpu"), None).model
    copies = check_rows(two.run(parts, *words), alone.state_dict())
    parted = words == ("parallel.expert=2",)
    for name in ("layers.1.ffn.experts.w13", "embed.weight", "norm.weight"):
        assert copies[name] == (1 if parted else 2), name
    assert copies["layers.0.hc_attn.fn"] == 2


def test_weights_of_a_model_directory(two, tmp_path):
    save_model(stirred(CONFIG), tmp_path / "model")
    words = ("parallel.expert=2", f'init_from="{tmp_path / "model"}"')
    check_rows(two.run(parts, *words), stirred(CONFIG).state_dict())
    config = resolve(None, [*WORDS, words[1], "model.head_dim=16"], {}).config
    with pytest.raises(InputError, match="its head_dim is 32, this recipe's model has 16; set model"):
        trainer_of(config, Text(tokenizer(), store(), store()), torch.device("cpu"), None)
