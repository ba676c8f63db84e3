"""Cluster strings and GPUs of one's own."""

from __future__ import annotations

import pytest

from undertow.config.clusters import parse_cluster, read_gpus
from undertow.config.errors import ConfigError
from undertow.config.gpus import GPUS, find_gpu

MINE = """\
MI300A:
  memory: 128.0e9
  bandwidth: 5.3e12
  bf16: 980.6e12
  fp8: 1961.2e12
  link: 384e9
  arch: gfx942
  dialect: fnuz
  source: vendor
"""


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        ("32xMI355X", [(32, "MI355X")]),
        ("16xMI308X+8xMI308X", [(16, "MI308X"), (8, "MI308X")]),
        ("4 X h200 + 2xB200", [(4, "H200"), (2, "B200")]),
        ("H100", [(1, "H100")]),
    ],
)
def test_pools(text, pools):
    found = parse_cluster(text)
    assert [(pool.count, pool.gpu.name) for pool in found] == pools
    assert "+".join(map(str, found)) == "+".join(f"{count}x{name}" for count, name in pools)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("32xMI355", "gpus '32xMI355': unknown GPU 'MI355'; did you mean 'MI355X'? (known: MI300X, MI308X, "),
        ("8xh20", "gpus '8xh20': unknown GPU 'h20'; did you mean 'H200'?"),
        ("0xH200", "gpus '0xH200': a pool of 0 GPUs; allowed: 1 to 1000000"),
        ("8xH200+", "gpus '8xH200+': '' is not a pool; write NxGPU, as 32xMI355X or 8xH200+4xH200"),
        ("-8xH200", "gpus '-8xH200': '-8xH200' is not a pool"),
        ("", "gpus '': '' is not a pool"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_own_gpus(tmp_path):
    path = tmp_path / "gpus.yaml"
    path.write_text(MINE)
    (own,) = read_gpus(path, {})
    assert (own.name, own.memory, own.bf16, own.dialect) == ("MI300A", 128_000_000_000, 980.6e12, "fnuz")
    assert isinstance(own.memory, int) and (own.source("bf16"), own.source("lds")) == ("vendor", "unknown")
    ((count, gpu),) = parse_cluster("4xmi300a", [own])
    assert count == 4 and gpu is own and find_gpu("MI300A") is None


def test_own_gpu_goes_before_the_catalogue(tmp_path):
    path = tmp_path / "gpus.yaml"
    path.write_text(MINE.replace("MI300A", "H200"))
    assert parse_cluster("H200", read_gpus(path, {}))[0].gpu.memory == 128_000_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("  link: 384e9\n", ""), ":1: GPU MI300A lacks link;"),
        (("bandwidth", "bandwith"), ":3: GPU MI300A: unknown figure 'bandwith'; did you mean 'bandwidth'?"),
        (("128.0e9", "lots"), ":2: GPU MI300A: memory is 'lots'; allowed: bytes from 1e9 (288 GB are 288e9)"),
        (("128.0e9", "128"), ":2: GPU MI300A: memory is 128; allowed: bytes from 1e9"),
        (("128.0e9", "-1"), ":2: GPU MI300A: memory is -1; allowed: bytes from 1e9"),
        (("5.3e12", "0"), ":3: GPU MI300A: bandwidth is 0; allowed: a number from 1"),
        (("fnuz", "nvfp4"), ":8: GPU MI300A: dialect is 'nvfp4'; allowed: fnuz, ocp, ocp+mx"),
        (("vendor", "rumour"), ":9: GPU MI300A: source is 'rumour'; allowed: vendor, measured, public,"),
        (("MI300A:\n", "GPU: 3\nMI300A:\n"), ":1: GPU 'GPU' is 3; allowed: a mapping of its figures"),
        (("MI300A:", "2fast:"), ":1: GPU name '2fast'; allowed: a letter, then letters,"),
    ],
)
def test_mistakes_in_a_file(tmp_path, change, message):
    path = tmp_path / "gpus.yaml"
    path.write_text(MINE.replace(*change))
    with pytest.raises(ConfigError) as caught:
        read_gpus(path, {})
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "gpus.yaml:1: a GPU file is a mapping of keys, but this file holds nothing"),
        (b"- 1\n", "gpus.yaml:1: a GPU file is a mapping of keys, but this file holds a list"),
        (b"\xff\xfe\x00", "gpus.yaml: cannot read this GPU file: it is not UTF-8 text"),
    ],
)
def test_what_is_no_gpu_file(tmp_path, content, message):
    path = tmp_path / "gpus.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_gpus(path, {})
    assert message in str(caught.value)


def test_units_for_fp4():
    assert {gpu.name for gpu in GPUS if gpu.fp4} == {"MI355X", "B200", "GB300"}
