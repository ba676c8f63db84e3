"""All ranks save and load, or none: what one of them meets, all of them raise, in bounded time."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import small_disk
from tests.parallel.checkpoints import SEED, Run, read, written
from undertow.checkpoint.agreement import Agreement
from undertow.checkpoint.joint import Joint
from undertow.checkpoint.training import Progress, latest_checkpoint
from undertow.checkpoint.writer import CheckpointWriter
from undertow.config.errors import InputError, UndertowError

EP2 = "EP2"


def raised(function, *arguments):
    """The class and the text of what it raises."""
    try:
        return function(*arguments)
    except UndertowError as error:
        return type(error).__name__, str(error)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def draws(seed):
    torch.manual_seed(seed)
    return float(torch.rand(()))


def test_random_state_is_each_ranks_own_on_as_many_ranks(two, four, tmp_path):
    path = Path(two.run(written, EP2, tmp_path)[0])
    assert [found[2] for found in two.run(read, "FSDP2", path)] == [draws(SEED), draws(SEED + 1)]
    assert [found[2] for found in four.run(read, "HSDP 2x2", path)] == [draws(SEED)] * 4
    assert read("one process", path)[2] == draws(SEED)


def beside_training(folder):
    """Three checkpoints, while weights change and the ranks exchange; what was told done, and how the last differs."""
    run, done = Run(EP2, True), []
    with CheckpointWriter(folder, None, 2, lambda path: done.append(path.name), run.mesh) as writer:
        for step in (1, 2, 3):
            if step == 3:
                run.fill()
            writer.save(run.model, run.optimizer, Progress(step, 1, {}))
            with torch.no_grad():
                for tensor in (*run.model.parameters(), *run.model.buffers()):
                    tensor.zero_()
            dist.all_reduce(torch.ones(1000))
            writer.poll()
    other = Run(EP2, False)
    other.load(folder / "step-3")
    return done, other.differences()


def test_beside_training(two, tmp_path):
    assert two.run(beside_training, tmp_path) == [(["step-1", "step-2", "step-3"], [])] * 2
    assert names(tmp_path) == ["latest", "step-2", "step-3"]


def not_finite(folder):
    run = Run(EP2, True)
    if dist.get_rank() == 1:
        run.optimizer.state[run.model.head.weight]["exp_avg"][0, 0] = float("nan")
    return raised(run.save, folder, 4)


def test_what_is_not_finite_on_one_rank_is_not_saved(two, tmp_path):
    kept = two.run(written, EP2, tmp_path)[0]
    one, other = two.run(not_finite, tmp_path)
    assert one == other and "step-4: head.weight/exp_avg is not finite; no checkpoint is written" in one[1]
    assert str(latest_checkpoint(tmp_path)) == kept and names(tmp_path) == ["latest", "step-3"]


def may_not_grow(folder, rank):
    """One rank may not write beyond the first bytes of a file."""
    run = Run(EP2, True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    joint = Joint(run.mesh)
    portion = joint.take(run.model, run.optimizer, Progress(4, 1, {}), folder)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        return raised(joint.publish, folder, portion, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        joint.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write(two, tmp_path, rank):
    kept = two.run(written, EP2, tmp_path)[0]
    one, other = two.run(may_not_grow, tmp_path, rank)
    assert one == other and one[0] == "UndertowError"
    assert f"step-4: rank {rank} cannot write the checkpoint ([Errno 27] File too large" in one[1]
    assert str(latest_checkpoint(tmp_path)) == kept and names(tmp_path) == ["latest", "step-3"]


def without_rank_1(patience, ends):
    """Rank 1 says nothing: it ends its agreement, or is late."""
    agreement = Agreement(patience)
    if dist.get_rank() != 1:
        return raised(agreement.exchange, "here"), raised(agreement.exchange, "again")
    if ends:
        agreement.close()
    else:
        time.sleep(2 * patience)
    return None


@pytest.mark.parametrize(("patience", "ends"), [(60.0, True), (2.0, False)])
def test_a_rank_that_is_lost_is_noticed_by_all(four, patience, ends):
    answers = four.run(without_rank_1, patience, ends, seconds=20.0)
    for first, second in answers[:1] + answers[2:]:
        assert f"a rank ended, or was silent for {patience:g} s" in first[1] and "a rank was lost before" in second[1]


def of_one_rank(error):
    def work():
        if dist.get_rank() == 1 and error is not None:
            raise error
        return dist.get_rank()

    with Agreement() as agreement:
        try:
            return agreement.together(work)
        except Exception as met:
            return type(met).__name__, str(met)


def test_the_error_of_one_rank_is_that_of_all(two):
    assert two.run(of_one_rank, None) == [[0, 1]] * 2
    assert two.run(of_one_rank, InputError("no such thing")) == [("InputError", "no such thing")] * 2
    found = two.run(of_one_rank, ValueError("odd"))
    assert found == [("UndertowError", "rank 1: ValueError: odd"), ("ValueError", "odd")]


def load_from(*paths):
    """What loading raises, and whether it has left the run as it was."""
    run = Run(EP2, True)
    path = paths[dist.get_rank() % len(paths)]
    return raised(run.load, path), run.differences()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model.safetensors", r"truncated or no safetensors file"),
        ("optimizer.safetensors", r"optimizer.safetensors: damaged"),
        ("progress.json", r"progress.json: damaged"),
    ],
)
def test_damage_that_one_rank_sees(two, tmp_path, file, said):
    paths = [Path(two.run(written, EP2, tmp_path / name)[0]) for name in ("whole", "damaged")]
    data = (paths[1] / file).read_bytes()
    (paths[1] / file).write_bytes(data[: len(data) // 2])
    one, other = two.run(load_from, *paths)
    assert one == other and one[0][0] == "InputError" and said in one[0][1] and one[1] == []


def test_a_checkpoint_of_another_model(two, tmp_path):
    path = Path(two.run(written, EP2, tmp_path)[0])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"index_topk": 2}))
    for found, differences in two.run(load_from, path):
        assert "of another model: its index_topk is 2, this run's is 3" in found[1] and differences == []


def dying(place, *words):
    result = small_disk.on_small_disk("tests.parallel.dying", place, "64m", *words)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


needs_disk = pytest.mark.skipif(not small_disk.possible(), reason="no file system may be mounted here")


@needs_disk
def test_a_rank_killed_while_it_writes(tmp_path):
    assert [found["named"] for found in dying(tmp_path, "1", "2")] == [False, False]


@needs_disk
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "3"])
def test_a_rank_killed_at_ten_moments(tmp_path, victim):
    found = dying(tmp_path, victim, "10")
    assert len(found) == 10 and [each["named"] for each in found[:9]] == [False] * 9


@needs_disk
def test_a_full_disk(tmp_path):
    assert dying(tmp_path, "full") == [{"latest": 5}]
