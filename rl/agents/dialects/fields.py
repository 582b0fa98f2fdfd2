"""Every field of a request that clients are known to send, and what becomes of it.

One table serves all dialects, their errors and docs/agent_fields.md. A field that is not in it is
refused by name (checking.py), as a field that was misspelled would be. Names are those of the
clients openai, anthropic, openai-agents, pydantic-ai, smolagents, langchain-openai, litellm, Claude
Code and Codex, and those of vLLM, on which tools for RL rely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Dialect = Literal["chat", "responses", "messages", "tokens", "completions"]
"""chat: OpenAI `/v1/chat/completions`; responses: OpenAI `/v1/responses`; messages: Anthropic
`/v1/messages` and `/v1/messages/count_tokens`; tokens: vLLM `/inference/v1/generate`;
completions: OpenAI `/v1/completions`, for models without a memory."""
FieldClass = Literal["used", "asked", "harmless", "refused"]
"""used: honoured; asked: recorded, and honoured only if the config says so, because the run decides
what it samples from; harmless: accepted and counted, without effect; refused: an error that names
the field."""
ALL: tuple[Dialect, ...] = ("chat", "responses", "messages")
OPENAI: tuple[Dialect, ...] = ("chat", "responses")
TOKENS: tuple[Dialect, ...] = ("tokens",)
HOSTED_TOOLS = (
    "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation",
    "mcp", "tool_search",
)  # fmt: skip
"""Types of tools that the service of OpenAI runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Values that a field of class asked may have."""

    type: Literal["number", "integer", "integers", "object", "boolean"] = "number"
    low: float = -math.inf
    high: float = math.inf

    def describe(self) -> str:
        if self.type == "integers":
            return "a list of integers"
        if self.type in ("object", "boolean"):
            return f"{'an' if self.type == 'object' else 'a'} {self.type}"
        text = "an integer" if self.type == "integer" else "a number"
        if self.high < math.inf:
            return f"{text} from {self.low:g} to {self.high:g}"
        return text if self.low == -math.inf else f"{text} of at least {self.low:g}"

    def hold(self, value: Any) -> bool:
        if self.type == "object":
            return isinstance(value, dict)
        if self.type == "boolean":
            return isinstance(value, bool)
        if self.type == "integers":
            return isinstance(value, list) and all(map(_is_integer, value))
        if not _is_integer(value) and (self.type == "integer" or not isinstance(value, float)):
            return False
        # Comparisons with NaN are false.
        return self.low <= value <= self.high and abs(value) != math.inf


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestField:
    """A field of a request's body."""

    name: str
    """Path from the top of the body; `[]` stands for every item of a list."""
    kind: FieldClass
    note: str
    """Explanation, as the end of a sentence."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that ask for nothing and are accepted, besides null."""
    bounds: Bounds = Bounds()


_Notes = Mapping[str, str | tuple[Any, ...]]
_ROWS: list[tuple[tuple[Dialect, ...], RequestField]] = []


def _add(dialects: tuple[Dialect, ...], kind: FieldClass, notes: _Notes) -> None:
    """Add rows; behind the note of a refused field stand its neutral values, behind that of an
    asked field its bounds."""
    for name, given in notes.items():
        note, *more = (given,) if isinstance(given, str) else given
        if kind == "asked":
            (bounds,) = more or (Bounds(),)
            row = RequestField(name=name, kind=kind, note=note, bounds=bounds)
        else:
            row = RequestField(name=name, kind=kind, note=note, neutral=tuple(more))
        _ROWS.append((dialects, row))


# Used

