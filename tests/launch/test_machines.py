"""How many GPUs of which kind a launch is about."""

import pytest

from undertow.config.errors import ConfigError, InputError
from undertow.config.resolve import resolve
from undertow.launch.machines import Machines, gpus_of_a_node, machines_of


def config(gpus: str | None = None):
    return resolve("pretrain/quickstart", [f"parallel.gpus={gpus}"] if gpus else [], {}).config


def test_what_is_not_said_is_the_recipes():
    assert machines_of(config("32xMI355X"), 4, None, None) == Machines(4, 8, "MI355X")
    assert machines_of(config("2xh200"), 3, None, None) == Machines(3, 2, "H200")
    assert str(machines_of(config("32xMI355X"), 4, 4, "b200")) == "16xB200"
    assert machines_of(config(), 2, None, "H100") == Machines(2, 8, "H100")


def test_gpus_of_a_node():
    assert [gpus_of_a_node(config(gpus), None) for gpus in (None, "1xH200", "64xH200")] == [8, 1, 8]
    assert gpus_of_a_node(config("64xH200"), 4) == 4


def test_without_a_kind_it_is_refused():
    with pytest.raises(InputError, match=r"^no GPUs: the recipe states none; say which the nodes have, as --gpu H200,"):
        machines_of(config(), 2, None, None)
    with pytest.raises(ConfigError, match="unknown GPU 'H2000'"):
        machines_of(config(), 2, None, "H2000")
    with pytest.raises(InputError, match="allowed: 1000000 GPUs in all"):
        machines_of(config(), 10**6, 8, "H200")


@pytest.mark.parametrize("gpus", ["H200", "0xH200", "2x", "2xH200+2xH200", "2 xH200"])
def test_a_recipe_states_one_pool(gpus):
    with pytest.raises(ConfigError, match=r"parallel\.gpus"):
        config(gpus)
