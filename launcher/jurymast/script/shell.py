"""The commands in a batch script's text, as far as they can be read without running it: quotes, lines that go
on, here-documents, and variables that the text itself sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

# `A=`, `A+=`, and whether the value is a list in parentheses.
ASSIGNMENT = re.compile(r"(\w+)(?:\[\w*\])?(\+?)=(.*)", re.DOTALL)
DECLARES = frozenset({"declare", "export", "local", "readonly", "typeset"})
# Braces within a default, `${A:-${B}}`, belong to it; the next `}` ends it.
REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?:(:?[-=])((?:[^{}]|\{[^{}]*\})*))?\})")
LIST = re.compile(r'"\$\{\w+\[@\]\}"')
OUTPUT = re.compile(r"(?<!\\)(?:`[^`]*`|\$\(\([^()]*\)\)|\$\([^()]*\))")
WHERE = re.compile(r"(?:which|command\s+-v)\s+([\w./-]+)")
HERE_DOCUMENT = re.compile(r"<<(-?)[ \t]*(\\?[\w.-]+|'[^'\n]*'|\"[^\"\n]*\")")
REDIRECTION = re.compile(r"(?:&>>?|[<>]&|<<<|>>|>\||<>|[<>])[ \t]*")
PLAIN = re.compile(r"[\w./,:=@%+-]*")  # what has no meaning for a shell
CLOSES = {"(": ")", "{": "}"}

# Quotes and brackets that stand in each other, or that nothing closes, are read again and again. So many
# characters are read in all, in regular expressions some times as many.
READ_CHARACTERS_MAX = 1 << 20
AS_EXPRESSION = 8
SPELLED_CHARACTERS_MAX = 1 << 18
CHOICES_MAX = 10  # of a variable
VALUE_CHARACTERS_MAX = 1 << 13
DEFAULT_CHARACTERS_MAX = 400  # of `${A:-...}`, which may stand in each other
UNKNOWN = "$(...)"


@dataclass(frozen=True)
class Command:
    """A command on this `line`: its `text`, and its `words`, with the variables that the script sets put in.
    `exported`: those that the command would find in its environment; `perhaps`: other values of these,
    between which the script chooses."""

    line: int
    text: str
    words: tuple[str, ...]
    exported: Mapping[str, str]
    perhaps: Mapping[str, Sequence[str]]


def commands(text: str, variables: Mapping[str, str]) -> Iterator[Command]:
    """Return the commands of a script one after the other. `variables`: what its environment has. If the
    script is too long to be read to its end, the last command has no words."""
    values = {name: [value] for name, value in variables.items()}
    reader = _WordReader(text, values, exported=set(variables))
    try:
        yield from reader.commands()
    except _TooLongError:
        yield Command(text.count("\n", 0, reader.at) + 1, "...", (), {}, {})


def spelled_out(text: str, variables: Mapping[str, str]) -> str:
    """Put `variables` into a text that a further shell reads, which would put them in itself."""
    left = SPELLED_CHARACTERS_MAX

    def put_in(found: re.Match[str]) -> str:
        nonlocal left
        value = variables.get(found[1] or found[2], found[0])
        left -= len(value)
        return value if left > 0 else found[0]

    for _ in range(4):  # their values may have variables in them
        more = REFERENCE.sub(put_in, text)
        if more == text or left <= 0:
            break
        text = more
    return text


class _TooLongError(Exception):
    """There is more to read than `READ_CHARACTERS_MAX`."""


class _Allowance:
    """How much may still be read of a script, over all readers of its parts."""

    def __init__(self) -> None:
        self._left = READ_CHARACTERS_MAX

    def take(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise _TooLongError


@dataclass
class _WordReader:
    """Goes through the text once, with what it has set so far."""

    text: str
    values: dict[str, list[str]]
    at: int = 0
    exported: set[str] = field(default_factory=set)
    perhaps: dict[str, list[str]] = field(default_factory=dict)
    choices: int = 0  # how many `if` and `case` are open
    documents: list[tuple[str, bool]] = field(default_factory=list)  # that begin after this line
    allowance: _Allowance = field(default_factory=_Allowance)

    def commands(self) -> Iterator[Command]:
        while self.at < len(self.text):
            raw, start = self._raw_words()
            text = " ".join(self.text[max(start, 0) : self.at].replace("\\\n", " ").split())
            yield from self._that_print(raw, self.text.count("\n", 0, max(start, 0)))
            if raw and (words := self._set(raw)):
                line = self.text.count("\n", 0, start) + 1
                self.allowance.take(len(self.exported) + sum(map(len, words)))
                given = {name: " ".join(self.values[name]) for name in self.exported & self.values.keys()}
                others = {name: self.perhaps[name] for name in self.exported & self.perhaps.keys()}
                yield Command(line, text.rstrip("&|;() "), tuple(words), given, others)

    def _that_print(self, raw: Sequence[str], lines: int) -> Iterator[Command]:
        """The commands in `$(...)`, which print words of a command that begins after so many `lines`."""
        for found in (found[0] for word in raw if word[:1] != "'" for found in OUTPUT.finditer(word)):
            if not found.startswith("$(("):
                inner = self._of_part(found[1:-1] if found[0] == "`" else found[2:-1])
                inner.exported = self.exported
                for one in inner.commands():
                    yield replace(one, line=one.line + lines)

    # ---- words as they are written

    def _raw_words(self) -> tuple[list[str], int]:
        """The words of the next command with their quotes, without its redirections; and where it starts."""
        words, word, start, dropped = [], "", -1, False

        def end() -> None:
            nonlocal word, dropped
            if word and not dropped:
                words.append(word)
            dropped = dropped and not word
            word = ""

        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#" and not word:
                self.at = self._next("\n")
            elif found := HERE_DOCUMENT.match(self.text, self.at):
                self.documents.append((found[2].strip("\\'\""), bool(found[1])))
                self.at = found.end()
            elif found := REDIRECTION.match(self.text, self.at):
                word = "" if word.isdigit() else word
                end()
                self.at, dropped = found.end(), True
            elif char == "(" and ASSIGNMENT.fullmatch(word) and word.endswith("="):
                word += self._until_closed("(")
            elif char in "\n;&|()":
                end()
                self.at += 1
                if char == "\n":
                    self._skip_documents()
                if words:
                    break
                dropped, start = False, -1
            elif char in " \t\r":
                end()
                self.at += 1
            else:
                start = self.at if start < 0 else start
                word += self._piece()
        end()
        return words, start

    def _piece(self) -> str:
        """The next character, or all of what stands in quotes or brackets."""
        char = self.text[self.at]
        if char in "'\"`":
            end = self._closing_quote(char)
        elif char == "\\":
            end = self.at + 2
        elif char == "$" and self.text[self.at + 1 : self.at + 2] in CLOSES:
            self.at += 1
            return "$" + self._until_closed(self.text[self.at])
        else:
            found = PLAIN.match(self.text, self.at)
            end = max(self.at + 1, found.end() if found else 0)
        self.allowance.take(end - self.at)
        piece, self.at = self.text[self.at : end], end
        return piece

    def _closing_quote(self, quote: str) -> int:
        """The place after the quote that closes the one here; after this one if none does."""
        place = self.at + 1
        while place < len(self.text) and self.text[place] != quote:
            place += 2 if self.text[place] == "\\" and quote != "'" else 1
        self.allowance.take(place - self.at)
        return place + 1 if place < len(self.text) else self.at + 1

    def _until_closed(self, opens: str) -> str:
        """What stands in brackets, with them; only the first bracket if nothing closes it."""
        begin, depth = self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            depth += (char == opens) - (char == CLOSES[opens])
            self._piece() if char in "'\"`\\" else self._skip(1)
            if depth == 0:
                return self.text[begin : self.at]
        self.at = begin + 1
        return opens

    def _skip(self, characters: int) -> None:
        self.allowance.take(characters)
        self.at += characters

    def _next(self, text: str) -> int:
        found = self.text.find(text, self.at)
        return len(self.text) if found < 0 else found

    def _skip_documents(self) -> None:
        """Skip the here-documents that begin on this line; none that has no end."""
        for delimiter, indented in self.documents:
            before = r"\n?^\t*" if indented else r"\n?^"
            found = re.compile(before + re.escape(delimiter) + r"$", re.MULTILINE).search(self.text, self.at)
            self.allowance.take(((found.end() if found else len(self.text)) - self.at) // AS_EXPRESSION)
            self.at = found.end() if found else self.at
        self.documents.clear()

    # ---- variables

    def _set(self, raw: list[str]) -> list[str]:
        """The words of a command with variables put in, once it has set its own; none if it only sets."""
        self.choices += (raw[0] in ("if", "case")) - (raw[0] in ("fi", "esac"))
        first = 1 if raw[0] in ("then", "else", "do", "{") else 0
        if raw[first : first + 1] and raw[first] in DECLARES:
            for word in raw[first + 1 :]:
                self._assign(word)
                if raw[first] == "export" or "-x" in raw:
                    self.exported.add(word.partition("=")[0])
            return []
        if raw[first : first + 1] in (["unset"], ["unsetenv"]):
            for name in raw[first + 1 :]:
                if not self._is_choice(name, [""]):
                    self.values.pop(name, None)
            return []
        if raw[first : first + 1] == ["setenv"] and len(raw) == first + 3:  # csh
            self._assign(f"{raw[first + 1]}={raw[first + 2]}")
            self.exported.add(raw[first + 1])
            return []
        alone = all(ASSIGNMENT.fullmatch(word) for word in raw[first:])
        for word in raw[first:] if alone else ():
            self._assign(word)
        return [] if alone else [text for word in raw for text in self.expanded(word)]

    def _assign(self, word: str) -> None:
        """Note a value; of several between which the script chooses, the first counts."""
        found = ASSIGNMENT.fullmatch(word)
        if found is None:
            return
        if found[3].startswith("("):
            inner = self._of_part(found[3][1:-1].replace("\n", " "))
            value = [text for raw in inner._all_words() for text in self.expanded(raw)]
        else:
            value = [" ".join(self.expanded(f'"{found[3]}"' if found[3][:1] not in "'\"" else found[3]))]
        earlier = self.values.get(found[1], [])
        if sum(map(len, earlier + value)) > VALUE_CHARACTERS_MAX:
            return
        if not found[2] and self._is_choice(found[1], value):
            return
        if not found[2]:
            self.values[found[1]] = value
        elif found[3].startswith("("):
            self.values[found[1]] = earlier + value
        else:
            self.values[found[1]] = ["".join(earlier) + "".join(value)]

    def _is_choice(self, name: str, value: list[str]) -> bool:
        """Whether the variable has a value already, and gets this one only where the script chooses it."""
        if self.choices and name in self.values:
            if len(there := self.perhaps.setdefault(name, [])) < CHOICES_MAX:
                there.append(" ".join(value))
            return True
        self.perhaps.pop(name, None)
        return False

    def _of_part(self, text: str) -> _WordReader:
        return _WordReader(text, self.values, allowance=self.allowance)

    def _all_words(self) -> Iterator[str]:
        while self.at < len(self.text):
            yield from self._raw_words()[0]

    def expanded(self, raw: str) -> list[str]:
        """The words that a word becomes, without its quotes. What cannot be known stays as it is written."""
        texts: list[str] = []
        reader, there, text = self._of_part(raw), False, ""
        while reader.at < len(raw):
            piece = reader._piece()
            if LIST.fullmatch(piece) and (parts := self._value(piece[1:-1])) is not None:
                texts += parts
            elif piece[:1] in "'\"" and len(piece) > 1:
                there = True
                text += piece[1:-1] if piece[0] == "'" else self._within(piece[1:-1])
            elif piece.startswith("\\"):
                there, text = True, text + piece[1:]
            elif piece == "$" or piece.startswith("${"):
                piece += (re.match(r"\w*", raw[reader.at :]) or [""])[0] if piece == "$" else ""
                reader.at += len(piece) - 1 if piece[1:2] != "{" else 0
                parts = self._value(piece)
                words = " ".join(parts).split() if parts is not None else [piece]
                there = there or bool(words)
                texts += [text + words[0], *words[1:-1]] if len(words) > 1 else []
                text = words[-1] if len(words) > 1 else text + "".join(words)
            else:
                there, text = True, text + _printed(piece)
        return [*texts, text] if there else texts

    def _within(self, text: str) -> str:
        """A text in double quotes, with variables put in."""
        text = OUTPUT.sub(lambda found: _printed(found[0]), text.replace("\\\n", ""))
        # A `${A:-` that nothing closes is looked for to the end.
        self.allowance.take(text.count("$") * len(text) // AS_EXPRESSION)
        for found in reversed(list(REFERENCE.finditer(text))):
            if text[: found.start()].endswith("\\"):
                text = text[: found.start() - 1] + text[found.start() :]
            elif (value := self._value(found[0])) is not None:
                text = text[: found.start()] + " ".join(value) + text[found.end() :]
        return text.replace('\\"', '"')

    def _value(self, reference: str) -> list[str] | None:
        """What `$A` or `${A:-B}` stands for, if that is known."""
        found = REFERENCE.fullmatch(reference)
        if found is None:
            return None
        name = found[1] or found[2]
        empty_counts = not (found[3] or "").startswith(":")
        if self.values.get(name, [""]) != [""] or (name in self.values and empty_counts):
            self.allowance.take(sum(map(len, self.values[name])))
            return self.values[name]
        if not found[3] or len(found[4]) > DEFAULT_CHARACTERS_MAX:
            return None
        value = self.expanded(found[4])
        if found[3].endswith("="):
            self.values[name] = value
        return value


def _printed(piece: str) -> str:
    """What a command in `$(...)` prints, for the few where that is known; any other piece as it is."""
    if piece[:1] not in "$`" or len(piece) < 3:
        return piece
    command = piece.strip("$`()").strip()
    found = WHERE.fullmatch(command)
    return found[1] if found else "." if command == "pwd" else UNKNOWN
