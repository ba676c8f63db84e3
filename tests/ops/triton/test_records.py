"""Records of cache entries: bytes against `undertow.quant.records`."""

import pytest
import torch

from undertow.ops.triton import records as kernels
from undertow.quant.records import FLOOR, read_records, record_size, write_records


@pytest.mark.parametrize(
    ("count", "width", "rotated"), [(37, 512, 64), (1, 128, 64), (3, 64, 0), (9, 192, 128), (20, 96, 32)]
)
def test_bytes_are_those_of_the_definition(count, width, rotated, device, hardware):
    g = torch.Generator().manual_seed(count)
    x = torch.randn(count, width, generator=g) * torch.exp2(torch.randint(-20, 8, (count, width), generator=g).float())
    x = x.bfloat16()
    x[0, 3] = float("nan")
    x[count - 1, :64] = 0
    expected = write_records(x, rotated)
    size = record_size(width, rotated)
    # Rows of a wider matrix, as entries lie beside others.
    apart = torch.full((count, width + 8), 7.0, dtype=torch.bfloat16, device=device)
    apart[:, :width] = x.to(device)
    written = kernels.write_records(apart[:, :width], rotated, size, FLOOR, hardware=hardware)
    assert torch.equal(written.cpu(), expected)
    found = kernels.read_records(expected.to(device), width, rotated, hardware=hardware).cpu()
    again = read_records(expected, width, rotated)
    assert torch.equal(found.nan_to_num(), again.nan_to_num()) and torch.equal(found.isnan(), again.isnan())
