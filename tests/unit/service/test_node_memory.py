"""The memory of a node within the limits of control groups, as systemd, Slurm, Docker and Kubernetes set them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydix.actors.observe.node_memory import available_memory, total_memory

GIB = 2**30
MEMORY, UNIFIED, HYBRID = "/sys/fs/cgroup/memory", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"
NO_LIMIT = 2**63 - 4096  # as version 1 shows it


class Node:
    """A file system with the files of a node of 64 GiB, of which 48 are free."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("/proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n")
        self.write("/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def append(self, path: str, line: str) -> None:
        file = self.root / path.lstrip("/")
        file.write_text(f"{file.read_text() if file.exists() else ''}{line}\n")

    def version_2(self, path: str, place: str = UNIFIED, top: str = "/") -> None:
        """Mount control groups of version 2, and put the process into one."""
        self.append("/proc/self/cgroup", f"0::{path}")
        self.append("/proc/self/mountinfo", f"30 22 0:26 {top} {place} rw,nosuid shared:4 - cgroup2 cgroup2 rw")

    def version_1(self, path: str, place: str = MEMORY, top: str = "/") -> None:
        """Mount the memory groups of version 1, and others, and put the process into one."""
        self.append("/proc/self/cgroup", f"11:cpu,cpuacct:/elsewhere\n9:memory:{path}\n1:name=systemd:/user.slice")
        self.append("/proc/self/mountinfo", "31 22 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct")
        self.append("/proc/self/mountinfo", f"32 22 0:28 {top} {place} rw,relatime - cgroup cgroup rw,memory")

    def group_2(
        self, path: str, limit: str | int, usage: int = 0, file_cache: int = 0, high: str | int = "max"
    ) -> None:
        """Make a control group of version 2."""
        self.write(f"{path}/memory.max", limit)
        self.write(f"{path}/memory.high", high)
        self.write(f"{path}/memory.current", usage)
        self.write(f"{path}/memory.stat", f"anon {usage}\ninactive_file {file_cache}\nactive_file 0")

    def group_1(self, path: str, limit: int, usage: int = 0, file_cache: int = 0, above: int = NO_LIMIT) -> None:
        """Make a memory group of version 1; `above` is the lowest limit from it up."""
        self.write(f"{path}/memory.limit_in_bytes", limit)
        self.write(f"{path}/memory.usage_in_bytes", usage)
        stat = f"inactive_file 0\nhierarchical_memory_limit {min(limit, above)}\ntotal_inactive_file {file_cache}"
        self.write(f"{path}/memory.stat", stat)

    @property
    def memory(self) -> tuple[float, float]:
        """The available and the total memory in GiB."""
        return available_memory(self.root) / GIB, total_memory(self.root) / GIB


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_without_control_groups_it_is_the_memory_of_the_node(node: Node) -> None:
    assert node.memory == (48, 64)


def test_a_limit_of_a_slice_of_systemd_above_the_process_is_seen(node: Node) -> None:
    node.version_2("/user.slice/user-1000.slice/session-2.scope")
    node.group_2(f"{UNIFIED}/user.slice/user-1000.slice/session-2.scope", "max", GIB)
    node.group_2(f"{UNIFIED}/user.slice/user-1000.slice", 8 * GIB, 3 * GIB, GIB)
    node.group_2(f"{UNIFIED}/user.slice", "max", 9 * GIB)

    assert node.memory == (6, 8)


@pytest.mark.parametrize("limited", ["job_7", "job_7/step_0", "job_7/step_0/user/task_0", ""])
@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_slurm_is_seen_at_each_level(node: Node, limited: str, version: int) -> None:
    base = "/slurm/uid_1000" if version == 1 else "/system.slice/slurmstepd.scope"
    path = f"{base}/job_7/step_0/user/task_0"
    place = MEMORY if version == 1 else UNIFIED
    (node.version_1 if version == 1 else node.version_2)(path)
    for end in ("", "/job_7", "/job_7/step_0", "/job_7/step_0/user", "/job_7/step_0/user/task_0"):
        has_limit = end.strip("/") == limited
        if version == 1:
            above = 16 * GIB if limited in end or not limited else NO_LIMIT
            node.group_1(f"{place}{base}{end}", 16 * GIB if has_limit else NO_LIMIT, 4 * GIB, above=above)
        else:
            node.group_2(f"{place}{base}{end}", 16 * GIB if has_limit else "max", 4 * GIB)

    assert node.memory == (12, 16)


def test_the_group_with_the_least_room_counts_not_the_one_with_the_lowest_limit(node: Node) -> None:
    """Other processes use the group above, too."""
    node.version_2("/job/mine")
    node.group_2(f"{UNIFIED}/job/mine", 8 * GIB, GIB)
    node.group_2(f"{UNIFIED}/job", 20 * GIB, 18 * GIB)

    assert node.memory == (2, 8)


def test_a_container_with_a_namespace_sees_its_own_group_as_the_root(node: Node) -> None:
    node.version_2("/")
    node.group_2(UNIFIED, 4 * GIB, GIB)

    assert node.memory == (3, 4)


def test_a_group_below_the_root_of_a_container_is_seen(node: Node) -> None:
    node.version_2("/worker")
    node.group_2(UNIFIED, 4 * GIB, GIB)
    node.group_2(f"{UNIFIED}/worker", 2 * GIB, GIB)

    assert node.memory == (1, 2)


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/worker"])
def test_a_container_without_a_namespace_has_its_group_mounted_as_the_root(node: Node, path: str) -> None:
    node.version_1(path, top="/docker/abc")
    node.group_1(MEMORY, 4 * GIB, GIB)
    if path.endswith("worker"):
        node.group_1(f"{MEMORY}/worker", NO_LIMIT, GIB, above=4 * GIB)

    assert node.memory == (3, 4)


@pytest.mark.parametrize("path", ["/../other", "/elsewhere/pod"])
def test_a_process_outside_of_the_mounted_groups_has_their_root(node: Node, path: str) -> None:
    node.version_2(path, top="/kubepods/pod")
    node.group_2(UNIFIED, 4 * GIB, GIB)

    assert node.memory == (3, 4)


def test_a_limit_above_the_mounted_root_is_seen_with_version_1(node: Node) -> None:
    node.version_1("/kubepods/pod/container", top="/kubepods/pod/container")
    node.group_1(MEMORY, NO_LIMIT, GIB, above=10 * GIB)

    assert node.memory == (9, 10)


def test_with_both_versions_the_one_that_has_memory_counts(node: Node) -> None:
    node.version_1("/job")
    node.version_2("/job", place=HYBRID)
    (node.root / HYBRID.lstrip("/") / "job").mkdir(parents=True)
    node.group_1(f"{MEMORY}/job", 4 * GIB, 2 * GIB, GIB)

    assert node.memory == (3, 4)


def test_a_limit_at_which_processes_are_slowed_down_is_one(node: Node) -> None:
    node.version_2("/app.service")
    node.group_2(f"{UNIFIED}/app.service", 8 * GIB, GIB, high=6 * GIB)

    assert node.memory == (5, 6)


def test_a_place_with_a_space_is_found_and_a_group_that_has_ended_is_passed(node: Node) -> None:
    node.version_2("/job/gone", place=r"/sys/fs/control\040groups")
    node.group_2("/sys/fs/control groups/job", 4 * GIB, GIB)

    assert node.memory == (3, 4)


def test_the_files_of_this_machine_can_be_read() -> None:
    assert 0 < available_memory() <= total_memory()
