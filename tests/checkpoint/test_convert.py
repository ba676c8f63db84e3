"""Conversion between the formats: the same bytes on the way back wherever a format holds them."""

from __future__ import annotations

import json
import resource
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.release import release_tensors, small_flash, tiny, write_release
from undertow.checkpoint.convert.conversion import Report, convert
from undertow.checkpoint.convert.target import Wish
from undertow.checkpoint.directory import load_model, save_model
from undertow.checkpoint.header import read_header
from undertow.checkpoint.names import released_listing
from undertow.checkpoint.progress import Progress
from undertow.checkpoint.training import save_checkpoint
from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.quant.dialect import Dialect
from undertow.quant.stored import from_stored

RELEASED, BF16, FP8, FP4 = Wish(), Wish(precision="bf16"), Wish(precision="fp8"), Wish(precision="fp4")
HF, NATIVE = Wish("transformers"), Wish("undertow")


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        found |= load_file(file)
    return found


def assert_bytes(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def chain(start: Path, *wishes: Wish) -> tuple[Path, list[Report]]:
    """Convert one after the other, each verified; the last directory."""
    places = [start, *(start.with_name(f"{start.name}-{i}") for i in range(len(wishes)))]
    reports = [convert(a, b, wish, verify=True) for (a, b), wish in zip(pairwise(places), wishes, strict=True)]
    return places[-1], reports


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gguf",), "unknown format 'gguf' of a conversion; give one of released, transformers, undertow"),
        (("hf", "int4"), "unknown format 'hf' of a conversion; give one of released, transformers, undertow"),
        (("released", "FP4"), "unknown precision 'FP4' of a conversion; give one of None, fp32, bf16, fp8, fp4"),
        (("released", "fp4", "amd"), "unknown dialect 'amd' of a conversion; give one of None, ocp, fnuz"),
        (("released", ["fp4"]), "unknown precision ['fp4'] of a conversion; give one of None, fp32, bf16, fp8, fp4"),
    ],
)
def test_a_wish_that_is_none(words: tuple[Any, ...], said: str) -> None:
    with pytest.raises(InputError) as caught:
        Wish(*words)
    assert str(caught.value) == said


