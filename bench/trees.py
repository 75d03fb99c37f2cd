"""Sample trees for the sync benchmark, generated from a seed: the same bytes on every machine."""

import math
import os
import pathlib
import random

SEED = 20
TEXT_BYTES = 4 << 20  # source of the text in all files
PIECE_BYTES = 16 << 20
LINE_WORDS = 9
SMALL_BYTES = 4096
# Sizes like a kernel's sources: most files have a few kilobytes, a few are very long.
MEDIAN_BYTES, SPREAD, MOST_BYTES = 5000, 1.3, 1 << 20
FILES_OF_A_FOLDER = 15


def words(dice):
    """Text that compresses like source code."""
    known = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz_", k=dice.randint(2, 12))) for _ in range(4000)]
    lines, size = [], 0
    while size < TEXT_BYTES:
        line = "\t" * dice.randint(0, 3) + " ".join(dice.choices(known, k=LINE_WORDS)) + ";\n"
        lines.append(line)
        size += len(line)
    return "".join(lines).encode()


def small(directory, files):
    """Many small files, a hundred per folder."""
    dice = random.Random(SEED)
    text = words(dice)
    for number in range(files):
        write(directory / f"d{number // 100:03d}" / f"f{number:05d}.txt", text, dice, SMALL_BYTES, number)


def kernel(directory, files):
    """Nested folders, as deep and as full as a kernel's sources."""
    dice = random.Random(SEED + 1)
    text = words(dice)
    folder = pathlib.Path(".")
    for number in range(files):
        if number % FILES_OF_A_FOLDER == 0:
            folder = pathlib.Path(*(f"{level}{dice.randrange(12):02d}" for level in "abcd"[:dice.randint(1, 4)]))
        size = min(MOST_BYTES, int(dice.lognormvariate(math.log(MEDIAN_BYTES), SPREAD)) + 1)
        write(directory / folder / f"s{number:05d}.c", text, dice, size, number)


def large(directory, size):
    """One incompressible file."""
    dice = random.Random(SEED + 2)
    directory.mkdir(parents=True)
    with (directory / "large.bin").open("wb") as file:
        for at in range(0, size, PIECE_BYTES):
            file.write(dice.randbytes(min(PIECE_BYTES, size - at)))


def write(path, text, dice, size, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    at = dice.randrange(len(text) - min(size, len(text) - 1))
    # All files differ, so that a tool cannot copy one from another.
    path.write_bytes((b"/* %d */\n" % number + text[at:at + size])[:size])


def measure(directory):
    """The number of files and bytes of a tree, without the temporary files of a sync that has just ended."""
    found = (pathlib.Path(top) / name for top, _, names in os.walk(directory) if ".cobox-sync" not in top for name in names)
    sizes = [path.stat().st_size for path in found]
    return len(sizes), sum(sizes)
