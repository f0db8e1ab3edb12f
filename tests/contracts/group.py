"""What every transport owes to `Group`: a list of checks, each of which runs on all ranks of one.

Most return a digest of the results, which must be the same on all ranks.
"""

from __future__ import annotations

from tests.contracts.handle import (
    HANDLE_CONTRACT,
    check_many_objects_between_two,
)
from tests.contracts.in_flight import (
    check_a_slow_rank_is_waited_for,
    check_asking_is_enough,
    check_awaiting,
    check_coalesced,
    check_inference_mode,
    check_many_in_flight,
    check_statistics,
    check_statistics_of_uneven_operations,
)
from tests.contracts.operations import (
    check_all_gather,
    check_all_reduce,
    check_all_to_all,
    check_an_input_in_another_part_of_the_output,
    check_an_output_across_parts_of_the_input,
    check_broadcast,
    check_gather_and_scatter,
    check_halves_round_once,
    check_lists,
    check_messages_around_a_ring,
    check_messages_beside_collectives,
    check_narrow_averages_do_not_overflow,
    check_reduce,
    check_reduce_scatter,
    check_shapes_and_views,
)
from tests.contracts.tensors import (
    check_arrays_and_strides,
    check_negated_views,
    check_numpy,
    check_refusals,
)


def name_of(check: object) -> str:
    """What a case is called in the name of its test."""
    return check.__name__.removeprefix("check_") if callable(check) else str(check)


CONTRACT = (
    check_all_reduce,
    check_reduce_scatter,
    check_all_gather,
    check_an_input_in_another_part_of_the_output,
    check_an_output_across_parts_of_the_input,
    check_broadcast,
    check_shapes_and_views,
    check_many_in_flight,
    check_awaiting,
    check_asking_is_enough,
    check_a_slow_rank_is_waited_for,
    check_statistics,
    *HANDLE_CONTRACT,
    check_reduce,
    check_gather_and_scatter,
    check_all_to_all,
    check_lists,
    check_messages_around_a_ring,
    check_arrays_and_strides,
    check_coalesced,
    check_refusals,
    check_statistics_of_uneven_operations,
    check_inference_mode,
)
"""What holds on every transport, on devices of every kind."""

HOST_CONTRACT = (
    *CONTRACT,
    check_halves_round_once,
    check_messages_beside_collectives,
    check_many_objects_between_two,
    check_negated_views,
    check_numpy,
    check_narrow_averages_do_not_overflow,
)
