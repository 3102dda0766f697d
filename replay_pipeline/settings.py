"""The one settings object. The only module that reads the environment."""

import contextlib
import tomllib
import zoneinfo
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from replay_pipeline.errors import ConfigError, StorageError, UntrustedError
from replay_pipeline.storage.processes import secrets_in, variables
from replay_pipeline.storage.store import Place, as_path, check_reachable
from replay_pipeline.storage.trust import check_binding, check_file
from replay_pipeline.types import (
    MIN_P_BETTER,
    PAIR_LENGTHS,
    REHEARSAL_TEACHERS,
    SAMPLE_TEACHERS,
    TEST_FRACTION,
    AgreementLevel,
    RetryPolicy,
    TeacherSpec,
)

_PlaceField = Annotated[Place, PlainValidator(as_path), PlainSerializer(str)]
"""A folder of this machine, or a URL of an object store."""

_DEFAULT_ROOT = Path("data")
_BESIDE = "settings.toml"
_MIN_SECRET = 6
"""What is shorter is no key, and would be found in innocent words."""

DEFAULT_TEACHERS: tuple[TeacherSpec, ...] = (
    TeacherSpec(name="deepseek", model="deepseek/deepseek-v4-pro", is_distillable=True),
    TeacherSpec(name="qwen", model="qwen/qwen3-coder", is_distillable=True),
    TeacherSpec(name="glm", model="z-ai/glm-4.6", is_distillable=True),
)
"""Three OpenRouter models from three vendors whose licenses allow training on their answers."""

