"""Reads TensorBoard event files as a viewer does."""

from __future__ import annotations

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

START = SessionLog.START


def records(folder: Path) -> list[Event]:
    """The events of all files in the order of their names, every checksum checked; a torn last record is left out."""
    events = []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while len(data) >= 12 and len(data) >= 16 + (size := struct.unpack("<Q", data[:8])[0]):
            body = data[12 : 12 + size]
            sums = struct.unpack("<I", data[8:12])[0], struct.unpack("<I", data[12 + size : 16 + size])[0]
            assert sums == (masked_crc32c(data[:8]), masked_crc32c(body))
            events.append(Event.FromString(body))
            data = data[16 + size :]
    return events


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What a reader shows: a start drops what came before of its step and later ones."""
    points: dict[str, list[tuple[int, float]]] = {}
    for event in records(folder):
        if event.session_log.status == START:
            points = {name: [p for p in line if p[0] < event.step] for name, line in points.items()}
        for value in event.summary.value:
            points.setdefault(value.tag, []).append((event.step, value.simple_value))
    return points
