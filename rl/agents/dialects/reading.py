"""Values of requests that all dialects have: checks of types and ranges, texts, tools, arguments.

Each function takes the path of its value, by which errors name it. Null, an absent field and an
empty text are the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from rl.agents.dialects.checking import check_refused, show_value
from rl.agents.dialects.fields import FIELDS, Dialect
from rl.agents.types import BadRequestError, ToolSpec
from rl.rollouts.replies import decode_json
from rl.tools.tool import NAME
from rl.types import Message, ToolCall
from rl.utils.printing import truncate

MAX_STOPS = 64
"""Most stop texts of a request."""
MAX_TOP_LOGPROBS = 20
MAX_PROBLEM = 200
"""Longest excerpt of a schema's error, in characters."""
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Schema of a tool that a client offers without one."""


def require_object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequestError(f"{field}={show_value(value)} must be an object", field=field)
    return value


def require_list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequestError(f"{field}={show_value(value)} must be a list", field=field)
    return value


def read_text(value: Any, field: str) -> str:
    """Return a text; raise BadRequestError unless it is a text that UTF-8 can carry."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequestError(f"{field}={show_value(value)} must be a string", field=field)
    # JSON can write such halves, but no tokenizer reads them.
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequestError(
            f"{field} holds half of a surrogate pair, which is no character", field=field
        ) from None
    return value


def read_flag(value: Any, field: str) -> bool:
    """Return a switch; null is off."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadRequestError(f"{field}={show_value(value)} must be true or false", field=field)


def read_count(value: Any, field: str, *, low: int = 1, high: int | None = None) -> int | None:
    """Return a whole number within its bounds, or None for null."""
    if value is None:
        return None
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        valid = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise BadRequestError(
            f"{field}={show_value(value)} must be an integer {valid}", field=field
        )
    return int(value)


def read_choice(value: Any, field: str, choices: Collection[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise BadRequestError(
            f"{field}={show_value(value)} must be one of {', '.join(choices)}", field=field
        )
    return value


def read_stops(value: Any, field: str) -> tuple[str, ...]:
    """Return the stop texts of one text, a list of texts, or null."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else require_list(value, field)
    if len(stops) > MAX_STOPS:
        raise BadRequestError(
            f"{field} has {len(stops)} texts, at most {MAX_STOPS} are allowed", field=field
        )
    for place, stop in enumerate(stops):
        where = field if isinstance(value, str) else f"{field}[{place}]"
        if not isinstance(stop, str) or not stop:
            raise BadRequestError(
                f"{where}={show_value(stop)} must be a string that is not empty", field=where
            )
        read_text(stop, where)
    return tuple(stops)


def join_parts(
    value: Any,
    field: str,
    *,
    types: Mapping[str, str],
    separator: str,
    refusal: str,
    left_out: Collection[str] = (),
) -> str:
    """Return the text of a content: a text, null, or parts of type text.

    `types` has the name of the text in each type of part; parts of a type of `left_out` have none.
    `refusal` is the explanation for parts of other types.
    """
    if value is None or isinstance(value, str):
        return read_text(value, field)
    texts = []
    for place, given in enumerate(require_list(value, field)):
        where = f"{field}[{place}]"
        part = require_object(given, where)
        kind = part.get("type")
        if isinstance(kind, str) and kind in left_out:
            continue
        key = types.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise BadRequestError(
                f"{where}.type={show_value(kind)} is not supported: {refusal}",
                field=f"{where}.type",
            )
        texts.append(read_text(part.get(key), f"{where}.{key}"))
    return separator.join(texts)


def read_arguments(value: Any, field: str) -> Mapping[str, Any]:
    """Return the arguments of a call from JSON; empty for a call that has none."""
    text = read_text(value, field)
    # Clients write calls without arguments in several ways.
    if not text.strip():
        return {}
    start = len(text) - len(text.lstrip())
    arguments, end, problem = decode_json(text, start)
    if not problem and text[end:].strip():
        problem = "is followed by more than white space"
    if not problem and not isinstance(arguments, dict):
        problem = "is not an object"
    if problem:
        raise BadRequestError(
            f"{field}={show_value(value)} must be a JSON object: it {problem}", field=field
        )
    return check_arguments(arguments, field)


def check_arguments(value: Any, field: str) -> Mapping[str, Any]:
    """Return arguments that came as an object, if JSON can carry them."""
    if value is None:
        return {}
    arguments = require_object(value, field)
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequestError(
            f"{field}={show_value(value)} cannot be written as JSON: {error}", field=field
        ) from None
    return arguments


def read_call(name: Any, arguments: Mapping[str, Any], field: str) -> ToolCall:
    """Return a call of the history; its name may be one that the model invented."""
    if not isinstance(name, str) or not name:
        raise BadRequestError(
            f"{field}={show_value(name)} must be a string that is not empty", field=field
        )
    return ToolCall(name=read_text(name, field), arguments=arguments)


