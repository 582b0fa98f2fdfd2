"""A language model as a judge: a reward function that asks a server for a grade.

docs/rewards.md has an example.

Any server with OpenAI's chat completions API will do, such as `vllm serve`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

import openai

from rl.config.tree import check_bounds
from rl.rollouts.replies import answer_part, is_thought_open, split_reply
from rl.rollouts.rubric import UnparsedAnswer
from rl.types import Rollout
from rl.utils.numbers import MAGNITUDE, convert_digits, find_numbers
from rl.utils.printing import truncate
from rl.utils.proxies import find_proxy, leads_here

PLACEHOLDER = re.compile(r"\{(question|answer|reply|conversation)\}")
_BESIDE = r"(?:(?!\.[0-9])[^\w\n-]|-[ \t])*"
"""Characters before a number that are not part of it, as a sign or the point of .5 is."""
# Words begin with a letter: if a blank could be part of them or of what is before them, the time to
# reject a line would grow with the square of its length.
NUMBER = (
    rf"(?im)^{_BESIDE}(?:(?:[a-z][a-z ]*)?(?:score|grade|rating){_BESIDE})?"
    rf"(-?{MAGNITUDE})(?:\s*/\s*({MAGNITUDE}))?[^\w\n]*$"
)
"""A line with only a number, or a number after "score", "grade" or "rating": `7`, `**Score:**
7/10`.
"""
LABEL = (
    r"(?im)^[^\w\n]*(?:(?:[a-z][a-z "
    r"]*)?(?:verdict|grade|answer|judge?ment)[^\w\n]*)?({labels})[^\w\n]*$"
)
"""A line with only a label, or a label after "verdict", "grade", "answer" or "judgement"."""
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
    """The judge gave no grade; the message has the URL and the answer, and never the key."""


class Grade(Protocol):
    """Parser of a judge's answer; must be picklable."""

    def read(self, text: str) -> float | None:
        """Return the grade; None if the text has no valid one."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberGrade:
    """The last number that the pattern finds, from `lowest` to `highest`, mapped to 0..1."""

    lowest: float = 0.0
    highest: float = 10.0
    pattern: str = NUMBER
    """Regular expression whose first group is the number. An optional second group is the maximum,
    which must be `highest`."""

    def __post_init__(self) -> None:
        if not -math.inf < self.lowest < self.highest < math.inf:
            raise ValueError(
                f"lowest={self.lowest}: must be finite and below highest={self.highest}"
            )
        _check_has_group(self.pattern)

    def read(self, text: str) -> float | None:
        # A judge that thinks aloud names several grades; the last one is its own.
        matches = list(re.finditer(self.pattern, convert_digits(text)))
        if not matches or matches[-1][1] is None:
            return None
        last = matches[-1]
        written, out_of = last[1], last[2] if last.re.groups > 1 else None
        try:
            number = _parse_number(written)
            is_other_scale = out_of is not None and _parse_number(out_of) != self.highest
        except (OverflowError, ValueError, ZeroDivisionError):
            return None
        if is_other_scale or not self.lowest <= number <= self.highest:
            return None
        return (number - self.lowest) / (self.highest - self.lowest)


def _check_has_group(pattern: str) -> None:
    """Raise ValueError for a pattern that is invalid, or that has no group for the grade."""
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"pattern={pattern!r}: must be a regular expression: {error}") from None
    if not num_groups:
        raise ValueError(f"pattern={pattern!r}: must have a group in parentheses around the grade")


def _parse_number(written: str) -> float:
    """Return the number, whatever its sign and separators are (`rl.utils.numbers`).

    Raises ValueError for another text.
    """
    if not re.fullmatch(rf"[-+]?{MAGNITUDE}", written.strip()):
        raise ValueError(f"{written!r} is not a number alone")
    return float(Fraction(find_numbers(written)[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelGrade:
    """Grade that is the value of the last label the pattern finds, ignoring case."""

    labels: Mapping[str, float]
    pattern: str = LABEL
    """Regular expression whose first group is the label; `{labels}` stands for all of them."""

    def __post_init__(self) -> None:
        if len(set(map(str.lower, self.labels))) < 2 or "" in self.labels:
            raise ValueError(f"labels={dict(self.labels)}: must be at least two different words")
        if not all(map(math.isfinite, self.labels.values())):
            raise ValueError(f"labels={dict(self.labels)}: every value must be a finite number")
        _check_has_group(self._fill_pattern())

    def _fill_pattern(self) -> str:
        # Longest first, because one label may be the beginning of another.
        longest_first = sorted(self.labels, key=len, reverse=True)
        return self.pattern.replace("{labels}", "|".join(map(re.escape, longest_first)))

    def read(self, text: str) -> float | None:
        label = None
        for match in re.finditer(self._fill_pattern(), text):
            label = match[1]  # the last one counts
        if label is None:
            return None
        values = {name.lower(): float(value) for name, value in self.labels.items()}
        return values.get(label.lower())


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """Async reward function that asks a model; picklable, with one client in each event loop.

    The score fails if the answer has no grade, if the status is not 2xx after the retries, or if no
    answer comes in time; the failure names the URL and the answer. The key's environment variable
    must be set both here and where rewards are computed.
    """

    needs_network: ClassVar[bool] = True
    base_url: str
    """URL before `/chat/completions`."""
    model: str
    """Name of the model on the server."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """Environment variable that holds the key; None: the server needs no key."""
    template: str = TEMPLATE
    """Prompt of the judge, in which {question}, {answer}, {reply} (the last one, after its
    thoughts) and {conversation} (all of it, with thoughts) are filled in; other braces stay as they
    are."""
    system: str = ""
    """System message before the prompt; empty: none."""
    grade: Grade = field(default_factory=NumberGrade)
    temperature: float = 0.0
    max_tokens: int | None = 512
    """Longest answer of the judge; an answer that is cut off has no grade. None: not sent, for
    servers with another name for it, to set in `extra_body`."""
    timeout_s: float = 60.0
    """Timeout of each request. `reward.time_limit_s` limits all tries together."""
    max_retries: int = 2
    """Most retries, after growing pauses, of a request with status 408, 409, 429 or 5xx, or without
    answer.
    """
    max_concurrency: int = 16
    """Concurrent requests of each reward process."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as {"chat_template_kwargs": {"enable_thinking": False}}.
    """

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname or url.password or url.query:
            raise ValueError(
                "base_url: must be http:// or https:// with a host, without a password or a query; "
                "put the key into the environment variable that api_key_env names"
            )
        if not self.model:
            raise ValueError("model='': must be the name of the model on the server")
        # A prompt without the reply would give all replies to a question the same grade.
        if "{reply}" not in self.template and "{conversation}" not in self.template:
            raise ValueError(
                f"template={truncate(self.template)!r}: must contain {{reply}} or {{conversation}}"
            )
        check_bounds(self, "max_tokens", "max_concurrency", at_least=1)
        check_bounds(self, "max_retries", "temperature", at_least=0)
        check_bounds(self, "timeout_s", above=0, below=math.inf)
        # Now rather than at the first reward, which is computed after the models have been loaded.
        _read_key(self.api_key_env)

    async def __call__(self, rollout: Rollout) -> float:
        """Return the grade; raises JudgeError if there is none, and UnparsedAnswer for a thought
        without an end.
        """
        if is_thought_open(rollout.text):
            raise UnparsedAnswer("the reply ends within a thought")
        text = await self._ask(self.prompt(rollout))
        number = self.grade.read(text)
        if number is None:
            raise self._make_error(f"no valid grade is in its answer {self._clean(text)!r}")
        return number

    def prompt(self, rollout: Rollout) -> str:
        """Fill the rollout into the template; braces in the rollout are not expanded."""
        problem, reply = rollout.prompt.problem, rollout.text
        # `answer_part` strips; a reply without thoughts is shown as it was written.
        has_thoughts = any(part.kind == "thought" for part in split_reply(reply))
        texts = {
            "question": problem.question,
            "answer": problem.answer,
            "reply": answer_part(reply) if has_thoughts else reply,
            "conversation": "\n\n".join(f"{m.role}: {m.content}" for m in rollout.messages),
        }
        # One pass over the template, so that a placeholder within the rollout stays as it is.
        return PLACEHOLDER.sub(lambda match: texts[match[1]], self.template)

    async def _ask(self, prompt: str) -> str:
        messages: list[Any] = [{"role": "system", "content": self.system}] if self.system else []
        client = self._open_client()
        try:
            answer = await client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=[*messages, {"role": "user", "content": prompt}],
                temperature=self.temperature,
                max_tokens=openai.omit if self.max_tokens is None else self.max_tokens,
                extra_body=dict(self.extra_body),
            )
        except openai.APIStatusError as error:
            raise self._make_error(
                f"HTTP {error.status_code}: {self._clean(error.response.text)}"
            ) from None
        except openai.APITimeoutError:
            raise self._make_error(f"no answer within timeout_s={self.timeout_s:g}") from None
        except openai.APIConnectionError as error:
            proxy = self._find_proxy()
            through = "" if proxy is None else f" through the proxy of {proxy}"
            raise self._make_error(
                f"no connection{through}: {self._clean(repr(error.__cause__))}"
            ) from None
        return self._extract_text(answer.text)

    def _open_client(self) -> openai.AsyncOpenAI:
        key = _read_key(self.api_key_env) or "none"  # the client refuses an empty key
        settings: dict[str, Any] = {"timeout": self.timeout_s, "max_retries": self.max_retries}
        try:
            return _get_client(
                asyncio.get_running_loop(), base_url=self.base_url, api_key=key, **settings
            )
        except Exception as error:
            proxy = self._find_proxy()
            if proxy is None:
                raise
            # Errors of an address may quote its password; an ImportError names the package that
            # SOCKS needs.
            reason = str(error) if isinstance(error, ImportError) else "its address is not valid"
            raise self._make_error(f"the proxy of {proxy} cannot be used: {reason}") from None

    def _find_proxy(self) -> str | None:
        return None if leads_here(self.base_url) else find_proxy(self.base_url)

    def _extract_text(self, body: str) -> str:
        """Return the judge's text from the body of the server's answer."""
        try:
            choice = json.loads(body)["choices"][0]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._make_error(f"no chat completion came back: {self._clean(body)!r}") from None
        if reason == "length":
            limit = (
                "the server's own limit"
                if self.max_tokens is None
                else f"max_tokens={self.max_tokens}"
            )
            raise self._make_error(f"its answer was cut off at {limit}: {self._clean(str(text))!r}")
        if not isinstance(text, str):
            raise self._make_error(f"its answer has no text: {self._clean(body)!r}")
        return text

    def _make_error(self, what: str) -> JudgeError:
        return JudgeError(f"judge {self.model!r} at {self.base_url}: {what}")

    def _clean(self, text: str) -> str:
        """Shorten an answer for a message and remove the key, which a server may echo."""
        key = _read_key(self.api_key_env)
        return truncate(text.replace(key, "***") if key else text)


@functools.lru_cache(maxsize=16)
def _get_client(loop: asyncio.AbstractEventLoop, **settings: Any) -> openai.AsyncOpenAI:
    """Return the client of an event loop, to which its connections belong.

    It reaches this machine without a proxy.

    openai's own HTTP client would fail later, when it is deleted, if the proxy's address is not
    valid.
    """
    http_client = openai.DefaultAsyncHttpxClient(trust_env=not leads_here(settings["base_url"]))
    return openai.AsyncOpenAI(http_client=http_client, **settings)


def _read_key(api_key_env: str | None) -> str | None:
    if api_key_env is None:
        return None
    # Read at each use: a pickled judge, a config and a log of it never hold the key.
    key = os.environ.get(api_key_env)
    if not key:
        raise ValueError(
            f"api_key_env={api_key_env!r}: this environment variable is not set; set it to the "
            "key, or set api_key_env=None for a server without keys"
        )
    return key
