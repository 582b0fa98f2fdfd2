"""A language model as a reward function: it reads a reply and answers with a grade.

    judge = Judge(
        base_url="http://127.0.0.1:8000/v1",
        model="Qwen/Qwen3-32B",
        api_key_env=None,
        template="Question: {question}\\nReply: {reply}\\nIs the reply polite? Say yes or no, nothing else.",
        grade=LabelGrade(labels={"yes": 1.0, "no": 0.0}),
    )
    Rubric(criteria=(Criterion(name="polite", function=judge),))

Any server that speaks OpenAI's chat completions will do, such as `vllm serve`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import openai

from rl.rollouts.rubric_functions import shortened
from rl.types import Rollout

PLACEHOLDER = re.compile(r"\{(question|answer|reply|conversation)\}")
NUMBER = (
    r"(?im)^(?:[^\w\n-]|-[ \t])*(?:[a-z ]*(?:score|grade|rating)(?:[^\w\n-]|-[ \t])*)?"
    r"(-?\d+(?:\.\d+)?)(?:\s*/\s*(\d+(?:\.\d+)?))?[^\w\n]*$"
)
"""A line that is a number alone, or one after "score", "grade" or "rating": `7`, `**Score:** 7/10`."""
LABEL = r"(?im)^[^\w\n]*(?:[a-z ]*(?:verdict|grade|answer|judge?ment)[^\w\n]*)?({labels})[^\w\n]*$"
"""A line that is a label alone, or one after "verdict", "grade", "answer" or "judgement"."""
TEMPLATE = """Grade the reply to a question from 0 (useless) to 10 (nothing could be better).

Question:
{question}

Right answer:
{answer}

Reply:
{reply}

