"""The null device itself: what it counts, refuses and lets fail."""

import pytest

pytestmark = pytest.mark.rehearsal

COUNTS = """
import json, torch, triton, triton.language as tl
from tools.null_gpu.counters import read_own, reset_own

@triton.jit
def fill(out, n: tl.constexpr):
    tl.store(out + tl.arange(0, n), tl.arange(0, n))

x = torch.ones(4, device="cuda")
reset_own()
(x + x).sum().item()
eager = read_own()
reset_own()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = (x + x) * 2
graph.replay()
graph.replay()
captured = read_own()
reset_own()
fill[(1,)](x, n=4)
print(json.dumps({
    "eager": [eager.launches, eager.waits, list(eager.contexts)],
    "captured": [captured.launches, captured.replayed, captured.violations],
    "triton": read_own().kernels,
}))
"""


def code_file(path, code):
    path.write_text(code)
    return str(path)


def test_launches_waits_graphs_and_contexts_are_counted(rehearsal, tmp_path):
    """Two kernels and one wait; a graph of two kernels that is launched twice; one kernel that
    Triton compiled.
    """
    ended = rehearsal.python(code_file(tmp_path / "counts.py", COUNTS), settings={"DEVICES": 2})
    assert ended.result == {
        "eager": [2, 1, [0]],
        "captured": [2, 4, 0],
        "triton": {"triton:fill": 1},
    }
    (own,) = ended.counters
    assert own.physical_contexts == (0,)


REFUSALS = """
import json, torch
from tools.null_gpu.counters import read_own
x = torch.ones(4, device="cuda")
said = []
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
except torch.AcceleratorError as error:
    said.append(str(error).splitlines()[0])
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    said.append(str(error).partition(".")[0])
page = torch.zeros(4096, dtype=torch.uint8)
said.append(int(torch.cuda.cudart().cudaHostRegister(page.data_ptr(), 4096, 0)))
print(json.dumps([*said, read_own().violations]))
"""


def test_capture_allocation_and_registration_fail_on_request(rehearsal, tmp_path):
    settings = {"MAX_ALLOCATED": 256 << 20, "FAIL_REGISTER": 1}
    ended = rehearsal.python(code_file(tmp_path / "refusals.py", REFUSALS), settings=settings)
    capture, memory, register, violations = ended.result
    assert "cudaErrorStreamCaptureUnsupported" in capture
    assert memory == "CUDA out of memory"
    assert (register, violations) == (2, 1)
    assert ended.violations == ["capture violation by cudaStreamSynchronize"]


MACHINE = """
import json, torch
print(json.dumps([torch.cuda.device_count(), torch.cuda.is_available() and [
    torch.cuda.get_device_capability(), torch.cuda.mem_get_info()[1] >> 30]]))
"""


@pytest.mark.parametrize(
    ("settings", "machine"),
    [
        ({"DEVICES": 8}, [8, [[9, 0], 80]]),
        ({"CAPABILITY": "8.0", "MEMORY_GIB": 24}, [1, [[8, 0], 24]]),
        ({"DRIVER": "570.133.20"}, [0, False]),
    ],
)
def test_machine_is_as_the_settings_say(rehearsal, settings, machine):
    """A driver older than CUDA 13 needs has no GPU for CUDA."""
    assert rehearsal.python("-c", MACHINE, settings=settings).result == machine


ROWS = """
import ctypes, json, os, torch
host = torch.arange(12, dtype=torch.uint8).reshape(3, 4).pin_memory()
device = torch.zeros(3, 2, dtype=torch.uint8, device="cuda")
back = torch.zeros(3, 2, dtype=torch.uint8)
copy = ctypes.CDLL(os.environ["NULL_GPU_LIBRARY"]).cudaMemcpy2DAsync
sizes = [ctypes.c_void_p, ctypes.c_size_t] * 2 + [ctypes.c_size_t] * 2
sizes += [ctypes.c_int, ctypes.c_void_p]
copy.argtypes = sizes
errors = [
    copy(device.data_ptr(), 2, host.data_ptr() + 1, 4, 2, 3, 1, None),
    copy(back.data_ptr(), 2, device.data_ptr(), 2, 2, 3, 2, None),
    copy(back.data_ptr(), 1, device.data_ptr(), 2, 2, 3, 2, None),
]
print(json.dumps([errors, back.tolist()]))
"""


def test_rows_are_copied(rehearsal):
    """The middle columns of a 3 x 4 matrix go to the device and back; rows that are longer than
    their pitch do not.
    """
    ended = rehearsal.python("-c", ROWS, settings={"ZERO_READS": 0})
    assert ended.result == [[0, 0, 12], [[1, 2], [5, 6], [9, 10]]]


DRIVER = """
import json
from tools.setup_env import Refusal, check_driver, read_driver
try:
    print(json.dumps(check_driver(read_driver())))
except Refusal as refusal:
    print(json.dumps(str(refusal)))
"""


@pytest.mark.parametrize(
    ("driver", "says"), [("580.65.06", None), ("570.133.20", "driver is 570.133.20")]
)
def test_set_up_asks_the_driver_for_its_version(rehearsal, driver, says):
    refusal = rehearsal.python("-c", DRIVER, settings={"DRIVER": driver}).result
    assert refusal == says or says in refusal
