"""Record of an episode: the conversations that an agent has with the model, token for token.

A request continues the recorded conversation whose messages it repeats, and only its new messages
are rendered. Any other request begins a conversation. Tokens that the model has sampled are never
tokenized again: a rewritten history that quotes a recorded reply gets the tokens of that reply.

    requests of an agent            turns (recorded)          branches (branches.py)
    [s, u1]                         0: s, u1      -> a1       0 1    main
    [s, u1, a1, t1]                 1: t1         -> a2       2      main, rewritten
    [s, summary]                    2: s, summary -> a3       0 3    main, fork
    [s, u1, a1, other]              3: other      -> a4

A request that gives its prompt as tokens continues the turn whose tokens are a beginning of them.

Messages are compared in a canonical form (canonical.py).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl.agents.endpoint.canonical import Digests, chain, digest_message, digest_tokens
from rl.agents.endpoint.quotes import Quotes
from rl.agents.endpoint.turns import PlannedTurn, RecordedTurn, Relation
from rl.agents.types import BadRequestError, ChatRequest, ToolSpec
from rl.rollouts.control_tokens import RefusedMessageError
from rl.rollouts.renderer import Renderer
from rl.rollouts.replies import CallFormat
from rl.rollouts.samples import make_demonstrated_completion
from rl.tools.tool import announce, describe, render_call
from rl.types import Completion, Message, Turn


@dataclass(kw_only=True, eq=False)
class EpisodeRecord:
    """The turns of one episode.

    Example:
        plan = record.plan(request)
        completion = await draw(plan.context_ids)
        record.add(plan, completion, text=text, told=Message(role="assistant", content="4"))
    """

    renderer: Renderer
    announces_tools: bool = True
    """Tell the model which tools a client offers."""
    turns: dict[int, RecordedTurn] = field(default_factory=dict)
    """Answered turns by number, in the order in which they were answered."""
    undelivered: set[int] = field(default_factory=set)
    """Numbers of the turns whose reply no client has got so far."""
    _num_planned: int = 0
    _ends: dict[bytes, int] = field(default_factory=dict)
    """Turn that ends a conversation with this digest, of any of the three kinds."""
    _token_ends: dict[int, dict[bytes, int]] = field(default_factory=dict)
    """Last turn by the number and the digest of its tokens, prompt and reply. Filled when a prompt
    comes as tokens, which it does in few episodes."""
    _num_digested: int = 0
    """Turns that `_token_ends` has."""
    _openings: dict[tuple[str, bytes], int] = field(default_factory=dict)
    """First turn that begins a conversation, by its named role and the digest of its opening: one
    that was answered, or else one that may be."""
    _asked: dict[tuple[int | None, bytes], PlannedTurn] = field(default_factory=dict)
    """Last turn that asked the same, by its parent and the digest of the whole request."""

    def __post_init__(self) -> None:
        self._quotes = Quotes(turns=self.turns)

    def plan(self, request: ChatRequest, *, role: str = "") -> PlannedTurn:
        """Find the conversation that a request continues, and render what is new.

        Raises:
            BadRequestError: the messages are none that a model could answer.
            RefusedMessageError: a text in them cannot be encoded.
        """
        plan = self.preview(request, role=role)
        self._num_planned += 1
        if plan.parent is None:
            self._openings.setdefault((role, plan.digests.opening), plan.number)
        if request.token_ids is None:
            self._asked[plan.parent, plan.digests.full[-1]] = plan
        return plan

    def preview(self, request: ChatRequest, *, role: str = "") -> PlannedTurn:
        """Return what `plan` would return; the request is not made."""
        if request.token_ids is not None:
            return self._preview_tokens(request, role=role)
        _check_order(request.messages)
        digests = Digests.of(request)
        last = _find_last_reply(request.messages)
        parent = None if last is None else self._ends.get(digests.full[last])
        relation: Relation = ""
        origin, num_known = None, 0
        if parent is not None and last is not None:
            num_known = last + 1
        else:
            relation, origin = self._relate(request, digests, last=last, role=role)
        try:
            if parent is not None:
                prompt_ids = self._continue(request, digests, parent=parent, begin=num_known)
            else:
                prompt_ids = self._render_whole(request, digests, origin=origin)
        except RefusedMessageError:
            raise
        except ValueError as error:
            raise BadRequestError(
                f"messages cannot be rendered for this model: {error}", field="messages"
            ) from error

        context = [prompt_ids]
        if parent is not None:
            # The tokens of the conversation so far come from the record.
            before = self.turns[parent]
            context = [before.plan.context_ids, before.turn.completion.token_ids, prompt_ids]
        return PlannedTurn(
            number=self._num_planned,
            parent=parent,
            relation=relation,
            origin=origin,
            messages=request.messages[num_known:],
            prompt_ids=prompt_ids,
            context_ids=np.concatenate(context),
            digests=digests,
            num_recorded=len(self.turns),
            has_tools=bool(request.tools),
            model=request.model,
            role=role,
        )

    def add(
        self,
        plan: PlannedTurn,
        completion: Completion,
        *,
        text: str,
        told: Message,
        stop_text: str | None = None,
    ) -> None:
        """Record a reply; `told` is the message that the client was told, without its stop text."""
        turn = Turn(
            messages=plan.messages, prompt_ids=plan.prompt_ids, completion=completion, text=text
        )
        self.turns[plan.number] = RecordedTurn(plan=plan, turn=turn)
        self.undelivered.add(plan.number)
        opening = plan.role, plan.digests.opening
        # The turn that was planned first may never be answered.
        if plan.parent is None and self._openings.get(opening) not in self.turns:
            self._openings[opening] = plan.number
        echoes = [told]
        # Some agents put back the stop text, such as a closing tag, which the model has written.
        if stop_text is not None and told.content and not told.calls:
            echoes.append(replace(told, content=told.content + stop_text))
        for reply in map(digest_message, echoes):
            self._quotes.add(reply, number=plan.number)
            for beginnings in (plan.digests.full, plan.digests.messages, plan.digests.bare):
                (end,) = chain(beginnings[-1], [reply])
                self._ends[end] = plan.number

    @property
    def num_tokens(self) -> int:
        """Tokens of all answered turns, each once."""
        num = 0
        for recorded in self.turns.values():
            num += len(recorded.turn.prompt_ids) + len(recorded.turn.completion.token_ids)
        return num

    # Prompts as tokens

    def _preview_tokens(self, request: ChatRequest, *, role: str) -> PlannedTurn:
        """Find the turn whose tokens a prompt begins with; what follows them is new."""
        context_ids = np.array(request.token_ids, dtype=np.int32)
        most = len(self.renderer.tokenizer)
        if context_ids.max() >= most:
            raise BadRequestError(
                f"token_ids has {context_ids.max()}, but the tokenizer has {most} tokens",
                field="token_ids",
            )
        parent = self._find_beginning(context_ids)
        relation: Relation = ""
        num_known, origin = 0, None
        if parent is not None:
            before = self.turns[parent]
            num_known = len(before.plan.context_ids) + len(before.turn.completion.token_ids)
        else:
            # The client has rendered a history anew if the beginning of a conversation is its own.
            origin = self._find_root(context_ids)
            if origin is not None:
                relation = "rewritten"
        prompt_ids = context_ids[num_known:]
        text = self.renderer.tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False)
        return PlannedTurn(
            number=self._num_planned,
            parent=parent,
            relation=relation,
            origin=origin,
            messages=(Message(role="user", content=text),),
            prompt_ids=prompt_ids,
            context_ids=context_ids,
            digests=Digests.of_tokens(context_ids),
            num_recorded=len(self.turns),
            has_tools=False,
            model=request.model,
            role=role,
        )

    def _find_beginning(self, token_ids: np.ndarray) -> int | None:
        """Return the turn with the longest conversation that tokens begin with."""
        for recorded in itertools.islice(self.turns.values(), self._num_digested, None):
            plan = recorded.plan
            known = np.concatenate([plan.context_ids, recorded.turn.completion.token_ids])
            self._token_ends.setdefault(len(known), {})[digest_tokens(known)] = plan.number
        self._num_digested = len(self.turns)

        longest, begin = None, 0
        digest = hashlib.blake2b(digest_size=16)
        for length in sorted(self._token_ends):
            if length > len(token_ids):
                break
            digest.update(token_ids[begin:length].tobytes())
            begin = length
            longest = self._token_ends[length].get(digest.digest(), longest)
        return longest

    def _find_root(self, token_ids: np.ndarray) -> int | None:
        """Return the first conversation whose opening is a beginning of tokens."""
        for number in sorted(self.turns):
            plan = self.turns[number].plan
            is_root = plan.parent is None
            if is_root and np.array_equal(token_ids[: len(plan.prompt_ids)], plan.prompt_ids):
                return number
        return None

    # Finding

    def _relate(
        self, request: ChatRequest, digests: Digests, *, last: int | None, role: str
    ) -> tuple[Relation, int | None]:
        """Return what a new conversation has changed, and a turn of the one it changed."""
        if last is not None:
            by_messages = self._ends.get(digests.messages[last])
            if by_messages is not None:
                return "tools", by_messages
            by_bare = self._ends.get(digests.bare[last])
            if by_bare is not None:
                return "system", by_bare
        quoted = self._quotes.find_origin(request.messages, opening=digests.opening)
        if quoted is not None:
            return "rewritten", quoted
        # Histories are often replaced by a summary, under the same system message and tools.
        same = self._openings.get((role, digests.opening))
        return ("", None) if same is None else ("rewritten", same)

    # Rendering

    def _continue(
        self, request: ChatRequest, digests: Digests, *, parent: int, begin: int
    ) -> np.ndarray:
        """Return the tokens of the messages from `begin` on."""
        asked = self._asked.get((parent, digests.full[-1]))
        if asked is not None:
            return asked.prompt_ids
        completion = self.turns[parent].turn.completion
        return self._render_further(request.messages[begin:], after=completion)

    def _render_further(self, messages: Sequence[Message], *, after: Completion) -> np.ndarray:
        """Return the tokens of messages after a reply.

        A template that has no role for tools is told their results by the user.
        """
        try:
            return self.renderer.continuation(messages, after=after)
        except RefusedMessageError:
            raise
        except ValueError:
            if all(m.role != "tool" for m in messages):
                raise
            return self.renderer.continuation(tell_by_user(messages), after=after)

    def _render_whole(
        self, request: ChatRequest, digests: Digests, *, origin: int | None
    ) -> np.ndarray:
        """Return the tokens of a whole conversation, with recorded replies as they were sampled."""
        asked = self._asked.get((None, digests.full[-1]))
        if asked is not None:
            return asked.prompt_ids
        opening, *rounds = _split_rounds(request.messages)
        quoted = self._quotes.find_turns(request.messages, origin=origin)
        parts = [self._open(opening, request.tools)]
        for (reply, further), number in zip(rounds, quoted, strict=True):
            completion = self._take_reply(reply, number=number)
            parts += [completion.token_ids, self._render_further(further, after=completion)]
        return np.concatenate(parts)

    def _open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> np.ndarray:
        """Return the tokens of the first messages, with the announcement of the tools."""
        if not (tools and self.announces_tools):
            return self.renderer.opening(messages)
        if self.renderer.template.reads_tools:
            return self.renderer.opening(messages, tools=[describe(tool) for tool in tools])
        system, others = "", messages
        if messages and messages[0].role == "system":
            system, others = messages[0].content, messages[1:]
        announced = Message(role="system", content=announce(tools, system or self.renderer.system))
        return self.renderer.opening([announced, *others])

    def _take_reply(self, reply: Message, *, number: int | None) -> Completion:
        """Return a recorded reply, or an assistant's message that the model has not written."""
        if number is not None:
            return self.turns[number].turn.completion
        text = write_reply(reply, call_format=self.renderer.template.call_format)
        return make_demonstrated_completion(self.renderer.reply(text))