FRONTIER_TEACHERS: tuple[TeacherSpec, ...] = (
    TeacherSpec(name="opus", model="anthropic/claude-opus-4.7", is_distillable=False),
    TeacherSpec(name="gpt", model="openai/gpt-5", is_distillable=False),
    TeacherSpec(name="deepseek", model="deepseek/deepseek-v4-pro", is_distillable=True),
)
"""Frontier models as in the method's first experiment. Two of the vendors forbid training competing
models on their outputs. To use these, you must accept that explicitly, and the dataset records
it."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class IngestSettings(_Section):
    """The sessions to read, and how to read them."""

    sources: tuple[Path, ...] = ()
    """Folders or files with sessions. If empty, this user's Claude Code folder."""
    is_redacted: bool = True
    """Replace secrets and personal data by typed placeholders."""
    is_project_hashed: bool = True
    """Keep only a hash of the project folder."""
    max_batch_bytes: Annotated[int, Field(ge=1)] = 32_000_000
    """Size of its session files at which a batch is full, in bytes."""
    max_batch_sessions: Annotated[int, Field(ge=1)] = 64
    """Number of session files at which a batch is full."""
    settle_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds without a write after which the sensor reads a file, so that it reads no half-written
    message."""
    keeps_bytes: bool = True
    """Keep the bytes of sessions, compressed and unredacted, readable only by you, because agents
    delete their logs after some weeks. They stay on this machine, under `home_dir` or the data
    root."""
    window: str = "full"
    """Windowing policy for long prefixes: `full`, `clear_tool_results:10`, `token_budget:32000`."""
    harness: Literal["auto", "neutral"] = "auto"
    """System prompt and tools for states whose log lacks them. `auto` uses what `replay-pipeline
    harness record` has recorded. `neutral` uses a short prompt of this program."""


class ReplaySettings(_Section):
    """How to ask teachers, and how much it may cost."""

    teachers: tuple[TeacherSpec, ...] = DEFAULT_TEACHERS
    """The models to ask, or the name of a list of models: `openrouter`, `frontier`, `sample`, `rehearsal`."""
    max_total_usd: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Hard ceiling on the spend of one run, in US dollars."""
    max_nightly_usd: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    """Hard ceiling on the spend of one night, in US dollars, however many runs it has."""
    max_daily_usd: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Hard ceiling on the spend of one UTC day over all runs on this ledger, in US dollars."""
    confirm_above_usd: Annotated[float, Field(ge=0)] = 1.0
    """A run whose estimate is higher asks first, or needs `--yes`."""
    max_concurrency: Annotated[int, Field(ge=1)] = 64
    """Most calls in flight at once, over all teachers."""
    ledger: str | None = None
    """Path or database URL of the ledger; by default `ledger.sqlite` under the data root.
    `REPLAY_LEDGER` sets it too. Use the variable for a URL with a password."""
    retry: RetryPolicy = RetryPolicy()
    """How often, and after how long, the program retries a call that certainly cost nothing."""
    gates: tuple[str, ...] = ("wide_first:0.1",)
    """Names of gates, which decide which teachers a run asks at which states. If empty, it asks
    every teacher at every state."""
    ask_at: Literal["consequences", "steps"] = "consequences"
    """Where to ask: where the agent changed files, ran more than a look, asked somebody, delegated, or
    ended its turn; or at every step."""
    judged_models: tuple[str, ...] = ()
    """Models that Dagster's schedule `monthly_verdicts` gives a verdict on, each for at most $2."""
    max_looks: Annotated[int, Field(ge=0)] = 3
    """How often a teacher may look or keep its notes before it acts. What it looks for is answered from the
    log and the files as they were; each look is a further, mostly cached, request."""
    looks_share: Annotated[float, Field(ge=0)] = 0.3
    """What teachers are asked after a look costs at most so much of what the first steps of a run's questions
    cost, or five cents. So a run costs at most 1.3 times as much as without looks, unless it costs a few cents.
    Who can't be asked on has no vote."""
    steps_after: Annotated[int, Field(ge=0)] = 0
    """So many steps each teacher goes on behind its vote, where `workspaces.execute` lets its actions be carried
    out. They are published in `answers` with the kind `continuation`, judged by nobody."""
    asks_incomplete: bool = False
    """Also ask at states whose prompt lacks something that the agent saw, such as an image."""
    student: TeacherSpec | None = None
    """Address and key for asking the students' own models in a control run. If empty, OpenRouter."""
    accepted_terms: tuple[str, ...] = ()
    """Models that you use although their vendor forbids distillation. The dataset records them."""
    sample_teachers: bool = False
    """Use the bundled local teacher server with the sample's recorded answers."""
    rehearsal_teachers: bool = False
    """Answer your own sessions with made-up answers, without a key and without cost. The pipeline
    marks every result as made up, and never publishes it to the Hub."""

    @model_validator(mode="before")
    @classmethod
    def _teachers_by_name(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and isinstance(choice := fields.get("teachers"), str):
            others = {name: value for name, value in fields.items() if name != "teachers"}
            return {**others, **_teachers(choice)}
        return fields


class PairSettings(_Section):
    """When teachers agree, and which pairs result."""

    agreement_threshold: Annotated[int, Field(ge=1)] = 2
    """How many model families must agree to make a consensus."""
    min_p_better: Annotated[float, Field(ge=0, le=1)] = MIN_P_BETTER
    """Make a pair of what teachers agree on if the probability that its chosen side is right and its
    rejected side is wrong is at least this; of the rest, make lessons. 0 makes pairs of all."""
    level: AgreementLevel = "effect"
    """How strictly two actions must be the same to count as one vote group."""
    include_natural: bool = True
    """Add pairs that need no teacher: branches that the user gave up, and actions that the user rejected."""
    marks: Path | None = None
    """File of marks that a review page exported. The pairs that you rejected there are left out and
    counted."""
    count_own_family: bool = False
    """Let teachers of the student's own model family vote. They tend to agree with it."""


class NormalizeSettings(_Section):
    """How to select the pairs that are fit to publish."""

    recipe: str = "agent"
    """A bundled recipe (`agent`, `default`, `tool_calls`, `strict`, `lint`, `none`) or a path to a
    YAML file."""
    executor: Literal["in_process", "default", "ray"] = "in_process"
    """Where row filters run: in this process, or in data-juicer's `ray` or `default` executor."""
    allow_operators: tuple[str, ...] = ()
    """Operators of data-juicer that recipes may use even though they run programs, load models, or
    reach the network."""
    ray_address: str = "local"
    """Address of Ray. `local` starts it on this machine. Used with `executor = "ray"`."""


class PublishSettings(_Section):
    """Where to publish the dataset, and in which form."""

    folder: _PlaceField | None = None
    """Dataset folder, or its place on an object store; by default `dataset` under the data root."""
    repo_id: str | None = None
    """Hub dataset `owner/name`. If set, and with `HF_TOKEN`, the dataset is also pushed."""
    is_private: bool = True
    """Whether a new repository is private."""
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = TEST_FRACTION
    """Share of conversations (by hash) that go to the test split. Published conversations stay in
    their split; a changed fraction applies to new ones."""
    lengths: tuple[Annotated[int, Field(ge=512)], ...] = PAIR_LENGTHS
    """Lengths in tokens to which prompts are cut. Each length is a config, such as `pairs_8k` for
    8192. A cut keeps everything that both sides need."""


class TrainSettings(_Section):
    """How to start the trainer."""

    config: Path | None = None
    """The trainer's own YAML file. By default, a bundled tiny run on the CPU."""
    model: str | None = None
    """Folder or Hub id of a pretrained model; it replaces the model in `config`. Without `config`,
    the trainer's bundled settings train it: adapters, minutes on a CPU."""
    output: Path | None = None
    """Folder on this machine for metrics, plots, and checkpoint; by default `model` under the data
    root. If the data root is on an object store, a copy goes there."""
    environment: tuple[str, ...] = ()
    """Names of more environment variables to pass to the trainer, such as `HF_TOKEN` for a base
    model that needs it. By default, the trainer gets no keys."""
    stop_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that a trainer has to save a checkpoint after a request to stop, before it is killed."""


def _is_zone(name: str) -> str:
    try:
        zoneinfo.ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"{name!r} is not a time zone such as `Europe/Berlin`") from error
    return name


class WorkspaceSettings(_Section):
    """The files behind states, and the commands that may run on copies of them."""

    repositories: tuple[Path, ...] = ()
    """Git repositories of the projects, if the folders that sessions name don't lead to them. They
    are only read."""
    execute: Literal["off", "files", "commands"] = "off"
    """What answers may do on copies of a state's files: nothing (`off`), emulated file tools
    (`files`), or also shell commands in a sandbox of bubblewrap (`commands`). Commands by which a teacher
    only looks at files run in that sandbox in any case, if it is there; `replay.max_looks = 0` runs none."""
    mounts: tuple[Path, ...] = ()
    """Folders that commands may read but not write, such as a project's dependencies. The `bin`
    folder of each is on the `PATH`."""
    checks: dict[str, str] = {}
    """For each working tree, the command that checks the project, such as `pytest -q`."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a command may take, in seconds."""
    max_memory_bytes: Annotated[int, Field(ge=1_000_000)] = 2_000_000_000
    """Memory that all processes of a command may take together."""
    max_disk_bytes: Annotated[int, Field(ge=1_000_000)] = 512_000_000
    """Largest size of the files of a command together, its copy of the tree included; they are in memory."""
    max_processes: Annotated[int, Field(ge=8)] = 128
    """Most processes that a command may have at once."""


class NightSettings(_Section):
    """When the night of Dagster begins. Dagster reads this when it loads the code location."""

    time_zone: Annotated[str, AfterValidator(_is_zone)] = "UTC"
    """Time zone of the hour below, e.g. `Europe/Berlin`."""
    replays_at: Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")] = "02:00"
    """Time at which the nightly replay of unfinished batches starts, within `replay.max_nightly_usd`.
    Publication and summary follow when all its replays have ended."""


class NotifySettings(_Section):
    """The address that is notified, and the events."""

    webhook_url: SecretStr | None = None
    """Address that gets a message when a run fails: JSON with a `text`, in the form that chat
    services accept. `REPLAY_WEBHOOK` sets it too."""
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 10.0
    """Longest wait for the webhook, in seconds."""
    is_nightly: bool = False
    """Also send the summary of each night."""

    @field_validator("webhook_url")
    @classmethod
    def _is_web_address(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(("https://", "http://")):
            raise ValueError("the address of a webhook begins with https:// or http://")
        return url


class Settings(_Section):
    """All settings of a run of the pipeline."""

    data_dir: _PlaceField = _DEFAULT_ROOT
    """The data root with all tables: a folder, or a URL such as `s3://bucket/root` or
    `gs://bucket/root`. `REPLAY_DATA` sets it too."""
    home_dir: Path | None = None
    """Folder on this machine for files that can't be on an object store: the ledger's SQLite file,
    Dagster's home, and working copies of dataset and model. By default the data root; needed with a
    data root on an object store. `REPLAY_HOME` sets it too."""
    ingest: IngestSettings = IngestSettings()
    replay: ReplaySettings = ReplaySettings()
    pairs: PairSettings = PairSettings()
    normalize: NormalizeSettings = NormalizeSettings()
    publish: PublishSettings = PublishSettings()
    train: TrainSettings = TrainSettings()
    workspaces: WorkspaceSettings = WorkspaceSettings()
    night: NightSettings = NightSettings()
    notify: NotifySettings = NotifySettings()

    @classmethod
    def load(
        cls,
        path: Place | str | None = None,
        *,
        data_dir: Place | str | None = None,
        changes: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> "Settings":
        """Read a TOML file, then apply the environment, `data_dir`, and `changes`.

        The file is `path`, else the one in `REPLAY_SETTINGS`, else a `settings.toml` in the data
        root. It must be on this machine. A file that is found in the current folder without being
        named is used only if the user trusts it. `REPLAY_DATA` is the data root, and
        `REPLAY_TEACHERS` is `sample`, `rehearsal`, `openrouter`, or `frontier`.

        Args:
            path: the settings file.
            data_dir: the data root: a folder, or a URL such as `s3://bucket/root`.
            changes: single settings, nested as in the file.
            env: the environment; by default that of the process.

        Raises:
            ConfigError: the file is missing, or a field is unknown or invalid.
            UntrustedError: the file was found in the current folder, and isn't trusted.
            StorageError: the data root is on an object store that cannot be reached.
        """
        env = variables() if env is None else env
        root = data_dir or env.get("REPLAY_DATA") or None
        root = as_path(root) if isinstance(root, str) else root
        path = path or env.get("REPLAY_SETTINGS") or None
        path = Path(path) if isinstance(path, str) else path  # a file of this machine
        try:
            text = _found_settings(root, env) if path is None else path.read_bytes()
            path = path or (root or _DEFAULT_ROOT) / _BESIDE
            fields: dict[str, Any] = tomllib.loads(text.decode())
            if root is not None:
                fields["data_dir"] = root
            if home := env.get("REPLAY_HOME"):
                fields["home_dir"] = home
            if ledger := env.get("REPLAY_LEDGER"):
                fields = _merged(fields, {"replay": {"ledger": ledger}})
            if choice := env.get("REPLAY_TEACHERS"):
                fields = _merged(fields, {"replay": _teachers(choice)})
            if url := env.get("REPLAY_WEBHOOK"):
                fields = _merged(fields, {"notify": {"webhook_url": url}})
            return cls.model_validate(_merged(fields, changes or {}))
        except ValidationError as error:
            what = "; ".join(
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
            )
            is_told = all(_has(changes or {}, item["loc"]) for item in error.errors())
            raise ConfigError(f"{'the command line' if is_told else path}: {what}") from error
        except (ConfigError, StorageError):
            raise
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: no such settings file") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error

    def teachers(self) -> tuple[TeacherSpec, ...]:
        """Return the models to ask: those in the settings, or recorded or made-up ones."""
        played = {"sample": SAMPLE_TEACHERS, "rehearsal": REHEARSAL_TEACHERS}
        return played.get(self.played or "", self.replay.teachers)

    @property
    def played(self) -> Literal["sample", "rehearsal"] | None:
        """Return the name of the recorded or made-up teachers, or None for real ones."""
        if self.replay.rehearsal_teachers:
            return "rehearsal"
        return "sample" if self.replay.sample_teachers else None

    def ledger_url(self) -> str:
        """Return the path or URL of the ledger. Recorded and made-up answers have their own ledger."""
        name = f"{self.played}-ledger.sqlite" if self.played else "ledger.sqlite"
        return self.replay.ledger or str(self.local_dir() / name)

    def local_dir(self) -> Path:
        """Return the folder for files that must be on this machine.

        Raises:
            ConfigError: the data root is on an object store, and the settings name no such folder.
        """
        if self.home_dir is not None:
            return self.home_dir
        if isinstance(self.data_dir, Path):
            return self.data_dir
        raise ConfigError(
            f"{self.data_dir} is not a folder of this machine: the SQLite ledger, Dagster's home and "
            "the trainer's files need one. Set REPLAY_HOME (or `home_dir`) to a folder that is "
            "kept; without such a folder, put the ledger on PostgreSQL (`replay.ledger`)"
        )

    def dataset_dir(self) -> Place:
        """Return the place of the published dataset: a folder, or its URL on an object store."""
        return self.publish.folder or self.data_dir / "dataset"

    def model_dir(self) -> Place:
        """Return the place of the trained model: a folder, or its URL on an object store."""
        return self.train.output or self.data_dir / "model"

    def training_dir(self) -> Path:
        """Return the local folder that the trainer writes to."""
        return self.train.output or self.local_dir() / "model"

    def kept_dir(self) -> Path | None:
        """Return the local folder for the bytes of sessions, or None if they aren't kept."""
        # Unredacted logs never go to an object store.
        is_here = self.home_dir is not None or isinstance(self.data_dir, Path)
        return self.local_dir() / "sources" if self.ingest.keeps_bytes and is_here else None

    def secrets(self) -> list[str]:
        """Return the keys and passwords of the environment, longest first. They stay on this machine.

        These are the teachers' keys, the values of variables with telling names, and passwords in
        URLs.
        """
        teachers = [*self.replay.teachers, *filter(None, [self.replay.student])]
        named = {teacher.api_key_env for teacher in teachers if teacher.api_key_env}
        found = secrets_in([*variables().items(), ("", self.replay.ledger or "")])
        found |= {value.strip() for name, value in variables().items() if name in named}
        for name in named:
            with contextlib.suppress(ConfigError):  # no key at all
                found.add(cast("SecretStr", api_key(name)).get_secret_value())
        if self.notify.webhook_url is not None:
            found.add(self.notify.webhook_url.get_secret_value())
        return sorted((each for each in found if len(each) >= _MIN_SECRET), key=len, reverse=True)


def _found_settings(root: Place | None, env: Mapping[str, str]) -> bytes:
    """Read the settings file that nobody named; nothing where there is none.

    Raises:
        UntrustedError: the file is not on this machine, or is not trusted.
    """
    beside = (root or _DEFAULT_ROOT) / _BESIDE
    check_reachable(root or _DEFAULT_ROOT)
    if not beside.exists():
        return b""
    if not isinstance(beside, Path):
        raise UntrustedError(
            f"{beside}: settings are read only from files on this machine, because anyone who can write to a store could name teachers and keys. Copy the file to this machine, and name it in REPLAY_SETTINGS"
        )
    data = beside.read_bytes()
    here = Path.cwd()
    # By the name and by what it leads to: a link may lead into the folder or out of it.
    is_here = any(place.is_relative_to(here) for place in (beside.absolute(), beside.resolve()))
    if root is None or is_here:
        check_file(beside, data, folder=config_dir(env))
    return data


def config_dir(env: Mapping[str, str] | None = None) -> Path:
    """Return this user's configuration folder: `REPLAY_CONFIG_DIR`, or the platform's own.

    Raises:
        ConfigError: the variable that names it isn't an absolute path.
    """
    env = variables() if env is None else env
    folder = Path(env.get("REPLAY_CONFIG_DIR") or typer.get_app_dir("replay-pipeline"))
    if not folder.is_absolute():
        raise ConfigError(
            f"REPLAY_CONFIG_DIR (or XDG_CONFIG_HOME) is {folder}: it must be an absolute path, so that it names the same folder wherever you start the program"
        )
    return folder


def _has(changes: Any, place: Sequence[int | str]) -> bool:
    """Return whether changes hold what stands at a place, or begin below which it stands."""
    for name in place:
        if not isinstance(changes, Mapping):
            return True
        if name not in changes:
            return False
        changes = changes[name]
    return True


def _merged(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for key, value in changes.items():
        old = merged.get(key)
        is_section = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(old, value) if is_section else value
    return merged


def _teachers(choice: str) -> dict[str, Any]:
    named: dict[str, dict[str, Any]] = {
        "sample": {"teachers": SAMPLE_TEACHERS, "sample_teachers": True},
        "rehearsal": {"rehearsal_teachers": True},
        "openrouter": {"teachers": DEFAULT_TEACHERS},
        "frontier": {"teachers": FRONTIER_TEACHERS},
    }
    if choice not in named:
        raise ConfigError(
            f"teachers={choice!r} is not one of {', '.join(named)}; list other models "
            "in the settings file"
        )
    return {"sample_teachers": False, "rehearsal_teachers": False, **named[choice]}


def api_key(name: str | None) -> SecretStr | None:
    """Return the key in the environment variable `name`, or None if `name` is None or empty.

    If the variable isn't set, `<name>_FILE` may name a file with the key, such as a mounted secret
    of a container. Only its owner may be able to read it.

    Raises:
        ConfigError: there is no key, or others may read its file.
    """
    if not name:
        return None
    value = variables().get(name, "").strip()
    if not value and (path := variables().get(f"{name}_FILE")):
        value = _private_text(Path(path), variable=f"{name}_FILE")
    if not value:
        raise ConfigError(
            f"{name} is not set: export it, name a file with it in {name}_FILE, or choose a "
            "teacher without a key"
        )
    return SecretStr(value)


def key_for(name: str | None, base_url: str) -> SecretStr | None:
    """Return the key in the environment variable `name`, if it may be sent to `base_url`.

    Raises:
        UntrustedError: the key is not bound to that host.
        ConfigError: there is no key, or others may read its file.
    """
    if name:
        check_binding(name, base_url, folder=config_dir())
    return api_key(name)


def teacher_key(teacher: TeacherSpec) -> SecretStr | None:
    """Return the key of `teacher`, if its host may have it: the key is bound to the host, or the program names both.

    Raises:
        UntrustedError: the key is not bound to that host.
        ConfigError: there is no key, or others may read its file.
    """
    # The default key is the default of a teacher, too: nobody has said that another host gets it.
    if teacher.names_its_key and teacher.api_key_env != "OPENROUTER_API_KEY":
        return api_key(teacher.api_key_env)
    return key_for(teacher.api_key_env, teacher.base_url)


def _private_text(path: Path, *, variable: str) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{variable}: {path} cannot be read ({error})") from error
    if mode & 0o077:
        raise ConfigError(
            f"{variable}: {path} may be read by others (mode {mode & 0o777:04o}): chmod 600 {path}"
        )
    if len(text.split()) != 1:
        raise ConfigError(f"{variable}: {path} should hold the key and nothing else")
    return text


def redaction_salt() -> str:
    """Return the salt that makes placeholders of secrets unguessable outside this installation (`REPLAY_SALT`)."""
    return variables().get("REPLAY_SALT", "")


DAGSTER_DATABASE = "REPLAY_DAGSTER_DB"
"""The variable that holds the URL of Dagster's PostgreSQL database, with its password. Dagster reads
it by itself, so that no file has the password."""


def has_dagster_database() -> bool:
    """Return whether Dagster keeps its records on a PostgreSQL server.

    Raises:
        ConfigError: the URL does not name the driver that Dagster's storage works with.
    """
    url = variables().get(DAGSTER_DATABASE, "")
    if url and not url.startswith("postgresql+psycopg2://"):
        raise ConfigError(
            f"{DAGSTER_DATABASE} has to begin with postgresql+psycopg2:// : Dagster's storage "
            "works with that driver only"
        )
    return bool(url)
