"""Strikes trainers with the same seeded faults, and counts what was lost.

    python -m benchmarks.trials.check [--seed 0] [--trials 2] [--faults 3] [--systems chorusline]
        [--kinds kill,two,...] [--workers 3] [--samples 1200] [--json]
    python -m benchmarks.trials.check --storm-every 15 --minutes 10 [--systems chorusline]
    python -m benchmarks.trials.check --systems chorusline --no-pace --trials 9 --faults 20

Each system (systems.py) trains the same model, whose parameters are their own ledger (workload.py),
as a program of its own; the faults (faults.py) come from outside, by pid, when the training has
come to a step that the seed has drawn. In the table, over all trials of a system:

    faults        that have struck
    over          trials that ended by themselves, with all ranks' parameters
    raised        trials that ended with the exception that was planted
    again         steps that were taken again, as the ranks have logged them: where some rank logs a
                  step that lies at least two before the newest one
    never, twice  samples that counted in no step, or in more than one
    off           how far a sample's parameter is from what one use of it makes of it, at most
    state         trials whose optimizer state was lost: no number of steps leads to the clock
    differ        trials whose ranks ended with different bits
    hangs         trials that took no step for --patience seconds
    left          processes and files in /dev/shm that stayed
    next, worst   seconds from a fault to the second new step: median, worst
    open          faults after which no second new step came
    still         seconds in which no rank took a step, beyond what a usual step takes
    fewer         besides these, seconds in steps of fewer ranks than the training began with
    seconds       from the first step to the last, median of the trials that are over
    goodput       samples that counted, over those of as many seconds without faults; 0 for a trial
                  that is not over, unless the planted exception ended it

Each violation prints the command that repeats it. With --storm-every a rank is killed each so many
seconds instead, for --minutes from the first step on; the training is then cut off where it is,
which says nothing of never, differ and left ("-").
picture.py draws what --keep has left of such storms.
"""

from __future__ import annotations

import dataclasses
import signal
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.alternation import as_installed, finish, parser, table
from benchmarks.trials import enclosure
from benchmarks.trials.faults import KINDS, draw
from benchmarks.trials.systems import SYSTEMS, System
from benchmarks.trials.trial import Size, Trial, play, storm

_QUIET_S, _QUIET_SAMPLES = 20.0, 1200
"""Of a training without faults, at most: it shows how fast the others would be, in a storm or not,
and that it ends well."""


def main() -> None:
    arguments = parser("Strikes trainers with the same seeded faults, and counts what was lost.")
    arguments.add_argument("--seed", type=int, default=0, help="of the first trial")
    arguments.add_argument("--trials", type=int, default=2, help="of each system")
    arguments.add_argument("--faults", type=int, default=3, help="in each trial")
    arguments.add_argument("--kinds", default=",".join(KINDS), help="of faults")
    arguments.add_argument("--systems", default="", help="whose names begin so, by commas")
    arguments.add_argument("--storm-every", type=float, default=0.0, help="seconds between kills")
    arguments.add_argument("--minutes", type=float, default=10.0, help="of a storm")
    arguments.add_argument("--workers", type=int, default=Size.workers)
    arguments.add_argument("--samples", type=int, default=Size.samples)
    arguments.add_argument(
        "--patience", type=float, default=Size.patience_s, help="seconds without a step"
    )
    arguments.add_argument(
        "--no-pace", action="store_true", help="no training without faults first, and no goodput"
    )
    arguments.add_argument("--keep", help="a folder for what the trainings print and log")
    args = arguments.parse_args()
    as_installed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # By way of `finally`.
    size = Size(args.workers, args.samples, args.patience, args.keep)
    rows, notes = [], []
    figures: dict[str, Any] = {}
    kinds = args.kinds.split(",")
    if "disk" in kinds and (reason := enclosure.why_not()):
        kinds.remove("disk")
        notes.append(f"no disk was full: a disk of the trial's own needs root ({reason})")
    for name, system in SYSTEMS.items():
        if not name.startswith(tuple(args.systems.split(","))):
            continue
        if reason := system.why_not():
            notes.append(f"{name} could not run: {reason}")
            continue
        quiet, trials = None, []
        if not args.no_pace:
            quiet = paced(system, args, size)
            _say(system, quiet)
            notes += [f"{name}, without faults: {what}" for what in quiet.violations()]
        for seed in range(args.seed, args.seed + args.trials):
            trial = tried(system, seed, args, kinds, size)
            _say(system, trial)
            notes += [f"{name}: {what}; {_repeat(name, seed, args)}" for what in trial.violations()]
            trials.append(trial)
            if args.storm_every:
                notes.append(f"{name}, seed {seed}: {_where_it_went(trial, quiet)}")
        sums = summed(trials, quiet)
        rows.append([name, *(_cell(value) for value in sums.values())])
        every = [*([quiet] if quiet else []), *trials]
        figures[name] = {**sums, "trials": [dataclasses.asdict(trial) for trial in every]}
    table("trials", ["system", *summed([], None)], rows)
    for note in notes:
        print(note)
    finish(args, {}, {**figures, "notes": notes})