WAYS = {
    "bf16": (BF16, FP4),
    "fp32": (Wish(precision="fp32"), FP4),
    "transformers": (HF, FP4),
    "undertow": (NATIVE, FP4),
    "fp8 experts": (FP8, FP4),
    "fp8, then bf16": (FP8, BF16, FP4),
    "all plain ones": (BF16, HF, NATIVE, FP4),
    "itself": (RELEASED,),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_release_comes_back_with_the_same_bytes(way: str, target: Path) -> None:
    wanted = write_release(target, tiny())
    last, _ = chain(target, *WAYS[way])
    assert_bytes(tensors_of(last), wanted)


def test_fnuz_comes_back_with_the_same_bytes(target: Path) -> None:
    wanted = write_release(target, tiny(), release_tensors(tiny(), dialect="fnuz"))
    other, _ = chain(target, BF16, Wish(precision="fp4", dialect="fnuz"), Wish(dialect="ocp"), Wish(dialect="fnuz"))
    assert_bytes(tensors_of(other), wanted)


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_the_dialects_differ_by_negative_zero_and_a_factor_of_two(dialect: Dialect, target: Path) -> None:
    write_release(target, tiny(), release_tensors(tiny(), dialect="ocp" if dialect == "fnuz" else "fnuz"))
    last, [report] = chain(target, Wish(dialect=dialect))
    assert report.rounded == 0
    name, scale = "layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.scale"
    before, after = tensors_of(target), tensors_of(last)
    codes = before[name].view(torch.uint8)
    assert torch.equal(after[name].view(torch.uint8), codes.masked_fill(codes == 0x80, 0))
    one, other = (from_stored(name, held[name], held[scale]).dequantise() for held in (before, after))
    assert torch.equal(one, other)


def test_a_base_model_keeps_its_float32_scales(target: Path) -> None:
    wanted = write_release(target, tiny(), release_tensors(tiny(), experts="fp8"))
    last, reports = chain(target, FP8)
    assert reports[0].rounded == 0
    assert_bytes(tensors_of(last), wanted)
    last, reports = chain(target.rename(target.with_name("base")), BF16, FP8)
    assert reports[0].rounded == 0
    assert_bytes(tensors_of(last), wanted)


def test_scales_that_are_no_powers_of_two_are_rounded_in_bf16_and_come_back(target: Path) -> None:
    tensors = release_tensors(tiny(), experts="fp8")
    floats = [name for name, tensor in tensors.items() if name.endswith(".scale") and tensor.dtype is torch.float32]
    generator = torch.Generator().manual_seed(1)
    for name in floats:
        tensors[name] = torch.rand(tensors[name].shape, generator=generator) * 0.01 + 0.001
    write_release(target, tiny(), tensors)
    last, [there, _] = chain(target, BF16, FP8)
    assert there.rounded == len(floats) > 50
    assert_bytes(tensors_of(last), tensors)


def test_numbers_below_bf16_are_counted_and_verified(target: Path) -> None:
    tensors = release_tensors(tiny())
    name = "layers.0.attn.wq_a.scale"
    tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    write_release(target, tiny(), tensors)
    _, [report] = chain(target, BF16)
    assert report.rounded == 1


def test_numbers_that_fp8_rounds_to_infinity_are_refused(target: Path) -> None:
    write_release(target, tiny())
    last, _ = chain(target, BF16)
    file = last / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors["layers.0.attn.wq_a.weight"][3, 3] = torch.finfo(torch.bfloat16).max
    save_file(tensors, file)
    with pytest.raises(InputError, match=r"wq_a\.weight: holds numbers that e4m3 rounds to infinity"):
        convert(last, target.with_name("other"), FP8)


@pytest.mark.parametrize("kind", ["BOOL", "F8_E5M2", "U32"])
def test_kept_scales_of_another_type_are_not_used(kind: str, target: Path) -> None:
    write_release(target, tiny())
    last, _ = chain(target, BF16)
    scales = load_file(last / "scales.safetensors")
    dtype = {"BOOL": torch.bool, "F8_E5M2": torch.float8_e5m2, "U32": torch.uint32}[kind]
    save_file({name: torch.ones(each.shape).to(dtype) for name, each in scales.items()}, last / "scales.safetensors")
    convert(last, target.with_name("other"), FP4, verify=True)


def test_more_files_than_may_be_open(target: Path) -> None:
    write_release(target, tiny())
    many = target.with_name("many")
    assert convert(target, many, RELEASED, shard_bytes=1).files > 300
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 60, hard))
    try:
        assert convert(many, target.with_name("few"), RELEASED, verify=True).files == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", ["F4", "F6_E2M3", "F6_E3M2"])
def test_a_draft_of_half_bytes_passes_unchanged(kind: str, target: Path) -> None:
    config = tiny()
    write_release(target, config, release_tensors(config) | {"mtp.9.odd": torch.arange(5, dtype=torch.uint8)}, files=1)
    file = target / "model-00001-of-00001.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["mtp.9.odd"] |= {"dtype": kind, "shape": [3, 3] if kind == "F4" else [3, 2]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    place = target.with_name("other")
    assert convert(target, place, RELEASED, verify=True).drafts == ("mtp.9.odd",)
    [span] = [spans["mtp.9.odd"] for spans in map(read_header, place.glob("*.safetensors"))]
    assert (place / file.name).read_bytes()[span.begin : span.end] == bytes(range(5)) and span.dtype == kind


@pytest.mark.slow
def test_all_names_and_types_of_flash_are_planned(target: Path) -> None:
    config = small_flash(hidden_size=32, moe_intermediate_size=16, vocab_size=64)
    meta = release_tensors(config)
    write_release(target, config, meta)
    report = convert(target, target.with_name("none"), FP4, dry_run=True)
    assert report.tensors == len(released_listing(config)) == 69187
    assert report.rounded == 0 and not report.done and not target.with_name("none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", [BF16, HF, NATIVE, FP8])
def test_flash_with_all_its_names_comes_back(way: Wish, target: Path) -> None:
    wanted = write_release(target, small_flash())
    last, _ = chain(target, way, FP4)
    assert_bytes(tensors_of(last), wanted)


