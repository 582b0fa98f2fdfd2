"""Hostile and ordinary calls of the Tinker API, drawn at random from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

JSON, PROTOBUF = "application/json", "application/x-protobuf"
FOREIGN = "another key's objects"
LISTS = (
    "training_runs",
    "checkpoints",
    "training_runs?limit=1000&offset=0",
    "checkpoints?limit=1000&offset=0",
)
CHAT, RESPONSES, COMPLETIONS, MESSAGES, COUNT = (
    "/oai/api/v1/chat/completions",
    "/oai/api/v1/responses",
    "/oai/api/v1/completions",
    "/anthropic/api/v1/messages",
    "/anthropic/api/v1/messages/count_tokens",
)
WRONG_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    10**400,
    1e308,
    -1e308,
    "",
    "x" * 300,
    "\u0000",
    [],
    {},
    [[1]],
    {"a": {}},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    path: str
    method: str = "POST"
    body: bytes | None = None
    content_type: str = JSON
    key: str | None = None
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ids:
    """What one key has: the sessions, models, samplers and paths that calls name."""

    session_id: str
    sampler_id: str
    model_id: str
    request_id: str
    checkpoint: str
    """Path of a checkpoint to train on."""
    sampler_checkpoint: str
    """Path of a checkpoint to sample from."""

    def is_told_in(self, answer: bytes) -> bool:
        """Return whether an answer has an id of these, all of which begin with the session's."""
        return self.session_id.encode() in answer


def sample(sampler_id: str, seq_id: int, *, tokens: int = 1, samples: int = 1) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "num_samples": samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": tokens, "stop": []},
    }


def converse(model: str, *, text: str = "Hi") -> dict[str, dict[str, Any]]:
    """Return a request for a reply of one token by its path, for each API of other clients."""
    messages = [{"role": "user", "content": text}]
    tool = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    return {
        CHAT: {
            "model": model, "messages": messages, "max_tokens": 1,
            "tools": [{"type": "function", "function": tool}],
        },
        RESPONSES: {"model": model, "input": text, "max_output_tokens": 1},
        COMPLETIONS: {"model": model, "prompt": text, "max_tokens": 1},
        MESSAGES: {"model": model, "messages": messages, "max_tokens": 1},
        COUNT: {"model": model, "messages": messages},
    }  # fmt: skip


