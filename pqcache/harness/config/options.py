"""The options that belong to no method and no task: the top-level keys of a command, `model.*`, `decode.*` and `launch.*`.

The keys of `method.*` and `task.*` are the fields of the dataclasses behind them (the Method class, the task's options), with
their types and defaults. Nothing is listed twice.
"""

import re
import sys
from collections.abc import Container
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pqcache.fields import Positive, Whole, added, coerce
from pqcache.outside import each

GROUPS = ("model", "method", "task", "experiment", "launch")
COMMON = ("budget", "dense_layers", "protocol", "budget_rule", "budget_of")  # of every Method, and top-level keys
DECODE = "decode"  # a node of config.yaml: DecodeOptions
LM_EVAL = "lm_eval"  # task=lm_eval task.name=<any task of lm-eval>
# Where and how much is run, not what: no part of a cell's identity.
# scale: the values that it sets are hashed themselves.
WANDB = ("wandb_project", "wandb_entity", "wandb_group", "wandb_tags")
_STORED = ("out", "wandb", *WANDB, "cache_dir", "samples", "fresh")
NOT_HASHED = (*_STORED, "limit", "shared_prefill", "scale", "batch_check", "graph", "plan")
# What begins so permits something and changes no result: it is no part of a cell's identity either.
PERMITS = "allow_"
# Of a model: where its weights are kept. No part of the identity either, as the index of a device.
PLACES = ("device_map", "max_memory")


# -- values as texts -----------------------------------------------------------------------------------------------------


# Numbers of samples and rows that were read, with the smallest and the largest that are believed.
Count = Annotated[int, 0, 1 << 40]
Amount = Annotated[float, 0, 1e15]
Percent = Annotated[float, 0, 100 + 1e-6]


def fits(value: Any, kind: Any) -> bool:
    """Whether a value that was read from JSON is of a type, and in its range: numbers are finite, none is a text."""
    try:
        return bool(coerce(value, kind) == value)
    except (TypeError, ValueError):
        return False


def misfit(values: dict[str, Any], kinds: dict[str, Any], nullable: Container[str] = ()) -> str | None:
    """The first key of a record that was read whose value is not of its type; None if all are. nullable: may be null, too."""
    return next((k for k, v in values.items() if not (v is None and k in nullable or fits(v, kinds.get(k, Any)))), None)