@pytest.mark.slow
def test_flash_with_all_its_names_goes_to_fnuz_and_back(target: Path) -> None:
    wanted = write_release(target, small_flash())
    assert len(wanted) == 69187
    last, reports = chain(target, Wish(dialect="fnuz"), Wish(dialect="ocp"))
    assert [(report.tensors, report.rounded) for report in reports] == [(69187, 0)] * 2
    between, after = tensors_of(target.with_name("model-0")), tensors_of(last)
    fp8 = {name for name, tensor in wanted.items() if tensor.dtype is torch.float8_e4m3fn}
    assert len(fp8) == 375
    for name in fp8:
        scale = name.removesuffix("weight") + "scale"
        codes = wanted[name].view(torch.uint8)
        canonical = codes.masked_fill(codes == 0x80, 0)
        assert between[name].dtype is torch.float8_e4m3fnuz and after[name].dtype is torch.float8_e4m3fn
        assert torch.equal(between[name].view(torch.uint8), canonical), name
        assert torch.equal(between[scale].view(torch.uint8), wanted[scale].view(torch.uint8) + 1), scale
        numbers = from_stored(name, wanted[name], wanted[scale]).dequantise()
        for held in (between, after):
            assert torch.equal(from_stored(name, held[name], held[scale]).dequantise(), numbers), name
        wanted[name] = canonical.view(torch.float8_e4m3fn)
    assert any(bool((wanted[name].view(torch.uint8) == 0).any()) for name in fp8)
    assert_bytes(after, wanted)


def test_the_model_computes_the_same_in_every_format(target: Path) -> None:
    write_release(target, tiny())
    ids = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    wanted = load_model(target)(ids)
    for wish in (BF16, HF, NATIVE, FP8):
        place = target.with_name("other-" + wish.spelling + str(wish.precision))
        convert(target, place, wish)
        with torch.no_grad():
            assert torch.equal(load_model(place)(ids), wanted)


