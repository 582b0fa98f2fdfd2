"""A local server of OpenAI's chat completions with scripted answers."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer:
    """Server that answers with each of `answers` in turn, then with the last.

    An answer is a text, a function from the request to a text, or (status, body).
    """

    def __init__(self):
        self.answers: list[Any] = ["Grade: 5"]
        self.requests = []
        self.keys = []
        self.released = threading.Event()
        handler = type("Handler", (_Handler,), {"chat": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self):
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    chat: ChatServer
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        chat = self.chat
        chat.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        chat.keys.append(self.headers["Authorization"])
        assert self.path == "/v1/chat/completions"
        answer = chat.answers.pop(0) if len(chat.answers) > 1 else chat.answers[0]
        if callable(answer):
            answer = answer(chat.requests[-1])
        if answer == "hang":
            chat.released.wait(20)
        status, body = (200, completion(answer)) if isinstance(answer, str) else answer
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        with contextlib.suppress(ConnectionError):  # the client has given up
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if isinstance(body, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *args):
        pass


def completion(text, finish_reason="stop"):
    message = {"role": "assistant", "content": text}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }
