"""The policy's keys, their meaning and their defaults, in one place.

A default is given as one would write it in the YAML file, and is read like any value. Readers of values raise
ValueError with what is wrong and what to write.

The JSON Schema is made from the model, for editors and for checks without jurymast. It has the names, forms
and ranges of values. `policy check` finds more mistakes, such as durations that must not be 0 and circles of
`extends`, and explains them better.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from jurymast import tracker
from jurymast.core.judges.cadence import Cadence, parse_cadence
from jurymast.core.state.settings import NOTICES, Budget, Price
from jurymast.core.state.texts import DURATION, did_you_mean, seconds_in
from jurymast.reference import installed, thresholds, xids

# Far below what the clocks of Python and of the system can count.
LONGEST_S = 100 * 365 * 86400.0
PORT_MAX = 65535
PRICE = r"(\d{1,9}(?:\.\d{1,9})?) ([A-Z]{3})"
_NUMBER = re.compile(r"[-+]?(?!0\d)[\d.]+")


def read_duration(value: object) -> float:
    """The seconds of "0.5s", "10m", "1h30m" or "24h"."""
    seconds = seconds_in(value) if isinstance(value, str) else None
    if seconds is not None and seconds > LONGEST_S:
        raise ValueError(f"{written(value)} is longer than a hundred years")
    if seconds is None:
        raise ValueError(
            f"{written(value)} is not a duration; write a number with a unit, like 0.5s, 10m, 1h30m or 2d"
        )
    return seconds


def read_positive_duration(value: object) -> float:
    seconds = read_duration(value)
    if seconds <= 0:
        raise ValueError("must be longer than 0")
    return seconds


def read_whole_number(value: object, *, least: int = 0) -> int:
    """A whole number of at least `least`; YAML's true and false are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{written(value)} is not a whole number")
    if value < least:
        raise ValueError(f"must be at least {least}")
    return value


def read_one_or_more(value: object) -> int:
    return read_whole_number(value, least=1)


def read_port(value: object) -> int:
    port = read_one_or_more(value)
    if port > PORT_MAX:
        raise ValueError(f"must be at most {PORT_MAX}")
    return port


def read_budget(value: object) -> Budget:
    """A restart budget, like "3 per 1h"."""
    match = re.fullmatch(r"\s*(\d+)\s+(?:per|in)\s+(\S.*)", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            f"{written(value)} is not a restart budget; write unlimited, or a number per time, like 3 per 1h"
        )
    return Budget(count=int(match[1]), window_s=read_positive_duration(match[2]))


def read_cadence(value: object) -> Cadence:
    """A cadence: "auto", "200 steps" or "10m"."""
    try:
        if isinstance(value, str) and not value.strip().isdigit():  # a writer may mean 200 seconds by 200
            return parse_cadence(value)
    except ValueError:
        pass
    raise ValueError(
        f"{written(value)} is not a cadence; write auto, a number of steps (200 steps) or a time (10m)"
    )


def read_fraction(value: object) -> float:
    """A share between 0 and 1: "2%" or 0.02."""
    text = value.strip() if isinstance(value, str) else ""
    if re.fullmatch(r"\d+(?:\.\d+)?%", text):
        share = float(text[:-1]) / 100
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        share = float(value)
    else:
        raise ValueError(f"{written(value)} is not a share; write a percentage, like 2%")
    if not 0 <= share <= 1:
        raise ValueError("must be between 0% and 100%")
    return share


def read_on_or_off(value: object) -> bool:
    """Whether a switch is on; YAML reads both words as true and false."""
    if isinstance(value, bool):
        return value
    if value in ("on", "off"):
        return value == "on"
    raise ValueError(f"{written(value)} is neither on nor off")


def read_factor(value: object) -> float:
    """A factor above 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 < value < math.inf:
        raise ValueError(f"{written(value)} is not a factor; write off, or a number above 1, like 1.5")
    return float(value)


def read_rate(value: object) -> float:
    """Failures per 1,000 node-days."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(
            f"{written(value)} is not a failure rate; write auto, or failures per 1,000 node-days, like 6.5"
        )
    return float(value)


def read_price(value: object) -> Price:
    """What a GPU costs for an hour: "2.10 USD"."""
    match = re.fullmatch(PRICE, value) if isinstance(value, str) else None
    if match is None or not 0 < float(match[1]) < math.inf:
        raise ValueError(
            f"{written(value)} is not a price; write off, or what a GPU costs for an hour, like 2.10 USD, "
            "with the currency's three letters"
        )
    return Price(gpu_hour=float(match[1]), currency=match[2])