def write_reply(reply: Message, *, call_format: CallFormat) -> str:
    """Return the text with which a model would have written an assistant's message."""
    texts = [reply.content] if reply.content else []
    for call in reply.calls:
        if call_format == "hermes":
            texts.append(render_call(call))
        else:
            value = {"name": call.name, "parameters": dict(call.arguments)}
            texts.append(json.dumps(value, ensure_ascii=False))
    return "\n".join(texts)


def tell_by_user(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the results of tools as parts of one message of the user.

    Templates without a role for tools often want people and model to take turns.
    """
    texts = []
    for m in messages:
        is_result = m.role == "tool"
        texts.append(f"<tool_response>\n{m.content}\n</tool_response>" if is_result else m.content)
    return [Message(role="user", content="\n".join(texts))]


def _check_order(messages: Sequence[Message]) -> None:
    if not messages:
        raise BadRequestError(
            "messages is empty: the model needs at least one message", field="messages"
        )
    if messages[-1].role == "assistant":
        raise BadRequestError(
            "the last message is the assistant's: a reply cannot be continued, end with a message "
            "to the model",
            field="messages",
        )


def _find_last_reply(messages: Sequence[Message]) -> int | None:
    """Return the place of the assistant's last message."""
    for place in range(len(messages) - 1, -1, -1):
        if messages[place].role == "assistant":
            return place
    return None


def _split_rounds(messages: Sequence[Message]) -> list[Any]:
    """Return the messages before the first reply, then each reply with the messages after it."""
    opening: list[Message] = []
    rounds: list[tuple[Message, list[Message]]] = []
    for m in messages:
        if m.role == "assistant":
            rounds.append((m, []))
        elif rounds:
            rounds[-1][1].append(m)
        else:
            opening.append(m)
    return [opening, *rounds]
