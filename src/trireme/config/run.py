"""The sections that say where and how a run happens: its directory, checkpoints, model, cluster, deadlines and
records."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from trireme.config.section import NAMES_CODE, NonNegativeInt, Section
from trireme.core.errors import CheckpointInvalid
from trireme.core.paths import names_of

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number in each dtype."""
READ_BYTES_PER_S = 100e6
"""The rate at which a model is read from a slow disk or fetched from a hub, by which a start may take longer."""
START_LIMIT = "timeouts.start_s, and the time to read the model"
"""The time limit of a start, in errors."""


def is_url(place: str) -> bool:
    """Returns True if `place` is a URL of object storage, False if it is a directory."""
    return "://" in place


def _check_name(name: str) -> str:
    """Returns `name`. Raises ValueError if it cannot be the name of a directory."""
    with suppress(CheckpointInvalid):
        if len(names_of(name)) == 1:
            return name
    raise ValueError("the name of a directory, without slashes; --run.output-dir says where it lies")


class RunConfig(Section):
    name: Annotated[str, AfterValidator(_check_name)] | None = None
    """Name of the run; none = `<env>-<model>-<8 hex>`."""
    output_dir: str = "outputs"
    """The run directory is `output_dir/name`. A URL such as s3://bucket/prefix: the run is kept there, and works in
    `local_dir/name`."""
    local_dir: str = "outputs"
    """Where runs lie on the driver's disk if output_dir is a URL, else nothing reads it; other nodes put their parts of
    checkpoints there for a while."""

    @property
    def url(self) -> str | None:
        """The URL below which runs are stored; None if runs are kept in a directory."""
        if is_url(self.output_dir):
            return self.output_dir.rstrip("/")
        return None

    @property
    def directory(self) -> str:
        """The directory on this machine in which run directories are made."""
        if self.url:
            return self.local_dir
        return self.output_dir


class ResumeConfig(Section):
    latest: bool | Literal["auto"] = False
    """Resume from the newest checkpoint that verifies; spelled `--resume`. `--resume auto`: if the run has begun, else
    start it, so that a scheduler can repeat one command; needs run.name."""
    step: Annotated[int, Field(ge=-1)] | None = None
    """Resume from the checkpoint of this step; -1 = the newest. Later checkpoints and rows move to `branches/`."""
    dir: str | None = None
    """Fork: start a new run from a checkpoint of the run in this directory, which does not change."""
    force: bool = False
    """Resume although model, tokenizer, loss or data order differ."""

    @property
    def requested(self) -> bool:
        """True if the run is to begin from a checkpoint."""
        return bool(self.latest) or self.step is not None or self.dir is not None

    def settled(self, *, begun: bool) -> ResumeConfig:
        """Returns these options with `auto` replaced. If the run has `begun`, auto means to resume it. Otherwise it
        means to start a new run, or to fork the run in `dir` if that is set."""
        if self.latest != "auto":
            return self
        if self.dir is not None and not begun:
            return self.model_copy(update={"latest": False})
        return ResumeConfig(latest=True, force=self.force)


class CheckpointConfig(Section):
    every: NonNegativeInt = 20
    """Steps between checkpoints; 0 = only at the end and on a signal."""
    keep_last: PositiveInt = 3
    """Number of newest checkpoints that are kept."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps divisible by this are kept for good."""
    async_save: bool = True
    """Continue training while a checkpoint is written."""
    grace_s: PositiveFloat = 60.0
    """SIGTERM, Ctrl-C: seconds within which the run writes a checkpoint and ends."""
    max_missed: NonNegativeInt = 3
    """Checkpoints in a row that may fail (a full disk from which nothing can be deleted) before the run stops. 0 =
    none."""


class ModelConfig(Section):
    name: str
    """A Hugging Face model: a local directory or a name on the hub."""
    tokenizer: str | None = None
    """Directory or hub name of the tokenizer; none = `model.name`."""
    facts: str | None = None
    """File with the config.json of `model.name`. A dry run plans by it where the model cannot be reached, and builds no
    environment; a start refuses it."""
    start: str | None = None
    """The model from which the run starts, as environments know it, such as an answerer that does not learn; none =
    `model.name`. `trireme eval` of a checkpoint sets it to the run's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of inference; auto = bfloat16 on GPUs, float32 on CPUs."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Dtype of logits, in the trainer and in vLLM; model = the dtype of inference, which rounds them."""
    max_seq_len: PositiveInt | None = None
    """Longest sequence (prompt and answer) in tokens; none = the model's own limit."""

    def dtype_bytes(self, *, on_gpus: bool) -> int:
        """Returns the size, in bytes, of one number in the dtype in which trainer and replicas compute."""
        if self.dtype == "auto":
            if on_gpus:
                return 2
            return 4
        return DTYPE_BYTES[self.dtype]


