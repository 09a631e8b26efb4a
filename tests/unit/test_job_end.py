"""How a batch script's job has ended, by Slurm's own words."""

from __future__ import annotations

import pytest

from jurymast.cluster import slurm
from jurymast.errors import ClusterUnavailableError

LINE = (
    "JobId=7 JobName=a\nb JobState=FAILED UserId=me(1) GroupId=domain users(1) {} TimeLimit=1:00 "
    "Command=/x/job.sh a=b JobState=RUNNING WorkDir=/x Comment=ExitCode=9:0\nJobState=PENDING Power=\n"
)


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["JobState=RUNNING ExitCode=0:0"], None),
        (["JobState=COMPLETING ExitCode=0:0"], None),
        (["JobState=PENDING Reason=BeginTime ExitCode=0:0"], None),
        (["JobState=COMPLETED ExitCode=0:0"], 0),
        (["JobState=FAILED ExitCode=7:0"], 7),
        (["JobState=TIMEOUT ExitCode=0:15"], 143),
        (["JobState=COMPLETED ExitCode=0:0", "JobState=FAILED ExitCode=3:0"], 3),
        (["JobState=FAILED ExitCode=3:0", "JobState=RUNNING ExitCode=0:0"], None),
        ([], None),
    ],
)
def test_exit_codes(states: list[str], code: int | None) -> None:
    assert slurm.exit_code("".join(LINE.format(state) for state in states)) == code


def test_a_controller_that_is_away_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    answers = ["JobState=RUNNING", "", "JobState=COMPLETED ExitCode=5:0"]

    def ask(command: list[str]) -> str:
        assert command == ["scontrol", "--clusters=c", "show", "job", "7", "--oneliner"]
        answer = answers.pop(0)
        if not answer:
            raise ClusterUnavailableError("away")
        return LINE.format(answer)

    monkeypatch.setattr(slurm, "run_command", ask)
    assert slurm.wait("7", "c") == 5
    monkeypatch.setattr(slurm, "SILENCE_LIMIT_S", -1.0)
    answers.append("")
    with pytest.raises(ClusterUnavailableError):
        slurm.wait("7", "c")