_add(ALL, "used", {
    "model": "recorded; the reply repeats it",
    "stream": "true: the reply comes as server-sent events",
    "tools": "tools with a name and a schema of type object; others are refused",
    "tool_choice": "auto, none, and required or any: recorded, so that replies without a call are "
    "counted, while the model is not constrained; none: the tools stay announced, and calls are "
    "told as text; a certain tool is refused",
})  # fmt: skip
_add(("chat", "messages"), "used", {
    "messages": "the conversation; texts of parts are joined, thoughts of earlier turns left out",
})  # fmt: skip
_add(OPENAI, "used", {
    "include_reasoning": "false: the reply is told without its thoughts (vLLM)",
})  # fmt: skip
_add(("chat",), "used", {
    "max_tokens": "most new tokens",
    "max_completion_tokens": "most new tokens; the smaller one counts if both are sent",
    "stop": "a text or a list of texts that end the reply",
    "stream_options.include_usage": "a last chunk of the stream has the usage",
    "logprobs": "true: logprobs of the sampled tokens",
    "top_logprobs": "0 to 20; only the sampled token is listed",
    "return_token_ids": "true: ids of prompt and completion, as vLLM tells them",
    "return_tokens_as_token_ids": "true: logprobs name tokens as `token_id:7`, as vLLM does",
})  # fmt: skip
_add(("responses",), "used", {
    "input": "a text, or items: messages, function calls and their outputs; reasoning is left out",
    "instructions": "the system message, before the input",
    "max_output_tokens": "most new tokens",
    "stop": "a text or a list of texts that end the reply (vLLM)",
    "tools[].type=namespace": "a group of tools, whose calls name it (Codex)",
    "tools[].type=custom": "a tool that takes one text: to the model a function with `input`; a "
    "grammar is a part of its description, the model is not constrained (Codex)",
})  # fmt: skip
_add(("messages",), "used", {
    "max_tokens": "most new tokens; required, except for count_tokens",
    "system": "the system message: a text or blocks of text",
    "stop_sequences": "texts that end the reply",
    "thinking": "unless disabled or left out, thoughts are told as thinking blocks",
})  # fmt: skip

# Asked

_add(ALL, "asked", {
    "temperature": ("temperature", Bounds(low=0, high=2)),
    "top_p": ("nucleus sampling", Bounds(low=0, high=1)),
    "top_k": ("most likely tokens; -1 and 0 are off", Bounds(type="integer", low=-1)),
    "chat_template_kwargs": ("options of the chat template (vLLM)", Bounds(type="object")),
})  # fmt: skip
_add(OPENAI, "asked", {
    "frequency_penalty": ("penalty of frequent tokens", Bounds(low=-2, high=2)),
    "presence_penalty": ("penalty of tokens that occurred", Bounds(low=-2, high=2)),
    "repetition_penalty": ("penalty of repetitions (vLLM)", Bounds(low=0, high=2)),
    "min_p": ("least probability relative to the likeliest token (vLLM)", Bounds(low=0, high=1)),
    "seed": ("seed of the request", Bounds(type="integer")),
    "min_tokens": ("least new tokens (vLLM)", Bounds(type="integer", low=0)),
    "stop_token_ids": ("tokens that end the reply (vLLM)", Bounds(type="integers")),
    "enable_thinking": ("thoughts on or off (Qwen)", Bounds(type="boolean")),
    "thinking_token_budget": ("most tokens of thoughts (vLLM)", Bounds(type="integer", low=-1)),
})  # fmt: skip

# Harmless