def gradient(
    model_id: str, seq_id: int, *, num_data: int = 1, num_tokens: int = 8
) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for _ in range(num_data):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(num_tokens, dtype="<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dtype, targets.dense = pb.DTYPE_INT64, np.arange(num_tokens, dtype="<i8").tobytes()
        targets.shape.append(num_tokens)
    return message


def _json(path: str, body: Any, **options: Any) -> Call:
    return Call(path=path, body=json.dumps(body).encode(), **options)


class Attacker:
    """Draws calls of one key, some of which name what another key has.

    Args:
        own: what the key has.
        foreign: what another key has, and this one must not reach.
    """

    def __init__(self, *, key: str, own: Ids, foreign: Ids, seed: int) -> None:
        self._key, self._own, self._foreign = key, own, foreign
        self._random = random.Random(seed)
        self._seq_id = 1000
        self._kinds: dict[str, tuple[int, Callable[[], Call]]] = {
            "malformed protobuf": (18, self._malformed_protobuf),
            "protobuf of many parts": (1, self._many_parts),
            "sparse tensors": (3, self._sparse),
            "malformed JSON": (15, self._malformed_json),
            "JSON of wrong values": (15, self._wrong_values),
            "JSON of wrong tokens": (1, self._wrong_tokens),
            "no key or a wrong one": (10, self._keyless),
            FOREIGN: (15, self._another_key),
            "lists": (2, self._lists),
            "samples of one token": (12, self._samples),
            "conversations": (6, self._conversations),
            "sessions and models": (5, self._creations),
            "training": (5, self._training),
        }

    def draw(self) -> tuple[str, Call]:
        """Return the kind of a call, and the call."""
        weights = [weight for weight, _ in self._kinds.values()]
        ((name, (_, make)),) = self._random.choices(list(self._kinds.items()), weights)
        return name, make()

    def is_foreign(self, answer: bytes) -> bool:
        """Return whether an answer names what another key has."""
        return self._foreign.is_told_in(answer)

    def _number(self) -> int:
        self._seq_id += 1
        return self._seq_id

    def _protobuf(self, body: bytes) -> Call:
        return Call(path="forward_backward", body=body, content_type=PROTOBUF, key=self._key)

    def _malformed_protobuf(self) -> Call:
        return self._protobuf(
            self._mutated(gradient(self._own.model_id, self._number()).SerializeToString())
        )

    def _many_parts(self) -> Call:
        part = self._random.choice(
            (b"\x1a\x00", b"\x1a\x02\x0a\x00", b"\x1a\x02\x12\x00", b"\x2a\x00", b"\x1b")
        )
        return self._protobuf(part * self._random.choice((60_000, 1_000_000)))

    def _sparse(self) -> Call:
        """Claim a shape that is not there."""
        message = gradient(self._own.model_id, self._number())
        targets = message.data[0].loss_fn_inputs["target_tokens"]
        targets.shape[:] = [8, self._random.choice((0, 100, 256, 2**22, 2**40, -1))]
        targets.sparse_csr.crow_indices = np.zeros(9, "<i8").tobytes()
        return self._protobuf(message.SerializeToString())

    def _bodies(self) -> tuple[str, dict[str, Any]]:
        own, number = self._own, self._number()
        step = {"model_id": own.model_id, "seq_id": number}
        return self._random.choice(
            (
                ("asample", sample(own.sampler_id, number)),
                ("optim_step", step | {"adam_params": {"learning_rate": 1e-4}}),
                ("save_weights", step | {"path": "a", "user_metadata": {"a": "b"}}),
                ("load_weights", step | {"path": own.checkpoint, "optimizer": True}),
                ("create_session", {"tags": ["a"], "user_metadata": {}, "sdk_version": "1"}),
                (
                    "create_model",
                    {"session_id": own.session_id, "model_seq_id": number, "base_model": "tiny"},
                ),
                ("retrieve_future", {"request_id": own.request_id}),
                ("weights_info", {"tinker_path": own.checkpoint}),
                ("telemetry", {"events": [{"a": 1}]}),
            )
        )

    def _malformed_json(self) -> Call:
        path, body = self._bodies()
        deep = (
            b"[" * 100_000
            if self._random.random() < 0.01
            else self._mutated(json.dumps(body).encode())
        )
        return Call(path=path, body=deep, key=self._key)

    def _wrong_values(self) -> Call:
        """Replace one value, at the top or in a part, or add one."""
        path, body = self._bodies()
        part = self._random.choice(
            [body, *(value for value in body.values() if isinstance(value, dict))]
        )
        part[self._random.choice([*part, "unknown"])] = self._random.choice(WRONG_VALUES)
        return _json(path, body, key=self._key)

    def _wrong_tokens(self) -> Call:
        body = sample(self._own.sampler_id, self._number())
        body["prompt"]["chunks"][0]["tokens"] = [self._random.choice((None, "x", 1))] * 400_000
        return _json("asample", body, key=self._key)

    def _keyless(self) -> Call:
        path, body = self._bodies()
        key = self._random.choice((None, "", "tml-" + "z" * 20, self._key[:-1], "k" * 5000))
        if self._random.random() < 0.2:  # a path that needs none
            return Call(path="healthz", method="GET", body=self._random.choice((None, b"x" * 1000)))
        return _json(path, body, key=key)

    def _another_key(self) -> Call:
        return self._random.choice([*self.foreign_calls().values()])

    def _lists(self) -> Call:
        """List what there is, of which another key's must not be part."""
        return Call(path=self._random.choice(LISTS), method="GET", key=self._key)

    def foreign_calls(self) -> dict[str, Call]:
        """Return every call of the API that takes an id or a path, with those of the other key, by
        a name.
        """
        return (
            self._of_sessions()
            | self._of_models()
            | self._of_weights()
            | self._of_runs()
            | self._of_conversations()
        )

    def _of_sessions(self) -> dict[str, Call]:
        him, number = self._foreign, self._number()
        new_model = {"session_id": him.session_id, "model_seq_id": number, "base_model": "tiny"}
        new_sampler = {"session_id": him.session_id, "sampling_session_seq_id": number}
        end = {"reason": {"type": "success"}}
        return {
            "heartbeat": self._json("session_heartbeat", {"session_id": him.session_id}),
            "finish": self._json(f"sessions/{him.session_id}/finish", end),
            "create_model": self._json("create_model", new_model | {"lora_config": {"rank": 8}}),
            "create_sampler": self._json(
                "create_sampling_session", new_sampler | {"base_model": "tiny"}
            ),
            "asample": self._json("asample", sample(him.sampler_id, number)),
            "sampler": Call(path=f"samplers/{him.sampler_id}", method="GET", key=self._key),
            "retrieve": self._json("retrieve_future", {"request_id": him.request_id}),
            "cancel": self._json("cancel_future", {"request_id": him.request_id}),
        }

    def _of_models(self) -> dict[str, Call]:
        him, number = self._foreign, self._number()
        step = {"model_id": him.model_id, "seq_id": number}
        publish = {"sampling_session_seq_id": number}
        return {
            "get_info": self._json("get_info", {"model_id": him.model_id}),
            "forward_backward": self._protobuf(gradient(him.model_id, number).SerializeToString()),
            "optim_step": self._json("optim_step", step | {"adam_params": {}}),
            "save": self._json("save_weights", step | {"path": "stolen"}),
            "save_sampler": self._json("save_weights_for_sampler", step | {"path": "stolen"}),
            "publish": self._json("save_weights_for_sampler", step | publish),
            "load_into": self._json(
                "load_weights", step | {"path": self._own.checkpoint, "optimizer": True}
            ),
        }

    def _of_weights(self) -> dict[str, Call]:
        """Read the other key's checkpoints into models and samplers of this one."""
        him, own, number = self._foreign, self._own, self._number()
        new_model = {"session_id": own.session_id, "model_seq_id": number}
        new_sampler = {"session_id": own.session_id, "sampling_session_seq_id": number}
        stolen = {"path": him.checkpoint, "optimizer": False}
        return {
            "load": self._json(
                "load_weights", stolen | {"model_id": own.model_id, "seq_id": number}
            ),
            "load_new": self._json("load_weights", stolen | new_model),
            "sample_saved": self._json(
                "create_sampling_session", new_sampler | {"model_path": him.sampler_checkpoint}
            ),
            "weights_info": self._json("weights_info", {"tinker_path": him.checkpoint}),
        }

    def _of_conversations(self) -> dict[str, Call]:
        """Talk to the other key's weights."""
        bodies = converse(self._foreign.sampler_checkpoint)
        return {path: self._json(path, body) for path, body in bodies.items()}

    def _of_runs(self) -> dict[str, Call]:
        run, kind, name = self._foreign.checkpoint.removeprefix("tinker://").split("/")
        checkpoint = f"training_runs/{run}/checkpoints/{kind}/{name}"
        ttl = json.dumps({"ttl_seconds": 1}).encode()
        return {
            "run": Call(path=f"training_runs/{run}", method="GET", key=self._key),
            "checkpoints": Call(
                path=f"training_runs/{run}/checkpoints", method="GET", key=self._key
            ),
            "delete": Call(path=checkpoint, method="DELETE", key=self._key),
            "set_ttl": Call(path=f"{checkpoint}/ttl", method="PUT", body=ttl, key=self._key),
        }

    def _json(self, path: str, body: Any) -> Call:
        return _json(path, body, key=self._key)

    def _samples(self) -> Call:
        return _json("asample", sample(self._own.sampler_id, self._number()), key=self._key)

    def _conversations(self) -> Call:
        """Talk to a model of this key: as clients do, with wrong values, or at great length."""
        model = self._random.choice(("tiny", self._own.sampler_checkpoint, "unknown", "tinker://"))
        length = self._random.choice((2, 2, 2, 500, 1_500_000))
        path, body = self._random.choice([*converse(model, text="x" * length).items()])
        kind = self._random.randrange(3)
        if kind == 1:
            body[self._random.choice([*body, "unknown"])] = self._random.choice(WRONG_VALUES)
        if kind == 2 and length < 1000:
            return Call(path=path, body=self._mutated(json.dumps(body).encode()), key=self._key)
        return self._json(path, body)

    def _creations(self) -> Call:
        session = {"tags": [], "user_metadata": {}, "sdk_version": "1"}
        model = {
            "session_id": self._own.session_id,
            "model_seq_id": self._number(),
            "base_model": "tiny",
        }
        lora = {"lora_config": {"rank": 8}}
        if self._random.random() < 0.5:
            return _json("create_session", session, key=self._key)
        return _json("create_model", model | lora, key=self._key)

    def _training(self) -> Call:
        """Steps in the wrong order, which wait for others that never come."""
        num_data = self._random.choice((1, 4, 64))
        return self._protobuf(
            gradient(self._own.model_id, self._number(), num_data=num_data).SerializeToString()
        )

    def _mutated(self, body: bytes) -> bytes:
        """Change, drop, repeat or insert some bytes."""
        data, draw = bytearray(body), self._random
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(data) + 1)
            kind = draw.randrange(4)
            if kind == 0 and place < len(data):
                data[place] = draw.randrange(256)
            elif kind == 1:
                del data[place : place + draw.randrange(1, 9)]
            elif kind == 2:
                data[place:place] = data[place : place + draw.randrange(1, 40)]
            else:
                data[place:place] = draw.randbytes(draw.randrange(1, 9))
        return bytes(data)
