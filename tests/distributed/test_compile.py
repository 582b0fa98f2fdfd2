import pytest
import torch
from torch import nn

from rl.distributed.compile import CompileConfig, check_compiler, compile_blocks, compile_function


@pytest.fixture
def counters():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def run(**config):
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    compile_blocks(blocks, CompileConfig(**config))
    # Without a gradient the first block's graph would differ from the others'.
    x = torch.randn(2, 4, requires_grad=True)
    for block in blocks:
        x = block(x)
    return x, list(blocks.state_dict())


def test_blocks_share_one_graph_and_keep_their_names(counters):
    expected, names = run()
    assert not counters["stats"]["unique_graphs"]
    x, compiled_names = run(enable=True, backend="eager")
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(x, expected)
    assert compiled_names == names


def test_components_select_the_compiled_parts(counters):
    loss = CompileConfig(enable=True, components=("loss",), backend="eager")
    model = CompileConfig(enable=True, components=("model",), backend="eager")
    run(enable=True, components=("loss",), backend="eager")
    assert compile_function(torch.sin, model) is torch.sin
    assert not counters["stats"]["unique_graphs"]
    assert compile_function(torch.sin, loss) is not torch.sin


def test_missing_compiler_is_named_unless_the_environment_has_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ValueError, match=r"compile.backend='inductor' needs .*g\+\+.* on device 'cpu'"
    ):
        check_compiler(CompileConfig(enable=True), device_type="cpu")
    with pytest.raises(ValueError, match=r"compile.backend='inductor' needs .* on device 'cuda'"):
        check_compiler(CompileConfig(enable=True), device_type="cuda")
    check_compiler(CompileConfig(enable=True, backend="aot_eager"), device_type="cpu")
    check_compiler(CompileConfig(), device_type="cpu")
    (tmp_path / "my-compiler").touch(mode=0o755)
    monkeypatch.setenv("CXX", "my-compiler")
    check_compiler(CompileConfig(enable=True), device_type="cpu")
