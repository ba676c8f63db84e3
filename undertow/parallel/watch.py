"""A thread of each rank that says how the rank is doing, and ends a run that stands still, naming who holds it up.

What a rank says goes to the store that the ranks met at. The lowest rank that is there judges; the others end with it.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from undertow.config.errors import UndertowError
from undertow.parallel.recorder import collectives, numbers, own_store, postpone
from undertow.parallel.verdict import Beat, Sighting, verdict
from undertow.parallel.whereabouts import EXCHANGES, main_thread, whereabouts

FASTEST, SLOWEST = 0.1, 2.0  # seconds between beats
_MISSED = 5  # beats; who misses as many when an exchange has failed is the one that was lost
_BUSY = 0.1  # share of a processor that a rank uses at least if it computes
_SETTLES = 2.0  # seconds that the judgement of a failed exchange may take beside


class _Settled(NamedTuple):
    """How the run has ended: the first rank that failed or judged says it for all of them.

    `lost` are host and process number of those that gave no sign of life: they will not end by themselves.
    """

    sentence: str
    code: int
    lost: Sequence[tuple[str, int]] = ()


class _Watcher:
    def __init__(self, timeout: float, step: Callable[[], int], tell: Callable[[str], None]):
        self.rank, self.ranks, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._step, self._tell = step, tell
        self._period = min(SLOWEST, max(FASTEST, timeout / 10))
        self._main = main_thread()
        self._lock, self._over, self._hurried = threading.Lock(), threading.Event(), threading.Event()
        store = own_store()
        # The how-manieth watch of this rank: all ranks open the same ones, and none reads what an earlier one left.
        opened = store.add(f"watch/opened/{self.rank}", 1)
        self._store = c10d.PrefixStore(f"watch/{opened}", store)
        self._first, self._used = step(), (time.process_time(), time.monotonic())
        self._last = Beat(0, self._first, "start", host=_host(), pid=os.getpid())
        self._changed: dict[int, tuple[Beat | None, float, float]] = {}
        self._thread = threading.Thread(target=self._run, name="undertow-watch", daemon=True)

    def start(self) -> None:
        postpone(2 * self.timeout + _SETTLES)
        self._begun = self._reached = time.monotonic()
        self._store.set(str(self.rank), self._last.encode())
        self._thread.start()

    def stop(self) -> None:
        """No more beats: this rank is at its end."""
        self._over.set()
        self._thread.join()
        with suppress(dist.DistError):  # who keeps the store may be at its end already
            self._store.set(str(self.rank), replace(self._last, count=self._last.count + 1, done=True).encode())

    def settle(self, settled: _Settled, first: Callable[[], None] = lambda: None) -> bool:
        """Say for all ranks how the run ended, unless another did; whether it was this one. `first` is done before the
        others hear of it."""
        if self._store.add("settlers", 1) > 1:
            return False
        first()
        self._store.set("settled", json.dumps(settled))
        return True

    def settled(self) -> _Settled | None:
        """How the run has ended, if it has."""
        return _Settled(*json.loads(self._store.get("settled"))) if self._store.check(["settled"]) else None

    def _run(self) -> None:
        while not self._over.wait(self._period):
            try:
                self._beat()
                if self._hurried.is_set():
                    continue  # the main thread judges
                judged = self._judged(self.timeout)
                if judged and self.settle(judged):
                    self._end(judged, tells=True)
                if settled := self.settled():
                    self._end(settled, tells=False)
                self._reached = time.monotonic()
            except dist.DistError as error:
                if time.monotonic() - self._reached > self.timeout:
                    told = f"rank {self.rank}: the store of the ranks did not answer for {self.timeout:g} s: {error}"
                    self._end(_Settled(told, UndertowError.exit_code), tells=True)

    def _beat(self) -> None:
        before, entered, step = self._last, numbers(), self._step()
        place, blocked = whereabouts(self._main, frozenset({threading.get_ident()}))
        beat = replace(
            before,
            count=before.count + 1,
            step=step,
            place=place,
            numbers=entered,
            last=None,
            waits=None,
            blocked=blocked,
        )
        # Before the first step a rank may read or build for minutes without a collective: computing is moving there.
        (used, at), self._used = self._used, (time.process_time(), time.monotonic())
        computed = step == self._first and self._used[0] - used > _BUSY * (self._used[1] - at)
        if (step, entered) == (before.step, before.numbers):
            last, waits = collectives()
            at_work = computed and not (waits or blocked)
            beat = replace(beat, last=last and str(last), waits=waits and str(waits), work=before.work + at_work)
        self._last = beat
        self._store.set(str(self.rank), beat.encode())

    def _judged(self, patience: float) -> _Settled | None:
        """The judgement, where it is this rank's turn: everyone below it is lost."""
        if self.rank > 0:
            if not self._lost(self._look([0]), patience):
                return None
            if not self._lost(self._look(range(self.rank)), patience):
                return None
        return self._settled_by(self._look(range(self.ranks)), patience)

    def _settled_by(self, seen: Sequence[Sighting], patience: float) -> _Settled | None:
        judged = verdict(seen, self.timeout, patience)
        if judged is None:
            return None
        lost = [beat for rank in judged.lost if (beat := seen[rank].beat)]
        return _Settled(judged.sentence, UndertowError.exit_code, [(beat.host, beat.pid) for beat in lost])

    def _lost(self, seen: Sequence[Sighting], patience: float) -> bool:
        return all(not sight.done and sight.silent >= patience for sight in seen)

    def _look(self, ranks: Sequence[int]) -> list[Sighting]:
        """Every one of these ranks as it is now, by this rank's own clock."""
        keys = [str(rank) for rank in ranks]
        if self._store.check(keys):
            texts: dict[int, bytes] = dict(zip(ranks, self._store.multi_get(keys), strict=True))
        else:
            texts = {rank: self._store.get(str(rank)) for rank in ranks if self._store.check([str(rank)])}
        with self._lock:
            return [self._sighting(rank, texts.get(rank), time.monotonic()) for rank in ranks]

    def _sighting(self, rank: int, text: bytes | None, now: float) -> Sighting:
        beat, alive, moved = self._changed.get(rank, (None, self._begun, self._begun))
        if text is not None and (beat is None or Beat.decode(text).count != beat.count):
            new, alive = Beat.decode(text), now
            if beat is None or beat.progress != new.progress:
                moved = now
            beat = new
        self._changed[rank] = beat, alive, moved
        return Sighting(beat, now - alive, now - moved)

    def explain(self) -> _Settled | None:
        """After an exchange has failed: how another rank ended the run, or which rank was lost; None if nobody was."""
        self._hurried.set()
        patience = min(self.timeout, _MISSED * self._period)
        until = time.monotonic() + patience + _SETTLES
        with suppress(dist.DistError):
            while time.monotonic() < until:
                if settled := self.settled():
                    return settled
                seen = self._look(range(self.ranks))
                if any(sight.beat and not sight.done and sight.silent >= patience for sight in seen):
                    return self._settled_by(seen, patience)
                time.sleep(self._period / 2)
        return None

    def _end(self, settled: _Settled, tells: bool) -> None:
        """End this process: its main thread may be in an exchange that nothing brings back."""
        if tells:
            self._tell(settled.sentence)
            time.sleep(2 * self._period)  # the store may be kept by this process: the others read first
        here = _host()
        for pid in [pid for host, pid in settled.lost if host == here]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # a stopped process takes no notice of the launcher's SIGTERM
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(settled.code)


