"""Clients share a backend, wait in any thread or event loop, and leave nothing behind."""

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tinker import types

import rl.tinker as tinker
from rl.tinker.client.futures import THREAD_NAME
from tests.support.bigram_backend import NAME, BigramBackend

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 10
DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints([1]),
        loss_fn_inputs={"target_tokens": [2], "weights": [1.0]},
    )
]


def client_threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def test_clients_of_one_backend_share_it_until_the_last_is_closed(backend, tmp_path):
    first = tinker.ServiceClient(backend=backend, storage_folder=tmp_path)
    second = tinker.ServiceClient(backend=backend, storage_folder=tmp_path)
    third = tinker.ServiceClient()
    assert len(client_threads()) == backend.num_started == 1
    for client in (first, second):
        client.close("success").result(TIMEOUT_S)
        assert backend.num_closed == 0
    third.close("success").result(TIMEOUT_S)
    assert backend.num_closed == 1
    assert client_threads() == []


def test_several_backends_run_beside_each_other(tmp_path):
    backends = [BigramBackend(), BigramBackend()]
    with (
        tinker.ServiceClient(backend=backends[0], storage_folder=tmp_path / "0") as one,
        tinker.ServiceClient(backend=backends[1], storage_folder=tmp_path / "1") as two,
    ):
        for client in (one, two):
            client.create_lora_training_client(NAME, rank=1).result(TIMEOUT_S)
        assert [len(backend.models) for backend in backends] == [1, 1]
        with pytest.raises(ValueError, match="backend=None means the one that is running, and 2 are"):
            tinker.RestClient()
    assert [backend.num_closed for backend in backends] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "backend=None means the one that is running, and none are: give the name of one"),
        ({"storage_folder": "x"}, "storage_folder='x' is given, but no backend"),
        ({"base_url": "http://localhost"}, "base_url='http://localhost' is not supported here"),
        ({"backend": 3}, "backend=3 has no base_models, start, forward_backward, sample: must be"),
    ],
)
def test_a_client_of_nothing_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        tinker.ServiceClient(**arguments)


def test_a_storage_folder_is_one_processs(backend, tmp_path):
    with tinker.ServiceClient(backend=backend, storage_folder=tmp_path):
        with pytest.raises(ValueError, match="another process is using it"):
            tinker.ServiceClient(backend=BigramBackend(), storage_folder=tmp_path)
        with pytest.raises(ValueError, match="this backend is running already"):
            tinker.ServiceClient(backend=backend, storage_folder=tmp_path / "other")
    with tinker.ServiceClient(backend=BigramBackend(), storage_folder=tmp_path):
        pass


def test_a_client_that_is_refused_leaves_no_backend_behind(backend, tmp_path):
    with pytest.raises(tinker.BadRequestError, match="limit metadata_bytes is"):
        tinker.ServiceClient({"run": "x" * 100_000}, backend=backend, storage_folder=tmp_path)
    assert backend.num_closed == 1
    assert client_threads() == []


def test_unknown_arguments_are_ignored_with_a_warning_as_by_the_official_client(backend, tmp_path):
    with pytest.warns(FutureWarning, match="ignores arguments that it does not have: colour"):
        client = tinker.ServiceClient(backend=backend, storage_folder=tmp_path, colour="red")
    client.close("success").result(TIMEOUT_S)


def test_results_are_waited_for_and_awaited_where_an_event_loop_runs(service):
    """As in a notebook, whose cells run in its loop."""

    async def cell():
        training = service.create_lora_training_client(NAME, rank=1).result(TIMEOUT_S)
        awaited = await training.forward_backward(DATA, "cross_entropy")
        waited = training.forward_backward(DATA, "cross_entropy").result(TIMEOUT_S)
        task = asyncio.create_task(training.forward(DATA, "cross_entropy").coroutine())
        other = await service.create_lora_training_client(NAME, rank=1)
        return awaited.metrics, waited.metrics, (await task).metrics, other.model_id != training.model_id

    one, two, three, differ = asyncio.run(cell())
    assert one == two == three
    assert differ


def test_one_future_is_awaited_in_several_loops(training):
    future = training.forward(DATA, "cross_entropy")

    async def get():
        return (await future.result_async(timeout=TIMEOUT_S)).metrics

    assert asyncio.run(get()) == asyncio.run(get()) == future.result(TIMEOUT_S).metrics
    assert isinstance(future, tinker.APIFuture)


