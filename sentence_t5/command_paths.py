"""Paths that a command's flags name: refused at once if they can't be read or written.

The system's own errors say neither which flag a path is of nor what it should be, and
come after hours where a file is written last.
"""

import os


def check_file(flag: str, path: str, expected: str) -> None:
    """Refuses what can't be read as a file; pipes and devices can.

    Args:
        flag: that names it, such as ``--input``.
        path: what it names.
        expected: what it should be, such as "a text file".

    Raises:
        ValueError: there is no such file, it is a folder, or it may not be read.
    """
    if not os.path.exists(path):
        problem = "there is no such file"
    elif os.path.isdir(path):
        problem = "that is a folder"
    elif not os.access(path, os.R_OK):
        problem = "it may not be read"
    else:
        return
    raise ValueError(f"{flag}={path}: {problem}, expected {expected}.")


def check_folder(flag: str, path: str, expected: str) -> None:
    """Refuses what is no folder.

    Args:
        flag: that names it.
        path: what it names.
        expected: what it should be, such as "a folder of texts".

    Raises:
        ValueError: there is no such folder.
    """
    if not os.path.isdir(path):
        raise ValueError(
            f"{flag}={path}: there is no such folder, expected {expected}."
        )


def check_target(flag: str, path: str) -> None:
    """Refuses a name that no file could be written to.

    Args:
        flag: that names it, such as ``--output``.
        path: what it names; a file that is there will be replaced.

    Raises:
        ValueError: the folder isn't there or takes no files, or the name is that of a
            folder or a device.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ValueError(f"{flag}={path}: there is no folder {folder}. Make it.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{flag}={path}: {folder} takes no files. Name another.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{flag}={path}: that is no file. Name one to write.")
