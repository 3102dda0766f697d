"""Every error that `replay_pipeline` raises on purpose.

A single bad call, state, or session is data: its row records it, and the report counts it. An
exception means that continuing would be wrong or would waste money. Every class also inherits the
standard exception that it refines. All of them can be pickled, because they cross process
boundaries.
"""


class ReplayPipelineError(Exception):
    """Base of every error raised by this package."""


class ConfigError(ReplayPipelineError, ValueError):
    """A setting or recipe is wrong. Raised before any work is done or money spent."""


class UntrustedError(ConfigError):
    """A key may not go to a host, or a file may not be used, until the user allows it."""


class MissingDependencyError(ReplayPipelineError, ImportError):
    """An optional package is not installed. The message names the extra that contains it."""


class StorageError(ReplayPipelineError, OSError):
    """A folder or file cannot be read or written: permissions, a full disk, a lost mount."""


class SchemaError(ReplayPipelineError, ValueError):
    """A table on disk does not have the columns of `replay_pipeline.storage.schemas`."""


class CheckFailedError(ReplayPipelineError, ValueError):
    """A blocking check found broken data, so nothing was made from it."""


class IngestError(ReplayPipelineError, ValueError):
    """A source cannot be turned into trace states."""


class ReplayError(ReplayPipelineError, RuntimeError):
    """Replaying states through teachers failed."""


class BudgetExceededError(ReplayError):
    """The next call could overrun a limit."""


class LedgerError(ReplayError):
    """The ledger cannot be opened, or contradicts itself."""


class PriceError(ReplayError, ValueError):
    """A teacher's price is unknown or too old, and the run has a ceiling in dollars."""


class TeacherError(ReplayError):
    """One teacher call failed."""


class TeacherAuthError(TeacherError, PermissionError):
    """The provider rejected the API key (401, 403)."""


class TeacherCreditError(TeacherError):
    """The key or account has no money left (402)."""


class TeacherRateLimitError(TeacherError):
    """The provider asked us to slow down (429)."""


class TeacherTimeoutError(TeacherError, TimeoutError):
    """The teacher did not answer in time. The call may have been paid for."""


class TeacherResponseError(TeacherError, ValueError):
    """The teacher's answer is not an action."""


class NormalizeError(ReplayPipelineError, RuntimeError):
    """The data-juicer recipe failed."""


class PublishError(ReplayPipelineError, RuntimeError):
    """The dataset could not be published."""


class SecretFoundError(PublishError):
    """Publishing stopped because a secret was found in the data."""


class TrainError(ReplayPipelineError, RuntimeError):
    """The trainer process failed."""
