"""`Checkpointer` in one process and over a few ranks: what is restored is, bit for bit, what was saved."""

from __future__ import annotations

import copy
import json
import mmap
import os
import random
import shutil
import subprocess
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import jurymast
from jurymast.checkpoint import RandomState
from jurymast.checkpoint.directory import MANIFEST, CheckpointDirectory, final_name
from jurymast.errors import CheckpointError
from jurymast.rundir import RunDirectory
from jurymast.worker import link
from support.ranks import run_ranks, stop_server

pytestmark = pytest.mark.torch

RANKS = Path(__file__).resolve().parents[1] / "scripts" / "checkpoint_ranks.py"
NEVER = 10**6


@pytest.fixture(scope="module", autouse=True)
def _end_rank_server() -> Iterator[None]:
    yield
    stop_server()


@pytest.fixture(autouse=True)
def _no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the environment these tests run in reaches the Checkpointer."""
    for name in [name for name in os.environ if name.startswith("JURYMAST_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(link, "_current", None)


# ---- state


class Holder:
    """A `Stateful` that holds any value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, and the bits of tensors and floats."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and bytes(a.contiguous().view(torch.uint8).flatten().tolist() if a.numel() else [])
            == bytes(b.contiguous().view(torch.uint8).flatten().tolist() if b.numel() else [])
        )
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def saved_and_restored(directory: Path, value: Any) -> Any:
    jurymast.Checkpointer({"it": Holder(value)}, directory=directory).save(1)
    fresh = Holder()
    assert jurymast.Checkpointer({"it": fresh}, directory=directory).restore() == 1
    return fresh.value


TENSORS = st.sampled_from(
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.int16),
        torch.tensor(-0.0),
        torch.tensor([float("nan"), float("inf")], dtype=torch.float64),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(1000)[::100],
        torch.tensor(3 + 4j),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