def _ends(ports: str) -> tuple[int, int]:
    """Returns (the first port, the last port + 1) of a text FIRST-LAST. Raises ValueError."""
    first, last = map(int, ports.split("-"))
    return first, last + 1


def _check_ports(ports: str) -> str:
    """Returns `ports`. Raises ValueError if it is no range of ports on which a user may listen."""
    with suppress(ValueError):
        first, end = _ends(ports)
        if 1024 <= first < end <= 65536:
            return ports
    raise ValueError("a range of ports between 1024 and 65535, such as 20000-20999")


class ClusterConfig(Section):
    address: str | None = Field(None, json_schema_extra=NAMES_CODE)
    """Address of a running Ray cluster; none = start one here."""
    ports: Annotated[str, AfterValidator(_check_ports)] | None = None
    """Ports of the stores where shards and replicas meet, FIRST-LAST; none = any free ones. gloo and NCCL listen on the
    kernel's ports: net.ipv4.ip_local_port_range of the nodes."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where models compute; auto = on GPUs if the cluster has any, else on CPUs."""
    variables: list[str] = Field([])
    """Further environment variables of the driver that all nodes get; variables of Hugging Face, W&B, NCCL, gloo, vLLM
    and Trireme travel anyway."""
    max_restarts: NonNegativeInt = 3
    """How often the same part of a run (a replica; the trainer, with the orchestrator; Ray itself on one machine) is
    started again after its death within restart_window_s; then a replica is left out, and any other part stops the run
    with exit code 3. 0 = never: it fails."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds in which max_restarts are counted, and after which a replica that was left out is tried again."""
    min_replicas: PositiveInt = 1
    """The run stops when it has fewer replicas that sample for training than this which are not left out."""

    @property
    def port_range(self) -> range:
        """The ports at which a run may listen; empty if any will do."""
        if self.ports:
            return range(*_ends(self.ports))
        return range(0)


class CommonTimeouts(Section):
    start_s: PositiveFloat = 600.0
    """Deadline for all rooms to start, once they have their places in the cluster; in addition they have the time in
    which the model's files are read at 100 MB/s."""
    place_s: PositiveFloat = 3600.0
    """Deadline for the cluster to have a place for each actor: at the start, and again when nodes were lost."""
    step_s: PositiveFloat = 1800.0
    """Deadline for each call of the trainer: the passes over a minibatch, an update of the weights, a publish."""
    collective_s: PositiveFloat = 600.0
    """Deadline for a collective of the trainer's shards, once all have started: how long one waits for the others."""
    checkpoint_s: PositiveFloat = 1800.0
    """Deadline for a checkpoint to be written, or read."""
    heartbeat_s: PositiveFloat = 60.0
    """A process that does not answer for this long counts as dead, and is killed."""


class TimeoutsConfig(CommonTimeouts):
    batch_s: PositiveFloat | None = None
    """Deadline for a batch of rollouts, and for an evaluation; none = four times orchestrator.generation_timeout_s (for
    a group that takes too long, and another in its place), and the time to replace a lost replica."""
    update_s: PositiveFloat = 300.0
    """Deadline for a replica to take new weights (drain: with its wait for requests in flight), and for a step of
    its engine. The run learns shorter ones: see docs/recovery.md."""


class TraceConfig(Section):
    max_mb: NonNegativeInt = 64
    """Megabytes of trace that each process writes (its work over time; `docs/seeing.md`); 0 = none."""


class RolloutsConfig(Section):
    every: NonNegativeInt = 1
    """Steps between records of rollouts, files to read in `rollouts/`; 0 = none."""
    sample: NonNegativeInt = 2
    """Groups to record at random, in addition to the step's best and its worst."""


class WandbConfig(Section):
    project: str | None = None
    """Weights & Biases project; none = off."""
    name: str | None = None
    """Name of the W&B run; none = the run's name."""
    mode: Literal["online", "offline"] = "online"
    """offline needs no account."""
    entity: str | None = None
    """W&B team or user."""
    tags: list[str] = Field([])
    """W&B tags."""


class MlflowConfig(Section):
    experiment: str | None = None
    """MLflow experiment (extra `mlflow`); none = off."""
    tracking_uri: str | None = None
    """Address of the MLflow server, without a password; none = the variable MLFLOW_TRACKING_URI."""


class TrackioConfig(Section):
    project: str | None = None
    """Trackio project (extra `trackio`); none = off."""
    space_id: str | None = None
    """A Space of the hub that shows the project, as ORG/NAME; none = Trackio's directory on this machine."""
