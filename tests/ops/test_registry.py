"""The table of operators: backends, refusals with their reasons, and what every operator promises."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil

import pytest
import torch

import undertow.ops
from undertow.config.errors import InputError
from undertow.ops import OPS, Ops, explain
from undertow.ops.registry import BACKENDS, FIXED_ORDER, REFERENCE, TRITON, Machine, choose

CPU = torch.device("cpu")


def modules() -> list:
    found = pkgutil.walk_packages(undertow.ops.__path__, "undertow.ops.")
    return [undertow.ops, *(importlib.import_module(info.name) for info in found)]


def public_members() -> list[tuple[str, object]]:
    """Public functions and classes of the package, and the public methods of the latter."""
    members = []
    for module in modules():
        for name, member in vars(module).items():
            if name.startswith("_") or getattr(member, "__module__", None) != module.__name__:
                continue
            members.append((f"{module.__name__}.{name}", member))
            if inspect.isclass(member):
                parts = [(n, m) for n, m in vars(member).items() if not n.startswith("_")]
                members += [(f"{module.__name__}.{name}.{n}", m) for n, m in parts if inspect.isfunction(m)]
    return [(name, m) for name, m in members if inspect.isfunction(m) or inspect.isclass(m)]


def test_every_operator_is_a_public_function_of_its_own_name():
    apart = {"csa_attention": "sparse_attention"}
    assert {op: function.__name__ for op, function in REFERENCE.items()} == {op: apart.get(op, op) for op in OPS}


@pytest.mark.parametrize("op", OPS)
def test_fixed_order_names_exactly_what_takes_invariant(op):
    parameters = inspect.signature(REFERENCE[op]).parameters
    assert (op in FIXED_ORDER) == ("invariant" in parameters)
    if op in FIXED_ORDER:
        assert parameters["invariant"].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters["invariant"].default is False


@pytest.mark.parametrize("name", [name for name, _ in public_members()])
def test_public_names_are_described(name):
    member = dict(public_members())[name]
    assert (inspect.getdoc(member) or "").strip(), name
    assert not inspect.isclass(member) or member.__doc__, name


@pytest.mark.parametrize("op", OPS)
def test_operators_name_their_shapes(op):
    assert "[" in (REFERENCE[op].__doc__ or "")


def test_auto_takes_the_reference_on_a_cpu_and_says_why():
    for choice in explain("cpu"):
        assert choice.chosen == "reference"
        missing = f"no triton kernel for {choice.op} in this version"
        assert choice.refused == {"triton": "triton kernels run on a GPU" if choice.op in TRITON else missing}
        assert str(choice) == "reference" and choice.others == ()
    assert tuple(choice.op for choice in explain(CPU)) == OPS


def test_auto_takes_the_first_backend_that_does_not_refuse():
    for op in OPS:
        choice = choose(op, Machine("cuda", "sm_90"))
        assert choice.chosen == next(name for name in BACKENDS if name not in choice.refused)
        assert all(op in reason for reason in choice.refused.values())


def test_the_reference_can_be_asked_for():
    assert choose("linear", CPU, "reference").chosen == "reference"
    assert Ops({"linear": "reference"}).choices["linear"].chosen == "reference"


def test_a_backend_that_refuses_is_an_error_with_its_reason():
    for call in (lambda: Ops({"linear": "triton"}), lambda: choose("linear", CPU, "triton")):
        with pytest.raises(InputError) as error:
            call()
        assert str(error.value) == (
            "ops.linear: backend 'triton' cannot serve here: no triton kernel for linear in this version; "
            "choose 'auto' or another"
        )


@pytest.mark.parametrize("call", [lambda names: Ops(names), lambda names: explain("cpu", names)])
@pytest.mark.parametrize(("wrong", "near"), [("rmsnorm", "rms_norm"), ("sparse_atention", "sparse_attention")])
def test_unknown_operators_name_the_nearest(wrong, near, call):
    with pytest.raises(InputError) as error:
        call({wrong: "auto"})
    text = str(error.value)
    assert f"'{wrong}'" in text
    assert f"did you mean '{near}'?" in text
    assert all(op in text for op in OPS)


def test_unknown_names_without_a_neighbour_list_what_is_known():
    with pytest.raises(InputError, match=r"unknown operator 'zzz' \(known: linear, "):
        choose("zzz", CPU)
    with pytest.raises(InputError, match=r"unknown backend 'cuda' \(known: auto, triton, reference\)"):
        choose("linear", CPU, "cuda")


def test_unknown_backends_name_the_nearest():
    with pytest.raises(InputError, match=r"unknown backend 'tritton'; did you mean 'triton'\?"):
        Ops({"linear": "tritton"})


def test_attributes_are_the_operators():
    ops = Ops()
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    assert torch.equal(ops.linear(x, weight), torch.full((2, 4), 3.0))
    assert all(callable(getattr(ops, op)) for op in OPS)
    assert set(ops.choices) == set(OPS)
    with pytest.raises(AttributeError, match=r"no operator 'lineer' \(known: linear, "):
        ops.lineer  # noqa: B018


def test_invariant_mode_reaches_every_operator_of_fixed_order():
    for mode in (False, True):
        ops = Ops(batch_invariant=mode)
        assert repr(ops) == f"Ops(batch_invariant={mode})"
        for op in OPS:
            function = getattr(ops, op)
            if op in FIXED_ORDER:
                assert function.keywords == {"invariant": mode}
                assert function.func is REFERENCE[op]
            else:
                assert function is REFERENCE[op]


def test_tables_can_be_copied():
    ops = Ops(batch_invariant=True)
    twin = copy.deepcopy(ops)
    assert twin.batch_invariant
    assert twin.linear.keywords == {"invariant": True}
