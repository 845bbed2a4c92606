"""What a kernel has declared that it can do: its record, and the keyword arguments it names."""

from __future__ import annotations

from dataclasses import dataclass

from oracle.cases import Case
from oracle.contract import Record
from oracle.inputs import EXTRA_NAMES, INPUT_CLASSES

MOST_INTERPRETED = 10_000  # sequences of a call that an interpreter goes through in a minute or two


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A kernel's record together with its signature: enough to say whether it can take a case."""

    record: Record
    parameters: frozenset[str]  # keyword arguments of the contract that it names
    extras: frozenset[str] = frozenset()  # case extras that it cannot do without

    def refuses(self, case: Case) -> str | None:
        """Why the kernel cannot take `case`, in a few words, or None where it can."""
        f, r = case.family, self.record
        needs = {
            "causal": not f.causal,
            "window_size": f.window != (-1, -1),
            "softcap": f.softcap != 0.0,
            "sinks": case.sinks != "none",
            "q_scale": case.scales != "none" and not case.scales.startswith("kv-"),
            "k_scale": case.scales != "none",
            "v_scale": case.scales != "none",
            "num_seqs": case.padded_seqs > 0,
        }
        for parameter, needed in needs.items():
            if needed and parameter not in self.parameters:
                return f"no {parameter}"
        if absent := self.extras - set(EXTRA_NAMES.get(case.inputs, ())):
            return f"no {min(absent)} in this input class"
        if case.inputs in EXTRA_NAMES and not self.extras:
            return f"{case.inputs} inputs are for kernels that ask for {', '.join(EXTRA_NAMES[case.inputs])}"
        if case.dtype not in r.dtypes:
            return f"no {case.dtype}"
        if case.cache_dtype and case.cache_dtype not in self.cache_dtypes:
            return f"no {case.cache_dtype} cache"
        if f.head_dim == f.head_dim_v:
            if f.head_dim not in r.head_dims:
                return f"no head dim {f.head_dim}"
        elif (f.head_dim, f.head_dim_v) not in r.uneven_head_dims:
            return f"no head dims {f.head_dim}/{f.head_dim_v}"
        if case.page_size not in r.page_sizes:
            return f"no page size {case.page_size}"
        if r.groups is not None and f.group not in r.groups:
            return f"no group of {f.group}"
        if r.interpreted and len(case.q_lens) > MOST_INTERPRETED:
            return f"{len(case.q_lens):,} sequences take an interpreter too long"
        promised = {"tiny-v": not r.precision.flush_to_zero, "logits-1e36": r.precision.subtract_first}
        if not promised.get(case.inputs, True):
            return f"no promise for {case.inputs}"
        return None

    @property
    def cache_dtypes(self) -> tuple[str, ...]:
        """8-bit cache formats: those declared, and e4m3 for a kernel without more ado that takes k_scale and v_scale."""
        declared = self.record.cache_dtypes
        if not declared and self.record == Record() and {"k_scale", "v_scale"} <= self.parameters:
            return ("e4m3",)
        return declared

    @property
    def dims(self) -> list[tuple[int, int]]:
        """Declared pairs of head_dim and head_dim_v."""
        return [*((d, d) for d in self.record.head_dims), *self.record.uneven_head_dims]

    @property
    def input_classes(self) -> list[str]:
        """Input classes that the covering array draws from: those that bring the extras, for a kernel that needs some."""
        if not self.extras:
            return list(INPUT_CLASSES)
        return [name for name, extras in EXTRA_NAMES.items() if self.extras <= set(extras)]
