"""What memory a process may have: read from trees that look like /proc and /sys, and once from the real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from everwarm.memory_limits import MemoryLimit, cgroup_limits, n_oom_kills, tightest_limit
from support.cgroups import real_cgroup

MB = 1_000_000
NONE_V1 = "9223372036854771712"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def tree(root: Path, cgroup: str, mounts: str, **folders: dict[str, str]) -> Path:
    """A root with what /proc/self says, and files in folders of the cgroup file system; ``__`` stands for a slash."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text("24 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)
    (root / "proc/self/statm").write_text("100 50 25 1 0 30 0\n")
    for name, files in folders.items():
        folder = root / "sys/fs/cgroup" / name.replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text + "\n")
    return root


def v2(limit: str = "max", used: int = 0, **more: str) -> dict[str, str]:
    return {"memory.max": limit, "memory.current": str(used)} | {f"memory.{key}": text for key, text in more.items()}


def v1(limit: str = NONE_V1, used: int = 0, **more: str) -> dict[str, str]:
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": str(used)}
    return files | {f"memory.{key}": text for key, text in more.items()}


def test_a_service_of_systemd_has_its_own_limit(tmp_path):
    """As with ``MemoryMax=``: the mount itself has no such file, and reading only there would find no limit."""
    folders = {"system.slice": v2(), "system.slice__ew.service": v2(str(220 * MB), 50 * MB)}
    root = tree(tmp_path, "0::/system.slice/ew.service\n", V2, **folders)
    assert not (root / "sys/fs/cgroup/memory.max").exists()
    assert cgroup_limits(root) == [MemoryLimit("the cgroup's memory.max", 220 * MB, 50 * MB)]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_limit_of_an_ancestor_holds_with_what_all_below_it_use(tmp_path, version):
    if version == "v2":
        folders = {"a": v2(str(300 * MB), 250 * MB), "a__b": v2(str(400 * MB), 10 * MB), "a__b__c": v2("max", 5 * MB)}
        root = tree(tmp_path, "0::/a/b/c\n", V2, **folders)
    else:
        folders = {"memory__a": v1(str(300 * MB), 250 * MB), "memory__a__b": v1(str(400 * MB), 10 * MB)}
        root = tree(tmp_path, "4:memory:/a/b/c\n1:cpu:/\n", V1, **folders, memory__a__b__c=v1(used=5 * MB))
    limit = tightest_limit(root)
    assert limit is not None and (limit.limit_bytes, limit.free_bytes) == (300 * MB, 50 * MB)
    assert min(each.free_bytes for each in cgroup_limits(root)[:1]) == 390 * MB, "its own alone leaves more"


def test_a_group_of_v1_that_does_not_count_its_children_limits_none_of_them(tmp_path):
    above = v1(str(10 * MB)) | {"memory.use_hierarchy": "0"}
    root = tree(tmp_path, "4:memory:/a/b\n", V1, memory__a=above, memory__a__b=v1(str(500 * MB)))
    assert [limit.limit_bytes for limit in cgroup_limits(root)] == [500 * MB]


def test_in_a_container_the_mount_is_the_cgroup(tmp_path):
    """With a namespace the path is ``/``; without, mount and path begin with the same folder, or the path is no use."""
    limited = v2(str(100 * MB))
    assert [each.limit_bytes for each in cgroup_limits(tree(tmp_path / "1", "0::/\n", V2, **{".": limited}))] == [
        100 * MB
    ]
    outside = tree(tmp_path / "2", "0::/../../other\n", V2, **{".": limited})
    assert [each.limit_bytes for each in cgroup_limits(outside)] == [100 * MB]
    mount = V1.replace(" / /sys", " /docker/abc /sys")
    bound = tree(
        tmp_path / "3", "4:cpu,memory:/docker/abc/x\n", mount, memory=v1(str(90 * MB)), memory__x=v1(str(80 * MB))
    )
    assert [each.limit_bytes for each in cgroup_limits(bound)] == [80 * MB, 90 * MB]


def test_an_ancestor_that_cannot_be_seen_is_known_to_v1(tmp_path):
    stat = f"cache 0\nhierarchical_memory_limit {70 * MB}"
    root = tree(tmp_path, "4:memory:/\n", V1, memory=v1(stat=stat))
    assert [each.limit_bytes for each in cgroup_limits(root)] == [70 * MB]


def test_memory_high_is_a_limit_too_and_no_limit_is_none(tmp_path):
    root = tree(tmp_path / "1", "0::/a\n", V2, a=v2("max", high=str(60 * MB)))
    assert [(each.name, each.limit_bytes) for each in cgroup_limits(root)] == [("the cgroup's memory.high", 60 * MB)]
    for nothing in (tree(tmp_path / "2", "0::/a\n", V2, a=v2(high="max")), tree(tmp_path / "3", "", "")):
        assert cgroup_limits(nothing) == [] and n_oom_kills(nothing) == 0
    assert cgroup_limits(tree(tmp_path / "4", "4:memory:/a\n", V1, memory__a=v1())) == []
    assert cgroup_limits(tmp_path / "nowhere") == []


def test_page_cache_is_free_and_memory_files_are_not(tmp_path):
    """The arena is shared memory: the kernel counts it as cache, but cannot take it back."""
    stat = f"anon {30 * MB}\nfile {90 * MB}\nshmem {40 * MB}\ninactive_file {20 * MB}\nactive_file {30 * MB}"
    root = tree(tmp_path, "0::/a\n", V2, a=v2(str(200 * MB), 120 * MB, stat=stat))
    assert [each.used_bytes for each in cgroup_limits(root)] == [70 * MB]


def test_a_hybrid_machine_limits_where_its_memory_controller_is(tmp_path):
    mounts = V1 + V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    root = tree(tmp_path, "4:memory:/a\n0::/a\n", mounts, memory__a=v1(str(50 * MB)), unified__a={"cgroup.procs": ""})
    assert [each.limit_bytes for each in cgroup_limits(root)] == [50 * MB]


def test_kills_are_counted_where_the_process_is(tmp_path):
    events = "low 0\nhigh 3\nmax 12\noom 2\noom_kill 2"
    own = tree(tmp_path / "1", "0::/a/b\n", V2, a=v2(events="oom_kill 9"), a__b=v2(events=events))
    assert n_oom_kills(own) == 2
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 3"
    assert n_oom_kills(tree(tmp_path / "2", "4:memory:/a\n", V1, memory__a=v1(oom_control=control))) == 3
    bare = tree(tmp_path / "3", "0::/\n", V2)
    (bare / "proc/vmstat").write_text("nr_free_pages 10\noom_kill 7\n")
    assert n_oom_kills(bare) == 7


ASK = "from everwarm.memory_limits import tightest_limit as t; limit = t(); print(limit and limit.limit_bytes)"


def test_a_real_cgroup_is_found():
    with real_cgroup(220 << 20) as group:
        enter = f"open('{group / 'cgroup.procs'}', 'w').write('0'); "
        message = subprocess.run([sys.executable, "-c", enter + ASK], capture_output=True, text=True, check=True).stdout
    assert int(message) == 220 << 20


def test_the_address_space_is_a_limit_too():
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 28, 3 << 28)); {ASK}"
    message = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=True).stdout
    assert int(message) <= 3 << 28
