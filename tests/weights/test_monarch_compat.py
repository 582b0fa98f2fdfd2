"""torchstore's own API on Monarch 0.7, through the adapted controller."""

from importlib import metadata

import pytest
import torch
from monarch._src.actor.endpoint import EndpointProperty

from rl.weights.monarch_compat import AsyncController, LocalClient, check_versions, torchstore

MADE_FOR = {"torchstore": "0.1.2", "torchmonarch": "0.7.0"}


def test_the_versions_it_is_made_for_pass():
    check_versions(MADE_FOR.__getitem__)
    check_versions((MADE_FOR | {"torchmonarch": "0.7.3"}).__getitem__)


@pytest.mark.parametrize(
    ("package", "version", "message"),
    [
        ("torchstore", "0.1.3", r"torchstore 0\.1\.3 is installed.* made for 0\.1\.2"),
        ("torchstore", "0.1.20", r"torchstore 0\.1\.20 is installed"),
        ("torchmonarch", "0.8.0", r"torchmonarch 0\.8\.0 is installed.* made for 0\.7"),
        ("torchmonarch", "0.70", r"torchmonarch 0\.70 is installed"),
    ],
)
def test_other_versions_are_refused(package, version, message):
    with pytest.raises(ImportError, match=message):
        check_versions((MADE_FOR | {package: version}).__getitem__)


def test_a_missing_package_is_named():
    def nothing_installed(package):
        raise metadata.PackageNotFoundError(package)

    with pytest.raises(ImportError, match=r"torchstore is not installed; weights need version 0\.1\.2"):
        check_versions(nothing_installed)


def test_all_endpoints_of_the_controller_are_async_and_none_is_lost():
    def endpoints(cls):
        members = ((name, getattr(cls, name)) for name in dir(cls))
        return {name: member for name, member in members if isinstance(member, EndpointProperty)}

    original = endpoints(AsyncController.__base__)
    adapted = endpoints(AsyncController)
    assert adapted.keys() == original.keys()
    code_flags = {name: member._method.__code__.co_flags for name, member in adapted.items()}
    is_coroutine = 0x80
    assert all(flags & is_coroutine for flags in code_flags.values())
    assert torchstore.api.Controller is AsyncController


@pytest.mark.medium
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:is_rdma_available:DeprecationWarning")
def test_torchstore_itself_works_across_processes(cluster):
    run = cluster.meshes.run
    run(torchstore.initialize(mesh=cluster.volume_mesh, store_name="plain"))
    value = torch.arange(6.0).reshape(2, 3)
    run(torchstore.put("a.b", value, store_name="plain"))
    received = run(cluster.generator.torchstore_get.call("a.b", "plain"))
    assert [torch.equal(tensor, value) for _, tensor in received.items()] == [True, True]
    assert run(torchstore.exists("a.b", store_name="plain"))
    run(torchstore.delete("a.b", store_name="plain"))
    assert not run(torchstore.exists("a.b", store_name="plain"))
    run(torchstore.shutdown("plain"))


@pytest.mark.medium
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:is_rdma_available:DeprecationWarning")
def test_torchstore_reads_what_the_weight_store_pushed(cluster):
    run, store = cluster.meshes.run, cluster.fp32
    version, _ = cluster.push(store, "fsdp_tp")
    index, strategy = store._started()
    client = LocalClient(controller=index, strategy=strategy)
    weight = run(client.get(f"policy/v{version}/embed.weight"))
    (full,) = cluster.pull(store, "single", version, torch.float32)
    assert torch.equal(weight, full["embed.weight"])
    run(store.delete(version))
