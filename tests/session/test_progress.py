"""What the display concludes from reports, however they arrive, and what it prints in a log."""

import io

from rich.console import Console

from actors.messages import Report
from runtime.session.progress import Progress, Seen, batches_left


def report(rank, number, num_batches, *, epoch=0, time=0.0):
    values = {"loss": 2.0 + rank, "tokens": 100, "epoch": epoch}
    values["batches_left"] = num_batches - number - 1
    return Report(rank, number, time, values)


def seen(*reports):
    total = Seen()
    for one in reports:
        total = total.add(one)
    return total


def run_of(*num_batches, epoch=0):
    """Rank by rank, as a burst of reports comes in."""
    return [
        report(rank, number, count, epoch=epoch)
        for rank, count in enumerate(num_batches)
        for number in range(count)
    ]


def test_rank_without_batches_has_joined_once_another_takes_more():
    short = [report(0, 0, 2), report(0, 1, 2)]
    assert seen(*short, report(1, 0, 3), report(1, 1, 3)).joined == frozenset()
    assert seen(*short, *(report(1, n, 3) for n in range(3))).joined == {0}


def test_at_an_even_end_nobody_has_joined():
    assert seen(*run_of(4, 4)).joined == frozenset()


def test_rank_that_is_an_epoch_ahead_makes_nobody_join():
    first = run_of(2, 2)
    assert seen(*first[:2], report(0, 0, 2, epoch=1), *first[2:]).joined == frozenset()


def test_step_counts_the_longest_rank_of_each_epoch():
    assert seen(*run_of(2, 5), *run_of(4, 1, epoch=1)).step == 5 + 4


def test_loss_is_the_mean_of_the_ranks_that_still_have_data():
    assert seen(report(0, 0, 5), report(1, 0, 5)).loss == 2.5
    assert seen(*run_of(1, 3)).loss == 3.0


def test_tokens_per_second_leave_out_the_step_that_paid_for_the_start():
    total = seen(*(report(0, number, 9, time=50.0 + number) for number in range(5)))
    assert total.tokens_per_s == 100


def test_many_ranks_are_counted_and_not_listed():
    assert batches_left(seen(*run_of(*range(1, 13)))).endswith("0 to 0; 11 of 12 ranks joined")


def test_reports_without_our_names_still_count_steps():
    total = seen(Report(0, 0, 0.0, {"accuracy": 0.5}), Report(0, 1, 1.0, {"accuracy": 0.6}))
    assert (total.step, total.loss, total.tokens_per_s, batches_left(total)) == (2, None, None, "")


def test_log_gets_whole_lines_with_the_join_and_the_end():
    log = io.StringIO()
    with Progress(5, console=Console(file=log, width=40)) as progress:
        for one in run_of(2, 5):
            progress.on_report(one)
    first, news, last = log.getvalue().splitlines()
    assert first.startswith("step 1/5  loss 2.000")
    assert news == "step 3: rank 0 has run out of data and joined; the others go on"
    assert last == "step 5/5  loss 3.000  batches left: rank 0 joined, rank 1 0"