def read_xid_code(value: str) -> str:
    """A code of the packaged Xid table, as text."""
    codes = [str(code) for code in xids()]
    if value not in codes:
        raise ValueError(
            f"{written(value)} is not an Xid code that this version knows{did_you_mean(value, codes)}; "
            f"known codes: {', '.join(codes)}"
        )
    return value


def read_threshold_name(value: str) -> str:
    if value not in thresholds():
        raise ValueError(
            f"there is no threshold {written(value)}{did_you_mean(value, thresholds())}; "
            "jurymast health --thresholds lists them"
        )
    return value


def read_probe_name(value: str) -> str:
    if value not in (names := installed()):
        raise ValueError(
            f"there is no probe {written(value)}{did_you_mean(value, names)}; "
            f"installed: {', '.join(names) or 'none'}"
        )
    return value


def read_tracker_name(value: str) -> str:
    try:
        tracker.load(value)
    except Exception as error:  # others' code
        raise ValueError(f"{written(value)} cannot be used: {error}") from error
    return value


def is_address(url: str) -> bool:
    from apprise import Apprise  # takes a while, and few policies have one

    return bool(Apprise.instantiate(url))


def written(value: object) -> str:
    """`value` as written in a YAML file, cut short; text that would be read as something else has quotes."""
    if value is None:
        return "nothing"
    if isinstance(value, str) and (not value.strip() or _NUMBER.fullmatch(value)):
        return f'"{value[:60]}"'
    return (str(value).lower() if isinstance(value, bool) else str(value))[:60]


# How each kind of value is written, for the JSON Schema: what its reader in `values` accepts.
_TIME: dict[str, Any] = {"type": "string", "pattern": DURATION}
_AUTO: dict[str, Any] = {"const": "auto"}
# YAML 1.1 reads off as false, an editor that knows YAML 1.2 as a word.
_OFF: dict[str, Any] = {"enum": [False, "off"]}
_ON: dict[str, Any] = {"enum": [True, "on"]}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_ONE_OR_MORE: dict[str, Any] = {"type": "integer", "minimum": 1}


class _Written:
    """How a value is written: as one of `words`, which stand for their values, or as `read` accepts it. In
    JSON Schema, `forms` say the latter."""

    def __init__(self, read: Callable[[object], Any], *forms: dict[str, Any], **words: Any) -> None:
        self._read, self._words = read, words
        self._forms = [*(_OFF if word == "off" else {"const": word} for word in words), *forms]

    def _value(self, value: object) -> Any:
        word = "off" if value in (False, "off") else value
        return self._words[word] if isinstance(word, str) and word in self._words else self._read(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._value, handler(source))

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**self._forms[0]} if len(self._forms) == 1 else {"anyOf": self._forms}


class _Switch(_Written):
    """A tier that may be switched as a whole: `off`, and `on` or nothing, which mean all its defaults, if
    nothing else has to be given."""

    def __init__(self, *forms: dict[str, Any]) -> None:
        self._forms = [*forms]

    def _value(self, value: object) -> object:
        if value in (False, "off"):
            return None
        return {} if value in (None, True, "on") else value

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), *self._forms]}


Duration = Annotated[float, _Written(read_positive_duration, _TIME)]
AutoDuration = Annotated[float | None, _Written(read_positive_duration, _TIME, auto=None)]
AutoOffDuration = Annotated[float | None, _Written(read_positive_duration, _TIME, auto=None, off=0.0)]
Count = Annotated[int, _Written(read_whole_number, _COUNT)]
OneOrMore = Annotated[int, _Written(read_one_or_more, _ONE_OR_MORE)]
OnOff = Annotated[bool, _Written(read_on_or_off, _ON, _OFF)]
XidCode = Annotated[str, AfterValidator(read_xid_code)]
ProbeName = Annotated[str, AfterValidator(read_probe_name)]
TrackerName = Annotated[str, AfterValidator(read_tracker_name)]
ThresholdName = Annotated[str, AfterValidator(read_threshold_name)]
Restarts = Annotated[
    Budget,
    _Written(
        read_budget,
        {"type": "string", "pattern": r"^\s*\d+\s+(per|in)\s+\S.*$", "examples": ["3 per 1h"]},
        unlimited=Budget(),
    ),
]


def _key(default: Any, description: str) -> Any:
    """A key with its default as written, which pydantic converts to the field's type."""
    return Field(default, description=description)


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, arbitrary_types_allowed=True
    )


