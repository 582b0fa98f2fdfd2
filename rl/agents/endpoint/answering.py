"""From a request to its reply: what an episode and a model without a memory have in common."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from rl.agents.dialects.reply_reader import ParsedReply, read_reply
from rl.agents.endpoint.record import EpisodeRecord
from rl.agents.endpoint.turns import PlannedTurn
from rl.agents.types import BadRequestError, ChatReply, ChatRequest, ReplyEnd, RequestError
from rl.rollouts.control_tokens import RefusedMessageError
from rl.rollouts.renderer import Renderer
from rl.types import Completion, SamplingParams

LEAST_TOP_P = 1e-30
"""Value in place of a `top_p` of 0, which samplers refuse: the likeliest token alone."""
SEED_BITS = 62


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """A reply as tokens and text, and as the client is told."""

    number: int
    """Number of its turn in the record."""
    text: str
    """The completion decoded (`rl.types.Turn.text`), a stop text at its end included."""
    reply: ChatReply
    parsed: ParsedReply


def check_model(request: ChatRequest, models: Collection[str]) -> None:
    """Raise RequestError unless the client asks for one of the models; any will do of none."""
    if models and request.model not in models:
        raise make_model_error(f"must be {' or '.join(models)}", model=request.model)


def plan_turn(
    record: EpisodeRecord, request: ChatRequest, *, role: str = "", is_preview: bool = False
) -> PlannedTurn:
    """Return the turn of a request, as `EpisodeRecord.plan` or `preview`.

    Raises BadRequestError if there can be none.
    """
    if request.prompt_text is not None:
        # With the token that begins every text, of tokenizers that have one.
        token_ids = tuple(record.renderer.tokenizer.encode(request.prompt_text))
        if not token_ids:
            raise BadRequestError("prompt='' must have at least one token", field="prompt")
        request = replace(request, token_ids=token_ids)
    try:
        plan = record.preview if is_preview else record.plan
        return plan(request, role=role)
    except RefusedMessageError as error:
        raise BadRequestError(str(error), field="messages") from error


def honour_sampling(sampling: SamplingParams, request: ChatRequest) -> SamplingParams:
    """Return the sampling with what the client asks for in place of its own."""
    changes: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "seed"):
        if name in request.asked:
            changes[name] = request.asked[name]
    # Clients write "off" and extremes in ways that samplers do not know.
    if "top_p" in changes:
        changes["top_p"] = max(changes["top_p"], LEAST_TOP_P)
    if "top_k" in changes:
        changes["top_k"] = max(changes["top_k"], 0)
    if "seed" in changes:
        changes["seed"] %= 2**SEED_BITS
    return replace(sampling, **changes)


def read_answer(
    request: ChatRequest,
    plan: PlannedTurn,
    completion: Completion,
    *,
    renderer: Renderer,
    model: str,
) -> Answer:
    """Return what the client is told of a completion; `model` is named if the client names none."""
    whole_text = renderer.text(completion.token_ids, prompt_ids=plan.context_ids)
    # Of the model's text, not of the parts below: a stop text may lie within a call. The thought
    # that the prompt has opened is the prompt's, also where it contains a stop text.
    num_opened = len(renderer.find_opened_thought(plan.context_ids))
    text, stop_text = _cut_at_stop(whole_text, request.stop, begin=num_opened)
    reply_id = secrets.token_hex(12)
    parsed = read_reply(
        text,
        call_format=renderer.template.call_format,
        reply_id=reply_id,
        has_tools=request.has_tools,
    )
    # A reply at the limit of tokens has ended there, whatever it has said by then.
    end: ReplyEnd = "tool_calls" if parsed.calls else "stop"
    if completion.is_cut_off:
        end = "length"
    cached = 0 if plan.parent is None else len(plan.context_ids) - len(plan.prompt_ids)
    token_texts: tuple[str, ...] = ()
    if "logprobs" in request.wants:
        # One by one, as clients want them: a letter of several tokens has no text of its own.
        decode = renderer.tokenizer.decode
        token_texts = tuple(decode([int(one)]) for one in completion.token_ids)
    reply = ChatReply(
        id=reply_id,
        created=int(time.time()),
        model=request.model or model,
        text=text,
        end=end,
        prompt_ids=plan.context_ids,
        completion=completion,
        stop_text=stop_text,
        cached_tokens=cached,
        token_texts=token_texts,
    )
    return Answer(number=plan.number, text=whole_text, reply=reply, parsed=parsed)


def _cut_at_stop(text: str, stops: tuple[str, ...], *, begin: int) -> tuple[str, str | None]:
    """Return a text up to the first of the stop texts from `begin` on, and that stop text."""
    places = []
    for stop in stops:
        place = text.find(stop, begin)
        if place >= 0:
            places.append((place, stop))
    if not places:
        return text, None
    place, stop = min(places)
    return text[:place], stop


def make_model_error(valid: str, *, model: str) -> RequestError:
    """Return the error of a model that does not exist; `valid` says which do."""
    return RequestError(
        f"model {model!r:.200} does not exist here: {valid}",
        status=404,
        code="model_not_found",
        field="model",
    )


def make_context_error(num_tokens: int, *, most: int) -> RequestError:
    """Return the error of a conversation that leaves no room for a reply.

    Agents recognise it by these words, and shorten their history.
    """
    # A prompt of `most` tokens is too long as well: its reply has at least one token.
    return RequestError(
        f"prompt is too long: {num_tokens} tokens > {most - 1} maximum. This model's maximum "
        f"context length is {most} tokens with the reply, and the messages have {num_tokens}",
        status=400,
        code="context_length_exceeded",
        field="messages",
    )
