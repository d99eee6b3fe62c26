"""What a value breaks of its schema."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.spec.yaml_source import Location

#: Type in a JSON schema -> an empty value of it.
EMPTY: dict[str, object] = {"object": {}, "array": [], "string": "", "boolean": False, "integer": 0, "number": 0}


@dataclass(frozen=True)
class SchemaError:
    """A value that does not match its schema.

    Attributes:
        location: of the value, from the top of the document.
        what: what is wrong, in words.
        empty: an empty value of the required type, where the value has another type; None where the type is right.
        ignored: whether the API ignores the value instead of refusing it: it is for output only
            (https://google.aip.dev/203).
        newer: whether the value may be one that the API got after this schema: a type of accelerator.
    """

    location: Location
    what: str
    empty: object = None
    ignored: bool = False
    newer: bool = False