class Detect(Section):
    heartbeat: Duration = _key("0.5s", "how often each node's agent reports")
    node_lost_after: AutoDuration = _key("auto", "silence after which a node counts as lost")
    hang: AutoOffDuration = _key("auto", "time without a step after which ranks count as hung, or off")
    start_within: Duration = _key("30m", "time to the first step of an attempt")
    join_within: Duration = _key("5m", "time for all nodes' agents to report after the job starts")


class Memory(Section):
    pass


class Peer(Section):
    copies: OneOrMore = _key(1, "copies of each shard on other nodes")
    prefer: Literal["spares", "any"] = _key("spares", "whose memory holds them first")


class Local(Section):
    path: str = Field(min_length=1, description="a directory on each node's own disk")


class Shared(Section):
    every: AutoDuration = _key("auto", "least time between copies to the shared storage")
    keep: OneOrMore = _key(3, "newest checkpoints kept; pinned ones are kept as well")


class Object(Section):
    url: str = Field(
        pattern=r"^[a-z][a-z0-9+.-]*://.+", examples=["s3://bucket/prefix"], description="an fsspec address"
    )
    every: Duration = _key("6h", "time between copies")
    keep: OneOrMore = _key(3, "newest checkpoints kept there; pinned ones are kept as well")


class Tiers(Section):
    memory: Annotated[Memory | None, _Switch(_ON, _OFF)] = _key({}, "memory of the rank's own node, or off")
    peer: Annotated[Peer | None, _Switch(_ON, _OFF)] = _key({}, "memory of another node, or off")
    local: Annotated[Local | None, _Switch(_OFF)] = _key(False, "the node's own disk")
    shared: Annotated[Shared, BeforeValidator(lambda value: {} if value is None else value)] = _key(
        {}, "the run directory's storage; always on"
    )
    object: Annotated[Object | None, _Switch(_OFF)] = _key(False, "an object store")


class Checkpoint(Section):
    cadence: Annotated[
        Any,
        _Written(
            read_cadence,
            _AUTO,
            _TIME,
            {"type": "string", "pattern": r"^\s*\d+\s*steps?\s*$", "examples": ["200 steps"]},
        ),
    ] = _key("auto", 'how often to save: auto, "200 steps", "10m"')
    max_loss: Duration = _key(
        "15m",
        "most training that a failure may cost while a copy in memory survives; limits automatic intervals",
    )
    tiers: Tiers = _key({}, "where checkpoints are kept")


class RestartBudgets(Section):
    infrastructure: Restarts = _key("unlimited", "restarts for lost and bad nodes")
    application: Restarts = _key("3 per 1h", "restarts for failures of the script itself")
    preemption: Restarts = _key("unlimited", "restarts after Slurm preempted the job, which is no failure")


class Failures(Section):
    rate: Annotated[
        float | None, _Written(read_rate, {"type": "number", "exclusiveMinimum": 0}, auto=None)
    ] = _key("auto", "failures per 1,000 node-days, if known")
    half_life: Duration = _key("14d", "age at which a past failure counts half in the failure rate")
    burst: Duration = _key("10m", "failures this close together count as one")
    restarts: RestartBudgets = _key({}, "restart budgets: how many restarts in how much time")
    requeues: Annotated[int | None, _Written(read_whole_number, _COUNT, unlimited=None)] = _key(
        "unlimited", "how often the Slurm job may be requeued, not counting preemptions"
    )
    at_time_limit: Literal["stop", "requeue"] = _key(
        "stop",
        "at the Slurm job's time limit; requeue: shortly before it, so that the run has all its time again",
    )
    attempts_without_step: Annotated[int | None, _Written(read_whole_number, _COUNT, unlimited=None)] = _key(
        20,
        "attempts in a row without a new step, whatever ends them, after which the run stops; twice as "
        "many if lost nodes alone end them, and it may be chance",
    )
    stop_grace: Duration = _key(
        "1s", "time from SIGTERM to SIGKILL when ranks are stopped; torchrun waits 30 s"
    )


class Health(Section):
    skip: list[ProbeName] = _key(
        [], "names of probes that do not run: nvidia, amd, infiniband, host, storage"
    )
    xid: dict[XidCode, Literal["ok", "suspect", "bad", "application", "sympathetic"]] = _key(
        {}, "your own classification of NVIDIA's Xid codes; jurymast health --explain XID shows the default"
    )
    thresholds: dict[ThresholdName, float] = _key(
        {}, "your own limits; jurymast health --thresholds lists all"
    )
    data: list[str] = _key([], "paths of training data that every node must be able to read")
    preflight: AutoOffDuration = _key(
        "auto", "time for tests of nodes before their first attempt: auto (with GPUs only), off, or how long"
    )
    straggler: Annotated[float, _Written(read_factor, {"type": "number", "exclusiveMinimum": 1}, off=0.0)] = (
        _key(1.5, "swap out a rank that stays this many times slower than the others, or off")
    )
    workaround: OnOff = _key(True, "on: ranks avoid a failing network device if the node has another one")


