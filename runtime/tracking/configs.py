"""The arguments of a function as a config that trackers can show."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

_MOST = 200  # values
_LONGEST = 500  # characters of a text
_SECRET = re.compile(  # The last word of the name: api_key, db.password, accessToken
    r"(?:^|[_.-]|[a-z0-9](?=[A-Z])|(?i:api|access|auth|secret))"
    r"(?i:key|token|secrets?|passw(?:or)?d|passphrase|credentials?)$"
)
LEFT_OUT = "(left out: its name is that of a secret)"
"""What trackers get in place of a text that is named like a secret."""


def plain_config(
    arguments: Mapping[str, Any], session: Mapping[str, Any]
) -> dict[str, float | int | str | bool | None]:
    """Numbers, strings, booleans and None, by name; other values are left out.

    A text whose name is that of a secret, such as `api_key` or `db.password`, is left out.

    arguments: of the function. session: added where the function has no argument of that name.
    """
    found: dict[str, float | int | str | bool | None] = {}
    _collect(found, "", arguments)
    for name, value in session.items():
        if name not in arguments:
            _collect(found, "", {name: value})
    return dict([*found.items()][:_MOST])


def _collect(found: dict[str, Any], within: str, values: Mapping[Any, Any]) -> None:
    for name, value in values.items():
        full = f"{within}{name}"
        if value is None or isinstance(value, bool | int | float):
            found[full] = value
        elif _SECRET.search(str(name)):  # A text, or whatever has texts in it.
            found[full] = LEFT_OUT
        elif isinstance(value, str):
            found[full] = value[:_LONGEST]
        elif isinstance(value, Mapping):
            _collect(found, f"{full}.", value)
        elif isinstance(value, argparse.Namespace):
            _collect(found, f"{full}.", vars(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
            _collect(found, f"{full}.", fields)