KEYS = (
    st.text(min_size=1, max_size=4)
    | st.sampled_from(["a.b", "a", "b", "0", "__object__"])
    | st.integers(0, 3)
)
VALUES = st.recursive(
    LEAVES | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.tuples(inner, inner)
        | st.tuples(st.just("__object__"), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES)
def test_any_value_comes_back(tmp_path: Path, value: Any) -> None:
    directory = tmp_path / "checkpoints"
    shutil.rmtree(directory, ignore_errors=True)
    assert same(saved_and_restored(directory, value), value)


def test_values_dcp_would_change(tmp_path: Path) -> None:
    """Integer keys become strings in DCP, empty dicts vanish, and a Counter gets both kinds of keys."""
    value = {"milestones": Counter({30: 1}), 5: {}, "empty": [{}, [], ()], "t": (torch.ones(2), {1: 2})}
    assert same(saved_and_restored(tmp_path, value), value)
    assert same(saved_and_restored(tmp_path / "b", OrderedDict(a=1)), {"a": 1})


def test_plain_values_are_restored_in_place(tmp_path: Path) -> None:
    tensor, inner, numbers = torch.arange(3.0), {"epoch": 3, "best": [0.5, None]}, [1, 2, 3]
    state: dict[str, Any] = {"ema": tensor, "progress": inner, "epoch": 7, "numbers": numbers, "none": None}
    state["generator"] = torch.Generator().manual_seed(5)
    drawn_first = torch.rand(3, generator=copy.deepcopy(state["generator"]))
    jurymast.Checkpointer(state, directory=tmp_path).save(12)
    tensor.zero_()
    inner.clear()
    inner["mine"] = 1
    numbers.append(4)
    state.update(epoch=0, none="")
    state["generator"].manual_seed(99)
    assert jurymast.Checkpointer(state, directory=tmp_path).restore() == 12
    assert same(tensor, torch.arange(3.0))
    assert state["ema"] is tensor
    assert inner == {"mine": 1, "epoch": 3, "best": [0.5, None]}
    assert state["progress"] is inner
    assert (state["epoch"], state["none"], state["numbers"]) == (7, None, [1, 2, 3])
    assert state["numbers"] is numbers
    assert same(torch.rand(3, generator=state["generator"]), drawn_first)


def test_random_state(tmp_path: Path) -> None:
    checkpoint = jurymast.Checkpointer({"random": RandomState()}, directory=tmp_path)
    checkpoint.save(1)
    expected = (random.random(), torch.rand(2))
    random.random()
    assert checkpoint.restore() == 1
    assert same((random.random(), torch.rand(2)), expected)


def test_state_that_grew_is_restored_whole(tmp_path: Path) -> None:
    """Plans or structures kept from an earlier save would lose what was added, or write old values."""
    holder = Holder({"a": torch.ones(2)})
    checkpoint = jurymast.Checkpointer({"it": holder}, directory=tmp_path)
    checkpoint.save(1)
    holder.value["a"] += 1
    holder.value["b"] = [torch.zeros(3), {"c": 1}]
    checkpoint.save(2)
    holder.value["a"] = holder.value["a"].to(torch.bfloat16)
    checkpoint.save(3)
    fresh = Holder({"a": torch.zeros(2)})
    assert jurymast.Checkpointer({"it": fresh}, directory=tmp_path).restore() == 3
    assert same(fresh.value, {"a": torch.full((2,), 2, dtype=torch.bfloat16), "b": holder.value["b"]})
    shutil.rmtree(tmp_path / final_name(3))
    assert jurymast.Checkpointer({"it": fresh}, directory=tmp_path).restore() == 2
    assert same(fresh.value, {"a": torch.full((2,), 2.0), "b": holder.value["b"]})


@pytest.mark.parametrize(
    "state", [{1: 2}, {"": 1}, {"nested": {"model": nn.Linear(2, 2)}}, {"l": [Holder()]}]
)
def test_state_that_cannot_be_saved_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        jurymast.Checkpointer(state, directory=tmp_path)


def test_what_cannot_be_pickled_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = jurymast.Checkpointer({"it": Holder((lambda: 0,))}, directory=tmp_path)
    with pytest.raises(CheckpointError, match="cannot be"):
        checkpoint.save(1)
    assert os.listdir(tmp_path) == []


# ---- models and optimizers


class Net(nn.Module):
    """Float32 and bfloat16 weights, a buffer, an empty one, one nothing trains, one nobody uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3, bias=False).to(torch.bfloat16)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.note = "fresh"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.frozen(self.norm(self.first(x)).relu()).to(torch.bfloat16)).float()

    def get_extra_state(self) -> dict[Any, Any]:
        return {"note": self.note, 7: ()}

    def set_extra_state(self, state: dict[Any, Any]) -> None:
        self.note = state["note"]


class WideMoment(torch.optim.Optimizer):
    """Keeps float32 moments of bfloat16 weights, as mixed-precision optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "schedule": {3: "x"}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("count", 0)
                    state.setdefault("moment", torch.zeros_like(parameter, dtype=torch.float32))
                    state["count"] += 1
                    state["moment"].mul_(0.9).add_(parameter.grad.float())
                    parameter.add_(state["moment"].to(parameter.dtype), alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), amsgrad=True, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "groups": lambda p: torch.optim.RMSprop([{"params": [q], "lr": 0.1 / (n + 2)} for n, q in enumerate(p)]),
    "wide": WideMoment,
}


class Training:
    def __init__(self, seed: int, optimizer: str) -> None:
        self.net = Net(seed)
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[2, 5])

    def state(self) -> dict[str, Any]:
        return {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule}

    def steps(self, first: int, end: int) -> None:
        for step in range(first, end):
            inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.net(inputs).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()

    def facts(self) -> Any:
        states = [dict(self.optimizer.state.get(p, {})) for p in self.net.parameters()]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return [self.net.state_dict(), states, groups, self.schedule.last_epoch, self.net.note]


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_training_goes_on_as_if_nothing_happened(tmp_path: Path, optimizer: str) -> None:
    straight = Training(1, optimizer)
    straight.net.note = "trained"
    straight.steps(0, 4)
    middle = copy.deepcopy(straight.facts())
    straight.steps(4, 8)

    interrupted = Training(1, optimizer)
    interrupted.net.note = "trained"
    checkpoint = jurymast.Checkpointer(interrupted.state(), directory=tmp_path, every=2)
    assert checkpoint.restore() == 0
    checkpoint.save(0)
    for step in range(5):
        interrupted.steps(step, step + 1)
        checkpoint.step(step + 1)

    resumed = Training(2, optimizer)
    assert jurymast.Checkpointer(resumed.state(), directory=tmp_path).restore() == 4
    assert [[sorted(s) for s in t.facts()[1]] for t in (resumed,)] == [[sorted(s) for s in middle[1]]]
    assert same(list(resumed.facts()[0].values()), list(middle[0].values()))
    assert all(same(a[k], b[k]) for a, b in zip(resumed.facts()[1], middle[1], strict=True) for k in b)
    resumed.steps(4, 8)
    assert same(list(resumed.net.state_dict().values()), list(straight.net.state_dict().values()))
    assert same(repr(resumed.facts()[2:]), repr(straight.facts()[2:]))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum"])
