"""Which reasons of a verdict show that a fault was understood, by what a fault does."""

from __future__ import annotations

from oracle.verdict import Reason

WRONG = (Reason.ERROR, Reason.LSE, Reason.OPTION_IGNORED, Reason.RELATION)  # numbers
OUT = (Reason.ERROR, Reason.RELATION)
LSE = (Reason.LSE, Reason.RELATION)
NAN = (Reason.NOT_FINITE,)
WRONG_OR_NAN = (*NAN, *WRONG)
EMPTY = (Reason.EMPTY_ROW, Reason.NOT_FINITE)
TAIL = (Reason.LEAK, Reason.NOT_FINITE)  # reads past the plan that are masked
ATTENDED = (Reason.LEAK, *WRONG_OR_NAN)  # reads past the plan that are not
PAGES = (Reason.PAGE_IDS, *WRONG)
SUBTLE = (*WRONG, Reason.GAIN, Reason.TEMPERATURE, Reason.BIAS)
LATER = (Reason.LATER_CALL, Reason.NONDETERMINISTIC, Reason.LEAK, Reason.PAGE_IDS, *WRONG)
FLAKY = (Reason.NONDETERMINISTIC, Reason.LATER_CALL)
BATCH = (Reason.BATCH_VARIANT,)
CANARY = (Reason.CANARY,)
INPUTS = (Reason.INPUT_WRITTEN,)
