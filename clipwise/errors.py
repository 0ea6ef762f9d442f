"""What clipwise refuses. Every message says what, why it matters, and what to do."""

from __future__ import annotations


class ClipwiseError(Exception):
    """The base of all refusals: catch this to catch them all."""


class UnsupportedOp(ClipwiseError):
    """A trainable parameter enters an op whose per-example gradient the engine does not know."""


class CrossExampleOp(ClipwiseError):
    """One example's loss depends on another example, so no bound on one example's influence holds."""


class LossShape(ClipwiseError):
    """The loss is not one number per example."""


class BatchShape(ClipwiseError):
    """A batch is not a tree of tensors that all have the examples as their first axis."""


class ChangedInput(ClipwiseError):
    """A recorded input was changed in place between the forward pass and its use."""


class UnrecordedGradient(ClipwiseError):
    """A gradient reaches a parameter by a way that was not recorded, so it was not clipped."""


class ParameterMismatch(ClipwiseError):
    """Model, optimizer and plan do not agree on what is trained."""


class BudgetExhausted(ClipwiseError):
    """One more step would spend more than the plan allows."""


class PlanMismatch(ClipwiseError):
    """A ledger was written for another plan."""


class LedgerError(ClipwiseError):
    """The ledger cannot be read, trusted, locked or written; nothing is released without it."""


class CheckpointError(ClipwiseError):
    """A checkpoint is damaged, is none, or does not fit the run."""


class WrongBatch(ClipwiseError):
    """A batch did not come from `training.batches`, or was used before: it cannot be accounted as Poisson."""


class WrongOrder(ClipwiseError):
    """record, backward and release were called in an order that would clip, charge or noise wrongly."""


class PrivateData(ClipwiseError):
    """Something would look at private records without paying for it."""


class MissingExtra(ClipwiseError, ImportError):
    """A package that this part needs is not installed."""


class RankFailed(ClipwiseError):
    """Another process of the run failed, so that this one cannot go on."""


class CannotCertify(ClipwiseError):
    """What was asked for is an estimate, not a guarantee."""


class TuningFailed(ClipwiseError):
    """A search gave no winner; it is charged all the same."""
