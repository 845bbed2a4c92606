"""The candidate runs in a process of its own, and nothing that it does there reaches the judging."""

from oracle.isolation.locate import KernelNotFound, locate
from oracle.isolation.outcome import Description, Failure, FailureKind, Returned
from oracle.isolation.process import KernelProcess

__all__ = ["Description", "Failure", "FailureKind", "KernelNotFound", "KernelProcess", "Returned", "locate"]
