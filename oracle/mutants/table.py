"""All mutants: the gate's own exam.  Each is a kernel, `oracle.mutants.table:NAME`.

Public reports, and whole kinds of them, that a forward attention kernel of this contract cannot have stand in NOT_APPLICABLE;
faults that can change no output bit within the contract, in EQUIVALENT.
"""

from __future__ import annotations

from oracle.contract import DeclaredKernel
from oracle.mutants import (
    faults_accuracy,
    faults_batches,
    faults_calls,
    faults_masks,
    faults_memory,
    faults_options,
    faults_pages,
    faults_rare,
    faults_rows,
    faults_strides,
    faults_windows,
    planted,
)
from oracle.mutants.mutant import Mutant, table_kernel

_TABLES = (
    planted,
    faults_memory,
    faults_rows,
    faults_pages,
    faults_strides,
    faults_masks,
    faults_windows,
    faults_options,
    faults_accuracy,
    faults_calls,
    faults_batches,
    faults_rare,
)

MUTANTS: dict[str, Mutant] = {name: mutant for table in _TABLES for name, mutant in table.FAULTS.items()}
if len(MUTANTS) != sum(len(table.FAULTS) for table in _TABLES):
    raise ValueError("two mutants have the same name")

NOT_APPLICABLE: dict[str, str] = {  # kind, or report of another kind -> why it has no mutant
    "ALIB": "the contract has no ALiBi slopes",
    "EMPT-12": "live queries are finite by contract: an all-NaN query is none",
    "IOVF-01": "the offset of IOVF-02",
    "IOVF-10": "the contract has no mask tensor to index",
    "IOVF-13": "the contract has no mask tensor to index",
    "IOVF-14": "the offset of IOVF-02, in a layout without pages",
    "IOVF-17": "backward",
    "IOVF-18": "backward",
    "IOVF-20": "the contract has no mask tensor to index",
    "IOVF-21": "the contract has no table of positions",
    "IOVF-22": "the contract has no mask tensor to index",
    "IOVF-23": "a q of more than 2^31 elements: no case of a few seconds has one",
    "MASK-03": "the contract has no mask tensor to index",
    "MASK-07": "the contract has no mask tensor to drop",
    "MASK-09": "the contract has no document masks",
    "PTAB-01": "see EQUIVALENT",
    "QUAN-07": "no cause is known",
    "QUAN-22": "the contract's quantised cache is not rotated",
    "TAIL-16": "see EQUIVALENT",
}

EQUIVALENT: dict[str, str] = {  # fault -> why no output bit can change within the contract
    "v_left_of_window_times_zero (TAIL-05)": "every page of the sequence is live, so the values left of a window are finite: "
    "0 x V is 0, and adding it changes no bit",
    "v_right_of_diagonal_times_zero (TAIL-16)": "keys that the causal mask hides are live, and live inputs are finite",
    "table_row_read_past_its_end (PTAB-01)": "the ids are masked and never followed: no output bit depends on them; a guard page "
    "sees the read itself",
    "nan_query_gives_zero (EMPT-12)": "live queries are finite by contract",
}


def __getattr__(name: str) -> DeclaredKernel:
    return table_kernel(MUTANTS, __name__, name)