def test_waiting_has_a_time_limit_after_which_the_call_goes_on(backend, training):
    backend.go_on.clear()
    future = training.forward(DATA, "cross_entropy")
    assert repr(future) == "<ClientFuture pending>"
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    training._session.host.post(backend.go_on.set)
    assert future.result(TIMEOUT_S).metrics["loss:sum"] > 0
    assert repr(future) == "<ClientFuture done: ForwardBackwardOutput>"


def test_to_wait_in_the_clients_own_thread_is_refused(backend, training):
    backend.go_on.clear()
    first, second = training.forward(DATA, "cross_entropy"), training.forward(DATA, "cross_entropy")
    said = []

    def wait(_):
        try:
            second.result()
        except RuntimeError as error:
            said.append(str(error))

    first.future().add_done_callback(wait)
    training._session.host.post(backend.go_on.set)
    second.result(TIMEOUT_S)
    assert len(said) == 1
    assert "would wait for itself" in said[0]


def test_the_future_of_a_client_is_used_as_the_client_with_a_warning(service):
    future = service.create_lora_training_client(NAME, rank=1)
    with pytest.warns(FutureWarning, match=r"using the future of a client as the client \(.forward\)"):
        output = future.forward(DATA, "cross_entropy")
    assert output.result(TIMEOUT_S).metrics["loss:sum"] > 0


def test_closing_fails_what_waits_and_later_calls(backend, tmp_path):
    client = tinker.ServiceClient(backend=backend, storage_folder=tmp_path)
    training = client.create_lora_training_client(NAME, rank=1).result(TIMEOUT_S)
    backend.go_on.clear()
    waiting = [training.forward(DATA, "cross_entropy") for _ in range(3)]
    assert backend.computing.wait(TIMEOUT_S)  # else all would be refused, with nothing to wait for
    closing = client.close("interrupted")
    for future in waiting:  # at once, not when what runs has ended
        with pytest.raises((tinker.APIError, tinker.RequestFailedError), match=r"closing|ended|finished"):
            future.result(TIMEOUT_S)
    assert not closing.future().done()
    training._session.host.post(backend.go_on.set)
    closing.result(TIMEOUT_S)
    with pytest.raises(RuntimeError, match="is closed"):
        training.forward(DATA, "cross_entropy")
    with pytest.raises(RuntimeError, match="is closed"):
        client.create_lora_training_client(NAME)
    assert client.close("success").result(TIMEOUT_S) is None
    assert backend.num_closed == 1


def test_a_forgotten_client_ends_its_session_and_backend(backend, tmp_path):
    kept = tinker.ServiceClient(backend=backend, storage_folder=tmp_path)
    forgotten = tinker.ServiceClient(backend=backend, storage_folder=tmp_path)
    training = forgotten.create_lora_training_client(NAME, rank=1).result(TIMEOUT_S)
    del forgotten
    gc.collect()
    training.forward(DATA, "cross_entropy").result(TIMEOUT_S)  # a client of the session is still there
    assert len(backend.models) == 1
    del training
    gc.collect()
    assert backend.deleted.wait(TIMEOUT_S)
    assert backend.num_closed == 0
    (thread,) = client_threads()
    del kept
    gc.collect()
    assert backend.closed.wait(TIMEOUT_S)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_backend_that_cannot_start_is_closed_and_says_why(tmp_path):
    class Broken(BigramBackend):
        async def start(self):
            raise ValueError("no weights there")

    backend = Broken()
    with pytest.raises(ValueError, match="no weights there"):
        tinker.ServiceClient(backend=backend, storage_folder=tmp_path)
    assert backend.num_closed == 1
    assert client_threads() == []


def test_an_error_of_the_backend_is_the_servers(backend, training, caplog):
    del backend.models[training.model_id]
    with pytest.raises(tinker.RequestFailedError) as failure:
        training.forward(DATA, "cross_entropy").result(TIMEOUT_S)
    assert failure.value.category == types.RequestErrorCategory.Server
    assert "KeyError" in caplog.text  # the traceback is in the log
    backend.models[training.model_id] = None  # for the end of the session


