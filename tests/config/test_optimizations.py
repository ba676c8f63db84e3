"""Families of optimisations: what a switch sets, what beats it, and the refusal to launch what is not built."""

import pytest

from undertow.config.errors import ConfigError
from undertow.config.optimizations import FAMILIES, FUSED, refuse_unbuilt, resolve, unbuilt
from undertow.config.resolve import resolve as resolve_run
from undertow.config.schema import OptimizationsConfig, RunConfig
from undertow.config.tracking import Tracked
from undertow.ops import OPS
from undertow.ops.registry import TRITON

BOTH = ("attention.backend", "attention.csa_backend")


def test_table_and_schema_name_the_same_families():
    names = {"fusion", "attention", "dispatch", "grouped_gemm", "mega_moe", "layout", "recompute", "fp8"}
    assert set(FAMILIES) == set(OptimizationsConfig.model_fields) == names


def test_every_key_that_a_family_sets_exists():
    for name in FAMILIES:
        for position in ("on", "off"):
            section = RunConfig.model_fields
            for key in resolve({name: position}):
                group, field = key.split(".")
                known = OPS if group == "ops" else section[group].annotation.model_fields  # type: ignore[union-attr]
                assert field in known


@pytest.mark.parametrize(
    ("value", "backend"), [("on", "auto"), (True, "auto"), ("off", "reference"), (False, "reference")]
)
def test_resolve_gives_the_keys(value, backend):
    assert resolve({"attention": value}) == dict.fromkeys(BOTH, backend)


def test_unknown_families_and_values_set_nothing():
    assert resolve({"attenton": "on", "attention": "maybe", "fp8": None}) == {}


def backends(path, overrides=(), environment=None):
    resolved = resolve_run(path, overrides, environment or {})
    assert resolved.config.attention.csa_backend == resolved.config.attention.backend
    return resolved.config.attention.backend, resolved.sources["attention.backend"]


def test_switch_of_the_command_line_beats_every_recipe(write):
    path = write("a.yaml", "model: v4-debug\nattention: {backend: triton, csa_backend: triton}\n")
    switch = "optimizations.attention=off"
    assert backends(path) == ("triton", "a.yaml:2")
    assert backends(path, [switch]) == ("reference", "optimizations.attention (command line)")
    environment = {"UNDERTOW__OPTIMIZATIONS__ATTENTION": "off"}
    source = "optimizations.attention (environment UNDERTOW__OPTIMIZATIONS__ATTENTION)"
    assert backends(path, [], environment) == ("reference", source)


def test_field_set_alone_beats_the_switch(write):
    path = write("a.yaml", "model: v4-debug\n")
    alone = {f"UNDERTOW__{key.upper().replace('.', '__')}": "triton" for key in BOTH}
    switch = "optimizations.attention=off"
    assert backends(path, [switch], alone) == ("triton", "environment UNDERTOW__ATTENTION__BACKEND")
    assert backends(path, [*(f"{key}=triton" for key in BOTH), switch]) == ("triton", "command line")


def test_switch_in_a_recipe_works_beneath_the_fields_of_that_recipe(write):
    write("family.yaml", "model: v4-debug\nattention: {backend: triton, csa_backend: triton}\n")
    path = write("a.yaml", "extends: family.yaml\noptimizations: {attention: off}\n")
    assert backends(path) == ("reference", "optimizations.attention (a.yaml:2)")
    path = write("a.yaml", "extends: family.yaml\noptimizations: {attention: off}\nattention: {csa_backend: triton}\n")
    attention = resolve_run(path, [], {}).config.attention
    assert (attention.backend, attention.csa_backend) == ("reference", "triton")


def test_later_switch_wins(write):
    write("family.yaml", "model: v4-debug\noptimizations: {attention: on}\n")
    path = write("a.yaml", "extends: family.yaml\noptimizations: {attention: false}\n")
    assert backends(path) == ("reference", "optimizations.attention (a.yaml:2)")
    assert backends(path, ["optimizations.attention=on"]) == ("auto", "optimizations.attention (command line)")


def test_all_switch_vectors_resolve():
    for number in range(2 ** len(FAMILIES)):
        vector = {name: "on" if number >> bit & 1 else "off" for bit, name in enumerate(FAMILIES)}
        config = OptimizationsConfig.model_validate(vector)
        assert config.model_dump() == vector
        assert list(unbuilt(config)) == [n for n, value in vector.items() if value == "on" and not FAMILIES[n].built]


def test_defaults_set_nothing_and_say_what_the_keys_say():
    resolved = resolve_run(None, ["model=v4-debug"], {})
    switches = resolved.config.optimizations.model_dump()
    assert {name for name, value in switches.items() if value == "on"} == {"attention", "fusion", "grouped_gemm"}
    said = resolve({name: value for name, value in switches.items() if FAMILIES[name].built})
    autos = (*BOTH, *(f"ops.{op}" for op in (*FUSED, "grouped_linear")))
    assert said == {**dict.fromkeys(autos, "auto"), "recompute.layers": "none"}
    assert resolved.config.ops == {} and set(FUSED) <= set(TRITON)
    assert (resolved.config.attention.backend, resolved.config.attention.csa_backend) == ("auto", "auto")
    assert resolved.config.recompute.layers == "none"
    assert resolved.sources["attention.backend"] == "default"
    refuse_unbuilt(resolved.tracked.optimizations)
    assert resolved.sources["optimizations.fp8"] == "default"


def test_launch_with_an_unbuilt_family_is_refused_with_its_conditions():
    resolved = resolve_run(None, ["model=v4-debug", "optimizations.layout=on", "optimizations.fp8=true"], {})
    with pytest.raises(ConfigError) as error:
        refuse_unbuilt(resolved.config.optimizations)
    assert str(error.value) == (
        "optimizations.layout, optimizations.fp8: not built yet, so it cannot run; set it to off "
        f"(layout needs {FAMILIES['layout'].conditions}; fp8 needs {FAMILIES['fp8'].conditions})"
    )


def test_the_refusal_reads_every_switch():
    view = Tracked(OptimizationsConfig.model_validate({}))
    refuse_unbuilt(view)  # type: ignore[arg-type]
    assert view.reads == set(FAMILIES)
