"""Main memory as machine and containers tell it, from files of both kinds of cgroup."""

import os

import pytest

from vipfast import main_memory

GB = 10**9
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(main_memory, "ROOT", tmp_path)
    return tmp_path


def write(root, folder, **files):
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / folder / name.replace("__", ".")).write_text(f"{text}\n")


def meminfo(root, available, swap=0):
    lines = f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\nSwapTotal: {swap // 1024} kB\nSwapFree: {swap // 1024} kB"
    write(root, "proc", meminfo=lines)


def test_this_machine_has_some_and_more_than_is_free():
    assert 10**8 < main_memory.free_bytes() <= main_memory.total_bytes() < 2**50


def test_a_machine_without_containers_has_its_own_memory_and_swap(root):
    assert (main_memory.total_bytes(), main_memory.free_bytes()) == (MACHINE, MACHINE)  # no Linux
    meminfo(root, available=1024 * 10**6, swap=1024 * 10**5)
    assert (main_memory.total_bytes(), main_memory.free_bytes()) == (MACHINE + 1024 * 10**5, 1024 * (10**6 + 10**5))


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_counts_and_files_that_can_be_read_again_do_not(root, version):
    meminfo(root, available=1024 * 10**6)
    limit = 5 * 10**8
    if version == 2:
        stat = "anon 7\ninactive_file 100000000"
        write(root, "sys/fs/cgroup", memory__max=limit, memory__current=4 * 10**8, memory__stat=stat)
    else:
        stat = "inactive_file 5\ntotal_inactive_file 100000000"
        own = dict(memory__limit_in_bytes=limit, memory__usage_in_bytes=4 * 10**8, memory__stat=stat)
        write(root, "sys/fs/cgroup/memory", **own)
    assert (main_memory.total_bytes(), main_memory.free_bytes()) == (limit, 2 * 10**8)


@pytest.mark.parametrize("limit", ["max", 9223372036854771712])
def test_a_limit_that_is_none_does_not_count(root, limit):
    write(root, "sys/fs/cgroup", memory__max=limit, memory__current=1, memory__stat="inactive_file 0")
    assert main_memory.total_bytes() == MACHINE


def test_a_container_over_its_limit_has_nothing_free(root):
    write(root, "sys/fs/cgroup", memory__max=GB, memory__current=2 * GB, memory__stat="inactive_file 0")
    assert main_memory.free_bytes() == 0