class NodesPolicy(Section):
    bad: Literal["exclude", "drain", "report"] = _key("exclude", "what happens to a bad node")
    max_fraction: Annotated[
        float,
        _Written(
            read_fraction,
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "string", "pattern": r"^\d+(?:\.\d+)?%$", "examples": ["2%"]},
        ),
    ] = _key("2%", "largest share of the run's nodes that may be blamed at a time; one node always may")
    expire: Duration = _key("24h", "time after which an exclusion ends")
    together: Duration = _key(
        "3m",
        "the same fault on many nodes within this time blames no node; Slurm gets a bad node back after it",
    )
    spool: str = _key(
        "/var/spool/jurymast",
        "with drain: the directory in which the site's health check finds reports of bad nodes",
    )
    refill: OnOff = _key(
        False,
        "on: a small Slurm job brings a node in place of each that the run loses",
    )
    hold: Duration = _key(
        "10m",
        "with refill: how long a run without a spare holds its nodes for another, before it is requeued "
        "or goes on with fewer",
    )


class Nodes(Section):
    min: Annotated[int, _Written(read_one_or_more, _ONE_OR_MORE, off=0)] = _key(
        False,
        "with so many nodes the run goes on if others are lacking; it takes in what comes later",
    )
    batch: Literal["global", "local"] = _key(
        "global", "with min: which batch of a step is kept, that of all ranks or that of each one"
    )


class Pool(Section):
    directory: str = _key(
        "", "a directory on shared storage, for you alone, in which nodes tell that they wait"
    )
    nodes: Annotated[int, _Written(read_one_or_more, _ONE_OR_MORE, off=0)] = _key(
        False, "with refill: how many nodes wait in jobs of their own for any run with the same directory"
    )
    idle: Duration = _key("10m", "time without a run, after which these jobs end")

    @model_validator(mode="after")
    def absolute(self) -> Pool:
        if self.directory and not self.directory.startswith("/"):
            raise ValueError(f"{written(self.directory)} is not an absolute path")
        return self


class Network(Section):
    encrypt: OnOff = _key(False, "on: images are encrypted between nodes")


_KINDS = {"enum": [*NOTICES]}


class Notified(Section):
    when: Annotated[
        list[Literal["incident", "spare", "alert", "stopped", "finished"]],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        WithJsonSchema({"anyOf": [_KINDS, {"type": "array", "items": _KINDS}]}),
    ] = _key(
        [*NOTICES], "what is told: an incident, a spare that is used, what people must decide, the run's end"
    )
    command: list[str] = _key([], "a program and its arguments; it gets the notice as JSON on its input")
    url: str = Field("", description="an address of Apprise: Slack, Teams, ntfy, e-mail and many others")

    @model_validator(mode="after")
    def one_way(self) -> Notified:
        if bool(self.command) == bool(self.url):
            raise ValueError("needs either a command or a url")
        if self.url and find_spec("apprise") is None:
            raise ValueError("a url needs Apprise: pip install 'jurymast[notify]'")
        if self.url and not is_address(self.url):
            raise ValueError("Apprise knows no such url; it begins with a service: slack://, mailto://")
        if not self.when:
            raise ValueError(f"when names nothing, so nobody is told; there is {', '.join(NOTICES)}")
        return self


class Metrics(Section):
    socket: OnOff = _key(False, "on: at `metrics.sock` in the run directory, for the run's user")
    port: Annotated[
        int | None,
        _Written(read_port, {"type": "integer", "minimum": 1, "maximum": PORT_MAX}, off=None, any=0),
    ] = _key(False, "at this TCP port of the supervisor's node, or any free one, to whoever has the token")
    token: str = _key(
        "", "a file with that token, which only you can read; without it `metrics.token` in the run directory"
    )
    textfile: str = _key("", "as a file in this directory of node exporter's textfile collector")
    trackers: list[TrackerName] = _key(
        [], "plugins that write them by step, beside the training's own: tensorboard, mlflow, wandb"
    )

    @model_validator(mode="after")
    def usable(self) -> Metrics:
        if self.token and self.port is None:
            raise ValueError("a token is for a port, and there is none")
        for path in (self.token, self.textfile):
            if path and not path.startswith("/"):
                raise ValueError(f"{written(path)} is not an absolute path")
        if (self.socket or self.port is not None or self.textfile) and find_spec("prometheus_client") is None:
            raise ValueError("metrics need prometheus_client: pip install 'jurymast[metrics]'")
        return self


