"""The commands in a script's text, read without running it."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurymast.script.shell import VALUE_CHARACTERS_MAX, commands, spelled_out

SIGNS = "'\"`$(){}[]@:-=+\\\n \t#;&|<>!*aA1_.~/"


def words(text: str) -> list[list[str]]:
    return [list(command.words) for command in commands(text, {})]


@pytest.mark.parametrize(
    "text",
    [
        "show a 'b c' \"d 'e'\" f\\ g h'i'\"j\"",
        "A='1 2' B=\"$A\"; show $A \"$A\" x${A}y \"${B}z\"",
        "A=(1 '2 3'\n  4 # five\n); A+=(6); show \"${A[@]}\" ${A[*]}",
        "A=; B=b; show $A \"$A\" ${A:-x} ${A-x} ${B:-x} ${C:=d} $C",
        "export A=1; A+=2; show $A",
        "cat <<END; show after\nshow inside\nEND\nshow last",
        "cat <<-'END' >/dev/null\n\tshow 'inside\n\tEND\nshow last",
        "show a \\\n  b # c\nshow d; show e && show f | cat",
        'show "two\nlines" 2>&1 </dev/null | cat # end',
        "f() { show in; }; (f)",
        "if true; then show a; fi; for A in 1; do show b; done",
        "show \"$(date '+%d')\" >/dev/null; show a#b 2>/dev/null",
        "show a2 >&2; show c<<<d",
    ],
)  # fmt: skip
def test_words_are_those_of_bash(text: str) -> None:
    """Of all calls of `show` that bash makes, in its order. Where bash puts in what only runs, we have it as
    it is written: those words are left out."""
    program = 'show() { printf "<%s>" "$@" >>"$LOG"; echo >>"$LOG"; }\n'
    read, write = os.pipe()
    subprocess.run(
        ["bash", "-c", program + text], check=False, pass_fds=[write], timeout=60,
        env={"PATH": os.environ["PATH"], "LOG": f"/dev/fd/{write}"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(write)
    with os.fdopen(read) as log:
        theirs = log.read().splitlines()
    calls = (found[found.index("show") + 1 :] for found in words(text) if "show" in found)
    ours = "\n".join("".join(f"<{word}>" for word in call) for call in calls).splitlines()
    known = [(ours, theirs) for ours, theirs in zip(ours, theirs, strict=False) if "$" not in ours]
    assert known, (ours, theirs)
    assert all(ours == theirs for ours, theirs in known), (ours, theirs)


def test_a_quote_or_bracket_that_nothing_closes_is_an_ordinary_sign() -> None:
    assert words("# don't\nprint it's $(x\nsrun a") == [["print", "it's", "$(x"], ["srun", "a"]]
    assert words("cat <<END\nsrun a") == [["cat"], ["srun", "a"]]


def test_of_two_values_between_which_the_script_chooses_the_first_counts() -> None:
    assert words("if x; then A=1; else A=2; fi; go $A")[-1] == ["go", "1"]
    assert words('A=""\nif x; then A=--on; fi\ngo $A b')[-1] == ["go", "b"]


def test_a_default_ends_at_its_own_brace() -> None:
    found = words('A=1\ngo "${A:-99} x" "${B:-${A}} y" ${A:-${B:-2}}z "${C}"')[-1]
    assert found == ["go", "1 x", "1 y", "1z", "${C}"]
    assert spelled_out("${A:-9} ${B} ${C:-${A}}", {"A": "1", "C": "3"}) == "1 ${B} 3"


def test_values_that_double_each_time_end() -> None:
    text = "A=ab\n" + "A=$A$A\n" * 60 + "go $A"
    assert len(words(text)[-1][1]) <= 2 * VALUE_CHARACTERS_MAX
    assert words("go " + "${A:-" * 5000 + "}" * 5000)
    assert len(spelled_out("$A" * 100, {"A": "$A" * 100})) <= 1 << 21


@given(st.text(alphabet=SIGNS, max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_text_is_read_to_its_end(text: str) -> None:
    found = list(commands(f"{text}\nlast\n", {"A": "1"}))
    assert all(command.words and 1 <= command.line <= text.count("\n") + 2 for command in found)
