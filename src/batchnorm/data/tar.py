"""Read tar files, and check that they are complete."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

BLOCK = tarfile.BLOCKSIZE


def members(file: IO[bytes], name: str, start: int = 0, length: int | None = None) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files in an uncompressed tar file and check that it is complete.

    ``tarfile`` stops without an error at a damaged header, after the first of several concatenated archives, and at the
    end of a file that was cut off between two members. So this function checks that the archive ends with a block of
    zeros, and that only zeros follow that block.

    Args:
        file: a seekable file; the caller may read and seek it between two members.
        name: the file's name, for error messages.
        start, length: the archive's offset and length in the file; by default, the archive is the whole file.

    Raises:
        ValueError: if the file is not an uncompressed tar file, is cut off or damaged, has a sparse member, or has data
            after the archive's end.
    """
    stop = file.seek(0, os.SEEK_END) if length is None else start + length
    file.seek(start)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.issparse():  # tarfile reports the size of the extracted file, not of the stored data
                    raise ValueError(f"member {member.name!r:.80} is a sparse file")
                # A tar header can hold a negative size, which would make tarfile seek backwards forever.
                if not 0 <= member.size <= stop - member.offset_data:
                    raise ValueError(
                        f"member {member.name!r:.80} has a negative size or extends past the end of the archive"
                    )
                if member.isreg():
                    yield member
            end = tar.offset
        _check_end(file, end, stop)
    # For some damaged headers, tarfile raises errors other than TarError.
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError) as error:
        raise ValueError(f"{name} is not a complete, uncompressed tar file ({error}): copy or pack it again") from error


def read_at(path: Path, offset: int, length: int) -> bytes:
    """Return a part of a file.

    The file is opened and closed in each call, so that forked workers share no file descriptors, and a process cannot
    run out of them.
    """
    with path.open("rb") as file:  # buffered, because an unbuffered read may return fewer bytes
        file.seek(offset)
        return file.read(length)


def _check_end(file: IO[bytes], end: int, stop: int) -> None:
    file.seek(end)
    block = file.read(min(BLOCK, stop - end))
    if len(block) < BLOCK:
        raise ValueError(f"the archive ends at byte {stop:,} without an end-of-archive marker")
    if any(block):
        raise ValueError(f"the header at byte {end:,} is damaged")
    while block := file.read(min(1 << 20, stop - file.tell())):
        if any(block):
            raise ValueError(f"data follows the end-of-archive marker at byte {end:,}, as in concatenated archives")
