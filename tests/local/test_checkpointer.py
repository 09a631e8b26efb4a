"""`Checkpointer` in one process and over a few ranks: what is restored is, bit for bit, what was saved."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import jurymast
from jurymast.checkpoint import RandomState
from jurymast.checkpoint.directory import CheckpointDirectory, final_name
from jurymast.errors import CheckpointError
from jurymast.jobs import await_ended
from support.checkpoints import (
    Holder,
    assert_special_tensors_are_back,
    flip,
    same,
    special_tensors,
    truncate,
)
from support.ranks import run_ranks, stop_server

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_run")]

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
RANKS = SCRIPTS / "checkpoint_ranks.py"
NEVER = 10**6


@pytest.fixture(scope="module", autouse=True)
def _end_rank_server() -> Iterator[None]:
    yield
    stop_server()


# ---- state


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


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|quantize|TypedStorage)")
def test_tensors_that_are_more_than_their_bytes(tmp_path: Path) -> None:
    """DCP saves some of them and cannot load them."""
    assert_special_tensors_are_back(saved_and_restored(tmp_path / "holder", special_tensors()))
    values = special_tensors()
    jurymast.Checkpointer({"values": values}, directory=tmp_path / "values").save(1)
    assert jurymast.Checkpointer({"values": values}, directory=tmp_path / "values").restore() == 1
    assert_special_tensors_are_back(values)


def test_a_value_that_was_expanded_is_restored(tmp_path: Path) -> None:
    state = {"mask": torch.ones(1).expand(4)}
    jurymast.Checkpointer(state, directory=tmp_path).save(1)
    assert jurymast.Checkpointer(state, directory=tmp_path).restore() == 1
    assert same(state["mask"], torch.ones(4))


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
    "state",
    [
        {1: 2},
        {"": 1},
        {"nested": {"model": nn.Linear(2, 2)}},
        {"list": [Holder()]},
        {"data": torch.utils.data.DataLoader([1, 2, 3])},
    ],
)
def test_state_that_cannot_be_saved_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        jurymast.Checkpointer(state, directory=tmp_path)


def test_what_cannot_be_pickled_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = jurymast.Checkpointer({"it": Holder((lambda: 0,))}, directory=tmp_path)
    with pytest.raises(CheckpointError, match="cannot capture"):
        checkpoint.save(1)
    assert os.listdir(tmp_path) == ["owner.json"]


# ---- models and optimizers


class Net(nn.Module):  # type: ignore[misc]  # torch's types are not followed
    """Float32 and bfloat16 weights, a buffer, an empty one, one nothing trains, one nobody uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3, bias=False).to(torch.bfloat16)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.note = "fresh"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.norm(self.first(x)).relu())
        return self.second(self.frozen(x).to(torch.bfloat16)).float()

    def get_extra_state(self) -> dict[Any, Any]:
        return {"note": self.note, 7: ()}

    def set_extra_state(self, state: dict[Any, Any]) -> None:
        self.note = state["note"]


class WideMoment(torch.optim.Optimizer):  # type: ignore[misc]
    """Keeps float32 moments of bfloat16 weights, as mixed-precision optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "schedule": {3: "x"}})

    @torch.no_grad()  # type: ignore[untyped-decorator]
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


# ---- several ranks


FSDP2 = pytest.param(
    True,
    id="fsdp2",
    marks=pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 shards on GPUs only"),
)


@pytest.mark.parametrize("sharded", [pytest.param(False, id="ddp"), FSDP2])
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


def test_pipeline_stages_each_restore_their_own(tmp_path: Path) -> None:
    """Ranks with other parameters and other entries than their neighbours', under the same names."""
    saved = run_ranks(RANKS, "save_stage", 2, tmp_path, directory=str(tmp_path / "checkpoints"))
    restored = run_ranks(RANKS, "restore_stage", 2, tmp_path, directory=str(tmp_path / "checkpoints"))
    assert saved[0] != saved[1]
    assert restored == saved


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
    assert texts == ["cannot capture the state: rank 1: KeyError: 'position'"] * 2


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


# ---- torchrun

LIMIT_S = 300.0
TINY = ("--steps", "40", "--width", "512", "--save-every", "8")


@contextmanager
def torchrun(folder: Path, *arguments: str) -> Iterator[psutil.Popen]:
    """train_tiny.py on two ranks under plain torchrun; nothing is left of it afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [
        *TINY,
        "--checkpoints",
        str(folder / "checkpoints"),
        "--out",
        str(folder / "out.json"),
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    folder.mkdir(exist_ok=True)
    with open(folder / "log", "ab") as log:
        process = psutil.Popen(
            [*command, str(SCRIPTS / "train_tiny.py"), *options], stdout=log, stderr=log, env=environment
        )
    try:
        yield process
    finally:
        if process.is_running():
            kill([process, *process.children(recursive=True)])
            process.wait(LIMIT_S)


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    await_ended([process.pid for process in processes], LIMIT_S)


def frozen_while_saving(process: psutil.Popen, directory: Path) -> bool:
    """Stop the workers in the middle of a save, at least one earlier one being complete; False when the
    training ended before a save was caught."""
    while process.poll() is None:
        names = os.listdir(directory) if directory.exists() else []
        if any(name.startswith(".saving") for name in names) and CheckpointDirectory(directory).complete():
            workers = process.children()
            for worker in workers:
                with suppress(psutil.NoSuchProcess):  # the training ends
                    worker.suspend()
            if any(directory.glob(".saving-*/__*")):
                return True
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.resume()
        time.sleep(0.001)  # a save takes some ten times that
    return False


def kill_while_saving(folder: Path) -> None:
    """Train in `folder` until a save is caught in its middle, which may take more than one try."""
    for _ in range(5):
        with torchrun(folder) as process:
            if frozen_while_saving(process, folder / "checkpoints"):
                kill([process, *process.children(recursive=True)])
                return
        shutil.rmtree(folder)
    raise AssertionError("no save was caught in its middle")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_killed_in_the_middle_of_a_save(tmp_path: Path, trained_plainly: Callable[..., str]) -> None:
    """Killed there, started again: the weights of a training that nothing happened to, bit for bit."""
    killed = tmp_path / "killed"
    kill_while_saving(killed)
    newest = CheckpointDirectory(killed / "checkpoints").complete()[0]
    assert list((killed / "checkpoints").glob(".saving-*"))
    with torchrun(killed) as process:
        assert process.wait(LIMIT_S) == 0, (killed / "log").read_text()
    assert 0 < newest < 40
    got = json.loads((killed / "out.json").read_text())
    assert got == {"steps": 40, "restored": newest, "sha256": trained_plainly(*TINY)}
    assert not list((killed / "checkpoints").glob(".*"))


def test_checkpoints_that_are_gone_are_no_reason_to_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JURYMAST_SAVED_STEP", "400")
    checkpoint = jurymast.Checkpointer(Training(1, "adamw").state(), directory=tmp_path / "not mounted")
    with pytest.raises(CheckpointError, match="step 400 of this run was saved") as raised:
        checkpoint.restore()
    assert "mounted" in (raised.value.hint or "")