# Tools


def read_tool(
    given: Mapping[str, Any], field: str, *, schema_key: str, earlier: Collection[str]
) -> ToolSpec:
    """Return a tool with a name that no earlier tool has."""
    name = given.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadRequestError(
            f"{field}.name={show_value(name)} must be 1 to 64 letters, digits, '_' and '-'",
            field=f"{field}.name",
        )
    if name in earlier:
        raise BadRequestError(
            f"{field}.name={name!r} is the name of an earlier tool", field=f"{field}.name"
        )
    return ToolSpec(
        name=name,
        description=read_text(given.get("description"), f"{field}.description"),
        parameters=read_schema(given.get(schema_key), f"{field}.{schema_key}"),
    )


def read_schema(value: Any, field: str) -> Mapping[str, Any]:
    """Return a JSON schema of type object; a schema without a type is one."""
    if value is None:
        return NO_ARGUMENTS
    schema = require_object(value, field)
    if schema.get("type", "object") != "object":
        raise BadRequestError(
            f"{field}.type={show_value(schema['type'])} must be 'object'", field=f"{field}.type"
        )
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()  # Half of a surrogate pair is no character.
        problem = _check_schema(text)
    except (ValueError, RecursionError) as error:
        problem = str(error)
    if problem:
        raise BadRequestError(f"{field} is not a JSON schema: {problem}", field=field)
    return schema if "type" in schema else {"type": "object", **schema}


@lru_cache(maxsize=1024)
def _check_schema(text: str) -> str:
    """Return what is wrong with a schema.

    An agent sends the same tools with each request, and a check takes milliseconds.
    """
    try:
        Draft202012Validator.check_schema(json.loads(text))
    except SchemaError as error:
        return truncate(error.message, most=MAX_PROBLEM)
    except RecursionError:
        return "it is nested too deeply"
    return ""


def refuse_tool_type(kind: Any, field: str, dialect: Dialect) -> None:
    """Raise BadRequestError for a hosted tool."""
    row = FIELDS[dialect]["tools[].type"]
    check_refused(show_value(kind) if kind is None else kind, row, field=f"{field}.type")


def refuse_named_choice(name: Any, field: str, dialect: Dialect) -> None:
    """Raise BadRequestError for a `tool_choice` of one tool."""
    row = FIELDS[dialect]["tool_choice.name"]
    check_refused(name if name is not None else "", row, field=field)


# Messages


class Conversation:
    """Messages in the order of a request, where parts of one assistant turn become one message.

    Results of parallel calls come in the order in which they were ready. Templates tell results
    without ids, so that a model would take one for the other: they get the order of the calls.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._ids: list[str] = []
        """Ids of the calls of the last turn, that of the open one if there is one."""
        self._results: list[tuple[str, Message]] = []
        """Results of tools at the end, each with the id of its call."""
        self._is_open = False

    def add(self, message: Message) -> None:
        """Add a message of anyone, which ends an assistant's turn."""
        self._end_turn()
        self._end_results()
        self.messages.append(message)

    def add_text(self, text: str) -> None:
        """Add a text to the assistant's turn, directly behind its earlier ones."""
        self._open_turn()
        self._texts.append(text)

    def add_call(self, call: ToolCall, *, call_id: Any) -> None:
        """Add a call to the assistant's turn; an id that is no text is none."""
        self._open_turn()
        self._calls.append(call)
        self._ids.append(call_id if isinstance(call_id, str) else "")

    def add_result(self, content: str, *, call_id: str) -> None:
        """Add the result of a call of the last turn."""
        self._end_turn()
        self._results.append((call_id, Message(role="tool", content=content)))

    def _open_turn(self) -> None:
        if not self._is_open:
            self._end_results()
            self._ids, self._is_open = [], True

    def _end_turn(self) -> None:
        if self._is_open:
            content, calls = "".join(self._texts), tuple(self._calls)
            self.messages.append(Message(role="assistant", content=content, calls=calls))
            self._texts, self._calls, self._is_open = [], [], False

    def _end_results(self) -> None:
        """Add the results to the messages, sorted if all ids say which call each is of."""
        places = {call_id: place for place, call_id in enumerate(self._ids) if call_id}
        is_known = all(call_id in places for call_id, _ in self._results)
        if is_known and len(places) == len(self._ids):
            # Several results of one call stay in their order.
            self._results.sort(key=lambda result: places[result[0]])
        self.messages += [message for _, message in self._results]
        self._results = []

    def finish(self, field: str) -> tuple[Message, ...]:
        self._end_turn()
        self._end_results()
        if not self.messages:
            raise BadRequestError(f"{field} must have at least one message", field=field)
        return tuple(self.messages)


def count_harmless(names: Sequence[str], nested: Collection[str]) -> tuple[str, ...]:
    """Return the names of all harmless fields of a request, sorted."""
    return tuple(sorted({*names, *nested}))
