"""A small lock, and changes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oracle.lock import Figure, KernelLock, Lock, Row, Waiver

HEADER: dict[str, Any] = {
    "oracle": "0.1.0",
    "command": "oracle lock",
    "seed": 0,
    "seeds": 5,
    "factor": 7.85783,
    "input_classes": 21,
    "mutants": 361,
    "cases": 24,
    "rows": 1009,
    "skips": 4,
    "shipped": False,
    "threads": 1,
    "device": "cpu",
    "hardware": "AVX512",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "triton": "3.9.0",
    "numpy": "2.4.6",
}
ROW = Row(
    cases=12,
    rows=500,
    digest="0" * 64,
    figures={"rms_e": Figure(value=0.15, spread=0.001, ceiling=0.157858), "gain": Figure(value=1e-6, spread=1e-6, ceiling=9e-6)},
)
KERNEL = KernelLock(
    verdict="accept",
    door="accuracy",
    reason="",
    against="",
    profile="default",
    suite_sha256="a" * 64,
    skipped={"no softcap": 4},
    families={"all": ROW, "gemma2": ROW},
)
REJECTED = KernelLock(
    verdict="reject", door="", reason="gain", against="", profile="quick", suite_sha256="a" * 64, skipped={}, families={}
)
LOCK = Lock(
    header=HEADER, bound={"margin_named": 1.05}, kernels={"kernel.py:attention": KERNEL, "sdpa.flash": KERNEL, "wrong": REJECTED}
)
WHAT = "kernel.kernel.py:attention.family.gemma2.rms_e_ceiling"
WAIVER = Waiver(what=WHAT, was=0.157858, now=0.2, why="a faster exp", link="https://example.org/1", expires="2026-12-31")


def with_row(row: Row, family: str = "gemma2", kernel: KernelLock = KERNEL) -> KernelLock:
    return replace(kernel, families={**kernel.families, family: row})


def with_figure(name: str, figure: Figure | None, row: Row = ROW) -> Row:
    rest = {k: v for k, v in row.figures.items() if k != name}
    return replace(row, figures=rest if figure is None else rest | {name: figure})


def with_kernel(kernel: KernelLock, lock: Lock = LOCK) -> Lock:
    return replace(lock, kernels={**lock.kernels, "kernel.py:attention": kernel})


LOOSE = with_kernel(with_row(with_figure("rms_e", Figure(value=0.15, spread=0.001, ceiling=0.2))))