class Policy(Section):
    spares: Annotated[int | None, _Written(read_whole_number, _COUNT, auto=None)] = _key(
        "auto", "spare nodes kept warm: auto, or a number"
    )
    start: Literal["warm", "cold"] = _key(
        "warm", "warm: ranks start with torch loaded; cold: each rank loads it, as under torchrun"
    )
    detect: Detect = _key({}, "when something counts as failed")
    checkpoint: Checkpoint = _key({}, "when and where checkpoints are kept")
    failures: Failures = _key({}, "failure rate and restart budgets")
    nodes: Nodes = _key({}, "with how many nodes a run goes on")
    nodes_policy: NodesPolicy = _key({}, "what happens to bad nodes, and in place of lost ones")
    pool: Pool = _key({}, "nodes that wait, which all runs of a user share")
    health: Health = _key({}, "probes of GPUs and nodes, tests before use, slow ranks")
    network: Network = _key({}, "what nodes send each other")
    metrics: Metrics = _key({}, "where the run's metrics are given out")
    price: Annotated[
        Price | None,
        _Written(read_price, {"type": "string", "pattern": f"^{PRICE}$", "examples": ["2.10 USD"]}, off=None),
    ] = _key(False, "what a GPU costs for an hour, like 2.10 USD: reports show what was spent, and on what")
    notify: list[Notified] = _key([], "who is told what happens; each has `when`, and a `command` or a `url`")


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    made = Policy.model_json_schema()
    names = {"type": "string", "minLength": 1}
    made["properties"] = {
        "extends": {
            "description": "files whose values this one overrides; paths are relative to this file",
            "anyOf": [names, {"type": "array", "items": names}],
        },
        **made["properties"],
    }
    return {"$schema": DIALECT, **made, "title": "jurymast policy"}


def keys_text() -> str:
    """The text of `docs/policy-keys.md`."""
    whole = schema()
    return "\n".join(
        [
            "# All keys of a policy", "",
            "A duration has a unit: `0.5s`, `10m`, `1h30m`, `2d`. `jurymast policy keys` prints this.", "",
            "| key | takes | default | meaning |", "| --- | --- | --- | --- |",
            *_rows("", whole, whole["$defs"]), "",
        ]
    )  # fmt: skip


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _rows(above: str, level: dict[str, Any], defined: dict[str, Any]) -> Iterator[str]:
    """The table's rows for the keys of this level and below it; `above`: the keys above it."""
    for name, found in level["properties"].items():
        default = "" if "default" not in found else _written(found["default"])
        below = _section(found, defined)
        takes = _takes(found, defined)
        if below is not None and takes:  # it can be switched as a whole
            takes += ", or the keys below" if below["properties"] else ""
            default = default if default == "off" else "on"
        if takes or below is None:
            yield f"| `{above}{name}` | {takes} | {_code(default)} | {found.get('description', '')} |"
        if below is not None:
            yield from _rows(f"{above}{name}.", below, defined)


def _section(found: dict[str, Any], defined: dict[str, Any]) -> dict[str, Any] | None:
    """The keys below this one, if there are any."""
    if "$ref" in found:
        section: dict[str, Any] = defined[found["$ref"].rpartition("/")[2]]
        return section
    sections = (_section(one, defined) for one in found.get("anyOf", ()))
    return next((one for one in sections if one is not None), None)


def _takes(found: dict[str, Any], defined: dict[str, Any]) -> str:
    if "anyOf" in found:
        return ", ".join(dict.fromkeys(filter(None, (_takes(one, defined) for one in found["anyOf"]))))
    if "const" in found:
        return _code(found["const"])
    if "enum" in found:
        return ", ".join(dict.fromkeys(_code(_written(value)) for value in found["enum"]))
    return _of_type(found)


def _of_type(found: dict[str, Any]) -> str:
    match found.get("type"):
        case "string" if found.get("pattern") == DURATION:
            return "a duration"
        case "string" if "examples" in found:
            return f"a text like {_code(found['examples'][0])}"
        case "string":
            return "a text"
        case "integer":
            return f"a whole number from {found.get('minimum', 0)}"
        case "number":
            least = found.get("exclusiveMinimum")
            return "a number" if least is None else f"a number above {least:g}"
        case "array":
            return "a list"
        case "object":
            return "a mapping"
        case _:
            return ""


def _written(value: object) -> str:
    """The value as written in YAML."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else re.sub(r"^null$", "", json.dumps(value))
