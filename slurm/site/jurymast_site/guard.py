"""That only root can change what root runs. The wrappers run this text before they import anything.

It counts by which way a program is reached: whoever owns a link, or a directory above it, decides what it
leads to. Uses only what Python has loaded; see the wrappers.
"""

import os
import stat

# As the kernel, which gives up on a chain of links that is longer.
LINKS_MAX = 40


class NotRoots(Exception):
    """A user other than root can change what root was to run; the message is one line that names it."""


def require_roots(path: str) -> str:
    """Raise NotRoots unless only root can change the file or directory at this absolute path, or replace it,
    a directory above it, or a link on the way. Returns the path without links. Raises OSError."""
    reached, left, links = "/", path.split("/"), 0
    _check(reached, os.lstat(reached))
    while left:
        name = left.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            reached = os.path.dirname(reached)
            continue
        here = os.path.join(reached, name)
        try:
            status = os.lstat(here)
        except FileNotFoundError:
            if os.lstat(reached).st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # sticky or not, they may make it
                raise NotRoots(f"{here}: it is missing, and users other than root can make it") from None
            raise
        _check(here, status)
        if not stat.S_ISLNK(status.st_mode):
            reached = here
            continue
        links += 1
        if links > LINKS_MAX:
            raise NotRoots(f"{path}: too many links")
        target = os.readlink(here)
        left[:0] = target.split("/")
        if target.startswith("/"):
            reached = "/"
    return reached


def require_tree(path: str) -> None:
    """Raise NotRoots unless the same holds for everything in this directory. Raises OSError."""
    waiting = [require_roots(path)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                _check(entry.path, status)
                if stat.S_ISLNK(status.st_mode):
                    _require_target(entry.path)
                elif stat.S_ISDIR(status.st_mode):
                    waiting.append(entry.path)


def _require_target(link: str) -> None:
    try:
        if os.path.isdir(require_roots(link)):  # what is in there would have to be checked as well
            raise NotRoots(f"{link}: a link to a directory")
    except FileNotFoundError:
        pass  # it leads nowhere, and root alone can change that


def require_program(command: "list[str] | tuple[str, ...]") -> None:
    """Raise NotRoots unless only root can change this program, the files among its arguments, and, if it is a
    Python or runs in one, what that imports by itself. Raises OSError."""
    if os.path.basename(command[0]) == "env":  # by whatever name it starts another one
        words = [word for word in command[1:] if not word.startswith("-") and "=" not in word]
        command = [command[0], *command[1:], *filter(None, [_on_path(word) for word in words[:1]])]
    for number, word in enumerate(command):
        if not word.startswith("/"):
            continue
        try:
            require_roots(word)
        except FileNotFoundError:
            continue  # root alone can make it; a program that is missing is reported by who runs it
        if number == 0 or (os.path.isfile(word) and os.access(word, os.X_OK)):
            _require_interpreters(word)  # nice, timeout and others start what is named after them


def _require_interpreters(program: str) -> None:
    interpreter = _interpreter(program)
    if interpreter:
        require_roots(interpreter)
    for python in filter(None, (program, interpreter)):
        if os.path.basename(python).startswith("python"):
            _require_python(python)


def _interpreter(program: str) -> str:
    """The program that the kernel runs a script with, or in the end, if that one only starts another; "" for
    any other file."""
    with open(program, "rb") as file:
        first, second = file.readline(4096), file.readline(4096)
    words = first[2:].split() if first.startswith(b"#!") else []
    if not words:
        return ""
    name = os.path.basename(words[0])
    if name == b"env":
        started = [word for word in words[1:] if not word.startswith(b"-") and b"=" not in word]
        return _on_path(os.fsdecode(started[0])) if started else ""
    if name == b"sh" and second.startswith(_EXEC):  # as installers write for a path too long for the kernel
        rest = second[len(_EXEC) :].strip()
        quoted = rest[:1] in (b'"', b"'")
        words = [rest[1:].partition(rest[:1])[0] if quoted else rest.partition(b" ")[0]]
    return os.fsdecode(words[0])


_EXEC = b"'''exec' "


def _on_path(name: str) -> str:
    for place in os.environ.get("PATH", os.defpath).split(":"):
        program = os.path.join(place, name)
        if os.access(program, os.X_OK):
            return program
    return ""


def _require_python(python: str) -> None:
    """The same for the places from which a Python imports: its own, those of its virtual environment, and
    those that files in these name."""
    prefixes = {os.path.dirname(os.path.dirname(python))}
    prefixes.add(os.path.dirname(os.path.dirname(require_roots(python))))
    for prefix in list(prefixes):
        settings = os.path.join(prefix, "pyvenv.cfg")
        if os.path.lexists(settings):
            require_roots(settings)
            prefixes |= {os.path.dirname(home) for home in _values(settings, "home")}
    places = [os.path.join(prefix, place) for prefix in prefixes for place in ("lib", "lib64", "local/lib")]
    # Of one place with two names (lib64 is a link), both ways are checked, and the contents once.
    for place in sorted({require_roots(place) for place in places if os.path.isdir(place)}):
        _require_libraries(place)


def _require_libraries(place: str) -> None:
    for name in os.listdir(place):
        library = os.path.join(place, name)
        if not name.startswith("python"):
            continue
        if not os.path.isdir(library):
            require_roots(library)  # python311.zip, which comes before all others
            continue
        require_tree(library)
        for packages in ("site-packages", "dist-packages"):
            _require_named(os.path.join(library, packages))


def _require_named(packages: str) -> None:
    """The directories that the .pth files in this one add."""
    code = ("#", "import ", "import\t")
    for name in os.listdir(packages) if os.path.isdir(packages) else ():
        if name.endswith(".pth"):
            with open(os.path.join(packages, name), encoding="utf-8", errors="surrogateescape") as file:
                lines = [line.strip() for line in file]
            added = [os.path.join(packages, line) for line in lines if line and not line.startswith(code)]
            for place in filter(os.path.isdir, added):
                require_tree(place)


def _values(settings: str, key: str) -> "list[str]":
    with open(settings, encoding="utf-8") as file:
        pairs = [line.partition("=") for line in file]
    return [value.strip() for name, _, value in pairs if name.strip().lower() == key]


def _check(path: str, status: os.stat_result) -> None:
    """In a sticky directory, entries can be replaced only by their owners."""
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    open_to_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode)
    if status.st_uid != 0 or (open_to_others and not sticky):
        raise NotRoots(
            f"{path}: users other than root can write to it, so root does not run it: chown root, chmod go-w"
        )
