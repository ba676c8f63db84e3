"""A start for the search from an integer program, solved by OR-Tools where it is installed (extra `plan`).

Booleans say which part is on which stage, in order, and which layers are computed again. Bytes are taken as linear.
The program minimises `(m - 1) C + sum c`, c the seconds of a rank for one microbatch and C the most of them.
"""

from __future__ import annotations

from undertow.planner.tuner.case import Case, Cuts, Span

_NANO, _MEGA = 1e9, 1_000_000
WORK = 0.2  # the most that the solver does, in its own measure of about a second, the same on every machine


def cpsat_cuts(case: Case, share: float = 1.0) -> Cuts | None:
    """Cuts of the program's solution; None without OR-Tools, and where it finds none within a `share` of `WORK`."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return None
    model = cp_model.CpModel()
    count, stages = len(case.parts), case.stages
    here = [[model.new_bool_var(f"x{s},{i}") for i in range(count)] for s in range(stages)]
    again = [[model.new_bool_var(f"y{s},{i}") for i in range(count)] for s in range(stages)]
    for i in range(count):
        model.add_exactly_one(here[s][i] for s in range(stages))
        for s in range(stages):
            model.add_implication(again[s][i], here[s][i])
            if case.parts[i] != "t" or case.plan.split:
                model.add(again[s][i] == 0)
            if i and s:
                model.add(here[s][i] <= here[s][i - 1] + here[s - 1][i - 1])
            elif i:
                model.add(here[s][i] <= here[s][i - 1])
    for s in range(stages):
        model.add_at_least_one(here[s])
    both = [round(float(time.forward + time.backward) * _NANO) for time in case.part_times]
    forward = [round(float(time.forward) * _NANO) for time in case.part_times]
    largest = model.new_int_var(0, 2 * sum(both), "C")
    every = []
    for rank in range(case.ranks):
        of = [case.plan.stage(rank, chunk) for chunk in range(case.chunks)]
        load = sum(both[i] * here[s][i] + forward[i] * again[s][i] for s in of for i in range(count))
        model.add(load <= largest)
        every.append(load)
        _hold(model, case, rank, of, here, again)
    model.minimize((case.microbatches - 1) * largest + sum(every))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = WORK * share
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    sizes = [sum(solver.boolean_value(x) for x in stage) for stage in here]
    return tuple(sum(sizes[: s + 1]) for s in range(stages))


def _hold(model, case: Case, rank: int, of: list[int], here, again) -> None:
    """Keep a rank within its limit at each of its worst moments."""
    saved = case.memory.saved
    middle = len(case.parts) // 2
    reference = case.static_bytes(rank, [Span(middle, middle + 1)])

    def state(i: int) -> int:
        """What a part adds to a rank that has another layer already."""
        if i == middle:
            return state(i - 1)
        return case.static_bytes(rank, [Span(middle, middle + 1), Span(i, i + 1)]) - reference

    states = [state(i) for i in range(len(case.parts))]
    fixed = reference - states[middle]
    kept = [saved.stage(case.stage(Span(i, i + 1))).total for i in range(len(case.parts))]
    freed = [saved.full[i - 1] - saved.recomputed[i - 1] if part == "t" else 0 for i, part in enumerate(case.parts)]
    due = [saved.deferred(case.stage(Span(i, i + 1))).total if case.plan.split else 0 for i in range(len(case.parts))]
    for counts in case.in_flight[rank]:
        held = sum(
            (states[i] + n * kept[i] + late * due[i]) // _MEGA * here[s][i] - n * freed[i] // _MEGA * again[s][i]
            for n, late, s in zip(counts, counts[case.chunks :] or [0] * case.chunks, of, strict=False)
            for i in range(len(case.parts))
        )
        most = sum(states) + sum(counts) * sum(kept) + sum(counts) * sum(due)  # more than that holds nothing back
        model.add(held <= min(case.limits[rank] - fixed, most) // _MEGA)
