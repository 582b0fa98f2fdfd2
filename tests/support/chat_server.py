"""A local server of OpenAI's chat completions with scripted answers."""

import json
import threading
from typing import Any

from tests.support.json_server import JsonServer


class ChatServer(JsonServer):
    """Server that answers with each of `answers` in turn, then with the last.

    An answer is a text, a function from the request to a text, or (status, body).
    """

    def __init__(self):
        super().__init__()
        self.url += "/v1"
        self.answers: list[Any] = ["Grade: 5"]
        self.requests = []
        self.keys = []
        self.released = threading.Event()

    def __exit__(self, *error):
        self.released.set()
        super().__exit__(*error)

    def answer(self, method, path, body, headers):
        assert (method, path) == ("POST", "/v1/chat/completions")
        self.requests.append(json.loads(body))
        self.keys.append(headers["Authorization"])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer(self.requests[-1])
        if answer == "hang":
            self.released.wait(20)
        return (200, completion(answer)) if isinstance(answer, str) else answer


def completion(text, finish_reason="stop"):
    message = {"role": "assistant", "content": text}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }
