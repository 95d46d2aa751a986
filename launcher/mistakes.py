"""What pydantic finds wrong with a job file, said in one line that a person can act on."""

from __future__ import annotations

import difflib
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def mistake(error: Any, schema: type[BaseModel]) -> str:
    """One line for `error`, an item of pydantic's `ValidationError.errors()`, met while reading `schema`.

    It says the field's path, what was given and what was expected.
    """
    path = _written(error["loc"])
    given = _shown(error["input"])
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            known = sorted(_fields_at(error["loc"][:-1], schema))
            near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
            said = f"unknown field; did you mean {near[0]}?" if near else f"unknown field; known: {', '.join(known)}"
        case "value_error":
            said = str(context["error"])
        case "string_type":
            said = f"expected text, got {given}" + ("" if isinstance(error["input"], (dict, list)) else "; quote it")
        case "int_type":
            said = f"expected an integer, got {given}"
        case "float_type":
            said = f"expected a number, got {given}"
        case "bool_type":
            said = f"expected true or false, got {given}"
        case "list_type":
            said = f"expected a list, got {given}"
        case "dict_type" | "model_type" | "model_attributes_type":
            known = sorted(_fields_at(error["loc"], schema))
            said = f"expected {'the fields ' + ', '.join(known) if known else 'name: value pairs'}; got {given}"
        case "greater_than_equal":
            said = f"expected at least {context['ge']}, got {given}"
        case "greater_than":
            said = f"expected more than {context['gt']:g}, got {given}"
        case "missing":
            said = "missing"
        case "too_short" | "string_too_short":
            said = "must not be empty"
        case "literal_error":
            said = f"expected {context['expected']}, got {given}"
        case _:
            said = f"{error['msg']}, got {given}"
    return f"{path}: {said}" if path else said


def _written(location: tuple[int | str, ...]) -> str:
    """``("parallel", "allowed", 2)`` as ``parallel.allowed[2]``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _shown(value: Any, limit: int = 60) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _fields_at(location: tuple[int | str, ...], schema: type[BaseModel]) -> list[str]:
    """The names of the fields of the section at `location`; none where it is not a section."""
    section: type[BaseModel] | None = schema
    is_name = False
    for part in location:
        if is_name:  # in a mapping of sections by name the part before led to the section already
            is_name = False
            continue
        field = named_fields(section).get(part) if section is not None and isinstance(part, str) else None
        section = section_of(field.annotation) if field is not None else None
        is_name = field is not None and get_origin(field.annotation) is dict
    return list(named_fields(section)) if section is not None else []


def named_fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by the names that they have in the file."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The schema inside a field's type, such as ``Annotated[Section, ...] | None``; None where there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)