def paced(system: System, args: Any, size: Size) -> Trial:
    """A training without a fault."""
    if args.storm_every:
        return storm(system, args.seed, 0.0, 60 * args.minutes, size, cut_s=_QUIET_S)
    quiet = dataclasses.replace(size, samples=min(size.samples, _QUIET_SAMPLES))
    return play(system, args.seed, (), quiet)


def tried(system: System, seed: int, args: Any, kinds: Sequence[str], size: Size) -> Trial:
    if args.storm_every:
        return storm(system, seed, args.storm_every, 60 * args.minutes, size)
    return play(system, seed, draw(seed, args.faults, kinds), size)


def _say(system: System, trial: Trial) -> None:
    what = "; ".join(trial.violations()) or ("raised" if trial.has_raised else "well")
    struck = ", ".join(trial.struck) or "no fault"
    print(f"{system.name}, seed {trial.seed}: {struck}: {what}", file=sys.stderr, flush=True)


def summed(trials: Sequence[Trial], quiet: Trial | None) -> dict[str, Any]:
    """One row of the table. quiet: the same training without a fault, if there was one."""
    # One that is cut off has samples left over, its ranks are steps apart, and its processes are
    # ended from outside: what only an end of its own can say is None where none has one.
    endings = [trial.ending for trial in trials if trial.ending is not None]
    finals = [t.ending for t in trials if t.ending is not None and not t.is_cut]
    lefts = [len(trial.left) for trial in trials if not trial.is_cut and not trial.is_hung]
    waits = [s for trial in trials for s in trial.next_s]
    spents = [trial.spent for trial in trials if trial.spent is not None]
    ended = [trial for trial in trials if trial.is_over and trial.seconds]
    goodputs = [goodput(trial, quiet) for trial in trials if not trial.has_raised] if quiet else []
    return {
        "faults": sum(len(trial.struck) for trial in trials),
        "over": f"{sum(trial.is_over for trial in trials)}/{len(trials)}",
        "raised": sum(trial.has_raised for trial in trials),
        "again": sum(trial.again for trial in trials),
        "never": sum(one.never for one in finals) if finals else None,
        "twice": sum(one.again for one in endings) if endings else None,
        "off": max((one.off for one in endings), default=None),
        "state": sum(one.num_steps is None for one in endings) if endings else None,
        "differ": sum(one.differ for one in finals) if finals else None,
        "hangs": sum(trial.is_hung for trial in trials),
        "left": sum(lefts) if lefts else None,
        "next": statistics.median(waits) if waits else None,
        "worst": max(waits, default=None),
        "open": sum(len(trial.struck_at) - len(trial.next_s) for trial in trials),
        "still": sum(spent.still for spent in spents),
        "fewer": sum(spent.fewer for spent in spents),
        "seconds": statistics.median(trial.seconds for trial in ended) if ended else None,
        "goodput": statistics.median(goodputs) if goodputs else None,
    }


def goodput(trial: Trial, quiet: Trial) -> float:
    """Samples that counted, over those of as many seconds without faults; 0 without an ending."""
    if quiet.ending is None or not quiet.ending.counted:
        return float("nan")
    if trial.ending is None or not trial.is_over or not trial.seconds:
        return 0.0
    return trial.ending.counted / trial.seconds / (quiet.ending.counted / quiet.seconds)


def _where_it_went(storm: Trial, quiet: Trial | None) -> str:
    """The time of a storm, in words."""
    if storm.spent is None or not storm.struck:
        return "no kill"
    still, fewer, kills = storm.spent.still, storm.spent.fewer, len(storm.struck)
    steps = [
        f"{1000 * trial.spent.step:.1f} ms{how}"
        for trial, how in ((storm, ""), (quiet, " without kills"))
        if trial is not None and trial.spent is not None and trial.spent.step is not None
    ]
    return (
        f"of {storm.seconds:.1f} s, {still:.1f} s without a step ({still / kills:.2f} s a kill), "
        f"{fewer:.1f} s in steps of fewer ranks; a step of all ranks took {', '.join(steps)}"
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value >= 0.01 or value == 0 else f"{value:.0e}"
    return "-" if value is None else str(value)


def _repeat(name: str, seed: int, args: Any) -> str:
    if args.storm_every:
        rest = f"--storm-every {args.storm_every:g} --minutes {args.minutes:g}"
    else:
        rest = f"--faults {args.faults} --kinds {args.kinds} --samples {args.samples}"
    return (
        f"python -m benchmarks.trials.check --systems '{name}' --seed {seed} --trials 1 "
        f"--workers {args.workers} {rest}"
    )


if __name__ == "__main__":
    main()
