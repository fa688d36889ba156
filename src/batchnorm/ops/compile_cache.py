"""Compile C and C++ sources with the machine's own compiler, load the libraries, and cache compiled files.

Compiled libraries are stored in the user's cache folder, so that later processes need not compile them again. A cached
library is loaded only if the user owns the file, nobody else can write to it, and its contents match the digest in its
name. No library is compiled or loaded if the system is not Linux, if there is no compiler, or if the environment
variable BATCHNORM_COMPILE is 0.
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
    """Raised if a library cannot be compiled or loaded; the message says why."""


class Source(NamedTuple):
    """Describe a source file, how to compile it and how to load the library."""

    path: Path
    language: str
    variable: str  # the name of the environment variable that holds the compiler's command, such as "CC"
    compiler: str  # the compiler's command if that environment variable is not set
    flags: tuple[str, ...]
    libraries: tuple[str, ...]  # linker flags, which must follow the source file on the command line
    depends: str  # for the cache key: what the compiled code depends on besides the source and the command
    load: Callable[[Path], Any]  # loads a compiled library; may raise OSError, ImportError or AttributeError


def built(source: Source) -> tuple[Any, str | None]:
    """Compile the library unless it is cached, and load it.

    Returns the library and the reason why it could not be cached; the reason is None if the library is in the cache.

    Raises:
        Unavailable: if the source cannot be compiled or the library cannot be loaded.
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
        except (OSError, AttributeError, ImportError) as error:
            # Usually, this error means that the cache folder cannot be created or written to, that other users can
            # write to it, or that libraries cannot be loaded from it. So compile in a temporary folder instead.
            with tempfile.TemporaryDirectory() as temporary:
                return _compile(source, Path(temporary), command), str(error)
    except (OSError, AttributeError, ImportError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise Unavailable(
            f"{command[0]} could not compile {source.path.name} into a loadable library: {said.strip()}"
        ) from error


def cached(source: Source) -> Any:
    """Load the library from the cache, or return None if it is not there.

    Raises:
        Unavailable: if the source cannot be compiled on this machine, or if compiling or loading it failed earlier.
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


def kept(name: str, depends: object, make: Callable[[], bytes]) -> bytes:
    """Return a file's contents from the cache folder; if the file is not there, call ``make`` and cache the result.

    ``depends`` describes everything that the contents depend on; if it changes, ``make`` is called again.
    """
    key = hashlib.sha256(repr(depends).encode()).hexdigest()[:16]
    try:
        folder = _folder(create=True)
        for path in sorted(folder.glob(f"{name}-{key}-*.bin")):
            with suppress(OSError):
                _check_private(path)
                found = path.read_bytes()
                if path.name == _named(name, key, found, "bin"):
                    return found
            with suppress(OSError):
                path.unlink()
    except OSError:
        return make()
    made = make()
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder) as temporary:
        out = Path(temporary) / "made"
        out.write_bytes(made)
        out.chmod(0o600)  # otherwise the umask might let others write to the file, and `_check_private` would reject it
        out.replace(folder / _named(name, key, made, "bin"))
    return made


def remember_failure(source: Source, error: Unavailable) -> None:
    """Record that compiling or loading a source failed, so that later calls of :func:`cached` raise the same error."""
    # Record only a failed compiler run or import. Other errors, such as a timeout, may not recur.
    if isinstance(error.__cause__, subprocess.CalledProcessError | ImportError):
        with suppress(OSError):
            failure = _folder(create=True) / f"{source.path.stem}-{_key(source, _command(source))}.failed"
            failure.write_text(str(error))


def _command(source: Source) -> list[str]:
    if os.environ.get("BATCHNORM_COMPILE") == "0":
        raise Unavailable("BATCHNORM_COMPILE=0 is set in the environment")
    if sys.platform != "linux":
        raise Unavailable(f"{source.path.name} is compiled on Linux only, not on {sys.platform}")
    named = os.environ.get(source.variable) or source.compiler
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise Unavailable(f"{source.variable} is not a valid command: {named} ({error})") from error
    compiler = shutil.which(command[0]) if command else None
    if compiler is None:
        raise Unavailable(f"there is no {source.language} compiler: {named} was not found")
    return [compiler, *command[1:]]


def _folder(*, create: bool) -> Path:
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchnorm"
    except RuntimeError as error:
        raise OSError(str(error)) from error  # Path.home() found no home folder
    if create:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()
    _check_private(folder)
    return folder


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a file lock, so that only one process compiles a source at a time; skip the lock if it is not supported."""
    import fcntl

    with lock.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_private(path: Path) -> None:
    """Raise PermissionError if ``path`` is a link, or if another user owns it or can write to it."""
    found = path.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(found.st_mode):
        raise PermissionError(f"{path} is a link, belongs to another user, or is writable by others")


def _key(source: Source, command: list[str]) -> str:
    given = (source.path.read_bytes(), command, source.flags, source.libraries, source.depends)
    return hashlib.sha256(repr(given).encode()).hexdigest()[:16]


def _named(name: str, key: str, contents: bytes, suffix: str = "so") -> str:
    return f"{name}-{key}-{hashlib.sha256(contents).hexdigest()[:32]}.{suffix}"


def _cached(source: Source, folder: Path, command: list[str]) -> Any:
    """Load and return the cached library, or return None if there is none; delete damaged or unsafe files."""
    key = _key(source, command)
    for path in sorted(folder.glob(f"{source.path.stem}-{key}-*.so")):
        try:
            _check_private(path)
            # Compare the digests first, because loading a truncated library can crash the process.
            if path.name == _named(source.path.stem, key, path.read_bytes()):
                return source.load(path)
        except (OSError, AttributeError, ImportError):
            pass
        path.unlink(missing_ok=True)
    return None


def _compile(source: Source, folder: Path, command: list[str]) -> Any:
    """Compile the source, load the library, store its file in the folder, and return the loaded library."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        out = Path(temporary) / "library.so"
        _run([*command, *source.flags, "-o", str(out), str(source.path), *source.libraries])
        out.chmod(0o700)
        loaded = source.load(out)
        with out.open("rb") as file:
            os.fsync(file.fileno())
        out.replace(folder / _named(source.path.stem, _key(source, command), out.read_bytes()))
        return loaded


_running: set[subprocess.Popen[str]] = set()


def _run(command: list[str]) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Start the compiler in a new session, so that `stop` can kill it together with its child processes.
    with subprocess.Popen(command, **pipes, text=True, errors="replace", start_new_session=True) as process:
        _running.add(process)
        try:
            _, said = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise
        finally:
            _running.discard(process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def stop() -> None:
    """Kill all running compilers and their child processes."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
