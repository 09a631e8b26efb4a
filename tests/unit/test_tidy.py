"""Rules of style that a formatter cannot hold. They only tighten: an exception no longer needed must go."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = ("launcher", "plugins", "slurm", "tests", "benchmarks")
PRODUCT = ("launcher/", "plugins/")
OTHERS = ROOT / "tests/conformance/scripts"  # as other people write them
FUNCTION_LINES = 70
FILE_LINES = 700  # files follow subjects; one that grows beyond this has several


@dataclass(frozen=True, eq=False)
class Source:
    """One file: its path from the repository's root, its text, and its syntax tree."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    def calls(self) -> Iterator[ast.Call]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, first part of the module's name) of every absolute import, at whatever depth."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.lineno, node.module.partition(".")[0]


@cache
def sources() -> tuple[Source, ...]:
    paths = [
        path for tree in TREES for path in sorted((ROOT / tree).rglob("*.py")) if OTHERS not in path.parents
    ]
    return tuple(Source(str(path.relative_to(ROOT)), path.read_text()) for path in paths)


def long_functions(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{source.name}:{node.lineno}: {node.name} has {lines} lines, most is {FUNCTION_LINES}"


def long_files(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > FILE_LINES:
        yield f"{source.name}: {lines} lines, most is {FILE_LINES}"


def silent_modules(source: Source) -> Iterator[str]:
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield f"{source.name}: the module does not say what it is for"


def sleeps(source: Source) -> Iterator[str]:
    """A test waits for something, with a deadline; it does not hope that a time was long enough."""
    if source.name.startswith("tests/"):
        for call in source.calls():
            if ast.unparse(call.func) in ("time.sleep", "sleep"):
                yield f"{source.name}:{call.lineno}: sleeps"


def prints(source: Source) -> Iterator[str]:
    """Only commands talk to people; everything else returns or raises, and daemons log."""
    if source.name.startswith(PRODUCT) and not source.name.startswith("launcher/jurymast/cli/"):
        for call in source.calls():
            if ast.unparse(call.func) in ("print", "click.echo", "sys.stdout.write"):
                yield f"{source.name}:{call.lineno}: prints"


def echoes(source: Source) -> Iterator[str]:
    """`jurymast.cli.output` alone writes to a terminal: it cleans what another user's file may hold."""
    ways = {
        "click.echo", "click.secho", "click.echo_via_pager", "click.style", "print", "sys.stdout.write",
        "sys.stderr.write", "sys.stdout.buffer.write", "sys.stderr.buffer.write", "os.write", "Console",
        "rich.print", "pprint", "pprint.pprint", "sys.stdout.writelines", "traceback.print_exc",
    }  # fmt: skip
    if source.name.startswith(("launcher/jurymast/cli/", "launcher/jurymast/report/")):
        for call in source.calls():
            if ast.unparse(call.func) in ways:
                yield f"{source.name}:{call.lineno}: prints by itself"
        for node in ast.walk(source.tree):
            named = isinstance(node, ast.ImportFrom) and node.module in ("click", "rich")
            if named and re.search(r"import .*\b(echo|secho|print|style)\b", ast.unparse(node)):
                yield f"{source.name}: gives echo another name: {ast.unparse(node)}"


def shells(source: Source) -> Iterator[str]:
    for call in source.calls():
        function = ast.unparse(call.func)
        if any(keyword.arg == "shell" for keyword in call.keywords) or function in ("os.system", "os.popen"):
            yield f"{source.name}:{call.lineno}: a shell would read the arguments again"


def pickles(source: Source) -> Iterator[str]:
    """Nothing that came over the wire or from a file is ever unpickled by our own code."""
    modules = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
    if source.name.startswith(PRODUCT):
        for line, module in source.imports():
            if module in modules:
                yield f"{source.name}:{line}: imports {module}"


def unpickles(source: Source) -> Iterator[str]:
    ways = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "np.load"}
    ways |= {"yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"}
    if source.name.startswith(PRODUCT):
        for call in source.calls():
            if ast.unparse(call.func) in ways:
                yield f"{source.name}:{call.lineno}: unpickles"


# Calls that open what a path leads to. Not those that only make something new.
BY_PATH = {
    "codecs.open", "io.open", "io.open_code", "io.FileIO", "FileIO", "gzip.open", "bz2.open", "lzma.open",
    "tarfile.open", "zipfile.ZipFile", "ZipFile", "shelve.open", "sqlite3.connect", "linecache.getline",
    "linecache.getlines", "runpy.run_path", "importlib.util.spec_from_file_location",
    "spec_from_file_location", "np.load", "np.fromfile", "np.memmap", "FileSystemReader",
    "dcp.FileSystemReader",
    "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move",
    "shutil.unpack_archive",
}  # fmt: skip
MODE = re.compile(r"'[rwxabt+]+'")
KERNELS = re.compile(r"(Path\()?f?'/(proc|sys)/")
OPENED = re.compile(r"(foreign\.|open_own\(|descriptor$)")


def opens(source: Source) -> Iterator[str]:
    """What another user could have made is opened by `jurymast.foreign` alone, and root's part has a door of
    its own: a pipe there would hang, another's file would be believed, and a link be written through."""
    if not source.name.startswith((*PRODUCT, "slurm/site/")):
        return
    called = {id(call.func) for call in source.calls()}
    for node in ast.walk(source.tree):
        named = isinstance(node, ast.Name) and node.id == "open" and isinstance(node.ctx, ast.Load)
        passed = named and id(node) not in called
        if passed or (isinstance(node, ast.ImportFrom) and "open" in [alias.name for alias in node.names]):
            yield f"{source.name}: gives open another name: {ast.unparse(node)}"
    for call in source.calls():
        if _opens_by_path(call):
            yield f"{source.name}:{call.lineno}: opens by itself"


def _opens_by_path(call: ast.Call) -> bool:
    function, words = ast.unparse(call.func), [ast.unparse(word) for word in call.args]
    keywords = {word.arg: ast.unparse(word.value) for word in call.keywords}
    first, rest = (words or [keywords.get("file", "")])[0], [*words[1:2], keywords.get("mode", "")]
    way = function.rpartition(".")[2]
    if KERNELS.match(first) or KERNELS.match(function):
        return False
    if function == "open":
        return not (OPENED.match(first) or any(MODE.fullmatch(mode) and "x" in mode for mode in rest))
    if function == "os.open":
        return "O_EXCL" not in " ".join(words)
    if function == "torch.load":
        return not first.startswith("io.BytesIO(")
    if way == "open" and function not in BY_PATH:
        mode = words[0] if words else keywords.get("mode", "'r'")
        return bool(MODE.fullmatch(mode)) and "x" not in mode
    return function in BY_PATH or way in ("read_bytes", "read_text", "write_bytes", "write_text")


# What commands reach.
LOOKING = (
    "cli/",
    "report/",
    "cluster/earlier.py",
    "cluster/kept.py",
    "journal.py",
    "rundir.py",
    "checkpoint/directory.py",
)


def looks(source: Source) -> Iterator[str]:
    """Where a command looks, `jurymast.foreign` must know of it, or a hang of storage never ends."""
    if not source.name.startswith(tuple(f"launcher/jurymast/{name}" for name in LOOKING)):
        return
    ways = {"listdir", "scandir", "iterdir", "glob", "rglob", "stat", "lstat", "exists", "isdir", "isfile"}
    for call in source.calls():
        owner, _, way = ast.unparse(call.func).rpartition(".")
        if way in ways | {"is_dir", "is_file"} and owner != "foreign":
            yield f"{source.name}:{call.lineno}: looks by itself"


PYTHON = re.compile(r"\bpython[\d.]*['\"]?( -[a-zA-Z]+)* -[a-zA-Z]*[cm]\b|(^|\s)-m jurymast|^-[IEsPBu]*[cm]$")


def interpreters(source: Source) -> Iterator[str]:
    """`jurymast.interpreter` alone writes the command lines of our own processes: any other would import from
    the directory in which it is started. Also in the text of scripts for a shell."""
    if not source.name.startswith((*PRODUCT, "slurm/site/")):
        return
    documents = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(source.tree):
        own = isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
        named = isinstance(node, ast.ImportFrom) and ast.unparse(node) == "from sys import executable"
        text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents
        if own or named or (text and PYTHON.search(node.value)):  # type: ignore[attr-defined]
            yield f"{source.name}:{getattr(node, 'lineno', 0)}: may start Python by itself"
    for call in source.calls():
        pool = re.search(r"ProcessPoolExecutor$|\bmultiprocessing\.\w", ast.unparse(call.func))
        if pool and "get_context('fork')" not in ast.unparse(call):  # the usual way of Python 3.14 starts one
            yield f"{source.name}:{call.lineno}: may start Python by itself"


def starts(source: Source) -> Iterator[str]:
    """`jurymast.programs` alone finds and hears other people's programs: a relative part of PATH would run
    what another user has put into a directory, and what they print need not be text."""
    if source.name.startswith(PRODUCT):
        for call in source.calls():
            function, keywords = ast.unparse(call.func), {word.arg for word in call.keywords}
            first = ast.unparse(call.args[0]) if call.args else ""
            starting = function.startswith("subprocess.") or function.endswith("create_subprocess_exec")
            named = re.match(r"\[?'[^/']*'", first) and starting and "executable" not in keywords
            strict = starting and keywords & {"text", "universal_newlines", "encoding"}
            if named or strict or function == "shutil.which":
                yield f"{source.name}:{call.lineno}: starts a program by itself"


def temporary(source: Source) -> Iterator[str]:
    """Where others can write to TMPDIR, they can put another directory into the place of a new one."""
    if source.name.startswith(PRODUCT):
        for call in source.calls():
            function = ast.unparse(call.func)
            if function.startswith("tempfile.") and "dir" not in {word.arg for word in call.keywords}:
                yield f"{source.name}:{call.lineno}: makes a temporary file without dir=temporary_place()"


def broad_silence(source: Source) -> Iterator[str]:
    """`except Exception: pass` hides the very errors that this program exists to report."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.unparse(node.type) if node.type else ""
        if caught in ("", "Exception", "BaseException") and all(isinstance(x, ast.Pass) for x in node.body):
            yield f"{source.name}:{node.lineno}: swallows every error"


LISTENS = re.compile(
    r"(^|\.)(create_server|start_server|start_unix_server|\w*HTTPServer|TCPServer|TCPStore|bind)$"
    r"|^(addresses\.)?listen_at\w*$"
    r"|\w*(listener|sock|socket|server)\.listen$"
)


def listens(source: Source) -> Iterator[str]:
    """`wire.handshakes` has all who connect prove the run's secret, and bounds how many wait. Any other
    listener would be open to everybody on the network."""
    if source.name.startswith((*PRODUCT, "slurm/site/")):
        for call in source.calls():
            if LISTENS.search(ast.unparse(call.func)):
                yield f"{source.name}:{call.lineno}: listens by itself"


def memories(source: Source) -> Iterator[str]:
    """`processes.shared_memory` alone makes memory that others may map: nobody can shorten it."""
    if source.name.startswith(PRODUCT):
        for call in source.calls():
            if ast.unparse(call.func).endswith(("memfd_create", "SharedMemory", "shm_open")):
                yield f"{source.name}:{call.lineno}: makes shared memory by itself"


Rule = Callable[[Source], Iterator[str]]

# rule: (a source that breaks it, as if it were that file; the files that may break it)
RULES: dict[Rule, tuple[Source, set[str]]] = {
    long_functions: (Source("launcher/a.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES), set()),
    long_files: (Source("tests/a.py", "x = 1\n" * (FILE_LINES + 1)), set()),
    silent_modules: (Source("slurm/a.py", "x = 1\n"), set()),
    sleeps: (
        Source("tests/a.py", "import time\ntime.sleep(1)\n"),
        {
            "tests/support/runs.py",  # polls a condition until a deadline
            "tests/support/waiting.py",
            "tests/local/test_checkpointer.py",  # catches a save that lasts milliseconds
            "tests/scripts/checkpoint_ranks.py",  # trainings whose steps take time
            "tests/scripts/sum_ranks.py",
            "tests/scripts/train_adapter.py",
            "tests/scripts/train_batch.py",
            "tests/scripts/train_by_itself.py",
            "tests/scripts/train_in_process.py",
            "tests/scripts/train_plain.py",
            "tests/scripts/train_styles.py",
            "tests/scripts/train_tiny.py",
        },
    ),
    prints: (
        Source("launcher/jurymast/core/a.py", "print(1)\n"),
        {
            # Processes without a terminal: what they print is their log.
            "launcher/jurymast/script/notes.py",
            "launcher/jurymast/health/once.py",  # a command, as below
            "launcher/jurymast/sim/cluster/__main__.py",
            "launcher/jurymast/demo/train_gpt.py",  # a user's script
            "plugins/jurymast_nvidia/__main__.py",
        },
    ),
    echoes: (
        Source("launcher/jurymast/cli/a.py", "import click\nclick.echo(1)\n"),
        {
            "launcher/jurymast/cli/output.py",
            "launcher/jurymast/cli/patience.py",  # without Python's buffers; it cleans by itself
            "launcher/jurymast/report/text.py",  # renders into a string, of clean parts
        },
    ),
    listens: (
        Source("launcher/a.py", "import asyncio\nasyncio.start_server(f, '', 1)\n"),
        {
            "launcher/jurymast/wire/addresses.py",  # makes listeners for `wire.handshakes`
            "launcher/jurymast/wire/handshakes.py",
            # They pass what that makes on to `wire.handshakes`.
            "launcher/jurymast/cluster/allocation.py",
            "launcher/jurymast/keeper/transfer.py",
            # Tells a run's metrics to who has a token for it, or is the run's user, and does nothing else.
            "launcher/jurymast/report/exporter.py",
            # torch's stores, which know no authentication: see docs/security.md.
            "launcher/jurymast/preflight.py",
            "launcher/jurymast/worker/rendezvous.py",
            "launcher/jurymast/worker/store.py",
        },
    ),
    memories: (
        Source("launcher/a.py", "import os\nos.memfd_create('x')\n"),
        {"launcher/jurymast/processes.py"},
    ),
    shells: (Source("slurm/a.py", "import subprocess\nsubprocess.run('x', shell=True)\n"), set()),
    pickles: (
        Source("launcher/a.py", "def f():\n    from pickle import loads\n"),
        {
            "launcher/jurymast/checkpoint/tree.py",  # to hash what torch pickles as well
            "launcher/jurymast/checkpoint/live.py",  # to and from memory of this user's own processes
            "launcher/jurymast/checkpoint/ward.py",  # from ranks of this run; refuses all but plain values
            "launcher/jurymast/agent/stacks.py",  # torch's own format; refuses all but plain values
        },
    ),
    unpickles: (
        Source("launcher/a.py", "import pickle\npickle.loads(b'')\n"),
        {
            "launcher/jurymast/checkpoint/image.py",  # of an image that the run's key vouches for
            "launcher/jurymast/checkpoint/live.py",  # from memory of this user's own processes
        },
    ),
    opens: (
        Source("launcher/a.py", "def f(path):\n    return path.read_bytes()\n"),
        {
            "launcher/jurymast/foreign.py",
            "launcher/jurymast/checkpoint/tree.py",  # with that door below it
            "slurm/site/jurymast_site/verdicts.py",  # root's own door
            # The kernel's files.
            "launcher/jurymast/agent/stacks.py",
            "launcher/jurymast/cluster/verdicts.py",
            "launcher/jurymast/health/readings.py",
            "plugins/jurymast_amd/__init__.py",
            "plugins/jurymast_host/kernel_log.py",
            "slurm/site/jurymast_site/sweep.py",
            # Memory of this user's processes, by a link below /proc that only they may follow.
            "launcher/jurymast/checkpoint/memory_tier.py",
            "launcher/jurymast/storage/local.py",
            "launcher/jurymast/worker/link.py",
            "launcher/jurymast/worker/sparing.py",
            # What the user names for output and input, as srun opens it.
            "launcher/jurymast/script/output.py",
            "launcher/jurymast/script/standard_input.py",
            # In a directory that was made for this user alone, or found to be.
            "launcher/jurymast/agent/real_io.py",
            "launcher/jurymast/worker/endings.py",
            "launcher/jurymast/worker/rank.py",
            "launcher/jurymast/worker/stack_signal.py",
            "plugins/jurymast_storage/__init__.py",
            "slurm/site/jurymast_site/guard.py",
            "slurm/site/jurymast_site/healthcheck.py",
            "slurm/site/jurymast_site/system.py",
            # What comes with the package, and what somebody names on the command line.
            "launcher/jurymast/cli/main.py",
            "launcher/jurymast/cli/options.py",
            "launcher/jurymast/cli/policy.py",
            "launcher/jurymast/cluster/planning.py",
            "launcher/jurymast/demo/train_gpt.py",
            "launcher/jurymast/reference.py",
            "launcher/jurymast/report/doctor.py",
            "slurm/site/jurymast_site/config.py",
            "launcher/jurymast/rundir.py",  # a directory, to have renames in it on disk
            "launcher/jurymast/sim/faults.py",
            "launcher/jurymast/sim/checkpoints.py",
            "launcher/jurymast/worker/before_torch.py",
            "launcher/jurymast/worker/server.py",
        },
    ),
    looks: (
        Source("launcher/jurymast/cli/a.py", "def f(path):\n    return path.exists()\n"),
        {"launcher/jurymast/report/doctor.py"},  # at this machine's own spool
    ),
    interpreters: (
        Source("launcher/a.py", "import sys\nrun([sys.executable, '-m', 'x'])\n"),
        {
            "launcher/jurymast/interpreter.py",
            "slurm/site/jurymast_site/config.py",  # -I
            # What trains is the user's: it is found as without us.
            "launcher/jurymast/agent/ranks.py",
            "launcher/jurymast/script/hook/sitecustomize.py",
            "launcher/jurymast/script/node.py",
            "launcher/jurymast/script/step.py",
            "launcher/jurymast/worker/elastic.py",
            "launcher/jurymast/worker/rank.py",
            # They start nothing, but name the Python, or read a command line.
            "launcher/jurymast/cli/resubmit.py",  # submit's own -m
            "launcher/jurymast/__init__.py",
            "launcher/jurymast/cluster/request.py",
            "launcher/jurymast/executor.py",
            "launcher/jurymast/cluster/planning.py",
            "launcher/jurymast/demo/__init__.py",
            "launcher/jurymast/report/doctor.py",
            "launcher/jurymast/script/job.py",
            "launcher/jurymast/script/recognise.py",
            "plugins/jurymast_nvidia/__main__.py",
        },
    ),
    starts: (
        Source("launcher/a.py", "import subprocess\nsubprocess.run(['squeue'])\n"),
        {
            "launcher/jurymast/programs.py",
            "launcher/jurymast/script/shims.py",  # for a user's script, as it would find it
        },
    ),
    temporary: (
        Source("launcher/a.py", "import tempfile\ntempfile.mkdtemp()\n"),
        {
            "launcher/jurymast/foreign.py",
            "plugins/jurymast_host/__init__.py",  # makes none, but looks how full it is there
        },
    ),
    broad_silence: (Source("tests/a.py", "try:\n    f()\nexcept Exception:\n    pass\n"), set()),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
    _, allowed = RULES[rule]
    broken = {source.name: found for source in sources() if (found := list(rule(source)))}
    new = [line for name, found in broken.items() if name not in allowed for line in found]
    assert not new, "\n".join(new)
    needless = allowed - broken.keys()
    assert not needless, f"no longer exceptions of {rule.__name__}: remove {', '.join(sorted(needless))}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_finds_what_it_is_for(rule: Rule) -> None:
    planted, _ = RULES[rule]
    assert list(rule(planted))


def test_no_rule_is_checked_against_nothing() -> None:
    assert len(sources()) > 100
    assert {source.name.partition("/")[0] for source in sources()} >= {"launcher", "slurm", "tests"}


@pytest.mark.parametrize(
    "line",
    [
        "open(path)", "open(path, 'a')", "open(path, 'w')", "open(file=path)", "open(f'{root}/systems')",
        "open(descriptor_path)", "path.open()", "path.open('rb')", "path.open(mode='r+')", "path.read_text()",
        "path.write_text(text)", "os.open(path, os.O_RDONLY)", "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "io.open(path)", "list(map(open, paths))", "from os import open", "shutil.copyfile(path, other)",
        "sqlite3.connect(path)", "torch.load(path)", "np.load(path)", "FileSystemReader(path)",
        "importlib.util.spec_from_file_location('a', path)", "yaml.safe_load(open(path))",
        "json.load(path.open())", "mmap.mmap(os.open(path, os.O_RDONLY), 0)",
    ],
)  # fmt: skip
def test_there_is_no_way_around_the_one_door(line: str) -> None:
    assert list(opens(Source("launcher/a.py", line)))


@pytest.mark.parametrize(
    "line",
    [
        "open(descriptor, 'rb')", "open(foreign.open_own(path))", "open('/proc/self/stat')",
        "open(path, 'x')", "os.open(path, os.O_CREAT | os.O_EXCL)", "MemoryTier.open(state)",
        "foreign.load(path)",
        "Path('/proc/uptime').read_text()", "torch.load(io.BytesIO(data))",
    ],
)  # fmt: skip
def test_who_goes_by_it_or_makes_something_new_is_let_through(line: str) -> None:
    assert not list(opens(Source("launcher/a.py", line)))


# Files that nobody reads after a power loss, or that are only there to save time.
PASSING = {
    "launcher/jurymast/agent/stacks.py": "evidence for people",
    "launcher/jurymast/storage/shared.py": "a write that a power loss ends, which begins anew",
    "launcher/jurymast/checkpoint/directory.py": "the mark of a checkpoint that was read: it is read again",
    "launcher/jurymast/cluster/verdicts.py": "what a site's health check reads within minutes",
    "launcher/jurymast/cluster/kept.py": "summaries that are made anew from the journals",
    "launcher/jurymast/report/exporter.py": "metrics, which are written anew within seconds",
    "launcher/jurymast/report/fleet.py": "a summary that is made anew from the journal",
    "launcher/jurymast/script/notes.py": "what processes of one life of a job tell each other",
}


def test_only_passing_files_are_written_without_waiting_for_the_disk() -> None:
    found = {
        source.name
        for source in sources()
        for call in source.calls()
        if any(word.arg == "durable" and ast.unparse(word.value) == "False" for word in call.keywords)
        and source.name.startswith("launcher/")
    }
    assert found == PASSING.keys()


@pytest.mark.parametrize(
    "line",
    [
        "run([sys.executable, 'x'])", "from sys import executable", "run(['python3', '-m', 'jurymast'])",
        "text = f'exec python3 -m jurymast.agent {run}'", "text = f'{python} -m jurymast.agent'",
        "text = 'exec python -u -c pass'", "command = ['/opt/python', '-Im', 'x']", "words += ['-c', code]",
        "SCRIPT = '#!/bin/sh exec python3.12 -I -m x'",
    ],
)  # fmt: skip
def test_no_python_is_started_in_another_way(line: str) -> None:
    assert list(interpreters(Source("launcher/a.py", line)))
