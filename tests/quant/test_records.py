"""Records of cache entries against numbers worked out by hand."""

import pytest
import torch

from undertow.config.errors import InputError
from undertow.quant.records import read_records, record_size, write_records


def test_size():
    assert record_size(512, 64) == 584
    assert record_size(128, 64) == 200  # 64 + 128 + 1, filled up to a multiple of 8


def test_layout_of_a_record():
    entry = torch.zeros(1, 128, dtype=torch.bfloat16)
    entry[0, 0], entry[0, 1], entry[0, 127] = 448.0, -1.0, 3.0
    (record,) = write_records(entry, 64)
    assert record[:3].tolist() == [0x7E, 0xB8, 0] and record[192].item() == 127
    assert record[64:192].view(torch.bfloat16)[-1] == 3
    assert record[193:].tolist() == [0] * 7


def test_a_group_has_at_least_the_floor():
    (record,) = write_records(torch.zeros(1, 64, dtype=torch.bfloat16), 0)
    # 1e-4 / 448 = 2.2e-7, and 2^-22 = 2.4e-7 is the power of two above it.
    assert record[64].item() == 127 - 22


def test_reading_gives_what_fp8_keeps():
    torch.manual_seed(0)
    entries = torch.randn(50, 512).bfloat16()
    found = read_records(write_records(entries, 64), 512, 64)
    assert torch.equal(found[:, 448:], entries[:, 448:])
    error = (found[:, :448].float() - entries[:, :448].float()).abs()
    groups = entries[:, :448].float().view(50, 7, 64).abs().amax(2, keepdim=True)
    # Half a step of the largest binade, which a scale up to twice too large makes one in 14 of the largest at most.
    assert (error.view(50, 7, 64) <= groups / 14).all() and error.max() > 0


def test_a_group_with_a_nan_is_nan_alone():
    entries = torch.ones(1, 192, dtype=torch.bfloat16)
    entries[0, 5] = float("inf")
    found = read_records(write_records(entries, 64), 192, 64)
    assert found[0, :64].isnan().all() and (found[0, 64:] == 1).all()


def test_bytes_are_valid_in_both_dialects():
    torch.manual_seed(1)
    records = write_records(torch.randn(20, 128).bfloat16() * 1000, 64)[:, :64]
    assert not any((records == code).any() for code in (0x7F, 0x80, 0xFF))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: record_size(100, 64), "the 36 others must be a multiple of 64"),
        (lambda: write_records(torch.zeros(2, 128), 64), r"of torch.float32: \[N, D\] in bfloat16 is expected"),
        (lambda: read_records(torch.zeros(2, 199, dtype=torch.uint8), 128, 64), r"\[N, 200\] in uint8 is expected"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(InputError, match=message):
        call()
