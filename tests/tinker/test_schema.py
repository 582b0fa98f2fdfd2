"""Robustness: no input fails the server, neither valid by its description nor mutated protobuf."""

import random
from collections import Counter

import httpx
import hypothesis
import numpy as np
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tinker.proto.response_conv import deserialize_forward_backward_output

from rl.tinker.wire.codec import PROTOBUF
from tests.support.fake_tinker import message
from tests.support.tinker_data import lora

pytestmark = pytest.mark.medium
HEADERS = {"X-API-Key": "tml-test"}
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
NUM_EXAMPLES = 25
"""Number of examples per call."""
NUM_BODIES = 400


@schemathesis.serializer(PROTOBUF)
def as_they_are(context, value):
    """Send arbitrary bytes; the mutation test below has almost valid ones."""
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=f"{server.url}/api/v1", headers=HEADERS, timeout=60) as client:
        yield client


@pytest.fixture
def ids(http, client):
    """Ids of existing objects: requests with these pass the first checks."""
    model_id = lora(client, rank=2).model_id
    sampler = {
        "session_id": model_id.partition(":")[0],
        "sampling_session_seq_id": 99,
        "base_model": "tiny",
    }
    sampler_id = http.post("create_sampling_session", json=sampler).json()["sampling_session_id"]
    return {
        "model_id": model_id,
        "run_id": model_id,
        "sampling_session_id": sampler_id,
        "sampler_id": sampler_id,
        "request_id": f"{model_id}:0",
        "base_model": "tiny",
    }


def test_server_answers_as_its_description_says(server, http, ids):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=HEADERS)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 25
    statuses: Counter[int] = Counter()
    for operation in operations:
        check(operation, server.url, ids, statuses)
    assert http.get("healthz").json() == {"status": "ok"}
    # Enough requests passed the first checks.
    assert statuses[200] > 50, statuses
    assert statuses[400] + statuses[404] > 100, statuses
    # Accepted work did not fail either.
    assert "Traceback" not in server.log


def check(operation, url, ids, statuses):
    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    def answers_as_described(case):
        # Half of the examples name existing objects.
        for place in (case.path_parameters, case.body):
            if isinstance(place, dict) and len(str(place)) % 2:
                place.update({name: value for name, value in ids.items() if name in place})
        response = case.call(base_url=url, headers=HEADERS, timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    answers_as_described()


def valid_body(model_id, random_):
    """Return a valid request, some with sparse targets."""
    num_tokens = random_.randrange(1, 9)
    whole = message(model_id, random_.randrange(1, 50), *range(num_tokens))
    if random_.random() < 0.5:
        targets = whole.data[0].loss_fn_inputs["target_tokens"]
        targets.shape[:] = [num_tokens, random_.randrange(1, 5)]
        targets.sparse_csr.values = np.ones(num_tokens, "<i8").tobytes()
        targets.sparse_csr.crow_indices = np.arange(num_tokens + 1, dtype="<i8").tobytes()
        targets.sparse_csr.col_indices = np.zeros(num_tokens, "<i8").tobytes()
    return whole.SerializeToString()


def mutated(body, random_):
    """Change, drop, repeat or insert some bytes, or sometimes return random bytes only."""
    data = bytearray(body)
    if random_.random() < 0.1:
        return random_.randbytes(random_.randrange(200))
    for _ in range(random_.randrange(1, 6)):
        place = random_.randrange(len(data) + 1)
        kind = random_.randrange(4)
        if kind == 0 and place < len(data):
            data[place] = random_.randrange(256)
        elif kind == 1:
            del data[place : place + random_.randrange(1, 9)]
        elif kind == 2:
            data[place:place] = data[place : place + random_.randrange(1, 40)]
        else:
            data[place:place] = random_.randbytes(random_.randrange(1, 9))
    return bytes(data)


def test_mutated_protobuf_never_fails_the_server(server, http, ids):
    random_ = random.Random(0)
    headers = {"content-type": PROTOBUF}
    counts: Counter[int] = Counter()
    body = message(ids["model_id"], 1, 2, 3).SerializeToString()
    first = http.post("forward_backward", content=body, headers=headers).json()["request_id"]
    for number in range(NUM_BODIES):
        valid = valid_body(ids["model_id"], random_)
        body = valid if number % 20 == 0 else mutated(valid, random_)
        answer = http.post("forward_backward", content=body, headers=headers)
        counts[answer.status_code] += 1
        assert answer.json()["request_id" if answer.status_code == 200 else "detail"]

    assert set(counts) <= {200, 400, 404, 410}, counts
    assert counts[200] >= NUM_BODIES // 20
    assert counts[400] > NUM_BODIES // 4
    for _ in range(
        3
    ):  # a fresh server on a busy machine compiles its kernels for longer than one poll
        result = http.post("retrieve_future", json={"request_id": first})
        if result.status_code != 408:
            break
    assert "loss:sum" in deserialize_forward_backward_output(result.content).metrics
    assert server.process.poll() is None
    assert "Traceback" not in server.log
    assert http.get("healthz").json() == {"status": "ok"}