_add(ALL, "harmless", {
    "metadata": "labels of the client",
    "service_tier": "there is one tier",
    "cache_salt": "the run salts its cache itself (vLLM)",
    "context_management": "the client's own compaction works; nothing is removed here",
    "tools[].strict": "the model is not constrained",
    "tools[].defer_loading": "all tools are announced at once",
    "tools[].cache_control": "prefixes are cached anyway",
    "mm_payload": "there are no media (vLLM)",
    "return_mm_kwargs": "there are no media (vLLM)",
})  # fmt: skip
_add(OPENAI, "harmless", {
    "user": "label of the client",
    "safety_identifier": "label of the client",
    "prompt_cache_key": "prefixes are cached anyway",
    "prompt_cache_options": "prefixes are cached anyway",
    "prompt_cache_retention": "prefixes are cached anyway",
    "store": "nothing is stored for the client; a later previous_response_id is refused",
    "parallel_tool_calls": "the model is not constrained",
    "reasoning": "the chat template decides about thoughts",
    "stream_options": "apart from include_usage of chat",
    "stream_options.include_obfuscation": "nothing is padded",
    "client_metadata": "labels of the client (Codex)",
    "request_id": "replies have ids of their own (vLLM)",
    "session_id": "episodes are told apart by their address (vLLM)",
    "priority": "requests of a run are equal (vLLM)",
    "skip_special_tokens": "texts have no special tokens (vLLM)",
    "spaces_between_special_tokens": "texts have no special tokens (vLLM)",
    "mm_processor_kwargs": "there are no media (vLLM)",
    "media_io_kwargs": "there are no media (vLLM)",
    "provider": "there is one provider (OpenRouter)",
    "usage": "the usage is told anyway (OpenRouter)",
})  # fmt: skip
_add(("chat",), "harmless", {
    "reasoning_effort": "the chat template decides about thoughts",
    "verbosity": "no prompt is changed",
    "prediction": "nothing is predicted",
    "stream_options.continuous_usage_stats": "the usage is told once, at the end (vLLM)",
    "thinking": "the chat template decides about thoughts (litellm)",
    "stream_interval": "chunks come as tokens do (vLLM)",
    "return_token_offsets": "for rendering only (vLLM)",
    "routed_experts_prompt_start": "routed experts are not told (vLLM)",
    "messages[].name": "chat templates have no names",
    "messages[].reasoning": "thoughts of earlier turns are left out",
    "messages[].reasoning_content": "thoughts of earlier turns are left out",
    "messages[].content[].cache_control": "prefixes are cached anyway",
})  # fmt: skip
_add(("responses",), "harmless", {
    "include": "there are no hosted tools, and reasoning is not encrypted",
    "max_tool_calls": "counts hosted tools, of which there are none",
    "truncation": "nothing is removed; a prompt that is too long is an error",
    "top_logprobs": "logprobs are told by chat only",
    "text.verbosity": "no prompt is changed",
    "access_programs": "there is one program",
    "background_options": "a reply comes in the answer to its request",
    **{f"tools[].type={kind}": "a hosted tool; beside tools of the client the model is not told "
       "of it, alone it is refused" for kind in HOSTED_TOOLS},
})  # fmt: skip
_add(("messages",), "harmless", {
    "cache_control": "prefixes are cached anyway",
    "output_config.effort": "the chat template decides about thoughts",
    "tool_choice.disable_parallel_tool_use": "the model is not constrained",
    "betas": "a header that some clients put into the body",
    "anthropic_beta": "a header that some clients put into the body",
    "anthropic_version": "a header that some clients put into the body",
    "inference_geo": "there is one place",
    "speed": "there is one speed",
    "compaction": "the client's own compaction works; nothing is removed here",
    "diagnostics": "nothing is diagnosed",
    "fallbacks": "there is one model",
    "fallback_credit_token": "nothing is billed",
    "billing_policy": "nothing is billed",
    "user_profile_id": "label of the client",
    "workspace_id": "label of the client",
    "system[].cache_control": "prefixes are cached anyway",
    "system[].x-anthropic-billing-header": "a first line that may change with each request is left "
    "out (Claude Code)",
    "messages[].content[].cache_control": "prefixes are cached anyway",
    "messages[].content[].is_error": "the text of a tool's result says it",
})  # fmt: skip

# Refused

_add(ALL, "refused", {
    "tool_choice.name": "a certain tool cannot be forced; send auto, none, or required or any",
    "tools[].type": "hosted tools, such as web_search, do not exist here; tools are functions",
    "watermarking": ("replies have no watermark (vLLM)", False),
    "kv_transfer_params": ("the run manages its caches (vLLM)", {}),
    "ec_transfer_params": ("the run manages its caches (vLLM)", {}),
    "vllm_xargs": ("the engine takes no options from clients (vLLM)", {}),
    "extra_body": ("its fields belong at the top of the body", {}),
})  # fmt: skip
_add(OPENAI, "refused", {
    "logit_bias": ("logprobs would not be those of the policy", {}),
    "moderation": "nothing is moderated",
    "structured_outputs": ("replies are not constrained (vLLM)", {}),
    "guided_json": "replies are not constrained (vLLM)",
    "guided_regex": "replies are not constrained (vLLM)",
    "guided_choice": "replies are not constrained (vLLM)",
    "guided_grammar": "replies are not constrained (vLLM)",
    "include_stop_str_in_output": ("stop texts are never told (vLLM)", False),
    "ignore_eos": ("a reply ends where the model ends it (vLLM)", False),
    "plugins": ("there are no plugins (OpenRouter)", []),
    "models": ("there is one model (OpenRouter)", []),
    "transforms": ("nothing is removed from a prompt (OpenRouter)", []),
})  # fmt: skip
_add(("chat",), "refused", {
    "n": ("a request has one reply", 1),
    "best_of": ("a request has one reply", 1),
    "response_format": (
        "replies are not constrained; send type text, or validate the reply",
        {"type": "text"}, {},
    ),
    "audio": "replies are text",
    "modalities": ("replies are text", ["text"], []),
    "web_search_options": "there are no hosted tools",
    "functions": ("use tools", []),
    "function_call": ("use tool_choice", "auto", "none"),
    "messages[].function_call": "use tool_calls",
    "messages[].content[].type": "only parts of type text are read",
    "prompt_logprobs": "only sampled tokens have logprobs (vLLM)",
    "logprob_token_ids": ("only the sampled token is known (vLLM)", []),
    "allowed_token_ids": ("logprobs would not be those of the policy (vLLM)", []),
    "bad_words": ("logprobs would not be those of the policy (vLLM)", []),
    "use_beam_search": ("tokens are sampled (vLLM)", False),
    "length_penalty": ("tokens are sampled (vLLM)", 1, 1.0),
    "repetition_detection": "a reply ends where the model ends it (vLLM)",
    "truncate_prompt_tokens": "nothing is removed from a prompt (vLLM)",
    "truncation_side": "nothing is removed from a prompt (vLLM)",
    "add_generation_prompt": ("a reply is a turn of the assistant (vLLM)", True),
    "continue_final_message": ("a reply is a turn of its own (vLLM)", False),
    "add_special_tokens": ("the chat template decides (vLLM)", False),
    "chat_template": "the run has one chat template (vLLM)",
    "documents": ("send documents as messages (vLLM)", []),
    "echo": ("a reply is only what is new (vLLM)", False),
    "return_prompt_text": ("ask for return_token_ids (vLLM)", False),
})  # fmt: skip
_add(("responses",), "refused", {
    "previous_response_id": "nothing is stored; send the whole conversation as input",
    "conversation": "nothing is stored; send the whole conversation as input",
    "background": ("a reply comes in the answer to its request", False),
    "prompt": "there are no stored prompts; send instructions and input",
    "image": "replies are text, and only texts are read",
    "text.format": (
        "replies are not constrained; send type text, or validate the reply",
        {"type": "text"}, {},
    ),
    "input[].type": "only messages, calls of functions and custom tools, their outputs and "
    "reasoning are read",
    "input[].content[].type": "only parts of type input_text and output_text are read",
    "enable_response_messages": ("not supported (vLLM)", False),
    "previous_input_messages": ("send the whole conversation as input (vLLM)", []),
})  # fmt: skip
_add(("messages",), "refused", {
    "container": "there are no hosted tools",
    "mcp_servers": ("there are no hosted tools", []),
    "output_config.format": "replies are not constrained; validate the reply",
    "output_format": "replies are not constrained; validate the reply",
    "thread": "nothing is stored; send the whole conversation as messages",
    "messages[].content[].type": "only text, tool_use, tool_result and thinking are read",
})  # fmt: skip

# Tokens in, tokens out

_add(TOKENS, "used", {
    "model": "recorded; the reply repeats it",
    "stream": "true: the reply comes as server-sent events",
    "stream_options.include_usage": "a last chunk of the stream has the usage",
    "token_ids": "the whole prompt; it continues the turn whose tokens it begins with",
    "return_token_ids": "true: ids of the prompt",
    "sampling_params.max_tokens": "most new tokens",
    "sampling_params.stop": "a text or a list of texts that end the reply",
    "sampling_params.logprobs": "0 to 20: logprobs of the sampled tokens, of no others",
})  # fmt: skip
_add(TOKENS, "asked", {
    "sampling_params.temperature": ("temperature", Bounds(low=0, high=2)),
    "sampling_params.top_p": ("nucleus sampling", Bounds(low=0, high=1)),
    "sampling_params.top_k": (
        "most likely tokens; -1 and 0 are off", Bounds(type="integer", low=-1)
    ),
    "sampling_params.min_p": (
        "least probability relative to the likeliest token", Bounds(low=0, high=1)
    ),
    "sampling_params.seed": (
        "seed of the request", Bounds(type="integer", low=-(2**63), high=2**63)
    ),
    "sampling_params.frequency_penalty": (
        "penalty of frequent tokens", Bounds(low=-2, high=2)
    ),
    "sampling_params.presence_penalty": (
        "penalty of tokens that occurred", Bounds(low=-2, high=2)
    ),
    "sampling_params.repetition_penalty": (
        "penalty of repetitions", Bounds(low=0, high=2)
    ),
    "sampling_params.min_tokens": ("least new tokens", Bounds(type="integer", low=0)),
    "sampling_params.stop_token_ids": ("tokens that end the reply", Bounds(type="integers")),
})  # fmt: skip
_add(TOKENS, "harmless", {
    "request_id": "replies have ids of their own",
    "cache_salt": "the run salts its cache itself",
    "priority": "requests of a run are equal",
    "stream_options": "apart from include_usage",
    "token_offsets": "for rendering only",
    "reasoning_ended": "replies are not constrained",
    "reasoning_parser_kwargs": "replies are not constrained",
    "sampling_params.detokenize": "replies are tokens",
    "sampling_params.skip_special_tokens": "replies are tokens",
    "sampling_params.spaces_between_special_tokens": "replies are tokens",
    "sampling_params.include_stop_str_in_output": "replies are tokens",
    "sampling_params.output_kind": "the reply comes whole, or in one piece",
    "sampling_params.routed_experts_prompt_start": "routed experts are not told",
    "sampling_params.reasoning_effort": "the client's template decides about thoughts",
})  # fmt: skip
_add(TOKENS, "refused", {
    "output_mode": ("replies are tokens", "tokens"),
    "features": "there are no media",
    "content_parts": ("there are no media", []),
    "kv_transfer_params": ("the run manages its caches", {}),
    "ec_transfer_params": ("the run manages its caches", {}),
    "sampling_params.n": ("a request has one reply", 1),
    "sampling_params.logit_bias": ("logprobs would not be those of the policy", {}),
    "sampling_params.allowed_token_ids": ("logprobs would not be those of the policy", []),
    "sampling_params.bad_words": ("logprobs would not be those of the policy", []),
    "sampling_params.prompt_logprobs": "only sampled tokens have logprobs",
    "sampling_params.structured_outputs": ("replies are not constrained", {}),
    "sampling_params.ignore_eos": ("a reply ends where the model ends it", False),
    "sampling_params.extra_args": ("the engine takes no options from clients", {}),
})  # fmt: skip

# A prompt in, text out

_add(("completions",), "used", {
    "prompt": "a text or token ids, with the special tokens that it needs; a list of one is one",
    "max_tokens": "most new tokens; 16 if left out",
    "logprobs": "0 to 20: logprobs of the sampled tokens, of no others",
})  # fmt: skip
_add(("completions",), "refused", {"suffix": ("nothing is put behind a reply", "")})
_LIKE_CHAT = {
    "model", "stream", "stream_options.include_usage", "stop", "return_token_ids", "temperature",
    "top_p", "top_k", "min_p", "seed", "min_tokens", "stop_token_ids", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "user", "stream_options", "request_id", "priority",
    "stream_options.include_obfuscation", "n", "best_of", "echo", "logit_bias", "ignore_eos",
    "prompt_logprobs", "include_stop_str_in_output", "response_format",
}  # fmt: skip
_ROWS += [(("completions",), row) for of, row in _ROWS if "chat" in of and row.name in _LIKE_CHAT]


def _collect(dialect: Dialect) -> Mapping[str, RequestField]:
    rows = {}
    for dialects, row in _ROWS:
        if dialect in dialects:
            assert row.name not in rows, row.name
            rows[row.name] = row
    return rows


FIELDS: Mapping[Dialect, Mapping[str, RequestField]] = {
    name: _collect(name) for name in (*ALL, *TOKENS, "completions")
}
"""All fields by dialect and name."""
