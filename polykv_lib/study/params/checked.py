"""Values of a notebook's parameters, checked; errors of one line."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from polykv_lib.study.params.schemas import NOTEBOOKS
from polykv_lib.study.params.types import Parameters, near

NAME = re.compile(r"[A-Z][A-Z0-9_]*")


class ParameterError(ValueError):
    """A parameter that is unknown or has a value it may not have; the text is one line."""


def validate(notebook: str, values: Mapping[str, Any]) -> Parameters:
    """Values of a notebook's parameters as its checked, immutable parameter object.

    Text that spells a value of the right type is taken as that value, since papermill's `-p` passes
    `false` and `[1,3]` as text.

    Raises:
        ParameterError: unknown notebook or name, missing or bad value; one line.
    """
    schema = schema_of(notebook)
    for name in values:
        refuse_unknown(name, schema.model_fields, notebook)
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        raise ParameterError(_one_line(error, notebook)) from None


def schema_of(notebook: str) -> type[Parameters]:
    """The parameter class of a notebook, by file name without suffix."""
    if notebook not in NOTEBOOKS:
        hint = near(notebook, NOTEBOOKS)
        raise ParameterError(f"unknown notebook {notebook!r}{hint} Known: {', '.join(NOTEBOOKS)}")
    return NOTEBOOKS[notebook]


def all_names() -> list[str]:
    """The parameter names of all notebooks together."""
    return list(
        dict.fromkeys(name for schema in NOTEBOOKS.values() for name in schema.model_fields)
    )


def from_namespace(notebook: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters among a notebook's globals, the misspelt ones too, for `validate` to refuse.

    A global counts as a parameter if its name is in capitals, or would be a parameter in capitals.
    """
    fields = schema_of(notebook).model_fields
    return {
        name: value
        for name, value in namespace.items()
        if NAME.fullmatch(name) or name.upper() in fields
    }


def refuse_unknown(name: str, known: Iterable[str], where: str) -> None:
    """Raises a ParameterError that proposes the nearest name, unless the name is known."""
    if name not in known:
        raise ParameterError(
            f"unknown parameter {name}{near(name, known)} {where} takes {', '.join(known)}"
        )


def _one_line(error: ValidationError, notebook: str) -> str:
    first = error.errors()[0]
    name, *place = first["loc"]
    if first["type"] == "missing":
        return f"{name} has no value; the parameters cell of notebooks/{notebook}.ipynb sets it"
    inside = "".join(f"[{index}]" for index in place)
    empty = first["type"] == "too_short"
    said = "it may not be empty" if empty else first["msg"].removeprefix("Value error, ")
    return f"{name}{inside}={first['input']!r}: {said[0].lower()}{said[1:]}"
