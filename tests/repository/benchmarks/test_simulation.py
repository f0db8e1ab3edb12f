"""The parts of benchmarks/simulation, held against closed forms, and the whole of it against counts
that are known."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from benchmarks.simulation import trees
from benchmarks.simulation.checking import PHASES
from benchmarks.simulation.constants import Constants, Cost, Line
from benchmarks.simulation.events import Cores, Gate, Meeting, Server, Simulation, Task
from benchmarks.simulation.goodput import (
    Checkpointed,
    InPlace,
    checkpointed,
    daly_s,
    in_place,
    simulated_checkpointed,
    simulated_in_place,
)
from benchmarks.simulation.model import SLICE_S, Cluster, Place
from benchmarks.simulation.published import DAY_S, connecting_s, known, mtbf_s
from tests.harness.programs import figures_of

# ── Events ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_events_happen_by_time_and_those_of_one_instant_in_the_order_of_asking(
    order: tuple[int, ...],
) -> None:
    simulation, happened = Simulation(), []
    times = (0.5, 1.0, 1.0, 2.0)
    for number in order:
        simulation.at(times[number], lambda number=number: happened.append(number))  # type: ignore[misc]
    assert simulation.run() == 2.0
    assert happened == sorted(order, key=lambda number: (times[number], order.index(number)))


def test_a_task_goes_on_when_each_of_its_waits_is_over() -> None:
    simulation, times = Simulation(), []

    def task() -> Task:
        for delay_s in (1.0, 0.0, 2.5):
            yield simulation.sleep(delay_s)
            times.append(simulation.now)

    simulation.start(task())
    simulation.run()
    assert times == [1.0, 1.0, 3.5]


def test_a_meeting_opens_when_the_last_one_has_come() -> None:
    simulation, left, meeting = Simulation(), [], Meeting(3)

    def task(delay_s: float) -> Task:
        yield simulation.sleep(delay_s)
        yield meeting.come()
        left.append(simulation.now)

    for delay_s in (1.0, 5.0, 3.0):
        simulation.start(task(delay_s))
    simulation.run()
    assert left == [5.0, 5.0, 5.0]
    gate = Gate()
    gate.open()
    passed: list[bool] = []
    gate.passed()(lambda: passed.append(True))
    assert passed == [True]


# ── Cores ────────────────────────────────────────────────────────────────────────────────────────


def ends(works: list[tuple[float, float]], cores: float, others: float = 0.0) -> list[float]:
    """When each work ends. works: when it begins, and its length."""
    simulation = Simulation()
    shared = Cores(simulation, cores, others)
    found = [math.nan] * len(works)

    def task(number: int) -> Task:
        begins_s, seconds = works[number]
        yield simulation.sleep(begins_s)
        yield shared.work(seconds)
        found[number] = simulation.now

    for number in range(len(works)):
        simulation.start(task(number))
    simulation.run()
    return found


@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("cores", [1, 2, 3, math.inf])
@pytest.mark.parametrize("others", [0.0, 1.5, 4.0])
def test_equal_work_shares_the_cores_evenly(count: int, cores: float, others: float) -> None:
    rate = min(1.0, cores / (count + others))
    if math.isinf(cores):
        others = 0.0
    assert ends([(0.0, 2.0)] * count, cores, others) == pytest.approx([2.0 / rate] * count)


def test_short_work_ends_first_and_gives_its_part_to_the_rest() -> None:
    # On one core: both get half until the short one has had its second, at 2.
    assert ends([(0.0, 3.0), (0.0, 1.0)], 1) == pytest.approx([4.0, 2.0])
    # A third comes at 3, when one is left: the two share from there on.
    assert ends([(0.0, 3.0), (0.0, 1.0), (3.0, 1.0)], 1) == pytest.approx([5.0, 2.0, 5.0])


@pytest.mark.parametrize("seed", range(20))
def test_cores_do_all_work_and_never_more_than_they_can(seed: int) -> None:
    draw = random.Random(seed)
    works = [(draw.random() * 3, draw.random()) for _ in range(draw.randint(2, 12))]
    total = sum(seconds for _, seconds in works)
    found = ends(works, 2)
    for (begins_s, seconds), end_s in zip(works, found, strict=True):
        assert end_s >= begins_s + seconds - 1e-9
    assert max(found) >= total / 2 - 1e-9
    assert max(found) <= max(begins_s for begins_s, _ in works) + total + 1e-9


# ── Servers ──────────────────────────────────────────────────────────────────────────────────────


def waits_of(arrivals_s: list[float], service_s: float) -> list[float]:
    """How long each request waits before it is served."""
    simulation = Simulation()
    server = Server(simulation, Cores(simulation))
    waited = [math.nan] * len(arrivals_s)

    def task(number: int) -> Task:
        yield simulation.sleep(arrivals_s[number])
        yield server.serve(service_s)
        waited[number] = simulation.now - arrivals_s[number] - service_s

    for number in range(len(arrivals_s)):
        simulation.start(task(number))
    simulation.run()
    assert server.served == len(arrivals_s)
    assert server.busy_s == pytest.approx(service_s * len(arrivals_s))
    return waited


def test_who_comes_at_once_is_served_in_order() -> None:
    assert waits_of([0.0] * 5, 2.0) == pytest.approx([0.0, 2.0, 4.0, 6.0, 8.0])
    assert waits_of([0.0, 3.0, 3.5], 2.0) == pytest.approx([0.0, 0.0, 1.5])


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_the_wait_of_random_arrivals_is_that_of_the_closed_form(load: float) -> None:
    """Pollaczek and Khinchine for M/D/1: load * service / (2 * (1 - load))."""
    draw = random.Random(7)
    arrivals = list(itertools.accumulate(draw.expovariate(load) for _ in range(60_000)))
    waited = waits_of(arrivals, 1.0)
    assert sum(waited) / len(waited) == pytest.approx(load / (2 * (1 - load)), rel=0.1)


# ── Trees ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fan_out", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 41])
def test_every_node_but_the_root_is_told_by_one_node(fan_out: int, count: int) -> None:
    told = [child for node in range(count) for child in trees.children(node, fan_out, count)]
    assert sorted(told) == list(range(1, count))


@pytest.mark.parametrize("fan_out", [2, 3, 8])
@pytest.mark.parametrize("levels", range(4))
def test_a_full_tree_takes_what_the_closed_form_says(fan_out: int, levels: int) -> None:
    count = sum(fan_out**level for level in range(levels + 1))
    assert trees.depth(count, fan_out) == levels
    send_s, hop_s, receive_s = 0.4, 0.05, 0.3
    # Every level costs its node all sends, and one hop.
    assert trees.down_s(count, fan_out, send_s, hop_s, receive_s) == pytest.approx(
        levels * (fan_out * send_s + hop_s + receive_s)
    )


@pytest.mark.parametrize("fan_out", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 9, 30])
def test_a_tree_on_servers_takes_as_long_as_its_formula(fan_out: int, count: int) -> None:
    send_s, hop_s, receive_s = 0.4, 0.05, 0.3
    simulation = Simulation()
    told: list[float] = []

    def node(number: int) -> Task:
        if number:
            yield simulation.sleep(receive_s)
        told.append(simulation.now)
        for child in trees.children(number, fan_out, count):
            yield simulation.sleep(send_s)
            simulation.after(hop_s, lambda child=child: simulation.start(node(child)))  # type: ignore[misc]

    simulation.start(node(0))
    simulation.run()
    assert len(told) == count
    assert max(told) == pytest.approx(trees.down_s(count, fan_out, send_s, hop_s, receive_s))


def test_reports_come_up_one_after_the_other() -> None:
    # Four children report at once; the root takes them in turn.
    assert trees.up_s(5, 4, 0.1, 0.2, 1.0) == pytest.approx(0.3 + 4 * 1.0)
    assert trees.up_s(1, 4, 0.1, 0.2, 1.0) == 0.0
    # A chain of three: two hops, one after the other.
    assert trees.up_s(3, 1, 0.1, 0.2, 1.0) == pytest.approx(2 * 1.3)


@pytest.mark.parametrize("count", [10, 1000, 100_000])
def test_no_fan_out_is_faster_than_the_best(count: int) -> None:
    send_s, hop_s, receive_s = 0.0008, 0.00005, 0.001

    def seconds(fan_out: int) -> float:
        return trees.depth(count, fan_out) * (fan_out * send_s + hop_s + receive_s)

    least = seconds(trees.best_fan_out(count, send_s, hop_s, receive_s))
    assert all(least <= seconds(fan_out) + 1e-12 for fan_out in range(2, 40))


# ── Goodput ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("save_s", [1.0, 10.0, 60.0])
@pytest.mark.parametrize("mtbf_h", [0.25, 3.0, 48.0])
def test_the_interval_of_daly_is_the_best_one(save_s: float, mtbf_h: float) -> None:
    between_s = mtbf_h * 3600
    best = daly_s(save_s, between_s)
    at_best = checkpointed(between_s, Checkpointed(save_s, 120.0, best))
    intervals = [best * 1.1**power for power in range(-20, 21)]
    most = max(checkpointed(between_s, Checkpointed(save_s, 120.0, one)) for one in intervals)
    assert at_best == pytest.approx(most, rel=2e-4)


@pytest.mark.parametrize(
    ("save_s", "restart_s", "interval_s"), [(10, 600, 900), (0, 300, 3600), (60, 0, 300)]
)
def test_the_goodput_of_checkpoints_is_that_of_drawn_failures(
    save_s: float, restart_s: float, interval_s: float
) -> None:
    way = Checkpointed(save_s, restart_s, interval_s)
    drawn = simulated_checkpointed(10_000.0, way, 40_000, random.Random(3))
    assert checkpointed(10_000.0, way) == pytest.approx(drawn, rel=0.01)


@pytest.mark.parametrize("change_s", [0.1, 10.0, 100.0])
@pytest.mark.parametrize("replace_s", [0.0, 60.0, 3600.0])
def test_the_goodput_in_place_is_that_of_drawn_failures(change_s: float, replace_s: float) -> None:
    way = InPlace(change_s, change_s / 2, replace_s, workers=100)
    drawn = simulated_in_place(10_000.0, way, 40_000, random.Random(3))
    assert in_place(10_000.0, way) == pytest.approx(drawn, abs=0.002)


def test_goodput_without_failures_is_what_the_saves_leave() -> None:
    assert checkpointed(1e15, Checkpointed(10, 600, 90)) == pytest.approx(0.9, rel=1e-6)
    assert in_place(1e15, InPlace(10, 10, 60, 1000)) == pytest.approx(1.0)


def test_failures_that_take_all_copies_need_a_fallback() -> None:
    with pytest.raises(ValueError, match="say what follows them"):
        InPlace(1, 1, 60, 1000, fatal=0.1)
    way = InPlace(1, 1, 60, 1000, fatal=0.1, fallback=Checkpointed(10, 600, 3600))
    assert in_place(10_000.0, way) < in_place(10_000.0, replace(way, fatal=0.0))


def test_times_must_be_times() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Checkpointed(-1, 0, 10)


def test_the_model_comes_to_the_goodputs_that_others_have_published() -> None:
    for one in known():
        assert one.least - 0.01 <= one.model <= one.least + 0.05, one


def test_published_rates_give_the_published_times_between_failures() -> None:
    # arXiv:2410.21680 projects 1.8 h for 16,384 GPUs and 0.23 h for 131,072.
    assert mtbf_s(16_384, "RSC-1") / 3600 == pytest.approx(1.8, rel=0.01)
    assert mtbf_s(131_072, "RSC-1") / 3600 == pytest.approx(0.23, rel=0.03)
    assert mtbf_s(16_384, "Llama 3") == pytest.approx(54 * DAY_S / 419)
    assert connecting_s(2048) == 5.0 and connecting_s(10_000) == pytest.approx(30.0)


# ── The whole ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def constants() -> Constants:
    return Constants.here()


def test_a_line_goes_through_its_points_and_costs_are_not_negative() -> None:
    assert Line.through([(1, 3.0), (2, 5.0), (4, 9.0)]) == Line(pytest.approx(1.0), 2.0)
    assert Line.through([(1, 3.0), (3, 1.0)]) == Line(2.0, 0.0)
    assert Line.through([(1, 0.5), (3, 5.0)]).fixed == 0.0


@pytest.mark.parametrize("one_host", [True, False])
@pytest.mark.parametrize("workers", [3, 9, 40])
def test_all_that_are_left_go_on_and_the_phases_are_in_order(
    constants: Constants, workers: int, one_host: bool
) -> None:
    place = Place(2, one_host=one_host)
    for seed in range(3):
        one = Cluster(constants, workers, place, seed).lose_one()
        assert one.survivors == workers - 1
        assert 0 < one.detected_s < one.decided_s < one.met_s < one.total_s
        # The death; and for each of the others: freeze, frozen, resume, and the store's operations.
        assert one.messages >= 1 + (workers - 1) * (3 + 4)
        assert one.store_s < one.driver_s


def test_the_same_seed_is_the_same_simulation(constants: Constants) -> None:
    place = Place(2)
    first, again = (Cluster(constants, 9, place, 4).lose_one() for _ in range(2))
    assert first == again
    assert first != Cluster(constants, 9, place, 5).lose_one()


def test_more_ranks_and_busier_cores_take_longer(constants: Constants) -> None:
    def seconds(workers: int, cores: float) -> float:
        return Cluster(constants, workers, Place(cores), 1).lose_one().total_s

    assert seconds(5, 2) < seconds(9, 2) < seconds(17, 2) < seconds(17, 1)


def test_without_a_host_in_common_ranks_hear_of_a_death_from_the_driver(
    constants: Constants,
) -> None:
    one = Cluster(constants, 9, Place(one_host=False)).lose_one()
    assert one.detected_s > constants.exit_s + constants.death_s


def test_the_requests_of_the_store_grow_with_the_ranks_and_not_with_their_square(
    constants: Constants,
) -> None:
    def messages(workers: int) -> int:
        return Cluster(constants, workers + 1, Place(one_host=False)).lose_one().messages

    assert messages(800) < 2.2 * messages(400)


def test_free_constants_leave_the_waits(constants: Constants) -> None:
    """If nothing costs anything, a change takes the end of the process, and the step."""
    nothing, no_line = Cost(0.0, 0.0), Line(0.0, 0.0)
    free = {
        name: nothing if isinstance(value, Cost) else no_line if isinstance(value, Line) else 0.0
        for name, value in vars(constants).items()
    }
    one = Cluster(Constants(**free), 5, Place(one_host=False, step_s=0.5)).lose_one()
    assert one.total_s == pytest.approx(0.5)
    assert one.total_s < 0.5 + SLICE_S


@pytest.mark.slow
def test_the_program_prints_what_it_has_simulated() -> None:
    figures = figures_of("simulation.run", "--workers", "50,200", timeout_s=100)
    small, large = figures["outlook"]
    assert (small["workers"], large["workers"]) == (50, 200)
    for one in (small, large):
        assert 0 < one["change_s"]["tree"] < one["change_s"]["calls"]
        assert all(0 < part <= 1 for ways in one["goodput"].values() for part in ways.values())
    assert small["change_s"]["calls"] < large["change_s"]["calls"]
    assert len(figures["published"]) == len(known())


@pytest.mark.slow
def test_real_changes_stand_beside_simulated_ones() -> None:
    flags = ("--workers", "", "--check", "--sessions", "1")
    rows = figures_of("simulation.run", *flags, timeout_s=400)["compared"]
    assert [row["survivors"] for row in rows] == [2, 4, 8, 16]
    for row in rows:
        for seconds in (row["real_s"], row["simulated_s"]):
            in_order = [seconds[phase] for phase in PHASES]
            assert in_order[0] > 0 and in_order == sorted(in_order), row
        assert row["error"] == row["simulated_s"]["total_s"] / row["real_s"]["total_s"] - 1
