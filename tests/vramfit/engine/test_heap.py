"""Freed memory is kept: the same work faults in no new pages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from vramfit.engine.heap import keep_freed_memory
import torch
if "keep" in sys.argv:
    assert keep_freed_memory()

def work():
    pieces = [torch.ones(size * 2**18) for size in (1, 64, 8, 40)]  # MiB in fp32
    return sum(float(piece[0]) for piece in pieces)

for _ in range(4):  # until the heap has its shape
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

gnu = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only GNU's C library can be told to keep memory")


def faults(*arguments: str) -> int:
    made = subprocess.run([sys.executable, "-c", FAULTS, *arguments], capture_output=True, text=True, check=True)
    return int(made.stdout.split()[-1])


@gnu
def test_kept_memory_is_not_faulted_in_again():
    # The least of three: some kernels take back what has not been used for a while.
    given_back, kept = faults(), min(faults("keep") for _ in range(3))
    pages = 4 * (64 + 40) * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert given_back >= pages  # the two large pieces come anew each time
    assert kept < pages / 20


@gnu
def test_a_users_own_setting_is_left_alone(monkeypatch):
    from vramfit.engine.heap import keep_freed_memory

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()


def test_another_c_library_is_left_alone(monkeypatch):
    from vramfit.engine import heap

    monkeypatch.setattr(heap.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not heap.keep_freed_memory()


GIVEN_BACK = """
import psutil, torch
from vramfit.engine.heap import give_back_freed_memory, keep_freed_memory
assert keep_freed_memory()
pieces = [torch.ones(2**18) for _ in range(200)]
stays = torch.ones(2**18)
del pieces
kept = psutil.Process().memory_info().rss
give_back_freed_memory()
print(kept - psutil.Process().memory_info().rss)
"""


@gnu
def test_what_is_kept_can_be_given_back():
    made = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=True)
    assert int(made.stdout.split()[-1]) > 150 * 2**20  # of 200 MiB


RETURNED = """
import sys, psutil, torch
from vramfit.engine.heap import return_freed_memory
if "return" in sys.argv:
    assert return_freed_memory()
torch.ones(7 * 2**20)  # the C library learns that pieces of 28 MiB come and go
pieces = [(torch.ones(4 * 2**18), torch.ones(2**14)) for _ in range(50)]
most = psutil.Process().memory_info().rss
stays = [small for _, small in pieces]  # between them
del pieces
print(most - psutil.Process().memory_info().rss)
"""


@gnu
def test_what_is_freed_goes_back_at_once():
    given = {
        how: int(
            subprocess.run([sys.executable, "-c", RETURNED, *how], capture_output=True, text=True).stdout.split()[-1]
        )
        for how in ((), ("return",))
    }
    assert given["return",] > 180 * 2**20  # of 200 MiB
    assert given[()] < 100 * 2**20
