"""Communication that no computing kernel hides, in events made by hand."""

import pytest

from undertow.bench.exposed import beyond, collective_of, exposed_communication, length, union

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SUM = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name, start, end, stream=7, cat="kernel"):
    """An event as torch writes it: microseconds, the stream as its thread."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": end - start}


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(4, 6), (1, 2), (2, 3)], [(1, 3), (4, 6)]),
        ([(1, 9), (2, 3), (8, 11), (11, 12)], [(1, 12)]),
    ],
)
def test_union(spans, expected):
    assert union(spans) == expected


@pytest.mark.parametrize(
    ("spans", "others", "expected"),
    [
        ([], [(1, 2)], []),
        ([(1, 5)], [], [(1, 5)]),
        ([(1, 5)], [(0, 9)], []),
        ([(1, 5)], [(0, 1), (5, 6)], [(1, 5)]),
        ([(1, 9)], [(2, 3), (4, 6), (8, 12)], [(1, 2), (3, 4), (6, 8)]),
        ([(1, 3), (5, 7), (8, 9)], [(2, 6)], [(1, 2), (6, 7), (8, 9)]),
    ],
)
def test_beyond(spans, others, expected):
    found = beyond(spans, others)
    assert found == expected and length(found) == sum(end - start for start, end in expected)


def test_collectives_beside_computing_on_several_streams():
    events = [
        kernel("gemm", 0, 40),
        kernel("triton_norm", 30, 50, stream=13),  # overlaps the other computing one
        kernel(GATHER, 40, 60, stream=20),  # 10 of 20 hidden
        kernel(SUM, 55, 80, stream=24),  # from 55 to 70 exposed, then hidden
        kernel("gemm", 70, 100),
        kernel(SUM, 110, 120, stream=24),
        kernel("Memcpy DtoD (Device -> Device)", 110, 120, cat="gpu_memcpy"),  # hides nothing
        kernel("nccl:all_gather", 0, 200, cat="gpu_user_annotation"),
        kernel("aten::mm", 0, 200, cat="cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    found = exposed_communication(events, 200e-6)
    assert found["step_seconds"] == 200e-6 and found["computing_seconds"] == pytest.approx(80e-6)
    assert found["seconds"] == pytest.approx(50e-6)  # 40 to 80 and 110 to 120
    assert found["exposed_seconds"] == pytest.approx(30e-6) and found["exposed_share"] == pytest.approx(0.15)
    assert found["by_collective"] == {
        "AllGather": pytest.approx({"seconds": 20e-6, "exposed_seconds": 10e-6}),
        "ReduceScatter": pytest.approx({"seconds": 35e-6, "exposed_seconds": 25e-6}),
    }


@pytest.mark.parametrize("events", [[], [kernel("gemm", 0, 5)]])
def test_without_collectives_nothing_is_exposed(events):
    found = exposed_communication(events, 1.0)
    assert (found["seconds"], found["exposed_share"], found["by_collective"]) == (0.0, 0.0, {})


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (GATHER, "AllGather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "SendRecv"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "AllReduce"),
        ("void rccl_thing(int)", "void rccl_thing"),
    ],
)
def test_names_of_collectives(kernel, expected):
    assert collective_of(kernel) == expected