def test_another_sessions_things_are_not_found(service):
    with pytest.raises(tinker.NotFoundError) as error:
        service.create_sampling_client(model_path="tinker://x:train:0/sampler_weights/a").result(TIMEOUT_S)
    assert error.value.status_code == 404
    with pytest.raises(tinker.BadRequestError):
        service.create_lora_training_client("unknown").result(TIMEOUT_S)


def test_runs_and_checkpoints_are_listed_and_deleted(service, training):
    rest = tinker.RestClient()
    for name in ("a", "b"):
        training.save_state(name, user_metadata={"name": name}).result(TIMEOUT_S)
    path = training.save_weights_for_sampler("c").result(TIMEOUT_S).path
    run = rest.get_training_run(training.model_id).result(TIMEOUT_S)
    assert (run.base_model, run.is_lora, run.lora_rank) == (NAME, True, 4)
    assert run.last_sampler_checkpoint.tinker_path == path
    checkpoints = rest.list_checkpoints(training.model_id).result(TIMEOUT_S).checkpoints
    assert {c.checkpoint_id for c in checkpoints} == {"weights/a", "weights/b", "sampler_weights/c"}
    rest.delete_checkpoint(training.model_id, "weights/a").result(TIMEOUT_S)
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result(TIMEOUT_S)
    left = rest.list_user_checkpoints().result(TIMEOUT_S)
    assert {c.checkpoint_id: c.expires_at is not None for c in left.checkpoints} == {
        "weights/b": False,
        "sampler_weights/c": True,
    }
    assert left.cursor.total_count == 2
    info = rest.get_weights_info_by_tinker_path(path).result(TIMEOUT_S)
    assert (info.base_model, info.lora_rank, info.train_mlp) == (NAME, 4, True)
    assert [r.training_run_id for r in rest.list_training_runs().result(TIMEOUT_S).training_runs] == [
        training.model_id
    ]
    (session_id,) = rest.list_sessions().result(TIMEOUT_S).sessions
    assert rest.get_session(session_id).result(TIMEOUT_S).training_run_ids == [training.model_id]


def test_capabilities_are_the_base_models(service):
    (model,) = tinker.RestClient().get_server_capabilities().result(TIMEOUT_S).supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == (NAME, 64, True)
    with pytest.warns(FutureWarning, match="get_server_capabilities"):
        assert service.get_server_capabilities().supported_models == [model]


def in_forked_process(function):
    """What it returns, or raises, as a text; a process that hangs is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "something else"
        try:
            said = repr(function())
        except (RuntimeError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    try:
        heard = select.select([reader], [], [], TIMEOUT_S)[0]
        return os.read(reader, 10_000).decode() if heard else "nothing"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_no_part_in_its_parents_clients(backend, tmp_path):
    client = tinker.ServiceClient(backend=backend, storage_folder=tmp_path)
    training = client.create_lora_training_client(NAME, rank=1).result(TIMEOUT_S)
    backend.go_on.clear()
    waiting = training.forward(DATA, "cross_entropy")
    of_parent = (
        "RuntimeError: the ServiceClient is of the process that this one was forked from: make one here"
    )
    assert in_forked_process(lambda: training.forward(DATA, "cross_entropy")) == of_parent
    assert in_forked_process(waiting.result).startswith("RuntimeError: the result comes to the process")
    assert in_forked_process(lambda: client.close("success").result(TIMEOUT_S)) == "None"
    assert "backend=None means the one that is running, and none are" in in_forked_process(
        tinker.ServiceClient
    )
    training._session.host.post(backend.go_on.set)
    assert waiting.result(TIMEOUT_S).metrics["loss:sum"] > 0
    client.close("success").result(TIMEOUT_S)
    assert backend.num_closed == 1


NOT_CLOSED = """
import rl.tinker as tinker
from tests.support.bigram_backend import BigramBackend, NAME

class Backend(BigramBackend):
    async def close(self):
        print("closed", flush=True)

service = tinker.ServiceClient(backend=Backend(), storage_folder={folder!r})
training = service.create_lora_training_client(NAME, rank=1).result(timeout=10)
training.save_state("last")
"""


def test_a_script_that_closes_nothing_ends_cleanly(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", NOT_CLOSED.format(folder=str(tmp_path))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
