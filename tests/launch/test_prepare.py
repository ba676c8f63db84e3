"""A launch before it starts: what is settled, planned anew, or refused."""

import shlex

import pytest

import undertow
from undertow.config.dump import values_of
from undertow.config.errors import ConfigError, DoesNotFit
from undertow.config.resolve import resolve
from undertow.launch.prepare import Launch, prepare

FLASH = "pretrain/flash-32xMI355X"


def launch(recipe: str, nodes: int, *words: str, gpus: int | None = None, gpu: str | None = None, **variables: str):
    return prepare(recipe, nodes, gpus, gpu, words, variables)


def again(found: Launch):
    """The configuration that the words of the command give on a machine without any variable."""
    return resolve(found.recipe, shlex.split(found.command)[shlex.split(found.command).index(found.recipe) + 1 :], {})


def test_the_published_run_as_it_stands():
    found = launch(FLASH, 4)
    assert (found.words, found.conflicts, found.replanned) == ((), (), None)
    assert found.rung.rung.number == 7 and found.rung.differs == {}
    assert found.plan.time.seconds_per_iteration == pytest.approx(8.551, abs=2e-3)
    reported = found.plan.time.tflops_per_gpu[1]
    assert reported == pytest.approx(1378.8, rel=1e-3)
    assert list(found.unbuilt) == ["mega_moe", "layout"]
    assert found.resolved.sources["parallel.layout"].endswith("flash-32xMI355X.yaml:31")


def test_other_nodes_tune_the_layout_anew_and_keep_the_widths():
    found = launch(FLASH, 8, "train.batch_size=512")
    assert found.replanned == "32xMI355X"
    parallel = found.resolved.config.parallel
    assert (parallel.gpus, parallel.pipeline, parallel.expert, parallel.tensor) == ("64xMI355X", 4, 8, 1)
    assert parallel.layout == found.plan.layout and found.plan.fits
    assert found.resolved.sources["parallel.gpus"] == "planned for 64xMI355X"
    assert found.resolved.sources["train.batch_size"] == "command line"
    given = undertow.plan(FLASH, "64xMI355X", overrides=["train.batch_size=512"]).time.seconds_per_iteration
    assert found.plan.time.seconds_per_iteration <= given
    assert again(found).config == found.resolved.config


def test_a_layout_by_hand_stays():
    found = launch(FLASH, 8, "parallel.layout=Et*13|t*10|t*10|t*10mL")
    assert (found.replanned, found.plan.layout) == (None, "Et*13|t*10|t*10|t*10mL")
    even = launch(FLASH, 8, "optimizations.layout=off")
    assert (even.replanned, even.plan.layout) == (None, "Et*10|t*11|t*11|t*11mL")
    assert even.rung.rung.number == 7 and even.rung.differs == {"layout": "off"}


def test_less_memory_recomputes_and_says_so():
    found = launch(FLASH, 4, gpu="H200")
    layers = found.resolved.config.recompute.layers
    assert layers == sorted(found.plan.recompute.layers) and len(layers) > 10
    assert found.resolved.sources["recompute.layers"] == "planned for 32xH200"
    assert (found.rung.rung.number, found.rung.differs) == (7, {"recompute": "on"})
    assert again(found).config == found.resolved.config


def test_widths_that_do_not_suit_the_nodes_are_a_sentence():
    with pytest.raises(ConfigError) as error:
        launch(FLASH, 2)
    assert str(error.value) == (
        "--nodes 2: expert 8 does not divide the 4 ranks of a stage (16 GPUs / pipeline 4), over which experts are "
        "dealt out; the recipe is planned for 32xMI355X, give parallel.pipeline, parallel.expert or train.batch_size "
        "that suit 16xMI355X"
    )
    narrower = launch(FLASH, 2, "parallel.pipeline=2")
    assert narrower.plan.task.geometry.data == 8 and narrower.resolved.config.parallel.layout.count("|") == 1


def test_nothing_that_fits_is_code_3():
    with pytest.raises(DoesNotFit):
        launch(FLASH, 4, gpu="H100")


def test_open_widths_are_settled_in_the_command():
    found = launch("pretrain/v4-flash", 8, "train.batch_size=512", gpu="H200")
    geometry, parallel = found.plan.task.geometry, found.resolved.config.parallel
    assert (parallel.pipeline, parallel.expert, parallel.layout) == (geometry.pipeline, 8, found.plan.layout)
    assert again(found).config == found.resolved.config


def test_variables_go_into_the_command():
    variables = {"UNDERTOW__SEED": "5", "UNDERTOW__OUT": "'7'", "UNDERTOW__OPTIMIZATIONS__FUSION": "off"}
    found = launch("pretrain/proxy-1xH200", 1, "train.steps=9", **variables)
    assert set(found.words) == {"optimizations.fusion=off", 'out="7"', "seed=5", "train.steps=9"}
    assert again(found).config == found.resolved.config
    assert found.resolved.sources["seed"] == "environment UNDERTOW__SEED"
    assert values_of(found.resolved)["ops.rms_norm"] == "reference"


def test_one_gpu_has_nothing_unbuilt():
    found = launch("pretrain/proxy-1xH200", 1)
    assert (found.command, found.unbuilt, found.warnings) == ("undertow train pretrain/proxy-1xH200", {}, ())


def test_machines_of_other_sizes_are_warned_of():
    told = launch("pretrain/v4-flash-amd", 8, gpus=4, gpu="MI355X").warnings
    assert "--gpus-per-node 4: what GPUs send each other is priced for machines of 8, not for these" in told