def _print(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr, flush=True)


def _host() -> str:
    """This machine, and on Linux the part of its processes that this one sees."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


@contextmanager
def watched(
    timeout: float,
    step: Callable[[], int],
    tell: Callable[[str], None] = _print,
    fails: Callable[[Exception], None] = lambda error: None,
) -> Iterator[None]:
    """Let this rank be watched, and watch the others, while the block runs; every rank of the default process group
    must open it, in the same order as other watches.

    `step` says how many steps the rank has taken; it is called from another thread. A rank without a sign of life for
    `timeout` seconds, or a run in which nobody takes a step or enters a collective for so long while some wait, ends
    every process with exit code 1; one of them tells why in one sentence, through `tell`. Before the first step
    computing counts too. The block's own error ends the others, with its exit code and without a word; a rank whose
    exchange failed because another is gone raises `UndertowError`, naming that one, or leaves without a word where it
    was said already. The rank that raises calls `fails` before the others end, and with them perhaps this process. A
    KeyboardInterrupt ends nobody else.
    """
    watcher = _Watcher(timeout, step, tell)
    watcher.start()
    try:
        yield
    except Exception as error:
        _fail(watcher, error, fails)
        raise
    finally:
        watcher.stop()


def _fail(watcher: _Watcher, error: Exception, fails: Callable[[Exception], None]) -> None:
    """Settle the run after an error of this rank. Returns where the error itself is to be raised."""
    ended = watcher.explain() if _in_exchange(error) else None
    code = getattr(error, "exit_code", UndertowError.exit_code)
    failed = _Settled(f"rank {watcher.rank} of {watcher.ranks} failed: {error}", code)
    raised = UndertowError(ended.sentence) if ended else error
    if watcher.settle(ended or failed, first=lambda: fails(raised)):
        if ended:
            raise raised from error
        return
    settled = watcher.settled()
    raise SystemExit(settled.code if settled else code) from error


def _in_exchange(error: Exception) -> bool:
    """Whether an exchange with other ranks may have raised it."""
    if isinstance(error, dist.DistError):
        return True
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, RuntimeError) and any(module.startswith(EXCHANGES) for module in modules)
