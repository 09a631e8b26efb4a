"""What the probe sees of a real GPU through the driver's library, and that a GPU that works is not ill."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jurymast.core.state import events as ev
from support.looker import Looker
from support.runs import jurymast, local_run, wait_gone
from support.waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.alone]


@pytest.fixture
def looker() -> Iterator[Looker]:
    made = Looker({})
    yield made
    made.end()


def work() -> None:
    square = torch.ones(4096, 4096, device="cuda")
    for _ in range(50):
        square = (square @ square).clamp(-1, 1)
    torch.cuda.synchronize()


def test_a_gpu_that_works_is_not_called_ill_idle_or_busy(looker: Looker) -> None:
    assert looker.open(gpus=torch.cuda.device_count())
    for _ in range(3):
        assert looker.look() == []
        work()
    looker.close()


def test_the_energy_counter_grows(looker: Looker) -> None:
    assert looker.open()
    looker.look()
    (bus, joules), *_ = looker.energy().items()

    def grown() -> bool:
        work()
        looker.look()
        return looker.energy()[bus] > joules + 1.0

    wait_until("energy used", grown)


def test_every_check_gets_its_answer(tell: Callable[[str], None]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jurymast_nvidia", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert len(seen["gpus"]) == torch.cuda.device_count()
    assert seen["findings"] == []
    for gpu in seen["gpus"]:
        tell(f"{gpu['gpu']}: all checks {seen['batch_us']:.0f} us, events {seen['events_us']:.0f} us")
        for check in gpu["checks"]:
            tell(f"  {check['check']}: {'; '.join(check['answers'])}")
            assert check["problems"] == []
        answered = {check["check"] for check in gpu["checks"] if check["answers"]}
        assert {"ECC errors", "remapped rows", "throttling", "temperature"} <= answered


def test_the_commands_see_it(tell: Callable[[str], None]) -> None:
    health = jurymast("health", "--probe", "nvidia", "--json")
    told = json.loads(health.stdout)
    assert (health.returncode, told["verdict"], told["findings"]) == (0, "ok", []), health.stdout
    assert told["probes"] == [{"name": "nvidia", "state": "looked"}]
    doctor = json.loads(jurymast("doctor", "--json").stdout)
    (library,) = (one for one in doctor["checks"] if one["check"] == "gpu library")
    assert library["answer"] == "yes", library
    assert f"{torch.cuda.device_count()} GPU" in library["found"]
    tell(f"doctor: {library['found']}")


def ask(process: subprocess.Popen[str], order: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def test_the_tests_of_a_node_pass_on_it(tell: Callable[[str], None]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "jurymast.preflight", "0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        alone = ask(process, {"do": "alone"})
        group = {"do": "group", "name": "one", "host": "127.0.0.1", "port": ready["port"], "rank": 0}
        paired = ask(process, {**group, "world": 1, "limit_s": 60})
    finally:
        process.kill()
        process.communicate()
    assert (alone["wrong"], alone["error"]) == ("", "")
    assert (paired["wrong"], paired["error"]) == ("", "")
    assert {"nccl latency", "nccl transfer"} <= paired["times"].keys()
    for measure, seconds in {**alone["times"], **paired["times"]}.items():
        tell(f"{measure}: {1000 * seconds:.3f} ms")


def test_a_run_tests_its_node_and_tells_of_its_energy(tmp_path: Path, tell: Callable[[str], None]) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("health:\n  preflight: 120s\n")
    until = tmp_path / "until"
    with local_run(
        tmp_path / "runs", "--nodes", "1", "--spares", "0", "--policy", str(policy), script="train_tiny.py",
        arguments=("--steps", "1000000", "--step-time", "0.02", "--device", "cuda", "--until", str(until)),
    ) as run:  # fmt: skip
        run.wait("energy used", lambda state: state.joules > 0.0)
        until.touch()
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert (state.exit_code, state.incidents) == (0, []), run.story()
    (tested,) = (event for event in run.events() if isinstance(event, ev.NodeTested))
    assert tested.verdict == "ok", tested
    assert not [event for event in run.events() if isinstance(event, ev.HealthFound)], run.story()
    tell(f"the node's tests took {tested.seconds:.1f} s; the run used {state.joules} J")
