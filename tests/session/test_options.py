"""Options of sessions that reach the workers, and those that are refused before anything starts."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import ray

import chorusline as cl
from chorusline.collectives.transports.interfaces import network_of
from chorusline.runtime.session import connecting

FEW = {"CPU": 0.1}


async def test_variables_and_labels_reach_the_workers_and_the_driver(cluster: None) -> None:
    here = ray.get_runtime_context().get_node_id()
    async with cl.Session(
        2,
        resources_per_worker=FEW,
        env_vars={"OF_THE_SESSION": "yes", "GLOO_SOCKET_IFNAME": "lo"},
        runtime_env={"env_vars": {"OF_RAY": "too"}},
        label_selector={"ray.io/node-id": here},
        pause_s=7,
    ) as session:
        results = await session.run(
            lambda ctx: (os.environ["OF_THE_SESSION"], os.environ["OF_RAY"], network_of("gloo"))
        )
        assert results == [("yes", "too", "lo (GLOO_SOCKET_IFNAME)")] * 2
        assert session._holder.worker_group is not None
        look = session._holder.worker_group._driver.__ray_call__
        assert await look.remote(repr) == f"driver of {session.name}"
        of_seat_1 = session._holder.worker_group._workers[1].__ray_call__
        assert await of_seat_1.remote(repr) == f"worker in seat 1 of {session.name}"
        assert await look.remote(lambda _: os.environ["OF_THE_SESSION"]) == "yes"
        assert session._holder._new_request(session._audience()).pause_s == 7
    assert "OF_THE_SESSION" not in os.environ


async def test_a_label_that_no_node_has_is_named(cluster: None) -> None:
    session = cl.Session(
        1, resources_per_worker=FEW, label_selector={"disk": "fast"}, startup_timeout_s=1
    )
    with pytest.raises(cl.StartupError, match=r"label_selector=\{'disk': 'fast'\}"):
        await session.start()


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"replicas": 2}, TypeError, r"replicas is an argument of ZeroRedundancyOptimizer\(...\)"),
        ({"check_every": 1}, TypeError, r"check_every is an argument of ZeroRedundancyOptimizer"),
        ({"every_n_steps": 5}, TypeError, r"of Session\(checkpoint=CheckpointConfig\(...\)\)"),
        ({"batch_size": 5}, TypeError, r"batch_size is an argument of ctx.shard"),
        ({"no_such": 5}, TypeError, "unexpected keyword argument 'no_such'"),
        ({"seed": "0"}, ValueError, "seed must be a whole number of at least 0, got '0'"),
        ({"env_vars": ["A=1"]}, TypeError, "env_vars must be a dictionary of strings"),
        ({"env_vars": {"A": 1}}, TypeError, r"env_vars\['A'\] must be a string, got 1; write '1'"),
        (
            {"env_vars": {"A": "1"}, "runtime_env": {"env_vars": {"A": "2"}}},
            ValueError,
            "sets A to '1'.* to '2'; give it once",
        ),
        ({"runtime_env": "torch"}, TypeError, "runtime_env must be a dictionary"),
        ({"runtime_env": {"working_dir": "."}}, ValueError, "give it to the job"),
        ({"runtime_env": {"pip": 3}}, TypeError, "runtime_env cannot be used"),
        ({"label_selector": "spot"}, TypeError, "label_selector must be a dictionary"),
        (
            {"label_selector": {"ray.io/node-id": "a"}, "placement_strategy": "STRICT_SPREAD"},
            ValueError,
            "choose nodes by another label",
        ),
        ({"accelerator_type": "A100"}, ValueError, "set use_gpu=True"),
        ({"accelerator_type": 100, "use_gpu": True}, ValueError, "such as 'A100', got 100"),
        (
            {"env_vars": {"CUDA_VISIBLE_DEVICES": "0,1"}, "use_gpu": True},
            ValueError,
            "two workers may get the same one. .* before `ray start`",
        ),
        ({"env_vars": {"A\ud800": "1"}}, ValueError, r"'\\ud800' in it, half of a surrogate pair"),
        ({"env_vars": {"A": "\udc80"}}, ValueError, r"env_vars\['A'\] has '\\udc80' in it"),
        ({"runtime_env": {"env_vars": {"A": "\ud800"}}}, ValueError, "half of a surrogate pair"),
        ({"runtime_env": {"env_vars": {"A": "\0"}}}, ValueError, "a null character"),
        ({"runtime_env": {"env_vars": ["A=1"]}}, TypeError, "must be a dictionary of strings"),
        ({"runtime_env": {"pip": ["\ud800"]}}, ValueError, "runtime_env has '.*' in it, half of"),
        (
            {"runtime_env": {"nope": 1}},
            ValueError,
            "has 'nope', which Ray does not know",
        ),
        ({"label_selector": {"a": "\ud800"}}, ValueError, "half of a surrogate pair"),
        ({"accelerator_type": "\ud800", "use_gpu": True}, ValueError, "half of a surrogate pair"),
        ({"address": "\ud800:6379"}, ValueError, "address has '.*' in it, half of a surrogate"),
        ({"resources_per_worker": {"": 1}}, TypeError, "the names in resources_per_worker must"),
        ({"resources_per_worker": {"a\udc80": 1}}, ValueError, "half of a surrogate pair"),
        (
            {"resources_per_worker": {"CPU": 1e300}},
            ValueError,
            r"less than 1e\+14, got 1e\+300",
        ),
        ({"resources_per_worker": {"CPU": 1e-9}}, ValueError, "at least 0.0001 and"),
        ({"pause_s": 0}, ValueError, "pause_s must be positive, got 0"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s must be positive"),
    ],
)
def test_a_wrong_option_is_refused_in_a_sentence(
    options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        cl.Session(1, **options)
    with pytest.raises(kind, match=says):
        cl.run(lambda ctx: None, **options)


def test_what_a_plugin_of_ray_takes_is_its_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_RUNTIME_ENV_PLUGINS", '[{"class": "ours.Plugin"}]')
    session = cl.Session(1, runtime_env={"nope": 1, "nsight": "default"})
    assert session._options.environment["nope"] == 1


@pytest.mark.parametrize(
    "address",
    ["http://x", "x", "x:²", "x:99999", f"x:{'9' * 10_000}", ":6379", "a..b:6379", f"{'x' * 99}:1"],
)
def test_an_address_that_is_none_is_named_at_once(address: str) -> None:
    with pytest.raises(cl.StartupError, match=re.escape(repr(address)[:40])):
        connecting.join(address)


@pytest.mark.parametrize("kind", [numpy.int32, numpy.int64, numpy.uint8])
def test_numbers_of_numpy_are_numbers(kind: type[Any]) -> None:
    session = cl.Session(
        (kind(1), kind(3)), seed=kind(5), max_failures=kind(2), spares=kind(1), timeout_s=kind(9)
    )
    assert all(
        type(n) is int
        for n in (session._options.fewest, session._options.most, session._options.spares)
    )
    assert type(session._options.timeout_s) is float
    assert cl.Session(2, timeout_s=numpy.float32(1.5))._options.timeout_s == 1.5  # type: ignore[arg-type]
    config = cl.CheckpointConfig("/tmp/none", every_n_steps=kind(5), num_to_keep=kind(2))
    assert (type(config.every_n_steps), config.every_n_steps) == (int, 5)
    for wrong in (numpy.bool_(True), numpy.float64(2.0), True):
        with pytest.raises(TypeError, match="num_workers must be a number of workers"):
            cl.Session(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="whole number of at least 1"):
            cl.CheckpointConfig("/tmp/none", every_n_steps=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "own", "left_out"),
    [
        (cl.run, {"train", "kwargs"}, {"live_view", "name", "detached", "idle_timeout_s"}),
        (cl.attach, {"name"}, None),
    ],
)
def test_what_makes_a_session_takes_its_arguments_as_it_does(
    function: Callable[..., Any], own: set[str], left_out: set[str] | None
) -> None:
    """They are written out there for type checkers, which can not take them from the session."""
    of_session = inspect.signature(cl.Session.__init__).parameters
    given = inspect.signature(function).parameters
    for name in given.keys() - own:
        its = of_session[name]
        assert (given[name].annotation, given[name].default) == (its.annotation, its.default), name
    assert left_out is None or of_session.keys() - given.keys() - {"self"} == left_out