@pytest.mark.parametrize("wish", [HF, BF16])
def test_transformers_loads_the_result(wish: Wish, target: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_release(target, tiny())
    place = target.with_name("converted")
    convert(target, place, wish)
    theirs, report = transformers.DeepseekV4ForCausalLM.from_pretrained(
        place, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    again = target.with_name("again")
    theirs.config.dtype = torch.bfloat16
    ours = load_model(target, dtype=torch.bfloat16).state_dict()
    theirs.save_pretrained(again)
    config = json.loads((again / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 0}
    (again / "config.json").write_text(json.dumps(config))
    back = load_model(again, dtype=torch.bfloat16).state_dict()
    assert {name for name in ours if not name.startswith("mtp.")} == set(back)
    for name, tensor in back.items():
        assert torch.equal(tensor, ours[name]), name


def test_a_training_checkpoint_leaves_its_optimizer_behind(make_model, debug: ModelConfig, tmp_path: Path) -> None:
    model = make_model(debug)
    optimizer = torch.optim.AdamW(model.parameters())
    folder = tmp_path / "run" / "checkpoints"
    save_checkpoint(folder, model, optimizer, Progress(3, 30, {}))
    for source in (tmp_path / "run", folder, folder / "step-3"):
        place = tmp_path / f"to-{source.name}"
        report = convert(source, place, RELEASED, verify=True)
        assert report.left == ("optimizer.safetensors", "progress.json") and report.rounded == 0
        assert report.source == str(folder / "step-3")
        for name, tensor in load_model(place).state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name])


def test_rounding_is_counted_and_verified(make_model, debug: ModelConfig, target: Path) -> None:
    save_model(make_model(debug), target)
    last, [first, second] = chain(target, FP4, BF16)
    assert first.rounded > 100 and second.rounded == 0
    wq = "layers.0.attn.wq_a.weight"
    numbers, wanted = tensors_of(last)[wq].float(), tensors_of(target)[wq]
    assert not torch.equal(numbers, wanted) and torch.allclose(numbers, wanted, rtol=0.0625, atol=0.002)


def test_unknown_draft_modules_pass_unchanged(target: Path) -> None:
    config = tiny()
    drafts = {
        "mtp.0.stage.weight": torch.ones(8, 8, dtype=torch.int8),
        "mtp.1.stage.scale": torch.ones(8, 1).to(torch.float8_e8m0fnu),
        "mtp.2.odd": torch.arange(3.0).to(torch.float8_e5m2),
        "mtp.2.flag": torch.ones(2, 3, dtype=torch.bool),
    }
    tensors = {n: t for n, t in release_tensors(config).items() if not n.startswith("mtp.")} | drafts
    write_release(target, config, tensors)
    values = json.loads((target / "config.json").read_text())
    values |= {"num_nextn_predict_layers": 3, "compress_ratios": [*config.compress_ratios[:-1], 0, 0, 0]}
    (target / "config.json").write_text(json.dumps(values | {"dspark_stages": 3}))
    for wish in (RELEASED, BF16, HF):
        place = target.with_name("other-" + wish.spelling + str(wish.precision))
        report = convert(target, place, wish, verify=True)
        assert set(report.drafts) == set(drafts)
        assert_bytes({name: tensors_of(place)[name] for name in drafts}, drafts)
    released = json.loads((target.with_name("other-releasedNone") / "config.json").read_text())
    assert released["dspark_stages"] == 3 and released["num_nextn_predict_layers"] == 3
    last, _ = chain(target.with_name("other-releasedbf16"), FP4)
    assert_bytes(tensors_of(last), tensors)


@pytest.mark.parametrize("name", ["mtp.0.ffn.experts.0.w1.weight", "mtp.0.ffn.experts.0.w1.scale"])
@pytest.mark.parametrize("wish", [RELEASED, FP4, HF])
def test_a_draft_under_a_name_that_is_written_is_refused(name: str, wish: Wish, target: Path) -> None:
    write_release(target, tiny())
    native, [_] = chain(target, NATIVE)
    [file] = native.glob("model-*.safetensors")
    save_file({**load_file(file), name: torch.full((3,), 7.0)}, file)
    index = native / "model.safetensors.index.json"
    held = json.loads(index.read_text())["weight_map"] | {name: file.name}
    index.write_text(json.dumps({"weight_map": held}))
    before = set(target.parent.iterdir())
    said = f"{name}: a draft module's tensor, and {wish.spelling} names have another one of this name; rename it"
    with pytest.raises(InputError, match=said):
        convert(native, target.with_name("other"), wish)
    assert set(target.parent.iterdir()) == before
    convert(native, target.with_name("other"), NATIVE, verify=True)
    assert tensors_of(target.with_name("other"))[name].tolist() == [7.0] * 3


def test_many_drafts_and_many_files(target: Path) -> None:
    """Their names and files are walked once, not once for each other."""
    config = tiny()
    write_release(target, config)
    index = target / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    for file in range(3_000):
        names = [f"mtp.9.x{file}.{number}" for number in range(20)]
        head = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
        (target / f"x{file}.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
        placed |= dict.fromkeys(names, f"x{file}.safetensors")
    index.write_text(json.dumps({"weight_map": placed}))
    report = convert(target, target.with_name("other"), BF16, dry_run=True)
    assert len(report.drafts) == 60_000 and report.tensors == 60_308


def test_files_beside_the_weights_are_carried(target: Path) -> None:
    write_release(target, tiny())
    (target / "tokenizer.json").write_text("{}")
    (target / "inference").mkdir()
    last, [report] = chain(target, BF16)
    names = {path.name for path in last.iterdir()}
    assert {"LICENSE", "generation_config.json", "tokenizer.json", "SHA256SUMS", "conversion.json"} <= names
    assert report.left == ("inference",) and "scales.safetensors" in names
    assert json.loads((last / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert "quantization_config" not in json.loads((last / "config.json").read_text())
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=last, check=True)


@pytest.mark.parametrize("shard_bytes", [1, 50_000, 10**6])
def test_shards_keep_to_their_size_and_tensors_to_their_alignment(shard_bytes: int, target: Path) -> None:
    wanted = write_release(target, tiny())
    place = target.with_name("sharded")
    report = convert(target, place, RELEASED, shard_bytes=shard_bytes, verify=True)
    assert_bytes(tensors_of(place), wanted)
    index = json.loads((place / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == report.files and set(index["weight_map"]) == set(wanted)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (Wish("transformers", "fp8"), "--dtype fp8 with --to transformers: FP8 and FP4 have released names alone"),
        (Wish("undertow", dialect="fnuz"), "--dialect fnuz: nothing would be written in FP8"),
        (Wish(precision="bf16", dialect="ocp"), "--dialect ocp: nothing would be written in FP8"),
    ],
)
def test_wishes_that_contradict_themselves(wish: Wish, message: str, target: Path) -> None:
    write_release(target, tiny())
    with pytest.raises(InputError, match=message):
        convert(target, target.with_name("other"), wish)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_numbers_that_are_not_finite_are_not_quantised(make_model, debug: ModelConfig, target: Path) -> None:
    save_model(make_model(debug), target, format="released")
    file = target / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.0.attn.wq_a.weight"][3, 3] = float("inf")
    save_file(tensors, file)
    with pytest.raises(InputError, match=r"model\.safetensors: layers\.0\.attn\.wq_a\.weight: holds NaN or infinity"):
        convert(target, target.with_name("other"), FP8)
    assert [path.name for path in target.parent.iterdir()] == [target.name]
