"""Compile C and C++ by the compiler of the machine that it runs on, and load it.

That happens once per machine; the library is kept in the user's cache folder. A cached library is loaded only if it
belongs to the user, nobody else can write to it, and its contents have the digest in its name. On other systems than
Linux, without a compiler, or with BATCHNORM_COMPILE=0 in the environment, nothing is compiled.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple


class Unavailable(RuntimeError):
    """Say why a source cannot be compiled and loaded here.

    Beyond the paper: slower ways do the same.
    """


class Source(NamedTuple):
    """Name what is compiled, how, and what loads the library.

    Beyond the paper: kernel.c and autograd.cpp.
    """

    path: Path
    language: str  # as messages call it
    variable: str  # of the environment, with the compiler's command
    compiler: str  # the command if there is no such variable
    flags: tuple[str, ...]
    libraries: tuple[str, ...]  # flags that come after the source
    depends: str  # what else the compiled code depends on
    load: Callable[[Path], Any]  # raises OSError, ImportError or AttributeError if the library is damaged


def built(source: Source) -> tuple[Any, str | None]:
    """Return the loaded library, and why it was compiled for this process alone, if it was.

    Raises:
        Unavailable: with the reason.
    """
    command = _command(source)
    try:
        try:
            folder = _folder(create=True)
            found = _cached(source, folder, command)
            if found is None:
                with _alone(folder / f"{source.path.stem}.lock"):
                    found = _cached(source, folder, command) or _compile(source, folder, command)
            return found, None
        except (OSError, AttributeError, ImportError, RuntimeError) as error:
            # There is no home, nothing can be written or loaded there, or not by us alone.
            with tempfile.TemporaryDirectory() as temporary:
                return _compile(source, Path(temporary), command), str(error)
    except (OSError, AttributeError, ImportError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise Unavailable(
            f"{command[0]} makes no library of {source.path.name} that can be loaded: {said.strip()}"
        ) from error


def cached(source: Source) -> Any:
    """Return the loaded library if it was compiled before; None if not.

    Raises:
        Unavailable: if it could not be compiled either.
    """
    command = _command(source)
    try:
        folder = _folder(create=False)
        failure = folder / f"{source.path.stem}-{_key(source, command)}.failed"
        if failure.exists():
            raise Unavailable(f"{failure.read_text()} (delete {failure} to try again)")
        return _cached(source, folder, command)
    except OSError:
        return None


def remember_failure(source: Source, why: str) -> None:
    """Let :func:`cached` say at once what a compiler took long to say."""
    with suppress(OSError):
        (_folder(create=True) / f"{source.path.stem}-{_key(source, _command(source))}.failed").write_text(why)


def _command(source: Source) -> list[str]:
    """Return the compiler's command."""
    if os.environ.get("BATCHNORM_COMPILE") == "0":
        raise Unavailable("the environment says BATCHNORM_COMPILE=0")
    if sys.platform != "linux":
        raise Unavailable(f"{source.path.name} is compiled on Linux only, not on {sys.platform}")
    named = os.environ.get(source.variable) or source.compiler
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise Unavailable(f"{source.variable} is no command: {named} ({error})") from error
    compiler = shutil.which(command[0]) if command else None
    if compiler is None:
        raise Unavailable(f"there is no {source.language} compiler: {named} is not found")
    return [compiler, *command[1:]]


def _folder(*, create: bool) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchnorm"
    if create:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()
    _check_private(folder)
    return folder


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let one process at a time compile a source, if the file system knows locks."""
    import fcntl

    with lock.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_private(path: Path) -> None:
    """Refuse what others own or can write to, and links."""
    found = path.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(found.st_mode):
        raise PermissionError(f"{path} is a link, belongs to another user, or others can write to it")


def _key(source: Source, command: list[str]) -> str:
    given = (source.path.read_bytes(), command, source.flags, source.libraries, source.depends)
    return hashlib.sha256(repr(given).encode()).hexdigest()[:16]


def _name(source: Source, key: str, library: Path) -> str:
    return f"{source.path.stem}-{key}-{hashlib.sha256(library.read_bytes()).hexdigest()[:32]}.so"


def _cached(source: Source, folder: Path, command: list[str]) -> Any:
    """Load the library if it is there; remove what is damaged or not ours, so that it is compiled again."""
    key = _key(source, command)
    for path in sorted(folder.glob(f"{source.path.stem}-{key}-*.so")):
        try:
            _check_private(path)
            # To load a library that was cut short ends the process.
            if path.name == _name(source, key, path):
                return source.load(path)
        except (OSError, AttributeError, ImportError):
            pass
        path.unlink(missing_ok=True)
    return None


def _compile(source: Source, folder: Path, command: list[str]) -> Any:
    """Compile, and keep the result in the folder if it can be loaded."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        out = Path(temporary) / "library.so"
        _run([*command, *source.flags, "-o", str(out), str(source.path), *source.libraries])
        out.chmod(0o700)  # whatever the umask is
        loaded = source.load(out)
        with out.open("rb") as file:
            os.fsync(file.fileno())
        out.replace(
            folder / _name(source, _key(source, command), out)
        )  # all of it or nothing: others may compile it as well
        return loaded


_running: set[subprocess.Popen[str]] = set()


def _run(command: list[str]) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # In a session of its own: a compiler starts others, which must end with it.
    with subprocess.Popen(command, **pipes, text=True, errors="replace", start_new_session=True) as process:
        _running.add(process)
        try:
            _, said = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            stop()
            raise
        finally:
            _running.discard(process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def stop() -> None:
    """End compilers that are at work, as a process does that ends before them."""
    for process in list(_running):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
