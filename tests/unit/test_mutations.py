"""Mutants: which mistakes are planted, and that whoever is to notice them runs them."""

from __future__ import annotations

from pathlib import Path

from mutations.__main__ import PACKAGE, ROOT, SHELLS, Checkout, by_plans, by_units
from mutations.equivalent import EQUIVALENT
from mutations.mutants import MOST_OF_A_FILE, chosen, of_file

SOURCE = """
class Door:
    async def shut(self, hard, tries):
        if self.locked:
            return
        await self.close()
        log.info("closed")
        self.shut_at = now
        if hard and tries < MOST and now > self.shut_at:
            self.write(tries + 1)
            self.reply()
        return [Knock(), *self.rest]
"""


def test_operators(tmp_path: Path) -> None:
    path = tmp_path / "door.py"
    path.write_text(SOURCE)
    changes = {(one.operator, one.before, one.after) for one in of_file(tmp_path, path)}
    both = "hard and tries < MOST and now > self.shut_at"
    calls = "self.write(tries + 1)\n            self.reply()"
    assert changes == {
        ("negate", "self.locked", "not (self.locked)"),
        ("guard", "return", "pass"),
        ("drop", "await self.close()", "pass"),
        ("drop", "self.shut_at = now", "pass"),
        ("negate", both, "not (hard and tries < MOST and (now > self.shut_at))"),
        ("or", both, "((hard) or (tries < MOST) or (now > self.shut_at))"),
        ("part 1", both, "((tries < MOST) and (now > self.shut_at))"),
        ("part 2", both, "((hard) and (now > self.shut_at))"),
        ("part 3", both, "((hard) and (tries < MOST))"),
        ("bound", "tries < MOST", "(tries <= MOST)"),
        ("drop", "self.write(tries + 1)", "pass"),
        ("one", "tries + 1", "(tries)"),
        ("drop", "self.reply()", "pass"),
        ("swap", calls, "self.reply()\n            self.write(tries + 1)"),
        ("effect 1", "[Knock(), *self.rest]", "[*self.rest]"),
        ("effect 2", "[Knock(), *self.rest]", "[Knock()]"),
    }
    for mutant in of_file(tmp_path, path):
        changed = mutant.applied(SOURCE.encode()).decode()
        assert changed.replace(mutant.after, mutant.before, 1) == SOURCE or mutant.after == "pass"
        compile(changed, "door.py", "exec")


def test_a_seed_chooses_the_same_again_from_many_files() -> None:
    first, again, other = (chosen(ROOT / PACKAGE, ["core"], seed, 40, ()) for seed in (1, 1, 2))
    assert first == again != other
    assert len({one.path for one in first}) >= len(first) / MOST_OF_A_FILE == 20
    without = chosen(ROOT / PACKAGE, ["core"], 1, 40, {first[0].name})
    assert first[0] not in without
    assert len(without) == 40


def test_what_is_listed_as_changing_nothing_is_in_the_code() -> None:
    folders = (path for of in ("core", *SHELLS) for path in (ROOT / PACKAGE / of).rglob("*.py"))
    assert set(EQUIVALENT) <= {one.name for path in folders for one in of_file(ROOT / PACKAGE, path)}


def test_a_mistake_is_noticed_by_plans_and_by_a_test(tmp_path: Path) -> None:
    checkout, path = Checkout(tmp_path), Path(PACKAGE, "core/nodes/watch.py")
    mutants = of_file(ROOT / PACKAGE, ROOT / path)
    mutant = next(one for one in mutants if one.before == "self.nodes[node] = watch")
    by_plan, plans = by_plans(checkout, mutant, 5)
    assert by_plan.startswith("0: a machine failed")
    assert plans == 1
    assert by_units(checkout, mutant)[0].startswith("tests/unit/")
    assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes()