Say briefly why. Then end with a line that has the grade alone, as in:
Grade: 7"""


class JudgeError(Exception):
    """There is no grade; the message says whom was asked and what came back. It never has the key."""


class Grade(Protocol):
    """How a judge's answer becomes a number. A dataclass, so that it can be pickled."""

    @property
    def wanted(self) -> str:
        """What is looked for, for the message where it is not there."""
        ...

    def read(self, text: str) -> float | None:
        """The number; None where the text has none that is valid."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberGrade:
    """The last number that the pattern finds, from `lowest` to `highest`, mapped to 0..1."""

    lowest: float = 0.0
    highest: float = 10.0
    pattern: str = NUMBER
    """A regular expression whose first group is the number; a second, where there is one, what it is out of:
    no grade where that is not `highest`."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lowest) and math.isfinite(self.highest) and self.lowest < self.highest):
            raise ValueError(
                f"lowest={self.lowest}, highest={self.highest}: must be finite, the first below the second"
            )
        _check_pattern(self.pattern)

    @property
    def wanted(self) -> str:
        return f"a number from {self.lowest:g} to {self.highest:g}"

    def read(self, text: str) -> float | None:
        found = list(re.finditer(self.pattern, text))
        try:
            number, out_of = (float(group) for group in (found[-1][1], _out_of(found[-1]) or self.highest))
        except (IndexError, TypeError, ValueError):
            return None
        if out_of != self.highest:
            return None
        if not self.lowest <= number <= self.highest:
            return None
        return (number - self.lowest) / (self.highest - self.lowest)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelGrade:
    """The last of a few words that the pattern finds, whatever its case, and what it is worth."""

    labels: Mapping[str, float]
    pattern: str = LABEL
    """A regular expression whose first group is the label; `{labels}` stands for all of them."""

    def __post_init__(self) -> None:
        if len({label.lower() for label in self.labels}) < 2 or "" in self.labels:
            raise ValueError(f"labels={dict(self.labels)}: must be at least two different words")
        for label, value in self.labels.items():
            if not math.isfinite(value):
                raise ValueError(f"labels: {label!r} is worth {value}, not a finite number")
        _check_pattern(self._expression())

    @property
    def wanted(self) -> str:
        return f"one of {', '.join(self.labels)}"

    def read(self, text: str) -> float | None:
        found = [match[1] for match in re.finditer(self._expression(), text)]
        values = {label.lower(): float(value) for label, value in self.labels.items()}
        return values.get(found[-1].lower()) if found and found[-1] is not None else None

    def _expression(self) -> str:
        # The longest first, as one label may begin another.
        labels = "|".join(re.escape(label) for label in sorted(self.labels, key=len, reverse=True))
        return self.pattern.replace("{labels}", labels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """An async reward function; picklable, with a client of its own in each event loop.

    What is no grade fails the score, and its failure names the URL and what came back: an answer that cannot
    be read, a status other than 2xx after the retries, no answer in time.

    Raises:
        ValueError: when it is made, naming the field; also if the key's variable is not set here. It has to
            be set where rewards are computed.
    """

    base_url: str
    """Without `/chat/completions`, which is put behind it."""
    model: str
    """As the server names it."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """Name of the environment variable that has the key; None for a server that asks for none."""
    template: str = TEMPLATE
    """What the judge is told. {question}, {answer}, {reply} (the last one) and {conversation} (all of it)
    stand for what is of the rollout; other braces stay as they are."""
    system: str = ""
    """A system message before it."""
    grade: Grade = field(default_factory=NumberGrade)
    temperature: float = 0.0
    max_tokens: int | None = 512
    """Of the judge's answer, which has no grade if it was cut off. None is not sent: for servers that want
    another name for it, in `extra_body`."""
    timeout_s: float = 60.0
    """Longest wait for the server, each time that it is asked. `reward.time_limit_s` is over all of it."""
    max_retries: int = 2
    """Times that it is asked again, after a growing pause: after 408, 409, 429, 5xx, or no answer."""
    max_concurrency: int = 16
    """Requests at once, in each process that scores."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the request, such as {"chat_template_kwargs": {"enable_thinking": False}}."""

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(
                f"base_url={self.base_url!r}: must begin with http:// or https:// and name a host"
            )
        if url.username is not None or url.password is not None or url.query or url.fragment:
            raise ValueError(
                f"base_url: {url.scheme}://{url.hostname}... must have neither a user, a query nor a "
                "fragment; a key belongs into the variable that api_key_env names"
            )
        if not self.model:
            raise ValueError("model='': must be the name that the server has for it")
        if not {"{reply}", "{conversation}"} & {m[0] for m in PLACEHOLDER.finditer(self.template)}:
            raise ValueError(
                f"template={shortened(self.template)!r}: must have {{reply}} or {{conversation}}, or the "
                "judge does not see what it grades"
            )
        for name, least in (
            ("max_tokens", 1),
            ("max_retries", 0),
            ("max_concurrency", 1),
            ("temperature", 0),
        ):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s}: must be above 0, and finite")
        _key(self.api_key_env)

    async def __call__(self, rollout: Rollout) -> float:
        """The grade.

        Raises:
            JudgeError: there is none.
        """
        text = await self._ask(self.prompt(rollout))
        number = self.grade.read(text)
        if number is None:
            raise self._error(f"{self.grade.wanted} is not in its answer {self._clean(text)!r}")
        return number

    def prompt(self, rollout: Rollout) -> str:
        """The template with the rollout in it; what is put in is not looked through for braces."""
        problem = rollout.prompt.problem
        texts = {
            "question": problem.question,
            "answer": problem.answer,
            "reply": rollout.text,
            "conversation": "\n\n".join(f"{m.role}: {m.content}" for m in rollout.messages),
        }
        return PLACEHOLDER.sub(lambda match: texts[match[1]], self.template)

    async def _ask(self, prompt: str) -> str:
        system = [{"role": "system", "content": self.system}] if self.system else []
        request: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": prompt}],
            "temperature": self.temperature,
            "extra_body": dict(self.extra_body),
        }
        if self.max_tokens is not None:
            request["max_tokens"] = self.max_tokens
        try:
            answer = await self._client().chat.completions.with_raw_response.create(**request)
        except openai.APIStatusError as error:
            body = self._clean(error.response.text)
            raise self._error(f"HTTP {error.status_code}{_tries(error)}: {body}") from None
        except openai.APITimeoutError as error:
            raise self._error(f"no answer within timeout_s={self.timeout_s:g}{_tries(error)}") from None
        except openai.APIConnectionError as error:
            raise self._error(f"no connection{_tries(error)}: {self._clean(repr(error.__cause__))}") from None
        return self._text(answer.text)

    def _text(self, body: str) -> str:
        """Of a server's answer: what the judge wrote."""
        try:
            choice = json.loads(body)["choices"][0]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._error(f"no chat completion came back: {self._clean(body)!r}") from None
        if reason == "length":
            cut = f"max_tokens={self.max_tokens}" if self.max_tokens else "the server's own limit"
            raise self._error(f"its answer was cut off at {cut}: {self._clean(str(text))!r}")
        if not isinstance(text, str):
            raise self._error(f"its answer has no text: {self._clean(body)!r}")
        return text

    def _client(self) -> Any:
        """Kept for each event loop, which its connections are of."""
        key = _key(self.api_key_env)
        settings = (self.base_url, key, self.timeout_s, self.max_retries)
        clients = _clients.setdefault(asyncio.get_running_loop(), {})
        if settings not in clients:
            clients[settings] = openai.AsyncOpenAI(
                base_url=self.base_url,
                # An empty one is refused, and a server that asks for none ignores it.
                api_key=key or "none",
                timeout=self.timeout_s,
                max_retries=self.max_retries,
            )
        return clients[settings]

    def _error(self, what: str) -> JudgeError:
        return JudgeError(f"judge {self.model!r} at {self.base_url}: {what}")

    def _clean(self, text: str) -> str:
        """What came back, without the key, as a server may send back what it was sent; then at a length for
        a message."""
        key = _key(self.api_key_env)
        return shortened(text.replace(key, "***") if key else text)


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


def _key(api_key_env: str | None) -> str | None:
    if api_key_env is None:
        return None
    key = os.environ.get(api_key_env)
    if not key:
        raise ValueError(
            f"api_key_env={api_key_env!r}: this environment variable is not set here; set it to the key, or "
            "let api_key_env be None for a server that asks for none"
        )
    return key


def _tries(error: Any) -> str:
    """How often the client asked, which writes that into its requests."""
    num_again = int(error.request.headers.get("x-stainless-retry-count", 0))
    return f" (asked {num_again + 1} times)" if num_again else ""


def _out_of(match: re.Match[str]) -> str | None:
    return match[2] if match.re.groups > 1 else None


def _check_pattern(pattern: str) -> None:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from None
    if num_groups < 1:
        raise ValueError(f"pattern={pattern!r} has no group: its first group is what is read")
