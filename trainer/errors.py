"""Every error that `trainer` raises on purpose, below `TrainerError`.

Every class also inherits the standard exception that it refines, and can be pickled.
"""


class TrainerError(Exception):
    """Base of every error raised by this package."""


class TrainerConfigError(TrainerError, ValueError):
    """A setting is wrong. Raised before any step is made."""


class FolderInUseError(TrainerError, RuntimeError):
    """Another trainer writes into the output folder. Nothing was changed."""


class DatasetError(TrainerError, ValueError):
    """The dataset lacks a column, a split or a row that a channel needs."""


class ShapeError(TrainerError, ValueError):
    """Two tensors that must line up do not."""


class AlignmentError(TrainerError, ValueError):
    """Student and teacher positions do not name the same tokens."""


class EnvironmentFailedError(TrainerError, RuntimeError):
    """An environment server does not answer, or too many of its calls failed."""


class TrainingStoppedError(TrainerError, RuntimeError):
    """Somebody asked the run to stop. The message says how to go on."""

    exit_code = 143
    """What a command returns for it, by the signal that asked: 130 for Ctrl-C, 143 for SIGTERM."""


class DivergedError(TrainerError, ArithmeticError):
    """The loss became NaN or infinite, and so did the weights."""


class OuterLoopError(TrainerError, RuntimeError):
    """An outer round failed."""


class ObjectStoreError(OuterLoopError):
    """The object store refused a request or can't be reached. A retry may help."""


class OuterTimeoutError(OuterLoopError, TimeoutError):
    """Too few replicas answered, or none committed the round, in time."""


class ReplicaFailedError(OuterLoopError):
    """A launched replica failed. The message has its rank, exit code, and last log lines."""


class BudgetReachedError(ReplicaFailedError):
    """A start would exceed the ceiling of a launch, in dollars or hours, so it was not made."""


class PlatformUnreachableError(OuterLoopError, ConnectionError):
    """The platform that runs the replicas does not answer. They go on, and it may answer later."""


class LeaseHeldError(OuterLoopError):
    """Another launch uses the store. Nothing was started."""
