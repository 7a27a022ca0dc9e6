"""`AttachedPool` and the memory it maps: let go of once the cache's process has ended, and not before."""

import gc
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
from support.processes.fresh_process import run_fresh
from torch.multiprocessing import reductions

from raydix.actors import LocalPrefixCache
from raydix.actors.client import attached_pool
from raydix.actors.client.attached_pool import AttachedPool
from raydix.actors.memory import pool_memory
from raydix.actors.memory.pool_memory import ExportedPool, open_cuda_pool, open_shared_pool
from raydix.actors.memory.pool_shapes import layout_of
from raydix.cache_core import KVPool
from raydix.schemas import CacheConfig, CacheUnavailable, PoolConfig, PoolHandle

CONFIG = CacheConfig(pool=PoolConfig.uniform(num_slots=8, num_layers=1, num_kv_heads=1, head_dim=2, device="cpu"))
SLOTS = torch.tensor([1, 2])


@pytest.fixture
def other() -> Iterator["subprocess.Popen[str]"]:
    """Another process, which has sent the path of its lock."""
    show = "from raydix.actors.transport import process_liveness as p; print(p.own_liveness_path(), flush=1); input()"
    process = subprocess.Popen([sys.executable, "-c", show], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        yield process
        process.kill()


def path_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def on_a_card(liveness_path: str | None, **fields: object) -> PoolHandle:
    """The handle of a pool on a GPU, which has no file; that its process has ended is seen by its lock alone."""
    parts = {"epoch": "e", "config": CONFIG, "device_type": "cuda", "node_id": "here", "liveness_path": liveness_path}
    parts["num_bytes"] = layout_of(CONFIG).num_bytes
    return PoolHandle.model_validate(parts | fields)


def attached(handle: PoolHandle) -> tuple[AttachedPool, "weakref.ref[torch.Tensor]"]:
    """A mapped pool, and whether its memory is still there."""
    pool = KVPool(layout_of(CONFIG))
    return AttachedPool(LocalPrefixCache(CONFIG), handle, pool), weakref.ref(pool.storage)


def test_memory_of_a_process_that_has_ended_is_let_go_of(other: "subprocess.Popen[str]") -> None:
    """On a card, too: a cache that restarts has no room for its pool as long as clients map the one of before."""
    pool, memory = attached(on_a_card(path_of(other)))

    pool.drop_if_orphaned()
    assert not pool.lost
    assert pool.gather(0, SLOTS)[0].shape == (2, 1, 2)

    other.kill()
    other.wait()
    pool.drop_if_orphaned()

    gc.collect()
    assert pool.lost and not pool.mapped and memory() is None
    with pytest.raises(CacheUnavailable, match="attach_pool again"):
        pool.gather(0, SLOTS)


@pytest.mark.parametrize("liveness_path", [None, "/proc/0/fd/0"])
def test_memory_of_a_process_that_cannot_be_seen_is_kept(liveness_path: str | None) -> None:
    """In another container, say: whether it has ended is not known."""
    pool, memory = attached(on_a_card(liveness_path))

    pool.drop_if_orphaned()

    assert pool.mapped and memory() is not None


def test_of_a_cache_without_tensors_there_is_nothing_to_map() -> None:
    assert open_cuda_pool(on_a_card(None, num_bytes=0)).numel() == 0


def test_where_no_visible_card_is_the_pools_it_cannot_be_mapped() -> None:
    with pytest.raises(OSError, match="does not see the card GPU-0"):
        open_cuda_pool(on_a_card(None, gpu_uuid="GPU-0", ipc_handle=b"handle"))


def test_where_the_pool_was_not_exported_it_cannot_be_mapped() -> None:
    with pytest.raises(OSError, match="cannot be mapped"):
        open_cuda_pool(on_a_card(None, gpu_uuid="GPU-0"))


def test_where_cuda_ipc_fails_the_pool_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does between some containers: workers copy then."""

    def fails(*arguments: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(pool_memory, "gpu_uuid_of", lambda device: "GPU-0")
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", fails)

    with pytest.raises(OSError, match="CUDA: CUDA error"):
        open_cuda_pool(on_a_card(None, gpu_uuid="GPU-0", ipc_handle=pickle.dumps((None,) * 7)))


@pytest.mark.skipif(sys.platform != "linux", reason="pools are shared on Linux")
def test_all_memory_of_a_pool_is_reserved_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_memory, "_RESERVED_BYTES", 4096)
    config = CONFIG.model_copy(update={"pool": CONFIG.pool.model_copy(update={"num_slots": 4096})})
    exported = ExportedPool(config, torch.device("cpu"), "e" * 32, "here", share=True)
    assert exported.handle.path is not None
    assert os.stat(exported.handle.path).st_blocks * 512 >= exported.layout.num_bytes

    files = len(os.listdir("/proc/self/fd"))
    reserve, calls = os.posix_fallocate, []

    def fails_once(fd: int, offset: int, length: int) -> None:
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fails_once)
    with pytest.raises(CacheUnavailable, match=r"the pool needs .* KiB with its tables of slots, but .* are free"):
        ExportedPool(config, torch.device("cpu"), "f" * 32, "here", share=True)
    assert len(os.listdir("/proc/self/fd")) == files, "the memory must be given back"


@pytest.fixture
def no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with a limit on its addresses (`ulimit -v`), where torch cannot map any more."""

    def fails(*arguments: object, **options: object) -> torch.Tensor:
        raise RuntimeError("unable to mmap 64 bytes from file: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "from_file", fails)


@pytest.mark.skipif(sys.platform != "linux", reason="pools are shared on Linux")
def test_who_has_no_addresses_for_the_pool_copies_unless_he_insists(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    exported = ExportedPool(CONFIG, torch.device("cpu"), "e" * 32, "here", share=True)
    monkeypatch.setattr(
        attached_pool, "map_pool", lambda handle: KVPool(layout_of(handle.config), storage=open_shared_pool(handle))
    )
    client, handle = LocalPrefixCache(CONFIG), exported.handle
    assert AttachedPool.attach(client, handle, None, None).mapped
    request.getfixturevalue("no_mapping")

    assert not AttachedPool.attach(client, handle, None, None).mapped
    with pytest.raises(CacheUnavailable, match="cannot be mapped from here: unable to mmap"):
        AttachedPool.attach(client, handle, None, True)


NO_ADDRESSES = """
import os, resource
import torch
from raydix.actors.memory.pool_memory import ExportedPool
from raydix.schemas import CacheConfig, CacheUnavailable, PoolConfig

config = CacheConfig(pool=PoolConfig.uniform(num_slots=2**17, num_layers=4, num_kv_heads=4, head_dim=64, device="cpu"))
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)
for share in (True, False):
    before = len(os.listdir("/proc/self/fd"))
    try:
        ExportedPool(config, torch.device("cpu"), "e" * 32, "here", share)
    except CacheUnavailable as error:
        print("num_slots" in str(error), len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pools are shared on Linux")
def test_a_pool_for_which_there_are_no_addresses_is_refused_and_leaves_no_file_open() -> None:
    done = run_fresh(NO_ADDRESSES)

    assert (done.returncode, done.stdout) == (0, "True 0\nTrue 0\n"), done.stderr