def test_saving_before_the_first_step_does_not_step_the_optimizer(tmp_path: Path, optimizer: str) -> None:
    training = Training(1, optimizer)
    jurymast.Checkpointer(training.state(), directory=tmp_path).save(0)
    assert not training.optimizer.state
    fresh = Training(2, optimizer)
    assert jurymast.Checkpointer(fresh.state(), directory=tmp_path).restore() == 0
    assert not fresh.optimizer.state
    straight = Training(1, optimizer)
    for each in (training, fresh, straight):
        each.steps(0, 3)
    assert same(list(training.net.state_dict().values()), list(straight.net.state_dict().values()))
    assert same(list(fresh.net.state_dict().values()), list(straight.net.state_dict().values()))


def test_optimizers_over_several_modules_or_none_passed(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[dict[str, Any], Callable[[int], None]]:
        torch.manual_seed(seed)
        a, b, outside = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        both = torch.optim.Adam([*a.parameters(), *b.parameters()])
        orphan = torch.optim.Adam(outside.parameters())

        def step(number: int) -> None:
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
            (b(a(x)) + outside(x)).square().sum().backward()
            both.step()
            orphan.step()
            both.zero_grad()
            orphan.zero_grad()

        return {"net.a": a, "b": b, "both": both, "orphan": orphan, "x": outside.state_dict()}, step

    state, step = make(1)
    step(0)
    step(1)
    jurymast.Checkpointer(state, directory=tmp_path).save(2)
    fresh, fresh_step = make(2)
    assert jurymast.Checkpointer(fresh, directory=tmp_path).restore() == 2
    step(2)
    fresh_step(2)
    for name in ("net.a", "b"):
        assert same(list(state[name].state_dict().values()), list(fresh[name].state_dict().values()))
    assert same(list(state["x"].values()), list(fresh["x"].values()))


def test_model_that_changed_is_an_error_not_a_start_from_zero(tmp_path: Path) -> None:
    jurymast.Checkpointer({"net": nn.Linear(3, 3)}, directory=tmp_path).save(4)
    for state in (
        {"net": nn.Linear(3, 4)},
        {"net": nn.Sequential(nn.Linear(3, 3))},
        {"other": nn.Linear(3, 3)},
    ):
        with pytest.raises(CheckpointError, match="step 4: .*"):
            jurymast.Checkpointer(state, directory=tmp_path).restore()


# ---- the directory


def weights(value: float) -> dict[str, Any]:
    return {"weight": torch.full((1000,), value)}


def save_steps(directory: Path, *steps: int, keep: int = 9) -> None:
    state = weights(0.0)
    checkpoint = jurymast.Checkpointer(state, directory=directory, keep=keep)
    for step in steps:
        state["weight"].fill_(float(step))
        assert checkpoint.save(step)


def test_a_step_is_a_stock_directory_that_only_its_owner_reads(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    net = nn.Linear(3, 2)
    jurymast.Checkpointer({"net": net, "epoch": 4}, directory=directory).save(123)
    path = directory / "step-00000123"
    assert os.listdir(directory) == [path.name]
    assert {file.name for file in path.iterdir()} == {".metadata", "__0_0.distcp", MANIFEST}
    assert {oct(p.stat().st_mode & 0o777) for p in (directory, path)} == {"0o700"}
    assert {oct(p.stat().st_mode & 0o777) for p in path.iterdir()} == {"0o600"}
    stock: dict[str, Any] = {"net": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, "epoch": 0}
    dcp.load(stock, checkpoint_id=path, no_dist=True)
    assert same(stock, {"net": dict(net.state_dict()), "epoch": 4})
    manifest = CheckpointDirectory(directory).manifest(123)
    assert (manifest.step, manifest.attempt, manifest.world_size, manifest.torch) == (
        123,
        0,
        1,
        torch.__version__,
    )
    assert CheckpointDirectory(directory).check_files(123, manifest.files) == []
    assert sorted(file.name for file in manifest.files) == [".metadata", "__0_0.distcp"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", MANIFEST])
def test_a_damaged_checkpoint_is_passed_over_and_kept(
    tmp_path: Path, damage: Callable[[Path], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path / final_name(3) / name)
    before = {path.name: path.read_bytes() for path in (tmp_path / final_name(3)).iterdir()}
    state = weights(0.0)
    checkpoint = jurymast.Checkpointer(state, directory=tmp_path, keep=1)
    assert checkpoint.restore() == 2
    assert same(state, weights(2.0))
    assert "step 3: " in caplog.text
    # a new one of that step takes its place, and the damaged one stays as it is
    assert checkpoint.save(3)
    assert jurymast.Checkpointer(state, directory=tmp_path).restore() == 3
    assert same(state, weights(2.0))
    (aside,) = tmp_path.glob("step-00000003.damaged-*")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before


def test_none_readable_is_an_error_that_names_each(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    flip(tmp_path / final_name(1) / "__0_0.distcp")
    truncate(tmp_path / final_name(2) / "__0_0.distcp")
    (tmp_path / final_name(3) / MANIFEST).unlink()
    state = weights(7.0)
    with pytest.raises(CheckpointError) as caught:
        jurymast.Checkpointer(state, directory=tmp_path).restore()
    text = str(caught.value)
    assert "step 1: __0_0.distcp is corrupt" in text
    assert "step 2: __0_0.distcp has " in text
    assert f"step 3: it has no {MANIFEST}" in text
    assert same(state, weights(7.0))
    assert len(CheckpointDirectory(tmp_path).steps()) == 3


def test_a_verified_step_is_never_written_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    inode = (tmp_path / final_name(5)).stat().st_ino
    state = weights(9.0)
    assert jurymast.Checkpointer(state, directory=tmp_path).save(5)
    assert (tmp_path / final_name(5)).stat().st_ino == inode
    assert jurymast.Checkpointer(state, directory=tmp_path).restore() == 5
    assert same(state, weights(5.0))


def test_retention_keeps_the_newest_good_ones(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert CheckpointDirectory(tmp_path).complete() == [5, 4]
    flip(tmp_path / final_name(5) / "__0_0.distcp")
    state = weights(0.0)
    checkpoint = jurymast.Checkpointer(state, directory=tmp_path, keep=1)
    assert checkpoint.restore() == 4
    # 5 is known to be bad: it must not count as the one to keep
    (tmp_path / final_name(4)).rename(tmp_path / final_name(2))
    manifest = tmp_path / final_name(2) / MANIFEST
    manifest.unlink()
    assert checkpoint.save(3)
    assert set(CheckpointDirectory(tmp_path).steps()) == {5, 3, 2}
    assert jurymast.Checkpointer(state, directory=tmp_path).restore() == 3


def test_leftovers_of_earlier_attempts_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1)
    for name in (
        ".saving-00000002.a0002.0a1b2c3d",
        ".saving-00000003.a0004.0a1b2c3d",
        ".deleting-00000000.ff00ff00",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / ".saving-notes").write_text("a user's own")
    monkeypatch.setenv("JURYMAST_ATTEMPT", "3")
    assert jurymast.Checkpointer(weights(0.0), directory=tmp_path).restore() == 1
    # attempt 4 is newer than we are
    assert {p.name for p in tmp_path.iterdir()} == {
        ".saving-00000003.a0004.0a1b2c3d",
        ".saving-notes",
        final_name(1),
    }


def test_a_stale_attempt_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    monkeypatch.setenv("JURYMAST_RUN_DIR", str(run.root))
    monkeypatch.setenv("JURYMAST_ATTEMPT", "2")
    run.attempt_file.write_text("2\n")
    checkpoint = jurymast.Checkpointer(weights(1.0))
    assert checkpoint.save(1)
    run.attempt_file.write_text("3\n")
    assert not checkpoint.save(2)
    assert os.listdir(run.checkpoints) == [final_name(1)]
    assert "attempt 2 is stale: attempt 3 has started" in caplog.text
    assert CheckpointDirectory(run.checkpoints).manifest(1).attempt == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_costs_the_checkpoint_not_the_training(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"weight": torch.ones(60_000)}
    directory = small_disk / "checkpoints"
    checkpoint = jurymast.Checkpointer(state, directory=directory, every=1)
    checkpoint.step(1)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(650_000))
    for step in (2, 3):
        checkpoint.step(step)
        assert os.listdir(directory) == [final_name(1)]
    assert "step 2 was not saved (shared tier): rank 0: " in caplog.text
    assert "No space left on device" in caplog.text
    filler.unlink()
    checkpoint.step(4)
    assert jurymast.Checkpointer(state, directory=directory).restore() == 4


def test_a_read_only_disk_costs_the_checkpoint_not_the_training(small_disk: Path) -> None:
    state = weights(1.0)
    checkpoint = jurymast.Checkpointer(state, directory=small_disk, every=1)
    checkpoint.step(1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    checkpoint.step(2)
    assert not checkpoint.save(3)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    checkpoint.step(4)
    assert CheckpointDirectory(small_disk).complete() == [4, 1]


# ---- under jurymast


class Agent:
    """The other end of a rank's link: a page of slots and a pipe, as the agent makes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._memory = os.memfd_create("page")
        os.ftruncate(self._memory, mmap.PAGESIZE)
        self._page = mmap.mmap(self._memory, mmap.PAGESIZE)
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        monkeypatch.setenv(link.PAGE_VARIABLE, f"/proc/self/fd/{self._memory}")
        monkeypatch.setenv(link.EVENTS_VARIABLE, f"/proc/self/fd/{self._writer}")
        monkeypatch.setenv("LOCAL_RANK", "0")

    def slot(self) -> link.Beat:
        return link.read_slot(self._page, 0)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in os.read(self._reader, 1 << 16).splitlines()]

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)
        os.close(self._memory)
        self._page.close()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    agent = Agent(monkeypatch)
    yield agent
    agent.close()


def test_the_agent_hears_of_steps_saves_and_restores(tmp_path: Path, agent: Agent) -> None:
    phases = []

    class Spy(Holder):
        def state_dict(self) -> dict[str, Any]:
            phases.append(agent.slot().phase)
            return super().state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            phases.append(agent.slot().phase)
            super().load_state_dict(state)

    checkpoint = jurymast.Checkpointer({"it": Spy(1), "t": torch.ones(5)}, directory=tmp_path, every=10)
    assert checkpoint.restore() == 0
    assert (agent.slot().step, agent.slot().beats, agent.slot().phase) == (0, 0, "starting")
    for step in range(1, 11):
        checkpoint.step(step)
    assert (agent.slot().step, agent.slot().beats, agent.slot().phase) == (10, 10, "stepping")
    again = jurymast.Checkpointer({"it": Spy(), "t": torch.zeros(5)}, directory=tmp_path)
    assert again.restore() == 10
    assert (agent.slot().step, agent.slot().beats) == (10, 10)
    assert phases == ["saving", "restoring"]
    fresh, saved, restored = agent.events()
    assert (fresh["event"], fresh["step"], fresh["skipped"]) == ("Restored", 0, [])
    assert (saved["event"], saved["step"], saved["tier"], saved["ok"]) == ("Saved", 10, "shared", True)
    assert (saved["error"], saved["stall_s"] > 0) == ("", True)
    size = sum(file.stat().st_size for file in (tmp_path / final_name(10)).iterdir() if file.name != MANIFEST)
    assert saved["size_bytes"] == restored["size_bytes"] == size
    assert (restored["event"], restored["step"], restored["tier"]) == ("Restored", 10, "shared")


def test_a_failed_save_is_an_event_and_is_tried_again(tmp_path: Path, agent: Agent) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("where the directory should be")
    checkpoint = jurymast.Checkpointer(weights(1.0), directory=blocked / "checkpoints", every=1)
    checkpoint.step(1)
    (event,) = agent.events()
    assert (event["event"], event["step"], event["ok"]) == ("Saved", 1, False)
    assert event["error"].startswith("NotADirectoryError: ")
    assert "\n" not in event["error"]
    assert agent.slot().phase == "stepping"
    blocked.unlink()
    checkpoint.step(2)
    assert [(e["step"], e["ok"]) for e in agent.events()] == [(2, True)]


def test_where_and_when_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def saved_steps(**options: Any) -> list[int]:
        checkpoint = jurymast.Checkpointer(weights(1.0), **options)
        for step in range(1, 10):
            checkpoint.step(step)
        steps = CheckpointDirectory(checkpoint._directory).steps()
        shutil.rmtree(checkpoint._directory, ignore_errors=True)
        return steps

    assert saved_steps() == []
    monkeypatch.setenv("JURYMAST_CADENCE_STEPS", "2")
    assert saved_steps() == [8, 6, 4]
    monkeypatch.setenv("JURYMAST_KEEP", "1")
    assert saved_steps() == [8]
    assert saved_steps(every="3 steps", keep=5) == [9, 6, 3]
    monkeypatch.delenv("JURYMAST_CADENCE_STEPS")
    monkeypatch.setenv("JURYMAST_CADENCE_S", "0.0001")
    assert saved_steps() == [9]
    monkeypatch.setenv("JURYMAST_CHECKPOINTS", str(tmp_path / "elsewhere"))
    assert jurymast.Checkpointer(weights(1.0))._directory == tmp_path / "elsewhere"
    monkeypatch.setenv("JURYMAST_RUN_DIR", str(tmp_path / "run"))
    assert jurymast.Checkpointer(weights(1.0))._directory == tmp_path / "run" / "checkpoints"
    for options in ({"every": "often"}, {"every": 0}, {"keep": 0}):
        with pytest.raises(CheckpointError):
            jurymast.Checkpointer(weights(1.0), **options)


def test_several_ranks_without_a_process_group_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match="no process group"):
        jurymast.Checkpointer(weights(1.0), directory=tmp_path).restore()


# ---- several ranks


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_restored_on_other_numbers_of_ranks(tmp_path: Path, sharded: bool) -> None:
    directory = str(tmp_path / "checkpoints")
    saved = run_ranks(RANKS, "train_and_save", 2, tmp_path, directory=directory, steps=4, sharded=sharded)
    assert saved[0]["buffers"] != saved[1]["buffers"]
    for size in (1, 2, 3):
        for rank, got in enumerate(
            run_ranks(RANKS, "restore", size, tmp_path, directory=directory, sharded=sharded)
        ):
            assert got["step"] == 4
            assert got["weights"] == saved[0]["weights"]
            assert got["moments"] == saved[0]["moments"]
            # of what DDP replicates, rank 0's counts: every forward broadcasts its buffers
            assert got["buffers"] == saved[0]["buffers"]
            assert got["counter"] == saved[rank % 2]["counter"]


def test_three_ranks_go_on_with_the_same_bits(tmp_path: Path) -> None:
    straight = run_ranks(
        RANKS, "train_and_save", 3, tmp_path, directory=str(tmp_path / "a"), steps=7, optimizer="sgd"
    )
    run_ranks(RANKS, "train_and_save", 3, tmp_path, directory=str(tmp_path / "b"), steps=4, optimizer="sgd")
    resumed = run_ranks(RANKS, "restore", 3, tmp_path, directory=str(tmp_path / "b"), more=3, optimizer="sgd")
    assert {rank["trained"] for rank in resumed} == {straight[0]["weights"]}


def test_ranks_agree_on_what_is_damaged(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    for steps in (3, 5):
        saved = run_ranks(
            RANKS, "train_and_save", 2, tmp_path, directory=str(tmp_path / f"only-{steps}"), steps=steps
        )
        shutil.copytree(tmp_path / f"only-{steps}", directory, dirs_exist_ok=True)
    assert saved[0]["weights"] == saved[1]["weights"]
    flip(directory / final_name(5) / "__1_0.distcp")
    assert [rank["step"] for rank in run_ranks(RANKS, "restore", 2, tmp_path, directory=str(directory))] == [
        3,
        3,
    ]
    truncate(directory / final_name(3) / "__0_0.distcp")
    for rank in run_ranks(RANKS, "restore", 2, tmp_path, directory=str(directory)):
        assert "step 5: __1_0.distcp is corrupt" in rank["error"]
        assert "step 3: __0_0.distcp has " in rank["error"]


def test_storage_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoints")
    results = run_ranks(RANKS, "storage_fails_on_rank_1", 2, tmp_path, directory=directory)
    assert [(rank["during"], rank["after"]) for rank in results] == [([], ["step-00000020"])] * 2
    assert results[0]["weights"] == results[1]["weights"]


def test_an_object_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    texts = run_ranks(RANKS, "fails_to_prepare", 2, tmp_path, directory=str(tmp_path / "c"))
    assert texts == ["the state cannot be taken: rank 1: KeyError: 'position'"] * 2


def test_ranks_that_save_by_time_save_together(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    results = run_ranks(
        RANKS, "save_by_time", 2, tmp_path, directory=str(directory), every="0.3s", seconds=1.6
    )
    assert results[0] == results[1]
    saved = CheckpointDirectory(directory)
    assert 2 <= len(saved.complete()) <= 5
    for step in saved.complete():
        # every file is there, and both ranks were at the same step
        assert saved.check_files(step, saved.manifest(step).files) == []