def show(value: Any) -> str:
    """A value the way it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(v) for v in value) + "]"
    return str(value)


def plain(value: Any) -> Any:
    """The value in types of YAML and JSON, so that a configuration read back equals the one written."""
    return each(value, lambda one: one if one is None or isinstance(one, bool | int | float | str) else str(one), str)


LONGEST_LINE = 2000  # characters


# What gives access: user:password@ of an address, a query's token or signature, a token of the hub.
SECRETS = (
    (re.compile(r"(\w://)[^\s/@]+@"), r"\1***@"),
    (re.compile(r"(?i)([?&][\w-]*(?:token|key|secret|password|signature|credential|sig)=)[^\s&#'\"]+"), r"\1***"),
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), "hf_***"),
)


def masked(text: str) -> str:
    """The text without passwords and tokens in its addresses."""
    for pattern, shown in SECRETS:
        text = pattern.sub(shown, text)
    return text


def without_secrets(value: Any) -> Any:
    """A value whose texts are `masked`, at any depth of dictionaries and lists. Tuples become lists, as in a file."""
    return each(value, lambda one: masked(one) if isinstance(one, str) else one)


def one_line(text: object) -> str:
    """A text in one printable line of at most LONGEST_LINE characters, whatever a value in it holds. Secrets are masked."""
    line = masked(" ".join(str(text).split()))
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in line)
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 100]}... ({len(line)} characters)"


@cache
def say_once(line: str) -> None:
    """Print a line on standard error, once in a process."""
    print(line, file=sys.stderr)


class Refused(Exception):
    """The command is wrong: one line per error, exit code 2, nothing was loaded."""

    def __init__(self, lines: list[str]) -> None:
        # a sweep meets the same error in every cell: say it once
        self.lines = list(dict.fromkeys(map(one_line, lines)))
        super().__init__("\n".join(self.lines))


# -- the options ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class RunOptions:
    """The top-level keys beside the groups. `make configs` writes them into configs/config.yaml."""

    # a share of the prompt in (0, 1], or a number of tokens >= 64
    budget: float | int = 0.2
    # how a budget in tokens is kept while the answer grows; null: at every step by the method's own rule, which the row names,
    # under protocol=aligned, else prompt | prompt: planned once, when the prompt ends
    budget_rule: Literal["prompt", "exact", "whole", "refreshed", "pooled", "extra"] | None = added(
        None, absent="prompt"
    )
    # what a ratio is a share of: prompt | context (of all earlier tokens, at every step)
    budget_of: Literal["prompt", "context"] = added("prompt", absent="prompt")
    # seeds the task's documents, and torch for each sample; a method's own seeds are its hyper-parameters
    seed: Annotated[int, 0, 2**32 - 1] = 0
    # documents of each sub-task: pocket has 8 of them; null: all there are
    limit: Annotated[int, 1, 100_000] | None = 20
    # the folder of everything that a run writes
    out: str = "results/runs"
    # offline | online | disabled | sync (send the rows of this command that are on disk, compute nothing); where it is not
    # typed, the environment's WANDB_MODE
    wandb: Literal["offline", "online", "disabled", "sync"] = "offline"
    # also typed as wandb.project; null: the environment's WANDB_PROJECT, or pqcache-lab
    wandb_project: str | None = None
    # also typed as wandb.entity; null: the environment's WANDB_ENTITY, or wandb's own choice
    wandb_entity: str | None = None
    # also typed as wandb.group; null: the environment's WANDB_RUN_GROUP, or <model>/<task>
    wandb_group: str | None = None
    # also typed as wandb.tags=[a,b]; null: the environment's WANDB_TAGS
    wandb_tags: list[str] | None = None
    # auto | sdpa | flash_attention_2 | standard (the whole matrix, as H2O was published)
    attn: Literal["auto", "sdpa", "flash_attention_2", "standard"] = "auto"
    # how many first layers stay dense; null: the method's own number
    dense_layers: Whole | None = None
    # feed the prompt's last question through the decode path, token by token
    question_as_decode: bool = False
    # aligned: one rule for all methods | paper: as each method's publication says | release: as its released code runs
    protocol: Literal["aligned", "paper", "release"] = "aligned"
    # true: recall, attention mass and output error of what is attended | trace: also a file for method=replay | scores: also the
    # prompt's attention scores | prompt: also the sizes of its keys and values, and the attention that each token received
    diagnostics: bool | Literal["trace", "scores", "prompt"] = False
    # any command on tiny models and inputs, to see that it runs
    smoke: bool = False
    # of an experiment with two sizes: machine (runs on a small machine) | paper (the paper's sizes)
    scale: Literal["machine", "paper"] = "machine"
    # Cells of one model and task share each prompt's dense prefill; TT2T is then measured on few samples. auto: in sweeps,
    # where memory allows it | all: those too, and the cells' decode steps are one batch; nothing is timed, and all cells have
    # the same samples at any moment
    shared_prefill: Literal["auto", "all"] | bool = "auto"
    # tokens of a prompt that are computed at a time; null: all at once | auto: as many as memory allows, a multiple of 512
    prefill_chunk: Literal["auto"] | Positive | None = added(None, absent=None)
    # with kernels=auto: auto (decode steps are recorded as a CUDA graph and replayed, where the method allows it) | off
    graph: Literal["auto", "off"] = "auto"
    # decode steps on a CUDA device: torch (its own kernels) | auto (this project's Triton kernels where they serve the method)
    kernels: Literal["torch", "auto"] = added("torch", absent="torch")
    # prompts of similar length that are answered at once; above 1 there are no times and bytes
    batch: Positive = added(1, absent=1)
    # with batch above 1: how many first samples of each sub-task are answered again alone; the row says how many differ
    batch_check: Whole = 0
    # what a sample's line keeps of its prompt: short (its hash and its last 300 characters) | full (all of it)
    samples: Literal["short", "full"] = "short"
    # do the command's cells anew; what is on disk is kept aside
    fresh: bool = False
    # print what would run, what it needs and how long it takes, and run nothing
    plan: bool = False
    # prepared method data, machine profiles
    cache_dir: str = "~/.cache/pqcache"


@dataclass(kw_only=True)
class DecodeOptions:
    """`decode.*`: how the next token is chosen."""

    # 0: the likeliest token | above 0: tokens are drawn, logits divided by it
    temperature: Annotated[float, 0, 1e6] = added(0.0, absent=0.0)
    # draw from the smallest set of likeliest tokens that has this probability
    top_p: Annotated[float, 1e-6, 1] = added(1.0, absent=1.0)
    # answers drawn per prompt; a document's score is their mean, and the row has pass@k
    samples: Annotated[int, 1, 10_000] = added(1, absent=1)


@dataclass(kw_only=True)
class ModelOptions:
    """`model.*`: which weights, and how they are run."""

    # a hub id, a local folder or a GGUF file; the embedded model has none
    path: str | None = None
    # the GGUF file to read, of a folder that holds several, or of a hub id
    gguf: str | None = added(None, absent=None)
    # branch, tag or commit on the hub; null: the newest
    revision: str | None = None
    # auto (the checkpoint's; embedded: float32; random: float16 on CUDA, else float32) | float32 | bfloat16 | float16
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # auto (cuda if there is one, else cpu) | cpu | cuda | cuda:<n> | mps
    device: str = "auto"
    # spread the weights over devices, host memory and disk: auto | balanced | balanced_low_0 | sequential | a mapping of module
    # names to cuda:<n>, cpu or disk; null: all on `device`
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict | None = None
    # of device_map: the most that a device holds, as {0: 20GiB, cpu: 60GiB}; null: what is free
    max_memory: dict | None = None
    # wrap prompts in the chat template; null: if the tokenizer has one
    chat: bool | None = None
    # a system turn before the prompt
    system: str | None = None
    # true: let the model think; what stands up to the last </think> is not scored | false: tell it not to; null: the chat
    # template decides, and all is scored
    thinking: bool | None = added(None, absent=None)
    # refuse prompts + answers beyond so many tokens; null: what the model's config says
    max_length: Positive | None = None
    # also read pickled weights (.bin), with torch's weights_only; false: safetensors alone
    allow_pickle: bool = False
    # also run weights that do not fit config.json: tensors without a place, missing or of another shape; the row counts them
    allow_mismatch: bool = False
    # of model=random: a name of pqcache.measure.geometries, a hub id or a folder
    geometry: str | None = None
    # of model=random: how many layers; null: all of the geometry's
    layers: Annotated[int, 1, 1000] | None = None


# -- where the cells run -----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class LocalLaunch:
    """This process."""

    name: ClassVar[str] = "local"

    def check(self) -> None:
        """Refuse values that have the right type. Raises a one-line ValueError."""


@dataclass(kw_only=True)
class RayLaunch:
    """Workers of a Ray cluster, or of one that is started on this machine."""

    name: ClassVar[str] = "ray"

    # local (start Ray on this machine) | auto (the cluster that this machine belongs to) | <host>:<port>
    address: str = "local"
    # processes that keep a model each; null: one for each GPU, or one where there is none
    workers: Positive | None = None
    # of each worker; null: 1 where the cluster has GPUs, else 0
    gpus_per_worker: Annotated[float, 0, 1 << 24] | None = None
    # of each worker; its threads are as many
    cpus_per_worker: Positive = 1
    # how often a unit is run again after its worker was lost
    retries: Whole = 2

    def check(self) -> None:
        """Refuse values that have the right type. Raises a one-line ValueError."""
        if self.address not in ("local", "auto") and not re.fullmatch(r"(ray://)?[^\s:/]+:\d+", self.address):
            raise ValueError(f"address={self.address}: allowed is local, auto or <host>:<port>")


@dataclass(kw_only=True)
class SlurmLaunch:
    """Array tasks of SLURM, one worker each."""

    name: ClassVar[str] = "slurm"

    # array tasks that run at once
    workers: Positive = 1
    # null: the cluster's default
    partition: str | None = None
    # null: the user's default
    account: str | None = None
    # null: the user's default
    qos: str | None = None
    # minutes that a task may run
    time: Positive = 240
    # of each worker
    gpus_per_worker: Whole = 0
    # of each worker; its threads are as many
    cpus_per_worker: Positive = 1
    # memory of each worker, as SLURM writes it (64G); null: the cluster's default
    mem: str | None = None
    # shell lines to run before a worker starts
    setup: list[str] = field(default_factory=list)
    # false: submit and end; the same command later collects what is there
    wait: bool = True
    # how often a unit is run again after its worker was lost
    retries: Whole = 2

    def check(self) -> None:
        """Refuse values that have the right type. Raises a one-line ValueError."""
        if self.mem is not None and not re.fullmatch(r"\d+[KMGT]?", self.mem):
            raise ValueError(f"mem={self.mem}: allowed is a number with K, M, G or T, or null")


Launch = LocalLaunch | RayLaunch | SlurmLaunch
LAUNCHES: dict[str, type[Launch]] = {cls.name: cls for cls in (LocalLaunch, RayLaunch, SlurmLaunch)}
