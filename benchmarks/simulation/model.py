"""A change of the generation, simulated: one of many workers dies, and the others continue.

The driver's decisions are those of the real state machine (actors/driver/membership.py). Simulated
is what carries them, and how long it takes:

1. **Detection.** The ranks of one host look at each other's processes between slices of sleep; and
   the driver hears of the death from Ray, and tells every rank to freeze.
2. **Reports.** Every rank ends the generation for itself and tells the driver how far it is.
3. **Decision.** When all have reported, the driver tells every rank how it continues, a call each.
4. **Rendezvous.** Every rank uses the driver's store: it counts its attempt, looks whether that was
   given up, posts the name of its backend, and gathers what the others have to know. Ranks of one
   host do without the store since 61ef7406 (collectives/transports/host.py): this is how ranks of
   different hosts meet.
5. **Meeting.** The ranks connect, tell each other what they hold, and meet in a barrier.
6. **A step** of all ranks.

The driver's process is one server: the loop of its events and that of its store hold one lock of
Python's. So is each worker's. On `cores` that are shared, everything else competes for them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.simulation.constants import Constants, Cost
from benchmarks.simulation.events import (
    Cores,
    Gate,
    Meeting,
    Resume,
    Server,
    Simulation,
    Task,
    Wait,
)
from benchmarks.simulation.scale import simulated_report, simulated_worker
from chorusline.actors.driver.events import RankFroze, RunStarted, WorkerDied, WorkerRegistered
from chorusline.actors.driver.instructions import FreezeRank, Instruction, ResumeRank, StartRank
from chorusline.actors.driver.membership import Membership
from chorusline.actors.messages.messages import RunRequest
from chorusline.collectives.contract.errors import PeerLost

SLICES_S = (0.002, 0.005, 0.02)
"""Of sleep of a rank that waits for others in shared memory; the last one repeats."""

SLICE_S = 0.2
"""Of a wait in the store (collectives/meeting.py)."""

ROUNDS = 3
"""Collectives with which ranks meet: lengths, contents, barrier."""


@dataclass(frozen=True)
class Place:
    """Where it happens.

    cores: that all processes share, as on one machine, beside other programs; infinite if each
        process has its own.
    one_host: the ranks watch each other's processes. If not, only the driver's word tells them.
    """

    cores: float = math.inf
    one_host: bool = True
    step_s: float = 0.02


@dataclass(frozen=True)
class Predicted:
    """Seconds from the death, as benchmarks/simulation/kills.py measures them. driver_s: of work of
    the driver's process, its store included; store_s: of that, the store's. slowest_s: the longest
    that an operation of the store took to be answered, without what it waited for other ranks.
    """

    survivors: int
    detected_s: float
    decided_s: float
    met_s: float
    total_s: float
    driver_s: float
    store_s: float
    slowest_s: float
    messages: int


class Store:
    """The store in the driver's process, as actors/ray_calls/actor_store.py has it. All who gather
    wait for one event; after a slice a waiter asks again."""

    def __init__(self, simulation: Simulation, server: Server, constants: Constants) -> None:
        self._simulation = simulation
        self._server = server
        self._constants = constants
        self._missing = 0
        self._gates: list[Gate] = []
        self.busy_s = 0.0

    def expect(self, count: int) -> None:
        """So many ranks will gather."""
        self._missing = count

    @property
    def is_complete(self) -> bool:
        return self._missing == 0

    def operate(self) -> Wait:
        """An operation with one key."""
        return self._serve(self._constants.store_server.serial_s)

    def gather(self, count: int, is_first: bool) -> Iterator[Wait]:
        """One request, which waits for all ranks, for a slice at most. is_first: of its rank."""
        line = self._constants.gather_server
        yield self._serve(line.fixed / 2)
        if is_first:
            self._missing -= 1
            if self.is_complete:
                for gate in self._gates:
                    gate.open()
        if not self.is_complete:
            gate = Gate()
            self._gates.append(gate)
            self._simulation.after(SLICE_S, gate.open)
            yield gate.passed()
        values = count if self.is_complete else 0
        yield self._serve(line.fixed / 2 + line.each * values)

    def _serve(self, seconds: float) -> Wait:
        self.busy_s += seconds
        return self._server.serve(seconds)


class Cluster:
    """Workers and their driver. Rank 0 of the next generation is the first survivor."""

    def __init__(self, constants: Constants, workers: int, place: Place, seed: int = 0) -> None:
        self._constants = constants
        self._place = place
        self._draw = random.Random(seed)
        self._simulation = Simulation()
        self._cores = Cores(self._simulation, place.cores, constants.idle * (workers + 1))
        self._driver = Server(self._simulation, self._cores)
        self._store = Store(self._simulation, self._driver, constants)
        self._servers = {
            simulated_worker(seat).worker_id: Server(self._simulation, self._cores)
            for seat in range(workers)
        }
        self._rank_of: dict[str, int] = {}
        self._membership = Membership()
        for seat in range(workers):
            self._membership.handle(WorkerRegistered(simulated_worker(seat)))
        for one in self._membership.handle(
            RunStarted(RunRequest(0, 30.0, False, max_failures=None))
        ):
            assert isinstance(one, StartRank)
            self._rank_of[one.worker_id] = one.assignment.rank
        self._gates: dict[str, Gate] = {}
        self._messages = self._num_done = 0
        self._is_dead = False
        self._frozen_s = math.inf
        self._decided_s = self._met_s = self._total_s = self._slowest_s = 0.0
        trip = constants.call_trip_s - _total(constants.call_out) - _total(constants.call_in)
        self._wire_s = max(0.0, trip / 2)
        trip = constants.store_trip_s - _total(constants.store_client)
        self._store_wire_s = max(0.0, (trip - _total(constants.store_server)) / 2)

    def lose_one(self) -> Predicted:
        """Kill one rank in the middle of a step, and run until all others have taken the next."""
        victim = self._draw.choice(sorted(self._rank_of))
        left = [worker_id for worker_id in self._rank_of if worker_id != victim]
        self._count = len(left)
        self._store.expect(self._count)
        self._meetings = [Meeting(self._count) for _ in range(ROUNDS + 2)]
        self._is_told = {worker_id: Gate() for worker_id in left}
        for worker_id in left:
            self._simulation.start(self._rank(worker_id))
        self._simulation.start(self._detection())
        self._simulation.start(self._hears_of(victim))
        self._simulation.run()
        assert self._num_done == self._count, "all must have continued"
        return Predicted(
            self._count,
            self._frozen_s,
            self._decided_s,
            self._met_s,
            self._total_s,
            self._driver.busy_s,
            self._store.busy_s,
            self._slowest_s,
            self._messages,
        )

    # -- the driver --------------------------------------------------------------------------------

    def _hears_of(self, victim: str) -> Task:
        yield self._cores.work(self._constants.exit_s)
        self._is_dead = True
        yield self._simulation.sleep(self._constants.death_s)
        self._beside(self._constants.death_cpu_s)
        yield from self._event(WorkerDied(victim, "SIGKILL"), self._constants.report_in)

    def _event(self, event: object, cost: Cost) -> Task:
        """The driver takes an event in, decides, and sends what follows from it on its way."""
        self._messages += 1
        yield self._driver.serve(cost.serial_s + self._constants.decide_s)
        for one in self._membership.handle(event):
            self._carry_out(one)

    def _carry_out(self, one: Instruction) -> None:
        match one:
            case FreezeRank(worker_id) if worker_id in self._gates:
                self._simulation.start(self._call(worker_id, self._gates[worker_id].open))
            case ResumeRank(worker_id, _):
                told = self._is_told[worker_id]
                self._simulation.start(self._call(worker_id, told.open))

    def _call(self, worker_id: str, arrived: Resume) -> Task:
        """A call of the driver, each a task of its own; its answer comes back to it."""
        self._messages += 1
        out, into = self._constants.call_out, self._constants.call_in
        yield self._driver.serve(out.serial_s / 2)
        yield self._cores.work((out.beside_s + into.beside_s) / 2)
        yield self._simulation.sleep(self._wire_s)
        yield self._servers[worker_id].serve(into.serial_s)
        arrived()
        yield self._cores.work((out.beside_s + into.beside_s) / 2)
        yield self._simulation.sleep(self._wire_s)
        yield self._driver.serve(out.serial_s / 2)

    def _beside(self, seconds: float) -> None:
        """Work of a process that nothing waits for."""

        def work() -> Task:
            yield self._cores.work(seconds)

        self._simulation.start(work())

    # -- a rank ------------------------------------------------------------------------------------

    def _detection(self) -> Task:
        """Ranks that wait look for the dead between slices; the first to see one tells all."""
        if not self._place.one_host:
            return
        yield self._simulation.sleep(self._draw.random() * self._place.step_s)
        yield self._cores.work(self._constants.step_s.at(self._count))
        asleep_s = self._simulation.now
        slices = itertools.chain(SLICES_S, itertools.repeat(SLICES_S[-1]))
        while not self._is_dead or self._simulation.now == asleep_s:
            yield self._simulation.sleep(next(slices))
        for gate in self._gates.values():
            gate.open()

    def _rank(self, worker_id: str) -> Task:
        constants, count = self._constants, self._count
        server = self._servers[worker_id]
        gate = self._gates[worker_id] = Gate()
        yield gate.passed()
        self._frozen_s = min(self._frozen_s, self._simulation.now)
        self._beside(constants.rest_s)
        yield server.serve(constants.freeze_s.at(count))
        yield from self._report(worker_id)
        yield self._is_told[worker_id].passed()
        self._decided_s = max(self._decided_s, self._simulation.now)
        yield from self._rendezvous(worker_id, server)
        for meeting in self._meetings[:-1]:
            yield server.serve(constants.meet_s.at(count) / (ROUNDS + 1))
            yield meeting.come()
        self._met_s = max(self._met_s, self._simulation.now)
        yield self._simulation.sleep(self._place.step_s)
        yield server.serve(constants.step_s.at(count))
        yield self._meetings[-1].come()
        self._total_s = max(self._total_s, self._simulation.now)
        self._num_done += 1

    def _report(self, worker_id: str) -> Task:
        out, into = self._constants.report_out, self._constants.report_in
        yield self._servers[worker_id].serve(out.serial_s)
        yield self._cores.work(out.beside_s + into.beside_s)
        yield self._simulation.sleep(self._wire_s)
        report = simulated_report(self._rank_of[worker_id], 0, 100, _ERROR)
        yield from self._event(RankFroze(report), into)

    def _rendezvous(self, worker_id: str, server: Server) -> Task:
        """The operations of collectives/meeting.py and of the transport, in their order."""
        constants, store, count = self._constants, self._store, self._count
        client = constants.gather_client
        own_s = constants.connect_s.at(count) - 3 * constants.store_client.serial_s - client.fixed
        yield server.serve(max(0.0, own_s))
        yield from self._operation(server, store.operate())  # Its attempt is counted.
        yield from self._operation(server, store.operate())  # Is that given up?
        self._simulation.start(self._operation(server, store.operate()))  # Its backend.
        beside_s = constants.store_client.beside_s + constants.store_server.beside_s
        is_first = True
        while True:
            self._messages += 1
            yield server.serve(client.fixed / 2)
            yield self._cores.work(beside_s)
            yield self._simulation.sleep(self._store_wire_s)
            asked_s = self._simulation.now
            yield from store.gather(count, is_first)
            is_first = False
            self._answered(asked_s + SLICE_S)
            yield self._simulation.sleep(self._store_wire_s)
            values = count if store.is_complete else 0
            yield server.serve(client.fixed / 2 + client.each * values)
            if store.is_complete:
                return
            yield from self._operation(server, store.operate())  # Given up meanwhile?

    def _operation(self, server: Server, served: Wait) -> Task:
        self._messages += 1
        client, of_server = self._constants.store_client, self._constants.store_server
        yield server.serve(client.serial_s)
        yield self._cores.work(client.beside_s + of_server.beside_s)
        yield self._simulation.sleep(self._store_wire_s)
        asked_s = self._simulation.now
        yield served
        self._answered(asked_s)
        yield self._simulation.sleep(self._store_wire_s)

    def _answered(self, asked_s: float) -> None:
        self._slowest_s = max(self._slowest_s, self._simulation.now - asked_s)


_ERROR = PeerLost("all_reduce", 0, [0], "it died")


def _total(cost: Cost) -> float:
    return cost.serial_s + cost.beside_s
